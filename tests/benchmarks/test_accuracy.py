"""Tests of benchmarks/accuracy.py on the CPU."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT

spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks/accuracy.py")
accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accuracy)


def test_table_of_finished_and_failed_runs():
    lines = accuracy.table({"a": [(0.5, 1.0), (0.25, 3.0), (0.75, 2.0)], "b": [None, (0.1, 1.0)], "c": [None]})
    assert lines.splitlines()[2:] == [
        "| a | 3 | 0.5000 | 0.2500 to 0.7500 | 0.5000, 0.2500, 0.7500 | 2.0 |",
        "| b | 1 (1 failed) | 0.1000 | 0.1000 to 0.1000 | 0.1000 | 1.0 |",
        "| c | 0 (1 failed) |  |  |  |  |",
    ]


@pytest.mark.parametrize("rows", [["a:", "a:"], ["a/b:"], [":"]])
def test_names_that_are_not_unique_folders_are_an_error(rows, tmp_path, capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["--output", str(tmp_path), *(f"--row={row}" for row in rows)])
    assert "rename them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", 'DLLL {"step": [0], "data": {"val.top1": 0.5}}\n', 'DLLL {"step": [], "data": {}}\n']
)
def test_report_without_complete_summary_is_unfinished(text, tmp_path):
    summary = 'DLLL {"step": [], "elapsedtime": "90", "data": {"val.top1": 0.5}}\n'
    path = tmp_path / "report.json"
    path.write_text(text)
    assert accuracy.result(tmp_path) is None
    path.write_text(text + summary[:-9])
    assert accuracy.result(tmp_path) is None
    path.write_text(text + summary)
    assert accuracy.result(tmp_path) == (0.5, 1.5)


def test_different_flags_for_finished_row_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "train", lambda *_: (0.5, 1.0))

    def main(flags, row):
        return accuracy.main(["--output", str(tmp_path), f"--flags={flags}", "--row", row])

    assert main("--epochs 1", "a: --lr 0.1") == main("--epochs 1", "a: --lr 0.1") == 0
    for flags, row in (("--epochs 1", "a: --lr 0.2"), ("--epochs 2", "a: --lr 0.1"), ("--epochs 1", "a: X=1 --lr 0.1")):
        with pytest.raises(SystemExit):
            main(flags, row)
        assert "contains runs with different flags (flags.json)" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", ["", "5"])
def test_runs_use_their_seeds_flags_and_variables(tmp_path, monkeypatch, capsys, gpu):
    """Rows "bad" and "failed" have no result: the first has no summary, the second has an exit code other than 0."""
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(command, cwd, env, stdout, stderr):
        folder = Path(command[command.index("--output-dir") + 1])
        calls.append((str(folder.relative_to(tmp_path)), command, env))
        stdout.write(b"started\nlast line\n")
        if folder.parent.name != "bad":
            (folder / "report.json").write_text('DLLL {"step": [], "elapsedtime": "60", "data": {"val.top1": 0.5}}\n')
        return SimpleNamespace(returncode=int(folder.parent.name == "failed"))

    monkeypatch.setattr(accuracy.subprocess, "run", run)
    flags = ["--output", "runs", "--seeds", "2", "--gpus", gpu, "--flags=--epochs 1"]
    rows = ["a: X=1 --lr 0.1", "bad:", "failed:"]
    assert accuracy.main([*flags, *(f"--row={row}" for row in rows)]) == 1
    err = capsys.readouterr().err
    assert (
        "bad, seed 1: no result, exit code 0 (last line)" in err and "failed, seed 0: no result, exit code 1 (" in err
    )
    names = [f"runs/{name}/{seed}" for seed in (0, 1) for name in ("a", "bad", "failed")]
    assert [name for name, *_ in calls] == names
    _, command, environment = calls[3]
    folder = str(tmp_path / "runs/a/1")
    expected = [sys.executable, "train.py", "--epochs", "1", "--lr", "0.1", "--seed", "1", "--dali-random-seed", "43"]
    assert command == [*expected, "--output-dir", folder, "--report-file", f"{folder}/report.json", "--resume"]
    assert environment == os.environ | {"X": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    calls.clear()
    assert accuracy.main([*flags, f"--row={rows[0]}"]) == 0 and not calls  # finished runs are not repeated
    accuracy.main([*flags, f"--row={rows[1]}"])
    assert Path("runs/bad/0/log.txt").read_text() == "started\nlast line\n" * 2


def test_each_gpu_runs_several_processes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(accuracy, "train", lambda row, seed, args, gpus: seen.append(sorted(gpus.queue)) or (0.5, 1.0))
    assert accuracy.main(["--output", str(tmp_path), "--gpus", "5,6", "--runs-per-gpu", "2", "--row", "a:"]) == 0
    assert seen == [["5", "5", "6", "6"]] * 3


@pytest.mark.soak
def test_repeated_command_resumes_unfinished_runs_only(photos, tmp_path, capsys):
    flags = f"--image-root {photos} --device cpu --model-arch-name ResNet18 --crop-size 32 --batch-size 2 --lr 0.01"
    rows = ["--row", "one: --epochs 1", "--row", "wrong: --batch-size none"]
    command = ["--output", str(tmp_path / "runs"), "--seeds", "2", "--flags", flags, *rows]
    assert accuracy.main(command) == 1
    out, err = capsys.readouterr()
    one, wrong = (line.split(" | ") for line in out.splitlines()[-2:])
    assert one[1] == "2" and wrong[1] == "0 (2 failed)" and "wrong, seed 1: no result, exit code 2 (" in err
    reports = [tmp_path / f"runs/one/{seed}/report.json" for seed in (0, 1)]
    texts = [report.read_text() for report in reports]
    arguments = [json.loads(text.splitlines()[0].removeprefix("DLLL "))["data"] for text in texts]
    assert [(each["seed"], each["dali_random_seed"]) for each in arguments] == [(0, 42), (1, 43)]
    # Without a complete summary, the run of seed 1 counts as unfinished.
    reports[1].write_text("".join(texts[1].splitlines(keepends=True)[:-1]))
    assert accuracy.main(command[:-2]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(" | ")[:4] == one[:4]
    assert reports[0].read_text() == texts[0]
    assert (tmp_path / "runs/one/1/log.txt").read_text().count("resum") >= 1
