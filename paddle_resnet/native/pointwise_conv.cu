// Kernels for 1x1 convolutions. Tensors are [rows, channels] = [N * H * W, C].
//
// The first kernel computes the filter gradient of a convolution in half precision whose input or output has few
// channels. cuDNN sometimes uses only two blocks for this gradient, a product of two tall matrices, because cuDNN does
// not split the rows.
//
// A block has (32, warps) threads. A grid has (groups of kWideChannels channels of the wider tensor, slabs of rows)
// blocks. A warp multiplies chunks of 16 rows on the tensor cores. The fragment layout of PTX's mma.m16n8k16 does not
// prescribe which row and channel a fragment index represents. Therefore, thread (group, quad) of a warp loads rows 4
// quad to 4 quad + 3, channels 8 group to 8 group + 7 of the wider tensor and channels 4 group to 4 group + 3 of the
// narrower tensor, so that no thread needs values from other threads.

#include "activations.h"
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

// The second kernel computes a convolution in evaluation, followed by BN with fixed statistics, an optional residual
// addition and an activation. In float32, this kernel multiplies in TF32.
//
// A grid has (groups of kColumns output channels, groups of rows) blocks. Each block multiplies its part of the filter
// with one tile of kTileRows rows after another. Copies of the next chunks of input channels, also those of the next
// tile, overlap with the multiplication and with writing the results. Each warp computes 32 output channels. The
// filter's channels are permuted in shared memory such that each thread receives complete vectors from the tensor
// cores, and adjacent threads receive adjacent vectors.

// In shared memory, a row of a chunk has kChunkBytes bytes. This function returns the byte offset of a vector in a
// chunk. Eight consecutive rows with the same vector index occupy different banks.
template <class T>
__device__ __forceinline__ int chunk_offset(unsigned row, unsigned vector) {
  const unsigned byte = vector * sizeof(Vector<T>);
  return row * kChunkBytes + ((byte / 16 ^ row / 2 % 4) * 16 + byte % 16);
}

// load_matrices loads four 8x8 matrices of 16-bit elements. Each thread passes the address of one row. copy_vector
// starts to copy a vector to shared memory, or zeros if `is_present` is false. wait_for_copies waits until at most
// kPending of the groups of copies that end_copies separates are not complete.
#ifdef __CUDACC_RTC__
__device__ __forceinline__ unsigned shared_address(const void *to) {
  return static_cast<unsigned>(__cvta_generic_to_shared(to));
}
__device__ __forceinline__ void load_matrices(const char *row, unsigned (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void copy_vector(const uint4 *from, char *to, bool is_present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_vector(const uint2 *from, char *to, bool is_present) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_present ? 8 : 0)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void prefetch(const void *from) {
#if __CUDA_ARCH__ < 1200  // for compute capability 12.x, this instruction crashes the assembler of NVRTC 12.8 and 12.9
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}
#else  // for the GPU that the tests emulate
void load_matrices(const char *row, unsigned (&words)[4]) { emulated_load_matrices(row, words); }
template <class V>
void copy_vector(const V *from, char *to, bool is_present) {
  *reinterpret_cast<V *>(to) = is_present ? *from : V{};
}
void end_copies() {}
template <int>
void wait_for_copies() {}
void prefetch(const void *) {}
#endif

template <class T, int kColumns>
struct PointwiseConv {
  static constexpr int V = T::kLanes, kVectors = kChunkBytes / sizeof(Vector<T>);  // vectors per row of a chunk
  static constexpr int kStages = kColumns == 128 ? 3 : 4;  // chunks in shared memory, at most 48 KB
  static constexpr int kStageBytes = (kTileRows + kColumns) * kChunkBytes;
  static constexpr int kWarpColumns = kColumns / 32, kWarpRows = kTileRows * kWarpColumns / 8;
  static constexpr int kFragments = kWarpRows / 16;  // 16x32 products that a warp computes

  const Vector<T> *x, *filter, *z;
  Vector<T> *y;
  const int rows, in, out;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The first row and channel of the results of this thread, relative to a tile and to the tensor.
  const int row = warp / kWarpColumns * kWarpRows + lane / 4;
  const int channel = blockIdx.x * kColumns + warp % kWarpColumns * 32 + lane % 4 * V;
  // The row and vector that this thread copies, and offsets of the vectors that it copies and loads. The offset of a
  // vector 16 rows below is 1024 higher.
  const unsigned copied_row = threadIdx.x / kVectors, copied_vector = threadIdx.x % kVectors;
  const unsigned copied = chunk_offset<T>(copied_row, copied_vector);
  const unsigned loaded = chunk_offset<f16>(warp / kWarpColumns * kWarpRows + lane % 16, lane / 16);
  const unsigned loaded_filter =
      chunk_offset<f16>(kTileRows + warp % kWarpColumns * 32 + lane / 16 * 8 + lane % 8, lane / 8 % 2);

  // Returns the channel of element i of a row, relative to the first channel of this thread (see filter_channel).
  static __device__ __forceinline__ constexpr int channel_offset(int i) { return i / V * 4 * V + i % V; }

  // Starts copying chunk `chunk` of a tile and of the filter.
  __device__ __forceinline__ void copy(int tile, int chunk, char *stage) const {
    constexpr int kStep = kPointwiseThreads / kVectors;  // rows
    const int vectors = in / V, at = chunk * kVectors + copied_vector;
    const int first = tile * kTileRows + copied_row;
    const Vector<T> *from = x + static_cast<size_t>(first) * vectors + at;
#pragma unroll
    for (int i = 0; i < kTileRows; i += kStep) {
      copy_vector(from, stage + copied + i * kChunkBytes, first + i < rows && at < vectors);
      from += kStep * vectors;
    }
#pragma unroll
    for (int i = 0; i < kColumns; i += kStep) {
      const int to = blockIdx.x * kColumns + filter_channel<T>(i + copied_row);
      if (kColumns % kStep == 0 || i + copied_row < kColumns)
        copy_vector(filter + static_cast<size_t>(to) * vectors + at, stage + copied + (kTileRows + i) * kChunkBytes,
                    to < out && at < vectors);
    }
    if (z == nullptr || chunk != 0) return;
    // The channels per cache line, and the cache lines per row of the addend.
    constexpr int kLine = 128 / sizeof(Vector<T>) * V, kLines = (kColumns + kLine - 1) / kLine;
#pragma unroll
    for (int i = 0; i < kTileRows * kLines; i += kPointwiseThreads) {
      const int line = i + threadIdx.x, added = tile * kTileRows + line / kLines;
      const int to = blockIdx.x * kColumns + line % kLines * kLine;
      if (line < kTileRows * kLines && added < rows && to < out)
        prefetch(z + (static_cast<size_t>(added) * out + to) / V);
    }
  }

  // Adds the product of a chunk of the tile and of the filter to `sums`.
  __device__ __forceinline__ void multiply(const char *stage, float (&sums)[kFragments][4][4]) const {
#pragma unroll
    for (int k = 0; k < kChunkBytes / 16; k += 2) {
      unsigned b[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_matrices(stage + (loaded_filter ^ k * 16) + n * 1024, b[n]);
        round_words(T(), b[n]);
      }
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        unsigned a[4];
        load_matrices(stage + (loaded ^ k * 16) + i * 1024, a);
        round_words(T(), a);
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply_add(T(), a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], sums[i][n]);
      }
    }
  }

  // Loads the coefficients scale and offset of BN for the eight channels of this thread. Loads beyond the last channel
  // read the last four channels instead; the results for such channels are not stored.
  __device__ __forceinline__ void load_coefficients(const FixedBn &bn, float (&scale)[8], float (&offset)[8]) const {
    float variance[8], mean[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const int at = min(channel + channel_offset(i), out - 4);
      const auto load = [&](const float *from, float(&to)[8]) {
        const float4 four = *reinterpret_cast<const float4 *>(from + at);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
      };
      load(bn.scale, scale), load(bn.bias, offset), load(bn.mean, mean), load(bn.variance, variance);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scale[i] /= sqrtf(variance[i] + bn.epsilon);
      offset[i] -= mean[i] * scale[i];
    }
  }

  // Replaces the sums with BN(sums) [+ z].
  __device__ __forceinline__ void normalize(float (&sums)[kFragments][4][4], const float (&scale)[8],
                                            const float (&offset)[8], int first_row) const {
#pragma unroll
    for (int i = 0; i < 2 * kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float &sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        sum = fmaf(sum, scale[j], offset[j]);
      }
    }
    if (z == nullptr) return;
    const Vector<T> *from = z + (static_cast<size_t>(first_row) * out + channel) / V;
#pragma unroll
    for (int i = 0; i < 2 * kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 8; j += V) {
        if (first_row + 8 * i >= rows || channel + channel_offset(j) >= out) continue;
        float addend[V];
        unpack_vector<T>(__ldcs(from + i * (8 / V) * out + channel_offset(j) / V), addend);
#pragma unroll
        for (int k = 0; k < V; ++k) sums[i / 2][(j + k) / 2][i % 2 * 2 + k % 2] += addend[k];
      }
    }
  }

  template <class A>
  static __device__ __forceinline__ void activate(float (&sums)[kFragments][4][4]) {
#pragma unroll
    for (int i = 0; i < kFragments * 16; ++i) {
      float &sum = sums[i / 16][i / 4 % 4][i % 4];
      sum = A::value(sum);
    }
  }

  __device__ __forceinline__ void write(const float (&sums)[kFragments][4][4], int first_row) const {
    Vector<T> *to = y + (static_cast<size_t>(first_row) * out + channel) / V;
#pragma unroll
    for (int i = 0; i < 2 * kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 8; j += V) {
        float values[V];
#pragma unroll
        for (int k = 0; k < V; ++k) values[k] = sums[i / 2][(j + k) / 2][i % 2 * 2 + k % 2];
        if (first_row + 8 * i < rows && channel + channel_offset(j) < out)
          to[i * (8 / V) * out + channel_offset(j) / V] = pack_vector<T>(values);
      }
    }
  }

  __device__ __forceinline__ void run(const FixedBn &bn) const {
    __shared__ __align__(128) char stages[kStages * kStageBytes];
    constexpr int kChunk = kVectors * V;  // input channels
    const int chunks = (in + kChunk - 1) / kChunk, tiles = (rows + kTileRows - 1) / kTileRows;
    float scale[8], offset[8], sums[kFragments][4][4] = {};
    int next_tile = blockIdx.y, next_chunk = 0, next_stage = 0;  // to copy
    int tile = blockIdx.y, chunk = 0, stage = 0;                 // to multiply
#pragma unroll 1
    for (int step = 1 - kStages; tile < tiles; ++step) {
      if (step >= 0) {
        wait_for_copies<kStages - 2>();
        __syncthreads();  // all threads have copied this chunk and have multiplied the previous one
      }
      if (next_tile < tiles) copy(next_tile, next_chunk, stages + next_stage * kStageBytes);
      end_copies();
      if (++next_chunk == chunks) next_chunk = 0, next_tile += gridDim.y;
      if (++next_stage == kStages) next_stage = 0;
      if (step < 0) {
        if (step == -1) load_coefficients(bn, scale, offset);
        continue;
      }

      multiply(stages + stage * kStageBytes, sums);
      if (++stage == kStages) stage = 0;
      if (++chunk < chunks) continue;
      const int first_row = tile * kTileRows + row;
      normalize(sums, scale, offset, first_row);
      switch (bn.activation) {
#define CASE(A) \
  case activation::k_##A: \
    activate<activation::A>(sums); \
    break;
        FOR_EACH_ACTIVATION(CASE)
#undef CASE
      }
      write(sums, first_row);
#pragma unroll
      for (int i = 0; i < kFragments * 16; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0;
      chunk = 0, tile += gridDim.y;
    }
  }
};

#define POINTWISE_CONV(T, COLUMNS, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(kPointwiseThreads, BLOCKS) \
      pointwise_conv_##COLUMNS##_##T(const Vector<T> *x, const Vector<T> *filter, const Vector<T> *z, int rows, \
                                     int in, int out, FixedBn bn, Vector<T> *y) { \
    RUN_POINTWISE_CONV(T, COLUMNS); \
  }
#if !defined(__CUDACC_RTC__) || __CUDA_ARCH__ >= 800
#define RUN_POINTWISE_CONV(T, COLUMNS) PointwiseConv<T, COLUMNS>{x, filter, z, y, rows, in, out}.run(bn)
#else  // passes/fusion.py and passes/folding.py use these kernels only from compute capability 8.0 on
#define RUN_POINTWISE_CONV(T, COLUMNS) asm("trap;")
#endif

#define POINTWISE_CONV_IN_TYPE(T) \
  POINTWISE_CONV(T, 32, kNarrowTileBlocks) \
  POINTWISE_CONV(T, 64, kNarrowTileBlocks) \
  POINTWISE_CONV(T, 128, kBlocksPerProcessor)

POINTWISE_CONV_IN_TYPE(f32)
POINTWISE_CONV_IN_TYPE(f16)
POINTWISE_CONV_IN_TYPE(bf16)
POINTWISE_CONV_IN_TYPE(f16x4)
POINTWISE_CONV_IN_TYPE(bf16x4)
