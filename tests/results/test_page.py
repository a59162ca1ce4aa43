"""The page about a run and the comparison of runs."""

import base64
import csv
import html.parser
import io
import json
import math
import os
import random
import re
import shutil
from collections import Counter

import pytest
from PIL import Image

pytest.importorskip("jinja2")

from conftest import ROOT, losses, read_report
from paddle_resnet import dataset, predict
from paddle_resnet.results import comparison, curves, page, reading
from utils.errors import RunError, UsageError


class Reader(html.parser.HTMLParser):
    """Tags that are open at the end, addresses of other files, and text."""

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
    """The folder of a run of two epochs with its page, which runs once for all tests."""

    def make(folder):
        flags = ["--epochs", "2", "--lr", "0.01"]  # too little for all images
        flags += ["--print-interval", "1", "--report-html", tmp_path / "page.html"]
        assert run_train(*flags)[0] == 0
        for path in tmp_path.glob("*.*"):
            shutil.copy(path, folder / path.name)

    return once("page_of_a_run", make)


def test_page_has_all_and_needs_no_other_file(trained):
    text = (trained / "page.html").read_text()
    found = Reader(text)
    assert found.open == []
    assert found.addresses and all(address.startswith("data:image/jpeg;base64,") for address in found.addresses)
    assert not re.search(r"@import|url\(|<link|<script|https?://", text)
    report = read_report(trained / "report.json")
    summary = report[-1]["data"]
    for words in (
        f"{summary['best.val.top1']:.2%}",
        "Worst classes",
        "Confusion matrix",
        "waiting for images",
        "evaluation",
    ):
        assert words in found.text, words
    assert "model_arch_name: Tiny" in found.text and "paddle" in found.text and "--report-html" in found.text
    assert found.tags.count("svg") == 5  # loss, top1, images/s, learning rate, confusions


def test_thumbnails_are_the_wrong_images_of_their_class(trained, photos):
    rows = list(csv.DictReader((trained / "report.predictions.csv").read_text().splitlines()))
    wrong = [row for row in rows if row["label"] != row["prediction"]]
    assert wrong  # or there would be nothing to show
    text = (trained / "page.html").read_text()
    shown = dict(re.findall(r'<figure title="([^"]+)"><img src="data:image/jpeg;base64,([^"]+)"', text))
    assert set(shown) <= {row["image"] for row in wrong}
    assert len(shown) == sum(min(6, sum(w["label"] == str(c) for w in wrong)) for c in range(3))
    for label in "012":  # those of the highest probability first
        of_class = sorted((row for row in wrong if row["label"] == label), key=lambda row: -float(row["probability_1"]))
        names = [row["image"] for row in of_class]
        assert [name for name in shown if name in names] == names[:6]
    for name, data in shown.items():
        thumbnail = Image.open(io.BytesIO(base64.b64decode(data)))
        assert thumbnail.size == (144, 144)
        label = next(int(row["label"]) for row in rows if row["image"] == name)
        assert max(range(3), key=thumbnail.resize((1, 1)).getpixel((0, 0)).__getitem__) == label  # the photo's colour


def test_page_of_an_evaluation_uses_its_predictions(run_train, checkpoint, tmp_path):
    flags = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    flags += ["--report-html", tmp_path / "eval.html", "--predictions", tmp_path / "all.csv"]
    assert run_train(*flags)[0] == 0
    found = Reader((tmp_path / "eval.html").read_text())
    assert "Curves" not in found.text and "Confusion matrix" in found.text
    assert len(found.addresses) > 0 and not list(tmp_path.glob("report.predictions.csv"))


def test_thumbnails_come_from_containers(run_train, checkpoint, converted, tmp_path):
    scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint, "--report-html", tmp_path / "p.html"]
    assert run_train(*scope, image_root=converted["webdataset"])[0] == 0
    assert Reader((tmp_path / "p.html").read_text()).addresses


def test_names_are_escaped_and_many_classes_fit(trained, tmp_path):
    """1,000 classes: the page shows those with most errors, and takes names for text."""
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
    found = Reader(text)
    assert found.open == [] and "b" not in found.tags[found.tags.index("h2") :]
    assert "the 24 of 1000 classes with most errors" in " ".join(found.text.split())
    assert names[0] in found.text
    assert len(text) < 200_000


def entry(step, elapsed, **data):
    record = {"timestamp": "0", "datetime": "2026-01-01 10:00:00", "elapsedtime": str(elapsed), "type": "LOG"}
    return f"DLLL {json.dumps(record | {'step': step, 'data': {k.replace('_', '.', 1): v for k, v in data.items()}})}\n"


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


def test_reading_takes_the_later_of_two_entries_and_adds_up_starts(write_run):
    place = write_run("a", [3.0, 2.0])
    report = reading.read(place)
    assert (report.total_s, report.start_s, report.best()) == (20, 1, (0, 0.0))
    with open(report.path, "a") as f:
        f.write(
            entry("PARAMETER", 5).replace('"data": {}', '"data": {"lr": 7}')
            + entry([0, 1], 9, train_loss=1.5)
            + '{"torn'
        )
    report = reading.read(place)
    assert report.steps[0, 1] == {"train.loss": 1.5}
    assert (report.total_s, report.start_s, report.summary) == (29, 6, {})
    assert report.parameters == {"lr": 7}


@pytest.mark.parametrize("text", ["", "DLLL []\n", "no JSON\n", None])
def test_what_is_no_report_is_refused(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError, match=f"^{tmp_path}/report.json "):
        reading.read(tmp_path)
    assert comparison.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}/report.json " in capsys.readouterr().err


def test_comparison_names_flags_and_the_first_step_that_differs(write_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runs = [
        write_run("a", [3.0, 2.0, 1.0, math.nan]),
        write_run("b", [3.0, 2.0, 1.0 + 1e-15, 0.5], lr=0.2, ended=False),
    ]
    runs += [write_run("c", [3.0, 2.0, 1.0, math.nan]), write_run("d", [])]
    assert comparison.main(runs) == 0
    said = capsys.readouterr().out
    assert re.search(r"│ lr +│ 0.1 +│ 0.2 +│ 0.1 +│ 0.1 +│", said)
    assert "output_dir" not in said  # a place, not what the run does
    assert "b: parts from the first run at epoch 1 step 0: loss 1.000000000000001 instead of 1.0; equal in all" in said
    assert "c: has the first run's losses in all 4 common steps" in said
    assert "d: shares no step with the first run" in said
    assert re.search(r"│ epochs +│ 2 +│ 2, not ended +│", said)
    assert re.search(r"best top1 +│ 0.1000 \(epoch 1\)", said)
    assert "top1, 0 to 0.1\n  ▁█  a\n" in said


def test_comparison_as_a_page_and_the_page_of_one_run(write_run, trained, tmp_path):
    runs = [write_run("a", [3.0, 2.0]), write_run("<i>", [3.0, 1.0], lr=0.2)]
    assert comparison.main([*runs, "--html", str(tmp_path / "two.html")]) == 0
    found = Reader((tmp_path / "two.html").read_text())
    assert found.open == [] and found.addresses == [] and "<i>" in found.text
    assert "parts from the first run at epoch 0 step 1" in found.text
    assert comparison.main([str(trained), "--html", str(tmp_path / "one.html")]) == 0
    assert "Confusion matrix" in (tmp_path / "one.html").read_text()


def test_runs_of_one_name_are_told_apart():
    assert comparison._names(["out/a/report.json", "out/b"]) == ["a", "b"]
    assert comparison._names(["a", "a"]) == ["a", "a (2)"]
    assert comparison._names(["x/report.json"]) == ["x"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.12), (-3, 1000), (5, 5), (0, 0), (1e-9, 2e-9)])
def test_ticks_are_round_and_cover(low, high):
    found = curves.ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 3 <= len(found) <= 7
    assert curves.ticks(0, 8) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(("low", "high"), [(0.1, 50), (1, 40), (0.002, 9e5)])
def test_decades_cover(low, high):
    found = curves.decades(low, high)
    assert found[0] <= low and found[-1] >= high and 3 <= len(found) <= 12


def test_chart_leaves_out_what_is_not_finite():
    assert curves.chart([("a", "train", [(1, math.nan)])]) == ""
    svg = curves.chart([("<a>", "train", [(1, 2.0), (2, math.inf), (3, 4.0)])])
    assert "nan" not in svg and "inf" not in svg and "&lt;a&gt;" in svg


def test_reader_of_the_docs(trained, monkeypatch):
    [code] = re.findall(r"```python\n(.+?)```", (ROOT / "docs/reports.md").read_text(), re.DOTALL)
    assert sum(line != "" for line in code.splitlines()) == 3
    monkeypatch.chdir(trained)
    found = {}
    exec(code, found)
    expected = {key: value for key, value in losses(read_report(trained / "report.json")).items() if key[1] != "val"}
    summary = found["losses"].pop(())
    assert found["losses"] == {key if key[1] != "train" else key[:1]: value for key, value in expected.items()}
    assert len(expected) == 8 and summary == expected[1, "train"]


def test_docs_name_every_figure_of_a_report(trained):
    text = (ROOT / "docs/reports.md").read_text()
    entries = read_report(trained / "report.json")
    for name in {name for entry in entries[1:] for name in entry["data"]}:
        assert f"`{name}`" in text or f"`{name.partition('.')[2]}`" in text, name
    assert all(f"`{key}`" in text for key in entries[0])


def test_page_without_its_images_and_in_a_folder_that_is_not_there(run_train, checkpoint, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    scope += ["--predictions", tmp_path / "report.predictions.csv"]
    assert run_train(*scope, image_root=tmp_path / "photos")[0] == 0
    for path in (tmp_path / "photos/val").glob("*/*"):
        path.write_bytes(b"no image")
    page.write(tmp_path / "page.html", tmp_path / "report.json")
    shutil.rmtree(tmp_path / "photos")
    page.write(tmp_path / "other.html", tmp_path / "report.json")
    for name in ("page.html", "other.html"):
        found = Reader((tmp_path / name).read_text())
        assert found.addresses == [] and "Worst classes" in found.text
    with pytest.raises(RunError, match="page.html/page.html cannot be written"):
        page.write(tmp_path / "page.html/page.html", tmp_path / "report.json")


HOSTILE = [
    None,
    True,
    -1,
    2**60,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "/dev/zero",
    [],
    [1],
    {},
    {"a": 1},
    "9" * 5000,
]


def mutated(text, generator):
    """A report with a value, or a part of the text, that is another one."""
    lines = text.splitlines(keepends=True)
    i = generator.randrange(len(lines))
    if generator.random() < 0.2:
        place = generator.randrange(len(lines[i]))
        lines[i] = lines[i][:place] + generator.choice(["", "0", '"', "\0", "[" * 2000, "\n"]) + lines[i][place + 1 :]
    else:
        entry = json.loads(lines[i].removeprefix("DLLL "))
        holder = generator.choice([entry, entry["data"] or entry])
        holder[generator.choice(list(holder))] = generator.choice(HOSTILE)
        lines[i] = f"DLLL {json.dumps(entry)}\n"
    return "".join(lines)


@pytest.mark.timeout(120)
def test_damaged_reports_and_tables_are_refused_or_harmless(trained, tmp_path, capsys):
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    report, whole = tmp_path / "report.json", (tmp_path / "report.json").read_text()
    generator, codes = random.Random(0), Counter()
    for _ in range(100):
        report.write_text(mutated(whole, generator))
        codes[comparison.main([str(report), str(trained), "--html", str(tmp_path / "x.html")])] += 1
        codes[comparison.main([str(report), "--html", str(tmp_path / "x.html")])] += 1
    assert codes.keys() == {0, 2} and codes[2] > 20, codes
    report.write_text(whole)
    for name, column in (("classes", "images"), ("classes", "top1"), ("confusion", "predicted")):
        table = tmp_path / f"report.{name}.csv"
        rows = list(csv.DictReader(table.open()))
        kept = table.read_bytes()
        for value in ("", "x", "-1", "9" * 5000):
            with table.open("w", newline="") as f:
                writer = csv.DictWriter(f, list(rows[0]))
                writer.writeheader()
                writer.writerows([rows[0] | {column: value}, *rows[1:]])
            code = comparison.main([str(report), "--html", str(tmp_path / "x.html")])
            assert code == 2 or column == "top1", (name, column, value)
        table.write_bytes(kept)
    assert comparison.main([str(report), "--html", str(tmp_path / "x.html")]) == 0


@pytest.mark.timeout(20)
def test_a_page_replaces_no_file_that_it_is_made_from(trained, photos, tmp_path, capsys):
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "link").symlink_to("report.confusion.csv")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for page_file, says in (
        (tmp_path / "report.json", f"the same file as RUN {tmp_path}/report.json, which this command reads; choose"),
        (tmp_path / "link", f"the same file as RUN's table {tmp_path}/report.confusion.csv"),
        (photos / "val/class0/page.html", f"would change the data set's {photos}/val"),
    ):
        assert comparison.main([str(tmp_path), "--html", str(page_file)]) == 2
        assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pipes_and_devices_are_no_reports(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for place in (str(tmp_path / "pipe"), "/dev/zero"):
        assert comparison.main([place]) == 2
        assert f"error: {place} cannot be read (not a regular file)" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_pipe_that_nobody_reads_is_refused_as_output(run_train, checkpoint, trained, photos, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "pipe.png")
    says = f"{pipe}: cannot be written (a pipe without a reader, or a missing device); choose a different path"
    evaluation = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    for flags in (["--report-html", pipe], ["--report-file", pipe], [*evaluation, "--predictions", pipe]):
        assert run_train(*flags, "--dry-run")[0] == 2
        assert says in capsys.readouterr().err
    image = next((photos / "val").glob("*/*"))
    assert predict.main([str(checkpoint), str(image), "--device", "cpu", "--csv", str(pipe)]) == 2
    assert says in capsys.readouterr().err
    assert comparison.main([str(trained), "--html", str(pipe)]) == 2
    assert says in capsys.readouterr().err
    for words in (["verify", photos, "--fix-list", pipe], ["preview", photos, "--output", tmp_path / "pipe.png"]):
        assert dataset.main(list(map(str, words))) == 2
        assert "cannot be written (a pipe without a reader" in capsys.readouterr().err
