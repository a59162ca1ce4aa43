"""Programs with the project's own operators compute what Paddle's own compute. On the CPU, in float32; test_gpu.py has
the GPU's types, test_native.py the operators alone."""

from collections import Counter
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn, static

from conftest import NHWC, assert_one_sentence, losses, phase
from paddle_resnet import models, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.job import processes
from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.passes import all_reduces, fusion
from test_program import random_batches

# What Paddle makes of the logits.
BLOCKS = {
    "bottleneck": partial(ResNet, BottleneckBlock, (1, 2, 1, 1), width=8),
    "basic": partial(ResNet, BasicBlock, (2, 1, 1, 1), width=8),
}


@pytest.fixture(scope="module", autouse=True)
def operators():
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()


def types(prog):
    return Counter(op.type for op in prog.global_block().ops)


def train(args, batches, fuse):
    """Losses of some steps and all persistable variables after them, by name."""
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.scope_guard(static.Scope()):
        fetchs, *_ = program.build(args, main, startup, 10)
        exe = static.Executor(paddle.CPUPlace())
        exe.run(startup)
        if fuse:
            fusion.fuse(main)
        found = [exe.run(main, {"data": x, "label": y}, [fetchs["loss"][0]])[0].item() for x, y in batches]
        names = [v.name for v in main.list_vars() if v.persistable and static.global_scope().find_var(v.name)]
        return found, {name: variables.read(name) for name in names if name.startswith(("conv", "batch", "linear"))}


@pytest.mark.parametrize("block", BLOCKS)
def test_training_is_the_same(parse, monkeypatch, block):
    """Losses, parameters, velocities and running means. Paddle's running variance is the biased one on the CPU and that
    of a sample on a GPU, where the fused operators take its place: n / (n - 1) of the CPU's."""
    monkeypatch.setitem(models.MODELS, "Tiny", BLOCKS[block])
    args = parse(*NHWC)
    batches = random_batches(2, (32, 32, 4))
    expected, plain = train(args, batches, fuse=False)
    found, fused = train(args, batches, fuse=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        tolerance = 0.07 if name.endswith(".w_2") else 1e-4
        np.testing.assert_allclose(fused[name], value, rtol=tolerance, atol=1e-4, err_msg=name)


def test_every_operator_of_a_residual_network_is_replaced(parse):
    main, startup = static.Program(), static.Program()
    program.build(parse(*NHWC), main, startup, 10)
    before = types(main)
    removed = fusion.fuse(main)
    after = types(main)
    # The last BN of the two units adds the shortcut; the two projections have no ReLU.
    assert after["native_bn_act"] == after["native_bn_act_backward"] == 7
    assert after["native_bn_add_relu"] == after["native_bn_add_relu_backward"] == 2
    assert after["native_max_pool"] == after["native_max_pool_backward"] == 1
    assert after["native_momentum"] == 1
    gone = ("batch_norm", "batch_norm_grad", "relu", "relu_grad", "sum", "momentum")
    assert not any(after[name] for name in gone)
    assert sum(before.values()) - removed + 21 == sum(after.values())
    assert fusion.fuse(main) == 0
    assert len(all_reduces.bn_statistics(main)) == 18


def test_evaluation_is_the_same(parse):
    args = parse(*NHWC)
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(args, main, startup, 0, is_train=False)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    random = np.random.RandomState(1)
    for name in [v.name for v in main.list_vars() if v.persistable and v.name.startswith("batch_norm")]:
        shape = variables.read(name).shape
        variables.set_variable(name, random.uniform(0.5, 2, shape).astype("float32"), exe.place)
    plain = main.clone()
    assert fusion.fuse(main) == 9 + 7 + 2 + 1  # BN, ReLU, additions, the pooling
    assert types(main)["native_bn_inference"] == 9
    for x, y in random_batches(2, (32, 32, 4)):
        expected, found = (
            exe.run(p, {"data": x, "label": y}, [variable for variable, _ in fetchs.values()]) for p in (plain, main)
        )
        assert [value.shape for value in found] == [value.shape for value in expected]
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_other_layouts_and_widths_stay_paddles(parse, monkeypatch):
    main, startup = static.Program(), static.Program()
    program.build(parse(), main, startup, 10)
    assert fusion.fuse(main) == 29  # momentum, which has no layout
    assert {name for name in types(main) if name.startswith("native_")} == {"native_momentum"}
    monkeypatch.setitem(models.MODELS, "Tiny", partial(ResNet, BasicBlock, (1, 1, 1, 1), width=6))
    main, startup = static.Program(), static.Program()
    program.build(parse(*NHWC), main, startup, 10)
    fusion.fuse(main)
    # 6 channels are no whole vector of four; 12, 24 and 48 are.
    assert types(main)["batch_norm"] == 3
    assert types(main)["native_bn_act"] + types(main)["native_bn_add_relu"] == 9


def small_program(build):
    """(program, loss, executor) of a function that makes a loss of images [N, 6, 6, 8]; parameters are made."""
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        loss = paddle.mean(build(static.data("data", [None, 6, 6, 8])) ** 2)
        paddle.optimizer.SGD(0.1).minimize(loss)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    return main, loss, exe


def bn(**flags):
    return nn.BatchNorm2D(8, data_format="NHWC", **flags)


def fixed_bn(**flags):
    layer = bn(**flags)
    layer.eval()
    return layer


def frozen():
    return {name: paddle.ParamAttr(trainable=False) for name in ("weight_attr", "bias_attr")}


def conv(x):
    return nn.Conv2D(8, 8, 1, data_format="NHWC")(x)


def no_gradient(x):
    x.stop_gradient = True
    return x


def max_pool(x, kernel):
    return F.max_pool2d(x, kernel, 1, kernel // 2, data_format="NHWC")


ODD = {
    "global statistics": (lambda x: F.relu(bn(use_global_stats=True)(conv(x))), 0),
    "evaluation's statistics": (lambda x: F.relu(fixed_bn()(conv(x)) + conv(x)), 0),
    "evaluation's statistics below all that trains": (lambda x: conv(F.relu(fixed_bn(**frozen())(x))), 1),
    "the batch's statistics in evaluation": (lambda x: conv(F.relu(fixed_bn(use_global_stats=False)(x))), 0),
    "frozen scale and bias": (lambda x: F.relu(bn(**frozen())(conv(x))), 0),
    "frozen below all that trains": (lambda x: conv(F.relu(bn(**frozen())(x))), 0),
    "on the images": (lambda x: F.relu(bn()(x)), 0),
    "addend without a gradient": (lambda x: F.relu(bn()(conv(x)) + no_gradient(x * 2)), 0),
    "added to itself": (lambda x: (lambda y: F.relu(y + y))(bn()(conv(x))), 1),
    "several readers": (lambda x: (lambda y: F.relu(y) + y)(bn()(conv(x))), 1),
    "second summand": (lambda x: (lambda y: F.relu(y + bn()(conv(y))))(conv(x)), 1),
    "ReLU6": (lambda x: F.relu6(9 * bn()(conv(x))) + F.relu6(bn()(conv(x))), 2),
    "hard-swish": (lambda x: F.hardswish(bn()(conv(x))), 1),
    "SiLU": (lambda x: F.silu(bn()(conv(x))), 1),
    "an activation without a kernel": (lambda x: F.leaky_relu(bn()(conv(x))), 1),
    "addend of one pixel": (lambda x: F.relu(bn()(conv(x)) + paddle.mean(conv(x), axis=[1, 2], keepdim=True)), 1),
    "small pool": (lambda x: max_pool(conv(x), 3), 2),
    "large pool": (lambda x: max_pool(conv(x), 17), 0),
    "pool with windows of padding": (lambda x: F.max_pool2d(conv(x), 2, 1, 2, data_format="NHWC"), 0),
    "pool that rounds up": (lambda x: F.max_pool2d(conv(x), 3, 2, ceil_mode=True, data_format="NHWC"), 0),
    "pool of any size": (lambda x: max_pool(paddle.reshape(conv(x), [0, -1, 6, 8]), 3), 0),
}


@pytest.mark.parametrize("case", ODD)
def test_what_the_kernels_do_not_know_stays_paddles(case):
    """And what they do know computes the same in surroundings that are not a residual network's."""
    build, operators = ODD[case]
    found = []
    for fuse in (False, True):
        with static.scope_guard(static.Scope()):
            main, loss, exe = small_program(build)
            if fuse:
                fusion.fuse(main)
                ours = [name for name in types(main).elements() if name.startswith("native_")]
                assert len([name for name in ours if "backward" not in name or "pool" in name]) == operators, ours
            images = [np.random.RandomState(i).randn(4, 6, 6, 8).astype("float32") for i in range(3)]
            found.append([exe.run(main, {"data": x}, [loss])[0].item() for x in images])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("made_before, left_to_paddle", [("relu_grad", 0), ("batch_norm_grad", 1)])
def test_gradients_go_into_the_buffer_of_a_fused_all_reduce(parse, made_before, left_to_paddle, place):
    """Paddle puts the gradients of several parameters into one piece of memory; an operator that made its own would
    leave stale ones there, and one that ran before there is that memory would fail."""
    if place == "gpu":
        native.load(paddle.device.cuda.get_device_capability(0))
    args = parse(*NHWC, "--device", place)
    main, startup = static.Program(), static.Program()
    program.build(args, main, startup, 10)
    block = main.global_block()
    grads = [block.var(f"batch_norm_{i}.{part}@GRAD") for i in range(9) for part in ("w_0", "b_0")]
    names = [grad.name.removesuffix("@GRAD") for grad in grads]
    buffer = block.create_var(name="buffer", dtype=paddle.float32, persistable=False)
    block._insert_op_without_sync(
        next(i for i, op in enumerate(block.ops) if op.type == made_before),
        type="coalesce_tensor",
        inputs={"Input": [block.var(name) for name in names]},
        outputs={"Output": grads, "FusedOutput": buffer},
        attrs={"set_constant": True, "constant": 0.0, "use_align": True, "dtype": paddle.float32, "op_role": 1},
    )
    block._sync_with_cpp()
    fusion.fuse(main)
    assert types(main)["batch_norm_grad"] == left_to_paddle
    exe = static.Executor(processes.place(args))
    exe.run(startup)
    ((x, y),) = random_batches(1, (32, 32, 4))
    values = exe.run(main, {"data": x, "label": y}, [buffer, *grads])
    joined = np.sort(np.abs(values[0]))
    apart = np.sort(np.abs(np.concatenate([value.ravel() for value in values[1:]])))
    assert apart.min() >= 0 and np.count_nonzero(apart) > 100
    np.testing.assert_array_equal(joined[joined > 0], apart[apart > 0])


def test_a_run_trains_evaluates_and_goes_on(run_train, losses_with_a_stop, tmp_path, capsys):
    flags = [*NHWC, "--kernels", "native", "--epochs", "2", "--print-interval", "1", "--resume"]
    flags += ["--optimizer", "AdamW", "--lr", "0.01"]
    code, report = run_train(*flags)
    assert code == 0
    assert "7 native_bn_act, 7 native_bn_act_backward" in capsys.readouterr().out
    expected, evaluation = losses(report), phase(report, [1], "val.")
    assert losses_with_a_stop(4, *flags) == expected
    checkpoint = tmp_path / "output/Tiny/1"
    for kernels in ("native", "paddle"):
        choice = ["--kernels", kernels, "--run-scope", "eval_only", "--from-checkpoint", checkpoint]
        code, report = run_train(*NHWC, *choice)
        assert code == 0
        found = phase(report, [], "val.")
        assert found["top1"] == evaluation["top1"]
        assert found["loss"] == pytest.approx(evaluation["loss"], rel=1e-5)


def test_layout_that_the_kernels_do_not_know_is_refused(run_train, capsys):
    assert run_train("--kernels", "native")[0] == 2
    assert_one_sentence(capsys.readouterr().err, ["--kernels native", "NHWC", "--kernels paddle"])
