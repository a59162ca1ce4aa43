"""Errors state what a folder contains and what to do. Each remedy is obeyed literally.

tests/tools/sources tests the layouts that `dataset import` reads.
"""

import shutil

import data_files
import numpy as np
import pytest

from layouts import color_of, colors_match, error_of_training, image, obey, put, write_tar
from paddle_resnet import dataset
from paddle_resnet.data import sniffer
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def check(root):
    """Obey the error message, and check that training can then read both splits."""
    message = error_of_training(root)
    imported = obey(message) or root
    for mode in Mode:
        images = DataRoot(imported).images(mode)[1]
        assert len(images) >= 3
        assert colors_match(images)
    return message


def test_nearly_right_names_of_tar_shards(colored, tmp_path):
    root = tmp_path / "x y"
    data_files.write(colored, root, "webdataset")
    (root / "convert.json").unlink()
    (root / "train-000000.tar").rename(root / "train.tar")
    (root / "val-000000.tar").rename(root / "val.tar")
    for index in root.glob("*.idx"):
        index.unlink()
    assert "it contains train.tar, val.tar, whose name" in check(root)


@pytest.mark.parametrize("prefix", ["", "./", "{}/", "./{}/"])
def test_archives_of_class_folders(tmp_path, prefix):
    for split, i in (("train", 0), ("val", 10)):
        files = [(f"{prefix.format(split)}c{k}/{i}.jpg", image(k, i)) for k in range(3)]
        put(tmp_path / f"x/{split}.tar", write_tar(files))
    assert "it contains train.tar, val.tar, whose name" in check(tmp_path / "x")


def test_archive_comes_before_an_image_next_to_it(tmp_path):
    put(tmp_path / "photos.zip", b"")
    put(tmp_path / "cover.jpg", image(0))
    expected = ["photos.zip: an archive", "1 image outside class folders (cover.jpg)"]
    assert [sight.what for sight in sniffer.look(tmp_path)] == expected
    assert sniffer.advice(tmp_path).startswith(f"it contains {expected[0]}; ")


def test_class_folders_in_a_folder_of_images(colored, tmp_path):
    shutil.copytree(colored / "train", tmp_path / "x/images")
    message = check(tmp_path / "x")
    assert "it contains images/c0/, images/c1/, images/c2/: class folders one level too deep; run `" in message
    assert dataset.main(["split", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2


def test_nested_class_folders(colored, tmp_path):
    for split in ("train", "val"):
        for k in range(3):
            shutil.copytree(colored / split / f"c{k}", tmp_path / "x" / split / "ab"[k % 2] / f"c{k}")
    message = error_of_training(tmp_path / "x")
    assert "it contains train/a/c0/, train/a/c2/, train/b/c1/: class folders one level too deep; run `" in message
    imported = obey(message)
    for mode in Mode:
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == ["a_c0", "a_c2", "b_c1"]
        assert [color_of(read_image(image)[0]) for image in images] == [
            (0, 2, 1)[read_image(image)[1]] for image in images
        ]


@pytest.mark.parametrize("folder", ["", "train", "val"])
def test_images_outside_class_folders_are_counted(colored, folder):
    root = colored / folder
    if folder == "":
        shutil.rmtree(colored / "train")
        shutil.rmtree(colored / "val")
    else:
        shutil.rmtree(root)
    for i in range(7):
        put(root / f"{i}.jpg", image(0, i))
    names = ", ".join(f"{folder}/{i}.jpg".lstrip("/") for i in range(5))
    found = f"7 images outside class folders ({names} and 2 more); put the images into one folder per class"
    message = error_of_training(colored)
    assert f"it contains {found}" in message
    for i in range(7):
        target = root / ("." if folder else "train") / f"c{i % 3}"
        target.mkdir(parents=True, exist_ok=True)
        (root / f"{i}.jpg").rename(target / f"{i}.jpg")
    assert len(DataRoot(colored).images(Mode.EVAL if folder == "val" else Mode.TRAIN)[1]) in (7, 9)


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_validation_folder_without_class_folders_is_not_renamed(colored, name):
    shutil.rmtree(colored / "val")
    put(colored / name / "x.jpg", image(0))
    message = error_of_training(colored)
    assert "has no folder val/" in message and "rename" not in message


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["images.h5", "labels.npy"], "images.h5, labels.npy: arrays"),
        (["train.beton"], "train.beton: files of FFCV"),
        ([f"{i}.beton" for i in range(9)], "0.beton, 1.beton, 2.beton, 3.beton, 4.beton and 4 more: files of FFCV"),
    ],
)
def test_files_of_other_programs_are_named(colored, tmp_path, capsys, names, what):
    for name in names:
        put(tmp_path / "x" / name, b"x")
    message = error_of_training(tmp_path / "x")
    assert what in message
    assert "write each image to the folder of its class in train/ or val/" in message
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert what in capsys.readouterr().out
    assert dataset.main(["import", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2
    assert what in capsys.readouterr().err
    shutil.copytree(colored, tmp_path / "x", dirs_exist_ok=True)
    assert colors_match(DataRoot(tmp_path / "x").images(Mode.EVAL)[1])


def test_class_folders_that_differ_only_in_case(colored):
    (colored / "val/c1").rename(colored / "val/C1")
    assert "val/C1 has no train/C1; the class is c1: run `mv" in check(colored)
    (colored / "val/C1").mkdir()
    assert error_of_training(colored).endswith("val/C1 has no train/C1; add the folder, or remove val/C1")


def test_list_of_a_different_program_next_to_class_folders(colored):
    put(colored / "train.txt", "some notes\n")
    assert error_of_training(colored).endswith("correct it, or remove the list to use the class folders in train/")
    (colored / "train.txt").unlink()
    put(colored / "convert.json", "[]")
    assert colors_match(DataRoot(colored).images(Mode.TRAIN)[1])


def test_class_folders_are_not_taken_for_other_layouts(colored, tmp_path, capsys):
    assert sniffer.look(colored) == []
    assert dataset.main(["import", str(colored), "--list"]) == 0
    problem = "not a data set to import; if its splits contain class folders, use --image-root"
    assert f"{colored}: {problem} {colored}" in capsys.readouterr().out
    assert dataset.main(["import", str(colored), "--output", str(tmp_path / "imported")]) == 2
    assert capsys.readouterr().err == f"paddle_resnet.dataset: error: {colored}: {problem} {colored}\n"
    (colored / "val").rename(tmp_path / "val")  # --image-root would not work
    assert dataset.main(["import", str(colored), "--list"]) == 0
    assert f"{colored}: not recognized as a data set; choose the kind with --as" in capsys.readouterr().out


def test_npz_files_without_images_are_not_a_data_set(tmp_path):
    np.savez(tmp_path / "embeddings.npz", a=np.zeros(3))
    assert not [sight for sight in sniffer.look(tmp_path) if sight.kind]
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros(3), y_train=np.zeros(3))
    (sight,) = (sight for sight in sniffer.look(tmp_path) if sight.kind)
    assert (sight.what, sight.kind) == ("mnist.npz: arrays", "array")


@pytest.mark.parametrize("suffix", ["txt", "json", "mat"])
def test_annotations_of_single_images_are_not_read(suffix):
    others = ["images/0.jpg", f"labels.{suffix}", f"meta/0.{suffix}", "labels/train.csv"]
    annotations = [f"labels/{i}.{suffix}" for i in range(101)]
    assert sniffer._without_annotations([*others, *annotations]) == others
    assert sniffer._without_annotations([*others, *annotations[1:]]) == [*others, *annotations[1:]]
