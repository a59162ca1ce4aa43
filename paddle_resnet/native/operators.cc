// The library of Paddle operators, a table of contents: the functions that Python calls, and every operator's inputs,
// outputs, attributes, shapes and types. The operators themselves are in the headers, one for each .cu file: they check
// and allocate, then launch a kernel on Paddle's stream, or call a float32 loop of reference/ on the CPU.

#include <cstdint>
#include <vector>

#include "batch_norm.h"
#include "gpu.h"
#include "loss.h"
#include "max_pool.h"
#include "paddle/phi/api/all.h"
#include "posts.h"
#include "tensors.h"
#include "update.h"

// Called through ctypes.

// Takes the kernels: the bytes of a cubin for this process's GPU.
extern "C" void paddle_resnet_set_image(const char *bytes, size_t size) { Gpu::image().assign(bytes, bytes + size); }

extern "C" uint64_t paddle_resnet_posts() { return Posts::get().count(); }
extern "C" int paddle_resnet_wait(uint64_t number, int i, const char **memory, size_t *bytes) {
  return Posts::get().wait(number, i, memory, bytes);
}

// Operators, each after its shapes and types as Paddle infers them while it builds a program.

using Dims = std::vector<int64_t>;
using Shapes = std::vector<Dims>;
using Types = std::vector<DataType>;

// Batch normalisation, batch_norm.h

Shapes BnActShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, float, float, const std::string &) {
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

Shapes BnActBackwardShape(const Dims &x, const Dims &, const Dims &, const paddle::optional<Shapes> &, const std::string &) {
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

// The mask's width depends on the type, which Paddle does not pass here. Nothing reads the mask's static shape.
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

// Max pooling, max_pool.h

Shapes MaxPoolShape(const Dims &x, int kernel, int stride, int padding) {
  const Window window = window_of(x[1], x[2], kernel, stride, padding, 0);
  const Dims out = {x[0], window.out_height, window.out_width, x[3]};
  return {out, out};
}
Types MaxPoolType(DataType x) { return {x, DataType::UINT8}; }
PD_BUILD_OP(native_max_pool)
    .Inputs({"X"})
    .Outputs({"Y", "Positions"})
    .Attrs({"kernel: int", "stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(MaxPool))
    .SetInferShapeFn(PD_INFER_SHAPE(MaxPoolShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(MaxPoolType));

Shapes MaxPoolBackwardShape(const Shapes &dy, const Dims &, int, int, int, int height, int width) {
  return {{dy[0][0], height, width, dy[0][3]}};
}
Types MaxPoolBackwardType(const Types &dy, DataType) { return {dy[0]}; }
PD_BUILD_OP(native_max_pool_backward)
    .Inputs({paddle::Vec("DY"), "Positions"})
    .Outputs({"DX"})
    .Attrs({"kernel: int", "stride: int", "padding: int", "height: int", "width: int"})
    .SetKernelFn(PD_KERNEL(MaxPoolBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(MaxPoolBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(MaxPoolBackwardType));

// Loss and accuracies, loss.h

Shapes LossShape(const Dims &logits, const Dims &, float, int, bool mean) {
  const int64_t rows = logits[0];
  return {mean ? Dims{} : Dims{rows, 1}, {}, {}, {rows, 2}, {rows, 2}};
}
Types LossType(DataType logits, DataType labels) { return {logits, logits, logits, logits, labels}; }
PD_BUILD_OP(native_loss)
    .Inputs({"Logits", "Labels"})
    .Outputs({"Loss", "Top1", "TopK", "OfSoftmax", "Pairs"})
    .Attrs({"smoothing: float", "k: int", "mean: bool"})
    .SetKernelFn(PD_KERNEL(Loss))
    .SetInferShapeFn(PD_INFER_SHAPE(LossShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(LossType));

PD_BUILD_GRAD_OP(native_loss)
    .Inputs({"Logits", "Labels", "OfSoftmax", paddle::Grad("Loss")})
    .Outputs({paddle::Grad("Logits")})
    .Attrs({"smoothing: float", "k: int", "mean: bool"})
    .SetKernelFn(PD_KERNEL(LossGradient));

// Loss scale and optimizers, update.h. An operator that has only in-place outputs needs no shapes.

Shapes CheckFiniteShape(const Shapes &, const Dims &, const Dims &, const Dims &, int, int, float, float) {
  return {{1}};
}
Types CheckFiniteType(const Types &, DataType, DataType, DataType) { return {DataType::FLOAT32}; }
// Paddle 3 takes an operator with "_grad" in its name for a gradient and looks for its forward operator.
PD_BUILD_OP(native_check_finite)
    .Inputs({paddle::Vec("Gradients"), "Scale", "GoodSteps", "BadSteps"})
    .Outputs({"Unscale", "ScaleOut", "GoodStepsOut", "BadStepsOut"})
    .Attrs({"raise_after_steps: int", "lower_after_steps: int", "raise_by: float", "lower_by: float"})
    .SetInplaceMap({{"Scale", "ScaleOut"}, {"GoodSteps", "GoodStepsOut"}, {"BadSteps", "BadStepsOut"}})
    .SetKernelFn(PD_KERNEL(CheckFinite))
    .SetInferShapeFn(PD_INFER_SHAPE(CheckFiniteShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CheckFiniteType));

PD_BUILD_OP(native_momentum)
    .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), paddle::Vec("Velocities"), "Rate",
             paddle::Optional("Unscale")})
    .Outputs({paddle::Vec("ParametersOut"), paddle::Vec("VelocitiesOut")})
    .Attrs({"mu: float", "nesterov: bool", "decays: std::vector<float>"})
    .SetInplaceMap({{paddle::Vec("Parameters"), paddle::Vec("ParametersOut")},
                    {paddle::Vec("Velocities"), paddle::Vec("VelocitiesOut")}})
    .SetKernelFn(PD_KERNEL(Momentum));

PD_BUILD_OP(native_momentum_masters)
    .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), paddle::Vec("Velocities"), paddle::Vec("Masters"),
             "Rate", paddle::Optional("Unscale")})
    .Outputs({paddle::Vec("ParametersOut"), paddle::Vec("VelocitiesOut"), paddle::Vec("MastersOut")})
    .Attrs({"mu: float", "nesterov: bool", "decays: std::vector<float>"})
    .SetInplaceMap({{paddle::Vec("Parameters"), paddle::Vec("ParametersOut")},
                    {paddle::Vec("Velocities"), paddle::Vec("VelocitiesOut")},
                    {paddle::Vec("Masters"), paddle::Vec("MastersOut")}})
    .SetKernelFn(PD_KERNEL(MomentumMasters));

// AdamW and LAMB
#define ADAM_STATE paddle::Vec("Moments1"), paddle::Vec("Moments2"), paddle::Vec("Powers1"), paddle::Vec("Powers2")
#define ADAM_STATE_OUT \
  paddle::Vec("Moments1Out"), paddle::Vec("Moments2Out"), paddle::Vec("Powers1Out"), paddle::Vec("Powers2Out")
#define ADAM_IN_PLACE \
  {paddle::Vec("Parameters"), paddle::Vec("ParametersOut")}, {paddle::Vec("Moments1"), paddle::Vec("Moments1Out")}, \
      {paddle::Vec("Moments2"), paddle::Vec("Moments2Out")}, {paddle::Vec("Powers1"), paddle::Vec("Powers1Out")}, \
      {paddle::Vec("Powers2"), paddle::Vec("Powers2Out")}
#define ADAM_OPERATORS(NAME, IS_LAMB) \
  PD_BUILD_OP(native_##NAME) \
      .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), ADAM_STATE, "Rate", paddle::Optional("Unscale")}) \
      .Outputs({paddle::Vec("ParametersOut"), ADAM_STATE_OUT}) \
      .Attrs({"beta1: float", "beta2: float", "epsilon: float", "decays: std::vector<float>"}) \
      .SetInplaceMap({ADAM_IN_PLACE}) \
      .SetKernelFn(PD_KERNEL(AdamPlain<IS_LAMB>)); \
  PD_BUILD_OP(native_##NAME##_masters) \
      .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), ADAM_STATE, paddle::Vec("Masters"), "Rate", \
               paddle::Optional("Unscale")}) \
      .Outputs({paddle::Vec("ParametersOut"), ADAM_STATE_OUT, paddle::Vec("MastersOut")}) \
      .Attrs({"beta1: float", "beta2: float", "epsilon: float", "decays: std::vector<float>"}) \
      .SetInplaceMap({ADAM_IN_PLACE, {paddle::Vec("Masters"), paddle::Vec("MastersOut")}}) \
      .SetKernelFn(PD_KERNEL(AdamMasters<IS_LAMB>));
ADAM_OPERATORS(adamw, false)
ADAM_OPERATORS(lamb, true)

// Metrics to the host, posts.h

Shapes PostShape(const Shapes &) { return {{1}}; }
Types PostType(const Types &) { return {DataType::INT32}; }
PD_BUILD_OP(native_post)
    .Inputs({paddle::Vec("X")})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Post))
    .SetInferShapeFn(PD_INFER_SHAPE(PostShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(PostType));
