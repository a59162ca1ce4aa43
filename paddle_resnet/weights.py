"""Convert weights from other projects to a checkpoint: `python -m paddle_resnet.weights FILE --output DIR`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import paddle_resnet  # noqa: F401  imported before Paddle, because it sets environment variables for Paddle
from paddle_resnet.checkpoints import published
from paddle_resnet.checkpoints.conversion import convert
from paddle_resnet.data import classes, layout
from paddle_resnet.settings import parsing
from paddle_resnet.settings.declarations import of_kinds
from paddle_resnet.settings.values import flag_name
from paddle_resnet.utils import exit_codes, files, logger
from paddle_resnet.utils.errors import UsageError, program
from paddle_resnet.utils.mode import Mode

EVALUATION_BATCH = 32


def evaluate(checkpoint: str | Path, image_root: str | Path, device: str = "auto") -> dict[str, Any]:
    """Evaluate a checkpoint on the validation images of a data set, in float32.

    Args:
        checkpoint: folder that convert() has written.
        image_root: folder of the data set (--image-root). If the checkpoint has class names, class folders are matched
            by name, and some classes may be missing. In other data formats, the labels must be those of the checkpoint.
        device: "auto", "gpu" or "cpu".
    Returns:
        {"images", "classes" (number of classes with images), "top1", "top5"}.
    Raises:
        UsageError: the checkpoint (see networks.load_checkpoint), the data set or the device cannot be used.
    """
    from paddle_resnet import dali
    from paddle_resnet.checkpoints import restore
    from paddle_resnet.serving import inference, networks

    device = inference.resolve_device(device)
    network = networks.load_checkpoint(checkpoint, device)
    model = network.model(logits=True)
    args = inference.loader_args(model.description, EVALUATION_BATCH, device)
    data_format = layout.detect(str(image_root), Mode.EVAL)
    args.set("internal", image_root=str(image_root), num_of_class=network.args.num_of_class, data_format=data_format)
    trained = restore.recorded_classes(network.meta) or classes.numbers(args.num_of_class)
    images, classes_seen, top1, top5 = 0, set(), 0, 0
    loader = dali.build_dataloader(args, Mode.EVAL, trained=trained)
    for (batch,) in loader:
        labels = np.array(batch["label"])
        _, logits = model.outputs(np.array(batch["data"]))
        best = np.argsort(-logits, axis=1, kind="stable")[:, :5] == labels
        top1, top5 = top1 + best[:, 0].sum(), top5 + best.sum()
        classes_seen.update(labels[:, 0].tolist())
        images += len(labels)
    return {"images": images, "classes": len(classes_seen), "top1": float(top1 / images), "top5": float(top5 / images)}


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the exit code (see exit_codes.of)."""
    names = ", ".join(published.PACKAGED)
    parser = parsing.ToolParser(
        prog="weights",
        description="Convert weights from other projects to a checkpoint.",
        examples=(("convert weights of torchvision or timm", "resnet50.pth --output weights/resnet50"),),
        epilog=f"The preprocessing flags of {program('train')}, such as --crop-size, override those of the published "
        "model or of the network.",
    )
    parser.add_argument(
        "file",
        type=files.argument,
        metavar="FILE|NAME",
        help=f".pth, .safetensors or .pdparams file, or one of {names}",
    )
    parser.add_argument("--arch", metavar="NAME", help="name of the network, as for --model-arch-name")
    parser.add_argument(
        "--source",
        metavar="LIBRARY.NETWORK",
        help="network that the weights were trained with, such as torchvision.resnet50 or timm.resnet50; required if "
        "other networks have the same tensor names and shapes",
    )
    parser.add_argument("--output", type=files.argument, required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--verify", type=files.argument, metavar="IMAGE_ROOT", help="data set on which to evaluate the checkpoint"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="list all tensors that do not match the network, not only the first five"
    )
    return exit_codes.of(program("weights"), lambda: _main(*parser.parse_known_args(argv)))


def _main(args: argparse.Namespace, flags):
    preprocessing = parsing.parse(flags)
    if other := [flag_name(name) for name in preprocessing if name not in of_kinds("preprocessing")]:
        raise UsageError(
            f"{', '.join(other[:5])}: not preprocessing flags, and a conversion supports no other flags of "
            f"{program('train')}; remove them"
        )
    if args.verify is not None:
        layout.check_split("--verify", args.verify, Mode.EVAL)
    meta = convert(args.file, args.output, args.arch, preprocessing, args.verbose, args.source)
    classes = f"{meta['arguments']['num_of_class']} classes" if meta["has_classifier"] else "no classifier"
    arch, license = meta["arguments"]["model_arch_name"], meta["license"] or "unknown"
    logger.info(f"{args.output}: {arch}, {classes}, license {license}")
    if args.verify is not None:
        result = evaluate(args.output, args.verify)
        logger.info(
            f"{args.verify}: top1 {result['top1']:.4f}, top5 {result['top5']:.4f}, {result['images']} images of "
            f"{result['classes']} classes"
        )


if __name__ == "__main__":
    sys.exit(main())
