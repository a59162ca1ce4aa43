"""Reads what a run has left: the report and the tables beside it. docs/reports.md describes them."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

import config
from utils import files
from utils.errors import UsageError


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
        found = self.curve(name)
        return found[-1][1] if found else self.summary.get(name)

    def rows(self, ending):
        """Rows of a CSV file beside the report; none if it is missing."""
        return csv_rows(files.beside(self.path, ending))

    def changed_flags(self):
        """{flag: value} of the parameters that are not the defaults."""
        return config.changed(self.parameters)


def csv_rows(path):
    """The rows of a CSV file as dicts; none if it is missing."""
    if not Path(path).is_file():
        return []
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


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
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a line without its end is torn
        for line in lines:
            _add(run, json.loads(line.removeprefix("DLLL ")))
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}): name a report or the folder of a report.json") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(f"{path} is no report of train.py: name the file of its --report-file") from e
    if not run.parameters:
        raise UsageError(f"{path} has no entries: name the report of a run that has started")
    return run


def _add(run, entry):
    step, data, elapsed_s = entry["step"], entry["data"], float(entry["elapsedtime"])
    if step == "PARAMETER":
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
