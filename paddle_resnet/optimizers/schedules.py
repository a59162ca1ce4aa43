"""Learning-rate schedules for --lr-scheduler. A schedule is a function of the step, and begins after a linear warm-up.

To add a schedule, add a function to this file, an entry to SCHEDULES, its name to the choices of --lr-scheduler
(components/rates.py), and a test of its formula to tests/optimizers/test_schedules.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import paddle

from paddle_resnet.components import rates
from paddle_resnet.job import processes
from paddle_resnet.settings import durations
from paddle_resnet.settings.durations import Timeline
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError

ONE_CYCLE_START = 1 / 25  # learning rate of the first step as a fraction of the peak; fastai's default


@dataclass(frozen=True)
class Span:
    """The steps after the warm-up, and the range of learning rates in these steps.

    Attributes:
        steps: number of steps after the warm-up, at least 1.
        peak, low: highest and final learning rate.
        first_step: number of warm-up steps before the span.
        steps_of: function that converts a duration in the unit of --lr-decay-epochs to steps.
    """

    steps: float
    peak: float
    low: float
    first_step: float
    steps_of: Callable

    def fall(self, step: float, begin: int = 0) -> float:
        """Return the value of a cosine that falls from `peak` at step `begin` to `low` after the last step."""
        progress = min(1.0, (step - begin) / max(1, self.steps - begin))
        return self.low + (self.peak - self.low) * (1 + math.cos(math.pi * progress)) / 2


def cosine(span: Span, step: float) -> float:
    """Return the learning rate of a cosine without restarts from the peak to --min-lr (Loshchilov and Hutter,
    arXiv:1608.03983)."""
    return span.fall(step)


def piecewise(span: Span, begins: list[int], factor: float, step: float) -> float:
    """Return the peak, multiplied by --lr-decay-factor once for each entry of --lr-decay-epochs that has passed. The
    entries count from the start of the run, but `step` counts from the end of the warm-up."""
    return span.peak * factor ** sum(span.first_step + step >= span.steps_of(begin) for begin in begins)


def polynomial(span: Span, power: float, step: float) -> float:
    """Return the learning rate of a polynomial of degree --lr-power that falls from the peak to --min-lr."""
    left = max(0.0, 1 - step / span.steps)
    return span.low + (span.peak - span.low) * left**power


def one_cycle(span: Span, rise: float, step: float) -> float:
    """Return the learning rate of a schedule that rises to the peak along a cosine until the fraction of completed
    steps reaches --lr-rise, and then falls to --min-lr along a cosine. The schedule is that of Smith and Topin,
    arXiv:1708.07120, but with cosines instead of linear ramps, as in fastai."""
    rise = round(rise * span.steps)
    if step >= rise:
        return span.fall(step, begin=rise)
    start = span.peak * ONE_CYCLE_START
    return span.peak + (start - span.peak) * (1 + math.cos(math.pi * step / rise)) / 2


def flat_cosine(span: Span, flat: float, step: float) -> float:
    """Return the learning rate of a schedule that stays at the peak until the fraction of completed steps reaches
    --lr-flat, and then falls to --min-lr along a cosine, like fastai's fit_flat_cos."""
    return span.fall(max(step, flat := round(flat * span.steps)), begin=flat)


SCHEDULES = {  # {name: (function, flags whose values are the arguments between span and step)}
    "Cosine": (cosine, ()),
    "Piecewise": (piecewise, ("lr_decay_epochs", "lr_decay_factor")),
    "Poly": (polynomial, ("lr_power",)),
    "OneCycle": (one_cycle, ("lr_rise",)),
    "FlatCosine": (flat_cosine, ("lr_flat",)),
}


class Schedule(paddle.optimizer.lr.LRScheduler):
    """A linear warm-up followed by a schedule, advanced once per training step. The learning rate depends only on the
    step, and includes the learning-rate factor of the step's stage (--sizes).

    Args:
        rate: function that returns the learning rate, given the number of steps since the warm-up.
        timeline: durations.Timeline.
        warmup_steps: number of warm-up steps; the warm-up ends at the learning rate rate(0).
        warmup_start: learning rate of step 0, without the factor of the stage, if warmup_steps is positive.

    Attributes:
        timeline: durations.Timeline of the run.
        batch: index of the next batch within its training step.
    """

    def __init__(self, rate, timeline, warmup_steps: float = 0, warmup_start: float = 0.0):
        self.batch, self.timeline = 0, timeline
        self._rate, self._warmup_steps, self._warmup_start = rate, warmup_steps, warmup_start
        super().__init__(rate(0))

    @property
    def done(self) -> int:
        """Return the number of completed steps."""
        return self.last_epoch  # Paddle's name for the step count

    @property
    def batches(self) -> int:
        """Return the number of completed batches."""
        return self.done * self.timeline.accumulate_steps + self.batch

    def adopt(self, other: "Schedule") -> None:
        """Use the learning rates of a different schedule, starting with the current step."""
        self._rate, self._warmup_steps, self._warmup_start = other._rate, other._warmup_steps, other._warmup_start
        self.step(self.done)

    def get_lr(self) -> float:
        return self._of_schedule() * self.timeline.lr_factor(self.done)

    def _of_schedule(self):
        step = self.done - self._warmup_steps
        if step >= 0:
            return self._rate(step)
        return self._warmup_start + (self._rate(0) - self._warmup_start) * self.done / self._warmup_steps


@dataclass(frozen=True)
class Options(rates.Settings, durations.Settings):
    """The flags of the schedule, the warm-up and the length of the run."""


def build_lr_scheduler(options: Options, timeline: Timeline) -> Schedule:
    """Build the schedule that --lr-scheduler selects, including the linear warm-up.

    --lr and --min-lr are multiplied by the number of processes and --accumulate-steps (Goyal et al., arXiv:1706.02677).

    Args:
        options: the flags of the schedule.
        timeline: durations.Timeline.
    Returns:
        Schedule, to be advanced after each step.
    Raises:
        UsageError: the warm-up does not increase the learning rate.
    """
    factor = processes.world_size() * timeline.accumulate_steps
    peak, low = (rate * factor for rate in (options.lr, options.min_lr))
    steps_of = functools.partial(durations.steps_of, options, timeline)
    total, warmup_steps = durations.total_steps(options, timeline), steps_of(options.warmup_epochs)
    if warmup_steps > total:
        logger.warn(
            f"--warmup-epochs {options.warmup_epochs}: longer than the run, so the whole run is warm-up; use a lower "
            "value"
        )
        warmup_steps = total
    # If the run consists only of warm-up, only rate(0) is used, but a span must have at least one step.
    span = Span(max(1, total - warmup_steps), peak, low, warmup_steps, steps_of)
    function, flags = SCHEDULES[options.lr_scheduler]
    rate = functools.partial(function, span, *(getattr(options, flag) for flag in flags))
    if warmup_steps and options.warmup_start_lr >= rate(0):
        raise UsageError(
            f"--warmup-start-lr {options.warmup_start_lr:g}: not below {rate(0):g}, the learning rate after the "
            f"warm-up (--lr {options.lr:g} times {factor} for processes and --accumulate-steps); use a lower value, "
            "or --warmup-epochs 0"
        )
    return Schedule(rate, timeline, warmup_steps, options.warmup_start_lr)
