// Kernel for the filter gradient of a 1x1 convolution in half precision whose input or output has few channels. Tensors
// are [rows, channels] = [N * H * W, C]. cuDNN sometimes uses only two blocks for this product of two tall matrices,
// because it does not split the rows.
//
// A block has (32, warps) threads. A grid has (groups of kWideChannels channels of the wider tensor, slabs of rows)
// blocks. A warp multiplies chunks of 16 rows on the tensor cores. The fragment layout of PTX's mma.m16n8k16 does not
// prescribe which row and channel a fragment index represents. Therefore, thread (group, quad) of a warp loads rows 4
// quad to 4 quad + 3, channels 8 group to 8 group + 7 of the wider tensor and channels 4 group to 4 group + 3 of the
// narrower tensor, so that no thread needs values from other threads.

#include "vector.cuh"

// Combine the lower (or upper) halves of two words into one word. The half of `a` becomes the lower half of the result.
__device__ __forceinline__ unsigned lower_halves(unsigned a, unsigned b) { return (a & 0xffffu) | (b << 16); }
__device__ __forceinline__ unsigned upper_halves(unsigned a, unsigned b) { return (a >> 16) | (b & 0xffff0000u); }

// The part of a chunk that one thread loads. Elements beyond the last row or channel are 0. The data type T determines
// the vectors of the wider tensor.
template <class T>
struct Chunk {
  static constexpr int kWords = T::kLanes / 2;
  unsigned wide[4][4], narrow[4][2];  // two channels per element

  __device__ __forceinline__ void load(const Vector<T> *wide_from, const uint2 *narrow_from, int first_row, int rows,
                                       int wide_vectors, int narrow_vectors, int wide_at, int narrow_at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i;
      uint2 n = {0, 0};
      if (row < rows && narrow_at < narrow_vectors)
        n = narrow_from[static_cast<size_t>(row) * narrow_vectors + narrow_at];
      narrow[i][0] = n.x, narrow[i][1] = n.y;
#pragma unroll
      for (int word = 0; word < 4; word += kWords) {
        const int at = (wide_at * 4 + word) / kWords;
        Vector<T> w = {};
        if (row < rows && at < wide_vectors) w = wide_from[static_cast<size_t>(row) * wide_vectors + at];
        wide[i][word] = w.x, wide[i][word + 1] = w.y;
        if constexpr (kWords == 4) wide[i][2] = w.z, wide[i][3] = w.w;
      }
    }
  }
};

// Adds the product of a chunk to `sums`. sums[i][n] is the fragment for channels 8 group + 2 i + {0, 1} of the wider
// tensor and channels 4 column + n of the narrower tensor.
template <class T>
__device__ __forceinline__ void add_product(const Chunk<T> &chunk, float (&sums)[4][4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned a[4] = {lower_halves(chunk.wide[0][i], chunk.wide[1][i]),
                           upper_halves(chunk.wide[0][i], chunk.wide[1][i]),
                           lower_halves(chunk.wide[2][i], chunk.wide[3][i]),
                           upper_halves(chunk.wide[2][i], chunk.wide[3][i])};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const unsigned(&n)[4][2] = chunk.narrow;
      multiply_add(T(), a, lower_halves(n[0][word], n[1][word]), lower_halves(n[2][word], n[3][word]),
                   sums[i][2 * word]);
      multiply_add(T(), a, upper_halves(n[0][word], n[1][word]), upper_halves(n[2][word], n[3][word]),
                   sums[i][2 * word + 1]);
    }
  }
}

// Writes the sums of each slab to `partial` [slabs, wide * narrow]. The sum for a pair of channels has the index (wide
// channel * wide_stride + narrow channel * narrow_stride). `wide` and `narrow` are the numbers of channels.
template <class T>
__device__ void pointwise_filter_gradient(const Vector<T> *wide_from, const uint2 *narrow_from, int rows, int wide,
                                          int narrow, int wide_stride, int narrow_stride, float *partial) {
  constexpr int kUnroll = 2;  // chunks that a warp loads before it multiplies them
  __shared__ float total[kWideChannels * kNarrowChannels];
  const int group = threadIdx.x / 4, quad = threadIdx.x % 4, warps = blockDim.y;
  const int wide_at = blockIdx.x * (kWideChannels / 8) + group;
  const int chunks = (rows + kChunkRows - 1) / kChunkRows, size = (chunks + gridDim.y - 1) / gridDim.y;
  const int begin = min(static_cast<int>(blockIdx.y) * size, chunks), end = min(begin + size, chunks);
  float sums[4][4][4] = {};
  for (int first = begin; first < end; first += kUnroll * warps) {  // all warps have the same number of iterations
    Chunk<T> loaded[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int chunk = first + step * warps + threadIdx.y;
      const int available = chunk < end ? rows : 0;
      loaded[step].load(wide_from, narrow_from, chunk * kChunkRows + 4 * quad, available, wide / T::kLanes, narrow / 4,
                        wide_at, group);
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) add_product<T>(loaded[step], sums);
  }
  for (int turn = 0; turn < warps; ++turn) {  // the warps add their sums in a fixed order
    if (threadIdx.y == turn) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int element = 0; element < 4; ++element) {
            const int wide_channel = 8 * group + 2 * i + element / 2, narrow_channel = 4 * (2 * quad + element % 2) + n;
            float &sum = total[wide_channel * kNarrowChannels + narrow_channel];
            sum = turn == 0 ? sums[i][n][element] : sum + sums[i][n][element];
          }
        }
      }
    }
    __syncthreads();
  }
  partial += static_cast<size_t>(blockIdx.y) * wide * narrow;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < kWideChannels * kNarrowChannels; i += blockDim.x * warps) {
    const int wide_channel = blockIdx.x * kWideChannels + i / kNarrowChannels, narrow_channel = i % kNarrowChannels;
    if (wide_channel < wide && narrow_channel < narrow)
      partial[wide_channel * wide_stride + narrow_channel * narrow_stride] = total[i];
  }
}

#define POINTWISE_IN_TYPE(T) \
  extern "C" __global__ void __launch_bounds__(kPointwiseThreads, kBlocksPerProcessor) \
      pointwise_filter_gradient_##T(const Vector<T> *wide_from, const uint2 *narrow_from, int rows, int wide, \
                                    int narrow, int wide_stride, int narrow_stride, float *partial) { \
    pointwise_filter_gradient<T>(wide_from, narrow_from, rows, wide, narrow, wide_stride, narrow_stride, partial); \
  }

POINTWISE_IN_TYPE(f16)
POINTWISE_IN_TYPE(bf16)
POINTWISE_IN_TYPE(f16x4)
POINTWISE_IN_TYPE(bf16x4)
