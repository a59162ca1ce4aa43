"""Conversion of single operators to ONNX. tests/serving/test_writers.py tests networks."""

from functools import partial

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.components import quantization
from paddle_resnet.models import layers
from paddle_resnet.models.layers import BlurPool, SelfAttention, SqueezeExcitation, product, sigmoid
from paddle_resnet.serving import onnx_writer
from paddle_resnet.utils.errors import UsageError


def inference_program(layer, shape=(3, 8, 8), dtype="float32"):
    """Run a layer in evaluation mode and return (program, inputs, outputs, read, input array, output array)."""
    program, startup, scope = static.Program(), static.Program(), static.Scope()
    with static.program_guard(program, startup), paddle.utils.unique_name.guard(), static.scope_guard(scope):
        images = static.data("images", [None, *shape], dtype=dtype)
        network = layer()
        if hasattr(network, "eval"):
            network.eval()
        out = network(images)
        exe = static.Executor(paddle.CPUPlace())
        exe.run(startup)
        array = np.random.RandomState(0).randn(2, *shape)
        array = (100 * np.abs(array) if dtype == "uint8" else array).clip(max=255).astype(dtype)
        [expected] = exe.run(program, {"images": array}, [out])
    return program, [images], [out], lambda name: np.array(scope.find_var(name).get_tensor()), array, expected


def folded_shift(groups=1):
    """Return a layer with two convolutions. The second one is followed by a shift, as of a folded BN layer."""
    first, second = (paddle.nn.Conv2D(3, 3, 3, groups=groups, bias_attr=False) for _ in range(2))
    values = paddle.nn.initializer.Assign(np.array([0.5, -1, 2], np.float32))
    shift = static.create_parameter([3], "float32", default_initializer=values)
    return lambda x: layers._append("elementwise_add", {"X": second(F.relu(first(x))), "Y": shift}, axis=1)


def attention():
    layer = SelfAttention(3, "NCHW")
    layer.gamma = layer.create_parameter([1], default_initializer=paddle.nn.initializer.Constant(0.5))
    return layer


def shift_of_shared_convolution():
    """Return a layer that adds a shift to the output of a convolution, and uses this output once more."""
    convolution, shift = paddle.nn.Conv2D(3, 3, 1, bias_attr=False), static.create_parameter([3], "float32")
    return lambda x: layers._append("elementwise_add", {"X": (y := convolution(x)), "Y": shift}, axis=1) + y


def along_channels(kind, is_constant=False):
    """Return a layer that adds, multiplies or divides by one number per channel, for which the attribute axis is 1."""

    def layer(x):
        parameter = static.create_parameter([3], "float32")
        y = parameter if is_constant else parameter + parameter
        return layers._append(f"elementwise_{kind}", {"X": x, "Y": y}, axis=1)

    return lambda: layer


F = paddle.nn.functional


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (paddle.nn.LeakyReLU, r"operator leaky_relu \(output leaky_relu_\d.tmp_0\) cannot be translated to ONNX"),
        (lambda: paddle.nn.Conv2D(3, 2, 3, padding="valid"), r"operator conv2d with padding_algorithm VALID \(output"),
        (lambda: paddle.nn.AdaptiveAvgPool2D(2), r"operator pool2d with ksize \[2, 2\] \(output"),
        (lambda: paddle.nn.AdaptiveMaxPool2D(1), r"operator max_pool2d_with_index \(output"),
        (lambda: paddle.nn.Flatten(1, 2), r"operator flatten_contiguous_range with stop_axis 2 \(output"),
        (lambda: paddle.nn.Flatten(2), r"operator flatten_contiguous_range with start_axis 2 \(output"),
        (lambda: lambda x: x * 2 + 1, r"operator scale with bias 1.0 \(output"),
        (lambda: lambda x: paddle.mean(x, 1), r"operator reduce_mean with reduce_all False \(output"),
        (lambda: lambda x: F.dropout(x, 0.5), r"operator dropout with is_test False \(output"),
        *(
            (along_channels(kind), rf"operator elementwise_{kind} with axis 1 \(output")
            for kind in ("add", "mul", "div")
        ),
        (along_channels("add", is_constant=True), r"operator elementwise_add with axis 1 \(output"),
        (shift_of_shared_convolution, r"operator elementwise_add with axis 1 \(output"),
        (
            lambda: lambda x: layers._append("pool2d", {"X": x}, ksize=[1, 1], pooling_type="max", adaptive=True),
            r"operator pool2d with pooling_type max \(output",
        ),
        (lambda: lambda x: x.astype("float64"), r"operator cast with out_dtype 6 \(output"),
    ],
)
def test_unsupported_operator_is_an_error(layer, message):
    pytest.importorskip("onnx")
    program, inputs, outputs, read, *_ = inference_program(layer)
    with pytest.raises(UsageError, match=f"^ONNX: {message}.*; remove --onnx"):
        onnx_writer.to_onnx(program, inputs, outputs, read, "")


@pytest.mark.parametrize(
    "layer",
    [
        lambda: paddle.nn.Conv2D(3, 2, 3, padding=[0, 1, 2, 0]),  # a convolution with bias
        lambda: paddle.nn.Conv2D(3, 2, 3, stride=2, padding="same"),
        lambda: paddle.nn.Conv2D(3, 2, 3, padding="same", dilation=2),
        lambda: paddle.nn.AvgPool2D(3, 2, padding=1),
        lambda: paddle.nn.AvgPool2D(3, 2, padding=1, exclusive=False),
        lambda: paddle.nn.MaxPool2D(3, 2, padding=[0, 1, 1, 0]),
        lambda: paddle.nn.MaxPool2D(3, 2, ceil_mode=True),
        lambda: paddle.nn.AvgPool2D(3, stride=3, ceil_mode=True),  # the last windows contain only two rows or columns
        lambda: lambda x: sigmoid(x + x),
        lambda: lambda x: F.hardsigmoid(x + x),
        lambda: lambda x: F.hardswish(x + x),
        lambda: lambda x: F.silu(x + x),
        lambda: lambda x: F.swish(x + x),
        lambda: lambda x: F.mish(x + x),
        lambda: lambda x: paddle.concat([x, F.relu(x), x], axis=1),
        lambda: SqueezeExcitation(3, 2, "NCHW"),
        lambda: BlurPool("NCHW"),
        attention,
        lambda: lambda x: product(x + x, x, trans_x=True),
        lambda: paddle.nn.BatchNorm2D(3, epsilon=1e-3),
        lambda: paddle.nn.Dropout(0.5),
        lambda: lambda x: x.reshape([-1, 192]),
        paddle.nn.Flatten,
        lambda: paddle.nn.Flatten(1, 3),
        folded_shift,
        partial(folded_shift, groups=3),
    ],
)
def test_onnx_output_matches_paddle(layer):
    onnxruntime = pytest.importorskip("onnxruntime")
    program, inputs, outputs, read, array, expected = inference_program(layer)
    model = onnx_writer.to_onnx(program, inputs, outputs, read, "a text")
    assert [(entry.key, entry.value) for entry in model.metadata_props] == [(onnx_writer.METADATA, "a text")]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"images": array})[0], expected, atol=1e-5)


@pytest.mark.parametrize("engine", ["tensorrt", "onnxruntime", None])
def test_quantized_layers_match_fake_quantized_program(engine):
    """Without an engine, the quantization is omitted. For onnxruntime, the bias is rounded to INT32 levels."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    paddle.seed(0)  # with other weights, a different rounding of a sum may change an activation by one level
    program, inputs, outputs, read, array, unquantized = inference_program(folded_shift)
    scope, exe = static.Scope(), static.Executor(paddle.CPUPlace())
    parameters = {v.name: read(v.name) for v in program.list_vars() if isinstance(v, paddle.base.framework.Parameter)}
    with static.program_guard(program, static.Program()), static.scope_guard(scope):
        quantization.insert(program)
        if engine is not None:
            quantization.use_levels_of(engine, program, 8)
        values = parameters | {quantization.range_name(0): [2.5], quantization.range_name(1): [1.5]}
        for name, value in values.items():
            scope.var(name).get_tensor().set(np.asarray(value, np.float32), paddle.CPUPlace())
        [expected] = exe.run(program, {"images": array}, outputs)
        assert np.abs(expected - unquantized).max() > 1e-2
        expected = unquantized if engine is None else expected

    def read_quantized(name):
        return np.array(scope.find_var(name).get_tensor())

    model = onnx_writer.to_onnx(program, inputs, outputs, read_quantized, "", engine)
    constants = {constant.name: onnx.numpy_helper.to_array(constant) for constant in model.graph.initializer}
    [bias_scales] = [v for k, v in constants.items() if k.endswith(".bias.scales")] or [np.zeros(3)]
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # 8-bit weights, see inference.open_onnx
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    differences = np.abs(session.run(None, {"images": array})[0] - expected).max(axis=(0, 2, 3))
    assert np.all(differences <= 1e-5 + bias_scales / 2)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_float16_model_matches_paddle(dtype):
    """The types of the input, the output and integer constants do not change. Only the last softmax runs in float32."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")

    def layer():
        def network(x):
            x = x.astype("float32") * 0.01 if dtype == "uint8" else x
            return F.softmax((F.softmax(x) * x).reshape([-1, 192]))

        return network

    program, inputs, outputs, read, array, expected = inference_program(layer, dtype=dtype)
    model = onnx_writer.to_float16(onnx_writer.to_onnx(program, inputs, outputs, read, ""))
    assert [node.op_type for node in model.graph.node] == [
        *("Cast", *["Mul"] * (dtype == "uint8"), "Softmax", "Mul", "Reshape", "Cast", "Softmax"),
    ]
    arrays = [onnx.numpy_helper.to_array(constant) for constant in model.graph.initializer]
    assert arrays[-1].tolist() == [-1, 192] and all(a.dtype == np.float16 for a in arrays[:-1])
    session = onnxruntime.InferenceSession(
        onnx_writer.with_logits(model.SerializeToString()), providers=["CPUExecutionProvider"]
    )
    actual, logits = session.run(None, {"images": array})
    assert actual.dtype == logits.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=5e-3)
    exponentials = np.exp(logits)
    np.testing.assert_allclose(actual, exponentials / exponentials.sum(1, keepdims=True), rtol=1e-4)


def test_bias_of_int8_convolution_is_rounded_to_nearest_level():
    """float32 represents the largest levels only to the nearest multiple of 64."""
    random = np.random.RandomState(0)
    scale, scales = np.float32(0.0123), random.uniform(1e-4, 1e-2, 1000).astype(np.float32)
    bias = random.uniform(-3, 3, 1000).astype(np.float32)
    levels, bias_scales = onnx_writer._quantized_bias(bias, scale, scales)
    quanta = scales.astype(np.float64) * scale
    assert (levels.dtype, bias_scales.dtype) == (np.int32, np.float32)
    assert np.abs(levels * quanta - bias).max() <= quanta.max() / 2
    assert np.all(np.abs(levels * quanta - bias) <= quanta / 2 * (1 + 1e-9))
    np.testing.assert_allclose(bias_scales, quanta, rtol=1e-7)
    constants = {"w": np.full([1000, 1, 1, 1], 63, np.int8), "s": 1e-12 * scales, "x": scale}
    onnx_writer._limit_bias(bias, ("", "x", ""), ("w", "s", ""), constants)
    levels, _ = onnx_writer._quantized_bias(bias, scale, constants["s"])
    assert np.abs(levels).min() >= 2**30 - 64 and np.abs(levels).max() <= 2**30 + 64
    assert np.all(np.sign(levels) == np.sign(bias))


def test_scales_for_large_biases_do_not_change_weights():
    """The first filter is nearly zero, so its bias would be too large a multiple of its scale."""
    levels = np.array([[[[127]], [[-64]]], [[[127]], [[-64]]]], np.int8)
    constants = {"weight": levels, "weight scale": np.array([1e-12, 1e-2], np.float32), "scale": np.float32(0.05)}
    before, bias = levels * constants["weight scale"].reshape(2, 1, 1, 1), np.array([3, -3], np.float32)
    onnx_writer._limit_bias(bias, ("x", "scale", "zero"), ("weight", "weight scale", "zero"), constants)
    scales = constants["weight scale"]
    assert scales[1] == np.float32(1e-2) and constants["weight"].dtype == np.int8
    assert np.all(np.abs(bias) / (constants["scale"] * scales) <= 2**30 * (1 + 1e-6))
    after = constants["weight"] * scales.reshape(2, 1, 1, 1)
    np.testing.assert_allclose(after[1], before[1])
    np.testing.assert_allclose(after[0], before[0], atol=scales[0] / 2)
