// Products of float32 matrices for the CPU, as in filter gradients: the result is small, and the inner dimension is the
// number of pixels. A tile of the result, kTileRows x kTileColumns elements, stays in vector registers while products
// are added along the inner dimension. Each element is added up in the same order for any number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "functions.h"
#include "parallel.h"
#include "vectors.h"

namespace reference {

constexpr int64_t kInnerBlock = 128;  // steps for which a copied block of both matrices fits in the L2 cache
constexpr int64_t kRowBlock = 32 * kTileRows;

// Computes c [kRows, kTileColumns] = the product of the transpose of a [inner, kTileRows] and b [inner, kTileColumns].
// Rows of c begin `step` elements apart. If `adds` is true, the product is added to c.
template <int kRows>
void multiply_tile(int64_t inner, const float *__restrict a, const float *__restrict b, float *__restrict c,
                   int64_t step, bool adds) {
  using Vector = Vectors<8>::Type;
  Vector sums[kRows][2] = {};
  for (int64_t i = 0; i < inner; ++i, a += kTileRows, b += kTileColumns) {
    const Vector *values = reinterpret_cast<const Vector *>(b);
    const Vector left = values[0], right = values[1];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) sums[row][0] += a[row] * left, sums[row][1] += a[row] * right;
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    Vector *to = reinterpret_cast<Vector *>(c + row * step);
    for (int half = 0; half < 2; ++half) to[half] = adds ? to[half] + sums[row][half] : sums[row][half];
  }
}

// Like multiply_tile, for a number of rows from 1 to kRows that is known only at run time.
template <int kRows = kTileRows, class... Arguments>
void multiply_rows(int64_t rows, Arguments... arguments) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_rows<kRows - 1>(rows, arguments...);
  multiply_tile<kRows>(arguments...);
}

// Copies a matrix [rows, columns] to panels of kWidth columns, [columns / kWidth, rows, kWidth]. If the last panel is
// narrower, the values of its other columns are not set. Rows of the matrix begin `step` elements apart.
template <int kWidth>
void fill_panels(const float *matrix, int64_t step, int64_t rows, int64_t columns, float *panels) {
  constexpr int64_t kBlock = 8;  // rows; enough to write in sequence, and few enough to read in sequence
  for (int64_t first = 0; first < rows; first += kBlock)
    for (int64_t column = 0; column < columns; column += kWidth)
      for (int64_t row = first; row < std::min(rows, first + kBlock); ++row) {
        const float *from = matrix + row * step + column;
        float *to = panels + column * rows + row * kWidth;
        if (columns - column >= kWidth)
          std::memcpy(to, from, kWidth * sizeof(float));  // without a function call, because the size is constant
        else
          std::copy_n(from, columns - column, to);
      }
}

// Computes `count` products c [rows, columns] of the transposed matrices a [inner, rows] and the matrices b [inner,
// columns], which are stored in sequence. `columns` must be a multiple of kTileColumns. If `adds` is true, the products
// are added to c.
void multiply_transposed(int64_t count, int64_t rows, int64_t inner, int64_t columns, const float *a, const float *b,
                         float *c, bool adds) {
  const int threads = threads_for(count * inner * (rows + columns));
  // Threads that share a product compute different rows or columns of it, whichever are more, and copy the rest again.
  const int64_t parts = (threads + count - 1) / count;
  const bool divides_rows = rows > columns;
  const auto begin_of = [&](int64_t part, int64_t size, int64_t unit) {
    return std::min(size, (size + unit - 1) / unit * part / parts * unit);
  };
  in_parallel(threads, count * parts, [&](int, int64_t begin, int64_t end) {
    const Floats tiles = floats(kInnerBlock * (rows + kTileRows)), panels = floats(kInnerBlock * columns);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t product = i / parts, part = i % parts;
      const int64_t top = divides_rows ? begin_of(part, rows, kTileRows) : 0;
      const int64_t bottom = divides_rows ? begin_of(part + 1, rows, kTileRows) : rows;
      const int64_t left = divides_rows ? 0 : begin_of(part, columns, kTileColumns);
      const int64_t right = divides_rows ? columns : begin_of(part + 1, columns, kTileColumns);
      float *to = c + product * rows * columns;
      for (int64_t at = 0; at < inner; at += kInnerBlock) {
        const int64_t size = std::min(kInnerBlock, inner - at), first_step = product * inner + at;
        fill_panels<kTileRows>(a + first_step * rows + top, rows, size, bottom - top, tiles.get());
        fill_panels<kTileColumns>(b + first_step * columns + left, columns, size, right - left, panels.get());
        for (int64_t first = top; first < bottom; first += kRowBlock)
          for (int64_t column = left; column < right; column += kTileColumns)
            for (int64_t row = first; row < std::min(bottom, first + kRowBlock); row += kTileRows)
              multiply_rows(std::min<int64_t>(kTileRows, bottom - row), size, tiles.get() + (row - top) * size,
                            panels.get() + (column - left) * size, to + row * columns + column, columns,
                            adds || at > 0);
      }
    }
  });
}

}  // namespace reference
