"""Verification of exports, and evaluation of their engines (--verify)."""

import importlib.util
import itertools
import json
import pickle
import re
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from conftest import NHWC
from helpers import predict, with_meta
from paddle_resnet import dali, export
from paddle_resnet.checkpoints import contents
from paddle_resnet.data.formats import SINGLE_FILE
from paddle_resnet.machine import cpu
from paddle_resnet.native import build as native
from paddle_resnet.serving import (
    inference,
    networks,
    scores,
    verification,
    writers,
)
from paddle_resnet.serving.model import Model
from paddle_resnet.utils import label_metrics
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.mode import Mode

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
PREPROCESSING = [
    *("--resize-short", "44", "--interp", "cubic", "--normalize-scale", "0.01"),
    *("--normalize-mean", "0.5,0.4,0.3", "--normalize-std", "0.5,0.25,1"),
]
FLAGS = {
    "NCHW": [],
    "NHWC with four channels and ASP": [*NHWC, "--asp", "--prune-model"],
    "rectangle with custom preprocessing": [*PREPROCESSING, "--image-shape", "3,32,48"],
}


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [pytest.param(flags, id=name, marks=[pytest.mark.soak] * ("NHWC" in name)) for name, flags in [*FLAGS.items()][1:]],
)
def test_exported_model_matches_evaluation_metrics(trained, parse, photos, tmp_path, flags):
    checkpoint, expected = trained(*flags)
    description = export.export(checkpoint, tmp_path / "exported")
    assert description == json.loads((tmp_path / "exported/model.json").read_text())
    assert description["classes"] == ["class0", "class1", "class2"]
    assert description["evaluated"]["top1"] == expected["top1"]
    # The loader preprocesses images as specified in model.json.
    preprocessing_flags = description["preprocessing"]
    flags_of_model = ["--resize-short", preprocessing_flags["resize_short"], "--interp", preprocessing_flags["interp"]]
    if isinstance(preprocessing_flags["center_crop"], list):
        flags_of_model += ["--image-shape", "3,{},{}".format(*preprocessing_flags["center_crop"])]
    for name in ("scale", "mean", "std"):
        flags_of_model.append(f"--normalize-{name}={','.join(map(str, np.atleast_1d(preprocessing_flags[name])))}")
    args = parse("--image-root", photos, "--batch-size", 23, *flags_of_model)
    batches = [batch for (batch,) in dali.build_dataloader(args, Mode.EVAL)]
    images, labels = (np.concatenate([np.array(batch[name]) for batch in batches]) for name in ("data", "label"))
    assert list(images.shape[1:]) == description["input"]["shape"][1:]
    probabilities = predict(tmp_path / "exported", images, "probabilities")
    assert probabilities.shape == (23, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert np.mean(probabilities.argmax(axis=1) == labels[:, 0]) == expected["top1"]
    losses = -np.log(np.take_along_axis(probabilities, labels, axis=1))
    assert losses.mean() == pytest.approx(expected["loss"], rel=1e-4)


QUICK = [("NHWC with four channels and ASP", "uint8"), ("rectangle with custom preprocessing", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "images"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.soak)
        for case in itertools.product(FLAGS, ["float32", "uint8"])
    ],
)
def test_verify_scores_every_engine_like_the_checkpoint(trained, photos, tmp_path, capsys, name, images):
    pytest.importorskip("onnxruntime")
    checkpoint, expected = trained(*FLAGS[name])
    capsys.readouterr()
    uint8, width = images == "uint8", 48 if "rectangle" in name else 32
    description = export.export(checkpoint, tmp_path / "exported", onnx=True, verify=photos, uint8=uint8)
    assert description["input"]["shape"] == ([None, 32, width, 3] if uint8 else [None, 3, 32, width])
    out = capsys.readouterr().out
    assert "--data-format" not in out  # the loaders of the engines log no flags
    scores = [line for line in out.splitlines() if line.endswith("23 images")]
    engines = ["Executor", "paddle.inference", "onnxruntime"] + ["OpenVINO"] * HAS_OPENVINO
    assert [line.split(":")[0] for line in scores[-len(engines) :]] == engines
    for line in scores[-len(engines) :]:  # the loss has four decimal places
        assert f"top1 {expected['top1']:.6g}, " in line
        assert float(re.search(r"loss (\S+),", line)[1]) == pytest.approx(expected["loss"], abs=6e-5)


def test_limit_of_the_accuracy_of_int8_networks():
    score = {"correct": 1000, "images": 1000}
    sample = {"images": 8, "available": 30, "classes": 2}
    model = SimpleNamespace(engine="onnxruntime", description={"output": {"shape": [None, 3]}, "int8": {}})
    for correct in (995, 1010):
        verification._check_top1(model, "int8", score | {"correct": correct}, score)
    few = {"correct": 10, "images": 23}
    verification._check_top1(model, "int8", few | {"correct": 9}, few)  # one image is more than 0.5% of the images
    for images, remedy in ((8, "use more --calibration-images, or "), (30, "")):
        model.description["int8"]["calibration"] = sample | {"images": images}
        with pytest.raises(
            RunError,
            match=r"onnxruntime \(int8\) classifies 994 of 1000 images correctly, but the checkpoint's network "
            r"classifies 1000 \(tolerance 0.5% of the images\); its activation ranges come from "
            rf"{images} of 30 training images, which contain 2 of 3 classes, and nothing was written; {remedy}"
            "train with --qat$",
        ):
            verification._check_top1(model, "int8", score | {"correct": 994}, score)


@pytest.mark.slow
def test_int8_export_with_lower_accuracy_is_not_kept(checkpoint, photos, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    real = scores.score
    monkeypatch.setattr(
        scores,
        "score",
        lambda network, model, root, **_: (
            real(network, model, root) | {"correct": 10 - 2 * (model.engine == "onnxruntime")}
        ),
    )
    with pytest.raises(
        RunError, match=r"--verify: onnxruntime \(int8\) classifies 8 of 23 images correctly, but .* 10 "
    ):
        export.export(
            *(checkpoint, tmp_path / "exported"),
            verify=photos,
            int8="onnxruntime",
            calibration=export.Calibration(photos, images=8),
        )
    assert not list(tmp_path.glob("*exported*"))


def test_float16_export_with_lower_accuracy_is_not_kept(checkpoint, photos):
    def outputs(images):
        """Return the same probabilities for each image: 0.4201, 0.4244 and 0.1555."""
        logits = np.tile([1, 1.01, 0.006], (len(images), 1))
        return [np.exp(scores._log_softmax(logits)), logits]

    network = networks.load_checkpoint(checkpoint)
    for precision, ties in (("float16", 23), ("float32", 0)):
        assert scores.score(network, Model("", network.description, outputs, precision), photos)["ties"] == ties
    score = {"correct": 1000, "images": 1000, "ties": 2}
    model = SimpleNamespace(engine="paddle.inference")
    verification._check_top1(model, "float16", score | {"correct": 997}, score)
    message = (
        r"paddle.inference \(float16\) classifies 996 of 1000 images correctly, but the checkpoint's network "
        r"classifies 1000 \(tolerance 0.1% of the images\), and nothing was written; use --precision float32$"
    )
    with pytest.raises(RunError, match=message):
        verification._check_top1(model, "float16", score | {"correct": 996}, score)


def test_tolerance_of_int8_multi_label_networks_counts_labels():
    model, score = SimpleNamespace(engine="onnxruntime"), {"correct": 10_000, "images": 1000, "decisions": 10_000}
    verification._check_top1(model, "int8", score | {"correct": 9950}, score)


def test_int8_network_may_classify_one_of_few_images_differently():
    description = {"int8": {"calibration": {}}, "output": {"shape": [None, 2]}}
    model, score = SimpleNamespace(engine="onnxruntime", description=description), {"correct": 20, "images": 23}
    verification._check_top1(model, "int8", score | {"correct": 19}, score)


def test_score_of_mirror_images_averages_probabilities(checkpoint, photos):
    network, labels, means = networks.load_checkpoint(checkpoint), [], []
    network.args.set("internal", tta="flip")

    def outputs(images):
        logits = 5 * images[..., :8].mean(axis=(2, 3))  # the left side of the images
        probabilities = np.exp(scores._log_softmax(logits))
        means.append(np.mean(np.split(probabilities, 2), axis=0))
        return [probabilities, logits]

    model = Model("", network.description, outputs, "float32")
    score = scores.score(network, model, photos, as_evaluated=True, keep=lambda batch: labels.append(batch[1]))
    losses = -np.log(np.take_along_axis(np.concatenate(means), np.concatenate(labels), axis=1))
    assert score["loss"] == pytest.approx(losses.mean(), rel=1e-6)


def test_logits_of_mirror_images_are_those_of_the_mean_probabilities_of_each_label():
    logits = np.random.default_rng(0).normal(0, 4, (6, 2)).astype(np.float32)
    expected = label_metrics.probabilities(logits).reshape(2, 3, 2).mean(axis=0)
    np.testing.assert_allclose(label_metrics.probabilities(scores._mirrored_logits(logits)), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["correct", "loss", "images of the recorded evaluation"])
def test_export_that_fails_verification_is_not_kept(checkpoint, photos, tmp_path, monkeypatch, capsys, name):
    """The second score that the export computes is that of Paddle Inference."""
    results = []
    real = scores.score

    def score(*args, **options):
        results.append(real(*args, **options))
        if len(results) == 2 and name == "correct":
            results[-1]["correct"] -= 1 + 2 * results[-1]["ties"]
        if len(results) == 2 and name == "loss":
            results[-1]["loss"] += 1.5e-4
        if name.startswith("images"):
            # Change all computed scores in the same way, so that only the recorded score differs.
            results[-1]["correct"] -= 1 + results[-1]["ties"]
        return results[-1]

    monkeypatch.setattr(scores, "score", score)
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos)]) == 1
    error = capsys.readouterr().err
    assert re.search("error: --verify: .* disagree: .* nothing was written", error)
    assert ("its recorded evaluation" in error) == name.startswith("images")
    assert not list(tmp_path.glob("*exported*"))


RECORDED = {"top1": 0.29, "loss": 2.0, "images": 100}  # 0.29 * 100 is less than 29


@pytest.mark.parametrize(
    ("recorded", "device", "is_compared"),
    [
        (RECORDED, "cpu", True),
        (RECORDED | {"not_finite": 0}, "cpu", True),
        (None, "cpu", False),
        (RECORDED, "gpu", False),
        (RECORDED | {"not_finite": 1}, "cpu", False),
        (RECORDED | {"not_finite": 100, "loss": None}, "cpu", False),
        (RECORDED | {"images": 50}, "cpu", False),
    ],
)
def test_only_a_comparable_evaluation_is_compared(capsys, recorded, device, is_compared):
    """The recorded evaluation is wrong: the exported network classifies 90 of 100 images correctly."""
    score = {"images": 100, "correct": 90, "ties": 0, "loss": 1.0, "clipped_loss": 1.0}
    meta = {"evaluated": recorded, "arguments": {"device": device, "dali_device": device}}
    network = SimpleNamespace(model=lambda logits: None, meta=meta, args=SimpleNamespace(tta="none", qat=False))
    with pytest.raises(RunError, match="its recorded evaluation disagree") if is_compared else nullcontext():
        verification.verify_recorded(network, score, "photos", None)
    line = "recorded evaluation: none" if recorded is None else f"images decoded on a {device.upper()}; not compared, "
    assert (line in capsys.readouterr().out) != is_compared


@pytest.mark.parametrize(
    ("precision", "qat", "correct", "message"),
    [
        ("float32", False, 90, "paddle.inference and the checkpoint's network disagree"),
        ("float16", False, 90, None),
        ("float16", False, 80, r"paddle.inference \(float16\) classifies 80 .*; use --precision float32$"),
        ("float16", True, 80, r"paddle.inference \(float16\) classifies 80 .*; use --precision float32$"),
        ("float32", True, 90, None),
        ("float32", True, 80, r"paddle.inference \(--qat\) classifies 80 .*; train longer with --qat$"),
        ("int8", True, 80, r"paddle.inference \(--qat\) classifies 80 .*; train longer with --qat$"),
    ],
)
def test_float16_and_qat_networks_are_compared_only_by_top1(tmp_path, monkeypatch, precision, qat, correct, message):
    score = {"images": 100, "correct": 90, "ties": 0, "loss": 1.0, "clipped_loss": 1.0}
    results, opened = iter([score, score | {"loss": 2.0, "correct": correct}]), []

    def open_paddle(*arguments, **options):
        opened.append(arguments)
        return Model("paddle.inference", {}, None, precision)

    monkeypatch.setattr(inference, "open_paddle", open_paddle)
    monkeypatch.setattr(scores, "score", lambda *arguments, **_: next(results))
    meta, args = {"evaluated": None}, SimpleNamespace(qat=qat)
    network = SimpleNamespace(model=lambda logits: Model("Executor", {}, None), meta=meta, args=args)
    with pytest.raises(RunError, match=message) if message else nullcontext():
        assert verification.verify(network, tmp_path, "photos", "gpu") == score
    assert opened == [(tmp_path, "gpu")]


@pytest.mark.parametrize(
    ("is_earlier", "losses", "is_equal"),
    [
        *[(True, (5.0, 2.0), True), (True, (2.0, 5.0), True), (True, (1.0, 2.1), False)],
        *[(False, (5.0, 2.0), False), (False, (2.0, 5.0), True)],
    ],
)
def test_recorded_loss_matches_exact_or_in_earlier_checkpoint_clipped_loss(is_earlier, losses, is_equal):
    score = {"images": 100, "correct": 29, "ties": 0, "loss": losses[0], "clipped_loss": losses[1]}
    meta = {"evaluated": RECORDED, "arguments": {"device": "cpu"}} | ({} if is_earlier else {"cpu": {}})
    network = SimpleNamespace(model=lambda logits: None, meta=meta, args=SimpleNamespace(tta="none", qat=False))
    with nullcontext() if is_equal else pytest.raises(RunError, match="its recorded evaluation disagree: .* loss [25]"):
        verification.verify_recorded(network, score, "photos", None)


@pytest.mark.parametrize(("recorded", "loss", "is_equal"), [(0.9005, 1, True), (0.91, 1, False), (0.9, 1.01, False)])
def test_recorded_map_is_compared(capsys, recorded, loss, is_equal):
    """The recorded evaluation of a multi-label network has no number of correct decisions."""
    score = {"images": 100, "decisions": 300, "correct": 280, "ties": 0, "loss": 1.0, "clipped_loss": 1.0, "map": 0.9}
    meta = {"evaluated": {"images": 100, "map": recorded, "loss": loss}, "arguments": {"device": "cpu"}, "cpu": {}}
    network = SimpleNamespace(model=lambda logits: None, meta=meta, args=SimpleNamespace(tta="none", qat=False))
    problem = f"disagree: 280 and 280 of 300 labels correct .*, mAP 0.9 and {recorded}, loss 1 and {loss} "
    with nullcontext() if is_equal else pytest.raises(RunError, match=problem):
        verification.verify_recorded(network, score | {"map_ties": 0.0}, "photos", None)
    line = f"recorded evaluation: mAP {recorded}, loss {loss}, images decoded on an unknown device; confirmed\n"
    assert (line in capsys.readouterr().out) == is_equal


def test_labels_have_the_offset_of_the_run(checkpoint, photos, tmp_path):
    paths = sorted((photos / "val").glob("*/*.jpg"))
    (tmp_path / "val.txt").write_text("".join(f"{path} {int(path.parent.name[-1]) + 1}\n" for path in paths))
    network = networks.load_checkpoint(checkpoint)
    model = network.model(logits=True)
    expected = scores.score(network, model, photos)
    network.args.set("internal", label_offset=1)
    assert scores.score(network, model, tmp_path, allow_outside=True) == expected


def test_labels_are_those_of_the_class_names_of_the_run(checkpoint, photos, tmp_path):
    """The data set lacks a class of the run."""
    for name in ("class0", "class2"):
        shutil.copytree(photos / "val" / name, tmp_path / "val" / name)
    network, labels = networks.load_checkpoint(checkpoint), []
    scores.score(network, network.model(logits=True), tmp_path, keep=lambda batch: labels.append(batch[1]))
    assert set(np.concatenate(labels).ravel()) == {0, 2}


def change(checkpoint, folder, parameter=None, loss=0):
    """Copy a checkpoint, permute one parameter or change the recorded loss (relative, if it exceeds 1), and return the
    new folder."""
    evaluated, files = contents.read_meta(checkpoint)["evaluated"], {}
    evaluated["loss"] += loss * max(1, evaluated["loss"])
    if parameter is not None:
        name = "tiny.pdema" if (checkpoint / "tiny.pdema").exists() else "tiny.pdparams"
        arrays = pickle.loads((checkpoint / name).read_bytes())
        arrays[parameter] = np.roll(arrays[parameter], 1, -1)
        files[name] = pickle.dumps(arrays, protocol=2)
    return with_meta(checkpoint, folder, files=files, evaluated=evaluated)


# Half precision rounds the images, whose values lie between 2000 and 2026, to integers.
OFFSET = "--bn-momentum 0.1 --normalize-scale 0.0001 --normalize-std 0.001,0.001,0.001 --normalize-mean=-2,-2,-2"
# The flags that change the numbers of an evaluation on a CPU.
EVALUATED = {
    "QAT in NHWC": "--qat --data-layout NHWC --cutmix 1 --class-weights balanced --bn-momentum 0.8",
    "QAT of 20 layers": "--qat --data-layout NHWC --cutmix 1 --class-weights balanced --bn-momentum 0.8 "
    "--model-arch-name ResNet18",
    "QAT with half-precision images": f"--qat --dali-output-fp16 --data-layout NHWC {OFFSET} --lr 0.1",
    "QAT with all others": "--qat --tta flip --dali-output-fp16 --data-layout NHWC --image-shape 4,32,32 --ema 0.9",
    "QAT with custom kernels": "--qat --data-layout NHWC --kernels native",
    "half-precision images": f"--dali-output-fp16 --data-layout NHWC --asp --prune-model {OFFSET} --lr 10",
    "EMA with four channels": "--ema 0.9 --data-layout NHWC --image-shape 4,32,32",
    # After the run's six steps, the fast weights differ from the slow ones.
    "Lookahead with sizes": "--lookahead 4,0.5 --sizes 24:0,32:1 --epochs 2",
    "TTA with preprocessing, label offset and unused outputs": "--tta flip --interp lanczos3 --resize-short 44 "
    "--image-shape 3,32,48 --label-offset 1 --num-of-class 5",
}
# The first cases are part of make test. The others are soak tests, because the first cases contain the same flags.
COMBINED = ("QAT with all others", "TTA with preprocessing, label offset and unused outputs")
REPEATED = ("QAT of 20 layers", "QAT in NHWC", "QAT with half-precision images", "EMA with four channels")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in COMBINED) + [pytest.mark.soak] * (name in REPEATED))
        for name in EVALUATED
    ],
)
def test_verify_repeats_recorded_evaluation(one_block, run_train, photos, tmp_path, capsys, name):
    """A correct checkpoint is accepted, and the same checkpoint with a different recorded loss is rejected. With TTA, a
    changed weight is tested, too."""
    root, flags = photos, EVALUATED[name].split()
    if "label offset" in name:
        root = tmp_path / "records"
        root.mkdir()
        for split in ("train", "val"):
            paths = sorted((photos / split).glob("*/*.jpg"), key=lambda path: path.name)
            with SINGLE_FILE["recordio"](str(root), split) as writer:
                writer.write([(path.read_bytes(), int(path.parent.name[-1]) + 1) for path in paths])
                writer.finish()
    code, _ = run_train(*flags, image_root=root)
    if code and name == "QAT with custom kernels" and "--kernels native" in capsys.readouterr().err:
        pytest.skip("the custom kernels cannot be built")
    assert code == 0
    [checkpoint] = (tmp_path / "output").glob("*/1" if "sizes" in name else "*/0")
    capsys.readouterr()

    def verify(checkpoint):
        """Do what export.main does after it has compared the exported networks with the checkpoint."""
        network = networks.load_checkpoint(checkpoint)
        score = scores.score(network, network.model(logits=True), root)
        verification.verify_recorded(
            network, score, root, partial(networks.load_checkpoint, checkpoint, as_evaluated=True)
        )
        return network, score

    if "all" in name or "TTA" in name:
        assert export.main([str(checkpoint), str(tmp_path / "exported"), "--verify", str(root)]) == 0
    network, plain_score = verify(checkpoint)
    out = capsys.readouterr().out
    top1 = contents.read_meta(checkpoint)["evaluated"]["top1"]
    line = f"^recorded evaluation: top1 {top1:.6g}, loss .*, images decoded on a CPU; confirmed$"
    assert re.search(line, out, re.MULTILINE)
    if "QAT" not in name:
        recorded = contents.read_meta(checkpoint)["evaluated"]["loss"]
        loss = scores.score(network, network.model(logits=True), root, True)["loss"]
        assert loss == pytest.approx(recorded, rel=1e-6)
        is_plain = name != "half-precision images" and "TTA" not in name
        assert (plain_score["loss"] == pytest.approx(recorded, rel=5e-6)) == is_plain
    changes = {"loss": 3e-4}, {"loss": -3e-4}, {"parameter": "linear_0.w_0"}
    for i, wrong in enumerate(changes if "TTA" in name else changes[:1]):
        with pytest.raises(RunError, match="the checkpoint's network and its recorded evaluation disagree: "):
            verify(change(checkpoint, tmp_path / str(i), **wrong))


def test_network_with_one_class_is_verified(one_block, run_train, photos, tmp_path, capsys):
    """Regression test: the export ended with a ValueError, because an image had no second class."""
    for split in ("train", "val"):
        shutil.copytree(photos / split / "class0", tmp_path / "photos" / split / "class0")
    flags = ["--num-of-class", "1", "--allow-one-class"]
    assert run_train(*flags, image_root=tmp_path / "photos")[0] == 0
    capsys.readouterr()
    export.export(tmp_path / "output/Tiny/0", tmp_path / "exported", verify=tmp_path / "photos")
    assert capsys.readouterr().out.count("top1 1, loss ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True], ids=["correct", "wrong"])
def test_verify_compares_logits_of_network_with_saturated_probabilities(
    trained, photos, tmp_path, monkeypatch, capsys, is_wrong
):
    """Nearly all probabilities are 0 or 1."""
    onnx = importlib.util.find_spec("onnxruntime") is not None
    checkpoint, recorded = trained("--lr", "10")
    real = writers.write_paddle

    def write(network, folder):
        if is_wrong:
            weights = network.scope.find_var("linear_0.w_0").get_tensor()
            weights.set(np.array(weights) * np.float32(1.01), paddle.CPUPlace())
        return real(network, folder)

    monkeypatch.setattr(writers, "write_paddle", write)
    code = export.main([str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos), *["--onnx"] * onnx])
    assert code == int(is_wrong)
    out, err = capsys.readouterr()
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in out.splitlines() if line.endswith("23 images")]
    assert losses[0] > 100 and losses[0] == pytest.approx(recorded["loss"], rel=1e-5)
    if is_wrong:
        assert "--verify: paddle.inference and the checkpoint's network disagree: " in err
    else:
        assert losses == [pytest.approx(losses[0], rel=1e-5)] * (2 + onnx)


@pytest.mark.slow
def test_checkpoint_of_earlier_version_with_clipped_loss_is_verified(trained, photos):
    """Earlier versions limited the loss of an image on a CPU to about 64 and did not record the CPU."""
    checkpoint, _ = trained("--lr", "10")
    network = networks.load_checkpoint(checkpoint)
    score = scores.score(network, network.model(logits=True), photos)
    clipped_loss = score["clipped_loss"]
    assert clipped_loss < 65 and score["loss"] > 100
    for is_earlier in (True, False):
        meta = contents.read_meta(checkpoint)
        meta["evaluated"]["loss"] = clipped_loss
        if is_earlier:
            del meta["cpu"]
        network.meta = meta
        with nullcontext() if is_earlier else pytest.raises(RunError, match="its recorded evaluation disagree"):
            verification.verify_recorded(network, score, photos, None)


def test_verify_detects_wrong_softmax(checkpoint, photos, tmp_path, monkeypatch):
    """The inference engine computes correct logits, but its softmax is wrong."""
    real = inference.open_paddle

    def open_paddle(*args, **options):
        model = real(*args, **options)
        outputs = model.outputs
        model.outputs = lambda images: [outputs(images)[0][:, ::-1], outputs(images)[1]]
        return model

    monkeypatch.setattr(inference, "open_paddle", open_paddle)
    with pytest.raises(
        RunError, match=r"--verify: the probabilities of paddle.inference differ from the softmax of its"
    ):
        export.export(checkpoint, tmp_path / "exported", verify=photos)


@pytest.mark.parametrize("gap", [0, 1e-7])
def test_map_may_change_if_rounding_separates_or_joins_equal_scores(gap):
    """Two copies of an image of the class have the scores 0.5 and 0.5 + gap, and follow two other images."""
    labels = np.array([1, 0, 0, 1, 1], bool)[:, None]
    scored = np.array([0.9, 0.8, 0.7, 0.5, 0.5 + gap])[:, None]
    mean, change = scores.map_and_ties(scored, labels, 1e-4)
    separate, joined = (1 + 2 / 4 + 3 / 5) / 3, (1 + 3 / 5 + 3 / 5) / 3
    assert mean == pytest.approx(separate if gap else joined)
    assert change == pytest.approx(joined - separate)
    assert scores.map_and_ties(np.array([0.9, 0.8, 0.7, 0.6, 0.5])[:, None], labels, 1e-4)[1] == pytest.approx(0)


def test_agreement_check_tolerates_ties_and_rounding():
    score = {"images": 100, "correct": 70, "ties": 1, "loss": 2.0}
    verification.check_agreement("a", score, "b", score | {"correct": 72, "loss": 2.0001}, "use c")
    for other, counts in (({"correct": 73}, "73"), ({"loss": 2.0003}, "70"), ({"loss": float("nan")}, "70")):
        message = (
            rf"^--verify: a and b disagree: 70 and {counts} of 100 images correct \(ties allow a difference of 2\), "
            "loss 2 and "
        )
        with pytest.raises(RunError, match=message):
            verification.check_agreement("a", score, "b", score | other, "use c")
    # The difference between losses below 1 is absolute.
    verification.check_agreement("a", score | {"loss": 0.5}, "b", score | {"loss": 0.50009}, "use c")
    with pytest.raises(RunError, match=r"loss 0.5 and 0.50011 \(tolerance 0.0001\), and nothing was written; use c$"):
        verification.check_agreement("a", score | {"loss": 0.5}, "b", score | {"loss": 0.50011}, "use c")


@pytest.mark.parametrize("change", [{}, {"paddle_version": "2.5"}, {"cpu": {}}], ids=["equal", "version", "CPU"])
def test_qat_evaluation_is_compared_only_where_rounding_is_equal(change):
    """test_verify_repeats_recorded_evaluation compares real evaluations of networks trained with --qat."""
    meta = {"evaluated": RECORDED, "arguments": {"device": "cpu"}, "cpu": cpu.arithmetic()}
    meta |= {"paddle_version": paddle.__version__} | change
    network = SimpleNamespace(meta=meta, args=SimpleNamespace(qat=True))
    obstacle = "--qat requires the same kind of CPU, number of threads and version of Paddle as in training"
    assert verification._obstacle(network, 100) == (obstacle if change else None)
    network.args.qat = False
    assert verification._obstacle(network, 100) is None
    meta["evaluated"] = {"top1": 0.29, "loss": 2.0}  # a checkpoint of an earlier version
    obstacle = "the checkpoint does not contain the number of evaluated images"
    assert verification._obstacle(network, 100) == obstacle


def test_qat_evaluation_with_missing_kernels_is_not_compared(capsys):
    def load():
        raise native.Unavailable("no compiler")

    meta = {"evaluated": RECORDED, "arguments": {"device": "cpu"}, "cpu": cpu.arithmetic()}
    network = SimpleNamespace(
        model=lambda logits: None,
        meta=meta | {"paddle_version": paddle.__version__},
        args=SimpleNamespace(tta="none", qat=True),
    )
    verification.verify_recorded(network, {"images": 100}, "photos", load)
    assert "not compared, because custom kernels, which --qat requires, are missing" in capsys.readouterr().out


def test_broken_openvino_is_an_error(checkpoint, photos, tmp_path, import_from):
    pytest.importorskip("onnxruntime")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/openvino.py").write_text("raise OSError('libopenvino.so: not found')\n")
    import_from(tmp_path / "packages", "openvino")
    with pytest.raises(UsageError, match=r"OpenVINO \(libopenvino.so: not found\); install a"):
        export.export(checkpoint, tmp_path / "exported", onnx=True, verify=photos)
    assert not (tmp_path / "exported").exists()
