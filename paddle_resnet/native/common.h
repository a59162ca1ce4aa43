// What the operators and the kernels have to agree on.

#pragma once

constexpr int kVectorBytes = 16;                           // what a thread reads and writes at once
constexpr int kMaxThreads = 512, kBlocksPerProcessor = 2;  // of BN
constexpr int kPoolThreads = 256;
constexpr int kLossThreads = 256;  // a power of two

// Of a pooling; `vectors` of channels.
struct Window {
  int height, width, out_height, out_width, kernel, stride, padding, vectors;
};

// The tensors that one launch updates: as many as fit into the 4 KB of a kernel's arguments.
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

// Dynamic loss scaling, as Paddle's update_loss_scaling does it.
struct LossScaling {
  int raise_after_steps, lower_after_steps;
  float raise_by, lower_by;

  ON_BOTH void follow(bool has_overflow, float *scale, int *good_steps, int *bad_steps) const {
    constexpr float kLargest = 3.402823466e38f;
    *good_steps = has_overflow ? 0 : *good_steps + 1;
    *bad_steps = has_overflow ? *bad_steps + 1 : 0;
    if (*bad_steps == lower_after_steps) {
      const float lower = *scale * lower_by;
      *scale = lower < 1 ? 1 : lower;
      *bad_steps = 0;
    } else if (*good_steps == raise_after_steps) {
      const float higher = *scale * raise_by;
      if (higher <= kLargest) *scale = higher;
      *good_steps = 0;
    }
  }
};
