"""Read images whose labels are in tables or lists.

table_files.py and official.py read the rows. This module finds the image of each row, and numbers the classes. Labels
that are numbers remain unchanged, unless a file with class names contains the names of labels 1 to N, or all labels are
-1 or 1, which are numbered 0 and 1. Text labels are numbered in the order of the file with class names or, without such
a file, in sorted order.
"""

import contextlib
import filecmp
import functools
import os
import re
from collections import defaultdict

from paddle_resnet.data import record_tables, sniffer, table_heads
from paddle_resnet.data.classes import label_names
from paddle_resnet.data.image_search import ELSEWHERE, SUFFIXES, ImageSearch, walk
from paddle_resnet.data.images import IMAGE_SUFFIXES, Image, log_once
from paddle_resnet.data.split_names import SPLIT_OF, SPLITS, split_of
from paddle_resnet.tools.sources import image_files, official, table_files, table_sets
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.tools.sources.splits import check_validation, warn_of_spelling
from paddle_resnet.tools.sources.table_files import ROBOFLOW, Row
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

_ANNOTATIONS = ("annotations", "annotation", "labels", "label")  # folders of tables
_SUBFOLDERS = 50  # subfolders of a folder with more than this number are not searched for images
_NUMBER = re.compile(r"(-?\d{1,9})(\.0*)?", re.ASCII)


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images of a table or of a folder with tables.

    Args:
        source: the table, or the folder that contains tables and images.
        options: Options of the import.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: there is no table, or there are several for a split; a column is missing or ambiguous; an image is
            missing (unless options.allow_partial is set), ambiguous or occurs twice; a label is not a class; or there
            are no training images, or none of a class with validation images.
    """
    is_file = os.path.isfile(source)
    root = os.path.dirname(source) or "." if is_file else source
    images = ImageSearch(root)
    rows, names = (
        _rows_of_folder(root, images, options)
        if not is_file
        else (table_files.read(_with_other_splits(source, images, options), root, images, options), None)
    )
    if not rows:
        raise UsageError(f"{source}: contains no rows with images; choose a different table")
    rows = _chosen(source, table_files.with_splits(root, rows))
    paths = _found(root, rows, images, options.allow_partial)
    rows = [row for row, path in zip(rows, paths, strict=True) if path is not None]
    if not rows:
        raise UsageError(f"{source}: none of the images is in {root}; use the folder that contains the images")
    tables = {row.place.rpartition(": ")[0] for row in rows}
    names = names or _names_of(root, rows, tables)
    labels, names = numbered(source, rows, names)
    splits = defaultdict(list)
    for row, label, path in zip(rows, labels, filter(None, paths), strict=True):
        splits[row.split].append(image_files.image(root, path, label))
    if "train" not in splits:
        raise UsageError(f"{source}: contains no training images; import the table of the training images")
    check_validation(source, splits, names)
    return {split: splits[split] for split in ("train", "val") if split in splits}, names


def _names_of(root, rows, tables):
    """Return the result of classes.label_names for the first folder with a file of class names: the root or a folder of
    the tables. A JSON or .mat file is used only if it contains the names of all labels."""
    folders = [*dict.fromkeys([os.path.normpath(root), *map(os.path.dirname, sorted(tables))])]
    for folder in folders:
        if names := label_names(folder, tables):
            return names
    labels = {row.label for row in rows}
    found = {}
    for path in (path for folder in folders for path in _listed(folder)):
        if path.lower().endswith(record_tables.SUFFIXES) and os.path.isfile(path):
            with contextlib.suppress(UsageError, OSError):  # a file of a different program
                names, first = record_tables.class_names(path) or ([], None)
                numbers = {str(i) for i in range(first or 0, (first or 0) + len(names) + (first is None))}
                if names and (labels <= numbers or labels <= {*names}):
                    found[tuple(names), first] = path
    if len(found) > 1:
        shown = " and ".join(map(os.path.basename, found.values()))
        raise UsageError(f"{root}: {shown} contain different class names; keep one of them")
    return next(((path, [*names], first) for (names, first), path in found.items()), None)


def _chosen(source, rows):
    """Return the rows of the training and validation splits. Rows without a split are training rows. If there are no
    validation images, the rows of the test split become those of the validation split; otherwise, the test split is
    left out."""
    counts = {split: sum(row.split == split for row in rows) for split in (None, *SPLITS)}
    rename = {None: "train", "train": "train", "val": "val", "test": None if counts["val"] else "val"}
    if counts["test"]:
        used = "left out, because there are validation images" if counts["val"] else "used as validation images"
        logger.info(f"{source}: {counted(counts['test'], 'test image')} {used}")
    return [Row(row.image, row.label, rename[row.split], row.place, row.folder) for row in rows if rename[row.split]]


def _found(root, rows, images, allow_partial):
    """Return the path, relative to the root, of the image of each row, or None if it is missing and `allow_partial` is
    set. Raise UsageError if an image is missing without `allow_partial`, is ambiguous or occurs twice, or if a file is
    not an image."""
    paths, missing, place_of = [], [], {}
    for row in rows:
        found = images.find(row.image, row.folder, row.split)
        if len(found) > 1 and _are_copies(root, found):
            log_once(f"{row.place}: {' and '.join(found[:5])} are copies; the first one is used", logger.warn)
            found = found[:1]
        if len(found) > 1:
            raise UsageError(f"{row.place}: {row.image} matches {' and '.join(found[:5])}; write the path of one image")
        if not found:
            missing.append(row)
            paths.append(None)
            continue
        (path,) = found
        if not path.lower().endswith(SUFFIXES):
            raise UsageError(
                f"{row.place}: {path} is not an image with a name that ends in {', '.join(SUFFIXES)}; "
                "convert it, or remove the line"
            )
        if path in place_of:
            place, label = place_of[path]
            remedy = "remove one of the lines"
            if label != row.label:
                remedy += ", or, if images have several classes, train with --multi-label (docs/multilabel.md)"
            raise UsageError(f"{row.place}: {row.image} is also in {place}; {remedy}")
        if not place_of and ELSEWHERE.match(row.image) and not os.path.exists(row.image):
            logger.warn(
                f"{row.place}: {row.image} is not on this computer, so {path} in {root} is used; check that it is the "
                "same image"
            )
        place_of[path] = row.place, row.label
        paths.append(path)
    if missing:
        more = f", nor are the images of {counted(len(missing) - 1, 'more row')}" if len(missing) > 1 else ""
        message = f"{missing[0].place}: {missing[0].image} is not in {root}{more}"
        if not allow_partial:
            remedy = sniffer.unpacking_here(root) or "add the images"
            raise UsageError(f"{message}; {remedy}, or use --allow-partial to omit these rows")
        logger.warn(f"{message}; these rows are omitted")
    return paths


def _are_copies(root, paths):
    """Return whether files have the same content, and paths that differ only in case."""
    first, *others = (os.path.join(root, path) for path in paths)
    is_same_path = len({path.casefold() for path in paths}) == 1
    return is_same_path and all(filecmp.cmp(first, other, shallow=False) for other in others)


def numbered(
    source: str, rows: list[Row], names: tuple[str, list[str], int | None] | None
) -> tuple[list[int], list[str] | None]:
    """Return (label of each row as a number, class names or None).

    Args:
        source: the data set, for messages.
        rows: rows of all splits.
        names: result of classes.label_names.
    Raises:
        UsageError: a row has no label or several labels, or its label is not a class.
    """
    for row in rows:
        if not row.label or row.label.lower() == "nan":  # pandas writes nan for a missing value
            raise UsageError(f"{row.place}: has no label; write the label, or remove the line")
        # The cell contains several numbers, or a list or an object in JSON or Python.
        if re.fullmatch(r"-?\d+(\s*[\s,;|]\s*-?\d+)+|\[.*\]|\{.*\}", row.label):
            raise UsageError(
                f"{row.place}: has several labels ({row.label[:50]}); the import writes one label per image, so "
                "keep one"
            )
    if not all(is_float(row.label) for row in rows):
        _check_several(rows)
        return _numbered_names(rows, names)
    labels = []
    if {row.label for row in rows} == {"-1", "1"}:  # whether an image has an attribute
        logger.info(f"{source}: the labels -1 and 1 are numbered 0 and 1")
        return [int(row.label == "1") for row in rows], None
    for row in rows:
        number = _NUMBER.fullmatch(row.label)
        if number is None or int(number[1]) < 0:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not a class; use whole numbers from 0")
        labels.append(int(number[1]))
    ordered = None
    if names is not None:
        path, ordered, first = names
        if first is None:
            first = 1 if min(labels) == 1 and max(labels) == len(ordered) else 0
        if first:
            logger.info(f"{source}: labels from 1 to {len(ordered)} are renumbered from 0")
        limit, origin = len(ordered), f"{path} contains the names of labels {first} to {first + len(ordered) - 1}"
    else:
        first, limit, origin = 0, len(rows), f"the data set has only {counted(len(rows), 'image')}"
    for row, label in zip(rows, labels, strict=True):
        if not 0 <= label - first < limit:
            raise UsageError(
                f"{row.place}: has label {label}, but {origin}; number the classes from {first}, or choose the labels "
                "with --label-column"
            )
    return [label - first for label in labels], ordered


def _check_several(rows):
    """Raise UsageError if a label consists of several other labels, separated by a comma, a semicolon or a vertical
    bar. Log a warning if labels differ only in their spelling."""
    all_labels = {row.label for row in rows}
    for row in rows:
        for delimiter in ",;|":
            parts = [part.strip() for part in row.label.split(delimiter)]
            if len(parts) > 1 and all_labels.issuperset(parts):
                raise UsageError(
                    f"{row.place}: has several labels ({row.label[:50]}); an import has one label per image, so keep "
                    "one, or train with --multi-label"
                )
    warn_of_spelling(all_labels)


def _numbered_names(rows, names):
    path, names, _ = names or (None, sorted({row.label for row in rows}), None)
    label_of = {name: label for label, name in enumerate(names)}
    for row in rows:
        if row.label not in label_of:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not in {path}; add it, or remove {path}")
    return [label_of[row.label] for row in rows], names


def is_float(text: str) -> bool:
    """Return whether a text is a decimal number, possibly with a fraction or an exponent."""
    return re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE | re.ASCII) is not None


def _rows_of_folder(root, images, options):
    """Return ([Row], result of classes.label_names or None) of the tables in a folder."""
    for files, read_rows in official.DATA_SETS if not options.columns else ():
        if all(os.path.isfile(os.path.join(root, file)) for file in files):
            return read_rows(root)
    if not options.columns and (food := official.food(root)):
        # The download also contains labels.txt, in which the same names are written differently.
        return food, label_names(root, [os.path.join(root, "meta", "labels.txt")])
    tables = _tables(root, images, options)
    if not tables and options.columns:
        flags = " ".join(f"{flag} {name}" for flag, name in options.columns.items())
        raise UsageError(
            f"{flags}: {root} contains no table of images with {' and '.join(options.columns.values())} among its "
            f"columns; choose columns of a table, or remove {' and '.join(options.columns)}"
        )
    if not tables:
        raise UsageError(
            f"{root}: contains no table with columns of images and labels; set --image-column and --label-column to "
            "the names of these columns"
        )
    return table_files.read(tables, root, images, options), None


def _tables(root, images, options):
    """Return the paths of the tables in a folder: one table without a split, or one for each split; [] if there are
    none. Raise UsageError if table_sets.chosen cannot choose between several tables of a split."""
    folders = [
        "",
        *(name for name in sorted(os.listdir(root)) if split_of(name) and os.path.isdir(os.path.join(root, name))),
    ]
    names = sorted(os.listdir(root))
    alone = _without_images(root, folders)
    groups = (
        [os.path.join(root, f, name) for f in folders for name in ("metadata.csv", "metadata.jsonl")],
        [os.path.join(root, f, ROBOFLOW) for f in folders],
        *(
            [path for f in group for path in _listed(os.path.join(root, f)) if _has_columns(path, f, images, options)]
            for group in ([""], folders[1:], _ANNOTATIONS, alone)
        ),
        [os.path.join(root, name) for name in names if re.fullmatch(r"\w+_list\.txt", name) and split_of(name)],
        [os.path.join(root, name) for name in names if name.endswith(".txt") and name[:-4].lower() in SPLIT_OF],
        [os.path.join(root, "meta", f"{name}.txt") for name in SPLIT_OF],
        [path for path in _listed(root) if path.endswith(".lst") and table_heads.is_list(path, images.is_image)],
        *(
            [path for f in group for path in _listed(os.path.join(root, f)) if is_list(path, images, options)]
            for group in ([""], alone)
            for is_list in (_is_path_list, _is_list)
        ),
    )
    for group in groups:
        if tables := [path for path in group if os.path.isfile(path) and _has_chosen_columns(path, options)]:
            if "train" not in {split_of(os.path.relpath(path, root)) or "train" for path in tables}:
                tables += _tables_of_classes(root, images, options)
            return table_sets.chosen(root, tables, lambda paths: table_files.read(paths, root, images, options))
    return []


def _has_chosen_columns(path, options):
    """Return whether a list contains the columns that the options name, if any. Without a column, tables with a header
    raise an error when they are read."""
    return path.lower().endswith(table_heads.TABLE_SUFFIXES) or {*options.columns.values()} <= {
        *table_heads.header(path)
    }


def _tables_of_classes(root, images, options):
    """Return the paths of the training tables in class folders, as in GTSRB, or [] if there are none."""
    found = [path for path in walk(root) if split_of(path) == "train" and path.lower().endswith(".csv")]
    return [
        os.path.join(root, path)
        for path in found
        if _has_columns(os.path.join(root, path), os.path.dirname(path), images, options)
    ]


def _with_other_splits(path, images, options):
    """Return the path of a table, and the paths of the usable tables of other splits in its folder."""
    others = table_sets.other_splits(path)
    usable = [
        other
        for other in others
        if _has_columns(other, "", images, options)
        or any(is_list(other, images, options) for is_list in (_is_path_list, _is_list))
    ]
    if usable:
        logger.info(f"{path}: other splits are read from {', '.join(map(os.path.basename, usable))} in its folder")
    return [path, *usable]


def _is_list(path, images, options):
    if not path.endswith(".txt"):
        return False
    is_table = table_heads.is_table(path, options.image_column, options.label_column, images.is_image)
    return is_table or table_heads.is_list(path, images.is_image)


def _is_path_list(path, images, options):
    return path.endswith(".txt") and table_heads.is_path_list(path, images.is_image)


def _without_images(root, excluded):
    """Return the names of the folders in root that contain no images, except those in `excluded`; [] if there are more
    than _SUBFOLDERS folders."""
    folders = [name for name in sorted(os.listdir(root)) if name not in excluded and not name.startswith(".")]
    folders = [name for name in folders if os.path.isdir(os.path.join(root, name))]
    return [
        name
        for name in (folders if len(folders) <= _SUBFOLDERS else [])
        if not any(file.lower().endswith(IMAGE_SUFFIXES) for file in os.listdir(os.path.join(root, name)))
    ]


def _listed(folder):
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []


def _has_columns(path, folder, images, options):
    return path.lower().endswith(table_heads.TABLE_SUFFIXES) and table_heads.is_table(
        path, options.image_column, options.label_column, functools.partial(images.is_image, folder=folder)
    )
