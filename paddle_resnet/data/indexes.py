"""Locate, create and check the index files of record files.

DALI requires an index for each TFRecord shard and RecordIO file. DALI also reads tar shards without an index, but then
scans them at startup. Index files use DALI's formats, with offsets and sizes in bytes. TFRecord: one line `offset size`
per record. RecordIO: one line `key offset` per record. WebDataset: a line `v1.1 COUNT`, then one line per sample with
`extension offset size` for each of its files.

This module imports neither DALI nor Paddle, so that the tools' worker processes do not
wait for these imports.
"""

import hashlib
import itertools
import os
import shlex
import tarfile
from dataclasses import dataclass

import numpy as np

from paddle_resnet.data import records
from paddle_resnet.data.records import IMAGE_EXTENSIONS
from paddle_resnet.utils import cache, files, logger
from paddle_resnet.utils.errors import UsageError, command, counted

# Maximum number of records per RecordIO file or tar shard whose headers are compared with the index.
CHECKED_RECORDS = 256
CHECKED_TAR_HEADERS = 16


@dataclass
class Index:
    """Path and content of an index file.

    Attributes:
        path: the index file.
        images: int64 [n, 2], offset and size in bytes of each record; for "webdataset", of each image file. For
            "recordio", all sizes are 0, because the index does not contain sizes.
        labels: int64 [n, 2], offset and size in bytes of each record; for "webdataset", of each .cls file.
    """

    path: str
    images: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.images)


def open_index(shard, kind, skip=frozenset()):
    """Open the index of a record file, and create the index if it does not exist.

    A new index is stored in the first writable folder of index_paths.

    Args:
        shard: path of the record file.
        kind: "tfrecord", "recordio" or "webdataset".
        skip: offsets of images to omit. The index without these images is written to the cache folder.
    Returns:
        Index.
    Raises:
        UsageError: the shard is damaged, its index does not match, or a new index cannot be written.
    """
    with records.readable(shard):
        index = _open_full_index(shard, kind)
        return _reduced_index(index, shard, kind, skip) if skip else index


def _open_full_index(shard, kind):
    if path := existing_index(shard):
        return check_index(shard, path, kind)
    text, failed = scan(shard, kind), []
    for path in index_paths(shard, kind):
        try:
            write_file(path, text)
        except OSError as e:
            failed.append((path, e.strerror))
            continue
        if failed:
            logger.info(f"index of {shard}: {path} ({os.path.dirname(failed[0][0])} cannot be written)")
        return check_index(shard, path, kind)
    places = " nor ".join(f"{path} ({reason})" for path, reason in failed)
    raise UsageError(f"{shard}: has no index, and neither {places} can be written; make one of the folders writable")


def _reduced_index(index, shard, kind, skip):
    """Write a copy of the index, without the images at the skipped offsets, to the cache folder, and return its Index.
    Raise UsageError if there is no image at a skipped offset, or if the copy cannot be written."""
    starts = index.images[:, 0]
    unknown = sorted(skip.difference(starts.tolist()))
    if unknown:
        entry = f"{os.path.basename(shard)}@{unknown[0]}"
        raise UsageError(f"{shard}: no record at byte {unknown[0]}; remove {entry} from --skip-list")
    kept = ~np.isin(starts, list(skip))
    if kind == "webdataset":
        with open(index.path, encoding="utf-8", errors="surrogateescape") as f:
            version = f.readline().split()[0]
            lines = [line for line, keep in zip(f, kept, strict=True) if keep]
        lines.insert(0, f"{version} {len(lines)}\n")
    elif kind == "tfrecord":
        lines = [f"{offset} {size}\n" for offset, size in index.images[kept].tolist()]
    else:
        lines = [f"{i}\t{offset}\n" for i, offset in enumerate(starts[kept].tolist())]
    path = _cached_index_path(shard, skip)
    try:
        write_file(path, "".join(lines).encode(errors="surrogateescape"))
    except OSError as e:
        raise UsageError(
            f"{path}: the index for --skip-list cannot be written ({e.strerror}); make the folder writable"
        ) from e
    return Index(path, index.images[kept], index.labels[kept])


def index_path(shard):
    """Return the path of a shard's index: `train.idx` for `train.rec`, `train-000000.idx` for `train-000000.tar`, and
    the shard's name with `.idx` added for `train-00000-of-00008` (with or without .tfrecord).
    """
    root, extension = os.path.splitext(shard)
    return f"{root}.idx" if extension in (".rec", ".tar") else f"{shard}.idx"


def index_paths(shard, kind):
    """Return the paths at which a new index may be stored, preferred path first: in the shard's folder and in the
    user's cache folder. For tar shards, the cache folder comes first, because Hugging Face's `datasets` refuses a
    folder that contains indexes next to the shards."""
    adjacent, cached = index_path(shard), _cached_index_path(shard)
    return (cached, adjacent) if kind == "webdataset" else (adjacent, cached)


def existing_index(shard):
    """Return the path of a shard's index, preferably in the shard's folder, or None if there is no index."""
    return next((path for path in (index_path(shard), _cached_index_path(shard)) if os.path.exists(path)), None)


def _cached_index_path(shard, skip=frozenset()):
    # The name of the cached index depends on the shard's size and modification time, so a modified shard gets a new
    # index.
    shard, state = os.path.realpath(shard), os.stat(shard)
    key = f"{shard} {state.st_size} {state.st_mtime_ns} {sorted(skip)}"
    key = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
    return os.path.join(cache.folder(), "indexes", f"{os.path.basename(shard)}-{key}.idx")


def write_file(path, data):
    """Write bytes to a file atomically, even if several processes write the same file. Create the folder if
    necessary."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with files.written(path, sync=True) as partial:
        partial.write_bytes(data)


def scan(shard, kind):
    """Scan a record file and return the content of its index file. For TFRecord, verify all checksums.

    Raises:
        UsageError: the shard is damaged, empty or unreadable.
    """
    with records.readable(shard):
        _check_compression(shard)
        lines = {"tfrecord": _scan_tfrecord, "recordio": _scan_recordio, "webdataset": _scan_webdataset}[kind](shard)
    if not lines:
        raise UsageError(f"{shard}: contains no records; remove it or write it again")
    if kind == "webdataset":
        lines.insert(0, f"v1.1 {len(lines)}\n")
    return "".join(lines).encode(errors="surrogateescape")  # a file extension in a tar file may not be UTF-8


def _check_compression(shard):
    """Raise UsageError if a record file is compressed with gzip."""
    with records.open_regular(shard) as f:
        if f.read(2) == b"\x1f\x8b":  # the file signature of gzip
            old, new = shlex.quote(shard), shlex.quote(f"{shard}.partial")
            raise UsageError(
                f"{shard}: compressed with gzip, which DALI does not support; run `gzip -dc < {old} > {new} && "
                f"mv {new} {old}`"
            )


def _scan_tfrecord(shard):
    lines = []
    with records.open_regular(shard) as f:
        size, offset = os.fstat(f.fileno()).st_size, 0
        while offset < size:
            try:
                record = records.tfrecord_payload(f, size - offset)
            except ValueError as e:
                raise UsageError(f"{shard}: damaged at byte {offset} ({e}); write or copy it again") from e
            length = len(record) + records.TFRECORD_OVERHEAD
            lines.append(f"{offset} {length}\n")
            offset += length
    return lines


def _scan_recordio(shard):
    lines = []
    with records.open_regular(shard) as f:
        size, offset = os.fstat(f.fileno()).st_size, 0
        while offset < size:
            lines.append(f"{len(lines)}\t{offset}\n")
            try:
                offset = records.recordio_end(f, offset, size)
            except ValueError as e:
                raise UsageError(f"{shard}: damaged at byte {offset}; write or copy it again") from e
    return lines


def _scan_webdataset(shard):
    samples, last_key, offset = [], None, -1
    try:
        with records.open_regular(shard) as f, tarfile.open(fileobj=f, mode="r:") as tar:
            for member in tar:
                # With a negative size, tarfile in Python 3.11 can return the same member again and again.
                if member.size < 0 or tar.offset <= offset:
                    raise tarfile.ReadError(f"the size at byte {member.offset} is negative")
                offset = tar.offset
                if _is_sample_file(member):
                    folder, _, name = member.name.rpartition("/")
                    base, _, extension = name.partition(".")
                    if len(extension.split()) != 1:
                        raise tarfile.ReadError(f"the extension of {member.name!r} contains a space")
                    if (folder, base) != last_key:
                        samples.append([])
                        last_key = (folder, base)
                    samples[-1].append((extension, member.offset_data, member.size))
                tar.members = []  # otherwise, tarfile would keep all members in memory
            # tarfile accepts truncated archives, so check for the block of zeros that ends a valid archive.
            f.seek(tar.offset)
            if f.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("truncated")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as e:
        raise UsageError(f"{shard}: damaged ({e}); write or copy it again") from e
    return [" ".join(f"{extension} {offset} {size}" for extension, offset, size in sample) + "\n" for sample in samples]


def _is_sample_file(member):
    """Return whether a tarfile.TarInfo is part of a sample, that is, a regular file KEY.EXTENSION."""
    base, _, extension = member.name.rpartition("/")[2].partition(".")
    return member.isreg() and bool(base and extension)


def check_index(shard, path, kind):
    """Read an index file, and compare it with its shard.

    All rows are checked: no record may be missing, repeated, out of order or outside the shard. In RecordIO files and
    tar shards, the headers of some evenly spaced records are also compared with the index.

    Args:
        shard: path of the record file.
        path: path of its index file.
        kind: "tfrecord", "recordio" or "webdataset".
    Returns:
        Index.
    Raises:
        UsageError: the index does not match the shard, or the index or the shard cannot be read.
    """
    read_rows = {"tfrecord": _tfrecord_rows, "recordio": _recordio_rows, "webdataset": _webdataset_rows}[kind]
    try:
        with records.readable(shard), records.open_regular(path) as index, records.open_regular(shard) as f:
            images, labels = read_rows(index.read(), f, os.fstat(f.fileno()).st_size)
    except (ValueError, tarfile.TarError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(
            f"{path}: does not match {shard}; remove this index and run "
            f"`{command('dataset', 'index', os.path.dirname(shard) or '.')}`"
        ) from e
    return Index(path, images, labels)


def _tfrecord_rows(data, f, shard_size):
    rows = _numbers(data.split(), shard_size).reshape(-1, 2)
    ends = rows.sum(axis=1)
    if len(rows) == 0 or rows[0, 0] != 0 or (rows[1:, 0] != ends[:-1]).any() or ends[-1] != shard_size:
        raise ValueError
    if rows[:, 1].min() <= records.TFRECORD_OVERHEAD:
        raise ValueError
    return rows, rows


def _recordio_rows(data, f, shard_size):
    keys, offsets = _numbers(data.split(), None).reshape(-1, 2).T
    offsets = np.sort(offsets)  # DALI sorts the offsets and ignores the keys
    ends = np.append(offsets[1:], shard_size)
    if len(offsets) == 0 or offsets[0] != 0 or (ends <= offsets).any():
        raise ValueError
    # If the keys are 0 to n-1, no row is missing, so checking a few headers suffices.
    is_complete = np.array_equal(np.sort(keys), np.arange(len(keys)))
    for i in _spread(len(offsets), CHECKED_RECORDS if is_complete else len(offsets)):
        if records.recordio_end(f, int(offsets[i]), shard_size) != ends[i]:
            raise ValueError
    rows = np.stack([offsets, np.zeros_like(offsets)], axis=1)
    return rows, rows


def _webdataset_rows(data, f, shard_size):
    head, *lines = data.removesuffix(b"\n").split(b"\n")
    version, count = head.split()
    width = {b"v1.1": 3, b"v1.2": 4}.get(version)
    fields = [line.split() for line in lines]
    if width is None or count != b"%d" % len(lines) or not lines or any(len(row) % width for row in fields):
        raise ValueError
    row_of = np.repeat(np.arange(len(lines)), [len(row) // width for row in fields])
    flat = list(itertools.chain.from_iterable(fields))
    extensions = flat[::width]
    places = np.stack([_numbers(flat[1::width], shard_size), _numbers(flat[2::width], shard_size)], axis=1)
    _check_tar_places(f, places)
    part_of = {extension: _part(extension) for extension in set(extensions)}
    parts = np.array([part_of[extension] for extension in extensions])
    rows, of_parts = {}, []
    for part in ("image", "label"):
        of_part = np.flatnonzero(parts == part)
        rows[part], first = np.unique(row_of[of_part], return_index=True)
        of_parts.append(places[of_part[first]])
    incomplete = np.setdiff1d(np.arange(len(lines)), np.intersect1d(*rows.values()))
    if len(incomplete):
        row = fields[int(incomplete[0])]
        found = [extension.decode(errors="replace") for extension in row[::width]]
        raise UsageError(
            f"{f.name}: {len(incomplete)} of {counted(len(lines), 'sample')} without image or label: the sample at "
            f"byte {row[1].decode()} has the extensions {_listed(found)}, but needs an image "
            f"({', '.join(IMAGE_EXTENSIONS)}) and a .cls file; write the shard again {_remedy(found)}"
        )
    return of_parts


def _listed(names):
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _remedy(extensions):
    """Return how to write the shard again, given the extensions in a sample without image or label."""
    if any("." in e and _part(e.rpartition(".")[2].encode()) != "other" for e in extensions):
        return "with keys that contain no dots, because a key ends at its first dot"
    if "json" in extensions and "cls" not in extensions:
        return "with the class number of each sample in a .cls file"
    return "with the files of each sample next to each other, and without samples that lack one of the two"


def _part(extension):
    extension = extension.decode(errors="replace").lower()
    return "label" if extension == "cls" else "image" if extension in IMAGE_EXTENSIONS else "other"


def _check_tar_places(f, places):
    """Check that the sample files of an archive are exactly at the expected places, in order.

    Args:
        f: open file of the archive.
        places: int64 [n, 2], offsets and sizes of the sample files.
    Raises:
        ValueError, tarfile.TarError: the archive is damaged or does not match `places`.
    """
    headers = places[:, 0] - tarfile.BLOCKSIZE
    blocks = -(-places[:, 1] // tarfile.BLOCKSIZE)
    ends = places[:, 0] + blocks * tarfile.BLOCKSIZE
    starts = np.append(0, ends[:-1])
    for i in np.flatnonzero(headers != starts).tolist():
        _check_between(f, int(starts[i]), int(headers[i]))
    _check_between(f, int(ends[-1]), None)
    for i in _spread(len(places), CHECKED_TAR_HEADERS):
        member = _tar_header(f, int(headers[i]))
        if not member.isreg() or member.size != places[i, 1]:
            raise ValueError


def _check_between(f, position, stop):
    """Raise ValueError if an archive contains a sample file between two positions, or if no member begins at `stop`. If
    `stop` is None, check the archive up to its end."""
    while position != stop:
        f.seek(position)
        if stop is None and f.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE):
            return
        member = _tar_header(f, position)
        if _is_sample_file(member) or (stop is not None and position > stop):
            raise ValueError
        has_data = member.type not in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        position += tarfile.BLOCKSIZE * (1 + has_data * -(-member.size // tarfile.BLOCKSIZE))


def _tar_header(f, position):
    f.seek(position)
    member = tarfile.TarInfo.frombuf(f.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    if member.size < 0:
        raise ValueError
    return member


def _numbers(texts, limit):
    """Parse strings of decimal digits as int64 [n]. Raise ValueError if a string contains other characters or a number
    exceeds `limit`."""
    if not all(map(bytes.isdigit, texts)) or len(max(texts, key=len, default=b"")) > 18:  # 19 digits can overflow int64
        raise ValueError
    numbers = np.array(texts, dtype=np.int64)
    if limit is not None and (numbers > limit).any():
        raise ValueError
    return numbers


def _spread(count, at_most):
    """Return up to `at_most` evenly spaced indices from 0 to `count` - 1, including 0 and `count` - 1."""
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).astype(int)).tolist()
