"""Mixed precision (AMP) and loss scaling."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.settings.values import argument, flag_name
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet import graph
    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import Loaded


@dataclass(frozen=True)
class Settings:
    amp: bool = flag(
        False,
        "use mixed precision; GPUs only",
        topic="precision",
    )
    amp_dtype: str = flag(
        "float16",
        "16-bit type of mixed precision; bfloat16 needs no loss scaling",
        topic="precision",
        choices=["float16", "bfloat16"],
        used_by=("amp", (True,)),
    )
    amp_level: str = flag(
        "O1",
        "level of mixed precision; O1: float32 parameters; O2: parameters in --amp-dtype with float32 master copies",
        topic="precision",
        choices=["O1", "O2"],
        used_by=("amp", (True,)),
    )
    scale_loss: float = flag(
        1.0,
        "loss scale; initial value if the scale is dynamic",
        topic="precision",
        parse=numbers.positive_number,
        depends_on=("amp_dtype",),
        used_by=("amp", (True,)),
    )
    use_dynamic_loss_scaling: bool = flag(
        False,
        "adjust the loss scale during training",
        topic="precision",
        depends_on=("amp_dtype",),
        used_by=("amp", (True,)),
    )
    use_pure_fp16: bool = flag(
        False,
        "shorthand for --amp-dtype float16 --amp-level O2",
        topic="precision",
        depends_on=("amp_dtype", "amp_level"),
        used_by=("amp", (True,)),
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """If --amp is set, yield a Conflict for each conflict between its flags, such as bfloat16 with loss scaling."""
    if not settings.amp:
        return
    if settings.use_pure_fp16 and settings.amp_level == "O1":
        yield Conflict(
            "--use-pure-fp16: implies level O2, but --amp-level is O1; remove one of them",
            ("use_pure_fp16", "amp_level"),
            ("use_pure_fp16", "amp_level"),
        )
    if settings.amp_dtype == "float16":
        return
    if settings.use_pure_fp16:
        yield Conflict(
            "--use-pure-fp16: implies float16, but --amp-dtype is bfloat16; use --amp-level O2 instead",
            ("use_pure_fp16", "amp_dtype"),
            ("use_pure_fp16", "amp_dtype"),
        )
    if settings.use_dynamic_loss_scaling or settings.scale_loss != 1:
        name = "use_dynamic_loss_scaling" if settings.use_dynamic_loss_scaling else "scale_loss"
        yield Conflict(
            f"{argument(settings, name)}: bfloat16 needs no loss scaling; remove {flag_name(name)}",
            (name,),
            ("amp_dtype",),
        )


def add(step: "StepBuilder") -> None:
    """With custom kernels and loss scaling, leave the gradients scaled until the update multiplies them by step.factor
    in float32. Paddle's operators would unscale float16 gradients in float16, where small gradients underflow. With
    dynamic loss scaling, one operator checks all gradients and updates the loss scale. Raises the errors of
    check_natively."""
    from paddle_resnet import graph

    if step.is_native:
        step.factor = check_natively(graph.block(step.main))


def check_natively(block: "graph.Block") -> "static.Variable | None":
    """Replace Paddle's operators for loss scaling. Return the variable that contains the factor for the gradients, or
    None without loss scaling. The factor is 0 if the step must be skipped.

    Raises:
        UsageError: the program uses loss scaling, and contains operators for the regularizer of a parameter.
    """
    from paddle_resnet import graph
    from paddle_resnet.utils.errors import UsageError

    checks = [op for op in block.ops if op.type == "check_finite_and_unscale"]
    if not checks:
        return None
    if any("/regularization" in op.attr("op_namescope") for op in block.ops):
        # The regularizer's operators add the regularization to the gradients, which would still be scaled.
        raise UsageError(
            "--kernels native: loss scaling is not supported with a regularizer of a parameter (paddle.ParamAttr); use "
            "--kernels paddle, or remove the regularizer"
        )
    unscale = graph.float32(block, "unscale", [1])
    overflows = {op.output("FoundInfinite")[0] for op in checks}
    for op in block.ops:  # operators that combine the overflow flags of both data types or copy the combined flag
        if op.type in ("concat", "reduce_any", "memcpy") and overflows.issuperset(op.input_arg_names):
            overflows.update(op.output_arg_names)
            checks.append(op)
    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if scalings:
        _update_scale(block, [*checks, *scalings], scalings, unscale)
    else:
        scale = block.var(checks[0].input("Scale")[0])
        graph.replace(block, checks, checks[0], "reciprocal", {"X": scale}, {"Out": unscale}, {})
    graph.sync(block)
    return unscale


def _update_scale(block, ops, scalings, unscale):
    """Replace the operators `ops` with one operator that checks the gradients and updates the loss scale."""
    from paddle_resnet import graph

    state = {"PrevLossScaling": "Scale", "InGoodSteps": "GoodSteps", "InBadSteps": "BadSteps"}
    state = {kind: block.var(scalings[0].input(name)[0]) for name, kind in state.items()}
    inputs = state | {"Gradients@VECTOR": [block.var(name) for op in scalings for name in op.input("X")]}
    outputs = {f"{name}Out": variable for name, variable in state.items()} | {"Unscale": unscale}
    rule = {"raise_after_steps": "incr_every_n_steps", "lower_after_steps": "decr_every_n_nan_or_inf"}
    rule |= {"raise_by": "incr_ratio", "lower_by": "decr_ratio"}
    attrs = {attr: scalings[0].attr(name) for attr, name in rule.items()}
    graph.replace(block, ops, scalings[0], "native_check_finite", inputs, outputs, attrs)


def _amp_lists(program, dtype, float32):
    """Return Paddle's AMP lists for `dtype`. The lists keep the following in float32: the loss head, the operators for
    which layers.is_float32 is true, all operators whose outputs are listed in `float32`, and all operators that read
    one of the outputs of these operators.

    The lists identify the operators that stay in float32 by the names of their outputs, because level O2 ignores lists
    of operator types.
    """
    from paddle import static

    from paddle_resnet import graph
    from paddle_resnet.models import layers, loss_head

    ops = [op for op in graph.block(program).ops if loss_head.contains(op) or layers.is_float32(op)]
    names = {name for op in ops for name in op.output_arg_names} | float32
    return static.amp.AutoMixedPrecisionLists(custom_black_varnames=names, dtype=dtype)


def wrap(optimizer: Any, settings: Settings, float32: set[str]) -> Any:
    """If --amp is set, return an optimizer that trains the current program in mixed precision; otherwise, return
    `optimizer`.

    Args:
        optimizer: one of Paddle's optimizers.
        settings: Settings.
        float32: names of variables to compute in float32.
    """
    from paddle import static

    from paddle_resnet.machine import compat

    if not settings.amp:
        return optimizer
    compat.accept_legacy_any()
    return static.amp.decorate(
        optimizer,
        amp_lists=_amp_lists(static.default_main_program(), settings.amp_dtype, float32),
        level=settings.amp_level,
        dtype=settings.amp_dtype,
        init_loss_scaling=settings.scale_loss,
        use_dynamic_loss_scaling=settings.use_dynamic_loss_scaling,
    )


def start(settings: Settings, loaded: "Loaded") -> bool:
    """With --amp, cast the weights of a training program. Return False: the states of other components remain valid."""
    from paddle import static

    if settings.amp:
        loaded.optimizer.amp_init(loaded.place, scope=static.global_scope())
    return False


def start_evaluation(settings: Settings, program: "static.Program", place: Any, float32: set[str]) -> None:
    """With --amp, convert an evaluation program. See cast_evaluation_program."""
    if settings.amp:
        cast_evaluation_program(program, place, settings.amp_dtype, settings.amp_level, float32)


def cast_evaluation_program(
    program: "static.Program",
    place: Any,
    dtype: str,
    level: str,
    float32: Collection[str] = frozenset(),
    for_gpu: bool = False,
) -> None:
    """Convert an evaluation program in place to the precision of training. Call this function after the parameters have
    been initialized or loaded.

    Level O1 casts the inputs of the operators that compute in half precision, and leaves the parameters in float32.
    Level O2 casts the parameters of the operators that compute in half precision, in the scope, except parameters that
    were already cast for a training program. The variables named in `float32` remain float32. If `for_gpu` is True, the
    program will run on a GPU, so its operators are converted even if this build of Paddle is for CPUs and lacks their
    half-precision kernels.
    """
    import paddle
    from paddle import static
    from paddle.static.amp import fp16_utils

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
