"""RecordIO files with other names and with several labels."""

import struct

import pytest

from layouts import colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.formats import recordio as record_files
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options, recordio
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def record(k, i, labels):
    """Return a record as mxnet.recordio.pack writes it. `labels` are the labels after the header, or None."""
    head = struct.pack("<IfQQ", len(labels or ()), k if labels is None else 0, i, 0)
    return record_files.encode(head + struct.pack(f"<{len(labels or ())}f", *(labels or ())) + image(k, i))


def write(root, labels, train="a_train.rec", val="a_val.rec"):
    for name, count, first in ((train, 5, 0), (val, 2, 100)):
        images = [(k, i) for i in range(first, first + count) for k in (2, 0, 3, 1)]
        put(root / name, b"".join(record(k, i, labels(k)) for k, i in images))


@pytest.mark.parametrize(
    ("labels", "index"), [(lambda k: None, None), (lambda k: [k], None), (lambda k: [9, k], 1), (lambda k: [k, 0.5], 0)]
)
def test_labels_match_pixels(tmp_path, labels, index):
    write(tmp_path, labels)
    kind, splits, names = sources.read(tmp_path, "recordio", Options(label_index=index))
    assert (kind, names) == ("recordio", None)
    assert {split: len(images) for split, images in splits.items()} == {"train": 20, "val": 8}
    assert colors_match(image for images in splits.values() for image in images)


def test_other_names_are_detected(tmp_path):
    write(tmp_path, lambda k: [k], "images_of_train.rec", "holdout_test.rec")
    assert sources.read(tmp_path)[0] == "recordio"


def test_image_that_contains_the_magic_number(tmp_path):
    """The writer divides such a record into parts."""
    data = image(0) + bytes(-len(image(0)) % 4) + record_files.MAGIC.to_bytes(4, "little") + b"end"
    head = struct.pack("<IfQQ", 0, 1, 0, 0)
    put(tmp_path / "a_train.rec", record(0, 0, None) + record_files.encode(head + data) + record(2, 0, None))
    splits, _ = recordio.read(str(tmp_path), Options())
    assert read_image(splits["train"][1]) == (data, 1)


def test_several_labels_are_reported_with_remedy(tmp_path):
    write(tmp_path / "x", lambda k: [k, 7], "train.rec", "val.rec")
    message = error_of_training(tmp_path / "x")
    assert "train.rec: the record at byte 0 has 2 labels, but only --multi-label reads more than one; train" in message
    imported = obey(message)
    assert all(colors_match(DataRoot(imported).images(mode)[1]) for mode in Mode)


def cut(root):
    write(root, lambda k: None)
    put(root / "a_train.rec", (root / "a_train.rec").read_bytes()[:-50])


BAD = {
    "several labels": (
        lambda root: write(root, lambda k: [k, 1]),
        "a_train.rec: the record at byte 0: has 2 labels; the import writes one label per image, so set "
        "--label-index to a number from 0 to 1",
    ),
    "fraction": (
        lambda root: write(root, lambda k: [k + 0.5]),
        "record at byte 0: label 2.5 is not a class; correct it",
    ),
    "not a number": (lambda root: write(root, lambda k: [float("nan")]), "record at byte 0: label nan is not a class"),
    "truncated": (cut, "a_train.rec: damaged at byte "),
    "other content": (lambda root: put(root / "a_train.rec", b"<html>" * 50), "a_train.rec: damaged at byte 0; write"),
    "labels missing": (
        lambda root: put(root / "a_train.rec", record_files.encode(struct.pack("<IfQQ", 9, 0, 0, 0))),
        "a_train.rec: damaged at byte 0; write or copy it again",
    ),
    "no training images": (
        lambda root: write(root, lambda k: None, "a_val.rec", "val2.rec"),
        "contains no training images; import the folder that contains them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys, "--as", "recordio")


def test_flags_choose_among_detected_kinds(tmp_path):
    """Without a flag, the table would be imported."""
    write(tmp_path, lambda k: [k, 7])
    put(tmp_path / "train.csv", "image,label\n")
    assert sources.read(tmp_path, options=Options(label_index=0))[0] == "recordio"


def test_remedy_for_labels_that_are_not_classes_names_only_flags_that_exist(tmp_path, capsys):
    write(tmp_path / "x", lambda k: [100 * k + 100])
    error = error_of_import(tmp_path / "x", capsys, "--as", "recordio")
    assert error.endswith("has label 300, but there are only 28 images; number the classes from 0\n")
    write(tmp_path / "y", lambda k: [100 * k + 100, k])
    error = error_of_import(tmp_path / "y", capsys, "--as", "recordio", "--label-index", "0")
    assert error.endswith("number the classes from 0, or choose different labels with --label-index\n")
    splits = sources.read(tmp_path / "y", "recordio", Options(label_index=1))[1]  # obey the message
    assert colors_match(splits["train"])
