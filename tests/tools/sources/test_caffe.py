"""LMDBs of Caffe with image files or with pixels."""

import io
import pickle

import lmdb
import numpy as np
import pytest
from PIL import Image

from layouts import colors_match, error_of_import, error_of_training, image, obey, obeyed_remedy, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.formats.lmdb import datum_class
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def pixels(k, i):
    with Image.open(io.BytesIO(image(k, i))) as picture:
        return np.asarray(picture)


def raw(k, i):
    array = pixels(k, i)[..., ::-1].transpose(2, 0, 1)  # blue, green, red
    channels, height, width = array.shape
    return {"channels": channels, "height": height, "width": width, "data": array.tobytes(), "label": k}


def encoded(k, i):
    return {"data": image(k, i), "encoded": True, "label": k}


def write(root, fields, train="ilsvrc12_train_lmdb", val="ilsvrc12_val_lmdb"):
    for name, count, first in ((train, 5, 0), (val, 2, 100)):
        put(root / name / "x", b"")
        (root / name / "x").unlink()
        with lmdb.open(str(root / name)) as environment, environment.begin(write=True) as transaction:
            for number, (k, i) in enumerate((k, i) for i in range(first, first + count) for k in (2, 0, 3, 1)):
                datum = datum_class()(**fields(k, i))
                transaction.put(f"{number:08d}_{k}.jpg".encode(), datum.SerializeToString())


@pytest.mark.parametrize("fields", [raw, encoded])
def test_error_of_training_contains_remedy(tmp_path, capsys, fields):
    write(tmp_path / "x", fields, "my_train", "my_test")
    obeyed_remedy(tmp_path / "x", "LMDBs of Caffe", {"train": 20, "val": 8}, capsys)


def test_pixels_under_the_usual_names_are_reported_with_remedy(tmp_path):
    write(tmp_path / "x", raw, "train_lmdb", "val_lmdb")
    message = error_of_training(tmp_path / "x")
    assert "train_lmdb: record 00000000_2.jpg is not an encoded image, but an array of pixels; run `" in message
    imported = obey(message)
    assert all(colors_match(DataRoot(imported).images(mode)[1]) for mode in Mode)


def test_pixels_are_stored_without_loss(tmp_path):
    write(tmp_path, raw)
    data, label = read_image(sources.read(tmp_path, "lmdb")[1]["train"][0])
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, label) == ("PNG", 2)
        np.testing.assert_array_equal(np.asarray(picture), pixels(2, 0))


@pytest.mark.parametrize("mode, height, width", [("L", 6, 5), ("L", 6, 1), ("L", 1, 5), ("RGB", 1, 5), ("RGB", 6, 1)])
def test_images_may_be_gray_or_one_pixel_wide_or_high(tmp_path, mode, height, width):
    channels = len(mode)

    def plain(k, i):
        array = np.full((channels, height, width), 40 * k + i, np.uint8)
        return {"channels": channels, "height": height, "width": width, "data": array.tobytes(), "label": k}

    write(tmp_path, plain)
    data, _ = read_image(sources.read(tmp_path, "lmdb")[1]["train"][0])
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.mode, picture.size, np.unique(picture).tolist()) == (mode, (width, height), [80])


BAD = {
    "wrong shape": (
        lambda k, i: {**raw(k, i), "height": 5},
        " bytes of pixels of shape 3 x 5 x 28, which is not a gray",
    ),
    "two channels": (
        lambda k, i: {**raw(k, i), "channels": 2},
        "2016 bytes of pixels of shape 2 x 24 x 28, which is not",
    ),
    "no pixels": (lambda k, i: {"label": k, "channels": 3}, "0 bytes of pixels of shape 3 x 0 x 0, which is not"),
    "no label": (
        lambda k, i: {"data": image(k, i), "encoded": True},
        "ilsvrc12_train_lmdb: record 00000000_2.jpg is not an encoded image with a label; write it again",
    ),
    "negative label": (
        lambda k, i: {**raw(k, i), "label": -k},
        "ilsvrc12_train_lmdb: record 00000000_2.jpg: label -2 is not a class; correct it",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    fields, message = BAD[name]
    write(tmp_path / "x", fields)
    assert message in error_of_import(tmp_path / "x", capsys, "--as", "lmdb")


def test_damaged_record_after_others_is_named(tmp_path, capsys):
    write(tmp_path / "x", lambda k, i: {name: v for name, v in encoded(k, i).items() if name != "label" or i != 1})
    error = error_of_import(tmp_path / "x", capsys, "--as", "lmdb")
    assert f"error: {tmp_path}/x/ilsvrc12_train_lmdb: record 00000004_2.jpg " in error


def test_remedy_for_pixels_of_other_types(tmp_path, capsys):
    write(tmp_path / "x", lambda k, i: {**raw(k, i), "channels": 2})
    assert "; write encoded images, as `convert_imageset -encoded` does" in error_of_import(tmp_path / "x", capsys)
    write(tmp_path / "y", encoded)  # obey the message
    assert colors_match(sources.read(tmp_path / "y", "lmdb")[1]["train"])


def test_labels_that_are_not_classes_are_reported_without_a_flag(tmp_path, capsys):
    write(tmp_path / "x", lambda k, i: {**encoded(k, i), "label": 100 * k})
    error = error_of_import(tmp_path / "x", capsys, "--as", "lmdb")
    assert error.endswith("has label 200, but the data set has only 28 images; number the classes from 0\n")
    write(tmp_path / "y", encoded)  # obey the message
    assert colors_match(sources.read(tmp_path / "y", "lmdb")[1]["train"])


def write_records(root, records):
    for split, first in (("train", 0), ("val", 100)):
        (root / split).mkdir(parents=True)
        with lmdb.open(str(root / split)) as environment, environment.begin(write=True) as transaction:
            for number, k in enumerate((2, 0, 3, 1) * 3):
                for key, value in records(number, k, image(k, first + number)):
                    transaction.put(key.encode(), value)


@pytest.mark.parametrize(
    ("word", "label", "names"),
    [
        ("image", str, None),
        ("image", "abcd".__getitem__, ["a", "b", "c", "d"]),
        ("img", lambda k: f"{'abcd'[k]}\n", ["a", "b", "c", "d"]),
    ],
)
def test_pairs_of_image_and_label(tmp_path, word, label, names):
    write_records(
        tmp_path / "x",
        lambda number, k, data: [(f"{word}-{number:09d}", data), (f"label-{number:09d}", label(k).encode())],
    )
    imported = obey(error_of_training(tmp_path / "x"))
    for mode in Mode:
        numbers, images = DataRoot(imported).images(mode)
        assert (numbers.classes, len(images)) == (names, 12)
        assert colors_match(images)


def pairs(number, k, data):
    return [(f"image-{number:09d}", data), (f"label-{number:09d}", str(k).encode())]


def test_image_without_label_is_named(tmp_path, capsys):
    write_records(tmp_path / "x", lambda number, k, data: pairs(number, k, data)[: 1 if number == 5 else 2])
    error = error_of_import(tmp_path / "x", capsys)
    assert "train: record image-000000005 has no label; add its label, or delete the record" in error
    write_records(tmp_path / "y", lambda number, k, data: pairs(number, k, data) if number != 5 else [])  # obey it
    assert len(sources.read(tmp_path / "y", "lmdb")[1]["train"]) == 11


@pytest.mark.parametrize(
    ("stated", "problem"), [(b"11", None), (b"12", None), (b"13", "contains 12 images, but num-samples is 13")]
)
def test_number_of_samples(tmp_path, capsys, stated, problem):
    about = [("num-samples", stated), ("image-mean", b"x")]
    write_records(tmp_path / "x", lambda number, k, data: [*pairs(number, k, data), *about])
    if problem:
        assert f"{problem}; write the LMDB again, or" in error_of_import(tmp_path / "x", capsys)
    else:
        assert len(sources.read(tmp_path / "x", "lmdb")[1]["train"]) == 12


@pytest.mark.parametrize("val", ["my_val", "my_test"])
def test_class_without_training_images(tmp_path, capsys, val):
    write(tmp_path / "x", lambda k, i: {**encoded(k, i), "label": k + (k == 3 and i >= 100)}, "my_train", val)
    assert "has 1 class with validation images, but without training images (4); add" in error_of_import(
        tmp_path / "x", capsys
    )


@pytest.mark.parametrize(("label", "names"), [(int, None), ("abcd".__getitem__, ["a", "b", "c", "d"])])
def test_pickled_tuples(tmp_path, label, names):
    def records(number, k, data):
        about = {"__keys__": [f"x{i:08d}".encode() for i in range(12)], "__len__": 12}
        return [
            (f"x{number:08d}", pickle.dumps((data, label(k)))),
            *((key, pickle.dumps(value)) for key, value in about.items()),
        ]

    write_records(tmp_path / "x", records)
    imported = obey(error_of_training(tmp_path / "x"))
    for mode in Mode:
        numbers, images = DataRoot(imported).images(mode)
        assert (numbers.classes, len(images)) == (names, 12)
        assert colors_match(images)


class Reference:
    """Is pickled as a reference to a harmless function, which the reader must not call."""

    called = False

    def __reduce__(self):
        return (_call, ())


def _call():
    Reference.called = True
    return b"", 0


@pytest.mark.parametrize("value", [Reference(), (b"x", 1.5), (b"x", 1, 2), {"image": b"x"}, ("x", 1)])
def test_other_pickles_are_named_and_run_no_code(tmp_path, capsys, value):
    write_records(tmp_path / "x", lambda number, k, data: [(f"{number:08d}", pickle.dumps(value))])
    assert "train: has the keys 00000000, 00000001, 00000002, whose records are" in error_of_import(
        tmp_path / "x", capsys
    )
    write_records(
        tmp_path / "y", lambda number, k, data: [(f"{number:08d}", pickle.dumps((data, k) if number < 5 else value))]
    )
    error = error_of_import(tmp_path / "y", capsys)
    assert "train: record 00000005 is not a pickled image file with a label; write it again" in error
    assert not Reference.called


def test_records_of_other_programs_are_named(tmp_path, capsys):
    write_records(tmp_path / "x", lambda number, k, data: [(f"{number:08d}", b"\x80\x04" + data)])
    error = error_of_import(tmp_path / "x", capsys)
    problem = (
        "train: has the keys 00000000, 00000001, 00000002, whose records are neither those of Caffe nor pairs such as"
    )
    assert problem in error
