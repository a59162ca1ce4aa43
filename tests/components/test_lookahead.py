"""Programs with --lookahead: slow weights compared with their formula, master weights, sparsity, initial values and
resuming."""

import pickle

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, frozen, losses
from helpers import build, random_batches, variable
from paddle_resnet import program
from paddle_resnet.checkpoints import run_folders, variables
from paddle_resnet.native import build as native
from paddle_resnet.step import facts
from paddle_resnet.utils.errors import UsageError

PLACE = paddle.CPUPlace()
RANGER = ["--optimizer", "RAdam", "--beta1", "0.95", "--beta2", "0.99", "--lr", "0.01", "--lookahead", "2,0.5"]


def slow_weights(program):
    """Return {parameter: its slow weight}."""
    [state] = [state for state in facts.of(program).states if state.file == ".pdopt"]
    return state.variables


@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_slow_weights_match_formula(parse, kernels):
    """A second program in the same scope computes the parameters of each step before lookahead. The reference is
    computed in float64."""
    if kernels == "native":
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    runs = []
    for flags in (["--lookahead", "3,0.25"], []):
        args = parse("--lr", "0.5", "--warmup-epochs", "0", "--accumulate-steps", "2", *flags, *NHWC)
        args.set("Python", kernels=kernels)
        runs.append(build(args))
    (compiled, exe, _, lr_scheduler, main), (plain, _, _, plain_scheduler, _) = runs
    names = slow_weights(main)
    assert names.keys() == {p.name for p in main.all_parameters() if p.trainable}
    initial = {name: variable(name) for name in names}
    for step, (images, labels) in enumerate(random_batches(7, (32, 32, 4)), 1):
        feed = {"data": images, "label": labels}
        compiled.write_scalars()
        with variables.restored(main, PLACE):
            exe.run(plain, feed, [])
            fast = {name: variable(name).astype("float64") for name in names}
        old = {name: variable(slow).astype("float64") for name, slow in names.items()}
        exe.run(compiled, feed, [])
        lr_scheduler.step()
        plain_scheduler.step()
        for name, slow in names.items():
            is_due = step in (3, 6)
            new = old[name] + 0.25 * (fast[name] - old[name]) if is_due else old[name]
            np.testing.assert_allclose(variable(slow), new, rtol=1e-5, atol=1e-7, err_msg=name)
            expected = new if is_due else fast[name]
            np.testing.assert_allclose(variable(name), expected, rtol=1e-5, atol=1e-7, err_msg=name)
            assert np.any(variable(name) != initial[name])


def test_masters_are_updated_and_copied_to_parameters(parse, gpu_lists):
    """In half precision, lookahead updates the float32 master weights and copies them to the parameters."""
    args = parse(*RANGER, *NHWC)
    args.set("Python", amp=True, amp_dtype="float16", amp_level="O2", use_dynamic_loss_scaling=True)

    def built():
        main = static.Program()
        program.build(frozen(args), main, static.Program(), 1)
        return main.global_block()

    def writers(name):
        return [op.type for op in block.ops if name in op.output_arg_names]

    block = built()
    assert writers("conv2d_1.w_0") == ["adamw", "cast"]
    assert writers("conv2d_1.w_0_fp32_master_0") == writers("batch_norm_0.w_0") == ["adamw", "lerp"]
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()
    args.set("Python", kernels="native")
    block = built()
    assert writers("conv2d_1.w_0") == ["native_radam", "native_lookahead"]
    assert writers("batch_norm_0.w_0") == ["native_radam", "native_lookahead"]
    with_masters, without = sorted(
        (op for op in block.ops if op.type == "native_lookahead"),
        key=lambda op: "batch_norm_0.w_0" in op.input("Parameters@VECTOR"),
    )
    for op, suffixes in ((with_masters, [".slow", "_fp32_master_0"]), (without, [".slow"])):
        names = op.input("Parameters@VECTOR")
        assert op.input("State@VECTOR") == [name + suffix for suffix in suffixes for name in names]


@pytest.mark.parametrize("kernels", [pytest.param("paddle", marks=pytest.mark.soak), "native"])
def test_resume_is_bit_identical(losses_with_a_resume, run_train, tmp_path, kernels):
    flags = [*RANGER, "--lookahead", "4,0.5", "--epochs", "2", "--print-interval", "1", *NHWC, "--kernels", kernels]
    expected, actual = losses_with_a_resume("0", *flags)
    assert actual == expected
    # After 6 steps, the slow weights differ from the weights, which are evaluated.
    evaluated = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1", "--overwrite"]
    code, report = run_train(*NHWC, *evaluated)
    assert code == 0 and losses(report)[1, "val"] == expected[1, "val"]
    for name in ("tiny.pdparams", "tiny.pdopt"):
        expected, result = (
            pickle.loads((tmp_path / folder / name).read_bytes()) for folder in ("uninterrupted/1", "output/Tiny/1")
        )
        assert expected.keys() == result.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(result[key], value, err_msg=key)
    assert "conv2d_3.w_0.slow" in expected


@pytest.mark.parametrize(
    "start",
    [
        ["--freeze", "stem", "--from-pretrained-params"],
        pytest.param(["--asp", "--prune-model", "--from-pretrained-params"], marks=pytest.mark.slow),
        pytest.param(["--asp", "--prune-model", "--epochs", "2", "--from-checkpoint"], marks=pytest.mark.slow),
    ],
)
def test_slow_weights_start_at_loaded_weights(run_train, checkpoint, tmp_path, start):
    """With a learning rate of 0, the weights remain equal to the loaded or pruned weights. Frozen layers, which may be
    trained later, also have slow weights."""
    flags = ["--lookahead", "1,0.5", "--lr", "0", "--warmup-epochs", "0", "--weight-decay", "0"]
    flags += ["--run-scope", "train_only"]
    if "--from-checkpoint" in start:
        assert run_train(*flags, "--output-dir", tmp_path / "dense")[0] == 0
        checkpoint = tmp_path / "dense/Tiny/0"
    assert run_train(*flags, *start, checkpoint)[0] == 0
    before = pickle.loads((checkpoint / "tiny.pdparams").read_bytes())
    folder = run_folders.newest(tmp_path / "output/Tiny")
    after, state = (pickle.loads((folder / f"tiny.{suffix}").read_bytes()) for suffix in ("pdparams", "pdopt"))
    for name in ("conv2d_0.w_0", "conv2d_3.w_0", "linear_0.b_0"):
        expected = before[name] * after.get(f"{name}.asp_mask", 1)
        np.testing.assert_array_equal(after[name], expected)
        np.testing.assert_array_equal(state[f"{name}.slow"], expected)


@pytest.mark.parametrize("value", ["6", "0,0.5", "6,0", "6,1.5", "x,0.5", "1,2,3"])
def test_invalid_values_are_rejected(parse, value):
    with pytest.raises(UsageError, match=f"--lookahead: '{value}': expected K,A"):
        parse("--lookahead", value)
