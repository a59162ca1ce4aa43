"""Mixed precision (AMP): wrap the optimizer, and convert the evaluation program to the precision of training."""

import logging

import paddle
from paddle import static
from paddle.static.amp import fp16_utils

from paddle_resnet.machine import compat
from paddle_resnet.models import layers, loss_head


def _amp_lists(program, dtype, float32):
    """Return Paddle's AMP lists for `dtype`. The lists keep the following in float32: the loss head, the operators for
    which layers.is_float32 is true, and all operators whose outputs are listed in `float32`.

    The lists identify these operators by the names of their outputs, because level O2 ignores lists of operator types.
    """
    ops = [op for op in program.global_block().ops if loss_head.contains(op) or layers.is_float32(op)]
    names = {name for op in ops for name in op.output_arg_names} | float32
    return static.amp.AutoMixedPrecisionLists(custom_black_varnames=names, dtype=dtype)


def decorate(optimizer, dtype, level, loss_scale, is_dynamic, float32=frozenset()):
    """Wrap an optimizer so that the current program trains in mixed precision.

    Args:
        optimizer: one of Paddle's optimizers.
        dtype: "float16" or "bfloat16".
        level: "O1", or "O2" with float32 master weights.
        loss_scale: initial loss scale.
        is_dynamic: whether to adjust the loss scale during training.
        float32: names of variables to compute in float32.
    Returns:
        Paddle's mixed-precision optimizer, which contains `optimizer`.
    """
    compat.accept_legacy_any()
    return static.amp.decorate(
        optimizer,
        amp_lists=_amp_lists(static.default_main_program(), dtype, float32),
        level=level,
        dtype=dtype,
        init_loss_scaling=loss_scale,
        use_dynamic_loss_scaling=is_dynamic,
    )


def cast_evaluation_program(program, place, dtype, level, float32=frozenset(), for_gpu=False):
    """Convert an evaluation program in place to the precision of training. Call this function after the parameters have
    been initialized or loaded.

    Level O1 casts the inputs of each operator and leaves the parameters in float32. Level O2 casts the parameters in
    the scope, except parameters that were already cast for a training program. The variables named in `float32` remain
    float32. If `for_gpu` is True, the program will run on the GPU of a different machine, so all its operators are
    converted, even if this build of Paddle has no half-precision kernels.
    """
    dest_type, scope = getattr(paddle, dtype), static.global_scope()
    if for_gpu and not paddle.is_compiled_with_cuda():
        # Suppress Paddle's warnings about missing kernels.
        logging.getLogger("paddle.static.amp.fp16_lists").setLevel(logging.ERROR)
        lists = _amp_lists(program, dtype, float32)
        lists.unsupported_list = set()
    else:
        lists = _amp_lists(program, dtype, float32)
    names = fp16_utils.cast_model_to_fp16(program, lists, use_fp16_guard=False, dest_type=dest_type, level=level)
    if level == "O2":
        to_cast = {
            p.name
            for p in program.all_parameters()
            if p.name in names and scope.find_var(p.name).get_tensor()._dtype() == paddle.float32
        }
        fp16_utils.cast_parameters_to_fp16(place, program, scope, to_cast, dest_type)
