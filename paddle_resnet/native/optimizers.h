// Update rules of the optimizers, shared by the kernels and the reference implementation. To add an optimizer, add a
// rule, its name in FOR_EACH_OPTIMIZER, an entry in optimizers/table.py, and a test of its formula in
// tests/native/test_native.py.
//
// A rule updates one element p of a float32 parameter or master weight: p -= rate * direction. Its members are floats
// in the order of `attrs` in optimizers/table.py. A rule defines:
//   kStates: number of tensors of optimizer state per parameter, in the order of `state` in optimizers/table.py.
//   kVectors: number of these tensors that have the size of the parameter. The remaining tensors have one element.
//   kSharesRest: whether all parameters share the remaining tensors, which the host then writes before each step.
//   kHasTrustRatio: whether the rate of a parameter with weight decay is multiplied by |p| / |direction|, unless a norm
//     is 0.
//   follow(g, p, decay, state): updates the first kVectors values of the element's state; g is the element's gradient.
//   direction(g, p, decay, state): returns the direction; called after follow().
//   advance(state): updates the remaining values of the state for the next step, unless they are shared.

#pragma once

#include "common.h"

namespace optimizer {

// Momentum: v = mu v + h, where h = g + decay p. The direction is v, or h + mu v for Nesterov momentum.
struct momentum {
  static constexpr int kStates = 1, kVectors = 1;
  static constexpr bool kSharesRest = false, kHasTrustRatio = false;
  float mu, nesterov;

  ON_BOTH void follow(float g, float p, float decay, float *v) const { *v = mu * *v + (g + decay * p); }
  ON_BOTH float direction(float g, float p, float decay, const float *v) const {
    return nesterov != 0.f ? g + decay * p + mu * *v : *v;
  }
  ON_BOTH void advance(float *) const {}
};

// AdamW: Kingma and Ba, arXiv:1412.6980, algorithm 1, with the decoupled weight decay of Loshchilov and Hutter,
// arXiv:1711.05101. The state contains both moments and, for step t, beta1^t and beta2^t.
struct adamw {
  static constexpr int kStates = 4, kVectors = 2;
  static constexpr bool kSharesRest = false, kHasTrustRatio = false;
  float beta1, beta2, epsilon;

  ON_BOTH void follow(float g, float, float, float *state) const {
    state[0] = beta1 * state[0] + (1 - beta1) * g;
    state[1] = beta2 * state[1] + (1 - beta2) * g * g;
  }
  ON_BOTH float direction(float, float p, float decay, const float *state) const {
    const float correction1 = 1 - state[2], correction2 = 1 - state[3];
    return state[0] / correction1 / (sqrtf(state[1] / correction2) + epsilon) + decay * p;
  }
  ON_BOTH void advance(float *state) const { state[2] *= beta1, state[3] *= beta2; }
};

// RAdam: Liu et al., arXiv:1908.03265, algorithm 2. powers() in optimizers/radam.py computes replacements
// for beta1^t and beta2^t with which AdamW's direction equals RAdam's.
struct radam : adamw {
  static constexpr bool kSharesRest = true;

  ON_BOTH void advance(float *) const {}
};

// LAMB: You et al., arXiv:1904.00962, algorithm 2.
struct lamb : adamw {
  static constexpr bool kHasTrustRatio = true;
};

// Lookahead: Zhang et al., arXiv:1907.08610, algorithm 1. The state is the slow weight. The direction is p - slow, so a
// rate of 1 sets p to the slow weight. The operator skips all but every K-th step.
struct lookahead {
  static constexpr int kStates = 1, kVectors = 1;
  static constexpr bool kSharesRest = false, kHasTrustRatio = false;
  float alpha;

  ON_BOTH void follow(float, float p, float, float *slow) const { *slow += alpha * (p - *slow); }
  ON_BOTH float direction(float, float p, float, const float *slow) const { return p - *slow; }
  ON_BOTH void advance(float *) const {}
};

}  // namespace optimizer

// Calls DO for each optimizer. The names of operators and kernels contain the name of the optimizer.
#define FOR_EACH_OPTIMIZER(DO) DO(momentum) DO(adamw) DO(radam) DO(lamb) DO(lookahead)
