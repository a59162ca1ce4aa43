// Reference implementation of batch normalization with an activation and an optional residual addition: float32 loops
// that sum in float64. The operators call this implementation on the CPU.
//
// Tensors are [rows, channels] = [N * H * W, C], with contiguous channels. The coefficients of a training step are
// [4, C]: a and b of y = a x + b, the mean, and 1 / standard deviation. A mask has one byte per 16-byte vector of 4
// channels; bit i is set if channel i is positive before the ReLU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../activations.h"
#include "../common.h"

namespace reference {

constexpr int kMaskLanes = kVectorBytes / sizeof(float);  // channels per byte of a mask

// Computes the coefficients for a batch. Updates the running mean and the running unbiased variance of the channels
// whose batch statistics are finite in float32.
inline void bn_statistics(const float *x, int rows, int channels, const float *scale, const float *bias,
                          float *running_mean, float *running_variance, float momentum, float epsilon,
                          float *coefficients) {
  for (int channel = 0; channel < channels; ++channel) {
    double sum = 0, square = 0;
    for (int64_t row = 0; row < rows; ++row) sum += x[row * channels + channel];
    const double mean = sum / rows;
    for (int64_t row = 0; row < rows; ++row) {
      const double difference = x[row * channels + channel] - mean;
      square += difference * difference;
    }
    const double biased = square / rows, inverse = 1 / std::sqrt(biased + epsilon);
    const double a = scale[channel] * inverse;
    coefficients[channel] = a;
    coefficients[channels + channel] = bias[channel] - mean * a;
    coefficients[2 * channels + channel] = mean;
    coefficients[3 * channels + channel] = inverse;
    const double unbiased = square / std::max(1, rows - 1);
    if (!std::isfinite(static_cast<float>(mean)) || !std::isfinite(static_cast<float>(unbiased))) continue;
    running_mean[channel] = momentum * running_mean[channel] + (1 - momentum) * mean;
    running_variance[channel] = momentum * running_variance[channel] + (1 - momentum) * unbiased;
  }
}

// Computes y = A(a x + b [+ z]), where A is the activation. `z` and `mask` may be null.
template <class A>
void bn_apply(A, const float *x, const float *z, int rows, int channels, const float *a, const float *b, float *y,
              uint8_t *mask) {
  for (int64_t i = 0; i < static_cast<int64_t>(rows) * channels; ++i) {
    const int channel = i % channels;
    float value = std::fma(a[channel], x[i], b[channel]) + (z ? z[i] : 0);
    if (mask) {
      uint8_t &byte = mask[i / kMaskLanes];
      if (i % kMaskLanes == 0) byte = 0;
      byte |= (value > 0) << i % kMaskLanes;
    }
    y[i] = A::value(value);
  }
}

// Like bn_apply, but computes a and b from the running statistics.
template <class A>
void bn_infer(A activation, const float *x, const float *z, int rows, int channels, const float *scale,
              const float *bias, const float *mean, const float *variance, float epsilon, float *y) {
  std::vector<float> a(channels), b(channels);
  for (int channel = 0; channel < channels; ++channel) {
    a[channel] = scale[channel] / std::sqrt(variance[channel] + epsilon);
    b[channel] = bias[channel] - mean[channel] * a[channel];
  }
  bn_apply(activation, x, z, rows, channels, a.data(), b.data(), y, nullptr);
}

// Computes the backward pass (Ioffe and Szegedy, arXiv:1502.03167, section 3). The gradient of the output is dy [+
// dy2]. If `mask` is not null, the mask determines the gradient of the ReLU; otherwise, the input of the activation A
// is recomputed as a x + b [+ z]. If `dz` is not null, the gradient with respect to the input of the activation is
// written to `dz`. `dy2` and `z` may be null.
template <class A>
void bn_gradient(A, const float *x, const float *dy, const float *dy2, const uint8_t *mask, const float *z,
                 int rows, int channels, const float *coefficients, float *dz, float *dscale, float *dbias, float *dx) {
  const float *a = coefficients, *b = a + channels, *mean = b + channels, *inverses = mean + channels;
  const int64_t size = static_cast<int64_t>(rows) * channels;
  std::vector<float> g(size);
  std::vector<double> sum(channels), product(channels);
  for (int64_t i = 0; i < size; ++i) {
    const int channel = i % channels;
    g[i] += dy[i];
    if (dy2) g[i] += dy2[i];
    if (!mask) {
      g[i] = A::gradient(g[i], std::fma(a[channel], x[i], b[channel]) + (z ? z[i] : 0));
    } else if (!(mask[i / kMaskLanes] >> i % kMaskLanes & 1)) {
      g[i] = 0;
    }
    sum[channel] += g[i];
    product[channel] += static_cast<double>(g[i]) * (x[i] - mean[channel]);
  }
  for (int channel = 0; channel < channels; ++channel) {
    const double inverse = inverses[channel];
    dscale[channel] = product[channel] * inverse;
    dbias[channel] = sum[channel];
  }
  for (int64_t i = 0; i < size; ++i) {
    const int channel = i % channels;
    const double inverse = inverses[channel], difference = x[i] - mean[channel];
    dx[i] = a[channel] * (g[i] - sum[channel] / rows - difference * inverse * inverse * product[channel] / rows);
  }
  if (dz) std::copy(g.begin(), g.end(), dz);
}

}  // namespace reference
