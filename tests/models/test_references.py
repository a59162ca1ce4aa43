"""Logits and gradients of networks, compared with timm and torchvision networks that have the same weights."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import static

from helpers import logits_with_generated_weights
from paddle_resnet.models import MODELS


@pytest.fixture
def float64():
    """Use float64. In float32, a different order of summation changes the sign of some ReLU6 inputs, and dozens of
    layers amplify the difference."""
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


@pytest.fixture
def reference(once):
    """Return a function that takes the name of a network and returns the arrays that reference_networks.py computes for
    it."""
    for package in ("timm", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")

    def reference(arch):
        def compute(folder):
            script = Path(__file__).with_name("reference_networks.py")
            subprocess.run([sys.executable, script, folder / "arrays.npz", arch], check=True)

        return np.load(once(f"reference_{arch}", compute) / "arrays.npz")

    return reference


@pytest.mark.parametrize("layout", [pytest.param("NCHW", marks=pytest.mark.soak), "NHWC"])
@pytest.mark.parametrize(
    "arch",
    [
        *("EfficientNet_Lite0", "EfficientNet_Lite1", "EfficientNet_Lite2"),
        *("MobileNetV3_Large", "MobileNetV3_Small", "GhostNet", "PPLCNet_x1_0", "PPHGNetV2_B0"),
    ],
)
def test_logits_and_gradients_equal_those_of_the_reference(reference, float64, arch, layout):
    arrays = reference(arch)
    images = arrays["images"] if layout == "NCHW" else arrays["images"].transpose(0, 2, 3, 1)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        out = MODELS[arch](data_format=layout)(static.data("data", [None, *images.shape[1:]], dtype="float64"))
        evaluation = main.clone(for_test=True)
        loss = paddle.mean(out * static.data("slopes", [None, 1000], dtype="float64"))
        gradients = [gradient for _, gradient in static.append_backward(loss)]
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    parameters = main.all_parameters()
    assert len(parameters) == sum(name.startswith("weight.") for name in arrays)
    for i, parameter in enumerate(parameters):
        assert tuple(parameter.shape) == arrays[f"weight.{i}"].shape
        static.global_scope().find_var(parameter.name).get_tensor().set(arrays[f"weight.{i}"], exe.place)
    found = exe.run(evaluation, {"data": images}, [out])
    found += exe.run(main, {"data": images, "slopes": arrays["slopes"]}, [out, *gradients])
    assert len(gradients) == sum(name.startswith("gradient.") for name in arrays)
    names = ["evaluation", "training", *(f"gradient.{i}" for i in range(len(gradients)))]
    largest = 0
    for name, ours in zip(names, found, strict=True):
        size = np.abs(arrays[name]).max()
        if size > 1e-12:  # smaller gradients consist of rounding errors
            largest = max(largest, np.abs(ours - arrays[name]).max() / size)
        np.testing.assert_allclose(ours, arrays[name], atol=1e-5 * size + 1e-14, rtol=0, err_msg=name)
    print(f"{arch} {layout}: largest difference, relative to the largest value of its array: {largest:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("EfficientNet_Lite0", (1.82573965, -2.22593234)),
        ("MobileNetV3_Large", (4.10973247, 2.37545175)),
        ("GhostNet", (-1008.51833, 524.093724)),
    ],
)
def test_logits_equal_values_recorded_after_the_comparison(float64, arch, expected):
    logits = logits_with_generated_weights(MODELS[arch])
    np.testing.assert_allclose(logits[0, :2], expected, rtol=1e-6)
