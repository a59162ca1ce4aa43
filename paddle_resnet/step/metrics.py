"""The metrics of an epoch: aggregation over all processes, and the log."""

import numpy as np
from numpy.typing import ArrayLike

from paddle_resnet.job import exchange, watchdog
from paddle_resnet.utils import confidence, label_metrics, logger
from paddle_resnet.utils.meters import ConfusionMeter, StepClock, class_metrics, mean
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


def confusion_over_all_processes(meter: ConfusionMeter) -> dict[str, np.ndarray]:
    """Return the confusion counts, summed over all processes, and top1 per class. A process sends one code and one
    count per pair of classes that occurred, padded to the largest number of pairs in a process."""
    codes, counts = meter.counts()
    longest = int(exchange.all_gather([len(codes)]).max())
    padding = (0, longest - len(codes))
    all_ranks = exchange.all_gather([*np.pad(codes, padding), *np.pad(counts, padding)]).astype(np.int64)
    codes, places = np.unique(all_ranks[:, :longest], return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, places.reshape(-1), all_ranks[:, longest:].reshape(-1))
    confusion = np.column_stack([*divmod(codes, meter.class_num), counts])[counts > 0]  # remove the padding
    metrics = class_metrics(confusion, meter.class_num)
    return {"confusion": confusion, "class_top1": np.where(metrics["images"] > 0, metrics["recall"], np.nan)}


def calibration_over_all_processes(confidences: np.ndarray, is_correct: np.ndarray) -> dict:
    """Return {"ece": expected calibration error, "reliability": reliability diagram, see confidence.reliability} over
    the images of all processes. For the arguments, see confidence.bin_sums."""
    all_ranks = exchange.all_gather(confidence.bin_sums(confidences, is_correct).reshape(-1))
    sums = all_ranks.sum(axis=0).reshape(confidence.BINS, -1)
    return {"ece": confidence.expected_error(sums), "reliability": confidence.reliability(sums)}


def multi_label_over_all_processes(meter: label_metrics.ScoreMeter) -> dict:
    """Return the result of label_metrics.evaluate for the images of all processes, with arrays instead of lists. On
    rank 0, also return {"scores": float32 [images, 2 C] in the order of the data set}."""
    own = meter.rows()
    all_ranks = exchange.gather(own.tobytes())
    rows = np.frombuffer(b"".join(all_ranks or []), np.float32).reshape(-1, own.shape[1])
    result = exchange.from_rank_0(lambda: label_metrics.evaluate(rows, meter.thresholds))
    result = {name: np.array(value) if isinstance(value, list) else value for name, value in result.items()}
    return result | ({} if all_ranks is None else {"scores": rows})


def predictions_on_rank_0(labels: ArrayLike, rows: ArrayLike) -> dict[str, np.ndarray]:
    """On rank 0, return {"predictions": those of all processes}; on all other ranks, return {}. Shards are assigned in
    rank order, so the predictions are in the order of the data set."""
    own = np.column_stack([labels, rows])
    all_ranks = exchange.gather(own.tobytes())
    if all_ranks is None:
        return {}
    return {"predictions": np.frombuffer(b"".join(all_ranks)).reshape(-1, own.shape[1])}
