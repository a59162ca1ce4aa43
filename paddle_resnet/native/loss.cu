// Kernels for softmax cross entropy with label smoothing, its gradient, top-1 and top-k hits, and the predicted class.
// Logits are float32 [rows, classes], and labels are 64-bit integers. Each block processes one row. The order of
// summation is fixed.

#include "common.h"

struct Largest {
  float value;
  int at;
};

// Returns the larger of two values, or the value with the lower index if they are equal. `a` is never NaN. If `b` is
// NaN, `a` is returned.
struct FirstLargest {
  __device__ Largest operator()(const Largest &a, const Largest &b) const {
    return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
  }
};

struct RowSums {
  float exponentials, differences, weighted;
  int ahead;  // number of classes that rank above the label
};

struct AddRowSums {
  __device__ RowSums operator()(const RowSums &a, const RowSums &b) const {
    return {a.exponentials + b.exponentials, a.differences + b.differences, a.weighted + b.weighted,
            a.ahead + b.ahead};
  }
};

struct BatchSums {
  float loss;
  int first, among, out_of_range;  // numbers of top-1 hits, top-k hits and labels out of range
};

struct AddBatchSums {
  __device__ BatchSums operator()(const BatchSums &a, const BatchSums &b) const {
    return {a.loss + b.loss, a.first + b.first, a.among + b.among, a.out_of_range + b.out_of_range};
  }
};

// Reduces the values of all kLossThreads threads with `join`, and returns the result in all threads. `shared` has space
// for kLossThreads values, and must not be used by any other call.
template <class Value, class Join>
__device__ Value join_all(const Value &value, Value *shared, const Join &join) {
  const int thread = threadIdx.x;
  shared[thread] = value;
  __syncthreads();
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] = join(shared[thread], shared[thread + half]);
    __syncthreads();
  }
  return shared[0];
}

// Computes for each row, with logits x:
// losses[row] = log(sum(exp(x))) - (1 - smoothing) x[label] - smoothing mean(x), or NaN if a logit is NaN or +inf or
// the label is out of range. If `weights` [rows, classes] is not null, sum(weights x) replaces x[label]. If
// `image_weights` [rows] is not null, losses[row] is multiplied by image_weights[row].
// of_softmax[row] = {largest x, log(sum(exp(x - largest)))}, so that softmax(x) = exp(x - largest - log(sum)).
// hits[row]: bit 0 is set if the label ranks first, bit 1 if the label ranks among the first k classes, bit 2 if the
// label is out of range. pairs[row] = {label, class that ranks first}; the class is `classes` if all logits are NaN.
// models/loss_head.py describes how classes with equal logits or NaN are ranked.
extern "C" __global__ void __launch_bounds__(kLossThreads)
    loss_rows(const float *logits, const long long *labels, const float *weights, const float *image_weights,
              int classes, float smoothing, int k, float *losses, float *of_softmax, unsigned char *hits,
              long long *pairs) {
  __shared__ Largest largest_of[kLossThreads];
  __shared__ RowSums sums_of[kLossThreads];
  const int row = blockIdx.x;
  const long long label = labels[row];
  const float *x = logits + static_cast<size_t>(row) * classes;
  Largest largest = {-__uint_as_float(0x7f800000u), classes};
  for (int i = threadIdx.x; i < classes; i += kLossThreads) largest = FirstLargest()(largest, {x[i], i});
  largest = join_all(largest, largest_of, FirstLargest());

  const bool is_class = label >= 0 && label < classes;
  const float own = is_class ? x[label] : __uint_as_float(0x7fc00000u);
  RowSums sums = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < classes; i += kLossThreads) {
    const float difference = x[i] - largest.value;
    sums.exponentials += expf(difference);
    sums.differences += difference;
    if (weights != nullptr) {
      const float weight = weights[static_cast<size_t>(row) * classes + i];
      if (weight != 0) sums.weighted += weight * difference;  // skip zero weights, because 0 times infinity is NaN
    }
    sums.ahead += x[i] > own || (x[i] == own && i < label);
  }
  sums = join_all(sums, sums_of, AddRowSums());
  if (threadIdx.x != 0) return;

  const float log_sum = logf(sums.exponentials);
  const float target = weights != nullptr && is_class ? sums.weighted : own - largest.value;
  float loss = log_sum - (1 - smoothing) * target;
  // If smoothing is 0, skip this term, because it would be 0 times infinity for a logit of -inf.
  if (smoothing != 0) loss -= smoothing / classes * sums.differences;
  losses[row] = image_weights != nullptr ? image_weights[row] * loss : loss;
  of_softmax[2 * row] = largest.value;
  of_softmax[2 * row + 1] = log_sum;
  hits[row] = own == own ? (sums.ahead < 1) | (sums.ahead < k) << 1 : !is_class << 2;
  pairs[2 * row] = label;
  pairs[2 * row + 1] = largest.at;
}

// Computes the fractions of top-1 and top-k hits in the batch and, if `loss` is not null, the mean loss. If a label is
// out of range, top1 is -1. Launch a single block of this kernel.
extern "C" __global__ void __launch_bounds__(kLossThreads)
    loss_means(const float *losses, const unsigned char *hits, int rows, float *loss, float *top1, float *topk) {
  __shared__ BatchSums sums_of[kLossThreads];
  BatchSums sums = {0, 0, 0, 0};
  for (int row = threadIdx.x; row < rows; row += kLossThreads) {
    sums = AddBatchSums()(sums, {losses[row], hits[row] & 1, hits[row] >> 1 & 1, hits[row] >> 2});
  }
  sums = join_all(sums, sums_of, AddBatchSums());
  if (threadIdx.x != 0) return;
  if (loss != nullptr) *loss = sums.loss / rows;
  *top1 = sums.out_of_range ? -1 : static_cast<float>(sums.first) / rows;
  *topk = static_cast<float>(sums.among) / rows;
}

// Computes the gradient of the mean loss, times *dloss. If the label of a row is out of range, the gradient and the
// loss of this row are NaN.
extern "C" __global__ void __launch_bounds__(kLossThreads)
    loss_gradient(const float *logits, const long long *labels, const float *weights, const float *image_weights,
                  const float *of_softmax, const float *dloss, int classes, float smoothing, float *dlogits) {
  const int row = blockIdx.x;
  const size_t start = static_cast<size_t>(row) * classes;
  const long long label = labels[row];
  const bool is_class = label >= 0 && label < classes;
  float factor = is_class ? *dloss / gridDim.x : __uint_as_float(0x7fc00000u);
  if (image_weights != nullptr) factor *= image_weights[row];
  const float largest = of_softmax[2 * row], log_sum = of_softmax[2 * row + 1];
  for (int i = threadIdx.x; i < classes; i += kLossThreads) {
    const float weight = weights != nullptr ? weights[start + i] : static_cast<float>(i == label);
    const float target = smoothing / classes + (1 - smoothing) * weight;
    dlogits[start + i] = (expf(logits[start + i] - largest - log_sum) - target) * factor;
  }
}
