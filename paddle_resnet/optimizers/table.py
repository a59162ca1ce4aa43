"""Table of the optimizers for --optimizer. An entry contains a function that builds Paddle's optimizer, the custom
operator that updates the parameters, and the properties that determine flags, warnings and the choices of
--choose-recipe.

To add an optimizer, add an entry to OPTIMIZERS, its rule and its name in FOR_EACH_OPTIMIZER to native/optimizers.h, and
a test of its formula to tests/native/test_native.py. This module imports Paddle only inside functions, because parsing
the command line imports this module.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle_resnet.optimizers import radam

if TYPE_CHECKING:
    from paddle.base.framework import Operator

# Paddle's operators that multiply by a vector or normalize (FACTORS), and operators that add a vector (SUMMANDS).
FACTORS = {"batch_norm", "sync_batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
FACTORS |= {"elementwise_mul", "elementwise_div", "prelu"}
SUMMANDS = {"elementwise_add", "elementwise_sub"}


@dataclass(frozen=True)
class Rule:
    """An optimizer.

    Attributes:
        build: function that returns Paddle's optimizer for the current program. The arguments of build are the
            learning rate (Schedule), --weight-decay, the set of names of parameters with weight decay, and the values
            of `flags`.
        flags: names of the settings whose values are arguments of `build`.
        is_adaptive: whether the step size is nearly independent of the gradient norm. If true, weight decay does
            not apply to biases, and --choose-recipe scales the learning rate with the square root of the number of
            images per step instead of linearly.
        rates: learning rates that --choose-recipe uses for 64 images per step: (fine-tuning, from scratch).
        op: type of Paddle's operator that updates a parameter.
        native: name of the rule in native/optimizers.h. The custom operator native_NAME updates all parameters.
        state: names of the inputs of Paddle's operator that contain the state of the rule. Several parameters may share
            one state variable.
        attrs: names of the attributes of Paddle's operator that contain the rule's hyperparameters, in the order of the
            rule's members in native/optimizers.h. The attributes are the same for all parameters.
        decay: function that returns the weight decay of a parameter, given Paddle's operator.
        rewrite: None if `op` implements the rule. If Paddle lacks the rule, rewrite(step) changes or replaces
            the operators `op` of another rule, which minimize has added to a step.builder.StepBuilder. rewrite is
            called after accumulation, loss scaling and clipping have been added. With custom kernels, the operator
            native_NAME then replaces the operators `op`.
        least_epsilon: minimum of --opt-epsilon.
        needs_all_layers: whether all layers must be trained from step 1 on, so that --freeze is not possible.
    """

    build: Callable
    flags: tuple
    is_adaptive: bool
    rates: tuple
    op: str
    native: str
    state: tuple
    attrs: tuple
    decay: Callable
    rewrite: Callable | None = None
    least_epsilon: float = 0.0
    needs_all_layers: bool = False


def _momentum(rate, decay, decayed, momentum, nesterov):
    import paddle
    from paddle import static
    from paddle.regularizer import L2Decay

    from paddle_resnet import graph

    for parameter in graph.block(static.default_main_program()).all_parameters():
        if parameter.name not in decayed and parameter.regularizer is None:
            parameter.regularizer = L2Decay(0.0)  # override the optimizer's regularizer
    return paddle.optimizer.Momentum(rate, momentum, use_nesterov=nesterov, weight_decay=L2Decay(decay))


def _momentum_rule(nesterov):
    return Rule(
        build=partial(_momentum, nesterov=nesterov),
        flags=("momentum",),
        is_adaptive=False,
        rates=(0.01, 0.05),
        op="momentum",
        native="momentum",
        state=("Velocity",),
        attrs=("mu", "use_nesterov"),
        decay=lambda op: op.attr("regularization_coeff"),
    )


def _adamw(rate, decay, decayed, *betas_and_epsilon):
    import paddle

    return paddle.optimizer.AdamW(
        rate, *betas_and_epsilon, weight_decay=decay, apply_decay_param_fun=lambda name: name in decayed
    )


def _lamb(rate, decay, decayed, *betas_and_epsilon):
    import paddle

    return paddle.optimizer.Lamb(
        rate,
        decay,
        *betas_and_epsilon,
        exclude_from_weight_decay_fn=lambda parameter: parameter.name not in decayed,
    )


_ADAMW = Rule(
    build=_adamw,
    flags=("beta1", "beta2", "opt_epsilon"),
    is_adaptive=True,
    rates=(5e-4, 1e-3),
    op="adamw",
    native="adamw",
    state=("Moment1", "Moment2", "Beta1Pow", "Beta2Pow"),
    attrs=("beta1", "beta2", "epsilon"),
    decay=lambda op: op.attr("coeff") if op.attr("with_decay") else 0.0,
)
OPTIMIZERS = {
    "Momentum": _momentum_rule(nesterov=False),
    "Nesterov": _momentum_rule(nesterov=True),
    "AdamW": _ADAMW,
    "RAdam": replace(_ADAMW, native="radam", **radam.RULE),
    "LAMB": replace(
        _ADAMW, build=_lamb, rates=(5e-3, 5e-3), op="lamb", native="lamb", decay=lambda op: op.attr("weight_decay")
    ),
}


def rule_of(op: "Operator") -> Rule | None:
    """Return the Rule that one of Paddle's update operators implements, or None."""
    return next((rule for rule in OPTIMIZERS.values() if rule.op == op.type and rule.rewrite is None), None)


def build_optimizer(settings: Any, lr_scheduler: Any) -> Any:
    """Build the optimizer that --optimizer selects, for the network in the current program.

    Weight decay applies to weights, to biases if the optimizer is not adaptive, and to the parameters of normalization
    layers and to other factors if --bn-weight-decay is set. A parameter with a regularizer of its own
    (ParamAttr) has only this regularizer.

    Args:
        settings: components.optimizer.Settings.
        lr_scheduler: schedules.Schedule.
    Returns:
        one of Paddle's optimizers.
    """
    from paddle import static

    rule, program = OPTIMIZERS[settings.optimizer], static.default_main_program()
    has_decay = {"weight": True, "bias": not rule.is_adaptive, "factor": settings.bn_weight_decay}
    decayed = {
        parameter.name
        for parameter, kind in _kinds(program)
        if has_decay[kind] and getattr(parameter, "regularizer", None) is None
    }
    return rule.build(lr_scheduler, settings.weight_decay, decayed, *(getattr(settings, flag) for flag in rule.flags))


def _kinds(program):
    """Yield (parameter, kind) for each parameter of a network: "factor" for the scale and shift of normalization layers
    and for other factors of channels or layers, "bias", or "weight". The kind follows from the operators that read the
    parameter, because its shape depends on the layout: a factor of the channels has the shape [C, 1, 1] in NCHW, and
    [C] in NHWC."""
    from paddle_resnet import graph

    readers = {}
    for op in graph.block(program).ops:
        for name in op.input_arg_names:
            readers.setdefault(name, []).append(op)
    for parameter in graph.block(program).all_parameters():
        types = {op.type for op in _first_combinations(readers, parameter.name)}
        is_vector = sum(size != 1 for size in parameter.shape) <= 1
        if is_vector and types & FACTORS:
            yield parameter, "factor"
        elif len(parameter.shape) == 1 or (is_vector and types & SUMMANDS):
            yield parameter, "bias"
        else:
            yield parameter, "weight"


def _first_combinations(readers, name):
    """Yield the operators that combine a parameter with another variable, directly or after operators with a single
    input, such as reshape or cast."""
    for op in readers.get(name, []):
        if len(op.input_arg_names) > 1:
            yield op
            continue
        for out in op.output_arg_names:
            if out != name:
                yield from _first_combinations(readers, out)
