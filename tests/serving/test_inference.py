"""Opening models, with fake engines. tests/test_predict.py and tests/test_export.py open real models."""

import hashlib
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.native import build as native
from paddle_resnet.serving import inference, networks
from paddle_resnet.serving.model import Model
from paddle_resnet.utils.errors import UsageError

PREPROCESSING = {"resize_short": 2, "center_crop": [1, 2], "interp": "cubic", "scale": 1, "mean": [0] * 3}
DESCRIPTION = {
    "input": {"name": "images", "dtype": "float32", "layout": "NCHW", "shape": [None, 3, 1, 2]},
    "output": {"name": "probabilities", "shape": [None, 3]},
    "preprocessing": PREPROCESSING | {"std": [1, 1, 1]},
    "classes": [],
}


def probabilities(images):
    """Return three of the values of each image."""
    return [images.reshape(len(images), -1)[:, :3]]


def raise_error(message):
    raise RuntimeError(message)


def test_checkpoint_on_a_gpu_runs_in_captured_steps(monkeypatch):
    calls, network = [], SimpleNamespace(description=DESCRIPTION)
    monkeypatch.setattr(networks, "load_fast", lambda *arguments: calls.append(arguments) or network)
    steps = SimpleNamespace(outputs=len)
    monkeypatch.setattr(inference, "Steps", lambda *arguments: calls.append(arguments) or steps)
    monkeypatch.setattr(inference, "resolve_precision", lambda *arguments: calls.append(arguments) or "float16")
    model = inference.open_checkpoint("m", "gpu", "net", None, (4, 2), "flip")
    assert calls == [(None, "gpu"), ("m", "float16", "gpu", "net", "flip", False), (network, (4, 2))]
    assert (model.engine, model.description, model.precision, model.steps) == (
        *("captured step", DESCRIPTION, "float16", steps),
    )
    assert model.outputs([1, 2]) == 2


@pytest.mark.parametrize(("layout", "axis"), [("NCHW", 3), ("NHWC", 2)])
def test_mirrored_images_are_averaged(layout, axis):
    images = np.random.default_rng(0).random((2, 3, 4, 5), np.float32)
    description = DESCRIPTION | {"input": {"layout": layout}}
    model = inference._mirrored(Model("", description, probabilities), "flip")
    [expected], [mirrored] = probabilities(images), probabilities(np.flip(images, axis))
    np.testing.assert_array_equal(model.run(images), (expected + mirrored) / 2)
    model = Model("", description, probabilities)
    assert inference._mirrored(model, "none") is model


def test_checkpoint_on_a_cpu_runs_in_onnxruntime_if_possible(monkeypatch, capsys):
    def to_onnx(*arguments):
        raise UsageError("operator x")

    network = networks.Network(SimpleNamespace(qat=True), {}, None, "x", "y", None, {"a": 1})
    calls, opened = [], []
    monkeypatch.setattr(inference.onnx_writer, "require", lambda package: None)
    monkeypatch.setattr(inference.onnx_writer, "to_onnx", to_onnx)
    monkeypatch.setattr(networks, "load_checkpoint", lambda *path, **options: calls.append((*path, options)) or network)
    reason = ", because folding the BN of a network trained with --qat changes its probabilities"
    assert inference._open_as_onnx("m", "net", False) == (None, reason)
    assert calls == [("m", {"model_arch_name": "net", "fold": True, "features": False})]
    network.args.qat = False
    assert inference._open_as_onnx("m", "net", False) == (None, ": operator x")
    message = SimpleNamespace(SerializeToString=lambda: b"data")
    monkeypatch.setattr(inference.onnx_writer, "to_onnx", lambda *arguments: opened.append(arguments) or message)
    monkeypatch.setattr(inference, "load_onnx", lambda *arguments: opened.append(arguments) or "onnx model")
    assert inference.open_checkpoint("m", "cpu", "net") == "onnx model"
    assert opened == [(None, ["x"], ["y"], network.parameter, '{"a": 1}', None), (b"data", "m", "cpu")]
    monkeypatch.setattr(inference.onnx_writer, "to_onnx", to_onnx)
    del calls[2:]
    network.model = lambda: "model"
    assert inference.open_checkpoint("m", "cpu", "net", engine="Paddle") == "model"
    assert calls[2:] == [("m", "cpu", {"model_arch_name": "net", "features": False})]
    assert capsys.readouterr().err == ""
    assert inference.open_checkpoint("m", "cpu", "net") == "model"
    assert calls[3:] == [calls[0], calls[2]]
    assert capsys.readouterr().err == "onnxruntime: not used: operator x\n"


@pytest.mark.parametrize(
    ("files", "is_error"),
    [
        (None, False),
        ({}, False),
        ({"model.onnx": {}}, False),
        ({"model.onnx": {"size": 4, "sha256": hashlib.sha256(b"data").hexdigest()}}, False),
        ({"other.onnx": {"size": 4, "sha256": "0"}}, False),
        ({"model.onnx": {"size": 4, "sha256": "0"}}, True),
        ("no description", False),
    ],
)
def test_sha256_of_onnx_file_is_compared_if_it_is_listed(tmp_path, files, is_error):
    path = tmp_path / "model.onnx"
    (tmp_path / "model.json").write_text(
        files if isinstance(files, str) else json.dumps(DESCRIPTION | {"files": files})
    )
    message = rf"^{path}: damaged \(it does not match its sha256 in model.json\); export it again$"
    with pytest.raises(UsageError, match=message) if is_error else nullcontext():
        inference._check_onnx(b"data", path)


FILE = {"size": 1, "sha256": "0"}


@pytest.mark.parametrize("entry", [{}, {"size": 1}, {"sha256": "0"}])
@pytest.mark.parametrize("name", ["model.pdmodel", "model.pdiparams"])
def test_export_must_list_both_files_of_paddle_inference(tmp_path, name, entry):
    files = {"model.pdmodel": FILE, "model.pdiparams": FILE, name: entry}
    (tmp_path / "model.json").write_text(json.dumps(DESCRIPTION | {"files": files, "precision": "float16"}))
    with pytest.raises(UsageError, match=r"model.json: `files` lacks the size or sha256 of model.\*; export it again$"):
        inference.open_paddle(tmp_path, "gpu")
    with pytest.raises(UsageError, match=f"^{tmp_path}: Paddle Inference runs this float16 model only on a GPU; use"):
        inference.open_paddle(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("dtype", "layout", "size"),
    [("float16", "NHWC", [6, 4]), ("float32", "NCHW", [6, 4]), ("uint8", "NHWC", [5, 5])],
)
def test_flags_of_the_loader(dtype, layout, size):
    """The loader returns pixels for a network that normalizes them."""
    shape = [None, 3, *size] if layout == "NCHW" else [None, *size, 3]
    recorded = {"resize_short": 8, "interp": "cubic", "scale": 0.5, "mean": [1, 2, 3], "std": [4, 5, 6]}
    description = {
        "input": {"dtype": dtype, "layout": layout, "shape": shape},
        "preprocessing": recorded | {"center_crop": 5 if size == [5, 5] else size},
    }
    args = inference.loader_args(description, 5, threads=3)
    assert (args.dali_output_fp16, args.data_layout, args.image_shape) == (dtype == "float16", layout, [3, *size])
    assert (args.batch_size, args.dali_num_threads, args.device) == (5, 3, "cpu")
    assert (args.crop_size, args.resize_short, args.interp) == (min(size), 8, "cubic")
    normalization = (args.normalize_scale, list(args.normalize_mean), list(args.normalize_std))
    assert normalization == ((1, [0] * 3, [1] * 3) if dtype == "uint8" else (0.5, [1, 2, 3], [4, 5, 6]))
    assert inference.loader_args(description, 5).dali_num_threads == 4


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("cpu", [("disable_gpu",), ("enable_memory_optim",)]),
        ("gpu", [("enable_use_gpu", 100, 3)]),
    ],
)
def test_export_is_opened_with_paddle_inference(monkeypatch, environment, tmp_path, device, calls):
    """The fake predictor returns a second output with the values of the first one plus 1."""
    made, files = [], {}

    class Settings:
        def __getattr__(self, name):
            return lambda *arguments: made.append((name, *arguments))

    class Predictor(SimpleNamespace):
        def get_input_handle(self, name):
            return SimpleNamespace(
                copy_from_cpu=lambda images: made.append((name, images.flags["C_CONTIGUOUS"], images))
            )

        def run(self):
            [self.result] = probabilities(made[-1][2])

        def get_output_names(self):
            return ["a", "b"]

        def get_output_handle(self, name):
            return SimpleNamespace(copy_to_cpu=lambda: self.result + (name == "b"))

    for name, data in (("model.pdmodel", b"program"), ("model.pdiparams", b"values")):
        (tmp_path / name).write_bytes(data)
        files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    description = DESCRIPTION | {"files": files, "precision": "float16" if device == "gpu" else "float32"}
    (tmp_path / "model.json").write_text(json.dumps(description))
    environment(FLAGS_selected_gpus=3)
    monkeypatch.setattr(inference.os, "sched_getaffinity", lambda process: {1, 4, 5})
    monkeypatch.setattr(paddle.inference, "Config", Settings)
    monkeypatch.setattr(paddle.inference, "create_predictor", lambda settings: Predictor())
    monkeypatch.setattr(inference, "_with_logits", lambda program: program + b" with logits")
    model = inference.open_paddle(tmp_path, device)
    assert made[:-1] == [
        ("set_model_buffer", b"program", 7, b"values", 6),
        ("disable_glog_info",),
        ("set_cpu_math_library_num_threads", 3),
        *calls,
    ]
    assert (model.engine, model.description, model.precision) == (
        *("paddle.inference", description, description["precision"]),
    )
    images = np.random.default_rng(0).random((2, 3, 2, 1), np.float32).transpose(0, 1, 3, 2)
    first, second = model.outputs(images)
    assert made[-1][:2] == ("images", True)
    np.testing.assert_array_equal(first, *probabilities(images))
    np.testing.assert_array_equal(second, first + 1)
    made.clear()
    inference.open_paddle(tmp_path, device, logits=True)
    assert made[0] == ("set_model_buffer", b"program with logits", 19, b"values", 6)
    (tmp_path / "model.pdiparams").write_bytes(b"valuez")
    with pytest.raises(UsageError, match=rf"^{tmp_path}: unusable \(.*model.pdiparams.*sha256.*; export it again$"):
        inference.open_paddle(tmp_path, device)


def test_logits_are_added_to_an_exported_program():
    program = static.Program()
    with static.program_guard(program, static.Program()):
        images = static.data("images", [None, 4])
        logits = 2 * paddle.nn.functional.softmax(images)
        serialized = static.serialize_program([images], [paddle.nn.functional.softmax(logits)])
    with_logits = static.deserialize_program(inference._with_logits(serialized)).global_block()
    [first, second] = [op for op in with_logits.ops if op.type == "fetch"]
    [_, softmax] = [op for op in with_logits.ops if op.type == "softmax"]
    assert second.input("X") == softmax.input("X") and second.output("Out") == first.output("Out")
    assert (first.attr("col"), second.attr("col")) == (0, 1)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NCHW"), ("uint8", "NHWC")])
def test_model_without_captured_steps(dtype, layout):
    description = DESCRIPTION | {"input": {"dtype": dtype, "layout": layout, "shape": [None, 3, 1, 2]}}
    model = Model("", description, probabilities)
    memory = model.host_images(2)
    assert (memory.shape, memory.dtype) == ((2, 3, 1, 2), dtype)
    values = np.arange(12, dtype="float64").reshape(2, 3, 1, 2)
    batch = SimpleNamespace(as_cpu=lambda: SimpleNamespace(as_tensor=lambda: values))
    for images in (values, batch):
        [result] = model.submit(images)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, *probabilities(values))


@pytest.fixture
def runtime(monkeypatch):
    """Replace onnxruntime by a namespace with the functions that load_onnx calls, in which the content of a file is the
    description of the network. Its list `available` contains the available providers, and the arguments of each session
    are added to its list `opened`."""

    class Options(dict):
        add_session_config_entry = dict.__setitem__

    class Session:
        def __init__(self, data, options, providers):
            opened.append((dict(options), providers))
            self._text = data.decode()

        def get_modelmeta(self):
            metadata = {inference.onnx_writer.METADATA: self._text} if self._text else {}
            return SimpleNamespace(custom_metadata_map=metadata)

        def run(self, names, inputs):
            assert names is None
            return probabilities(inputs["images"])

    opened, runtime = [], SimpleNamespace(SessionOptions=Options, InferenceSession=Session)
    runtime.opened, runtime.available = opened, ["CPUExecutionProvider", "CUDAExecutionProvider", "Other"]
    runtime.get_available_providers = lambda: runtime.available
    monkeypatch.setattr(inference.onnx_writer, "require", {"onnxruntime": runtime}.__getitem__)
    return runtime


@pytest.mark.parametrize(
    ("changes", "precision", "options"),
    [
        ({}, "float32", [{}]),
        ({"precision": "float16"}, "float16", [{}]),
        ({"int8": {"weight_bits": 7}}, "int8", [{}]),
        ({"int8": None}, "int8", [{}]),
        ({"int8": {"weight_bits": 8}}, "int8", [{}, {"session.x64quantprecision": "1"}]),
    ],
)
def test_session_of_onnxruntime(runtime, changes, precision, options):
    for device, providers in (
        ("cpu", ["CPUExecutionProvider"]),
        ("gpu", ["CUDAExecutionProvider", "CPUExecutionProvider"]),
    ):
        model = inference.load_onnx(json.dumps(DESCRIPTION | changes).encode(), "x.onnx", device)
        assert (model.engine, model.precision) == ("onnxruntime", precision)
        images = np.random.default_rng(0).random((2, 3, 1, 2), np.float32)
        np.testing.assert_array_equal(model.run(images), *probabilities(images))
        assert runtime.opened == [(option, providers) for option in options]
        runtime.opened.clear()


def test_onnx_file_without_description_is_an_error(runtime):
    with pytest.raises(
        UsageError, match=r"^x.onnx: not a valid description of a network \(Expecting value: .*; export"
    ):
        inference.load_onnx(b"", "x.onnx", "cpu")


def test_session_without_gpu_uses_the_cpu(runtime):
    runtime.available.remove("CUDAExecutionProvider")
    inference.load_onnx(json.dumps(DESCRIPTION).encode(), "x.onnx", "gpu")
    assert runtime.opened == [({}, ["CPUExecutionProvider"])]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            lambda images: [images],
            r"^x: the network's output has shape \[1, 3, 1, 2\] instead of \[1, 4\]; export it ag",
        ),
        (
            lambda images: 1 / 0,
            r"^x: the network does not match its description \(division by zero\); export it again$",
        ),
        (
            lambda images: raise_error("C++ Traceback\n  InvalidArgumentError: too small.\n  [Hint: x]"),
            r"^x: the network does not match its description \(InvalidArgumentError: too small\); export it again$",
        ),
    ],
)
def test_network_that_does_not_match_its_description_is_an_error(outputs, message):
    pixels = DESCRIPTION["input"] | {"dtype": "uint8"}
    model = Model(
        "", DESCRIPTION | {"input": pixels}, lambda images: probabilities(images) * (images.dtype == np.uint8)
    )
    assert inference._checked_model(model, "x") is model
    with pytest.raises(UsageError, match=message):
        inference._checked_model(Model("", DESCRIPTION | {"output": {"shape": [None, 4]}}, outputs), "x")


@pytest.mark.parametrize(
    ("precision", "is_valid"), [("float32", True), ("float16", True), ("int8", False), (None, False)]
)
def test_precision_of_description(precision, is_valid):
    text = json.dumps(DESCRIPTION | {"precision": precision})
    if is_valid:
        assert inference._checked_description(text, "x")["precision"] == precision
    else:
        with pytest.raises(UsageError, match=r"^x: not a valid description of a network \(precision is '?(int8|None)"):
            inference._checked_description(text, "x")
    assert inference._checked_description(json.dumps(DESCRIPTION), "x") == DESCRIPTION


@pytest.mark.parametrize(
    ("capability", "default", "bfloat16"),
    [((6, 1), "float32", False), ((7, 0), "float16", False), ((8, 0), "float16", True)],
)
def test_precision_depends_on_compute_capability(capability, default, bfloat16):
    assert inference.precision_of_gpu(None, capability) == default
    assert inference.precision_of_gpu("float32", capability) == "float32"
    assert inference.precision_of_gpu("float16", capability) == "float16"
    problem = "requires compute capability 8.0, but this GPU has {}.{}; use --precision float16".format(*capability)
    with nullcontext() if bfloat16 else pytest.raises(UsageError, match=f"^--precision bfloat16: {problem}$"):
        assert inference.precision_of_gpu("bfloat16", capability) == "bfloat16"


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("float16", "--precision float16: requires a GPU; use --precision float32"),
        ("bfloat16", "--precision bfloat16: requires a GPU; use --precision float32"),
        ("int8", "--precision int8: not supported with a checkpoint; export it with --int8"),
    ],
)
def test_precision_that_a_checkpoint_does_not_support_on_a_cpu_is_an_error(precision, message):
    with pytest.raises(UsageError, match=message):
        inference.resolve_precision(precision, "cpu")


def test_missing_kernels_never_change_an_explicit_precision(checkpoint, monkeypatch, capsys):
    def unavailable(*arguments):
        raise native.Unavailable("no compiler")

    reference = networks.load_checkpoint(checkpoint)
    monkeypatch.setattr(inference, "resolve_precision", lambda precision, device: precision or "float16")
    monkeypatch.setattr(networks, "load_fast", unavailable)
    monkeypatch.setattr(networks, "load_checkpoint", lambda *arguments, **options: reference)
    with pytest.raises(UsageError, match=r"--precision bfloat16: custom kernels are unavailable \(no compiler\); fix"):
        inference.open_checkpoint(checkpoint, "gpu", precision="bfloat16")
    for precision in ("float32", None):
        model = inference.open_checkpoint(checkpoint, "gpu", precision=precision)
        assert (model.engine, model.precision) == ("Executor", "float32")
    warning = "warning: custom kernels are unavailable (no compiler), so the model runs in float32 with Paddle's"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_missing_onnx_package_is_replaced_by_the_executor(checkpoint, uninstalled, capsys, name):
    if name == "onnxruntime":
        pytest.importorskip("onnx")
    uninstalled(name)
    model = inference.open_checkpoint(checkpoint, "cpu")
    assert (model.engine, model.precision) == ("Executor", "float32")
    assert (
        f"onnxruntime: not used, although onnxruntime is faster than Paddle on a CPU: {name}: cannot be imported"
        in capsys.readouterr().err
    )
