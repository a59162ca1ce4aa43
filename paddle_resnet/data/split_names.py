"""The names of splits in the names of files and folders, such as valid/, val_list.txt and caltech_train.rec."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from paddle_resnet.data.images import readable, some
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

# {split: its names in lower case}
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
SPLIT_OF = {name: split for split, names in SPLITS.items() for name in names}
# Splits that a run reads for each mode, in order of preference: without a validation split, it reads the test split.
_READ = {Mode.TRAIN: ("train",), Mode.EVAL: ("val", "test")}


def split_of(name: str) -> str | None:
    """Return the split in the name of a file or folder, such as "val" in valid_labels.csv. Return None if the name
    contains no split or several."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    found = {SPLIT_OF[word] for word in words if word in SPLIT_OF}
    return found.pop() if len(found) == 1 else None


def match(pattern: str, name: str, mode: Mode) -> re.Match[str] | None:
    """Match the name of a file or folder.

    Args:
        pattern: regular expression for the whole name, in which {split} stands for the names of a split. Upper and
            lower case are equivalent.
        name: name of the file or folder.
        mode: the split. Mode.EVAL includes test splits.
    """
    return _match(pattern, name, *_READ[mode])


def _match(pattern, name, *splits):
    words = "|".join(word for split in splits for word in SPLITS[split])
    return re.fullmatch(pattern.replace("{split}", f"({words})"), name, re.IGNORECASE)


def find(
    image_root: str,
    mode: Mode,
    pattern: str,
    is_usable: Callable[[str], bool] = lambda path: True,
    folders: Iterable[str] = ("",),
) -> list[str]:
    """Return the sorted paths of a split's files, or [] if there are none. Files of a test split are returned only if
    there are none of a validation split.

    Args:
        image_root: folder of the data set.
        mode: the split.
        pattern: see match(). The group `set` is the part of the name that all files of a split share.
        is_usable: is_usable(path) returns whether a file with a matching name belongs to a split.
        folders: folders to search, relative to image_root; "" is image_root itself.
    Raises:
        UsageError: files of several sets match, or a folder cannot be listed.
    """
    paths = []
    for folder in (os.path.join(image_root, name) if name else str(image_root) for name in folders):
        if folder == str(image_root) or os.path.isdir(folder):
            with readable(folder):
                paths += [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    for split in _READ[mode]:
        sets = defaultdict(list)  # {(folder, common part of the names): [path]}
        for path in paths:
            folder, name = os.path.split(path)
            if (found := _match(pattern, name, split)) and is_usable(path):
                sets[folder, found["set"]].append(path)
        if len(sets) > 1:
            raise several(image_root, mode, [members[0] for members in sets.values()])
        if sets:
            return [path for members in sets.values() for path in members]
    return []


def check_total(image_root: str, mode: Mode, pattern: str, paths: list[str], noun: str) -> None:
    """Raise UsageError if the number of a split's files differs from the number in their names, such as 8 in
    train-00000-of-00008. A name without this number counts as 1 file.

    Args:
        image_root, mode, pattern: see find(). The group `total` is the number in a name.
        paths: the files of the split.
        noun: what a file is called in the message, such as "shard".
    """
    found = [match(pattern, os.path.basename(path), mode) for path in paths]
    total = max(int(name["total"] or 1) for name in found if name)
    if len(paths) < total:
        raise UsageError(
            f"--image-root {image_root}: has {len(paths)} of {total} {mode.value} {noun}s; add the missing ones"
        )
    if len(paths) > total:
        raise UsageError(
            f"--image-root {image_root}: has {len(paths)} {mode.value} {noun}s, but {total} according to their names "
            f"({some(list(map(os.path.basename, paths)))}); move those of other data sets to a different folder"
        )


def several(image_root: str, mode: Mode, paths: Iterable[str]) -> UsageError:
    """Return the UsageError for a data set that contains a split several times. `paths` contains the first path of each
    occurrence."""
    return UsageError(
        f"--image-root {image_root}: contains the {mode.value} split several times "
        f"({some([shown(image_root, path) for path in paths])}); move all but one to a different folder"
    )


def shown(image_root: str, path: str) -> str:
    """Return a path relative to the data set. The path of a folder ends in a slash."""
    return f"{os.path.relpath(path, image_root)}{'/' if os.path.isdir(path) else ''}"
