"""Log individual steps with metrics aggregated over all processes."""

import math
from collections.abc import Callable, Sequence

from paddle_resnet.job import exchange, processes
from paddle_resnet.utils.meters import mean


class StepLog:
    """Collects step metrics from all processes, and logs them step by step.

    Rank 0 logs a step after it has received the metrics of all ranks, which arrive while later steps run. Ranks wait
    for each other only at the end of the epoch.

    Args:
        log: function to call with the number of a step and its metrics.
    """

    def __init__(self, log: Callable[[int, dict[str, float]], None]) -> None:
        self._log = log
        self._stream = exchange.Stream() if processes.world_size() > 1 else None
        self._metrics, self._last = {}, -1  # {step: {rank: arguments of add after the step}}, last logged step

    def add(self, step: int, images: int, metrics: dict[str, float], common: dict[str, float]) -> None:
        """Add the metrics of a step.

        Args:
            step: number of the step.
            images: number of images that this process used in the step.
            metrics: {name: value} of this process. All values except ips and times are means over the images that this
                process used in the step.
            common: {name: value} for the metrics that are the same in all processes.
        """
        if self._stream is None:
            self._log(step, {**metrics, **common})
        else:
            self._take(self._stream.add((step, images, metrics, common)))

    def finish(self) -> None:
        """Log the remaining steps. Every rank must call finish()."""
        if self._stream is not None:
            self._take(self._stream.finish(), is_over=True)

    def _take(self, batches, is_over=False):
        for rank, batch in enumerate(batches):
            for step, *metrics in batch:
                if step > self._last:  # Stream can return the last batch twice
                    self._metrics.setdefault(step, {})[rank] = metrics
        for step, by_rank in sorted(self._metrics.items()):
            if is_over or len(by_rank) == processes.world_size():
                self._log(step, over_all([by_rank[rank] for rank in sorted(by_rank)]))
                del self._metrics[step]
                self._last = step


def over_all(all_ranks: Sequence[Sequence]) -> dict[str, float]:
    """Return the metrics of a step over all processes, {name: value}. ips is summed, times are averaged over the
    processes, and other values over the images of the processes with finite values (NaN if there are none). `all_ranks`
    is [(number of images, {name: value}, {name: common value})], with one entry per rank."""
    counts = [images for images, _, _ in all_ranks]
    result = {}
    for name in all_ranks[0][1]:
        values = [metrics[name] for _, metrics, _ in all_ranks]
        if name == "ips":
            result[name] = sum(values)
        elif name.endswith("_time"):
            result[name] = sum(values) / len(values)
        else:
            finite = [(value * n, n) for value, n in zip(values, counts, strict=True) if math.isfinite(value)]
            result[name] = mean(sum(total for total, _ in finite), sum(n for _, n in finite))
    return {**result, **all_ranks[0][2]}
