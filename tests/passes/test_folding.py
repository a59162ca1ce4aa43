"""Folding batch normalization into the preceding convolution."""

import contextlib
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn, static

from conftest import frozen
from helpers import build, random_batches
from paddle_resnet import phases
from paddle_resnet import program as programs
from paddle_resnet.checkpoints import teachers, variables
from paddle_resnet.components import distillation
from paddle_resnet.native import build as native
from paddle_resnet.passes import folding, fusion


@pytest.mark.parametrize("flags", [[], ["--data-layout", "NHWC", "--image-shape", "4,32,32"]], ids=["NCHW", "NHWC"])
def test_folded_program_has_same_results(parse, flags):
    """In float32, folding changes only the order of summation. The statistics and scales are random, and epsilon is
    large enough to affect the results."""
    args = parse(*flags)
    random = np.random.RandomState(1)
    _, exe, fetchs, _, program = build(args, is_train=False)
    names = [v.name for v in program.list_vars() if v.persistable and v.name.startswith("batch_norm")]

    def randomize():
        for name in names:
            array = variables.read(name)
            variables.set_variable(name, random.uniform(0.5, 2, array.shape).astype("float32"), exe.place)

    def losses(program):
        return [exe.run(program, dict(zip(("data", "label"), b, strict=True)), [loss])[0] for b in batches]

    loss, batches = fetchs["loss"][0], random_batches(2, (32, 32, 4) if flags else (3, 32, 32))
    randomize()
    for op in program.global_block().ops:
        if op.type == "batch_norm":
            op._set_attr("epsilon", 1e-3)
    plain = program.clone()
    expected = losses(plain)
    refold = folding.fold_batch_norms(program, exe, 1 if args.data_layout == "NCHW" else -1)
    assert not any(op.type == "batch_norm" for op in program.global_block().ops)
    np.testing.assert_allclose(losses(program), expected, rtol=2e-5, atol=1e-4)
    # New parameters take effect only after a refold.
    randomize()
    changed = losses(plain)
    assert np.abs(np.subtract(changed, expected)).max() > 1e-3
    np.testing.assert_allclose(losses(program), expected, rtol=2e-5, atol=1e-4)
    refold()
    np.testing.assert_allclose(losses(program), changed, rtol=2e-5, atol=1e-4)


def test_float32_program_is_not_folded(parse):
    args = parse()
    _, exe, fetchs, _, program = build(args, is_train=False)
    before = [op.type for op in program.global_block().ops]
    phases.Run(args, None, exe, None, phases.Work(args, None, program, fetchs)).compile_programs()
    assert [op.type for op in program.global_block().ops] == before


@pytest.fixture
def emulated_fusion(monkeypatch):
    """Replace the fused operator, which exists only on GPUs and in float16, with operators that a CPU supports."""
    monkeypatch.setattr(fusion.Graph, "replace", _insert_emulation)


def _insert_emulation(graph, ops, at, op_type, inputs, outputs, attrs):
    """Like fusion.Graph.replace, but insert operators that a CPU supports in place of the fused operator."""
    block, _ = graph.block, attrs.pop("activation")
    filters, *results = (block.create_var(name=f"{inputs['Filter'].name}.{i}", dtype="float32") for i in range(4))
    attrs = {name: value for name, value in attrs.items() if name not in ("split_channels", "fuse_alpha")}
    new = [
        ("transpose2", {"X": inputs["Filter"]}, {"Out": filters, "XShape": results[2]}, {"axis": [0, 3, 1, 2]}),
        ("conv2d", {"Input": inputs["Input"], "Filter": filters}, {"Output": results[0]}, attrs),
        ("elementwise_add", {"X": results[0], "Y": inputs["Bias"]}, {"Out": results[1]}, {"axis": -1}),
    ]
    out = results[1]
    if "ResidualData" in inputs:
        out = results[0]
        new.append(("elementwise_add", {"X": results[1], "Y": inputs["ResidualData"]}, {"Out": out}, {"axis": -1}))
    new.append(("relu", {"X": out}, {"Out": outputs["Output"]}, {}))
    for op_type, op_inputs, op_outputs, op_attrs in new:
        block._insert_op_without_sync(
            block.ops.index(at), type=op_type, inputs=op_inputs, outputs=op_outputs, attrs=op_attrs
        )
    graph.replaced += ops


@pytest.mark.usefixtures("emulated_fusion")
def test_convolutions_are_fused(parse):
    args = parse("--model-arch-name", "Tiny", "--data-layout", "NHWC", "--image-shape", "4,32,32")
    _, exe, fetchs, _, program = build(args, is_train=False)
    feed = dict(zip(("data", "label"), random_batches(1, (32, 32, 4))[0], strict=True))
    [expected] = exe.run(program, feed, [fetchs["loss"][0]])
    activations = sum(op.type == "relu" for op in program.global_block().ops)
    layers = sum(op.type == "conv2d" for op in program.global_block().ops)
    with static.program_guard(program, static.Program()):
        count, refold = folding.fuse_convolutions(program, exe)
    assert count == activations
    remaining = [op.type for op in program.global_block().ops].count("batch_norm")
    assert 0 < remaining == layers - activations  # in shortcuts
    np.testing.assert_allclose(exe.run(program, feed, [fetchs["loss"][0]])[0], expected, rtol=2e-5)
    filters = program.all_parameters()[0].name
    shape = program.global_block().var(filters).shape
    variables.set_variable(filters, np.zeros(shape, "float32"), exe.place)
    before = addresses(program)
    refold()
    assert addresses(program) == before  # a captured step reads these addresses
    assert not np.allclose(exe.run(program, feed, [fetchs["loss"][0]])[0], expected, rtol=1e-3)


@pytest.mark.slow
def test_layers_of_teacher_are_fused(parse, checkpoint, request):
    """With the prefix of the teacher, no other layer of the training program changes."""
    args = frozen(parse("--teacher", checkpoint, "--data-layout", "NHWC", "--image-shape", "4,32,32"))
    main, startup = static.Program(), static.Program()
    programs.build(args, main, startup, 1)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    teachers.load(main, exe.place)
    main = main.clone(for_test=True)
    [last] = [op for op in main.global_block().ops if "teacher.linear_0.b_0" in op.input_arg_names]
    logits = main.global_block().var(last.output("Out")[0])
    feed = dict(zip(("data", "label"), random_batches(1, (32, 32, 4))[0], strict=True))
    [expected] = exe.run(main, feed, [logits])
    types = [op.type for op in main.global_block().ops]
    request.getfixturevalue("emulated_fusion")  # after the checkpoint has been written
    count, _ = folding.fuse_convolutions(main, exe, distillation.PREFIX)
    after = [op.type for op in main.global_block().ops]
    assert count > 0 and after.count("batch_norm") == types.count("batch_norm") - count
    folded = [v.name for v in main.list_vars() if v.name.endswith((".folded", ".shift"))]
    assert folded and all(name.startswith("teacher.") for name in folded)
    np.testing.assert_allclose(exe.run(main, feed, [logits])[0], expected, rtol=2e-5, atol=1e-6)


def addresses(program):
    names = [v.name for v in program.list_vars() if v.name.endswith((".folded", ".shift"))]
    return [static.global_scope().find_var(name).get_tensor()._ptr() for name in names]


def conv(size=1, **options):
    return nn.Conv2D(8, 8, size, bias_attr=False, data_format="NHWC", **options)


def conv_with(compute, dtype="float32"):
    """Return a convolution whose filters are computed from a parameter."""
    filters = compute(paddle.create_parameter([8, 8, 1, 1], dtype))
    return lambda x: F.conv2d(x, filters, data_format="NHWC")


def bn():
    """Return BN followed by ReLU, because fuse_convolutions requires ReLU."""
    layer = nn.BatchNorm2D(8, data_format="NHWC")
    layer.eval()
    return lambda x: F.relu(layer(x))


def conv_with_cast():
    return conv_with(lambda filters: filters.astype("float32"), "float64")


def twice(layer, x):
    return paddle.concat([bn()(layer(x)), bn()(layer(x))], axis=3)


# For each case: function of images [N, 6, 6, 8], and the numbers of BN layers that are not folded and of those that are
# not fused.
UNUSUAL = {
    "BN of the images": (lambda x: bn()(conv()(bn()(x))), 1, 1),
    "BN after ReLU": (lambda x: bn()(F.relu(x)), 1, 1),
    "convolution with two readers": (lambda x: (lambda y: bn()(y) + y)(conv()(x)), 1, 1),
    "computed filters": (lambda x: bn()(conv_with(lambda filters: filters * 2)(x)), 1, 1),
    "shared filters after a cast": (lambda x: twice(conv_with_cast(), x), 0, 0),
    "filters with another reader after a cast": (lambda x: (lambda f: bn()(f(x)) + f(x))(conv_with_cast()), 0, 0),
    "filters shared by two BN layers": (lambda x: twice(conv(), x), 0, 0),
    "groups": (lambda x: bn()(conv(groups=2)(x)), 0, 1),
    "depthwise convolution": (lambda x: bn()(conv(groups=8)(x)), 0, 1),
    "asymmetric SAME": (lambda x: bn()(conv(3, stride=2, padding="SAME")(x)), 0, 0),
    "asymmetric": (lambda x: bn()(conv([2, 3], stride=[2, 1], padding=[0, 1, 3, 0])(x)), 0, 0),
    "asymmetric with dilations": (lambda x: bn()(conv(2, padding=[0, 2, 2, 0], dilation=2)(x)), 0, 0),
}


@contextlib.contextmanager
def small_program(build_network, shape=(6, 6, 8)):
    """Yield (program with initialized parameters, executor, output) of a network for images [N, *shape]."""
    main, startup = static.Program(), static.Program()
    with static.scope_guard(static.Scope()), static.program_guard(main, startup), paddle.utils.unique_name.guard():
        out = build_network(static.data("data", [None, *shape]))
        exe = static.Executor(paddle.CPUPlace())
        exe.run(startup)
        yield main, exe, out


def random_values(main, exe, shape=(6, 6, 8)):
    """Set random BN parameters and statistics, and return a random feed."""
    random = np.random.RandomState(1)
    for name in [v.name for v in main.list_vars() if v.persistable and v.name.startswith("batch_norm")]:
        array = variables.read(name)
        variables.set_variable(name, random.uniform(0.5, 2, array.shape).astype("float32"), exe.place)
    return {"data": random.randn(2, *shape).astype("float32")}


@pytest.mark.parametrize("fold", [partial(folding.fold_batch_norms, channel_axis=-1), folding.fuse_convolutions])
@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_networks_have_same_results(request, case, fold):
    build_network, *remaining = UNUSUAL[case]
    with small_program(build_network) as (main, exe, out):
        feed = random_values(main, exe)
        [expected] = exe.run(main, feed, [out])
        if fold is folding.fuse_convolutions:
            request.getfixturevalue("emulated_fusion")
        fold(main, exe)
        types = [op.type for op in main.global_block().ops]
        assert types.count("batch_norm") == remaining[fold is folding.fuse_convolutions]
        assert fold is folding.fuse_convolutions or ("cast" in types) == (
            case == "filters with another reader after a cast"
        )
        if fold is folding.fuse_convolutions:
            index = fusion.Graph(main)
            paddings = [fusion.padding(index, op) for op in index.block.ops if op.type == "conv2d"]
            asymmetric = any(begin != end for padding in paddings for begin, end in padding)
            assert asymmetric == (case == "asymmetric with dilations")
        np.testing.assert_allclose(exe.run(main, feed, [out])[0], expected, rtol=1e-4, atol=1e-5)


def nchw(x):
    return nn.Conv2D(8, 8, 1, bias_attr=False)(x.transpose([0, 3, 1, 2])).transpose([0, 2, 3, 1])


# For each case: function of images [N, 6, 6, 8], and whether its convolutions are replaced.
REPLACED = {
    "strides, paddings and dilations": (lambda x: conv(3, stride=[1, 2], padding=[2, 1], dilation=[2, 1])(x), True),
    "groups": (lambda x: conv([1, 3], groups=4)(x), True),
    "paddings of all sides": (lambda x: conv(3, padding=[2, 2, 0, 0])(x), True),
    "7x7 depthwise": (lambda x: conv(7, padding=3, groups=8)(x), True),
    "SAME without padding": (lambda x: conv(stride=2, padding="SAME")(x), True),
    "symmetric SAME": (lambda x: conv(3, padding="SAME")(x), True),
    "SAME without dilations": (lambda x: conv(3, padding="SAME", dilation=2)(x), True),  # Paddle ignores dilations
    "VALID": (lambda x: conv(3, padding="VALID")(x), True),
    "shared filters": (lambda x: (lambda layer: layer(x) + layer(layer(x)))(conv()), True),
    "asymmetric SAME": (lambda x: conv(3, stride=2, padding="SAME")(x), False),
    "asymmetric": (lambda x: conv(3, padding=[0, 1, 0, 1])(x), False),
    "3x3 depthwise": (lambda x: conv(3, padding=1, groups=8)(x), False),
    "computed filters": (lambda x: conv_with(lambda filters: filters * 2)(x), False),
    "unknown height": (lambda x: conv(3)(x.reshape([0, -1, 6, 8])), False),
    "NCHW": (nchw, False),
}


@pytest.mark.parametrize("override", [None, "1", "0"])
@pytest.mark.usefixtures("tensor_cores")
def test_pointwise_convolutions_with_bn_are_fused_if_tf32_is_enabled(environment, override):
    native.load()
    environment(NVIDIA_TF32_OVERRIDE=override)

    def build_network(x):
        x = bn()(conv()(bn()(conv(3, padding=1)(x))))
        y = nn.BatchNorm2D(8, data_format="NHWC", use_global_stats=True)(conv()(x))
        return conv()(F.relu(y + bn()(conv(stride=2, padding=3)(x)))) * 1  # still 6x6 images

    with small_program(build_network) as (main, exe, out):
        feed = random_values(main, exe)
        [expected] = exe.run(main, feed, [out])
        folding.replace_convolutions(main, exe)
        after = [op.type for op in main.global_block().ops]
        fused = 0 if override == "0" else 2
        assert after.count("native_pointwise_conv_bn_inference") == fused
        assert after.count("native_conv") == 5 - fused and after.count("batch_norm") == 4 - fused
        np.testing.assert_allclose(exe.run(main, feed, [out])[0], expected, rtol=1e-4, atol=1e-5)
        fusion.fuse(main)
        np.testing.assert_allclose(exe.run(main, feed, [out])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", REPLACED)
def test_replaced_convolutions_have_same_results(case):
    native.load()
    build_network, is_replaced = REPLACED[case]
    with small_program(lambda x: build_network(x) * 1) as (main, exe, out):
        feed = {"data": np.random.RandomState(1).randn(2, 6, 6, 8).astype("float32")}
        [expected] = exe.run(main, feed, [out])
        before = [op.type for op in main.global_block().ops if "conv2d" in op.type]
        assert folding.replace_convolutions(main, exe) == (len(before) if is_replaced else 0)
        after = [op.type for op in main.global_block().ops if "conv" in op.type]
        assert after == (["native_conv"] * len(before) if is_replaced else before)
        np.testing.assert_allclose(exe.run(main, feed, [out])[0], expected, rtol=1e-4, atol=1e-5)


def stem(
    x, channels=4, filters=64, size=7, stride=2, padding=3, dilation=1, activation=F.relu, pool=(3, 2, 1), **options
):
    pads = [0] * 7 + [channels - x.shape[3]]
    x = F.pad(x, pads, value=options.pop("value", 0.0)) if pads[-1] else x
    x = nn.Conv2D(channels, filters, size, stride, padding, dilation, bias_attr=False, data_format="NHWC")(x)
    bn = nn.BatchNorm2D(filters, data_format="NHWC")
    bn.eval()
    max_pool = options.pop("max_pool", F.max_pool2d)
    return max_pool(activation(bn(x)), *pool, data_format="NHWC", **options) * 1


def stem_with_readers(x):
    padded = F.pad(x, [0] * 7 + [1])
    return stem(padded).mean() + padded


# For each case: function of images [N, 9, 6, 3], and the types of the operators before the multiplication.
STEMS = {
    "four channels": (stem, ["native_stem_inference"]),
    "three channels": (lambda x: stem(x, 3), ["native_stem_inference"]),
    "pad with two readers": (stem_with_readers, ["pad", "native_stem_inference"]),
    "unknown height": (lambda x: stem(x.reshape([0, -1, 6, 3])), None),
    "no batch normalization": (lambda x: F.relu(nn.Conv2D(3, 64, 7, 2, 3, data_format="NHWC")(x)) * 1, None),
    "addition": (
        lambda x: stem(x, activation=lambda y: F.relu(y + nn.Conv2D(3, 64, 1, 2, data_format="NHWC")(x))),
        None,
    ),
    "fourth channel not 0": (lambda x: stem(paddle.concat([x, x.mean(3, keepdim=True)], 3)), None),
    **{
        name: (partial(stem, **options), None)
        for name, options in {
            "five channels": {"channels": 5},
            "ones": {"value": 1.0},
            "filters": {"filters": 32},
            "filter size": {"size": 5},
            "padding": {"padding": 2},
            "dilation": {"dilation": 2},
            "average pooling": {"max_pool": F.avg_pool2d},
            "pooling stride": {"pool": (3, 1, 1)},
            "stride": {"stride": 1},
            "activation": {"activation": F.relu6},
            "no activation": {"activation": lambda x: x},
            "pooling size": {"pool": (2, 2, 1)},
            "pooling padding": {"pool": (3, 2, 0)},
            "ceil_mode": {"ceil_mode": True},
        }.items()
    },
}


@pytest.mark.parametrize("case", STEMS)
def test_stem_is_fused_if_supported(request, environment, case):
    native.load()
    (build_network, fused), shape = STEMS[case], (9, 6, 3)
    with small_program(build_network, shape) as (main, exe, out):
        feed = random_values(main, exe, shape)
        [expected] = exe.run(main, feed, [out])
        before = [op.type for op in main.global_block().ops]
        assert folding.fuse_stem(main) == 0  # a CPU has no tensor cores
        request.getfixturevalue("tensor_cores")
        environment(NVIDIA_TF32_OVERRIDE=0)
        assert folding.fuse_stem(main) == 0
        environment(NVIDIA_TF32_OVERRIDE=None)
        folding.fuse_stem(main)
        after = [op.type for op in main.global_block().ops]
        assert after[: len(fused)] == fused if fused else after == before
        np.testing.assert_allclose(exe.run(main, feed, [out])[0], expected, rtol=1e-4, atol=1e-5)
