"""Meters for running averages, confusion counts, most probable classes and step times, and metrics computed from
them."""

import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paddle_resnet.utils.errors import NO_CLASS, DataError


def mean(total: float, count: float) -> float:
    """Return total / count, or NaN if count is 0."""
    return total / count if count else math.nan


class AverageMeter:
    """Mean of a metric over all samples with finite values, accumulated in float64.

    Args:
        name: metric name in logs, for example "top1".
        is_ratio: whether the value of a batch is a count divided by the batch size, such as an accuracy. The meter then
            recovers the exact count from the value, so that the mean over many batches has no float32 rounding error.
    Attributes:
        value: mean of the finite values in the last update, or NaN if no value was finite.
        sum: sum of the finite values.
        count: number of samples, including those with non-finite values.
        not_finite: number of samples whose value was not finite. If only the mean of a batch is known and the mean is
            not finite, all samples in the batch are counted.
        bad_updates: number of consecutive updates, including the last one, that contained a non-finite value, without
            those that excuse_update() excludes. reset() does not change this number.
    """

    def __init__(self, name: str, is_ratio: bool = False) -> None:
        self.name = name
        self.is_ratio = is_ratio
        self.bad_updates = 0
        self.reset()

    def reset(self) -> None:
        self.value = math.nan
        self.sum = 0.0
        self.count = 0
        self.not_finite = 0

    def update(self, value: ArrayLike, n: int) -> None:
        """Add one batch of `n` samples.

        Args:
            value: either one number (the mean over the batch) or one number per sample.
            n: number of samples in the batch.
        Raises:
            DataError: a ratio is negative. The loss operator returns a negative ratio if a label is not a valid class
                number.
        """
        value = np.asarray(value, dtype=np.float64).reshape(-1)
        assert value.size in (1, n), f"{self.name}: {value.size} values instead of 1 or {n}"
        is_finite = np.isfinite(value)
        not_finite = int(np.count_nonzero(~is_finite)) * n // value.size
        value = value[is_finite]
        # Round the values of single samples to multiples of 2^-24. In float64, sums of such values are exact up to half
        # a billion, so the sum does not depend on the order, the number of processes or the batch size.
        is_each = is_finite.size == n
        total = float(np.rint(value * 2.0**24).sum() / 2**24) if is_each else float(value.sum()) * n
        if self.is_ratio:
            if total < 0:
                raise DataError(NO_CLASS)
            total = round(total)
        self.value = mean(total, n - not_finite)
        self.sum += total
        self.count += n
        self.not_finite += not_finite
        self.bad_updates = self.bad_updates + 1 if not_finite else 0

    def mean(self) -> float:
        """Return the mean of all finite values, or NaN if no value is finite."""
        return mean(self.sum, self.count - self.not_finite)

    def state(self) -> dict[str, float]:
        """Return the accumulated values as JSON-serializable data, to be passed to restore()."""
        return {"sum": self.sum, "count": self.count, "not_finite": self.not_finite}

    def restore(self, state: dict[str, float]) -> None:
        """Continue with the values from state()."""
        self.sum, self.count = state["sum"], state["count"]
        self.not_finite = state.get("not_finite", 0)  # missing in older checkpoints

    def excuse_update(self) -> None:
        """Exclude the last update, which must have contained a non-finite value, from bad_updates."""
        self.bad_updates -= 1


class ConfusionMeter:
    """Counts of (label, predicted class) pairs.

    Args:
        class_num: number of classes.
    """

    def __init__(self, class_num: int) -> None:
        self.class_num = class_num
        self.reset()

    def reset(self) -> None:
        self._pairs = []

    def update(self, pairs: np.ndarray, n: int) -> None:
        """Add a batch of pairs, integers [n, 2]. Each row contains the label and the predicted class of one image."""
        assert pairs.shape == (n, 2), f"confusion: shape {pairs.shape} instead of {(n, 2)}"
        self._pairs.append(np.array(pairs))  # copy, because Paddle may own the memory

    def labels(self) -> np.ndarray:
        """Return the label of each image, int64 [n]."""
        return np.concatenate([np.empty((0, 2), np.int64), *self._pairs])[:, 0]

    def is_correct(self) -> np.ndarray:
        """Return whether the predicted class of each image is its label, bool [n]."""
        labels, predictions = np.concatenate([np.empty((0, 2), np.int64), *self._pairs]).T
        return labels == predictions

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays [k] for the k different pairs that occurred: the sorted pairs, each encoded as label *
        class_num + prediction, and their counts. Images for which the network predicts no class (encoded as class_num)
        are not counted."""
        pairs = np.concatenate([np.empty((0, 2), np.int64), *self._pairs])
        labels, predictions = pairs[(pairs[:, 1] >= 0) & (pairs[:, 1] < self.class_num)].T
        return np.unique(labels * self.class_num + predictions, return_counts=True)


class ConfidenceMeter:
    """Collects the largest probability of each image."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._values = []

    def update(self, of_softmax: ArrayLike, n: int) -> None:
        """Add a batch of "of_softmax" from the loss head, [n, 2]."""
        log_sums = np.asarray(of_softmax, dtype=np.float64)[:, 1]
        assert len(log_sums) == n, f"of_softmax: {len(log_sums)} rows instead of {n}"
        self._values.append(np.exp(-log_sums))

    def values(self) -> np.ndarray:
        """Return the largest probability of each image, float64 [images]; NaN for an image with a NaN or +inf logit."""
        return np.concatenate([np.empty(0), *self._values])


class TopMeter:
    """Finds the most probable classes of each image from its logits.

    Args:
        k: number of classes to keep, at most the number of classes C of the network.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self.reset()

    def reset(self) -> None:
        self._classes, self._probabilities = [], []

    def update(self, logits: ArrayLike, n: int) -> None:
        """Add a batch of logits [n, C]. Classes with equal logits are sorted by class number. Classes whose logit is
        NaN come last, and their class number is replaced with C."""
        logits = np.asarray(logits, dtype=np.float64)
        assert len(logits) == n, f"logits: {len(logits)} rows instead of {n}"
        classes = np.argsort(-logits, axis=1, kind="stable")[:, : self._k]
        with np.errstate(invalid="ignore"):  # some logits may be NaN or infinite
            probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        is_number = ~np.isnan(np.take_along_axis(logits, classes, axis=1))
        self._classes.append(np.where(is_number, classes, logits.shape[1]))
        self._probabilities.append(np.take_along_axis(probabilities, classes, axis=1))

    def rows(self) -> np.ndarray:
        """Return float64 [images, 2 k]. Each row contains the k most probable classes of one image in descending order,
        and then their probabilities. All probabilities are NaN if a logit of the image is NaN or +inf, or if all are
        -inf."""
        empty = np.empty((0, self._k))
        return np.hstack([np.concatenate([empty, *part]) for part in (self._classes, self._probabilities)])


class StepClock:
    """Splits the time of each step into the time spent waiting for the loader and the remaining time. Call data_ready()
    when the loader has returned a batch, and step_done() when the step of this batch has run."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Clear all times, and begin the first step now."""
        self.data_times, self.batch_times = [], []
        self.images = 0
        self._logged = (0, 0, 0.0)
        self._tick = perf_counter()

    def data_ready(self) -> None:
        self._data_time = perf_counter() - self._tick

    def step_done(self, images: int) -> None:
        now = perf_counter()
        self.data_times.append(self._data_time)
        self.batch_times.append(now - self._tick)
        self.images += images
        self._tick = now

    def close_step(self) -> None:
        """Add the time since the end of the last step to the duration of that step. Call close_step() after waiting for
        the metrics of the step."""
        now = perf_counter()
        if self.batch_times:
            self.batch_times[-1] += now - self._tick
        self._tick = now

    def resume(self) -> None:
        """Exclude the time since close_step() from all steps."""
        self._tick = perf_counter()

    def recent(self) -> tuple[float, float]:
        """Return mean times over the last 20 steps in seconds, as (waiting for the loader, entire step), or (0, 0) if
        no step has completed."""
        data_times, batch_times = self.data_times[-20:], self.batch_times[-20:]
        n = len(batch_times) or 1
        return sum(data_times) / n, sum(batch_times) / n

    def since_last_log(self) -> dict[str, float]:
        """Return the images per second (ips) and the mean times in seconds of the steps since the last call, or {} if
        no step has completed since then."""
        steps, images, seconds = self._logged
        self._logged = (len(self.batch_times), self.images, sum(self.batch_times))
        n = self._logged[0] - steps
        if n == 0:
            return {}
        elapsed = self._logged[2] - seconds
        data_time = sum(self.data_times[steps:]) / n
        return {
            "ips": (self._logged[1] - images) / elapsed,
            "data_time": data_time,
            "compute_time": elapsed / n - data_time,
            "batch_time": elapsed / n,
        }


def latency_percentiles(batch_times_s: ArrayLike) -> dict[str, float]:
    """Return step-time statistics of a benchmark in milliseconds.

    Args:
        batch_times_s: duration of each step in seconds, for at least one step.
    Returns:
        {"latency_mean_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms"}. Percentiles are
        interpolated linearly between the two nearest durations.
    """
    ms = np.asarray(batch_times_s, dtype=np.float64) * 1e3
    result = {"latency_mean_ms": float(ms.mean())}
    for q in (50, 90, 95, 99):
        result[f"latency_p{q}_ms"] = float(np.percentile(ms, q))
    return result


CLASS_METRICS = ("precision", "recall", "f1")
AVERAGES = ("macro", "weighted")


def main_metric(result: Mapping[str, Any]) -> str:
    """Return the name of the metric that determines the best evaluation: "map" with --multi-label, otherwise
    "top1". `result` is the metrics of an evaluation."""
    return "map" if "map" in result else "top1"


def class_metrics(confusion: np.ndarray, class_num: int) -> dict[str, np.ndarray]:
    """Return the metrics of each class, arrays [class_num]: {"images", "correct", "precision", "recall", "f1"}. If the
    denominator of a ratio is 0, the ratio is 0.

    Args:
        confusion: integers [k, 3], with rows (label, predicted class, number of images).
        class_num: number of classes.
    """
    labels, predictions, counts = confusion.T

    def count(classes, numbers):
        return np.bincount(classes, numbers, class_num).astype(np.int64)

    images, predicted, correct = (
        count(labels, counts),
        count(predictions, counts),
        count(labels, counts * (labels == predictions)),
    )

    return {"images": images, "correct": correct, **class_ratios(images, predicted, correct)}


def class_ratios(images: np.ndarray, predicted: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
    """Return {"precision", "recall", "f1"} of each class, given its number of images, of predictions and of correct
    predictions. If the denominator of a ratio is 0, the ratio is 0."""

    def ratio(part, whole):
        return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)

    f1 = ratio(2 * correct, images + predicted)
    return {"precision": ratio(correct, predicted), "recall": ratio(correct, images), "f1": f1}


def average_metrics(confusion: np.ndarray, class_num: int) -> dict[str, float]:
    """Average the class_metrics over the classes, and return {"precision_macro", ..., "f1_weighted"}. Macro averages
    are taken over the classes that occur as a label or a prediction; weighted averages use the number of images in each
    class as its weight. The definitions are those of scikit-learn with zero_division=0. Without images, the averages
    are NaN."""
    metrics = class_metrics(confusion, class_num)
    occurring = np.unique(confusion[:, :2])
    weights = {"macro": np.isin(np.arange(class_num), occurring), "weighted": metrics["images"]}
    return averages(metrics, weights)


def averages(metrics: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return {"precision_macro", ..., "f1_weighted"}: the averages of CLASS_METRICS over the classes.

    Args:
        metrics: {name: metric of each class}.
        weights: {name of the average: weight of each class}.
    """
    return {
        f"{name}_{average}": mean(float(np.dot(metrics[name], weight)), int(weight.sum()))
        for average, weight in weights.items()
        for name in CLASS_METRICS
    }
