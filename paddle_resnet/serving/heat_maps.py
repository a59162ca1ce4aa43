"""Heat maps: which region of an image determined a class.

The maps are class activation maps (Zhou et al., arXiv:1512.04150). In a network that ends with global average pooling
and one linear layer, the logit of a class is the mean of a map over all positions, plus a bias. The map is the product
of the last feature map and the class's column of the weights, so it needs no gradient.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from paddle_resnet.models import user_file
from paddle_resnet.serving import inference, preprocessing
from paddle_resnet.utils.errors import UsageError, core

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddle_resnet.serving.model import Model

SIDE = 1024  # maximum width and height of an overlay in pixels
# Colors for 0, 1/4 ... 1 of the range of a map, and the weight of the color in the overlay.
COLORS = np.array([(0, 0, 140), (0, 130, 255), (120, 255, 130), (255, 170, 0), (200, 0, 0)], np.float32)
OPACITY = 0.5
UNSEEN = 0.35  # brightness of the margins, which the crop removes


class Unreadable(ValueError):
    """Pillow cannot read an image, although DALI can. The message follows the name of the image."""


def open_model(
    path: str | Path, device: str = "cpu", model_arch_name: str | None = None, precision: str | None = None
) -> Model:
    """Open a checkpoint as a Model for overlay(), which returns [probabilities, features] and has a classifier. For the
    arguments, see inference.open_model.

    Raises:
        UsageError: the path is an export, the network has a different head, or see inference.open_checkpoint.
    """
    if inference.is_export(Path(path)):
        raise UsageError(
            f"{path}: heat maps require the last feature map, which exported networks do not return; use the checkpoint"
        )
    options = {"precision": precision, "sizes": [1], "engine": "Paddle", "features": True}
    return inference.open_checkpoint(path, device, model_arch_name, **options)


def drawer(checkpoint: str | Path, model_arch_name: str) -> Callable[[bytes, int], bytes]:
    """Return a function draw(content of an image file, label), which returns overlay() for a checkpoint on the CPU. The
    first call opens the checkpoint, and raises UsageError like open_model.

    Args:
        checkpoint: folder of a checkpoint.
        model_arch_name: value of --model-arch-name.
    """

    @functools.cache
    def model():
        return open_model(checkpoint, model_arch_name=model_arch_name if user_file.split(model_arch_name) else None)

    return lambda data, label: overlay(model(), data, label)


def overlay(model: Model, data: bytes, label: int) -> bytes:
    """Draw the heat map of a class over an image.

    Args:
        model: result of open_model.
        data: content of an image file.
        label: the class.
    Returns:
        JPEG file. It shows the entire image, turned upright and reduced to at most SIDE pixels per side. Margins that
        the network does not see are dark.
    Raises:
        Unreadable: Pillow cannot read the image.
    """
    pixels, heat = _upright(data), heat_map(model, data, label)
    small = Image.fromarray(pixels).resize(heat.shape[::-1], Image.Resampling.BOX)
    levels = np.asarray(small).astype(np.float32)
    is_seen = np.isfinite(heat)
    place = np.where(is_seen, heat, 0)[..., None] * (len(COLORS) - 1)
    below = place.astype(int).clip(max=len(COLORS) - 2)
    colors = COLORS[below[..., 0]] + (place - below) * (COLORS[below[..., 0] + 1] - COLORS[below[..., 0]])
    levels = np.where(is_seen[..., None], (1 - OPACITY) * levels + OPACITY * colors, UNSEEN * levels)
    file = io.BytesIO()
    Image.fromarray(np.rint(levels).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def class_activation(model: Model, data: bytes, label: int) -> np.ndarray:
    """Return the class activation map of an image file, float32 [h, w], without the bias. It covers the image's crop.
    For the arguments and exceptions, see overlay."""
    images = preprocessing.model_input(io.BytesIO(data), model.description)
    _, features = model.outputs(images)
    if model.description["input"]["layout"] == "NCHW":
        features = np.moveaxis(features, 1, 3)
    return np.asarray(features)[0].astype(np.float32) @ model.classifier[:, label]


def heat_map(model: Model, data: bytes, label: int) -> np.ndarray:
    """Return the heat map of a class on the pixels of an overlay, from 0 to 1, float64 [H, W]; NaN in the margins. For
    the arguments and exceptions, see overlay."""
    size = _upright(data).shape[:2]
    return _on_image(class_activation(model, data, label), size, model.description["preprocessing"])


def _upright(data):
    try:
        return preprocessing.upright_rgb(Image.open(io.BytesIO(data)))
    except Exception as e:  # the errors of Pillow have no common base class
        raise Unreadable(f"has no heat map, because Pillow cannot read it ({core(e)})") from e


def _on_image(cam: np.ndarray, size: tuple[int, ...], description: dict[str, Any]) -> np.ndarray:
    """Scale a map from 0 to 1, and interpolate it linearly at the pixels of an overlay for an image of `size` [H, W].
    `description` is the entry "preprocessing" of model.json."""
    lowest, highest = cam.min(), cam.max()
    cam = (cam - lowest) / (highest - lowest) if highest > lowest else np.zeros_like(cam)
    factor = min(1, SIDE / max(size))
    scale, weights, is_seen = preprocessing.scale(size, description), [], []
    for length, crop, cells in zip(size, preprocessing.sides(description), cam.shape, strict=True):
        shown = max(1, round(length * factor))
        start = preprocessing.crop_start(length, scale, crop)
        at = ((np.arange(shown) + 0.5) * length / shown - start) * scale / crop  # from 0 to 1 in the crop
        cell = (at * cells - 0.5).clip(0, cells - 1)
        weights.append(np.maximum(0, 1 - np.abs(cell[:, None] - np.arange(cells))))
        is_seen.append((at >= 0) & (at <= 1))
    heat = weights[0] @ cam @ weights[1].T
    return np.where(is_seen[0][:, None] & is_seen[1], heat, np.nan)
