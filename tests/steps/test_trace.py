import json
import shutil
from collections import Counter

import pytest
from paddle.profiler import Profiler

from conftest import assert_one_error, phase

BENCHMARK = ["--benchmark", "--benchmark-steps", "4", "--benchmark-warmup-steps", "2", "--data-format", "synthetic"]


def events(path):
    """Return how often each operator or step occurs in a trace; Paddle appends the duration to the name."""
    trace = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in trace if event.get("ph") == "X"]
    assert len({event["tid"] for event in complete if event["tid"].endswith("(C++)")}) == 1  # see distributed.start
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in complete)
    return Counter(event["name"].partition("[")[0] for event in complete)


def steps(found):
    return sorted(name for name, count in found.items() if name.startswith("ProfileStep") and count == 1)


def test_trace_of_a_benchmark_names_steps_and_operators(run_train, tmp_path):
    code, report = run_train("--run-scope", "train_only", *BENCHMARK, "--profile-steps", "1:4")
    assert code == 0
    assert phase(report, [], "train.")["steps"] == 4
    found = events(tmp_path / "output/profile/steps_1_4_rank0.json")
    assert steps(found) == ["ProfileStep#1", "ProfileStep#2", "ProfileStep#3"]
    # The tiny network's 9 convolutions and BN layers and 29 trainable parameters.
    assert found["conv2d"] == found["conv2d_grad"] == 3 * 9
    assert found["momentum"] == 3 * 29
    assert found["batch_norm"] == 3 * 9


def test_trace_up_to_the_last_step_of_an_evaluation(run_train, tmp_path):
    code, _ = run_train("--run-scope", "eval_only", *BENCHMARK, "--profile-steps", "5:6")
    assert code == 0
    found = events(tmp_path / "output/profile/steps_5_6_rank0.json")
    assert found["conv2d"] == 9
    assert found["momentum"] == 0


@pytest.mark.parametrize("flags", [[], ["--sizes", "24:0,32:1"]], ids=["one size", "stages"])
def test_only_the_first_epoch_is_traced(run_train, tmp_path, monkeypatch, flags):
    started, start = [], Profiler.start
    monkeypatch.setattr(Profiler, "start", lambda self: started.append(self) or start(self))
    assert run_train("--epochs", "2", "--profile-steps", "1:3", *flags)[0] == 0
    assert len(started) == 1
    assert [path.name for path in (tmp_path / "output/profile").iterdir()] == ["steps_1_3_rank0.json"]
    found = events(tmp_path / "output/profile/steps_1_3_rank0.json")
    assert found["momentum"] == 2 * 29
    assert found["conv2d"] == 2 * 9


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([*BENCHMARK, "--profile-steps", "2:7"], "2:7"),
        (["--profile-steps", "3:5"], "3:5"),
        (["--profile-steps", "3:5", "--dry-run"], "3:5"),
    ],
)
def test_steps_outside_the_run_are_an_error_before_the_first_step(run_train, tmp_path, capsys, flags, says):
    code, report = run_train(*flags)
    assert code == 2
    end = 6 if "--benchmark" in flags else 3
    assert_one_error(capsys.readouterr().err, [f"--profile-steps {says}", f"0:{end}"])
    assert report == []
    assert not (tmp_path / "output/profile").exists()


def test_repeated_command_resumes_with_an_evaluation(run_train, stop_before, tmp_path):
    """Steps of the evaluation are not traced, but those of the next epoch are."""
    flags = ["--resume", "--profile-steps", "1:3", "--epochs", "2"]
    stop_before(eval_step=0)
    assert run_train(*flags)[0] == 75
    shutil.rmtree(tmp_path / "output/profile")
    stop_before()
    assert run_train(*flags)[0] == 0
    assert events(tmp_path / "output/profile/steps_1_3_rank0.json")["momentum"] == 2 * 29


def test_repeated_command_resumes_after_the_traced_steps(run_train, stop_before, tmp_path, monkeypatch, capsys):
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
    assert "--profile-steps 0:3: no trace, because --resume continues at step 2" in capsys.readouterr().err
    assert not (tmp_path / "output/profile").exists()
