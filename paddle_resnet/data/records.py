"""Read single records for the checks before step 1 and for the data-set tools. In training, DALI reads all records.

This module imports neither DALI nor Paddle, so that the tools' worker processes start without these imports.
"""

import contextlib
import functools
import os
import re
import struct

from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp")
IMAGE_ENDINGS = f"{', '.join(IMAGE_SUFFIXES[:-1])} or {IMAGE_SUFFIXES[-1]}"  # for messages
IMAGE_EXTENSIONS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
RECORDIO_MAGIC = 0xCED7230A
# Fields: number of labels after the header, the label if this number is 0, two numbers that identify the image.
RECORDIO_HEAD = struct.Struct("<IfQQ")
TFRECORD_OVERHEAD = 16  # bytes per record in addition to the payload: length and two checksums
TAR_MEMBER = "tar"  # kind of an image in an archive that `dataset import` reads; training cannot read such archives
LABEL_DIGITS = 9  # maximum length of a label in a tar file; the DALI pipeline uses the same limit
TFRECORD_IMAGE, TFRECORD_LABEL = "image/encoded", "image/class/label"
TFRECORD_SYNSET, TFRECORD_TEXT = "image/class/synset", "image/class/text"  # optional names of the class


@contextlib.contextmanager
def readable(path):
    """Convert an OSError in the `with` block to a UsageError. The message contains the file name from the OSError or,
    if it has none, `path`."""
    try:
        yield
    except OSError as e:
        name = os.fsdecode(e.filename or path)
        raise UsageError(f"{name}: cannot be read ({e.strerror or e}); make it readable, or remove it") from e


def read(image):
    """Read one image from a data set.

    Args:
        image: listing.Image.
    Returns:
        (content of the image file as stored, label). The label is an int, or a float if a RecordIO file is damaged. The
        label is not checked against the classes. image.label_offset is subtracted from the label of a record.
    Raises:
        UsageError: the record is damaged or is not an image with one label.
        OSError: the file cannot be read.
    """
    data, label = _read_stored(image)
    return data, label - image.label_offset


def _read_stored(image):
    if image.kind == "lmdb":
        return _read_datum(image.path, image.place)
    with open_regular(image.path) as f:
        if image.kind is None:
            return f.read(), image.label
        if image.kind == TAR_MEMBER:
            offset, size = image.place
            f.seek(offset)
            return f.read(size), image.label
        offset, size, label_offset, label_size = image.place
        if image.kind != "webdataset":
            return _read_record(f, image.kind, offset, size)
        f.seek(offset)
        return f.read(size), _read_digits(f, label_offset, label_size)


def read_label(shard, kind, offset, size):
    """Read the label of one record. For exceptions, see `read`."""
    with open_regular(shard) as f:
        if kind == "webdataset":
            return _read_digits(f, offset, size)
        return _read_record(f, kind, offset, size)[1]


def _read_digits(f, offset, size):
    f.seek(offset)
    text = f.read(size)
    if not re.fullmatch(rb"[0-9]{1,%d}\s*" % LABEL_DIGITS, text):
        shown = ascii(text[:20].decode(errors="replace"))
        raise _no_label(f.name, offset, f"the label {shown} is not a number of up to {LABEL_DIGITS} digits")
    return int(text)


def _read_record(f, kind, offset, size):
    f.seek(offset)
    try:
        if kind == "tfrecord":
            return _read_example(tfrecord_payload(f, size))
        data = _read_recordio(f)
        count, label, _, _ = RECORDIO_HEAD.unpack_from(data)
        start = RECORDIO_HEAD.size
        if count > 1:
            raise UsageError(
                f"{f.name}: the record at byte {offset} has {count} labels; this program trains one label per image, "
                "so write the record again with one label"
            )
        if count == 1:  # the label is stored after the header, and the header's own label has no meaning
            (label,) = struct.unpack_from("<f", data, start)
            start += 4
        return data[start:], int(label) if label.is_integer() else label
    except (ValueError, struct.error) as e:
        if isinstance(e, UsageError):
            raise
        raise _no_label(f.name, offset, e) from e


def _no_label(shard, offset, reason):
    reason = " ".join(str(reason).split())
    return UsageError(f"{shard}: the record at byte {offset} is not an image with a label ({reason}); write it again")


def recordio_end(f, offset, size):
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
        if magic != RECORDIO_MAGIC or offset > size:
            raise ValueError
        if flag in (0, 3):
            return offset


def _read_recordio(f):
    """Return the payload of the record at the current file position, with its parts joined. recordio_end describes the
    parts. Raise ValueError or struct.error if the record is damaged."""
    parts = []
    while True:
        magic, length = struct.unpack("<II", f.read(8))
        if magic != RECORDIO_MAGIC:
            raise ValueError("no record starts at this position")
        flag, length = length >> 29, length & (1 << 29) - 1
        parts.append(f.read(length))
        f.seek(-length % 4, os.SEEK_CUR)
        if flag in (0, 3):
            return magic.to_bytes(4, "little").join(parts)


def tfrecord_payload(f, size):
    """Return the payload of the TFRecord at the current file position, after verifying both checksums.

    Args:
        f: the open file.
        size: maximum length of the record in bytes, including TFRECORD_OVERHEAD.
    Raises:
        ValueError: no complete record starts at the position, or a checksum does not match.
    """
    import crc32c

    head = f.read(12)
    length = int.from_bytes(head[:8], "little")
    if _masked(crc32c.crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
        raise ValueError("no record starts at this position")
    if length > size - TFRECORD_OVERHEAD:
        raise ValueError("the record is truncated")
    payload = f.read(length)
    if _masked(crc32c.crc32c(payload)) != int.from_bytes(f.read(4), "little"):
        raise ValueError("the checksum does not match")
    return payload


def _masked(crc):
    """Mask a CRC for TFRecord: rotate it right by 15 bits and add a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_class(shard, offset, size):
    """Return (label, synset, text) of a TFRecord example. Features without a value are None. For exceptions, see
    `read`."""
    with open_regular(shard) as f:
        f.seek(offset)
        try:
            features = _features(tfrecord_payload(f, size))
        except ValueError as e:
            raise _no_label(shard, offset, e) from e
    labels = features[TFRECORD_LABEL].int64_list.value
    names = (features[name].bytes_list.value for name in (TFRECORD_SYNSET, TFRECORD_TEXT))
    texts = (value[0].decode(errors="replace") if len(value) == 1 else None for value in names)
    return (labels[0] if len(labels) == 1 else None, *texts)


def _features(example):
    from google.protobuf.message import DecodeError
    from tfrecord import example_pb2

    try:
        return example_pb2.Example.FromString(example).features.feature
    except DecodeError as e:
        raise ValueError("not a tf.train.Example") from e


def _read_example(example):
    features = _features(example)
    images, labels = features[TFRECORD_IMAGE].bytes_list.value, features[TFRECORD_LABEL].int64_list.value
    if not images or len(labels) != 1:
        raise ValueError(f"expected one image in {TFRECORD_IMAGE} and one number in {TFRECORD_LABEL}")
    return images[0], labels[0]


@functools.cache
def datum_class():
    """Return the protobuf message class for records in a Caffe LMDB. The class has only those fields of caffe.proto
    that encoded images use."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    fields = (("data", 4, field.TYPE_BYTES), ("label", 5, field.TYPE_INT32), ("encoded", 7, field.TYPE_BOOL))
    file = descriptor_pb2.FileDescriptorProto(name="paddle_resnet/datum.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    for name, number, kind in fields:
        message.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


@contextlib.contextmanager
def _lmdb_transaction(folder):
    import lmdb
    from google.protobuf.message import DecodeError

    try:
        with _lmdb_environment(os.path.realpath(folder)).begin() as transaction:
            yield transaction
    except (lmdb.Error, DecodeError) as e:
        raise UsageError(f"{folder}: not a Caffe LMDB, or damaged ({e}); write or copy it again") from e


@functools.cache
def _lmdb_environment(folder):
    import lmdb

    # Cached, because a process must not open an LMDB twice.
    environment = lmdb.open(folder, readonly=True, lock=False)
    # LMDB and DALI map the file into memory, so reading beyond its end would kill the process.
    size = os.path.getsize(os.path.join(folder, "data.mdb"))
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise lmdb.CorruptedError(f"data.mdb has {size} bytes instead of at least {needed}")
    return environment


def lmdb_keys(folder):
    """Return the keys of all records in an LMDB, sorted.

    Raises:
        UsageError: the folder is not an LMDB.
    """
    with _lmdb_transaction(folder) as transaction:
        return list(transaction.cursor().iternext(keys=True, values=False))


def lmdb_labels(folder, count):
    """Return the number of records in a Caffe LMDB, and the labels of about `count` evenly spaced records.

    Raises:
        UsageError: the folder is not an LMDB, or a record is not an encoded image with a label.
    """
    keys = lmdb_keys(folder)
    every = max(1, len(keys) // count)
    spread = keys[::every] + (keys[-1:] if (len(keys) - 1) % every else [])
    return len(keys), [_read_datum(folder, key)[1] for key in spread]


def _read_datum(folder, key):
    with _lmdb_transaction(folder) as transaction:
        record = datum_class().FromString(transaction.get(key) or b"")
        if not (record.encoded and record.HasField("label")):
            raise UsageError(
                f"{folder}: record {key.decode(errors='replace')} is not an encoded image with a label; "
                "write encoded images"
            )
        return record.data, record.label
