"""Export a checkpoint for Paddle Inference: `python -m paddle_resnet.export --help`."""

import argparse
import errno
import json
import sys
import tempfile
from pathlib import Path

import config
from utils.errors import UsageError

NAME = "model"  # of the files: model.pdmodel, model.pdiparams, model.json


def export(checkpoint, output):
    """Write the inference network: float32 parameters, no masks, no optimizer.

    Input "images" [N, 3, H, W], float32, normalised RGB. The network pads it itself if it was trained with a fourth
    channel. Output: probabilities [N, classes], float32. model.json has the class names and the preprocessing. The
    layout is NCHW, whatever the layout in training.

    Args:
        checkpoint: folder of a checkpoint of this program, at the end of an epoch.
        output: folder to make. It appears once it is complete.
    Returns:
        content of model.json.
    Raises:
        UsageError: the checkpoint does not exist, is damaged or is of the middle of an epoch; the output exists or
            cannot be written.
    """
    import paddle
    from paddle import static

    from paddle_resnet import compat

    compat.check_version()
    from paddle_resnet.checkpoints import folders, variables
    from paddle_resnet.models import build_model

    meta = _read_meta(checkpoint)
    try:
        args = config.from_dict(meta["arguments"])
    except UsageError as e:
        raise UsageError(f"{checkpoint} has impossible arguments in its meta.json: {e}") from e
    if f"{args.model_prefix}.pdparams" not in meta["files"]:
        raise UsageError(f"{checkpoint} is damaged: meta.json lists no {args.model_prefix}.pdparams: name another")
    args.data_layout = "NCHW"
    output = Path(output)
    if output.exists():
        raise UsageError(f"{output} exists: remove it or name another folder")

    paddle.enable_static()
    place = paddle.CPUPlace()
    exe = static.Executor(place)
    program, startup = static.Program(), static.Program()
    with static.scope_guard(static.Scope()):
        with static.program_guard(program, startup), paddle.utils.unique_name.guard():
            channels, *size = args.image_shape
            images = static.data("images", [None, 3, *size], dtype="float32")
            model = build_model(args)
            model.eval()
            probabilities = paddle.nn.functional.softmax(model(_pad_channels(images, channels)))
        exe.run(startup)
        variables.load(args, checkpoint, program, place)
        description = _describe(args, meta, images, probabilities)
        parameters = static.serialize_persistables([images], [probabilities], exe, program=program)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as beside:
                partial = Path(beside) / output.name
                static.save_inference_model(str(partial / NAME), [images], [probabilities], exe, program=program)
                # Paddle writes this file in C++ and ignores a full disk.
                if (partial / f"{NAME}.pdiparams").read_bytes() != parameters:
                    raise OSError(errno.EIO, f"{NAME}.pdiparams is incomplete")
                (partial / f"{NAME}.json").write_text(json.dumps(description, indent=1) + "\n")
                for path in (*partial.iterdir(), partial):
                    folders.fsync(path)
                partial.rename(output)
                folders.fsync(output.parent)
        except OSError as e:
            raise UsageError(f"{output} cannot be written ({e.strerror}): make room or name another folder") from e
    return description


def _read_meta(checkpoint):
    from paddle_resnet.checkpoints import folders

    if not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint} is not a folder: name a checkpoint, such as output/ResNet50/best")
    try:
        meta = folders.verify(checkpoint)
    except folders.DamagedError as e:
        raise UsageError(f"{checkpoint} is damaged: {e}: name another checkpoint") from e
    if meta["step"] is not None:
        raise UsageError(
            f"{checkpoint} was saved after {meta['step']} steps of epoch {meta['epoch']}, before the processes "
            "averaged their BN statistics: name a checkpoint of the end of an epoch"
        )
    return meta


def _pad_channels(images, channels):
    """Append zero channels, as the loader does for --image-shape 4,H,W."""
    import paddle

    # Not F.pad: its program crashes Paddle Inference 2.6 on a CPU.
    return paddle.concat([images, *[paddle.zeros_like(images[:, :1])] * (channels - 3)], axis=1)


def _describe(args, meta, images, probabilities):
    return {
        "arch": args.model_arch_name,
        "input": {"name": images.name, "shape": [None, *images.shape[1:]], "dtype": "float32", "color": "RGB"},
        "output": {"name": probabilities.name, "shape": [None, args.num_of_class], "values": "probabilities"},
        "preprocessing": {
            "resize_short": args.resize_short,
            "interp": args.interp,
            "center_crop": args.crop_size,
            "scale": args.normalize_scale,
            "mean": args.normalize_mean,
            "std": args.normalize_std,
        },
        "classes": meta["classes"],
        "epoch": meta["epoch"],
        "evaluated": meta["evaluated"] and {name: meta["evaluated"][name] for name in ("top1", "top5", "loss")},
    }


def main(argv=None):
    """Run and return the exit code: 0 done, 2 usage error or unusable checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m paddle_resnet.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", help="folder of a checkpoint, such as output/ResNet50/best")
    parser.add_argument("output", help=f"folder to make, with {NAME}.pdmodel, {NAME}.pdiparams and {NAME}.json")
    args = parser.parse_args(argv)
    try:
        description = export(args.checkpoint, args.output)
    except UsageError as e:
        print(f"paddle_resnet.export: error: {e}", file=sys.stderr)
        return 2
    found = description["arch"], len(description["classes"]), description["input"]["shape"]
    print("{}: {}, {} classes, images {}".format(args.output, *found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
