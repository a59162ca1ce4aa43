"""Image files of a source. Files in formats that training cannot read are converted to PNG, which preserves all
pixels."""

import io
import os

from paddle_resnet.data.images import CONVERTED_SUFFIXES, Image, readable
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular


def image(root: str, path: str, label: int) -> Image:
    """Return the Image of a file. `path` is relative to the source `root`."""
    kind = read_as_png if path.lower().endswith(CONVERTED_SUFFIXES) else None
    return Image(path, os.path.join(root, path), label, kind)


def read_as_png(path: str) -> bytes:
    """Return the first picture of an image file as a PNG file. Raise UsageError if the file cannot be read or
    decoded."""
    from PIL import Image as Picture

    with readable(path), open_regular(path) as f:
        data = f.read()
    out = io.BytesIO()
    try:
        with Picture.open(io.BytesIO(data)) as picture:
            picture.save(out, "PNG")
    except Exception as e:  # Pillow raises many types of exceptions for damaged files
        raise UsageError(f"{path}: cannot be decoded ({str(e)[:200]}); download it again, or remove it") from e
    return out.getvalue()
