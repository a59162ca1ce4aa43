"""The places of the splits of a data set in --image-root, and the errors if a split is missing."""

import contextlib
import os
import shlex

from paddle_resnet.data import manifest, sniffer, split_names
from paddle_resnet.data.formats import FILES, FORMATS, RECORDS, filelist, folder
from paddle_resnet.data.images import is_system_name, is_utf8, log_once, some
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import Mode, RunScope

TABLES = r"(?P<set>){split}\.(?:csv|jsonl)"  # names of label tables (--multi-label)


def check_root(image_root: str, content: str = "train/ and val/", flag: str = "--image-root") -> None:
    """Raise UsageError if image_root, the value of `flag`, is not a folder, or if its path is not valid UTF-8, which
    DALI requires."""
    if not os.path.isdir(image_root):
        raise UsageError(f"{flag} {image_root}: not a folder; use the folder that contains {content}")
    if not is_utf8(os.path.abspath(image_root)):
        raise UsageError(f"{flag} {image_root!a}: the path is not valid UTF-8; rename the folder")


def check_split(flag: str, image_root: str, mode: Mode) -> None:
    """Raise UsageError if the data set that a flag such as --verify specifies does not contain a split. Commands that
    read the data set late call this function at startup, so that they fail early."""
    check_root(image_root, f"{mode.value}/", flag)
    has_table = bool(split_names.find(image_root, mode, TABLES))
    if not has_table and not _has_split(image_root, mode):
        advice = sniffer.advice(image_root, only_certain=True)
        remedy = advice or f"put the class folders into {mode.value}/"
        raise UsageError(f"{flag} {image_root}: has no {mode.value}/; {remedy}, or use a different folder")


def detect(image_root: str, mode: Mode) -> str:
    """Detect the storage format of a split from the names of the files in image_root.

    train.txt and val.txt take precedence over class folders, because they may list images in these folders. A list with
    a different name also takes precedence, unless all splits consist of class folders.

    Returns:
        A key of FORMATS; "folder" if no format is detected.
    Raises:
        UsageError: image_root is not a folder, or contains the split several times.
    """
    check_root(image_root)
    detected = {name: FORMATS[name].detect(image_root, mode) for name in (*RECORDS, "filelist", "folder")}
    found = {name: paths for name, paths in detected.items() if paths}
    if {"filelist", "folder"} <= found.keys():
        del found["folder" if _is_preferred(image_root, found["filelist"][0]) else "filelist"]
    if len(found) > 1:
        shown = [f"{name} ({split_names.shown(image_root, paths[0])})" for name, paths in found.items()]
        raise UsageError(
            f"--image-root {image_root}: contains the {mode.value} split as {' and '.join(shown)}; choose one with "
            "--data-format"
        )
    # If no format is detected, check_there will raise an error that states what is missing.
    return next(iter(found), "folder")


def _is_preferred(image_root, path):
    """Return whether a file list takes precedence over class folders, see detect()."""
    folders = [place for mode in Mode for place in folder.detect(image_root, mode)]
    if filelist.is_own_name(image_root, path) or not all(map(folder.has_classes, folders)):
        return True
    name = split_names.shown(image_root, path)
    log_once(
        f"--data-format auto: {name} in {image_root} is ignored, because all splits consist of class folders; to use "
        "it, set --data-format filelist",
        logger.info,
    )
    return False


def check_there(image_root: str, mode: Mode, data_format: str) -> list[str]:
    """Return the paths of a split's files, or [] for a file list, which formats.filelist checks. Raise UsageError if
    image_root is not a folder or contains no files of the split, or if a conversion to this folder is incomplete."""
    if data_format == "filelist":  # formats.filelist reports a missing list
        return []
    check_root(image_root, "train/ and val/" if data_format == "folder" else f"the {data_format} files")
    if data_format == "folder":
        paths = FORMATS[data_format].detect(image_root, mode)
        manifest.check_complete(image_root, "folder" if paths else None)
        if not paths:
            raise _missing(image_root, mode)
        return paths
    described = manifest.read(image_root)
    if described is not None and not described["complete"]:
        raise manifest.incomplete(image_root, described)
    paths = FORMATS[data_format].detect(image_root, mode)
    if not paths:
        example = FORMATS[data_format].EXAMPLE.format(mode.value)
        remedy = _compressed(image_root, [mode]) or f"use the folder that contains the {data_format} files"
        raise UsageError(f"--image-root {image_root}: has no {example}; {remedy}")
    return paths


def occupied(image_root: str) -> list[str]:
    """Return the paths below image_root that are reserved for data sets, including paths that do not exist. An output
    must be neither at nor below a reserved path."""
    if not os.path.isdir(image_root):
        return []
    suffixes = ("", ".txt", ".csv", ".jsonl")
    own = {manifest.MANIFEST, "classes.txt", *(f"{mode.value}{suffix}" for mode in Mode for suffix in suffixes)}
    own |= {name for name in os.listdir(image_root) if name.endswith(".idx") or _is_record_file(name)}
    paths = {os.path.join(image_root, name) for name in own}
    for mode in Mode:
        with contextlib.suppress(UsageError):  # the run reports this error
            paths |= {path for module in FILES.values() for path in module.detect(image_root, mode)}
            paths |= {*split_names.find(image_root, mode, TABLES)}
    return sorted(paths)


def _is_record_file(name, modes=tuple(Mode)):
    return any(split_names.match(module.NAMES, name, mode) for module in RECORDS.values() for mode in modes)


def splits(image_root: str) -> list[Mode]:
    """Return the modes (Mode.TRAIN, Mode.EVAL) whose split exists in image_root.

    Raises:
        UsageError: neither split exists, or image_root cannot be used.
    """
    check_root(image_root)
    modes = [mode for mode in Mode if _has_split(image_root, mode)]
    if not modes:
        manifest.check_complete(image_root)
        raise UsageError(f"{image_root}: contains neither train/ nor val/ in any format; {_splits_remedy(image_root)}")
    return modes


def _has_split(image_root, mode):
    return (
        os.path.exists(os.path.join(image_root, mode.value))
        or detect(image_root, mode) != "folder"
        or bool(folder.detect(image_root, mode))
    )


def _missing(image_root, mode):
    """Return the UsageError for a split that image_root does not contain in any format."""
    other, scope = (Mode.EVAL, RunScope.EVAL_ONLY) if mode is Mode.TRAIN else (Mode.TRAIN, RunScope.TRAIN_ONLY)
    if not _has_split(image_root, other):
        return UsageError(f"--image-root {image_root}: has no folder {mode.value}/; {_splits_remedy(image_root)}")
    data_format = detect(image_root, other)
    wanted = FORMATS[data_format].EXAMPLE.format(mode.value)
    there = split_names.shown(image_root, next(iter(FORMATS[data_format].detect(image_root, other)), other.value))
    if compressed := _compressed(image_root, [mode]):
        remedy = compressed
    elif advice := sniffer.advice(image_root, only_certain=True):
        remedy = advice
    elif data_format == "folder" and mode is Mode.EVAL:
        remedy = f"create the folder, or {_split_command(folder.split_folder(image_root, mode.TRAIN), image_root)}"
    else:
        remedy = "create the folder" if data_format == "folder" else f"create {wanted}"
    wanted = f"folder {wanted}" if data_format == "folder" else wanted
    return UsageError(
        f"--image-root {image_root}: has no {wanted}; {remedy}, or use only {there} with --run-scope {scope.value}"
    )


def _compressed(image_root, modes):
    """If record files of a split are compressed with gzip, return the remedy, otherwise None."""

    def is_compressed(name):
        stem, ending = os.path.splitext(name)
        return _is_record_file({".gz": stem, ".tgz": f"{stem}.tar"}.get(ending, ""), modes)

    names = sorted(filter(is_compressed, os.listdir(image_root)))
    if not names:
        return None
    files = f"{shlex.quote(str(image_root))}/*{os.path.splitext(names[0])[1]}"
    return f"{printable(some(names))} cannot be read, because DALI does not support gzip: run `gunzip {files}`"


def _splits_remedy(image_root):
    if compressed := _compressed(image_root, list(Mode)):
        return compressed
    if near := neighbors(image_root):
        return f"use {' or '.join(map(shlex.quote, near[:3]))}"
    if advice := sniffer.advice(image_root):
        return advice
    return (
        "use the folder that contains train/ and val/; if this is a folder of class folders, "
        f"{_split_command(image_root, image_root)}"
    )


def _is_split_folder(image_root, mode):
    with contextlib.suppress(UsageError):
        return folder.has_classes(folder.split_folder(image_root, mode))
    return False


def neighbors(image_root: str) -> list[str]:
    """Return the paths of the parent and the subfolders of image_root that contain both splits as class folders."""
    folders = [os.path.join(image_root, name) for name in sorted(os.listdir(image_root)) if not is_system_name(name)]
    near = [os.path.normpath(os.path.join(image_root, os.pardir)), *folders]
    return [root for root in near if all(_is_split_folder(root, mode) for mode in Mode)]


def _split_command(source, image_root):
    """Return a remedy: the command that creates both splits from a folder of class folders, and the --image-root to use
    afterwards."""
    output = f"{os.path.abspath(image_root)}_split"
    return f"run `{command('dataset', 'split', source, '--output', output)}` and use --image-root {shlex.quote(output)}"
