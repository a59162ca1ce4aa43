// The operators for convolutions and pooling: their inputs, outputs, attributes, shapes and types. operators.cc defines
// the remaining operators. The files are compiled at the same time, and take about equally long.

#include "conv.h"
#include "depthwise_conv.h"
#include "onednn.h"
#include "paddle/phi/api/all.h"
#include "pointwise_conv.h"
#include "pool.h"
#include "stem.h"
#include "tensors.h"

// Python calls this function through ctypes.
extern "C" bool paddle_resnet_has_onednn() { return OneDnn::is_loaded(); }

// Each operator is preceded by functions that return the shapes and types of its outputs.

// Pooling, pool.h

Shapes MaxPoolShape(const Dims &x, int kernel, int stride, int padding) {
  const Window window = window_of(x[1], x[2], kernel, stride, padding, padding, 0);
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

Shapes AveragePoolShape(const Dims &x, int kernel, int stride, int padding, bool) {
  return {MaxPoolShape(x, kernel, stride, padding)[0]};
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
