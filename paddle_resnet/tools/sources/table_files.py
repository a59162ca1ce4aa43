"""Read the rows of tables: CSV, TSV, JSON Lines, JSON and .mat files, Roboflow's _classes.csv, and lists without a
header.

All functions that read a table raise UsageError if the table is damaged, or if its columns are missing or ambiguous.
"""

import csv
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from paddle_resnet.data import image_search, record_tables, sniffer, table_heads
from paddle_resnet.data.images import readable
from paddle_resnet.data.split_names import SPLIT_OF, split_of
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted, json_problem
from paddle_resnet.utils.files import open_regular

ROBOFLOW = "_classes.csv"
_TEXT_LIMIT = 1 << 30  # maximum size of a table in bytes
_SUFFIX = "|".join(re.escape(suffix) for suffix in image_search.SUFFIXES)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
        image: path or id of the image.
        label: label of the image as text.
        split: "train", "val", "test", or None if the table contains no split.
        place: file and line, for messages.
        folder: folder of the table, relative to the root.
    """

    image: str
    label: str
    split: str | None
    place: str
    folder: str = ""


def read_lines(path: str) -> list[str]:
    """Return the lines of a text file in UTF-8 or, with a byte order mark, UTF-16. Raise UsageError if the file cannot
    be read or has a different encoding."""
    with readable(path), open_regular(path, _TEXT_LIMIT) as f:
        data = f.read()
    try:
        return data.decode(table_heads.encoding(data)).replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UsageError(f"{path}: line {line} is not UTF-8; convert the file to UTF-8") from e


def read(tables: Iterable[str], root: str, images: image_search.ImageSearch, options: Options) -> list[Row]:
    """Return [Row] of all tables.

    Args:
        tables: paths of the tables.
        root: folder of the data set.
        images: images of `root`, with which columns and delimiters are recognized.
        options: Options of the import.
    """
    rows = []
    for path in tables:
        relative = os.path.relpath(path, root)
        folder, name = os.path.split(relative)
        split = split_of(relative)
        if options.label_column is None and (name == ROBOFLOW or table_heads.is_one_hot(path)):
            rows += _one_hot(path, folder, split, options)
        elif (path.endswith(".txt") and table_heads.header(path)) or (
            path.lower().endswith(table_heads.TABLE_SUFFIXES) and _has_header(path, folder, images, options)
        ):
            rows += _columns(path, folder, split, images, options)
        else:
            rows += _list(path, folder, split, images, options)
    return rows


def with_splits(root: str, rows: list[Row]) -> list[Row]:
    """If no row has a split, and the folder `root` or its folder Eval contains list_eval_partition.txt or .csv, as
    CelebA, return the rows with the splits in this file: 0 or train, 1 or val, 2 or test. Otherwise, return the rows.
    """
    names = [f"{sniffer.PARTITION}{suffix}" for suffix in (".txt", ".csv")]
    paths = [os.path.join(root, folder, name) for folder in ("", "Eval") for name in names]
    path = next(filter(os.path.isfile, paths), None)
    if path is None or any(row.split for row in rows):
        return rows
    split_in, values = {}, {"0": "train", "1": "val", "2": "test", **SPLIT_OF}
    for number, line in enumerate(read_lines(path), 1):
        cells = re.split(r"[\s,]+", line.strip())
        if len(cells) == 2 and cells[1].lower() in values:
            split_in[cells[0]] = values[cells[1].lower()]
        elif split_in or number > 2:  # the number of images and the names of the columns may come first
            raise UsageError(f"{path}: line {number} is not an image and 0, 1 or 2; download the file again")
    if missing := [row for row in rows if row.image not in split_in]:
        raise UsageError(f"{missing[0].place}: {missing[0].image} is not in {path}; add it, or remove {path}")
    logger.info(f"{path}: contains the splits")
    return [Row(row.image, row.label, split_in[row.image], row.place, row.folder) for row in rows]


def _has_header(path, folder, images, options):
    is_image = functools.partial(images.is_image, folder=folder)
    names = table_heads.header(path)
    known = any(table_heads.normalized(column) in table_heads.IMAGE_COLUMNS for column in names)
    known = known or bool(options.columns) or path.lower().endswith((".jsonl", *record_tables.SUFFIXES))
    return known or (not any(map(is_image, names)) and bool(table_heads.image_columns(path, is_image)))


def _cells(path, delimiter=None):
    """Yield (place, [cells]) for the header of a table, and then for each row."""
    if path.lower().endswith(record_tables.SUFFIXES):
        with readable(path):
            table = record_tables.read(path)
        if not table.rows:
            raise UsageError(
                f"{path}: {table.content}, not images with labels; write labels.csv with the columns "
                "file_name and label, and import labels.csv"
            )
        yield path, table.header
        yield from ((f"{path}: record {i}", row) for i, row in enumerate(table.rows))
        return
    lines = read_lines(path)
    if path.lower().endswith(".jsonl"):
        header = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UsageError(f"{path}: line {number} is {json_problem(e)}; correct it") from e
            if not isinstance(values, dict):
                raise UsageError(f"{path}: line {number} is not a JSON object; correct it")
            if header is None:
                header = [*values]
                yield path, header
            yield f"{path}: line {number}", [record_tables.text(values.get(name)) for name in header]
        return
    if path.endswith(".txt"):
        start, names = table_heads.text_header(lines)
        yield path, names
        for number, line in enumerate(lines[start:], start + 1):
            if line.strip():
                if len(line.split()) != len(names):
                    raise UsageError(f"{path}: line {number} does not have {len(names)} columns; correct it")
                yield f"{path}: line {number}", line.split()
        return
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=_delimiter(path, lines, delimiter))
    try:
        width = None
        for row in reader:
            if not any(row):
                continue
            width = width or len(row)
            if len(row) != width:
                raise UsageError(
                    f"{path}: line {reader.line_num} has {counted(len(row), 'column')} instead of {width}; correct it, "
                    "or choose --delimiter"
                )
            yield f"{path}: line {reader.line_num}", [cell.strip() for cell in row]
    except csv.Error as e:
        raise UsageError(f"{path}: line {reader.line_num} cannot be read ({e}); correct it") from e


def _delimiter(path, lines, delimiter):
    if delimiter is None:
        return table_heads.delimiter(lines[0]) if lines else ","
    if len(delimiter) != 1:
        raise UsageError(
            f"--delimiter {delimiter!a}: not a single character, which is required for {path}; use, for example, ','"
        )
    return delimiter


def _columns(path, folder, split, images, options):
    """Return [Row] of a table with a header."""
    cells = _cells(path, options.delimiter)
    _, header = next(cells, (path, []))
    cells = [*cells]
    known = [*map(table_heads.normalized, header)]

    def index(flag, name, candidates):
        """Return the index of the column `name` or, if it is None, of the only candidate; None without candidates."""
        if name is not None:
            if name not in header:
                raise UsageError(f"{flag} {name}: {path} has the columns {', '.join(header[:10])}; choose one of them")
            return header.index(name)
        if len(candidates) > 1:
            shown = ", ".join(header[i] for i in candidates[:5])
            raise UsageError(f"{path}: the columns {shown} are all candidates for {flag}; set it to one of them")
        return candidates[0] if candidates else None

    # The candidates for the column of images are the columns whose first value is an image, if possible with a known
    # name. Several columns, such as id and path, may name the same image.
    at_images = [i for i, name in enumerate(known) if name in table_heads.IMAGE_COLUMNS]
    first = {i: images.find(cells[0][1][i], folder, split) for i in range(len(header)) if cells}
    named = [i for i in at_images if first.get(i)]
    at_images = named or table_heads.image_columns(path, functools.partial(images.is_image, folder=folder)) or at_images
    if len({tuple(first.get(i, [i])) for i in at_images}) == 1:
        at_images = at_images[:1]
    at_image = index("--image-column", options.image_column, at_images)
    at_labels = [i for i, name in enumerate(known) if name in table_heads.LABEL_COLUMNS and i != at_image]
    if not at_labels and len(header) == 2 and at_image is not None:
        at_labels = [1 - at_image]
    at_label = index("--label-column", options.label_column, at_labels)
    for flag, at in (("--image-column", at_image), ("--label-column", at_label)):
        if at is None:
            raise UsageError(f"{path}: no column is recognized for {flag}; set it to one of {', '.join(header[:10])}")
    at_splits = [i for i, name in enumerate(known) if name in table_heads.SPLIT_COLUMNS]
    if not path.lower().endswith(".mat"):  # in other tables, "test" may be a property of the image
        at_splits = [i for i in at_splits if known[i] != "test"]
    at_split = index("--split-column", options.split_column, at_splits)
    if at_split is not None and options.split_column is None:
        is_known = any(_split_value(header[at_split], row[at_split]) for _, row in cells)
        at_split = at_split if is_known else None
    if at_split is None:  # a column with a different name, such as Usage, that contains nothing but names of splits
        at_split = index("--split-column", None, _columns_of_splits(cells, {at_image, at_label}))
    rows = []
    for place, row in cells:
        own = split
        if at_split is not None:
            own = _split_value(header[at_split], row[at_split])
            if own is None:
                value = ascii(row[at_split][:50])
                valid = "0, 1, true or false" if _is_flag(header[at_split]) else "train, val or test"
                raise UsageError(f"{place}: {value} in column {header[at_split]} is not a split; write {valid}")
        rows.append(Row(row[at_image], row[at_label], own, place, folder))
    return rows


def _columns_of_splits(cells, excluded):
    """Return the indexes of the columns that contain the names of at least two splits and nothing else."""
    width = len(cells[0][1]) if cells else 0
    values = ({SPLIT_OF.get(row[i].lower()) for _, row in cells} for i in range(width) if i not in excluded)
    others = [i for i in range(width) if i not in excluded]
    return [i for i, found in zip(others, values, strict=True) if None not in found and len(found) > 1]


def _split_value(column, value):
    """Return the split that a value in a split column means, or None if it is unknown."""
    if _is_flag(column):
        other = "test" if table_heads.normalized(column) in ("istest", "test") else "val"
        return {"1": other, "true": other, "0": "train", "false": "train"}.get(value.lower())
    return SPLIT_OF.get(value.lower())


def _is_flag(column):
    """Return whether a split column contains 0 or 1, such as fastai's is_valid."""
    return table_heads.normalized(column).startswith("is") or table_heads.normalized(column) == "test"


def _one_hot(path, folder, split, options):
    """Return [Row] of a table such as Roboflow's _classes.csv: the name of the image, and one column with 0 or 1 for
    each class."""
    cells = _cells(path)
    _, header = next(cells, (path, []))
    for flag, name in options.columns.items():
        if (flag, [name]) != ("--image-column", header[:1]):
            raise UsageError(f"{flag} {name}: {path} contains only images and a column per class; remove {flag}")
    rows = []
    for place, (image, *flags) in cells:
        flags = [*map(table_heads.flag, flags)]
        if None in flags or sum(flags) != 1:
            raise UsageError(
                f"{place} does not contain exactly one 1 and otherwise 0; the import writes one label "
                "per image, so correct or remove the line"
            )
        rows.append(Row(image, header[1 + flags.index(1)], split, place, folder))
    return rows


def _list(path, folder, split, images, options):
    """Return [Row] of a list without a header, whose lines contain the image, a delimiter and the label; or, without
    labels, the path of the image, whose folder is the label. The lines of a list of MXNet (.lst) contain a number, the
    label and the image, separated by tabs."""
    if options.columns:
        flag, name = next(iter(options.columns.items()))
        raise UsageError(f"{flag} {name}: {path} is a list without names of columns; remove {flag}")
    lines = [(number, line) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    if path.lower().endswith(".lst"):
        return [_row_of_mxnet(line, split, f"{path}: line {number}", folder) for number, line in lines]
    delimiters = ("\t", ",", ";", None) if options.delimiter is None else (options.delimiter,)

    def parts(line, delimiter):
        if delimiter is not None:
            return [part.strip() for part in line.rsplit(delimiter, 1)]
        named = re.fullmatch(rf"\s*(.+?(?:{_SUFFIX}))\s+(\S.*?)\s*", line, re.IGNORECASE)
        return [*named.groups()] if named else line.split(maxsplit=1)

    def works(line, delimiter):
        cells = parts(line, delimiter)
        return len(cells) == 2 and bool(images.find(cells[0], folder, split))

    if lines and not any(works(line, d) for _, line in lines[:20] for d in delimiters):
        paths = [line.strip() for _, line in lines]
        folders = _folder_labels(paths)
        if all(folders) and any(images.find(path, folder, split) for path in paths[:20]):
            places = (f"{path}: line {number}" for number, _ in lines)
            return [Row(*row, folder) for row in zip(paths, folders, itertools.repeat(split), places)]
    # The delimiter is the first one that separates an existing image from its label in one of the first 20 lines.
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


def _folder_labels(paths):
    """Return the label of each path of a list: the name of its folder or, if folders with different paths have the same
    name, the names of its folders, joined by _, without the leading folders that all paths share and without folders
    of splits."""
    folders = [[part for part in path.split("/")[:-1] if part.lower() not in SPLIT_OF] for path in paths]
    if len({parts[-1] for parts in folders if parts}) == len({*map(tuple, folders)}):
        return [parts[-1] if parts else "" for parts in folders]
    shared = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    common = len([*shared])
    return ["_".join(parts[common:]) for parts in folders]


def _row_of_mxnet(line, split, place, folder):
    cells = line.strip().split("\t")
    if len(cells) != 3:
        problem = "is not a number, a label and an image" if len(cells) < 3 else "has several labels"
        raise UsageError(f"{place} {problem}; write one label per image, separated by tabs")
    return Row(cells[2], cells[1], split, place, folder)
