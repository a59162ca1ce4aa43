"""Convert the network's input to images for display."""

from collections.abc import Sequence

import numpy as np


def pictures(
    images: np.ndarray, data_layout: str, scale: float, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    """Convert a batch of network input to RGB images by reversing the layout and the normalization.

    Args:
        images: the "data" array of a batch, on the host, in any floating-point type.
        data_layout: value of --data-layout.
        scale, mean, std: values of the --normalize flags.
    Returns:
        uint8 [N, H, W, 3] in RGB.
    """
    pixels = np.array(images, dtype=np.float32)
    if data_layout == "NCHW":
        pixels = pixels.transpose(0, 2, 3, 1)
    pixels = (pixels[..., :3] * std + mean) / scale
    return pixels.clip(0, 255).round().astype(np.uint8)
