"""Test-time augmentation (--tta flip): the result is the mean over an image and its mirror image."""

import csv

import numpy as np
import paddle
import pytest
from paddle import static
from PIL import Image, ImageOps

from conftest import NHWC, frozen, phase
from paddle_resnet import export, predict, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.components import quantization
from paddle_resnet.models import loss_head
from paddle_resnet.native import build as native
from paddle_resnet.serving import image_files, inference
from paddle_resnet.step import cuda_graph

pytestmark = pytest.mark.usefixtures("one_block")

NATIVE = [*NHWC, "--kernels", "native"]
PROGRAMS = {"NCHW": [], "NHWC, 4 channels": NHWC, "QAT": ["--qat"]}
PROGRAMS |= {"native kernels": NATIVE} if native.missing() is None else {}


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("flags", PROGRAMS.values(), ids=PROGRAMS)
def test_evaluation_averages_probabilities_of_image_and_mirror_image(parse, flags):
    if flags == NATIVE:
        native.load()
    random, exe = np.random.RandomState(0), static.Executor(paddle.CPUPlace())
    fetched = {}
    with static.scope_guard(static.Scope()):
        for tta in ("none", "flip"):
            args = frozen(parse(*flags, "--tta", tta, "--report-html", "x.html"))
            main, startup = static.Program(), static.Program()
            fetchs, _, feeds, _ = program.build(args, main, startup, 0, is_train=False)
            if tta == "none":
                exe.run(startup)
                for name in quantization.ranges(main):
                    variables.set_variable(name, np.full(1, 4.0), paddle.CPUPlace())
                images = random.standard_normal((5, *feeds["data"].shape[1:])).astype("float32")
                labels = random.randint(0, 3, (5, 1))
            compiled = program.compile_prog(args, main, is_train=False)
            fetch_list = [variable for variable, _ in fetchs.values()]
            for name in ("image", "mirror image"):
                axis = 3 if args.data_layout == "NCHW" else 2
                data = images if name == "image" else np.flip(images, axis).copy()
                out = exe.run(compiled, feed={"data": data, "label": labels}, fetch_list=fetch_list)
                fetched[tta, name] = dict(zip(fetchs, out, strict=True))
    plain = [softmax(fetched["none", name]["logits"]) for name in ("image", "mirror image")]
    assert np.abs(plain[0] - plain[1]).max() > 1e-3
    expected = (plain[0] + plain[1]) / 2
    of_label = np.take_along_axis(expected, labels, axis=1)
    for result in (fetched["flip", "image"], fetched["flip", "mirror image"]):
        np.testing.assert_allclose(softmax(result["logits"]), expected, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(result["loss"], -np.log(of_label), rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(result["confusion"], np.hstack([labels, expected.argmax(1)[:, None]]))
        assert result["top1"] == pytest.approx(np.mean(expected.argmax(1) == labels[:, 0]))


def test_small_probabilities_have_finite_logarithms():
    logits = np.array([[0, 200, 500], [3, 1, 2], [0, 300, 310], [1, 3, 2]], np.float32)
    main = static.Program()
    with static.program_guard(main):
        out = loss_head.mean_over_mirrored(static.data("logits", [None, 3]))
    [actual] = static.Executor(paddle.CPUPlace()).run(main, feed={"logits": logits}, fetch_list=[out])
    logs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(actual, np.logaddexp(logs[:2], logs[2:]) - np.log(2), rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Create two data sets of square PNG images: "plain", and "mirrored" with the mirror images."""
    root, random = tmp_path_factory.mktemp("png"), np.random.RandomState(0)
    for split, count in (("train", 12), ("val", 11)):
        for i in range(count):
            pixels = random.randint(0, 200, (36, 36, 3))
            pixels[:, :18, i % 3] += 55
            image = Image.fromarray(pixels.astype(np.uint8))
            for name, made in (("plain", image), ("mirrored", ImageOps.mirror(image))):
                folder = root / name / split / f"class{i % 3}"
                folder.mkdir(parents=True, exist_ok=True)
                made.save(folder / f"{i:02d}.png")
    return root


def table(path):
    """Return the probabilities [images, classes] in a CSV file of predictions."""
    with open(path, newline="") as f:
        rows = list(csv.DictReader(f))
    return np.array(
        [[p for _, p in sorted((row[f"label_{i}"], float(row[f"probability_{i}"])) for i in (1, 2, 3))] for row in rows]
    )


def test_training_evaluation_prediction_and_export(run_train, roots, tmp_path, capsys):
    root = roots / "plain"
    flags = ["--lr", "0.2", "--tta", "flip", "--predictions", tmp_path / "trained.csv"]
    code, report = run_train(*flags, image_root=root)
    assert code == 0
    checkpoint, trained = tmp_path / "output/Tiny/0", phase(report, [0], "val.")
    command = next(line for line in capsys.readouterr().out.splitlines() if "again: " in line)
    assert "--tta flip" in command

    expected = []
    for name in ("plain", "mirrored"):
        scope = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint, "--predictions", tmp_path / f"{name}.csv"]
        assert run_train(*scope, image_root=roots / name)[0] == 0  # --tta is not inherited
        expected.append(table(tmp_path / f"{name}.csv"))
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    mean = (expected[0] + expected[1]) / 2
    np.testing.assert_allclose(table(tmp_path / "trained.csv"), mean, atol=1e-5)
    labels = np.array([int(path.parent.name[-1]) for path in sorted(root.glob("val/*/*"))])
    assert trained["loss"] == pytest.approx(-np.log(mean[np.arange(11), labels]).mean(), rel=1e-4)
    assert trained["top1"] == pytest.approx(np.mean(mean.argmax(1) == labels))

    paths = list(map(str, sorted(root.glob("val/*/*"))))
    # The training run recorded averages over images and mirror images, so --verify does not compare them with the
    # metrics of a single pass.
    for uint8 in (False, True):
        folder = tmp_path / f"exported{uint8}"
        description = export.export(checkpoint, folder, uint8=uint8, verify=None if uint8 else root)
        assert description["evaluated"]["tta"] == "flip"
        for model in (checkpoint, folder):
            actual = list(image_files.predict(inference.open_model(model, "cpu", tta="flip"), paths, batch_size=4))
            np.testing.assert_allclose([row for _, row, _ in actual], mean, atol=1e-5)
    assert predict.main([str(checkpoint), *paths, "--csv", str(tmp_path / "p.csv"), "--tta", "flip"]) == 0
    np.testing.assert_allclose(table(tmp_path / "p.csv"), mean, atol=1e-5)

    (tmp_path / "report.json").unlink()
    code, report = run_train("--resume", "--epochs", "2", image_root=root)
    assert (code, report[0]["data"]["tta"]) == (0, "flip")


@pytest.mark.slow
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_captured_step_has_same_results(run_train, checkpoint, fake):
    scope = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint, "--tta", "flip", "--batch-size", "4"]
    flags = ["--data-layout", "NHWC", "--kernels", "native"]
    expected = phase(run_train(*scope, *flags, "--cuda-graph", "false")[1], [], "val.")
    actual = phase(run_train(*scope, *flags)[1], [], "val.")
    [graph] = fake.made
    # One more launch compares the results of untested operators.
    assert graph.launches == 5 - cuda_graph.STEPS_BEFORE + 1
    assert {name: actual[name] for name in ("loss", "top1", "top5")} == {
        name: expected[name] for name in ("loss", "top1", "top5")
    }


@pytest.mark.parametrize("flags", [["--run-scope", "train_only"], ["--benchmark"]], ids=" ".join)
def test_runs_without_evaluation_are_errors(run_train, capsys, flags):
    assert run_train("--tta", "flip", *flags)[0] == 2
    assert f"--tta flip: requires an evaluation; remove it or {' '.join(flags)}" in capsys.readouterr().err


def test_benchmark_of_predict_is_an_error(checkpoint, capsys):
    assert predict.main([str(checkpoint), "--benchmark", "--tta", "flip"]) == 2
    assert "--tta flip: not supported with --benchmark; remove one of them" in capsys.readouterr().err
