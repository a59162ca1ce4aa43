"""The files of an export."""

import importlib.util
import json
import os
import pickle

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import assert_sparse, assert_two_of_four
from helpers import with_meta
from paddle_resnet import export
from paddle_resnet.checkpoints import conversion, foreign_files
from paddle_resnet.serving import (
    inference,
    networks,
    onnx_writer,
)
from paddle_resnet.utils.errors import RunError


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "uint8"),
    [
        *(("Tiny", True), ("TinyMobile", False)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("Tiny", False), ("TinyMobile", True))),
    ],
)
def test_float16_export(checkpoint_of, photos, tmp_path, capsys, arch, uint8):
    onnx = pytest.importorskip("onnx")
    checkpoint, folder = checkpoint_of(arch), tmp_path / "half"
    flags = ["--precision", "float16", "--onnx", "--safetensors", *(["--uint8"] if uint8 else [])]
    assert export.main([str(checkpoint), str(folder), *flags]) == 0
    description = json.loads((folder / "model.json").read_text())
    assert description["precision"] == "float16"
    assert description["input"]["dtype"] == ("uint8" if uint8 else "float32")
    float32 = export.export(checkpoint, tmp_path / "single", uint8=uint8, safetensors=True)
    files = [tmp_path / name / "model.safetensors" for name in ("half", "single")]
    assert files[0].read_bytes() == files[1].read_bytes()  # the precision does not change this file
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


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", "0.0001"), ("float16", "0.02")])
def test_onnx_file_with_wrong_weights_is_not_kept(checkpoint, tmp_path, monkeypatch, precision, tolerance):
    pytest.importorskip("onnxruntime")
    real = onnx_writer.to_onnx
    monkeypatch.setattr(
        onnx_writer,
        "to_onnx",
        lambda program, i, o, read, *rest: real(program, i, o, lambda n: read(n) * 2, *rest),
    )
    with pytest.raises(RunError, match=rf"model.onnx: .* differ .* by up to 0\..* \(tolerance {tolerance}\)"):
        export.export(checkpoint, tmp_path / "exported", onnx=True, precision=precision)
    assert not list(tmp_path.glob("*exported*"))


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


@pytest.mark.slow
def test_safetensors_have_the_names_of_timm_and_can_be_converted_back(checkpoint_of, tmp_path):
    """PPLCNet has the fewest layers of the networks in timm."""
    checkpoint = checkpoint_of("PPLCNet_x1_0")
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--safetensors"]) == 0
    file = tmp_path / "exported/model.safetensors"
    tensors = foreign_files.read(file)
    assert tensors["blocks.5.1.conv_pw.weight"].shape == (512, 512, 1, 1)
    sizes = {"crop_size": 32, "resize_short": 36}
    conversion.convert(file, tmp_path / "converted", "PPLCNet_x1_0", sizes)
    first, second = map(networks.load_checkpoint, (checkpoint, tmp_path / "converted"))
    images = np.random.RandomState(0).uniform(-2, 2, (2, 3, 32, 32)).astype("float32")
    np.testing.assert_allclose(second.model().run(images), first.model().run(images), atol=1e-6)
    card = (tmp_path / "exported/README.md").read_text()
    assert 'timm.create_model("lcnet_100", num_classes=3)' in card
    assert "library_name: timm" in card
    description = json.loads((tmp_path / "exported/model.json").read_text())
    assert description["files"]["model.safetensors"]["size"] == file.stat().st_size


def test_class_names_may_contain_any_bytes(checkpoint, tmp_path):
    classes = ["a\nb", os.fsdecode(b"\xff"), "ä"]
    export.export(with_meta(checkpoint, tmp_path, class_names=classes), tmp_path / "exported")
    assert (tmp_path / "exported/labels.txt").read_text().splitlines() == ["a\\nb", "\\udcff", "ä"]
    assert inference.open_paddle(tmp_path / "exported", "cpu").description["classes"] == classes


def test_export_keeps_weights_sparse(trained, tmp_path):
    checkpoint, _ = trained("--asp", "--prune-model")
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
