// Reference implementation of the stem of ResNets in inference: a float32 loop for the CPU.

#pragma once

#include <cstdint>
#include <vector>

#include "batch_norm.h"
#include "conv.h"
#include "pool.h"

namespace reference {

// Computes y [batch, out_height, out_width, 64] from images x [batch, height, width, 3] and the first three of
// `channels` channels of filter [64, channels, 7, 7].
void stem(const float *x, const float *filter, int batch, int channels, const StemSize &size, const float *scale,
          const float *bias, const float *mean, const float *variance, float epsilon, float *y) {
  std::vector<float> transposed;  // [64, 7, 7, 3]
  for (int i = 0; i < kStemFilters * 49 * 3; ++i)
    transposed.push_back(filter[(i / (49 * 3) * channels + i % 3) * 49 + i / 3 % 49]);
  const int height = (size.height + 1) / 2, width = (size.width + 1) / 2;
  const Convolution c = {batch,           3,      kStemFilters, 1,      {size.height, size.width},
                         {height, width}, {7, 7}, {2, 2},       {3, 3}, {1, 1}};
  const int rows = batch * height * width;
  std::vector<float> features(static_cast<int64_t>(rows) * kStemFilters);
  convolve(x, transposed.data(), c, features.data());
  bn_infer(activation::relu(), features.data(), nullptr, rows, kStemFilters, scale, bias, mean, variance, epsilon,
           features.data());
  const Window window = {height, width, size.out_height, size.out_width, 3, 2, 1, 0};
  std::vector<uint8_t> positions(static_cast<int64_t>(batch) * size.out_height * size.out_width * kStemFilters);
  max_pool(features.data(), batch, kStemFilters, window, y, positions.data());
}

}  // namespace reference
