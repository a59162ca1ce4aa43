"""Export a checkpoint for Paddle Inference, ONNX, timm and Triton: `python -m paddle_resnet.export CHECKPOINT OUT`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import paddle_resnet  # noqa: F401  imported before Paddle, because it sets environment variables for Paddle
from paddle_resnet.data import layout
from paddle_resnet.models import registered, registered_name
from paddle_resnet.utils import exit_codes, files, locks, logger, numbers, outputs, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import UsageError, printable, program
from paddle_resnet.utils.mode import Mode


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
        from paddle_resnet.serving import (
            inference,
            int8_onnx,
            model_card,
            networks,
            onnx_writer,
            temperature_scaling,
            verification,
            writers,
        )
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
    load = load_original = functools.partial(networks.load_checkpoint, checkpoint, model_arch_name=model_arch_name)
    network = load(uint8=uint8, precision=precision)
    if safetensors and network.args.qat:
        raise UsageError(
            f"--safetensors: {checkpoint} was trained with --qat, and the file cannot contain its quantization; remove "
            "--safetensors"
        )
    int8 = _int8_engine(checkpoint, network.args.qat, onnx, int8, calibration, precision)
    for package in ("onnx", "onnxruntime") if onnx else ():
        onnx_writer.require(package)
    if temperature is not None and network.args.multi_label:
        raise UsageError(f"--temperature {temperature}: not supported for multi-label networks; remove the flag")
    original = None
    if temperature is not None:
        original = load()
        original_score, fitted = temperature_scaling.fit(original, verify, allow_outside)
        load = functools.partial(load, temperature=fitted)
        network = load(uint8=uint8, precision=precision)
    try:
        with _partial_folder(output) as partial:
            entries = writers.write_paddle(network, partial)
            if int8:
                entries |= int8_onnx.write(load(uint8=uint8, fold=True), partial, int8, calibration)
            elif onnx:
                source = network
                if precision == "float16":  # write_onnx converts a float32 network
                    source = load(uint8=uint8, fold=True)
                    source.description["precision"] = precision
                entries |= writers.write_onnx(source, partial)
            float32 = load() if safetensors or verify is not None else None
            if safetensors:
                entries |= writers.write_safetensors(float32, partial)
            description = network.description | {"files": entries}
            writers.write_texts(description, partial)
            entry = registered(network.args.model_arch_name)
            card = model_card.text(description, network.meta, entry and entry.timm, int8)
            (partial / "README.md").write_text(card, encoding="utf-8")
            if verify is not None:
                device = "gpu" if precision == "float16" else "cpu"
                score = verification.verify(float32, partial, verify, device, allow_outside)
                if original is not None:
                    temperature_scaling.check(score, original_score, fitted)
                    float32, score = original, original_score
                load_as_evaluated = functools.partial(load_original, as_evaluated=True)
                verification.verify_recorded(float32, score, verify, load_as_evaluated, allow_outside)
            if triton:
                writers.write_triton(network.description, partial)
    except OSError as e:
        remedy = "free disk space, or choose a different folder"
        raise UsageError(f"{output}: cannot be written ({e.strerror}); {remedy}") from e
    return description


def _int8_engine(checkpoint, is_qat, onnx, int8, calibration, precision):
    """Return the engine for which model.onnx is quantized, or None. `is_qat` states whether the checkpoint was trained
    with --qat. For the other arguments and for UsageError, see export."""
    flag = "--int8" if int8 else "--onnx for a checkpoint trained with --qat"
    if onnx and is_qat:
        int8 = int8 or "onnxruntime"
    if int8 and precision == "float16":
        raise UsageError(f"--precision float16: not supported with {flag}; remove one of the flags")
    if int8 and is_qat and calibration:
        raise UsageError(
            f"--calibrate {calibration.image_root}: {checkpoint} already has activation ranges from --qat; remove "
            "--calibrate"
        )
    if int8 and not is_qat and not calibration:
        raise UsageError("--int8: requires training images to determine activation ranges; add --calibrate IMAGE_ROOT")
    return int8


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


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the exit code: 0 for success, 1 if an exported network differs from the checkpoint;
    for other errors, see exit_codes.of. The output is kept only if the export succeeds."""
    parser = Parser(
        prog="export",
        description="Export a checkpoint for inference: the network, its preprocessing and its class names.",
        examples=(
            ("export the best checkpoint of a run", "output/ResNet50 exported"),
            ("also write and check an ONNX file", "output/ResNet50 exported --onnx --verify DIR"),
            ("write an INT8 ONNX file", "output/ResNet50 exported --int8 --calibrate DIR --verify DIR"),
        ),
        main={
            "What to export": ("checkpoint", "output", "--model-arch-name"),
            "What to write": ("--onnx", "--safetensors", "--triton"),
            "How to compute": ("--precision", "--uint8", "--int8", "--calibrate", "--temperature"),
            "How to check the export": ("--verify",),
        },
    )
    add = parser.add_argument
    add(
        "checkpoint",
        type=files.argument,
        metavar="CHECKPOINT",
        help="checkpoint folder, or run folder, such as output/ResNet50; of a run folder, the best checkpoint or, if "
        "there is none, the newest at the end of an epoch",
    )
    add("output", type=files.argument, metavar="OUT", help="folder to create")
    add("--onnx", action="store_true", help="also write model.onnx")
    add(
        "--verify",
        type=files.argument,
        metavar="IMAGE_ROOT",
        help="data set on which to compare exports with the checkpoint",
    )
    add(
        "--temperature",
        choices=["auto"],
        help="divide the logits by the temperature that minimizes the loss on the validation images of --verify, so "
        "that probabilities match accuracies; the most probable class does not change",
    )
    add("--uint8", action="store_true", help="make the input uint8 [N, H, W, 3]; the network then normalizes it")
    add(
        "--precision",
        choices=["float32", "float16"],
        default="float32",
        help="precision of the network; the types of input and output do not change, and Paddle runs a float16 network "
        "only on a GPU",
    )
    add("--int8", action="store_true", help="quantize model.onnx; implies --onnx")
    add(
        "--calibrate",
        type=files.argument,
        metavar="IMAGE_ROOT",
        help="data set whose training images determine activation ranges",
    )
    defaults = Calibration._field_defaults
    add("--calibration-method", type=_check_calibration_method, help=argparse.SUPPRESS)
    add(
        "--calibration-images",
        type=numbers.integer(1),
        metavar="N",
        help=f"maximum number of calibration images (default: {defaults['images']})",
    )
    add(
        "--allow-outside",
        action="store_true",
        help="accept files outside the folders of --verify and --calibrate in the file lists of these data sets",
    )
    add(
        "--int8-engine",
        choices=["onnxruntime", "tensorrt"],
        help="engine that runs the INT8 model; for tensorrt, all zero points are 0 (default: onnxruntime)",
    )
    add(
        "--safetensors",
        action="store_true",
        help="also write model.safetensors, with the parameter names of timm if timm has the network",
    )
    add("--triton", action="store_true", help="also write triton/, a Triton model repository")
    add(
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
