// Operators for the depthwise convolution and its gradients. The operators check arguments and allocate results, and
// then launch the kernels in depthwise_conv.cu or, on the CPU, call the reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "batch_norm.h"
#include "gpu.h"
#include "pool.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

Window depthwise_window(const Tensor &x, const Shape &shape, const Tensor &filter, int stride, int padding,
                        int padding_end) {
  const int channels = shape.channels, kernel = filter.shape()[2];
  if (filter.dtype() != x.dtype() || filter.shape() != std::vector<int64_t>{channels, 1, kernel, kernel})
    PD_THROW("custom depthwise convolution: requires a filter [C, 1, K, K] of the input's type");
  if ((kernel != 3 && kernel != 5) || (stride != 1 && stride != 2) || padding < 0 || padding_end < 0)
    PD_THROW("custom depthwise convolution: requires kernel 3 or 5, stride 1 or 2, and padding of 0 or more");
  if (x.numel() / shape.lanes > INT32_MAX)
    PD_THROW("custom depthwise convolution: requires fewer than 2^31 vectors of channels");
  return window_of(x.shape()[1], x.shape()[2], kernel, stride, padding, padding_end, shape.vectors);
}

// A grid that fills the GPU. Each block processes one group of channels and one slab of tasks. `sharing` is the number
// of threads that process the same task and the same channels.
struct SlabGrid {
  std::vector<unsigned> grid, block;
  SlabGrid(const Shape &shape, int tasks, int sharing) {
    int lanes = std::min(shape.vectors, kMaxDepthwiseBytes / shape.vector_bytes);
    while (shape.vectors % lanes != 0) --lanes;
    const int groups = shape.vectors / lanes, height = kDepthwiseThreads / (lanes * sharing);
    const int slabs = std::max(1, 2 * Gpu::get().blocks() / groups);
    block = {static_cast<unsigned>(lanes), static_cast<unsigned>(height * sharing)};
    grid = {static_cast<unsigned>(groups), static_cast<unsigned>(std::min(slabs, (tasks + height - 1) / height))};
  }
};

// Returns the number of tasks. Each task is a group of adjacent pixels in a row.
int depthwise_tasks(int batch, int height, int width) {
  return batch * height * ((width + kDepthwisePixels - 1) / kDepthwisePixels);
}

std::string depthwise_kernel(const char *name, const Window &window, const Shape &shape) {
  return name + ("_k" + std::to_string(window.kernel)) + "_s" + std::to_string(window.stride) + shape.suffix;
}

// Returns y [N, OH, OW, C]. `filter` is [C, 1, K, K]. If bn.scale is not null, also applies BN and the activation.
Tensor depthwise_conv(const Tensor &x, const Tensor &filter, int stride, int padding, int padding_end, FixedBn bn,
                      const std::string &activation) {
  const Shape shape(x);
  Window window = depthwise_window(x, shape, filter, stride, padding, padding_end);
  const int batch = x.shape()[0], channels = shape.channels;
  Tensor y = paddle::empty({batch, window.out_height, window.out_width, channels}, x.dtype(), x.place());
  if (x.is_gpu()) {
    int tasks = depthwise_tasks(batch, window.out_height, window.out_width);
    const SlabGrid grid(shape, tasks, 1);
    void *in = raw(x), *taps = raw(filter), *out = raw(y);
    Gpu::get().launch(depthwise_kernel("depthwise_conv", window, shape), x, grid.grid, grid.block,
                      {&in, &taps, &tasks, &window, &bn, &out});
    return y;
  }
  require_float32(x);
  float *to = data<float>(y);
  reference::depthwise_conv(data<float>(x), data<float>(filter), batch, channels, window, to);
  if (bn.scale) {
    const int rows = batch * window.out_height * window.out_width;
    with_activation(activation, [&](auto a) {
      reference::bn_infer(a, to, nullptr, rows, channels, bn.scale, bn.bias, bn.mean, bn.variance, bn.epsilon, to);
    });
  }
  return y;
}

std::vector<Tensor> DepthwiseConv(const Tensor &x, const Tensor &filter, int stride, int padding, int padding_end) {
  return {depthwise_conv(x, filter, stride, padding, padding_end, {}, "")};
}

std::vector<Tensor> DepthwiseConvBnInference(const Tensor &x, const Tensor &filter, const Tensor &scale,
                                             const Tensor &bias, const Tensor &mean, const Tensor &variance,
                                             int stride, int padding, int padding_end, float epsilon,
                                             const std::string &activation) {
  const FixedBn bn = {data<float>(scale), data<float>(bias),   data<float>(mean), data<float>(variance),
                      epsilon,            code_of(activation)};
  return {depthwise_conv(x, filter, stride, padding, padding_end, bn, activation)};
}

// Returns dx and dfilter. If `into` is set, dfilter is written to the tensor in `into`, which is located in the buffer
// of a fused all-reduce.
std::vector<Tensor> DepthwiseConvBackward(const Tensor &x, const Tensor &filter, const Tensor &dy,
                                          const paddle::optional<Tensors> &into, int stride, int padding,
                                          int padding_end) {
  const Shape shape(x);
  Window window = depthwise_window(x, shape, filter, stride, padding, padding_end);
  const int batch = x.shape()[0], channels = shape.channels;
  if (dy.dtype() != x.dtype() ||
      dy.shape() != std::vector<int64_t>{batch, window.out_height, window.out_width, channels})
    PD_THROW("custom depthwise convolution: requires a gradient with the type and shape of the output");
  Tensor dx = empty_as(x), dfilter = into ? into->at(0) : empty_as(filter);
  if (into) require_like(filter, dfilter, "memory for the gradient of the filter");
  if (x.is_gpu()) {
    void *in = raw(x), *taps = raw(filter), *gradient = raw(dy), *out = raw(dx), *sums = raw(dfilter);
    // The first task of each row begins `padding % stride` pixels to the left of the row; see depthwise_input_gradient.
    int tasks = depthwise_tasks(batch, window.height, window.width + padding % stride);
    const SlabGrid input_grid(shape, tasks, 1);
    Gpu::get().launch(depthwise_kernel("depthwise_input_gradient", window, shape), x, input_grid.grid, input_grid.block,
                      {&gradient, &taps, &tasks, &window, &out});
    tasks = depthwise_tasks(batch, window.out_height, window.out_width);
    const SlabGrid filter_grid(shape, tasks, window.kernel);
    int slabs = filter_grid.grid[1], size = channels, squares = window.kernel * window.kernel;
    Tensor partial = empty_floats({slabs, squares, channels}, x);
    float *partials = data<float>(partial);
    Gpu::get().launch(depthwise_kernel("depthwise_filter_gradient", window, shape), x, filter_grid.grid,
                      filter_grid.block, {&in, &gradient, &tasks, &window, &partials});
    const unsigned blocks = (squares * channels + kFilterSumLanes - 1) / kFilterSumLanes;
    Gpu::get().launch("depthwise_filter_sum" + suffix(x), x, {blocks, 1}, {kFilterSumLanes, kFilterSumRows},
                      {&partials, &slabs, &squares, &size, &sums});
    return {dx, dfilter};
  }
  require_float32(x);
  reference::depthwise_conv_input_gradient(data<float>(filter), data<float>(dy), batch, channels, window,
                                           data<float>(dx));
  reference::depthwise_conv_filter_gradient(data<float>(x), data<float>(dy), batch, channels, window,
                                            data<float>(dfilter));
  return {dx, dfilter};
}

}  // namespace
