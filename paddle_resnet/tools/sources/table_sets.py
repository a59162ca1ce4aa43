"""Choose the tables of a data set that contains several tables for the same split.

Tables whose paths differ only in the name of their split form a set, such as images_family_train.txt and
images_family_test.txt.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable

from paddle_resnet.data.images import some
from paddle_resnet.data.split_names import SPLIT_OF, split_of
from paddle_resnet.tools.sources.table_files import Row
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command

_BOTH = "trainval"  # in names of tables that contain the images of train and val


def chosen(root: str, paths: list[str], read: Callable[[list[str]], list[Row]]) -> list[str]:
    """Return the paths of the tables to import: one table without a split, or one table per split.

    If a split has several tables, the tables whose names contain a larger number than the others (train2.txt, next to
    train1.txt) are left out, and so are tables whose images differ from those of the training table. If all sets list
    the same images, and the labels of one set determine the labels of all other sets, as species determine families,
    the set with these labels is chosen.

    Args:
        root: folder of the data set.
        paths: paths of the tables.
        read: function that returns the rows of tables.
    Raises:
        UsageError: a split still has several tables.
    """
    sets = defaultdict(list)
    for path in sorted(paths, key=lambda path: _split(root, path) != "train"):
        sets[_set_of(os.path.relpath(path, root))].append(path)
    sets = _first_numbers(root, {key: _without_both(members) for key, members in sets.items()})
    if _has_one_per_split(root, sets):
        return [path for members in sets.values() for path in members]
    rows = {key: read(members) for key, members in sets.items()}
    sets = _of_training_images(root, sets, rows)
    if len(sets) > 1 and (finest := _finest(root, sets, rows)):
        sets = {finest: sets[finest]}
    if not _has_one_per_split(root, sets):
        tables = [path for members in sets.values() for path in members]
        first = next((path for path in tables if split_of(os.path.basename(path)) == "train"), tables[0])
        run = command("dataset", "import", first, "--output", f"{os.path.abspath(root)}_imported")
        names = some([os.path.relpath(path, root) for path in tables])
        raise UsageError(f"{root}: contains several tables ({names}); import one of them, such as `{run}`")
    return [path for members in sets.values() for path in members]


def other_splits(path: str) -> list[str]:
    """Return the paths of the tables next to a training table that belong to the same set; [] for any other table."""
    folder, name = os.path.split(path)
    if split_of(name) != "train":
        return []
    names = [other for other in sorted(os.listdir(folder or ".")) if other != name and _set_of(other) == _set_of(name)]
    return _without_both([os.path.join(folder, other) for other in names if split_of(other)])


def _set_of(path):
    """Return a path in which * stands for the name of a split, and # for the class of a table in a class folder."""
    parent, folder, name = ("/" + path).rsplit("/", 2) if path.count("/") > 1 else ("", "", path)
    if folder and folder in name:  # a table of a class, such as 00000/GT-00000.csv
        path = f"{parent}/#/{name.replace(folder, '#')}"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path)
    return re.sub("[A-Za-z]+", lambda word: "*" if word[0].lower() in (*SPLIT_OF, _BOTH) else word[0], words)


def _split(root, path):
    return split_of(os.path.relpath(path, root)) or "train"


def _without_both(paths):
    """Return the tables of a set, without the table of trainval if the set contains the tables of train and val."""
    both = [path for path in paths if re.search(_BOTH, os.path.basename(path), re.IGNORECASE)]
    splits = {split_of(os.path.basename(path)) for path in paths if path not in both}
    return [path for path in paths if path not in both] if {"train", "val"} <= splits else paths


def _first_numbers(root, sets):
    """Return the sets, without the sets whose names differ from the name of another set only by a larger number."""
    numbered = defaultdict(list)
    for key in sets:
        numbered[re.sub(r"\d+", "#", key)].append(([*map(int, re.findall(r"\d+", key))], key))
    kept = {}
    for members in numbered.values():
        (_, key), *others = sorted(members)
        kept[key] = sets[key]
        if others:
            left_out = [path for _, other in others for path in sets[other]]
            logger.info(
                f"{root}: {some([os.path.relpath(path, root) for path in sets[key]])} used, "
                f"{some([os.path.relpath(path, root) for path in left_out])} left out"
            )
    return kept


def _has_one_per_split(root, sets):
    splits = [_split(root, path) for key, members in sets.items() for path in (members[:1] if "#" in key else members)]
    return len({*splits}) == len(splits)


def _labels(rows):
    """Return {name of an image without folder and suffix: label}."""
    return {os.path.splitext(os.path.basename(row.image.replace("\\", "/")))[0]: row.label for row in rows}


def _of_training_images(root, sets, rows):
    """Return the sets; if exactly one set has a table named like the training split, omit the sets that contain none of
    its images."""
    trained = [key for key, paths in sets.items() if any(split_of(os.path.relpath(p, root)) == "train" for p in paths)]
    if len(trained) != 1:
        return sets
    images = _labels(rows[trained[0]]).keys()
    others = [key for key in sets if key not in trained and _labels(rows[key]).keys().isdisjoint(images)]
    if others:
        names = some([os.path.relpath(path, root) for key in others for path in sets[key]])
        logger.warn(f"{root}: {names} left out, because the images are not those of the other tables")
    return {key: paths for key, paths in sets.items() if key not in others}


def _finest(root, sets, rows):
    """Return the set whose labels determine the labels of all other sets, or None. If there is such a set, log a
    warning that names the other sets."""
    labels = {key: _labels(rows[key]) for key in sets}
    finest = max(labels, key=lambda key: len({*labels[key].values()}))
    for other in labels.values():
        if other.keys() != labels[finest].keys():
            return None
        pairs = {(label, other[image]) for image, label in labels[finest].items()}
        if len(pairs) > len({*labels[finest].values()}):
            return None
    others = [paths[0] for key, paths in sets.items() if key != finest]
    logger.warn(
        f"{root}: {os.path.basename(sets[finest][0])} has the most classes and is used; for other classes, import "
        f"{some(others)}"
    )
    return finest
