"""Read data sets that store images as arrays of pixels: CIFAR, MNIST, STL-10, SVHN, and the .npz files
of MedMNIST and Keras.

The images are stored as PNG files, which preserve all pixels. Each format has a function that returns the images and
labels of a file. Each process keeps in memory the arrays of the last eight splits that it has read.
"""

import functools
import gzip
import io
import math
import os
import pickle
import re
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_resnet.data import sniffer
from paddle_resnet.data.images import Image, readable
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.tools.sources.table_files import read_lines
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.files import open_regular

LIMIT = 1 << 30  # maximum size in bytes of a file or array that each process reads as a whole
_DEPTH = 2  # maximum number of folders between the source and its files
_CIFAR_SHAPE, _STL10_SHAPE = (3, 32, 32), (3, 96, 96)
# The only names that a pickle of CIFAR may refer to, because these names build arrays and cannot run other code.
_PICKLED = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
}
_IDX_UINT8 = 8  # element type in the header of an idx file


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in arrays.

    Args:
        source: folder, or a single .npz file.
        options: Options. label_column chooses between the labels of CIFAR-100, which are fine_labels by default.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: there are no arrays, none for training, or those of several data sets; a file is missing, damaged or
            too large; labels do not match the images; or a label is not a class.
    """
    format, parts = _parts(source)
    entries = []
    for part in parts:
        images, labels = _load(part.path, format, part.split)
        labels = _chosen(part.path, labels, options.label_column)
        if len(labels) != len(images):
            numbers = f"{counted(len(images), 'image')}, but {counted(len(labels), 'label')}"
            raise UsageError(f"{part.path}: has {numbers}; use matching files")
        entries += [(part, i, label) for i, label in enumerate(labels.tolist())]
    names = _names(os.path.dirname(parts[0].path), options.label_column)
    labels = [label for *_, label in entries]
    if format == "stl10":  # the labels of STL-10 start at 1
        labels = [label - 1 for label in labels]
    classes, names = splits.numbered(source, labels, names, lambda i: f"{entries[i][0].path}: image {entries[i][1]}")
    found = {}
    for (part, i, _), label in zip(entries, classes, strict=True):
        name = f"{os.path.basename(part.path)}@{part.split}-{i}/{i:06d}.png"
        image = Image(name, part.path, label, read_png, (format, part.split, i))
        found.setdefault(part.split, []).append(image)
    return splits.train_and_val(source, found), names


def read_png(path: str, format: str, split: str, index: int) -> bytes:
    """Return an image of an array as a PNG file.

    Args:
        path: file with the array.
        format: key of FORMATS.
        split: "train", "val" or "test".
        index: number of the image in the array.
    Raises:
        UsageError: the file is damaged.
    """
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(_load(path, format, split)[0][index])).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class _Part:
    """A file with arrays, and the split to read from it."""

    path: str
    split: str


def _parts(source):
    """Return (format, [_Part]) of the arrays in a folder. Raise UsageError unless the folder contains one data set."""
    if os.path.isfile(source):
        return "npz", [_Part(source, split) for split in _npz_splits(source)]
    found = {}
    for folder, name in _files(source, "", _DEPTH):
        for format, (pattern, _) in FORMATS.items():
            if match := re.fullmatch(pattern, name, re.IGNORECASE):
                split = "train" if match["split"].lower() in ("train", "data_batch") else "test"
                key = folder, format, match.groupdict().get("prefix", "")
                found.setdefault(key, {})[name.removesuffix(".gz")] = split, os.path.join(source, folder, name)
    if not found:
        raise UsageError(f"{source}: contains no arrays of a known data set; use the folder that contains them")
    paths = [path for files in found.values() for _, path in files.values()]
    npz = [path for path in paths if path.endswith(".npz")]
    if len(found) > 1 or len(npz) > 1:
        remedy = (
            f"import one data set, such as {npz[0]}"
            if npz
            else "move the files of each data set to a folder of its own"
        )
        shown = ", ".join(os.path.relpath(path, source) for path in paths[:5])
        raise UsageError(f"{source}: contains several data sets ({shown}); {remedy}")
    ((_, format, _),) = found
    if npz:
        return format, [_Part(npz[0], split) for split in _npz_splits(npz[0])]
    (files,) = found.values()
    numbers = {int(match[1]) for name in files if (match := re.fullmatch(r"data_batch_(\d)(\.bin)?", name))}
    if numbers and (missing := sorted({1, 2, 3, 4, 5} - numbers)):
        ending = ".bin" if any(name.endswith(".bin") for name in files) else ""
        raise UsageError(f"{source}: has no data_batch_{missing[0]}{ending}; download the data set again")
    return format, [
        _Part(path, split) for split, path in sorted(files.values(), key=lambda file: (file[0] != "train", file[1]))
    ]


def _files(root, folder, depth):
    """Yield (folder relative to root, name) of each file. A file comes after its compressed form, NAME.gz, so that the
    caller uses the uncompressed file."""
    entries = sorted(os.scandir(os.path.join(root, folder)), key=lambda e: (not e.name.endswith(".gz"), e.name))
    for entry in entries:
        if entry.is_file():
            yield folder, entry.name
        elif depth and not entry.name.startswith("."):
            yield from _files(root, os.path.join(folder, entry.name), depth - 1)


def _chosen(path, labels, column):
    """Return the labels of a file as int64 [n]."""
    if column is not None and column not in labels:
        raise UsageError(f"--label-column {column}: {path} has the labels {', '.join(labels)}; choose one of them")
    labels = np.asarray(next(iter(labels.values())) if column is None else labels[column])
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise UsageError(
            f"{path}: has {labels.shape[1]} labels per image; the import writes one label per image, so use a "
            "different data set"
        )
    if labels.dtype.kind not in "iu":
        raise UsageError(f"{path}: its labels have the type {labels.dtype}; use whole numbers")
    return labels.reshape(-1).astype(np.int64)


def _names(folder, column):
    """Return the class names that CIFAR and STL-10 store next to the arrays, or None."""
    for name in ("batches.meta", "meta"):
        if os.path.isfile(path := os.path.join(folder, name)):
            meta = _pickled(path)
            key = f"{(column or 'fine_labels').removesuffix('s')}_names"
            names = meta.get("label_names", meta.get(key))
            if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
                raise UsageError(f"{path}: contains no class names; download it again")
            return [name.decode(errors="replace") if isinstance(name, bytes) else name for name in names]
    key = "coarse" if column == "coarse_labels" else "fine"
    for name in ("batches.meta.txt", f"{key}_label_names.txt", "class_names.txt"):
        if os.path.isfile(path := os.path.join(folder, name)):
            return [line.strip() for line in read_lines(path) if line.strip()]
    return None


@functools.lru_cache(maxsize=8)
def _load(path, format, split):
    """Return (images as uint8 [n, height, width] or [n, height, width, channels], {name: labels [n]}) of a split."""
    with readable(path):
        try:
            images, labels = FORMATS[format][1](path, split)
        except UsageError:
            raise
        except Exception as e:  # scipy and the decompressors raise many types of exceptions for damaged files
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise UsageError(f"{path}: damaged ({type(e).__name__}: {str(e)[:200]}); download it again") from e
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3, 4)):
        shape = " x ".join(map(str, images.shape))
        raise UsageError(
            f"{path}: contains {images.dtype} values of shape {shape}, not images of 8 bits with 1, 3 or 4 channels; "
            "write uint8 values of shape N x HEIGHT x WIDTH x CHANNELS"
        )
    return images[..., 0] if images.ndim == 4 and images.shape[3] == 1 else images, labels


class Unpickler(pickle.Unpickler):
    """Reads only arrays, numbers, text and containers of these. Raises pickle.UnpicklingError for references to other
    names, and any other exception for damaged files."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED:
            raise pickle.UnpicklingError(f"refers to {module}.{name}, which data sets do not need")
        return super().find_class(module, name)


def _pickled(path):
    """Return the dict in a pickle that contains only arrays, numbers, text and containers of these. Raise UsageError
    for any other content."""
    try:
        with readable(path), open_regular(path, LIMIT) as f:
            content = Unpickler(f, encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("not a dict")
    except UsageError:
        raise
    except Exception as e:  # a damaged pickle can raise any exception
        raise UsageError(f"{path}: not a data set of CIFAR, or damaged ({str(e)[:200]}); download it again") from e
    return {key.decode(errors="replace") if isinstance(key, bytes) else key: value for key, value in content.items()}


def _cifar(path, split):
    if path.endswith(".bin"):
        return _cifar_binary(path)
    content = _pickled(path)
    images = np.asarray(content["data"]).reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1)
    labels = {key: content[key] for key in ("labels", "fine_labels", "coarse_labels") if key in content}
    return images, labels or {"labels": content["labels"]}


def _cifar_binary(path):
    """Read a binary file of CIFAR. CIFAR-10 stores a label before each image, CIFAR-100 a coarse and a fine label."""
    is_100 = os.path.basename(path) in ("train.bin", "test.bin")
    rows = _mapped(path, (2 if is_100 else 1) + math.prod(_CIFAR_SHAPE))
    labels = {"fine_labels": rows[:, 1], "coarse_labels": rows[:, 0]} if is_100 else {"labels": rows[:, 0]}
    return rows[:, 2 if is_100 else 1 :].reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1), labels


def _mapped(path, width):
    """Return a file as uint8 [n, width]."""
    size = os.path.getsize(path)
    if size == 0 or size % width:
        raise ValueError(f"{size} bytes are not a multiple of {width}")
    return np.memmap(path, np.uint8, "r").reshape(-1, width)


def _idx(path, split):
    images = _idx_array(path)
    start, images_name = os.path.split(path)
    name = re.sub(r"images([-.])idx3", r"labels\1idx1", images_name).removesuffix(".gz")
    candidates = [os.path.join(start, candidate) for candidate in (name, f"{name}.gz")]
    labels = next(filter(os.path.isfile, candidates), None)
    if labels is None:
        raise UsageError(f"{path}: has no {name}; add the file with the labels")
    if "emnist" in images_name.lower():  # the images of EMNIST are transposed
        images = images.transpose(0, 2, 1)
    return images, {"labels": _idx_array(labels)}


def _idx_array(path):
    """Read an idx file: two zero bytes, the type of the elements, the number of dimensions, and the size of each."""
    with open_regular(path) as f, gzip.GzipFile(fileobj=f) if path.endswith(".gz") else f as content:
        head = content.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _IDX_UINT8 or head[3] not in (1, 3):
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(content.read(4 * head[3]), ">u4").astype(int).tolist()
        if len(shape) != head[3] or math.prod(shape) > LIMIT:
            raise ValueError(f"has the shape {shape}")
        data = content.read(math.prod(shape) + 1)
    if len(data) != math.prod(shape):
        raise ValueError(f"does not contain {math.prod(shape)} bytes after the header")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _stl10(path, split):
    """Read STL-10, which stores images channel by channel, and each channel column by column."""
    labels = path.replace("_X.bin", "_y.bin")
    if not os.path.isfile(labels):
        raise UsageError(f"{path}: has no {os.path.basename(labels)}; add the file with the labels")
    images = _mapped(path, math.prod(_STL10_SHAPE)).reshape(-1, *_STL10_SHAPE).transpose(0, 3, 2, 1)
    return images, {"labels": _mapped(labels, 1)[:, 0]}


def _svhn(path, split):
    """Read SVHN, in which the label of the digit 0 is 10."""
    from scipy import io as matlab

    with open_regular(path, LIMIT) as f:
        content = matlab.loadmat(f, variable_names=("X", "y"))
    return content["X"].transpose(3, 0, 1, 2), {"labels": content["y"].reshape(-1) % 10}


def _npz_splits(path):
    try:
        with readable(path), open_regular(path) as f, zipfile.ZipFile(f) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path}: damaged ({e}); download it again") from e
    keys = sniffer.npz_keys(sizes)
    if not keys:
        raise UsageError(
            f"{path}: contains the arrays {', '.join(sorted(sizes)[:5])}, but not train_images and train_labels, or "
            "x_train and y_train; write it with these names"
        )
    largest = max((key for pair in keys.values() for key in pair), key=sizes.get)
    if sizes[largest] > LIMIT:
        raise UsageError(
            f"{path}: {largest} has {sizes[largest] / 1e9:.1f} GB, more than the limit of {LIMIT / 1e9:.1f} GB; use "
            "smaller images"
        )
    return keys


def _npz(path, split):
    with open_regular(path) as f, np.load(f, allow_pickle=False) as arrays:
        images, labels = sniffer.npz_keys(arrays.files)[split]
        return arrays[images], {"labels": arrays[labels]}


# {format: (pattern of file names, function that reads the images and labels of a split from a file)}. The group
# `prefix` distinguishes data sets.
FORMATS = {
    "cifar": (r"(?P<split>data_batch|test_batch|train|test)(_\d)?(\.bin)?", _cifar),
    "idx": (r"(?P<prefix>.*?)(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?", _idx),
    "stl10": (r"(?P<split>train|test)_X\.bin", _stl10),
    "svhn": (r"(?P<split>train|test)_32x32\.mat", _svhn),
    "npz": (r"(?P<split>).+\.npz", _npz),
}
