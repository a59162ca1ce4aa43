"""Pictures to look at, from the images that the network receives."""

import numpy as np


def pictures(args, images):
    """Undo layout and normalisation.

    Args:
        args: flags.
        images: "data" of a batch on the host, in any float type and in the layout of --data-layout.
    Returns:
        uint8 [N, H, W, 3] in RGB.
    """
    pixels = np.array(images, dtype=np.float32)
    if args.data_layout == "NCHW":
        pixels = pixels.transpose(0, 2, 3, 1)
    pixels = (pixels[..., :3] * args.normalize_std + args.normalize_mean) / args.normalize_scale
    return pixels.clip(0, 255).round().astype(np.uint8)
