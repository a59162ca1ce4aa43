"""Running averages, confusion counts, step times and latencies."""

import math
from time import perf_counter

import numpy as np

from utils.errors import NO_CLASS, DataError


class AverageMeter:
    """Mean of a metric over samples, accumulated in float64 so that the batch size does not show in it.

    Args:
        name: metric name as it stands in logs, for example "top1".
        is_ratio: the per-batch value is a count divided by the batch size (an accuracy); its count is restored
            exactly, so that the mean over many batches has no float32 rounding in it.
    Attributes:
        value: mean of the last update.
        not_finite: samples whose value was not finite, or of whose batch the mean was not.
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
        self.not_finite = 0

    def update(self, value, n):
        """Add one batch of `n` samples.

        Args:
            value: either one number, the mean over the batch, or `n` numbers, one a sample.
            n: number of samples in the batch.
        Raises:
            DataError: a ratio is negative, which is how the operator for the loss says that a label is no class.
        """
        value = np.asarray(value, dtype=np.float64).reshape(-1)
        assert value.size in (1, n), f"{self.name}: {value.size} values for {n} samples"
        # Multiples of 2^-24, finer than a float32 near 1, add up to half a billion without rounding, so that the sum
        # over samples is the same in whatever order, that is for every number of processes and size of batch.
        total = float(np.rint(value * 2.0**24).sum() / 2**24) if value.size == n else float(value[0]) * n
        if self.is_ratio:
            if total < 0:
                raise DataError(NO_CLASS)
            total = round(total)
        self.value = total / n
        self.sum += total
        self.count += n
        self.not_finite += int(np.count_nonzero(~np.isfinite(value))) * n // value.size
        self.bad_updates = 0 if math.isfinite(self.value) else self.bad_updates + 1

    def state(self):
        """The accumulated sum as plain data, for restore()."""
        return {"value": self.value, "sum": self.sum, "count": self.count, "not_finite": self.not_finite}

    def restore(self, state):
        self.value, self.sum, self.count = state["value"], state["sum"], state["count"]
        self.not_finite = state.get("not_finite", 0)  # which older checkpoints do not have

    def excuse_update(self):
        """Do not count the last update as a bad one."""
        self.bad_updates -= 1


class ConfusionMeter:
    """How often each class was taken for each other one.

    Images whose predicted class is none are left out; Paddle says such things of logits that are not numbers.

    Args:
        class_num: number of classes.
    """

    def __init__(self, class_num):
        self.class_num = class_num
        self.reset()

    def reset(self):
        self._pairs = []

    def update(self, pairs, n):
        """Add one batch: integers [n, 2], a row an image, its label and the class that the network says."""
        assert pairs.shape == (n, 2), f"confusion: {pairs.shape} for {n} images"
        self._pairs.append(np.array(pairs))  # a copy: Paddle may own the memory

    def counts(self):
        """The pairs that occurred, in order, and how often: label * class_num + prediction [k], images [k]."""
        pairs = np.concatenate([np.empty((0, 2), np.int64), *self._pairs])
        labels, predictions = pairs[(pairs[:, 1] >= 0) & (pairs[:, 1] < self.class_num)].T
        return np.unique(labels * self.class_num + predictions, return_counts=True)


class StepClock:
    """Splits the time of a run into waiting for the loader and the rest, step by step, without restarts."""

    def __init__(self):
        self.restart()

    def restart(self):
        """Forget everything and start counting now."""
        self.data_times, self.batch_times = [], []
        self.images = 0
        self._logged = (0, 0, 0.0)
        self._tick = perf_counter()

    def data_ready(self):
        self._data_time = perf_counter() - self._tick

    def step_done(self, images):
        now = perf_counter()
        self.data_times.append(self._data_time)
        self.batch_times.append(now - self._tick)
        self.images += images
        self._tick = now

    def close_step(self):
        """Count the time since the last step as that step's: its metrics were read late."""
        now = perf_counter()
        if self.batch_times:
            self.batch_times[-1] += now - self._tick
        self._tick = now

    def resume(self):
        """Leave out the time since close_step."""
        self._tick = perf_counter()

    def since_last_log(self):
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
