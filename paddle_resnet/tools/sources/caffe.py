"""Read LMDBs of Caffe with any names, also with images that are stored as pixels instead of image files; and LMDBs with
pairs of records such as image-000000001, an image file, and label-000000001, a number or a class name; and LMDBs with
pickled tuples of an image file and its label."""

import io
import os
import re

import numpy as np

from paddle_resnet.data.formats import lmdb
from paddle_resnet.data.images import Image
from paddle_resnet.tools.sources import arrays, splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils.errors import UsageError, counted

PATTERN = r"data\.mdb"


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in LMDBs.

    Args:
        source: folder with an LMDB for each split.
        options: Options of the import.
    Returns:
        ({split: [Image]}, class names, or None if labels are numbers)
    Raises:
        UsageError: there are no LMDBs, or none for training; an LMDB is damaged; an image has no label; a label
            is not a class; or a class with validation images has no training images.
    """
    entries = []
    for split, paths in splits.files(source, PATTERN, options).items():
        for path in map(os.path.dirname, paths):
            keys = lmdb.keys(path)
            if pairs := _pairs(path, keys):
                entries += ((split, path, key, _label(path, twin), lmdb.read_value) for key, twin in pairs.items())
                continue
            records = [key for key in keys if not key.startswith(b"__")]  # __keys__ and __len__ describe the LMDB
            if records and _unpickled(path, records[0]):
                entries += ((split, path, key, _record(path, key)[1], read_pickled) for key in records)
                continue
            for key in keys:
                try:
                    entries.append((split, path, key, lmdb.read_datum(path, key).label, read_image))
                except UsageError as e:
                    if entries:
                        raise
                    shown = ", ".join(map(_text, keys[:3]))
                    raise UsageError(
                        f"{path}: has the keys {shown}, whose records are neither those of Caffe nor pairs such as "
                        "image-000000001 and label-000000001; with the program that wrote it, write each image to the "
                        f"folder of its class in train/ or val/ ({e})"
                    ) from e
    labels = [label for *_, label, _ in entries]
    if not labels:
        raise UsageError(f"{source}: contains no images; use the folder that contains them")
    numbers, names = splits.numbered(source, labels, None, lambda i: f"{entries[i][1]}: record {_text(entries[i][2])}")
    found = {}
    for (split, path, key, _, kind), label in zip(entries, numbers, strict=True):
        name = f"{os.path.relpath(path, source)}@{_text(key)}/{len(found.get(split, [])):08d}"
        found.setdefault(split, []).append(Image(name, path, label, kind, (key,)))
    found = splits.train_and_val(source, found)
    splits.check_validation(source, found, names)
    return found, names


def _pairs(path, keys):
    """Return {key of an image: key of its label}, or {} if there are no pairs. Raise UsageError if an image has no
    label, or there are fewer pairs than the record num-samples states."""
    there, pairs = {*keys}, {}
    for key in keys:
        for word in (b"image", b"img"):
            if word in key and (twin := key.replace(word, b"label")) in there:
                pairs[key] = twin
    patterns = {_pattern(key) for key in pairs}
    for key in keys:
        if key not in pairs and _pattern(key) in patterns:
            raise UsageError(f"{path}: record {_text(key)} has no label; add its label, or delete the record")
    stated = lmdb.read_value(path, b"num-samples") if pairs else b""
    if stated.isdigit() and int(stated) > len(pairs):
        raise UsageError(
            f"{path}: contains {counted(len(pairs), 'image')}, but num-samples is {int(stated)}; write the LMDB again, "
            "or correct num-samples"
        )
    return pairs


def _pattern(key):
    """Return a key with # instead of each number."""
    return re.sub(rb"\d+", b"#", key)


def _unpickled(path, key):
    """Return (image file, label) of a record that is a pickled tuple of both, or None for any other record."""
    try:
        image, label = arrays.Unpickler(io.BytesIO(lmdb.read_value(path, key)), encoding="bytes").load()
    except UsageError:
        raise
    except Exception:  # a damaged pickle can raise any exception
        return None
    return (image, label) if isinstance(image, bytes) and type(label) in (int, str) else None


def _record(path, key):
    record = _unpickled(path, key)
    if record is None:
        raise UsageError(f"{path}: record {_text(key)} is not a pickled image file with a label; write it again")
    return record


def _label(path, key):
    text = lmdb.read_value(path, key).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else text


def read_pickled(path: str, key: bytes) -> bytes:
    """Return the image file in a record that is a pickled tuple of an image file and its label. Raise UsageError for
    any other record."""
    return _record(path, key)[0]


def read_image(path: str, key: bytes) -> bytes:
    """Return the image file in a record or, if the record contains pixels, a PNG file with these pixels. Caffe stores
    pixels as [channels, height, width] in the order blue, green, red.

    Raises:
        UsageError: the record is damaged, or its pixels are not those of a gray or color image with 8 bits per channel.
    """
    from PIL import Image

    datum = lmdb.read_datum(path, key)
    if datum.encoded:
        return datum.data
    shape = datum.channels, datum.height, datum.width
    if datum.channels not in (1, 3) or len(datum.data) != np.prod(shape, dtype=np.int64) or not datum.data:
        raise UsageError(
            f"{path}: record {_text(key)} has {len(datum.data)} bytes of pixels of shape "
            f"{' x '.join(map(str, shape))}, which is not a gray or color image with 8 bits per channel; write "
            "encoded images, as `convert_imageset -encoded` does"
        )
    pixels = np.frombuffer(datum.data, np.uint8).reshape(shape)
    out = io.BytesIO()
    pixels = pixels[0] if len(pixels) == 1 else pixels[::-1].transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, "PNG")
    return out.getvalue()


def _text(key):
    return key.decode(errors="replace")
