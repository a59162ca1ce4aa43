// Kernels for max pooling and average pooling of images [N, H, W, C]. Each thread processes one vector.
//
// For each output element, max pooling stores the position of the maximum within the window as one byte, so that the
// backward pass reads neither the input nor the output. If several values are equal, the first one is the maximum.

#include "vector.cuh"

// The coordinates of vector number `index` in an array [N, H, W, vectors].
struct Pixel {
  int vector, column, row, image;
  __device__ Pixel(unsigned index, int vectors, int height, int width) {
    vector = index % vectors, index /= vectors;
    column = index % width, index /= width;
    row = index % height, image = index / height;
  }
};

template <class T>
__device__ void max_pool(const Vector<T> *x, unsigned outputs, Window w, Vector<T> *y, unsigned *positions) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= outputs) return;
  const Pixel out(index, w.vectors, w.out_height, w.out_width);
  float best[V];
  unsigned position[V];
  bool is_first = true;
  for (int i = 0; i < w.kernel; ++i) {
    const int row = out.row * w.stride - w.padding + i;
    if (row < 0 || row >= w.height) continue;
    for (int j = 0; j < w.kernel; ++j) {
      const int column = out.column * w.stride - w.padding + j;
      if (column < 0 || column >= w.width) continue;
      float values[V];
      unpack_vector<T>(x[((out.image * w.height + row) * w.width + column) * w.vectors + out.vector], values);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (is_first || values[k] > best[k] || values[k] != values[k]) {  // NaN is treated as the maximum
          best[k] = values[k];
          position[k] = i * w.kernel + j;
        }
      }
      is_first = false;
    }
  }
  y[index] = pack_vector<T>(best);
#pragma unroll
  for (int k = 0; k < V; k += 4) {
    positions[index * (V / 4) + k / 4] =
        position[k] | position[k + 1] << 8 | position[k + 2] << 16 | position[k + 3] << 24;
  }
}

// The windows that contain a pixel: rows first_row to last_row and columns first_column to last_column of the output.
struct Windows {
  int bottom, right, first_row, last_row, first_column, last_column;
  __device__ Windows(const Pixel &in, const Window &w) {
    bottom = in.row + w.padding, right = in.column + w.padding;
    first_row = max(0, (bottom - w.kernel + w.stride) / w.stride), last_row = min(w.out_height - 1, bottom / w.stride);
    first_column = max(0, (right - w.kernel + w.stride) / w.stride);
    last_column = min(w.out_width - 1, right / w.stride);
  }
};

// Loads one vector of the gradient of the output. If `dy2` is not null, it is added to `dy`.
template <class T>
__device__ void load_gradient(const Vector<T> *dy, const Vector<T> *dy2, unsigned at, float (&values)[T::kLanes]) {
  unpack_vector<T>(dy[at], values);
  if (dy2 == nullptr) return;
  float second[T::kLanes];
  unpack_vector<T>(dy2[at], second);
#pragma unroll
  for (int k = 0; k < T::kLanes; ++k) values[k] += second[k];
}

// Computes the gradient of each input element as the sum of the gradients of all windows whose maximum is this element.
template <class T>
__device__ void max_pool_gradient(const Vector<T> *dy, const Vector<T> *dy2, const unsigned *positions, unsigned inputs,
                                  Window w, Vector<T> *dx) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= inputs) return;
  const Pixel in(index, w.vectors, w.height, w.width);
  const Windows windows(in, w);
  float sum[V] = {};
  for (int row = windows.first_row; row <= windows.last_row; ++row) {
    for (int column = windows.first_column; column <= windows.last_column; ++column) {
      const unsigned position = (windows.bottom - row * w.stride) * w.kernel + windows.right - column * w.stride;
      const unsigned at = ((in.image * w.out_height + row) * w.out_width + column) * w.vectors + in.vector;
      float values[V];
      load_gradient<T>(dy, dy2, at, values);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const unsigned four = positions[at * (V / 4) + k / 4];
        if ((four >> 8 * (k % 4) & 0xff) == position) sum[k] += values[k];
      }
    }
  }
  dx[index] = pack_vector<T>(sum);
}

// Returns the factor of an average over a window: 1 / number of elements, without or with padding.
__device__ float average_factor(int row, int column, const Window &w, bool excludes_padding) {
  if (!excludes_padding) return 1.f / (w.kernel * w.kernel);
  const int top = row * w.stride - w.padding, left = column * w.stride - w.padding;
  const int rows = min(top + w.kernel, w.height) - max(top, 0), columns = min(left + w.kernel, w.width) - max(left, 0);
  return 1.f / (rows * columns);
}

template <class T>
__device__ void average_pool(const Vector<T> *x, unsigned outputs, Window w, bool excludes_padding, Vector<T> *y) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= outputs) return;
  const Pixel out(index, w.vectors, w.out_height, w.out_width);
  const int top = out.row * w.stride - w.padding, left = out.column * w.stride - w.padding;
  float sum[V] = {};
  for (int row = max(top, 0); row < min(top + w.kernel, w.height); ++row) {
    for (int column = max(left, 0); column < min(left + w.kernel, w.width); ++column) {
      float values[V];
      unpack_vector<T>(x[((out.image * w.height + row) * w.width + column) * w.vectors + out.vector], values);
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] += values[k];
    }
  }
  const float factor = average_factor(out.row, out.column, w, excludes_padding);
#pragma unroll
  for (int k = 0; k < V; ++k) sum[k] *= factor;
  y[index] = pack_vector<T>(sum);
}

template <class T>
__device__ void average_pool_gradient(const Vector<T> *dy, const Vector<T> *dy2, unsigned inputs, Window w,
                                      bool excludes_padding, Vector<T> *dx) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= inputs) return;
  const Pixel in(index, w.vectors, w.height, w.width);
  const Windows windows(in, w);
  float sum[V] = {};
  for (int row = windows.first_row; row <= windows.last_row; ++row) {
    for (int column = windows.first_column; column <= windows.last_column; ++column) {
      const float factor = average_factor(row, column, w, excludes_padding);
      float values[V];
      load_gradient<T>(dy, dy2, ((in.image * w.out_height + row) * w.out_width + column) * w.vectors + in.vector,
                       values);
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] += values[k] * factor;
    }
  }
  dx[index] = pack_vector<T>(sum);
}

#define POOL_KERNELS(T) \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      max_pool_##T(const Vector<T> *x, unsigned outputs, Window window, Vector<T> *y, unsigned *positions) { \
    max_pool<T>(x, outputs, window, y, positions); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      max_pool_gradient_##T(const Vector<T> *dy, const Vector<T> *dy2, const unsigned *positions, unsigned inputs, \
                            Window window, Vector<T> *dx) { \
    max_pool_gradient<T>(dy, dy2, positions, inputs, window, dx); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      average_pool_##T(const Vector<T> *x, unsigned outputs, Window window, bool excludes_padding, Vector<T> *y) { \
    average_pool<T>(x, outputs, window, excludes_padding, y); \
  } \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      average_pool_gradient_##T(const Vector<T> *dy, const Vector<T> *dy2, unsigned inputs, Window window, \
                                bool excludes_padding, Vector<T> *dx) { \
    average_pool_gradient<T>(dy, dy2, inputs, window, excludes_padding, dx); \
  }

POOL_KERNELS(f32)
POOL_KERNELS(f16)
POOL_KERNELS(bf16)
POOL_KERNELS(f16x4)
POOL_KERNELS(bf16x4)
