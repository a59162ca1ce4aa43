"""Exports whose probabilities are calibrated (--temperature)."""

import importlib.util
import json
import re

import numpy as np
import pytest

from paddle_resnet import export
from paddle_resnet.checkpoints import conversion, foreign_files
from paddle_resnet.serving import (
    image_files,
    inference,
    networks,
)
from paddle_resnet.utils import confidence
from paddle_resnet.utils.errors import RunError, UsageError

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("uint8", [False, pytest.param(True, marks=pytest.mark.soak)])
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
    check_tensors(exported / "model.safetensors", checkpoint, fitted["value"])
    card = (exported / "README.md").read_text()
    assert "names, shapes and layout of paddle_resnet" in card
    assert f"divided by the temperature {fitted['value']:.6g}" in card


@pytest.mark.parametrize("flags", [["--tta", "flip"], ["--qat"]], ids=lambda flags: flags[0])
def test_recorded_evaluation_is_repeated_without_the_temperature(trained, photos, tmp_path, capsys, flags):
    """With these flags, a program other than that of the export repeats the evaluation. The images are outside the
    folder of the data set."""
    checkpoint, _ = trained("--batch-size", "2", "--lr", "0.02", *flags)
    has_tensors, root = "--qat" not in flags, file_lists(photos, tmp_path / "lists")
    options = {"temperature": "auto", "verify": root, "uint8": True, "safetensors": has_tensors, "allow_outside": True}
    description = export.export(checkpoint, tmp_path / "exported", **options)
    assert description["input"]["dtype"] == "uint8" and description["temperature"]["value"] != 1
    assert capsys.readouterr().out.rstrip().endswith("confirmed")
    if not has_tensors:
        with pytest.raises(UsageError, match="was trained with --qat, and the file cannot contain its quantization"):
            export.export(checkpoint, tmp_path / "again", safetensors=True)
    else:
        check_tensors(tmp_path / "exported/model.safetensors", checkpoint, description["temperature"]["value"])


def check_tensors(path, checkpoint, temperature):
    """Only the parameters of the last layer are divided by the temperature."""
    tensors, network = foreign_files.read(path), networks.load_checkpoint(checkpoint)
    for name, parameter in conversion.parameters("Tiny", 3).items():
        factor = temperature if name.startswith("classifier.") else 1
        np.testing.assert_allclose(tensors[name] * factor, network.parameter(parameter.variable), rtol=1e-6)


def file_lists(photos, root):
    """Write file lists of images outside the folder `root`, and return the folder."""
    root.mkdir()
    for split in ("train", "val"):
        paths = sorted((photos / split).glob("*/*.jpg"))
        (root / f"{split}.txt").write_text("".join(f"{path} {path.parent.name[-1]}\n" for path in paths))
    return root


def test_temperature_divides_the_logits_of_the_int8_network(trained, photos, tmp_path, capsys):
    """The images are those of file lists outside the folder of the lists, so each reader needs --allow-outside."""
    pytest.importorskip("onnxruntime")
    root = file_lists(photos, tmp_path / "lists")
    checkpoint, _ = trained("--batch-size", "2", "--lr", "0.02")
    flags = ["--int8", "--calibrate", str(root), "--allow-outside", "--calibration-images", "29"]
    flags += ["--int8-engine", "tensorrt"]
    assert export.main([str(checkpoint), str(tmp_path / "plain"), *flags]) == 0
    flags += ["--verify", str(root), "--temperature", "auto"]
    assert export.main([str(checkpoint), str(tmp_path / "tempered"), *flags]) == 0
    description = inference.open_onnx(tmp_path / "tempered/model.onnx", "cpu").description
    images = {"images": 29, "available": 30, "classes": 3}
    assert description["int8"] == {"engine": "tensorrt", "weight_bits": 8, "calibration": images}
    assert "ONNX (`model.onnx` in INT8 for tensorrt)" in (tmp_path / "plain/README.md").read_text()
    out, err = capsys.readouterr()
    assert "in INT8 as in float32" not in out + err  # the speed would be that of onnxruntime
    assert re.search(r"^onnxruntime: top1 .*, 23 images$", out, re.MULTILINE)
    value = description["temperature"]["value"]
    images = np.random.default_rng(0).uniform(-2, 2, (8, 3, 32, 32)).astype("float32")
    plain, tempered = (
        inference.open_onnx(tmp_path / name / "model.onnx", "cpu", logits=True).outputs(images)[1]
        for name in ("plain", "tempered")
    )
    assert abs(value - 1) > 0.1
    np.testing.assert_allclose(tempered * value, plain, rtol=0, atol=0.03 * np.abs(plain).max())


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
