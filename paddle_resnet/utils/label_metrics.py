"""Metrics of multi-label classification: average precision, thresholds and F1 of each class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paddle_resnet.utils.meters import averages, class_ratios, mean

DEFAULT_THRESHOLD = 0.5  # for a class without validation images, and for a checkpoint without an evaluation


class ScoreMeter:
    """Collects the logits and labels of all images.

    Args:
        class_num: number of classes, C.
    Attributes:
        thresholds: threshold of each class, a list of C probabilities; None to choose thresholds in each evaluation.
    """

    def __init__(self, class_num: int):
        self._class_num = class_num
        self.thresholds: Sequence[float] | None = None
        self.reset()

    def reset(self) -> None:
        self._rows: list[np.ndarray] = []

    def update(self, rows: np.ndarray, n: int) -> None:
        """Add the scores of a batch (models/multi_label_head.py), float32 [n, 2 C]."""
        assert rows.shape == (n, 2 * self._class_num), f"scores: shape {rows.shape} instead of {n} rows"
        self._rows.append(np.array(rows, np.float32))  # copy, because Paddle may own the memory

    def rows(self) -> np.ndarray:
        """Return the scores of all images, float32 [images, 2 C]."""
        return np.concatenate([np.empty((0, 2 * self._class_num), np.float32), *self._rows])


def probabilities(logits: ArrayLike) -> np.ndarray:
    """Return the sigmoid of logits in float64. A NaN becomes 0, so that it ranks last."""
    values = np.asarray(logits, np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))


def curve(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (hits, predicted, ranked), each [k]: for each of the k different scores, in descending order, the number
    of images with the class and the number of all images whose score is at least as large, and the score itself.

    Args:
        labels: bool [n], whether an image has the class.
        scores: [n], without NaN.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)) if len(ranked) else np.empty(0, np.int64)
    return np.cumsum(labels[order])[last], last + 1, ranked[last]


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the average precision as scikit-learn defines it: the sum over all thresholds of the precision times the
    increase of the recall, without interpolation. Return NaN if no image has the class. For arguments, see curve."""
    hits, predicted, _ = curve(labels, scores)
    if not len(hits) or hits[-1] == 0:
        return np.nan
    return float(np.sum(np.diff(hits, prepend=0) * (hits / predicted)) / hits[-1])


def average_precisions(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the average precision of each class, float64 [C]. `labels` is bool [n, C], and `scores` is [n, C]."""
    return np.array([average_precision(labels[:, c], scores[:, c]) for c in range(labels.shape[1])])


def mean_average_precision(precisions: np.ndarray) -> float:
    """Return the mean of the results of average_precisions for the classes that images have; NaN if there are none."""
    known = precisions[~np.isnan(precisions)]
    return mean(float(known.sum()), len(known))


def best_threshold(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the threshold with the highest F1; scores from the threshold on predict the class. If several thresholds
    are equally good, return the highest. The threshold is the center between the two neighboring scores, so that the
    rounding of an inference engine does not change predictions; the neighbor below the lowest score is 0. Return
    DEFAULT_THRESHOLD if no image has the class. For arguments, see curve."""
    hits, predicted, ranked = curve(labels, scores)
    if not len(hits) or hits[-1] == 0:
        return DEFAULT_THRESHOLD
    best = int(np.argmax(2 * hits / (predicted + hits[-1])))
    below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float((ranked[best] + below) / 2)


def evaluate(rows: np.ndarray, thresholds: Sequence[float] | None = None) -> dict[str, Any]:
    """Compute all metrics of an evaluation.

    Args:
        rows: result of ScoreMeter.rows for all images, float32 [n, 2 C].
        thresholds: C thresholds, or None to choose those with the highest F1 on these images.
    Returns:
        {"map": mean of the average precisions of all classes that images have, "map_micro": average precision of
        all pairs of image and class, "precision_macro", ..., "f1_weighted": averages as in meters.average_metrics, and,
        as lists [C], "class_ap" (NaN for a class without images), "thresholds", "class_images", "class_predicted",
        "class_correct", "class_precision", "class_recall", "class_f1"}. A ratio whose denominator is 0 is 0.
    """
    class_num = rows.shape[1] // 2
    scores, labels = probabilities(rows[:, :class_num]), rows[:, class_num:] > 0.5
    precisions = average_precisions(labels, scores)
    if thresholds is None:
        thresholds = [best_threshold(labels[:, c], scores[:, c]) for c in range(class_num)]
    is_predicted = scores >= thresholds
    images, predicted, correct = (x.sum(axis=0) for x in (labels, is_predicted, labels & is_predicted))
    ratios = class_ratios(images, predicted, correct)
    result = {
        "map": mean_average_precision(precisions),
        "map_micro": average_precision(labels.reshape(-1), scores.reshape(-1)),
    }
    result |= averages(ratios, {"macro": images + predicted > 0, "weighted": images})
    counts = {"images": images, "predicted": predicted, "correct": correct, **ratios, "ap": precisions}
    result |= {f"class_{name}": values.tolist() for name, values in counts.items()}
    return result | {"thresholds": [float(threshold) for threshold in thresholds]}
