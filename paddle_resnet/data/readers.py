"""Readers for all storage formats. Each reader opens a split as a DataSet for the DALI pipeline.

`DataSet.read` adds the DALI reader of the storage format to the pipeline under construction. docs/data.md describes the
layout of each format.

The readers disable mmap, because truncating a mapped file would kill the process with SIGBUS. The exception is DALI's
LMDB reader, which always uses mmap (see truncation.py).

Order of the images: class folders and file lists are fully shuffled before each epoch. Record files are read in stored
order through a buffer of SHUFFLE_BUFFER images, from which the next image is drawn at random. In addition, TFRecord and
WebDataset shards are read in a different random order in each epoch. All processes use the same order.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.tfrecord import FixedLenFeature, VarLenFeature, int64, string

from paddle_resnet.data import listing, numbering, records, sniffer
from paddle_resnet.data.bad_images import MAX_PIXELS
from paddle_resnet.data.indexes import open_index
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command
from paddle_resnet.utils.mode import Mode

# Number of images in the shuffle buffer of each process: about 450 MB for ImageNet, whose image files have 110 kB on
# average. The buffer may be much smaller than the split, because `dataset convert` writes images in random order.
SHUFFLE_BUFFER = 4096
# Number of labels to check before step 1, evenly spaced over the split.
CHECKED_LABELS = 256


@dataclass
class DataSet:
    """One split of a data set.

    Attributes:
        data_format: one of listing.STORAGE_FORMATS.
        size: number of images in the entire split, not per process.
        classes: class names in label order; for class folders, the folder names.
        read: read(name, shard_id, num_shards, shuffle) -> (encoded images, uint8 [bytes]; labels, int64 [1]), called
            while a DALI pipeline is being defined. In each process, the reader repeats the last image to fill the last
            batch, so that every process runs the same number of steps. ShardIterator removes the repeated images.
        digest: sha256 that identifies the images and their order. The hash covers the names and labels of image files.
            For record files, the hash covers the file names, the offsets of the records, and the labels that were read.
        files, labels: path relative to image_root and label (int64 array) of each image, in list order; None for record
            files, whose labels are not read in advance.
        has_reader: whether `read` adds a DALI reader with the given name.
        records: function that yields the listing.Image of each record in stored order, or None for image files.
        checked: stored labels of the records that were read in advance.
    """

    data_format: str
    size: int
    classes: list
    read: Callable
    digest: str
    class_names: list = None
    files: list = None
    labels: np.ndarray = None
    has_reader: bool = True
    records: Callable = None
    checked: list = None

    def __post_init__(self):
        self.class_names = self.class_names or self.classes


def open_split(
    image_root,
    data_format,
    mode,
    num_of_class,
    seed,
    skip=frozenset(),
    allow_outside=False,
    allow_empty=False,
    trained=None,
    label_offset=numbering.AUTO,
    allow_one_class=False,
):
    """Open the split that --image-root and --data-format specify.

    Args:
        image_root: the folder that contains both splits.
        data_format: one of listing.STORAGE_FORMATS, or "auto" to detect and log the format.
        mode: Mode.TRAIN or Mode.EVAL.
        num_of_class: number of network outputs. If None, only classes.txt and class folders define the classes.
        seed: seed of the training order.
        skip: names (listing.Image.name) of images to omit. If a class becomes empty, the labels of the other classes do
            not change.
        allow_outside: whether a file list may contain files outside image_root.
        allow_empty: whether class folders in train/ may be empty.
        trained, label_offset: see numbering.establish.
        allow_one_class: whether all training images may belong to one class.
    Returns:
        DataSet.
    Raises:
        UsageError: a file is missing, incomplete or damaged; the network has no output for a label; or
            numbering.establish, list_folder or list_filelist raises UsageError.
    """
    image_root = str(image_root)
    stored_as = listing.detect(image_root, mode) if data_format == "auto" else data_format
    content = "train/ and val/" if stored_as in listing.FILE_FORMATS else f"the {stored_as} files"
    listing.check_root(image_root, content)
    numbers = numbering.establish(image_root, mode, data_format, num_of_class, allow_outside, label_offset, trained)
    if stored_as in listing.FILE_FORMATS:
        options = allow_outside, allow_empty, numbers, allow_one_class
        data_set = _files(stored_as, image_root, mode, num_of_class, seed, skip, *options)
    else:
        data_set = RECORD_READERS[stored_as](image_root, mode, num_of_class, seed, skip, numbers)
        if numbers.offset:
            digest = _digest(data_set.digest, numbers.offset)
            data_set = replace(data_set, read=_shifted(data_set.read, numbers.offset), digest=digest)
        labels = {label - numbers.offset for label in data_set.checked}
        if mode is Mode.TRAIN and data_set.size == len(data_set.checked) and len(labels) == 1:
            listing.check_one_class(image_root, data_set.classes, labels.pop(), allow_one_class)
    if data_format == "auto":
        logger.info(f"--data-format auto: the {mode.value} split in {image_root} has the format {stored_as}")
    return replace(data_set, class_names=numbers.class_names or data_set.classes)


def _shifted(read, offset):
    """Return DataSet.read with labels that are reduced by `offset`."""

    def shifted(name, shard_id, num_shards, shuffle):
        encoded, label = read(name, shard_id, num_shards, shuffle)
        return encoded, label - np.int64(offset)

    return shifted


def _files(
    data_format, image_root, mode, num_of_class, seed, skip, allow_outside, allow_empty, numbers, allow_one_class
):
    """Return the DataSet of class folders or a file list; see open_split, listing.list_folder and list_filelist."""
    if data_format == "folder":
        known = numbers.classes, numbers.is_trained
        files, labels, classes = listing.list_folder(image_root, mode, num_of_class, skip, *known)
    else:
        files, labels, classes = listing.list_filelist(image_root, mode, num_of_class, allow_outside, numbers.offset)
        classes = numbers.classes
    if not files:
        remedy = sniffer.advice(image_root) or f"add images ({records.IMAGE_ENDINGS})"
        raise UsageError(f"--image-root {image_root}: {mode.value}/ contains no images in class folders; {remedy}")
    if classes is None:
        classes = listing.numbers(None if num_of_class is None else max(labels) + 1)
    listing.check_classes(image_root, mode, data_format, labels, classes, allow_empty, allow_one_class)
    if skip:
        kept = [i for i, name in enumerate(files) if os.path.normpath(name) not in skip]
        files, labels = [files[i] for i in kept], [labels[i] for i in kept]
        if not files:
            raise UsageError(f"--image-root {image_root}: --skip-list leaves no {mode.value} images; shorten the list")
        listing.check_classes(image_root, mode, data_format, labels, classes, True, allow_one_class)
    if data_format == "filelist":
        listing.check_listed(image_root, mode, files)
    digest = _digest("\n".join([*files, *map(str, labels)]))
    in_list = files, np.array(labels, np.int64)
    if mode is Mode.TRAIN:
        # DALI's shuffle has a fixed seed, so the list is shuffled here with --dali-random-seed.
        order = np.random.RandomState(seed).permutation(len(files)).tolist()
        files = [files[i] for i in order]
        labels = [labels[i] for i in order]

    read = _file_reader(image_root, files, labels)
    return DataSet(data_format, len(files), classes, read, digest, classes, *in_list)


def encoded_images(batches):
    """Return a DataSet that reads encoded images without labels. `batches` yields each batch as a list of uint8 arrays
    [size], one per image."""

    def read(name, shard_id, num_shards, shuffle):
        encoded = fn.external_source(source=batches, name=name, dtype=types.UINT8, ndim=1)
        return encoded, fn.constant(idata=-1, dtype=types.INT64, shape=[1])

    return DataSet("filelist", 0, [], read, "")


def image_files(batches, shorter_side):
    """Return a DataSet that reads image files without labels. `batches` yields each batch as a list of paths (bytes).
    DALI raises RuntimeError for an image that has more than bad_images.MAX_PIXELS, or would have after its shorter side
    is resized to `shorter_side` pixels."""

    def read(name, shard_id, num_shards, shuffle):
        paths = fn.external_source(source=map(_padded, batches), name=name, dtype=types.UINT8, ndim=1)
        encoded = fn.io.file.read(paths, dont_use_mmap=True)
        sides = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.INT64)
        short, long = fn.reductions.min(sides), fn.reductions.max(sides)
        is_large = (short * long > MAX_PIXELS) | (shorter_side**2 * long > MAX_PIXELS * short)
        # The reshape deliberately fails for large images. It does not copy data.
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
    class. Both are drawn uniformly and with replacement. The draws depend only on seed, epoch, rank and the number of
    images per epoch.

    Args:
        data_set: DataSet with labels.
        image_root: folder of the data set.
        seed: value of --dali-random-seed.
        rank: rank of the process.
        batch_size, steps: images per batch, and batches per epoch.
        epoch, step: position of the first batch; `step` may be the end of the epoch.
    """

    def __init__(self, data_set, image_root, seed, rank, batch_size, steps, epoch=0, step=0):
        self._root, self._files, self._labels = str(image_root), data_set.files, data_set.labels
        self._seed, self._rank = seed, rank
        self._batch_size, self._steps = batch_size, steps
        self._next = epoch * steps + step
        self._by_class = np.argsort(self._labels, kind="stable")
        _, self._starts, self._counts = np.unique(self._labels[self._by_class], return_index=True, return_counts=True)
        self._epoch, self._drawn = None, None

    def __call__(self):
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


def balanced(data_set, sampler):
    """Return a copy of the data set whose training images are drawn by `sampler`, a BalancedSampler."""

    def read(name, shard_id, num_shards, shuffle):
        if not shuffle:
            return data_set.read(name, shard_id, num_shards, shuffle)
        types_of = {"dtype": [types.UINT8, types.INT64], "ndim": [1, 1]}
        paths, labels = fn.external_source(source=sampler, num_outputs=2, **types_of)
        return fn.io.file.read(paths, dont_use_mmap=True), labels

    return replace(data_set, read=read, has_reader=False)


def _digest(*parts):
    """Return the sha256 of strings, numbers and arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _file_reader(image_root, files, labels):
    """Return DataSet.read for image files below image_root."""

    def read(name, shard_id, num_shards, shuffle):
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

    return read


def recordio(image_root, mode, num_of_class, seed, skip, numbers):
    """Open MXNet RecordIO files: IMAGE_ROOT/train.rec and val.rec with the indexes train.idx and val.idx.

    For the arguments, the returned DataSet and the exceptions of recordio() and the other record readers, see
    open_split.
    """
    shards, indexes, data_set = _open_shards(image_root, mode, "recordio", num_of_class, skip, numbers)

    def read(name, shard_id, num_shards, shuffle):
        encoded, label = fn.readers.mxnet(
            path=shards,
            index_path=[index.path for index in indexes],
            dont_use_mmap=True,
            **_reader_arguments(name, shard_id, num_shards, shuffle, data_set.size, seed),
        )
        return encoded, _to_integer(_single(label))

    return replace(data_set, read=read)


def tfrecord(image_root, mode, num_of_class, seed, skip, numbers):
    """Open TFRecord shards: IMAGE_ROOT/train-00000-of-00008 ... and val-... or validation-..., each with an index.

    Each record has the features image/encoded (bytes) and image/class/label (one int64).
    """
    shards, indexes, data_set = _open_shards(image_root, mode, "tfrecord", num_of_class, skip, numbers)

    def read(name, shard_id, num_shards, shuffle):
        features = fn.readers.tfrecord(
            path=shards,
            index_path=[index.path for index in indexes],
            features={
                records.TFRECORD_IMAGE: FixedLenFeature((), string, ""),
                # DALI never uses the default value -1. With FixedLenFeature, an empty or float label would come back as
                # arbitrary memory; with VarLenFeature, it has no elements.
                records.TFRECORD_LABEL: VarLenFeature(int64, -1),
            },
            dont_use_mmap=True,
            **_reader_arguments(name, shard_id, num_shards, shuffle, data_set.size, seed),
            **_shard_order(shuffle, seed),
        )
        return features[records.TFRECORD_IMAGE], _single(features[records.TFRECORD_LABEL])

    return replace(data_set, read=read)


def lmdb(image_root, mode, num_of_class, seed, skip, numbers):
    """Open a Caffe LMDB: the folders IMAGE_ROOT/train_lmdb and val_lmdb, with encoded images."""
    [path] = listing.shards(image_root, mode, "lmdb")
    if _skipped(skip, path):
        raise UsageError(
            f"{path}: LMDBs do not support --skip-list; convert the original data set again with "
            f"`{command('dataset', 'convert', '--skip-list')}`"
        )
    classes = numbers.classes
    size, labels = records.lmdb_labels(path, CHECKED_LABELS)
    if size == 0:
        raise UsageError(f"{path}: contains no records; write it again")
    listing.check_count(image_root, mode, "lmdb", size)
    listing.check_labels(path, labels, num_of_class, classes, numbers.offset)

    def read(name, shard_id, num_shards, shuffle):
        encoded, label = fn.readers.caffe(
            path=path, **_reader_arguments(name, shard_id, num_shards, shuffle, size, seed)
        )
        return encoded, fn.cast(_single(label), dtype=types.INT64)

    digest = _digest(size, os.path.getsize(os.path.join(path, "data.mdb")), labels)
    names = classes or listing.numbers(num_of_class)
    records_of = functools.partial(listing.records_of, path, "lmdb", None, numbers.offset)
    return DataSet("lmdb", size, names, read, digest, records=records_of, checked=labels)


def webdataset(image_root, mode, num_of_class, seed, skip, numbers):
    """Open WebDataset tar shards: IMAGE_ROOT/train-000000.tar ... and val-..., each with an index.

    A sample consists of an image (KEY.jpg, KEY.png ...) and its label in decimal digits (KEY.cls). The names of
    shards may have a prefix before `train`, `val` or `validation`.
    """
    shards, indexes, data_set = _open_shards(image_root, mode, "webdataset", num_of_class, skip, numbers)

    def read(name, shard_id, num_shards, shuffle):
        encoded, digits = fn.readers.webdataset(
            paths=shards,
            index_paths=[index.path for index in indexes],
            ext=[";".join(records.IMAGE_EXTENSIONS), "cls"],
            case_sensitive_extensions=False,
            missing_component_behavior="error",
            dont_use_mmap=True,
            **_reader_arguments(name, shard_id, num_shards, shuffle, data_set.size, seed),
            **_shard_order(shuffle, seed),
        )
        return encoded, _decimal(digits)

    return replace(data_set, read=read)


def _single(label):
    """Add DALI operators that return a label with shape [1]. For a record without exactly one label, they fail with an
    error that bad_images.bad_record recognizes."""
    # If a TFRecord has no label, DALI returns a scalar with the value of an earlier label. The slice rejects scalars.
    return fn.reshape(label[0:], shape=[1])


def _to_integer(number):
    """Add DALI operators that convert a float label to int64. A label that is not an integer becomes -1."""
    label = fn.cast(number, dtype=types.INT64)
    is_whole = fn.cast(fn.cast(label, dtype=types.FLOAT) == number, dtype=types.INT64)
    return (label + 1) * is_whole - 1


def _decimal(text):
    """Add DALI operators that parse a label, int64 [1], from up to LABEL_DIGITS ASCII digits and optional trailing
    blanks. Any other text becomes -1."""
    places = records.LABEL_DIGITS
    length = text.shape()
    is_digit = fn.cast((text >= ord("0")) & (text <= ord("9")), dtype=types.INT64)
    is_blank = fn.cast((text == ord(" ")) | (text >= ord("\t")) & (text <= ord("\r")), dtype=types.INT64)
    count = fn.reductions.sum(is_digit, axes=[0], keep_dims=True)
    blanks = fn.reductions.sum(is_blank, axes=[0], keep_dims=True)
    weights = types.Constant(np.array([10**i for i in reversed(range(places))], dtype=np.int32), device="cpu")
    weights = fn.slice(weights, places - count, length, axes=[0], out_of_bounds_policy="pad")  # pad with zero weights
    digits = (fn.cast(text, dtype=types.INT64) - ord("0")) * is_digit
    number = fn.reductions.sum(digits * weights, axes=[0], keep_dims=True)
    in_front = fn.reductions.sum(is_digit * fn.cast(weights > 0, dtype=types.INT64), axes=[0], keep_dims=True)
    is_number = (count > 0) & (count <= places) & (in_front == count) & (count + blanks == length)
    return (number + 1) * fn.cast(is_number, dtype=types.INT64) - 1


def _reader_arguments(name, shard_id, num_shards, shuffle, size, seed):
    """Return the arguments that all record readers share."""
    arguments = {"name": name, "shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    if not shuffle:
        return {**arguments, "stick_to_shard": True}
    return {
        **arguments,
        # In each epoch, the reader reads a different shard. The shuffle buffer never mixes images of two epochs.
        "stick_to_shard": False,
        "random_shuffle": True,
        "initial_fill": min(SHUFFLE_BUFFER, -(-size // num_shards)),
        "seed": seed + shard_id,
    }


def _shard_order(shuffle, seed):
    # All processes use the same seed, so all processes read the shards in the same order.
    return {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed} if shuffle else {}


def _skipped(skip, shard):
    """Return the offsets of the skipped records in a record file as strings. An entire file cannot be skipped."""
    file = os.path.basename(shard)
    for name in skip:
        if name.partition("/")[0] == file:
            raise UsageError(f"--skip-list: {name} is an entire file of records; write a line {file}@OFFSET per record")
    named = (name.rpartition("@") for name in skip)
    return [place for name, _, place in named if name == file]


def _open_shards(image_root, mode, data_format, num_of_class, skip, numbers):
    """Open a split's record files and check some labels. Return (paths, [Index], DataSet without `read`)."""
    classes = numbers.classes
    shards, indexes, counts = [], [], {}
    for shard in listing.shards(image_root, mode, data_format):
        places = _skipped(skip, shard)
        for place in places:
            if not re.fullmatch("[0-9]{1,18}", place):
                raise UsageError(f"{shard}@{place}: no offset after @; remove the line from --skip-list")
        places = frozenset(map(int, places))
        index = open_index(shard, data_format, places)
        counts[os.path.basename(shard)] = len(index) + len(places)
        if len(index):
            shards.append(shard)
            indexes.append(index)
    if not shards:
        raise UsageError(f"--image-root {image_root}: --skip-list leaves no {mode.value} images; shorten the list")
    listing.check_count(image_root, mode, data_format, sum(counts.values()))
    if data_format == "webdataset":
        listing.check_samples(image_root, mode, counts)
    ends = np.cumsum([len(index) for index in indexes])
    size = int(ends[-1])
    labels = []
    for i in np.unique(np.linspace(0, size - 1, CHECKED_LABELS).astype(int)).tolist():
        k = int(np.searchsorted(ends, i, side="right"))
        labels.append(records.read_label(shards[k], data_format, *indexes[k].labels[i - ends[k]].tolist()))
        listing.check_labels(shards[k], labels[-1:], num_of_class, classes, numbers.offset)
    parts = [
        part for shard, index in zip(shards, indexes, strict=True) for part in (os.path.basename(shard), index.images)
    ]
    digest = _digest(*parts, *(index.labels for index in indexes), labels)

    def records_of():
        for shard, index in zip(shards, indexes, strict=True):
            yield from listing.records_of(shard, data_format, index, numbers.offset)

    names = classes or listing.numbers(num_of_class)
    return shards, indexes, DataSet(data_format, size, names, None, digest, records=records_of, checked=labels)


RECORD_READERS = {"recordio": recordio, "tfrecord": tfrecord, "lmdb": lmdb, "webdataset": webdataset}
