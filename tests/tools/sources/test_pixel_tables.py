"""Tables of pixels: FER2013, and data sets like MNIST. Each remedy is obeyed; labels and pixels are compared."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from layouts import error_of_import, error_of_training, obey, put
from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
ORDER = (2, 0, 3, 1)
FIRST = {"train": (0, 5), "val": (50, 2), "test": (90, 1)}  # {split: (seed of the first images, images per class)}


def pictures(split, side=8):
    """Return [(label, pixels [side, side])] of a split. The brightness of the images is 60 * label + noise."""
    first, count = FIRST[split]
    noise = np.random.RandomState
    return [
        (k, 60 * k + noise(10 * i + k).randint(0, 60, (side, side))) for i in range(first, first + count) for k in ORDER
    ]


def write(path, header, rows):
    put(path, "".join(f"{line}\n" for line in (*header, *rows)))


def columns(pixels):
    return ",".join(map(str, pixels.ravel()))


def fer2013(root, pixels=" pixels", file="fer2013.csv"):
    """Spaces around the names of columns and splits are ignored."""
    usage = {"train": "Training", "val": "PublicTest", "test": "PrivateTest"}
    rows = [
        f"{k},{' '.join(map(str, image.ravel()))},{usage[split]} "
        for split in usage
        for k, image in pictures(split, 48)
    ]
    write(root / file, [f"emotion,{pixels},Usage"], rows)


def digits(root):
    header = "label," + ",".join(f"pixel{i}" for i in range(64))
    write(root / "train.csv", [header], (f"{k},{columns(image)}" for k, image in pictures("train")))
    write(root / "test.csv", [header[6:]], (columns(image) for _, image in pictures("val")))
    put(root / "sample_submission.csv", "ImageId,Label\n1,0\n")


def signs(root, folder=""):
    """Kaggle's download contains each table twice."""
    for copy in ("", *(("sign_mnist_{}/",) if folder else ())):
        for split, name in (("train", "train"), ("val", "test")):
            header = "label," + ",".join(f"pixel{i}" for i in range(1, 65))
            path = root / f"{copy.format(name)}sign_mnist_{name}.csv"
            write(path, [header], (f"{k},{columns(image)}" for k, image in pictures(split)))


def no_header(name="mnist", transpose=False):
    def build(root):
        for split, end in (("train", "train"), ("val", "test")):
            rows = (f"{k},{columns(image.T if transpose else image)}" for k, image in pictures(split))
            write(root / f"{name}_{end}.csv", [], rows)

    return build


def label_at_the_end(root):
    header = "source," + ",".join(f"{i}x{j}" for i in range(8) for j in range(8)) + ",label"
    write(root / "hmnist_8_8_L.csv", [header], (f"x,{columns(image)},{k}" for k, image in pictures("train")))


def texts(root):
    """Empty lines and spaces around labels are ignored."""
    header = "class," + ",".join(map(str, range(64)))
    write(root / "a/letters.csv", [header, ""], (f"{'abcd'[k]} ,{columns(image)}\n" for k, image in pictures("train")))


# {name: (function that writes the tables, side of the images, splits in the order of Mode or None for a random split,
# class names)}
LAYOUTS = {
    "FER2013": (fer2013, 48, ("train", "val"), None),
    "digit-recognizer": (digits, 8, None, None),
    "sign-language-MNIST": (lambda root: signs(root, "x"), 8, ("train", "val"), None),
    "no names of columns": (no_header(), 8, ("train", "val"), None),
    "EMNIST": (no_header("Emnist-letters", True), 8, ("train", "val"), None),
    "label at the end, and another column": (label_at_the_end, 8, None, None),
    "labels as text": (texts, 8, None, ["a", "b", "c", "d"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    build, side, given, names = LAYOUTS[name]
    build(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert ": tables of pixels; run `" in message
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert ": tables of pixels; run `" in capsys.readouterr().out
    imported = obey(message)
    log = capsys.readouterr()
    if name == "FER2013":
        assert "fer2013.csv: PublicTest is the validation split, PrivateTest the test split" in log.out + log.err
        assert "4 test images left out, because there are validation images" in log.out + log.err
    if name == "digit-recognizer":
        assert "test.csv left out, because there are no labels" in log.out + log.err
    found = []
    for mode in Mode:
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        found.append(set())
        for each in images:
            data, label = read_image(each)
            with Image.open(io.BytesIO(data)) as picture:
                assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (side, side))
                found[-1].add((label, np.asarray(picture).tobytes()))
    expected = [
        {(k, image.astype(np.uint8).tobytes()) for k, image in pictures(split, side)} for split in given or ["train"]
    ]
    assert (found if given else [found[0] | found[1]]) == expected
    assert [*map(len, found)] == ([20, 8] if given else [16, 4])


def test_single_table_and_table_of_the_other_split(tmp_path, capsys):
    signs(tmp_path)
    assert dataset.main(["import", str(tmp_path / "sign_mnist_train.csv"), "--output", str(tmp_path / "x")]) == 0
    assert f"{tmp_path}/x: 20 train and 8 val images" in capsys.readouterr().out


def test_several_tables_of_a_split(tmp_path, capsys):
    no_header("emnist-letters", True)(tmp_path / "x")
    no_header("emnist-digits", True)(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys)
    assert "contains several tables (" in error and "import one of them, such as `" in error
    obey(error)
    assert len(DataRoot(tmp_path / "x/emnist-digits_train_imported").images(Mode.TRAIN)[1]) == 20


def test_columns_are_chosen_by_flags(tmp_path, capsys):
    fer2013(tmp_path / "x", file="age_gender.csv")
    path = tmp_path / "x/age_gender.csv"
    put(path, path.read_text().replace("emotion", "age").replace("Usage", "gender"))
    error = error_of_import(tmp_path / "x", capsys)
    assert "age_gender.csv: the columns age, gender are all candidates for --label-column; set one of them" in error
    assert set(sources.read(path, options=Options(label_column="gender"))[2]) == {
        "PrivateTest",
        "PublicTest",
        "Training",
    }
    with pytest.raises(UsageError, match="--label-column x: .* has the columns age, gender; choose one of them"):
        sources.read(path, options=Options(label_column="x"))
    for label_column in ("age", None):  # the only other column
        splits = sources.read(path, options=Options(label_column=label_column, split_column="gender"))[1]
        assert {split: len(images) for split, images in splits.items()} == {"train": 20, "val": 8}


@pytest.mark.parametrize("is_last", [False, True])
def test_text_labels_without_names_of_columns(tmp_path, is_last):
    cells = [["abcd"[k], columns(image)] for k, image in pictures("train")]
    write(tmp_path / "x/train.csv", [], (",".join(row[::-1] if is_last else row) for row in cells))
    _, splits, names = sources.read(tmp_path / "x")
    assert len(splits["train"]) + len(splits["val"]) == 20
    assert names == ["a", "b", "c", "d"]


@pytest.mark.parametrize("names", [range(65), range(1, 66), ("label", *range(64))])
def test_names_of_columns_that_are_numbers(tmp_path, names):
    header = ",".join(map(str, names))
    write(tmp_path / "x/train.csv", [header], (f"{k},{columns(image)}" for k, image in pictures("train")))
    splits = sources.read(tmp_path / "x")[1]
    assert len(splits["train"]) + len(splits["val"]) == 20


def test_first_line_that_may_be_a_row(tmp_path, capsys):
    rows = [f"{k}," + ",".join(str(16 - i) for i in range(16)) for k in range(4)] * 2
    write(tmp_path / "x/train.csv", [], rows)
    error = error_of_import(tmp_path / "x", capsys)
    assert "train.csv: line 1 contains different numbers, which may be names of columns or pixels; add a first" in error
    write(tmp_path / "x/train.csv", ["label," + ",".join(f"pixel{i}" for i in range(16))], rows)  # obey the message
    splits = sources.read(tmp_path / "x")[1]
    assert len(splits["train"]) + len(splits["val"]) == 8


def test_flags_of_columns_without_names(tmp_path, capsys):
    no_header()(tmp_path / "x")
    for flag in ("--label-column", "--split-column"):
        error = error_of_import(tmp_path / "x", capsys, flag, "64")
        assert f"{flag} 64: {tmp_path}/x/mnist_" in error
        assert ".csv has no names of columns; add a first line with the names of all columns, such as" in error
        assert error.endswith(f"or remove {flag}\n")
    write(tmp_path / "y/train.csv", [], (f"{columns(image)},{'abcd'[k]},x" for k, image in pictures("train")))
    error = error_of_import(tmp_path / "y", capsys)
    assert "train.csv: has 2 columns without pixels, but no names of columns; add a first line" in error


@pytest.mark.parametrize("name", ["id", "", "Unnamed: 0", "index"])
def test_ids_and_indexes_are_not_labels(tmp_path, capsys, name):
    digits(tmp_path / "x")
    header = f"{name}," + ",".join(f"pixel{i}" for i in range(64))
    write(tmp_path / "x/test.csv", [header], (f"{i},{columns(image)}" for i, (_, image) in enumerate(pictures("val"))))
    for source in (tmp_path / "x", tmp_path / "x/train.csv"):
        assert len(sources.read(source)[1]["val"]) == 4  # of the training images
        assert "test.csv left out, because there are no labels" in capsys.readouterr().out
    splits = sources.read(tmp_path / "x/train.csv", options=Options(label_column="label"))[1]
    assert len(splits["train"]) + len(splits["val"]) == 20
    os.rename(tmp_path / "x/test.csv", tmp_path / "x/train.csv")
    error = error_of_training(tmp_path / "x")
    assert "train.csv: tables of pixels without a column of labels; add a column label with the class of" in error
    rows = (f"{i},{k},{columns(image)}" for i, (k, image) in enumerate(pictures("val")))
    write(tmp_path / "x/train.csv", [header.replace(",", ",label,", 1)], rows)  # obey the message
    assert {image.label for image in sources.read(tmp_path / "x")[1]["train"]} == {0, 1, 2, 3}


def test_ids_are_labels_only_by_flag(tmp_path):
    texts(tmp_path)
    path = tmp_path / "a/letters.csv"
    put(path, path.read_text().replace("class,", "name,"))
    for source in (path, path.parent):
        assert sources.read(source, "pixels", Options(label_column="name"))[2] == ["a", "b", "c", "d"]


# {name: (function that changes the text of the table, message)}
BAD = {
    "few values": (lambda text: text.replace(" 7 7 7,", " 7 7,"), "line 3 has 2303 pixels instead of 2304; correct or"),
    "many values": (lambda text: text.replace(" 7 7 7,", " 7 7 7 7,"), "line 3 has 2305 pixels instead of 2304"),
    "too large": (
        lambda text: text.replace(" 7 7 7,", " 7 256 7,"),
        "line 3: '256' is not a whole number from 0 to 255",
    ),
    "negative": (lambda text: text.replace(" 7 7 7,", " 7 -1 7,"), "line 3: '-1' is not a whole number from 0 to 255"),
    "fraction": (
        lambda text: text.replace(" 7 7 7,", " 7 0.5 7,"),
        "line 3: '0.5' is not a whole number from 0 to 255; write all",
    ),
    "exponent": (
        lambda text: text.replace(" 7 7 7,", " 7 7e0 7,"),
        "line 3: '7e0' is not a whole number from 0 to 255; write",
    ),
    "text": (lambda text: text.replace(" 7 7 7,", " 7 x 7,"), "line 3: 'x' is not a whole number from 0 to 255; corr"),
    "columns": (
        lambda text: text.replace(" 7 7 7,", " 7 7 7,,"),
        "line 3 has 4 columns instead of 3; correct or remove",
    ),
    "split": (
        lambda text: text.replace("7 7 7,Training", "7 7 7,Tests"),
        "line 3: 'tests' is not a split; write train",
    ),
    "label": (lambda text: text.replace("\n1,7 7 7", "\n-1,7 7 7"), "line 3: label -1 is not a class; use whole"),
    "no label": (
        lambda text: text.replace("\n1,7 7 7", "\n,7 7 7"),
        "line 3: has no label; write the label, or remove",
    ),
    "nan": (lambda text: text.replace("\n1,7 7 7", "\nnan,7 7 7"), "line 3: has no label; write the label, or remove"),
    "fraction of a label": (
        lambda text: text.replace("\n1,7 7 7", "\n1.5,7 7 7"),
        "line 3: label 1.5 is not a class; use whole numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(tmp_path, capsys, name):
    change, message = BAD[name]
    path = tmp_path / "x/fer2013.csv"
    fer2013(tmp_path / "x")
    header, first, _, *lines = path.read_text().splitlines()
    text = "\n".join((header, first, f"1,{' '.join(['7'] * 2304)},Training", *lines))
    put(path, text)
    assert sources.read(path)[1]["train"]
    put(path, change(text))
    assert f"{path}: {message}" in error_of_import(tmp_path / "x", capsys).replace(f"{path} ", f"{path}: ")


def test_labels_with_a_decimal_point_are_numbers(tmp_path):
    header = "label," + ",".join(f"pixel{i}" for i in range(64))
    texts = ("10.0", "2.", "1.0", "0") * 5
    rows = [f"{label},{columns(image)}" for label, (_, image) in zip(texts, pictures("train"), strict=True)]
    write(tmp_path / "x/train.csv", [header], rows)
    _, splits, names = sources.read(tmp_path / "x")
    assert names is None
    assert {image.label for image in splits["train"]} == {0, 1, 2, 10}


@pytest.mark.slow
def test_long_lines(tmp_path):
    """The first line has more than 64 KiB, or a cell more than 128 KiB."""
    rows = [(f"{k}", np.full(96 * 96, k)) for k in range(4)] * 2
    header = "label," + ",".join(f"pixel{i}" for i in range(96 * 96))
    write(tmp_path / "x/train.csv", [header], (f"{k},{columns(image)}" for k, image in rows))
    row = " ".join(["100"] * 224 * 224)
    write(tmp_path / "y/train.csv", ["label,pixels"], (f"{k},{row}" for k, _ in rows))
    for source, side in ((tmp_path / "x", 96), (tmp_path / "y", 224)):
        images = DataRoot(obey(error_of_training(source))).images(Mode.TRAIN)[1]
        assert len(images) == 4
        with Image.open(io.BytesIO(read_image(next(iter(images)))[0])) as picture:
            assert picture.size == (side, side)


def test_byte_order_mark_semicolons_and_empty_lines(tmp_path):
    digits(tmp_path)
    path = tmp_path / "train.csv"
    text = path.read_text()
    put(path, "\ufeff" + text.replace(",", ";").replace("\n", "\n\n"))
    splits = sources.read(path)[1]
    expected = {(k, pixels.astype(np.uint8).tobytes()) for k, pixels in pictures("train")}
    found = set()
    for each in (image for images in splits.values() for image in images):
        with Image.open(io.BytesIO(read_image(each)[0])) as picture:
            found.add((each.label, np.asarray(picture).tobytes()))
    assert found == expected


def test_class_without_training_images(tmp_path, capsys):
    signs(tmp_path / "x")
    path = tmp_path / "x/sign_mnist_test.csv"
    put(path, path.read_text().replace("\n3,", "\n5,"))
    error = error_of_import(tmp_path / "x", capsys)
    assert "has 1 class with validation images, but without training images (5); add training images" in error


def test_table_without_rows(tmp_path, capsys):
    put(tmp_path / "x/a.csv", "label,pixels\n")
    assert "contains no training images; import the folder that contains them" in error_of_import(
        tmp_path / "x", capsys
    )


def test_images_that_are_not_square_or_gray(tmp_path, capsys):
    put(tmp_path / "x/a.csv", "label,pixels\n" + f"0,{'1 ' * 192}\n" * 3)
    error = error_of_import(tmp_path / "x", capsys)
    assert "a.csv: line 2 has 192 pixels, which are not a gray square image; this format cannot be read: write" in error
    header = "label," + ",".join(f"pixel{i}" for i in range(192))
    put(tmp_path / "y/train.csv", header + "\n" + ",".join("0" * 193) + "\n")
    assert "tables of pixels; this format cannot be read: write each image to the folder of" in error_of_training(
        tmp_path / "y"
    )
