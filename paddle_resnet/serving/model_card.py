"""The model card of an export: README.md, in the form that Hugging Face's model hub shows."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from paddle_resnet.utils.errors import printable

LISTED = 20  # maximum number of class names
METRICS = {"top1": "top1", "top5": "top5", "map": "mAP", "map_micro": "mAP (micro)", "loss": "loss"}
CODE_OF_PADDLE = """\
from paddle import inference

from preprocess import model_input, read_model

model = read_model("model.json")
predictor = inference.create_predictor(inference.Config("model.pdmodel", "model.pdiparams"))
predictor.get_input_handle(model["input"]["name"]).copy_from_cpu(model_input("image.jpg", model))
predictor.run()
probabilities = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
"""
CODE_OF_ONNX = """\
import onnxruntime

from preprocess import model_input, read_model

model = read_model("model.json")
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(probabilities,) = session.run(None, {model["input"]["name"]: model_input("image.jpg", model)})
"""
CODE_OF_TIMM = """\
import timm
import torch
from safetensors.torch import load_file

from preprocess import preprocess, read_model

network = timm.create_model("NETWORK", num_classes=CLASSES).eval()
network.load_state_dict(load_file("model.safetensors"))
images = torch.from_numpy(preprocess("image.jpg", read_model("model.json")["preprocessing"]))[None]
with torch.no_grad():
    probabilities = network(images).FUNCTION
"""
CODE_OF_NUMPY = """\
from safetensors.numpy import load_file

tensors = load_file("model.safetensors")  # names, shapes and layout of paddle_resnet's network
"""


def text(description: dict[str, Any], meta: dict[str, Any], timm: str | None = None, int8: str | None = None) -> str:
    """Return the model card of an export.

    Args:
        description: content of model.json.
        meta: content of the checkpoint's meta.json.
        timm: name of timm's network for model.safetensors, or None if the file has the names of this project.
        int8: engine for which model.onnx is quantized, or None.
    """
    license, arch, classes = meta.get("license"), printable(description["arch"]), description["output"]["shape"][1]
    header = ["pipeline_tag: image-classification", "tags:", "- image-classification", "- paddlepaddle"]
    header += [f"license: {license.lower()}"] if license else []
    header += ["library_name: timm"] if timm and "model.safetensors" in description["files"] else []
    sections = {
        "Data": _data(description, meta),
        "Metrics": _metrics(description, meta),
        "Preprocessing": _preprocessing(description),
        "How to load": _loading(description, timm, int8),
        "License of the weights": _license(meta),
    }
    kind = "The classes of an image are independent (multi-label)." if "multi_label" in description else ""
    lines = ["---", *header, "---", f"# {arch}, {classes} classes"]
    origin = "converted to PaddlePaddle by" if meta.get("source") else "trained with PaddlePaddle and"
    lines.append(f"An image classifier, {origin} paddle_resnet. {kind}".rstrip())
    return "\n".join(lines) + "\n" + "".join(f"\n## {title}\n{body}\n" for title, body in sections.items())


def _code(value):
    """Format a value as code in Markdown, in which names from a data set cannot become links or HTML."""
    return f"`{printable(str(value)).replace('`', chr(39))}`"


def _name(path):
    """Return the last component of a path, because the other components describe the exporting machine."""
    return _code(PurePath(path).name or path)


def _data(description, meta):
    arguments, names = meta["arguments"], description["classes"]
    outputs = description["output"]["shape"][1]
    shown = ", ".join(map(_code, names[:LISTED])) + ", ..." * (len(names) > LISTED)
    lines = [f"- {outputs} classes" + (f": {shown} (all: `labels.txt`)" if names else ", without names")]
    source = meta.get("source")
    if not source and "optimizer" in arguments:  # checkpoints of NVIDIA's example record no flags
        lines.append(f"- data set: the folder {_name(arguments['image_root'])}")
        lines.append(f"- training: epoch {description['epoch'] + 1}, optimizer {_code(arguments['optimizer'])}")
    if source:
        network = f", {_code(source['network'])}" if source.get("network") else ""
        lines.append(f"- converted from {_code(source['file'])}{network}, sha256 {_code(source['sha256'])}")
    if arguments.get("from_pretrained_params"):
        lines.append(f"- training started from the weights in the folder {_name(arguments['from_pretrained_params'])}")
    return "\n".join(lines)


def _metrics(description, meta):
    evaluated = description["evaluated"]
    if not evaluated:
        return "The checkpoint contains no evaluation."
    images = (meta.get("evaluated") or {}).get("images")
    count = f"{images:,} validation images" if images else "the validation images"
    tta = ", averaged over each image and its mirror image" if evaluated.get("tta") == "flip" else ""
    rows = [f"| {METRICS[name]} | {evaluated[name]:.6g} |" for name in METRICS if evaluated.get(name) is not None]
    lines = [f"Evaluation of the checkpoint on {count}{tta}:", "", "| metric | value |", "|---|---|", *rows]
    if "temperature" in description:
        fitted = description["temperature"]
        lines += ["", f"After this evaluation, the logits were divided by the temperature {fitted['value']:.6g}: "]
        lines[-1] += f"expected calibration error {fitted['ece_before']:.6g} before, {fitted['ece_after']:.6g} after."
    return "\n".join(lines)


def _preprocessing(description):
    values = description["preprocessing"]
    crop = values["center_crop"]
    size = "{} x {} (height x width)".format(*crop) if isinstance(crop, list) else f"{crop} x {crop}"
    takes_pixels = description["input"]["dtype"] == "uint8"
    lines = [
        f"`preprocess.py` preprocesses images as `model.json` defines. Shorter side: {values['resize_short']} pixels "
        f"({values['interp']}), then the central {size} pixels, RGB.",
        f"Normalization: (level * {values['scale']:.8g} - mean) / std, with the mean {_numbers(values['mean'])} and "
        f"the std {_numbers(values['std'])}.",
    ]
    if takes_pixels:
        lines.append("The Paddle and ONNX networks take uint8 pixels and normalize them.")
    return "\n".join(lines)


def _numbers(values):
    return ", ".join(f"{value:.6g}" for value in values)


def _loading(description, timm, int8):
    files, outputs = description["files"], description["output"]["shape"][1]
    half = " in float16" if description["precision"] == "float16" else ""
    blocks = [(f"Paddle Inference (`model.pdmodel`, `model.pdiparams`{half}):", CODE_OF_PADDLE)]
    if "model.onnx" in files:
        kind = f" in INT8 for {int8}" if int8 else half
        blocks.append((f"ONNX (`model.onnx`{kind}):", CODE_OF_ONNX))
    if "model.safetensors" in files:
        function = "sigmoid()" if "multi_label" in description else "softmax(1)"
        code = CODE_OF_TIMM.replace("NETWORK", str(timm)).replace("CLASSES", str(outputs))
        code = code.replace("FUNCTION", function) if timm else CODE_OF_NUMPY
        blocks.append((f"{'timm' if timm else 'NumPy'} (`model.safetensors`, float32):", code))
    if "multi_label" in description:
        rule = "An image has each class whose probability is at least its threshold (`multi_label.thresholds` in "
        blocks[0] = (f"{rule}`model.json`).\n\n{blocks[0][0]}", CODE_OF_PADDLE)
    return "\n\n".join(f"{title}\n```python\n{code}```" for title, code in blocks)


def _license(meta):
    if meta.get("license"):
        url = (meta.get("source") or {}).get("url")
        return f"{meta['license']}" + (f" ({url})" if url else "")
    if meta["arguments"].get("from_pretrained_params"):
        return "Not recorded. The license of the weights from which training started also applies."
    return "Not recorded."
