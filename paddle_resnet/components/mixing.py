"""Mixup and CutMix, which mix images and labels of a batch."""

import argparse
from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


def _alpha(text):
    value = numbers.not_negative_number(text)
    if value > 1e6:
        raise argparse.ArgumentTypeError(f"{text} is too large; use a number up to 1e6, such as 0.2")
    return value


@dataclass(frozen=True)
class Settings:
    mixup: float = flag(
        0.0,
        "parameter of mixup, which mixes images and labels with a ratio from Beta(A, A); 0: off",
        topic="augment",
        parse=_alpha,
        metavar="A",
    )
    cutmix: float = flag(
        0.0,
        "parameter of CutMix, which pastes a box from a second image; the relative area of the box is drawn "
        "from Beta(A, A); 0: off",
        topic="augment",
        parse=_alpha,
        metavar="A",
    )
