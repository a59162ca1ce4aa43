import io
import os
import struct
import tarfile

import data_files
import pytest
from webdataset import TarWriter

from paddle_resnet.data import indexes
from paddle_resnet.data.formats import SHARDED, read_image, recordio, tfrecord, webdataset
from paddle_resnet.data.formats import lmdb as lmdb_format
from paddle_resnet.data.formats.lmdb import datum_class
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.images import readable
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


def read_label(module, path, offset, size):
    with open(path, "rb") as f:
        return module.read_label(f, offset, size)


def lmdb_labels(folder, count):
    """Return (number of records, labels of about `count` records) of an LMDB."""
    records = lmdb_format.index("", Mode.TRAIN, [folder])
    return records.size, [label for _, label in records.sample(count)]


def _tfrecords(path, count=5):
    """Write a TFRecord shard that contains `count` images of different lengths."""
    with SHARDED["tfrecord"](str(path)) as write:
        for number in range(count):
            write(number, bytes([number]) * (100 + number), "jpg", number)
    return path


def crc32c(data):
    """Compute the CRC-32C (Castagnoli) checksum bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_tfrecords_have_masked_checksums(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283
    data = _tfrecords(tmp_path / "records").read_bytes()
    offset, count = 0, 0
    while offset < len(data):
        length = struct.unpack_from("<Q", data, offset)[0]
        for part, place in (
            (data[offset : offset + 8], offset + 8),
            (data[offset + 12 : offset + 12 + length], offset + 12 + length),
        ):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
            assert struct.unpack_from("<I", data, place)[0] == masked
        offset += 16 + length
        count += 1
    assert count == 5


def test_records_without_one_image_and_label_are_rejected(tmp_path):
    from tfrecord import TFRecordWriter

    writer = TFRecordWriter(str(tmp_path / "other"))
    writer.write({"image": (b"x", "byte")})
    writer.close()
    size = os.path.getsize(tmp_path / "other")
    with pytest.raises(UsageError, match="image/encoded and one number in image/class/label"):
        read_label(tfrecord, str(tmp_path / "other"), 0, size)

    label = {tfrecord.LABEL: ([1], "int")}
    for features in ({tfrecord.IMAGE: (b"x", "byte"), tfrecord.LABEL: ([1, 2], "int")}, label):
        writer = TFRecordWriter(str(tmp_path / "two"))
        writer.write(features)
        writer.close()
        with pytest.raises(UsageError, match="expected one image in"):
            read_label(tfrecord, str(tmp_path / "two"), 0, os.path.getsize(tmp_path / "two"))

    (tmp_path / "flagged").write_bytes(recordio.encode(struct.pack("<IfQQ", 2, 0, 0, 0) + bytes(8)))
    with pytest.raises(UsageError, match=r"flagged: the record at byte 0 has 2 labels, but only --multi-label "):
        read_label(recordio, str(tmp_path / "flagged"), 0, 0)

    (tmp_path / "text").write_bytes(b"no record")
    with pytest.raises(UsageError, match="no record starts at this position"):
        read_label(recordio, str(tmp_path / "text"), 0, 0)

    for text, shown in ((b"cat", "'cat'"), (b"\xff7", r"'\\ufffd7'"), (b"1234567890", "'1234567890'")):
        (tmp_path / "words").write_bytes(text)
        message = rf"the record at byte 0 is not an image with a label \(the label {shown} is not a number of up to 9"
        with pytest.raises(UsageError, match=message):
            read_label(webdataset, str(tmp_path / "words"), 0, len(text))


def test_image_and_label_of_a_tar_file_are_read_at_their_places(tmp_path):
    path = tmp_path / "val-0.tar"
    path.write_bytes(b"0image 012\n9")
    image = ListedImage("val-0.tar@1", str(path), None, "webdataset", (1, 5, 7, 4))
    assert read_image(image) == (b"image", 12)
    assert read_image(ListedImage("a.jpg", str(path), 3)) == (b"0image 012\n9", 3)


@pytest.mark.parametrize("sizes", [(1, 511, 512, 513, 100_000), (9, *range(3000, 3030))])
def test_tar_shards_are_those_of_webdataset(tmp_path, sizes):
    """Shards have the bytes that webdataset writes, and the index is that of a scan."""
    names = ("jpg", "bmp", "png", "webp")
    with open(tmp_path / "expected.tar", "wb") as f, TarWriter(f, encoder=False, mtime=0) as writer:
        for number, size in enumerate(sizes):
            key, name = f"{number:08d}", names[number % 4]
            writer.write({"__key__": key, name: os.urandom(size), "cls": str(number * 777).encode()})
    with tarfile.open(tmp_path / "expected.tar") as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}
    path = tmp_path / "train-000000.tar"
    with webdataset.write(str(path)) as write:
        numbers = range(len(sizes))
        lines = [write(i, content[f"{i:08d}.{names[i % 4]}"], names[i % 4], i * 777) for i in numbers]
    assert path.read_bytes() == (tmp_path / "expected.tar").read_bytes()
    assert indexes.content(lines, webdataset.INDEX) == indexes.scan(str(path), webdataset.INDEX)


def test_index_of_tfrecords_is_that_of_a_scan(tmp_path):
    with tfrecord.write(str(tmp_path / "x")) as write:
        lines = [write(i, bytes(100 * i), "jpg", i) for i in range(5)]
    assert indexes.content(lines, tfrecord.INDEX) == indexes.scan(str(tmp_path / "x"), tfrecord.INDEX)


def test_parts_of_recordio_record_are_joined(tmp_path):
    """An image that contains the magic number is split at this number, and its parts are stored without the number."""
    magic = struct.pack("<I", recordio.MAGIC)
    image = b"abcd" + magic + b"efgh" + magic + b"ij"
    path = tmp_path / "val.rec"
    path.write_bytes(recordio.encode(recordio.HEAD.pack(0, 7, 0, 0) + image))
    assert path.read_bytes().count(magic) == 3  # one magic number per part
    assert read_image(ListedImage("val.rec@0", str(path), None, "recordio", (0, 0, 0, 0))) == (image, 7)
    with open(path, "rb") as file:
        assert recordio.record_end(file, 0, path.stat().st_size) == path.stat().st_size
    first, last = (magic + struct.pack("<I", flag << 29) for flag in (1, 3))
    assert recordio.encode(magic) == first + last
    padded = magic + struct.pack("<I", 1 << 29 | 3) + b"abc\0"
    assert recordio._payload(io.BytesIO(padded + last)) == b"abc" + magic


@pytest.mark.parametrize("label", [3.0, 2.5])
def test_label_of_a_recordio_record_is_a_number(tmp_path, label):
    path = tmp_path / "val.rec"
    path.write_bytes(recordio.encode(recordio.HEAD.pack(0, label, 0, 0) + b"image"))
    read = read_label(recordio, str(path), 0, 0)
    assert (read, type(read)) == (label, int if label == 3 else float)


def test_end_of_a_recordio_record_is_checked():
    record = recordio.encode(b"abcd")
    assert recordio.record_end(io.BytesIO(record), 0, 12) == 12
    for damaged, size in ((record, 11), (record[:7], 7), (b"x" + record[1:], 12)):
        with pytest.raises(ValueError, match="^$"):
            recordio.record_end(io.BytesIO(damaged), 0, size)


@pytest.mark.parametrize(("place", "reason"), [(0, "no record starts"), (8, "no record starts"), (20, "the checksum")])
def test_checksums_of_a_tfrecord_are_verified(tmp_path, place, reason):
    data = bytearray(_tfrecords(tmp_path / "records", 1).read_bytes())
    assert tfrecord.payload(io.BytesIO(data), len(data)) == data[12:-4]
    data[place] ^= 1
    with pytest.raises(ValueError, match=f"^{reason}"):
        tfrecord.payload(io.BytesIO(data), len(data))


def test_length_of_truncated_tfrecord_is_checked_before_reading():
    length = struct.pack("<Q", 2**62)
    head = length + struct.pack("<I", tfrecord._masked(crc32c(length)))
    with pytest.raises(ValueError, match="^the record is truncated$"):
        tfrecord.payload(io.BytesIO(head), 100)
    length = struct.pack("<Q", 84)
    head = length + struct.pack("<I", tfrecord._masked(crc32c(length)))
    for size, reason in ((99, "the record is truncated"), (100, "the checksum does not match")):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            tfrecord.payload(io.BytesIO(head + bytes(88)), size)


def test_lmdb_labels_returns_size_and_labels(tmp_path):
    data_files.write_lmdb(tmp_path / "train_lmdb", [(b"x", 300), (b"y", 2), (b"z", 1)])
    assert lmdb_labels(str(tmp_path / "train_lmdb"), 1) == (3, [300, 1])
    assert [path.name for path in (tmp_path / "train_lmdb").iterdir()] == ["data.mdb"]
    (tmp_path / "link").symlink_to("train_lmdb")
    opened = lmdb_format._environment.cache_info().currsize
    assert lmdb_labels(str(tmp_path / "link"), 1) == (3, [300, 1])
    assert lmdb_format._environment.cache_info().currsize == opened  # a process must not open an LMDB twice
    assert lmdb_labels(str(tmp_path / "train_lmdb"), 100) == (3, [300, 2, 1])


def test_truncated_lmdb_is_an_error_at_the_start(tmp_path):
    """Only the last byte is missing: if pages were missing, LMDB and DALI could crash."""
    data_files.write_lmdb(tmp_path / "val_lmdb", [(bytes(5000), 3)])
    size = (tmp_path / "val_lmdb/data.mdb").stat().st_size
    os.truncate(tmp_path / "val_lmdb/data.mdb", size - 1)
    message = f"damaged .data.mdb has {size - 1} bytes instead of at least {size}.; write or copy it again"
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            lmdb_labels(str(tmp_path / "val_lmdb"), 1)


def test_missing_lmdb_record_is_rejected(tmp_path):
    data_files.write_lmdb(tmp_path / "val_lmdb", [(b"x", 3)])
    path = str(tmp_path / "val_lmdb")
    assert read_image(ListedImage("val_lmdb@00000000", path, None, "lmdb", b"00000000")) == (b"x", 3)
    with pytest.raises(UsageError, match="val_lmdb: record 9 is not an encoded image"):
        read_image(ListedImage("val_lmdb@9", path, None, "lmdb", b"9"))


@pytest.mark.parametrize(
    ("error", "message"),
    [(OSError("odd"), "p: cannot be read (odd); "), (OSError(5, "reason", b"file"), "file: cannot be read (reason); ")],
)
def test_error_of_unreadable_file_names_the_file(error, message):
    with pytest.raises(UsageError) as e, readable("p"):
        raise error
    assert str(e.value).startswith(message)


def test_lmdb_records_have_fields_of_caffe():
    """In caffe.proto, `data` is field 4, `label` is field 5, and `encoded` is field 7."""
    record = datum_class()(data=b"x", label=5, encoded=True)
    assert record.SerializeToString() == b"\x22\x01x\x28\x05\x38\x01"


def test_file_that_is_not_an_lmdb_of_images_is_rejected(tmp_path):
    import lmdb

    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=f"^{tmp_path}/other: not a Caffe LMDB, or damaged .*No such file"):
        lmdb_labels(str(tmp_path / "other"), 1)
    (tmp_path / "other" / "data.mdb").write_bytes(b"x" * 10000)
    with pytest.raises(UsageError, match=f"^{tmp_path}/other: not a Caffe LMDB, or damaged .*MDB_INVALID: .*; write"):
        lmdb_labels(str(tmp_path / "other"), 1)
    fields = {"pixels": {"label": 1}, "not encoded": {"label": 1, "encoded": False}, "no label": {"encoded": True}}
    values = {name: datum_class()(data=b"x", **rest).SerializeToString() for name, rest in fields.items()}
    damaged, unusable = "raw: not a Caffe LMDB, or damaged", "record 0 is not an encoded image"
    for name, value in {"raw": b"hello", **values}.items():
        with lmdb.open(str(tmp_path / name)) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"0", value)
        with pytest.raises(UsageError, match=damaged if name == "raw" else unusable):
            lmdb_labels(str(tmp_path / name), 1)
