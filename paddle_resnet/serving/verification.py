"""Compare exported networks with their checkpoint, and the checkpoint with its recorded evaluation (--verify)."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import paddle

from paddle_resnet.machine import cpu
from paddle_resnet.native import build as native
from paddle_resnet.serving import inference, scores
from paddle_resnet.serving.calibration import Sample
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddle_resnet.serving.networks import Network

# Maximum difference between the mean losses; relative if the loss exceeds 1. Losses are computed from logits, because
# float32 probabilities below 1e-38 become zero and some engines clip even larger probabilities.
LOSS_TOLERANCE = 1e-4
# Maximum difference between the mAP of multi-label networks, in addition to the difference that arises if images whose
# probabilities differ by less than TIE, QAT_TIE or HALF_TIE exchange their places.
MAP_TOLERANCE = 1e-3
# {kind of network: (maximum decrease of top1 as a fraction of all images, remedy if top1 decreases more)}. Except for
# "int8", the number of ties is added to the limit. In quantized networks, and in the simulated quantization of --qat,
# engines may round a sum differently, which can change an activation by one quantization level. Even Paddle's rounding
# of weights depends on their address in memory.
TOP1_CHECKS = {
    "int8": (0.005, "{more}train with --qat"),
    "--qat": (0.005, "train longer with --qat"),
    "float16": (0.001, "use --precision float32"),
}


def verify(
    network: Network, folder: Path, image_root: str | Path, device: str, allow_outside: bool = False
) -> dict[str, Any]:
    """Evaluate the checkpoint and the exported networks on all validation images, and compare the results. The
    checkpoint and model.onnx run on the CPU; model.onnx runs in onnxruntime and, if it is installed, in OpenVINO.

    Args:
        network: the checkpoint's Network, which takes normalized images as input.
        folder: folder with the exported networks.
        image_root: folder of the data set.
        device: device on which Paddle Inference runs, "cpu" or "gpu".
        allow_outside: whether file lists may contain files outside image_root.
    Returns:
        result of scores.score for the checkpoint.
    Raises:
        UsageError: an exported network cannot be opened, or see scores.score.
        RunError: the networks disagree, or see scores.score.
    """
    models = [network.model(logits=True), inference.open_paddle(folder, device, logits=True)]
    if (file := folder / f"{inference.NAME}.onnx").exists():
        models.append(inference.open_onnx(file, "cpu", logits=True))
        if importlib.util.find_spec("openvino") is not None:
            models.append(inference.open_openvino(file, models[-1]))
    expected, *others = (scores.score(network, model, image_root, allow_outside=allow_outside) for model in models)
    for model, score in zip(models, (expected, *others), strict=True):
        logger.info(f"{model.engine}: {scores.metric_text(score)}, loss {score['loss']:.7g}, {score['images']} images")
    remedy = "use a different version of the inference engine"
    for model, score in zip(models[1:], others, strict=True):
        kind = "--qat" if network.args.qat and model.precision != "float16" else model.precision
        if kind == "float32":
            check_agreement(model.engine, score, "the checkpoint's network", expected, remedy)
        else:
            _check_top1(model, kind, score, expected)
    return expected


def verify_recorded(
    network: Network,
    score: dict[str, Any],
    image_root: str | Path,
    load_as_evaluated: Callable[[], Network],
    allow_outside: bool = False,
) -> None:
    """Log the evaluation recorded in a checkpoint and, if it can be repeated, compare it with its repetition.

    Args:
        network: the checkpoint's Network.
        score: result of scores.score for this network.
        image_root, allow_outside: see verify.
        load_as_evaluated: function that returns the Network in the form of the run's evaluations.
    Raises:
        UsageError, RunError: see scores.score.
        RunError: the evaluations disagree.
    """
    recorded = network.meta["evaluated"]
    if not recorded:
        return logger.info("recorded evaluation: none, so only the exported networks were compared with the checkpoint")
    decoder = {"cpu": "a CPU", "gpu": "a GPU"}.get(network.meta["arguments"].get("dali_device"), "an unknown device")
    loss = "not finite" if recorded["loss"] is None else f"{recorded['loss']:.7g}"
    text = f"recorded evaluation: {scores.metric_text(recorded)}, loss {loss}, images decoded on {decoder}"
    if obstacle := _obstacle(network, score["images"]):
        return logger.info(f"{text}; not compared, because {obstacle}")
    model = network.model(logits=True)
    repeat = functools.partial(scores.score, image_root=image_root, as_evaluated=True, allow_outside=allow_outside)
    if network.args.tta != "none" or scores.is_half(network):
        score = repeat(network, model)
    if network.args.qat:
        try:
            exact = load_as_evaluated()
        except native.Unavailable as e:
            return logger.info(f"{text}; not compared, because custom kernels, which --qat requires, are missing ({e})")
        repeated = repeat(exact, exact.model(logits=True))
        _check_top1(model, "--qat", score, repeated)
        score = repeated | {"ties": 0}  # the repetition rounds exactly as the run did
    losses = [score["loss"], *([] if "cpu" in network.meta else [score["clipped_loss"]])]
    score = score | {"loss": min(losses, key=lambda loss: abs(loss - recorded["loss"]))}
    if "map" in recorded:  # the recorded evaluation has no number of correct decisions
        reference = score | {"loss": recorded["loss"], "map": recorded["map"]}
    else:
        reference = {"correct": round(recorded["top1"] * recorded["images"]), "ties": 0, "loss": recorded["loss"]}
    remedy = "check that IMAGE_ROOT is the data set of the training run"
    check_agreement("the checkpoint's network", score, "its recorded evaluation", reference, remedy)
    logger.info(f"{text}; confirmed")


def _obstacle(network, images):
    """Return the reason why the recorded evaluation of a Network cannot be repeated on a number of images, or None."""
    meta, arguments = network.meta, network.meta["arguments"]
    recorded = meta["evaluated"]
    if arguments.get("device") != "cpu":
        return "the run did not evaluate on a CPU, and GPUs round differently"
    if recorded.get("not_finite"):  # the recorded mean covers only finite losses
        return f"the recorded loss excludes {recorded['not_finite']} of the images, whose losses were not finite"
    if "images" not in recorded:
        return "the checkpoint does not contain the number of evaluated images"
    if recorded.get("images") != images:
        return f"the run evaluated {recorded.get('images')} images, and IMAGE_ROOT has {images}"
    # In a network that simulates quantization, a sum that is rounded differently can change an activation by one level.
    if network.args.qat and (meta.get("cpu"), meta.get("paddle_version")) != (cpu.arithmetic(), paddle.__version__):
        return "--qat requires the same kind of CPU, number of threads and version of Paddle as in training"
    return None


def check_agreement(
    name: str, score: dict[str, Any], reference_name: str, reference: dict[str, Any], remedy: str
) -> None:
    """Raise RunError if two results of scores.score for float32 networks differ by more than the ties and tolerances.
    `name` and `reference_name` denote the networks in the message, which ends with `remedy`."""
    difference = abs(score["correct"] - reference["correct"])
    allowed = score["ties"] + reference["ties"]
    loss_difference = abs(score["loss"] - reference["loss"]) / max(1, abs(reference["loss"]))
    map_difference = abs(score["map"] - reference["map"]) - score["map_ties"] if "map" in score else 0
    counted = f"{score['decisions']} labels" if "decisions" in score else f"{score['images']} images"
    if difference > allowed or not loss_difference <= LOSS_TOLERANCE or map_difference > MAP_TOLERANCE:
        maps = f", mAP {score['map']:.6g} and {reference['map']:.6g}" if "map" in score else ""
        raise RunError(
            f"--verify: {name} and {reference_name} disagree: {score['correct']} and {reference['correct']} of "
            f"{counted} correct (ties allow a difference of {allowed}){maps}, loss {score['loss']:.7g} and "
            f"{reference['loss']:.7g} (tolerance {LOSS_TOLERANCE:g}), and nothing was written; {remedy}"
        )


def _check_top1(model, kind, score, reference):
    """Raise RunError if top1 of a Model is lower than that of the checkpoint's network by more than the tolerance in
    TOP1_CHECKS. `kind` is a key of TOP1_CHECKS."""
    lost, images = reference["correct"] - score["correct"], score.get("decisions", score["images"])
    counted = "labels" if "decisions" in score else "images"
    tolerance, remedy = TOP1_CHECKS[kind]
    # With fewer than 200 images, the tolerance of INT8 is less than one image, whose class rounding can change.
    allowed = max(1, tolerance * images) if kind == "int8" else tolerance * images + score["ties"]
    if lost <= allowed:
        return
    source = ""
    if kind == "int8":
        sample = Sample(**model.description["int8"]["calibration"])
        source = f"; its activation ranges come from {sample.text(model.description['output']['shape'][1])}"
        remedy = remedy.format(more="use more --calibration-images, or " * (sample.images < sample.available))
    raise RunError(
        f"--verify: {model.engine} ({kind}) classifies {score['correct']} of {images} {counted} correctly, but the "
        f"checkpoint's network classifies {reference['correct']} (tolerance {tolerance:.1%} of the {counted}){source}, "
        f"and nothing was written; {remedy}"
    )
