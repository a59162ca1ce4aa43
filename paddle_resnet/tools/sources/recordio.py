"""Read RecordIO files of MXNet with any names, also with several labels per image."""

import os

from paddle_resnet.data.formats import recordio as record_files
from paddle_resnet.data.images import Image, readable
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular

PATTERN = r".+\.rec"


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in RecordIO files.

    Args:
        source: folder with a file for each split.
        options: Options. label_index chooses one of several labels.
    Returns:
        ({split: [Image]}, None, because the files contain no class names)
    Raises:
        UsageError: there are no files, or none for training; a file is damaged; an image has several labels, and
            label_index is None; or a label is not a class.
    """
    entries = []
    for split, paths in splits.files(source, PATTERN, options).items():
        for path in paths:
            entries += [(split, path, *record) for record in _records(path, options)]
    labels = [label for *_, label in entries]
    flag = None if options.label_index is None else "--label-index"

    def place(i):
        return f"{entries[i][1]}: record at byte {entries[i][2]}"

    numbers, _ = splits.numbered(source, labels, None, place, flag=flag)
    found = {}
    for (split, path, start, _), label in zip(entries, numbers, strict=True):
        name = f"{os.path.relpath(path, source)}@{start}/{start:012d}"
        found.setdefault(split, []).append(Image(name, path, label, read_image, (start,)))
    return splits.train_and_val(source, found), None


def read_image(path: str, offset: int) -> bytes:
    """Return the image in the record at an offset in bytes. Raise UsageError if the record is damaged."""
    with open_regular(path) as f:
        f.seek(offset)
        try:
            return record_files.content(f)[1]
        except record_files.DAMAGED as e:
            raise _damaged(path, offset) from e


def _records(path, options):
    """Return [(offset, label)] of the records in a file."""
    found, offset = [], 0
    with readable(path), open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        while offset < size:
            try:
                end = record_files.record_end(f, offset, size)
                f.seek(offset)
                labels, _ = record_files.content(f)
            except record_files.DAMAGED as e:
                raise _damaged(path, offset) from e
            label = splits.one_of(labels, options.label_index, f"{path}: the record at byte {offset}")
            found.append((offset, int(label) if label.is_integer() else label))
            offset = end
    return found


def _damaged(path, offset):
    return UsageError(f"{path}: damaged at byte {offset}; write or copy it again")
