"""Compute the length of a run, and the steps after which the run evaluates and saves. --iter-unit determines the unit
of --warmup-epochs, --lr-decay-epochs, --save-interval and --eval-interval."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError, counted

MOST_MINUTES = 366 * 24 * 60  # maximum duration of a run
CHOSEN_FOR_BUDGET = ("epochs", "warmup_epochs")  # flags that --budget-minutes chooses unless they are explicit


def _minutes(text):
    value = numbers.positive_number(text)
    if value > MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text} minutes are too long; use at most {MOST_MINUTES}, which is a year")
    return value


@dataclass(frozen=True)
class Settings:
    iter_unit: str = flag(
        "epoch",
        "unit of --warmup-epochs, --lr-decay-epochs, --save-interval and --eval-interval; batch: training steps, "
        "and --num-iter sets the length of the run",
        topic="schedule",
        choices=["epoch", "batch"],
    )
    num_iter: int | None = flag(
        None,
        "number of training steps, with --iter-unit batch",
        topic="schedule",
        parse=numbers.or_none(numbers.positive),
        metavar="N",
        used_by=("iter_unit", ("batch",)),
    )
    epochs: int = flag(
        90,
        "number of epochs to train; requires --iter-unit epoch",
        topic="schedule",
        parse=numbers.positive,
        used_by=("iter_unit", ("epoch",)),
    )
    budget_minutes: float | None = flag(
        None,
        "duration of the whole run in minutes, from which the run chooses --epochs; includes startup, evaluations and "
        "checkpoints",
        topic="schedule",
        parse=numbers.or_none(_minutes),
        metavar="N",
        depends_on=("epochs",),
        used_by=("iter_unit", ("epoch",)),
    )
    eval_interval: int = flag(
        1,
        "number of epochs between evaluations; with --iter-unit batch, number of steps, which is --num-iter if "
        "not set; except with --run-scope train_only, the run always ends with an evaluation",
        topic="checkpoints",
        kind="saving",
        parse=numbers.positive,
        depends_on=("iter_unit",),
    )
    save_interval: int = flag(
        1,
        "number of epochs between checkpoints; with --iter-unit batch, number of steps, which is --num-iter if "
        "not set; the run always ends with a checkpoint",
        topic="checkpoints",
        kind="saving",
        parse=numbers.positive,
        depends_on=("iter_unit",),
    )
    save_interval_steps: int = flag(
        0,
        "number of steps between additional checkpoints within an epoch; 0: no additional checkpoints",
        topic="checkpoints",
        kind="saving",
        parse=numbers.not_negative,
        used_by=("iter_unit", ("epoch",)),
    )

    @property
    def length(self) -> int:
        """The length of the run in the unit --iter-unit; 0 if --num-iter is missing."""
        return (self.num_iter or 0) if self.iter_unit == "batch" else self.epochs


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --iter-unit batch is set without --num-iter."""
    if settings.iter_unit == "batch" and settings.num_iter is None:
        yield Conflict("--iter-unit batch: requires the number of training steps; add --num-iter N")


class Stop(NamedTuple):
    """A position at which training pauses, because the epoch ends or the run evaluates or saves: after `step` batches
    of epoch `epoch`. `ends_epoch` is true if this is the end of the epoch. `step` is None in a benchmark and in a run
    without training, which never pause."""

    epoch: int
    step: int | None = None
    ends_epoch: bool = True
    evaluates: bool = True
    saves: bool = True

    @property
    def averages_bn(self) -> bool:
        """Whether the processes average their BN statistics at this stop. A run ends with averaged statistics even
        with --run-scope train_only, because `evaluates` is true at the end of every run."""
        return self.ends_epoch or self.evaluates

    def place(self) -> dict:
        """Return {"step": completed batches} for log entries within an epoch, or {} at the end of the epoch."""
        return {} if self.ends_epoch else {"step": self.step}


class Part(NamedTuple):
    """A stage: its first epoch, its training steps per epoch, and its learning-rate factor."""

    first_epoch: int
    steps: int
    lr_factor: float = 1.0


class Timeline(NamedTuple):
    """The number of training steps in each epoch, which depends on the batch size of the stage (--sizes).

    Attributes:
        accumulate_steps: batches per training step.
        parts: one Part per stage.
    """

    accumulate_steps: int
    parts: tuple[Part, ...]

    def steps(self, epoch: int) -> int:
        """Return the number of training steps of an epoch."""
        return self._part(epoch).steps

    def batches(self, epoch: int) -> int:
        """Return the number of batches that training uses in an epoch."""
        return self.steps(epoch) * self.accumulate_steps

    def epochs_before(self, epoch: float) -> list[float]:
        """Return the number of epochs of each part before an epoch. The epoch can be fractional: 2.5 is the middle of
        epoch 2."""
        ends = [*(part.first_epoch for part in self.parts[1:]), math.inf]
        return [max(0, min(epoch, end) - part.first_epoch) for part, end in zip(self.parts, ends, strict=True)]

    def steps_before(self, epoch: float) -> float:
        """Return the number of training steps before an epoch, which can be fractional."""
        return sum(epochs * part.steps for epochs, part in zip(self.epochs_before(epoch), self.parts, strict=True))

    def batches_before(self, epoch: float) -> float:
        return self.steps_before(epoch) * self.accumulate_steps

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within the epoch) for a training step, which is counted from the start of the run."""
        part = next(part for part in reversed(self.parts) if self.steps_before(part.first_epoch) <= step)
        epochs, rest = divmod(step - self.steps_before(part.first_epoch), part.steps)
        return part.first_epoch + epochs, rest

    def lr_factor(self, step: int) -> float:
        """Return the learning-rate factor of a training step."""
        return self._part(self.position(step)[0]).lr_factor

    def _part(self, epoch):
        return next(part for part in reversed(self.parts) if part.first_epoch <= epoch)


def used_batches(batches: int, accumulate_steps: int) -> int:
    """Return the number of batches per epoch that training uses, a multiple of --accumulate-steps.

    Raises:
        UsageError: the loader has fewer batches than --accumulate-steps.
    """
    if batches < accumulate_steps:
        raise UsageError(
            f"--accumulate-steps {accumulate_steps}: the loader has {counted(batches, 'batch', 'batches')} per epoch; "
            "use a smaller number"
        )
    return batches - batches % accumulate_steps


def uniform(accumulate_steps: int, batches: int) -> Timeline:
    """Return the Timeline of a run whose epochs all have `batches` batches.

    Raises:
        UsageError: an epoch has fewer batches than --accumulate-steps.
    """
    return Timeline(accumulate_steps, (Part(0, used_batches(batches, accumulate_steps) // accumulate_steps),))


def steps_of(settings: Settings, timeline: Timeline, duration: float) -> float:
    """Convert a duration, given in the same unit as --warmup-epochs and --lr-decay-epochs, to training steps."""
    return duration if settings.iter_unit == "batch" else timeline.steps_before(duration)


def total_steps(settings: Settings, timeline: Timeline) -> float:
    """Return the number of training steps of the run."""
    if settings.iter_unit == "epoch":
        return timeline.steps_before(settings.epochs)
    assert settings.num_iter is not None  # see conflicts
    return settings.num_iter


def first_pass(settings: Settings, timeline: Timeline) -> int | None:
    """Return the number of batches before training first evaluates, saves or ends an epoch."""
    return next(stops(settings, timeline)).step


def stops(settings: Settings, timeline: Timeline, done: int = 0) -> Iterator[Stop]:
    """Yield a Stop for the end of each epoch, each evaluation and each checkpoint of --save-interval after the first
    `done` steps. --save-interval-steps adds no Stop.

    Args:
        settings: length of the run, and intervals of evaluations and checkpoints.
        timeline: number of training steps in each epoch.
        done: number of completed training steps.
    """
    if settings.iter_unit == "batch":
        total, ends = settings.num_iter, ((count, count) for count in range(done + 1, settings.num_iter + 1))
    else:
        total, first = settings.epochs, timeline.position(done)[0]
        ends = ((count, timeline.steps_before(count)) for count in range(first + 1, total + 1))
    for count, steps in ends:
        epoch, last = timeline.position(steps - 1)
        evaluates, saves = (
            count == total or count % interval == 0 for interval in (settings.eval_interval, settings.save_interval)
        )
        ends_epoch = last + 1 == timeline.steps(epoch)
        if ends_epoch or evaluates or saves:
            yield Stop(epoch, (last + 1) * timeline.accumulate_steps, ends_epoch, evaluates, saves)
