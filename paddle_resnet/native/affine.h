// Operators for y = s x + b, where one scale s and one bias b apply to all elements, and for its gradients. The
// operators check arguments and allocate results, and then launch the kernels in affine.cu or, on the CPU, call the
// reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu.h"
#include "pool.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// The number of full vectors of a tensor of any shape, and of the elements that follow them.
struct VectorsAndRest {
  unsigned vectors;
  int rest;
  explicit VectorsAndRest(const Tensor &x) {
    const int64_t lanes = kVectorBytes / static_cast<int64_t>(phi::SizeOf(x.dtype())), count = x.numel() / lanes;
    if (count >= INT32_MAX) PD_THROW("custom affine: requires fewer than 2^31 - 1 vectors");
    vectors = static_cast<unsigned>(count);
    rest = static_cast<int>(x.numel() % lanes);
  }
};

// Throws unless a tensor has one element, in the type and on the device of x.
void require_number(const Tensor &x, const Tensor &number, const char *what) {
  if (number.numel() != 1 || number.dtype() != x.dtype() || number.is_gpu() != x.is_gpu())
    PD_THROW("custom affine: requires a ", what, " with one element, in the type and on the device of the input");
}

// Returns y = scale x + bias.
std::vector<Tensor> Affine(const Tensor &x, const Tensor &scale, const Tensor &bias) {
  require_number(x, scale, "scale");
  require_number(x, bias, "bias");
  Tensor y = empty_as(x);
  if (x.is_gpu()) {
    VectorsAndRest size(x);
    void *in = raw(x), *s = raw(scale), *b = raw(bias), *out = raw(y);
    Gpu::get().launch("affine" + suffix(x), x, pool_grid(size.vectors + (size.rest > 0)), kPoolBlock,
                      {&in, &s, &b, &size.vectors, &size.rest, &out});
    return {y};
  }
  require_float32(x);
  reference::affine(data<float>(x), *data<float>(scale), *data<float>(bias), x.numel(), data<float>(y));
  return {y};
}

// Returns dx, dscale and dbias. If `into` is set, dscale and dbias are written to the tensors in `into`, which are
// located in the buffer of a fused all-reduce.
std::vector<Tensor> AffineBackward(const Tensor &x, const Tensor &scale, const Tensor &dy,
                                   const paddle::optional<Tensors> &into) {
  require_number(x, scale, "scale");
  require_like(x, dy, "gradient");
  Tensor dx = empty_as(x), dscale = into ? into->at(0) : empty_as(scale), dbias = into ? into->at(1) : empty_as(scale);
  require_number(x, dscale, "gradient of the scale");
  require_number(x, dbias, "gradient of the bias");
  if (x.is_gpu()) {
    VectorsAndRest size(x);
    void *in = raw(x), *gradient = raw(dy), *s = raw(scale), *out = raw(dx), *ds = raw(dscale), *db = raw(dbias);
    void *partial = Gpu::get().partial(), *arrivals = Gpu::get().arrivals();
    const unsigned filled = (size.vectors + kMaxThreads - 1) / kMaxThreads;  // blocks whose threads have a vector
    const unsigned blocks = std::clamp<unsigned>(filled, 1, Gpu::get().blocks());
    Gpu::get().launch("affine_gradient" + suffix(x), x, {blocks, 1}, {kMaxThreads, 1},
                      {&in, &gradient, &s, &size.vectors, &size.rest, &out, &ds, &db, &partial, &arrivals});
    return {dx, dscale, dbias};
  }
  require_float32(x);
  reference::affine_gradient(data<float>(x), data<float>(dy), *data<float>(scale), x.numel(), data<float>(dx),
                             data<float>(dscale), data<float>(dbias));
  return {dx, dscale, dbias};
}

}  // namespace
