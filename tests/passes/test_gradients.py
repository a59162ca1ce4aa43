from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn, static

from conftest import NHWC
from few_blocks import with_few_blocks
from helpers import build
from paddle_resnet import models
from paddle_resnet.checkpoints import variables
from paddle_resnet.graph import block
from paddle_resnet.models.resnet import BasicBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.passes import fusion, gradients


@pytest.fixture
def operators():
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()


@pytest.fixture
def sums_in_place():
    """Set the flag that job/fleet.py sets on a GPU."""
    paddle.set_flags({"FLAGS_max_inplace_grad_add": 8})
    yield
    paddle.set_flags({"FLAGS_max_inplace_grad_add": 0})


def conv(x, size=3, **flags):
    return nn.Conv2D(x.shape[3], 8, size, padding=flags.pop("padding", size // 2), data_format="NHWC", **flags)(x)


def constant(x):
    x = x * 2
    x.stop_gradient = True
    return x


def training(network):
    """Return (program, executor, function that runs two steps of the program and returns the losses). The loss is the
    mean square of the output of a function of images [N, 6, 6, 8]."""
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        loss = paddle.mean(network(static.data("data", [None, 6, 6, 8])) ** 2)
        paddle.optimizer.SGD(0.1).minimize(loss)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    start = {v.name: variables.read(v.name) for v in main.list_vars() if v.persistable}

    def losses(program):
        for name, value in start.items():
            variables.set_variable(name, value, exe.place)
        images = [np.random.RandomState(i).randn(4, 6, 6, 8).astype("float32") for i in range(3)]
        return [exe.run(program, {"data": x}, [loss])[0].item() for x in images]

    return main, losses


def types(program):
    return [op.type for op in block(program).ops]


@pytest.mark.parametrize(
    "network",
    [
        lambda x: F.relu(nn.BatchNorm2D(8, data_format="NHWC")(conv(x)) + constant(x)),
        lambda x: F.relu(constant(x) + nn.BatchNorm2D(8, data_format="NHWC")(conv(x))),
    ],
    ids=["second summand", "first summand"],
)
@pytest.mark.usefixtures("operators")
def test_additions_to_frozen_layers_are_fused_after_completion(network):
    main, losses = training(network)
    expected = losses(main)
    incomplete = main.clone()
    fusion.fuse(incomplete)
    assert "native_bn_add_relu" not in types(incomplete)
    gradients.complete_additions(main)
    assert losses(main) == expected
    fusion.fuse(main)
    assert "native_bn_add_relu_backward" in types(main)
    np.testing.assert_allclose(losses(main), expected, rtol=1e-5)


def test_complete_additions_are_not_changed():
    main, losses = training(lambda x: conv(x) + conv(x))
    before = str(main)
    gradients.complete_additions(main)
    assert str(main) == before


@pytest.mark.parametrize("kernels", ["native", "paddle"])
def test_first_residual_unit_is_complete_after_a_frozen_stem(parse, register, request, kernels):
    if kernels == "native":
        request.getfixturevalue("operators")
    register("Tiny", partial(ResNet, BasicBlock, (1,), width=8))
    compiled, *_ = build(parse(*NHWC, "--freeze", "stem", "--kernels", kernels))
    if kernels == "native":
        assert "native_bn_add_relu_backward" in types(compiled._program)
        return
    variable, operators = block(compiled._program).var, block(compiled._program).ops
    additions = [op for op in operators if op.type == "elementwise_add_grad"]
    [addition] = [op for op in additions if len(variable(op.input("X")[0]).shape) == 4]
    assert addition.output("X@GRAD") and addition.output("Y@GRAD")


@pytest.mark.parametrize(
    ("padding", "is_separate"), [("SAME", True), ([0, 1, 0, 1], True), ([1, 1, 1, 1], False), (1, False)]
)
@pytest.mark.usefixtures("sums_in_place")
def test_sums_of_gradients_of_unevenly_padded_convolutions_are_not_in_place(padding, is_separate):
    size = 2 if is_separate else 3
    main, losses = training(lambda x: (lambda y: conv(y, size, padding=padding) + F.relu(y))(conv(x)))
    assert types(main).count("grad_add") == 1
    expected = losses(main)
    gradients.separate_padded_sums(main)
    assert types(main).count("grad_add") == (not is_separate)
    assert losses(main) == expected


@pytest.mark.usefixtures("sums_in_place")
def test_compiled_stem_of_pphgnet_has_no_sum_in_place(parse, register):
    """The gradients of max pooling and of an unevenly padded convolution are added."""
    register("Tiny", with_few_blocks(models.MODELS["PPHGNetV2_B0"]))
    compiled, _, _, _, main = build(parse(*NHWC, "--kernels", "paddle"))
    producers = {name: op.type for op in block(main).ops for name in op.output_arg_names}
    sums = [op for op in block(main).ops if op.type == "grad_add"]
    [stem] = [op for op in sums if {producers[name] for name in op.input_arg_names} == {"pool2d_grad", "conv2d_grad"}]
    [replaced] = [op for op in block(compiled._program).ops if stem.output("Out")[0] in op.output_arg_names]
    assert replaced.type == "elementwise_add"
