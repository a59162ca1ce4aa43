"""Layouts of published data sets and annotation tools. Each remedy is obeyed; labels are compared with the pixels."""

import csv
import io
import json

import pytest

from layouts import colors_match, error_of_import, error_of_training, image, obey, put, write_tar
from paddle_resnet import dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]
SPLITS = {"train": (0, 5), "val": (50, 2)}  # {split: (number of the first image of a class, images per class)}
DIVIDED, GIVEN = (16, 4), (20, 8)  # numbers of images if the import divides the images, and if their splits are given


def items(split):
    """Return [(class, name of an image)] of a split; the class cannot be concluded from the name."""
    first, count = SPLITS[split]
    return [(k, f"{i:03d}{'cabd'[k]}") for i in range(first, first + count) for k in (2, 0, 3, 1)]


def put_images(root, split, path):
    """Write the images of a split to the path that path(class, name) returns."""
    for k, name in items(split):
        target = root / path(k, name)
        put(target, image(k, int(name[:3]), "PNG" if target.suffix == ".png" else "JPEG"))


def table(columns, row, file="train.csv", folder="images", splits=("train",), suffix=".jpg", prefix=""):
    """Return a function that writes images to a folder, and a table with the cells row(class, name, split)."""

    def build(root):
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerows([columns] if columns else [])
        for split in splits:
            put_images(root, split, lambda k, name: f"{folder}/{name}{suffix}")
            writer.writerows(row(k, name, split) for k, name in items(split))
        put(root / file, prefix + text.getvalue())

    return build


def in_parts(root):
    put_images(root, "train", lambda k, name: f"HAM_images_part_{1 + int(name[:3]) % 2}/{name}.jpg")
    lines = (f"H1,{name},{NAMES[k]},80\n" for k, name in items("train"))
    put(root / "HAM_metadata.csv", "lesion_id,image_id,dx,age\n" + "".join(lines))


def elsewhere(start, separator="/"):
    """Return a function that writes tables with paths on a different computer."""

    def build(root):
        for split in SPLITS:
            put_images(root, split, lambda k, name: f"pictures/{NAMES[k]}/{name}.jpg")
            lines = [f"{start}/pictures/{NAMES[k]}/{name}.jpg" for k, name in items(split)]
            rows = (
                f"{line.replace('/', separator)},{NAMES[k]}" for line, (k, _) in zip(lines, items(split), strict=True)
            )
            put(root / f"{split}.csv", "path,label\r\n" + "\r\n".join(rows) + "\r\n")

    return build


def lists_of_mxnet(root):
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"images/{NAMES[k]}/{name}.jpg")
        lines = (f"{i}\t{k}.000000\timages/{NAMES[k]}/{name}.jpg\n" for i, (k, name) in enumerate(items(split)))
        put(root / f"my_{split}.lst", "".join(lines))


def list_in_labels_txt(root):
    put_images(root, "train", lambda k, name: f"images/{name}.jpg")
    put(root / "labels.txt", "".join(f"{name}.jpg {NAMES[k]}\n" for k, name in items("train")))


def lists_with_absolute_paths(root):
    put_images(root, "train", lambda k, name: f"data_256/{NAMES[k][0]}/{NAMES[k]}/{name}.jpg")
    put_images(root, "val", lambda k, name: f"val_256/{name}.jpg")
    lines = (f"/{NAMES[k][0]}/{NAMES[k]}/{name}.jpg {k}\n" for k, name in items("train"))
    put(root / "places_train_standard.txt", "".join(lines))
    put(root / "places_val.txt", "".join(f"{name}.jpg {k}\n" for k, name in items("val")))


def tiny_imagenet(root):
    ids = [f"n0144353{k}" for k in range(4)]
    put_images(root, "train", lambda k, name: f"train/{ids[k]}/images/{name}.JPEG")
    put_images(root, "val", lambda k, name: f"val/images/{name}.JPEG")
    for wnid in ids:
        put(root / f"train/{wnid}/{wnid}_boxes.txt", "x.JPEG\t0\t0\t62\t62\n")
    for name in ("._0.JPEG", "notes.txt"):
        put(root / f"train/{ids[0]}/images/{name}", "x")
    lines = (f"{name}.JPEG\t{ids[k]}\t0\t0\t62\t62\n" for k, name in items("val"))
    put(root / "val/val_annotations.txt", "".join(lines))
    put(root / "wnids.txt", "\n".join(reversed(ids)))
    put(root / "test/images/test_0.JPEG", image(0, 90))


def repeated_folders(root):
    put_images(root, "train", lambda k, name: f"seg_train/seg_train/{NAMES[k]}/{name}.jpg")
    put_images(root, "val", lambda k, name: f"seg_test/seg_test/{NAMES[k]}/{name}.jpg")
    put(root / "seg_pred/seg_pred/0.jpg", image(0, 90))


def archives_of_splits(root):
    for split in SPLITS:
        files = [(f"{split}/{NAMES[k]}/{name}.jpg", image(k, int(name[:3]))) for k, name in items(split)]
        put(root / f"{split}.tar.gz", write_tar(files, "gz"))


def shards(extension, label):
    def build(root):
        for split in SPLITS:
            files = []
            for k, name in items(split):
                files += [(f"{name}.jpg", image(k, int(name[:3]))), (f"{name}.{extension}", label(k).encode())]
            put(root / f"{split}-000000.tar", write_tar(files))

    return build


def named(k, name, split):
    return [f"{name}.jpg", NAMES[k]]


def one_hot(k, name, split):
    return [name, *(float(k == j) for j in range(4))]


IDS = [f"n0144353{k}" for k in range(4)]
# {name: (function that writes the files, numbers of images, class names)}
LAYOUTS = {
    "HAM10000": (in_parts, DIVIDED, NAMES),
    "ISIC": (table(["image", *NAMES], one_hot, "Training_GroundTruth/Training_GroundTruth.csv"), DIVIDED, NAMES),
    "Label Studio": (
        table(
            ["image", "id", "choice", "annotator", "annotation_id"],
            lambda k, n, _: [f"/data/upload/1/{n}.jpg", 7, NAMES[k], 1, 9],
            "project-1.csv",
        ),
        DIVIDED,
        NAMES,
    ),
    "unknown names of columns": (table(["photo_names", "kinds"], named), DIVIDED, NAMES),
    "no header": (table(None, named), DIVIDED, NAMES),
    "id and path of the same image": (
        table(["image_id", "path", "label"], lambda k, n, _: [n, f"images/{n}.jpg", NAMES[k]]),
        DIVIDED,
        NAMES,
    ),
    "index of pandas": (
        table(["", "image_id", "label"], lambda k, n, _: [items("train").index((k, n)), n, NAMES[k]]),
        DIVIDED,
        NAMES,
    ),
    "splits in a column Usage": (
        table(
            ["file", "label", "Usage"],
            lambda k, n, s: [*named(k, n, s), "Training" if s == "train" else "Validation"],
            splits=("train", "val"),
        ),
        GIVEN,
        NAMES,
    ),
    "paths of Windows": (elsewhere("C:/Users/x/My Data", "\\"), GIVEN, NAMES),
    "absolute paths": (elsewhere("/home/x/data"), GIVEN, NAMES),
    "URLs": (elsewhere("gs://bucket"), GIVEN, NAMES),
    "lists of MXNet": (lists_of_mxnet, GIVEN, None),
    "list in labels.txt": (list_in_labels_txt, DIVIDED, NAMES),
    "Places365": (lists_with_absolute_paths, GIVEN, None),
    "Tiny ImageNet": (tiny_imagenet, GIVEN, IDS),
    "Intel Image Classification": (repeated_folders, GIVEN, NAMES),
    "archives of splits": (archives_of_splits, GIVEN, NAMES),
    "shards with names": (shards("cls", NAMES.__getitem__), GIVEN, NAMES),
    "shards with texts": (shards("txt", NAMES.__getitem__), GIVEN, NAMES),
    "shards with JSON": (shards("json", lambda k: json.dumps({"label": k, "key": "x"})), GIVEN, None),
    "shards with JSON and names": (shards("json", lambda k: json.dumps({"class": NAMES[k]})), GIVEN, NAMES),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, name):
    build, counts, names = LAYOUTS[name]
    build(tmp_path / "x")
    imported = obey(error_of_training(tmp_path / "x"))
    for mode, count in zip(Mode, counts, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)


def test_table_without_known_labels_is_not_ignored(tmp_path, capsys):
    """Folders of images next to a table are not classes."""
    in_parts(tmp_path / "x")
    path = tmp_path / "x/HAM_metadata.csv"
    put(path, path.read_text().replace("dx", "finding"))
    message = error_of_training(tmp_path / "x")
    assert f"it contains {path.name}: a table of images, whose column of labels is not recognized; run `" in message
    assert message.endswith("with --label-column set to one of these: lesion_id, finding, age")
    assert message.partition("it contains ")[2] in error_of_import(tmp_path / "x", capsys)
    assert obey(message.replace("_imported`", "_imported --label-column finding`")) is None
    assert colors_match(DataRoot(tmp_path / "x_imported").images(Mode.EVAL)[1])


SPELLINGS = [("Cock", "cock"), ("st. cock", "st cock"), ("sea_cock", "sea cock"), ("cafe\u0301", "caf\u00e9")]


@pytest.mark.parametrize(("first", "second"), SPELLINGS)
def test_labels_that_differ_in_spelling_are_reported(tmp_path, capsys, first, second):
    names = [second, *NAMES[1:]]
    table(["file_name", "label"], lambda k, n, _: [n, first if k == 0 and n[2] == "3" else names[k]])(tmp_path)
    assert len(sources.read(tmp_path)[2]) == 5
    first, second = sorted((first, second))
    assert (
        f"warning: the labels {first} and {second} differ only in their spelling, but are different classes; if they "
        in capsys.readouterr().err
    )


def test_folder_below_is_named_by_the_list(tmp_path, capsys):
    for folder in ("x/chest", "x/chest/chest"):
        for split in SPLITS:
            put_images(tmp_path, split, lambda k, name, path=f"{folder}/{split}": f"{path}/{NAMES[k]}/{name}.jpg")
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert f"class folders of both splits; use --image-root {tmp_path}/x/chest\n" in capsys.readouterr().out
    assert f"use {tmp_path}/x/chest" in error_of_training(tmp_path / "x")
    put(tmp_path / "x/labels.csv", "path,label\nchest/train/cock/000c.jpg,1\n")
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert "labels.csv: a table with labels (columns path, label)" in capsys.readouterr().out
    assert colors_match(DataRoot(tmp_path / "x/chest").images(Mode.TRAIN)[1])


@pytest.mark.parametrize(
    ("folders", "files", "what"),
    [
        (
            ("train2017", "val2017"),
            ("annotations/instances_train2017.json",),
            "JSON files, which may contain the labels",
        ),
        (("images/train", "images/val"), ("labels/train/0.txt", "labels/val/0.txt"), "images outside class folders"),
        (("a",), ("train.lmdb",), "train.lmdb: LMDBs in single files"),
    ],
)
def test_data_sets_without_classes_are_described(tmp_path, capsys, folders, files, what):
    for file in (*files, *(f"{folder}/0.jpg" for folder in folders)):
        put(tmp_path / "x" / file, image(0) if file.endswith("jpg") else b"0 1")
    assert what in error_of_training(tmp_path / "x")
    assert what in error_of_import(tmp_path / "x", capsys)
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert what in capsys.readouterr().out


def test_path_of_a_different_computer_is_reported(tmp_path, capsys):
    elsewhere("/home/x/data")(tmp_path)
    sources.read(tmp_path)
    problem = "/home/x/data/pictures/ray/000b.jpg is not on this computer, so pictures/ray/000b.jpg in"
    assert capsys.readouterr().err.count(problem) == 1


def test_images_next_to_the_splits_are_counted(tmp_path, capsys):
    repeated_folders(tmp_path)
    sources.read(tmp_path)
    problem = "1 image left out, because seg_pred/seg_pred/0.jpg is next to the splits and in no class folder"
    assert problem in capsys.readouterr().err
    put(tmp_path / "more/cock/0.jpg", image(0))
    with pytest.raises(UsageError, match="contains images in more, seg_pred next to a training split"):
        sources.read(tmp_path)


def test_table_in_utf_16(tmp_path):
    table(["file_name", "label"], named, "labels.csv")(tmp_path)
    text = (tmp_path / "labels.csv").read_text()
    for encoding in ("utf-16", "utf-8-sig"):
        put(tmp_path / "labels.csv", text.encode(encoding))
        _, splits, classes = sources.read(tmp_path)
        assert classes == NAMES
        assert colors_match(image for images in splits.values() for image in images)
