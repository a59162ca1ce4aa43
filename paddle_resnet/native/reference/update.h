// The optimizer's loops over one float32 tensor, which the operators call on the CPU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

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

}  // namespace reference
