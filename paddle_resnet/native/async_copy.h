// The operator that copies the results of a step, such as metrics or probabilities, to the host asynchronously, and the
// ring buffer from which Python reads them.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gpu.h"
#include "tensors.h"

namespace {

// A ring buffer that contains the last kSlots copies. Each copy contains the results of one step. On a GPU, the results
// are copied to pinned memory on the step's stream, and an event marks the end of the copy. Enqueuing a copy does not
// block the host, whereas the Executor's fetch waits until the GPU has finished the step.
class AsyncCopies {
 public:
  static constexpr int kSlots = 4;
  static AsyncCopies &get() {
    static AsyncCopies copies;
    return copies;
  }

  // Enqueues a new copy, which overwrites the oldest copy.
  void add(const Tensors &values) {
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

  // Returns how many copies have been enqueued so far. Copies are numbered from 0, so the latest copy has the number
  // count() - 1.
  uint64_t count() const { return count_; }

  // Blocks until a copy is complete, then sets `memory` and `bytes` to the address and size of value i in the copy.
  // Returns 0 on success, -1 if the ring buffer does not contain the copy, or the driver's error code.
  int wait(uint64_t number, int i, const char **memory, size_t *bytes) {
    if (number >= count_ || count_ - number > kSlots) return -1;
    const Slot &slot = slots_[number % kSlots];
    if (slot.is_on_gpu) {
      driver<int (*)(void *)>("cuCtxSetCurrent")(context_);
      if (int error = wait_for(slot)) return error;
    }
    *memory = slot.memory + slot.parts[i].start;
    *bytes = slot.parts[i].bytes;
    return 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Part {
    size_t start, bytes;  // location of a value in the memory of its slot; `start` is a multiple of kVectorBytes
  };
  struct Slot {
    std::vector<Part> parts;
    char *memory = nullptr;  // `pinned` or `on_cpu`
    char *pinned = nullptr;
    std::vector<char> on_cpu;
    size_t pinned_size = 0;
    bool is_on_gpu = false;
    void *event = nullptr;
    Clock::time_point enqueued;
  };

  // Blocks until a copy from the GPU is complete. Returns 0 or the driver's error code. Because waking a sleeping
  // thread takes time, the host first polls if the copy was enqueued recently.
  static int wait_for(const Slot &slot) {
    static const auto query = driver<int (*)(void *)>("cuEventQuery");
    static const auto sleep = driver<int (*)(void *)>("cuEventSynchronize");
    constexpr std::chrono::milliseconds kPolling(2);
    constexpr int kNotReady = 600;
    int error;
    do {
      error = query(slot.event);
    } while (error == kNotReady && Clock::now() - slot.enqueued < kPolling);
    return error == kNotReady ? sleep(slot.event) : error;
  }

  void copy_from_gpu(Slot &slot, const Tensors &values, size_t size) {
    static const auto copy = driver<int (*)(void *, uintptr_t, size_t, CUstream_st *)>("cuMemcpyDtoHAsync_v2");
    static const auto record = driver<int (*)(void *, CUstream_st *)>("cuEventRecord");
    if (slot.event == nullptr) {
      constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;  // event flags; cuEventSynchronize sleeps
      check(driver<int (*)(void **)>("cuCtxGetCurrent")(&context_), "cuCtxGetCurrent");
      check(driver<int (*)(void **, unsigned)>("cuEventCreate")(&slot.event, kBlockingSync | kDisableTiming),
            "cuEventCreate");
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
      check(copy(slot.memory + slot.parts[i].start, from, slot.parts[i].bytes, tensor_stream(&values[i])),
            "cuMemcpyDtoHAsync");
    }
    check(record(slot.event, tensor_stream(&values[0])), "cuEventRecord");
    slot.enqueued = Clock::now();
  }

  Slot slots_[kSlots];
  uint64_t count_ = 0;
  void *context_ = nullptr;  // context of the copying thread; Python may wait in a different thread
};

std::vector<Tensor> AsyncCopy(const Tensors &values) {
  AsyncCopies::get().add(values);
  return {paddle::empty({1}, DataType::INT32, values[0].place())};  // Paddle requires an output
}

}  // namespace
