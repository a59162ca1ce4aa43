"""List the contents of --image-root: storage formats (see docs/data.md), files, classes and images.

This module imports neither DALI nor Paddle, so that the tools' worker processes start without these imports.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from paddle_resnet.data import indexes, records, sniffer
from paddle_resnet.data.records import IMAGE_ENDINGS, IMAGE_SUFFIXES
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, counted, printable
from paddle_resnet.utils.mode import Mode, RunScope

SHARD_NAMES = {
    "recordio": {Mode.TRAIN: re.compile(r"train\.rec"), Mode.EVAL: re.compile(r"val\.rec")},
    "tfrecord": {
        Mode.TRAIN: re.compile(r"train-\d+-of-(?P<total>\d+)(\.tfrecords?)?"),
        Mode.EVAL: re.compile(r"val(idation)?-\d+-of-(?P<total>\d+)(\.tfrecords?)?"),
    },
    "webdataset": {
        Mode.TRAIN: re.compile(r"(?P<stem>(.*[-_])?train-)(?P<number>\d+)\.tar"),
        Mode.EVAL: re.compile(r"(?P<stem>(.*[-_])?val(idation)?-)(?P<number>\d+)\.tar"),
    },
    "lmdb": {Mode.TRAIN: re.compile(r"train_lmdb"), Mode.EVAL: re.compile(r"val_lmdb")},
}
FILE_FORMATS = ("folder", "filelist")  # formats with one file per image
STORAGE_FORMATS = (*FILE_FORMATS, *SHARD_NAMES)
# Common names of each split in lower case, most common first.
OTHER_NAMES = {
    Mode.TRAIN: ("train", "training"),
    Mode.EVAL: ("val", "valid", "validation", "test", "testing", "eval", "dev"),
}
# Folders that operating systems and archive tools create. Like hidden folders, these folders are not classes.
SYSTEM_FOLDERS = ("__MACOSX", "lost+found", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information")
HIDDEN = "hidden image"  # kind of an ignored file, for warn_of_ignored
OUTSIDE = "image outside the class folders"  # kind of an ignored file, for warn_of_ignored
_PLURALS = {HIDDEN: "hidden images", OUTSIDE: "images outside the class folders", "folder": "folders"}
_IMAGENET_CLASSES = 1000
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
_TEXT_LIMIT = 1 << 30  # maximum size in bytes of a file list, classes.txt or skip list
_NAME_LIMIT = 1000  # maximum number of characters in a class name; Python's CSV reader accepts 131,072
# Files in which other programs list the shards of a WebDataset: timm's _info.json, and sizes.json of webdataset.
SHARD_LISTS = ("_info.json", "info.json", "sizes.json")
_LABEL_TABLE = re.compile(r".+\.csv|metadata\..+", re.IGNORECASE)  # files that probably contain labels
# File that describes a conversion; tools/convert.py writes it to the output folder.
MANIFEST = "convert.json"
EXAMPLE_NAMES = {
    "recordio": "{}.rec",
    "tfrecord": "{}-00000-of-00001",
    "webdataset": "{}-000000.tar",
    "lmdb": "{}_lmdb",
}


@dataclass(frozen=True, slots=True)  # an import lists 1.3 million images; slots save 100 bytes per image
class Image:
    """One image in a data set.

    Attributes:
        name: name in reports and skip lists. For an image file, the name is the path relative to image_root. For a
            record, the name is FILE@PLACE, where PLACE is the byte offset that DALI reports or, in an LMDB, the key.
            For an image of a source of `dataset import`, the name begins with a path in the imported data set or
            with FILE@PLACE.
        path: the image file, the record file, or a file of a source.
        label: label of the image, or None for a record; records.read returns the label of a record.
        kind: None for an image file, the format of the record file or, for a source of `dataset import`, the function
            that returns the content of an image file when it is called with `path` and the elements of `place`.
        place: position for records.read: (offset, size, label offset, label size) in bytes, the key in an LMDB, or
            arguments of the function `kind`.
        label_offset: number that records.read subtracts from the stored label of a record.
    """

    name: str
    path: str
    label: int | None
    kind: str | None = None
    place: tuple | bytes = ()
    label_offset: int = 0

    @property
    def full_name(self):
        """Return the name to use in messages: PATH or FILE@PLACE, including image_root."""
        return self.path if self.kind is None else f"{self.path}@{self.name.rpartition('@')[2]}"


def check_root(image_root, content="train/ and val/", flag="--image-root"):
    """Raise UsageError if --image-root is not a folder, or if its path is not valid UTF-8, which DALI requires."""
    if not os.path.isdir(image_root):
        raise UsageError(f"{flag} {image_root}: not a folder; use the folder that contains {content}")
    if not is_utf8(os.path.abspath(image_root)):
        raise UsageError(f"{flag} {image_root!a}: the path is not valid UTF-8; rename the folder")


def check_split(flag, image_root, mode):
    """Raise UsageError if the data set that a flag such as --verify specifies does not contain a split. Commands that
    read the data set late call this function at startup, so that they fail early."""
    check_root(image_root, f"{mode.value}/", flag)
    if not _has_split(image_root, mode):
        similar = _similar(image_root, mode)
        remedy = f"rename {similar} to {mode.value}/" if similar else sniffer.advice(image_root, only_certain=True)
        remedy = remedy or f"put the class folders into {mode.value}/"
        raise UsageError(f"{flag} {image_root}: has no {mode.value}/; {remedy}, or use a different folder")


def is_utf8(path):
    """Return whether a path is valid UTF-8, which DALI requires."""
    return os.fsencode(path) == str(path).encode(errors="replace")


def detect(image_root, mode):
    """Detect the storage format of a split from the names of the files in image_root.

    A file list takes precedence over class folders, because the list may contain images in these folders.

    Returns:
        One of STORAGE_FORMATS; "folder" if no format is detected.
    Raises:
        UsageError: image_root is not a folder, or contains the split in several formats.
    """
    check_root(image_root)
    formats = [data_format for data_format in SHARD_NAMES if find_shards(image_root, data_format, mode)]
    if os.path.isfile(os.path.join(image_root, f"{mode.value}.txt")):
        formats.append("filelist")
    elif os.path.isdir(os.path.join(image_root, mode.value)):
        formats.append("folder")
    if len(formats) > 1:
        raise UsageError(
            f"--image-root {image_root}: contains the {mode.value} split as {' and '.join(formats)}; choose one with "
            "--data-format"
        )
    # If no format is detected, list_folder will raise an error that states what is missing.
    return formats[0] if formats else "folder"


def occupied(image_root):
    """Return the paths below image_root that are reserved for data sets, including paths that do not exist. An output
    must be neither at nor below a reserved path."""
    if not os.path.isdir(image_root):
        return []
    own = {MANIFEST, "classes.txt", *(f"{mode.value}{suffix}" for mode in Mode for suffix in ("", ".txt"))}
    shards = [pattern for patterns in SHARD_NAMES.values() for pattern in patterns.values()]
    own |= {name for name in os.listdir(image_root) if any(pattern.fullmatch(name) for pattern in shards)}
    own |= {name for name in os.listdir(image_root) if name.endswith(".idx")}
    return [os.path.join(image_root, name) for name in sorted(own)]


def splits(image_root):
    """Return the modes (Mode.TRAIN, Mode.EVAL) whose split exists in image_root.

    Raises:
        UsageError: neither split exists, or image_root cannot be used.
    """
    check_root(image_root)
    modes = [mode for mode in Mode if _has_split(image_root, mode)]
    if not modes:
        _check_complete(image_root)
        raise UsageError(f"{image_root}: contains neither train/ nor val/ in any format; {_splits_remedy(image_root)}")
    return modes


def _has_split(image_root, mode):
    return os.path.exists(os.path.join(image_root, mode.value)) or detect(image_root, mode) != "folder"


def _missing(image_root, mode):
    """Return the UsageError for a split that image_root does not contain in any format."""
    other, scope = (Mode.EVAL, RunScope.EVAL_ONLY) if mode is Mode.TRAIN else (Mode.TRAIN, RunScope.TRAIN_ONLY)
    if not _has_split(image_root, other):
        return UsageError(f"--image-root {image_root}: has no folder {mode.value}/; {_splits_remedy(image_root)}")
    examples = {"folder": "{}/", "filelist": "{}.txt", **EXAMPLE_NAMES}
    data_format = detect(image_root, other)
    wanted, there = (examples[data_format].format(split.value) for split in (mode, other))
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
    patterns = [patterns[mode] for patterns in SHARD_NAMES.values() for mode in modes]

    def is_compressed(name):
        stem, ending = os.path.splitext(name)
        original = {".gz": stem, ".tgz": f"{stem}.tar"}.get(ending, "")
        return any(pattern.fullmatch(original) for pattern in patterns)

    names = sorted(filter(is_compressed, os.listdir(image_root)))
    if not names:
        return None
    files = f"{shlex.quote(str(image_root))}/*{os.path.splitext(names[0])[1]}"
    return f"{printable(_some(names))} cannot be read, because DALI does not support gzip: run `gunzip {files}`"


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
        return f"extract {printable(_some(archives))} to train/CLASS/ and val/CLASS/, with one folder per class"
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


def images(
    image_root,
    mode,
    data_format=None,
    allow_outside=False,
    classes=None,
    skip=frozenset(),
    label_offset=0,
):
    """List all images of a split in stored order, which is also the order of evaluation. numbering.images also checks
    that both splits number their classes in the same way.

    Args:
        image_root: the folder that contains the split.
        mode: Mode.TRAIN or Mode.EVAL.
        data_format: one of STORAGE_FORMATS, or None to detect the format.
        allow_outside: whether a file list may contain files outside image_root.
        classes, skip: for class folders, see list_folder.
        label_offset: number to subtract from the labels in file lists and records.
    Returns:
        (storage format, classes or None, [Image])
    Raises:
        UsageError: the split cannot be used.
    """
    data_format = data_format or detect(image_root, mode)
    if data_format in FILE_FORMATS:
        if data_format == "folder":
            files, labels, classes = list_folder(image_root, mode, None, skip, classes)
        else:
            files, labels, classes = list_filelist(image_root, mode, None, allow_outside, label_offset)
        listed = [Image(name, os.path.join(image_root, name), label) for name, label in zip(files, labels, strict=True)]
        return data_format, classes, listed
    listed, counts = [], {}
    for shard in shards(image_root, mode, data_format):
        before = len(listed)
        index = None if data_format == "lmdb" else indexes.open_index(shard, data_format)
        listed += records_of(shard, data_format, index, label_offset)
        counts[os.path.basename(shard)] = len(listed) - before
    if data_format == "webdataset":
        check_samples(image_root, mode, counts)
    check_count(image_root, mode, data_format, len(listed))
    return data_format, class_names(image_root), listed


def records_of(shard, data_format, index, label_offset):
    """Yield the Image of each record in a record file in stored order.

    Args:
        shard: path of the record file.
        data_format: a key of SHARD_NAMES.
        index: indexes.Index of the shard, or None for an LMDB.
        label_offset: number that records.read subtracts from the labels.
    """
    if data_format == "lmdb":
        places = ((os.fsdecode(key), key) for key in records.lmdb_keys(shard))
    else:
        places = ((row[0], tuple(row)) for row in np.hstack([index.images, index.labels]).tolist())
    for shown, place in places:
        yield Image(f"{os.path.basename(shard)}@{shown}", shard, None, data_format, place, label_offset)


def list_folder(image_root, mode, num_of_class=None, skip=frozenset(), classes=None, is_trained=False):
    """List class folders: IMAGE_ROOT/train/CLASS/IMAGE and IMAGE_ROOT/val/CLASS/IMAGE.

    A class without validation images does not shift the labels of other classes. A single warning states how many files
    are ignored because of their name or folder.

    Args:
        image_root: the folder above train/ and val/.
        mode: Mode.TRAIN lists train/, Mode.EVAL lists val/.
        num_of_class: number of network outputs, or None for any number.
        skip: names of images that the caller will drop. These images are listed even if they are not regular files or
            their names are not valid UTF-8.
        classes: names of the class folders in label order (numbering.Numbering.classes); None for the sorted class
            folders of train/, or of val/ if train/ does not exist.
        is_trained: whether `classes` are those of a trained network.
    Returns:
        (paths relative to image_root, labels, names of the class folders)
    Raises:
        UsageError: a folder is missing, there are no class folders, there are more class folders than network outputs,
            a class exists only in val/ or is not in `classes`, or an image is not a regular file.
    """
    split = mode.value
    split_dir = os.path.join(image_root, split)
    check_root(image_root)
    if not os.path.isdir(split_dir):
        _check_complete(image_root)
        raise _missing(image_root, mode)
    _check_complete(image_root, "folder")

    folders = class_folders(split_dir)
    if len(folders) == 1:
        _check_nesting(os.path.join(split_dir, folders[0]), split_dir)
    check_utf8(split_dir, folders)
    if classes is None:
        label_dir = label_folder(image_root, mode)
        classes = class_folders(label_dir)
        if not classes:
            raise UsageError(
                f"--image-root {image_root}: {os.path.basename(label_dir)}/ has no class folders; "
                f"{sniffer.advice(image_root) or sniffer.PUT}"
            )
    if num_of_class is not None and len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class}: fewer than the {len(classes)} class folders in {image_root}; "
            f"use --num-of-class {len(classes)}"
        )
    files, labels = [], []
    ignored = [(OUTSIDE, "", name) for name in images_at_the_top(split_dir)]
    label_of = {name: label for label, name in enumerate(classes)}
    _check_unicode(split_dir, [name for name in folders if not is_trained or name not in label_of], classes)
    for name in folders:
        if name not in label_of:
            raise UsageError(
                f"--image-root {image_root}: {split}/{name} is not one of the {len(classes)} classes of the checkpoint "
                f"({_some(classes)}); remove or rename it"
                if is_trained
                else f"--image-root {image_root}: val/{name} has no train/{name}; "
                + _unknown_folder(image_root, name, folders, classes)
            )
        images, unusable, others = image_files(os.path.join(split_dir, name))
        for file in unusable:
            if f"{split}/{name}/{file}" not in skip:
                raise UsageError(
                    f"{os.path.join(split_dir, name, file)}: a broken link, or not a regular file; remove it, or omit "
                    "it with --skip-list"
                )
        files += [f"{split}/{name}/{file}" for file in images]
        labels += [label_of[name]] * len(images)
        ignored += [(kind, name, file) for kind, file in others]
    if not is_utf8("".join(files)):
        for name in files:
            if not is_utf8(name) and os.path.normpath(name) not in skip:
                raise UsageError(
                    f"--image-root {image_root}: {os.fsencode(name)!r} is not valid UTF-8; rename the file, or omit it "
                    "with --skip-list"
                )
    warn_of_ignored(split_dir, ignored)
    return files, labels, classes


def _unknown_folder(image_root, name, folders, classes):
    """Return what to do with a folder in val/ that is not a class.

    Args:
        name: the folder.
        folders: all folders in val/.
        classes: names of the classes.
    """
    same = {known.casefold(): known for known in classes}.get(name.casefold())
    if same is not None and same not in folders:
        paths = (os.path.join(image_root, "val", each) for each in (name, same))
        return f"the class is {same}: run `{shlex.join(['mv', *paths])}`"
    if {*folders}.isdisjoint(classes) and (advice := sniffer.advice(image_root, only_certain=True)):
        return advice
    return f"add it, or remove val/{name}"


def check_utf8(path, names):
    """Raise UsageError if the name of a class folder in `path` is not valid UTF-8, as text files and JSON require."""
    for name in names:
        if not is_utf8(name):
            raise UsageError(f"{path}: the class folder {os.fsencode(name)!r} is not valid UTF-8; rename the folder")


def _check_unicode(folder, names, classes):
    """Raise UsageError if the name of a class folder looks like that of a different class, because one of them is in
    the Unicode form of macOS (NFD) and one in the form of other systems (NFC)."""
    forms = {unicodedata.normalize("NFC", name): name for name in classes}
    for name in names:
        other = forms.get(unicodedata.normalize("NFC", name), name)
        if other != name:
            paths = [os.path.join(folder, each) for each in (name, other)]
            remedy = (
                "move the images into one of the folders and remove the other"
                if other in names
                else f"rename it: `{shlex.join(['mv', *paths])}`"
            )
            raise UsageError(
                f"{paths[0]}: the name {name!a} looks like the class {other!a}, but has a different Unicode "
                f"form; {remedy}"
            )


def _check_nesting(folder, split_dir):
    """Raise UsageError if the only class folder of a split contains folders, but no images, as in train/train/CLASS."""
    images, _, others = image_files(folder)
    if not images and any(kind == "folder" for kind, _ in others):
        raise UsageError(f"{folder}: contains folders but no images; move these folders to {split_dir}")


def ignored_files(image_root, mode):
    """Return the paths, relative to image_root, of the files that training ignores in the class folders of a split."""
    split_dir = os.path.join(image_root, mode.value)
    paths = []
    with contextlib.suppress(UsageError):  # list_folder reports this error
        paths += [f"{mode.value}/{name}" for name in images_at_the_top(split_dir)]
        for label in class_folders(split_dir):
            with contextlib.suppress(UsageError):
                paths += [f"{mode.value}/{label}/{name}" for _, name in image_files(os.path.join(split_dir, label))[2]]
    return paths


def own_classes(image_root, mode):
    """Return the names of the class folders in a split, or None if the split has no class folders. If these names are
    passed to images() as `classes`, the labels depend only on this split and may differ from those of training."""
    folder = os.path.join(image_root, mode.value)
    return class_folders(folder) if os.path.isdir(folder) else None


def numbers(count):
    """Return class names for data without class names: the numbers from 0 to `count` - 1."""
    return [str(i) for i in range(count or 0)]


def warn_of_ignored(folder, ignored):
    """Log a warning with the number of ignored files per kind and class folder.

    Args:
        folder: folder that contains the class folders.
        ignored: [(kind, class, name of the file or folder)]. image_files returns kind and name.
    """
    if not ignored:
        return
    kinds = defaultdict(list)
    for kind, label, name in ignored:
        kinds[kind].append((label, name))
    parts = []
    for kind, places in sorted(kinds.items(), key=lambda item: -len(item[1])):
        counts = Counter(label for label, _ in places if label)
        classes = _some([f"{label} {count}" for label, count in counts.most_common()], 3)
        example = os.path.join(*places[0])
        plural = kind if len(places) == 1 else _PLURALS.get(kind, kind)
        parts.append(f"{len(places)} {plural} ({f'{classes}; ' if classes else ''}for example {example})")
    _log_once(
        printable(
            f"{folder}: {counted(len(ignored), 'entry', 'entries')} ignored: {_some(parts, 10)}; images must be in a "
            f"class folder and have a name that ends in {IMAGE_ENDINGS} and does not begin with a dot"
        ),
        logger.warn,
    )


def check_classes(image_root, mode, data_format, labels, classes, allow_empty=False, allow_one_class=False):
    """Raise an error or log a warning if classes have no images, or if all training images belong to one class.

    Args:
        image_root: the folder that contains the split.
        mode: Mode.TRAIN or Mode.EVAL.
        data_format: one of FILE_FORMATS.
        labels: labels of all images.
        classes: class names in label order.
        allow_empty: whether empty class folders in train/ trigger a warning instead of an error.
        allow_one_class: whether training images of only one class trigger a warning instead of an error.
    Raises:
        UsageError: a class folder in train/ has no images, and allow_empty is False; or all training images belong to
            one class, and allow_one_class is False.
    """
    there = set(labels)
    empty = [name for label, name in enumerate(classes) if label not in there]
    if empty:
        message = (
            f"--image-root {image_root}: {mode.value} has no images for {len(empty)} of {len(classes)} classes "
            f"({_some(empty)})"
        )
        if mode is Mode.TRAIN and data_format == "folder" and not allow_empty:
            raise UsageError(
                f"{message}; add images ({IMAGE_ENDINGS}), remove the folders, or use --allow-empty-classes"
            )
        _log_once(printable(f"{message}; add images"), logger.warn)
    if mode is Mode.TRAIN and len(there) == 1:
        check_one_class(image_root, classes, min(there), allow_one_class)


def check_one_class(image_root, classes, label, allow):
    """Raise UsageError, or log a warning if `allow` is True, because all training images have the same label. If
    `classes`, the class names in label order, do not contain the label, the message contains its number."""
    name = classes[label] if label < len(classes) else label
    folders = (".", "train", f"train/{name}")
    tables = label_tables(image_root, folders)
    message = f"--image-root {image_root}: all train images belong to one class, {name}"
    if tables:
        message = f"{message}; {_some(tables)} {'is' if len(tables) == 1 else 'are'} not used to assign labels"
    remedy = sniffer.PUT if tables else "add other classes"
    if tables and sniffer.advice(image_root, only_certain=True):
        remedy = f"run {sniffer.import_command(image_root)}"
    if not allow:
        raise UsageError(f"{message}; {remedy}, or use --allow-one-class")
    _log_once(printable(f"{message}; {remedy}"), logger.warn)


def label_tables(root, folders):
    """Return the paths, relative to root, of the files in some of its folders that probably contain labels, such as
    metadata.jsonl, train.csv and _classes.csv."""
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name in classes.txt contains a null character
            names = sorted(os.listdir(os.path.join(root, folder)))
            paths += [os.path.normpath(os.path.join(folder, name)) for name in names if _LABEL_TABLE.fullmatch(name)]
    return paths


def _some(names, most=5, count=None):
    """Return a string that contains the first `most` names, separated by commas, and the number of remaining names.
    `count` is the number of all names if `names` does not contain all."""
    count = count or len(names)
    more = f" and {count - most} more" if count > most else ""
    return f"{', '.join(names[:most])}{more}"


def label_folder(image_root, mode):
    """Return the path of the folder whose class folders are numbered: train/ or, if it does not exist, the folder of
    the split `mode`."""
    folder = os.path.join(image_root, "train")
    return folder if os.path.isdir(folder) else os.path.join(image_root, mode.value)


def list_filelist(image_root, mode, num_of_class=None, allow_outside=False, label_offset=0):
    """Read a file list, IMAGE_ROOT/train.txt or val.txt, with lines `PATH LABEL`. Paths are relative to image_root.

    Args:
        image_root: the folder that contains the list.
        mode: Mode.TRAIN reads train.txt, Mode.EVAL reads val.txt.
        num_of_class: number of network outputs, or None for any number.
        allow_outside: whether the list may contain paths outside image_root. Symbolic links in image_root are always
            allowed to point outside image_root.
        label_offset: number to subtract from the labels.
    Returns:
        (paths relative to image_root, labels, class names or None)
    Raises:
        UsageError: the list is missing or empty, a line is malformed, a path is outside image_root or has two labels,
            or the network has no output for a label.
    """
    path = os.path.join(image_root, f"{mode.value}.txt")
    classes = class_names(image_root)
    files, labels = [], []
    try:
        with records.open_regular(path, _TEXT_LIMIT) as f:
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
            if not allow_outside and _is_outside(name, image_root):
                raise UsageError(
                    f"{path}: line {number} contains {name}, which is outside {image_root}; correct it, or add "
                    "--allow-outside"
                )
            files.append(name)
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
    # Check only the first file, because training checks all files with check_listed, and the data-set tools report
    # unreadable images.
    if not os.path.isfile(os.path.join(image_root, files[0])):
        remedy = sniffer.advice(image_root, only_certain=True) or "use paths relative to that folder"
        raise UsageError(f"{path}: {files[0]} is not in {image_root}; {remedy}")
    return files, [label - label_offset for label in labels], classes


def check_listed(image_root, mode, files):
    """Check that a file list contains only regular files, because DALI would hang on a pipe. For speed, list each
    folder once instead of making one system call per file.

    Args:
        image_root, mode: see list_filelist.
        files: paths relative to image_root.
    Raises:
        UsageError: a path is missing or not a regular file.
    """
    names = defaultdict(set)
    for file in files:
        folder, name = os.path.split(file)
        names[folder].add(name)
    for folder, listed in names.items():
        with contextlib.suppress(OSError), os.scandir(os.path.join(image_root, folder)) as entries:
            listed -= {entry.name for entry in entries if entry.name in listed and _type(entry) == "file"}
        for name in sorted(listed):
            file = os.path.join(folder, name)
            if not os.path.isfile(os.path.join(image_root, file)):  # case-insensitive file systems may find the file
                raise UsageError(
                    f"{os.path.join(image_root, mode.value)}.txt: {file} is missing or not a regular file; "
                    "remove the line"
                )


def _is_no_folder(path):
    return os.path.lexists(path) and not os.path.isdir(path)


def _is_outside(name, image_root):
    """Return whether a path is outside image_root, without resolving links. The path is absolute or relative to
    image_root."""
    if ".." not in name and not name.startswith("/"):
        return False
    root = os.path.abspath(image_root)
    return os.path.commonpath([root, os.path.abspath(os.path.join(root, name))]) != root


def class_folders(path):
    """Return the sorted names of the class folders in a folder. Ignored folders are logged once.

    Raises:
        UsageError: the folder cannot be listed, or contains a broken link.
    """
    entries = {entry.name: _type(entry) for entry in _listed(path)}
    names = sorted(name for name, kind in entries.items() if kind == "folder")
    classes = [name for name in names if not is_system_name(name)]
    for name, kind in entries.items():
        if kind == "link" and not is_system_name(name):
            raise UsageError(f"{os.path.join(path, name)}: a broken link; repair or remove it")
    if len(classes) < len(names):
        others = ", ".join(name for name in names if is_system_name(name))
        _log_once(f"{path}: {printable(others)} ignored: hidden and system folders", logger.info)
    return classes


def is_system_name(name):
    """Return whether a name is that of a hidden folder or one of SYSTEM_FOLDERS."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


@functools.cache
def _log_once(message, log):
    log(message)


def image_files(path):
    """List the images in a class folder. Images are recognized by their extensions.

    Returns:
        (sorted names of the images; sorted names of images that are not regular files but broken links, FIFOs or
        devices; [(kind, name)] of ignored entries, where kind is HIDDEN for an image whose name begins with a dot, and
        otherwise "folder", the extension of a file or "without extension"). Other entries whose names begin with a dot
        are omitted.
    Raises:
        UsageError: the folder cannot be listed.
    """
    listed = _listed(path)
    entries = [entry for entry in listed if not entry.name.startswith(".")]
    kind_of = {entry.name: _type(entry) for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)}
    names = sorted(name for name, kind in kind_of.items() if kind != "folder")
    ignored = [
        (
            "folder" if _type(entry) == "folder" else os.path.splitext(entry.name)[1].lower() or "without extension",
            entry.name,
        )
        for entry in entries
        if kind_of.get(entry.name, "folder") == "folder"
    ]
    # macOS stores metadata of IMAGE.jpg in ._IMAGE.jpg, which is not an image.
    hidden = [entry for entry in listed if entry.name.startswith(".") and not entry.name.startswith("._")]
    ignored += [(HIDDEN, e.name) for e in hidden if e.name.lower().endswith(IMAGE_SUFFIXES) and _type(e) == "file"]
    return names, [name for name in names if kind_of[name] != "file"], sorted(ignored)


def images_at_the_top(path):
    """Return the sorted names of the image files next to the class folders."""
    entries = _listed(path)
    names = [entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and _type(entry) == "file"]
    return sorted(name for name in names if not name.startswith("."))


def _type(entry):
    """Return the type of an os.DirEntry, following links: "file", "folder", "link" (a broken link) or "other"."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
    except OSError:  # for example, the entry is a link to itself
        pass
    return "link" if entry.is_symlink() and not os.path.exists(entry.path) else "other"


def _listed(path):
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as e:
        raise UsageError(f"{path}: cannot be listed ({e.strerror}); make it readable or remove it") from e


def find_shards(image_root, data_format, mode):
    """Return the sorted paths of a split's record files, or [] if there are none.

    Args:
        data_format: a key of SHARD_NAMES.
    """
    pattern = SHARD_NAMES[data_format][mode]
    with records.readable(image_root):
        names = sorted(os.listdir(image_root))
    return [os.path.join(image_root, name) for name in names if pattern.fullmatch(name)]


def shards(image_root, mode, data_format):
    """Return the sorted paths of all record files of a split.

    Raises:
        UsageError: there are no record files, a shard is missing, or the conversion is incomplete.
    """
    manifest = read_manifest(image_root)
    if manifest is not None and not manifest["complete"]:
        raise _incomplete(image_root, manifest)
    paths = find_shards(image_root, data_format, mode)
    if not paths:
        example = EXAMPLE_NAMES[data_format].format(mode.value)
        remedy = _compressed(image_root, [mode]) or f"use the folder that contains the {data_format} files"
        raise UsageError(f"--image-root {image_root}: has no {example}; {remedy}")
    pattern = SHARD_NAMES[data_format][mode]
    if data_format == "webdataset":
        _check_numbers(image_root, mode, [pattern.fullmatch(os.path.basename(shard)) for shard in paths])
    if data_format == "tfrecord":
        total = max(int(pattern.fullmatch(os.path.basename(shard))["total"]) for shard in paths)
        if total != len(paths):
            raise UsageError(
                f"--image-root {image_root}: has {len(paths)} of {total} {mode.value} shards; add the missing ones"
            )
    check_count(image_root, mode, data_format, len(paths), "shards")
    return paths


def _check_complete(image_root, data_format=None):
    """Raise UsageError if a conversion to this folder is incomplete. If `data_format` is set, only a conversion to this
    format counts. A damaged convert.json is ignored, because without record files it may be a file of a different
    program."""
    manifest = None
    with contextlib.suppress(UsageError):
        manifest = read_manifest(image_root)
    if manifest is not None and not manifest["complete"] and data_format in (None, manifest["format"]):
        raise _incomplete(image_root, manifest)


def _incomplete(image_root, manifest):
    """Return the UsageError for the output of an interrupted conversion or import."""
    writer = manifest.get("command", "convert")
    return UsageError(
        f"--image-root {image_root}: the {'import' if writer == 'import' else 'conversion'} is incomplete; repeat the "
        f"`{command('dataset', writer)}` command to finish it"
    )


def _check_numbers(image_root, mode, shards):
    """Check that the tar shards of a split belong to one data set, and that no shard is missing.

    Args:
        shards: matches of SHARD_NAMES["webdataset"] with the names of the shards.
    Raises:
        UsageError: the shards have several prefixes or widths of their numbers; a number is missing between 0 or 1 and
            the largest number; or a file of SHARD_LISTS or nshards.txt lists different shards.
    """
    # The shard numbers of a data set have the same format, such as %06d. The shortest number has the width of this
    # format; with %d, larger numbers are longer.
    width = min(len(shard["number"]) for shard in shards)
    first_of = {}  # {(prefix, whether the number has this format): name of the first shard}
    for shard in shards:
        has_format = shard["number"] == f"{int(shard['number']):0{width}d}"
        first_of.setdefault((shard["stem"], has_format), shard[0])
    if len(first_of) > 1:
        raise UsageError(
            f"--image-root {image_root}: contains {mode.value} shards of several data sets "
            f"({_some([*first_of.values()])}); move the shards of all but one to a different folder"
        )
    stem, numbers = shards[0]["stem"], {int(shard["number"]) for shard in shards}
    start = 0 if 0 in numbers or 1 not in numbers else 1
    if count := max(numbers) + 1 - start - len(numbers):
        missing = (f"{stem}{number:0{width}d}.tar" for number in itertools.count(start) if number not in numbers)
        raise UsageError(
            f"--image-root {image_root}: has {len(numbers)} of {len(numbers) + count} {mode.value} shards; add the "
            f"missing ones ({_some([*itertools.islice(missing, min(count, 5))], count=count)})"
        )
    for name, counts in listed_shards(image_root, mode, stem).items():
        there = {shard[0] for shard in shards}
        for problem, names in (("missing", counts.keys() - there), ("not listed", there - counts.keys())):
            if names:
                raise UsageError(
                    f"{os.path.join(image_root, name)}: lists {len(counts)} {mode.value} shards, but the folder has "
                    f"{len(there)} ({problem}: {_some(sorted(names))}); copy the data set again, or remove this list"
                )
    _check_shard_count(image_root, mode, len(shards))


def _check_shard_count(image_root, mode, count):
    """Raise UsageError if nshards.txt contains neither the number of training shards nor the number of all shards."""
    path = os.path.join(image_root, "nshards.txt")
    if not os.path.isfile(path):
        return
    with records.readable(path), records.open_regular(path, _TEXT_LIMIT) as f:
        text = f.read().decode(errors="replace").strip()
    counts = {m: len(find_shards(image_root, "webdataset", m)) for m in Mode}
    allowed = {counts[Mode.TRAIN] or counts[Mode.EVAL], sum(counts.values())}
    if re.fullmatch("[0-9]{1,9}", text) and int(text) not in allowed:
        raise UsageError(
            f"{path}: states {int(text)} shards, but the folder has {count} {mode.value} shards; copy the data set "
            "again, or remove this file"
        )


def listed_shards(image_root, mode, stem):
    """Read the files of SHARD_LISTS.

    Args:
        stem: start of the names of the split's shards. Other shards are ignored.
    Returns:
        {name of the file: {name of a shard: number of samples, or None}} of the files that list shards of the split.
    Raises:
        UsageError: a file is not JSON, or cannot be read.
    """
    lists = {}
    for name in SHARD_LISTS:
        path = os.path.join(image_root, name)
        if not os.path.isfile(path):
            continue
        try:
            with records.readable(path), records.open_regular(path, _TEXT_LIMIT) as f:
                content = json.loads(f.read())
        except (ValueError, RecursionError) as e:
            if isinstance(e, UsageError):
                raise
            raise UsageError(f"{path}: damaged; copy it again, or remove it") from e
        counts = {}
        pattern = SHARD_NAMES["webdataset"][mode]
        for shard, count in _shard_rows(content):
            found = pattern.fullmatch(os.path.basename(shard)) if type(shard) is str else None
            if found and found["stem"] == stem:
                counts[found[0]] = count if type(count) is int else None
        if counts:
            lists[name] = counts
    return lists


def _shard_rows(content):
    """Yield (name, number of samples or None) of each shard in the content of a file of SHARD_LISTS. For content in an
    unknown format, yield nothing."""
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, dict):
        yield from content.items() if isinstance(content, dict) else ()
        return
    for split in splits.values():
        names, lengths = (
            split.get(key) if isinstance(split, dict) and isinstance(split.get(key), list) else []
            for key in ("filenames", "shard_lengths")
        )
        yield from itertools.zip_longest(names, lengths[: len(names)])


def check_samples(image_root, mode, counts):
    """Raise UsageError if the number of samples in a tar shard differs from a file of SHARD_LISTS.

    Args:
        counts: {name of a shard: number of samples}.
    """
    found = SHARD_NAMES["webdataset"][mode].fullmatch(next(iter(counts)))
    for name, listed in listed_shards(image_root, mode, found["stem"]).items():
        for shard, count in counts.items():
            if listed.get(shard) not in (None, count):
                raise UsageError(
                    f"{os.path.join(image_root, shard)}: has {count} samples, but {listed[shard]} according to {name}; "
                    f"copy it again, or remove {name}"
                )


def read_manifest(image_root):
    """Read convert.json, in which `dataset convert` and `dataset import` describe what they write.

    Returns:
        {"complete": bool, "format": str, "splits": {split: {"images": int, ...}}, "shards": {split: int}, ...}, or None
        if there is no such file. The manifest of a complete conversion also contains "bytes", {record file name: size},
        unless an older version wrote the manifest.
    Raises:
        UsageError: the file cannot be read or is damaged.
    """
    path = os.path.join(image_root, MANIFEST)
    if not os.path.lexists(path):
        return None
    try:
        with records.readable(path), records.open_regular(path) as f:
            manifest = json.loads(f.read())
        for split, described in manifest["splits"].items():
            if not all(type(number) is int for number in (described["images"], manifest["shards"][split])):
                raise TypeError
        if type(manifest["complete"]) is not bool:
            raise TypeError
        # A conversion to class folders records no sizes of files.
        patterns = [] if manifest["format"] == "folder" else SHARD_NAMES[manifest["format"]].values()
        for name, size in manifest.get("bytes", {}).items():
            is_name = os.path.basename(name) == name and any(pattern.fullmatch(name) for pattern in patterns)
            if type(size) is not int or not is_name:
                raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path}: damaged; convert the data set again, or remove the file") from e
    return manifest


def check_count(image_root, mode, data_format, count, what="images"):
    """Raise UsageError if the number of images or shards in a split differs from the number in convert.json."""
    manifest = read_manifest(image_root)
    if manifest is None or manifest["format"] != data_format or mode.value not in manifest["splits"]:
        return
    wanted = manifest["splits"][mode.value]["images"] if what == "images" else manifest["shards"][mode.value]
    if count != wanted:
        raise UsageError(
            f"--image-root {image_root}: has {count} {mode.value} {what}, but {wanted} according to {MANIFEST}; copy "
            "the folder again, or convert the data set again"
        )


def class_names(image_root):
    """Return the lines of IMAGE_ROOT/classes.txt, or None if there is no such file. Raise UsageError if the file cannot
    be read."""
    path = os.path.join(image_root, "classes.txt")
    if not os.path.lexists(path):
        return None
    try:
        with records.open_regular(path, _TEXT_LIMIT) as f:
            text = f.read().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        classes = text.split("\n") if text else []
        if any(len(name) > _NAME_LIMIT for name in classes):
            raise ValueError(f"a line exceeds {_NAME_LIMIT} characters")
    except (OSError, ValueError) as e:  # ValueError: for example, the text is not UTF-8
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"{path}: cannot be read ({reason}); write one class name per line, or remove it") from e
    return classes


def check_labels(path, labels, num_of_class, classes, label_offset=0):
    """Check labels against the number of class names or, without names, the number of network outputs.

    Args:
        path: file that contains the labels, for the error message.
        labels: iterable of stored labels.
        num_of_class: number of network outputs, or None for any number.
        classes: class names, or None.
        label_offset: number that is subtracted from the labels.
    Raises:
        UsageError: a label is out of range.
    """
    limit = len(classes) if classes else num_of_class
    for label in labels:
        if not is_class(label - label_offset, limit):
            source = "classes.txt" if classes else f"--num-of-class {num_of_class}"
            first = label_offset
            allowed = f"labels are whole numbers from {first}"
            if limit is not None:
                allowed = f"{source} allows {first} to {first + limit - 1}"
            if label_offset:
                allowed += f" with --label-offset {label_offset}"
            remedy = "number the classes from 0, set --label-offset to the first label, or use a larger --num-of-class"
            if label - label_offset == limit == _IMAGENET_CLASSES and path.endswith(".txt"):
                remedy = (
                    "labels from 1 to 1000 are probably those of ImageNet's development kit, whose order is not that "
                    "of class folders; instead of this file, use class folders with WordNet names, such as n01440764"
                )
            raise UsageError(f"{path}: has label {label:g}, but {allowed}; {remedy}")


def is_class(label, limit=None):
    """Return whether a number, possibly NaN, is a nonnegative integer below `limit`, or, without a limit, below
    2**31."""
    return 0 <= label < (limit or 2**31) and label == int(label)


def skip_list_line(name):
    """Return an image's line in a --skip-list. The line is the image's name, or a JSON string if the name contains
    unprintable characters or begins with a quotation mark. JSON represents a byte that is not valid UTF-8 by a lone
    surrogate."""
    is_plain = name.isprintable() and not name.startswith('"')
    return f"{name if is_plain else json.dumps(name)}\n"


def read_skip_list(path, image_root, allow_outside=False):
    """Read a --skip-list: one Image.name per line, in the format of skip_list_line.

    Args:
        path: the file.
        image_root: the folder to which the names are relative.
        allow_outside: whether names may be outside image_root.
    Returns:
        frozenset of the names.
    Raises:
        UsageError: the file cannot be read, a line is not valid JSON, or an entry matches no file or is outside
            image_root.
    """
    try:
        with records.open_regular(path, _TEXT_LIMIT) as f:
            lines = [line.rstrip("\r") for line in f.read().decode("utf-8-sig", "surrogateescape").split("\n")]
        names = [json.loads(line) if line.startswith('"') else line for line in lines]
    except json.JSONDecodeError as e:
        raise UsageError(f'--skip-list {path}: a line that begins with " is not a JSON string ({e}); correct it') from e
    except OSError as e:
        raise UsageError(f"--skip-list {path}: cannot be read ({e.strerror}); write one path per line") from e
    skip = frozenset(os.path.normpath(name) for name in names if name.strip())
    for name in sorted(skip):
        # indexes.open_index checks whether the shard has a record at the place after "@".
        shard = name.rpartition("@")[0]
        if not allow_outside and _is_outside(name, image_root):
            raise UsageError(
                f"--skip-list {path}: {name} is outside {image_root}; remove the line, or add --allow-outside"
            )
        is_shard = shard and os.path.exists(os.path.join(image_root, shard))
        if not is_shard and not _is_no_folder(os.path.join(image_root, name)):
            raise UsageError(f"--skip-list {path}: {name} is not a file in {image_root}; remove the line")
    return skip
