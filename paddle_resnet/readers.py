"""Storage formats: one function a format, each describes a data set to the DALI pipeline.

A reader returns a `DataSet`, whose `read` adds the DALI operator to the pipeline under construction.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from nvidia.dali import fn, types

from utils.errors import UsageError
from utils.mode import Mode

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


@dataclass
class DataSet:
    """One split of a data set.

    Attributes:
        size: number of images in the whole split.
        classes: class names in label order.
        read: read(name, shard_id, num_shards, shuffle) -> (encoded images [uint8 bytes], labels [1] int64), called
            while a DALI pipeline is being defined. Shards are padded to equal numbers of full batches by repeating
            their last image, so that every process makes the same number of steps; the iterator cuts the copies off.
    """

    size: int
    classes: list
    read: Callable


def read_skip_list(path, image_root):
    """The entries of a --skip-list: one path a line, relative to image_root as `dataset verify --fix-list` writes it.

    Returns:
        frozenset of the paths.
    Raises:
        UsageError: the file cannot be read, or an entry names no file.
    """
    try:
        with open(path, encoding="utf-8") as f:
            names = [line.rstrip("\n") for line in f]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--skip-list {path} cannot be read ({e}): name a text file with one path a line") from e
    skip = frozenset(os.path.normpath(name) for name in names if name.strip())
    for name in sorted(skip):
        if not os.path.isfile(os.path.join(image_root, name)):
            raise UsageError(f"--skip-list {path}: {name} is no file in {image_root}: remove the line")
    return skip


def folder(image_root, mode, num_of_class, seed, skip=frozenset()):
    """Class folders: IMAGE_ROOT/train/CLASS/IMAGE and IMAGE_ROOT/val/CLASS/IMAGE.

    Labels number the sorted class folders of train/ (of val/ where there is no train/), so that a class that is
    missing in val/ shifts no label.

    Args:
        image_root: the folder above train/ and val/.
        mode: Mode.TRAIN reads train/, Mode.EVAL reads val/.
        num_of_class: number of outputs of the network.
        seed: seed of the training order.
        skip: paths relative to image_root to leave out. A class may become empty and keeps its label.
    Raises:
        UsageError: a missing or empty folder, no class folders, more classes than outputs, a class in val/ alone.
    """
    split = {Mode.TRAIN: "train", Mode.EVAL: "val"}[mode]
    split_dir = os.path.join(image_root, split)
    if not os.path.isdir(image_root):
        raise UsageError(f"--image-root {image_root} is no folder: name the one that holds train/ and val/")
    if not os.path.isdir(split_dir):
        raise UsageError(f"--image-root {image_root} has no folder {split}/: name the folder above it")

    label_dir = os.path.join(image_root, "train")
    if not os.path.isdir(label_dir):
        label_dir = split_dir
    classes = class_folders(label_dir)
    if not classes:
        raise UsageError(
            f"--image-root {image_root}: {os.path.basename(label_dir)}/ holds no class folders: put the images into "
            "one folder a class"
        )
    if len(classes) > num_of_class:
        raise UsageError(
            f"--num-of-class {num_of_class} is smaller than the {len(classes)} class folders in {image_root}: "
            f"give --num-of-class {len(classes)}"
        )
    files, labels = [], []
    label_of = {name: label for label, name in enumerate(classes)}
    for name in class_folders(split_dir):
        if name not in label_of:
            raise UsageError(f"--image-root {image_root}: val/{name} has no train/{name}: add or remove it")
        images = image_files(os.path.join(split_dir, name))
        if skip:
            images = [path for path in images if os.path.relpath(path, image_root) not in skip]
        files += images
        labels += [label_of[name]] * len(images)
    if not files:
        raise UsageError(f"--image-root {image_root}: {split}/ holds no images ({', '.join(IMAGE_SUFFIXES)}): add some")

    if mode is Mode.TRAIN:
        # DALI's own shuffle has a fixed seed and the same order in every run; this makes the order follow the seed.
        order = np.random.RandomState(seed).permutation(len(files))
        files = [files[i] for i in order]
        labels = [labels[i] for i in order]

    def read(name, shard_id, num_shards, shuffle):
        encoded, label = fn.readers.file(
            name=name,
            files=files,
            labels=labels,
            shard_id=shard_id,
            num_shards=num_shards,
            shuffle_after_epoch=shuffle,
            stick_to_shard=not shuffle,
            pad_last_batch=True,
        )
        return encoded, fn.cast(label, dtype=types.INT64)

    return DataSet(len(files), classes, read)


def class_folders(path):
    """Names of the class folders in a folder, sorted."""
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def image_files(path):
    """Paths of the images in a class folder, sorted."""
    with os.scandir(path) as entries:
        files = [e.name for e in entries if e.is_file() and not e.name.startswith(".")]
    names = sorted(name for name in files if name.lower().endswith(IMAGE_SUFFIXES))
    return [os.path.join(path, name) for name in names]
