"""Mix images and labels with mixup (Zhang et al., arXiv:1710.09412) or CutMix (Yun et al., arXiv:1905.04899).

In a batch of N images, image i is mixed with its partner, image N - 1 - i. Each process draws one mixing ratio per
batch.
"""

import argparse
import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.settings.field import flag
from paddle_resnet.tasks import Task
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder


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


# The partner's weight at pixel (h, w) is rows[h] * columns[w]. `fraction` is the mean weight of the image itself, which
# is also the weight of its label.
Mix = namedtuple("Mix", "rows columns fraction")


def add(step: "StepBuilder") -> None:
    """With --mixup or --cutmix, mix the images and the targets of a training program. The host draws a Mix for each
    batch, and the program reads its rows, columns and fraction as host scalars.

    Raises:
        UsageError: --mixup or --cutmix is set, but a batch has fewer than two images.
    """
    alphas = {kind: alpha for kind in KINDS if (alpha := getattr(step.part(Settings), kind))}
    if not alphas:
        return
    if step.batch_size < 2:
        raise UsageError(
            f"--{next(iter(alphas))}: requires at least two images per batch; use larger batches (--batch-size, "
            "--sizes)"
        )
    (height, width), schedule, random = step.image_size, step.schedule, step.random("mix")

    @functools.lru_cache(1)  # draw once per batch, for rows, columns and fraction
    def mix_of(batch):
        return draw(random(), alphas, height, width)

    def declare(name, shape):
        return step.declare(f"mix.{name}", lambda: getattr(mix_of(schedule.batches), name), shape)

    is_nchw = step.layout == "NCHW"
    rows = declare("rows", [1, 1, height, 1] if is_nchw else [1, height, 1, 1])
    columns = declare("columns", [1, 1, 1, width] if is_nchw else [1, 1, width, 1])
    step.images = mix_images(step.images, rows, columns)
    weights = mix_labels(step.task, step.targets["label"], declare("fraction", [1]))
    step.targets = step.targets | {"weights": weights}


def mixup(generator: np.random.Generator, ratio: float, height: int, width: int) -> Mix:
    """Return a Mix in which the partner has the weight 1 - ratio at all pixels."""
    return Mix(np.full(height, 1 - ratio), np.ones(width), ratio)


def cutmix(generator: np.random.Generator, ratio: float, height: int, width: int) -> Mix:
    """Return a Mix that replaces a box in the image with the partner's pixels. The height and width of the box are
    those of the image times the square root of 1 - ratio, rounded down to even numbers. The center of the box is drawn
    uniformly, and the box is clipped to the image."""
    sides = []
    for size in (height, width):
        center, half = generator.integers(size), int(size * np.sqrt(1 - ratio)) // 2
        side = np.zeros(size)
        side[max(0, center - half) : center + half] = 1
        sides.append(side)
    return Mix(*sides, 1 - sides[0].mean() * sides[1].mean())


# {flag name: function}. To add a kind of mixing, add a function like mixup, an entry in this dictionary, and a flag.
KINDS = {"mixup": mixup, "cutmix": cutmix}


def draw(generator: np.random.Generator, alphas: dict[str, float], height: int, width: int) -> Mix:
    """Draw a random Mix for one batch.

    Args:
        generator: source of the random numbers.
        alphas: {kind: alpha}, with alpha > 0. The ratio is drawn from Beta(alpha, alpha). If there are several kinds,
            one of them is drawn for each batch with equal probability.
        height, width: size of the images.
    Returns:
        Mix, in float64.
    """
    kind = list(alphas)[generator.integers(len(alphas))]
    return KINDS[kind](generator, generator.beta(alphas[kind], alphas[kind]), height, width)


def mix_images(images: Any, rows: Any, columns: Any) -> Any:
    """Mix images [N, ...] with their partners.

    Args:
        images: variable [N, ...] of any floating-point type.
        rows, columns: weights of the partner in float32 (Mix.rows, Mix.columns), with shapes that broadcast to the
            shape of the images.
    Returns:
        the mixed images, with the shape and type of `images`.
    """
    import paddle

    weight = rows * columns
    if images.dtype != weight.dtype:
        weight = weight.astype(images.dtype)
    return images * (1 - weight) + paddle.flip(images, axis=[0]) * weight


def mix_labels(task: Task, label: Any, fraction: Any) -> Any:
    """Return the target probabilities of mixed images, float32 [N, classes].

    Args:
        task: the task of the network.
        label: labels of the images, with the shape [N, ...] and the type of Task.label.
        fraction: float32 [1], the mean weight of the image (Mix.fraction).
    """
    import paddle

    from paddle_resnet.models import loss_head

    with loss_head.scope():
        own = task.soft_labels(label)
        return own * fraction + paddle.flip(own, axis=[0]) * (1 - fraction)
