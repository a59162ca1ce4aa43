// Definitions shared by host code and kernels: launch constants, and structs that are passed to kernels.

#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

constexpr int kVectorBytes = 16;                           // bytes per load or store of a thread; 8 for the x4 types
constexpr int kMaxThreads = 512, kBlocksPerProcessor = 2;  // launch bounds of BN, image_sums, affine_gradient and update
// In inference, blocks of BN kernels with more than kSmallThreads threads may be halved for small tensors.
constexpr int kSmallThreads = 64;
// Rows that a thread of a BN kernel loads before it normalizes them, with and without a residual addition.
constexpr int kAddedRows = 2, kAppliedRows = 4;
constexpr int kPoolThreads = 256;  // block size for pooling, scale_images, sigmoid, affine and concatenation
constexpr int kCopies = 4;         // vectors that one thread of the concatenation kernels copies
constexpr int kLossThreads = 256;  // block size of the loss kernels; must be a power of two
constexpr int kDropoutThreads = 256;
// Launch bounds for depthwise convolutions, and maximum number of bytes that a block reads per pixel.
constexpr int kDepthwiseThreads = 256, kDepthwiseBlocksPerProcessor = 2, kMaxDepthwiseBytes = 256;
constexpr int kDepthwisePixels = 4;                       // adjacent pixels of a row that one thread computes
constexpr int kFilterSumLanes = 32, kFilterSumRows = 16;  // block size of the kernel that adds partial sums
// Constants for 1x1 convolutions: threads per block; and for their filter gradient: channels of the wider and of the
// narrower tensor per block, and rows per matrix product.
constexpr int kPointwiseThreads = 256, kWideChannels = 64, kNarrowChannels = 32, kChunkRows = 16;
// Constants for 1x1 convolutions with BN: rows per tile; bytes per row of a chunk of input channels; blocks per
// multiprocessor if a block computes fewer than 128 output channels (otherwise kBlocksPerProcessor).
constexpr int kTileRows = 128, kChunkBytes = 64, kNarrowTileBlocks = 3;
// Constants for the stem of ResNets: filters; pooled columns per group of two warps; maximum number of groups per
// block; elements per row and number of rows of the part of an image in shared memory.
constexpr int kStemFilters = 64, kStemColumns = 7, kStemGroups = 4, kStemRow = 368, kStemRows = 24;
constexpr int kStemThreads = kStemGroups * 64;
constexpr float kLargestFloat = 3.402823466e38f;

// Geometry of a pooling layer or a depthwise convolution, in pixels. `vectors` is the number of channel vectors per
// pixel.
struct Window {
  int height, width, out_height, out_width, kernel, stride, padding, vectors;
};

// Parameters of a BN layer with fixed statistics and of the activation that follows it (activation::Code). Without a BN
// layer, the pointers are null.
struct FixedBn {
  const float *scale, *bias, *mean, *variance;
  float epsilon;
  int activation;
};

// The parameters that one launch updates, each with its gradient and kStates tensors of optimizer state. `size`
// contains the number of elements of each parameter. kTensors is limited, because kernel arguments must not exceed 4
// KB.
template <int kStates>
struct Updates {
  static constexpr int kTensors = 3840 / ((3 + kStates) * sizeof(void *) + sizeof(int) + sizeof(float));
  void *gradient[kTensors], *parameter[kTensors];  // arrays in the data type of the kernel
  float *master[kTensors], *state[kStates][kTensors];
  int size[kTensors];
  float decay[kTensors];
  int count;
};
using Gradients = Updates<1>;  // for kernels that only read gradients

// The EMA variables that one launch updates, and the values that they average.
struct Averages {
  static constexpr int kTensors = 3840 / (2 * sizeof(void *) + sizeof(int));
  float *average[kTensors], *value[kTensors];
  int size[kTensors];
  int count;
};

// Geometry of a stem. A block computes `strip` rows of pooled images.
struct StemSize {
  int height, width, out_height, out_width, strip;
};

#ifdef __CUDACC_RTC__
#define ON_BOTH __device__
#else
#define ON_BOTH
#endif

// Return the size of the shared memory that a stem needs for the filters and in total, in units of 32 bits. Each row
// of a filter occupies 24 elements. The number of rows is rounded up to a multiple of the elements per word.
ON_BOTH constexpr int stem_filter_words(int elements) { return (7 + elements - 1) / elements * 3 * 8 * kStemFilters; }
ON_BOTH constexpr int stem_words(int elements) {
  return stem_filter_words(elements) + 2 * kStemFilters + kStemRows * kStemRow / elements;
}

// Returns the random 32-bit word at index `at` in stream `key` of the Philox 4x32-10 generator (Salmon et al., SC
// 2011).
ON_BOTH inline unsigned philox(unsigned key, unsigned at) {
  unsigned words[4] = {at / 4, 0, 0, 0}, keys[2] = {key, 0};
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xd2511f53ull * words[0], second = 0xcd9e8d57ull * words[2];
    words[0] = static_cast<unsigned>(second >> 32) ^ words[1] ^ keys[0];
    words[2] = static_cast<unsigned>(first >> 32) ^ words[3] ^ keys[1];
    words[1] = static_cast<unsigned>(second);
    words[3] = static_cast<unsigned>(first);
    keys[0] += 0x9e3779b9u;
    keys[1] += 0xbb67ae85u;
  }
  return words[at % 4];
}

// Dropout: Srivastava et al., JMLR 15 (2014). An element becomes 0 if its random word is below `threshold`; otherwise,
// it is multiplied by `factor`.
struct Dropout {
  unsigned threshold;
  float factor;

  ON_BOTH float apply(float x, int seed, int at) const {
    return philox(static_cast<unsigned>(seed), static_cast<unsigned>(at)) < threshold ? 0.f : x * factor;
  }
};

// Returns the factor that unscales gradients and limits their norm to max_norm (Pascanu et al., arXiv:1211.5063,
// algorithm 1). `norm` is the norm of the unscaled gradients. The factor is 0 if the step must be skipped. If the step
// is not skipped and the norm is not finite, the factor is NaN.
ON_BOTH inline float clipped(float norm, float unscale, float max_norm) {
  if (unscale == 0.f) return 0.f;
  return unscale * (norm <= max_norm ? 1.f : max_norm / norm + 0.f * norm);
}

// Dynamic loss scaling, following the rule of Paddle's operator update_loss_scaling.
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
