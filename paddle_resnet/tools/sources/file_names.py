"""Read images whose classes are in the names of the files."""

import os
from collections import Counter, defaultdict

from paddle_resnet.data.class_in_name import class_of, is_ambiguous
from paddle_resnet.data.image_search import images_below
from paddle_resnet.data.images import Image, some
from paddle_resnet.data.split_names import split_of
from paddle_resnet.tools.sources import image_files, splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

_REMEDY = "write labels.csv with the columns file_name and label to this folder, and import labels.csv"


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in a folder and its subfolders. The name of an image begins with its class, see
    class_in_name.class_of. Splits are the folders with names of splits; a validation or test split without any class in
    its names is left out, with a message.

    Args:
        source: folder with the images.
        options: Options of the import.
    Returns:
        ({split: [Image]}, sorted class names)
    Raises:
        UsageError: there are no training images; a name contains no class, or its class is ambiguous; there is only one
            class, or one without training images; or a class has only one image.
    """
    found = defaultdict(list)
    for path in images_below(source):
        folders = os.path.dirname(path).split(os.sep)
        found[next(filter(None, map(split_of, reversed(folders))), "train")].append(path)
    for split in [split for split in found if split != "train" and not any(map(class_of, found[split]))]:
        paths = found.pop(split)
        logger.info(f"{source}: {counted(len(paths), 'image')} without a class in the name left out ({some(paths)})")
    found = splits.train_and_val(source, found)
    paths = [path for split in found.values() for path in split]
    if without := [path for path in paths if class_of(path) is None]:
        raise UsageError(
            f"{source}: {counted(len(without), 'image')} without a class before a number in the name "
            f"({some(without)}); remove these images, or {_REMEDY}"
        )
    counts = Counter(map(class_of, paths))
    for path in paths:
        if is_ambiguous(class_of(path)):
            raise UsageError(
                f"{source}: the class in the name of {path} is ambiguous ({class_of(path)} or a part of it); {_REMEDY}"
            )
    shown = some([f"{name} ({counted(counts[name], 'image')})" for name in sorted(counts)])
    if len(counts) < 2:
        raise UsageError(f"{source}: the names of all images begin with one class, {shown}; {_REMEDY}")
    if few := [f"{name} ({path})" for path in paths if counts[name := class_of(path)] < 2]:
        raise UsageError(
            f"{source}: {counted(len(few), 'class', 'classes')} with only one image ({some(few)}); add images, remove "
            f"these images, or {_REMEDY}"
        )
    logger.info(
        f"{source}: the class of an image is its file name before the last number: {len(counts)} classes, {shown}"
    )
    classes = sorted(counts)
    splits.warn_of_spelling(classes)
    label_of = {name: label for label, name in enumerate(classes)}
    images = {
        split: [image_files.image(source, path, label_of[class_of(path)]) for path in paths]
        for split, paths in found.items()
    }
    splits.check_validation(source, images, classes)
    return images, classes
