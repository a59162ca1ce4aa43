"""Read class folders that are nested in other folders."""

import itertools
import os
from collections import defaultdict

from paddle_resnet.data.classes import warn_of_background
from paddle_resnet.data.image_search import images_below
from paddle_resnet.data.images import Image, some
from paddle_resnet.data.split_names import SPLIT_OF, split_of
from paddle_resnet.tools.sources import image_files, splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

_IMAGE_FOLDERS = ("images", "image", "imgs", "img")  # names of folders in class folders that are not classes


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in nested class folders.

    Args:
        source: folder with a folder for each split, or with class folders.
        options: Options. With class_depth N, the first N folders between a split and an image are its class; with -N,
            the last N; with 0, all folders. If class_depth is None, all images must be nested in the same number of
            folders.
    Returns:
        ({split: [Image]}, class names in label order)
    Raises:
        UsageError: the class folders are at different depths, or two have the same class name; a folder contains a copy
            of itself; images are outside class folders or next to the splits; or there are no training images,
            or none of a class.
    """
    paths = images_below(source)
    if not paths:
        raise UsageError(f"{source}: contains no images in folders; use the folder that contains them")
    shared = os.path.commonpath(map(os.path.dirname, paths))
    parts_of = {
        path: os.path.relpath(path, shared).split(os.sep)[:-1] if shared else path.split(os.sep)[:-1] for path in paths
    }
    _check_copies(source, shared, parts_of.values())
    top = sorted({parts[0] for parts in parts_of.values() if parts})
    has_splits = bool(top) and all(map(split_of, top))
    if not has_splits and "train" in map(split_of, top):
        names = {name for name in top if split_of(name) is None}
        others = {path: parts for path, parts in parts_of.items() if parts and parts[0] in names}
        # Images outside class folders, such as seg_pred/seg_pred/0.jpg, have no labels.
        if any(len({*parts}) > 1 for parts in others.values()):
            raise UsageError(
                f"{source}: contains images in {', '.join(sorted(names)[:5])} next to a training split; import a "
                "folder that contains only the splits"
            )
        logger.warn(
            f"{source}: {counted(len(others), 'image')} left out, because {next(iter(others))} is next to the splits "
            "and in no class folder; to import such images, move them to class folders"
        )
        parts_of = {path: parts for path, parts in parts_of.items() if path not in others}
        has_splits = True
    # The split of all images, if there are no folders of splits below `shared`.
    only = next(filter(None, map(split_of, reversed(shared.split(os.sep)))), "train")
    ends_in_split = not has_splits and all(parts[1:] and parts[-1].lower() in SPLIT_OF for parts in parts_of.values())
    parts_of = _without_kinds(source, parts_of)
    found = defaultdict(list)
    for path, parts in parts_of.items():
        if ends_in_split:  # CLASS/train/IMAGE
            split, parts = SPLIT_OF[parts[-1].lower()], parts[:-1]
        elif has_splits:
            split, parts = split_of(parts[0]), parts[1:]
            while len(parts) > 1 and split_of(parts[0]) == split:  # training_set/training_set/CLASS/IMAGE
                parts = parts[1:]
        else:
            split = only
        found[split].append((path, parts))
    found = splits.train_and_val(source, found)
    depth = _depth(source, found) if options.class_depth is None else options.class_depth
    for path, parts in (entry for entries in found.values() for entry in entries):
        if not parts:
            raise UsageError(f"{source}: {path} is outside class folders; move it to a class folder, or remove it")
        if len(parts) < abs(depth):
            raise UsageError(
                f"{source}: {path} is in fewer than {counted(abs(depth), 'class folder')}; use a --class-depth closer "
                "to 0"
            )
    classes = {split: {_class(parts, depth) for _, parts in entries} for split, entries in found.items()}
    if unknown := sorted(set.union(*classes.values()) - classes["train"]):
        shown = ", ".join(os.path.join(*parts) for parts in unknown[:5])
        raise UsageError(
            f"{source}: has {counted(len(unknown), 'class', 'classes')} without training images ({shown}); add "
            "training images, or remove these folders"
        )
    if options.class_depth is None and depth > 1:
        _warn_of_last(source, classes["train"])
    common = 0  # number of leading folders that all classes share
    while common < abs(depth) - 1 and len({parts[common] for parts in classes["train"]}) == 1:
        common += 1
    names = {parts: "_".join(parts[common:]) for parts in sorted(classes["train"])}
    ordered = sorted(names.values())
    if len({*ordered}) < len(ordered):
        repeated = next(name for name, following in itertools.pairwise(ordered) if name == following)
        raise UsageError(f"{source}: several folders form the class name {repeated}; rename one of them")
    warn_of_background(source, map("/".join, classes["train"]))
    number_of = {name: label for label, name in enumerate(ordered)}
    label_of = {parts: number_of[name] for parts, name in names.items()}
    return {
        split: [image_files.image(source, path, label_of[_class(parts, depth)]) for path, parts in entries]
        for split, entries in found.items()
    }, ordered


def _check_copies(source, shared, all_parts):
    """Raise UsageError if a folder contains a copy of itself, as cell_images/cell_images in a data set of Kaggle."""
    children = defaultdict(set)
    for parts in all_parts:
        for i, name in enumerate(parts):
            children[tuple(parts[:i])].add(name)
    for folder, names in sorted(children.items()):
        if len(names) > 1 and folder and names == children[folder[:-1]] - {folder[-1]}:
            copy = os.path.join(shared, *folder)
            raise UsageError(
                f"{source}: {copy} contains the same folders as the folder around it ({some(sorted(names))}), so it "
                f"may be a copy; remove {copy}"
            )


def _without_kinds(source, parts_of):
    """If the images are in folders such as CLASS/images/, return the folders of each image without the last one. Images
    in other folders next to images/, such as CLASS/masks/, are left out, with a warning. Otherwise, return
    `parts_of`."""
    kinds = {parts[-1].lower() for parts in parts_of.values() if parts}
    if kinds.isdisjoint(_IMAGE_FOLDERS) or any(len(parts) < 2 for parts in parts_of.values()):
        return parts_of
    parents = {tuple(parts[:-1]) for parts in parts_of.values() if parts[-1].lower() in _IMAGE_FOLDERS}
    if any(tuple(parts[:-1]) not in parents for parts in parts_of.values()):
        return parts_of
    kept = {path: parts[:-1] for path, parts in parts_of.items() if parts[-1].lower() in _IMAGE_FOLDERS}
    if len(kept) < len(parts_of):
        example = next(path for path in parts_of if path not in kept)
        count = counted(len(parts_of) - len(kept), "image")
        logger.warn(f"{source}: {count} left out, because {example} is next to the folder of the images")
    return kept


def _class(parts, depth):
    return tuple(parts[:depth] if depth > 0 else parts[depth:])  # 0: all


def _warn_of_last(source, classes):
    """Log a warning if the last folders of some classes have the same name, because this name may be the class."""
    first = {}
    for parts in sorted(classes):
        other = first.setdefault(parts[-1], parts)
        if other != parts:
            logger.warn(
                f"{source}: {os.path.join(*other)} and {os.path.join(*parts)} are different classes; if {parts[-1]} is "
                "one class, set --class-depth -1"
            )
            return


def _depth(source, found):
    examples = {}
    for path, parts in (entry for entries in found.values() for entry in entries):
        examples.setdefault(len(parts), path)
    if len(examples) > 1 and 0 not in examples:
        shown = ", ".join(examples[depth] for depth in sorted(examples)[:5])
        raise UsageError(
            f"{source}: images are nested at different depths ({shown}); set --class-depth to the number of folders "
            "that form a class, or to all if each folder with images is a class"
        )
    if not max(examples):
        raise UsageError(f"{source}: contains images outside class folders; put the images into one folder per class")
    return max(examples)
