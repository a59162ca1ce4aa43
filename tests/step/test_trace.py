"""Traces that --profile-steps writes."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
from paddle.profiler import Profiler

from conftest import assert_one_error, phase
from paddle_resnet.step import trace
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")

PADDLE = ["--kernels", "paddle"]
BENCHMARK = [
    *PADDLE,
    "--benchmark",
    "--benchmark-steps",
    "4",
    "--benchmark-warmup-steps",
    "2",
    "--data-format",
    "synthetic",
]


def events(path):
    """Count the occurrences of each operator and step in a trace. The counted names do not include the durations that
    Paddle appends."""
    entries = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in entries if event.get("ph") == "X"]
    # All operators run in one thread, because fleet.start sets FLAGS_new_executor_serial_run.
    assert len({event["tid"] for event in complete if event["tid"].endswith("(C++)")}) == 1
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in complete)
    return Counter(event["name"].partition("[")[0] for event in complete)


def traced_steps(counts):
    return sorted(name for name, count in counts.items() if name.startswith("ProfileStep") and count == 1)


def test_trace_of_benchmark_contains_steps_and_operators(run_train, tmp_path):
    code, report = run_train("--run-scope", "train_only", *BENCHMARK, "--profile-steps", "1:4")
    assert code == 0
    assert phase(report, [], "train.")["steps"] == 4
    counts = events(tmp_path / "output/profile/steps_1_4_rank0.json")
    assert traced_steps(counts) == ["ProfileStep#1", "ProfileStep#2", "ProfileStep#3"]
    # The network has 3 convolutions, 3 BN layers and 11 trainable parameters.
    assert counts["conv2d"] == counts["conv2d_grad"] == 3 * 3
    assert counts["momentum"] == 3 * 11
    assert counts["batch_norm"] == 3 * 3


def test_trace_includes_last_step_of_evaluation(run_train, tmp_path):
    code, _ = run_train("--run-scope", "eval_only", *BENCHMARK, "--profile-steps", "5:6")
    assert code == 0
    counts = events(tmp_path / "output/profile/steps_5_6_rank0.json")
    assert counts["conv2d"] == 3
    assert counts["momentum"] == 0


def test_time_of_starting_and_writing_is_excluded(tmp_path):
    calls = []

    def recorder(*names):
        return SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) for name in names})

    traced, clock = trace.Trace((1, 3), tmp_path / "a/b/trace.json", "cpu"), recorder("close_step", "resume")
    traced._profiler = recorder("start", "step", "stop", "export")
    for step in range(4):
        traced.before(step, lambda: calls.append("drain"), clock)
    start = ["drain", "close_step", "start", "resume"]
    assert calls == [*start, "step", "drain", "close_step", "stop", "export", "resume"]
    assert (tmp_path / "a/b").is_dir()


def test_each_rank_has_its_own_file(shard, tmp_path):
    shard(3, 4)
    assert trace.path([1, 2], tmp_path) == tmp_path / "profile/steps_1_2_rank3.json"
    assert trace.path(None, tmp_path) is None
    trace.check(None, 0)  # without --profile-steps, every length is valid


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_trace_on_a_gpu_contains_its_kernels(monkeypatch, device):
    monkeypatch.setattr(trace, "Profiler", lambda targets, **_: SimpleNamespace(targets=targets))
    targets = trace.Trace((1, 3), None, device)._profiler.targets
    assert targets == [trace.ProfilerTarget.CPU, *([trace.ProfilerTarget.GPU] if device == "gpu" else [])]


@pytest.mark.parametrize(
    "flags", [pytest.param([], marks=pytest.mark.slow), ["--sizes", "24:0,32:1"]], ids=["one size", "stages"]
)
def test_only_first_epoch_is_traced(run_train, tmp_path, monkeypatch, flags):
    started, start = [], Profiler.start
    monkeypatch.setattr(Profiler, "start", lambda self: started.append(self) or start(self))
    assert run_train(*PADDLE, "--epochs", "2", "--profile-steps", "1:3", *flags)[0] == 0
    assert len(started) == 1
    assert [path.name for path in (tmp_path / "output/profile").iterdir()] == ["steps_1_3_rank0.json"]
    counts = events(tmp_path / "output/profile/steps_1_3_rank0.json")
    assert counts["momentum"] == 2 * 11
    assert counts["conv2d"] == 2 * 3


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([*BENCHMARK, "--profile-steps", "2:7"], "2:7"),
        (["--profile-steps", "3:5"], "3:5"),
        (["--profile-steps", "3:5", "--dry-run"], "3:5"),
        # The run evaluates after step 2.
        (["--profile-steps", "1:3", "--iter-unit", "batch", "--num-iter", "3", "--eval-interval", "2"], "1:3"),
    ],
)
def test_steps_outside_run_are_rejected_before_first_step(run_train, tmp_path, capsys, flags, steps):
    code, report = run_train(*flags)
    assert code == 2
    end = 6 if "--benchmark" in flags else 2 if "--iter-unit" in flags else 3
    assert_one_error(capsys.readouterr().err, [f"--profile-steps {steps}", f"0:{end}"])
    assert report == []
    assert not (tmp_path / "output/profile").exists()


@pytest.mark.parametrize(
    ("first", "last", "is_resume", "is_traced"),
    [
        *((2, 5, False, True), (2, 5, True, True), (3, 5, True, False), (3, 5, False, None), (2, 4, False, None)),
        (0, 4, True, False),  # with --iter-unit batch, the first pass of a resumed run may be shorter
    ],
)
def test_traced_steps_must_be_within_first_pass(first, last, is_resume, is_traced):
    traced = trace.Trace((2, 5), None, "cpu")
    program = SimpleNamespace(trace=traced)
    if is_traced is None:
        with pytest.raises(
            UsageError, match=f"--profile-steps 2:5: outside the steps {first}:{last}, after which this run evaluates"
        ):
            trace.start(program, first, last, is_resume)
    else:
        assert trace.start(program, first, last, is_resume) is (traced if is_traced else None)
    assert program.trace is None


@pytest.mark.slow
def test_run_that_continues_inside_epoch_traces_steps_of_its_first_pass(run_train, stop_before, tmp_path, capsys):
    """Regression test: only the steps of the first pass of a new run, 0:2, were accepted, and none of them is in the
    first pass of this run."""
    flags = ["--iter-unit", "batch", "--num-iter", "3", "--eval-interval", "2"]
    stop_before(train_step=2)
    assert run_train(*flags)[0] == 75
    stop_before()
    flags += ["--from-checkpoint", tmp_path / "output/Tiny/latest", "--output-dir", tmp_path / "second"]
    flags += ["--last-epoch-of-checkpoint", "auto"]
    capsys.readouterr()
    assert run_train(*flags, "--profile-steps", "1:2")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--profile-steps 1:2: outside the steps 2:3, after which"])
    assert run_train(*flags, "--profile-steps", "2:3", "--overwrite")[0] == 0
    assert (tmp_path / "second/profile/steps_2_3_rank0.json").exists()


@pytest.mark.slow
def test_command_resumed_in_evaluation_traces_next_epoch(run_train, stop_before, tmp_path):
    """The trace contains steps of the next training epoch, but none of the evaluation."""
    flags = [*PADDLE, "--resume", "--profile-steps", "1:3", "--epochs", "2"]
    stop_before(eval_step=0)
    assert run_train(*flags)[0] == 75
    shutil.rmtree(tmp_path / "output/profile")
    stop_before()
    assert run_train(*flags)[0] == 0
    assert events(tmp_path / "output/profile/steps_1_3_rank0.json")["momentum"] == 2 * 11


def test_command_resumed_inside_traced_steps_logs_warning(run_train, stop_before, tmp_path, monkeypatch, capsys):
    calls = []
    for name in ("start", "stop"):
        call = getattr(Profiler, name)
        monkeypatch.setattr(Profiler, name, lambda self, name=name, call=call: calls.append(name) or call(self))
    flags = ["--resume", "--profile-steps", "0:3"]
    stop_before(train_step=2)
    assert run_train(*flags)[0] == 75
    assert calls == ["start", "stop"]
    stop_before()
    assert run_train(*flags)[0] == 0
    assert "--profile-steps 0:3: not traced, because --resume continues with steps 2 to 2" in capsys.readouterr().err
    assert not (tmp_path / "output/profile").exists()
