"""Storage formats: one function a format, each describes a data set to the DALI pipeline.

A reader returns a `DataSet`, whose `read` adds the DALI operator to the pipeline under construction. docs/data.md has
the layout of each format.

Order. Class folders and file lists are shuffled as a whole before each epoch. Containers are read in stored order
through a buffer of SHUFFLE_BUFFER images, from which the next one is drawn at random; TFRecord and WebDataset visit
their shards in a new random order each epoch, the same on every process.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.tfrecord import FixedLenFeature, int64, string

from paddle_resnet.data import listing, records
from utils import logger
from utils.errors import UsageError
from utils.mode import Mode

# Images a process: about 450 MB of ImageNet's. For containers written in random order it only has to mix neighbours.
SHUFFLE_BUFFER = 4096
# Labels that are looked at before step 1, spread over the split.
CHECKED_LABELS = 256


@dataclass
class DataSet:
    """One split of a data set.

    Attributes:
        data_format: a key of FORMATS.
        size: number of images in the whole split.
        classes: class names in label order.
        read: read(name, shard_id, num_shards, shuffle) -> (encoded images [uint8 bytes], labels [1] int64), called
            while a DALI pipeline is being defined. Shards are padded to equal numbers of full batches by repeating
            their last image, so that every process makes the same number of steps; the iterator cuts the copies off.
        digest: sha256 of names and labels in the order of listing; None for containers.
    """

    data_format: str
    size: int
    classes: list
    read: Callable
    digest: str | None = None


def open_split(image_root, data_format, mode, num_of_class, seed, skip=frozenset()):
    """The data set behind --image-root and --data-format.

    Args:
        image_root: the folder that holds both splits.
        data_format: a key of FORMATS, or "auto": the one that image_root's content shows, which is logged.
        mode: Mode.TRAIN or Mode.EVAL.
        num_of_class: number of outputs of the network.
        seed: seed of the training order.
        skip: names of images to leave out, as listing.Image has them. A class may become empty and keeps its label.
    Returns:
        DataSet.
    Raises:
        UsageError: the data set cannot be used: a missing, partial or damaged file, labels that the network has no
            outputs for, and what the listing of class folders and file lists refuses.
    """
    image_root = str(image_root)
    if data_format == "auto":
        data_set = open_split(image_root, listing.detect(image_root, mode), mode, num_of_class, seed, skip)
        logger.info(f"--data-format auto: the {mode.value} split in {image_root} is {data_set.data_format}")
        return data_set
    if data_format in listing.FILES:
        return _files(data_format, image_root, mode, num_of_class, seed, skip)
    if not os.path.isdir(image_root):
        raise UsageError(f"--image-root {image_root} is no folder: name the one that holds the {data_format}")
    return FORMATS[data_format](image_root, mode, num_of_class, seed, skip)


def _files(data_format, image_root, mode, num_of_class, seed, skip):
    """Class folders and file lists, as listing.list_folder and list_filelist describe them."""
    files, labels, classes = listing.LISTINGS[data_format](image_root, mode, num_of_class)
    if not files:
        suffixes = ", ".join(records.IMAGE_SUFFIXES)
        raise UsageError(f"--image-root {image_root}: {mode.value}/ holds no images ({suffixes}): add some")
    if classes is None:
        classes = _numbers(max(labels) + 1)
    if skip:
        kept = [i for i, name in enumerate(files) if os.path.normpath(name) not in skip]
        files, labels = [files[i] for i in kept], [labels[i] for i in kept]
        if not files:
            raise UsageError(f"--skip-list leaves no image of {mode.value} in {image_root}: skip fewer")
    digest = hashlib.sha256("\n".join([*files, *map(str, labels)]).encode()).hexdigest()
    if mode is Mode.TRAIN:
        # DALI's own shuffle has a fixed seed and the same order in every run; this makes the order follow the seed.
        order = np.random.RandomState(seed).permutation(len(files)).tolist()
        files = [files[i] for i in order]
        labels = [labels[i] for i in order]

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
        )
        return encoded, fn.cast(label, dtype=types.INT64)

    return DataSet(data_format, len(files), classes, read, digest)


def recordio(image_root, mode, num_of_class, seed, skip):
    """MXNet RecordIO: IMAGE_ROOT/train.rec and val.rec, each with an index train.idx, val.idx.

    Arguments of all readers of containers as those of `open_split`.
    """
    shards, indexes, classes, size = _open_shards(image_root, mode, "recordio", num_of_class, skip)

    def read(name, shard_id, num_shards, shuffle):
        encoded, label = fn.readers.mxnet(
            path=shards,
            index_path=[index.path for index in indexes],
            **_container(name, shard_id, num_shards, shuffle, size, seed),
        )
        return encoded, fn.cast(label, dtype=types.INT64)

    return DataSet("recordio", size, classes, read)


def tfrecord(image_root, mode, num_of_class, seed, skip):
    """TFRecord shards: IMAGE_ROOT/train-00000-of-00008 ... and val-... or validation-..., each with an index.

    The features are image/encoded (bytes) and image/class/label (one number, the first class is 0).
    """
    shards, indexes, classes, size = _open_shards(image_root, mode, "tfrecord", num_of_class, skip)

    def read(name, shard_id, num_shards, shuffle):
        features = fn.readers.tfrecord(
            path=shards,
            index_path=[index.path for index in indexes],
            features={
                records.TFRECORD_IMAGE: FixedLenFeature((), string, ""),
                records.TFRECORD_LABEL: FixedLenFeature([1], int64, -1),
            },
            **_container(name, shard_id, num_shards, shuffle, size, seed),
            **_shard_order(shuffle, seed),
        )
        return features[records.TFRECORD_IMAGE], fn.cast(features[records.TFRECORD_LABEL], dtype=types.INT64)

    return DataSet("tfrecord", size, classes, read)


def lmdb(image_root, mode, num_of_class, seed, skip):
    """Caffe LMDB: IMAGE_ROOT/train_lmdb and val_lmdb, with encoded images."""
    [path] = listing.shards(image_root, mode, "lmdb")
    if _skipped(skip, path):
        raise UsageError(
            f"--skip-list names records of {path}, and an LMDB cannot skip any: convert its source again with "
            "`python -m paddle_resnet.dataset convert --skip-list`"
        )
    classes = listing.class_names(image_root, num_of_class)
    size, labels = records.lmdb_labels(path, CHECKED_LABELS)
    if size == 0:
        raise UsageError(f"{path} holds no records: write it again")
    listing.check_labels(path, labels, num_of_class, classes)

    def read(name, shard_id, num_shards, shuffle):
        encoded, label = fn.readers.caffe(path=path, **_container(name, shard_id, num_shards, shuffle, size, seed))
        return encoded, fn.cast(label, dtype=types.INT64)

    return DataSet("lmdb", size, classes or _numbers(num_of_class), read)


def webdataset(image_root, mode, num_of_class, seed, skip):
    """WebDataset: tar shards IMAGE_ROOT/train-000000.tar ... and val-..., each with an index.

    A sample is an image (KEY.jpg, .png ...) and its label in decimal digits (KEY.cls). A prefix before `train` and
    `val` or `validation` is allowed.
    """
    shards, indexes, classes, size = _open_shards(image_root, mode, "webdataset", num_of_class, skip)

    def read(name, shard_id, num_shards, shuffle):
        encoded, digits = fn.readers.webdataset(
            paths=shards,
            index_paths=[index.path for index in indexes],
            ext=[";".join(records.IMAGE_EXTENSIONS), "cls"],
            case_sensitive_extensions=False,
            missing_component_behavior="error",
            **_container(name, shard_id, num_shards, shuffle, size, seed),
            **_shard_order(shuffle, seed),
        )
        return encoded, _decimal(digits)

    return DataSet("webdataset", size, classes, read)


def _decimal(text):
    """DALI operators that turn ASCII digits (and what follows them, as a line end) into one int64."""
    places = 9
    is_digit = fn.cast((text >= ord("0")) & (text <= ord("9")), dtype=types.INT64)
    count = fn.reductions.sum(is_digit, axes=[0], keep_dims=True)
    weights = types.Constant(np.array([10**i for i in reversed(range(places))], dtype=np.int32), device="cpu")
    weights = fn.slice(weights, places - count, text.shape(), axes=[0], out_of_bounds_policy="pad")
    digits = (fn.cast(text, dtype=types.INT64) - ord("0")) * is_digit
    return fn.reductions.sum(digits * weights, axes=[0], keep_dims=True)


def _container(name, shard_id, num_shards, shuffle, size, seed):
    """Arguments that all readers of containers share."""
    arguments = {"name": name, "shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    if not shuffle:
        return {**arguments, "stick_to_shard": True}
    return {
        **arguments,
        # DALI moves on to the next shard's images each epoch, and never mixes two epochs in the buffer.
        "stick_to_shard": False,
        "random_shuffle": True,
        "initial_fill": min(SHUFFLE_BUFFER, -(-size // num_shards)),
        "seed": seed + shard_id,
    }


def _shard_order(shuffle, seed):
    # One seed for all processes: they divide the same order of shards among themselves.
    return {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed} if shuffle else {}


def _skipped(skip, shard):
    """Places of the skipped images of a container."""
    named = (name.rpartition("@") for name in skip)
    return [place for name, _, place in named if name == os.path.basename(shard)]


def _open_shards(image_root, mode, data_format, num_of_class, skip):
    """(containers, their indexes, class names, number of images), after a look at some labels."""
    classes = listing.class_names(image_root, num_of_class)
    shards, indexes = [], []
    for shard in listing.shards(image_root, mode, data_format):
        places = _skipped(skip, shard)
        for place in places:
            if not place.isdecimal():
                raise UsageError(f"--skip-list: {os.path.basename(shard)}@{place} has no byte number: remove it")
        index = records.open_index(shard, data_format, frozenset(map(int, places)))
        if len(index):
            shards.append(shard)
            indexes.append(index)
    if not shards:
        raise UsageError(f"--skip-list leaves no image of {mode.value} in {image_root}: skip fewer")
    ends = np.cumsum([len(index) for index in indexes])
    size = int(ends[-1])
    for i in np.unique(np.linspace(0, size - 1, CHECKED_LABELS).astype(int)).tolist():
        k = int(np.searchsorted(ends, i, side="right"))
        label = records.read_label(shards[k], data_format, *indexes[k].labels[i - ends[k]].tolist())
        listing.check_labels(shards[k], [label], num_of_class, classes)
    return shards, indexes, classes or _numbers(num_of_class), size


def _numbers(count):
    return [str(i) for i in range(count)]


FORMATS = {"recordio": recordio, "tfrecord": tfrecord, "lmdb": lmdb, "webdataset": webdataset}
