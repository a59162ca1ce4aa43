// Operators for squeeze-and-excitation, y = x gates(mean over the pixels of x), without the convolutions that compute
// the gates. ImageSums computes the mean and the gradient of the gates, ScaleImages computes y and the gradient of x,
// and Sigmoid computes the gates. The operators check arguments and allocate results, and then launch the kernels in
// squeeze_excitation.cu or, on the CPU, call the reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu.h"
#include "pool.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the number of pixels of each image [N, H, W, C].
int pixels_of(const Tensor &x) {
  if (x.shape().size() != 4) PD_THROW("custom squeeze-and-excitation: expected images [N, H, W, C]");
  return static_cast<int>(x.shape()[1] * x.shape()[2]);
}

// Returns the sum or the mean [N, 1, 1, C] of x [times y] over the pixels of each image.
std::vector<Tensor> ImageSums(const Tensor &x, const paddle::optional<Tensor> &y, bool mean) {
  const Shape shape(x);
  if (y) require_like(x, *y, "second factor");
  int pixels = pixels_of(x), images = static_cast<int>(x.shape()[0]);
  float factor = mean ? 1.f / pixels : 1.f;
  Tensor out = paddle::empty({images, 1, 1, shape.channels}, x.dtype(), x.place());
  if (x.is_gpu()) {
    if (images > 65535) PD_THROW("custom squeeze-and-excitation: supports up to 65535 images");
    int lanes = std::min(shape.vectors, kMaxLanes);
    while (shape.vectors % lanes != 0) --lanes;
    const int height = std::max(1, std::min(kMaxThreads / lanes, pixels));
    void *in = raw(x), *other = y ? raw(*y) : nullptr, *sums = raw(out);
    Gpu::get().launch("image_sums" + shape.suffix, x,
                      {static_cast<unsigned>(shape.vectors / lanes), static_cast<unsigned>(images)},
                      {static_cast<unsigned>(lanes), static_cast<unsigned>(height)},
                      {&in, &other, &pixels, &factor, &sums});
    return {out};
  }
  require_float32(x);
  reference::image_sums(data<float>(x), y ? data<float>(*y) : nullptr, images, pixels, shape.channels, factor,
                        data<float>(out));
  return {out};
}

// Returns x times factors [N, 1, 1, C] [+ offsets [N, 1, 1, C] / number of pixels].
std::vector<Tensor> ScaleImages(const Tensor &x, const Tensor &factors, const paddle::optional<Tensor> &offsets) {
  const Shape shape(x);
  int pixels = pixels_of(x), images = static_cast<int>(x.shape()[0]);
  if (factors.dtype() != x.dtype() || factors.numel() != static_cast<int64_t>(images) * shape.channels)
    PD_THROW("custom squeeze-and-excitation: expected one factor per image and channel, in the type of the image");
  if (offsets) require_like(factors, *offsets, "offsets");
  Tensor y = empty_as(x);
  if (x.is_gpu()) {
    unsigned count = pool_threads(x, shape);
    int vectors = shape.vectors;
    void *in = raw(x), *scales = raw(factors), *added = offsets ? raw(*offsets) : nullptr, *out = raw(y);
    Gpu::get().launch("scale_images" + shape.suffix, x, pool_grid(count), kPoolBlock,
                      {&in, &scales, &added, &count, &pixels, &vectors, &out});
    return {y};
  }
  require_float32(x);
  reference::scale_images(data<float>(x), data<float>(factors), offsets ? data<float>(*offsets) : nullptr, images,
                          pixels, shape.channels, data<float>(y));
  return {y};
}

// Returns the sigmoid of x [..., C].
std::vector<Tensor> Sigmoid(const Tensor &x) {
  const Shape shape(x);
  Tensor y = empty_as(x);
  if (x.is_gpu()) {
    unsigned count = pool_threads(x, shape);
    void *in = raw(x), *out = raw(y);
    Gpu::get().launch("sigmoid" + shape.suffix, x, pool_grid(count), kPoolBlock, {&in, &count, &out});
    return {y};
  }
  require_float32(x);
  reference::sigmoid(data<float>(x), x.numel(), data<float>(y));
  return {y};
}

// Returns the gradient of x. `y` is the sigmoid of x [..., C].
std::vector<Tensor> SigmoidBackward(const Tensor &y, const Tensor &dy) {
  const Shape shape(y);
  require_like(y, dy, "gradient");
  Tensor dx = empty_as(y);
  if (y.is_gpu()) {
    unsigned count = pool_threads(y, shape);
    void *values = raw(y), *gradients = raw(dy), *out = raw(dx);
    Gpu::get().launch("sigmoid_gradient" + shape.suffix, y, pool_grid(count), kPoolBlock,
                      {&values, &gradients, &count, &out});
    return {dx};
  }
  require_float32(y);
  reference::sigmoid_gradient(data<float>(y), data<float>(dy), y.numel(), data<float>(dx));
  return {dx};
}

}  // namespace
