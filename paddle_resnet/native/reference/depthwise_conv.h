// Reference implementation of the depthwise convolution of images [N, H, W, C] and its gradients: float32 loops for the
// CPU. The filter is [C, 1, kernel, kernel].

#pragma once

#include <algorithm>
#include <cstdint>

#include "../common.h"

namespace reference {

// Calls each(x, y, tap) for each combination of an input pixel, an output pixel and the filter tap that connects them.
// x and y are the array indices of the first channels of these pixels, and tap is the position in the filter.
template <class Each>
void for_each_tap(int batch, int channels, const Window &window, const Each &each) {
  const int64_t outputs = static_cast<int64_t>(batch) * window.out_height * window.out_width;
  for (int64_t i = 0; i < outputs; ++i) {
    const int column = i % window.out_width, row = i / window.out_width % window.out_height;
    const int64_t image = i / window.out_width / window.out_height;
    for (int tap = 0; tap < window.kernel * window.kernel; ++tap) {
      const int h = row * window.stride - window.padding + tap / window.kernel;
      const int w = column * window.stride - window.padding + tap % window.kernel;
      if (h < 0 || h >= window.height || w < 0 || w >= window.width) continue;
      each(((image * window.height + h) * window.width + w) * channels, i * channels, tap);
    }
  }
}

// Computes y [batch, out_height, out_width, channels].
inline void depthwise_conv(const float *x, const float *filter, int batch, int channels, const Window &window,
                           float *y) {
  const int taps = window.kernel * window.kernel;
  std::fill_n(y, static_cast<int64_t>(batch) * window.out_height * window.out_width * channels, 0.f);
  for_each_tap(batch, channels, window, [&](int64_t in, int64_t out, int tap) {
    for (int c = 0; c < channels; ++c) y[out + c] += x[in + c] * filter[c * taps + tap];
  });
}

// Computes dx, in the layout of x, and dfilter, in the layout of the filter.
inline void depthwise_conv_gradient(const float *x, const float *filter, const float *dy, int batch, int channels,
                                    const Window &window, float *dx, float *dfilter) {
  const int taps = window.kernel * window.kernel;
  std::fill_n(dx, static_cast<int64_t>(batch) * window.height * window.width * channels, 0.f);
  std::fill_n(dfilter, channels * taps, 0.f);
  for_each_tap(batch, channels, window, [&](int64_t in, int64_t out, int tap) {
    for (int c = 0; c < channels; ++c) {
      dx[in + c] += dy[out + c] * filter[c * taps + tap];
      dfilter[c * taps + tap] += dy[out + c] * x[in + c];
    }
  });
}

}  // namespace reference
