"""Open data sets, and write them in every record format. The project reads LMDBs, but does not write them; `write_lmdb`
uses LMDB's library."""

import json
from pathlib import Path

import lmdb

from paddle_resnet.data.formats import read_image
from paddle_resnet.data.formats.lmdb import datum_class
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert
from paddle_resnet.utils.mode import Mode

FORMATS = (*convert.RECORD_FORMATS, "lmdb")


def write_lmdb(folder, images, **fields):
    """Write a Caffe LMDB.

    Args:
        folder: folder of the LMDB.
        images: [(image file, label)], which get the keys 00000000, 00000001, ...
        fields: further fields of each record.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for i, (data, label) in enumerate(images):
            record = datum_class()(data=data, label=label, **{"encoded": True, **fields})
            transaction.put(f"{i:08d}".encode(), record.SerializeToString())
    (Path(folder) / "lock.mdb").unlink()


def write(source, output, to, shards=None, workers=1, label_offset="auto"):
    """Convert a data set to one of FORMATS.

    Args:
        source: folder of the data set.
        output: folder to create.
        to: one of FORMATS.
        shards: number of training shards; ignored for formats with one file per split.
        workers, label_offset: see convert.convert.
    """
    if to != "lmdb":
        shards = shards if to in convert.SHARDED else None
        convert.convert(source, output, to, shards=shards, workers=workers, label_offset=label_offset)
        return
    splits, names, root = {}, None, DataRoot(source, label_offset=label_offset)
    for mode in Mode:
        numbers, images = root.images(mode)
        names = names or numbers.classes
        images = convert.shuffled(images) if mode is Mode.TRAIN else images
        write_lmdb(Path(output) / f"{mode.value}_lmdb", map(read_image, images))
        splits[mode.value] = {"images": len(images)}
    if names is not None:
        (Path(output) / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    manifest = {"complete": True, "format": "lmdb", "splits": splits, "shards": dict.fromkeys(splits, 1)}
    (Path(output) / "convert.json").write_text(json.dumps(manifest))


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
    label_offset="auto",
    allow_one_class=False,
):
    """Return DataRoot.open() of a new DataRoot."""
    root = DataRoot(image_root, data_format, allow_outside, label_offset, skip=skip)
    return root.open(mode, num_of_class, seed, allow_empty, trained, allow_one_class)
