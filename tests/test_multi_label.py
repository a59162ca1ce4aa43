"""Runs with --multi-label: training, evaluation, resumed runs, jobs, prediction and export."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import multi_label_data
import numpy as np
import paddle
import pytest
from multi_label_data import CLASSES, COUNTS, labels
from paddle import static
from starlette.testclient import TestClient

from conftest import NHWC, ROOT, assert_one_error, frozen, losses, phase
from helpers import with_meta
from paddle_resnet import export, predict, program
from paddle_resnet import report as report_command
from paddle_resnet import train as train_module
from paddle_resnet.components import precision
from paddle_resnet.models import loss_head
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.results.page import WRONG_IMAGES
from paddle_resnet.serving import calibration, inference, networks, preprocessing, scores, verification, web
from paddle_resnet.step import cuda_graph
from paddle_resnet.tasks import MultiLabel
from paddle_resnet.utils import label_metrics
from paddle_resnet.utils.errors import RunError

pytestmark = pytest.mark.usefixtures("one_block")
FLAGS = ["--multi-label", "--rand-crop-scale", "0.9,1", "--batch-size", "6", "--print-interval", "1"]
IN_NATIVE = [*NHWC, "--kernels", "native"]
# All flags that change the loss, the labels or the evaluated weights.
ALL = ["--asymmetric-loss", "4,0,0.05", "--class-weights", "balanced"]
ALL += ["--mixup", "0.4", "--cutmix", "0.4", "--label-smoothing", "0.1", "--ema", "0.9"]
RECIPES = {"default": [], "all": ALL, **({"native": IN_NATIVE} if native.missing() is None else {})}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the folder of the miniature data set with CSV files."""
    return multi_label_data.write(tmp_path_factory.mktemp("csv"))


@pytest.fixture
def train(run_train, data):
    """Return a function like run_train, which trains with --multi-label."""
    return lambda *flags: run_train(*FLAGS, *flags, image_root=data)


@pytest.fixture
def trained(once, train, tmp_path):
    """Return (a copy of the folder of a run of three epochs, metrics of its last evaluation)."""

    def make(folder):
        code, report = train("--epochs", "3", "--output-dir", folder)
        assert code == 0
        (folder / "metrics.json").write_text(json.dumps(phase(report, [2], "val.")))

    folder = once("multi_label", make)
    copy = shutil.copytree(folder / "Tiny", tmp_path / "output/Tiny", symlinks=True)
    return copy, json.loads((folder / "metrics.json").read_text())


def rows(path):
    with open(path, newline="") as f:
        return [*csv.DictReader(f)]


@pytest.mark.parametrize("flags", RECIPES.values(), ids=RECIPES)
def test_run_learns_and_its_tables_agree_with_predictions(train, tmp_path, flags):
    code, report = train("--epochs", "8", "--predictions", tmp_path / "p.csv", *flags)
    assert code == 0
    trained = phase(report, [7], "train.")["loss"]
    assert trained < 0.9 * phase(report, [0], "train.")["loss"]
    predictions = rows(tmp_path / "p.csv")
    assert [row["image"] for row in predictions] == [f"val/{i:02d}.png" for i in range(COUNTS["val"])]
    is_class = labels("val") > 0
    names = ["|".join(np.array(CLASSES)[row]) for row in is_class]
    assert [row["labels"] for row in predictions] == names
    probabilities = np.array([[float(row[f"probability_{name}"]) for name in CLASSES] for row in predictions])
    logits = np.log(probabilities) - np.log1p(-probabilities)
    expected = label_metrics.evaluate(np.hstack([logits, is_class]).astype("float32"))
    meta = json.loads((tmp_path / "output/Tiny/best/meta.json").read_text())
    best = meta["evaluated"]
    for name in ("map", "map_micro", "f1_macro", "recall_weighted"):
        assert best[name] == pytest.approx(expected[name], abs=1e-9), name
    assert meta["thresholds"] == pytest.approx(expected["thresholds"], abs=1e-6)
    assert best["map"] == max(phase(report, [epoch], "val.")["map"] for epoch in range(8))
    assert report[-1]["data"]["best.val.map"] == best["map"]
    chosen = [np.array(CLASSES)[row >= meta["thresholds"]] for row in probabilities]
    assert [row["prediction"] for row in predictions] == ["|".join(row) for row in chosen]
    for i, row in enumerate(rows(tmp_path / "report.classes.csv")):
        assert row["class"] == CLASSES[i] and int(row["images"]) == is_class[:, i].sum()
        assert float(row["ap"]) == pytest.approx(expected["class_ap"][i], abs=1e-6)
        assert float(row["f1"]) == pytest.approx(expected["class_f1"][i], abs=1e-6)
    assert not (tmp_path / "report.confusion.csv").exists()


def test_tables_of_images_at_a_threshold_and_of_a_class_without_images():
    rows = np.float32([[0, 2, -1, 1, 0, 0], [-1, 1, -3, 0, 1, 0], [-2, -2, -1, 1, 1, 0]])
    result = label_metrics.evaluate(rows, [0.5] * 3) | {"scores": rows}
    result = {name: np.array(value) for name, value in result.items()}
    # The pairs of an image and its class have the ranks 2 and 3 and, with equal scores, 7 and 8 of 9.
    assert result["map_micro"] == pytest.approx((1 / 2 + 2 / 3 + 2 * 4 / 8) / 4)
    task = MultiLabel(3)
    header, table = task.tables(result, "abc", 7)["classes"]
    assert header[2:] == ("images", "predicted", "correct", "ap", "threshold", "precision", "recall", "f1", "epoch")
    half, zero = "0.500000", "0.000000"
    assert table == [
        (0, "a", 2, 1, 1, "0.833333", half, "1.000000", half, "0.666667", 7),
        (1, "b", 2, 2, 1, "0.583333", half, half, half, half, 7),
        (2, "c", 0, 0, 0, "", half, zero, zero, zero, 7),
    ]
    header, predictions = task.predictions(result, "abc")
    assert header == ["labels", "prediction", "probability_a", "probability_b", "probability_c"]
    assert [row[:2] for row in predictions] == [["a", "a|b"], ["b", "b"], ["a|b", ""]]


def test_evaluation_chooses_thresholds_that_the_checkpoint_lacks():
    meter = label_metrics.ScoreMeter(2)
    for meta, thresholds in (({}, None), ({"thresholds": [0.25, 0.5]}, [0.25, 0.5]), ({"thresholds": None}, None)):
        MultiLabel(2).restore({"scores": (None, meter)}, meta)
        assert meter.thresholds == thresholds


@pytest.mark.parametrize(
    "flags",
    [pytest.param(v, marks=[pytest.mark.slow] * (k != "all"), id=k) for k, v in RECIPES.items() if k != "default"],
)
def test_resumed_run_is_bit_identical(run_train, losses_with_a_stop, data, tmp_path, flags):
    """The run resumes from an evaluated checkpoint, whose thresholds later evaluations do not use."""
    flags = [*FLAGS, *flags, "--epochs", "2", "--save-interval-steps", "3", "--keep-checkpoints", "9"]
    code, report = run_train(*flags, image_root=data)
    assert code == 0
    assert losses_with_a_stop(4, *flags, "--resume", image_root=data) == losses(report)

    def thresholds(name):
        return json.loads((tmp_path / name / "meta.json").read_text()).get("thresholds")

    assert thresholds("output/Tiny/1") == thresholds("stopped/Tiny/1") != thresholds("stopped/Tiny/0")
    # The thresholds of epoch 0 belong to other weights.
    assert (tmp_path / "output/Tiny/1_3").exists() and thresholds("output/Tiny/1_3") is None


def test_evaluation_uses_thresholds_of_checkpoint(trained, run_train, data):
    folder, expected = trained
    flags = ["--run-scope", "eval_only", "--from-checkpoint", folder / "2", "--overwrite"]
    code, report = run_train(*flags, image_root=data)  # inherits --multi-label
    assert code == 0
    again = phase(report, [2], "val.")
    names = [name for name in expected if name.startswith(("map", "loss", "f1", "precision", "recall"))]
    assert len(names) == 9 and {name: again[name] for name in names} == {name: expected[name] for name in names}
    root = multi_label_data.write(folder.parent / "other")
    lines = (root / "val.csv").read_text().splitlines()
    (root / "val.csv").write_text("\n".join(lines[:5]))  # the best thresholds of four images would differ
    code, report = run_train(*flags, image_root=root)
    table = rows(folder.parents[1] / "report.classes.csv")
    thresholds = json.loads((folder / "2/meta.json").read_text())["thresholds"]
    assert [float(row["threshold"]) for row in table] == pytest.approx(thresholds, abs=1e-6)


def test_image_without_a_predicted_class_needs_no_heat_map(trained, data, tmp_path, capsys):
    """Classes without names are listed by their numbers."""
    changes = {"thresholds": [1.0] * len(CLASSES), "class_names": CLASSES[:1]}
    folder = with_meta(trained[0] / "2", tmp_path / "above_all", **changes)
    path = str(next(each for each in sorted(data.rglob("*.*")) if each.suffix != ".csv"))
    flags = [str(folder), path, "--device", "cpu", "--heat-map", str(tmp_path / "maps")]
    capsys.readouterr()
    assert predict.main(flags) == 0
    assert capsys.readouterr().out == f"{path}: none of the classes\n"
    assert predict.main([*flags, "--json", "--csv", str(tmp_path / "p.csv")]) == 0
    assert json.loads(capsys.readouterr().out) == {"image": path, "classes": [], "heat_map": None}
    [row] = rows(tmp_path / "p.csv")
    assert list(row) == ["image", "prediction", "probability_blue", "probability_1", "probability_2"]
    assert row["prediction"] == "" and None not in row


def test_page_shows_average_precision_and_wrong_images(train, tmp_path, capsys):
    flags = ["--report-html", tmp_path / "page.html", "--lr", "1e-6"]
    (tmp_path / "report.confusion.csv").write_text("label,predicted,images,class,predicted_class\n0,1,9,old,old\n")
    code, report = train("--epochs", "2", *flags)
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    best = max(phase(report, [epoch], "val.")["map"] for epoch in range(2))
    assert f"{best:.2%}</b><span>best mAP" in page and "top1" not in page.partition("<h2>Time")[0]
    assert f"{phase(report, [1], 'val.')['map_micro']:.2%}</b><span>final micro mAP" in page
    assert "Confusion matrix" not in page and ">AP<" in page
    table = {row["class"]: row for row in rows(tmp_path / "report.classes.csv")}
    for name, row in table.items():
        if float(row["ap"]) < 1:
            assert f"average precision {float(row['ap']):.4f}, {row['images']} images" in page, name
    wrong = [int(row["images"]) + int(row["predicted"]) - 2 * int(row["correct"]) for row in table.values()]
    assert page.count("data:image/jpeg") > 0
    assert page.count("missed") + page.count("wrongly found") == sum(min(count, WRONG_IMAGES) for count in wrong)
    assert not re.search(r'<figure title="val/(00|08).png">(?:<img[^>]*>)*\n? *<figcaption>missed', page)  # no classes
    assert page.count('alt="heat map of ') == page.count('alt="val/') > 0
    capsys.readouterr()
    # The table of --predictions replaces the table next to the report.
    (tmp_path / "report.predictions.csv").rename(tmp_path / "p.csv")
    text = (tmp_path / "report.json").read_text()
    (tmp_path / "report.json").write_text(text.replace('"predictions": null', f'"predictions": "{tmp_path}/p.csv"'))
    assert report_command.main([str(tmp_path / "report.json"), "--html", str(tmp_path / "again.html")]) == 0
    out, again = capsys.readouterr().out, (tmp_path / "again.html").read_text()
    assert "best mAP" in out and "\nmAP, " in out and "best mAP" in again
    assert again.count("data:image/jpeg") == page.count("data:image/jpeg")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["true", "false"])
def test_run_cannot_change_kind_of_labels_of_checkpoint(run_train, tmp_path, capsys, before):
    assert run_train("--multi-label", before)[0] == 0
    now = {"true": "false", "false": "true"}[before]
    evaluate = ["--run-scope", "eval_only", "--overwrite", "--from-checkpoint", tmp_path / "output/Tiny/0"]
    scopes = [["--resume", "--epochs", "2"], evaluate]
    for scope in scopes:
        assert run_train("--multi-label", now, *scope)[0] == 2
        parts = [f"--multi-label {now}: ", f"trained with --multi-label {before}", "remove the flag"]
        assert_one_error(capsys.readouterr().err, parts)
    for scope in scopes if before == "true" else []:
        assert run_train(*scope)[0] == 0  # obey the remedy: remove the flag


def test_fine_tuning_can_change_kind_of_labels(checkpoint, train):
    flags = ["--from-pretrained-params", checkpoint, "--pretrained-mismatch", "skip-classifier"]
    code, report = train(*flags)
    assert code == 0 and "map" in phase(report, [0], "val.")


def test_patience_and_best_follow_map(train, tmp_path, capsys):
    code, report = train("--epochs", "40", "--patience", "1", "--lr", "0")
    assert code == 0 and phase(report, [1], "val.") and not any(entry["step"] == [2] for entry in report)
    assert "no higher map since epoch 0" in capsys.readouterr().out


def test_native_kernels_and_captured_steps_train_like_paddle(fake, train):
    """The replays of the fake graph read no value on the host."""
    results = []
    for flags in ([*NHWC, "--kernels", "paddle"], [*IN_NATIVE, "--cuda-graph", "false"], IN_NATIVE):
        assert not fake.made
        code, report = train("--epochs", "3", *flags, "--overwrite")
        assert code == 0
        results.append(losses(report))
    assert any(graph.launches for graph in fake.made)
    assert results[1] == pytest.approx(results[0], rel=1e-3)
    assert results[2] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("asymmetric", [[], ["--asymmetric-loss", "4,1,0.05"]])
def test_operators_of_loss_can_be_captured(parse, asymmetric):
    args = frozen(parse(*FLAGS, *IN_NATIVE, *asymmetric, "--class-weights", "balanced", "--label-smoothing", "0.1"))
    main = static.Program()
    program.build(args, main, static.Program(), 10, class_images=np.array([1, 2, 3]))
    assert cuda_graph.untested_operators(main, True, True) is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("asymmetric", [[], ["--asymmetric-loss", "4,1,0.05"]])
def test_loss_stays_in_float32_with_amp(parse, gpu_lists, asymmetric, level):
    args = parse(*FLAGS, *asymmetric, "--class-weights", "balanced", "--mixup", "0.2")
    args.set("Python", amp=True, amp_level=level)
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 10, class_images=np.array([1, 2, 3]))
    block = main.global_block()
    types = {str(v.dtype).rpartition(".")[2] for v in block.vars.values()}
    assert any("FP16" in name or "float16" in name for name in types)
    ops = [op for op in block.ops if loss_head.contains(op) and op.type != "cast"]
    kinds = {op.type for op in ops}
    assert ("pow" if asymmetric else "sigmoid_cross_entropy_with_logits") in kinds
    for op in ops:
        for name in (*op.input_arg_names, *op.output_arg_names):
            assert "16" not in str(block.var(name).dtype), (op.type, name)


@pytest.mark.parametrize(
    ("dtype", "level", "tta"), [("float16", "O1", "none"), ("float16", "O2", "flip"), ("bfloat16", "O2", "none")]
)
def test_evaluation_head_is_in_float32_with_float16_images_and_amp(parse, gpu_lists, dtype, level, tta):
    args = parse(*FLAGS, *NHWC, "--dali-output-fp16", "--tta", tta)
    args.set("Python", amp=True, amp_dtype=dtype, amp_level=level)
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(frozen(args), main, startup, 0, is_train=False)
    static.Executor(paddle.CPUPlace()).run(startup)
    precision.cast_evaluation_program(main, paddle.CPUPlace(), dtype, level)
    assert {name: variable.dtype for name, (variable, _) in fetchs.items()} == dict.fromkeys(
        ("loss", "scores"), paddle.float32
    )
    block = main.global_block()
    for op in [op for op in block.ops if loss_head.contains(op) and op.type != "cast"]:
        types = {block.var(name).dtype for name in (*op.input_arg_names, *op.output_arg_names)}
        assert types == {paddle.float32}, (op.type, types)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--balanced-sampling"], ["--balanced-sampling", "--multi-label"]),
        (["--choose-recipe"], ["--choose-recipe", "--multi-label"]),
        (["--data-format", "tfrecord"], ["--data-format tfrecord", "--multi-label"]),
        (["--label-offset", "1"], ["--label-offset 1", "--multi-label"]),
        (["--asymmetric-loss", "4,0"], ["--asymmetric-loss 4", "expected three numbers"]),
        (["--asymmetric-loss", "0.5,0,0"], ["--asymmetric-loss", "0 or at least 1"]),
        (["--asymmetric-loss", "4,0,1"], ["--asymmetric-loss", "the margin must be below 1"]),
        (["--multi-label", "false", "--asymmetric-loss", "4,0,0"], ["--asymmetric-loss", "requires --multi-label"]),
    ],
)
def test_conflicts_are_errors(train, capsys, flags, parts):
    assert train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, parts)


def test_synthetic_images_have_several_labels(train):
    code, report = train("--data-format", "synthetic", "--benchmark", "--benchmark-steps", "2")
    assert code == 0


def test_tta_averages_probabilities(trained, run_train, data, tmp_path):
    folder, _ = trained
    for tta in ("none", "flip"):
        flags = ["--run-scope", "eval_only", "--from-checkpoint", folder / "2", "--overwrite"]
        code, report = run_train(*flags, "--tta", tta, "--predictions", tmp_path / f"{tta}.csv", image_root=data)
        assert code == 0
    options = ["--precision", "float32", "--csv", str(tmp_path / "predicted.csv"), "--tta", "flip"]
    assert predict.main([str(folder / "2"), str(data / "val"), "--device", "cpu", *options]) == 0
    evaluated, predicted = (
        np.array([[float(row[f"probability_{name}"]) for name in CLASSES] for row in rows(tmp_path / name_of_file)])
        for name_of_file in ("flip.csv", "predicted.csv")
    )
    np.testing.assert_allclose(evaluated, predicted, atol=2e-5)
    assert rows(tmp_path / "none.csv") != rows(tmp_path / "flip.csv")
    network, metrics = networks.load_checkpoint(folder / "2"), phase(report, [2], "val.")
    network.args.set("test", tta="flip")
    score = scores.score(network, network.model(logits=True), data, as_evaluated=True)
    assert (score["loss"], score["map"]) == (pytest.approx(metrics["loss"], rel=1e-5), pytest.approx(metrics["map"]))
    is_predicted = evaluated >= network.description["multi_label"]["thresholds"]
    assert score["correct"] == np.count_nonzero(is_predicted == labels("val"))


@pytest.mark.parametrize("kind", ["csv", "folders", "vector", "numbers"])
def test_bad_image_can_be_skipped_as_the_error_says(run_train, tmp_path, capsys, kind):
    root = multi_label_data.write(tmp_path / "root", kind)
    if kind in ("csv", "folders"):
        folder = "train" if kind == "csv" else "images/train"
        (root / folder / "05.png").write_bytes(b"not an image")
    else:
        images = [path.read_bytes() for path in sorted((root / "images/train").iterdir())]
        images[5] = b"not an image"
        vectors = labels("train").tolist() if kind == "vector" else [[i % 3] for i in range(COUNTS["train"])]
        multi_label_data.write_records(root, "train", vectors, images)
    capsys.readouterr()
    assert run_train(*FLAGS, image_root=root)[0] == 2
    error = capsys.readouterr().err
    name = re.search(r"add a line (\S+) to a file for --skip-list", error)[1]
    (tmp_path / "skip.txt").write_text(f"{name}\n")
    flags = ["--skip-list", tmp_path / "skip.txt", "--run-scope", "train_only"]
    assert run_train(*FLAGS, *flags, image_root=root)[0] == 0


@pytest.mark.slow
def test_job_evaluates_like_single_process(launch, run_train, register, data, tmp_path):
    """The two processes of the job have 7 and 6 of the 13 validation images."""
    trained, _ = launch(2, *FLAGS, "--image-root", data, "--predictions", tmp_path / "trained.csv")
    register("Tiny", partial(ResNet, BottleneckBlock, (1, 1), width=8))  # the network of tests/train_tiny.py
    start = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/best", "--overwrite"]
    code, report = run_train(*FLAGS, *start, "--predictions", tmp_path / "evaluated.csv", image_root=data)
    assert code == 0
    evaluated = report[-1]["data"]
    names = [name for name in evaluated if name.startswith(("val.map", "val.f1", "val.precision", "val.recall"))]
    assert len(names) == 8 and evaluated["val.images"] == COUNTS["val"]
    for name in names:
        assert evaluated[name] == trained[-1]["data"][f"best.{name}"], name
    tables = [rows(tmp_path / f"{name}.csv") for name in ("evaluated", "trained")]
    assert len(tables[0]) == COUNTS["val"]
    for row, of_job in zip(*tables, strict=True):
        assert [row[name] for name in ("image", "labels", "prediction")] == [
            of_job[name] for name in ("image", "labels", "prediction")
        ]
        for name in (f"probability_{name}" for name in CLASSES):
            assert float(row[name]) == pytest.approx(float(of_job[name]), rel=1e-5)


def test_prediction_prints_all_classes_above_threshold(trained, data, tmp_path, capsys):
    folder, _ = trained
    meta = json.loads((folder / "best/meta.json").read_text())
    images = [str(data / f"val/{i:02d}.png") for i in range(8)]
    flags = [str(folder), *images, "--device", "cpu"]
    assert predict.main([*flags, "--json", "--csv", str(tmp_path / "p.csv")]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    table = rows(tmp_path / "p.csv")
    assert predict.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    for entry, row, line in zip(found, table, lines, strict=True):
        probabilities = {name: float(row[f"probability_{name}"]) for name in CLASSES}
        expected = [name for name, t in zip(CLASSES, meta["thresholds"], strict=True) if probabilities[name] >= t]
        expected.sort(key=lambda name: -probabilities[name])
        assert [each["class"] for each in entry["classes"]] == expected and "top" not in entry
        assert row["prediction"] == "|".join(expected)
        for each in entry["classes"]:
            assert each["probability"] == pytest.approx(probabilities[each["class"]], abs=1e-6)
            assert each["threshold"] == meta["thresholds"][each["label"]] <= each["probability"]
        text = ", ".join(f"{name} {probabilities[name]:.4f}" for name in expected) or "none of the classes"
        assert line == f"{entry['image']}: {text}"


def test_checkpoint_without_evaluation_has_threshold_one_half(train, data, tmp_path, capsys):
    assert train("--run-scope", "train_only", "--num-of-class", "5")[0] == 0  # two outputs have no class
    assert predict.main([str(tmp_path / "output/Tiny"), str(data / "val/07.png"), "--device", "cpu", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(each["threshold"] == 0.5 <= each["probability"] for each in entry["classes"])


def test_web_page_shows_classes_above_threshold():
    description = {"arch": "Net", "output": {"shape": [None, 3]}, "epoch": 1, "multi_label": {"thresholds": [0.5] * 3}}
    description |= {"evaluated": {"map": 0.5, "map_micro": 0.5, "loss": 1.0}}
    found = {"red.png": [{"label": 1, "class": "red"}], "none.png": []}
    heat_map = {"heat_map": lambda upload, label: b"%d" % label}

    def classify(upload):
        return found.get(upload.name), "is bad" if upload.name == "bad.png" else None

    with ThreadPoolExecutor(1) as worker:
        client = TestClient(web.create_app(classify, worker, description, 10**6, 3, **heat_map))
        bad = client.post("/predict?heat_map=1", files=[("image", ("bad.png", b"x"))]).json()
        assert bad["images"] == [{"image": "bad.png", "error": "is bad"}]
        page = client.get("/").text
        assert "mAP 50.0%" in page and "classes: top" in page
        files = [("image", (name, web.blank_image().content)) for name in found]
        answers = [client.post(f"/predict{query}", files=files).json()["images"] for query in ("", "?heat_map=1")]
    expected = [{"image": name, "classes": classes} for name, classes in found.items()]
    assert answers[0] == expected
    drawn = [{"heat_map": "data:image/jpeg;base64,MQ=="}, {"heat_map": None}]  # b"1"
    assert answers[1] == [entry | each for entry, each in zip(expected, drawn, strict=True)]


def run_script(folder, image):
    """Run preprocess.py of an export and return its output."""
    command = [sys.executable, str(folder / "preprocess.py"), str(image)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_temperature_is_not_supported(trained, data, tmp_path, capsys):
    flags = ["--verify", str(data), "--temperature", "auto"]
    assert export.main([str(trained[0]), str(tmp_path / "exported"), *flags]) == 2
    message = "--temperature auto: not supported for multi-label networks; remove the flag"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_export_computes_independent_probabilities(trained, data, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    folder, _ = trained
    output = tmp_path / "exported"
    assert export.main([str(folder), str(output), "--onnx", "--verify", str(data), "--uint8", "--triton"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"mAP {json.loads((folder / 'best/meta.json').read_text())['evaluated']['map']:.6g}") == 4
    assert "confirmed" in out
    description = json.loads((output / "model.json").read_text())
    meta = json.loads((folder / "best/meta.json").read_text())
    assert description["multi_label"]["thresholds"] == meta["thresholds"]
    image = data / "val/07.png"
    for model in (folder, output, output / "model.onnx"):
        assert predict.main([str(model), str(image), "--device", "cpu", "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["classes"]
        if model == folder:
            expected = found
        assert [each["class"] for each in found] == [each["class"] for each in expected]
        for each, of_checkpoint in zip(found, expected, strict=True):
            assert each["probability"] == pytest.approx(of_checkpoint["probability"], abs=1e-5)
    lines = [line.split() for line in run_script(output, image).splitlines() if line.startswith("  ")]
    assert [name for _, name in lines] == [each["class"] for each in expected]


def test_export_in_float16_keeps_probabilities_in_float32(trained, data, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    folder, _ = trained
    assert export.main([str(folder), str(tmp_path / "e"), "--onnx", "--precision", "float16", "--uint8"]) == 0
    capsys.readouterr()
    image = str(data / "val/07.png")
    found = []
    for model in (folder, tmp_path / "e/model.onnx"):
        assert predict.main([str(model), image, "--device", "cpu", "--csv", str(tmp_path / "p.csv")]) == 0
        found.append([float(rows(tmp_path / "p.csv")[0][f"probability_{name}"]) for name in CLASSES])
    np.testing.assert_allclose(*found, atol=5e-3)
    # The network reads what model.json describes.
    assert predict.main([str(tmp_path / "e/model.onnx"), image, "--device", "cpu", "--precision", "float32"]) == 2
    assert "--precision float32: " in capsys.readouterr().err
    pixels = preprocessing.model_input(image, preprocessing.read_model(tmp_path / "e/model.json"))
    assert pixels.dtype == np.uint8
    [probabilities] = inference.open_onnx(tmp_path / "e/model.onnx", "cpu").run(pixels)
    np.testing.assert_allclose(probabilities, found[0], atol=5e-3)
    again, logits = inference.open_onnx(tmp_path / "e/model.onnx", "cpu", logits=True).outputs(pixels)
    np.testing.assert_allclose(again, label_metrics.probabilities(logits), atol=1e-5)


def test_verify_compares_labels_losses_and_map(trained, data):
    network = networks.load_checkpoint(trained[0], "cpu")
    score = scores.score(network, network.model(logits=True), data)
    assert score["decisions"] == COUNTS["val"] * len(CLASSES)
    verification.check_agreement("engine", score, "reference", score, "")
    model, near = network.model(logits=True), np.array(network.description["multi_label"]["thresholds"]) + 5e-5
    model.outputs = lambda images: (
        np.tile(near, (len(images), 1)),
        np.tile(np.log(near / (1 - near)), (len(images), 1)),
    )
    assert scores.score(network, model, data)["ties"] == score["decisions"]
    for changes in ({"correct": score["correct"] - 5}, {"map": score["map"] + 0.01}, {"loss": score["loss"] + 0.01}):
        with pytest.raises(RunError, match="disagree"):
            verification.check_agreement("engine", score | changes, "reference", score, "")


def test_ranges_of_int8_come_from_the_images_of_the_table(trained, data):
    network = networks.load_checkpoint(trained[0], fold=True)
    sample = calibration.quantize(network, 7, data, 8)
    assert sample == (8, COUNTS["train"], 0)  # images without a single label have no number of classes
    assert sample.text(len(CLASSES)) == f"8 of {COUNTS['train']} training images"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "folders", pytest.param("numbers", marks=pytest.mark.soak)])
def test_int8_export_is_calibrated_and_verified(trained, data, tmp_path, capsys, kind):
    """With class folders, images without a class are missing: 3 of the training images."""
    folder, _ = trained
    pytest.importorskip("onnxruntime")
    root = data if kind == "csv" else multi_label_data.write(tmp_path / kind, kind)
    flags = ["--int8", "--calibrate", str(root), "--verify", str(root)]
    assert export.main([str(folder), str(tmp_path / "e"), *flags]) == 0
    out = capsys.readouterr().out
    count = COUNTS["train"] - 3 * (kind == "folders")
    assert f"ranges from {count} of {count} training images\n" in out and out.count("mAP") == 4


@pytest.mark.slow
def test_export_after_qat(train, data, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    assert train("--qat", "--epochs", "2")[0] == 0
    capsys.readouterr()
    assert export.main([str(tmp_path / "output/Tiny"), str(tmp_path / "e"), "--onnx", "--verify", str(data)]) == 0
    assert "confirmed" in capsys.readouterr().out


def test_damaged_thresholds_of_export_are_an_error(trained, data, tmp_path, capsys):
    folder, _ = trained
    assert export.main([str(folder), str(tmp_path / "e")]) == 0
    path = Path(tmp_path / "e/model.json")
    description = json.loads(path.read_text())
    for thresholds in (None, [0.5], [0.5, 0.5, 2], "x"):
        description["multi_label"] = {"thresholds": thresholds}
        path.write_text(json.dumps(description))
        assert predict.main([str(tmp_path / "e"), str(data / "val/00.png"), "--device", "cpu"]) == 2
        assert "multi_label.thresholds is" in capsys.readouterr().err, thresholds


def test_program_interface_has_float_labels():
    with static.program_guard(static.Program()):
        feeds = program.create_feeds([3, 32, 32], multi_label_classes=4)
        assert feeds["label"].shape == (-1, 4) and feeds["label"].dtype == paddle.float32


def test_commands_of_page_run(tmp_path, work_in, capsys):
    """The commands of docs/multilabel.md, in this process and with a small network."""
    page = (ROOT / "docs/multilabel.md").read_text()
    commands = re.findall(r"^\.venv/bin/python (?:-m )?(.*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    assert len(commands) == 3
    multi_label_data.write(tmp_path / "scenes")
    work_in(tmp_path)
    for command in commands:
        program, *arguments = shlex.split(command.replace("\\\n", " ").replace("ResNet18", "Tiny"))
        main = {"train.py": train_module.main, "paddle_resnet.predict": predict.main}.get(program, export.main)
        with static.scope_guard(static.Scope()):
            assert main([*arguments, *(["--device", "cpu"] if main is not export.main else [])]) == 0
    out = capsys.readouterr().out
    assert out.count("scenes/val/") == COUNTS["val"] and "confirmed" in out


def test_verify_permits_that_images_with_equal_probabilities_exchange_places(trained, data):
    """If rounding decides the order of many images, mAP differs between two correct engines."""
    network = networks.load_checkpoint(trained[0], "cpu")

    def score(difference, mean=0):
        model = network.model(logits=True)
        random = np.random.RandomState(0)

        def outputs(images):
            logits = mean + difference * random.randn(len(images), network.args.num_of_class)
            return label_metrics.probabilities(logits), logits

        model.outputs = outputs
        return scores.score(network, model, data)

    for mean, difference in ((0, 1e-5), (15, 1e-2)):  # 15: all probabilities are almost 1
        forward, backward = (
            score(difference, mean),
            score(-difference, mean) | {"loss": score(difference, mean)["loss"]},
        )
        assert abs(forward["map"] - backward["map"]) > verification.MAP_TOLERANCE
        verification.check_agreement("engine", forward | {"ties": 1000}, "reference", backward, "")
    different = [score(difference) | {"ties": 1000, "loss": 1} for difference in (1e-2, -1e-2)]
    with pytest.raises(RunError, match="disagree"):
        verification.check_agreement("engine", different[0], "reference", different[1], "")
