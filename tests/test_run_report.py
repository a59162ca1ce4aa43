import csv
import dataclasses
import json
import os
import pickle
import platform
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import assert_one_error, losses, phase, read_report
from paddle_resnet import program, train
from paddle_resnet import report as report_command
from paddle_resnet import run_report as report
from paddle_resnet.components import sparsity
from paddle_resnet.job import exchange, processes
from paddle_resnet.results import reading
from paddle_resnet.settings.groups import output
from paddle_resnet.utils.errors import RunError, UsageError, python
from paddle_resnet.utils.mode import Mode, RunScope

pytestmark = pytest.mark.usefixtures("one_block")


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def test_class_tables_are_written_next_to_report(parse, tmp_path, capsys):
    args = parse("--report-file", tmp_path / "run.json")
    confusion = np.array([[0, 0, 5], [0, 2, 2], [2, 0, 3], [2, 2, 1]])
    result = {"confusion": confusion, "class_top1": np.array([5 / 7, np.nan, 0.25])}
    report.write_classes(args.part(report.Options), result, ["dog, small", "cat"], 4)  # the third class has no name
    assert [list(row.values()) for row in read(tmp_path / "run.classes.csv")] == [
        ["0", "dog, small", "7", "5", "0.714286", "0.625000", "0.714286", "0.666667", "4"],
        ["1", "cat", "0", "0", "", "0.000000", "0.000000", "0.000000", "4"],
        ["2", "2", "4", "1", "0.250000", "0.333333", "0.250000", "0.285714", "4"],
    ]
    assert [list(row.values()) for row in read(tmp_path / "run.averages.csv")] == [
        ["macro", "0.479167", "0.482143", "0.476190", "4"],
        ["weighted", "0.518939", "0.545455", "0.528139", "4"],
    ]
    assert [list(row.values()) for row in read(tmp_path / "run.confusion.csv")] == [
        ["0", "0", "5", "dog, small", "dog, small", "4"],
        ["2", "0", "3", "2", "dog, small", "4"],
        ["0", "2", "2", "dog, small", "2", "4"],
        ["2", "2", "1", "2", "2", "4"],
    ]
    worse = result | {"confusion": confusion[:1], "not_finite": 2, "images": 5}
    report.write_classes(args.part(report.Options), worse, ["dog, small", "cat"], 5, is_best=False)
    assert len(read(tmp_path / "run.confusion.csv")) == 4
    assert "loss: not finite for 2 of 5 images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ({}, ["classes", "averages", "confusion"]),
        ({"report_html": "x.html"}, ["classes", "averages", "confusion", "predictions"]),
        ({"report_html": "x.html", "predictions": "p.csv"}, ["classes", "averages", "confusion"]),
        ({"benchmark": True, "predictions": "p.csv"}, []),
        ({"run_scope": RunScope.TRAIN_ONLY}, []),
        ({"report_file": "/dev/null"}, []),
        ({"report_file": "/dev/null", "predictions": "p.csv"}, []),
    ],
)
def test_outputs_of_a_run(parse, tmp_path, flags, kinds):
    args = parse().copy(**{"report_file": str(tmp_path / "a.json"), **flags})
    files = {f"{kind}.csv next to --report-file": tmp_path / f"a.{kind}.csv" for kind in kinds}
    where = args.part(output.Settings), args.run_scope.evaluates and not args.benchmark
    chosen = {"--report-file": args.report_file, "--report-html": args.report_html, "--predictions": args.predictions}
    assert {name: path and str(path) for name, path in report.outputs(*where).items()} == {
        name: path and str(path) for name, path in (chosen | files).items()
    }
    assert report.announced(*where) == {"--report-file"}
    if where[1]:
        of_task = set(report.tables(*where, is_multi_label=True)) - {"predictions"}
        assert of_task == {*kinds} & {"classes", "averages"}  # several labels have no confusion counts
        predictions = flags.get("predictions", files.get("predictions.csv next to --report-file"))
        assert report.tables(*where).get("predictions") == predictions
    if kinds:
        (tmp_path / "a.json").touch()
        assert report.announced(*where) >= {"--report-file", *files}


@pytest.mark.parametrize(
    ("name", "stem"), [("a.json", "a"), ("resnet.lr0.1", "resnet.lr0.1"), ("a.b.json", "a.b"), ("report", "report")]
)
def test_class_tables_are_named_after_report(parse, tmp_path, name, stem):
    result = {"confusion": np.array([[0, 0, 1], [1, 1, 1]]), "class_top1": np.ones(2)}
    report.write_classes(parse("--report-file", tmp_path / name).part(report.Options), result, "ab", 0)
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == [
        f"{stem}.{kind}.csv" for kind in ("averages", "classes", "confusion")
    ]


def test_unwritable_class_table_is_an_error(parse, tmp_path):
    result = {"confusion": np.array([[0, 0, 1], [1, 1, 1]]), "class_top1": np.ones(2)}
    report.write_classes(parse("--report-file", "/dev/null").part(report.Options), result, "ab", 0)
    assert not list(Path("/dev").glob("null.*"))
    (tmp_path / "run.classes.csv").mkdir()
    with pytest.raises(RunError, match=f"^{tmp_path}/run.classes.csv: cannot be written"):
        report.write_classes(parse("--report-file", tmp_path / "run.json").part(report.Options), result, "ab", 0)


def test_non_finite_losses_are_counted(run_train, checkpoint, tmp_path, capsys):
    """The test sets a parameter of the network to NaN, so that all losses are non-finite."""
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
    assert "loss: not finite for 23 of 23 images; the mean loss excludes these images" in capsys.readouterr().err


def test_printed_command_evaluates_best_checkpoint_and_keeps_report(run_train, tmp_path, capsys, monkeypatch):
    scores = iter([0.8, 0.3])
    run = program.run
    with monkeypatch.context() as patch:
        patch.setattr(program, "run", lambda *args, **kwargs: {**run(*args, **kwargs), "top1": next(scores)})
        (tmp_path / "flags.yaml").write_text("profile_steps: '1:2'\n")
        outputs = ["--tensorboard-dir", tmp_path / "events", "--report-html", tmp_path / "page.html"]
        code, entries = run_train("--epochs", "2", "--config", tmp_path / "flags.yaml", *outputs)
    assert code == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluate the best epoch, ")]
    arguments = shlex.split(command)
    assert arguments[-2:] == ["--profile-steps", "None"]
    with static.scope_guard(static.Scope()):
        assert train.main(arguments[arguments.index("train.py") + 1 :]) == 0
    assert phase(read_report(tmp_path / "report.eval.json"), [], "val.")["loss"] == phase(entries, [0], "val.")["loss"]
    assert read_report(tmp_path / "report.json") == entries


def test_training_report_is_replaced_only_with_overwrite(run_train, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    flags = ["--report-file", kept, "--batch-size", "15"]
    assert run_train(*flags)[0] == 0
    tables = {path: path.read_bytes() for path in tmp_path.glob("kept*")}
    evaluation = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/0"]
    elsewhere = ["--output-dir", tmp_path / "other"]
    for more in (evaluation, elsewhere, ["--benchmark", "--run-scope", "train_only"], [*evaluation, "--dry-run"]):
        capsys.readouterr()
        assert run_train(*flags, *more)[0] == 2
        remedy = "choose a different file" + ", add --resume to continue that run," * (more is elsewhere)
        message = f"--report-file {kept}: is the report of a training run; {remedy} or add --overwrite to replace"
        assert_one_error(capsys.readouterr().err, [message])
        assert {path: path.read_bytes() for path in tmp_path.glob("kept*")} == tables
    assert run_train(*flags, *elsewhere, "--resume")[0] == 2  # --resume would append to the report
    message = f"--report-file {kept}: is the report of a different training run; choose a different file"
    assert_one_error(capsys.readouterr().err, [message])
    assert run_train(*flags, *elsewhere, "--overwrite")[0] == 0
    assert f"--report-file {kept}: replaces the report of an earlier training run\n" in capsys.readouterr().out
    kept.write_text("my notes\n")
    assert run_train(*flags, *elsewhere, "--overwrite")[0] == 2
    assert_one_error(capsys.readouterr().err, [f"--report-file {kept}: exists and is not a report; choose a"])
    assert kept.read_text() == "my notes\n"


def replaced(path, folder, resume=True, checkpoint=None, html=None):
    scope = {"benchmark": False, "run_scope": RunScope.TRAIN_EVAL}
    settings = SimpleNamespace(report_file=str(path), report_html=html, resume=resume, overwrite=False, **scope)
    return report.check_replaced(settings, checkpoint, folder)


@pytest.mark.parametrize("output_dir", ["a\0b", "loop", "a" * 300, "\ud800"])
def test_resume_rejects_report_with_unusable_paths(tmp_path, output_dir):
    (tmp_path / "loop").symlink_to("loop")
    output_dir = str(tmp_path / "loop") if output_dir == "loop" else output_dir
    start = {"step": "PARAMETER", "data": {"output_dir": output_dir, "model_arch_name": "Tiny"}}
    path = tmp_path / "report.json"
    path.write_text("".join(f"DLLL {json.dumps(entry)}\n" for entry in (start, {"step": [0], "data": {}})))
    with pytest.raises(UsageError, match=f"--report-file {path}: is the report of a different training run"):
        replaced(path, tmp_path / "output/Tiny")


def line(step, **data):
    return f"DLLL {json.dumps({'step': step, 'data': data})}\n"


def test_end_of_training_names_checkpoints_and_evaluation_command(parse, tmp_path, capsys, monkeypatch, shard):
    args, logged = parse("--report-file", tmp_path / "a.json").copy(patience=2, profile_steps=(1, 2)), []
    monkeypatch.setattr(report.logger, "log", lambda step, data: logged.append((step, data)))
    monkeypatch.setattr(sparsity, "counts", lambda program: {"sparse": program})
    saver = SimpleNamespace(best={"epoch": 3, "top1": 0.75}, folder="o/5", best_folder="o/3", ends_early=False)
    stop = SimpleNamespace(epoch=5, place=lambda: {"step": 7})
    trained = dict.fromkeys(("loss", "top1", "top5", "ips"), 0.5)

    def lines(evaluated, **flags):
        argv = ["--profile-steps=1:2", "--lr", "0.1", "--overwrite"]
        report.summarize(args.copy(**flags).part(report.Options), argv, "program", stop, trained, evaluated, saver)
        return capsys.readouterr().out.splitlines()

    train, last = {f"train.{name}": 0.5 for name in trained}, "last checkpoint: o/5"
    flags = f"train.py --lr 0.1 --run-scope eval_only --from-checkpoint o/{{}} --report-file {tmp_path}/a.eval.json"
    command = f"evaluate {{}} again: {python()} {flags}"
    assert lines(None) == [last, f"report: {tmp_path}/a.json", command.format("the last epoch", 5)]
    assert logged == [((), train)]
    # The evaluation of a run with the default report has a default report, too.
    assert "--report-file" not in lines(None, report_file="o/report.json")[-1]
    logged.pop()
    saver.ends_early = True
    assert lines({"top1": 0.5}, asp=True) == [
        "--patience 2: no higher top1 since epoch 3",
        "best checkpoint: o/3 (epoch 3, top1 0.7500)",
        f"{last} (epoch 5, top1 0.5000)",
        f"report: {tmp_path}/a.json",
        command.format("the best epoch, 3,", 3),
    ]
    places = {"last.epoch": 5, "last.step": 7, "best.epoch": 3, "best.val.top1": 0.75, "val.top1": 0.5}
    assert logged[1:] == [((), {"asp.sparse": "program", **train, **places})]
    for more in ({"resume": True}, {"from_checkpoint": "o/1"}, {"from_pretrained_params": "o/1"}):
        assert lines(None, **more)[-1] == f"report: {tmp_path}/a.json"
    shard(rank=1)
    assert lines(None)[-1] == f"report: {tmp_path}/a.json"


def test_page_requires_that_the_report_is_a_regular_file(tmp_path, capsys):
    for path, html in ((tmp_path / "new.json", "p.html"), ("/dev/null", None)):
        replaced(path, tmp_path, html=html)
    message = (
        "^--report-html p.html: requires that --report-file is a regular file, but /dev/null is not; choose a diff"
    )
    with pytest.raises(UsageError, match=message):
        replaced("/dev/null", tmp_path, html="p.html")
    assert capsys.readouterr() == ("", "")


def test_report_without_results_is_replaced_without_a_message(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(line("PARAMETER", output_dir="elsewhere", model_arch_name="Tiny"))
    for resume in (False, True):
        replaced(path, tmp_path / "output/Tiny", resume)
    assert capsys.readouterr() == ("", "")


def test_resumed_run_may_be_recorded_under_a_link(tmp_path):
    """The report is not in the run folder."""
    path = tmp_path / "report.json"
    (tmp_path / "output/Tiny").mkdir(parents=True)
    for target in ("output", "elsewhere"):
        (tmp_path / target).mkdir(exist_ok=True)
        (tmp_path / target[0]).symlink_to(target)
        path.write_text(line("PARAMETER", output_dir=f"{tmp_path}/{target[0]}", model_arch_name="Tiny") + line([0]))
        with nullcontext() if target == "output" else pytest.raises(UsageError, match="of a different training run"):
            replaced(path, tmp_path / "output/Tiny")
        if target == "output":  # the report is below a link to the run folder
            below = tmp_path / "output/Tiny/report.json"
            below.write_text(line("PARAMETER") + line([0]))
            replaced(tmp_path / "o/Tiny/report.json", tmp_path / "output/Tiny")
            replaced(below, tmp_path / "o/Tiny")
            path.write_text(line("PARAMETER", output_dir=f"{tmp_path}/o", model_arch_name="net.py:Tiny") + line([0]))
            replaced(path, tmp_path / "output/Tiny")
        evaluation = line("PARAMETER", output_dir=f"{tmp_path}/o", model_arch_name="Tiny", run_scope="eval_only")
        (tmp_path / "eval.json").write_text(evaluation + line([0]))
        with pytest.raises(UsageError, match="eval.json: is the report of a different evaluation run; choose a"):
            replaced(tmp_path / "eval.json", tmp_path / "output/Tiny")
        # A run from a checkpoint also continues the report of the checkpoint's run.
        checkpoint = SimpleNamespace(folder=tmp_path / target / "Tiny/0", resumes=True)
        replaced(path, tmp_path / "output/Tiny", checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("flags", "message", "logged"),
    [
        (
            {},
            "--epochs 1: already completed in out/0; use more than 1",
            "--resume: the run is already complete in out/0, after 1 epoch\n",
        ),
        (
            {"iter_unit": "batch", "num_iter": 7},
            "--num-iter 7: already completed in out/0; use a larger number",
            "--resume: the run is already complete in out/0, after 7 steps\n",
        ),
        (
            {"patience": 2},
            "--patience 2: out/0 was saved 3 evaluations after the best evaluation; use a larger number",
            "--resume: --patience 2 has already ended the run: out/0 was saved 3 evaluations",
        ),
    ],
)
def test_completed_run_is_an_error_without_resume(parse, capsys, flags, message, logged):
    is_early = "patience" in flags
    checkpoint = SimpleNamespace(
        folder="out/0", epoch=1, ended_early=lambda patience: is_early, evaluations_since_best=3
    )
    with pytest.raises(UsageError, match=message):
        report.all_done(parse().copy(**flags).part(report.Options), {}, checkpoint)
    report.all_done(parse("--report-file", "/nowhere").copy(resume=True, **flags).part(report.Options), {}, checkpoint)
    assert logged in capsys.readouterr().out


@pytest.fixture
def complete(parse, tmp_path, monkeypatch):
    """Return a function that repeats the command of a completed run whose report has the given lines, and returns the
    summaries that it writes and whether the page is missing."""

    def complete(*lines, step=None, teacher=None, rank=0, folder=tmp_path):
        path, begun, summaries = tmp_path / "report.json", [], []
        path.write_text("".join(lines))
        monkeypatch.setattr(processes, "rank", lambda: rank)
        monkeypatch.setattr(report.logger, "setup", begun.append)
        monkeypatch.setattr(report.logger, "begin", lambda flags, append: begun.append((flags["resume"], append)))
        monkeypatch.setattr(report.logger, "log", lambda step, data: summaries.append(data))
        trained = dict.fromkeys(("loss", "top1", "top5", "ips"), 0.5)
        meta = {
            "epoch": 3,
            "step": step,
            "trained": trained,
            "evaluated": {"top1": 0.5},
            "best": {"epoch": 1, "top1": 0.75},
            "teacher": teacher,
        }
        flags = ["--resume", "--report-file", path, "--report-html", tmp_path / "page.html", "--output-dir", tmp_path]
        checkpoint = SimpleNamespace(folder=f"{folder}/0", meta=meta, ended_early=lambda patience: False)
        args = parse(*flags)
        lacks_page = report.all_done(args.part(report.Options), args.as_entry(), checkpoint)
        assert begun == [path, (True, True)] * len(summaries)
        return summaries, lacks_page

    return complete


def test_missing_summary_and_page_of_a_completed_run_are_written(complete, tmp_path, capsys):
    started = {"datetime": "2026-01-01 10:00:00", "elapsedtime": "1"}
    lines = [
        json.dumps(started | {"step": step, "data": data}) + "\n"
        for step, data in (
            ("PARAMETER", {"lr": 1}),
            ([3], {"val.top1": 0.5}),
            ([], {"val.top1": 0.5}),
            ("PARAMETER", {"run_scope": "eval_only"}),
        )
    ]
    training, ended = lines[:2], lines[:3]
    expected = {f"train.{name}": 0.5 for name in ("loss", "top1", "top5", "ips")} | {"val.top1": 0.5}
    expected |= {"last.epoch": 3, "best.epoch": 1, "best.val.top1": 0.75}
    assert complete(*training) == ([expected], 1)
    assert complete(*training, step=2) == ([expected | {"last.step": 2}], 1)
    for metric in ("top1", "map"):
        teacher = {"arch": "Net", "sha256": "0" * 64, metric: 0.875}
        of_teacher = {f"teacher.{name}": value for name, value in teacher.items()}
        assert complete(*training, teacher=teacher | {"folder": "teachers/Net/0"}) == ([expected | of_teacher], 1)
    assert complete(*training, rank=1) == ([], 0)
    assert complete(*training, folder=tmp_path / "output") == ([], 0)  # the report of a different run
    assert complete(*ended) == ([], 1)
    assert complete(lines[3], lines[1]) == ([], 0)
    (tmp_path / "page.html").touch()
    assert complete(*ended) == ([], 0)
    assert complete(*training, '{"step": [4], "data": []}\n') == ([], 0)
    assert "report.json: not a report written by train.py (line 3: data is [])" in capsys.readouterr().err
    assert complete(*training)[1] == 1


def test_summary_contains_available_metrics():
    evaluated = {"loss": 1.0, "top1": 0.5, "top5": 0.75, "images": 23, "f1_macro": 0.25, "class_top1": 1}
    best = {"epoch": 2, "step": 4, "top1": 0.625}  # best evaluation of an older checkpoint
    assert report._summary(None, evaluated, best, {"epoch": 3}) == {
        **{"val.loss": 1.0, "val.top1": 0.5, "val.top5": 0.75, "val.images": 23, "val.f1_macro": 0.25},
        **{"last.epoch": 3, "best.epoch": 2, "best.step": 4, "best.val.top1": 0.625},
    }


def test_training_run_that_resumes_appends_to_report():
    def resumes(checkpoint_resumes=None, **flags):
        args = {"run_scope": RunScope.TRAIN_EVAL, "benchmark": False, "resume": False} | flags
        checkpoint = None if checkpoint_resumes is None else SimpleNamespace(resumes=checkpoint_resumes)
        return report.resumes(SimpleNamespace(**args), checkpoint)

    assert resumes(resume=True) and resumes(True)
    assert not resumes() and not resumes(False)
    assert not resumes(True, resume=True, benchmark=True)
    assert not resumes(True, resume=True, run_scope=RunScope.EVAL_ONLY)


def test_unreadable_report_is_an_error():
    with pytest.raises(
        UsageError, match=r"--report-file /proc/self/mem: cannot be read \(Input/output error\); choose"
    ):
        replaced("/proc/self/mem", Path("output/Tiny"), resume=False)


def test_default_report_name_of_a_benchmark_does_not_depend_on_its_scope():
    names = {(scope, flag): report.default_name(scope, flag) for scope in RunScope for flag in (False, True)}
    assert {name for (_, is_benchmark), name in names.items() if is_benchmark} == {"report.benchmark.json"}
    assert names[RunScope.EVAL_ONLY, False] == "report.eval.json"
    assert names[RunScope.TRAIN_ONLY, False] == names[RunScope.TRAIN_EVAL, False] == "report.json"


@pytest.mark.slow
def test_default_report_name_depends_on_kind_of_run(run_train, tmp_path, capsys):
    folder, default = tmp_path / "output/Tiny", ["--report-file", "None", "--batch-size", "15"]
    assert run_train(*default, "--dry-run")[0] == 0
    assert not folder.exists()
    assert run_train(*default)[0] == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluate the best epoch, ")]
    assert "--report-file" not in command
    arguments = shlex.split(command)
    for more in ([], ["--overwrite"]):
        with static.scope_guard(static.Scope()):
            assert train.main([*arguments[arguments.index("train.py") + 1 :], *more]) == 0
    assert "report.eval.json: replaces the report of an earlier evaluation run\n" in capsys.readouterr().out
    benchmark = ["--benchmark", "--benchmark-steps", "1", "--benchmark-warmup-steps", "0", "--run-scope", "train_only"]
    assert run_train(*default, *benchmark)[0] == 0
    kinds = {name: reading.kind(folder / name) for name in ("report.json", "report.eval.json", "report.benchmark.json")}
    assert list(kinds.values()) == ["training", "evaluation", "benchmark"]
    moved = (tmp_path / "output").rename(tmp_path / "moved")
    resume = [*default, "--output-dir", moved, "--resume", "--epochs", "2", "--dry-run"]
    assert run_train(*resume)[0] == 0
    assert "replaces an existing file" not in capsys.readouterr().err
    assert run_train(*resume, "--report-file", moved / "Tiny/report.eval.json")[0] == 2
    assert "report.eval.json: is the report of a different evaluation run; choose" in capsys.readouterr().err
    moved.rename(tmp_path / "output")
    assert sorted(path.name for path in folder.glob("*.csv")) == sorted(
        f"report.{prefix}{kind}.csv" for prefix in ("", "eval.") for kind in ("averages", "classes", "confusion")
    )
    assert not list(folder.glob(".report*"))
    flags = ["--from-checkpoint", folder, "--last-epoch-of-checkpoint", "auto", "--epochs", "2"]
    assert run_train(*default, *flags)[0] == 0  # the flags continue the run that wrote the report
    assert [epoch for epoch, kind in losses(read_report(folder / "report.json")) if kind == "train"] == [0, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--report-html", "{}/report.json"], ["--report-html", "the same file as --report-file"]),
        (["--report-html", "{}/o/../report.classes.csv"], ["--report-html", "classes.csv next to --report-file"]),
        (["--report-html", "{}/c.yaml", "--config", "{}/c.yaml"], ["--report-html", "as --config", "command reads"]),
        (["--report-html", "{}/net.py", "--model-arch-name", "{}/net.py:Net"], ["as --model-arch-name"]),
        (["--report-file", "{}/tiny/tiny.pdparams"], ["--report-file", "tiny is reserved for a checkpoint"]),
        (["--report-file", "{}/pre.pdparams", "--from-pretrained-params", "{}/pre"], ["as --from-pretrained-params"]),
        (["--report-html", "{}/data/val/class0/page.html"], ["--report-html", "would change the data set's"]),
        # A new file called val.txt would be interpreted as a file list.
        (["--report-html", "{}/data/val.txt"], ["--report-html", "would change the data set's"]),
        (["--tensorboard-dir", "{}/data/train/board"], ["--tensorboard-dir", "would change the data set's"]),
        (["--output-dir", "{}/tiny/output"], ["--output-dir", "tiny is reserved for a checkpoint"]),
        (["--output-dir", "{}/out", "--report-file", "{}/out/Tiny/0/report.json"], ["0 is reserved for a checkpoint"]),
        (["--output-dir", "{}/out", "--report-file", "{}/out/Tiny/latest"], ["latest is reserved for a checkpoint"]),
        (["--report-html", "{}/page.html", "--report-file", "/dev/null"], ["/page.html: requires", "/dev/null is not"]),
        (["--report-file", "{}/out/profile/steps_0_1_rank0.json", "--profile-steps", "0:1", "--output-dir", "{}/out"],
         ["the trace of --profile-steps", "the same file as --report-file"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_colliding_output_paths_are_errors(run_train, photos, tmp_path, capsys, flags, message):
    (tmp_path / "data").symlink_to(photos)
    (tmp_path / "tiny").mkdir()
    for name in ("tiny/tiny.pdparams", "tiny/tiny.pdopt", "pre.pdparams", "c.yaml"):
        (tmp_path / name).write_text("")
    (tmp_path / "net.py").write_text("Net = None")
    before = sorted(tmp_path.rglob("*"))
    assert run_train(*(flag.format(tmp_path) for flag in flags))[0] == 2
    assert_one_error(capsys.readouterr().err, message)
    assert sorted(tmp_path.rglob("*")) == before


def test_each_file_that_a_run_replaces_is_logged(run_train, tmp_path, capsys):
    others = tmp_path / "report.classes.csv", tmp_path / "output/profile/steps_0_1_rank0.json"
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of a different program")
    assert run_train("--profile-steps", "0:1", "--dry-run")[0] == 0
    stderr = capsys.readouterr().err
    assert all(f" {path}: replaces an existing file; choose a different path" in stderr for path in others)


def test_evaluation_metrics_match_class_tables(run_train, tmp_path):
    _, entries = run_train()
    result = phase(entries, [], "val.")
    assert not any("confusion" in name for entry in entries for name in entry["data"])
    classes, confusion = (read(tmp_path / f"report.{name}.csv") for name in ("classes", "confusion"))
    assert [row["class"] for row in classes] == ["class0", "class1", "class2"]
    assert sum(int(row["images"]) for row in classes) == sum(int(row["images"]) for row in confusion) == 23
    correct = sum(int(row["correct"]) for row in classes)
    assert correct == sum(int(row["images"]) for row in confusion if row["label"] == row["predicted"])
    assert correct / 23 == result["top1"]


def test_benchmark_and_other_ranks_write_no_class_tables(run_train, tmp_path, shard, parse):
    flags = ["--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "0"]
    assert run_train("--run-scope", "eval_only", *flags)[0] == 0
    shard(rank=1)
    result = {"confusion": np.array([[0, 0, 1], [1, 1, 1], [2, 2, 1]]), "class_top1": np.ones(3)}
    report.write_classes(parse("--report-file", tmp_path / "run.json").part(report.Options), result, "abc", 0)
    assert list(tmp_path.glob("*.csv")) == []


def test_benchmark_report_ends_with_metrics_versions_and_command(run_train, capsys):
    flags = ["--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "1"]
    code, entries = run_train("--run-scope", "train_only", *flags)
    assert code == 0
    last = entries[-1]
    assert last["step"] == []
    assert {"train.ips", "train.latency_p99_ms", "train.data_time", "train.compute_time"} <= last["data"].keys()
    assert 0 < last["data"]["train.first_step_s"] < float(last["elapsedtime"])
    assert last["data"]["versions"]["paddle"] == paddle.__version__
    assert last["data"]["command"].endswith("--benchmark --benchmark-steps 2 --benchmark-warmup-steps 1")
    assert not any("memory" in name for name in last["data"])  # memory is reported only on GPUs
    table = capsys.readouterr().out
    for part in ("latency_p99_ms", "ips", f"paddle {paddle.__version__}", "--benchmark-steps 2"):
        assert part in table


def test_peak_memory_is_maximum_over_processes(monkeypatch):
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda gpu: 3 * 2**20)
    monkeypatch.setattr(exchange, "all_gather", lambda own: np.array([[4.0], own]))
    assert report._peak_memory("gpu") == {"peak_memory_allocated_mib": 4.0}


def test_start_line_lists_operators_learning_rate_and_steps(parse, shard):
    args = parse()
    line = report.start_line(args.part(report.Options), [1, 2], None, {}, 0, True)
    assert "no fused operators, CUDA graph, batch 8" in line
    assert "1 x cpu, float32, NCHW" in line
    assert "all-reduces" not in line
    shard(world_size=4)
    line = report.start_line(args.part(report.Options), [1, 2], None, {"fused_a": 4, "native_b": 1}, 2, False)
    assert "4 fused_a, 1 native_b, batch 8" in line
    assert f"peak lr {args.lr} x 4 = {4 * args.lr:g}, " in line
    assert line.endswith("train 2 steps per epoch, 2 gradient all-reduces per step")
    args = parse("--accumulate-steps", "2")
    line = report.start_line(args.part(report.Options), [1, 2, 3], None, {}, 2, False)
    assert f"peak lr {args.lr} x 8 = {8 * args.lr:g}, " in line
    assert "train 3 steps per epoch, an update every 2 steps (last 1 unused), 2 gradient" in line
    line = report.start_line(args.copy(iter_unit="batch", num_iter=7).part(report.Options), [1, 2], [1], {}, 2, False)
    assert "train 2 steps per epoch, val 1 step per epoch, 7 steps in total, an update every 2 steps, 2" in line
    args = args.copy(amp=True, amp_level="O2", amp_dtype="bfloat16", iter_unit="batch")
    line = report.start_line(args.part(report.Options), None, [1], {}, 0, False)
    assert "AMP O2 in bfloat16, NCHW" in line and line.endswith(" = 0.4, val 1 step per epoch")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dali_num_threads": 2}, "--dali-num-threads 6"),  # the number of cores per process minus two
        ({"dali_device": "cpu"}, "--dali-device gpu"),
        ({"hw_decoder_load": 0.5}, "--hw-decoder-load 0.9"),
        ({}, "--dali-prefetch 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flag_to_try_for_a_slow_loader(parse, flags, message):
    args = parse("--image-root", "d").copy(**{"dali_device": "gpu", "dali_num_threads": 6} | flags)
    assert report._loader_flag(args.part(report.Options), 8) == message


def test_slow_loader_logs_a_warning_with_flag_to_try(parse, capsys):
    threads = processes.cores() + 1
    args = parse("--image-root", "d").copy(device="gpu", dali_device="gpu", dali_num_threads=threads)
    options, trained = args.part(report.Options), {"data_time": 0.03, "batch_time": 0.1, "steps": 49}
    assert not report.advise_on_loader(options, 0, trained)  # no warning, because the first epoch is short
    assert not report.advise_on_loader(options, 1, trained | {"data_time": 0.025, "batch_time": 0.125})  # a fifth
    assert capsys.readouterr().err == ""
    assert report.advise_on_loader(options, 1, trained)
    assert report.advise_on_loader(options, 0, trained | {"steps": 50})
    [line, _] = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: epoch 1: the GPU waited for images 30% of the time; set --dali-prefetch 6, or measure the speed of "
        f"the loader with `{python()} -m paddle_resnet.dataset speed d`"
    )


def test_slow_loader_logs_no_warning_on_cpu(parse, capsys):
    options = parse().part(report.Options)
    assert not report.advise_on_loader(options, 5, {"data_time": 0.9, "batch_time": 1.0, "steps": 100})
    assert capsys.readouterr().err == ""


def test_slow_loader_warning_is_logged_once_per_run(run_train, capsys, monkeypatch):
    advise = report.advise_on_loader
    monkeypatch.setattr(report, "STARVED_FRACTION", -1.0)

    def advise_on_gpu(options, epoch, trained):
        return advise(dataclasses.replace(options, device="gpu"), epoch, trained)

    monkeypatch.setattr(report, "advise_on_loader", advise_on_gpu)
    assert run_train("--epochs", "4")[0] == 0
    assert capsys.readouterr().err.count("the GPU waited for images") == 1


def test_first_entry_contains_environment_and_evaluated_checkpoint(parse, tmp_path):
    flags = parse().as_entry()
    environment = report._versions("cpu") | {"system": platform.platform(), "cores": os.cpu_count(), "processes": 1}
    environment["command"] = f"{python()} train.py --a 'b c'"
    entry = report.first_entry(flags, ["--a", "b c"])
    assert entry == flags | {"environment": environment}
    assert report.first_entry(flags, ["--a", "b c"], Path("o/3")) == entry | {"evaluated_checkpoint": "o/3"}


def test_other_ranks_print_no_table_and_write_no_page(parse, monkeypatch, shard):
    args, logged, drawn = parse("--benchmark"), [], []
    monkeypatch.setattr(report, "_print_table", lambda *arguments: drawn.append("table"))
    monkeypatch.setattr(report_command, "write_page", lambda *arguments: drawn.append(arguments))
    monkeypatch.setattr(report.logger, "info", drawn.append)
    shown = ["table", ("page.html", args.report_file, "Tiny"), "page: page.html"]
    for rank, expected in ((1, []), (0, shown)):
        shard(rank=rank)
        monkeypatch.setattr(report.logger, "report", lambda step, data: logged.append(data))
        monkeypatch.setattr(report, "_peak_memory", lambda device: {"mib": device})
        report.conclude(args.part(report.Options), [], {"ips": 1.0}, Mode.TRAIN)
        with monkeypatch.context() as patch:
            patch.setattr(report.logger, "log", lambda *entry: logged.append(entry))
            report.conclude(parse().part(report.Options), ["--lr"], {"top1": 0.5}, Mode.EVAL)
        assert logged.pop() == ((), {"val.top1": 0.5})
        report_command.write_page_of_run(args.copy(report_html="page.html").part(report.Options))
        assert drawn == expected and logged.pop().items() >= {"processes": 1, "train.mib": "cpu"}.items()


def test_benchmark_table_is_logged_as_plain_text(capsys, environment):
    command = f"python train.py {'--key value ' * 5}--image-root [/data]"
    environment(COLUMNS=60)  # the width of the table does not depend on the terminal
    result = {"ips": 12.5, "loss": -123456.7, "images": 1281167}
    report._print_table("benchmark: train", result, {"command": command})
    table = capsys.readouterr().out
    assert table.startswith("benchmark: train ")
    assert command in table
    assert "12.5" in table and "-123,457" in table and "1,281,167" in table


def test_run_folder_in_output_dir_is_suggested(tmp_path):
    (tmp_path / "ResNet18").mkdir()
    (tmp_path / "ResNet18" / "report.json").touch()
    with pytest.raises(UsageError, match=f"report.json: cannot be read .*; use {tmp_path}/ResNet18$"):
        reading.read(tmp_path)
    with pytest.raises(UsageError, match="; use a report or a folder with report.json$"):
        reading.read(tmp_path / "missing.json")
