"""Variants of ResNet, compared with timm's networks."""

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import static

from helpers import logits_with_generated_weights
from paddle_resnet import models
from paddle_resnet.models import layers
from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet

DEPTHS = (1, 2, 1, 1)
D = {"stem": "deep", "shortcut_pool": "average"}
# {case: (block, options, the first two logits)}. The logits were recorded after the networks had been compared with
# timm's networks.
VARIANTS = {
    "plain": (BasicBlock, {}, (8.99438685, 3.35155227)),
    "D": (BottleneckBlock, D, (-1.00816479, 2.13002953)),
    "first projection": (BasicBlock, D | {"first_projection": True}, (-7.43781881, 1.05194235)),
    "SE": (BottleneckBlock, D | {"se": True}, (0.126724056, 5.43775911)),
    "groups": (BottleneckBlock, {"groups": 32, "group_width": 4}, (2.38648805, 2.24756167)),
    "small stem, Mish": (BasicBlock, {"stem": "small", "activation": F.mish}, (-3.65511253, 0.812830967)),
    "max-blur": (BottleneckBlock, {"stem": "deep", "shortcut_pool": "max-blur"}, (-1.55886665, 2.30295693)),
    "SE, groups, Mish, self-attention": (
        BottleneckBlock,
        D | {"se": True, "groups": 32, "group_width": 4, "activation": "mish", "self_attention": True},
        (-35.9392330, -2.08754998),
    ),
}


@pytest.fixture(scope="module")
def references(once):
    """Return {"CASE/name": array}. timm_resnets.py describes the arrays."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")

    def compute(folder):
        script = Path(__file__).with_name("timm_resnets.py")
        subprocess.run([sys.executable, script, folder / "arrays.npz", *VARIANTS], check=True)

    return np.load(once("timm_resnets", compute) / "arrays.npz")


@pytest.fixture
def float64():
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", VARIANTS)
def test_logits_and_gradients_equal_those_of_timm(references, float64, case, layout):
    block, options, _ = VARIANTS[case]
    arrays = {name.removeprefix(f"{case}/"): references[name] for name in references if name.startswith(f"{case}/")}
    images = arrays["images"] if layout == "NCHW" else arrays["images"].transpose(0, 2, 3, 1)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        model = ResNet(block, DEPTHS, data_format=layout, **options)
        out = model(static.data("data", [None, *images.shape[1:]], dtype="float64"))
        evaluation = main.clone(for_test=True)
        loss = paddle.mean(out * static.data("slopes", [None, 1000], dtype="float64"))
        gradients = [gradient for _, gradient in static.append_backward(loss)]
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    parameters = main.all_parameters()
    assert len(parameters) == sum(name.startswith("weight.") for name in arrays)
    for i, parameter in enumerate(parameters):
        assert tuple(parameter.shape) == arrays[f"weight.{i}"].shape
        tensor = static.global_scope().find_var(parameter.name).get_tensor()
        tensor.set(arrays[f"weight.{i}"], paddle.CPUPlace())
    found = exe.run(evaluation, {"data": images}, [out])
    found += exe.run(main, {"data": images, "slopes": arrays["slopes"]}, [out, *gradients])
    assert len(gradients) == sum(name.startswith("gradient.") for name in arrays)
    names = ["evaluation", "training", *(f"gradient.{i}" for i in range(len(gradients)))]
    tolerance = 1e-5 if "self-attention" in case else 1e-7  # self-attention approximates a singular value
    for name, value in zip(names, found, strict=True):
        expected = arrays[name]
        np.testing.assert_allclose(value, expected, atol=tolerance * np.abs(expected).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("case", VARIANTS)
def test_logits_equal_recorded_values(float64, case):
    block, options, expected = VARIANTS[case]
    logits = logits_with_generated_weights(lambda: ResNet(block, DEPTHS, **options))
    np.testing.assert_allclose(logits[0, :2], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "parameters"),
    [
        ("ResNet18_vd", 11_708_744 + 64 * 64 + 2 * 64),  # timm's resnet18d plus PaddleClas's projection
        ("ResNet50_vd", 25_576_264),  # timm's resnet50d
        ("SE_ResNet50_vd", 28_107_256),  # number of parameters of timm's ResNet with the same options
        ("ResNeXt50_32x4d", 25_028_904),  # torchvision's and timm's resnext50_32x4d
        ("XResNet50", 25_576_264),
        ("XResNet50_Mish_SA", 25_576_264 + 256 * 256 + 1),
        # Parameters of timm's resnext50_32x4d, plus those that a deep stem, squeeze-and-excitation and self-attention
        # add to ResNet50.
        (
            "XSEResNeXt50_Mish_SA",
            25_028_904 + (25_576_264 - 25_557_032) + (28_107_256 - 25_576_264) + 256 * 256 + 1,
        ),
        ("XResNeXt50_Mish_SA_NoPool", 25_028_904 + (25_576_264 - 25_557_032) + 256 * 256 + 1),
    ],
)
def test_parameter_counts_match_timm_and_torchvision(arch, parameters):
    main = static.Program()
    with static.program_guard(main, static.Program()), paddle.utils.unique_name.guard():
        models.MODELS[arch]()
    assert sum(int(np.prod(p.shape)) for p in main.all_parameters() if p.trainable) == parameters


def initial(arch):
    """Initialize a network and return the network and {parameter: array}."""
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        model = models.MODELS[arch](num_classes=10)
    static.Executor(paddle.CPUPlace()).run(startup)
    return model, {p.name: np.array(static.global_scope().find_var(p.name).get_tensor()) for p in main.all_parameters()}


@pytest.mark.slow
def test_residual_branches_of_xresnet50_are_initially_zero():
    model, values = initial("XResNet50")
    scales = [[values[layer.bn.weight.name] for layer in block.branch] for block in model.stages]
    assert [[scale.min() == scale.max() == 1 for scale in block] for block in scales] == [[True, True, False]] * 16
    assert all((block[-1] == 0).all() for block in scales)
    assert values[model.last.weight.name].std() == pytest.approx((2 / 2048) ** 0.5, rel=0.02)


def test_xresnet50_mish_has_mish_and_blur_pools():
    main = static.Program()
    with static.program_guard(main, static.Program()), paddle.utils.unique_name.guard():
        models.MODELS["XResNet50_Mish"]()(static.data("x", [None, 3, 64, 64]))
    kinds = [op.attr("pooling_type") if op.type == "pool2d" else op.type for op in main.global_block().ops]
    assert (kinds.count("mish"), kinds.count("relu")) == (3 + 16 * 3, 0)
    # The stem and three shortcuts have a BlurPool, which consists of two average pools. The last pool is global.
    assert (kinds.count("max"), kinds.count("avg")) == (4, 2 * 4 + 1)


@pytest.mark.slow
def test_network_without_max_pooling_in_the_stem_has_twice_the_resolution():
    with static.program_guard(static.Program(), static.Program()), paddle.utils.unique_name.guard():
        x = static.data("x", [None, 3, 64, 64])
        sizes = []
        for arch in ("XSEResNeXt50_Mish_SA", "XResNeXt50_Mish_SA_NoPool"):
            model = models.MODELS[arch]()
            model.global_pool.register_forward_pre_hook(lambda layer, inputs: sizes.append(inputs[0].shape[2:]))
            model(x)
    assert sizes == [(2, 2), (4, 4)]


@pytest.mark.parametrize("arch", ["XSEResNeXt50_Mish_SA", "XResNeXt50_Mish_SA_NoPool"])
def test_network_for_imagenette_has_at_most_26_million_parameters(arch):
    main = static.Program()
    with static.program_guard(main, static.Program()), paddle.utils.unique_name.guard():
        models.MODELS[arch](num_classes=10)
    assert sum(int(np.prod(p.shape)) for p in main.all_parameters() if p.trainable) <= 26_000_000


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", [(6, 8), (7, 5)])
def test_blur_pool_applies_filter_1_2_1_with_replicated_borders(layout, size):
    images = np.random.RandomState(0).randn(2, 3, *size).astype("float32")
    padded = np.pad(images, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="edge")
    for axis in (2, 3):
        ends = padded.shape[axis]
        before, here, after = (padded.take(range(i, ends - 2 + i), axis) for i in range(3))
        padded = (before + 2 * here + after) / 4
    expected = padded[:, :, ::2, ::2]
    main = static.Program()
    with static.program_guard(main):
        x = static.data("x", images.shape if layout == "NCHW" else images.transpose(0, 2, 3, 1).shape)
        y = layers.BlurPool(layout)(x)
    feed = images if layout == "NCHW" else images.transpose(0, 2, 3, 1)
    [found] = static.Executor(paddle.CPUPlace()).run(main, {"x": feed}, [y])
    np.testing.assert_allclose(found if layout == "NCHW" else found.transpose(0, 3, 1, 2), expected, atol=1e-6)


def test_initial_weight_of_self_attention_has_he_deviation():
    with static.program_guard(static.Program(), static.Program()), static.scope_guard(static.Scope()):
        attention = layers.SelfAttention(256, "NCHW")
        static.Executor(paddle.CPUPlace()).run(static.default_startup_program())
        weight, gamma = (
            np.array(static.global_scope().find_var(p.name).get_tensor()) for p in (attention.weight, attention.gamma)
        )
    assert weight.std() == pytest.approx((2 / 256) ** 0.5, rel=0.02)
    assert gamma == 0


def attention_with_gradients(images, weight, gamma, slopes):
    """Compute self-attention in eager mode with fastai's formula, but with gamma divided by the square root of the
    number of pixels, and with NumPy's singular vectors. Return the output [N, C, H, W] and the gradients of
    sum(slopes * output) with respect to image, weight and gamma."""
    left, _, right = np.linalg.svd(weight[..., 0])
    with paddle.base.dygraph.guard(paddle.CPUPlace()):
        images, weight, gamma = (paddle.to_tensor(array, stop_gradient=False) for array in (images, weight, gamma))
        rows = images.flatten(2)
        largest = paddle.to_tensor(left[:, :1].T) @ weight[:, :, 0] @ paddle.to_tensor(right[:1].T)
        values = F.conv1d(rows, weight / largest)
        y = rows + gamma / rows.shape[2] ** 0.5 * paddle.bmm(paddle.bmm(rows, rows.transpose([0, 2, 1])), values)
        (y.reshape(images.shape) * paddle.to_tensor(slopes)).sum().backward()
        return [a.numpy() for a in (y.reshape(images.shape), images.grad, weight.grad, gamma.grad)]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_self_attention_equals_formula_of_fastai(float64, layout):
    def in_layout(array):
        return array if layout == "NCHW" else array.transpose(0, 2, 3, 1)

    random = np.random.RandomState(0)
    images, slopes = random.randn(2, 2, 32, 3, 5)
    weight, gamma = random.randn(32, 32, 1), np.array([0.7])
    expected = attention_with_gradients(images, weight, gamma, slopes)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x, s = (static.data(n, in_layout(images).shape, "float64") for n in "xs")
        x.stop_gradient = False
        layer = layers.SelfAttention(32, layout)
        y = layer(x)
        gradients = static.gradients(paddle.mean(y * s) * images.size, [x, layer.weight, layer.gamma])
    # The power that approximates the projection has no gradient, only the four other products.
    assert [op.type for op in main.global_block().ops].count("matmul_v2_grad") == 4
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    for parameter, array in ((layer.weight, weight), (layer.gamma, gamma)):
        static.global_scope().find_var(parameter.name).get_tensor().set(array, exe.place)
    found = exe.run(main, {"x": in_layout(images), "s": in_layout(slopes)}, [y, *gradients])
    for i, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        reference = in_layout(reference) if i < 2 else reference
        np.testing.assert_allclose(ours, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)


@pytest.mark.slow
def test_self_attention_follows_the_last_branch_of_the_first_stage():
    model, values = initial("XResNet50_Mish_SA")
    attentions = [(i, block.self_attention) for i, block in enumerate(model.stages) if block.self_attention]
    assert [i for i, _ in attentions] == [2]
    assert values[attentions[0][1].gamma.name] == 0  # the output of the branch is zero at initialization


@pytest.mark.parametrize("pool", ["max", "max-blur"])
@pytest.mark.parametrize("size", [7, 8])
def test_pooled_shortcut_has_same_shape_as_branch(pool, size):
    block = partial(BottleneckBlock, 8, 4, 2, shortcut_pool=pool)
    main = static.Program()
    with static.program_guard(main):
        y = block()(static.data("x", [1, 8, size, size]))
    assert tuple(y.shape) == (1, 16, 4, 4)


@pytest.mark.parametrize(("stem", "side"), [("deep", 8), ("small", 32)])
def test_deep_stem_reduces_size_and_small_stem_keeps_it(stem, side):
    main = static.Program()
    with static.program_guard(main):
        model = ResNet(BasicBlock, (1,), stem=stem, width=8)
        model.stages.register_forward_pre_hook(lambda layer, inputs: shapes.append(inputs[0].shape))
        shapes = []
        model(static.data("x", [1, 3, 32, 32]))
    assert shapes == [(1, 8, side, side)]


def test_basic_blocks_with_groups_are_an_error():
    with pytest.raises(ValueError, match="groups=2.*BottleneckBlock"):
        ResNet(BasicBlock, (1,), groups=2)
