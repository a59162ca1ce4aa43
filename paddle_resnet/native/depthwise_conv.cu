// Kernels for the depthwise convolution of images [N, H, W, C] and its gradients. The filter is [C, 1, K, K]. Sums are
// computed in float32. In evaluation, the convolution also applies the BN layer and the activation that follow it.
//
// A block has (lanes, height) threads. threadIdx.x selects a vector of channels, so that a warp reads adjacent memory.
// A task is a group of kDepthwisePixels adjacent pixels in a row. One thread processes all pixels of a task, so it
// loads each column of the input only once. A grid has (channel groups, slabs) blocks. Each block processes a slab of
// consecutive tasks, so that rows shared by several tasks stay in the L1 cache.

#include "activations.h"
#include "vector.cuh"

// The image, the row, and the group of columns (counted from the left) of a task.
struct Task {
  int group, row, image;
  __device__ Task(int task, int height, int width) {
    const int groups = (width + kDepthwisePixels - 1) / kDepthwisePixels;
    group = task % groups, task /= groups;
    row = task % height;
    image = task / height;
  }
};

// The range of tasks that this block processes.
struct Slab {
  int begin, end;
  explicit __device__ Slab(int tasks) {
    const int size = (tasks + gridDim.y - 1) / gridDim.y;
    begin = min(static_cast<int>(blockIdx.y) * size, tasks);
    end = min(begin + size, tasks);
  }
};

// Loads the filters of the block's channels into shared memory as float32 [K * K, channels of the block].
template <class T, int K>
__device__ const float *load_filter(const void *filter) {
  __shared__ __align__(16) float taps[K * K * kMaxDepthwiseBytes / sizeof(Vector<T>) * T::kLanes];
  const int channels = blockDim.x * T::kLanes, first = blockIdx.x * channels * K * K;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < channels * K * K; i += blockDim.x * blockDim.y) {
    taps[i % (K * K) * channels + i / (K * K)] = load_one(T(), filter, first + i);
  }
  __syncthreads();
  return taps;
}

// Stores the coefficients a and b of BN(x) = a x + b for the block's channels in shared memory [2, kChannels]. If there
// is no BN layer, returns null.
template <class T>
__device__ const float *load_bn(const FixedBn &bn) {
  constexpr int kChannels = kMaxDepthwiseBytes / sizeof(Vector<T>) * T::kLanes;
  __shared__ __align__(16) float coefficients[2 * kChannels];
  if (bn.scale == nullptr) return nullptr;
  const int channels = blockDim.x * T::kLanes, first = blockIdx.x * channels;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < channels; i += blockDim.x * blockDim.y) {
    const float a = bn.scale[first + i] / sqrtf(bn.variance[first + i] + bn.epsilon);
    coefficients[i] = a;
    coefficients[kChannels + i] = bn.bias[first + i] - bn.mean[first + i] * a;
  }
  return coefficients;  // load_filter synchronizes the threads
}

// Replaces the values of this thread's channels with A(a x + b), where A is the activation.
template <class T>
__device__ __forceinline__ void apply_bn(const float *coefficients, int activation, float (&values)[T::kLanes]) {
  constexpr int V = T::kLanes, kChannels = kMaxDepthwiseBytes / sizeof(Vector<T>) * V;
  float a[V], b[V];
  load_floats<T>(coefficients + threadIdx.x * V, a);
  load_floats<T>(coefficients + kChannels + threadIdx.x * V, b);
#pragma unroll
  for (int k = 0; k < V; ++k) values[k] = activation::value_of(activation, fmaf(a[k], values[k], b[k]));
}

// Loads one filter row for each of this thread's channels.
template <class T, int K>
__device__ __forceinline__ void load_taps(const float *taps, int row, float (&values)[K][T::kLanes]) {
  const int channels = blockDim.x * T::kLanes;
#pragma unroll
  for (int j = 0; j < K; ++j) load_floats<T>(taps + (row * K + j) * channels + threadIdx.x * T::kLanes, values[j]);
}

// Loads kColumns vectors from row `row`, starting at column `first`. Rows are numbered consecutively across all images.
// Vectors outside the row are 0.
template <class Vec, int kColumns>
__device__ __forceinline__ void load_columns(const Vec *x, int row, int first, int width, int vectors,
                                             Vec (&columns)[kColumns]) {
  const Vec *from = x + static_cast<size_t>(row) * width * vectors + blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = first + c;
    columns[c] = column >= 0 && column < width ? from[column * vectors] : Vec();
  }
}

template <class T, int K, int S>
__device__ void depthwise_conv(const Vector<T> *x, const void *filter, int tasks, Window w, FixedBn bn, Vector<T> *y) {
  constexpr int V = T::kLanes, P = kDepthwisePixels, kColumns = (P - 1) * S + K;
  const float *coefficients = load_bn<T>(bn);
  const float *shared = load_filter<T, K>(filter);
  const Slab slab(tasks);
  for (int i = slab.begin + threadIdx.y; i < slab.end; i += blockDim.y) {
    const Task task(i, w.out_height, w.out_width);
    float sums[P][V] = {};
#pragma unroll 1
    for (int tap = 0; tap < K; ++tap) {
      const int row = task.row * S - w.padding + tap;
      if (row < 0 || row >= w.height) continue;
      Vector<T> columns[kColumns];
      load_columns(x, task.image * w.height + row, task.group * P * S - w.padding, w.width, w.vectors, columns);
      float taps[K][V];
      load_taps<T, K>(shared, tap, taps);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float values[V];
        unpack_vector<T>(columns[c], values);
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int j = c - p * S;
          if (j < 0 || j >= K) continue;
#pragma unroll
          for (int k = 0; k < V; ++k) sums[p][k] = fmaf(values[k], taps[j][k], sums[p][k]);
        }
      }
    }
    Vector<T> *to = y + static_cast<size_t>(task.image * w.out_height + task.row) * w.out_width * w.vectors +
                blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = task.group * P + p;
      if (column >= w.out_width) continue;
      if (coefficients != nullptr) apply_bn<T>(coefficients, bn.activation, sums[p]);
      to[column * w.vectors] = pack_vector<T>(sums[p]);
    }
  }
}

// The gradient of input pixel (h, w) is the sum of dy (oh, ow) times tap (i, j) over all pairs with h + padding = S oh
// + i and w + padding = S ow + j. Each task begins at a column w with (w + padding) % S = 0, so the compiler knows
// which taps j contribute to each pixel of the task.
template <class T, int K, int S>
__device__ void depthwise_input_gradient(const Vector<T> *dy, const void *filter, int tasks, Window w, Vector<T> *dx) {
  constexpr int V = T::kLanes, P = kDepthwisePixels, kBefore = (K - 1) / S, kColumns = kBefore + (P - 1) / S + 1;
  static_assert(P % S == 0, "each group begins at the same tap");
  const float *shared = load_filter<T, K>(filter);
  const Slab slab(tasks);
  const int skipped = w.padding % S;
  for (int i = slab.begin + threadIdx.y; i < slab.end; i += blockDim.y) {
    const Task task(i, w.height, w.width + skipped);
    float sums[P][V] = {};
    const int bottom = task.row + w.padding;
#pragma unroll 1
    for (int tap = bottom % S; tap < K; tap += S) {
      const int row = (bottom - tap) / S;
      if (bottom < tap || row >= w.out_height) continue;
      Vector<T> columns[kColumns];
      load_columns(dy, task.image * w.out_height + row, task.group * (P / S) + w.padding / S - kBefore, w.out_width,
                   w.vectors, columns);
      float taps[K][V];
      load_taps<T, K>(shared, tap, taps);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float values[V];
        unpack_vector<T>(columns[c], values);
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int j = p - S * (c - kBefore);
          if (j < 0 || j >= K) continue;
#pragma unroll
          for (int k = 0; k < V; ++k) sums[p][k] = fmaf(values[k], taps[j][k], sums[p][k]);
        }
      }
    }
    Vector<T> *to = dx + static_cast<size_t>(task.image * w.height + task.row) * w.width * w.vectors +
                blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = task.group * P + p - skipped;
      if (column >= 0 && column < w.width) to[column * w.vectors] = pack_vector<T>(sums[p]);
    }
  }
}

// Stores each slab's contribution to the filter gradient in `partial` [slabs, K * K, channels]. K threads share a task,
// one thread per filter row, because the sums for an entire filter do not fit into registers.
template <class T, int K, int S>
__device__ void depthwise_filter_gradient(const Vector<T> *x, const Vector<T> *dy, int tasks, Window w,
                                          float *partial) {
  constexpr int V = T::kLanes, P = kDepthwisePixels, kColumns = (P - 1) * S + K;
  __shared__ float shared[kDepthwiseThreads * V];
  const int lanes = blockDim.x, height = blockDim.y / K, tap = threadIdx.y % K;
  const Slab slab(tasks);
  float sums[K][V] = {};
  for (int i = slab.begin + threadIdx.y / K; i < slab.end; i += height) {
    const Task task(i, w.out_height, w.out_width);
    const int row = task.row * S - w.padding + tap;
    if (row < 0 || row >= w.height) continue;
    Vector<T> gradients[P], columns[kColumns];
    load_columns(dy, task.image * w.out_height + task.row, task.group * P, w.out_width, w.vectors, gradients);
    load_columns(x, task.image * w.height + row, task.group * P * S - w.padding, w.width, w.vectors, columns);
    float g[P][V];
#pragma unroll
    for (int p = 0; p < P; ++p) unpack_vector<T>(gradients[p], g[p]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float values[V];
      unpack_vector<T>(columns[c], values);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const int j = c - p * S;
        if (j < 0 || j >= K) continue;
#pragma unroll
        for (int k = 0; k < V; ++k) sums[j][k] = fmaf(g[p][k], values[k], sums[j][k]);
      }
    }
  }
  const int threads = lanes * blockDim.y, thread = threadIdx.y * lanes + threadIdx.x, channels = lanes * V;
#pragma unroll
  for (int j = 0; j < K; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) shared[k * threads + thread] = sums[j][k];
    __syncthreads();
    for (int i = thread; i < K * channels; i += threads) {
      const int row = i / channels, channel = i % channels;
      const float *column = shared + channel % V * threads + row * lanes + channel / V;
      float sum = 0;
      for (int y = 0; y < height; ++y) sum += column[y * K * lanes];
      partial[(static_cast<size_t>(blockIdx.y) * K * K + row * K + j) * w.vectors * V + blockIdx.x * channels +
              channel] = sum;
    }
    __syncthreads();
  }
}

// Computes dfilter [channels, taps] as the sum of partial [slabs, taps, channels] over all slabs.
template <class T>
__device__ void depthwise_filter_sum(const float *partial, int slabs, int taps, int channels, void *dfilter) {
  __shared__ float shared[kFilterSumRows][kFilterSumLanes];
  const int i = blockIdx.x * kFilterSumLanes + threadIdx.x, size = taps * channels;
  float sum = 0;
  if (i < size) {
#pragma unroll 8
    for (int slab = threadIdx.y; slab < slabs; slab += kFilterSumRows) {
      sum += partial[static_cast<size_t>(slab) * size + i];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= size) return;
  for (int y = 1; y < kFilterSumRows; ++y) sum += shared[y][threadIdx.x];
  store_one(T(), sum, dfilter, i % channels * taps + i / channels);
}

#define DEPTHWISE_KERNEL extern "C" __global__ void __launch_bounds__(kDepthwiseThreads, kDepthwiseBlocksPerProcessor)

#define DEPTHWISE_KERNELS(T, K, S) \
  DEPTHWISE_KERNEL depthwise_conv_k##K##_s##S##_##T(const Vector<T> *x, const void *filter, int tasks, Window window, \
                                                    FixedBn bn, Vector<T> *y) { \
    depthwise_conv<T, K, S>(x, filter, tasks, window, bn, y); \
  } \
  DEPTHWISE_KERNEL depthwise_input_gradient_k##K##_s##S##_##T(const Vector<T> *dy, const void *filter, int tasks, \
                                                              Window window, Vector<T> *dx) { \
    depthwise_input_gradient<T, K, S>(dy, filter, tasks, window, dx); \
  } \
  DEPTHWISE_KERNEL depthwise_filter_gradient_k##K##_s##S##_##T(const Vector<T> *x, const Vector<T> *dy, int tasks, \
                                                               Window window, float *partial) { \
    depthwise_filter_gradient<T, K, S>(x, dy, tasks, window, partial); \
  }

#define DEPTHWISE_IN_TYPE(T) \
  DEPTHWISE_KERNELS(T, 3, 1) \
  DEPTHWISE_KERNELS(T, 3, 2) \
  DEPTHWISE_KERNELS(T, 5, 1) \
  DEPTHWISE_KERNELS(T, 5, 2)

#define FILTER_SUM(T) \
  extern "C" __global__ void __launch_bounds__(kFilterSumLanes *kFilterSumRows) \
      depthwise_filter_sum_##T(const float *partial, int slabs, int taps, int channels, void *dfilter) { \
    depthwise_filter_sum<T>(partial, slabs, taps, channels, dfilter); \
  }

DEPTHWISE_IN_TYPE(f32)
DEPTHWISE_IN_TYPE(f16)
DEPTHWISE_IN_TYPE(bf16)
DEPTHWISE_IN_TYPE(f16x4)
DEPTHWISE_IN_TYPE(bf16x4)
FILTER_SUM(f32)
FILTER_SUM(f16)
FILTER_SUM(bf16)
