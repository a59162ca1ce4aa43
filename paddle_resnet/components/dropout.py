"""Dropout before the classifier, and stochastic depth."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    dropout: float = flag(
        0.0,
        "dropout rate before the last layer; 0: off",
        topic="regularize",
        parse=numbers.below_one,
        metavar="P",
    )
    drop_path: float = flag(
        0.0,
        "rate of stochastic depth: the probability with which the last residual block omits its branch for an "
        "image; the probability rises linearly from the first block to the last; 0: off",
        topic="regularize",
        parse=numbers.below_one,
        metavar="P",
    )
