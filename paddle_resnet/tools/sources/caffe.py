"""Read LMDBs of Caffe with any names, also with images that are stored as pixels instead of image files."""

import io
import os

import numpy as np

from paddle_resnet.data.formats import lmdb
from paddle_resnet.data.images import Image
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils.errors import UsageError

PATTERN = r"data\.mdb"


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in LMDBs.

    Args:
        source: folder with an LMDB for each split.
        options: Options of the import.
    Returns:
        ({split: [Image]}, None, because an LMDB contains no class names)
    Raises:
        UsageError: there are no LMDBs, or none for training; an LMDB is damaged; or a label is not a class.
    """
    entries = []
    for split, paths in splits.files(source, PATTERN, options).items():
        for path in map(os.path.dirname, paths):
            for key in lmdb.keys(path):
                datum = lmdb.read_datum(path, key)
                entries.append((split, path, key, datum.label))
    labels = [label for *_, label in entries]
    if not labels:
        raise UsageError(f"{source}: contains no images; use the folder that contains them")
    numbers, _ = splits.numbered(source, labels, None, lambda i: f"{entries[i][1]}: record {_text(entries[i][2])}")
    found = {}
    for (split, path, key, _), label in zip(entries, numbers, strict=True):
        name = f"{os.path.relpath(path, source)}@{_text(key)}/{len(found.get(split, [])):08d}"
        found.setdefault(split, []).append(Image(name, path, label, read_image, (key,)))
    return splits.train_and_val(source, found), None


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
    Image.fromarray(np.ascontiguousarray(pixels[::-1].transpose(1, 2, 0).squeeze())).save(out, "PNG")
    return out.getvalue()


def _text(key):
    return key.decode(errors="replace")
