// Operators that concatenate two tensors along the channels, and that split a tensor, which computes the gradient
// of a concatenation. The operators check arguments and allocate results, and then launch the kernels in concat.cu or,
// on the CPU, call the reference implementation.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu.h"
#include "pool.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// The number of vectors in a row of each part of a tensor. A vector has `bytes` bytes. The constructor throws unless
// each part has a multiple of 4 channels.
struct Parts {
  int first, second, bytes;
  unsigned count;  // number of vectors of the tensor
  Parts(const Tensor &part, int64_t rows, int64_t first_channels, int64_t second_channels) {
    if (first_channels % 4 != 0 || second_channels % 4 != 0)
      PD_THROW("custom concatenation: requires multiples of 4 channels");
    const int64_t element = static_cast<int64_t>(phi::SizeOf(part.dtype()));
    suffix(part);  // checks the data type
    bytes = (first_channels * element) % 16 == 0 && (second_channels * element) % 16 == 0 ? 16 : 8;
    first = static_cast<int>(first_channels * element / bytes);
    second = static_cast<int>(second_channels * element / bytes);
    const int64_t vectors = rows * (first + second);
    if (vectors > INT32_MAX) PD_THROW("custom concatenation: requires fewer than 2^31 vectors");
    count = static_cast<unsigned>(vectors);
  }
  std::vector<unsigned> grid() const { return pool_grid((count + kCopies - 1) / kCopies); }
};

// Returns the concatenation of x and y along the last axis.
std::vector<Tensor> Concat(const Tensor &x, const Tensor &y) {
  auto shape = x.shape();
  const int64_t first = shape.back(), second = y.shape().back(), rows = x.numel() / first;
  if (y.dtype() != x.dtype() || y.numel() != rows * second)
    PD_THROW("custom concatenation: the tensors differ in type or number of rows");
  Parts parts(x, rows, first, second);
  shape.back() = first + second;
  Tensor out = paddle::empty(shape, x.dtype(), x.place());
  void *from = raw(x), *from_second = raw(y), *to = raw(out);
  if (x.is_gpu()) {
    Gpu::get().launch("concat_" + std::to_string(parts.bytes), x, parts.grid(), kPoolBlock,
                      {&from, &from_second, &parts.count, &parts.first, &parts.second, &to});
  } else {
    reference::concat(static_cast<char *>(from), static_cast<char *>(from_second), rows, parts.first * parts.bytes,
                      parts.second * parts.bytes, static_cast<char *>(to));
  }
  return {out};
}

// Returns the first `channels` channels of a tensor, and the other channels.
std::vector<Tensor> Split(const Tensor &in, int channels) {
  auto shape = in.shape();
  const int64_t all = shape.back(), rows = in.numel() / all;
  if (channels <= 0 || channels >= all)
    PD_THROW("custom concatenation: the first part must have 1 to ", all - 1, " channels");
  Parts parts(in, rows, channels, all - channels);
  shape.back() = channels;
  Tensor x = paddle::empty(shape, in.dtype(), in.place());
  shape.back() = all - channels;
  Tensor y = paddle::empty(shape, in.dtype(), in.place());
  void *from = raw(in), *to = raw(x), *to_second = raw(y);
  if (in.is_gpu()) {
    Gpu::get().launch("split_" + std::to_string(parts.bytes), in, parts.grid(), kPoolBlock,
                      {&from, &parts.count, &parts.first, &parts.second, &to, &to_second});
  } else {
    reference::split(static_cast<char *>(from), rows, parts.first * parts.bytes, parts.second * parts.bytes,
                     static_cast<char *>(to), static_cast<char *>(to_second));
  }
  return {x, y};
}

}  // namespace
