"""Splits that are missing, have a wrong name or are inconsistent. test_readers.py tests valid splits."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import data_files
import pytest
from data_files import open_split

from helpers import without_permission
from paddle_resnet import dataset
from paddle_resnet.data import classes, images, layout, manifest, skip_list
from paddle_resnet.data.formats import FORMATS, RECORDS, SHARDED, filelist, folder, read_image, webdataset
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("cache")


def error_of(root, mode=Mode.EVAL):
    with pytest.raises(UsageError) as e:
        DataRoot(str(root)).listed(mode)
    return str(e.value)


def error_of_reader(root, mode):
    with pytest.raises(UsageError) as e:
        open_split(root, "auto", mode, 5, 0)
    return str(e.value)


def test_missing_file_list_is_reported_with_remedy(photos, tmp_path):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.txt").write_text("train/class0/00.jpg 0\n")
    (tmp_path / "val").rename(tmp_path / "images")
    message = "has no val.txt; create val.txt, or use only train.txt with --run-scope train_only"
    assert error_of(tmp_path) == f"--image-root {tmp_path}: {message}"


def test_missing_record_file_is_reported_with_remedy(converted, tmp_path):
    shutil.copytree(converted["webdataset"], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("val*"):
        path.unlink()
    assert "has no val-000000.tar; create val-000000.tar, or use only train-000000.tar" in error_of(tmp_path)


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz"])
def test_compressed_shards_are_named_with_remedy(converted, tmp_path, ending):
    root = tmp_path / "a b"
    root.mkdir()
    content = (converted["webdataset"] / "val-000000.tar").read_bytes()
    names = [f"train-000000{ending}", *(f"val-{number:06d}{ending}" for number in range(6))]
    for name in names:
        (root / name).write_bytes(gzip.compress(content))
    with pytest.raises(UsageError) as error:
        layout.splits(root)
    problem = (
        f"{root}: contains neither train/ nor val/ in any format; {', '.join(names[:5])} and 2 more cannot be read, "
    )
    command = f"gunzip '{root}'/*{Path(f'x{ending}').suffix}"
    assert str(error.value) == f"{problem}because DALI does not support gzip: run `{command}`"
    assert command in error_of(root, Mode.TRAIN)
    with pytest.raises(UsageError, match="has no train-000000.tar; train-000000"):
        DataRoot(str(root), "webdataset").listed(Mode.TRAIN)
    subprocess.run(["gunzip", root / names[0]], check=True)
    assert f"has no val-000000.tar; val-000000{ending}, " in error_of(root)
    subprocess.run(command, shell=True, check=True)
    counts = [len(DataRoot(str(root)).listed(mode)) for mode in Mode]
    assert counts[0] > 0 and counts[1] == 6 * counts[0]


def test_class_names_that_differ_only_in_unicode_form_are_reported(photos, tmp_path):
    """macOS writes an accented letter as a letter and an accent (NFD)."""
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    nfc, nfd = "caf\xe9", "cafe\u0301"
    (tmp_path / "train/class0").rename(tmp_path / "train" / nfc)
    (tmp_path / "val/class0").rename(tmp_path / "val" / nfd)
    command = f"mv {tmp_path}/val/{nfd} {tmp_path}/val/{nfc}"
    message = error_of(tmp_path).replace("'", "")
    problem = r"the name cafe\u0301 looks like the class caf\xe9, but has a different Unicode form"
    assert message == f"{tmp_path}/val/{nfd}: {problem}; rename the folder: `{command}`"
    subprocess.run(error_of(tmp_path).split("`")[1], shell=True, check=True)
    assert len(DataRoot(str(tmp_path)).listed(Mode.EVAL)) == 23
    (tmp_path / "train" / nfd).mkdir()
    message = error_of(tmp_path, Mode.TRAIN)
    assert r"'cafe\u0301'" in message and r"'caf\xe9'" in message
    assert message.endswith("move the images into one of the folders and remove the other")


@pytest.mark.parametrize(
    ("data_format", "first"),
    [("recordio", "@0"), ("tfrecord", "@0"), ("webdataset", "@1536"), ("lmdb", "@00000000")],
)
def test_records_are_listed_in_stored_order(converted, tmp_path, data_format, first):
    root = shutil.copytree(converted[data_format], tmp_path / "x")
    data = DataRoot(root)
    images = data.listed(Mode.TRAIN)
    assert (data.format(Mode.TRAIN), data.images(Mode.TRAIN)[0].classes) == (data_format, TRAINED)
    assert {(image.label, image.kind) for image in images} == {(None, data_format)}
    shards = FORMATS[data_format].detect(str(root), Mode.TRAIN)
    assert list(dict.fromkeys(image.path for image in images)) == shards
    assert images[0].name == os.path.basename(shards[0]) + first
    assert sorted(read_image(image)[1] for image in images) == [0] * 10 + [1] * 10 + [2] * 10
    manifest = (root / "convert.json").read_text()
    (root / "convert.json").write_text(manifest.replace('"images": 30', '"images": 31'))
    with pytest.raises(UsageError, match="has 30 train images, but 31 according to convert.json"):
        DataRoot(root).listed(Mode.TRAIN)
    (root / "convert.json").unlink()
    assert DataRoot(root).listed(Mode.TRAIN) == images


def test_root_without_splits_is_an_error(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "set")
    assert "use the folder that contains train/ and val/; if this is a folder of class folders, run `" in (
        error_of(tmp_path / "set", Mode.TRAIN)
    )
    with pytest.raises(
        UsageError, match="contains neither train/ nor val/ in any format; use the folder that contains"
    ):
        layout.splits(tmp_path / "set")


@pytest.mark.parametrize("wrong", ["root/train", "root/train/", "root/val", "."])
def test_data_set_one_level_away_is_suggested(photos, tmp_path, work_in, wrong):
    shutil.copytree(photos, tmp_path / "root")
    work_in(tmp_path)
    expected = "./root" if wrong == "." else "root"
    assert error_of(wrong, Mode.TRAIN) == f"--image-root {wrong}: has no folder train/; use {expected}"


def put_image(split):
    (split / "cat").mkdir(parents=True)
    (split / "cat/0.jpg").touch()


def test_only_complete_visible_data_sets_are_suggested(tmp_path, monkeypatch):
    for name in ("a b", "c", ".hidden"):
        for mode in Mode:
            put_image(tmp_path / name / mode.value)
    put_image(tmp_path / "incomplete/train")
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    assert error_of(tmp_path, Mode.TRAIN).endswith(f"; use '{tmp_path}/a b' or {tmp_path}/c")
    for name in "de":  # the message contains at most three data sets
        shutil.copytree(tmp_path / "c", tmp_path / name)
    assert error_of(tmp_path, Mode.TRAIN).endswith(f"; use '{tmp_path}/a b' or {tmp_path}/c or {tmp_path}/d")
    shutil.rmtree(tmp_path / "c/val")
    split = (
        f"split {tmp_path}/c/train --output {tmp_path}/c_split` and use --image-root {tmp_path}/c_split, or use only"
    )
    assert error_of(tmp_path / "c").endswith(f"{split} train/ with --run-scope train_only")
    monkeypatch.chdir(tmp_path / "a b/train")
    assert error_of(".").endswith("; use ..")
    monkeypatch.chdir(tmp_path / "a b")
    assert error_of("train").endswith("; use .")
    shutil.rmtree(tmp_path / "a b/train")
    message = "has no folder train/; create the folder, or use only val/ with --run-scope eval_only"
    assert error_of(tmp_path / "a b", Mode.TRAIN) == f"--image-root {tmp_path}/a b: {message}"


def test_missing_split_of_a_flag_is_reported_with_remedy(tmp_path):
    remedy = "put the class folders into val/, or use a different folder"
    with pytest.raises(UsageError, match=f"^--verify {tmp_path}: has no val/; {remedy}$"):
        layout.check_split("--verify", tmp_path, Mode.EVAL)
    (tmp_path / "val").mkdir()
    layout.check_split("--verify", tmp_path, Mode.EVAL)
    with pytest.raises(UsageError, match=f"^--verify {tmp_path}/x: not a folder; use the folder that contains val/$"):
        layout.check_split("--verify", tmp_path / "x", Mode.EVAL)
    with pytest.raises(UsageError, match="x: not a folder; use the folder that contains train/ and val/$"):
        layout.detect(tmp_path / "x", Mode.EVAL)


@pytest.mark.parametrize("names", [["of-00001", "of-00003"], ["of-00002", "of-00002.tfrecord", "of-00001"]])
def test_tfrecord_shards_of_several_data_sets_are_rejected(tmp_path, names):
    for name in names:
        (tmp_path / f"train-00000-{name}").touch()
    total = max(name[7] for name in names)
    message = error_of(tmp_path, Mode.TRAIN)
    if len(names) < int(total):
        assert message.endswith(f"has {len(names)} of {total} train shards; add the missing ones")
    else:
        assert f"has {len(names)} train shards, but {total} according to their names (train-00000-of-0000" in message
        assert message.endswith("; move those of other data sets to a different folder")


def write_shards(root, *names, samples=5):
    """Write tar shards of `samples` images with labels 0 to 4."""
    for name in names:
        with SHARDED["webdataset"](str(root / name)) as write:
            for i in range(samples):
                write(i, b"x", "jpg", i % 5)


def names_of(stem, *numbers):
    return [f"{stem}{number:04d}.tar" for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((0, 1, 3), r"has 3 of 4 train shards; add the missing ones \(imagenet1k-train-0002.tar\)$"),
        ((1, 2, 3), None),
        ((0,), None),
        ((1,), None),
        ((2,), r"has 1 of 3 train shards; .* \(imagenet1k-train-0000.tar, imagenet1k-train-0001.tar\)$"),
        ((1, 9999), r"has 2 of 9999 .* \(imagenet1k-train-0002.tar, .*, imagenet1k-train-0006.tar and 9992 more\)$"),
    ],
)
def test_missing_tar_shard_is_an_error(tmp_path, numbers, problem):
    write_shards(tmp_path, *names_of("imagenet1k-train-", *numbers), "imagenet1k-validation-00.tar")
    assert len(DataRoot(tmp_path).listed(Mode.EVAL)) == 5
    if problem is None:
        assert len(DataRoot(tmp_path).listed(Mode.TRAIN)) == 5 * len(numbers)
        return
    for read in (error_of, error_of_reader):
        assert re.search(problem, read(tmp_path, Mode.TRAIN))


def test_numbers_of_tar_shards_may_be_unpadded(tmp_path):
    write_shards(tmp_path, *(f"train-{i}.tar" for i in range(11)), samples=1)
    assert len(DataRoot(tmp_path).listed(Mode.TRAIN)) == 11


@pytest.mark.parametrize(
    ("other", "mode"),
    [
        ("cifar10-train-000000.tar", Mode.TRAIN),
        ("imagenet1k-train-000004.tar", Mode.TRAIN),
        ("train-0004.tar", Mode.TRAIN),
        ("imagenet1k-val-01.tar", Mode.EVAL),
    ],
)
def test_tar_shards_of_several_data_sets_are_an_error(tmp_path, other, mode):
    root = tmp_path / "root"
    root.mkdir()
    write_shards(root, *names_of("imagenet1k-train-", 0, 1, 2, 3), "imagenet1k-validation-00.tar", other)
    first = "imagenet1k-train-0000.tar" if mode is Mode.TRAIN else "imagenet1k-validation-00.tar"
    message = error_of(root, mode)
    assert f"contains the {mode.value} split several times (" in message and first in message and other in message
    assert message.endswith("); move all but one to a different folder")
    (root / other).rename(tmp_path / other)  # obey the message
    assert len(DataRoot(root).listed(mode)) == (20 if mode is Mode.TRAIN else 5)


def test_shard_lists_of_other_programs_are_compared(tmp_path):
    names = names_of("imagenet1k-train-", 0, 1, 2)
    write_shards(tmp_path, *names[:2], "imagenet1k-validation-00.tar")
    split = {"name": "train", "num_samples": 15, "filenames": names, "shard_lengths": [5, 5, 5]}
    lists = {
        "_info.json": json.dumps({"splits": {"train": split}}),
        "info.json": json.dumps({"splits": {"train": {"filenames": names}}}),
        "sizes.json": json.dumps(dict.fromkeys(names, 5)),
    }
    remedy = "copy the data set again, or remove this list"
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        assert error_of(tmp_path, Mode.TRAIN) == (
            f"{tmp_path}/{name}: lists 3 train shards, but the folder has 2 (missing: {names[2]}); {remedy}"
        )
        assert len(DataRoot(tmp_path).listed(Mode.EVAL)) == 5  # no list contains this split
        (tmp_path / name).unlink()  # obey the message
        assert len(DataRoot(tmp_path).listed(Mode.TRAIN)) == 10
    write_shards(tmp_path, names[2])
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    assert len(DataRoot(tmp_path).listed(Mode.TRAIN)) == 15
    write_shards(tmp_path, "imagenet1k-train-0003.tar")
    assert "/_info.json: lists 3 train shards, but the folder has 4 (not listed: imagenet1k-train-0003" in error_of(
        tmp_path, Mode.TRAIN
    )
    (tmp_path / "imagenet1k-train-0003.tar").unlink()
    (tmp_path / "_info.json").write_text(lists["_info.json"].replace("[5, 5, 5]", "[5, 8, 5]"))
    for read in (error_of, error_of_reader):
        message = f"{names[1]}: has 5 samples, but 8 according to _info.json; copy it again, or remove _info.json"
        assert message in read(tmp_path, Mode.TRAIN)
    (tmp_path / "_info.json").write_text("{")
    assert error_of(tmp_path, Mode.TRAIN) == f"{tmp_path}/_info.json: damaged; copy it again, or remove it"


@pytest.mark.parametrize(
    "content",
    [
        *([], 3, {"a": {}}, {"cifar10-train-0000.tar": 9}, {"splits": 1}, {"splits": {"train": []}}),
        {"splits": {"train": {"filenames": [3], "shard_lengths": 1}}},
        {"splits": {"train": {"filenames": ["x-train-{0000..0003}.tar"]}}},
    ],
)
def test_lists_of_other_data_sets_are_ignored(tmp_path, content):
    write_shards(tmp_path, "x-train-0000.tar")
    for name in webdataset.SHARD_LISTS:
        (tmp_path / name).write_text(json.dumps(content))
    assert len(DataRoot(tmp_path).listed(Mode.TRAIN)) == 5


def test_nshards_is_compared(tmp_path):
    write_shards(tmp_path, *names_of("train-", 0, 1, 2), "val-0.tar")
    for text in ("3\n", "4", "many"):
        (tmp_path / "nshards.txt").write_text(text)
        assert [len(DataRoot(tmp_path).listed(mode)) for mode in Mode] == [15, 5]
    (tmp_path / "nshards.txt").write_text("5\n")
    for mode in Mode:
        assert error_of(tmp_path, mode) == (
            f"{tmp_path}/nshards.txt: states 5 shards, but the folder has 3 train shards and 1 val shard; copy the "
            "data set again, or remove this file"
        )
    for path in tmp_path.glob("train-*"):
        path.unlink()
    (tmp_path / "nshards.txt").write_text("1")
    assert len(DataRoot(tmp_path).listed(Mode.EVAL)) == 5
    (tmp_path / "nshards.txt").write_text("4")
    assert "states 4 shards, but the folder has 1 val shard; copy" in error_of(tmp_path, Mode.EVAL)


TABLES = ["train/images/x.csv", "train/metadata.jsonl", "_classes.csv"]


@pytest.mark.parametrize("tables", [[], TABLES[1:2], TABLES])
def test_training_set_with_one_class_is_an_error(photos, tmp_path, capsys, tables):
    for mode in Mode:
        shutil.copytree(photos / mode.value / "class0", tmp_path / mode.value / "images")
    for name in tables:
        (tmp_path / name).touch()
    is_read = "; _classes.csv, train/metadata.jsonl, train/images/x.csv are not used to assign labels"
    is_read = {0: "", 1: "; train/metadata.jsonl is not used to assign labels", 3: is_read}[len(tables)]
    remedy = "put the images into one folder per class" if tables else "add other classes"
    problem = f"--image-root {tmp_path}: all train images belong to one class, images{is_read}; {remedy}"
    with pytest.raises(UsageError) as e:
        open_split(tmp_path, "auto", Mode.TRAIN, 3, 0)
    assert str(e.value) == f"{problem}, or use --allow-one-class"
    assert open_split(tmp_path, "auto", Mode.EVAL, 3, 0).size == 8
    images.log_once.cache_clear()
    capsys.readouterr()
    assert open_split(tmp_path, "auto", Mode.TRAIN, 3, 0, allow_one_class=True).size == 10
    assert problem in capsys.readouterr().err


def test_records_may_have_one_class_among_the_checked_labels(tmp_path, few_checked_labels):
    data_files.write_lmdb(tmp_path / "train_lmdb", [(b"image", label) for label in (1, 0, 1, 0, 1)])
    assert open_split(tmp_path, "lmdb", Mode.TRAIN, 2, 0).size == 5


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("data_format", data_files.FORMATS)
def test_records_of_one_class_are_an_error(photos, tmp_path, data_format):
    for split in ("train", "val"):
        shutil.copytree(photos / "train/class0", tmp_path / "x" / split / "images")
    data_files.write(tmp_path / "x", tmp_path / "y", data_format)
    with pytest.raises(UsageError, match="all train images belong to one class, images; add other classes, or use"):
        open_split(tmp_path / "y", data_format, Mode.TRAIN, 3, 0)
    assert open_split(tmp_path / "y", data_format, Mode.TRAIN, 3, 0, allow_one_class=True).size == 10


def test_class_folder_that_is_not_utf8_is_an_error(photos, tmp_path):
    """The skip list of `verify` may contain all images of the folder, but the class would remain."""
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    name = os.fsdecode(b"caf\xe9")
    for mode in Mode:
        (tmp_path / mode.value / "class1").rename(tmp_path / mode.value / name)
    skip = frozenset(f"{mode.value}/{name}/{path.name}" for mode in Mode for path in photos.glob(f"{mode.value}/*/*"))
    message = f"{tmp_path}/{{}}: the class folder b'caf\\xe9' is not valid UTF-8; rename the folder"
    for mode in Mode:  # the folders in train/ number the classes of both splits
        with pytest.raises(UsageError) as e:
            open_split(tmp_path, "auto", mode, 3, 0, skip)
        assert str(e.value) == message.format("train")
    with pytest.raises(UsageError, match=r"is not valid UTF-8; rename the folder$"):
        convert.convert(tmp_path, tmp_path / "output", "tfrecord", workers=1)
    (tmp_path / "train" / name).rename(tmp_path / "train/café")  # obey the message
    with pytest.raises(UsageError) as e:
        open_split(tmp_path, "auto", Mode.EVAL, 3, 0, skip)
    assert str(e.value) == message.format("val")
    (tmp_path / "val" / name).rename(tmp_path / "val/café")
    for mode in Mode:
        assert open_split(tmp_path, "auto", mode, 3, 0).classes == ["café", "class0", "class2"]


@pytest.mark.parametrize("split", Mode)
def test_class_folders_one_level_too_deep_are_an_error(photos, tmp_path, split):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    place = tmp_path / split.value
    shutil.move(place, tmp_path / "moved")
    shutil.move(tmp_path / "moved", place / "images")
    assert error_of(tmp_path, split) == (
        f"{place}/images: contains folders but no images; move these folders to {place}"
    )
    shutil.copytree(place / "images/class0", place / "other")
    files = folder.index(tmp_path, split, classes=["images", "other"]).names
    assert len(files) == len(list((place / "other").iterdir()))
    shutil.rmtree(place / "images")
    (place / "other/images").mkdir()
    assert len(folder.index(tmp_path, split, classes=["other"])[0]) == len(files)
    for path in (place / "other").glob("*.jpg"):
        path.unlink()
    (place / "other/images").rmdir()
    assert folder.index(tmp_path, split, classes=["other"])[0] == []


@pytest.mark.parametrize("name", ["__MACOSX", ".ipynb_checkpoints", ".hidden", "lost+found", "@eaDir"])
def test_system_folders_are_not_classes(photos, tmp_path, capsys, name):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train" / "another").mkdir()
    shutil.copytree(photos / "val/class0", tmp_path / "train" / name)
    shutil.copytree(photos / "val/class0", tmp_path / "val" / name)
    for mode in Mode:
        files, labels, names, _ = folder.index(str(tmp_path), mode)
        assert names == ["another", "class0", "class1", "class2"]
        assert set(labels) == {1, 2, 3}
        assert not any(name in file for file in files)
    output = capsys.readouterr().out
    assert output.count(name) == output.count("\n") == 2


def test_broken_hidden_link_is_ignored(photos, tmp_path, capsys):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train/.trash").symlink_to("/nowhere")
    (tmp_path / "train/device").symlink_to("/dev/null")
    assert len(folder.index(str(tmp_path), Mode.TRAIN)[2]) == 3
    assert capsys.readouterr().out == ""


def test_hidden_images_are_ignored_with_warning(photos, tmp_path, capsys):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    for name in (".a.JPG", "._b.jpg", ".directory"):
        shutil.copy(tmp_path / "train/class0/00.jpg", tmp_path / "train/class1" / name)
    count = len(folder.index(str(photos), Mode.TRAIN)[0])
    assert len(folder.index(str(tmp_path), Mode.TRAIN)[0]) == count
    message = f"{tmp_path}/train: 1 entry ignored: 1 hidden image (class1 1; for example class1/.a.JPG); "
    assert message in capsys.readouterr().err


def test_file_list_with_contradictory_labels_is_rejected(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "train")
    (tmp_path / "train.txt").write_text("train/class0/00.jpg 0\ntrain/class0/03.jpg 1\ntrain/class0/00.jpg 2\n")
    message = f"{tmp_path}/train.txt: train/class0/00.jpg has the labels 0 and 2; remove one of the lines"
    assert error_of(tmp_path, Mode.TRAIN) == message


def test_size_of_lists_is_limited(tmp_path):
    for path, read in (
        ("train.txt", lambda root: filelist.index(root, Mode.TRAIN)),
        ("classes.txt", classes.class_names),
        ("skip.txt", lambda root: DataRoot(root, skip_list=root / "skip.txt").skip),
    ):
        (tmp_path / path).touch()
        os.truncate(tmp_path / path, 2**30 + 1)  # takes no space on the disk
        with pytest.raises(UsageError, match=f"{path}:? cannot be read .1073741825 bytes, limit 1073741824"):
            read(tmp_path)
        (tmp_path / path).unlink()


@pytest.mark.parametrize("label", [2, 10_000_000])
def test_file_list_label_above_image_count_is_rejected(tmp_path, label):
    """If labels were not limited, a typo in a label could create a network with millions of outputs."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    (tmp_path / "train.txt").write_text(f"a 0\nb {label}\n")
    with pytest.raises(
        UsageError, match=f"the file lists contain only 2 images, but an image has label {label}; number the"
    ):
        DataRoot(tmp_path).count_classes(Mode.TRAIN)
    (tmp_path / "train.txt").write_text("a 0\nb 1\n")
    root = DataRoot(tmp_path)
    assert root.count_classes(Mode.TRAIN) == 2
    with pytest.raises(UsageError, match="label 1"):  # each number of classes is compared with the labels
        root.open(Mode.TRAIN, 1, 0)
    (tmp_path / "val.txt").write_text("b 2\n")  # both lists define the classes
    assert DataRoot(tmp_path).count_classes(Mode.TRAIN) == DataRoot(tmp_path).count_classes(Mode.EVAL) == 3
    (tmp_path / "val.txt").unlink()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/train.txt").write_text("../a 0\n")
    assert DataRoot(tmp_path / "sub", allow_outside=True).count_classes(Mode.TRAIN) == 1
    assert len(DataRoot(tmp_path / "sub", allow_outside=True).listed(Mode.TRAIN)) == 1
    for list_images in (DataRoot.listed, DataRoot.file_list, DataRoot.count_classes):
        with pytest.raises(UsageError, match="correct the path, or add --allow-outside"):
            list_images(DataRoot(tmp_path / "sub"), Mode.TRAIN)
    with pytest.raises(UsageError, match=r"val.txt cannot be read \(No such file"):
        DataRoot(tmp_path, "filelist").count_classes(Mode.EVAL)
    # An explicit format takes precedence over the detected format.
    assert DataRoot(tmp_path, "folder").count_classes(Mode.TRAIN) is None
    (tmp_path / "train/a").mkdir(parents=True)
    assert DataRoot(tmp_path, "folder").count_classes(Mode.TRAIN) == 1
    (tmp_path / "classes.txt").touch()  # an empty file contains no class names
    assert DataRoot(tmp_path, "filelist").count_classes(Mode.TRAIN) == 2
    assert DataRoot(tmp_path, "lmdb").count_classes(Mode.TRAIN) is None
    (tmp_path / "classes.txt").write_text("x\ny\nz\n")  # names of classes without images
    assert [DataRoot(tmp_path, kind).count_classes(Mode.TRAIN) for kind in ("filelist", "lmdb", "folder")] == [3, 3, 1]


@pytest.mark.parametrize("names", ["train", "class folders"])
def test_suggested_split_command_runs_as_printed(photos, tmp_path, work_in, names):
    root = tmp_path / "my photos"
    shutil.copytree(photos / "train", root / "train" if names == "train" else root)
    work_in(root)
    command, new_root = re.search(
        r"run `\S*python -m paddle_resnet.dataset (.*)` and use --image-root (.*_split'?)", error_of(".")
    ).groups()
    assert dataset.main(shlex.split(command)) == 0
    [new_root] = shlex.split(new_root)
    assert new_root == f"{root}_split"
    assert layout.splits(new_root) == [Mode.TRAIN, Mode.EVAL]
    assert len(folder.index(new_root, Mode.EVAL)[2]) == 3


@pytest.fixture
def root(photos, tmp_path):
    """Create a copy of the photos that the test may change."""
    return shutil.copytree(photos, tmp_path / "root")


TRAINED = ["class0", "class1", "class2"]


@pytest.mark.parametrize("with_train", [False, True], ids=["only val/", "class missing from train/"])
def test_labels_of_class_folders_come_from_trained_network(root, with_train):
    shutil.rmtree(root / "val/class0")
    shutil.rmtree(root / "train/class1" if with_train else root / "train")
    assert set(folder.index(root, Mode.EVAL, classes=TRAINED)[1]) == {1, 2}
    data_set = open_split(root, "auto", Mode.EVAL, 3, 0, trained=TRAINED)
    assert data_set.classes == TRAINED
    names = folder.own_classes(root, Mode.EVAL)
    # --predictions also lists the images.
    assert len(DataRoot(root).listed(Mode.EVAL, names)) == data_set.size
    assert folder.own_classes(root / "val", Mode.EVAL) is None
    if not with_train:
        assert set(folder.index(root, Mode.EVAL)[1]) == {0, 1}


def test_class_folder_unknown_to_network_is_rejected(root):
    (root / "val/class2").rename(root / "val/class3")
    with pytest.raises(
        UsageError, match=r"val/class3 is not one of the 3 classes of the checkpoint \(class0, class1, "
    ):
        folder.index(root, Mode.EVAL, classes=TRAINED, is_trained=True)
    with pytest.raises(UsageError, match=r"val/class0 is not one of the 3 classes of the checkpoint \(a, b, c\)"):
        open_split(root, "auto", Mode.EVAL, 3, 0, trained=["a", "b", "c"])
    problem = "val/class3 has no train/class3; add the folder, or remove val/class3"
    with pytest.raises(UsageError, match=f"^--image-root {root}: {problem}$"):
        folder.index(root, Mode.EVAL)


def test_unnamed_classes_do_not_define_labels(root):
    """Without classes.txt, the classes of a file list have no names, whereas class folders with numeric names do have
    names."""
    unnamed = classes.numbers(3)
    assert set(open_split(root, "auto", Mode.EVAL, 3, 0, trained=unnamed).labels) == {0, 1, 2}
    assert classes.numbers(None) == []
    shutil.rmtree(root / "val/class0")
    for i in (1, 2):
        (root / f"val/class{i}").rename(root / f"val/{i}")
    assert set(open_split(root, "auto", Mode.EVAL, 3, 0, trained=unnamed).labels) == {1, 2}


@pytest.mark.parametrize("data_format", ["filelist", "recordio"])
def test_class_names_in_different_order_than_in_network_are_rejected(converted, tmp_path, data_format):
    root = shutil.copytree(converted[data_format], tmp_path / "x", symlinks=True)
    twice = ["x", "class1", "x"]
    for names, trained in ((TRAINED, TRAINED), (["cats", "class1", "dogs"], TRAINED), (twice, twice)):
        (root / "classes.txt").write_text("".join(f"{name}\n" for name in names))
        assert open_split(root, "auto", Mode.EVAL, 3, 0, trained=trained).classes == names
    (root / "classes.txt").write_text("class1\nclass2\nx\n")
    for trained in (TRAINED, ["x", "class1", "class1"]):
        with pytest.raises(UsageError, match=r"classes.txt: class1 has label 0, but label 1 in the checkpoint; number"):
            open_split(root, "auto", Mode.EVAL, 3, 0, trained=trained)


def test_names_of_class_folders_come_from_classes_txt(root):
    (root / "classes.txt").write_text("cat\ndog\nox\n")
    data_set = open_split(root, "auto", Mode.EVAL, 3, 0)
    assert (data_set.classes, data_set.class_names) == (TRAINED, ["cat", "dog", "ox"])
    (root / "classes.txt").write_text(f"cat\ndog\n{'x' * 1000}\n")
    assert classes.class_names(root) == ["cat", "dog", "x" * 1000]
    (root / "classes.txt").write_text(" a\nb \n\n")
    assert classes.class_names(root) == [" a", "b ", ""]
    (root / "classes.txt").write_text(f"cat\ndog\n{'x' * 1001}\n")
    with pytest.raises(UsageError, match=r"classes.txt: cannot be read \(a line exceeds 1000 characters\); write one"):
        open_split(root, "auto", Mode.EVAL, 3, 0)
    (root / "classes.txt").write_text("class0\nclass2\nclass1\n")
    data_set = open_split(root, "auto", Mode.EVAL, 3, 0)
    assert data_set.classes == data_set.class_names == ["class0", "class2", "class1"]
    (root / "classes.txt").write_text("Class 0\nClass 2\nClass 1\n")
    data_set = open_split(root, "auto", Mode.EVAL, 3, 0, trained=["class2", "class1", "class0"])
    assert data_set.class_names == ["Class 2", "Class 1", "Class 0"]  # the order of the network's outputs
    (root / "classes.txt").write_text("class0\nclass1\nclass2\n")
    assert open_split(root, "auto", Mode.EVAL, 3, 0).class_names == TRAINED
    # The text has a byte order mark and Windows line endings.
    (root / "classes.txt").write_text("\ufeffcat\r\ndog\r\nox\r\n")
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "val/class1")
    assert open_split(root, "auto", Mode.EVAL, 3, 0, trained=TRAINED).class_names == ["cat", "dog", "ox"]
    with pytest.raises(UsageError, match=r"classes.txt: has 3 lines for 2 classes; write one name per class"):
        open_split(root, "auto", Mode.EVAL, 3, 0)


def test_empty_training_class_requires_allow_empty(root, capsys):
    for path in (root / "train/class1").iterdir():
        path.rename(path.with_suffix(".heic"))
    shutil.rmtree(root / "val/class2")
    with pytest.raises(
        UsageError, match=r"train has no images for 1 of 3 classes \(class1\); .*--allow-empty-classes$"
    ):
        open_split(root, "auto", Mode.TRAIN, 3, 0)
    assert open_split(root, "auto", Mode.TRAIN, 3, 0, allow_empty=True).size == 20
    assert open_split(root, "auto", Mode.EVAL, 3, 0).size == 16
    warnings = capsys.readouterr().err.splitlines()
    assert warnings[0].startswith(
        f"warning: {root}/train: 10 entries ignored: 10 .heic (class1 10; for example class1/01.heic); "
    )
    assert warnings[1:] == [
        f"warning: --image-root {root}: train has no images for 1 of 3 classes (class1); add images",
        f"warning: --image-root {root}: val has no images for 1 of 3 classes (class2); add images",
    ]


def test_missing_class_of_file_list_logs_a_warning(root, capsys):
    classes.check_classes(root, Mode.TRAIN, "filelist", [1, 1], ["a", "b\n"], allow_one_class=True)
    assert capsys.readouterr().err.endswith(": all train images belong to one class, b\\n; add other classes\n")
    classes.check_classes(root, Mode.TRAIN, "filelist", [0, 2], ["class0", "a\nb", "class2"])
    message = r"train has no images for 1 of 3 classes (a\nb); add images"
    assert capsys.readouterr().err == f"warning: --image-root {root}: {message}\n"


def test_allowed_single_class_logs_a_warning(root, capsys):
    classes.check_classes(root, Mode.EVAL, "folder", [0], ["class0"])
    for name in ("class0", "class2"):
        shutil.rmtree(root / "train" / name)
    open_split(root, "auto", Mode.TRAIN, 3, 0, allow_one_class=True)
    assert (
        capsys.readouterr().err
        == f"warning: --image-root {root}: all train images belong to one class, class1; add other classes\n"
    )


def test_ignored_files_are_counted_by_kind_and_class(root, capsys):
    for name in (
        "class0/a.gif",
        "class0/b.GIF",
        "class1/c.gif",
        "class1/notes",
        "top.jpg",
        "._top.jpg",
        "README.txt",
        "class2/.x.gif",
    ):
        (root / "val" / name).touch()
    (root / "val/class2/inner.jpg").mkdir()
    (root / "val/class2/.inner.jpg").mkdir()
    os.symlink("/nowhere", root / "val/class2/gone.heic")
    files = folder.index(root, Mode.EVAL)[0]
    assert len(files) == 23
    [line] = capsys.readouterr().err.splitlines()
    parts = [
        "3 .gif (class0 2, class1 1; for example class0/a.gif)",
        "1 image outside the class folders (for example top.jpg)",
        "1 without extension (class1 1; for example class1/notes)",
        "1 .heic (class2 1; for example class2/gone.heic)",
        "1 folder (class2 1; for example class2/inner.jpg)",
    ]
    suffixes = ".jpg, .jpeg, .jfif, .png, .bmp, .tif, .tiff or .webp"
    rule = f"images must be in a class folder and have a name that ends in {suffixes} and does not begin with a dot"
    assert line == f"warning: {root}/val: 7 entries ignored: {', '.join(parts)}; {rule}"
    ignored = ["class0/a.gif", "class0/b.GIF", "class1/c.gif", "class1/notes", "class2/gone.heic", "class2/inner.jpg"]
    assert sorted(folder.ignored_files(root, Mode.EVAL)) == [f"val/{name}" for name in [*ignored, "top.jpg"]]
    with without_permission(root / "val/class1"):  # list_folder reports the error
        ignored = folder.ignored_files(root, Mode.EVAL)
    assert "val/class0/a.gif" in ignored and "val/class1/c.gif" not in ignored
    assert [name for name in ignored if "class2" in name] == ["val/class2/gone.heic", "val/class2/inner.jpg"]


def test_warning_about_ignored_files_lists_some_classes_and_kinds(capsys):
    folder.warn_of_ignored("x", [(".a", f"c{i}", "f.a") for i in range(4)] + [(f".{i}", "c", "f\n") for i in range(10)])
    warning = capsys.readouterr().err
    assert "x: 14 entries ignored: 4 .a (c0 1, c1 1, c2 1 and 1 more; for example c0/f.a), 1 .0 (c 1; for" in warning
    assert r"1 .8 (c 1; for example c/f\n) and 1 more; images must be in" in warning


def test_root_path_that_is_not_utf_8_is_rejected(photos, tmp_path, work_in):
    os.symlink(photos, os.path.join(os.fsencode(tmp_path), b"bild\xe9r"))
    [root] = os.listdir(tmp_path)
    root = os.path.join(tmp_path, root)
    for read in (layout.splits, lambda root: open_split(root, "folder", Mode.TRAIN, 3, 0)):
        with pytest.raises(UsageError, match=r"bild\\udce9r': the path is not valid UTF-8; rename the folder"):
            read(root)
    folder = os.path.join(os.fsencode(tmp_path), b"\xe9")
    os.mkdir(folder)
    work_in(folder)
    with pytest.raises(UsageError, match="--image-root '.': the path is not valid UTF-8; rename the folder"):
        layout.check_root(".")


def test_record_files_are_sorted(tmp_path):
    """The order in which the file system lists files depends on their names and on the order of their creation."""
    names = [f"train-{i:06d}.tar" for i in range(30)]
    for name in [*names[::3], *names[2::3], *names[1::3], "train.rec"]:
        (tmp_path / name).touch()
    assert [name for name in os.listdir(tmp_path) if name in names] != names
    assert RECORDS["webdataset"].detect(tmp_path, Mode.TRAIN) == [f"{tmp_path}/{name}" for name in names]


def test_paths_of_data_sets_are_reserved(tmp_path):
    for name in ("x-train-0.tar", "val_lmdb", "a.idx", "train.rec.old", "notes.txt"):
        (tmp_path / name).touch()
    reserved = ["a.idx", "classes.txt", "convert.json", "train", "train.csv", "train.jsonl", "train.txt", "val"]
    reserved += ["val.csv", "val.jsonl", "val.txt", "val_lmdb"]
    assert layout.occupied(tmp_path) == [f"{tmp_path}/{name}" for name in [*reserved, "x-train-0.tar"]]
    assert layout.occupied(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (1, "a"), (5, "a, a, a, a, a"), (6, "a, a, a, a, a and 1 more"), (9, "a, a, a, a, a and 4 more")],
)
def test_long_enumerations_are_shortened(count, text):
    assert images.some(["a"] * count) == text


def test_folders_with_names_of_images_are_not_images(tmp_path):
    (tmp_path / "a.jpg").mkdir()
    for name in ("b.jpg", ".c.jpg", "d.txt"):
        (tmp_path / name).touch()
    assert folder.images_at_the_top(tmp_path) == ["b.jpg"]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (ListedImage("x/a@1", "d/x/a@1", 0), "d/x/a@1"),
        (ListedImage("a.rec@1", "d/a.rec", None, "recordio"), "d/a.rec@1"),
    ],
)
def test_full_name_of_an_image_includes_the_root(image, name):
    assert image.full_name == name


def test_labels_without_known_limit_are_checked(tmp_path):
    classes.check_labels("x", [0, 2**31 - 1], None, None)
    classes.check_labels("x", [1], 2, None)
    for label, limit, allowed, remedy in (
        (-1, None, "labels are whole numbers from 0", ""),
        (2**31, None, "labels are whole numbers from 0", ""),
        (0.5, None, "labels are whole numbers from 0", ""),
        (2, 2, "--num-of-class 2 allows 0 to 1", ", or use a larger --num-of-class"),
        (2, 3, "classes.txt allows 0 to 1", ", or add names to classes.txt"),
    ):
        remedy = f"number the classes from 0, or set --label-offset to the first label{remedy}$"
        with pytest.raises(UsageError, match=f"^x: has label .*, but {allowed}; {remedy}"):
            classes.check_labels("x", [label], limit, ["a", "b"] if limit == 3 else None)


def test_labels_are_shown_with_all_digits_and_only_existing_files():
    with pytest.raises(UsageError, match=r"^x: has label 1234567, but the number of classes allows 0 to 1; .*label$"):
        classes.check_labels("x", [1234567], None, ["a", "b"], names_file=None)


def test_labels_of_imagenet_development_kit_have_their_own_remedy():
    """Their order differs from that of the class folders, so --label-offset 1 would evaluate wrong labels."""
    remedy = "development kit, whose order is not that of class folders; instead of this file, use class folders"
    with pytest.raises(UsageError, match=f"val.txt: has label 1000, but .* allows 0 to 999; .*{remedy}"):
        classes.check_labels("val.txt", [1, 1000], 1000, None)
    for path, labels, limit in (("val.txt", [1, 10], 10), ("val.txt", [0, 1001], 1000), ("val.tfrecord", [1000], 1000)):
        with pytest.raises(UsageError, match="; number the classes from 0, or set --label-offset"):
            classes.check_labels(path, labels, limit, None)


def test_several_ignored_entries_of_a_kind_are_plural(tmp_path, capsys):
    ignored = [(folder.OUTSIDE, "", "a.jpg"), ("folder", "c", "x"), (folder.HIDDEN, "c", ".a.jpg")]
    folder.warn_of_ignored(str(tmp_path), [*ignored, *ignored])
    error = capsys.readouterr().err
    for kind in ("images outside the class folders", "folders", "hidden images"):
        assert f" 2 {kind} (" in error


def test_files_of_file_list_are_found_in_a_folder_that_cannot_be_listed(root):
    with pytest.raises(UsageError, match=r"val.txt: val/class0 is missing or not a regular file; remove the line"):
        filelist.check_listed(root, Mode.EVAL, ["val/class0/00.jpg", "val/class0"])
    with without_permission(root / "val/class0"):
        filelist.check_listed(root, Mode.EVAL, ["val/class0/00.jpg"])
        with pytest.raises(
            UsageError, match=r"val.txt: val/class0/x.jpg is missing or not a regular file; remove the line"
        ):
            filelist.check_listed(root, Mode.EVAL, ["val/class0/00.jpg", *(f"val/class0/{x}.jpg" for x in "zyx")])


def test_folder_of_file_list_is_listed_once(root, monkeypatch):
    monkeypatch.setattr(os.path, "isfile", None)
    filelist.check_listed(root, Mode.EVAL, ["val/class0/00.jpg"])


def test_skip_list_restores_unusual_names(tmp_path):
    names = ['"quoted"', "two\nlines", "plain name.jpg", 'a "b"', "\u00fc", os.fsdecode(b"\xe9")]
    for name in names:
        (tmp_path / name).touch()
    text = "".join(map(skip_list.skip_list_line, names))
    assert text == '"\\"quoted\\""\n"two\\nlines"\nplain name.jpg\na "b"\n\u00fc\n"\\udce9"\n'
    (tmp_path / "skip").write_text(text)
    assert DataRoot(tmp_path, skip_list=tmp_path / "skip").skip == set(names)
    (tmp_path / "skip").write_text('"open\n')
    with pytest.raises(
        UsageError, match=f'--skip-list {tmp_path}/skip: a line that begins with " is not a JSON string'
    ):
        assert DataRoot(tmp_path, skip_list=tmp_path / "skip").skip


def test_skip_list_may_name_records_of_an_lmdb(tmp_path):
    (tmp_path / "val_lmdb").mkdir()
    (tmp_path / "skip").write_text("val_lmdb@00000001\n  \n")
    assert DataRoot(tmp_path, skip_list=tmp_path / "skip").skip == {"val_lmdb@00000001"}
    (tmp_path / "broken.jpg").symlink_to("missing")
    (tmp_path / "skip").write_bytes(b"\xef\xbb\xbf./broken.jpg\r\nx/../broken.jpg")
    assert DataRoot(tmp_path, skip_list=tmp_path / "skip").skip == {"broken.jpg"}
    for name in ("val_lmdb", "missing", "missing@0", "@0"):
        (tmp_path / "skip").write_text(f"{name}\n")
        with pytest.raises(UsageError, match=f"skip: {name} is not a file in {tmp_path}; remove the line"):
            assert DataRoot(tmp_path, skip_list=tmp_path / "skip").skip
    (tmp_path / "skip").write_text("../skip")
    with pytest.raises(UsageError, match=f"skip: ../skip is outside {tmp_path}/val_lmdb; remove the line"):
        assert DataRoot(tmp_path / "val_lmdb", skip_list=tmp_path / "skip").skip
    assert DataRoot(tmp_path / "val_lmdb", allow_outside=True, skip_list=tmp_path / "skip").skip == {"../skip"}


@pytest.mark.parametrize(
    ("name", "is_outside"),
    [
        ("a/../../root/b", False),
        ("../root/b", False),
        ("a..b", False),
        ("../b", True),
        ("../root2/b", True),
        ("/b", True),
    ],
)
def test_paths_outside_the_root_are_detected_without_resolving_links(tmp_path, work_in, name, is_outside):
    work_in(tmp_path)
    for path in (name, os.path.join(tmp_path / "root", name)):
        assert images.is_outside(path, "root") == images.is_outside(path, f"{tmp_path}/x/../root") == is_outside
    (tmp_path / "root/val").mkdir(parents=True)
    (tmp_path / "root/val.txt").write_text(f"{name} 0\n")
    with pytest.raises(UsageError, match="which is outside root; correct" if is_outside else "is not in root; copy"):
        DataRoot("root").listed(Mode.EVAL)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("train.rec", "", "contains the train split as recordio (train.rec) and folder (train/); choose one with"),
        ("train.rec", "", "choose one with --data-format"),
        ("train.txt", "", "train.txt contains no images; add lines of the form"),
        ("train.txt", "a 0", "a is not in .*root; copy the file, or use paths relative to that folder"),
        ("train/link", None, "train/link: a broken link; repair or remove it"),
    ],
)
def test_unusable_split_is_rejected(root, path, text, message):
    if text is None:
        (root / path).symlink_to("missing")
    else:
        (root / path).write_text(text)
    assert message.replace(".*root", str(root)) in error_of(root, Mode.TRAIN)


def test_network_with_too_few_outputs_is_rejected(root):
    (root / "classes.txt").write_text("x\ny\nz")
    (root / "val.txt").write_text("val/class0/00.jpg 2")
    for read, kind in (
        (lambda count: folder.index(root, Mode.EVAL, count), "class folders"),
        (lambda count: open_split(root, "filelist", Mode.EVAL, count, 0), "classes"),
    ):
        assert read(3)
        with pytest.raises(UsageError, match=f"--num-of-class 2: fewer than the 3 {kind} in .*; use --num-of-class 3"):
            read(2)
    (root / "classes.txt").unlink()
    with pytest.raises(UsageError, match="val.txt: has label 2, but --num-of-class 2 allows 0 to 1"):
        filelist.index(root, Mode.EVAL, 2)
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    with pytest.raises(UsageError, match="train/ has no class folders; put the images into one folder per class"):
        folder.index(root, Mode.EVAL)


def test_incomplete_conversion_is_rejected(tmp_path):
    (tmp_path / "convert.json").mkdir()
    with pytest.raises(UsageError, match=f"^{tmp_path}/convert.json: cannot be read"):
        manifest.read(tmp_path)
    (tmp_path / "convert.json").rmdir()
    content = {"complete": True, "format": "webdataset", "splits": {"val": {"images": 10}}, "shards": {"val": 2}}
    (tmp_path / "convert.json").write_text(json.dumps(content | {"complete": False}))
    with pytest.raises(UsageError, match="the conversion is incomplete; repeat the `"):
        DataRoot(tmp_path, "webdataset").listed(Mode.EVAL)
    (tmp_path / "convert.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="has no val-000000.tar; use the folder that contains the webdataset files"):
        DataRoot(tmp_path, "webdataset").listed(Mode.EVAL)
    for i in range(2):
        with pytest.raises(UsageError, match=f"has {i} val shard, but 2 according" if i else "has no val-000000.tar"):
            DataRoot(tmp_path, "webdataset").listed(Mode.EVAL)
        write_shards(tmp_path, f"val-{i}.tar")
    assert len(DataRoot(tmp_path, "webdataset").listed(Mode.EVAL)) == 10


def test_blank_lines_of_a_file_list_are_ignored(root):
    (root / "val.txt").write_text(" \n\nval/class0/00.jpg 0\r\n\n val/class1/0 1.jpg\t1")
    assert filelist.index(root, Mode.EVAL) == (["val/class0/00.jpg", " val/class1/0 1.jpg"], [0, 1], None, [3, 5])
    assert [DataRoot(root, kind).format(Mode.EVAL) for kind in ("auto", "folder")] == ["filelist", "folder"]


@pytest.mark.parametrize("line", ["x.jpg", "x.jpg y", "x.jpg 1234567890", "x.jpg -1", "x.jpg 1.5", "\0.jpg 1"])
def test_malformed_line_of_a_file_list_is_rejected(root, line):
    (root / "val.txt").write_text(f"val/class0/00.jpg 999999999\n  {line}\n")
    with pytest.raises(UsageError, match=re.escape(f"val.txt: line 2 is not `PATH LABEL` but `{line}`; correct it")):
        filelist.index(root, Mode.EVAL)


def test_skipped_images_may_be_unusable(root):
    link, name = root / "val/class0/broken.jpg", os.fsdecode(b"val/class1/\xe9.jpg")
    link.symlink_to("/nowhere")
    shutil.copy(root / "val/class1/01.jpg", root / name)
    skip = {"val/class0/broken.jpg", name}
    assert skip < {image.name for image in DataRoot(root, skip=skip).listed(Mode.EVAL)}
    for missing, problem in (
        (name, "is not valid UTF-8; rename"),
        ("val/class0/broken.jpg", "a broken link, or not a"),
    ):
        with pytest.raises(UsageError, match=f"{problem}.*--skip-list"):
            folder.index(root, Mode.EVAL, skip=skip - {missing})
    link.unlink()
    link.symlink_to("broken.jpg")  # a link to itself
    assert folder.image_names(root / "val/class0")[1] == ["broken.jpg"]


def test_file_list_that_is_not_utf_8_is_rejected(root):
    (root / "val.txt").write_bytes(b"\xe9.jpg 0\n")
    with pytest.raises(UsageError, match=r"val.txt cannot be read \(it is not UTF-8\); correct this list"):
        filelist.index(root, Mode.EVAL)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", ["val.txt", "classes.txt", "skip list"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_lists_that_are_not_regular_files_are_rejected(root, tmp_path, name, kind):
    path = tmp_path / name if name == "skip list" else root / name
    {"fifo": os.mkfifo, "device": lambda path: os.symlink("/dev/null", path), "folder": os.mkdir}[kind](path)
    message = "Is a directory" if kind == "folder" else "not a regular file"
    with pytest.raises(UsageError, match=rf"{path}.* cannot be read \({message}\)"):
        if name == "skip list":
            assert DataRoot(root, skip_list=path).skip
        else:
            open_split(root, "filelist" if name == "val.txt" else "auto", Mode.EVAL, 3, 0)


def test_counts_of_a_conversion_apply_only_to_its_format_and_splits(tmp_path):
    content = {"complete": True, "format": "tfrecord", "splits": {"train": {"images": 5}}, "shards": {"train": 2}}
    (tmp_path / "convert.json").write_text(json.dumps(content))
    for mode, data_format, count in (
        (Mode.TRAIN, "recordio", 7),
        (Mode.EVAL, "tfrecord", 7),
        (Mode.TRAIN, "tfrecord", 5),
    ):
        manifest.check_count(tmp_path, mode, data_format, count)
    with pytest.raises(UsageError, match=r"7 train images, .*5 .*convert\.json"):
        manifest.check_count(tmp_path, Mode.TRAIN, "tfrecord", 7)
    with pytest.raises(UsageError, match=r"3 train shards, but 2 according to convert\.json"):
        manifest.check_count(tmp_path, Mode.TRAIN, "tfrecord", 3, "shard")
    name = "train-00000-of-00001"
    (tmp_path / "convert.json").write_text(json.dumps(content | {"bytes": {name: 9}}))
    assert manifest.read(tmp_path)["bytes"] == {name: 9}
    changes = [{"bytes": {name: "9"}}, {"bytes": {f"../{name}": 9}}, {"bytes": {"notes": 9}}, {"complete": 1}]
    changes.append({"format": "webdataset", "bytes": {"../x-train-0.tar": 9}})
    for change in (*changes, {"format": "other"}, {"shards": {"train": True}}, {"shards": {}}, {"splits": []}):
        (tmp_path / "convert.json").write_text(json.dumps(content | change))
        with pytest.raises(UsageError, match="convert.json: damaged; convert the data set again, or remove the file"):
            manifest.read(tmp_path)
