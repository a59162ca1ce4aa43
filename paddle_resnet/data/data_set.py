"""DataSet: one split of a data set, as the DALI pipeline reads it; images without labels; balanced sampling.

Except for the LMDB reader, which always uses mmap, DALI's readers do not use mmap, because truncating a mapped file
would kill the process with SIGBUS.

Order of the training images: class folders and file lists are fully shuffled before each epoch. RecordIO files and
LMDBs are read in stored order through a buffer of at most shards.SHUFFLE_BUFFER images per process, from which the next
image is drawn at random. TFRecord and WebDataset shards are also read through a buffer of shards.SHUFFLE_BUFFER images,
but in each epoch, the shards are read in a different random order, which all processes share. For the order of Parquet
files, see formats/parquet.py.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_resnet.data.images import Image


@dataclass
class DataSet:
    """One split of a data set.

    Attributes:
        data_format: one of formats.FORMATS.
        size: number of images in the entire split, not per process.
        classes: names that identify the classes, in label order, see numbering.Numbering; numbers for classes without
            names.
        read: read(name, shard_id, num_shards, shuffle) -> (encoded images, uint8 [bytes]; labels, int64 [1] or, with
            --multi-label, float32 [number of network outputs]), called while a DALI pipeline is being defined;
            data/formats/__init__.py contains the contract of read(). ShardIterator removes the images that read()
            repeats at the end of an epoch.
        digest: sha256 that identifies the images and their order. The hash covers the names and labels of image files.
            For record files, the hash covers shards.Records.identity, the labels read before step 1 and the label
            offset.
        class_names: names for reports in label order; by default, `classes`.
        files, labels: path relative to image_root and label (int64 array) of each image, in list order; None for record
            files. With --multi-label, `labels` is None.
        has_reader: whether `read` adds a DALI reader with the given name.
        class_images: number of images of each class; None for record files, except with --multi-label. Invalid labels
            are not counted. The run stops when it reads an image with an invalid label.
        is_multi_label: whether images have any number of classes (--multi-label).
        records: function that yields the images.Image of each record in stored order, or None for image files.
    """

    data_format: str
    size: int
    classes: list[str]
    read: Callable[[str, int, int, bool], tuple[Any, Any]]
    digest: str
    class_names: list[str] | None = None
    files: list[str] | None = None
    labels: np.ndarray | None = None
    has_reader: bool = True
    records: Callable[[], Iterator[Image]] | None = None
    class_images: np.ndarray | None = None
    is_multi_label: bool = False

    def __post_init__(self):
        self.class_names = self.class_names or self.classes
        if self.class_images is None and self.labels is not None:
            labels, count = self.labels, len(self.classes)
            self.class_images = np.bincount(labels[(labels >= 0) & (labels < count)], minlength=count)


def shifted(read: Callable, offset: int) -> Callable:
    """Return DataSet.read with labels that are reduced by `offset`."""

    def read_shifted(*arguments, **options):
        encoded, label = read(*arguments, **options)
        return encoded, label - np.int64(offset)

    return read_shifted


def encoded_images(batches: Iterable[list[np.ndarray]]) -> DataSet:
    """Return a DataSet that reads encoded images without labels. `batches` yields each batch as a list of uint8 arrays
    [size], one per image."""

    from nvidia.dali import fn, types

    def read(name, shard_id, num_shards, shuffle):
        encoded = fn.external_source(source=batches, name=name, dtype=types.UINT8, ndim=1)
        return encoded, fn.constant(idata=-1, dtype=types.INT64, shape=[1])

    return DataSet("filelist", 0, [], read, "")


def image_files(batches: Iterable[list[bytes]], shorter_side: int) -> DataSet:
    """Return a DataSet that reads image files without labels. `batches` yields each batch as a list of paths (bytes).
    DALI raises RuntimeError for an image that has more than bad_images.MAX_PIXELS, or would have after its shorter side
    is resized to `shorter_side` pixels."""

    from nvidia.dali import fn, types

    from paddle_resnet.data.bad_images import MAX_PIXELS

    def read(name, shard_id, num_shards, shuffle):
        paths = fn.external_source(source=map(_padded, batches), name=name, dtype=types.UINT8, ndim=1)
        encoded = fn.io.file.read(paths, dont_use_mmap=True)
        sides = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.INT64)
        short, long = fn.reductions.min(sides), fn.reductions.max(sides)
        is_large = (short * long > MAX_PIXELS) | (shorter_side**2 * long > MAX_PIXELS * short)
        # The reshape, which copies no data, deliberately fails for large images.
        encoded = fn.reshape(encoded, shape=encoded.shape() + is_large)
        return encoded, fn.constant(idata=-1, dtype=types.INT64, shape=[1])

    return DataSet("filelist", 0, [], read, "")


def _padded(paths):
    """Return paths as uint8 [N, L], padded with null bytes, which end a path for DALI. With a single array, DALI makes
    one copy instead of N."""
    return np.array(paths).view(np.uint8).reshape(len(paths), -1)


class BalancedSampler:
    """Draws an endless sequence of training batches for one process (--balanced-sampling).

    Each image of an epoch is drawn in two steps: first a class from all classes that have images, then an image of this
    class. Classes and images are drawn uniformly and with replacement. The draws depend only on the images of each
    class, the seed, the epoch, the rank and the number of images per epoch.

    Args:
        data_set: DataSet with labels.
        image_root: folder of the data set.
        seed: value of --dali-random-seed.
        rank: rank of the process.
        batch_size, steps: images per batch, and batches per epoch.
        epoch, step: position of the first batch; `step` may be the end of the epoch.
    """

    def __init__(
        self,
        data_set: DataSet,
        image_root: str,
        seed: int,
        rank: int,
        batch_size: int,
        steps: int,
        epoch: int = 0,
        step: int = 0,
    ):
        self._root, self._files, self._labels = str(image_root), data_set.files, data_set.labels
        self._seed, self._rank = seed, rank
        self._batch_size, self._steps = batch_size, steps
        self._next = epoch * steps + step
        self._by_class = np.argsort(self._labels, kind="stable")
        _, self._starts, self._counts = np.unique(self._labels[self._by_class], return_index=True, return_counts=True)
        self._epoch, self._drawn = None, None

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (paths, labels) of the next batch: uint8 [batch_size, L], see _padded, and int64 [batch_size, 1]."""
        epoch, step = divmod(self._next, self._steps)
        self._next += 1
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        images = self._drawn[step * self._batch_size : (step + 1) * self._batch_size]
        paths = _padded([os.fsencode(os.path.join(self._root, self._files[i])) for i in images])
        return paths, self._labels[images, None]

    def _draw(self, epoch):
        random = np.random.Generator(np.random.PCG64([self._seed, epoch, self._rank]))
        classes = random.integers(len(self._starts), size=self._steps * self._batch_size)
        return self._by_class[self._starts[classes] + random.integers(self._counts[classes])]


def balanced(data_set: DataSet, sampler: BalancedSampler) -> DataSet:
    """Return a copy of the data set whose training images are drawn by `sampler`, a BalancedSampler."""

    from nvidia.dali import fn, types

    def read(name, shard_id, num_shards, shuffle):
        if not shuffle:
            return data_set.read(name, shard_id, num_shards, shuffle)
        types_of = {"dtype": [types.UINT8, types.INT64], "ndim": [1, 1]}
        paths, labels = fn.external_source(source=sampler, num_outputs=2, **types_of)
        return fn.io.file.read(paths, dont_use_mmap=True), labels

    return replace(data_set, read=read, has_reader=False)


def digest(*parts: object) -> str:
    """Return the sha256, as hexadecimal digits, of the concatenation of strings, numbers and arrays."""
    value = hashlib.sha256()
    for part in parts:
        value.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode(errors="surrogateescape"))
    return value.hexdigest()
