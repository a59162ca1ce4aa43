"""tests/tools/sources/test_tables.py tests the official splits with images."""

import pytest

from layouts import put
from paddle_resnet.tools.sources import official
from paddle_resnet.utils.errors import UsageError

CUB = {
    "images": "1 001.a/x.jpg\n2 002.b/y.jpg\n",
    "image_class_labels": "1 1\n2 2\n",
    "train_test_split": "1 1\n2 0\n",
    "classes": "1 001.a\n2 002.b\n",
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("images", "1\n", "images.txt: line 1 is not `ID VALUE`; download it again"),
        ("images", "1 a\n1 b\n", "images.txt: line 2 repeats an id; download it again"),
        ("images", "1 a\n3 b\n", "image_class_labels.txt: has no line for image 3; download it again"),
        ("train_test_split", "1 1\n", "train_test_split.txt: has no line for image 2; download it again"),
        ("train_test_split", "1 1\n2 2\n", "train_test_split.txt: line 2: expected 0 or 1; download it again"),
        (
            "image_class_labels",
            "1 1\n2 9\n",
            "image_class_labels.txt: line 2: class 9 is not in classes.txt; download both again",
        ),
    ],
)
def test_damaged_lists_of_cub_are_rejected(tmp_path, name, text, message):
    for file, content in (CUB | {name: text}).items():
        put(tmp_path / f"{file}.txt", content)
    with pytest.raises(UsageError) as e:
        official.cub(str(tmp_path))
    assert str(e.value) == f"{tmp_path}/{message}"


def test_comments_in_lists_of_pets_are_ignored(tmp_path):
    put(tmp_path / "annotations/trainval.txt", "#Image CLASS-ID SPECIES BREED ID\na_b_1 1 1 1\n\nC_2 2 1 1\n")
    rows, (_, names, _) = official.pets(str(tmp_path))
    assert [(row.image, row.label, row.split) for row in rows] == [("a_b_1", "a_b", "train"), ("C_2", "C", "train")]
    assert names == ["a_b", "C"]  # in the order of their numbers
    put(tmp_path / "annotations/test.txt", "a_b_1 1\n")
    with pytest.raises(UsageError, match="test.txt: line 1 is not `IMAGE CLASS SPECIES BREED`; download it again"):
        official.pets(str(tmp_path))


@pytest.mark.parametrize("text", ["[1", "[1]", '{"a": 1}', '{"a": [1]}'])
def test_damaged_json_of_food_is_rejected(tmp_path, text):
    put(tmp_path / "meta/train.json", text)
    with pytest.raises(UsageError, match="train.json: not a JSON object with lists of images .*; download it again"):
        official.food(str(tmp_path))


@pytest.mark.parametrize("text", ["a/b.jpg 0\n", "b.jpg\n"])
def test_lists_of_mmpretrain_are_not_taken_for_food(tmp_path, text):
    put(tmp_path / "meta/train.txt", text)
    assert official.food(str(tmp_path)) == []
