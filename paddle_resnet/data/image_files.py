"""Formats with one file per image: class folders and file lists.

The module imports DALI only in `read`, so that the tools' worker processes start without this import.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from paddle_resnet.data.images import Image
from paddle_resnet.utils.files import open_regular


class Files(NamedTuple):
    """The images of a split, in stored order.

    Attributes:
        names: paths relative to image_root.
        labels: labels of the images.
        classes: class names in label order: those of the class folders, or those of filelist.label_names; or None.
        lines: line number of each image in a file list; None for class folders.
    """

    names: list[str]
    labels: list[int]
    classes: list[str] | None
    lines: list[int] | None = None

    def images(self, image_root: str) -> Iterator[Image]:
        """Yield the Image of each file."""
        for name, label in zip(self.names, self.labels, strict=True):
            yield Image(name, os.path.join(image_root, name), label)


def read(
    image_root: str, files: list[str], labels: list[int], name: str, shard_id: int, num_shards: int, shuffle: bool
) -> tuple[Any, Any]:
    """Add DALI's reader of image files to the pipeline under construction, see data/formats/__init__.py.

    Args:
        image_root: folder that contains the files.
        files, labels: paths relative to image_root and labels, in the order of the first epoch.
    """
    from nvidia.dali import fn, types

    encoded, label = fn.readers.file(
        name=name,
        file_root=image_root,
        files=files,
        labels=labels,
        shard_id=shard_id,
        num_shards=num_shards,
        shuffle_after_epoch=shuffle,
        stick_to_shard=not shuffle,
        pad_last_batch=True,
        dont_use_mmap=True,
    )
    return encoded, fn.cast(label, dtype=types.INT64)


def verify(image: Image) -> tuple[bytes, int | None]:
    """Return (content of an image file, its label). Raise OSError if the file cannot be read."""
    with open_regular(image.path) as f:
        return f.read(), image.label
