"""Find the files of each split, and number the classes, for all sources except ImageNet and tables."""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from paddle_resnet.data.images import Image
from paddle_resnet.data.split_names import split_of
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

T = TypeVar("T")
_DEPTH = 3  # maximum number of folders between the source and its files
_OF = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")


def files(source: str, pattern: str, options: Options) -> dict[str, list[str]]:
    """Find the files of each split.

    Args:
        source: folder, or a single file.
        pattern: regular expression for the names of the files; upper and lower case are equivalent.
        options: Options of the import.
    Returns:
        {"train", "val" or "test": [path]} with sorted paths. Files without a split in their names or folders belong to
        "train". If there are validation files, "test" is left out.
    Raises:
        UsageError: there are no files, the files belong to several data sets, or, unless options.allow_partial is set,
            files with names such as NAME-00001-of-00008 are missing.
    """
    if os.path.isfile(source):
        return {"train": [source]}
    found, sets = defaultdict(list), defaultdict(list)
    for relative in _walk(source, "", _DEPTH):
        folder, name = os.path.split(relative)
        if re.fullmatch(pattern, name, re.IGNORECASE):
            parts = folder.split(os.sep)
            split = split_of(name) or next(filter(None, map(split_of, reversed(parts))), "train")
            found[split].append(os.path.join(source, relative))
            sets[tuple(part for part in parts if split_of(part) is None)].append(relative)
    if not found:
        raise UsageError(f"{source}: contains no files of the kind that --as sets; use the folder that contains them")
    if len(sets) > 1:
        shown = ", ".join(os.path.join(*parts) or "." for parts in [*sets][:5])
        folders = (os.path.join(source, *parts) for parts in sets if any(parts))
        example = next(filter(os.path.isdir, folders), None)  # train/SET/ and val/SET/ have no common folder
        remedy = f"import one folder, such as {example}" if example else "move the data sets to separate folders"
        raise UsageError(f"{source}: the folders {shown} contain different data sets; {remedy}")
    for paths in found.values():
        _check_complete(paths, options.allow_partial)
    if "val" in found and found.pop("test", None):
        logger.info(f"{source}: test files are left out, because there are validation files")
    return dict(found)


def _walk(root, folder, depth):
    for entry in sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        path = os.path.join(folder, entry.name)
        if not entry.is_dir():
            yield path
        elif depth:
            yield from _walk(root, path, depth - 1)


def _check_complete(paths, allow_partial):
    numbers = defaultdict(set)
    for path in paths:
        if match := _OF.fullmatch(path):
            numbers[match[1], match[3], match[4]].add(int(match[2]))
    for (start, total, end), present in numbers.items():
        first = min(present, default=0) if min(present) in (0, 1) else 0  # numbers begin at 0 or 1
        missing = sorted(set(range(first, first + int(total))) - present)
        if missing:
            width = len(total)
            shown = ", ".join(f"{os.path.basename(start)}{n:0{width}d}-of-{total}{end}" for n in missing[:5])
            message = f"{os.path.dirname(start)}: {len(missing)} of {int(total)} files are missing ({shown})"
            if not allow_partial:
                raise UsageError(f"{message}; download them, or use --allow-partial to import the other files")
            logger.warn(f"{message}; only the other files are imported")


def train_and_val(source: str, found: dict[str, list[T]]) -> dict[str, list[T]]:
    """Return {"train" or "val": images}. Test images are used for validation if there are no validation images, and
    left out otherwise. Raise UsageError if there are no training images."""
    found = dict(found)
    if not found.get("train"):
        raise UsageError(f"{source}: contains no training images; import the folder that contains them")
    if test := found.pop("test", None):
        used = "left out, because there are validation images" if "val" in found else "used as validation images"
        found.setdefault("val", test)
        logger.info(f"{source}: {counted(len(test), 'test image')} {used}")
    return {split: found[split] for split in ("train", "val") if split in found}


def check_validation(source: str, found: dict[str, list[Image]], names: Sequence[str] | None) -> None:
    """Raise UsageError if a class with validation images has no training images. `names` are the class names in label
    order, or None."""
    labels = {split: {image.label for image in images if image.label is not None} for split, images in found.items()}
    if unknown := sorted(labels.get("val", set()) - labels["train"]):
        shown = ", ".join(names[label] if names else str(label) for label in unknown[:5])
        raise UsageError(
            f"{source}: has {counted(len(unknown), 'class', 'classes')} with validation images, but without training "
            f"images ({shown}); add training images, or remove these validation images"
        )


def warn_of_spelling(labels: Iterable[str]) -> None:
    """Log a warning if labels differ only in case, separators or Unicode normalization."""
    first = {}
    for label in sorted(labels):
        spelling = re.sub(r"[\s._-]+", " ", unicodedata.normalize("NFKC", label)).strip().casefold()
        other = first.setdefault(spelling, label)
        if other != label:
            logger.warn(
                f"the labels {other} and {label} differ only in their spelling, but are different classes; if they are "
                "one class, use one spelling"
            )
            return


def numbered(
    source: str,
    labels: Sequence[Any],
    names: Sequence[str] | None,
    place: Callable[[int], str],
    from_one: bool = False,
    flag: str | None = None,
    first: int | None = None,
) -> tuple[list[int], list[str] | None]:
    """Number the classes. Text labels without names are numbered in sorted order. Numbers are not changed, with one
    exception: 1 is subtracted from all labels if `first` is 1, or if `first` is None, the smallest label is 1 and the
    largest is the number of names (without names, see from_one).

    Args:
        source: the data set, for messages.
        labels: [int or text] of all images.
        names: class names in label order, or None.
        place: function that returns where label number i is stored, for messages.
        from_one: whether labels without names are renumbered from 0 if the labels are exactly 1, 2, ..., N for an N.
        flag: flag that chooses different labels, for messages, or None.
        first: label of the first name, 0 or 1, or None if it is unknown.
    Returns:
        ([label as an int], class names or None)
    Raises:
        UsageError: a label is missing or is not a class.
    """
    kinds = {type(label) for label in labels}
    if kinds == {str}:
        names = names or sorted(set(labels))
        label_of = {name: label for label, name in enumerate(names)}
        for i, label in enumerate(labels):
            if not label.strip():
                raise UsageError(f"{place(i)}: has no label; write the label, or remove the image")
            if label not in label_of:
                raise UsageError(
                    f"{place(i)}: label {label[:50]} is not one of the {counted(len(names), 'class name')}; correct "
                    "it, or remove the image"
                )
        return [label_of[label] for label in labels], [*names]
    limit = len(names or labels)
    what = counted(limit, "class name" if names else "image")
    low, high = (min(labels), max(labels)) if kinds == {int} else (0, 0)
    is_from_one = low == 1 and (high == len(names) if names else from_one and set(labels) == {*range(1, high + 1)})
    if first is not None:
        is_from_one = first == 1
    if is_from_one:
        logger.info(f"{source}: labels from 1 to {high} are renumbered from 0")
    for i, label in enumerate(labels):
        if type(label) is not int or label < is_from_one:
            raise UsageError(f"{place(i)}: label {str(label)[:50]} is not a class; correct it, or remove the image")
        if label - is_from_one >= limit:
            choice = f", or choose different labels with {flag}" if flag else ""
            raise UsageError(
                f"{place(i)}: has label {label}, but the data set has only {what}; number the classes from 0{choice}"
            )
    return [label - is_from_one for label in labels], [*names] if names else None


def one_of(values: Sequence[T], index: int | None, place: str) -> T:
    """Return the label of an image.

    Args:
        values: all labels of the image.
        index: value of --label-index, or None.
        place: description of where the labels are stored, for messages.
    Raises:
        UsageError: there is no label, there are several and the index is None, or there is no label with the index.
    """
    if len(values) == 1 and index is None:
        return values[0]
    if not values:
        raise UsageError(f"{place}: has no label; add one, or remove the image")
    if index is None:
        raise UsageError(
            f"{place}: has {len(values)} labels; the import writes one label per image, so set "
            f"--label-index to a number from 0 to {len(values) - 1}"
        )
    if index >= len(values):
        raise UsageError(
            f"--label-index {index}: {place} has only {counted(len(values), 'label')}; use a smaller index"
        )
    return values[index]
