// Kernels for squeeze-and-excitation: Hu et al., arXiv:1709.01507. Images are [N, pixels, C]. image_sums and
// scale_images serve the forward and the backward pass (see squeeze_excitation.h). The order of summation is fixed, so
// the kernels are deterministic.

#include "activations.h"
#include "vector.cuh"

// Computes out [N, C] as `factor` times the sum of x [times y] over the pixels of each image. A block has (lanes,
// height) threads, and a grid has (channel groups, images) blocks. `y` may be null.
template <class T>
__device__ void image_sums(const Vector<T> *x, const Vector<T> *y, int pixels, float factor, Vector<T> *out) {
  constexpr int V = T::kLanes;
  __shared__ float shared[V * kMaxThreads];
  const int lanes = blockDim.x, threads = lanes * blockDim.y, thread = threadIdx.y * lanes + threadIdx.x;
  const int vectors = gridDim.x * lanes, vector = blockIdx.x * lanes + threadIdx.x;
  const size_t first = static_cast<size_t>(blockIdx.y) * pixels * vectors + vector;
  float sums[V] = {};
#pragma unroll 4
  for (int pixel = threadIdx.y; pixel < pixels; pixel += blockDim.y) {
    const size_t at = first + static_cast<size_t>(pixel) * vectors;
    float values[V], others[V];
    unpack_vector<T>(x[at], values);
    if (y != nullptr) unpack_vector<T>(y[at], others);
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] = y == nullptr ? sums[i] + values[i] : fmaf(values[i], others[i], sums[i]);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) shared[i * threads + thread] = sums[i];
  __syncthreads();
  for (int i = thread; i < V * lanes; i += threads) {  // a sum replaces the value of row 0, which only this thread reads
    float sum = 0;
    for (int row = 0; row < blockDim.y; ++row) sum += shared[i / lanes * threads + row * lanes + i % lanes];
    shared[i / lanes * threads + i % lanes] = sum * factor;
  }
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 0; i < V; ++i) sums[i] = shared[i * threads + thread];
  out[static_cast<size_t>(blockIdx.y) * vectors + vector] = pack_vector<T>(sums);
}

// Computes y = x times factors [N, C] [+ offsets [N, C] / pixels]. Each thread computes one of `count` vectors.
// `offsets` may be null.
template <class T>
__device__ void scale_images(const Vector<T> *x, const Vector<T> *factors, const Vector<T> *offsets, unsigned count,
                             int pixels, int vectors, Vector<T> *y) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= count) return;
  const unsigned channel = index / vectors / pixels * vectors + index % vectors;
  float values[V], scales[V], added[V] = {};
  unpack_vector<T>(x[index], values);
  unpack_vector<T>(factors[channel], scales);
  if (offsets != nullptr) unpack_vector<T>(offsets[channel], added);
  const float share = 1.f / pixels;
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = fmaf(values[i], scales[i], added[i] * share);
  y[index] = pack_vector<T>(values);
}

// Computes y = 1 / (1 + e^-x). Each thread computes one of `count` vectors.
template <class T>
__device__ void sigmoid(const Vector<T> *x, unsigned count, Vector<T> *y) {
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= count) return;
  float values[T::kLanes];
  unpack_vector<T>(x[index], values);
#pragma unroll
  for (int i = 0; i < T::kLanes; ++i) values[i] = activation::sigmoid(values[i]);
  y[index] = pack_vector<T>(values);
}

// Computes dx = dy y (1 - y), where y is the sigmoid of x. Each thread computes one of `count` vectors.
template <class T>
__device__ void sigmoid_gradient(const Vector<T> *y, const Vector<T> *dy, unsigned count, Vector<T> *dx) {
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= count) return;
  float values[T::kLanes], gradients[T::kLanes];
  unpack_vector<T>(y[index], values);
  unpack_vector<T>(dy[index], gradients);
#pragma unroll
  for (int i = 0; i < T::kLanes; ++i) gradients[i] *= values[i] * (1.f - values[i]);
  dx[index] = pack_vector<T>(gradients);
}

#define SQUEEZE_EXCITATION_IN_TYPE(T) \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) \
      image_sums_##T(const Vector<T> *x, const Vector<T> *y, int pixels, float factor, Vector<T> *out) { \
    image_sums<T>(x, y, pixels, factor, out); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      scale_images_##T(const Vector<T> *x, const Vector<T> *factors, const Vector<T> *offsets, unsigned count, \
                       int pixels, int vectors, Vector<T> *y) { \
    scale_images<T>(x, factors, offsets, count, pixels, vectors, y); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      sigmoid_##T(const Vector<T> *x, unsigned count, Vector<T> *y) { \
    sigmoid<T>(x, count, y); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      sigmoid_gradient_##T(const Vector<T> *y, const Vector<T> *dy, unsigned count, Vector<T> *dx) { \
    sigmoid_gradient<T>(y, dy, count, dx); \
  }

SQUEEZE_EXCITATION_IN_TYPE(f32)
SQUEEZE_EXCITATION_IN_TYPE(f16)
SQUEEZE_EXCITATION_IN_TYPE(bf16)
SQUEEZE_EXCITATION_IN_TYPE(f16x4)
SQUEEZE_EXCITATION_IN_TYPE(bf16x4)
