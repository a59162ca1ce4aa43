"""Heat maps: which region of an image determined a class.

The maps are those of Grad-CAM (Selvaraju et al., arXiv:1610.02391): each channel of the last feature map that is larger
than 1x1 is weighted with the gradient of the class's logit, summed over all positions of the channel; the weighted
channels are added, negative values of the sum are replaced with 0, and the result is interpolated bilinearly at the
pixels of the image. In a network that ends with global average pooling and one linear layer, the sum of the gradient is
the class's column of the weights, and the map is the class activation map of Zhou et al. (arXiv:1512.04150). The
gradient of the layers before the last feature map is not computed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from paddle import static
from PIL import Image

from paddle_resnet import graph
from paddle_resnet.data import bad_images
from paddle_resnet.serving import inference, networks, preprocessing
from paddle_resnet.settings.values import network_name
from paddle_resnet.utils import files, logger, outputs
from paddle_resnet.utils.errors import UsageError, core, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddle_resnet.serving.networks import Network

SIDE = 1024  # maximum width and height of an overlay in pixels
# Colors for 0, 1/4 ... 1 of the range of a map, and the weight of the color in the overlay.
COLORS = np.array([(0, 0, 140), (0, 130, 255), (120, 255, 130), (255, 170, 0), (200, 0, 0)], np.float32)
OPACITY = 0.5
UNSEEN = 0.35  # brightness of the margins, which the crop removes


class Unreadable(ValueError):
    """Pillow cannot read an image, although DALI can. The message follows the name of the image."""


class GradCam:
    """Computes class activation maps with Grad-CAM. The network runs in float32 with Paddle's kernels.

    Args:
        network: result of networks.load_checkpoint, in float32 and NCHW. GradCam adds operators to the program of the
            network.
    Attributes:
        description: content of model.json.
    Raises:
        UsageError: the network has no feature map with several positions, or its gradient cannot be computed.
    """

    def __init__(self, network: Network) -> None:
        self.description, self._network, self._exe = network.description, network, network.exe
        features = _last_feature_map(network)
        with static.program_guard(network.program, static.Program()):
            self._one_hot = static.data("one_hot", [None, network.logits.shape[1]], "float32")
            logit = _op("reduce_sum", {"X": _op("elementwise_mul", {"X": network.logits, "Y": self._one_hot})}, dim=[1])
            try:
                [gradient] = static.gradients([logit], [features])
            except Exception as e:  # an operator of a user's network; the errors of Paddle have no common base class
                raise UsageError(f"{_name(network)}: heat maps require a gradient ({core(e)}); {_REMEDY}") from e
            if gradient is None:
                raise UsageError(
                    f"{_name(network)}: heat maps require that the logits depend on the last feature map through "
                    f"operators with gradients; {_REMEDY}"
                )
            # The sum instead of Grad-CAM's mean over all positions only scales the map. With the sum, the mean of a
            # class activation map plus the bias is the logit if only pooling and a linear layer follow the feature map.
            weights = _op("reduce_sum", {"X": gradient}, dim=[2, 3], keep_dim=True)
            weighted = _op("elementwise_mul", {"X": features, "Y": weights})
            self._map = _op("reduce_sum", {"X": weighted}, dim=[1], keep_dim=False)

    def __call__(self, data: bytes, label: int) -> np.ndarray:
        """Return the class activation map of an image file, float32 [h, w]. The map covers the crop that the network
        reads; its positive values increase the logit of the class. For the arguments and exceptions, see overlay."""
        network = self._network
        one_hot = np.zeros([1, network.logits.shape[1]], np.float32)
        one_hot[0, label] = 1
        images = preprocessing.model_input(io.BytesIO(data), self.description)
        feed = {network.images.name: images, self._one_hot.name: one_hot}
        return self._exe.run(network.program, feed=feed, fetch_list=[self._map], scope=network.scope)[0][0]


_REMEDY = "choose a checkpoint of a different network"


def _name(network):
    return network_name(network.args.model_arch_name)


def _op(op_type, inputs, **attrs):
    return graph.operator("grad_cam", op_type, inputs, **attrs)


def _last_feature_map(network):
    """Return the last variable [N, C, h, w] with more than one position that alone connects the images with the logits:
    every path in the program leads through it.

    Raises:
        UsageError: there is no such variable.
    """
    block = graph.block(network.program)
    producers = {name: op for op in block.ops for name in op.output_arg_names}

    def needed(without=None):
        """Return the variables that the logits depend on if `without` is a constant."""
        found, names = {}, [network.logits.name]
        while names:
            if (name := names.pop()) not in found and name != without:
                found[name] = None
                names += producers[name].input_arg_names if name in producers else []
        return found

    order = {name: i for i, op in enumerate(block.ops) for name in op.output_arg_names}
    for name in sorted(needed() & order.keys(), key=order.__getitem__, reverse=True):
        variable = block.var(name)
        is_map = len(variable.shape) == 4 and variable.shape[2] * variable.shape[3] > 1
        if is_map and not variable.persistable and network.images.name not in needed(without=name):
            return variable
    raise UsageError(
        f"{_name(network)}: heat maps require a feature map [N, C, h, w] with several positions on all paths from the "
        f"images to the logits; {_REMEDY}"
    )


def open_model(path: str | Path, device: str = "cpu", model_arch_name: str | None = None) -> GradCam:
    """Open a checkpoint for overlay(). For the arguments, see inference.open_model.

    Raises:
        UsageError: the path is an export, or see networks.load_checkpoint and GradCam.
    """
    if inference.is_export(Path(path)):
        raise UsageError(
            f"{path}: heat maps require a gradient, which exported networks do not have; use the checkpoint"
        )
    return GradCam(networks.load_checkpoint(path, device, model_arch_name=model_arch_name))


def overlay(model: GradCam, data: bytes, label: int) -> bytes:
    """Draw the heat map of a class over an image.

    Args:
        model: result of open_model.
        data: content of an image file.
        label: index of the class whose map is drawn.
    Returns:
        JPEG file that shows the entire image, turned upright and reduced to at most SIDE pixels per side. Margins that
        the network does not read are dark.
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


def heat_map(model: GradCam, data: bytes, label: int) -> np.ndarray:
    """Return the heat map of a class on the pixels of an overlay, from 0 to 1, float64 [H, W]; NaN in the margins. For
    the arguments and exceptions, see overlay."""
    size = _upright(data).shape[:2]
    return _on_image(model(data, label), size, model.description["preprocessing"])


def _upright(data):
    try:
        return preprocessing.upright_rgb(Image.open(io.BytesIO(data)))
    except Exception as e:  # the errors of Pillow have no common base class
        raise Unreadable(f"has no heat map, because Pillow cannot read it ({core(e)})") from e


def _on_image(cam: np.ndarray, size: tuple[int, ...], description: dict[str, Any]) -> np.ndarray:
    """Replace the negative values of a map with 0 (Selvaraju et al., equation 2), scale it from 0 to 1, and interpolate
    it linearly at the pixels of an overlay for an image of `size` [H, W]. `description` is the entry "preprocessing" of
    model.json."""
    cam = np.maximum(cam, 0)
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


def drawer(folder: str, model: GradCam) -> Callable[[int, str, int], str | None]:
    """Return a function draw(number, path, label) that writes the heat map of an image to the folder. draw() returns
    the path of the heat map, or None if the image cannot be read, and raises UsageError if a file cannot be written."""

    def draw(number, path, label):
        try:
            with files.open_regular(path, bad_images.MAX_BYTES) as file:
                drawn = overlay(model, file.read(), label)
        except (Unreadable, OSError) as e:
            problem = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else e
            logger.write_line(printable(f"{path} {problem}"), sys.stderr)
            return None
        # The number of the image makes file names unique. Only the end of the image's name is kept, because file
        # systems limit a name to 255 bytes.
        name = os.fsdecode(os.fsencode(os.path.basename(path))[-200:])
        target = os.path.join(folder, f"{number:06d}_{name}.jpg")
        try:
            os.makedirs(folder, exist_ok=True)
            with outputs.replaced(target) as partial:
                partial.write_bytes(drawn)
        except OSError as e:
            raise UsageError(f"--heat-map {folder}: cannot be written ({e.strerror}); choose a different folder") from e
        return target

    return draw
