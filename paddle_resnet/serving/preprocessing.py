"""Image preprocessing for an exported network, using only PIL and NumPy. The resulting pixel values (0 to 255) differ
by at most 2 from those that DALI computes on a CPU.

Each export contains a copy of this file, preprocess.py. The file imports nothing from this project, so the copy can be
run on its own: `python preprocess.py IMAGE...`
"""

from __future__ import annotations

import json
import reprlib
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

CONVENTIONS = {
    "decode": "the orientation in the EXIF block (in TIFF, tag 274) is applied, but not that in XMP or text; gray, "
    "palette and CMYK become RGB; alpha is dropped; 16 bits are scaled to 8 bits; chroma is interpolated",
    "resize": "the scale is resize_short / shorter side on both axes, with the source centered; the longer side is "
    "rounded half up; pixels beyond an edge repeat the edge; results are rounded to integers from 0 to 255. If "
    "center_crop is [H, W], the scale is the smallest at which the image covers resize_short / min(H, W) times H and "
    "W, each rounded half up",
    "interp": "linear reads the four nearest pixels; triangular, cubic (a = -0.5) and lanczos3 widen when the image is "
    "downsampled",
    "crop": "central; margins are rounded half up (58.5 to 59)",
    "normalize": "(level * scale - mean) / std",
}


def _cubic(x):
    """Return the cubic kernel with a = -0.5 at x (Keys, "Cubic Convolution Interpolation for Digital Image Processing",
    1981)."""
    return np.where(x < 1, (1.5 * x - 2.5) * x**2 + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))


# {name: (function that returns the weight at a distance x >= 0, radius, whether downsampling widens the filter)}
FILTERS = {
    "linear": (lambda x: np.maximum(1 - x, 0), 1, False),
    "triangular": (lambda x: np.maximum(1 - x, 0), 1, True),
    "cubic": (_cubic, 2, True),
    "lanczos3": (lambda x: np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0), 3, True),
}


LAYOUTS = {"float32": "NCHW", "uint8": "NHWC"}
ORIENTATION = 0x0112  # EXIF tag
MAX_PIXELS = 2**28  # maximum number of pixels in an image file, as in training
MAX_JSON_BYTES = 2**24
MAX_SIDE = 8192  # maximum height and width of resized images in pixels, as in training


def _is_in(low, high, kinds):
    return lambda value: type(value) in kinds and low <= value <= high


def _is_list_of(is_valid, size=None):
    return lambda value: isinstance(value, list) and size in (None, len(value)) and all(map(is_valid, value))


def _is_text(value):
    return isinstance(value, str)


_is_side = _is_in(1, MAX_SIDE, (int,))
_is_sides = _is_list_of(_is_side, 2)
_is_scale = _is_in(1e-12, 1e12, (int, float))
# Checks for model.json: {required entry: function that checks its value}. The list of files is checked separately.
SCHEMA = {
    "preprocessing.resize_short": _is_side,
    "preprocessing.center_crop": lambda value: _is_side(value) or _is_sides(value),
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


def problem(model: Any) -> str | None:
    """Return a short description of the first error in the content of model.json, or None if the content is valid."""
    for path, is_valid in SCHEMA.items():
        value = model
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return f"{path} is missing"
            value = value[name]
        if not is_valid(value):
            return f"{path} is {reprlib.repr(value)[:100]}"
    crop, (_, outputs) = sides(model["preprocessing"]), model["output"]["shape"]
    layout, shape = LAYOUTS[model["input"]["dtype"]], model["input"]["shape"]
    expected = [None, 3, *crop] if layout == "NCHW" else [None, *crop, 3]
    if (model["input"]["layout"], shape) != (layout, expected):
        return f"input.shape is {shape} in {model['input']['layout']}, not {expected} in {layout}"
    if model["preprocessing"]["resize_short"] < min(crop):
        return f"preprocessing.resize_short is less than center_crop {min(crop)}"
    if model["preprocessing"]["resize_short"] * max(crop) > MAX_SIDE * min(crop):
        return f"preprocessing.resize_short is too large for center_crop {crop}"
    if "multi_label" in model:
        thresholds = model["multi_label"].get("thresholds") if isinstance(model["multi_label"], dict) else None
        if not _is_list_of(_is_in(0, 1, (int, float)), outputs)(thresholds):
            return f"multi_label.thresholds is {reprlib.repr(thresholds)[:100]}"
    if outputs is None or len(model["classes"]) > outputs:
        return f"classes has {len(model['classes'])} names, and output.shape is {model['output']['shape']}"
    return None


def sides(preprocessing: dict[str, Any]) -> list[int]:
    """Return the crop size [H, W]. If the crop is square, center_crop is a single number."""
    crop = preprocessing["center_crop"]
    return crop if isinstance(crop, list) else [crop, crop]


def orientation(image: Image.Image) -> int:
    """Return the orientation in the EXIF block (in TIFF, tag 274) of an opened image file: 1 to 8. As in training,
    orientations in XMP or text are ignored, and so is a WebP EXIF block with the prefix of JPEG files."""
    if image.format == "TIFF":
        value = image.tag_v2.get(ORIENTATION)
    else:
        if image.format == "PNG":
            image.load()  # the EXIF block may follow the pixels
        block, exif = image.info.get("exif", b""), Image.Exif()
        if not (image.format == "WEBP" and block.startswith(b"Exif")):
            exif.load(block)
        value = exif.get(ORIENTATION)
    return value if value in range(2, 9) else 1


def upright_rgb(image: Image.Image) -> np.ndarray:
    """Return the pixels of an opened image file, converted to RGB and turned upright: uint8 [H, W, 3].

    Raises:
        ValueError: the pixels are floating-point numbers, or integers outside 0 to 65535.
        Exception: the file is damaged; the type of the exception varies.
    """
    # Without this assignment, Pillow would also follow the orientation in XMP and, in PNG files, in text.
    image.getexif()[ORIENTATION] = orientation(image)
    image.load()
    if image.format != "TIFF":  # Pillow turns TIFF images when it loads them
        image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels are not supported")
    if image.mode.startswith("I"):  # 16 bits; Pillow would clip the levels to 255
        levels = np.asarray(image)
        if levels.min() < 0 or levels.max() > 65535:
            raise ValueError("pixels outside 0 to 65535 are not supported")
        return np.rint(levels[..., None] / np.float32(257)).astype(np.uint8).repeat(3, axis=2)
    return np.asarray(image.convert("RGB"))


def pixels(image: str | Path | BinaryIO | Image.Image, preprocessing: dict[str, Any]) -> np.ndarray:
    """Resize and crop an image.

    Args:
        image: path, file or PIL image. A PIL image must have been opened from a file object instead of a path, because
            Pillow 13.0 otherwise scrambles gray TIFF images with an EXIF orientation.
        preprocessing: the entry "preprocessing" of model.json.
    Returns:
        uint8 [H, W, 3], RGB.
    Raises:
        OSError: the file cannot be opened.
        ValueError, Exception: see upright_rgb.
    """
    if isinstance(image, (str, Path)):
        with open(image, "rb") as file:
            return pixels(file, preprocessing)
    if not isinstance(image, Image.Image):
        image = Image.open(image)
    levels = upright_rgb(image).astype(np.float32)
    crop, interp = sides(preprocessing), preprocessing["interp"]
    factor = scale(levels.shape[:2], preprocessing)
    for side in crop:  # first resize the height, from [H, W, 3] to [W, side, 3], then the width
        weights = _weights(levels.shape[0], factor, side, interp)
        levels = np.moveaxis(np.tensordot(levels, weights, axes=(0, 1)), 2, 1)
    return np.rint(levels).clip(0, 255).astype(np.uint8)


def scale(size: tuple[int, ...], preprocessing: dict[str, Any]) -> float:
    """Return the factor by which an image of `size` [H, W] is resized before the crop."""
    crop = sides(preprocessing)
    covered = [int(preprocessing["resize_short"] * side / min(crop) + 0.5) for side in crop]
    return max(covered[0] / size[0], covered[1] / size[1])


def crop_start(size: int, scale: float, crop: int) -> float:
    """Return the position of the crop's first edge on one axis, in pixels of the image from its first edge. The
    position is negative if the crop repeats pixels of the edge.

    Args:
        size: height or width of the image.
        scale: result of scale().
        crop: height or width of the crop.
    """
    resized = int(size * scale + 0.5)
    return int((resized - crop + 1) / 2) / scale + (size - resized / scale) / 2


def _weights(size, scale, crop, interp):
    """Return the matrix that resizes and crops one axis, float32 [crop, size]."""
    weight, radius, widens = FILTERS[interp]
    centers = (np.arange(crop) + 0.5) / scale + crop_start(size, scale, crop) - 0.5
    width = max(1, 1 / scale) if widens else 1
    taps = np.floor(centers - radius * width).astype(int)[:, None] + np.arange(int(2 * radius * width) + 3)
    weights = weight(np.abs(taps - centers[:, None]) / width)
    matrix = np.zeros((crop, size), np.float32)
    rows = np.arange(crop)[:, None]
    np.add.at(matrix, (rows, taps.clip(0, size - 1)), weights / weights.sum(axis=1, keepdims=True))
    return matrix


def preprocess(image: str | Path | BinaryIO | Image.Image, preprocessing: dict[str, Any]) -> np.ndarray:
    """Like pixels(), with the same exceptions, but return normalized values: float32 [3, H, W]."""
    mean, std = (np.array(preprocessing[name], np.float32) for name in ("mean", "std"))
    levels = pixels(image, preprocessing) * np.float32(preprocessing["scale"])
    return ((levels - mean) / std).transpose(2, 0, 1)


def model_input(image: str | Path | BinaryIO | Image.Image, model: dict[str, Any]) -> np.ndarray:
    """Return an image as a batch of size 1, with the type and layout that `model`, the content of model.json,
    specifies. For exceptions, see pixels()."""
    dtype, layout = model["input"]["dtype"], model["input"]["layout"]
    if dtype == "uint8":
        return pixels(image, model["preprocessing"])[None]
    normalized = preprocess(image, model["preprocessing"])
    return np.ascontiguousarray(normalized if layout == "NCHW" else normalized.transpose(1, 2, 0), dtype)[None]


def read_model(path: str | Path) -> dict[str, Any]:
    """Return the checked content of model.json.

    Args:
        path: path of the file, str or Path.
    Raises:
        ValueError: the file cannot be read, or its content is not valid.
    """
    path = Path(path)
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:  # opening a pipe would block
            raise ValueError(f"not a regular file, or larger than {MAX_JSON_BYTES / 2**20:g} MiB")
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path}: cannot be read ({_reason(e)}); copy the export folder again") from e
    if reason := problem(model):
        raise ValueError(f"{path}: not a valid description of a network ({reason}); copy the export folder again")
    return model


def main(paths: list[str]) -> int:
    """Print the shape and range of each preprocessed image. If model.onnx exists and onnxruntime can run it, also print
    the classes of each image that chosen() returns. Finally, print the recorded top1 or mAP and its decoder, if
    model.json contains both.

    Returns:
        exit code: 0 for success, 1 if some files cannot be used, 2 if there are no arguments or model.json is unusable.
    """
    folder = Path(__file__).parent
    if not paths:
        return _report("usage: python preprocess.py IMAGE...", 2)
    try:
        model = read_model(folder / "model.json")
    except ValueError as e:
        return _report(e, 2)
    Image.MAX_IMAGE_PIXELS = None  # _checked_input applies the limit that training uses
    session = None
    if (folder / "model.onnx").is_file():
        try:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.add_session_config_entry("session.x64quantprecision", "1")  # prevent overflows of INT8 sums
            # onnxruntime 1.16 requires the argument `providers`.
            providers = ["CPUExecutionProvider"]
            session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=providers)
        except ImportError:
            _report("onnxruntime: cannot be imported; to print predictions, run `pip install onnxruntime`")
        except Exception as e:  # the errors of onnxruntime have no common base class
            _report(f"{folder / 'model.onnx'}: cannot be used for predictions ({_reason(e)}); export it again")
    code = 0
    for path in paths:
        try:
            images = _checked_input(path, model)
            (probabilities,) = session.run(None, {model["input"]["name"]: images})[0] if session else ((),)
        except Exception as e:  # Pillow raises many types of errors for damaged files
            code = _report(f"{path}: cannot be used ({_reason(e)}); choose a different image", 1)
            continue
        print(f"{_printable(path)}: {images.dtype} {list(images.shape)}, from {images.min():g} to {images.max():g}")
        for label in chosen(np.asarray(probabilities), model):
            name = dict(enumerate(model["classes"])).get(label, label)
            print(f"  {probabilities[label]:.6f}  {_printable(name)}")
    print(_decoder_text(model.get("evaluated")), end="")
    return code


def chosen(probabilities: np.ndarray, model: dict) -> np.ndarray:
    """Return the classes to show for an image, the most probable first: the five most probable or, for a multi-label
    network, all whose probability is not below the threshold of the class.

    Args:
        probabilities: probabilities of an image, floats [classes].
        model: content of model.json.
    """
    order = np.argsort(-probabilities, kind="stable")
    if "multi_label" not in model:
        return order[:5]
    return order[probabilities[order] >= np.asarray(model["multi_label"]["thresholds"])[order]]


def _decoder_text(evaluated):
    """Return a line that states which decoder the recorded top1 or mAP belongs to, or "" if it is not recorded."""
    evaluated = evaluated if isinstance(evaluated, dict) else {}
    pixels = {"cpu": "pixels as computed here, within 2 levels", "gpu": "JPEG pixels within 6 levels of those here"}
    name = "map" if "map" in evaluated else "top1"
    value, decoder = evaluated.get(name), evaluated.get("decoder")
    if not isinstance(value, (int, float)) or decoder not in ("cpu", "gpu"):
        return ""
    name = {"map": "mAP"}.get(name, name)
    return f"recorded {name} {value:.6g}: validation images decoded on a {decoder.upper()} ({pixels[decoder]})\n"


def _checked_input(path, model):
    """Like model_input, but raise ValueError unless the path is a regular file with at most MAX_PIXELS pixels."""
    if not Path(path).is_file():
        raise ValueError("not a regular file")
    with open(path, "rb") as file, Image.open(file) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS:,}")
        return model_input(image, model)


def _reason(error):
    return " ".join(str(error).split()) or type(error).__name__


def _report(message, code=0):
    print(_printable(message), file=sys.stderr)
    return code


def _printable(value):
    """Convert a value to text, and escape control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid UTF-8
    sys.exit(main(sys.argv[1:]))
