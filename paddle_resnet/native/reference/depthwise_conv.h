// Depthwise convolution of images [N, H, W, C] and its gradients on the CPU. The filter is [C, 1, kernel, kernel]. Each
// loop processes the channels of one vector along a row of pixels and keeps the taps of the filter in registers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common.h"
#include "parallel.h"
#include "vectors.h"

namespace reference {

// Calls run(kernel, stride) with integral constants.
template <class Run>
void with_geometry(const Window &window, const Run &run) {
  using std::integral_constant;
  if (window.kernel == 3)
    window.stride == 1 ? run(integral_constant<int, 3>(), integral_constant<int, 1>())
                       : run(integral_constant<int, 3>(), integral_constant<int, 2>());
  else
    window.stride == 1 ? run(integral_constant<int, 5>(), integral_constant<int, 1>())
                       : run(integral_constant<int, 5>(), integral_constant<int, 2>());
}

// Returns the filter [kernel * kernel, channels].
inline std::vector<float> taps_by_channel(const float *filter, int channels, int taps) {
  std::vector<float> result(taps * channels);
  for (int channel = 0; channel < channels; ++channel)
    for (int tap = 0; tap < taps; ++tap) result[tap * channels + channel] = filter[channel * taps + tap];
  return result;
}

// The output columns [first, last) whose windows are inside the image.
struct Interior {
  int first, last;
  explicit Interior(const Window &w)
      : first(std::min(w.out_width, (w.padding + w.stride - 1) / w.stride)),
        last(std::max(first, std::min(w.out_width, (w.width - w.kernel + w.padding) / w.stride + 1))) {
    if (w.width < w.kernel) last = first;
  }
};

// Computes y [batch, out_height, out_width, channels].
void depthwise_conv(const float *x, const float *filter, int batch, int channels, const Window &window, float *y) {
  const std::vector<float> all_taps = taps_by_channel(filter, channels, window.kernel * window.kernel);
  const int64_t rows = static_cast<int64_t>(batch) * window.out_height;
  const Interior interior(window);
  with_geometry(window, [&](auto kernel, auto stride) {
    constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
    in_parallel(threads_for(rows * window.out_width * channels), rows, [&](int, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int top = row % window.out_height * S - window.padding;
        const float *image = x + row / window.out_height * window.height * window.width * channels;
        const int first_tap = std::max(0, -top), last_tap = std::min(K, window.height - top);
        for_each_vector(channels, [&](auto lanes, int channel) {
          using Vector = typename Vectors<decltype(lanes)::value>::Type;
          const auto load = [](const float *from) { return *reinterpret_cast<const Vector *>(from); };
          Vector taps[K * K];
          for (int tap = 0; tap < K * K; ++tap) taps[tap] = load(&all_taps[tap * channels + channel]);
          float *out = y + row * window.out_width * channels + channel;
          const auto at_border = [&](int column) {
            const int left = column * S - window.padding;
            Vector sum = {};
            for (int i = first_tap; i < last_tap; ++i)
              for (int j = std::max(0, -left); j < std::min(K, window.width - left); ++j)
                sum += load(image + (static_cast<int64_t>(top + i) * window.width + left + j) * channels + channel) *
                       load(&all_taps[(i * K + j) * channels + channel]);
            *reinterpret_cast<Vector *>(out + static_cast<int64_t>(column) * channels) = sum;
          };
          for (int column = 0; column < interior.first; ++column) at_border(column);
          if (last_tap - first_tap < K) {
            for (int column = interior.first; column < interior.last; ++column) at_border(column);
          } else {
            const int64_t pixel = static_cast<int64_t>(top) * window.width + interior.first * S - window.padding;
            const float *in = image + pixel * channels + channel;
            for (int column = interior.first; column < interior.last; ++column, in += S * channels) {
              Vector sum = {};
#pragma GCC unroll 5
              for (int i = 0; i < K; ++i)
#pragma GCC unroll 5
                for (int j = 0; j < K; ++j)
                  sum += load(in + (static_cast<int64_t>(i) * window.width + j) * channels) * taps[i * K + j];
              *reinterpret_cast<Vector *>(out + static_cast<int64_t>(column) * channels) = sum;
            }
          }
          for (int column = interior.last; column < window.out_width; ++column) at_border(column);
        });
      }
    });
  });
}

// Computes dx, in the layout of x.
void depthwise_conv_input_gradient(const float *filter, const float *dy, int batch, int channels, const Window &window,
                                   float *dx) {
  const std::vector<float> all_taps = taps_by_channel(filter, channels, window.kernel * window.kernel);
  const int64_t rows = static_cast<int64_t>(batch) * window.height;
  with_geometry(window, [&](auto kernel, auto stride) {
    constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
    in_parallel(threads_for(rows * window.width * channels), rows, [&](int, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float *image = dy + row / window.height * window.out_height * window.out_width * channels;
        const int height = row % window.height + window.padding;  // row of the padded image
        float *out = dx + row * window.width * channels;
        for_each_vector(channels, [&](auto lanes, int channel) {
          using Vector = typename Vectors<decltype(lanes)::value>::Type;
          const auto load = [](const float *from) { return *reinterpret_cast<const Vector *>(from); };
          // The output pixels of filter row i are in the row (height - i) / S of dy, if this is an integer.
          const float *lines[K];
          const float *taps = &all_taps[channel];
          int count = 0, numbers[K];
          for (int i = height % S; i < K; i += S) {
            const int from = (height - i) / S;
            if (height < i || from >= window.out_height) continue;
            numbers[count] = i;
            lines[count++] = image + static_cast<int64_t>(from) * window.out_width * channels + channel;
          }
          for (int column = 0; column < window.width; ++column) {
            const int width = column + window.padding;
            Vector sum = {};
            const int low = std::max(width % S, width - (window.out_width - 1) * S), high = std::min(K - 1, width);
            for (int line = 0; line < count; ++line)
              for (int j = low; j <= high; j += S)
                sum += load(lines[line] + static_cast<int64_t>((width - j) / S) * channels) *
                       load(taps + (numbers[line] * K + j) * channels);
            *reinterpret_cast<Vector *>(out + static_cast<int64_t>(column) * channels + channel) = sum;
          }
        });
      }
    });
  });
}

// Computes dfilter, in the layout of the filter.
void depthwise_conv_filter_gradient(const float *x, const float *dy, int batch, int channels, const Window &window,
                                    float *dfilter) {
  const int squares = window.kernel * window.kernel;
  const int64_t rows = static_cast<int64_t>(batch) * window.out_height;
  const int threads = threads_for(rows * window.out_width * channels);
  const Interior interior(window);
  PartialSums partial(threads, static_cast<int64_t>(squares) * channels);
  with_geometry(window, [&](auto kernel, auto stride) {
    constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
    in_parallel(threads, rows, [&](int thread, int64_t begin, int64_t end) {
      double *total = partial.of(thread);
      for (int64_t row = begin; row < end; ++row) {
        const int top = row % window.out_height * S - window.padding;
        const float *image = x + row / window.out_height * window.height * window.width * channels;
        const int first_tap = std::max(0, -top), last_tap = std::min(K, window.height - top);
        for_each_vector(channels, [&](auto lanes, int channel) {
          constexpr int kLanes = decltype(lanes)::value;
          using Vector = typename Vectors<kLanes>::Type;
          const auto load = [](const float *from) { return *reinterpret_cast<const Vector *>(from); };
          const float *gradient = dy + row * window.out_width * channels + channel;
          for (int i = first_tap; i < last_tap; ++i) {
            Vector sums[K] = {};
            const float *line = image + static_cast<int64_t>(top + i) * window.width * channels + channel;
            const auto at_border = [&](int column) {
              const int left = column * S - window.padding;
              const Vector g = load(gradient + static_cast<int64_t>(column) * channels);
              for (int j = 0; j < K; ++j)
                if (left + j >= 0 && left + j < window.width)
                  sums[j] += g * load(line + static_cast<int64_t>(left + j) * channels);
            };
            for (int column = 0; column < interior.first; ++column) at_border(column);
            Vector inner[K] = {};
            for (int column = interior.first; column < interior.last; ++column) {
              const Vector g = load(gradient + static_cast<int64_t>(column) * channels);
              const float *in = line + static_cast<int64_t>(column * S - window.padding) * channels;
#pragma GCC unroll 5
              for (int j = 0; j < K; ++j) inner[j] += g * load(in + static_cast<int64_t>(j) * channels);
            }
            for (int column = interior.last; column < window.out_width; ++column) at_border(column);
            for (int j = 0; j < K; ++j)
              for (int lane = 0; lane < kLanes; ++lane)
                total[static_cast<int64_t>(i * K + j) * channels + channel + lane] += sums[j][lane] + inner[j][lane];
          }
        });
      }
    });
  });
  const double *sums = partial.total();
  for (int channel = 0; channel < channels; ++channel)
    for (int tap = 0; tap < squares; ++tap)
      dfilter[channel * squares + tap] = sums[static_cast<int64_t>(tap) * channels + channel];
}

}  // namespace reference
