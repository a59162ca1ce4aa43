"""Capture of steps, emulated on the CPU. A captured step runs only when its graph is replayed."""

import contextlib
import gc
import pickle
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import static

from conftest import NHWC, assert_one_error, losses, phase
from paddle_resnet import models
from paddle_resnet.models.resnet import BasicBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.step import averages, cuda_graph
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.utils.errors import RunError

pytestmark = pytest.mark.usefixtures("one_block")

NATIVE = ["--device", "cpu", *NHWC, "--kernels", "native", "--epochs", "3", "--print-interval", "1"]


def results(run_train, folder, *flags):
    code, report = run_train(*NATIVE, *flags, "--output-dir", folder)
    assert code == 0
    parameters = pickle.loads((folder / "Tiny/2/tiny.pdparams").read_bytes())
    return losses(report), [phase(report, [epoch], "val.")["loss"] for epoch in range(3)], parameters


@pytest.fixture
def uncaptured(once, fake, run_train):
    """Return the results of a run without captured steps. All tests share the run."""

    def make(folder):
        (folder / "results").write_bytes(pickle.dumps(results(run_train, folder, "--cuda-graph", "false")))
        assert not fake.made

    return pickle.loads((once("uncaptured", make) / "results").read_bytes())


@pytest.mark.slow
def test_captured_run_has_same_results(run_train, tmp_path, fake, uncaptured):
    """The learning rate changes during the run, and the last batch of each evaluation is smaller than the other
    batches."""
    expected = uncaptured
    result = results(run_train, tmp_path / "recorded")
    assert result[0] == expected[0] and result[1] == expected[1]
    for name, value in expected[2].items():
        np.testing.assert_array_equal(result[2][name], value, err_msg=name)
    training, evaluation = fake.made  # all epochs use one training graph
    assert training.launches == 3 * 3 - cuda_graph.STEPS_BEFORE
    assert evaluation.launches == 3 * 2 - cuda_graph.STEPS_BEFORE


def test_captured_steps_draw_same_random_numbers_and_update_ema_weights_for_evaluation(run_train, tmp_path, fake):
    """With --ema, the training steps of all epochs replay one graph, and all evaluations replay a second graph."""
    flags = ["--mixup", "0.4", "--cutmix", "1", "--dropout", "0.4", "--drop-path", "0.5", "--ema", "0.8"]
    expected = results(run_train, tmp_path / "plain", *flags, "--cuda-graph", "false")
    result = results(run_train, tmp_path / "recorded", *flags)
    assert result[:2] == expected[:2]
    states = [pickle.loads((tmp_path / name / "Tiny/2/tiny.pdema").read_bytes()) for name in ("plain", "recorded")]
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value, err_msg=name)
    training, evaluation = fake.made
    # The comparison of results, because of an operator that is untested in graphs, requires one additional replay.
    assert training.launches == 1 + 3 * 3 - cuda_graph.STEPS_BEFORE
    assert evaluation.launches == 3 * 2 - cuda_graph.STEPS_BEFORE


@pytest.mark.slow
def test_each_stage_has_its_own_captured_step(run_train, tmp_path, fake):
    flags = ["--sizes", "24:0,32:2", "--mixup", "0.4", "--ema", "0.9"]
    expected = results(run_train, tmp_path / "plain", *flags, "--cuda-graph", "false")
    assert results(run_train, tmp_path / "captured", *flags)[:2] == expected[:2]
    first, _, second = fake.made
    assert first.launches == 2 * 3 - cuda_graph.STEPS_BEFORE
    assert second.launches == 3 - cuda_graph.STEPS_BEFORE


def test_loader_writes_to_inputs_of_captured_step(run_train, tmp_path, fake, monkeypatch):
    shared, call = [], cuda_graph.CapturedStep.__call__

    def call_and_record(self, run_with_feed, feed):
        shared.append({name for name, value in feed.items() if value is self.inputs[name]})
        call(self, run_with_feed, feed)

    monkeypatch.setattr(cuda_graph.CapturedStep, "__call__", call_and_record)
    results(run_train, tmp_path)
    # The last batch of an evaluation is smaller, so the last step is not captured.
    evaluation = [{"data", "label"}] * 2 + [set()]
    assert shared == ([{"data", "label"}] * 3 + evaluation) * 3


def test_loader_on_different_device_keeps_its_own_tensors(monkeypatch):
    monkeypatch.setattr(native, "register", lambda: SimpleNamespace(paddle_resnet_async_copies=SimpleNamespace()))
    inputs, checks = {"data": "a tensor on the GPU"}, []
    captured = type("Captured", (), {"inputs": inputs, "check": lambda self: checks.append(self), "__call__": print})()
    program = SimpleNamespace(global_block=lambda: SimpleNamespace(ops=[SimpleNamespace(type="native_async_copy")]))
    for step, loader, expected in ((captured, "gpu", inputs), (captured, "cpu", {}), (None, "gpu", {})):
        compiled = SimpleNamespace(write_scalars=None, captured=step, _program=program)
        shares_inputs = loader == "gpu"
        dispatcher = Dispatcher(SimpleNamespace(run=print), compiled, [], True, shares_inputs=shares_inputs)
        assert dispatcher.inputs == expected
    assert checks == [captured] * 2


@pytest.mark.slow
def test_step_is_captured_again_if_tensor_moves(run_train, tmp_path, fake, monkeypatch, uncaptured):
    """After a tensor has moved, the old graph would still use the tensor's previous memory."""
    evaluate = averages.evaluate

    def evaluate_elsewhere(train_prog, program, exe):
        update = evaluate(train_prog, program, exe)

        def move():
            update()
            name = program.all_parameters()[0].name
            tensor = static.global_scope().find_var(name).get_tensor()
            copy = paddle.base.core.LoDTensor()
            # The copy has a different address, because the original still occupies its memory.
            copy.set(np.array(tensor), paddle.CPUPlace())
            tensor._share_data_with(copy)

        return move

    monkeypatch.setattr(averages, "evaluate", evaluate_elsewhere)
    result = results(run_train, tmp_path / "recorded")
    assert result[:2] == uncaptured[:2]
    assert len(fake.made) > 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "In user code:\n  line\nExternalError: CUDA error(900), busy.\n  [Hint: none]\n  [operator]",
            "ExternalError: CUDA error(900), busy",
        ),
        (
            "--- Error Message Summary: ---\nResourceExhaustedError: \n\nOut of memory error on GPU 0. Full.\n\nPlease",
            "ResourceExhaustedError: Out of memory error on GPU 0. Full",
        ),
        (
            "In user code:\n  line\n(PreconditionNotMet) The third-party dynamic library (libcusolver.so) is not "
            "configured correctly.\n  Suggestions:\n  1. Check it.\n    - Windows: set PATH (at x.cc:3)",
            "(PreconditionNotMet) The third-party dynamic library (libcusolver.so) is not configured correctly",
        ),
        ("no such form", "no such form"),
    ],
    ids=["CUDA", "memory", "library", "other"],
)
def test_reason_of_failed_capture_is_one_line(step, message, reason):
    def fail():
        raise RuntimeError(message)

    step._run = fail
    with pytest.raises(RunError) as error:
        step._capture()
    assert str(error.value) == f"--cuda-graph true: the step cannot be captured ({reason}); use --cuda-graph false"


def test_error_of_failed_capture_contains_reason_and_remedy(run_train, capsys, fake, monkeypatch):
    def fail(self):
        assert not gc.isenabled()
        raise RuntimeError("busy")

    monkeypatch.setattr(fake, "capture_begin", fail)
    assert run_train(*NATIVE)[0] == 1
    assert_one_error(
        capsys.readouterr().err, ["--cuda-graph true: the step cannot be captured (busy); use --cuda-graph false"]
    )
    assert gc.isenabled()


def test_capture_keeps_garbage_collection_disabled(fake, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)  # takes half a second
    gc.disable()
    try:
        with cuda_graph._capturing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_capture_ends_if_step_fails(run_train, capsys, fake, monkeypatch):
    """The capture ends before the previous settings, such as garbage collection, are restored."""

    def fail(self, *args, **kwargs):
        if fake.recording is not None:
            raise MemoryError("first")
        return capture_or_run(self, *args, **kwargs)

    def end(self):
        ended.append(gc.isenabled())
        fake.recording = None
        raise RuntimeError("second")

    ended, capture_or_run = [], static.Executor.run
    monkeypatch.setattr(static.Executor, "run", fail)
    monkeypatch.setattr(fake, "capture_end", end)
    assert run_train(*NATIVE)[0] == 1
    assert_one_error(
        capsys.readouterr().err, ["--cuda-graph true: the step cannot be captured (first); use --cuda-graph false"]
    )
    assert ended == [False]


def network_with(change):
    class Changed(ResNet):
        def forward(self, x):
            x = super().forward(x)
            return change(x) if self.training else x

    return partial(Changed, BasicBlock, (1,), width=8)


@pytest.mark.slow
def test_untested_operator_is_captured_if_results_agree(run_train, tmp_path, capsys, fake, register):
    register("Tiny", network_with(F.leaky_relu))
    expected = results(run_train, tmp_path / "plain", "--cuda-graph", "false")
    capsys.readouterr()
    result = results(run_train, tmp_path / "captured")
    assert "operators untested in CUDA graphs (leaky_relu, leaky_relu_grad)" in capsys.readouterr().out
    assert result[0] == expected[0] and result[1] == expected[1]
    training, _ = fake.made
    # The comparison of results requires one additional replay.
    assert training.launches == 1 + 3 * 3 - cuda_graph.STEPS_BEFORE


@pytest.mark.slow
@pytest.mark.parametrize("is_deterministic", [pytest.param(True, marks=pytest.mark.soak), False])
def test_step_with_different_results_is_not_captured(run_train, tmp_path, capsys, fake, monkeypatch, is_deterministic):
    """After the comparison, variables have the values of the uncaptured step. With deterministic kernels, the results
    must be bit-identical."""

    def replay(self):
        fake_replay(self)
        tensor = static.global_scope().find_var("conv2d_0.w_0").get_tensor()
        weight = np.array(tensor)
        tensor.set(np.nextafter(weight, np.float32(9)) if is_deterministic else weight + 1, paddle.CPUPlace())

    fake_replay = fake.replay
    monkeypatch.setattr(fake, "replay", replay)
    monkeypatch.setattr(cuda_graph, "_is_deterministic", lambda place: is_deterministic)
    monkeypatch.setitem(models.MODELS, "Tiny", network_with(F.leaky_relu))
    flags = ["--run-scope", "train_only"]
    code, expected = run_train(*NATIVE, *flags, "--cuda-graph", "false")
    assert code == 0
    capsys.readouterr()
    code, report = run_train(*NATIVE, *flags, "--overwrite")
    assert code == 0
    assert losses(report) == losses(expected)
    problem = "a captured and an uncaptured step have different results (conv2d_0.w_0)"
    output = "".join(capsys.readouterr())
    assert problem in output and "leaky_relu" in output
    [graph] = fake.made
    assert graph.launches == 1
    assert run_train(*NATIVE, *flags, "--cuda-graph", "true", "--overwrite")[0] == 1
    assert_one_error(capsys.readouterr().err, [f"--cuda-graph true: {problem}", "use --cuda-graph false"])


@pytest.mark.parametrize(
    ("operator", "attributes", "obstacle"),
    [
        *((operator, {}, "accesses host memory") for operator in ("while", "conditional_block", "print", "memcpy_d2h")),
        *((operator, {}, "draws random numbers") for operator in ("bernoulli", "rrelu")),
        ("dropout", {"seed": 0, "is_test": False}, "draws random numbers"),
        ("dropout", {"seed": 0, "is_test": True}, ""),
        ("depthwise_conv2d", {"data_format": "NHWC"}, "fails during a replay"),
        ("depthwise_conv2d", {"data_format": "NCHW"}, ""),
        ("conv2d", {"data_format": "NHWC"}, ""),
    ],
)
def test_operators_that_cannot_be_captured_are_recognized(operator, attributes, obstacle):
    op = SimpleNamespace(type=operator, has_attr=attributes.__contains__, attr=attributes.get)
    assert obstacle in (cuda_graph._obstacle(op) or "")
    assert bool(obstacle) == (cuda_graph._obstacle(op) is not None)


@pytest.mark.parametrize(
    ("change", "operator"),
    [
        (F.dropout, "dropout"),
        pytest.param(lambda x: x + paddle.rand([3]), "uniform_random", marks=pytest.mark.soak),
        pytest.param(lambda x: x + paddle.bernoulli(paddle.full([3], 0.5)), "bernoulli", marks=pytest.mark.soak),
    ],
)
def test_step_with_nonreplayable_operator_is_not_captured(
    run_train, tmp_path, capsys, fake, register, change, operator
):
    """With --cuda-graph true, the run fails before it writes or deletes files."""
    register("Tiny", network_with(change))
    assert run_train(*NATIVE, "--epochs", "1")[0] == 0
    assert f"--cuda-graph false: operator {operator} draws random numbers" in capsys.readouterr().out
    assert not fake.made
    assert run_train(*NATIVE, "--cuda-graph", "true", "--overwrite")[0] == 2
    assert_one_error(capsys.readouterr().err, [f"--cuda-graph true: operator {operator}", "use --cuda-graph false"])
    assert (tmp_path / "output/Tiny/0/meta.json").is_file()


def test_free_memory_of_pool_is_reserved(monkeypatch):
    """Like Paddle's memory pool, the simulated pool allocates the smallest free block that is large enough."""
    free, reserved = [3 * 2**20 + 768, 349_440, 1024, 256], [10**7]
    total = sum(free)

    class Tensor:
        def _set_dims(self, dims):
            [self.size] = dims

        def _mutable_data(self, place, dtype):
            block = min((block for block in free if block >= self.size), default=None)
            if block is None:
                reserved[0] += self.size
                return
            free.remove(block)
            if block > self.size:
                free.append(block - self.size)

    monkeypatch.setattr(paddle.framework.core, "LoDTensor", Tensor)
    monkeypatch.setattr(paddle.device.cuda, "memory_reserved", lambda place: reserved[0])
    taken = cuda_graph._take_free_memory(paddle.CPUPlace())
    assert not free
    assert sum(tensor.size for tensor in taken) == total  # only memory that was already free is taken
    assert reserved[0] < 10**7 + 2 * 2**20


def test_results_differ_if_they_differ_by_more_than_a_fraction_of_the_largest_change():
    """The largest finite change is 4. Elements that are not finite must be equal."""
    for last in (5, np.nan, np.inf, -np.inf):
        before = {"a": np.float32([5, 5, np.inf]), "empty": np.float32([])}
        expected = {"a": np.float32([5, 9, last]), "empty": np.float32([])}
        for change, tolerance, names in ((0.079, 0.02, []), (0.081, 0.02, ["a"]), (1e-6, 0, ["a"]), (0, 0, [])):
            actual = expected | {"a": expected["a"] + np.float32([change, 0, 0])}
            assert cuda_graph._differing(actual, expected, before, tolerance) == names
        other = expected | {"a": np.float32([5, 9, 6])}
        assert cuda_graph._differing(other, expected, before, 0.02) == ["a"]
        other, expected, before = (values | {"b": values["a"]} for values in (other, expected, before))
        assert cuda_graph._differing(other, expected, before, 0.02) == ["a", "b"]
    before, expected, actual = ({"a": np.array([1, 1 + change])} for change in (0, 1e-3, 1.1e-3))
    assert cuda_graph._differing(actual, expected, before, 0.02) == ["a"]


@pytest.mark.parametrize("flag", [True, False])
def test_gpu_kernels_are_deterministic_only_if_the_flag_is_set(monkeypatch, flag):
    class Place:
        pass

    monkeypatch.setattr(paddle, "CUDAPlace", Place)
    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: flag})
    assert cuda_graph._is_deterministic(Place()) is flag
    assert cuda_graph._is_deterministic(paddle.CPUPlace())


@pytest.mark.filterwarnings("error")
def test_flags_of_a_capture_are_reset_even_after_an_error(monkeypatch):
    name = "FLAGS_check_nan_inf"
    monkeypatch.setattr(cuda_graph, "CAPTURE_FLAGS", {name: True})
    monkeypatch.setattr(gc, "collect", lambda: None)  # takes half a second
    with pytest.raises(ZeroDivisionError), cuda_graph._capturing():
        assert paddle.get_flags(name) == {name: True} and not gc.isenabled()
        warnings.warn("learning rate", stacklevel=1)
        raise ZeroDivisionError
    assert paddle.get_flags(name) == {name: False} and gc.isenabled()
    with pytest.raises(UserWarning):
        warnings.warn("another warning", stacklevel=1)


@pytest.fixture
def step(monkeypatch):
    """Return a CapturedStep of a collective program in a job of two processes, whose methods record their calls in
    step.calls. step.others are the values that the other process sends, and step.is_deterministic is whether the
    kernels are deterministic."""
    calls = []

    class Graph:
        capture_begin, capture_end, replay, reset = (
            lambda self, name=name: calls.append(name) for name in ("begin", "end", "replay", "reset")
        )

        def __init__(self, place):
            calls.append(("graph", place))

    monkeypatch.setattr(cuda_graph, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graph, "_capturing", contextlib.nullcontext)
    monkeypatch.setattr(cuda_graph, "_workspaces", ["old"])
    monkeypatch.setattr(cuda_graph, "_take_free_memory", lambda place: ["new"])
    monkeypatch.setattr(paddle.device.cuda, "synchronize", lambda place: calls.append("synchronize"))
    monkeypatch.setattr(paddle.device.cuda, "empty_cache", lambda: calls.append("free"))
    step = cuda_graph.CapturedStep.__new__(cuda_graph.CapturedStep)
    step._place, step._graph, step._steps, step._untested, step._is_explicit = "GPU", None, 2, ["relu"], False
    step.calls, step.addresses, step._is_collective = calls, {"w": 1}, True
    step.others, step.is_deterministic = iter(()), False
    monkeypatch.setattr(cuda_graph, "_is_deterministic", lambda place: step.is_deterministic)
    monkeypatch.setattr(cuda_graph.exchange, "all_gather", lambda own: np.array([own, [next(step.others)]], float))
    step._run = lambda: calls.append("run")
    step._addresses = lambda: step.addresses
    return step


@pytest.mark.parametrize("fails", [False, True])
def test_each_capture_reserves_its_own_workspaces(step, fails):
    if fails:
        step._run = lambda: 1 / 0
    with pytest.raises(RunError) if fails else contextlib.nullcontext():
        step._capture()
    run = [] if fails else ["run"]
    assert step.calls == ["synchronize", "free", ("graph", "GPU"), "begin", *run, "end"]
    assert cuda_graph._workspaces == ["new"]
    assert (step._graph is None) == fails


@pytest.mark.parametrize(("moves", "other_moves"), [(False, False), (True, False), (False, True)])
def test_graph_is_discarded_if_a_tensor_of_any_process_has_moved(step, moves, other_moves):
    step.others = iter([other_moves])
    step._capture()
    graph = step._graph
    step.addresses = {"w": 2 if moves else 1}
    step.check()
    assert (step._graph, step._steps) == ((None, 0) if moves or other_moves else (graph, 2))
    assert ("reset" in step.calls) == (moves or other_moves)


@pytest.mark.parametrize("moves", [False, True])
def test_process_decides_alone_if_the_program_is_not_collective(step, moves):
    """step.others is empty: an exchange would wait for the other process, as rank 0 would do when it predicts."""
    step._is_collective = False
    values = iter([1, 2, 2])
    step._values = lambda: {"w": np.float32([next(values)])}
    step._set = lambda values: None
    step._compare()
    step.addresses = {"w": 2 if moves else 1}
    step.check()
    assert (step._graph is None) == moves


@pytest.mark.parametrize("is_explicit", [False, True])
@pytest.mark.parametrize(
    "case", ["equal", "rounding", "different", "deterministic", "different in another process", "not repeatable"]
)
def test_comparison_keeps_the_values_before_the_step(step, capsys, case, is_explicit):
    """Rounding errors are a difference only if the kernels are deterministic."""
    after = {"rounding": 2.01, "different": 3, "deterministic": 2.01, "not repeatable": 3}.get(case, 2)
    again = 3 if case == "not repeatable" else 2
    values = iter([1, 2, after, again])  # before, after an uncaptured, a captured and another uncaptured step
    step.is_deterministic = case == "deterministic"
    is_equal = case in ("equal", "rounding")
    step.others = iter(["another" in case, False])  # whether the other process has different results
    step._values = lambda: {"w": np.float32([next(values)])}
    step._set = lambda values: step.calls.append(("set", values["w"].item()))
    step._is_explicit = is_explicit
    is_error = is_explicit and not is_equal
    with pytest.raises(RunError, match="use --cuda-graph false") if is_error else contextlib.nullcontext() as error:
        step._compare()
    start = ["run", ("set", 1), "synchronize", "free", ("graph", "GPU"), "begin", "run", "end", "replay", ("set", 1)]
    assert step.calls == [*start, *([] if is_equal else ["reset", "run", ("set", 1)])]
    if is_equal:
        assert (step._graph is not None, step._steps, step._untested) == (True, 2, ())
        return
    assert (step._graph, step._steps) == (None, -np.inf)
    text = str(error.value) if is_error else capsys.readouterr().err
    steps = "two uncaptured steps" if case == "not repeatable" else "a captured and an uncaptured step"
    assert f"{steps} have different results ({'in another process' if 'another' in case else 'w'})" in text
    assert is_error or step._untested == ()
