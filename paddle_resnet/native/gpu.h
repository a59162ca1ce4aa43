// GPU access for the operators: the CUDA driver, the module that contains the kernels, and the scratch memory for
// reductions. The driver library is loaded with dlopen at the first launch, so the build requires neither the CUDA
// headers nor nvcc.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "common.h"
#include "paddle/phi/api/all.h"

using paddle::Tensor;

namespace {

// Limits of a BN launch: channel vectors per block (also for image_sums), and channel groups per grid.
constexpr int kMaxLanes = 32, kMaxChannelGroups = 4096;

// The function paddle::Tensor::stream() const, declared by its mangled name, because Paddle's headers declare it only
// if the CUDA headers are available. The symbol is weak, because the CPU build of Paddle does not contain it.
struct CUstream_st;
extern "C" CUstream_st *tensor_stream(const Tensor *) __asm__("_ZNK6paddle6Tensor6streamEv") __attribute__((weak));

// Returns a function from the CUDA driver library. Throws if the library or the function is missing.
template <class Function>
Function driver(const char *name) {
  static void *library = dlopen("libcuda.so.1", RTLD_NOW);
  void *symbol = library ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) PD_THROW("CUDA driver (libcuda.so.1): lacks ", name, "; use --kernels paddle");
  return reinterpret_cast<Function>(symbol);
}

// If `result` is an error code, throws an exception whose message contains `what` and the driver's error text.
void check(int result, const std::string &what) {
  if (result == 0) return;
  const char *text = nullptr;
  driver<int (*)(int, const char **)>("cuGetErrorString")(result, &text);
  PD_THROW(what, ": ", text ? text : "unknown CUDA error");
}

// The kernels for this process's GPU, and their scratch memory. All launches must come from one thread and use one
// stream, like those of the Executor, because concurrent kernels would overwrite each other's scratch memory.
class Gpu {
 public:
  // The cubin that contains all kernels. The cubin must be set before get() is called for the first time.
  static std::vector<char> &image() {
    static std::vector<char> bytes;
    return bytes;
  }
  static Gpu &get() {
    static Gpu gpu;
    return gpu;
  }

  void *partial() { return partial_; }    // floats: the sums of each block
  void *arrivals() { return arrivals_; }  // unsigned: counters of finished blocks; 0 between launches
  void *overflow() { return overflow_; }  // int: whether a gradient is not finite; 0 between optimizer steps
  int blocks() const { return blocks_; }  // number of blocks that fill the GPU

  // Launches a kernel on the stream of tensor `on`. `grid` and `block` contain the sizes {x, y}. `arguments` contains
  // the addresses of the kernel's arguments. `shared_bytes` is the size of the kernel's dynamic shared memory.
  void launch(const std::string &name, const Tensor &on, std::vector<unsigned> grid, std::vector<unsigned> block,
              std::vector<void *> arguments, unsigned shared_bytes = 0) {
    using Launch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream_st *,
                           void **, void **);
    static const auto launch = driver<Launch>("cuLaunchKernel");
    auto entry = functions_.find(name);
    if (entry == functions_.end()) {
      void *function = nullptr;
      check(driver<int (*)(void **, void *, const char *)>("cuModuleGetFunction")(&function, module_, name.c_str()),
            name);
      constexpr int kMaxDynamicSharedBytes = 8;
      if (shared_bytes > 0)
        check(driver<int (*)(void *, int, int)>("cuFuncSetAttribute")(function, kMaxDynamicSharedBytes, shared_bytes),
              name);
      entry = functions_.emplace(name, function).first;
    }
    check(launch(entry->second, grid[0], grid[1], 1, block[0], block[1], 1, shared_bytes, tensor_stream(&on),
                 arguments.data(), nullptr),
          name);
  }

 private:
  Gpu() {
    if (image().empty())
      PD_THROW("custom kernels: not loaded; call paddle_resnet.native.build.load with the capability of the GPU");
    check(driver<int (*)(void **, const void *)>("cuModuleLoadData")(&module_, image().data()),
          "custom kernels: the CUDA driver cannot load them; use --kernels paddle");
    int device, processors;
    check(driver<int (*)(int *)>("cuCtxGetDevice")(&device), "cuCtxGetDevice");
    constexpr int kMultiprocessorCount = 16;
    check(driver<int (*)(int *, int, int)>("cuDeviceGetAttribute")(&processors, kMultiprocessorCount, device),
          "cuDeviceGetAttribute");
    blocks_ = processors * kBlocksPerProcessor;
    const size_t sums = static_cast<size_t>(2) * kMaxLanes * kVectorBytes / 2 * sizeof(float);
    allocate(&arrivals_, (2 * kMaxChannelGroups + blocks_) * sizeof(unsigned));
    allocate(&partial_, (blocks_ + kMaxChannelGroups) * sums);
    allocate(&overflow_, sizeof(int));
  }
  void allocate(void **memory, size_t bytes) {
    check(driver<int (*)(void **, size_t)>("cuMemAlloc_v2")(memory, bytes), "cuMemAlloc");
    check(driver<int (*)(void *, unsigned char, size_t)>("cuMemsetD8_v2")(*memory, 0, bytes), "cuMemsetD8");
    // Wait for the memset, because Paddle's stream does not wait for the null stream.
    check(driver<int (*)()>("cuCtxSynchronize")(), "cuCtxSynchronize");
  }

  void *module_ = nullptr, *partial_ = nullptr, *arrivals_ = nullptr, *overflow_ = nullptr;
  int blocks_;
  std::map<std::string, void *> functions_;
};

}  // namespace
