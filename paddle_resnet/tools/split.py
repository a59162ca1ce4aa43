"""`python -m paddle_resnet.dataset split`: make train/ and val/ from one folder of class folders."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from paddle_resnet.data import listing
from utils.errors import UsageError


def split(source, output, share, seed=0):
    """Split each class by a share, without copying where links serve.

    Which images go to val/ depends on the names of classes and files, the share and the seed only. An image that is
    added later moves few others.

    Args:
        source: folder of class folders. It stays as it is.
        output: folder to create, usable as --image-root. It appears when it is complete.
        share: of the images of each class that go to val/, between 0 and 1; at least one image goes to each split.
        seed: a whole number; another one makes another choice.
    Returns:
        ({"train": images, "val": images}, number of classes)
    Raises:
        UsageError: source has no class folders, or a class with fewer than two images; output exists.
        OSError: output cannot be written.
    """
    source, output = Path(source), Path(output)
    images = _list_source(source)
    if os.path.lexists(output):
        raise UsageError(f"--output {output} exists: remove it or give another folder")
    counts = {"train": 0, "val": 0}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as beside:
        partial = Path(beside) / output.name
        for label, names in images.items():
            for part, chosen in zip(("train", "val"), divide(label, names, share, seed), strict=True):
                folder = partial / part / label
                folder.mkdir(parents=True)
                counts[part] += len(chosen)
                for name in chosen:
                    _link(os.path.realpath(source / label / name), folder / name)
        partial.rename(output)
    return counts, len(images)


def _list_source(source):
    """{class: [names of its images]}"""
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder: give the folder that holds a folder for each class")
    images, left_out = {}, [(listing.OUTSIDE, "", name) for name in listing.images_at_the_top(source)]
    for label in listing.class_folders(source):
        images[label], unusable, others = listing.image_files(source / label)
        left_out += [(kind, label, name) for kind, name in others]
        if unusable:
            raise UsageError(f"{source / label / unusable[0]} is a link that leads nowhere, or not a file: remove it")
    if "train" in images and not images["train"]:
        raise UsageError(f"{source} holds train/: give {source}/train to split that folder")
    if not images:
        raise UsageError(f"{source} has no class folders: put the images into one folder per class")
    few = [f"{label} ({len(names)})" for label, names in images.items() if len(names) < 2]
    if few:
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        raise UsageError(
            f"{source} has classes with fewer than two images, one for train/ and one for val/: {', '.join(few[:5])}"
            f"{more}: add images or move the folders away"
        )
    listing.warn_of_left_out(source, left_out)
    return images


def divide(label, names, share, seed):
    """The names of a class's images in (train, val)."""
    count = min(max(1, round(len(names) * share)), len(names) - 1)
    by_chance = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(f"{seed}\0{label}\0{name}")).digest())
    val = set(by_chance[:count])
    return [name for name in names if name not in val], sorted(val)


def _link(path, place):
    """A hard link; a symbolic one where the file system refuses that, as between disks; else a copy."""
    for way in (os.link, os.symlink):
        with contextlib.suppress(OSError):
            return way(path, place)
    shutil.copyfile(path, place)
