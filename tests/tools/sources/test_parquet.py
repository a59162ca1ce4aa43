"""Parquet files as on Hugging Face's Hub, and Arrow files of save_to_disk. tests/data/test_parquet_files.py tests the
columns."""

import itertools
import json
import os
import struct

import pytest

from layouts import color_of, colors_match, error_of_import, image, obeyed_remedy, put
from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources, workers
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]
COUNTS = {"train": 20, "val": 8}


def rows(count, first=0):
    return [(k, image(k, first + i), f"x/{first + i}_{k}.JPEG") for i in range(count) for k in (2, 0, 3, 1)]


def table(entries, names=NAMES, label=lambda k: k, column="image", labels="label"):
    """Return a table as `datasets` writes it."""
    pixels = pyarrow.array([{"bytes": data, "path": name} for _, data, name in entries])
    numbers = pyarrow.array([label(k) for k, *_ in entries])
    features = {column: {"_type": "Image"}}
    features[labels] = {"names": names, "_type": "ClassLabel"} if names else {"dtype": "int64", "_type": "Value"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pyarrow.table({column: pixels, labels: numbers}).replace_schema_metadata(metadata)


def write(path, content, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(content, path, row_group_size=3, **options)


def hub(root, val="validation", names=NAMES, label=lambda k: k, folder="data/"):
    write(root / f"{folder}train-00000-of-00002.parquet", table(rows(2), names, label))
    write(root / f"{folder}train-00001-of-00002.parquet", table(rows(3, 10), names, label))
    write(root / f"{folder}{val}-00000-of-00001.parquet", table(rows(2, 100), names, label))


def disk(root):
    for split, parts in (("train", (rows(2), rows(3, 10))), ("validation", (rows(2, 100),))):
        for i, part in enumerate(parts):
            path = root / split / f"data-{i:05d}-of-{len(parts):05d}.arrow"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = table(part)
            with pyarrow.ipc.new_stream(str(path), content.schema) as writer:
                writer.write_table(content, 3)
        put(root / split / "state.json", "{}")
    put(root / "dataset_dict.json", '{"splits": ["train", "validation"]}')


def cached(root):
    """Write links as in the cache of Hugging Face's hub, to files whose names are hashes."""
    hub(root)
    blobs = root.with_name("blobs")
    blobs.mkdir()
    for number, path in enumerate(sorted(root.glob("*/*.parquet"))):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(blobs / f"{number:064x}")


@pytest.mark.parametrize("build", [hub, disk, cached])
def test_error_of_training_contains_remedy(tmp_path, capsys, build):
    build(tmp_path / "x")
    kind = "Arrow files" if build is disk else "Parquet files"
    names, _ = obeyed_remedy(tmp_path / "x", kind, COUNTS, capsys)
    assert names == NAMES
    assert dataset.main(["split", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2


def test_labels_of_test_images(tmp_path, capsys):
    hub(tmp_path / "x", "test")
    _, splits, _ = sources.read(tmp_path / "x")
    assert {split: len(images) for split, images in splits.items()} == COUNTS
    assert "8 test images used as validation images" in capsys.readouterr().out
    hub(tmp_path / "y")
    write(tmp_path / "y/data/test-00000-of-00001.parquet", table(rows(1, 50), label=lambda _: -1))
    assert {split: len(images) for split, images in sources.read(tmp_path / "y")[1].items()} == COUNTS
    for name, split, label in (("test", "test", -1), ("validation", "val", None)):
        write(tmp_path / name / "train.parquet", table(rows(5)))
        write(tmp_path / name / f"{name}.parquet", table(rows(1, 50), label=lambda _, label=label: label))
        _, splits, _ = sources.read(tmp_path / name)
        assert {split: len(images) for split, images in splits.items()} == {"train": 16, "val": 4}
        assert f"4 {split} images left out, because they have no label" in capsys.readouterr().out


@pytest.mark.parametrize(("label", "expected"), [(NAMES.__getitem__, NAMES), (lambda k: k, None)])
def test_labels_without_class_names(tmp_path, label, expected):
    hub(tmp_path, names=None, label=label)
    kind, splits, names = sources.read(tmp_path)
    assert (kind, names) == ("parquet", expected)
    assert colors_match(image for images in splits.values() for image in images)


def test_images_are_read_from_the_column_of_the_flag(tmp_path):
    content = table(rows(5), column="crop", labels="kind")
    write(tmp_path / "train.parquet", content.append_column("image", content["crop"].take([1] * 20)))
    for options in (Options(), Options(image_column="crop")):
        _, splits, names = sources.read(tmp_path, options=options)
        assert names == NAMES
        assert all(map(colors_match, splits.values()))
    _, splits, _ = sources.read(tmp_path, options=Options(image_column="image"))
    assert {color_of(read_image(image)[0]) for image in splits["train"]} == {0}


@pytest.mark.parametrize("to", ["webdataset", "folder", "recordio"])
def test_single_file(tmp_path, capsys, to):
    write(tmp_path / "all.parquet", table(rows(5)))
    splits = sources.read(tmp_path / "all.parquet")[1]
    assert {image.name.split("@")[0] for images in splits.values() for image in images} == {"all.parquet"}
    command = ["import", str(tmp_path / "all.parquet"), "--output", str(tmp_path / "x"), "--to", to, "--workers", "1"]
    for _ in range(2):  # repeating the command changes nothing
        assert dataset.main(command) == 0
        assert f"{tmp_path}/x: 16 train and 4 val images in 4 classes from parquet as {to}" in capsys.readouterr().out
    assert all(colors_match(DataRoot(tmp_path / "x").images(mode)[1]) for mode in Mode)
    if to == "folder":
        assert (tmp_path / "x/train/ray").is_dir()
        assert color_of(next((tmp_path / "x/train/ray").glob("[0-9]_2.JPEG")).read_bytes()) == 2


@pytest.mark.parametrize("name", [None, "", "..", ".hidden.jpg", "x/", "a\nb.jpg"])
def test_names_that_cannot_be_files(tmp_path, name):
    write(tmp_path / "train.parquet", table([(k, data, name) for k, data, _ in rows(5)]))
    sources.import_(tmp_path, tmp_path / "x", "folder", workers=1)
    images = DataRoot(tmp_path / "x").images(Mode.TRAIN)[1]
    assert len(images) == 16
    assert colors_match(images)
    names = [image.name for image in sources.read(tmp_path)[1]["train"]]
    assert all(map(str.isprintable, names))
    assert len({os.path.basename(name) for name in names}) == 16


def test_blocks_are_read_once_and_their_order_is_random(tmp_path):
    write(tmp_path / "train.parquet", table([(i % 4, bytes([i]) * 50, None) for i in range(60)]))
    for window, mixed in (({"window_bytes": 1}, 3), ({}, 60)):
        images = sources._shuffled(sources.read(tmp_path, options=Options(val=0.01))[1]["train"], **window)
        numbers = [read_image(image)[0][0] for image in images]
        groups = [image.place[0] for image in images]
        changes = sum(a != b for a, b in itertools.pairwise(groups))
        assert numbers != sorted(numbers)
        assert groups != sorted(groups)
        assert (changes < 20) == (mixed == 3)


def test_interrupted_import_continues(tmp_path, monkeypatch):
    hub(tmp_path / "source")
    read, count = read_image, 0

    def interrupted(listed):
        nonlocal count
        count += 1
        if count > 11:
            raise KeyboardInterrupt
        return read(listed)

    for to in ("webdataset", "folder"):
        count = 0
        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(workers, "read_image", interrupted)
            sources.import_(tmp_path / "source", tmp_path / to, to, shards=5 if to == "webdataset" else None, workers=1)
        with pytest.raises(UsageError, match="the import is incomplete; repeat the"):
            DataRoot(tmp_path / to).images(Mode.TRAIN)
        sources.import_(tmp_path / "source", tmp_path / to, to, shards=5 if to == "webdataset" else None, workers=1)
        assert all(colors_match(DataRoot(tmp_path / to).images(mode)[1]) for mode in Mode)


def cut(name, size):
    def build(root):
        (disk if name.endswith("arrow") else hub)(root)
        data = (root / name).read_bytes()
        put(root / name, data[: len(data) - size])

    return build


def wrong_offsets(root):
    """Write an Arrow file whose labels (strings) end outside their buffer."""
    disk(root)
    path = root / "train/data-00001-of-00002.arrow"
    content = pyarrow.table({"image": [{"bytes": b"x", "path": "x"}], "label": ["abcdefgh"]})
    with pyarrow.ipc.new_stream(str(path), content.schema) as writer:
        writer.write_table(content)
    data = path.read_bytes()
    end = data.rindex(b"abcdefgh")
    start = data.rindex(struct.pack("<2i", 0, 8), 0, end)
    put(path, data[:start] + struct.pack("<2i", 0, 16) + data[start + 8 :])


def missing(root):
    hub(root)
    (root / "data/train-00001-of-00002.parquet").unlink()


def of_other_classes(root):
    hub(root)
    write(root / "data/train-00001-of-00002.parquet", table(rows(3), NAMES[::-1]))


def two_sets(root):
    hub(root, folder="small/")
    hub(root, folder="large/")


def unlabeled(root):
    hub(root)
    write(root / "data/train-00001-of-00002.parquet", table(rows(3), label=lambda k: None if k == 3 else k))


def partly_named(root):
    hub(root, names=None)
    write(root / "data/train-00001-of-00002.parquet", table(rows(3)))


def paths_only(root):
    hub(root)
    write(root / "data/train-00001-of-00002.parquet", table([(k, None, name) for k, _, name in rows(3)]))


BAD = {
    "truncated": (
        cut("data/train-00001-of-00002.parquet", 9),
        "train-00001-of-00002.parquet: damaged (",
    ),
    "truncated Arrow file": (
        cut("train/data-00001-of-00002.arrow", 8),
        "data-00001-of-00002.arrow: damaged (truncated",
    ),
    "wrong offsets": (wrong_offsets, "data-00001-of-00002.arrow: damaged ("),
    "missing": (missing, "data: 1 of 2 files are missing (train-00001-of-00002.parquet); download them"),
    "other classes": (of_other_classes, "train-00001-of-00002.parquet: contains different class names than"),
    "names only in one file": (partly_named, "train-00001-of-00002.parquet: contains different class names than"),
    "two data sets": (two_sets, "the folders large, small contain different data sets; import one folder, such as"),
    "label missing": (unlabeled, "train-00001-of-00002.parquet: row 2 of group 0: label None is not a class"),
    "label out of range": (
        lambda root: hub(root, label=lambda k: k + 2),
        "train-00000-of-00002.parquet: row 0 of group 0: has label 4, but the data set has only 4 class names; "
        "number the classes from 0, or choose different labels with --label-column",
    ),
    "no images": (paths_only, "row 0 of group 0 contains no image in the column image; write the file again"),
    "no training images": (
        lambda root: write(root / "validation.parquet", table(rows(1))),
        "contains no training images; import the folder that contains them",
    ),
    "no rows for training": (
        lambda root: [write(root / f"{split}.parquet", table(rows(1))[:n]) for split, n in (("train", 0), ("val", 4))],
        "contains no training images; import the folder that contains them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys)


def test_missing_files_are_accepted_if_allowed(tmp_path, capsys):
    missing(tmp_path)
    assert len(sources.read(tmp_path, options=Options(allow_partial=True))[1]["train"]) == 8
    assert "1 of 2 files are missing" in capsys.readouterr().err


def test_options_of_other_kinds_are_rejected(tmp_path, capsys):
    hub(tmp_path / "x")
    message = error_of_import(tmp_path / "x", capsys, "--label-index", "1")
    assert "--label-index 1: " in message and "not supported for parquet, the kind of" in message
