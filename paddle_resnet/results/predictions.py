"""Write the predictions of an evaluation to a CSV file (--predictions).

The file contains one row per image, in the order of the data set. The columns are image (images.Image.name), label,
prediction, class and predicted_class (the names of label and prediction), then label_1, class_1, probability_1 and so
on for the most probable classes, at most five. `python -m paddle_resnet.predict --csv` writes the same columns, except
for label and class. Fields are empty for classes with a NaN logit and for probabilities that are not finite.
"""

from __future__ import annotations

import csv
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.data.formats import folder
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils import label_metrics, outputs
from paddle_resnet.utils.errors import RunError
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np

    from paddle_resnet.data.images import Image

# Start of the names of the columns with probabilities of a multi-label network.
PROBABILITY = "probability_"


def write(path: str | Path, images: Sequence[Image], predictions: np.ndarray, names: Sequence[str]) -> None:
    """Write the CSV file atomically.

    Args:
        path: path of the file.
        images: result of list_images.
        predictions: entry "predictions" of the result of program.run: [images, 1 + 2 k], the label, the k most probable
            classes and their probabilities.
        names: class names of all outputs of the network.
    Raises:
        RunError: the file cannot be written.
    """
    k = predictions.shape[1] // 2
    header = ["image", "label", "prediction", "class", "predicted_class"]
    header += top_columns(k)
    try:
        with outputs.replaced(path) as partial, open(partial, "w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(header)
            for image, (label, *row) in zip(images, predictions.tolist(), strict=True):
                named = [(int(c), names[int(c)]) if c < len(names) else ("", "") for c in row[:k]]
                top = [(c, name, p) for (c, name), p in zip(named, row[k:], strict=True)]
                writer.writerow([image.name, int(label), top[0][0], names[int(label)], top[0][1], *top_cells(top)])
    except OSError as e:
        raise RunError(f"{path}: cannot be written ({e.strerror}); free disk space or choose a different file") from e


def write_multi_label(
    path: str | Path, images: Sequence[Image], scores: np.ndarray, thresholds: np.ndarray, names: Sequence[str]
) -> None:
    """Write the CSV file of a multi-label network atomically: the columns image, labels and prediction (class names,
    separated by "|"), and a column with the probability of each class, probability_NAME. For the other arguments and
    RunError, see write.

    Args:
        scores: logits and labels of the images, float32 [images, 2 * classes].
        thresholds: threshold of each class.
    """
    logits, labels = np.split(scores, 2, axis=1)
    probabilities = label_metrics.probabilities(logits)
    try:
        with outputs.replaced(path) as partial, open(partial, "w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["image", "labels", "prediction", *(PROBABILITY + name for name in names)])
            for image, label, values in zip(images, labels > 0.5, probabilities, strict=True):
                sets = [joined(np.flatnonzero(chosen), names) for chosen in (label, values >= thresholds)]
                writer.writerow([image.name, *sets, *(f"{p:.7g}" for p in values.tolist())])
    except OSError as e:
        raise RunError(f"{path}: cannot be written ({e.strerror}); free disk space or choose a different file") from e


def joined(labels: Iterable[int], names: Sequence[str]) -> str:
    """Return the names of classes, separated by "|"."""
    return "|".join(names[label] for label in labels)


def class_names(known: Sequence[str], count: int) -> list[str]:
    """Return the names of `count` classes in label order. Classes without a name in `known` have their label as the
    name."""
    return [*known, *map(str, range(len(known), count))]


def top_columns(k: int) -> list[str]:
    """Return the column names for the k most probable classes."""
    return [f"{name}_{i}" for i in range(1, k + 1) for name in ("label", "class", "probability")]


def top_cells(top: Iterable[tuple[int | str, str, float]]) -> list[Any]:
    """Return the table cells of one image, in the order of the column names from top_columns(). `top` is [(label, class
    name, probability)]."""
    return [cell for label, name, p in top for cell in (label, name, f"{p:.7g}" if math.isfinite(p) else "")]


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
        [Image].
    Raises:
        RunError: the number of images is not `count`.
        UsageError: the data set or the skip list can no longer be read.
    """
    root = DataRoot(image_root, data_format, allow_outside, skip_list=skip_list, is_multi_label=is_multi_label)
    images = root.listed(Mode.EVAL, folder.own_classes(image_root, Mode.EVAL))
    images = [image for image in images if os.path.normpath(image.name) not in root.skip]
    if len(images) != count:
        raise RunError(
            f"--image-root {image_root}: had {count} validation images at the start and has {len(images)} now; "
            "evaluate again"
        )
    return images
