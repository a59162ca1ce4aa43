"""Data sets for --multi-label: images with any number of classes. docs/multilabel.md describes the rules.

A split is stored in one of three ways:
- a label table IMAGE_ROOT/SPLIT.csv or SPLIT.jsonl (layout.TABLES), which takes precedence over class folders,
- class folders, if files in several of them are the same image,
- RecordIO files, whose records have several labels.

The labels of an image are a row of class numbers, padded with -1. The DALI pipeline converts the row to a vector with 1
for each class of the image and 0 for all others.
"""

import csv
import functools
import hashlib
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from paddle_resnet.data import classes as class_names
from paddle_resnet.data import image_files, indexes, numbering, split_names
from paddle_resnet.data.data_set import DataSet, digest
from paddle_resnet.data.formats import filelist, folder, recordio
from paddle_resnet.data.images import TEXT_LIMIT, Image, is_outside, log_once, readable
from paddle_resnet.data.layout import TABLES
from paddle_resnet.data.shards import Records
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

IMAGE_KEYS = ("image", "file_name")  # keys of an image in a JSONL table
SEPARATORS = ("|", ";", ",")  # separators of class names in a cell, in order of precedence
_FLAGS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}  # {text of a cell: value} for the columns that contain one class each


class Root(Protocol):
    """The part of root.DataRoot that this module needs."""

    image_root: str
    data_format: str
    allow_outside: bool

    @functools.cached_property
    def skip(self) -> frozenset[str]: ...

    def format(self, mode: Mode) -> str: ...

    def numbering(self, mode: Mode, num_of_class: int | None, trained: Sequence[str] | None) -> numbering.Numbering: ...

    def records(self, mode: Mode, skip: frozenset[str]) -> Records: ...


class Table(NamedTuple):
    """A label table.

    Attributes:
        images: paths as in the table.
        labels: names of the classes of each image.
        columns: names of the classes if each class has a column, in this order; otherwise, None.
    """

    images: list[str]
    labels: list[list[str]]
    columns: list[str] | None


class Labels(NamedTuple):
    """The images of a split, without the images of the skip list, and their classes.

    Attributes:
        names: Image.name of each image.
        numbers: labels of the classes of each image.
        classes: names of the classes in label order.
        records: the records that contain the images, or None for image files.
        is_vector: whether the labels of a record are a vector of 0 and 1.
    """

    names: list[str]
    numbers: list[list[int]]
    classes: list[str]
    records: Records | None = None
    is_vector: bool = False


def table_path(image_root: str, mode: Mode) -> str | None:
    """Return the path of a split's label table, or None. Raise UsageError if the split has several tables."""
    paths = split_names.find(image_root, mode, TABLES)
    if len(paths) > 1:
        raise UsageError(f"{paths[0]}: {paths[1]} also contains the labels of this split; remove one of the files")
    return paths[0] if paths else None


def read_table(path: str) -> Table:
    """Read a label table.

    A JSONL file has lines such as {"image": "train/1.jpg", "labels": ["cat", "sofa"]}. The first column of a CSV file
    contains images. Either each further column is a class, with the cells 0 and 1, or a single further column contains
    names of classes, separated by the first of SEPARATORS that occurs in the column or, if none occurs, by spaces.

    Raises:
        UsageError: the file cannot be read, contains no images, or has an invalid line; or an image occurs twice.
    """
    try:
        with open_regular(path, TEXT_LIMIT) as f:
            text = f.read().decode("utf-8-sig")
        table = (_read_csv if path.endswith(".csv") else _read_jsonl)(path, text)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8" if isinstance(e, ValueError) else e
        raise UsageError(f"{path}: cannot be read ({reason}); make it readable, and save it as UTF-8") from e
    if not table.images:
        raise UsageError(f"{path}: contains no images; add a line per image")
    image, count = Counter(table.images).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{path}: {image} occurs {count} times; write one line per image, with all its classes")
    return table


def _read_csv(path, text):
    header, *rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row] or [[]]
    header = [name.strip() for name in header]
    if len(header) < 2 or not all(header) or len(set(header)) < len(header):
        raise UsageError(
            f"{path}: the first line is {','.join(header)[:100]!r}; write different names of columns: one for the "
            "image, and then one per class, or a single one for the names of an image's classes"
        )
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise UsageError(f"{path}: row {number} has {len(row)} cells instead of {len(header)}; correct it")
    images, cells = [row[0].strip() for row in rows], [[cell.strip() for cell in row[1:]] for row in rows]
    if len(header) > 2:
        labels = []
        for number, row in enumerate(cells, 2):
            if wrong := [cell for cell in row if cell not in _FLAGS]:
                raise UsageError(
                    f"{path}: row {number} has {wrong[0][:100]!r} in a column for a class; write 1 if the image has "
                    "the class, otherwise 0"
                )
            labels.append([name for name, cell in zip(header[1:], row, strict=True) if _FLAGS[cell]])
        return Table(images, labels, header[1:])
    if cells and all(cell in _FLAGS for [cell] in cells):
        raise UsageError(
            f"{path}: the column {header[1]} contains only 0 and 1, so it may be a class or contain names of classes; "
            "write names, or a JSONL file"
        )
    separator = next((mark for mark in SEPARATORS if any(mark in cell for [cell] in cells)), None)
    labels = [[name for part in cell.split(separator) if (name := part.strip())] for [cell] in cells]
    return Table(images, labels, None)


def _read_jsonl(path, text):
    images, labels = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        entry = entry if isinstance(entry, dict) else {}
        image = next((entry[key] for key in IMAGE_KEYS if key in entry), None)
        names = entry.get("labels")
        if not isinstance(image, str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise UsageError(
                f"{path}: line {number} is {line.strip()[:100]!r}; write lines such as "
                '{"image": "1.jpg", "labels": ["cat"]}'
            )
        images.append(image)
        labels.append(names)
    return Table(images, labels, None)


def storage(root: Root, mode: Mode) -> str:
    """Return how a split is stored: "table", "folder" or "recordio". Raise UsageError if the split is stored
    differently, or if root.format or table_path raises UsageError."""
    if root.data_format == AUTO and table_path(root.image_root, mode):
        return "table"
    kind = root.format(mode)
    if kind not in ("folder", "recordio"):
        raise UsageError(
            f"--multi-label: {kind} has one label per image, and the {mode.value} split in {root.image_root} is in "
            f"this format; write {mode.value}.csv, or remove --multi-label"
        )
    return kind


def data_classes(root: Root, mode: Mode) -> list[str] | None:
    """Return the classes of a data set: the lines of classes.txt or, without this file, those of the training split
    or, if it does not exist, of the split `mode`; None if the split does not exist.

    The classes of a table are its columns or the sorted names. The classes of records are numbers.

    Raises:
        UsageError: the data set cannot be read.
    """
    names = class_names.class_names(root.image_root)
    mode = Mode.TRAIN if _exists(root, Mode.TRAIN) else mode
    kind = storage(root, mode)
    if kind == "folder":
        return numbering.data_classes(root, mode)
    if names is not None:
        return names
    if kind == "table":
        table = read_table(table_path(root.image_root, mode))
        return table.columns or sorted({name for names in table.labels for name in names})
    labels = _record_labels(root.records(mode, frozenset()))
    if _is_vector(labels, None):
        return class_names.numbers(len(labels[0]))
    return class_names.numbers(int(max((max(row) for row in labels if row), default=-1)) + 1)


def _exists(root, mode):
    kind = storage(root, mode)
    return kind != "folder" or bool(folder.detect(root.image_root, mode))


def read_labels(
    root: Root,
    mode: Mode,
    num_of_class: int | None = None,
    trained: Sequence[str] | None = None,
    allow_empty: bool = False,
) -> Labels:
    """Return the images of a split and their classes.

    Args:
        root: DataRoot of the data set.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        num_of_class: number of network outputs, or None for any number.
        trained: see numbering.establish.
        allow_empty: whether class folders in train/ may be empty.
    Raises:
        UsageError: the split cannot be used.
    """
    kind = storage(root, mode)
    is_named = trained is not None and not numbering.are_numbers(trained)
    names = list(trained) if is_named else data_classes(root, mode)
    if names is not None and num_of_class is not None and len(names) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class}: fewer than the {len(names)} classes in {root.image_root}; "
            f"use --num-of-class {len(names)}"
        )
    if kind == "recordio":
        own = data_classes(root, mode) if is_named else names
        if is_named and not numbering.are_numbers(own):
            numbering.check_names(os.path.join(root.image_root, "classes.txt"), own, num_of_class, trained)
        return _records(root, mode, names, len(own))
    if kind == "table":
        return _table(root, mode, names, is_named)
    if not is_named and _exists(root, Mode.TRAIN) and storage(root, Mode.TRAIN) == "folder":
        numbers = root.numbering(mode, num_of_class, trained)
        names, is_named = numbers.classes, numbers.is_trained
    return _folders(root, mode, num_of_class, names, is_named, allow_empty)


def _table(root, mode, names, is_trained):
    image_root, path = root.image_root, table_path(root.image_root, mode)
    table = read_table(path)
    number_of = {name: i for i, name in enumerate(names)}
    used = {name for row in table.labels for name in row} | {*(table.columns or ())}
    if unknown := sorted(used - set(number_of)):
        source = "the checkpoint" if is_trained else "classes.txt or the training split"
        raise UsageError(
            f"{path}: the class {unknown[0]} is not one of the {len(names)} classes of {source}; rename or remove it"
        )
    if table.columns is not None and (missing := [name for name in names if name not in table.columns]):
        raise UsageError(f"{path}: has no column for the class {missing[0]}; add it, with the cells 0 and 1")
    folders = split_names.find(image_root, mode, "(?P<set>){split}", os.path.isdir)
    within = os.path.basename(folders[0]) if folders else mode.value
    within = "" if os.path.isfile(os.path.join(image_root, table.images[0])) else within
    if within and not os.path.isfile(os.path.join(image_root, within, table.images[0])):
        raise UsageError(
            f"{path}: {table.images[0]} is not in {image_root} or {os.path.join(image_root, within)}; use paths "
            "relative to one of these folders"
        )
    images = [os.path.join(within, image) for image in table.images]
    for image in images:
        if "\0" in image:
            raise UsageError(f"{path}: {image!a} contains a null character; correct the path")
        if not root.allow_outside and is_outside(image, image_root):
            raise UsageError(f"{path}: {image!a} is outside {image_root}; correct the path, or add --allow-outside")
    rows = [sorted({number_of[name] for name in row}) for row in table.labels]
    kept = [i for i, image in enumerate(images) if os.path.normpath(image) not in root.skip]
    images = [images[i] for i in kept]
    filelist.check_listed(image_root, mode, images, path)
    return Labels(images, [rows[i] for i in kept], names)


def _folders(root, mode, num_of_class, names, is_trained, allow_empty):
    """Return the Labels of class folders. Files with the same name in different folders are the same image if they are
    links to the same file or have the same content."""
    image_root = root.image_root
    listed = folder.index(image_root, mode, num_of_class, root.skip, names, is_trained)
    if mode is Mode.TRAIN:
        class_names.check_classes(image_root, mode, "folder", listed.labels, listed.classes, allow_empty, True)
    groups = defaultdict(list)
    for i, name in enumerate(listed.names):
        groups[os.path.basename(name)].append(i)
    images, rows, different = [], [], 0
    for same_name in groups.values():
        contents = _same_images(image_root, [listed.names[i] for i in same_name]) if len(same_name) > 1 else [0]
        different += len(set(contents)) > 1
        for content in dict.fromkeys(contents):
            files = [i for i, other in zip(same_name, contents, strict=True) if other == content]
            if not any(os.path.normpath(listed.names[i]) in root.skip for i in files):
                images.append(files[0])
                rows.append(sorted({listed.labels[i] for i in files}))
    order = np.argsort(images, kind="stable").tolist()
    if different:
        log_once(
            f"{image_root}: {counted(different, 'file name')} in several class folders of {mode.value}/ with different "
            "content, which are read as different images",
            logger.info,
        )
    return Labels([listed.names[images[i]] for i in order], [rows[i] for i in order], listed.classes)


def _same_images(image_root, names):
    """Return a value for each file, which is equal for files that are links to the same file or have the same
    content."""
    paths = [os.path.join(image_root, name) for name in names]
    with readable(image_root):
        statuses = [os.stat(path) for path in paths]
        files = {(status.st_dev, status.st_ino): path for status, path in zip(statuses, paths, strict=True)}
        if len(files) > 1:
            sizes = Counter(os.path.getsize(path) for path in files.values())
            hashes = {file: _hash(path) if sizes[os.path.getsize(path)] > 1 else file for file, path in files.items()}
        else:
            hashes = dict.fromkeys(files, 0)
    return [hashes[status.st_dev, status.st_ino] for status in statuses]


def _hash(path):
    with open_regular(path) as f:
        return hashlib.sha256(f.read()).digest()


def _records(root, mode, names, count):
    """Return the Labels of records. `names` are the classes in label order, `count` is the number of classes in the
    data set."""
    records = root.records(mode, root.skip)
    labels = _record_labels(records)
    is_vector = _is_vector(labels, count)
    if is_vector and count > len(names):
        raise UsageError(
            f"--image-root {root.image_root}: each RecordIO record of {mode.value} has {count} labels, one per class, "
            f"but the checkpoint has {counted(len(names), 'class', 'classes')}; store one label for each of these "
            "classes"
        )
    if is_vector:
        numbers = [np.flatnonzero(row).tolist() for row in labels]
    else:
        named = [() if row == (-1,) else row for row in labels]
        wrong = {label for row in named for label in row if not class_names.is_class(label, len(names))}
        if wrong:
            raise UsageError(
                f"--image-root {root.image_root}: a RecordIO record of {mode.value} has the label {min(wrong):g}, but "
                f"there are {len(names)} classes; store class numbers from 0 to {len(names) - 1}, -1 for an image "
                "without classes, or one label per class, 0 or 1"
            )
        numbers = [sorted({int(label) for label in row}) for row in named]
    return Labels([image.name for image in records.images(0)], numbers, list(names), records, is_vector)


def _record_labels(records):
    """Return the labels of each record, tuples of floats."""
    rows, opened = [], {}
    for image in records.images(0):
        if image.path not in opened:
            status = os.stat(image.path)
            opened[image.path] = _labels_of(image.path, status.st_size, status.st_mtime_ns)
        rows.append(opened[image.path][image.place[0]])
    return rows


@functools.cache  # a run calls this function several times; size and mtime_ns invalidate the result if the file changes
def _labels_of(path, size, mtime_ns):
    """Return {offset: labels} of all records of a RecordIO file."""
    offsets = indexes.open_index(path, recordio.INDEX).images[:, 0].tolist()
    with open_regular(path) as f:
        return {offset: recordio.read_labels(f, offset) for offset in offsets}


def _is_vector(labels, count):
    """Return whether the labels of each record are a vector with one element per class, 0 or 1. `count` is the number
    of classes, or None if it is unknown."""
    width = len(labels[0])
    has_width = width > 1 and count in (None, width) and all(len(row) == width for row in labels)
    return has_width and all(label in (0, 1) for row in labels for label in row)


def open_split(
    root: Root,
    mode: Mode,
    num_of_class: int | None,
    seed: int,
    trained: Sequence[str] | None = None,
    allow_empty: bool = False,
) -> DataSet:
    """Open a split for the DALI pipeline. For the arguments, see root.DataRoot.open. The labels that DataSet.read
    returns are float32 [num_of_class or, if it is None, number of classes].

    Raises:
        UsageError: see read_labels; or the split has no images, no image has a class, or a class name contains |.
    """
    found = read_labels(root, mode, num_of_class, trained, allow_empty)
    outputs = num_of_class or len(found.classes)
    if not found.names:
        raise UsageError(
            f"--image-root {root.image_root}: {mode.value} has no images; add images, or shorten --skip-list"
        )
    if wrong := [name for name in found.classes if "|" in name]:
        raise UsageError(f"{root.image_root}: the class {wrong[0]!a} contains |, which separates names; rename it")
    images = np.zeros(len(found.classes), np.int64)
    for row in found.numbers:
        images[row] += 1
    sizes = [len(row) for row in found.numbers]
    if not any(sizes):
        raise UsageError(f"--image-root {root.image_root}: no image of {mode.value} has a class; add labels")
    several = counted(sum(size > 1 for size in sizes), "image")
    log_once(
        f"--multi-label: {counted(len(sizes), 'image')} in {mode.value}, {counted(len(images), 'class', 'classes')}; "
        f"{several} with several classes, {sizes.count(0)} with none",
        logger.info,
    )
    if empty := [name for name, count in zip(found.classes, images, strict=True) if count == 0]:
        log_once(
            f"--image-root {root.image_root}: {mode.value} has no images for {len(empty)} of {len(images)} classes "
            f"({', '.join(empty[:5])}{', ...' * (len(empty) > 5)}); add images",
            logger.warn,
        )
    options: dict[str, Any] = {"class_images": images, "is_multi_label": True}
    if found.records is not None:
        identity = digest(*found.records.identity, found.numbers, found.classes)
        read = functools.partial(_read_records, found.records, found.is_vector, outputs, seed)
        options |= {"records": functools.partial(_record_images, found.records)}
        return DataSet("recordio", found.records.size, found.classes, read, identity, **options)
    identity = digest("\n".join(found.names), found.numbers, found.classes)
    files, rows = found.names, found.numbers
    if mode is Mode.TRAIN:  # DALI's shuffle has a fixed seed
        order = np.random.RandomState(seed).permutation(len(files)).tolist()
        files, rows = [files[i] for i in order], [rows[i] for i in order]
    read = functools.partial(_read_files, root.image_root, files, rows, outputs)
    stored_as = "folder" if storage(root, mode) == "folder" else "filelist"
    return DataSet(stored_as, len(files), found.classes, read, identity, files=found.names, **options)


def listed(root: Root, mode: Mode) -> list[Image]:
    """List the images of a split in stored order, without those of the skip list. Image.label is None. Class folders
    may be empty."""
    names = folder.own_classes(root.image_root, mode) if storage(root, mode) == "folder" else None
    found = read_labels(root, mode, trained=names, allow_empty=True)
    if found.records is not None:
        return [*_record_images(found.records)]
    return [Image(name, os.path.join(root.image_root, name), None) for name in found.names]


def _record_images(records):
    """Yield an Image for each record. The `kind` of each Image is a function, so that formats.read_image accepts
    records with several labels."""
    for image in records.images(0):
        yield Image(image.name, image.path, None, recordio.read_content, image.place[:1])


def _read_files(image_root, files, rows, num_of_class, name, shard_id, num_shards, shuffle):
    """Add the reader of image files to the DALI pipeline under construction. The label that DALI's reader returns is an
    index in the table of all sets of classes that occur in `rows`."""
    from nvidia.dali import types

    sets = {row: i for i, row in enumerate(dict.fromkeys(map(tuple, rows)))}
    table = np.full((len(sets), max(map(len, sets))), -1, np.int32)
    for row, i in sets.items():
        table[i, : len(row)] = row
    labels = [sets[tuple(row)] for row in rows]
    encoded, label = image_files.read(image_root, files, labels, name, shard_id, num_shards, shuffle)
    return encoded, _vector(types.Constant(table, device="cpu")[label[0]], num_of_class)


def _read_records(records, is_vector, num_of_class, seed, name, shard_id, num_shards, shuffle):
    from nvidia.dali import fn, types

    encoded, labels = recordio.read_stored(records, name, shard_id, num_shards, shuffle, seed)
    if is_vector:
        return encoded, fn.pad(labels, axes=[0], shape=[num_of_class])
    return encoded, _vector(fn.cast(labels, dtype=types.INT32), num_of_class)


def _vector(numbers, num_of_class):
    """Add operators that convert class numbers [k] to float32 [num_of_class]. The number -1 stands for no class."""
    from nvidia.dali import fn, types

    # one_hot treats a single number as a scalar, and its result would lack the first axis.
    numbers = fn.cat(numbers, types.Constant(np.array([-1], np.int32), device="cpu"), axis=0)
    return fn.reductions.max(fn.one_hot(numbers, num_classes=num_of_class, dtype=types.FLOAT), axes=[0])
