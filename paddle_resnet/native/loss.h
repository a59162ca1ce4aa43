// Operators of the loss: cross entropy and accuracies of a batch of logits, and the gradient of the mean loss. They
// check and allocate, then launch the kernels of loss.cu, or call the reference on the CPU.

#pragma once

#include <cstdint>
#include <vector>

#include "gpu.h"
#include "reference/loss.h"
#include "tensors.h"

namespace {

struct LogitsShape {
  int rows, classes;
  LogitsShape(const Tensor &logits, const Tensor &labels) {
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

// Returns {
//   loss: the mean [], or with mean=false each image's [N, 1];
//   top1 []: share of the batch, -1 if a label is out of range;
//   topk []: share of the batch;
//   of_softmax [N, 2]: largest logit, log(sum(exp(logit - largest)));
//   pairs [N, 2]: label, predicted class, C if all logits are NaN
// }.
std::vector<Tensor> Loss(const Tensor &logits, const Tensor &labels, float smoothing, int k, bool mean) {
  LogitsShape shape(logits, labels);
  const int rows = shape.rows;
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
  } else {
    reference::loss(data<float>(logits), data<int64_t>(labels), rows, shape.classes, smoothing, k, each, norms, pair,
                    whole, first, among);
  }
  return {loss, top1, topk, of_softmax, pairs};
}

// Returns the gradient [N, C] of the mean loss, whose own gradient is `dloss` (one element).
std::vector<Tensor> LossGradient(const Tensor &logits, const Tensor &labels, const Tensor &of_softmax,
                                 const Tensor &dloss, float smoothing, int, bool mean) {
  LogitsShape shape(logits, labels);
  if (!mean || of_softmax.numel() != 2 * shape.rows || dloss.numel() != 1)
    PD_THROW("the fused loss has a gradient only where it is a mean");
  Tensor dlogits = empty_as(logits);
  float *norms = data<float>(of_softmax), *above = data<float>(dloss), *out = data<float>(dlogits);
  if (logits.is_gpu()) {
    void *in = raw(logits), *given = raw(labels);
    Gpu::get().launch("loss_gradient", logits, shape.grid(), kLossBlock,
                      {&in, &given, &norms, &above, &shape.classes, &smoothing, &out});
  } else {
    reference::loss_gradient(data<float>(logits), data<int64_t>(labels), norms, *above, shape.rows, shape.classes,
                             smoothing, out);
  }
  return {dlogits};
}

}  // namespace
