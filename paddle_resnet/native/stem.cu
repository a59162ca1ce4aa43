// Kernel for the stem of ResNets in inference: 7x7 convolution with stride 2, BN with fixed statistics, ReLU, and 3x3
// max pooling with stride 2. For float32 images, the kernel multiplies in TF32. The images are [N, H, W, 3]. The output
// of the convolution, which is five times as large as the images, remains in registers.
//
// A grid has (images, strips of `strip` pooled rows times column tiles) blocks. Each group of two warps computes
// kStemColumns pooled columns, for which it needs 15 of the 16 columns of its product; each warp computes 32 channels.
// In each step, a warp computes four rows of the convolution and the maximum of windows of three rows and columns. A
// warp keeps the maximum of the last two rows, because the first pooled row of the next step needs it. After each step,
// the block loads the eight image rows that the next step reads in addition.
//
// A row of a filter multiplies 7 adjacent pixels, which are 21 adjacent elements of the image. The products of the next
// 3 elements with zeros complete 3 groups of 8 elements for the tensor cores.

#include "vector.cuh"

// Returns the address of the block's dynamic shared memory.
#ifdef __CUDACC_RTC__
__device__ __forceinline__ unsigned *stem_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<unsigned *>(memory);
}
#else  // for the GPU that the tests emulate
unsigned *stem_memory() {
  static uint4 memory[stem_words(1) / 4];
  return reinterpret_cast<unsigned *>(memory);
}
#endif

template <class T>
struct Stem {
  static constexpr int V = T::kLanes, kElements = V / 4;  // elements per word
  static constexpr int kFilterWords = stem_filter_words(kElements);

  const void *x;
  Vector<T> *y;
  const StemSize size;
  unsigned *const filters = stem_memory();
  float *const scale = reinterpret_cast<float *>(filters + kFilterWords), *const offset = scale + kStemFilters;
  unsigned *const rows = reinterpret_cast<unsigned *>(offset + kStemFilters);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2;
  // The first pooled row and column of this block, and the first pooled column of this warp.
  const int tiles = (size.out_width - 1) / (blockDim.x / 64 * kStemColumns) + 1;
  const int first_row = blockIdx.y / tiles * size.strip;
  const int first_column = blockIdx.y % tiles * (blockDim.x / 64) * kStemColumns;
  const int column = first_column + warp / 2 * kStemColumns;

  // Stores a value as element i; float32 values are first rounded to TF32.
  static __device__ __forceinline__ void store(float value, void *to, int i) {
    unsigned word[1] = {__float_as_uint(value)};
    round_words(T(), word);
    store_one(T(), __uint_as_float(word[0]), to, i);
  }

  // Stores the products of the filters and BN's scale in the order in which the threads read them, and BN's offset.
  __device__ __forceinline__ void load_filters(const void *from, int channels, const FixedBn &bn) const {
    for (int i = threadIdx.x; i < kFilterWords; i += blockDim.x) filters[i] = 0;
    if (threadIdx.x < kStemFilters) {
      const int channel = filter_channel<T>(threadIdx.x);
      const float factor = bn.scale[channel] / sqrtf(bn.variance[channel] + bn.epsilon);
      scale[threadIdx.x] = factor;
      offset[threadIdx.x] = bn.bias[channel] - bn.mean[channel] * factor;
    }
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < kStemFilters * 3 * 49; i += blockDim.x) {
      const int row = i / (3 * 49), weight = i % (3 * 49);  // a fourth channel is skipped
      const float value = load_one(T(), from, filter_channel<T>(row) * channels * 49 + weight);
      const int factor = weight % 7 * 3 + weight / 49, group = weight % 49 / 7 * 3 + factor / 8;
      const int quad = factor % 8 / 2, thread = row % 8 * 4 + quad, n = row / 8;
      const int word = kElements == 1 ? factor % 2 : group % 2;
      const int at = ((group / kElements * 4 + n / 2) * 32 + thread) * 4 + n % 2 * 2 + word;
      store(value * scale[row], filters, at * kElements + factor % kElements);
    }
  }

  // Loads `count` rows of the image. Row 0 is the first row that the first step reads.
  __device__ __forceinline__ void load_rows(int first, int count) const {
#pragma unroll 6
    for (int i = threadIdx.x; i < count * kStemRow; i += blockDim.x) {
      const int row = first + i / kStemRow, from = 4 * first_row - 5 + row;
      const int at = i % kStemRow, element = 3 * (4 * first_column - 5) + at, width = 3 * size.width;
      const bool is_inside = from >= 0 && from < size.height && element >= 0 && element < width;
      store(is_inside ? load_one(T(), x, from * width + element) : 0.f, rows, row % kStemRows * kStemRow + at);
    }
  }

  // Computes four rows of the convolution. sums[r][n] is the fragment for row r and columns 8 n to 8 n + 7 of the
  // filters.
  __device__ __forceinline__ void multiply(int step, float (&sums)[4][4][4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i / 4][n][i % 4] = offset[half * 32 + 8 * n + lane % 4 * 2 + i % 2];
    }
    const int slot = step % 3 * 8;  // position of the first row in shared memory
    const int at = (6 * (warp / 2 * 2 * kStemColumns + lane / 4) + lane % 4 * 2) / kElements;
    const uint4 *from = reinterpret_cast<const uint4 *>(filters) + half * 64 + lane;
#pragma unroll 1  // otherwise, the compiler keeps pixels for several rows, and lacks registers
    for (int filter_row = 0; filter_row < 7; filter_row += kElements) {
#pragma unroll
      for (int s = 0; s < 3; ++s) {
        const uint4 first = from[0], second = from[32];
        const unsigned b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        from += 128;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            const int group = s * kElements + i;
            int row = slot + 2 * r + min(filter_row + group / 3, 6);
            row -= row < kStemRows ? 0 : kStemRows;
            const unsigned *word = rows + at + (row * kStemRow + group % 3 * 8) / kElements;
            if constexpr (kElements == 1) {
              const uint2 left = *reinterpret_cast<const uint2 *>(word),
                          right = *reinterpret_cast<const uint2 *>(word + 48);
              a[0] = left.x, a[1] = right.x, a[2] = left.y, a[3] = right.y;
            } else {
              a[2 * i] = word[0], a[2 * i + 1] = word[24];
            }
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) multiply_add(T(), a, b[2 * n], b[2 * n + 1], sums[r][n]);
        }
      }
    }
  }

  // Returns the maximum of three adjacent columns and 0. Each argument is a value of a column c = lane / 4, or 8 + c.
  // If c is even, the result belongs to pooled column c / 2, otherwise to pooled column 4 + c / 2.
  __device__ __forceinline__ int pool(int left, int right) const {
    const bool is_odd = lane / 4 % 2;
    const int other = __shfl_sync(0xffffffffu, is_odd ? left : right, lane ^ 4);
    const int next = __shfl_sync(0xffffffffu, is_odd ? other : lane < 4 ? right : left, (lane + 8) % 32);
    return max(max(is_odd ? right : left, other), max(next, 0));
  }

  __device__ __forceinline__ void write(const int (&bits)[8], int row) const {
    const int pooled = lane / 4 / 2 + lane / 4 % 2 * 4;
    if (row < first_row || row >= min(first_row + size.strip, size.out_height)) return;
    if (pooled >= kStemColumns || column + pooled >= size.out_width) return;
    Vector<T> *to = y + ((row * size.out_width + column + pooled) * kStemFilters + half * 32) / V + lane % 4;
#pragma unroll
    for (int i = 0; i < 8; i += V) {
      float values[V];
#pragma unroll
      for (int k = 0; k < V; ++k) values[k] = __uint_as_float(bits[i + k]);
      to[i] = pack_vector<T>(values);
    }
  }

  __device__ __forceinline__ void run(const void *filter, int channels, const FixedBn &bn) {
    x = static_cast<const char *>(x) + static_cast<size_t>(blockIdx.x) * size.height * size.width * 3 * (4 / kElements);
    y += static_cast<size_t>(blockIdx.x) * size.out_height * size.out_width * (kStemFilters / V);
    load_filters(filter, channels, bn);
    load_rows(0, 13);
    __syncthreads();
    const int steps = (min(first_row + size.strip, size.out_height) - first_row) / 2 + 1;
    const int conv_height = (size.height + 1) / 2, conv_width = (size.width + 1) / 2;
    const int conv_column = 2 * column - 1 + lane / 4;
    const bool has_left = conv_column >= 0 && conv_column < conv_width, has_right = conv_column + 8 < conv_width;
    int left_above[8] = {}, right_above[8] = {};  // maximum of the last two rows
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float sums[4][4][4];
      multiply(step, sums);
      // For a maximum that includes 0, float32 numbers can be compared as signed integers. NaN is then the maximum.
      // Because of ReLU, 0 can replace pixels outside the image without becoming a wrong maximum.
      int previous[8], current[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int left[4], right[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = 2 * first_row - 1 + 4 * step + r;
          const bool has_row = row >= 0 && row < conv_height;
          left[r] = has_row && has_left ? __float_as_uint(sums[r][i / 2][i % 2]) : 0;
          right[r] = has_row && has_right ? __float_as_uint(sums[r][i / 2][2 + i % 2]) : 0;
        }
        previous[i] = pool(max(left_above[i], left[0]), max(right_above[i], right[0]));
        current[i] = pool(max(max(left[0], left[1]), left[2]), max(max(right[0], right[1]), right[2]));
        left_above[i] = max(left[2], left[3]), right_above[i] = max(right[2], right[3]);
      }
      if (step > 0) write(previous, first_row + 2 * step - 1);
      write(current, first_row + 2 * step);
      if (step + 1 < steps) load_rows(8 * step + 13, 8);
      __syncthreads();
    }
  }
};

#define STEM(T) \
  extern "C" __global__ void __launch_bounds__(kStemThreads, kBlocksPerProcessor) \
      stem_##T(const void *x, const void *filter, int channels, StemSize size, FixedBn bn, Vector<T> *y) { \
    RUN_STEM(T); \
  }
#if !defined(__CUDACC_RTC__) || __CUDA_ARCH__ >= 800
#define RUN_STEM(T) Stem<T>{x, y, size}.run(filter, channels, bn)
#else  // passes/folding.py uses these kernels only from compute capability 8.0 on
#define RUN_STEM(T) asm("trap;")
#endif

STEM(f32)
STEM(f16)
STEM(bf16)
