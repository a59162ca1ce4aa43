"""Log lines of single steps with the figures of all processes."""

import itertools

from paddle_resnet.job import processes, watchdog


class StepLog:
    """Log lines of single steps with the figures of all processes.

    Each rank posts its figures, and rank 0 logs a step when those of all have come, some steps later. Nobody waits
    before the end of the epoch.

    Args:
        log: function of the step and its metrics.
    """

    _topics = itertools.count()

    def __init__(self, log):
        self._log, self._topic = log, next(self._topics)

    def add(self, step, images, metrics, common):
        """Args:
        step: number.
        images: of this process.
        metrics: {name: value} of this process; means over its images, but ips and times.
        common: {name: value} that is the same on all processes.
        """
        if processes.world_size() == 1:
            self._log(step, {**metrics, **common})
            return
        watchdog.post(self._topic, step, (images, metrics, common))
        self._write(is_over=False)

    def finish(self):
        """Log what is left; every rank has to call this."""
        if processes.world_size() > 1:
            watchdog.post(self._topic, None, None)
            self._write(is_over=True)

    def _write(self, is_over):
        if processes.rank() == 0:
            for step, everyone in watchdog.collect(self._topic, is_over):
                self._log(step, over_all(everyone))


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
            result[name] = sum(value * n for value, n in zip(values, counts, strict=True)) / sum(counts)
    return {**result, **everyone[0][2]}
