// Vectors of channels for the CPU, which the compiler maps to the vector registers of the machine.

#pragma once

#include <type_traits>

namespace reference {

template <int kLanes>
struct Vectors {
  typedef float Type __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));
};

// Calls run(lanes, first channel), where `lanes` is an integral constant, for vectors that cover all channels.
template <class Run>
void for_each_vector(int channels, const Run &run) {
  int channel = 0;
#ifdef __AVX512F__
  for (; channel + 16 <= channels; channel += 16) run(std::integral_constant<int, 16>(), channel);
#endif
  for (; channel + 8 <= channels; channel += 8) run(std::integral_constant<int, 8>(), channel);
  for (; channel < channels; channel += 4) run(std::integral_constant<int, 4>(), channel);
}

}  // namespace reference
