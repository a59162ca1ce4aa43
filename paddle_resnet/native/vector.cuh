// Functions that convert between vectors of consecutive channels in memory and float32 values in registers. No kernel
// includes CUDA headers, so NVRTC needs only the files in this folder.

#include "common.h"

// Data types and their vectors of kLanes elements. The x4 types are for layers whose channels occupy a multiple of 8
// bytes, but not a multiple of 16 bytes (see Shape in tensors.h).
struct f32 {
  using Vector = uint4;
  static constexpr int kLanes = 4;
};
struct f16 {
  using Vector = uint4;
  static constexpr int kLanes = 8;
};
struct bf16 {
  using Vector = uint4;
  static constexpr int kLanes = 8;
};
struct f16x4 : f16 {
  using Vector = uint2;
  static constexpr int kLanes = 4;
};
struct bf16x4 : bf16 {
  using Vector = uint2;
  static constexpr int kLanes = 4;
};
template <class T>
using Vector = typename T::Vector;

// Convert between a 32-bit word and its elements: one 32-bit element, or two 16-bit elements. The first element is in
// the lower half.
__device__ __forceinline__ void unpack(f32, unsigned bits, float *values) { values[0] = __uint_as_float(bits); }
__device__ __forceinline__ unsigned pack(f32, const float *values) { return __float_as_uint(values[0]); }

__device__ __forceinline__ void unpack(f16, unsigned bits, float *values) {
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(bits));
}
__device__ __forceinline__ unsigned pack(f16, const float *values) {
  unsigned bits;
  asm("{.reg .f16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high};}"
      : "=r"(bits)
      : "f"(values[0]), "f"(values[1]));
  return bits;
}

__device__ __forceinline__ void unpack(bf16, unsigned bits, float *values) {
  values[0] = __uint_as_float(bits << 16);
  values[1] = __uint_as_float(bits & 0xffff0000u);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned pack(bf16, const float *values) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(values[1]), "f"(values[0]));
  return bits;
}
#else
__device__ __forceinline__ unsigned round_to_bf16(float value) {
  unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // round to nearest, ties to even
}
__device__ __forceinline__ unsigned pack(bf16, const float *values) {
  return round_to_bf16(values[0]) | round_to_bf16(values[1]) << 16;
}
#endif

// Convert between a vector and T::kLanes floats.
template <class T>
__device__ __forceinline__ void unpack_vector(Vector<T> raw, float (&values)[T::kLanes]) {
  constexpr int kWords = sizeof(raw) / 4, kWord = T::kLanes / kWords;
  unpack(T(), raw.x, values);
  unpack(T(), raw.y, values + kWord);
  if constexpr (kWords == 4) {
    unpack(T(), raw.z, values + 2 * kWord);
    unpack(T(), raw.w, values + 3 * kWord);
  }
}

template <class T>
__device__ __forceinline__ Vector<T> pack_vector(const float (&values)[T::kLanes]) {
  constexpr int kWords = sizeof(Vector<T>) / 4, kWord = T::kLanes / kWords;
  Vector<T> raw;
  raw.x = pack(T(), values);
  raw.y = pack(T(), values + kWord);
  if constexpr (kWords == 4) {
    raw.z = pack(T(), values + 2 * kWord);
    raw.w = pack(T(), values + 3 * kWord);
  }
  return raw;
}

// Load or store T::kLanes elements of a float32 array. The address must be a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void load_floats(const float *source, float (&values)[T::kLanes]) {
#pragma unroll
  for (int i = 0; i < T::kLanes; i += 4) {
    const float4 four = *reinterpret_cast<const float4 *>(source + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}
template <class T>
__device__ __forceinline__ void store_floats(const float (&values)[T::kLanes], float *target) {
#pragma unroll
  for (int i = 0; i < T::kLanes; i += 4) {
    *reinterpret_cast<float4 *>(target + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  }
}

// Load or store only element i. These functions are for the last elements of an array, which may not fill a vector.
__device__ __forceinline__ float load_one(f32, const void *from, int i) { return static_cast<const float *>(from)[i]; }
__device__ __forceinline__ void store_one(f32, float value, void *to, int i) { static_cast<float *>(to)[i] = value; }
template <class T>
__device__ __forceinline__ float load_one(T, const void *from, int i) {
  float pair[2];
  unpack(T(), static_cast<const unsigned short *>(from)[i], pair);
  return pair[0];
}
template <class T>
__device__ __forceinline__ void store_one(T, float value, void *to, int i) {
  const float pair[2] = {value, 0.f};
  static_cast<unsigned short *>(to)[i] = static_cast<unsigned short>(pack(T(), pair));
}

// multiply_add adds the product of a 16x16 matrix and a 16x8 matrix in half precision to `sums` with PTX's
// mma.m16n8k16. In float32, the matrices are 16x8 and 8x8, and the product is in TF32 with mma.m16n8k8. The caller must
// round the elements to TF32 with round_words, because the tensor cores ignore the lower 13 bits. All threads of a warp
// must call multiply_add.
template <class T, int kWords>
__device__ __forceinline__ void round_words(T, unsigned (&)[kWords]) {}
#ifdef __CUDACC_RTC__
#define MULTIPLY_ADD(T, SHAPE, NAME) \
  __device__ __forceinline__ void multiply_add(T, const unsigned (&a)[4], unsigned b0, unsigned b1, \
                                               float (&sums)[4]) { \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, " \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
#if __CUDA_ARCH__ >= 800
MULTIPLY_ADD(f16, "m16n8k16", "f16")
MULTIPLY_ADD(bf16, "m16n8k16", "bf16")
MULTIPLY_ADD(f32, "m16n8k8", "tf32")
template <int kWords>
__device__ __forceinline__ void round_words(f32, unsigned (&words)[kWords]) {
#pragma unroll
  for (unsigned &word : words) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(__uint_as_float(word)));
}
#else  // the callers run only from compute capability 8.0 on, see has_bfloat16_tensor_cores in passes/fusion.py
template <class T>
__device__ void multiply_add(T, const unsigned (&)[4], unsigned, unsigned, float (&)[4]) {
  asm("trap;");
}
#endif
#else  // for the GPU that the tests emulate
template <class T>
void multiply_add(T, const unsigned (&a)[4], unsigned b0, unsigned b1, float (&sums)[4]) {
  emulated_multiply_add<2>(a, b0, b1, sums);
}
void multiply_add(f32, const unsigned (&a)[4], unsigned b0, unsigned b1, float (&sums)[4]) {
  emulated_multiply_add<1>(a, b0, b1, sums);
}
template <int kWords>
void round_words(f32, unsigned (&words)[kWords]) {
  for (unsigned &word : words) word = emulated_round_to_tf32(word);
}
#endif

// Returns the output channel, relative to the first channel of the block, in row `row` of the filters that a block
// multiplies. The column 8 n + 2 quad + i of a warp's product then is element 2 n + i of the thread with this quad. The
// eight elements of a thread are one vector, or two vectors of four elements between which are the vectors of three
// other threads.
template <class T>
__device__ __forceinline__ int filter_channel(unsigned row) {
  constexpr int V = T::kLanes;
  const unsigned quad = row % 8 / 2, element = row / 8 % 4 * 2 + row % 2;
  return row / 32 * 32 + (element / V * 4 + quad) * V + element % V;
}
