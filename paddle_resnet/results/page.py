"""The page about a run (--report-html): one HTML file without other files, made from the report and its tables."""

import base64
import io
from datetime import timedelta
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup, escape
from PIL import Image, ImageOps

from paddle_resnet.data import listing, records
from paddle_resnet.results import reading
from paddle_resnet.results.curves import chart
from utils.errors import RunError, UsageError
from utils.mode import Mode

WORST_CLASSES, WRONG_IMAGES, THUMBNAIL = 8, 6, 144  # classes, images of each, pixels
MATRIX = 24  # classes of the confusion matrix at most


def write(path, report_file, environment=None):
    """Write the page of a run.

    Args:
        path: of the page.
        report_file: a report; the CSV files beside it are those of its last evaluation.
        environment: {name: value} to show, or None.
    Raises:
        UsageError: report_file is no report.
        RunError: the page cannot be written.
    """
    run = reading.read(report_file)
    classes, confusion = run.rows("classes.csv"), run.rows("confusion.csv")
    predictions = run.parameters.get("predictions")
    rows = reading.csv_rows(predictions) if predictions else run.rows("predictions.csv")
    save(
        path,
        "run.html.j2",
        run=run,
        best=run.best(),
        figures=_figures(run),
        charts=_charts(run),
        shares=_time(run),
        worst=_worst(run, classes, confusion, rows),
        matrix=_matrix(classes, confusion),
        changed=run.changed_flags(),
        configuration=yaml.safe_dump(run.parameters, sort_keys=False, default_flow_style=None),
        environment=environment or {},
    )


def save(path, template, **content):
    """Fill a template of this folder and write it."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = lambda seconds: str(timedelta(seconds=round(seconds)))
    try:
        Path(path).write_text(environment.get_template(template).render(content), encoding="utf-8")
    except OSError as e:
        raise RunError(f"{path} cannot be written ({e.strerror}): make room or name another file") from e


def _figures(run):
    """[(value, what it is)], the most important first."""
    top1, best = run.last("val.top1"), run.best()
    ips = run.last("train.ips") or run.last("val.ips")
    found = []
    if best is not None and run.curve("train.loss"):
        found.append((f"{best[1]:.2%}", f"best top1, epoch {best[0]}"))
    if top1 is not None:
        found.append((f"{top1:.2%}", "top1 at the end"))
    if run.last("val.top5") is not None:
        found.append((f"{run.last('val.top5'):.2%}", "top5 at the end"))
    if run.last("val.loss") is not None:
        found.append((f"{run.last('val.loss'):.4g}", "validation loss"))
    if ips:
        found.append((f"{ips:,.0f}", "images/s in training" if run.curve("train.ips") else "images/s"))
    return [*found, (str(timedelta(seconds=round(run.total_s))), "in all")]


def _charts(run):
    """[(title, [(name, CSS class)], SVG)] of what the report has curves of."""
    if not run.curve("train.loss"):
        return []
    best, charts = run.best(), []
    for metric in ("loss", "top1"):
        series = [("training, steps", "faint", run.step_curve(f"train.{metric}"))] if metric == "loss" else []
        series += [
            ("training", "train", run.curve(f"train.{metric}")),
            ("validation", "val", run.curve(f"val.{metric}")),
        ]
        mark = (best[0] + 1, best[1]) if best is not None and metric == "top1" else None
        title = f"top1, best {best[1]:.4f} in epoch {best[0]}" if mark else metric
        charts.append((title, series, chart(series, mark=mark)))
    series = [("training", "train", run.curve("train.ips")), ("validation", "val", run.curve("val.ips"))]
    charts.append(("images/s", series, chart(series, from_zero=True)))
    if rate := run.step_curve("train.lr"):
        charts.append(("learning rate", [], chart([("learning rate", "train", rate)], from_zero=True)))
    return [(title, [(name, css) for name, css, points in series if points], svg) for title, series, svg in charts]


def _time(run):
    """[(what, seconds, share)] of the time from the starts of the run to its last entry."""
    waiting = sum(
        data["train.data_time"] * data["train.steps"] for data in run.epochs.values() if "train.steps" in data
    )
    training = sum(seconds for _, seconds in run.curve("train.epoch_time"))
    parts = {"start": run.start_s, "waiting for images": waiting, "training steps": training - waiting}
    parts["evaluation"] = sum(seconds for _, seconds in run.curve("val.epoch_time"))
    parts["checkpoints and the rest"] = max(0.0, run.total_s - sum(parts.values()))
    whole = sum(parts.values()) or 1
    return [(what, seconds, seconds / whole) for what, seconds in parts.items() if seconds > 0]


def _worst(run, classes, confusion, rows):
    """The classes with the lowest accuracy: [{class, top1, images, taken_for, thumbnails}]."""
    found = sorted(
        (row for row in classes if row["top1"] and float(row["top1"]) < 1), key=lambda row: float(row["top1"])
    )
    worst = found[:WORST_CLASSES]
    images = _images(run) if rows else {}
    for row in worst:
        taken = [p for p in confusion if p["label"] == row["label"] != p["predicted"]]
        row["taken_for"] = [(pair["predicted_class"], pair["images"]) for pair in taken[:3]]
        wrong = [p for p in rows if p["label"] == row["label"] != p["prediction"]]
        wrong.sort(key=lambda p: -float(p["probability_1"]))
        row["thumbnails"] = [
            (source, p["image"], p["predicted_class"], float(p["probability_1"]))
            for p in wrong[:WRONG_IMAGES]
            if (source := _thumbnail(images.get(p["image"])))
        ]
    return worst


def _images(run):
    """{name: listing.Image} of the validation split; empty if it is no longer there."""
    data_format = run.parameters["data_format"]
    try:
        found = listing.images(run.parameters["image_root"], Mode.EVAL, None if data_format == "auto" else data_format)
    except UsageError:
        return {}
    return {image.name: image for image in found[2]}


def _thumbnail(image):
    """A data: address of a small JPEG, or None for an image that Pillow cannot read."""
    if image is None:
        return None
    try:
        source = image.path if image.kind is None else io.BytesIO(records.read(image)[0])
        with Image.open(source) as picture:
            small = ImageOps.fit(picture.convert("RGB"), (THUMBNAIL, THUMBNAIL))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _matrix(classes, confusion):
    """(SVG of the confusions, classes in it, all classes); of many classes, those with most errors."""
    errors = {row["label"]: int(row["images"]) - int(row["correct"]) for row in classes if int(row["images"])}
    if not errors:
        return None
    shown = sorted(sorted(errors, key=lambda name: -errors[name])[:MATRIX], key=int)
    place = {name: i for i, name in enumerate(shown)}
    of_label = {row["label"]: row for row in classes}
    n, longest = len(shown), max(len(_short(of_label[name]["class"])) for name in shown)
    left, top = 14 + 6.5 * longest, 18 + 5 * longest
    cell = min(44, 440 / n)
    size = f'width="{cell - 1.5:.1f}" height="{cell - 1.5:.1f}"'
    width, height = left + n * cell + 4 * longest, top + n * cell
    svg = [
        f'<svg class="matrix" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'style="min-width: {min(width, 20 * n + left):.0f}px">'
    ]
    for name, i in place.items():
        text, at = escape(_short(of_label[name]["class"])), (i + 0.5) * cell
        svg.append(f'<text x="{left - 6}" y="{top + at + 4:.1f}" text-anchor="end">{text}</text>')
        svg.append(f'<text transform="translate({left + at + 4:.1f} {top - 6}) rotate(-50)">{text}</text>')
        y = top + i * cell
        svg += [f'<rect class="empty" x="{left + k * cell:.1f}" y="{y:.1f}" {size} rx="2"/>' for k in range(n)]
    for row in confusion:
        if row["label"] in place and row["predicted"] in place:
            share = int(row["images"]) / int(of_label[row["label"]]["images"])
            x, y = left + place[row["predicted"]] * cell, top + place[row["label"]] * cell
            kind = "right" if row["label"] == row["predicted"] else "wrong"
            svg.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size} rx="2" '
                f'fill-opacity="{0.12 + 0.88 * share**0.6:.2f}"><title>{escape(row["class"])} taken for '
                f"{escape(row['predicted_class'])}: {row['images']} ({share:.1%})</title></rect>"
            )
            if cell >= 24:
                tone = "on" if share > 0.35 else "off"
                middle = f'x="{x + cell / 2 - 0.7:.1f}" y="{y + cell / 2 + 3.5:.1f}"'
                svg.append(f'<text class="count {tone}" {middle} text-anchor="middle">{row["images"]}</text>')
    return Markup("".join([*svg, "</svg>"])), n, len(errors)


def _short(name):
    return name if len(name) <= 13 else f"{name[:12]}…"
