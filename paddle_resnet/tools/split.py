"""`python -m paddle_resnet.dataset split`: create train/ and val/ from one folder of class folders."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddle_resnet.data import classes, sniffer
from paddle_resnet.data.formats import folder as class_folder
from paddle_resnet.data.images import Image, some
from paddle_resnet.tools import duplicates
from paddle_resnet.utils import files
from paddle_resnet.utils.errors import UsageError, import_command

# Names of folders that contain a split or all images, such as train_images, val2017 and images.
_SPLIT_NAME = re.compile(
    r"(train|training|test|testing|val|valid|validation|eval|dev)([-_. ]?(images?|imgs?|set|data|jpe?g|png|\d+))*"
    r"|images?|imgs?",
    re.IGNORECASE,
)


def split(
    source: str | Path, output: str | Path, fraction: float, seed: int = 0, groups_duplicates: bool = False
) -> tuple[dict[str, int], int]:
    """Split the images of each class into train/ and val/. If the file system supports links, images are linked instead
    of copied.

    Without groups_duplicates, the selection for val/ depends only on the names of classes and files, the fraction and
    the seed. The images of a class are sorted by a hash of their names, and the first images go to val/. If images are
    added and the split is repeated, the old images keep their order, so only those at the limit between val/ and train/
    can move.

    Args:
        source: folder of class folders, which is not changed.
        output: folder to create atomically, which can then be used as --image-root.
        fraction: fraction of each class that goes to val/, between 0 and 1. Each split gets at least one image per
            class.
        seed: seed of the random selection, an integer.
        groups_duplicates: whether images that duplicates.groups finds similar go to the same split, and to train/ if
            they are in several classes. Images that Pillow cannot read are not compared.
    Returns:
        ({"train": number of images, "val": number of images}, number of classes)
    Raises:
        UsageError: source is not a folder, or has no class folders or only one; a class has fewer than two images, or
            one of its images is a broken link or a special file; groups_duplicates leaves no image of a class for a
            split; the name of a folder is that of a split (except a single class "train") or not valid UTF-8; or output
            exists.
        OSError: output cannot be written.
    """
    source, output = Path(source), Path(output)
    images = _list_source(source)
    if os.path.lexists(output):
        raise UsageError(f"--output {output}: already exists; remove it or choose a different folder")
    groups = _groups(source, images) if groups_duplicates else {}
    counts = {"train": 0, "val": 0}
    output.parent.mkdir(parents=True, exist_ok=True)
    with files.written(output, files.partial_path(output.with_name(f".{output.name}"))) as partial:
        for label, names in images.items():
            divided = divide(label, names, fraction, seed, groups)
            if not divided[1]:
                raise UsageError(
                    f"{source / label}: all images are duplicates of each other or of images in other classes, so none "
                    "is left for val/; remove duplicates, or --group-duplicates"
                )
            for part, chosen in zip(("train", "val"), divided, strict=True):
                folder = partial / part / label
                folder.mkdir(parents=True)
                counts[part] += len(chosen)
                for name in chosen:
                    link(os.path.realpath(source / label / name), folder / name)
    return counts, len(images)


def _list_source(source):
    """Return {class: [image names]}. Raise UsageError if the folder cannot be split, see split()."""
    if not os.path.isdir(source):  # Path.is_dir() would raise an error for a name that is too long
        raise UsageError(f"{source}: not a folder; use the folder that contains the class folders")
    images, ignored = {}, [(class_folder.OUTSIDE, "", name) for name in class_folder.images_at_the_top(source)]
    for label in class_folder.class_folders(source):
        images[label], unusable, others = class_folder.image_names(source / label)
        ignored += [(kind, label, name) for kind, name in others]
        if unusable:
            raise UsageError(f"{source / label / unusable[0]}: a broken link, or not a regular file; remove it")
    if "train" in images and not images["train"]:
        remedy = sniffer.advice(source, only_certain=True) or f"use {source}/train to split that folder"
        raise UsageError(f"{source}: train/ contains no images, so it is not a class; {remedy}")
    if not images:
        raise UsageError(f"{source}: contains no class folders; {sniffer.advice(source) or sniffer.PUT}")
    if not any(images.values()) and (advice := sniffer.advice(source)):
        raise UsageError(f"{source}: the folders contain no images; {advice}")
    class_folder.check_utf8(source, images)
    _check_names(source, [*images])
    class_folder.warn_of_ignored(source, ignored)
    few = [f"{label} ({len(names)})" for label, names in images.items() if len(names) < 2]
    if few:
        raise UsageError(
            f"{source}: each class needs two images, one for train/ and one for val/, but some have fewer: "
            f"{some(few)}; add images, or move these folders elsewhere"
        )
    classes.warn_of_background(str(source), images)
    return images


def _check_names(source, labels):
    """Raise UsageError if there is only one class folder, or if folders have names of splits."""
    splits = [name for name in labels if _SPLIT_NAME.fullmatch(name)]
    # If no other folder has the name of a split, train/ is a class, as in CIFAR-100.
    if splits == ["train"]:
        splits = []
    if len(labels) > 1 and not splits:
        return
    problem, remedy = f"{labels[0]} is the only class folder", sniffer.PUT
    if len(labels) > 1:
        problem = f"{', '.join(splits[:5])}: named like splits, not like classes"
        remedy = f"{remedy}, or rename these folders if they are classes"
    if tables := classes.label_tables(source, [".", *labels])[:5]:
        problem = f"{problem} ({', '.join(tables)} may contain the labels)"
    if sniffer.advice(source, only_certain=True):
        remedy = f"run {import_command(source)}"
    raise UsageError(f"{source}: {problem}; {remedy}")


def _groups(source, images):
    """Return {path below source: number of its group of duplicates, or None if the group contains several classes}."""
    paths = [f"{label}/{name}" for label, names in images.items() for name in names]
    hashes = [each[0] for each in duplicates.describe_all([Image(path, str(source / path), 0) for path in paths])]
    read = [path for path, value in zip(paths, hashes, strict=True) if value is not None]
    numbers = duplicates.groups([value for value in hashes if value is not None])
    labels = {}
    for path, number in zip(read, numbers, strict=True):
        labels.setdefault(number, set()).add(path.partition("/")[0])
    return {path: n if len(labels[n]) == 1 else None for path, n in zip(read, numbers, strict=True)}


def divide(
    label: str, names: Sequence[str], fraction: float, seed: int, groups: Mapping[str, int | None] | None = None
) -> tuple[list[str], list[str]]:
    """Divide the image names of a class into (names for train/, names for val/).

    Args:
        label: name of the class.
        names: names of its images.
        fraction, seed: see split.
        groups: {"LABEL/NAME": group}. Names of the same group go to the same split; names of the group None go to
            train/. A name that is missing in `groups` is a group by itself. If no group fits into val/, the smallest
            group goes to val/, unless this would leave train/ empty.
    """
    count = min(max(1, round(len(names) * fraction)), len(names) - 1)
    by_chance = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(f"{seed}\0{label}\0{name}")).digest())
    members = {}  # {group: names}, in the order of the first name of each group
    for name in by_chance:
        group = (groups or {}).get(f"{label}/{name}", name)
        if group is not None:
            members.setdefault(group, []).append(name)
    val = set()
    for group in members.values():
        if len(val) + len(group) <= count:
            val.update(group)
    if not val and members:
        smallest = min(members.values(), key=len)
        val.update(smallest if len(smallest) < len(names) else [])
    return [name for name in names if name not in val], sorted(val)


def link(path: str | Path, place: str | Path) -> None:
    """Create a hard link. If hard links are not possible, for example between disks, create a symbolic link or, as a
    last resort, a copy."""
    for create in (os.link, os.symlink):
        with contextlib.suppress(OSError):
            return create(path, place)
    shutil.copyfile(path, place)
