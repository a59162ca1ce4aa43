"""Declared conflicts between flags. A run with conflicting flags exits with code 2 and an error that names both flags.

All combinations of axis values that are not in PAIRS must work.
"""

from typing import NamedTuple

from axes import AXES


class Pair(NamedTuple):
    """Values of two axes that conflict: each value in `values` with each value in `others`. The error message contains
    all strings in `names`."""

    axis: str
    values: tuple
    other_axis: str
    others: tuple
    names: tuple


def _all_but(axis, *values):
    return tuple(value for value in AXES[axis] if value not in values)


RECORDS = ("recordio", "tfrecord", "tfrecord from 1", "lmdb", "webdataset", "synthetic")
# paddle_resnet/settings/validation.py, unless stated otherwise
PAIRS = [
    Pair("optimizer", ("RAdam",), "freezing", _all_but("freezing", "none"), ("--optimizer RAdam", "--freeze")),
    Pair("length", ("steps",), "step saves", ("on",), ("--save-interval-steps", "--iter-unit")),
    Pair("length", ("budget",), "trace", ("on",), ("--budget-minutes", "--profile-steps")),
    # paddle_resnet/budget.py
    Pair("length", ("budget",), "start", ("checkpoint",), ("--budget-minutes", "--from-checkpoint")),
    Pair("scope", ("train_only",), "patience", ("on",), ("--patience", "--run-scope train_only")),
    Pair("scope", ("train_only",), "predictions", ("on",), ("--predictions", "--run-scope train_only")),
    Pair("scope", ("train_only",), "tta", ("flip",), ("--tta", "--run-scope train_only")),
    Pair("format", ("synthetic",), "predictions", ("on",), ("--predictions", "--data-format synthetic")),
    Pair("format", ("synthetic",), "page", ("on",), ("--report-html", "--data-format synthetic")),
    Pair("shape", ("not square",), "sizes", _all_but("sizes", "one"), ("--sizes", "--image-shape")),
    # paddle_resnet/program.py
    Pair("network", ("own file",), "drop path", ("on",), ("--drop-path", "--model-arch-name")),
    # paddle_resnet/dali.py
    Pair("format", RECORDS, "balanced sampling", ("on",), ("--balanced-sampling", "data format is")),
    Pair("format", RECORDS, "class weights", ("balanced",), ("--class-weights", "data format is")),
    # paddle_resnet/recipe.py
    Pair("format", ("synthetic",), "recipe", ("chosen", "photos"), ("--choose-recipe", "--data-format synthetic")),
    Pair("format", ("one class",), "recipe", ("chosen", "photos"), ("--image-root", "one class")),
]


class Flags(NamedTuple):
    """Flags that conflict with each other or with values of axes, and that no axis combines. The other values are the
    first ones of the axes. The error message contains all strings in `names`."""

    flags: str
    names: tuple
    values: dict = {}  # noqa: RUF012  not changed
    without: tuple = ()  # axes whose flags are omitted


FLAGS = []


def conflicting():
    """Return {((axis, value), (other axis, other value)): names}. Each pair is in the order of AXES."""
    order, result = list(AXES), {}
    for pair in PAIRS:
        for value in pair.values:
            for other in pair.others:
                ends = (pair.axis, value), (pair.other_axis, other)
                result[tuple(sorted(ends, key=lambda end: order.index(end[0])))] = pair.names
    return result


def cases():
    """Return a Flags for each conflict, including those of PAIRS."""
    return [*(Flags("", names, dict(pair)) for pair, names in conflicting().items()), *FLAGS]
