"""Calibration of quantized networks. tests/serving/test_int8_onnx.py tests INT8 exports."""

import shutil

import data_files
import numpy as np
import pytest
from PIL import Image

from helpers import training_images
from paddle_resnet.components import quantization
from paddle_resnet.data.formats import FILES, SHARDED, SINGLE_FILE, read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.serving import calibration, networks, preprocessing
from paddle_resnet.serving.calibration import BINS, SMALLEST, Histogram, _mean_error
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


def histogram(*arrays):
    result = Histogram()
    for array in arrays:
        result.add(np.asarray(array, np.float32))
    return result


def test_histogram_does_not_depend_on_order_of_batches():
    """When a value exceeds the limit of a histogram, the limit is multiplied by a power of two. Each bin of the new
    histogram is therefore a union of old bins."""
    random = np.random.RandomState(0)
    small, large = random.uniform(-1, 1, 10000), random.uniform(-4, 4, 10000)
    small[0], large[0] = 1, 4
    growing, direct = histogram(small, large), histogram(large, small)
    assert growing.limit == direct.limit == 4
    # Values at the edge of a bin may be rounded differently.
    assert np.abs(growing.counts - direct.counts).sum() <= 10
    assert growing.counts.sum() == 20000


def test_zeros_do_not_affect_range():
    values = np.random.RandomState(0).randn(10000)
    assert histogram(values, np.zeros(50000)).range() == histogram(values).range()
    # The range must not be 0, because quantization divides by it.
    assert histogram(np.zeros(100)).range() == 1
    assert histogram([1e-40, SMALLEST]).range() == 1


@pytest.mark.filterwarnings("error")
def test_range_of_constant_activation():
    assert histogram(np.full(100, 3)).range() == 3


def test_outliers_are_clipped():
    """One of 100,000 values is 100 times as large as the others."""
    values = np.random.RandomState(0).uniform(-1, 1, 100000)
    values[0] = 100
    assert 1 - 1e-3 <= histogram(values).range() <= 100 * 130 / BINS
    # A fifth of the values are large, so they are not clipped.
    values[0] = 1
    values[::5] *= 10
    isolated = np.where(np.abs(values) > 1, 10, values)  # no values between 1 and 10
    assert histogram(values).range() > 9
    assert histogram(isolated).range() > 9


def test_percentile_covers_most_values():
    values = np.random.RandomState(0).randn(200000)
    limit = histogram(values).range()
    assert limit == pytest.approx(np.quantile(np.abs(values), 0.9999), abs=0.01)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_mean_error_equals_error_of_quantized_layer(groups):
    """With constant images and no padding, all pixels of an output channel have the same error, so the reference
    computes the mean error from a single pixel."""
    random = np.random.RandomState(0)
    weight, means = random.randn(8, 4 // groups, 3, 3), random.randn(4)
    levels, scales = quantization.quantized(weight, 0, 7)
    assert np.abs(levels).max() == 63
    expected = [
        np.sum((levels * scales - weight)[i] * means[i // (8 // groups) * (4 // groups) :][: 4 // groups, None, None])
        for i in range(8)
    ]
    layer = quantization.Layer("x", "w", "b", 0, groups)
    np.testing.assert_allclose(_mean_error(layer, weight, means, 7), expected, rtol=1e-6)
    layer = quantization.Layer("x", "w", "b", 1, 1)
    weight, means = random.randn(5, 8), random.randn(5)
    levels, scales = quantization.quantized(weight, 1, 8)
    expected = means @ (levels * scales - weight)
    np.testing.assert_allclose(_mean_error(layer, weight, means, 8), expected, rtol=1e-6)


def write_sorted(root, data_format, count):
    """Write a training split of three classes, sorted by class, and return its labels in stored order. The color of an
    image is its label."""
    sizes = []
    for label in range(3):
        for i in range(count):
            path = root / f"train/{label}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (100 * label,) * 3).save(path)
            sizes.append((path, label))
    encoded = [(path.read_bytes(), label) for path, label in sizes]
    if data_format == "filelist":
        (root / "train.txt").write_text("".join(f"{path.relative_to(root)} {label}\n" for path, label in sizes))
    elif data_format == "lmdb":
        data_files.write_lmdb(root / "train_lmdb", encoded)
    elif data_format == "parquet":
        data_files.write_parquet(root / "train-00000-of-00001.parquet", encoded)
    elif data_format in SINGLE_FILE:
        with SINGLE_FILE[data_format](str(root), "train") as writer:
            writer.write(encoded)
            writer.finish()
    elif data_format in SHARDED:
        name = {"tfrecord": "train-00000-of-00001", "webdataset": "train-000000.tar"}[data_format]
        with SHARDED[data_format](str(root / name)) as write:
            for number, (image, label) in enumerate(encoded):
                write(number, image, "png", label)
    if data_format not in FILES:
        shutil.rmtree(root / "train")


@pytest.mark.parametrize("data_format", data_files.ALL)
def test_calibration_images_are_drawn_evenly(checkpoint, tmp_path, data_format):
    """Regression test: of record files, the first images were used, which were all in one class if the records were
    sorted."""
    write_sorted(tmp_path, data_format, 30)
    drawn, available = calibration.draw(tmp_path, 9)
    assert (len(drawn), available) == (9, 90)
    assert drawn == calibration.draw(tmp_path, 9)[0]
    description = networks.load_checkpoint(checkpoint, uint8=True).description
    batches = list(calibration._batches(description, tmp_path, drawn))
    labels = [label for _, of_batch in batches for label in of_batch]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2] and labels != sorted(labels)
    images = np.concatenate([batch for batch, _ in batches])
    np.testing.assert_array_equal(images, np.array(labels, np.uint8)[:, None, None, None] * 100 + 0 * images)
    drawn, _ = calibration.draw(tmp_path, 500)
    assert sorted(image.name for image in drawn) == sorted(i.name for i in DataRoot(tmp_path).listed(Mode.TRAIN))


def test_images_are_drawn_from_all_classes_if_classes_alternate(tmp_path):
    """Every tenth image would be in the same class."""
    with SINGLE_FILE["recordio"](str(tmp_path), "train") as writer:
        writer.write([(b"image", i % 10) for i in range(500)])
        writer.finish()
    drawn, _ = calibration.draw(tmp_path, 50)
    assert len({image.name for image in drawn}) == 50
    assert {read_image(image)[1] for image in drawn} == {*range(10)}


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"no image", "is not in an image format that DALI supports"), (None, r"cannot be read \(No such file .*\)")],
)
def test_calibration_image_that_cannot_be_decoded_is_an_error(checkpoint, photos, tmp_path, content, problem):
    shutil.copytree(photos, tmp_path / "photos")
    path = tmp_path / "photos/train/class1/01.jpg"
    drawn, _ = calibration.draw(tmp_path / "photos", 30)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    description = networks.load_checkpoint(checkpoint).description
    with pytest.raises(UsageError, match=f"^--calibrate {tmp_path}/photos: {path}: {problem}; repair it, or list all"):
        list(calibration._batches(description, tmp_path / "photos", drawn))


def test_calibration_without_training_images_is_an_error(tmp_path):
    (tmp_path / "train/a").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"--calibrate {tmp_path}: the training split contains no images; add images"):
        calibration.draw(tmp_path, 9)


def test_calibration_images_are_not_augmented(checkpoint, photos, capsys):
    """The last batch is shortened if fewer images are needed."""
    network = networks.load_checkpoint(checkpoint)
    capsys.readouterr()
    drawn, _ = calibration.draw(photos, 11)
    sizes = [(len(batch), len(labels)) for batch, labels in calibration._batches(network.description, photos, drawn)]
    assert sizes == [(8, 8), (3, 3)]
    drawn, _ = calibration.draw(photos, 16)
    assert [len(batch) for batch, _ in calibration._batches(network.description, photos, drawn)] == [8, 8]
    uint8 = network.description | {"input": network.description["input"] | {"dtype": "uint8", "layout": "NHWC"}}
    uint8["input"]["shape"] = [None, 32, 32, 3]
    [pixels] = training_images(uint8, photos, 2)
    assert (pixels.shape, pixels.dtype) == ((2, 32, 32, 3), np.uint8) and 50 < pixels.mean() < 200
    images = np.concatenate(training_images(network.description, photos, 99))
    paths = photos.glob("train/*/*.jpg")
    expected = np.concatenate([preprocessing.model_input(path, network.description) for path in paths])
    differences = abs(images[:, None] - expected).mean(axis=(2, 3, 4))  # images are in random order
    assert sorted(differences.argmin(axis=1)) == list(range(30))
    assert differences.min(axis=1).max() < 0.02
    assert capsys.readouterr().out == ""


def test_ranges_and_mean_errors_of_training_images(checkpoint, photos, monkeypatch):
    """The first activation is the images. The data set has only 30 of the requested images."""
    network = networks.load_checkpoint(checkpoint, fold=True)
    names, layers = list(quantization.activations(network.program)), quantization.layers(network.program)
    before, calls = [np.array(network.parameter(layer.bias)) for layer in layers], []
    batches = training_images(network.description, photos, 11)
    monkeypatch.setattr(calibration, "_mean_error", lambda *args: calls.append(args) or 0.25)
    monkeypatch.setattr(calibration, "_batches", lambda *args: calls.append(args) or [(b, [2]) for b in batches])
    without_bias = layers[-1]._replace(bias=None)
    monkeypatch.setattr(quantization, "layers", lambda program: [*layers[:-1], without_bias])
    assert calibration.quantize(network, 7, photos, 99) == (30, 30, 1)
    for layer, bias in zip(layers, before, strict=True):
        expected = bias - 0.25 if layer is not layers[-1] else bias
        np.testing.assert_allclose(network.parameter(layer.bias), expected, rtol=1e-5, atol=1e-6)
    assert calls.pop(0) == (network.description, photos, calibration.draw(photos, 99)[0])
    assert [call[0] for call in calls] == layers[:-1] and {call[3] for call in calls} == {7}
    images = np.concatenate(batches)
    assert names[0] == layers[0].input == "images"
    np.testing.assert_allclose(calls[0][2], images.mean(axis=(0, 2, 3)), rtol=1e-4)
    np.testing.assert_array_equal(calls[0][1], network.parameter(layers[0].weight))
    ranges = [network.parameter(quantization.range_name(i)).item() for i in range(len(names))]
    assert ranges[0] == np.float32(histogram(*batches).range())
    assert len(set(ranges)) > 2


def test_unusual_activations_of_an_image_are_ignored(checkpoint, photos, monkeypatch, capsys):
    """The first activation is the images. The first batch does not determine which activations are usual."""

    def quantize(*batches):
        network = networks.load_checkpoint(checkpoint, fold=True)
        [layer, *_] = quantization.layers(network.program)
        monkeypatch.setattr(calibration, "_batches", lambda *args: [(batch, [0]) for batch in batches])
        capsys.readouterr()
        count, *_ = calibration.quantize(network, 7, photos, sum(map(len, batches)))
        parameters = [*quantization.ranges(network.program), layer.bias]
        return count, np.concatenate([network.parameter(name) for name in parameters]), capsys.readouterr().err

    first, second = training_images(networks.load_checkpoint(checkpoint).description, photos, 11)
    count, expected, log = quantize(first, second)
    assert (count, log) == (11, "")
    bright = np.concatenate([second[:1], second[1:2] * 1000, second[1:]])
    count, actual, log = quantize(first, bright)
    assert count == 12
    np.testing.assert_array_equal(actual, expected)
    assert log == (
        f"warning: --calibrate {photos}: ignoring tensors of 1 of 12 images, because the largest activation in these "
        "tensors exceeds 10 times its median over the images\n"
    )
    _, _, log = quantize(first, second[:1] * 1000)  # the last batch has a single image
    assert "ignoring tensors of 1 of 9 images" in log
    count, _, log = quantize(first[:5] / 1000, first, second)
    assert (count, log) == (16, "")
    _, ranges, _ = quantize(0 * first, second)  # an activation that is usually zero
    assert ranges[0] == np.float32(histogram(second).range())


def test_calibration_of_a_network_that_overflows_is_an_error(checkpoint, photos):
    network = networks.load_checkpoint(checkpoint, fold=True)
    name = quantization.layers(network.program)[0].weight
    calibration._set(network, name, network.parameter(name) * 1e38)
    with pytest.raises(UsageError, match=f"--calibrate {photos}: activations of the network are not finite; use a dif"):
        calibration.quantize(network, 7, photos, 8)
