"""What lies where under --image-root: the storage formats, their files, classes and images. docs/data.md shows each.

Needs neither DALI nor Paddle, so that the worker processes of the data-set tools start quickly.
"""

import os
import re
from dataclasses import dataclass

import numpy as np

from paddle_resnet.data import records
from paddle_resnet.data.records import IMAGE_SUFFIXES
from utils.errors import UsageError
from utils.mode import Mode

SHARD_NAMES = {
    "recordio": {Mode.TRAIN: re.compile(r"train\.rec"), Mode.EVAL: re.compile(r"val\.rec")},
    "tfrecord": {
        Mode.TRAIN: re.compile(r"train-\d+-of-(?P<total>\d+)(\.tfrecords?)?"),
        Mode.EVAL: re.compile(r"val(idation)?-\d+-of-(?P<total>\d+)(\.tfrecords?)?"),
    },
    "webdataset": {
        Mode.TRAIN: re.compile(r"(.*[-_])?train-\d+\.tar"),
        Mode.EVAL: re.compile(r"(.*[-_])?val(idation)?-\d+\.tar"),
    },
    "lmdb": {Mode.TRAIN: re.compile(r"train_lmdb"), Mode.EVAL: re.compile(r"val_lmdb")},
}
FILE_FORMATS = ("folder", "filelist")  # an image is a file of its own
STORAGE_FORMATS = (*FILE_FORMATS, *SHARD_NAMES)
EXAMPLES = {
    "recordio": "{}.rec",
    "tfrecord": "{}-00000-of-00001",
    "webdataset": "{}-000000.tar",
    "lmdb": "{}_lmdb",
}


@dataclass(frozen=True)
class Image:
    """One image of a data set.

    Attributes:
        name: what reports and skip lists call it: its path relative to image_root; of a container, SHARD@PLACE, where
            PLACE is the byte at which DALI says that the record starts, or the key in an LMDB.
        path: its file, or the container it is in.
        label: its label; None: it stands in the container, records.read has it.
        kind: None for a file of its own, else the format of the container.
        place: where records.read finds it in the container.
    """

    name: str
    path: str
    label: int | None
    kind: str | None = None
    place: tuple | bytes = ()


def detect(image_root, mode):
    """The storage format of a split, seen from the names in image_root.

    A file list wins over class folders, whose images it may name.

    Raises:
        UsageError: image_root is no folder, or holds several formats.
    """
    if not os.path.isdir(image_root):
        raise UsageError(f"--image-root {image_root} is no folder: name the one that holds train/ and val/")
    found = [data_format for data_format in SHARD_NAMES if find_shards(image_root, data_format, mode)]
    if os.path.isfile(os.path.join(image_root, f"{mode.value}.txt")):
        found.append("filelist")
    elif os.path.isdir(os.path.join(image_root, mode.value)):
        found.append("folder")
    if len(found) > 1:
        raise UsageError(
            f"--image-root {image_root} holds the {mode.value} split as {' and '.join(found)}: choose one with "
            "--data-format"
        )
    # Nothing there: class folders, whose listing says what is missing.
    return found[0] if found else "folder"


def splits(image_root):
    """Modes of which there is a split under image_root.

    Raises:
        UsageError: none.
    """
    found = [mode for mode in Mode if _has_split(image_root, mode)]
    if not found:
        raise UsageError(f"{image_root} has neither train/ nor val/ in any format: name the folder that holds them")
    return found


def _has_split(image_root, mode):
    return os.path.exists(os.path.join(image_root, mode.value)) or detect(image_root, mode) != "folder"


def images(image_root, mode):
    """All images of a split, in stored order.

    Returns:
        (format, class names or None, [Image])
    Raises:
        UsageError: the split cannot be used.
    """
    data_format = detect(image_root, mode)
    if data_format in FILE_FORMATS:
        files, labels, classes = LISTINGS[data_format](image_root, mode)
        found = [Image(name, os.path.join(image_root, name), label) for name, label in zip(files, labels, strict=True)]
        return data_format, classes, found
    found = []
    for shard in shards(image_root, mode, data_format):
        name = os.path.basename(shard)
        if data_format == "lmdb":
            keys = records.lmdb_keys(shard)
            found += [Image(f"{name}@{os.fsdecode(key)}", shard, None, data_format, key) for key in keys]
            continue
        index = records.open_index(shard, data_format)
        for row in np.hstack([index.images, index.labels]).tolist():
            found.append(Image(f"{name}@{row[0]}", shard, None, data_format, tuple(row)))
    return data_format, class_names(image_root), found


def list_folder(image_root, mode, num_of_class=None):
    """Class folders IMAGE_ROOT/train/CLASS/IMAGE and IMAGE_ROOT/val/CLASS/IMAGE.

    Labels number the sorted class folders of train/ (of val/ where there is no train/), so that a class that is
    missing in val/ shifts no label.

    Args:
        image_root: the folder above train/ and val/.
        mode: Mode.TRAIN lists train/, Mode.EVAL lists val/.
        num_of_class: number of outputs of the network; None: any.
    Returns:
        (paths relative to image_root, labels, class names)
    Raises:
        UsageError: a missing folder, no class folders, more classes than outputs, a class in val/ alone.
    """
    split = mode.value
    split_dir = os.path.join(image_root, split)
    if not os.path.isdir(image_root):
        raise UsageError(f"--image-root {image_root} is no folder: name the one that holds train/ and val/")
    if not os.path.isdir(split_dir):
        there, scope = ("val", "eval_only") if mode is Mode.TRAIN else ("train", "train_only")
        remedy = "name the folder that holds train/ and val/"
        if os.path.isdir(os.path.join(image_root, there)):
            remedy = f"make it, or use {there}/ alone with --run-scope {scope}"
        raise UsageError(f"--image-root {image_root} has no folder {split}/: {remedy}")

    label_dir = os.path.join(image_root, "train")
    if not os.path.isdir(label_dir):
        label_dir = split_dir
    classes = class_folders(label_dir)
    if not classes:
        raise UsageError(
            f"--image-root {image_root}: {os.path.basename(label_dir)}/ holds no class folders: put the images into "
            "one folder a class"
        )
    if num_of_class is not None and len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class} is smaller than the {len(classes)} class folders in {image_root}: "
            f"give --num-of-class {len(classes)}"
        )
    files, labels = [], []
    label_of = {name: label for label, name in enumerate(classes)}
    for name in class_folders(split_dir):
        if name not in label_of:
            raise UsageError(f"--image-root {image_root}: val/{name} has no train/{name}: add or remove it")
        found = image_files(os.path.join(split_dir, name))
        files += [f"{split}/{name}/{file}" for file in found]
        labels += [label_of[name]] * len(found)
    try:
        "".join(files).encode()
    except UnicodeEncodeError:
        name = next(os.fsencode(file) for file in files if os.fsencode(file) != file.encode(errors="replace"))
        raise UsageError(f"--image-root {image_root}: {name!r} is no name in UTF-8: rename the file") from None
    return files, labels, classes


def list_filelist(image_root, mode, num_of_class=None):
    """File lists IMAGE_ROOT/train.txt and val.txt with lines `PATH LABEL`, paths relative to image_root.

    Arguments as those of `list_folder`.

    Returns:
        (paths relative to image_root, labels, class names or None)
    Raises:
        UsageError: a missing or empty list, a line of another form, a label that the network has no output for.
    """
    path = os.path.join(image_root, f"{mode.value}.txt")
    classes = class_names(image_root, num_of_class)
    files, labels = [], []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                name, *label = line.rsplit(maxsplit=1)
                if not label or not label[0].isascii() or not label[0].isdigit():
                    raise UsageError(f"{path} line {number} is not `PATH LABEL` but `{line.strip()}`: mend it")
                files.append(name)
                labels.append(int(label[0]))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise UsageError(f"--image-root {image_root}: {path} cannot be read ({reason}): write or mend it") from e
    if not files:
        raise UsageError(f"--image-root {image_root}: {path} names no images: add lines `PATH LABEL`")
    check_labels(path, [max(labels)], num_of_class, classes)
    # Looking at every file would take minutes where there are millions; a wrong root shows at the first.
    if not os.path.isfile(os.path.join(image_root, files[0])):
        raise UsageError(f"{path} names {files[0]}, which is not in {image_root}: give paths relative to it")
    return files, labels, classes


LISTINGS = {"folder": list_folder, "filelist": list_filelist}


def class_folders(path):
    """Names of the class folders in a folder, sorted.

    Raises:
        UsageError: the folder cannot be listed.
    """
    return sorted(e.name for e in _listed(path) if e.is_dir() and not e.name.startswith("."))


def image_files(path):
    """Names of the images in a class folder, sorted.

    Raises:
        UsageError: the folder cannot be listed.
    """
    files = [e.name for e in _listed(path) if e.is_file() and not e.name.startswith(".")]
    return sorted(name for name in files if name.lower().endswith(IMAGE_SUFFIXES))


def _listed(path):
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as e:
        raise UsageError(f"{path} cannot be listed ({e.strerror}): make it readable, or take it away") from e


def find_shards(image_root, data_format, mode):
    """Sorted paths of the containers of a split, none if there are none.

    Args:
        data_format: a key of SHARD_NAMES.
    """
    pattern = SHARD_NAMES[data_format][mode]
    return [os.path.join(image_root, name) for name in sorted(os.listdir(image_root)) if pattern.fullmatch(name)]


def shards(image_root, mode, data_format):
    """Sorted paths of all containers of a split.

    Raises:
        UsageError: none, not all, or an unfinished conversion.
    """
    records.check_complete(image_root)
    found = find_shards(image_root, data_format, mode)
    if not found:
        example = EXAMPLES[data_format].format(mode.value)
        raise UsageError(f"--image-root {image_root} has no {example}: name the folder that holds the {data_format}")
    if data_format == "tfrecord":
        pattern = SHARD_NAMES[data_format][mode]
        total = max(int(pattern.fullmatch(os.path.basename(shard))["total"]) for shard in found)
        if total != len(found):
            raise UsageError(
                f"--image-root {image_root} has {len(found)} of {total} shards of {mode.value}: add the others"
            )
    return found


def class_names(image_root, num_of_class=None):
    """Lines of IMAGE_ROOT/classes.txt, in label order, or None where there is none.

    Raises:
        UsageError: more of them than the network has outputs, or the file cannot be read.
    """
    path = os.path.join(image_root, "classes.txt")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as f:
            classes = f.read().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} cannot be read ({e}): write one class name a line, or remove it") from e
    if num_of_class is not None and len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class} is smaller than the {len(classes)} classes in {path}: "
            f"give --num-of-class {len(classes)}"
        )
    return classes


def check_labels(path, labels, num_of_class, classes):
    """Raise UsageError for a label that there is no class name or no output for.

    Args:
        path: where the labels stand.
        labels: numbers.
        num_of_class: number of outputs of the network; None: any.
        classes: class names, or None.
    """
    limit = len(classes) if classes else num_of_class
    for label in labels:
        if label != int(label) or label < 0 or (limit is not None and label >= limit):
            source = "classes.txt" if classes else f"--num-of-class {num_of_class}"
            allowed = "whole numbers from 0 are" if limit is None else f"{source} allows 0 to {limit - 1}"
            raise UsageError(
                f"{path} has the label {label:g}, and {allowed}: number the classes from 0, or give a larger "
                "--num-of-class"
            )


def read_skip_list(path, image_root):
    """The entries of a --skip-list: one Image.name a line, as `dataset verify --fix-list` writes them.

    Returns:
        frozenset of the names.
    Raises:
        UsageError: the file cannot be read, or an entry names no file.
    """
    try:
        with open(path, encoding="utf-8") as f:
            names = [line.rstrip("\n") for line in f]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--skip-list {path} cannot be read ({e}): name a text file with one path a line") from e
    skip = frozenset(os.path.normpath(name) for name in names if name.strip())
    for name in sorted(skip):
        # Whether the record of SHARD@PLACE is there shows when the shard's index is read.
        shard = name.rpartition("@")[0]
        if not os.path.isfile(os.path.join(image_root, name)) and not (
            shard and os.path.exists(os.path.join(image_root, shard))
        ):
            raise UsageError(f"--skip-list {path}: {name} is no file in {image_root}: remove the line")
    return skip
