"""TFRecord shards: IMAGE_ROOT/train-00000-of-00008 ... and val-... or validation-..., also NAME-train-..., each with an
index. A split in a single file is train.tfrecord.

Each record is a tf.train.Example with the features image/encoded (bytes) and image/class/label (one int64).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from paddle_resnet.data import indexes, shards, split_names
from paddle_resnet.data.images import Image
from paddle_resnet.utils.errors import UsageError, import_command
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

_SUFFIX = r"\.tfrec(ords?)?"
NAMES = rf"(?P<set>(.*[-_.])?{{split}})({_SUFFIX}|({_SUFFIX})?-\d+-of-(?P<total>\d+)({_SUFFIX})?)"
EXAMPLE = "{}-00000-of-00001"
OVERHEAD = 16  # bytes per record in addition to the payload: length and two checksums
IMAGE, LABEL = "image/encoded", "image/class/label"
SYNSET, TEXT = "image/class/synset", "image/class/text"  # optional names of the class


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return the paths of a split's TFRecord shards."""
    return split_names.find(image_root, mode, NAMES)


def _scan(f):
    lines, size, offset = [], os.fstat(f.fileno()).st_size, 0
    while offset < size:
        try:
            record = payload(f, size - offset)
        except ValueError as e:
            raise UsageError(f"{f.name}: damaged at byte {offset} ({e}); write or copy it again") from e
        if not lines:
            _check_features(f.name, record)
        length = len(record) + OVERHEAD
        lines.append(f"{offset} {length}\n")
        offset += length
    return lines


def _check_features(shard, record):
    """Raise UsageError if the first record of a shard is an example with different features, so that a shard of a
    different program is not indexed."""
    names = set()
    with contextlib.suppress(ValueError):  # the loader reports a damaged record
        names = {*example_features(record)}
    if names and names.isdisjoint({IMAGE, LABEL}):
        raise _other_features(shard, 0, names)


def _other_features(shard, offset, names):
    expected = f"expected one image in {IMAGE} and one number in {LABEL}"
    is_named = {IMAGE, LABEL} <= names
    remedy = {} if is_named else {"remedy": f"run {import_command(os.path.dirname(shard) or '.')}"}
    reason = f"{expected}, but the features are {', '.join(sorted(names)[:5])}"
    return shards.no_label(shard, offset, reason, **remedy)


def _rows(data, f, shard_size):
    rows = indexes.numbers(data.split(), shard_size).reshape(-1, 2)
    ends = rows.sum(axis=1)
    if len(rows) == 0 or rows[0, 0] != 0 or (rows[1:, 0] != ends[:-1]).any() or ends[-1] != shard_size:
        raise ValueError
    if rows[:, 1].min() <= OVERHEAD:
        raise ValueError
    return rows, rows


def _kept(index, kept):
    return [f"{offset} {size}\n" for offset, size in index.images[kept].tolist()]


INDEX = indexes.Kind(_scan, _rows, _kept)


def index(image_root: str, mode: Mode, paths: list[str], skip: frozenset[str] = frozenset()) -> shards.Records:
    """Open the indexes of a split's shards, see shards.index. Raise UsageError also if a shard is missing."""
    total = max(int(split_names.match(NAMES, os.path.basename(path), mode)["total"] or 1) for path in paths)
    if total != len(paths):
        raise UsageError(
            f"--image-root {image_root}: has {len(paths)} of {total} {mode.value} shards; add the missing ones"
        )
    return shards.index(image_root, mode, paths, skip, INDEX, "tfrecord", read_label)


def read(
    records: shards.Records, name: str, shard_id: int, num_shards: int, shuffle: bool, seed: int
) -> tuple[Any, Any]:
    """Add DALI's TFRecord reader to the pipeline under construction, see data/formats/__init__.py."""
    from nvidia.dali import fn
    from nvidia.dali.tfrecord import FixedLenFeature, VarLenFeature, int64, string

    features = fn.readers.tfrecord(
        path=records.paths,
        index_path=records.index_paths,
        features={
            IMAGE: FixedLenFeature((), string, ""),
            # DALI never uses the default value -1. With FixedLenFeature, an empty or float label would come back as
            # arbitrary memory; with VarLenFeature, it has no elements.
            LABEL: VarLenFeature(int64, -1),
        },
        dont_use_mmap=True,
        **shards.reader_arguments(name, shard_id, num_shards, shuffle, records.size, seed),
        **shards.shard_order(shuffle, seed),
    )
    return features[IMAGE], shards.single(features[LABEL])


def verify(image: Image) -> tuple[bytes, int]:
    """Return (image file, stored label) of a record. Raise UsageError if the record is damaged, or is not an image with
    one label."""
    offset, size, *_ = image.place
    with open_regular(image.path) as f:
        return _read_record(f, offset, size)


def read_label(f: BinaryIO, offset: int, size: int) -> int:
    """Return the label of a record of an open file. For exceptions, see `verify`."""
    return _read_record(f, offset, size)[1]


def _read_record(f, offset, size):
    f.seek(offset)
    try:
        return _read_example(f.name, offset, payload(f, size))
    except ValueError as e:
        if isinstance(e, UsageError):
            raise
        raise shards.no_label(f.name, offset, e) from e


def read_class(shard: str, offset: int, size: int) -> tuple[int | None, str | None, str | None]:
    """Return (label, synset, text) of a TFRecord example. A feature without exactly one value is None. Raise
    UsageError if the record is damaged."""
    with open_regular(shard) as f:
        f.seek(offset)
        try:
            features = example_features(payload(f, size))
        except ValueError as e:
            raise shards.no_label(shard, offset, e) from e
    labels = features[LABEL].int64_list.value
    names = (features[name].bytes_list.value for name in (SYNSET, TEXT))
    texts = (value[0].decode(errors="replace") if len(value) == 1 else None for value in names)
    return (labels[0] if len(labels) == 1 else None, *texts)


def _read_example(shard, offset, example):
    features = example_features(example)
    names = {*features}
    images, labels = features[IMAGE].bytes_list.value, features[LABEL].int64_list.value
    if not images or len(labels) != 1:
        raise _other_features(shard, offset, names)
    return images[0], labels[0]


def example_features(example: bytes) -> Any:
    """Return {name: tf.train.Feature} of a serialized tf.train.Example. Raise ValueError if the Example is damaged."""
    from google.protobuf.message import DecodeError
    from tfrecord import example_pb2

    try:
        return example_pb2.Example.FromString(example).features.feature
    except DecodeError as e:
        raise ValueError("not a tf.train.Example") from e


def payload(f: BinaryIO, size: int) -> bytes:
    """Return the payload of the TFRecord at the current file position, after verifying both checksums.

    Args:
        f: the open file.
        size: maximum length of the record in bytes, including OVERHEAD.
    Raises:
        ValueError: no complete record starts at the position, or a checksum does not match.
    """
    import crc32c

    head = f.read(12)
    length = int.from_bytes(head[:8], "little")
    if _masked(crc32c.crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
        raise ValueError("no record starts at this position")
    if length > size - OVERHEAD:
        raise ValueError("the record is truncated")
    content = f.read(length)
    if _masked(crc32c.crc32c(content)) != int.from_bytes(f.read(4), "little"):
        raise ValueError("the checksum does not match")
    return content


def _masked(crc):
    """Mask a CRC for TFRecord: rotate it right by 15 bits and add a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@contextlib.contextmanager
def write(path: str) -> Iterator[Callable[[int, bytes, str, int], str]]:
    """Yield a function write(number, image file, extension, label) that appends a record to a new file, and returns the
    line of the index for this record."""
    from tfrecord import TFRecordWriter

    def append(number, image, extension, label):
        start = writer.file.tell()
        writer.write({IMAGE: (image, "byte"), LABEL: (label, "int")})
        return f"{start} {writer.file.tell() - start}\n"

    writer = TFRecordWriter(path)
    with contextlib.closing(writer):
        yield append
