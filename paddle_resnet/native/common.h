// What host code and kernels share: launch constants and the structs that kernels take as arguments.

#pragma once

constexpr int kVectorBytes = 16;                           // what a thread loads or stores at once
constexpr int kMaxThreads = 512, kBlocksPerProcessor = 2;  // launch bounds of BN and the updates
constexpr int kPoolThreads = 256;
constexpr int kLossThreads = 256;  // a power of two
constexpr float kLargestFloat = 3.402823466e38f;

// Geometry of a pooling, in pixels. `vectors`: 16-byte vectors that hold the channels of one pixel.
struct Window {
  int height, width, out_height, out_width, kernel, stride, padding, vectors;
};

// The tensors that one launch updates: as many as fit into the 4 KB of a kernel's arguments. `size` counts elements.
constexpr int kTableTensors = 96;
struct Updates {
  void *gradient[kTableTensors], *parameter[kTableTensors];  // of the kernel's type
  float *velocity[kTableTensors], *master[kTableTensors];
  int size[kTableTensors];
  float decay[kTableTensors];
  int count;
};

#ifdef __CUDACC_RTC__
#define ON_BOTH __device__
#else
#define ON_BOTH
#endif

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
