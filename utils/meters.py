"""Running averages and step latencies."""

import math

import numpy as np


class AverageMeter:
    """Mean of a metric over samples, accumulated in float64 so that the batch size does not show in it.

    Args:
        name: metric name as it stands in logs, for example "top1".
        is_ratio: the per-batch value is a count divided by the batch size (an accuracy); its count is restored
            exactly, so that the mean over many batches has no float32 rounding in it.
    Attributes:
        value: mean of the last update.
        bad_updates: how many updates in a row, up to the last, were not finite; reset() does not touch it.
    """

    def __init__(self, name, is_ratio=False):
        self.name = name
        self.is_ratio = is_ratio
        self.bad_updates = 0
        self.reset()

    def reset(self):
        self.value = float("nan")
        self.sum = 0.0
        self.count = 0

    def update(self, value, n):
        """Add one batch of `n` samples.

        Args:
            value: either one number, the mean over the batch, or `n` numbers, one a sample.
            n: number of samples in the batch.
        """
        value = np.asarray(value, dtype=np.float64).reshape(-1)
        assert value.size in (1, n), f"{self.name}: {value.size} values for {n} samples"
        total = float(value.sum()) if value.size == n else float(value[0]) * n
        if self.is_ratio:
            total = round(total)
        self.value = total / n
        self.sum += total
        self.count += n
        self.bad_updates = 0 if math.isfinite(self.value) else self.bad_updates + 1

    def state(self):
        """The accumulated sum as plain data, for restore()."""
        return {"value": self.value, "sum": self.sum, "count": self.count}

    def restore(self, state):
        self.value, self.sum, self.count = state["value"], state["sum"], state["count"]

    @property
    def avg(self):
        return self.sum / self.count if self.count else float("nan")


def latency_percentiles(batch_times_s):
    """Latency of the steps of a benchmark in milliseconds.

    Args:
        batch_times_s: seconds each step took.
    Returns:
        {"latency_mean_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms"}, percentiles
        with linear interpolation between the two nearest steps.
    """
    ms = np.asarray(batch_times_s, dtype=np.float64) * 1e3
    result = {"latency_mean_ms": float(ms.mean())}
    for q in (50, 90, 95, 99):
        result[f"latency_p{q}_ms"] = float(np.percentile(ms, q))
    return result
