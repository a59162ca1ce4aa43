"""Gradient accumulation: a training step averages the gradients of several batches."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    accumulate_steps: int = flag(
        1,
        "number of batches per training step; averaging the gradients of K batches simulates a batch K times as large",
        topic="optimizer",
        parse=numbers.positive,
        metavar="K",
    )
