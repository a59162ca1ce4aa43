"""Random changes of training images."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag, out_of_range
from paddle_resnet.settings.values import flag_name, listed, text
from paddle_resnet.utils import numbers

# Values outside these ranges make DALI fail or produce pixels that are not finite.
RANGES = {"rand_crop_scale": (1e-6, 1), "rand_crop_ratio": (1e-3, 1e3), "color_jitter": (0, 100), "lighting": (0, 100)}
# Smaller nonzero values make DALI fail, because the range of its random numbers would be empty in float32.
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
        "strength of color jitter: brightness, contrast and saturation are scaled by factors from 1-S to 1+S",
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
