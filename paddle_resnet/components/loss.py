"""The training loss: label smoothing and class weights."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    label_smoothing: float = flag(
        0.1,
        "fraction of each label that is spread evenly over all classes",
        topic="regularize",
        parse=numbers.ratio,
    )
    class_weights: str = flag(
        "none",
        "class weights in the training loss; balanced: inversely proportional to the number of training images "
        "of the class, with a mean of 1 over all images",
        topic="data",
        choices=["none", "balanced"],
    )
