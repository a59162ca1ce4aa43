"""Read images whose labels are in tables or lists.

table_files.py and official.py read the rows. This module finds the image of each row, and numbers the classes. Labels
that are numbers remain unchanged, unless a file with class names contains the names of labels 1 to N. Text labels are
numbered in the order of this file or, without it, in sorted order.
"""

import os
import re
from collections import defaultdict

from paddle_resnet.data import sniffer
from paddle_resnet.data.classes import label_names
from paddle_resnet.data.images import IMAGE_SUFFIXES, Image
from paddle_resnet.data.split_names import SPLIT_OF, SPLITS, split_of
from paddle_resnet.tools.sources import official, table_files
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.tools.sources.table_files import ROBOFLOW, Row
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

_ANNOTATIONS = ("annotations", "annotation", "labels", "label")  # folders of tables
_SUBFOLDERS = 50  # subfolders of a folder with more than this number are not searched for images
_NUMBER = re.compile(r"(-?\d{1,9})(\.0*)?", re.ASCII)
_ELSEWHERE = re.compile(r"/|[a-z]:[\\/]|[a-z0-9]+://", re.IGNORECASE)  # start of an absolute path or a URL


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images of a table or of a folder with tables.

    Args:
        source: the table, or the folder that contains tables and images.
        options: Options.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: there is no table, or there are several for a split; a column is missing or ambiguous; an image is
            missing (unless options.allow_partial is set), ambiguous or occurs twice; a label is not a class; or there
            are no training images, or none of a class with validation images.
    """
    is_file = os.path.isfile(source)
    root = os.path.dirname(source) or "." if is_file else source
    images = _Images(root)
    rows, names = (
        _rows_of_folder(root, images, options)
        if not is_file
        else (table_files.read([source], root, images, options), None)
    )
    if not rows:
        raise UsageError(f"{source}: contains no rows with images; choose a different table")
    rows = _chosen(source, rows)
    paths = _found(root, rows, images, options.allow_partial)
    rows = [row for row, path in zip(rows, paths, strict=True) if path is not None]
    if not rows:
        raise UsageError(f"{source}: none of the images is in {root}; use the folder that contains the images")
    tables = {row.place.rpartition(": ")[0] for row in rows}
    names = names or label_names(root, tables)
    labels, names = _numbered(source, rows, names)
    splits = defaultdict(list)
    for row, label, path in zip(rows, labels, filter(None, paths), strict=True):
        splits[row.split].append(Image(path, os.path.join(root, path), label))
    if "train" not in splits:
        raise UsageError(f"{source}: contains no training images; import the table of the training images")
    _check_validation(source, splits, names)
    return {split: splits[split] for split in ("train", "val") if split in splits}, names


def _check_validation(source, splits, names):
    trained = {image.label for image in splits["train"]}
    if unknown := sorted({image.label for image in splits.get("val", [])} - trained):
        shown = ", ".join(names[label] if names else str(label) for label in unknown[:5])
        raise UsageError(
            f"{source}: has {counted(len(unknown), 'class', 'classes')} with validation images, but without training "
            f"images ({shown}); add training images, or remove these rows"
        )


def _chosen(source, rows):
    """Return the rows of the training and validation splits. Without validation images, those of the test split take
    their place."""
    counts = {split: sum(row.split == split for row in rows) for split in (None, *SPLITS)}
    rename = {None: "train", "train": "train", "val": "val", "test": None if counts["val"] else "val"}
    if counts["test"]:
        used = "left out, because there are validation images" if counts["val"] else "used as validation images"
        logger.info(f"{source}: {counted(counts['test'], 'test image')} {used}")
    return [Row(row.image, row.label, rename[row.split], row.place, row.folder) for row in rows if rename[row.split]]


class _Images:
    """The image files at most two levels below a folder. Each folder is listed only once."""

    def __init__(self, root):
        self._root = root
        self._listed = {}
        self._sorted = {}  # {split: result of _by_preference}
        self._folders = [*self._subfolders("")]
        self._folders += [below for folder in self._folders for below in self._subfolders(folder)]

    def _subfolders(self, folder):
        path = os.path.join(self._root, folder)
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        return [os.path.join(folder, name) for name in names] if len(names) <= _SUBFOLDERS else []

    def _names(self, folder):
        """Return {key: [names of files]} of a folder. A key is the name of a file, or the name of an image file without
        its suffix."""
        if folder not in self._listed:
            names = defaultdict(list)
            path = os.path.join(self._root, folder)
            if os.path.isdir(path):
                for entry in os.scandir(path):
                    if entry.is_file():
                        names[entry.name].append(entry.name)
                        stem, suffix = os.path.splitext(entry.name)
                        if suffix.lower() in IMAGE_SUFFIXES:
                            names[stem].append(entry.name)
            self._listed[folder] = names
        return self._listed[folder]

    def _by_preference(self, split):
        """Return (folders named like the split, all other folders)."""
        if split not in self._sorted:
            same = [folder for folder in self._folders if split_of(folder) == split]
            self._sorted[split] = same, [folder for folder in self._folders if folder not in same]
        return self._sorted[split]

    def find(self, row):
        """Return the paths, relative to the root, of the files that a row may mean, from the first place that contains
        any: the folder of the table, the root, the folders named like the split, or all other folders."""
        image = row.image
        if os.path.isabs(image):
            image = os.path.relpath(image, os.path.abspath(self._root))
        if image.startswith("..") or "/../" in image or _ELSEWHERE.match(image):
            return self._moved(row) if _ELSEWHERE.match(row.image) else []
        for folders in ([row.folder], [""], *self._by_preference(row.split)):
            found = []
            for folder in folders:
                parent, name = os.path.split(os.path.normpath(os.path.join(folder, image)))
                found += [os.path.join(parent, file) for file in self._names(parent).get(name, [])]
            if found:
                return list(dict.fromkeys(found))
        return self.find(Row(image.replace("\\", "/"), *_rest(row))) if "\\" in image else []

    def _moved(self, row):
        """Return the result of find() for the longest end of a path on a different computer that exists here."""
        parts = re.split(r"[\\/]+", row.image)[1:]
        if ".." in parts:
            return []
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((found for end in ends if end and (found := self.find(Row(end, *_rest(row))))), [])

    def names_one(self, folder):
        """Return a function that tells whether a cell of a table in `folder` is the path, name or id of an image."""

        def is_image(cell):
            found = self.find(Row(cell.strip(), "", None, "", folder)) if cell.strip() else []
            return any(path.lower().endswith(IMAGE_SUFFIXES) for path in found)

        return is_image


def _rest(row):
    return row.label, row.split, row.place, row.folder


def _found(root, rows, images, allow_partial):
    """Return the path, relative to the root, of the image of each row, or None if it is missing and `allow_partial` is
    set. Raise UsageError if an image is missing without `allow_partial`, is ambiguous or occurs twice, or if a file is
    not an image."""
    paths, missing, place_of = [], [], {}
    for row in rows:
        found = images.find(row)
        if len(found) > 1:
            raise UsageError(f"{row.place}: {row.image} matches {' and '.join(found[:5])}; write the path of one")
        if not found:
            missing.append(row)
            paths.append(None)
            continue
        (path,) = found
        if not path.lower().endswith(IMAGE_SUFFIXES):
            raise UsageError(
                f"{row.place}: {path} is not an image with a name that ends in {', '.join(IMAGE_SUFFIXES)}; "
                "convert it, or remove the line"
            )
        if path in place_of:
            raise UsageError(f"{row.place}: {row.image} is also in {place_of[path]}; remove one of the lines")
        if not place_of and _ELSEWHERE.match(row.image) and not os.path.exists(row.image):
            logger.warn(f"{row.place}: {row.image} does not exist; {path} in {root}, the longest end of it, is used")
        place_of[path] = row.place
        paths.append(path)
    if missing:
        more = f", nor are the images of {counted(len(missing) - 1, 'more row')}" if len(missing) > 1 else ""
        message = f"{missing[0].place}: {missing[0].image} is not in {root}{more}"
        if not allow_partial:
            remedy = sniffer.unpacking_here(root) or "add the images"
            raise UsageError(f"{message}; {remedy}, or use --allow-partial to omit these rows")
        logger.warn(f"{message}; these rows are omitted")
    return paths


def _numbered(source, rows, names):
    """Return (label of each row as a number, class names or None).

    Args:
        names: result of classes.label_names.
    Raises:
        UsageError: a row has no label or several labels, or its label is not a class.
    """
    for row in rows:
        if not row.label or row.label.lower() == "nan":  # pandas
            raise UsageError(f"{row.place}: has no label; write it, or remove the line")
        # Several numbers, or a list or an object in JSON or Python.
        if re.fullmatch(r"-?\d+(\s*[\s,;|]\s*-?\d+)+|\[.*\]|\{.*\}", row.label):
            raise UsageError(
                f"{row.place}: has several labels ({row.label[:50]}); the import writes one label per image, so "
                "keep one"
            )
    if not all(_is_float(row.label) for row in rows):
        _check_several(rows)
        return _numbered_names(rows, names)
    labels = []
    for row in rows:
        number = _NUMBER.fullmatch(row.label)
        if number is None or int(number[1]) < 0:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not a class; use whole numbers from 0")
        labels.append(int(number[1]))
    if names is not None:
        path, names, first = names
        if first is None:
            first = 1 if min(labels) == 1 and max(labels) == len(names) else 0
        if first:
            logger.info(f"{source}: labels from 1 to {len(names)} are renumbered from 0")
        limit, origin = len(names), f"{path} contains the names of labels {first} to {first + len(names) - 1}"
    else:
        first, limit, origin = 0, len(rows), f"there are only {len(rows)} images"
    for row, label in zip(rows, labels, strict=True):
        if not 0 <= label - first < limit:
            raise UsageError(
                f"{row.place}: has label {label}, but {origin}; number the classes from {first}, or choose the labels "
                "with --label-column"
            )
    return [label - first for label in labels], names


def _check_several(rows):
    """Raise UsageError if a label consists of several others. Log a warning if labels differ only in case."""
    all_labels = {row.label for row in rows}
    for row in rows:
        for delimiter in ",;|":
            parts = [part.strip() for part in row.label.split(delimiter)]
            if len(parts) > 1 and all_labels.issuperset(parts):
                raise UsageError(
                    f"{row.place}: has several labels ({row.label[:50]}); an import has one label per image, so keep "
                    "one, or train with --multi-label"
                )
    first = {}
    for label in sorted(all_labels):
        other = first.setdefault(label.casefold(), label)
        if other != label:
            logger.warn(f"the labels {other} and {label} differ only in case, and are different classes")
            return


def _numbered_names(rows, names):
    path, names, _ = names or (None, sorted({row.label for row in rows}), None)
    label_of = {name: label for label, name in enumerate(names)}
    for row in rows:
        if row.label not in label_of:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not in {path}; add it, or remove {path}")
    return [label_of[row.label] for row in rows], names


def _is_float(text):
    return re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE | re.ASCII) is not None


def _rows_of_folder(root, images, options):
    """Return ([Row], result of classes.label_names or None) of the tables in a folder."""
    there = {name for name in os.listdir(root) if not name.startswith(".")}
    if {"imagelabels.mat", "setid.mat"} <= there:
        return official.flowers(root), None
    if {"images.txt", "image_class_labels.txt"} <= there:
        return official.cub(root)
    if os.path.isfile(os.path.join(root, "annotations", "trainval.txt")):
        return official.pets(root)
    if os.path.isfile(os.path.join(root, "val", "val_annotations.txt")):
        return official.tiny_imagenet(root), None
    if food := official.food(root):
        return food, None
    tables = _tables(root, images, options)
    if not tables:
        raise UsageError(
            f"{root}: contains no table with the columns of images and labels; choose them with --image-column and "
            "--label-column"
        )
    return table_files.read(tables, root, images, options), None


def _tables(root, images, options):
    """Return the paths of the tables in a folder: one table without a split, or one for each split; [] if there are
    none. Raise UsageError if there are several tables for a split."""
    folders = [
        "",
        *(name for name in sorted(os.listdir(root)) if split_of(name) and os.path.isdir(os.path.join(root, name))),
    ]
    names = sorted(os.listdir(root))
    groups = (
        [os.path.join(root, f, name) for f in folders for name in ("metadata.csv", "metadata.jsonl")],
        [os.path.join(root, f, ROBOFLOW) for f in folders],
        *(
            [path for f in group for path in _listed(os.path.join(root, f)) if _has_columns(path, f, images, options)]
            for group in ([""], folders[1:], _ANNOTATIONS, _without_images(root, folders))
        ),
        [os.path.join(root, name) for name in names if re.fullmatch(r"\w+_list\.txt", name) and split_of(name)],
        [os.path.join(root, name) for name in names if name.endswith(".txt") and name[:-4].lower() in SPLIT_OF],
        [os.path.join(root, "meta", f"{name}.txt") for name in SPLIT_OF],
        *(
            [path for path in _listed(root) if path.endswith(ending) and sniffer.is_list(path, images.names_one(""))]
            for ending in (".lst", ".txt")
        ),
    )
    for group in groups:
        tables = [path for path in group if os.path.isfile(path)]
        if not tables:
            continue
        of_split = defaultdict(list)
        for path in tables:
            of_split[split_of(os.path.relpath(path, root)) or "train"].append(path)
        for _, paths in sorted(of_split.items(), key=lambda item: item[0] != "train"):
            if len(paths) > 1:
                shown = ", ".join(os.path.relpath(path, root) for path in paths[:5])
                example = next((path for path in paths if split_of(os.path.basename(path))), paths[0])
                raise UsageError(
                    f"{root}: contains several tables ({shown}); import one of them, such as {example}, or move the "
                    "others to a different folder"
                )
        return tables
    return []


def _without_images(root, excluded):
    """Return the names of the folders in root that contain no images, except those in `excluded`."""
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
    return path.lower().endswith(sniffer.TABLE_SUFFIXES) and sniffer.is_table(
        path, options.image_column, options.label_column, images.names_one(folder)
    )
