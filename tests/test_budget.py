"""--budget-minutes chooses the number of epochs from measured times. Otherwise, the run is the same as with
--epochs."""

import contextlib
import itertools
import re
import shlex
import time
from collections import UserList
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, TINY, assert_one_error, losses, read_report
from paddle_resnet import budget, config, dali, phases, train
from paddle_resnet.checkpoints import contents, folders, restore, run_folders, variables
from paddle_resnet.job import exchange
from paddle_resnet.native import build as native
from paddle_resnet.settings import durations
from paddle_resnet.step import cuda_graph
from paddle_resnet.utils import logger, progress
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

pytestmark = pytest.mark.usefixtures("one_block")

AT = TINY.index("--epochs")
WITHOUT_EPOCHS = [*TINY[:AT], *TINY[AT + 2 :], "--print-interval", "1"]
TIMES = budget.Times(
    stages=[budget.StageTimes(start_s=0.0, batch_s=0.5)], evaluation_s=4.0, checkpoint=budget.CheckpointTimes(1.0, 0.0)
)


@pytest.fixture
def run(photos, tmp_path, monkeypatch):
    """Call train.main with the tiny network, without --epochs, and return (exit code, report entries)."""

    def run(*flags, folder="output"):
        monkeypatch.setattr(logger, "_start_s", time.time())
        monkeypatch.setattr(budget, "MOST_STEPS", 3)
        flags = ["--image-root", photos, "--output-dir", tmp_path / folder, *flags]
        with static.scope_guard(static.Scope()):
            code = train.main([*WITHOUT_EPOCHS, *map(str, flags)])
        return code, read_report(tmp_path / folder / "Tiny/report.json")

    return run


@pytest.fixture
def chooses_two(monkeypatch):
    monkeypatch.setattr(budget, "epochs_within", lambda *_: 2)


@pytest.fixture
def unmeasured(monkeypatch):
    """Replace the measurements, because each of them takes as long as an epoch. A batch takes 0.1 s, or 0.2 s if
    the images are larger than 32 pixels. Return a list of the durations that the measurements should take."""
    requested = []

    def measure_training(exe, work, seconds):
        requested.append(seconds)
        return budget.StageTimes(3.0, 0.1 if work.settings.image_shape[1] <= 32 else 0.2)

    monkeypatch.setattr(budget, "_measure_training", measure_training)
    monkeypatch.setattr(budget, "_measure_evaluation", lambda *arguments: requested.append(arguments[-1]) or 0.1)
    monkeypatch.setattr(budget, "_measure_checkpoint", lambda *_: budget.CheckpointTimes(0.1, 0.0))
    return requested


def uniform(batches, accumulate_steps=1):
    """Return the Timeline of a run with one stage."""
    return durations.Timeline(accumulate_steps, (durations.Part(0, batches // accumulate_steps),))


def settings(**values):
    return SimpleNamespace(
        **{"eval_interval": 1, "save_interval": 1, "save_interval_steps": 0, "accumulate_steps": 1} | values
    )


STAGES = durations.Timeline(2, (durations.Part(0, 10), durations.Part(2, 5), durations.Part(4, 20)))
STAGE_TIMES = [budget.StageTimes(0.0, 0.5), budget.StageTimes(6.0, 3.0), budget.StageTimes(7.0, 2.0)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 10 * (20 * 0.5 + 4 + 1)),
        ({"eval_interval": 4, "save_interval": 3}, 10 * 20 * 0.5 + 3 * 4 + 4 * 1),  # including the last epoch
        ({"save_interval_steps": 3, "accumulate_steps": 2}, 10 * (20 * 0.5 + 4 + 1 + 3 * 1)),
        ({"save_interval_steps": 5, "accumulate_steps": 2}, 10 * (20 * 0.5 + 4 + 1 + 1)),  # step 10 ends the epoch
    ],
)
def test_predicted_duration(values, expected):
    args = settings(**values)
    timeline = uniform(20, args.accumulate_steps)
    assert budget.duration_s(args, 10, timeline, TIMES) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (1, 20 * 0.5 + 5),
        (2, 2 * (20 * 0.5 + 5)),
        (3, 2 * (20 * 0.5 + 5) + 6 + (10 * 3 + 5)),
        (6, 2 * (20 * 0.5 + 5) + 6 + 2 * (10 * 3 + 5) + 7 + 2 * (40 * 2 + 5)),
    ],
)
def test_prediction_includes_start_and_batches_of_each_stage(epochs, expected):
    times = TIMES._replace(stages=STAGE_TIMES)
    assert budget.duration_s(settings(), epochs, STAGES, times) == pytest.approx(expected)
    assert budget.epochs_within(settings(), expected, STAGES, times) == epochs


@pytest.mark.parametrize(
    ("seconds", "epochs"), [(150, 10), (157, 10), (158, 11), (15, 1), (1, 1), (-3, 1), (15 * 1000, 1000)]
)
def test_number_of_epochs_is_closest_to_budget(seconds, epochs):
    assert budget.epochs_within(settings(), seconds, uniform(20), TIMES) == epochs
    assert budget.epochs_within(settings(), seconds, uniform(20, 4), TIMES) == epochs


@pytest.mark.parametrize(
    ("copy_s", "write_s", "expected"),
    [
        (0.5, 8.0, 10 * (20 * 0.5 + 4 + 0.5) + 8),  # each checkpoint is written before the next one is copied
        (0.5, 20.0, 10 * 20 + 20),  # training waits for each checkpoint
    ],
)
def test_prediction_includes_writing_only_if_training_waits(copy_s, write_s, expected):
    times = TIMES._replace(checkpoint=budget.CheckpointTimes(copy_s, write_s))
    assert budget.duration_s(settings(), 10, uniform(20), times) == pytest.approx(expected)


def test_huge_number_of_epochs_is_chosen_quickly_and_is_a_valid_value():
    times = budget.Times(
        stages=[budget.StageTimes(0, 1e-4)], evaluation_s=1e-4, checkpoint=budget.CheckpointTimes(1e-4, 1e-4)
    )
    year_s = 365 * 24 * 3600
    start = time.monotonic()
    assert budget.epochs_within(settings(), year_s, uniform(1), times) == 2**31 - 1
    chosen = budget.epochs_within(settings(eval_interval=3), year_s / 1000, uniform(1), times)
    assert chosen == pytest.approx(1.35e8, rel=0.01)
    assert time.monotonic() - start < 1


def test_command_for_fine_tuning_keeps_the_budget():
    """A resumed run whose classes have changed prints this command; see test_resume.py."""
    args = config.parse_args(["--budget-minutes", "5", "--ema", "0.9"])
    args.set("checkpoint d", epochs=7, warmup_epochs=2)  # chosen by the run that wrote the checkpoint
    _, _, *arguments = shlex.split(phases.Run(args)._fine_tuning("d"))
    again = config.parse_args(arguments)
    assert (again.budget_minutes, again.ema) == (5, 0.9)
    assert not any(map(again.is_explicit, ("epochs", "warmup_epochs")))


def test_budget_includes_time_of_rare_evaluations():
    chosen = budget.epochs_within(settings(eval_interval=10), 200, uniform(20), TIMES)
    assert budget.duration_s(settings(eval_interval=10), chosen, uniform(20), TIMES) == pytest.approx(200, abs=8)


def test_chosen_epochs_are_logged_recorded_and_resumed(run, tmp_path, stop_before, monkeypatch, capsys):
    # Slow checkpoints reduce the number of epochs.
    monkeypatch.setattr(budget, "_measure_checkpoint", lambda *_: budget.CheckpointTimes(5.0, 1.0))
    stop_before()
    measured = []
    epochs_within = budget.epochs_within
    monkeypatch.setattr(budget, "epochs_within", lambda *a: measured.append(a) or min(3, epochs_within(*a)))
    code, report = run("--budget-minutes", 0.5, "--patience", 2, "--lr", 0, "--show-config", "true")
    assert code == 0
    [(_, seconds, timeline, times)] = measured
    assert 10 < seconds < 30 and timeline.batches(0) == 3 and times.checkpoint == (5, 1)
    [(start_s, batch_s)] = times.stages
    assert start_s == 0 < batch_s < 3 and 0 < times.evaluation_s < 10
    epochs = report[0]["data"]["epochs"]
    assert 1 < epochs <= 3 and report[0]["data"]["budget_minutes"] == 0.5
    out = capsys.readouterr().out
    assert f"--epochs {epochs}: chosen for --budget-minutes 0.5, 3 batches of " in out
    assert f"epochs: {epochs}  # chosen: --budget-minutes 0.5, 3 batches of " in out
    newest = run_folders.newest(tmp_path / "output/Tiny")
    assert contents.read_meta(newest)["arguments"]["epochs"] == epochs

    # The same command resumes with the same number of epochs and measures nothing.
    code, report = run("--budget-minutes", 0.5, "--patience", 0, "--lr", 0, "--resume")
    assert (code, len(measured)) == (0, 1)
    assert {entry["data"]["epochs"] for entry in report if entry["step"] == "PARAMETER"} == {epochs}
    assert run_folders.newest(tmp_path / "output/Tiny").name == str(epochs - 1)


def test_run_is_identical_to_run_with_chosen_epochs(run, tmp_path, chooses_two):
    """The measurement must not change variables, random numbers, image order or learning rate."""
    flags = ["--ema", "0.9", "--dropout", "0.3", "--mixup", "0.2", "--accumulate-steps", "2"]
    flags += ["--optimizer", "RAdam", "--lookahead", "2,0.5"]
    results = [run(*length, *flags, folder=length[0]) for length in (["--budget-minutes", 1], ["--epochs", 2])]
    assert [code for code, _ in results] == [0, 0]
    assert losses(results[0][1]) == losses(results[1][1]) and (1, "val") in losses(results[0][1])
    for name in ("tiny.pdparams", "tiny.pdopt", "tiny.pdema"):
        contents = [(tmp_path / folder / "Tiny/1" / name).read_bytes() for folder in ("--budget-minutes", "--epochs")]
        assert contents[0] == contents[1], name
    # the checkpoint that was written to measure its duration has been deleted
    assert not list(tmp_path.rglob(".budget*"))


class Loader(UserList):
    step = reads = 0

    def __next__(self):
        self.reads += 1
        raise StopIteration


def test_measurement_takes_about_the_requested_time(monkeypatch):
    """A batch takes 0.01 s, and a step has 4 batches. The first measurement skips the 6 prefetched batches."""
    measured = []

    def run_program(options, *_):
        assert options.benchmark and options.max_bad_steps > 10**6
        measured.append((options.benchmark_warmup_steps, options.benchmark_steps))
        loader.step = 99
        return {"batch_time": 0.01}

    monkeypatch.setattr(budget.program, "run", run_program)
    calls = []
    loader = Loader(range(99))
    loader.reset = lambda: calls.append("reset")
    monkeypatch.setattr(budget.dali, "build_dataloader", lambda *_: loader)
    args = settings(accumulate_steps=4, dali_prefetch=6, device="cpu")
    args.copy = lambda origin, **values: SimpleNamespace(**values)
    times, clock = budget.StageTimes(0.5, 0.01), itertools.cycle([10.0, 10.0 + 0.5 + (7 + 8) * 0.01])
    monkeypatch.setattr(budget, "perf_counter", lambda: next(clock))
    compiled = SimpleNamespace(captured=None)
    training = SimpleNamespace(settings=args, program=static.Program(), compiled=compiled, fetchs={})
    assert budget._measure_training(None, training, 0.5) == pytest.approx(times)
    assert measured == [(7, 8), (4, 4 * 12)]
    assert calls == ["reset"] and loader.reads == 1  # at the end of an epoch, DALI requires a further read
    measured.clear()  # if steps are slow, the first measurement must suffice
    loader.step = 0
    assert budget._measure_training(None, training, 0.08) == pytest.approx(times)
    training.compiled.captured = "step"  # the warm-up includes the capture and a replay
    assert budget._measure_training(None, training, 0.08).batch_s == 0.01
    assert measured == [(7, 8), (4 * (cuda_graph.STEPS_BEFORE + 2), 8)]


@pytest.mark.parametrize(("first_s", "count"), [(0.4, 2), (0.6, 1)])
def test_slow_evaluation_is_measured_once(monkeypatch, first_s, count):
    evaluation, durations = SimpleNamespace(**dict.fromkeys(("settings", "loader", "compiled", "fetchs"))), []
    evaluation.refresh = lambda: durations.append(1)
    monkeypatch.setattr(budget, "perf_counter", lambda: sum(durations))
    monkeypatch.setattr(budget.program, "run", lambda *_: durations.append(len(durations)) or {"epoch_time": first_s})
    # Including the refresh, the first evaluation takes 2 s and the second evaluation takes 4 s.
    assert budget._measure_evaluation(None, evaluation, 0.5) == 2 * count
    assert len(durations) == 2 * count


def test_checkpoint_is_measured_in_output_folder(tmp_path, monkeypatch):
    run_folder = tmp_path / "new/output/Tiny"
    times, written = iter([10.0, 10.5, 12.5] * 2), []
    monkeypatch.setattr(budget, "perf_counter", lambda: next(times))
    monkeypatch.setattr(folders, "commit", lambda root, name, files, meta, form: written.extend([root, form, *files]))
    assert budget._measure_checkpoint(run_folder, "marker", static.Program()) == (0.5, 2.0)
    assert Path(written[0]).parent == tmp_path and Path(written[0]).name.startswith(".budget")
    assert written[1:] == ["marker", "0.pdparams", "1.pdparams"]
    assert list(tmp_path.iterdir()) == []
    run_folder.mkdir(parents=True)
    budget._measure_checkpoint(run_folder, "marker", static.Program())
    assert Path(written[4]).parent == run_folder


@pytest.mark.parametrize(
    ("changes", "epoch", "step", "expected"),
    [
        ({}, None, 0, True),
        ({"budget_minutes": None}, None, 0, False),
        ({"benchmark": True}, None, 0, False),
        ({"run_scope": RunScope.EVAL_ONLY}, None, 0, False),
        ({}, 0, 0, True),
        ({"from_checkpoint": "DIR"}, 0, 1, r"continues from DIR \(--from-checkpoint\); use --epochs instead"),
        ({"resume": True}, 1, 0, r"continues from DIR \(--resume\); use --epochs instead"),
    ],
)
def test_only_new_training_runs_choose(changes, epoch, step, expected):
    values = {"budget_minutes": 5, "benchmark": False, "run_scope": RunScope.TRAIN_EVAL}
    values |= {"resume": False, "from_checkpoint": None} | changes
    checkpoint = None if epoch is None else restore.StartCheckpoint("DIR", epoch, step)
    with pytest.raises(UsageError, match=expected) if isinstance(expected, str) else contextlib.nullcontext():
        assert budget.is_needed(SimpleNamespace(**values), checkpoint) == expected


@pytest.mark.slow
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_captured_run_is_identical_to_run_with_chosen_epochs(run, fake, chooses_two):
    flags = [*NHWC, "--kernels", "native"]
    code, report = run("--budget-minutes", 1, *flags, folder="budget")
    assert code == 0
    training, _ = fake.made  # the run replays the step that the measurement has captured
    assert training.launches >= 2 * 3
    assert losses(report) == losses(run("--epochs", 2, *flags, "--cuda-graph", "false", folder="epochs")[1])


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_warning_about_captured_step_is_shown_during_measurement(run, fake, chooses_two, monkeypatch, capsys):
    monkeypatch.setattr(cuda_graph, "TESTED", cuda_graph.TESTED - {"matmul_v2"})
    monkeypatch.setattr(cuda_graph, "_differing", lambda *_: ["fc.w_0"])
    assert run("--budget-minutes", 1, *NHWC, "--kernels", "native", "--run-scope", "train_only")[0] == 0
    output = capsys.readouterr()
    assert output.err.count("steps have different results (fc.w_0)") == 1
    assert output.out.count(" train  loss ") == 2 * (3 + 1) + 1  # the steps and epochs of the run, and a summary


@pytest.mark.slow
def test_run_stopped_during_measurement_starts_again(run, chooses_two, stop_before, tmp_path):
    stop_before(train_step=1)
    assert run("--budget-minutes", 1, "--resume")[0] == 75
    assert not list(tmp_path.rglob("*.pdparams"))
    stop_before()
    code, report = run("--budget-minutes", 1, "--resume")
    assert code == 0 and (1, "val") in losses(report)


def test_other_processes_use_the_choice_of_rank_0(run, unmeasured, monkeypatch, capsys):
    from_rank_0 = exchange.from_rank_0

    def receive(function):
        return [2, 6.0, 53.1, [[[0, 0.1]], 1.0, [0.2, 0.7]]] if function.__name__ == "plan" else from_rank_0(function)

    monkeypatch.setattr(exchange, "from_rank_0", receive)
    shown, phase = [], progress.phase
    monkeypatch.setattr(progress, "phase", lambda name: shown.append(name) or phase(name))
    code, report = run("--budget-minutes", 1)
    assert code == 0
    assert shown.index("program compilation") < shown.index("measurement for --budget-minutes")
    assert report[0]["data"]["epochs"] == 2 and (1, "train") in losses(report)
    assert unmeasured == pytest.approx([0.02 * 60, 0.1 * 60])
    ends = "the run of 2 epochs ends after about 0.885 minutes, of which 0.1 have passed"
    output = capsys.readouterr()
    copy = "copy of a checkpoint 0.2 s, writing it in the background 0.7 s"
    assert f"3 batches of 0.1 s per epoch, evaluation 1 s, {copy}; {ends}\n" in output.out
    assert f"--budget-minutes 1: {ends}, and no other number of epochs is closer; change the budget" in output.err


def test_recipe_derives_warmup_from_chosen_epochs(run, unmeasured, monkeypatch, capsys):
    monkeypatch.setattr(budget, "epochs_within", lambda *_: 12)
    monkeypatch.setattr(logger, "elapsed_s", lambda: 59.0)  # the run is expected to end after 65 s
    seen = []
    monkeypatch.setattr(train, "_run_epochs", lambda run, *_: seen.append(run))
    flags = list(WITHOUT_EPOCHS)
    at = flags.index("--warmup-epochs")
    monkeypatch.setattr("test_budget.WITHOUT_EPOCHS", [*flags[:at], *flags[at + 2 :]])
    assert run("--budget-minutes", 1, "--choose-recipe")[0] == 0
    assert (seen[0].settings.epochs, seen[0].settings.warmup_epochs) == (12, 2)
    schedule, start = seen[0].training.lr_scheduler, seen[0].settings.warmup_start_lr
    schedule.step(3)  # after one of two epochs
    assert schedule.get_lr() == pytest.approx((start + seen[0].settings.lr) / 2)
    assert "no other number of epochs is closer" not in capsys.readouterr().err


@pytest.mark.slow
def test_stages_are_measured_with_their_own_images(run, chooses_two, monkeypatch, capsys):
    """Regression test: all stages were measured with images of --image-shape, so a run with --sizes failed. The
    stages share all variables, which the measurement must not change."""
    built, left_s, build = [], [], dali.build_dataloader
    monkeypatch.setattr(
        dali, "build_dataloader", lambda args, *more, **named: built.append(args) or build(args, *more, **named)
    )
    monkeypatch.setattr(progress, "is_due", lambda: True)
    monkeypatch.setattr(progress, "show", lambda *arguments: left_s.append(arguments[3]))
    flags = ["--sizes", "24:0,32:1:4", "--accumulate-steps", 2, "--lookahead", "2,0.5", "--ema", "0.9"]
    # The host scalars of --mixup have the size of the images.
    flags += ["--freeze", "stem", "--unfreeze-at", 1, "--mixup", "0.4"]
    code, report = run("--budget-minutes", 1, *flags, folder="budget")
    assert code == 0
    training, _, *measured = [(args.batch_size, args.image_shape[1]) for args in built]
    assert training == (8, 24) and measured[:2] == [(4, 32), (8, 24)]
    assert [left for left in left_s if left is not None][-1] == 0  # the display knows the chosen epochs
    output = capsys.readouterr().out
    assert re.search(
        r"-minutes 1, 2 batches of \S+ s per epoch, 6 batches of \S+ s per epoch from epoch 1 on, eval",
        output,
    )
    assert losses(report) == losses(run("--epochs", 2, *flags, folder="epochs")[1])


@pytest.fixture
def starts(run, unmeasured, monkeypatch):
    """Call `run`, but do not train. An epoch of N batches takes 0.1 N + 0.2 s, or 0.2 N + 0.2 s with larger images,
    and a later stage starts in 3 s. Return (exit code, epochs of the run and of all its stages, or None)."""
    seen = []

    def see(run, *_):
        works = [run.training, *(work for _, work in run.training.later)]
        [epochs] = {run.settings.epochs, *(work.settings.epochs for work in works)}
        seen.append(epochs)

    monkeypatch.setattr(train, "_run_epochs", see)
    monkeypatch.setattr(logger, "elapsed_s", lambda: 4.0)
    return lambda *flags: (run(*flags)[0], seen.pop() if seen else None)


def test_epoch_is_as_long_as_its_batches_with_accumulation(starts, capsys):
    """Regression test: an epoch must not be predicted to be as long as its steps. 7 batches are 3 steps of 2."""
    flags = ["--batch-size", 4, "--accumulate-steps", 2, "--budget-minutes", 1]
    assert starts(*flags) == (0, round((60 - 4) / (6 * 0.1 + 0.2)))
    assert "--budget-minutes 1, 6 batches of 0.1 s per epoch, evaluation" in capsys.readouterr().out


def test_stages_are_part_of_the_budget(starts, unmeasured):
    assert starts("--budget-minutes", 1, "--sizes", "24:0,48:5:4") == (0, 5 + round((60 - 4 - 3 - 5 * 0.5) / 1.6))
    assert unmeasured == pytest.approx([0.01 * 60, 0.01 * 60, 0.1 * 60])


@pytest.mark.parametrize(
    ("stage", "first", "enough"),
    [
        (["--sizes", "24:0,32:100"], 100, 2),
        (["--freeze", "stem", "--unfreeze-at", 100], 100, 2),
        (["--sizes", "24:0,32:52"], 52, 1),  # epoch 52 would be the next one
    ],
)
def test_budget_that_ends_before_last_stage_is_an_error(starts, capsys, stage, first, enough):
    assert starts("--budget-minutes", 0.5, *stage) == (2, None)
    message = "--budget-minutes 0.5: ends after 52 epochs, but the last stage (--sizes, --unfreeze-at) begins in epoch "
    assert_one_error(
        capsys.readouterr().err, [message + f"{first}; use an earlier epoch, or --budget-minutes {enough}"]
    )
    code, epochs = starts("--budget-minutes", enough, *stage)
    assert code == 0 and epochs > first


def test_dry_run_does_not_measure(run, capsys):
    assert run("--budget-minutes", 1, "--dry-run")[0] == 0
    assert "chosen for --budget-minutes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", 3], "--budget-minutes 5: conflicts with --epochs 3 (command line); remove one of"),
        (["--iter-unit", "batch", "--num-iter", 9], "--budget-minutes 5.0: not used by --iter-unit batch; remove it"),
        (
            ["--profile-steps", "1:2"],
            "--budget-minutes 5: not supported with --profile-steps; remove one of them",
        ),
        (["--budget-minutes", -1], "-1"),
        (
            ["--budget-minutes", "1e9"],
            "--budget-minutes: 1e9 minutes are too long; use at most 527040, which is a year",
        ),
    ],
)
def test_conflicts_are_errors(run, capsys, flags, message):
    assert run("--budget-minutes", 5, *flags)[0] == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("recorded", "is_error"), [(5, False), (7, True), (None, True)])
def test_resumed_run_keeps_its_budget(recorded, is_error):
    checkpoint = restore.StartCheckpoint("DIR", 1, 0, {"arguments": {"budget_minutes": recorded}}, resumes=True)
    options = config.parse_args(["--budget-minutes", "5", "--resume"]).part(budget.Options)
    with pytest.raises(UsageError, match="--budget-minutes 5:") if is_error else contextlib.nullcontext():
        assert not budget.is_needed(options, checkpoint)


@pytest.mark.slow
def test_resumed_run_cannot_choose_again(run, unmeasured, chooses_two, stop_before, capsys):
    stop_before(train_step=1)
    assert run("--budget-minutes", 1, "--run-scope", "train_only")[0] == 75
    stop_before()
    copy = "copy of a checkpoint 0.1 s, writing it in the background 0 s"
    assert f"3 batches of 0.1 s per epoch, {copy}; the run of 2 epochs ends after" in capsys.readouterr().out
    assert run("--budget-minutes", 2, "--run-scope", "train_only", "--resume")[0] == 2
    assert_one_error(
        capsys.readouterr().err, ["--budget-minutes 2: applies only to new runs, but this run continues from "]
    )
    code, report = run("--resume", "--epochs", 3, "--run-scope", "train_only")
    assert code == 0 and (2, "train") in losses(report)
    assert report[-1]["step"] == []


def test_variables_are_restored_after_the_measurement():
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), static.scope_guard(static.Scope()):
        weight = static.create_parameter([3], "float32")
        static.Executor(paddle.CPUPlace()).run(startup)
        before = variables.read(weight.name)
        for name in ("absent", "empty"):
            main.global_block().create_var(name=name, shape=[1], dtype="float32", persistable=True)
        static.global_scope().var("empty").get_tensor()
        with pytest.raises(ZeroDivisionError), variables.restored(main, paddle.CPUPlace()):
            variables.set_variable(weight.name, before + 1, paddle.CPUPlace())
            raise ZeroDivisionError
        np.testing.assert_array_equal(variables.read(weight.name), before)
        assert not static.global_scope().find_var("empty").get_tensor()._is_initialized()
