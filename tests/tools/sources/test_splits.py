import pytest

from layouts import put
from paddle_resnet.tools.sources import Options, splits
from paddle_resnet.utils.errors import UsageError

PATTERN = r".+\.x"


def files(root, names, **options):
    for name in names:
        put(root / name, b"")
    found = splits.files(str(root), PATTERN, Options(**options))
    return {split: [path.removeprefix(f"{root}/") for path in paths] for split, paths in found.items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.x", "b.X"], {"train": ["a.x", "b.X"]}),
        (["train-1.x", "validation-1.x", "x.txt"], {"train": ["train-1.x"], "val": ["validation-1.x"]}),
        (["data/train/0.x", "data/valid/0.x"], {"train": ["data/train/0.x"], "val": ["data/valid/0.x"]}),
        (["train/a_test.x", "train/b.x"], {"train": ["train/b.x"], "test": ["train/a_test.x"]}),
        (["train.x", "val.x", "test.x"], {"train": ["train.x"], "val": ["val.x"]}),
        (["train.x", ".hidden/val.x"], {"train": ["train.x"]}),
        (["1/2/3/train.x", "1/2/3/4/val.x"], {"train": ["1/2/3/train.x"]}),
        (["train/train/0.x", "train/val/0.x"], {"train": ["train/train/0.x"], "val": ["train/val/0.x"]}),
    ],
)
def test_splits_come_from_names_and_folders(tmp_path, names, expected):
    assert files(tmp_path, names) == expected
    path = str(tmp_path / names[-1])
    assert splits.files(path, PATTERN, Options()) == {"train": [path]}  # the name of a single file does not matter


def test_numbers_may_begin_at_one(tmp_path):
    assert len(files(tmp_path, ["train-1-of-2.x", "train-2-of-2.x"])["train"]) == 2


def test_missing_files_are_named(tmp_path, capsys):
    names = [f"train-{i:05d}-of-00012.x" for i in range(1, 6)] + ["val-0-of-1.x"]
    missing = ", ".join(f"train-{i:05d}-of-00012.x" for i in (6, 7, 8, 9, 10))
    with pytest.raises(UsageError, match=f"^{tmp_path}: 7 of 12 files are missing .{missing}.; download them, or use"):
        files(tmp_path, names)
    assert len(files(tmp_path, names, allow_partial=True)["train"]) == 5
    assert "7 of 12 files are missing" in capsys.readouterr().err
    with pytest.raises(UsageError, match="3 of 4 files are missing .train-0-of-4.x, train-1-of-4.x, train-2-of-4.x."):
        files(tmp_path / "last", ["train-3-of-4.x"])
    with pytest.raises(UsageError, match="1 of 2 files are missing .val-1-of-2.x."):
        files(tmp_path / "val", ["train.x", "val-0-of-2.x"])


def test_several_data_sets(tmp_path):
    with pytest.raises(
        UsageError, match=f"folders a, b contain different data sets; import one folder, such as {tmp_path}/x/a$"
    ):
        files(tmp_path / "x", ["a/train.x", "b/train.x"])
    with pytest.raises(
        UsageError, match="folders a, b contain different data sets; move the data sets to separate folders$"
    ):
        files(tmp_path / "y", ["train/a/0.x", "train/b/0.x"])


def test_no_files(tmp_path):
    with pytest.raises(
        UsageError, match=f"^{tmp_path}: contains no files of the kind that --as sets; use the folder that contains"
    ):
        files(tmp_path, ["a.y"])


def place(i):
    return f"row {i}"


@pytest.mark.parametrize(
    ("labels", "names", "from_one", "expected"),
    [
        (["b", "a", "b"], None, False, ([1, 0, 1], ["a", "b"])),
        (["b", "a", "b"], ("b", "a"), False, ([0, 1, 0], ["b", "a"])),
        ([0, 2, 1], None, False, ([0, 2, 1], None)),
        ([1, 2, 1], ("a", "b"), False, ([0, 1, 0], ["a", "b"])),
        ([1, 1, 1], ("a", "b"), False, ([1, 1, 1], ["a", "b"])),
        ([1, 2, 1], None, True, ([0, 1, 0], None)),
        ([1, 2, 1], None, False, ([1, 2, 1], None)),
        ([1, 3, 1, 1], None, True, ([1, 3, 1, 1], None)),
    ],
)
def test_numbers_of_classes(labels, names, from_one, expected):
    assert splits.numbered("x", labels, names, place, from_one) == expected


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (["a", " "], None, "row 1: has no label; write the label"),
        (["a", "c"], ("a", "b"), "row 1: label c is not one of the 2 class names"),
        ([0, -1], None, "row 1: label -1 is not a class"),
        ([0, None], None, "row 1: label None is not a class"),
        (["a", None], None, "row 0: label a is not a class"),
        ([0, 0.5], None, "row 1: label 0.5 is not a class"),
        ([0, True], None, "row 1: label True is not a class"),
        ([0, 2], None, "row 1: has label 2, but the data set has only 2 images; number"),
        ([0, 2], ("a", "b"), "row 1: has label 2, but the data set has only 2 class names; number"),
        ([1, 3], ("a", "b"), "row 1: has label 3, but the data set has only 2 class names; number"),
    ],
)
def test_labels_that_are_not_classes_are_rejected(labels, names, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        splits.numbered("x", labels, names, place)
