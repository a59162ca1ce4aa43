"""Parquet files of Hugging Face's `datasets`: IMAGE_ROOT/train-00000-of-00008.parquet ... and validation-... or
test-..., also NAME-train-...

A row contains an image file and a label, see data/parquet_files.py. DALI has no reader for Parquet, so Python reads the
rows. A row group is decompressed as a whole; therefore, the training order is a random order of the row groups, whose
rows are shuffled in windows of shards.SHUFFLE_BUFFER images.
"""

import os
import re
from typing import Any

import numpy as np

from paddle_resnet.data import parquet_files, shards, split_names
from paddle_resnet.data.images import Image
from paddle_resnet.utils.errors import UsageError, import_command
from paddle_resnet.utils.mode import Mode

NAMES = r"(?P<set>(.*[-_.])?{split})-\d+-of-(?P<total>\d+)(-[0-9a-f]{16})?\.parquet"
EXAMPLE = "{}-00000-of-00001.parquet"
HAS_READER = False


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return the paths of a split's Parquet files."""
    return split_names.find(image_root, mode, NAMES)


def stored_names(paths: list[str]) -> list[str] | None:
    """Return the class names in the metadata of the first file, or None. For exceptions, see parquet_files.columns."""
    names = parquet_files.columns(paths[0]).classes
    return None if names is None else list(names)


def index(image_root: str, mode: Mode, paths: list[str], skip: frozenset[str] = frozenset()) -> shards.Records:
    """Read the labels of all rows.

    Args:
        image_root, mode, paths, skip: see shards.index. A place is the number of a row in its file.
    Raises:
        UsageError: a file is missing, surplus or damaged, lacks a column, has different class names than the others or
            a label that is not a whole number from 0; a skipped row does not exist; no row is left; or pyarrow cannot
            be imported.
    """
    split_names.check_total(image_root, mode, NAMES, paths, "file")
    first, counts, rows = parquet_files.columns(paths[0]), {}, []
    for file, path in enumerate(paths):
        columns = parquet_files.columns(path)
        if columns.classes != first.classes:
            raise UsageError(f"{path}: contains different class names than {paths[0]}; use files of one data set")
        found = parquet_files.rows(path, columns)
        counts[os.path.basename(path)] = len(found)
        skipped = _skipped(skip, path, len(found))
        rows += [_checked(path, file, i, row) for i, row in enumerate(found) if i not in skipped]
    if not any(counts.values()):
        raise UsageError(f"--image-root {image_root}: the {mode.value} files contain no rows; download them again")
    if not rows:
        raise UsageError(f"--image-root {image_root}: --skip-list leaves no {mode.value} images; shorten the list")
    table = np.array(rows, np.int64)  # [rows, 5]: file, row, group, row in the group, label

    def images(label_offset):
        for file, row, *place in table.tolist():
            name = f"{os.path.basename(paths[file])}@{row}"
            yield Image(name, paths[file], None, "parquet", (*place, first.image), label_offset)

    def sample(count):
        for file, row, *_, label in table.tolist():
            yield f"{paths[file]}@{row}", label

    identity = [part for path in paths for part in (os.path.basename(path), os.path.getsize(path))] + [table]
    return shards.Records(paths, counts, len(table), images, sample, identity)


def _skipped(skip, path, count):
    places = shards.skipped(skip, path)
    for place in places:
        if not (re.fullmatch("[0-9]{1,9}", place) and int(place) < count):
            raise UsageError(f"{path}: has no row {place}; remove {os.path.basename(path)}@{place} from --skip-list")
    return {*map(int, places)}


def _checked(path, file, i, row):
    if not isinstance(row.label, int) or not 0 <= row.label < 2**31:
        remedy = f"run {import_command(os.path.dirname(path) or '.')}"
        raise UsageError(
            f"{path}@{i}: has label {str(row.label)[:50]}, which is not a whole number from 0 to {2**31 - 1}; {remedy}"
        )
    return file, i, row.group, row.row, row.label


def read(
    records: shards.Records,
    name: str,
    shard_id: int,
    num_shards: int,
    shuffle: bool,
    seed: int,
    start: tuple[int, int] = (0, 0),
) -> tuple[Any, Any]:
    """Add a Python source to the pipeline under construction, see data/formats/__init__.py. `start` is the position
    (epoch, step) of the first batch."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    source = _Source(records, shard_id, num_shards, shuffle, seed, Pipeline.current().max_batch_size, start)
    types_of = {"dtype": [types.UINT8, types.INT64], "ndim": [1, 1]}
    return tuple(fn.external_source(source=source, num_outputs=2, **types_of))


class _Source:
    """Returns an endless sequence of batches: ([image file, uint8 [bytes]], [label, int64 [1]])."""

    def __init__(self, records, shard_id, num_shards, shuffle, seed, batch_size, start):
        self._images = list(records.images(0))
        self._first, end = (n * records.size // num_shards for n in (shard_id, shard_id + 1))
        # In training, the last partial batch is dropped, so that all processes read the same number of images.
        self._count = max(1, records.size // num_shards // batch_size) * batch_size if shuffle else end - self._first
        self._steps = -(-self._count // batch_size)
        self._shuffle, self._seed, self._batch_size = shuffle, seed, batch_size
        self._next = start[0] * self._steps + start[1]
        self._epoch = self._order = None

    def __call__(self):
        epoch, step = divmod(self._next, self._steps)
        self._next += 1
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        places = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        last = min(self._count, len(self._order)) - 1
        batch = [verify(self._images[i]) for i in self._order[np.minimum(places, last)].tolist()]
        return [np.frombuffer(data, np.uint8) for data, _ in batch], [np.array([label]) for _, label in batch]

    def _order_of(self, epoch):
        order = np.arange(len(self._images))
        if self._shuffle:
            random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            groups = [(image.path, image.place[0]) for image in self._images]
            parts = np.split(order, [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]])
            order = np.concatenate([parts[i] for i in random.permutation(len(parts))])
            for i in range(0, len(order), shards.SHUFFLE_BUFFER):
                random.shuffle(order[i : i + shards.SHUFFLE_BUFFER])
        return order[self._first :]


def verify(image: Image) -> tuple[bytes, int]:
    """Return (image file, label) of a row. Raise UsageError if the row contains no image or the file is damaged."""
    group, row, label, column = image.place
    return parquet_files.read_image(image.path, group, row, column), label
