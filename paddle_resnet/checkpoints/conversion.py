"""Convert weights from other projects to checkpoints."""

import json
import os
import pickle
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from paddle_resnet.checkpoints import arrays, folders, foreign_files, foreign_names, look_alikes, published
from paddle_resnet.data import numbering
from paddle_resnet.models import registered, registered_name
from paddle_resnet.settings import parsing
from paddle_resnet.utils import locks, logger, outputs, signals
from paddle_resnet.utils.errors import UsageError, command, printable

IMAGENET_CLASSES = 1000
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(\w+)")  # file name of a part of the weights in Hugging Face's format


def convert(
    file: str | Path,
    output: str | Path,
    arch: str | None = None,
    preprocessing: dict[str, Any] | None = None,
    verbose: bool = False,
    source: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint with weights from a file, or from an installed package that contains a published model.

    If the weights have no classifier, the checkpoint has none, so that it can only be fine-tuned.

    Args:
        file: path of a file that foreign_files.read accepts, or a key of published.PACKAGED.
        output: folder to create. The folder appears only when all its files are complete.
        arch: value for --model-arch-name, or None to use the network of the published model.
        preprocessing: {attribute name of a preprocessing flag: value}, or None. Unspecified flags have the values of
            the published model or, if it has none, the network's default values.
        verbose: whether error messages list all tensors that do not match the network.
        source: LIBRARY.NETWORK of the weights, which distinguishes look-alikes, or None.
    Returns:
        content of meta.json, without the entries for format, files and checksum.
    Raises:
        UsageError: the package is not installed; the file cannot be read, does not match the network, or may belong to
            a look-alike; the network is unknown, or its weights cannot be converted; the output exists or cannot be
            written; or this version of Paddle is not supported.
        RunError, OSError: Paddle cannot be imported (see signals.importing_paddle).
    """
    output = Path(output)
    _check_new(output)
    path, digest, model = _find(str(file))
    if arch is None and model is None:
        raise UsageError(f"{file}: not a published model, so its network is unknown; set --arch")
    arch = registered_name(arch or model.arch, "--arch")
    if model is not None and arch != model.arch:
        raise UsageError(f"--arch {arch}: {file} has weights of {model.arch}; remove --arch")
    _check_complete(path)
    outputs.claim(folders={"--output": output}, protected=[("FILE", path)])
    tensors = _read(path)
    with signals.importing_paddle():
        from paddle_resnet.machine import compat

        compat.check_version()
    try:
        params, classes, projects, tensors = _match(path, arch, tensors)
    except foreign_names.MismatchError as e:
        hint = " (--verbose lists all tensors)" if e.lines and not verbose else ""
        message = f"{path}: {e}; {e.remedy}{hint}"
        raise UsageError(message, *(e.lines if verbose else [])) from e
    if model is None or source is not None:
        look_alikes.check(path, arch, tensors, projects, source)
    logger.info(printable(f"{path}: {len(params)} parameters of {arch}, with tensor names as in {projects}"))
    if classes is None:
        train = command("train", "--from-pretrained-params", output, "--pretrained-mismatch", "skip-classifier")
        logger.info(printable(f"{path}: has no classifier; train one with {train}"))
    values = {**(model.preprocessing if model else {}), **(preprocessing or {})}
    args = _settings(arch, classes, values)
    meta = _meta(args.as_dict(), classes) | {
        "has_classifier": classes is not None,
        "license": model and model.license,
        "source": {"file": path.name, "sha256": digest, "url": model and model.source, "network": source},
    }
    prefix = args.model_prefix
    files = {f"{prefix}.pdparams": _pickled(params), f"{prefix}.pdopt": _pickled({})}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(locks.file_of(output), f"--output {output}", logger.warn):
            _check_new(output)  # check again, because another conversion may have created the folder
            folders.commit(output.parent, output.name, files, meta)
    except OSError as e:
        raise UsageError(f"--output {output}: cannot be written ({e.strerror}); choose a different folder") from e
    return meta


def _check_new(output):
    if os.path.lexists(output):
        raise UsageError(f"--output {output}: already exists; remove it or choose a different folder")


def _find(file):
    """Return (path of the file, its sha256, Published or None). Raise UsageError if the package is not installed, the
    file cannot be read, or its sha256 differs from the digits in its name."""
    path = Path(file)
    if file in published.PACKAGED:
        path, package = published.installed_file(file), published.PACKAGED[file].package
        if path is None:
            raise UsageError(
                f"{file}: requires the package {package}; install it with {sys.executable} -m pip install {package}"
            )
    try:
        digest = published.sha256(path)
    except OSError as e:
        names = ", ".join(published.PACKAGED)
        raise UsageError(f"{file}: cannot be read ({e.strerror}); use a readable file, or one of {names}") from e
    claimed = published.claimed_hash(path)
    if claimed and not digest.startswith(claimed):
        raise UsageError(
            f"{path}: the sha256 begins with {digest[:8]}, but the file name contains {claimed}; download the file "
            "again, or rename it if it was changed intentionally"
        )
    return path, digest, published.HASHED.get(digest[:8])


def _check_complete(path):
    """Raise UsageError if the file contains only some of the tensors of a network."""
    if (match := _SHARD.fullmatch(path.name)) and int(match[3]) > 1:
        stem, number, count, suffix = match.groups()
        raise UsageError(
            f"{path}: contains only a part of the weights, shard {int(number)} of {int(count)}; combine the tensors "
            f"of all shards listed in {stem}.{suffix}.index.json into one file, and use that file"
        )


def _read(path):
    try:
        return foreign_files.read(path)
    except arrays.UnreadableError as e:
        remedy = "use a .pth, .safetensors or .pdparams file that contains only the network's state_dict"
        raise UsageError(f"{path}: cannot be read ({e}); {remedy}") from e


def _match(path, arch, tensors):
    """Return ({name of a variable: float32 array}, number of classes or None if there is no classifier, names of the
    projects that use these tensor names, tensors without the prefix of their names).

    Raises:
        UsageError: weights for this network cannot be converted.
        foreign_names.MismatchError: the tensors do not match the network.
    """
    network = registered(arch)
    family = network and network.module
    if family not in foreign_names.LAYOUTS:
        known = ", ".join(foreign_names.LAYOUTS)
        raise UsageError(f"--arch {arch}: weights of this network cannot be converted; use a network of {known}")
    tensors, prefix = foreign_names.without_prefix(family, tensors)
    if prefix:
        logger.info(printable(f"{path}: removing the prefix {prefix} from all tensor names"))
    classes = foreign_names.number_of_classes(family, tensors)
    own = parameters(arch, classes or IMAGENET_CLASSES)
    if classes is None:
        own = {name: parameter for name, parameter in own.items() if not foreign_names.is_of_classifier(name)}
    params, projects = foreign_names.convert(family, tensors, own)
    return params, classes, projects, tensors


def parameters(arch: str, classes: int) -> dict[str, foreign_names.Parameter]:
    """Return foreign_names.parameters for a value of --model-arch-name and a number of classes, in NCHW with three
    channels. For UsageError, see models.build_model."""
    import paddle
    from paddle import static
    from paddle.utils import unique_name

    from paddle_resnet.models import build_model

    paddle.enable_static()
    with static.program_guard(static.Program(), static.Program()), unique_name.guard():
        return foreign_names.parameters(build_model(arch, classes, 3, "NCHW"))


def _settings(arch, classes, preprocessing):
    """Return the Settings to store in the checkpoint: the network, its preprocessing, and the default values of all
    other flags."""
    side = preprocessing.get("crop_size", registered(arch).image_size)
    network = {"model_arch_name": arch, "num_of_class": classes or IMAGENET_CLASSES, "image_shape": [3, side, side]}
    values = network | preprocessing
    parsed = parsing.parse(parsing.arguments(values))
    return parsing.make_settings(parsed, dict.fromkeys(parsed, "recorded"))


def _meta(arguments, classes):
    """Return the content of meta.json (see checkpoints/schema.py) for a checkpoint of a run that has not trained
    yet."""
    pairs = numbering.imagenet_classes() if classes == IMAGENET_CLASSES else []
    name, keys, *rest = np.random.RandomState(0).get_state()
    return {
        **{"sequence": 0, "run": "weights", "epoch": 0, "step": None, "steps_each_epoch": 0, "world_size": 1},
        "classes": [wnid for wnid, _ in pairs],
        "class_names": [name for _, name in pairs],
        "arguments": arguments,
        **{"trained": None, "evaluated": None, "best": None, "lr_scheduler": {"last_epoch": 0}},
        "seeds": {
            "python": json.dumps(random.Random(0).getstate()),
            "numpy": json.dumps([name, keys.tolist(), *rest]),
        },
        "ranks": [{"loader": {"step": 0, "conditions": {}}, "meters": {}}],
    }


def _pickled(state):
    return lambda file: pickle.dump(state, file, protocol=4)
