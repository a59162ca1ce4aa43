"""Number the classes of a data set: one numbering for both splits and all storage formats.

Class folders have names but no numbers; file lists and records have numbers and possibly names. `establish` combines
what both splits contain, and every program that reads labels uses its result. docs/data.md describes the rules.

This module imports neither DALI nor Paddle, so that the tools' worker processes start without these imports.
"""

import contextlib
import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paddle_resnet.data import indexes
from paddle_resnet.data.classes import class_names, numbers
from paddle_resnet.data.formats import FORMATS, filelist, folder, tfrecord
from paddle_resnet.data.image_files import Files
from paddle_resnet.data.images import log_once, readable
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

IMAGENET_CLASSES = Path(__file__).parent / "imagenet_classes.txt"
# Approximate number of TFRecord examples per split whose labels and class names are read before step 1.
SAMPLES = 256
# Origin of the numbers of class folders, for messages.
SORTED, CHECKPOINT = "among the sorted class folders", "in the checkpoint"


@dataclass(frozen=True)
class Numbering:
    """How the images of a split are numbered.

    Attributes:
        classes: names that identify the classes, in label order: the names of the class folders, the classes of a
            trained network, the names in classes.txt or in a file that filelist.label_names reads, or the names in
            record files; None if classes have only numbers.
        class_names: names for reports in label order; None if classes have only numbers.
        offset: number to subtract from the stored labels of the split.
        is_trained: whether `classes` are those of a trained network.
    """

    classes: list[str] | None
    class_names: list[str] | None
    offset: int = 0
    is_trained: bool = False


class Root(Protocol):
    """The part of root.DataRoot that this module needs."""

    image_root: str
    label_offset: int | str

    def formats(self, mode: Mode) -> dict[Mode, str]: ...

    def file_list(self, mode: Mode, label_offset: int = 0) -> Files: ...


def establish(
    root: Root, mode: Mode, num_of_class: int | None = None, trained: Sequence[str] | None = None
) -> Numbering:
    """Number the classes of a data set.

    Args:
        root: DataRoot of the data set.
        mode: the split to read, Mode.TRAIN or Mode.EVAL.
        num_of_class: number of network outputs, or None for any number.
        trained: class name of each output of a trained network, or None if the data set defines the numbers. The names
            "0", "1", ... stand for outputs without names.
    Returns:
        Numbering of the classes of the split.
    Raises:
        UsageError: the splits contradict each other, classes.txt or the trained network; the numbers of class folders
            are unknown; there are more class names than network outputs; a label offset is set for class folders; or
            the data set cannot be read.
    """
    image_root, label_offset, formats = root.image_root, root.label_offset, root.formats(mode)
    sampled = _sample(image_root, formats)
    offsets = _offsets(image_root, formats, sampled, label_offset, num_of_class)
    path, names, class_names = _names(image_root, formats, sampled, offsets, num_of_class)
    if trained is not None:
        formats = {mode: formats[mode]}  # the network, not the other split, numbers this split
    if label_offset != AUTO and label_offset and set(formats.values()) == {"folder"}:
        raise UsageError(
            f"--label-offset {label_offset}: class folders in {image_root} contain no labels; use --label-offset auto"
        )
    if "folder" not in formats.values():
        if names is not None:
            check_names(path or f"--image-root {image_root}", names, num_of_class, trained)
        if trained is not None and not are_numbers(trained):
            _check_lists(root, formats, offsets, trained, CHECKPOINT)
        return Numbering(names, class_names, offsets[mode])
    classes, source = _folder_classes(image_root, mode, formats, names, trained)
    if classes is None:  # layout.check_there reports missing folders
        return Numbering(None, None)
    if names is not None:
        class_names = _shown(path, names, class_names, classes)
    if trained is None and len(set(formats.values())) > 1:
        is_checked = _check_lists(root, formats, offsets, classes, source)
        if source == SORTED and not is_checked:
            _warn_of_unchecked(image_root, formats)
    return Numbering(classes, class_names or classes, offsets[mode], source == CHECKPOINT)


def data_classes(root: Root, mode: Mode) -> list[str] | None:
    """Return the classes of a data set, which are defined by class folders, a file with class names such as
    classes.txt, the labels in file lists, or the labels and names in record files.

    Args:
        root: DataRoot of the data set.
        mode: the split that must exist, Mode.TRAIN or Mode.EVAL.
    Returns:
        names in label order, which are "0", "1", ... for classes without names; or None if the number of classes is
        unknown or the split is missing.
    Raises:
        UsageError: the data set cannot be read, or its file lists have fewer images than classes.
    """
    image_root, label_offset, formats = root.image_root, root.label_offset, root.formats(mode)
    sampled = _sample(image_root, formats)
    offsets = _offsets(image_root, formats, sampled, label_offset)
    _, names, _ = _names(image_root, formats, sampled, offsets)
    if formats[mode] == "folder":
        return _folder_classes(image_root, mode, formats, names, None)[0]
    if names:
        return names
    if formats[mode] == "filelist":
        lists = [m for m, kind in formats.items() if kind == "filelist"]
        labels = [label for m in lists for label in root.file_list(m, offsets[m]).labels]
        if max(labels) >= len(labels):
            raise UsageError(
                f"--image-root {image_root}: the file lists contain only {len(labels)} images, but an image "
                f"has label {max(labels) + offsets[mode]}; number the classes from 0, or set --num-of-class"
            )
        return numbers(max(labels) + 1)
    return numbers(max(sampled)) if label_offset == AUTO and offsets[mode] else None


def imagenet_classes() -> list[tuple[str, str]]:
    """Return [(wnid, WordNet name)] for ImageNet's classes, in label order."""
    lines = IMAGENET_CLASSES.read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines]


def _folder_classes(image_root, mode, formats, names, trained):
    """Return (names of the class folders in label order, or None if there are no folders; where the numbers come
    from).

    Args:
        formats: {mode: storage format}, see root.DataRoot.formats.
        names: names of the classes in a file such as classes.txt or in records, in label order, or None.
        trained: see establish().
    """
    split = mode if formats[mode] == "folder" else next(m for m, kind in formats.items() if kind == "folder")
    own = folder.split_folder(image_root, split)
    if not os.path.isdir(own):
        return None, None
    if trained is not None and not (are_numbers(trained) and not set(trained) & set(folder.class_folders(own))):
        return trained, CHECKPOINT
    numbered = folder.label_folder(image_root, split)
    folders = folder.class_folders(numbered)
    # If the other split is not in class folders, train/ may contain only the images of a file list.
    if not folders and len(formats) > 1:
        numbered, folders = own, folder.class_folders(own)
    folder.check_utf8(numbered, folders)
    if not folders:
        return None, None
    labels = _match(folders, names or [])
    # If all images are in class folders, each line of classes.txt must belong to a folder.
    if labels and (trained is not None or set(formats.values()) != {"folder"} or len(names) == len(folders)):
        name_of = {label: name for name, label in labels.items()}
        return [name_of.get(label, name) for label, name in enumerate(names)], "in classes.txt"
    if trained is None:
        return folders, SORTED
    wnids = [wnid for wnid, _ in imagenet_classes()]
    if len(trained) == len(wnids) and set(folders) <= set(wnids):
        log_once(
            f"{image_root}: the class folders have WordNet ids as names, so their labels are ImageNet's, 0 to 999",
            logger.info,
        )
        return wnids, "in ImageNet"
    if len(folders) < len(trained):
        raise UsageError(
            f"--image-root {image_root}: has {counted(len(folders), 'class folder')}, but the network has "
            f"{len(trained)} outputs without names, so the labels of the folders are unknown; write the names of all "
            f"{len(trained)} classes to {os.path.join(image_root, 'classes.txt')}, one per line, in the order of the "
            "outputs"
        )
    return folders, SORTED


def _match(classes, names):
    """Match classes to names, first exactly, then ignoring case, spaces, _ and -, then also a leading number.

    Returns:
        {class: index of its name}, or None if a class has no name, or the match is not unique.
    """
    for key in (str, _plain, _without_number):
        indexes_of = {key(name): i for i, name in enumerate(names)}
        keys = {name: key(name) for name in classes}
        is_unique = len(indexes_of) == len(names) and len(set(keys.values())) == len(classes)
        if is_unique and set(keys.values()) <= indexes_of.keys():
            return {name: indexes_of[key] for name, key in keys.items()}
    return None


def _plain(name):
    return re.sub(r"[\s_-]", "", name.casefold())


def _without_number(name):
    return re.sub(r"^[\d.:)]+", "", _plain(name)) or _plain(name)


def _shown(path, names, class_names, classes):
    """Return the names for reports in the label order of `classes`.

    Args:
        path: the file with class names, such as classes.txt, or None if the names come from records.
        names, class_names: names that identify the classes, and names for reports, in the same order.
        classes: names of the class folders.
    Raises:
        UsageError: the number of lines in classes.txt differs from the number of classes, or a line is the name of a
            class with a different label.
    """
    labels = _match(classes, names)
    if labels is not None:
        return [class_names[labels[name]] for name in classes]
    if path is None:
        return classes
    if len(names) != len(classes):
        raise UsageError(
            f"{path}: has {len(names)} lines for {len(classes)} classes; write one name per class, in label order, or "
            "remove the file"
        )
    label_of = {_without_number(name): label for label, name in enumerate(classes)}
    for label, name in enumerate(names):
        other = label_of.get(_without_number(name), label)
        if other != label and len(label_of) == len(classes):
            raise UsageError(
                f"{path}: line {label + 1} is {name}, but class folder {classes[other]} has label {other}; write the "
                f"names of all class folders, which are then numbered in this order, or write {name} to line "
                f"{other + 1}"
            )
    return names


def _names(image_root, formats, sampled, offsets, num_of_class=None):
    """Return (path of the file with class names, its names, its names) or, without such a file, (None, names that
    identify the classes, names for reports) from record files. None replaces the names that the record files lack."""
    if found := _list_names(image_root, formats):
        return *found[:2], found[1]
    if sampled:
        return None, *_sampled_names(sampled, max(offsets.values()), num_of_class)
    names = None
    for mode, kind in formats.items():
        if names is None and hasattr(FORMATS[kind], "stored_names"):
            names = FORMATS[kind].stored_names(FORMATS[kind].detect(image_root, mode))
    return None, names, names


def check_names(path: str, classes: Sequence[str], num_of_class: int | None, trained: Sequence[str] | None) -> None:
    """Raise UsageError if there are more names than network outputs, or if a name has a different label in a trained
    network. `path` is the file that contains the names, for the message."""
    if num_of_class is not None and len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class}: fewer than the {len(classes)} classes in {path}; "
            f"use --num-of-class {len(classes)}"
        )
    labels_of = defaultdict(list)
    for label, name in enumerate(trained or []):
        labels_of[name].append(label)
    for label, name in enumerate(classes):
        if labels_of[name] and label not in labels_of[name]:
            raise UsageError(
                f"{path}: {name} has label {label}, but label {labels_of[name][0]} in the checkpoint; number the "
                "labels in the data set as in training"
            )


def _check_lists(root, formats, offsets, classes, source):
    """Compare the labels in file lists with the numbers of the class folders that contain the images.

    Args:
        formats: {mode: storage format}, see root.DataRoot.formats.
        offsets: {mode: label offset}.
        classes: names of the class folders in label order.
        source: where the numbers of the class folders come from, for the error message.
    Returns:
        whether a file list contains images in class folders.
    Raises:
        UsageError: a label differs or, if `source` is SORTED, is not below the number of classes.
    """
    counts = Counter(classes)
    label_of = {name: label for label, name in enumerate(classes) if counts[name] == 1}
    is_checked = False
    for mode in (mode for mode, kind in formats.items() if kind == "filelist"):
        path, names = filelist.list_path(root.image_root, mode), os.path.join(root.image_root, "classes.txt")
        listed = root.file_list(mode, offsets[mode])
        files, labels = listed.names, listed.labels
        if source == SORTED and max(labels) >= len(classes):
            raise UsageError(
                f"{path}: has label {max(labels) + offsets[mode]}, but the data set has only "
                f"{counted(len(classes), 'class folder')}, so the labels of the folders are unknown; write the names "
                f"of all classes to {names} in the order of the labels, or set --label-offset if the labels do not "
                "start at 0"
            )
        for file, label in zip(files, labels, strict=True):
            name = os.path.basename(os.path.dirname(file))
            if name not in label_of:
                continue
            is_checked = True
            if label_of[name] != label:
                order = f"write the names of all class folders to {names} in label order, or correct the labels"
                raise UsageError(
                    f"{path}: {file} has label {label + offsets[mode]}, but class "
                    f"{name} has label {label_of[name] + offsets[mode]} {source}; "
                    f"{order if source == SORTED else 'correct the labels'}"
                )
    return is_checked


def _warn_of_unchecked(image_root, formats):
    how = {
        "folder": "the positions in the sorted list of its class folders",
        "filelist": "the numbers in its file list",
    }
    ways = [how.get(formats[mode], f"the labels in its {formats[mode]} files") for mode in Mode]
    log_once(
        f"--image-root {image_root}: the labels of train are {ways[0]}, and those of val {ways[1]}; to check that they "
        f"agree, write the names of the class folders to {os.path.join(image_root, 'classes.txt')} in the order of the "
        "labels",
        logger.warn,
    )


def are_numbers(classes: Sequence[str]) -> bool:
    """Return whether classes have no names, that is, whether they are called "0", "1", ..."""
    return list(classes) == numbers(len(classes))


def have_names(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether the names of two lists of classes can be compared. Otherwise, at least one list has no names, and
    only the numbers of classes can be compared. Folders that are called 0, 1, ... are names if the other list has some
    of these names among others."""
    unnamed = are_numbers(first) + are_numbers(second)
    return not unnamed or (unnamed == 1 and not set(first).isdisjoint(second))


def _offsets(image_root, formats, sampled, label_offset, num_of_class=None):
    """Return {mode: number to subtract from the stored labels}."""
    if label_offset != AUTO:
        return {mode: 0 if kind == "folder" else label_offset for mode, kind in formats.items()}
    detected = _detected_offset(sampled, num_of_class) if sampled else 0
    if detected:
        log_once(
            f"--label-offset auto: the labels in the TFRecord files in {image_root} start at 1, so 1 is subtracted; to "
            "use them unchanged, set --label-offset 0",
            logger.info,
        )
    names = _list_names(image_root, formats)
    first = names[2] if names else 0
    if first and "filelist" in formats.values():
        log_once(
            f"--label-offset auto: {names[0]} numbers the classes from {first}, so {first} is subtracted from the "
            "labels in the file lists; to use them unchanged, set --label-offset 0",
            logger.info,
        )
    return {mode: {"tfrecord": detected, "filelist": first}.get(kind, 0) for mode, kind in formats.items()}


def _list_names(image_root, formats):
    """Return (path, class names in label order, first label) from classes.txt or, for file lists, from a file that
    filelist.label_names reads; None if there is no such file."""
    if "filelist" in formats.values():
        return filelist.label_names(image_root)
    names = class_names(image_root)
    return None if names is None else (os.path.join(image_root, "classes.txt"), names, 0)


def _sample(image_root, formats):
    """Read the labels and class names of about SAMPLES evenly spaced examples of each split in TFRecord format.

    Returns:
        {stored label: {(synset or None, text or None)}}
    """
    sampled = defaultdict(set)
    for mode in (mode for mode, kind in formats.items() if kind == "tfrecord"):
        shards = tfrecord.detect(image_root, mode)
        chosen = np.unique(np.linspace(0, len(shards) - 1, min(SAMPLES, len(shards))).astype(int)).tolist()
        for i in chosen:
            with readable(shards[i]):
                status = os.stat(shards[i])
            for label, *names in _examples(shards[i], -(-SAMPLES // len(chosen)), status.st_size, status.st_mtime_ns):
                sampled[label].add(tuple(names))
    return dict(sampled)


@functools.cache  # a run calls this function several times; size and mtime_ns invalidate the result if the file changes
def _examples(shard, count, size, mtime_ns):
    """Return [(label, synset, text)] of up to `count` evenly spaced examples in a TFRecord file."""
    rows = indexes.open_index(shard, tfrecord.INDEX).images.tolist()
    examples = []
    for i in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)).tolist():
        with contextlib.suppress(UsageError):  # the loader reports a damaged example that it does not skip
            examples.append(tfrecord.read_class(shard, *rows[i]))
    return [example for example in examples if example[0] is not None]


def _detected_offset(sampled, outputs):
    """Return 1 if the labels of TFRecords are the numbers from 1 to the number of classes, otherwise 0.

    The number of classes is `outputs`, the number of network outputs. If `outputs` is None, the number of classes is
    1,000 if the synsets are ImageNet's, otherwise the largest label, provided that all numbers from 1 occur.
    """
    largest = max(sampled)
    if min(sampled) < 1 or largest < 2:
        return 0
    if len(sampled) < largest and _is_imagenet(sampled, 1):
        largest = len(imagenet_classes())
    elif len(sampled) < largest and outputs is None:
        return 0
    return int(outputs in (None, largest))


def _is_imagenet(sampled, offset):
    """Return whether the synset of each sampled example is that of ImageNet's class `label - offset`."""
    label_of = {wnid: label for label, (wnid, _) in enumerate(imagenet_classes())}
    return all(label_of.get(synset) == label - offset for label, names in sampled.items() for synset, _ in names)


def _sampled_names(sampled, offset, outputs):
    """Return (names that identify the classes, names for reports) in label order, or (None, None) if the names of some
    classes are unknown or the number of names differs from `outputs`.

    Args:
        sampled: result of _sample.
        offset: number to subtract from the labels.
        outputs: number of network outputs, or None.
    """
    labels = sorted(sampled)
    is_complete = labels[0] == offset and labels[-1] - labels[0] + 1 == len(labels)
    if is_complete and all(len(sampled[label]) == 1 for label in labels):
        pairs = [next(iter(sampled[label])) for label in labels]
    elif _is_imagenet(sampled, offset):
        pairs = imagenet_classes()
    else:
        return None, None
    known = [list(column) for column in zip(*pairs, strict=True) if None not in column]
    return (known[0], known[-1]) if known and outputs in (None, len(pairs)) else (None, None)
