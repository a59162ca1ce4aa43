"""ONNX files in INT8."""

import io
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from helpers import training_images
from paddle_resnet import export
from paddle_resnet.components import quantization
from paddle_resnet.data.formats import SINGLE_FILE
from paddle_resnet.serving import calibration, inference, int8_onnx, networks


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "engine"),
    [
        *(("Tiny", "tensorrt"), ("TinyMobile", "onnxruntime")),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("Tiny", "onnxruntime"), ("TinyMobile", "tensorrt"))
        ),
    ],
)
def test_int8_network_is_quantized_for_its_engine(checkpoint_of, photos, tmp_path, capsys, arch, engine):
    """All inputs of convolutions, residual additions and the classifier are quantized. BN is folded into the
    convolutions. onnxruntime computes all convolutions in INT8; before version 1.23, it computed convolutions with
    float32 biases in float32."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
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
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        onnxruntime.InferenceSession(tmp_path / "exported/model.onnx", options, providers=["CPUExecutionProvider"])
        optimized = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
        assert optimized.count("QLinearConv") == kinds.count("Conv") > 0 and "Conv" not in optimized


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
def test_int8_network_matches_fake_quantized_program(checkpoint_of, photos, tmp_path, engine):
    """A different rounding of sums may change an activation by one quantization level."""
    pytest.importorskip("onnxruntime")
    network = networks.load_checkpoint(checkpoint_of("Tiny"), fold=True)
    images = np.concatenate(training_images(network.description, photos, 30))
    expected = network.model(logits=True).outputs(images)[1]
    int8_onnx.write(network, tmp_path, engine, export.Calibration(photos))
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
    int8_onnx.write(network, tmp_path, "onnxruntime", export.Calibration(photos))
    expected, actual = (
        model.outputs(images)[1]
        for model in (network.model(logits=True), inference.open_onnx(tmp_path / "model.onnx", "cpu", logits=True))
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_speed_of_int8_is_measured(checkpoint, photos, tmp_path, monkeypatch, capsys):
    """onnxruntime runs the INT8 model and the same network in float32."""
    onnxruntime = pytest.importorskip("onnxruntime")

    def measure(model, reference):
        images = np.concatenate(training_images(model.description, photos, 30))
        expected, actual = reference.run(images), model.run(images)
        assert (model.precision, reference.precision) == ("int8", "float32")
        assert 0 < np.abs(actual - expected).max() < 0.05
        return ratio

    network = networks.load_checkpoint(checkpoint, fold=True)
    monkeypatch.setattr(int8_onnx, "_speed_ratio", measure)
    ratio = 2.34
    int8_onnx.write(network, tmp_path, "onnxruntime", export.Calibration(photos))
    text = "model.onnx: {} times as many images/s in INT8 as in float32 (onnxruntime {}, this CPU, batches of 8)"
    out, err = capsys.readouterr()
    assert f"{text.format(ratio, onnxruntime.__version__)}\n" in out and err == ""
    ratio = 0.36
    instead = "use --onnx instead of --int8 and the calibration flags"
    for is_qat, remedy in ((False, instead), (True, "train without --qat")):
        network.args.set("test", qat=is_qat)
        int8_onnx._report_speed(network, tmp_path)
        log = text.format(ratio, onnxruntime.__version__)
        assert capsys.readouterr().err == f"warning: {log}; for speed, {remedy}\n"


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

    monkeypatch.setattr(int8_onnx, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(int8_onnx, "SPEED_S", 0.5)
    assert int8_onnx._speed_ratio(model("int8", 9, 0.25, 7), model("float32", 8, 5, 1, 9)) == pytest.approx(4)
    assert calls == ["int8", "float32"] * 4  # at least four runs
    calls.clear()
    assert int8_onnx._speed_ratio(model("int8", 1 / 64), model("float32", 3 / 64)) == pytest.approx(3)
    assert calls == ["int8", "float32"] * 8  # at least half a second


@pytest.mark.slow
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
