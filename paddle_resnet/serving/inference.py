"""Open checkpoints, exports and ONNX files as models with a common interface.

Images and probabilities are NumPy arrays. The input format is defined by the model's `description`, the content of
model.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import static

from paddle_resnet import graph, resolution
from paddle_resnet.checkpoints import contents
from paddle_resnet.job import processes
from paddle_resnet.machine import gpus
from paddle_resnet.native import build as native
from paddle_resnet.serving import networks, onnx_writer, preprocessing
from paddle_resnet.serving.fixed_sizes import Steps
from paddle_resnet.serving.model import Model
from paddle_resnet.settings import parsing
from paddle_resnet.utils import errors, files, numbers
from paddle_resnet.utils.checks import is_number, is_table, is_text
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddle_resnet.settings.values import Settings

NAME = "model"  # file name without suffix: model.pdmodel, model.pdiparams, model.json, model.onnx
SUFFIXES = ("pdmodel", "pdiparams")  # files of Paddle Inference
# Values of the arguments of open_model.
DEVICES, PRECISIONS = ("cpu", "gpu"), ("float32", "float16", "bfloat16", "int8")
AUGMENTATIONS = ("none", "flip")
MAX_ONNX_BYTES = 2**31  # maximum size of a protobuf message


def open_model(
    path: str | Path,
    device: str,
    model_arch_name: str | None = None,
    precision: str | None = None,
    sizes: Iterable[int] = (32,),
    tta: str = "none",
    features: bool = False,
) -> Model:
    """Open a checkpoint folder, a run folder, an export folder or an ONNX file as a Model.

    Args:
        path: the folder or ONNX file.
        device: "cpu" or "gpu".
        model_arch_name: see networks.load_checkpoint.
        precision: "float32", "float16", "bfloat16" or "int8". If `precision` is None, a checkpoint runs in float16 on
            a GPU with compute capability 7.0 or higher if custom kernels are available, and otherwise in float32; an
            export runs in the precision in which it was exported.
        sizes: see fixed_sizes.Steps; used for checkpoints on a GPU.
        tta: "none", or "flip" to average the probabilities of each image and its mirror image.
        features: whether the model also returns the input of the last layer (see model.Model.outputs); only for a
            checkpoint, and not with tta "flip".
    Raises:
        UsageError: the path does not contain a network; a file is damaged; the required engine is not installed; the
            device, precision or tta is not supported; the path is an export, and `features` is set; or
            networks.load_checkpoint fails.
    """
    known = {"device": DEVICES, "precision": PRECISIONS, "tta": AUGMENTATIONS}
    for name, value in {"device": device, "precision": precision or PRECISIONS[0], "tta": tta}.items():
        if value not in known[name]:
            values = f"{', '.join(known[name][:-1])} or {known[name][-1]}"
            raise UsageError(f"{name} {value!r}: unknown value; use {values}")
    device = resolve_device(device)
    return _mirrored(_open(Path(path), device, model_arch_name, precision, sizes, tta, features), tta)


def _mirrored(model, tta):
    """Return a model that averages the probabilities of each image and its mirror image if `tta` is "flip". If the
    model already computes this average, return the model unchanged."""
    if tta == "none" or model.steps:
        return model
    axis = 3 if model.description["input"]["layout"] == "NCHW" else 2

    def outputs(images):
        return [(model.run(images) + model.run(np.ascontiguousarray(np.flip(images, axis)))) / 2]

    return dataclasses.replace(model, outputs=outputs)


def _open(path, device, model_arch_name, precision, sizes, tta, features):
    if is_export(path):
        if features:
            raise UsageError(f"{path}: exported networks do not return features; use the checkpoint")
        if model_arch_name is not None:
            raise UsageError(
                f"--model-arch-name {model_arch_name}: not supported with the export {path}; remove the flag"
            )
        model = (open_onnx if path.suffix == ".onnx" else open_paddle)(path, device)
        if precision not in (None, model.precision):
            remedy = "" if precision == "bfloat16" else f", or export the checkpoint in {precision}"
            raise UsageError(
                f"--precision {precision}: {path} was exported in {model.precision}; remove the flag{remedy}"
            )
        return model
    if path.is_dir():
        return open_checkpoint(path, device, model_arch_name, precision, sizes, tta, features=features)
    problem = "neither a folder nor an ONNX file" if os.path.lexists(path) else "does not exist"
    raise UsageError(f"{path}: {problem}; choose the folder of a checkpoint or export, or an ONNX file")


def is_export(path: Path) -> bool:
    """Return whether a path is an ONNX file or an export folder."""
    return path.suffix == ".onnx" or os.path.lexists(path / f"{NAME}.json")


def open_checkpoint(
    path: str | Path,
    device: str,
    model_arch_name: str | None = None,
    precision: str | None = None,
    sizes: Iterable[int] = (32,),
    tta: str = "none",
    engine: str = "fastest",
    features: bool = False,
) -> Model:
    """Open a checkpoint as a Model. On a GPU, the model runs in captured steps with custom kernels if these are
    available. On a CPU, the model runs in onnxruntime if the packages onnx and onnxruntime are installed and the
    network can be converted, because onnxruntime was 3.7 to 9.6 times as fast as the Executor
    (benchmarks/log/prediction_2cpu.md). If neither captured steps nor onnxruntime can be used, the model runs in the
    Executor, and a logged line states why (on a CPU only if `engine` is "fastest").

    Args:
        path: folder of a checkpoint or a run.
        device, model_arch_name, precision, sizes, tta: see open_model.
        engine: "fastest", or "Paddle" to exclude onnxruntime on a CPU.
        features: see open_model.
    Raises:
        UsageError: see open_model.
    """
    requested, precision = precision, resolve_precision(precision, device)
    reason = None
    if device == "gpu":
        try:
            network = networks.load_fast(path, precision, device, model_arch_name, tta, features)
        except native.Unavailable as e:
            problem = f"custom kernels are unavailable ({e})"
            if requested not in (None, "float32"):
                raise UsageError(
                    f"--precision {requested}: {problem}; fix this problem, or use --precision float32"
                ) from e
            networks.log(
                f"warning: {problem}, so the model runs in float32 with Paddle's slower kernels; fix the problem"
            )
        else:
            steps = Steps(network, sizes)
            return Model("captured step", network.description, steps.outputs, precision, steps)
    elif engine == "fastest":
        model, reason = _open_as_onnx(path, model_arch_name, features)
        if model is not None:
            return model
    model = networks.load_checkpoint(path, device, model_arch_name=model_arch_name, features=features).model()
    if reason is not None:
        networks.log(f"onnxruntime: not used{reason}")
    return model


def _open_as_onnx(path, model_arch_name, features):
    """Convert a checkpoint to ONNX in memory, and open it with onnxruntime. Return (Model, None) or, if the conversion
    is impossible or a package is missing, (None, end of the log line that states the reason).

    Raises:
        UsageError: see networks.load_checkpoint.
    """
    try:
        for package in ("onnx", "onnxruntime"):
            onnx_writer.require(package)
    except UsageError as e:
        return None, f", although onnxruntime is faster than Paddle on a CPU: {e}"
    network = networks.load_checkpoint(path, model_arch_name=model_arch_name, fold=True, features=features)
    if network.args.qat:
        return None, ", because folding the BN of a network trained with --qat changes its probabilities"
    try:
        data = network.to_onnx().SerializeToString()
    except UsageError as e:
        problem, _, _ = str(e).partition("; ")  # the remedy is for exports
        return None, f": {problem}"
    return load_onnx(data, path, "cpu"), None


def resolve_precision(precision: str | None, device: str) -> str:
    """Return the precision in which a checkpoint runs on a device. For `precision`, see open_model.

    Raises:
        UsageError: the device does not support the precision, or the precision is "int8".
    """
    if precision == "int8":
        raise UsageError(
            "--precision int8: not supported with a checkpoint; export it with --int8, and use the exported model.onnx"
        )
    if device == "cpu":
        if precision in ("float16", "bfloat16"):
            raise UsageError(f"--precision {precision}: requires a GPU; use --precision float32")
        return "float32"
    return precision_of_gpu(precision, paddle.device.cuda.get_device_capability(processes.local_gpu()))


def precision_of_gpu(precision: str | None, capability: tuple[int, int]) -> str:
    """Return the precision in which a checkpoint runs on a GPU with this compute capability. For `precision`, see
    open_model. Raises UsageError if the GPU does not support the precision."""
    major, minor = capability
    if precision == "bfloat16" and major < 8:
        raise UsageError(
            f"--precision bfloat16: requires compute capability 8.0, but this GPU has {major}.{minor}; use --precision "
            "float16"
        )
    return precision or ("float16" if major >= 7 else "float32")


def _precision(description):
    return description.get("precision", "float32")  # exports from earlier versions are in float32


def open_paddle(folder: str | Path, device: str, logits: bool = False) -> Model:
    """Open the network in an export folder with Paddle Inference. For exceptions, see open_model."""
    from paddle import inference

    description = _read_description(folder)
    precision = _precision(description)
    if precision == "float16" and device == "cpu":
        raise UsageError(
            f"{folder}: Paddle Inference runs this float16 model only on a GPU; use --device gpu, or export the "
            "checkpoint in float32"
        )
    paths = [Path(folder) / f"{NAME}.{suffix}" for suffix in SUFFIXES]
    if not is_table(description.get("files"), **{path.name: _is_file for path in paths}):
        raise UsageError(f"{folder}/{NAME}.json: `files` lacks the size or sha256 of {NAME}.*; export it again")
    # The files are read in Python, because Paddle cannot open paths that are not valid UTF-8. The sizes and hashes of
    # the files are checked, because Paddle 2.6.2 crashes (segmentation fault) if model.pdmodel is not a program.
    entries = description["files"]
    try:
        program, parameters = (contents.read_file(path, entries[path.name], f"{NAME}.json") for path in paths)
    except contents.DamagedError as e:
        raise UsageError(f"{folder}: unusable ({e}); export it again") from e
    program = _with_logits(program) if logits else program
    settings = inference.Config()
    settings.set_model_buffer(program, len(program), parameters, len(parameters))
    settings.disable_glog_info()
    settings.set_cpu_math_library_num_threads(len(os.sched_getaffinity(0)))
    if device == "gpu":
        settings.enable_use_gpu(100, processes.local_gpu())
    else:
        settings.disable_gpu()
        # On a GPU, memory optimization does not change the latency (benchmarks/log/prediction_h200.md).
        settings.enable_memory_optim()
    try:
        predictor = inference.create_predictor(settings)
    except (RuntimeError, ValueError) as e:
        reason = str(e).strip().splitlines()[-1]
        raise UsageError(f"{folder}: cannot be opened by Paddle Inference ({reason}); export it again") from e

    def outputs(images):
        predictor.get_input_handle(description["input"]["name"]).copy_from_cpu(np.ascontiguousarray(images))
        predictor.run()
        return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]

    return _checked_model(Model("paddle.inference", description, outputs, precision), folder)


def _with_logits(serialized):
    """Add the input of the last softmax or sigmoid as a second output to an exported, serialized program. Return the
    serialized result."""
    program = static.deserialize_program(serialized)
    block = graph.block(program)
    [*_, logits] = [op.input("X")[0] for op in block.ops if op.type in ("softmax", "sigmoid")]
    [fetched] = [op.output("Out") for op in block.ops if op.type == "fetch"]
    block.append_op(type="fetch", inputs={"X": [logits]}, outputs={"Out": fetched}, attrs={"col": 1})
    return graph.serialize(program)


def open_onnx(path: str | Path, device: str, logits: bool = False) -> Model:
    """Open an exported ONNX file with onnxruntime. For exceptions, see open_model."""
    onnx_writer.require("onnxruntime")
    try:
        with files.open_regular(path, MAX_ONNX_BYTES) as file:
            data = file.read()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an exported ONNX file") from e
    _check_onnx(data, Path(path))
    return load_onnx(onnx_writer.with_logits(data) if logits else data, path, device)


def _check_onnx(data, path):
    """Raise UsageError if model.json in the same folder lists the ONNX file with a different sha256, because
    onnxruntime does not detect damaged weights."""
    try:
        entries = _read_description(path.parent).get("files")
    except UsageError:  # the metadata of the ONNX file contains the description
        return
    if is_table(entries, **{path.name: _is_file}) and hashlib.sha256(data).hexdigest() != entries[path.name]["sha256"]:
        raise UsageError(f"{path}: damaged (it does not match its sha256 in {NAME}.json); export it again")


def load_onnx(data: bytes, path: str | Path, device: str) -> Model:
    """Open a serialized ONNX model. `path` is the name in messages. If `device` is "gpu" but onnxruntime has no CUDA
    support, the model runs on the CPU. For exceptions, see open_model."""
    onnxruntime = onnx_writer.require("onnxruntime")
    preferred = ["CUDAExecutionProvider"] * (device == "gpu") + ["CPUExecutionProvider"]
    providers = [name for name in preferred if name in onnxruntime.get_available_providers()]

    def open_session(**config):
        options = onnxruntime.SessionOptions()
        for key, value in config.items():
            options.add_session_config_entry(f"session.{key}", value)
        return onnxruntime.InferenceSession(data, options, providers=providers)

    try:
        session = open_session()
        text = session.get_modelmeta().custom_metadata_map.get(onnx_writer.METADATA, "")
    except Exception as e:  # the errors of onnxruntime have no common base class
        reason = str(e).strip().splitlines()[-1]
        raise UsageError(f"{path}: cannot be opened by onnxruntime ({reason}); export it again") from e
    description = _checked_description(text, path)
    if is_table(description.get("int8"), weight_bits=lambda bits: bits == 8):
        # x64quantprecision prevents the overflows that 8-bit weights can cause on x86 CPUs that lack VNNI instructions.
        session = open_session(x64quantprecision="1")
    name = description["input"]["name"]
    precision = "int8" if "int8" in description else _precision(description)
    model = Model("onnxruntime", description, lambda images: session.run(None, {name: images}), precision)
    return _checked_model(model, path)


def open_openvino(path: Path, model: Model) -> Model:
    """Open an exported ONNX file with OpenVINO on the CPU, in float32 or INT8. The Model returns [probabilities,
    logits].

    Args:
        path: the ONNX file, which open_onnx has checked.
        model: result of open_onnx.
    Raises:
        UsageError: OpenVINO is broken, or cannot open the file; or see open_model.
    """
    try:
        core = importlib.import_module("openvino").Core()
        network = core.read_model(onnx_writer.with_logits(path.read_bytes()))
        # On CPUs with instructions for bfloat16, OpenVINO rounds to bfloat16 by default.
        compiled = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except Exception as e:  # importing a broken package can raise any exception
        raise UsageError(
            f"{path}: cannot be opened by OpenVINO ({errors.core(e)}); install a different version, or uninstall "
            "openvino to omit its check"
        ) from e

    def outputs(images):
        return [np.array(array) for array in compiled([images]).values()]

    return _checked_model(Model("OpenVINO", model.description, outputs, model.precision), path)


def _checked_model(model, path):
    """Test a model on an image of zeros, and return the model.

    Raises:
        UsageError: the model fails, or its output does not have the described shape.
    """
    image, expected = model.description["input"], [1, *model.description["output"]["shape"][1:]]
    try:
        shape = list(model.run(np.zeros([1, *image["shape"][1:]], image["dtype"])).shape)
    except Exception as e:  # the errors of the engines have no common base class
        reason = errors.core(e)
        raise UsageError(f"{path}: the network does not match its description ({reason}); export it again") from e
    if shape != expected:
        raise UsageError(f"{path}: the network's output has shape {shape} instead of {expected}; export it again")
    return model


def _read_description(folder):
    path = Path(folder) / f"{NAME}.json"
    try:
        with files.open_regular(path, preprocessing.MAX_JSON_BYTES) as f:
            return _checked_description(f.read(), path)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an export folder") from e


def _checked_description(text, path):
    try:
        description = json.loads(text)
        problem = preprocessing.problem(description)
        if not problem and _precision(description) not in ("float32", "float16"):
            problem = f"precision is {reprlib.repr(description['precision'])[:100]}"
    except (ValueError, RecursionError) as e:
        problem = str(e)
    if problem:
        raise UsageError(f"{path}: not a valid description of a network ({problem}); export it again")
    return description


def _is_file(value):
    return is_table(value, size=is_number, sha256=is_text)


def resolve_device(device: str) -> str:
    """Resolve "auto" to "cpu" or "gpu", and return "cpu" and "gpu" unchanged. Raise UsageError if the device is "gpu"
    and Paddle cannot use a GPU."""
    return gpus.resolve(device, processes.local_gpu(), processes.world_size() > 1)


def loader_args(description: dict[str, Any], batch_size: int, device: str = "cpu", threads: int = 4) -> Settings:
    """Return the Settings with which DALI loads images in a network's input format. DALI returns pixels as float32 even
    if the network's input is uint8.

    Args:
        description: content of model.json.
        batch_size: images per batch.
        device: "cpu" or "gpu".
        threads: number of DALI's CPU threads.
    Raises:
        UsageError: the device, or a recorded value of the preprocessing, cannot be used.
    """
    recorded, expected = description["preprocessing"], description["input"]
    is_pixels = expected["dtype"] == "uint8"
    crop = preprocessing.sides(recorded)
    channels = expected["shape"][1 if expected["layout"] == "NCHW" else 3]
    values = {
        **{"crop_size": min(crop), "image_shape": [channels, *crop], "resize_short": recorded["resize_short"]},
        **{"interp": recorded["interp"], "data_layout": expected["layout"]},
        **{"dali_output_fp16": expected["dtype"] == "float16"},
        **{"normalize_scale": 1 if is_pixels else recorded["scale"]},
        **{"normalize_mean": [0, 0, 0] if is_pixels else recorded["mean"]},
        **{"normalize_std": [1, 1, 1] if is_pixels else recorded["std"]},
        **{"batch_size": batch_size, "dali_num_threads": threads, "device": device, "label_offset": numbers.AUTO},
    }
    args = parsing.from_dict(values)
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    return args
