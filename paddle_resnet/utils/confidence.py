"""Calibration of probabilities: expected calibration error, reliability diagram and temperature scaling (Guo et al.,
arXiv:1706.04599). The confidence of an image is its largest probability."""

from typing import NamedTuple

import numpy as np

BINS = 15  # number of confidence intervals of equal width, as in Guo et al.
BLOCK = 4096  # number of images whose logits are converted to float64 at a time
STEPS = 100  # maximum number of iterations of fit_temperature
RANGE = 0.01, 100.0  # smallest and largest temperature that fit_temperature considers


class Temperature(NamedTuple):
    """A temperature by which logits are divided, and its effect on the images that determined it.

    Attributes:
        value: the temperature.
        images: number of images.
        loss_before, loss_after: mean negative log likelihood of the images without and with the temperature.
        ece_before, ece_after: expected calibration error without and with the temperature.
        bins: number of confidence intervals of the expected calibration error.
    """

    value: float
    images: int
    loss_before: float
    loss_after: float
    ece_before: float
    ece_after: float
    bins: int = BINS


def bin_sums(confidences: np.ndarray, is_correct: np.ndarray) -> np.ndarray:
    """Return float64 [BINS, 3], the number of images, the sum of their confidences and the number of correct images in
    each interval (i / BINS, (i + 1) / BINS]. Images whose confidence is not finite are excluded.

    Confidences are rounded to multiples of 2^-24, so that the sums do not depend on the order of the images, the
    batches or the processes.

    Args:
        confidences: largest probability of each image, [N].
        is_correct: whether the class with this probability is the label, bool [N].
    """
    is_finite = np.isfinite(confidences)
    rounded = np.rint(confidences[is_finite] * 2.0**24) / 2**24
    places = np.clip(np.ceil(rounded * BINS).astype(np.int64) - 1, 0, BINS - 1)
    columns = (np.ones_like(rounded), rounded, is_correct[is_finite])
    return np.column_stack([np.bincount(places, column, BINS) for column in columns])


def reliability(sums: np.ndarray) -> np.ndarray:
    """Return the reliability diagram for the sums from bin_sums: float64 [BINS, 3], the number of images, their mean
    confidence and their accuracy in each interval. Both means of an interval without images are NaN."""
    means = np.full([len(sums), 2], np.nan)
    np.divide(sums[:, 1:], sums[:, :1], out=means, where=sums[:, :1] > 0)
    return np.column_stack([sums[:, 0], means])


def expected_error(sums: np.ndarray) -> float:
    """Return the expected calibration error (ECE) for the sums from bin_sums: the mean of |accuracy - mean confidence|
    over the intervals, weighted by their numbers of images. Without images, the result is NaN."""
    images = sums[:, 0].sum()
    return float(np.abs(sums[:, 2] - sums[:, 1]).sum() / images) if images else float("nan")


def score(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> tuple[float, float]:
    """Return (mean negative log likelihood, ECE) of softmax(logits / temperature), computed in float64.

    Args:
        logits: finite, [N, classes].
        labels: integers [N].
        temperature: positive number.
    """
    loss, sums = 0.0, np.zeros([BINS, 3])
    for scaled, own in _blocks(logits, labels):
        scaled = scaled / temperature
        exponentials = np.exp(scaled)
        total = exponentials.sum(axis=1)
        loss += float((np.log(total) - np.take_along_axis(scaled, own[:, None], axis=1)[:, 0]).sum())
        sums += bin_sums(1 / total, scaled.argmax(axis=1) == own)
    return loss / len(labels), expected_error(sums)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> Temperature | None:
    """Return the Temperature that minimizes the mean negative log likelihood of softmax(logits / T), or None if no T in
    RANGE does, for example because all images are classified correctly.

    The negative log likelihood is convex in 1 / T. Newton's method finds the zero of the derivative with respect to 1 /
    T in float64; if a step leaves the interval that contains the zero, the interval is halved instead. The result is
    deterministic.

    Args:
        logits: finite, [N, classes].
        labels: integers [N].
    """
    low, high = 1 / RANGE[1], 1 / RANGE[0]
    if _derivatives(logits, labels, low)[0] >= 0 or _derivatives(logits, labels, high)[0] <= 0:
        return None
    inverse = 1.0
    for _ in range(STEPS):
        slope, curvature = _derivatives(logits, labels, inverse)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        following = inverse - slope / curvature if curvature > 0 else low
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - inverse) <= 1e-12 * inverse:
            break
        inverse = following
    (loss_before, ece_before), (loss_after, ece_after) = (score(logits, labels, t) for t in (1, 1 / inverse))
    return Temperature(1 / inverse, len(labels), loss_before, loss_after, ece_before, ece_after)


def _derivatives(logits, labels, inverse):
    """Return the first and the second derivative of the mean negative log likelihood of softmax(inverse * logits) with
    respect to `inverse`: the means of E[logit] - logit of the label, and of Var[logit], under this softmax."""
    slope = curvature = 0.0
    for shifted, own in _blocks(logits, labels):
        probabilities = np.exp(inverse * shifted)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        mean = (probabilities * shifted).sum(axis=1)
        slope += float((mean - np.take_along_axis(shifted, own[:, None], axis=1)[:, 0]).sum())
        curvature += float((probabilities * (shifted - mean[:, None]) ** 2).sum())
    return slope / len(labels), curvature / len(labels)


def _blocks(logits, labels):
    """Yield (logits minus their largest, float64; labels) for BLOCK images at a time."""
    for start in range(0, len(labels), BLOCK):
        block = logits[start : start + BLOCK].astype(np.float64)
        yield block - block.max(axis=1, keepdims=True), labels[start : start + BLOCK]
