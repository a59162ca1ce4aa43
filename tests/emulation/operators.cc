// This project's operators under different names. The operators treat CPU tensors as GPU tensors (see driver.cc).

#include "paddle/phi/api/all.h"

#define is_gpu is_dense_tensor

#undef PD_BUILD_OP
#define PD_BUILD_OP(NAME) \
  static paddle::OpMetaInfoBuilder emulated_##NAME = paddle::OpMetaInfoBuilder("emulated_" #NAME, 0)
#undef PD_BUILD_GRAD_OP
#define PD_BUILD_GRAD_OP(NAME) \
  static paddle::OpMetaInfoBuilder emulated_grad_##NAME = paddle::OpMetaInfoBuilder("emulated_" #NAME, 1)

#include "../../paddle_resnet/native/operators.cc"
