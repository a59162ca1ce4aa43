"""WebDataset tar shards whose labels are text, or in JSON. test_downloads.py imports shards with each kind of label."""

import json

import pytest
from test_downloads import NAMES, shards

from layouts import colors_match, error_of_import, image, put, write_tar
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def test_label_column_of_shards(tmp_path):
    shards("json", lambda k: json.dumps({"label": k, "class": NAMES[k]}))(tmp_path)
    with pytest.raises(UsageError, match="the keys label, class are all candidates for --label-column; set it to one"):
        sources.read(tmp_path)
    for column, names in (("label", None), ("class", NAMES)):
        kind, splits, classes = sources.read(tmp_path, options=Options(label_column=column))
        assert (kind, classes) == ("webdataset", names)
        assert all(map(colors_match, splits.values()))
    message = "^--label-column name: .*train-000000.tar: sample .* has the keys label, class; use a key"
    with pytest.raises(UsageError, match=message):
        sources.read(tmp_path, options=Options(label_column="name"))


def test_class_folders_of_labels_with_gaps_are_numbered(tmp_path):
    shards("cls", lambda k: f"{(0, 1, 4, 12)[k]}")(tmp_path / "x")
    sources.import_(tmp_path / "x", tmp_path / "y", "folder", workers=1)
    images = DataRoot(tmp_path / "y").images(Mode.EVAL)[1]
    assert sorted(image.label for image in images) == [0, 0, 1, 1, 4, 4, 12, 12]
    assert sorted(path.name for path in (tmp_path / "y/train").iterdir()) == sorted(map(str, range(13)))


def test_images_of_a_changed_shard_are_written_again(tmp_path, capsys):
    """The size of an image does not show that it has changed."""
    shards("txt", NAMES.__getitem__)(tmp_path / "x")
    for text in (b"JFIF", b"JFXX"):
        path = tmp_path / "x/val-000000.tar"
        put(path, path.read_bytes().replace(b"JFIF", text))
        sources.import_(tmp_path / "x", tmp_path / "y", "folder", workers=1)
        written = [*(tmp_path / "y/val").glob("*/*")]
        assert len(written) == 8 and all(text in file.read_bytes() for file in written)
    assert f"files in {tmp_path}/x have changed since the conversion began" in capsys.readouterr().err


def shard(*files):
    return lambda root: put(root / "train-000000.tar", write_tar(files))


def test_order_of_labels_and_class_names(tmp_path):
    """.cls comes before .json and .txt. Samples of different folders may have the same name. Hidden files are not
    samples."""
    files = []
    for number, k in enumerate((2, 0, 3, 1) * 3):
        labels = {"cls": f"{k}\n", "json": json.dumps({"label": 9}), "txt": "cabd"[k]}
        files += [(f"{number}/0.{kind}", label.encode()) for kind, label in labels.items()]
        files += [(f"{number}/0.JPG", image(k, number)), (f"{number}/._0.JPG", b"x")]
    put(tmp_path / "a/train-0.tar", write_tar(files))
    for column, names in ((None, None), ("cls", None), ("txt", ["a", "b", "c", "d"])):
        _, splits, classes = sources.read(tmp_path / "a", options=Options(label_column=column))
        assert (classes, len(splits["train"])) == (names, 8)
        assert all(map(colors_match, splits.values())) == (column != "txt")
    put(tmp_path / "a/classes.txt", "\n".join(NAMES))
    assert sources.read(tmp_path / "a")[2] == NAMES


def test_numbers_in_the_file_of_class_names_are_those_of_the_labels(tmp_path):
    """The last class has no images, so that its number is not the largest label."""
    shards("cls", lambda k: f"{k + 1}")(tmp_path)
    names = [*NAMES, "unused"]
    put(tmp_path / "labels.txt", "".join(f"{number} {name}\n" for number, name in enumerate(names, 1)))
    _, splits, classes = sources.read(tmp_path)
    assert classes == names and all(map(colors_match, splits.values()))
    put(tmp_path / "labels.txt", "".join(f"{number} {name}\n" for number, name in enumerate(NAMES)))
    with pytest.raises(UsageError, match="has label 4, but the data set has only 4 class names"):
        sources.read(tmp_path)
    put(tmp_path / "labels.txt", "".join(f"{number} {name}\n" for number, name in enumerate(names, 1)))
    shards("cls", str)(tmp_path)
    with pytest.raises(UsageError, match="label 0 is not a class"):
        sources.read(tmp_path)


@pytest.mark.parametrize(("texts", "are_labels"), [("abab", True), ("abcc", False), ("aabc", False), ("abcabc", True)])
def test_texts_of_which_more_than_half_differ_are_not_labels(tmp_path, texts, are_labels):
    files = [
        (f"{i}.{kind}", data)
        for i, text in enumerate(texts)
        for kind, data in (("jpg", image(0, i)), ("txt", text.encode()))
    ]
    shard(*files)(tmp_path)
    if are_labels:
        assert sources.read(tmp_path, "webdataset")[2] == sorted({*texts})
        return
    with pytest.raises(
        UsageError, match=f"3 of {len(texts)} texts in .txt files are different, so they are not labels"
    ):
        sources.read(tmp_path, "webdataset")


def test_missing_shards_are_accepted_if_allowed(tmp_path, capsys):
    gap(tmp_path)
    with pytest.raises(UsageError, match="1 shard missing"):
        sources.read(tmp_path)
    sources.read(tmp_path, options=Options(allow_partial=True))
    assert "1 shard missing (number 1); only the other shards are imported" in capsys.readouterr().err


@pytest.mark.parametrize("content", [str, lambda k: json.dumps({"class": f" {k} "})])
def test_json_with_one_label(tmp_path, content):
    shards("json", content)(tmp_path)
    (tmp_path / "val-000000.tar").rename(tmp_path / "val-000001.tar")  # the numbers may begin at 1
    _, splits, classes = sources.read(tmp_path)
    assert classes is None and all(map(colors_match, splits.values()))


def gap(root):
    shards("txt", NAMES.__getitem__)(root)
    put(root / "train-000002.tar", (root / "train-000000.tar").read_bytes())


def truncated(root):
    shards("txt", NAMES.__getitem__)(root)
    put(root / "val-000000.tar", (root / "val-000000.tar").read_bytes()[:5000])


A = ("a.jpg", image(0))
BAD_SHARDS = {
    "missing shard": (gap, "train-*.tar: 1 shard missing (number 1); download them, or use --allow-partial"),
    "truncated": (truncated, "val-000000.tar: damaged (unexpected end of data); download it again"),
    "no image": (shard(("a.cls", b"0")), "train-000000.tar: sample a has no image (cls)"),
    "two images": (
        shard(A, ("a.png", image(0, kind="PNG"))),
        "sample a has the images jpg, png; write the shard again",
    ),
    "same file twice": (shard(A, A), "train-000000.tar: sample a has several .jpg files; keep one of them"),
    "no label": (shard(A), "sample a: has no label (jpg); add a.cls or a.json or a.txt"),
    "empty label": (shard(A, ("a.cls", b" ")), "sample a: has no label; write the label, or remove the image"),
    "several labels": (shard(A, ("a.json", b'{"label": [0, 1]}')), "sample a: label is [0, 1], not one label"),
    "truth value": (shard(A, ("a.json", b'{"label": true}')), "sample a: label is true, not one label"),
    "damaged JSON": (shard(A, ("a.json", b"{")), "sample a: its .json file is damaged"),
    "no known key": (shard(A, ("a.json", b'{"x": 0}')), "no key is recognized for --label-column; set it to one of x"),
    "not UTF-8": (shard(A, ("a.cls", b"\xff")), "sample a: its .cls file is damaged"),
    "negative": (shard(A, ("a.cls", b"-1")), "sample a: label -1 is not a class"),
    "out of range": (shard(A, ("a.cls", b"7")), "sample a: has label 7, but the data set has only 1 image;"),
    "captions": (
        shard(A, ("a.txt", b"a bird"), ("b.jpg", image(1)), ("b.txt", b"a fish")),
        "2 of 2 texts in .txt files are different, so they are not labels",
    ),
}


def test_extensions_in_upper_case_or_with_a_dot(tmp_path):
    for split in ("train", "val"):
        files = [file for k in range(2) for file in ((f"{k}.JPG", image(k)), (f"{k}.meta.json", b"%d" % k))]
        put(tmp_path / f"{split}-000000.tar", write_tar(files))
    assert colors_match(sources.read(tmp_path, "webdataset")[1]["train"])


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_bad_shards_exit_with_code_2_and_leave_no_output(tmp_path, capsys, name):
    build, message = BAD_SHARDS[name]
    build(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys)
