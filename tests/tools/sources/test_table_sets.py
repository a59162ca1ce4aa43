"""Data sets with several tables for a split, such as lists of families and species, and tables of other images."""

import pytest
from test_downloads import GIVEN, NAMES, SPLITS, items, put_images

from layouts import color_of, colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
VARIANTS = ["707-320", "A300 B4", "DC-10", "F/A-18"]
KINDS = {"family": ["707", "A300", "DC", "DC"], "manufacturer": ["x", "y", "x", "x"], "variant": VARIANTS}


def gtsrb(root):
    """GTSRB of Kaggle has a table of the classes' icons."""
    for split, name in (("train", "Train"), ("val", "Test")):
        put_images(root, split, lambda k, file, name=name: f"{name}/{file}.png")
        lines = (f"28,{k},{name}/{file}.png\n" for k, file in items(split))
        put(root / f"{name}.csv", "Width,ClassId,Path\n" + "".join(lines))
    put(root / "Meta/0.png", image(0, 90, "PNG"))
    put(root / "Meta.csv", "Path,ClassId\nMeta/0.png,0\n")


def aircraft(root):
    """FGVC-Aircraft has lists of manufacturers, families and variants, and lists of train and val together."""
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"data/images/{name}.jpg")
        put(root / f"data/images_{split}.txt", "".join(f"{name}\n" for _, name in items(split)))
    for kind, names in KINDS.items():
        lines = {split: "".join(f"{name} {names[k]}\n" for k, name in items(split)) for split in SPLITS}
        for split, text in (lines | {"trainval": "".join(lines.values())}).items():
            put(root / f"data/images_{kind}_{split}.txt", text)
    put(root / "data/images_box.txt", "".join(f"{name} 3 14 98 43\n" for _, name in items("train")))


def textures(root):
    """DTD has ten splits into train and test, and a list with all labels of an image."""
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"images/{NAMES[k]}/{name}.jpg")
        for number in (2, 3, 10):
            chosen = items(split if number == 2 else "val")
            put(root / f"labels/{split}{number}.txt", "\n".join(f"{NAMES[k]}/{name}.jpg" for k, name in chosen))
    put(root / "labels/joint.txt", "".join(f"{NAMES[k]}/{name}.jpg {NAMES[k]} x\n" for k, name in items("train")))


def scenes(root):
    """SUN397 has classes at different depths, and lists of paths with a slash at their start."""
    places = ["a/abbey", "b/arch/indoor", "b/arch/outdoor", "c/market/outdoor"]
    for split, name in (("train", "Training"), ("val", "Testing")):
        put_images(root, split, lambda k, file: f"SUN397/{places[k]}/{file}.jpg")
        put(root / f"Partitions/{name}_01.txt", "".join(f"/{places[k]}/{file}.jpg\n" for k, file in items(split)))
    put(root / "Partitions/ClassName.txt", "".join(f"/{place}\n" for place in places))


LAYOUTS = {
    "GTSRB": (gtsrb, None),
    "FGVC-Aircraft": (aircraft, VARIANTS),
    "DTD": (textures, NAMES),
    "SUN397": (scenes, ["a_abbey", "b_arch_indoor", "b_arch_outdoor", "c_market_outdoor"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, name):
    build, names = LAYOUTS[name]
    build(tmp_path / "x")
    imported = obey(error_of_training(tmp_path / "x"))
    for mode, count in zip(Mode, GIVEN, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)


def test_tables_that_are_left_out_are_logged(tmp_path, capsys):
    for build, problem in (
        (gtsrb, "Meta.csv left out, because the images are not those of the other tables"),
        (aircraft, "images_variant_train.txt has the most classes and is used; for other classes, import "),
    ):
        root = tmp_path / build.__name__
        build(root)
        sources.read(root)
        log = capsys.readouterr()
        assert problem in log.err
        assert (f"{root}: the data set is in {root}/data\n" in log.out) == (build is aircraft)


def test_list_of_train_and_val_is_not_left_out_without_a_list_of_val(tmp_path, capsys):
    aircraft(tmp_path / "x")
    for path in (tmp_path / "x/data").glob("images_*_val.txt"):
        path.rename(path.with_stem(path.stem.replace("val", "test")))
    error = error_of_import(tmp_path / "x/data", capsys)
    assert "contains several tables (" in error and "images_variant_trainval.txt" in error


def test_list_of_one_kind_of_classes_is_imported_with_its_other_splits(tmp_path, capsys):
    aircraft(tmp_path)
    _, splits, classes = sources.read(tmp_path / "data/images_family_train.txt")
    assert "other splits are read from images_family_val.txt in its folder" in capsys.readouterr().out
    assert classes == ["707", "A300", "DC"]
    assert tuple(len(splits[split]) for split in SPLITS) == GIVEN
    read = [(color_of(read_image(image)[0]), image.label) for images in splits.values() for image in images]
    assert {*read} == {(0, 0), (1, 1), (2, 2), (3, 2)}
    error = error_of_import(tmp_path / "data/images_family_val.txt", capsys)
    assert "contains no training images; import the table of the training images" in error


def test_tables_that_contradict_each_other_are_an_error_with_remedy(tmp_path, capsys):
    put_images(tmp_path / "x", "train", lambda k, name: f"images/{name}.jpg")
    for name, shift in (("a", 0), ("b", 1)):
        lines = (f"{file}.jpg,{NAMES[(k + shift * int(file[2])) % 4]}\n" for k, file in items("train"))
        put(tmp_path / f"x/{name}.csv", "file_name,label\n" + "".join(lines))
    error = error_of_import(tmp_path / "x", capsys)
    assert "contains several tables (a.csv, b.csv); import one of them, such as `" in error
    obey(error)
    assert colors_match(DataRoot(tmp_path / "x_imported").images(Mode.TRAIN)[1])


def test_tables_of_other_images_are_left_out_only_next_to_one_training_table(tmp_path, capsys):
    aircraft(tmp_path / "x")
    for path in (tmp_path / "x/data").glob("images_manufacturer_*"):
        path.unlink()
    put(tmp_path / "x/data/icons/icon.jpg", image(0, 90))
    put(tmp_path / "x/data/other.txt", "icon 0\n")
    error = error_of_import(tmp_path / "x/data", capsys)
    assert "contains several tables (" in error and "left out" not in error


def test_tables_of_the_same_images_may_write_their_paths_differently(tmp_path, capsys):
    put_images(tmp_path, "train", lambda k, name: f"images/{name}.jpg")
    lines = {
        "species": (f"{name}.jpg,{NAMES[k]}\n" for k, name in items("train")),
        "family": (f"images\\{name}.jpg,{k // 2}\n" for k, name in items("train")),
    }
    for kind, some in lines.items():
        put(tmp_path / f"{kind}.csv", "file_name,label\n" + "".join(some))
    assert sources.read(tmp_path)[2] == NAMES
    assert "species.csv has the most classes and is used" in capsys.readouterr().err
