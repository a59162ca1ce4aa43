"""Write the predictions of an evaluation to a CSV file (--predictions).

The file contains one row per image, in the order of the data set. Without --multi-label, the columns are image
(images.Image.name), label, prediction, class and predicted_class (the names of label and prediction), then label_1,
class_1, probability_1 and so on for the most probable classes, at most five; fields are empty for classes with a NaN
logit and for probabilities that are not finite. With --multi-label, the columns are image, labels and prediction (class
names separated by "|"), then probability_NAME for each class. `python -m paddle_resnet.predict --csv` writes the same
columns, except for label, class and labels.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from paddle_resnet.data.formats import folder
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils import outputs
from paddle_resnet.utils.errors import RunError
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paddle_resnet.data.images import Image


def write(path: str | Path, images: Sequence[Image], columns: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Write the CSV file atomically.

    Args:
        path: path of the file.
        images: result of list_images.
        columns, rows: table without the column of the image, with one row per image (tasks.Task.predictions).
    Raises:
        RunError: the file cannot be written.
    """
    try:
        with outputs.replaced(path) as partial, open(partial, "w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["image", *columns])
            writer.writerows([image.name, *row] for image, row in zip(images, rows, strict=True))
    except OSError as e:
        raise RunError(f"{path}: cannot be written ({e.strerror}); free disk space or choose a different file") from e


def class_names(known: Sequence[str], count: int) -> list[str]:
    """Return the names of `count` classes in label order. Classes without a name in `known` have their label as the
    name."""
    return [*known, *map(str, range(len(known), count))]


def list_images(
    image_root: str,
    data_format: str,
    skip_list: str | None,
    allow_outside: bool,
    count: int,
    is_multi_label: bool = False,
) -> list[Image]:
    """List the validation images in the order in which the loader reads them.

    Args:
        image_root, data_format, skip_list, allow_outside: values of the flags with these names.
        count: expected number of images.
        is_multi_label: value of --multi-label.
    Returns:
        [Image] of the validation images.
    Raises:
        RunError: the number of images is not `count`.
        UsageError: the data set or the skip list can no longer be read.
    """
    root = DataRoot(image_root, data_format, allow_outside, skip_list=skip_list, is_multi_label=is_multi_label)
    images = root.kept(root.listed(Mode.EVAL, folder.own_classes(image_root, Mode.EVAL)))
    if len(images) != count:
        raise RunError(
            f"--image-root {image_root}: had {count} validation images at the start and has {len(images)} now; "
            "evaluate again"
        )
    return images
