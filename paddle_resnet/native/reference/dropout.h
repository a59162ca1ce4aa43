// Reference implementation of dropout: a float32 loop for the CPU.

#pragma once

#include "functions.h"

namespace reference {

void dropout(const float *x, int size, const Dropout &rule, int seed, float *y) {
  for (int i = 0; i < size; ++i) y[i] = rule.apply(x[i], seed, i);
}

}  // namespace reference
