"""Recognize what a folder contains, for errors about a data set, `dataset info` and `dataset import --list`.

LAYOUTS is a table of patterns, most specific first. The patterns match the paths of the entries of a folder and, if
the folder has at most _SUBFOLDERS subfolders, of the entries of its subfolders.
"""

import contextlib
import os
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paddle_resnet.data import archives, class_in_name, record_tables, table_heads
from paddle_resnet.data.image_search import SUFFIXES, ImageSearch
from paddle_resnet.data.images import CONVERTED_SUFFIXES, is_system_name, some
from paddle_resnet.data.split_names import SPLIT_OF, SPLITS, split_of
from paddle_resnet.utils.errors import command, import_command, printable

PARTITION = "list_eval_partition"  # file that contains the splits of another table, without its suffix
RECORD_KINDS = ("tfrecord", "webdataset", "recordio", "lmdb")  # kinds of `dataset import` that read record files
_SUBFOLDERS, _ENTRIES = 50, 100_000  # maximum number of subfolders, and of entries to list per folder
_SEARCHED, _DEPTH = 20, 4  # maximum number of folders per level, and of levels, that are searched for nested images
_SEARCHED_FILES = 200_000  # maximum number of files among which an image of a table is searched
# Names of folders that contain versions of the same images, and the order in which they are preferred.
_VERSIONS = dict.fromkeys(("color", "colour", "rgb", "original"), 1)
_VERSIONS |= dict.fromkeys(("gray", "grey", "grayscale", "greyscale", "segmented", "masked", "masks", "edges"), 2)
_ANNOTATIONS = 100  # maximum number of text, JSON or .mat files in a folder; more probably describe one image each
_IMAGE = r"[^/]+(" + "|".join(map(re.escape, SUFFIXES)) + ")"
_NATIVE = r"(train|val(idation)?)"  # how the names of the record files that training reads usually begin
_SPLIT = rf"({'|'.join(SPLIT_OF)})"
_TABLE_ENDING = rf"\.({'|'.join(suffix[1:] for suffix in table_heads.TABLE_SUFFIXES)})"


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
        needs=r"ILSVRC/|Data/CLS-LOC/",
    ),
    Layout(r"CLS-LOC/", "ImageNet as distributed by Kaggle", "ilsvrc"),
    Layout(
        r"(val/)?ILSVRC2012_img_val/|val/(val/|ILSVRC2012_val_\d+\.JPEG)",
        "ImageNet's validation images without class folders",
        "ilsvrc",
        needs=r"(train|ILSVRC2012_img_train)/n\d{8}/",
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
    Layout(rf"(.*/)?(?!{_NATIVE}-\d+-of-\d+)[^/]+(\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz)?)", "TFRecord files", "tfrecord"),
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
    labels = table_heads.label_columns(os.path.join(root, found[0])) if is_any_table else []
    if len(labels) > 1:
        choose = import_command(root, "--label-column", labels[0])
        todo = f"run {choose}, with a different --label-column for a different label ({', '.join(labels[1:5])})"
    what = f"{some(found)}: {layout.what}{_columns(root, found[0])}"
    return Sight(what, todo, layout.kind, layout.kind is not None, root)


def _is_usable(path, is_image, is_any_table):
    """Return whether a table, a list or an .npz file contains images and labels; True for other files. JSON and .mat
    files are tables only in a layout of tables with any name (is_any_table)."""
    if path.lower().endswith(record_tables.SUFFIXES) and not is_any_table:
        return True
    if os.path.basename(path) == "_classes.csv":
        return bool(table_heads.header(path))
    if path.endswith(".txt") and table_heads.header(path):
        return table_heads.is_table(path, is_image=is_image)
    if path.endswith((".lst", ".txt")) and not re.fullmatch(_LISTS, os.path.basename(path), re.IGNORECASE):
        return table_heads.is_list(path, is_image) or table_heads.is_path_list(path, is_image)
    if path.endswith(".npz") and os.path.isfile(path):  # a pipe could block
        # The import reports a damaged file.
        with contextlib.suppress(OSError, zipfile.BadZipFile, ValueError), zipfile.ZipFile(path) as archive:
            return bool(npz_keys(name.removesuffix(".npy") for name in archive.namelist()))
    return not path.endswith(table_heads.TABLE_SUFFIXES) or table_heads.is_table(path, is_image=is_image)


def _unlabeled(root, paths, is_image):
    """Yield a Sight for each table with a column of images, but no known column of labels."""
    for path in paths:
        file = os.path.join(root, path)
        names = table_heads.header(file) if _TABLE.fullmatch(path) else []
        at = table_heads.image_columns(file, is_image) if len(names) > 2 else []
        if at and not any(map(is_image, names)) and not table_heads.label_columns(file):
            run = command("dataset", "import", file, "--output", f"{os.path.abspath(root)}_imported")
            others = ", ".join([name for i, name in enumerate(names) if i not in at][:10])
            what = f"{path}: a table of images, whose column of labels is not recognized"
            yield Sight(what, f"run `{run}` with --label-column set to one of these: {others}", None, True)


def _several_labels(root, paths, is_image):
    """Yield a Sight for annotations of objects, or for the first table in which the first images have several
    labels."""
    todo = "write train.csv and val.csv with the columns image and labels, and train with --multi-label (see "
    todo += "docs/multilabel.md)"
    if annotations := [path for path in paths if re.fullmatch(r"Annotations/[^/]+\.xml", path)]:
        yield Sight(f"{some(annotations)}: annotations of objects, as in Pascal VOC", todo, None, True, root, True)
        return
    for path in paths:
        if not (_TABLE.fullmatch(path) or path.endswith(".txt")) or path.endswith("_classes.csv"):
            continue
        file = os.path.join(root, path)
        several, attributes = table_heads.several_labels(file, is_image)
        if not several:
            continue
        if attributes:
            columns = list(attributes)
            has_images = table_heads.image_columns(file, ImageSearch(os.path.dirname(file), _SEARCHED_FILES).is_image)
            run = command(
                *("dataset", "import", file if has_images else root, "--label-column", columns[0]),
                *("--output", f"{os.path.abspath(root)}_imported"),
            )
            todo += f"; for one of the labels, run `{run}`, or choose {', '.join(columns[1:5])}"
            partition = [name for name in paths if re.fullmatch(rf"(Eval/)?{PARTITION}\.(txt|csv)", name)]
            todo += "".join(f"; {name} contains the splits" for name in partition[:1])
        elif " " in several and "," not in several and (labels := table_heads.label_columns(file)):
            run = import_command(root, "--label-column", labels[0])
            todo += f"; if {several} is the name of one class, run {run}"
        yield Sight(f"{path}: a table with several labels per image ({several})", todo, None, True, root, True)
        return


def _pixels(root, paths):
    """Yield a Sight for tables that contain the pixels of images."""
    headers = {path: table_heads.header(os.path.join(root, path)) for path in paths if _TABLE.fullmatch(path)}
    found = [path for path, names in headers.items() if table_heads.pixel_columns(names)]
    names = headers[found[0]] if found else []
    at = table_heads.pixel_columns(names)
    if labeled := [path for path in found if table_heads.is_pixel_table(os.path.join(root, path))]:
        yield Sight(f"{some(labeled)}: tables of pixels", f"run {import_command(root)}", "pixels", True, root)
    elif table_heads.is_square(at) and len(names) > len(at):
        todo = "add a column label with the class of each image, or import one of these files with --label-column"
        yield Sight(f"{some(found)}: tables of pixels without a column of labels", todo)
    elif found:
        yield Sight(f"{some(found)}: tables of pixels", WRITE)


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


def _columns(root, path):
    names = table_heads.header(os.path.join(root, path)) if path.lower().endswith(table_heads.TABLE_SUFFIXES) else []
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


def _tar_files(root, paths):
    """Yield one Sight for all tar files that are a split, but have no number."""
    commands, found = [], []
    for split, names in _NAMES.items():
        matching = [path for path in paths if re.fullmatch(_TAR.format(names), path, re.IGNORECASE)]
        right = f"{split}-000000.tar"
        if len(matching) == 1 and right not in paths:
            paths_of_split = (os.path.join(root, name) for name in (matching[0], split, right))
            commands.append(archives.rename_or_unpack(*paths_of_split))
            found += matching
    if found:
        names = "name differs" if len(found) == 1 else "names differ"
        what = f"{some(found)}, whose {names} from the expected {names.split()[0]}"
        yield Sight(what, f"run `{' && '.join(commands)}`", None, True)


def is_archive(name: str) -> bool:
    """Return whether a file is an archive of unknown content, that is, neither part of a known layout nor a shard."""
    is_known = any(re.fullmatch(layout.pattern, name, re.IGNORECASE) for layout in LAYOUTS)
    return _ARCHIVE.fullmatch(name) is not None and not is_known and not re.fullmatch(r".*-\d+\.tar", name)


def _archives(root, paths):
    """Return [Sight] for archives of unknown content in a folder, or []."""
    names = [path for path in paths if "/" not in path and is_archive(path)]
    if not names:
        return []
    return [Sight(f"{some(names)}: {'an archive' if len(names) == 1 else 'archives'}", archives.unpacking(root, names))]


def unpacking_here(folder: str) -> str | None:
    """Return the remedy that unpacks the archives in a folder to this folder, or None if there are none."""
    names = [name for name in _listed(folder, "") if is_archive(name)]
    return f"the images may be in {some(names)}, so {archives.commands(folder, names, folder)}" if names else None


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
            below = _subfolders(root, [path for path in inner if not _has_images(root, path)])
            if deep := [path for path in below[:5] if _has_images(root, path)]:
                run = import_command(root, *_depth_flags(root, below))
                yield Sight(f"{some(deep)}: class folders one level too deep", f"run {run}", "nested", True)
        elif len(folders) == 1 and len(inner) > 1 and _has_images(root, inner[0]):
            source, output = os.path.join(root, folder), f"{os.path.abspath(root)}_split"
            run = command("dataset", "split", source, "--output", output)
            todo = f"run `{run}` and use --image-root {shlex.quote(output)}"
            yield Sight(f"{some(inner)}: class folders one level too deep", todo, "nested", False, root)


def _depth_flags(root, folders):
    """Return the flags for an import of nested class folders: --class-depth all if some of the `folders` are class
    folders, but others contain class folders instead of images."""
    for path in folders[:_SEARCHED]:
        below = _subfolders(root, [path])
        if not _has_images(root, path) and any(_has_images(root, inner) for inner in below[:_SEARCHED]):
            return ["--class-depth", "all"]
    return []


def _subfolders(root, folders):
    return [path for folder in folders for path in _listed(root, folder) if path.endswith("/")]


def _first_images(root, paths):
    folders = [path for path in paths if re.fullmatch("[^/]+/[^/]+/", path)][:_SEARCHED]
    return [path for folder in folders for path in _listed(root, folder)[:_SEARCHED]]


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
        level = _subfolders(root, level[:_SEARCHED])
        if found := [path for path in level[:_SEARCHED] if _has_images(root, path)]:
            if source := _copies(root, found):
                first, *others = source
                inner = os.path.join(root, first)
                what = f"{first}/: class folders; {some([f'{path}/' for path in others])}: copies of its images"
                yield Sight(what, f"run {import_command(inner)}", "nested", False, inner)
                return
            parents, names = zip(*(os.path.split(path[:-1]) for path in found), strict=True)
            if len({*parents}) == 1 and {name.lower() for name in names} <= SPLIT_OF.keys():  # images/train/0.jpg
                yield Sight(f"{some(found)}: images outside class folders", PUT)
                return
            run = import_command(root, *_depth_flags(root, level))
            yield Sight(f"{some(found)}: images in nested folders", f"run {run}", "nested", False, root)
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
    what = f"{len(images)} {'image' if len(images) == 1 else 'images'} outside class folders ({some(images)})"
    trained = [path for path in images if split_of(os.path.dirname(path)) in (None, "train")]
    counts = Counter(class_in_name.class_of(path) or "" for path in trained)  # "" is ambiguous
    if len(counts) > 1 and min(counts.values()) > 1 and not any(map(class_in_name.is_ambiguous, counts)):
        names = f"{len(counts)} classes ({some(sorted(counts))})"
        todo = f"if the class is the file name before the last number, which yields {names}, "
        todo += f"run {import_command(root, '--as', 'filename')}; otherwise, {PUT}"
        yield Sight(what, todo, "filename", False, root, True)
    else:
        yield Sight(what, PUT)
