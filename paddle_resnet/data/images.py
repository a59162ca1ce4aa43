"""One image of a data set, and the names of image files.

This module imports neither DALI nor Paddle, so that the tools' worker processes start without these imports.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp")
CONVERTED_SUFFIXES = (".ppm", ".pgm", ".pnm", ".gif")  # formats that `dataset import` stores as PNG
# Formats that neither training nor `dataset import` reads.
_UNSUPPORTED = "heic", "heif", "avif", "jp2", "jxl", "dng", "cr2", "nef", "arw", "psd", "svg", "dcm"
UNSUPPORTED_SUFFIXES = tuple(f".{ending}" for ending in _UNSUPPORTED)
IMAGE_ENDINGS = f"{', '.join(IMAGE_SUFFIXES[:-1])} or {IMAGE_SUFFIXES[-1]}"  # for messages
IMAGE_EXTENSIONS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
# Folders that operating systems and archive tools create, and that are not classes.
SYSTEM_FOLDERS = ("__MACOSX", "lost+found", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information")
TEXT_LIMIT = 1 << 30  # maximum size in bytes of a text file, such as a file list, classes.txt or a skip list


@dataclass(frozen=True, slots=True)  # an import lists 1.3 million images; slots save 100 bytes per image
class Image:
    """One image in a data set.

    Attributes:
        name: name in reports and skip lists. For an image file, the name is the path relative to image_root. For a
            record, the name is FILE@PLACE, where PLACE is the byte offset that DALI reports, the key in an LMDB, or the
            row in a Parquet file. For an image of a source of `dataset import`, the name begins with a path in the
            imported data set or with FILE@PLACE.
        path: the image file, the record file (for an LMDB, its folder), or a file of a source.
        label: label of the image, or None for a record; formats.read_image returns the label of a record.
        kind: None for an image file, the storage format of the record file (a key of formats.FORMATS) or, for a source
            of `dataset import`, the function that returns the content of an image file when it is called with `path`
            and the elements of `place`.
        place: position for formats.read_image, which depends on the format: (offset, size, label offset, label size) in
            bytes, see indexes.Index; the key in an LMDB; (row group, row, label, column of the images) in a Parquet
            file; or further arguments of the function `kind`.
        label_offset: number that formats.read_image subtracts from the stored label of a record.
    """

    name: str
    path: str
    label: int | None
    kind: str | Callable | None = None
    place: tuple | bytes = ()
    label_offset: int = 0

    @property
    def full_name(self) -> str:
        """Return the name to use in messages: PATH or FILE@PLACE, including image_root."""
        return self.path if self.kind is None else f"{self.path}@{self.name.rpartition('@')[2]}"


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Convert an OSError in the `with` block to a UsageError. The message contains the file name from the OSError or,
    if it has none, `path`."""
    try:
        yield
    except OSError as e:
        name = os.fsdecode(e.filename or path)
        raise UsageError(f"{name}: cannot be read ({e.strerror or e}); make it readable, or remove it") from e


def is_system_name(name: str) -> bool:
    """Return whether a name is that of a hidden folder or one of SYSTEM_FOLDERS."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def is_utf8(path: str) -> bool:
    """Return whether a path is valid UTF-8, which DALI requires."""
    return os.fsencode(path) == str(path).encode(errors="replace")


def is_outside(name: str, image_root: str) -> bool:
    """Return whether a path is outside image_root, without resolving links. The path is absolute or relative to
    image_root."""
    if ".." not in name and not name.startswith("/"):
        return False
    root = os.path.abspath(image_root)
    return os.path.commonpath([root, os.path.abspath(os.path.join(root, name))]) != root


def some(names: list, most: int = 5, count: int | None = None) -> str:
    """Return a string that contains the first `most` names, separated by commas, and the number of remaining names.
    `count` is the number of all names if `names` does not contain all."""
    count = count or len(names)
    more = f" and {count - most} more" if count > most else ""
    return f"{', '.join(names[:most])}{more}"


@functools.cache
def log_once(message: str, log: Callable[[str], None]) -> None:
    """Log a message, unless it has been logged before."""
    log(message)


def read_slice(path: str, offset: int, size: int) -> bytes:
    """Read an image that a file, such as an archive, contains uncompressed.

    Args:
        path: path of the file.
        offset, size: position and size of the image in bytes.
    Raises:
        UsageError: the file is truncated.
        OSError: the file cannot be read.
    """
    with open_regular(path) as f:
        data = os.pread(f.fileno(), size, offset)
    if len(data) < size:
        raise UsageError(f"{path}: truncated at byte {offset + len(data)}; copy it again")
    return data
