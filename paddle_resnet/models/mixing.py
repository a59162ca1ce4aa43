"""Mixed images and labels: mixup, Zhang et al., arXiv:1710.09412, and CutMix, Yun et al., arXiv:1905.04899.

Image i of a batch of N is mixed with its partner, image N - 1 - i of the same batch. All images of a batch share one
ratio, drawn per batch.
"""

from collections import namedtuple

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_resnet.models import loss_head

# At each pixel, the weight of the partner is the product of `rows` [H] and `columns` [W]. `fraction` is the mean weight
# of the image itself, which is also the weight of its label.
Mix = namedtuple("Mix", "rows columns fraction")


def mixup(generator, ratio, height, width):
    """Return a Mix that has the same weight for all pixels."""
    return Mix(np.full(height, 1 - ratio), np.ones(width), ratio)


def cutmix(generator, ratio, height, width):
    """Return a Mix with a box of the partner's pixels. The sides of the box are those of the image times the square
    root of 1 - ratio. The center is drawn uniformly, and the part of the box outside the image is cut off."""
    sides = []
    for size in (height, width):
        center, half = generator.integers(size), int(size * np.sqrt(1 - ratio)) // 2
        side = np.zeros(size)
        side[max(0, center - half) : center + half] = 1
        sides.append(side)
    return Mix(*sides, 1 - sides[0].mean() * sides[1].mean())


# The keys are the names of the flags. To add a kind, write a function like these, an entry here, and its flag.
KINDS = {"mixup": mixup, "cutmix": cutmix}


def draw(generator, alphas, height, width):
    """Draw the mix of a batch.

    Args:
        generator: np.random.Generator.
        alphas: {kind: alpha}; the ratio is drawn from Beta(alpha, alpha), and alpha is above 0. If there are several
            kinds, each batch uses one of them, with equal probability.
        height, width: size of the images.
    Returns:
        Mix, in float64.
    """
    kind = list(alphas)[generator.integers(len(alphas))]
    return KINDS[kind](generator, generator.beta(alphas[kind], alphas[kind]), height, width)


def mix_images(images, rows, columns):
    """Mix images [N, ...] with their partners.

    Args:
        images: variable of any floating-point type.
        rows, columns: `rows` and `columns` of a Mix in float32, with shapes that broadcast against the images.
    """
    weight = rows * columns
    if images.dtype != weight.dtype:
        weight = weight.astype(images.dtype)
    return images * (1 - weight) + paddle.flip(images, axis=[0]) * weight


def mix_labels(label, fraction, class_num):
    """Return the targets of mixed images.

    Args:
        label: [N, 1] int64.
        fraction: `fraction` of a Mix [1] in float32.
        class_num: number of classes.
    Returns:
        weights of the classes [N, class_num] in float32; each row sums to 1.
    """
    with loss_head.scope():
        own = F.one_hot(paddle.reshape(label, [-1]), class_num)
        return own * fraction + paddle.flip(own, axis=[0]) * (1 - fraction)
