"""Write the HTML page of a run (--report-html): one self-contained file, created from the report and its tables."""

import base64
import functools
import io
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jinja2
import yaml
from PIL import Image, ImageOps

from paddle_resnet.data.formats import FORMATS, folder, read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.results import lr_curve, reading
from paddle_resnet.results.curves import chart
from paddle_resnet.tasks import multi_label
from paddle_resnet.utils import files, logger, outputs
from paddle_resnet.utils.checks import is_ratio
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.meters import AVERAGES, CLASS_METRICS
from paddle_resnet.utils.mode import Mode

# For the classes with the lowest accuracy: number of classes, images per class, and longer side of an image in pixels.
WORST_CLASSES, WRONG_IMAGES, THUMBNAIL = 8, 6, 288
Drawer = Callable[[bytes, int], bytes]
MATRIX = 24  # maximum number of classes in the confusion matrix


def write(
    path: str | Path,
    report_file: str | Path,
    open_drawer: Callable[[Path, dict[str, float]], Drawer] | None = None,
) -> None:
    """Write the page of a run.

    Args:
        path: path of the page to write.
        report_file: path of a report. The CSV files next to the report are from the best evaluation of the run.
        open_drawer: function that opens the checkpoint in a folder, whose evaluation must have the given metrics, and
            returns a function draw(content of an image file, label) that returns the JPEG file of a heat map.
            open_drawer raises UsageError if the checkpoint cannot be used or the network has no heat maps; draw raises
            ValueError if the image cannot be drawn. If open_drawer is None, the page contains no heat maps.
    Raises:
        UsageError: report_file or one of the run's tables cannot be read or does not match the schema.
        RunError: the page cannot be written.
    """
    run = reading.read(report_file)
    classes, confusion = run.rows("classes.csv"), run.rows("confusion.csv")
    predictions = run.parameters.get("predictions")
    rows = run.rows("predictions.csv", predictions)
    worst = _worst_of_multi_label(run, classes, rows) if run.is_multi_label else _worst(run, classes, confusion, rows)
    save(
        path,
        "run.html.j2",
        run=run,
        best=run.best(),
        metrics=_metrics(run),
        charts=_charts(run),
        reliability=_reliability(run),
        times=_times(run),
        worst=worst,
        heat_map_problem=_add_heat_maps(run, worst, rows, open_drawer),
        per_class=_per_class(run, classes),
        matrix=_matrix(classes, confusion) if "confusion" in run.task.TABLES else None,
        changed=run.changed_flags(),
        configuration=yaml.safe_dump(run.parameters, sort_keys=False, default_flow_style=None),
        teacher=_teacher(run),
    )


def _teacher(run):
    """Return {name: value} for the teacher of a run with --teacher, otherwise {}."""
    of_summary = {name.removeprefix("teacher."): v for name, v in run.summary.items() if name.startswith("teacher.")}
    names = ("teacher", "distill_weight", "distill_temperature") if of_summary else ()
    return {name: run.parameters.get(name) for name in names} | of_summary


def save(path: str | Path, template: str, **content: Any) -> None:
    """Render a template in results/ and write the page. Raise RunError if the page cannot be written."""
    try:
        with outputs.replaced(path) as partial:
            text = _templates().get_template(template).render(content)
            # File names may contain lone surrogates, which UTF-8 cannot encode.
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as e:
        raise RunError(f"{path}: cannot be written ({e.strerror}); free disk space or choose a different file") from e


@functools.cache
def _templates():
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = _duration
    environment.filters["readable"] = _readable
    return environment


def _metrics(run):
    """Return [(formatted value, description)] for the metrics at the top of the page."""
    best, is_trained = run.best(), bool(run.curve("train.loss"))
    metrics = [(f"{best[1]:.2%}", f"best {_name(run)}, epoch {best[0]}")] if best and is_trained else []
    last = (
        ("val.top1", ".2%", "final top1"),
        ("val.top5", ".2%", "final top5"),
        ("val.map", ".2%", "final mAP"),
        ("val.map_micro", ".2%", "final micro mAP"),
        ("val.loss", ".4g", "validation loss"),
    )
    metrics += [(format(run.last(name), form), what) for name, form, what in last if run.last(name) is not None]
    ips = run.mean_ips("train" if is_trained else "val")
    metrics += [(f"{ips:,.0f}", "mean images/s in training" if is_trained else "images/s")] if ips else []
    return [*metrics, (_duration(run.total_s), "total time")]


def _name(run):
    """Return the name of a run's main metric for readers."""
    return {"map": "mAP"}.get(run.main_metric, run.main_metric)


def _duration(seconds):
    return str(timedelta(seconds=min(round(seconds), reading.LIMIT_S)))


def _readable(name):
    """Remove a leading wnid from a class name: "tench" for "n01440764_tench"."""
    return re.sub(r"^n\d{8}[ _-]+(?=.)", "", name)


def _charts(run):
    """Return [(title, [(name, CSS class)], SVG)] for the curves in the report."""
    if not run.curve("train.loss"):
        return []

    def of(metric):
        both = (("training", "train"), ("validation", "val"))
        return [(name, css, points) for name, css in both if (points := run.curve(f"{css}.{metric}"))]

    best = run.best()
    loss = [("training, steps", "faint", run.step_curve("train.loss")), *of("loss")]
    metric, title = run.main_metric, f"{_name(run)}, best {best[1]:.4f} in epoch {best[0]}" if best else _name(run)
    mark = best and (best[0] + 1, best[1], f"epoch {best[0]}")
    lr = [("", "train", run.step_curve("train.lr"))]
    last_x = max(x for _, _, points in [*loss, *of(metric), *of("ips"), *lr] for x, _ in points)
    curve, suggestion = _lr_curve(run)
    charts = [
        ("loss", loss, chart(loss, last_x=last_x)),
        (title, of(metric), chart(of(metric), mark=mark, last_x=last_x)),
        ("images/s", of("ips"), chart(of("ips"), from_zero=True, last_x=last_x)),
        ("learning rate", [], chart(lr, from_zero=True, last_x=last_x)),
        ("learning-rate finder", curve, chart(curve, xlabel="--lr", mark=suggestion, has_log_x=True)),
    ]
    return [(title, [line[:2] for line in series], svg) for title, series, svg in charts if svg]


def _reliability(run):
    """Return the reliability diagram of the best evaluation (Guo et al., arXiv:1706.04599) in the form of _charts, or
    [] if the report has none."""
    best = run.best()
    metrics = run.epochs[best[0]] if best else {}
    error, rows = metrics.get("val.ece"), metrics.get("val.reliability")
    if error is None or not rows:
        return []
    points = [(confidence, accuracy) for _, confidence, accuracy in rows if None not in (confidence, accuracy)]
    series = [("calibrated", "faint", [(0, 0), (1, 1)]), ("validation", "val", points)]
    title = f"accuracy, expected calibration error {error:.2%}"
    return [(title, [line[:2] for line in series], chart(series, xlabel="confidence", from_zero=True))]


def _lr_curve(run):
    """Return (series, mark) for the chart of the learning-rate finder, or ([], None) if the folders of the run do not
    contain its file or the file has fewer than two finite losses. If the file is damaged, log a warning."""
    try:
        path = lr_curve.path(run.folders())
        curve = path and lr_curve.read(path)
    except UsageError as e:
        logger.warn(f"HTML page: omits the lr_find curve: {e}")
        curve = None
    if curve is None:
        return [], None
    points = [(x, y) for x, y in zip(curve.lr, curve.loss, strict=True) if y is not None and y <= curve.limit()]
    smoothed = list(zip(curve.lr, curve.smoothed, strict=False))  # only the last loss may be missing
    if len(smoothed) < 2:
        return [], None
    series = [("steps", "faint", points), ("smoothed", "train", smoothed)]
    if (steepest := curve.steepest) is None:
        return series, None
    return series, (*min(smoothed, key=lambda p: abs(p[0] - steepest)), f"--lr {steepest:g}")


def _times(run):
    """Return the time that the run spent on each activity: [(description, seconds, fraction of the total)]."""
    waiting, training = run.spent_s["waiting"], run.spent_s["train"]
    parts = {"start": run.start_s, "waiting for images": waiting, "training steps": max(0.0, training - waiting)}
    parts["evaluation"] = run.spent_s["val"]
    parts["checkpoints and other"] = max(0.0, run.total_s - sum(parts.values()))
    total = sum(parts.values())
    return [(what, seconds, seconds / total) for what, seconds in parts.items() if seconds > 0]


def _worst(run, classes, confusion, rows):
    """Return the WORST_CLASSES classes with the lowest accuracy, or fewer if fewer are below 1: [{class, summary,
    mistaken_for, thumbnails}]."""
    worst = [row for row in classes if row["top1"] and float(row["top1"]) < 1]
    worst = sorted(worst, key=lambda row: float(row["top1"]))[:WORST_CLASSES]
    images = _images(run) if rows else {}
    for row in worst:
        pairs = [p for p in confusion if p["label"] == row["label"] != p["predicted"]]
        row["summary"] = f"{100 * float(row['top1']):.1f}% of {row['images']} images correct"
        row["mistaken_for"] = [(pair["predicted_class"], pair["images"]) for pair in pairs[:3]]
        wrong = [p for p in rows if p["label"] == row["label"] != p["prediction"]]
        wrong.sort(key=lambda p: -float(p["probability_1"] or 0))
        row["thumbnails"] = [
            (source, p["image"], p["predicted_class"], float(p["probability_1"] or 0))
            for p in wrong[:WRONG_IMAGES]
            if (source := _thumbnail(images.get(p["image"])))
        ]
    return worst


def _worst_of_multi_label(run, classes, rows):
    """Return the result of _worst for a run with --multi-label: the WORST_CLASSES classes with the lowest average
    precision. The thumbnails are the images whose probability is on the wrong side of the threshold of the class,
    farthest from the threshold first."""
    worst = sorted((row for row in classes if row["ap"] and float(row["ap"]) < 1), key=lambda row: float(row["ap"]))
    worst = worst[:WORST_CLASSES]
    images = _images(run) if rows else {}
    for row in worst:
        name, threshold = row["class"], float(row["threshold"])
        row["summary"] = f"average precision {float(row['ap']):.4f}, {row['images']} images"
        row["mistaken_for"], wrong = [], []
        for image in rows:
            p, has_class = _ratio(image.get(multi_label.PROBABILITY + name)), name in image["labels"].split("|")
            if p is not None and has_class != (p >= threshold):
                wrong.append((abs(p - threshold), image["image"], "missed" if has_class else "wrongly found", p))
        wrong.sort(key=lambda each: -each[0])
        row["thumbnails"] = [
            (source, image, what, p)
            for _, image, what, p in wrong[:WRONG_IMAGES]
            if (source := _thumbnail(images.get(image)))
        ]
    return worst


def _add_heat_maps(run, worst, rows, open_drawer):
    """Set "heat_maps" in the rows of _worst to {image: data URL of the heat map of its predicted class}, or in those of
    _worst_of_multi_label to the heat maps of the row's class. Return the reason if no heat maps can be drawn, otherwise
    None."""
    labels = {} if run.is_multi_label else {row["image"]: row["prediction"] for row in rows}
    for row in worst:
        row["heat_maps"] = {}
    if not any(row["thumbnails"] for row in worst):
        return None
    checkpoint = run.checkpoint()
    if open_drawer is None or checkpoint is None:
        return "the evaluated checkpoint was not found"
    try:
        draw, images = open_drawer(checkpoint, run.best_evaluation()), _images(run)
    except UsageError as e:
        return str(e)
    for row in worst:
        for _, name, *_ in row["thumbnails"]:
            label = labels.get(name, row["label"])
            if label and (heat_map := _heat_map(images.get(name), int(label), draw)):
                row["heat_maps"][name] = heat_map
    return None


def _heat_map(image, label, draw):
    """Return a data URL of the heat map of an image, or None if it cannot be drawn."""
    if image is None:
        return None
    try:
        with files.open_regular(image.path) if image.kind is None else io.BytesIO(read_image(image)[0]) as source:
            return _small(Image.open(io.BytesIO(draw(source.read(), label))))
    except (OSError, ValueError):  # UsageError is a ValueError
        return None


def _ratio(text):
    """Return the ratio in a cell of a table, or None if it is missing or not a ratio."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if is_ratio(value) else None


def _per_class(run, classes):
    """Return the rows [(class, images, *RATIOS of the task)] of the best evaluation, preceded by its averages. Return
    no rows for a table of an older version, which lacks precision, recall and F1."""
    best = run.best()
    metrics = run.epochs[best[0]] if best else {}
    empty = [""] * (1 + len(run.task.RATIOS) - len(CLASS_METRICS))
    averages = [
        (f"{kind} average", *empty, *(f"{value:.4f}" for value in values))
        for kind in AVERAGES
        if None not in (values := [metrics.get(f"val.{name}_{kind}") for name in CLASS_METRICS])
    ]
    per_class = [
        (_readable(row["class"]), row["images"], *(row[name][:6] for name in run.task.RATIOS))
        for row in classes
        if row.keys() >= {*CLASS_METRICS}
    ]
    return per_class and [*averages, *per_class]


def _images(run):
    """Return {name: Image} of the validation split; {} if the split cannot be listed, for example because it no
    longer exists."""
    image_root, data_format = (run.parameters.get(name) for name in ("image_root", "data_format"))
    if image_root is None or data_format not in ("auto", *FORMATS):
        return {}
    allow_outside = run.parameters.get("allow_outside") is True
    try:
        own = folder.own_classes(image_root, Mode.EVAL)
        root = DataRoot(image_root, data_format, allow_outside, is_multi_label=run.is_multi_label)
        images = root.listed(Mode.EVAL, own)
    except (UsageError, OSError, ValueError):  # ValueError: the path contains a null byte
        return {}
    return {image.name: image for image in images}


def _thumbnail(image):
    """Return a data URL of a small JPEG, or None if `image` is None or Pillow cannot read the image."""
    if image is None:
        return None
    try:
        source = files.open_regular(image.path) if image.kind is None else io.BytesIO(read_image(image)[0])
        with source, Image.open(source) as picture:
            return _small(picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _small(picture):
    """Return a data URL of a picture, reduced to a thumbnail."""
    small = ImageOps.contain(picture.convert("RGB"), (THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _matrix(classes, confusion):
    """Return the confusion matrix for the template: class names, cells (column, row, row of confusion.csv, fraction),
    the total number of classes, and the evaluated epoch (None in older files). Return None if there are no classes."""
    of_label = {row["label"]: row for row in classes if int(row["images"])}
    wrong = [row for row in confusion if row["label"] in of_label and row["predicted"] in of_label]
    wrong = sorted((row for row in wrong if row["label"] != row["predicted"]), key=lambda row: -int(row["images"]))
    worst = dict.fromkeys(label for row in wrong for label in (row["label"], row["predicted"]))  # worst pairs first
    shown = sorted(list(worst | dict.fromkeys(of_label))[:MATRIX], key=int)
    place = {label: i for i, label in enumerate(shown)}
    names = [_readable(of_label[label]["class"]) for label in shown]
    cells = [
        (place[row["predicted"]], place[row["label"]], row, int(row["images"]) / int(of_label[row["label"]]["images"]))
        for row in confusion
        if row["label"] in place and row["predicted"] in place
    ]
    names = [name if len(name) <= 13 else f"{name[:12]}…" for name in names]
    epoch = classes[0].get("epoch") if classes else None
    return {"names": names, "cells": cells, "classes": len(of_label), "epoch": epoch} if names else None
