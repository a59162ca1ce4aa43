// Kernels for max pooling of images [N, H, W, C]. For each output element, the forward pass stores the position of the
// maximum within the window as one byte, so that the backward pass reads neither the input nor the output. If several
// values are equal, the first one is the maximum. Each thread processes one vector.

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

// Computes the gradient of each input element as the sum of the gradients of all windows whose maximum is this element.
// If `dy2` is not null, it is added to `dy`.
template <class T>
__device__ void max_pool_gradient(const Vector<T> *dy, const Vector<T> *dy2, const unsigned *positions, unsigned inputs,
                                  Window w, Vector<T> *dx) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= inputs) return;
  const Pixel in(index, w.vectors, w.height, w.width);
  const int bottom = in.row + w.padding, right = in.column + w.padding;
  const int first_row = max(0, (bottom - w.kernel + w.stride) / w.stride),
            last_row = min(w.out_height - 1, bottom / w.stride);
  const int first_column = max(0, (right - w.kernel + w.stride) / w.stride);
  const int last_column = min(w.out_width - 1, right / w.stride);
  float sum[V] = {};
  for (int row = first_row; row <= last_row; ++row) {
    for (int column = first_column; column <= last_column; ++column) {
      const unsigned position = (bottom - row * w.stride) * w.kernel + right - column * w.stride;
      const unsigned at = ((in.image * w.out_height + row) * w.out_width + column) * w.vectors + in.vector;
      float values[V];
      unpack_vector<T>(dy[at], values);
      if (dy2 != nullptr) {
        float second[V];
        unpack_vector<T>(dy2[at], second);
#pragma unroll
        for (int k = 0; k < V; ++k) values[k] += second[k];
      }
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const unsigned four = positions[at * (V / 4) + k / 4];
        if ((four >> 8 * (k % 4) & 0xff) == position) sum[k] += values[k];
      }
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
  }

POOL_KERNELS(f32)
POOL_KERNELS(f16)
POOL_KERNELS(bf16)
POOL_KERNELS(f16x4)
POOL_KERNELS(bf16x4)
