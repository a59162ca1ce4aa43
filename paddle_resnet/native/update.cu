// Kernels that follow the backward pass, over many parameters per launch: the check of the gradients, the loss scale,
// and momentum.

#include "vector.cuh"

constexpr int kBlocksApart = 41;  // between the first blocks of consecutive tensors

// `count` elements from element i on: a whole vector, or the end of an array.
template <class T>
__device__ __forceinline__ void load(const void *from, int i, int count, float (&values)[T::kLanes]) {
  if (count == T::kLanes) return unpack16<T>(static_cast<const uint4 *>(from)[i / T::kLanes], values);
  for (int k = 0; k < count; ++k) values[k] = load_one(T(), from, i + k);
}
template <class T>
__device__ __forceinline__ void store(const float (&values)[T::kLanes], void *to, int i, int count) {
  if (count == T::kLanes) {
    static_cast<uint4 *>(to)[i / T::kLanes] = pack16<T>(values);
    return;
  }
  for (int k = 0; k < count; ++k) store_one(T(), values[k], to, i + k);
}

// The same for a float32 array that goes with an array of T.
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

// Calls each(tensor, i, count) for this thread's vectors: `count` elements from element i on.
template <class T, class Each>
__device__ __forceinline__ void for_each_vector(const Updates &updates, const Each &each) {
  const int step = gridDim.x * kMaxThreads * T::kLanes;
  for (int t = 0; t < updates.count; ++t) {
    // Most tensors are small and occupy a few blocks only; the shift gives each tensor different ones.
    const int block = (blockIdx.x + t * kBlocksApart) % gridDim.x, size = updates.size[t];
    for (int i = (block * kMaxThreads + threadIdx.x) * T::kLanes; i < size; i += step) {
      each(t, i, min(T::kLanes, size - i));
    }
  }
}

// Sets *overflow to 1 if an element is not finite, and leaves it otherwise.
template <class T>
__device__ void check_gradients(const Updates &updates, int *overflow) {
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

// v = mu v + h, p -= rate v, or Nesterov's p -= rate (h + mu v), where h = unscale * gradient + decay p. `unscale` may be
// null, which means 1; 0 skips the step. With masters, p is the float32 master, and the parameter becomes its rounded
// copy.
template <class T, bool kHasMasters>
__device__ void momentum(const Updates &updates, const float *rate, const float *unscale, float mu, bool nesterov) {
  const float factor = unscale != nullptr ? *unscale : 1.f, step = *rate;
  if (factor == 0.f) return;
  for_each_vector<T>(updates, [&](int t, int i, int count) {
    float gradient[T::kLanes], velocity[T::kLanes], parameter[T::kLanes];
    float *exact = kHasMasters ? updates.master[t] : static_cast<float *>(updates.parameter[t]);
    load<T>(updates.gradient[t], i, count, gradient);
    load_some<T>(updates.velocity[t], i, count, velocity);
    load_some<T>(exact, i, count, parameter);
#pragma unroll
    for (int k = 0; k < T::kLanes; ++k) {
      const float change = gradient[k] * factor + updates.decay[t] * parameter[k];
      velocity[k] = mu * velocity[k] + change;
      parameter[k] -= step * (nesterov ? change + mu * velocity[k] : velocity[k]);
    }
    store_some<T>(velocity, updates.velocity[t], i, count);
    store_some<T>(parameter, exact, i, count);
    if (kHasMasters) store<T>(parameter, updates.parameter[t], i, count);
  });
}

#define UPDATE_KERNELS(T) \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) \
      check_gradients_##T(Updates updates, int *overflow) { \
    check_gradients<T>(updates, overflow); \
  } \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) \
      momentum_##T(Updates updates, const float *rate, const float *unscale, float mu, bool nesterov) { \
    momentum<T, false>(updates, rate, unscale, mu, nesterov); \
  } \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) \
      momentum_masters_##T(Updates updates, const float *rate, const float *unscale, float mu, bool nesterov) { \
    momentum<T, true>(updates, rate, unscale, mu, nesterov); \
  }

UPDATE_KERNELS(f32)
UPDATE_KERNELS(f16)
UPDATE_KERNELS(bf16)

// One thread, launched after the checks, updates the loss scale and its counters, and clears *overflow.
extern "C" __global__ void follow_loss_scale(int *overflow, LossScaling rule, float *scale, int *good, int *bad,
                                             float *unscale) {
  *unscale = *overflow ? 0.f : 1.f / *scale;
  rule.follow(*overflow != 0, scale, good, bad);
  *overflow = 0;
}
