"""Gradient clipping by the global norm."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    clip_grad_norm: float | None = flag(
        None,
        "maximum L2 norm of all gradients together, after averaging over the processes",
        topic="optimizer",
        parse=numbers.or_none(numbers.positive_number),
        metavar="F",
    )
