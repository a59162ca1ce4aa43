// Helpers that all operators use: checks, allocation, and raw pointers of tensors.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"
#include "paddle/phi/api/all.h"

using paddle::DataType;
using paddle::Tensor;
using Tensors = std::vector<Tensor>;

namespace {

// Elements of a 16-byte vector.
int vector_lanes(const Tensor &x) { return kVectorBytes / static_cast<int>(phi::SizeOf(x.dtype())); }

// The end of a kernel's name, which says its data type.
std::string suffix(const Tensor &x) {
  switch (x.dtype()) {
    case DataType::FLOAT32:
      return "_f32";
    case DataType::FLOAT16:
      return "_f16";
    case DataType::BFLOAT16:
      return "_bf16";
    default:
      PD_THROW("fused operators take float32, float16 and bfloat16");
  }
}

// [N, H, W, C] seen as [rows, channels] = [N * H * W, C], channels contiguous.
struct Shape {
  int rows, channels;
  explicit Shape(const Tensor &x) {
    channels = static_cast<int>(x.shape().back());
    const int64_t all_rows = x.numel() / channels;
    if (channels % vector_lanes(x) != 0) PD_THROW("fused operators need channels in whole vectors of 16 bytes");
    if (all_rows > INT32_MAX / 2) PD_THROW("fused operators take less than 2^30 rows");
    rows = static_cast<int>(all_rows);
  }
};

// Kernels take the shape of the main tensor `x` for all their tensors.
void require_like(const Tensor &x, const Tensor &other, const char *what) {
  if (other.dtype() != x.dtype() || other.shape() != x.shape())
    PD_THROW("a fused operator's ", what, " is not of the type and shape of its main tensor");
}

// The reference loops are float32 only.
void require_float32(const Tensor &x) {
  if (x.dtype() != DataType::FLOAT32) PD_THROW("fused operators on the CPU are float32 only");
}

// Pointers to a tensor's elements, on the tensor's device.
template <class T>
T *data(const Tensor &x) {
  return const_cast<T *>(x.data<T>());
}
void *raw(const Tensor &x) { return const_cast<void *>(x.data()); }

// New tensors on the device of the given one.
Tensor empty_as(const Tensor &x) { return paddle::empty(x.shape(), x.dtype(), x.place()); }
Tensor empty_floats(std::vector<int64_t> shape, const Tensor &on) {
  return paddle::empty(shape, DataType::FLOAT32, on.place());
}

}  // namespace
