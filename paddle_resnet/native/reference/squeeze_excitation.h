// Reference implementation of sums over the pixels of an image, of the multiplication of its channels, and of the
// sigmoid: float32 loops for the CPU. Images are [N, pixels, C], with contiguous channels.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace reference {

// Computes out [N, C] as `factor` times the sum of x [times y] over the pixels of each image. `y` may be null.
void image_sums(const float *x, const float *y, int images, int pixels, int channels, float factor, float *out) {
  const int64_t image_size = static_cast<int64_t>(pixels) * channels;
  in_parallel(threads_for(images * image_size), images, [&](int, int64_t first, int64_t last) {
    for (int64_t image = first; image < last; ++image) {
      std::vector<double> all_sums(channels);
      double *__restrict sums = all_sums.data();
      for (int pixel = 0; pixel < pixels; ++pixel) {
        const int64_t at = image * image_size + static_cast<int64_t>(pixel) * channels;
        const float *in = x + at, *other = y ? y + at : nullptr;
        if (other) {
#pragma omp simd
          for (int i = 0; i < channels; ++i) sums[i] += static_cast<double>(in[i]) * other[i];
        } else {
#pragma omp simd
          for (int i = 0; i < channels; ++i) sums[i] += in[i];
        }
      }
      for (int i = 0; i < channels; ++i) out[image * channels + i] = sums[i] * factor;
    }
  });
}

// Computes y = x times factors [N, C] [+ offsets [N, C] / pixels]. `offsets` may be null.
void scale_images(const float *x, const float *factors, const float *offsets, int images, int pixels, int channels,
                  float *y) {
  const int64_t rows = static_cast<int64_t>(images) * pixels;
  in_parallel(threads_for(rows * channels), rows, [&](int, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t image = row / pixels * channels;
      const float *in = x + row * channels, *scale = factors + image, *added = offsets ? offsets + image : nullptr;
      float *out = y + row * channels;
      if (added) {
#pragma omp simd
        for (int i = 0; i < channels; ++i) out[i] = in[i] * scale[i] + added[i] / pixels;
      } else {
#pragma omp simd
        for (int i = 0; i < channels; ++i) out[i] = in[i] * scale[i];
      }
    }
  });
}

void sigmoid(const float *x, int64_t size, float *y) {
  for (int64_t i = 0; i < size; ++i) y[i] = 1 / (1 + std::exp(-x[i]));
}

// Computes dx = dy y (1 - y), where y is the sigmoid of x.
void sigmoid_gradient(const float *y, const float *dy, int64_t size, float *dx) {
  for (int64_t i = 0; i < size; ++i) dx[i] = dy[i] * y[i] * (1 - y[i]);
}

}  // namespace reference
