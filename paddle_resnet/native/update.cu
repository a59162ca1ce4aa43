// Kernels that run after the backward pass and process many parameters per launch: gradient check, loss scale, gradient
// clipping, optimizers and EMA.

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
__device__ void check_gradients(const MomentumUpdates &updates, int *overflow) {
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

// Momentum: v = mu v + h, p -= rate v, or Nesterov's p -= rate (h + mu v), where h = unscale * gradient + decay p. A
// null `unscale` means 1; if *unscale is 0, the step is skipped. If there are master weights, p is the float32 master
// weight, and the parameter becomes a rounded copy of p.
template <class T, bool kHasMasters>
__device__ void momentum(const MomentumUpdates &updates, const float *rate, const float *unscale, float mu,
                         bool nesterov) {
  const float factor = unscale != nullptr ? *unscale : 1.f, step = *rate;
  if (factor == 0.f) return;
  for_each_vector<T>(updates, [&](int t, int i, int count) {
    float gradient[T::kLanes], velocity[T::kLanes], parameter[T::kLanes];
    load<T>(updates.gradient[t], i, count, gradient);
    load_some<T>(updates.state[0][t], i, count, velocity);
    load_some<T>(exact<kHasMasters>(updates, t), i, count, parameter);
#pragma unroll
    for (int k = 0; k < T::kLanes; ++k) {
      const float change = gradient[k] * factor + updates.decay[t] * parameter[k];
      velocity[k] = mu * velocity[k] + change;
      parameter[k] -= step * (nesterov ? change + mu * velocity[k] : velocity[k]);
    }
    store_some<T>(velocity, updates.state[0][t], i, count);
    store_some<T>(parameter, exact<kHasMasters>(updates, t), i, count);
    if (kHasMasters) store<T>(parameter, updates.parameter[t], i, count);
  });
}

// AdamW: Loshchilov and Hutter, arXiv:1711.05101. p -= rate (u + decay p), where u is Adam's direction for unscale *
// gradient. Launch advance_powers after this kernel.
template <class T, bool kHasMasters>
__device__ void adamw(const AdamUpdates &updates, Adam rule, const float *rate, const float *unscale) {
  const float factor = unscale != nullptr ? *unscale : 1.f, step = *rate;
  if (factor == 0.f) return;
  for_each_vector<T>(updates, [&](int t, int i, int count) {
    float gradient[T::kLanes], m[T::kLanes], v[T::kLanes], parameter[T::kLanes];
    const float correction1 = 1 - *updates.state[2][t], correction2 = 1 - *updates.state[3][t];
    load<T>(updates.gradient[t], i, count, gradient);
    load_some<T>(updates.state[0][t], i, count, m);
    load_some<T>(updates.state[1][t], i, count, v);
    load_some<T>(exact<kHasMasters>(updates, t), i, count, parameter);
#pragma unroll
    for (int k = 0; k < T::kLanes; ++k) {
      rule.follow(gradient[k] * factor, &m[k], &v[k]);
      parameter[k] -= step * (rule.direction(m[k], v[k], correction1, correction2) + updates.decay[t] * parameter[k]);
    }
    store_some<T>(m, updates.state[0][t], i, count);
    store_some<T>(v, updates.state[1][t], i, count);
    store_some<T>(parameter, exact<kHasMasters>(updates, t), i, count);
    if (kHasMasters) store<T>(parameter, updates.parameter[t], i, count);
  });
}

// Returns the number of blocks that share a tensor.
template <class T>
__device__ __forceinline__ int blocks_of(int size) {
  constexpr int kElements = kMaxThreads * T::kLanes;
  return min(static_cast<int>(gridDim.x), (size + kElements - 1) / kElements);
}

// Sums two values over the threads of a block in a fixed order. All threads of the block must call this function.
__device__ void sum_over_block(float &a, float &b) {
  constexpr int kGroups = 32;
  __shared__ float of_threads[2][kMaxThreads], of_groups[2][kGroups];
  of_threads[0][threadIdx.x] = a, of_threads[1][threadIdx.x] = b;
  __syncthreads();
  if (threadIdx.x < 2 * kGroups) {
    const int which = threadIdx.x / kGroups, group = threadIdx.x % kGroups;
    float sum = 0;
    for (int k = group; k < kMaxThreads; k += kGroups) sum += of_threads[which][k];
    of_groups[which][group] = sum;
  }
  __syncthreads();
  a = b = 0;
  for (int k = 0; k < kGroups; ++k) a += of_groups[0][k], b += of_groups[1][k];
}

// Sums the squares of the unscaled gradients that each block processes. The first launch overwrites `partial`, and
// later launches add to it.
template <class T>
__device__ void sum_squares(const MomentumUpdates &updates, const float *unscale, float *partial, bool is_first) {
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

// LAMB: You et al., arXiv:1904.00962, algorithm 2. p -= rate ratio (u + decay p), where u is Adam's direction and ratio
// is |p| / |u + decay p|, or 1 without weight decay or if a norm is 0. The first kernel updates the moments. For each
// tensor that a block processes, the block also writes the sums of the squares of p and of u + decay p to `partial`.
template <class T, bool kHasMasters>
__device__ void lamb_moments(const AdamUpdates &updates, Adam rule, const float *unscale, float *partial) {
  const float factor = unscale != nullptr ? *unscale : 1.f;
  if (factor == 0.f) return;
  for (int t = 0; t < updates.count; ++t) {
    const int size = updates.size[t], block = block_of(t);
    if (block >= blocks_of<T>(size)) continue;
    const float correction1 = 1 - *updates.state[2][t], correction2 = 1 - *updates.state[3][t];
    float squares_p = 0, squares_u = 0;
    for_each_vector_of<T>(t, size, [&](int i, int count) {
      float gradient[T::kLanes] = {}, m[T::kLanes] = {}, v[T::kLanes] = {}, parameter[T::kLanes] = {};
      load<T>(updates.gradient[t], i, count, gradient);
      load_some<T>(updates.state[0][t], i, count, m);
      load_some<T>(updates.state[1][t], i, count, v);
      load_some<T>(exact<kHasMasters>(updates, t), i, count, parameter);
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) {
        rule.follow(gradient[k] * factor, &m[k], &v[k]);
        const float u = rule.direction(m[k], v[k], correction1, correction2) + updates.decay[t] * parameter[k];
        squares_p += parameter[k] * parameter[k];
        squares_u += u * u;
      }
      store_some<T>(m, updates.state[0][t], i, count);
      store_some<T>(v, updates.state[1][t], i, count);
    });
    if (updates.decay[t] == 0.f) continue;
    sum_over_block(squares_p, squares_u);
    float *sums = partial + 2 * (t * gridDim.x + block);
    if (threadIdx.x == 0) sums[0] = squares_p, sums[1] = squares_u;
  }
}

// The second kernel of LAMB updates the parameters. Launch this kernel with the same grid as the first kernel, and
// launch advance_powers after this kernel.
template <class T, bool kHasMasters>
__device__ void lamb(const AdamUpdates &updates, Adam rule, const float *rate, const float *unscale,
                     const float *partial) {
  if (unscale != nullptr && *unscale == 0.f) return;
  for (int t = 0; t < updates.count; ++t) {
    const int size = updates.size[t], blocks = blocks_of<T>(size);
    if (block_of(t) >= blocks) continue;
    float step = *rate;
    if (updates.decay[t] != 0.f) {
      float squares_p = 0, squares_u = 0;
      for (int i = threadIdx.x; i < blocks; i += kMaxThreads) {
        const float *sums = partial + 2 * (t * gridDim.x + i);
        squares_p += sums[0], squares_u += sums[1];
      }
      sum_over_block(squares_p, squares_u);
      if (squares_p > 0 && squares_u > 0) step *= sqrtf(squares_p) / sqrtf(squares_u);
    }
    const float correction1 = 1 - *updates.state[2][t], correction2 = 1 - *updates.state[3][t];
    for_each_vector_of<T>(t, size, [&](int i, int count) {
      float m[T::kLanes], v[T::kLanes], parameter[T::kLanes];
      load_some<T>(updates.state[0][t], i, count, m);
      load_some<T>(updates.state[1][t], i, count, v);
      load_some<T>(exact<kHasMasters>(updates, t), i, count, parameter);
#pragma unroll
      for (int k = 0; k < T::kLanes; ++k) {
        const float u = rule.direction(m[k], v[k], correction1, correction2) + updates.decay[t] * parameter[k];
        parameter[k] -= step * u;
      }
      store_some<T>(parameter, exact<kHasMasters>(updates, t), i, count);
      if (kHasMasters) store<T>(parameter, updates.parameter[t], i, count);
    });
  }
}

// Updates the powers of the betas for the next step. Each thread processes one tensor. If the step is skipped, the
// powers do not change.
extern "C" __global__ void advance_powers(AdamUpdates updates, Adam rule, const float *unscale) {
  if ((unscale != nullptr && *unscale == 0.f) || threadIdx.x >= updates.count) return;
  *updates.state[2][threadIdx.x] *= rule.beta1;
  *updates.state[3][threadIdx.x] *= rule.beta2;
}

#define UPDATE_KERNEL(NAME, T) extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) NAME##_##T
#define UPDATE_KERNELS_OF(T, MASTERS, HAS_MASTERS) \
  UPDATE_KERNEL(momentum##MASTERS, T)(MomentumUpdates updates, const float *rate, const float *unscale, float mu, \
                                      bool nesterov) { \
    momentum<T, HAS_MASTERS>(updates, rate, unscale, mu, nesterov); \
  } \
  UPDATE_KERNEL(adamw##MASTERS, T)(AdamUpdates updates, Adam rule, const float *rate, const float *unscale) { \
    adamw<T, HAS_MASTERS>(updates, rule, rate, unscale); \
  } \
  UPDATE_KERNEL(lamb_moments##MASTERS, T)(AdamUpdates updates, Adam rule, const float *unscale, float *partial) { \
    lamb_moments<T, HAS_MASTERS>(updates, rule, unscale, partial); \
  } \
  UPDATE_KERNEL(lamb##MASTERS, T)(AdamUpdates updates, Adam rule, const float *rate, const float *unscale, \
                                  const float *partial) { \
    lamb<T, HAS_MASTERS>(updates, rule, rate, unscale, partial); \
  }
#define UPDATE_KERNELS(T) \
  UPDATE_KERNEL(check_gradients, T)(MomentumUpdates updates, int *overflow) { check_gradients<T>(updates, overflow); } \
  UPDATE_KERNEL(sum_squares, T)(MomentumUpdates updates, const float *unscale, float *partial, bool is_first) { \
    sum_squares<T>(updates, unscale, partial, is_first); \
  } \
  UPDATE_KERNELS_OF(T, , false) \
  UPDATE_KERNELS_OF(T, _masters, true)

UPDATE_KERNELS(f32)
UPDATE_KERNELS(f16)
UPDATE_KERNELS(bf16)

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
