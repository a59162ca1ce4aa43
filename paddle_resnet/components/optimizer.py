"""The optimizer: update rule, its hyperparameters, and weight decay."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import numbers

_ADAPTIVE = ", ".join(name for name, rule in OPTIMIZERS.items() if rule.is_adaptive)


def _epsilon(text):
    value = numbers.number(text)
    if value < 1e-30:
        raise argparse.ArgumentTypeError(f"{text} is too small for float32; use 1e-30 or more, such as 1e-8")
    return value


def _users(name):
    return tuple(optimizer for optimizer, rule in OPTIMIZERS.items() if name in rule.flags)


@dataclass(frozen=True)
class Settings:
    optimizer: str = flag(
        "Momentum",
        f"update rule; one of {', '.join(OPTIMIZERS)}; see docs/optimizer.md for the formulas",
        topic="optimizer",
        choices=list(OPTIMIZERS),
        metavar="NAME",
    )
    momentum: float = flag(
        0.875,
        f"weight of the previous velocity ({', '.join(_users('momentum'))})",
        topic="optimizer",
        parse=numbers.ratio,
        used_by=("optimizer", _users("momentum")),
    )
    beta1: float = flag(
        0.9,
        f"weight of the previous first moment ({', '.join(_users('beta1'))})",
        topic="optimizer",
        parse=numbers.below_one,
        used_by=("optimizer", _users("beta1")),
    )
    beta2: float = flag(
        0.999,
        f"weight of the previous second moment ({', '.join(_users('beta2'))})",
        topic="optimizer",
        parse=numbers.below_one,
        used_by=("optimizer", _users("beta2")),
    )
    opt_epsilon: float = flag(
        1e-8,
        f"term added to the square root of the second moment ({', '.join(_users('opt_epsilon'))})",
        topic="optimizer",
        parse=_epsilon,
        used_by=("optimizer", _users("opt_epsilon")),
    )
    weight_decay: float = flag(
        3.0517578125e-05,
        f"coefficient of L2 weight decay, which is decoupled from the gradient in {_ADAPTIVE}",
        topic="regularize",
        parse=numbers.not_negative_number,
    )
    bn_weight_decay: bool = flag(
        False,
        "apply weight decay also to the scale and shift of normalization layers and to other per-channel factors",
        topic="regularize",
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if a value is invalid for the optimizer."""
    if settings.optimizer == "RAdam" and settings.opt_epsilon < 1e-12:
        yield Conflict(
            f"--opt-epsilon {settings.opt_epsilon:g}: too small for --optimizer RAdam; use 1e-12 or more",
            ("opt_epsilon",),
            ("optimizer",),
        )
