"""The metrics of an epoch: aggregation over all processes, and the log."""

import numpy as np

from paddle_resnet.job import exchange, watchdog
from paddle_resnet.utils import logger
from paddle_resnet.utils.meters import StepClock, mean
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.signals import Preempted


def log_metrics(step: tuple[int, ...], metrics: dict, mode: Mode) -> None:
    """Log the metrics of a step, an epoch or a run. See program.log_info."""
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, np.ndarray)}
    if "reliability" in metrics:
        numbers["reliability"] = [[int(images), *means] for images, *means in metrics["reliability"].tolist()]
    logger.log(step, {f"{mode.value}.{name}": value for name, value in numbers.items()})


def over_all_processes(meters: dict, clock: StepClock, stopped: bool) -> dict:
    """Return metrics and times, aggregated over all processes on the host in float64. Each process returns the same
    values. Raise Preempted on all processes if `stopped` is true on one of them."""
    watchdog.phase("metric reduction")
    loss = meters["loss"]
    own = {}
    for name, meter in meters.items():
        own |= {(name, "sum"): meter.sum, (name, "finite"): meter.count - meter.not_finite}
    own |= {"images": loss.count, "not_finite": loss.not_finite, "timed_images": clock.images, "stopped": stopped}
    own |= {"steps": len(clock.batch_times), "time": sum(clock.batch_times), "data_time": sum(clock.data_times)}
    all_ranks = exchange.all_gather(list(own.values()))
    sums = dict(zip(own, all_ranks.sum(axis=0), strict=True))
    largest = dict(zip(own, all_ranks.max(axis=0), strict=True))  # maximum, since a process without images has 0 steps
    if sums["stopped"]:
        raise Preempted
    result = {name: mean(sums[name, "sum"], sums[name, "finite"]) for name in meters}
    result.update(
        images=int(sums["images"]),
        steps=int(largest["steps"]),
        epoch_time=largest["time"],
        ips=sums["timed_images"] / largest["time"],
        data_time=sums["data_time"] / sums["steps"],
        compute_time=(sums["time"] - sums["data_time"]) / sums["steps"],
        batch_time=sums["time"] / sums["steps"],
    )
    if sums["not_finite"]:
        result["not_finite"] = int(sums["not_finite"])
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in result.items()}
