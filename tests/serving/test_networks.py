"""Inference networks of checkpoints. tests/test_export.py and tests/test_predict.py compare them with evaluations."""

import pickle
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet import export, models
from paddle_resnet.checkpoints import restore
from paddle_resnet.serving import inference, networks
from paddle_resnet.settings import parsing
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


@pytest.fixture
def loaded(monkeypatch):
    """Replace the steps of load_checkpoint and load_fast, and return (list of their calls, flags of the checkpoint)."""

    def step(name, is_rewrite=False):
        def call(*arguments, **options):
            if is_rewrite:
                assert static.global_scope() is scope
                assert name == "fold_batch_norms" or static.default_main_program() is program
            assert (name == "add_copy") == loss_head.is_active
            calls.append((name, arguments, options))
            return results.get(name)

        return call

    @contextmanager
    def float32_scope():
        loss_head.is_active = True
        yield
        loss_head.is_active = False

    args = parsing.from_dict({"num_of_class": 3, "image_shape": [3, 32, 32]})
    program, scope = static.Program(), static.Scope()
    network = SimpleNamespace(args=args, program=program, scope=scope, exe="exe", outputs=["p"], description={})
    calls, results = [], {"_recorded": ("folder", "meta", args), "_load": network}
    for name in ("_recorded", "_load", "_cast"):
        monkeypatch.setattr(networks, name, step(name))
    for name in ("fuse_stem", "replace_convolutions", "fuse_convolutions", "fold_batch_norms"):
        monkeypatch.setattr(networks.folding, name, step(name, is_rewrite=True))
    monkeypatch.setattr(networks.host_metrics, "add_copy", step("add_copy", is_rewrite=True))
    monkeypatch.setattr(networks.quantization, "insert", step("insert", is_rewrite=True))
    loss_head = SimpleNamespace(scope=float32_scope, is_active=False)
    monkeypatch.setattr(networks, "loss_head", loss_head)
    monkeypatch.setattr(networks.native, "load", step("native"))
    monkeypatch.setattr(networks.processes, "local_gpu", lambda: 3)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", {3: (9, 0)}.get)
    return calls, network


@pytest.mark.parametrize(
    ("changes", "is_averaged"),
    [
        ({}, False),
        ({"world_size": 1}, True),
        ({"step": None}, True),
        ({"trained": {}}, True),
        ({"evaluated": {}}, True),
        ({"bn_averaged": True}, True),
        ({"bn_averaged": False}, False),
    ],
)
def test_bn_statistics_of_a_checkpoint_must_be_averaged(monkeypatch, tmp_path, changes, is_averaged):
    meta = {"epoch": 2, "step": 5, "trained": None, "evaluated": None, "world_size": 2} | changes
    monkeypatch.setattr(networks.folders, "is_checkpoint", lambda folder: True)
    monkeypatch.setattr(networks.folders, "is_foreign", lambda folder: False)
    monkeypatch.setattr(networks.folders, "verify", lambda folder: meta)
    message = f"^{tmp_path}: saved after 5 steps of epoch 2, before the processes averaged their BN statistics; choose"
    with nullcontext() if is_averaged else pytest.raises(UsageError, match=message):
        assert networks._read_meta(tmp_path) is meta


@pytest.mark.parametrize("tta", ["none", "flip"])
def test_description_of_a_network(tta):
    flags = {"resize_short": 40, "interp": "cubic", "normalize_scale": 1, "normalize_mean": [0], "normalize_std": [1]}
    flags |= {"model_arch_name": "a/net.py:Net", "num_of_class": 5, "data_layout": "NCHW", "dali_device": "gpu"}
    args = SimpleNamespace(tta=tta, part=lambda cls: cls(), **flags)
    results = {"top1": 0.5, "top5": 0.75, "loss": 1.5}
    meta = {"epoch": 3, "classes": ["n01"], "class_names": ["tench"], "evaluated": results | {"images": 9}}
    for crop, recorded in (([32, 32], 32), ([32, 48], [32, 48])):
        args.image_shape = [4, *crop]
        images = SimpleNamespace(name="x", shape=[-1, 3, *crop], dtype="float32")
        description = networks._describe(args, meta, images, SimpleNamespace(name="y"))
        assert description["arch"] == "Net" and description["classes"] == ["tench"] and description["epoch"] == 3
        expected = results | {"decoder": "gpu"} | ({"tta": "flip"} if tta == "flip" else {})
        assert description["evaluated"] == expected
        assert description["input"]["shape"] == [None, 3, *crop] and description["input"]["layout"] == "NCHW"
        assert description["output"] == {"name": "y", "shape": [None, 5], "values": "probabilities"}
        assert description["preprocessing"]["center_crop"] == recorded
    del meta["class_names"]
    assert networks._describe(args, meta | {"evaluated": None}, images, images)["classes"] == ["n01"]


def test_network_does_not_depend_on_execution_flags_of_training(checkpoint, monkeypatch):
    recorded, images = restore.recorded_flags, np.random.rand(2, 3, 32, 32).astype("float32")

    def of_gpu(*arguments):
        flags = recorded(*arguments)
        flags.set("test", amp=True, kernels="native", data_layout="NHWC", dali_output_fp16=True)
        flags.set("test", resume=True, profile_steps=(0, 1), device="gpu")
        return flags

    expected = networks.load_checkpoint(checkpoint)
    monkeypatch.setattr(restore, "recorded_flags", of_gpu)
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


def test_network_is_cast_in_its_scope(monkeypatch):
    def cast(*arguments):
        assert static.global_scope() is network.scope and static.default_main_program() is network.program
        calls.append(arguments)

    network = SimpleNamespace(program=static.Program(), scope=static.Scope(), args=SimpleNamespace(device="d"))
    calls = []
    monkeypatch.setattr(networks.processes, "place", lambda device: f"place of {device}")
    monkeypatch.setattr(networks.quantization, "float32_variables", {network.program: {"a"}}.get)
    monkeypatch.setattr(networks.precision, "cast_evaluation_program", cast)
    networks._cast(network, "bfloat16", "O1")
    networks._cast(network, "float16", "O2", for_gpu=True)
    assert calls == [
        (network.program, "place of d", "bfloat16", "O1", {"a"}, False),
        (network.program, "place of d", "float16", "O2", {"a"}, True),
    ]


@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_steps_of_load_checkpoint(loaded, fold, precision, qat):
    """A network trained with --qat is quantized after BN has been folded."""
    calls, network = loaded
    network.args.set("test", qat=qat, amp=True, kernels="native", data_layout="NHWC", dali_output_fp16=True)
    assert networks.load_checkpoint("path", "gpu", True, "net.py:Net", fold, precision) is network
    args = network.args
    assert (args.amp, args.kernels, args.data_layout, args.dali_output_fp16) == (False, "paddle", "NCHW", False)
    assert network.description == {"precision": precision}
    expected = [
        ("_recorded", ("path", "gpu", "net.py:Net"), {}),
        ("_load", (args, "meta", "folder", 3), {"uint8": True, "quantize": qat and not fold, "features": False}),
    ]
    if fold:
        expected += [("fold_batch_norms", (network.program, "exe", 1), {})]
        expected += [("insert", (network.program,), {})] if qat else []
    if precision == "float16":
        expected += [("_cast", (network, "float16", "O2"), {"for_gpu": True})]
    assert calls == expected


@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize(
    ("precision", "device", "tta"),
    [("float32", "cpu", "none"), ("float32", "gpu", "flip"), ("float16", "gpu", "none"), ("bfloat16", "gpu", "none")],
)
def test_steps_of_load_fast(loaded, precision, device, tta, qat):
    calls, network = loaded
    network.args.set("test", qat=qat, amp=precision == "float32", amp_level="O1")
    assert networks.load_fast("path", precision, device, "net.py:Net", tta) is network
    args, is_half = network.args, precision != "float32"
    assert (args.kernels, args.data_layout, args.cuda_graph) == ("native", "NHWC", device == "gpu")
    assert (args.amp, args.dali_output_fp16) == (is_half, precision == "float16")
    expected = [
        ("_recorded", ("path", device, "net.py:Net"), {}),
        ("native", ((9, 0) if device == "gpu" else None,), {}),
        ("_load", (args, "meta", "folder", 4), {"quantize": qat, "mirror": tta == "flip", "features": False}),
        *([("_cast", (network, precision, "O2"), {})] if is_half else []),
        ("fuse_stem", (network.program,), {}),
    ]
    if precision == "float32":
        expected += [("replace_convolutions", (network.program, "exe"), {})]
    elif precision == "float16" and not qat:
        expected += [("fuse_convolutions", (network.program, "exe"), {})]
    assert calls == [*expected, ("add_copy", (["p"],), {})]


@pytest.mark.parametrize(
    ("layout", "channels", "options"),
    [
        *(("NCHW", 3, {}), ("NCHW", 4, {}), ("NHWC", 3, {}), ("NHWC", 4, {}), ("NCHW", 3, {"uint8": True})),
        *(("NHWC", 3, {"mirror": True}), ("NHWC", 4, {"mirror": True})),
    ],
)
def test_images_are_normalized_mirrored_and_get_a_fourth_channel(monkeypatch, layout, channels, options):
    """The replaced network returns the values of its input as logits."""
    calls, axis = [], 1 if layout == "NCHW" else 3

    def logits(model, images, arch, classes):
        calls.append((model, arch, classes))
        return paddle.reshape(images, [-1, 2 * 5 * channels])

    mean, std = [0.5, 0.4, 0.3], [0.5, 0.25, 1]
    flags = {"image_shape": [channels, 2, 5], "data_layout": layout, "num_of_class": 10 * channels}
    normalization = {"normalize_scale": 0.01, "normalize_mean": np.array(mean), "normalize_std": np.array(std)}
    args = parsing.from_dict(flags)
    args.set("test", **normalization)
    model = SimpleNamespace(eval=lambda: calls.append("eval"))
    monkeypatch.setattr(networks, "build_model", lambda *arguments: calls.append(arguments) or model)
    monkeypatch.setattr(networks, "network_logits", logits)
    program, _, images, probabilities, *_ = networks._build(args, **options)
    assert calls == [("ResNet50", 10 * channels, channels, layout), "eval", (model, "ResNet50", 10 * channels)]
    assert (images.name, probabilities.name) == ("images", "probabilities")
    shape = (4, 3, 2, 5) if layout == "NCHW" and not options else (4, 2, 5, 3)
    assert images.shape == (-1, *shape[1:])
    values = np.random.default_rng(0).random(shape, np.float32)
    versions = [values]
    if "uint8" in options:
        values = np.round(255 * values).astype(np.uint8)
        versions = [((values * 0.01 - mean) / std).transpose(0, 3, 1, 2)]
    elif "mirror" in options:
        versions.append(np.flip(values, 2))
    [actual] = static.Executor().run(program, {"images": values}, [probabilities])
    padding = [(0, channels - 3) if i == axis else (0, 0) for i in range(4)]
    expected = 0
    for version in versions:
        exponentials = np.exp(np.pad(version, padding).reshape(4, -1))
        expected += exponentials / exponentials.sum(1, keepdims=True) / len(versions)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
