// Operator for the stem of ResNets in inference. The operator checks arguments and allocates the result, and then
// launches the kernel in stem.cu or, on the CPU, calls the reference implementation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the number of pooled rows or columns. Convolution and pooling each divide the size by 2 and round up.
constexpr int64_t stem_positions(int64_t size) { return ((size + 1) / 2 + 1) / 2; }

// Returns the number of pooled rows per block that minimizes the steps of each multiprocessor, for `images` times
// `tiles` columns of blocks. The start of a block takes about as long as a step.
int stem_strip(int64_t images, int tiles, int out_height) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int strip = 1; strip <= out_height; ++strip) {
    const int64_t blocks = images * tiles * ((out_height - 1) / strip + 1);
    const int64_t steps = ((blocks - 1) / Gpu::get().blocks() + 1) * (strip / 2 + 2);
    if (steps < least) least = steps, best = strip;
  }
  return best;
}

// Returns y = MaxPool(ReLU(BN(x * filter))) [N, H / 4, W / 4, 64], rounded up, computed with the running statistics.
// The convolution has 7x7 filters, stride 2 and padding 3; the pooling has 3x3 windows, stride 2 and padding 1. `x` is
// [N, H, W, 3]. `filter` is [64, C, 7, 7], of which the first three input channels are used. On a GPU, the kernel
// rounds the products of the filters and BN's scale to the type of the images, and float32 factors to TF32.
std::vector<Tensor> StemInference(const Tensor &x, const Tensor &filter, const Tensor &scale, const Tensor &bias,
                                  const Tensor &mean, const Tensor &variance, float epsilon) {
  const auto in = x.shape(), taps = filter.shape();
  if (in.size() != 4 || in[3] != 3) PD_THROW("custom stem: requires images [N, H, W, 3]");
  if (filter.dtype() != x.dtype() || taps.size() != 4 || taps[1] < 3 ||
      taps != std::vector<int64_t>{kStemFilters, taps[1], 7, 7})
    PD_THROW("custom stem: requires a filter [64, C, 7, 7] of the images' type");
  for (const Tensor *parameter : {&scale, &bias, &mean, &variance}) {
    if (parameter->numel() != kStemFilters) PD_THROW("custom stem: BN requires 64 values");
  }
  StemSize size = {static_cast<int>(in[1]), static_cast<int>(in[2]), static_cast<int>(stem_positions(in[1])),
                   static_cast<int>(stem_positions(in[2])), 0};
  int channels = static_cast<int>(taps[1]);
  if (int64_t{16} * size.out_height * size.out_width > INT32_MAX / kStemFilters)
    PD_THROW("custom stem: requires smaller images");
  Tensor y = paddle::empty({in[0], size.out_height, size.out_width, kStemFilters}, x.dtype(), x.place());
  if (x.is_gpu()) {
    const int all_groups = (size.out_width - 1) / kStemColumns + 1, tiles = (all_groups - 1) / kStemGroups + 1;
    const int groups = (all_groups - 1) / tiles + 1;
    size.strip = stem_strip(in[0], tiles, size.out_height);
    const int strips = (size.out_height - 1) / size.strip + 1;
    FixedBn bn = {data<float>(scale), data<float>(bias), data<float>(mean), data<float>(variance), epsilon, 0};
    void *from = raw(x), *weights = raw(filter), *to = raw(y);
    Gpu::get().launch("stem" + suffix(x), x, {static_cast<unsigned>(in[0]), static_cast<unsigned>(tiles * strips)},
                      {static_cast<unsigned>(64 * groups), 1}, {&from, &weights, &channels, &size, &bn, &to},
                      4 * stem_words(4 / static_cast<int>(phi::SizeOf(x.dtype()))));
    return {y};
  }
  require_float32(x);
  reference::stem(data<float>(x), data<float>(filter), in[0], channels, size, data<float>(scale), data<float>(bias),
                  data<float>(mean), data<float>(variance), epsilon, data<float>(y));
  return {y};
}

}  // namespace
