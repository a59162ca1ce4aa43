"""tests/tools/sources/test_record_files.py imports data sets with these files."""

import json

import pytest

from paddle_resnet.data import record_tables

COCO = {  # one of the categories has no name, so the labels are numbers
    "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}],
    "annotations": [{"image_id": 1, "category_id": 9}, {"image_id": 2, "category_id": 4}],
    "categories": [{"id": 4, "name": "x"}, {"id": 9}],
}


@pytest.mark.parametrize(
    ("content", "header", "rows"),
    [
        ({"a.jpg": 1, "b.jpg": "x"}, ["image", "label"], [["a.jpg", "1"], ["b.jpg", "x"]]),
        ({"x": ["a.jpg"], "y": []}, ["image", "label"], [["a.jpg", "x"]]),
        ({"a.jpg": {"y": 1}}, ["image", "y"], [["a.jpg", "1"]]),
        ([{"a": 1}, {"b": None, "a": ["x"]}], ["a", "b"], [["1", ""], ['["x"]', ""]]),
        ({"n": 2, "rows": [["a.jpg", 1]], "x": []}, ["image", "label"], [["a.jpg", "1"]]),
        ({"Train": [{"a": 1}], "valid": [{"a": 2}]}, ["a", "split"], [["1", "Train"], ["2", "valid"]]),
        (
            {"train": [{"a": 1}], "val": [{"a": 2}], "test": [], "dev": {}, "eval": None},
            ["a", "split"],
            [["1", "train"], ["2", "val"]],
        ),
        ({"val": [{"a": 1}], "test": []}, ["a", "split"], [["1", "val"]]),
        ({"train": [{"a": 1}], "test": 3}, ["a"], [["1"]]),
        ({"train": 0, "test": 0}, ["image", "label"], [["train", "0"], ["test", "0"]]),
        ({"train": [], "test": []}, [], []),
        ({"train": {"a.jpg": 1}}, ["image", "label", "split"], [["a.jpg", "1", "train"]]),
        (COCO, ["file_name", "label"], [["a.jpg", "9"], ["b.jpg", "4"]]),
        ({"a": [{"x": 1}], "b": [{"x": 1}]}, [], []),
        ([[1, 2, 3]], [], []),
        ({}, [], []),
        (3, [], []),
        (None, [], []),
    ],
)
def test_records_in_json(tmp_path, content, header, rows):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    table = record_tables.read(str(path))
    assert (table.header, table.rows) == (header, rows)
    path.write_text('{"other.jpg": 1}')
    assert record_tables.read(str(path)).rows == [["other.jpg", "1"]]  # not the content of the replaced file


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"1": "b", "0": "a"}, (["a", "b"], 0)),
        ({"a": 2, "b": 1}, (["b", "a"], 1)),
        ({str(i): f"n{i}" for i in range(11)}, ([f"n{i}" for i in range(11)], 0)),
        ({"0": "a", "2": "b"}, None),
        ({"a": 0, "b": 0}, None),
        ({"0": 1.5}, None),
        ({}, None),
        (["a"], None),
    ],
)
def test_class_names_in_json(tmp_path, content, expected):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    assert record_tables.class_names(str(path)) == expected
