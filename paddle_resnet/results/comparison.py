"""Compare runs based on their reports, for `python -m paddle_resnet.report RUN...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paddle_resnet.data import layout
from paddle_resnet.results import lr_curve, page, reading
from paddle_resnet.results.curves import chart
from paddle_resnet.utils import files, outputs
from paddle_resnet.utils.errors import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddle_resnet.results.reading import Run

BARS = "▁▂▃▄▅▆▇█"
CURVES = {
    "val.top1": "top1",
    "val.map": "mAP",
    "val.loss": "validation loss",
    "train.loss": "training loss",
    "train.ips": "images/s",
}
# Flags that affect only the output of a run, not its computation.
PLACES = {"output_dir", "report_file", "report_html", "tensorboard_dir", "predictions", "show_config", "print_interval"}


def compare(places: list[str], html: str | None, write_page: Callable[[str, Path], None]) -> None:
    """Print a comparison of runs, and write an HTML page.

    Args:
        places: paths of reports, or of folders that contain report.json.
        html: path of the page, or None.
        write_page: function that writes the page of a single run to a path, from the report at a path.
    Raises:
        UsageError: a report cannot be read, or the page would replace a file that it is created from.
        RunError: the page cannot be written.
    """
    runs = dict(zip(_names(places), map(reading.read, places), strict=True))
    _claim_page(html, runs.values())
    tables = [("metrics", metrics(runs)), ("flags that differ", flags(runs))]
    first = next(iter(runs.values()))
    differences = [(name, first_difference(first, run)) for name, run in list(runs.items())[1:]]
    console = Console()
    for title, rows in tables:
        if rows:
            _print(console, title, runs, rows)
    _print_curves(console, runs)
    for name, text in differences:
        console.print(_text(f"{name}: {text}"), soft_wrap=True)
    if html is not None and len(runs) == 1:
        write_page(html, first.path)
    elif html is not None:
        charts = [(title, chart(_series(runs, name))) for name, title in CURVES.items()]
        page.save(html, "comparison.html.j2", runs=list(runs), tables=tables, charts=charts, differences=differences)


def _claim_page(html, runs):
    """Raise UsageError if the page would replace a file or data set from which the page is created, or cannot be
    written."""
    read = [("RUN", run.path) for run in runs]
    read += [("RUN's table", files.companion(run.path, kind)) for run in runs for kind in run.task.COLUMNS]
    read += [("RUN's table", run.parameters["predictions"]) for run in runs if run.parameters.get("predictions")]
    read += [("RUN's curve", curve) for run in runs if (curve := lr_curve.path(run.folders())) is not None]
    roots = {run.parameters.get("image_root") or "" for run in runs}
    shown = [("the data set's", path) for root in sorted(roots) for path in layout.occupied(root)]
    outputs.claim({"--html": html}, inputs=read, protected=shown)


def _names(places):
    """Return a name for each run: its path without the common prefix of all paths. A repeated path gets a numeric
    suffix."""
    parts = [place.rstrip("/").removesuffix("/report.json").split("/") for place in places]
    while len(places) > 1 and all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    names = ["/".join(p) for p in parts]
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def metrics(runs: dict[str, Run]) -> list[tuple[str, list[str]]]:
    """Return the metrics to compare: [(name, [formatted value of each run])]."""

    def of(run):
        best = run.best()
        best_of = {} if best is None else {run.main_metric: f"{best[1]:.4f} (epoch {best[0]})"}
        numbers = {name: run.last(name) for name in ("val.top1", "val.map", "val.loss", "train.loss", "train.ips")}
        text = {name: "" if value is None else f"{value:.4f}" for name, value in numbers.items()}
        return {
            "epochs": str(len(run.epochs)) + ("" if run.summary else ", not finished"),
            "best top1": best_of.get("top1", ""),
            "last top1": text["val.top1"],
            "best mAP": best_of.get("map", ""),
            "last mAP": text["val.map"],
            "last validation loss": text["val.loss"],
            "last training loss": text["train.loss"],
            "images/s, last epoch": "" if numbers["train.ips"] is None else f"{numbers['train.ips']:,.0f}",
            "total seconds": f"{run.total_s:,.0f}",
        }

    columns = [of(run) for run in runs.values()]
    rows = [(what, [column[what] for column in columns]) for what in columns[0]]
    return [(what, values) for what, values in rows if any(values) or not what.endswith("mAP")]


def flags(runs: dict[str, Run]) -> list[tuple[str, list[str]]]:
    """Return [(flag, [value of each run])] for the flags that differ. If a report from a different version lacks a
    flag, the value is "-"."""
    names = dict.fromkeys(name for run in runs.values() for name in run.parameters if name not in PLACES)
    rows = [(name, [str(run.parameters.get(name, "-")) for run in runs.values()]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def first_difference(first: Run, other: Run) -> str:
    """Describe the first step at which the training losses of two runs differ. Only steps that both runs have logged
    are compared."""
    steps = [
        (step, a["train.loss"], other.steps[step]["train.loss"])
        for step, a in sorted(first.steps.items())
        if "train.loss" in a and "train.loss" in other.steps.get(step, {})
    ]
    for i, ((epoch, step), a, b) in enumerate(steps):
        if a != b:  # None represents a loss that is not finite
            before = f"; equal in the {counted(i, 'logged step')} before" if i else ", the first logged step"
            a, b = ("not finite" if loss is None else loss for loss in (a, b))
            return f"first differs at epoch {epoch} step {step}: loss {b} instead of {a}{before}"
    return f"same losses in {counted(len(steps), 'common step')}" if steps else "no step in common with the first run"


def _print(console, title, runs, rows):
    table = Table(title=title, title_justify="left")
    for column in ("", *runs):
        table.add_column(_text(column), overflow="fold")
    for what, values in rows:
        table.add_row(_text(what), *map(_text, values))
    console.print(table)


def _text(value):
    """Return a rich Text without markup, in which control characters are escaped."""
    return Text(printable(value))


def _print_curves(console, runs):
    """Print a row of bars for each run and each metric of CURVES, with the same scale for all runs. A metric with fewer
    than two values in all runs together is omitted."""
    for name, title in CURVES.items():
        curves = {run: [y for _, y in points] for run, _, points in _series(runs, name)}
        values = [y for curve in curves.values() for y in curve]
        if len(values) < 2:
            continue
        low, high = min(values), max(values)
        console.print(f"{title}, {low:.4g} to {high:.4g}")
        for run, curve in curves.items():
            kept = curve[:: -(-len(curve) // 60) or 1]
            bars = "".join(BARS[round((y - low) / ((high - low) or 1) * (len(BARS) - 1))] for y in kept)
            console.print(_text(f"  {bars}  {run}"), soft_wrap=True)


def _series(runs, name):
    return [(run, f"c{i % 6}", runs[run].curve(name)) for i, run in enumerate(runs)]
