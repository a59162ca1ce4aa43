// The library of custom Paddle operators. This file defines functions that Python calls, and the inputs, outputs,
// attributes, shapes and types of all operators except convolutions and pooling (convolutions.cc). The headers in this
// folder implement the operators. Most operators check their arguments, allocate their results, and then launch a
// kernel on Paddle's stream or, on the CPU, run a float32 loop from reference/. Exceptions: conv.h calls cuDNN on a
// GPU, onednn.h calls oneDNN on the CPU, dropout.h contains its own CPU loop, and async_copy.h only copies.

#include <cstdint>

#include "async_copy.h"
#include "batch_norm.h"
#include "concat.h"
#include "dropout.h"
#include "gpu.h"
#include "loss.h"
#include "paddle/phi/api/all.h"
#include "squeeze_excitation.h"
#include "tensors.h"
#include "update.h"

// Functions that Python calls through ctypes.

// Sets the cubin that contains the kernels for the GPU of this process.
extern "C" void paddle_resnet_set_image(const char *bytes, size_t size) { Gpu::image().assign(bytes, bytes + size); }

extern "C" uint64_t paddle_resnet_async_copies() { return AsyncCopies::get().count(); }
extern "C" int paddle_resnet_wait(uint64_t number, int i, const char **memory, size_t *bytes) {
  return AsyncCopies::get().wait(number, i, memory, bytes);
}

// Each operator is preceded by functions that return the shapes and types of its outputs.

// Batch normalization, batch_norm.h

Shapes BnActShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, float, float,
                  const std::string &) {
  return {x, {4, x.back()}};
}
Types BnActType(DataType x, DataType, DataType, DataType, DataType) { return {x, DataType::FLOAT32}; }
PD_BUILD_OP(native_bn_act)
    .Inputs({"X", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Coefficients", "MeanOut", "VarianceOut"})
    .Attrs({"momentum: float", "epsilon: float", "activation: std::string"})
    .SetInplaceMap({{"Mean", "MeanOut"}, {"Variance", "VarianceOut"}})
    .SetKernelFn(PD_KERNEL(BnAct))
    .SetInferShapeFn(PD_INFER_SHAPE(BnActShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnActType));

Shapes BnActBackwardShape(const Dims &x, const Dims &, const Dims &, const paddle::optional<Shapes> &,
                          const std::string &) {
  return {x, {x.back()}, {x.back()}};
}
Types BnActBackwardType(DataType x, DataType, DataType, const paddle::optional<Types> &) {
  return {x, DataType::FLOAT32, DataType::FLOAT32};
}
PD_BUILD_OP(native_bn_act_backward)
    .Inputs({"X", "DY", "Coefficients", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DScale", "DBias"})
    .Attrs({"activation: std::string"})
    .SetKernelFn(PD_KERNEL(BnActBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(BnActBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnActBackwardType));

// The width of the mask depends on the data type, which Paddle does not pass to this function. The shape that this
// function returns for the mask is not used.
Shapes BnAddReluShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, const Dims &, float,
                      float) {
  return {x, {4, x.back()}, x};
}
Types BnAddReluType(DataType x, DataType, DataType, DataType, DataType, DataType) {
  return {x, DataType::FLOAT32, DataType::UINT8};
}
PD_BUILD_OP(native_bn_add_relu)
    .Inputs({"X", "Z", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Coefficients", "Mask", "MeanOut", "VarianceOut"})
    .Attrs({"momentum: float", "epsilon: float"})
    .SetInplaceMap({{"Mean", "MeanOut"}, {"Variance", "VarianceOut"}})
    .SetKernelFn(PD_KERNEL(BnAddRelu))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddReluShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddReluType));

Shapes BnAddReluBackwardShape(const Dims &x, const Shapes &, const Dims &, const Dims &,
                              const paddle::optional<Shapes> &) {
  return {x, x, {x.back()}, {x.back()}};
}
Types BnAddReluBackwardType(DataType x, const Types &, DataType, DataType, const paddle::optional<Types> &) {
  return {x, x, DataType::FLOAT32, DataType::FLOAT32};
}
PD_BUILD_OP(native_bn_add_relu_backward)
    .Inputs({"X", paddle::Vec("DY"), "Coefficients", "Mask", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DZ", "DScale", "DBias"})
    .SetKernelFn(PD_KERNEL(BnAddReluBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddReluBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddReluBackwardType));

Shapes BnAddActShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, const Dims &, float, float,
                     const std::string &) {
  return {x, {4, x.back()}};
}
Types BnAddActType(DataType x, DataType, DataType, DataType, DataType, DataType) { return {x, DataType::FLOAT32}; }
PD_BUILD_OP(native_bn_add_act)
    .Inputs({"X", "Z", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Coefficients", "MeanOut", "VarianceOut"})
    .Attrs({"momentum: float", "epsilon: float", "activation: std::string"})
    .SetInplaceMap({{"Mean", "MeanOut"}, {"Variance", "VarianceOut"}})
    .SetKernelFn(PD_KERNEL(BnAddAct))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddActShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddActType));

Shapes BnAddActBackwardShape(const Dims &x, const Dims &, const Shapes &, const Dims &,
                             const paddle::optional<Shapes> &, const std::string &) {
  return {x, x, {x.back()}, {x.back()}};
}
Types BnAddActBackwardType(DataType x, DataType, const Types &, DataType, const paddle::optional<Types> &) {
  return {x, x, DataType::FLOAT32, DataType::FLOAT32};
}
PD_BUILD_OP(native_bn_add_act_backward)
    .Inputs({"X", "Z", paddle::Vec("DY"), "Coefficients", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DZ", "DScale", "DBias"})
    .Attrs({"activation: std::string"})
    .SetKernelFn(PD_KERNEL(BnAddActBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddActBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddActBackwardType));

Shapes BnInferenceShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &,
                        const paddle::optional<Dims> &, float, const std::string &) {
  return {x};
}
Types BnInferenceType(DataType x, DataType, DataType, DataType, DataType, const paddle::optional<DataType> &) {
  return {x};
}
PD_BUILD_OP(native_bn_inference)
    .Inputs({"X", "Scale", "Bias", "Mean", "Variance", paddle::Optional("Z")})
    .Outputs({"Y"})
    .Attrs({"epsilon: float", "activation: std::string"})
    .SetKernelFn(PD_KERNEL(BnInference))
    .SetInferShapeFn(PD_INFER_SHAPE(BnInferenceShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnInferenceType));

// Squeeze-and-excitation, squeeze_excitation.h

Shapes ImageSumsShape(const Dims &x, const paddle::optional<Dims> &, bool) { return {{x[0], 1, 1, x[3]}}; }
Types ImageSumsType(DataType x, const paddle::optional<DataType> &) { return {x}; }
PD_BUILD_OP(native_image_sums)
    .Inputs({"X", paddle::Optional("Y")})
    .Outputs({"Out"})
    .Attrs({"mean: bool"})
    .SetKernelFn(PD_KERNEL(ImageSums))
    .SetInferShapeFn(PD_INFER_SHAPE(ImageSumsShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(ImageSumsType));

Shapes ScaleImagesShape(const Dims &x, const Dims &, const paddle::optional<Dims> &) { return {x}; }
Types ScaleImagesType(DataType x, DataType, const paddle::optional<DataType> &) { return {x}; }
PD_BUILD_OP(native_scale_images)
    .Inputs({"X", "Factors", paddle::Optional("Offsets")})
    .Outputs({"Y"})
    .SetKernelFn(PD_KERNEL(ScaleImages))
    .SetInferShapeFn(PD_INFER_SHAPE(ScaleImagesShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(ScaleImagesType));

Shapes SigmoidShape(const Dims &x) { return {x}; }
Types SigmoidType(DataType x) { return {x}; }
PD_BUILD_OP(native_sigmoid)
    .Inputs({"X"})
    .Outputs({"Y"})
    .SetKernelFn(PD_KERNEL(Sigmoid))
    .SetInferShapeFn(PD_INFER_SHAPE(SigmoidShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(SigmoidType));

Shapes SigmoidBackwardShape(const Dims &y, const Dims &) { return {y}; }
Types SigmoidBackwardType(DataType y, DataType) { return {y}; }
PD_BUILD_OP(native_sigmoid_backward)
    .Inputs({"Y", "DY"})
    .Outputs({"DX"})
    .SetKernelFn(PD_KERNEL(SigmoidBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(SigmoidBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(SigmoidBackwardType));

// Concatenation, concat.h

Shapes ConcatShape(const Dims &x, const Dims &y) { return {{x[0], x[1], x[2], x[3] + y[3]}}; }
Types ConcatType(DataType x, DataType) { return {x}; }
PD_BUILD_OP(native_concat)
    .Inputs({"X", "Y"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Concat))
    .SetInferShapeFn(PD_INFER_SHAPE(ConcatShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(ConcatType));

Shapes SplitShape(const Dims &in, int channels) {
  return {{in[0], in[1], in[2], channels}, {in[0], in[1], in[2], in[3] - channels}};
}
Types SplitType(DataType in) { return {in, in}; }
PD_BUILD_OP(native_split)
    .Inputs({"In"})
    .Outputs({"X", "Y"})
    .Attrs({"channels: int"})
    .SetKernelFn(PD_KERNEL(Split))
    .SetInferShapeFn(PD_INFER_SHAPE(SplitShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(SplitType));

// Dropout, dropout.h

Shapes DropOutShape(const Dims &x, const Dims &, float) { return {x}; }
Types DropOutType(DataType x, DataType) { return {x}; }
PD_BUILD_OP(native_dropout)
    .Inputs({"X", "Seed"})
    .Outputs({"Y"})
    .Attrs({"rate: float"})
    .SetKernelFn(PD_KERNEL(DropOut))
    .SetInferShapeFn(PD_INFER_SHAPE(DropOutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(DropOutType));

// Loss and accuracies, loss.h

Shapes LossShape(const Dims &logits, const Dims &, const paddle::optional<Dims> &, const paddle::optional<Dims> &,
                 float, int, bool mean) {
  const int64_t rows = logits[0];
  return {mean ? Dims{} : Dims{rows, 1}, {}, {}, {rows, 2}, {rows, 2}};
}
Types LossType(DataType logits, DataType labels, const paddle::optional<DataType> &,
               const paddle::optional<DataType> &) {
  return {logits, logits, logits, logits, labels};
}
PD_BUILD_OP(native_loss)
    .Inputs({"Logits", "Labels", paddle::Optional("Weights"), paddle::Optional("ImageWeights")})
    .Outputs({"Loss", "Top1", "TopK", "OfSoftmax", "Pairs"})
    .Attrs({"smoothing: float", "k: int", "mean: bool"})
    .SetKernelFn(PD_KERNEL(Loss))
    .SetInferShapeFn(PD_INFER_SHAPE(LossShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(LossType));

PD_BUILD_GRAD_OP(native_loss)
    .Inputs({"Logits", "Labels", paddle::Optional("Weights"), paddle::Optional("ImageWeights"), "OfSoftmax",
             paddle::Grad("Loss")})
    .Outputs({paddle::Grad("Logits")})
    .Attrs({"smoothing: float", "k: int", "mean: bool"})
    .SetKernelFn(PD_KERNEL(LossGradient));

// Loss scale and optimizers, update.h. Operators that have only in-place outputs need no shape functions.

Shapes CheckFiniteShape(const Shapes &, const Dims &, const Dims &, const Dims &, int, int, float, float) {
  return {{1}};
}
Types CheckFiniteType(const Types &, DataType, DataType, DataType) { return {DataType::FLOAT32}; }
// The name must not contain "_grad". Paddle 3 treats an operator with "_grad" in its name as a gradient, and searches
// for the forward operator.
PD_BUILD_OP(native_check_finite)
    .Inputs({paddle::Vec("Gradients"), "Scale", "GoodSteps", "BadSteps"})
    .Outputs({"Unscale", "ScaleOut", "GoodStepsOut", "BadStepsOut"})
    .Attrs({"raise_after_steps: int", "lower_after_steps: int", "raise_by: float", "lower_by: float"})
    .SetInplaceMap({{"Scale", "ScaleOut"}, {"GoodSteps", "GoodStepsOut"}, {"BadSteps", "BadStepsOut"}})
    .SetKernelFn(PD_KERNEL(CheckFinite))
    .SetInferShapeFn(PD_INFER_SHAPE(CheckFiniteShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CheckFiniteType));

Shapes ClipFactorShape(const Shapes &, const paddle::optional<Dims> &, float) { return {{1}}; }
Types ClipFactorType(const Types &, const paddle::optional<DataType> &) { return {DataType::FLOAT32}; }
PD_BUILD_OP(native_clip_factor)
    .Inputs({paddle::Vec("Gradients"), paddle::Optional("Unscale")})
    .Outputs({"Factor"})
    .Attrs({"max_norm: float"})
    .SetKernelFn(PD_KERNEL(ClipFactor))
    .SetInferShapeFn(PD_INFER_SHAPE(ClipFactorShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(ClipFactorType));

#define OPTIMIZER_OPERATOR(RULE) \
  PD_BUILD_OP(native_##RULE) \
      .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), paddle::Vec("State"), "Rate", \
               paddle::Optional("Unscale")}) \
      .Outputs({paddle::Vec("ParametersOut"), paddle::Vec("StateOut")}) \
      .Attrs({"hyperparameters: std::vector<float>", "decays: std::vector<float>"}) \
      .SetInplaceMap({{paddle::Vec("Parameters"), paddle::Vec("ParametersOut")}, \
                      {paddle::Vec("State"), paddle::Vec("StateOut")}}) \
      .SetKernelFn(PD_KERNEL(Update<optimizer::RULE>));
FOR_EACH_OPTIMIZER(OPTIMIZER_OPERATOR)

PD_BUILD_OP(native_ema)
    .Inputs({paddle::Vec("Averages"), paddle::Vec("Values"), "Weight", paddle::Optional("Unscale")})
    .Outputs({paddle::Vec("AveragesOut")})
    .SetInplaceMap({{paddle::Vec("Averages"), paddle::Vec("AveragesOut")}})
    .SetKernelFn(PD_KERNEL(Ema));

// Copies of metrics to the host, async_copy.h

Shapes AsyncCopyShape(const Shapes &) { return {{1}}; }
Types AsyncCopyType(const Types &) { return {DataType::INT32}; }
PD_BUILD_OP(native_async_copy)
    .Inputs({paddle::Vec("X")})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(AsyncCopy))
    .SetInferShapeFn(PD_INFER_SHAPE(AsyncCopyShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AsyncCopyType));
