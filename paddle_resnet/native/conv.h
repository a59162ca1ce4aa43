// Operator for float32 convolutions in NHWC. On a GPU, the operator calls cuDNN, whereas Paddle's conv2d transposes
// images to NCHW and back. The operator uses the cuDNN library that Paddle has loaded, so the build does not require
// cuDNN's headers. On the CPU, the operator calls the reference implementation.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

using reference::Convolution;

// Returns the number of positions of a filter along an axis.
int64_t positions(int64_t size, int kernel, int stride, int padding, int dilation) {
  return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

Convolution convolution_of(const Tensor &x, const Tensor &filter, const std::vector<int> &strides,
                           const std::vector<int> &paddings, const std::vector<int> &dilations, int groups) {
  const auto in = x.shape(), taps = filter.shape();
  if (x.dtype() != DataType::FLOAT32 || filter.dtype() != DataType::FLOAT32 || in.size() != 4 || taps.size() != 4)
    PD_THROW("custom convolution: requires float32 tensors with 4 dimensions");
  if (groups < 1 || taps[0] % groups != 0 || taps[3] * groups != in[3])
    PD_THROW("custom convolution: requires a filter [outputs, height, width, C / groups]");
  Convolution c = {};
  c.batch = in[0], c.channels = in[3], c.outputs = taps[0], c.groups = groups;
  for (const auto *values : {&strides, &paddings, &dilations})
    if (values->size() != 2) PD_THROW("custom convolution: requires 2 strides, paddings and dilations");
  for (int i = 0; i < 2; ++i) {
    c.size[i] = in[1 + i], c.kernel[i] = taps[1 + i];
    c.stride[i] = strides[i], c.padding[i] = paddings[i], c.dilation[i] = dilations[i];
    if (c.stride[i] < 1 || c.dilation[i] < 1 || c.padding[i] < 0)
      PD_THROW("custom convolution: requires strides and dilations of 1 or more, and paddings of 0 or more");
    if (c.size[i] + 2 * c.padding[i] <= c.dilation[i] * (c.kernel[i] - 1))
      PD_THROW("custom convolution: the filter is larger than the padded images");
    c.out_size[i] = positions(c.size[i], c.kernel[i], c.stride[i], c.padding[i], c.dilation[i]);
  }
  return c;
}

// cuDNN's handle, and the descriptors and algorithm of each geometry. The first step creates the handle, because a
// handle cannot be created while a CUDA graph is captured. As with class Gpu, all calls must come from one thread.
class CuDnn {
 public:
  static CuDnn &get() {
    static CuDnn cudnn;
    return cudnn;
  }

  void convolve(const Convolution &c, const Tensor &x, const Tensor &filter, const Tensor &y) {
    call("cudnnSetStream", handle_, tensor_stream(&x));
    auto entry = plans_.find(c);
    if (entry == plans_.end()) entry = plans_.emplace(c, plan(c)).first;
    const Plan &p = entry->second;
    const int64_t bytes = std::max<size_t>(p.workspace_bytes, 1);  // an empty tensor has no address
    const Tensor workspace = paddle::empty({bytes}, DataType::UINT8, x.place());
    const float one = 1.f, zero = 0.f;
    call("cudnnConvolutionForward", handle_, &one, p.x, raw(x), p.filter, raw(filter), p.convolution, p.algorithm,
         raw(workspace), p.workspace_bytes, &zero, p.y, raw(y));
  }

 private:
  // Values of enumerations in cudnn.h, the same in cuDNN 8 and 9.
  static constexpr int kFloat = 0, kNhwc = 1, kCrossCorrelation = 1;

  struct Algorithm {  // cudnnConvolutionFwdAlgoPerf_t
    int algorithm, status;
    float time;
    size_t workspace_bytes;
    int determinism, math, reserved[3];
  };
  struct Plan {
    void *x, *filter, *convolution, *y;  // descriptors
    int algorithm;
    size_t workspace_bytes;
  };
  struct Less {
    bool operator()(const Convolution &a, const Convolution &b) const { return std::memcmp(&a, &b, sizeof(a)) < 0; }
  };

  CuDnn() { call("cudnnCreate", &handle_); }

  Plan plan(const Convolution &c) {
    Plan p;
    for (void **tensor : {&p.x, &p.y}) call("cudnnCreateTensorDescriptor", tensor);
    call("cudnnSetTensor4dDescriptor", p.x, kNhwc, kFloat, c.batch, c.channels, c.size[0], c.size[1]);
    call("cudnnSetTensor4dDescriptor", p.y, kNhwc, kFloat, c.batch, c.outputs, c.out_size[0], c.out_size[1]);
    call("cudnnCreateFilterDescriptor", &p.filter);
    call("cudnnSetFilter4dDescriptor", p.filter, kFloat, kNhwc, c.outputs, c.channels / c.groups, c.kernel[0],
         c.kernel[1]);
    call("cudnnCreateConvolutionDescriptor", &p.convolution);
    call("cudnnSetConvolution2dDescriptor", p.convolution, c.padding[0], c.padding[1], c.stride[0], c.stride[1],
         c.dilation[0], c.dilation[1], kCrossCorrelation, kFloat);
    call("cudnnSetConvolutionGroupCount", p.convolution, c.groups);
    Algorithm found[8];
    int count = 0;
    call("cudnnGetConvolutionForwardAlgorithm_v7", handle_, p.x, p.filter, p.convolution, p.y, 8, &count, found);
    for (int i = 0; i < count; ++i) {
      if (found[i].status != 0) continue;
      call("cudnnSetConvolutionMathType", p.convolution, found[i].math);
      p.algorithm = found[i].algorithm, p.workspace_bytes = found[i].workspace_bytes;
      return p;
    }
    PD_THROW("convolution: cuDNN has no algorithm for this layer in float32; use --precision float16");
  }

  // Calls a function of cuDNN. The types of the arguments must be those of cudnn.h: enumerations are int, and handles
  // and descriptors are void *.
  template <class... Arguments>
  static void call(const char *name, Arguments... arguments) {
    const int status = function<int (*)(Arguments...)>(name)(arguments...);
    if (status != 0)
      PD_THROW(name, ": ", function<const char *(*)(int)>("cudnnGetErrorString")(status), "; use --precision float16");
  }

  template <class Function>
  static Function function(const char *name) {
    static void *library = loaded();
    void *symbol = library ? dlsym(library, name) : nullptr;
    if (symbol == nullptr) PD_THROW("cuDNN: Paddle has not loaded a library with ", name, "; use --precision float16");
    return reinterpret_cast<Function>(symbol);
  }

  // Returns the cuDNN library that Paddle has loaded. dlopen finds it by its DT_SONAME, which contains the version.
  static void *loaded() {
    for (const char *name : {"libcudnn.so.8", "libcudnn.so.9", "libcudnn.so"})
      if (void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
    return nullptr;
  }

  void *handle_ = nullptr;
  std::map<Convolution, Plan, Less> plans_;
};

// Returns y [N, OH, OW, outputs]. `filter` is [outputs, KH, KW, C / groups]. Each list contains the values for (height,
// width).
std::vector<Tensor> Conv(const Tensor &x, const Tensor &filter, const std::vector<int> &strides,
                         const std::vector<int> &paddings, const std::vector<int> &dilations, int groups) {
  const Convolution c = convolution_of(x, filter, strides, paddings, dilations, groups);
  Tensor y = empty_floats({c.batch, c.out_size[0], c.out_size[1], c.outputs}, x);
  if (x.is_gpu())
    CuDnn::get().convolve(c, x, filter, y);
  else
    reference::conv(data<float>(x), data<float>(filter), c, data<float>(y));
  return {y};
}

}  // namespace
