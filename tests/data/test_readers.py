import json
import os
import shutil

import numpy as np
import pytest
import webdataset
from nvidia.dali import pipeline_def

from paddle_resnet.data import listing, readers, records
from paddle_resnet.tools import convert
from utils.errors import UsageError
from utils.mode import Mode


@pytest.fixture
def make(tmp_path):
    """Write files, each with its own path for content (a reader decodes nothing); a name ending in / is a folder."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            folder = path if name.endswith("/") else path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(name)
        return str(tmp_path)

    return make


def open_folder(image_root, *arguments):
    return readers.open_split(image_root, "folder", *arguments)


def raw_contents(data_set, batch_size=None, **shard):
    """What the DALI operator yields in one batch, by default the whole split: [(bytes of the file, label)]."""

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
    """What the DALI operator yields in one batch of the files of `make`: [(path, label)]."""
    return [(content.decode(), label) for content, label in raw_contents(data_set, batch_size, **shard)]


def refusal(image_root, mode, num_of_class=10, data_format="folder", **options):
    with pytest.raises(UsageError) as error:
        readers.open_split(image_root, data_format, mode, num_of_class, 0, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_classes_are_sorted_and_label_the_images(make):
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


def test_validation_images_come_in_order_whatever_the_seed(make):
    root = make("val/a/2.jpg", "val/a/1.jpg", "val/b/0.jpg", "train/a/0.jpg", "train/b/0.jpg")
    for seed in (0, 1):
        data_set = open_folder(root, Mode.EVAL, 10, seed)
        assert contents(data_set) == [("val/a/1.jpg", 0), ("val/a/2.jpg", 0), ("val/b/0.jpg", 1)]


@pytest.mark.parametrize("b_in_val", [(), ("val/b/",)], ids=["missing", "empty"])
def test_class_without_validation_images_shifts_no_label(make, b_in_val):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/c/0.jpg", "val/a/0.jpg", "val/c/0.jpg", *b_in_val)
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b", "c"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/c/0.jpg", 2)]


def test_without_training_images_val_numbers_the_classes(make):
    data_set = open_folder(make("val/b/0.jpg", "val/a/0.jpg"), Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/b/0.jpg", 1)]


def test_what_is_no_class_and_no_image_is_ignored(make):
    images = [f"val/a/{i}{suffix}" for i, suffix in enumerate((*listing.IMAGE_SUFFIXES, ".JPG", ".JPEG"))]
    noise = ["list.txt", "jpg", "0.jpg.part", "._0.jpg", "folder.jpg/"]
    root = make(*images, *[f"val/a/{name}" for name in noise], "val/.cache/0.jpg", "val/0.jpg")
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a"]
    assert [path for path, _ in contents(data_set)] == images


def test_linked_class_folder_is_read(make, tmp_path):
    root = make("elsewhere/0.jpg", "val/")
    (tmp_path / "val" / "a").symlink_to(tmp_path / "elsewhere")
    assert contents(open_folder(root, Mode.EVAL, 10, 0)) == [("elsewhere/0.jpg", 0)]


def test_training_order_follows_the_seed(make):
    root = make(*(f"train/{label}/{i}.jpg" for label in "abc" for i in range(8)))
    first, again, other = (contents(open_folder(root, Mode.TRAIN, 10, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert first != sorted(first)


def test_last_batch_of_a_shard_repeats_the_last_image(make):
    root = make(*(f"val/a/{i}.jpg" for i in range(5)))
    data_set = open_folder(root, Mode.EVAL, 10, 0)
    shards = [[path for path, _ in contents(data_set, 3, shard_id=i, num_shards=2)] for i in (0, 1)]
    assert shards == [["val/a/0.jpg", "val/a/1.jpg", "val/a/1.jpg"], ["val/a/2.jpg", "val/a/3.jpg", "val/a/4.jpg"]]


def test_as_many_classes_as_outputs_are_accepted(make):
    assert open_folder(make("train/a/0.jpg", "train/b/0.jpg"), Mode.TRAIN, 2, 0).classes == ["a", "b"]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ["none", "file"])
def test_missing_root_is_refused(make, mode, name):
    root = f"{make('file')}/{name}"
    assert f"--image-root {root}: not a folder" in refusal(root, mode)


@pytest.mark.parametrize(("mode", "split"), [(Mode.TRAIN, "train"), (Mode.EVAL, "val")])
def test_missing_split_is_refused(make, tmp_path, mode, split):
    says = f"--image-root {tmp_path}: has no folder {split}/"
    assert says in refusal(str(tmp_path), mode)
    other = {"train": "val", "val": "train"}[split]
    assert says in refusal(make(f"{other}/a/0.jpg"), mode)


def test_name_that_is_not_utf8_is_refused(make):
    root = make("train/a/0.jpg")
    with open(os.path.join(os.fsencode(root), b"train/a/caf\xe9.jpg"), "wb"):
        pass
    assert "b'train/a/caf\\xe9.jpg' is not valid UTF-8; rename the file" in refusal(root, Mode.TRAIN)


@pytest.mark.parametrize("name", ["train/", "train/0.jpg", "train/.hidden/0.jpg"])
def test_no_class_folders_are_refused(make, tmp_path, name):
    assert f"--image-root {tmp_path}: train/ has no class folders" in refusal(make(name), Mode.TRAIN)


@pytest.mark.parametrize("names", [["val/a/"], ["val/a/0.txt"], ["val/", "train/a/0.jpg"]])
def test_no_images_are_refused(make, tmp_path, names):
    assert f"--image-root {tmp_path}: val/ contains no images" in refusal(make(*names), Mode.EVAL)


@pytest.mark.parametrize("name", ["train", "train/b"])
def test_folder_that_cannot_be_listed_is_refused(make, tmp_path, monkeypatch, name):
    """As for a user without the right to; root has it everywhere."""
    root, scandir = make("train/a/0.jpg", "train/b/0.jpg"), listing.os.scandir

    def denied(path):
        if str(path) == f"{tmp_path}/{name}":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(listing.os, "scandir", denied)
    assert f"{tmp_path}/{name}: cannot be listed (Permission denied); make it readable" in refusal(root, Mode.TRAIN)


@pytest.mark.parametrize("mode", Mode)
def test_more_classes_than_outputs_are_refused(make, tmp_path, mode):
    root = make(*(f"{split}/{label}/0.jpg" for split in ("train", "val") for label in "abc"))
    message = refusal(root, mode, num_of_class=2)
    assert "--num-of-class 2" in message
    assert f"3 class folders in {tmp_path}" in message
    assert "use --num-of-class 3" in message


def test_class_in_val_alone_is_refused(make, tmp_path):
    message = refusal(make("train/a/0.jpg", "val/a/0.jpg", "val/b/0.jpg"), Mode.EVAL)
    assert f"--image-root {tmp_path}: val/b has no train/b" in message


def test_skip_list_leaves_images_out_and_keeps_the_labels(make, tmp_path):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/b/1.jpg", "val/a/0.jpg", "val/b/0.jpg")
    (tmp_path / "skip.txt").write_text("train/a/0.jpg\n\n./train/b/1.jpg\nval/a/0.jpg\n")
    skip = listing.read_skip_list(tmp_path / "skip.txt", root)
    assert contents(open_folder(root, Mode.TRAIN, 10, 0, skip)) == [("train/b/0.jpg", 1)]
    assert contents(open_folder(root, Mode.EVAL, 10, 0, skip)) == [("val/b/0.jpg", 1)]


@pytest.mark.parametrize("entry", ["train/a/1.jpg", "train/a", "0.jpg"])
def test_skip_list_with_an_entry_that_names_no_file_is_refused(make, tmp_path, entry):
    root = make("train/a/0.jpg")
    (tmp_path / "skip.txt").write_text(f"train/a/0.jpg\n{entry}\n")
    with pytest.raises(UsageError, match=f"--skip-list .*skip.txt: {entry} is not a file in {root}; remove"):
        listing.read_skip_list(tmp_path / "skip.txt", root)


def test_skip_list_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--skip-list .*none.txt: cannot be read"):
        listing.read_skip_list(tmp_path / "none.txt", tmp_path)


def test_skipping_every_image_is_refused(make, tmp_path):
    root = make("val/a/0.jpg")
    with pytest.raises(UsageError, match="--skip-list: leaves no val images"):
        open_folder(root, Mode.EVAL, 10, 0, frozenset({"val/a/0.jpg"}))


@pytest.mark.parametrize("data_format", listing.STORAGE_FORMATS)
def test_format_is_seen_and_logged(converted, capsys, data_format):
    for mode, size in ((Mode.TRAIN, 30), (Mode.EVAL, 23)):
        root = str(converted[data_format])
        assert readers.open_split(root, "auto", mode, 3, 0).size == size
        split = {Mode.TRAIN: "train", Mode.EVAL: "val"}[mode]
        assert capsys.readouterr().out == f"--data-format auto: the {split} split in {root} is {data_format}\n"


def test_several_formats_are_refused_and_one_of_them_can_be_named(make, tmp_path):
    root = make("train/a/0.jpg", "train.rec", "val/a/0.jpg")
    assert "contains the train split as recordio and folder; choose one" in refusal(
        root, Mode.TRAIN, data_format="auto"
    )
    assert readers.open_split(root, "folder", Mode.TRAIN, 10, 0).size == 1
    assert readers.open_split(root, "auto", Mode.EVAL, 10, 0).size == 1


@pytest.mark.parametrize("data_format", listing.STORAGE_FORMATS)
def test_every_format_holds_the_files_of_the_folder(photos, converted, data_format):
    for mode, split in ((mode, mode.value) for mode in Mode):
        data_set = readers.open_split(str(converted[data_format]), data_format, mode, 3, 0)
        assert data_set.classes == (["0", "1", "2"] if data_format == "filelist" else ["class0", "class1", "class2"])
        files = sorted((photos / split).glob("*/*"))
        expected = [(path.read_bytes(), int(path.parent.name[-1])) for path in files]
        found = raw_contents(data_set)
        assert (found if mode is Mode.EVAL else sorted(found)) == (expected if mode is Mode.EVAL else sorted(expected))
        # Stored in random order, so that a buffer suffices for shuffling.
        assert mode is Mode.EVAL or found != expected


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "lmdb", "webdataset"])
@pytest.mark.parametrize("classes", ["a\nb\n", None], ids=["classes.txt", "flag"])
def test_labels_without_outputs_are_refused(converted, tmp_path, data_format, classes):
    for path in converted[data_format].iterdir():
        if path.name != "classes.txt":
            (tmp_path / path.name).symlink_to(path)
    if classes:
        (tmp_path / "classes.txt").write_text(classes)
    message = refusal(tmp_path, Mode.TRAIN, num_of_class=2, data_format=data_format)
    assert "has label 2, but" in message
    assert "allows 0 to 1" in message


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "lmdb", "webdataset", "filelist"])
def test_more_class_names_than_outputs_are_refused(converted, tmp_path, data_format):
    for path in converted[data_format].iterdir():
        if path.name != "classes.txt":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    message = refusal(tmp_path, Mode.EVAL, num_of_class=2, data_format=data_format)
    assert f"--num-of-class 2: less than the 3 classes in {tmp_path}/classes.txt" in message


@pytest.mark.parametrize(
    ("data_format", "says"),
    [
        ("filelist", "train.txt cannot be read"),
        ("recordio", "has no train.rec"),
        ("tfrecord", "has no train-00000-of-00001"),
        ("lmdb", "has no train_lmdb"),
        ("webdataset", "has no train-000000.tar"),
    ],
)
def test_missing_container_is_refused(tmp_path, data_format, says):
    assert f"--image-root {tmp_path}" in refusal(tmp_path, Mode.TRAIN, data_format=data_format)
    assert says in refusal(tmp_path, Mode.TRAIN, data_format=data_format)


def test_missing_tfrecord_shard_is_refused(converted, tmp_path):
    for path in converted["tfrecord"].iterdir():
        if not path.name.startswith("train-00001"):
            (tmp_path / path.name).symlink_to(path)
    assert "has 2 of 3 train shards; add the missing ones" in refusal(tmp_path, Mode.TRAIN, data_format="tfrecord")


def test_unfinished_conversion_is_refused(converted, tmp_path):
    for path in converted["webdataset"].iterdir():
        if path.name != "convert.json":
            (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((converted["webdataset"] / "convert.json").read_text())
    (tmp_path / "convert.json").write_text(json.dumps({**manifest, "complete": False}))
    assert "an interrupted conversion" in refusal(tmp_path, Mode.TRAIN, data_format="auto")


def test_file_list_labels_the_images_and_may_have_spaces_and_tabs(make):
    root = make("some place/a b.jpg", "x.jpg")
    make_list(root, "val", "\ufeffsome place/a b.jpg 2", "", "x.jpg\t0")  # with a byte-order mark
    data_set = readers.open_split(root, "filelist", Mode.EVAL, 10, 0)
    assert data_set.classes == ["0", "1", "2"]
    assert contents(data_set) == [("some place/a b.jpg", 2), ("x.jpg", 0)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x.jpg", "line 2 is not `PATH LABEL` but `x.jpg`"),
        ("x.jpg cat", "line 2 is not `PATH LABEL` but `x.jpg cat`"),
        ("x.jpg -1", "line 2 is not `PATH LABEL`"),
        ("x.jpg 10", "has label 10, but --num-of-class 10 allows 0 to 9"),
    ],
)
def test_bad_line_of_a_file_list_is_refused(make, line, says):
    root = make("x.jpg")
    make_list(root, "val", "x.jpg 0", line)
    assert says in refusal(root, Mode.EVAL, data_format="filelist")


def test_empty_file_list_and_wrong_root_are_refused(make):
    root = make("x.jpg")
    make_list(root, "val")
    assert "contains no images" in refusal(root, Mode.EVAL, data_format="filelist")
    make_list(root, "val", "y.jpg 0")
    assert "y.jpg is not in" in refusal(root, Mode.EVAL, data_format="filelist")


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: None])
def test_every_line_of_a_file_list_is_a_regular_file_or_skipped(make, put):
    root = make("x.jpg", "some place/a.jpg")
    os.symlink("x.jpg", f"{root}/link.jpg")
    put(f"{root}/some place/b.jpg")
    names = ["x.jpg", "some place/a.jpg", "link.jpg", f"{root}/x.jpg", "some place/b.jpg"]
    make_list(root, "val", *(f"{name} 0" for name in names))
    says = f"{root}/val.txt: some place/b.jpg is missing or not a regular file; remove the line"
    assert refusal(root, Mode.EVAL, data_format="filelist") == says
    skip = frozenset(names[-1:])
    assert readers.open_split(root, "filelist", Mode.EVAL, 10, 0, skip).size == 4


@pytest.mark.parametrize("data_format", listing.FILE_FORMATS)
def test_skipped_images_are_left_out(make, data_format):
    root = make("val/a/0.jpg", "val/a/1.jpg", "val/b/0.jpg")
    make_list(root, "val", "./val/a/0.jpg 0", "val/a/1.jpg 0", "val/b/0.jpg 1")
    skip = frozenset({"val/a/0.jpg", "val/c/9.jpg"})
    data_set = readers.open_split(root, data_format, Mode.EVAL, 10, 0, skip)
    assert contents(data_set) == [("val/a/1.jpg", 0), ("val/b/0.jpg", 1)]
    everything = frozenset({"val/a/0.jpg", "val/a/1.jpg", "val/b/0.jpg"})
    assert "--skip-list: leaves no val images" in refusal(root, Mode.EVAL, data_format=data_format, skip=everything)


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "webdataset"])
def test_skipped_records_are_left_out(converted, tmp_path, monkeypatch, data_format):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = converted[data_format]
    for mode in Mode:
        _, _, images = listing.images(str(root), mode)
        skipped = images[:: 1 if mode is Mode.EVAL else 2][1:]  # of val/, all but the first
        data_set = readers.open_split(root, data_format, mode, 3, 0, frozenset(image.name for image in skipped))
        expected = [records.read(image) for image in images if image not in skipped]
        assert raw_contents(data_set) == expected
    everything = frozenset(image.name for image in images)
    assert "--skip-list: leaves no val images" in refusal(root, Mode.EVAL, data_format=data_format, skip=everything)


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "webdataset"])
@pytest.mark.parametrize("place", ["1", "x"])
def test_skipped_record_that_is_not_there_is_refused(converted, tmp_path, monkeypatch, data_format, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = converted[data_format]
    shard = listing.find_shards(root, data_format, Mode.EVAL)[0]
    name = f"{shard.rpartition('/')[2]}@{place}"
    assert name in refusal(root, Mode.EVAL, data_format=data_format, skip=frozenset({name}))


def test_an_lmdb_cannot_skip(converted):
    skip = frozenset({"val_lmdb@00000001"})
    assert "LMDB reader cannot skip" in refusal(converted["lmdb"], Mode.EVAL, data_format="lmdb", skip=skip)
    assert readers.open_split(converted["lmdb"], "lmdb", Mode.TRAIN, 3, 0, skip).size == 30


@pytest.mark.parametrize("text", [b"7", b"12\n", b"007", b"123456", b"000123456", b"0"])
def test_webdataset_labels_are_decimal_digits(tmp_path, text):
    with open(tmp_path / "val-0.tar", "wb") as f, webdataset.TarWriter(f, encoder=False) as writer:
        writer.write({"__key__": "a", "jpg": b"x", "cls": text})
    data_set = readers.open_split(str(tmp_path), "webdataset", Mode.EVAL, 10**6, 0)
    assert contents(data_set) == [("x", int(text))]


def test_first_label_of_every_shard_is_checked(tmp_path):
    for shard, label in enumerate((b"0", b"9")):
        with open(tmp_path / f"val-{shard}.tar", "wb") as f, webdataset.TarWriter(f, encoder=False) as writer:
            writer.write({"__key__": "a", "jpg": b"x", "cls": label})
    assert "val-1.tar: has label 9, but" in refusal(tmp_path, Mode.EVAL, 3, "webdataset")


@pytest.mark.parametrize(
    ("data_format", "names"),
    [
        ("tfrecord", {"train-00000-of-00003": "train-00000-of-00003.tfrecord", "val-": "validation-"}),
        ("webdataset", {"train-": "imagenet-train-", "val-": "imagenet-validation-"}),
    ],
)
def test_other_names_of_shards(converted, tmp_path, data_format, names):
    for path in converted[data_format].iterdir():
        name = path.name
        for old, new in names.items():
            name = name.replace(old, new)
        if not name.endswith(".idx"):
            (tmp_path / name).symlink_to(path)
    assert readers.open_split(str(tmp_path), "auto", Mode.TRAIN, 3, 0).size == 30
    assert readers.open_split(str(tmp_path), "auto", Mode.EVAL, 3, 0).size == 23


def make_list(root, split, *lines):
    with open(f"{root}/{split}.txt", "w") as f:
        f.write("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("data_format", ["folder", "filelist", *readers.RECORD_READERS])
def test_the_digest_is_that_of_the_list_wherever_it_lies(converted, photos, tmp_path, data_format):
    def digest(root, **options):
        return readers.open_split(root, data_format, Mode.EVAL, 3, 0, **options).digest

    root = converted[data_format]
    shutil.copytree(root, tmp_path / "copy")
    expected = digest(root)
    assert digest(tmp_path / "copy") == expected
    if data_format != "lmdb":  # its reader can skip none
        name = listing.images(str(root), Mode.EVAL)[2][3].name
        assert digest(root, skip=frozenset([name])) != expected
    # The same images, one of them in another class.
    moved = shutil.copytree(photos, tmp_path / "moved")
    (moved / "val/class0/00.jpg").rename(moved / "val/class1/00.jpg")
    if data_format == "filelist":
        images = listing.images(str(moved), Mode.EVAL)[2]
        (moved / "val.txt").write_text("".join(f"{image.name} {image.label}\n" for image in images))
    elif data_format != "folder":
        convert.convert(
            moved, tmp_path / "x", data_format, shards=3 if data_format in convert.SHARDED else None, workers=1
        )
        moved = tmp_path / "x"
    assert digest(moved) != expected
