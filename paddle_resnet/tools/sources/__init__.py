"""`python -m paddle_resnet.dataset import`: list data sets in layouts that training cannot read, for convert.write.

Each module in KINDS reads one kind of source with its function `read`, which takes the source and Options, and returns
({split: [Image]}, class names in label order or None if the classes have only numbers). Several kinds share the modules
that are not in KINDS.
"""

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from paddle_resnet.data import archives, layout, parquet_files, sniffer, table_heads
from paddle_resnet.data import classes as classes_of
from paddle_resnet.data.formats import folder
from paddle_resnet.data.images import Image, is_system_name
from paddle_resnet.tools import convert, split
from paddle_resnet.tools.sources import (
    arrays,
    caffe,
    file_names,
    ilsvrc,
    nested,
    parquet,
    pixel_tables,
    recordio,
    tables,
    tar_shards,
    tfrecords,
)
from paddle_resnet.tools.sources.options import DEFAULT_VAL, Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import Mode

KINDS = {
    "ilsvrc": ilsvrc.read,
    "table": tables.read,
    "parquet": parquet.read,
    "tfrecord": tfrecords.read,
    "webdataset": tar_shards.read,
    "recordio": recordio.read,
    "lmdb": caffe.read,
    "array": arrays.read,
    "pixels": pixel_tables.read,
    "nested": nested.read,
    "filename": file_names.read,
}
# {option: kinds that use it}
_USED = {
    "image_column": ("table", "parquet", "tfrecord"),
    "label_column": ("table", "parquet", "tfrecord", "webdataset", "array", "pixels"),
    "split_column": ("table", "pixels"),
    "delimiter": ("table",),
    "label_index": ("tfrecord", "recordio"),
    "class_depth": ("nested",),
}
# {ending of a file that is a source by itself: kind}
_FILES = dict.fromkeys((*table_heads.TABLE_SUFFIXES, ".txt"), "table") | {".parquet": "parquet", ".npz": "array"}
# Kinds of images (Image.kind) in compressed blocks. In these images, the first element of Image.place is the number of
# the block in the file.
_IN_BLOCKS = (parquet_files.read_image, tfrecords.read_compressed)
WINDOW_BYTES = 1 << 28  # minimum total size (compressed) of the blocks whose images are mixed at random
SEED = 0  # seed of the random selection of images for val/


def read(
    source: str | Path, kind: str | None = None, options: Options | None = None
) -> tuple[str, dict[str, list[Image]], list[str] | None]:
    """List the images of a source.

    Args:
        source: folder, or a file with one of the endings in _FILES.
        kind: a key of KINDS, or None to detect the kind.
        options: Options of the import.
    Returns:
        (kind, {split: [Image]}, class names in label order or None)
    Raises:
        UsageError: the source does not exist, its kind is unknown or does not use an option, all its training images
            belong to one class, or the source is damaged, incomplete or contradicts itself.
    """
    options = options or Options()
    if not os.path.exists(source):
        raise UsageError(f"{source}: does not exist; use the folder that contains the data set")
    kind_of_file = _kind_of_file(source, options.label_column)
    if os.path.isfile(source) and sniffer.is_archive(os.path.basename(source)):
        raise UsageError(f"{source}: {_archive(source)}")
    if os.path.isfile(source) and kind_of_file is None:
        raise UsageError(f"{source}: not a table or array ({', '.join(_FILES)}); use the folder that contains it")
    if os.path.isfile(source) and kind not in (None, kind_of_file):
        raise UsageError(f"{source}: not a folder; use the folder that contains the data set")
    if kind is None and os.path.isfile(source):
        kind = kind_of_file
    elif kind is None:
        kind, source = _detected(source, options)
    if kind is None:
        raise UsageError(f"{source}: {sniffer.advice(source) or _unknown(source)}")
    for name, kinds in _USED.items():
        if getattr(options, name) is not None and kind not in kinds:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {getattr(options, name)}: not supported for {kind}, the kind of {source}; remove {flag}"
            )
    splits, classes = KINDS[kind](os.fspath(source), options)
    for name in classes or []:
        if name.encode(errors="replace") != name.encode(errors="surrogatepass"):  # JSON may contain lone surrogates
            raise UsageError(f"{source}: the class name {name!a} is not valid Unicode; correct it")
    if "val" in splits and options.val is not None:
        raise UsageError(f"--val {options.val}: {source} contains validation images; remove --val")
    fraction = options.val or (None if kind == "ilsvrc" else DEFAULT_VAL)
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


def import_(
    source: str | Path,
    output: str | Path,
    to: str,
    kind: str | None = None,
    options: Options | None = None,
    shards: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    check: Callable[[int, int], object] | None = None,
) -> tuple[str, dict[str, int], int | None]:
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
        splits["train"] = _shuffled(splits["train"])
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


def _kind_of_file(source, label_column=None):
    if table_heads.is_pixel_table(os.fspath(source), label_column):
        return "pixels"
    return next((kind for ending, kind in _FILES.items() if os.fspath(source).lower().endswith(ending)), None)


def _archive(source):
    return f"an archive; {archives.unpacking(os.path.dirname(source), [os.path.basename(source)])}"


def _detected(source, options):
    """Return (kind, folder to import) of a folder. The kind is None if an import without flags must stop
    (Sight.is_final) and no option of _USED is set. Otherwise, it is the first detected kind that uses all options,
    otherwise the kind that the options imply, otherwise "nested" for class folders without files that may contain the
    labels, otherwise the first detected kind or None."""
    used = [kinds for name, kinds in _USED.items() if getattr(options, name) is not None]
    sights = sniffer.look(source)
    if not used and sights and sights[0].is_final:
        return None, source
    detected = [(sight.kind, sight.root or source) for sight in sights if sight.kind and not sight.is_final]
    usable = [(kind, root) for kind, root in detected if all(kind in kinds for kinds in used)]
    if usable or (detected and not used):
        kind, root = (usable or detected)[0]
        if root != os.fspath(source):
            logger.info(f"{source}: the data set is in {root}")
        return kind, root
    if options.class_depth is not None:
        return "nested", source
    if options.image_column or options.label_column:
        return "table", source
    # Files that are seen and cannot be read, such as a table without a known column, may contain the labels.
    if not any(sight.todo for sight in sights) and _has_class_folders(source):
        return "nested", source
    return (detected or [(None, source)])[0]


def _has_class_folders(source):
    """Return whether a folder or its only subfolder contains class folders or, for the subfolder, splits of class
    folders. For splits in the folder itself, no import is needed."""
    names = folder.class_folders(source)
    if len(names) != 1:
        return folder.has_classes(source)
    inner = os.path.join(source, names[0])
    return any(map(folder.has_classes, (inner, *(folder.split_folder(inner, mode) for mode in Mode))))


def _shuffled(images, window_bytes=WINDOW_BYTES):
    """Return training images in the random order in which they are written to record files. A file that is compressed
    in blocks would be slow to read in fully random order, so its blocks are put into random order, and images are mixed
    only within windows of at least window_bytes."""
    images = convert.shuffled(images)
    if images[0].kind not in _IN_BLOCKS:
        return images
    of_block = {}
    for image in images:
        of_block.setdefault((image.path, image.place[0]), []).append(image)
    counts = Counter(path for path, _ in of_block)
    mixed, window, size = [], [], 0
    for (path, _), members in of_block.items():
        window += members
        size += os.path.getsize(path) / counts[path]
        if size >= window_bytes:
            mixed += convert.shuffled(window)
            window, size = [], 0
    return mixed + convert.shuffled(window)


def describe(source: str | Path) -> list[str]:
    """Return lines that state what a source contains and what to do.

    Raises:
        UsageError: the source does not exist.
    """
    if not os.path.exists(source):
        raise UsageError(f"{source}: does not exist; use the folder that contains the data set")
    if os.path.isfile(source) and sniffer.is_archive(os.path.basename(source)):
        return [printable(f"{source}: {_archive(source)}")]
    if os.path.isfile(source) and (kind := _kind_of_file(source)):
        return [printable(f"{source}: imported as {kind}")]
    sights = sniffer.look(source) if os.path.isdir(source) else []
    if os.path.isdir(source) and (near := layout.neighbors(source)) and not any(s.is_certain for s in sights):
        return [f"{printable(near[0])}: class folders of both splits; use --image-root {shlex.quote(near[0])}"]
    if not sights:
        return [f"{source}: {_unknown(source)}"]
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
        if "/" in name or "\0" in name or name in ("", ".", "..") or is_system_name(name):
            raise UsageError(
                f"{source}: the class name {name!a} is not a valid name of a class folder; use --to webdataset"
            )


def _unknown(source):
    if all(folder.detect(source, mode) for mode in Mode):
        root = shlex.quote(str(source))
        return f"not a data set to import; if its splits contain class folders, use --image-root {root}"
    return f"not recognized as a data set; choose the kind with --as (see --help), or {sniffer.PUT}"
