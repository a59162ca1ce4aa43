"""Class names and labels: classes.txt, and checks of labels and of the images per class."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from paddle_resnet.data import sniffer
from paddle_resnet.data.images import IMAGE_ENDINGS, TEXT_LIMIT, log_once, some
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted, import_command, printable
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

_IMAGENET_CLASSES = 1000
_NAME_LIMIT = 1000  # maximum number of characters in a class name; Python's CSV reader accepts 131,072
# Files with one class name per line, possibly after its number.
_NAME_FILE = re.compile(
    r"(.*[-_])?(labels?|label_list|labels_list|classes|class_names|classnames|categories([-_].*)?)\.txt", re.IGNORECASE
)
# Folders of Caltech-101 and Caltech-256 with images that belong to none of the classes.
_NOT_A_CLASS = re.compile(r"BACKGROUND_Google|(\d+\.)?clutter", re.IGNORECASE)
_LABEL_TABLE = re.compile(r".+\.csv|metadata\..+", re.IGNORECASE)  # files that probably contain labels


def class_names(image_root: str) -> list[str] | None:
    """Return the lines of IMAGE_ROOT/classes.txt, or None if there is no such file. Raise UsageError if the file cannot
    be read, is not UTF-8 or too large, or has a line of more than _NAME_LIMIT characters."""
    path = os.path.join(image_root, "classes.txt")
    return _lines(path) if os.path.lexists(path) else None


def label_names(image_root: str, ignored: Collection[str] = ()) -> tuple[str, list[str], int | None] | None:
    """Return (path, class names in label order, first label or None if it is unknown) from the file with class names in
    image_root or meta/, such as labels.txt or flowers_label_list.txt, or None if there is no such file. Files in meta/
    are used only if image_root has none. `ignored` are the paths of files with different content. Raise UsageError if
    several files in the same folder differ, if a file cannot be read, or if a name occurs twice or is empty."""
    for folder in filter(os.path.isdir, (image_root, os.path.join(image_root, "meta"))):
        files = [name for name in sorted(os.listdir(folder)) if _NAME_FILE.fullmatch(name)]
        files = [name for name in files if os.path.join(folder, name) not in ignored]
        found = {name: _numbered_names(os.path.join(folder, name)) for name in files}
        if len({tuple(names) for names, _ in found.values()}) > 1:
            raise UsageError(f"{folder}: {' and '.join([*found][:5])} contain different class names; keep one of them")
        for name, names in found.items():
            return os.path.join(folder, name), *names
    return None


def _numbered_names(path):
    """Return (names, first number or None) of a file with lines `NAME`, `NUMBER NAME` or `NAME NUMBER`. Raise
    UsageError if the file cannot be read, or if a name occurs twice or is empty."""
    names = [line.strip() for line in _lines(path) or [""]]
    pairs = [name.split(maxsplit=1) for name in names]
    if all(len(pair) == 2 and pair[1].isdecimal() for pair in pairs):
        pairs = [pair[::-1] for pair in pairs]
    first = None
    if all(len(pair) == 2 and pair[0].isdecimal() for pair in pairs):
        name_of = {int(number): name for number, name in pairs}
        first = min(name_of)
        if first in (0, 1) and sorted(name_of) == [*range(first, first + len(names))]:
            names = [name_of[number] for number in sorted(name_of)]
        else:
            first = None
    name, count = Counter(names).most_common(1)[0]
    if count > 1 or not name:
        raise UsageError(
            f"{path}: contains {name or 'an empty line'} {counted(count, 'time')}; write one name per class"
        )
    return names, first


def _lines(path):
    try:
        with open_regular(path, TEXT_LIMIT) as f:
            text = f.read().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        classes = text.split("\n") if text else []
        if any(len(name) > _NAME_LIMIT for name in classes):
            raise ValueError(f"a line exceeds {_NAME_LIMIT} characters")
    except (OSError, ValueError) as e:  # ValueError: for example, the text is not UTF-8
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"{path}: cannot be read ({reason}); write one class name per line, or remove the file") from e
    return classes


def numbers(count: int | None) -> list[str]:
    """Return class names for data without class names: the numbers from 0 to `count` - 1; [] if `count` is
    None."""
    return [str(i) for i in range(count or 0)]


def check_labels(
    path: str,
    labels: Iterable,
    num_of_class: int | None,
    classes: Sequence | None,
    label_offset: int = 0,
    names_file: str | None = "classes.txt",
) -> None:
    """Check labels against the number of class names or, without names, the number of network outputs.

    Args:
        path: file that contains the labels, for the error message.
        labels: iterable of stored labels.
        num_of_class: number of network outputs, or None for any number.
        classes: class names, or None.
        label_offset: number that is subtracted from the labels.
        names_file: file that contains the class names, for the error message; None if no text file contains them.
    Raises:
        UsageError: a label is out of range or not a whole number.
    """
    limit = len(classes) if classes else num_of_class
    for label in labels:
        if not is_class(label - label_offset, limit):
            source = names_file or "the number of classes" if classes else f"--num-of-class {num_of_class}"
            first = label_offset
            allowed = f"labels are whole numbers from {first}"
            if limit is not None:
                allowed = f"{source} allows {first} to {first + limit - 1}"
            if label_offset:
                allowed += f" with --label-offset {label_offset}"
            remedy = "number the classes from 0, or set --label-offset to the first label"
            if classes and names_file:
                remedy += f", or add names to {names_file}"
            elif limit is not None and not classes:
                remedy += ", or use a larger --num-of-class"
            if label - label_offset == limit == _IMAGENET_CLASSES and path.endswith(".txt"):
                remedy = (
                    "labels from 1 to 1000 are probably those of ImageNet's development kit, whose order is not that "
                    "of class folders; instead of this file, use class folders with WordNet names, such as n01440764"
                )
            raise UsageError(f"{path}: has label {label:.15g}, but {allowed}; {remedy}")


def is_class(label: float, limit: int | None = None) -> bool:
    """Return whether a number, possibly NaN, is a nonnegative integer below `limit`, or, without a limit, below
    2**31."""
    return 0 <= label < (limit or 2**31) and label == int(label)


def check_classes(
    image_root: str,
    mode: Mode,
    data_format: str,
    labels: Iterable[int],
    classes: Sequence[str],
    allow_empty: bool = False,
    allow_one_class: bool = False,
) -> None:
    """Raise an error or log a warning if classes have no images, or if all training images belong to one class.

    Args:
        image_root: the folder that contains the split.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        data_format: "folder" or "filelist".
        labels: labels of all images.
        classes: class names in label order.
        allow_empty: whether empty class folders in train/ trigger a warning instead of an error.
        allow_one_class: whether training images of only one class trigger a warning instead of an error.
    Raises:
        UsageError: a class folder in train/ has no images, and allow_empty is False; or all training images belong to
            one class, and allow_one_class is False.
    """
    if mode is Mode.TRAIN and data_format == "folder":
        warn_of_background(f"--image-root {image_root}", classes)
    there = set(labels)
    empty = [name for label, name in enumerate(classes) if label not in there]
    if empty:
        message = (
            f"--image-root {image_root}: {mode.value} has no images for {len(empty)} of {len(classes)} classes "
            f"({some(empty)})"
        )
        if mode is Mode.TRAIN and data_format == "folder" and not allow_empty:
            raise UsageError(
                f"{message}; add images ({IMAGE_ENDINGS}), remove the folders, or use --allow-empty-classes"
            )
        log_once(printable(f"{message}; add images"), logger.warn)
    if mode is Mode.TRAIN and len(there) == 1:
        check_one_class(image_root, classes, min(there), allow_one_class)


def warn_of_background(place: str, folders: Iterable[str]) -> None:
    """Log a warning for class folders that, in published data sets, contain images of none of the classes, such as
    BACKGROUND_Google. `place` is the data set, for the message."""
    for name in filter(_NOT_A_CLASS.fullmatch, map(os.path.basename, folders)):
        message = f"{place}: {name} is used as a class, but contains images of none of the classes in Caltech-101 and"
        log_once(printable(f"{message} Caltech-256; to omit it, remove all folders {name}"), logger.warn)


def check_one_class(image_root: str, classes: Sequence[str], label: int, allow: bool) -> None:
    """Raise UsageError, or log a warning if `allow` is True, because all training images have the same label. If
    `classes`, the class names in label order, do not contain the label, the message contains its number."""
    name = classes[label] if label < len(classes) else label
    folders = (".", "train", f"train/{name}")
    tables = label_tables(image_root, folders)
    message = f"--image-root {image_root}: all train images belong to one class, {name}"
    if tables:
        message = f"{message}; {some(tables)} {'is' if len(tables) == 1 else 'are'} not used to assign labels"
    remedy = sniffer.PUT if tables else "add other classes"
    if tables and sniffer.advice(image_root, only_certain=True):
        remedy = f"run {import_command(image_root)}"
    if not allow:
        raise UsageError(f"{message}; {remedy}, or use --allow-one-class")
    log_once(printable(f"{message}; {remedy}"), logger.warn)


def label_tables(root: str, folders: Iterable[str]) -> list[str]:
    """Return the paths, relative to root, of the files in `folders` that probably contain labels, such as
    metadata.jsonl, train.csv and _classes.csv. `folders` are relative to root; those that cannot be listed are
    omitted."""
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name in classes.txt contains a null character
            names = sorted(os.listdir(os.path.join(root, folder)))
            paths += [os.path.normpath(os.path.join(folder, name)) for name in names if _LABEL_TABLE.fullmatch(name)]
    return paths
