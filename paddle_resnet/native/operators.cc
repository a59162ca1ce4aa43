// The library of custom Paddle operators. This file defines the functions that Python calls, and the inputs, outputs,
// attributes, shapes and types of all operators. The headers in this folder implement the operators. Most
// operators check their arguments, allocate their results, and then launch a kernel on Paddle's stream or, on the CPU,
// run a float32 loop from reference/. Exceptions: conv.h calls cuDNN on a GPU, onednn.h calls oneDNN on the CPU, and
// async_copy.h only copies.

#include <cstdint>
#include <vector>

#include "affine.h"
#include "async_copy.h"
#include "batch_norm.h"
#include "concat.h"
#include "conv.h"
#include "depthwise_conv.h"
#include "dropout.h"
#include "gpu.h"
#include "loss.h"
#include "onednn.h"
#include "pointwise_conv.h"
#include "pool.h"
#include "paddle/phi/api/all.h"
#include "squeeze_excitation.h"
#include "stem.h"
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

using Dims = std::vector<int64_t>;
using Shapes = std::vector<Dims>;
using Types = std::vector<DataType>;

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

// Pooling, pool.h

Shapes MaxPoolShape(const Dims &x, int kernel, int stride, int padding, int padding_end) {
  const Window window = window_of(x[1], x[2], kernel, stride, padding, padding_end, 0);
  const Dims out = {x[0], window.out_height, window.out_width, x[3]};
  return {out, out};
}
Types MaxPoolType(DataType x) { return {x, DataType::UINT8}; }
PD_BUILD_OP(native_max_pool)
    .Inputs({"X"})
    .Outputs({"Y", "Positions"})
    .Attrs({"kernel: int", "stride: int", "padding: int", "padding_end: int"})
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

Shapes AveragePoolShape(const Dims &x, int kernel, int stride, int padding, bool) {
  return {MaxPoolShape(x, kernel, stride, padding, padding)[0]};
}
Types AveragePoolType(DataType x) { return {x}; }
PD_BUILD_OP(native_average_pool)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"kernel: int", "stride: int", "padding: int", "excludes_padding: bool"})
    .SetKernelFn(PD_KERNEL(AveragePool))
    .SetInferShapeFn(PD_INFER_SHAPE(AveragePoolShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AveragePoolType));

Shapes AveragePoolBackwardShape(const Shapes &dy, int, int, int, bool, int height, int width) {
  return {{dy[0][0], height, width, dy[0][3]}};
}
Types AveragePoolBackwardType(const Types &dy) { return {dy[0]}; }
PD_BUILD_OP(native_average_pool_backward)
    .Inputs({paddle::Vec("DY")})
    .Outputs({"DX"})
    .Attrs({"kernel: int", "stride: int", "padding: int", "excludes_padding: bool", "height: int", "width: int"})
    .SetKernelFn(PD_KERNEL(AveragePoolBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(AveragePoolBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AveragePoolBackwardType));

// Depthwise convolution, depthwise_conv.h

Shapes DepthwiseConvShape(const Dims &x, const Dims &filter, int stride, int padding, int padding_end) {
  const Window window = window_of(x[1], x[2], filter[2], stride, padding, padding_end, 0);
  return {{x[0], window.out_height, window.out_width, x[3]}};
}
Types DepthwiseConvType(DataType x, DataType) { return {x}; }
PD_BUILD_OP(native_depthwise_conv)
    .Inputs({"X", "Filter"})
    .Outputs({"Y"})
    .Attrs({"stride: int", "padding: int", "padding_end: int"})
    .SetKernelFn(PD_KERNEL(DepthwiseConv))
    .SetInferShapeFn(PD_INFER_SHAPE(DepthwiseConvShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(DepthwiseConvType));

Shapes DepthwiseConvBnInferenceShape(const Dims &x, const Dims &filter, const Dims &, const Dims &, const Dims &,
                                     const Dims &, int stride, int padding, int padding_end, float,
                                     const std::string &) {
  return DepthwiseConvShape(x, filter, stride, padding, padding_end);
}
Types DepthwiseConvBnInferenceType(DataType x, DataType, DataType, DataType, DataType, DataType) { return {x}; }
PD_BUILD_OP(native_depthwise_conv_bn_inference)
    .Inputs({"X", "Filter", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y"})
    .Attrs({"stride: int", "padding: int", "padding_end: int", "epsilon: float", "activation: std::string"})
    .SetKernelFn(PD_KERNEL(DepthwiseConvBnInference))
    .SetInferShapeFn(PD_INFER_SHAPE(DepthwiseConvBnInferenceShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(DepthwiseConvBnInferenceType));

Shapes DepthwiseConvBackwardShape(const Dims &x, const Dims &filter, const Dims &, const paddle::optional<Shapes> &,
                                  int, int, int) {
  return {x, filter};
}
Types DepthwiseConvBackwardType(DataType x, DataType filter, DataType, const paddle::optional<Types> &) {
  return {x, filter};
}
PD_BUILD_OP(native_depthwise_conv_backward)
    .Inputs({"X", "Filter", "DY", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DFilter"})
    .Attrs({"stride: int", "padding: int", "padding_end: int"})
    .SetKernelFn(PD_KERNEL(DepthwiseConvBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(DepthwiseConvBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(DepthwiseConvBackwardType));

// Convolution, conv.h

Shapes ConvShape(const Dims &x, const Dims &filter, const std::vector<int> &strides, const std::vector<int> &paddings,
                 const std::vector<int> &dilations, int) {
  const auto size = [&](int i) {
    return positions(x[1 + i], filter[1 + i], strides[i], paddings[i], dilations[i]);
  };
  return {{x[0], size(0), size(1), filter[0]}};
}
Types ConvType(DataType x, DataType) { return {x}; }
PD_BUILD_OP(native_conv)
    .Inputs({"X", "Filter"})
    .Outputs({"Y"})
    .Attrs({"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int"})
    .SetKernelFn(PD_KERNEL(Conv))
    .SetInferShapeFn(PD_INFER_SHAPE(ConvShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(ConvType));

// Convolution on the CPU, onednn.h

extern "C" bool paddle_resnet_has_onednn() { return OneDnn::is_loaded(); }

Shapes Conv2dShape(const Dims &x, const Dims &filter, const std::vector<int> &strides,
                   const std::vector<int> &paddings, const std::vector<int> &dilations, int groups) {
  return {conv2d_shape(geometry_of(x, filter, strides, paddings, dilations, groups))};
}
Types Conv2dType(DataType x, DataType) { return {x}; }
PD_BUILD_OP(native_conv2d)
    .Inputs({"X", "Filter"})
    .Outputs({"Y"})
    .Attrs({"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int"})
    .SetKernelFn(PD_KERNEL(Conv2d))
    .SetInferShapeFn(PD_INFER_SHAPE(Conv2dShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(Conv2dType));

Shapes Conv2dBackwardShape(const Dims &x, const Dims &filter, const Dims &, const paddle::optional<Shapes> &,
                           const std::vector<int> &, const std::vector<int> &, const std::vector<int> &, int, bool,
                           bool) {
  return {x, filter};
}
Types Conv2dBackwardType(DataType x, DataType filter, DataType, const paddle::optional<Types> &) {
  return {x, filter};
}
PD_BUILD_OP(native_conv2d_backward)
    .Inputs({"X", "Filter", "DY", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DFilter"})
    .Attrs({"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int",
            "needs_dx: bool", "needs_dfilter: bool"})
    .SetKernelFn(PD_KERNEL(Conv2dBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(Conv2dBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(Conv2dBackwardType));

// 1x1 convolution, pointwise_conv.h

Shapes PointwiseConvBnInferenceShape(const Dims &x, const Dims &filter, const Dims &, const Dims &, const Dims &,
                                     const Dims &, const paddle::optional<Dims> &, float, const std::string &) {
  return {{x[0], x[1], x[2], filter[0]}};
}
Types PointwiseConvBnInferenceType(DataType x, DataType, DataType, DataType, DataType, DataType,
                                   const paddle::optional<DataType> &) {
  return {x};
}
PD_BUILD_OP(native_pointwise_conv_bn_inference)
    .Inputs({"X", "Filter", "Scale", "Bias", "Mean", "Variance", paddle::Optional("Z")})
    .Outputs({"Y"})
    .Attrs({"epsilon: float", "activation: std::string"})
    .SetKernelFn(PD_KERNEL(PointwiseConvBnInference))
    .SetInferShapeFn(PD_INFER_SHAPE(PointwiseConvBnInferenceShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(PointwiseConvBnInferenceType));

Shapes PointwiseFilterGradientShape(const Dims &x, const Dims &dy, const paddle::optional<Shapes> &) {
  return {{dy[3], x[3], 1, 1}};
}
Types PointwiseFilterGradientType(DataType x, DataType, const paddle::optional<Types> &) { return {x}; }
PD_BUILD_OP(native_pointwise_conv_backward_filter)
    .Inputs({"X", "DY", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DFilter"})
    .SetKernelFn(PD_KERNEL(PointwiseFilterGradient))
    .SetInferShapeFn(PD_INFER_SHAPE(PointwiseFilterGradientShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(PointwiseFilterGradientType));

// Stem of ResNets, stem.h

Shapes StemInferenceShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, const Dims &, float) {
  return {{x[0], stem_positions(x[1]), stem_positions(x[2]), kStemFilters}};
}
Types StemInferenceType(DataType x, DataType, DataType, DataType, DataType, DataType) { return {x}; }
PD_BUILD_OP(native_stem_inference)
    .Inputs({"X", "Filter", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(StemInference))
    .SetInferShapeFn(PD_INFER_SHAPE(StemInferenceShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(StemInferenceType));

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

// Scale and bias of all elements, affine.h

Shapes AffineShape(const Dims &x, const Dims &, const Dims &) { return {x}; }
Types AffineType(DataType x, DataType, DataType) { return {x}; }
PD_BUILD_OP(native_affine)
    .Inputs({"X", "Scale", "Bias"})
    .Outputs({"Y"})
    .SetKernelFn(PD_KERNEL(Affine))
    .SetInferShapeFn(PD_INFER_SHAPE(AffineShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AffineType));

Shapes AffineBackwardShape(const Dims &x, const Dims &scale, const Dims &, const paddle::optional<Shapes> &) {
  return {x, scale, scale};
}
Types AffineBackwardType(DataType x, DataType, DataType, const paddle::optional<Types> &) { return {x, x, x}; }
PD_BUILD_OP(native_affine_backward)
    .Inputs({"X", "Scale", "DY", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DScale", "DBias"})
    .SetKernelFn(PD_KERNEL(AffineBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(AffineBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AffineBackwardType));

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
