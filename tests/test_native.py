"""The operators against their formulas in float64, on the CPU and, marked gpu, in every type on a GPU."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_resnet import distributed, native
from utils.errors import UsageError
from utils.mode import RunScope

EPSILON = 1e-5
SHAPES = [(4, 7, 7, 64), (2, 5, 3, 24), (3, 1, 1, 8), (2, 3, 5, 296)]
GPU_SHAPES = [*SHAPES, (16, 7, 7, 2048), (32, 28, 28, 128)]
# Half a unit in the last place of a result of size 1 to 16, and some for the sums.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
CASES = [("cpu", "float32", shape) for shape in SHAPES] + [
    pytest.param("gpu", dtype, shape, marks=pytest.mark.gpu) for dtype in TOLERANCE for shape in GPU_SHAPES
]


@pytest.fixture
def device(request):
    """Eager mode on the CPU or the GPU, with the operators loaded."""
    is_gpu = request.node.callspec.params["where"] == "gpu"
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


def close(actual, expected, dtype):
    np.testing.assert_allclose(wide(actual), expected, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(expected).max()))


def run(name, *args):
    result = core.eager._run_custom_op(name, *args)
    return result if isinstance(result, list | tuple) else [result]


def normalise(x, scale, bias):
    """Returns output, mean, biased variance, normalised input."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    normalised = (x - mean) / np.sqrt(variance + EPSILON)
    return normalised * scale + bias, mean, variance, normalised


def gradients(dy, normalised, variance, scale):
    """Ioffe and Szegedy, arXiv:1502.03167, section 3. Returns those of input, scale and bias."""
    dscale, dbias, rows = (dy * normalised).sum((0, 1, 2)), dy.sum((0, 1, 2)), dy[..., 0].size
    dx = scale / np.sqrt(variance + EPSILON) * (dy - dbias / rows - normalised * dscale / rows)
    return dx, dscale, dbias


@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_bn_act(device, where, dtype, shape, relu):
    random, channels = Random(dtype), shape[-1]
    x, dy = random.images(shape, offset=np.arange(channels) % 7 - 3), random.images(shape)
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    old_mean, old_variance = wide(mean), wide(variance)
    y, coefficients = run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, relu)[:2]
    expected, batch_mean, batch_variance, normalised = normalise(wide(x), wide(scale), wide(bias))
    passes = expected > 0 if relu else np.ones(shape, bool)
    close(y, expected * passes, dtype)
    rows = x.size // channels
    close(mean, 0.9 * old_mean + 0.1 * batch_mean, "float32")
    close(variance, 0.9 * old_variance + 0.1 * batch_variance * rows / (rows - 1), "float32")
    results = run("native_bn_act_backward", x, dy, coefficients, None, relu)
    for result, wanted in zip(
        results, gradients(wide(dy) * passes, normalised, batch_variance, wide(scale)), strict=True
    ):
        close(result, wanted, dtype)
    again = run("native_bn_act_backward", x, dy, coefficients, None, relu)
    assert all(np.array_equal(wide(a), wide(b)) for a, b in zip(results, again, strict=True))


@pytest.mark.parametrize("summands", [1, 2])
@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_bn_add_relu(device, where, dtype, shape, summands):
    random, channels = Random(dtype), shape[-1]
    x, z, *dy = (random.images(shape) for _ in range(2 + summands))
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    y, coefficients, mask = run("native_bn_add_relu", x, z, scale, bias, mean, variance, 0.9, EPSILON)[:3]
    expected, _, batch_variance, normalised = normalise(wide(x), wide(scale), wide(bias))
    passes = expected + wide(z) > 0
    close(y, (expected + wide(z)) * passes, dtype)
    dx, dz, dscale, dbias = run("native_bn_add_relu_backward", x, dy, coefficients, mask, None)
    let_through = sum(wide(d) for d in dy) * passes
    close(dz, let_through, dtype)
    wanted = gradients(let_through, normalised, batch_variance, wide(scale))
    for result, value in zip((dx, dscale, dbias), wanted, strict=True):
        close(result, value, dtype)


@pytest.mark.parametrize("where, dtype, shape", CASES[:1] + CASES[len(SHAPES) :])
def test_a_channel_far_from_zero_keeps_its_variance(device, where, dtype, shape):
    """Mean 1000 standard deviations from zero, where the difference of float32 means of squares would be noise."""
    if dtype != "float32":
        pytest.skip("a half-precision input has no such channel")
    random, channels = Random(dtype), shape[-1]
    x = random.images(shape, offset=1000)
    scale, bias, mean, variance = (random.channels(channels) for _ in range(4))
    y = run("native_bn_act", x, scale, bias, mean, variance, 0.9, EPSILON, False)[0]
    np.testing.assert_allclose(wide(y), normalise(wide(x), wide(scale), wide(bias))[0], atol=2e-3)


@pytest.mark.parametrize("relu, with_addition", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("where, dtype, shape", CASES)
def test_bn_inference(device, where, dtype, shape, relu, with_addition):
    random = Random(dtype)
    x, z = random.images(shape), random.images(shape) if with_addition else None
    scale, bias, mean, variance = (random.channels(shape[-1]) for _ in range(4))
    y = run("native_bn_inference", x, scale, bias, mean, variance, z, EPSILON, relu)[0]
    expected = (wide(x) - wide(mean)) / np.sqrt(wide(variance) + EPSILON) * wide(scale) + wide(bias)
    expected = expected + wide(z) if with_addition else expected
    close(y, np.maximum(expected, 0) if relu else expected, dtype)


@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
@pytest.mark.parametrize(
    "where, dtype, shape",
    [("cpu", "float32", (2, 9, 8, 8))]
    + [pytest.param("gpu", dtype, (3, 17, 16, 40), marks=pytest.mark.gpu) for dtype in TOLERANCE],
)
def test_max_pool(device, where, dtype, shape, kernel, stride, padding):
    """Against Paddle's own in float32; the values are distinct but for the zeros, of which the first one counts."""
    random = Random(dtype)
    x = paddle.nn.functional.relu(random.images(shape))
    plain = x.astype("float32")
    plain.stop_gradient = False
    expected = paddle.nn.functional.max_pool2d(plain, kernel, stride, padding, data_format="NHWC")
    y, positions = run("native_max_pool", x, kernel, stride, padding)
    assert np.array_equal(wide(y), wide(expected))
    dy = [random.images(y.shape) for _ in range(2)]
    (dx,) = run("native_max_pool_backward", dy, positions, kernel, stride, padding, *shape[1:3])
    close(dx, max_pool_gradient(wide(plain), sum(wide(d) for d in dy), kernel, stride, padding), dtype)


def max_pool_gradient(x, dy, kernel, stride, padding):
    dx = np.zeros_like(x)
    for n, row, column, channel in np.ndindex(*dy.shape):
        top, left = row * stride - padding, column * stride - padding
        window = x[n, max(0, top) : top + kernel, max(0, left) : left + kernel, channel]
        i, j = np.unravel_index(window.argmax(), window.shape)
        dx[n, max(0, top) + i, max(0, left) + j, channel] += dy[n, row, column, channel]
    return dx


@pytest.mark.parametrize("where, dtype", [("cpu", "float32"), pytest.param("gpu", "float16", marks=pytest.mark.gpu)])
def test_not_a_number_goes_through(device, where, dtype):
    """A loss that is not finite must be seen: neither ReLU nor pooling may swallow it."""
    x = np.ones((1, 4, 4, 8), "float32")
    x[0, 1, 1, 0] = np.nan
    x = paddle.to_tensor(x).astype(dtype)
    one, zero = paddle.ones([8]), paddle.zeros([8])
    y = run("native_bn_inference", x, one, zero, zero, one, None, EPSILON, True)[0]
    assert np.isnan(wide(y)).sum() == 1
    assert np.isnan(wide(run("native_max_pool", x, 2, 2, 0)[0])).sum() == 1


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paddle_resnet"


def flags(**changes):
    defaults = {"kernels": "auto", "device": "cpu", "data_layout": "NHWC", "run_scope": RunScope.TRAIN_EVAL}
    return SimpleNamespace(**(defaults | changes))


def test_what_is_missing_is_named(empty_cache, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.missing() == "no C++ compiler (no-such-compiler)"
    with pytest.raises(UsageError, match="--kernels native: no C.. compiler .no-such-compiler.: install it, or give "):
        native.load()
    monkeypatch.setattr(native, "_nvrtc", lambda: None)
    monkeypatch.setenv("CXX", "true")
    assert native.missing((9, 0)) == "no NVRTC library (libnvrtc.so)"
    # On a GPU the choice is made by what is there, and said.
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda gpu: (9, 0))
    args = flags(device="gpu")
    native.resolve(args)
    assert args.kernels == "paddle"
    assert "Paddle's own kernels, which are slower: no NVRTC library (libnvrtc.so)" in capsys.readouterr().out


def test_compiler_that_fails_is_an_error_and_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UsageError, match="--kernels native: false failed: .*--kernels paddle"):
        native.register.__wrapped__()
    assert not list(empty_cache.glob("*.so"))


def test_choice_of_the_kernels(monkeypatch):
    for changes in ({}, {"data_layout": "NCHW"}, {"kernels": "paddle"}):
        args = flags(**changes)
        native.resolve(args)
        assert args.kernels == "paddle"
    # On GPUs that have all that is needed, but for training with several.
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(native, "missing", lambda capability: None)
    monkeypatch.setattr(native, "load", lambda capability: None)
    for world, scope, kernels in (
        (1, RunScope.TRAIN_ONLY, "native"),
        (2, RunScope.TRAIN_ONLY, "paddle"),
        (2, RunScope.EVAL_ONLY, "native"),
    ):
        monkeypatch.setattr(distributed, "world_size", lambda world=world: world)
        args = flags(device="gpu", run_scope=scope)
        native.resolve(args)
        assert args.kernels == kernels
    with pytest.raises(UsageError, match="--kernels native knows NHWC only"):
        native.resolve(flags(kernels="native", data_layout="NCHW"))


def test_kernels_compile_without_a_gpu(tmp_path):
    """For the oldest GPU that Paddle 2.6 knows tensor cores on, and for newer ones."""
    if native._nvrtc() is None:
        pytest.skip("no NVRTC library")
    for capability in ((7, 5), (8, 0), (9, 0)):
        native._compile_kernels(capability, tmp_path / "kernels")
        image = (tmp_path / "kernels").read_bytes()
        assert image.startswith(b"\x7fELF")
        for name in (b"bn_statistics_f16", b"bn_reduce_add_relu_bf16", b"max_pool_gradient_f32"):
            assert name in image


def test_error_of_the_kernel_compiler_is_passed_on(tmp_path, monkeypatch):
    if native._nvrtc() is None:
        pytest.skip("no NVRTC library")
    (tmp_path / "broken.cu").write_text("not CUDA;")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    monkeypatch.setattr(native, "KERNEL_FILES", ("broken.cu",))
    with pytest.raises(UsageError, match="--kernels native: NVRTC failed: .*error"):
        native._compile_kernels((9, 0), tmp_path / "kernels")
