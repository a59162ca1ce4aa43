"""Recognize what a folder contains, for errors about a data set, `dataset info` and `dataset import --list`.

LAYOUTS is a table of patterns, most specific first. The patterns match the paths in the folder and in its subfolders.
"""

import contextlib
import csv
import json
import os
import re
import shlex
import tarfile
from dataclasses import dataclass

from paddle_resnet.data.records import IMAGE_SUFFIXES
from utils.errors import command, printable

# Names of columns in lower case without spaces, _ and -.
IMAGE_COLUMNS = (
    *("filename", "file", "filepath", "image", "imageid", "imagepath", "imagename", "img", "imgpath", "imgname"),
    *("path", "name", "id", "idcode", "fname", "fpath"),
)
LABEL_COLUMNS = (
    *("label", "labels", "labelid", "labelname", "class", "classname", "classid", "category", "categoryid", "target"),
    *("y", "species", "breed", "diagnosis", "tag", "tags", "variety"),
)
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "dataset", "isvalid", "isval", "istest")
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
_SUBFOLDERS, _ENTRIES = 50, 100_000  # maximum number of subfolders that are listed, and of entries per folder
_HEAD = 1 << 16  # number of bytes of a table that are read to recognize it
_IMAGE = r"[^/]+(" + "|".join(map(re.escape, IMAGE_SUFFIXES)) + ")"
_SPLIT = r"(train|training|val|valid|validation|test|testing)"


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    Attributes:
        pattern: regular expression for the paths, relative to the data set, of the files that identify the layout. The
            paths of folders end in a slash. Upper and lower case are equivalent.
        what: description of these files.
        kind: kind of `dataset import` that reads them, or None.
        todo: what to do, if no kind reads them.
        needs: a second pattern that must match at least one path, or None.
    """

    pattern: str
    what: str
    kind: str | None = None
    todo: str | None = None
    needs: str | None = None


_CLASS_FOLDERS = "write the images into one folder per class, in train/ and val/"
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
    Layout(r"image_class_labels\.txt", "lists of CUB-200", "table", needs=r"images\.txt"),
    Layout(r"annotations/trainval\.txt", "lists of Oxford-IIIT Pets", "table", needs="images/"),
    Layout(r"meta/train\.(txt|json)", "lists of Food-101 or MMPretrain", "table"),
    Layout(rf"({_SPLIT}/)?metadata\.(csv|jsonl)", "a table of Hugging Face's imagefolder", "table"),
    Layout(rf"{_SPLIT}/_classes\.csv", "a table of Roboflow", "table"),
    Layout(rf"{_SPLIT}_list\.txt", "file lists of PaddleClas", "table"),
    Layout(r"[^/]+\.(csv|tsv|jsonl)", "a table with labels", "table"),
    Layout(rf"{_SPLIT}\.txt", "file lists", "table"),
    Layout(r"(.*/)?[^/]+\.parquet", "Parquet files", todo=_CLASS_FOLDERS),
    Layout(r"[^/]+\.arrow|[^/]+/[^/]+\.arrow", "Arrow files", todo=_CLASS_FOLDERS),
    Layout(r"(.*/)?[^/]*(\.tfrec|\.tfrecords?|\.tfrecord-\d+-of-\d+)", "TFRecord files", todo=None),
    Layout(r"(.*/)?(data_batch_\d|test_batch|[^/]*-(batches|100)-(py|bin)/)", "arrays of CIFAR", todo=_CLASS_FOLDERS),
    Layout(r"(.*/)?[^/]+-idx[13]-ubyte(\.gz)?", "arrays of MNIST", todo=_CLASS_FOLDERS),
    Layout(r"[^/]+\.(npz|npy|h5|hdf5|pkl|mat)", "arrays", todo=_CLASS_FOLDERS),
    Layout(r"[^/]+\.beton", "files of FFCV", todo=_CLASS_FOLDERS),
)
# (pattern of a nearly right name, right name, storage format)
_RENAMED = (
    (r"(?:.*[-_.])?(?P<split>{})[-_.]?(?:rec)?\.rec", "{}.rec"),
    (r"(?:.*[-_.])?(?P<split>{})[-_.]?(?:lmdb|db)/", "{}_lmdb"),
    (r"(?:.*[-_.])?(?P<split>{})\.tfrec(?:ords?)?", "{}-00000-of-00001"),
    (r"(?:.*[-_.])?(?P<split>{})\.tar", "{}-000000.tar"),
)
_NAMES = {"train": "train|training", "val": "val|valid|validation|test"}


@dataclass(frozen=True)
class Sight:
    """Something that a folder contains.

    Attributes:
        what: what it is, with at most five names.
        todo: what to do, as an imperative.
        kind: kind of `dataset import` that reads it, or None.
    """

    what: str
    todo: str | None
    kind: str | None = None


def look(root):
    """Return [Sight] for what a folder contains, most specific first, or [] if nothing is recognized."""
    root = os.fspath(root)
    paths = _paths(root)
    sights = [*_nearly_right(root, paths)]
    for layout in LAYOUTS:
        found = [path for path in paths if re.fullmatch(layout.pattern, path, re.IGNORECASE)]
        if layout.what == "a table with labels":
            found = [path for path in found if is_table(os.path.join(root, path))]
        if not found or (layout.needs and not any(re.fullmatch(layout.needs, path, re.IGNORECASE) for path in paths)):
            continue
        todo = layout.todo
        if layout.kind is not None:
            output = f"{os.path.abspath(root)}_imported"
            run = command("dataset", "import", root, "--output", output)
            todo = f"run `{run}` and use --image-root {shlex.quote(output)}"
        if todo is not None or not sights:
            sights.append(Sight(f"{_counted(found)}: {layout.what}{_columns(root, found[0])}", todo, layout.kind))
    return [*sights, *_misplaced(root, paths)]


def kind(root):
    """Return the kind of `dataset import` that reads a folder, or None."""
    return next((sight.kind for sight in look(root) if sight.kind), None)


def advice(root, images_only=False):
    """Return a text for the end of an error message, which states what a folder contains and what to do; or None if
    nothing is recognized."""
    sights = [sight for sight in look(root) if sight.todo] if os.path.isdir(root) else []
    return printable(f"it contains {sights[0].what}; {sights[0].todo}") if sights else None


def is_table(path):
    """Return whether a file is a table with a column of images and a column of labels."""
    if "submission" in os.path.basename(path).lower():  # the labels in Kaggle's sample_submission.csv are wrong
        return False
    names = [normalized(name) for name in header(path)]
    return any(n in IMAGE_COLUMNS for n in names) and (len(names) == 2 or any(n in LABEL_COLUMNS for n in names))


def header(path):
    """Return the names of the columns of a table, or [] if the file cannot be read or is not a table."""
    with contextlib.suppress(OSError, ValueError, csv.Error):
        if not os.path.isfile(path):
            return []
        with open(path, encoding="utf-8-sig", errors="replace") as f:
            line = f.read(_HEAD).partition("\n")[0].rstrip("\r")
        if path.lower().endswith(".jsonl"):
            row = json.loads(line)
            return [*row] if isinstance(row, dict) else []
        return next(csv.reader([line], delimiter=delimiter(line)), [])
    return []


def delimiter(line):
    """Return the delimiter of a line of a table: the one of tab, comma and semicolon that occurs most often."""
    return max("\t,;", key=line.count)


def normalized(name):
    return re.sub(r"[\s_-]", "", name.casefold())


def _columns(root, path):
    names = header(os.path.join(root, path)) if path.lower().endswith(TABLE_SUFFIXES) else []
    return f" (columns {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


def _paths(root):
    """Return the sorted paths, relative to root, of the entries of a folder and of its subfolders. Hidden entries are
    omitted. If there are many subfolders, their entries are omitted, because they are probably classes."""
    paths = _listed(root, "")
    folders = [path for path in paths if path.endswith("/")]
    if len(folders) <= _SUBFOLDERS:
        paths += [path for folder in folders for path in _listed(root, folder)]
    return paths


def _listed(root, folder):
    paths = []
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:
        for _, entry in zip(range(_ENTRIES), entries, strict=False):
            if not entry.name.startswith("."):
                paths.append(f"{folder}{entry.name}{'/' if entry.is_dir() else ''}")
    return sorted(paths)


def _counted(paths):
    """Return the names of some paths, and the number of all."""
    names = ", ".join(paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names


def _nearly_right(root, paths):
    """Yield a Sight for files whose names differ slightly from those of record files, such as NAME_train.rec."""
    commands, named = [], []
    for pattern, right in _RENAMED:
        for split, names in _NAMES.items():
            name = right.format(split)
            matching = [p for p in paths if re.fullmatch(pattern.format(names), p, re.IGNORECASE)]
            if len(matching) != 1 or matching[0].rstrip("/") == name or f"{name}/" in paths or name in paths:
                continue
            (path,) = matching
            if name.endswith(".tar") and (path == "test.tar" or not _is_shard(os.path.join(root, path))):
                folder = os.path.join(root, split)
                if not re.fullmatch(rf"({names})\.tar", path):
                    continue
                steps = [["mkdir", folder], ["tar", "-xf", os.path.join(root, path), "-C", folder]]
                commands.append(" && ".join(map(shlex.join, steps)))
            else:
                commands.append(shlex.join(["mv", os.path.join(root, path.rstrip("/")), os.path.join(root, name)]))
            named.append(path)
    if commands:
        yield Sight(f"{_counted(named)}, which differs from the expected names", f"run `{' && '.join(commands)}`")


def _is_shard(path):
    """Return whether a tar file contains labels (.cls) next to its images."""
    with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(path, "r:") as tar:
        return any(member.name.endswith(".cls") for _, member in zip(range(8), tar, strict=False))
    return False


def _misplaced(root, paths):
    """Yield a Sight for images outside class folders, and for class folders in an unexpected place."""
    images = [path for path in paths if re.fullmatch(rf"([^/]+/)?{_IMAGE}", path, re.IGNORECASE)]
    flat = [path for path in images if "/" not in path or re.fullmatch(rf"{_SPLIT}/[^/]+", path, re.IGNORECASE)]
    if flat:
        yield Sight(f"{len(flat)} images outside class folders ({', '.join(flat[:5])})", _CLASS_FOLDERS)
