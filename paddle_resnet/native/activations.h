// The activations that the kernels fuse with BN, and their gradients, computed in float32. passes/fusion.py uses the
// same names. For an activation A, A::value(v) is its value at v, and A::gradient(g, v) is g times its derivative at v.
// The value is NaN if v is NaN.

#pragma once

#include "common.h"

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

namespace activation {

struct linear {
  static ON_BOTH float value(float v) { return v; }
  static ON_BOTH float gradient(float g, float) { return g; }
};

struct relu {
  static ON_BOTH float value(float v) { return v < 0.f ? 0.f : v; }
  static ON_BOTH float gradient(float g, float v) { return v > 0.f ? g : 0.f; }
};

struct relu6 {
  static ON_BOTH float value(float v) { return v < 0.f ? 0.f : v > 6.f ? 6.f : v; }
  static ON_BOTH float gradient(float g, float v) { return v > 0.f && v < 6.f ? g : 0.f; }
};

// v relu6(v + 3) / 6: Howard et al., arXiv:1905.02244, section 5.2.
struct hard_swish {
  static ON_BOTH float value(float v) { return v * relu6::value(v + 3.f) * (1.f / 6.f); }
  static ON_BOTH float gradient(float g, float v) {
    return v < -3.f ? 0.f : v > 3.f ? g : g * (v * (1.f / 3.f) + 0.5f);
  }
};

ON_BOTH inline float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

// v sigmoid(v): Elfwing et al., arXiv:1702.03118.
struct silu {
  static ON_BOTH float value(float v) { return v * sigmoid(v); }
  static ON_BOTH float gradient(float g, float v) { return g * sigmoid(v) * (1.f + v * (1.f - sigmoid(v))); }
};

// v tanh(log(1 + e^v)): Misra, arXiv:1908.08681. With n = (1 + e^v)^2 - 1, the tanh is n / (n + 2). Limiting v to
// 20 prevents overflow; for v above 20, the tanh is 1 in float32.
struct mish {
  static ON_BOTH float limited(float v) { return v > 20.f ? 20.f : v; }
  static ON_BOTH float value(float v) {
    const float e = expf(limited(v)), n = e * (e + 2.f);
    return v * (n / (n + 2.f));
  }
  static ON_BOTH float gradient(float g, float v) {
    const float x = limited(v), e = expf(x), n = e * (e + 2.f), d = 1.f / (n + 2.f);
    return g * (n * d + x * (4.f * e * (1.f + e)) * d * d);
  }
};

}  // namespace activation

// Calls DO for each activation except linear. The names of kernels contain the name of the activation.
#define FOR_EACH_ACTIVATION(DO) DO(relu) DO(relu6) DO(hard_swish) DO(silu) DO(mish)

namespace activation {

// Returns the value of the activation with number `code`: 0 for linear, 1, 2, ... for the activations of
// FOR_EACH_ACTIVATION. Kernels that are not compiled separately for each activation call this function.
#define NUMBER(A) k_##A,
enum Code { k_linear, FOR_EACH_ACTIVATION(NUMBER) };
#undef NUMBER
ON_BOTH inline float value_of(int code, float v) {
  switch (code) {
#define CASE(A) \
  case k_##A: \
    return A::value(v);
    FOR_EACH_ACTIVATION(CASE)
#undef CASE
    default:
      return v;
  }
}

}  // namespace activation

// Calls DO for each activation other than ReLU that the kernels fuse with BN and a residual addition. The backward pass
// recomputes the input of nonlinear activations. For ReLU, the forward pass stores a mask instead.
#define FOR_EACH_ADDED_ACTIVATION(DO) DO(linear) DO(mish)
