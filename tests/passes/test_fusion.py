"""Programs with custom operators have the same results as programs with Paddle's operators. The tests run on the CPU in
float32. test_gpu.py tests half precision on GPUs, and native/test_native.py tests single operators."""

from collections import Counter
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn, static
from paddle.utils import unique_name

from conftest import NHWC, assert_one_error, frozen, losses, phase
from helpers import build, random_batches
from paddle_resnet import graph, models, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.components import precision
from paddle_resnet.job import processes
from paddle_resnet.models import layers
from paddle_resnet.models.ghostnet import GhostNet
from paddle_resnet.models.mobilenet_v3 import MobileNetV3
from paddle_resnet.models.pphgnet_v2 import LearnableAffine, PPHGNetV2
from paddle_resnet.models.pplcnet import PPLCNet
from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.passes import all_reduces, folding, fusion
from paddle_resnet.step import scalars
from paddle_resnet.step.compile import fused_operators

BLOCKS = {
    "bottleneck": partial(ResNet, BottleneckBlock, (1, 2, 1, 1), width=8),
    "basic": partial(ResNet, BasicBlock, (2, 1, 1, 1), width=8),
    "Mish": partial(ResNet, BottleneckBlock, (1, 2, 1, 1), width=8, activation="mish"),
}


@pytest.fixture(scope="module", autouse=True)
def operators():
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()


def types(prog):
    return Counter(op.type for op in prog.global_block().ops)


def randomize_affine_layers(prog, place):
    """Add random numbers to the parameters of LearnableAffine, which are initially 1 and 0."""
    random = np.random.RandomState(1)
    for parameter in prog.all_parameters():
        if parameter.name.startswith("learnable_affine"):
            value = variables.read(parameter.name) + random.uniform(-0.2, 0.2, [1])
            variables.set_variable(parameter.name, value.astype("float32"), place)


def train(args, batches):
    """Train for a few steps without and with custom operators, and return (losses, {name: persistable variable}) of
    each run."""
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(frozen(args), main, startup, 10)
    plain, results, exe = main.clone(), [], static.Executor(paddle.CPUPlace())
    fusion.fuse(main)
    for prog in (plain, main):
        with static.scope_guard(static.Scope()):
            paddle.seed(0)
            exe.run(startup)
            randomize_affine_layers(plain, exe.place)
            step_losses = [exe.run(prog, {"data": x, "label": y}, [fetchs["loss"][0]])[0].item() for x, y in batches]
            names = [v.name for v in plain.list_vars() if v.persistable and static.global_scope().find_var(v.name)]
            names = [name for name in names if name.startswith(("conv", "batch", "linear", "learnable"))]
            results.append((step_losses, {name: variables.read(name) for name in names}))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_fused_training_has_same_results(parse, register, block):
    """Losses, parameters, velocities and running means are equal. The running variances differ: the custom operators
    use the unbiased variance, like Paddle's GPU kernels, whereas Paddle's CPU kernels use the biased variance, which is
    smaller by the factor (n - 1) / n."""
    register("Tiny", BLOCKS[block])
    args = parse(*NHWC, "--image-shape", "4,48,32")
    batches = random_batches(2, (48, 32, 4))
    (expected, plain), (result, fused) = train(args, batches)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        tolerance = 0.07 if name.endswith(".w_2") else 1e-4
        np.testing.assert_allclose(fused[name], value, rtol=tolerance, atol=1e-4, err_msg=name)


MOBILE = {
    "MobileNetV3": partial(MobileNetV3, ((3, 16, 16, True, F.relu, 1), (3, 32, 24, True, F.hardswish, 2)), 32),
    "PPHGNetV2": partial(PPHGNetV2, stages=((8, 64, 2, True, True, 5),)),
    "PPLCNet": partial(PPLCNet, blocks=((3, 32, False, 1), (5, 64, True, 2))),
    "GhostNet": partial(GhostNet, blocks=((3, 16, 16, False, 1), (3, 48, 24, True, 2))),
}


@pytest.mark.parametrize("network", ["Tiny", "TinyMobile", "PPHGNetV2", "PPLCNet"])
def test_custom_operators_compute_all_convolutions_on_a_cpu(parse, register, network):
    register(network, models.MODELS.get(network) or MOBILE[network])
    args = parse(*NHWC, "--kernels", "native", "--model-arch-name", network)
    if not native.has_onednn():
        pytest.skip("this build of Paddle contains no oneDNN 3")
    native.load()
    for is_train in (True, False):
        compiled = build(args, is_train=is_train)[0]
        counts = fused_operators(args, compiled)
        assert counts["native_conv2d"] > 1
        assert counts.get("native_conv2d_backward", 0) == counts["native_conv2d"] * is_train
        types = {node.name() for node in compiled._graph.nodes() if node.is_op()}
        assert not types & {"conv2d", "conv2d_grad", "depthwise_conv2d", "depthwise_conv2d_grad"}


@pytest.fixture
def assert_same_training(monkeypatch):
    """Return a function that asserts that fusion does not change losses and variables. Both runs use Paddle's kernels
    for BN and for the functions of fusion.py in `unfused`. With different BN kernels, rounding would decide whether
    ReLU6 propagates the gradient of some pixels."""

    def assert_same_training(args, unfused):
        for name in ("_fuse_training", *unfused):
            monkeypatch.setattr(fusion, name, lambda graph, op: None)
        batches = random_batches(2, (32, 32, 4))
        (expected, plain), (result, fused) = train(args, batches)
        np.testing.assert_allclose(result, expected, rtol=1e-6)
        for name, value in plain.items():
            # The gradients of affine layers are sums of thousands of values of both signs, which may cancel out.
            rounding = 1e-5 if name.startswith("learnable_affine") else 1e-6
            atol = 1e-5 * np.abs(value).max() + rounding
            np.testing.assert_allclose(fused[name], value, rtol=0, atol=atol, err_msg=name)

    return assert_same_training


def test_fused_training_with_depthwise_convolutions_has_same_results(parse, assert_same_training):
    assert_same_training(parse(*NHWC, "--model-arch-name", "TinyMobile"), unfused=())


@pytest.mark.slow
@pytest.mark.parametrize("network", MOBILE)
def test_fused_training_of_mobile_network_has_same_results(parse, register, assert_same_training, network):
    register("Tiny", MOBILE[network])
    assert_same_training(parse(*NHWC), unfused=["_fuse_depthwise_conv"])


@pytest.fixture
def pointwise_kernels(monkeypatch, tensor_cores):
    """Apply the custom operators for 1x1 convolutions to float32, the only type that they support on the CPU."""
    monkeypatch.setattr(fusion, "POINTWISE_TYPES", (paddle.float32,))
    monkeypatch.setattr(fusion, "POINTWISE_PIXELS", 1)


def test_fused_training_with_pointwise_convolutions_has_same_results(parse, assert_same_training, pointwise_kernels):
    args = parse(*NHWC, "--model-arch-name", "TinyMobile")
    assert_same_training(args, unfused=["_fuse_depthwise_conv"])


def test_filter_gradients_of_narrow_pointwise_convolutions_use_custom_operator(parse, pointwise_kernels):
    main, startup = static.Program(), static.Program()
    program.build(frozen(parse(*NHWC, "--model-arch-name", "MobileNetV2")), main, startup, 10)
    fusion.fuse(main)
    block, split = main.global_block(), set()
    for op in block.ops:
        if op.type == "native_pointwise_conv_backward_filter":
            split.add(tuple(block.var(op.output("DFilter")[0]).shape))
    channels = [(16, 32), (96, 16), (24, 96), (144, 24), (24, 144), (32, 144), (192, 32), (32, 192)]
    assert split == {(*pair, 1, 1) for pair in channels}
    written = [op for op in block.ops if op.type == "conv2d_grad" and op.output("Filter@GRAD")]
    shapes = {tuple(block.var(op.input("Filter")[0]).shape) for op in written}
    assert not shapes & split and len(shapes) > 5


def test_all_operators_of_residual_network_are_replaced(parse):
    main, startup = static.Program(), static.Program()
    program.build(frozen(parse(*NHWC, "--kernels", "native")), main, startup, 10)
    before = types(main)
    fusion.fuse(main)
    after = types(main)
    removed = ("batch_norm", "batch_norm_grad", "relu", "relu_grad", "sum", "momentum")
    assert not any(after[name] for name in removed)
    assert after["native_bn_act"] + after["native_bn_add_relu"] == before["batch_norm"]
    assert after["native_max_pool"] == after["native_max_pool_backward"] == 1
    assert after["native_momentum"] == 1  # a single operator updates all parameters
    for includes_frozen in (True, False):
        assert len(all_reduces.bn_statistics(main, includes_frozen)) == 2 * before["batch_norm"]
    assert fusion.fuse(main) == 0


def test_all_parts_of_an_update_in_half_precision_are_replaced(parse, gpu_lists):
    flags = "--clip-grad-norm 1 --ema 0.9 --lookahead 5,0.5 --dropout 0.2 --lr-decay-by-layer 0.5"
    args = parse(*NHWC, *flags.split())
    args.amp, args.amp_dtype, args.amp_level, args.use_dynamic_loss_scaling = True, "float16", "O2", True
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 10)
    updates = graph.updates(main)
    assert {bool(op.input("MasterParam")) for op in updates} == {True, False}
    rates = len({(op.input("LearningRate")[0], bool(op.input("MasterParam"))) for op in updates})
    main, args.kernels = static.Program(), "native"
    program.build(frozen(args), main, static.Program(), 10)
    fusion.fuse(main)
    after = types(main)
    removed = ["momentum", "check_finite_and_unscale", "update_loss_scaling", "squared_l2_norm", "lerp", "memcpy"]
    assert not any(after[name] for name in (*removed, "dropout", "dropout_grad"))
    expected = {"native_check_finite": 1, "native_clip_factor": 1, "native_momentum": rates, "native_lookahead": 2}
    expected |= {"native_ema": 1, "native_dropout": 2}  # dropout and its gradient
    assert {name: after[name] for name in expected} == expected
    operators = main.global_block().ops
    unscale = {op.type: op.input("Unscale@OPTIONAL")[0] for op in operators if "Unscale@OPTIONAL" in op.input_names}
    assert unscale["native_clip_factor"] == "unscale"
    assert unscale["native_momentum"] == unscale["native_ema"] == "clip_factor"  # 0 in a skipped step
    for op in operators:
        if op.type == "native_lookahead":
            assert op.input("Rate") == op.input("Unscale@OPTIONAL") == [f"{scalars.PREFIX}lookahead"]
            assert op.attr("hyperparameters") == [0.5]
            assert len(op.attr("decays")) == len(op.input("Parameters@VECTOR"))


@pytest.mark.parametrize("network", ["Tiny", "TinyMobile", *MOBILE])
def test_fused_evaluation_has_same_results(register, request, parse, network):
    if network in MOBILE:
        register(network, MOBILE[network])
    args = parse(*NHWC, "--model-arch-name", network)
    main, startup = static.Program(), static.Program()
    paddle.seed(1)
    fetchs, *_ = program.build(frozen(args), main, startup, 0, is_train=False)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    random = np.random.RandomState(1)
    for name in [v.name for v in main.list_vars() if v.persistable and v.name.startswith("batch_norm")]:
        shape = variables.read(name).shape
        variables.set_variable(name, random.uniform(0.5, 2, shape).astype("float32"), exe.place)
    randomize_affine_layers(main, exe.place)
    programs = [main]
    for has_pointwise in (False, True):
        if has_pointwise:
            request.getfixturevalue("pointwise_kernels")
        programs.append(main.clone())
        fusion.fuse(programs[-1])
        after, depthwise = types(programs[-1]), types(main)["depthwise_conv2d"]
        assert after["native_depthwise_conv_bn_inference"] == depthwise
        pointwise = after["native_pointwise_conv_bn_inference"]
        assert pointwise == types(main)["conv2d"] - after["conv2d"]
        assert pointwise > 0 if has_pointwise else pointwise == 0
        assert after["native_bn_inference"] == types(main)["batch_norm"] - depthwise - pointwise
    for x, y in random_batches(2, (32, 32, 4)):
        expected, *results = (
            exe.run(p, {"data": x, "label": y}, [variable for variable, _ in fetchs.values()]) for p in programs
        )
        for result in results:
            assert [value.shape for value in result] == [value.shape for value in expected]
            for value, reference in zip(result, expected, strict=True):
                if value.dtype == np.float32:  # losses and the values from which the confidence is computed
                    np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)
                else:
                    np.testing.assert_array_equal(value, reference)


def test_folded_evaluation_with_affine_layers_has_same_results(register, parse):
    register("Tiny", MOBILE["PPHGNetV2"])
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(frozen(parse(*NHWC)), main, startup, 0, is_train=False)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    randomize_affine_layers(main, exe.place)
    batches = [dict(zip(("data", "label"), batch, strict=True)) for batch in random_batches(2, (32, 32, 4))]
    expected = [exe.run(main, batch, [fetchs["loss"][0]])[0] for batch in batches]
    folding.fold_batch_norms(main, exe, -1)
    folded = types(main)
    fusion.fuse(main)
    assert types(main)["native_affine"] == folded["relu"] > 0
    losses = [exe.run(main, batch, [fetchs["loss"][0]])[0] for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_unsupported_layouts_and_widths_are_not_fused(parse, register):
    main, startup = static.Program(), static.Program()
    program.build(frozen(parse()), main, startup, 10)
    fusion.fuse(main)
    assert not [name for name in types(main) if name.startswith("native_")]
    register("Tiny", partial(ResNet, BasicBlock, (1, 1, 1, 1), width=6))
    main, startup = static.Program(), static.Program()
    program.build(frozen(parse(*NHWC)), main, startup, 10)
    fusion.fuse(main)
    widths = {True: set(), False: set()}
    for op in main.global_block().ops:
        if op.type in ("batch_norm", "native_bn_act", "native_bn_add_relu"):
            (scale,) = op.input("Scale")
            widths[op.type == "batch_norm"].add(main.global_block().var(scale).shape[0])
    assert widths == {True: {6}, False: {12, 24, 48}}  # 6 is not a multiple of the vector size 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels, is_fused", [(12, True), (16, True), (100, True), (6, False), (10, False)])
def test_channels_must_be_multiple_of_4_in_all_types(dtype, channels, is_fused):
    """Half-precision programs require a GPU, so this test compares no results. test_depthwise_conv in
    native/test_native.py compares them."""
    main = static.Program()
    with static.program_guard(main, static.Program()):
        x = static.data("x", [None, 6, 6, channels], dtype)
        filters = static.data("filters", [channels, 1, 3, 3], dtype)
        y = F.conv2d(x, filters, padding=1, groups=channels, data_format="NHWC")
        F.max_pool2d(batch_norm(y), 3, 2, 1, data_format="NHWC")
    fusion.fuse(main)
    assert types(main)["native_depthwise_conv_bn_inference"] == types(main)["native_max_pool"] == is_fused
    assert fusion.paddle_depthwise(main) == (() if is_fused else (f"3x3, stride 1, {channels} channels",))


def small_program(build, place="cpu"):
    """Build a program with initialized parameters.

    Args:
        build: function of images [N, 6, 6, 8]. The loss is the mean square of the output.
        place: "cpu" or "gpu".
    Returns:
        (program, loss, executor)
    """
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        loss = paddle.mean(build(static.data("data", [None, 6, 6, 8])) ** 2)
        paddle.optimizer.SGD(0.1).minimize(loss)
    exe = static.Executor(processes.place(place))
    exe.run(startup)
    return main, loss, exe


def bn(**flags):
    return nn.BatchNorm2D(8, data_format="NHWC", **flags)


def fixed_bn(**flags):
    layer = bn(**flags)
    layer.eval()
    return layer


def frozen_parameters():
    return {name: paddle.ParamAttr(trainable=False) for name in ("weight_attr", "bias_attr")}


def frozen_filter():
    return {"weight_attr": paddle.ParamAttr(trainable=False)}


def conv(x):
    return nn.Conv2D(8, 8, 1, data_format="NHWC")(x)


def depthwise(x, kernel, padding=None, channels=8, **flags):
    padding = kernel // 2 if padding is None else padding
    return nn.Conv2D(8, channels, kernel, padding=padding, groups=8, data_format="NHWC", **flags)(x)


def global_average_pool(x):
    return nn.AdaptiveAvgPool2D(1, data_format="NHWC")(x)


def excite(x):
    return x * layers.sigmoid(global_average_pool(x))


def excite_twice(x):
    averages = global_average_pool(x)
    return x * layers.sigmoid(averages) * layers.sigmoid(2 * averages)


def affine(x, frozen=(), layer=None):
    """Apply a LearnableAffine layer whose parameters in `frozen` are not trained."""
    layer = layer or LearnableAffine()
    for name in frozen:
        getattr(layer, name).trainable, getattr(layer, name).stop_gradient = False, True
    return layer(x)


def affine_product(x):
    layer = LearnableAffine()
    y = x * layer.scale
    return y + layer.bias + y


def affine_twice(x):
    layer = LearnableAffine()
    return affine(F.relu(affine(x, layer=layer)), layer=layer)


def dropout(x):
    """Append a dropout operator that does not change its input."""
    return F.dropout(x, 0.5, training=False)


def no_gradient(x):
    x.stop_gradient = True
    return x


def with_gradient(x):
    x.stop_gradient = False
    return x


def max_pool(x, kernel, **flags):
    return F.max_pool2d(x, kernel, 1, kernel // 2, data_format="NHWC", **flags)


UNUSUAL = {
    "global statistics": (lambda x: F.relu(bn(use_global_stats=True)(conv(x))), 0),
    "evaluation statistics": (lambda x: F.relu(fixed_bn()(conv(x)) + conv(x)), 0),
    "evaluation statistics before all trained layers": (lambda x: conv(F.relu(fixed_bn(**frozen_parameters())(x))), 1),
    "batch statistics in evaluation": (lambda x: conv(F.relu(fixed_bn(use_global_stats=False)(x))), 0),
    "frozen scale and bias": (lambda x: F.relu(bn(**frozen_parameters())(conv(x))), 0),
    "frozen before all trained layers": (lambda x: conv(F.relu(bn(**frozen_parameters())(x))), 0),
    "batch normalization of the images": (lambda x: F.relu(bn()(x)), 0),
    "addend without a gradient": (lambda x: F.relu(bn()(conv(x)) + no_gradient(x * 2)), 0),
    "added to itself": (lambda x: (lambda y: F.relu(y + y))(bn()(conv(x))), 1),
    "output with two consumers": (lambda x: (lambda y: F.relu(y) + y)(bn()(conv(x))), 1),
    "addition without activation": (lambda x: bn()(conv(x)) + conv(x), 1),
    "second addend without activation": (lambda x: conv(x) + bn()(conv(x)), 1),
    "two normalized addends without activation": (lambda x: bn()(conv(x)) + bn()(conv(x)), 2),
    "addition without activation or gradient": (lambda x: bn()(conv(x)) + no_gradient(x * 2), 1),
    "second addend without activation, first with two readers": (
        lambda x: (lambda y: y + bn()(conv(y)))(bn()(conv(x))),
        2,
    ),
    "chain of additions": (lambda x: (lambda y: conv(y) + y)((lambda y: y + bn()(conv(y)))(conv(x))), 1),
    "residual sum with two readers": (lambda x: (lambda y: conv(y) + y)(F.relu(bn()(conv(x)) + conv(x))), 1),
    "residual sum with three readers": (
        lambda x: (lambda y: conv(y) + conv(y) + y)(F.relu(bn()(conv(x)) + conv(x))),
        1,
    ),
    "images as the first addend": (lambda x: conv(F.relu(x + fixed_bn(**frozen_parameters())(x))), 1),
    "second addend": (lambda x: (lambda y: F.relu(y + bn()(conv(y))))(conv(x)), 1),
    "ReLU6": (lambda x: F.relu6(9 * bn()(conv(x))) + F.relu6(bn()(conv(x))), 2),
    "hard-swish": (lambda x: F.hardswish(bn()(conv(x))), 1),
    "SiLU": (lambda x: F.silu(bn()(conv(x))), 1),
    "Mish": (lambda x: F.mish(bn()(conv(x))), 1),
    "Mish after an addition": (lambda x: F.mish(bn()(conv(x)) + conv(x)), 1),
    "hard-swish after an addition": (lambda x: F.hardswish(bn()(conv(x)) + conv(x)), 1),
    "Mish with a different threshold": (lambda x: layers._append("mish", {"X": bn()(conv(x))}, threshold=0.1), 1),
    "activation without a kernel": (lambda x: F.leaky_relu(bn()(conv(x))), 1),
    "addend of one pixel per image": (
        lambda x: F.relu(bn()(conv(x)) + paddle.mean(conv(x), axis=[1, 2], keepdim=True)),
        1,
    ),
    "depthwise 3x3": (lambda x: depthwise(conv(x), 3), 1),
    "depthwise before batch normalization": (lambda x: F.relu(bn()(depthwise(conv(x), 3, bias_attr=False))), 2),
    "depthwise before evaluation statistics": (
        lambda x: F.relu(fixed_bn()(depthwise(conv(x), 3, bias_attr=False))),
        1,
    ),
    "depthwise before evaluation statistics before all trained layers": (
        lambda x: conv(F.relu(fixed_bn(**frozen_parameters())(depthwise(x, 3, bias_attr=False, **frozen_filter())))),
        1,
    ),
    "depthwise before evaluation statistics and an addition": (
        lambda x: conv(
            F.relu(fixed_bn(**frozen_parameters())(depthwise(x, 3, bias_attr=False, **frozen_filter())) + x)
        ),
        2,
    ),
    "depthwise 5x5 with stride 2": (lambda x: depthwise(conv(x), 5, stride=2), 1),
    "depthwise convolution of the images": (lambda x: depthwise(x, 3), 1),
    "depthwise with a frozen filter": (
        lambda x: depthwise(conv(x), 3, weight_attr=paddle.ParamAttr(trainable=False)),
        1,
    ),
    "depthwise 7x7": (lambda x: depthwise(conv(x), 7), 0),
    "depthwise with stride 3": (lambda x: depthwise(conv(x), 3, stride=3), 0),
    "depthwise with dilation": (lambda x: depthwise(conv(x), 3, dilation=2), 0),
    "depthwise with two filters per channel": (lambda x: depthwise(conv(x), 3, channels=16), 0),
    "depthwise with padding at the bottom and right": (lambda x: depthwise(conv(x), 3, padding=[0, 1, 0, 1]), 1),
    "depthwise with padding at the bottom only": (lambda x: depthwise(conv(x), 3, padding=[0, 1, 1, 1]), 0),
    "depthwise with SAME padding": (lambda x: depthwise(conv(x), 3, padding="SAME"), 1),
    "depthwise with SAME padding and stride 2": (lambda x: depthwise(conv(x), 5, padding="SAME", stride=2), 1),
    "depthwise with VALID padding": (lambda x: depthwise(conv(x), 5, padding="VALID"), 1),
    "depthwise with unknown height": (lambda x: depthwise(paddle.reshape(conv(x), [0, -1, 6, 8]), 3), 0),
    "small pool": (lambda x: max_pool(conv(x), 3), 2),
    "largest pool": (lambda x: max_pool(conv(x), 15), 2),
    "larger pool": (lambda x: max_pool(conv(x), 16), 0),
    "pool with windows that contain only padding": (lambda x: F.max_pool2d(conv(x), 2, 1, 2, data_format="NHWC"), 0),
    "max pool, padded at the bottom and right": (
        lambda x: F.max_pool2d(conv(x), 2, 1, [0, 1, 0, 1], data_format="NHWC"),
        2,
    ),
    "average pool, padded at the bottom and right": (
        lambda x: F.avg_pool2d(conv(x), 2, 1, [0, 1, 0, 1], data_format="NHWC"),
        0,
    ),
    "max pool, padded at the right": (lambda x: F.max_pool2d(conv(x), 2, 1, [0, 0, 0, 1], data_format="NHWC"), 0),
    "pool whose output size is rounded up": (
        lambda x: F.max_pool2d(conv(x), 3, 2, ceil_mode=True, data_format="NHWC"),
        0,
    ),
    "pool whose number of columns is rounded up": (
        lambda x: F.max_pool2d(conv(x)[:, :, 1:], 2, 2, ceil_mode=True, data_format="NHWC"),
        0,
    ),
    "pool in ceil mode without rounding": (
        lambda x: F.max_pool2d(conv(x), 2, 2, ceil_mode=True, data_format="NHWC"),
        2,
    ),
    "squeeze-and-excitation": (lambda x: excite(conv(x)), 5),
    "squeeze-and-excitation after an addition": (lambda x: excite(F.relu(bn()(conv(x)) + conv(x))), 6),
    "squeeze-and-excitation of the images": (lambda x: conv(x) + excite(x), 3),
    "squeeze-and-excitation of a layer with another reader": (lambda x: (lambda y: conv(y) + excite(y))(conv(x)), 5),
    "squeeze-and-excitation after max pooling": (lambda x: excite(max_pool(conv(x), 3)), 7),
    "factors times image": (lambda x: (lambda y: layers.sigmoid(global_average_pool(y)) * y)(conv(x)), 2),
    "averages with two readers": (lambda x: excite_twice(conv(x)), 9),
    "dropout between": (lambda x: excite(dropout(F.relu(dropout(bn()(conv(x)))))), 6),
    "one factor per pixel": (lambda x: x * layers.sigmoid(conv(x)[:, :, :, :1]), 0),
    "factors of a different layer": (lambda x: conv(x) * layers.sigmoid(global_average_pool(conv(x))), 5),
    "factors of a different layer, image with another reader": (
        lambda x: (lambda y: y * layers.sigmoid(global_average_pool(conv(x))) + conv(y))(conv(x)),
        5,
    ),
    "factors of a different layer, image averaged over windows": (
        lambda x: (
            lambda y: (
                y * layers.sigmoid(global_average_pool(conv(x)))
                + F.avg_pool2d(y, 3, 1, 1, exclusive=False, data_format="NHWC")
            )
        )(conv(x)),
        7,
    ),
    "factors of images with a gradient": (
        lambda x: with_gradient(x) * layers.sigmoid(global_average_pool(conv(x.detach()))),
        5,
    ),
    "one factor per value": (lambda x: (lambda y: y * layers.sigmoid(y))(global_average_pool(conv(x))), 2),
    "average over windows": (lambda x: F.avg_pool2d(conv(x), 2, data_format="NHWC"), 2),
    "average without padding": (lambda x: F.avg_pool2d(conv(x), 2, 1, 1, data_format="NHWC"), 2),
    "average with padding": (lambda x: F.avg_pool2d(conv(x), 3, 2, 1, exclusive=False, data_format="NHWC"), 2),
    "average with two readers": (
        lambda x: (lambda y: conv(y) + y)(F.avg_pool2d(conv(x), 3, 1, 1, data_format="NHWC")),
        2,
    ),
    "average whose output size is rounded up": (
        lambda x: F.avg_pool2d(conv(x), 3, 2, ceil_mode=True, data_format="NHWC"),
        0,
    ),
    "concatenation": (lambda x: paddle.concat([conv(x), x], axis=-1), 1),
    "concatenation of two layers": (lambda x: paddle.concat([conv(x), conv(x)[..., :4]], axis=3), 2),
    "concatenation of a layer with itself": (lambda x: (lambda y: paddle.concat([y, y], axis=3))(conv(x)), 2),
    "concatenation of three layers": (lambda x: paddle.concat([conv(x)] * 3, axis=3), 0),
    "concatenation of rows": (lambda x: paddle.concat([conv(x), conv(x)], axis=1), 0),
    "concatenation of odd channels": (lambda x: paddle.concat([conv(x), conv(x)[..., :3]], axis=3), 0),
    "affine": (lambda x: affine(conv(x)), 1),
    "affine after BN and ReLU": (lambda x: affine(F.relu(bn()(conv(x)))), 2),
    "affine of 6 channels": (lambda x: affine(conv(x)[..., :6]), 1),
    "affine with two readers": (lambda x: (lambda y: conv(y) + y)(affine(conv(x))), 1),
    "affine of a layer with two readers": (lambda x: (lambda y: affine(y) + y)(conv(x)), 1),
    "two affine layers with the same parameters": (lambda x: affine_twice(conv(x)), 2),
    "affine of the images": (lambda x: affine(x), 1),
    "affine with a frozen scale": (lambda x: affine(conv(x), ["scale"]), 1),
    "affine with a frozen bias": (lambda x: affine(conv(x), ["bias"]), 1),
    "frozen affine": (lambda x: affine(conv(x), ["scale", "bias"]), 1),
    "frozen affine before all trained layers": (lambda x: conv(affine(x, ["scale", "bias"])), 1),
    "affine of the images with a frozen scale": (lambda x: affine(x, ["scale"]), 0),
    "affine of the images with a frozen bias": (lambda x: affine(x, ["bias"]), 1),
    "affine whose product has two readers": (lambda x: affine_product(conv(x)), 0),
    "affine of numbers per image": (lambda x: affine(paddle.flatten(global_average_pool(conv(x)), 1)), 1),
    "affine with a scale that is not a parameter": (
        lambda x: (lambda y: y * paddle.reshape(paddle.mean(y), [1]) + LearnableAffine().bias)(conv(x)),
        0,
    ),
    "pool with unknown height": (lambda x: max_pool(paddle.reshape(conv(x), [0, -1, 6, 8]), 3), 0),
}


def pointwise_bn(x, is_frozen=True, **flags):
    """Apply a 1x1 convolution and BN with fixed statistics."""
    flags |= frozen_filter() if is_frozen else {}
    return fixed_bn(**frozen_parameters())(nn.Conv2D(8, 8, 1, data_format="NHWC", bias_attr=False, **flags)(x))


# {case: (network, number of 1x1 convolutions that are fused with BN)}.
POINTWISE = {
    "activation": (lambda x: conv(F.hardswish(pointwise_bn(x))), 1),
    "no activation": (lambda x: conv(pointwise_bn(x)), 1),
    "addition": (lambda x: conv(pointwise_bn(x) + x), 1),
    "two normalized summands": (lambda x: conv(F.relu(pointwise_bn(x) + pointwise_bn(x))), 2),
    "trained filter": (lambda x: F.relu(pointwise_bn(x, is_frozen=False)), 0),
    "trained input": (lambda x: F.relu(pointwise_bn(conv(x))), 0),
    "stride 2": (lambda x: conv(pointwise_bn(x, stride=2)), 0),
    "padding": (lambda x: conv(pointwise_bn(x, padding=1)), 0),
    "groups": (lambda x: conv(pointwise_bn(x, groups=2)), 0),
}


@pytest.mark.parametrize("case", POINTWISE)
def test_pointwise_convolutions_are_fused_with_fixed_statistics(pointwise_kernels, case):
    build, operators = POINTWISE[case]
    assert_same_results(build, lambda main: types(main)["native_pointwise_conv_bn_inference"] == operators)


@pytest.mark.parametrize("widest, fused", [(7, 0), (8, 1)])
def test_wide_pointwise_convolutions_are_not_fused(pointwise_kernels, monkeypatch, widest, fused):
    monkeypatch.setitem(fusion.POINTWISE_BN_CHANNELS, paddle.float32, widest)
    build, _ = POINTWISE["activation"]
    assert_same_results(build, lambda main: types(main)["native_pointwise_conv_bn_inference"] == fused)


@pytest.mark.parametrize("pixels, width, split", [(36, 6, 1), (37, 6, 0), (1, -1, 0)])
def test_filter_gradients_of_small_images_are_not_replaced(pointwise_kernels, monkeypatch, pixels, width, split):
    """Width -1 is unknown."""
    monkeypatch.setattr(fusion, "POINTWISE_PIXELS", pixels)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        images = static.data("data", [None, width, width, 8])
        images.stop_gradient = False  # the gradient of the convolution is complete
        paddle.optimizer.SGD(0.1).minimize(paddle.mean(conv(images)))
    fusion.fuse(main)
    assert types(main)["native_pointwise_conv_backward_filter"] == split


def images(channels=8, dtype="float32", height=6, name="images"):
    return static.data(name, [None, height, height, channels], dtype)


def filters(dtype="float32", size=1, inputs=8):
    return static.data("filters", [8, inputs, size, size], dtype)


def batch_norm(x, layout="NHWC"):
    mean, variance, scale, bias = (static.data(name, x.shape[-1:]) for name in "mvsb")
    return F.batch_norm(x, mean, variance, scale, bias, training=False, data_format=layout)


def append(op_type, inputs, outputs=("Out",), **attrs):
    """Append an operator and return its first output. Paddle's functions reject or convert some inputs."""
    block = static.default_main_program().global_block()
    outputs = {name: block.create_var(name=unique_name.generate(name), dtype="float32") for name in outputs}
    block.append_op(type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)
    return next(iter(outputs.values()))


def convolve(x, filters, op_type="conv2d", **attrs):
    attrs = {"strides": [1, 1], "paddings": [0, 0], "dilations": [1, 1], "groups": 1, "data_format": "NHWC"} | attrs
    return append(op_type, {"Input": x, "Filter": filters}, ["Output"], **attrs)


def convolve_depthwise(x, dtype="float32", **attrs):
    return convolve(x, filters(dtype, 3, 1), "depthwise_conv2d", **{"paddings": [1, 1], "groups": 8} | attrs)


def pool(**attrs):
    attrs = {"ksize": [3, 3], "strides": [1, 1], "paddings": [0, 0], "pooling_type": "max"} | attrs
    return append("pool2d", {"X": images()}, data_format="NHWC", **attrs)


def pair(dtype="float32"):
    return [images(dtype=dtype, name=name) for name in "xy"]


# {case: (function that builds a program without gradients, its custom operators and remaining additions)}.
INFERENCE = {
    "max pooling in float64": (lambda: max_pool(images(dtype="float64"), 3), []),
    "max pooling with a rectangular window": (lambda: pool(ksize=[3, 2]), []),
    "max pooling with different strides": (lambda: pool(strides=[1, 2]), []),
    "max pooling with different paddings": (lambda: pool(paddings=[1, 0]), []),
    "global max pooling": (lambda: pool(global_pooling=True), []),
    "adaptive max pooling": (lambda: pool(adaptive=True), []),
    "max pooling": (lambda: max_pool(images(), 3), ["max_pool"]),
    "max pooling with VALID padding": (lambda: pool(paddings=[1, 1], padding_algorithm="VALID"), []),
    "global average pooling": (lambda: pool(pooling_type="avg", global_pooling=True), ["image_sums"]),
    "adaptive average pooling": (lambda: pool(pooling_type="avg", ksize=[1, 1], adaptive=True), ["image_sums"]),
    "average pooling in float64": (
        lambda: F.avg_pool2d(images(dtype="float64"), 2, data_format="NHWC"),
        [],
    ),
    "average pooling": (lambda: pool(pooling_type="avg", exclusive=True), ["average_pool"]),
    "adaptive average pooling to 2x2 pixels": (lambda: pool(pooling_type="avg", ksize=[2, 2], adaptive=True), []),
    "average of 6 channels": (lambda: global_average_pool(images(6)), []),
    "factors": (lambda: images() * images(height=1, name="factors"), ["scale_images"]),
    "sigmoid": (lambda: layers.sigmoid(images()), ["sigmoid"]),
    "sigmoid of 6 channels": (lambda: layers.sigmoid(images(6)), []),
    "sigmoid of a number": (lambda: layers.sigmoid(static.data("x", [])), []),
    "factors for 6 channels": (lambda: images(6) * images(6, height=1, name="factors"), []),
    "factors of a different type": (
        lambda: append("elementwise_mul", {"X": images(dtype="float16"), "Y": images(height=1, name="factors")}),
        [],
    ),
    "addend": (
        lambda: append("elementwise_add", {"X": batch_norm(images()), "Y": images(name="addend")}),
        ["bn_inference"],
    ),
    "addend of a different type": (
        lambda: append("elementwise_add", {"X": batch_norm(images()), "Y": images(dtype="float16", name="addend")}),
        ["bn_inference", "elementwise_add"],
    ),
    "batch normalization with batch statistics": (lambda: fixed_bn(use_global_stats=False)(images()), []),
    "batch normalization in evaluation mode": (
        lambda: nn.BatchNorm2D(8, data_format="NHWC")(images()),
        ["bn_inference"],
    ),
    "dropout in evaluation mode": (
        lambda: append(
            "dropout", {"X": images(), "Seed": static.data("seed", [1], "int32")}, ["Out", "Mask"], is_test=True
        ),
        [],
    ),
    "concatenation": (lambda: paddle.concat(pair(), axis=3), ["concat"]),
    "concatenation along an axis in a variable": (
        lambda: append("concat", {"X": pair(), "AxisTensor": paddle.full([1], 3, "int32")}, axis=3),
        [],
    ),
    "concatenation in float64": (lambda: paddle.concat(pair("float64"), axis=3), []),
    "depthwise": (lambda: convolve_depthwise(images()), ["depthwise_conv"]),
    "depthwise with different strides": (lambda: convolve_depthwise(images(), strides=[1, 2]), []),
    "depthwise in NCHW": (
        lambda: convolve_depthwise(static.data("images", [None, 8, 6, 8]), data_format="NCHW"),
        [],
    ),
    "depthwise with filters of a different type": (lambda: convolve_depthwise(images(), "float16"), []),
    "depthwise before batch normalization of rows": (
        lambda: batch_norm(convolve_depthwise(images(height=8)), "NCHW"),
        ["depthwise_conv"],
    ),
    "1x1 convolution": (lambda: batch_norm(convolve(images(), filters())), ["pointwise_conv_bn_inference"]),
    "1x1 convolution of 6 channels": (lambda: batch_norm(convolve(images(6), filters(inputs=6))), ["bn_inference"]),
    "1x1 convolution with filters of a different type": (
        lambda: batch_norm(convolve(images(), filters("float16"))),
        ["bn_inference"],
    ),
    "1x1 convolution before batch normalization of rows": (
        lambda: batch_norm(convolve(images(height=8), filters()), "NCHW"),
        [],
    ),
}


@pytest.mark.parametrize("case", INFERENCE)
def test_custom_operators_of_inference_programs(pointwise_kernels, case):
    """The programs are not run, because most of these combinations of types and attributes exist only on GPUs."""
    build, operators = INFERENCE[case]
    main = static.Program()
    with static.program_guard(main, static.Program()):
        build()
    main = main.clone(for_test=True)
    fusion.fuse(main)
    after = [name for name in types(main) if name.startswith(("native_", "elementwise_add"))]
    assert [name.removeprefix("native_") for name in after] == operators
    layers = {"depthwise with different strides", "depthwise with filters of a different type"}
    assert fusion.paddle_depthwise(main) == (("3x3, stride 1, 8 channels",) if case in layers else ())


def test_limit_of_pointwise_convolutions_applies_to_input_channels(pointwise_kernels, monkeypatch):
    monkeypatch.setitem(fusion.POINTWISE_BN_CHANNELS, paddle.float32, 8)
    main = static.Program()
    with static.program_guard(main, static.Program()):
        batch_norm(convolve(images(), static.data("filters", [16, 8, 1, 1])))
    main = main.clone(for_test=True)
    fusion.fuse(main)
    assert types(main)["native_pointwise_conv_bn_inference"] == 1


@pytest.mark.parametrize(
    "case",
    [
        *("addition without activation", "second addend without activation", "Mish after an addition"),
        "second addend without activation, first with two readers",
    ],
)
def test_residual_additions_are_part_of_custom_operators(case):
    main, _, _ = small_program(UNUSUAL[case][0])
    before = types(main)
    fusion.fuse(main)
    assert types(main)["elementwise_add"] == before["elementwise_add"] - 1


def test_only_operators_that_combine_overflow_flags_are_removed():
    main = static.Program()
    with static.program_guard(main, static.Program()):
        block, gradient, scale = main.global_block(), images(), static.data("scale", [1])
        flag = block.create_var(name="flag", dtype="bool")
        outputs = {"Out": gradient, "FoundInfinite": flag}
        block.append_op(type="check_finite_and_unscale", inputs={"X": gradient, "Scale": scale}, outputs=outputs)
        both = append("concat", {"X": [flag, flag]}, axis=0)
        append("memcpy", {"X": append("reduce_any", {"X": both})}, dst_place_type=1)
        other = static.data("other", [1], "bool")
        append("concat", {"X": [other, flag]}, axis=0)
        append("reduce_any", {"X": other})
    assert precision.check_natively(block).name == "unscale"
    assert [op.type for op in block.ops] == ["reciprocal", "concat", "reduce_any"]


@pytest.mark.parametrize("case, is_sum", [("squeeze-and-excitation", False), ("residual sum with two readers", True)])
def test_gradient_that_another_operator_reads_is_computed(case, is_sum):
    """The additional operator copies a sum of two gradients, or a summand."""
    copies = []
    for fuse in (False, True):
        with static.scope_guard(static.Scope()):
            main, _, exe = small_program(UNUSUAL[case][0])
            block = main.global_block()
            [add] = [op for op in block.ops if op.type == "sum"]
            inputs = {"X": block.var(add.output_arg_names[0] if is_sum else add.input_arg_names[0])}
            copy, place = block.create_var(name="copy", dtype="float32"), block.ops.index(add) + 1
            block._insert_op(place, type="scale", inputs=inputs, outputs={"Out": copy}, attrs={"op_role": 1})
            if fuse:
                assert fusion.fuse(main) > 0
            images = np.random.RandomState(1).randn(4, 6, 6, 8).astype("float32")
            copies.append(exe.run(main, {"data": images}, [copy])[0])
    assert np.abs(copies[0]).max() > 0
    np.testing.assert_allclose(copies[1], copies[0], rtol=1e-4, atol=1e-6)


def test_paddings_of_all_sides_are_top_bottom_left_right():
    with static.program_guard(static.Program(), static.Program()):
        nn.Conv2D(8, 8, 3, padding=[1, 2, 3, 4], data_format="NHWC")(images())
        graph = fusion.Graph(static.default_main_program())
    assert fusion.padding(graph, graph.block.ops[0]) == ((1, 2), (3, 4))


def test_sums_of_gradients_in_place_are_part_of_custom_operators():
    """job/fleet.py sets the same flag."""
    paddle.set_flags({"FLAGS_max_inplace_grad_add": 8})
    try:
        main, _, _ = small_program(UNUSUAL["residual sum with two readers"][0])
    finally:
        paddle.set_flags({"FLAGS_max_inplace_grad_add": 0})
    assert types(main)["grad_add"] == 1
    fusion.fuse(main)
    assert types(main)["grad_add"] == 0


@pytest.mark.parametrize("case", UNUSUAL)
def test_unsupported_operators_are_not_fused(case):
    """Only supported operators are fused, and the results do not change."""
    build, operators = UNUSUAL[case]

    def is_fused(main):
        custom = [name for name in types(main).elements() if name.startswith("native_")]
        return len([name for name in custom if "backward" not in name or "pool" in name]) == operators

    assert_same_results(build, is_fused)


def assert_same_results(build, is_fused):
    """Assert that fusion does not change the losses of a small_program, and that is_fused(fused program) is true."""
    plain, loss, exe = small_program(build)
    randomize_affine_layers(plain, exe.place)
    main, losses = plain.clone(), []
    names = [v.name for v in plain.list_vars() if v.persistable]
    start = {name: variables.read(name) for name in names}
    fusion.fuse(main)
    assert is_fused(main), types(main)
    if types(main) == types(plain):
        return
    for prog in (plain, main):
        for name, value in start.items():
            variables.set_variable(name, value, exe.place)
        images = [np.random.RandomState(i).randn(4, 6, 6, 8).astype("float32") for i in range(3)]
        losses.append([exe.run(prog, {"data": x}, [loss])[0].item() for x in images])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("layers", ["stem", "blocks.1"])
def test_fused_training_with_frozen_affine_layers_has_same_results(parse, register, assert_same_training, layers):
    """No gradient passes through the layers of the stem. Gradients pass through the layers of the block."""
    register("Tiny", MOBILE["PPHGNetV2"])
    assert_same_training(parse(*NHWC, "--freeze", layers), unfused=["_fuse_depthwise_conv"])


@pytest.mark.parametrize(
    "layers, level, is_train, trained",
    [
        (None, "O2", True, 31),
        *(pytest.param(None, level, True, 31, marks=pytest.mark.slow) for level in (None, "O1")),
        *(pytest.param(None, level, False, 0, marks=pytest.mark.slow) for level in (None, "O1", "O2")),
        pytest.param("stem", None, True, 26, marks=pytest.mark.slow),  # no gradient passes through the frozen layers
        pytest.param("blocks.0", "O1", True, 31, marks=pytest.mark.slow),
    ],
)
def test_all_affine_layers_are_replaced(parse, gpu_lists, layers, level, is_train, trained):
    """PPHGNetV2_B0 has 31 affine layers, 5 of them in the stem. Programs in half precision are not run, because they
    require a GPU."""
    args = parse(*NHWC, "--model-arch-name", "PPHGNetV2_B0", *(["--freeze", layers] if layers else []))
    args.amp, args.amp_dtype, args.amp_level = level is not None, "float16", level
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 10, is_train=is_train)
    before = types(main)
    fusion.fuse(main)
    after = types(main)
    assert (after["native_affine"], after["native_affine_backward"]) == (31, trained)
    assert before["elementwise_mul"] - after["elementwise_mul"] == 31
    assert before["elementwise_mul_grad"] - after["elementwise_mul_grad"] == trained


@pytest.mark.parametrize("is_train", [True, False])
def test_casts_to_float32_and_back_are_removed(parse, gpu_lists, register, is_train):
    """Paddle 2.6 casts float16 images to float32 before the first affine layer, because its parameters are float32, and
    AMP casts them back; Paddle 3 does not. The program is not run, because it requires a GPU."""
    register("Tiny", MOBILE["PPHGNetV2"])
    args = parse(*NHWC, "--dali-output-fp16")
    args.amp, args.amp_dtype, args.amp_level = True, "float16", "O2"
    main, startup = static.Program(), static.Program()
    program.build(frozen(args), main, startup, 10, is_train=is_train)
    if not is_train:
        static.Executor(paddle.CPUPlace()).run(startup)
        precision.cast_evaluation_program(main, paddle.CPUPlace(), "float16", "O2", for_gpu=True)
    block = main.global_block()

    def casts_of_images():
        sources = [block.var(op.input("X")[0]) for op in block.ops if op.type == "cast"]
        return [v.name for v in sources if len(v.shape) == 4 and not v.persistable]

    if paddle.__version__.startswith("2."):
        assert len(casts_of_images()) == (4 if is_train else 2)  # half of the casts belong to the backward pass
    fusion.fuse(main)
    assert casts_of_images() == []
    first = next(op for op in block.ops if op.type == "native_affine")
    assert block.var(first.input("X")[0]).dtype == paddle.float16
    written = {name for name, v in block.vars.items() if v.persistable or v.is_data}
    for op in block.ops:
        assert written.issuperset(op.input_arg_names), op
        written.update(op.output_arg_names)


def add_buffer(block, names, made_before):
    """Add the buffer of a fused all-reduce for the gradients of the parameters `names`, before the first operator of
    type `made_before`. Return (buffer, gradients)."""
    grads = [block.var(f"{name}@GRAD") for name in names]
    buffer = block.create_var(name="buffer", dtype=paddle.float32, persistable=False)
    block._insert_op_without_sync(
        next(i for i, op in enumerate(block.ops) if op.type == made_before),
        type="coalesce_tensor",
        inputs={"Input": [block.var(name) for name in names]},
        outputs={"Output": grads, "FusedOutput": buffer},
        attrs={"set_constant": True, "constant": 0.0, "use_align": True, "dtype": paddle.float32, "op_role": 1},
    )
    block._sync_with_cpp()
    return buffer, grads


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "network, operator, made_before, unfused",
    [
        ("Tiny", "batch_norm", "relu_grad", 0),
        ("Tiny", "batch_norm", "batch_norm_grad", 1),
        ("TinyMobile", "depthwise_conv2d", "depthwise_conv2d_grad", 0),
        ("TinyMobile", "conv2d", "conv2d_grad", 7),
    ],
)
def test_gradients_are_written_to_buffer_of_fused_all_reduce(
    parse, request, network, operator, made_before, unfused, place
):
    """Paddle stores the gradients of several parameters in one buffer. If an operator allocated separate memory for its
    gradients, the buffer would contain stale gradients. An operator that ran before the buffer existed would fail."""
    if place == "gpu":
        native.load(paddle.device.cuda.get_device_capability(0))
    elif operator == "conv2d":
        request.getfixturevalue("pointwise_kernels")
    args = parse(*NHWC, "--device", place, "--model-arch-name", network)
    main, startup = static.Program(), static.Program()
    program.build(frozen(args), main, startup, 10)
    block = main.global_block()
    made_by = ("Scale", "Bias") if operator == "batch_norm" else ("Filter",)
    names = [op.input(name)[0] for op in block.ops if op.type == operator for name in made_by]
    buffer, grads = add_buffer(block, names, made_before)
    fusion.fuse(main)
    assert types(main)[f"{operator}_grad"] == unfused
    exe = static.Executor(processes.place(args.device))
    exe.run(startup)
    ((x, y),) = random_batches(1, (32, 32, 4))
    values = exe.run(main, {"data": x, "label": y}, [buffer, *grads])
    fused = np.sort(np.abs(values[0]))
    single = np.sort(np.abs(np.concatenate([value.ravel() for value in values[1:]])))
    assert single.min() >= 0 and np.count_nonzero(single) > 100
    np.testing.assert_array_equal(fused[fused > 0], single[single > 0])


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "made_before, gradients, fused",
    [("elementwise_add_grad", 4, 2), ("elementwise_mul_grad", 4, 1), ("elementwise_add_grad", 3, 1)],
)
def test_affine_gradients_are_written_to_buffer_of_fused_all_reduce(made_before, gradients, fused, place):
    """The second layer is not fused if the buffer is created after the gradient of its addition, or if the buffer does
    not contain the gradient of its bias."""
    if place == "gpu":
        native.load(paddle.device.cuda.get_device_capability(0))
    main, loss, exe = small_program(lambda x: affine(F.relu(affine(conv(x)))), place)
    block = main.global_block()
    names = [p.name for p in main.all_parameters() if p.name.startswith("learnable")][:gradients]
    buffer, grads = add_buffer(block, names, made_before)
    results, start = [], {v.name: variables.read(v.name) for v in main.list_vars() if v.persistable}
    for fuse in (False, True):
        for name, value in start.items():
            variables.set_variable(name, value, exe.place)
        if fuse:
            fusion.fuse(main)
        images = np.random.RandomState(1).randn(4, 6, 6, 8).astype("float32")
        results.append(exe.run(main, {"data": images}, [buffer, *grads]))
    assert types(main)["native_affine_backward"] == types(main)["native_affine"] == fused
    assert np.count_nonzero(results[0][0]) >= gradients - 1
    for expected, value in zip(*results, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_run_with_custom_kernels_trains_evaluates_and_resumes(
    one_block, run_train, losses_with_a_stop, tmp_path, capsys
):
    flags = [*NHWC, "--kernels", "native", "--epochs", "2", "--print-interval", "1", "--resume"]
    flags += ["--optimizer", "AdamW", "--lr", "0.01"]
    code, report = run_train(*flags)
    assert code == 0
    assert "2 native_bn_act, 2 native_bn_act_backward" in capsys.readouterr().out
    expected, evaluation = losses(report), phase(report, [1], "val.")
    assert losses_with_a_stop(4, *flags) == expected
    checkpoint = tmp_path / "output/Tiny/1"
    for kernels in ("native", "paddle"):
        choice = ["--kernels", kernels, "--run-scope", "eval_only", "--from-checkpoint", checkpoint]
        code, report = run_train(*NHWC, *choice)
        assert code == 0
        result = phase(report, [], "val.")
        assert result["top1"] == evaluation["top1"]
        assert result["loss"] == pytest.approx(evaluation["loss"], rel=1e-5)


def test_unsupported_layout_is_rejected(run_train, capsys):
    assert run_train("--kernels", "native")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--kernels native", "NHWC", "--kernels paddle"])
