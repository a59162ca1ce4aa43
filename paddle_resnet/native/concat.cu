// Kernels that concatenate two tensors [rows, C] along the channels, and that split a tensor. The kernels copy vectors
// of 8 or 16 bytes, so they do not depend on the data type. Each thread loads kCopies vectors before it stores them.
// `first` and `second` are the numbers of vectors in a row of the first and of the second part.

#include "vector.cuh"

// Returns the address of vector `index` of the concatenation in the part that contains it.
template <class Vec>
__device__ __forceinline__ Vec *locate(Vec *x, Vec *y, unsigned index, int first, int second) {
  const int row = index / (first + second), vector = index % (first + second);
  return vector < first ? x + row * first + vector : y + row * second + vector - first;
}

template <class Vec>
__device__ void concat(const Vec *x, const Vec *y, unsigned count, int first, int second, Vec *out) {
  const unsigned begin = blockIdx.x * kPoolThreads * kCopies + threadIdx.x;
  Vec values[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const unsigned index = min(begin + i * kPoolThreads, count - 1);  // min() avoids a branch between loads
    values[i] = *locate(x, y, index, first, second);
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    if (begin + i * kPoolThreads < count) out[begin + i * kPoolThreads] = values[i];
  }
}

template <class Vec>
__device__ void split(const Vec *in, unsigned count, int first, int second, Vec *x, Vec *y) {
  const unsigned begin = blockIdx.x * kPoolThreads * kCopies + threadIdx.x;
  Vec values[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) values[i] = in[min(begin + i * kPoolThreads, count - 1)];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const unsigned index = begin + i * kPoolThreads;
    if (index < count) *locate(x, y, index, first, second) = values[i];
  }
}

#define CONCAT_IN_SIZE(BYTES, VECTOR) \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      concat_##BYTES(const VECTOR *x, const VECTOR *y, unsigned count, int first, int second, VECTOR *out) { \
    concat(x, y, count, first, second, out); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      split_##BYTES(const VECTOR *in, unsigned count, int first, int second, VECTOR *x, VECTOR *y) { \
    split(in, count, first, second, x, y); \
  }

CONCAT_IN_SIZE(8, uint2)
CONCAT_IN_SIZE(16, uint4)
