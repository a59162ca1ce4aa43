"""Log lines of single steps with the figures of all processes."""

import math

from paddle_resnet.job import exchange, processes
from utils.meters import mean


class StepLog:
    """Log lines of single steps with the figures of all processes.

    Rank 0 logs a step some steps later, when it has the figures of all ranks. No rank waits before the end of the
    epoch.

    Args:
        log: function of the step and its metrics.
    """

    def __init__(self, log):
        self._log = log
        self._stream = exchange.Stream() if processes.world_size() > 1 else None
        self._figures, self._last = {}, -1  # {step: {rank: figures}}, last step logged

    def add(self, step, images, metrics, common):
        """Args:
        step: number.
        images: of this process.
        metrics: {name: value} of this process; means over its images, except for ips and times.
        common: {name: value} that is the same on all processes.
        """
        if self._stream is None:
            self._log(step, {**metrics, **common})
        else:
            self._take(self._stream.add((step, images, metrics, common)))

    def finish(self):
        """Log what is left. Every rank must call this."""
        if self._stream is not None:
            self._take(self._stream.finish(), is_over=True)

    def _take(self, batches, is_over=False):
        for rank, batch in enumerate(batches):
            for step, *figures in batch:
                if step > self._last:  # the last batch may come twice
                    self._figures.setdefault(step, {})[rank] = figures
        for step, by_rank in sorted(self._figures.items()):
            if is_over or len(by_rank) == processes.world_size():
                self._log(step, over_all([by_rank[rank] for rank in sorted(by_rank)]))
                del self._figures[step]
                self._last = step


def over_all(everyone):
    """Figures of a step over several processes, [(images, {name: value}, {name: common value})] of each."""
    counts = [images for images, _, _ in everyone]
    result = {}
    for name in everyone[0][1]:
        values = [metrics[name] for _, metrics, _ in everyone]
        if name == "ips":
            result[name] = sum(values)
        elif name.endswith("_time"):
            result[name] = sum(values) / len(values)
        else:
            finite = [(value * n, n) for value, n in zip(values, counts, strict=True) if math.isfinite(value)]
            result[name] = mean(sum(total for total, _ in finite), sum(n for _, n in finite))
    return {**result, **everyone[0][2]}
