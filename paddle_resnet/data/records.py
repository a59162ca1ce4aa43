"""Single records of the containers, for the checks before step 1 and for the data-set tools; in training DALI reads.

Imports neither DALI nor Paddle, so that the tools' worker processes start quickly.
"""

import contextlib
import functools
import os
import struct

from utils.errors import UsageError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
IMAGE_EXTENSIONS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
RECORDIO_MAGIC = 0xCED7230A
RECORDIO_HEAD = struct.Struct("<IfQQ")  # number of extra labels, label, two image numbers
TFRECORD_IMAGE, TFRECORD_LABEL = "image/encoded", "image/class/label"


def read(image):
    """Read one image of a data set.

    Args:
        image: listing.Image.
    Returns:
        (bytes of the image file as stored, label: any number, not checked against the classes)
    Raises:
        UsageError: the record is not an image with one label.
        OSError: the file cannot be read.
    """
    if image.kind is None:
        with open(image.path, "rb") as f:
            return f.read(), image.label
    if image.kind == "lmdb":
        return _read_datum(image.path, image.place)
    offset, size, label_offset, label_size = image.place
    if image.kind != "webdataset":
        return _read_record(image.path, image.kind, offset, size)
    with open(image.path, "rb") as f:
        f.seek(offset)
        return f.read(size), read_label(image.path, image.kind, label_offset, label_size)


def read_label(shard, kind, offset, size):
    """Read the label of one record of a container. Errors as for `read`."""
    if kind != "webdataset":
        return _read_record(shard, kind, offset, size)[1]
    with open(shard, "rb") as f:
        f.seek(offset)
        try:
            return int(f.read(size).decode().strip())
        except ValueError as e:
            raise _no_label(shard, offset, e) from e


def _read_record(shard, kind, offset, size):
    with open(shard, "rb") as f:
        f.seek(offset)
        try:
            if kind == "tfrecord":
                return _read_example(f.read(size)[12:-4])
            data = _read_recordio(f)
            flag, label, _, _ = RECORDIO_HEAD.unpack_from(data)
            if flag != 0:
                raise ValueError("it has several labels")
            return data[RECORDIO_HEAD.size :], label
        except (ValueError, struct.error) as e:
            raise _no_label(shard, offset, e) from e


def _no_label(shard, offset, reason):
    reason = " ".join(str(reason).split())
    return UsageError(f"{shard}: the record at byte {offset} has no label ({reason}): write it again")


def recordio_end(f, offset, size):
    """Find the end of a record: one part (flag 0), or a first (1), any number of middle (2) and a last part (3).

    Args:
        f: the open RecordIO file.
        offset: start of the record in bytes.
        size: length of the file in bytes.
    Returns:
        End of the record in bytes, padding included.
    Raises:
        ValueError: no complete record starts there.
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
    """Read the payload of a record and join its parts; recordio_end describes them."""
    parts = []
    while True:
        magic, length = struct.unpack("<II", f.read(8))
        if magic != RECORDIO_MAGIC:
            raise ValueError("no record starts there")
        flag, length = length >> 29, length & (1 << 29) - 1
        parts.append(f.read(length))
        f.seek(-length % 4, os.SEEK_CUR)
        if flag in (0, 3):
            return magic.to_bytes(4, "little").join(parts)


def masked_crc(crc):
    """TFRecord's masked CRC: rotated right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_example(example):
    from google.protobuf.message import DecodeError
    from tfrecord import example_pb2

    try:
        features = example_pb2.Example.FromString(example).features.feature
    except DecodeError as e:
        raise ValueError("no tf.train.Example") from e
    images, labels = features[TFRECORD_IMAGE].bytes_list.value, features[TFRECORD_LABEL].int64_list.value
    if not images or len(labels) != 1:
        raise ValueError(f"the features {TFRECORD_IMAGE} and {TFRECORD_LABEL} are not one image and one number")
    return images[0], labels[0]


@functools.cache
def datum_class():
    """The protobuf message class of a Caffe LMDB, with those fields of caffe.proto that an encoded image uses."""
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
        raise UsageError(f"{folder} is not a Caffe LMDB ({e}): write or copy it again") from e


@functools.cache
def _lmdb_environment(folder):
    import lmdb

    return lmdb.open(folder, readonly=True, lock=False)  # cached, because a process must not open an LMDB twice


def lmdb_keys(folder):
    """Keys of all records of an LMDB, in order.

    Raises:
        UsageError: it is not an LMDB.
    """
    with _lmdb_transaction(folder) as transaction:
        return list(transaction.cursor().iternext(keys=True, values=False))


def lmdb_labels(folder, count):
    """Number of records of a Caffe LMDB, and the labels of about `count` of them, evenly spread.

    Raises:
        UsageError: it is not an LMDB, or a record is not an encoded image with a label.
    """
    keys = lmdb_keys(folder)
    every = max(1, len(keys) // count)
    spread = keys[::every] + (keys[-1:] if (len(keys) - 1) % every else [])
    return len(keys), [_read_datum(folder, key)[1] for key in spread]


def _read_datum(folder, key):
    with _lmdb_transaction(folder) as transaction:
        record = datum_class().FromString(transaction.get(key))
        if not (record.encoded and record.HasField("label")):
            raise UsageError(
                f"{folder}: record {key.decode(errors='replace')} is not an encoded image with a label: "
                "write the images encoded"
            )
        return record.data, record.label
