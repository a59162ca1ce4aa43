"""Inference networks of checkpoints. tests/test_export.py and tests/test_predict.py compare them with evaluations."""

import pickle
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import METRICS, with_meta, write_checkpoint
from paddle_resnet import export, models
from paddle_resnet.serving import inference, networks
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.mark.parametrize(
    ("changes", "is_averaged"),
    [
        ({}, False),
        ({"world_size": 1}, True),
        ({"step": None}, True),
        ({"trained": METRICS}, True),
        ({"evaluated": METRICS}, True),
        ({"bn_averaged": True}, True),
        ({"bn_averaged": False}, False),
    ],
)
def test_bn_statistics_of_a_checkpoint_must_be_averaged(tmp_path, changes, is_averaged):
    meta = {"epoch": 2, "step": 5, "trained": None, "evaluated": None, "world_size": 2} | changes
    ranks = [{"loader": {"step": 5, "conditions": {}}, "meters": {}}] * meta["world_size"]
    folder = write_checkpoint(tmp_path, "2_5", ranks=ranks, steps_each_epoch=9, **meta)
    message = f"^{folder}: saved after 5 steps of epoch 2, before the processes averaged their BN statistics; choose"
    with nullcontext() if is_averaged else pytest.raises(UsageError, match=message):
        assert networks._read_meta(folder).items() >= meta.items()


@pytest.mark.parametrize("tta", ["none", "flip"])
def test_description_of_a_network(tta):
    flags = {"resize_short": 40, "interp": "cubic", "normalize_scale": 1, "normalize_mean": [0], "normalize_std": [1]}
    flags |= {"model_arch_name": "a/net.py:Net", "num_of_class": 5, "data_layout": "NCHW", "dali_device": "gpu"}
    results = {"top1": 0.0, "top5": 0.75, "map": 0.5, "map_micro": 0.25, "loss": 1.5}
    meta = {"epoch": 3, "classes": ["n01"], "class_names": ["tench"], "evaluated": results | {"images": 9}}
    for crop, recorded in (([32, 32], 32), ([32, 48], [32, 48])):
        options = networks.Options(tta=tta, image_shape=[4, *crop], device="cpu", dali_output_fp16=False, **flags)
        images = SimpleNamespace(name="x", shape=[-1, 3, *crop], dtype="float32")
        description = networks._describe(options, meta, images, SimpleNamespace(name="y"))
        assert description["arch"] == "Net" and description["classes"] == ["tench"] and description["epoch"] == 3
        expected = results | {"decoder": "gpu"} | ({"tta": "flip"} if tta == "flip" else {})
        assert description["evaluated"] == expected
        assert description["input"]["shape"] == [None, 3, *crop] and description["input"]["layout"] == "NCHW"
        assert description["output"] == {"name": "y", "shape": [None, 5], "values": "probabilities"}
        assert description["preprocessing"]["center_crop"] == recorded
    options = replace(options, dali_device="auto")  # checkpoints of earlier versions
    assert "decoder" not in networks._describe(options, meta, images, images)["evaluated"]
    del meta["class_names"]
    assert networks._describe(options, meta | {"evaluated": None}, images, images)["classes"] == ["n01"]


def test_network_does_not_depend_on_execution_flags_of_training(checkpoint, tmp_path):
    images = np.random.rand(2, 3, 32, 32).astype("float32")
    flags = {"amp": True, "kernels": "native", "data_layout": "NHWC", "dali_output_fp16": True}
    flags |= {"resume": True, "profile_steps": [0, 1], "device": "gpu"}
    expected = networks.load_checkpoint(checkpoint)
    checkpoint = with_meta(checkpoint, tmp_path / "of_gpu", flags)
    network = networks.load_checkpoint(checkpoint)
    assert network.description == expected.description
    args = network.args
    assert (args.resume, args.profile_steps, args.device) == (False, None, "cpu")
    with pytest.raises(UsageError, match=f"{checkpoint}: does not match the model"):
        networks.load_checkpoint(checkpoint, model_arch_name="ResNet18")
    model = network.model()
    assert (model.engine, model.description, model.precision) == ("Executor", network.description, "float32")
    np.testing.assert_array_equal(model.run(images), expected.model().run(images))
    probabilities, logits = network.model(logits=True).outputs(images)
    np.testing.assert_array_equal(probabilities, model.run(images))
    np.testing.assert_allclose(probabilities, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), rtol=1e-4)
    assert len(model.outputs(images)) == 1
    folder, meta, args = networks._recorded(checkpoint, "cpu", None)
    args.set("test", amp=False, kernels="paddle", data_layout="NCHW", dali_output_fp16=False)
    four = networks._load(args, meta, folder, 4)  # the weights of the fourth channel are zero
    assert args.image_shape == [4, 32, 32] and four.images.shape == (-1, 3, 32, 32)
    np.testing.assert_allclose(four.model().run(images), model.run(images), rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_an_error(checkpoint, tmp_path, monkeypatch, value):
    """train.py does not save such parameters, but NVIDIA's example does."""
    (checkpoint / "meta.json").unlink()
    path = checkpoint / "tiny.pdparams"
    state = pickle.loads(path.read_bytes())
    state["batch_norm_0.w_2"][0] = value
    path.write_bytes(pickle.dumps(state, 4))
    monkeypatch.setattr(networks, "MODELS", {"Tiny": models.MODELS["Tiny"]})
    with pytest.raises(
        UsageError, match=r"checkpoint: batch_norm_0.w_2 has values that are not finite; choose a differ"
    ):
        export.export(checkpoint, tmp_path / "exported")


def test_checkpoint_of_nvidia_example_may_have_four_channels_and_masks(checkpoint, monkeypatch):
    """The name of the folder contains the epoch. The example resizes images with a different filter."""
    (checkpoint / "meta.json").unlink()
    checkpoint = checkpoint.rename(checkpoint.with_name("89"))
    path = checkpoint / "tiny.pdparams"
    state = pickle.loads(path.read_bytes())
    state["conv2d_0.w_0"] = np.pad(state["conv2d_0.w_0"], [(0, 0), (0, 1), (0, 0), (0, 0)])
    state["linear_0.w_0.asp_mask"] = np.ones_like(state["linear_0.w_0"])
    path.write_bytes(pickle.dumps(state, 4))
    monkeypatch.setattr(networks, "MODELS", {"Tiny": models.MODELS["Tiny"]})
    description = networks.load_checkpoint(checkpoint).description
    assert (description["arch"], description["epoch"]) == ("Tiny", 89)
    assert description["preprocessing"]["interp"] == "triangular"


@pytest.mark.slow
def test_checkpoint_of_nvidia_example_is_exported(checkpoint, tmp_path, capsys, monkeypatch):
    """The checkpoint contains no meta.json, and the argument of the command is the run folder instead of the checkpoint
    folder."""
    export.export(checkpoint, tmp_path / "own")
    (checkpoint / "meta.json").unlink()
    for end in ("pdparams", "pdopt"):
        (checkpoint / f"tiny.{end}").rename(checkpoint / f"resnet_50_paddle.{end}")
    path = checkpoint / "resnet_50_paddle.pdparams"
    state = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(state | {"linear_0.w_0.asp_mask": np.ones_like(state["linear_0.w_0"])}, 4))
    (tmp_path / "run").mkdir()
    checkpoint = checkpoint.rename(tmp_path / "run/89")
    monkeypatch.setattr(networks, "MODELS", {name: models.MODELS[name] for name in ("ResNet18", "Tiny")})
    capsys.readouterr()
    description = export.export(tmp_path / "run", tmp_path / "exported")
    stderr = capsys.readouterr().err
    assert f"{tmp_path}/run: using the checkpoint {checkpoint}" in stderr
    message = "contains no meta.json, so the network (Tiny) is inferred from the parameters, the preprocessing"
    assert f"warning: {checkpoint}: {message}" in stderr
    assert description["input"]["shape"] == [None, 3, 224, 224] and description["output"]["shape"] == [None, 3]
    assert (description["classes"], description["epoch"], description["evaluated"]) == ([], 89, None)
    preprocessing_flags = description["preprocessing"]
    assert (preprocessing_flags["resize_short"], preprocessing_flags["center_crop"], preprocessing_flags["interp"]) == (
        256,
        224,
        "triangular",
    )
    monkeypatch.chdir(checkpoint)
    assert networks.load_checkpoint(".").description["epoch"] == 89
    parameters = [(tmp_path / name / "model.pdiparams").read_bytes() for name in ("own", "exported")]
    assert parameters[0] == parameters[1]
    images = np.zeros((1, 3, 224, 224), np.float32)
    assert inference.open_model(tmp_path / "run", "cpu").run(images).shape == (1, 3)
    monkeypatch.setattr(networks, "MODELS", {})
    with pytest.raises(UsageError, match=r"no meta.json, and its parameters match no supported network"):
        export.export(checkpoint, tmp_path / "none")
    with pytest.raises(UsageError, match="own: contains neither meta.json nor parameters; choose the folder of a run"):
        export.export(tmp_path / "own", tmp_path / "none")
    monkeypatch.setattr(networks, "MODELS", {"Tiny": models.MODELS["Tiny"]})
    path = checkpoint / "resnet_50_paddle.pdparams"
    for name, shape in (
        ("conv2d_0.w_0", ()),
        ("conv2d_0.w_0", (16, 2, 3, 3)),
        ("linear_0.b_0", ()),
        ("linear_0.b_0", (0,)),
        ("conv2d_0.w_0", None),
        ("linear_0.b_0", None),
    ):
        changed = {key: array for key, array in state.items() if key != name}
        changed |= {} if shape is None else {name: np.zeros(shape, np.float32)}
        path.write_bytes(pickle.dumps(changed, 4))
        with pytest.raises(UsageError, match=r"no meta.json, and its parameters match no supported network"):
            networks.load_checkpoint(checkpoint)
