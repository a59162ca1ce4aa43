// Batch normalization with an activation and an optional residual addition on the CPU: float32 loops that sum in
// float64, and that the compiler vectorizes.
//
// Tensors are [rows, channels] = [N * H * W, C], with contiguous channels. The coefficients of a training step are
// [4, C]: a and b of y = a x + b, the mean, and 1 / standard deviation. A mask has one byte per element: 1 if the
// element is positive before the ReLU, otherwise 0.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../activations.h"
#include "../common.h"
#include "parallel.h"

namespace reference {

// Rows with few channels are joined to rows of `width` = `copies` * channels elements, so that the inner loops are
// long enough for vectors.
struct JoinedRows {
  static constexpr int kWidth = 256;

  JoinedRows(int64_t rows, int channels)
      : channels(channels), copies(std::max(1, kWidth / channels)), width(copies * channels), size(rows * channels) {}

  int64_t count() const { return (size + width - 1) / width; }
  int width_of(int64_t row) const { return static_cast<int>(std::min<int64_t>(width, size - row * width)); }

  // Returns `copies` copies of values [channels].
  std::vector<float> repeated(const float *values) const {
    std::vector<float> all(width);
    for (int i = 0; i < width; ++i) all[i] = values[i % channels];
    return all;
  }

  // Adds up the copies of sums [width] and returns the sum of one channel.
  double sum(const double *sums, int channel) const {
    double total = 0;
    for (int i = channel; i < width; i += channels) total += sums[i];
    return total;
  }

  int channels, copies, width;
  int64_t size;
};

// Computes the coefficients for a batch. Updates the running mean and the running unbiased variance of the channels
// whose batch statistics are finite in float32.
void bn_statistics(const float *x, int rows, int channels, const float *scale, const float *bias, float *running_mean,
                   float *running_variance, float momentum, float epsilon, float *coefficients) {
  const JoinedRows joined(rows, channels);
  const int width = joined.width, threads = threads_for(joined.size);
  PartialSums partial(threads, 2 * width);
  // The sums are those of differences from the first row, because sums of squares would cancel if the mean were large.
  const std::vector<float> origin = joined.repeated(x);
  in_parallel(threads, joined.count(), [&](int thread, int64_t first, int64_t last) {
    double *__restrict sums = partial.of(thread), *__restrict squares = sums + width;
    const float *__restrict from = origin.data();
    int64_t row = first;
    for (; row + 4 <= last && joined.width_of(row + 3) == width; row += 4) {
      const float *__restrict in = x + row * width;
#pragma omp simd
      for (int i = 0; i < width; ++i) {
        const double p = in[i] - from[i], q = in[i + width] - from[i];
        const double r = in[i + 2 * width] - from[i], s = in[i + 3 * width] - from[i];
        sums[i] += (p + q) + (r + s);
        squares[i] += (p * p + q * q) + (r * r + s * s);
      }
    }
    for (; row < last; ++row) {
      const float *__restrict in = x + row * width;
      const int end = joined.width_of(row);
      for (int i = 0; i < end; ++i) {
        const double p = in[i] - from[i];
        sums[i] += p;
        squares[i] += p * p;
      }
    }
  });
  const double *total = partial.total();
  for (int channel = 0; channel < channels; ++channel) {
    const double shift = joined.sum(total, channel) / rows, mean = x[channel] + shift;
    const double difference = joined.sum(total + width, channel) - shift * shift * rows;
    const double square = difference < 0 ? 0 : difference;  // NaN remains NaN
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

// Computes y = A(a x + b [+ z]), where A is the activation. `z` and `mask` may be null. `y` may be `x`.
template <class A>
void bn_apply(A, const float *x, const float *z, int rows, int channels, const float *a, const float *b, float *y,
              uint8_t *mask) {
  const JoinedRows joined(rows, channels);
  const std::vector<float> scales = joined.repeated(a), offsets = joined.repeated(b);
  in_parallel(threads_for(joined.size), joined.count(), [&](int, int64_t first, int64_t last) {
    const float *scale = scales.data(), *offset = offsets.data();
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * joined.width;
      const int width = joined.width_of(row);
      const float *in = x + at;
      float *out = y + at;
      if (z == nullptr) {
#pragma omp simd
        for (int i = 0; i < width; ++i) out[i] = A::value(scale[i] * in[i] + offset[i]);
        continue;
      }
      const float *added = z + at;
      if (mask != nullptr) {
        uint8_t *bytes = mask + at;
#pragma omp simd
        for (int i = 0; i < width; ++i) bytes[i] = scale[i] * in[i] + offset[i] + added[i] > 0;
      }
#pragma omp simd
      for (int i = 0; i < width; ++i) out[i] = A::value(scale[i] * in[i] + offset[i] + added[i]);
    }
  });
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
  const JoinedRows joined(rows, channels);
  const int width = joined.width, threads = threads_for(joined.size);
  const std::vector<float> scales = joined.repeated(coefficients), offsets = joined.repeated(coefficients + channels);
  const std::vector<float> means = joined.repeated(coefficients + 2 * channels);
  const float *a = scales.data(), *b = offsets.data(), *mean = means.data();
  PartialSums partial(threads, 2 * width);
  // Writes the gradients of the inputs of the activation in a row to g.
  const auto gradients = [&](int64_t at, int end, float *__restrict g) {
    const float *in = x + at, *first = dy + at;
    if (dy2 != nullptr) {
      const float *second = dy2 + at;
#pragma omp simd
      for (int i = 0; i < end; ++i) g[i] = first[i] + second[i];
      first = g;
    }
    if (mask != nullptr) {
      const uint8_t *bytes = mask + at;
#pragma omp simd
      for (int i = 0; i < end; ++i) g[i] = bytes[i] ? first[i] : 0.f;
    } else if (z != nullptr) {
      const float *added = z + at;
#pragma omp simd
      for (int i = 0; i < end; ++i) g[i] = A::gradient(first[i], a[i] * in[i] + b[i] + added[i]);
    } else {
#pragma omp simd
      for (int i = 0; i < end; ++i) g[i] = A::gradient(first[i], a[i] * in[i] + b[i]);
    }
  };
  in_parallel(threads, joined.count(), [&](int thread, int64_t begin, int64_t last) {
    double *__restrict sums = partial.of(thread), *__restrict products = sums + width;
    std::vector<float> row_gradients(width);
    for (int64_t row = begin; row < last; ++row) {
      const int64_t at = row * width;
      const int end = joined.width_of(row);
      float *g = dz ? dz + at : row_gradients.data();
      gradients(at, end, g);
      const float *in = x + at;
#pragma omp simd
      for (int i = 0; i < end; ++i) {
        sums[i] += g[i];
        products[i] += static_cast<double>(g[i]) * (in[i] - mean[i]);
      }
    }
  });
  const double *total = partial.total();
  std::vector<float> shift(channels), slope(channels);
  for (int channel = 0; channel < channels; ++channel) {
    const double sum = joined.sum(total, channel), product = joined.sum(total + width, channel);
    const double inverse = coefficients[3 * channels + channel];
    dscale[channel] = product * inverse;
    dbias[channel] = sum;
    shift[channel] = sum / rows;
    slope[channel] = inverse * inverse * product / rows;
  }
  const std::vector<float> shifts = joined.repeated(shift.data()), slopes = joined.repeated(slope.data());
  in_parallel(threads, joined.count(), [&](int, int64_t begin, int64_t last) {
    std::vector<float> row_gradients(width);
    const float *sums = shifts.data(), *products = slopes.data();
    for (int64_t row = begin; row < last; ++row) {
      const int64_t at = row * width;
      const int end = joined.width_of(row);
      const float *g = dz ? dz + at : row_gradients.data();
      if (!dz) gradients(at, end, row_gradients.data());
      const float *in = x + at;
      float *out = dx + at;
#pragma omp simd
      for (int i = 0; i < end; ++i) out[i] = a[i] * (g[i] - sums[i] - (in[i] - mean[i]) * products[i]);
    }
  });
}

}  // namespace reference
