"""Comparison of each learning rate schedule with its closed form in float64, at every step and after a resume."""

import math

import numpy as np
import paddle
import pytest

from paddle_resnet.optimizers import schedules
from paddle_resnet.settings import durations
from paddle_resnet.utils.errors import UsageError

EPOCHS, STEPS = 10, 7  # epochs; steps per epoch
PEAK, LOW = 0.4, 0.01
START = {"OneCycle": PEAK / 50}  # --warmup-start-lr, if it is not 0.05; OneCycle starts at PEAK / 25


def rates(scheduler, steps=EPOCHS * STEPS):
    result = []
    for _ in range(steps):
        result.append(scheduler.last_lr)
        scheduler.step()
    return result


def half_cosine(high, low, progress):
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * progress))


def piecewise(t, epoch, n):
    return PEAK * (1 if epoch < 4 else 0.2 if epoch < 6.5 else 0.04)


def one_cycle(t, epoch, n):
    rise = round(0.3 * n)
    if t < rise:
        return half_cosine(PEAK / 25, PEAK, t / rise)
    return half_cosine(PEAK, LOW, (t - rise) / (n - rise))


def flat_cosine(t, epoch, n):
    flat = round(0.6 * n)
    return PEAK if t < flat else half_cosine(PEAK, LOW, (t - flat) / (n - flat))


# {name: (flags, formula)}. Each formula is a function of three values: the number of steps since the warm-up, the
# epoch, and the total number of steps after the warm-up.
FORMULAS = {
    "Cosine": (f"--min-lr {LOW}", lambda t, epoch, n: half_cosine(PEAK, LOW, t / n)),
    "Piecewise": ("--lr-decay-epochs 4,6.5 --lr-decay-factor 0.2", piecewise),
    "Poly": (f"--min-lr {LOW} --lr-power 3", lambda t, epoch, n: LOW + (PEAK - LOW) * (1 - t / n) ** 3),
    "OneCycle": (f"--min-lr {LOW} --lr-rise 0.3", one_cycle),
    "FlatCosine": (f"--min-lr {LOW} --lr-flat 0.6", flat_cosine),
}


def expected(name, warmup_epochs):
    _, formula = FORMULAS[name]
    warmup, n = warmup_epochs * STEPS, (EPOCHS - warmup_epochs) * STEPS
    start, end = START.get(name, 0.05), formula(0, warmup_epochs, n)
    return [
        start * (1 - step / warmup) + end * step / warmup if step < warmup else formula(step - warmup, step / STEPS, n)
        for step in range(EPOCHS * STEPS)
    ]


def build(parse, name, warmup_epochs):
    flags = f"--lr-scheduler {name} {FORMULAS[name][0]} --lr {PEAK} --epochs {EPOCHS} --warmup-epochs {warmup_epochs}"
    args = parse(*flags.split(), "--warmup-start-lr", START.get(name, 0.05))
    return schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, STEPS))


def test_each_schedule_has_a_formula():
    assert set(FORMULAS) == set(schedules.SCHEDULES)


@pytest.mark.parametrize("warmup_epochs", [0, 2])
@pytest.mark.parametrize("name", FORMULAS)
def test_schedule_matches_formula_and_resumes(parse, name, warmup_epochs):
    *result, after, later = rates(build(parse, name, warmup_epochs), EPOCHS * STEPS + 2)
    np.testing.assert_allclose(result, expected(name, warmup_epochs), rtol=1e-12, atol=1e-15)
    assert after == later == pytest.approx(0.04 * PEAK if name == "Piecewise" else LOW)  # after the last step
    resumed = build(parse, name, warmup_epochs)
    for _ in range(33):
        resumed.step()
    assert rates(resumed, EPOCHS * STEPS - 33) == result[33:]


def test_learning_rate_is_multiplied_by_the_factor_of_the_stage(parse):
    args = parse(*f"--lr-scheduler Poly --lr {PEAK} --epochs {EPOCHS} --warmup-epochs 2".split())
    parts = durations.Part(0, STEPS), durations.Part(1, STEPS, 2.0), durations.Part(5, STEPS, 0.5)
    result = rates(schedules.build_lr_scheduler(args.part(schedules.Options), durations.Timeline(1, parts)))
    plain = rates(
        schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, STEPS))
    )
    factors = np.repeat([1, 2, 0.5], [STEPS, 4 * STEPS, 5 * STEPS])
    np.testing.assert_allclose(result, plain * factors, rtol=1e-12)


def test_batches_of_all_steps_are_counted(parse):
    args = parse("--accumulate-steps", "4")
    schedule = schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 8))
    rates(schedule, 3)
    assert (schedule.done, schedule.batches) == (3, 12)
    schedule.batch = 2
    assert schedule.batches == 14


def test_fall_may_take_a_single_step():
    span = schedules.Span(10, PEAK, LOW, 0, None)
    assert [span.fall(step, begin=9) for step in (9, 10, 11)] == pytest.approx([PEAK, LOW, LOW])
    assert span.fall(10, begin=10) == PEAK


def test_adopted_schedule_applies_from_the_current_step(parse):
    schedule = build(parse, "OneCycle", 0)
    rates(schedule, 5)
    other = rates(build(parse, "Poly", 2))
    schedule.adopt(build(parse, "Poly", 2))
    assert rates(schedule, 30) == other[5:35]


def test_default_schedule_equals_paddle_schedulers(parse):
    args = parse("--lr", "0.4", "--epochs", "10", "--warmup-epochs", "2", "--warmup-start-lr", "0.1")
    cosine = paddle.optimizer.lr.CosineAnnealingDecay(0.4, T_max=8 * STEPS)
    reference = paddle.optimizer.lr.LinearWarmup(cosine, 2 * STEPS, 0.1, 0.4)
    np.testing.assert_allclose(
        rates(
            schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, STEPS))
        ),
        rates(reference),
        rtol=1e-14,
    )


def test_peak_and_minimum_scale_with_numbers_of_processes_and_accumulated_batches(parse, shard):
    flags = ["--lr", "0.1", "--min-lr", "0.01", "--epochs", "4", "--warmup-epochs", "1", "--accumulate-steps", "2"]
    args = parse(*flags)
    shard(world_size=4)
    result = rates(
        schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 10)), 21
    )
    assert max(result) == pytest.approx(0.8)
    assert result[-1] == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("lr", "start", "schedule", "after"),
    [("0", "0", "Cosine", "0"), ("0.1", "0.1", "Cosine", "0.1"), ("0.1", "0.005", "OneCycle", "0.004")],
)
def test_warmup_that_does_not_raise_the_rate_is_rejected(parse, lr, start, schedule, after):
    flags = ["--lr", lr, "--warmup-start-lr", start, "--lr-scheduler", schedule]
    args = parse("--epochs", "2", "--warmup-epochs", "1", *flags)
    after = f"not below {after}, the learning rate after the warm-up .--lr {lr} times 1 for processes"
    with pytest.raises(UsageError, match=f"--warmup-start-lr {start}: {after} .* --warmup-epochs 0"):
        schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 5))
    args.warmup_epochs = 0
    schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 5))


def test_warmup_longer_than_run_is_shortened_with_warning(parse, capsys):
    args = parse("--lr", "0.4", "--epochs", "2", "--warmup-epochs", "2", "--lr-scheduler", "Poly")
    schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 10))
    assert capsys.readouterr().err == ""
    args = parse("--lr", "0.4", "--epochs", "2", "--warmup-epochs", "5")
    result = rates(
        schedules.build_lr_scheduler(args.part(schedules.Options), durations.uniform(args.accumulate_steps, 10)), 20
    )
    np.testing.assert_allclose(result, [0.4 * step / 20 for step in range(20)])
    assert "--warmup-epochs 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-power 3", "--lr-power 3.0: not used by --lr-scheduler Cosine; remove it, or use --lr-scheduler Poly"),
        ("--lr-scheduler Piecewise --min-lr 0.1", "--min-lr 0.1: not used by --lr-scheduler Piecewise"),
        ("--lr 0.1 --min-lr 0.2", "--min-lr 0.2: exceeds --lr 0.1"),
    ],
)
def test_flags_without_effect_are_rejected(parse, flags, message):
    with pytest.raises(UsageError) as error:
        parse(*flags.split())
    assert message in str(error.value)
