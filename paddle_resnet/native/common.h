// What the operators and the kernels have to agree on.

#pragma once

constexpr int kVectorBytes = 16;                           // what a thread reads and writes at once
constexpr int kMaxThreads = 512, kBlocksPerProcessor = 2;  // of BN
constexpr int kPoolThreads = 256;

// Of a pooling; `vectors` of channels.
struct Window {
  int height, width, out_height, out_width, kernel, stride, padding, vectors;
};
