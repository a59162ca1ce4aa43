"""Lookahead (--lookahead): Zhang et al., arXiv:1907.08610, algorithm 1.

A training program contains a float32 slow weight for each parameter. In every K-th step, the slow weights of all
parameters that are not frozen move towards the parameters, and the parameters are then set to the slow weights. Slow
weights belong to the optimizer state. With custom kernels, one operator native_lookahead per precision updates all
parameters of this precision.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import State

LEAST_FRACTION = 1e-6  # minimum A in --lookahead K,A, far above the values that float32 rounds to 0


def parse(text: str) -> list | None:
    """Return [K, A] for a value of --lookahead, or None for the text "None", which overrides a value in the
    configuration file. Raise ArgumentTypeError if the value does not have the form K,A or is out of range."""
    if text == "None":
        return None
    try:
        interval, fraction = text.split(",")
        values = [numbers.positive(interval.strip()), numbers.ratio(fraction)]
        if values[1] < LEAST_FRACTION:
            raise ValueError
        return values
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise argparse.ArgumentTypeError(
            f"'{text}': expected K,A with a whole number K above 0 and a fraction A from {LEAST_FRACTION:g} to 1, such "
            "as 6,0.5"
        ) from e


@dataclass(frozen=True)
class Settings:
    lookahead: list | None = flag(
        None,
        "interval K in steps and fraction A of lookahead, such as 6,0.5: every K steps, the slow weights move "
        "towards the weights by the fraction A of the difference, and the weights are set to the slow weights",
        topic="optimizer",
        parse=parse,
        metavar="K,A",
    )


SUFFIX = ".slow"  # the name of a slow weight is the name of its parameter with this suffix


def add(step: "StepBuilder") -> None:
    """If --lookahead K,A is set, add lookahead to a training program. After the update in steps K, 2 K, ..., the
    program computes slow += A (p - slow) and p = slow. For a parameter in half precision, p is its float32 master
    weight. Steps that loss scaling skips are also counted. The slow weights of frozen parameters do not change."""
    from paddle_resnet import graph

    value, schedule = step.part(Settings).lookahead, step.schedule
    if value is None:
        return
    interval, alpha = value
    is_due = step.declare("lookahead", lambda: (schedule.done + 1) % interval == 0)  # 1 in steps K, 2 K, ...
    block, startup = graph.block(step.main), graph.block(step.startup)
    for name, exact in (step.values | step.frozen_values).items():
        for target in (block, startup):
            graph.float32(target, name + SUFFIX, block.var(name).shape, persistable=True)
        startup.append_op(type="assign", inputs={"X": exact}, outputs={"Out": name + SUFFIX})
    (_add_native if step.is_native else _add_paddle)(step, is_due, alpha)
    graph.sync(block)


def _add_native(step, is_due, alpha):
    """Add one operator native_lookahead per precision of the parameters."""
    from paddle_resnet import graph

    block = graph.block(step.main)
    for has_masters in (False, True):
        values = {name: value for name, value in step.values.items() if (name != value) == has_masters}
        if not values:
            continue
        parameters = [block.var(name) for name in values]
        masters = values.values() if has_masters else []
        state = [block.var(name) for name in [*(name + SUFFIX for name in values), *masters]]
        # The lookahead update does not use gradients, so the parameters are passed in their place. If is_due is 0, the
        # operator skips the step.
        inputs = {"Parameters@VECTOR": parameters, "Gradients@VECTOR": parameters, "State@VECTOR": state}
        inputs |= {"Rate": is_due, "Unscale@OPTIONAL": is_due}
        outputs = {"ParametersOut@VECTOR": parameters, "StateOut@VECTOR": state}
        attrs = {"hyperparameters": [float(alpha)], "decays": [0.0] * len(parameters)}
        graph.append(block, "native_lookahead", inputs, outputs, **attrs)


def _add_paddle(step, is_due, alpha):
    from paddle.utils import unique_name

    from paddle_resnet import graph

    block = graph.block(step.main)

    def append(op_type, inputs, out, **attrs):
        graph.append(block, op_type, inputs, {"Out": out}, **attrs)

    weight = graph.float32(block, unique_name.generate("lookahead_weight"), [1])
    append("scale", {"X": is_due}, weight, scale=float(alpha))
    for name, value in step.values.items():
        slow, parameter, exact = (block.var(variable) for variable in (name + SUFFIX, name, value))
        append("lerp", {"X": slow, "Y": exact, "Weight": weight}, slow)
        append("lerp", {"X": exact, "Y": slow, "Weight": is_due}, exact)
        if name != value:
            append("cast", {"X": exact}, parameter, **graph.cast_types(exact, parameter))


def state(step: "StepBuilder") -> "State | None":
    """Return the State of the slow weights, which belong to the optimizer state, or None without --lookahead."""
    from paddle_resnet.step import facts

    if step.part(Settings).lookahead is None:
        return None
    variables = {name: name + SUFFIX for name in step.values | step.frozen_values}
    return facts.State(variables, facts.OPTIMIZER, starts_as_source=True, flag="--lookahead", what="slow weights")
