// Reference implementation of y = s x + b with one scale and one bias for all elements, and of its gradients: float32
// loops for the CPU that sum in float64.

#pragma once

#include <cstdint>

#include "parallel.h"

namespace reference {

void affine(const float *x, float scale, float bias, int64_t size, float *y) {
  in_parallel(threads_for(size), size, [&](int, int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = first; i < last; ++i) y[i] = scale * x[i] + bias;
  });
}

// Computes dx = s dy, sums[0] = the sum of x dy, and sums[1] = the sum of dy. This is not part of the lambda function
// below, because GCC 12 would not vectorize the loop there.
inline void affine_gradient(const float *x, const float *dy, float scale, int64_t size, float *dx, double *sums) {
  double ds = 0, db = 0;
#pragma omp simd reduction(+ : ds, db)
  for (int64_t i = 0; i < size; ++i) {
    ds += static_cast<double>(x[i]) * dy[i];
    db += dy[i];
    dx[i] = scale * dy[i];
  }
  sums[0] = ds, sums[1] = db;
}

// Computes dx = s dy, dscale = the sum of x dy, and dbias = the sum of dy.
void affine_gradient(const float *x, const float *dy, float scale, int64_t size, float *dx, float *dscale,
                     float *dbias) {
  const int threads = threads_for(size);
  PartialSums partial(threads, 2);
  in_parallel(threads, size, [&](int thread, int64_t first, int64_t last) {
    affine_gradient(x + first, dy + first, scale, last - first, dx + first, partial.of(thread));
  });
  const double *total = partial.total();
  *dscale = total[0];
  *dbias = total[1];
}

}  // namespace reference
