"""Quantize the ONNX file of an export, and measure its speed."""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.components import quantization
from paddle_resnet.serving import inference, onnx_writer, writers
from paddle_resnet.serving.calibration import WEIGHT_BITS, quantize
from paddle_resnet.utils import logger

if TYPE_CHECKING:
    from pathlib import Path

    from paddle_resnet.serving.networks import Network

SPEED_BATCH, SPEED_S = 8, 0.5  # images per batch, and minimum duration, of the comparison of INT8 with float32


def write(
    network: Network, folder: Path, engine: str, calibration: tuple[str, int, bool] | None
) -> dict[str, dict[str, Any]]:
    """Quantize a network in place, write model.onnx, and return its entry for model.json. The BN layers of the network
    are already folded into the convolutions. A network trained with --qat is already quantized, and its quantized
    weights do not change.

    `engine` is "onnxruntime" or "tensorrt". `calibration` is the last three arguments of calibration.quantize, or None
    for a network trained with --qat. For exceptions, see calibration.quantize and writers.write_onnx.
    """
    bits = 8 if network.args.qat else WEIGHT_BITS[engine]
    network.description["int8"] = {"engine": engine, "weight_bits": bits}
    source = "ranges from --qat"
    if calibration is not None:
        sample = quantize(network, bits, *calibration)
        network.description["int8"]["calibration"] = sample._asdict()
        source = f"ranges from {sample.text(network.args.num_of_class)}"
    quantization.use_levels_of(engine, network.program, bits)
    logger.info(f"model.onnx: INT8 for {engine}, {source}")
    entry = writers.write_onnx(network, folder)
    if engine == "onnxruntime":
        _report_speed(network, folder)
    return entry


def _report_speed(network, folder):
    """Measure the speed of model.onnx relative to the same network in float32, and warn if INT8 is slower."""
    description = {name: value for name, value in network.description.items() if name != "int8"}
    float32 = dataclasses.replace(network, description=description).to_onnx().SerializeToString()
    path = folder / f"{inference.NAME}.onnx"
    ratio = _speed_ratio(inference.open_onnx(path, "cpu"), inference.load_onnx(float32, path, "cpu"))
    speed = (
        f"{ratio:.2f} times as many images/s in INT8 as in float32 (onnxruntime "
        f"{onnx_writer.require('onnxruntime').__version__}, this CPU, batches of {SPEED_BATCH})"
    )
    if ratio >= 1:
        logger.info(f"model.onnx: {speed}")
    else:
        remedy = "train without --qat" if network.args.qat else "use --onnx instead of --int8 and the calibration flags"
        logger.warn(f"model.onnx: {speed}; for speed, {remedy}")


def _speed_ratio(model, reference):
    """Return the images/s of a Model relative to those of a reference Model with the same input. The shortest
    times of alternating runs are compared, because other programs on the machine can slow down single runs."""
    image = model.description["input"]
    images = np.ones([SPEED_BATCH, *image["shape"][1:]], image["dtype"])
    times = {id(model): [], id(reference): []}
    start = perf_counter()
    while len(times[id(model)]) < 4 or perf_counter() - start < SPEED_S:
        for each in (model, reference):
            before = perf_counter()
            each.run(images)
            times[id(each)].append(perf_counter() - before)
    return min(times[id(reference)]) / min(times[id(model)])
