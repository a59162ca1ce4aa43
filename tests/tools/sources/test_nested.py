"""Class folders in other folders."""

import shutil

import pytest
from data_files import open_split

from layouts import color_of, colors_match, error_of_import, image, obeyed_remedy, put
from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
COUNTS = {"train": 20, "val": 8}
FOLDERS = ["animal/cat", "animal/dog", "plant/rose", "tool"]  # sorted


def write(root, folder, splits=("train", "val")):
    for split, count, first in zip(splits, (5, 2), (0, 100), strict=False):
        for i in range(first, first + count):
            for k in range(4):
                put(root / folder(split, k) / f"{i}.jpg", image(k, i))


CLASSES = ["bus", "car", "ship", "train"]
LAYOUTS = {
    "images/ in each split": (lambda split, k: f"{split}/images/c{k}", ["c0", "c1", "c2", "c3"]),
    "splits in a folder": (lambda split, k: f"data/{split}/c{k}", ["c0", "c1", "c2", "c3"]),
    "splits in splits in splits": (lambda split, k: f"{split}/{split}/{split}/c{k}", ["c0", "c1", "c2", "c3"]),
    "two levels": (lambda split, k: f"{split}/{'ab'[k // 2]}/c{k % 2}", ["a_c0", "a_c1", "b_c0", "b_c1"]),
    "class with the name of a split": (lambda split, k: f"{split}/{CLASSES[k]}", CLASSES),
    "joined names in another order than the folders": (
        lambda split, k: f"{split}/{('a-b/c', 'a/z', 'b/x', 'b/y')[k]}",
        ["a-b_c", "a_z", "b_x", "b_y"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_equal_depth(tmp_path, name):
    folder, names = LAYOUTS[name]
    write(tmp_path, folder, ("train", "validation"))
    put(tmp_path / "__MACOSX/x.jpg", b"x")
    kind, splits, classes = sources.read(tmp_path, None if name == "splits in a folder" else "nested")
    assert (kind, classes) == ("nested", names)
    assert {split: len(images) for split, images in splits.items()} == COUNTS
    assert colors_match(image for images in splits.values() for image in images)


def test_error_of_training_contains_remedy(tmp_path, capsys):
    folder, names = LAYOUTS["two levels"]
    write(tmp_path / "x", folder)
    assert obeyed_remedy(tmp_path / "x", "class folders one level too deep", COUNTS, capsys)[0] == names
    assert dataset.main(["info", str(tmp_path / "x")]) == 2
    assert "x: the train split contains no images; it contains train/a/c0/" in capsys.readouterr().err
    assert dataset.main(["split", str(tmp_path / "x/train"), "--output", str(tmp_path / "y")]) == 2
    assert "x/train: the folders contain no images; it contains a/c0/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("depth", "names", "labels"),
    [
        (1, ["animal", "plant", "tool"], [0, 0, 1, 2]),
        (2, ["animal_cat", "animal_dog", "plant_rose", "tool_x"], range(4)),
    ],
)
def test_class_depth(tmp_path, capsys, depth, names, labels):
    write(tmp_path / "source", lambda split, k: f"{split}/{FOLDERS[k] if k < 3 else 'tool/x'}{'/more' * (k == 0)}")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--class-depth", str(depth)]
    assert dataset.main(command) == 0
    assert "20 train and 8 val images" in capsys.readouterr().out
    _, splits, classes = sources.read(tmp_path / "source", options=Options(class_depth=depth))
    assert classes == names
    assert all(labels[color_of(read_image(image)[0])] == image.label for image in splits["train"])


def test_folder_that_all_classes_share_is_no_part_of_their_names(tmp_path):
    write(tmp_path, lambda split, k: f"{split}/{'more/' * k}shared/c{k}")
    for depth in (-2, -1):
        _, splits, classes = sources.read(tmp_path, options=Options(class_depth=depth))
        assert classes == ["c0", "c1", "c2", "c3"]
        assert colors_match(image for images in splits.values() for image in images)


def test_folders_without_splits_are_divided(tmp_path):
    """--class-depth chooses the folders, not the table next to them."""
    write(tmp_path, lambda split, k: FOLDERS[k])
    put(tmp_path / "train.csv", "file_name,label\nanimal/cat/0.jpg,0\nanimal/dog/0.jpg,1\n")
    _, splits, classes = sources.read(tmp_path, options=Options(class_depth=1, val=0.5))
    assert classes == ["animal", "plant", "tool"]
    assert sum(map(len, splits.values())) == 28
    assert abs(len(splits["train"]) - 14) <= 2
    classes = sources.read(tmp_path, options=Options(class_depth=0))[2]
    assert classes == [folder.replace("/", "_") for folder in FOLDERS]


def test_new_classes_do_not_change_the_validation_images_of_others(tmp_path):
    options = Options(class_depth=1, val=0.4)
    write(tmp_path / "x", lambda split, k: f"c{k}")
    before = {image.name for image in sources.read(tmp_path / "x", options=options)[1]["val"]}
    for i in range(3):
        put(tmp_path / f"x/b/{i}.jpg", image(5, i))
    after = {image.name for image in sources.read(tmp_path / "x", options=options)[1]["val"]}
    assert len(after) == 13 and before == {name for name in after if not name.startswith("b/")}


def test_class_may_have_the_name_of_a_folder_of_images(tmp_path):
    write(tmp_path, lambda split, k: ["Images", "cat", "dog", "ox"][k])
    assert sources.read(tmp_path, "nested")[2] == ["Images", "cat", "dog", "ox"]


def test_links_to_folders_above_are_not_followed(tmp_path):
    write(tmp_path, LAYOUTS["two levels"][0])
    (tmp_path / "train/a/c0/loop").symlink_to(tmp_path / "train")
    assert len(sources.read(tmp_path, "nested")[1]["train"]) == 20


@pytest.mark.parametrize("start", ["SUN397", "{}"])
def test_error_of_training_contains_depth_of_classes_at_different_depths(tmp_path, capsys, start):
    """SUN397 without its folder Partitions; and with splits."""
    places = ["a/abbey", "b/arch/indoor", "b/arch/outdoor", "c/market/outdoor"]
    splits = ("train", "val") if start == "{}" else ("train",)
    write(tmp_path / "x", lambda split, k: f"{start.format(split)}/{places[k]}", splits)
    counts = COUNTS if start == "{}" else {"train": 16, "val": 4}
    what = "one level too deep" if start == "{}" else "images in nested folders"
    names, _ = obeyed_remedy(tmp_path / "x", f"{what}; run `", counts, capsys)
    assert names == [place.replace("/", "_") for place in places]


@pytest.mark.parametrize("name", ["BACKGROUND_Google", "257.clutter"])
def test_images_of_no_class_are_reported(tmp_path, capsys, name):
    """Folders of Caltech-101 and Caltech-256."""
    names = ["Faces", "ant", "crab", name] if name[0] == "B" else ["001.ak47", "002.flag", "003.bat", name]
    warning = f"x: {name} is used as a class, but contains images of none of the classes in Caltech-101 and Caltech-256"
    write(tmp_path / "x", lambda split, k: f"data/{names[k]}", ("train",))
    shutil.copytree(tmp_path / "x/data", tmp_path / "trained/x/train")
    write(tmp_path / "deep/x", lambda split, k: f"{'ab'[k % 2]}/{names[k]}", ("train",))
    sources.read(tmp_path / "deep/x", options=Options(class_depth=2))
    assert f"{tmp_path}/deep/{warning}" in capsys.readouterr().err
    commands = (
        ["import", str(tmp_path / "x"), "--output", str(tmp_path / "imported")],
        ["split", str(tmp_path / "x/data"), "--output", str(tmp_path / "split")],
    )
    for is_removed in (False, True):
        for command in commands:
            shutil.rmtree(command[-1], ignore_errors=True)
            assert dataset.main(command) == 0
            has_warning = (
                warning.replace("x: ", "data: " if command[0] == "split" else "x: ") in capsys.readouterr().err
            )
            assert has_warning != is_removed
            assert len(DataRoot(command[-1]).images(Mode.TRAIN)[0].classes) == 4 - is_removed
        open_split(str(tmp_path / "trained/x"), "auto", Mode.TRAIN, None, 0)
        assert (f"--image-root {tmp_path}/trained/{warning}" in capsys.readouterr().err) != is_removed
        for folder in (tmp_path / "x/data", tmp_path / "trained/x/train"):  # obey the warning
            shutil.rmtree(folder / name, ignore_errors=True)


BAD = {
    "different depths": (
        lambda split, k: f"{split}/{FOLDERS[k]}",
        (),
        "images are nested at different depths (train/tool/0.jpg, train/animal/cat/0.jpg); set --class-depth to the",
    ),
    "too deep": (
        lambda split, k: f"{split}/{FOLDERS[k]}",
        ("--class-depth", "2"),
        "train/tool/0.jpg is in fewer than 2 class folders; use a --class-depth closer to 0",
    ),
    "other images": (
        lambda split, k: f"{split}/{'ab'[k // 2]}/{k}" if k else "samples/x",
        (),
        "contains images in samples next to a training split; import a folder that contains only the splits",
    ),
    "class only in validation": (
        lambda split, k: f"{split}/{'ab'[k // 2]}/{k if split == 'train' else k // 2}",
        (),
        "has 1 class without training images (b/1); add training images, or remove these folders",
    ),
    "no class folders": (
        lambda split, k: f"{split}",
        (),
        "contains images outside class folders; put the images into one folder per class",
    ),
    "equal names": (
        lambda split, k: f"{split}/{('a/b_c', 'a_b/c', 'd/e', 'f/g')[k]}",
        (),
        "several folders form the class name a_b_c; rename one of them",
    ),
    "no training images": (
        lambda split, k: f"val/{'ab'[k // 2]}/{split}{k}",
        (),
        "contains no training images; import the folder that contains them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    folder, flags, message = BAD[name]
    write(tmp_path / "x", folder)
    assert message in error_of_import(tmp_path / "x", capsys, "--as", "nested", *flags)


@pytest.mark.parametrize("depth", [None, 0, 1])
def test_image_of_a_split_outside_class_folders_is_named(tmp_path, depth):
    """An older Fruits-360 has test-multiple_fruits/ next to Training/ and Test/."""
    write(tmp_path, lambda split, k: f"{split}/c{k}", ("Training", "Test"))
    put(tmp_path / "test-multiple_fruits/1.jpg", image(0))
    with pytest.raises(
        UsageError, match="test-multiple_fruits/1.jpg is outside class folders; move it to a class folder"
    ):
        sources.read(tmp_path, "nested", Options(class_depth=depth))
    (tmp_path / "test-multiple_fruits/1.jpg").unlink()
    assert len(sources.read(tmp_path, "nested", Options(class_depth=depth))[1]["train"]) == 20


@pytest.mark.parametrize("kind", ["nested", "filename"])
def test_images_in_unsupported_formats_are_reported(tmp_path, capsys, kind):
    write(tmp_path, lambda split, k: f"{split}/a/{'cd'[k // 2]}_{k}" if kind == "nested" else split)
    if kind == "filename":
        for path in [*tmp_path.glob("*/*.jpg")]:
            path.rename(path.with_name(f"{'cd'[int(path.stem) % 2]}_{path.name}"))
    put(tmp_path / "train/fox_1.avif", b"x")
    sources.read(tmp_path, kind)
    assert "1 file left out, because the format cannot be read (train/fox_1.avif)" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [None, 0, -1])
@pytest.mark.parametrize("outer", ["", "cells"])
def test_folder_that_contains_a_copy_of_itself_is_named(tmp_path, outer, depth):
    """Kaggle's cell images for malaria."""
    write(tmp_path / outer, lambda split, k: f"c{k}", ("train",))
    write(tmp_path / outer / "copy", lambda split, k: f"c{k}", ("train",))
    with pytest.raises(UsageError, match=r"copy contains the same folders as the folder around it \(c0, c1, c2, c3\)"):
        sources.read(tmp_path, "nested", Options(class_depth=depth))
    shutil.rmtree(tmp_path / outer / "copy")
    _, splits, classes = sources.read(tmp_path, "nested", Options(class_depth=depth))
    assert classes == ["c0", "c1", "c2", "c3"]
    assert sum(map(len, splits.values())) == 20
