"""Tests of benchmarks/sweep.py on the CPU."""

import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

spec = importlib.util.spec_from_file_location("sweep", ROOT / "benchmarks/sweep.py")
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)

FLAGS = (
    "--device cpu --data-format synthetic --model-arch-name ResNet18 --num-of-class 3 --image-shape 3,32,32 "
    "--crop-size 32 --batch-size 2 --benchmark-steps 2 --benchmark-warmup-steps 1"
)


def test_row_sets_flags_and_environment():
    row = sweep.parse_row("two: GPUS=0,1 NCCL_ALGO=Ring --lr 0.1 --row-like a=b")
    assert row == ("two", {"GPUS": "0,1", "NCCL_ALGO": "Ring"}, ["--lr", "0.1", "--row-like", "a=b"])
    arguments, environment = sweep.command(row, ["--seed", "3"], "python", "/tmp")
    assert arguments[:5] == ["python", "-m", "paddle.distributed.launch", "--gpus", "0,1"]
    # Flags of a row override the common flags.
    assert arguments.index("train.py") < arguments.index("--seed") < arguments.index("--lr")
    assert environment["NCCL_ALGO"] == "Ring" and environment["PATH"] == os.environ["PATH"]
    arguments, environment = sweep.command(sweep.parse_row("second: GPUS=1"), [], "python", "/tmp")
    assert arguments[:2] == ["python", "train.py"] and environment["CUDA_VISIBLE_DEVICES"] == "1"
    arguments, environment = sweep.command(sweep.parse_row(" x : A=b=c --x=1 y=2"), [], "python", "/tmp")
    assert arguments[:2] == ["python", "train.py"] and environment == os.environ | {"A": "b=c"}
    assert sweep.parse_row(" x : A=b=c --x=1 y=2") == ("x", {"A": "b=c"}, ["--x=1", "y=2"])


@pytest.fixture
def process(monkeypatch):
    """Replace the processes of measurements. The class attributes determine what a process writes."""

    class Process:
        pid, code, log, output, error = 7, 0, None, ("", ""), None

        def __init__(self, arguments, **options):
            self.returncode, self.arguments = self.code, arguments

        def communicate(self, timeout):
            if self.error:
                raise self.error
            report = Path(self.arguments[self.arguments.index("--report-file") + 1])
            report.write_text('DLLL {"data": {}}\nDLLL {"data": {"train.ips": 5, "loss": 2}}\n')
            if self.log:
                log = Path(self.arguments[self.arguments.index("--log_dir") + 1])
                log.mkdir()
                (log / "workerlog.0").write_text(self.log)
            return self.output

        wait = int

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    return Process


def test_measurement_returns_metrics_or_the_last_line_of_rank_0(process):
    def measure(text="x: GPUS=0,1"):
        return sweep.measure(sweep.parse_row(text), [], "python", 60)

    assert measure() == {"ips": 5, "loss": 2}
    process.code = 1
    for process.output, error in ((("a\nb\n", "c\nd\n"), "d"), (("a\nb\n", ""), "b"), (("", ""), "no message")):
        assert measure()["error"] == error
    process.log = "e\nf\n"
    assert measure()["error"] == "f"


def test_interrupted_measurement_kills_its_process_group(process, monkeypatch):
    killed = []
    monkeypatch.setattr(sweep.os, "killpg", lambda *arguments: killed.append(arguments))
    process.error = subprocess.TimeoutExpired("python", 1)
    assert sweep.measure(("x", {}, []), [], "python", 60)["error"] == "not finished after 60 s"
    process.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        sweep.measure(("x", {}, []), [], "python", 60)
    assert killed == [(7, signal.SIGKILL)] * 2


def result(ips, loss=2.0):
    times = {"latency_p50_ms": 10 * ips, "latency_p99_ms": 20 * ips, "data_time": ips / 1e3, "first_step_s": ips / 10}
    return {"ips": ips, "loss": loss, **times}


def test_table_contains_medians_of_each_row():
    results = [("a", result(1)), ("b", {"error": "x"}), ("a", result(9, 2.5)), ("b", result(3)), ("a", result(2))]
    assert sweep.table(["a", "b", "c"], results).splitlines()[2:] == [
        "| a | 3 | 2 | 1 to 9 | 20.00 | 40.00 | 2.00 | 2, 2.5 | 0.2 |",
        "| b | 1 (1 failed) | 3 | 3 to 3 | 30.00 | 60.00 | 3.00 | 2 | 0.3 |",
        "| c | 0 |  |  |  |  |  |  |  |",
    ]


def test_rows_alternate_and_results_are_appended(monkeypatch, tmp_path):
    output, outcomes = tmp_path / "runs.jsonl", iter([result(1), {"error": "x"}, result(1), result(2)] * 2)
    monkeypatch.setattr(sweep, "measure", lambda row, common, python, limit_s: next(outcomes))
    command = ["--repeats", "2", "--row", "a:", "--row", "b:", "--output", str(output)]
    assert [sweep.main(command) for _ in range(2)] == [1, 1]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    order = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [(line["row"], line["repetition"]) for line in lines] == order * 2
    assert (lines[1]["error"], lines[3]["ips"]) == ("x", 2)


def test_row_without_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--row", "--cuda-graph false"])
    assert "has no colon" in capsys.readouterr().err


def test_duplicate_row_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--row", "a: --seed 1", "--row", "a: --seed 2"])
    assert "names are not unique" in capsys.readouterr().err


def test_measurement_is_stopped_after_limit_s(capsys):
    assert sweep.main(["--repeats", "1", "--flags", FLAGS, "--row", "a:", "--limit-s", "0.1"]) == 1
    assert "not finished after 0.1 s" in capsys.readouterr().out


@pytest.mark.soak
def test_rows_alternate_and_failures_are_counted(tmp_path, capsys):
    rows = ["--row", "plain:", "--row", "refused: --batch-size none"]
    output = tmp_path / "runs.jsonl"
    assert sweep.main(["--repeats", "2", "--flags", FLAGS, *rows, "--output", str(output)]) == 1
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["row"] for result in results] == ["plain", "refused"] * 2
    assert "--batch-size" in results[1]["error"]
    lines = capsys.readouterr().out.splitlines()
    plain, refused = (line.split(" | ") for line in lines[-2:])
    assert refused[:2] == ["| refused", "0 (2 failed)"] and not any(refused[2:-1])
    assert plain[1] == "2"
    low, high = sorted(results[i]["ips"] for i in (0, 2))
    assert plain[2:4] == [f"{(low + high) / 2:,.0f}", f"{low:,.0f} to {high:,.0f}"]
    assert plain[7] == f"{results[0]['loss']:.7g}"  # both rows report the same loss


@pytest.mark.soak
def test_evaluation_can_be_measured(capsys):
    assert sweep.main(["--repeats", "1", "--flags", FLAGS, "--row", "evaluation: --run-scope eval_only"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(" | ")[:2] == ["| evaluation", "1"]
