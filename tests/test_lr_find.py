"""The learning-rate finder: its steps equal those of train.py, and it does not affect a run in the same folder."""

import contextlib
import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from matplotlib import pyplot
from paddle import static

from conftest import NHWC, TINY, losses, strict_json, tiny
from paddle_resnet import config, lr_find, program
from paddle_resnet import report as report_command
from paddle_resnet.checkpoints import run_folders
from paddle_resnet.job import exchange, processes
from paddle_resnet.native import build as native
from paddle_resnet.optimizers import schedules
from paddle_resnet.results import lr_curve, page
from paddle_resnet.settings import durations
from paddle_resnet.tools import drawing
from paddle_resnet.utils import locks
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")

STEPS = 20
NAMES = {lr_curve.DATA, lr_curve.DRAWING}


@pytest.fixture
def find(photos, tmp_path, monkeypatch):
    """Call lr_find.main with the tiny network and return (exit code, Curve). The Curve is None if no curve was written.
    Unless `draws` is set, the drawing is empty, because drawing a curve takes longer than the search."""

    def find(*flags, folder="search", draws=False):
        places = ["--image-root", photos, "--output-dir", tmp_path / folder, "--steps", STEPS]
        with static.scope_guard(static.Scope()), monkeypatch.context() as patch:
            if not draws:
                patch.setattr(drawing, "lr_curve", lambda curve, title: pyplot.figure(figsize=(1, 1)))
            code = lr_find.main([*TINY, *map(str, (*places, *flags))])
        path = tmp_path / folder / "Tiny" / lr_curve.DATA
        return code, lr_curve.read(path) if path.exists() else None

    return find


def rates(low=1e-6, high=10.0, steps=STEPS):
    return [low * (high / low) ** (i / (steps - 1)) for i in range(steps)]


def synthetic(steps=100, noise=0.0, seed=0, high=10.0):
    """Return (rates, losses) of a curve that falls fastest at 0.01, is lowest near 0.1 and then diverges."""
    x = np.log10(rates(high=high, steps=steps))
    values = 2.3 - 1.3 / (1 + np.exp(-3 * (x + 2))) + np.exp(5 * (x + 0.2))
    values += noise * np.random.RandomState(seed).standard_normal(steps)
    if (values > 20).any():
        values = values[: int(np.argmax(values > 20)) + 1]
    return rates(high=high, steps=steps)[: len(values)], values.tolist()


def contents(folder):
    """Return {file: (content, time of the last change)} for all files and links, except those of the finder."""
    paths = [path for path in folder.rglob("*") if path.name not in NAMES and not path.is_dir()]
    return {path.relative_to(folder): (path.read_bytes(), path.lstat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("steps", [20, 100, 1000])
@pytest.mark.parametrize("noise", [0, 0.05])
def test_suggestion_is_steepest_descent_of_smoothed_curve(steps, noise):
    steepest, minimum = lr_curve.suggest(*synthetic(steps, noise), steps)
    assert math.log10(steepest) == pytest.approx(-2, abs=0.5) and math.log10(minimum) == pytest.approx(-1, abs=0.25)


@pytest.mark.parametrize("steps", [20, 100, 1000])
def test_noise_and_rising_losses_have_no_suggestion(steps):
    noise = 1 + 0.2 * np.random.RandomState(0).standard_normal(steps)
    for curve in (noise.tolist(), [1.0] * steps, np.linspace(1, 3, steps).tolist(), [2.0, 1.0]):
        assert lr_curve.suggest(rates(steps=steps)[: len(curve)], curve, steps) is None


def test_noise_after_the_minimum_does_not_prevent_a_suggestion():
    falling, noise = np.linspace(2.3, 1, 30), np.random.RandomState(0).standard_normal(70)
    steepest, minimum = lr_curve.suggest(rates(steps=100), [*falling, *(4 + 1.5 * noise)], 100)
    assert steepest < minimum < rates(steps=100)[30]
    # Neither does a steep fall after the minimum.
    after = [*np.linspace(1, 2.3, 40), *[1.5] * 30]
    steepest, minimum = lr_curve.suggest(rates(steps=100), [*falling, *after], 100)
    assert steepest < minimum < rates(steps=100)[35]


def test_size_of_divergence_does_not_change_suggestion():
    x, y = synthetic()
    assert lr_curve.suggest(x, [*y[:-1], 1e30], 100) == lr_curve.suggest(x, [*y[:-1], 50.0], 100)


def test_smoothed_curve_is_weighted_mean():
    values, weight = np.random.RandomState(0).uniform(1, 2, 60), math.exp(-1 / 3)
    values[20] = 100  # an outlier is limited to the largest of the initial losses
    clipped = np.minimum(values, values[:10].max())
    weights = weight ** np.abs(np.subtract.outer(np.arange(60), np.arange(60)))
    np.testing.assert_allclose(lr_curve.smooth(values.tolist(), 60), weights @ clipped / weights.sum(axis=1))


def test_curve_of_diverged_search_is_smoothed_like_its_suggestion():
    rates, losses = (values[:800] for values in synthetic(1000))
    curve = lr_curve.analyze(rates, losses, 1000, 1, True, {})
    np.testing.assert_array_equal(curve.smoothed, lr_curve.smooth(losses, 1000))
    assert curve.minimum == pytest.approx(rates[np.argmin(curve.smoothed)], rel=0.05)
    steepest, wrong = (float(f"{lr_curve.suggest(rates, losses, steps)[0]:.2g}") for steps in (1000, 800))
    assert curve.steepest == steepest != wrong


def test_file_of_diverged_search_has_the_smoothing_of_all_steps(tmp_path):
    args = config.parse_args(tiny("--image-root", "DATA", "--output-dir", tmp_path))
    search, losses = SimpleNamespace(from_lr=1e-6, to_lr=10.0, steps=400), synthetic(400)[1][:150]
    lr_find._write(search, args.part(lr_find.Options), tmp_path / "Tiny", losses, True, args.as_dict())
    np.testing.assert_array_equal(
        lr_curve.read(tmp_path / "Tiny" / lr_curve.DATA).smoothed, lr_curve.smooth(losses, 400)
    )


def test_divergence_is_four_times_minimum_or_not_finite():
    def steps_until(losses):
        divergence = lr_curve.Divergence(STEPS)
        return next((i for i, loss in enumerate(losses) if divergence.add(loss)), None)

    assert steps_until([1.0] * 12 + [3.9] * 100) is None
    assert 12 < steps_until([1.0] * 12 + [4.5] * 100) < 30
    assert steps_until([0.01, *[1.0] * 50]) is None  # a single small loss at the start is not a minimum
    for value in (math.nan, math.inf):
        assert steps_until([1.0, 1.0, value]) == 2


@pytest.mark.parametrize(("steps", "window"), [(20, 3), (200, 10), (1000, 50)])
def test_divergence_is_that_of_a_running_mean(steps, window):
    losses, means = [1.5] * 12 + [1.01**i for i in range(500)], []
    divergence = lr_curve.Divergence(steps)
    diverged = [divergence.add(loss) for loss in losses].index(True)
    for i in range(9, len(losses)):
        weights = np.exp(-np.arange(i + 1)[::-1] / window)
        means.append(weights @ losses[: i + 1] / weights.sum())
        if means[-1] > 4 * min(means):
            break
    assert diverged == i < 300


@pytest.mark.slow
def test_losses_are_those_of_training_with_same_rates(find, run_train, monkeypatch):
    """An epoch has four batches. With an odd number of batches, training would drop the last batch, but the finder
    would use it."""
    more, count = ["--accumulate-steps", "2", "--mixup", "0.4", "--dropout", "0.3", "--batch-size", "7"], 2
    code, curve = find("--to-lr", 1, *more)
    assert code == 0
    np.testing.assert_allclose(curve.lr, rates(high=1)[: len(curve.lr)], rtol=1e-12)
    assert len(curve.lr) == STEPS and not curve.ended_early and curve.factor == count
    monkeypatch.setitem(schedules.SCHEDULES, "Cosine", (lambda span, step: count * curve.lr[step], ()))
    code, report = run_train("--epochs", 3, "--print-interval", 1, "--run-scope", "train_only", *more)
    assert code == 0
    trained = [loss for key, loss in losses(report).items() if key[1] != "train"]
    trained = [sum(trained[i : i + count]) / count for i in range(0, len(trained), count)]
    assert trained == curve.loss[: len(trained)] and len(trained) == 3 * 2


@pytest.mark.slow
def test_files_are_written_before_any_run_and_suggestion_is_printed(find, run_train, tmp_path, capsys):
    code, curve = find("--to-lr", 1, "--print-interval", 5, draws=True)
    assert code == 0
    folder = tmp_path / "search/Tiny"
    assert {path.name for path in folder.iterdir()} == NAMES
    assert {path.name for path in folder.parent.iterdir()} == {"Tiny"}
    assert (folder / lr_curve.DRAWING).read_bytes().startswith(b"\x89PNG")
    data = strict_json((folder / lr_curve.DATA).read_text())
    assert data["arguments"]["model_arch_name"] == "Tiny" and data["arguments"]["lr"] == 0.05
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == f"suggestion: --lr {curve.steepest:g}"
    assert "epoch 0 step 15 train  loss " in output and "peak lr 1.0 x 1 = 1" in output
    assert curve.lr[0] < curve.steepest < curve.minimum <= 1
    assert run_train("--output-dir", tmp_path / "search", "--resume", "--run-scope", "train_only")[0] == 0
    assert run_folders.newest(folder).name == "0" and {path.name for path in folder.iterdir()} > NAMES


def test_search_does_not_replace_curve_of_simultaneous_search(find, tmp_path, monkeypatch, capsys):
    data = tmp_path / "search/Tiny" / lr_curve.DATA

    def search_while_another_ends(*arguments):
        data.parent.mkdir(parents=True)
        data.write_text("of the other search")
        return [1.0] * STEPS, False

    on_rank_0, held, closed, calls, from_rank_0 = [], [], [], [], exchange.from_rank_0

    def run_on_rank_0(function):
        on_rank_0.append(function)
        try:
            return from_rank_0(function)
        finally:
            on_rank_0.pop()

    def call(function, *arguments):
        calls.append((function.__name__, bool(on_rank_0)))
        return function(*arguments)

    @contextlib.contextmanager
    def barrier():
        calls.append("start of barrier")
        try:
            yield
        finally:
            calls.append("end of barrier")

    def hold(path, subject, warn):
        held.append((path, subject))
        return contextlib.nullcontext()

    monkeypatch.setattr(exchange, "from_rank_0", run_on_rank_0)
    for function in (lr_find._claim, lr_find._write):
        monkeypatch.setattr(lr_find, function.__name__, partial(call, function))
    monkeypatch.setattr(exchange, "exit_barrier", barrier)
    monkeypatch.setattr(lr_find.locks, "held", hold)
    monkeypatch.setattr(lr_find.logger, "close", lambda: closed.append(True))
    monkeypatch.setattr(lr_find, "_search", search_while_another_ends)
    monkeypatch.setattr(lr_curve, "read", lambda path: path.read_text())
    assert find() == (2, "of the other search")
    assert calls == ["start of barrier", ("_claim", True), ("_write", True), "end of barrier"]
    drawing_lock = locks.file_of(data.with_name(lr_curve.DRAWING))
    assert held == [(drawing_lock, f"--output-dir {tmp_path}/search")]
    assert len(closed) == 2  # once at the start and once at the end of the search
    assert (
        f"--output-dir {tmp_path}/search: {data.parent} contains {lr_curve.DATA}; choose a" in capsys.readouterr().err
    )


def test_search_ends_early_if_loss_diverges(find, capsys):
    _, curve = find("--to-lr", 1e4, "--from-lr", 1e-4)
    assert curve.ended_early and lr_curve.SETTLING_STEPS < len(curve.lr) == len(curve.loss) < STEPS
    assert f"curve of {len(curve.lr)} steps" in capsys.readouterr().out


def test_search_ends_at_the_step_of_the_divergence(on_two_ranks):
    """The loss of rank 1 is 0."""
    values = [2.0] * 30 + [2 * 1.05**i for i in range(100)]
    divergence = lr_curve.Divergence(1000)
    steps = next(i for i, value in enumerate(values, 1) if divergence.add(value))

    def search(factor):
        recorder = lr_find.LossRecorder(1000, batches=2)
        with pytest.raises(lr_find.Diverged):
            for value in np.repeat(values, 2):
                recorder.update(factor * value, 8)
        return recorder.losses

    assert on_two_ranks(search, [2], [0]) == [values[:steps]] * 2


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_diverged_search_waits_for_the_gpu(monkeypatch, device):
    def run(settings, loader, exe, compiled, fetchs, *_):
        assert fetchs["loss"][0] == "variable"
        fetchs["loss"][1].update(math.nan, 8)

    waits = []
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(processes, "place", lambda device: device)
    monkeypatch.setattr(paddle.device.cuda, "synchronize", waits.append)
    settings, search = SimpleNamespace(accumulate_steps=1, device=device), SimpleNamespace(steps=STEPS)
    training = SimpleNamespace(settings=settings, fetchs={"loss": ("variable", None)})
    training.loader = training.compiled = training.lr_scheduler = None
    losses, ended_early = lr_find._search(search, None, training)
    assert math.isnan(losses[0]) and ended_early
    assert waits == ["gpu"] * (device == "gpu")


def test_non_finite_loss_ends_search(find, monkeypatch, capsys):
    class Failing(lr_find.LossRecorder):
        def update(self, value, n):
            super().update(math.nan if len(self.losses) == 4 else value, n)

    monkeypatch.setattr(lr_find, "LossRecorder", Failing)
    code, curve = find("--max-bad-steps", 1)
    assert code == 1 and curve.ended_early and curve.steepest is None
    assert len(curve.loss) == 5 and [loss is None for loss in curve.loss] == [False] * 4 + [True]
    assert curve.smoothed == pytest.approx(lr_curve.smooth(curve.loss[:4], STEPS))
    assert (
        "error: --lr: no suggestion, because the loss diverged after 4 steps; use a --from-lr below 1e-06"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("ended_early", "steps", "problem"),
    [
        (True, 9, "the loss diverged after 9 steps; use a --from-lr below 0.1"),
        (True, 10, "the loss does not fall clearly"),
        (False, 9, "the loss does not fall clearly"),
    ],
)
def test_divergence_is_reported_only_before_the_loss_settles(ended_early, steps, problem):
    curve = SimpleNamespace(ended_early=ended_early, smoothed=[1.0] * steps)
    assert lr_find._problem(SimpleNamespace(from_lr=0.1), curve).startswith(problem)


def test_outputs_in_a_configuration_file_are_ignored(tmp_path):
    (tmp_path / "flags.yaml").write_text('report_html: page.html\nprofile_steps: "1:2"\n')
    search, args = lr_find.parse(["--config", str(tmp_path / "flags.yaml")])
    assert (search.from_lr, search.to_lr, search.steps) == (1e-6, 10, 100)
    assert args.benchmark and args.profile_steps is None


def test_curve_that_does_not_fall_has_no_suggestion(find, capsys):
    code, curve = find("--to-lr", 1e-8, "--from-lr", 1e-9)
    assert code == 1 and curve.steepest is None and len(curve.loss) == STEPS
    assert (
        "error: --lr: no suggestion, because the loss does not fall clearly; use more --steps"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_run_in_same_folder_is_not_affected(find, run_train, tmp_path):
    flags = ["--print-interval", 1, "--ema", "0.9"]
    assert run_train("--epochs", 1, *flags, "--output-dir", tmp_path / "search")[0] == 0
    before = contents(tmp_path / "search")
    assert find(*flags, "--optimizer", "AdamW", "--overwrite")[0] == 0
    assert contents(tmp_path / "search") == before
    assert {path.name for path in (tmp_path / "search/Tiny").iterdir()} >= {*NAMES, "0", "latest", "best"}
    code, report = run_train("--epochs", 2, *flags, "--resume", "--output-dir", tmp_path / "search")
    assert code == 0 and (1, "val") in losses(report)


@pytest.mark.slow
def test_pretrained_and_frozen_network_is_searched(find, checkpoint):
    start = ["--from-pretrained-params", checkpoint, "--freeze", "all-but-classifier"]
    _, frozen = find(*start, "--overwrite")
    _, scratch = find("--overwrite")
    assert frozen.loss[0] < scratch.loss[0] - 0.05
    assert frozen.arguments["from_pretrained_params"] == str(checkpoint)
    _, sparse = find(*start, "--asp", "--prune-model", "--overwrite")
    assert sparse.arguments["asp"] and np.isfinite(sparse.loss).all()


def test_recipe_is_chosen_as_in_training(find):
    code, curve = find("--choose-recipe", "--dry-run")
    assert (code, curve) == (0, None)
    code, curve = find("--choose-recipe", "--optimizer", "AdamW", "--to-lr", 1)
    assert curve.arguments["color_jitter"] == 0.2 and curve.arguments["weight_decay"] == 0.01


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_steps_are_captured_as_in_training(find, fake):
    flags = [*NHWC, "--kernels", "native", "--to-lr", 1]
    _, captured = find(*flags, folder="captured")
    [training] = fake.made
    assert training.launches > STEPS // 2
    assert captured.loss == find(*flags, "--cuda-graph", "false", folder="plain")[1].loss


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--amp", "--use-pure-fp16", "--dali-output-fp16", "--scale-loss", "128"]])
def test_steps_are_captured_on_gpu(find, capsys, precision):
    flags = ["--device", "gpu", "--hw-decoder-load", 0, *NHWC, *precision, "--to-lr", 1]
    _, captured = find(*flags, folder="captured")
    assert ", CUDA graph, " in capsys.readouterr().out
    _, plain = find(*flags, "--cuda-graph", "false", folder="plain")
    assert ", CUDA graph, " not in capsys.readouterr().out
    # Some of cuDNN's float32 kernels sum in a different order in each run.
    assert captured.loss == (plain.loss if precision else pytest.approx(plain.loss, rel=1e-3))
    assert len(captured.loss) > STEPS // 2


def test_search_continues_first_stage_beyond_its_end():
    timeline = durations.Timeline(1, (durations.Part(0, 3, 2.0), durations.Part(1, 5, 1.0)))
    schedule = schedules.Schedule(lambda step: 1.0, timeline)
    settings = SimpleNamespace(accumulate_steps=1, copy=lambda origin, **values: values)
    training = SimpleNamespace(lr_scheduler=schedule, settings=settings, _replace=lambda **values: values)
    search = SimpleNamespace(from_lr=1e-6, to_lr=10.0, steps=STEPS)
    values = lr_find._with_rising_rate(search, training)["settings"]
    assert values == {"lr": 10, "benchmark_warmup_steps": 0, "benchmark_steps": STEPS, "max_bad_steps": 10**9}
    actual = []
    for _ in range(STEPS):
        actual.append(schedule.last_lr)
        schedule.step()
    # 2 is the learning-rate factor of the first stage
    np.testing.assert_allclose(actual, [2 * rate for rate in rates()])


def test_rates_of_several_processes_are_multiplied(shard):
    shard(1, 4)
    assert processes.world_size() == 4
    search, settings = SimpleNamespace(from_lr=1e-6, to_lr=10.0, steps=STEPS), SimpleNamespace(accumulate_steps=2)
    settings.copy = lambda origin, **values: values
    schedule = schedules.Schedule(lambda step: 1.0, durations.Timeline(2, (durations.Part(0, 3),)))
    training = SimpleNamespace(lr_scheduler=schedule, settings=settings, _replace=lambda **values: values)
    assert lr_find._with_rising_rate(search, training)["settings"]["benchmark_steps"] == 2 * STEPS
    assert schedule.last_lr == pytest.approx(8e-6)
    schedule.step(STEPS - 1)
    assert schedule.last_lr == pytest.approx(80)


def test_suggestion_states_factor_of_training(tmp_path, capsys, shard):
    """A curve that is still falling at the highest rate causes a warning."""
    args = config.parse_args(tiny("--image-root", "DATA", "--output-dir", tmp_path, "--accumulate-steps", "2"))
    options = args.part(lr_find.Options)
    shard(world_size=3)
    for to_lr, is_warned in ((10.0, False), (0.05, True)):
        search = SimpleNamespace(from_lr=1e-6, to_lr=to_lr, steps=100)
        losses = synthetic(high=to_lr)[1]
        assert lr_find._write(search, options, tmp_path / f"{to_lr:g}", losses, False, args.as_dict()) is None
        curve = lr_curve.read(tmp_path / f"{to_lr:g}" / lr_curve.DATA)
        out, err = capsys.readouterr()
        factor = "(training multiplies --lr by 6, the number of processes times --accumulate-steps)"
        assert out.splitlines()[1:] == [
            f"steepest descent at --lr {curve.steepest:g}, lowest loss at --lr {curve.minimum:g} {factor}",
            "with a warm-up, higher rates may be better, up to the rate with the lowest loss",
            f"suggestion: --lr {curve.steepest:g}",
        ]
        warning = f"warning: --to-lr {to_lr:g}: the loss still falls at this rate; use a higher --to-lr\n"
        assert err == (warning if is_warned else "")


def test_curve_does_not_replace_inputs(photos, tmp_path, capsys):
    file = tmp_path / "search/Tiny" / lr_curve.DATA
    file.parent.mkdir(parents=True)
    file.write_text("lr: 0.1")
    places = ["--image-root", photos, "--output-dir", tmp_path / "search", "--config", file]
    assert lr_find.main([*TINY, *map(str, places), "--overwrite"]) == 2
    assert f"{lr_curve.DATA} in --output-dir {file}: the same file as --config" in capsys.readouterr().err


def test_search_uses_range_of_rank_0(find, monkeypatch):
    real = exchange.from_rank_0

    def from_rank_0(function):
        own = real(function)
        return [1e-5, 1.0, STEPS + 2] if own == [1e-6, 10.0, STEPS] else own

    monkeypatch.setattr(exchange, "from_rank_0", from_rank_0)
    np.testing.assert_allclose(find()[1].lr, rates(1e-5, 1.0, STEPS + 2))


def test_losses_are_means_over_processes(on_two_ranks):
    def search(*losses):
        recorder = lr_find.LossRecorder(STEPS, batches=2)
        for loss in losses:
            recorder.update(loss, 4)
        return recorder.losses

    assert on_two_ranks(search, [1.0, 2.0], [5.0, 5.0]) == [[(1.5 + 5) / 2]] * 2


@pytest.mark.soak
def test_two_processes_write_one_curve_of_mean_losses(launch, tmp_path):
    batch = ["--batch-size", 4, "--print-interval", 1]
    launch(2, "--find-lr", "--report-file", "None", *batch, "--to-lr", 1, "--steps", STEPS)
    files = [path for path in (tmp_path / "output").rglob("*") if path.is_file()]
    assert {path.name for path in files} == NAMES and len(files) == 2
    curve = lr_curve.read(tmp_path / "output/Tiny" / lr_curve.DATA)
    assert curve.factor == 2 and len(curve.loss) == STEPS
    report, _ = launch(2, *batch, "--lr", 1e-6, "--run-scope", "train_only")
    # The rates of the first steps are so low that they hardly change the losses.
    trained = [loss for key, loss in losses(report).items() if key[1] != "train"]
    np.testing.assert_allclose(curve.loss[:3], trained, atol=1e-4)
    logs = [(tmp_path / f"job0/log/workerlog.{rank}").read_text() for rank in range(2)]
    assert [f"suggestion: --lr {curve.steepest:g}" in log for log in logs] == [True, False]
    assert (
        " (training multiplies --lr by 2, the number of processes times --accumulate-steps)" in logs[0]
        and "lr 2e-06" in logs[0]
    )


def test_stopped_search_writes_nothing(find, stop_before, tmp_path, capsys):
    stop_before(train_step=5)
    assert find() == (75, None)
    assert not (tmp_path / "search").exists()
    assert "stopped by" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(NAMES))
def test_earlier_curve_is_replaced_only_with_overwrite(find, tmp_path, capsys, name):
    (tmp_path / "search/Tiny").mkdir(parents=True)
    (tmp_path / "search/Tiny" / name).write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lr_curve, "read", lambda path: None)
        assert find()[0] == 2
        expected = f"{tmp_path}/search/Tiny contains {name}; choose a different folder, or replace the curve with"
        assert expected in capsys.readouterr().err
        assert find("--overwrite", "--dry-run")[0] == 0


def test_unwritable_output_is_error_before_search(find, photos, tmp_path, capsys):
    (tmp_path / "search").write_text("")
    assert find()[0] == 2
    assert "lr_find.json in --output-dir " in capsys.readouterr().err
    (tmp_path / "broken").symlink_to("nowhere")
    assert find("--output-dir", tmp_path / "broken")[0] == 2
    assert f"{tmp_path}/broken is a broken link; remove it" in capsys.readouterr().err
    root = shutil.copytree(photos, tmp_path / "data")
    assert find("--image-root", root, "--output-dir", root / "train")[0] == 2
    assert f"would change the data set's {root}/train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from-lr", "2", "--to-lr", "1"], "--from-lr 2: must be below --to-lr 1; use a lower rate"),
        (["--to-lr", "1e-6"], "--from-lr 1e-06: must be below --to-lr 1e-06"),
        (["--from-lr", "0"], "--from-lr: 0 is not positive; use a number above 0"),
        (["--to-lr", "1e9"], "--to-lr: 1e9 is out of range; use a rate from 1e-10 to 10000"),
        (["--to-lr", "x"], "--to-lr: 'x' is not a number"),
        (["--steps", "5"], "--steps: 5 is too small; use a whole number from 20 to 10000"),
        (["--resume"], "--resume: not supported by lr_find, which starts a new run; remove the flag"),
        (
            ["--from-checkpoint", "x"],
            "--from-checkpoint x: not supported by lr_find, which starts a new run; use --from-pretrained-params",
        ),
        (["--benchmark"], "--benchmark: not supported by lr_find; remove the flag"),
        (["--predictions", "x.csv"], "--predictions x.csv: not supported by lr_find; remove the flag"),
        (["--print-config"], "--print-config: not supported by lr_find; use the flag with train.py"),
        (
            ["--run-scope", "eval_only", "--from-pretrained-params", "x"],
            "--run-scope eval_only: lr_find requires training",
        ),
        (["--step", "30"], "--step: unknown flag; use"),
        (["--image-root", "/nowhere"], "--image-root /nowhere"),
        (["--batch-size", "1000"], "--batch-size 1000: exceeds the 30 training images"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_error(find, tmp_path, capsys, flags, message):
    assert find(*flags)[0] == 2
    assert f"paddle_resnet.lr_find: error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_help_lists_flags_of_finder(capsys):
    with pytest.raises(SystemExit, match="0"):
        lr_find.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag, meaning in (
        ("--from-lr LR", "value of --lr in the first step"),
        ("--to-lr LR", "value of --lr in the last step"),
        ("--steps N", "number of training steps (default: 100)"),
    ):
        assert f"{flag} {meaning}" in text
    assert "flags of train.py are also supported" in text


def curve_file(path, **changes):
    x, y = synthetic()
    lr_curve.write(path, lr_curve.analyze(x, y, 100, 1, True, {}))
    if changes:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.slow
def test_page_shows_curve_of_run_folder(run_train, tmp_path, capsys):
    """The curve is next to the report or, if the report is elsewhere, next to the checkpoints."""
    assert run_train("--run-scope", "train_only")[0] == 0
    shown = {}
    for folder in (tmp_path, tmp_path / "output/Tiny"):
        curve_file(folder / lr_curve.DATA)
        assert report_command.main([str(tmp_path / "report.json"), "--html", str(tmp_path / "page.html")]) == 0
        text = (tmp_path / "page.html").read_text()
        chart = text.partition("<h3>learning-rate finder</h3>")[2].partition("</svg>")[0]
        assert ">--lr</text>" in chart and re.search(r">--lr 0\.0\d+</text>", chart)
        assert [f">{rate}</text>" in chart for rate in ("1e-06", "0.01", "1")] == [True] * 3
        shown[folder] = chart
        assert report_command.main([str(tmp_path / "report.json"), "--html", str(folder / lr_curve.DATA)]) == 2
        (folder / lr_curve.DATA).unlink()
    assert len(set(shown.values())) == 1
    assert "which this command reads" in capsys.readouterr().err
    page.write(tmp_path / "page.html", tmp_path / "report.json")
    assert "learning-rate finder" not in (tmp_path / "page.html").read_text()


def test_first_folder_with_a_curve_is_used(tmp_path):
    places = [tmp_path / name for name in "abc"]
    for folder in places:
        folder.mkdir()
    (places[0] / lr_curve.DATA).mkdir()
    assert lr_curve.path(places) is None
    for folder in places[1:]:
        (folder / lr_curve.DATA).touch()
    assert lr_curve.path(places) == places[1] / lr_curve.DATA


def test_outputs_of_training_do_not_replace_curve(run_train, tmp_path, capsys):
    (tmp_path / "output/Tiny").mkdir(parents=True)
    curve_file(tmp_path / "output/Tiny" / lr_curve.DATA)
    for flag in ("--report-html", "--predictions"):
        assert run_train(flag, tmp_path / "output/Tiny" / lr_curve.DATA)[0] == 2
        assert "the same file as the lr_find curve " in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        *({"lr": []}, {"lr": [1, 1]}, {"loss": None}, {"loss": ["x"]}, {"smoothed": []}, {"steepest": "x"}),
        {"lr": [1], "loss": [1e39], "smoothed": [1]},
        {"lr": [1, 2], "loss": [None, 1], "smoothed": [1]},
        *({"lr": [lr, 1e29], "loss": [1, 1], "smoothed": [1, 1]} for lr in ("x", -1, 1e-30, None)),
        {"lr": [1, 1e30], "loss": [1, 1], "smoothed": [1, 1]},
        *({"lr": [1], "loss": [1], "smoothed": [smoothed]} for smoothed in ("x", None, 1e39)),
        *({"steepest": -1}, {"minimum": 1e300}, {"factor": 0}, {"ended_early": 1}, {"arguments": []}),
    ],
    ids=str,
)
def test_damaged_curve_is_omitted_with_warning(tmp_path, capsys, changes):
    path = tmp_path / lr_curve.DATA
    curve_file(path, **changes)
    with pytest.raises(
        UsageError, match="lr_find.json: not a curve written by lr_find; delete it, or run lr_find with"
    ):
        lr_curve.read(path)
    run = SimpleNamespace(folders=lambda: [tmp_path])
    assert page._lr_curve(run) == ([], None)
    assert f"warning: HTML page: omits the lr_find curve: {path}: not a curve" in capsys.readouterr().err
    path.write_text("[")
    assert page._lr_curve(run) == ([], None)
    path.unlink()
    path.symlink_to("/dev/null")
    assert page._lr_curve(run) == ([], None)


def test_drawing_shows_curve_before_divergence():
    x, y = synthetic()
    curve = lr_curve.analyze(x, [*y[:-1], math.inf], 100, 1, True, {})
    figure = drawing.lr_curve(curve, "a$b")
    [axis] = figure.axes
    low, high = axis.get_ylim()
    assert low < min(y) and max(y[:40]) < high == curve.limit() < 4 and axis.get_xscale() == "log"
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    steepest, minimum = f"steepest descent, --lr {curve.steepest:g}", f"lowest loss, {curve.minimum:g}"
    assert labels == ["loss per step", "smoothed", steepest, minimum]
    lines = [line.get_xydata().tolist() for line in axis.lines]
    assert lines[0][:-1] == [[*pair] for pair in zip(x[:-1], y[:-1], strict=True)]
    assert lines[1] == [[*pair] for pair in zip(x[:-1], curve.smoothed, strict=True)]
    assert [line[0][0] for line in lines[2:]] == [curve.steepest, curve.minimum]
    assert (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == ("a$b", "--lr", "training loss")
    drawing.pyplot.close(figure)


def test_curve_of_one_step_is_drawn_but_has_no_chart(tmp_path):
    for values, smoothed in (([math.nan], []), ([2.0, math.inf], [2.0])):
        curve = lr_curve.analyze(rates()[: len(values)], values, STEPS, 1, True, {})
        assert curve.smoothed == smoothed and curve.steepest is None
        lr_curve.write(tmp_path / lr_curve.DATA, curve)
        drawing.save(drawing.lr_curve(curve, "a$b"), tmp_path / lr_curve.DRAWING)
        assert page._lr_curve(SimpleNamespace(folders=lambda: [tmp_path])) == ([], None)
    lr_curve.write(tmp_path / lr_curve.DATA, lr_curve.analyze([1e-3, 1e-2], [2.0, 1.0], STEPS, 1, True, {}))
    series, suggestion = page._lr_curve(SimpleNamespace(folders=lambda: [tmp_path]))
    assert [name for name, *_ in series] == ["steps", "smoothed"] and suggestion is None


def test_suggestion_requires_ten_steps():
    losses = [2.0 - 0.1 * i for i in range(10)]
    assert lr_curve.suggest(rates(steps=10)[:9], losses[:9], 10) is None
    assert lr_curve.suggest(rates(steps=10), losses, 10)[1] == rates(steps=10)[9]
