"""Analyze, write and read the curve of the learning-rate finder (paddle_resnet/lr_find.py)."""

import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_resnet.utils import files
from paddle_resnet.utils.checks import is_list_of, is_none_or, is_number, is_table
from paddle_resnet.utils.errors import UsageError

DATA, DRAWING = "lr_find.json", "lr_find.png"  # file names in the folder of a run
LIMIT_BYTES = 64 << 20
# Decay length of the smoothing weights: a fraction of all steps, but at least LEAST_WINDOW steps.
WINDOW, LEAST_WINDOW = 0.05, 3
DIVERGED = 4  # the search ends if the running mean of the loss exceeds its minimum by this factor
SETTLING_STEPS = 10  # number of initial steps that determine the initial level of the loss
CLEAR_FALL = 8  # if the smoothed loss falls by fewer standard errors than this, the fall is considered noise


@dataclass
class Curve:
    """Losses of training steps with an increasing learning rate.

    Attributes:
        lr: learning rates, as values of --lr; the optimizer used `factor` times the rates in this list.
        loss: loss of each step's batches, before the update. Only the last loss may be infinite, NaN or, in a curve
            that was read from a file, None.
        smoothed: result of smooth(loss); excludes the last loss if it is not finite.
        factor: number of processes times --accumulate-steps.
        steepest: rate at which the smoothed loss falls fastest, rounded, which is the suggested value of --lr; None if
            the smoothed loss does not fall clearly.
        minimum: rate at which the smoothed loss is lowest, rounded; None if steepest is None.
        ended_early: whether the search ended because the loss diverged.
        arguments: {flag: value}.
    """

    lr: list[float]
    loss: list[float | None]
    smoothed: list[float]
    factor: int
    steepest: float | None
    minimum: float | None
    ended_early: bool
    arguments: dict[str, Any]

    def limit(self) -> float:
        """Return an upper limit for plots of the loss, so that a diverging loss does not hide the shape of the
        curve."""
        return 1.3 * max(self.smoothed, default=1.0)


def rate(low: float, high: float, steps: int, step: int) -> float:
    """Return the learning rate of a step. The rates form a geometric sequence from `low` in step 0 to `high` in step
    `steps` - 1."""
    return low * (high / low) ** (min(step, steps - 1) / (steps - 1))


def smooth(losses: Sequence[float], steps: int) -> np.ndarray:
    """Smooth a curve. Each result is a weighted mean whose weights fall exponentially with the distance, so the
    smoothed curve has no lag. Losses are clipped to the largest loss of the initial steps, because a diverging loss
    would otherwise dominate the means of the preceding steps.

    Args:
        losses: finite losses of consecutive steps.
        steps: number of steps from the lowest to the highest rate. WINDOW is a fraction of this number.
    """
    clipped, kept = np.minimum(losses, max(losses[:SETTLING_STEPS], default=0.0)), _kept(steps)
    before, after = _decaying_sums(clipped, kept), _decaying_sums(clipped[::-1], kept)[::-1]
    ones = np.ones_like(clipped)
    weights = _decaying_sums(ones, kept)
    return (before + after - clipped) / (weights + weights[::-1] - ones)


def _window(steps):
    return max(WINDOW * steps, LEAST_WINDOW)


def _kept(steps):
    """Return the factor by which the smoothing weight falls from one step to the next."""
    return math.exp(-1 / _window(steps))


def _decaying_sums(values, kept):
    sums, total = np.empty_like(values), 0.0
    for i, value in enumerate(values):
        sums[i] = total = kept * total + value
    return sums


class Divergence:
    """Detects a diverging loss during the search: a loss that is not finite, or a running mean that exceeds DIVERGED
    times its minimum.

    Args:
        steps: number of steps from the lowest to the highest rate.
    """

    def __init__(self, steps: int) -> None:
        self._kept, self._sum, self._weight, self._count, self._lowest = _kept(steps), 0.0, 0.0, 0, math.inf

    def add(self, loss: float) -> bool:
        """Add the loss of a step, and return whether the loss diverges."""
        if not math.isfinite(loss):
            return True
        self._sum, self._weight = self._kept * self._sum + loss, self._kept * self._weight + 1
        self._count += 1
        if self._count < SETTLING_STEPS:
            return False
        mean = self._sum / self._weight
        self._lowest = min(self._lowest, mean)
        return mean > DIVERGED * self._lowest


def suggest(rates: Sequence[float], losses: Sequence[float], steps: int) -> tuple[float, float] | None:
    """Return (rate at which the smoothed loss falls fastest, rate at which it is lowest), or None if there are fewer
    than SETTLING_STEPS losses or the smoothed loss falls by at most CLEAR_FALL standard errors. Only the steps up to
    the lowest smoothed loss are considered.

    The learning-rate range test is from Smith, arXiv:1506.01186, section 3.3. PyTorch Lightning's finder also suggests
    the rate of the steepest descent. With Momentum and a warm-up, the rate at which the loss is lowest gave better
    results: the best top1 in five epochs on handwritten digits was 0.964 and 0.964 instead of 0.947 and 0.872 (two
    seeds). With AdamW, the results were equal within 0.01.

    Args:
        rates: learning rates, which rise by a constant factor.
        losses: finite losses of consecutive steps.
        steps: number of steps from the lowest to the highest rate.
    """
    if len(losses) < SETTLING_STEPS:
        return None
    smoothed = smooth(losses, steps)
    lowest = int(np.argmin(smoothed))
    # Estimate the standard deviation of a single loss robustly, from the differences between consecutive losses. A mean
    # with the weights of smooth() has the same standard error as an unweighted mean over four windows.
    deviation = np.median(np.abs(np.diff(losses[: lowest + 1]))) / (math.sqrt(2) * 0.6745) if lowest else 0.0
    error = deviation / math.sqrt(4 * _window(steps))
    if smoothed[: lowest + 1].max() - smoothed[lowest] <= CLEAR_FALL * error:
        return None
    return rates[int(np.argmin(np.gradient(smoothed)[:lowest]))], rates[lowest]


def analyze(
    rates: list[float],
    losses: Sequence[float],
    steps: int,
    factor: int,
    ended_early: bool,
    arguments: dict[str, Any],
) -> Curve:
    """Return the Curve of a search. For the arguments, see Curve and suggest; the last loss may be infinite or NaN."""
    finite = losses if math.isfinite(losses[-1]) else losses[:-1]
    suggested = suggest(rates, finite, steps) or (None, None)
    steepest, minimum = (value and float(f"{value:.2g}") for value in suggested)
    smoothed = smooth(finite, steps).tolist()
    return Curve(rates, [*losses], smoothed, factor, steepest, minimum, ended_early, arguments)


def write(path: str | Path, curve: Curve) -> None:
    """Write a Curve as JSON, in which null replaces a loss that is not finite. Raise OSError if the file cannot be
    written."""
    text = json.dumps(files.finite(asdict(curve)))
    with files.written(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def read(path: str | Path) -> Curve:
    """Read a file written by write().

    Returns:
        the Curve in the file.
    Raises:
        UsageError: the file cannot be read or does not match the schema.
    """
    try:
        with files.open_regular(path, LIMIT_BYTES) as f:
            data = json.loads(f.read())
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); make it readable, or delete it") from e
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path}: not a curve written by lr_find; delete it, or run lr_find with --overwrite") from e
    if not _is_curve(data):
        raise UsageError(f"{path}: not a curve written by lr_find; delete it, or run lr_find with --overwrite")
    return Curve(**{name: data[name] for name in Curve.__dataclass_fields__})


def _is_positive(value):
    return is_number(value) and 1e-30 < value < 1e30


def _is_loss(value):
    return is_number(value) and abs(value) < 1e39  # the limit is slightly above the range of float32


def _is_curve(data):
    checks = {
        "lr": is_list_of(_is_positive),
        "loss": is_list_of(is_none_or(_is_loss)),
        "smoothed": is_list_of(_is_loss),
        **dict.fromkeys(("steepest", "minimum"), is_none_or(_is_positive)),
        "factor": _is_positive,
        "ended_early": lambda value: isinstance(value, bool),
        "arguments": lambda value: isinstance(value, dict),
    }
    if not is_table(data, **checks) or None in data["loss"][:-1]:
        return False
    rises = all(a < b for a, b in itertools.pairwise(data["lr"]))
    return rises and 0 < len(data["lr"]) == len(data["loss"]) == len(data["smoothed"]) + data["loss"].count(None)


def path(folders: Iterable[str | Path]) -> Path | None:
    """Return the path of the first curve found in a list of folders, or None."""
    return next((path for folder in folders if os.path.isfile(path := Path(folder) / DATA)), None)
