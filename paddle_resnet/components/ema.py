"""Exponential moving average of the weights, which evaluation uses."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    ema: float | None = flag(
        None,
        "decay per step, such as 0.9999, of the exponential moving average of the weights, which evaluation uses",
        topic="regularize",
        parse=numbers.or_none(numbers.below_one),
        metavar="DECAY",
    )
