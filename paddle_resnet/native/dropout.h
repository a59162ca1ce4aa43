// The dropout operator, which also computes its own gradient. On a GPU, the operator launches the kernel in dropout.cu;
// on the CPU, it calls the reference implementation.

#pragma once

#include <cstdint>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Sets each element of x to 0 with probability `rate`, and divides all other elements by 1 - rate. The seed (int32)
// determines which elements are set to 0.
std::vector<Tensor> DropOut(const Tensor &x, const Tensor &seed, float rate) {
  if (x.numel() > INT32_MAX) PD_THROW("custom dropout: requires fewer than 2^31 elements");
  if (seed.dtype() != DataType::INT32 || seed.numel() != 1 || seed.is_gpu() != x.is_gpu())
    PD_THROW("custom dropout: requires one int32 seed on the device of its input");
  Dropout rule = {static_cast<unsigned>(rate * 4294967296.), 1 / (1 - rate)};
  int size = static_cast<int>(x.numel());
  Tensor y = empty_as(x);
  int *key = data<int>(seed);
  if (x.is_gpu()) {
    void *in = raw(x), *out = raw(y);
    const unsigned blocks = static_cast<unsigned>((x.numel() + kDropoutThreads - 1) / kDropoutThreads);
    Gpu::get().launch("dropout" + suffix(x), x, {blocks, 1}, {kDropoutThreads, 1}, {&in, &key, &rule, &size, &out});
    return {y};
  }
  require_float32(x);
  reference::dropout(data<float>(x), size, rule, *key, data<float>(y));
  return {y};
}

}  // namespace
