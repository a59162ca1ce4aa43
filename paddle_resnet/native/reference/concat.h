// Reference implementation of concatenating and splitting rows of bytes, for the CPU.

#pragma once

#include <cstdint>
#include <cstring>

namespace reference {

// Copies x [rows, first] and y [rows, second] to out [rows, first + second].
void concat(const char *x, const char *y, int64_t rows, int64_t first, int64_t second, char *out) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * (first + second), x + row * first, first);
    std::memcpy(out + row * (first + second) + first, y + row * second, second);
  }
}

// Copies in [rows, first + second] to x [rows, first] and y [rows, second].
void split(const char *in, int64_t rows, int64_t first, int64_t second, char *x, char *y) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(x + row * first, in + row * (first + second), first);
    std::memcpy(y + row * second, in + row * (first + second) + first, second);
  }
}

}  // namespace reference
