"""Export a checkpoint for Paddle Inference, ONNX, timm and Triton: `python -m paddle_resnet.export CHECKPOINT OUT`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import paddle_resnet  # noqa: F401  imported before Paddle, because it sets environment variables for Paddle
from paddle_resnet import graph
from paddle_resnet.data import classes, layout
from paddle_resnet.machine import cpu
from paddle_resnet.models import registered, registered_name
from paddle_resnet.utils import confidence, exit_codes, files, label_metrics, locks, logger, numbers, outputs, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import RunError, UsageError, printable, program
from paddle_resnet.utils.label_metrics import ScoreMeter
from paddle_resnet.utils.mode import Mode

# Tolerances of --verify for differences between an engine and the checkpoint. If the two largest probabilities of an
# image differ by less than TIE, rounding determines which of them is larger, so the predicted class may differ between
# engines. Losses are computed from logits, because float32 probabilities below 1e-38 become zero and some engines clip
# even larger probabilities.
LOSS_TOLERANCE = 1e-4  # maximum difference between the mean losses; relative if the loss exceeds 1
TIE = 1e-4
# Maximum difference between the mAP of multi-label networks, in addition to the difference that arises if images whose
# probabilities differ by less than TIE, QAT_TIE or HALF_TIE exchange their places.
MAP_TOLERANCE = 1e-3
PROBABILITY_TOLERANCE = 1e-4
# Earlier versions computed losses on a CPU with Paddle's cross entropy, which raises logits to at least the maximum
# minus 64, so the losses that they recorded can be lower. The meta.json of their checkpoints lacks the key "cpu".
EARLIER_CLIP = 64
TRITON_MAX_BATCH = 64
SPEED_BATCH, SPEED_S = 8, 0.5  # images per batch, and minimum duration, of the comparison of INT8 with float32
# {kind of network: (maximum decrease of top1 as a fraction of all images, remedy if top1 decreases more)}. Except for
# "int8", the number of ties is added to the limit. In quantized networks, and in the simulated quantization of --qat,
# engines may round a sum differently, which can change an activation by one quantization level. Even Paddle's rounding
# of weights depends on their address in memory.
TOP1_CHECKS = {
    "int8": (0.005, "{more}train with --qat"),
    "--qat": (0.005, "train longer with --qat"),
    "float16": (0.001, "use --precision float32"),
}
INT8_PROBABILITY_TOLERANCE = 0.1
# Tolerances for networks in float16. If the two largest probabilities differ by less than HALF_TIE, rounding may
# change the predicted class.
HALF_TIE = 0.02
# With --qat, the probabilities that engines compute from the same quantized network usually differ by up to 0.02.
QAT_TIE = 0.04
HALF_PROBABILITY_TOLERANCE = 0.02


class Calibration(NamedTuple):
    """The images that determine the activation ranges of a quantized network.

    Attributes:
        image_root: folder of a data set, whose training images are used.
        images: maximum number of images to use.
        allow_outside: whether file lists may contain files outside image_root.
    """

    image_root: str
    images: int = 512
    allow_outside: bool = False


def export(
    checkpoint: str | Path,
    output: str | Path,
    onnx: bool = False,
    verify: str | None = None,
    uint8: bool = False,
    triton: bool = False,
    model_arch_name: str | None = None,
    int8: str | None = None,
    calibration: Calibration | None = None,
    precision: str = "float32",
    allow_outside: bool = False,
    temperature: str | None = None,
    safetensors: bool = False,
) -> dict[str, Any]:
    """Export a checkpoint as an inference network, without masks or optimizer state.

    The output folder contains model.pdmodel and model.pdiparams for Paddle Inference, model.json (input, output,
    preprocessing, classes), labels.txt (one class per line), preprocess.py (a copy of serving/preprocessing.py,
    which runs standalone) and README.md (a model card).

    Args:
        checkpoint: see networks.load_checkpoint.
        output: folder to create. The folder appears only when all its files are complete.
        onnx: also write model.onnx, and compare it with the checkpoint on random images.
        verify: folder of a data set, or None. On the validation images of this data set, the results of all exported
            networks must match those of the checkpoint.
        uint8: if True, the input "images" is uint8 [N, H, W, 3], and the network normalizes it; if False, the input is
            normalized float32 [N, 3, H, W]. The output is float32 probabilities [N, classes]. The layout of the network
            is always NCHW, regardless of the layout in training.
        triton: also write triton/, a model repository for Triton.
        model_arch_name: see networks.load_checkpoint.
        int8: engine for which model.onnx is quantized, "onnxruntime" or "tensorrt"; implies onnx. If `int8` is None,
            model.onnx has the type `precision`, unless the checkpoint was trained with --qat: then model.onnx is
            quantized for onnxruntime.
        calibration: Calibration for int8, or None for a checkpoint trained with --qat.
        precision: "float32" or "float16". In float16, the input, the output and the softmax remain float32, and Paddle
            can run the network only on a GPU.
        allow_outside: whether file lists in the folder `verify` may contain files outside this folder.
        temperature: "auto" to divide the logits by the temperature that minimizes the loss of the checkpoint on the
            validation images of `verify`, or None. model.json contains the temperature as confidence.Temperature.
        safetensors: also write model.safetensors: the parameters in float32, with the names, shapes and BN epsilon of
            timm's network with the same outputs, or those of this project if timm does not have the network.
    Returns:
        content of model.json.
    Raises:
        UsageError: the arguments conflict; the checkpoint (see networks.load_checkpoint) or a data set cannot be used;
            the output exists or cannot be written; a package for ONNX is missing; the network cannot be translated to
            ONNX; no temperature minimizes the loss; or this version of Paddle is not supported.
        RunError: the results of an exported network differ from those of the checkpoint by more than the tolerances.
            After this error, no file remains.
        RunError, OSError: Paddle cannot be imported (see signals.importing_paddle).
    """
    if model_arch_name is not None:
        model_arch_name = registered_name(model_arch_name)
    onnx = onnx or int8 is not None
    if temperature is not None and verify is None:
        raise UsageError(
            f"--temperature {temperature}: requires a data set, whose validation images determine the temperature; add "
            "--verify IMAGE_ROOT"
        )
    for flag, root, mode in (
        ("--verify", verify, Mode.EVAL),
        ("--calibrate", calibration and calibration.image_root, Mode.TRAIN),
    ):
        if root is not None:
            layout.check_split(flag, root, mode)
    output = Path(output)
    if os.path.lexists(output):
        # If the arguments are in the wrong order, `output` is a run, which must not be removed.
        is_export = (output / "model.json").is_file()
        remedy = "remove the folder or choose a different one" if is_export else "choose a different folder"
        raise UsageError(f"OUT {output}: already exists; {remedy}")
    with signals.importing_paddle():
        from paddle_resnet.machine import compat, gpus

        compat.check_version()
        gpus.warn_of_cpu_build()
        from paddle_resnet.serving import inference, model_card, networks, onnx_writer
    if verify is not None and precision == "float16" and inference.resolve_device("auto") == "cpu":
        raise UsageError(
            f"--verify {verify}: --precision float16 requires a GPU, and Paddle cannot use one; remove --verify, or "
            "export on a machine with a GPU"
        )

    checkpoint = networks.resolve(checkpoint)
    # If the folder contains no parameters, `read` is empty and load_checkpoint raises an error.
    read = [("CHECKPOINT", path.parent) for path in Path(checkpoint).glob("*.pdparams")]
    read += [("the data set", root) for root in (verify, calibration and calibration.image_root) if root]
    outputs.claim(folders={"OUT": output}, protected=read)
    network = networks.load_checkpoint(checkpoint, "cpu", uint8, model_arch_name, precision=precision)
    int8_flag = "--int8" if int8 else "--onnx for a checkpoint trained with --qat"
    if onnx and network.args.qat:
        int8 = int8 or "onnxruntime"
    if safetensors and network.args.qat:
        raise UsageError(
            f"--safetensors: {checkpoint} was trained with --qat, and the file cannot contain its quantization; remove "
            "--safetensors"
        )
    if int8 and precision == "float16":
        raise UsageError(f"--precision float16: not supported with {int8_flag}; remove one of the flags")
    if int8 and network.args.qat and calibration:
        raise UsageError(
            f"--calibrate {calibration.image_root}: {checkpoint} already has activation ranges from --qat; remove "
            "--calibrate"
        )
    if int8 and not network.args.qat and not calibration:
        raise UsageError("--int8: requires training images to determine activation ranges; add --calibrate IMAGE_ROOT")
    for package in ("onnx", "onnxruntime") if onnx else ():
        onnx_writer.require(package)
    if temperature is not None and network.args.multi_label:
        raise UsageError(f"--temperature {temperature}: not supported for multi-label networks; remove the flag")
    original, tempered = None, {}
    if temperature is not None:
        original = networks.load_checkpoint(checkpoint, model_arch_name=model_arch_name)
        original_score, tempered["temperature"] = _fit_temperature(original, verify, allow_outside)
        network = networks.load_checkpoint(checkpoint, "cpu", uint8, model_arch_name, precision=precision, **tempered)
    try:
        with _partial_folder(output) as partial:
            description = network.description | {"files": _write_paddle(network, partial)}
            if int8 or (onnx and precision == "float16"):
                folded = networks.load_checkpoint(checkpoint, "cpu", uint8, model_arch_name, fold=True, **tempered)
                if int8:
                    onnx_files = _write_int8(folded, partial, int8, calibration)
                else:
                    folded.description["precision"] = precision
                    onnx_files = _write_onnx(folded, partial, tolerance=HALF_PROBABILITY_TOLERANCE)
            else:
                onnx_files = _write_onnx(network, partial) if onnx else {}
            description["files"] |= onnx_files
            if safetensors:
                float32 = networks.load_checkpoint(checkpoint, model_arch_name=model_arch_name, **tempered)
                description["files"] |= _write_safetensors(float32, partial)
            _write_texts(description, partial)
            entry = registered(network.args.model_arch_name)
            card = model_card.text(description, network.meta, entry and entry.timm, int8)
            (partial / "README.md").write_text(card, encoding="utf-8")
            if verify is not None:
                float32 = networks.load_checkpoint(checkpoint, model_arch_name=model_arch_name, **tempered)
                device = "gpu" if precision == "float16" else "cpu"
                score = _verify(float32, partial, verify, device, allow_outside)
                if original is not None:
                    _check_temperature(score, original_score, **tempered)
                    float32, score = original, original_score
                options = {"model_arch_name": model_arch_name, "as_evaluated": True}
                _verify_recorded(
                    *(float32, score, verify, lambda: networks.load_checkpoint(checkpoint, **options), allow_outside)
                )
            if triton:
                _write_triton(network.description, partial)
    except OSError as e:
        remedy = "free disk space, or choose a different folder"
        raise UsageError(f"{output}: cannot be written ({e.strerror}); {remedy}") from e
    return description


@contextlib.contextmanager
def _partial_folder(output):
    """Create .NAME.partial/NAME next to the output, yield it for writing, and move it to the output path when the
    export is complete. If an export is killed, the next export to the same output removes the incomplete files. A lock
    prevents concurrent exports to the same output.

    Raises:
        UsageError: another export is writing to the same output.
        OSError: the folder cannot be written.
    """
    temporary = output.with_name(f".{output.name}.partial")
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        with locks.held(temporary / ".lock", output, logger.warn):
            shutil.rmtree(temporary / output.name, ignore_errors=True)
            with files.written(output, temporary / output.name, sync=True) as partial:
                partial.mkdir()
                yield partial
            files.fsync(output.parent)
    finally:
        with contextlib.suppress(OSError):  # removal fails if another process is writing to the folder
            temporary.rmdir()


def _write_paddle(network, folder):
    """Write the two files for Paddle Inference, and return their entries for model.json."""
    from paddle import static

    from paddle_resnet.checkpoints import folders
    from paddle_resnet.serving import inference

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
        model.name: folders.write_file(model, lambda file: file.write(graph.serialize(program))),
        weights.name: folders.write_file(weights, lambda file: file.write(parameters)),
    }


def _write_texts(description, folder):
    from paddle_resnet.serving import inference, preprocessing

    text = json.dumps(description, indent=1, ensure_ascii=False) + "\n"
    # A class name may contain line breaks, or lone surrogates for bytes that are not valid UTF-8.
    (folder / f"{inference.NAME}.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    labels = "".join(f"{printable(name)}\n" for name in description["classes"])
    (folder / "labels.txt").write_text(labels, encoding="utf-8")
    shutil.copyfile(preprocessing.__file__, folder / "preprocess.py")


def _write_int8(network, folder, engine, calibration):
    """Quantize a network in place, write model.onnx, and return its entry for model.json. The BN layers of the network
    are already folded into the convolutions. A network trained with --qat is already quantized, and its quantized
    weights do not change."""
    from paddle_resnet.components import quantization
    from paddle_resnet.serving.calibration import WEIGHT_BITS, quantize

    bits = 8 if network.args.qat else WEIGHT_BITS[engine]
    network.description["int8"] = {"engine": engine, "weight_bits": bits}
    source = "ranges from --qat"
    if not network.args.qat:
        sample = quantize(network, bits, *calibration)
        network.description["int8"]["calibration"] = sample._asdict()
        source = f"ranges from {_sample_text(network.description)}"
    quantization.use_levels_of(engine, network.program, bits)
    logger.info(f"model.onnx: INT8 for {engine}, {source}")
    entry = _write_onnx(network, folder, engine, INT8_PROBABILITY_TOLERANCE)
    if engine == "onnxruntime":
        _report_speed(network, folder)
    return entry


def _report_speed(network, folder):
    """Measure the speed of model.onnx relative to the same network in float32, and warn if INT8 is slower."""
    from paddle_resnet.serving import inference, onnx_writer

    description = {name: value for name, value in network.description.items() if name != "int8"}
    ends = [network.images], [network.probabilities]
    proto = onnx_writer.to_onnx(network.program, *ends, network.parameter, json.dumps(description))
    path = folder / f"{inference.NAME}.onnx"
    ratio = _speed_ratio(inference.open_onnx(path, "cpu"), inference.load_onnx(proto.SerializeToString(), path, "cpu"))
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


def _sample_text(description):
    """Describe the calibration images of an INT8 model."""
    sample, classes = description["int8"]["calibration"], description["output"]["shape"][1]
    images = f"{sample['images']} of {sample['available']} training images"
    return f"{images}, which contain {sample['classes']} of {classes} classes" if sample["classes"] else images


def _write_onnx(network, folder, engine=None, tolerance=PROBABILITY_TOLERANCE):
    """Write model.onnx, compare it with the network on random images, and return its entry for model.json. For
    `engine` and UsageError, see onnx_writer.to_onnx. Raises RunError if a probability differs by more than
    `tolerance`."""
    from paddle_resnet.checkpoints import folders
    from paddle_resnet.serving import inference, onnx_writer

    ends, text = ([network.images], [network.probabilities]), json.dumps(network.description)
    proto = onnx_writer.to_onnx(network.program, *ends, network.parameter, text, engine)
    if network.description["precision"] == "float16":
        proto = onnx_writer.to_float16(proto)
    path = folder / f"{inference.NAME}.onnx"
    entry = folders.write_file(path, lambda file: file.write(proto.SerializeToString()))
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


def _write_safetensors(network, folder):
    """Write model.safetensors, and return its entry for model.json."""
    from paddle_resnet.checkpoints import conversion, folders, foreign_files, foreign_names
    from paddle_resnet.serving import inference

    own = conversion.parameters(network.args.model_arch_name, network.args.num_of_class)
    arrays = {name: network.parameter(parameter.variable).astype(np.float32) for name, parameter in own.items()}
    entry = registered(network.args.model_arch_name)
    if entry is not None and entry.timm is not None:
        arrays = foreign_names.to_timm(entry.module, arrays, own)
        metadata = {"format": "pt", "network": f"timm.{entry.timm}"}
    else:
        metadata = {"format": "np", "network": f"paddle_resnet.{network.description['arch']}"}
    path = folder / f"{inference.NAME}.safetensors"
    return {path.name: folders.write_file(path, lambda file: foreign_files.write_safetensors(file, arrays, metadata))}


def _fit_temperature(network, image_root, allow_outside=False):
    """Fit a temperature to the validation images, and log its effect.

    Args:
        network: the checkpoint's Network, which takes normalized images as input.
        image_root, allow_outside: see _verify.
    Returns:
        (result of _score, confidence.Temperature).
    Raises:
        UsageError: a logit is not finite, no temperature minimizes the loss, or _score fails.
        RunError: see _score.
    """
    batches = []
    score = _score(network, network.model(logits=True), image_root, allow_outside=allow_outside, keep=batches.append)
    logits, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    if not np.isfinite(logits).all():
        raise UsageError(
            "--temperature auto: the network has logits that are not finite; choose a different checkpoint"
        )
    fitted = confidence.fit_temperature(logits, labels[:, 0])
    if fitted is None:
        lowest, highest = confidence.RANGE
        raise UsageError(
            f"--temperature auto: no temperature from {lowest:g} to {highest:g} minimizes the loss of the "
            f"{score['images']} validation images in {image_root}, for example because all of them are classified "
            "correctly; remove the flag, or use more validation images"
        )
    logger.info(
        f"temperature {fitted.value:.6g}, from {fitted.images} validation images: ECE {fitted.ece_before:.6f} before, "
        f"{fitted.ece_after:.6f} after ({fitted.bins} bins); loss {fitted.loss_before:.7g} before, "
        f"{fitted.loss_after:.7g} after"
    )
    return score, fitted


def _check_temperature(score, original_score, temperature):
    """Raise RunError if the checkpoint's network with the temperature in its parameters classifies differently than the
    original network, or if its loss differs from the expected loss (temperature.loss_after)."""
    expected = original_score | {"loss": temperature.loss_after}
    remedy = "set the network's attribute `last` to the layer that returns the logits"
    _check_agreement("the network with the temperature", score, "the checkpoint's network", expected, remedy)


def _verify(network, folder, image_root, device, allow_outside=False):
    """Evaluate the checkpoint and the exported networks on all validation images, and compare the results. The
    checkpoint and model.onnx run on the CPU; model.onnx runs in onnxruntime and, if it is installed, in OpenVINO.

    Args:
        network: the checkpoint's Network, which takes normalized images as input.
        folder: folder with the exported networks.
        image_root: folder of the data set.
        device: device on which Paddle Inference runs, "cpu" or "gpu".
        allow_outside: whether file lists may contain files outside image_root.
    Returns:
        result of _score for the checkpoint.
    Raises:
        UsageError: an exported network cannot be opened, or see _score.
        RunError: the networks disagree, or see _score.
    """
    from paddle_resnet.serving import inference

    models = [network.model(logits=True), inference.open_paddle(folder, device, logits=True)]
    if (file := folder / f"{inference.NAME}.onnx").exists():
        models.append(inference.open_onnx(file, "cpu", logits=True))
        if importlib.util.find_spec("openvino") is not None:
            models.append(inference.open_openvino(file, models[-1]))
    expected, *others = (_score(network, model, image_root, allow_outside=allow_outside) for model in models)
    for model, score in zip(models, (expected, *others), strict=True):
        logger.info(f"{model.engine}: {_metric_text(score)}, loss {score['loss']:.7g}, {score['images']} images")
    remedy = "use a different version of the inference engine"
    for model, score in zip(models[1:], others, strict=True):
        kind = "--qat" if network.args.qat and model.precision != "float16" else model.precision
        if kind == "float32":
            _check_agreement(model.engine, score, "the checkpoint's network", expected, remedy)
        else:
            _check_top1(model, kind, score, expected)
    return expected


def _verify_recorded(network, score, image_root, load_as_evaluated, allow_outside=False):
    """Log the evaluation recorded in a checkpoint and, if it can be repeated, compare it with its repetition.

    Args:
        network: the checkpoint's Network.
        score: result of _verify.
        image_root, allow_outside: see _verify.
        load_as_evaluated: function that returns the Network in the form of the run's evaluations.
    Raises:
        UsageError, RunError: see _score.
        RunError: the evaluations disagree.
    """
    from paddle_resnet.native import build as native

    recorded = network.meta["evaluated"]
    if not recorded:
        return logger.info("recorded evaluation: none, so only the exported networks were compared with the checkpoint")
    decoder = {"cpu": "a CPU", "gpu": "a GPU"}.get(network.meta["arguments"].get("dali_device"), "an unknown device")
    loss = "not finite" if recorded["loss"] is None else f"{recorded['loss']:.7g}"
    text = f"recorded evaluation: {_metric_text(recorded)}, loss {loss}, images decoded on {decoder}"
    if obstacle := _obstacle(network, score["images"]):
        return logger.info(f"{text}; not compared, because {obstacle}")
    model, options = network.model(logits=True), {"as_evaluated": True, "allow_outside": allow_outside}
    if network.args.tta != "none" or _is_half(network):
        score = _score(network, model, image_root, **options)
    if network.args.qat:
        try:
            exact = load_as_evaluated()
        except native.Unavailable as e:
            return logger.info(f"{text}; not compared, because custom kernels, which --qat requires, are missing ({e})")
        repeated = _score(exact, exact.model(logits=True), image_root, **options)
        _check_top1(model, "--qat", score, repeated)
        score = repeated | {"ties": 0}  # the repetition rounds exactly as the run did
    losses = [score["loss"], *([] if "cpu" in network.meta else [score["clipped_loss"]])]
    score = score | {"loss": min(losses, key=lambda loss: abs(loss - recorded["loss"]))}
    if "map" in recorded:  # the recorded evaluation has no number of correct decisions
        reference = score | {"loss": recorded["loss"], "map": recorded["map"]}
    else:
        reference = {"correct": round(recorded["top1"] * recorded["images"]), "ties": 0, "loss": recorded["loss"]}
    remedy = "check that IMAGE_ROOT is the data set of the training run"
    _check_agreement("the checkpoint's network", score, "its recorded evaluation", reference, remedy)
    logger.info(f"{text}; confirmed")


def _obstacle(network, images):
    """Return the reason why the recorded evaluation of a Network cannot be repeated on a number of images, or None."""
    import paddle

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


def _is_half(network):
    """Return whether the loader of the checkpoint's run rounded images to float16."""
    return bool(network.meta["arguments"].get("dali_output_fp16"))


def _score(network, model, image_root, as_evaluated=False, allow_outside=False, keep=None):
    """Evaluate a Model that also returns logits. Return {"images", "correct", "ties" (images whose two largest
    probabilities differ by less than TIE, QAT_TIE or HALF_TIE, depending on the model), "loss", "clipped_loss"
    (loss with EARLIER_CLIP)}.

    For a multi-label network, "correct" and "ties" count pairs of image and class, whose probability is compared with
    the threshold, and there are also "decisions" (number of pairs), "map", and "map_ties": by how much mAP can change
    if images whose probabilities differ by less than this limit exchange their places.

    Args:
        network: the checkpoint's Network.
        model: Model to evaluate.
        image_root, allow_outside: see _verify.
        as_evaluated: whether to repeat the evaluation of the checkpoint's run, with its --batch-size,
            --dali-output-fp16 and --tta; if False, images are not rounded to float16 and not mirrored.
        keep: function that is called with (logits [N, classes], labels [N, 1]) of each batch, or None.
    Raises:
        UsageError: the data set cannot be used.
        RunError: the model's probabilities are not the softmax or, if multi-label, the sigmoid of its logits.
    """
    from paddle_resnet import dali
    from paddle_resnet.checkpoints import restore
    from paddle_resnet.serving import inference

    recorded, description = network.args, model.description
    args = inference.loader_args(description, recorded.batch_size if as_evaluated else min(32, recorded.batch_size))
    args.set(
        "internal",
        image_root=str(image_root),
        allow_outside=allow_outside,
        data_format="auto" if recorded.multi_label else layout.detect(str(image_root), Mode.EVAL),
        label_offset=recorded.label_offset,
        multi_label=recorded.multi_label,
        num_of_class=recorded.num_of_class,
        dali_output_fp16=as_evaluated and _is_half(network),
    )
    mirrors = as_evaluated and recorded.tta == "flip"
    width_axis = 3 if description["input"]["layout"] == "NCHW" else 2
    tie = HALF_TIE if model.precision == "float16" else QAT_TIE if recorded.qat else TIE
    trained = restore.recorded_classes(network.meta) or classes.numbers(args.num_of_class)
    meter = ScoreMeter(args.num_of_class)
    losses, correct, ties = np.zeros((0, 2)), 0, 0
    for (batch,) in dali.build_dataloader(args, Mode.EVAL, trained=trained):
        images, labels = np.array(batch["data"]).astype(description["input"]["dtype"]), np.array(batch["label"])
        if mirrors:
            images = np.concatenate([images, np.flip(images, width_axis)])
        probabilities, logits = model.outputs(images)
        expected = label_metrics.probabilities(logits) if args.multi_label else np.exp(_log_softmax(logits))
        if not np.allclose(probabilities, expected, rtol=0, atol=PROBABILITY_TOLERANCE):
            function = "sigmoid" if args.multi_label else "softmax"
            raise RunError(
                f"--verify: the probabilities of {model.engine} differ from the {function} of its logits by up to "
                f"{np.abs(probabilities - expected).max():.2g}, and nothing was written; use a different "
                "version of the engine or a different checkpoint"
            )
        if keep is not None:
            keep((logits, labels))
        if args.multi_label:
            if mirrors:
                expected = np.split(expected, 2)[0] / 2 + np.split(expected, 2)[1] / 2
                logits = _mirrored_logits(logits)
            meter.update(np.hstack([logits, labels]).astype(np.float32), len(labels))
            losses = np.concatenate([losses, np.repeat(_binary_loss(logits, labels), 2, axis=1)])
            thresholds = np.array(description["multi_label"]["thresholds"])
            correct += np.count_nonzero((expected >= thresholds) == (labels > 0.5))
            ties += np.count_nonzero(np.abs(expected - thresholds) < tie)
            continue
        if mirrors:  # the logarithms of the average probabilities replace the logits, as in the evaluation
            logits = np.logaddexp(*np.split(_log_softmax(logits), 2)) - np.log(2)
        of_label = [np.take_along_axis(_log_softmax(logits, clip), labels, axis=1) for clip in (np.inf, EARLIER_CLIP)]
        losses = np.concatenate([losses, -np.hstack(of_label)])
        correct += np.count_nonzero(logits.argmax(axis=1) == labels[:, 0])
        # Add a class with probability 0, so that a network with one class also has two probabilities to compare.
        ranked = np.sort(np.pad(np.exp(_log_softmax(logits)), [(0, 0), (1, 0)]), axis=1)
        second, first = ranked[:, -2:].T
        ties += np.count_nonzero(first - second < tie)
    loss, clipped_loss = losses.mean(axis=0)
    score = {"images": len(losses), "correct": correct, "ties": ties, "loss": loss, "clipped_loss": clipped_loss}
    if args.multi_label:
        logits, labels = np.split(meter.rows(), 2, axis=1)
        scores, labels = label_metrics.probabilities(logits), labels > 0.5
        shifted = (scores + shift * labels for shift in (-tie, 0, tie))
        precisions = (label_metrics.average_precisions(labels, values) for values in shifted)
        low, mean, high = map(label_metrics.mean_average_precision, precisions)
        score |= {"map": mean, "map_ties": max(mean - low, high - mean), "decisions": len(losses) * args.num_of_class}
    return score


def _binary_loss(logits, labels):
    """Return the binary cross entropy of each image, summed over its classes, float64 [N, 1]."""
    logits = logits.astype(np.float64)
    return (np.logaddexp(0, logits) - logits * labels).sum(axis=1, keepdims=True)


def _mirrored_logits(logits):
    """Return the logits of the mean probabilities of images and their mirror images, float64 [N, classes]."""
    logits = logits.astype(np.float64)
    means = [np.logaddexp(*np.split(-np.logaddexp(0, sign * logits), 2)) for sign in (-1, 1)]
    return means[0] - means[1]


def _metric_text(score):
    """Return "mAP X" or "top1 X" for a result of _score or a recorded evaluation."""
    if "map" in score:
        return f"mAP {score['map']:.6g}"
    return f"top1 {score['top1'] if 'top1' in score else score['correct'] / score['images']:.6g}"


def _log_softmax(logits, clip=np.inf):
    """Return log probabilities, float64 [N, classes], computed without underflow. Logits below the row's maximum minus
    `clip` are raised to this limit."""
    logits = logits.astype(np.float64)
    logits = np.maximum(logits - logits.max(axis=1, keepdims=True), -clip)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _check_agreement(name, score, reference_name, reference, remedy):
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
        sample = model.description["int8"]["calibration"]
        source = f"; its activation ranges come from {_sample_text(model.description)}"
        remedy = remedy.format(more="use more --calibration-images, or " * (sample["images"] < sample["available"]))
    raise RunError(
        f"--verify: {model.engine} ({kind}) classifies {score['correct']} of {images} {counted} correctly, but the "
        f"checkpoint's network classifies {reference['correct']} (tolerance {tolerance:.1%} of the {counted}){source}, "
        f"and nothing was written; {remedy}"
    )


def _write_triton(description, folder):
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


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the exit code: 0 for success, 1 if an exported network differs from the checkpoint;
    for other errors, see exit_codes.of. The output is kept only if the export succeeds."""
    parser = Parser(
        prog="export",
        description="Export a checkpoint for inference: the network, its preprocessing and its class names.",
        examples=(
            ("export the best checkpoint of a run", "output/ResNet50 exported"),
            (
                "also write and check an ONNX file",
                "output/ResNet50 exported --onnx --verify DIR",
            ),
            (
                "write an INT8 ONNX file",
                "output/ResNet50 exported --int8 --calibrate DIR --verify DIR",
            ),
        ),
        main={
            "What to export": ("checkpoint", "output", "--model-arch-name"),
            "What to write": ("--onnx", "--safetensors", "--triton"),
            "How to compute": ("--precision", "--uint8", "--int8", "--calibrate", "--temperature"),
            "How to check the export": ("--verify",),
        },
    )
    parser.add_argument(
        "checkpoint",
        type=files.argument,
        metavar="CHECKPOINT",
        help="checkpoint folder, or run folder, such as output/ResNet50; of a run folder, the best checkpoint or, if "
        "there is none, the newest at the end of an epoch",
    )
    parser.add_argument("output", type=files.argument, metavar="OUT", help="folder to create")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx")
    parser.add_argument(
        "--verify",
        type=files.argument,
        metavar="IMAGE_ROOT",
        help="data set on which to compare exports with the checkpoint",
    )
    parser.add_argument(
        "--temperature",
        choices=["auto"],
        help="divide the logits by the temperature that minimizes the loss on the validation images of --verify, so "
        "that probabilities match accuracies; the most probable class does not change",
    )
    parser.add_argument(
        "--uint8",
        action="store_true",
        help="make the input uint8 [N, H, W, 3]; the network then normalizes it",
    )
    parser.add_argument(
        "--precision",
        choices=["float32", "float16"],
        default="float32",
        help="precision of the network; the types of input and output do not change, and Paddle runs a float16 network "
        "only on a GPU",
    )
    parser.add_argument("--int8", action="store_true", help="quantize model.onnx; implies --onnx")
    parser.add_argument(
        "--calibrate",
        type=files.argument,
        metavar="IMAGE_ROOT",
        help="data set whose training images determine activation ranges",
    )
    defaults = Calibration._field_defaults
    parser.add_argument("--calibration-method", type=_check_calibration_method, help=argparse.SUPPRESS)
    parser.add_argument(
        "--calibration-images",
        type=numbers.integer(1),
        metavar="N",
        help=f"maximum number of calibration images (default: {defaults['images']})",
    )
    parser.add_argument(
        "--allow-outside",
        action="store_true",
        help="accept files outside the folders of --verify and --calibrate in the file lists of these data sets",
    )
    parser.add_argument(
        "--int8-engine",
        choices=["onnxruntime", "tensorrt"],
        help="engine that runs the INT8 model; for tensorrt, all zero points are 0 (default: onnxruntime)",
    )
    parser.add_argument(
        "--safetensors",
        action="store_true",
        help="also write model.safetensors, with the parameter names of timm if timm has the network",
    )
    parser.add_argument("--triton", action="store_true", help="also write triton/, a Triton model repository")
    parser.add_argument(
        "--model-arch-name",
        metavar="FILE.py:NAME",
        help="your own network; required if the checkpoint's network is defined in your own Python file",
    )
    return exit_codes.of(program("export"), lambda: _main(parser.parse_args(argv)))


def _check_calibration_method(method):
    """Check the value of --calibration-method, a flag of version 0.1.0."""
    if method != "percentile":
        raise argparse.ArgumentTypeError(f"{method!r} is not supported in version 0.2.0 or later; remove the flag")


def _main(args: argparse.Namespace):
    chosen = {} if args.calibration_images is None else {"images": args.calibration_images}
    for name in ("calibrate", "int8_engine"):
        if getattr(args, name) is not None and not args.int8:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: requires --int8; add it")
    if chosen and args.calibrate is None:
        raise UsageError(f"--calibration-images {args.calibration_images}: requires --calibrate IMAGE_ROOT; add it")
    calibration = (
        None if args.calibrate is None else Calibration(args.calibrate, **chosen, allow_outside=args.allow_outside)
    )
    names = ("onnx", "verify", "uint8", "triton", "model_arch_name", "precision", "allow_outside", "temperature")
    flags = {name: getattr(args, name) for name in (*names, "safetensors")}
    int8 = (args.int8_engine or "onnxruntime") if args.int8 else None
    description = export(args.checkpoint, args.output, **flags, int8=int8, calibration=calibration)
    outputs, named = description["output"]["shape"][1], len(description["classes"])
    classes = f"{outputs} classes" + (f", {named} with names" if named < outputs else "")
    print(printable(f"{args.output}: {description['arch']}, {classes}, images {description['input']['shape']}"))


if __name__ == "__main__":
    sys.exit(main())
