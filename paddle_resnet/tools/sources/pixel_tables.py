"""Read tables of pixels: CSV files whose rows contain a label and all pixels of a gray square image, such as FER2013
(columns emotion, pixels and Usage) and Kaggle's data sets like MNIST (columns label, pixel0, pixel1 ...).

The images are stored as PNG files, which preserve all pixels. Each image is read from its row, so that tables can be
larger than the memory.
"""

import csv
import io
import math
import os
from collections import defaultdict

from paddle_resnet.data import sniffer, table_heads
from paddle_resnet.data.images import Image, log_once, read_slice, readable, some
from paddle_resnet.data.split_names import SPLIT_OF, split_of
from paddle_resnet.tools.sources import splits, table_sets, tables
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.tools.sources.table_files import Row
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, counted
from paddle_resnet.utils.files import open_regular

csv.field_size_limit(1 << 24)  # characters in a column `pixels`; the default can be too few for 182 x 182 pixels
_FER2013 = {"publictest": "val", "privatetest": "test"}  # names of splits


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in tables of pixels. Tables without labels are left out, with a message.

    Args:
        source: a table, or a folder with tables.
        options: Options of the import.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers)
    Raises:
        UsageError: there are no tables with labels, or several for a split; a column is missing or ambiguous; a row has
            a different number of pixels than the first row, or a value that is not a pixel; or a label is not a class.
    """
    rows = [row for path in _tables(source, options.label_column) for row in _rows(path, options)]
    labels = [Row("", label, split, f"{path}: line {line}", "") for path, split, label, line, _ in rows]
    numbers, names = tables.numbered(source, labels, None)
    found, paths = defaultdict(list), defaultdict(dict)
    for (path, split, _, line, place), label in zip(rows, numbers, strict=True):
        name = f"{os.path.basename(path)}@{line}/{len(found[split]):06d}.png"
        found[split].append(Image(name, path, label, read_png, place))
        paths[split][path] = None
    if any(len(several) > 1 for several in paths.values()):
        # A table that contains several splits is preferred.
        best = max(paths["train"] or rows[0][:1], key=lambda path: sum(path in several for several in paths.values()))
        run = command("dataset", "import", best, "--output", f"{os.path.splitext(best)[0]}_imported")
        several = some(list(dict.fromkeys(path for path, *_ in rows)))
        raise UsageError(f"{source}: contains several tables ({several}); import one of them, such as `{run}`")
    found = splits.train_and_val(source, found)
    splits.check_validation(source, found, names)
    return found, names


def read_png(path: str, offset: int, size: int, delimiter: str, start: int, stop: int) -> bytes:
    """Return an image of a table as a PNG file. The images of EMNIST are transposed.

    Args:
        path: the table.
        offset, size: position and size of the row in bytes.
        delimiter: text between the columns.
        start, stop: the columns from start to stop - 1 contain the pixels.
    Raises:
        UsageError: the row does not contain pixels.
    """
    from PIL import Image as Picture

    (row,) = csv.reader([read_slice(path, offset, size).decode(errors="replace")], delimiter=delimiter)
    pixels = _pixels(row[start:stop], f"{path}: byte {offset}")
    picture = Picture.frombytes("L", (math.isqrt(len(pixels)),) * 2, pixels)
    out = io.BytesIO()
    picture = picture.transpose(Picture.Transpose.TRANSPOSE) if "emnist" in os.path.basename(path).lower() else picture
    picture.save(out, "PNG")
    return out.getvalue()


def _tables(source, label_column):
    """Return the paths of the tables with labels: for a file, this table and those of other splits next to it; for a
    folder, those in the folder or, if there are none, in its subfolders."""
    if os.path.isfile(source):
        return [source, *_labeled(table_sets.other_splits(source), label_column)]
    folders = [entry.path for entry in sorted(os.scandir(source), key=lambda e: e.name) if entry.is_dir()]
    for group in ([source], folders):
        paths = [os.path.join(folder, name) for folder in group for name in sorted(os.listdir(folder))]
        if labeled := _labeled(paths, label_column):
            return labeled
    raise UsageError(f"{source}: contains no tables of pixels with labels; use the folder that contains them")


def _labeled(paths, label_column):
    """Return the paths of the tables with labels, and log which tables of pixels are left out."""
    paths = [path for path in paths if path.lower().endswith(table_heads.PIXEL_SUFFIXES)]
    labeled = [path for path in paths if table_heads.is_pixel_table(path, label_column)]
    others = [path for path in paths if path not in labeled and table_heads.pixel_columns(table_heads.header(path))]
    if others:
        logger.info(f"{some(others)} left out, because there are no labels")
    return labeled


def _rows(path, options):
    """Return [(path, split, label as text, number of the line, place for read_png)] of a table."""
    rows, offset, columns, width, count = [], 0, None, 0, 0
    with readable(path), open_regular(path) as f:
        for number, line in enumerate(f, 1):
            where, text = f"{path}: line {number}", line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
            place, offset = (offset, len(line)), offset + len(line)
            if not text.strip():
                continue
            if columns is None:
                delimiter = table_heads.delimiter(text)
            try:
                (cells,) = csv.reader([text], delimiter=delimiter)
            except csv.Error as e:
                raise UsageError(f"{where} cannot be read ({e}); correct it") from e
            if columns is None:
                columns, width = _columns(path, cells, options), len(cells)
                if columns[-1]:
                    continue
            start, stop, at_label, at_split, _ = columns
            if len(cells) != width:
                raise UsageError(
                    f"{where} has {counted(len(cells), 'column')} instead of {width}; correct or remove it"
                )
            pixels = _pixels(cells[start:stop], where)
            count = count or len(pixels)
            if not pixels or math.isqrt(count) ** 2 != count:
                raise UsageError(
                    f"{where} has {len(pixels)} pixels, which are not a gray square image; {sniffer.WRITE}"
                )
            if len(pixels) != count:
                raise UsageError(f"{where} has {len(pixels)} pixels instead of {count}; correct or remove it")
            split = split_of(os.path.basename(path)) or "train"
            if at_split is not None:
                value = cells[at_split].strip().lower()
                split = {**SPLIT_OF, **_FER2013}.get(value)
                if split is None:
                    raise UsageError(f"{where}: {value[:50]!a} is not a split; write train, val or test")
                if value in _FER2013:
                    log_once(f"{path}: PublicTest is the validation split, PrivateTest the test split", logger.info)
            rows.append((path, split, cells[at_label].strip(), number, (*place, delimiter, start, stop)))
    return rows


def _columns(path, names, options):
    """Return (first column of pixels, column after the last one, column of the labels, column of the splits or None,
    whether the first line contains names of columns)."""
    at = table_heads.pixel_columns(names)
    if not at:
        raise UsageError(f"{path}: contains no columns of pixels, such as pixel0, pixel1 ...; choose a different table")
    add = "add a first line with the names of all columns, such as label,pixel0,pixel1 ..."
    has_names = table_heads.has_names(names, at)
    if has_names is None:
        raise UsageError(f"{path}: line 1 contains different numbers, which may be names of columns or pixels; {add}")
    if not has_names:
        for flag, value in (("--label-column", options.label_column), ("--split-column", options.split_column)):
            if value is not None:
                raise UsageError(f"{flag} {value}: {path} has no names of columns; {add}, or remove {flag}")
        at_label, *more = (i for i in range(len(names)) if i not in at)
        if more:
            raise UsageError(f"{path}: has {1 + len(more)} columns without pixels, but no names of columns; {add}")
        logger.info(f"{path}: has no names of columns; column {at_label + 1} contains the labels")
        return at[0], at[-1] + 1, at_label, None, False
    others = {name: i for i, name in enumerate(names) if i not in at}

    def index(flag, name, candidates):
        if name is not None and name not in others:
            raise UsageError(f"{flag} {name}: {path} has the columns {some(list(others))}; choose one of them")
        if name is None and len(candidates) > 1:
            raise UsageError(f"{path}: the columns {some(candidates)} are all candidates for {flag}; set one of them")
        return others[name or candidates[0]] if name or candidates else None

    splits_of = [name for name in others if table_heads.normalized(name) in table_heads.PIXEL_SPLIT_COLUMNS]
    at_split = index("--split-column", options.split_column, splits_of)
    rest = [name for name, i in others.items() if i != at_split and table_heads.is_pixel_label(name)]
    known = [name for name in rest if table_heads.normalized(name) in table_heads.LABEL_COLUMNS]
    at_label = index("--label-column", options.label_column, known or rest)
    if at_label is None:
        raise UsageError(f"{path}: has no column of labels; choose a different table")
    return at[0], at[-1] + 1, at_label, at_split, True


def _pixels(cells, place):
    """Return the pixels in the columns of a row, or in a single column separated by spaces."""
    cells = cells[0].split() if len(cells) == 1 else cells
    try:
        return bytes(map(int, cells))
    except ValueError as e:
        wrong = next((cell for cell in cells if not (cell.strip().isdecimal() and int(cell) < 256)), "")
        is_fraction = tables.is_float(wrong.strip()) and not wrong.strip().lstrip("+-").isdecimal()
        remedy = "write all pixels without a decimal point or exponent" if is_fraction else "correct or remove the row"
        raise UsageError(f"{place}: {wrong[:50]!a} is not a whole number from 0 to 255; {remedy}") from e
