"""Recognize what a folder contains, for errors about a data set, `dataset info` and `dataset import --list`.

LAYOUTS is a table of patterns, most specific first. The patterns match the paths of the entries of a folder and, if
the folder has at most _SUBFOLDERS subfolders, of the entries of its subfolders.
"""

import codecs
import contextlib
import csv
import json
import math
import os
import re
import shlex
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paddle_resnet.data import class_in_name, record_tables
from paddle_resnet.data.image_search import SUFFIXES, ImageSearch
from paddle_resnet.data.images import CONVERTED_SUFFIXES, is_system_name
from paddle_resnet.data.split_names import SPLIT_OF, SPLITS, split_of
from paddle_resnet.utils.errors import UsageError, command, import_command, printable, python

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
PARTITION = "list_eval_partition"  # file that contains the splits of another table, without its suffix
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", *record_tables.SUFFIXES)
PIXEL_SUFFIXES = (".csv", ".tsv")  # endings of tables that can contain pixels
RECORD_KINDS = ("tfrecord", "webdataset", "recordio", "lmdb")  # kinds of `dataset import` that read record files
_SUBFOLDERS, _ENTRIES = 50, 100_000  # maximum number of subfolders, and of entries to list per folder
_SEARCHED, _DEPTH = 20, 4  # maximum number of folders per level, and of levels, that are searched for nested images
_SEARCHED_FILES = 200_000  # maximum number of files among which an image of a table is searched
# Names of folders that contain versions of the same images, and the order in which they are preferred.
_VERSIONS = dict.fromkeys(("color", "colour", "rgb", "original"), 1)
_VERSIONS |= dict.fromkeys(("gray", "grey", "grayscale", "greyscale", "segmented", "masked", "masks", "edges"), 2)
_TABLE_ROWS = 500  # number of rows of a table in which images with several labels are searched
_ANNOTATIONS = 100  # maximum number of text, JSON or .mat files in a folder; more probably describe one image each
_HEAD_MEMBERS = 64  # number of members of an archive that are read to recognize it
_LINE = 4096  # number of bytes at the end of a list that are read to find its last line
_HEAD = 1 << 16  # number of characters of a text file that are read to recognize it
_FIRST_LINE = 1 << 20  # number of further characters of a first line that is longer than _HEAD
_IMAGE = r"[^/]+(" + "|".join(map(re.escape, SUFFIXES)) + ")"
_NATIVE = r"(train|val(idation)?)"  # how the names of the record files that training reads usually begin
_SPLIT = rf"({'|'.join(SPLIT_OF)})"
_TABLE_ENDING = rf"\.({'|'.join(suffix[1:] for suffix in TABLE_SUFFIXES)})"


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    Attributes:
        pattern: regular expression for the paths, relative to the data set, of the files that identify the layout. The
            paths of folders end in a slash. Upper and lower case are equivalent.
        what: description of the files that match.
        kind: kind of `dataset import` that reads the files, or None.
        todo: remedy for the user, as an imperative, or None if training or `dataset import` reads the files.
        needs: a second pattern that must match at least one path, or None.
        is_native: whether training reads the files, so that no import is suggested.
        is_alone: whether only files count whose folders contain no images.
    """

    pattern: str
    what: str
    kind: str | None = None
    todo: str | None = None
    needs: str | None = None
    is_native: bool = False
    is_alone: bool = False


PUT = "put the images into one folder per class"
WRITE = "this format cannot be read: write each image to the folder of its class in train/ or val/"
LAYOUTS = (
    Layout(r"ILSVRC2012_img_(train|val)\.tar", "ImageNet as distributed by image-net.org", "ilsvrc"),
    Layout(r"(train/|ILSVRC2012_img_train/)?n\d{8}\.tar", "archives of ImageNet's classes", "ilsvrc"),
    Layout(
        r"(ILSVRC/)?Data/|LOC_val_solution\.csv",
        "ImageNet as distributed by Kaggle",
        "ilsvrc",
        None,
        r"ILSVRC/|Data/CLS-LOC/",
    ),
    Layout(r"CLS-LOC/", "ImageNet as distributed by Kaggle", "ilsvrc"),
    Layout(
        r"val/(ILSVRC2012_val_\d+\.JPEG|ILSVRC2012_img_val/)",
        "ImageNet's validation images without class folders",
        "ilsvrc",
        needs=r"train/n\d{8}/",
    ),
    Layout(r"image_class_labels\.txt", "lists of CUB-200 or NABirds", "table", needs=r"images\.txt"),
    Layout(r"annotations/trainval\.txt", "lists of Oxford-IIIT Pets", "table", needs="images/"),
    Layout(r"meta/train\.(txt|json)", "lists of Food-101 or MMPretrain", "table"),
    Layout(r"val/val_annotations\.txt", "Tiny ImageNet", "table", needs=r"train/n\d{8}/"),
    Layout(rf"({_SPLIT}/)?metadata\.(csv|jsonl)", "a table of Hugging Face's imagefolder", "table"),
    Layout(rf"{_SPLIT}/_classes\.csv", "a table of Roboflow", "table"),
    Layout(rf"{_SPLIT}_list\.txt", "file lists of PaddleClas", "table"),
    Layout(rf"(({_SPLIT}|annotations?|labels?)/)?[^/]+{_TABLE_ENDING}", "a table with labels", "table"),
    Layout(rf"[^/]+/[^/]+{_TABLE_ENDING}", "a table with labels", "table", is_alone=True),
    Layout(rf"{_SPLIT}\.txt", "file lists", "table", is_native=True),
    Layout(r"[^/]+\.lst", "image lists of MXNet", "table"),
    Layout(r"[^/]+\.txt", "file lists", "table"),
    Layout(r"[^/]+/[^/]+\.txt", "file lists", "table", is_alone=True),
    Layout(r"(.*/)?[^/]+\.parquet", "Parquet files", "parquet"),
    Layout(r"(.*/)?[^/]+\.arrow", "Arrow files", "parquet"),
    Layout(r"(.*/)?[^/]*-\d+-of-\d+\.gz", "compressed TFRecord files", "tfrecord"),
    Layout(
        rf"(.*/)?(?!{_NATIVE}-\d+-of-\d+)[^/]+(\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz)?)",
        "TFRecord files",
        "tfrecord",
    ),
    Layout(rf"{_NATIVE}-\d+-of-\d+(\.tfrecords?)?", "TFRecord files", "tfrecord", is_native=True),
    Layout(rf"([^/]*[-_.])?{_SPLIT}-\d+\.tar", "tar shards", "webdataset", is_native=True),
    Layout(rf"{_SPLIT}/([^/]*\D)?\d+\.tar", "tar shards", "webdataset"),
    Layout(rf"{_NATIVE}\.rec", "RecordIO files", "recordio", is_native=True),
    Layout(rf"{_NATIVE}_lmdb/", "LMDBs of Caffe", "lmdb", is_native=True),
    Layout(rf"(.*/)?(?!{_NATIVE}\.rec)[^/]+\.rec", "RecordIO files", "recordio"),
    Layout(rf"(?!{_NATIVE}_lmdb)[^/]+/data\.mdb", "LMDBs of Caffe", "lmdb"),
    Layout(r"(.*/)?(data_batch_\d|test_batch)(\.bin)?", "arrays of CIFAR-10", "array"),
    Layout(r"(.*/)?(train|train\.bin)", "arrays of CIFAR-100", "array", needs=r"(.*/)?(meta|fine_label_names\.txt)"),
    Layout(r"(.*/)?[^/]*-images[-.]idx3-ubyte(\.gz)?", "arrays of MNIST", "array"),
    Layout(r"(.*/)?train_X\.bin", "arrays of STL-10", "array"),
    Layout(r"(.*/)?(train|test|extra)_32x32\.mat", "arrays of SVHN", "array", needs=r"(.*/)?train_32x32\.mat"),
    Layout(r"[^/]+\.npz", "arrays", "array"),
    Layout(r"imagelabels\.mat", "labels of Oxford Flowers 102", "table", needs=r"setid\.mat"),
    Layout(r"(lists/)?(train|file)_list\.mat", "lists of Stanford Dogs", "table", needs=r"(lists/)?test_list\.mat"),
    Layout(r"[^/]+\.(npy|h5|hdf5|pkl|mat)", "arrays", todo=WRITE),
    Layout(r"[^/]+\.beton", "files of FFCV", todo=WRITE),
    Layout(r"[^/]+\.(lmdb|mdb)", "LMDBs in single files", todo=WRITE),
    Layout(
        r"([^/]+/)?[^/]+\.json",
        "JSON files, which may contain the labels",
        todo="write labels.csv with the columns file_name and label to this folder, and import the folder",
        needs=rf"((images?|imgs?|data|jpg|{_SPLIT}\d*)/)?{_IMAGE}",
    ),
)
_LISTS = rf"{_SPLIT}(_list)?\.txt|image_class_labels\.txt|trainval\.txt|val_annotations\.txt"  # recognized by name
_TABLE = re.compile(rf"([^/]+/)?[^/]+{_TABLE_ENDING}", re.IGNORECASE)
_ARCHIVE = re.compile(r".+\.(tar|tar\.(gz|bz2|xz)|tgz|tbz2|txz|zip)", re.IGNORECASE)
_TAR = r"([^/]*[-_.])?({})\.tar"  # names of a tar file without number, which may be a shard or contain class folders
_NAMES = {"train": "|".join(SPLITS["train"]), "val": "|".join((*SPLITS["val"], "test"))}


@dataclass(frozen=True)
class Sight:
    """Files or folders that look() has recognized.

    Attributes:
        what: description of the files, with at most five names.
        todo: remedy for the user, as an imperative, or None.
        kind: kind of `dataset import` that reads the files, only with --as if is_final is set; or None.
        is_certain: whether the files found are probably the data set that the user means.
        root: the folder to import.
        is_final: whether an import without flags must stop with this remedy, instead of reading other files.
    """

    what: str
    todo: str | None
    kind: str | None = None
    is_certain: bool = False
    root: str | None = None
    is_final: bool = False


def look(root: str | os.PathLike[str]) -> list[Sight]:
    """Return [Sight] for what a folder contains, most specific first, or [] if nothing is recognized. If nothing is
    recognized in the folder itself, but the folder has a single subfolder, as unpacked archives often have, return
    [Sight] for what the subfolder, or a single subfolder of the subfolder and so on, contains."""
    root = os.fspath(root)
    paths = _paths(root)
    sights = _look(root, paths)
    inner, below = root, paths
    for _ in range(_DEPTH):
        folders = [path for path in below if re.fullmatch("[^/]+/", path)]
        if len(folders) != 1 or any(sight.kind not in (None, "nested") for sight in sights):
            break
        inner = os.path.join(inner, folders[0][:-1])
        below = _paths(inner)
        found = [sight for sight in _look(inner, below) if sight.kind or sight.is_certain]
        if found and found[0].kind == "filename":  # less certain than, for example, a JSON file above
            found = [*(sight for sight in sights if sight.kind is None), *found]
        sights = found or sights
    if any(sight.kind or sight.is_certain for sight in sights):
        return sights
    return [*_archives(root, paths), *sights] or [*_nested(root, paths)]


def _look(root, paths):
    known, claimed = [], set()
    is_image = ImageSearch(root, _SEARCHED_FILES).is_image
    tables = _without_annotations(paths)
    for layout in LAYOUTS:
        if sight := _match(root, tables if layout.kind else paths, layout, claimed, is_image):
            known.append(sight)
    several = [*_several_labels(root, tables, is_image)]
    if any(sight.kind and sight.todo and sight.kind not in RECORD_KINDS for sight in known):
        return [*several, *known]
    others = [path for path in tables if path not in claimed]
    unused = [*_unlabeled(root, others, is_image), *_pixels(root, others)]
    # Tar files whose names differ come first, because renaming a tar file is faster than importing it.
    return [*several, *_tar_files(root, paths), *known, *unused, *_too_deep(root, paths), *_outside(root, paths)]


def _without_annotations(paths):
    """Return the paths without the text, JSON and .mat files of a folder that contains more than _ANNOTATIONS of one
    kind: each probably describes one image."""
    kinds = [(os.path.dirname(path), os.path.splitext(path)[1].lower()) for path in paths]
    counts = Counter(kind for kind in kinds if kind[1] in (".txt", *record_tables.SUFFIXES))
    return [path for path, kind in zip(paths, kinds, strict=True) if counts[kind] <= _ANNOTATIONS]


def _match(root, paths, layout, claimed, is_image):
    """Return the Sight of a layout or None, and add the paths of its files to `claimed`, the set of the paths of more
    specific layouts."""
    found = [path for path in paths if path not in claimed and re.fullmatch(layout.pattern, path, re.IGNORECASE)]
    # A table must have columns of images and labels. The columns of Roboflow's _classes.csv are classes.
    is_any_table = layout.pattern.endswith(_TABLE_ENDING)
    found = [path for path in found if _is_usable(os.path.join(root, path), is_image, is_any_table)]
    if layout.is_alone:
        folders = {os.path.dirname(path) for path in paths if _is_image(path)}
        top = {path.partition("/")[0] for path in paths if "/" in path}
        # look() searches the only subfolder of a folder without images.
        is_inside = len(top) == 1 and "" not in folders
        found = [path for path in found if os.path.dirname(path) not in folders and not is_inside]
    needed = [path for path in paths if layout.needs and re.fullmatch(layout.needs, path, re.IGNORECASE)]
    if not found or (layout.needs and not needed):
        return None
    claimed.update(found, (path for path in needed if not path.endswith("/")))
    todo = layout.todo if layout.kind is None or layout.is_native else f"run {import_command(root)}"
    labels = label_columns(os.path.join(root, found[0])) if is_any_table else []
    if len(labels) > 1:
        choose = import_command(root, "--label-column", labels[0])
        todo = f"run {choose}, with a different --label-column for a different label ({', '.join(labels[1:5])})"
    what = f"{_some(found)}: {layout.what}{_columns(root, found[0])}"
    return Sight(what, todo, layout.kind, layout.kind is not None, root)


def _is_usable(path, is_image, is_any_table):
    """Return whether a table, a list or an .npz file contains images and labels; True for other files. JSON and .mat
    files are tables only in a layout of tables with any name (is_any_table)."""
    if path.lower().endswith(record_tables.SUFFIXES) and not is_any_table:
        return True
    if os.path.basename(path) == "_classes.csv":
        return bool(header(path))
    if path.endswith(".txt") and header(path):
        return is_table(path, is_image=is_image)
    if path.endswith((".lst", ".txt")) and not re.fullmatch(_LISTS, os.path.basename(path), re.IGNORECASE):
        return is_list(path, is_image) or is_path_list(path, is_image)
    if path.endswith(".npz") and os.path.isfile(path):  # a pipe could block
        # The import reports a damaged file.
        with contextlib.suppress(OSError, zipfile.BadZipFile, ValueError), zipfile.ZipFile(path) as archive:
            return bool(npz_keys(name.removesuffix(".npy") for name in archive.namelist()))
    return not path.endswith(TABLE_SUFFIXES) or is_table(path, is_image=is_image)


def _unlabeled(root, paths, is_image):
    """Yield a Sight for each table with a column of images, but no known column of labels."""
    for path in paths:
        names = header(os.path.join(root, path)) if _TABLE.fullmatch(path) else []
        at = image_columns(os.path.join(root, path), is_image) if len(names) > 2 else []
        if at and not any(map(is_image, names)) and not label_columns(os.path.join(root, path)):
            run = command(
                "dataset", "import", os.path.join(root, path), "--output", f"{os.path.abspath(root)}_imported"
            )
            others = ", ".join([name for i, name in enumerate(names) if i not in at][:10])
            what = f"{path}: a table of images, whose column of labels is not recognized"
            yield Sight(what, f"run `{run}` with --label-column set to one of these: {others}", None, True)


def _several_labels(root, paths, is_image):
    """Yield a Sight for annotations of objects, or for the first table in which the first images have several
    labels."""
    todo = "write train.csv and val.csv with the columns image and labels, and train with --multi-label (see "
    todo += "docs/multilabel.md)"
    if annotations := [path for path in paths if re.fullmatch(r"Annotations/[^/]+\.xml", path)]:
        yield Sight(f"{_some(annotations)}: annotations of objects, as in Pascal VOC", todo, None, True, root, True)
        return
    for path in paths:
        if not (_TABLE.fullmatch(path) or path.endswith(".txt")) or path.endswith("_classes.csv"):
            continue
        file = os.path.join(root, path)
        several, attributes = _labels_of_images(file, is_image)
        if not several:
            continue
        if attributes:
            columns = list(attributes)
            has_images = image_columns(file, ImageSearch(os.path.dirname(file), _SEARCHED_FILES).is_image)
            run = command(
                *("dataset", "import", file if has_images else root, "--label-column", columns[0]),
                *("--output", f"{os.path.abspath(root)}_imported"),
            )
            todo += f"; for one of the labels, run `{run}`, or choose {', '.join(columns[1:5])}"
            partition = [name for name in paths if re.fullmatch(rf"(Eval/)?{PARTITION}\.(txt|csv)", name)]
            todo += "".join(f"; {name} contains the splits" for name in partition[:1])
        elif " " in several and "," not in several and (labels := label_columns(file)):
            run = import_command(root, "--label-column", labels[0])
            todo += f"; if {several} is the name of one class, run {run}"
        yield Sight(f"{path}: a table with several labels per image ({several})", todo, None, True, root, True)
        return


def _labels_of_images(path, is_image):
    """Return (example of several labels, or None; names of the columns of labels with 0, 1 or -1) of the first rows of
    a table. For is_image, see is_table."""
    names, *rows = _rows(path, _TABLE_ROWS) or [[]]
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


def label_columns(path: str) -> list[str]:
    """Return the names of the columns of a table that are in LABEL_COLUMNS, in the order of LABEL_COLUMNS."""
    names = {normalized(name): name for name in header(path)}
    return [names[name] for name in LABEL_COLUMNS if name in names]


def _pixels(root, paths):
    """Yield a Sight for tables that contain the pixels of images."""
    found = [path for path in paths if _TABLE.fullmatch(path) and pixel_columns(header(os.path.join(root, path)))]
    labeled = [path for path in found if is_pixel_table(os.path.join(root, path))]
    if labeled:
        yield Sight(f"{_some(labeled)}: tables of pixels", f"run {import_command(root)}", "pixels", True, root)
        return
    names = header(os.path.join(root, found[0])) if found else []
    at = pixel_columns(names)
    if _is_square(at) and len(names) > len(at):
        todo = "add a column label with the class of each image, or import one of these files with --label-column"
        yield Sight(f"{_some(found)}: tables of pixels without a column of labels", todo)
    elif found:
        yield Sight(f"{_some(found)}: tables of pixels", WRITE)


def is_pixel_table(path: str, label_column: str | None = None) -> bool:
    """Return whether a file is a table with the pixels of gray square images, and with labels: a column label_column,
    or a column that is_pixel_label accepts."""
    names = header(path) if path.lower().endswith(PIXEL_SUFFIXES) else []
    at = pixel_columns(names)
    others = [name for i, name in enumerate(names) if i not in at]
    if not _is_square(at):
        return False
    if not has_names(names, at):  # the import reports an undecided first line
        return bool(others)
    return any(name == label_column or is_pixel_label(name) for name in others)


def _is_square(at):
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


def npz_keys(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return {split: (name of the images, name of the labels)} for the arrays of an .npz file: train_images and
    train_labels in MedMNIST, or x_train and y_train in Keras."""
    names, keys = {*names}, {}
    for split in ("train", "val", "test"):
        for pair in ((f"{split}_images", f"{split}_labels"), (f"x_{split}", f"y_{split}")):
            if {*pair} <= names:
                keys[split] = pair
    return keys


def advice(root: str | os.PathLike[str], only_certain: bool = False, kind: str | None = None) -> str | None:
    """Return a text for the end of an error message, which states what a folder contains and what to do; or None if
    nothing is recognized.

    Args:
        root: path of the folder.
        only_certain: whether to return None if the files are probably not the data set that the user means.
        kind: kind of `dataset import` that must read the files, or None for any.
    """
    sights = [sight for sight in look(root) if sight.todo] if os.path.isdir(root) else []
    if not sights or (only_certain and not sights[0].is_certain) or kind not in (None, sights[0].kind):
        return None
    return printable(f"it contains {sights[0].what}; {sights[0].todo}")


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
    names, *rows = _rows(path, 2) or [[]]
    for row in (names, *rows):
        is_header = row is names
        at = [
            i
            for i, cell in enumerate(row[: len(names)])
            if is_image(cell)
            and (not cell.strip().isdecimal() or (not is_header and normalized(names[i]) in IMAGE_COLUMNS))
        ]
        if at:
            return at
    return []


def is_one_hot(path: str) -> bool:
    """Return whether a file is a table with a column of images and a column for each class, of which one is 1 in the
    first row."""
    columns, *rows = _rows(path, 2) or [[]]
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
    return any(is_image(image) and not several_numbers(label[0]) for image, *label in parts if label)


def is_path_list(path: str, is_image: Callable[[str], bool]) -> bool:
    """Return whether a text file with the name of a split is a list of images without labels, in which the folder of an
    image is its class. For is_image, see is_table."""
    if not split_of(os.path.basename(path)):
        return False
    lines = [line.strip() for line in (*_head(path).split("\n")[:-1], _last_line(path)) if line.strip()]
    folders = {os.path.basename(os.path.dirname(line)) for line in lines}
    return len(folders) > 1 and folders.isdisjoint(("", *SPLIT_OF)) and is_image(lines[0])


def several_numbers(label: str) -> bool:
    """Return whether a label consists of several numbers, such as the coordinates of a box."""
    return re.fullmatch(r"\s*-?[\d.]+(\s*[\s,;|]\s*-?[\d.]+)+\s*", label) is not None


def header(path: str) -> list[str]:
    """Return the names of the columns of a table, or [] if the file cannot be read or is not a table."""
    return next(iter(_rows(path, 1)), [])


def _rows(path, count):
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


def _columns(root, path):
    names = header(os.path.join(root, path)) if path.lower().endswith(TABLE_SUFFIXES) else []
    return f" (columns {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


def _paths(root):
    """Return the sorted paths, relative to root, of the entries of a folder and of its subfolders. Hidden entries are
    omitted. If there are more than _SUBFOLDERS subfolders, which are probably classes, their entries are omitted."""
    paths = _listed(root, "")
    folders = [path for path in paths if path.endswith("/")]
    if len(folders) <= _SUBFOLDERS:
        paths += [path for folder in folders for path in _listed(root, folder)]
    return paths


def _listed(root, folder):
    paths = []
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:
        for _, entry in zip(range(_ENTRIES), entries, strict=False):
            if not is_system_name(entry.name):
                paths.append(f"{folder}{entry.name}{'/' if entry.is_dir() else ''}")
    return sorted(paths)


def _some(paths):
    """Return up to five paths and the number of the other paths as one string."""
    names = ", ".join(paths[:5])
    return f"{names} and {len(paths) - 5} more" if len(paths) > 5 else names


def _tar_files(root, paths):
    """Yield one Sight for all tar files that are a split, but have no number."""
    commands, found = [], []
    for split, names in _NAMES.items():
        matching = [path for path in paths if re.fullmatch(_TAR.format(names), path, re.IGNORECASE)]
        right = f"{split}-000000.tar"
        if len(matching) == 1 and right not in paths:
            commands.append(_command(root, matching[0], split, right))
            found += matching
    if found:
        names = "name differs" if len(found) == 1 else "names differ"
        what = f"{_some(found)}, whose {names} from the expected {names.split()[0]}"
        yield Sight(what, f"run `{' && '.join(commands)}`", None, True)


def _command(root, name, split, right):
    """Return the command that renames a tar shard, or unpacks an archive of class folders."""
    path, target = os.path.join(root, name), os.path.join(root, split)
    members = []
    if os.path.isfile(path):  # a pipe could block
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(path) as tar:
            members = [member.name for _, member in zip(range(_HEAD_MEMBERS), tar, strict=False) if member.isfile()]
    depths = {member.count("/") for member in members}
    # The images of a shard are next to files with their labels; the images of an archive are in class folders.
    if any(member.endswith(".cls") for member in members) or len(depths) != 1 or depths == {0}:
        return shlex.join(["mv", path, os.path.join(root, right)])
    unpack = ["tar", "-xf", path, "-C", target, f"--strip-components={depths.pop() - 1}"]
    return f"{shlex.join(['mkdir', '-p', target])} && {shlex.join(unpack)}"


def is_archive(name: str) -> bool:
    """Return whether a file is an archive of unknown content, that is, neither part of a known layout nor a shard."""
    is_known = any(re.fullmatch(layout.pattern, name, re.IGNORECASE) for layout in LAYOUTS)
    return _ARCHIVE.fullmatch(name) is not None and not is_known and not re.fullmatch(r".*-\d+\.tar", name)


def _archives(root, paths):
    """Return [Sight] for archives of unknown content in a folder, or []."""
    names = [path for path in paths if "/" not in path and is_archive(path)]
    if not names:
        return []
    return [Sight(f"{_some(names)}: {'an archive' if len(names) == 1 else 'archives'}", unpacking(root, names))]


def unpacking(folder: str, names: list[str]) -> str:
    """Return the remedy that unpacks archives and imports their content.

    Args:
        folder: folder of the archives.
        names: names of the archives.
    """
    target = f"{os.path.abspath(os.path.join(folder, names[0]) if len(names) == 1 else folder)}_unpacked"
    members = [member.split("/") for name in names for member in _members(os.path.join(folder, name))]
    # Training reads class folders in folders of splits as they are.
    is_ready = all(len(parts) == 3 and parts[0].lower() in SPLIT_OF for parts in members) and bool(members)
    use = f"use --image-root {shlex.quote(target)}" if is_ready else f"run {import_command(target)}"
    return f"unpack {_unpacking(folder, names, target)}, then {use}"


def unpacking_here(folder: str) -> str | None:
    """Return the remedy that unpacks the archives in a folder to this folder, or None if there are none."""
    names = [name for name in _listed(folder, "") if is_archive(name)]
    return f"the images may be in {_some(names)}, so unpack {_unpacking(folder, names, folder)}" if names else None


def _unpacking(folder, names, target):
    steps = [shlex.join(["mkdir", "-p", target])]
    for name in names:
        path, own = os.path.join(folder, name), target
        # Each archive without folders, such as one archive per class, gets its own folder.
        if (len(names) > 1 or target == folder) and _is_flat(path):
            own = os.path.join(target, re.sub(r"(\.tar)?\.\w+$", "", name))
            steps.append(shlex.join(["mkdir", "-p", own]))
        is_zip = name.lower().endswith(".zip")
        words = [python(), "-m", "zipfile", "-e", path, own] if is_zip else ["tar", "-xf", path, "-C", own]
        steps.append(shlex.join(words))
    return f"{'it' if len(names) == 1 else 'them'}: `{' && '.join(steps)}`"


def _is_flat(path):
    """Return whether the first files in an archive are not in folders; False if the archive cannot be read."""
    names = _members(path)
    return bool(names) and not any("/" in name for name in names)


def _members(path):
    """Return the names of the first files in an archive, or [] if the archive cannot be read."""
    names = []
    if os.path.isfile(path):  # a pipe could block
        with contextlib.suppress(OSError, EOFError, ValueError, tarfile.TarError, zipfile.BadZipFile):
            if path.lower().endswith(".zip"):
                with zipfile.ZipFile(path) as archive:
                    names = [name for name in archive.namelist()[:_HEAD_MEMBERS] if not name.endswith("/")]
            else:
                with tarfile.open(path) as tar:
                    members = (member for _, member in zip(range(_HEAD_MEMBERS), tar, strict=False))
                    names = [member.name for member in members if not member.isdir()]
    return [os.path.normpath(name) for name in names]


def _too_deep(root, paths):
    """Yield a Sight for class folders that are one level too deep."""
    folders = [path for path in paths if re.fullmatch(r"[^/]+/", path)]
    if any(path.lower().endswith(CONVERTED_SUFFIXES) for path in _first_images(root, paths)):
        return  # only the import of nested folders converts images
    for folder in folders:
        below = [path for path in paths if path.startswith(folder) and path != folder]
        inner = [path for path in below if path.endswith("/")]
        if not inner or any(_is_image(path) for path in below):
            continue
        if re.fullmatch(f"{_SPLIT}/", folder, re.IGNORECASE):
            deep = [path for path in inner if not _has_images(root, path)]
            deep = [
                f"{path}{name}" for path in deep for name in _listed(os.path.join(root, path), "") if name.endswith("/")
            ]
            flags = _depth_flags(root, deep)
            deep = [path for path in deep[:5] if _has_images(root, path)]
            if deep:
                run = import_command(root, *flags)
                yield Sight(f"{_some(deep)}: class folders one level too deep", f"run {run}", "nested", True)
        elif len(folders) == 1 and len(inner) > 1 and _has_images(root, inner[0]):
            source, output = os.path.join(root, folder), f"{os.path.abspath(root)}_split"
            run = command("dataset", "split", source, "--output", output)
            todo = f"run `{run}` and use --image-root {shlex.quote(output)}"
            yield Sight(f"{_some(inner)}: class folders one level too deep", todo, "nested", False, root)


def _depth_flags(root, folders):
    """Return the flags for an import of nested class folders: --class-depth all if some of the `folders` are class
    folders, but others contain class folders instead of images."""
    for path in folders[:_SEARCHED]:
        names = _listed(os.path.join(root, path), "")
        below = [os.path.join(path, name) for name in names if name.endswith("/")]
        if not any(map(_is_image, names)) and any(_has_images(root, path) for path in below[:_SEARCHED]):
            return ["--class-depth", "all"]
    return []


def _first_images(root, paths):
    folders = [path for path in paths if re.fullmatch("[^/]+/[^/]+/", path)][:_SEARCHED]
    return [name for folder in folders for name in _listed(os.path.join(root, folder), "")[:_SEARCHED]]


def _nested(root, paths):
    """Yield a Sight for images in nested folders, such as training_set/training_set/cat/0.jpg, unless a top-level
    folder has the name of a split or directly contains images."""
    folders = [path for path in paths if re.fullmatch("[^/]+/", path)]
    if any(re.fullmatch(f"{_SPLIT}/", path, re.IGNORECASE) for path in folders):
        return
    if any(_has_images(root, path) for path in folders[:_SEARCHED]):
        return
    level = folders
    for _ in range(_DEPTH):
        level = [
            f"{path}{name}"
            for path in level[:_SEARCHED]
            for name in _listed(os.path.join(root, path), "")
            if name.endswith("/")
        ]
        if found := [path for path in level[:_SEARCHED] if _has_images(root, path)]:
            if source := _copies(root, found):
                first, *others = source
                inner = os.path.join(root, first)
                what = f"{first}/: class folders; {_some([f'{path}/' for path in others])}: copies of its images"
                yield Sight(what, f"run {import_command(inner)}", "nested", False, inner)
                return
            parents, names = zip(*(os.path.split(path[:-1]) for path in found), strict=True)
            if len({*parents}) == 1 and {name.lower() for name in names} <= SPLIT_OF.keys():  # images/train/0.jpg
                yield Sight(f"{_some(found)}: images outside class folders", PUT)
                return
            run = import_command(root, *_depth_flags(root, level))
            yield Sight(f"{_some(found)}: images in nested folders", f"run {run}", "nested", False, root)
            return


def _copies(root, folders):
    """If the folders of _VERSIONS, such as color/ and grayscale/, have class folders whose images have the same names,
    return the paths of these folders, otherwise []."""
    classes = {}  # {folder: {class: stems of the images}}
    for path in folders:
        parent, name = os.path.split(path[:-1])
        stems = [os.path.splitext(file)[0] for file in _listed(os.path.join(root, path), "") if _is_image(file)]
        classes.setdefault(parent, {})[name] = sorted(stems)
    first, *others = sorted(classes, key=lambda path: _VERSIONS.get(os.path.basename(path).lower(), 0))
    if any(os.path.basename(path).lower() not in _VERSIONS for path in classes):
        return []
    for other in others:
        both = classes[first].keys() & classes[other].keys()
        if not both or not all(_are_copies(classes[first][name], classes[other][name]) for name in both):
            return []
    return [first, *others] if others else []


def _are_copies(stems, others):
    """Return whether two sorted lists of names are equal, except for an ending such as _masked in the second one."""
    return len(stems) == len(others) and all(map(str.startswith, others, stems))


def _has_images(root, folder):
    return any(map(_is_image, _listed(root, folder)))


def _is_image(path):
    return path.lower().endswith(SUFFIXES)


def _outside(root, paths):
    """Yield a Sight for images outside class folders, whose names may contain their classes."""
    images = [path for path in paths if re.fullmatch(rf"({_SPLIT}/)?{_IMAGE}", path, re.IGNORECASE)]
    if not images:
        return
    what = f"{len(images)} {'image' if len(images) == 1 else 'images'} outside class folders ({_some(images)})"
    trained = [path for path in images if split_of(os.path.dirname(path)) in (None, "train")]
    counts = Counter(class_in_name.class_of(path) or "" for path in trained)  # "" is ambiguous
    if len(counts) > 1 and min(counts.values()) > 1 and not any(map(class_in_name.is_ambiguous, counts)):
        names = f"{len(counts)} classes ({_some(sorted(counts))})"
        todo = f"if the class is the file name before the last number, which yields {names}, "
        todo += f"run {import_command(root, '--as', 'filename')}; otherwise, {PUT}"
        yield Sight(what, todo, "filename", False, root, True)
    else:
        yield Sight(what, PUT)
