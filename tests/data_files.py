"""Open data sets, and write them in every record format. The project reads LMDBs and Parquet files, but does not write
them; `write_lmdb` and `write_parquet` use the libraries of these formats."""

import importlib.util
import json
from pathlib import Path

import lmdb

from paddle_resnet.data import indexes
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.formats.lmdb import datum_class
from paddle_resnet.data.root import CHECKED_LABELS, DataRoot
from paddle_resnet.tools import convert
from paddle_resnet.utils.mode import Mode

READERS = (*convert.RECORD_FORMATS, "lmdb")  # record formats that DALI reads
FORMATS = READERS  # record formats
if importlib.util.find_spec("pyarrow"):
    FORMATS += ("parquet",)
ALL = ("folder", "filelist", *FORMATS)


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


def write_parquet(path, images, names=None, group=7):
    """Write a Parquet file as Hugging Face's `datasets` does.

    Args:
        path: the file.
        images: [(image file, label)].
        names: class names for the metadata, or None.
        group: number of rows in a row group.
    """
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    content = [{"bytes": data, "path": f"{i}.jpg"} for i, (data, _) in enumerate(images)]
    table = pyarrow.table({"image": content, "label": [label for _, label in images]})
    label = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value", "dtype": "int64"}
    features = {"image": {"_type": "Image"}, "label": label}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def unchecked(records, filler):
    """Place records between copies of `filler`, so that their labels are not checked before the run, and return (list,
    indices of the records)."""
    count = 2 * (CHECKED_LABELS + len(records))
    places = sorted({*range(count)} - {*indexes.spread(count, CHECKED_LABELS)})[: len(records)]
    result = [filler] * count
    for place, record in zip(places, records, strict=True):
        result[place] = record
    return result, places


def write(source, output, to, shards=None, workers=1, label_offset="auto"):
    """Convert a data set to one of FORMATS.

    Args:
        source: folder of the data set.
        output: folder to create.
        to: one of FORMATS.
        shards: number of training shards; ignored for formats with one file per split.
        workers, label_offset: see convert.convert.
    """
    if to not in ("lmdb", "parquet"):
        shards = shards if to in convert.SHARDED else None
        convert.convert(source, output, to, shards=shards, workers=workers, label_offset=label_offset)
        return
    splits, names, root = {}, None, DataRoot(source, label_offset=label_offset)
    for mode in Mode:
        numbers, images = root.images(mode)
        names = names or numbers.classes
        images = convert.shuffled(images) if mode is Mode.TRAIN else images
        pairs = [*map(read_image, images)]
        if to == "lmdb":
            write_lmdb(Path(output) / f"{mode.value}_lmdb", pairs)
        else:
            write_parquet(Path(output) / f"{mode.value}-00000-of-00001.parquet", pairs, names)
        splits[mode.value] = {"images": len(images)}
    if names is not None:
        (Path(output) / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    manifest = {"complete": True, "format": to, "splits": splits, "shards": dict.fromkeys(splits, 1)}
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
