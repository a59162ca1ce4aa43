"""Export a checkpoint for Paddle Inference, ONNX and Triton: `python -m paddle_resnet.export --help`."""

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

import paddle_resnet  # noqa: F401  sets Paddle's environment, so before any import of Paddle
from utils import exit_codes, locks, logger, outputs, signals
from utils.errors import RunError, UsageError, printable

# --verify: how far an engine may be from the checkpoint. Two classes whose probabilities are closer than the tolerance
# are a tie, which rounding decides; only images with a tie at the top may count differently in top1. Losses are of the
# logits: probabilities below 1e-38 are zero, and some engines clip them earlier.
LOSS_TOLERANCE = 1e-4  # of the mean loss, relative where that is above 1
TIE = 1e-4
PROBABILITY_TOLERANCE = 1e-4
PADDLES_CLIP = 64  # Paddle's CPU kernels raise logits to the largest minus this, so that recorded losses may be lower
TRITON_MAX_BATCH = 64


def export(checkpoint, output, onnx=False, verify=None, uint8=False, triton=False):
    """Write the inference network: float32 parameters, no masks, no optimizer.

    The folder has model.pdmodel and model.pdiparams for Paddle Inference, model.json (input, output, preprocessing,
    classes), labels.txt (one class per line) and preprocess.py (preprocessing.py, which runs on its own).

    Args:
        checkpoint: as for inference.load_checkpoint.
        output: folder to make. It appears once it is complete.
        onnx: also write model.onnx, and compare it with the checkpoint on random images.
        verify: folder of a data set, whose validation images all that is written must score like the checkpoint; None
            for no such check.
        uint8: input "images" is uint8 [N, H, W, 3], and the network normalises it. Otherwise it is normalised float32
            [N, 3, H, W]. Output: probabilities [N, classes], float32. The layout of the network is NCHW, whatever the
            layout in training.
        triton: also write triton/, a model repository for Triton.
    Returns:
        content of model.json.
    Raises:
        UsageError: the checkpoint does not exist, is damaged or is of the middle of an epoch; the output exists or
            cannot be written; a package for ONNX is missing.
        RunError: what was written does not compute what the checkpoint computes. Nothing is left of it.
    """
    output = Path(output)
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; remove it or choose a different folder")
    with signals.postponed():
        from paddle_resnet import compat

        compat.check_version()
        from paddle_resnet import inference, onnx_writer
        from paddle_resnet.checkpoints import folders

    checkpoint = inference.resolve(checkpoint)
    read = [("CHECKPOINT", path.parent) for path in Path(checkpoint).glob("*.pdparams")]  # not a folder without any
    read += [] if verify is None else [("the data set", verify)]
    outputs.claim(folders={"OUT": output}, protected=read)
    for package in ("onnx", "onnxruntime") if onnx else ():
        onnx_writer.require(package)
    network = inference.load_checkpoint(checkpoint, uint8=uint8)
    try:
        with _partial_folder(output) as partial:
            description = network.description | {"files": _write_paddle(network, partial)}
            _write_texts(description, partial)
            if onnx:
                _write_onnx(network, partial)
            if verify is not None:
                _verify(inference.load_checkpoint(checkpoint), partial, verify)
            if triton:
                _write_triton(network.description, partial)
            for path in (*partial.rglob("*"), partial):
                folders.fsync(path)
            partial.rename(output)
            folders.fsync(output.parent)
    except OSError as e:
        raise UsageError(f"{output}: cannot be written ({e.strerror}); make room or choose a different folder") from e
    return description


@contextlib.contextmanager
def _partial_folder(output):
    """A new folder next to the output for incomplete files: .NAME.partial/NAME. It is removed at the end, or by the
    next export to the same place if this one is killed. A lock keeps other exports out.

    Raises:
        UsageError: another export is writing there.
        OSError: it cannot be written.
    """
    beside = output.with_name(f".{output.name}.partial")
    beside.mkdir(parents=True, exist_ok=True)
    try:
        with locks.held(beside / ".lock", output, logger.warn):
            shutil.rmtree(beside / output.name, ignore_errors=True)
            (beside / output.name).mkdir()
            try:
                yield beside / output.name
            finally:
                shutil.rmtree(beside / output.name, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):  # not empty: another process writes there
            beside.rmdir()


def _write_paddle(network, folder):
    """Write the two files of Paddle Inference; returns what model.json lists of them."""
    from paddle import static

    from paddle_resnet import inference
    from paddle_resnet.checkpoints import folders

    ends = [network.images], [network.probabilities]
    with static.scope_guard(network.scope):
        parameters = static.serialize_persistables(*ends, network.exe, program=network.program.clone())
    program = static.deserialize_program(static.serialize_program(*ends, program=network.program.clone()))
    block = program.global_block()
    # Paddle 2.6 appends a multiplication by 1, whose output has a name of its own.
    written, name = block.ops[-1].input("X")[0], network.probabilities.name
    if written != name:
        block._rename_var(name, "softmax")
        block._rename_var(written, name)
    program = program._remove_training_info()
    for op in program.global_block().ops:
        if op.has_attr("op_callstack"):  # it names paths of this machine
            op._remove_attr("op_callstack")
    # Written here, not by Paddle's function in C++, which ignores a full disk.
    model, weights = (folder / f"{inference.NAME}.{suffix}" for suffix in inference.SUFFIXES)
    return {
        model.name: folders.write_file(model, lambda file: file.write(program.desc.serialize_to_string())),
        weights.name: folders.write_file(weights, lambda file: file.write(parameters)),
    }


def _write_texts(description, folder):
    from paddle_resnet import inference, preprocessing

    text = json.dumps(description, indent=1, ensure_ascii=False) + "\n"
    # A name of a class may have bytes that are not UTF-8, as lone surrogates, or line breaks.
    (folder / f"{inference.NAME}.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    labels = "".join(f"{printable(name)}\n" for name in description["classes"])
    (folder / "labels.txt").write_text(labels, encoding="utf-8")
    shutil.copyfile(preprocessing.__file__, folder / "preprocess.py")


def _write_onnx(network, folder):
    from paddle_resnet import inference, onnx_writer

    ends = [network.images], [network.probabilities]
    proto = onnx_writer.to_onnx(network.program, *ends, network.parameter, json.dumps(network.description))
    path = folder / f"{inference.NAME}.onnx"
    path.write_bytes(proto.SerializeToString())
    taken = network.description["input"]
    images = np.random.RandomState(0).uniform(-2, 2, (2, *taken["shape"][1:]))
    images = images.astype("float32") if taken["dtype"] == "float32" else (images * 64 + 128).astype("uint8")
    expected, found = network.model().run(images), inference.open_onnx(path, "cpu").run(images)
    if not np.allclose(found, expected, rtol=0, atol=PROBABILITY_TOLERANCE):
        raise RunError(
            "model.onnx: its probabilities differ from those of the checkpoint by up to "
            f"{np.abs(found - expected).max():.2g} on random images (tolerance {PROBABILITY_TOLERANCE:g}); nothing was "
            "written; use a different version of onnxruntime"
        )


def _verify(network, folder, image_root):
    """Score all validation images by the checkpoint, on normalised images, and by what was written; on the CPU.

    Args:
        network: of the checkpoint, as evaluated.
        folder: what was written.
        image_root: folder of the data set.
    Raises:
        RunError: they disagree with each other, or with the recorded evaluation.
    """
    from paddle_resnet import inference

    models = [network.model(logits=True), inference.open_paddle(folder, "cpu", logits=True)]
    if (file := folder / f"{inference.NAME}.onnx").exists():
        models.append(inference.open_onnx(file, "cpu", logits=True))
    expected, *others = (_score(network, model, image_root) for model in models)
    for model, score in zip(models, (expected, *others), strict=True):
        logger.info(
            f"{model.engine}: top1 {score['correct'] / score['images']:.6g}, loss {score['loss']:.7g}, "
            f"{score['images']} images"
        )
    for model, score in zip(models[1:], others, strict=True):
        _refuse_disagreement(model.engine, score, "the checkpoint's network", expected)
    recorded = network.meta["evaluated"]
    # On a GPU the decoders are others, and convolutions are in TF32 or half precision.
    is_comparable = recorded and network.meta["arguments"].get("device") == "cpu"
    is_comparable = is_comparable and not recorded.get("not_finite")  # whose images the recorded loss omits
    if is_comparable and recorded.get("images") == expected["images"]:
        recorded = {"correct": round(recorded["top1"] * recorded["images"]), "ties": 0, "loss": recorded["loss"]}
        losses = expected["loss"], expected["clipped_loss"]
        expected["loss"] = min(losses, key=lambda loss: abs(loss - recorded["loss"]))
        _refuse_disagreement("the checkpoint's network", expected, "its recorded evaluation", recorded)


def _score(network, model, image_root):
    """{"images", "correct", "ties" (images where a second class is as probable, within TIE), "loss", "clipped_loss" (as
    Paddle computes it on a CPU)} of a Model with logits.

    Raises:
        RunError: its probabilities are not the softmax of its logits.
    """
    from paddle_resnet import dali, inference
    from paddle_resnet.data import listing
    from utils.mode import Mode

    args = inference.loader_args(model.description, min(32, network.args.batch_size))
    args.image_root, args.num_of_class = str(image_root), network.args.num_of_class
    args.data_format = listing.detect(args.image_root, Mode.EVAL)
    losses, correct, ties = np.zeros((0, 2)), 0, 0
    for (batch,) in dali.build_dataloader(args, Mode.EVAL):
        labels = np.array(batch["label"])
        probabilities, logits = model.outputs(np.array(batch["data"]).astype(model.description["input"]["dtype"]))
        of_label = [np.take_along_axis(_log_softmax(logits, clip), labels, axis=1) for clip in (np.inf, PADDLES_CLIP)]
        losses = np.concatenate([losses, -np.hstack(of_label)])
        expected = np.exp(_log_softmax(logits))
        if not np.allclose(probabilities, expected, rtol=0, atol=PROBABILITY_TOLERANCE):
            raise RunError(
                f"--verify: {model.engine}: its probabilities are not the softmax of its logits (up to "
                f"{np.abs(probabilities - expected).max():.2g} off); nothing was written; check the checkpoint and the "
                "version of the engine"
            )
        correct += np.count_nonzero(logits.argmax(axis=1) == labels[:, 0])
        second, first = np.sort(expected, axis=1)[:, -2:].T
        ties += np.count_nonzero(first - second < TIE)
    loss, clipped_loss = losses.mean(axis=0)
    return {"images": len(losses), "correct": correct, "ties": ties, "loss": loss, "clipped_loss": clipped_loss}


def _log_softmax(logits, clip=np.inf):
    """float64 [N, classes], without underflow; logits further below the largest than clip count as if they were not."""
    logits = logits.astype(np.float64)
    logits = np.maximum(logits - logits.max(axis=1, keepdims=True), -clip)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _refuse_disagreement(name, score, reference_name, reference):
    apart = abs(score["correct"] - reference["correct"])
    allowed = score["ties"] + reference["ties"]
    loss_apart = abs(score["loss"] - reference["loss"]) / max(1, abs(reference["loss"]))
    if apart > allowed or not loss_apart <= LOSS_TOLERANCE:
        raise RunError(
            f"--verify: {name} and {reference_name} disagree: {score['correct']} and {reference['correct']} of "
            f"{score['images']} images right ({allowed} ties allowed), loss {score['loss']:.7g} and "
            f"{reference['loss']:.7g} (tolerance {LOSS_TOLERANCE:g}); nothing was written; check that IMAGE_ROOT is "
            "the data set of the training run"
        )


def _write_triton(description, folder):
    """A model repository: triton/MODEL/config.pbtxt, triton/MODEL/1/ with the names that the backends want."""
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
    taken, given = description["input"], description["output"]
    dtype = {"float32": "TYPE_FP32", "uint8": "TYPE_UINT8"}[taken["dtype"]]
    return f"""name: "{name}"
backend: "{backend}"
max_batch_size: {TRITON_MAX_BATCH}
input [ {{ name: "{taken["name"]}" data_type: {dtype} dims: {taken["shape"][1:]} }} ]
output [
  {{ name: "{given["name"]}" data_type: TYPE_FP32 dims: {given["shape"][1:]} label_filename: "labels.txt" }}
]
dynamic_batching {{ }}
"""


def main(argv=None):
    """Run and return the exit code: 0 done, 1 what was written is wrong, 2 usage error or unusable checkpoint, 130
    interrupted; nothing is left in the last three cases."""
    parser = argparse.ArgumentParser(prog="python -m paddle_resnet.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint or run: output/ResNet50")
    parser.add_argument("output", metavar="OUT", help="folder to make")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx")
    parser.add_argument("--verify", metavar="IMAGE_ROOT", help="score the validation images by all that is written")
    parser.add_argument("--uint8", action="store_true", help="input: uint8 [N, H, W, 3]; the network normalises it")
    parser.add_argument("--triton", action="store_true", help="also write triton/, a model repository")
    return exit_codes.of("paddle_resnet.export", lambda: _main(parser.parse_args(argv)))


def _main(args):
    description = export(**vars(args))
    outputs, named = description["output"]["shape"][1], len(description["classes"])
    classes = f"{outputs} classes" + (f" of which {named} have names" if named < outputs else "")
    print(printable(f"{args.output}: {description['arch']}, {classes}, images {description['input']['shape']}"))


if __name__ == "__main__":
    sys.exit(main())
