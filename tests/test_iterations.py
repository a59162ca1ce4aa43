"""Runs with --iter-unit batch, which train for an exact number of steps and evaluate and save at intervals that are
measured in steps. In these tests, an epoch has three steps."""

import pickle

import numpy as np
import pytest

from conftest import NHWC, assert_one_error, losses, phase
from helpers import METRICS, with_meta
from paddle_resnet import export
from paddle_resnet.components import stages
from paddle_resnet.optimizers import schedules
from paddle_resnet.serving import networks
from paddle_resnet.settings import durations
from paddle_resnet.settings.groups import benchmark
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")

STEPS = ["--iter-unit", "batch", "--print-interval", "1"]
SEVEN = [*STEPS, "--num-iter", "7", "--eval-interval", "2", "--save-interval", "4", "--keep-checkpoints", "9"]


def folders_of(tmp_path, name="output"):
    return sorted(path.name for path in (tmp_path / name / "Tiny").iterdir() if path.is_dir())


def trained_steps(report):
    return sorted(key for key in losses(report) if isinstance(key[1], int))


def evaluations(report):
    """Return [(epoch, step, top1)] for all evaluations. For an evaluation at the end of an epoch, the step is None."""
    actual = [(e["step"], e["data"]) for e in report if len(e["step"]) == 1 and "val.top1" in e["data"]]
    return [(step[0], data.get("val.step"), data["val.top1"]) for step, data in actual]


def test_run_has_exactly_num_iter_steps(run_train, tmp_path, capsys):
    code, report = run_train(*SEVEN)
    assert code == 0
    assert trained_steps(report) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [evaluation[:2] for evaluation in evaluations(report)] == [(0, 2), (1, 1), (1, None), (2, 1)]
    scores = {f"{epoch}_{step}" if step else str(epoch): top1 for epoch, step, top1 in evaluations(report)}
    bests = {name for i, name in enumerate(scores) if scores[name] > max([-1, *list(scores.values())[:i]])}
    assert folders_of(tmp_path) == sorted({"1_1", "2_1", "best", "latest"} | bests)
    assert phase(report, [], "train.")["loss"] == phase(report, [2], "train.")["loss"]
    assert phase(report, [2], "train.")["images"] == 8
    assert "7 steps in total" in capsys.readouterr().out
    assert phase(report, [], "best.")["val.top1"] == max(scores.values())
    assert run_train(*SEVEN, "--resume")[0] == 0
    assert "Tiny/2_1, after 7 steps" in capsys.readouterr().out
    assert run_train(*SEVEN)[0] == 2


def test_num_iter_of_full_epochs_matches_epochs(run_train, tmp_path):
    flags = ["--print-interval", "1", "--lr-scheduler", "Poly", "--warmup-start-lr", "0.001"]
    _, expected = run_train(*flags, "--epochs", "2", "--warmup-epochs", "1")
    code, report = run_train(*STEPS, *flags, "--num-iter", "6", "--warmup-epochs", "3", "--output-dir", tmp_path / "b")
    assert code == 0
    actual = losses(report)
    assert {**actual, (0, "val"): None} == {**losses(expected), (0, "val"): None}
    assert folders_of(tmp_path, "b") == ["1", "best", "latest"]


STOPS = [({"train_step": 3}, "paddle"), pytest.param({"eval_step": 1}, "paddle", marks=pytest.mark.slow)]
STOPS += [
    pytest.param(stop, "native", marks=pytest.mark.soak)
    for stop in ({"train_step": 1}, {"train_step": 4}, {"eval_step": 0})
]


@pytest.mark.parametrize(("stop", "kernels"), STOPS, ids=str)
def test_losses_after_stop_match_uninterrupted_run(run_train, once, stop_before, tmp_path, stop, kernels):
    flags = [*SEVEN, *NHWC, "--kernels", kernels, "--lr-scheduler", "Poly", "--warmup-epochs", "2"]

    def make(folder):
        code, report = run_train(*flags, "--output-dir", folder / "output")
        assert code == 0
        (folder / "report").write_bytes(pickle.dumps(report))

    expected = pickle.loads((once(f"seven_steps_{kernels}", make) / "report").read_bytes())
    flags += ["--resume", "--output-dir", tmp_path / "stopped"]
    stop_before(**stop)
    code, first = run_train(*flags)
    assert code == 75
    stop_before()
    code, second = run_train(*flags)
    assert code == 0
    assert not {*trained_steps(first)} & {*trained_steps(second)}
    assert losses(first) | losses(second) == losses(expected)
    assert evaluations(first) + evaluations(second) == evaluations(expected)
    assert phase(second, [], "best.") == phase(expected, [], "best.")
    assert {"1_1", "2_1"} <= {*folders_of(tmp_path, "stopped")}


@pytest.mark.slow
def test_larger_num_iter_resumes_inside_the_epoch(run_train, tmp_path):
    flags = [*STEPS, "--lr-scheduler", "Piecewise", "--lr-decay-epochs", "2"]
    _, expected = run_train(*flags, "--num-iter", "5", "--output-dir", tmp_path / "a")
    _, first = run_train(*flags, "--num-iter", "4")
    code, second = run_train("--print-interval", "1", "--resume", "--num-iter", "5")
    assert code == 0
    assert {**losses(first), **losses(second), (1, "val"): 0} == {**losses(expected), (1, "val"): 0}
    assert evaluations(second) == evaluations(expected)


def test_run_with_unused_batches_resumes(run_train):
    """An epoch has seven batches, of which training with --accumulate-steps 2 uses six."""
    flags = [*STEPS, "--batch-size", "4", "--accumulate-steps", "2"]
    assert run_train(*flags, "--num-iter", "2")[0] == 0
    code, report = run_train(*flags, "--num-iter", "4", "--resume")
    assert code == 0 and len(trained_steps(report)) == 4


def test_resume_with_changed_steps_per_epoch_is_an_error(run_train, capsys):
    assert run_train(*STEPS, "--num-iter", "2")[0] == 0
    assert run_train(*STEPS, "--num-iter", "4", "--batch-size", "4", "--resume")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--iter-unit batch", "3 steps per epoch", "has 7", "--batch-size"])


def test_profile_steps_after_first_stop_is_an_error(run_train, capsys):
    assert run_train(*SEVEN, "--profile-steps", "1:3")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--profile-steps 1:3", "0:2"])


@pytest.mark.soak
def test_two_processes_average_bn_statistics_before_evaluation(launch):
    """The processes average their BN statistics before each evaluation, even inside an epoch, so both ranks evaluate
    the same network."""
    flags = [*STEPS, "--num-iter", "2", "--batch-size", "4", "--eval-interval", "1"]
    report, (first, second) = launch(2, *flags)
    assert [evaluation[:2] for evaluation in evaluations(report)] == [(0, 1), (0, 2)]
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_stops_follow_intervals(parse):
    args = parse(*STEPS, "--num-iter", "7", "--eval-interval", "2", "--save-interval", "4")
    actual = [tuple(stop) for stop in durations.stops(args, durations.uniform(args.accumulate_steps, 3))]
    assert actual == [
        (0, 2, False, True, False),
        (0, 3, True, False, False),
        (1, 1, False, True, True),
        (1, 3, True, True, False),
        (2, 1, False, True, True),
    ]
    assert [tuple(stop) for stop in durations.stops(args, durations.uniform(args.accumulate_steps, 3), 4)] == actual[3:]
    args = parse("--epochs", "3", "--eval-interval", "2")
    assert [tuple(stop) for stop in durations.stops(args, durations.uniform(args.accumulate_steps, 3), 2)] == [
        (0, 3, True, False, True),
        (1, 3, True, True, True),
        (2, 3, True, True, True),
    ]


def test_bn_statistics_are_averaged_at_each_end_of_an_epoch_and_evaluation(parse):
    args = parse(*STEPS, "--num-iter", "4", "--eval-interval", "2", "--save-interval", "1")
    stops = durations.stops(args, durations.uniform(args.accumulate_steps, 3))
    averaged = [((stop.epoch, stop.step), stop.averages_bn) for stop in stops]
    assert averaged == [((0, 1), False), ((0, 2), True), ((0, 3), True), ((1, 1), True)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--epochs", "2"], 6),
        (["--epochs", "2", "--accumulate-steps", "4"], 4),
        (["--accumulate-steps", "2", *STEPS, "--num-iter", "9", "--eval-interval", "2"], 4),
    ],
)
def test_first_pass_ends_with_first_stop(parse, flags, expected):
    args = parse(*flags)
    assert durations.first_pass(args, durations.uniform(args.accumulate_steps, 6)) == expected
    assert args.part(benchmark.Settings).total_steps is None
    args = parse("--benchmark", "--benchmark-steps", "5", "--benchmark-warmup-steps", "3")
    assert args.part(benchmark.Settings).total_steps == 8


TIMELINE = durations.Timeline(2, (durations.Part(0, 3), durations.Part(2, 5, 0.5), durations.Part(3, 1)))


def test_timeline_counts_steps_of_each_stage():
    positions = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), *((2, i) for i in range(5)), (3, 0), (4, 0)]
    assert [TIMELINE.position(step) for step in range(13)] == positions
    assert [TIMELINE.steps_before(epoch) for epoch in (0, 1, 2, 2.4, 3, 4, 7)] == [0, 3, 6, 8, 11, 12, 15]
    assert [TIMELINE.batches_before(epoch) for epoch in (1, 3)] == [6, 22]
    assert [TIMELINE.batches(epoch) for epoch in range(4)] == [6, 6, 10, 2]
    assert [TIMELINE.lr_factor(step) for step in (0, 5, 6, 10, 11, 12)] == [1, 1, 0.5, 0.5, 1, 1]


def test_durations_are_converted_to_steps(parse):
    for flags, expected in ((["--epochs", "4"], (12, 8)), ([*STEPS, "--num-iter", "9"], (9, 2.4))):
        args = parse(*flags)
        assert (durations.total_steps(args, TIMELINE), durations.steps_of(args, TIMELINE, 2.4)) == expected
    args = parse("--accumulate-steps", "2", "--sizes", "32:0,32:1:4:0.5", "--epochs", "2")
    assert stages.timeline(args.part(stages.Options), 30) == (2, ((0, 1, 1), (1, 3, 0.5)))


@pytest.mark.parametrize("flags", [["--epochs", "4"], [*STEPS, "--num-iter", "12", "--save-interval", "1"]], ids=str)
def test_stops_count_steps_of_each_stage(parse, flags):
    args = parse(*flags, "--accumulate-steps", "2")
    ends = [stop[:2] for stop in durations.stops(args, TIMELINE) if stop.ends_epoch]
    assert ends == [(0, 6), (1, 6), (2, 10), (3, 2)]
    assert next(durations.stops(args, TIMELINE, 6)).epoch == 2


def test_schedule_counts_steps_of_each_stage(run_train, caplog):
    """The stages have 3, 7 and 3 steps. The second stage has half the batch size and half the learning rate of the
    other stages."""
    flags = ["--epochs", "3", "--sizes", "32:0,24:1:4:0.5,32:2", "--print-interval", "1", "--lr", "0.1"]
    code, report = run_train(*flags, "--warmup-epochs", "1")
    assert code == 0
    rates = [e["data"]["train.lr"] for e in report if len(e["step"]) == 2 and "train.lr" in e["data"]]
    cosine = [0.05 * (1 + np.cos(np.pi * step / 10)) for step in range(10)]
    expected = [0, 0.1 / 3, 0.2 / 3, *(rate / 2 for rate in cosine[:7]), *cosine[7:]]
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-9)
    assert not caplog.messages  # DALI logs a warning if it may return unexpected results


def test_unfreezing_keeps_size_of_its_stage(parse):
    flags = ["--epochs", "4", "--sizes", "32:0,24:1:4:0.5,32:3", "--freeze", "stem", "--unfreeze-at", "2"]
    args = parse(*flags)
    actual = [
        (stage.first_epoch, of_stage.image_shape[1:], of_stage.batch_size, of_stage.freeze, stage.lr_factor)
        for stage in stages.stages(args.part(stages.Options))
        for of_stage in [args.stage(stage.changes)]
    ]
    expected = [(0, [32, 32], 8, ["stem"], 1), (1, [24, 24], 4, ["stem"], 0.5), (2, [24, 24], 4, None, 0.5)]
    assert actual == [*expected, (3, [32, 32], 8, None, 1)]
    args = parse("--epochs", "4")
    [stage] = stages.stages(args.part(stages.Options))
    assert stage.first_epoch == 0 and args.stage(stage.changes) is args


def test_num_iter_may_end_inside_a_stage(run_train):
    """The second stage changes only the batch size."""
    flags = [*STEPS, "--sizes", "32:0,32:1:4", "--num-iter"]
    code, report = run_train(*flags, "5")
    assert code == 0
    assert trained_steps(report) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    code, report = run_train(*flags, "12", "--resume")
    assert code == 0
    assert trained_steps(report) == [(1, step) for step in range(2, 7)] + [(2, 0), (2, 1)]


def test_stage_batch_larger_than_data_set_is_an_error(run_train, capsys):
    assert run_train("--epochs", "2", "--sizes", "32:0,24:1:31")[0] == 2
    expected = ["--sizes 32:0,24:1:31: batch size 31 exceeds the 30 training images per process; use 30 or less"]
    assert_one_error(capsys.readouterr().err, expected)


def test_batch_may_contain_the_whole_data_set(parse):
    assert [durations.used_batches(batches, 4) for batches in (4, 7, 8)] == [4, 4, 8]
    with pytest.raises(UsageError, match="--accumulate-steps 4: the loader has 3 batches per epoch; use a smaller num"):
        durations.used_batches(3, 4)
    options = parse("--batch-size", "30").part(stages.Options)
    assert stages.timeline(options, 30).batches(0) == 1
    with pytest.raises(UsageError, match="batch size 30 exceeds the 29 training images"):
        stages.timeline(options, 29)


def test_schedule_counts_steps(parse):
    flags = ["--num-iter", "10", "--warmup-epochs", "2", "--lr-scheduler", "Piecewise", "--lr-decay-epochs", "4,7"]
    args = parse(*STEPS, *flags, "--lr", "1")
    schedule = schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 3))
    actual = []
    for _ in range(10):
        actual.append(schedule.last_lr)
        schedule.step()
    np.testing.assert_allclose(actual, [0, 0.5, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_interval_defaults_depend_on_iter_unit(parse):
    args = parse(*STEPS, "--num-iter", "10")
    assert (args.save_interval, args.eval_interval, args.warmup_epochs) == (10, 10, 0)
    assert args.origin("eval_interval") == "--iter-unit"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--iter-unit batch", "--iter-unit batch: requires the number of training steps; add --num-iter N"),
        *(
            (f"--iter-unit batch --num-iter 5 --epochs {n}", f"--epochs {n}: not used by --iter-unit batch; remove it")
            for n in (3, 90)
        ),
        ("--num-iter 5", "--num-iter 5: not used by --iter-unit epoch; remove it, or use --iter-unit batch"),
        ("--iter-unit batch --num-iter 5 --save-interval-steps 2", "--save-interval-steps 2: not used by"),
        (
            "--iter-unit batch --num-iter 5 --lr-scheduler Piecewise",
            "Piecewise has no default steps; set --lr-decay-epochs",
        ),
    ],
)
def test_flags_incompatible_with_iter_unit_are_errors(run_train, capsys, flags, message):
    assert run_train(*flags.split())[0] == 2
    assert_one_error(capsys.readouterr().err, [message])


@pytest.mark.slow
def test_checkpoint_within_an_epoch_is_exported_if_bn_statistics_are_averaged(run_train, photos, tmp_path):
    every = ["--eval-interval", "2", "--save-interval", "1", "--keep-checkpoints", "9"]
    assert run_train(*STEPS, "--num-iter", "2", *every)[0] == 0
    run = tmp_path / "output/Tiny"
    export.export(run, tmp_path / "best", verify=photos)
    export.export(run / "0_1", tmp_path / "not evaluated")
    job = tmp_path / "job"  # copies of checkpoints, as if two processes had written them
    export.export(with_meta(run / "0_2", job, world_size=2), tmp_path / "two processes")
    # Regression test: without an evaluation, the last checkpoint of a job was rejected.
    assert run_train(*STEPS, "--num-iter", "2", "--run-scope", "train_only", "--overwrite", *every)[0] == 0
    export.export(with_meta(run / "0_2", job / "train_only", world_size=2), tmp_path / "two processes, train_only")
    with pytest.raises(UsageError, match="0_1: saved after 1 step of epoch 0, before the processes averaged their BN"):
        export.export(with_meta(run / "0_1", job, world_size=2), tmp_path / "two processes, not evaluated")
    trained = with_meta(run / "0_1", job / "trained", world_size=2, trained=METRICS)
    assert networks.load_checkpoint(trained).meta["world_size"] == 2
