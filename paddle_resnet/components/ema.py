"""Exponential moving averages (EMA) of the weights (--ema): Polyak and Juditsky, doi:10.1137/0330046.

step/averages.py adds the variables and the operators. --ema makes a ResNet-50 step on an H100 0.3 % slower (n = 1;
benchmarks/log/kernels_h200.md).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import State


@dataclass(frozen=True)
class Settings:
    ema: float | None = flag(
        None,
        "decay per step, such as 0.9999, of the exponential moving average of the weights, which evaluation uses",
        topic="regularize",
        parse=numbers.or_none(numbers.below_one),
        metavar="DECAY",
    )


NAME = "ema"  # suffix of the names of the EMA weights


def decay_at(step: int, limit: float) -> float:
    """Return the EMA decay for a step (counted from 0). The decay increases from 0.1 (or `limit`, if this is lower) to
    `limit`. The low decay in the first steps reduces the influence of the initial weights, as in TensorFlow's
    ExponentialMovingAverage with num_updates."""
    return min(limit, (1 + step) / (10 + step))


def add(step: "StepBuilder") -> None:
    """With --ema, add averages with the weight 1 - decay to a training program. See averages.add."""
    from paddle_resnet.step import averages

    limit, schedule = step.part(Settings).ema, step.schedule
    if limit is not None:
        averages.add(step, NAME, lambda: 1 - decay_at(schedule.done, limit))


def state(step: "StepBuilder") -> "State | None":
    """Return the State of the averages, or None without --ema."""
    from paddle_resnet.step import averages

    return None if step.part(Settings).ema is None else averages.state(step, NAME, "--ema", "EMA weights")
