"""Programs with --ema: EMA weights compared with their formula, skipped steps, and the variables of evaluation
programs."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, frozen
from helpers import build as build_compiled
from helpers import random_batches, variable
from paddle_resnet import program
from paddle_resnet.checkpoints import variables
from paddle_resnet.components import accumulation, precision
from paddle_resnet.native import build as native
from paddle_resnet.passes import all_reduces
from paddle_resnet.step import averages, build
from paddle_resnet.utils.errors import UsageError

PLACE = paddle.CPUPlace()
KERNELS = ["paddle", "native"]


@pytest.fixture
def train(parse):
    """Build a training program with --ema and return (function that runs a step, program)."""

    def train(kernels, *flags, **settings):
        if kernels == "native":
            if native.missing() is not None:
                pytest.skip(native.missing())
            native.load()
        args = parse("--ema", "0.5", *NHWC, *flags)
        args.set("Python", kernels=kernels, **settings)
        compiled, exe, _, lr_scheduler, main = build_compiled(args)
        batches = iter(random_batches(20, (32, 32, 4)))

        def step(overflows=False):
            images, labels = next(batches)
            images[0] = np.inf if overflows else images[0]
            compiled.write_scalars()
            exe.run(compiled, {"data": images, "label": labels}, [])
            lr_scheduler.step()

        return step, main

    return train


@pytest.fixture
def scaled(monkeypatch):
    """Use dynamic loss scaling in float32, because CPUs do not support float16."""

    wrap_optimizer = build.wrap_optimizer

    def scale(args, optimizer):
        types = {op.type for op in static.default_main_program().global_block().ops}
        lists = static.amp.AutoMixedPrecisionLists(custom_black_list=types | {"scale", "sum", "elementwise_mul"})
        scaling = {"use_dynamic_loss_scaling": True, "decr_every_n_nan_or_inf": 1}
        return wrap_optimizer(args, static.amp.decorate(optimizer, lists, 1024.0, **scaling))

    monkeypatch.setattr(build, "wrap_optimizer", scale)


def state(names):
    return {name: variable(name) for name in names}


@pytest.mark.parametrize("kernels", KERNELS)
def test_ema_weights_match_formula(train, kernels):
    """The reference is computed in float64, starting with the initial weights. All trained parameters and running
    statistics are averaged, after --lookahead has changed them. The decay depends on the number of training steps, not
    on the number of batches."""
    step, main = train(kernels, "--accumulate-steps", "2", "--lr", "1", "--lookahead", "3,0.5")
    names = averages.of(main)
    trained = {p.name for p in main.all_parameters() if p.trainable}
    assert names.keys() == trained | {*all_reduces.bn_statistics(main)}
    statistics = {*all_reduces.bn_statistics(main)}
    assert {*all_reduces.own_statistics(main)} == statistics | {names[name] for name in statistics}
    operator, slot = ("native_ema", "Averages@VECTOR") if kernels == "native" else ("lerp", "X")
    averaged = [name for op in main.global_block().ops if op.type == operator for name in op.input(slot)]
    assert sorted(name for name in averaged if name.endswith(".ema")) == sorted(names.values())
    # The EMA weights are updated only after the last batch of a training step.
    accumulating = main.clone()
    accumulation.remove_update(accumulating)
    assert operator not in [op.type for op in accumulating.global_block().ops]
    expected = {name: value.astype("float64") for name, value in state(names).items()}
    for name, average in names.items():
        np.testing.assert_array_equal(variable(average), expected[name])
    for i in range(12):
        step()
        decay = min(0.5, (1 + i) / (10 + i))  # the decay reaches its limit of 0.5 in step 8
        expected = {n: decay * expected[n] + (1 - decay) * value.astype("float64") for n, value in state(names).items()}
        for name, average in names.items():
            assert np.any(variable(average) != variable(name))
            np.testing.assert_allclose(variable(average), expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kernels", KERNELS)
def test_skipped_step_does_not_change_ema_weights(train, scaled, kernels):
    step, main = train(kernels, use_dynamic_loss_scaling=True)
    names = averages.of(main).values()
    before = state(names)
    step()
    after = state(names)
    assert all(np.any(after[name] != before[name]) for name in names)
    scale = variable(variables.LOSS_SCALE)
    step(overflows=True)
    assert variable(variables.LOSS_SCALE) < scale
    for name, value in state(names).items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    step()
    assert all(np.any(variable(name) != after[name]) for name in names)


def half_program(args):
    """Return an evaluation program for AMP level O2 in float16. The calling test must use the fixture gpu_lists."""
    main = static.Program()
    args = args.copy(amp=True, amp_dtype="float16", amp_level="O2")
    program.build(frozen(args), main, static.Program(), 1, is_train=False)
    before = state(p.name for p in main.all_parameters())
    precision.cast_evaluation_program(main, PLACE, "float16", "O2")
    # The test restores the float32 values, because its training program does not use level O2.
    for name, value in before.items():
        static.global_scope().find_var(name).get_tensor().set(value, PLACE)
    return main


def test_half_precision_evaluation_reads_copies_at_constant_addresses(train, parse, gpu_lists):
    step, main = train("paddle")
    args = parse("--ema", "0.5", *NHWC)
    evaluated = half_program(args)
    update = averages.evaluate(main, evaluated, static.Executor(PLACE))
    names = {p.name: p.dtype for p in evaluated.all_parameters()}
    halves = [name for name, dtype in names.items() if dtype == paddle.float16]
    assert {name.removesuffix(".half") for name in names} == {*averages.of(main).values()}
    assert all(name.endswith(".half") for name in halves)
    assert {"conv2d_0.w_0.ema.half", "linear_0.w_0.ema.half"} <= {*halves}
    assert names["batch_norm_0.w_1.ema"] == paddle.float32

    def addresses():
        return {name: static.global_scope().find_var(name).get_tensor()._ptr() for name in names}

    before, expected = state(halves), addresses()
    step()
    step()
    for name, value in state(halves).items():
        np.testing.assert_array_equal(value, before[name])  # the copies do not change until the next evaluation
    update()
    assert addresses() == expected
    for name, value in state(halves).items():
        # Paddle's cast operator rounds towards zero on a CPU.
        np.testing.assert_allclose(value, variable(name.removesuffix(".half")), rtol=2**-10, atol=2**-24)
        assert np.any(value != before[name])


def test_ema_weights_are_computed_from_float32_masters(parse, gpu_lists):
    args = parse("--ema", "0.9", *NHWC)
    args.set("Python", amp=True, amp_dtype="float16", amp_level="O2", use_dynamic_loss_scaling=True)
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 1)
    ops = main.global_block().ops
    values = {op.input("X")[0]: op.input("Y")[0] for op in ops if op.type == "lerp"}
    assert values["conv2d_1.w_0.ema"] == "conv2d_1.w_0_fp32_master_0"
    assert values["batch_norm_0.w_0.ema"] == "batch_norm_0.w_0"


@pytest.mark.parametrize("decay", ["1", "-0.1"])
def test_invalid_decay_is_rejected(parse, decay):
    with pytest.raises(UsageError, match="--ema: "):
        parse("--ema", decay)


def test_program_has_at_most_one_kind_of_averages(parse, with_component):
    """Evaluations could use only one of them."""
    second = SimpleNamespace(
        add=lambda step: averages.add(step, "second", lambda: 1.0),
        state=lambda step: averages.state(step, "second", "--second", "second averages"),
    )
    with_component("UPDATE", second)
    with pytest.raises(UsageError, match=r"^--second: evaluations cannot use two averages .*; remove --ema$"):
        build_compiled(parse("--ema", "0.5"))
    build_compiled(parse())
