"""The training loss: label smoothing and class weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder


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
        "of the class, with a mean of 1 over all images (with --multi-label: over all labels)",
        topic="data",
        choices=["none", "balanced"],
    )


def add(step: "StepBuilder") -> None:
    """With --class-weights balanced, add the weights of the images, or of the classes of a multi-label network, to the
    targets of the loss head.

    Raises:
        UsageError: --class-weights is balanced, but the number of training images of each class is unknown
            (step.class_images is None).
    """
    from paddle_resnet.models import loss_head

    if step.part(Settings).class_weights == "none":
        return
    if step.class_images is None:
        raise UsageError("--class-weights balanced: requires class_images; pass the loader's class_images to build")
    images = np.zeros(step.num_classes, np.int64)
    images[: len(step.class_images)] = step.class_images
    weights = loss_head.balanced_weights(images)
    variable = step.declare("class_weights", lambda: weights, [1, step.num_classes])
    step.targets = step.targets | step.task.weigh(step.targets, variable)
