import csv
import json
import re
import shutil

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_resnet import predict
from paddle_resnet.native import build as native
from paddle_resnet.serving import features, inference, networks, preprocessing
from paddle_resnet.serving.fixed_sizes import Steps
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import RunError, UsageError


@pytest.fixture
def expected(checkpoint, photo_paths):
    """Return a function that returns the features of images, computed in Paddle's Executor one by one."""
    model = networks.load_checkpoint(checkpoint, features=True).model()

    def expected(paths):
        images = [preprocessing.model_input(path, model.description) for path in paths]
        return features.normalized(np.concatenate([model.outputs(image)[1] for image in images]))

    return expected


def rows_of(path):
    with open(features.table_of(path), newline="") as file:
        return [(int(row["row"]), row["image"]) for row in csv.DictReader(file)]


def test_command_writes_a_row_per_classified_image(checkpoint, photo_paths, expected, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    path, paths = tmp_path / "new/features.npy", [*photo_paths[:3], str(tmp_path / "bad.jpg"), *photo_paths[3:8]]
    flags = ["--device", "cpu", "--batch-size", "2", "--json"]
    assert predict.main([str(checkpoint), *paths, *flags, "--features", str(path)]) == 1  # because of bad.jpg
    printed = capsys.readouterr().out
    kept = [image for image in paths if "bad" not in image]
    assert [json.loads(line)["image"] for line in printed.splitlines()] == kept
    written = np.load(path, mmap_mode="r")
    assert (written.dtype, written.shape, path.stat().st_size % 64) == (np.float32, (8, written.shape[1]), 0)
    assert rows_of(path) == list(enumerate(kept))
    np.testing.assert_allclose(np.linalg.norm(written, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(written, expected(kept), atol=2e-3)
    assert (written @ written.T > 0.9999).sum() == 8  # each image is similar only to itself
    # Without the flag, the predictions are the same.
    assert predict.main([str(checkpoint), *paths, *flags]) == 1
    assert capsys.readouterr().out == printed


def test_features_are_the_input_of_the_last_layer(checkpoint, photo_paths):
    network = networks.load_checkpoint(checkpoint, features=True)
    bias, weight = map(network.parameter, networks.ends(network.program).last)
    images = preprocessing.model_input(photo_paths[0], network.description)
    _, found = network.model().outputs(images)
    _, logits = networks.load_checkpoint(checkpoint).model(logits=True).outputs(images)
    np.testing.assert_allclose(found @ weight + bias, logits, atol=1e-5)


def test_engines_return_the_same_features(checkpoint, photo_paths):
    pytest.importorskip("onnxruntime", reason="requirements-onnx.txt is not installed")
    fast = inference.open_model(checkpoint, "cpu", features=True)
    slow = inference.open_checkpoint(checkpoint, "cpu", engine="Paddle", features=True)
    assert (fast.engine, slow.engine) == ("onnxruntime", "Executor")
    images = np.concatenate([preprocessing.model_input(path, fast.description) for path in photo_paths[:3]])
    for ours, theirs in zip(fast.outputs(images), slow.outputs(images), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_captured_steps_return_the_same_features(checkpoint, photo_paths):
    """Two batches may be in progress at the same time."""
    network = networks.load_fast(checkpoint, "float32", "cpu", features=True)
    steps = Steps(network, [2])
    model = networks.load_checkpoint(checkpoint, features=True).model()
    nchw = np.concatenate([preprocessing.model_input(path, model.description) for path in photo_paths[:5]])
    nhwc = np.ascontiguousarray(nchw.transpose(0, 2, 3, 1))
    expected = model.outputs(nchw)
    for actual, each in zip(steps.outputs(nhwc), expected, strict=True):
        np.testing.assert_allclose(actual, each, atol=1e-5)
    submitted = [steps.submit(nhwc[i : i + 2]) for i in (0, 2)]
    for i, results in zip((0, 2), submitted, strict=True):
        for actual, each in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(actual), each[i : i + 2], atol=1e-5)


class OfPositions(nn.Layer):
    """A network whose last layer reads a vector per position of the image."""

    def __init__(self, num_classes, in_channels, data_format):
        super().__init__()
        self.first, self.last = nn.Conv2D(in_channels, 4, 8, 8, data_format=data_format), nn.Linear(4, num_classes)

    def forward(self, images):
        return self.last(paddle.flatten(self.first(images), 2).transpose([0, 2, 1])).mean(axis=1)


def test_network_without_one_vector_per_image_has_no_features(parse, register):
    register("OfPositions", OfPositions)
    options = parse("--model-arch-name", "OfPositions").part(networks.Options)
    with pytest.raises(UsageError, match="^OfPositions: features require that the last layer reads one vector per ima"):
        networks._build(options, features=True)


def test_without_classified_images_the_files_are_empty(checkpoint, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    path = tmp_path / "features.npy"
    assert predict.main([str(checkpoint), str(tmp_path / "bad.jpg"), "--device", "cpu", "--features", str(path)]) == 1
    assert np.load(path).shape == (0, 0)
    assert rows_of(path) == []


def test_zero_vectors_are_not_divided():
    np.testing.assert_array_equal(features.normalized(np.float32([[0, 0], [3, 4]])), np.float32([[0, 0], [0.6, 0.8]]))


def test_header_has_room_for_any_number_of_rows(tmp_path):
    path = tmp_path / "features.npy"
    with features.writer(path) as write:
        for i in range(12):
            write([f"{i}\n.jpg"], np.full([1, 3], i, np.float32))
    assert np.load(path).shape == (12, 3)
    assert rows_of(path)[11] == (11, "11\n.jpg")


def test_exports_and_unwritable_files_are_errors(checkpoint, photo_paths, tmp_path, capsys):
    (tmp_path / "model.onnx").touch()
    with pytest.raises(UsageError, match="exported networks do not return features; use the checkpoint"):
        inference.open_model(tmp_path / "model.onnx", "cpu", features=True)
    image = shutil.copy(photo_paths[0], tmp_path / "image.npy.csv")
    assert predict.main([str(checkpoint), str(image), "--features", str(tmp_path / "image.npy")]) == 2
    message = f"the table next to --features {image}: the same file as the image {image}"
    assert message in capsys.readouterr().err
    for path, message in (
        (photo_paths[0], "the same file as the image"),
        (f"{photo_paths[0]}/x.npy", "cannot be written"),
        (checkpoint / "x.npy", "is reserved for a checkpoint"),
    ):
        assert predict.main([str(checkpoint), photo_paths[0], "--device", "cpu", "--features", str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--benchmark", "--serve", "--tta"])
def test_flags_that_exclude_features(checkpoint, flag, capsys, photo_paths):
    images = [photo_paths[0]] if flag == "--tta" else []
    value = {"--serve": ["0"], "--tta": ["flip"], "--benchmark": []}[flag]
    assert predict.main([str(checkpoint), *images, flag, *value, "--features", "f.npy"]) == 2
    assert f"--features f.npy: not supported with {flag}" in capsys.readouterr().err


def test_features_and_heat_maps_together(checkpoint, photo_paths, tmp_path):
    flags = ["--features", str(tmp_path / "f.npy"), "--heat-map", str(tmp_path / "maps")]
    assert predict.main([str(checkpoint), *photo_paths[:2], "--device", "cpu", *flags]) == 0
    assert len(np.load(tmp_path / "f.npy")) == len(list((tmp_path / "maps").iterdir())) == 2


def test_features_require_that_stdout_is_read(tmp_path):
    """`... | head -1` would otherwise end the command without an error message and without the file."""
    path = tmp_path / "features.npy"
    message = f"--features {path}: not written, because stdout was closed; read all of stdout, or redirect it to a file"
    with pytest.raises(RunError, match=re.escape(message)), features.writer(path) as write:
        write(["a.jpg"], np.ones([1, 4], np.float32))
        raise logger.ClosedPipe
    assert not [*tmp_path.iterdir()]
