"""Classes in the names of the image files. Each remedy is obeyed literally; labels are compared with the pixels."""

import shutil

import pytest

from layouts import colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet import dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def write(root, pattern, names, splits=(("train", 0, 5),)):
    for split, first, count in splits:
        for k, name in enumerate(names):
            for i in range(first, first + count):
                put(root / pattern.format(split=split, name=name, i=i), image(k, i))


def dogs_vs_cats(root, test="test1"):
    write(root, "train/{name}.{i}.jpg", ["cat", "dog"])
    for i in range(3):
        put(root / f"{test}/{i}.jpg", image(0, 90 + i))


BOTH = (("train", 0, 5), ("test", 50, 2))
# {name: (function that writes the images, class names, numbers of images)}
LAYOUTS = {
    "dogs-vs-cats": (dogs_vs_cats, ["cat", "dog"], (8, 2)),
    "test images without classes": (lambda root: dogs_vs_cats(root, "test"), ["cat", "dog"], (8, 2)),
    "flat": (lambda root: write(root, "{name}_{i:03d}.jpg", ["A b", "c_d", "e"]), ["A b", "c_d", "e"], (12, 3)),
    "Windows": (lambda root: write(root, "{name} ({i}).jpg", ["A", "b"]), ["A", "b"], (8, 2)),
    "no separator": (lambda root: write(root, "{name}{i}.jpg", ["rain", "shine"]), ["rain", "shine"], (8, 2)),
    "pets without lists": (lambda root: write(root, "images/{name}_{i}.jpg", ["Cat", "dog"]), ["Cat", "dog"], (8, 2)),
    "folder in folder": (lambda root: dogs_vs_cats(root / "cats and dogs"), ["cat", "dog"], (8, 2)),
    "splits": (lambda root: write(root, "{split}/{name}-{i}.jpg", ["a", "b"], BOTH), ["a", "b"], (10, 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    build, names, counts = LAYOUTS[name]
    build(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    rule = "if the class is the file name before the last number, which yields"
    shown = f"{len(names)} classes ({', '.join(names)})"
    assert f"; {rule} {shown}, run `" in message
    assert f"; {rule} {shown}, run `" in error_of_import(tmp_path / "x", capsys)  # the import does not guess
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert shown in capsys.readouterr().out
    imported = obey(message)
    log = capsys.readouterr()
    assert (
        f"the class of an image is its file name before the last number: {shown[:9]}, {names[0]} (" in log.err + log.out
    )
    for mode, count in zip(Mode, counts, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)


def test_images_without_a_class_are_named_if_left_out(tmp_path, capsys):
    dogs_vs_cats(tmp_path)
    sources.read(tmp_path, "filename")
    log = capsys.readouterr()
    assert "differ only in their spelling" not in log.err
    assert "3 images without a class in the name left out (test1/0.jpg, test1/1.jpg, test1/2.jpg)" in log.out + log.err


def test_names_of_classes_that_differ_in_spelling_are_reported(tmp_path, capsys):
    write(tmp_path, "{name}_{i}.jpg", ["Cat", "cat"])
    assert sources.read(tmp_path, "filename")[2] == ["Cat", "cat"]
    assert "the labels Cat and cat differ only in their spelling" in capsys.readouterr().err


def test_innermost_folder_determines_the_split(tmp_path):
    write(tmp_path, "test set/{split}/{name}_{i}.jpg", ["a", "b"], (("train", 0, 5), ("val", 50, 2)))
    put(tmp_path / "train/c/a_99.jpg", image(0, 99))
    assert {split: len(images) for split, images in sources.read(tmp_path, "filename")[1].items()} == {
        "train": 11,
        "val": 4,
    }


def test_folders_with_images_of_one_class_are_not_guessed(tmp_path):
    write(tmp_path, "{name}_{i}.jpg", ["IMG"])
    assert "put the images into one folder per class" in error_of_training(tmp_path)
    assert "--as" not in error_of_training(tmp_path)
    put(tmp_path / "x/7.jpg", image(0))
    with pytest.raises(UsageError, match=r"1 image without a class before a number in the name \(7.jpg\); remove"):
        sources.read(tmp_path / "x", "filename")


# {name: (names of further images, message)}
BAD = {
    "no class": (["train/x.jpg", "train/7.jpg"], "2 images without a class before a number in the name (train/7.jpg, "),
    "no class in val": (
        ["val/cat.0.jpg", "val/dog.0.jpg", "val/x.jpg"],
        "1 image without a class before a number in the name (val/x.jpg)",
    ),
    "ambiguous": (["train/cat_1_2.jpg"], "the class in the name of train/cat_1_2.jpg is ambiguous (cat_1 or a part of"),
    "one image": (["train/cow.0.jpg"], "1 class with only one image (cow (train/cow.0.jpg)); add images, remove these"),
    "only in val": (
        ["val/cow.0.jpg", "val/cow.1.jpg"],
        "1 class with validation images, but without training images (cow); add training images, or remove these",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_rejected(tmp_path, capsys, name):
    files, message = BAD[name]
    dogs_vs_cats(tmp_path / "x")
    for file in files:
        put(tmp_path / "x" / file, image(0))
    error = error_of_import(tmp_path / "x", capsys, "--as", "filename")
    assert f"{tmp_path}/x: " in error and message in error
    for file in files:
        (tmp_path / "x" / file).unlink()
    shutil.rmtree(tmp_path / "x/val", ignore_errors=True)
    assert colors_match(sources.read(tmp_path / "x", "filename")[1]["train"])
    put(tmp_path / "y/IMG_1.jpg", image(0))
    with pytest.raises(
        UsageError, match=r"the names of all images begin with one class, IMG \(1 image\); write labels.c"
    ):
        sources.read(tmp_path / "y", "filename")


def test_table_instead_of_ambiguous_names(tmp_path, capsys):
    write(tmp_path / "x", "{name}_1_{i}.jpg", ["cat", "dog"])
    error = error_of_import(tmp_path / "x", capsys, "--as", "filename")
    assert error.endswith(
        "write labels.csv with the columns file_name and label to this folder, and import labels.csv\n"
    )
    rows = (f"{file.name},{file.name[:3]}\n" for file in (tmp_path / "x").iterdir())
    put(tmp_path / "x/labels.csv", "file_name,label\n" + "".join(rows))  # obey the message
    assert colors_match(sources.read(tmp_path / "x/labels.csv")[1]["train"])
