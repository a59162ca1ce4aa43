"""Caffe LMDBs: the folders IMAGE_ROOT/train_lmdb and val_lmdb, also NAME_train_lmdb or train.lmdb ..., with encoded
images. LMDBs are read, but not written.

DALI reads an LMDB through a memory map, so truncating the LMDB during a run kills the process.
"""

import contextlib
import functools
import os
from typing import Any

from paddle_resnet.data import shards, split_names
from paddle_resnet.data.images import Image
from paddle_resnet.utils.errors import UsageError, command, import_command
from paddle_resnet.utils.mode import Mode

NAMES = r"(?P<set>(.*[-_.])?{split}[-_.](lmdb|db))"
EXAMPLE = "{}_lmdb"
CAN_SKIP = False  # DALI's reader cannot omit records


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return [path of the folder of a split's LMDB], or [] if the split has none."""
    return split_names.find(image_root, mode, NAMES, lambda path: os.path.isdir(path) or path.endswith("_lmdb"))


def index(image_root: str, mode: Mode, paths: list[str], skip: frozenset[str] = frozenset()) -> shards.Records:
    """Open a split's LMDB.

    Args:
        image_root, mode, paths, skip: see shards.index.
    Raises:
        UsageError: the folder is not an LMDB, is damaged or has no records, or `skip` contains a record of the LMDB.
    """
    [path] = paths
    if shards.skipped(skip, path):
        raise UsageError(
            f"{path}: LMDBs do not support --skip-list; convert the data set with "
            f"`{command('dataset', 'convert', '--skip-list')}`"
        )
    size = count(path)
    if size == 0:
        raise UsageError(f"{path}: contains no records; write it again")

    def images(label_offset):
        for key in keys(path):
            name = f"{os.path.basename(path)}@{os.fsdecode(key)}"
            yield Image(name, path, None, "lmdb", key, label_offset)

    def sample(count):
        listed = keys(path)
        every = max(1, len(listed) // count)
        for key in listed[::every] + (listed[-1:] if (len(listed) - 1) % every else []):
            yield path, _read_record(path, key)[1]

    identity = [size, os.path.getsize(os.path.join(path, "data.mdb"))]
    return shards.Records([path], {os.path.basename(path): size}, size, images, sample, identity)


def read(
    records: shards.Records, name: str, shard_id: int, num_shards: int, shuffle: bool, seed: int
) -> tuple[Any, Any]:
    """Add DALI's reader of Caffe LMDBs to the pipeline under construction, see data/formats/__init__.py."""
    from nvidia.dali import fn, types

    [path] = records.paths
    arguments = shards.reader_arguments(name, shard_id, num_shards, shuffle, records.size, seed)
    encoded, label = fn.readers.caffe(path=path, **arguments)
    return encoded, fn.cast(shards.single(label), dtype=types.INT64)


def verify(image: Image) -> tuple[bytes, int]:
    """Return (image file, stored label) of a record. Raise UsageError if the record is not an encoded image with a
    label, or the LMDB is damaged."""
    return _read_record(image.path, image.place)


def read_value(folder: str, key: bytes) -> bytes:
    """Return the content of a record, or b"" if there is no such record. Raise UsageError if the LMDB is damaged."""
    with _transaction(folder) as transaction:
        return transaction.get(key) or b""


def read_datum(folder: str, key: bytes) -> Any:
    """Return the Datum of a record in a Caffe LMDB. Raise UsageError if the LMDB is damaged or the record has no
    label."""
    with _transaction(folder) as transaction:
        datum = datum_class().FromString(transaction.get(key) or b"")
    if not datum.HasField("label"):
        raise UsageError(f"{folder}: record {_text(key)} is not an encoded image with a label; write it again")
    return datum


def _read_record(folder, key):
    datum = read_datum(folder, key)
    if not datum.encoded:
        raise UsageError(
            f"{folder}: record {_text(key)} is not an encoded image, but an array of pixels; run "
            f"{import_command(os.path.dirname(folder))}"
        )
    return datum.data, datum.label


def _text(key):
    return key.decode(errors="replace")


def count(folder: str) -> int:
    """Return the number of records in an LMDB. Raise UsageError if the folder is not an LMDB, or is damaged."""
    with _transaction(folder) as transaction:
        return transaction.stat()["entries"]


def keys(folder: str) -> list[bytes]:
    """Return the keys of all records in an LMDB, sorted. Raise UsageError if the folder is not an LMDB, or is
    damaged."""
    with _transaction(folder) as transaction:
        return list(transaction.cursor().iternext(keys=True, values=False))


@contextlib.contextmanager
def _transaction(folder):
    import lmdb
    from google.protobuf.message import DecodeError

    try:
        with _environment(os.path.realpath(folder)).begin() as transaction:
            yield transaction
    except lmdb.ReadonlyError as e:  # the name of EACCES in lmdb
        raise UsageError(f"{folder}: cannot be read ({e}); make the folder and its files readable") from e
    except (lmdb.Error, DecodeError) as e:
        raise UsageError(f"{folder}: not a Caffe LMDB, or damaged ({e}); write or copy it again") from e


@functools.cache
def _environment(folder):
    import lmdb

    # The environment is cached, because a process must not open an LMDB twice.
    environment = lmdb.open(folder, readonly=True, lock=False)
    # LMDB and DALI map the file into memory, so reading beyond its end would kill the process.
    size = os.path.getsize(os.path.join(folder, "data.mdb"))
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise lmdb.CorruptedError(f"data.mdb has {size} bytes instead of at least {needed}")
    return environment


@functools.cache
def datum_class() -> Any:
    """Return the protobuf message class for records in a Caffe LMDB. The class has only those fields of caffe.proto
    that images use."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    fields = (("channels", 1, field.TYPE_INT32), ("height", 2, field.TYPE_INT32), ("width", 3, field.TYPE_INT32))
    fields += (("data", 4, field.TYPE_BYTES), ("label", 5, field.TYPE_INT32), ("encoded", 7, field.TYPE_BOOL))
    file = descriptor_pb2.FileDescriptorProto(name="paddle_resnet/datum.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    for name, number, kind in fields:
        message.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))
