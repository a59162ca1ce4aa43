"""Predictions for each evaluated image."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import frozen, phase
from paddle_resnet import program
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.native import build as native
from paddle_resnet.results import predictions, reading
from paddle_resnet.step import cuda_graph
from paddle_resnet.tasks import SingleLabel
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.meters import TopMeter
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("one_block")

KERNELS = [[], *([["--kernels", "native", "--data-layout", "NHWC"]] if native.missing() is None else [])]


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


@pytest.fixture
def predict(run_train, checkpoint, tmp_path):
    """Evaluate the checkpoint with --predictions and return (rows of the table, result)."""

    def predict(*flags, **more):
        scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
        code, report = run_train(*scope, "--predictions", tmp_path / "out/predictions.csv", *flags, **more)
        assert code == 0
        return read(tmp_path / "out/predictions.csv"), phase(report, [], "val.")

    return predict


@pytest.mark.parametrize("flags", KERNELS, ids=["paddle", "native"][: len(KERNELS)])
def test_rows_list_images_in_order_and_match_evaluation(run_train, checkpoint, photos, predict, flags, tmp_path):
    scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    plain = phase(run_train(*scope, *flags)[1], [], "val.")
    rows, result = predict(*flags)
    assert {name: result[name] for name in ("loss", "top1", "top5")} == {n: plain[n] for n in ("loss", "top1", "top5")}
    assert list(rows[0]) == [
        *("image", "label", "prediction", "class", "predicted_class"),
        *(f"{name}_{i}" for i in (1, 2, 3) for name in ("label", "class", "probability")),
    ]
    assert [row["image"] for row in rows] == sorted(str(p.relative_to(photos)) for p in photos.glob("val/*/*"))
    assert all(row["class"] == Path(row["image"]).parent.name == f"class{row['label']}" for row in rows)
    assert all(row["predicted_class"] == f"class{row['prediction']}" for row in rows)
    assert all(row[f"class_{i}"] == f"class{row[f'label_{i}']}" for row in rows for i in (1, 2, 3))
    assert np.mean([row["label"] == row["prediction"] for row in rows]) == pytest.approx(result["top1"], abs=1e-12)
    losses = []
    for row in rows:
        top = {row[f"label_{i}"]: float(row[f"probability_{i}"]) for i in (1, 2, 3)}
        assert list(top.values()) == sorted(top.values(), reverse=True) and row["prediction"] == next(iter(top))
        assert sum(top.values()) == pytest.approx(1, abs=1e-6)
        losses.append(-np.log(top[row["label"]]))
    # Each probability must be assigned to the right image.
    assert np.mean(losses) == pytest.approx(result["loss"], rel=1e-5)
    confusion = read(tmp_path / "report.confusion.csv")
    for pair in confusion:
        matches = [row for row in rows if (row["label"], row["prediction"]) == (pair["label"], pair["predicted"])]
        assert len(matches) == int(pair["images"])


@pytest.mark.parametrize("data_format", ["folder", "filelist"])
def test_rows_list_the_images_that_the_flags_choose(photos, predict, tmp_path, data_format):
    """The file list contains images outside the folder, and is not read with --data-format folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/val").symlink_to(photos / "val")
    names = [f"{photos}/val/{name}.jpg" for name in ("class1/01", "class0/03", "class2/02")]
    (tmp_path / "data/val.txt").write_text("".join(f"{name} {name[-8]}\n" for name in names))
    if data_format == "folder":
        names = sorted(str(path.relative_to(photos)) for path in photos.glob("val/*/*"))
    (tmp_path / "skip.txt").write_text(f"{names[-1]}\n")
    flags = ["--data-format", data_format, "--skip-list", tmp_path / "skip.txt"]
    flags += ["--allow-outside"] if data_format == "filelist" else []
    listed, _ = predict(*flags, image_root=tmp_path / "data")
    assert [row["image"] for row in listed] == names[:-1]


@pytest.mark.slow
def test_predictions_follow_image_content_in_every_format(predict, converted, tmp_path):
    """In every storage format, images with the same bytes have the same probabilities, regardless of shards and skip
    list."""
    expected = None
    for data_format, root in converted.items():
        skips = [None] if data_format == "lmdb" else [None, [2, 3, 11]]
        all_images = DataRoot(root).listed(Mode.EVAL)
        for skip in skips:
            flags = ["--batch-size", "5"]
            images = all_images
            if skip is not None:
                (tmp_path / "skip.txt").write_text("".join(f"{all_images[i].name}\n" for i in skip))
                flags += ["--skip-list", tmp_path / "skip.txt"]
                images = [image for i, image in enumerate(all_images) if i not in skip]
            rows, _ = predict(*flags, image_root=root)
            assert [row["image"] for row in rows] == [image.name for image in images], data_format
            actual = {}
            for row, image in zip(rows, images, strict=True):
                data, label = (Path(image.path).read_bytes(), image.label) if image.kind is None else read_image(image)
                assert int(row["label"]) == label
                actual[hashlib.sha256(data).hexdigest()] = [float(row[f"probability_{i}"]) for i in (1, 2, 3)]
            expected = expected or actual
            assert len(actual) == len(images)
            for key, probabilities in actual.items():
                assert probabilities == pytest.approx(expected[key], abs=1e-6), data_format
    # The probabilities differ between images. Otherwise, the comparison could not fail.
    assert len({tuple(p) for p in expected.values()}) == 23


def test_logits_are_fetched_only_if_required(parse):
    def fetched(*flags):
        return set(program.build(frozen(parse(*flags)), static.Program(), static.Program(), 0, is_train=False)[0])

    assert fetched() == {"loss", "top1", "top5", "confusion", "of_softmax"}
    assert fetched("--report-html", "x.html") == {"loss", "top1", "top5", "confusion", "of_softmax", "logits"}


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_step_with_logits_has_only_operators_tested_in_graphs(parse):
    native.load()
    args = parse("--data-layout", "NHWC", "--kernels", "native", "--report-html", "x.html")
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(frozen(args), main, startup, 0, is_train=False)
    static.Executor(paddle.CPUPlace()).run(startup)
    types = {op.type for op in program.compile_prog(args, main, is_train=False)._program.global_block().ops}
    assert "scale" in types and "logits" in fetchs
    assert {name for name in types if not name.startswith("native_")} <= cuda_graph.TESTED


def test_top_meter_matches_numpy_and_sorts_nan_last():
    random = np.random.RandomState(0)
    logits = random.randn(12, 9).astype("float32") * 5
    logits[3] = 1000 * logits[3]
    meter = TopMeter(5)
    meter.update(logits[:8], 8)
    meter.update(logits[8:], 4)
    rows = meter.rows()
    p = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    for row, probabilities in zip(rows, p, strict=True):
        assert row[:5].tolist() == np.argsort(-probabilities, kind="stable")[:5].tolist() or not probabilities[1:].all()
        np.testing.assert_allclose(row[5:], np.sort(probabilities)[::-1][:5], atol=1e-12)
    meter.reset()
    assert meter.rows().shape == (0, 10)
    meter.update(np.array([[1.0, 1.0, 3.0, 0.0, 0.0, np.nan]]), 1)
    assert meter.rows()[0, :5].tolist() == [2, 0, 1, 3, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--predictions", "x.csv", "--run-scope", "train_only"],
            "--predictions x.csv: requires a complete evaluation; remove it or --run-scope train_only",
        ),
        (
            ["--predictions", "/proc/no/x.csv", "--run-scope", "eval_only"],
            "--predictions /proc/no/x.csv: cannot be written",
        ),
        (["--report-html", "/proc/no/x.html"], "--report-html /proc/no/x.html: cannot be written"),
        (["--report-html", "x.html", "--benchmark"], "--report-html x.html: not supported with --benchmark"),
        (
            ["--report-html", "x.html", "--data-format", "synthetic"],
            "--report-html x.html: not supported with --data-format synthetic",
        ),
        (["--tensorboard-dir", "x", "--benchmark"], "--tensorboard-dir x: not supported with --benchmark"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_incompatible_flags_exit_with_code_2(run_train, checkpoint, capsys, flags, message):
    start = ["--from-pretrained-params", checkpoint] if "eval_only" in flags else []
    assert run_train(*flags, *start)[0] == 2
    assert message in capsys.readouterr().err


def test_changed_data_or_unwritable_path_is_an_error(photos, tmp_path):
    images = predictions.list_images(photos, "auto", None, [], 23)
    rows_of_top = np.tile(np.array([0, 0, 1, 2, 0.5, 0.3, 0.2]), (23, 1))
    table = lambda: SingleLabel(3).predictions({"predictions": rows_of_top}, list("abc"))  # noqa: E731
    assert predictions.list_images(photos, "folder", None, [], 23) == images
    with pytest.raises(RunError, match="had 22 validation images at the start and has 23 now; evaluate again"):
        predictions.list_images(photos, "auto", None, [], 22)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/p.csv: cannot be written \(Not a directory\); free disk space"):
        predictions.write(str(tmp_path / "file/p.csv"), images, *table())
    rows_of_top[1] = [2, 1, 3, 3, *[np.nan] * 3]  # the logits of two classes are NaN
    rows_of_top[2] = [2, 3, 3, 3, *[np.nan] * 3]
    predictions.write(str(tmp_path / "p.csv"), images, *table())
    rows = [list(row.values())[1:] for row in read(tmp_path / "p.csv")]
    assert len(rows) == 23
    assert rows[:3] == [
        ["0", "0", "a", "a", *("0", "a", "0.5"), *("1", "b", "0.3"), *("2", "c", "0.2")],
        ["2", "1", "c", "b", "1", "b", *[""] * 7],
        ["2", "", "c", *[""] * 10],
    ]
    assert len(reading.Run(None).rows("predictions.csv", tmp_path / "p.csv")) == 23  # the page accepts empty cells


def test_skip_list_paths_are_normalized_like_in_loader(photos, tmp_path):
    """The file list and the skip list may contain different spellings of the same path."""
    (tmp_path / "val").symlink_to(photos / "val")
    (tmp_path / "val.txt").write_text("./val/class0/00.jpg 0\n./val/class1/01.jpg 1\n")
    (tmp_path / "skip.txt").write_text("val/./class0/00.jpg\n")
    images = predictions.list_images(tmp_path, "auto", tmp_path / "skip.txt", [], 1)
    assert [image.name for image in images] == ["./val/class1/01.jpg"]


def test_images_may_be_outside_the_folder_only_if_allowed(photos, tmp_path):
    (tmp_path / "val.txt").write_text(f"{photos}/val/class0/00.jpg 0\n{photos}/val/class1/01.jpg 1\n")
    (tmp_path / "skip.txt").write_text(f"{photos}/val/class0/00.jpg\n")
    for skip, count in ((None, 2), (tmp_path / "skip.txt", 1)):
        assert len(predictions.list_images(tmp_path, "filelist", skip, True, count)) == count
    with pytest.raises(UsageError, match="--allow-outside"):
        predictions.list_images(tmp_path, "filelist", None, False, 2)
