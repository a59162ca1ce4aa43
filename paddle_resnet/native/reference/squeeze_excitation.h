// Reference implementation of sums over the pixels of an image, of the multiplication of its channels, and of the
// sigmoid: float32 loops for the CPU. Images are [N, pixels, C], with contiguous channels.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace reference {

// Computes out [N, C] as `factor` times the sum of x [times y] over the pixels of each image. `y` may be null.
inline void image_sums(const float *x, const float *y, int images, int pixels, int channels, float factor, float *out) {
  for (int image = 0; image < images; ++image) {
    std::vector<double> sums(channels);
    for (int64_t i = 0; i < static_cast<int64_t>(pixels) * channels; ++i) {
      const int64_t at = static_cast<int64_t>(image) * pixels * channels + i;
      sums[i % channels] += static_cast<double>(x[at]) * (y ? y[at] : 1);
    }
    for (int channel = 0; channel < channels; ++channel) out[image * channels + channel] = sums[channel] * factor;
  }
}

// Computes y = x times factors [N, C] [+ offsets [N, C] / pixels]. `offsets` may be null.
inline void scale_images(const float *x, const float *factors, const float *offsets, int images, int pixels,
                         int channels, float *y) {
  const int64_t image_size = static_cast<int64_t>(pixels) * channels;
  for (int64_t i = 0; i < images * image_size; ++i) {
    const int64_t channel = i / image_size * channels + i % channels;
    y[i] = x[i] * factors[channel] + (offsets ? offsets[channel] / pixels : 0);
  }
}

inline void sigmoid(const float *x, int64_t size, float *y) {
  for (int64_t i = 0; i < size; ++i) y[i] = 1 / (1 + std::exp(-x[i]));
}

// Computes dx = dy y (1 - y), where y is the sigmoid of x.
inline void sigmoid_gradient(const float *y, const float *dy, int64_t size, float *dx) {
  for (int64_t i = 0; i < size; ++i) dx[i] = dy[i] * y[i] * (1 - y[i]);
}

}  // namespace reference
