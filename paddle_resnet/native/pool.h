// Operators for max pooling, average pooling and their gradients. The operators check arguments and allocate results,
// and then launch the kernels in pool.cu or, on the CPU, call the reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the Window for an image size. `padding` applies to the top and left, `padding_end` to the bottom and right.
Window window_of(int height, int width, int kernel, int stride, int padding, int padding_end, int vectors) {
  const auto positions = [&](int size) { return (size + padding + padding_end - kernel) / stride + 1; };
  return {height, width, positions(height), positions(width), kernel, stride, padding, vectors};
}

// Returns the number of threads for a tensor: one thread per vector.
unsigned pool_threads(const Tensor &x, const Shape &shape) {
  const int64_t vectors = x.numel() / shape.lanes;
  if (vectors > INT32_MAX) PD_THROW("custom operator: requires fewer than 2^31 vectors of channels");
  return static_cast<unsigned>(vectors);
}

std::vector<unsigned> pool_grid(unsigned threads) { return {(threads + kPoolThreads - 1) / kPoolThreads, 1}; }
const std::vector<unsigned> kPoolBlock = {kPoolThreads, 1};

// Throws unless each window contains at least one pixel of the image.
void check_padding(int kernel, int padding) {
  if (padding >= kernel)
    PD_THROW("custom pooling: padding ", padding, " leaves windows without elements; use less than ", kernel);
}

// Returns y and positions, both [N, OH, OW, C]. A position is a byte that contains the index of the maximum within the
// window.
std::vector<Tensor> MaxPool(const Tensor &x, int kernel, int stride, int padding, int padding_end) {
  const Shape rows(x);
  const int batch = x.shape()[0], channels = rows.channels;
  Window window = window_of(x.shape()[1], x.shape()[2], kernel, stride, padding, padding_end, rows.vectors);
  check_padding(kernel, std::max(padding, padding_end));
  const std::vector<int64_t> shape = {batch, window.out_height, window.out_width, channels};
  Tensor y = paddle::empty(shape, x.dtype(), x.place()), positions = paddle::empty(shape, DataType::UINT8, x.place());
  if (x.is_gpu()) {
    pool_threads(x, rows);
    unsigned outputs = pool_threads(y, rows);
    void *in = raw(x), *out = raw(y), *bytes = raw(positions);
    Gpu::get().launch("max_pool" + rows.suffix, x, pool_grid(outputs), kPoolBlock,
                      {&in, &outputs, &window, &out, &bytes});
    return {y, positions};
  }
  require_float32(x);
  reference::max_pool(data<float>(x), batch, channels, window, data<float>(y), data<uint8_t>(positions));
  return {y, positions};
}

// Returns whether there is a second gradient, which is added to the first.
bool has_second(const Tensors &dy) {
  if (dy.size() > 2) PD_THROW("custom pooling gradient: expected one gradient, or two to add");
  if (dy.size() > 1) require_like(dy[0], dy[1], "second gradient");
  return dy.size() > 1;
}

// Returns dx [N, height, width, C]. `dy` contains the gradient of the output, or two gradients whose sum is this
// gradient.
std::vector<Tensor> MaxPoolBackward(const Tensors &dy, const Tensor &positions, int kernel, int stride, int padding,
                                    int height, int width) {
  const Shape rows(dy[0]);
  const int batch = dy[0].shape()[0], channels = rows.channels;
  const int out_height = dy[0].shape()[1], out_width = dy[0].shape()[2];
  Window window = {height, width, out_height, out_width, kernel, stride, padding, rows.vectors};
  Tensor dx = paddle::empty({batch, height, width, channels}, dy[0].dtype(), dy[0].place());
  const bool has_two = has_second(dy);
  if (positions.numel() != dy[0].numel())
    PD_THROW("custom max pooling gradient: the number of positions does not match the gradient");
  if (dx.is_gpu()) {
    unsigned inputs = pool_threads(dx, rows);
    void *first = raw(dy[0]), *second = has_two ? raw(dy[1]) : nullptr, *bytes = raw(positions), *out = raw(dx);
    Gpu::get().launch("max_pool_gradient" + rows.suffix, dx, pool_grid(inputs), kPoolBlock,
                      {&first, &second, &bytes, &inputs, &window, &out});
    return {dx};
  }
  require_float32(dx);
  reference::max_pool_gradient(data<float>(dy[0]), has_two ? data<float>(dy[1]) : nullptr, data<uint8_t>(positions),
                               batch, channels, window, data<float>(dx));
  return {dx};
}

// Returns the averages of all windows, y [N, OH, OW, C].
std::vector<Tensor> AveragePool(const Tensor &x, int kernel, int stride, int padding, bool excludes_padding) {
  const Shape rows(x);
  const int batch = x.shape()[0], channels = rows.channels;
  Window window = window_of(x.shape()[1], x.shape()[2], kernel, stride, padding, padding, rows.vectors);
  check_padding(kernel, padding);
  Tensor y = paddle::empty({batch, window.out_height, window.out_width, channels}, x.dtype(), x.place());
  if (x.is_gpu()) {
    pool_threads(x, rows);
    unsigned outputs = pool_threads(y, rows);
    void *in = raw(x), *out = raw(y);
    Gpu::get().launch("average_pool" + rows.suffix, x, pool_grid(outputs), kPoolBlock,
                      {&in, &outputs, &window, &excludes_padding, &out});
    return {y};
  }
  require_float32(x);
  reference::average_pool(data<float>(x), batch, channels, window, excludes_padding, data<float>(y));
  return {y};
}

// Returns dx [N, height, width, C]. `dy` contains the gradient of the output, or two gradients whose sum is this
// gradient.
std::vector<Tensor> AveragePoolBackward(const Tensors &dy, int kernel, int stride, int padding, bool excludes_padding,
                                        int height, int width) {
  const Shape rows(dy[0]);
  const int batch = dy[0].shape()[0], channels = rows.channels;
  Window window = window_of(height, width, kernel, stride, padding, padding, rows.vectors);
  if (window.out_height != dy[0].shape()[1] || window.out_width != dy[0].shape()[2])
    PD_THROW("custom average pooling gradient: the size of the gradient does not match ", height, "x", width,
             " pixels");
  Tensor dx = paddle::empty({batch, height, width, channels}, dy[0].dtype(), dy[0].place());
  const bool has_two = has_second(dy);
  if (dx.is_gpu()) {
    unsigned inputs = pool_threads(dx, rows);
    void *first = raw(dy[0]), *second = has_two ? raw(dy[1]) : nullptr, *out = raw(dx);
    Gpu::get().launch("average_pool_gradient" + rows.suffix, dx, pool_grid(inputs), kPoolBlock,
                      {&first, &second, &inputs, &window, &excludes_padding, &out});
    return {dx};
  }
  require_float32(dx);
  reference::average_pool_gradient(data<float>(dy[0]), has_two ? data<float>(dy[1]) : nullptr, batch, channels, window,
                                   excludes_padding, data<float>(dx));
  return {dx};
}

}  // namespace
