// Operators for the convolution of float32 images [N, H, W, C] on the CPU and its gradients, most of which oneDNN
// computes. Paddle's conv2d either transposes images to NCHW and back or, with oneDNN, computes wrong filter gradients
// in NHWC. Paddle's wheels contain oneDNN's library, but not its headers, so this file declares the functions of its C
// interface (version 3) that it uses.

#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "reference/functions.h"
#include "tensors.h"

namespace {

class OneDnn {
 public:
  using Geometry = reference::Geometry;
  enum Direction { kForward, kInputGradient, kFilterGradient };

  static OneDnn &get() {
    static OneDnn library;
    return library;
  }

  static bool is_loaded() { return handle() != nullptr; }

  // 16 matrix products c [rows, columns] = a [rows, inner] b [inner, columns]. If `transposes_a` is true, the memory
  // contains the transposed matrices a. If `accumulates` is true, the products are added to c.
  struct Product {
    int64_t rows, inner, columns;
    bool transposes_a, accumulates;
    bool operator<(const Product &p) const {
      return std::tie(rows, inner, columns, transposes_a, accumulates) <
             std::tie(p.rows, p.inner, p.columns, p.transposes_a, p.accumulates);
    }
  };
  static constexpr int kProducts = 16;

  void multiply(const Product &product, float *a, float *b, float *c) {
    auto &plan = products_[product];
    if (plan == nullptr) plan = std::make_unique<Plan>(make_plan(product));
    set(plan->x, a), set(plan->filter, b), set(plan->y, c);
    execute(plan->convolution, plan->arguments);
    call("dnnl_stream_wait", stream_);
  }

  // Computes one of `x`, `filter` and `y` from the other two: the output y, or the gradient of x or of the filter from
  // the gradient of y.
  void run(Direction direction, const Geometry &geometry, float *x, float *filter, float *y) {
    auto &plan = plans_[{geometry, direction}];
    if (plan == nullptr) plan = std::make_unique<Plan>(make_plan(direction, geometry));
    set(plan->x, x), set(plan->filter, filter), set(plan->y, y);
    if (plan->to_blocked) execute(plan->to_blocked, {{kFrom, plan->filter}, {kTo, plan->blocked}});
    execute(plan->convolution, plan->arguments);
    if (plan->from_blocked) execute(plan->from_blocked, {{kFrom, plan->blocked}, {kTo, plan->filter}});
    call("dnnl_stream_wait", stream_);
  }

 private:
  // These are values of enumerations and DNNL_ARG_ macros in the headers of oneDNN.
  static constexpr int kCpu = 1, kFloat = 3, kDirect = 1, kTraining = 64, kAny = 1;
  static constexpr int kX = 129, kXGradient = 130, kFilter = 131, kFilterGradientOf = 132, kY = 133, kYGradient = 134;
  static constexpr int kFrom = 1, kTo = 17;

  struct Argument {  // dnnl_exec_arg_t
    int name;
    void *memory;
  };
  struct Plan {
    void *convolution, *x, *filter, *y;
    // The filter in the layout that oneDNN has chosen, and the conversions before or after the convolution, or null.
    void *blocked = nullptr, *to_blocked = nullptr, *from_blocked = nullptr;
    std::vector<Argument> arguments;
  };

  OneDnn() {
    call("dnnl_engine_create", &engine_, kCpu, size_t{0});
    call("dnnl_stream_create", &stream_, engine_, 1u);
  }

  Plan make_plan(Direction direction, const Geometry &g) {
    const auto images = [&](const std::array<int64_t, 4> &s) {
      return described(s.data(), 4, {s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]});
    };
    const auto &[outputs, depth, height, width] = g.filter;
    const int64_t taps = height * width;
    const std::array<int64_t, 5> grouped = {g.groups, outputs / g.groups, depth, height, width};
    const int axes = g.groups > 1 ? 5 : 4;
    const int64_t *shape = grouped.data() + 5 - axes;
    std::vector<int64_t> steps = {depth * taps, taps, width, 1};
    if (axes == 5) steps.insert(steps.begin(), outputs / g.groups * depth * taps);
    void *x = images(g.x), *y = images(g.y), *filter = described(shape, axes, steps), *any = nullptr;
    std::array<int64_t, 12> sizes = {};
    std::copy(shape, shape + axes, sizes.begin());
    call("dnnl_memory_desc_create_with_tag", &any, axes, sizes.data(), kFloat, kAny);
    std::array<int64_t, 2> dilations = {g.dilations[0] - 1, g.dilations[1] - 1};

    void *nothing = nullptr, *forward = nullptr, *chosen = nullptr;
    call("dnnl_convolution_forward_primitive_desc_create", &forward, engine_, kTraining, kDirect, x, any, nothing, y,
         g.strides.data(), dilations.data(), g.before.data(), g.after.data(), nothing);
    chosen = forward;
    if (direction == kInputGradient)
      call("dnnl_convolution_backward_data_primitive_desc_create", &chosen, engine_, kDirect, x, any, y,
           g.strides.data(), dilations.data(), g.before.data(), g.after.data(), forward, nothing);
    if (direction == kFilterGradient)
      call("dnnl_convolution_backward_weights_primitive_desc_create", &chosen, engine_, kDirect, x, any, nothing, y,
           g.strides.data(), dilations.data(), g.before.data(), g.after.data(), forward, nothing);
    Plan plan;
    call("dnnl_primitive_create", &plan.convolution, chosen);
    plan.x = memory(x, nullptr), plan.y = memory(y, nullptr);
    void *used = add_filter(plan, chosen, filter, direction == kFilterGradient);
    if (direction == kForward) plan.arguments = {{1, plan.x}, {33, used}, {17, plan.y}};
    if (direction == kInputGradient) plan.arguments = {{129, plan.x}, {33, used}, {145, plan.y}};
    if (direction == kFilterGradient) plan.arguments = {{1, plan.x}, {161, used}, {145, plan.y}};
    return plan;
  }

  Plan make_plan(const Product &p) {
    const auto matrices = [&](int64_t rows, int64_t columns, bool is_transposed) {
      const int64_t shape[] = {kProducts, rows, columns};
      return described(shape, 3, {rows * columns, is_transposed ? 1 : columns, is_transposed ? rows : 1});
    };
    void *a = matrices(p.rows, p.inner, p.transposes_a), *b = matrices(p.inner, p.columns, false);
    void *c = matrices(p.rows, p.columns, false), *nothing = nullptr, *attributes = nullptr, *chosen = nullptr;
    if (p.accumulates) {
      void *operations = nullptr;
      call("dnnl_primitive_attr_create", &attributes);
      call("dnnl_post_ops_create", &operations);
      call("dnnl_post_ops_append_sum", operations, 1.f, int32_t{0}, kFloat);
      call("dnnl_primitive_attr_set_post_ops", attributes, operations);
    }
    call("dnnl_matmul_primitive_desc_create", &chosen, engine_, a, b, nothing, c, attributes);
    Plan plan;
    call("dnnl_primitive_create", &plan.convolution, chosen);
    plan.x = memory(a, nullptr), plan.filter = memory(b, nullptr), plan.y = memory(c, nullptr);
    plan.arguments = {{1, plan.x}, {33, plan.filter}, {17, plan.y}};
    return plan;
  }

  // Adds to a plan the memory of the filter, whose layout is `filter`, and, if oneDNN has chosen a different layout,
  // memory with this layout and the conversion. Returns the memory that the primitive uses.
  void *add_filter(Plan &plan, void *chosen, void *filter, bool is_output) {
    plan.filter = memory(filter, nullptr);
    void *layout = function<void *(*)(void *, int, int)>("dnnl_primitive_desc_query_md")(
        chosen, is_output ? kFilterGradientOf : kFilter, 0);
    if (function<int (*)(void *, void *)>("dnnl_memory_desc_equal")(layout, filter)) return plan.filter;
    const size_t bytes = function<size_t (*)(void *)>("dnnl_memory_desc_get_size")(layout);
    buffers_.emplace_back(new std::vector<char>(bytes + 64));
    const uintptr_t start = reinterpret_cast<uintptr_t>(buffers_.back()->data());
    plan.blocked = memory(layout, reinterpret_cast<void *>((start + 63) / 64 * 64));
    (is_output ? plan.from_blocked : plan.to_blocked) = is_output ? reorder(layout, filter) : reorder(filter, layout);
    return plan.blocked;
  }

  void *described(const int64_t *shape, int axes, const std::vector<int64_t> &steps) {
    void *layout = nullptr;
    std::array<int64_t, 12> sizes = {}, strides = {};  // dnnl_dims_t
    std::copy(shape, shape + axes, sizes.begin());
    std::copy(steps.begin(), steps.end(), strides.begin());
    call("dnnl_memory_desc_create_with_strides", &layout, axes, sizes.data(), kFloat, strides.data());
    return layout;
  }

  void *memory(void *layout, void *data) {
    void *result = nullptr;
    call("dnnl_memory_create", &result, layout, engine_, data);
    return result;
  }

  void *reorder(void *from, void *to) {
    void *description = nullptr, *nothing = nullptr, *result = nullptr;
    call("dnnl_reorder_primitive_desc_create", &description, from, engine_, to, engine_, nothing);
    call("dnnl_primitive_create", &result, description);
    return result;
  }

  void set(void *memory, float *data) { call("dnnl_memory_set_data_handle", memory, static_cast<void *>(data)); }

  void execute(void *primitive, const std::vector<Argument> &arguments) {
    call("dnnl_primitive_execute", primitive, stream_, static_cast<int>(arguments.size()), arguments.data());
  }

  // Calls a function of oneDNN. The types of the arguments must be those of dnnl.h: enumerations are int, and objects
  // are void *.
  template <class... Arguments>
  static void call(const char *name, Arguments... arguments) {
    const int status = function<int (*)(Arguments...)>(name)(arguments...);
    if (status != 0) PD_THROW(name, ": oneDNN's status is ", status, "; use --kernels paddle");
  }

  template <class Function>
  static Function function(const char *name) {
    void *symbol = handle() ? dlsym(handle(), name) : nullptr;
    if (symbol == nullptr) PD_THROW("oneDNN: Paddle has not loaded a library with ", name, "; use --kernels paddle");
    return reinterpret_cast<Function>(symbol);
  }

  static void *handle() {
    static void *library = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_NOLOAD);
    return library;
  }

  void *engine_ = nullptr, *stream_ = nullptr;
  std::map<std::pair<Geometry, Direction>, std::unique_ptr<Plan>> plans_;
  std::map<Product, std::unique_ptr<Plan>> products_;
  std::vector<std::unique_ptr<std::vector<char>>> buffers_;
};

OneDnn::Geometry geometry_of(const std::vector<int64_t> &x, const std::vector<int64_t> &filter,
                             const std::vector<int> &strides, const std::vector<int> &paddings,
                             const std::vector<int> &dilations, int groups) {
  if (x.size() != 4 || filter.size() != 4 || strides.size() != 2 || paddings.size() != 4 || dilations.size() != 2)
    PD_THROW("custom convolution: requires images and a filter with 4 dimensions, and values for height and width");
  if (groups < 1 || filter[1] * groups != x[3] || filter[0] % groups != 0)
    PD_THROW("custom convolution: requires a filter [outputs, C / groups, height, width]");
  OneDnn::Geometry g;
  g.x = {x[0], x[3], x[1], x[2]};
  std::copy(filter.begin(), filter.end(), g.filter.begin());
  g.groups = groups;
  int64_t out[2];
  for (int i = 0; i < 2; ++i) {
    g.strides[i] = strides[i], g.dilations[i] = dilations[i];
    g.before[i] = paddings[2 * i], g.after[i] = paddings[2 * i + 1];
    const int64_t padded = x[1 + i] + g.before[i] + g.after[i], extent = g.dilations[i] * (filter[2 + i] - 1) + 1;
    if (x[1 + i] > 0 && padded < extent) PD_THROW("custom convolution: the filter is larger than the padded images");
    out[i] = x[1 + i] > 0 ? (padded - extent) / g.strides[i] + 1 : -1;  // -1: not known yet
  }
  g.y = {x[0], filter[0], out[0], out[1]};
  return g;
}

// Filter gradients as products of matrices. With AVX2, oneDNN computes filter gradients in NHWC more slowly than other
// convolutions (of ResNet50: 20 to 60 instead of 60 to 90 GFLOP/s). With AVX-512, oneDNN is faster than these products.

using reference::Floats;
using reference::floats;

#ifdef __AVX512F__
constexpr bool kUsesProducts = false;
#else
constexpr bool kUsesProducts = true;
#endif
// With fewer channels, copying the matrices takes longer than the product saves. In Winograd's algorithm, the limit is
// higher, because oneDNN's products are faster there.
constexpr int64_t kProductChannels = 128, kWinogradProductChannels = 256;

bool uses_products(const OneDnn::Geometry &g) {
  const int64_t channels = g.x[1];
  return kUsesProducts && g.groups == 1 && channels >= kProductChannels && channels % reference::kTileColumns == 0;
}

// Winograd's algorithm, for convolutions with stride 1 and padding 1.

// With fewer pixels per batch, transforming the filters takes longer than the saved multiplications (measured with 512
// channels: slower with 72 pixels, faster with 128).
constexpr int64_t kWinogradPixels = 100;

bool uses_winograd(const OneDnn::Geometry &g) {
  const std::array<int64_t, 2> ones = {1, 1};
  // In images with a height or width of 1, at least half of each tile would be unused.
  const bool is_large = g.x[2] > 1 && g.x[3] > 1 && g.x[0] * g.x[2] * g.x[3] >= kWinogradPixels;
  return is_large && g.groups == 1 && g.filter[2] == 3 && g.filter[3] == 3 && g.strides == ones &&
         g.dilations == ones && g.before == ones && g.after == ones && g.x[1] % 16 == 0 && g.y[1] % 16 == 0 &&
         g.x[1] >= 64 && g.y[1] >= 64;
}

constexpr int64_t kTilesPerProduct = 256;  // so that the transformed tiles of a product fit in the cache

reference::Tiles tiles_of(const std::array<int64_t, 4> &shape) {
  reference::Tiles tiles = {static_cast<int>(shape[0]),
                            static_cast<int>(shape[2]),
                            static_cast<int>(shape[3]),
                            static_cast<int>(shape[1]),
                            0,
                            0};
  const int64_t products = (tiles.total() + kTilesPerProduct - 1) / kTilesPerProduct;
  tiles.count = (tiles.total() + products - 1) / products;
  return tiles;
}

// Computes the output y from x or, if `is_gradient` is true, the gradient of x from that of y. `in` and `out` are the
// known and the computed images.
void winograd_conv(const OneDnn::Geometry &g, bool is_gradient, const float *in, const float *filter, float *out) {
  reference::Tiles from = tiles_of(is_gradient ? g.y : g.x), to = tiles_of(is_gradient ? g.x : g.y);
  const int64_t count = from.count;
  const Floats filters = floats(OneDnn::kProducts * g.x[1] * g.y[1]);
  const Floats inputs = floats(OneDnn::kProducts * count * from.channels);
  const Floats outputs = floats(OneDnn::kProducts * count * to.channels);
  reference::winograd_filter(filter, g.y[1], g.x[1], is_gradient, filters.get());
  const OneDnn::Product product = {count, from.channels, to.channels, false, false};
  for (; from.first < from.total(); from.first += count, to.first += count) {
    reference::winograd_input(from, in, inputs.get());
    OneDnn::get().multiply(product, inputs.get(), filters.get(), outputs.get());
    reference::winograd_output(to, outputs.get(), out);
  }
}

void winograd_filter_gradient(const OneDnn::Geometry &g, const float *x, const float *dy, float *dfilter) {
  reference::Tiles from = tiles_of(g.x), to = tiles_of(g.y);
  const int64_t count = from.count;
  const int64_t size = OneDnn::kProducts * g.x[1] * g.y[1];
  const Floats filters = floats(size);
  const Floats inputs = floats(OneDnn::kProducts * count * from.channels);
  const Floats outputs = floats(OneDnn::kProducts * count * to.channels);
  const OneDnn::Product product = {to.channels, count, from.channels, true, true};
  const bool uses_products = kUsesProducts && from.channels >= kWinogradProductChannels;
  if (!uses_products) std::fill_n(filters.get(), size, 0.f);
  for (; from.first < from.total(); from.first += count, to.first += count) {
    reference::winograd_input(from, x, inputs.get());
    reference::winograd_output_gradient(to, dy, outputs.get());
    if (uses_products)
      reference::multiply_transposed(OneDnn::kProducts, to.channels, count, from.channels, outputs.get(), inputs.get(),
                                     filters.get(), from.first > 0);
    else
      OneDnn::get().multiply(product, outputs.get(), inputs.get(), filters.get());
  }
  reference::winograd_filter_gradient(filters.get(), g.y[1], g.x[1], dfilter);
}

std::vector<int64_t> conv2d_shape(const OneDnn::Geometry &g) { return {g.y[0], g.y[2], g.y[3], g.y[1]}; }

// Returns y [N, OH, OW, outputs]. `filter` is [outputs, C / groups, KH, KW]. `paddings` contains the rows above and
// below the image, and the columns to its left and to its right.
std::vector<Tensor> Conv2d(const Tensor &x, const Tensor &filter, const std::vector<int> &strides,
                           const std::vector<int> &paddings, const std::vector<int> &dilations, int groups) {
  require_float32(x), require_float32(filter);
  const auto geometry = geometry_of(x.shape(), filter.shape(), strides, paddings, dilations, groups);
  Tensor y = empty_floats(conv2d_shape(geometry), x);
  if (uses_winograd(geometry))
    winograd_conv(geometry, false, data<float>(x), data<float>(filter), data<float>(y));
  else
    OneDnn::get().run(OneDnn::kForward, geometry, data<float>(x), data<float>(filter), data<float>(y));
  return {y};
}

// Returns dx and dfilter; if `needs_dx` or `needs_dfilter` is false, the values of this gradient are not computed. If
// `into` is set, dfilter is written to the tensor in `into`, which is located in the buffer of a fused all-reduce.
std::vector<Tensor> Conv2dBackward(const Tensor &x, const Tensor &filter, const Tensor &dy,
                                   const paddle::optional<Tensors> &into, const std::vector<int> &strides,
                                   const std::vector<int> &paddings, const std::vector<int> &dilations, int groups,
                                   bool needs_dx, bool needs_dfilter) {
  for (const Tensor *tensor : {&x, &filter, &dy}) require_float32(*tensor);
  const auto geometry = geometry_of(x.shape(), filter.shape(), strides, paddings, dilations, groups);
  if (dy.shape() != conv2d_shape(geometry)) PD_THROW("custom convolution: requires a gradient with the output's shape");
  Tensor dx = empty_as(x), dfilter = into ? into->at(0) : empty_as(filter);
  if (into) require_like(filter, dfilter, "memory for the gradient of the filter");
  float *in = data<float>(x), *taps = data<float>(filter), *out = data<float>(dy);
  const bool is_winograd = uses_winograd(geometry);
  if (needs_dx && is_winograd) winograd_conv(geometry, true, out, taps, data<float>(dx));
  if (needs_dx && !is_winograd) OneDnn::get().run(OneDnn::kInputGradient, geometry, data<float>(dx), taps, out);
  if (needs_dfilter && is_winograd) winograd_filter_gradient(geometry, in, out, data<float>(dfilter));
  if (needs_dfilter && !is_winograd && uses_products(geometry))
    reference::filter_gradient(geometry, in, out, data<float>(dfilter));
  if (needs_dfilter && !is_winograd && !uses_products(geometry))
    OneDnn::get().run(OneDnn::kFilterGradient, geometry, in, data<float>(dfilter), out);
  return {dx, dfilter};
}

}  // namespace
