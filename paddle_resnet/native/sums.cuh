// Functions with which kernels sum over the threads of a block and over the blocks of a grid, in a fixed order.

#include "common.h"

// Returns whether this block is the last of `count` blocks to call this function. The last block sees everything that
// the other blocks wrote before their calls. After the last call, the counter *arrivals is 0 again.
__device__ bool is_last_of(unsigned count, unsigned *arrivals) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) is_last = atomicInc(arrivals, count - 1) == count - 1;
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// Sums two values over the kMaxThreads threads of a block in a fixed order. All threads of the block must call this
// function.
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
