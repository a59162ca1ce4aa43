"""Dropout before the classifier, and stochastic depth."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder


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


def add(step: "StepBuilder") -> None:
    """With --dropout, insert dropout before the last layer of the network. With --drop-path, set the rates and seeds of
    its DropPath layers. Call add() before the network is applied to the images.

    Raises:
        UsageError: --drop-path is not 0, but the network has no DropPath layer.
    """
    rates = step.part(Settings)
    if rates.dropout:
        _drop_features(step, rates.dropout)
    if rates.drop_path:
        _drop_paths(step, rates.drop_path)


def _drop_features(step, rate):
    from paddle_resnet.models import layers

    seed = step.declare_seed("dropout")
    step.model.last.register_forward_pre_hook(lambda _, inputs: layers.dropout(inputs[0], rate, seed))


def _drop_paths(step, rate):
    """Set the rate of DropPath layer i of n, counted from 1, to rate * i / n."""
    from paddle_resnet.models import layers

    paths = [layer for layer in step.model.sublayers() if isinstance(layer, layers.DropPath)]
    if not paths:
        raise UsageError(
            f"--drop-path {rate:g}: --model-arch-name {step.arch} has no DropPath layer in its residual blocks; remove "
            "--drop-path"
        )
    for i, path in enumerate(paths, 1):
        path.rate, path.seed = rate * i / len(paths), step.declare_seed(f"drop_path.{i}")
