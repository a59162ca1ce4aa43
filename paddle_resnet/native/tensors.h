// What all operators do with tensors.

#pragma once

#include <string>
#include <vector>

#include "common.h"
#include "paddle/phi/api/all.h"

using paddle::DataType;
using paddle::Tensor;
using Tensors = std::vector<Tensor>;

namespace {

int vector_lanes(const Tensor &x) { return kVectorBytes / static_cast<int>(phi::SizeOf(x.dtype())); }

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

// The kernels know sizes only from one of their tensors.
void require_like(const Tensor &x, const Tensor &other, const char *what) {
  if (other.dtype() != x.dtype() || other.shape() != x.shape())
    PD_THROW("a fused operator's ", what, " is not of the type and shape of its main tensor");
}

template <class T>
T *data(const Tensor &x) {
  return const_cast<T *>(x.data<T>());
}
void *raw(const Tensor &x) { return const_cast<void *>(x.data()); }

Tensor empty_as(const Tensor &x) { return paddle::empty(x.shape(), x.dtype(), x.place()); }
Tensor empty_floats(std::vector<int64_t> shape, const Tensor &on) {
  return paddle::empty(shape, DataType::FLOAT32, on.place());
}

void require_float32(const Tensor &x) {
  if (x.dtype() != DataType::FLOAT32) PD_THROW("fused operators on the CPU are float32 only");
}

}  // namespace
