"""Index files of the containers: where they lie, how they are made and how they are checked.

DALI needs an index for each TFRecord shard and RecordIO file, and for a tar shard to start without a scan. Index files
have DALI's formats. TFRecord: a line `offset size` per record. RecordIO: a line `key offset` per record. WebDataset: a
line `v1.1 COUNT`, then a line per sample with `extension offset size` for each of its files. Offsets and sizes are in
bytes.

Imports neither DALI nor Paddle, so that the tools' worker processes start quickly.
"""

import contextlib
import hashlib
import os
import struct
import tarfile
from dataclasses import dataclass

import numpy as np

from paddle_resnet.data import records
from paddle_resnet.data.records import IMAGE_EXTENSIONS
from utils import cache, logger
from utils.errors import UsageError


@dataclass
class Index:
    """An index file and its content.

    Attributes:
        path: the index file.
        images: int64 [n, 2], offset and size in bytes of each record, or for "webdataset" of each image file. A
            RecordIO index stores no sizes; they are 0.
        labels: int64 [n, 2], the same for the label: the record, or for "webdataset" the .cls file.
    """

    path: str
    images: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.images)


def open_index(shard, kind, skip=frozenset()):
    """Open the index of a container, and make it first if there is none.

    The index lies beside the shard, or in the user's cache folder if the shard's folder cannot be written.

    Args:
        shard: path of the container.
        kind: "tfrecord", "recordio" or "webdataset".
        skip: offsets of images to leave out. The reduced index is written to the cache folder.
    Returns:
        Index.
    Raises:
        UsageError: a damaged shard, an index that does not fit it, no writable place for a new one.
    """
    index = _open_whole_index(shard, kind)
    return _reduced_index(index, shard, kind, skip) if skip else index


def _open_whole_index(shard, kind):
    beside, cached = index_path(shard), _cached_index_path(shard)
    for path in (beside, cached):
        if os.path.exists(path):
            return check_index(shard, path, kind)
    text = scan(shard, kind)
    try:
        write_file(beside, text)
    except OSError as e:
        try:
            write_file(cached, text)
        except OSError as e2:
            raise UsageError(
                f"{shard} has no index, and neither {beside} ({e.strerror}) nor {cached} ({e2.strerror}) can be "
                "written: make one of the folders writable"
            ) from e2
        logger.info(f"index of {shard}: {cached} ({os.path.dirname(beside)} cannot be written)")
        return check_index(shard, cached, kind)
    return check_index(shard, beside, kind)


def _reduced_index(index, shard, kind, skip):
    """Write the index without the images at some offsets into the cache folder."""
    starts = index.images[:, 0]
    unknown = sorted(skip.difference(starts.tolist()))
    if unknown:
        raise UsageError(f"{shard} has no record at byte {unknown[0]}: remove {os.path.basename(shard)}@{unknown[0]}")
    kept = ~np.isin(starts, list(skip))
    if kind == "webdataset":
        with open(index.path, encoding="utf-8") as f:
            version = f.readline().split()[0]
            lines = [line for line, keep in zip(f, kept, strict=True) if keep]
        lines.insert(0, f"{version} {len(lines)}\n")
    elif kind == "tfrecord":
        lines = [f"{offset} {size}\n" for offset, size in index.images[kept].tolist()]
    else:
        lines = [f"{i}\t{offset}\n" for i, offset in enumerate(starts[kept].tolist())]
    path = _cached_index_path(shard, skip)
    try:
        write_file(path, "".join(lines).encode())
    except OSError as e:
        raise UsageError(
            f"{path}, the index for --skip-list, cannot be written ({e.strerror}): make it writable"
        ) from e
    return Index(path, index.images[kept], index.labels[kept])


def index_path(shard):
    """Path of an index: `train.rec` has `train.idx`, `train-000000.tar` has `train-000000.idx`, and
    `train-00000-of-00008` (with or without .tfrecord) has that name with `.idx` added.
    """
    root, extension = os.path.splitext(shard)
    return f"{root}.idx" if extension in (".rec", ".tar") else f"{shard}.idx"


def _cached_index_path(shard, skip=frozenset()):
    # A rewritten shard has another size or time, and therefore another name here.
    shard, state = os.path.realpath(shard), os.stat(shard)
    key = f"{shard} {state.st_size} {state.st_mtime_ns} {sorted(skip)}"
    key = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
    return os.path.join(cache.folder(), "indexes", f"{os.path.basename(shard)}-{key}.idx")


def write_file(path, data):
    """Write bytes to a file that appears under its name only when complete, even if several processes write it.

    Creates the folder if necessary.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def scan(shard, kind):
    """Scan a container and return the bytes of its index file.

    Raises:
        UsageError: a damaged or empty shard.
    """
    lines = {"tfrecord": _scan_tfrecord, "recordio": _scan_recordio, "webdataset": _scan_webdataset}[kind](shard)
    if not lines:
        raise UsageError(f"{shard} has no records: remove it or write it again")
    if kind == "webdataset":
        lines.insert(0, f"v1.1 {len(lines)}\n")
    return "".join(lines).encode()


def _scan_tfrecord(shard):
    import crc32c

    lines = []
    size, offset = os.path.getsize(shard), 0
    with open(shard, "rb") as f:
        while offset < size:
            f.seek(offset)
            head = f.read(12)
            end = offset + 16 + struct.unpack_from("<Q", head)[0] if len(head) == 12 else size + 1
            if end > size or struct.unpack_from("<I", head, 8)[0] != records.masked_crc(crc32c.crc32c(head[:8])):
                raise UsageError(f"{shard} is damaged at byte {offset}: write or copy it again")
            lines.append(f"{offset} {end - offset}\n")
            offset = end
    return lines


def _scan_recordio(shard):
    lines = []
    size, offset = os.path.getsize(shard), 0
    with open(shard, "rb") as f:
        while offset < size:
            lines.append(f"{len(lines)}\t{offset}\n")
            try:
                offset = records.recordio_end(f, offset, size)
            except ValueError as e:
                raise UsageError(f"{shard} is damaged at byte {offset}: write or copy it again") from e
    return lines


def _scan_webdataset(shard):
    samples, last_key = [], None
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                if member.isreg() and base:
                    if (folder, base) != last_key:
                        samples.append([])
                        last_key = (folder, base)
                    samples[-1].append((extension, member.offset_data, member.size))
                tar.members = []  # tarfile would keep them all
            # tarfile accepts the end of the file as the end of the archive, which is a block of zeros.
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("its end is missing")
    except tarfile.TarError as e:
        raise UsageError(f"{shard} is damaged ({e}): write or copy it again") from e
    return [" ".join(f"{extension} {offset} {size}" for extension, offset, size in sample) + "\n" for sample in samples]


def check_index(shard, path, kind):
    """Read an index and check it against its shard.

    Returns:
        Index.
    Raises:
        UsageError: it does not fit the shard.
    """
    try:
        with open(path, "rb") as f:
            data = f.read()
        shard_size = os.path.getsize(shard)
        if kind == "webdataset":
            images, labels = _webdataset_records(shard, data)
        else:
            images = np.array(data.split(), dtype=np.int64).reshape(-1, 2)
            if kind == "tfrecord":
                end = int(images[-1].sum())
            else:
                # DALI sorts the offsets and ignores the keys.
                images = np.stack([np.sort(images[:, 1]), np.zeros(len(images), np.int64)], axis=1)
                with open(shard, "rb") as f:
                    end = records.recordio_end(f, int(images[-1, 0]), shard_size)
            if end != shard_size:
                raise ValueError
            labels = images
    except UsageError:
        raise
    except OSError as e:
        raise UsageError(f"{e.filename} cannot be read ({e.strerror}): make it readable") from e
    except (ValueError, IndexError, KeyError, tarfile.TarError) as e:
        raise UsageError(
            f"the index {path} does not fit {shard}: remove it and run `python -m paddle_resnet.dataset index`"
        ) from e
    return Index(path, images, labels)


def _webdataset_records(shard, data):
    head, *lines = data.decode().splitlines()
    version, count = head.split()
    step = {"v1.1": 3, "v1.2": 4}[version]
    if len(lines) != int(count):
        raise ValueError
    places = np.empty((2, len(lines), 2), np.int64)
    for i, line in enumerate(lines):
        words = line.split()
        extensions = [word.lower() for word in words[::step]]
        image = next((k for k, extension in enumerate(extensions) if extension in IMAGE_EXTENSIONS), None)
        if "cls" not in extensions or image is None:
            raise UsageError(
                f"{shard}: the sample at byte {words[1]} has {' and '.join(extensions)}, not an image "
                f"({', '.join(IMAGE_EXTENSIONS)}) and a .cls: write the shard again without it"
            )
        for place, k in zip(places[:, i], (image, extensions.index("cls")), strict=True):
            place[:] = int(words[step * k + 1]), int(words[step * k + 2])
    offset, size = places[1, -1].tolist()
    if offset < tarfile.BLOCKSIZE:
        raise ValueError
    with open(shard, "rb") as f:
        f.seek(offset - tarfile.BLOCKSIZE)
        header = tarfile.TarInfo.frombuf(f.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    if header.size != size:
        raise ValueError
    return places
