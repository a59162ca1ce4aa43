import importlib.util
import io
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static
from PIL import Image

from conftest import NHWC, ROOT, assert_sparse, assert_two_of_four, phase
from helpers import predict, training_images, with_meta
from paddle_resnet import dali, export
from paddle_resnet import predict as predict_command
from paddle_resnet.checkpoints import conversion, folders, foreign_files
from paddle_resnet.components import quantization
from paddle_resnet.data.formats import SINGLE_FILE
from paddle_resnet.machine import cpu
from paddle_resnet.native import build as native
from paddle_resnet.serving import calibration, image_files, inference, networks, onnx_writer, preprocessing
from paddle_resnet.serving.model import Model
from paddle_resnet.utils import confidence
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.mode import Mode

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
PREPROCESSING = [
    *("--resize-short", "44", "--interp", "cubic", "--normalize-scale", "0.01"),
    *("--normalize-mean", "0.5,0.4,0.3", "--normalize-std", "0.5,0.25,1"),
]
FLAGS = {
    "NCHW": [],
    "NHWC with four channels": NHWC,
    "ASP": ["--asp", "--prune-model"],
    "custom preprocessing": PREPROCESSING,
    "rectangle": ["--image-shape", "3,32,48"],
}


@pytest.fixture
def trained(one_block, once, run_train, tmp_path):
    """Train for one epoch and return (copy of the checkpoint folder, evaluation metrics). Tests with the same flags
    share one run."""

    def trained(*flags):
        def make(folder):
            code, report = run_train(*flags, "--output-dir", folder)
            assert code == 0
            (folder / "metrics.json").write_text(json.dumps(phase(report, [0], "val.")))

        folder = shutil.copytree(once("_".join(["trained_for_export", *flags]), make), tmp_path / "output")
        return folder / "Tiny/0", json.loads((folder / "metrics.json").read_text())

    return trained


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.fixture
def checkpoint_of(once, run_train):
    """Return a function that trains a network for one epoch and returns the checkpoint folder. Tests share the run."""

    def checkpoint_of(arch):
        def make(folder):
            flags = ["--model-arch-name", arch, "--run-scope", "train_only", "--output-dir", folder]
            assert run_train(*flags)[0] == 0

        return once(f"{arch}_for_export", make) / arch / "0"

    return checkpoint_of


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            FLAGS[name], id=name, marks=[] if name in ("custom preprocessing", "rectangle") else pytest.mark.soak
        )
        for name in FLAGS
    ],
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


QUICK = [
    ("NCHW", "float32"),
    ("NHWC with four channels", "uint8"),
    ("ASP", "uint8"),
    ("custom preprocessing", "float32"),
    ("rectangle", "uint8"),
]


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
    uint8, width = images == "uint8", 48 if name == "rectangle" else 32
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


def test_onnx_file_matches_paddle_inference(checkpoint_of, tmp_path):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    description = export.export(checkpoint_of("Tiny"), tmp_path / "exported", onnx=True)
    model = onnx.load(tmp_path / "exported/model.onnx")
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", onnx_writer.OPSET)]
    assert json.loads(model.metadata_props[0].value) | {"files": description["files"]} == description
    assert (
        len(model.graph.initializer) == len({name for node in model.graph.node for name in node.input[1:]} - {""}) - 2
    )
    session = onnxruntime.InferenceSession(tmp_path / "exported/model.onnx")
    images = np.random.RandomState(0).normal(size=(7, 3, 32, 32)).astype("float32")
    (actual,) = session.run(["probabilities"], {"images": images})
    assert actual.shape == (7, 3)
    np.testing.assert_allclose(actual, inference.open_paddle(tmp_path / "exported", "cpu").run(images), atol=1e-4)
    (single,) = session.run(["probabilities"], {"images": images[:1]})
    np.testing.assert_allclose(single, actual[:1], atol=1e-5)


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile"])
def test_int8_network_is_quantized_for_its_engine(checkpoint_of, photos, tmp_path, capsys, arch, engine):
    """All inputs of convolutions, residual additions and the classifier are quantized. BN is folded into the
    convolutions."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    flags = ["--int8", "--calibrate", str(photos), "--int8-engine", engine, "--calibration-images", "20"]
    assert export.main([str(checkpoint_of(arch)), str(tmp_path / "exported"), *flags, "--uint8"]) == 0
    log = f"model.onnx: INT8 for {engine}, ranges from 20 of 30 training images, which contain 3 of 3 classes"
    assert log in capsys.readouterr().out
    graph = onnx.load(tmp_path / "exported/model.onnx").graph
    constants = {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    kinds = [node.op_type for node in graph.node]
    assert "BatchNormalization" not in kinds
    for node in graph.node:
        if node.op_type in ("Conv", "MatMul", "Add", "GlobalAveragePool", "MaxPool"):
            operands = [name for name in node.input if name not in constants]
            if node.op_type == "Conv":
                assert len(node.input) == 3  # the third input is the bias, which is the shift of the folded BN
                levels, scales = (constants[name] for name in producers[node.input[1]].input[:2])
                if engine == "tensorrt":
                    assert constants[node.input[2]].dtype == np.float32
                else:
                    bias, bias_scales = (constants[name] for name in producers[node.input[2]].input)
                    assert bias.dtype == np.int32 and bias.shape == bias_scales.shape
                    scale = constants[producers[node.input[0]].input[1]]
                    np.testing.assert_allclose(bias_scales, scale * scales, rtol=1e-6)
                assert levels.dtype == np.int8 and scales.shape == levels.shape[:1]
                assert np.abs(levels).max() == (127 if engine == "tensorrt" else 63)
            if node.op_type != "Add" or len(operands) == 2:
                assert {producers[name].op_type for name in operands} == {"DequantizeLinear"}
    keeps_sign = ("MaxPool", "GlobalAveragePool", "Flatten")
    quantizations = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    zeros = [constants[node.input[2]] for node in quantizations]
    if engine == "tensorrt":
        assert {(zero.dtype.name, zero.item()) for zero in zeros} == {("int8", 0)}
    else:
        assert {(zero.dtype.name, zero.item()) for zero in zeros} == {("uint8", 0), ("uint8", 128)}
        for node, zero in zip(quantizations, zeros, strict=True):
            source = producers.get(node.input[0])
            while source and source.op_type in (*keeps_sign, "QuantizeLinear", "DequantizeLinear"):
                source = producers.get(source.input[0])
            assert (zero == 0) == (source is not None and source.op_type in ("Relu", "Clip")), node.name


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
def test_int8_network_matches_fake_quantized_program(checkpoint_of, photos, tmp_path, engine):
    """A different rounding of sums may change an activation by one quantization level."""
    pytest.importorskip("onnxruntime")
    network = networks.load_checkpoint(checkpoint_of("Tiny"), fold=True)
    images = np.concatenate(training_images(network.description, photos, 30))
    expected = network.model(logits=True).outputs(images)[1]
    export._write_int8(network, tmp_path, engine, export.Calibration(photos))
    simulated, actual = (
        model.outputs(images)[1]
        for model in (network.model(logits=True), inference.open_onnx(tmp_path / "model.onnx", "cpu", logits=True))
    )
    scale = np.abs(expected).max()
    assert 0 < np.abs(actual - expected).max() < 0.2 * scale
    np.testing.assert_allclose(actual, simulated, rtol=0, atol=0.03 * scale)


def test_int8_network_with_a_nearly_zero_filter(checkpoint, photos, tmp_path):
    """Regression test: the bias, an int32 multiple of weight scale times activation scale, overflowed in
    onnxruntime."""
    pytest.importorskip("onnxruntime")
    network = networks.load_checkpoint(checkpoint, fold=True)
    for layer in quantization.layers(network.program)[:-1]:
        weight = network.parameter(layer.weight)
        weight[::2] *= np.float32(1e-15)
        calibration._set(network, layer.weight, weight)
    images = np.concatenate(training_images(network.description, photos, 30))
    export._write_int8(network, tmp_path, "onnxruntime", export.Calibration(photos))
    expected, actual = (
        model.outputs(images)[1]
        for model in (network.model(logits=True), inference.open_onnx(tmp_path / "model.onnx", "cpu", logits=True))
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile"])
def test_convolutions_of_int8_network_run_in_int8(checkpoint_of, photos, tmp_path, arch):
    """onnxruntime before 1.23 computes convolutions with float32 biases in float32."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    network = networks.load_checkpoint(checkpoint_of(arch), fold=True)
    export._write_int8(network, tmp_path, "onnxruntime", export.Calibration(photos))
    convolutions = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "Conv"]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == len(convolutions) > 0 and "Conv" not in kinds


INSTEAD_OF_INT8 = "use --onnx instead of --int8 and the calibration flags"


@pytest.mark.parametrize(("ratio", "remedy"), [(2.34, None), (0.36, INSTEAD_OF_INT8), (0.36, "train without --qat")])
def test_speed_of_int8_is_measured(checkpoint, photos, tmp_path, monkeypatch, capsys, ratio, remedy):
    """onnxruntime runs the INT8 model and the same network in float32."""
    onnxruntime = pytest.importorskip("onnxruntime")

    def measure(model, reference):
        images = np.concatenate(training_images(model.description, photos, 30))
        expected, actual = reference.run(images), model.run(images)
        assert (model.precision, reference.precision) == ("int8", "float32")
        assert 0 < np.abs(actual - expected).max() < 0.05
        return ratio

    network = networks.load_checkpoint(checkpoint, fold=True)
    monkeypatch.setattr(export, "_speed_ratio", measure)
    export._write_int8(network, tmp_path, "onnxruntime", export.Calibration(photos))
    if remedy == "train without --qat":
        capsys.readouterr()
        network.args.set("test", qat=True)
        export._report_speed(network, tmp_path)
    out, err = capsys.readouterr()
    log = f"model.onnx: {ratio} times as many images/s in INT8 as in float32 (onnxruntime {onnxruntime.__version__}, "
    log += "this CPU, batches of 8)"
    if remedy is None:
        assert f"{log}\n" in out and err == ""
    else:
        assert err == f"warning: {log}; for speed, {remedy}\n"


def test_speed_ratio_compares_shortest_times(monkeypatch):
    """The models take turns. Other programs make some runs slow."""
    clock, calls = [0.0], []

    def model(name, *seconds):
        durations = itertools.cycle(seconds)

        def run(images):
            assert images.shape == (8, 3, 4, 4)
            calls.append(name)
            clock[0] += next(durations)

        return SimpleNamespace(run=run, description={"input": {"shape": [None, 3, 4, 4], "dtype": "uint8"}})

    monkeypatch.setattr(export, "perf_counter", lambda: clock[0])
    assert export._speed_ratio(model("int8", 9, 0.25, 7), model("float32", 8, 5, 1, 9)) == pytest.approx(4)
    assert calls == ["int8", "float32"] * 4  # at least four runs
    calls.clear()
    assert export._speed_ratio(model("int8", 1 / 64), model("float32", 3 / 64)) == pytest.approx(3)
    assert calls == ["int8", "float32"] * 8  # at least half a second


def test_calibration_with_sorted_records_keeps_accuracy(one_block, run_train, tmp_path, capsys):
    """Regression test: the activation ranges came from the first records, which were all in one class. With ranges
    from this class, whose images have small activations, the INT8 network classifies a third of the images
    correctly."""
    pytest.importorskip("onnxruntime")
    random, root = np.random.RandomState(0), tmp_path / "sorted"
    root.mkdir()
    for split, count in (("train", 12), ("val", 5)):
        images = []
        for label, color in enumerate([(120, 115, 105), (240, 20, 20), (240, 240, 20)]):
            for _ in range(count):
                file = io.BytesIO()
                pixels = np.clip(random.randint(-30, 31, (32, 32, 3)) + color, 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
                images.append((file.getvalue(), label))
        with SINGLE_FILE["recordio"](str(root), split) as writer:
            writer.write(images)
            writer.finish()
    flags = ["--epochs", "6", "--lr", "0.05", "--batch-size", "4"]
    assert run_train(*flags, image_root=root)[0] == 0
    command = [str(tmp_path / "output/Tiny/5"), str(tmp_path / "exported"), "--int8", "--calibrate", str(root)]
    capsys.readouterr()
    assert export.main([*command, "--calibration-images", "12", "--verify", str(root)]) == 0
    scores = re.findall(r"^(.+): top1 (.+?), .* 15 images$", capsys.readouterr().out, re.MULTILINE)
    assert dict(scores) == dict.fromkeys(("Executor", "paddle.inference", "onnxruntime"), "1")
    command[1] = str(tmp_path / "few")
    assert export.main([*command, "--calibration-images", "1", "--verify", str(root)]) == 1
    cause = "its activation ranges come from 1 of 36 training images, which contain 1 of 3 classes, and nothing was "
    assert cause in capsys.readouterr().err


def test_int8_export_with_lower_accuracy_is_not_kept(checkpoint, photos, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    score = {"correct": 1000, "images": 1000}
    sample = {"images": 8, "available": 30, "classes": 2}
    model = SimpleNamespace(engine="onnxruntime", description={"output": {"shape": [None, 3]}, "int8": {}})
    for correct in (995, 1010):
        export._check_top1(model, "int8", score | {"correct": correct}, score)
    few = {"correct": 10, "images": 23}
    export._check_top1(model, "int8", few | {"correct": 9}, few)  # one image is more than 0.5% of the images
    for images, remedy in ((8, "use more --calibration-images, or "), (30, "")):
        model.description["int8"]["calibration"] = sample | {"images": images}
        with pytest.raises(
            RunError,
            match=r"onnxruntime \(int8\) classifies 994 of 1000 images correctly, but the checkpoint's network "
            r"classifies 1000 \(tolerance 0.5% of the images\); its activation ranges come from "
            rf"{images} of 30 training images, which contain 2 of 3 classes, and nothing was written; {remedy}"
            "train with --qat$",
        ):
            export._check_top1(model, "int8", score | {"correct": 994}, score)
    real = export._score
    monkeypatch.setattr(
        export,
        "_score",
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


def run_in_float32(folder, images):
    """Return the probabilities of an exported network whose float16 variables are converted to float32, because Paddle
    has no float16 kernels on a CPU."""
    half, single = paddle.float16, paddle.float32
    program = static.deserialize_program((folder / "model.pdmodel").read_bytes())
    exe, scope = static.Executor(paddle.CPUPlace()), static.Scope()
    with static.scope_guard(scope):
        static.deserialize_persistables(program, (folder / "model.pdiparams").read_bytes(), exe)
        for variable in program.list_vars():
            if variable.name in ("feed", "fetch") or variable.dtype != half:
                continue
            variable.desc.set_dtype(single)
            if variable.persistable:
                tensor = scope.find_var(variable.name).get_tensor()
                tensor.set(np.array(tensor).astype("float32"), paddle.CPUPlace())
        for op in program.global_block().ops:
            for name in ("in_dtype", "out_dtype"):
                if op.has_attr(name) and op.attr(name) == half:
                    op._set_attr(name, single)
        return exe.run(program, feed={"images": images}, fetch_list=["probabilities"])[0]


@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile"])
@pytest.mark.parametrize("uint8", [False, True], ids=["normalized", "uint8"])
def test_float16_export(checkpoint_of, photos, tmp_path, capsys, arch, uint8):
    onnx = pytest.importorskip("onnx")
    checkpoint, folder = checkpoint_of(arch), tmp_path / "half"
    flags = ["--precision", "float16", "--onnx", *(["--uint8"] if uint8 else [])]
    assert export.main([str(checkpoint), str(folder), *flags]) == 0
    description = json.loads((folder / "model.json").read_text())
    assert description["precision"] == "float16"
    assert description["input"]["dtype"] == ("uint8" if uint8 else "float32")
    float32 = export.export(checkpoint, tmp_path / "single", uint8=uint8)
    assert float32["precision"] == "float32"
    assert description["files"]["model.pdiparams"]["size"] < 0.7 * float32["files"]["model.pdiparams"]["size"]
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    if not uint8:
        images = (images.transpose(0, 3, 1, 2) / np.float32(64) - 2).astype("float32")
    expected = inference.open_paddle(tmp_path / "single", "cpu").run(images)
    np.testing.assert_allclose(run_in_float32(folder, images), expected, atol=5e-3)
    constants = onnx.load(folder / "model.onnx").graph.initializer
    assert onnx.TensorProto.FLOAT not in {constant.data_type for constant in constants}
    model = inference.open_model(folder / "model.onnx", "cpu", precision="float16")
    assert (model.engine, model.precision) == ("onnxruntime", "float16")
    np.testing.assert_allclose(model.run(images), expected, atol=5e-3)


def test_float16_network_of_paddle_requires_a_gpu(checkpoint, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inference, "resolve_device", lambda device: "cpu")
    half = tmp_path / "half"
    assert export.main([str(checkpoint), str(half), "--precision", "float16", "--verify", str(photos)]) == 2
    problem = "--precision float16 requires a GPU, and Paddle cannot use one; remove --verify, or export on a machine"
    assert f"--verify {photos}: {problem}" in capsys.readouterr().err
    flags = ["--precision", "float16", "--int8", "--calibrate", str(photos)]
    assert export.main([str(checkpoint), str(half), *flags]) == 2
    assert "--precision float16: not supported with --int8; remove one of the flags" in capsys.readouterr().err
    assert not half.exists()
    devices = []
    with monkeypatch.context() as patch:
        patch.setattr(inference, "resolve_device", lambda device: "gpu")
        patch.setattr(export, "_verify", lambda network, folder, root, device, *_: devices.append((root, device)))
        patch.setattr(export, "_verify_recorded", lambda *arguments: None)
        assert export.main([str(checkpoint), str(half), "--precision", "float16", "--verify", str(photos)]) == 0
    assert devices == [(str(photos), "gpu")] and not (half / "model.onnx").exists()
    for flags in (["x.jpg"], ["--benchmark"], ["x.jpg", "--precision", "float32"]):
        assert predict_command.main([str(half), *flags]) == 2
        message = f"{half}: Paddle Inference runs this float16 model only on a GPU; use --device gpu, or export"
        assert message in capsys.readouterr().err


def test_tolerance_of_onnx_file_depends_on_precision(checkpoint, tmp_path, monkeypatch):
    def write(network, folder, engine=None, tolerance=export.PROBABILITY_TOLERANCE):
        calls.append((network.description["precision"], engine, tolerance))
        return {}

    calls = []
    monkeypatch.setattr(export, "_write_onnx", write)
    monkeypatch.setattr(onnx_writer, "require", lambda package: None)
    for precision in ("float32", "float16"):
        export.export(checkpoint, tmp_path / "new" / precision, onnx=True, precision=precision)
    assert calls == [("float32", None, 1e-4), ("float16", None, 0.02)]


def test_flags_that_a_network_trained_with_qat_does_not_support(trained, photos, tmp_path):
    """tests/components/test_quantization.py tests the exports that are supported for networks trained with --qat."""
    checkpoint, _ = trained("--qat")
    for options, message in (
        ({"int8": "tensorrt", "calibration": export.Calibration(photos)}, "--calibrate .*: .* already has activation"),
        (
            {"onnx": True, "precision": "float16"},
            "--precision float16: not supported with --onnx for a checkpoint trained",
        ),
        ({"safetensors": True}, "--safetensors: .* was trained with --qat, and the file cannot contain its"),
    ):
        with pytest.raises(UsageError, match=f"^{message}"):
            export.export(checkpoint, tmp_path / "exported", **options)
    export.export(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported/model.onnx").exists()


def test_float16_export_with_lower_accuracy_is_not_kept(checkpoint, photos):
    def outputs(images):
        """Return the same probabilities for each image: 0.4201, 0.4244 and 0.1555."""
        logits = np.tile([1, 1.01, 0.006], (len(images), 1))
        return [np.exp(export._log_softmax(logits)), logits]

    network = networks.load_checkpoint(checkpoint)
    for precision, ties in (("float16", 23), ("float32", 0)):
        assert export._score(network, Model("", network.description, outputs, precision), photos)["ties"] == ties
    score = {"correct": 1000, "images": 1000, "ties": 2}
    model = SimpleNamespace(engine="paddle.inference")
    export._check_top1(model, "float16", score | {"correct": 997}, score)
    message = (
        r"paddle.inference \(float16\) classifies 996 of 1000 images correctly, but the checkpoint's network "
        r"classifies 1000 \(tolerance 0.1% of the images\), and nothing was written; use --precision float32$"
    )
    with pytest.raises(RunError, match=message):
        export._check_top1(model, "float16", score | {"correct": 996}, score)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--int8"], "--int8: requires training images to determine activation ranges; add --calibrate"),
        (["--calibrate", "DATA"], "--calibrate DATA: requires --int8; add it"),
        (["--int8-engine", "tensorrt"], "--int8-engine tensorrt: requires --int8; add it"),
        (["--int8", "--calibration-images", "9"], "--calibration-images 9: requires --calibrate IMAGE_ROOT; add it"),
        (["--int8", "--calibrate", "nowhere"], "--calibrate nowhere: not a folder"),
        (
            ["--int8", "--calibrate", "tests"],
            "--calibrate tests: has no train/; put the class folders into train/",
        ),
        (["--verify", "nowhere"], "--verify nowhere: not a folder"),
        (["--temperature", "auto"], "--temperature auto: requires a data set, whose validation images determine"),
        (["--verify", "tests"], "--verify tests: has no val/; put the class folders into val/, or use"),
    ],
)
def test_unusable_flags_are_an_error(checkpoint, tmp_path, capsys, flags, message):
    assert export.main([str(checkpoint), str(tmp_path / "exported"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c", "o", "--calibration-images", "0"], "--calibration-images: 0 is too small; use a whole number from 1"),
        (
            ["c", "o", "--calibration-method", "entropy"],
            "--calibration-method: 'entropy' is not supported in version 0.2.0 or later; remove the flag",
        ),
        (["c", "o", "--int8-engine", "paddle"], "--int8-engine: invalid choice: 'paddle'"),
        (["c", "o", "--temperature", "2"], "--temperature: invalid choice: '2'"),
        (["c", "o", "--precision", "int8"], "--precision: invalid choice: 'int8'"),
        (["c", "o", "--calibrate", ""], "--calibrate: '' is an empty path"),
        (["c", "o", "--verify", ""], "--verify: '' is an empty path"),
        (["", "o"], "CHECKPOINT: '' is an empty path"),
        (["c", ""], "OUT: '' is an empty path"),
        (["c", "o", "--uint"], "--uint: unknown flag; use --uint8"),  # flags must not be abbreviated
    ],
)
def test_invalid_value_exits_with_code_2_and_an_error(capsys, arguments, message):
    assert export.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("uint8", [False, True])
def test_temperature_is_part_of_every_exported_network(trained, photos, photo_paths, tmp_path, capsys, uint8):
    pytest.importorskip("onnxruntime")
    checkpoint, expected = trained("--batch-size", "2", "--lr", "0.02")
    plain, exported = tmp_path / "plain", tmp_path / "exported"
    calibration = {"int8": "onnxruntime", "calibration": export.Calibration(photos)} if uint8 else {}
    export.export(checkpoint, plain, uint8=uint8)
    capsys.readouterr()
    flags = {"onnx": True, "verify": photos, "uint8": uint8, "temperature": "auto", "safetensors": True}
    flags |= calibration
    description = export.export(checkpoint, exported, **flags)
    fitted, out = description["temperature"], capsys.readouterr().out
    assert fitted == json.loads((exported / "model.json").read_text())["temperature"]
    assert (fitted["images"], fitted["bins"]) == (23, 15)
    assert fitted["value"] != 1 and fitted["loss_after"] < fitted["loss_before"]
    # Without the temperature, the metrics are those of the evaluation in training.
    assert fitted["loss_before"] == pytest.approx(expected["loss"], rel=1e-5)
    assert fitted["ece_before"] == pytest.approx(expected["ece"], abs=1e-6)
    assert f"ECE {fitted['ece_before']:.6f} before, {fitted['ece_after']:.6f} after (15 bins)" in out
    assert out.rstrip().endswith("confirmed")
    scores = [line for line in out.splitlines() if line.endswith("23 images") and line.count("loss") == 1]
    assert len(scores) == 3 + HAS_OPENVINO
    for line in scores:
        assert f"top1 {expected['top1']:.6g}, " in line
        tolerance = 0.05 if uint8 and line.startswith(("onnxruntime", "OpenVINO")) else 1e-4
        assert float(re.search(r"loss (\S+),", line)[1]) == pytest.approx(fitted["loss_after"], abs=tolerance)

    def predicted(path):
        model = inference.open_model(path, "cpu")
        return np.array([row for _, row, _ in image_files.predict(model, photo_paths)])

    before = predicted(plain)
    tempered = before.astype(np.float64) ** (1 / fitted["value"])
    tempered /= tempered.sum(axis=1, keepdims=True)
    after = predicted(exported)
    np.testing.assert_allclose(after, tempered, atol=1e-5)
    np.testing.assert_array_equal(after.argmax(axis=1), before.argmax(axis=1))
    np.testing.assert_allclose(predicted(exported / "model.onnx"), tempered, atol=0.1 if uint8 else 1e-5)
    tensors, network = foreign_files.read(exported / "model.safetensors"), networks.load_checkpoint(checkpoint)
    for name, parameter in conversion.parameters("Tiny", 3).items():
        factor = fitted["value"] if name.startswith("classifier.") else 1
        np.testing.assert_allclose(tensors[name] * factor, network.parameter(parameter.variable), rtol=1e-6)
    card = (exported / "README.md").read_text()
    assert "names, shapes and layout of paddle_resnet" in card
    assert f"divided by the temperature {fitted['value']:.6g}" in card


def test_export_without_a_best_temperature_is_an_error(checkpoint, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(confidence, "fit_temperature", lambda logits, labels: None)
    arguments = [str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos), "--temperature", "auto"]
    assert export.main(arguments) == 2
    assert (
        "--temperature auto: no temperature from 0.01 to 100 minimizes the loss of the 23 validation images in "
        in capsys.readouterr().err
    )
    assert not (tmp_path / "exported").exists()


def test_network_that_changes_the_output_of_its_last_layer_is_not_tempered(trained, photos, tmp_path, monkeypatch):
    """A user's network may compute its logits from the output of the layer `last`."""
    checkpoint, _ = trained("--batch-size", "2", "--lr", "0.02")
    monkeypatch.setattr(networks, "_divide_logits", lambda network, temperature: None)
    message = "--verify: the network with the temperature and the checkpoint's network disagree: .* `last`"
    with pytest.raises(RunError, match=message):
        export.export(checkpoint, tmp_path / "exported", verify=photos, temperature="auto")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["correct", "loss", "images of the recorded evaluation"])
def test_export_that_fails_verification_is_not_kept(checkpoint, photos, tmp_path, monkeypatch, name):
    """The second score that the export computes is that of Paddle Inference."""
    scores = []
    real = export._score

    def score(*args, **options):
        scores.append(real(*args, **options))
        if len(scores) == 2 and name == "correct":
            scores[-1]["correct"] -= 1 + 2 * scores[-1]["ties"]
        if len(scores) == 2 and name == "loss":
            scores[-1]["loss"] += 1.5e-4
        if name.startswith("images"):
            # Change all computed scores in the same way, so that only the recorded score differs.
            scores[-1]["correct"] -= 1 + scores[-1]["ties"]
        return scores[-1]

    monkeypatch.setattr(export, "_score", score)
    with pytest.raises(RunError, match=r"--verify: .* disagree: .* nothing was written") as e:
        export.export(checkpoint, tmp_path / "exported", verify=photos)
    assert ("its recorded evaluation" in str(e.value)) == name.startswith("images")
    assert not list(tmp_path.glob("*exported*"))
    command = [str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos)]
    scores.clear()
    assert export.main(command) == 1


RECORDED = {"top1": 0.29, "loss": 2.0, "images": 100}  # 0.29 * 100 is less than 29


@pytest.mark.parametrize(
    ("recorded", "device", "is_compared"),
    [
        (RECORDED, "cpu", True),
        (RECORDED | {"not_finite": 0}, "cpu", True),
        (None, "cpu", False),
        (RECORDED, "gpu", False),
        (RECORDED | {"not_finite": 1}, "cpu", False),
        (RECORDED | {"images": 50}, "cpu", False),
    ],
)
def test_only_a_comparable_evaluation_is_compared(capsys, recorded, device, is_compared):
    """The recorded evaluation is wrong: the exported network classifies 90 of 100 images correctly."""
    score = {"images": 100, "correct": 90, "ties": 0, "loss": 1.0, "clipped_loss": 1.0}
    meta = {"evaluated": recorded, "arguments": {"device": device, "dali_device": device}}
    network = SimpleNamespace(model=lambda logits: None, meta=meta, args=SimpleNamespace(tta="none", qat=False))
    with pytest.raises(RunError, match="its recorded evaluation disagree") if is_compared else nullcontext():
        export._verify_recorded(network, score, "photos", None)
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
    scores, opened = iter([score, score | {"loss": 2.0, "correct": correct}]), []

    def open_paddle(*arguments, **options):
        opened.append(arguments)
        return Model("paddle.inference", {}, None, precision)

    monkeypatch.setattr(inference, "open_paddle", open_paddle)
    monkeypatch.setattr(export, "_score", lambda *arguments, **_: next(scores))
    meta, args = {"evaluated": None}, SimpleNamespace(qat=qat)
    network = SimpleNamespace(model=lambda logits: Model("Executor", {}, None), meta=meta, args=args)
    with pytest.raises(RunError, match=message) if message else nullcontext():
        assert export._verify(network, tmp_path, "photos", "gpu") == score
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
        export._verify_recorded(network, score, "photos", None)


def change(checkpoint, folder, parameter=None, loss=0):
    """Copy a checkpoint, permute one parameter or change the recorded loss (relative, if it exceeds 1), and return the
    new folder."""
    evaluated, files = folders.read_meta(checkpoint)["evaluated"], {}
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
    "TTA": "--tta flip",
    "EMA": "--ema 0.9",
    "Lookahead": "--lookahead 2,0.5",
    "four channels": "--data-layout NHWC --image-shape 4,32,32",
    "preprocessing": "--interp lanczos3 --resize-short 44 --image-shape 3,32,48",
    "sizes": "--sizes 24:0,32:1 --epochs 2",
    "unused outputs": "--num-of-class 5",
    "label offset": "--label-offset 1",
}
# These cases are soak tests, because other cases contain the same flags.
REPEATED = ("QAT of 20 layers", "QAT in NHWC", "QAT with half-precision images")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in REPEATED)) for name in EVALUATED]
)
def test_verify_repeats_recorded_evaluation(one_block, run_train, photos, tmp_path, capsys, name):
    """A correct checkpoint is accepted, and the same checkpoint with a different recorded loss is rejected. With TTA, a
    changed weight is tested, too."""
    root, flags = photos, EVALUATED[name].split()
    if name == "label offset":
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
    [checkpoint] = (tmp_path / "output").glob("*/1" if name == "sizes" else "*/0")
    capsys.readouterr()

    def verify(checkpoint):
        code = export.main([str(checkpoint), str(checkpoint.parent / "exported"), "--verify", str(root)])
        return code, *capsys.readouterr()

    code, out, err = verify(change(checkpoint, tmp_path / "correct"))
    assert code == 0, err
    assert re.search("^recorded evaluation: top1 .*, loss .*, images decoded on a CPU; confirmed$", out, re.MULTILINE)
    if "QAT" not in name:
        network, recorded = networks.load_checkpoint(checkpoint), folders.read_meta(checkpoint)["evaluated"]["loss"]
        model = network.model(logits=True)
        loss, plain_loss = (export._score(network, model, root, each)["loss"] for each in (True, False))
        assert loss == pytest.approx(recorded, rel=1e-6)
        assert (plain_loss == pytest.approx(recorded, rel=5e-6)) == (name not in ("half-precision images", "TTA"))
    changes = {"loss": 3e-4}, {"loss": -3e-4}, {"parameter": "linear_0.w_0"}
    for i, wrong in enumerate(changes if name == "TTA" else changes[:1]):
        code, out, err = verify(change(checkpoint, tmp_path / str(i), **wrong))
        assert code == 1 and "the checkpoint's network and its recorded evaluation disagree: " in err


@pytest.mark.parametrize("command", [["--verify"], ["--int8", "--calibrate"]], ids=["verify", "calibrate"])
def test_file_list_may_contain_files_outside_with_flag(checkpoint, photos, tmp_path, capsys, command):
    """Regression test: the error recommended --allow-outside, which the export did not have."""
    if "--int8" in command:
        pytest.importorskip("onnxruntime")
    root = tmp_path / "lists"
    root.mkdir()
    for split in ("train", "val"):
        paths = sorted((photos / split).glob("*/*.jpg"))
        (root / f"{split}.txt").write_text("".join(f"{path} {path.parent.name[-1]}\n" for path in paths))
    arguments = [str(checkpoint), str(tmp_path / "exported"), *command, str(root)]
    assert export.main(arguments) == 2
    assert "is outside" in (error := capsys.readouterr().err) and "or add --allow-outside" in error
    assert export.main([*arguments, "--allow-outside"]) == 0


def test_network_with_one_class_is_verified(one_block, run_train, photos, tmp_path, capsys):
    """Regression test: the export ended with a ValueError, because an image had no second class."""
    for split in ("train", "val"):
        shutil.copytree(photos / split / "class0", tmp_path / "photos" / split / "class0")
    flags = ["--num-of-class", "1", "--allow-one-class"]
    assert run_train(*flags, image_root=tmp_path / "photos")[0] == 0
    capsys.readouterr()
    export.export(tmp_path / "output/Tiny/0", tmp_path / "exported", verify=tmp_path / "photos")
    assert capsys.readouterr().out.count("top1 1, loss ") == 3


@pytest.mark.parametrize("is_wrong", [False, True], ids=["correct", "wrong"])
def test_verify_compares_logits_of_network_with_saturated_probabilities(
    trained, photos, tmp_path, monkeypatch, capsys, is_wrong
):
    """Nearly all probabilities are 0 or 1."""
    onnx = importlib.util.find_spec("onnxruntime") is not None
    checkpoint, recorded = trained("--lr", "10")
    real = export._write_paddle

    def write(network, folder):
        if is_wrong:
            weights = network.scope.find_var("linear_0.w_0").get_tensor()
            weights.set(np.array(weights) * np.float32(1.01), paddle.CPUPlace())
        return real(network, folder)

    monkeypatch.setattr(export, "_write_paddle", write)
    code = export.main([str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos), *["--onnx"] * onnx])
    assert code == int(is_wrong)
    out, err = capsys.readouterr()
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in out.splitlines() if line.endswith("23 images")]
    assert losses[0] > 100 and losses[0] == pytest.approx(recorded["loss"], rel=1e-5)
    if is_wrong:
        assert "--verify: paddle.inference and the checkpoint's network disagree: " in err
    else:
        assert losses == [pytest.approx(losses[0], rel=1e-5)] * (2 + onnx)


def test_checkpoint_of_earlier_version_with_clipped_loss_is_verified(trained, photos, tmp_path):
    """Earlier versions limited the loss of an image on a CPU to about 64 and did not record the CPU."""
    checkpoint, _ = trained("--lr", "10")
    network = networks.load_checkpoint(checkpoint)
    loss, clipped_loss = (
        export._score(network, network.model(logits=True), photos)[n] for n in ("loss", "clipped_loss")
    )
    assert clipped_loss < 65 and loss > 100
    for is_earlier, code in ((True, 0), (False, 1)):
        meta = folders.read_meta(checkpoint)
        meta["evaluated"]["loss"] = clipped_loss
        if is_earlier:
            del meta["cpu"]
        root, files = tmp_path / str(is_earlier), {name: (checkpoint / name).read_bytes() for name in meta["files"]}
        writers = {name: lambda file, data=data: file.write(data) for name, data in files.items()}
        meta = {name: value for name, value in meta.items() if name not in ("format", "files", "checksum")}
        folder = folders.commit(root, "0", writers, meta)
        assert export.main([str(folder), str(root / "exported"), "--verify", str(photos)]) == code


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


def test_agreement_check_tolerates_ties_and_rounding():
    score = {"images": 100, "correct": 70, "ties": 1, "loss": 2.0}
    export._check_agreement("a", score, "b", score | {"correct": 72, "loss": 2.0001}, "use c")
    for other, counts in (({"correct": 73}, "73"), ({"loss": 2.0003}, "70"), ({"loss": float("nan")}, "70")):
        message = (
            rf"^--verify: a and b disagree: 70 and {counts} of 100 images correct \(ties allow a difference of 2\), "
            "loss 2 and "
        )
        with pytest.raises(RunError, match=message):
            export._check_agreement("a", score, "b", score | other, "use c")
    # The difference between losses below 1 is absolute.
    export._check_agreement("a", score | {"loss": 0.5}, "b", score | {"loss": 0.50009}, "use c")
    with pytest.raises(RunError, match=r"loss 0.5 and 0.50011 \(tolerance 0.0001\), and nothing was written; use c$"):
        export._check_agreement("a", score | {"loss": 0.5}, "b", score | {"loss": 0.50011}, "use c")


def test_onnx_file_with_wrong_weights_is_not_kept(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    real = onnx_writer.to_onnx
    monkeypatch.setattr(
        onnx_writer,
        "to_onnx",
        lambda program, i, o, read, *rest: real(program, i, o, lambda n: read(n) * 1.1, *rest),
    )
    with pytest.raises(RunError, match=r"model.onnx: the probabilities differ .* by up to 0\."):
        export.export(checkpoint, tmp_path / "exported", onnx=True)
    assert not list(tmp_path.glob("*exported*"))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_onnx_package_is_an_error(checkpoint, tmp_path, capsys, monkeypatch, package):
    pytest.importorskip("onnx") if package == "onnxruntime" else None
    monkeypatch.setitem(sys.modules, package, None)
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--onnx"]) == 2
    error = capsys.readouterr().err
    assert f"{package}: cannot be imported, but is required for ONNX" in error
    assert "pip install -r requirements-onnx.txt" in error
    assert not (tmp_path / "exported").exists()


def test_export_folder_contains_model_and_standalone_script(checkpoint, photos, tmp_path, monkeypatch):
    """All files are flushed to the disk before the folder appears, and the rename of the folder is flushed
    afterwards."""
    synced, fsync = [], export.files.fsync
    monkeypatch.setattr(export.files, "fsync", lambda path: synced.append(path) or fsync(path))
    export.export(checkpoint, tmp_path / "new/exported")
    (tmp_path / "new/exported").rename(tmp_path / "exported")
    files = ["README.md", "labels.txt", "model.json", "model.pdiparams", "model.pdmodel", "preprocess.py"]
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == files
    assert {path.name for path in synced} >= {*files, "exported"} and synced[-1] == tmp_path / "new"
    assert (tmp_path / "exported/labels.txt").read_text() == "class0\nclass1\nclass2\n"
    # This process records no call stacks, so also check that the file has no place for them.
    model = (tmp_path / "exported/model.pdmodel").read_bytes()
    assert b"/" + ROOT.name.encode() + b"/" not in model and b"op_callstack" not in model
    description = json.loads((tmp_path / "exported/model.json").read_text())
    assert description["preprocessing"]["conventions"] == preprocessing.CONVENTIONS
    (image, *_) = sorted((photos / "val").glob("*/*.jpg"))
    command = [sys.executable, "-I", tmp_path / "exported/preprocess.py", image]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{image}: float32 [1, 3, 32, 32], from -")
    assert description["evaluated"]["decoder"] == "cpu"
    line = f"recorded top1 {description['evaluated']['top1']:.6g}: validation images decoded on a "
    assert done.stdout.endswith(f"\n{line}CPU (pixels as computed here, within 2 levels)\n")
    description["evaluated"]["decoder"] = "gpu"
    text = preprocessing._decoder_text(description["evaluated"])
    assert text == f"{line}GPU (JPEG pixels within 6 levels of those here)\n"
    # A checkpoint without an evaluation, and an export from an earlier version.
    assert preprocessing._decoder_text(None) == preprocessing._decoder_text({"top1": 0.5}) == ""


@pytest.mark.parametrize(("change", "message"), [({}, "confirmed"), ({"paddle_version": "2.5"}, "same kind of CPU")])
def test_qat_evaluation_is_compared_only_where_rounding_is_equal(monkeypatch, capsys, change, message):
    meta = {"evaluated": RECORDED, "arguments": {"device": "cpu"}, "cpu": cpu.arithmetic()}
    meta |= {"paddle_version": paddle.__version__} | change
    score = {"images": 100, "correct": 29, "ties": 0, "loss": 2.001, "clipped_loss": 2.001}
    exact = score | {"loss": 2.0}
    monkeypatch.setattr(export, "_score", lambda *arguments, **options: exact)
    network = SimpleNamespace(model=lambda logits: None, meta=meta, args=SimpleNamespace(tta="none", qat=True))
    export._verify_recorded(network, score, "photos", lambda: network)
    assert message in capsys.readouterr().out


def test_qat_evaluation_with_missing_kernels_is_not_compared(capsys):
    def load():
        raise native.Unavailable("no compiler")

    meta = {"evaluated": RECORDED, "arguments": {"device": "cpu"}, "cpu": cpu.arithmetic()}
    network = SimpleNamespace(
        model=lambda logits: None,
        meta=meta | {"paddle_version": paddle.__version__},
        args=SimpleNamespace(tta="none", qat=True),
    )
    export._verify_recorded(network, {"images": 100}, "photos", load)
    assert "not compared, because custom kernels, which --qat requires, are missing" in capsys.readouterr().out


@pytest.mark.parametrize("uint8", [False, True], ids=["float32", "uint8"])
def test_triton_repository_layout(checkpoint, tmp_path, uint8):
    """The test only inspects the exported files and does not load them into Triton."""
    onnx = importlib.util.find_spec("onnxruntime") is not None and not uint8
    export.export(checkpoint, tmp_path / "exported", onnx=onnx, uint8=uint8, triton=True)
    root = tmp_path / "exported/triton"
    expected = ["tiny_paddle/1/model.pdiparams", "tiny_paddle/1/model.pdmodel"]
    expected += ["tiny_onnxruntime/1/model.onnx"] if onnx else []
    for path in expected:
        assert (root / path).read_bytes() == (tmp_path / "exported" / path.rpartition("/")[2]).read_bytes()
    assert sorted(path.name for path in root.iterdir()) == sorted({path.partition("/")[0] for path in expected})
    for model in root.iterdir():
        text = (model / "config.pbtxt").read_text()
        assert f'name: "{model.name}"\nbackend: "{model.name.removeprefix("tiny_")}"\n' in text
        image_type = "TYPE_UINT8 dims: [32, 32, 3]" if uint8 else "TYPE_FP32 dims: [3, 32, 32]"
        assert f'name: "images" data_type: {image_type}' in text
        assert 'name: "probabilities" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt"' in text
        assert (model / "labels.txt").exists()


def test_interrupt_exits_with_code_130_and_leaves_no_output(checkpoint, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_write_texts", interrupt)
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 130
    assert capsys.readouterr().err == "paddle_resnet.export: interrupted\n"
    assert not list(tmp_path.glob("*exported*"))


def test_partial_output_is_removed_unless_an_export_is_running(checkpoint, tmp_path):
    """The test also covers a folder whose name is not valid UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    left = folder / ".exported.partial"
    (left / "exported/model.json").mkdir(parents=True)
    lock = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", lock, left / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(UsageError, match=r"exported: in use by another process \(.*\); wait until that"):
            export.export(checkpoint, folder / "exported")
        assert (left / "exported/model.json").exists()
        other.kill()
    export.export(checkpoint, folder / "exported")
    assert [path.name for path in folder.iterdir()] == ["exported"]
    assert (folder / "exported/model.json").is_file()


def run_python_of_card(folder, image, *packages):
    """Run the code blocks of an export's model card that use none of `packages`, in the export folder."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    chosen = [block for block in blocks if not any(re.search(rf"^(import|from) {p}\b", block, re.M) for p in packages)]
    results = []
    for block in chosen:
        shutil.copy(image, folder / "image.jpg")
        code = f"{block}\nimport numpy\nnumpy.save('probabilities.npy', probabilities)\n"
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
        results.append(np.load(folder / "probabilities.npy"))
    return results


@pytest.mark.parametrize("uint8", [False, True])
def test_code_of_the_model_card_loads_each_network(checkpoint, photo_paths, tmp_path, uint8):
    pytest.importorskip("onnxruntime")
    export.export(checkpoint, tmp_path / "exported", onnx=True, uint8=uint8, safetensors=True)
    results = run_python_of_card(tmp_path / "exported", photo_paths[0], "safetensors")
    model = inference.open_paddle(tmp_path / "exported", "cpu")
    expected = model.run(preprocessing.model_input(str(photo_paths[0]), model.description))
    assert len(results) == 2
    for probabilities in results:
        np.testing.assert_allclose(np.reshape(probabilities, (1, 3)), expected, atol=1e-5)


def test_safetensors_have_the_names_of_timm_and_can_be_converted_back(once, run_train, tmp_path):
    def make(folder):
        assert run_train("--model-arch-name", "MobileNetV3_Small", "--output-dir", folder)[0] == 0

    checkpoint = once("MobileNetV3_Small_for_export", make) / "MobileNetV3_Small/0"
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--safetensors"]) == 0
    file = tmp_path / "exported/model.safetensors"
    tensors = foreign_files.read(file)
    assert tensors["blocks.5.0.conv.weight"].shape == (576, 96, 1, 1)
    source = "timm.mobilenetv3_small_100"
    sizes = {"crop_size": 32, "resize_short": 36}
    conversion.convert(file, tmp_path / "converted", "MobileNetV3_Small", sizes, source=source)
    first, second = map(networks.load_checkpoint, (checkpoint, tmp_path / "converted"))
    images = np.random.RandomState(0).uniform(-2, 2, (2, 3, 32, 32)).astype("float32")
    np.testing.assert_allclose(second.model().run(images), first.model().run(images), atol=1e-6)
    card = (tmp_path / "exported/README.md").read_text()
    assert 'timm.create_model("mobilenetv3_small_100", num_classes=3)' in card
    assert "library_name: timm" in card
    description = json.loads((tmp_path / "exported/model.json").read_text())
    assert description["files"]["model.safetensors"]["size"] == file.stat().st_size
    # Neither the precision nor the type of the input changes the file.
    export.export(checkpoint, tmp_path / "half", precision="float16", uint8=True, safetensors=True)
    assert (tmp_path / "half/model.safetensors").read_bytes() == file.read_bytes()


def test_broken_openvino_is_an_error(checkpoint, photos, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/openvino.py").write_text("raise OSError('libopenvino.so: not found')\n")
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    with pytest.raises(UsageError, match=r"OpenVINO \(libopenvino.so: not found\); install a"):
        export.export(checkpoint, tmp_path / "exported", onnx=True, verify=photos)
    assert not (tmp_path / "exported").exists()


def test_class_names_may_contain_any_bytes(checkpoint, tmp_path):
    classes = ["a\nb", os.fsdecode(b"\xff"), "ä"]
    export.export(with_meta(checkpoint, tmp_path, class_names=classes), tmp_path / "exported")
    assert (tmp_path / "exported/labels.txt").read_text().splitlines() == ["a\\nb", "\\udcff", "ä"]
    assert inference.open_paddle(tmp_path / "exported", "cpu").description["classes"] == classes


def test_export_keeps_weights_sparse(trained, tmp_path):
    checkpoint, _ = trained(*FLAGS["ASP"])
    params = pickle.loads((checkpoint / "tiny.pdparams").read_bytes())
    assert_sparse(params)
    export.export(checkpoint, tmp_path / "exported")
    with static.scope_guard(static.Scope()):
        program, _, _ = static.load_inference_model(
            str(tmp_path / "exported/model"), static.Executor(paddle.CPUPlace())
        )
        arrays = {
            p.name: np.array(static.global_scope().find_var(p.name).get_tensor())
            for p in program.list_vars()
            if p.persistable and p.name not in ("feed", "fetch")
        }
    assert not [name for name in arrays if "mask" in name or "velocity" in name]
    for name in params:
        if f"{name}.asp_mask" in params:
            np.testing.assert_array_equal(arrays[name], params[name])
            if arrays[name].shape[1] >= 4:
                assert_two_of_four(arrays[name])


def test_unusable_checkpoint_or_output_path_is_an_error(trained, photos, tmp_path):
    checkpoint, _ = trained("--save-interval-steps", "2", "--keep-checkpoints", "9")
    with pytest.raises(UsageError, match="nowhere: not a folder; choose the folder of a run"):
        export.export(tmp_path / "nowhere", tmp_path / "exported")
    with pytest.raises(UsageError, match=f"OUT {checkpoint}/x: would change CHECKPOINT {checkpoint}; choose a path"):
        export.export(checkpoint, checkpoint / "x")
    for options in ({"verify": photos}, {"calibration": export.Calibration(photos)}):
        with pytest.raises(UsageError, match=f"OUT {photos}/x: would change the data set {photos}; choose a path"):
            export.export(checkpoint, photos / "x", **options)
    # The folder 7 is reserved for the checkpoint of a later epoch.
    with pytest.raises(UsageError, match="/Tiny/7 is reserved for a checkpoint; choose a path outside it"):
        export.export(checkpoint, checkpoint.with_name("7"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "link").symlink_to("missing")
    for name in ("taken", "link"):
        with pytest.raises(UsageError, match=f"{name}: already exists"):
            export.export(checkpoint, tmp_path / name)
    (tmp_path / "file").write_text("")
    for name in ("file/exported", "x" * 300):
        with pytest.raises(UsageError, match="cannot be written"):
            export.export(checkpoint, tmp_path / name)
    with open(checkpoint / "tiny.pdparams", "r+b") as f:
        f.write(b"damage")
    with pytest.raises(UsageError, match=r"Tiny/0: unusable \(tiny.pdparams.* sha256"):
        export.export(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_command_prints_summary_and_rejects_existing_output(trained, tmp_path, capsys):
    checkpoint, _ = trained()
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 0
    assert "exported: Tiny, 3 classes, images [None, 3, 32, 32]" in capsys.readouterr().out
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 2
    assert "exported: already exists; remove the folder or choose a different one" in capsys.readouterr().err
    assert export.main([str(tmp_path / "exported"), str(checkpoint)]) == 2  # wrong order
    assert f"OUT {checkpoint}: already exists; choose a different folder\n" in capsys.readouterr().err


def test_full_disk_exits_with_code_2_and_leaves_no_output(checkpoint, tmp_path, capsys):
    """RLIMIT_FSIZE limits the file size, so writes fail as on a full disk."""
    export.export(checkpoint, tmp_path / "whole")
    sizes = [(tmp_path / "whole" / f"model.{ending}").stat().st_size for ending in ("pdmodel", "pdiparams")]
    assert sizes[0] < sizes[1]
    (tmp_path / "exported.partial").mkdir()  # an unrelated folder with a similar name must be kept
    for limit in (sizes[0] - 1, sizes[1] - 1):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            code = export.main([str(checkpoint), str(tmp_path / "exported")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error = capsys.readouterr().err
        assert code == 2, error
        assert "exported: cannot be written (File too large); free disk space" in error
        assert "Traceback" not in error
        assert sorted(p.name for p in tmp_path.glob("*export*")) == ["exported.partial"]
