"""File lists: IMAGE_ROOT/train.txt and val.txt with lines `PATH LABEL`. Paths are absolute or relative to
IMAGE_ROOT."""

import contextlib
import os
import re
from collections import defaultdict

from paddle_resnet.data import image_files, sniffer
from paddle_resnet.data.classes import check_labels, class_names
from paddle_resnet.data.formats.folder import entry_type, own_classes
from paddle_resnet.data.images import TEXT_LIMIT, is_outside
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

EXAMPLE = "{}.txt"

read = image_files.read
verify = image_files.verify


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return the path of a split's list in a list, or [] if it does not exist."""
    path = os.path.join(image_root, f"{mode.value}.txt")
    return [path] if os.path.isfile(path) else []


def index(
    image_root: str,
    mode: Mode,
    num_of_class: int | None = None,
    label_offset: int = 0,
) -> image_files.Files:
    """Read a file list.

    Args:
        image_root: the folder that contains the list.
        mode: Mode.TRAIN reads train.txt, Mode.EVAL reads val.txt.
        num_of_class: number of network outputs, or None for any number.
        label_offset: number to subtract from the labels.
    Returns:
        image_files.Files. `classes` are the lines of classes.txt, or None.
    Raises:
        UsageError: the list or classes.txt cannot be read, the list is empty, a line is malformed, a path has two
            labels, or a label has no name in classes.txt or, without names, no network output.
    """
    path = os.path.join(image_root, f"{mode.value}.txt")
    classes = class_names(image_root)
    files, labels, lines_of = [], [], []
    try:
        with open_regular(path, TEXT_LIMIT) as f:
            lines = f.read().decode("utf-8-sig").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            name, *label = line.rsplit(maxsplit=1)
            if not label or not re.fullmatch("[0-9]{1,9}", label[0]) or "\0" in name:
                remedy = f"run {sniffer.import_command(image_root)}"
                if own_classes(image_root, mode):
                    remedy = f"remove the list to use the class folders in {mode.value}/"
                raise UsageError(
                    f"{path}: line {number} is not `PATH LABEL` but `{line.strip()[:200]}`; correct it, or {remedy}"
                )
            files.append(name)
            lines_of.append(number)
            labels.append(int(label[0]))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise UsageError(f"--image-root {image_root}: {path} cannot be read ({reason}); write or correct it") from e
    if not files:
        raise UsageError(f"--image-root {image_root}: {path} contains no images; add lines of the form `PATH LABEL`")
    check_labels(path, [min(labels), max(labels)], num_of_class, classes, label_offset)
    label_of = {}
    for name, label in zip(files, labels, strict=True):
        if label_of.setdefault(name, label) != label:
            raise UsageError(f"{path}: {name} has the labels {label_of[name]} and {label}; remove one of the lines")
    return image_files.Files(files, [label - label_offset for label in labels], classes, lines_of)


def check_inside(image_root: str, mode: Mode, listed: image_files.Files) -> None:
    """Raise UsageError if a list contains a path outside image_root. Symbolic links in image_root may point outside
    image_root."""
    for name, number in zip(listed.names, listed.lines, strict=True):
        if is_outside(name, image_root):
            raise UsageError(
                f"{detect(image_root, mode)[0]}: line {number} contains {name}, which is outside {image_root}; correct "
                "it, or add --allow-outside"
            )


def check_first(image_root: str, mode: Mode, listed: image_files.Files) -> None:
    """Raise UsageError if the first path of a list is not that of a file. Training checks all files with check_listed,
    and the data-set tools report unreadable images."""
    name = listed.names[0]
    if not os.path.isfile(os.path.join(image_root, name)):
        remedy = sniffer.advice(image_root, only_certain=True) or "use paths relative to that folder"
        raise UsageError(f"{detect(image_root, mode)[0]}: {name} is not in {image_root}; {remedy}")


def check_listed(image_root: str, mode: Mode, files: list[str], path: str | None = None) -> None:
    """Check that a file list contains only regular files, because DALI would hang on a pipe. For speed, list each
    folder once instead of making one system call per file.

    Args:
        image_root, mode: see index().
        files: paths relative to image_root.
        path: path of the list; by default, that of the split's file list.
    Raises:
        UsageError: a path is missing or not a regular file.
    """
    path = path or os.path.join(image_root, f"{mode.value}.txt")
    names = defaultdict(set)
    for file in files:
        folder, name = os.path.split(file)
        names[folder].add(name)
    for folder, listed in names.items():
        with contextlib.suppress(OSError), os.scandir(os.path.join(image_root, folder)) as entries:
            listed -= {entry.name for entry in entries if entry.name in listed and entry_type(entry) == "file"}
        for name in sorted(listed):
            file = os.path.join(folder, name)
            if not os.path.isfile(os.path.join(image_root, file)):  # case-insensitive file systems may find the file
                raise UsageError(f"{path}: {file} is missing or not a regular file; remove the line")
