"""Test that a run with --accumulate-steps K equals a run with K times the batch size and a run that was stopped and
resumed."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, assert_one_error, losses, phase
from helpers import build, random_batches
from paddle_resnet import graph
from paddle_resnet.checkpoints import variables
from paddle_resnet.components import accumulation
from paddle_resnet.machine import compat
from paddle_resnet.models import layers
from paddle_resnet.native import build as native
from paddle_resnet.step import random_numbers

KERNELS = ["paddle", *(["native"] if native.missing() is None else [])]
ANY_LENGTH = ["--batch-size", "4", "--print-interval", "1", "--accumulate-steps", "3"]
FLAGS = [*ANY_LENGTH, "--epochs", "2"]


@pytest.fixture
def without_bn(monkeypatch):
    """Remove BN layers, because BN statistics are computed per batch, not per step."""
    monkeypatch.setattr(layers, "BatchNorm", lambda *arguments, **options: paddle.nn.Identity())


@pytest.mark.parametrize(
    "scaling", [pytest.param(None, marks=pytest.mark.soak), pytest.param("static", marks=pytest.mark.soak), "dynamic"]
)
@pytest.mark.parametrize("optimizer", ["Momentum", pytest.param("AdamW", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_accumulated_update_equals_update_of_large_batch(parse, without_bn, kernels, optimizer, scaling):
    if kernels == "native":
        native.load()
    states = []
    limit = "0.5" if optimizer == "AdamW" else "1e3"  # clipping would hide a wrong scale of the gradients
    for count in (1, 2, 4):
        flags = ["--accumulate-steps", count, "--lr", 0.08 / count, "--clip-grad-norm", limit, "--optimizer", optimizer]
        args = parse(*NHWC, *flags, "--weight-decay", "0.01")
        args.kernels = kernels
        if scaling:
            args.amp, args.use_dynamic_loss_scaling, args.scale_loss = True, scaling == "dynamic", 1024.0
        with static.scope_guard(static.Scope()):
            compiled, exe, _, rate, main = build(args, steps=10 * count)
            if count > 1:
                types = {op.type for op in compiled.accumulating._program.global_block().ops}
                assert not types & {"squared_l2_norm", "native_clip_factor"}  # once per update is enough
            for x, y in random_batches(3, (32, 32, 4)):
                parts = list(zip(np.split(x, count), np.split(y, count), strict=True))
                for data, label in parts[:-1]:
                    exe.run(compiled.accumulating, {"data": data, "label": label}, [])
                compiled.write_scalars()
                exe.run(compiled, {"data": parts[-1][0], "label": parts[-1][1]}, [])
                rate.step()
            state = variables.snapshot(main)
            states.append(state[0] | state[1])
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, value in states[0].items():
            scale = np.abs(value).max()
            # AdamW divides small gradients by their magnitude and therefore needs a larger tolerance.
            tolerance = 1e-5 if optimizer == "Momentum" else 1e-3
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=tolerance * scale, err_msg=name)


def float16_programs(count, append=lambda block: None):
    """Return a training program for a float16 parameter with sums, its startup program, and the gradient.
    append(block) appends operators before the update."""
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        block = main.global_block()
        data = static.data("data", [3])
        names = {name: block.create_var(name=name, shape=[3], dtype="float16") for name in ("p@GRAD", "p")}
        loss = block.create_var(name="loss@GRAD", shape=[1], dtype="float32")
        attrs = {"shape": [1], "value": 1.0, "dtype": loss.dtype, "op_role": graph.BACKWARD | graph.LOSS}
        block.append_op(type="fill_constant", outputs={"Out": loss}, attrs=attrs)
        types = {"in_dtype": data.dtype, "out_dtype": paddle.float16, "op_role": graph.BACKWARD}
        block.append_op(type="cast", inputs={"X": data}, outputs={"Out": names["p@GRAD"]}, attrs=types)
        append(block)
        inputs = {"Param": names["p"], "Grad": names["p@GRAD"], "LearningRate": loss}
        attrs = {"op_role": graph.OPTIMIZE}
        block.append_op(type="sgd", inputs=inputs, outputs={"ParamOut": names["p"]}, attrs=attrs)
        part = lambda cls: cls(accumulate_steps=count)  # noqa: E731
        accumulation.add(SimpleNamespace(main=main, startup=startup, part=part))
    return main, startup, names["p@GRAD"]


def test_sums_are_added_before_all_reduce():
    def append(block):
        gradient, attrs = block.var("p@GRAD"), {"op_role": graph.BACKWARD}
        inputs = {"X": gradient, "Dep": gradient}
        block.append_op(type="depend", inputs=inputs, outputs={"Out": gradient}, attrs=attrs)
        compat.append_all_reduce(block, gradient)
        block.ops[-1]._set_attr("op_role", attrs["op_role"])

    main, *_ = float16_programs(2, append)
    sums, communication = ["cast", "elementwise_add", "cast", "fill_constant"], ["depend", compat.ALL_REDUCE]
    assert [op.type for op in main.global_block().ops] == ["fill_constant", "cast", *sums, *communication, "sgd"]
    accumulating = main.clone()
    accumulation.remove_update(accumulating)
    assert [op.type for op in accumulating.global_block().ops] == ["fill_constant", "cast", *sums[:2]]


def test_gradient_of_loss_is_divided_by_number_of_batches():
    for count, types in ((1, []), (4, ["cast", "elementwise_add", "cast", "fill_constant"])):
        ops = float16_programs(count)[0].global_block().ops
        assert [op.type for op in ops] == ["fill_constant", "cast", *types, "sgd"]
        assert ops[0].attr("value") == 1 / count


def test_float16_gradients_are_summed_in_float32():
    """The gradient of each batch is too small to change a float16 sum of the other gradients."""
    count = 64
    main, startup, gradient = float16_programs(count)
    block, accumulating = main.global_block(), main.clone()
    accumulation.remove_update(accumulating)
    block._remove_op(len(block.ops) - 1)  # the CPU cannot update float16 parameters
    exe = static.Executor(paddle.CPUPlace())
    gradients = np.full((count, 3), [1, 3e-4, -9e-4], np.float16)
    gradients[0] = 2048, 1, 4
    exe.run(startup)
    for _ in range(2):  # the second pass checks that the sums were reset to 0
        for value in gradients[:-1]:
            exe.run(accumulating, {"data": value.astype("float32")})
        [result] = exe.run(main, {"data": gradients[-1].astype("float32")}, [gradient])
        assert result.dtype == np.float16
        # The CPU truncates the sum to float16.
        np.testing.assert_allclose(result, np.cumsum(gradients.astype("float32"), 0)[-1], rtol=2**-10)
        assert np.all(result != gradients[0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_overflow_in_any_batch_skips_only_one_step(parse, without_bn, kernels):
    if kernels == "native":
        native.load()
    args = parse(*NHWC, "--accumulate-steps", "2", "--optimizer", "AdamW", "--lr", "0.01")
    args.kernels, args.amp, args.use_dynamic_loss_scaling, args.scale_loss = kernels, True, True, 1024.0
    compiled, exe, _, _, main = build(args)
    compiled.write_scalars()
    states = []
    for i, (x, y) in enumerate(random_batches(6, (32, 32, 4))):
        x = np.full_like(x, 1e38) if i == 2 else x
        exe.run(compiled if i % 2 else compiled.accumulating, {"data": x, "label": y}, [])
        states.append(variables.snapshot(main)[0])
    trained = [p.name for p in main.all_parameters() if p.trainable]
    for name in trained:
        np.testing.assert_array_equal(states[3][name], states[1][name], err_msg=name)
    assert any(np.any(states[5][name] != states[3][name]) for name in trained)
    assert all(np.isfinite(states[5][name]).all() for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "batches"), [(1, 3), pytest.param(2, None, marks=pytest.mark.soak)])
def test_resume_is_bit_identical(run_train, stop_before, tmp_path, capsys, stop, batches):
    """An epoch has seven batches. Each of the two steps uses three batches, and the last batch is not used. A stopped
    run first completes its step. Checkpoints are saved after steps, without accumulated gradients."""
    flags = [*FLAGS, "--dropout", "0.5"]
    code, report = run_train(*flags, "--save-interval-steps", "1", "--keep-checkpoints", "9")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "output/Tiny").glob("[0-9]*")) == ["0", "0_3", "1", "1_3"]
    for ending in ("pdparams", "pdopt"):
        state = paddle.load(str(tmp_path / f"output/Tiny/1/tiny.{ending}"))
        assert not [name for name in state if name.startswith(accumulation.PREFIX)]
    assert "an update every 3 steps (last 1 unused)" in capsys.readouterr().out
    expected = losses(report)
    assert sorted(key for key in expected if isinstance(key[1], int)) == [(e, s) for e in (0, 1) for s in range(6)]
    assert phase(report, [0], "train.")["images"] == 24
    flags += ["--resume", "--output-dir", tmp_path / "stopped"]
    stop_before(train_step=stop)
    code, report = run_train(*flags)
    assert code == 75
    first = losses(report)
    stop_before()
    if batches is not None:
        assert run_train(*flags, "--accumulate-steps", "2")[0] == 2
        assert_one_error(capsys.readouterr().err, ["--accumulate-steps 2", f"after {batches} batches"])
    code, report = run_train(*flags)
    assert code == 0
    assert first | losses(report) == expected


def test_each_batch_has_own_random_numbers(run_train, monkeypatch):
    steps = []
    generator = random_numbers.generator
    draw = lambda seed, step, *key: steps.append(step) or generator(seed, step, *key)  # noqa: E731
    monkeypatch.setattr(random_numbers, "generator", draw)
    assert run_train(*FLAGS, "--dropout", "0.5", "--mixup", "0.2")[0] == 0
    assert sorted(steps) == sorted(2 * [*range(12)])


@pytest.mark.slow
def test_learning_rate_and_number_of_steps_count_updates(run_train, tmp_path):
    flags = ["--iter-unit", "batch", "--num-iter", "3", "--lr-scheduler", "Poly", "--lr-power", "1"]
    code, report = run_train(*ANY_LENGTH, *flags, "--lr", "0.01", "--eval-interval", "1", "--save-interval", "1")
    assert code == 0
    rates = [entry["data"]["train.lr"] for entry in report if "train.lr" in entry["data"]]
    np.testing.assert_allclose(rates, np.repeat([0.03, 0.02, 0.01], 3))
    assert {path.name for path in (tmp_path / "output/Tiny").iterdir()} >= {"0_3", "0", "1_3"}
    code, report = run_train(*ANY_LENGTH, *flags, "--num-iter", "4", "--resume")
    assert code == 0
    assert (tmp_path / "output/Tiny/1").is_dir()


def test_fewer_batches_than_one_step_is_an_error(run_train, capsys):
    assert run_train(*FLAGS, "--accumulate-steps", "8")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--accumulate-steps 8", "7 batches per epoch", "smaller"])
