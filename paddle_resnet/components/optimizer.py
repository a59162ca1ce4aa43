"""The optimizer: update rule, its hyperparameters, and weight decay. optimizers/table.py contains the update rules."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet import graph
    from paddle_resnet.optimizers import table
    from paddle_resnet.step.builder import StepBuilder

_ADAPTIVE = ", ".join(name for name, rule in OPTIMIZERS.items() if rule.is_adaptive)


def _epsilon(text):
    value = numbers.number(text)
    if value < 1e-30:
        raise argparse.ArgumentTypeError(f"{text} is too small for float32; use 1e-30 or more, such as 1e-8")
    return value


def _users(name):
    return tuple(optimizer for optimizer, rule in OPTIMIZERS.items() if name in rule.flags)


@dataclass(frozen=True)
class Settings:
    optimizer: str = flag(
        "Momentum",
        f"update rule; one of {', '.join(OPTIMIZERS)}; see docs/optimizer.md for the formulas",
        topic="optimizer",
        choices=list(OPTIMIZERS),
        metavar="NAME",
    )
    momentum: float = flag(
        0.875,
        f"weight of the previous velocity ({', '.join(_users('momentum'))})",
        topic="optimizer",
        parse=numbers.ratio,
        used_by=("optimizer", _users("momentum")),
    )
    beta1: float = flag(
        0.9,
        f"weight of the previous first moment ({', '.join(_users('beta1'))})",
        topic="optimizer",
        parse=numbers.below_one,
        used_by=("optimizer", _users("beta1")),
    )
    beta2: float = flag(
        0.999,
        f"weight of the previous second moment ({', '.join(_users('beta2'))})",
        topic="optimizer",
        parse=numbers.below_one,
        used_by=("optimizer", _users("beta2")),
    )
    opt_epsilon: float = flag(
        1e-8,
        f"term added to the square root of the second moment ({', '.join(_users('opt_epsilon'))})",
        topic="optimizer",
        parse=_epsilon,
        used_by=("optimizer", _users("opt_epsilon")),
    )
    weight_decay: float = flag(
        3.0517578125e-05,
        f"coefficient of L2 weight decay, which is decoupled from the gradient in {_ADAPTIVE}",
        topic="regularize",
        parse=numbers.not_negative_number,
    )
    bn_weight_decay: bool = flag(
        False,
        "apply weight decay also to the scale and shift of normalization layers and to other factors of channels or "
        "layers",
        topic="regularize",
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --opt-epsilon is too small for --optimizer."""
    least = OPTIMIZERS[settings.optimizer].least_epsilon
    if settings.opt_epsilon < least:
        yield Conflict(
            f"--opt-epsilon {settings.opt_epsilon:g}: too small for --optimizer {settings.optimizer}; use {least:g} or "
            "more",
            ("opt_epsilon",),
            ("optimizer",),
        )


def add(step: "StepBuilder") -> None:
    """Complete the update, for which Paddle's minimize has added one operator per parameter. With Paddle's kernels,
    Paddle's update operators are corrected for bfloat16 parameters and for steps that dynamic loss scaling skips. If
    Paddle lacks the update rule, `rewrite` of the rule then changes Paddle's operators. With custom kernels,
    update_natively replaces Paddle's operators."""
    from paddle_resnet import graph

    block, rule = graph.block(step.main), OPTIMIZERS[step.part(Settings).optimizer]
    if not step.is_native:
        _update_masters_in_float32(block)
        _keep_parameters_on_overflow(block)
    if rule.rewrite:
        rule.rewrite(step)
    if step.is_native:
        update_natively(block, rule, step.factor)
        _place_state(step.startup)


def update_natively(block: "graph.Block", rule: "table.Rule", factor: "static.Variable | None") -> None:
    """Replace all update operators with one operator per precision and learning rate. If dynamic loss scaling skips a
    step, the parameters and the optimizer state do not change, but the BN statistics do.

    Args:
        block: block of a training program.
        rule: table.Rule of the optimizer.
        factor: variable that contains the factor of the gradients, 0 in a skipped step; or None.
    """
    from paddle_resnet import graph

    groups = {}
    for op in graph.updates(block.program):
        groups.setdefault((op.input("LearningRate")[0], bool(op.input("MasterParam"))), []).append(op)
    for (rate, has_masters), ops in groups.items():
        kinds = (*rule.state, *(["MasterParam"] if has_masters else []))
        parameters, gradients, *state = (
            [block.var(name) for name in dict.fromkeys(op.input(kind)[0] for op in ops)]
            for kind in ("Param", "Grad", *kinds)
        )
        state = [variable for variables in state for variable in variables]
        inputs: dict[str, Any] = {"Parameters@VECTOR": parameters, "Gradients@VECTOR": gradients}
        inputs |= {"State@VECTOR": state, "Rate": block.var(rate)}
        if factor is not None:
            inputs["Unscale@OPTIONAL"] = factor
        outputs = {"ParametersOut@VECTOR": parameters, "StateOut@VECTOR": state}
        attrs = {"hyperparameters": [float(ops[0].attr(name)) for name in rule.attrs]}
        attrs["decays"] = [rule.decay(op) for op in ops]
        graph.replace(block, ops, ops[0], f"native_{rule.native}", inputs, outputs, attrs)
    graph.sync(block)


def _place_state(startup_prog):
    """Create the entire optimizer state on the device of the program.

    Paddle creates and updates the powers of Adam's betas on the CPU. The custom operators need the powers of the betas
    on the GPU, because a captured step must not read values from the host.
    """
    from paddle_resnet import graph

    for op in graph.block(startup_prog).ops:
        if op.attr("op_device") == "cpu":
            graph.set_attr(op, "op_device", "")


def _update_masters_in_float32(block):
    """Make the optimizer update the float32 master weight of each bfloat16 parameter, and then cast the master weight
    to the parameter. Paddle has no momentum kernel for bfloat16."""
    import paddle
    from paddle.utils import unique_name

    from paddle_resnet import graph

    for op in reversed(graph.updates(block.program)):
        i = block.ops.index(op)
        if block.var(op.input("Param")[0]).dtype != paddle.bfloat16:
            continue
        param, grad, master = (block.var(op.input(name)[0]) for name in ("Param", "Grad", "MasterParam"))
        grad_fp32 = block.create_var(
            name=unique_name.generate(f"{grad.name}_fp32"), shape=grad.shape, dtype=paddle.float32
        )
        for name, variable in (("Param", master), ("Grad", grad_fp32)):
            graph.set_input(op, name, [variable.name])
        graph.set_input(op, "MasterParam", [])
        graph.set_output(op, "ParamOut", [master.name])
        graph.set_output(op, "MasterParamOut", [])
        graph.set_attr(op, "multi_precision", False)
        graph.insert(block, i + 1, "cast", {"X": master}, {"Out": param}, **graph.cast_types(master, param))
        graph.insert(block, i, "cast", {"X": grad}, {"Out": grad_fp32}, **graph.cast_types(grad, grad_fp32))
    graph.sync(block)


def _keep_parameters_on_overflow(block):
    """Set the learning rate to 0 in each step that dynamic loss scaling skips. The change affects only update operators
    that cannot skip the step themselves.

    In a skipped step, Paddle only sets the gradients to 0, so momentum and weight decay would still change the
    parameters. Even with a learning rate of 0, a skipped step decays the velocity. The decay is acceptable, because
    Paddle raises the loss scale, which causes skipped steps, only after 2,000 steps without overflow, and because
    preventing the decay would require an additional operator per parameter.
    """
    import paddle
    from paddle.utils import unique_name

    from paddle_resnet import graph

    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    updates = [op for op in graph.updates(block.program) if not _skips_steps(op)]
    if not scalings or not updates:
        return
    overflow = block.var(scalings[0].input("FoundInfinite")[0])
    rates = dict.fromkeys(op.input("LearningRate")[0] for op in updates)
    overflows, proceeds, *effective_rates = (
        block.create_var(name=unique_name.generate(name), shape=[1], dtype=paddle.float32)
        for name in ("overflows", "proceeds", *(f"{rate}_unless_overflow" for rate in rates))
    )
    at = block.ops.index(updates[0])
    for rate, effective_rate in zip(rates, effective_rates, strict=True):
        for op in updates:
            graph.rename_input(op, rate, effective_rate.name)
        factors = {"X": block.var(rate), "Y": proceeds}
        graph.insert(block, at, "elementwise_mul", factors, {"Out": effective_rate}, axis=-1)
    graph.insert(block, at, "scale", {"X": overflows}, {"Out": proceeds}, scale=-1.0, bias=1.0)
    types = graph.cast_types(overflow, overflows)
    graph.insert(block, at, "cast", {"X": overflow}, {"Out": overflows}, **types)
    graph.sync(block)


def _skips_steps(op):
    return "SkipUpdate" in op.input_names and bool(op.input("SkipUpdate"))
