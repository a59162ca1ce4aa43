// Parallel loops for the CPU. The work is divided statically among the threads, so results depend on the number of
// threads, but are the same in each run.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace reference {

// With fewer elements per thread, starting a thread costs more than it saves.
constexpr int64_t kParallelElements = 16384;

// Returns the number of threads for a loop over this number of elements.
inline int threads_for(int64_t elements) {
  return std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), elements / kParallelElements));
}

// Divides the range [0, size) among `threads` threads, and calls run(thread, first, last) in each.
template <class Run>
void in_parallel(int threads, int64_t size, const Run &run) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    run(static_cast<int>(thread), size * thread / count, size * (thread + 1) / count);
  }
}

// Partial sums in float64, one row of `size` sums per thread.
struct PartialSums {
  PartialSums(int threads, int64_t size) : size(size), sums(threads * size) {}
  double *of(int thread) { return sums.data() + thread * size; }

  // Adds all rows to the first one, in the order of the threads, and returns it.
  const double *total() {
    for (int64_t i = size; i < static_cast<int64_t>(sums.size()); ++i) sums[i % size] += sums[i];
    return sums.data();
  }

  int64_t size;
  std::vector<double> sums;
};

}  // namespace reference
