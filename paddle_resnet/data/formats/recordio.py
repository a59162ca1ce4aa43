"""MXNet RecordIO files: IMAGE_ROOT/train.rec and val.rec, also NAME_train.rec ..., with indexes such as train.idx.

A record contains a header with a label or the number of labels that follow it, and an image file. No maintained library
writes RecordIO files, so this module contains a writer.
"""

import os
import struct
from typing import Any, BinaryIO

import numpy as np

from paddle_resnet.data import indexes, shards, split_names
from paddle_resnet.data.images import Image
from paddle_resnet.utils.errors import UsageError, import_command
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

NAMES = r"(?P<set>(.*[-_.])?{split}([-_]?rec)?)\.rec"
EXAMPLE = "{}.rec"
DAMAGED = (ValueError, struct.error)  # exceptions for a damaged file
MAGIC = 0xCED7230A
# Fields: number of labels after the header, the label if this number is 0, two numbers that identify the image.
HEAD = struct.Struct("<IfQQ")
# Maximum number of records per file whose headers are compared with the index, if its keys are 0 to n-1. If the keys of
# an index have gaps, the headers of all records are compared, because a record may be missing in the index.
CHECKED_RECORDS = 256


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return the paths of a split's RecordIO files."""
    return split_names.find(image_root, mode, NAMES)


def _scan(f):
    lines, size, offset = [], os.fstat(f.fileno()).st_size, 0
    while offset < size:
        lines.append(f"{len(lines)}\t{offset}\n")
        try:
            offset = record_end(f, offset, size)
        except ValueError as e:
            raise UsageError(f"{f.name}: damaged at byte {offset}; write or copy it again") from e
    return lines


def _rows(data, f, shard_size):
    keys, offsets = indexes.numbers(data.split(), None).reshape(-1, 2).T
    offsets = np.sort(offsets)  # DALI sorts the offsets and ignores the keys
    ends = np.append(offsets[1:], shard_size)
    if len(offsets) == 0 or offsets[0] != 0 or (ends <= offsets).any():
        raise ValueError
    # If the keys are 0 to n-1, no row is missing, so checking a few headers suffices.
    is_complete = np.array_equal(np.sort(keys), np.arange(len(keys)))
    for i in indexes.spread(len(offsets), CHECKED_RECORDS if is_complete else len(offsets)):
        if record_end(f, int(offsets[i]), shard_size) != ends[i]:
            raise ValueError
    rows = np.stack([offsets, np.zeros_like(offsets)], axis=1)
    return rows, rows


def _kept(index, kept):
    return [f"{i}\t{offset}\n" for i, offset in enumerate(index.images[kept, 0].tolist())]


INDEX = indexes.Kind(_scan, _rows, _kept)


def index(image_root: str, mode: Mode, paths: list[str], skip: frozenset[str] = frozenset()) -> shards.Records:
    """Open the indexes of a split's RecordIO files, see shards.index."""
    return shards.index(image_root, mode, paths, skip, INDEX, "recordio", read_label)


def read(
    records: shards.Records, name: str, shard_id: int, num_shards: int, shuffle: bool, seed: int
) -> tuple[Any, Any]:
    """Add DALI's RecordIO reader to the pipeline under construction, see data/formats/__init__.py."""
    encoded, label = read_stored(records, name, shard_id, num_shards, shuffle, seed)
    return encoded, _to_integer(shards.single(label))


def read_stored(
    records: shards.Records, name: str, shard_id: int, num_shards: int, shuffle: bool, seed: int
) -> tuple[Any, Any]:
    """Like `read`, but return all labels of a record as stored, float32 [k]."""
    from nvidia.dali import fn

    return fn.readers.mxnet(
        path=records.paths,
        index_path=records.index_paths,
        dont_use_mmap=True,
        **shards.reader_arguments(name, shard_id, num_shards, shuffle, records.size, seed),
    )


def _to_integer(number):
    """Add DALI operators that convert a float label to int64. A label that is not an integer becomes -1."""
    from nvidia.dali import fn, types

    label = fn.cast(number, dtype=types.INT64)
    is_whole = fn.cast(fn.cast(label, dtype=types.FLOAT) == number, dtype=types.INT64)
    return (label + 1) * is_whole - 1


def verify(image: Image) -> tuple[bytes, int | float]:
    """Return (image file, stored label) of a record. Raise UsageError if the record is damaged or has several
    labels."""
    with open_regular(image.path) as f:
        return _read_record(f, image.place[0])


def read_label(f: BinaryIO, offset: int, size: int) -> int | float:
    """Return the label of the record at an offset of an open file. For exceptions, see `verify`."""
    return _read_record(f, offset)[1]


def read_content(path: str, offset: int) -> bytes:
    """Return the image file in the record at an offset of a file. Raise UsageError if the record is damaged."""
    with open_regular(path) as f:
        f.seek(offset)
        try:
            return content(f)[1]
        except DAMAGED as e:
            raise shards.no_label(path, offset, e) from e


def read_labels(f: BinaryIO, offset: int) -> tuple[float, ...]:
    """Return all labels of the record at an offset of an open file. Raise UsageError if the record is damaged."""
    f.seek(offset)
    try:
        return content(f)[0]
    except DAMAGED as e:
        raise shards.no_label(f.name, offset, e) from e


def _read_record(f, offset):
    f.seek(offset)
    try:
        labels, image = content(f)
        if len(labels) > 1:
            run = import_command(os.path.dirname(f.name) or ".", "--label-index", "0")
            raise UsageError(
                f"{f.name}: the record at byte {offset} has {len(labels)} labels, but only --multi-label reads more "
                f"than one; train with --multi-label, or choose one label: run {run}"
            )
        return image, int(labels[0]) if labels[0].is_integer() else labels[0]
    except DAMAGED as e:
        if isinstance(e, UsageError):
            raise
        raise shards.no_label(f.name, offset, e) from e


def content(f: BinaryIO) -> tuple[tuple[float, ...], bytes]:
    """Return ((label, ...), image) of the record at the current file position. Raise one of DAMAGED if the record is
    damaged."""
    data = _payload(f)
    count, label, _, _ = HEAD.unpack_from(data)
    start = HEAD.size + 4 * count
    if count == 0:
        return (label,), data[start:]
    # The labels are stored after the header, and the header's own label has no meaning.
    return struct.unpack_from(f"<{count}f", data, HEAD.size), data[start:]


def record_end(f: BinaryIO, offset: int, size: int) -> int:
    """Find the end of a record. A record consists of a single part (flag 0), or of a first part (1), any number of
    middle parts (2) and a last part (3).

    Args:
        f: the open RecordIO file.
        offset: start of the record in bytes.
        size: length of the file in bytes.
    Returns:
        end of the record in bytes, including padding.
    Raises:
        ValueError: no complete record starts at the offset.
    """
    while True:
        f.seek(offset)
        head = f.read(8)
        magic, length = struct.unpack("<II", head) if len(head) == 8 else (0, 0)
        flag, length = length >> 29, length & (1 << 29) - 1
        offset += 8 + length + -length % 4
        if magic != MAGIC or offset > size:
            raise ValueError
        if flag in (0, 3):
            return offset


def _payload(f):
    """Return the payload of the record at the current file position, with its parts joined. record_end describes the
    parts. Raise ValueError or struct.error if the record is damaged."""
    parts = []
    while True:
        magic, length = struct.unpack("<II", f.read(8))
        if magic != MAGIC:
            raise ValueError("no record starts at this position")
        flag, length = length >> 29, length & (1 << 29) - 1
        parts.append(f.read(length))
        f.seek(-length % 4, os.SEEK_CUR)
        if flag in (0, 3):
            return magic.to_bytes(4, "little").join(parts)


class Writer:
    """Appends images to SPLIT.rec.partial and SPLIT.idx.partial. If SPLIT.rec
    exists, it is complete, and the writer only counts its images.

    Records are synced to disk before their index lines are written, so the index never refers to a missing record.
    """

    def __init__(self, output: str, split: str):
        self._paths = [os.path.join(output, split + extension) for extension in (".idx", ".rec")]

    def __enter__(self):
        self._complete = os.path.exists(self._paths[1])
        if self._complete:
            self._count = _count_lines(self._paths[0])
            return self
        self._index, self._records = (open(f"{path}.partial", "a+b") for path in self._paths)  # noqa: SIM115
        self._index.seek(0)
        lines = [line for line in self._index if line.endswith(b"\n")]
        end = 0
        if lines:
            size = os.path.getsize(self._records.name)
            try:
                end = record_end(self._records, int(lines[-1].split()[1]), size)
            except ValueError as e:
                raise UsageError(f"{self._records.name}: damaged; remove its folder and convert again") from e
        self._index.truncate(sum(map(len, lines)))
        self._records.truncate(end)
        self._count, self._end = len(lines), end
        return self

    def __exit__(self, kind, value, trace):
        if not self._complete:
            self._index.close()
            self._records.close()

    def __len__(self):
        return self._count

    def write(self, images: list[tuple[bytes, int]]) -> None:
        """Append [(image file, label)]."""
        lines = []
        for image, label in images:
            lines.append(f"{self._count}\t{self._end}\n")
            # The header contains the number of extra labels (0), the label, the image number, and an unused number.
            record = encode(HEAD.pack(0, label, self._count, 0) + image)
            self._records.write(record)
            self._count += 1
            self._end += len(record)
        _sync(self._records)
        self._index.write("".join(lines).encode())
        _sync(self._index)

    def finish(self) -> None:
        """Give the files their final names."""
        if not self._complete:
            for path in self._paths:
                os.replace(f"{path}.partial", path)


def encode(payload: bytes) -> bytes:
    """Encode a RecordIO record: magic number, flag and length, payload, padding to a multiple of 4 bytes.

    If the payload contains the magic number at an offset that is a multiple of 4 bytes, the record is split there,
    because a reader that scans for the magic number would detect the start of a record inside the payload.

    Args:
        payload: content of the record, fewer than 2**29 bytes.
    """
    magic = struct.pack("<I", MAGIC)
    cuts, i = [], payload.find(magic)
    while i >= 0:
        if i % 4 == 0:
            cuts.append(i)
        i = payload.find(magic, i + 4)  # the magic number cannot overlap with itself
    starts, ends = [0, *(i + 4 for i in cuts)], [*cuts, len(payload)]
    flags = [0] if not cuts else [1, *[2] * (len(cuts) - 1), 3]
    parts = []
    for flag, start, end in zip(flags, starts, ends, strict=True):
        parts += [magic, struct.pack("<I", flag << 29 | end - start), payload[start:end], bytes(-(end - start) % 4)]
    return b"".join(parts)


def _sync(f):
    f.flush()
    os.fsync(f.fileno())


def _count_lines(path):
    with open(path, "rb") as f:
        return sum(1 for _ in f)
