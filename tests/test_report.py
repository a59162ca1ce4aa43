import csv
import pickle
import shlex
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import static

import train
from conftest import phase, read_report
from paddle_resnet import report
from paddle_resnet.job import exchange, processes
from utils.errors import RunError


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def test_classes_and_confusions_are_written_beside_the_report(parse, tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("name", "found"), [("a.json", "a"), ("resnet.lr0.1", "resnet.lr0.1"), ("a.b.json", "a.b"), ("report", "report")]
)
def test_files_beside_a_report_have_its_name(parse, tmp_path, name, found):
    result = {"confusion": np.eye(2), "class_top1": np.ones(2)}
    report.write_classes(parse("--report-file", tmp_path / name), result, "ab")
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == [f"{found}.classes.csv", f"{found}.confusion.csv"]


def test_files_beside_a_report_that_cannot_be_written(parse, tmp_path):
    result = {"confusion": np.eye(2), "class_top1": np.ones(2)}
    report.write_classes(parse("--report-file", "/dev/null"), result, "ab")
    assert not list(Path("/dev").glob("null.*"))
    (tmp_path / "run.classes.csv").mkdir()
    with pytest.raises(RunError, match=f"^{tmp_path}/run.classes.csv, beside --report-file, cannot be written"):
        report.write_classes(parse("--report-file", tmp_path / "run.json"), result, "ab")


def test_losses_that_are_no_numbers_are_counted(run_train, checkpoint, tmp_path, capsys):
    """Of a network with a parameter that is none."""
    assert run_train("--run-scope", "eval_only", "--from-pretrained-params", checkpoint)[0] == 0
    assert "not a number" not in capsys.readouterr().err
    state = pickle.loads((checkpoint / "tiny.pdparams").read_bytes())
    state["linear_0.b_0"][0] = np.nan
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "tiny.pdparams").write_bytes(pickle.dumps(state))
    code, entries = run_train("--run-scope", "eval_only", "--from-pretrained-params", folder)
    assert code == 0
    assert phase(entries, [], "val.")["not_finite"] == 23
    assert "the loss of 23 of 23 images is not finite: the mean loss omits these images" in capsys.readouterr().err


def test_printed_command_evaluates_the_last_checkpoint_and_keeps_the_report(run_train, tmp_path, capsys):
    code, entries = run_train("--epochs", "2", "--profile-steps", "1:2")
    assert code == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluate it again: ")]
    words = shlex.split(command)
    with static.scope_guard(static.Scope()):
        assert train.main(words[words.index("train.py") + 1 :]) == 0
    assert phase(read_report(tmp_path / "report.eval.json"), [], "val.")["loss"] == phase(entries, [1], "val.")["loss"]
    assert read_report(tmp_path / "report.json") == entries


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
    monkeypatch.setattr("paddle_resnet.job.processes.rank", lambda: 1)
    result = {"confusion": np.eye(3), "class_top1": np.ones(3)}
    report.write_classes(parse("--report-file", tmp_path / "run.json"), result, "abc")
    assert list(tmp_path.glob("*.csv")) == []


def test_benchmark_ends_with_figures_versions_and_command(run_train, capsys):
    flags = ["--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "1"]
    code, entries = run_train("--run-scope", "train_only", *flags)
    assert code == 0
    last = entries[-1]
    assert last["step"] == []
    assert {"train.ips", "train.latency_p99_ms", "train.data_time", "train.compute_time"} <= last["data"].keys()
    assert 0 < last["data"]["train.first_step_s"] < float(last["elapsedtime"])
    assert last["data"]["versions"]["paddle"] == paddle.__version__
    assert last["data"]["command"].endswith("--benchmark --benchmark-steps 2 --benchmark-warmup-steps 1")
    assert not any("memory" in name for name in last["data"])  # a CPU has no such figure
    table = capsys.readouterr().out
    for words in ("latency_p99_ms", "ips", f"paddle {paddle.__version__}", "--benchmark-steps 2"):
        assert words in table


def test_peak_memory_is_that_of_the_process_that_held_most(parse, monkeypatch, tmp_path):
    args = parse("--report-file", tmp_path / "report.json")
    args.device = "gpu"
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda gpu: 3 * 2**20)
    monkeypatch.setattr(exchange, "all_gather", lambda mine: np.array([[4.0], mine]))
    assert report._peak_memory(args) == {"peak_memory_allocated_mib": 4.0}


def test_start_line_names_what_runs(parse, monkeypatch):
    args = parse()
    line = report.start_line(args, [1, 2], None, {}, 0)
    assert "no fused operators" in line
    assert "all-reduces" not in line
    monkeypatch.setattr(processes, "world_size", lambda: 4)
    line = report.start_line(args, [1, 2], None, {"fused_a": 4, "native_b": 1}, 2)
    assert "4 fused_a, 1 native_b" in line
    assert line.endswith("train 2 steps an epoch, 2 gradient all-reduces a step")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dali_num_threads": 2}, "--dali-num-threads 8"),
        ({"dali_device": "cpu"}, "--dali-device gpu"),
        ({"hw_decoder_load": 0.5}, "--hw-decoder-load 0.9"),
        ({}, "--cpu-decoder-load 0.1"),
        ({"cpu_decoder_load": 0.2}, "--dali-prefetch 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loader_that_starves_the_gpu_is_said_with_the_flag_to_try(parse, capsys, monkeypatch, flags, says):
    monkeypatch.setattr(report.os, "sched_getaffinity", lambda pid: range(8))
    args = parse()
    vars(args).update({"device": "gpu", "dali_device": "gpu", "dali_num_threads": 8} | flags)
    trained = {"data_time": 0.03, "batch_time": 0.1, "steps": 40}
    assert not report.advise_on_loader(args, 0, trained)  # a short first epoch
    assert not report.advise_on_loader(args, 1, trained | {"data_time": 0.01})
    assert capsys.readouterr().err == ""
    assert report.advise_on_loader(args, 1, trained)
    assert report.advise_on_loader(args, 0, trained | {"steps": 50})
    [line, _] = capsys.readouterr().err.splitlines()
    assert f"the GPU waited for images 30% of the time: try {says}; `python -m" in line


def test_loader_is_not_blamed_on_a_cpu(run_train, parse, capsys, monkeypatch):
    assert not report.advise_on_loader(parse(), 5, {"data_time": 0.9, "batch_time": 1.0, "steps": 100})
    monkeypatch.setattr(report, "STARVED_SHARE", -1.0)
    assert run_train("--epochs", "2")[0] == 0
    assert "waited" not in capsys.readouterr().err


def test_loader_is_blamed_once_a_run(run_train, capsys, monkeypatch):
    advise = report.advise_on_loader
    monkeypatch.setattr(report, "STARVED_SHARE", -1.0)

    def on_a_gpu(args, epoch, trained):
        return advise(type(args)(**vars(args) | {"device": "gpu"}), epoch, trained)

    monkeypatch.setattr(report, "advise_on_loader", on_a_gpu)
    assert run_train("--epochs", "4")[0] == 0
    assert capsys.readouterr().err.count("the GPU waited for images") == 1


def test_the_table_of_a_benchmark_is_text_and_goes_through_the_logger(capsys, monkeypatch):
    lines = []
    monkeypatch.setattr(report.logger, "info", lines.append)
    report._print_table("benchmark: train", {"ips": 12.5}, {"command": "python train.py --image-root [/data]"})
    assert capsys.readouterr().out == ""
    [table] = lines
    assert table.startswith("benchmark: train ")
    assert "--image-root [/data]" in table
    assert "12.5" in table
