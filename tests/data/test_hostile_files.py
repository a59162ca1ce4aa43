"""Files and folders that are damaged, or made to do harm: each ends with a sentence, and verify and training agree."""

import json
import os
import shutil
from pathlib import Path

import pytest

from paddle_resnet.data import indexes, listing, readers, records
from utils.errors import UsageError
from utils.mode import Mode

INDEXED = ("recordio", "tfrecord", "webdataset")


@pytest.fixture
def copy(converted, tmp_path):
    """Copy a converted data set; returns the copy's folder."""

    def copy(data_format):
        root = tmp_path / data_format
        shutil.copytree(converted[data_format], root)
        return root

    return copy


def open_split(root, mode=Mode.EVAL, num_of_class=3):
    return readers.open_split(root, "auto", mode, num_of_class, 0)


def negative(rows):
    """Each number of the third row with a minus."""
    words = rows[2].replace("\t", " ").split(" ")
    return [*rows[:2], " ".join(f"-{word}" if word.isdigit() else word for word in words), *rows[3:]]


def shifted(rows):
    words = rows[2].replace("\t", " ").split(" ")
    words[1 if len(words) > 2 or "\t" in rows[2] else 0] = "4"
    return [*rows[:2], " ".join(words), *rows[3:]]


ROWS = {
    "first missing": lambda rows: rows[1:],
    "one missing": lambda rows: [*rows[:3], *rows[4:]],
    "last missing": lambda rows: rows[:-1],
    "one twice": lambda rows: [*rows[:3], rows[2], *rows[3:]],
    "one in the place of another": lambda rows: [*rows[:3], rows[2], *rows[4:]],
    "one for all": lambda rows: [rows[0]] * len(rows),
    "negative": negative,
    "off a record's header": shifted,
    "huge": lambda rows: [*rows[:-1], rows[-1] + "0" * 5000],
    "above int64": lambda rows: [*rows[:-1], rows[-1] + "0" * 18],
    "with an underscore": lambda rows: [f"{rows[0][:-1]}_{rows[0][-1]}", *rows[1:]],
    "no rows": lambda rows: [],
}


@pytest.mark.parametrize("damage", ROWS)
@pytest.mark.parametrize("data_format", INDEXED)
def test_damaged_index_is_refused(copy, data_format, damage):
    root = copy(data_format)
    shard = listing.find_shards(str(root), data_format, Mode.EVAL)[0]
    path = Path(indexes.index_path(shard))
    rows = path.read_text().splitlines()
    head = [] if data_format != "webdataset" else [f"v1.1 {len(ROWS[damage](rows[1:]))}"]
    path.write_text("\n".join([*head, *ROWS[damage](rows[len(head) :])]) + "\n")
    with pytest.raises(UsageError, match="the index .* does not fit .*: remove it and run"):
        open_split(root)


@pytest.mark.parametrize("data_format", ["tfrecord", "webdataset"])
def test_index_in_another_order_is_refused(copy, data_format):
    root = copy(data_format)
    path = Path(indexes.index_path(listing.find_shards(str(root), data_format, Mode.EVAL)[0]))
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:2], rows[3], rows[2], *rows[4:]]))
    with pytest.raises(UsageError, match="the index .* does not fit"):
        open_split(root)


def test_recordio_index_with_a_gap_in_its_keys_is_compared_with_all_headers(copy, monkeypatch):
    root = copy("recordio")
    monkeypatch.setattr(indexes, "CHECKED_RECORDS", 1)
    path = root / "val.idx"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows).replace("5\t", "99\t", 1))
    assert open_split(root).size == 23
    path.write_text("".join([*rows[:5], *rows[6:]]))
    with pytest.raises(UsageError, match="does not fit"):
        open_split(root)


def test_tar_index_may_leave_out_what_is_no_sample_file(tmp_path):
    import io
    import tarfile

    shard = str(tmp_path / "val-0.tar")
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("README", "folder/", "folder/ü.jpg", "folder/ü.cls", "folder/.hidden", "b.jpg", "b.cls", "end"):
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = 0 if name.endswith("/") else 1
            info.pax_headers = {"comment": "x" * 600} if name.startswith("b") else {}
            archive.addfile(info, io.BytesIO(b"1"))
    index = indexes.open_index(shard, "webdataset")
    assert len(index) == 2
    assert indexes.open_index(shard, "webdataset").images.tolist() == index.images.tolist()


@pytest.mark.parametrize("data_format", [*INDEXED, "lmdb"])
def test_other_number_of_images_than_convert_wrote_is_refused(copy, data_format):
    root = copy(data_format)
    manifest = json.loads((root / "convert.json").read_text())
    manifest["splits"]["val"]["images"] = 24
    (root / "convert.json").write_text(json.dumps(manifest))
    for read in (open_split, lambda root: listing.images(str(root), Mode.EVAL)):
        with pytest.raises(UsageError, match=r"has 23 images of val, but convert.json says 24"):
            read(root)


def test_missing_tar_shard_is_noticed(copy):
    root = copy("webdataset")
    (root / "train-000002.tar").unlink()
    with pytest.raises(UsageError, match=r"has 2 shards of train, but convert.json says 3"):
        open_split(root, Mode.TRAIN)


MANIFESTS = ["", "[]", "{}", "null", '"x"', "[" * 100000, '{"complete": 1}', '{"splits": []}', "\xff"]


@pytest.mark.parametrize("text", MANIFESTS)
def test_damaged_manifest_is_refused(copy, text):
    root = copy("recordio")
    (root / "convert.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"convert.json is damaged"):
        open_split(root)


@pytest.mark.parametrize("key", ["complete", "format", "splits", "shards"])
@pytest.mark.parametrize("value", [None, 5, "x", [1], {"val": None}, {"val": {"images": "3"}}])
def test_manifest_with_values_of_other_types_is_refused(copy, key, value):
    root = copy("tfrecord")
    manifest = json.loads((root / "convert.json").read_text())
    (root / "convert.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(UsageError, match=r"convert.json is damaged"):
        open_split(root)


@pytest.mark.parametrize("offset", [-1, 100, 12, 3, 9])
def test_tfrecord_checksums_are_checked_when_an_index_is_made_and_when_a_record_is_read(copy, offset):
    root = copy("tfrecord")
    shard = listing.find_shards(str(root), "tfrecord", Mode.EVAL)[0]
    [image, *_] = listing.images(str(root), Mode.EVAL)[2]
    data = bytearray(Path(shard).read_bytes())
    data[offset % image.place[1]] ^= 1
    Path(shard).write_bytes(data)
    with pytest.raises(UsageError, match=r"checksum is wrong|no record starts there"):
        records.read(image)
    os.unlink(indexes.index_path(shard))
    with pytest.raises(UsageError, match="is damaged at byte 0"):
        open_split(root)
