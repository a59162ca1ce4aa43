// An emulated CUDA driver that runs kernels on the CPU. This file provides the functions that native/gpu.h and
// native/async_copy.h call; the host compiler compiles this project's kernels. The threads of a block are fibers that
// switch at barriers, and blocks run one after another, in a different order in each launch. The emulation detects
// wrong sums, indices and launches, and barriers that not all threads reach. The emulation does not detect errors that
// depend on the order of memory accesses, and does not support float16, because float16 conversions are written in GPU
// assembly.

#undef _FORTIFY_SOURCE  // whose longjmp rejects jumps between stacks

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

// paddle::Tensor::stream() const, which CPU builds of Paddle lack.
extern "C" void *stream(const void *) __asm__("_ZNK6paddle6Tensor6streamEv");
void *stream(const void *) { return nullptr; }

namespace {

struct Dim {
  unsigned x, y, z;
};
Dim threadIdx, blockIdx, blockDim, gridDim;

// CUDA error codes.
constexpr int kInvalidValue = 1, kNotFound = 500, kLaunchFailed = 719;

// Each fiber runs one thread after another. setjmp and longjmp switch fibers, because each switch by
// setcontext, which starts them, makes a system call.
class Block {
 public:
  // Runs `kernel` in all threads of block blockIdx. Returns false if some threads wait at a barrier, but others have
  // ended.
  template <class Kernel>
  bool run(const Kernel &kernel) {
    const size_t count = blockDim.x * blockDim.y;
    fibers_.resize(std::max(fibers_.size(), count));
    kernel_ = [](const void *kernel) { (*static_cast<const Kernel *>(kernel))(); };
    argument_ = &kernel;
    for (size_t i = 0; i < count; ++i) fibers_[i].has_ended = false;
    for (size_t ended = 0; ended < count;) {
      for (size_t i = 0; i < count; ++i) {
        current_ = &fibers_[i];
        threadIdx = {static_cast<unsigned>(i % blockDim.x), static_cast<unsigned>(i / blockDim.x), 0};
        resume();
        ended += current_->has_ended;
      }
      if (ended != 0 && ended != count) {
        fibers_.clear();  // fibers at a barrier cannot run another kernel
        return false;
      }
    }
    return true;
  }

  static void wait() {
    if (_setjmp(current_->state) == 0) _longjmp(scheduler_, 1);
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  struct Fiber {
    jmp_buf state;
    std::unique_ptr<char[]> stack;
    bool has_ended;
  };

  static void enter() {
    for (;;) {
      kernel_(argument_);
      current_->has_ended = true;
      wait();
    }
  }

  // Runs the current fiber up to its next barrier or its end.
  __attribute__((noinline)) static void resume() {
    if (_setjmp(scheduler_) != 0) return;
    if (current_->stack) _longjmp(current_->state, 1);
    current_->stack.reset(new char[kStackBytes]);
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = current_->stack.get();
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, enter, 0);
    setcontext(&context);
  }

  std::vector<Fiber> fibers_;
  inline static jmp_buf scheduler_;
  inline static Fiber *current_;
  inline static void (*kernel_)(const void *);
  inline static const void *argument_;
};

Block block;

}  // namespace

// The features of CUDA C++ that the kernels use.
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
template <class T>
T __ldcg(const T *from) {
  return *from;
}
template <class T>
T __ldcs(const T *from) {
  return *from;
}
int min(int a, int b) { return std::min(a, b); }
unsigned min(int a, unsigned b) { return std::min(static_cast<unsigned>(a), b); }
int max(int a, int b) { return std::max(a, b); }
void __syncthreads() { block.wait(); }

// PTX's cvt.rna.tf32.f32 for finite numbers.
unsigned emulated_round_to_tf32(unsigned bits) { return (bits + 0x1000u) & 0xffffe000u; }

// PTX's mma.m16n8k16 for bfloat16 (two elements per word) or mma.m16n8k8 for TF32 (one element per word). All warps of a
// block must execute the instruction the same number of times.
template <int kElements>
void emulated_multiply_add(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&sums)[4]) {
  struct Registers {
    unsigned a[4], b[2];
  };
  static Registers all[1024];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32;
  all[thread] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  block.wait();
  const Registers *warp = all + (thread - lane);
  const auto element = [](unsigned word, int i) {
    if (kElements == 1) return __uint_as_float(word & 0xffffe000u);
    return __uint_as_float(i ? word & 0xffff0000u : word << 16);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * kElements; ++k) {
      const int word = k / kElements, at = k % kElements;
      sums[i] += element(warp[row % 8 * 4 + word % 4].a[row / 8 + word / 4 * 2], at) *
                 element(warp[column * 4 + word % 4].b[word / 4], at);
    }
  }
  block.wait();
}

// PTX's ldmatrix for four matrices. All warps of a block must execute the instruction the same number of times.
void emulated_load_matrices(const char *row, unsigned (&words)[4]) {
  static const char *rows[1024];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32;
  rows[thread] = row;
  block.wait();
  for (int i = 0; i < 4; ++i) std::memcpy(&words[i], rows[thread - lane + 8 * i + lane / 4] + lane % 4 * 4, 4);
  block.wait();
}

// All warps of a block must execute the instruction the same number of times.
int __shfl_sync(unsigned, int value, int source) {
  static int values[1024];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  values[thread] = value;
  block.wait();
  const int result = values[thread / 32 * 32 + source];
  block.wait();
  return result;
}
void __threadfence() {}
unsigned atomicInc(unsigned *counter, unsigned last) {
  const unsigned before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}

#define asm(...)
#include KERNEL_SOURCE

namespace {

using Call = void (*)(void **);

// Calls a kernel with the addresses of its arguments, like cuLaunchKernel.
template <auto kKernel>
struct Unpack;
template <class... A, void (*kKernel)(A...)>
struct Unpack<kKernel> {
  static void call(void **arguments) { call(arguments, std::index_sequence_for<A...>()); }
  template <size_t... I>
  static void call(void **arguments, std::index_sequence<I...>) {
    kKernel(*static_cast<A *>(arguments[I])...);
  }
};

#define ENTRY(NAME) {#NAME, Unpack<NAME>::call},
#define DEPTHWISE_ENTRIES(T, NAME) \
  ENTRY(depthwise_conv_##NAME##_##T) \
  ENTRY(depthwise_input_gradient_##NAME##_##T) \
  ENTRY(depthwise_filter_gradient_##NAME##_##T)
#define VECTOR_ENTRIES(T) \
  ENTRY(bn_statistics_##T) \
  ENTRY(bn_apply_##T) \
  ENTRY(bn_apply_add_relu_##T) \
  ENTRY(bn_infer_##T) \
  ENTRY(bn_infer_add_relu_##T) \
  ENTRY(bn_reduce_##T) \
  ENTRY(bn_reduce_add_relu_##T) \
  ENTRY(bn_reduce_add_relu_two_##T) \
  ENTRY(bn_gradient_##T) \
  DEPTHWISE_ENTRIES(T, k3_s1) \
  DEPTHWISE_ENTRIES(T, k3_s2) \
  DEPTHWISE_ENTRIES(T, k5_s1) \
  DEPTHWISE_ENTRIES(T, k5_s2) \
  ENTRY(max_pool_##T) \
  ENTRY(max_pool_gradient_##T) \
  ENTRY(average_pool_##T) \
  ENTRY(average_pool_gradient_##T) \
  ENTRY(image_sums_##T) \
  ENTRY(scale_images_##T) \
  ENTRY(sigmoid_##T) \
  ENTRY(sigmoid_gradient_##T)
#define ENTRIES(T) \
  VECTOR_ENTRIES(T) \
  ENTRY(affine_##T) \
  ENTRY(affine_gradient_##T) \
  ENTRY(depthwise_filter_sum_##T) \
  ENTRY(dropout_##T) \
  ENTRY(check_gradients_##T) \
  ENTRY(sum_squares_##T)

#define UPDATE_ENTRIES(T, R) \
  ENTRY(R##_##T) \
  ENTRY(R##_masters_##T) \
  ENTRY(R##_norms_##T) \
  ENTRY(R##_norms_masters_##T)
#define UPDATES_IN_ALL_TYPES(R) UPDATE_ENTRIES(f32, R) UPDATE_ENTRIES(bf16, R) ENTRY(advance_##R)
#define ACTIVATED_ENTRIES(T, A) \
  ENTRY(bn_apply_##A##_##T) \
  ENTRY(bn_infer_##A##_##T) \
  ENTRY(bn_reduce_##A##_##T) \
  ENTRY(bn_gradient_##A##_##T)
#define ADDED_ENTRIES(T, A) \
  ENTRY(bn_apply_add_##A##_##T) \
  ENTRY(bn_infer_add_##A##_##T) \
  ENTRY(bn_reduce_add_##A##_##T) \
  ENTRY(bn_reduce_add_##A##_two_##T)
#define ADDED_IN_ALL_TYPES(A) ADDED_ENTRIES(f32, A) ADDED_ENTRIES(bf16, A) ADDED_ENTRIES(bf16x4, A)
#define ACTIVATED_IN_ALL_TYPES(A) ACTIVATED_ENTRIES(f32, A) ACTIVATED_ENTRIES(bf16, A) ACTIVATED_ENTRIES(bf16x4, A)

const std::map<std::string, Call> kernels = {ENTRIES(f32) ENTRIES(bf16) VECTOR_ENTRIES(bf16x4) FOR_EACH_ACTIVATION(ACTIVATED_IN_ALL_TYPES) FOR_EACH_ADDED_ACTIVATION(ADDED_IN_ALL_TYPES) FOR_EACH_OPTIMIZER(UPDATES_IN_ALL_TYPES) ENTRY(pointwise_filter_gradient_bf16)
                                             ENTRY(pointwise_filter_gradient_bf16x4)
                                             ENTRY(pointwise_conv_32_bf16) ENTRY(pointwise_conv_64_bf16) ENTRY(pointwise_conv_128_bf16)
                                             ENTRY(pointwise_conv_32_f32) ENTRY(pointwise_conv_64_f32) ENTRY(pointwise_conv_128_f32)
                                             ENTRY(pointwise_conv_32_bf16x4) ENTRY(pointwise_conv_64_bf16x4) ENTRY(pointwise_conv_128_bf16x4)
                                             ENTRY(stem_f32) ENTRY(stem_bf16)
                                             ENTRY(follow_loss_scale) ENTRY(clip_factor) ENTRY(concat_8) ENTRY(concat_16) ENTRY(split_8) ENTRY(split_16) ENTRY(follow_averages)
                                          ENTRY(loss_rows) ENTRY(loss_means) ENTRY(loss_gradient)};

}  // namespace

extern "C" {

int cuModuleLoadData(void **module, const void *image) { return *module = const_cast<void *>(image), 0; }
int cuModuleGetFunction(void **function, void *, const char *name) {
  const auto kernel = kernels.find(name);
  if (kernel == kernels.end()) return kNotFound;
  *function = reinterpret_cast<void *>(kernel->second);
  return 0;
}
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, void *, void **arguments, void **) {
  if (grid_x * grid_y == 0 || block_x * block_y == 0 || grid_z != 1 || block_z != 1) return kInvalidValue;
  gridDim = {grid_x, grid_y, grid_z};
  blockDim = {block_x, block_y, block_z};
  static std::mt19937 random;
  std::vector<unsigned> order(grid_x * grid_y);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (unsigned i : order) {
    blockIdx = {i % grid_x, i / grid_x, 0};
    if (!block.run([&] { reinterpret_cast<Call>(function)(arguments); })) return kLaunchFailed;
  }
  return 0;
}
int cuFuncSetAttribute(void *, int, int) { return 0; }
int cuMemAlloc_v2(void **memory, size_t bytes) {
  return *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256), 0;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned) { return cuMemAlloc_v2(memory, bytes); }
int cuMemFreeHost(void *memory) { return std::free(memory), 0; }
int cuMemsetD8_v2(void *memory, unsigned char value, size_t bytes) { return std::memset(memory, value, bytes), 0; }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *) { return std::memcpy(to, from, bytes), 0; }
int cuCtxGetCurrent(void **context) { return *context = nullptr, 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetAttribute(int *value, int, int) { return *value = 20, 0; }  // so that reductions take two steps
int cuEventCreate(void **event, unsigned) { return *event = event, 0; }
int cuEventRecord(void *, void *) { return 0; }
int cuEventQuery(void *) { return 600; }  // not ready
int cuEventSynchronize(void *) { return 0; }
int cuGetErrorString(int error, const char **text) {
  *text = error == kLaunchFailed ? "not all threads of a block have reached a barrier" : "emulated";
  return 0;
}

}  // extern "C"
