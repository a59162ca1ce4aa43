"""Layouts that several readings would fit: several labels per image, versions of the same images, masks, boxes. Each
remedy in an error is obeyed literally; labels are compared with the pixels."""

import json
import shutil

import pytest
from test_downloads import DIVIDED, GIVEN, NAMES, SPLITS, items, put_images

from layouts import color_of, colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
ATTRIBUTES = ("Male", "Young", "Bald")


def table(file, header, row, folder="images"):
    """Return a function that writes training images and a table with the line row(class, name) for each."""

    def build(root):
        put_images(root, "train", lambda k, name: f"{folder}/{name}.jpg")
        put(root / file, header + "".join(row(k, name) + "\n" for k, name in items("train")))

    return build


def attributes(k, separator):
    return separator.join("1" if k > j else "-1" for j in range(3))


def combined(separator):
    return table(
        "train.csv",
        "image,labels\n",
        lambda k, name: f"{name}.jpg,{NAMES[k]}{f'{separator}{NAMES[k - 1]}' if name[2] == '4' else ''}",
    )


def objects(root):
    put_images(root, "train", lambda k, name: f"VOCdevkit/VOC2007/JPEGImages/{name}.jpg")
    for k, name in items("train"):
        put(root / f"VOCdevkit/VOC2007/Annotations/{name}.xml", f"<name>{NAMES[k]}</name>")
    put(root / "VOCdevkit/VOC2007/SegmentationClass/000a.png", image(0, 1, "PNG"))
    put(root / "VOCdevkit/VOC2007/ImageSets/Main/train.txt", "000a\n")


def coco(root):
    put_images(root, "train", lambda k, name: f"train2017/{name}.jpg")
    content = {
        "images": [{"id": i, "file_name": f"{name}.jpg"} for i, (_, name) in enumerate(items("train"))],
        "annotations": [{"image_id": i, "category_id": c} for i in range(20) for c in (i % 4, (i + i // 4) % 4)],
        "categories": [{"id": k, "name": name} for k, name in enumerate(NAMES)],
    }
    put(root / "annotations/instances_train2017.json", json.dumps(content))


SEVERAL = {
    "one row per label": (
        table(
            "train-annotations.csv",
            "ImageID,Source,LabelName,Confidence\n",
            lambda k, name: f"{name},x,{NAMES[k]},1\n{name},x,{NAMES[k - 1]},0",
        ),
        "train-annotations.csv: a table with several labels per image (ray, goldfish)",
    ),
    "COCO": (coco, "annotations/instances_train2017.json: a table with several labels per image (cock, goldfish)"),
    "separated": (combined("|"), "train.csv: a table with several labels per image (ray|goldfish)"),
    "with spaces": (combined(" "), "train.csv: a table with several labels per image (ray goldfish)"),
    "CelebA": (
        table(
            "list_attr_celeba.txt",
            "20\nMale Young Bald \n",
            lambda k, name: f"{name}.jpg {attributes(k, '  ')}",
            "img_align_celeba",
        ),
        "list_attr_celeba.txt: a table with several labels per image (000b.jpg: Male, Young)",
    ),
    "CelebA in its own folders": (
        table(
            "Anno/list_attr_celeba.txt",
            "20\nMale Young Bald \n",
            lambda k, name: f"{name}.jpg {attributes(k, '  ')}",
            "Img/img_align_celeba",
        ),
        "Anno/list_attr_celeba.txt: a table with several labels per image (000b.jpg: Male, Young)",
    ),
    "CelebA of Kaggle": (
        table(
            "list_attr_celeba.csv",
            "image_id,Male,Young,Bald\n",
            lambda k, name: f"{name}.jpg,{attributes(k, ',')}",
            "img_align_celeba/img_align_celeba",
        ),
        "list_attr_celeba.csv: a table with several labels per image (000b.jpg: Male, Young)",
    ),
    "objects": (objects, ".xml and 15 more: annotations of objects, as in Pascal VOC"),
}


CELEBA = [name for name in SEVERAL if "CelebA" in name]


@pytest.mark.parametrize("name", SEVERAL)
def test_several_labels_are_an_error_with_remedy(tmp_path, capsys, name):
    build, what = SEVERAL[name]
    build(tmp_path / "x")
    put(tmp_path / "x/list_eval_partition.txt", "".join(f"{name}.jpg 0\n" for _, name in items("train")))
    remedy = "write train.csv and val.csv with the columns image and labels, and train with --multi-label"
    for message in (error_of_training(tmp_path / "x"), error_of_import(tmp_path / "x", capsys)):
        assert f"{what}; {remedy} (see docs/multilabel.md)" in message.replace(" and 0 more", "")


def test_one_of_several_attributes_is_imported(tmp_path):
    for name in CELEBA:
        root = tmp_path / name
        SEVERAL[name][0](root)
        message = error_of_training(root)
        assert f"{root}_imported`, or choose Young, Bald" in message.replace("'", "")
        obey(message)
        images = DataRoot(f"{root}_imported").images(Mode.TRAIN)[1]
        assert {(color_of(data), label) for data, label in map(read_image, images)} == {(0, 0), (1, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("name", CELEBA)
def test_column_of_celeba_is_found_among_other_lists(tmp_path, name):
    SEVERAL[name][0](tmp_path)
    folder = "Anno/" if "own" in name else ""
    put(tmp_path / f"{folder}identity_CelebA.txt", "".join(f"{file}.jpg {k}\n" for k, file in items("train")))
    images = sources.read(tmp_path, options=Options(label_column="Male"))[1]["train"]
    expected = {(color_of(read_image(each)[0]), each.label) for each in images}
    assert expected == {(0, 0), (1, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("name", CELEBA)
def test_official_splits_of_celeba(tmp_path, capsys, name):
    root = tmp_path / "x"
    SEVERAL[name][0](root)
    files = [f"{file}.jpg" for _, file in items("train")]
    parts = [min(2, max(0, i - 10) // 4) for i in range(20)]  # 14 training, 4 validation and 2 test images
    lines = [f"{file} {part}\n" for file, part in zip(files, parts, strict=True)]
    text = "image_id,partition\n" + "".join(lines).replace(" ", ",") if "Kaggle" in name else "".join(lines)
    path = root / f"{'Eval/' if 'own' in name else ''}list_eval_partition{'.csv' if 'Kaggle' in name else '.txt'}"
    put(path, text)
    message = error_of_training(root)
    assert f"{path.name} contains the splits" in message
    obey(message)
    for mode, part in zip(Mode, (0, 1), strict=True):
        images = DataRoot(f"{root}_imported").images(mode)[1]
        expected = sorted(
            image(k, int(file[:3])) for (k, file), own in zip(items("train"), parts, strict=True) if own == part
        )
        assert sorted(read_image(each)[0] for each in images) == expected
    log = capsys.readouterr()
    assert "2 test images left out" in log.out + log.err
    source = root if "own" in name else root / ("list_attr_celeba" + path.suffix)
    for bad, problem in (
        (text.replace(f"{files[3]} 0\n", "").replace(f"{files[3]},0\n", ""), f"{files[3]} is not in {path}; add it"),
        (f"{text}x.jpg 7\n", "is not an image and 0, 1 or 2; download the file again"),
        ("x.jpg 7\n" * 3, f"{path}: line 3 is not an image and 0, 1 or 2; download the file again"),
    ):
        put(path, bad)
        assert problem in error_of_import(source, capsys, "--label-column", "Male")
    path.unlink()  # obey the first message
    assert sources.read(source, options=Options(label_column="Male"))[1]["train"]


def test_class_names_that_consist_of_other_class_names(tmp_path):
    combined(" ")(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert "; if ray goldfish is the name of one class, run `" in message
    imported = obey(message)
    assert len(DataRoot(imported).images(Mode.TRAIN)[0].classes) == 8


def test_column_of_masks_is_not_the_column_of_images(tmp_path):
    build = table("train.csv", "mask,image_id,label\n", lambda k, name: f"m{name}.jpg,{name}.jpg,{NAMES[k]}")
    build(tmp_path)
    for _, name in items("train"):
        put(tmp_path / f"masks/m{name}.jpg", image(7))
    assert colors_match(sources.read(tmp_path)[1]["train"])


def test_labels_in_several_columns(tmp_path, capsys):
    build = table("train.csv", "image_id,variety,label\n", lambda k, name: f"{name}.jpg,x,{NAMES[k]}")
    build(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert message.endswith(", with a different --label-column for a different label (variety)")
    assert colors_match(DataRoot(obey(message)).images(Mode.TRAIN)[1])
    assert "the columns variety, label are all candidates for --label-column" in error_of_import(tmp_path / "x", capsys)


HEADERS = (
    f"label,{','.join(f'pixel{i}' for i in range(65))}",
    "pixels",
    ",".join(f"1x{i}" for i in range(28)),
)


@pytest.mark.parametrize("header", HEADERS)
def test_tables_of_pixels_without_labels_or_square_images_are_named(tmp_path, header):
    put(tmp_path / "train.csv", header + "\n" + ",".join("0" * (header.count(",") + 1)) + "\n")
    what = "it contains train.csv: tables of pixels; this format cannot be read: write each image to the folder of"
    assert what in error_of_training(tmp_path)


def checked(imported, counts=DIVIDED, names=NAMES):
    for mode, count in zip(Mode, counts, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)


def test_versions_of_the_same_images(tmp_path):
    """PlantVillage contains each image in color, in gray and segmented."""
    for folder, ending in (("color", ""), ("grayscale", ""), ("segmented", "_masked")):
        put_images(tmp_path / "x/raw", "train", lambda k, n, f=folder, e=ending: f"{f}/{NAMES[k]}/{n}{e}.jpg")
    message = error_of_training(tmp_path / "x")
    what = "it contains raw/color/: class folders; raw/grayscale/, raw/segmented/: copies of its images; run `"
    assert what in message
    checked(obey(message))
    (tmp_path / "x/raw/grayscale/cock/000c.jpg").rename(tmp_path / "x/raw/grayscale/cock/x.jpg")
    assert "images in nested folders" in error_of_training(tmp_path / "x")


def test_masks_next_to_images_are_left_out(tmp_path, capsys):
    put_images(tmp_path / "x", "train", lambda k, name: f"a/{NAMES[k]}/Images/{name}.jpg")
    put_images(tmp_path / "x", "train", lambda k, name: f"a/{NAMES[3 - k]}/masks/{name}.jpg")
    checked(obey(error_of_training(tmp_path / "x")))
    assert "20 images left out, because a/cock/masks/" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "x/a/cock/Images")
    put(tmp_path / "x/a/cock/other/0.jpg", image(0))
    assert len(sources.read(tmp_path / "x")[2]) == 8  # images/ is not in all folders, and may be a class


def test_classes_at_different_depths(tmp_path, capsys):
    places = ["a/abbey", "b/arch/indoor", "b/arch/outdoor", "c/market/outdoor"]
    put_images(tmp_path / "x", "train", lambda k, name: f"SUN397/{places[k]}/{name}.jpg")
    error = error_of_import(tmp_path / "x", capsys)
    assert "or to all if each folder with images is a class" in error
    _, splits, classes = sources.read(tmp_path / "x", options=Options(class_depth=0))
    assert classes == [place.replace("/", "_") for place in places]
    assert all(map(colors_match, splits.values()))


def test_tables_in_class_folders(tmp_path):
    """GTSRB has a table in each class folder, and one for all test images."""
    header = "Filename;Width;Roi.X1;ClassId\n"
    root = tmp_path / "training"  # the name of the folder does not matter
    for k in range(4):
        names = [name for label, name in items("train") if label == k]
        rows = "".join(f"{name}.png;28;5;{k}\n" for name in names)
        put(root / f"GTSRB/Final_Training/Images/{k:05d}/GT-{k:05d}.csv", header + rows)
    put_images(root, "train", lambda k, name: f"GTSRB/Final_Training/Images/{k:05d}/{name}.png")
    put_images(root, "val", lambda k, name: f"GTSRB/Final_Test/Images/{name}.png")
    rows = "".join(f"{name}.png;28;5;{k}\n" for k, name in items("val"))
    put(root / "GTSRB/GT-final_test.csv", header + rows)
    put(root / "GTSRB/Readme-Images.txt", "This archive contains images.\n")
    checked(obey(error_of_training(root)), GIVEN, None)


def test_copies_in_folders_that_differ_only_in_case(tmp_path, capsys):
    """Kaggle contains HAM10000_images_part_1/ and ham10000_images_part_1/."""
    build = table("HAM_metadata.csv", "image_id,dx\n", lambda k, name: f"{name},{NAMES[k]}", "HAM_part_1")
    build(tmp_path / "x")
    shutil.copytree(tmp_path / "x/HAM_part_1", tmp_path / "x/ham_part_1")
    checked(obey(error_of_training(tmp_path / "x")))
    assert "HAM_part_1/000c.jpg and ham_part_1/000c.jpg are copies; the first one is used" in capsys.readouterr().err
    put(tmp_path / "x/ham_part_1/000c.jpg", image(3))
    error = error_of_import(tmp_path / "x", capsys)
    assert "line 3: 000c matches HAM_part_1/000c.jpg and ham_part_1/000c.jpg; write the path of one" in error


def test_folders_of_images_with_a_table_are_imported(tmp_path):
    """train/0/0/0/ are not class folders."""
    put_images(tmp_path / "x", "train", lambda k, name: f"train/{name[0]}/{name[1]}/{name[2]}/{name}.jpg")
    put(tmp_path / "x/train.csv", "id,landmark_id\n" + "".join(f"{name},{k}\n" for k, name in items("train")))
    checked(obey(error_of_training(tmp_path / "x")), DIVIDED, None)


def test_boxes_without_header_next_to_class_folders(tmp_path):
    """Stanford Cars of Kaggle has class folders, and tables of boxes without a header."""
    for split, name in (("train", "train"), ("val", "test")):
        put_images(tmp_path / "x", split, lambda k, n, name=name: f"car_data/car_data/{name}/{NAMES[k]}/{n}.jpg")
        put(tmp_path / f"x/anno_{name}.csv", "".join(f"{n}.jpg,3,1,5,7,{k + 1}\n" for k, n in items(split)))
    put(tmp_path / "x/names.csv", "".join(f"{name}\n" for name in NAMES))
    checked(obey(error_of_training(tmp_path / "x")), GIVEN)


def test_table_with_columns_separated_by_spaces(tmp_path, capsys):
    """Stanford Online Products has tables such as Ebay_train.txt."""
    for split, name in (("train", "train"), ("val", "test")):
        put_images(tmp_path / "x", split, lambda k, n: f"bicycle_final/{n}.jpg")
        rows = (f"{i} {k + 1} {1 + k // 2} bicycle_final/{n}.jpg\n" for i, (k, n) in enumerate(items(split)))
        put(tmp_path / f"x/Ebay_{name}.txt", "image_id class_id super_class_id path\n" + "".join(rows))
    imported = obey(error_of_training(tmp_path / "x"))
    images = DataRoot(imported).images(Mode.TRAIN)[1]
    assert {(color_of(data) + 1, label) for data, label in map(read_image, images)} == {(k, k) for k in range(1, 5)}
    path = tmp_path / "x/Ebay_train.txt"
    put(path, path.read_text() + "21 1 1\n")
    assert "Ebay_train.txt: line 22 does not have 4 columns; correct it" in error_of_import(path, capsys)
    assert len(SPLITS) == 2
