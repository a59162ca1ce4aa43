// Operators for batch normalization, fused with the next activation or the residual addition. The operators check
// arguments and allocate results, and then launch the kernels in batch_norm.cu or, on the CPU, call the reference
// implementation. batch_norm.cu describes the algorithm, and reference/batch_norm.h describes the layouts of the
// coefficients and the mask.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the kernel name suffix for the operations that are fused with BN: an activation, or the residual addition and
// an activation. In the backward pass of a residual addition, `summands` is the number of gradients to add, 1 or 2.
std::string fused(int summands, const std::string &activation) {
  if (summands > 0) return "_add_" + activation + (summands == 1 ? "" : "_two");
  return activation.empty() ? "" : "_" + activation;
}

// Calls a function with the activation named `name`; an empty name or "linear" means no activation.
template <class Function>
void with_activation(const std::string &name, Function call) {
  if (name.empty() || name == "linear") return call(activation::linear());
#define CALL(A) \
  if (name == #A) return call(activation::A());
  FOR_EACH_ACTIVATION(CALL)
#undef CALL
  PD_THROW("custom operator: unknown activation ", name);
}

// Returns the number of the activation named `name`; an empty name means no activation.
activation::Code code_of(const std::string &name) {
#define RETURN(A) \
  if (name == #A) return activation::k_##A;
  FOR_EACH_ACTIVATION(RETURN)
#undef RETURN
  if (!name.empty()) PD_THROW("custom operator: unknown activation ", name);
  return activation::k_linear;
}

// Throws an exception unless there is a kernel that fuses the residual addition with this activation.
void require_added(const std::string &activation) {
#define RETURN(A) \
  if (activation == #A) return;
  RETURN(relu)
  FOR_EACH_ADDED_ACTIVATION(RETURN)
#undef RETURN
  PD_THROW("custom BN: no kernel for the residual addition with activation ", activation);
}

// A grid that fills the GPU. Each block processes one group of channels and iterates over rows. If `rows_per_thread` is
// not 0, blocks are smaller for a tensor whose rows would otherwise not fill the GPU.
struct RowGrid {
  std::vector<unsigned> grid, block;
  explicit RowGrid(const Shape &shape, int rows_per_thread = 0) {
    int lanes = std::min(shape.vectors, kMaxLanes);
    while (shape.vectors % lanes != 0) --lanes;
    const int groups = shape.vectors / lanes;
    int height = kMaxThreads / lanes, tile_rows = height;
    if (groups > kMaxChannelGroups) PD_THROW("custom operator: ", shape.channels, " channels are not supported");
    const int row_groups = std::max(1, Gpu::get().blocks() / groups);
    if (rows_per_thread > 0) {
      while (lanes * height > kSmallThreads && shape.rows <= (row_groups - 1) * height * rows_per_thread) height /= 2;
      tile_rows = height * rows_per_thread;
    }
    block = {static_cast<unsigned>(lanes), static_cast<unsigned>(height)};
    grid = {static_cast<unsigned>(groups),
            static_cast<unsigned>(std::min(row_groups, (shape.rows + tile_rows - 1) / tile_rows))};
  }
};

// Returns y = A(BN(x) [+ z]) for a training step, where A is the activation. Updates the running `mean` and `variance`
// in place. Allocates `coefficients` and, unless `mask` is null, the mask.
Tensor bn_train(const Tensor &x, const Tensor *z, const Tensor &scale, const Tensor &bias, Tensor &mean,
                Tensor &variance, float momentum, float epsilon, const std::string &activation, Tensor &coefficients,
                Tensor *mask) {
  const Shape shape(x);
  if (z) require_like(x, *z, "addend");
  coefficients = empty_floats({4, shape.channels}, x);
  Tensor y = empty_as(x);
  if (mask) {
    auto mask_shape = x.shape();  // one byte per vector of channels on a GPU, per channel on the CPU
    if (x.is_gpu()) mask_shape.back() = shape.vectors;
    *mask = paddle::empty(mask_shape, DataType::UINT8, x.place());
  }
  float *s = data<float>(scale), *b = data<float>(bias), *m = data<float>(mean), *v = data<float>(variance);
  float *c = data<float>(coefficients);
  if (x.is_gpu()) {
    const RowGrid grid(shape);
    void *in = raw(x), *added = z ? raw(*z) : nullptr, *out = raw(y), *bits = mask ? raw(*mask) : nullptr;
    void *partial = Gpu::get().partial(), *arrivals = Gpu::get().arrivals();
    int rows = shape.rows;
    Gpu::get().launch("bn_statistics" + shape.suffix, x, grid.grid, grid.block,
                      {&in, &rows, &s, &b, &m, &v, &momentum, &epsilon, &c, &partial, &arrivals});
    Gpu::get().launch("bn_apply" + fused(z ? 1 : 0, activation) + shape.suffix, x, grid.grid, grid.block,
                      {&in, &added, &rows, &c, &out, &bits});
    return y;
  }
  require_float32(x);
  reference::bn_statistics(data<float>(x), shape.rows, shape.channels, s, b, m, v, momentum, epsilon, c);
  with_activation(activation, [&](auto a) {
    reference::bn_apply(a, data<float>(x), z ? data<float>(*z) : nullptr, shape.rows, shape.channels, c,
                        c + shape.channels, data<float>(y), mask ? data<uint8_t>(*mask) : nullptr);
  });
  return y;
}

std::vector<Tensor> BnAct(const Tensor &x, const Tensor &scale, const Tensor &bias, Tensor &mean, Tensor &variance,
                          float momentum, float epsilon, const std::string &activation) {
  Tensor coefficients;
  Tensor y = bn_train(x, nullptr, scale, bias, mean, variance, momentum, epsilon, activation, coefficients, nullptr);
  return {y, coefficients};
}

std::vector<Tensor> BnAddRelu(const Tensor &x, const Tensor &z, const Tensor &scale, const Tensor &bias, Tensor &mean,
                              Tensor &variance, float momentum, float epsilon) {
  Tensor coefficients, mask;
  Tensor y = bn_train(x, &z, scale, bias, mean, variance, momentum, epsilon, "relu", coefficients, &mask);
  return {y, coefficients, mask};
}

std::vector<Tensor> BnAddAct(const Tensor &x, const Tensor &z, const Tensor &scale, const Tensor &bias, Tensor &mean,
                             Tensor &variance, float momentum, float epsilon, const std::string &activation) {
  require_added(activation);
  Tensor coefficients;
  Tensor y = bn_train(x, &z, scale, bias, mean, variance, momentum, epsilon, activation, coefficients, nullptr);
  return {y, coefficients};
}

// Returns dx. `gradients` contains the gradient of the output, or two gradients whose sum is this gradient. Without a
// residual addition, `mask`, `z` and `dz` are null. With a residual addition, this function allocates `dz`, ReLU
// requires `mask`, and other activations except linear require the addend `z`. The gradients of scale and bias are
// written to `dscale` and `dbias`, which the caller allocates.
Tensor bn_backward(const Tensor &x, const Tensors &gradients, const Tensor &coefficients, const Tensor *mask,
                   const Tensor *z, const std::string &activation, Tensor *dz, Tensor &dscale, Tensor &dbias) {
  const Shape shape(x);
  Tensor dx = empty_as(x);
  if (dz) *dz = empty_as(x);
  if (gradients.empty() || gradients.size() > (dz ? 2 : 1))
    PD_THROW("custom BN gradient: expected one gradient, or up to two after a residual addition");
  for (const Tensor &gradient : gradients) require_like(x, gradient, "gradient");
  if (mask && mask->numel() != x.numel() / (x.is_gpu() ? shape.lanes : 1))
    PD_THROW("custom BN gradient: the size of the mask does not match the input");
  if (z) require_like(x, *z, "addend");
  float *c = data<float>(coefficients), *ds = data<float>(dscale), *db = data<float>(dbias);
  const bool has_two = gradients.size() > 1;
  if (x.is_gpu()) {
    const RowGrid grid(shape);
    Tensor applied = empty_floats({2, shape.channels}, x);
    void *in = raw(x), *first = raw(gradients[0]), *second = has_two ? raw(gradients[1]) : nullptr;
    void *bits = mask ? raw(*mask) : nullptr, *added = z ? raw(*z) : nullptr;
    void *masked = dz ? raw(*dz) : nullptr, *out = raw(dx);
    void *partial = Gpu::get().partial(), *arrivals = Gpu::get().arrivals();
    float *ap = data<float>(applied);
    int rows = shape.rows;
    const int summands = dz ? gradients.size() : 0;
    Gpu::get().launch("bn_reduce" + fused(summands, activation) + shape.suffix, x, grid.grid, grid.block,
                      {&in, &first, &second, &bits, &added, &rows, &c, &masked, &ds, &db, &ap, &partial, &arrivals});
    Gpu::get().launch("bn_gradient" + fused(0, dz ? "" : activation) + shape.suffix, x, grid.grid, grid.block,
                      {&in, dz ? &masked : &first, &rows, &c, &ap, &out});
    return dx;
  }
  require_float32(x);
  with_activation(activation, [&](auto a) {
    reference::bn_gradient(a, data<float>(x), data<float>(gradients[0]),
                           has_two ? data<float>(gradients[1]) : nullptr, mask ? data<uint8_t>(*mask) : nullptr,
                           z ? data<float>(*z) : nullptr, shape.rows, shape.channels, c,
                           dz ? data<float>(*dz) : nullptr, ds, db, data<float>(dx));
  });
  return dx;
}

// Sets the tensors to which the gradients of scale and bias will be written. If `into` is set, these are the tensors in
// `into`, which are located in the buffer of a fused all-reduce; otherwise, they are new tensors.
void gradient_targets(const paddle::optional<Tensors> &into, const Tensor &coefficients, Tensor &dscale,
                      Tensor &dbias) {
  const int64_t channels = coefficients.shape().back();
  dscale = into ? into->at(0) : empty_floats({channels}, coefficients);
  dbias = into ? into->at(1) : empty_floats({channels}, coefficients);
}

std::vector<Tensor> BnActBackward(const Tensor &x, const Tensor &dy, const Tensor &coefficients,
                                  const paddle::optional<Tensors> &into, const std::string &activation) {
  Tensor dscale, dbias;
  gradient_targets(into, coefficients, dscale, dbias);
  Tensor dx = bn_backward(x, {dy}, coefficients, nullptr, nullptr, activation, nullptr, dscale, dbias);
  return {dx, dscale, dbias};
}

std::vector<Tensor> BnAddReluBackward(const Tensor &x, const Tensors &dy, const Tensor &coefficients,
                                      const Tensor &mask, const paddle::optional<Tensors> &into) {
  Tensor dz, dscale, dbias;
  gradient_targets(into, coefficients, dscale, dbias);
  Tensor dx = bn_backward(x, dy, coefficients, &mask, nullptr, "relu", &dz, dscale, dbias);
  return {dx, dz, dscale, dbias};
}

std::vector<Tensor> BnAddActBackward(const Tensor &x, const Tensor &z, const Tensors &dy, const Tensor &coefficients,
                                     const paddle::optional<Tensors> &into, const std::string &activation) {
  require_added(activation);
  Tensor dz, dscale, dbias;
  gradient_targets(into, coefficients, dscale, dbias);
  Tensor dx = bn_backward(x, dy, coefficients, nullptr, &z, activation, &dz, dscale, dbias);
  return {dx, dz, dscale, dbias};
}

// Returns y = A(BN(x) [+ z]), computed with the running statistics. A is the activation.
std::vector<Tensor> BnInference(const Tensor &x, const Tensor &scale, const Tensor &bias, const Tensor &mean,
                                const Tensor &variance, const paddle::optional<Tensor> &z, float epsilon,
                                const std::string &activation) {
  const Shape shape(x);
  if (z) require_added(activation), require_like(x, *z, "addend");
  Tensor y = empty_as(x);
  float *s = data<float>(scale), *b = data<float>(bias), *m = data<float>(mean), *v = data<float>(variance);
  if (x.is_gpu()) {
    const RowGrid grid(shape, z ? kAddedRows : kAppliedRows);
    void *in = raw(x), *added = z ? raw(*z) : nullptr, *out = raw(y);
    int rows = shape.rows;
    Gpu::get().launch("bn_infer" + fused(z ? 1 : 0, activation) + shape.suffix, x, grid.grid, grid.block,
                      {&in, &added, &rows, &s, &b, &m, &v, &epsilon, &out});
    return {y};
  }
  require_float32(x);
  with_activation(activation, [&](auto a) {
    reference::bn_infer(a, data<float>(x), z ? data<float>(*z) : nullptr, shape.rows, shape.channels, s, b, m, v,
                        epsilon, data<float>(y));
  });
  return {y};
}

}  // namespace
