"""Write the files of an export."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from paddle import static

from paddle_resnet import graph
from paddle_resnet.checkpoints import contents, conversion, foreign_files, foreign_names
from paddle_resnet.models import registered
from paddle_resnet.serving import inference, onnx_writer, preprocessing
from paddle_resnet.utils.errors import RunError, printable

if TYPE_CHECKING:
    from pathlib import Path

    from paddle_resnet.serving.networks import Network

# Maximum difference between the probabilities that onnxruntime and Paddle compute, for each precision of model.onnx.
TOLERANCES = {"float32": 1e-4, "float16": 0.02, "int8": 0.1}
TRITON_MAX_BATCH = 64


def write_paddle(network: Network, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the two files for Paddle Inference, and return their entries for model.json."""
    ends = [network.images], [network.probabilities]
    with static.scope_guard(network.scope):
        parameters = static.serialize_persistables(*ends, network.exe, program=network.program.clone())
    program = static.deserialize_program(static.serialize_program(*ends, program=network.program.clone()))
    block = graph.block(program)
    # Paddle 2.6 appends a multiplication by 1, whose result has a new name. Restore the name of the probabilities.
    written, name = block.ops[-1].input("X")[0], network.probabilities.name
    if written != name:
        graph.rename(block, name, "softmax")
        graph.rename(block, written, name)
    program = program._remove_training_info()
    for op in graph.block(program).ops:
        if op.has_attr("op_callstack"):  # op_callstack contains paths of the exporting machine
            op._remove_attr("op_callstack")
    # Python writes the files, because Paddle's C++ function does not report a full disk.
    model, weights = (folder / f"{inference.NAME}.{suffix}" for suffix in inference.SUFFIXES)
    return {
        model.name: contents.write_file(model, lambda file: file.write(graph.serialize(program))),
        weights.name: contents.write_file(weights, lambda file: file.write(parameters)),
    }


def write_texts(description: dict[str, Any], folder: Path) -> None:
    """Write model.json, labels.txt and preprocess.py."""
    text = json.dumps(description, indent=1, ensure_ascii=False) + "\n"
    # A class name may contain line breaks, or lone surrogates for bytes that are not valid UTF-8.
    (folder / f"{inference.NAME}.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    labels = "".join(f"{printable(name)}\n" for name in description["classes"])
    (folder / "labels.txt").write_text(labels, encoding="utf-8")
    shutil.copyfile(preprocessing.__file__, folder / "preprocess.py")


def write_onnx(network: Network, folder: Path) -> dict[str, dict[str, Any]]:
    """Write model.onnx, compare it with the network on random images, and return its entry for model.json.

    Raises:
        UsageError: see onnx_writer.to_onnx.
        RunError: a probability differs by more than the tolerance in TOLERANCES.
    """
    proto = network.to_onnx()
    if network.description["precision"] == "float16":
        proto = onnx_writer.to_float16(proto)
    tolerance = TOLERANCES["int8" if "int8" in network.description else network.description["precision"]]
    path = folder / f"{inference.NAME}.onnx"
    entry = contents.write_file(path, lambda file: file.write(proto.SerializeToString()))
    image = network.description["input"]
    images = np.random.RandomState(0).uniform(-2, 2, (2, *image["shape"][1:]))
    images = images.astype("float32") if image["dtype"] == "float32" else (images * 64 + 128).astype("uint8")
    expected, actual = network.model().run(images), inference.open_onnx(path, "cpu").run(images)
    if not np.allclose(actual, expected, rtol=0, atol=tolerance):
        raise RunError(
            "model.onnx: the probabilities differ from those of the checkpoint by up to "
            f"{np.abs(actual - expected).max():.2g} on random images (tolerance {tolerance:g}), and nothing was "
            "written; use a different version of onnxruntime"
        )
    return {path.name: entry}


def write_safetensors(network: Network, folder: Path) -> dict[str, dict[str, Any]]:
    """Write model.safetensors, and return its entry for model.json."""
    own = conversion.parameters(network.args.model_arch_name, network.args.num_of_class)
    arrays = {name: network.parameter(parameter.variable).astype(np.float32) for name, parameter in own.items()}
    entry = registered(network.args.model_arch_name)
    if entry is not None and entry.timm is not None:
        arrays = foreign_names.to_timm(entry.module, arrays, own)
        metadata = {"format": "pt", "network": f"timm.{entry.timm}"}
    else:
        metadata = {"format": "np", "network": f"paddle_resnet.{network.description['arch']}"}
    path = folder / f"{inference.NAME}.safetensors"
    return {path.name: contents.write_file(path, lambda file: foreign_files.write_safetensors(file, arrays, metadata))}


def write_triton(description: dict[str, Any], folder: Path) -> None:
    """Write a Triton model repository: triton/MODEL/config.pbtxt, and triton/MODEL/1/ with files named as the backend
    expects."""
    backends = {"paddle": ("pdmodel", "pdiparams"), "onnxruntime": ("onnx",)}
    for backend, suffixes in backends.items():
        files = [folder / f"model.{suffix}" for suffix in suffixes]
        if not all(file.exists() for file in files):
            continue
        name = f"{description['arch'].lower()}_{backend}"
        model = folder / "triton" / name
        (model / "1").mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, model / "1" / file.name)
        shutil.copyfile(folder / "labels.txt", model / "labels.txt")
        (model / "config.pbtxt").write_text(_triton_config(description, name, backend), encoding="utf-8")


def _triton_config(description, name, backend):
    images, classes = description["input"], description["output"]
    dtype = {"float32": "TYPE_FP32", "uint8": "TYPE_UINT8"}[images["dtype"]]
    return f"""name: "{name}"
backend: "{backend}"
max_batch_size: {TRITON_MAX_BATCH}
input [ {{ name: "{images["name"]}" data_type: {dtype} dims: {images["shape"][1:]} }} ]
output [
  {{ name: "{classes["name"]}" data_type: TYPE_FP32 dims: {classes["shape"][1:]} label_filename: "labels.txt" }}
]
dynamic_batching {{ }}
"""
