import pytest

from layouts import put
from paddle_resnet.data import table_heads


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "image_id,label\n", True),
        ("a.csv", "\ufeffID,Breed\n", True),
        ("a.csv", "id;x\n", True),
        ("a.tsv", "File Name\tother\tclass\n", True),
        ("a.jsonl", '{"file_name": "x", "label": 3}\n', True),
        ("a.csv", "id,x,y2\n", False),
        ("a.csv", "x,label\n", False),
        ("sample_submission.csv", "id,label\n", False),
        ("a.jsonl", "[1]\n", False),
        ("a.jsonl", "{\n", False),
        ("a.csv", "", False),
    ],
)
def test_tables_are_recognized_by_their_columns(tmp_path, name, text, expected):
    put(tmp_path / name, text)
    assert table_heads.is_table(str(tmp_path / name)) is expected
    assert not table_heads.is_table(str(tmp_path))
