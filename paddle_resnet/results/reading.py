"""Reads what a run has left: the report and the tables beside it. docs/reports.md describes them."""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import config
from utils import files
from utils.errors import UsageError

LIMIT_BYTES = 1 << 30  # of a report: ten million steps
LINE_BYTES = 1 << 20
# Columns that must be there: whole numbers, and numbers that may be missing.
COLUMNS = {
    "classes.csv": (("label", "images", "correct"), ("top1",)),
    "confusion.csv": (("label", "predicted", "images"), ()),
    "predictions.csv": (("label", "prediction"), ("probability_1",)),
}
PATHS = ("image_root", "data_format", "predictions")  # parameters that are used as texts


@dataclass
class Run:
    """A report. Of several entries for a step, the last counts.

    Attributes:
        path: of the report.
        parameters: {flag: value} of the last start.
        steps: {(epoch, step): {"train.loss": ...}}.
        epochs: {epoch: {"train.loss": ..., "val.loss": ...}}.
        summary: {name: value}; empty if the run has not ended.
        start_s: seconds from each start to its first entry, added up.
        total_s: seconds from each start to its last entry, added up.
        when: of the first entry.
        before_s: total_s of the starts before the last.
    """

    path: Path
    parameters: dict = field(default_factory=dict)
    steps: dict = field(default_factory=dict)
    epochs: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    start_s: float = 0.0
    total_s: float = 0.0
    when: str = ""
    before_s: float = 0.0

    def curve(self, name):
        """[(epochs done, value)] of a figure of epochs."""
        return [(epoch + 1, data[name]) for epoch, data in sorted(self.epochs.items()) if name in data]

    def step_curve(self, name):
        """[(epochs done, value)] of a figure of steps."""
        per_epoch = max((step for _, step in self.steps), default=0) + 1
        per_epoch = max(per_epoch, *(data.get("train.steps", 0) for data in self.epochs.values()), 0)
        return [
            (epoch + step / per_epoch, data[name]) for (epoch, step), data in sorted(self.steps.items()) if name in data
        ]

    def best(self):
        """(epoch, top1) of the best evaluation, or None."""
        found = [(data["val.top1"], -epoch) for epoch, data in self.epochs.items() if "val.top1" in data]
        return (-max(found)[1], max(found)[0]) if found else None

    def last(self, name):
        """The last value of a figure of epochs, or that of the summary, or None."""
        found, summed = self.curve(name), self.summary.get(name)
        return found[-1][1] if found else summed if _is_number(summed) else None

    def rows(self, kind, path=None):
        """Rows of a CSV file, by default the one beside the report, as dicts; none if it is missing.

        Args:
            kind: a key of COLUMNS.
            path: of the file.
        Raises:
            UsageError: it is no such table.
        """
        return _rows(path or files.beside(self.path, kind), *COLUMNS[kind])

    def changed_flags(self):
        """{flag: value} of the parameters that are not the defaults."""
        return config.changed(self.parameters)


def _rows(path, whole_numbers, numbers):
    if not Path(path).is_file():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
        for row in rows:
            if None in row or None in row.values() or not all(0 <= int(row[name]) < 2**31 for name in whole_numbers):
                raise ValueError
            for name in numbers:
                float(row[name] or 0)
    except (ValueError, KeyError, csv.Error) as e:
        raise UsageError(f"{path} is no table of train.py: delete it, or evaluate again") from e
    return rows


def read(place):
    """Read a report.

    Args:
        place: the file, or a folder with report.json.
    Returns:
        Run.
    Raises:
        UsageError: there is none, or it is no report.
    """
    path = Path(place) / "report.json" if Path(place).is_dir() else Path(place)
    run = Run(path)
    try:
        with files.open_regular(path, LIMIT_BYTES) as f:
            lines = f.read().decode().split("\n")[:-1]  # a line without its end is torn
        for line in lines:
            _add(run, json.loads(line.removeprefix("DLLL ")))
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}): name a report or the folder of a report.json") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UsageError(f"{path} is no report of train.py: name the file of its --report-file") from e
    if not run.parameters:
        raise UsageError(f"{path} has no entries: name the report of a run that has started")
    return run


def kind(path):
    """What a report is of: "training", "evaluation" or "benchmark"; "" if it has no more than the flags of its starts.
    None for a file that is not a report.

    Raises:
        OSError: it cannot be read.
    """
    found = ""
    with files.open_regular(path) as f:
        while (line := f.readline(LINE_BYTES)).endswith(b"\n"):
            try:
                entry = json.loads(line.removeprefix(b"DLLL "))
                step, data = entry["step"], entry["data"]
                if step != "PARAMETER":
                    return found or "training"
                found = "evaluation" if data.get("run_scope") == "eval_only" else "training"
                found = "benchmark" if data.get("benchmark") else found
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None
        return "" if b"DLLL ".startswith(line[:5]) else None  # a torn line


def _add(run, entry):
    step, data, elapsed_s = entry["step"], entry["data"], float(entry["elapsedtime"])
    is_start = step == "PARAMETER"
    if not math.isfinite(elapsed_s) or not isinstance(data, dict) or not (is_start or _are_figures(step, data)):
        raise ValueError
    if is_start:
        if not all(isinstance(data.get(name), str | None) for name in PATHS):
            raise ValueError
        run.parameters, run.summary = data, {}
        run.when = run.when or entry["datetime"][:16]
        run.start_s += elapsed_s
        run.before_s = run.total_s
    elif len(step) == 2:
        run.steps.setdefault(tuple(step), {}).update(data)
    elif len(step) == 1:
        run.epochs.setdefault(step[0], {}).update(data)
    else:
        run.summary = data
    run.total_s = run.before_s + elapsed_s


def _are_figures(step, data):
    """Whether a step is a list of whole numbers, and the data are numbers; the summary, [], has texts, too."""
    is_step = isinstance(step, list) and all(type(n) is int and 0 <= n < 2**53 for n in step)
    return is_step and (step == [] or all(map(_is_number, data.values())))


def _is_number(value):
    return type(value) in (int, float)  # JSON's true and false are none
