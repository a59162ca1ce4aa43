// Reference implementation of a 1x1 convolution and of its filter gradient: float32 loops for the CPU.

#pragma once

#include <algorithm>
#include <cstdint>

namespace reference {

// Computes y [rows, out] as the product of x [rows, in] and the transpose of filter [out, in].
void pointwise_conv(const float *x, const float *filter, int rows, int in, int out, float *y) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int o = 0; o < out; ++o) {
      float sum = 0;
      for (int i = 0; i < in; ++i) sum += x[row * in + i] * filter[o * in + i];
      y[row * out + o] = sum;
    }
  }
}

// Computes dfilter [out, in] as the sum of dy [rows, out] times x [rows, in] over all rows.
void pointwise_filter_gradient(const float *x, const float *dy, int rows, int in, int out, float *dfilter) {
  std::fill_n(dfilter, static_cast<int64_t>(in) * out, 0.f);
  for (int64_t row = 0; row < rows; ++row) {
    for (int o = 0; o < out; ++o) {
      for (int i = 0; i < in; ++i) dfilter[o * in + i] += dy[row * out + o] * x[row * in + i];
    }
  }
}

}  // namespace reference
