"""Each difference between Paddle 2.6 and Paddle 3 that compat.py covers is still there.

A test that fails here says that a line of compat.py is no longer needed, or that Paddle has changed once more.
"""

import subprocess
import sys

import numpy as np
import paddle
import pytest
from paddle import static
from paddle.base.framework import OpProtoHolder

import other_paddle
from conftest import ROOT
from paddle_resnet import compat
from utils.errors import UsageError

only_paddle_2 = pytest.mark.skipif(compat.IS_PADDLE_3, reason="a difference of Paddle 2.6")
only_paddle_3 = pytest.mark.skipif(not compat.IS_PADDLE_3, reason="a difference of Paddle 3")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3", "3.3.1", "3.3.2", "3.3.1.post129"])
def test_tested_lines_are_taken(version):
    compat.check_version(version)


@pytest.mark.parametrize(
    "version", ["2.5.2", "2.6.1", "3.0.0", "3.2.2", "3.3.0", "3.4.0", "4.0.0", "0.0.0", "3.0.0-rc1"]
)
def test_others_are_refused_by_name(version):
    with pytest.raises(UsageError, match=rf"Paddle {version} .* 2\.6\.2 \(lowest\) and 3\.3\.1 \(highest\)"):
        compat.check_version(version)


def test_train_refuses_another_version(train_process, monkeypatch, tmp_path):
    """With exit code 2 and one sentence, before anything else is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import paddle_resnet.compat as compat\ncompat.LOWEST = compat.HIGHEST = (9, 9, 9)\n"
        "compat.check_version.__defaults__ = ('2.4.1',)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    done = train_process("--device", "cpu")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("train.py: error: Paddle 2.4.1 is not")]


@only_paddle_3
def test_pir_is_refused(train_process, monkeypatch):
    monkeypatch.setenv("FLAGS_enable_pir_api", "1")
    done = train_process("--device", "cpu")
    assert done.returncode == 2
    assert "train.py: error: FLAGS_enable_pir_api: Paddle 3." in done.stderr


PIR = """
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.incubate import asp

def fails(what, error, function):
    try:
        function()
    except error:
        return
    raise SystemExit(f"{what} works with PIR programs: see docs/paddle3.md")

def minimize(optimizer):
    with static.program_guard(static.Program(), startup := static.Program()):
        loss = paddle.mean(paddle.nn.Linear(4, 4)(static.data("x", [2, 4])))
        optimizer(paddle.optimizer.Momentum()).minimize(loss, startup)

paddle.enable_static()
fleet.init(is_collective=True)
assert paddle.framework.in_pir_mode()
fails("Fleet", TypeError, lambda: minimize(fleet.distributed_optimizer))
fails("ASP", TypeError, lambda: minimize(asp.decorate))
fails("AMP", ValueError, lambda: minimize(lambda o: static.amp.decorate(o, use_dynamic_loss_scaling=True)))
fails("CompiledProgram", TypeError, lambda: static.CompiledProgram(static.Program())._compile(None, paddle.CPUPlace()))
fails("clone(for_test)", TypeError, lambda: static.Program().clone(for_test=True))
"""


@only_paddle_3
def test_pir_programs_still_lack_what_training_needs(monkeypatch):
    """What FLAGS_enable_pir_api=0 is for. If one of these works, docs/paddle3.md is out of date."""
    monkeypatch.setenv("FLAGS_enable_pir_api", "1")
    done = subprocess.run([sys.executable, "-c", PIR], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]


def attributes(op_type):
    return [attribute.name for attribute in OpProtoHolder.instance().get_op_proto(op_type).attrs]


@only_paddle_2
def test_paddle_2_has_an_all_reduce_on_the_computations_stream():
    assert "use_calc_stream" in attributes("c_allreduce_sum")


@only_paddle_3
def test_paddle_3_has_no_all_reduce_on_the_computations_stream():
    assert "use_calc_stream" not in attributes("all_reduce")
    with pytest.raises(ValueError, match="not been registered"):
        attributes("c_allreduce_sum")


@only_paddle_3
def test_paddle_3_cannot_append_an_all_reduce_to_a_legacy_program():
    with static.program_guard(static.Program()), pytest.raises(TypeError, match="expected str instance"):
        paddle.distributed.all_reduce(variable("float32"))


def variable(dtype):
    return static.data("x", [3], dtype)


@only_paddle_3
@pytest.mark.parametrize(("name", "dtype"), [("sqrt", "float32"), ("any", "bool")])
def test_paddle_3_refuses_legacy_variables(monkeypatch, name, dtype):
    with static.program_guard(static.Program()):
        function = getattr(paddle.base.dygraph.generated_tensor_methods_patch, f"_{name}")
        with pytest.raises(TypeError, match="must be Value"):
            function(variable(dtype))


@pytest.mark.parametrize("values", [[0, 0, 0], [0, 1, 0]])
def test_any_of_legacy_variables(monkeypatch, values):
    monkeypatch.setattr(paddle, "any", paddle.any)  # put back afterwards
    compat.accept_legacy_any()
    compat.accept_legacy_any()
    main, exe = static.Program(), static.Executor(paddle.CPUPlace())
    with static.program_guard(main):
        found = paddle.any(variable("bool"))
    [result] = exe.run(main, feed={"x": np.array(values, bool)}, fetch_list=[found])
    assert result == any(values)
    assert next(op.type for op in main.global_block().ops) == "reduce_any"


def test_any_of_other_tensors_stays_paddles(monkeypatch):
    monkeypatch.setattr(paddle, "any", paddle.any)
    compat.accept_legacy_any()
    paddle.disable_static()
    try:
        assert paddle.any(paddle.to_tensor([[True, False], [False, False]]), axis=1).tolist() == [True, False]
    finally:
        paddle.enable_static()


def test_sqrt():
    main, exe = static.Program(), static.Executor(paddle.CPUPlace())
    with static.program_guard(main):
        root = compat.sqrt(variable("float32"))
    [result] = exe.run(main, feed={"x": np.float32([4, 9, 2])}, fetch_list=[root])
    assert np.array_equal(result, np.sqrt(np.float32([4, 9, 2])))


@only_paddle_2
def test_paddle_2_has_no_fused_residual_unit():
    assert not hasattr(static.BuildStrategy, "fuse_resunit")


@only_paddle_3
def test_paddle_3_has_a_fused_residual_unit_in_some_builds():
    assert hasattr(static.BuildStrategy, "fuse_resunit")
    if not paddle.is_compiled_with_cuda():
        with pytest.raises(UsageError, match="--fuse-resunit"):
            compat.fuse_residual_units(static.BuildStrategy())


@pytest.mark.parametrize("folder", sorted((ROOT / "tests/goldens").glob("paddle_*")), ids=lambda folder: folder.name)
def test_versions_read_each_other(folder):
    """The tolerance is for another processor; .ci/run compares the versions on one machine to 1e-5."""
    other_paddle.check(folder, rtol=2e-4)


def test_there_is_a_golden_of_each_version():
    names = {f"paddle_{'.'.join(map(str, version))}" for version in (compat.LOWEST, compat.HIGHEST)}
    assert names == {folder.name for folder in (ROOT / "tests/goldens").glob("paddle_*")}
