"""Learning-rate schedules: functions of the step, with a linear warm-up before them. --lr-scheduler names them.

Another schedule is a function here, an entry of SCHEDULES, and its formula in tests/optimizers/test_schedules.py.
"""

import math
from dataclasses import dataclass

import paddle

from paddle_resnet.job import processes
from utils import logger
from utils.errors import UsageError

ONE_CYCLE_START = 1 / 25  # of the peak, in the first step: fastai's default


@dataclass(frozen=True)
class Span:
    """The steps after the warm-up and the rates between which a schedule moves.

    Attributes:
        steps: number of steps, at least 1.
        peak, low: learning rates.
        first_epoch: epochs before the span, which may be a fraction.
        steps_each_epoch: training steps per epoch.
        args: flags.
    """

    steps: int
    peak: float
    low: float
    first_epoch: int
    steps_each_epoch: int
    args: object

    def fall(self, step, begin=0):
        """The cosine from the peak at step `begin` to the low rate after the last step."""
        progress = min(1.0, (step - begin) / max(1, self.steps - begin))
        return self.low + (self.peak - self.low) * (1 + math.cos(math.pi * progress)) / 2


def cosine(span, step):
    """A cosine from the peak to --min-lr: Loshchilov and Hutter, arXiv:1608.03983, without restarts."""
    return span.fall(step)


def piecewise(span, step):
    """The peak times --lr-decay-factor for each of --lr-decay-epochs that has begun."""
    epoch = span.first_epoch + step / span.steps_each_epoch
    return span.peak * span.args.lr_decay_factor ** sum(epoch >= begin for begin in span.args.lr_decay_epochs)


def polynomial(span, step):
    """(1 - progress) to the power of --lr-power, from the peak to --min-lr."""
    left = max(0.0, 1 - step / span.steps)
    return span.low + (span.peak - span.low) * left**span.args.lr_power


def one_cycle(span, step):
    """A cosine up to the peak during --lr-rise of the steps, then a cosine down to --min-lr: Smith and Topin,
    arXiv:1708.07120, with the cosines of fastai."""
    rise = round(span.args.lr_rise * span.steps)
    if step >= rise:
        return span.fall(step, begin=rise)
    start = span.peak * ONE_CYCLE_START
    return span.peak + (start - span.peak) * (1 + math.cos(math.pi * step / rise)) / 2


def flat_cosine(span, step):
    """The peak during --lr-flat of the steps, then a cosine down to --min-lr: fastai's fit_flat_cos."""
    return span.fall(max(step, flat := round(span.args.lr_flat * span.steps)), begin=flat)


SCHEDULES = {
    "Cosine": cosine,
    "Piecewise": piecewise,
    "Poly": polynomial,
    "OneCycle": one_cycle,
    "FlatCosine": flat_cosine,
}


class Schedule(paddle.optimizer.lr.LRScheduler):
    """A schedule after a linear warm-up, advanced once per step. Its rate depends on the number of the step alone.

    Args:
        rate: function from the step after the warm-up to the learning rate.
        warmup_steps: steps of the warm-up, which ends at rate(0).
        warmup_start: learning rate of step 0 if there is a warm-up.
    """

    def __init__(self, rate, warmup_steps=0, warmup_start=0.0):
        self._rate, self._warmup_steps, self._warmup_start = rate, warmup_steps, warmup_start
        super().__init__(rate(0))

    def get_lr(self):
        step = self.last_epoch - self._warmup_steps  # Paddle counts steps under this name
        if step >= 0:
            return self._rate(step)
        return self._warmup_start + (self._rate(0) - self._warmup_start) * self.last_epoch / self._warmup_steps


def build_lr_scheduler(args, steps_each_epoch):
    """The schedule of --lr-scheduler after a linear warm-up.

    The peak is --lr times the number of processes, and so is --min-lr: Goyal et al., arXiv:1706.02677.

    Args:
        args: flags.
        steps_each_epoch: training steps per epoch.
    Returns:
        Schedule, to be advanced after each step.
    Raises:
        UsageError: the warm-up does not start below the rate at which it ends.
    """
    peak, low = (rate * processes.world_size() for rate in (args.lr, args.min_lr))
    warmup_epochs = args.warmup_epochs
    if warmup_epochs > args.epochs:
        logger.warn(f"--warmup-epochs {warmup_epochs} exceeds --epochs: the warm-up takes all {args.epochs} epochs")
        warmup_epochs = args.epochs
    warmup_steps = warmup_epochs * steps_each_epoch
    # At least 1: a run that is all warm-up never reaches the schedule.
    steps = max(1, args.epochs * steps_each_epoch - warmup_steps)
    span = Span(steps, peak, low, warmup_epochs, steps_each_epoch, args)
    schedule = SCHEDULES[args.lr_scheduler]
    if warmup_steps and args.warmup_start_lr >= schedule(span, 0):
        raise UsageError(
            f"--warmup-start-lr {args.warmup_start_lr:g} is not below the {schedule(span, 0):g} at which the warm-up "
            f"ends, with --lr {args.lr:g} times {processes.world_size()} processes; use a lower one, or "
            "--warmup-epochs 0"
        )
    return Schedule(lambda step: schedule(span, step), warmup_steps, args.warmup_start_lr)
