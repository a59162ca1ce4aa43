import pytest

from layouts import put
from paddle_resnet.data import table_heads

PIXELS = ",".join(f"pixel{i}" for i in range(16))


def is_image(cell):
    return cell.endswith(".jpg")


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
        ("a.csv", "id,split\n", False),
        ("a.json", '[{"file": "x.jpg", "label": 3}]', True),
        ("a.json", '[{"file": "x.jpg", "width": 3}]', False),
        ("a.csv", f"id,label,{PIXELS}\n", False),
        ("a.csv", "id,a,b,c\nx,0,1,0\n", True),
        ("a.csv", "id,a,b,c\nx,1,1,0\n", False),
    ],
)
def test_tables_are_recognized_by_their_columns(tmp_path, name, text, expected):
    put(tmp_path / name, text)
    assert table_heads.is_table(str(tmp_path / name), is_image=is_image) is expected
    assert not table_heads.is_table(str(tmp_path))


def test_label_column_excludes_other_columns(tmp_path):
    put(tmp_path / "a.csv", "id,a,b,c\nx,0,1,0\n")
    for column, expected in ((None, True), ("b", True), ("d", False)):
        assert table_heads.is_table(str(tmp_path / "a.csv"), label_column=column) is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("size,id\n7,7\n", [1]), ("id,label\n8,7\n", []), ("7,8\n", []), ("x.jpg,8\n", [0])]
)
def test_numbers_are_images_only_in_a_column_with_a_known_name(tmp_path, text, expected):
    put(tmp_path / "a.csv", text)
    assert table_heads.image_columns(str(tmp_path / "a.csv"), lambda cell: cell in ("7", "x.jpg")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image,a,b,c,d\nx.jpg,1.0,1.0,0.0,0\ny.jpg,0.0,0.0,1.0,0\n", ("x.jpg: a, b", ("a", "b", "c"))),
        ("image,a,b,c,d\nx.jpg,1,0,-1,0\ny.jpg,-1,-1,1,0\nz.jpg,-1,1,1,0\n", ("z.jpg: b, c", ("a", "b", "c"))),
        ("image,a,b,c,is_valid\nx.jpg,1,0,0,1\ny.jpg,0,1,0,0\n", (None, ())),
        ("image,label,blurred,cut,gray\nx.jpg,a,1,1,0\ny.jpg,b,0,0,1\n", (None, ())),
        ('image,label\nx.jpg,a\ny.jpg,"a, b"\nz.jpg,b\n', ("a, b", ())),
        ("image,label\nx.jpg,a\ny.jpg,a | b\nz.jpg,b\n", ("a | b", ())),
        ('image,label\nx.jpg,a\ny.jpg,"a, c"\nz.jpg,b\n', (None, ())),
    ],
)
def test_several_labels_in_the_first_rows(tmp_path, text, expected):
    put(tmp_path / "a.csv", text)
    assert table_heads.several_labels(str(tmp_path / "a.csv"), is_image) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("train.txt", "cat/0.jpg\ndog/0.jpg", True),  # no newline at the end
        ("train.txt", "cat/0.jpg\ncat/1.jpg\n", False),
        ("train.txt", "train/0.jpg\nval/0.jpg\n", False),
        ("list.txt", "cat/0.jpg\ndog/0.jpg\n", False),
    ],
)
def test_folders_of_a_list_of_paths_are_classes(tmp_path, name, text, expected):
    put(tmp_path / name, text)
    assert table_heads.is_path_list(str(tmp_path / name), is_image) is expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["2", "Male Young", "x.jpg 1 -1"], (2, ["image", "Male", "Young"])),
        (["id class", "3 x"], (1, ["id", "class"])),
        (["2", "cat", "sea lion"], (0, [])),
        (["image", "cat"], (0, [])),
        (["Male Young", "x.jpg 1 -1"], (0, [])),
    ],
)
def test_names_of_columns_separated_by_spaces(lines, expected):
    assert table_heads.text_header(lines) == expected


def test_first_line_may_be_longer_than_the_head_of_other_files(tmp_path):
    names = [*(f"pixel{i}" for i in range(96**2)), "label"]
    put(tmp_path / "a.csv", ",".join(names) + "\n")
    assert table_heads.header(str(tmp_path / "a.csv")) == names
