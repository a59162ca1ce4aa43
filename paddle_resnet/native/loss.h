// Operators for the loss: cross entropy and accuracies of a batch of logits, and the gradient of the mean loss. The
// operators check arguments and allocate results, and then launch the kernels in loss.cu or, on the CPU, call the
// reference implementation.

#pragma once

#include <cstdint>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

struct LogitsShape {
  int rows, classes;
  LogitsShape(const Tensor &logits, const Tensor &labels) {
    if (logits.dtype() != DataType::FLOAT32) PD_THROW("custom loss: requires float32 logits");
    if (logits.shape().size() != 2 || labels.dtype() != DataType::INT64 || labels.numel() != logits.shape()[0])
      PD_THROW("custom loss: requires logits [N, C] and N int64 labels");
    if (logits.is_gpu() != labels.is_gpu()) PD_THROW("custom loss: requires logits and labels on one device");
    if (logits.shape()[0] > INT32_MAX / 2 || logits.shape()[1] > INT32_MAX / 2)
      PD_THROW("custom loss: requires fewer than 2^30 images and classes");
    rows = static_cast<int>(logits.shape()[0]);
    classes = static_cast<int>(logits.shape()[1]);
  }
  // Returns the address of the weights [rows, classes], or null without weights.
  float *weights(const paddle::optional<Tensor> &weights) const {
    if (!weights) return nullptr;
    if (weights->dtype() != DataType::FLOAT32 || weights->numel() != static_cast<int64_t>(rows) * classes)
      PD_THROW("custom loss: requires float32 weights [N, C]");
    return data<float>(*weights);
  }
  // Returns the address of the image weights [rows], or null without image weights.
  float *image_weights(const paddle::optional<Tensor> &weights) const {
    if (!weights) return nullptr;
    if (weights->dtype() != DataType::FLOAT32 || weights->numel() != rows)
      PD_THROW("custom loss: requires N float32 image weights");
    return data<float>(*weights);
  }
  std::vector<unsigned> grid() const { return {static_cast<unsigned>(rows), 1}; }
};

const std::vector<unsigned> kLossBlock = {kLossThreads, 1};

// Returns {
//   loss: the mean [], or the loss of each image [N, 1] if mean=false;
//   top1 []: the fraction of correctly classified images in the batch, or -1 if a label is out of range;
//   topk []: the fraction of images in the batch whose label ranks among the first k classes;
//   of_softmax [N, 2]: the largest logit, and log(sum(exp(logit - largest)));
//   pairs [N, 2]: the label, and the predicted class, which is C if all logits are NaN
// }.
// If `given_weights` [N, C] are passed, they replace the labels in the loss. If image weights [N] are passed, the loss
// of each image is multiplied by the weight of the image; the mean loss is still the sum of all losses divided by N.
std::vector<Tensor> Loss(const Tensor &logits, const Tensor &labels, const paddle::optional<Tensor> &given_weights,
                         const paddle::optional<Tensor> &given_image_weights, float smoothing, int k, bool mean) {
  LogitsShape shape(logits, labels);
  const int rows = shape.rows;
  const auto place = logits.place();
  Tensor losses = empty_floats({rows, 1}, logits), of_softmax = empty_floats({rows, 2}, logits);
  Tensor loss = mean ? empty_floats({}, logits) : losses;
  Tensor top1 = empty_floats({}, logits), topk = empty_floats({}, logits);
  Tensor pairs = paddle::empty({rows, 2}, DataType::INT64, place);
  float *each = data<float>(losses), *norms = data<float>(of_softmax), *batch = mean ? data<float>(loss) : nullptr;
  float *first = data<float>(top1), *among = data<float>(topk);
  float *weights = shape.weights(given_weights), *image_weights = shape.image_weights(given_image_weights);
  int64_t *pair = data<int64_t>(pairs);
  if (logits.is_gpu()) {
    Tensor hits = paddle::empty({rows}, DataType::UINT8, place);
    void *in = raw(logits), *label_data = raw(labels), *bits = raw(hits);
    Gpu::get().launch("loss_rows", logits, shape.grid(), kLossBlock,
                      {&in, &label_data, &weights, &image_weights, &shape.classes, &smoothing, &k, &each, &norms, &bits,
                       &pair});
    Gpu::get().launch("loss_means", logits, {1, 1}, kLossBlock, {&each, &bits, &shape.rows, &batch, &first, &among});
  } else {
    reference::loss(data<float>(logits), data<int64_t>(labels), weights, image_weights, rows, shape.classes, smoothing,
                    k, each, norms, pair, batch, first, among);
  }
  return {loss, top1, topk, of_softmax, pairs};
}

// Returns the gradient [N, C] of the mean loss, multiplied by `dloss` (one element).
std::vector<Tensor> LossGradient(const Tensor &logits, const Tensor &labels,
                                 const paddle::optional<Tensor> &given_weights,
                                 const paddle::optional<Tensor> &given_image_weights, const Tensor &of_softmax,
                                 const Tensor &dloss, float smoothing, int, bool mean) {
  LogitsShape shape(logits, labels);
  if (!mean || of_softmax.numel() != 2 * shape.rows || dloss.numel() != 1)
    PD_THROW("custom loss: the gradient requires mean=true and matching sizes");
  Tensor dlogits = empty_as(logits);
  float *norms = data<float>(of_softmax), *above = data<float>(dloss), *out = data<float>(dlogits);
  float *weights = shape.weights(given_weights), *image_weights = shape.image_weights(given_image_weights);
  if (logits.is_gpu()) {
    void *in = raw(logits), *label_data = raw(labels);
    Gpu::get().launch("loss_gradient", logits, shape.grid(), kLossBlock,
                      {&in, &label_data, &weights, &image_weights, &norms, &above, &shape.classes, &smoothing, &out});
  } else {
    reference::loss_gradient(data<float>(logits), data<int64_t>(labels), weights, image_weights, norms, *above,
                             shape.rows, shape.classes, smoothing, out);
  }
  return {dlogits};
}

}  // namespace
