"""The data sets in the first section of docs/data.md, imported to class folders."""

import pytest

import origins
from layouts import colors_match
from paddle_resnet import dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

FLAGS = {"kaggle_imagenet": ["--allow-partial"], "dogs-vs-cats": ["--as", "filename"]}
WITHOUT_COLORS = ("cifar-10-batches-py", "fer2013.csv")
IN_PARQUET = ("imagenet-1k", "beans")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("origins")
    origins.write(root)
    return root


@pytest.mark.usefixtures("convert_here", "verify_here", "cache")
@pytest.mark.parametrize(
    "name",
    [
        "imagenet-1k-wds",
        "imagenet2012",
        "imagenet_tfrecord",
        "cassava",
        "flowers102",
        *FLAGS,
        *WITHOUT_COLORS,
        *IN_PARQUET,
    ],
)
def test_images_of_every_origin_can_be_written_to_class_folders(root, tmp_path, capsys, name):
    if name in IN_PARQUET:
        pytest.importorskip("pyarrow")
    command = ["import", str(root / name), "--output", str(tmp_path / "x"), "--to", "folder", *FLAGS.get(name, [])]
    assert dataset.main(command) == 0
    out = capsys.readouterr().out
    for mode in Mode:
        images = DataRoot(tmp_path / "x").images(mode)[1]
        assert f"{len(images)} {mode.value}" in out
        assert name in WITHOUT_COLORS or colors_match(images)
