// Reference implementation of the operators in update.h: loops over one float32 tensor. The operators call this
// implementation on the CPU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common.h"
#include "../optimizers.h"
#include "parallel.h"

namespace reference {

bool is_finite(const float *values, int64_t size) {
  return std::all_of(values, values + size, [](float value) { return std::isfinite(value); });
}

double sum_squares(const float *values, int64_t size, float unscale) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double value = static_cast<double>(values[i]) * unscale;
    sum += value * value;
  }
  return sum;
}

// Updates a parameter with a rule of optimizers.h. The step is skipped if `unscale` is 0. If `master` is not null, the
// updated parameter is also copied to `master`.
template <class Rule>
void update(const float *gradient, int64_t size, float rate, float unscale, const Rule &rule, float decay,
            float *const (&state)[Rule::kStates], float *parameter, float *master) {
  if (unscale == 0) return;
  float values[Rule::kStates];
  const auto load = [&](int64_t i) {
    for (int s = 0; s < Rule::kStates; ++s) values[s] = state[s][s < Rule::kVectors ? i : 0];
  };
  double squares_p = 0, squares_u = 0;
  for (int64_t i = 0; i < size; ++i) {
    load(i);
    rule.follow(gradient[i] * unscale, parameter[i], decay, values);
    for (int s = 0; s < Rule::kVectors; ++s) state[s][i] = values[s];
    const double p = parameter[i], u = rule.direction(gradient[i] * unscale, parameter[i], decay, values);
    squares_p += p * p, squares_u += u * u;
  }
  const bool adapts = Rule::kHasTrustRatio && decay != 0 && squares_p > 0 && squares_u > 0;
  const float step = adapts ? rate * static_cast<float>(std::sqrt(squares_p / squares_u)) : rate;
  for (int64_t i = 0; i < size; ++i) {
    load(i);
    parameter[i] -= step * rule.direction(gradient[i] * unscale, parameter[i], decay, values);
    if (master) master[i] = parameter[i];
  }
  load(0);
  rule.advance(values);
  for (int s = Rule::kVectors; s < Rule::kStates; ++s) *state[s] = values[s];
}

// Like update, but divides the elements among threads, unless the rule needs norms of the whole tensor.
template <class Rule>
void update_in_parallel(const float *gradient, int64_t size, float rate, float unscale, const Rule &rule, float decay,
                        float *const (&state)[Rule::kStates], float *parameter, float *master) {
  const int threads = Rule::kHasTrustRatio ? 1 : threads_for(size);
  if (threads == 1) return update(gradient, size, rate, unscale, rule, decay, state, parameter, master);
  // Each thread advances its own copy of the values that all elements share.
  float shared[Rule::kStates] = {}, advanced[Rule::kStates];
  for (int s = Rule::kVectors; s < Rule::kStates; ++s) shared[s] = *state[s];
  in_parallel(threads, size, [&](int thread, int64_t first, int64_t last) {
    float copies[Rule::kStates], *part[Rule::kStates];
    std::copy(shared, shared + Rule::kStates, copies);
    for (int s = 0; s < Rule::kStates; ++s) part[s] = s < Rule::kVectors ? state[s] + first : copies + s;
    update(gradient + first, last - first, rate, unscale, rule, decay, part, parameter + first,
           master ? master + first : nullptr);
    if (thread == 0) std::copy(copies, copies + Rule::kStates, advanced);
  });
  for (int s = Rule::kVectors; s < Rule::kStates; ++s) *state[s] = advanced[s];
}

// Computes average += weight (value - average).
void follow_average(const float *value, int64_t size, float weight, float *average) {
  in_parallel(threads_for(size), size, [&](int, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) average[i] += weight * (value[i] - average[i]);
  });
}

}  // namespace reference
