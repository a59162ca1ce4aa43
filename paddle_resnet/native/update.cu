// Kernels that run after the backward pass and process many parameters per launch: gradient check, loss scale, gradient
// clipping, optimizers and EMA.

#include "sums.cuh"
#include "vector.cuh"

constexpr int kBlocksApart = 41;  // distance between the first blocks of consecutive tensors

// Load or store `count` elements starting at element i: a full vector, or fewer elements at the end of an array.
template <class T>
__device__ __forceinline__ void load(const void *from, int i, int count, float (&values)[T::kLanes]) {
  if (count == T::kLanes) return unpack_vector<T>(static_cast<const uint4 *>(from)[i / T::kLanes], values);
  for (int k = 0; k < count; ++k) values[k] = load_one(T(), from, i + k);
}
template <class T>
__device__ __forceinline__ void store(const float (&values)[T::kLanes], void *to, int i, int count) {
  if (count == T::kLanes) {
    static_cast<uint4 *>(to)[i / T::kLanes] = pack_vector<T>(values);
    return;
  }
  for (int k = 0; k < count; ++k) store_one(T(), values[k], to, i + k);
}

// Load or store `count` elements of a float32 array, such as master weights or state, starting at element i.
template <class T>
__device__ __forceinline__ void load_some(const float *from, int i, int count, float (&values)[T::kLanes]) {
  if (count == T::kLanes) return load_floats<T>(from + i, values);
  for (int k = 0; k < count; ++k) values[k] = from[i + k];
}
template <class T>
__device__ __forceinline__ void store_some(const float (&values)[T::kLanes], float *to, int i, int count) {
  if (count == T::kLanes) return store_floats<T>(values, to + i);
  for (int k = 0; k < count; ++k) to[i + k] = values[k];
}

// Returns the index of this block among the blocks that share tensor t. Most tensors are small and occupy few blocks.
// Each tensor starts at a different block, so that the tensors are distributed over all blocks.
__device__ __forceinline__ int block_of(int t) { return (blockIdx.x + t * kBlocksApart) % gridDim.x; }

// Calls each(i, count) for each vector of tensor t that this thread processes: `count` elements starting at element i.
template <class T, class Each>
__device__ __forceinline__ void for_each_vector_of(int t, int size, const Each &each) {
  const int step = gridDim.x * kMaxThreads * T::kLanes;
  for (int i = (block_of(t) * kMaxThreads + threadIdx.x) * T::kLanes; i < size; i += step) {
    each(i, min(T::kLanes, size - i));
  }
}

// Calls each(t, i, count) for each vector that this thread processes, in all tensors.
template <class T, class Table, class Each>
__device__ __forceinline__ void for_each_vector(const Table &updates, const Each &each) {
  for (int t = 0; t < updates.count; ++t) {
    for_each_vector_of<T>(t, updates.size[t], [&](int i, int count) { each(t, i, count); });
  }
}

// Returns the float32 values of parameter t: its master weight if there are master weights, otherwise the parameter
// itself.
template <bool kHasMasters, class Table>
__device__ __forceinline__ float *exact(const Table &updates, int t) {
  return kHasMasters ? updates.master[t] : static_cast<float *>(updates.parameter[t]);
}

// Sets *overflow to 1 if a gradient has a non-finite element. Otherwise, *overflow does not change.
template <class T>
__device__ void check_gradients(const Gradients &updates, int *overflow) {
  constexpr unsigned kExponent = 0x7f800000u;
  bool is_finite = true;
  for_each_vector<T>(updates, [&](int t, int i, int count) {
    float gradient[T::kLanes] = {};
    load<T>(updates.gradient[t], i, count, gradient);
#pragma unroll
    for (int k = 0; k < T::kLanes; ++k) is_finite &= (__float_as_uint(gradient[k]) & kExponent) != kExponent;
  });
  if (!is_finite) *overflow = 1;
}

// Returns the number of blocks that share a tensor.
template <class T>
__device__ __forceinline__ int blocks_of(int size) {
  constexpr int kElements = kMaxThreads * T::kLanes;
  return min(static_cast<int>(gridDim.x), (size + kElements - 1) / kElements);
}

// Sums the squares of the unscaled gradients that each block processes. The first launch overwrites `partial`, and
// later launches add to it.
template <class T>
__device__ void sum_squares(const Gradients &updates, const float *unscale, float *partial, bool is_first) {
  const float factor = unscale != nullptr ? *unscale : 1.f;
  float sum = 0, none = 0;
  for_each_vector<T>(updates, [&](int t, int i, int count) {
    float gradient[T::kLanes] = {};
    load<T>(updates.gradient[t], i, count, gradient);
#pragma unroll
    for (int k = 0; k < T::kLanes; ++k) sum += gradient[k] * factor * (gradient[k] * factor);
  });
  sum_over_block(sum, none);
  if (threadIdx.x == 0) partial[blockIdx.x] = is_first ? sum : partial[blockIdx.x] + sum;
}

// The gradients g, float32 values p and state of the elements that a thread processes at once. A thread loads all
// these values before any arithmetic, so that the thread waits for memory only once.
template <class Rule, class T, bool kHasMasters>
struct Elements {
  float g[T::kLanes] = {}, p[T::kLanes] = {}, state[T::kLanes][Rule::kStates];

  // Loads `count` elements of parameter t, starting at element i.
  __device__ __forceinline__ Elements(const Updates<Rule::kStates> &updates, int t, int i, int count) {
    load<T>(updates.gradient[t], i, count, g);
    load_some<T>(exact<kHasMasters>(updates, t), i, count, p);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      float values[T::kLanes] = {};
      if (s < Rule::kVectors) load_some<T>(updates.state[s][t], i, count, values);
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) state[k][s] = s < Rule::kVectors ? values[k] : *updates.state[s][t];
    }
  }

  __device__ __forceinline__ void store_state(const Updates<Rule::kStates> &updates, int t, int i, int count) const {
#pragma unroll
    for (int s = 0; s < Rule::kVectors; ++s) {
      float values[T::kLanes];
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) values[k] = state[k][s];
      store_some<T>(values, updates.state[s][t], i, count);
    }
  }
};

// For a rule with a trust ratio, updates the state. For each tensor that a block processes, the block also writes the
// sums of the squares of the parameter and of its direction to `partial`. Launch update() with the same grid after this
// kernel.
template <class Rule, class T, bool kHasMasters>
__device__ void norms(const Updates<Rule::kStates> &updates, Rule rule, const float *unscale, float *partial) {
  const float factor = unscale != nullptr ? *unscale : 1.f;
  if (factor == 0.f) return;
  for (int t = 0; t < updates.count; ++t) {
    const int size = updates.size[t], block = block_of(t);
    const float decay = updates.decay[t];
    if (block >= blocks_of<T>(size)) continue;
    float squares_p = 0, squares_u = 0;
    for_each_vector_of<T>(t, size, [&](int i, int count) {
      Elements<Rule, T, kHasMasters> e(updates, t, i, count);
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) {
        const float g = e.g[k] * factor;
        rule.follow(g, e.p[k], decay, e.state[k]);
        const float u = rule.direction(g, e.p[k], decay, e.state[k]);
        squares_p += e.p[k] * e.p[k];
        squares_u += u * u;
      }
      e.store_state(updates, t, i, count);
    });
    if (decay == 0.f) continue;
    sum_over_block(squares_p, squares_u);
    float *sums = partial + 2 * (t * gridDim.x + block);
    if (threadIdx.x == 0) sums[0] = squares_p, sums[1] = squares_u;
  }
}

// Returns |p| / |direction| for tensor t, or 1 if a norm is 0. `partial` contains the sums that `blocks` blocks of
// norms() have written.
__device__ float trust_ratio(const float *partial, int t, int blocks) {
  float squares_p = 0, squares_u = 0;
  for (int i = threadIdx.x; i < blocks; i += kMaxThreads) {
    const float *sums = partial + 2 * (t * gridDim.x + i);
    squares_p += sums[0], squares_u += sums[1];
  }
  sum_over_block(squares_p, squares_u);
  return squares_p > 0 && squares_u > 0 ? sqrtf(squares_p) / sqrtf(squares_u) : 1.f;
}

// Updates the parameters and, unless norms() has already done so, the state. A null `unscale` means 1; if *unscale is
// 0, the step is skipped. If there are master weights, the kernel updates the master weight, and the parameter becomes
// a rounded copy of the master weight.
template <class Rule, class T, bool kHasMasters>
__device__ void update(const Updates<Rule::kStates> &updates, Rule rule, const float *rate, const float *unscale,
                       const float *partial) {
  const float factor = unscale != nullptr ? *unscale : 1.f, lr = *rate;
  if (factor == 0.f) return;
  for (int t = 0; t < updates.count; ++t) {
    const int size = updates.size[t];
    const float decay = updates.decay[t];
    float step = lr;
    if constexpr (Rule::kHasTrustRatio) {
      const int blocks = blocks_of<T>(size);
      if (block_of(t) >= blocks) continue;
      if (decay != 0.f) step *= trust_ratio(partial, t, blocks);
    }
    for_each_vector_of<T>(t, size, [&](int i, int count) {
      Elements<Rule, T, kHasMasters> e(updates, t, i, count);
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) {
        const float g = e.g[k] * factor;
        if (!Rule::kHasTrustRatio) rule.follow(g, e.p[k], decay, e.state[k]);
        e.p[k] -= step * rule.direction(g, e.p[k], decay, e.state[k]);
      }
      if (!Rule::kHasTrustRatio) e.store_state(updates, t, i, count);
      store_some<T>(e.p, exact<kHasMasters>(updates, t), i, count);
      if (kHasMasters) store<T>(e.p, updates.parameter[t], i, count);
    });
  }
}

// Updates the part of the state that has one element per parameter. Each thread processes one parameter. If the step is
// skipped, the state does not change.
template <class Rule>
__device__ void advance(const Updates<Rule::kStates> &updates, Rule rule, const float *unscale) {
  const int t = threadIdx.x;
  if ((unscale != nullptr && *unscale == 0.f) || t >= updates.count) return;
  float state[Rule::kStates] = {};
  for (int s = Rule::kVectors; s < Rule::kStates; ++s) state[s] = *updates.state[s][t];
  rule.advance(state);
  for (int s = Rule::kVectors; s < Rule::kStates; ++s) *updates.state[s][t] = state[s];
}

#define UPDATE_KERNEL(NAME, T) extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) NAME##_##T
#define UPDATE_KERNELS_OF(RULE, T, MASTERS, HAS_MASTERS) \
  UPDATE_KERNEL(RULE##MASTERS, T)(Updates<optimizer::RULE::kStates> updates, optimizer::RULE rule, const float *rate, \
                                  const float *unscale, const float *partial) { \
    update<optimizer::RULE, T, HAS_MASTERS>(updates, rule, rate, unscale, partial); \
  } \
  UPDATE_KERNEL(RULE##_norms##MASTERS, T)(Updates<optimizer::RULE::kStates> updates, optimizer::RULE rule, \
                                          const float *unscale, float *partial) { \
    if constexpr (optimizer::RULE::kHasTrustRatio) { \
      norms<optimizer::RULE, T, HAS_MASTERS>(updates, rule, unscale, partial); \
    } \
  }
#define UPDATE_KERNELS(RULE) \
  UPDATE_KERNELS_OF(RULE, f32, , false) \
  UPDATE_KERNELS_OF(RULE, f32, _masters, true) \
  UPDATE_KERNELS_OF(RULE, f16, , false) \
  UPDATE_KERNELS_OF(RULE, f16, _masters, true) \
  UPDATE_KERNELS_OF(RULE, bf16, , false) \
  UPDATE_KERNELS_OF(RULE, bf16, _masters, true) \
  extern "C" __global__ void advance_##RULE(Updates<optimizer::RULE::kStates> updates, optimizer::RULE rule, \
                                            const float *unscale) { \
    advance(updates, rule, unscale); \
  }
FOR_EACH_OPTIMIZER(UPDATE_KERNELS)

#define GRADIENT_KERNELS(T) \
  UPDATE_KERNEL(check_gradients, T)(Gradients updates, int *overflow) { check_gradients<T>(updates, overflow); } \
  UPDATE_KERNEL(sum_squares, T)(Gradients updates, const float *unscale, float *partial, bool is_first) { \
    sum_squares<T>(updates, unscale, partial, is_first); \
  }
GRADIENT_KERNELS(f32)
GRADIENT_KERNELS(f16)
GRADIENT_KERNELS(bf16)

// Computes average += weight (value - average). If the step is skipped, the averages do not change.
extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor)
    follow_averages(Averages averages, const float *weight, const float *unscale) {
  if (unscale != nullptr && *unscale == 0.f) return;
  const float w = *weight;
  for_each_vector<f32>(averages, [&](int t, int i, int count) {
    float average[f32::kLanes], value[f32::kLanes];
    load_some<f32>(averages.average[t], i, count, average);
    load_some<f32>(averages.value[t], i, count, value);
#pragma unroll
    for (int k = 0; k < f32::kLanes; ++k) average[k] += w * (value[k] - average[k]);
    store_some<f32>(average, averages.average[t], i, count);
  });
}

// Updates the loss scale and its counters, and sets *overflow to 0. Launch a single thread of this kernel after all
// gradients have been checked.
extern "C" __global__ void follow_loss_scale(int *overflow, LossScaling rule, float *scale, int *good, int *bad,
                                             float *unscale) {
  *unscale = *overflow ? 0.f : 1.f / *scale;
  rule.follow(*overflow != 0, scale, good, bad);
  *overflow = 0;
}

// Adds the sums of all blocks and computes the clipping factor. Launch a single block of this kernel after sum_squares.
extern "C" __global__ void clip_factor(const float *partial, int sums, const float *unscale, float max_norm,
                                       float *factor) {
  float squares = 0, none = 0;
  for (int i = threadIdx.x; i < sums; i += kMaxThreads) squares += partial[i];
  sum_over_block(squares, none);
  if (threadIdx.x == 0) *factor = clipped(sqrtf(squares), unscale != nullptr ? *unscale : 1.f, max_norm);
}
