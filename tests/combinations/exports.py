"""Exports and predictions of the combination tests: forms of the commands, and checks of their results.

A row has one value of each axis in EXPORTS and one of the PREDICTIONS. The values rotate from row to row. The axes in
EXPORTS have 5, 4 and 3 values, so that all their combinations occur.
"""

import contextlib
import csv
import importlib.util
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_resnet import export, predict
from paddle_resnet.serving import inference, preprocessing

EXPORTS = {
    "network": (
        [],
        ["--onnx"],
        ["--onnx", "--precision", "float16"],
        ["--int8"],
        ["--int8", "--int8-engine", "tensorrt"],
    ),
    "input": ([], ["--triton", "--safetensors"], ["--uint8", "--safetensors"], ["--uint8", "--triton"]),
    "temperature": (["--temperature", "auto"], [], []),
}
PREDICTIONS = ([], ["--heat-map", "{folder}/maps"], [], ["--features", "{folder}/features.npy"])
# Maximum differences between the probabilities of the checkpoint and of its export. On a GPU, predict computes in
# float16.
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "gpu": 0.05}
# preprocess.py and predict decode and resize images differently, within 2 levels.
PIXELS_TOLERANCE = 0.1


class Failed(Exception):
    """A check of a row failed."""


class Conflict(NamedTuple):
    """A flag that conflicts with other flags or with the checkpoint. The export exits with code 2, and its error
    contains all strings in `names`. The row then continues without the flag."""

    flag: str
    has_conflict: Callable[[set[str], dict[str, str], str], bool]  # arguments: flags, values of the row, device
    names: tuple[str, ...]


# In the order in which the export checks them.
CONFLICTS = (
    Conflict("--temperature", lambda flags, row, device: "--verify" not in flags, ("--temperature auto", "--verify")),
    Conflict("--verify", lambda flags, row, device: "float16" in flags and device == "cpu", ("--verify", "float16")),
    Conflict("--safetensors", lambda flags, row, device: row["qat"] == "on", ("--safetensors", "--qat")),
    Conflict(
        "--precision",
        lambda flags, row, device: row["qat"] == "on" and "--onnx" in flags,
        ("--precision float16", "--onnx", "--qat"),
    ),
    Conflict("--calibrate", lambda flags, row, device: row["qat"] == "on", ("--calibrate", "--qat")),
    Conflict("--temperature", lambda flags, row, device: row["labels"] != "one", ("--temperature auto", "multi-label")),
)


def turn(number):
    """Return the number of a row's turn, in which the row has the value `turn % len(values)` of each axis. The second
    term makes the values also rotate over every 14th row, because only these rows are exported on a GPU with
    --rows 1/2."""
    return number + 3 * (number // 14)


def form(number):
    """Return the flags of EXPORTS for a row, except those that require packages that are not installed."""
    flags = [flag for values in EXPORTS.values() for flag in values[turn(number) % len(values)]]
    if not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))):
        flags = [flag for flag in flags if flag not in ("--onnx", "--int8", "--int8-engine", "tensorrt")]
    return flags


def write(checkpoint, output, row, number, root, images, network, device):
    """Export a checkpoint.

    Args:
        checkpoint, output: folders.
        row, number: values and number of the row.
        root: data set for --calibrate.
        images: flags of the data set for training.
        network: flags of the network.
        device: "cpu" or "gpu".
    """
    flags = form(number)
    groups = [["--verify", root]] if row["format"] != "synthetic" else []
    groups += [["--calibrate", root]] if "--int8" in flags else []
    for word in flags:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    common = [*network, *(["--allow-outside"] if "--allow-outside" in images else [])]

    def run():
        return call(export.main, [checkpoint, output, *(word for group in groups for word in group), *common])

    def conflict():
        words = {word for group in groups for word in group}
        return next((each for each in CONFLICTS if each.flag in words and each.has_conflict(words, row, device)), None)

    while found := conflict():
        refuse(run, found.names)
        if Path(output).exists():
            raise Failed(f"{groups}: the export that exits with code 2 left {output}")
        groups = [group for group in groups if group[0] != found.flag]
    code, out, err = run()
    if code == 2 and "--temperature auto: no temperature from" in err:  # all images are classified correctly
        groups = [group for group in groups if group[0] != "--temperature"]
        code, out, err = run()
    if code == 1 and ["--int8"] in groups and "--verify: " in err:  # INT8 is less accurate, so the export is rejected
        if Path(output).exists():
            raise Failed(f"{groups}: the rejected export left {output}")
        groups = [group for group in groups if group[0] != "--verify"]
        code, out, err = run()
    if code:
        raise Failed(f"export {groups}: exit code {code}")
    check_onnx(Path(output), groups)


def check_onnx(output, groups):
    """Check that the description in model.onnx is that of model.json, and that the engine of INT8 is that of the
    flags."""
    if not (output / "model.onnx").exists():
        return
    description = json.loads((output / "model.json").read_text())
    actual = inference.open_onnx(output / "model.onnx", "cpu").description
    int8 = actual.get("int8", {}).get("engine")
    expected = "tensorrt" if ["--int8-engine", "tensorrt"] in groups else "onnxruntime"
    if (int8 is None and ["--int8"] in groups) or int8 not in (None, expected):
        raise Failed(f"export {groups}: model.onnx is quantized for {int8} instead of {expected}")
    for name in ("input", "output", "preprocessing", "classes", "temperature", "precision", "multi_label"):
        if actual.get(name) != description.get(name):
            raise Failed(f"export {groups}: {name} is {actual.get(name)} in model.onnx, but {description.get(name)}")


def compare(checkpoint, output, images, number, tta, network, device, folder):
    """Predict images with the checkpoint and with each exported network, and compare the probabilities.

    Args:
        checkpoint, output: folders.
        images: paths.
        number: number of the row.
        tta, network: flags.
        device: "cpu" or "gpu".
        folder: folder for outputs.
    """
    output, on = Path(output), ["--device", device]
    description = json.loads((output / "model.json").read_text())
    flags = [flag.format(folder=folder) for flag in PREDICTIONS[turn(number) % len(PREDICTIONS)]]
    expected = predicted(checkpoint, images, [*flags, *network, *on], folder)
    temperature = description.get("temperature", {"value": 1})["value"]
    if tta and temperature == 1:  # with a temperature, the average of two predictions would differ
        averaged = predicted(checkpoint, images, [*tta, *network, *on], folder)
    models = {output: description["precision"]}
    if description["precision"] == "float16" and device == "cpu":
        del models[output]
        refuse(lambda: call(predict.main, [str(output), *images, *on]), ("float16", "GPU"))
    onnx = None
    if (output / "model.onnx").exists():
        onnx = inference.open_onnx(output / "model.onnx", "cpu")
        models[output / "model.onnx"] = onnx.precision
    for model, precision in models.items():
        actual = predicted(model, images, on, folder)
        if precision != "int8":
            tolerance = TOLERANCES["gpu" if device == "gpu" else precision]
            check_probabilities(model, actual, tempered(expected, temperature, actual), tolerance)
            if tta and temperature == 1:
                check_probabilities(model, predicted(model, images, [*tta, *on], folder), averaged, tolerance)
    check_script(output, images, onnx, onnx and actual)


def predicted(model, images, flags, folder):
    """Return {label: probability} for each image: the classes that predict writes, which are the five most probable
    ones or, for a multi-label network, all classes. The text, the table and the files of `flags` must agree."""
    table = Path(folder) / "predicted.csv"
    code, out, _ = call(predict.main, [model, *images, "--json", "--csv", table, *flags])
    if code:
        raise Failed(f"prediction of {model} with {flags}: exit code {code}")
    entries = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    with table.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    if not [entry["image"] for entry in entries] == [row["image"] for row in rows] == images:
        raise Failed(f"prediction of {model} with {flags}: {entries} and {rows} instead of results for {images}")
    if "--heat-map" in flags:
        for entry in entries:
            if entry.get("top", entry.get("classes")) and not Path(entry["heat_map"]).stat().st_size:
                raise Failed(f"heat map of {model}: empty")
    if "--features" in flags:
        features = np.load(Path(folder) / "features.npy")
        if len(features) != len(images) or not np.allclose(np.linalg.norm(features, axis=1), 1, atol=1e-5):
            raise Failed(f"features of {model}: shape {features.shape}, norms {np.linalg.norm(features, axis=1)}")
    results = []
    for entry, row in zip(entries, rows, strict=True):
        if "top" in entry:
            found = entry["top"]
            results.append({each["label"]: each["probability"] for each in found})
            written = [row[f"{name}_{i}"] for i in range(1, len(found) + 1) for name in ("label", "class")]
            agrees = written == [str(each[name]) for each in found for name in ("label", "class")]
        else:
            found = entry["classes"]
            probabilities = [float(p) for name, p in row.items() if name.startswith("probability_")]
            results.append(dict(enumerate(probabilities)))
            agrees = row["prediction"] == "|".join(each["class"] for each in found) and all(
                abs(probabilities[each["label"]] - each["probability"]) < 1e-6 for each in found
            )
        if not agrees:
            raise Failed(f"prediction of {model}: {row} in the table, but {entry} in the text")
    return results


def tempered(images, temperature, actual):
    """Return the probabilities {label: probability} of each image for a network whose logits are divided by a
    temperature. The probabilities of less probable classes are not known, so the sum is that of `actual`."""
    if temperature == 1:
        return images
    results = []
    for before, after in zip(images, actual, strict=True):
        powers = {label: before[label] ** (1 / temperature) for label in before.keys() & after.keys()}
        factor = sum(after[label] for label in powers) / sum(powers.values())
        results.append({label: factor * power for label, power in powers.items()})
    return results


def check_probabilities(what, actual, expected, tolerance):
    """Raise Failed if the probabilities {label: probability} of an image differ. A label that is not among the most
    probable ones has at most the probability of the last one."""
    for one, other in zip(actual, expected, strict=True):
        ends = min(one.values()), min(other.values())
        differences = [abs(one.get(label, ends[0]) - other.get(label, ends[1])) for label in one.keys() | other.keys()]
        if not max(differences) <= tolerance:
            raise Failed(f"{what}: the probabilities are {one} instead of {other}")


def check_script(output, images, model, expected):
    """Run preprocess.py of an export. With model.onnx, it must print the classes that predict would print for the same
    pixels, and about the probabilities of predict.

    Args:
        output: folder.
        images: paths.
        model: Model of model.onnx, or None.
        expected: result of predicted() for model.onnx, or None.
    """
    script = runpy.run_path(str(output / "preprocess.py"))
    code, out, _ = call(script["main"], images)
    description = preprocessing.read_model(output / "model.json")
    found = {}  # {first line of an image: [[probability, name]]}
    for line in out.splitlines():
        if line.startswith("  "):
            found[[*found][-1]].append(line.split(maxsplit=1))
        elif not line.startswith("recorded "):
            found[line] = []
    if code or len(found) != len(images):
        raise Failed(f"preprocess.py: exit code {code}, output {out}")
    for i, (image, (line, printed)) in enumerate(zip(images, found.items(), strict=True)):
        pixels = script["model_input"](image, description)
        [shown] = model.predicted_classes(model.run(pixels)) if model else [[]]
        difference = max(
            (abs(float(p) - e["probability"]) for (p, _), e in zip(printed, shown, strict=False)), default=0
        )
        if (
            not line.startswith(f"{image}: {description['input']['dtype']} {[*pixels.shape]}, from ")
            or [name for _, name in printed] != [each["class"] for each in shown]
            or difference > 1e-5
        ):
            raise Failed(f"preprocess.py: {line} {printed} instead of {shown}")
        for each in shown:
            p = expected[i].get(each["label"], each["probability"])
            if abs(each["probability"] - p) > PIXELS_TOLERANCE:
                raise Failed(f"preprocess.py: {line} {printed}, but predict: {expected[i]}")


def call(main, arguments) -> tuple[int, str, str]:
    """Call a command in this process, and return (exit code, stdout, stderr). The log also contains its output."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = main([*map(str, arguments)])
    finally:
        sys.stdout.write(out.getvalue())
        sys.stderr.write(err.getvalue())
    return code, out.getvalue(), err.getvalue()


def refuse(run, names):
    """Check that a command exits with code 2 and an error that contains all strings in `names`."""
    code, _, err = run()
    [*_, error] = ["", *(line for line in err.splitlines() if ": error: " in line)]
    if code != 2 or not all(name in error for name in names):
        raise Failed(f"exit code {code} and {error!r} instead of 2 and an error with {names}")
