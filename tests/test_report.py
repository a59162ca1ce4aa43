import csv

import numpy as np

from conftest import phase
from paddle_resnet import report


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def test_classes_and_confusions_are_written_beside_the_report(parse, tmp_path):
    args = parse("--report-file", tmp_path / "run.json")
    confusion = np.array([[5, 0, 2], [0, 0, 0], [3, 0, 1]])
    result = {"confusion": confusion, "class_top1": np.array([5 / 7, np.nan, 0.25])}
    report.write_classes(args, result, ["dog, small", "cat"])  # the third output has no class
    assert [list(row.values()) for row in read(tmp_path / "run.classes.csv")] == [
        ["0", "dog, small", "7", "5", "0.714286"],
        ["1", "cat", "0", "0", ""],
        ["2", "2", "4", "1", "0.250000"],
    ]
    assert [list(row.values()) for row in read(tmp_path / "run.confusion.csv")] == [
        ["0", "0", "5", "dog, small", "dog, small"],
        ["2", "0", "3", "2", "dog, small"],
        ["0", "2", "2", "dog, small", "2"],
        ["2", "2", "1", "2", "2"],
    ]


def test_evaluation_of_a_run_agrees_with_its_files(run_train, tmp_path):
    _, entries = run_train()
    result = phase(entries, [], "val.")
    assert not any("confusion" in name for entry in entries for name in entry["data"])
    classes, confusion = (read(tmp_path / f"report.{name}.csv") for name in ("classes", "confusion"))
    assert [row["class"] for row in classes] == ["class0", "class1", "class2"]
    assert sum(int(row["images"]) for row in classes) == sum(int(row["images"]) for row in confusion) == 23
    correct = sum(int(row["correct"]) for row in classes)
    assert correct == sum(int(row["images"]) for row in confusion if row["label"] == row["predicted"])
    assert correct / 23 == result["top1"]


def test_benchmark_and_other_ranks_write_nothing(run_train, tmp_path, monkeypatch, parse):
    flags = ["--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "0"]
    assert run_train("--run-scope", "eval_only", *flags)[0] == 0
    monkeypatch.setattr("paddle_resnet.distributed.rank", lambda: 1)
    result = {"confusion": np.eye(3), "class_top1": np.ones(3)}
    report.write_classes(parse("--report-file", tmp_path / "run.json"), result, "abc")
    assert list(tmp_path.glob("*.csv")) == []
