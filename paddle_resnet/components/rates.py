"""Learning rates: the peak, the warm-up, the schedule and the factors of layers."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder


@dataclass(frozen=True)
class Settings:
    lr: float = flag(
        0.256,
        "peak learning rate for one process and one batch per step; the run multiplies it by the number of "
        "processes and by --accumulate-steps",
        topic="schedule",
        parse=numbers.not_negative_number,
    )
    warmup_epochs: int = flag(
        5,
        "number of epochs of linear warm-up; with --iter-unit batch, number of steps, which is 0 if not set",
        topic="schedule",
        parse=numbers.not_negative,
        depends_on=("iter_unit",),
    )
    lr_decay_by_layer: float = flag(
        1.0,
        "ratio of the learning rate of each network part (stem, block, ...) to that of the next part",
        topic="fine-tune",
        parse=numbers.positive_ratio,
        metavar="F",
    )
    classifier_lr_factor: float = flag(
        1.0,
        "factor by which the learning rate of the last layer is multiplied",
        topic="fine-tune",
        parse=numbers.factor,
        metavar="F",
    )
    warmup_start_lr: float = flag(
        0.0,
        "learning rate at step 0 of the warm-up; not multiplied like --lr",
        topic="schedule",
        parse=numbers.not_negative_number,
    )
    lr_scheduler: str = flag(
        "Cosine",
        "learning-rate schedule after the warm-up; see docs/optimizer.md for the formulas",
        topic="schedule",
        choices=["Cosine", "Piecewise", "Poly", "OneCycle", "FlatCosine"],
    )
    min_lr: float = flag(
        0.0,
        "final learning rate in all schedules except Piecewise; like --lr, multiplied by the number of processes "
        "and --accumulate-steps",
        topic="schedule",
        parse=numbers.not_negative_number,
        used_by=("lr_scheduler", ("Cosine", "Poly", "OneCycle", "FlatCosine")),
    )
    lr_decay_epochs: list[float] = flag(
        [30.0, 60.0, 80.0],
        "epochs at which Piecewise multiplies the learning rate by --lr-decay-factor; with --iter-unit batch, steps",
        topic="schedule",
        parse=numbers.list_of(numbers.not_negative_number),
        metavar="E,...",
        depends_on=("iter_unit",),
        used_by=("lr_scheduler", ("Piecewise",)),
    )
    lr_decay_factor: float = flag(
        0.1,
        "factor by which Piecewise multiplies the learning rate at each of --lr-decay-epochs",
        topic="schedule",
        parse=numbers.factor,
        used_by=("lr_scheduler", ("Piecewise",)),
    )
    lr_power: float = flag(
        2.0,
        "exponent of the Poly schedule",
        topic="schedule",
        parse=numbers.positive_number,
        used_by=("lr_scheduler", ("Poly",)),
    )
    lr_rise: float = flag(
        0.25,
        "fraction of the steps during which OneCycle rises to the peak",
        topic="schedule",
        parse=numbers.ratio,
        used_by=("lr_scheduler", ("OneCycle",)),
    )
    lr_flat: float = flag(
        0.75,
        "fraction of the steps during which FlatCosine stays at the peak",
        topic="schedule",
        parse=numbers.ratio,
        used_by=("lr_scheduler", ("FlatCosine",)),
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --min-lr exceeds --lr."""
    if settings.min_lr > settings.lr:
        yield Conflict(
            f"--min-lr {settings.min_lr:g}: exceeds --lr {settings.lr:g}; use a smaller value", ("min_lr",), ("lr",)
        )


def add(step: "StepBuilder") -> None:
    """Multiply the learning rate of each parameter by the factor of its layer."""
    from paddle.utils import unique_name

    from paddle_resnet import graph
    from paddle_resnet.models import parts

    decay, classifier_factor = step.part(Settings).lr_decay_by_layer, step.part(Settings).classifier_lr_factor
    if decay == classifier_factor == 1:
        return
    factors = parts.rate_factors(step.model, decay, classifier_factor)
    block, updates = graph.block(step.main), graph.updates(step.main)
    at, rates = itertools.count(block.ops.index(updates[0])), {}
    for op in updates:
        factor, rate = factors[op.input("Param")[0]], block.var(op.input("LearningRate")[0])
        if factor == 1:
            continue
        if factor not in rates:
            name = unique_name.generate(f"{rate.name}_scaled")
            rates[factor] = block.create_var(name=name, shape=rate.shape, dtype=rate.dtype, stop_gradient=True)
            graph.insert(block, next(at), "scale", {"X": rate}, {"Out": rates[factor]}, scale=float(factor))
        graph.rename_input(op, rate.name, rates[factor].name)
    graph.sync(block)
