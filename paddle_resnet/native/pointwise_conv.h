// Operators for 1x1 convolutions: the convolution with BN in evaluation, and the filter gradient of convolutions whose
// input or output has few channels. The operators check arguments and allocate the result, and then launch a kernel in
// pointwise_conv.cu or, on the CPU, call the reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "batch_norm.h"
#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the gradient [OC, C, 1, 1] of the filter. `x` is [N, H, W, C], and `dy` is [N, H, W, OC]. If `into` is set,
// the gradient is written to the tensor in `into`, which is located in the buffer of a fused all-reduce.
std::vector<Tensor> PointwiseFilterGradient(const Tensor &x, const Tensor &dy, const paddle::optional<Tensors> &into) {
  int in = static_cast<int>(x.shape().back()), out = static_cast<int>(dy.shape().back());
  const int64_t all_rows = x.numel() / in;
  if (dy.dtype() != x.dtype() || dy.numel() / out != all_rows)
    PD_THROW("custom 1x1 convolution: the gradient differs from the input in type or number of pixels");
  if (all_rows > INT32_MAX / 2) PD_THROW("custom 1x1 convolution: requires fewer than 2^30 pixels");
  int rows = static_cast<int>(all_rows);
  Tensor dfilter = into ? into->at(0) : paddle::empty({out, in, 1, 1}, x.dtype(), x.place());
  if (dfilter.dtype() != x.dtype() || dfilter.numel() != static_cast<int64_t>(in) * out)
    PD_THROW("custom 1x1 convolution: the type or shape of the gradient's memory does not match the filter");
  if (x.is_gpu()) {
    const bool widens = out >= in;
    int wide = widens ? out : in, narrow = widens ? in : out;
    if (narrow > kNarrowChannels || narrow % 4 != 0 || x.dtype() == DataType::FLOAT32)
      PD_THROW("custom 1x1 convolution: requires half precision, a multiple of 4 channels up to ", kNarrowChannels,
               " on one side and a multiple of 4 on the other");
    const Shape wider(widens ? dy : x);
    int wide_stride = widens ? 1 : out, narrow_stride = widens ? out : 1;  // strides in the sums [in, out]
    const int warps = kPointwiseThreads / 32, chunks = (rows + kChunkRows - 1) / kChunkRows;
    const int groups = (wide + kWideChannels - 1) / kWideChannels;
    int slabs = std::min(std::max(1, Gpu::get().blocks() / groups), (chunks + warps - 1) / warps);
    Tensor partial = empty_floats({slabs, in, out}, x);
    void *wide_from = raw(widens ? dy : x), *narrow_from = raw(widens ? x : dy), *sums = raw(dfilter);
    float *partials = data<float>(partial);
    Gpu::get().launch("pointwise_filter_gradient" + wider.suffix, x,
                      {static_cast<unsigned>(groups), static_cast<unsigned>(slabs)},
                      {32, static_cast<unsigned>(warps)},
                      {&wide_from, &narrow_from, &rows, &wide, &narrow, &wide_stride, &narrow_stride, &partials});
    const unsigned blocks = (in * out + kFilterSumLanes - 1) / kFilterSumLanes;
    Gpu::get().launch("depthwise_filter_sum" + suffix(x), x, {blocks, 1}, {kFilterSumLanes, kFilterSumRows},
                      {&partials, &slabs, &in, &out, &sums});
    return {dfilter};
  }
  require_float32(x);
  reference::pointwise_filter_gradient(data<float>(x), data<float>(dy), rows, in, out, data<float>(dfilter));
  return {dfilter};
}

int processors() { return Gpu::get().blocks() / kBlocksPerProcessor; }
int tiles_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Returns the number of output channels that a block computes: the number that minimizes the estimated time of the
// multiprocessor with the most blocks. Each group of channels reads the input again, which the estimate counts as 32
// more channels.
int pointwise_columns(int rows, int out) {
  const auto cost = [=](int columns) {
    const int64_t blocks = int64_t{tiles_of(rows)} * ((out + columns - 1) / columns);
    return (blocks + processors() - 1) / processors() * (columns + 32);
  };
  int best = 128;
  for (int columns : {64, 32}) {
    if (cost(columns) < cost(best)) best = columns;
  }
  return best;
}

// Returns y = A(BN(x * filter) [+ z]) [N, H, W, OC], computed with the running statistics. A is the activation. `x` is
// [N, H, W, C], and `filter` is [OC, C, 1, 1]. On a GPU, the kernel rounds float32 factors to TF32.
std::vector<Tensor> PointwiseConvBnInference(const Tensor &x, const Tensor &filter, const Tensor &scale,
                                             const Tensor &bias, const Tensor &mean, const Tensor &variance,
                                             const paddle::optional<Tensor> &z, float epsilon,
                                             const std::string &activation) {
  int in = static_cast<int>(x.shape().back()), out = static_cast<int>(filter.shape()[0]);
  if (filter.dtype() != x.dtype() || filter.shape() != std::vector<int64_t>{out, in, 1, 1})
    PD_THROW("custom 1x1 convolution: requires a filter [OC, C, 1, 1] of the input's type");
  for (const Tensor *parameter : {&scale, &bias, &mean, &variance}) {
    if (parameter->numel() != out) PD_THROW("custom 1x1 convolution: BN requires one value per output channel");
  }
  auto shape = x.shape();
  shape.back() = out;
  Tensor y = paddle::empty(shape, x.dtype(), x.place());
  if (z) require_like(y, *z, "addend");
  if (x.is_gpu()) {
    const Shape input(x), output(y);
    FixedBn bn = {data<float>(scale), data<float>(bias),   data<float>(mean), data<float>(variance),
                  epsilon,            code_of(activation == "linear" ? "" : activation)};
    void *from = raw(x), *weights = raw(filter), *added = z ? raw(*z) : nullptr, *to = raw(y);
    int rows = input.rows;
    const int columns = pointwise_columns(rows, out), groups = (out + columns - 1) / columns;
    const int blocks = processors() * (columns < 128 ? kNarrowTileBlocks : kBlocksPerProcessor);
    const int row_groups = std::min(std::max(1, blocks / groups), tiles_of(rows));
    Gpu::get().launch("pointwise_conv_" + std::to_string(columns) + (in % 8 == 0 ? output : input).suffix, x,
                      {static_cast<unsigned>(groups), static_cast<unsigned>(row_groups)}, {kPointwiseThreads, 1},
                      {&from, &weights, &added, &rows, &in, &out, &bn, &to});
    return {y};
  }
  require_float32(x);
  const Shape size(x);
  reference::pointwise_conv(data<float>(x), data<float>(filter), size.rows, in, out, data<float>(y));
  with_activation(activation, [&](auto a) {
    reference::bn_infer(a, data<float>(y), z ? data<float>(*z) : nullptr, size.rows, out, data<float>(scale),
                        data<float>(bias), data<float>(mean), data<float>(variance), epsilon, data<float>(y));
  });
  return {y};
}

}  // namespace
