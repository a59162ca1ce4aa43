"""Read and validate a run's report and the tables next to the report.

docs/reports.md describes the format of the files.
"""

import contextlib
import csv
import io
import json
import math
import os
import reprlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_resnet.settings import parsing
from paddle_resnet.settings.values import ENVIRONMENT, EVALUATED, EXPLICIT, network_name
from paddle_resnet.tasks import TASKS, Task
from paddle_resnet.utils import files
from paddle_resnet.utils.checks import is_count, is_list_of, is_none_or, is_number, is_ratio, is_text
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.meters import AVERAGES, CLASS_METRICS
from paddle_resnet.utils.mode import RunScope

LIMIT_BYTES = 1 << 30  # maximum size of a file
LINE_BYTES = 1 << 20
LIMIT_S = 1e10  # maximum duration of a run


def _is_loss(value):
    return is_number(value) and abs(value) < 1e39  # the limit is slightly above the range of float32


def _is_size(value):
    return is_number(value) and 0 <= value < 1e39


def _is_duration(value):
    return is_number(value) and 0 <= value <= LIMIT_S


def _is_interval(value):
    """Return whether a value is a row of a reliability diagram: number of images, mean confidence and accuracy."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    return is_count(value[0]) and all(map(is_none_or(is_ratio), value[1:]))


def _is_scalar(value):
    return value is None or is_text(value) or is_number(value) or isinstance(value, bool)


def _is_flag(value):
    return _is_scalar(value) or is_list_of(_is_scalar)(value)


# {metric name without its prefix "train." or "val.": check} for steps, epochs and the summary. All other metrics of
# steps and epochs must be numbers; other entries of the summary can have any value.
METRICS = {
    **dict.fromkeys(("top1", "top5", "ece", "map", "map_micro"), is_ratio),
    "reliability": is_list_of(_is_interval),
    **{f"{name}_{average}": is_ratio for name in CLASS_METRICS for average in AVERAGES},
    **dict.fromkeys(("ips", "lr", "loss_scale"), _is_size),
    **dict.fromkeys(("images", "step", "steps", "not_finite"), is_count),
    **dict.fromkeys(("epoch_time", "data_time", "compute_time", "batch_time"), _is_duration),
}
PATHS = ("image_root", "data_format", "predictions")  # flags whose value must be text or None


class _SchemaError(ValueError):
    """Raised if a field does not match the schema. The message contains the field and its value."""


@dataclass
class Run:
    """The content of a report. If a step or an epoch has several values of a metric, the last value is used.

    Attributes:
        path: path of the report.
        parameters: {flag: value} of the last start.
        explicit: names of the flags that the user set at the last start; None if the report does not list them.
        environment: {name: value} that describes the machine and the software at the last start; empty if the report
            does not contain it.
        evaluated: folder of the checkpoint that a run without training evaluates, or None.
        steps: {(epoch, step): {"train.loss": ...}}; values that are not finite are None.
        epochs: {epoch: {"train.loss": ..., "val.loss": ...}}; values that are not finite are None.
        summary: {name of an entry of the summary: value}; empty if the run has not finished.
        start_s: seconds from each start of the run to its first entry, summed over all starts.
        total_s: seconds from each start of the run to its last entry, summed over all starts.
        when: date and time of the first entry.
        before_s: part of total_s that precedes the last start.
        spent_s: {"train", "val": seconds spent, including incomplete epochs; "waiting": part of "train" spent waiting
            for images}.
        open_s: like spent_s, but only for the current, incomplete epoch.
        epoch_s: total_s at the end of the last complete epoch or at the last start, whichever is later.
    """

    path: Path
    parameters: dict[str, Any] = field(default_factory=dict)
    explicit: list[str] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    evaluated: str | None = None
    steps: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    total_s: float = 0.0
    when: str = ""
    before_s: float = 0.0
    spent_s: Counter = field(default_factory=Counter)
    open_s: Counter = field(default_factory=Counter)
    epoch_s: float = 0.0

    @property
    def is_multi_label(self) -> bool:
        """Whether the run has --multi-label."""
        return self.parameters.get("multi_label") is True

    @property
    def task(self) -> type[Task]:
        return TASKS[self.is_multi_label]

    @property
    def main_metric(self) -> str:
        """Name of the metric that determines the best evaluation, "top1" or "map"."""
        return self.task.MAIN_METRIC

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return [(completed epochs, value)] for an epoch metric, without values that are not finite."""
        points = [(epoch + 1, data.get(name)) for epoch, data in sorted(self.epochs.items())]
        return [(x, y) for x, y in points if y is not None]

    def step_curve(self, name: str) -> list[tuple[float, float]]:
        """Return [(completed epochs, value)] for a step metric, without values that are not finite. The number of
        epochs includes the completed fraction of the current epoch."""
        per_epoch = max((step for _, step in self.steps), default=0) + 1
        per_epoch = max(per_epoch, *(data.get("train.steps") or 0 for data in self.epochs.values()), 0)
        points = [(epoch + step / per_epoch, data.get(name)) for (epoch, step), data in sorted(self.steps.items())]
        return [(x, y) for x, y in points if y is not None]

    def best(self) -> tuple[int, float] | None:
        """Return (epoch, top1 or mAP) of the best evaluation at the end of an epoch (the earliest if several are
        equally good), or None."""
        results = [(data.get(f"val.{self.main_metric}"), -epoch) for epoch, data in self.epochs.items()]
        results = [(value, number) for value, number in results if value is not None]
        if not results:
            return None
        value, number = max(results)
        return -number, value

    def last(self, name: str) -> float | None:
        """Return the last value of an epoch metric. If no epoch has this metric, return its value in the summary.
        Return None if the value is missing or not finite."""
        values = [data[name] for _, data in sorted(self.epochs.items()) if name in data]
        return values[-1] if values else self.summary.get(name)

    def rows(self, kind: str, path: str | Path | None = None) -> list[dict[str, str]]:
        """Return the rows of a CSV file as dicts; [] if the file is missing, or the task has no such file.

        Args:
            kind: a key of the task's COLUMNS.
            path: path of the file; None for the file next to the report.
        Raises:
            UsageError: the file cannot be read or does not match COLUMNS.
        """
        columns = self.task.COLUMNS.get(kind)
        return [] if columns is None else _rows(path or files.companion(self.path, kind), columns)

    def folders(self) -> list[Path]:
        """Return the folders in which the run may be stored: the folder of the report, and the checkpoint folder
        according to the flags of the last start."""
        places = self.parameters.get("output_dir"), self.parameters.get("model_arch_name")
        recorded = [Path(places[0]) / network_name(places[1])] if all(map(is_text, places)) else []
        return [Path(self.path).parent, *recorded]

    def checkpoint(self) -> Path | None:
        """Return the folder of the checkpoint whose evaluation the tables describe: the best checkpoint of a training
        run, or the checkpoint that a run without training evaluates. The run folder may have been moved together with
        the report. Return None if the folder is unknown or does not exist."""
        places = [folder / "best" for folder in self.folders()]
        if self.parameters.get("run_scope") == RunScope.EVAL_ONLY.value:
            evaluated = [] if self.evaluated is None else [Path(self.evaluated)]
            places = [*evaluated, *(folder / path.name for path in evaluated for folder in self.folders())]
        return next((place for place in places if os.path.isdir(place)), None)

    def best_evaluation(self) -> dict[str, float]:
        """Return the loss and the main metric of the evaluation that the checkpoint of a training run contains; {} if
        they are unknown."""
        metrics = {name: self.summary.get(f"best.val.{name}") for name in ("loss", self.main_metric)}
        return {name: value for name, value in metrics.items() if value is not None}

    def changed_flags(self) -> dict[str, Any]:
        """Return {flag: value} of the explicit parameters of the last start. If a report from an older version does not
        list explicit flags, return the parameters that differ from the defaults."""
        if self.explicit is None:
            return parsing.changed(self.parameters)
        return {name: self.parameters[name] for name in self.explicit if name in self.parameters}

    def mean_ips(self, phase: str) -> float | None:
        """Return the mean images/s over the time of all epochs; `phase` is "train" or "val". If no epoch has a speed
        and a duration, return the value in the summary, or None if it is missing."""
        rates = [(data.get(f"{phase}.ips"), data.get(f"{phase}.epoch_time")) for data in self.epochs.values()]
        rates = [(ips, seconds) for ips, seconds in rates if ips and seconds]
        total_s = sum(seconds for _, seconds in rates)
        return sum(ips * seconds for ips, seconds in rates) / total_s if rates else self.summary.get(f"{phase}.ips")


def _rows(path, columns):
    if not Path(path).is_file():
        return []
    try:
        with files.open_regular(path, LIMIT_BYTES) as f:
            rows = csv.DictReader(io.StringIO(f.read().decode(), newline=""))
            return [_checked_row(row, rows.line_num, columns) for row in rows]
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); make it readable, or delete it") from e
    except (ValueError, csv.Error) as e:
        raise UsageError(
            f"{path}: not a table written by train.py ({e}); move it to a different folder, or delete it"
        ) from e


def _checked_row(row, line, columns):
    if None in row or None in row.values():
        raise _SchemaError(f"line {line} and the first line have different numbers of columns")
    for name, numeric in columns.items():
        text = row.get(name)
        if text is None:
            raise _SchemaError(f"column {name} is missing")
        if numeric is None or (text == "" and numeric[2]):
            continue
        parse, check, _ = numeric
        try:
            is_valid = check(parse(text))
        except ValueError:
            is_valid = False
        if not is_valid:
            raise _SchemaError(f"line {line}, {name} is {reprlib.repr(text)}")
    return row


def read(place: str | Path) -> Run:
    """Read a report.

    Args:
        place: path of the report, or of a folder that contains report.json.
    Returns:
        the Run that the report describes.
    Raises:
        UsageError: the file cannot be read, does not match the schema, or contains no "PARAMETER" line.
    """
    path = Path(place) / "report.json" if Path(place).is_dir() else Path(place)
    run = Run(path)
    try:
        with files.open_regular(path, LIMIT_BYTES) as f:
            lines = f.read().decode().split("\n")[:-1]  # omit an incomplete last line, which has no newline
        for number, line in enumerate(lines, 1):
            _add_line(run, number, line)
    except OSError as e:
        below = " or ".join(str(report.parent) for report in sorted(Path(place).glob("*/report.json"))[:3])
        remedy = f"use {below or 'a report or a folder with report.json'}"
        raise UsageError(f"{path}: cannot be read ({e.strerror}); {remedy}") from e
    except ValueError as e:
        reason = e if isinstance(e, _SchemaError) else "not UTF-8"
        raise UsageError(f"{path}: not a report written by train.py ({reason}); choose a different file") from e
    if not run.parameters:
        raise UsageError(f"{path}: contains no PARAMETER line; use the report of a run that has started")
    _close_epoch(run)
    return run


def kind(path: str | Path) -> str | None:
    """Return the kind of a report: "training", "evaluation" or "benchmark"; "" if the report contains only flags and no
    results; None if the file is not a report.

    Raises:
        OSError: the file cannot be read.
    """
    result = ""
    with files.open_regular(path) as f:
        while (line := f.readline(LINE_BYTES)).endswith(b"\n"):
            try:
                entry = json.loads(line.removeprefix(b"DLLL "))
                step, data = entry["step"], entry["data"]
                if step != "PARAMETER":
                    return result or "training"
                result = "evaluation" if data.get("run_scope") == "eval_only" else "training"
                result = "benchmark" if data.get("benchmark") else result
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None
        return "" if b"DLLL ".startswith(line[:5]) else None  # the last line may be incomplete


def run_folders(path: str | Path) -> set[Path]:
    """Return the folders of the runs that a report describes, according to the flags in the report.

    Raises:
        OSError: the file cannot be read.
    """
    folders = set()
    with files.open_regular(path) as f:
        while line := f.readline(LINE_BYTES):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if b'"PARAMETER"' in line and (entry := json.loads(line.removeprefix(b"DLLL ")))["step"] == "PARAMETER":
                    folders.add(Path(entry["data"]["output_dir"], network_name(entry["data"]["model_arch_name"])))
    return folders


def _add_line(run, number, line):
    try:
        _add(run, json.loads(line.removeprefix("DLLL ")))
    except (ValueError, RecursionError) as e:
        raise _SchemaError(f"line {number}: {e if isinstance(e, _SchemaError) else 'not JSON'}") from e


def _add(run, entry):
    if not isinstance(entry, dict):
        raise _SchemaError(f"expected an object, not {reprlib.repr(entry)}")
    step, data = entry.get("step"), entry.get("data")
    is_start = step == "PARAMETER"
    if not is_start and not (is_list_of(_is_number_of_step)(step) and len(step) <= 2):
        raise _SchemaError(f"step is {reprlib.repr(step)}")
    if not isinstance(data, dict):
        raise _SchemaError(f"data is {reprlib.repr(data)}")
    elapsed_s = _elapsed_s(entry)
    if is_start:
        explicit = data.pop(EXPLICIT, None)
        if not is_none_or(is_list_of(is_text))(explicit):
            raise _SchemaError(f"data.{EXPLICIT} is {reprlib.repr(explicit)}")
        run.environment, run.evaluated = data.pop(ENVIRONMENT, {}), data.pop(EVALUATED, None)
        if not isinstance(run.environment, dict) or not all(map(_is_scalar, run.environment.values())):
            raise _SchemaError(f"data.{ENVIRONMENT} is {reprlib.repr(run.environment)}")
        if not is_none_or(is_text)(run.evaluated):
            raise _SchemaError(f"data.{EVALUATED} is {reprlib.repr(run.evaluated)}")
        if not is_text(entry.get("datetime")):
            raise _SchemaError(f"datetime is {reprlib.repr(entry.get('datetime'))}")
        _check_parameters(data)
        _close_epoch(run)
        run.parameters, run.explicit, run.summary = data, explicit, {}
        run.when = run.when or entry["datetime"][:16]
        run.start_s += elapsed_s
        run.before_s = run.total_s
    else:
        data = {name: _metric(name, value, is_summary=step == []) for name, value in data.items()}
    run.total_s = run.before_s + elapsed_s
    if run.total_s > LIMIT_S:
        raise _SchemaError(f"the total time of all starts exceeds {LIMIT_S:g} s")
    if is_start:
        run.epoch_s = run.total_s
    elif len(step) == 2:
        run.steps.setdefault(tuple(step), {}).update(data)
        _spend(run, data)
    elif len(step) == 1:
        run.epochs.setdefault(step[0], {}).update(data)
        _spend_epoch(run, data)
    else:
        run.summary = data


def _is_number_of_step(value):
    return type(value) is int and 0 <= value < 2**53


def _elapsed_s(entry):
    try:
        value = float(entry["elapsedtime"])
    except (KeyError, TypeError, ValueError, OverflowError):
        value = math.nan
    if not _is_duration(value):
        raise _SchemaError(f"elapsedtime is {reprlib.repr(entry.get('elapsedtime'))}")
    return value


def _check_parameters(data):
    for name, value in data.items():
        if not (is_none_or(is_text) if name in PATHS else _is_flag)(value):
            raise _SchemaError(f"data.{name} is {reprlib.repr(value)}")


def _metric(name, value, is_summary):
    """Return a value of an entry, or None for Infinity and NaN, which older reports contain. Raise _SchemaError if the
    value does not match METRICS."""
    phase, _, metric = name.partition(".")
    is_known = phase in ("train", "val") and (metric in METRICS or metric == "loss")
    if is_summary and not is_known:
        return value  # the value may be text, such as a version
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if not METRICS.get(metric, _is_loss)(value):
        raise _SchemaError(f"data.{name} is {reprlib.repr(value)}")
    return value


def _spend(run, data):
    """Update run.open_s with the time since the end of the last epoch. If the run is interrupted within an epoch, only
    step entries contain the time of this epoch."""
    phase = "val" if any(name.startswith("val.") for name in data) else "train"
    batch_times = run.open_s["batch_times"] + (data.get("train.batch_time") or 0)
    data_times = run.open_s["data_times"] + (data.get("train.data_time") or 0)
    seconds = max(0.0, run.total_s - run.epoch_s)
    run.open_s = Counter({phase: seconds, "batch_times": batch_times, "data_times": data_times})
    run.open_s["waiting"] = seconds * min(1, data_times / batch_times) if batch_times else 0


def _spend_epoch(run, data):
    """Add the time of a complete epoch to run.spent_s, and reset run.open_s, the time of the steps in the epoch."""
    run.epoch_s, run.open_s = run.total_s, Counter()
    for phase in ("train", "val"):
        run.spent_s[phase] += data.get(f"{phase}.epoch_time") or 0
    run.spent_s["waiting"] += (data.get("train.data_time") or 0) * (data.get("train.steps") or 0)


def _close_epoch(run):
    run.spent_s.update({name: run.open_s[name] for name in ("train", "val", "waiting")})
    run.open_s = Counter()
