"""Storage formats: one module per format, registered in FORMATS.

To add a format, write a module with the following names, and add it to FORMATS:

    EXAMPLE     name of a split's first file; {} stands for the split
    NAMES       pattern of the names of a split's files, see split_names.find (record formats)
    detect(image_root, mode)
                return the sorted paths of a split's files, or [] if the split is not stored in this format
    index(image_root, mode, paths, skip)
                open the files (record formats) and return shards.Records; raise UsageError if they cannot be used
    read(records, name, shard_id, num_shards, shuffle, seed)
                add operators that read the images to the DALI pipeline under construction, see below
    verify(image)
                read one images.Image without DALI, and return (content of the image file, stored label); raise
                UsageError, with the file and the place, if the record is not an image with one label, or OSError if the
                file cannot be read
    INDEX       only if the record files have index files: their indexes.Kind
    write, Writer
                only if `dataset convert` can write the format: see SHARDED and SINGLE_FILE
    CAN_SKIP    False if records cannot be omitted with --skip-list; omitted otherwise
    HAS_READER  False if `read` adds no DALI reader with the given name; omitted otherwise. If HAS_READER is False,
                DALI's checkpoint does not contain the position, and read() has the argument start, the position (epoch,
                step) of the first batch
    stored_names(paths)
                only if the files contain class names: return the names in label order, or None

In the formats with one file per image (folder, filelist), index() has other arguments and returns image_files.Files,
and read() and verify() are those of data/image_files.py.

**The contract of read().** read() is called while a DALI pipeline is defined, and returns a tuple (not a list) of two
DataNodes: encoded images, uint8 with shape [bytes], and stored labels, int64 with shape [1], both on the CPU. Instead
of a label that is not a whole number, read() returns -1.
- Without `shuffle`, process `shard_id` of `num_shards` reads the images from size * shard_id // num_shards to the image
  before size * (shard_id + 1) // num_shards, in stored order, which is the order of Records.images. In each epoch, the
  last image is repeated until the last batch is full.
- With `shuffle`, the order depends only on `seed`, the epoch, `shard_id` and `num_shards`, and differs between epochs.
  In each epoch, every process reads the same number of batches.
- A pipeline that is restored from a DALI checkpoint continues with the image after the last one that was read.
- `source_info` of an encoded image is its path relative to image_root, "FILE at index PLACE" or "FILE at key PLACE"
  or "FILE:PLACE:...", where FILE@PLACE is Image.full_name; or it is empty. If `source_info` is empty,
  data/bad_images.py finds an image by its position in the stored order.
- An image that cannot be read raises an error in the pipeline. A record without exactly one label is never passed on
  with the label of a different record.

These modules import DALI only while read() runs, so that the tools' worker processes start without this import.
"""

from types import ModuleType

from paddle_resnet.data.formats import filelist, folder, lmdb, parquet, recordio, tfrecord, webdataset
from paddle_resnet.data.images import Image

FILES: dict[str, ModuleType] = {"folder": folder, "filelist": filelist}  # formats with one file per image
RECORDS: dict[str, ModuleType] = {
    "recordio": recordio,
    "tfrecord": tfrecord,
    "webdataset": webdataset,
    "lmdb": lmdb,
    "parquet": parquet,
}
FORMATS = FILES | RECORDS
# Formats that `dataset convert` writes: several files per split, each written by one process with write(path), whose
# result also returns the lines of the index; and a single file per split, to which one process appends with
# Writer(output, split).
SHARDED = {name: module.write for name, module in RECORDS.items() if hasattr(module, "write")}
SINGLE_FILE = {name: module.Writer for name, module in RECORDS.items() if hasattr(module, "Writer")}
# Formats with index files.
INDEXED = {name: module.INDEX for name, module in RECORDS.items() if hasattr(module, "INDEX")}


def read_image(image: Image) -> tuple[bytes, float | None]:
    """Read one image from a data set, without DALI.

    Returns:
        (content of the image file as stored, label). The label is an int, or a float if a RecordIO file contains a
        label that is not a whole number, or None for an image of label_sets.listed. The label is not checked against
        the classes. image.label_offset is subtracted from the label of a record.
    Raises:
        UsageError: the record is damaged or is not an image with one label, or a package that reads it is missing.
        OSError: the file cannot be read.
    """
    if callable(image.kind):
        return image.kind(image.path, *image.place), image.label
    data, label = FORMATS[image.kind or "folder"].verify(image)
    return data, None if label is None else label - image.label_offset
