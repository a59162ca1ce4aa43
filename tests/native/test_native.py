"""Compare the custom operators with their formulas in float64. The tests run on the CPU, on a GPU that
emulation/driver.cc emulates, and, with all dtypes, on a real GPU (marker gpu)."""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base import core
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from conftest import ROOT
from paddle_resnet import resolution
from paddle_resnet.native import build as native
from paddle_resnet.settings import parsing
from paddle_resnet.step import host_metrics
from paddle_resnet.utils.errors import UsageError

EMULATION = ROOT / "tests/emulation"
PREFIX = ""  # prefix of the operator names
EPSILON = 1e-5
SHAPES = [(4, 7, 7, 64), (2, 5, 3, 24), (3, 1, 1, 8), (1, 1, 1, 8), (2, 3, 5, 296)]
# This shape has so many rows that the sum over all blocks requires two steps.
EMULATED_SHAPE = (2, 25, 25, 96)
# In half precision, these channels can be divided into 8-byte vectors, but not into 16-byte vectors.
NARROW_SHAPES = [(4, 7, 7, 12), (2, 5, 3, 36)]
GPU_SHAPES = [*SHAPES, *NARROW_SHAPES, (8, 28, 28, 100), (16, 7, 7, 2048), (32, 28, 28, 128)]
# Each tolerance is half a unit in the last place for results between 1 and 16, plus a margin for rounding errors in
# sums.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
DTYPES = (*TOLERANCE,)
TOLERANCE["products in TF32"] = 1e-4  # for rounded factors; factors that are not rounded correctly cause errors of 1e-3
UNIT = {"float32": 0, "float16": 2**-10, "bfloat16": 2**-7}  # unit in the last place (ulp) of the value 1
IN_FLOAT32 = [(where, "float32", shape) for where in ("cpu", "emulated") for shape in SHAPES]
IN_FLOAT32 += [("emulated", "float32", EMULATED_SHAPE)]
IN_FLOAT32 += [pytest.param("gpu", "float32", shape, marks=pytest.mark.gpu) for shape in GPU_SHAPES]
CASES = IN_FLOAT32 + [("emulated", "bfloat16", shape) for shape in [*SHAPES, *NARROW_SHAPES]]
CASES += [
    pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu)
    for dtype in ("float16", "bfloat16")
    for shape in GPU_SHAPES
]

NARROW = [("cpu", "float32"), ("emulated", "float32"), ("emulated", "bfloat16")]


@pytest.fixture(scope="module")
def emulated_library(once, pytestconfig):
    """Build the operators for the emulated GPU and return their library. Later sessions use the same library until a
    source file or Paddle changes."""
    if paddle.is_compiled_with_cuda():
        pytest.skip("the emulated driver would replace CUDA's driver")
    sources = [path.read_text() for path in (EMULATION / "driver.cc", EMULATION / "operators.cc", Path(__file__))]
    key = native._key(
        native._files(native.SOURCES, native.KERNEL_FILES), native._operators_file().name, *native._compiler(), *sources
    )
    built = pytestconfig.cache.mkdir(f"emulation_{paddle.__version__}") / key

    def make(_):
        if built.exists():
            return
        for outdated in built.parent.iterdir():
            shutil.rmtree(outdated)
        folder = built.with_suffix(".partial")
        folder.mkdir()
        (folder / "kernels.cu").write_text(native._kernel_source())
        driver = folder / "libcuda.so.1"
        options = [f'-DKERNEL_SOURCE="{folder}/kernels.cu"', "-std=c++17", "-O0", "-fPIC", "-shared"]
        options.append(f"-Wl,-soname,{driver.name}")
        subprocess.run([*native._compiler(), *options, EMULATION / "driver.cc", "-o", driver], check=True)
        # Without optimization, compilation takes half the time.
        optimization = {EMULATION / "operators.cc": "-O0", native.SOURCES / "reference.cc": "-O0"}
        native._compile_operators(folder / "operators.so", optimization)
        folder.rename(built)

    once("emulated", make)
    driver, library = built / "libcuda.so.1", built / "operators.so"
    ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)  # the operators load this library by name
    load_op_meta_info_and_register_op(str(library))
    loaded = ctypes.CDLL(str(library))
    loaded.paddle_resnet_set_image(b"emulated", ctypes.c_size_t(8))
    return loaded


@pytest.fixture
def device(request, monkeypatch):
    """Select the CPU or the GPU in eager mode and load the operators."""
    where = request.node.callspec.params["where"]
    if where == "emulated":
        request.getfixturevalue("emulated_library")
        monkeypatch.setattr(sys.modules[__name__], "PREFIX", "emulated_")
    is_gpu = where == "gpu"
    capability = paddle.device.cuda.get_device_capability(0) if is_gpu else None
    if native.missing(capability) is not None:
        pytest.skip(native.missing(capability))
    native.load(capability)
    with paddle.base.dygraph.guard(paddle.CUDAPlace(0) if is_gpu else paddle.CPUPlace()):
        yield


class Random:
    def __init__(self, dtype):
        self._state, self._dtype = np.random.RandomState(0), dtype

    def images(self, shape, offset=0):
        return paddle.to_tensor((self._state.randn(*shape) + offset).astype("float32")).astype(self._dtype)

    def channels(self, count):
        return paddle.to_tensor(self._state.uniform(0.5, 1.5, count).astype("float32"))


def wide(tensor):
    return tensor.astype("float32").numpy().astype(np.float64)


def close(actual, expected, dtype, size=1.0):
    """Compare results with a tolerance proportional to the largest expected value, or to `size` if it is larger. If the
    results are small differences of large values, `size` is the magnitude of these values."""
    tolerance = TOLERANCE[dtype] * max(size, np.abs(expected).max())
    np.testing.assert_allclose(wide(actual), expected, rtol=0, atol=tolerance)


def same(left, right):
    return all(np.array_equal(wide(a), wide(b)) for a, b in zip(left, right, strict=True))


def rounded_to_tf32(tensor):
    """Round to the nearest number with 10 bits after the first one; ties are rounded away from zero."""
    return ((tensor.numpy().view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)


def run(name, *args):
    result = core.eager._run_custom_op(PREFIX + name, *args)
    return result if isinstance(result, list | tuple) else [result]


def normalize(x, scale, bias):
    """Return the output, the mean, the biased variance and the normalized input of batch normalization."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    normalized = (x - mean) / np.sqrt(variance + EPSILON)
    return normalized * scale + bias, mean, variance, normalized


def gradients(dy, normalized, variance, scale):
    """Return the gradients of input, scale and bias according to Ioffe and Szegedy, arXiv:1502.03167, section 3."""
    dscale, dbias, rows = (dy * normalized).sum((0, 1, 2)), dy.sum((0, 1, 2)), dy[..., 0].size
    dx = scale / np.sqrt(variance + EPSILON) * (dy - dbias / rows - normalized * dscale / rows)
    return dx, dscale, dbias


def check_gradients(results, g, normalized, variance, scale, dtype):
    """Compare gradients with their formulas. `g` is the gradient with respect to the activation's input. The reference
    rounds `g` as the kernels do, so that the sums agree in all types."""
    dx, dscale, dbias = gradients(g, normalized, variance, scale)
    close(results[0], dx, dtype, size=np.abs(g).max() * (scale / np.sqrt(variance + EPSILON)).max())
    rows = g[..., 0].size
    close(results[-2], dscale, "float32", size=rows**0.5 * 5)
    close(results[-1], dbias, "float32", size=rows**0.5 * 5)


# {name: (function, derivative, points where the derivative is discontinuous)}
ACTIVATIONS = {
    "": (lambda v: v, np.ones_like, []),
    "relu": (lambda v: np.maximum(v, 0), lambda v: v > 0, [0]),
    "relu6": (lambda v: v.clip(0, 6), lambda v: (v > 0) & (v < 6), [0, 6]),
    "hard_swish": (
        lambda v: v * (v + 3).clip(0, 6) / 6,
        lambda v: np.where(v < -3, 0, np.where(v > 3, 1, v / 3 + 0.5)),
        [-3, 3],
    ),
    "silu": (lambda v: v / (1 + np.exp(-v)), lambda v: (1 + np.exp(-v) + v * np.exp(-v)) / (1 + np.exp(-v)) ** 2, []),
    "mish": (
        lambda v: v * np.tanh(np.logaddexp(0, v)),
        lambda v: np.tanh(np.logaddexp(0, v)) + v / np.cosh(np.logaddexp(0, v)) ** 2 / (1 + np.exp(-v)),
        [],
    ),
}


def with_activations(*others):
    """Combine each of CASES with no activation, with ReLU and with each of `others`. Kernels for the remaining
    activations differ only in one function, so these activations are combined only with the first case of each device
    and type."""
    seen = set()
    for case in CASES:
        values, marks = getattr(case, "values", case), getattr(case, "marks", ())
        is_first = values[:2] not in seen
        seen.add(values[:2])
        for name in (*(ACTIVATIONS if is_first else ("", "relu")), *others):
            yield pytest.param(name, *values, marks=marks)


@pytest.mark.parametrize("activation, where, dtype, shape", with_activations())
def test_bn_act(device, where, dtype, shape, activation):
    random, channels = Random(dtype), shape[-1]
    x, dy = random.images(shape, offset=np.arange(channels) % 7 - 3), random.images(shape)
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    scale = 4 * scale  # larger scales produce values on both sides of each discontinuity
    old_mean, old_variance = wide(mean), wide(variance)
    function, derivative, bends = ACTIVATIONS[activation]
    y, coefficients = run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, activation)[:2]
    expected, batch_mean, batch_variance, normalized = normalize(wide(x), wide(scale), wide(bias))
    rows = x.size // channels
    # With a single row, the variance is 0, so the output is a small difference of large values.
    close(y, function(expected), dtype, size=4 / EPSILON**0.5 if rows == 1 else 1)
    close(mean, 0.9 * old_mean + 0.1 * batch_mean, "float32")
    close(variance, 0.9 * old_variance + 0.1 * batch_variance * rows / max(1, rows - 1), "float32")
    assert same([y, coefficients], run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, activation)[:2])
    for bend in bends:  # gradients near a discontinuity are set to 0, because rounding decides on which side a value is
        dy = dy * paddle.to_tensor((np.abs(expected - bend) > 1e-3).astype("float32")).astype(dtype)
    results = run("native_bn_act_backward", x, dy, coefficients, None, activation)
    g = wide(dy) * derivative(expected)
    check_gradients(results, g, normalized, batch_variance, wide(scale), dtype)
    assert same(results, run("native_bn_act_backward", x, dy, coefficients, None, activation))


@pytest.mark.parametrize("summands", [1, 2])
@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_bn_add_relu(device, where, dtype, shape, summands):
    random, channels = Random(dtype), shape[-1]
    x, z, *dy = (random.images(shape) for _ in range(2 + summands))
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    y, coefficients, mask = run("native_bn_add_relu", x, z, scale, bias, mean, variance, 0.9, EPSILON)[:3]
    expected, _, batch_variance, normalized = normalize(wide(x), wide(scale), wide(bias))
    close(y, np.maximum(expected + wide(z), 0), dtype, size=1 / EPSILON**0.5 if x.size == channels else 1)
    results = run("native_bn_add_relu_backward", x, dy, coefficients, mask, None)
    close(results[1], sum(wide(d) for d in dy) * (wide(y) > 0), dtype)
    check_gradients(results, wide(results[1]), normalized, batch_variance, wide(scale), dtype)
    assert same(results, run("native_bn_add_relu_backward", x, dy, coefficients, mask, None))


def with_additions():
    """Combine each of CASES with two of the four kernels, and the second case of each device and type with all four."""
    counts = Counter()
    for case in CASES:
        values, marks = getattr(case, "values", case), getattr(case, "marks", ())
        counts[values[:2]] += 1
        others = [("linear", 2), ("mish", 1)] if counts[values[:2]] == 2 else []
        for kernel in (("linear", 1), ("mish", 2), *others):
            yield pytest.param(*kernel, *values, marks=marks)


@pytest.mark.parametrize("activation, summands, where, dtype, shape", with_additions())
def test_bn_add_act(device, where, dtype, shape, summands, activation):
    random, channels = Random(dtype), shape[-1]
    x, z, *dy = (random.images(shape) for _ in range(2 + summands))
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    function, derivative, _ = ACTIVATIONS["" if activation == "linear" else activation]
    y, coefficients = run("native_bn_add_act", x, z, scale, bias, mean, variance, 0.9, EPSILON, activation)[:2]
    expected, _, batch_variance, normalized = normalize(wide(x), wide(scale), wide(bias))
    value, size = expected + wide(z), 1 / EPSILON**0.5 if x.size == channels else 1
    close(y, function(value), dtype, size=size)
    results = run("native_bn_add_act_backward", x, z, dy, coefficients, None, activation)
    close(results[1], sum(wide(d) for d in dy) * derivative(value), dtype, size=size)
    check_gradients(results, wide(results[1]), normalized, batch_variance, wide(scale), dtype)
    assert same(results, run("native_bn_add_act_backward", x, z, dy, coefficients, None, activation))


@pytest.mark.parametrize("where, dtype, shape", IN_FLOAT32)
def test_variance_of_channel_far_from_zero_is_accurate(device, where, dtype, shape):
    """In float32, rounding errors dominate E[x^2] - E[x]^2 if the mean is 1000 standard deviations away from zero."""
    random, channels = Random(dtype), shape[-1]
    x = random.images(shape, offset=1000)
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    y = run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, "")[0]
    size = wide(scale).max() / np.sqrt(wide(x).var((0, 1, 2)).min() + EPSILON)
    np.testing.assert_allclose(wide(y), normalize(wide(x), wide(scale), wide(bias))[0], atol=2e-3 * max(1, size))


@pytest.mark.parametrize("far", [pytest.param(30, marks=pytest.mark.soak), 300])
@pytest.mark.parametrize("where, dtype, shape", IN_FLOAT32)
def test_outlier_pixel_does_not_reduce_accuracy_of_variance(device, where, dtype, shape, far):
    """The operator subtracts a shift from all values before it sums their squares. The last pixel is an outlier, which
    must not affect the shift."""
    x = Random(dtype).images(shape).numpy()
    x[-1, -1, -1] = far
    x = paddle.to_tensor(x)
    scale, bias, mean, variance = (Random(dtype).channels(shape[-1]) for _ in range(4))
    coefficients = run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, "")[1]
    expected = 1 / np.sqrt(wide(x).var((0, 1, 2)) + EPSILON)
    np.testing.assert_allclose(wide(coefficients)[3], expected, rtol=2e-5)


@pytest.mark.parametrize("where", ["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_parameter_gradients_are_written_to_existing_memory(device, where):
    random, shape = Random("float32"), (4, 7, 7, 64)
    x, z, dy = (random.images(shape) for _ in range(3))
    channels = [random.channels(64) for _ in range(4)]
    _, plain, *_ = run("native_bn_act", x, *channels, 0.9, EPSILON, "relu")
    _, added, mask, *_ = run("native_bn_add_relu", x, z, *channels, 0.9, EPSILON)
    for name, inputs, attrs in (
        ("native_bn_act_backward", [x, dy, plain], ["relu"]),
        ("native_bn_add_relu_backward", [x, [dy], added, mask], []),
    ):
        memory = [paddle.zeros([64]), paddle.zeros([64])]
        expected = run(name, *inputs, None, *attrs)[-2:]
        run(name, *inputs, memory, *attrs)
        assert same(memory, expected)


@pytest.mark.parametrize("where", ["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_async_copies(device, request, where):
    """tests/step/test_host_metrics.py tests asynchronous copies in programs."""
    library = request.getfixturevalue("emulated_library") if where == "emulated" else native.register()
    values = [paddle.arange(5, dtype="float32"), paddle.to_tensor([7], "int64")]
    run("native_async_copy", values)
    library.paddle_resnet_async_copies.restype = ctypes.c_uint64
    number = library.paddle_resnet_async_copies() - 1
    for i, value in enumerate(values):
        handle = host_metrics.AsyncCopy(library, number, i, SimpleNamespace(dtype=value.dtype, shape=value.shape))
        assert np.array_equal(np.asarray(handle), value.numpy())


@pytest.mark.parametrize(
    "activation, where, dtype, shape",
    [*with_activations("add_relu", "add_linear", "add_mish"), ("relu", "emulated", "float32", (1, 4, 25, 1024))],
)
def test_bn_inference(device, where, dtype, shape, activation):
    with_addition, activation = activation.startswith("add_"), activation.removeprefix("add_")
    function = ACTIVATIONS["" if activation == "linear" else activation][0]
    random = Random(dtype)
    x, z = random.images(shape), random.images(shape) if with_addition else None
    scale, bias, mean, variance = (random.channels(shape[-1]) for _ in range(4))
    scale = 4 * scale
    y = run("native_bn_inference", x, scale, bias, mean, variance, z, EPSILON, activation)[0]
    expected = (wide(x) - wide(mean)) / np.sqrt(wide(variance) + EPSILON) * wide(scale) + wide(bias)
    expected = expected + wide(z) if with_addition else expected
    close(y, function(expected), dtype)


POOLED = pytest.mark.parametrize(
    "where, dtype, shape",
    [("cpu", "float32", (2, 9, 8, 8)), ("emulated", "float32", (2, 9, 8, 8)), ("emulated", "bfloat16", (3, 17, 16, 40))]
    + [("emulated", "bfloat16", (2, 9, 8, 12))]
    + [pytest.param("gpu", dtype, (3, 17, 16, c), marks=pytest.mark.gpu) for dtype in DTYPES for c in (12, 40)],
)


@pytest.mark.parametrize("summands", [1, 2])
@pytest.mark.parametrize(
    "kernel, stride, padding, end", [(3, 2, 1, 1), (2, 2, 0, 0), (3, 1, 1, 1), (5, 3, 2, 2), (2, 1, 0, 1), (3, 2, 2, 0)]
)
@POOLED
def test_max_pool(device, where, dtype, shape, kernel, stride, padding, end, summands):
    """All values except zeros are distinct. If a window contains several zeros and no larger value, pooling selects the
    first zero."""
    random = Random(dtype)
    x = paddle.nn.functional.relu(random.images(shape).astype("float32")).astype(dtype)
    around = ((0, 0), (padding, end), (padding, end), (0, 0))
    padded = np.pad(wide(x), around, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (1, 2))[:, ::stride, ::stride]
    y, positions = run("native_max_pool", x, kernel, stride, padding, end)
    assert np.array_equal(wide(y), windows.max((-1, -2)))
    dy = [random.images(y.shape) for _ in range(summands)]
    (dx,) = run("native_max_pool_backward", dy, positions, kernel, stride, padding, *shape[1:3])
    close(dx, max_pool_gradient(wide(x), sum(wide(d) for d in dy), kernel, stride, padding), dtype)


@pytest.mark.parametrize("summands, excludes_padding", [(1, True), (2, False)])
@pytest.mark.parametrize("kernel, stride, padding", [(2, 1, 1), (2, 2, 0), (3, 2, 1), (5, 3, 2)])
@POOLED
def test_average_pool(device, where, dtype, shape, kernel, stride, padding, summands, excludes_padding):
    """The reference is Paddle's pooling in float32."""
    random = Random(dtype)
    x = random.images(shape)
    plain = x.astype("float32")
    plain.stop_gradient = False
    expected = paddle.nn.functional.avg_pool2d(
        plain, kernel, stride, padding, exclusive=excludes_padding, data_format="NHWC"
    )
    (y,) = run("native_average_pool", x, kernel, stride, padding, excludes_padding)
    close(y, wide(expected), dtype)
    dy = [random.images(y.shape) for _ in range(summands)]
    (dx,) = run("native_average_pool_backward", dy, kernel, stride, padding, excludes_padding, *shape[1:3])
    [gradient] = paddle.grad(expected, plain, sum(d.astype("float32") for d in dy))
    close(dx, wide(gradient), dtype)


@pytest.mark.parametrize(
    "kernel, stride, padding",
    [(3, 1, (1, 1)), (3, 2, (1, 1)), (5, 1, (2, 2)), (5, 2, (2, 2)), (5, 2, (3, 3)), (3, 2, (0, 1)), (5, 2, (1, 2))],
)
@pytest.mark.parametrize(
    "where, dtype, shape",
    [("cpu", "float32", (2, 9, 8, 8)), ("emulated", "float32", (2, 9, 8, 8)), ("emulated", "bfloat16", (3, 17, 15, 40))]
    + [("emulated", "float32", (2, 23, 26, 68))]  # a shape with several channel groups and many tasks per block
    + [("emulated", "bfloat16", (2, 9, 8, 12)), ("emulated", "bfloat16", (2, 9, 8, 100))]
    + [pytest.param("gpu", dtype, (3, 17, 15, c), marks=pytest.mark.gpu) for dtype in DTYPES for c in (12, 40, 100)]
    + [pytest.param("gpu", dtype, (32, 56, 56, 144), marks=pytest.mark.gpu) for dtype in DTYPES],
)
def test_depthwise_conv(device, where, dtype, shape, kernel, stride, padding):
    random, channels = Random(dtype), shape[-1]
    x, filters = random.images(shape), random.images((channels, 1, kernel, kernel))
    y = run("native_depthwise_conv", x, filters, stride, *padding)[0]
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    dy = random.images(y.shape)
    dx, dfilter = run("native_depthwise_conv_backward", x, filters, dy, None, stride, *padding)
    expected, expected_dx, expected_dfilter = depthwise_conv(wide(x), wide(filters), wide(dy), stride, padding)
    close(y, expected, dtype)
    normalized = (expected - wide(mean)) / np.sqrt(wide(variance) + EPSILON) * wide(scale) + wide(bias)
    for name in ("", "relu", "hard_swish"):
        attrs = stride, *padding, EPSILON, name
        (fused,) = run("native_depthwise_conv_bn_inference", x, filters, scale, bias, mean, variance, *attrs)
        close(fused, ACTIVATIONS[name][0](normalized), dtype)
    close(dx, expected_dx, dtype)
    close(dfilter, expected_dfilter, dtype, size=y[..., 0].size ** 0.5 * 5)
    again = run("native_depthwise_conv_backward", x, filters, dy, None, stride, *padding)
    assert same(again, [dx, dfilter])
    into = paddle.zeros_like(filters)
    run("native_depthwise_conv_backward", x, filters, dy, [into], stride, *padding)
    assert same([into], [dfilter])


def depthwise_conv(x, filters, dy, stride, padding):
    """Return the output and the gradients of input and filter of a depthwise convolution, in the type of the arrays."""
    kernel, (rows, columns) = filters.shape[-1], dy.shape[1:3]
    borders = ((0, 0), padding, padding, (0, 0))
    padded = np.pad(x, borders)
    y, dx, dfilter = np.zeros_like(dy), np.zeros_like(padded), np.zeros_like(filters)
    for i, j in np.ndindex(kernel, kernel):
        seen = np.s_[:, i : i + rows * stride : stride, j : j + columns * stride : stride]
        y += padded[seen] * filters[:, 0, i, j]
        dx[seen] += dy * filters[:, 0, i, j]
        dfilter[:, 0, i, j] = (dy * padded[seen]).sum((0, 1, 2))
    return y, dx[:, padding[0] : padding[0] + x.shape[1], padding[0] : padding[0] + x.shape[2]], dfilter


@pytest.mark.parametrize("where", ["cpu", "emulated"])
def test_unsupported_depthwise_convolutions_raise(device, where):
    x, filters = paddle.ones([1, 8, 8, 8]), paddle.ones([8, 1, 3, 3])
    for shape, dtype, stride, message in (
        ((8, 1, 7, 7), "float32", 1, "requires kernel 3 or 5"),
        ((8, 1, 3, 3), "float32", 3, "stride 1 or 2"),
        ((8, 1, 3, 5), "float32", 1, "requires a filter"),
        ((8, 1, 3, 3), "bfloat16", 1, "requires a filter"),
    ):
        with pytest.raises(Exception, match=message):
            run("native_depthwise_conv", x, paddle.ones(shape, dtype), stride, 1, 1)
    with pytest.raises(Exception, match="requires a gradient"):
        run("native_depthwise_conv_backward", x, filters, x, None, 2, 1, 1)


# For each case: input shape, output channels, filter size, strides, paddings, dilations, groups.
CONVOLUTIONS = {
    "3x3": ((2, 9, 8, 8), 12, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1, stride 2": ((2, 9, 8, 8), 12, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "7x7, stride 2": ((2, 32, 32, 4), 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "groups": ((2, 9, 8, 16), 32, (3, 3), (2, 2), (1, 1), (1, 1), 4),
    "depthwise": ((2, 9, 8, 8), 8, (7, 7), (1, 1), (3, 3), (1, 1), 8),
    "different per axis": ((2, 9, 8, 12), 8, (3, 5), (2, 1), (1, 2), (2, 1), 1),
}


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(device, where, case):
    """The reference is Paddle's convolution in float64. On a GPU, cuDNN rounds the inputs to TF32."""
    shape, outputs, size, strides, paddings, dilations, groups = CONVOLUTIONS[case]
    random = Random("float32")
    x, filters = random.images(shape), random.images((outputs, shape[3] // groups, *size))
    images, weights = x.astype("float64").transpose([0, 3, 1, 2]), filters.astype("float64")
    expected = paddle.nn.functional.conv2d(images, weights, None, strides, paddings, dilations, groups)
    expected = expected.transpose([0, 2, 3, 1])
    attrs = list(strides), list(paddings), list(dilations), groups
    for _ in range(2):  # the second call uses the descriptors of the first call
        (y,) = run("native_conv", x, filters.transpose([0, 2, 3, 1]), *attrs)
        assert y.shape == expected.shape
        close(y, expected.numpy(), "float32" if where == "cpu" else "float16")


@pytest.mark.parametrize("where", ["cpu"])
def test_unsupported_convolutions_raise(device, where):
    x, filters = paddle.ones([1, 8, 8, 8]), paddle.ones([8, 3, 3, 8])
    for arguments, message in (
        ((x.astype("float64"), filters, [1, 1], [0, 0], [1, 1], 1), "requires float32"),
        ((x, filters, [1, 1], [0, 0], [1, 1], 2), "requires a filter"),
        ((x, filters, [1, 1], [0, 0, 0, 0], [1, 1], 1), "requires 2 strides"),
        ((x, filters, [0, 1], [0, 0], [1, 1], 1), "strides and dilations of 1 or more"),
        ((x, filters, [1, 1], [0, 0], [1, 4], 1), "larger than the padded images"),
    ):
        with pytest.raises(Exception, match=message):
            run("native_conv", *arguments)


@pytest.mark.parametrize("where", ["emulated"])
def test_convolution_without_cudnn_raises(device, where):
    x, filters = paddle.ones([1, 8, 8, 8]), paddle.ones([8, 3, 3, 8])
    with pytest.raises(Exception, match="cuDNN: Paddle has not loaded a library with cudnn.*; use --precision float16"):
        run("native_conv", x, filters, [1, 1], [0, 0], [1, 1], 1)


POINTWISE_SHAPES = [(2, 5, 7, 24, 144), (2, 5, 7, 144, 24), (1, 1, 1, 8, 8), (3, 23, 17, 4, 72), (2, 9, 9, 32, 32)]
POINTWISE_SHAPES += [(2, 5, 7, 24, 36), (2, 5, 7, 100, 20), (1, 2, 2, 12, 8)]  # 8-byte vectors


@pytest.mark.parametrize(
    "where, dtype, shape",
    [(where, dtype, shape) for where, dtype in NARROW if dtype != "float32" for shape in POINTWISE_SHAPES]
    + [("cpu", "float32", shape) for shape in POINTWISE_SHAPES[:2]]
    + [
        pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu)
        for dtype in ("float16", "bfloat16")
        for shape in [*POINTWISE_SHAPES, (32, 56, 56, 24, 144), (16, 112, 112, 96, 16)]
    ],
)
def test_pointwise_filter_gradient(device, where, dtype, shape):
    random, (*image, inputs, outputs) = Random(dtype), shape
    x, dy = random.images((*image, inputs)), random.images((*image, outputs))
    (dfilter,) = run("native_pointwise_conv_backward_filter", x, dy, None)
    expected = np.einsum("nhwo,nhwi->oi", wide(dy), wide(x))[..., None, None]
    close(dfilter, expected, dtype, size=np.prod(image) ** 0.5)
    assert same(run("native_pointwise_conv_backward_filter", x, dy, None), [dfilter])
    into = paddle.zeros_like(dfilter)
    run("native_pointwise_conv_backward_filter", x, dy, [into])
    assert same([into], [dfilter])


# On the emulated GPU, a block computes 32 output channels in the first shapes, 64 in the next two, and 128 in the last
# two. In the last shapes of each group, channels fill 8-byte vectors only. In (1, 88, 88, 8, 8) and the last shapes, a
# block computes several tiles.
POINTWISE_BN_SHAPES = [(2, 5, 7, 24, 144), (2, 9, 9, 144, 24), (1, 1, 1, 8, 8), (2, 5, 7, 72, 96), (1, 12, 11, 16, 64)]
POINTWISE_BN_SHAPES += [(1, 88, 88, 8, 8), (2, 5, 7, 24, 36), (2, 5, 7, 100, 20), (1, 12, 11, 36, 100)]
POINTWISE_BN_SHAPES += [(2, 25, 26, 24, 144), (5, 23, 17, 12, 300), (3, 23, 17, 40, 640), (5, 23, 17, 12, 500)]
LARGE_POINTWISE_BN_SHAPES = [(32, 56, 56, 24, 144), (16, 56, 56, 24, 256), (32, 28, 28, 512, 128), (32, 7, 7, 960, 160)]


@pytest.mark.parametrize(
    "where, dtype, shape",
    [("emulated", "float32", shape) for shape in POINTWISE_BN_SHAPES]
    + [("emulated", "bfloat16", shape) for shape in POINTWISE_BN_SHAPES[:-2]]
    + [pytest.param("emulated", "bfloat16", shape, marks=pytest.mark.soak) for shape in POINTWISE_BN_SHAPES[-2:]]
    + [("cpu", "float32", shape) for shape in POINTWISE_BN_SHAPES[:2]]
    + [
        pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu)
        for dtype in ("float32", "float16", "bfloat16")
        for shape in [*POINTWISE_BN_SHAPES, *LARGE_POINTWISE_BN_SHAPES]
    ],
)
def test_pointwise_conv_bn_inference(device, where, dtype, shape):
    random, (*image, inputs, outputs) = Random(dtype), shape
    x, filters = random.images((*image, inputs)), random.images((outputs, inputs, 1, 1)) / inputs**0.5
    z = random.images((*image, outputs))
    scale, bias, mean, variance = (random.channels(outputs) for _ in range(4))
    is_tf32 = dtype == "float32" and where != "cpu"
    factors = [(rounded_to_tf32 if is_tf32 else wide)(tensor) for tensor in (x, filters)]
    product = np.einsum("nhwi,oi->nhwo", factors[0], factors[1][..., 0, 0])
    normalized = (product - wide(mean)) / np.sqrt(wide(variance) + EPSILON) * wide(scale) + wide(bias)
    is_first = shape in POINTWISE_BN_SHAPES[:2]
    for name, addend in zip(ACTIVATIONS if is_first else ("", "relu"), itertools.cycle([z, None])):
        inputs = x, filters, scale, bias, mean, variance, addend, EPSILON, name
        (y,) = run("native_pointwise_conv_bn_inference", *inputs)
        expected = ACTIVATIONS[name][0](normalized + (0 if addend is None else wide(z)))
        close(y, expected, "products in TF32" if is_tf32 else dtype)
        assert where == "emulated" or same(run("native_pointwise_conv_bn_inference", *inputs), [y])


@pytest.mark.parametrize("where", ["cpu", "emulated"])
def test_unsupported_pointwise_convolutions_with_bn_raise(device, where):
    x, channels = paddle.ones([1, 2, 2, 8], "bfloat16"), paddle.ones([16])

    def convolve(x, filters, channels, addend=None):
        run("native_pointwise_conv_bn_inference", x, filters, *[channels] * 4, addend, EPSILON, "")

    filters = paddle.ones([16, 8, 1, 1], "bfloat16")
    for wrong in (filters.astype("float32"), paddle.ones([16, 4, 1, 1], "bfloat16")):
        with pytest.raises(Exception, match="requires a filter"):
            convolve(x, wrong, channels)
    with pytest.raises(Exception, match="one value per output channel"):
        convolve(x, filters, channels[:8])
    with pytest.raises(Exception, match="shape of the addend"):
        convolve(x, filters, channels, x)
    if where == "emulated":
        with pytest.raises(Exception, match="multiple of 4 channels"):
            convolve(x, filters[:10], channels[:10])


# The last element is the number of channels of the filters. In the second shape, an image has two columns of blocks. In
# the last shape, it has two rows of blocks, which compute six and five pooled rows.
STEM_SHAPES = [(2, 11, 14, 4), (1, 9, 125, 3), (1, 1, 1, 3), (3, 2, 7, 4), (14, 43, 8, 3)]


@pytest.mark.parametrize(
    "where, dtype, shape",
    [(where, dtype, shape) for where, dtype in NARROW for shape in STEM_SHAPES[:4]]
    + [("emulated", "float32", STEM_SHAPES[4])]
    + [
        pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu)
        for dtype in ("float32", "float16", "bfloat16")
        for shape in [*STEM_SHAPES, (300, 61, 250, 4), (64, 224, 224, 4)]
    ],
)
def test_stem_inference(device, where, dtype, shape):
    random, (*image, channels) = Random(dtype), shape
    x, filters = random.images((*image, 3)), random.images((64, channels, 7, 7)) / 147**0.5
    scale, bias, mean, variance = (random.channels(64) for _ in range(4))
    scale, bias = scale * paddle.to_tensor([1.0, -1.0] * 32), bias - 2
    is_tf32 = dtype == "float32" and where != "cpu"
    factor = scale / paddle.sqrt(variance + EPSILON)
    folded = filters[:, :3].astype("float32") * paddle.reshape(factor, [-1, 1, 1, 1])
    factors = [rounded_to_tf32(v) if is_tf32 else wide(v.astype(dtype)) for v in (x, folded)]
    padded = np.pad(factors[0], [(0, 0), (3, 3), (3, 3), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), (1, 2))[:, ::2, ::2]
    product = np.tensordot(windows, factors[1], ([3, 4, 5], [1, 2, 3])) + wide(bias) - wide(mean) * wide(factor)
    padded = np.pad(product.clip(0), [(0, 0), (1, 1), (1, 1), (0, 0)])
    expected = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2].max((-1, -2))
    inputs = x, filters, scale, bias, mean, variance, EPSILON
    (y,) = run("native_stem_inference", *inputs)
    assert (expected == 0).any()
    close(y, expected, "products in TF32" if is_tf32 else dtype)
    assert where == "emulated" or same(run("native_stem_inference", *inputs), [y])


@pytest.mark.parametrize("where, dtype", NARROW)
def test_unsupported_stems_raise(device, where, dtype):
    x, filters, channels = paddle.ones([1, 8, 8, 3], dtype), paddle.ones([64, 4, 7, 7], dtype), paddle.ones([64])
    for images, weights, values, message in (
        (paddle.ones([1, 8, 8, 4], dtype), filters, channels, "requires images"),
        (x, filters.astype("float16"), channels, "requires a filter"),
        (x, filters[:32], channels, "requires a filter"),
        (x, filters[:, :2], channels, "requires a filter"),
        (x, filters, channels[:32], "BN requires 64 values"),
    ):
        with pytest.raises(Exception, match=message):
            run("native_stem_inference", images, weights, *[values] * 4, EPSILON)


@pytest.mark.parametrize("where", ["emulated"])
def test_unsupported_pointwise_convolutions_raise(device, where):
    for channels, others, dtype in ((40, 40, "bfloat16"), (8, 10, "bfloat16"), (6, 16, "bfloat16"), (8, 8, "float32")):
        with pytest.raises(Exception, match="requires (half precision, )?a multiple of 4 channels"):
            images = [paddle.ones([1, 2, 2, count], dtype) for count in (channels, others)]
            run("native_pointwise_conv_backward_filter", *images, None)
    with pytest.raises(Exception, match="differs from the input"):
        x = paddle.ones([1, 2, 2, 8], "bfloat16")
        run("native_pointwise_conv_backward_filter", x, x[:, :1], None)


@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_image_sums(device, where, dtype, shape):
    random = Random(dtype)
    x, y, pixels = random.images(shape, offset=0.5), random.images(shape, offset=0.5), shape[1] * shape[2]
    for other, product in ((None, wide(x)), (y, wide(x) * wide(y))):
        for mean, divisor in ((True, pixels), (False, 1)):
            (sums,) = run("native_image_sums", x, other, mean)
            close(sums, product.sum((1, 2), keepdims=True) / divisor, dtype, size=pixels**0.5 / divisor)
            assert same(run("native_image_sums", x, other, mean), [sums])


@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_scale_images(device, where, dtype, shape):
    random, vectors = Random(dtype), (shape[0], 1, 1, shape[-1])
    x, factors, offsets = random.images(shape), random.images(vectors), random.images(vectors)
    close(run("native_scale_images", x, factors, None)[0], wide(x) * wide(factors), dtype)
    expected = wide(x) * wide(factors) + wide(offsets) / (shape[1] * shape[2])
    close(run("native_scale_images", x, factors, offsets)[0], expected, dtype)


@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_sigmoid(device, where, dtype, shape):
    random = Random(dtype)
    x, dy = random.images(shape) * 4, random.images(shape)
    (y,) = run("native_sigmoid", x)
    close(y, 1 / (1 + np.exp(-wide(x))), dtype)
    (dx,) = run("native_sigmoid_backward", y, dy)
    close(dx, wide(dy) * wide(y) * (1 - wide(y)), dtype)


# Some sizes are not multiples of the vector size. Each thread of the gradient's kernel processes several vectors of the
# last tensor, on the emulated GPU and on a real one, respectively.
AFFINE_SHAPES = [(1,), (7,), (2, 1, 1, 3), (3, 5, 5, 13), (2, 25, 25, 96), (1, 71, 83, 29), (2, 181, 3, 611)]
LARGE_AFFINE_SHAPES = [(16, 112, 112, 32), (32, 56, 56, 65)]


@pytest.mark.parametrize(
    "where, dtype, shape",
    [(where, dtype, shape) for where, dtype in NARROW for shape in AFFINE_SHAPES]
    + [
        pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu)
        for dtype in DTYPES
        for shape in [*AFFINE_SHAPES, *LARGE_AFFINE_SHAPES]
    ],
)
def test_affine(device, where, dtype, shape):
    random, count = Random(dtype), np.prod(shape)
    x, dy = random.images(shape, offset=0.5), random.images(shape)
    scale, bias = (paddle.to_tensor([value], "float32").astype(dtype) for value in (1.7, -0.4))
    (y,) = run("native_affine", x, scale, bias)
    close(y, wide(x) * wide(scale) + wide(bias), dtype)
    results = dx, dscale, dbias = run("native_affine_backward", x, scale, dy, None)
    close(dx, wide(dy) * wide(scale), dtype)
    # Half a unit in the last place of the sums, plus a margin for rounding errors of the summation in float32.
    for actual, summands in ((dscale, wide(dy) * wide(x)), (dbias, wide(dy))):
        tolerance = UNIT[dtype] / 2 * abs(summands.sum()) + 1e-5 * count**0.5
        np.testing.assert_allclose(wide(actual), [summands.sum()], rtol=0, atol=tolerance)
    assert same([y], run("native_affine", x, scale, bias))
    assert same(results, run("native_affine_backward", x, scale, dy, None))
    memory = [paddle.zeros_like(scale), paddle.zeros_like(scale)]
    run("native_affine_backward", x, scale, dy, memory)
    assert same(memory, results[1:])


@pytest.mark.parametrize("where", [pytest.param("gpu", marks=pytest.mark.gpu)])
def test_affine_gradients_of_large_products_are_finite(device, where):
    """The products x dy exceed the largest float16 value, 65504, but their sum does not."""
    dy = np.where(np.arange(2048) % 2, 512, -512)
    dy[0] += 64
    x, one = paddle.full([4, 8, 8, 8], 512, "float16"), paddle.ones([1], "float16")
    dy = paddle.to_tensor(dy.reshape(x.shape), "float16")
    _, dscale, dbias = run("native_affine_backward", x, one, dy, None)
    assert (dscale.item(), dbias.item()) == (512 * 64, 64)


@pytest.mark.parametrize("where", ["cpu", "emulated"])
def test_unsupported_affine_tensors_raise(device, where):
    x, one = paddle.ones([2, 3, 3, 8]), paddle.ones([1])
    for name, inputs, message in (
        ("native_affine", [x, paddle.ones([2]), one], "requires a scale with one element"),
        ("native_affine", [x, one, one.astype("bfloat16")], "requires a bias with one element, in the type"),
        ("native_affine_backward", [x, one, x[:1], None], "gradient differs"),
        ("native_affine_backward", [x, one, x, [one, paddle.ones([2])]], "requires a gradient of the bias"),
    ):
        with pytest.raises(Exception, match=message):
            run(name, *inputs)


@pytest.mark.parametrize("where", ["cpu"])
def test_unsupported_squeeze_and_excitation_raises(device, where):
    x, factors = paddle.ones([2, 3, 3, 8]), paddle.ones([2, 1, 1, 8])
    for name, inputs, message in (
        ("native_image_sums", [x, factors, True], "second factor differs"),
        ("native_image_sums", [x[0], None, True], "expected images"),
        ("native_scale_images", [x, factors[:1], None], "expected one factor per image and channel"),
        ("native_scale_images", [x, factors, x], "offsets differs"),
        ("native_sigmoid_backward", [x, factors], "gradient differs"),
    ):
        with pytest.raises(Exception, match=message):
            run(name, *inputs)


@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_concat(device, where, dtype, shape):
    random, (*pixels, channels) = Random(dtype), shape
    for others in (channels, 4, 3 * channels):
        x, y = random.images(shape), random.images((*pixels, others))
        (out,) = run("native_concat", x, y)
        np.testing.assert_array_equal(wide(out), np.concatenate([wide(x), wide(y)], -1))
        assert same(run("native_split", out, channels), [x, y])


@pytest.mark.parametrize("where", ["cpu"])
def test_unsupported_concatenations_raise(device, where):
    x = paddle.ones([2, 3, 3, 8])
    for name, inputs, message in (
        ("native_concat", [x, x[:1]], "differ in type or number of rows"),
        ("native_concat", [x, x[..., :6]], "requires multiples of 4 channels"),
        ("native_split", [x, 8], "must have 1 to 7 channels"),
        ("native_split", [x, 3], "requires multiples of 4 channels"),
    ):
        with pytest.raises(Exception, match=message):
            run(name, *inputs)


def philox(key, counter):
    """Return the four outputs of Philox 4x32-10 (Salmon et al., SC 2011)."""
    words, keys = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ keys[0], second, first >> 32 ^ words[3] ^ keys[1], first]
        words = [word & 0xFFFFFFFF for word in words]
        keys = [keys[0] + 0x9E3779B9 & 0xFFFFFFFF, keys[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return words


def test_philox_matches_published_numbers():
    """The expected numbers are from the known-answer tests that the authors of Philox published (kat_vectors)."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    "where, dtype", [*NARROW, *[pytest.param("gpu", dtype, marks=pytest.mark.gpu) for dtype in ("float32", "float16")]]
)
def test_dropout(device, where, dtype):
    x = paddle.to_tensor(np.arange(1, 1002).reshape(7, 143), dtype)
    seed, rate = 12345, 0.3
    y = run("native_dropout", x, paddle.to_tensor([seed], "int32"), rate)[0]
    words = np.array([philox(seed, at) for at in range(251)]).reshape(-1)[:1001].reshape(7, 143)
    close(y, np.where(words < np.float32(rate) * 2.0**32, 0, wide(x) / (1 - np.float32(rate))), dtype)
    assert 0.25 < (wide(y) == 0).mean() < 0.35


def max_pool_gradient(x, dy, kernel, stride, padding):
    dx = np.zeros_like(x)
    for n, row, column, channel in np.ndindex(*dy.shape):
        top, left = row * stride - padding, column * stride - padding
        window = x[n, max(0, top) : top + kernel, max(0, left) : left + kernel, channel]
        i, j = np.unravel_index(window.argmax(), window.shape)
        dx[n, max(0, top) + i, max(0, left) + j, channel] += dy[n, row, column, channel]
    return dx


ALL_PLACES = ["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)]
# Tensor sizes: some are not multiples of the vector size, one is 1, and one requires many blocks. The number of tensors
# exceeds the limit of a single launch.
SIZES = [7, 8, 1, 64, 2048, 33, *[16] * 100, 999_001]
UPDATED = [*NARROW, *[pytest.param("gpu", dtype, marks=pytest.mark.gpu) for dtype in DTYPES]]


def sizes_on(where):
    """Return SIZES, with a smaller largest tensor for tests without a GPU. On the emulated GPU, each block processes
    several parts of the largest tensor."""
    largest = {"cpu": 20_001, "emulated": 200_001, "gpu": SIZES[-1]}[where]
    return [min(size, largest) for size in SIZES]


@pytest.mark.parametrize(("unscale", "nesterov"), [(None, False), (0, False), (1 / 128, True)])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_momentum(device, where, dtype, unscale, nesterov):
    """The reference is computed in float64. A scaling factor of 0 must skip the update."""
    random, mu, rate = np.random.RandomState(0), 0.875, paddle.to_tensor([0.25])
    decays = [0.01 * (i % 3) for i in range(len(SIZES))]
    exact, velocities, gradients = (
        [paddle.to_tensor(random.randn(size).astype("float32")) for size in sizes_on(where)] for _ in range(3)
    )
    gradients = [(g / (unscale or 1)).astype(dtype) for g in gradients]
    has_masters = dtype != "float32"
    parameters = [p.astype(dtype) for p in exact] if has_masters else exact
    masters = exact if has_masters else []
    before = [[wide(t) for t in tensors] for tensors in (exact, gradients, velocities)]
    factor = None if unscale is None else paddle.to_tensor([unscale], "float32")
    run("native_momentum", parameters, gradients, [*velocities, *masters], rate, factor, [mu, nesterov], decays)
    for i, (p, g, v) in enumerate(zip(*before, strict=True)):
        if unscale != 0:
            change = g * (unscale or 1) + decays[i] * p
            v = mu * v + change
            p = p - 0.25 * (change + mu * v if nesterov else v)
        close(velocities[i], v, "float32")
        close(exact[i], p, "float32")
        np.testing.assert_allclose(wide(parameters[i]), wide(exact[i]), rtol=UNIT[dtype], atol=1e-7)


BETA1, BETA2 = np.float64(np.float32(0.9)), np.float64(np.float32(0.999))


def adam(p, g, m, v, step, decay):
    """Return the parameter change for learning rate 1, and the new moments. The formulas are algorithm 1 of Kingma and
    Ba, arXiv:1412.6980, and the decoupled weight decay of Loshchilov and Hutter, arXiv:1711.05101."""
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    direction = (m / (1 - BETA1**step)) / (np.sqrt(v / (1 - BETA2**step)) + EPSILON)
    return direction + decay * p, m, v


@pytest.mark.parametrize("unscale", [None, 1 / 128, 0])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_adamw(device, where, dtype, unscale):
    """The reference is the third step, computed in float64 from random moments. A scaling factor of 0 must skip the
    update."""
    check_adam("native_adamw", where, dtype, unscale, lambda p, change, decay: change)


@pytest.mark.parametrize("where, dtype", UPDATED)
def test_radam(device, where, dtype):
    """Unlike AdamW's operator, RAdam's operator receives one power of each beta for all parameters, and does not change
    it."""
    check_adam("native_radam", where, dtype, None, lambda p, change, decay: change, shares_powers=True)


@pytest.mark.parametrize("unscale", [1 / 128, 0])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_lamb(device, where, dtype, unscale):
    """The reference is algorithm 2 of You et al., arXiv:1904.00962. With weight decay, the norm of a parameter's change
    is the learning rate times the norm of the parameter."""

    def adapt(p, change, decay):
        return change * np.linalg.norm(p) / np.linalg.norm(change) if decay else change

    check_adam("native_lamb", where, dtype, unscale, adapt)


@pytest.mark.parametrize("where", ALL_PLACES)
def test_lamb_updates_zero_parameters(device, where):
    """If all values of a parameter are 0, the trust ratio is 1. This also holds for a gradient of 0, for which the
    formula yields 0 / 0."""
    for gradient, step in ((3.0, 1.0), (0.0, 0.0)):
        parameter = paddle.zeros([8])
        state = [paddle.zeros([8]), paddle.zeros([8]), paddle.to_tensor([0.9]), paddle.to_tensor([0.999])]
        tensors = [[parameter], [paddle.full([8], gradient)], state, paddle.to_tensor([0.25])]
        run("native_lamb", *tensors, None, [0.9, 0.999, 1e-8], [0.01])
        np.testing.assert_allclose(wide(parameter), -0.25 * step, rtol=1e-5)


def check_adam(name, where, dtype, unscale, adapt, shares_powers=False):
    random, step, rate = np.random.RandomState(0), 3, 0.25
    decays = [0.01 * (i % 3) for i in range(len(SIZES))]
    exact, moments1, moments2, gradients = (
        [paddle.to_tensor(random.randn(size).astype("float32")) for size in sizes_on(where)] for _ in range(4)
    )
    moments2 = [v.abs() for v in moments2]
    gradients = [(g / (unscale or 1)).astype(dtype) for g in gradients]
    powers = [[paddle.to_tensor([beta**step], "float32") for _ in SIZES] for beta in (BETA1, BETA2)]
    powers = [tensors[:1] if shares_powers else tensors for tensors in powers]
    has_masters = dtype != "float32"
    parameters = [p.astype(dtype) for p in exact] if has_masters else exact
    masters = exact if has_masters else []
    before = [[wide(t) for t in tensors] for tensors in (exact, gradients, moments1, moments2)]
    factor = None if unscale is None else paddle.to_tensor([unscale], "float32")
    state = [*moments1, *moments2, *powers[0], *powers[1], *masters]
    rule = [BETA1, BETA2, EPSILON]
    run(name, parameters, gradients, state, paddle.to_tensor([rate]), factor, rule, decays)
    for i, (p, g, m, v) in enumerate(zip(*before, strict=True)):
        if unscale != 0:
            change, m, v = adam(p, g * (unscale or 1), m, v, step, decays[i])
            p = p - rate * adapt(p, change, decays[i])
        close(moments1[i], m, "float32")
        close(moments2[i], v, "float32")
        np.testing.assert_allclose(wide(exact[i]), p, rtol=0, atol=1e-4 * max(1, np.abs(p).max()))
        np.testing.assert_allclose(wide(parameters[i]), wide(exact[i]), rtol=UNIT[dtype], atol=1e-7)
        reached = [wide(power[0 if shares_powers else i]).item() for power in powers]
        next_step = step + (unscale != 0 and not shares_powers)
        np.testing.assert_allclose(reached, [beta**next_step for beta in (BETA1, BETA2)], rtol=1e-6)


@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_check_finite_updates_loss_scale(device, where, dtype, bad):
    """The operator decreases the loss scale if any tensor, regardless of its type, contains a non-finite value. In this
    test, it is the last value of a tensor."""
    places = range(len(SIZES)) if where == "gpu" or bad == np.inf else (0, 4, len(SIZES) - 1)
    if where == "emulated" and bad == np.inf:
        places = (0, 1, 2, 4, 100, len(SIZES) - 1)
    largest = 65504 if dtype == "float16" else 3e38
    types = ["float32" if i % 5 == 4 else dtype for i in range(len(SIZES))]
    finite = [paddle.full([size], largest, type) for size, type in zip(sizes_on(where), types, strict=True)]
    for index in places if bad is not None else [None]:
        gradients = list(finite)
        if bad is not None:
            values = np.full(finite[index].shape, largest, "float32")
            values[-1] = bad
            gradients[index] = paddle.to_tensor(values).astype(types[index])
        scale, good, bad_steps = (paddle.to_tensor(v) for v in (np.float32([8]), np.int32([3]), np.int32([1])))
        result = run("native_check_finite", gradients, scale, good, bad_steps, 4, 2, 2.0, 0.25)[0]
        state = [t.item() for t in (result, scale, good, bad_steps)]
        assert state == ([1 / 8, 16, 0, 0] if bad is None else [0, 2, 0, 0]), index


@pytest.mark.parametrize("unscale", [None, 1 / 128])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_clip_factor(device, where, dtype, unscale):
    """The reference is computed in float64. The gradients have different data types, and their norm is either above or
    below the limit."""
    random = np.random.RandomState(0)
    gradients = [paddle.to_tensor((random.randn(size) / (unscale or 1)).astype("float32")) for size in sizes_on(where)]
    gradients = [g if i % 5 == 4 else g.astype(dtype) for i, g in enumerate(gradients)]
    norm = np.sqrt(sum((wide(g) ** 2).sum() for g in gradients)) * (unscale or 1)
    factor = None if unscale is None else paddle.to_tensor([unscale], "float32")
    for maximum in (norm / 7, norm * 0.999, norm * 1.001):
        result = run("native_clip_factor", gradients, factor, maximum)[0]
        np.testing.assert_allclose(result, [(unscale or 1) * min(1, maximum / norm)], rtol=1e-5)


@pytest.mark.parametrize("unscale", [None, 1 / 128, 0])
@pytest.mark.parametrize("where", ALL_PLACES)
def test_ema(device, where, unscale):
    """The reference is computed in float64. A scaling factor of 0 must leave the EMA weights unchanged."""
    random = np.random.RandomState(0)
    sizes = [*sizes_on(where), *[16] * 100]  # more tensors than a single launch supports
    averages, values = ([paddle.to_tensor(random.randn(n).astype("float32")) for n in sizes] for _ in range(2))
    before = [wide(t) for t in averages]
    factor = None if unscale is None else paddle.to_tensor([unscale], "float32")
    run("native_ema", averages, values, paddle.to_tensor([0.125]), factor)
    weight = 0 if unscale == 0 else 0.125
    for average, old, value in zip(averages, before, values, strict=True):
        np.testing.assert_allclose(wide(average), (1 - weight) * old + weight * wide(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_due", [1, 0])
@pytest.mark.parametrize("where, dtype", UPDATED)
def test_lookahead(device, where, dtype, is_due):
    """The reference is computed in float64. If lookahead is not due, parameters and slow weights do not change."""
    random = np.random.RandomState(0)
    slow, exact = (
        [paddle.to_tensor(random.randn(size).astype("float32")) for size in sizes_on(where)] for _ in range(2)
    )
    has_masters = dtype != "float32"
    parameters = [p.astype(dtype) for p in exact] if has_masters else exact
    before = [[wide(t) for t in tensors] for tensors in (slow, exact)]
    state, due = [*slow, *(exact if has_masters else [])], paddle.to_tensor([is_due], "float32")
    run("native_lookahead", parameters, parameters, state, due, due, [0.25], [0.0] * len(SIZES))
    for i, (old, p) in enumerate(zip(*before, strict=True)):
        new = old + 0.25 * (p - old) if is_due else old
        np.testing.assert_allclose(wide(slow[i]), new, rtol=0, atol=1e-6)
        np.testing.assert_allclose(wide(exact[i]), new if is_due else p, rtol=0, atol=1e-6)
        np.testing.assert_allclose(wide(parameters[i]), wide(exact[i]), rtol=UNIT[dtype], atol=1e-7)


@pytest.mark.parametrize(("unscale", "expected"), [(None, np.nan), (0, 0)])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ALL_PLACES)
def test_clip_factor_of_non_finite_norm(device, where, bad, unscale, expected):
    """Unless loss scaling skips the step, the parameters become NaN, as they would without clipping."""
    factor = None if unscale is None else paddle.to_tensor([unscale], "float32")
    [result] = run("native_clip_factor", [paddle.ones([3]), paddle.to_tensor([1, bad, 1], "float32")], factor, 5.0)
    np.testing.assert_array_equal(result, [expected])


@pytest.mark.parametrize("where", ["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_loss_scale_matches_paddle(device, where):
    """Randomly selected steps overflow. The initial scales include values near the lower and the upper limit."""
    random = np.random.RandomState(1)
    for start in (1.0, 1.5, 1024.0, 3e38):
        custom, reference = (
            [paddle.to_tensor(v) for v in (np.float32([start]), np.int32([0]), np.int32([0]))] for _ in "ab"
        )
        for step in range(20):
            # In the first three steps, nothing overflows, so that the scale increases.
            overflows = step >= 3 and random.rand() < 0.4
            gradient = paddle.full([8], np.inf if overflows else 1.0)
            run("native_check_finite", [gradient], *custom, 3, 2, 2.0, 0.5)
            paddle._C_ops.update_loss_scaling_(
                [gradient], paddle.to_tensor([overflows]), *reference, 3, 2, 2.0, 0.5, False
            )
            assert same(custom, reference)


def cross_entropy(x, labels, smoothing):
    """Return the loss of each row and the gradient of the mean loss according to Szegedy et al., arXiv:1512.00567,
    section 7."""
    shifted = x - x.max(1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    target = np.full(x.shape, smoothing / x.shape[1])
    target[np.arange(len(x)), labels] += 1 - smoothing
    return -(target * log_softmax).sum(1), (np.exp(log_softmax) - target) / len(x)


LARGE_LOGITS, SMALL_LOGITS = [(256, 1000, 5), (300, 257, 5)], [(3, 2, 2), (1, 1, 1), (5, 256, 3)]


@pytest.mark.parametrize(
    "rows, classes, k, smoothing",
    [
        *((*case, 0.1) for case in LARGE_LOGITS + SMALL_LOGITS),
        *((*case, 0.0) for case in SMALL_LOGITS),
        *(pytest.param(*case, 0.0, marks=pytest.mark.soak) for case in LARGE_LOGITS),
    ],
)
@pytest.mark.parametrize("where", ALL_PLACES)
def test_loss(device, where, rows, classes, k, smoothing):
    random = np.random.RandomState(rows)
    x = random.randn(rows, classes) * 5 + 300  # the softmax overflows unless the maximum is subtracted first
    x = np.round(x * 8) / 8
    labels = random.randint(0, classes, rows)
    two, all_equal = np.arange(0, rows, 3), np.arange(1, rows, 3)
    x[two[:, None], [0, -1]] = x[two].max(1, keepdims=True)
    labels[two] = np.where(two % 2, 0, classes - 1)
    x[all_equal], labels[all_equal] = 300, all_equal % min(classes, 8)
    logits, targets = paddle.to_tensor(x.astype("float32")), paddle.to_tensor(labels[:, None])
    losses, gradient = cross_entropy(x, labels, smoothing)
    order = np.argsort(-x, axis=1, kind="stable")  # equal logits rank in class order
    for mean in (True, False):
        loss, top1, topk, _, pairs = run("native_loss", logits, targets, None, None, smoothing, k, mean)
        assert loss.shape == ([] if mean else [rows, 1])
        np.testing.assert_allclose(wide(loss).reshape(-1), losses.mean() if mean else losses, rtol=1e-5, atol=2e-5)
        assert top1.item() == np.float32((order[:, 0] == labels).mean())
        assert topk.item() == np.float32((order[:, :k] == labels[:, None]).any(1).mean())
        np.testing.assert_array_equal(pairs.numpy(), np.stack([labels, order[:, 0]], 1))
    logits.stop_gradient = False
    (run("native_loss", logits, targets, None, None, smoothing, k, True)[0] * 64).backward()
    np.testing.assert_allclose(wide(logits.grad), 64 * gradient, rtol=1e-4, atol=64e-6 / rows)


@pytest.mark.parametrize("where", ALL_PLACES)
def test_loss_with_class_weights(device, where):
    random = np.random.RandomState(0)
    x, labels, weights = random.randn(5, 300), random.randint(0, 300, 5), random.dirichlet(np.ones(300), 5)
    weights[0] = np.eye(300)[labels[0]]
    image_weights = random.rand(5, 1) * 3
    logits = paddle.to_tensor(x.astype("float32"), stop_gradient=False)
    targets = paddle.to_tensor(labels[:, None]), paddle.to_tensor(weights.astype("float32"))
    losses = run("native_loss", logits, *targets, None, 0.1, 5, False)[0]
    target, log_softmax = 0.9 * weights + 0.1 / 300, x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(wide(losses)[:, 0], -(target * log_softmax).sum(1), rtol=1e-5)
    run("native_loss", logits, *targets, None, 0.1, 5, True)[0].backward()
    np.testing.assert_allclose(wide(logits.grad), (np.exp(log_softmax) - target) / 5, rtol=1e-4, atol=1e-8)
    logits.clear_gradient()
    targets = *targets, paddle.to_tensor(image_weights.astype("float32"))
    loss = run("native_loss", logits, *targets, 0.1, 5, True)[0]
    assert loss.item() == pytest.approx(
        (image_weights * -(target * log_softmax).sum(1, keepdims=True)).mean(), rel=1e-5
    )
    loss.backward()
    np.testing.assert_allclose(
        wide(logits.grad), image_weights * (np.exp(log_softmax) - target) / 5, rtol=1e-4, atol=1e-8
    )


@pytest.mark.parametrize("where", ALL_PLACES)
def test_loss_of_non_finite_logits(device, where):
    """The loss of an image with non-finite logits is NaN, and a NaN logit ranks last. Other images are not affected. If
    any label is out of range, top1 is -1."""
    x = np.random.RandomState(0).randn(6, 9).astype("float32")
    x[1, 8], x[2, 3], x[4, 0], x[5] = np.nan, -np.inf, np.nan, np.nan
    labels = np.array([x[0].argmax(), 8, x[2].argmax(), 9, np.nanargmax(x[4]), 0])  # the fourth label is out of range
    in_range = labels < 9
    top1 = run(
        "native_loss",
        paddle.to_tensor(x[in_range]),
        paddle.to_tensor(labels[in_range, None]),
        None,
        None,
        0.0,
        9,
        False,
    )[1]
    assert top1.item() == np.float32(3 / 5)
    inputs = [paddle.to_tensor(x), paddle.to_tensor(labels[:, None])]
    loss, top1, top9, _, pairs = run("native_loss", *inputs, None, None, 0.0, 9, False)
    has_loss = np.array([True, False, True, False, False, False])
    np.testing.assert_array_equal(np.isfinite(wide(loss)[:, 0]), has_loss)
    assert (top1.item(), top9.item()) == (-1, 0.5)
    np.testing.assert_array_equal(pairs.numpy()[:, 1], [*np.nanargmax(x[:5], 1), 9])
    logits = paddle.to_tensor(x, stop_gradient=False)
    run("native_loss", logits, inputs[1], None, None, 0.0, 5, True)[0].backward()
    gradient = wide(logits.grad)
    np.testing.assert_array_equal(np.isnan(gradient).all(1), ~has_loss)
    assert np.isfinite(gradient[has_loss]).all()
    smoothed = run("native_loss", *inputs, None, None, 0.1, 5, True)[0]
    assert np.isnan(smoothed.item())


# (input channels, outputs, image size, kernel size, stride, paddings, dilation, groups). Convolutions with 3x3 filters,
# at least 64 channels and stride 1 use Winograd's algorithm, except for few pixels. Without AVX-512, filter gradients
# with at least 128 channels are products of matrices. Sizes are even, odd, and too large for one matrix product.
ONEDNN_CONVOLUTIONS = [
    (4, 32, (17, 18), 3, 2, (1, 1, 1, 1), 1, 1),
    (3, 16, (16, 16), 3, 2, (0, 1, 0, 1), 1, 1),
    (64, 64, (14, 14), 3, 1, (1, 1, 1, 1), 1, 1),
    (64, 80, (7, 9), 3, 1, (1, 1, 1, 1), 1, 1),
    (128, 64, (24, 23), 3, 1, (1, 1, 1, 1), 1, 1),
    (64, 96, (2, 17), 3, 1, (1, 1, 1, 1), 1, 1),
    (64, 64, (1, 2), 3, 1, (1, 1, 1, 1), 1, 1),
    (64, 64, (9, 9), 3, 1, (2, 2, 2, 2), 2, 1),
    (32, 24, (9, 7), 1, 1, (0, 0, 0, 0), 1, 1),
    (64, 128, (8, 8), 1, 2, (0, 0, 0, 0), 1, 1),
    (128, 20, (20, 17), 1, 1, (0, 0, 0, 0), 1, 1),
    (144, 200, (33, 17), 1, 2, (0, 0, 0, 0), 1, 1),
    (128, 40, (9, 9), 3, 2, (1, 1, 1, 1), 1, 1),
    (128, 16, (9, 9), 3, 1, (2, 2, 2, 2), 2, 1),
    (256, 64, (19, 18), 3, 1, (1, 1, 1, 1), 1, 1),
    (32, 32, (9, 9), 3, 1, (1, 1, 1, 1), 1, 4),
    (12, 12, (9, 9), 7, 1, (3, 3, 3, 3), 1, 12),
]


@pytest.mark.parametrize("where", ["cpu"])
@pytest.mark.parametrize("case", ONEDNN_CONVOLUTIONS, ids=str)
def test_convolution_and_its_gradients_on_the_cpu(device, where, case):
    channels, outputs, size, kernel, stride, padding, dilation, groups = case
    if not native.has_onednn():
        pytest.skip("this build of Paddle contains no oneDNN 3")
    rng = np.random.RandomState(0)
    x = rng.randn(3, *size, channels)
    filters = rng.randn(outputs, channels // groups, kernel, kernel) / (kernel * (channels // groups) ** 0.5)
    images, weights = (paddle.to_tensor(array, stop_gradient=False) for array in (x.transpose(0, 3, 1, 2), filters))
    y = paddle.nn.functional.conv2d(images, weights, None, stride, list(padding), dilation, groups)
    dy = rng.randn(*y.shape)
    y.backward(paddle.to_tensor(dy))

    inputs = [paddle.to_tensor(array.astype("float32")) for array in (x, filters, dy.transpose(0, 2, 3, 1))]
    geometry = [[stride] * 2, list(padding), [dilation] * 2, groups]
    close(run("native_conv2d", *inputs[:2], *geometry)[0], y.numpy().transpose(0, 2, 3, 1), "float32")
    expected = images.grad.numpy().transpose(0, 2, 3, 1), weights.grad.numpy()
    gradients = run("native_conv2d_backward", *inputs, None, *geometry, True, True)
    for actual, value in zip(gradients, expected, strict=True):
        close(actual, value, "float32")
    # The result is the same in each run, and can be written to existing memory.
    into = paddle.zeros_like(inputs[1])
    again = run("native_conv2d_backward", *inputs, [into], *geometry, True, True)
    assert same([*gradients, gradients[1]], [*again, into])
    assert same(run("native_conv2d_backward", *inputs, None, *geometry, False, True)[1:], gradients[1:])
    assert same(run("native_conv2d_backward", *inputs, None, *geometry, True, False)[:1], gradients[:1])


@pytest.mark.parametrize("where", ["cpu"])
def test_convolution_checks_its_arguments(device, where):
    x, filters = paddle.ones([1, 4, 4, 8]), paddle.ones([8, 8, 3, 3])
    geometry = [[1, 1], [1, 1, 1, 1], [1, 1], 1]
    for inputs, values, message in (
        ([x, paddle.ones([8, 4, 3, 3])], geometry, "C / groups"),
        ([x, filters], [[1, 1], [1, 1], [1, 1], 1], "values for height and width"),
        ([x[:, :1, :1], paddle.ones([8, 8, 5, 5])], geometry, "larger than the padded images"),
    ):
        with pytest.raises(Exception, match=message):
            run("native_conv2d", *inputs, *values)
    with pytest.raises(Exception, match="gradient with the output's shape"):
        run("native_conv2d_backward", x, filters, x[:, :2], None, *geometry, True, True)


COUNT_THREADS = """
import os
import paddle
from paddle.base import core
from paddle_resnet.native import build

build.load()
x, channel = paddle.ones([2, 64, 64, 64]), [paddle.ones([64]) for _ in range(4)]
counts = []
for name, *args in (
    ("conv2d", x, paddle.ones([64, 64, 1, 1]), [1, 1], [0, 0, 0, 0], [1, 1], 1),
    ("bn_act", x, *channel, 0.9, 1e-5, "relu"),
):
    core.eager._run_custom_op(f"native_{name}", *args)
    counts.append(len(os.listdir("/proc/self/task")))
print(*counts)
"""


@pytest.mark.slow
def test_operators_and_onednn_share_threads():
    if native.missing() is not None or not native.has_onednn():
        pytest.skip("no compiler, or no oneDNN 3 in this build of Paddle")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    by_onednn, by_both = map(int, done.stdout.split())
    assert by_both == by_onednn


@pytest.mark.parametrize("where", ["cpu"])
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_update_does_not_depend_on_number_of_threads(device, where, rule):
    """LAMB computes norms of the whole parameter."""
    library, results = native.register(), []
    before = library.omp_get_max_threads()
    for threads in (1, 3):
        library.omp_set_num_threads(threads)
        random = np.random.RandomState(0)
        parameter, gradient, moment = (paddle.to_tensor(random.randn(100_003).astype("float32")) for _ in range(3))
        state = [moment, moment * moment, *(paddle.to_tensor([beta]) for beta in (0.9, 0.999))]
        operands = [parameter], [gradient], state, paddle.to_tensor([0.1]), None, [0.9, 0.999, 1e-8], [0.01]
        run(f"native_{rule}", *operands)
        results.append([parameter, *state])
    library.omp_set_num_threads(before)
    assert same(*results)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where, dtype", [*NARROW, pytest.param("gpu", "float16", marks=pytest.mark.gpu)])
def test_non_finite_values_propagate(device, where, dtype, value):
    """ReLU, pooling and the variance must propagate non-finite values to the loss."""
    x = np.random.RandomState(0).randn(1, 4, 4, 8).astype("float32")
    x[0, 1, 1, 0] = value
    x = paddle.to_tensor(x).astype(dtype)

    def channels():
        return paddle.ones([8]), paddle.zeros([8]), paddle.zeros([8]), paddle.ones([8])

    for activation in ACTIVATIONS:
        y = run("native_bn_inference", x, *channels(), None, EPSILON, activation)[0]
        assert (~np.isfinite(wide(y))).sum() == (1 if activation != "relu6" or np.isnan(value) else 0)
    assert (~np.isfinite(wide(run("native_max_pool", x, 2, 2, 0, 0)[0]))).sum() == 1
    fused = [("native_bn_act", [], [activation]) for activation in ACTIVATIONS]
    for name, addend, activation in (*fused, ("native_bn_add_relu", [x], [])):
        scale, bias, mean, variance = channels()
        y = run(name, x, *addend, scale, bias, mean, variance, 0.9, EPSILON, *activation)[0]
        # If the mean of a channel is not finite, all outputs of the channel are NaN.
        assert np.isnan(wide(y)[..., 0]).all()
        assert np.isfinite(wide(y)[..., 1:]).all()
        assert_only_first_channel_is_kept(mean, variance)


def assert_only_first_channel_is_kept(mean, variance):
    """Check that the running statistics of the first channel still have their initial values, 0 and 1, and that those
    of all other channels have changed and are finite."""
    assert (wide(mean)[0], wide(variance)[0]) == (0, 1)
    assert (wide(mean)[1:] != 0).all() and (wide(variance)[1:] != 1).all()
    assert np.isfinite(wide(mean)).all() and np.isfinite(wide(variance)).all()


@pytest.mark.parametrize("where, dtype", NARROW)
def test_running_statistics_skip_overflowed_variance(device, where, dtype):
    """The operator's output is finite, so the loss does not reveal the overflow."""
    x = np.random.RandomState(0).randn(2, 4, 4, 8).astype("float32")
    x[..., 0] *= 1e30
    mean, variance = paddle.zeros([8]), paddle.ones([8])
    x = paddle.to_tensor(x).astype(dtype)
    run("native_bn_act", x, paddle.ones([8]), paddle.zeros([8]), mean, variance, 0.9, EPSILON, "relu")
    assert_only_first_channel_is_kept(mean, variance)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paddle_resnet"


def flags(**changes):
    return parsing.make_settings({"device": "cpu", "data_layout": "NHWC"} | changes, {})


def test_missing_tools_are_reported(empty_cache, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    assert native.missing() == "no C++ compiler (no-such-compiler)"
    with pytest.raises(UsageError, match="--kernels native: no C.. compiler .no-such-compiler.; fix this problem"):
        flags(kernels="native").apply(resolution.Kernels)
    monkeypatch.setattr(native, "_nvrtc", lambda: None)
    monkeypatch.setenv("CXX", "true")
    assert native.missing((9, 0)) == "no NVRTC library (libnvrtc.so)"
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda gpu: (9, 0))
    assert chosen_on_gpu() == ("paddle", False)
    assert "custom kernels are unavailable (no NVRTC library (libnvrtc.so))" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    for path in (native._operators_file(), native._kernels_file((9, 0))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o644)
    assert native.missing((9, 0)) is None  # the cache contains both libraries


def test_nvrtc_of_the_environment_is_preferred(tmp_path):
    folders = "nvidia/cuda_nvrtc/lib", "user/nvidia/cuda_nvrtc/lib", "cuda/lib64"
    paths = [tmp_path / folder / "libnvrtc.so.12" for folder in folders]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    names = native._nvrtc_names([tmp_path, tmp_path / "user"], tmp_path / "cuda")
    assert names == [*map(str, paths), *native.NVRTC_NAMES]


def chosen_on_gpu(**changes):
    args = flags(device="gpu", **changes)
    args.apply(resolution.Kernels)
    return args.kernels, args.cuda_graph


@pytest.mark.parametrize(
    ("output", "problem"), [("note: x\na.cc:1: error: y", "a.cc:1: error: y"), ("killed", "killed\n")]
)
def test_error_of_compiler_is_reported(tmp_path, environment, output, problem):
    (tmp_path / "compiler").write_text(f"echo '{output}' >&2; exit 1")
    environment(CXX=f"sh {tmp_path}/compiler")
    with pytest.raises(native.Unavailable) as error:
        native._compile_operators(tmp_path / "target")
    assert str(error.value) == f"sh failed: {problem}"


@pytest.mark.parametrize("argument", ["operators.cc", "reference.cc", "-shared"])
def test_error_of_one_compiler_process_is_reported(tmp_path, environment, argument):
    (tmp_path / "compiler").write_text(f'case "$*" in *{argument}*) echo "error: y" >&2; exit 1;; esac')
    environment(CXX=f"sh {tmp_path}/compiler")
    with pytest.raises(native.Unavailable, match="^sh failed: error: y$"):
        native._compile_operators(tmp_path / "target")


def test_compiler_that_cannot_be_run_is_reported(tmp_path, environment):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\0")
    compiler.chmod(0o755)
    environment(CXX=str(compiler))
    with pytest.raises(native.Unavailable, match=rf"^{compiler} cannot be run \(Exec format error\)$"):
        native._compile_operators(tmp_path / "target")


class FakeNVRTC:
    """NVRTC's functions, which write "cubin" or a log. The attribute `options` contains the compiler options."""

    def __init__(self, version=(12, 4), log=None, error=0):
        self._version, self._log, self._error = version, log, error
        self.is_destroyed = False

    def nvrtcCreateProgram(self, *arguments):
        return self._error

    def nvrtcVersion(self, *references):
        for reference, number in zip(references, self._version, strict=True):
            reference._obj.value = number

    def nvrtcCompileProgram(self, program, count, options):
        self.options = [*options]
        return self._log is not None

    def _size(self, program, reference):
        reference._obj.value = 5

    def nvrtcGetCUBIN(self, program, memory):
        memory.raw = b"cubin"

    def nvrtcGetProgramLog(self, program, memory):
        memory.value = self._log

    def nvrtcDestroyProgram(self, program):
        self.is_destroyed = True

    nvrtcGetCUBINSize = nvrtcGetProgramLogSize = _size


@pytest.mark.parametrize(
    ("version", "is_split"), [((12, 3), False), ((11, 8), False), ((12, 4), True), ((13, 0), True)]
)
def test_only_recent_nvrtc_compiles_on_all_cores(tmp_path, version, is_split):
    nvrtc = FakeNVRTC(version)
    native._compile_kernels(nvrtc, "", (9, 0), tmp_path / "cubin")
    split = [b"--split-compile=0"] * is_split
    assert nvrtc.options == [b"--gpu-architecture=sm_90", b"--std=c++17", *split] and nvrtc.is_destroyed
    assert (tmp_path / "cubin").read_bytes() == b"cubin"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"error": 3}, "CreateProgram returned 3 for --gpu-architecture=sm_90"),
        ({"log": b"\na\nb"}, "a (--gpu-architecture=sm_90)"),
        ({"log": b""}, "no error message (--gpu-architecture=sm_90)"),
    ],
)
def test_error_of_nvrtc_is_reported(tmp_path, options, problem):
    with pytest.raises(native.Unavailable, match=re.escape(f"NVRTC failed: {problem}")):
        native._compile_kernels(FakeNVRTC(**options), "", (9, 0), tmp_path / "cubin")
    assert not (tmp_path / "cubin").exists()


FAULTS = [
    *(
        "compiler",
        "library",
        "library of ctypes",
        "cache folder",
        "unreadable cache folder",
        "home folder",
        "old NVRTC",
    ),
    "GPU unknown to NVRTC",
]


@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("fault", FAULTS)
def test_unavailable_kernels_are_reported(tmp_path, monkeypatch, capsys, kernels, fault):
    """With --kernels auto, the run uses Paddle's kernels and logs the reason. With --kernels native, the run stops with
    an error message."""
    capability, problem = (9, 0), ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "register", native.register.__wrapped__)
    # Replace the kernel build, which runs concurrently with the faulty operator build.
    if fault in ("compiler", "library", "library of ctypes"):
        monkeypatch.setattr(native, "_compile_kernels", lambda *args: args[-1].write_bytes(b"kernels"))
    if fault == "compiler":
        monkeypatch.setenv("CXX", "false")
        problem = "false failed: "
    elif fault in ("library", "library of ctypes"):
        monkeypatch.setattr(native, "_compile_operators", lambda target: target.write_bytes(b"no library"))
        if fault == "library of ctypes":
            monkeypatch.setattr(native, "load_op_meta_info_and_register_op", lambda path: None)
        problem = f"Paddle cannot load {native._operators_file()} ({native._operators_file()}: file too short)"
    elif fault == "cache folder":
        (tmp_path / "paddle_resnet").write_text("in the way")
        problem = f"{tmp_path}/paddle_resnet cannot be used (File exists; set XDG_CACHE_HOME"
    elif fault == "unreadable cache folder":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))
        problem = f"{native.cache_folder()} cannot be used (File name too long; set XDG_CACHE_HOME"
    elif fault == "old NVRTC":
        monkeypatch.setattr(native, "register", lambda: None)
        monkeypatch.setattr(native, "_nvrtc", lambda: SimpleNamespace())
        problem = "NVRTC is too old: nvrtcCreateProgram requires CUDA 11.1 or higher"
    elif fault == "home folder":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        problem = "there is no home folder"
    else:
        if native._nvrtc() is None:
            pytest.skip("no NVRTC library")
        monkeypatch.setattr(native, "register", lambda: None)
        capability, problem = (1, 2), "NVRTC failed: "
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda gpu: capability)
    if kernels == "native":
        with pytest.raises(UsageError, match=re.escape(f"--kernels native: {problem}") + ".*--kernels paddle"):
            flags(device="gpu", kernels="native").apply(resolution.Kernels)
    else:
        assert chosen_on_gpu() == ("paddle", False)
        assert f"custom kernels are unavailable ({problem}" in capsys.readouterr().out
    files = {path.suffix for path in tmp_path.glob("paddle_resnet/*")} - {".lock"}
    assert files == {"compiler": {".cubin"}, "library": {".cubin", ".so"}}.get(fault.removesuffix(" of ctypes"), set())


def test_both_compilers_run_concurrently(empty_cache, monkeypatch):
    both, images = threading.Barrier(2, timeout=20), []

    def compile_concurrently(*args):
        both.wait()
        args[-1].write_bytes(b"built")

    def register():
        native._build(native._operators_file(), native._compile_operators)
        return SimpleNamespace(paddle_resnet_set_image=lambda image, size: images.append((image, size.value)))

    for name in ("_compile_kernels", "_compile_operators"):
        monkeypatch.setattr(native, name, compile_concurrently)
    monkeypatch.setattr(native, "register", register)
    monkeypatch.setattr(native, "missing", lambda capability: None)
    native.load((9, 0))
    assert images == [(b"built", 5)]


def test_change_of_any_source_file_triggers_rebuild(tmp_path):
    """The changed source file may be a new file or a file in a subfolder. The operators are not rebuilt if only a
    kernel has changed."""
    sources = tmp_path / "native"
    shutil.copytree(native.SOURCES, sources)
    (sources / "new_folder").mkdir()
    names = [path.relative_to(sources) for path in sources.rglob("*") if path.suffix in (".cc", ".cu", ".cuh", ".h")]
    for name in (*names, Path("new.cu"), Path("new.h"), Path("new_folder/new.h")):
        before = native._operators_file(sources), native._kernels_file((9, 0), sources)
        with open(sources / name, "a") as file:
            file.write("// changed\n")
        after = native._operators_file(sources), native._kernels_file((9, 0), sources)
        assert (after[0] != before[0]) == (name.suffix in (".cc", ".h")), name
        assert (after[1] != before[1]) == (
            name.suffix in (".cu", ".cuh") or name.name in ("common.h", "activations.h", "optimizers.h")
        ), name


def test_each_version_and_gpu_has_its_own_build(monkeypatch):
    names = [native._operators_file()]
    for module, name in ((native.platform, "machine"), (paddle.version, "full_version"), (paddle.version, "commit")):
        value = (lambda: "other") if name == "machine" else "other"
        monkeypatch.setattr(module, name, value)
        names.append(native._operators_file())
    monkeypatch.setattr(native, "COMPILER_FLAGS", (*native.COMPILER_FLAGS, "-g"))
    names.append(native._operators_file())
    monkeypatch.setattr(native, "OPTIMIZATION", dict.fromkeys(native.OPTIMIZATION, "-O3"))
    names += [native._operators_file(), *(native._kernels_file(gpu) for gpu in ((9, 0), (8, 0), (8, 6)))]
    assert len(set(names)) == len(names)


def test_file_that_another_process_has_built_is_not_built_again(tmp_path):
    """The lock also excludes the other threads of a process, which replace the other process here."""
    built, is_compiling = tmp_path / "operators-1.so", threading.Event()

    def compile_slowly(target):
        is_compiling.set()
        time.sleep(0.1)  # until the second build waits for the lock
        target.write_bytes(b"by another process")

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(native._build, built, compile_slowly)
        is_compiling.wait(20)
        assert native._build(built, lambda target: pytest.fail("compiled again")) == built
    assert first.result() == built and built.read_bytes() == b"by another process"


def test_built_file_can_be_read_by_other_users(tmp_path):
    for mask in (0o077, 0):
        umask = os.umask(mask)
        try:
            built = native._build(tmp_path / f"{mask}/new/operators-1.so", lambda target: target.write_bytes(b""))
        finally:
            os.umask(umask)
        assert built.stat().st_mode & 0o777 == 0o755
    assert built.parent.stat().st_mode & 0o777 == 0o755  # otherwise, the cache would not be trusted


def test_built_file_needs_no_writable_folder(tmp_path):
    built = tmp_path / "operators.so"
    built.write_bytes(b"")
    assert native._build(built, lambda target: pytest.fail("compiled again")) == built
    assert [*tmp_path.iterdir()] == [built]  # not even a lock file


@pytest.mark.parametrize("fault", ["different owner", "writable", "writable by group", "writable folder"])
def test_library_writable_by_others_is_rebuilt(empty_cache, capsys, fault):
    built = native._operators_file()
    built.write_bytes(b"untrusted")
    if fault == "different owner":
        if os.geteuid() != 0:
            pytest.skip("only root can change the owner of a file")
        os.chown(built, 54321, 54321)
    elif fault != "writable folder":
        built.chmod(0o666 if fault == "writable" else 0o664)
    else:
        empty_cache.chmod(0o1777)
    built_now = native._build(native._operators_file(), lambda target: target.write_bytes(b"trusted"))
    assert built_now.read_bytes() == b"trusted"
    assert (built_now == built) == (fault != "writable folder")
    assert built_now.stat().st_mode & 0o022 == 0
    assert f"cache {empty_cache}: belongs to another user" in capsys.readouterr().err or built_now == built


def test_invalid_compiler_command_is_rejected(empty_cache, environment):
    environment(CXX="g++ 'open")
    with pytest.raises(UsageError, match="'open is not a command .No closing quotation.; fix this problem"):
        flags(kernels="native").apply(resolution.Kernels)


def test_kernels_and_capture_are_selected_by_device_and_flags(monkeypatch):
    for changes, kernels in (({}, "native"), ({"data_layout": "NCHW"}, "paddle"), ({"kernels": "paddle"}, "paddle")):
        args = flags(**changes)
        args.apply(resolution.Kernels)
        assert (args.kernels, args.cuda_graph) == (kernels, False)
    # The simulated GPUs meet the requirements of the custom kernels.
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(native, "missing", lambda capability: None)
    monkeypatch.setattr(native, "load", lambda capability: None)
    assert chosen_on_gpu() == ("native", True)
    for changes in ({"cuda_graph": False}, {"profile_steps": (3, 5)}):
        assert chosen_on_gpu(**changes) == ("native", False)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    for local_size in ("2", "1"):  # processes on this host
        monkeypatch.setenv("PADDLE_LOCAL_SIZE", local_size)
        assert chosen_on_gpu() == ("native", True)
    with pytest.raises(UsageError, match="--kernels native: supports NHWC only"):
        flags(kernels="native", data_layout="NCHW").apply(resolution.Kernels)


LINEAR_OR_FUSED = [f"_{name}" if name else "" for name in ACTIVATIONS]


# The lowest capability belongs to the oldest GPUs whose tensor cores Paddle 2.6 supports.
@pytest.mark.soak
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
def test_kernels_compile_without_gpu(tmp_path, capability):
    if native._nvrtc() is None:
        pytest.skip("no NVRTC library")
    native._compile_kernels(native._nvrtc(), native._kernel_source(), capability, tmp_path / "kernels")
    image = (tmp_path / "kernels").read_bytes()
    assert image.startswith(b"\x7fELF")
    kinds = {kind: [*LINEAR_OR_FUSED, "_add_relu", "_add_linear", "_add_mish"] for kind in ("apply", "infer", "reduce")}
    kinds |= {
        "gradient": LINEAR_OR_FUSED,
        "reduce": [*kinds["reduce"], "_add_relu_two", "_add_linear_two", "_add_mish_two"],
    }
    names = [f"bn_{kind}{fused}" for kind, all_fused in kinds.items() for fused in all_fused]
    names += [
        "bn_statistics",
        "max_pool",
        "max_pool_gradient",
        "average_pool",
        "average_pool_gradient",
        "image_sums",
        "scale_images",
        "sigmoid",
        "sigmoid_gradient",
    ]
    kinds = ("conv", "input_gradient", "filter_gradient")
    names += [f"depthwise_{kind}_k{kernel}_s{stride}" for kind in kinds for kernel in (3, 5) for stride in (1, 2)]
    for name in names:
        for dtype in ("f16x4", "bf16x4"):
            assert f"\0{name}_{dtype}\0".encode() in image, name
    names += ["check_gradients", "sum_squares", "lamb_norms", "lamb_norms_masters"]
    rules = ("momentum", "adamw", "radam", "lamb", "lookahead")
    names += [name for rule in rules for name in (rule, f"{rule}_masters")]
    names += ["affine", "affine_gradient", "depthwise_filter_sum"]
    for name in names:
        for dtype in ("f32", "f16", "bf16"):
            assert f"\0{name}_{dtype}\0".encode() in image, name
    for name in ("follow_averages", "concat_8", "concat_16", "split_8", "split_16"):
        assert f"\0{name}\0".encode() in image, name
    for dtype in ("f16", "bf16", "f16x4", "bf16x4"):
        assert f"\0pointwise_filter_gradient_{dtype}\0".encode() in image
    for dtype in ("f32", "f16", "bf16", "f16x4", "bf16x4"):
        assert f"\0pointwise_conv_128_{dtype}\0".encode() in image
    for dtype in ("f32", "f16", "bf16"):
        assert f"\0stem_{dtype}\0".encode() in image


def test_kernel_compiler_error_is_reported(tmp_path):
    if native._nvrtc() is None:
        pytest.skip("no NVRTC library")
    with pytest.raises(native.Unavailable, match="NVRTC failed: .*error"):
        native._compile_kernels(native._nvrtc(), "not CUDA;", (9, 0), tmp_path / "kernels")
