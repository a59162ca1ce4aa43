"""Images as an exported network wants them, in PIL and NumPy alone. Equal to the evaluation pixels of DALI on a CPU to
one of 255 levels.

The export writes this file into its folder as preprocess.py. It imports nothing of the project and runs on its own:
`python preprocess.py IMAGE...`
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

CONVENTIONS = {
    "decode": "the EXIF orientation is applied; gray, palette and CMYK become RGB; alpha is dropped",
    "resize": "the scale is resize_short / shorter side on both axes, with the source centred; the longer side rounds "
    "half up; pixels beyond an edge repeat the edge; results round to whole levels from 0 to 255",
    "interp": "linear reads the four pixels around a point; triangular, cubic (a = -0.5) and lanczos3 widen when the "
    "image shrinks",
    "crop": "central; half a pixel of margin rounds up (58.5 to 59)",
    "normalize": "(level * scale - mean) / std",
}


def _cubic(x):
    """Keys's kernel with a = -0.5: Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981."""
    return np.where(x < 1, (1.5 * x - 2.5) * x**2 + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))


# Name: (weight at a distance x >= 0, radius, whether it widens when the image shrinks).
FILTERS = {
    "linear": (lambda x: np.maximum(1 - x, 0), 1, False),
    "triangular": (lambda x: np.maximum(1 - x, 0), 1, True),
    "cubic": (_cubic, 2, True),
    "lanczos3": (lambda x: np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0), 3, True),
}


def pixels(image, preprocessing):
    """Resize and crop an image.

    Args:
        image: path, file or PIL image.
        preprocessing: that entry of model.json.
    Returns:
        uint8 [center_crop, center_crop, 3], RGB.
    """
    if not isinstance(image, Image.Image):
        image = Image.open(image)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        levels = np.rint(np.asarray(image)[..., None] / np.float32(257)).repeat(3, axis=2)
    else:
        levels = np.asarray(image.convert("RGB"), np.float32)
    crop, interp = preprocessing["center_crop"], preprocessing["interp"]
    scale = preprocessing["resize_short"] / min(levels.shape[:2])
    for _ in range(2):  # the first axis, [H, W, 3] to [W, crop, 3], then the other
        weights = _weights(levels.shape[0], scale, crop, interp)
        levels = np.moveaxis(np.tensordot(levels, weights, axes=(0, 1)), 2, 1)
    return np.rint(levels).clip(0, 255).astype(np.uint8)


def _weights(size, scale, crop, interp):
    """The resize and crop of an axis as a matrix, float32 [crop, size]."""
    weight, radius, widens = FILTERS[interp]
    resized = int(size * scale + 0.5)
    margin = int((resized - crop + 1) / 2)
    centres = (margin + np.arange(crop) + 0.5) / scale + (size - resized / scale) / 2 - 0.5
    width = max(1, 1 / scale) if widens else 1
    taps = np.floor(centres - radius * width).astype(int)[:, None] + np.arange(int(2 * radius * width) + 3)
    weights = weight(np.abs(taps - centres[:, None]) / width)
    matrix = np.zeros((crop, size), np.float32)
    rows = np.arange(crop)[:, None]
    np.add.at(matrix, (rows, taps.clip(0, size - 1)), weights / weights.sum(axis=1, keepdims=True))
    return matrix


def preprocess(image, preprocessing):
    """As pixels, then normalised: float32 [3, center_crop, center_crop]."""
    mean, std = (np.array(preprocessing[name], np.float32) for name in ("mean", "std"))
    levels = pixels(image, preprocessing) * np.float32(preprocessing["scale"])
    return ((levels - mean) / std).transpose(2, 0, 1)


def model_input(image, model):
    """An image as a batch of one, in the type and layout that model.json, read as `model`, names."""
    prepare = pixels if model["input"]["dtype"] == "uint8" else preprocess
    return prepare(image, model["preprocessing"])[None]


def main(paths):
    """Print the input that each image becomes and, with model.onnx and onnxruntime, the five likeliest classes."""
    folder = Path(__file__).parent
    model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    session = None
    if (folder / "model.onnx").exists():
        try:
            import onnxruntime

            session = onnxruntime.InferenceSession(folder / "model.onnx")
        except ImportError:
            print("onnxruntime is not installed: no prediction", file=sys.stderr)
    for path in paths:
        images = model_input(path, model)
        print(f"{path}: {images.dtype} {list(images.shape)}, from {images.min():g} to {images.max():g}")
        if session is not None:
            (probabilities,) = session.run(None, {model["input"]["name"]: images})[0]
            for label in np.argsort(-probabilities, kind="stable")[:5]:
                print(f"  {probabilities[label]:.6f}  {model['classes'][label]}")


if __name__ == "__main__":
    main(sys.argv[1:])
