// The functions of the reference implementation that operators call, and the types of their arguments. The other headers
// in this folder describe and define these functions. Only reference.cc, which is compiled in parallel with operators.cc
// and with more optimization, includes those headers.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <tuple>

#include "../activations.h"
#include "../common.h"
#include "../optimizers.h"
#include "parallel.h"
#include "vectors.h"

namespace reference {

// Geometry of a convolution. Each pair of values belongs to (height, width).
struct Convolution {
  int batch, channels, outputs, groups;  // `channels` and `outputs` are the channels of all groups
  int size[2], out_size[2], kernel[2], stride[2], padding[2], dilation[2];
};

// Geometry of a convolution in onednn.h. Each pair of values belongs to (height, width).
struct Geometry {
  std::array<int64_t, 4> x, filter, y;  // shapes in the order N, C, H, W and outputs, C / groups, KH, KW
  std::array<int64_t, 2> strides, before, after, dilations;  // `before` and `after` are the padding
  int64_t groups;
  bool operator<(const Geometry &g) const {
    return std::tie(x, filter, strides, before, after, dilations, groups) <
           std::tie(g.x, g.filter, g.strides, g.before, g.after, g.dilations, g.groups);
  }
};

// A range of tiles of the images [batch, height, width, channels], in the order of images, rows and columns. Tiles
// after the last one are zeros.
struct Tiles {
  int batch, height, width, channels;
  int64_t first, count;

  int columns() const { return (width + 1) / 2; }
  int per_image() const { return (height + 1) / 2 * columns(); }
  int64_t total() const { return static_cast<int64_t>(batch) * per_image(); }

  // Calls run(lanes, channel, tile in the range, image, row, column) for each tile and each vector of channels, where
  // row and column are those of the first output pixel. The image is negative for tiles after the last one.
  template <class Run>
  void for_each(const Run &run) const {
    in_parallel(threads_for(count * 4 * channels), count, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = first + i;
        const int image = tile < total() ? tile / per_image() : -1, place = tile % per_image();
        const int row = place / columns() * 2, column = place % columns() * 2;
        for_each_vector(channels, [&](auto lanes, int channel) { run(lanes, channel, i, image, row, column); });
      }
    });
  }

  int64_t at(int64_t image, int row, int column) const { return ((image * height + row) * width + column) * channels; }
};

struct Free {
  void operator()(float *memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float[], Free>;

// Returns memory that starts at a cache line and whose values are not set.
inline Floats floats(int64_t size) {
  void *memory = nullptr;
  if (posix_memalign(&memory, 64, size * sizeof(float)) != 0) throw std::bad_alloc();
  return Floats(static_cast<float *>(memory));
}

constexpr int kTileRows = 6, kTileColumns = 16;  // a tile occupies 12 of the 16 registers of AVX2

// affine.h
void affine(const float *x, float scale, float bias, int64_t size, float *y);
void affine_gradient(const float *x, const float *dy, float scale, int64_t size, float *dx, float *dscale,
                     float *dbias);

// batch_norm.h
void bn_statistics(const float *x, int rows, int channels, const float *scale, const float *bias, float *running_mean,
                   float *running_variance, float momentum, float epsilon, float *coefficients);
template <class A>
void bn_apply(A, const float *x, const float *z, int rows, int channels, const float *a, const float *b, float *y,
              uint8_t *mask);
template <class A>
void bn_infer(A activation, const float *x, const float *z, int rows, int channels, const float *scale,
              const float *bias, const float *mean, const float *variance, float epsilon, float *y);
template <class A>
void bn_gradient(A, const float *x, const float *dy, const float *dy2, const uint8_t *mask, const float *z, int rows,
                 int channels, const float *coefficients, float *dz, float *dscale, float *dbias, float *dx);

// concat.h
void concat(const char *x, const char *y, int64_t rows, int64_t first, int64_t second, char *out);
void split(const char *in, int64_t rows, int64_t first, int64_t second, char *x, char *y);

// conv.h
void conv(const float *x, const float *filter, const Convolution &c, float *y);

// depthwise_conv.h
void depthwise_conv(const float *x, const float *filter, int batch, int channels, const Window &window, float *y);
void depthwise_conv_input_gradient(const float *filter, const float *dy, int batch, int channels, const Window &window,
                                   float *dx);
void depthwise_conv_filter_gradient(const float *x, const float *dy, int batch, int channels, const Window &window,
                                    float *dfilter);

// dropout.h
void dropout(const float *x, int size, const Dropout &rule, int seed, float *y);

// filter_gradient.h
void filter_gradient(const Geometry &g, const float *x, const float *dy, float *dfilter);

// loss.h
void loss(const float *logits, const int64_t *labels, const float *weights, const float *image_weights, int rows,
          int classes, float smoothing, int k, float *losses, float *of_softmax, int64_t *pairs, float *loss,
          float *top1, float *topk);
void loss_gradient(const float *logits, const int64_t *labels, const float *weights, const float *image_weights,
                   const float *of_softmax, float dloss, int rows, int classes, float smoothing, float *dlogits);

// pointwise_conv.h
void pointwise_conv(const float *x, const float *filter, int rows, int in, int out, float *y);
void pointwise_filter_gradient(const float *x, const float *dy, int rows, int in, int out, float *dfilter);

// pool.h
void max_pool(const float *x, int batch, int channels, const Window &window, float *y, uint8_t *positions);
void max_pool_gradient(const float *dy, const float *dy2, const uint8_t *positions, int batch, int channels,
                       const Window &window, float *dx);
void average_pool(const float *x, int batch, int channels, const Window &window, bool excludes_padding, float *y);
void average_pool_gradient(const float *dy, const float *dy2, int batch, int channels, const Window &window,
                           bool excludes_padding, float *dx);

// product.h
void multiply_transposed(int64_t count, int64_t rows, int64_t inner, int64_t columns, const float *a, const float *b,
                         float *c, bool adds);

// squeeze_excitation.h
void image_sums(const float *x, const float *y, int images, int pixels, int channels, float factor, float *out);
void scale_images(const float *x, const float *factors, const float *offsets, int images, int pixels, int channels,
                  float *y);
void sigmoid(const float *x, int64_t size, float *y);
void sigmoid_gradient(const float *y, const float *dy, int64_t size, float *dx);

// stem.h
void stem(const float *x, const float *filter, int batch, int channels, const StemSize &size, const float *scale,
          const float *bias, const float *mean, const float *variance, float epsilon, float *y);

// update.h
bool is_finite(const float *values, int64_t size);
double sum_squares(const float *values, int64_t size, float unscale);
template <class Rule>
void update_in_parallel(const float *gradient, int64_t size, float rate, float unscale, const Rule &rule, float decay,
                        float *const (&state)[Rule::kStates], float *parameter, float *master);
void follow_average(const float *value, int64_t size, float weight, float *average);

// winograd.h
void winograd_input(const Tiles &tiles, const float *x, float *out);
void winograd_output(const Tiles &tiles, const float *in, float *y);
void winograd_output_gradient(const Tiles &tiles, const float *dy, float *out);
void winograd_filter(const float *filter, int outputs, int channels, bool is_rotated, float *out);
void winograd_filter_gradient(const float *in, int outputs, int channels, float *dfilter);

}  // namespace reference
