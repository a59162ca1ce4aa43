"""tests/tools/sources/test_tables.py tests the readers with images."""

import pytest

from layouts import put
from paddle_resnet.tools.sources import table_files
from paddle_resnet.utils.errors import UsageError


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *[
            ("train_list.txt", "train"),
            ("trainLabels.csv", "train"),
            ("valid/_classes.csv", "val"),
            ("labels.csv", None),
        ],
        *[("test_images", "test"), ("train_val.csv", None), ("training.csv", "train"), ("constraint.csv", None)],
    ],
)
def test_split_in_names(name, split):
    assert table_files.split_of(name) == split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id,label\n a , b c \n\n", [("line 1", ["id", "label"]), ("line 2", ["a", "b c"])]),
        ("id;label\na;b,c\n", [("line 1", ["id", "label"]), ("line 2", ["a", "b,c"])]),
        ('id,label\n"a,b","c\nd"\n', [("line 1", ["id", "label"]), ("line 3", ["a,b", "c\nd"])]),
        ("\ufeffid\tlabel\r\na\tb\r\n", [("line 1", ["id", "label"]), ("line 2", ["a", "b"])]),
        ("", []),
    ],
)
def test_cells_and_line_numbers_of_a_table(tmp_path, text, expected):
    path = str(tmp_path / "a.csv")
    put(tmp_path / "a.csv", text)
    assert [*table_files._cells(path)] == [(f"{path}: {place}", cells) for place, cells in expected]


def test_values_of_json_lines_become_text(tmp_path):
    put(tmp_path / "a.jsonl", '{"a": 1, "b": null, "c": [1]}\n\n{"c": "x", "a": 2.5}\n')
    path = str(tmp_path / "a.jsonl")
    assert [*table_files._cells(path)] == [
        (path, ["a", "b", "c"]),
        (f"{path}: line 1", ["1", "", "[1]"]),
        (f"{path}: line 3", ["2.5", "", "x"]),
    ]


@pytest.mark.parametrize("delimiter", ["ab", ""])
def test_delimiter_of_several_characters_is_rejected(tmp_path, delimiter):
    put(tmp_path / "a.csv", "id,label\n")
    with pytest.raises(
        UsageError, match=f"--delimiter '{delimiter}': not a single character, which is required for .*a.csv;"
    ):
        [*table_files._cells(str(tmp_path / "a.csv"), delimiter)]
