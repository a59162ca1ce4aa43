"""Random changes of training images: the flags of all changes, and the operators of those in AUGMENTATIONS.

AUGMENTATIONS is the list of the optional changes, in the order in which they are applied after the random crop. To add
a change, declare its flag as a field of Settings, write its operator and add an entry to AUGMENTATIONS. The functions
that add operators import DALI themselves, because parsing the command line imports this module and must not import
DALI.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paddle_resnet.settings.field import Conflict, flag, out_of_range
from paddle_resnet.settings.values import flag_name, listed, text
from paddle_resnet.utils import numbers

# Eigenvectors (columns) and eigenvalues of ImageNet's RGB values (0 to 255), which define the lighting noise of
# Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NeurIPS 2012, section 4.1.
PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
PCA_VALUES = np.array([55.46, 4.794, 1.148])
# Number of magnitude levels per operation of --auto-augment, as in torchvision.
MAGNITUDES = 31
CROP_SEED = 5  # index of the seed of the padded crop, see Augmentation.seeds


# Values outside these ranges can make DALI fail or produce pixels that are not finite.
RANGES = {"rand_crop_scale": (1e-6, 1), "rand_crop_ratio": (1e-3, 1e3), "color_jitter": (0, 100), "lighting": (0, 100)}
# Nonzero values far below these limits make DALI fail, because the range of its random numbers is empty in float32.
LEAST = {"color_jitter": 1e-6, "rotate_degrees": 1e-6}


@dataclass(frozen=True)
class Settings:
    rand_crop_scale: list[float] = flag(
        [0.08, 1.0],
        "range of the random crop's area, as a fraction of the image",
        topic="augment",
        parse=numbers.number_list,
        metavar="MIN,MAX",
        used_by=("crop_padding", (0,)),
        batches=True,
    )
    rand_crop_ratio: list[float] = flag(
        [3 / 4, 4 / 3],
        "range of the random crop's aspect ratio, width/height",
        topic="augment",
        parse=numbers.number_list,
        metavar="MIN,MAX",
        used_by=("crop_padding", (0,)),
        batches=True,
    )
    crop_padding: int = flag(
        0,
        "if positive, training images are resized to cover the crop, padded by N pixels on each side and cropped "
        "at a random position; the scale is not random",
        topic="augment",
        parse=numbers.integer(0, 1024),
        metavar="N",
        batches=True,
    )
    auto_augment: str = flag(
        "none",
        "random operations on each image; trivial: one operation of TrivialAugment (wide), with random "
        "magnitude; randaug: two operations of RandAugment, with --auto-augment-magnitude",
        topic="augment",
        choices=["none", "trivial", "randaug"],
        batches=True,
    )
    auto_augment_magnitude: int = flag(
        9,
        "magnitude of RandAugment's operations, from 0 to 30; three times timm's m",
        topic="augment",
        parse=numbers.integer(0, 30),
        metavar="M",
        used_by=("auto_augment", ("randaug",)),
        batches=True,
    )
    color_jitter: float = flag(
        0.0,
        "strength of color jitter: brightness, contrast and saturation are scaled by factors from max(0, 1-S) to 1+S",
        topic="augment",
        parse=numbers.not_negative_number,
        metavar="S",
        batches=True,
    )
    lighting: float = flag(
        0.0,
        "standard deviation of PCA lighting noise (AlexNet: 0.1)",
        topic="augment",
        parse=numbers.not_negative_number,
        metavar="STD",
        batches=True,
    )
    rotate_degrees: float = flag(
        0.0,
        "maximum angle of random rotations in either direction, in degrees",
        topic="augment",
        parse=numbers.not_negative_number,
        metavar="D",
        batches=True,
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each invalid value."""
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        if not isinstance(value, list):
            yield from out_of_range(name, value, low, high)
            continue
        example = listed(getattr(Settings(), name))
        if len(value) != 2 or min(value) <= 0:
            yield Conflict(f"{flag_name(name)} {text(value)}: expected 2 positive numbers, such as {example}")
        elif value[0] > value[1] or (name == "rand_crop_scale" and value[1] > 1):
            problem = "MIN exceeds MAX" if value[0] > value[1] else "MAX exceeds 1"
            yield Conflict(f"{flag_name(name)} {text(value)}: {problem}; use a range such as {example}")
        else:
            yield from out_of_range(name, value, low, high)
    if settings.rotate_degrees > 180:
        yield Conflict(f"--rotate-degrees {settings.rotate_degrees:g}: exceeds 180 degrees; use 180 or less")
    for name, least in LEAST.items():
        if 0 < getattr(settings, name) < least:
            yield Conflict(f"{flag_name(name)} {getattr(settings, name):g}: too small; use 0, or {least:g} or more")


class Augmentation(NamedTuple):
    """An optional random change of training images.

    Attributes:
        flag: name of the flag that controls the change.
        off: value of the flag without the change.
        seeds: indexes of the seeds of its random operators. Each random operator needs its own seed, and no index may
            occur twice, so that a change does not influence the random numbers of other changes.
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
    """Return the explicit seeds of a shard, for the changes in AUGMENTATIONS and the padded crop. DALI assigns seeds to
    all other random operators, such as cropping and flipping, in their order in the graph. Operators with explicit
    seeds, and therefore optional changes, have no effect on the seeds that DALI assigns."""
    count = 1 + max(CROP_SEED, *(index for entry in AUGMENTATIONS for index in entry.seeds))
    return np.random.SeedSequence([seed, shard_id]).generate_state(count).tolist()


def _auto_augment(images, mean, options, seeds):
    """Apply random operations from DALI's suites to each image. trivial: one operation with a random magnitude (Müller
    and Hutter, "TrivialAugment", arXiv:2103.10158). randaug: two operations with the magnitude --auto-augment-magnitude
    (Cubuk et al., "RandAugment", arXiv:1909.13719). If an operation has a signed magnitude, the sign is random.

    DALI's own functions for selecting operations are not used, because they pass the same seed to several random
    operators, which then draw the same numbers, so each operation would always have the same magnitude or sign.
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
    eigenvectors, each multiplied by its eigenvalue and a normally distributed random number with standard deviation
    --lighting."""
    from nvidia.dali import fn, types

    mean = types.Constant(np.float32(mean))
    alpha = fn.random.normal(shape=[3], mean=0, stddev=options.lighting, seed=seeds[0])
    offset = fn.reductions.sum(types.Constant(np.float32(PCA_VECTORS * PCA_VALUES)) * alpha, axes=[1])
    return images, mean - offset


AUGMENTATIONS = (
    Augmentation("auto_augment", "none", (6, 7, 8), _auto_augment),
    Augmentation("color_jitter", 0, (0, 1, 2), _jitter),
    Augmentation("rotate_degrees", 0, (3,), _rotate),
    Augmentation("lighting", 0, (4,), _lighting),
)
