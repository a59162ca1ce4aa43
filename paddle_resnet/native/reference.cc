// The reference implementation of the operators: the float32 loops that run on the CPU. This file is compiled without
// Paddle's headers.

#include "reference/affine.h"
#include "reference/batch_norm.h"
#include "reference/concat.h"
#include "reference/conv.h"
#include "reference/depthwise_conv.h"
#include "reference/dropout.h"
#include "reference/filter_gradient.h"
#include "reference/functions.h"
#include "reference/loss.h"
#include "reference/pointwise_conv.h"
#include "reference/pool.h"
#include "reference/product.h"
#include "reference/squeeze_excitation.h"
#include "reference/stem.h"
#include "reference/update.h"
#include "reference/winograd.h"

namespace reference {

// Compile the function templates for all activations and optimizers.
#define COMPILE(A) \
  template void bn_apply(activation::A, const float *, const float *, int, int, const float *, const float *, float *, \
                         uint8_t *); \
  template void bn_infer(activation::A, const float *, const float *, int, int, const float *, const float *, \
                         const float *, const float *, float, float *); \
  template void bn_gradient(activation::A, const float *, const float *, const float *, const uint8_t *, \
                            const float *, int, int, const float *, float *, float *, float *, float *);
COMPILE(linear)
FOR_EACH_ACTIVATION(COMPILE)
#undef COMPILE

#define COMPILE(RULE) \
  template void update_in_parallel(const float *, int64_t, float, float, const optimizer::RULE &, float, \
                                   float *const (&)[optimizer::RULE::kStates], float *, float *);
FOR_EACH_OPTIMIZER(COMPILE)
#undef COMPILE

}  // namespace reference
