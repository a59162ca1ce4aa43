import contextlib
import json
import os
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import data_files
import numpy as np
import nvidia.dali
import pytest
import webdataset
from data_files import open_split
from nvidia.dali import fn, pipeline_def
from PIL import Image
from tfrecord import TFRecordWriter

from helpers import without_permission
from paddle_resnet.data import bad_images, shards, skip_list
from paddle_resnet.data import data_set as data_sets
from paddle_resnet.data.data_set import BalancedSampler
from paddle_resnet.data.formats import FILES, RECORDS, folder, read_image, recordio, tfrecord
from paddle_resnet.data.images import IMAGE_SUFFIXES
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def make(tmp_path):
    """Return a function that creates files and returns their folder. Each file contains its own relative path; readers
    do not decode images, so the content is arbitrary. A name that ends in / creates a folder."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            folder = path if name.endswith("/") else path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(name)
        return str(tmp_path)

    return make


def open_folder(image_root, *arguments, **options):
    return open_split(image_root, "folder", *arguments, **options)


def raw_contents(data_set, batch_size=None, **shard):
    """Read one batch with the DALI operator and return [(bytes of the file, label)]. By default, the batch is the whole
    split."""

    @pipeline_def(batch_size=batch_size or data_set.size, num_threads=1, device_id=None)
    def pipeline():
        return data_set.read("Reader", **{"shard_id": 0, "num_shards": 1, "shuffle": False, **shard})

    pipe = pipeline()
    pipe.build()
    encoded, labels = pipe.run()
    assert labels.as_array().dtype == np.int64
    assert labels.as_array().shape[1:] == (1,)
    files = [bytes(np.asarray(encoded.at(i))) for i in range(len(encoded))]
    return list(zip(files, labels.as_array()[:, 0].tolist(), strict=True))


def contents(data_set, batch_size=None, **shard):
    """Use the DALI operator to read one batch of files that `make` created, and return [(path, label)]."""
    return [(content.decode(), label) for content, label in raw_contents(data_set, batch_size, **shard)]


def error_of(image_root, mode, num_of_class=10, data_format="folder", **options):
    with pytest.raises(UsageError) as error:
        open_split(image_root, data_format, mode, num_of_class, 0, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_sorted_class_folders_define_labels(make):
    root = make("train/b/1.jpg", "train/a/2.jpg", "train/C/3.jpg", "train/a/0.jpg")
    data_set = open_folder(root, Mode.TRAIN, 10, 0)
    assert data_set.classes == ["C", "a", "b"]
    assert data_set.size == 4
    assert sorted(contents(data_set)) == [
        ("train/C/3.jpg", 0),
        ("train/a/0.jpg", 1),
        ("train/a/2.jpg", 1),
        ("train/b/1.jpg", 2),
    ]


def test_validation_order_does_not_depend_on_seed(make):
    root = make("val/a/2.jpg", "val/a/1.jpg", "val/b/0.jpg", "train/a/0.jpg", "train/b/0.jpg")
    for seed in (0, 1):
        data_set = open_folder(root, Mode.EVAL, 10, seed)
        assert contents(data_set) == [("val/a/1.jpg", 0), ("val/a/2.jpg", 0), ("val/b/0.jpg", 1)]


@pytest.mark.parametrize("b_in_val", [(), ("val/b/",)], ids=["missing", "empty"])
def test_class_without_validation_images_keeps_labels(make, b_in_val):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/c/0.jpg", "val/a/0.jpg", "val/c/0.jpg", *b_in_val)
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b", "c"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/c/0.jpg", 2)]


def test_val_defines_labels_without_training_images(make):
    data_set = open_folder(make("val/b/0.jpg", "val/a/0.jpg"), Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/b/0.jpg", 1)]


def test_other_files_and_folders_are_ignored(make):
    images = [f"val/a/{i}{suffix}" for i, suffix in enumerate((*IMAGE_SUFFIXES, ".JPG", ".JPEG"))]
    noise = ["list.txt", "jpg", "0.jpg.part", "._0.jpg", "folder.jpg/"]
    root = make(*images, *[f"val/a/{name}" for name in noise], "val/.cache/0.jpg", "val/0.jpg")
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a"]
    assert [path for path, _ in contents(data_set)] == images


def test_linked_class_folder_is_read(make, tmp_path):
    root = make("elsewhere/0.jpg", "val/")
    (tmp_path / "val" / "a").symlink_to(tmp_path / "elsewhere")
    assert contents(open_folder(root, Mode.EVAL, 10, 0)) == [("elsewhere/0.jpg", 0)]


def test_training_order_depends_on_seed(make):
    root = make(*(f"train/{label}/{i}.jpg" for label in "abc" for i in range(8)))
    first, again, other = (contents(open_folder(root, Mode.TRAIN, 10, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert first != sorted(first)


def test_last_batch_of_shard_repeats_last_image(make):
    root = make(*(f"val/a/{i}.jpg" for i in range(5)))
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    shards = [[path for path, _ in contents(data_set, 3, shard_id=i, num_shards=2)] for i in (0, 1)]
    assert shards == [["val/a/0.jpg", "val/a/1.jpg", "val/a/1.jpg"], ["val/a/2.jpg", "val/a/3.jpg", "val/a/4.jpg"]]


def test_number_of_classes_may_equal_number_of_outputs(make):
    assert open_folder(make("train/a/0.jpg", "train/b/0.jpg"), Mode.TRAIN, 2, 0).classes == ["a", "b"]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ["none", "file"])
def test_missing_root_is_rejected(make, mode, name):
    root = f"{make('file')}/{name}"
    for data_format in ("folder", "auto", "recordio"):
        assert f"--image-root {root}: not a folder" in error_of(root, mode, data_format=data_format)


@pytest.mark.parametrize(("mode", "split"), [(Mode.TRAIN, "train"), (Mode.EVAL, "val")])
def test_missing_split_is_rejected(make, tmp_path, mode, split):
    message = f"--image-root {tmp_path}: has no folder {split}/"
    assert message in error_of(str(tmp_path), mode)
    other = {"train": "val", "val": "train"}[split]
    assert message in error_of(make(f"{other}/a/0.jpg"), mode)


def test_name_that_is_not_utf8_is_rejected(make):
    root = make("train/a/0.jpg")
    with open(os.path.join(os.fsencode(root), b"train/a/caf\xe9.jpg"), "wb"):
        pass
    assert "b'train/a/caf\\xe9.jpg' is not valid UTF-8; rename the file" in error_of(root, Mode.TRAIN)


@pytest.mark.parametrize("line", [b"train/a/caf\xe9.jpg", rb'"train/a/caf\udce9.jpg"'])
def test_name_that_is_not_utf8_can_be_skipped(make, tmp_path, line):
    root = make("train/a/0.jpg")
    with open(os.path.join(os.fsencode(root), b"train/a/caf\xe9.jpg"), "wb"):
        pass
    (tmp_path / "skip.txt").write_bytes(line + b"\n")
    skip = DataRoot(root, skip_list=tmp_path / "skip.txt").skip
    assert contents(open_folder(root, Mode.TRAIN, 10, 0, skip, allow_one_class=True)) == [("train/a/0.jpg", 0)]
    assert skip_list.skip_list_line(*skip) == '"train/a/caf\\udce9.jpg"\n'


@pytest.mark.parametrize("name", ["train/", "train/0.jpg", "train/.hidden/0.jpg"])
def test_split_without_class_folders_is_rejected(make, tmp_path, name):
    assert f"--image-root {tmp_path}: train/ has no class folders" in error_of(make(name), Mode.TRAIN)


@pytest.mark.parametrize("names", [["val/a/"], ["val/a/0.txt"], ["val/", "train/a/0.jpg"]])
def test_split_without_images_is_rejected(make, tmp_path, names):
    assert f"--image-root {tmp_path}: val/ contains no images" in error_of(make(*names), Mode.EVAL)


@pytest.mark.parametrize("name", ["train", "train/b"])
def test_unlistable_folder_is_rejected(make, tmp_path, name):
    root = make("train/a/0.jpg", "train/b/0.jpg")
    with without_permission(tmp_path / name):
        message = error_of(root, Mode.TRAIN)
    assert f"{tmp_path}/{name}: cannot be listed (Permission denied); make it readable" in message


@pytest.mark.parametrize("mode", Mode)
def test_more_classes_than_outputs_is_an_error(make, tmp_path, mode):
    root = make(*(f"train/{label}/0.jpg" for label in "abc"), "val/a/0.jpg")
    message = error_of(root, mode, num_of_class=2)
    assert "--num-of-class 2" in message
    assert f"3 class folders in {tmp_path}" in message
    assert "use --num-of-class 3" in message


def test_class_only_in_val_is_rejected(make, tmp_path):
    message = error_of(make("train/a/0.jpg", "val/a/0.jpg", "val/b/0.jpg"), Mode.EVAL)
    assert f"--image-root {tmp_path}: val/b has no train/b" in message


def test_skip_list_omits_images_and_keeps_labels(make, tmp_path, capsys):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/b/1.jpg", "val/a/0.jpg", "val/b/0.jpg")
    (tmp_path / "skip.txt").write_text("train/a/0.jpg\r\n\r\n./train/b/1.jpg\nval/a/0.jpg\n")
    skip = DataRoot(root, skip_list=tmp_path / "skip.txt").skip
    with pytest.raises(UsageError, match="all train images belong to one class, b; add other classes"):
        open_folder(root, Mode.TRAIN, 10, 0, skip)
    for mode in Mode:
        data_set = open_folder(root, mode, 10, 0, skip, allow_one_class=True)
        assert contents(data_set) == [(f"{mode.value}/b/0.jpg", 1)]
        assert f"{mode.value} has no images for 1 of 2 classes (a)" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["train/a/1.jpg", "train/a", "0.jpg", "none.rec@5"])
def test_skip_list_entry_without_file_is_rejected(make, tmp_path, entry):
    root = make("train/a/0.jpg")
    (tmp_path / "skip.txt").write_text(f"train/a/0.jpg\n{entry}\n")
    with pytest.raises(UsageError, match=f"--skip-list .*skip.txt: {entry} is not a file in {root}; remove"):
        assert DataRoot(root, skip_list=tmp_path / "skip.txt").skip


@pytest.mark.parametrize("name", ["train.tar", "train.tar/x"])
def test_entire_file_of_records_cannot_be_skipped(name):
    with pytest.raises(UsageError, match=f"--skip-list: {name} is an entire file of records; write a line train.tar@"):
        shards.skipped({"other", name}, "data/train.tar")


def test_unreadable_skip_list_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="--skip-list .*none.txt: cannot be read"):
        assert DataRoot(tmp_path, skip_list=tmp_path / "none.txt").skip


def test_skipping_every_image_is_rejected(make, tmp_path):
    root = make("val/a/0.jpg")
    with pytest.raises(UsageError, match=f"^--image-root {root}: --skip-list leaves no val images"):
        open_folder(root, Mode.EVAL, 10, 0, frozenset({"val/a/0.jpg"}))


@pytest.mark.parametrize("data_format", data_files.ALL)
def test_format_is_detected_and_logged(converted, capsys, data_format):
    for mode, size in ((Mode.TRAIN, 30), (Mode.EVAL, 23)):
        root = str(converted[data_format])
        assert open_split(root, "auto", mode, 3, 0).size == size
        split = {Mode.TRAIN: "train", Mode.EVAL: "val"}[mode]
        assert re.fullmatch(
            rf"--image-root {root}: the {split} split is {split}\S*( and 2 more)? \({data_format}\)\n",
            capsys.readouterr().out,
        )


def test_root_with_several_formats_requires_data_format(make, tmp_path):
    root = make("train/a/0.jpg", "train.rec", "val/a/0.jpg")
    assert "contains the train split as recordio (train.rec) and folder (train/); choose one" in error_of(
        root, Mode.TRAIN, data_format="auto"
    )
    assert open_split(root, "folder", Mode.TRAIN, 10, 0, allow_one_class=True).size == 1
    assert open_split(root, "auto", Mode.EVAL, 10, 0).size == 1


@pytest.mark.parametrize("data_format", data_files.ALL)
def test_every_format_contains_the_files_of_the_folder(photos, converted, data_format):
    for mode, split in ((mode, mode.value) for mode in Mode):
        data_set = open_split(str(converted[data_format]), data_format, mode, 3, 0)
        assert data_set.classes == (["0", "1", "2"] if data_format == "filelist" else ["class0", "class1", "class2"])
        files = sorted((photos / split).glob("*/*"))
        expected = [(path.read_bytes(), int(path.parent.name[-1])) for path in files]
        actual = raw_contents(data_set)
        assert (actual if mode is Mode.EVAL else sorted(actual)) == (
            expected if mode is Mode.EVAL else sorted(expected)
        )
        # Record files store images in random order, because the loader shuffles them only within a buffer.
        assert mode is Mode.EVAL or actual != expected


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "lmdb", "webdataset"])
@pytest.mark.parametrize("classes", ["a\nb\n", None], ids=["classes.txt", "flag"])
def test_labels_above_num_of_class_are_rejected(converted, tmp_path, data_format, classes):
    for path in converted[data_format].iterdir():
        if path.name != "classes.txt":
            (tmp_path / path.name).symlink_to(path)
    if classes:
        (tmp_path / "classes.txt").write_text(classes)
    message = error_of(tmp_path, Mode.TRAIN, num_of_class=2, data_format=data_format)
    assert f"has label 2, but {'classes.txt' if classes else '--num-of-class 2'} allows 0 to 1; number" in message


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "lmdb", "webdataset", "filelist"])
def test_more_class_names_than_outputs_are_rejected(converted, tmp_path, data_format):
    for path in converted[data_format].iterdir():
        if path.name != "classes.txt":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    message = error_of(tmp_path, Mode.EVAL, num_of_class=2, data_format=data_format)
    assert f"--num-of-class 2: fewer than the 3 classes in {tmp_path}/classes.txt" in message


@pytest.mark.parametrize(
    ("data_format", "message"),
    [
        ("filelist", "train.txt cannot be read"),
        ("recordio", "has no train.rec; use the folder that contains the recordio files"),
        ("tfrecord", "has no train-00000-of-00001"),
        ("lmdb", "has no train_lmdb"),
        ("webdataset", "has no train-000000.tar"),
    ],
)
def test_missing_record_file_is_rejected(tmp_path, data_format, message):
    assert f"--image-root {tmp_path}" in error_of(tmp_path, Mode.TRAIN, data_format=data_format)
    assert message in error_of(tmp_path, Mode.TRAIN, data_format=data_format)


def test_missing_tfrecord_shard_is_rejected(converted, tmp_path):
    for path in converted["tfrecord"].iterdir():
        if not path.name.startswith("train-00001"):
            (tmp_path / path.name).symlink_to(path)
    message = f"--image-root {tmp_path}: has 2 of 3 train shards; add the missing ones"
    assert error_of(tmp_path, Mode.TRAIN, data_format="tfrecord") == message


def test_unfinished_conversion_is_rejected(converted, tmp_path):
    for path in converted["webdataset"].iterdir():
        if path.name != "convert.json":
            (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((converted["webdataset"] / "convert.json").read_text())
    (tmp_path / "convert.json").write_text(json.dumps({**manifest, "complete": False}))
    assert "the conversion is incomplete" in error_of(tmp_path, Mode.TRAIN, data_format="auto")


@pytest.mark.parametrize("data_format", ["recordio", "lmdb"])
def test_wrong_number_of_records_is_rejected(converted, tmp_path, data_format):
    for path in converted[data_format].iterdir():
        if path.name != "convert.json":
            (tmp_path / path.name).symlink_to(path)
    manifest = (converted[data_format] / "convert.json").read_text()
    (tmp_path / "convert.json").write_text(manifest.replace('"images": 23', '"images": 24'))
    assert "has 23 val images, but 24 according" in error_of(tmp_path, Mode.EVAL, data_format=data_format)


def test_file_list_may_contain_spaces_and_tabs(make):
    root = make("some place/a b.jpg", "x.jpg")
    make_list(
        root, "val", "\ufeffsome place/a b.jpg 2", "", "  ", "x.jpg\t0"
    )  # the file list starts with a byte order mark
    data_set = open_split(root, "filelist", Mode.EVAL, 10, 0)
    assert data_set.classes == ["0", "1", "2"]
    assert contents(data_set) == [("some place/a b.jpg", 2), ("x.jpg", 0)]
    unnamed = open_split(root, "filelist", Mode.EVAL, None, 0)
    assert (unnamed.classes, unnamed.digest) == ([], data_set.digest)
    make_list(root, "val", "some place/a b.jpg 2", "x.jpg 1")
    assert open_split(root, "filelist", Mode.EVAL, 10, 0).digest != data_set.digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x.jpg", "line 2 is not `PATH LABEL` but `x.jpg`"),
        ("x.jpg cat", "line 2 is not `PATH LABEL` but `x.jpg cat`"),
        ("x.jpg -1", "line 2 is not `PATH LABEL`"),
        ("x" * 300, f"line 2 is not `PATH LABEL` but `{'x' * 200}`; correct it"),
        ("x.jpg 10", "has label 10, but --num-of-class 10 allows 0 to 9"),
    ],
)
def test_invalid_file_list_line_is_rejected(make, line, message):
    root = make("x.jpg")
    make_list(root, "val", "x.jpg 0", line)
    assert message in error_of(root, Mode.EVAL, data_format="filelist")


def test_empty_file_list_and_wrong_root_are_rejected(make):
    root = make("x.jpg")
    make_list(root, "val")
    assert "contains no images" in error_of(root, Mode.EVAL, data_format="filelist")
    make_list(root, "val", "y.jpg 0")
    assert "y.jpg is not in" in error_of(root, Mode.EVAL, data_format="filelist")


@pytest.mark.parametrize("put", [os.mkdir, lambda path: os.symlink("/dev/null", path), lambda path: None])
def test_file_list_entries_must_be_regular_files_or_skipped(make, put):
    root = make("x.jpg", "some place/a.jpg")
    os.symlink("x.jpg", f"{root}/link.jpg")
    put(f"{root}/some place/b.jpg")
    names = ["x.jpg", "some place/b.jpg", "some place/a.jpg", "link.jpg", f"{root}/x.jpg"]
    make_list(root, "val", *(f"{name} 0" for name in names))
    message = f"{root}/val.txt: some place/b.jpg is missing or not a regular file; remove the line"
    assert error_of(root, Mode.EVAL, data_format="filelist") == message
    skip = frozenset(names[1:2])
    assert open_split(root, "filelist", Mode.EVAL, 10, 0, skip).size == 4


@pytest.mark.parametrize("data_format", FILES)
def test_skipped_images_are_omitted(make, data_format):
    root = make("val/a/0.jpg", "val/a/1.jpg", "val/b/0.jpg")
    make_list(root, "val", "./val/a/0.jpg 0", "val/a/1.jpg 0", "val/b/0.jpg 1")
    skip = frozenset({"val/a/0.jpg", "val/c/9.jpg"})
    data_set = open_split(root, data_format, Mode.EVAL, 10, 0, skip)
    assert contents(data_set) == [("val/a/1.jpg", 0), ("val/b/0.jpg", 1)]
    # --balanced-sampling and --class-weights use these lists.
    assert (data_set.files, data_set.labels.tolist()) == (["val/a/1.jpg", "val/b/0.jpg"], [0, 1])
    all_names = frozenset({"val/a/0.jpg", "val/a/1.jpg", "val/b/0.jpg"})
    assert "--skip-list leaves no val images" in error_of(root, Mode.EVAL, data_format=data_format, skip=all_names)


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "webdataset"])
def test_skipped_records_are_omitted(converted, data_format):
    root = converted[data_format]
    for mode in Mode:
        images = DataRoot(root).listed(mode)
        # The test keeps only the first validation image, or half of the training images.
        skipped = images[:: 1 if mode is Mode.EVAL else 2][1:]
        data_set = open_split(root, data_format, mode, 3, 0, frozenset(image.name for image in skipped))
        expected = [read_image(image) for image in images if image not in skipped]
        assert raw_contents(data_set) == expected
        # The positions in the stored order include the images of the skip list.
        assert DataRoot(root, skip=frozenset(image.name for image in skipped)).listed(mode) == images
    all_names = frozenset(image.name for image in images)
    assert "--skip-list leaves no val images" in error_of(root, Mode.EVAL, data_format=data_format, skip=all_names)


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "webdataset"])
@pytest.mark.parametrize("place", ["1", "x"])
def test_missing_skipped_record_is_rejected(converted, data_format, place):
    root = converted[data_format]
    shard = RECORDS[data_format].detect(root, Mode.EVAL)[0]
    name = f"{shard.rpartition('/')[2]}@{place}"
    assert name in error_of(root, Mode.EVAL, data_format=data_format, skip=frozenset({name}))


def test_lmdb_with_skip_list_is_rejected(converted):
    skip = frozenset({"val_lmdb@00000001"})
    error = error_of(converted["lmdb"], Mode.EVAL, data_format="lmdb", skip=skip)
    assert error.startswith(f"{converted['lmdb']}/val_lmdb: LMDBs do not support --skip-list; convert")
    assert open_split(converted["lmdb"], "lmdb", Mode.TRAIN, 3, 0, skip).size == 30


def test_lmdb_without_records_is_rejected(tmp_path):
    data_files.write_lmdb(tmp_path / "val_lmdb", [])
    assert "val_lmdb: contains no records; write it" in error_of(tmp_path, Mode.EVAL, data_format="lmdb")


@pytest.mark.parametrize("text", [b"7", b"12\n", b"7 \t\r\v\n", b"007", b"123456", b"000123456", b"0"])
def test_webdataset_labels_are_decimal_digits(tmp_path, text):
    with open(tmp_path / "val-0.tar", "wb") as f, webdataset.TarWriter(f, encoder=False) as writer:
        writer.write({"__key__": "a", "jpg": b"x", "cls": text})
    data_set = open_split(str(tmp_path), "webdataset", Mode.EVAL, 10**6, 0)
    assert contents(data_set) == [("x", int(text))]


def test_invalid_labels_become_negative(tmp_path):
    """Only some of the labels are checked before the run."""
    texts = [b"7x", b" 7", b"7 7", b"", b" ", b"x", b"-7", b"7\0", b"1234567890", b"123456789"]
    texts, places = data_files.unchecked(texts, b"1")
    with open(tmp_path / "val-0.tar", "wb") as f, webdataset.TarWriter(f, encoder=False) as writer:
        for i, text in enumerate(texts):
            writer.write({"__key__": str(i), "jpg": b"x", "cls": text})
    labels = [label for _, label in contents(open_split(str(tmp_path), "webdataset", Mode.EVAL, 10, 0))]
    assert [labels[i] for i in places] == [*[-1] * 9, 123456789]
    assert labels.count(1) == len(texts) - len(places)
    labels, places = data_files.unchecked([2.5, 0.999, 3, -4], 1)
    heads = [recordio.HEAD.pack(0, label, 0, 0) for label in labels]
    (tmp_path / "val.rec").write_bytes(b"".join(recordio.encode(head + b"x") for head in heads))
    labels = [label for _, label in contents(open_split(str(tmp_path), "recordio", Mode.EVAL, 10, 0))]
    assert [labels[i] for i in places] == [-1, -1, 3, -4]
    assert labels.count(1) == len(heads) - len(places)


def test_recordio_label_may_follow_the_header(tmp_path):
    """MXNet writes a list of one label this way. The label in the header has no meaning then."""
    heads = [recordio.HEAD.pack(0, 2, 0, 0), struct.pack("<IfQQf", 1, 0, 1, 0, 3)]
    (tmp_path / "val.rec").write_bytes(b"".join(recordio.encode(head + b"x") for head in heads))
    data_set = open_split(str(tmp_path), "recordio", Mode.EVAL, 10, 0)
    assert raw_contents(data_set) == [(b"x", 2), (b"x", 3)]
    assert [read_image(image) for image in data_set.records()] == [(b"x", 2), (b"x", 3)]


def test_label_of_every_shard_is_checked(tmp_path):
    for shard, label in enumerate((b"0", b"9")):
        with open(tmp_path / f"val-{shard}.tar", "wb") as f, webdataset.TarWriter(f, encoder=False) as writer:
            writer.write({"__key__": "a", "jpg": b"x", "cls": label})
    assert "val-1.tar: has label 9, but" in error_of(tmp_path, Mode.EVAL, 3, "webdataset")


def test_tfrecord_without_label_stops_loader(tmp_path):
    """Only some of the records are checked before the run."""
    labels, [place] = data_files.unchecked([None], 1)
    with contextlib.closing(TFRecordWriter(str(tmp_path / "val-00000-of-00001"))) as writer:
        for label in labels:
            fields = {} if label is None else {tfrecord.LABEL: (label, "int")}
            writer.write({tfrecord.IMAGE: (b"x", "byte"), **fields})
    data_set = open_split(str(tmp_path), "tfrecord", Mode.EVAL, 3, 0)
    assert contents(data_set, place) == [("x", 1)] * place
    with pytest.raises(RuntimeError):
        contents(data_set, 1, shard_id=place, num_shards=len(labels))  # a batch that contains only this record


@pytest.mark.parametrize(
    ("data_format", "names"),
    [
        ("tfrecord", {"train-00000-of-00003": "train-00000-of-00003.tfrecord", "val-": "validation-"}),
        ("webdataset", {"train-": "imagenet-train-", "val-": "imagenet-validation-"}),
    ],
)
def test_common_shard_names_are_recognized(converted, tmp_path, data_format, names):
    for path in converted[data_format].iterdir():
        name = path.name
        for old, new in names.items():
            name = name.replace(old, new)
        if not name.endswith(".idx"):
            (tmp_path / name).symlink_to(path)
    assert open_split(str(tmp_path), "auto", Mode.TRAIN, 3, 0).size == 30
    assert open_split(str(tmp_path), "auto", Mode.EVAL, 3, 0).size == 23


def make_list(root, split, *lines):
    with open(f"{root}/{split}.txt", "w") as f:
        f.write("".join(f"{line}\n" for line in lines))


def test_file_list_has_the_names_of_the_class_folders_for_training(make):
    root = make("train/ant/a", "train/bee/b", "train/cat/c", "x", "y")
    make_list(root, "val", "x 0", "y 2")
    data_set = open_split(root, "auto", Mode.EVAL, 3, 0)
    assert data_set.data_format == "filelist"
    assert data_set.classes == data_set.class_names == ["ant", "bee", "cat"]


def test_balanced_sampler_draws_classes_and_images_uniformly(make):
    root = make("a/0", "b/0", "b/1", "b/2", "c/0")
    data_set = SimpleNamespace(files=["a/0", "b/0", "c/0", "b/1", "b/2"], labels=np.int64([0, 2, 5, 2, 2]))
    sampler = BalancedSampler(data_set, Path(root), 3, 1, 60, 2)
    batches = [sampler() for _ in range(5)]
    drawn = [[os.path.relpath(bytes(path).decode(), root) for path in paths] for paths, _ in batches]
    label_of = {"a": 0, "b": 2, "c": 5}
    for names, (_, labels) in zip(drawn, batches, strict=True):
        assert labels.tolist() == [[label_of[name[0]]] for name in names]
        counts = Counter(name[0] for name in names)
        assert len(names) == 60 and min(counts.values()) > 10 and len(counts) == 3
        assert {*names} == {*data_set.files}
    assert len({*map(tuple, drawn)}) == 5
    resumed = BalancedSampler(data_set, root, 3, 1, 60, 2, 1, 1)
    assert [resumed()[1].tolist() for _ in range(2)] == [labels.tolist() for _, labels in batches[3:]]
    for seed, rank in ((3, 0), (1, 1)):
        assert BalancedSampler(data_set, root, seed, rank, 60, 2)()[1].tolist() != batches[0][1].tolist()


def test_balanced_data_set_reads_the_drawn_images_only_if_it_shuffles(make):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/b/10.jpg")
    data_set = open_folder(root, Mode.TRAIN, 10, 0)
    arguments = root, 0, 0, 24, 1
    balanced = data_sets.balanced(data_set, BalancedSampler(data_set, *arguments))
    paths, labels = BalancedSampler(data_set, *arguments)()
    names = [os.path.relpath(bytes(path).rstrip(b"\0").decode(), root) for path in paths]
    assert {*names} == {"train/a/0.jpg", "train/b/0.jpg", "train/b/10.jpg"}
    assert contents(balanced, 24, shuffle=True) == list(zip(names, labels[:, 0].tolist(), strict=True))
    assert contents(balanced, 3) == contents(data_set, 3)
    assert (balanced.has_reader, data_set.has_reader, balanced.size) == (False, True, 3)


def test_file_reader_shuffles_and_changes_its_shard_only_in_training(monkeypatch):
    calls = []
    readers_of_dali = SimpleNamespace(file=lambda **options: calls.append(options) or ("image", "label"))
    fake = SimpleNamespace(readers=readers_of_dali, cast=lambda label, dtype: (label, dtype))
    monkeypatch.setattr(nvidia.dali, "fn", fake)
    for shuffle in (True, False):
        read = folder.read("root", ["a.jpg"], [7], "Reader", 1, 2, shuffle)
        assert read == ("image", ("label", nvidia.dali.types.INT64))
        expected = {"name": "Reader", "shard_id": 1, "num_shards": 2, "stick_to_shard": not shuffle}
        expected |= {"file_root": "root", "files": ["a.jpg"], "labels": [7], "shuffle_after_epoch": shuffle}
        assert calls.pop() == expected | {"pad_last_batch": True, "dont_use_mmap": True}


def test_folder_names_are_the_default_class_names():
    opened = [data_sets.DataSet("folder", 1, ["a"], None, "", names) for names in (None, ["cat"])]
    assert [(each.classes, each.class_names) for each in opened] == [(["a"], ["a"]), (["a"], ["cat"])]


def test_encoded_images_have_no_labels():
    batches = iter([[np.frombuffer(image, np.uint8) for image in (b"a", b"bcd")]])
    assert raw_contents(data_sets.encoded_images(batches), 2) == [(b"a", -1), (b"bcd", -1)]


@pytest.mark.parametrize(
    ("limit", "shorter_side", "is_large"), [(8000, 80.0, False), (8000, 81.0, True), (7999, 8.0, True)]
)
def test_image_files_are_limited_to_a_number_of_pixels(tmp_path, monkeypatch, limit, shorter_side, is_large):
    """The image has 100 x 80 pixels."""
    monkeypatch.setattr(bad_images, "MAX_PIXELS", limit)
    options, read = [], fn.io.file.read
    monkeypatch.setattr(fn.io.file, "read", lambda paths, **given: options.append(given) or read(paths, **given))
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    batches = iter([[os.fsencode(tmp_path / "a.png")]])
    opened = data_sets.image_files(batches, shorter_side)
    if is_large:
        with pytest.raises(RuntimeError, match="reshape"):
            raw_contents(opened, 1)
    else:
        assert raw_contents(opened, 1) == [((tmp_path / "a.png").read_bytes(), -1)]
    assert options == [{"dont_use_mmap": True}]  # truncating a mapped file would kill the process


def test_shards_shuffle_with_their_own_seeds_and_read_files_in_the_same_order():
    arguments = [shards.reader_arguments("x", shard, 4, True, size, 7) for shard, size in ((0, 99), (2, 10**7))]
    assert [(chosen["seed"], chosen["initial_fill"]) for chosen in arguments] == [(7, 25), (9, shards.SHUFFLE_BUFFER)]
    assert shards.shard_order(True, 7) == {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": 7}
    assert shards.shard_order(False, 7) == {}


@pytest.mark.parametrize("data_format", data_files.READERS)
def test_reader_of_each_format_uses_size_and_seed(converted, monkeypatch, data_format):
    calls = []
    for name in ("reader_arguments", "shard_order"):
        real = getattr(shards, name)
        monkeypatch.setattr(shards, name, lambda *arguments, real=real: calls.append(arguments) or real(*arguments))
    raw_contents(open_split(converted[data_format], data_format, Mode.TRAIN, 3, 7), shuffle=True)
    expected = [("Reader", 0, 1, True, 30, 7), (True, 7)]
    assert calls == (expected if data_format in convert.SHARDED else expected[:1])


def test_digest_depends_on_every_element_of_a_long_array():
    labels = np.zeros(5000, np.int64)
    changed = labels.copy()
    changed[2500] = 1
    parts = [("a", 1, labels), ("a", 1, changed), ("a", 2, labels), ("b", 1, labels)]
    assert len({data_sets.digest(*part) for part in parts}) == 4


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("data_format", data_files.ALL)
def test_digest_depends_on_list_and_not_on_location(converted, photos, tmp_path, data_format):
    def digest(root, **options):
        return open_split(root, data_format, Mode.EVAL, 3, 0, **options).digest

    root = converted[data_format]
    shutil.copytree(root, tmp_path / "copy")
    expected = digest(root)
    assert digest(tmp_path / "copy") == expected
    if data_format != "lmdb":  # the LMDB reader cannot skip records
        name = DataRoot(str(root)).listed(Mode.EVAL)[3].name
        assert digest(root, skip=frozenset([name])) != expected
    else:
        database = tmp_path / "copy/val_lmdb/data.mdb"
        os.truncate(database, database.stat().st_size + 4096)  # the records and their labels remain the same
        assert digest(tmp_path / "copy") != expected
    # Only one image has moved to a different class.
    moved = shutil.copytree(photos, tmp_path / "moved")
    (moved / "val/class0/00.jpg").rename(moved / "val/class1/00.jpg")
    if data_format == "filelist":
        images = DataRoot(str(moved)).listed(Mode.EVAL)
        (moved / "val.txt").write_text("".join(f"{image.name} {image.label}\n" for image in images))
    elif data_format != "folder":
        data_files.write(moved, tmp_path / "x", data_format, 3)
        moved = tmp_path / "x"
    assert digest(moved) != expected


def test_shuffle_buffer_is_not_larger_than_a_shard():
    """A larger buffer would mix images of two epochs."""
    assert shards.reader_arguments("Reader", 1, 3, True, 10, 5)["initial_fill"] == 4
    assert shards.reader_arguments("Reader", 1, 3, True, 10**6, 5)["initial_fill"] == shards.SHUFFLE_BUFFER
