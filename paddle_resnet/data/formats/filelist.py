"""File lists: IMAGE_ROOT/train.txt and val.txt, also train_list.txt or meta/train.txt ..., with lines `PATH LABEL`.
Paths are absolute, or relative to IMAGE_ROOT, the folder of the split or the folder of the list."""

import codecs
import contextlib
import os
import re
from collections import defaultdict

from paddle_resnet.data import classes, image_files, sniffer, split_names
from paddle_resnet.data.formats.folder import entry_type, own_classes, split_folder
from paddle_resnet.data.images import IMAGE_SUFFIXES, TEXT_LIMIT, is_outside
from paddle_resnet.utils.errors import UsageError, import_command
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

EXAMPLE = "{}.txt"
NAMES = r"(?P<set>{split}([-_]?(list|label|labels))?)\.txt"
_FOLDERS = ("", "meta")  # MMPretrain stores its lists in meta/
_HEAD = 1 << 12  # number of bytes that are read to recognize a list

read = image_files.read
verify = image_files.verify


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return [path of a split's file list], or [] if the split has none."""
    own = os.path.join(image_root, f"{mode.value}.txt")

    def is_usable(path):
        return os.path.isfile(path) and (path == own or _is_list(path))

    return split_names.find(image_root, mode, NAMES, is_usable, _FOLDERS)


def list_path(image_root: str, mode: Mode) -> str:
    """Return the path of a split's list, which may not exist."""
    return next(iter(detect(image_root, mode)), os.path.join(image_root, f"{mode.value}.txt"))


def is_own_name(image_root: str, path: str) -> bool:
    """Return whether a list is IMAGE_ROOT/train.txt or val.txt, which take precedence over class folders."""
    return path in [os.path.join(image_root, f"{mode.value}.txt") for mode in Mode]


def label_names(image_root: str) -> tuple[str, list[str], int] | None:
    """Return (path, class names in label order, first label) from classes.txt or, if a file list has a name that other
    programs use, such as train_list.txt, from the file with class names of these programs; None if there is no such
    file. For exceptions, see classes.label_names."""
    if (names := classes.class_names(image_root)) is not None:
        return os.path.join(image_root, "classes.txt"), names, 0
    lists = [path for mode in Mode for path in detect(image_root, mode)]
    if all(is_own_name(image_root, path) for path in lists):
        return None
    found = classes.label_names(image_root)
    return found and (*found[:2], found[2] or 0)


def _is_list(path):
    """Return whether the first line of a file is `PATH LABEL` with the path of an image."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        line = f.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0].decode(errors="replace")
        parsed = _parsed(line)
        return parsed is not None and parsed[0].lower().endswith(IMAGE_SUFFIXES)
    return False


def _parsed(line):
    """Return (path, label as text) of a line `PATH LABEL`, or None for a different line."""
    name, *label = line.rsplit(maxsplit=1) or [""]
    return (name, label[0]) if label and re.fullmatch("[0-9]{1,9}", label[0]) and "\0" not in name else None


def index(
    image_root: str,
    mode: Mode,
    num_of_class: int | None = None,
    label_offset: int = 0,
) -> image_files.Files:
    """Read a file list.

    Args:
        image_root: the folder that contains the list.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        num_of_class: number of network outputs, or None for any number.
        label_offset: number to subtract from the labels.
    Returns:
        image_files.Files. `classes` are the class names of label_names, or None. Paths are absolute, or relative to
        image_root.
    Raises:
        UsageError: the list or classes.txt cannot be read, the list is empty, a line is malformed, a path has two
            labels, or a label has no name in label_names or, without names, no network output.
    """
    path = list_path(image_root, mode)
    names = label_names(image_root)
    class_names, names_file = (names[1], os.path.basename(names[0])) if names else (None, None)
    files, labels, lines_of = [], [], []
    try:
        with open_regular(path, TEXT_LIMIT) as f:
            lines = f.read().decode("utf-8-sig").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            parsed = _parsed(line)
            if parsed is None:
                remedy = f"run {import_command(image_root)}"
                if own_classes(image_root, mode):
                    split = os.path.basename(split_folder(image_root, mode))
                    remedy = f"remove the list to use the class folders in {split}/"
                raise UsageError(
                    f"{path}: line {number} is not `PATH LABEL` but `{line.strip()[:200]}`; correct it, or {remedy}"
                )
            files.append(parsed[0])
            lines_of.append(number)
            labels.append(int(parsed[1]))
    except (OSError, UnicodeDecodeError) as e:
        problem = f"({e.strerror}); write" if isinstance(e, OSError) else "(it is not UTF-8); correct"
        raise UsageError(f"--image-root {image_root}: {path} cannot be read {problem} this list") from e
    if not files:
        raise UsageError(f"--image-root {image_root}: {path} contains no images; add lines of the form `PATH LABEL`")
    classes.check_labels(path, [min(labels), max(labels)], num_of_class, class_names, label_offset, names_file)
    label_of = {}
    for name, label in zip(files, labels, strict=True):
        if label_of.setdefault(name, label) != label:
            raise UsageError(f"{path}: {name} has the labels {label_of[name]} and {label}; remove one of the lines")
    if base := _base(image_root, mode, path, files[0]):
        files = [os.path.join(base, name) for name in files]
    return image_files.Files(files, [label - label_offset for label in labels], class_names, lines_of)


def _base(image_root, mode, path, name):
    """Return the folder, relative to image_root, to which the paths in a list are relative: "", the folder of the split
    or the folder of the list. If none of these folders contains the file `name`, return ""."""
    folders = [split_folder(image_root, mode), os.path.dirname(path)]
    bases = ["", *(os.path.relpath(folder, image_root) for folder in folders)]
    return next((base for base in bases if os.path.isfile(os.path.join(image_root, base, name))), "")


def check_inside(image_root: str, mode: Mode, listed: image_files.Files) -> None:
    """Raise UsageError if a list contains a path outside image_root. Symbolic links in image_root may point outside
    image_root."""
    for name, number in zip(listed.names, listed.lines, strict=True):
        if is_outside(name, image_root):
            raise UsageError(
                f"{list_path(image_root, mode)}: line {number} contains {name}, which is outside {image_root}; correct "
                "the path, or add --allow-outside"
            )


def check_first(image_root: str, mode: Mode, listed: image_files.Files) -> None:
    """Raise UsageError if the first path of a list is not that of a file. Only the first path is checked, because
    training checks all files with check_listed, and the data-set tools report unreadable images."""
    name = listed.names[0]
    if not os.path.isfile(os.path.join(image_root, name)):
        remedy = sniffer.advice(image_root, only_certain=True) or "copy the file, or use paths relative to that folder"
        raise UsageError(f"{list_path(image_root, mode)}: {name} is not in {image_root}; {remedy}")


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
    path = path or list_path(image_root, mode)
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
