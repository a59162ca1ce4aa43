// Reference implementation of the operators in update.h: loops over one float32 tensor. The operators call this
// implementation on the CPU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common.h"

namespace reference {

inline bool is_finite(const float *values, int64_t size) {
  return std::all_of(values, values + size, [](float value) { return std::isfinite(value); });
}

inline double sum_squares(const float *values, int64_t size, float unscale) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double value = static_cast<double>(values[i]) * unscale;
    sum += value * value;
  }
  return sum;
}

// Momentum: v = mu v + h, p -= rate v, or Nesterov's p -= rate (h + mu v), where h = unscale * gradient + decay p. The
// step is skipped if `unscale` is 0. If `master` is not null, the new parameter is copied to it.
inline void momentum(const float *gradient, int64_t size, float rate, float unscale, float mu, bool nesterov,
                     float decay, float *velocity, float *parameter, float *master) {
  if (unscale == 0) return;
  for (int64_t i = 0; i < size; ++i) {
    const float change = gradient[i] * unscale + decay * parameter[i];
    velocity[i] = mu * velocity[i] + change;
    parameter[i] -= rate * (nesterov ? change + mu * velocity[i] : velocity[i]);
    if (master) master[i] = parameter[i];
  }
}

// AdamW and LAMB: p -= rate ratio (u + decay p), where u is Adam's direction. For AdamW, ratio is 1. For LAMB (You et
// al., arXiv:1904.00962, algorithm 2), ratio is |p| / |u + decay p|, or 1 without weight decay or if a norm is 0. The
// powers of the betas, `power1` and `power2`, are updated for the next step. The step is skipped if `unscale` is 0. If
// `master` is not null, the new parameter is copied to it.
inline void adam(const float *gradient, int64_t size, float rate, float unscale, const Adam &rule, bool is_lamb,
                 float decay, float *m, float *v, float *power1, float *power2, float *parameter, float *master) {
  if (unscale == 0) return;
  const float correction1 = 1 - *power1, correction2 = 1 - *power2;
  const auto direction = [&](int64_t i) {
    return rule.direction(m[i], v[i], correction1, correction2) + decay * parameter[i];
  };
  double squares_p = 0, squares_u = 0;
  for (int64_t i = 0; i < size; ++i) {
    rule.follow(gradient[i] * unscale, &m[i], &v[i]);
    const double p = parameter[i], u = direction(i);
    squares_p += p * p, squares_u += u * u;
  }
  const bool adapts = is_lamb && decay != 0 && squares_p > 0 && squares_u > 0;
  const float step = adapts ? rate * static_cast<float>(std::sqrt(squares_p / squares_u)) : rate;
  for (int64_t i = 0; i < size; ++i) {
    parameter[i] -= step * direction(i);
    if (master) master[i] = parameter[i];
  }
  *power1 *= rule.beta1, *power2 *= rule.beta2;
}

// Computes average += weight (value - average).
inline void follow_average(const float *value, int64_t size, float weight, float *average) {
  for (int64_t i = 0; i < size; ++i) average[i] += weight * (value[i] - average[i]);
}

}  // namespace reference
