// Filter gradients of convolutions without groups as products of matrices, for the CPU. Images are [N, H, W, C].

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "functions.h"
#include "parallel.h"
#include "product.h"

namespace reference {

// Copies the input pixel that each output pixel multiplies by the tap (row, column) of the filter to `pixels` [N * OH *
// OW, C].
inline void gather(const Geometry &g, int64_t row, int64_t column, const float *x, float *pixels) {
  const int64_t channels = g.x[1], lines = g.x[0] * g.y[2];
  const int threads = threads_for(lines * g.y[3] * channels);
  in_parallel(threads, lines, [&](int, int64_t first, int64_t last) {
    float *to = pixels + first * g.y[3] * channels;
    for (int64_t line = first; line < last; ++line) {
      const int64_t i = line % g.y[2] * g.strides[0] - g.before[0] + row * g.dilations[0];
      for (int64_t k = 0; k < g.y[3]; ++k, to += channels) {
        const int64_t j = k * g.strides[1] - g.before[1] + column * g.dilations[1];
        if (i < 0 || i >= g.x[2] || j < 0 || j >= g.x[3])
          std::fill_n(to, channels, 0.f);
        else
          std::copy_n(x + ((line / g.y[2] * g.x[2] + i) * g.x[3] + j) * channels, channels, to);
      }
    }
  });
}

// Computes the filter gradient of a convolution, in the layout of the filter, as one product [outputs, C] per tap.
void filter_gradient(const Geometry &g, const float *x, const float *dy, float *dfilter) {
  const int64_t taps = g.filter[2] * g.filter[3], size = g.y[1] * g.x[1], count = g.x[0] * g.y[2] * g.y[3];
  if (g.x == std::array<int64_t, 4>{g.x[0], g.x[1], g.y[2], g.y[3]} && taps == 1)  // all pixels, in the same order
    return multiply_transposed(1, g.y[1], count, g.x[1], dy, x, dfilter, false);
  const Floats pixels = floats(count * g.x[1]), gradients = floats(taps * size);
  for (int64_t tap = 0; tap < taps; ++tap) {
    gather(g, tap / g.filter[3], tap % g.filter[3], x, pixels.get());
    multiply_transposed(1, g.y[1], count, g.x[1], dy, pixels.get(), gradients.get() + tap * size, false);
  }
  in_parallel(threads_for(size * taps), size, [&](int, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      for (int64_t tap = 0; tap < taps; ++tap) dfilter[i * taps + tap] = gradients[tap * size + i];
  });
}

}  // namespace reference
