"""Prediction of image files."""

import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paddle_resnet.data import bad_images, headers
from paddle_resnet.serving import image_files, inference, networks
from paddle_resnet.serving.model import Model
from paddle_resnet.utils.errors import RunError

pytestmark = pytest.mark.usefixtures("one_block")


def test_predictions_do_not_depend_on_batch_size(checkpoint, photo_paths, monkeypatch):
    """DALI allocates memory for at most as many images as there are files."""
    loader_args, loaders = inference.loader_args, []
    monkeypatch.setattr(inference, "loader_args", lambda *args: loaders.append(args[1]) or loader_args(*args))
    model, sizes, rows = inference.open_model(checkpoint, "cpu"), [], []
    run = model.outputs
    model.outputs = lambda images: sizes.append(len(images)) or run(images)
    for batch_size, expected in ((1, [1] * 23), (8, [8, 8, 7]), (23, [23]), (64, [23])):
        rows.append([row for _, row, _ in image_files.predict(model, photo_paths, batch_size)])
        assert sizes == expected
        sizes.clear()
        np.testing.assert_allclose(rows[-1], rows[0], atol=1e-6)
    assert loaders == [1, 8, 23, 23]


def test_dali_reads_the_files_until_the_first_bad_image(checkpoint, photo_paths, tmp_path, monkeypatch):
    """Relative paths that resemble the address of an S3 object are local files."""
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:/b.jpg").write_text("no image")
    monkeypatch.chdir(tmp_path)
    images, read_in_python, real = photo_paths[:7], [], image_files._read_file
    shutil.copy(images[0], tmp_path / "s3:/a.jpg")
    monkeypatch.setattr(image_files, "_read_file", lambda path: read_in_python.append(path) or real(path))
    paths, model = ["s3://a.jpg", *images], inference.open_model(checkpoint, "cpu")
    expected = [row.tolist() for _, row, _ in image_files.predict(model, images[:1] + images, batch_size=2)]
    assert [row.tolist() for _, row, _ in image_files.predict(model, paths, batch_size=2)] == expected
    assert read_in_python == []
    *first, problem, last = image_files.predict(model, [*paths[:-1], "s3://b.jpg", paths[-1]], batch_size=2)
    assert [row.tolist() for _, row, _ in [*first, last]] == expected
    assert problem == ("s3://b.jpg", None, "is not in an image format that DALI supports")
    assert "s3://a.jpg" not in read_in_python and read_in_python[-2:] == ["s3://b.jpg", paths[-1]]


def test_dali_opens_only_regular_files(tmp_path):
    """A folder has a size. A file may change while it is checked."""
    for path in (tmp_path, tmp_path / "missing.jpg"):
        assert image_files._checked_path(str(path), lambda path: (None, f"{path} is bad")) == (None, f"{path} is bad")
    problem = "cannot be read (changed while it was read)"
    assert image_files._checked_path("missing.jpg", lambda path: (np.ones(1, np.uint8), None)) == (None, problem)


@pytest.mark.parametrize(
    ("precision", "steps", "remedy"),
    [
        ("float16", True, "use --precision float32"),
        ("float16", False, "export the checkpoint in float32"),
        ("float32", False, "use a different checkpoint"),
    ],
)
def test_probabilities_that_are_not_finite_are_reported(checkpoint, photo_paths, precision, steps, remedy, tmp_path):
    """The values of a network may exceed the range of float16. A file in the same batch is empty."""
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    rows[1, 2] = np.nan
    description = networks.load_checkpoint(checkpoint).description
    captured = SimpleNamespace(submit=lambda images: [rows]) if steps else None
    model = Model("", description, lambda images: [rows], precision, captured)
    (tmp_path / "empty.jpg").touch()
    paths = [photo_paths[0], str(tmp_path / "empty.jpg"), *photo_paths[1:3]]
    first, empty, (_, row, problem), last = image_files.predict(model, paths)
    assert (first[1].tolist(), last[1].tolist()) == ([0, 1, 2], [6, 7, 8])
    assert empty[1:] == (None, "is empty")
    assert (row, problem) == (None, f"has probabilities that are not finite in {precision}; {remedy}")


def test_features_of_images_that_are_not_finite_are_omitted(checkpoint, photo_paths):
    features = np.arange(6, dtype=np.float32).reshape(3, 2)
    features[1, 0] = np.inf
    description = networks.load_checkpoint(checkpoint).description
    model = Model("", description, lambda images: [np.ones((3, 3), np.float32), features])
    batches = image_files.predict_batches(model, photo_paths[:3], 3, "cpu", 1)
    [(checked, outputs)] = [batch for batch in batches if batch[0]]
    assert [problem is None for _, problem in checked] == [True, False, True]
    np.testing.assert_array_equal(outputs[0], np.ones((2, 3)))
    np.testing.assert_array_equal(outputs[1], features[[0, 2]])


def test_problem_of_an_image_that_is_not_a_file_contains_no_path(checkpoint):
    """For files, the problem contains the command that converts the file."""
    model = Model("", networks.load_checkpoint(checkpoint).description, None)
    info = struct.pack("<IiiHHIIiiII", 40, 40, 40, 1, 16, 0, 3200, 0, 0, 0, 0)  # 16 bits per pixel
    data = struct.pack("<2sIHHI", b"BM", 3254, 0, 0, 54) + info + bytes(3200)
    for source, remedy in ((0, headers.SAVE), ("a.bmp", "`")):
        [(_, row, problem)] = image_files.predict(model, [source], read=lambda _: (data, None))
        assert row is None and problem.endswith(remedy)


def test_intact_image_that_dali_cannot_load_is_an_error(checkpoint, photo_paths, tmp_path, monkeypatch):
    data = Path(photo_paths[0]).read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[: len(data) // 2])
    monkeypatch.setattr(bad_images, "decode", lambda *_: None)
    model = Model("", networks.load_checkpoint(checkpoint).description, None)
    with pytest.raises(RunError, match=rf"{tmp_path}/a.jpg: DALI cannot load this image \(.+\); remove it"):
        list(image_files.predict(model, [str(tmp_path / "a.jpg")]))


@pytest.mark.slow
def test_image_with_too_many_pixels_after_resize_is_reported(checkpoint, tmp_path):
    """The shorter side of the image must cover the longer side of the crop. After resizing, the first two images would
    have 256 x 1,048,832 pixels."""
    description = networks.load_checkpoint(checkpoint).description
    description["preprocessing"] |= {"resize_short": 128, "center_crop": [32, 64]}
    for shape in ((4097, 1), (1, 4097), (650, 20)):
        Image.new("RGB", shape).save(tmp_path / "thin.png")
        model = Model("", description, lambda images: [np.zeros((1, 3), np.float32)])
        [(_, row, problem)] = image_files.predict(model, [str(tmp_path / "thin.png")])
        expected = f"has {shape[0]} x {shape[1]} pixels and would exceed the limit of 268,435,456 after resizing"
        assert (row is None, problem) == ((False, None) if 20 in shape else (True, expected))
