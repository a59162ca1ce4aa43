"""tests/data/formats/test_formats.py tests the order of the images and labels."""

import importlib.util
import json
import os
import struct

import data_files
import numpy as np
import pytest

from conftest import ROOT
from helpers import without_permission
from paddle_resnet import dali, dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="requires pyarrow")
NAME = "{}-00000-of-00001.parquet"


@pytest.fixture
def images(photos):
    """Return [(image file, label)] of the validation images."""
    return [(path.read_bytes(), int(path.parent.name[-1])) for path in sorted((photos / "val").glob("*/*"))]


def write(root, images, names=("class0", "class1", "class2")):
    for mode in Mode:
        data_files.write_parquet(root / NAME.format(mode.value), images, names and list(names))


def values(batches):
    return [np.concatenate([np.array(batch[name]).ravel() for name in ("data", "label")]) for (batch,) in batches]


def take(loader, count):
    found = []
    while len(found) < count:
        try:
            found.append(next(loader))
        except StopIteration:
            loader.reset()
    return values(found)


@pytest.mark.parametrize("done", [0, 2, 5, 7])
def test_loader_resumes_with_next_batch(parse, images, tmp_path, done):
    write(tmp_path, images)
    args = parse("--image-root", tmp_path, "--batch-size", "4", "--color-jitter", "0.4", "--label-offset", "0")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    assert len(loader) == 5
    take(loader, done)
    state = json.loads(json.dumps(loader.state()))
    expected = take(loader, 12)
    for resumed, again in zip(take(dali.build_dataloader(args, Mode.TRAIN, state), 12), expected, strict=True):
        np.testing.assert_array_equal(resumed, again)
    assert not np.array_equal(expected[0], expected[5])


def test_each_validation_image_counts_once_in_many_epochs(parse, images, tmp_path):
    write(tmp_path, images)
    loader = dali.build_dataloader(parse("--image-root", tmp_path), Mode.EVAL)
    for _ in range(12):
        labels = [int(label) for (batch,) in loader for label in np.array(batch["label"]).ravel()]
        assert labels == [label for _, label in images]
        loader.reset()


def test_class_names_come_from_the_metadata(images, tmp_path):
    write(tmp_path, images)
    assert DataRoot(tmp_path).count_classes(Mode.TRAIN) == 3
    assert DataRoot(tmp_path).open(Mode.EVAL, 3, 0).class_names == ["class0", "class1", "class2"]
    write(tmp_path, images, None)
    assert DataRoot(tmp_path).open(Mode.EVAL, 3, 0).class_names == ["0", "1", "2"]


def test_run_trains_and_evaluates(run_train, images, tmp_path):
    write(tmp_path / "data", images)
    code, report = run_train("--epochs", "1", image_root=tmp_path / "data")
    assert code == 0 and report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: [*images[:9], (images[9][0], 3)], r"@9: has label 3, but --num-of-class 3 allows 0 to 2; "),
        (
            lambda images: [*images[:9], (images[9][0], -1)],
            "@9: has label -1, which is not a whole number from 0 to 2147483647; run",
        ),
        (lambda images: [*images[:9], (images[9][0], None)], "@9: has label None, which is not a whole number from"),
        (
            lambda images: [(data, f"c{label}") for data, label in images],
            "@0: has label c0, which is not a whole",
        ),
    ],
    ids=["out of range", "negative", "missing", "text"],
)
def test_bad_label_is_an_error_with_file_and_row(images, tmp_path, change, message):
    write(tmp_path, change(images), None)
    with pytest.raises(UsageError, match=NAME.format("val") + message):
        DataRoot(tmp_path).open(Mode.EVAL, 3, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("verify_here")
def test_row_without_image_stops_the_run_with_file_and_row(parse, images, tmp_path):
    write(tmp_path, [*images[:9], (None, 0), *images[10:]])
    with pytest.raises(UsageError, match=NAME.format("val") + ": row 2 of group 1 contains no image in the column"):
        list(dali.build_dataloader(parse("--image-root", tmp_path), Mode.EVAL))
    assert dataset.main(["verify", str(tmp_path)]) == 1


@pytest.mark.parametrize("data", [b"no image", b"\xff\xd8\xff"])
def test_undecodable_image_is_reported_with_file_and_row(parse, images, tmp_path, data):
    write(tmp_path, [*images[:9], (data, 0), *images[10:]])
    with pytest.raises(DataError, match=NAME.format("val") + "@9: cannot be decoded"):
        list(dali.build_dataloader(parse("--image-root", tmp_path), Mode.EVAL))
    (tmp_path / "bad.txt").write_text(f"{NAME.format('val')}@9\n")
    args = parse("--image-root", tmp_path, "--skip-list", tmp_path / "bad.txt")
    assert sum(len(np.array(batch["label"])) for (batch,) in dali.build_dataloader(args, Mode.EVAL)) == 22


@pytest.mark.parametrize("place", ["23", "x"])
def test_skipped_row_must_exist(images, tmp_path, place):
    write(tmp_path, images)
    with pytest.raises(UsageError, match=f"has no row {place}; remove val-00000-of-00001.parquet@{place} from --skip"):
        DataRoot(tmp_path, skip=frozenset({f"{NAME.format('val')}@{place}"})).open(Mode.EVAL, 3, 0)


def test_unusable_files_are_errors(images, tmp_path):
    write(tmp_path, images)
    path = tmp_path / NAME.format("val")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UsageError, match=f"{path}: damaged \\("):
        DataRoot(tmp_path).open(Mode.EVAL, 3, 0)
    (tmp_path / "val-00000-of-00001-0123456789abcdef.parquet").touch()
    with pytest.raises(UsageError, match="has 2 val files, but 1 according to their names .*; move those of other"):
        DataRoot(tmp_path, "parquet", label_offset=0).listed(Mode.EVAL)
    (tmp_path / "val-00000-of-00001-0123456789abcdef.parquet").unlink()
    path.rename(tmp_path / "val-00000-of-00002.parquet")
    with pytest.raises(UsageError, match="has 1 of 2 val files; add the missing ones"):
        DataRoot(tmp_path, label_offset=0).listed(Mode.EVAL)


def test_unreadable_file_is_not_reported_as_damaged(images, tmp_path):
    write(tmp_path, images)
    path = tmp_path / NAME.format("val")
    message = rf"{path}: cannot be read \(Permission denied\); make it readable"
    with without_permission(path), pytest.raises(UsageError, match=message):
        DataRoot(tmp_path).open(Mode.EVAL, 3, 0)
    data = path.read_bytes()
    footer = 8 + struct.unpack("<I", data[-8:-4])[0]
    path.write_bytes(data[:4] + b"\xff" * (len(data) - 4 - footer) + data[-footer:])
    with pytest.raises(UsageError, match=f"{path}: damaged .+; download it again$"):
        DataRoot(tmp_path).open(Mode.EVAL, 3, 0)


def test_missing_column_is_an_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"label": [0]}), tmp_path / NAME.format("val"))
    with pytest.raises(UsageError, match=NAME.format("val") + ": no column is recognized for --image-column"):
        DataRoot(tmp_path).open(Mode.EVAL, 3, 0)


def test_requirements_file_exists():
    assert "pyarrow" in (ROOT / "requirements-parquet.txt").read_text()
