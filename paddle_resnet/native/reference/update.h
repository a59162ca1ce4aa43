// The optimizer's loops over one float32 tensor, which the operators call on the CPU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common.h"

namespace reference {

inline bool is_finite(const float *values, int64_t size) {
  return std::all_of(values, values + size, [](float value) { return std::isfinite(value); });
}

// v = mu v + h, p -= rate v, or Nesterov's p -= rate (h + mu v), where h = unscale * gradient + decay p. `unscale` 0 skips
// the step. `master` may be null; otherwise it becomes a copy of the parameter.
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

// p -= rate ratio (u + decay p), where u is Adam's direction and ratio is 1, or LAMB's |p| / |u + decay p|: You et al.,
// arXiv:1904.00962, algorithm 2. LAMB's ratio is 1 without weight decay, too, and if a norm is 0. `power1`, `power2`: the
// powers of the betas in this step; they become those of the next one. `unscale` 0 skips the step. `master` may be null;
// otherwise it becomes a copy of the parameter.
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

}  // namespace reference
