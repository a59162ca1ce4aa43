"""Wrappers of an optimizer: mixed precision (AMP) and 2:4 sparsity (ASP)."""

import paddle
from paddle import static
from paddle.incubate import asp
from paddle.incubate.asp.asp import ASPHelper, MaskAlgo
from paddle.static.amp import fp16_utils

from paddle_resnet import compat
from paddle_resnet.models import loss_head


def _amp_lists(args, program):
    """Paddle's lists of what runs in --amp-dtype, with the loss head kept in float32.

    Level O2 ignores Paddle's black list of operators. It respects one exception, as every level does: operators that
    are named by their outputs.
    """
    head = [op for op in program.global_block().ops if loss_head.contains(op)]
    names = {name for op in head for name in op.output_arg_names}
    return static.amp.AutoMixedPrecisionLists(custom_black_varnames=names, dtype=args.amp_dtype)


def decorate_amp(args, optimizer):
    """Wrap an optimizer for mixed precision of the current program: level O1, or O2 with float32 master weights."""
    if not args.amp:
        return optimizer
    compat.accept_legacy_any()
    return static.amp.decorate(
        optimizer,
        amp_lists=_amp_lists(args, static.default_main_program()),
        level=args.amp_level,
        dtype=args.amp_dtype,
        init_loss_scaling=args.scale_loss,
        use_dynamic_loss_scaling=args.use_dynamic_loss_scaling,
    )


def cast_evaluation_program(args, program, place):
    """Rewrite an evaluation program in place to the precision of training. Call it once the parameters are in the
    scope.

    O1 casts the inputs of each operator and leaves the parameters in float32. O2 casts the parameters in the scope,
    except those that a training program has cast already.
    """
    if not args.amp:
        return
    dtype, scope = getattr(paddle, args.amp_dtype), static.global_scope()
    names = fp16_utils.cast_model_to_fp16(
        program, _amp_lists(args, program), use_fp16_guard=False, dest_type=dtype, level=args.amp_level
    )
    if args.amp_level == "O2":
        to_cast = {
            p.name
            for p in program.all_parameters()
            if p.name in names and scope.find_var(p.name).get_tensor()._dtype() == paddle.float32
        }
        fp16_utils.cast_parameters_to_fp16(place, program, scope, to_cast, dtype)


def exclude_from_asp(main_prog, model):
    """Keep the classifier dense, as NVIDIA's example does. Paddle leaves out filters of 3 channels, but not of 4."""
    asp.set_excluded_layers([model.last.weight.name], main_program=main_prog)


def prune(args, main_prog, place):
    """Set two of every four weights to zero, and keep them zero during training (--prune-model).

    Where Paddle has CUDA but the machine has no GPU, `paddle.incubate.asp.prune_model` ends the process without an
    exception on a Fleet program. The helper below takes the place as an argument.

    Returns:
        {parameter name: mask}.
    """
    return ASPHelper.prune_model_by_program(place, main_program=main_prog, mask_algo=MaskAlgo[args.mask_algo.upper()])
