"""Recording steps, with the CPU playing the GPU: a recorded step runs when its graph is launched, and only then."""

import gc
import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import static

from conftest import NHWC, assert_one_sentence, losses, phase
from paddle_resnet import models
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.passes import folding
from paddle_resnet.steps import cuda_graph

NATIVE = ["--device", "cpu", *NHWC, "--kernels", "native", "--epochs", "3", "--print-interval", "1"]


class FakeGraph:
    """What the Executor is asked to run while a graph records is kept for replay()."""

    recording, made = None, []

    def __init__(self, place):
        self.launches, self.step = 0, None
        FakeGraph.made.append(self)

    def capture_begin(self):
        FakeGraph.recording = self

    def capture_end(self):
        FakeGraph.recording = None
        self.addresses = self.tensors()

    def tensors(self):
        """Where the tensors are that a graph would find again by their addresses."""
        scope, names = static.global_scope(), [v.name for v in self.step[0]._program.list_vars() if v.persistable]
        return {name: scope.find_var(name).get_tensor()._ptr() for name in names if scope.find_var(name) is not None}

    def replay(self):
        program = self.step[0]._program
        if hasattr(program, "lr_scheduler"):  # a graph leaves the rate as it finds it
            rate = static.global_scope().find_var(program.lr_scheduler._var_name).get_tensor()
            np.testing.assert_allclose(np.asarray(rate), program.lr_scheduler(), rtol=1e-6)
        assert self.tensors() == self.addresses
        self.launches += 1
        run(self.executor, *self.step, fetch_list=[])

    def reset(self):
        self.step = None


run = static.Executor.run


@pytest.fixture
def fake(monkeypatch):
    if native.missing() is not None:
        pytest.skip(native.missing())

    def record_or_run(self, *args, **kwargs):
        if FakeGraph.recording is None:
            return run(self, *args, **kwargs)
        assert kwargs == {"fetch_list": []}  # CUDA records neither feeds nor fetches
        FakeGraph.recording.executor, FakeGraph.recording.step = self, args
        return []

    def resolve(args):
        wanted = args.cuda_graph
        settle(args)
        assert not args.cuda_graph  # on a CPU
        args.cuda_graph = wanted

    settle = native.resolve
    monkeypatch.setattr(native, "resolve", resolve)
    monkeypatch.setattr(cuda_graph, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda_graph, "CAPTURE_FLAGS", {})
    monkeypatch.setattr(static.Executor, "run", record_or_run)
    monkeypatch.setattr(paddle.device.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(paddle.device.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_graph, "_take_free_memory", lambda place: [])
    monkeypatch.setattr(FakeGraph, "made", [])
    yield FakeGraph
    FakeGraph.recording = None


def results(run_train, folder, *flags):
    code, report = run_train(*NATIVE, *flags, "--output-dir", folder)
    assert code == 0
    parameters = pickle.loads((folder / "Tiny/2/tiny.pdparams").read_bytes())
    return losses(report), [phase(report, [epoch], "val.")["loss"] for epoch in range(3)], parameters


def test_recorded_run_gives_the_same_numbers(run_train, tmp_path, fake):
    """In training, under changing learning rates, and in evaluations in between, whose last batch is a short one."""
    expected = results(run_train, tmp_path / "plain", "--cuda-graph", "false")
    assert not fake.made
    found = results(run_train, tmp_path / "recorded")
    assert found[0] == expected[0] and found[1] == expected[1]
    for name, value in expected[2].items():
        np.testing.assert_array_equal(found[2][name], value, err_msg=name)
    training, evaluation = fake.made  # one graph does for all epochs
    assert training.launches == 3 * 3 - cuda_graph.STEPS_BEFORE
    assert evaluation.launches == 3 * 2 - cuda_graph.STEPS_BEFORE


def test_loader_writes_to_the_inputs_of_the_recorded_step(run_train, tmp_path, fake, monkeypatch):
    straight, call = [], cuda_graph.Recorder.__call__

    def noted(self, run_with_feed, feed):
        straight.append({name for name, value in feed.items() if value is self.inputs[name]})
        call(self, run_with_feed, feed)

    monkeypatch.setattr(cuda_graph.Recorder, "__call__", noted)
    results(run_train, tmp_path)
    evaluation = [{"data", "label"}] * 2 + [set()]  # the last batch of an evaluation is a short one
    assert straight == ([{"data", "label"}] * 3 + evaluation) * 3


def test_loader_on_the_other_device_keeps_its_own_tensors(monkeypatch):
    recorded, other = static.Program(), static.Program()
    inputs = {"data": "a tensor on the GPU"}
    monkeypatch.setitem(cuda_graph._recorders, recorded, SimpleNamespace(inputs=inputs))
    for loader, expected in (("gpu", inputs), ("cpu", {})):
        assert cuda_graph.inputs(SimpleNamespace(device="gpu", dali_device=loader), recorded) == expected
    assert cuda_graph.inputs(SimpleNamespace(device="gpu", dali_device="gpu"), other) == {}


def test_step_is_recorded_anew_where_a_tensor_has_moved(run_train, tmp_path, fake, monkeypatch):
    """A graph would go on with the memory that the tensor had."""
    expected = results(run_train, tmp_path / "plain", "--cuda-graph", "false")
    fold = folding.fold_batch_norms

    def fold_elsewhere(args, program, exe):
        refold = fold(args, program, exe)

        def move():
            refold()
            name = program.all_parameters()[0].name
            tensor = static.global_scope().find_var(name).get_tensor()
            copy = np.array(tensor)
            tensor._clear()
            kept.append(paddle.base.core.LoDTensor())
            kept[-1].set(copy, paddle.CPUPlace())  # takes the memory
            tensor.set(copy, paddle.CPUPlace())

        return move

    kept = []
    monkeypatch.setattr(folding, "fold_batch_norms", fold_elsewhere)
    found = results(run_train, tmp_path / "recorded")
    assert found[0] == expected[0] and found[1] == expected[1]
    assert len(fake.made) > 2


def test_step_is_recorded_anew_where_a_tensor_of_another_process_has_moved(run_train, tmp_path, fake, monkeypatch):
    """NCCL wants an all-reduce to be recorded by all processes of a job or by none."""

    def gather(values):
        return np.array([values, [True]]) if values in ([False], [True]) else np.array([values], np.float64)

    expected = results(run_train, tmp_path / "plain", "--cuda-graph", "false")
    monkeypatch.setattr(cuda_graph.exchange, "all_gather", gather)
    found = results(run_train, tmp_path / "recorded")
    assert found[0] == expected[0] and found[1] == expected[1]
    assert len(fake.made) == 3  # training in each epoch; an evaluation is through before it would record


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
def test_failing_record_names_the_reason_and_the_remedy(run_train, capsys, fake, monkeypatch, message, reason):
    def fail(self):
        assert not gc.isenabled()
        raise RuntimeError(message)

    monkeypatch.setattr(fake, "capture_begin", fail)
    assert run_train(*NATIVE)[0] == 1
    assert_one_sentence(capsys.readouterr().err, [f"as a CUDA graph ({reason}): give --cuda-graph false"])
    assert gc.isenabled()


def test_recording_is_ended_where_its_step_fails(run_train, capsys, fake, monkeypatch):
    """With what Paddle needs for that still set."""

    def fail(self, *args, **kwargs):
        if fake.recording is not None:
            raise MemoryError("first")
        return record_or_run(self, *args, **kwargs)

    def end(self):
        ended.append(gc.isenabled())
        fake.recording = None
        raise RuntimeError("second")

    ended, record_or_run = [], static.Executor.run
    monkeypatch.setattr(static.Executor, "run", fail)
    monkeypatch.setattr(fake, "capture_end", end)
    assert run_train(*NATIVE)[0] == 1
    assert_one_sentence(capsys.readouterr().err, ["as a CUDA graph (first): give --cuda-graph false"])
    assert ended == [False]


@pytest.mark.parametrize(
    ("change", "operator"),
    [
        (F.dropout, "dropout"),
        pytest.param(lambda x: x + paddle.rand([3]), "uniform_random", marks=pytest.mark.soak),
        pytest.param(lambda x: x + paddle.bernoulli(paddle.full([3], 0.5)), "bernoulli", marks=pytest.mark.soak),
        (F.leaky_relu, "leaky_relu"),  # no random one, but nobody has tried it
    ],
)
def test_steps_with_operators_that_may_not_repeat_are_not_captured(
    run_train, tmp_path, capsys, fake, monkeypatch, change, operator
):
    """This is decided before anything is written or deleted."""

    class Random(ResNet):
        def forward(self, x):
            x = super().forward(x)
            return change(x) if self.training else x

    monkeypatch.setitem(models.MODELS, "Tiny", partial(Random, BottleneckBlock, (1, 1, 1, 1), width=8))
    assert run_train(*NATIVE, "--epochs", "1")[0] == 0
    assert f"--cuda-graph false: operator {operator}" in capsys.readouterr().out
    assert not fake.made
    assert run_train(*NATIVE, "--cuda-graph", "true", "--overwrite")[0] == 2
    assert_one_sentence(capsys.readouterr().err, [f"--cuda-graph true: operator {operator}", "use --cuda-graph false"])
    assert (tmp_path / "output/Tiny/0/meta.json").is_file()


def test_all_free_memory_of_the_pool_is_taken(monkeypatch):
    """With a pool that takes the smallest block in which a tensor fits, as Paddle's does."""
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
    assert sum(tensor.size for tensor in taken) == total  # nothing that the pool grew by
    assert reserved[0] < 10**7 + 2 * 2**20
