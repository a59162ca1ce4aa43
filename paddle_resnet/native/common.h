// What host code and kernels share: launch constants and the structs that kernels take as arguments.

#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

constexpr int kVectorBytes = 16;                           // what a thread loads or stores at once
constexpr int kMaxThreads = 512, kBlocksPerProcessor = 2;  // launch bounds of BN and the updates
constexpr int kPoolThreads = 256;
constexpr int kLossThreads = 256;  // a power of two
constexpr float kLargestFloat = 3.402823466e38f;

// Geometry of a pooling, in pixels. `vectors`: 16-byte vectors that hold the channels of one pixel.
struct Window {
  int height, width, out_height, out_width, kernel, stride, padding, vectors;
};

// The tensors that one launch updates, with kStates tensors of the optimizer's state each: as many as fit into the 4 KB
// of a kernel's arguments. `size` counts elements.
template <int kStates>
struct Updates {
  static constexpr int kTensors = 3840 / ((3 + kStates) * sizeof(void *) + sizeof(int) + sizeof(float));
  void *gradient[kTensors], *parameter[kTensors];  // of the kernel's type
  float *master[kTensors], *state[kStates][kTensors];
  int size[kTensors];
  float decay[kTensors];
  int count;
};
using MomentumUpdates = Updates<1>;  // state: velocity
using AdamUpdates = Updates<4>;      // state: both moments, and of one element the powers of beta1 and beta2

#ifdef __CUDACC_RTC__
#define ON_BOTH __device__
#else
#define ON_BOTH
#endif

// The direction of AdamW and LAMB: Kingma and Ba, arXiv:1412.6980, algorithm 1. `correction1` and `correction2` are
// 1 - beta1^t and 1 - beta2^t in step t.
struct Adam {
  float beta1, beta2, epsilon;

  ON_BOTH void follow(float gradient, float *m, float *v) const {
    *m = beta1 * *m + (1 - beta1) * gradient;
    *v = beta2 * *v + (1 - beta2) * gradient * gradient;
  }
  ON_BOTH float direction(float m, float v, float correction1, float correction2) const {
    return m / correction1 / (sqrtf(v / correction2) + epsilon);
  }
};

// Dynamic loss scaling with the rule of Paddle's update_loss_scaling.
struct LossScaling {
  int raise_after_steps, lower_after_steps;
  float raise_by, lower_by;

  ON_BOTH void follow(bool has_overflow, float *scale, int *good_steps, int *bad_steps) const {
    *good_steps = has_overflow ? 0 : *good_steps + 1;
    *bad_steps = has_overflow ? *bad_steps + 1 : 0;
    if (*bad_steps == lower_after_steps) {
      const float lower = *scale * lower_by;
      *scale = lower < 1 ? 1 : lower;
      *bad_steps = 0;
    } else if (*good_steps == raise_after_steps) {
      const float higher = *scale * raise_by;
      if (higher <= kLargestFloat) *scale = higher;
      *good_steps = 0;
    }
  }
};
