// Loss and accuracies of a batch of logits, and the gradient of the mean loss.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu.h"
#include "tensors.h"

namespace {

struct Scores {
  int rows, classes;
  Scores(const Tensor &logits, const Tensor &labels) {
    if (logits.dtype() != DataType::FLOAT32) PD_THROW("the fused loss takes logits of float32");
    if (logits.shape().size() != 2 || labels.dtype() != DataType::INT64 || labels.numel() != logits.shape()[0])
      PD_THROW("the fused loss takes logits [N, C] and N labels of int64");
    if (logits.is_gpu() != labels.is_gpu()) PD_THROW("the fused loss takes logits and labels of one place");
    if (logits.shape()[0] > INT32_MAX / 2 || logits.shape()[1] > INT32_MAX / 2)
      PD_THROW("the fused loss takes less than 2^30 images and classes");
    rows = static_cast<int>(logits.shape()[0]);
    classes = static_cast<int>(logits.shape()[1]);
  }
  std::vector<unsigned> grid() const { return {static_cast<unsigned>(rows), 1}; }
};

const std::vector<unsigned> kLossBlock = {kLossThreads, 1};

// {loss: the mean [] or each image's [N, 1], top1 [], -1 if a label is no class, topk [], largest logit and log of the
// sum of exp(logit - largest) [N, 2], label and prediction [N, 2]}.
std::vector<Tensor> score(const Tensor &logits, const Tensor &labels, float smoothing, int k, bool mean) {
  Scores shape(logits, labels);
  const int rows = shape.rows, classes = shape.classes;
  const auto place = logits.place();
  Tensor losses = empty_floats({rows, 1}, logits), of_softmax = empty_floats({rows, 2}, logits);
  Tensor loss = mean ? empty_floats({}, logits) : losses;
  Tensor top1 = empty_floats({}, logits), topk = empty_floats({}, logits);
  Tensor pairs = paddle::empty({rows, 2}, DataType::INT64, place);
  float *each = data<float>(losses), *norms = data<float>(of_softmax), *whole = mean ? data<float>(loss) : nullptr;
  float *first = data<float>(top1), *among = data<float>(topk);
  int64_t *pair = data<int64_t>(pairs);
  if (logits.is_gpu()) {
    Tensor hits = paddle::empty({rows}, DataType::UINT8, place);
    void *in = raw(logits), *given = raw(labels), *bits = raw(hits);
    Gpu::get().launch("loss_rows", logits, shape.grid(), kLossBlock,
                      {&in, &given, &shape.classes, &smoothing, &k, &each, &norms, &bits, &pair});
    Gpu::get().launch("loss_means", logits, {1, 1}, kLossBlock, {&each, &bits, &shape.rows, &whole, &first, &among});
    return {loss, top1, topk, of_softmax, pairs};
  }
  double total = 0;
  int hits = 0, hits_k = 0, strangers = 0;
  for (int row = 0; row < rows; ++row) {
    const float *x = data<float>(logits) + static_cast<int64_t>(row) * classes;
    const int64_t label = data<int64_t>(labels)[row];
    const bool is_class = label >= 0 && label < classes;
    const float own = is_class ? x[label] : std::numeric_limits<float>::quiet_NaN();
    const bool has_nan = std::any_of(x, x + classes, [](float value) { return std::isnan(value); });
    const float largest = has_nan ? std::numeric_limits<float>::quiet_NaN() : *std::max_element(x, x + classes);
    double exponentials = 0, differences = 0;
    int ahead = 0;
    for (int i = 0; i < classes; ++i) {
      exponentials += std::exp(static_cast<double>(x[i]) - largest);
      differences += static_cast<double>(x[i]) - largest;
      ahead += x[i] > own || (x[i] == own && i < label);
    }
    double value = std::log(exponentials) - (1 - smoothing) * (static_cast<double>(own) - largest);
    if (smoothing != 0) value -= smoothing / classes * differences;
    each[row] = value;
    total += value;
    norms[2 * row] = largest;
    norms[2 * row + 1] = std::log(exponentials);
    const bool is_number = !has_nan && is_class;
    hits += is_number && ahead < 1;
    hits_k += is_number && ahead < k;
    strangers += !is_class;
    pair[2 * row] = label;
    pair[2 * row + 1] = has_nan ? -1 : std::max_element(x, x + classes) - x;
  }
  if (mean) *whole = total / rows;
  *first = strangers ? -1 : static_cast<float>(hits) / rows;
  *among = static_cast<float>(hits_k) / rows;
  return {loss, top1, topk, of_softmax, pairs};
}

Tensor score_gradient(const Tensor &logits, const Tensor &labels, const Tensor &of_softmax, const Tensor &dloss,
                      float smoothing) {
  Scores shape(logits, labels);
  if (of_softmax.numel() != 2 * shape.rows || dloss.numel() != 1)
    PD_THROW("the fused loss's gradient is that of a mean");
  Tensor dlogits = empty_as(logits);
  float *norms = data<float>(of_softmax), *above = data<float>(dloss), *out = data<float>(dlogits);
  if (logits.is_gpu()) {
    void *in = raw(logits), *given = raw(labels);
    Gpu::get().launch("loss_gradient", logits, shape.grid(), kLossBlock,
                      {&in, &given, &norms, &above, &shape.classes, &smoothing, &out});
    return dlogits;
  }
  for (int64_t i = 0; i < logits.numel(); ++i) {
    const int64_t row = i / shape.classes, label = data<int64_t>(labels)[row];
    const double factor = label >= 0 && label < shape.classes ? *above / shape.rows : NAN;
    const double target = smoothing / shape.classes + (i % shape.classes == label ? 1 - smoothing : 0);
    out[i] =
        (std::exp(static_cast<double>(data<float>(logits)[i]) - norms[2 * row] - norms[2 * row + 1]) - target) * factor;
  }
  return dlogits;
}

}  // namespace
