"""Read images whose labels are in a table or list: CSV, TSV, JSON Lines, file lists, and the official splits of
CUB-200, Oxford-IIIT Pets and Food-101.

Each reader returns rows; `read` finds the image of each row, and numbers the classes. Labels that are numbers remain
unchanged. Text labels are numbered in sorted order.
"""

import csv
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass

from paddle_resnet.data import listing, records, sniffer
from utils import logger
from utils.errors import UsageError

TABLES = sniffer.TABLE_SUFFIXES
# Files with one class name per line, possibly after its number.
NAME_FILES = re.compile(r"(.*[-_])?(labels?|label_list|labels_list|classes|class_names|classnames)\.txt", re.IGNORECASE)
ROBOFLOW = "_classes.csv"
_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
_SPLIT_OF = {name: split for split, names in _SPLITS.items() for name in names}
_TEXT_LIMIT = 1 << 30  # maximum size of a table in bytes
_SUBFOLDERS = 50  # maximum number of subfolders of a folder in which images are searched
_SUFFIX = "|".join(re.escape(suffix) for suffix in records.IMAGE_SUFFIXES)
_NUMBER = re.compile(r"(-?\d{1,9})(\.0+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
        image: path or id of the image.
        label: its label as text.
        split: "train", "val", "test", or None if the table contains no split.
        place: file and line, for messages.
        folder: folder of the table, relative to the root.
    """

    image: str
    label: str
    split: str | None
    place: str
    folder: str = ""


def read(source, options):
    """List the images of a table or of a folder with tables.

    Args:
        source: the table, or the folder that contains tables and images.
        options: Options.
    Returns:
        ({split: [listing.Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: there is no table or there are several; a column is missing or ambiguous; an image is missing,
            ambiguous or occurs twice; or a label is not a class.
    """
    is_file = os.path.isfile(source)
    root = os.path.dirname(source) or "." if is_file else source
    images = _Images(root)
    rows, names = (
        _rows_of_folder(root, images, options) if not is_file else (_rows([source], root, images, options), None)
    )
    if not rows:
        raise UsageError(f"{source}: contains no rows with images; choose a different table")
    rows = _chosen(source, rows)
    paths = _found(root, rows, images, options.allow_partial)
    rows = [row for row, path in zip(rows, paths, strict=True) if path is not None]
    if not rows:
        raise UsageError(f"{source}: none of the images is in {root}; use the folder that contains the images")
    names = names or _class_names(root)
    labels, names = _numbered(source, rows, names)
    splits = defaultdict(list)
    for row, label, path in zip(rows, labels, filter(None, paths), strict=True):
        splits[row.split].append(listing.Image(path, os.path.join(root, path), label))
    if "train" not in splits:
        raise UsageError(f"{source}: contains no training images; import the table of the training images")
    _check_validation(source, splits, names)
    return {split: splits[split] for split in ("train", "val") if split in splits}, names


def _check_validation(source, splits, names):
    trained = {image.label for image in splits["train"]}
    if unknown := sorted({image.label for image in splits.get("val", [])} - trained):
        shown = ", ".join(names[label] if names else str(label) for label in unknown[:5])
        raise UsageError(
            f"{source}: {len(unknown)} classes have validation images, but no training images ({shown}); add training "
            "images, or remove these rows"
        )


def _chosen(source, rows):
    """Return the rows of the training and validation splits. Without validation images, those of the test split take
    their place."""
    counts = {split: sum(row.split == split for row in rows) for split in (None, *_SPLITS)}
    rename = {None: "train", "train": "train", "val": "val", "test": None if counts["val"] else "val"}
    if counts["test"]:
        used = "left out" if counts["val"] else "used as validation images"
        logger.info(f"{source}: the {counts['test']} test images are {used}")
    return [Row(row.image, row.label, rename[row.split], row.place, row.folder) for row in rows if rename[row.split]]


# Find images


class _Images:
    """The image files below a folder. Each folder is listed only once."""

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
        """Return {name of a file, or its name without the suffix of an image: [names]} of a folder."""
        if folder not in self._listed:
            names = defaultdict(list)
            path = os.path.join(self._root, folder)
            if os.path.isdir(path):
                for entry in os.scandir(path):
                    if entry.is_file():
                        names[entry.name].append(entry.name)
                        stem, suffix = os.path.splitext(entry.name)
                        if suffix.lower() in records.IMAGE_SUFFIXES:
                            names[stem].append(entry.name)
            self._listed[folder] = names
        return self._listed[folder]

    def _by_preference(self, split):
        """Return (folders named like a split, all other folders)."""
        if split not in self._sorted:
            same = [folder for folder in self._folders if split_of(folder) == split]
            self._sorted[split] = same, [folder for folder in self._folders if folder not in same]
        return self._sorted[split]

    def find(self, row):
        """Return the paths, relative to the root, of the files that a row may mean. The best places are the folder of
        the table and the root, followed by folders named like the split, and all other folders."""
        image = row.image
        if os.path.isabs(image):
            image = os.path.relpath(image, os.path.abspath(self._root))
        if image.startswith("..") or "/../" in image:
            return []
        for folders in ([row.folder], [""], *self._by_preference(row.split)):
            found = []
            for folder in folders:
                parent, name = os.path.split(os.path.normpath(os.path.join(folder, image)))
                found += [os.path.join(parent, file) for file in self._names(parent).get(name, [])]
            if found:
                return list(dict.fromkeys(found))
        return self.find(Row(image.replace("\\", "/"), *_rest(row))) if "\\" in image else []


def _rest(row):
    return row.label, row.split, row.place, row.folder


def split_of(name):
    """Return the split in the name of a file or folder, such as "val" in valid_labels.csv, or None."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    found = {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}
    return found.pop() if len(found) == 1 else None


def _found(root, rows, images, allow_partial):
    """Return the path, relative to the root, of the image of each row, or None if it is missing."""
    paths, missing, place_of = [], [], {}
    for row in rows:
        found = images.find(row)
        if len(found) > 1:
            raise UsageError(f"{row.place}: {row.image} may be {' or '.join(found[:5])}; write the path")
        if not found:
            missing.append(row)
            paths.append(None)
            continue
        (path,) = found
        if not path.lower().endswith(records.IMAGE_SUFFIXES):
            raise UsageError(
                f"{row.place}: {path} is not an image with a name that ends in {', '.join(records.IMAGE_SUFFIXES)}; "
                "convert it, or remove the line"
            )
        if path in place_of:
            raise UsageError(f"{row.place}: {row.image} is also in {place_of[path]}; remove one of the lines")
        place_of[path] = row.place
        paths.append(path)
    if missing:
        more = f", and {len(missing) - 1} more rows" if len(missing) > 1 else ""
        message = f"{missing[0].place}: {missing[0].image} is not in {root}{more}"
        if not allow_partial:
            raise UsageError(f"{message}; add the images, or use --allow-partial to omit these rows")
        logger.warn(f"{message}; these rows are omitted")
    return paths


# Number classes


def _numbered(source, rows, names):
    """Return (label of each row as a number, class names or None).

    Args:
        names: (path of the file with class names, class names in label order), or None.
    """
    for row in rows:
        if not row.label:
            raise UsageError(f"{row.place}: has no label; write it, or remove the line")
        if re.fullmatch(r"-?\d+(\s*[\s,;|]\s*-?\d+)+", row.label):
            raise UsageError(
                f"{row.place}: has several labels ({row.label[:50]}); this program trains one label per image"
            )
    if not all(_is_float(row.label) for row in rows):
        return _numbered_names(rows, names)
    labels = []
    for row in rows:
        number = _NUMBER.fullmatch(row.label)
        if number is None or int(number[1]) < 0:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not a class; labels are whole numbers from 0")
        labels.append(int(number[1]))
    if names is not None:
        path, names = names
        first = 1 if min(labels) == 1 and max(labels) == len(names) else 0
        if first:
            logger.info(f"{source}: labels from 1 to {len(names)} are renumbered from 0")
        limit, origin = len(names), f"{path} has {len(names)} names"
    else:
        first, limit, origin = 0, len(rows), f"there are only {len(rows)} images"
    for row, label in zip(rows, labels, strict=True):
        if label - first >= limit:
            raise UsageError(
                f"{row.place}: has label {label}, but {origin}; number the classes from 0, or choose the labels with "
                "--label-column"
            )
    return [label - first for label in labels], names


def _numbered_names(rows, names):
    path, names = names or (None, sorted({row.label for row in rows}))
    label_of = {name: label for label, name in enumerate(names)}
    for row in rows:
        if row.label not in label_of:
            raise UsageError(f"{row.place}: label {row.label[:50]} is not in {path}; add it, or remove {path}")
    return [label_of[row.label] for row in rows], names


def _is_float(text):
    try:
        return float(text) == float(text)  # "nan" is a name
    except ValueError:
        return False


def _class_names(root):
    """Return (path, names) from the file with class names in the root or in meta/, or None."""
    for folder in (root, os.path.join(root, "meta")):
        found = (
            sorted(name for name in os.listdir(folder) if NAME_FILES.fullmatch(name)) if os.path.isdir(folder) else []
        )
        found = {name: _names(os.path.join(folder, name)) for name in found}
        if len({tuple(names) for names in found.values()}) > 1:
            raise UsageError(f"{folder}: {' and '.join([*found][:5])} contain different class names; keep one of them")
        for name, names in found.items():
            return os.path.join(folder, name), names
    return None


def _names(path):
    lines = [line.strip() for line in _lines(path)]
    while lines and not lines[-1]:
        lines.pop()
    pairs = [line.split(maxsplit=1) for line in lines]
    numbers = [int(pair[0]) if len(pair) == 2 and pair[0].isdigit() else None for pair in pairs]
    if lines and numbers in ([*range(len(lines))], [*range(1, len(lines) + 1)]):
        lines = [name for _, name in pairs]
    repeated = (
        next((name for i, name in enumerate(lines) if name in lines[:i]), None)
        if len(set(lines)) < len(lines)
        else None
    )
    if repeated is not None:
        raise UsageError(f"{path}: contains {repeated or 'an empty line'} twice; write one name per class")
    return lines


# Read tables


def _lines(path):
    """Return the lines of a text file."""
    with records.readable(path), records.open_regular(path, _TEXT_LIMIT) as f:
        data = f.read()
    try:
        return data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UsageError(f"{path}: line {line} is not UTF-8; convert the file to UTF-8") from e


def _rows_of_folder(root, images, options):
    """Return ([Row], (path, class names) or None) of the tables in a folder."""
    there = {name for name in os.listdir(root) if not name.startswith(".")}
    if {"images.txt", "image_class_labels.txt"} <= there:
        return _cub(root)
    if os.path.isfile(os.path.join(root, "annotations", "trainval.txt")):
        return _pets(root)
    if food := _food(root):
        return food, None
    tables = _tables(root, options)
    if not tables:
        raise UsageError(
            f"{root}: contains no table with the columns of images and labels; choose them with --image-column and "
            "--label-column"
        )
    return _rows(tables, root, images, options), None


def _tables(root, options):
    """Return the paths of the tables in a folder: one table without a split, or one for each split."""
    folders = [
        "",
        *(name for name in sorted(os.listdir(root)) if split_of(name) and os.path.isdir(os.path.join(root, name))),
    ]
    groups = (
        [os.path.join(root, f, name) for f in folders for name in ("metadata.csv", "metadata.jsonl")],
        [os.path.join(root, f, ROBOFLOW) for f in folders],
        [
            os.path.join(root, name)
            for name in sorted(os.listdir(root))
            if _has_columns(os.path.join(root, name), options)
        ],
        [
            os.path.join(root, name)
            for name in sorted(os.listdir(root))
            if re.fullmatch(r"\w+_list\.txt", name) and split_of(name)
        ],
        [
            os.path.join(root, name)
            for name in sorted(os.listdir(root))
            if name.endswith(".txt") and name[:-4].lower() in _SPLIT_OF
        ],
        [os.path.join(root, "meta", f"{name}.txt") for name in _SPLIT_OF],
    )
    for group in groups:
        tables = [path for path in group if os.path.isfile(path)]
        if not tables:
            continue
        of_split = defaultdict(list)
        for path in tables:
            of_split[split_of(os.path.relpath(path, root)) or "train"].append(path)
        for paths in of_split.values():
            if len(paths) > 1:
                shown = ", ".join(os.path.relpath(path, root) for path in paths[:5])
                raise UsageError(f"{root}: contains several tables ({shown}); import one of them, such as {paths[0]}")
        return tables
    return []


def _has_columns(path, options):
    return path.lower().endswith(TABLES) and sniffer.is_table(path, options.image_column, options.label_column)


def _rows(tables, root, images, options):
    rows = []
    for path in tables:
        relative = os.path.relpath(path, root)
        folder, name = os.path.split(relative)
        split = split_of(relative)
        if name == ROBOFLOW:
            rows += _one_hot(path, folder, split)
        elif path.lower().endswith(TABLES) and _has_header(path, options):
            rows += _columns(path, folder, split, images, options)
        else:
            rows += _list(path, folder, split, images, options)
    return rows


def _has_header(path, options):
    known = any(sniffer.normalized(column) in sniffer.IMAGE_COLUMNS for column in sniffer.header(path))
    return known or options.image_column is not None or path.lower().endswith(".jsonl")


def _cells(path, delimiter=None):
    """Yield (line number, [cells]) of a table, first its header."""
    lines = _lines(path)
    if path.lower().endswith(".jsonl"):
        header = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UsageError(f"{path}: line {number} is not JSON ({e}); correct it") from e
            if not isinstance(values, dict):
                raise UsageError(f"{path}: line {number} is not a JSON object; correct it")
            if header is None:
                header = [*values]
                yield 0, header
            yield number, ["" if values.get(name) is None else _text(values[name]) for name in header]
        return
    reader = csv.reader(lines, delimiter=_delimiter(path, lines, delimiter))
    try:
        width = None
        for row in reader:
            if not any(row):
                continue
            width = width or len(row)
            if len(row) != width:
                raise UsageError(
                    f"{path}: line {reader.line_num} has {len(row)} columns instead of {width}; correct it, or choose "
                    "--delimiter"
                )
            yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as e:
        raise UsageError(f"{path}: line {reader.line_num} cannot be read ({e}); correct it") from e


def _text(value):
    return str(value) if isinstance(value, str | int | float) else json.dumps(value)


def _delimiter(path, lines, delimiter):
    if delimiter is None:
        return sniffer.delimiter(lines[0]) if lines else ","
    if len(delimiter) != 1:
        raise UsageError(f"--delimiter {delimiter!a}: {path} needs a single character; use one such as ,")
    return delimiter


def _columns(path, folder, split, images, options):
    """Read a table with a header."""
    cells = _cells(path, options.delimiter)
    _, header = next(cells, (0, []))
    cells = [*cells]
    known = [*map(sniffer.normalized, header)]

    def index(flag, name, candidates):
        """Return the index of a column, or None if there are no candidates."""
        if name is not None:
            if name not in header:
                raise UsageError(f"{flag} {name}: {path} has the columns {', '.join(header[:10])}; choose one of them")
            return header.index(name)
        if len(candidates) > 1:
            shown = ", ".join(header[i] for i in candidates[:5])
            raise UsageError(f"{path}: the columns {shown} may all be meant; choose one with {flag}")
        return candidates[0] if candidates else None

    at_images = [i for i, name in enumerate(known) if name in sniffer.IMAGE_COLUMNS]
    if len(at_images) > 1 and cells:  # keep columns whose first value is an image
        first = [i for i in at_images if images.find(Row(cells[0][1][i], "", split, "", folder))]
        at_images = first or at_images
    at_image = index("--image-column", options.image_column, at_images)
    at_labels = [i for i, name in enumerate(known) if name in sniffer.LABEL_COLUMNS and i != at_image]
    if not at_labels and len(header) == 2 and at_image is not None:
        at_labels = [1 - at_image]
    at_label = index("--label-column", options.label_column, at_labels)
    for flag, at in (("--image-column", at_image), ("--label-column", at_label)):
        if at is None:
            raise UsageError(f"{path}: has the columns {', '.join(header[:10])}; choose one with {flag}")
    at_splits = [i for i, name in enumerate(known) if name in sniffer.SPLIT_COLUMNS]
    at_split = index("--split-column", options.split_column, at_splits)
    if at_split is not None and options.split_column is None:
        is_known = any(_split_value(header[at_split], row[at_split]) for _, row in cells)
        at_split = at_split if is_known else None
    rows = []
    for number, row in cells:
        place = f"{path}: line {number}"
        own = split
        if at_split is not None:
            own = _split_value(header[at_split], row[at_split])
            if own is None:
                value = ascii(row[at_split][:50])
                raise UsageError(
                    f"{place}: {value} in column {header[at_split]} is not a split; write train, val or test"
                )
        rows.append(Row(row[at_image], row[at_label], own, place, folder))
    return rows


def _split_value(column, value):
    """Return the split that a value in a split column means, or None if it is unknown."""
    if sniffer.normalized(column).startswith("is"):  # such as fastai's is_valid
        other = "test" if sniffer.normalized(column) == "istest" else "val"
        return {"1": other, "true": other, "0": "train", "false": "train"}.get(value.lower())
    return _SPLIT_OF.get(value.lower())


def _one_hot(path, folder, split):
    """Read _classes.csv of Roboflow: the name of the image, and one column with 0 or 1 for each class."""
    cells = _cells(path)
    _, header = next(cells, (0, []))
    rows = []
    for number, (image, *flags) in cells:
        if not {*flags} <= {"0", "1"} or flags.count("1") != 1:
            raise UsageError(
                f"{path}: line {number} has {flags.count('1')} labels; this program trains one label per image, so "
                "exactly one column must be 1 and all others 0"
            )
        rows.append(Row(image, header[1 + flags.index("1")], split, f"{path}: line {number}", folder))
    return rows


def _list(path, folder, split, images, options):
    """Read a list without a header: the image, a delimiter and the label."""
    lines = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    delimiters = ("\t", ",", ";", None) if options.delimiter is None else (options.delimiter,)

    def parts(line, delimiter):
        if delimiter is not None:
            return [part.strip() for part in line.rsplit(delimiter, 1)]
        named = re.fullmatch(rf"\s*(.+?(?:{_SUFFIX}))\s+(\S.*?)\s*", line, re.IGNORECASE)
        return [*named.groups()] if named else line.split(maxsplit=1)

    def works(line, delimiter):
        cells = parts(line, delimiter)
        return len(cells) == 2 and bool(images.find(Row(cells[0], "", split, "", folder)))

    # The delimiter is the first one that separates an image from its label in one of the first lines.
    delimiter = next((d for d in delimiters if any(works(line, d) for _, line in lines[:20])), delimiters[-1])
    rows = []
    for number, line in lines:
        cells = parts(line, delimiter)
        if len(cells) != 2:
            raise UsageError(
                f"{path}: line {number} is not an image and a label but `{line.strip()[:100]}`; correct it, or choose "
                "--delimiter"
            )
        rows.append(Row(*cells, split, f"{path}: line {number}", folder))
    return rows


# Official splits


def _pairs(path):
    """Return {id: (line number, value)} of a file with lines `ID VALUE`."""
    values = {}
    for number, line in enumerate(_lines(path), 1):
        cells = line.split(maxsplit=1)
        if len(cells) != 2 or cells[0] in values:
            problem = "repeats an id" if len(cells) == 2 else "is not `ID VALUE`"
            raise UsageError(f"{path}: line {number} {problem}; download it again")
        values[cells[0]] = number, cells[1].strip()
    return values


def _cub(root):
    """Read CUB-200: images.txt, image_class_labels.txt, train_test_split.txt and classes.txt."""
    tables = {}
    for name in ("images", "image_class_labels", "train_test_split", "classes"):
        tables[name] = _pairs(os.path.join(root, f"{name}.txt"))
    rows = []
    for key, (number, image) in tables["images"].items():
        for name in ("image_class_labels", "train_test_split"):
            if key not in tables[name]:
                raise UsageError(f"{root}/{name}.txt: has no line for image {key}; download it again")
        line, label = tables["image_class_labels"][key]
        if label not in tables["classes"]:
            raise UsageError(f"{root}/image_class_labels.txt: line {line}: class {label} is not in classes.txt")
        is_train = tables["train_test_split"][key][1] == "1"
        place = f"{root}/images.txt: line {number}"
        rows.append(Row(image, tables["classes"][label][1], "train" if is_train else "test", place, "images"))
    return rows, (os.path.join(root, "classes.txt"), [name for _, name in tables["classes"].values()])


def _pets(root):
    """Read Oxford-IIIT Pets: annotations/trainval.txt and test.txt with `IMAGE CLASS SPECIES BREED`. The name of a
    class is the name of its images without the number."""
    rows, names = [], {}
    for file, split in (("trainval.txt", "train"), ("test.txt", "test")):
        path = os.path.join(root, "annotations", file)
        for number, line in enumerate(_lines(path) if os.path.isfile(path) else [], 1):
            if line.startswith("#") or not line.strip():
                continue
            cells = line.split()
            if len(cells) != 4 or not cells[1].isdigit():
                raise UsageError(f"{path}: line {number} is not `IMAGE CLASS SPECIES BREED`; download it again")
            name = cells[0].rpartition("_")[0]
            if names.setdefault(int(cells[1]), name) != name:
                raise UsageError(f"{path}: line {number}: class {cells[1]} is {names[int(cells[1])]} and {name}")
            rows.append(Row(cells[0], name, split, f"{path}: line {number}", "images"))
    return rows, (path, [names[number] for number in sorted(names)])


def _food(root):
    """Read Food-101: meta/train.txt and test.txt with `CLASS/IMAGE`, or the same in JSON. Return [] for a different
    layout."""
    rows = []
    for split in ("train", "test"):
        path = os.path.join(root, "meta", f"{split}.txt")
        if os.path.isfile(path):
            lines = [(number, line.strip()) for number, line in enumerate(_lines(path), 1) if line.strip()]
        elif os.path.isfile(path := os.path.join(root, "meta", f"{split}.json")):
            try:
                content = json.loads("\n".join(_lines(path)))
                lines = [(number, image) for number, image in enumerate((i for c in content.values() for i in c), 1)]
            except (ValueError, AttributeError, TypeError, RecursionError) as e:
                raise UsageError(f"{path}: not a JSON object with lists of images ({e}); download it again") from e
        else:
            continue
        for number, image in lines:
            label, _, name = image.partition("/")
            if not name or " " in image:
                return []  # MMPretrain's lists contain labels
            rows.append(Row(image, label, split, f"{path}: line {number}", "images"))
    return rows
