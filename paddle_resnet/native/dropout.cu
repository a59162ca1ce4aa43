// The dropout kernel. Each thread processes one element.

#include "vector.cuh"

template <class T>
__device__ void dropout(const void *x, const int *seed, Dropout rule, int size, void *y) {
  const int i = blockIdx.x * kDropoutThreads + threadIdx.x;
  if (i < size) store_one(T(), rule.apply(load_one(T(), x, i), *seed, i), y, i);
}

#define DROPOUT_KERNELS(T) \
  extern "C" __global__ void __launch_bounds__(kDropoutThreads) \
      dropout_##T(const void *x, const int *seed, Dropout rule, int size, void *y) { \
    dropout<T>(x, seed, rule, size, y); \
  }

DROPOUT_KERNELS(f32)
DROPOUT_KERNELS(f16)
DROPOUT_KERNELS(bf16)
