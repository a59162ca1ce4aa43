"""tests/tools/sources/test_tables.py tests the official splits with images."""

import numpy as np
import pytest
from scipy import io as matlab

from layouts import error_of_import, image, obeyed_remedy, put
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import official
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
GIVEN = {"train": 20, "val": 8}
ITEMS = [
    (k, split, i)
    for split, first, count in (("train", 0, 5), ("test", 100, 2))
    for i in range(count)
    for k in (2, 0, 3, 1)
]

CUB = {
    "images": "1 001.a/x.jpg\n2 002.b/y.jpg\n",
    "image_class_labels": "1 1\n2 2\n",
    "train_test_split": "1 1\n2 0\n",
    "classes": "1 001.a\n2 002.b\n",
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("images", "1\n", "images.txt: line 1 is not `ID VALUE`; download it again"),
        ("images", "1 a\n1 b\n", "images.txt: line 2 repeats an id; download it again"),
        ("images", "1 a\n3 b\n", "image_class_labels.txt: has no line for image 3; download it again"),
        ("train_test_split", "1 1\n", "train_test_split.txt: has no line for image 2; download it again"),
        ("train_test_split", "1 1\n2 2\n", "train_test_split.txt: line 2: expected 0 or 1; download it again"),
        (
            "image_class_labels",
            "1 1\n2 9\n",
            "image_class_labels.txt: line 2: class 9 is not in classes.txt; download both again",
        ),
    ],
)
def test_damaged_lists_of_cub_are_rejected(tmp_path, name, text, message):
    for file, content in (CUB | {name: text}).items():
        put(tmp_path / f"{file}.txt", content)
    with pytest.raises(UsageError) as e:
        official.cub(str(tmp_path))
    assert str(e.value) == f"{tmp_path}/{message}"


def test_comments_in_lists_of_pets_are_ignored(tmp_path):
    put(tmp_path / "annotations/trainval.txt", "#Image CLASS-ID SPECIES BREED ID\na_b_1 1 1 1\n\nC_2 2 1 1\n")
    rows, (_, names, _) = official.pets(str(tmp_path))
    assert [(row.image, row.label, row.split) for row in rows] == [("a_b_1", "a_b", "train"), ("C_2", "C", "train")]
    assert names == ["a_b", "C"]  # in the order of their numbers
    put(tmp_path / "annotations/test.txt", "a_b_1 1\n")
    with pytest.raises(UsageError, match="test.txt: line 1 is not `IMAGE CLASS SPECIES BREED`; download it again"):
        official.pets(str(tmp_path))


@pytest.mark.parametrize("text", ["[1", "[1]", '{"a": 1}', '{"a": [1]}'])
def test_damaged_json_of_food_is_rejected(tmp_path, text):
    put(tmp_path / "meta/train.json", text)
    with pytest.raises(UsageError, match="train.json: not a JSON object with lists of images .*; download it again"):
        official.food(str(tmp_path))


@pytest.mark.parametrize("text", ["a/b.jpg 0\n", "b.jpg\n"])
def test_lists_of_mmpretrain_are_not_taken_for_food(tmp_path, text):
    put(tmp_path / "meta/train.txt", text)
    assert official.food(str(tmp_path)) == []


def test_damaged_list_of_tiny_imagenet_is_rejected(tmp_path):
    put(tmp_path / "val/val_annotations.txt", "a.JPEG\tn01443530\nb.JPEG\tn01443530\t0\n")
    with pytest.raises(UsageError, match="val_annotations.txt: line 2 is not an image, a WordNet id and a box; downl"):
        official.tiny_imagenet(str(tmp_path))


def write_lines(path, lines):
    put(path, "".join(f"{line}\n" for line in lines))


def nabirds(root):
    """The classes are the leaves of a hierarchy. Two have the same name; one has the name of its group."""
    ids = (7, 8, 295, 800)
    names = {f"{k}-{split}-{i}": (k, split, i) for k, split, i in ITEMS}
    for name, (k, split, i) in names.items():
        put(root / f"images/{ids[k]:04d}/{name}.jpg", image(k, i + 100 * (split == "test")))
    write_lines(root / "images.txt", (f"{name} {ids[k]:04d}/{name}.jpg" for name, (k, *_) in names.items()))
    write_lines(root / "image_class_labels.txt", (f"{name} {ids[k]}" for name, (k, *_) in names.items()))
    write_lines(root / "train_test_split.txt", (f"{name} {int(s == 'train')}" for name, (_, s, _) in names.items()))
    write_lines(root / "bounding_boxes.txt", (f"{name} 1 2 3 4" for name in names))
    classes = ("0 Birds", "1 Hawks, Kites", "7 Kite (Adult)", "8 Kite", "295 Teal", "296 Kite", "800 Teal")
    write_lines(root / "classes.txt", classes)
    write_lines(root / "hierarchy.txt", ("1 0", "7 1"))


def test_nabirds(tmp_path, capsys):
    nabirds(tmp_path / "x")
    names, _ = obeyed_remedy(tmp_path / "x", "image_class_labels.txt: lists of CUB-200 or NABirds", GIVEN, capsys)
    assert names == ["Kite (Adult)", "Kite", "Teal (295)", "Teal (800)"]
    sources.read(tmp_path / "x")
    log = capsys.readouterr()
    assert "classes.txt: 3 classes without images left out" in log.out + log.err


def dogs(root):
    folders = [f"n0208562{k}-{name}" for k, name in enumerate(("Pug", "Husky", "Basset", "Collie"))]
    content = {"train": [], "test": []}
    for k, split, i in ITEMS:
        path = f"{folders[k]}/{folders[k][:9]}_{split[1]}{i}.jpg"
        put(root / "Images" / path, image(k, i + 100 * (split == "test")))
        put(root / "Annotation" / path[:-4], "<annotation/>")
        content[split].append((path, k + 1))
    for name, entries in (*content.items(), ("file", content["train"] + content["test"])):
        cells = np.empty((len(entries), 1), object)
        cells[:, 0] = [path for path, _ in entries]
        labels = np.array([[label] for _, label in entries], np.uint8)
        matlab.savemat(root / f"{name}_list.mat", {"file_list": cells, "annotation_list": cells, "labels": labels})
    return folders


@pytest.mark.parametrize("lists", ["", "lists/"])
def test_stanford_dogs(tmp_path, capsys, lists):
    folders = dogs(tmp_path / "x")
    (tmp_path / "x/lists").mkdir()
    for name in ("train", "test", "file"):
        (tmp_path / f"x/{name}_list.mat").rename(tmp_path / f"x/{lists}{name}_list.mat")
    what = f"{lists}file_list.mat, {lists}train_list.mat: lists of Stanford Dogs"
    names, _ = obeyed_remedy(tmp_path / "x", what, GIVEN, capsys)
    assert names == folders  # in label order


BAD_DOGS = {
    "labels": ({"file_list": "a/0.jpg", "labels": [1, 2]}, "has 1 images and 2 labels; download it again"),
    "no labels": ({"file_list": "a/0.jpg"}, "damaged (KeyError: 'labels'); download it again"),
    "text": ({"file_list": "a/0.jpg", "labels": "a"}, "damaged (ValueError: invalid literal for int() with"),
    "two folders": (
        {"file_list": "a/0.jpg", "labels": [1]},
        "image 0: label 1 belongs to n02085620-Pug and a; download both files again",
    ),
}


@pytest.mark.parametrize("name", BAD_DOGS)
def test_damaged_lists_of_stanford_dogs_are_rejected(tmp_path, capsys, name):
    content, message = BAD_DOGS[name]
    dogs(tmp_path / "x")
    matlab.savemat(tmp_path / "x/test_list.mat", content)
    assert f"{tmp_path}/x/test_list.mat: {message}" in error_of_import(tmp_path / "x", capsys)
