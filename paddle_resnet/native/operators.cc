// Paddle operators around the kernels of this folder: they check and allocate, and launch on Paddle's stream. On the
// CPU they compute the same in plain float32 loops, the reference that the tests compare with Paddle's own operators.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu.h"
#include "loss.h"
#include "paddle/phi/api/all.h"
#include "posts.h"
#include "tensors.h"
#include "updates.h"

namespace {

// The part of a kernel's name that says what follows BN: the addition of so many summands, the ReLU.
std::string fused(int summands, bool relu) {
  if (summands > 0) return summands == 1 ? "_add_relu" : "_add_relu_two";
  return relu ? "_relu" : "";
}

// [N, H, W, C] as rows and channels.
struct Shape {
  int rows, channels;
  explicit Shape(const Tensor &x) {
    channels = static_cast<int>(x.shape().back());
    const int64_t all_rows = x.numel() / channels;
    if (channels % vector_lanes(x) != 0) PD_THROW("fused operators need channels in whole vectors of 16 bytes");
    if (all_rows > INT32_MAX / 2) PD_THROW("fused operators take less than 2^30 rows");
    rows = static_cast<int>(all_rows);
  }
};

// A grid that fills the GPU: each block has a group of channels and walks over rows.
struct RowGrid {
  std::vector<unsigned> grid, block;
  RowGrid(const Tensor &x, const Shape &shape) {
    const int vectors = shape.channels / vector_lanes(x);
    int lanes = std::min(vectors, kMaxLanes);
    while (vectors % lanes != 0) --lanes;
    const int groups = vectors / lanes, height = kMaxThreads / lanes;
    if (groups > kMaxChannelGroups) PD_THROW("too many channels for the fused operators: ", shape.channels);
    const int row_groups = std::max(1, Gpu::get().blocks() / groups);
    block = {static_cast<unsigned>(lanes), static_cast<unsigned>(height)};
    grid = {static_cast<unsigned>(groups),
            static_cast<unsigned>(std::min(row_groups, (shape.rows + height - 1) / height))};
  }
};

// y = a x + b [+ z], ReLU, on the CPU.
void apply_on_cpu(const Shape &shape, const float *x, const float *z, const float *a, const float *b, bool relu,
                  float *y, uint8_t *mask) {
  constexpr int kLanes = kVectorBytes / sizeof(float);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.rows) * shape.channels; ++i) {
    const int channel = i % shape.channels;
    float value = std::fma(a[channel], x[i], b[channel]) + (z ? z[i] : 0);
    if (mask) {
      uint8_t &byte = mask[i / kLanes];
      if (i % kLanes == 0) byte = 0;
      byte |= (value > 0) << i % kLanes;
    }
    y[i] = relu && value < 0 ? 0 : value;
  }
}

Tensor train(const Tensor &x, const Tensor *z, const Tensor &scale, const Tensor &bias, Tensor &mean, Tensor &variance,
             float momentum, float epsilon, bool relu, Tensor &coefficients, Tensor *mask) {
  const Shape shape(x);
  if (z) require_like(x, *z, "addend");
  coefficients = empty_floats({4, shape.channels}, x);
  Tensor y = empty_as(x);
  if (mask) {
    auto mask_shape = x.shape();
    mask_shape.back() /= vector_lanes(x);
    *mask = paddle::empty(mask_shape, DataType::UINT8, x.place());
  }
  if (x.is_gpu()) {
    const RowGrid grid(x, shape);
    void *in = raw(x), *added = z ? raw(*z) : nullptr, *out = raw(y), *bits = mask ? raw(*mask) : nullptr;
    void *partial = Gpu::get().partial(), *arrivals = Gpu::get().arrivals();
    float *s = data<float>(scale), *b = data<float>(bias), *m = data<float>(mean), *v = data<float>(variance);
    float *c = data<float>(coefficients);
    int rows = shape.rows;
    Gpu::get().launch("bn_statistics" + suffix(x), x, grid.grid, grid.block,
                      {&in, &rows, &s, &b, &m, &v, &momentum, &epsilon, &c, &partial, &arrivals});
    Gpu::get().launch("bn_apply" + fused(z ? 1 : 0, relu) + suffix(x), x, grid.grid, grid.block,
                      {&in, &added, &rows, &c, &out, &bits});
    return y;
  }
  require_float32(x);
  const float *values = data<float>(x);
  float *c = data<float>(coefficients);
  for (int channel = 0; channel < shape.channels; ++channel) {
    double sum = 0, square = 0;
    for (int64_t row = 0; row < shape.rows; ++row) sum += values[row * shape.channels + channel];
    const double center = sum / shape.rows;
    for (int64_t row = 0; row < shape.rows; ++row) {
      const double difference = values[row * shape.channels + channel] - center;
      square += difference * difference;
    }
    const double biased = square / shape.rows, inverse = 1 / std::sqrt(biased + epsilon);
    const double a = data<float>(scale)[channel] * inverse;
    c[channel] = a;
    c[shape.channels + channel] = data<float>(bias)[channel] - center * a;
    c[2 * shape.channels + channel] = center;
    c[3 * shape.channels + channel] = inverse;
    float &running_mean = data<float>(mean)[channel], &running_variance = data<float>(variance)[channel];
    running_mean = momentum * running_mean + (1 - momentum) * center;
    running_variance = momentum * running_variance + (1 - momentum) * square / std::max(1, shape.rows - 1);
  }
  apply_on_cpu(shape, values, z ? data<float>(*z) : nullptr, c, c + shape.channels, relu, data<float>(y),
               mask ? data<uint8_t>(*mask) : nullptr);
  return y;
}

// The gradients of scale and bias: where Paddle has put them into a buffer that is reduced as a whole, into that.
void gradient_targets(const paddle::optional<std::vector<Tensor>> &into, const Tensor &coefficients, Tensor &dscale,
                      Tensor &dbias) {
  const int64_t channels = coefficients.shape().back();
  dscale = into ? into->at(0) : empty_floats({channels}, coefficients);
  dbias = into ? into->at(1) : empty_floats({channels}, coefficients);
}

// `gradients`: one or two summands; `dz`, `mask`: with the residual addition.
Tensor backward(const Tensor &x, const std::vector<Tensor> &gradients, const Tensor &coefficients, const Tensor *mask,
                bool relu, Tensor *dz, Tensor &dscale, Tensor &dbias) {
  const Shape shape(x);
  const int channels = shape.channels;
  Tensor dx = empty_as(x), applied = empty_floats({2, channels}, x);
  if (dz) *dz = empty_as(x);
  if (gradients.empty() || gradients.size() > (dz ? 2 : 1))
    PD_THROW("a fused gradient takes one gradient, or two to add");
  for (const Tensor &gradient : gradients) require_like(x, gradient, "gradient");
  if (mask && mask->numel() != x.numel() / vector_lanes(x)) PD_THROW("a fused gradient's mask is of another size");
  float *c = data<float>(coefficients), *ds = data<float>(dscale), *db = data<float>(dbias), *ap = data<float>(applied);
  if (x.is_gpu()) {
    const RowGrid grid(x, shape);
    void *in = raw(x), *first = raw(gradients[0]), *second = gradients.size() > 1 ? raw(gradients[1]) : nullptr;
    void *bits = mask ? raw(*mask) : nullptr, *masked = dz ? raw(*dz) : nullptr, *out = raw(dx);
    void *partial = Gpu::get().partial(), *arrivals = Gpu::get().arrivals();
    int rows = shape.rows;
    const int summands = dz ? gradients.size() : 0;
    Gpu::get().launch("bn_reduce" + fused(summands, relu) + suffix(x), x, grid.grid, grid.block,
                      {&in, &first, &second, &bits, &rows, &c, &masked, &ds, &db, &ap, &partial, &arrivals});
    Gpu::get().launch("bn_gradient" + fused(0, relu && !dz) + suffix(x), x, grid.grid, grid.block,
                      {&in, dz ? &masked : &first, &rows, &c, &ap, &out});
    return dx;
  }
  require_float32(x);
  constexpr int kLanes = kVectorBytes / sizeof(float);
  const float *values = data<float>(x);
  const int64_t size = static_cast<int64_t>(shape.rows) * channels;
  std::vector<float> g(size);
  std::vector<double> sum(channels), product(channels);
  for (int64_t i = 0; i < size; ++i) {
    const int channel = i % channels;
    for (const Tensor &gradient : gradients) g[i] += data<float>(gradient)[i];
    const bool passes = mask ? data<uint8_t>(*mask)[i / kLanes] >> i % kLanes & 1
                             : !relu || std::fma(c[channel], values[i], c[channels + channel]) > 0;
    if (!passes) g[i] = 0;
    sum[channel] += g[i];
    product[channel] += static_cast<double>(g[i]) * (values[i] - c[2 * channels + channel]);
  }
  for (int channel = 0; channel < channels; ++channel) {
    const double inverse = c[3 * channels + channel];
    ds[channel] = product[channel] * inverse;
    db[channel] = sum[channel];
  }
  for (int64_t i = 0; i < size; ++i) {
    const int channel = i % channels;
    const double inverse = c[3 * channels + channel], difference = values[i] - c[2 * channels + channel];
    data<float>(dx)[i] = c[channel] * (g[i] - sum[channel] / shape.rows -
                                       difference * inverse * inverse * product[channel] / shape.rows);
  }
  if (dz) std::copy(g.begin(), g.end(), data<float>(*dz));
  return dx;
}

Window window_of(int height, int width, int kernel, int stride, int padding, int vectors) {
  const auto positions = [&](int size) { return (size + 2 * padding - kernel) / stride + 1; };
  return {height, width, positions(height), positions(width), kernel, stride, padding, vectors};
}

unsigned pool_threads(int64_t vectors) {
  if (vectors > INT32_MAX) PD_THROW("the fused max pooling takes less than 2^31 vectors of 16 bytes");
  return static_cast<unsigned>(vectors);
}

}  // namespace

// The kernels' image: the bytes of a cubin for this GPU.
extern "C" void paddle_resnet_set_image(const char *bytes, size_t size) { Gpu::image().assign(bytes, bytes + size); }

extern "C" uint64_t paddle_resnet_posts() { return Posts::get().count(); }
extern "C" int paddle_resnet_wait(uint64_t number, int i, const char **memory, size_t *bytes) {
  return Posts::get().wait(number, i, memory, bytes);
}

std::vector<Tensor> Post(const std::vector<Tensor> &values) {
  Posts::get().add(values);
  return {paddle::empty({1}, DataType::INT32, values[0].place())};  // an operator has to have an output
}

std::vector<Tensor> BnAct(const Tensor &x, const Tensor &scale, const Tensor &bias, Tensor &mean, Tensor &variance,
                          float momentum, float epsilon, bool relu) {
  Tensor coefficients;
  Tensor y = train(x, nullptr, scale, bias, mean, variance, momentum, epsilon, relu, coefficients, nullptr);
  return {y, coefficients};
}

std::vector<Tensor> BnAddRelu(const Tensor &x, const Tensor &z, const Tensor &scale, const Tensor &bias, Tensor &mean,
                              Tensor &variance, float momentum, float epsilon) {
  Tensor coefficients, mask;
  Tensor y = train(x, &z, scale, bias, mean, variance, momentum, epsilon, true, coefficients, &mask);
  return {y, coefficients, mask};
}

std::vector<Tensor> BnActBackward(const Tensor &x, const Tensor &dy, const Tensor &coefficients,
                                  const paddle::optional<std::vector<Tensor>> &into, bool relu) {
  Tensor dscale, dbias;
  gradient_targets(into, coefficients, dscale, dbias);
  Tensor dx = backward(x, {dy}, coefficients, nullptr, relu, nullptr, dscale, dbias);
  return {dx, dscale, dbias};
}

std::vector<Tensor> BnAddReluBackward(const Tensor &x, const std::vector<Tensor> &dy, const Tensor &coefficients,
                                      const Tensor &mask, const paddle::optional<std::vector<Tensor>> &into) {
  Tensor dz, dscale, dbias;
  gradient_targets(into, coefficients, dscale, dbias);
  Tensor dx = backward(x, dy, coefficients, &mask, true, &dz, dscale, dbias);
  return {dx, dz, dscale, dbias};
}

std::vector<Tensor> BnInference(const Tensor &x, const Tensor &scale, const Tensor &bias, const Tensor &mean,
                                const Tensor &variance, const paddle::optional<Tensor> &z, float epsilon, bool relu) {
  const Shape shape(x);
  if (z && !relu) PD_THROW("the residual addition is fused with a ReLU behind it only");
  if (z) require_like(x, *z, "addend");
  Tensor y = empty_as(x);
  if (x.is_gpu()) {
    const RowGrid grid(x, shape);
    void *in = raw(x), *added = z ? raw(*z) : nullptr, *out = raw(y);
    float *s = data<float>(scale), *b = data<float>(bias), *m = data<float>(mean), *v = data<float>(variance);
    int rows = shape.rows;
    Gpu::get().launch("bn_infer" + fused(z ? 1 : 0, relu) + suffix(x), x, grid.grid, grid.block,
                      {&in, &added, &rows, &s, &b, &m, &v, &epsilon, &out});
    return {y};
  }
  require_float32(x);
  std::vector<float> a(shape.channels), b(shape.channels);
  for (int channel = 0; channel < shape.channels; ++channel) {
    a[channel] = data<float>(scale)[channel] / std::sqrt(data<float>(variance)[channel] + epsilon);
    b[channel] = data<float>(bias)[channel] - data<float>(mean)[channel] * a[channel];
  }
  apply_on_cpu(shape, data<float>(x), z ? data<float>(*z) : nullptr, a.data(), b.data(), relu, data<float>(y), nullptr);
  return {y};
}

std::vector<Tensor> MaxPool(const Tensor &x, int kernel, int stride, int padding) {
  const int batch = x.shape()[0], channels = Shape(x).channels, vectors = channels / vector_lanes(x);
  Window window = window_of(x.shape()[1], x.shape()[2], kernel, stride, padding, vectors);
  if (padding >= kernel) PD_THROW("the fused max pooling's padding, ", padding, ", leaves windows without an element");
  const std::vector<int64_t> shape = {batch, window.out_height, window.out_width, channels};
  Tensor y = paddle::empty(shape, x.dtype(), x.place()), positions = paddle::empty(shape, DataType::UINT8, x.place());
  if (x.is_gpu()) {
    pool_threads(x.numel() / vector_lanes(x));
    unsigned outputs = pool_threads(y.numel() / vector_lanes(x));
    void *in = raw(x), *out = raw(y), *found = raw(positions);
    Gpu::get().launch("max_pool" + suffix(x), x, {(outputs + kPoolThreads - 1) / kPoolThreads, 1}, {kPoolThreads, 1},
                      {&in, &outputs, &window, &out, &found});
    return {y, positions};
  }
  require_float32(x);
  for (int64_t i = 0; i < y.numel(); ++i) {
    const int channel = i % channels, column = i / channels % window.out_width;
    const int row = i / channels / window.out_width % window.out_height;
    const int64_t image = i / channels / window.out_width / window.out_height;
    bool is_first = true;
    for (int position = 0; position < kernel * kernel; ++position) {
      const int h = row * stride - padding + position / kernel, w = column * stride - padding + position % kernel;
      if (h < 0 || h >= window.height || w < 0 || w >= window.width) continue;
      const float value = data<float>(x)[((image * window.height + h) * window.width + w) * channels + channel];
      if (!is_first && !(value > data<float>(y)[i]) && !std::isnan(value)) continue;
      is_first = false;
      data<float>(y)[i] = value;
      data<uint8_t>(positions)[i] = position;
    }
  }
  return {y, positions};
}

std::vector<Tensor> MaxPoolBackward(const std::vector<Tensor> &dy, const Tensor &positions, int kernel, int stride,
                                    int padding, int height, int width) {
  const int batch = dy[0].shape()[0], channels = Shape(dy[0]).channels, vectors = channels / vector_lanes(dy[0]);
  Window window = window_of(height, width, kernel, stride, padding, vectors);
  Tensor dx = paddle::empty({batch, height, width, channels}, dy[0].dtype(), dy[0].place());
  if (dy.size() > 2) PD_THROW("a fused gradient takes one gradient, or two to add");
  if (dy.size() > 1) require_like(dy[0], dy[1], "second gradient");
  if (positions.numel() != dy[0].numel()) PD_THROW("a fused gradient's positions are of another size");
  if (dx.is_gpu()) {
    unsigned inputs = pool_threads(dx.numel() / vector_lanes(dx));
    void *first = raw(dy[0]), *second = dy.size() > 1 ? raw(dy[1]) : nullptr, *found = raw(positions), *out = raw(dx);
    Gpu::get().launch("max_pool_gradient" + suffix(dx), dx, {(inputs + kPoolThreads - 1) / kPoolThreads, 1},
                      {kPoolThreads, 1}, {&first, &second, &found, &inputs, &window, &out});
    return {dx};
  }
  require_float32(dx);
  std::fill_n(data<float>(dx), dx.numel(), 0.f);
  for (int64_t i = 0; i < positions.numel(); ++i) {
    const int channel = i % channels, column = i / channels % window.out_width;
    const int row = i / channels / window.out_width % window.out_height;
    const int64_t image = i / channels / window.out_width / window.out_height;
    const int position = data<uint8_t>(positions)[i];
    const int h = row * stride - padding + position / kernel, w = column * stride - padding + position % kernel;
    for (const Tensor &gradient : dy) {
      data<float>(dx)[((image * height + h) * width + w) * channels + channel] += data<float>(gradient)[i];
    }
  }
  return {dx};
}

std::vector<Tensor> CheckGradients(const Tensors &gradients, Tensor &scale, Tensor &good_steps, Tensor &bad_steps,
                                   int raise_after_steps, int lower_after_steps, float raise_by, float lower_by) {
  return {check(gradients, scale, good_steps, bad_steps, {raise_after_steps, lower_after_steps, raise_by, lower_by})};
}

void Momentum(Tensors &parameters, const Tensors &gradients, Tensors &velocities, const Tensor &rate,
              const paddle::optional<Tensor> &unscale, float mu, const std::vector<float> &decays) {
  update(parameters, gradients, velocities, nullptr, rate, unscale, mu, decays);
}

void MomentumMasters(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors &masters,
                     const Tensor &rate, const paddle::optional<Tensor> &unscale, float mu,
                     const std::vector<float> &decays) {
  update(parameters, gradients, velocities, &masters, rate, unscale, mu, decays);
}

std::vector<Tensor> Loss(const Tensor &logits, const Tensor &labels, float smoothing, int k, bool mean) {
  return score(logits, labels, smoothing, k, mean);
}

std::vector<Tensor> LossBackward(const Tensor &logits, const Tensor &labels, const Tensor &of_softmax,
                                 const Tensor &dloss, float smoothing) {
  return {score_gradient(logits, labels, of_softmax, dloss, smoothing)};
}

using Dims = std::vector<int64_t>;
using Shapes = std::vector<Dims>;
using Types = std::vector<DataType>;

Dims coefficient_dims(const Dims &x) { return {4, x.back()}; }
Dims mask_dims(Dims x, int lanes) { return x.back() /= lanes, x; }

Shapes BnActShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, float, float, bool) {
  return {x, coefficient_dims(x)};
}
Types BnActType(DataType x, DataType, DataType, DataType, DataType) { return {x, DataType::FLOAT32}; }
// The mask's width depends on the type, which Paddle does not tell here; nothing reads the static shape of the mask.
Shapes BnAddReluShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &, const Dims &, float,
                      float) {
  return {x, coefficient_dims(x), mask_dims(x, 1)};
}
Types BnAddReluType(DataType x, DataType, DataType, DataType, DataType, DataType) {
  return {x, DataType::FLOAT32, DataType::UINT8};
}
Shapes BnActBackwardShape(const Dims &x, const Dims &, const Dims &, const paddle::optional<Shapes> &, bool) {
  return {x, {x.back()}, {x.back()}};
}
Types BnActBackwardType(DataType x, DataType, DataType, const paddle::optional<Types> &) {
  return {x, DataType::FLOAT32, DataType::FLOAT32};
}
Shapes BnAddReluBackwardShape(const Dims &x, const Shapes &, const Dims &, const Dims &,
                              const paddle::optional<Shapes> &) {
  return {x, x, {x.back()}, {x.back()}};
}
Types BnAddReluBackwardType(DataType x, const Types &, DataType, DataType, const paddle::optional<Types> &) {
  return {x, x, DataType::FLOAT32, DataType::FLOAT32};
}
Shapes BnInferenceShape(const Dims &x, const Dims &, const Dims &, const Dims &, const Dims &,
                        const paddle::optional<Dims> &, float, bool) {
  return {x};
}
Types BnInferenceType(DataType x, DataType, DataType, DataType, DataType, const paddle::optional<DataType> &) {
  return {x};
}
Shapes MaxPoolShape(const Dims &x, int kernel, int stride, int padding) {
  const Window window = window_of(x[1], x[2], kernel, stride, padding, 0);
  const Dims out = {x[0], window.out_height, window.out_width, x[3]};
  return {out, out};
}
Types MaxPoolType(DataType x) { return {x, DataType::UINT8}; }
Shapes MaxPoolBackwardShape(const Shapes &dy, const Dims &, int, int, int, int height, int width) {
  return {{dy[0][0], height, width, dy[0][3]}};
}
Types MaxPoolBackwardType(const Types &dy, DataType) { return {dy[0]}; }

Shapes PostShape(const Shapes &) { return {{1}}; }
Types PostType(const Types &) { return {DataType::INT32}; }

Shapes CheckGradientsShape(const Shapes &, const Dims &, const Dims &, const Dims &, int, int, float, float) {
  return {{1}};
}
Types CheckGradientsType(const Types &, DataType, DataType, DataType) { return {DataType::FLOAT32}; }

Shapes LossShape(const Dims &logits, const Dims &, float, int, bool mean) {
  const int64_t rows = logits[0];
  return {mean ? Dims{} : Dims{rows, 1}, {}, {}, {rows, 2}, {rows, 2}};
}
Types LossType(DataType logits, DataType labels) { return {logits, logits, logits, logits, labels}; }
Shapes LossBackwardShape(const Dims &logits, const Dims &, const Dims &, const Dims &, float) { return {logits}; }
Types LossBackwardType(DataType logits, DataType, DataType, DataType) { return {logits}; }

PD_BUILD_OP(native_loss)
    .Inputs({"Logits", "Labels"})
    .Outputs({"Loss", "Top1", "TopK", "OfSoftmax", "Pairs"})
    .Attrs({"smoothing: float", "k: int", "mean: bool"})
    .SetKernelFn(PD_KERNEL(Loss))
    .SetInferShapeFn(PD_INFER_SHAPE(LossShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(LossType));

PD_BUILD_OP(native_loss_backward)
    .Inputs({"Logits", "Labels", "OfSoftmax", "DLoss"})
    .Outputs({"DLogits"})
    .Attrs({"smoothing: float"})
    .SetKernelFn(PD_KERNEL(LossBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(LossBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(LossBackwardType));

PD_BUILD_OP(native_check_gradients)
    .Inputs({paddle::Vec("Gradients"), "Scale", "GoodSteps", "BadSteps"})
    .Outputs({"Unscale", "ScaleOut", "GoodStepsOut", "BadStepsOut"})
    .Attrs({"raise_after_steps: int", "lower_after_steps: int", "raise_by: float", "lower_by: float"})
    .SetInplaceMap({{"Scale", "ScaleOut"}, {"GoodSteps", "GoodStepsOut"}, {"BadSteps", "BadStepsOut"}})
    .SetKernelFn(PD_KERNEL(CheckGradients))
    .SetInferShapeFn(PD_INFER_SHAPE(CheckGradientsShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CheckGradientsType));

PD_BUILD_OP(native_momentum)
    .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), paddle::Vec("Velocities"), "Rate",
             paddle::Optional("Unscale")})
    .Outputs({paddle::Vec("ParametersOut"), paddle::Vec("VelocitiesOut")})
    .Attrs({"mu: float", "decays: std::vector<float>"})
    .SetInplaceMap({{paddle::Vec("Parameters"), paddle::Vec("ParametersOut")},
                    {paddle::Vec("Velocities"), paddle::Vec("VelocitiesOut")}})
    .SetKernelFn(PD_KERNEL(Momentum));

PD_BUILD_OP(native_momentum_masters)
    .Inputs({paddle::Vec("Parameters"), paddle::Vec("Gradients"), paddle::Vec("Velocities"), paddle::Vec("Masters"),
             "Rate", paddle::Optional("Unscale")})
    .Outputs({paddle::Vec("ParametersOut"), paddle::Vec("VelocitiesOut"), paddle::Vec("MastersOut")})
    .Attrs({"mu: float", "decays: std::vector<float>"})
    .SetInplaceMap({{paddle::Vec("Parameters"), paddle::Vec("ParametersOut")},
                    {paddle::Vec("Velocities"), paddle::Vec("VelocitiesOut")},
                    {paddle::Vec("Masters"), paddle::Vec("MastersOut")}})
    .SetKernelFn(PD_KERNEL(MomentumMasters));

PD_BUILD_OP(native_post)
    .Inputs({paddle::Vec("X")})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Post))
    .SetInferShapeFn(PD_INFER_SHAPE(PostShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(PostType));

PD_BUILD_OP(native_bn_act)
    .Inputs({"X", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Coefficients", "MeanOut", "VarianceOut"})
    .Attrs({"momentum: float", "epsilon: float", "relu: bool"})
    .SetInplaceMap({{"Mean", "MeanOut"}, {"Variance", "VarianceOut"}})
    .SetKernelFn(PD_KERNEL(BnAct))
    .SetInferShapeFn(PD_INFER_SHAPE(BnActShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnActType));

PD_BUILD_OP(native_bn_add_relu)
    .Inputs({"X", "Z", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Coefficients", "Mask", "MeanOut", "VarianceOut"})
    .Attrs({"momentum: float", "epsilon: float"})
    .SetInplaceMap({{"Mean", "MeanOut"}, {"Variance", "VarianceOut"}})
    .SetKernelFn(PD_KERNEL(BnAddRelu))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddReluShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddReluType));

PD_BUILD_OP(native_bn_act_backward)
    .Inputs({"X", "DY", "Coefficients", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DScale", "DBias"})
    .Attrs({"relu: bool"})
    .SetKernelFn(PD_KERNEL(BnActBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(BnActBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnActBackwardType));

PD_BUILD_OP(native_bn_add_relu_backward)
    .Inputs({"X", paddle::Vec("DY"), "Coefficients", "Mask", paddle::Optional(paddle::Vec("Into"))})
    .Outputs({"DX", "DZ", "DScale", "DBias"})
    .SetKernelFn(PD_KERNEL(BnAddReluBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(BnAddReluBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnAddReluBackwardType));

PD_BUILD_OP(native_bn_inference)
    .Inputs({"X", "Scale", "Bias", "Mean", "Variance", paddle::Optional("Z")})
    .Outputs({"Y"})
    .Attrs({"epsilon: float", "relu: bool"})
    .SetKernelFn(PD_KERNEL(BnInference))
    .SetInferShapeFn(PD_INFER_SHAPE(BnInferenceShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(BnInferenceType));

PD_BUILD_OP(native_max_pool)
    .Inputs({"X"})
    .Outputs({"Y", "Positions"})
    .Attrs({"kernel: int", "stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(MaxPool))
    .SetInferShapeFn(PD_INFER_SHAPE(MaxPoolShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(MaxPoolType));

PD_BUILD_OP(native_max_pool_backward)
    .Inputs({paddle::Vec("DY"), "Positions"})
    .Outputs({"DX"})
    .Attrs({"kernel: int", "stride: int", "padding: int", "height: int", "width: int"})
    .SetKernelFn(PD_KERNEL(MaxPoolBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(MaxPoolBackwardShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(MaxPoolBackwardType));
