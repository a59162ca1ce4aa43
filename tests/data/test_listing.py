"""Splits that are missing or have another name. Listing of good ones: test_readers.py."""

import shutil

import pytest

from paddle_resnet.data import listing
from utils.errors import UsageError
from utils.mode import Mode


def message(root, mode=Mode.EVAL):
    with pytest.raises(UsageError) as e:
        listing.images(str(root), mode)
    return str(e.value)


@pytest.mark.parametrize("name", ["valid", "validation", "test", "VAL"])
def test_a_folder_with_another_name_is_suggested(photos, tmp_path, name):
    shutil.copytree(photos / "train", tmp_path / "train")
    shutil.copytree(photos / "val", tmp_path / name)
    says = f"has no folder val/: rename {name}/ to val/, or use train/ only with --run-scope train_only"
    assert message(tmp_path) == f"--image-root {tmp_path} {says}"
    assert listing.splits(tmp_path) == [Mode.TRAIN]


def test_of_two_folders_the_one_for_validation_is_suggested(photos, tmp_path):
    for name in ("train", "test", "valid"):
        shutil.copytree(photos / "val", tmp_path / name)
    assert "rename valid/ to val/" in message(tmp_path)


def test_a_missing_list_is_named_as_a_list(photos, tmp_path):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.txt").write_text("train/class0/00.jpg 0\n")
    (tmp_path / "val").rename(tmp_path / "images")
    says = "has no val.txt: create it, or use train.txt only with --run-scope train_only"
    assert message(tmp_path) == f"--image-root {tmp_path} {says}"
    (tmp_path / "valid.txt").write_text("images/class0/00.jpg 0\n")
    assert "has no val.txt: rename valid.txt to val.txt, or" in message(tmp_path)


def test_a_missing_container_is_named_as_a_container(converted, tmp_path):
    shutil.copytree(converted["webdataset"], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("val*"):
        path.unlink()
    assert "has no val-000000.tar: create it, or use train-000000.tar only" in message(tmp_path)


def test_neither_split(photos, tmp_path):
    says = "give the folder that holds train/ and val/; `python -m paddle_resnet.dataset split` makes them from"
    assert says in message(photos / "train", Mode.TRAIN)
    for name in ("Training", "test"):
        shutil.copytree(photos / "val", tmp_path / name)
    with pytest.raises(UsageError, match=r"in any format: rename Training/ to train/ and rename test/ to val/$"):
        listing.splits(tmp_path)


@pytest.mark.parametrize("name", ["__MACOSX", ".ipynb_checkpoints", ".hidden", "lost+found", "@eaDir"])
def test_folders_of_the_system_are_no_classes(photos, tmp_path, capsys, name):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train" / "another").mkdir()
    shutil.copytree(photos / "val/class0", tmp_path / "train" / name)
    shutil.copytree(photos / "val/class0", tmp_path / "val" / name)
    for mode in Mode:
        files, labels, classes = listing.list_folder(str(tmp_path), mode)
        assert classes == ["another", "class0", "class1", "class2"]
        assert set(labels) == {1, 2, 3}
        assert not any(name in file for file in files)
    said = capsys.readouterr().out
    assert said.count(name) == said.count("\n") == 2


def test_a_dangling_hidden_link_does_not_matter(photos, tmp_path):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train/.trash").symlink_to("/nowhere")
    assert len(listing.list_folder(str(tmp_path), Mode.TRAIN)[2]) == 3


def test_a_list_that_contradicts_itself_is_refused(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "train")
    (tmp_path / "train.txt").write_text("train/class0/00.jpg 0\ntrain/class0/03.jpg 1\ntrain/class0/00.jpg 2\n")
    says = f"{tmp_path}/train.txt gives train/class0/00.jpg the labels 0 and 2: remove one of the lines"
    assert message(tmp_path, Mode.TRAIN) == says


@pytest.mark.parametrize("label", [2, 10_000_000])
def test_a_label_of_a_file_list_is_less_than_the_number_of_images(tmp_path, label):
    """A typing error would make a network of millions of outputs."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    (tmp_path / "train.txt").write_text(f"a 0\nb {label}\n")
    with pytest.raises(UsageError, match=f"the file lists have 2 images and the label {label}: number the"):
        listing.count_classes(tmp_path, Mode.TRAIN)
    (tmp_path / "train.txt").write_text("a 0\nb 1\n")
    assert listing.count_classes(tmp_path, Mode.TRAIN) == 2
