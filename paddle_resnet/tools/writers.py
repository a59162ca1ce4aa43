"""Writers of record files, used by convert.py.

TFRecord and WebDataset files are written by libraries. No maintained library writes RecordIO files, so this
module contains a RecordIO writer.
"""

import contextlib
import os
import struct

from paddle_resnet.data import records
from paddle_resnet.utils.errors import UsageError


@contextlib.contextmanager
def _tfrecord_writer(path):
    from tfrecord import TFRecordWriter

    def write(number, image, extension, label):
        writer.write({records.TFRECORD_IMAGE: (image, "byte"), records.TFRECORD_LABEL: (label, "int")})

    writer = TFRecordWriter(path)
    with contextlib.closing(writer):
        yield write


@contextlib.contextmanager
def _webdataset_writer(path):
    from webdataset import TarWriter

    def write(number, image, extension, label):
        writer.write({"__key__": f"{number:08d}", extension: image, "cls": str(label).encode()})

    with open(path, "wb") as f, TarWriter(f, encoder=False, mtime=0) as writer:
        yield write


class _RecordIOWriter:
    """Appends images to SPLIT.rec.partial and SPLIT.idx.partial. If SPLIT.rec is already complete, the writer does
    nothing.

    Records are synced to disk before their index lines are written, so the index never refers to a missing record.
    """

    def __init__(self, output, split):
        self._paths = [os.path.join(output, split + extension) for extension in (".idx", ".rec")]

    def __enter__(self):
        self._complete = os.path.exists(self._paths[1])
        if self._complete:
            self._count = _count_lines(self._paths[0])
            return self
        self._index, self._records = (open(f"{path}.partial", "a+b") for path in self._paths)  # noqa: SIM115
        self._index.seek(0)
        lines = [line for line in self._index if line.endswith(b"\n")]
        end = 0
        if lines:
            size = os.path.getsize(self._records.name)
            try:
                end = records.recordio_end(self._records, int(lines[-1].split()[1]), size)
            except ValueError as e:
                raise UsageError(f"{self._records.name}: damaged; remove its folder and convert again") from e
        self._index.truncate(sum(map(len, lines)))
        self._records.truncate(end)
        self._count, self._end = len(lines), end
        return self

    def __exit__(self, kind, value, trace):
        if not self._complete:
            self._index.close()
            self._records.close()

    def __len__(self):
        return self._count

    def write(self, images):
        lines = []
        for image, label in images:
            lines.append(f"{self._count}\t{self._end}\n")
            # The header contains the number of extra labels (0), the label, the image number, and an unused number.
            record = recordio_record(records.RECORDIO_HEAD.pack(0, label, self._count, 0) + image)
            self._records.write(record)
            self._count += 1
            self._end += len(record)
        _sync(self._records)
        self._index.write("".join(lines).encode())
        _sync(self._index)

    def finish(self):
        if not self._complete:
            for path in self._paths:
                os.replace(f"{path}.partial", path)


def recordio_record(payload):
    """Encode a RecordIO record: magic number, flag and length, payload, padding to a multiple of 4 bytes.

    If the payload contains the magic number at an offset that is a multiple of 4 bytes, the record is split there.
    Otherwise, a reader that scans for the magic number would detect the start of a record inside the payload.

    Args:
        payload: content of the record, fewer than 2**29 bytes.
    """
    magic = struct.pack("<I", records.RECORDIO_MAGIC)
    cuts, i = [], payload.find(magic)
    while i >= 0:
        if i % 4 == 0:
            cuts.append(i)
        i = payload.find(magic, i + 4)  # the magic number cannot overlap with itself
    starts, ends = [0, *(i + 4 for i in cuts)], [*cuts, len(payload)]
    flags = [0] if not cuts else [1, *[2] * (len(cuts) - 1), 3]
    parts = []
    for flag, start, end in zip(flags, starts, ends, strict=True):
        parts += [magic, struct.pack("<I", flag << 29 | end - start), payload[start:end], bytes(-(end - start) % 4)]
    return b"".join(parts)


def _sync(f):
    f.flush()
    os.fsync(f.fileno())


def _count_lines(path):
    with open(path, "rb") as f:
        return sum(1 for _ in f)


SHARDED = {"tfrecord": _tfrecord_writer, "webdataset": _webdataset_writer}
SINGLE_FILE = {"recordio": _RecordIOWriter}
