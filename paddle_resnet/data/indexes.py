"""Locate, create and check the index files of record files. The modules in formats/ parse the content of index files.

DALI requires an index for each TFRecord shard and RecordIO file. DALI also reads tar shards without an index, but then
scans them at startup. Index files use DALI's formats, with offsets and sizes in bytes. TFRecord: one line `offset size`
per record. RecordIO: one line `key offset` per record. WebDataset: a line `v1.1 COUNT`, then one line per sample with
`extension offset size` for each of its files.

This module imports neither DALI nor Paddle, so that the tools' worker processes start without these imports.
"""

import hashlib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from paddle_resnet.data.images import readable
from paddle_resnet.utils import cache, files, logger
from paddle_resnet.utils.errors import UsageError, command
from paddle_resnet.utils.files import open_regular


@dataclass
class Index:
    """Path and content of an index file.

    Attributes:
        path: the index file.
        images: int64 [n, 2], offset and size in bytes of each record; for "webdataset", of each image file. For
            "recordio", all sizes are 0, because the index does not contain sizes.
        labels: int64 [n, 2], offset and size in bytes of each record; for "webdataset", of each .cls file.
    """

    path: str
    images: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.images)


@dataclass(frozen=True)
class Kind:
    """How the index files of a record format are written and checked.

    Attributes:
        scan: scan(file) returns the lines of the index of an open record file. UsageError: the file is damaged.
        head: head(number of records) returns the first lines of an index file.
        rows: rows(content of the index, open record file, its size) returns (images, labels) of Index. ValueError: the
            index does not match the record file.
        kept: kept(Index, bool [n]) returns the lines of a copy of the index that contains only the selected records.
        is_cached: whether open_index prefers the cache folder for a new index, not the folder of the record file.
    """

    scan: Callable[[BinaryIO], list[str]]
    rows: Callable[[bytes, BinaryIO, int], tuple[np.ndarray, np.ndarray]]
    kept: Callable[[Index, np.ndarray], list[str]]
    head: Callable[[int], list[str]] = lambda count: []
    is_cached: bool = False


def open_index(shard: str, kind: Kind, skip: frozenset[int] = frozenset()) -> Index:
    """Open the index of a record file, and create the index if it does not exist.

    A new index is stored in the first writable folder of index_paths.

    Args:
        shard: path of the record file.
        kind: Kind of the record format.
        skip: offsets of images to omit from the index; an index that omits images is written to the cache folder.
    Returns:
        Index of the record file.
    Raises:
        UsageError: the shard cannot be read, is damaged, empty or compressed with gzip; its index does not match; no
            image begins at an offset in `skip`; or a new index cannot be written.
    """
    with readable(shard):
        index = _open_full_index(shard, kind)
        return _reduced_index(index, shard, kind, skip) if skip else index


def _open_full_index(shard, kind):
    if path := existing_index(shard):
        return check_index(shard, path, kind)
    text, failed = scan(shard, kind), []
    for path in index_paths(shard, kind):
        try:
            write_file(path, text)
        except OSError as e:
            failed.append((path, e.strerror))
            continue
        if failed:
            logger.info(f"index of {shard}: {path} ({os.path.dirname(failed[0][0])} cannot be written)")
        return check_index(shard, path, kind)
    places = " nor ".join(f"{path} ({reason})" for path, reason in failed)
    raise UsageError(f"{shard}: has no index, and neither {places} can be written; make one of the folders writable")


def _reduced_index(index, shard, kind, skip):
    """Write a copy of the index, without the images at the skipped offsets, to the cache folder, and return its Index.
    Raise UsageError if there is no image at a skipped offset, or if the copy cannot be written."""
    starts = index.images[:, 0]
    unknown = sorted(skip.difference(starts.tolist()))
    if unknown:
        entry = f"{os.path.basename(shard)}@{unknown[0]}"
        raise UsageError(f"{shard}: no record at byte {unknown[0]}; remove {entry} from --skip-list")
    kept = ~np.isin(starts, list(skip))
    lines = kind.kept(index, kept)
    path = _cached_index_path(shard, skip)
    try:
        write_file(path, "".join(lines).encode(errors="surrogateescape"))
    except OSError as e:
        raise UsageError(
            f"{path}: the index for --skip-list cannot be written ({e.strerror}); make the folder writable"
        ) from e
    return Index(path, index.images[kept], index.labels[kept])


def index_path(shard: str) -> str:
    """Return the path of a shard's index: `train.idx` for `train.rec`, `train-000000.idx` for `train-000000.tar`, and
    the shard's name with `.idx` added for `train-00000-of-00008` (with or without .tfrecord).
    """
    root, extension = os.path.splitext(shard)
    return f"{root}.idx" if extension in (".rec", ".tar") else f"{shard}.idx"


def index_paths(shard: str, kind: Kind) -> tuple[str, str]:
    """Return the paths at which a new index may be stored, preferred path first: in the shard's folder and in the
    user's cache folder. For tar shards, the cache folder comes first, because Hugging Face's `datasets` refuses a
    folder that contains indexes next to the shards."""
    adjacent, cached = index_path(shard), _cached_index_path(shard)
    return (cached, adjacent) if kind.is_cached else (adjacent, cached)


def existing_index(shard: str) -> str | None:
    """Return the path of a shard's index, preferably in the shard's folder, or None if there is no index."""
    return next((path for path in (index_path(shard), _cached_index_path(shard)) if os.path.exists(path)), None)


def _cached_index_path(shard, skip=frozenset()):
    # The name of the cached index depends on the shard's size and modification time, so a modified shard gets a new
    # index.
    shard, state = os.path.realpath(shard), os.stat(shard)
    key = f"{shard} {state.st_size} {state.st_mtime_ns} {sorted(skip)}"
    key = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
    return os.path.join(cache.folder(), "indexes", f"{os.path.basename(shard)}-{key}.idx")


def write_file(path: str, data: bytes) -> None:
    """Write bytes to a file atomically, even if several processes write the same file. Create the folder if
    necessary."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with files.written(path, sync=True) as partial:
        partial.write_bytes(data)


def scan(shard: str, kind: Kind) -> bytes:
    """Scan a record file and return the content of its index file.

    Raises:
        UsageError: the shard is damaged, empty, unreadable or compressed with gzip.
    """
    with readable(shard):
        _check_compression(shard)
        with open_regular(shard) as f:
            lines = kind.scan(f)
    if not lines:
        raise UsageError(f"{shard}: contains no records; remove it or write it again")
    return content(lines, kind)


def content(lines: list[str], kind: Kind) -> bytes:
    """Return the content of an index file with a line per record."""
    return "".join([*kind.head(len(lines)), *lines]).encode(
        errors="surrogateescape"
    )  # file extensions in tar files can be invalid UTF-8


def _check_compression(shard):
    """Raise UsageError if a record file is compressed with gzip."""
    with open_regular(shard) as f:
        if f.read(2) == b"\x1f\x8b":  # the file signature of gzip
            old, new = shlex.quote(shard), shlex.quote(f"{shard}.partial")
            raise UsageError(
                f"{shard}: compressed with gzip, which DALI does not support; run `gzip -dc < {old} > {new} && "
                f"mv {new} {old}`"
            )


def check_index(shard: str, path: str, kind: Kind) -> Index:
    """Read an index file, and compare it with its shard.

    All rows are checked: no record may be missing, repeated or outside the shard, and only the rows of a RecordIO file
    may be out of order. In RecordIO files and tar shards, the headers of some evenly spaced records (of all records, if
    the keys of a RecordIO file have gaps) are also compared with the index.

    Args:
        shard: path of the record file.
        path: path of its index file.
        kind: Kind of the record format.
    Returns:
        Index of the record file.
    Raises:
        UsageError: the index does not match the shard, a sample of a tar shard lacks an image or a label, or the index
            or the shard cannot be read.
    """
    try:
        with readable(shard), open_regular(path) as index, open_regular(shard) as f:
            images, labels = kind.rows(index.read(), f, os.fstat(f.fileno()).st_size)
    except ValueError as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(
            f"{path}: does not match {shard}; remove this index and run "
            f"`{command('dataset', 'index', os.path.dirname(shard) or '.')}`"
        ) from e
    return Index(path, images, labels)


def numbers(texts: list[bytes], limit: int | None) -> np.ndarray:
    """Parse strings of decimal digits as int64 [n]. Raise ValueError if a string contains other characters or more than
    18 digits, or a number exceeds `limit`."""
    if not all(map(bytes.isdigit, texts)) or len(max(texts, key=len, default=b"")) > 18:  # 19 digits can overflow int64
        raise ValueError
    parsed = np.array(texts, dtype=np.int64)
    if limit is not None and (parsed > limit).any():
        raise ValueError
    return parsed


def spread(count: int, at_most: int) -> list[int]:
    """Return up to `at_most` evenly spaced indices from 0 to `count` - 1, including 0 and `count` - 1."""
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).astype(int)).tolist()
