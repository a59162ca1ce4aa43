"""Layouts that mix conventions. Each remedy in an error is obeyed literally; labels are compared with the pixels."""

import json
import subprocess

import numpy as np
import pytest
from scipy import io as matlab
from test_archives import zipped

from layouts import color_of, colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data import sniffer
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]


def folders(pattern, *values, count=3):
    """Return a function that writes images to folders. `pattern` contains {name} and {value}."""

    def build(root):
        for position, value in enumerate(values):
            for k, name in enumerate(NAMES):
                for i in range(count):
                    file = f"{position}{k}{i}.jpg"
                    put(root / pattern.format(name=name, value=value) / file, image(k, i + 50 * position))

    return build


def table(pattern, rows, *files, header="file_name,label\n", folder="images"):
    """Return a function that writes flat images and a table for each of `files`."""

    def build(root):
        for position, file in enumerate(files):
            lines = ""
            for k in range(4):
                for i in range(5):
                    name = f"{position}{'cabd'[k]}{i}"
                    put(root / folder.format(file) / f"{name}.jpg", image(k, i + 50 * position))
                    lines += rows(name, k) + "\n"
            put(root / pattern.format(file), header + lines)

    return build


NAMED = (lambda name, k: f"{name}.jpg,{NAMES[k]}",)
LAYOUTS = {
    "names with spaces": (folders("My Photos/{value}/{name} Bird", "Train Set", "Val Set"), "nested folders", (12, 12)),
    "splits in splits": (folders("{value}/{value}/{name}", "training_set", "test_set"), "nested folders", (12, 12)),
    "splits in classes": (folders("{name}/{value}", "train", "test"), "nested folders", (12, 12)),
    "tables in splits": (table("{}/labels.csv", *NAMED, "train", "valid", folder="{}/images"), "import", (20, 20)),
    "tables next to splits": (table("{}.csv", *NAMED, "train", "valid", folder="{}"), "train.csv, valid.csv", (20, 20)),
    "table in annotations": (
        table("annotations/{}.csv", *NAMED, "all", folder="annotations"),
        "annotations/all.csv",
        (16, 4),
    ),
    "paths from a folder of tables": (
        table("labels/{}.csv", lambda name, k: f"../images/{name}.jpg,{NAMES[k]}", "train", "val"),
        "labels/train.csv, labels/val.csv",
        (20, 20),
    ),
    "one column per class": (
        table(
            "{}.csv",
            lambda name, k: f"{name},{','.join(str(int(j == k)) for j in range(4))}",
            "train",
            header=f"image_id,{','.join(NAMES)}\n",
        ),
        "train.csv: a table with labels",
        (16, 4),
    ),
}


def checked(imported, counts):
    for mode, count in zip(Mode, counts, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert [name.removesuffix(" Bird") for name in numbers.classes] == NAMES
        assert len(images) == count
        assert colors_match(images)


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, name):
    build, what, counts = LAYOUTS[name]
    build(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert what in message
    checked(obey(message.removesuffix(", or use --allow-one-class")), counts)


def test_label_may_be_the_last_of_several_folders(tmp_path, capsys):
    folders("2023/{value}/{name}", "cam0", "cam1")(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert "2023/cam1/cock/ and 3 more: images in nested folders; run `" in message
    long = [f"{folder}_{name}" for folder in ("cam0", "cam1") for name in NAMES]
    for depth, names in ((None, long), (2, long), (-1, NAMES)):  # obey the warning
        _, splits, classes = sources.read(tmp_path / "x", options=Options(class_depth=depth))
        assert classes == names
        warning = "cam0/cock and cam1/cock are different classes; if cock is one class, set --class-depth -1"
        assert (warning in capsys.readouterr().err) == (depth is None)
        images = [image for of_split in splits.values() for image in of_split]
        assert all(color_of(read_image(image)[0]) == image.label % 4 for image in images)
    assert "use a --class-depth closer to 0" in error_of_import(tmp_path / "x", capsys, "--class-depth", "-9")


@pytest.mark.parametrize("folder", ["", "{split}/"])
def test_lists_of_paths_in_class_folders(tmp_path, folder):
    for split, first in (("train", 0), ("test", 50)):
        inner = folder.format(split=split)
        paths = [f"images/{name}/{inner}{split}{i}.jpg" for name in NAMES for i in range(3)]
        for path in paths:
            put(tmp_path / "x" / path, image(NAMES.index(path.split("/")[1]), first + int(path[-5])))
        put(tmp_path / f"x/{split}.txt", "\n".join(paths))
    message = error_of_training(tmp_path / "x")
    assert (
        f"train.txt: line 1 is not `PATH LABEL` but `images/cock/{folder.format(split='train')}train0.jpg`; correct"
        in message
    )
    checked(obey(message.partition("or run ")[2]), (12, 12))


@pytest.mark.parametrize(
    ("path", "text"),
    [("annotations/instances.json", {"images": [], "annotations": []}), ("labels.json", []), ("images/a.json", {})],
)
def test_labels_in_json_are_named(tmp_path, path, text):
    table("{}.csv", *NAMED, "labels")(tmp_path / "x")
    labels = (tmp_path / "x/labels.csv").read_text()
    (tmp_path / "x/labels.csv").unlink()
    put(tmp_path / "x" / path, json.dumps(text))
    message = error_of_training(tmp_path / "x")
    remedy = "write labels.csv with the columns file_name and label to this folder, and import the folder"
    assert f"it contains {path}: JSON files, which may contain the labels; {remedy}" in message
    put(tmp_path / "x/labels.csv", labels)  # obey the message
    sources.import_(tmp_path / "x", tmp_path / "y", "folder", workers=1)
    checked(tmp_path / "y", (16, 4))


def test_one_archive_per_class(tmp_path):
    for k, name in enumerate(NAMES):
        put(tmp_path / f"x/{name}.zip", zipped([(f"{i}.jpg", image(k, i)) for i in range(5)]))
    checked(obey(error_of_training(tmp_path / "x")), (16, 4))


def test_archive_of_images_next_to_a_table_is_named(tmp_path, capsys):
    table("{}.csv", *NAMED, "train", folder="train")(tmp_path / "x")
    files = sorted((tmp_path / "x/train").iterdir())
    put(tmp_path / "x/train.zip", zipped([(file.name, file.read_bytes()) for file in files]))
    for file in files:
        file.unlink()
    error = error_of_import(tmp_path / "x", capsys)
    assert "; the images may be in train.zip, so unpack it: `" in error
    subprocess.run(error.split("`")[1], shell=True, check=True)  # obey the message
    sources.import_(tmp_path / "x", tmp_path / "y", "folder", workers=1)
    checked(tmp_path / "y", (16, 4))


def test_numbers_with_different_widths_are_the_same_class(tmp_path):
    for k in range(3):
        put(tmp_path / f"train/{k:02d}/0.jpg", image(k))
        put(tmp_path / f"val/{k}/0.jpg", image(k, 1))
    for k in range(3):
        message = error_of_training(tmp_path)
        assert f"val/{k} has no train/{k}; the class is 0{k}: run `mv" in message
        obey(message)
    assert colors_match(DataRoot(tmp_path).images(Mode.EVAL)[1])


@pytest.mark.parametrize("suffix", ["HEIC", "avif", "gif", "ppm"])
def test_images_of_unsupported_formats_are_named(tmp_path, suffix):
    for split in ("train", "val"):
        for k in range(3):
            put(tmp_path / f"{split}/c{k}/0.{suffix}", image(k))
    problem = (
        f"train/ contains no images in class folders; 3 files such as train/c0/0.{suffix} must be converted to JPEG"
    )
    assert problem in error_of_training(tmp_path)
    for file in tmp_path.glob("*/*/*"):
        file.rename(file.with_suffix(".jpg"))  # obey the message; the content is that of a JPEG file
    assert colors_match(DataRoot(tmp_path).images(Mode.TRAIN)[1])


def flowers(root):
    labels = [k + 1 for _ in range(6) for k in range(4)]
    for number, label in enumerate(labels, 1):
        put(root / f"jpg/image_{number:05d}.jpg", image(label - 1, number))
    matlab.savemat(root / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    parts = {"trnid": range(1, 9), "valid": range(9, 13), "tstid": range(13, 25)}
    matlab.savemat(root / "setid.mat", {key: np.array([[*numbers]], np.uint16) for key, numbers in parts.items()})


def test_oxford_flowers(tmp_path):
    flowers(tmp_path / "x")
    assert len(sniffer.look(tmp_path / "x")) == 1  # setid.mat is not reported as an unreadable array
    message = error_of_training(tmp_path / "x")
    assert "imagelabels.mat: labels of Oxford Flowers 102; run `" in message
    imported = obey(message)
    for mode, count in zip(Mode, (8, 4), strict=True):
        images = DataRoot(imported).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: put(root / "setid.mat", b"x"), "setid.mat: damaged (MatReadError"),
        (
            lambda root: matlab.savemat(root / "imagelabels.mat", {"labels": np.ones((1, 7), np.uint8)}),
            "setid.mat: image 8 has no label; download both files again",
        ),
        (
            lambda root: matlab.savemat(root / "setid.mat", {"trnid": [1, 0], "valid": [2], "tstid": [3]}),
            "setid.mat: image 0 has no label; download both files again",
        ),
        (lambda root: (root / "jpg/image_00003.jpg").unlink(), "setid.mat: image 3: image_00003.jpg is not in"),
    ],
)
def test_damaged_oxford_flowers(tmp_path, capsys, change, message):
    flowers(tmp_path / "x")
    change(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys)
