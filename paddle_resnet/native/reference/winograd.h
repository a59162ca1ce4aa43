// Winograd's algorithm F(2x2, 3x3) for convolutions of images [N, H, W, C] with 3x3 filters, stride 1 and padding 1
// (Lavin and Gray, arXiv:1509.09308): a tile of 2x2 output pixels needs 16 instead of 36 multiplications per pair of
// channels. These functions transform tiles and filters; 16 matrix products between the transforms compute the rest.
// Transformed tiles are [16, tiles, channels], and transformed filters [16, outputs, channels] or, in the forward pass,
// [16, channels, outputs].

#pragma once

#include <algorithm>
#include <cstdint>

#include "functions.h"
#include "parallel.h"
#include "vectors.h"

namespace reference {

// Computes B^T d B of the 4x4 pixels around each tile.
void winograd_input(const Tiles &tiles, const float *x, float *out) {
  const int64_t plane = tiles.count * tiles.channels;
  tiles.for_each([&](auto lanes, int channel, int64_t i, int image, int row, int column) {
    using Vector = typename Vectors<decltype(lanes)::value>::Type;
    Vector d[4][4];
    const auto transform = [](Vector &a, Vector &b, Vector &c, Vector &d) {
      const Vector second = b + c, third = c - b, fourth = b - d;
      a = a - c, b = second, c = third, d = fourth;
    };
    const float *from = x + tiles.at(std::max(image, 0), row, column) + channel;
    const auto load = [&](int r, int c) {
      const int64_t at = (static_cast<int64_t>(r - 1) * tiles.width + c - 1) * tiles.channels;
      return *reinterpret_cast<const Vector *>(from + at);
    };
    const int top = std::max(0, 1 - row), bottom = image < 0 ? 0 : std::min(4, tiles.height + 1 - row);
    const int left = std::max(0, 1 - column), right = std::min(4, tiles.width + 1 - column);
    if (top == 0 && left == 0 && bottom == 4 && right == 4) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) d[r][c] = load(r, c);
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) d[r][c] = top <= r && r < bottom && left <= c && c < right ? load(r, c) : Vector{};
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) transform(d[0][c], d[1][c], d[2][c], d[3][c]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) transform(d[r][0], d[r][1], d[r][2], d[r][3]);
    float *to = out + i * tiles.channels + channel;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) *reinterpret_cast<Vector *>(to + (r * 4 + c) * plane) = d[r][c];
  });
}

// Computes A^T m A for each tile, and writes the 2x2 pixels to y.
void winograd_output(const Tiles &tiles, const float *in, float *y) {
  const int64_t plane = tiles.count * tiles.channels;
  tiles.for_each([&](auto lanes, int channel, int64_t i, int image, int row, int column) {
    using Vector = typename Vectors<decltype(lanes)::value>::Type;
    if (image < 0) return;
    const float *from = in + i * tiles.channels + channel;
    Vector rows[2][4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const auto load = [&](int r) { return *reinterpret_cast<const Vector *>(from + (r * 4 + c) * plane); };
      const Vector first = load(0), second = load(1), third = load(2), fourth = load(3);
      rows[0][c] = first + second + third;
      rows[1][c] = second - third - fourth;
    }
    float *to = y + tiles.at(image, row, column) + channel;
    for (int r = 0; r < 2 && row + r < tiles.height; ++r) {
      float *line = to + static_cast<int64_t>(r) * tiles.width * tiles.channels;
      *reinterpret_cast<Vector *>(line) = rows[r][0] + rows[r][1] + rows[r][2];
      if (column + 1 < tiles.width)
        *reinterpret_cast<Vector *>(line + tiles.channels) = rows[r][1] - rows[r][2] - rows[r][3];
    }
  });
}

// Computes A g A^T of the 2x2 pixels of each tile of the gradient of the output.
void winograd_output_gradient(const Tiles &tiles, const float *dy, float *out) {
  const int64_t plane = tiles.count * tiles.channels;
  tiles.for_each([&](auto lanes, int channel, int64_t i, int image, int row, int column) {
    using Vector = typename Vectors<decltype(lanes)::value>::Type;
    Vector g[2][2] = {};
    if (image >= 0) {
      const float *from = dy + tiles.at(image, row, column) + channel;
      const int step = tiles.channels;
      for (int r = 0; r < 2 && row + r < tiles.height; ++r)
        for (int c = 0; c < 2 && column + c < tiles.width; ++c)
          g[r][c] = *reinterpret_cast<const Vector *>(from + (r * static_cast<int64_t>(tiles.width) + c) * step);
    }
    float *to = out + i * tiles.channels + channel;
    const Vector rows[4][2] = {{g[0][0], g[0][1]},
                               {g[0][0] + g[1][0], g[0][1] + g[1][1]},
                               {g[0][0] - g[1][0], g[0][1] - g[1][1]},
                               {-g[1][0], -g[1][1]}};
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Vector values[4] = {rows[r][0], rows[r][0] + rows[r][1], rows[r][0] - rows[r][1], -rows[r][1]};
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) *reinterpret_cast<Vector *>(to + (r * 4 + c) * plane) = values[c];
    }
  });
}

// Filters are transformed in explicit vectors, because compilers do not vectorize loops with memory accesses in steps
// of 9 values.
constexpr int kFilterLanes = 16;
using FilterVector = Vectors<kFilterLanes>::Type;

// Computes G g G^T of each filter in [outputs, channels, 3, 3]. The transformed filters are [16, channels, outputs] or,
// if `is_rotated` is true, [16, outputs, channels] of the filters rotated by 180 degrees, as for the gradient of the
// input. outputs and channels must be multiples of kFilterLanes.
void winograd_filter(const float *filter, int outputs, int channels, bool is_rotated, float *out) {
  const int64_t plane = static_cast<int64_t>(outputs) * channels;
  // A vector contains filters that are neighbors along the last axis of the transformed filters.
  const int output_step = is_rotated ? 1 : kFilterLanes, channel_step = is_rotated ? kFilterLanes : 1;
  const int64_t lane_step = is_rotated ? 9 : channels * 9;
  in_parallel(threads_for(plane * 9), outputs / kFilterLanes, [&](int, int64_t first, int64_t last) {
    for (int64_t output = first * kFilterLanes; output < last * kFilterLanes; output += output_step)
      for (int channel = 0; channel < channels; channel += channel_step) {
        FilterVector g[9], rows[4][3];
        const float *from = filter + (output * channels + channel) * 9;
#pragma GCC unroll 9
        for (int tap = 0; tap < 9; ++tap) {
          const int at = is_rotated ? 8 - tap : tap;
#pragma GCC unroll 16
          for (int lane = 0; lane < kFilterLanes; ++lane) g[tap][lane] = from[lane * lane_step + at];
        }
#pragma GCC unroll 3
        for (int c = 0; c < 3; ++c) {
          const FilterVector even = 0.5f * (g[c] + g[6 + c]), odd = 0.5f * g[3 + c];
          rows[0][c] = g[c], rows[1][c] = even + odd, rows[2][c] = even - odd, rows[3][c] = g[6 + c];
        }
        float *to = out + (is_rotated ? output * channels + channel : channel * static_cast<int64_t>(outputs) + output);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          const FilterVector even = 0.5f * (rows[r][0] + rows[r][2]), odd = 0.5f * rows[r][1];
          const FilterVector values[4] = {rows[r][0], even + odd, even - odd, rows[r][2]};
#pragma GCC unroll 4
          for (int c = 0; c < 4; ++c) *reinterpret_cast<FilterVector *>(to + (r * 4 + c) * plane) = values[c];
        }
      }
  });
}

// Computes G^T u G, the gradient of each filter in [outputs, channels, 3, 3].
void winograd_filter_gradient(const float *in, int outputs, int channels, float *dfilter) {
  const int64_t plane = static_cast<int64_t>(outputs) * channels;
  in_parallel(threads_for(plane * 9), plane / kFilterLanes, [&](int, int64_t first, int64_t last) {
    for (int64_t i = first * kFilterLanes; i < last * kFilterLanes; i += kFilterLanes) {
      const auto load = [&](int r, int c) {
        return *reinterpret_cast<const FilterVector *>(in + (r * 4 + c) * plane + i);
      };
      FilterVector rows[3][4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const FilterVector even = 0.5f * (load(1, c) + load(2, c));
        rows[0][c] = load(0, c) + even;
        rows[1][c] = 0.5f * (load(1, c) - load(2, c));
        rows[2][c] = even + load(3, c);
      }
      float *to = dfilter + i * 9;
#pragma GCC unroll 3
      for (int r = 0; r < 3; ++r) {
        const FilterVector even = 0.5f * (rows[r][1] + rows[r][2]);
        const FilterVector values[3] = {rows[r][0] + even, 0.5f * (rows[r][1] - rows[r][2]), even + rows[r][3]};
#pragma GCC unroll 3
        for (int c = 0; c < 3; ++c)
#pragma GCC unroll 16
          for (int lane = 0; lane < kFilterLanes; ++lane) to[lane * 9 + r * 3 + c] = values[c][lane];
      }
    }
  });
}

}  // namespace reference
