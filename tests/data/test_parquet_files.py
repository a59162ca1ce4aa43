import json

import pytest

from paddle_resnet.data import parquet_files
from paddle_resnet.utils.errors import UsageError


def write(path, columns, features=None):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=2)
    return str(path)


IMAGES = [{"bytes": b"a", "path": "x/a.png"}, {"bytes": b"b", "path": None}, {"bytes": b"c", "path": "c.png"}]
CLASSES = {"img": {"_type": "Image"}, "y": {"_type": "ClassLabel", "names": ["cat", "dog"]}}


def test_columns_of_metadata(tmp_path):
    path = write(tmp_path / "a.parquet", {"img": IMAGES, "mask": IMAGES, "y": [1, 0, 1], "label": [5, 6, 7]}, CLASSES)
    columns = parquet_files.columns(path)
    assert columns == parquet_files.Columns("img", "y", ("cat", "dog"))
    rows = parquet_files.rows(path, columns)
    assert [(row.group, row.row, row.label, row.name) for row in rows] == [
        (0, 0, 1, "a.png"),
        (0, 1, 0, ""),
        (1, 0, 1, "c.png"),
    ]
    assert [parquet_files.read_image(path, row.group, row.row, "img") for row in rows] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("kind", ["binary", "large_binary"])
def test_columns_without_metadata(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    images = pyarrow.array([b"a", b"b"], getattr(pyarrow, kind)())
    path = write(tmp_path / "a.parquet", {"id": ["x", "y"], "jpg": images, "Category": ["cat", "dog"]})
    columns = parquet_files.columns(path)
    assert columns == parquet_files.Columns("jpg", "Category", None)
    assert [(row.label, row.name) for row in parquet_files.rows(path, columns)] == [("cat", ""), ("dog", "")]
    assert parquet_files.read_image(path, 0, 1, "jpg") == b"b"


def test_class_names_by_number(tmp_path):
    features = {"y": {"_type": "ClassLabel", "names": {"10": "c", "2": "b", "0": "a"}}}
    path = write(tmp_path / "a.parquet", {"image": IMAGES, "y": [1, 0, 1]}, features)
    assert parquet_files.columns(path).classes == ("a", "b", "c")


README = """---
license: mit
dataset_info:
{}---
# Pets
"""
CONFIG = """{0}features:
{1}- name: img
{1}  dtype: image
{1}- name: y
{1}  dtype:
{1}    class_label:
{1}      names:
{1}        '1': {2}
{1}        '0': cat
"""


def config(name=None, second="dog"):
    return CONFIG.format("  " if name is None else f"- config_name: {name}\n  ", "  ", second)


@pytest.mark.parametrize("features", [None, {"y": {"_type": "ClassLabel"}}])
@pytest.mark.parametrize("readme", ["data/README.md", "README.md"])
def test_class_names_in_readme(tmp_path, readme, features):
    (tmp_path / "data/full").mkdir(parents=True)
    columns = {"img": IMAGES, "mask": IMAGES, "y": [1, 0, 1]}
    path = write(tmp_path / "data/full/a.parquet", columns, features)
    with pytest.raises(UsageError, match="no column is recognized|are all candidates"):
        parquet_files.columns(path)
    texts = [config(), config("full") + config("tiny", "bird"), config("a") + config("b")]
    texts = [README.format(text) for text in (*texts, config() + "  - name: other\n    dtype: image\n")]
    for text in (*texts, texts[0].replace("\n", "\r\n"), "\ufeff" + texts[0]):
        (tmp_path / readme).write_text(text)
        assert parquet_files.columns(path) == parquet_files.Columns("img", "y", ("cat", "dog"))
    path = write(
        tmp_path / "data/full/a.parquet", columns, CLASSES | {"y": {"_type": "ClassLabel", "names": ["x", "z"]}}
    )
    assert parquet_files.columns(path).classes == ("x", "z")  # the metadata take precedence


def test_readme_without_class_names(tmp_path, capsys):
    path = write(tmp_path / "a.parquet", {"img": [b"a"], "label": [0]})
    without = parquet_files.Columns("img", "label", None)
    for text in (
        "# x\n---\na: 1\n---\n",
        "---\nlicense: mit\n---\n",
        "---\n",
        README.format(config("a") + config("b", "bird")),
    ):
        (tmp_path / "README.md").write_text(text)
        assert parquet_files.columns(path) == without
    assert not capsys.readouterr().err
    for text in ("---\n[\n---\n", "---\ndataset_info: 3\n---\n", README.format(config().replace("'1'", "'2'"))):
        (tmp_path / "README.md").write_text(text)
        assert parquet_files.columns(path) == without
        assert "README.md: class names cannot be read" in capsys.readouterr().err


def test_several_columns_of_labels(tmp_path):
    features = {"fine": CLASSES["y"], "coarse": CLASSES["y"] | {"names": ["x", "z"]}}
    path = write(tmp_path / "a.parquet", {"img": IMAGES, "fine": [1, 0, 1], "coarse": [0, 1, 0]}, features)
    with pytest.raises(UsageError, match="a.parquet: the columns fine, coarse are all candidates for --label-column"):
        parquet_files.columns(path)
    assert parquet_files.columns(path, label_column="coarse") == parquet_files.Columns("img", "coarse", ("x", "z"))
    with pytest.raises(UsageError, match="--label-column x: .*a.parquet has the columns img, fine, coarse; choose one"):
        parquet_files.columns(path, label_column="x")
    message = "the column fine has the type int64, not the bytes of images; import the file with --image-column img$"
    with pytest.raises(UsageError, match=message):
        parquet_files.columns(path, "fine", "coarse")
    assert parquet_files.columns(path, "img", "coarse").image == "img"  # obey the message
    path = write(tmp_path / "b.parquet", {"img": ["a", "b"], "y": [0, 1]}, CLASSES)
    message = "the column img has the type string, .*; write the file again with the content of the image files$"
    with pytest.raises(UsageError, match=message):
        parquet_files.columns(path)
    assert parquet_files.columns(write(tmp_path / "b.parquet", {"img": [b"a", b"b"], "y": [0, 1]}, CLASSES))


def test_file_without_labels(tmp_path):
    path = write(tmp_path / "a.parquet", {"img": IMAGES, "text": ["a", "b", "c"]})
    remedy = "run `.*dataset import` with --label-column set to one of img, text"
    with pytest.raises(UsageError, match=f"no column is recognized for --label-column; {remedy}"):
        parquet_files.columns(path)


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": {"features": 3}}'])
def test_damaged_metadata_is_ignored(tmp_path, metadata):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"image": IMAGES, "label": [0, 1, 0]}).replace_schema_metadata({b"huggingface": metadata})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert parquet_files.columns(str(tmp_path / "a.parquet")) == parquet_files.Columns("image", "label", None)


def test_missing_package_is_named_with_remedy(tmp_path, uninstalled):
    (tmp_path / "a.parquet").write_bytes(b"x")
    uninstalled("pyarrow")
    with pytest.raises(
        UsageError, match="a.parquet: requires the package pyarrow.*; run .*pip install -r requirements-parquet.txt"
    ):
        parquet_files.columns(str(tmp_path / "a.parquet"))
