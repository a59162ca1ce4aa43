"""Image size and preprocessing."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag, out_of_range
from paddle_resnet.settings.values import flag_name, listed, text
from paddle_resnet.utils import numbers

# Values outside these ranges make DALI fail or produce pixels that are not finite.
RANGES = {"normalize_scale": (1e-12, 1e12), "normalize_std": (1e-12, 1e12), "normalize_mean": (-1e12, 1e12)}


@dataclass(frozen=True)
class Settings:
    image_shape: list[int] = flag(
        [4, 224, 224],
        "shape of the network input; C: 3 for RGB, or 4 with an additional zero channel, which is faster in NHWC "
        "on a GPU; H,W: height and width of the crop (default: --crop-size and C 4 in NHWC on a GPU, otherwise 3)",
        topic="image",
        kind="network",
        parse=numbers.shape,
        metavar="C,H,W",
        batches=True,
    )
    crop_size: int = flag(
        224,
        "shorter side of the network input in pixels; if not set, the shorter side in --image-shape",
        topic="image",
        kind="preprocessing",
        parse=numbers.side,
        batches=True,
    )
    resize_short: int = flag(
        256,
        "in evaluation, shorter side of an image before the center crop, in pixels; if the crop is not square, "
        "images are scaled to cover H,W times --resize-short / --crop-size (default: the network's ratio, such as "
        "256/224, times --crop-size)",
        topic="image",
        kind="preprocessing",
        parse=numbers.side,
        depends_on=("crop_size", "image_shape"),
    )
    interp: str = flag(
        "triangular",
        "resize filter in training and evaluation; all except linear use antialiasing when they shrink images; "
        "NVIDIA's example uses triangular",
        topic="image",
        kind="preprocessing",
        choices=["linear", "triangular", "cubic", "lanczos3"],
        before="linear",
        batches=True,
    )
    normalize_scale: float = flag(
        1 / 255,
        "factor applied to pixel values before normalization",
        topic="image",
        kind="preprocessing",
        parse=numbers.positive_number,
        batches=True,
    )
    normalize_mean: list[float] = flag(
        [0.485, 0.456, 0.406],
        "mean per channel, which is subtracted from pixel values after multiplication by --normalize-scale",
        topic="image",
        kind="preprocessing",
        parse=numbers.number_list,
        metavar="R,G,B",
        batches=True,
    )
    normalize_std: list[float] = flag(
        [0.229, 0.224, 0.225],
        "standard deviation per channel, by which pixel values are divided after subtraction of --normalize-mean",
        topic="image",
        kind="preprocessing",
        parse=numbers.number_list,
        metavar="R,G,B",
        batches=True,
    )
    tta: str = flag(
        "none",
        "test-time augmentation in evaluation; flip: average the probabilities of each image and its mirror image",
        topic="image",
        kind="saving",
        choices=["none", "flip"],
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each invalid value, and for each conflict between the flags of image size and
    preprocessing."""
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        is_mean = name == "normalize_mean"
        if isinstance(value, list) and (len(value) != 3 or (not is_mean and min(value) <= 0)):
            sign, example = ("" if is_mean else "positive "), listed(getattr(Settings(), name))
            yield Conflict(f"{flag_name(name)} {text(value)}: expected 3 {sign}numbers, such as {example}")
        else:
            yield from out_of_range(name, value, low, high)
    yield from size_conflicts(settings)


def size_conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each conflict between the flags of image size."""
    shape, crop = ",".join(map(str, settings.image_shape)), settings.crop_size
    if len(settings.image_shape) != 3 or settings.image_shape[0] not in (3, 4) or min(settings.image_shape) < 1:
        yield Conflict(f"--image-shape {shape}: expected C,H,W with 3 or 4 channels, such as 4,224,224")
    elif min(settings.image_shape[1:]) != crop:
        yield Conflict(
            f"--image-shape {shape}: its shorter side differs from --crop-size {crop}; use --image-shape "
            f"{settings.image_shape[0]},{crop},{crop} or --crop-size {min(settings.image_shape[1:])}",
            ("image_shape", "crop_size"),
            ("image_shape", "crop_size"),
        )
    elif settings.resize_short * max(settings.image_shape[1:]) > numbers.MAX_SIDE * crop:
        yield Conflict(
            f"--resize-short {settings.resize_short}: with --image-shape {shape}, the longer side before the crop "
            f"exceeds {numbers.MAX_SIDE} pixels; use {numbers.MAX_SIDE * crop // max(settings.image_shape[1:])} or "
            "less",
            ("resize_short",),
            ("image_shape", "crop_size"),
        )
    if settings.resize_short < settings.crop_size:
        yield Conflict(
            f"--resize-short {settings.resize_short}: smaller than --crop-size {settings.crop_size}; use "
            f"{settings.crop_size} or more",
            ("resize_short",),
            ("image_shape", "crop_size"),
        )
