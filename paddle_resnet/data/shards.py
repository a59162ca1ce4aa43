"""Record files: what the record formats share.

An indexed format (RecordIO, TFRecord, WebDataset) has an index with the position of each record, see indexes.py.

The module imports DALI only where operators are added to a pipeline, so that the tools' worker processes start without
this import.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from paddle_resnet.data import indexes
from paddle_resnet.data.images import Image
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

# Number of images in the shuffle buffer of each process: about 450 MB for ImageNet, whose image files have 110 kB on
# average. The buffer may be much smaller than the split, because `dataset convert` writes images in random order.
SHUFFLE_BUFFER = 4096


@dataclass
class Records:
    """The images of a split in record files.

    Attributes:
        paths: the record files that contain images to read, in order.
        counts: {name of a record file: number of its images, including skipped ones}.
        size: number of images to read.
        images: images(label_offset) yields the Image of each image to read, in stored order.
        sample: sample(count) yields (path of the record file, stored label) of about `count` evenly spaced images; in
            Parquet files, (FILE@ROW, label) of all images.
        identity: strings, numbers and arrays that identify the images and their order, for the digest of the data set.
        index_paths: paths of the index files of an indexed format.
    """

    paths: list[str]
    counts: dict[str, int]
    size: int
    images: Callable[[int], Iterator[Image]]
    sample: Callable[[int], Iterator[tuple[str, float]]]
    identity: list
    index_paths: list[str] | None = None


def index(
    image_root: str,
    mode: Mode,
    paths: list[str],
    skip: frozenset[str],
    kind: indexes.Kind,
    data_format: str,
    label_of: Callable[[BinaryIO, int, int], float],
) -> Records:
    """Open the record files of an indexed format.

    Args:
        image_root: the folder that contains the split.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        paths: the record files of the split.
        skip: names of images to omit.
        kind: kind of the index files.
        data_format: name of the format.
        label_of: label_of(file, offset, size) returns the stored label of a record.
    Raises:
        UsageError: a record file is damaged, its index does not match or cannot be written, an entry of `skip` is not
            a record, or no image is left.
    """
    shards, opened, counts = [], [], {}
    for shard in paths:
        places = skipped(skip, shard)
        for place in places:
            if not re.fullmatch("[0-9]{1,18}", place):
                raise UsageError(f"{shard}@{place}: no offset after @; remove the line from --skip-list")
        offsets = frozenset(map(int, places))
        found = indexes.open_index(shard, kind, offsets)
        counts[os.path.basename(shard)] = len(found) + len(offsets)
        if len(found):
            shards.append(shard)
            opened.append(found)
    if not shards:
        raise UsageError(f"--image-root {image_root}: --skip-list leaves no {mode.value} images; shorten the list")
    ends = np.cumsum([len(found) for found in opened])
    size = int(ends[-1])

    def images(label_offset):
        for shard, found in zip(shards, opened, strict=True):
            for row in np.hstack([found.images, found.labels]).tolist():
                name = f"{os.path.basename(shard)}@{row[0]}"
                yield Image(name, shard, None, data_format, tuple(row), label_offset)

    def sample(count):
        for i in np.unique(np.linspace(0, size - 1, count).astype(int)).tolist():
            k = int(np.searchsorted(ends, i, side="right"))
            with open_regular(shards[k]) as f:
                yield shards[k], label_of(f, *opened[k].labels[i - ends[k]].tolist())

    parts = [
        part for shard, found in zip(shards, opened, strict=True) for part in (os.path.basename(shard), found.images)
    ]
    identity = [*parts, *(found.labels for found in opened)]
    return Records(shards, counts, size, images, sample, identity, [found.path for found in opened])


def skipped(skip: frozenset[str], shard: str) -> list[str]:
    """Return the places of the skipped records in a record file. Raise UsageError if `skip` contains the file
    itself."""
    file = os.path.basename(shard)
    for name in skip:
        if name.partition("/")[0] == file:
            raise UsageError(f"--skip-list: {name} is an entire file of records; write a line {file}@OFFSET per record")
    named = (name.rpartition("@") for name in skip)
    return [place for name, _, place in named if name == file]


def no_label(shard: str, offset: int, reason: object, remedy: str = "write it again") -> UsageError:
    """Return the UsageError for a record that is not an image with one label."""
    reason = " ".join(str(reason).split())
    return UsageError(f"{shard}: the record at byte {offset} is not an image with a label ({reason}); {remedy}")


def single(label: Any) -> Any:
    """Add DALI operators that return a label with shape [1]. For a record without exactly one label, the operators fail
    with an error that bad_images.bad_record recognizes."""
    from nvidia.dali import fn

    # If a TFRecord has no label, DALI returns a scalar with the value of an earlier label. The slice rejects scalars.
    return fn.reshape(label[0:], shape=[1])


def reader_arguments(name: str, shard_id: int, num_shards: int, shuffle: bool, size: int, seed: int) -> dict[str, Any]:
    """Return the arguments that all record readers share."""
    arguments = {"name": name, "shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    if not shuffle:
        return {**arguments, "stick_to_shard": True}
    return {
        **arguments,
        # With several processes, each process reads a different shard in the next epoch. The shuffle buffer never mixes
        # images of two epochs.
        "stick_to_shard": False,
        "random_shuffle": True,
        "initial_fill": min(SHUFFLE_BUFFER, -(-size // num_shards)),
        "seed": seed + shard_id,
    }


def shard_order(shuffle: bool, seed: int) -> dict[str, Any]:
    """Return the arguments with which a reader reads the record files in a different random order in each epoch; {}
    without `shuffle`."""
    # All processes use the same seed, so all processes read the shards in the same order.
    return {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed} if shuffle else {}
