// Reference implementation of softmax cross entropy, its gradient, and accuracies: float32 loops that sum in float64.
// The operators call this implementation on the CPU. Logits are [rows, classes], with contiguous classes.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace reference {

// Computes losses [rows], of_softmax [rows, 2] and pairs [rows, 2], like loss_rows in loss.cu. Also computes the
// accuracies and, if `loss` is not null, the mean loss of the batch. If a label is out of range, top1 is -1. If
// `weights` [rows, classes] is not null, the weights replace the labels in the loss. If `image_weights` [rows] is not
// null, it contains a factor for the loss of each row.
void loss(const float *logits, const int64_t *labels, const float *weights, const float *image_weights, int rows,
          int classes, float smoothing, int k, float *losses, float *of_softmax, int64_t *pairs, float *loss,
          float *top1, float *topk) {
  double total = 0;
  int hits = 0, hits_k = 0, out_of_range = 0;
  for (int row = 0; row < rows; ++row) {
    const float *x = logits + static_cast<int64_t>(row) * classes;
    const int64_t label = labels[row];
    const bool is_class = label >= 0 && label < classes;
    const float own = is_class ? x[label] : std::numeric_limits<float>::quiet_NaN();
    float largest = -std::numeric_limits<float>::infinity();
    int first = classes;
    for (int i = classes - 1; i >= 0; --i) {
      if (x[i] >= largest) largest = x[i], first = i;  // the comparison is false for NaN
    }
    double exponentials = 0, differences = 0, target = static_cast<double>(own) - largest;
    if (weights && is_class) target = 0;
    int ahead = 0;  // number of classes that rank above the label; equal logits rank in class order
    for (int i = 0; i < classes; ++i) {
      exponentials += std::exp(static_cast<double>(x[i]) - largest);
      differences += static_cast<double>(x[i]) - largest;
      if (weights) {
        const double weight = weights[static_cast<int64_t>(row) * classes + i];
        if (weight != 0) target += weight * (static_cast<double>(x[i]) - largest);
      }
      ahead += x[i] > own || (x[i] == own && i < label);
    }
    double value = std::log(exponentials) - (1 - smoothing) * target;
    if (smoothing != 0) value -= smoothing / classes * differences;
    if (image_weights) value *= image_weights[row];
    losses[row] = value;
    total += value;
    of_softmax[2 * row] = largest;
    of_softmax[2 * row + 1] = std::log(exponentials);
    hits += own == own && ahead < 1;
    hits_k += own == own && ahead < k;
    out_of_range += !is_class;
    pairs[2 * row] = label;
    pairs[2 * row + 1] = first;
  }
  if (loss) *loss = total / rows;
  *top1 = out_of_range ? -1 : static_cast<float>(hits) / rows;
  *topk = static_cast<float>(hits_k) / rows;
}

// Computes the gradient of the mean loss, times `dloss`. If the label of a row is out of range, the gradient of this
// row is NaN.
void loss_gradient(const float *logits, const int64_t *labels, const float *weights, const float *image_weights,
                   const float *of_softmax, float dloss, int rows, int classes, float smoothing, float *dlogits) {
  for (int64_t i = 0; i < static_cast<int64_t>(rows) * classes; ++i) {
    const int64_t row = i / classes, label = labels[row];
    const double image_weight = image_weights ? image_weights[row] : 1;
    const double factor = label >= 0 && label < classes ? image_weight * (dloss / rows) : NAN;
    const double weight = weights ? weights[i] : i % classes == label;
    const double target = smoothing / classes + (1 - smoothing) * weight;
    dlogits[i] =
        (std::exp(static_cast<double>(logits[i]) - of_softmax[2 * row] - of_softmax[2 * row + 1]) - target) * factor;
  }
}

}  // namespace reference
