// Kernels for y = s x + b, where one scale s and one bias b apply to all elements, and for its gradients. The order of
// summation is fixed, so the kernels are deterministic. A tensor consists of `vectors` full vectors and of `rest` more
// elements. `scale`, `bias` and their gradients have one element each, in the type of x.

#include "sums.cuh"
#include "vector.cuh"

// Computes y. Each thread computes one vector, and one more thread computes the rest.
template <class T>
__device__ void affine(const Vector<T> *x, const void *scale, const void *bias, unsigned vectors, int rest,
                       Vector<T> *y) {
  constexpr int V = T::kLanes;
  const unsigned index = blockIdx.x * kPoolThreads + threadIdx.x;
  const float s = load_one(T(), scale, 0), b = load_one(T(), bias, 0);
  if (index < vectors) {
    float values[V];
    unpack_vector<T>(x[index], values);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = fmaf(s, values[i], b);
    y[index] = pack_vector<T>(values);
  } else if (index == vectors) {
    for (int i = 0; i < rest; ++i) store_one(T(), fmaf(s, load_one(T(), x + index, i), b), y + index, i);
  }
}

// Computes dx = s dy, dscale = the sum of x dy, and dbias = the sum of dy. Each block sums in float32 and stores its
// sums in `partial` [blocks, 2]; the last block adds these.
template <class T>
__device__ void affine_gradient(const Vector<T> *x, const Vector<T> *dy, const void *scale, unsigned vectors, int rest,
                                Vector<T> *dx, void *dscale, void *dbias, float *partial, unsigned *arrivals) {
  constexpr int V = T::kLanes, kUnroll = 2;
  const float s = load_one(T(), scale, 0);
  float ds = 0, db = 0;
  const unsigned threads = gridDim.x * kMaxThreads;
  for (unsigned begin = blockIdx.x * kMaxThreads + threadIdx.x; begin < vectors; begin += kUnroll * threads) {
    Vector<T> raw[kUnroll], gradient[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const unsigned index = min(begin + step * threads, vectors - 1);  // min() avoids a branch between loads
      raw[step] = x[index];
      gradient[step] = dy[index];
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const unsigned index = begin + step * threads;
      if (index >= vectors) continue;
      float values[V], g[V];
      unpack_vector<T>(raw[step], values);
      unpack_vector<T>(gradient[step], g);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        ds = fmaf(values[i], g[i], ds);
        db += g[i];
        g[i] *= s;
      }
      dx[index] = pack_vector<T>(g);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    for (int i = 0; i < rest; ++i) {
      const float g = load_one(T(), dy + vectors, i);
      ds = fmaf(load_one(T(), x + vectors, i), g, ds);
      db += g;
      store_one(T(), s * g, dx + vectors, i);
    }
  }
  sum_over_block(ds, db);
  if (threadIdx.x == 0) partial[2 * blockIdx.x] = ds, partial[2 * blockIdx.x + 1] = db;
  if (!is_last_of(gridDim.x, arrivals)) return;
  ds = db = 0;
  for (int block = threadIdx.x; block < gridDim.x; block += kMaxThreads) {
    ds += __ldcg(partial + 2 * block);
    db += __ldcg(partial + 2 * block + 1);
  }
  sum_over_block(ds, db);
  if (threadIdx.x != 0) return;
  store_one(T(), ds, dscale, 0);
  store_one(T(), db, dbias, 0);
}

#define AFFINE_IN_TYPE(T) \
  extern "C" __global__ void __launch_bounds__(kPoolThreads) \
      affine_##T(const Vector<T> *x, const void *scale, const void *bias, unsigned vectors, int rest, Vector<T> *y) { \
    affine<T>(x, scale, bias, vectors, rest, y); \
  } \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor) \
      affine_gradient_##T(const Vector<T> *x, const Vector<T> *dy, const void *scale, unsigned vectors, int rest, \
                          Vector<T> *dx, void *dscale, void *dbias, float *partial, unsigned *arrivals) { \
    affine_gradient<T>(x, dy, scale, vectors, rest, dx, dscale, dbias, partial, arrivals); \
  }

AFFINE_IN_TYPE(f32)
AFFINE_IN_TYPE(f16)
AFFINE_IN_TYPE(bf16)
