"""Read the Parquet files of Hugging Face's Hub, and the Arrow files of `save_to_disk`."""

import os

from paddle_resnet.data import parquet_files
from paddle_resnet.data.images import Image
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

PATTERN = r".+\.(parquet|arrow)"


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in Parquet or Arrow files.

    Args:
        source: folder with the files of each split, or a single file.
        options: Options of the import.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: pyarrow cannot be imported, a file is damaged or missing, a column is missing or ambiguous, files
            have different class names, there are no training images, or a label is not a class.
    """
    root = os.path.dirname(source) if os.path.isfile(source) else source
    found, names, first = {}, None, None
    for split, paths in splits.files(source, PATTERN, options).items():
        for path in paths:
            columns = parquet_files.columns(path, options.image_column, options.label_column)
            if first is not None and columns.classes != names:
                raise UsageError(f"{path}: contains different class names than {first}; import one of the data sets")
            names, first = columns.classes, first or path
            rows = parquet_files.rows(path, columns)
            found.setdefault(split, []).extend((path, columns.image, row) for row in rows)
    for split in [*found]:
        # The Hub stores test images without labels with the label -1.
        if split != "train" and all(row.label in (None, -1) for *_, row in found[split]):
            logger.info(
                f"{source}: {counted(len(found[split]), f'{split} image')} left out, because they have no label"
            )
            del found[split]
    found = splits.train_and_val(source, found)
    flat = [entry for entries in found.values() for entry in entries]

    def place(i):
        path, _, row = flat[i]
        return f"{path}: row {row.row} of group {row.group}"

    labels, names = splits.numbered(source, [row.label for *_, row in flat], names, place, flag="--label-column")
    labels = iter(labels)

    def image(path, column, row):
        # A hidden file would not be found in class folders.
        is_plain = row.name.isprintable() and not row.name.startswith(".") and row.name
        name = row.name if is_plain else f"{row.group:05d}{row.row:06d}"
        name = f"{os.path.relpath(path, root)}@{row.group}-{row.row}/{name}"
        return Image(name, path, next(labels), parquet_files.read_image, (row.group, row.row, column))

    return {split: [image(*entry) for entry in entries] for split, entries in found.items()}, names
