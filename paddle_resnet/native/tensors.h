// Helpers that all operators use to check tensors, allocate tensors and get raw pointers.

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

// Returns the kernel name suffix for the data type of a tensor.
std::string suffix(const Tensor &x) {
  switch (x.dtype()) {
    case DataType::FLOAT32:
      return "_f32";
    case DataType::FLOAT16:
      return "_f16";
    case DataType::BFLOAT16:
      return "_bf16";
    default:
      PD_THROW("custom operator: requires float32, float16 or bfloat16");
  }
}

// A tensor [N, H, W, C] viewed as [rows, channels] = [N * H * W, C], with contiguous channels. A row consists of
// `vectors` vectors of `lanes` elements. A vector has 16 bytes, or 8 bytes if the data type is half precision and the
// number of channels is a multiple of 4, but not of 8. `suffix` is the kernel name suffix for the data type and vector
// size.
struct Shape {
  int rows, channels, lanes, vectors, vector_bytes;
  std::string suffix;
  explicit Shape(const Tensor &x) : suffix(::suffix(x)) {
    channels = static_cast<int>(x.shape().back());
    const int64_t all_rows = x.numel() / channels;
    const int element_bytes = static_cast<int>(phi::SizeOf(x.dtype()));
    lanes = kVectorBytes / element_bytes;
    if (channels % 4 != 0) PD_THROW("custom operator: requires a multiple of 4 channels");
    if (channels % lanes != 0) lanes = 4, suffix += "x4";
    vectors = channels / lanes;
    vector_bytes = lanes * element_bytes;
    if (all_rows > INT32_MAX / 2) PD_THROW("custom operator: requires fewer than 2^30 rows");
    rows = static_cast<int>(all_rows);
  }
};

// Throws if `other` and `x` differ in shape or type, because kernels use the shape and type of `x` for all tensors.
void require_like(const Tensor &x, const Tensor &other, const char *what) {
  if (other.dtype() != x.dtype() || other.shape() != x.shape())
    PD_THROW("custom operator: the type or shape of the ", what, " differs from that of the main tensor");
}

// Throws if a tensor is not float32, because the reference loops support only float32.
void require_float32(const Tensor &x) {
  if (x.dtype() != DataType::FLOAT32) PD_THROW("custom operator: supports only float32 on the CPU");
}

// Return a pointer to the elements of a tensor in device memory (or in host memory for a CPU tensor).
template <class T>
T *data(const Tensor &x) {
  return const_cast<T *>(x.data<T>());
}
void *raw(const Tensor &x) { return const_cast<void *>(x.data()); }

// Return a new, uninitialized tensor on the device of an existing tensor.
Tensor empty_as(const Tensor &x) { return paddle::empty(x.shape(), x.dtype(), x.place()); }
Tensor empty_floats(std::vector<int64_t> shape, const Tensor &on) {
  return paddle::empty(shape, DataType::FLOAT32, on.place());
}

}  // namespace
