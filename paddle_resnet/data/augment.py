"""Random changes of training images.

AUGMENTATIONS is the list of the optional changes, in the order in which they are applied after the random crop. To add
one, write its operator and add an entry. Operators import DALI only when a pipeline is defined.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Eigenvectors (columns) and eigenvalues of ImageNet's RGB values (0 to 255), which define the lighting noise of
# Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NeurIPS 2012, section 4.1.
PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
PCA_VALUES = np.array([55.46, 4.794, 1.148])
# Number of magnitude levels per operation of --auto-augment, as in torchvision.
MAGNITUDES = 31
CROP_SEED = 5  # index of the seed of the padded crop, see Augmentation.seeds


class Augmentation(NamedTuple):
    """An optional random change of training images.

    Attributes:
        flag: name of the flag that controls the change.
        off: value of the flag without the change.
        seeds: indexes of the seeds of its random operators. Each random operator needs its own seed, and no index may
            occur twice, so that a change does not influence the random numbers of the others.
        apply: apply(images, mean, options, seeds) returns (images, mean) after adding operators to the pipeline. Images
            are uint8 [H, W, 3] in RGB; `mean` is the color that is subtracted later, which may be an output of an
            operator.
    """

    flag: str
    off: Any
    seeds: tuple[int, ...]
    apply: Callable[[Any, Any, Any, list[int]], tuple[Any, Any]]


def augment(images: Any, mean: Any, options: Any, seeds: list[int]) -> tuple[Any, Any]:
    """Add the operators of all changes that the flags select to the pipeline under construction.

    Args:
        images: uint8 [H, W, 3] in RGB.
        mean: color that will be subtracted from the images.
        options: object with the values of the flags as attributes.
        seeds: result of seeds_of.
    Returns:
        (images, mean) after all changes.
    """
    for entry in AUGMENTATIONS:
        if getattr(options, entry.flag) != entry.off:
            images, mean = entry.apply(images, mean, options, [seeds[i] for i in entry.seeds])
    return images, mean


def seeds_of(seed: int, shard_id: int) -> list[int]:
    """Return the seeds of the random operators of a shard. DALI assigns seeds in the order of the random operators in
    the graph. The optional changes have explicit seeds, so that they do not change the random numbers for cropping and
    flipping."""
    count = 1 + max(CROP_SEED, *(index for entry in AUGMENTATIONS for index in entry.seeds))
    return np.random.SeedSequence([seed, shard_id]).generate_state(count).tolist()


def _auto_augment(images, mean, options, seeds):
    """Apply random operations from DALI's suites to each image. trivial: one operation with a random magnitude (Müller
    and Hutter, "TrivialAugment", arXiv:2103.10158). randaug: two operations with the magnitude --auto-augment-magnitude
    (Cubuk et al., "RandAugment", arXiv:1909.13719). The signs of the magnitudes are random.

    DALI's own functions for selecting operations are not used. They pass the same seed to several random operators,
    which then draw the same numbers, so each operation would always have the same magnitude or sign.
    """
    from nvidia.dali import fn, types
    from nvidia.dali.auto_aug import rand_augment, trivial_augment
    from nvidia.dali.auto_aug.core import signed_bin

    if options.auto_augment == "trivial":
        count, operations = 1, trivial_augment.get_trivial_augment_wide_suite()
        magnitude = fn.random.uniform(values=list(range(MAGNITUDES)), dtype=types.INT32, seed=seeds[2])
    else:
        count, operations = 2, rand_augment.get_rand_augment_suite(use_shape=True)
        magnitude = options.auto_augment_magnitude
    choice = fn.random.uniform(values=list(range(len(operations))), shape=[count], dtype=types.INT32, seed=seeds[0])
    sign = fn.random.uniform(values=[0, 1], shape=[count], dtype=types.INT32, seed=seeds[1])
    with warnings.catch_warnings(record=True):  # DALI's suites use deprecated operator names
        for i in range(count):
            arguments = {"magnitude_bin": signed_bin(magnitude, sign[i]), "num_magnitude_bins": MAGNITUDES}
            images = _apply(operations, choice[i], images, {**arguments, "shape": options.image_shape[1:]})
    return images, mean


def _apply(operations, choice, images, options):
    """Apply one of the operations to each image. DALI evaluates `choice < half` for each image."""
    from nvidia.dali.pipeline import do_not_convert

    if len(operations) == 1:
        # The operations contain no conditional statements, so DALI's code conversion is unnecessary.
        return do_not_convert(operations[0].__call__)(images, **options)
    half = len(operations) // 2
    if choice < half:
        images = _apply(operations[:half], choice, images, options)
    else:
        images = _apply(operations[half:], choice - half, images, options)
    return images


def _jitter(images, mean, options, seeds):
    """Scale saturation, contrast (around the level 128) and brightness, in this order, each by a random factor from
    [max(0, 1 - strength), 1 + strength]. Values are rounded only once, at the end."""
    from nvidia.dali import fn

    strength = options.color_jitter
    factors = [max(0, 1 - strength), 1 + strength]
    brightness, contrast, saturation = (fn.random.uniform(range=factors, seed=seed) for seed in seeds)
    return fn.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation), mean


def _rotate(images, mean, options, seeds):
    """Rotate images about the center by a random angle from [-degrees, degrees]. The image size is unchanged, and
    uncovered corners are black."""
    from nvidia.dali import fn, types

    angle = fn.random.uniform(range=[-options.rotate_degrees, options.rotate_degrees], seed=seeds[0])
    return fn.rotate(images, angle=angle, keep_size=True, fill_value=0, interp_type=types.INTERP_LINEAR), mean


def _lighting(images, mean, options, seeds):
    """Add an offset to the RGB values (0 to 255) of an image, by subtracting it from the mean: the sum of ImageNet's
    eigenvectors, each multiplied by its eigenvalue and a random number from N(0, --lighting)."""
    from nvidia.dali import fn, types

    alpha = fn.random.normal(shape=[3], mean=0, stddev=options.lighting, seed=seeds[0])
    offset = fn.reductions.sum(types.Constant(np.float32(PCA_VECTORS * PCA_VALUES)) * alpha, axes=[1])
    return images, types.Constant(np.float32(mean)) - offset


AUGMENTATIONS = (
    Augmentation("auto_augment", "none", (6, 7, 8), _auto_augment),
    Augmentation("color_jitter", 0, (0, 1, 2), _jitter),
    Augmentation("rotate_degrees", 0, (3,), _rotate),
    Augmentation("lighting", 0, (4,), _lighting),
)
