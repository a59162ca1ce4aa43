from functools import cache, partial

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.models import MODELS, layers, registered
from paddle_resnet.models.mobilenet_v2 import MobileNetV2
from paddle_resnet.models.resnet import BasicBlock, ResNet
from paddle_resnet.utils.errors import UsageError

# tests/models/test_sizes.py tests the other families.
EXPECTED_PARAMETERS = {
    "EfficientNet_Lite0": 4_652_008,
    "EfficientNet_Lite1": 5_416_680,
    "EfficientNet_Lite2": 6_092_072,
    "MobileNetV3_Large": 5_483_032,
    "MobileNetV3_Small": 2_542_856,
}


def describe(network, shape):
    """Return (program, startup program, logits) of a network in evaluation mode."""
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        model = network()
        model.eval()
        out = model(static.data("data", [None, *shape], dtype="float32"))
    return main, startup, out


@cache
def described(arch):
    """Return the program of a network of the registry, which tests must not change."""
    return describe(MODELS[arch], (3, 64, 64))[0]


def build(network, shape):
    """Return (program, executor, logits) of a newly initialized network in evaluation mode."""
    main, startup, out = describe(network, shape)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    return main, exe, out


def parameters(program):
    return [np.array(static.global_scope().find_var(p.name).get_tensor()) for p in program.all_parameters()]


def set_parameters(program, arrays):
    for parameter, array in zip(program.all_parameters(), arrays, strict=True):
        assert tuple(parameter.shape) == array.shape
        static.global_scope().find_var(parameter.name).get_tensor().set(array, paddle.CPUPlace())


def randomized(program):
    """Return parameters with BN statistics and scales other than 0 and 1, so that the tests detect swapped values."""
    random = np.random.RandomState(0)
    return [a + random.uniform(0.1, 0.3, a.shape).astype("float32") if a.ndim == 1 else a for a in parameters(program)]


def vision_network(name):
    """Return a network of paddle.vision without dropout. The BN layers have the epsilon and momentum that the authors
    of the network used."""
    model = getattr(paddle.vision.models, name)()
    for layer in model.sublayers():
        if isinstance(layer, paddle.nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, paddle.nn.BatchNorm2D):
            layer._epsilon, layer._momentum = 1e-3, 0.99
    return model


@pytest.fixture
def float64():
    """Use float64. In float32, a different order of summation changes the sign of some ReLU6 inputs, and 52 layers
    amplify the difference."""
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("NCHW", marks=pytest.mark.soak), "NHWC"])
@pytest.mark.parametrize(
    ("arch", "vision_name", "parameters"),  # 3 parameters per ConvBN, 4 per squeeze-and-excitation, 2 per Linear
    [
        ("MobileNetV2", "mobilenet_v2", 52 * 3 + 2),
        ("MobileNetV3_Small", "mobilenet_v3_small", 34 * 3 + 9 * 4 + 2 * 2),
        pytest.param("MobileNetV3_Large", "mobilenet_v3_large", 46 * 3 + 8 * 4 + 2 * 2, marks=pytest.mark.soak),
    ],
)
def test_mobilenet_logits_and_gradients_match_paddle_vision(float64, layout, arch, vision_name, parameters):
    random = np.random.RandomState(1)
    images, slopes = random.randn(4, 3, 64, 64), random.randn(4, 1000)
    in_layout = images if layout == "NCHW" else images.transpose(0, 2, 3, 1)
    results, weights = [], None
    for network, x in (
        (lambda: vision_network(vision_name), images),
        (lambda: MODELS[arch](data_format=layout), in_layout),
    ):
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup), paddle.utils.unique_name.guard():
            out = network()(static.data("data", [None, *x.shape[1:]], dtype="float64"))
            loss = paddle.mean(out * static.data("slopes", [None, 1000], dtype="float64"))
            gradients = [gradient for _, gradient in static.append_backward(loss)]
        with static.scope_guard(static.Scope()):
            exe = static.Executor(paddle.CPUPlace())
            exe.run(startup)
            # With larger BN scales, activations reach the upper bound of each ReLU6.
            weights = weights or [4 * a if a.ndim == 1 else a for a in randomized(main)]
            set_parameters(main, weights)
            results.append(exe.run(main, {"data": x, "slopes": slopes}, [out, *gradients]))
    assert len(results[0]) == 1 + parameters
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6 * np.abs(expected).max() + 1e-14, rtol=0)


def test_resnet50_parameter_names_match_nvidia_example():
    """Checkpoints are loaded by parameter name. The network has a classifier and 53 convolutions with BN. A projection
    comes after the branch of its block."""
    program = described("ResNet50")
    names = [p.name for p in program.all_parameters()]
    expected = []
    for i in range(53):
        expected += [f"conv2d_{i}.w_0", *(f"batch_norm_{i}.{part}" for part in ("w_0", "b_0", "w_1", "w_2"))]
    assert names == [*expected, "linear_0.w_0", "linear_0.b_0"]
    shapes = {p.name: list(p.shape) for p in program.all_parameters()}
    # Projection of the first block, which follows the three convolutions of the branch.
    assert shapes["conv2d_4.w_0"] == [256, 64, 1, 1]
    assert shapes["conv2d_5.w_0"] == [64, 256, 1, 1]


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch == "EfficientNet_Lite1" else pytest.param(arch, marks=pytest.mark.slow)
        for arch in EXPECTED_PARAMETERS
    ],
)
def test_trainable_parameter_count(arch):
    program = described(arch)
    trainable = sum(int(np.prod(p.shape)) for p in program.all_parameters() if p.trainable)
    assert trainable == EXPECTED_PARAMETERS[arch]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "convolutions"), [("ResNet34", 36), ("ResNet101", 104), ("ResNet152", 155)])
def test_number_of_convolutions(arch, convolutions):
    program = described(arch)
    assert sum(op.type == "conv2d" for op in program.global_block().ops) == convolutions


def test_stride_is_in_3x3_convolution():
    program = described("ResNet50")
    block = program.global_block()
    strided = [op for op in block.ops if op.type == "conv2d" and op.attr("strides") == [2, 2]]
    kernels = [block.var(op.input("Filter")[0]).shape[2] for op in strided]
    # Strided convolutions are in the stem, and in the branches and projections of three stages.
    assert sorted(kernels) == [1, 1, 1, 3, 3, 3, 7]


def test_nhwc_logits_match_nchw():
    images = np.random.RandomState(1).randn(2, 3, 32, 32).astype("float32")
    nchw, exe, out = build(MODELS["Tiny"], (3, 32, 32))
    weights = randomized(nchw)
    set_parameters(nchw, weights)
    expected = exe.run(nchw, {"data": images}, [out])[0]
    nhwc, exe, out = build(lambda: MODELS["Tiny"](data_format="NHWC"), (32, 32, 3))
    set_parameters(nhwc, weights)
    logits = exe.run(nhwc, {"data": images.transpose(0, 2, 3, 1)}, [out])[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_fourth_channel_of_zeros_does_not_change_logits():
    images = np.random.RandomState(1).randn(2, 4, 32, 32).astype("float32")
    images[:, 3] = 0
    four, exe, out = build(lambda: MODELS["Tiny"](in_channels=4), (4, 32, 32))
    weights = parameters(four)
    expected = exe.run(four, {"data": images}, [out])[0]
    three, exe, out = build(MODELS["Tiny"], (3, 32, 32))
    set_parameters(three, [weights[0][:, :3], *weights[1:]])
    np.testing.assert_allclose(exe.run(three, {"data": images[:, :3]}, [out])[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "crop", "resize"),
    [
        ("ResNet50", 224, 256),
        ("resnet-50", 224, 256),
        ("efficientnet-lite0", 224, 256),
        ("EfficientNet_Lite1", 240, 272),
        ("EfficientNet_Lite2", 260, 292),
    ],
)
def test_default_preprocessing_is_that_of_the_authors(arch, crop, resize):
    network = registered(arch)
    assert (network.image_size, network.image_size * network.resize_ratio) == (crop, pytest.approx(resize))
    lite = {"interp": "cubic", "normalize_mean": [127 / 255] * 3, "normalize_std": [128 / 255] * 3}
    assert network.preprocessing == (lite if "ite" in arch else {})


def test_unknown_model_is_an_error():
    from paddle_resnet.models import build_model

    with pytest.raises(UsageError, match="ResNet51.*ResNet50"):
        build_model("ResNet51", 3, 3, "NCHW")


UNIFORM = 3**-0.5  # standard deviation of a uniform distribution between -1 and 1
TRUNCATED = 0.8796  # standard deviation of a standard normal distribution that is truncated at -2 and 2


@pytest.mark.parametrize(
    ("arch", "norm", "filters"),  # filters: {shape: standard deviation of the last filter with this shape}
    [
        (
            "EfficientNet_Lite0",
            (1e-3, 0.99),
            {
                (1280, 320, 1, 1): (2 / 1280) ** 0.5,
                (1152, 1, 5, 5): (2 / 25) ** 0.5,
                (1280, 1000): UNIFORM * 1000**-0.5,
            },
        ),
        (
            "MobileNetV3_Small",
            (1e-3, 0.99),
            dict.fromkeys([(576, 96, 1, 1), (576, 1, 5, 5), (576, 1024), (1024, 1000)], 0.09 * TRUNCATED),
        ),
        (
            "MobileNetV2",
            (1e-3, 0.997),
            {(1280, 96, 1, 1): 0.09 * TRUNCATED, (192, 1, 3, 3): 0.09 * TRUNCATED, (1280, 1000): 0.09 * TRUNCATED},
        ),
        (
            "ResNet with SE",
            (1e-5, 0.9),
            {
                (256, 256, 3, 3): (2 / (256 * 9)) ** 0.5,
                (16, 256, 1, 1): UNIFORM * 256**-0.5,
                (256, 16, 1, 1): UNIFORM * 16**-0.5,
                (256, 1000): 0.01,
            },
        ),
        (
            "GhostNet",
            (1e-5, 0.9),
            {
                (960, 160, 1, 1): UNIFORM * 160**-0.5,
                (480, 1, 3, 3): UNIFORM * 9**-0.5,
                (1280, 960, 1, 1): UNIFORM * 960**-0.5,
                (1280, 1000): UNIFORM * 1280**-0.5,
            },
        ),
        (
            "PPLCNet_x1_0",
            (1e-5, 0.9),
            {
                (512, 1, 5, 5): (2 / 25) ** 0.5,
                (128, 512, 1, 1): (2 / 512) ** 0.5,  # squeeze-and-excitation
                (1280, 512, 1, 1): (2 / 512) ** 0.5,
                (1280, 1000): (2 / 2280) ** 0.5,
            },
        ),
        (
            "PPHGNetV2_B0",
            (1e-5, 0.9),
            {
                (16, 32, 3, 3): (2 / 288) ** 0.5,
                (128, 1, 5, 5): (2 / 25) ** 0.5,
                (2048, 1024, 1, 1): (2 / 1024) ** 0.5,
                (2048, 1000): (2 / 3048) ** 0.5,
            },
        ),
    ],
)
def test_initialization_and_batch_normalization_match_reference_code(arch, norm, filters):
    paddle.seed(0)
    few_blocks = {"MobileNetV2": partial(MobileNetV2, stages=((6, 96, 1, 2),))}
    networks = MODELS | few_blocks | {"ResNet with SE": partial(ResNet, BasicBlock, (1,), width=256, se=True)}
    main, _, _ = build(networks[arch], (3, 32, 32))
    actual = {(round(op.attr("epsilon"), 8), round(op.attr("momentum"), 6)) for op in norms(main)}
    assert actual == {norm}
    by_shape = {tuple(p.shape): p.name for p in main.all_parameters()}
    for shape, deviation in filters.items():
        values = np.array(static.global_scope().find_var(by_shape[shape]).get_tensor())
        assert values.std() == pytest.approx(deviation, rel=0.03), shape
        assert abs(values.mean()) < 0.05 * deviation, shape


def test_numbers_of_channels_are_reduced_by_at_most_a_tenth():
    assert [layers.rounded(channels, 8) for channels in (1, 11, 12, 17, 18, 19, 20)] == [8, 16, 16, 16, 24, 24, 24]
    assert layers.rounded(10, 9) == 9


def test_normal_distribution_is_truncated_at_two_deviations_in_each_paddle_version(monkeypatch):
    monkeypatch.setattr(layers, "TruncatedNormal", lambda std: std)
    assert layers.truncated_normal(0.5) == 0.5
    monkeypatch.setattr(layers, "TruncatedNormal", lambda std, a=-2, b=2: (std, a, b))
    assert layers.truncated_normal(0.5) == (0.5, -1, 1)


def norms(program):
    return [op for op in program.global_block().ops if op.type == "batch_norm"]
