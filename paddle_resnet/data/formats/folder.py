"""Class folders: IMAGE_ROOT/train/CLASS/IMAGE and IMAGE_ROOT/val/CLASS/IMAGE, also valid/, Testing/ ..."""

import contextlib
import os
import shlex
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from paddle_resnet.data import image_files, sniffer, split_names
from paddle_resnet.data.images import (
    CONVERTED_SUFFIXES,
    IMAGE_ENDINGS,
    IMAGE_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    is_system_name,
    is_utf8,
    log_once,
    some,
)
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted, printable
from paddle_resnet.utils.mode import Mode

EXAMPLE = "{}/"
NAMES = "(?P<set>{split})"
HIDDEN = "hidden image"  # kind of an ignored file, for warn_of_ignored
OUTSIDE = "image outside the class folders"  # kind of an ignored file, for warn_of_ignored
SEARCHED = 20  # maximum number of class folders that are searched for images to recognize a split
_PLURALS = {HIDDEN: "hidden images", OUTSIDE: "images outside the class folders", "folder": "folders"}

read = image_files.read
verify = image_files.verify


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return [path of a split's folder], or [] if the split has none."""
    own = os.path.join(image_root, mode.value)

    def is_usable(path):
        return os.path.isdir(path) and (path == own or has_classes(path))

    return split_names.find(image_root, mode, NAMES, is_usable)


def has_classes(path: str) -> bool:
    """Return whether a folder contains class folders with images, and no images next to the class folders. Only the
    first SEARCHED class folders are searched for images. A single folder `images` is not a class folder."""
    with contextlib.suppress(UsageError):
        if images_at_the_top(path):
            return False
        classes = class_folders(path)
        return classes != ["images"] and any(image_names(os.path.join(path, name))[0] for name in classes[:SEARCHED])
    return False


def split_folder(image_root: str, mode: Mode) -> str:
    """Return the path of a split's folder, which may not exist."""
    return next(iter(detect(image_root, mode)), os.path.join(image_root, mode.value))


def index(
    image_root: str,
    mode: Mode,
    num_of_class: int | None = None,
    skip: frozenset[str] = frozenset(),
    classes: Sequence[str] | None = None,
    is_trained: bool = False,
) -> image_files.Files:
    """List class folders: IMAGE_ROOT/train/CLASS/IMAGE and IMAGE_ROOT/val/CLASS/IMAGE.

    A class without validation images does not shift the labels of other classes. A single warning states how many files
    are ignored because of their name or folder.

    Args:
        image_root: the folder that contains the splits; the folder of this split exists.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        num_of_class: number of network outputs, or None for any number.
        skip: names of images that the caller will drop, and that are therefore listed even if they are not regular
            files or their names are not valid UTF-8.
        classes: names of the class folders in label order (numbering.Numbering.classes); None for the sorted class
            folders of train/, or of val/ if train/ does not exist.
        is_trained: whether `classes` are those of a trained network.
    Returns:
        image_files.Files of the split.
    Raises:
        UsageError: there are no class folders, or more classes than network outputs; a class exists only in val/ or is
            not in `classes`; a name is not valid UTF-8, or differs from a class only in its Unicode form; the only
            class folder contains folders instead of images; a folder cannot be listed or is a broken link; or an image
            is not a regular file.
    """
    split_dir = split_folder(image_root, mode)
    split = os.path.basename(split_dir)
    folders = class_folders(split_dir)
    if len(folders) == 1:
        _check_nesting(os.path.join(split_dir, folders[0]), split_dir)
    check_utf8(split_dir, folders)
    if classes is None:
        label_dir = label_folder(image_root, mode)
        classes = class_folders(label_dir)
        if not classes:
            raise UsageError(
                f"--image-root {image_root}: {os.path.basename(label_dir)}/ has no class folders; "
                f"{sniffer.advice(image_root) or sniffer.PUT}"
            )
    if num_of_class is not None and len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class}: fewer than the {len(classes)} class folders in {image_root}; "
            f"use --num-of-class {len(classes)}"
        )
    files, labels = [], []
    ignored = [(OUTSIDE, "", name) for name in images_at_the_top(split_dir)]
    label_of = {name: label for label, name in enumerate(classes)}
    _check_unicode(split_dir, [name for name in folders if not is_trained or name not in label_of], classes)
    for name in folders:
        if name not in label_of:
            raise UsageError(
                f"--image-root {image_root}: {split}/{name} is not one of the {len(classes)} classes of the checkpoint "
                f"({some(classes)}); remove or rename it"
                if is_trained
                else f"--image-root {image_root}: {split}/{name} has no "
                f"{os.path.basename(label_folder(image_root, mode))}/{name}; "
                + _unknown_folder(split_dir, name, folders, classes)
            )
        images, unusable, others = image_names(os.path.join(split_dir, name))
        for file in unusable:
            if f"{split}/{name}/{file}" not in skip:
                raise UsageError(
                    f"{os.path.join(split_dir, name, file)}: a broken link, or not a regular file; remove it, or omit "
                    "it with --skip-list"
                )
        files += [f"{split}/{name}/{file}" for file in images]
        labels += [label_of[name]] * len(images)
        ignored += [(kind, name, file) for kind, file in others]
    if not is_utf8("".join(files)):
        for name in files:
            if not is_utf8(name) and os.path.normpath(name) not in skip:
                raise UsageError(
                    f"--image-root {image_root}: {os.fsencode(name)!r} is not valid UTF-8; rename the file, or omit it "
                    "with --skip-list"
                )
    warn_of_ignored(split_dir, ignored)
    return image_files.Files(files, labels, classes)


def _unknown_folder(split_dir, name, folders, classes):
    """Return what to do with a folder in the validation split that is not a class.

    Args:
        split_dir: folder of the validation split.
        name: name of the unknown folder.
        folders: all folders in split_dir.
        classes: names of the classes.
    """
    same = {_plain(known): known for known in classes}.get(_plain(name))
    if same is not None and same not in folders:
        paths = (os.path.join(split_dir, each) for each in (name, same))
        return f"the class is {same}: run `{shlex.join(['mv', *paths])}`"
    if {*folders}.isdisjoint(classes) and (advice := sniffer.advice(os.path.dirname(split_dir), only_certain=True)):
        return advice
    return f"add the folder, or remove {os.path.basename(split_dir)}/{name}"


def _plain(name):
    """Return the name without upper case and, for a number, without leading zeros."""
    return str(int(name)) if name.isdecimal() else name.casefold()


def check_utf8(path: str, names: Iterable[str]) -> None:
    """Raise UsageError if the name of a class folder in `path` is not valid UTF-8, as text files and JSON require."""
    for name in names:
        if not is_utf8(name):
            raise UsageError(f"{path}: the class folder {os.fsencode(name)!r} is not valid UTF-8; rename the folder")


def _check_unicode(folder, names, classes):
    """Raise UsageError if the name of a class folder looks like that of a different class, because one of them is in
    the Unicode form of macOS (NFD) and one in the form of other systems (NFC)."""
    forms = {unicodedata.normalize("NFC", name): name for name in classes}
    for name in names:
        other = forms.get(unicodedata.normalize("NFC", name), name)
        if other != name:
            paths = [os.path.join(folder, each) for each in (name, other)]
            remedy = (
                "move the images into one of the folders and remove the other"
                if other in names
                else f"rename the folder: `{shlex.join(['mv', *paths])}`"
            )
            raise UsageError(
                f"{paths[0]}: the name {name!a} looks like the class {other!a}, but has a different Unicode "
                f"form; {remedy}"
            )


def _check_nesting(folder, split_dir):
    """Raise UsageError if the only class folder of a split contains folders, but no images, as in train/train/CLASS."""
    images, _, others = image_names(folder)
    if not images and any(kind == "folder" for kind, _ in others):
        remedy = sniffer.advice(os.path.dirname(split_dir), kind="table") or f"move these folders to {split_dir}"
        raise UsageError(f"{folder}: contains folders but no images; {remedy}")


def ignored_files(image_root: str, mode: Mode) -> list[str]:
    """Return the paths, relative to image_root, of the entries of a split that training ignores: images outside class
    folders, and folders, hidden images and files of other types in class folders. Folders that cannot be listed are
    omitted."""
    paths = []
    with contextlib.suppress(UsageError):  # index() reports this error
        split_dir = split_folder(image_root, mode)
        split = os.path.basename(split_dir)
        paths += [f"{split}/{name}" for name in images_at_the_top(split_dir)]
        for label in class_folders(split_dir):
            with contextlib.suppress(UsageError):
                paths += [f"{split}/{label}/{name}" for _, name in image_names(os.path.join(split_dir, label))[2]]
    return paths


def unsupported(image_root: str, mode: Mode) -> str | None:
    """Return the remedy for a split whose images all have an unsupported format, or None if there are none."""
    files = [
        name
        for name in ignored_files(image_root, mode)
        if name.lower().endswith((*CONVERTED_SUFFIXES, *UNSUPPORTED_SUFFIXES))
    ]
    if not files:
        return None
    return f"{counted(len(files), 'file')} such as {files[0]} must be converted to JPEG or PNG"


def own_classes(image_root: str, mode: Mode) -> list[str] | None:
    """Return the names of the class folders in the folder of a split, or None if this folder does not exist. Raise
    UsageError if the folder cannot be listed. If these names are passed to DataRoot.listed, the labels depend only on
    this split and may differ from those of training."""
    folder = split_folder(image_root, mode)
    return class_folders(folder) if os.path.isdir(folder) else None


def label_folder(image_root: str, mode: Mode) -> str:
    """Return the path of the folder whose class folders are numbered: that of the training split or, if it does not
    exist, that of the split `mode`."""
    return next(iter(detect(image_root, Mode.TRAIN)), split_folder(image_root, mode))


def warn_of_ignored(folder: str | Path, ignored: list[tuple[str, str, str]]) -> None:
    """Log a warning with the number of ignored files per kind and class folder.

    Args:
        folder: folder that contains the class folders.
        ignored: [(kind, class, name of the file or folder)]. image_names returns kind and name.
    """
    if not ignored:
        return
    kinds = defaultdict(list)
    for kind, label, name in ignored:
        kinds[kind].append((label, name))
    parts = []
    for kind, places in sorted(kinds.items(), key=lambda item: -len(item[1])):
        counts = Counter(label for label, _ in places if label)
        classes = some([f"{label} {count}" for label, count in counts.most_common()], 3)
        example = os.path.join(*places[0])
        plural = kind if len(places) == 1 else _PLURALS.get(kind, kind)
        parts.append(f"{len(places)} {plural} ({f'{classes}; ' if classes else ''}for example {example})")
    log_once(
        printable(
            f"{folder}: {counted(len(ignored), 'entry', 'entries')} ignored: {some(parts, 10)}; images must be in a "
            f"class folder and have a name that ends in {IMAGE_ENDINGS} and does not begin with a dot"
        ),
        logger.warn,
    )


def class_folders(path: str | Path) -> list[str]:
    """Return the sorted names of the class folders in a folder. Ignored folders are logged once.

    Raises:
        UsageError: the folder cannot be listed, or contains a broken link.
    """
    entries = {entry.name: entry_type(entry) for entry in _listed(path)}
    names = sorted(name for name, kind in entries.items() if kind == "folder")
    classes = [name for name in names if not is_system_name(name)]
    for name, kind in entries.items():
        if kind == "link" and not is_system_name(name):
            raise UsageError(f"{os.path.join(path, name)}: a broken link; repair or remove it")
    if len(classes) < len(names):
        others = ", ".join(name for name in names if is_system_name(name))
        log_once(f"{path}: {printable(others)} ignored: hidden and system folders", logger.info)
    return classes


def image_names(path: str | Path) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """List the images in a class folder. Images are recognized by their extensions.

    Returns:
        (sorted names of all images; sorted names of those that are not regular files but broken links, FIFOs or
        devices; [(kind, name)] of ignored entries, where kind is HIDDEN for an image whose name begins with a dot but
        not with "._", and otherwise "folder", the extension of a file or "without extension"). Other entries whose
        names begin with a dot are omitted.
    Raises:
        UsageError: the folder cannot be listed.
    """
    listed = _listed(path)
    entries = [entry for entry in listed if not entry.name.startswith(".")]
    kind_of = {entry.name: entry_type(entry) for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)}
    names = sorted(name for name, kind in kind_of.items() if kind != "folder")
    ignored = [
        (
            "folder"
            if entry_type(entry) == "folder"
            else os.path.splitext(entry.name)[1].lower() or "without extension",
            entry.name,
        )
        for entry in entries
        if kind_of.get(entry.name, "folder") == "folder"
    ]
    # macOS stores metadata of IMAGE.jpg in ._IMAGE.jpg, which is not an image.
    hidden = [entry for entry in listed if entry.name.startswith(".") and not entry.name.startswith("._")]
    ignored += [(HIDDEN, e.name) for e in hidden if e.name.lower().endswith(IMAGE_SUFFIXES) and entry_type(e) == "file"]
    return names, [name for name in names if kind_of[name] != "file"], sorted(ignored)


def images_at_the_top(path: str | Path) -> list[str]:
    """Return the sorted names of the image files next to the class folders, except hidden ones. Raise UsageError if the
    folder cannot be listed."""
    entries = _listed(path)
    names = [
        entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and entry_type(entry) == "file"
    ]
    return sorted(name for name in names if not name.startswith("."))


def entry_type(entry: os.DirEntry[str]) -> str:
    """Return the type of an os.DirEntry, following links: "file", "folder", "link" (a broken link) or "other"."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
    except OSError:  # for example, the entry is a link to itself
        pass
    return "link" if entry.is_symlink() and not os.path.exists(entry.path) else "other"


def _listed(path):
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as e:
        raise UsageError(f"{path}: cannot be listed ({e.strerror}); make it readable or remove it") from e
