import numpy as np
import pytest

from paddle_resnet.program import compile_prog
from paddle_resnet.serving import fixed_sizes, image_files, inference, networks, preprocessing
from paddle_resnet.serving.fixed_sizes import Steps
from paddle_resnet.serving.model import Model
from paddle_resnet.utils import logger


def fast_model(checkpoint, sizes, tta="none"):
    network = networks.load_fast(checkpoint, "float32", "cpu", tta=tta)
    assert not any(op.type == "conv2d" for op in network.program.global_block().ops)
    steps = Steps(network, sizes)
    return Model("captured step", network.description, lambda images: [steps(images)], steps=steps)


@pytest.mark.parametrize(
    ("shape", "tta"),
    [
        pytest.param("3,32,32", "none", marks=pytest.mark.slow),
        ("4,48,32", "flip"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("3,32,32", "flip"), ("4,48,32", "none"))),
    ],
)
def test_fast_network_matches_reference(run_train, tmp_path, photo_paths, shape, tta):
    run_train("--image-shape", shape, "--run-scope", "train_only")
    checkpoint = tmp_path / "output/Tiny/0"
    expected = image_files.predict(inference.open_model(checkpoint, "cpu", tta=tta), photo_paths)
    model = fast_model(checkpoint, [8], tta)
    assert inference._mirrored(model, tta) is model  # the network already averages the probabilities
    actual = image_files.predict(model, photo_paths, batch_size=8)
    for (path, probabilities, _), (other, reference, _) in zip(actual, expected, strict=True):
        assert path == other
        np.testing.assert_allclose(probabilities, reference, atol=1e-5)


def test_preprocessing_module_returns_input_of_network(checkpoint, photo_paths):
    model, reference = fast_model(checkpoint, [1]), inference.open_model(checkpoint, "cpu")
    image = preprocessing.model_input(photo_paths[0], model.description)
    assert image.dtype == np.float32 and image.shape == (1, 32, 32, 3)
    expected = reference.run(preprocessing.model_input(photo_paths[0], reference.description))
    np.testing.assert_allclose(model.run(image), expected, atol=1e-5)
    image = preprocessing.model_input(photo_paths[0], reference.description)
    np.testing.assert_array_equal(*reference.submit(image.astype("float64")), expected)


@pytest.mark.slow
def test_batches_of_any_size_are_padded_or_split(checkpoint, monkeypatch, capsys):
    def compile_and_log(*arguments, **options):
        logger.info("compiling")
        logger.warn("slow")
        return compile_prog(*arguments, **options)

    monkeypatch.setattr(fixed_sizes, "compile_prog", compile_and_log)
    model = fast_model(checkpoint, [4, 2])
    images = np.random.default_rng(0).normal(size=(11, *model.description["input"]["shape"][1:])).astype(np.float32)
    expected = np.concatenate([model.run(image[None]) for image in images])
    assert capsys.readouterr() == ("", "warning: slow\n")  # stdout is reserved for results
    for count in (11, 4, 3, 1):
        np.testing.assert_allclose(model.run(images[:count]), expected[:count], atol=1e-6)
    sizes = [len(model.steps._step(count).host_images()) for count in (1, 2, 3, 4)]
    assert sizes == [2, 2, 4, 4]
    buffer = model.host_images(3)
    previous, waits = buffer.copy(), []

    class Result:
        """A fake result of the previous batch, whose buffer the device may still be reading."""

        def __array__(self, dtype=None, copy=None):
            waits.append(buffer.copy())
            return np.zeros(1)

    model.steps._step(3)._last = Result()
    np.testing.assert_allclose(model.run(images[4:7]), expected[4:7], atol=1e-6)
    np.testing.assert_array_equal(waits, [previous])
    assert not np.array_equal(buffer, previous)
    buffer[:] = images[:3]
    np.testing.assert_allclose(model.run(buffer), expected[:3], atol=1e-6)
    [first] = model.submit(images[:2])
    assert model.steps._step(2)._last is first
    np.testing.assert_allclose(first, expected[:2], atol=1e-6)
    for _ in range(2):
        np.testing.assert_allclose(*model.submit(images[2:4]), expected[2:4], atol=1e-6)
    np.testing.assert_allclose(first, expected[:2], atol=1e-6)
