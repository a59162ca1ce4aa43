"""The places of the splits of a data set in --image-root, and the errors if a split is missing."""

import contextlib
import os
import shlex

from paddle_resnet.data import manifest, sniffer
from paddle_resnet.data.formats import FORMATS, RECORDS
from paddle_resnet.data.formats.folder import class_folders, images_at_the_top, is_system_name
from paddle_resnet.data.images import is_utf8, some
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import Mode, RunScope

# Common names of each split in lower case, most common first.
OTHER_NAMES = {
    Mode.TRAIN: ("train", "training"),
    Mode.EVAL: ("val", "valid", "validation", "test", "testing", "eval", "dev"),
}
TABLE_SUFFIXES = (".csv", ".jsonl")  # of label tables (--multi-label)
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


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
    has_table = any(os.path.lexists(os.path.join(image_root, mode.value + suffix)) for suffix in TABLE_SUFFIXES)
    if not has_table and not _has_split(image_root, mode):
        similar = _similar(image_root, mode)
        remedy = f"rename {similar} to {mode.value}/" if similar else sniffer.advice(image_root, only_certain=True)
        remedy = remedy or f"put the class folders into {mode.value}/"
        raise UsageError(f"{flag} {image_root}: has no {mode.value}/; {remedy}, or use a different folder")


def detect(image_root: str, mode: Mode) -> str:
    """Detect the storage format of a split from the names of the files in image_root.

    A file list takes precedence over class folders, because the list may contain images in these folders.

    Returns:
        A key of FORMATS; "folder" if no format is detected.
    Raises:
        UsageError: image_root is not a folder, or contains the split in several formats.
    """
    check_root(image_root)
    formats = [name for name in (*RECORDS, "filelist", "folder") if FORMATS[name].detect(image_root, mode)]
    if formats[-2:] == ["filelist", "folder"]:
        formats.pop()
    if len(formats) > 1:
        raise UsageError(
            f"--image-root {image_root}: contains the {mode.value} split as {' and '.join(formats)}; choose one with "
            "--data-format"
        )
    # If no format is detected, check_there will raise an error that states what is missing.
    return formats[0] if formats else "folder"


def check_there(image_root: str, mode: Mode, data_format: str) -> list[str]:
    """Return the paths of a split's files, or [] for a file list, which formats.filelist checks. Raise UsageError if
    image_root is not a folder or contains no such files, or if a conversion to this folder is incomplete."""
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
    own = {
        manifest.MANIFEST,
        "classes.txt",
        *(f"{mode.value}{suffix}" for mode in Mode for suffix in ("", ".txt", *TABLE_SUFFIXES)),
    }
    shards = [pattern for module in RECORDS.values() for pattern in module.NAMES.values()]
    own |= {name for name in os.listdir(image_root) if any(pattern.fullmatch(name) for pattern in shards)}
    own |= {name for name in os.listdir(image_root) if name.endswith(".idx")}
    return [os.path.join(image_root, name) for name in sorted(own)]


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
    return os.path.exists(os.path.join(image_root, mode.value)) or detect(image_root, mode) != "folder"


def _missing(image_root, mode):
    """Return the UsageError for a split that image_root does not contain in any format."""
    other, scope = (Mode.EVAL, RunScope.EVAL_ONLY) if mode is Mode.TRAIN else (Mode.TRAIN, RunScope.TRAIN_ONLY)
    if not _has_split(image_root, other):
        return UsageError(f"--image-root {image_root}: has no folder {mode.value}/; {_splits_remedy(image_root)}")
    data_format = detect(image_root, other)
    wanted, there = (FORMATS[data_format].EXAMPLE.format(split.value) for split in (mode, other))
    similar = _similar(image_root, mode, data_format)
    if compressed := _compressed(image_root, [mode]):
        remedy = compressed
    elif similar:
        remedy = f"rename {similar} to {wanted}"
    elif advice := sniffer.advice(image_root, only_certain=True):
        remedy = advice
    elif data_format == "folder" and mode is Mode.EVAL:
        remedy = f"create it, or {_split_command(os.path.join(image_root, mode.TRAIN.value), image_root)}"
    else:
        remedy = "create it"
    wanted = f"folder {wanted}" if data_format == "folder" else wanted
    return UsageError(
        f"--image-root {image_root}: has no {wanted}; {remedy}, or use only {there} with --run-scope {scope.value}"
    )


def _compressed(image_root, modes):
    """If record files of a split are compressed with gzip, return the remedy, otherwise None."""
    patterns = [module.NAMES[mode] for module in RECORDS.values() for mode in modes]

    def is_compressed(name):
        stem, ending = os.path.splitext(name)
        original = {".gz": stem, ".tgz": f"{stem}.tar"}.get(ending, "")
        return any(pattern.fullmatch(original) for pattern in patterns)

    names = sorted(filter(is_compressed, os.listdir(image_root)))
    if not names:
        return None
    files = f"{shlex.quote(str(image_root))}/*{os.path.splitext(names[0])[1]}"
    return f"{printable(some(names))} cannot be read, because DALI does not support gzip: run `gunzip {files}`"


def _splits_remedy(image_root):
    if compressed := _compressed(image_root, list(Mode)):
        return compressed
    similar = {mode: _similar(image_root, mode) for mode in Mode}
    renames = [f"rename {name} to {mode.value}/" for mode, name in similar.items() if name]
    if renames:
        return " and ".join(renames)
    near = [
        root
        for root in _neighbors(image_root)
        if all(os.path.isdir(path) and not _is_flat(path) for path in (os.path.join(root, mode.value) for mode in Mode))
    ]
    if near:
        return f"use {' or '.join(map(shlex.quote, near[:3]))}"
    if advice := sniffer.advice(image_root):
        return advice
    if archives := sorted(name for name in os.listdir(image_root) if name.lower().endswith(_ARCHIVES)):
        return f"extract {printable(some(archives))} to train/CLASS/ and val/CLASS/, with one folder per class"
    return (
        "use the folder that contains train/ and val/; if this is a folder of class folders, "
        f"{_split_command(image_root, image_root)}"
    )


def _neighbors(image_root):
    """Return the paths of the parent and of the subfolders of image_root."""
    folders = [os.path.join(image_root, name) for name in sorted(os.listdir(image_root)) if not is_system_name(name)]
    return [os.path.normpath(os.path.join(image_root, os.pardir)), *folders]


def _split_command(source, image_root):
    """Return the command that creates both splits from a folder of class folders."""
    output = f"{os.path.abspath(image_root)}_split"
    return f"run `{command('dataset', 'split', source, '--output', output)}` and use --image-root {shlex.quote(output)}"


def _similar(image_root, mode, data_format="folder"):
    """If a folder or file list probably contains the split under a different name, such as training/ instead of train/,
    return its name, otherwise None."""
    ending = {"folder": "/", "filelist": ".txt"}.get(data_format)
    if ending is None:
        return None
    names = [f"{name}/" if os.path.isdir(os.path.join(image_root, name)) else name for name in os.listdir(image_root)]
    if data_format == "folder":
        names = [name for name in names if name.endswith("/") and not _is_flat(os.path.join(image_root, name))]
    name_of = {name.lower(): name for name in names}
    return next((name_of[name + ending] for name in OTHER_NAMES[mode] if name + ending in name_of), None)


def _is_flat(folder):
    """Return whether the images of a split are not in class folders."""
    with contextlib.suppress(UsageError):
        return bool(images_at_the_top(folder)) or class_folders(folder) == ["images"]
    return False
