"""Convert weights of other projects to a checkpoint: `python -m paddle_resnet.weights --help`."""

import argparse
import json
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np

import paddle_resnet  # noqa: F401  sets Paddle's environment, so it must precede any import of Paddle
from paddle_resnet.checkpoints import arrays, folders, foreign_files, foreign_names, published
from paddle_resnet.data import listing
from paddle_resnet.models import registered, registered_name
from paddle_resnet.settings import parsing
from paddle_resnet.settings.declarations import of_kinds
from paddle_resnet.settings.values import flag
from utils import exit_codes, logger, outputs, signals
from utils.errors import UsageError, printable
from utils.mode import Mode

IMAGENET_CLASSES = 1000
EVALUATION_BATCH = 32


def convert(source, output, arch=None, preprocessing=None, verbose=False):
    """Write a checkpoint with the weights from a file or from the installed package of a published model.

    Args:
        source: path of a file that foreign_files.read accepts, or a key of published.PACKAGED.
        output: folder to create. The folder appears only when all its files are complete.
        arch: value for --model-arch-name, or None to use the network of the published model.
        preprocessing: {attribute of a preprocessing flag: value}, or None to use the values of the published model.
            Unspecified flags have the network's defaults.
        verbose: whether error messages list all tensors that do not match the network.
    Returns:
        content of meta.json, without the entries for format, files and checksum.
    Raises:
        UsageError: the package is not installed; the file cannot be read or does not match the network; or the output
            exists or cannot be written.
    """
    output = Path(output)
    if os.path.lexists(output):
        raise UsageError(f"--output {output}: already exists; remove it or choose a different folder")
    path, digest, model = _find(str(source))
    if arch is None and model is None:
        raise UsageError(f"{source}: not a published model, so its network is unknown; set --arch")
    arch = registered_name(arch or model.arch)
    if model is not None and arch != model.arch:
        raise UsageError(f"--arch {arch}: {source} has weights of {model.arch}; remove --arch")
    outputs.claim(folders={"--output": output}, protected=[("FILE", path)])
    tensors = _read(path)
    with signals.deferred():
        from paddle_resnet.machine import compat

        compat.check_version()
    try:
        params, classes, projects = _match(arch, tensors)
    except foreign_names.MismatchError as e:
        hint = " (--verbose lists all tensors)" if e.lines and not verbose else ""
        message = f"{path}: {e}; set --arch to the network of the weights{hint}"
        raise UsageError(message, *(e.lines if verbose else [])) from e
    logger.info(printable(f"{path}: {len(params)} parameters of {arch}, with the names of {projects}"))
    values = {**(model.preprocessing if model else {}), **(preprocessing or {})}
    args = _settings(arch, classes, values)
    meta = _meta(args) | {
        "license": model and model.license,
        "source": {"file": path.name, "sha256": digest, "url": model and model.source},
    }
    prefix = args.model_prefix
    files = {f"{prefix}.pdparams": _pickled(params), f"{prefix}.pdopt": _pickled({})}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folders.commit(output.parent, output.name, files, meta)
    except OSError as e:
        raise UsageError(f"--output {output}: cannot be written ({e.strerror}); choose a different folder") from e
    return meta


def _find(source):
    """Return (path of the file, its sha256, Published or None)."""
    path = Path(source)
    if source in published.PACKAGED:
        path, package = published.installed_file(source), published.PACKAGED[source].package
        if path is None:
            raise UsageError(
                f"{source}: requires the package {package}; install it with {sys.executable} -m pip install {package}"
            )
    try:
        digest = published.sha256(path)
    except OSError as e:
        names = ", ".join(published.PACKAGED)
        raise UsageError(f"{source}: cannot be read ({e.strerror}); use an existing file, or one of {names}") from e
    claimed = published.claimed_hash(path)
    if claimed and not digest.startswith(claimed):
        raise UsageError(
            f"{path}: the sha256 begins with {digest[:8]} instead of {claimed}, as in the file's name; download "
            "it again, or rename it if it was changed intentionally"
        )
    return path, digest, published.HASHED.get(digest[:8])


def _read(path):
    try:
        return foreign_files.read(path)
    except arrays.UnreadableError as e:
        raise UsageError(f"{path}: cannot be read ({e}); save only the network's state_dict in it") from e


def _match(arch, tensors):
    """Return ({name of a variable: float32 array}, number of classes, names of the projects with these tensor names).

    Raises:
        UsageError: weights for this network cannot be converted.
        foreign_names.MismatchError: the tensors do not match the network.
    """
    network = registered(arch)
    family = network and network.module
    if family not in foreign_names.LAYOUTS:
        known = ", ".join(foreign_names.LAYOUTS)
        raise UsageError(f"--arch {arch}: weights of this network cannot be converted; use a network of {known}")
    classes = foreign_names.number_of_classes(family, tensors)
    params, projects = foreign_names.convert(family, tensors, _parameters(arch, classes))
    return params, classes, projects


def _parameters(arch, classes):
    import paddle
    from paddle import static

    from paddle_resnet.models import build_model

    paddle.enable_static()
    with static.program_guard(static.Program(), static.Program()), paddle.utils.unique_name.guard():
        return foreign_names.parameters(build_model(arch, classes, 3, "NCHW"))


def _settings(arch, classes, preprocessing):
    """Return the Settings to store in the checkpoint: the network, its preprocessing, and default values."""
    side = preprocessing.get("crop_size", registered(arch).image_size)
    network = {"model_arch_name": arch, "num_of_class": classes, "image_shape": [3, side, side]}
    values = network | preprocessing
    parsed = parsing.parse(parsing.arguments(values))
    return parsing.settings(parsed, dict.fromkeys(parsed, "Python"))


def _meta(args):
    """Return the content of meta.json (see checkpoints/schema.py) for a checkpoint before the first step."""
    pairs = published.imagenet_classes() if args.num_of_class == IMAGENET_CLASSES else []
    name, keys, *rest = np.random.RandomState(0).get_state()
    return {
        **{"sequence": 0, "run": "weights", "epoch": 0, "step": None, "steps_each_epoch": 0, "world_size": 1},
        "classes": [wnid for wnid, _ in pairs],
        "class_names": [name for _, name in pairs],
        "arguments": args.as_dict(),
        **{"trained": None, "evaluated": None, "best": None, "lr_scheduler": {"last_epoch": 0}},
        "seeds": {
            "python": json.dumps(random.Random(0).getstate()),
            "numpy": json.dumps([name, keys.tolist(), *rest]),
        },
        "ranks": [{"loader": {"step": 0, "conditions": {}}, "meters": {}}],
    }


def _pickled(state):
    return lambda file: pickle.dump(state, file, protocol=4)


def evaluate(checkpoint, image_root, device="auto", threads=4):
    """Evaluate a checkpoint on the validation images of a data set, in float32.

    Args:
        checkpoint: folder that convert() has written.
        image_root: folder of the data set (--image-root). If the checkpoint has class names, class folders are matched
            by name, and some classes may be missing. In other formats, the labels must be those of the checkpoint.
        device: "auto", "gpu" or "cpu".
        threads: number of DALI's CPU threads.
    Returns:
        {"images", "classes" (number of classes with images), "top1", "top5"}.
    Raises:
        UsageError: the data set cannot be used.
    """
    from paddle_resnet import dali
    from paddle_resnet.checkpoints import restore
    from paddle_resnet.serving import inference

    device = inference.resolve_device(device)
    network = inference.load_checkpoint(checkpoint, device)
    model = network.model(logits=True)
    args = inference.loader_args(model.description, EVALUATION_BATCH, device, threads)
    args.image_root, args.num_of_class = str(image_root), network.args.num_of_class
    args.data_format = listing.detect(args.image_root, Mode.EVAL)
    images, found, top1, top5 = 0, set(), 0, 0
    loader = dali.build_dataloader(args, Mode.EVAL, trained=restore.recorded_classes(network.meta))
    for (batch,) in loader:
        labels = np.array(batch["label"])
        _, logits = model.outputs(np.array(batch["data"]))
        best = np.argsort(-logits, axis=1, kind="stable")[:, :5] == labels
        top1, top5 = top1 + best[:, 0].sum(), top5 + best.sum()
        found.update(labels[:, 0].tolist())
        images += len(labels)
    return {"images": images, "classes": len(found), "top1": float(top1 / images), "top5": float(top5 / images)}


def main(argv=None):
    """Run the command and return the exit code: 0 for success, 2 for a usage error, an unusable file or a missing
    package, 130 if interrupted."""
    names = ", ".join(published.PACKAGED)
    parser = argparse.ArgumentParser(
        prog="python -m paddle_resnet.weights",
        description=__doc__,
        epilog="The preprocessing flags of train.py, such as --crop-size, override those of the published model or of "
        "the network.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="FILE|NAME", help=f".pth, .safetensors or .pdparams file, or one of {names}")
    parser.add_argument("--arch", metavar="NAME", help="network of the weights, as for --model-arch-name")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--verify", metavar="IMAGE_ROOT", help="data set on which to evaluate the checkpoint")
    parser.add_argument("--verbose", action="store_true", help="list all tensors that do not match the network")
    return exit_codes.of("paddle_resnet.weights", lambda: _main(*parser.parse_known_args(argv)))


def _main(args, flags):
    preprocessing = parsing.parse(flags)
    if other := [flag(name) for name in preprocessing if name not in of_kinds("preprocessing")]:
        raise UsageError(f"{', '.join(other)}: not a flag for preprocessing; remove it")
    if args.verify is not None:
        listing.check_root(args.verify)
    meta = convert(args.source, args.output, args.arch, preprocessing, args.verbose)
    classes, license = meta["arguments"]["num_of_class"], meta["license"] or "unknown"
    logger.info(f"{args.output}: {meta['arguments']['model_arch_name']}, {classes} classes, license {license}")
    if args.verify is not None:
        result = evaluate(args.output, args.verify)
        logger.info(
            f"{args.verify}: top1 {result['top1']:.4f}, top5 {result['top5']:.4f}, {result['images']} images of "
            f"{result['classes']} classes"
        )


if __name__ == "__main__":
    sys.exit(main())
