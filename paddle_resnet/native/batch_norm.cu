// Kernels for batch normalization of tensors [rows, channels] = [N * H * W, C], fused with an activation, or with the
// residual addition and an activation.
//
// In training, the forward pass reads the input twice: first to sum over the rows, then to normalize. The backward pass
// also reads the input and the gradient twice. The second time, the rows are read in reverse order, because the rows
// that were read last are still in the L2 cache. The order of summation is fixed, so the kernels are deterministic.
//
// A block has (lanes, height) threads. Each thread processes the vector of channels that threadIdx.x selects, and
// iterates over rows. A grid has (channel groups, row groups) blocks.

#include "activations.h"
#include "sums.cuh"
#include "vector.cuh"

constexpr int kBranch = 16;  // at the first level of a reduction, one block adds the sums of this many blocks

// The channels and rows that a thread processes. A thread loads kUnroll rows of each tile before it processes them. The
// number of registers limits kUnroll.
template <class T, int kUnroll = 1>
struct Position {
  static constexpr int V = T::kLanes;
  const int vectors = gridDim.x * blockDim.x;  // number of channel vectors in a row
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  const int channel = vector * V;
  const int tile_rows = blockDim.y * kUnroll;

  __device__ int tiles(int rows) const { return (rows + tile_rows - 1) / tile_rows; }
  __device__ int row(int tile, int step) const { return tile * tile_rows + step * blockDim.y + threadIdx.y; }
  __device__ size_t at(int row) const { return static_cast<size_t>(row) * vectors + vector; }
  // Beyond the last row, this function returns the position of the last row, to avoid branches between loads. Callers
  // discard the values that they load from this position.
  __device__ size_t load_at(int tile, int step, int rows) const { return at(min(row(tile, step), rows - 1)); }
};

// Adds `count` vectors, which have `sums` floats each and are `stride` vectors apart, and stores the result in shared
// memory. The threads form n groups. Each group adds every n-th vector, and each thread computes four of the sums.
// Finally, one thread per sum adds the results of all groups.
__device__ void add_vectors(const float *vectors, int count, int stride, int sums, float *shared) {
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int fours = sums / 4, groups = max(1, threads / fours);
  for (int i = thread; i < fours * groups; i += threads) {
    const int four = i % fours, group = i / fours;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int k = group; k < count; k += groups) {
      const float4 next =
          __ldcg(reinterpret_cast<const float4 *>(vectors + static_cast<size_t>(k) * stride * sums) + four);
      sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
    }
    reinterpret_cast<float4 *>(shared)[i] = sum;
  }
  __syncthreads();
  for (int i = thread; i < sums; i += threads) {
    float sum = shared[i];
    for (int group = 1; group < groups; ++group) sum += shared[group * sums + i];
    shared[i] = sum;
  }
  __syncthreads();
}

// Sums `values` over all threads in the grid that process the same channel. Returns true only in the last block of each
// channel group. In that block, `total` in shared memory contains the sums [2 V, lanes]. The reduction has two levels,
// because a single block would take microseconds to read the sums of hundreds of blocks.
template <class T>
__device__ bool sum_over_rows(const float (&values)[2 * T::kLanes], float *partial, unsigned *arrivals, float *&total) {
  constexpr int kValues = 2 * T::kLanes;
  __shared__ __align__(16) float shared[kValues * kMaxThreads];
  const int lanes = blockDim.x, threads = blockDim.x * blockDim.y, sums = kValues * lanes;
  const int thread = threadIdx.y * lanes + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kValues; ++i) shared[i * threads + thread] = values[i];
  __syncthreads();
  partial += static_cast<size_t>(blockIdx.x) * gridDim.y * sums;
  for (int i = thread; i < sums; i += threads) {
    const float *column = shared + (i / lanes) * threads + i % lanes;
    float sum = 0;
    for (int y = 0; y < blockDim.y; ++y) sum += column[y * lanes];
    partial[blockIdx.y * sums + i] = sum;
  }
  const int branches = (gridDim.y + kBranch - 1) / kBranch, branch = blockIdx.y / kBranch;
  const int leaves = min(kBranch, gridDim.y - branch * kBranch);
  arrivals += blockIdx.x * (branches + 1);
  if (!is_last_of(leaves, arrivals + 1 + branch)) return false;
  float *joined = partial + branch * kBranch * sums;
  add_vectors(joined, leaves, 1, sums, shared);
  for (int i = thread; i < sums; i += threads) joined[i] = shared[i];
  if (!is_last_of(branches, arrivals)) return false;
  add_vectors(partial, branches, kBranch, sums, shared);
  total = shared;
  return true;
}

// Computes an estimate of each channel's mean. The statistics kernel subtracts this estimate from all values before it
// sums them, so that channels with a large mean do not lose precision. The estimate is the mean of kRows rows, because
// a single row may be an outlier. All threads that process a channel compute the same estimate.
template <class T>
__device__ void find_origin(const Vector<T> *x, int rows, int vectors, int vector, float (&origin)[T::kLanes]) {
  constexpr int V = T::kLanes, kRows = 8;
  Vector<T> raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const size_t row = static_cast<size_t>(rows) * (2 * i + 1) / (2 * kRows);
    raw[i] = x[row * vectors + vector];
  }
#pragma unroll
  for (int k = 0; k < V; ++k) origin[k] = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float values[V];
    unpack_vector<T>(raw[i], values);
#pragma unroll
    for (int k = 0; k < V; ++k) origin[k] += values[k] / kRows;
  }
}

// Computes the coefficients [4, C]: a and b of y = a x + b, the mean, and 1 / standard deviation. Updates the running
// mean and the running unbiased variance of the channels whose batch statistics are finite.
template <class T>
__device__ void statistics(const Vector<T> *x, int rows, const float *scale, const float *bias, float *running_mean,
                           float *running_variance, float momentum, float epsilon, float *coefficients, float *partial,
                           unsigned *arrivals) {
  constexpr int V = T::kLanes, kUnroll = 4;
  const Position<T, kUnroll> at;
  float origin[V], sums[2 * V] = {};
  find_origin<T>(x, rows, at.vectors, at.vector, origin);
  for (int tile = blockIdx.y; tile < at.tiles(rows); tile += gridDim.y) {
    Vector<T> raw[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) raw[step] = x[at.load_at(tile, step, rows)];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      if (at.row(tile, step) >= rows) continue;
      float values[V];
      unpack_vector<T>(raw[step], values);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float difference = values[i] - origin[i];
        sums[i] += difference;
        sums[V + i] += difference * difference;
      }
    }
  }
  float *total;
  if (!sum_over_rows<T>(sums, partial, arrivals, total)) return;
  const int lanes = blockDim.x, channels = at.vectors * V;
  for (int i = threadIdx.y * lanes + threadIdx.x; i < V * lanes; i += blockDim.x * blockDim.y) {
    const int lane = i / V, element = i % V, channel = blockIdx.x * lanes * V + i;
    float origins[V], offset = 0;
    find_origin<T>(x, rows, at.vectors, blockIdx.x * lanes + lane, origins);
#pragma unroll
    for (int j = 0; j < V; ++j) offset = j == element ? origins[j] : offset;
    const float shifted = total[element * lanes + lane] / rows;
    float variance = total[(V + element) * lanes + lane] / rows - shifted * shifted;
    variance = variance < 0.f ? 0.f : variance;  // rounding can make the variance negative; NaN is preserved
    const float mean = offset + shifted, inverse = 1.f / sqrtf(variance + epsilon), a = scale[channel] * inverse;
    coefficients[channel] = a;
    coefficients[channels + channel] = bias[channel] - mean * a;
    coefficients[2 * channels + channel] = mean;
    coefficients[3 * channels + channel] = inverse;
    const float unbiased = rows > 1 ? variance * (static_cast<float>(rows) / (rows - 1)) : variance;
    // Skip channels with non-finite statistics, because NaN and infinity would remain in the running statistics.
    // Comparisons with NaN are false.
    if (!(fabsf(mean) <= kLargestFloat && unbiased <= kLargestFloat)) continue;
    running_mean[channel] = momentum * running_mean[channel] + (1 - momentum) * mean;
    running_variance[channel] = momentum * running_variance[channel] + (1 - momentum) * unbiased;
  }
}

// Computes y = A(a x + b [+ z]), where A is the activation. If `mask` is not null, writes one byte per vector to
// `mask`; bit i is set if element i is positive before the ReLU. load_coefficients(channel, a, b) sets the coefficients
// of a vector of channels. The kernel calls load_coefficients after the first loads of `x`, so that both loads overlap.
template <class T, bool kAdd, class A, class F>
__device__ void apply(const Vector<T> *x, const Vector<T> *z, int rows, const F &load_coefficients, Vector<T> *y,
                      unsigned char *mask) {
  constexpr int V = T::kLanes, kUnroll = kAdd ? kAddedRows : kAppliedRows;
  const Position<T, kUnroll> at;
  float a[V], b[V];
  const int first = at.tiles(rows) - 1 - blockIdx.y;
  for (int tile = first; tile >= 0; tile -= gridDim.y) {
    Vector<T> raw[kUnroll], addend[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      raw[step] = __ldcs(x + at.load_at(tile, step, rows));
      if (kAdd) addend[step] = z[at.load_at(tile, step, rows)];
    }
    if (tile == first) load_coefficients(at.channel, a, b);
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      float values[V], added[V];
      unpack_vector<T>(raw[step], values);
      if (kAdd) unpack_vector<T>(addend[step], added);
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float value = fmaf(a[i], values[i], b[i]);
        if (kAdd) value += added[i];
        if (kAdd) bits |= (value > 0.f ? 1u : 0u) << i;
        values[i] = A::value(value);
      }
      const int row = at.row(tile, step);
      if (row >= rows) continue;
      y[at.at(row)] = pack_vector<T>(values);
      if (kAdd && mask != nullptr) mask[at.at(row)] = bits;
    }
  }
}

template <class T, bool kAdd, class A>
__device__ void apply_training(const Vector<T> *x, const Vector<T> *z, int rows, const float *coefficients,
                               Vector<T> *y, unsigned char *mask) {
  constexpr int V = T::kLanes;
  const auto load_coefficients = [=](int channel, float(&a)[V], float(&b)[V]) {
    load_floats<T>(coefficients + channel, a);
    load_floats<T>(coefficients + Position<T>().vectors * V + channel, b);
  };
  apply<T, kAdd, A>(x, z, rows, load_coefficients, y, mask);
}

template <class T, bool kAdd, class A>
__device__ void apply_inference(const Vector<T> *x, const Vector<T> *z, int rows, const float *scale, const float *bias,
                                const float *mean, const float *variance, float epsilon, Vector<T> *y) {
  constexpr int V = T::kLanes;
  const auto load_coefficients = [=](int channel, float(&a)[V], float(&b)[V]) {
    float means[V], variances[V];
    load_floats<T>(scale + channel, a);
    load_floats<T>(bias + channel, b);
    load_floats<T>(mean + channel, means);
    load_floats<T>(variance + channel, variances);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] /= sqrtf(variances[i] + epsilon);
      b[i] -= means[i] * a[i];
    }
  };
  apply<T, kAdd, A>(x, z, rows, load_coefficients, y, nullptr);
}

// Whether the gradient of an activation depends on its input.
template <class A>
constexpr bool kNeedsInput = true;
template <>
constexpr bool kNeedsInput<activation::linear> = false;

// Computes the gradients of scale and bias. Also computes `applied` [2, C]: the coefficients c and d of dx = a g + c x
// + d, where g is the gradient with respect to the input of the activation A. If no residual addition follows BN,
// kSummands is 0. Otherwise, kSummands is the number of output gradients to add, 1 or 2, and g is also written to dz,
// the gradient of the shortcut; ReLU then requires `mask`, and other activations except linear require the addend z.
template <class T, int kSummands, bool kMasked, class A>
__device__ void reduce_gradients(const Vector<T> *x, const Vector<T> *dy, const Vector<T> *dy2,
                                 const unsigned char *mask, const Vector<T> *z, int rows, const float *coefficients,
                                 Vector<T> *dz, float *dscale, float *dbias, float *applied, float *partial,
                                 unsigned *arrivals) {
  constexpr int V = T::kLanes, kUnroll = 2;
  const Position<T, kUnroll> at;
  const int channels = at.vectors * V;
  float a[V], b[V], mean[V], sums[2 * V] = {};
  load_floats<T>(coefficients + at.channel, a);
  load_floats<T>(coefficients + channels + at.channel, b);
  load_floats<T>(coefficients + 2 * channels + at.channel, mean);
  for (int tile = blockIdx.y; tile < at.tiles(rows); tile += gridDim.y) {
    Vector<T> raw[kUnroll], gradient[kUnroll], gradient2[kUnroll], addend[kUnroll];
    unsigned bits[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const size_t from = at.load_at(tile, step, rows);
      raw[step] = x[from];
      gradient[step] = kSummands > 0 ? __ldcs(dy + from) : dy[from];
      if (kSummands > 1) gradient2[step] = __ldcs(dy2 + from);
      if (kSummands > 0 && kMasked) bits[step] = mask[from];
      if (kSummands > 0 && !kMasked && kNeedsInput<A>) addend[step] = __ldcs(z + from);
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int row = at.row(tile, step);
      float values[V], g[V];
      unpack_vector<T>(raw[step], values);
      unpack_vector<T>(gradient[step], g);
      if (kSummands > 1) {
        float second[V];
        unpack_vector<T>(gradient2[step], second);
#pragma unroll
        for (int i = 0; i < V; ++i) g[i] += second[i];
      }
      if (kSummands > 0) {
        float added[V] = {};
        if (!kMasked && kNeedsInput<A>) unpack_vector<T>(addend[step], added);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (kMasked) g[i] = bits[step] >> i & 1 ? g[i] : 0.f;
          if (!kMasked) g[i] = A::gradient(g[i], fmaf(a[i], values[i], b[i]) + added[i]);
        }
        const Vector<T> rounded = pack_vector<T>(g);
        if (row < rows) dz[at.at(row)] = rounded;
        unpack_vector<T>(rounded, g);  // the sums must use the rounded values that the second pass reads
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (kSummands == 0) g[i] = A::gradient(g[i], fmaf(a[i], values[i], b[i]));
        g[i] = row < rows ? g[i] : 0.f;
        sums[i] += g[i];
        sums[V + i] += g[i] * (values[i] - mean[i]);
      }
    }
  }
  float *total;
  if (!sum_over_rows<T>(sums, partial, arrivals, total)) return;
  const int lanes = blockDim.x;
  for (int i = threadIdx.y * lanes + threadIdx.x; i < V * lanes; i += blockDim.x * blockDim.y) {
    const int lane = i / V, element = i % V, channel = blockIdx.x * lanes * V + i;
    const float sum = total[element * lanes + lane], product = total[(V + element) * lanes + lane];
    const float factor = coefficients[channel], center = coefficients[2 * channels + channel];
    const float inverse = coefficients[3 * channels + channel];
    const float c = -factor * inverse * inverse * (product / rows);
    dbias[channel] = sum;
    dscale[channel] = product * inverse;
    applied[channel] = c;
    applied[channels + channel] = -factor * (sum / rows) - c * center;
  }
}

// Computes dx = a g + c x + d, where g is the gradient with respect to the input of the activation A.
template <class T, class A>
__device__ void apply_gradients(const Vector<T> *x, const Vector<T> *dy, int rows, const float *coefficients,
                                const float *applied, Vector<T> *dx) {
  constexpr int V = T::kLanes, kUnroll = 2;
  const Position<T, kUnroll> at;
  const int channels = at.vectors * V;
  float a[V], b[V], c[V], d[V];
  load_floats<T>(coefficients + at.channel, a);
  load_floats<T>(coefficients + channels + at.channel, b);
  load_floats<T>(applied + at.channel, c);
  load_floats<T>(applied + channels + at.channel, d);
  const int tiles = at.tiles(rows);
  for (int tile = tiles - 1 - blockIdx.y; tile >= 0; tile -= gridDim.y) {
    Vector<T> raw[kUnroll], gradient[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      raw[step] = __ldcs(x + at.load_at(tile, step, rows));
      gradient[step] = __ldcs(dy + at.load_at(tile, step, rows));
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      float values[V], g[V];
      unpack_vector<T>(raw[step], values);
      unpack_vector<T>(gradient[step], g);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        g[i] = A::gradient(g[i], fmaf(a[i], values[i], b[i]));
        values[i] = fmaf(a[i], g[i], fmaf(c[i], values[i], d[i]));
      }
      const int row = at.row(tile, step);
      if (row < rows) dx[at.at(row)] = pack_vector<T>(values);
    }
  }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocksPerProcessor)

#define APPLY(T, NAME, ADD, A) \
  KERNEL bn_apply##NAME##_##T(const Vector<T> *x, const Vector<T> *z, int rows, const float *coefficients, \
                              Vector<T> *y, unsigned char *mask) { \
    apply_training<T, ADD, activation::A>(x, z, rows, coefficients, y, mask); \
  } \
  KERNEL bn_infer##NAME##_##T(const Vector<T> *x, const Vector<T> *z, int rows, const float *scale, const float *bias, \
                              const float *mean, const float *variance, float epsilon, Vector<T> *y) { \
    apply_inference<T, ADD, activation::A>(x, z, rows, scale, bias, mean, variance, epsilon, y); \
  }

#define REDUCE(T, NAME, SUMMANDS, MASKED, A) \
  KERNEL bn_reduce##NAME##_##T(const Vector<T> *x, const Vector<T> *dy, const Vector<T> *dy2, \
                               const unsigned char *mask, const Vector<T> *z, int rows, const float *coefficients, \
                               Vector<T> *dz, float *dscale, float *dbias, float *applied, float *partial, \
                               unsigned *arrivals) { \
    reduce_gradients<T, SUMMANDS, MASKED, activation::A>(x, dy, dy2, mask, z, rows, coefficients, dz, dscale, dbias, \
                                                         applied, partial, arrivals); \
  }

#define GRADIENT(T, NAME, A) \
  KERNEL bn_gradient##NAME##_##T(const Vector<T> *x, const Vector<T> *dy, int rows, const float *coefficients, \
                                 const float *applied, Vector<T> *dx) { \
    apply_gradients<T, activation::A>(x, dy, rows, coefficients, applied, dx); \
  }

#define KERNELS(T) \
  KERNEL bn_statistics_##T(const Vector<T> *x, int rows, const float *scale, const float *bias, float *running_mean, \
                           float *running_variance, float momentum, float epsilon, float *coefficients, \
                           float *partial, unsigned *arrivals) { \
    statistics<T>(x, rows, scale, bias, running_mean, running_variance, momentum, epsilon, coefficients, partial, \
                  arrivals); \
  } \
  APPLY(T, , false, linear) \
  APPLY(T, _add_relu, true, relu) \
  REDUCE(T, , 0, false, linear) \
  REDUCE(T, _add_relu, 1, true, relu) \
  REDUCE(T, _add_relu_two, 2, true, relu) \
  GRADIENT(T, , linear)

#define ACTIVATED(T, A) \
  APPLY(T, _##A, false, A) \
  REDUCE(T, _##A, 0, false, A) \
  GRADIENT(T, _##A, A)

#define ADDED(T, A) \
  APPLY(T, _add_##A, true, A) \
  REDUCE(T, _add_##A, 1, false, A) \
  REDUCE(T, _add_##A##_two, 2, false, A)

#define IN_EVERY_TYPE(A) ACTIVATED(f32, A) ACTIVATED(f16, A) ACTIVATED(bf16, A) ACTIVATED(f16x4, A) ACTIVATED(bf16x4, A)
#define ADDED_IN_EVERY_TYPE(A) ADDED(f32, A) ADDED(f16, A) ADDED(bf16, A) ADDED(f16x4, A) ADDED(bf16x4, A)

KERNELS(f32)
KERNELS(f16)
KERNELS(bf16)
KERNELS(f16x4)
KERNELS(bf16x4)
FOR_EACH_ACTIVATION(IN_EVERY_TYPE)
FOR_EACH_ADDED_ACTIVATION(ADDED_IN_EVERY_TYPE)
