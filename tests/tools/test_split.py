import os
import shutil

import pytest

from layouts import image, obey, put
from paddle_resnet import dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import split
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


@pytest.fixture
def source(photos):
    return photos / "train"  # three classes of ten images each


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_split_assigns_each_image_once_with_fraction_per_class(source, tmp_path, capsys):
    output = tmp_path / "new" / "folder" / "data"
    assert dataset.main(["split", str(source), "--output", str(output), "--val", "0.3"]) == 0
    assert capsys.readouterr().out == f"{output}: 21 training and 9 validation images in 3 classes\n"
    actual = tree(output)
    assert {name.partition("/")[2]: data for name, data in actual.items()} == tree(source)
    assert len(actual) == 30
    for mode, count in ((Mode.TRAIN, 7), (Mode.EVAL, 3)):
        numbers, images = DataRoot(output).images(mode)
        assert numbers.classes == ["class0", "class1", "class2"]
        assert [image.label for image in images] == [0] * count + [1] * count + [2] * count


def test_flags_set_fraction_seed_and_grouping(source, tmp_path):
    """Each image exists twice, so that the split with groups differs."""
    for path in source.glob("class[01]/*"):
        for name in (path.name, f"copy_of_{path.name}"):
            target = tmp_path / "twice" / path.parent.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    flags, validation = ["--val", "0.4", "--seed", "3"], []
    for more, values in (
        ([], (0.2, 0, False)),
        (flags, (0.4, 3, False)),
        ([*flags, "--group-duplicates"], (0.4, 3, True)),
    ):
        folder, expected = tmp_path / f"command{len(validation)}", tmp_path / f"function{len(validation)}"
        assert dataset.main(["split", str(tmp_path / "twice"), "--output", str(folder), *more]) == 0
        split.split(tmp_path / "twice", expected, *values)
        assert tree(folder) == tree(expected)
        validation.append(set(tree(folder / "val")))
    assert validation[0] != validation[1] != validation[2]


def test_split_depends_only_on_names_fraction_and_seed(source, tmp_path):
    def chosen(name, **options):
        split.split(source, tmp_path / name, 0.3, **options)
        return tree(tmp_path / name / "val").keys()

    assert chosen("a") == chosen("b") == chosen("c", seed=0)
    assert chosen("d", seed=1) != chosen("a2")
    names = [f"{i}.jpg" for i in range(1000)]
    before, after = (set(split.divide("x", some, 0.2, 0)[1]) for some in (names, [*names, "new.jpg"]))
    assert len(before) == 200
    assert len(before ^ after) <= 2
    assert split.divide("x", names, 0.2, 0) != split.divide("y", names, 0.2, 0)


@pytest.mark.parametrize(
    ("count", "fraction", "val"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2), (9, 0.2, 2), (100, 0.2, 20)]
)
def test_each_split_has_at_least_one_image(count, fraction, val):
    train, evaluation = split.divide("x", [f"{i}.jpg" for i in range(count)], fraction, 0)
    assert (len(train), len(evaluation)) == (count - val, val)


def test_smallest_group_of_duplicates_goes_to_val_if_none_fits():
    names = ["a", "b", "c", "d", "e"]
    groups = {f"x/{name}": name in "de" for name in names}
    assert split.divide("x", names, 0.2, 0, groups) == (["a", "b", "c"], ["d", "e"])
    assert split.divide("x", names, 0.2, 0, dict.fromkeys(groups, 0)) == (names, [])


def test_split_copies_only_without_hard_and_symbolic_links(source, tmp_path, monkeypatch):
    split.split(source, tmp_path / "hard", 0.2)
    name = next(iter(tree(tmp_path / "hard" / "train")))
    assert os.path.samefile(tmp_path / "hard" / "train" / name, source / name)
    assert not (tmp_path / "hard" / "train" / name).is_symlink()

    def fail(*args):
        raise OSError

    monkeypatch.setattr(os, "link", fail)
    # Simulate a destination on a different disk, for which os.link fails.
    split.split(os.path.relpath(source), tmp_path / "soft", 0.2)
    assert (tmp_path / "soft" / "train" / name).readlink() == source / name
    monkeypatch.setattr(os, "symlink", fail)
    split.split(source, tmp_path / "copies", 0.2)
    assert tree(tmp_path / "hard") == tree(tmp_path / "soft") == tree(tmp_path / "copies")


def test_interrupted_split_leaves_no_output(source, tmp_path, monkeypatch):
    def interrupt(path, place):
        if place.name == "05.jpg":
            raise KeyboardInterrupt
        os.symlink(path, place)

    monkeypatch.setattr(split, "link", interrupt)
    with pytest.raises(KeyboardInterrupt):
        split.split(source, tmp_path / "x", 0.2)
    assert not list(tmp_path.iterdir())


def test_invalid_source_or_output_exits_with_code_2(photos, source, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    few = tmp_path / "few"
    shutil.copytree(source, few)
    for name in ("one", "none", "__MACOSX"):
        (few / name).mkdir()
    shutil.copy(source / "class0/00.jpg", few / "one")
    flat = tmp_path / "flat"
    shutil.copytree(source / "class0", flat)
    for folder, output, expected in (
        (source, tmp_path / "there", f"--output {tmp_path}/there: already exists"),
        (few, tmp_path / "x", "one for train/ and one for val/, but some have fewer: none (0), one (1); add"),
        (flat, tmp_path / "x", "contains no class folders"),
        (photos, tmp_path / "x", f"{photos}: train/ contains no images, so it is not a class; use {photos}/train"),
        (few, few / "x", f"--output {few}/x: would change the data set {few}; choose a path outside it"),
        (tmp_path / "nowhere", tmp_path / "x", "not a folder"),
        (source, "/proc/x", "--output /proc/x: cannot be written"),
    ):
        if folder == few and output != tmp_path / "x":
            shutil.rmtree(few / "one")
            shutil.rmtree(few / "none")
        assert dataset.main(["split", str(folder), "--output", str(output)]) == 2
        message = capsys.readouterr().err
        assert expected in message
        assert not (tmp_path / "x").exists()
    assert dataset.main(["split", str(source), "--output", str(tmp_path / "x"), "--val", "1"]) == 2
    assert "1 leaves one split empty" in capsys.readouterr().err
    (few / "class0" / "nowhere.jpg").symlink_to("/nowhere")
    with pytest.raises(UsageError, match=r"few/class0/nowhere.jpg: a broken link"):
        split.split(few, tmp_path / "x", 0.2)


def test_class_may_have_two_images_and_the_name_of_a_split(tmp_path, capsys):
    for name in ("train/0.jpg", "train/1.jpg", "b/0.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert split._list_source(tmp_path) == {"b": ["0.png", "1.png"], "train": ["0.jpg", "1.jpg"]}
    assert capsys.readouterr().err == ""
    for name in ("b/notes.txt", "top.jpg"):
        (tmp_path / name).touch()
    split._list_source(tmp_path)
    error = capsys.readouterr().err
    assert "2 entries ignored" in error and "b/notes.txt" in error


APTOS = {"train_images": 20, "test_images": 5}
NO_CLASSES = "put the images into one folder per class"


@pytest.mark.parametrize(
    ("folders", "files", "problem"),
    [
        (APTOS, ["train.csv"], "test_images, train_images: named like splits, not like classes (train.csv may contain"),
        (
            {"train": 4, "test": 4},
            ["train/metadata.csv"],
            "test, train: named like splits, not like classes (train/met",
        ),
        ({"cat": 4}, ["cat/labels.csv"], "cat is the only class folder (cat/labels.csv may contain"),
        ({"images": 4}, ["_classes.csv", "a.csv"], "images is the only class folder (_classes.csv, a.csv may contain"),
        ({"cat": 4}, [], "cat is the only class folder; put the images into one folder per class"),
        ({"a": 2, "val2017": 2}, [], f"val2017: named like splits, not like classes; {NO_CLASSES}, or rename these"),
        ({"a": 2, "Images": 2}, [], "Images: named like splits"),
        *(
            ({"a": 2, name: 2}, [], f"{name}: named like splits")
            for name in ("dev", "eval", "Training set", "test.jpg")
        ),
        ({"a": 2, "train": 2}, [], None),
        ({"valley": 2, "train station": 2, "trainer": 2, "testudo": 2, "image": 2, "imagery": 2}, [], "image: named"),
        ({"valley": 2, "train station": 2, "trainer": 2, "testudo": 2, "imagery": 2}, [], None),
    ],
)
def test_folders_named_like_splits_and_single_classes_are_rejected(tmp_path, capsys, folders, files, problem):
    source = tmp_path / "source"
    for name, count in folders.items():
        (source / name).mkdir(parents=True)
        for i in range(count):
            (source / name / f"{i}.png").touch()
    for name in files:
        (source / name).touch()
    code = dataset.main(["split", str(source), "--output", str(tmp_path / "x")])
    message = capsys.readouterr().err
    assert (code, (tmp_path / "x").exists()) == ((0, True) if problem is None else (2, False))
    if problem is not None:
        assert f"{source}: {problem}" in message and NO_CLASSES in message
    if problem is not None and "or rename" in message:  # obey the message
        for name in folders:
            (source / name).rename(source / f"class {name}")
        assert dataset.main(["split", str(source), "--output", str(tmp_path / "x")]) == 0


PIXELS = "label,pixels\n" + "".join(f"{k},{' '.join('7' * 64)}\n" for k in (0, 1)) * 3


@pytest.mark.usefixtures("convert_here", "verify_here", "cache")
@pytest.mark.parametrize(
    ("path", "problem", "table"),
    [
        ("{name}.{i}.jpg", "contains no class folders; it contains 6 images outside class folders", {}),
        ("train/{name}/x/{i}.jpg", "train/ contains no images, so it is not a class; it contains train/a/x/", {}),
        ("train_images/{name}{i}.jpg", "train_images is the only class folder", {"train.csv": "id,label\n{rows}"}),
        ("a/{name}{i}.heic", "the folders contain no images; it contains b/x.csv: tables", {"b/x.csv": PIXELS}),
    ],
)
def test_images_without_class_folders_are_reported_with_a_command(tmp_path, capsys, path, problem, table):
    items = [(name, i) for name in "ab" for i in range(3)]
    for name, i in items:
        put(tmp_path / "x" / path.format(name=name, i=i), image("ab".index(name), i))
    for file, text in table.items():
        put(tmp_path / "x" / file, text.format(rows="".join(f"{name}{i}.jpg,{name}\n" for name, i in items)))
    assert dataset.main(["split", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path}/x: {problem}" in message
    assert len(DataRoot(obey(message)).images(Mode.TRAIN)[1]) == 4


def test_class_of_background_is_a_warning(source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source/class1").rename(tmp_path / "source/BACKGROUND_Google")
    split.split(tmp_path / "source", tmp_path / "x", 0.2)
    assert "source: BACKGROUND_Google is used as a class, but contains" in capsys.readouterr().err


def test_class_folder_that_is_not_utf8_is_rejected(source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "source")
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / "source/class1").rename(tmp_path / "source" / name)
    command = ["split", str(tmp_path / "source"), "--output", str(tmp_path / "x")]
    assert dataset.main(command) == 2
    assert "the class folder b'caf\\xe9' is not valid UTF-8; rename the folder" in capsys.readouterr().err
    (tmp_path / "source" / name).rename(tmp_path / "source/café")
    assert dataset.main(command) == 0


def test_other_files_are_listed_if_a_class_has_too_few_images(tmp_path, capsys):
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "0.heic").touch()
    with pytest.raises(UsageError, match=r"have fewer: a \(0\), b \(0\); add images"):
        split._list_source(tmp_path)
    assert "2 entries ignored: 2 .heic (a 1, b 1; for example a/0.heic)" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, " and 2 more")])
def test_small_classes_are_listed(tmp_path, count, more):
    for i in range(count):
        (tmp_path / f"c{i}").mkdir()
    with pytest.raises(UsageError, match=rf"have fewer: c0 \(0\), .*, c4 \(0\){more}; add images"):
        split._list_source(tmp_path)


def test_overlong_source_is_not_reported_as_output(tmp_path, capsys):
    source = tmp_path / ("a" * 300)
    assert dataset.main(["split", str(source), "--output", str(tmp_path / "x")]) == 2
    assert f"error: {source}: not a folder; use" in capsys.readouterr().err
