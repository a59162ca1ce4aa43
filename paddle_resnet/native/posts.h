// Metrics on their way to the host.

#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu.h"

namespace {

// What steps leave for the host: values copied to pinned memory behind the step's kernels, and an event behind the
// copies. The Executor's own fetch would stop the host, in the middle of a step, until the GPU is there.
class Posts {
 public:
  static constexpr int kSlots = 4;
  static Posts &get() {
    static Posts posts;
    return posts;
  }

  void add(const std::vector<Tensor> &values) {
    Slot &slot = slots_[count_ % kSlots];
    size_t size = 0;
    slot.parts.clear();
    for (const Tensor &value : values) {
      const size_t bytes = value.numel() * phi::SizeOf(value.dtype());
      slot.parts.push_back({size, bytes});
      size += (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    }
    if (values[0].is_gpu()) {
      copy_from_gpu(slot, values, size);
    } else {
      slot.on_cpu.resize(size);
      slot.memory = slot.on_cpu.data();
      slot.is_on_gpu = false;
      for (size_t i = 0; i < values.size(); ++i) {
        std::memcpy(slot.memory + slot.parts[i].start, values[i].data(), slot.parts[i].bytes);
      }
    }
    ++count_;
  }

  uint64_t count() const { return count_; }

  // Wait for a post; returns where its value i is. CUDA's error code, 0 for none, -1 if this is not one of the last
  // kSlots posts.
  int wait(uint64_t number, int i, const char **memory, size_t *bytes) {
    if (number >= count_ || count_ - number > kSlots) return -1;
    const Slot &slot = slots_[number % kSlots];
    if (slot.is_on_gpu) {
      driver<int (*)(void *)>("cuCtxSetCurrent")(context_);
      if (int error = driver<int (*)(void *)>("cuEventSynchronize")(slot.event)) return error;
    }
    *memory = slot.memory + slot.parts[i].start;
    *bytes = slot.parts[i].bytes;
    return 0;
  }

 private:
  struct Part {
    size_t start, bytes;
  };
  struct Slot {
    std::vector<Part> parts;
    char *memory = nullptr;  // one of the next two
    char *pinned = nullptr;
    std::vector<char> on_cpu;
    size_t pinned_size = 0;
    bool is_on_gpu = false;
    void *event = nullptr;
  };

  void copy_from_gpu(Slot &slot, const std::vector<Tensor> &values, size_t size) {
    static const auto copy = driver<int (*)(void *, uintptr_t, size_t, CUstream_st *)>("cuMemcpyDtoHAsync_v2");
    static const auto record = driver<int (*)(void *, CUstream_st *)>("cuEventRecord");
    if (slot.event == nullptr) {
      constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;  // the host sleeps while it waits
      check(driver<int (*)(void **)>("cuCtxGetCurrent")(&context_), "cuCtxGetCurrent");
      check(driver<int (*)(void **, unsigned)>("cuEventCreate")(&slot.event, kBlockingSync | kDisableTiming),
            "an event");
    }
    if (slot.pinned_size < size) {
      if (slot.pinned) check(driver<int (*)(void *)>("cuMemFreeHost")(slot.pinned), "cuMemFreeHost");
      check(driver<int (*)(char **, size_t, unsigned)>("cuMemHostAlloc")(&slot.pinned, size, 0), "cuMemHostAlloc");
      slot.pinned_size = size;
    }
    slot.memory = slot.pinned;
    slot.is_on_gpu = true;
    for (size_t i = 0; i < values.size(); ++i) {
      const uintptr_t from = reinterpret_cast<uintptr_t>(values[i].data());
      check(copy(slot.memory + slot.parts[i].start, from, slot.parts[i].bytes, tensor_stream(&values[i])), "a copy");
    }
    check(record(slot.event, tensor_stream(&values[0])), "cuEventRecord");
  }

  Slot slots_[kSlots];
  uint64_t count_ = 0;
  void *context_ = nullptr;
};

}  // namespace
