"""The HTML page of a run, and the comparison of runs."""

import base64
import contextlib
import csv
import html.parser
import importlib.util
import io
import json
import math
import os
import random
import re
import resource
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tensorboardX import SummaryWriter

pytest.importorskip("jinja2")

import multi_label_data

from conftest import ROOT, losses, read_report
from helpers import without_permission
from paddle_resnet import dataset, predict
from paddle_resnet import report as report_command
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.results import comparison, curves, lr_curve, page, reading
from paddle_resnet.utils.errors import RunError, UsageError


class Reader(html.parser.HTMLParser):
    """An HTML parser that collects unclosed tags, references to other files, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.text, self.tags = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data", "poster", "action")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def trained(once, run_train, tmp_path):
    """Return a folder with the files of a two-epoch run and its page. All tests share one such run."""

    def make(folder):
        flags = ["--epochs", "2", "--lr", "0.01"]  # too low a learning rate to classify all images correctly
        flags += ["--print-interval", "1", "--report-html", tmp_path / "page.html"]
        assert run_train(*flags)[0] == 0
        for path in tmp_path.glob("*.*"):
            shutil.copy(path, folder / path.name)

    return once("page_of_a_run", make)


def test_page_is_complete_and_self_contained(trained):
    text = (trained / "page.html").read_text()
    html_page = Reader(text)
    assert html_page.open == []
    assert html_page.addresses
    assert all(address.startswith("data:image/jpeg;base64,") for address in html_page.addresses)
    assert not re.search(r"@import|url\(|<link|<script|https?://", text)
    report = read_report(trained / "report.json")
    summary = report[-1]["data"]
    for part in (
        f"{summary['best.val.top1']:.2%}",
        "Worst classes",
        "Confusion matrix",
        "waiting for images",
        "evaluation",
    ):
        assert part in html_page.text, part
    assert all(part in html_page.text for part in ("model_arch_name: Tiny", "paddle", "--report-html"))
    flags_of_run = text.partition("<h3>Flags set for this run</h3>")[2].partition("</table>")[0]
    names = re.findall("<th>(.+?)</th>", flags_of_run)
    assert {"epochs", "lr", "print_interval"} <= set(names)
    # These flags were not on the command line.
    assert not {"kernels", "cuda_graph", "explicit_flags", "seed"} & set(names)
    table = text.partition("<h2>Precision, recall and F1</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    assert rows[0][2:] == [f"{summary[f'best.val.{name}_macro']:.4f}" for name in ("precision", "recall", "f1")]
    classes = csv.DictReader((trained / "report.classes.csv").read_text().splitlines())
    assert rows[2:] == [
        [row["class"], row["images"], *(row[n][:6] for n in ("precision", "recall", "f1"))] for row in classes
    ]
    chart = text.partition("<svg")[2].partition("<svg")[2].partition("</svg>")[0]  # of top1
    best = reading.read(trained / "report.json").best()[0]
    assert dots(chart, f"epoch {best}") == [dots(chart, "validation, ")[best]]
    # Charts of loss, top1, images/s and lr, the reliability diagram, and the confusion matrix.
    assert html_page.tags.count("svg") == 6
    evaluated = next(e["data"] for e in report if e["step"] == [best] and "val.ece" in e["data"])
    assert f"expected calibration error {evaluated['val.ece']:.2%}" in html_page.text
    diagram = text.partition("<h2>Calibration</h2>")[2].partition("</svg>")[0]
    assert "confidence" in diagram and "validation" in diagram
    rows = evaluated["val.reliability"]
    assert len(rows) == 15 and sum(images for images, *_ in rows) == 23
    assert summary["best.val.ece"] == evaluated["val.ece"]
    error = sum(images * abs(confidence - accuracy) for images, confidence, accuracy in rows if images) / 23
    assert error == pytest.approx(evaluated["val.ece"])


@pytest.mark.slow
def test_thumbnails_show_misclassified_images_per_class(trained, photos):
    rows = list(csv.DictReader((trained / "report.predictions.csv").read_text().splitlines()))
    wrong = [row for row in rows if row["label"] != row["prediction"]]
    assert wrong  # without wrong predictions, there are no thumbnails to check
    text = (trained / "page.html").read_text()
    shown = dict(
        re.findall(r'<figure title="([^"]+)"><img src="data:image/jpeg;base64,([^"]+)" alt="[^"]+" tabindex', text)
    )
    assert set(shown) <= {row["image"] for row in wrong}
    assert len(shown) == sum(min(6, sum(w["label"] == str(c) for w in wrong)) for c in range(3))
    for label in "012":  # for each class, wrong predictions with the highest probability come first
        of_class = sorted((row for row in wrong if row["label"] == label), key=lambda row: -float(row["probability_1"]))
        names = [row["image"] for row in of_class]
        assert [name for name in shown if name in names] == names[:6]
    for name, data in shown.items():
        thumbnail = Image.open(io.BytesIO(base64.b64decode(data)))
        assert max(thumbnail.size) == 288
        assert f"<br>{os.path.basename(name)}</figcaption>" in text
        heat_map = re.search(rf'<img src="data:image/jpeg;base64,([^"]+)" alt="heat map of {re.escape(name)}"', text)
        # The heat map shows the same entire image.
        assert Image.open(io.BytesIO(base64.b64decode(heat_map[1]))).size == pytest.approx(thumbnail.size, abs=1)
        label = next(int(row["label"]) for row in rows if row["image"] == name)
        color = thumbnail.resize((1, 1)).getpixel((0, 0))
        assert max(range(3), key=color.__getitem__) == label


def test_page_of_evaluation_uses_its_predictions(run_train, checkpoint, tmp_path):
    flags = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    flags += ["--report-html", tmp_path / "eval.html", "--predictions", tmp_path / "all.csv"]
    assert run_train(*flags)[0] == 0
    html_page = Reader((tmp_path / "eval.html").read_text())
    assert "Curves" not in html_page.text and "Confusion matrix" in html_page.text
    assert "Calibration" in html_page.text
    assert len(html_page.addresses) > 0 and not list(tmp_path.glob("report.predictions.csv"))


def test_classes_with_lowest_accuracy_come_first_with_wrong_predictions(monkeypatch):
    """In the confusion matrix, rows are labels and columns are predictions."""
    accuracies = (("a", 4, 1, "0.25"), ("b", 4, 0, "0"), ("c", 4, 4, "1"), ("empty", 0, 0, ""))
    keys = ("label", "class", "images", "correct", "top1")
    classes = [dict(zip(keys, map(str, (label, *row)), strict=True)) for label, row in enumerate(accuracies)]
    keys = ("label", "predicted", "images", "predicted_class")
    pairs = ((1, 0, 4, "a"), (2, 2, 4, "c"), (0, 2, 3, "c"), (1, 3, 1, "empty"), (4, 0, 1, "a"), (0, 0, 1, "a"))
    confusion = [dict(zip(keys, map(str, pair), strict=True)) for pair in pairs]
    worst = page._worst(None, classes, confusion, [])
    mistakes = [(row["class"], row["mistaken_for"]) for row in worst]
    assert mistakes == [("b", [("a", "4"), ("empty", "1")]), ("a", [("c", "3")])]
    pairs = [{"label": "0", "predicted": str(i), "images": "1", "predicted_class": f"c{i}"} for i in range(1, 6)]
    many = page._worst(None, [classes[0] | {"label": str(i)} for i in range(10)], pairs, [])
    assert len(many) == 8 and many[0]["mistaken_for"] == [("c1", "1"), ("c2", "1"), ("c3", "1")]
    many = page._worst(None, [classes[0] | {"label": str(i), "top1": f"{0.9 - i / 100}"} for i in range(10)], [], [])
    assert [row["label"] for row in many] == ["9", "8", "7", "6", "5", "4", "3", "2"]
    monkeypatch.setattr(page, "_images", lambda run: {"right": "right", "wrong": "wrong", "nan": "nan"})
    monkeypatch.setattr(page, "_thumbnail", lambda image: image)
    keys = ("image", "label", "prediction", "predicted_class", "probability_1")
    rows = (("right", *"00a", "0.9"), ("nan", *"02c", ""), ("wrong", *"02c", "0.6"))
    worst = page._worst(None, classes, confusion, [dict(zip(keys, row, strict=True)) for row in rows])
    assert [row["thumbnails"] for row in worst] == [[], [("wrong", "wrong", "c", 0.6), ("nan", "nan", "c", 0.0)]]
    matrix = page._matrix(classes, confusion)
    assert matrix["names"] == ["a", "b", "c"]
    assert [(column, row, fraction) for column, row, _, fraction in matrix["cells"]] == [
        (0, 1, 1.0),
        (2, 2, 1.0),
        (2, 0, 0.75),
        (0, 0, 0.25),
    ]


def test_image_without_a_prediction_is_shown_without_a_heat_map(trained, photos, tmp_path):
    """The logits of an image can be NaN. The drawer gets the evaluation that the checkpoint must have."""
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "best").mkdir()
    with open(tmp_path / "report.predictions.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    lost, *others = [row for row in rows if row["label"] != row["prediction"]]
    lost |= dict.fromkeys(("prediction", "predicted_class", "probability_1"), "")
    for row in others[3:]:  # so that the page shows all images with a wrong prediction
        row["prediction"] = row["label"]
    with open(tmp_path / "report.predictions.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    evaluations, labels, picture = [], [], next((photos / "val").glob("*/*")).read_bytes()

    def open_drawer(checkpoint, evaluation):
        evaluations.append((checkpoint, evaluation))
        return lambda data, label: labels.append(label) or picture

    page.write(tmp_path / "page.html", tmp_path / "report.json", open_drawer)
    summary, text = read_report(tmp_path / "report.json")[-1]["data"], (tmp_path / "page.html").read_text()
    expected = {name: summary[f"best.val.{name}"] for name in ("loss", "top1")}
    assert evaluations == [(tmp_path / "best", expected)]
    assert f'alt="{lost["image"]}"' in text and f'alt="heat map of {lost["image"]}"' not in text
    assert labels and set(labels) <= {int(row["prediction"]) for row in others[:3]}


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK"])
def test_thumbnails_of_all_kinds_of_pixels_are_in_color(tmp_path, mode):
    suffix = "tiff" if mode == "CMYK" else "png"
    path = tmp_path / f"a.{suffix}"
    Image.new(mode, (600, 300)).save(path)
    data = page._thumbnail(ListedImage("a", str(path), 0))
    with Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))) as thumbnail:
        assert (thumbnail.mode, thumbnail.size) == ("RGB", (288, 144))


def test_thumbnails_and_heat_maps_are_those_of_images_in_record_files(run_train, checkpoint, converted, tmp_path):
    scope = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint, "--report-html", tmp_path / "p.html"]
    assert run_train(*scope, image_root=converted["webdataset"])[0] == 0
    text = (tmp_path / "p.html").read_text()
    alternatives = re.findall(r'<img src="data:image/jpeg;base64,[^"]+" alt="([^"]+)"', text)
    names = [name for name in alternatives if not name.startswith("heat map of ")]
    assert names and sorted(alternatives) == sorted([*names, *(f"heat map of {name}" for name in names)])


def test_images_are_listed_in_the_format_of_the_run(photos, converted, tmp_path):
    def names(**parameters):
        return set(page._images(reading.Run(None, parameters)))

    expected = {str(path.relative_to(photos)) for path in photos.glob("val/*/*")}
    assert names(image_root=str(photos), data_format="auto") == expected
    assert names(image_root=str(photos), data_format="folder") == expected
    assert len(names(image_root=str(converted["webdataset"]), data_format="webdataset")) == 23
    (tmp_path / "val").symlink_to(photos / "val")
    first = min(expected)
    (tmp_path / "val.txt").write_text(f"{first} 0\n")
    (tmp_path / "train/class0").mkdir(parents=True)  # the other classes have been removed since the run
    assert names(image_root=str(tmp_path), data_format="folder") == expected
    assert names(image_root=str(tmp_path), data_format="filelist") == {first}
    (tmp_path / "val.txt").write_text(f"{photos / first} 0\n")
    assert names(image_root=str(tmp_path), data_format="filelist") == set()
    assert names(image_root=str(tmp_path), data_format="filelist", allow_outside=True) == {str(photos / first)}
    root = multi_label_data.write(tmp_path / "several")
    expected = {str(path.relative_to(root)) for path in root.glob("val/*")}
    assert len(expected) > 1
    assert names(image_root=str(root), data_format="auto", multi_label=True) == expected
    for parameters in (
        {"data_format": "auto"},
        {"image_root": str(photos), "data_format": "synthetic"},
        {"image_root": "a\0b", "data_format": "auto"},
    ):
        assert names(**parameters) == set()


def test_page_escapes_names_and_limits_number_of_classes(trained, tmp_path):
    """With 1,000 classes, the page shows only the classes with the most errors. Markup in class names is escaped."""
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    names = [f"<b>class</b> & '{i}' 猫" for i in range(1000)]
    with open(tmp_path / "report.classes.csv", "w", newline="") as f:
        csv.writer(f).writerows(
            [
                ("label", "class", "images", "correct", "top1"),
                *((i, n, 50, i % 50, i % 50 / 50) for i, n in enumerate(names)),
            ]
        )
    with open(tmp_path / "report.confusion.csv", "w", newline="") as f:
        rows = [(i, (i + 1) % 1000, 50 - i % 50, names[i], names[(i + 1) % 1000]) for i in range(1000)]
        csv.writer(f).writerows([("label", "predicted", "images", "class", "predicted_class"), *rows])
    page.write(tmp_path / "many.html", tmp_path / "report.json")
    text = (tmp_path / "many.html").read_text()
    html_page = Reader(text)
    assert html_page.open == [] and "b" not in html_page.tags[html_page.tags.index("h2") :]
    assert "the 24 of 1000 classes with the most frequent confusions" in " ".join(html_page.text.split())
    assert names[0] in html_page.text
    assert len(text) < 200_000


def entry(step, elapsed, **data):
    record = {"timestamp": "0", "datetime": "2026-01-01 10:00:00", "elapsedtime": str(elapsed), "type": "LOG"}
    return f"DLLL {json.dumps(record | {'step': step, 'data': {k.replace('_', '.', 1): v for k, v in data.items()}})}\n"


START_OF_RUN = entry("PARAMETER", 1).replace('"data": {}', '"data": {"lr": 1}')


@pytest.fixture
def write_run(tmp_path):
    def write_run(name, losses, lr=0.1, ended=True):
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            entry("PARAMETER", 1.0).replace('"data": {}', json.dumps({"data": {"lr": lr, "output_dir": name}})[1:-1])
        ]
        lines += [entry([i // 2, i % 2], 2 + i, train_loss=loss) for i, loss in enumerate(losses)]
        lines += [
            entry([e], 10 + e, train_loss=0.5 - lr * e, val_top1=e / 10, val_loss=0.4) for e in range(len(losses) // 2)
        ]
        (folder / "report.json").write_text("".join(lines + [entry([], 20, val_top1=0.1)] * ended))
        return str(folder)

    return write_run


def test_last_entry_of_step_is_used_and_startup_times_are_summed(write_run):
    path = write_run("a", [3.0, 2.0])
    report = reading.read(path)
    assert (report.total_s, report.start_s, report.best()) == (20, 1, (0, 0.0))
    assert report.changed_flags() == {"lr": 0.1, "output_dir": "a"}  # all parameters that differ from the defaults
    with open(report.path, "a") as f:
        f.write(
            START_OF_RUN  # a start that ended before its first step
            + entry("PARAMETER", 5).replace('"data": {}', '"data": {"lr": 7}').replace("2026", "2027")
            + entry([0, 1], 9, train_loss=1.5)
            + '{"torn'
        )
    report = reading.read(path)
    assert report.steps[0, 1] == {"train.loss": 1.5}
    assert (report.total_s, report.start_s, report.summary) == (30, 7, {})
    assert report.parameters == {"lr": 7} and report.when == "2026-01-01 10:00"


@pytest.mark.parametrize("text", ["", "DLLL []\n", "no JSON\n", "\udcff\n", None])
def test_invalid_report_is_rejected(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=f"^{tmp_path}/report.json") as e:
        reading.read(tmp_path)
    assert ("(not UTF-8)" in str(e.value)) == (text == "\udcff\n")
    assert report_command.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}/report.json" in capsys.readouterr().err
    for arguments, message in (
        ([str(tmp_path), "--htm", "x"], "--htm: unknown flag; use --html"),  # flags must not be abbreviated
        ([str(tmp_path), "--html", ""], "--html: '' is an empty path"),
        ([""], "RUN: '' is an empty path"),
    ):
        assert report_command.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_comparison_lists_differing_flags_and_first_differing_step(write_run, capsys, environment):
    environment(COLUMNS="200")
    runs = [
        write_run("a", [3.0, 2.0, 1.0, math.nan]),
        write_run("b", [3.0, 2.0, 1.0 + 1e-15, 0.5], lr=0.2, ended=False),
    ]
    runs += [write_run("c", [3.0, 2.0, 1.0, math.nan]), write_run("d", []), write_run("e", [3.0, 2.0, 1.0, 0.5])]
    assert report_command.main(runs) == 0
    output = capsys.readouterr().out
    assert re.search(r"│ lr +│ 0.1 +│ 0.2 +│ 0.1 +│ 0.1 +│ 0.1 +│", output)
    assert "output_dir" not in output  # output_dir is not listed, because paths do not affect results
    assert "b: first differs at epoch 1 step 0: loss 1.000000000000001 instead of 1.0; equal in the" in output
    assert "c: same losses in 4 common steps" in output
    assert "d: no step in common with the first run" in output
    assert "e: first differs at epoch 1 step 1: loss 0.5 instead of not finite; equal in the 3 logged" in output
    assert re.search(r"│ epochs +│ 2 +│ 2, not finished +│", output)
    assert re.search(r"best top1 +│ 0.1000 \(epoch 1\)", output)
    assert "top1, 0 to 0.1\n  ▁█  a\n" in output


def test_comparison_escapes_control_characters(write_run, capsys):
    runs = [write_run("a\x1b[31m", [3.0, 2.0]), write_run("b\n", [3.0, 1.0]), write_run("c\udcff", [3.0, 2.0])]
    assert report_command.main([*runs, "--html", f"{runs[0]}.html"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "  ▁  a\\x1b[31m\n" in output and "\nb\\n: first differs at epoch 0" in output
    assert "c\\udcff</b> same losses" in Path(f"{runs[0]}.html").read_text()


def test_comparison_shows_metrics_of_last_epoch_and_best_top1(write_run):
    path = write_run("a", [3.0, 2.0, 1.0, 0.5], ended=False)
    with open(f"{path}/report.json", "a") as f:
        f.write(entry([2], 1234, train_loss=0.2, train_ips=5678.4, val_top1=0.05, val_loss=0.6))
    metrics = comparison.metrics({"a": reading.read(path)})
    assert metrics == [
        ("epochs", ["3, not finished"]),
        ("best top1", ["0.1000 (epoch 1)"]),
        ("last top1", ["0.0500"]),
        ("last validation loss", ["0.6000"]),
        ("last training loss", ["0.2000"]),
        ("images/s, last epoch", ["5,678"]),
        ("total seconds", ["1,234"]),
    ]
    names = [name for name, _ in metrics]
    assert [name for name, _ in comparison.metrics({"a": reading.Run(None)})] == names  # without an evaluation


def test_first_differing_step_does_not_depend_on_order_of_entries():
    """After a resume with a smaller --print-interval, earlier steps can follow later ones."""
    runs = [SimpleNamespace(steps={step: {"train.loss": loss} for step in [(1, 0), (0, 1)]}) for loss in (1.0, 2.0)]
    expected = "first differs at epoch 0 step 1: loss 2.0 instead of 1.0, the first logged step"
    assert comparison.first_difference(*runs) == expected
    for i, run in enumerate(runs):  # entries of an evaluation contain no training loss
        run.steps |= {(0, -i): {"val.loss": 1.0}, (0, i - 1): {"train.loss": 3.0 + i}}
    assert comparison.first_difference(*runs) == expected


def test_html_page_of_comparison_and_of_one_run(write_run, trained, tmp_path):
    runs = [write_run("a", [3.0, 2.0]), write_run("<i>", [3.0, 1.0], lr=0.2)]
    assert report_command.main([runs[0], "--html", str(tmp_path / "two.html"), runs[1]]) == 0
    html_page = Reader((tmp_path / "two.html").read_text())
    assert html_page.open == [] and html_page.addresses == [] and "<i>" in html_page.text
    assert "first differs at epoch 0 step 1" in html_page.text
    text = "".join(html_page.text.split())
    assert "2runs" in text and "Firstdifferencefroma<i>firstdiffers" in text
    assert "Metricsa<i>epochs11besttop1" in text and "Flagsthatdiffera<i>lr0.10.2" in text
    assert report_command.main([str(trained), "--html", str(tmp_path / "one.html")]) == 0
    assert "Confusion matrix" in (tmp_path / "one.html").read_text()


def test_runs_with_same_name_are_numbered():
    assert comparison._names(["out/a/report.json", "out/b"]) == ["a", "b"]
    assert comparison._names(["a", "a"]) == ["a", "a (2)"]
    assert comparison._names(["x/report.json"]) == ["x"]
    assert comparison._names(["out/a", "old/a/"]) == ["out/a", "old/a"]


def test_labels_of_axes_are_short():
    labels = {9999: "9999", 10000: "10k", -12345: "-12.345k", 0.1234567: "0.12346"}
    assert {value: curves.label(value) for value in labels} == labels


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1] * 8 + [4], 4), ([3] + [1] * 9, 3), ([3.1] + [1] * 9, 1), ([400, *range(100)], 98), ([5] + [0] * 9, 5)],
)
def test_upper_end_of_axis_excludes_an_outlier_of_ten_values(values, expected):
    assert curves._without_outliers(values) == expected


def test_chart_escapes_names_and_draws_all_float32_values():
    assert curves.chart([("a", "train", [])]) == ""
    assert 'aria-label="b, c"' in curves.chart([(name, "train", [(1, 1)] * (name != "a")) for name in "abc"])
    for values in (
        [2.0],
        [2.0, 4.0],
        [1e-45, 1e-40],
        [1e-45, 3.4e38],
        [-3.4e38, 3.4e38],
        [1.0, 1.0 + 1e-15],
        [3.4e38] * 2,
    ):
        for from_zero in {False, values[0] >= 0}:
            svg = curves.chart([("<a>", "train", list(enumerate(values)))], from_zero=from_zero)
            assert "nan" not in svg and "inf" not in svg and "&lt;a&gt;" in svg and 'aria-label="&lt;a&gt;"' in svg


def labels(svg):
    """Return [(x, y, text)] of the labels of a chart, in points. The y coordinate increases downwards."""
    found = re.findall(r'<text [^>]*?x="([^"]+)" y="([^"]+)"[^>]*>([^<]+)</text>', svg)
    return [(float(x), float(y), text) for x, y, text in found]


def dots(svg, title):
    """Return [(x, y)] of the dots whose tooltips begin with the title."""
    found = re.findall(rf'<g><title>{title}[^<]*</title>.*?<use [^>]*?x="([^"]+)" y="([^"]+)"', svg, re.DOTALL)
    return [(float(x), float(y)) for x, y in found]


def test_chart_places_points_at_their_values():
    """If the y axis need not begin at 0, it is logarithmic if the largest value is more than 30 times the smallest. The
    circle that marks a point is centered on the point, and its text does not cross the edge of the chart."""
    for values, kind in (((1.0, 5.5, 10.0), {}), ((1.0, 10.0, 100.0), {}), ((2.0, 51.0, 100.0), {"from_zero": True})):
        points = list(enumerate(values, 1))
        svg = curves.chart([("a", "train", points)], mark=(*points[1], "<1>"), **kind)
        (x1, y1), (x2, y2), (x3, y3) = dots(svg, "a, ")
        assert 0 < x1 < x2 < x3 < 72 * curves.SIZE[0] and 72 * curves.SIZE[1] > y1 > y2 > y3 > 0
        assert (x2 - x1, y1 - y2) == pytest.approx((x3 - x2, y2 - y3), abs=0.01)
        assert dots(svg, "&lt;1&gt;") == [(x2, y2)]
        [(x, _, _)] = [label for label in labels(svg) if label[2] == "&lt;1&gt;"]
        assert x < x2  # the point is in the right half
        assert f"<title>a, 2: {values[1]:.4g}</title>" in svg
    assert "fill: var(--soft)" in svg and "stroke: var(--train)" in svg and "#0000" not in svg


def test_equal_charts_have_equal_text():
    assert len({curves.chart([("a", "train", [(0, 1), (1, 2)])]) for _ in range(2)}) == 1


def test_short_curves_have_dots():
    assert dots(curves.chart([("a", "train", [(0, 1), (1.5, 2), (2, 3)])]), "a") == []  # not all epochs are complete
    for count, expected in ((30, 30), (31, 0)):
        svg = curves.chart([("a", "train", [(x, x) for x in range(count)])], mark=(0, 0, "text"))
        assert len(dots(svg, "a, ")) == expected and len(dots(svg, "text")) == 1


def test_outlier_does_not_flatten_chart():
    """A single loss of 300 is drawn at the upper edge, and the other losses fill the height of the chart."""
    losses_ = [2 - i / 100 for i in range(100)]
    svg = curves.chart([("a", "train", list(enumerate([300, *losses_])))])
    x_axis = labels(svg)[0][1]
    assert max(float(text) for _, y, text in labels(svg) if y < x_axis) < 3


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1e-10, 1.0), (1e-3, 2.0), (1e4, 3.0)], {"1e-10", "0.01"}),
        ([(0.001, 1.0), (0.03, 2.0)], {"0.001", "0.002", "0.02"}),
    ],
)
def test_logarithmic_x_axis_has_few_labels(points, expected):
    svg = curves.chart([("a", "train", points)], mark=(*points[1], "b"), has_log_x=True, xlabel="--lr")
    (_, height, _) = next(label for label in labels(svg) if label[2] in expected)
    shown = {text for _, y, text in labels(svg) if y == height}
    assert 3 <= len(shown) <= 9


def test_charts_of_a_page_have_the_same_x_axis(trained, tmp_path):
    text = (trained / "page.html").read_text().partition("<h2>Calibration</h2>")[0]
    charts = re.findall(r'<svg class="chart".+?</svg>', text, re.DOTALL)
    check_axes(charts, 4)
    steps = {(epoch, step): {"train.loss": 1.0} for epoch in range(2) for step in range(4)}
    run = reading.Run(tmp_path / "report.json", steps=steps, epochs={0: {"train.loss": 1.0, "val.top1": 0.5}})
    check_axes([svg for _, _, svg in page._charts(run)], 2)  # the steps extend into an epoch that is not complete


def check_axes(charts, count):
    """The labels of the x axis are those at the height of the first label."""
    axes = [[text for _, y, text in labels(svg) if y == labels(svg)[0][1]] for svg in charts]
    assert len(charts) == count and len(set(map(tuple, axes))) == 1


def test_page_omits_missing_metrics():
    run = reading.Run(None, epochs={0: {"train.loss": 1.0}}, total_s=5)
    assert page._metrics(run) == [("0:00:05", "total time")]
    assert page._times(reading.Run(None)) == []


def test_metrics_of_training_and_evaluation():
    results = {"val.top1": 0.5, "val.top5": 0.75, "val.loss": 1.25, "val.ips": 2000.0}
    trained = {"train.loss": 1.0, "train.ips": 1000.0, "train.epoch_time": 2.0}
    shown = [("50.00%", "final top1"), ("75.00%", "final top5"), ("1.25", "validation loss")]
    time = ("1:01:02", "total time")
    run = reading.Run(None, epochs={3: results | trained}, total_s=3661.6)
    speed = ("1,000", "mean images/s in training")
    assert page._metrics(run) == [("50.00%", "best top1, epoch 3"), *shown, speed, time]
    for content in ({"summary": results}, {"epochs": {3: results | {"val.epoch_time": 2.0}}}):
        run = reading.Run(None, total_s=3661.6, **content)
        assert page._metrics(run) == [*shown, ("2,000", "images/s"), time]
    assert page._duration(1e12) == page._duration(reading.LIMIT_S)


def test_fractions_of_times():
    run = reading.Run(None, start_s=2.0, total_s=10.0, spent_s=Counter(train=5.0, waiting=1.0, val=1.0))
    assert page._times(run) == [
        *(("start", 2, 0.2), ("waiting for images", 1, 0.1), ("training steps", 4, 0.4), ("evaluation", 1, 0.1)),
        ("checkpoints and other", 2, 0.2),
    ]
    run = reading.Run(None, start_s=2.0, total_s=1.0, spent_s=Counter(train=2.0, waiting=3.0))
    assert page._times(run) == [("start", 2, 0.4), ("waiting for images", 3, 0.6)]


def test_charts_of_a_training_run():
    run = reading.Run(Path("report.json"), steps={(0, 0): {"train.loss": 1.0, "train.lr": 0.1}})
    run.epochs[2] = {"train.loss": 1.0, "val.loss": 2.0, "val.top1": 0.5, "train.ips": 9.0}
    charts = page._charts(run)
    assert [(title, series) for title, series, _ in charts] == [
        ("loss", [("training, steps", "faint"), ("training", "train"), ("validation", "val")]),
        ("top1, best 0.5000 in epoch 2", [("validation", "val")]),
        ("images/s", [("training", "train")]),
        ("learning rate", []),
    ]
    *_, top1, ips, rate = [svg for *_, svg in charts]
    assert ["epoch 2" in svg for *_, svg in charts] == [False, True, False, False]  # the best epoch is marked
    # The scales of images/s and of the learning rate begin at 0.
    assert all(re.search(r">0(\.0+)?<", svg) for svg in (ips, rate))


def test_chart_of_lr_curve_omits_high_losses(tmp_path):
    steps = {"lr": [1, 2, 3, 4], "loss": [2.0, 9.0, 1.0, math.inf]}

    def chart(smoothed, steepest=None):
        results = {"smoothed": smoothed, "steepest": steepest, "minimum": steepest}
        curve = lr_curve.Curve(**steps, **results, factor=1, ended_early=True, arguments={})
        lr_curve.write(tmp_path / lr_curve.DATA, curve)
        return page._lr_curve(reading.Run(tmp_path / "report.json"))

    smoothed = [(1, 2.0), (2, 1.5), (3, 1.0)]
    series = [("steps", "faint", [(1, 2.0), (3, 1.0)]), ("smoothed", "train", smoothed)]
    assert chart([2.0, 1.5, 1.0], 2.4) == (series, (2, 1.5, "--lr 2.4"))
    assert chart([2.0, 1.5, 1.0]) == (series, None)
    steps = {"lr": [1, 2], "loss": [2.0, math.nan]}
    assert chart([2.0]) == ([], None)


def test_tables_of_earlier_versions_have_no_precision():
    rows = [{"class": "n01440764_tench", "images": "3", **dict.fromkeys(("precision", "recall", "f1"), "0.123456")}]
    averages = {f"val.{name}_weighted": 0.5 for name in ("precision", "recall", "f1")}
    run = reading.Run(None, epochs={0: {"val.top1": 0.5, "val.map": 0.5, "val.f1_macro": 0.5, **averages}})
    of_row = [("tench", "3", "0.1234", "0.1234", "0.1234")]
    assert page._per_class(run, rows) == [("weighted average", "", "0.5000", "0.5000", "0.5000"), *of_row]
    run.parameters["multi_label"], rows[0]["ap"] = True, "0.75"  # the average of ap is mAP, which has its own place
    assert page._per_class(run, rows) == [
        ("weighted average", "", "", "0.5000", "0.5000", "0.5000"),
        ("tench", "3", "0.75", "0.1234", "0.1234", "0.1234"),
    ]
    del rows[0]["f1"]
    assert page._per_class(run, rows) == []


def test_class_names_are_shown_without_wnid():
    assert page._readable("n01440764_tench") == "tench"
    assert [page._readable(name) for name in ("n01440764", "n01440764_", "nine", "n0144_x")] == [
        *("n01440764", "n01440764_", "nine", "n0144_x")
    ]


def test_matrix_of_many_classes_shows_the_most_frequent_confusions():
    """Class 40 has the most errors, but they are spread over many classes. The most frequent confusion is (50, 51)."""
    classes = [{"label": str(i), "class": f"c{i}", "images": str(60 + i), "correct": "55"} for i in range(100)]
    pairs = [(40, k, 1) for k in range(30)] + [(50, 51, 9), (60, 61, 8)] + [(i, i, 50) for i in range(100)]
    confusion = [{"label": str(a), "predicted": str(b), "images": str(n), "predicted_class": ""} for a, b, n in pairs]
    matrix = page._matrix(classes, confusion)
    assert matrix["names"] == [f"c{i}" for i in (*range(19), 40, 50, 51, 60, 61)]
    fractions = {(row["label"], row["predicted"]): fraction for _, _, row, fraction in matrix["cells"]}
    assert (fractions["50", "51"], fractions["51", "51"]) == (9 / 110, 50 / 111)
    classes = [{"label": str(i), "class": "n" * (13 + i), "images": "1"} for i in range(2)]
    matrix = page._matrix(classes, [])
    assert matrix["names"] == ["n" * 13, "n" * 12 + "…"]
    assert (matrix["classes"], matrix["epoch"]) == (2, None)
    assert page._matrix([], []) is None
    assert page._matrix([{**row, "epoch": "7"} for row in classes], [])["epoch"] == "7"


def test_mean_speed_covers_all_epochs(tmp_path):
    lines = [entry("PARAMETER", 0.5).replace('"data": {}', '"data": {"lr": 1}')]
    for e, (images, seconds) in enumerate([(100, 10), (100, 2)]):
        line = entry([e], 5 + e).replace(
            '"data": {}', f'"data": {{"train.ips": {images / seconds}, "train.epoch_time": {seconds}}}'
        )
        lines.append(line)
    (tmp_path / "report.json").write_text("".join(lines))
    assert reading.read(tmp_path).mean_ips("train") == pytest.approx(200 / 12)
    for epoch in ({"train.ips": 5.0}, {"train.ips": 5.0, "train.epoch_time": 0}, {"train.epoch_time": 2.0}):
        run = reading.Run(None, epochs={0: epoch}, summary={"train.ips": 7.0})
        assert run.mean_ips("train") == 7


def test_metrics_do_not_depend_on_order_of_epochs():
    run = reading.Run(None, epochs={2: {"val.top1": 0.5, "train.loss": 1.0}, 1: {"val.top1": 0.75}})
    run.epochs[0] = {"val.top1": 0.75, "train.loss": 3.0}
    assert run.curve("train.loss") == [(1, 3.0), (3, 1.0)]
    assert (run.last("train.loss"), run.last("val.top1"), run.best()) == (1.0, 0.5, (0, 0.75))
    run.epochs[2]["train.loss"] = None  # not finite
    assert run.last("train.loss") is None


@pytest.mark.parametrize(
    ("metric", "valid", "invalid"),
    [
        *(("top1", 1, 1.1), ("f1_macro", 0, -0.1), ("ips", 0, -1), ("loss_scale", 1e38, 1e39), ("images", 3, 1.5)),
        *(("step", 0, -1), ("steps", 1, True), ("not_finite", 0, -1), ("epoch_time", 1e10, 1.1e10)),
        *(("data_time", 0, -1), ("loss", -1e38, "x"), ("other", -1.0, "x")),
    ],
)
def test_values_of_metrics(metric, valid, invalid):
    assert reading._metric(f"val.{metric}", valid, False) == valid
    with pytest.raises(reading._SchemaError, match=rf"^data.val.{metric} is "):
        reading._metric(f"val.{metric}", invalid, False)
    assert reading._metric(f"train.{metric}", math.inf, False) is None
    assert reading._metric(f"other.{metric}", "text", True) == "text"
    if metric != "other":
        with pytest.raises(reading._SchemaError, match=rf"^data.val.{metric} is "):
            reading._metric(f"val.{metric}", invalid, True)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("classes.csv", "label,class,images,correct,top1\n0,a,1,1,\n", None),
        ("classes.csv", "label,class,images,correct,top1\n0,a,,1,\n", "line 2, images is ''"),
        ("classes.csv", "label,images,correct,top1\n0,1,1,\n", "column class is missing"),
        (
            "classes.csv",
            "label,class,images,correct,top1\n0,a\n",
            "line 2 and the first line have different numbers of",
        ),
        ("classes.csv", "label,class,images,correct,top1\n0,a,1,1,1,1\n", "line 2 and the first line have different"),
        ("predictions.csv", "label,prediction,probability_1,image,predicted_class\n0,,,a,\n", None),
        ("predictions.csv", "label,prediction,probability_1,image,predicted_class\n,,,a,\n", "line 2, label is ''"),
        ("confusion.csv", "label,predicted,images,class,predicted_class\n0,,1,a,b\n", "line 2, predicted is ''"),
    ],
)
def test_cells_of_tables(tmp_path, name, text, problem):
    (tmp_path / f"report.{name}").write_text(text)
    run = reading.Run(tmp_path / "report.json")
    if problem is None:
        assert len(run.rows(name)) == 1 and run.rows(name, tmp_path / "missing.csv") == []
    else:
        with pytest.raises(UsageError, match=problem):
            run.rows(name)


def test_folders_and_explicit_flags_of_a_run(tmp_path):
    path = tmp_path / "report.json"
    data = {"output_dir": "out", "model_arch_name": "nets/net.py:Net", "explicit_flags": ["lr"]}
    path.write_text(START_OF_RUN.replace('{"lr": 1}', json.dumps(data)))
    run = reading.read(path)
    assert run.folders() == [tmp_path, Path("out/Net")] and run.explicit == ["lr"]
    assert run.parameters == {"output_dir": "out", "model_arch_name": "nets/net.py:Net"}
    reading._spend(run, {"train.batch_time": 1.0, "train.data_time": 3.0})  # averages over different steps
    run.total_s += 10
    reading._spend(run, {"train.batch_time": 1.0, "train.data_time": 3.0})
    assert run.open_s["waiting"] == run.open_s["train"] == 10
    run.epoch_s = run.total_s + 1  # the clock was set back
    reading._spend(run, {"train.batch_time": 1.0})
    assert run.open_s["train"] == 0


@pytest.mark.parametrize(
    ("parameters", "evaluated", "expected"),
    [
        ({}, "run/2", "best"),
        ({"run_scope": "eval_only"}, "run/2", "run/2"),
        ({"run_scope": "eval_only"}, "moved/2", "2"),
        ({"run_scope": "eval_only"}, None, None),
        ({"run_scope": "eval_only"}, "moved/3", None),
    ],
    ids=["training", "evaluation", "moved with its checkpoint", "without a checkpoint", "missing"],
)
def test_tables_describe_the_evaluated_checkpoint(work_in, tmp_path, parameters, evaluated, expected):
    work_in(tmp_path)
    for name in ("best", "2", "run/2"):
        (tmp_path / name).mkdir(parents=True)
    run = reading.Run(tmp_path / "report.json", parameters, evaluated=evaluated)
    assert run.checkpoint() == (expected and (Path(expected) if "/" in expected else tmp_path / expected))


@pytest.mark.parametrize(("is_multi_label", "metric"), [(False, "top1"), (True, "map")])
def test_evaluation_of_the_checkpoint_has_the_main_metric(is_multi_label, metric):
    summary = {"best.val.loss": 1.0, "best.val.top1": 0.5, "best.val.map": 0.25, "best.epoch": 3}
    run = reading.Run(None, {"multi_label": is_multi_label}, summary=summary)
    assert run.best_evaluation() == {"loss": 1.0, metric: summary[f"best.val.{metric}"]}


def test_at_most_three_runs_are_suggested(tmp_path):
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").touch()
    names = " or ".join(str(tmp_path / name) for name in "abc")
    with pytest.raises(UsageError, match=f"; use {names}$"):
        reading.read(tmp_path)


def test_flags_that_a_report_lacks_differ():
    runs = {"a": reading.Run(None, {"lr": 1, "x": 2, "output_dir": "o"}), "b": reading.Run(None, {"lr": 1, "y": None})}
    assert comparison.flags(runs) == [("x", ["2", "-"]), ("y", ["-", "None"])]


def test_curves_in_a_terminal_have_at_most_60_bars(capsys):
    lengths = {"a": 60, "b": 61, "c": 0}
    runs = {
        name: reading.Run(None, epochs={i: {"train.loss": 1.0 + i} for i in range(length)})
        for name, length in lengths.items()
    }
    runs["c"].epochs[0] = {"val.loss": 1.0}  # a single value is not a curve
    colors = [color for _, color, _ in comparison._series(dict.fromkeys("abcdefgh", runs["a"]), "train.loss")]
    assert colors == ["c0", "c1", "c2", "c3", "c4", "c5", "c0", "c1"]
    comparison._print_curves(comparison.Console(width=200), runs)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "training loss, 1 to 61"
    assert [(len(row.split()[0]), row[-1]) for row in rows[:2]] == [(60, "a"), (31, "b")] and rows[2].split() == ["c"]
    assert rows[1].split()[0][::30] == "▁█"


def test_changed_flags_are_explicit_parameters():
    run = reading.Run(None, parameters={"lr": 0.1, "epochs": 3}, explicit=["lr", "of_another_version"])
    assert run.changed_flags() == {"lr": 0.1}


START = 'DLLL {"step": "PARAMETER", "data": {"output_dir": "out", "model_arch_name": "Tiny"%s}}\n'
RESULT = 'DLLL {"step": [], "data": {"command": "PARAMETER", "output_dir": "x", "model_arch_name": "Tiny"}}\n'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *(("", ""), ("DLL", ""), ("torn", None), ("[]\n", None), (RESULT, "training")),
        *((START % "", ""), (START % "" + 'DLLL {"st', ""), (START % "" + "torn", None)),
        pytest.param('["PARAMETER", ' + "[" * 100_000 + "\n", None, id="deeply nested"),
        (START % "" + RESULT, "training"),
        (START % ', "run_scope": "train_eval", "benchmark": true' + RESULT, "benchmark"),
        (START % ', "run_scope": "eval_only"' + RESULT, "evaluation"),
        (START % ', "run_scope": "eval_only", "benchmark": true' + RESULT, "benchmark"),
    ],
)
def test_kind_of_report(tmp_path, text, kind):
    (tmp_path / "report.json").write_text(text)
    assert reading.kind(tmp_path / "report.json") == kind
    folders = reading.run_folders(tmp_path / "report.json")
    assert folders == ({Path("out/Tiny")} if text.startswith('DLLL {"step": "P') else set())


@pytest.mark.parametrize("step", [[0, 1, 2], [0.5], [True], [-1], [2**53], ["0"], "0", None])
def test_invalid_step_is_rejected(tmp_path, step):
    (tmp_path / "report.json").write_text(START_OF_RUN + entry([2**53 - 1, 0], 2) + entry(step, 3))
    with pytest.raises(UsageError, match="line 3: step is "):
        reading.read(tmp_path)


@pytest.mark.parametrize("explicit", ["lr", [1], {}])
def test_invalid_explicit_flags_are_rejected(tmp_path, explicit):
    text = START_OF_RUN.replace('"lr": 1', f'"lr": 1, "explicit_flags": {json.dumps(explicit)}')
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError, match="line 1: data.explicit_flags is "):
        reading.read(tmp_path)


def test_total_time_is_limited(tmp_path):
    path, half = tmp_path / "report.json", reading.LIMIT_S / 2
    path.write_text(START_OF_RUN + entry([0], half) + START_OF_RUN + entry([0], half))
    assert reading.read(path).total_s == reading.LIMIT_S
    with path.open("a") as f:
        f.write(entry([0], half + 1))
    with pytest.raises(UsageError, match="line 5: the total time of all starts exceeds 1e[+]10 s"):
        reading.read(path)


@pytest.mark.parametrize(
    ("epochs", "expected"), [({}, [0, 1 / 3, 2 / 3, 4 / 3]), ({0: {"train.steps": 4}}, [0, 0.25, 0.5, 1.25])]
)
def test_curve_of_steps_counts_epochs(epochs, expected):
    steps = {step: {"train.loss": 1.0} for step in [(0, 0), (0, 1), (0, 2), (1, 1)]}
    run = reading.Run(None, steps=steps, epochs=epochs)
    assert [x for x, _ in run.step_curve("train.loss")] == pytest.approx(expected)


def python_of_docs():
    return re.findall(r"```python\n(.+?)```", (ROOT / "docs/reports.md").read_text(), re.DOTALL)


@pytest.fixture
def tracked(trained, tmp_path):
    """Return a function that runs the documented program that imports a package, in a folder with a report and event
    files, and returns the folder and the expected values of val.top1."""

    def tracked(package, **environment):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        [code] = [code for code in python_of_docs() if f"import {package}\n" in code]
        assert len([line for line in code.splitlines() if line]) <= 10
        shutil.copy(trained / "report.json", tmp_path)
        with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
            writer.add_scalar("val/top1", 0.5, 0)
        # A separate process, because importing mlflow after Paddle fails.
        environment = os.environ | {"HOME": str(tmp_path)} | environment
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
        entries = [entry for entry in read_report(trained / "report.json") if entry["step"] != []]
        return tmp_path, [entry["data"]["val.top1"] for entry in entries if "val.top1" in entry["data"]]

    return tracked


@pytest.mark.soak
def test_documented_program_sends_the_report_to_wandb(tracked):
    folder, expected = tracked("wandb", WANDB_MODE="offline")
    [run] = (folder / "wandb").glob("offline-run-*")
    [record] = run.glob("run-*.wandb")
    assert record.read_bytes().count(b"val.top1") >= len(expected) > 0
    assert list((run / "files").glob("tensorboard/events.*"))


@pytest.mark.soak
def test_documented_program_sends_the_report_to_mlflow(tracked):
    folder, expected = tracked("mlflow", MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        rows = database.execute("select value from metrics where key = 'val.top1' order by step").fetchall()
        assert database.execute("select value from params where key = 'model_arch_name'").fetchall() == [("Tiny",)]
    assert [value for (value,) in rows] == pytest.approx(expected)
    assert list(folder.glob("mlruns/**/artifacts/tensorboard/events.*"))


def test_documented_report_reader_runs(trained, work_in):
    code, *_ = python_of_docs()
    assert sum(line != "" for line in code.splitlines()) == 3
    work_in(trained)
    namespace = {}
    exec(code, namespace)
    expected = {key: value for key, value in losses(read_report(trained / "report.json")).items() if key[1] != "val"}
    summary = namespace["losses"].pop(())
    assert namespace["losses"] == {key if key[1] != "train" else key[:1]: value for key, value in expected.items()}
    assert len(expected) == 8 and summary == expected[1, "train"]


def test_docs_list_every_metric_of_a_report(trained):
    text = (ROOT / "docs/reports.md").read_text()
    entries = read_report(trained / "report.json")
    for name in {name for entry in entries[1:] for name in entry["data"]}:
        assert f"`{name}`" in text or f"`{name.rpartition('.')[2]}`" in text, name
    assert all(f"`{key}`" in text for key in entries[0])


def test_failed_write_keeps_old_page(trained, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "page.html").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # like a full disk
    try:
        with pytest.raises(RunError, match=r"page.html: cannot be written \(File too large\)"):
            page.write(folder / "page.html", trained / "report.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.iterdir()] == ["page.html"]
    assert (folder / "page.html").read_text() == "old"


def test_page_without_readable_images_has_no_thumbnails(run_train, checkpoint, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    scope += ["--predictions", tmp_path / "report.predictions.csv"]
    assert run_train(*scope, image_root=tmp_path / "photos")[0] == 0
    for path in (tmp_path / "photos/val").glob("*/*"):
        path.write_bytes(b"not an image")
    page.write(tmp_path / "page.html", tmp_path / "report.json")
    shutil.rmtree(tmp_path / "photos")
    page.write(tmp_path / "other.html", tmp_path / "report.json")
    for name in ("page.html", "other.html"):
        html_page = Reader((tmp_path / name).read_text())
        assert html_page.addresses == [] and "Worst classes" in html_page.text
    with pytest.raises(RunError, match="page.html/page.html: cannot be written"):
        page.write(tmp_path / "page.html/page.html", tmp_path / "report.json")


def test_image_with_too_many_pixels_has_no_thumbnail(photos, tmp_path):
    """Pillow raises DecompressionBombError when it reads the size in the header."""
    image = ListedImage("val/class0/00.jpg", str(photos / "val/class0/00.jpg"), 0)
    assert page._thumbnail(image).startswith("data:image/jpeg;base64,")
    path = tmp_path / "large.bmp"
    Image.new("RGB", (1, 1)).save(path)
    header = path.read_bytes()
    path.write_bytes(header[:18] + struct.pack("<ii", 20_000, 20_000) + header[26:])  # width and height
    assert page._thumbnail(ListedImage("large.bmp", str(path), 0)) is None


HOSTILE = [
    *(None, True, -1, 2**60, 10**400, 5e-324, -1e-300, 1e308, -1e308, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "/dev/null", "a\0b", "\ud800", "1e300", "-1", "inf", "9" * 5000),
    *([], [1], {}, {"a": 1}),
]
NESTED = "[" * 900 + "]" * 900


def mutated(text, generator):
    """Replace or remove a value or a character in the text of a report."""
    lines = text.splitlines(keepends=True)
    i = generator.randrange(len(lines))
    kind = generator.random()
    if kind < 0.15:
        path = generator.randrange(len(lines[i]))
        lines[i] = lines[i][:path] + generator.choice(["", "0", '"', "\0", "[" * 2000, "\n"]) + lines[i][path + 1 :]
    else:
        entry = json.loads(lines[i].removeprefix("DLLL "))
        container = generator.choice([entry, entry["data"], entry["data"]]) or entry
        name = generator.choice(list(container))
        if kind < 0.25:
            del container[name]
        else:
            container[name] = generator.choice([*HOSTILE, NESTED])
        lines[i] = f"DLLL {json.dumps(entry)}\n".replace(f'"{NESTED}"', NESTED)
    return "".join(lines)


def mutated_table(rows, generator):
    """Replace a cell of a table, or remove a cell or a column."""
    header, rows = rows[0], [list(row) for row in rows]
    row, column = generator.randrange(len(rows)), generator.randrange(len(header))
    kind = generator.random()
    if kind < 0.1:
        rows = [[cell for i, cell in enumerate(cells) if i != column] for cells in rows]
    elif kind < 0.2:
        del rows[row][column]
    else:
        rows[row][column] = generator.choice(["", "x", "-1", "1", "1.5", "nan", "inf", "1e400", "\0", "9" * 5000, "猫"])
    return rows


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_damaged_reports_and_tables_are_rejected_or_harmless(trained, tmp_path, capsys, monkeypatch, count):
    """The command must neither raise an exception nor hang. The command must either write a page, or exit with code 2
    and an error message that contains the path."""
    monkeypatch.setattr(page, "_images", lambda run: {})  # other tests cover thumbnails
    monkeypatch.setattr(page, "chart", lambda series, **options: "")  # other tests cover charts of extreme values
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    report, intact = tmp_path / "report.json", (tmp_path / "report.json").read_text()
    generator, codes = random.Random(0), Counter()

    def check(path, *more):
        code = report_command.main([str(report), *more, "--html", str(tmp_path / "x.html")])
        codes[code] += 1
        assert code == 0 or f"error: {path}" in capsys.readouterr().err

    for i in range(5 * count):
        report.write_text(mutated(intact, generator))
        check(report, *([str(trained)] if i % 5 == 0 else []))
    report.write_text(intact)
    for table in sorted(tmp_path.glob("*.csv")):
        original = table.read_bytes()
        rows = list(csv.reader(io.StringIO(original.decode())))
        for _ in range(count):
            with table.open("w", newline="") as f:
                csv.writer(f).writerows(mutated_table(rows, generator))
            check(table)
        table.write_bytes(original)
    assert codes.keys() == {0, 2} and min(codes.values()) > 3 * count, codes


@pytest.mark.parametrize(
    ("line", "name", "value", "message"),
    [
        (1, "train.loss", 10**400, "line 2: data.train.loss is 1000000"),
        (1, "train.loss", 1e39, "line 2: data.train.loss is 1e+39"),
        (1, "train.ips", 1e39, "line 2: data.train.ips is 1e+39"),
        (1, "train.lr", -1e-3, "line 2: data.train.lr is -0.001"),
        (4, "train.epoch_time", -1, "line 5: data.train.epoch_time is -1"),
        (0, "lr", [[1]], "line 1: data.lr is [[1]]"),
        (0, "image_root", 3, "line 1: data.image_root is 3"),
    ],
)
def test_field_that_violates_schema_is_reported(trained, tmp_path, line, name, value, message):
    lines = (trained / "report.json").read_text().splitlines()
    entry = json.loads(lines[line].removeprefix("DLLL "))
    assert name in entry["data"]
    entry["data"][name] = value
    lines[line] = json.dumps(entry)
    (tmp_path / "report.json").write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError) as e:
        reading.read(tmp_path)
    assert str(e.value).startswith(f"{tmp_path}/report.json: not a report written by train.py ({message}")


def test_unusable_table_is_reported(trained, tmp_path):
    shutil.copy(trained / "report.json", tmp_path)
    table = tmp_path / "report.classes.csv"
    table.write_text("label,images,correct,top1\n0,1,1,1.0\n")
    run = reading.read(tmp_path)
    with pytest.raises(
        UsageError, match=f"^{table}: not a table written by train.py .column class is missing.; move it"
    ):
        run.rows("classes.csv")
    table.write_text("label,class,images,correct,top1\n0,a,1,1,1.0\n1,b,-1,0,\n")
    with pytest.raises(UsageError, match="line 3, images is '-1'"):
        run.rows("classes.csv")
    message = f"^{table}: cannot be read .Permission denied.; make it readable, or delete"
    with without_permission(table), pytest.raises(UsageError, match=message):
        run.rows("classes.csv")


@pytest.mark.slow
def test_reports_of_earlier_versions_may_contain_non_finite_losses(trained, tmp_path):
    """A non-finite loss in the last entry is read as None, like null in reports of this version, and is not replaced by
    the loss of an earlier epoch."""
    for text in ("Infinity", "NaN", "null"):
        lines = (trained / "report.json").read_text().splitlines()
        i = max(i for i, line in enumerate(lines) if '"step": [1]' in line and "val.loss" in line)
        lines[i] = re.sub(r'"val.loss": [^,]+', f'"val.loss": {text}', lines[i])
        (tmp_path / "report.json").write_text("\n".join(lines[:-1]) + "\n")
        run = reading.read(tmp_path)
        assert run.last("val.loss") is None
        assert [x for x, _ in run.curve("val.loss")] == [1]
    page.write(tmp_path / "x.html", run.path)
    assert "validation loss" not in Reader((tmp_path / "x.html").read_text()).text


def test_time_of_interrupted_epoch_is_sum_of_its_steps(tmp_path):
    """The run is started twice, and each start takes 3 s. An epoch consists of 20 s of training, 10% of which is spent
    waiting for images, and 5 s of evaluation. The first process stops in a training step of the second epoch, the
    second process in an evaluation."""
    start = entry("PARAMETER", 3).replace('"data": {}', '"data": {"lr": 1}')
    times = {"train_data_time": 0.1, "train_batch_time": 1.0}
    steps = [entry([0, i], 4 + i, train_loss=1.0, **times) for i in range(20)]
    epoch = entry([0], 23, train_epoch_time=20.0, train_data_time=0.1, train_steps=20)
    evaluation = entry([0], 29, val_epoch_time=5.0)
    part = [entry([1, i], 30 + i, train_loss=1.0, **times) for i in range(10)]
    rest = [entry([1, i], 4 + i, train_loss=1.0, **times) for i in range(10, 20)]
    rest += [entry([1], 23, train_epoch_time=20.0, train_data_time=0.1, train_steps=20), entry([1, 0], 27, val_loss=1)]
    (tmp_path / "report.json").write_text("".join([start, *steps, epoch, evaluation, *part, start, *rest]))
    run = reading.read(tmp_path)
    shown = {what: seconds for what, seconds, _ in page._times(run)}
    assert shown == pytest.approx(
        {
            "start": 6,
            "waiting for images": 2 + 1 + 2,
            "training steps": 18 + 9 + 18,
            "evaluation": 5 + 4,
            "checkpoints and other": 1,
        }
    )
    assert sum(shown.values()) == run.total_s == 39 + 27


@pytest.mark.timeout(20)
def test_page_does_not_replace_its_inputs(trained, photos, tmp_path, capsys):
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "link").symlink_to("report.confusion.csv")
    for name in ("predictions", "lr_find.json"):
        (tmp_path / name).write_text("")
    report = tmp_path / "report.json"
    report.write_text(report.read_text().replace('"predictions": null', f'"predictions": "{tmp_path}/predictions"', 1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for page_file, message in (
        (tmp_path / "report.json", f"the same file as RUN {tmp_path}/report.json, which this command reads; choose"),
        (tmp_path / "link", f"the same file as RUN's table {tmp_path}/report.confusion.csv"),
        (tmp_path / "predictions", f"the same file as RUN's table {tmp_path}/predictions"),
        (tmp_path / "lr_find.json", f"the same file as RUN's curve {tmp_path}/lr_find.json"),
        (photos / "val/class0/page.html", f"would change the data set's {photos}/val"),
    ):
        assert report_command.main([str(tmp_path), "--html", str(page_file)]) == 2
        assert message in capsys.readouterr().err
    other = tmp_path / "other/report.json"
    other.parent.mkdir()
    other.write_text(START_OF_RUN)
    assert report_command.main([str(other.parent), str(tmp_path), "--html", str(report)]) == 2
    assert f"the same file as RUN {report}, which this command reads" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_pipes_and_devices_are_rejected_as_reports(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/null"):
        assert report_command.main([path]) == 2
        assert f"error: {path}: cannot be read (not a regular file)" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_pipe_without_reader_is_rejected_as_output(run_train, checkpoint, trained, photos, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "pipe.png")
    message = f"{pipe}: cannot be written (a pipe without a reader, or a missing device); choose a different path"
    evaluation = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    for flags in (["--report-html", pipe], ["--report-file", pipe], [*evaluation, "--predictions", pipe]):
        assert run_train(*flags, "--dry-run", "--output-dir", tmp_path / "new")[0] == 2
        assert message in capsys.readouterr().err
    image = next((photos / "val").glob("*/*"))
    assert predict.main([str(checkpoint), str(image), "--device", "cpu", "--csv", str(pipe)]) == 2
    assert message in capsys.readouterr().err
    assert report_command.main([str(trained), "--html", str(pipe)]) == 2
    assert message in capsys.readouterr().err
    for arguments in (["verify", photos, "--fix-list", pipe], ["preview", photos, "--output", tmp_path / "pipe.png"]):
        assert dataset.main(list(map(str, arguments))) == 2
        assert "cannot be written (a pipe without a reader" in capsys.readouterr().err
