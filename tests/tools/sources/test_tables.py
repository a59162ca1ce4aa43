"""Data sets with labels in tables, in miniature: each class has a color, which tests compare with the label."""

import json
import re
import shlex

import pytest

from layouts import color_of, colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet import dataset
from paddle_resnet.data import sniffer
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]  # sorted
PARTS = {"train": 5, "val": 2}
ITEMS = [(k, split, i) for split, count in PARTS.items() for i in range(count) for k in (2, 0, 3, 1)]


def stem(k, split, i):
    """Return the name of an image, from which its class cannot be concluded."""
    return f"{split[0]}{i}{'cabd'[k]}"


def flat(root, folder="images", splits=("train", "val"), kind=".jpg"):
    for k, split, i in ITEMS:
        if split in splits:
            put(root / folder.format(split) / f"{stem(k, split, i)}{kind}", image(k, i + 100 * (split == "val")))


def rows(line, splits=("train", "val")):
    """Return a line of text for each image. `line` is a function of the name of the image, its class and its split."""
    return "".join(line(stem(k, split, i), k, split) + "\n" for k, split, i in ITEMS if split in splits)


def kaggle(root):
    flat(root, "train_images", ("train",), ".png")
    put(root / "train.csv", "id_code,diagnosis\n" + rows(lambda name, k, _: f"{name},{k}", ("train",)))
    put(root / "test_images/x.png", image(0))
    put(root / "test.csv", "id_code\nx\n")
    put(root / "sample_submission.csv", "id_code,diagnosis\nx,0\n")


def kaggle_names(root):
    flat(root, "train", ("train",))
    put(root / "test/v0a.jpg", image(0))
    put(root / "labels.csv", "id,breed\n" + rows(lambda name, k, _: f"{name},{NAMES[k]}", ("train",)))
    put(root / "sample_submission.csv", "id,cock,goldfish,ray,tench\nv0a,0,0,1,0\n")


def image_id(root):
    flat(root, "train_images", ("train",))
    put(root / "train.csv", "image_id,label\n" + rows(lambda name, k, _: f"{name}.jpg,{k}", ("train",)))
    put(root / "label_num_to_disease_map.json", "{}")


def fastai(root):
    flat(root, "{}")
    lines = rows(lambda name, k, split: f"{split}/{name}.jpg,{NAMES[k]},{split == 'val'}")
    put(root / "data.csv", "path,label,is_valid\n" + lines)


def fastai_labels(root):
    for k, split, i in ITEMS:
        put(root / f"train/{NAMES[k]}/{stem(k, split, i)}.jpg", image(k, i + 100 * (split == "val")))
    put(root / "labels.csv", "name,label\n" + rows(lambda name, k, _: f"train/{NAMES[k]}/{name}.jpg,{k}"))


def split_column(root):
    flat(root)
    lines = rows(lambda name, k, split: f"images/{name}.jpg;{NAMES[k]};{'Validation' if split == 'val' else split}")
    put(root / "data.csv", "filename;class;split\n" + lines)


def tsv(root):
    flat(root, "img")
    for split in PARTS:
        put(root / f"{split}.tsv", "file\tclass\n" + rows(lambda name, k, _: f"{name}.jpg\t{NAMES[k]}", (split,)))


def metadata(suffix, folder="{}", val="validation"):
    def build(root):
        for split, name in (("train", "train"), ("val", val)):
            sub = "images/" if suffix == "jsonl" else ""
            flat(root, f"{name}/{sub}", (split,))
            if suffix == "csv":
                text = "file_name,label\n" + rows(lambda file, k, _: f"{file}.jpg,{NAMES[k]}", (split,))
            else:
                text = rows(
                    lambda file, k, _: json.dumps({"file_name": f"images/{file}.jpg", "label": k, "x": [1]}), (split,)
                )
            put(root / name / f"metadata.{suffix}", text)

    return build


def roboflow(root):
    for split, name in (("train", "train"), ("val", "valid")):
        flat(root, name, (split,))
        text = rows(lambda file, k, _: f"{file}.jpg, " + ", ".join(str(int(k == j)) for j in range(4)), (split,))
        put(root / name / "_classes.csv", f"filename, {', '.join(NAMES)}\n{text}")


def lists(delimiter=" ", header="", labels=str, names=None, base="jpg/", pattern="{}_list.txt"):
    def build(root):
        flat(root, base.rstrip("/\\") or "{}")
        for split in PARTS:
            text = rows(lambda name, k, _: f"{base}{name}.jpg{delimiter}{labels(k)}", (split,))
            put(root / pattern.format(split), header + text)
        if names:
            put(root / names[0], names[1])

    return build


def cub(root):
    for k, split, i in ITEMS:
        put(root / f"images/{k + 1:03d}.{NAMES[k]}/{stem(k, split, i)}.jpg", image(k, i + 100 * (split == "val")))
    numbered = [*enumerate(ITEMS, 1)]
    put(root / "images.txt", "".join(f"{n} {k + 1:03d}.{NAMES[k]}/{stem(k, s, i)}.jpg\n" for n, (k, s, i) in numbered))
    put(root / "image_class_labels.txt", "".join(f"{n} {k + 1}\n" for n, (k, _, _) in numbered))
    put(root / "train_test_split.txt", "".join(f"{n} {int(s == 'train')}\n" for n, (_, s, _) in numbered))
    put(root / "classes.txt", "".join(f"{k + 1} {k + 1:03d}.{name}\n" for k, name in enumerate(NAMES)))


def pets(root):
    for k, split, i in ITEMS:
        put(root / f"images/{NAMES[k]}_{split[0]}{i}.jpg", image(k, i + 100 * (split == "val")))
        put(root / f"annotations/trimaps/{NAMES[k]}_{split[0]}{i}.png", image(0, kind="PNG"))
    for split, file in (("train", "trainval.txt"), ("val", "test.txt")):
        lines = (f"{NAMES[k]}_{s[0]}{i} {k + 1} 1 1\n" for k, s, i in ITEMS if s == split)
        put(root / "annotations" / file, "".join(lines))


def food(kind):
    def build(root):
        for k, split, i in ITEMS:
            put(root / f"images/{NAMES[k]}/{stem(k, split, i)}.jpg", image(k, i + 100 * (split == "val")))
        for split, file in (("train", "train"), ("val", "test")):
            paths = {name: [] for name in NAMES}
            for k, s, i in ITEMS:
                if s == split:
                    paths[NAMES[k]].append(f"{NAMES[k]}/{stem(k, s, i)}")
            text = json.dumps(paths) if kind == "json" else "".join(f"{p}\n" for some in paths.values() for p in some)
            put(root / f"meta/{file}.{kind}", text)
        put(root / "meta/classes.txt", "".join(f"{name}\n" for name in NAMES))
        put(root / "meta/labels.txt", "".join(f"{name.title()}\n" for name in NAMES))

    return build


LABELED = "".join(f"{k} {name}\n" for k, name in enumerate(NAMES))
BOTH = {"train": 20, "val": 8}
TRAIN = {"train": 16, "val": 4}  # a fifth of the training images is used for validation
LAYOUTS = {
    "Kaggle id_code,diagnosis": (kaggle, TRAIN, None),
    "Kaggle id,breed": (kaggle_names, TRAIN, NAMES),
    "Kaggle image_id,label": (image_id, TRAIN, None),
    "fastai is_valid": (fastai, BOTH, NAMES),
    "fastai labels.csv": (fastai_labels, {"train": 24, "val": 4}, None),
    "split column": (split_column, BOTH, NAMES),
    "TSV": (tsv, BOTH, NAMES),
    "metadata.csv": (metadata("csv"), BOTH, NAMES),
    "metadata.jsonl with images/": (metadata("jsonl", val="test"), BOTH, None),
    "Roboflow": (roboflow, BOTH, NAMES),
    "PaddleClas": (lists(names=("flowers_label_list.txt", LABELED)), BOTH, NAMES),
    "PaddleX with labels.txt": (lists(names=("labels.txt", "\n".join(NAMES))), BOTH, NAMES),
    "list with commas": (lists(", ", base="24, 28/"), BOTH, None),
    "list with semicolons": (lists(";"), BOTH, None),
    "list with tabs and names": (lists("\t", labels=NAMES.__getitem__), BOTH, NAMES),
    "list with spaces and names": (
        lists(labels=lambda k: f"{NAMES[k]} x", base="my jpg/"),
        BOTH,
        [f"{name} x" for name in NAMES],
    ),
    "list with backslashes": (lists(base="jpg\\"), BOTH, None),
    "list from 1 with names": (lists(labels=lambda k: k + 1, names=("labels.txt", "\n".join(NAMES))), BOTH, NAMES),
    "list from 1 with unsorted names from 1": (
        lists(labels=lambda k: k + 1, names=("labels.txt", "".join(f"{k + 1} {NAMES[k]}\n" for k in (2, 0, 3, 1)))),
        BOTH,
        NAMES,
    ),
    "train.txt with names": (
        lists(labels=NAMES.__getitem__, pattern="{}.txt", names=("label_list.txt", "\n".join(NAMES))),
        BOTH,
        NAMES,
    ),
    "MMPretrain meta/": (
        lists(base="", pattern="meta/{}.txt", names=("meta/classes.txt", "\n".join(NAMES))),
        BOTH,
        NAMES,
    ),
    "CUB-200": (cub, BOTH, [f"{k + 1:03d}.{name}" for k, name in enumerate(NAMES)]),
    "Oxford Pets": (pets, BOTH, NAMES),
    "Food-101": (food("txt"), BOTH, NAMES),
    "Food-101 in JSON": (food("json"), BOTH, NAMES),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_detected_and_labels_match_pixels(tmp_path, name):
    build, counts, expected = LAYOUTS[name]
    build(tmp_path)
    kind, splits, classes = sources.read(tmp_path)
    assert (kind, classes) == ("table", expected)
    assert {split: len(images) for split, images in splits.items()} == counts
    assert colors_match(image for images in splits.values() for image in images)


# Training reads the class folders of this layout, or its error differs.
DIFFERENT = ("train.txt with names", "fastai labels.csv")
READ_BY_TRAINING = [
    *("PaddleClas", "PaddleX with labels.txt", "list from 1 with unsorted names from 1", "MMPretrain meta/"),
    "list from 1 with names",
]


@pytest.mark.parametrize("name", READ_BY_TRAINING)
def test_training_reads_lists_with_class_names(tmp_path, name):
    build, counts, names = LAYOUTS[name]
    build(tmp_path)
    offset = "auto"
    if name == "list from 1 with names":
        message = error_of_training(tmp_path)
        assert "has label 4, but labels.txt allows 0 to 3; number the classes from 0, or set --label-offset" in message
        offset = 1  # obey the message
    for mode, count in zip(Mode, counts.values(), strict=True):
        numbers, images = DataRoot(tmp_path, label_offset=offset).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)
    if name == "PaddleClas":  # the name of one list is enough
        (tmp_path / "train_list.txt").rename(tmp_path / "train.txt")
        # A different file may contain the same names, in a different order and before their numbers.
        put(tmp_path / "labels.txt", "".join(f"{NAMES[k]} {k}\n" for k in (2, 0, 3, 1)))
        assert DataRoot(tmp_path).images(Mode.TRAIN)[0].classes == names


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in (*DIFFERENT, *READ_BY_TRAINING)])
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    build, counts, _ = LAYOUTS[name]
    build(tmp_path / "source")
    message = error_of_training(tmp_path / "source")
    imported = obey(message)
    for mode, count in zip(Mode, counts.values(), strict=True):
        images = DataRoot(imported).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)
    assert dataset.main(["import", str(tmp_path / "source"), "--list"]) == 0
    assert message.partition("it contains ")[2].partition(", or use")[0] in capsys.readouterr().out
    assert dataset.main(["split", str(tmp_path / "source"), "--output", str(tmp_path / "x")]) == 2
    assert f"import {tmp_path}/source --output {tmp_path}/source_imported" in capsys.readouterr().err


def test_file_of_names_may_begin_with_a_class_without_images(tmp_path):
    """The labels 1 to 4 are not renumbered, because there are five names, and the first class has folders, too."""
    lists(labels=lambda k: k + 1, names=("labels.txt", "\n".join(["unused", *NAMES])))(tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "out"), "--to", "folder"]
    assert dataset.main(command) == 0
    for k, name in enumerate(NAMES):
        assert color_of(next((tmp_path / "out/val" / name).iterdir()).read_bytes()) == k
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == [*NAMES, "unused"]


def test_different_import_to_the_same_folder_is_rejected(tmp_path, capsys):
    LAYOUTS["PaddleX with labels.txt"][0](tmp_path / "x")
    for name in ("a_1", "a_2", "b_1", "b_2"):
        put(tmp_path / f"named/{name}.jpg", image(0, int(name[2])))
    assert dataset.main(["import", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 0
    convert = ["convert", "--from", str(tmp_path / "y"), "--to", "webdataset", "--output", str(tmp_path / "converted")]
    assert dataset.main(convert) == 0
    put(tmp_path / "x/labels.txt", "\n".join(reversed(NAMES)))
    for source, output, flags, what in (
        ("x", "y", [], "different classes"),
        ("named", "y", ["--as", "filename"], "a different --as"),
        ("x", "converted", [], "a different command"),
    ):
        assert dataset.main(["import", str(tmp_path / source), "--output", str(tmp_path / output), *flags]) == 2
        assert f"--output {tmp_path}/{output}: contains a conversion with {what} " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Kaggle id_code,diagnosis", "TSV", "Roboflow"])
def test_split_names_the_import(tmp_path, capsys, name):
    LAYOUTS[name][0](tmp_path / "x")
    assert dataset.main(["split", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2
    assert f"import {tmp_path}/x --output {tmp_path}/x_imported" in capsys.readouterr().err


def test_list_with_names_as_labels_is_reported_with_remedy(tmp_path):
    LAYOUTS["train.txt with names"][0](tmp_path)
    message = error_of_training(tmp_path)
    assert "train.txt: line 1 is not `PATH LABEL` but `jpg/t0b.jpg ray`; correct it, or run" in message
    imported = obey(message.partition("or run ")[2])
    assert colors_match(DataRoot(imported).images(Mode.EVAL)[1])


@pytest.mark.parametrize("to", ["webdataset", "folder", "recordio"])
@pytest.mark.parametrize("name", ["fastai is_valid", "metadata.jsonl with images/"])
def test_imported_table_is_a_valid_data_set(tmp_path, capsys, to, name):
    LAYOUTS[name][0](tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--to", to, "--workers", "1"]
    for _ in range(2):  # repeating the command changes nothing
        assert dataset.main(command) == 0
        assert f"{tmp_path}/x: 20 train and 8 val images" in capsys.readouterr().out
    for mode in Mode:
        numbers, images = DataRoot(tmp_path / "x").images(mode)
        assert numbers.classes == LAYOUTS[name][2] or numbers.classes in (None, ["0", "1", "2", "3"])
        assert colors_match(images)
        if to != "folder":  # the order of training images is random
            in_order = [read_image(image)[1] for image in images] == [2, 0, 3, 1] * (len(images) // 4)
            assert in_order == (mode is Mode.EVAL)
    assert dataset.main(["verify", str(tmp_path / "x")]) == 0


def test_images_with_the_same_name_and_class_are_all_written_to_its_folder(tmp_path):
    paths = [(k, f"{part}/{k}.jpg") for part in "abc" for k in range(4)]
    for number, (k, path) in enumerate(paths):
        put(tmp_path / "x" / path, image(k, number))
    put(tmp_path / "x/train.csv", "path,label\n" + "".join(f"{path},{k}\n" for k, path in paths))
    path = tmp_path / "x" / paths[0][1]
    path.rename(tmp_path / "x/real.jpg")
    path.symlink_to("../real.jpg")
    sources.import_(tmp_path / "x", tmp_path / "y", "folder", workers=1)
    written = {file.read_bytes() for file in (tmp_path / "y").glob("*/*/*.jpg")}
    assert written == {(tmp_path / "x" / path).read_bytes() for _, path in paths}


def test_numeric_folders_keep_their_numbers(tmp_path):
    """Sorted by name, folder 10 would precede folder 2."""
    lines = []
    for k in range(12):
        for i in range(2):
            put(tmp_path / f"source/images/{k}_{i}.jpg", image(k % 8, i + 10 * k))
            lines.append(f"{k}_{i},{k}\n")
    put(tmp_path / "source/train.csv", "id,label\n" + "".join(lines))
    sources.import_(tmp_path / "source", tmp_path / "x", "folder", workers=1)
    numbers, images = DataRoot(tmp_path / "x").images(Mode.TRAIN)
    assert numbers.classes == [str(k) for k in range(12)]
    assert {image.name.split("/")[1] == str(image.label) for image in images} == {True}


def test_table_is_chosen_by_path_and_columns_by_flags(tmp_path, capsys):
    flat(tmp_path, splits=("train",))
    for name in "ab":
        text = rows(lambda file, k, _: f"{file}|x|{k}|{NAMES[k]}", ("train",))
        put(tmp_path / f"{name}.csv", f"photo|owner|kind|label\n{text}")
    table = tmp_path / "b.csv"
    command = ["import", str(table), "--output", str(tmp_path / "x"), "--delimiter", "|", "--image-column", "photo"]
    assert dataset.main([*command, "--as", "nested"]) == 2
    assert f"{table}: not a folder; use the folder that contains the data set\n" in capsys.readouterr().err
    assert dataset.main([*command, "--label-column", "kinds"]) == 2
    assert "--label-column kinds: " in capsys.readouterr().err
    assert dataset.main([*command, "--label-column", "kind", "--val", "0.4"]) == 0
    assert f"{tmp_path}/x: 12 train and 8 val images from table" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("table", "--label-index --class-depth"),
        ("parquet", "--split-column --delimiter --label-index --class-depth"),
        ("tfrecord", "--split-column --delimiter --class-depth"),
        ("webdataset", "--image-column --split-column --delimiter --label-index --class-depth"),
        ("recordio", "--image-column --label-column --split-column --delimiter --class-depth"),
        ("array", "--image-column --split-column --delimiter --label-index --class-depth"),
        ("pixels", "--image-column --delimiter --label-index --class-depth"),
        ("nested", "--image-column --label-column --split-column --delimiter --label-index"),
        ("filename", "--image-column --label-column --split-column --delimiter --label-index --class-depth"),
    ],
)
def test_flags_that_a_kind_does_not_use_are_rejected(tmp_path, capsys, kind, flags):
    for flag in flags.split():
        for value in ("2", "0") if flag == "--label-index" else ("2",):
            error = error_of_import(tmp_path, capsys, "--as", kind, flag, value)
            assert f"{flag} {value}: not supported for {kind}, the kind of {tmp_path}; remove {flag}\n" in error


@pytest.mark.parametrize("flag", ["--image-column", "--label-column", "--split-column"])
@pytest.mark.parametrize("name", ["Oxford Pets", "CUB-200", "Food-101", "PaddleClas", "MMPretrain meta/", "Roboflow"])
def test_columns_are_rejected_without_a_table_that_contains_them(tmp_path, capsys, name, flag):
    LAYOUTS[name][0](tmp_path / "x")
    assert f"{flag} SPECIES: " in (error := error_of_import(tmp_path / "x", capsys, flag, "SPECIES"))
    if name == "PaddleClas":
        error = error_of_import(tmp_path / "x/train_list.txt", capsys, flag, "SPECIES")
        assert error.endswith(f"train_list.txt is a list without names of columns; remove {flag}\n")
    assert sources.read(tmp_path / "x")[2] == LAYOUTS[name][2]  # obey the message
    if name == "Roboflow" and flag == "--image-column":
        assert sources.read(tmp_path / "x", options=Options(image_column="filename"))[2] == NAMES


def test_column_of_a_table_next_to_an_official_split(tmp_path):
    pets(tmp_path)
    lines = (f"images/{NAMES[k]}_{split[0]}{i},{k // 2}\n" for k, split, i in ITEMS)
    put(tmp_path / "species.csv", "image,SPECIES\n" + "".join(lines))
    images = sources.read(tmp_path, options=Options(label_column="SPECIES"))[1]["train"]
    assert {each.label for each in images} == {0, 1}


def test_columns_of_a_folder_are_chosen_by_flags(tmp_path):
    flat(tmp_path, splits=("train",))
    lines = rows(lambda file, k, _: f"{file},{k + 1},{NAMES[k]},{'valid' if k % 2 else 'train'}", ("train",))
    put(tmp_path / "data.csv", f"photo,number,kind,fold\n{lines}")
    put(tmp_path / "other.csv", "photo,x\n")
    problem = "data.csv: a table of images, whose column of labels is not recognized; run"
    with pytest.raises(
        UsageError, match=f"^{tmp_path}: it contains {problem} .* set to one of these: number, kind, fold$"
    ):
        sources.read(tmp_path)
    columns = Options(image_column="photo", label_column="kind")
    for options in (columns, Options(image_column="photo", label_column="kind", split_column="fold")):
        with pytest.raises(UsageError, match="has 2 classes with validation images, but without training images"):
            sources.read(tmp_path, options=options)
    # A column whose values are not names of splits is not one, unless the flag names it.
    put(tmp_path / "data.csv", f"photo,number,kind,fold\n{lines.replace('valid', '1').replace('train', '2')}")
    with pytest.raises(UsageError, match="line 2: '.' in column fold is not a split; write train, val or test"):
        sources.read(tmp_path, options=Options(image_column="photo", label_column="kind", split_column="fold"))
    _, splits, classes = sources.read(tmp_path, options=columns)
    assert classes == NAMES
    assert colors_match(image for images in splits.values() for image in images)


@pytest.mark.parametrize(
    ("header", "row", "options", "names"),
    [
        # The first row of this table looks like that of a table with a column per class.
        ("image,tall,red,group", lambda file, k: f"{file},0,0,{k // 2}", Options(label_column="group"), None),
        # The name of a column of labels
        ("target,breed", lambda file, k: f"{file},{NAMES[k]}", Options(image_column="target"), NAMES),
        ("id,Label,label", lambda file, k: f"{file},x{k},{NAMES[k]}", Options(label_column="label"), NAMES),
        # Labels that are names of splits
        (
            "id,label",
            lambda file, k: f"{file},{('dev', 'eval', 'test', 'train')[k]}",
            Options(),
            ["dev", "eval", "test", "train"],
        ),
    ],
)
def test_columns_that_look_like_others(tmp_path, header, row, options, names):
    flat(tmp_path, splits=("train",))
    put(tmp_path / "data.csv", f"{header}\n" + rows(lambda file, k, _: row(file, k), ("train",)))
    _, splits, classes = sources.read(tmp_path, options=options)
    assert {split: len(images) for split, images in splits.items()} == TRAIN
    assert classes == names
    divisor = 2 if "tall" in header else 1
    assert all(color_of(read_image(image)[0]) // divisor == image.label for image in splits["train"])


def test_absolute_path_of_an_existing_image_causes_no_warning(tmp_path, capsys):
    flat(tmp_path, splits=("train",))
    lines = rows(lambda file, k, _: f"{tmp_path}/images/{file}.jpg,{NAMES[k]}", ("train",))
    put(tmp_path / "data.csv", f"path,label\n{lines}")
    assert all(map(colors_match, sources.read(tmp_path)[1].values()))
    assert "is not on this computer" not in capsys.readouterr().err


def test_columns_are_recognized_by_paths_from_the_folder_of_the_table(tmp_path):
    flat(tmp_path, splits=("train",))
    lines = rows(lambda file, k, _: f"{NAMES[k]},../images/{file}.jpg", ("train",))
    put(tmp_path / "labels/data.csv", f"kinds,photos\n{lines}")
    _, splits, classes = sources.read(tmp_path, "table")
    assert classes == NAMES and all(map(colors_match, splits.values()))


@pytest.mark.parametrize("pattern", ["{}.txt", "meta/{}.txt"])
def test_other_lists_next_to_those_of_splits_are_ignored(tmp_path, pattern):
    lists(pattern=pattern)(tmp_path)
    put(tmp_path / pattern.format("all"), rows(lambda file, k, _: f"jpg/{file}.jpg {(k + int(file[1])) % 4}"))
    if pattern == "{}.txt":
        for split in PARTS:
            (tmp_path / f"{split}.txt").rename(tmp_path / f"{split.title()}.txt")
    _, splits, _ = sources.read(tmp_path)
    assert {split: len(images) for split, images in splits.items()} == BOTH
    assert all(map(colors_match, splits.values()))


def test_rows_without_image_are_omitted_if_allowed(tmp_path, capsys):
    image_id(tmp_path)
    with open(tmp_path / "train.csv", "a") as f:
        f.write("gone.jpg,1\n")
    with pytest.raises(
        UsageError, match=r"train.csv: line 22: gone.jpg is not in .*; add the images, or use --allow-p"
    ):
        sources.read(tmp_path)
    _, splits, _ = sources.read(tmp_path, options=Options(allow_partial=True))
    assert sum(map(len, splits.values())) == 20
    assert colors_match(image for images in splits.values() for image in images)
    assert "line 22: gone.jpg is not in" in capsys.readouterr().err
    lines = rows(lambda name, k, _: f"{name}.jpg,{NAMES[k]}", ("train",))
    put(tmp_path / "train.csv", f"photo,label\ngone.jpg,cock\n{lines}")
    assert not sniffer.look(tmp_path)  # --image-column is enough to choose the table
    _, splits, _ = sources.read(tmp_path, options=Options(image_column="photo", allow_partial=True))
    assert colors_match(splits["train"])
    lists(",")(tmp_path / "list")
    (tmp_path / "list/jpg/t0b.jpg").unlink()  # the image of the first line
    _, splits, _ = sources.read(tmp_path / "list", options=Options(allow_partial=True))
    assert {split: len(images) for split, images in splits.items()} == BOTH | {"train": 19}
    put(tmp_path / "train.csv", "image_id,label\ngone.jpg,1\n")
    with pytest.raises(UsageError, match="none of the images is in .*; use the folder that contains the images"):
        sources.read(tmp_path / "train.csv", options=Options(allow_partial=True))


def test_test_split_is_left_out_if_there_are_validation_images(tmp_path, capsys):
    lists()(tmp_path)
    put(tmp_path / "test_list.txt", "jpg/x.jpg 0\n")
    put(tmp_path / "jpg/x.jpg", image(0, 7))
    _, splits, _ = sources.read(tmp_path)
    assert {split: len(images) for split, images in splits.items()} == BOTH
    assert ": 1 test image left out" in capsys.readouterr().out


def test_delimiter_of_lists_is_chosen_by_flag(tmp_path, capsys):
    lists("|")(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys, "--as", "table")
    assert "train_list.txt: line 1 is not an image and a label" in error and "choose --delimiter\n" in error
    _, splits, _ = sources.read(tmp_path / "x", "table", Options(delimiter="|"))  # obey the message
    assert all(map(colors_match, splits.values()))


def test_fraction_for_validation_is_rejected_if_there_are_validation_images(tmp_path, capsys):
    lists()(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys, "--val", "0.3")
    assert f"--val 0.3: {tmp_path}/x contains validation images; remove --val\n" in error


@pytest.mark.parametrize("label", ["a/b", "..", ".hidden", "@eaDir", "lost+found", "a\0b"])
def test_class_names_that_cannot_be_folders_are_rejected(tmp_path, capsys, label):
    lists(labels=[label, *NAMES[1:]].__getitem__)(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys, "--to", "folder")
    assert f"the class name {label!a} is not a valid name of a class folder; use --to webdataset\n" in error
    command = ["import", str(tmp_path / "x"), "--output", str(tmp_path / "y"), "--to", "webdataset"]
    assert dataset.main(command) == 0  # obey the message
    assert DataRoot(tmp_path / "y").images(Mode.EVAL)[0].classes == sorted([label, *NAMES[1:]])


def test_undecodable_image_is_reported_with_remedy(tmp_path, capsys):
    LAYOUTS["split column"][0](tmp_path / "source")
    put(tmp_path / "source/images/t0a.jpg", b"no image")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--to", "folder", "--workers", "1"]
    assert dataset.main(command) == 2
    message = capsys.readouterr().err
    assert "1 of 28 images cannot be used: images/t0a.jpg" in message
    assert dataset.main([*command, "--unchecked"]) == 0
    verify = shlex.split(re.search("or add --unchecked, run `.*dataset (verify .*) bad.txt` and train", message)[1])
    assert dataset.main([*verify, str(tmp_path / "bad.txt")]) == 1
    assert (tmp_path / "bad.txt").read_text() == "train/ray/t0a.jpg\n".replace("ray", NAMES[1])


def table(text, name="train.csv"):
    def build(root):
        flat(root, splits=("train",))
        put(root / name, text)

    return build


def extended(build, name, text):
    def extend(root):
        build(root)
        put(root / name, (root / name).read_text() + text)

    return extend


def all_of(*builds):
    return lambda root: [build(root) for build in builds]


TWO = "id,label\nt0a,0\n"
BAD = {
    "missing file": (extended(image_id, "train.csv", "x.jpg,0\ny.jpg,1\n"), "line 22: x.jpg is not in "),
    "duplicated id": (extended(image_id, "train.csv", "t0a.jpg,1\n"), "line 22: t0a.jpg is also in "),
    "duplicated id with same label": (extended(kaggle, "train.csv", "t0c,0\n"), "line 22: t0c is also in "),
    "label out of range": (
        extended(lists(names=("labels.txt", LABELED)), "train_list.txt", "jpg/v0a.jpg 7\n"),
        "line 21",
    ),
    "label too large": (
        table("id,label\nt0a,0\nt0b,99\n"),
        "line 3: has label 99, but the data set has only 2 images; number",
    ),
    "negative label": (table("id,label\nt0a,0\nt0b,-1\n"), "line 3: label -1 is not a class"),
    "fraction": (table("id,label\nt0a,0.0\nt0b,0.5\n"), "line 3: label 0.5 is not a class"),
    "empty label": (table("id,label\nt0a,0\nt0b,\n"), "line 3: has no label"),
    "several labels": (table('id,label\nt0a,0\nt0b,"1 2"\n'), "line 3: has several labels (1 2)"),
    "NaN": (table("id,label\nt0a,0\nt0b,NaN\n"), "line 3: has no label; write the label"),
    "null in JSON": (
        table('{"file_name": "t0a", "label": 0}\n{"file_name": "t0b", "label": null}\n', "metadata.jsonl"),
        "line 2: has no label; write the label",
    ),
    "several labels as text": (
        table("id,label\nt0a,a\nt0b,b\nt0c,a|b\n"),
        "line 4: has several labels (a|b); an import has one label per image, so keep one, or train with --multi-label",
    ),
    "several labels with semicolons": (table("id,label\nt0a,a\nt0b,b\nt0c,a;b\n"), "line 4: has several labels (a;b)"),
    "object as label": (table('id,label\nt0a,"{""x"": 1}"\nt0b,b\n'), 'line 2: has several labels ({"x": 1})'),
    "list of labels": (table("id,label\nt0a,\"['a', 'b']\"\nt0b,b\n"), "line 2: has several labels (['a', 'b'])"),
    "same image at the end of two paths": (
        table("path,label\n/a/t0a.jpg,a\n/b/t0a.jpg,b\n"),
        "line 3: /b/t0a.jpg is also in ",
    ),
    "absolute path with ..": (table("path,label\n/a/../t0a.jpg,a\nC:\\t0b.jpg,b\n"), "line 2: /a/../t0a.jpg is not in"),
    "damaged UTF-16": (table("id,label\nt0a,a\n".encode("utf-16")[:-1]), "is not UTF-8; convert the file to UTF-8"),
    "list of MXNet with several labels": (
        table("0\t1\t2\timages/t0a.jpg\n", "train.lst"),
        "line 1 has several labels; write one label per image",
    ),
    "two label columns": (
        table("id,label,breed\nt0a,0,a\n"),
        "the columns label, breed are all candidates for --label-column; set it",
    ),
    "no label column": (
        table("file_name,a,b\nt0a.jpg,0,1\n", "metadata.csv"),
        "no column is recognized for --label-column; set it to one of file_name, a, b",
    ),
    "short row": (table("id,label\nt0a,0\nt0b\n"), "line 3 has 1 column instead of 2"),
    "not UTF-8": (table(b"id,label\nt0a,caf\xe9\n"), "line 2 is not UTF-8"),
    "damaged JSON": (table('{"file_name": "t0a.jpg", "label": 1}\n{"file\n', "metadata.jsonl"), "line 2 is not JSON"),
    "JSON list": (
        table('{"file_name": "t0a.jpg", "label": 1}\n[1]\n', "metadata.jsonl"),
        "line 2 is not a JSON object",
    ),
    "two files of names": (
        all_of(image_id, *(table(json.dumps(dict(enumerate([name, *NAMES[1:]]))), f"{name}.json") for name in "ab")),
        "a.json and b.json contain different class names; keep one of them",
    ),
    "surrogate": (
        table(
            '{"file_name": "t0a.jpg", "label": "x"}\n{"file_name": "t0b.jpg", "label": "\\ud800"}\n', "metadata.jsonl"
        ),
        "the class name '\\ud800' is not valid Unicode; correct it",
    ),
    "unknown flag": (
        table("id,label,is_valid\nt0a,0,True\nt0b,1,False\nt0c,1,x\n"),
        "line 4: 'x' in column is_valid is not a split; write 0, 1, true or false",
    ),
    "unknown split": (table("id,label,split\nt0a,0,train\nt0b,1,later\n"), "line 3: 'later' in column split is not"),
    "two tables": (all_of(image_id, table(TWO, "labels.csv")), "contains several tables (labels.csv, train.csv)"),
    "ambiguous image": (
        all_of(table(TWO), lambda root: flat(root, "more", ("train",))),
        "line 2: t0a matches images/t0a.jpg and",
    ),
    "outside": (table("id,label\n../x.jpg,0\n"), "line 2: ../x.jpg is not in"),
    "not image": (
        all_of(table("path,label\nnote.txt,0\n"), lambda root: put(root / "note.txt", "x")),
        "is not an image with",
    ),
    "one class": (table("id,label\nt0a,0\nt0b,0\n"), "all training images belong to one class"),
    "class only in validation": (table("id,label,split\nt0a,a,train\nt0b,b,train\nt0c,c,val\n"), "(c); add training"),
    "names twice": (
        all_of(lists(), lambda root: put(root / "labels.txt", "a\nb\na\nc\n")),
        "labels.txt: contains a 2 times",
    ),
    "names from 0, labels from 1": (
        lists(labels=lambda k: k + 1, names=("labels.txt", LABELED)),
        "has label 4, but ",
    ),
    "names from 1, labels from 0": (
        lists(names=("labels.txt", "".join(f"{k + 1} {name}\n" for k, name in enumerate(NAMES)))),
        "labels.txt contains the names of labels 1 to 4; number the classes from 1",
    ),
    "name not in file": (
        all_of(lists(labels=NAMES.__getitem__), lambda root: put(root / "labels.txt", "a\nb\n")),
        "is not in",
    ),
    "Roboflow with two labels": (
        extended(roboflow, "train/_classes.csv", "x.jpg,1,1,0,0\n"),
        "line 22 does not contain",
    ),
    "list of paths with an image outside folders": (
        table("images/t0a.jpg\nt0b.jpg\n", "train_list.txt"),
        "line 1 is not an image and a label but `images/t0a.jpg`; correct it",
    ),
    "list without label": (extended(lists(), "train_list.txt", "jpg/x.jpg\n"), "line 21 is not an image and a label"),
    "CUB without label": (
        extended(cub, "images.txt", "99 x.jpg\n"),
        "image_class_labels.txt: has no line for image 99",
    ),
    "CUB twice": (extended(cub, "images.txt", "1 x.jpg\n"), "images.txt: line 29 repeats an id"),
    "Pets": (
        extended(pets, "annotations/test.txt", "cat_1 1 1 1\n"),
        "test.txt: line 9: class 1 has the names cock and cat; download it again",
    ),
    "only validation": (table("id,label,split\nt0a,a,val\n"), "contains no training images"),
    "empty": (table("id,label\n"), "contains no rows with images"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--as", "table"]
    assert dataset.main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("label", "remedy"),
    [(2, "remove one of the lines\n"), (1, "remove one of the lines, or, if images have several classes, train with")],
)
def test_remedy_for_repeated_images_depends_on_their_labels(tmp_path, capsys, label, remedy):
    extended(image_id, "train.csv", f"t0b.jpg,{label}\n")(tmp_path / "x")
    assert f"line 22: t0b.jpg is also in {tmp_path}/x/train.csv: line 2; {remedy}" in error_of_import(
        tmp_path / "x/train.csv", capsys
    )


@pytest.mark.parametrize(
    ("column", "values"), [("test", "01"), ("split", "12"), ("domain", ["eval", "eval"]), ("is_valid", "yn")]
)
def test_columns_that_do_not_contain_splits(tmp_path, column, values):
    flat(tmp_path, splits=("train",))
    lines = rows(lambda name, k, _: f"{name},{k},{values[k % 2]}", ("train",))
    put(tmp_path / "data.csv", f"id,label,{column}\n{lines}")
    _, splits, _ = sources.read(tmp_path)
    assert {split: len(images) for split, images in splits.items()} == TRAIN
    assert all(map(colors_match, splits.values()))


@pytest.mark.parametrize(("column", "is_test"), [("is_test", True), ("is_valid", False)])
def test_images_with_a_flag_belong_to_its_split(tmp_path, capsys, column, is_test):
    flat(tmp_path)
    put(tmp_path / "data.csv", f"id,label,{column}\n" + rows(lambda name, k, s: f"{name},{k},{int(s == 'val')}"))
    assert {split: len(images) for split, images in sources.read(tmp_path)[1].items()} == BOTH
    assert ("8 test images used as validation images" in capsys.readouterr().out) == is_test


def test_list_of_partitions_does_not_replace_other_splits(tmp_path):
    split_column(tmp_path)
    put(tmp_path / "list_eval_partition.txt", "x.jpg 0\n")
    assert {split: len(images) for split, images in sources.read(tmp_path)[1].items()} == BOTH


@pytest.mark.parametrize("name", ["LABELS.CSV", "Train.Json"])
def test_upper_case_in_the_ending_of_a_table(tmp_path, capsys, name):
    flat(tmp_path, splits=("train",))
    labels = {f"{stem(*item)}.jpg": NAMES[item[0]] for item in ITEMS if item[1] == "train"}
    text = "id,label\n" + "".join(f"{file},{label}\n" for file, label in labels.items())
    put(tmp_path / name, text if name.endswith("CSV") else json.dumps(labels))
    assert dataset.main(["import", str(tmp_path / name), "--list"]) == 0
    assert f"{tmp_path / name}: imported as table\n" in capsys.readouterr().out
    _, splits, classes = sources.read(tmp_path / name)
    assert classes == NAMES
    assert all(map(colors_match, splits.values()))


def test_folder_without_data_is_not_recognized(tmp_path, capsys):
    put(tmp_path / "x/README.md", "x")
    assert "x: not recognized as a data set; choose the kind with --as" in error_of_import(tmp_path / "x", capsys)


def test_table_of_the_other_split_has_a_name_in_camel_case(tmp_path):
    tsv(tmp_path)
    for split in PARTS:
        (tmp_path / f"{split}.tsv").rename(tmp_path / f"{split}Labels.tsv")
    _, splits, _ = sources.read(tmp_path / "trainLabels.tsv")
    assert {split: len(images) for split, images in splits.items()} == BOTH


def test_data_set_without_a_class_of_two_images_cannot_be_split():
    images = [ListedImage(f"{label}.jpg", f"{label}.jpg", label) for label in range(3)]
    with pytest.raises(UsageError, match="--val 0.2: no class has two images.*; add images"):
        sources._divided(images, None, 0.2)
