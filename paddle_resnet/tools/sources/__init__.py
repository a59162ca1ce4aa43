"""`python -m paddle_resnet.dataset import`: list data sets in layouts that training cannot read, for convert.write.

Each module of this folder reads one kind of source. Its function `read` takes the source and Options, and returns
({split: [Image]}, class names in label order or None if the classes have only numbers).
"""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass

from paddle_resnet.data import classes as classes_of
from paddle_resnet.data import sniffer
from paddle_resnet.data.formats import folder
from paddle_resnet.tools import convert, split
from paddle_resnet.tools.sources import ilsvrc, tables
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, printable

KINDS = {"ilsvrc": ilsvrc.read, "table": tables.read}
DEFAULT_VAL = 0.2  # fraction of each class that goes to val/ if a table has no validation images
SEED = 0  # seed of the random selection of images for val/


@dataclass(frozen=True)
class Options:
    """Options of an import.

    Attributes:
        allow_partial: whether missing images trigger a warning instead of an error.
        val: fraction of each class that goes to val/ if the source has no validation images. If None, the fraction is
            DEFAULT_VAL for a table; other kinds of sources are not divided.
        image_column, label_column, split_column: names of the columns in a table, or None to detect them.
        delimiter: text between the columns of a table, or None to detect it.
    """

    allow_partial: bool = False
    val: float | None = None
    image_column: str | None = None
    label_column: str | None = None
    split_column: str | None = None
    delimiter: str | None = None


def read(source, kind=None, options=None):
    """List the images of a source.

    Args:
        source: folder or, for a table, also a file.
        kind: a key of KINDS, or None to detect the kind.
        options: Options.
    Returns:
        (kind, {split: [Image]}, class names in label order or None)
    Raises:
        UsageError: the kind is unknown, or the source is damaged, incomplete or contradicts itself.
    """
    options = options or Options()
    if not os.path.exists(source):
        raise UsageError(f"{source}: does not exist; use the folder that contains the data set")
    if os.path.isfile(source) and not os.fspath(source).lower().endswith((*sniffer.TABLE_SUFFIXES, ".txt")):
        endings = ", ".join((*sniffer.TABLE_SUFFIXES, ".txt"))
        raise UsageError(f"{source}: not a table ({endings}); use the folder that contains it")
    if kind is None:
        is_table = os.path.isfile(source) or options.image_column or options.label_column
        kind = "table" if is_table else sniffer.kind(source)
    if kind is None:
        raise UsageError(f"{source}: {sniffer.advice(source) or _unknown()}")
    if kind != "table" and not os.path.isdir(source):
        raise UsageError(f"{source}: not a folder; use the folder that contains the data set")
    splits, classes = KINDS[kind](os.fspath(source), options)
    for name in classes or []:
        if name.encode(errors="replace") != name.encode(errors="surrogatepass"):  # JSON may contain lone surrogates
            raise UsageError(f"{source}: the class name {name!a} is not valid Unicode; correct it")
    if "val" in splits and options.val is not None:
        raise UsageError(f"--val {options.val}: {source} contains validation images; remove --val")
    fraction = options.val or (DEFAULT_VAL if kind == "table" else None)
    if "val" not in splits and fraction is not None:
        splits = _divided(splits["train"], classes, fraction)
        if options.val is None:
            logger.info(f"{source}: has no validation images, so --val is {fraction}")
    for images in splits.values():
        if len({image.name for image in images}) < len(images):
            repeated = next(name for name, count in Counter(image.name for image in images).items() if count > 1)
            raise UsageError(f"{source}: contains {repeated} twice; remove one of them")
    if "train" in splits and len({image.label for image in splits["train"]}) < 2:
        raise UsageError(f"{source}: all training images belong to one class; add other classes")
    return kind, splits, classes


def import_(source, output, to, kind=None, options=None, shards=None, workers=None, progress=None, check=None):
    """Read a source and write it as record files or class folders.

    Args:
        source, kind, options: see read().
        output, to, shards, workers, progress, check: see convert.write().
    Returns:
        (kind, {split: number of images}, number of classes or None)
    Raises:
        UsageError: the source or the output cannot be used.
        OSError: the output cannot be written.
    """
    kind, splits, classes = read(source, kind, options)
    if to == convert.FOLDER:
        labels = (image.label for images in splits.values() for image in images)
        classes = classes or classes_of.numbers(1 + max(labels))
        _check_folder_names(source, classes)
    elif "train" in splits:
        splits["train"] = convert.shuffled(splits["train"])
    text = "\n".join(classes or [])
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    verify = command("dataset", "verify", output, "--fix-list", "bad.txt")
    counts = convert.write(
        source,
        splits,
        classes,
        output,
        to,
        shards=shards,
        workers=workers,
        progress=progress,
        check=check,
        description={"command": "import", "kind": kind, "classes_sha256": digest},
        remedy=f"add --unchecked, run `{verify}` and train with --skip-list bad.txt",
    )
    return kind, counts, None if classes is None else len(classes)


def describe(source):
    """Return lines that state what a source contains and what to do.

    Raises:
        UsageError: the source does not exist.
    """
    if not os.path.exists(source):
        raise UsageError(f"{source}: does not exist; use the folder that contains the data set")
    sights = sniffer.look(source) if os.path.isdir(source) else []
    if not sights:
        return [f"{source}: {_unknown()}"]
    return [printable(f"{sight.what}{f'; {sight.todo}' if sight.todo else ''}") for sight in sights]


def _divided(images, classes, fraction):
    """Divide training images into {"train": [...], "val": [...]}, separately for each class. Raise UsageError if no
    class has two images."""
    names = {}
    for image in images:
        names.setdefault(image.label, []).append(image.name)
    val = set()
    for label, members in names.items():
        val.update(split.divide(classes[label] if classes else str(label), members, fraction, SEED)[1])
    if not val:
        raise UsageError(
            f"--val {fraction}: no class has two images, one for training and one for validation; add images"
        )
    return {
        "train": [image for image in images if image.name not in val],
        "val": [image for image in images if image.name in val],
    }


def _check_folder_names(source, classes):
    for name in classes:
        if "/" in name or "\0" in name or name in ("", ".", "..") or folder.is_system_name(name):
            raise UsageError(
                f"{source}: the class name {name!a} is not a valid name of a class folder; use --to webdataset"
            )


def _unknown():
    kinds = " or --as ".join(KINDS)
    return f"not recognized as a data set; choose the kind with --as {kinds}, or {sniffer.PUT}"
