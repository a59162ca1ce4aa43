"""The best evaluation of a run: its checkpoint, its tables, the summary, and early stopping (--patience)."""

import csv
import json

import pytest

from conftest import assert_one_error, phase, read_report

pytestmark = pytest.mark.usefixtures("one_block")


def epochs_of(path):
    with open(path, newline="") as f:
        return {row["epoch"] for row in csv.DictReader(f)}


def evaluated(report):
    return [entry["step"][0] for entry in report if len(entry["step"]) == 1 and "val.loss" in entry["data"]]


def test_patience_ends_run_and_all_outputs_describe_best_epoch(run_train, scored, tmp_path, capsys):
    scored(0.5, 0.8, 0.8, 0.7)
    flags = ["--epochs", "9", "--patience", "2", "--save-interval", "9", "--predictions", tmp_path / "best.csv"]
    code, report = run_train(*flags)
    assert code == 0
    assert evaluated(report) == [0, 1, 2, 3]
    root = tmp_path / "output/Tiny"
    assert {path.name for path in root.glob("[0-9]*")} == {"0", "1", "3"}
    assert [(root / name).resolve().name for name in ("best", "latest")] == ["1", "3"]
    summary = report[-1]["data"]
    assert (summary["best.epoch"], summary["best.val.top1"]) == (1, 0.8)
    assert (summary["last.epoch"], summary["val.top1"]) == (3, 0.7)
    for name in ("loss", "top5", "images"):
        assert summary[f"best.val.{name}"] == phase(report, [1], "val.")[name]
        assert summary[f"val.{name}"] == phase(report, [3], "val.")[name]
    for kind in ("classes", "confusion"):
        assert epochs_of(tmp_path / f"report.{kind}.csv") == {"1"}
    output = capsys.readouterr().out
    for line in (
        "--patience 2: no higher top1 since epoch 1",
        f"best checkpoint: {root}/1 (epoch 1, top1 0.8000)",
        f"last checkpoint: {root}/3 (epoch 3, top1 0.7000)",
        "evaluate the best epoch, 1, again: ",
    ):
        assert line in output
    assert f"--from-checkpoint {root}/1" in output.splitlines()[-1]

    predictions = (tmp_path / "best.csv").read_text()
    again = ["--run-scope", "eval_only", "--from-checkpoint", root / "1", "--predictions", tmp_path / "again.csv"]
    scored(0.8)
    assert run_train(*again)[0] == 0
    assert (tmp_path / "again.csv").read_text() == predictions

    # Early stopping has ended the run. Resuming has no effect unless --patience is increased.
    assert run_train(*flags, "--resume")[0] == 0
    assert "--resume: --patience 2 has already ended the run: " in capsys.readouterr().out
    assert run_train("--epochs", "9", "--from-checkpoint", root, "--last-epoch-of-checkpoint", "auto")[0] == 2
    assert_one_error(
        capsys.readouterr().err, ["--patience 2: ", "Tiny/3 was saved 2 evaluations after the best evaluation; "]
    )
    scored(0.1)
    code, report = run_train(*flags, "--resume", "--patience", "3")
    assert (code, evaluated(report)) == (0, [4])


def test_resumed_run_keeps_count_of_evaluations_since_best(run_train, scored, tmp_path, capsys):
    flags = ["--patience", "2", "--resume"]
    scored(0.5, 0.4)
    assert run_train("--epochs", "2", *flags)[0] == 0
    meta = json.loads((tmp_path / "output/Tiny/1/meta.json").read_text())
    assert (meta["best"]["epoch"], meta["evaluations_since_best"]) == (0, 1)
    scored(0.3)
    code, report = run_train("--epochs", "9", "--resume")  # the run inherits --patience
    assert (code, evaluated(report)) == (0, [2])
    assert report[-1]["data"]["best.epoch"] == 0
    # A new run that starts from this checkpoint counts its own evaluations from zero.
    scored(0.3, 0.2)
    start = ["--from-checkpoint", tmp_path / "output/Tiny/2", "--output-dir", tmp_path / "new"]
    code, report = run_train("--epochs", "2", "--patience", "2", *start)
    assert (code, evaluated(report)) == (0, [0, 1])


def test_best_evaluation_inside_epoch_is_saved(run_train, scored, tmp_path):
    scored(0.2, 0.6, 0.1)
    flags = ["--iter-unit", "batch", "--num-iter", "5", "--eval-interval", "2"]
    code, report = run_train(*flags)
    assert code == 0
    root = tmp_path / "output/Tiny"
    assert (root / "best").resolve().name == "1_1"
    summary = report[-1]["data"]
    assert (summary["best.epoch"], summary["best.step"], summary["last.step"]) == (1, 1, 2)


def test_checkpoints_inside_epochs_do_not_replace_epoch_checkpoints(run_train, scored, tmp_path):
    scored(0.2, 0.1, 0.3, 0.4)
    assert run_train("--epochs", "4", "--save-interval-steps", "1", "--keep-checkpoints", "2")[0] == 0
    assert sorted(path.name for path in (tmp_path / "output/Tiny").glob("[0-9]*")) == ["2", "3", "3_2"]
    meta = json.loads((tmp_path / "output/Tiny/3/meta.json").read_text())
    assert meta["evaluations_since_best"] == 0  # a new best evaluation resets the count


def test_patience_without_evaluation_is_an_error(run_train, capsys):
    assert run_train("--patience", "3", "--run-scope", "train_only")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--patience 3: requires evaluations; use --patience 0"])


@pytest.mark.soak
def test_patience_stops_two_processes_in_same_epoch(launch, tmp_path):
    """The learning rate is 0, so no evaluation has a higher top1 than the first."""
    entries, parameters = launch(2, "--epochs", "5", "--batch-size", "4", "--lr", "0", "--patience", "1")
    assert evaluated(entries) == [0, 1]
    assert len(parameters) == 2
    assert read_report(tmp_path / "job0/report.json")[-1]["data"]["best.epoch"] == 0
