// Reference implementation of the convolution of images [N, H, W, C]: a float32 loop for the CPU.

#pragma once

#include <cstdint>

#include "functions.h"

namespace reference {

// Computes y [batch, out_height, out_width, outputs]. The filter is [outputs, kernel_height, kernel_width, channels /
// groups]. This function is inline, so that the compiler generates separate code for the geometry of the stem.
inline void convolve(const float *x, const float *filter, const Convolution &c, float *y) {
  const int depth = c.channels / c.groups, group = c.outputs / c.groups, taps = c.kernel[0] * c.kernel[1];
  const int64_t pixels = static_cast<int64_t>(c.out_size[0]) * c.out_size[1];
  for (int64_t i = 0; i < pixels * c.batch * c.outputs; ++i) {
    // All pixels of an image and an output channel are computed in sequence, because they read the same weights.
    const int64_t pixel = i % pixels, output = i / pixels % c.outputs, image = i / pixels / c.outputs;
    const int row = pixel / c.out_size[1], column = pixel % c.out_size[1];
    float sum = 0.f;
    for (int tap = 0; tap < taps; ++tap) {
      const int h = row * c.stride[0] - c.padding[0] + tap / c.kernel[1] * c.dilation[0];
      const int w = column * c.stride[1] - c.padding[1] + tap % c.kernel[1] * c.dilation[1];
      if (h < 0 || h >= c.size[0] || w < 0 || w >= c.size[1]) continue;
      const float *in = x + ((image * c.size[0] + h) * c.size[1] + w) * c.channels + output / group * depth;
      const float *weights = filter + (output * taps + tap) * depth;
      for (int channel = 0; channel < depth; ++channel) sum += in[channel] * weights[channel];
    }
    y[(image * pixels + pixel) * c.outputs + output] = sum;
  }
}

void conv(const float *x, const float *filter, const Convolution &c, float *y) { convolve(x, filter, c, y); }

}  // namespace reference
