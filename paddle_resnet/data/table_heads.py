"""Recognize tables and lists of images by their first lines: names of columns, delimiter, and images, labels or pixels
in the first cells."""

import codecs
import contextlib
import csv
import json
import math
import os
import re
from collections.abc import Callable, Sequence

from paddle_resnet.data import record_tables
from paddle_resnet.data.split_names import SPLIT_OF, split_of
from paddle_resnet.utils.errors import UsageError

# Names of columns in lower case without spaces, _ and -.
IMAGE_COLUMNS = (
    *("filename", "file", "filepath", "image", "imageid", "imagepath", "imagename", "img", "imgpath", "imgname"),
    *("path", "name", "id", "idcode", "fname", "fpath", "relativeimpath"),
)
LABEL_COLUMNS = (
    *("label", "labels", "labelid", "labelname", "class", "classname", "classid", "category", "categoryid", "target"),
    *("y", "species", "breed", "diagnosis", "tag", "tags", "variety", "dx", "choice", "gt", "groundtruth"),
    *("emotion", "finelabel", "coarselabel", "findinglabel", "findinglabels"),
)
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset", "isvalid", "isval", "istest", "test")
_INDEX_COLUMNS = ("", "index", "unnamed:0")  # the index of a table of pandas
PIXEL_SPLIT_COLUMNS = ("usage", *SPLIT_COLUMNS[:4])
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", *record_tables.SUFFIXES)
PIXEL_SUFFIXES = (".csv", ".tsv")  # endings of tables that can contain pixels
_SEVERAL_NUMBERS = re.compile(r"\s*-?[\d.]+(\s*[\s,;|]\s*-?[\d.]+)+\s*")  # such as the coordinates of a box
_ROWS = 500  # number of rows of a table in which images with several labels are searched
_LINE = 4096  # number of bytes at the end of a list that are read to find its last line
_HEAD = 1 << 16  # number of characters of a text file that are read to recognize it
_FIRST_LINE = 1 << 20  # number of further characters of a first line that is longer than _HEAD


def is_table(
    path: str,
    image_column: str | None = None,
    label_column: str | None = None,
    is_image: Callable[[str], bool] = lambda cell: False,
) -> bool:
    """Return whether a file is a table with a column of images and a column of labels or, if label_column is None, a
    column for each class (is_one_hot). Return False for Kaggle's sample submissions.

    Args:
        path: path of the file.
        image_column, label_column: names of the columns of images and of labels, or None for IMAGE_COLUMNS and
            LABEL_COLUMNS. If no column has a known name, the images are a column whose first cell is an image, and the
            labels are the other column of a table with two columns.
        is_image: is_image(cell) returns whether the text of a cell is the path, name or id of an image.
    """
    if "submission" in os.path.basename(path).lower():  # the labels in Kaggle's sample_submission.csv are wrong
        return False
    names = header(path)
    known = {normalized(name) for name in names}
    is_record_file = path.lower().endswith(record_tables.SUFFIXES)
    if image_column:
        has_images = image_column in names
    elif is_record_file:  # records that do not describe images can also have an id or a name
        has_images = bool(image_columns(path, is_image))
    else:  # a table of pixels can also have an id
        is_known = not known.isdisjoint(IMAGE_COLUMNS) and not is_pixel_table(path)
        has_images = is_known or bool(image_columns(path, is_image))
    has_two = len(names) == 2 and known.isdisjoint(SPLIT_COLUMNS) and not is_record_file
    has_labels = label_column in names if label_column else has_two or not known.isdisjoint(LABEL_COLUMNS)
    return has_images and (has_labels or (label_column is None and is_one_hot(path)))


def image_columns(path: str, is_image: Callable[[str], bool]) -> list[int]:
    """Return the indexes of the columns of a table whose first cell is an image, see is_table. Without a known name, a
    column of numbers does not contain images; without a header, the first cell is in the first line."""
    names, *rows = first_rows(path, 2) or [[]]
    for row, known in ((names, ()), *((row, IMAGE_COLUMNS) for row in rows)):
        cells = enumerate(zip(row, map(normalized, names), strict=False))
        at = [i for i, (cell, name) in cells if is_image(cell) and (not cell.strip().isdecimal() or name in known)]
        if at:
            return at
    return []


def label_columns(path: str) -> list[str]:
    """Return the names of the columns of a table that are in LABEL_COLUMNS, in the order of LABEL_COLUMNS."""
    names = {normalized(name): name for name in header(path)}
    return [names[name] for name in LABEL_COLUMNS if name in names]


def is_one_hot(path: str) -> bool:
    """Return whether a file is a table with a column of images and a column for each class, of which one is 1 in the
    first row."""
    columns, *rows = first_rows(path, 2) or [[]]
    if len(columns) < 4 or normalized(columns[0]) not in IMAGE_COLUMNS or path.lower().endswith(".jsonl"):
        return False
    if not {*map(normalized, columns)}.isdisjoint(LABEL_COLUMNS):
        return False
    flags = [flag(cell) for row in rows for cell in row[1:]]
    return len(flags) == len(columns) - 1 and None not in flags and flags.count(1) == 1


def flag(cell: str) -> int | None:
    """Return the value of a cell with 0 or 1, possibly written as 0.0 or 1.0, or None for any other text."""
    number = re.fullmatch(r"([01])(\.0*)?", cell.strip())
    return int(number[1]) if number else None


def several_labels(path: str, is_image: Callable[[str], bool]) -> tuple[str | None, Sequence[str]]:
    """Return (example of several labels, or None; names of the columns of labels with 0, 1 or -1) of the first rows of
    a table. For is_image, see is_table."""
    names, *rows = first_rows(path, _ROWS) or [[]]
    rows = [row for row in rows if len(row) == len(names)]
    at_images = image_columns(path, is_image)
    if not rows or not at_images or any(map(is_image, names)):
        return None, ()
    others = [i for i in range(len(names)) if i not in at_images and normalized(names[i]) not in SPLIT_COLUMNS]
    flags = [i for i in others if all(row[i].strip() in ("1", "-1", "0", "1.0", "0.0") for row in rows)]
    if len(flags) > 2 and not label_columns(path):
        counts = [sum(row[i].strip().startswith("1") for i in flags) for row in rows]
        if any(count != 1 for count in counts):
            row = rows[next(i for i, count in enumerate(counts) if count != 1)]
            has = ", ".join([names[i] for i in flags if row[i].strip().startswith("1")][:3])
            flags = [i for i in flags if len({row[i] for row in rows}) > 1]
            return f"{row[at_images[0]]}: {has or 'none'}", tuple(names[i] for i in flags)
    known = [i for i in others if normalized(names[i]) in LABEL_COLUMNS]
    if len(known) != 1:
        return None, ()
    labels, first = {row[known[0]].strip() for row in rows}, {}
    for row in rows:
        label = row[known[0]].strip()
        other = first.setdefault(row[at_images[0]], label)
        parts = [part for delimiter in (r"\|", ";", ",", " ") if len(part := re.split(f" *{delimiter} *", label)) > 1]
        if other != label or any(map(labels.issuperset, parts)):
            return (label if other == label else f"{other}, {label}"), ()
    return None, ()


def is_list(path: str, is_image: Callable[[str], bool]) -> bool:
    """Return whether the first line of a text file consists of an image and a label or, in a list of MXNet (.lst), of
    a number, the label and the image. For is_image, see is_table."""
    line = next(iter(_head(path).split("\n")), "").strip()
    words = re.findall("[a-z]+", os.path.basename(path).lower())
    if not {*words}.isdisjoint(SPLIT_COLUMNS[:4]):  # a list of splits, such as train_test_split.txt
        return False
    if path.lower().endswith(".lst"):
        return line.count("\t") > 1 and is_image(line.split("\t")[-1])
    parts = [line.rsplit(delimiter, 1) for delimiter in ("\t", ",", ";", " ")] + [line.split(maxsplit=1)]
    return any(is_image(image) and not _SEVERAL_NUMBERS.fullmatch(label[0]) for image, *label in parts if label)


def is_path_list(path: str, is_image: Callable[[str], bool]) -> bool:
    """Return whether a text file with the name of a split is a list of images without labels, in which the folder of an
    image is its class. For is_image, see is_table."""
    if not split_of(os.path.basename(path)):
        return False
    lines = [line.strip() for line in (*_head(path).split("\n")[:-1], _last_line(path)) if line.strip()]
    folders = {os.path.basename(os.path.dirname(line)) for line in lines}
    return len(folders) > 1 and folders.isdisjoint(("", *SPLIT_OF)) and is_image(lines[0])


def is_pixel_table(path: str, label_column: str | None = None) -> bool:
    """Return whether a file is a table with the pixels of gray square images, and with labels: a column label_column,
    or a column that is_pixel_label accepts."""
    names = header(path) if path.lower().endswith(PIXEL_SUFFIXES) else []
    at = pixel_columns(names)
    others = [name for i, name in enumerate(names) if i not in at]
    if not is_square(at):
        return False
    if not has_names(names, at):  # the import reports an undecided first line
        return bool(others)
    return any(name == label_column or is_pixel_label(name) for name in others)


def is_square(at: range) -> bool:
    """Return whether the pixels in the columns `at`, the result of pixel_columns, are a square image."""
    return math.isqrt(len(at)) ** 2 == len(at) > 0


def is_pixel_label(name: str) -> bool:
    """Return whether a column of a table of pixels can contain labels; the ids of images, the index of a row and splits
    are not labels."""
    return normalized(name) not in (*IMAGE_COLUMNS, *_INDEX_COLUMNS, *PIXEL_SPLIT_COLUMNS)


def pixel_columns(names: list[str]) -> range:
    """Return the indexes of the consecutive columns of a table that contain pixels: a column `pixels`, or columns such
    as pixel0 or 1x1; an empty range if there are none. If all cells of the first line are numbers, the first
    column contains the labels."""
    at = [i for i, name in enumerate(names) if re.fullmatch(r"(pixels?)?_?\d+|\d+x\d+", name.strip().lower())]
    at = at[1:] if len(at) == len(names) and all(map(str.isdecimal, names)) else at
    if len(at) <= 9 or at != [*range(at[0], at[-1] + 1)]:
        at = [i for i, name in enumerate(names) if normalized(name) == "pixels"]
    return range(at[0], at[-1] + 1) if at else range(0)


def has_names(names: list[str], at: range) -> bool | None:
    """Return whether the first line `names` of a table of pixels consists of names of columns, or None if this cannot
    be decided. In contrast to pixels, names that are numbers never repeat.

    Args:
        names: cells of the first line.
        at: result of pixel_columns.
    """
    cells = [names[i].strip() for i in at]
    if not all(map(str.isdecimal, cells)):
        return True
    numbers = [*map(int, cells)]
    if len({*numbers}) < len(numbers):
        return False
    first = numbers[0]  # 2 if the columns are numbered from 1, and the first one contains the labels
    return True if first <= 2 and numbers == [*range(first, first + len(numbers))] else None


def header(path: str) -> list[str]:
    """Return the names of the columns of a table, or [] if the file cannot be read or is not a table."""
    return next(iter(first_rows(path, 1)), [])


def first_rows(path: str, count: int) -> list[list[str]]:
    """Return the cells of the first rows of a table as text; [] if the file cannot be read or is not a table. The first
    row of a JSON Lines file consists of the names in its first object."""
    if path.lower().endswith(record_tables.SUFFIXES):
        with contextlib.suppress(UsageError, OSError):
            table = record_tables.read(path)
            return [table.header, *table.rows[: count - 1]] if table.rows else []
        return []
    with contextlib.suppress(ValueError, csv.Error):
        lines = _head(path).splitlines()
        if path.lower().endswith(".jsonl"):
            row = json.loads(lines[0]) if lines else None
            return [[*row], [*map(str, row.values())]][:count] if isinstance(row, dict) else []
        if path.lower().endswith(".txt"):
            start, names = text_header(lines)
            return [names, *(line.split() for line in lines[start : start + count - 1])] if names else []
        reader = csv.reader(lines, delimiter=delimiter(lines[0]) if lines else ",")
        return [row for _, row in zip(range(count), reader, strict=False)]
    return []


def text_header(lines: list[str]) -> tuple[int, list[str]]:
    """Return (number of lines before the rows, names of the columns) of a text file whose columns are separated by
    spaces, with a line of names, possibly after the number of rows, and possibly without a name for the images; (0, [])
    for a different file."""
    start = 2 if lines and lines[0].strip().isdecimal() else 1
    if len(lines) > start:
        names, row = lines[start - 1].split(), lines[start].split()
        if len(row) == len(names) + 1 and len(names) > 1 and start == 2:
            names = [record_tables.IMAGE, *names]
        known = {normalized(name) for name in names}
        if len(row) == len(names) > 1 and not known.isdisjoint(IMAGE_COLUMNS):
            return start, names
    return 0, []


def _head(path):
    """Return the first _HEAD characters of a text file, and the rest of the first line if it is longer; or "" if the
    file cannot be read."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: damaged UTF-16
        if os.path.isfile(path):  # a pipe could block
            with open(path, "rb") as f:
                name = encoding(f.read(2))
            with open(path, encoding=name, errors="replace") as f:
                head = f.read(_HEAD)
                return head if "\n" in head else head + f.readline(_FIRST_LINE)
    return ""


def _last_line(path):
    """Return the last line of a list file, of which only the last _LINE bytes are read, or "" if the file cannot be
    read."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as f:
                f.seek(max(0, os.path.getsize(path) - _LINE))
                return f.read().decode(errors="replace").strip().rpartition("\n")[2]
    return ""


def encoding(start: bytes) -> str:
    """Return the encoding of a text file that begins with `start`: UTF-16 if this is its byte order mark, otherwise
    UTF-8."""
    return "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def delimiter(line: str) -> str:
    """Return the delimiter of a line of a table: the one of tab, comma and semicolon that occurs most often."""
    return max("\t,;", key=line.count)


def normalized(name: str) -> str:
    """Return the name of a column in lower case without spaces, _ and -, as in IMAGE_COLUMNS."""
    return re.sub(r"[\s_-]", "", name.casefold())
