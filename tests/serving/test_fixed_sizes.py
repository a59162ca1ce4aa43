from contextlib import nullcontext

import numpy as np
import paddle
import pytest

from paddle_resnet import predict
from paddle_resnet.native import build as native
from paddle_resnet.program import compile_prog
from paddle_resnet.serving import fixed_sizes, inference, networks, preprocessing
from paddle_resnet.serving.fixed_sizes import Steps
from paddle_resnet.serving.model import Model
from utils import logger
from utils.errors import UsageError


@pytest.fixture
def photo_paths(photos):
    return sorted(map(str, (photos / "val").glob("*/*.jpg")))


def fast_model(checkpoint, sizes, tta="none"):
    network = networks.load_fast(checkpoint, "float32", "cpu", tta=tta)
    assert not any(op.type == "conv2d" for op in network.program.global_block().ops)
    steps = Steps(network, sizes)
    return Model("captured step", network.description, lambda images: [steps(images)], steps=steps)


@pytest.mark.parametrize("tta", ["none", "flip"])
@pytest.mark.parametrize("shape", ["3,32,32", "4,48,32"])
def test_fast_network_matches_reference(run_train, tmp_path, photo_paths, shape, tta):
    run_train("--image-shape", shape)
    checkpoint = tmp_path / "output/Tiny/0"
    expected = predict.predict(inference.open_model(checkpoint, "cpu", tta=tta), photo_paths)
    model = fast_model(checkpoint, [8], tta)
    assert inference._mirrored(model, tta) is model  # the network already averages the probabilities
    actual = predict.predict(model, photo_paths, batch_size=8)
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
    np.testing.assert_array_equal(reference.submit(image.astype("float64")), expected)


@pytest.mark.parametrize(
    ("capability", "default", "bfloat16"),
    [((6, 1), "float32", False), ((7, 0), "float16", False), ((8, 0), "float16", True)],
)
def test_precision_depends_on_compute_capability(monkeypatch, capability, default, bfloat16):
    monkeypatch.setattr(inference.processes, "local_gpu", lambda: 3)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", {3: capability}.get)
    assert inference.resolve_precision(None, "gpu") == default
    assert inference.resolve_precision("float32", "gpu") == "float32"
    assert inference.resolve_precision("float16", "gpu") == "float16"
    problem = "requires compute capability 8.0, but this GPU has {}.{}; use --precision float16".format(*capability)
    with nullcontext() if bfloat16 else pytest.raises(UsageError, match=f"^--precision bfloat16: {problem}$"):
        assert inference.resolve_precision("bfloat16", "gpu") == "bfloat16"


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("float16", "--precision float16: requires a GPU; use --precision float32"),
        ("bfloat16", "--precision bfloat16: requires a GPU; use --precision float32"),
        ("int8", "--precision int8: not supported with a checkpoint; export it with --int8"),
    ],
)
def test_precision_that_a_checkpoint_does_not_support_on_a_cpu_is_an_error(precision, message):
    with pytest.raises(UsageError, match=message):
        inference.resolve_precision(precision, "cpu")


def test_missing_kernels_never_change_an_explicit_precision(checkpoint, monkeypatch, capsys):
    def unavailable(*arguments):
        raise native.Unavailable("no compiler")

    reference = networks.load_checkpoint(checkpoint)
    monkeypatch.setattr(inference, "resolve_precision", lambda precision, device: precision or "float16")
    monkeypatch.setattr(networks, "load_fast", unavailable)
    monkeypatch.setattr(networks, "load_checkpoint", lambda *arguments, **options: reference)
    with pytest.raises(UsageError, match=r"--precision bfloat16: custom kernels are unavailable \(no compiler\); fix"):
        inference.open_checkpoint(checkpoint, "gpu", precision="bfloat16")
    for precision in ("float32", None):
        model = inference.open_checkpoint(checkpoint, "gpu", precision=precision)
        assert (model.engine, model.precision) == ("Executor", "float32")
    assert "warning: --precision float32: custom kernels are unavailable (no compiler)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_missing_onnx_package_is_replaced_by_the_executor(checkpoint, monkeypatch, capsys, name):
    def missing(package):
        if package == name:
            raise UsageError(f"{package}: not installed")

    monkeypatch.setattr(inference.onnx_writer, "require", missing)
    model = inference.open_checkpoint(checkpoint, "cpu")
    assert (model.engine, model.precision) == ("Executor", "float32")
    assert f"onnxruntime: not used, although it is faster than Paddle on a CPU: {name}: not" in capsys.readouterr().err


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
    first = model.submit(images[:2])
    assert model.steps._step(2)._last is first
    np.testing.assert_allclose(first, expected[:2], atol=1e-6)
    for _ in range(2):
        np.testing.assert_allclose(model.submit(images[2:4]), expected[2:4], atol=1e-6)
    np.testing.assert_allclose(first, expected[:2], atol=1e-6)
