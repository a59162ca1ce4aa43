// Reference implementations of max pooling and average pooling of images [N, H, W, C] and of their gradients: float32
// loops for the CPU.
//
// Position p in a window is the pixel (p / kernel, p % kernel), counted from the window's upper left corner, including
// padding.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../common.h"
#include "parallel.h"

namespace reference {

// The coordinates of element i of an array [images, out_height, out_width, channels].
struct Element {
  int64_t image;
  int row, column, channel;

  Element(int64_t i, const Window &window, int channels) {
    channel = i % channels, column = i / channels % window.out_width;
    row = i / channels / window.out_width % window.out_height;
    image = i / channels / window.out_width / window.out_height;
  }
};

// Computes y and positions [batch, out_height, out_width, channels]. If several values are equal, the first one is the
// maximum. NaN is treated as larger than all numbers.
void max_pool(const float *x, int batch, int channels, const Window &window, float *y, uint8_t *positions) {
  const int64_t outputs = static_cast<int64_t>(batch) * window.out_height * window.out_width;
  in_parallel(threads_for(outputs * channels), outputs, [&](int, int64_t first, int64_t last) {
    std::vector<int> all_largest(channels);
    int *__restrict largest = all_largest.data();  // positions as int, so that the compiler vectorizes the loop
    for (int64_t i = first; i < last; ++i) {
      const auto [image, row, column, channel] = Element(i * channels, window, channels);
      float *__restrict out = y + i * channels;
      bool is_first = true;
      for (int position = 0; position < window.kernel * window.kernel; ++position) {
        const int h = row * window.stride - window.padding + position / window.kernel;
        const int w = column * window.stride - window.padding + position % window.kernel;
        if (h < 0 || h >= window.height || w < 0 || w >= window.width) continue;
        const float *in = x + ((image * window.height + h) * window.width + w) * channels;
        if (is_first) {
          for (int c = 0; c < channels; ++c) out[c] = in[c], largest[c] = position;
        } else {
#pragma omp simd
          for (int c = 0; c < channels; ++c) {
            const bool is_larger = in[c] > out[c] || in[c] != in[c];
            out[c] = is_larger ? in[c] : out[c];
            largest[c] = is_larger ? position : largest[c];
          }
        }
        is_first = false;
      }
      for (int c = 0; c < channels; ++c) positions[i * channels + c] = largest[c];
    }
  });
}

// Computes dx [batch, height, width, channels] from the gradient dy [+ dy2] of the output; `dy2` may be null.
void max_pool_gradient(const float *dy, const float *dy2, const uint8_t *positions, int batch, int channels,
                       const Window &window, float *dx) {
  const int64_t image_size = static_cast<int64_t>(window.height) * window.width * channels;
  const int64_t outputs = static_cast<int64_t>(window.out_height) * window.out_width;
  in_parallel(threads_for(batch * image_size), batch, [&](int, int64_t begin, int64_t end) {
    std::fill(dx + begin * image_size, dx + end * image_size, 0.f);
    for (int64_t i = begin * outputs; i < end * outputs; ++i) {
      const auto [image, row, column, channel] = Element(i * channels, window, channels);
      const float *first = dy + i * channels, *second = dy2 ? dy2 + i * channels : nullptr;
      const uint8_t *at = positions + i * channels;
      for (int position = 0; position < window.kernel * window.kernel; ++position) {
        const int h = row * window.stride - window.padding + position / window.kernel;
        const int w = column * window.stride - window.padding + position % window.kernel;
        if (h < 0 || h >= window.height || w < 0 || w >= window.width) continue;
        float *out = dx + ((image * window.height + h) * window.width + w) * channels;
        if (second) {
#pragma omp simd
          for (int c = 0; c < channels; ++c) out[c] += at[c] == position ? first[c] + second[c] : 0.f;
        } else {
#pragma omp simd
          for (int c = 0; c < channels; ++c) out[c] += at[c] == position ? first[c] : 0.f;
        }
      }
    }
  });
}

// The pixels of the image in one window, and the factor of their average.
struct Average {
  int top, bottom, left, right;
  float factor;

  Average(const Window &window, int row, int column, bool excludes_padding) {
    const int first_row = row * window.stride - window.padding, first_column = column * window.stride - window.padding;
    top = std::max(first_row, 0), bottom = std::min(first_row + window.kernel, window.height);
    left = std::max(first_column, 0), right = std::min(first_column + window.kernel, window.width);
    factor = 1.f / (excludes_padding ? (bottom - top) * (right - left) : window.kernel * window.kernel);
  }
};

// Computes y [batch, out_height, out_width, channels].
void average_pool(const float *x, int batch, int channels, const Window &window, bool excludes_padding, float *y) {
  const int64_t outputs = static_cast<int64_t>(batch) * window.out_height * window.out_width * channels;
  for (int64_t i = 0; i < outputs; ++i) {
    const auto [image, row, column, channel] = Element(i, window, channels);
    const Average average(window, row, column, excludes_padding);
    float sum = 0;
    for (int h = average.top; h < average.bottom; ++h)
      for (int w = average.left; w < average.right; ++w)
        sum += x[((image * window.height + h) * window.width + w) * channels + channel];
    y[i] = sum * average.factor;
  }
}

// Computes dx [batch, height, width, channels] from the gradient dy [+ dy2] of the output; `dy2` may be null.
void average_pool_gradient(const float *dy, const float *dy2, int batch, int channels, const Window &window,
                           bool excludes_padding, float *dx) {
  std::fill_n(dx, static_cast<int64_t>(batch) * window.height * window.width * channels, 0.f);
  const int64_t outputs = static_cast<int64_t>(batch) * window.out_height * window.out_width * channels;
  for (int64_t i = 0; i < outputs; ++i) {
    const auto [image, row, column, channel] = Element(i, window, channels);
    const Average average(window, row, column, excludes_padding);
    const float gradient = (dy[i] + (dy2 ? dy2[i] : 0.f)) * average.factor;
    for (int h = average.top; h < average.bottom; ++h)
      for (int w = average.left; w < average.right; ++w)
        dx[((image * window.height + h) * window.width + w) * channels + channel] += gradient;
  }
}

}  // namespace reference
