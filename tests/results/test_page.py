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


def test_worst_classes_come_first_with_what_they_are_taken_for():
    """In the matrix, a cell is in the column of the prediction and in the row of the label."""
    accuracies = (("a", 4, 1, "0.25"), ("b", 4, 0, "0"), ("c", 4, 4, "1"), ("empty", 0, 0, ""))
    keys = ("label", "class", "images", "correct", "top1")
    classes = [dict(zip(keys, map(str, (label, *row)), strict=True)) for label, row in enumerate(accuracies)]
    keys = ("label", "predicted", "images", "predicted_class")
    pairs = ((1, 0, 4, "a"), (2, 2, 4, "c"), (0, 2, 3, "c"), (0, 0, 1, "a"))
    confusion = [dict(zip(keys, map(str, pair), strict=True)) for pair in pairs]
    worst = page._worst(None, classes, confusion, [])
    assert [(row["class"], row["mistaken_for"]) for row in worst] == [("b", [("a", "4")]), ("a", [("c", "3")])]
    matrix = page._matrix(classes, confusion)
    assert matrix["names"] == ["a", "b", "c"]
    assert [(column, row, share) for column, row, _, share in matrix["cells"]] == [
        (0, 1, 1.0),
        (2, 2, 1.0),
        (2, 0, 0.75),
        (0, 0, 0.25),
    ]


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
    with pytest.raises(UsageError, match=f"^{tmp_path}/report.json"):
        reading.read(tmp_path)
    assert comparison.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}/report.json" in capsys.readouterr().err


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
    assert "b: first differs at epoch 1 step 0: loss 1.000000000000001 instead of 1.0; equal in the" in said
    assert "c: same losses in all 4 common steps" in said
    assert "d: no step in common with the first run" in said
    assert re.search(r"│ epochs +│ 2 +│ 2, not finished +│", said)
    assert re.search(r"best top1 +│ 0.1000 \(epoch 1\)", said)
    assert "top1, 0 to 0.1\n  ▁█  a\n" in said


def test_comparison_as_a_page_and_the_page_of_one_run(write_run, trained, tmp_path):
    runs = [write_run("a", [3.0, 2.0]), write_run("<i>", [3.0, 1.0], lr=0.2)]
    assert comparison.main([*runs, "--html", str(tmp_path / "two.html")]) == 0
    found = Reader((tmp_path / "two.html").read_text())
    assert found.open == [] and found.addresses == [] and "<i>" in found.text
    assert "first differs at epoch 0 step 1" in found.text
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


def test_chart_escapes_names_and_draws_all_numbers_of_float32():
    assert curves.chart([("a", "train", [])]) == ""
    for values in ([2.0, 4.0], [1e-45, 1e-40], [1e-45, 3.4e38], [-3.4e38, 3.4e38], [1.0, 1.0 + 1e-15], [3.4e38] * 2):
        for from_zero in (False, values[0] >= 0):
            svg = curves.chart([("<a>", "train", list(enumerate(values)))], from_zero=from_zero)
            assert "nan" not in svg and "inf" not in svg and "&lt;a&gt;" in svg


def places(svg, css):
    """Centres of the circles of a class, in pixels; y grows downwards."""
    return [tuple(map(float, place)) for place in re.findall(rf'class="{css}[^"]*" cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_points_of_a_chart_are_where_their_values_are():
    """The y axis is logarithmic if the values span more than a factor of 30; the mark lies on its point."""
    for values, kind in (((1.0, 5.5, 10.0), {}), ((1.0, 10.0, 100.0), {}), ((0.0, 50.0, 100.0), {"from_zero": True})):
        points = list(enumerate(values, 1))
        svg = curves.chart([("a", "train", points)], mark=points[1], **kind)
        (x1, y1), (x2, y2), (x3, y3) = places(svg, "dot")
        assert 46 < x1 < x2 < x3 == curves.WIDTH - curves.RIGHT
        assert curves.HEIGHT - curves.BOTTOM >= y1 > y2 > y3 >= curves.TOP
        assert (x2 - x1, y1 - y2) == pytest.approx((x3 - x2, y2 - y3), abs=0.15)
        assert places(svg, "mark") == [(x2, y2)]


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
    with pytest.raises(RunError, match="page.html/page.html: cannot be written"):
        page.write(tmp_path / "page.html/page.html", tmp_path / "report.json")


HOSTILE = [
    *(None, True, -1, 2**60, 10**400, 5e-324, -1e-300, 1e308, -1e308, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "/dev/zero", "a\0b", "\ud800", "1e300", "-1", "inf", "9" * 5000),
    *([], [1], {}, {"a": 1}),
]
NESTED = "[" * 900 + "]" * 900


def mutated(text, generator):
    """A report in which a value is replaced or removed, or a part of the text is."""
    lines = text.splitlines(keepends=True)
    i = generator.randrange(len(lines))
    kind = generator.random()
    if kind < 0.15:
        place = generator.randrange(len(lines[i]))
        lines[i] = lines[i][:place] + generator.choice(["", "0", '"', "\0", "[" * 2000, "\n"]) + lines[i][place + 1 :]
    else:
        entry = json.loads(lines[i].removeprefix("DLLL "))
        holder = generator.choice([entry, entry["data"], entry["data"]]) or entry
        name = generator.choice(list(holder))
        if kind < 0.25:
            del holder[name]
        else:
            holder[name] = generator.choice([*HOSTILE, NESTED])
        lines[i] = f"DLLL {json.dumps(entry)}\n".replace(f'"{NESTED}"', NESTED)
    return "".join(lines)


def mutated_table(rows, generator):
    """A table in which a cell is replaced, or a column or a cell is missing."""
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


@pytest.mark.timeout(120)
def test_damaged_reports_and_tables_are_refused_or_harmless(trained, tmp_path, capsys, monkeypatch):
    """No traceback, no hang: exit code 2 with the file, or a page."""
    monkeypatch.setattr(page, "_images", lambda run: {})  # of which thumbnails are made, in other tests
    for path in trained.iterdir():
        shutil.copy(path, tmp_path / path.name)
    report, whole = tmp_path / "report.json", (tmp_path / "report.json").read_text()
    generator, codes = random.Random(0), Counter()

    def check(path, *more):
        code = comparison.main([str(report), *more, "--html", str(tmp_path / "x.html")])
        codes[code] += 1
        assert code == 0 or f"error: {path}" in capsys.readouterr().err

    for i in range(150):
        report.write_text(mutated(whole, generator))
        check(report, *([str(trained)] if i % 5 == 0 else []))
    report.write_text(whole)
    for table in sorted(tmp_path.glob("*.csv")):
        kept = table.read_bytes()
        rows = list(csv.reader(io.StringIO(kept.decode())))
        for _ in range(30):
            with table.open("w", newline="") as f:
                csv.writer(f).writerows(mutated_table(rows, generator))
            check(table)
        table.write_bytes(kept)
    assert codes.keys() == {0, 2} and codes[2] > 100 and codes[0] > 50, codes


@pytest.mark.parametrize(
    ("line", "name", "value", "says"),
    [
        (1, "train.loss", 10**400, "line 2: data.train.loss is 1000000"),
        (1, "train.lr", -1e-3, "line 2: data.train.lr is -0.001"),
        (4, "train.epoch_time", -1, "line 5: data.train.epoch_time is -1"),
        (0, "lr", [[1]], "line 1: data.lr is [[1]]"),
        (0, "image_root", 3, "line 1: data.image_root is 3"),
    ],
)
def test_field_that_does_not_fit_the_schema_is_named(trained, tmp_path, line, name, value, says):
    lines = (trained / "report.json").read_text().splitlines()
    entry = json.loads(lines[line].removeprefix("DLLL "))
    assert name in entry["data"]
    entry["data"][name] = value
    lines[line] = json.dumps(entry)
    (tmp_path / "report.json").write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError) as e:
        reading.read(tmp_path)
    assert str(e.value).startswith(f"{tmp_path}/report.json: not a report of train.py ({says}")


def test_table_that_cannot_be_used_is_named(trained, tmp_path, monkeypatch):
    shutil.copy(trained / "report.json", tmp_path)
    table = tmp_path / "report.classes.csv"
    table.write_text("label,images,correct,top1\n0,1,1,1.0\n")
    run = reading.read(tmp_path)
    with pytest.raises(UsageError, match=f"^{table}: not a table of train.py .column class is missing.; delete it"):
        run.rows("classes.csv")
    table.write_text("label,class,images,correct,top1\n0,a,1,1,1.0\n1,b,-1,0,\n")
    with pytest.raises(UsageError, match="line 3, images is '-1'"):
        run.rows("classes.csv")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reading.files, "open_regular", refuse)
    with pytest.raises(UsageError, match=f"^{table}: cannot be read .Permission denied.; make it readable or delete"):
        run.rows("classes.csv")


def test_reports_of_earlier_versions_may_have_infinite_losses(trained, tmp_path):
    """As null in those of this version. The last loss is then none, not that of an earlier epoch."""
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


def test_time_of_an_interrupted_epoch_is_that_of_its_steps(tmp_path):
    """Two starts: 3 s, then epochs of 20 s of training (a tenth of it waiting) and 5 s of evaluation. The first start
    ends in the second epoch's steps, the second one in an evaluation."""
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
        assert f"error: {place}: cannot be read (not a regular file)" in capsys.readouterr().err


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
