"""Images as an exported network wants them, in PIL and NumPy alone. Equal to the evaluation pixels of DALI on a CPU to
one of 255 levels.

The export writes this file into its folder as preprocess.py. It imports nothing of the project and runs on its own:
`python preprocess.py IMAGE...`
"""

import json
import reprlib
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


LAYOUTS = {"float32": "NCHW", "uint8": "NHWC"}
MAX_PIXELS = 2**28  # of an image that is decoded, as in training
MAX_JSON_BYTES = 2**24


def _is_in(low, high, kinds):
    return lambda value: type(value) in kinds and low <= value <= high


def _is_list_of(is_valid, size=None):
    return lambda value: isinstance(value, list) and size in (None, len(value)) and all(map(is_valid, value))


def _is_text(value):
    return isinstance(value, str)


_is_side = _is_in(1, 8192, (int,))
_is_scale = _is_in(1e-12, 1e12, (int, float))
# What is read from model.json, except for its list of files.
SCHEMA = {
    "preprocessing.resize_short": _is_side,
    "preprocessing.center_crop": _is_side,
    "preprocessing.interp": lambda value: value in tuple(FILTERS),
    "preprocessing.scale": _is_scale,
    "preprocessing.mean": _is_list_of(_is_in(-1e12, 1e12, (int, float)), 3),
    "preprocessing.std": _is_list_of(_is_scale, 3),
    "input.name": _is_text,
    "input.dtype": lambda value: value in tuple(LAYOUTS),
    "input.layout": lambda value: value in tuple(LAYOUTS.values()),
    "input.shape": _is_list_of(lambda side: side is None or _is_side(side), 4),
    "output.shape": _is_list_of(lambda side: side is None or _is_in(1, 2**24, (int,))(side), 2),
    "classes": _is_list_of(_is_text),
}


def problem(model):
    """What is wrong with the content of model.json, as plain data: a few words, or None."""
    for path, is_valid in SCHEMA.items():
        value = model
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return f"{path} is missing"
            value = value[name]
        if not is_valid(value):
            return f"{path} is {reprlib.repr(value)[:100]}"
    side, (_, outputs) = model["preprocessing"]["center_crop"], model["output"]["shape"]
    layout, shape = LAYOUTS[model["input"]["dtype"]], model["input"]["shape"]
    expected = [None, 3, side, side] if layout == "NCHW" else [None, side, side, 3]
    if (model["input"]["layout"], shape) != (layout, expected):
        return f"input.shape is {shape} in {model['input']['layout']}, not {expected} in {layout}"
    if model["preprocessing"]["resize_short"] < side:
        return f"preprocessing.resize_short is less than center_crop {side}"
    if outputs is None or len(model["classes"]) > outputs:
        return f"classes has {len(model['classes'])} names, and output.shape is {model['output']['shape']}"
    return None


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


def read_model(path):
    """The content of model.json.

    Raises:
        ValueError: it cannot be read, or does not describe a network.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:  # opening a pipe would wait for its writer
            raise ValueError(f"not a file of up to {MAX_JSON_BYTES} bytes")
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path}: cannot be read ({_reason(e)}); copy the folder of the export again") from e
    if what := problem(model):
        raise ValueError(f"{path}: does not describe a network ({what}); copy the folder of the export again")
    return model


def main(paths):
    """Print the input that each image becomes and, with model.onnx and onnxruntime, the five most probable classes.

    Returns:
        exit code: 0 done, 1 some files are not images, 2 no images, or no usable model.json.
    """
    folder = Path(__file__).parent
    if not paths:
        return _report("usage: python preprocess.py IMAGE...", 2)
    try:
        model = read_model(folder / "model.json")
    except ValueError as e:
        return _report(e, 2)
    Image.MAX_IMAGE_PIXELS = None  # _checked_input has the limit of training
    session = None
    if (folder / "model.onnx").is_file():
        try:
            import onnxruntime

            session = onnxruntime.InferenceSession(folder / "model.onnx")
        except ImportError:
            _report("onnxruntime is not installed: no prediction")
        except Exception as e:  # onnxruntime's errors have no common class
            _report(f"{folder / 'model.onnx'}: no prediction ({_reason(e)})")
    code = 0
    for path in paths:
        try:
            images = _checked_input(path, model)
            (probabilities,) = session.run(None, {model["input"]["name"]: images})[0] if session else ((),)
        except Exception as e:  # Pillow's plugins raise errors of all kinds at damaged files
            code = _report(f"{path}: cannot be used ({_reason(e)})", 1)
            continue
        print(f"{path}: {images.dtype} {list(images.shape)}, from {images.min():g} to {images.max():g}")
        for label in np.argsort(-np.asarray(probabilities), kind="stable")[:5]:
            print(f"  {probabilities[label]:.6f}  {dict(enumerate(model['classes'])).get(label, label)}")
    return code


def _checked_input(path, model):
    """As model_input, for a regular file of up to MAX_PIXELS."""
    if not Path(path).is_file():
        raise ValueError("not a regular file")
    with Image.open(path) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS:,}")
        return model_input(image, model)


def _reason(error):
    return " ".join(str(error).split()) or type(error).__name__


def _report(message, code=0):
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    sys.exit(main(sys.argv[1:]))
