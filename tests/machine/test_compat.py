"""Differences between Paddle 2.6 and Paddle 3 that compat.py handles.

If a test fails, either a line of compat.py is no longer needed or Paddle has changed again.
"""

import ast
import json
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static
from paddle.base.framework import OpProtoHolder

import other_paddle
from conftest import ROOT, TINY, assert_one_error
from paddle_resnet import config, startup
from paddle_resnet.machine import compat
from paddle_resnet.utils.errors import UsageError, command

only_paddle_2 = pytest.mark.skipif(compat.IS_PADDLE_3, reason="tests Paddle 2.6 only")
only_paddle_3 = pytest.mark.skipif(not compat.IS_PADDLE_3, reason="tests Paddle 3 only")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3", "3.3.1", "3.3.2", "3.3.1.post129"])
def test_tested_version_is_accepted(version, capsys):
    compat.check_version(version)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("version", ["3.4.0", "3.4.0.post129", "3.10.0", "4.0.0-rc1"])
def test_newer_version_is_accepted_with_one_warning(version, capsys):
    compat.check_version(version)
    compat.check_version(version)
    assert capsys.readouterr().err == (
        f"warning: Paddle {version}: newer than 3.3.1, the newest version with which this project is tested; run "
        f"{command('doctor', '--self-test')} to check it on this machine\n"
    )


@pytest.mark.slow
def test_only_rank_0_warns_of_newer_version(environment, monkeypatch, capsys):
    """This process starts like each rank of a job in turn. tests/test_self_test.py runs the command that the warning
    recommends."""
    endpoints = "127.0.0.1:1,127.0.0.1:2"
    environment(PADDLE_TRAINERS_NUM=2, PADDLE_MASTER="127.0.0.1:1", PADDLE_TRAINER_ENDPOINTS=endpoints)
    monkeypatch.setattr(compat, "check_version", partial(compat.check_version, "3.4.0"))
    for rank, count in ((0, 1), (1, 0)):
        environment(PADDLE_TRAINER_ID=rank)
        startup.import_paddle(config.parse_args([]))
        compat._warn_of_newer_version.cache_clear()
        assert capsys.readouterr().err.count("warning: Paddle 3.4.0: newer than 3.3.1") == count


@pytest.mark.parametrize("version", ["2.5.2", "2.6.1", "2.7.0", "3.0.0", "3.2.2", "3.3.0", "0.0.0", "3.0.0-rc1"])
def test_older_version_is_rejected(version):
    with pytest.raises(UsageError, match=rf"Paddle {version}: .* 2\.6\.2 \(lowest\) and 3\.3\.1 \(highest\)"):
        compat.check_version(version)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "train.py --device cpu --data-format synthetic",
        pytest.param("-m paddle_resnet.export nosuch-checkpoint nosuch-export", marks=pytest.mark.soak),
        pytest.param("-m paddle_resnet.predict nosuch-model --benchmark", marks=pytest.mark.soak),
    ],
)
def test_command_exits_with_code_2_for_other_version(environment, tmp_path, command):
    """Each command prints one error message, even if Paddle lacks internal modules that the supported versions have."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nimport paddle_resnet, paddle\npaddle.__version__ = '2.4.1'\nsys.modules['paddle.base'] = None\n"
    )
    environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if " error: Paddle 2.4.1: not supported" in line]


@only_paddle_3
def test_pir_is_rejected(train_process, environment):
    environment(FLAGS_enable_pir_api="1")
    done = train_process("--device", "cpu", "--data-format", "synthetic")
    assert done.returncode == 2
    assert "train.py: error: FLAGS_enable_pir_api: Paddle 3." in done.stderr


@only_paddle_3
def test_launched_processes_use_legacy_programs(environment, tmp_path):
    """The job starts without FLAGS_enable_pir_api, which conftest has set in the test process."""
    environment(FLAGS_enable_pir_api=None)
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", 1, "--log_dir", tmp_path / "log"]
    flags = [*TINY, "--model-arch-name", "ResNet18", "--data-format", "synthetic", "--dry-run"]
    command = [sys.executable, *launcher, "train.py", *flags, "--output-dir", tmp_path / "output"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "dry run: flags, data and programs are valid" in (tmp_path / "log/workerlog.0").read_text()


@only_paddle_3
def test_legacy_programs_are_used_if_paddle_is_imported_first(environment):
    environment(FLAGS_enable_pir_api=None)
    code = "import paddle, paddle_resnet; paddle.enable_static(); assert not paddle.framework.in_pir_mode()\n"
    code += "paddle.static.Program().clone(for_test=True)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]


def test_only_two_modules_refer_to_program_format_flag():
    paths = ROOT.glob("paddle_resnet/**/*.py")
    setting = [path for path in paths if "FLAGS_enable_pir_api" in path.read_text()]
    assert sorted(setting) == [ROOT / "paddle_resnet/__init__.py", ROOT / "paddle_resnet/machine/compat.py"]


PIR = """
import numpy as np
import paddle
from paddle import pir, static
from paddle.distributed import fleet
from paddle.incubate import asp

def fails(feature, error, function):
    try:
        function()
    except error:
        return
    raise SystemExit(f"{feature} works with PIR programs: see docs/paddle3.md")

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

# These features work.
main, startup, exe = static.Program(), static.Program(), static.Executor(paddle.CPUPlace())
images = np.ones([2, 4], np.float32)
with static.program_guard(main, startup):
    x = static.data("x", [2, 4])
    network = paddle.nn.Linear(4, 4)
    _, optimizer = paddle.amp.decorate(network, paddle.optimizer.Momentum(parameters=network.parameters()), level="O1")
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0, use_dynamic_loss_scaling=True)
    # CPUs have no kernels for float16.
    with paddle.amp.auto_cast(custom_black_list={"matmul", "matmul_v2", "linear", "mul"}):
        loss = paddle.mean(network(x) ** 2)
    scaler.minimize(optimizer, scaler.scale(loss), startup_program=startup)
assert "pd_op.update_loss_scaling_" in [op.name() for op in main.global_block().ops]
exe.run(startup)
first, second = (exe.run(main, feed={"x": images}, fetch_list=[loss])[0] for _ in range(2))
assert second < first

main = static.Program()
with static.program_guard(main):
    relu = paddle.nn.functional.relu(static.data("x", [2, 4]))
    y = relu + 1
    pir.set_insertion_point(relu.get_defining_op())
    relu.replace_all_uses_with(paddle.nn.functional.sigmoid(main.global_block().ops[0].result(0)))
    relu.get_defining_op().erase()
assert np.allclose(exe.run(main, feed={"x": images}, fetch_list=[y])[0], 1 / (1 + np.exp(-1)) + 1)

main = static.Program()
with static.program_guard(main):
    y = paddle.nn.functional.dropout(static.data("x", [2, 4]))
evaluation = main.clone()
evaluation.set_is_test_attr()
[y] = exe.run(evaluation, feed={"x": images}, fetch_list=[evaluation.global_block().ops[-1].result(0)])
assert (y == images).all()
"""


@only_paddle_3
def test_features_of_pir_programs(environment):
    """PIR programs lack some features, so the project sets FLAGS_enable_pir_api=0. If the test fails with a newer
    version, docs/paddle3.md is outdated."""
    environment(FLAGS_enable_pir_api="1")
    done = subprocess.run([sys.executable, "-c", PIR], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]


@only_paddle_2
def test_gloo_is_prepared_before_its_helper_processes_start(monkeypatch):
    """The value of the preparation, a reserved port, is released after the start."""
    events = []

    class Port:
        def __del__(self):
            events.append("released")

    monkeypatch.setattr(paddle.distributed, "init_parallel_env", lambda: events.append("started"))
    compat.start_gloo(lambda: events.append("prepared") or Port())
    assert events == ["prepared", "started", "released"]


def attributes(op_type):
    return [attribute.name for attribute in OpProtoHolder.instance().get_op_proto(op_type).attrs]


@only_paddle_2
def test_paddle_2_has_all_reduce_on_computation_stream():
    assert "use_calc_stream" in attributes("c_allreduce_sum")


@only_paddle_3
def test_paddle_3_has_no_all_reduce_on_computation_stream():
    assert "use_calc_stream" not in attributes("all_reduce")
    with pytest.raises(ValueError, match="not been registered"):
        attributes("c_allreduce_sum")


@only_paddle_3
def test_paddle_3_cannot_append_all_reduce_to_legacy_program():
    with static.program_guard(static.Program()), pytest.raises(TypeError, match="expected str instance"):
        paddle.distributed.all_reduce(variable("float32"))


def variable(dtype):
    return static.data("x", [3], dtype)


def test_versions_require_different_communicators_on_cpu():
    main, exe = static.Program(), static.Executor(paddle.CPUPlace())
    with static.program_guard(main):
        compat.append_all_reduce(main.global_block(), variable("float32"))
    assert main.global_block().ops[-1].attr("ring_id") == 0  # Fleet's communicator of all ranks
    message = "NCCLCommContext is nullptr" if compat.IS_PADDLE_3 else "initialize the gloo environment"
    with pytest.raises(RuntimeError, match=message):
        exe.run(main, feed={"x": np.zeros(3, "float32")})


@only_paddle_3
@pytest.mark.parametrize(("name", "dtype"), [("sqrt", "float32"), ("any", "bool")])
def test_paddle_3_rejects_legacy_variables(name, dtype):
    with static.program_guard(static.Program()):
        function = getattr(paddle.base.dygraph.generated_tensor_methods_patch, f"_{name}")
        with pytest.raises(TypeError, match="must be Value"):
            function(variable(dtype))


# Functions that reject legacy variables in Paddle 3.3.1. Later versions may reject more.
REJECTING = {
    *("abs", "acos", "acosh", "all", "amax", "amin", "any", "argmax", "argmin", "asin", "atanh", "bmm", "ceil", "cos"),
    *("cosh", "diagonal", "dot", "exp", "expand_as", "expm1", "floor", "gelu", "greater_than", "grid_sample"),
    *("index_put", "index_put_", "isclose", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2"),
    *("logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "matmul", "maximum", "minimum"),
    *("multiply", "roll", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "softplus", "sqrt", "sum", "tanh"),
    *("tril", "triu"),
}
MODULES_WITH_FUNCTIONS = {"paddle", "paddle.tensor", "paddle.nn.functional", "nn.functional", "functional", "F"}
MODULES_WITH_LAYERS = {"paddle.nn", "nn"}


@only_paddle_3
def test_list_of_functions_that_reject_legacy_variables_is_complete():
    module = paddle.base.dygraph.generated_tensor_methods_patch
    functions = (name for name, value in vars(module).items() if callable(value) and name.startswith("_"))
    assert {name[1:] for name in functions} - {"C_ops"} <= REJECTING


def rejecting_calls(source):
    """Return the names in a source file that refer to functions in REJECTING, to their layers or to
    ExecutionStrategy, which Paddle 3.3 has removed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES_WITH_FUNCTIONS:
            found += [alias.name for alias in node.names if alias.name in REJECTING]
        if not isinstance(node, ast.Attribute) or node.attr.lower() not in {*REJECTING, "executionstrategy"}:
            continue
        module, name = ast.unparse(node.value), node.attr
        is_function = module in MODULES_WITH_FUNCTIONS and name in REJECTING
        is_layer = module in MODULES_WITH_LAYERS and name.lower() in REJECTING
        if is_function or is_layer or name == "ExecutionStrategy":
            found.append(f"{module}.{name}")
    return found


@pytest.mark.slow
def test_programs_use_no_functions_that_reject_legacy_variables():
    uses = {
        str(path.relative_to(ROOT)): rejecting_calls(path.read_text()) for path in ROOT.glob("paddle_resnet/**/*.py")
    }
    del uses["paddle_resnet/graph/pir.py"]  # it does not build legacy programs
    # compat.py replaces paddle.any.
    assert {path: names for path, names in uses.items() if names} == {
        "paddle_resnet/machine/compat.py": ["paddle.any", "paddle.any"]
    }


def test_search_finds_functions_and_layers():
    source = "paddle.sum(x); nn.functional.gelu(x); nn.GELU(); np.sum(x); static.ExecutionStrategy(); paddle.mean(x)"
    expected = ["nn.functional.gelu", "nn.GELU", "paddle.sum", "static.ExecutionStrategy"]
    assert sorted(rejecting_calls(source), key=str.lower) == sorted(expected, key=str.lower)
    assert rejecting_calls("from paddle import sqrt, mean") == ["sqrt"]


@pytest.fixture
def restored_any():
    """Undo accept_legacy_any after the test."""
    original = paddle.any
    yield
    paddle.any = original


@pytest.mark.parametrize("values", [[0, 0, 0], [0, 1, 0]])
@pytest.mark.usefixtures("restored_any")
def test_any_accepts_legacy_variables(values):
    compat.accept_legacy_any()
    compat.accept_legacy_any()
    main, exe = static.Program(), static.Executor(paddle.CPUPlace())
    with static.program_guard(main):
        output = paddle.any(variable("bool"))
    [result] = exe.run(main, feed={"x": np.array(values, bool)}, fetch_list=[output])
    assert result == any(values)
    assert next(op.type for op in main.global_block().ops) == "reduce_any"


@pytest.mark.usefixtures("restored_any")
def test_any_of_eager_tensors_is_unchanged():
    compat.accept_legacy_any()
    paddle.disable_static()
    try:
        assert paddle.any(paddle.to_tensor([[True, False], [False, False]]), axis=1).tolist() == [True, False]
    finally:
        paddle.enable_static()


def test_sqrt_accepts_legacy_variables():
    main, exe = static.Program(), static.Executor(paddle.CPUPlace())
    with static.program_guard(main):
        root = compat.sqrt(variable("float32"))
    [result] = exe.run(main, feed={"x": np.float32([4, 9, 2])}, fetch_list=[root])
    assert np.array_equal(result, np.sqrt(np.float32([4, 9, 2])))


def test_assigned_returns_array_of_operator():
    """The attribute that stores the array depends on the Paddle version."""
    array, main = np.float32([[1.5, 0.1], [3e-9, -7]]), static.Program()
    with static.program_guard(main):
        paddle.assign(array)
    [op] = main.global_block().ops
    np.testing.assert_array_equal(compat.assigned(op), array, strict=True)
    assert op.has_attr("values") == (not op.has_attr("fp32_values")) == compat.IS_PADDLE_3


@pytest.mark.parametrize("is_paddle_3", [False, True])
def test_legacy_programs_are_required_and_enabled_in_paddle_3(monkeypatch, is_paddle_3):
    flags, calls = {"FLAGS_enable_pir_api": True}, []
    monkeypatch.setattr(compat, "IS_PADDLE_3", is_paddle_3)
    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: flags.get(name, False)})
    monkeypatch.setattr(paddle, "set_flags", flags.update)
    utilities = SimpleNamespace(_switch_to_old_ir_=lambda: calls.append("switched"))
    monkeypatch.setattr(paddle, "pir_utils", utilities, raising=False)
    monkeypatch.setitem(sys.modules, "paddle.pir_utils", utilities)
    message = "^FLAGS_enable_pir_api: Paddle 3.3.1 builds PIR programs, .*; unset FLAGS_enable_pir_api, and import"
    with pytest.raises(UsageError, match=message) if is_paddle_3 else nullcontext():
        compat.check_version("3.3.1")
    for _ in range(2):
        compat.leave_pir()
    assert (flags["FLAGS_enable_pir_api"], calls) == ((False, ["switched"]) if is_paddle_3 else (True, []))
    flags["FLAGS_enable_pir_api"] = False
    compat.check_version("3.3.1")


@pytest.mark.parametrize("name", compat._HARMFUL_FLAGS)
def test_flag_with_which_programs_fail_is_rejected(name):
    paddle.set_flags({name: True})
    try:
        with pytest.raises(UsageError, match=f"^{name}: not supported, because .*; unset {name} "):
            compat.check_version()
    finally:
        paddle.set_flags({name: False})
    compat.check_version()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FLAGS_check_nan_inf", pytest.param("FLAGS_use_mkldnn", marks=pytest.mark.soak)])
def test_environment_with_harmful_flag_exits_with_code_2_before_first_step(name, train_process, environment, tmp_path):
    flags = [*TINY, "--model-arch-name", "ResNet18_CIFAR", "--data-format", "synthetic", "--output-dir", tmp_path]
    flags += ["--dry-run", "--report-file", tmp_path / "report.json"]
    environment(**{name: 1})
    done = train_process(*flags)
    assert done.returncode == 2
    assert_one_error(done.stderr, [f"train.py: error: {name}: not supported, "])
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("is_paddle_3", [False, True])
def test_operators_of_each_version(monkeypatch, is_paddle_3):
    appended, block = [], SimpleNamespace(append_op=lambda **options: appended.append(options))
    monkeypatch.setattr(compat, "IS_PADDLE_3", is_paddle_3)
    compat.append_all_reduce(block, "v")
    attrs = {"reduce_type": 0} if is_paddle_3 else {"use_calc_stream": True}
    x, out = ("x", "out") if is_paddle_3 else ("X", "Out")
    expected = {"type": compat.ALL_REDUCE, "inputs": {x: "v"}, "outputs": {out: "v"}, "attrs": attrs | {"ring_id": 0}}
    assert appended == [expected]
    values = [SimpleNamespace(value=lambda i=i: i) for i in range(6)]
    attributes = {"shape": [2, 3], "values": values} if is_paddle_3 else {"shape": [2, 3], "fp32_values": range(6)}
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(compat.assigned(SimpleNamespace(attr=attributes.get)), array, strict=True)


def test_gloo_of_paddle_3_uses_the_store_of_the_launcher(monkeypatch):
    calls, core = [], paddle.base.core
    manager = SimpleNamespace(create_gloo_comm_context=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(compat, "IS_PADDLE_3", True)
    monkeypatch.setattr(core, "create_or_get_global_tcp_store", lambda: "store")
    monkeypatch.setattr(core, "CommContextManager", manager, raising=False)
    monkeypatch.setattr(paddle.distributed, "ParallelEnv", lambda: SimpleNamespace(rank=1, world_size=4))
    compat.start_gloo(lambda: pytest.fail("no helper processes are started"))
    assert calls == [("store", "0", 1, 4)]


@pytest.mark.parametrize("is_paddle_3", [False, True])
def test_any_is_patched_in_paddle_3(monkeypatch, is_paddle_3):
    """Only calls with a legacy variable as the single argument are replaced."""
    calls, original = [], compat._paddle_any
    monkeypatch.setattr(paddle, "any", original)
    monkeypatch.setattr(compat, "IS_PADDLE_3", is_paddle_3)
    compat.accept_legacy_any()
    assert (paddle.any is original) == (not is_paddle_3)
    monkeypatch.setattr(compat, "_paddle_any", lambda *arguments, **options: calls.append((arguments, options)))
    with static.program_guard(static.Program()):
        x = variable("bool")
        compat._any(x)
        op = x.block.ops[-1]
        assert (op.type, op.attr("reduce_all"), op.attr("keep_dim")) == ("reduce_any", True, False)
        assert calls == []
        compat._any(x, 1)
        compat._any(x, axis=1)
        compat._any([True])
        assert calls == [((x, 1), {}), ((x,), {"axis": 1}), (([True],), {})]


GOLDENS = sorted((ROOT / "tests/goldens").glob("paddle_*"))


@pytest.mark.slow
def test_files_of_each_version_are_readable():
    """The tolerance is large, because the files may have been written on a machine with a different processor. .ci/run
    compares both versions on the same machine with a tolerance of 1e-5."""
    other_paddle.check(GOLDENS, rtol=2e-4)


def test_golden_files_of_both_versions_agree():
    names = [f"paddle_{'.'.join(map(str, version))}" for version in (compat.LOWEST, compat.HIGHEST)]
    assert names == [folder.name for folder in GOLDENS]
    lowest, highest = (json.loads((folder / "expected.json").read_text()) for folder in GOLDENS)
    for key in ("losses", "probabilities"):
        np.testing.assert_allclose(lowest[key], highest[key], rtol=1e-5)
