"""WebDataset tar shards: IMAGE_ROOT/train-000000.tar ... and val-..., each with an index.

A sample consists of an image (KEY.jpg, KEY.png ...) and its label in decimal digits (KEY.cls). The names of shards may
have a prefix before `train`, `val` or `validation`.
"""

import contextlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from paddle_resnet.data import indexes, shards, split_names
from paddle_resnet.data.images import IMAGE_EXTENSIONS, TEXT_LIMIT, Image, readable, some
from paddle_resnet.utils.errors import UsageError, counted, import_command
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

NAMES = r"(?P<set>(.*[-_.])?{split}-)(?P<number>\d+)\.tar"
EXAMPLE = "{}-000000.tar"
LABEL_DIGITS = 9  # maximum length of a label; the DALI pipeline uses the same limit
# Maximum number of files per shard whose headers are compared with the index.
CHECKED_HEADERS = 16
# Files in which other programs list the shards of a WebDataset: timm's _info.json or info.json, and webdataset's
# sizes.json.
SHARD_LISTS = ("_info.json", "info.json", "sizes.json")


def detect(image_root: str, mode: Mode) -> list[str]:
    """Return the paths of a split's tar shards."""
    return split_names.find(image_root, mode, NAMES)


def _scan(f):
    samples, last_key, offset = [], None, -1
    try:
        with tarfile.open(fileobj=f, mode="r:") as tar:
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
        raise UsageError(f"{f.name}: damaged ({e}); write or copy it again") from e
    return [" ".join(f"{extension} {offset} {size}" for extension, offset, size in sample) + "\n" for sample in samples]


def _is_sample_file(member):
    """Return whether a tarfile.TarInfo is part of a sample, that is, a regular file KEY.EXTENSION."""
    base, _, extension = member.name.rpartition("/")[2].partition(".")
    return member.isreg() and bool(base and extension)


def _rows(data, f, shard_size):
    try:
        return _parse_rows(data, f, shard_size)
    except tarfile.TarError as e:
        raise ValueError from e


def _parse_rows(data, f, shard_size):
    head, *lines = data.removesuffix(b"\n").split(b"\n")
    version, count = head.split()
    width = {b"v1.1": 3, b"v1.2": 4}.get(version)
    fields = [line.split() for line in lines]
    if width is None or count != b"%d" % len(lines) or not lines or any(len(row) % width for row in fields):
        raise ValueError
    row_of = np.repeat(np.arange(len(lines)), [len(row) // width for row in fields])
    flat = list(itertools.chain.from_iterable(fields))
    extensions = flat[::width]
    places = np.stack(
        [indexes.numbers(flat[1::width], shard_size), indexes.numbers(flat[2::width], shard_size)], axis=1
    )
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
            f"byte {row[1].decode()} has the extensions {some(found)}, but needs an image "
            f"({', '.join(IMAGE_EXTENSIONS)}) and a .cls file; {_remedy(f.name, found)}"
        )
    return of_parts


def _remedy(path, extensions):
    """Return what to do with a shard, given the extensions in a sample without image or label."""
    if any("." in e and _part(e.rpartition(".")[2].encode()) != "other" for e in extensions):
        return "write the shard again with keys that contain no dots, because a key ends at its first dot"
    if "cls" not in extensions and not {"json", "txt"}.isdisjoint(extensions):
        return f"run {import_command(os.path.dirname(path))}"
    return (
        "write the shard again with the files of each sample next to each other, and without samples that lack an "
        "image or a label"
    )


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
    for i in indexes.spread(len(places), CHECKED_HEADERS):
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


def _kept(index, kept):
    with open(index.path, encoding="utf-8", errors="surrogateescape") as f:
        version = f.readline().split()[0]
        lines = [line for line, keep in zip(f, kept, strict=True) if keep]
    return [f"{version} {len(lines)}\n", *lines]


INDEX = indexes.Kind(_scan, _rows, _kept, lambda count: [f"v1.1 {count}\n"], is_cached=True)


def index(image_root: str, mode: Mode, paths: list[str], skip: frozenset[str] = frozenset()) -> shards.Records:
    """Open the indexes of a split's shards, see shards.index. Raise UsageError also if a shard is missing, the shards
    belong to several data sets, or a file of SHARD_LISTS or nshards.txt is damaged or does not match the shards."""
    _check_numbers(image_root, mode, [split_names.match(NAMES, os.path.basename(path), mode) for path in paths])
    records = shards.index(image_root, mode, paths, skip, INDEX, "webdataset", read_label)
    _check_samples(image_root, mode, records.counts)
    return records


def _check_numbers(image_root, mode, found):
    """Check that the tar shards of a split belong to one data set, and that no shard is missing.

    Args:
        found: matches of NAMES with the names of the shards.
    Raises:
        UsageError: the shard numbers have several widths; a number is missing between 0 or 1 and
            the largest number; or a file of SHARD_LISTS or nshards.txt lists different shards.
    """
    # The shard numbers of a data set have the same format, such as %06d. The shortest number has the width of this
    # format; with %d, larger numbers are longer.
    width = min(len(shard["number"]) for shard in found)
    first_of = {}  # {whether the number has the common format: name of the first shard}
    for shard in found:
        has_format = shard["number"] == f"{int(shard['number']):0{width}d}"
        first_of.setdefault(has_format, shard[0])
    if len(first_of) > 1:
        raise split_names.several(image_root, mode, [os.path.join(image_root, name) for name in first_of.values()])
    stem, numbers = found[0]["set"], {int(shard["number"]) for shard in found}
    start = 0 if 0 in numbers or 1 not in numbers else 1
    if count := max(numbers) + 1 - start - len(numbers):
        missing = (f"{stem}{number:0{width}d}.tar" for number in itertools.count(start) if number not in numbers)
        raise UsageError(
            f"--image-root {image_root}: has {len(numbers)} of {len(numbers) + count} {mode.value} shards; add the "
            f"missing ones ({some([*itertools.islice(missing, min(count, 5))], count=count)})"
        )
    for name, counts in _listed_shards(image_root, mode, stem).items():
        there = {shard[0] for shard in found}
        for problem, names in (("missing", counts.keys() - there), ("not listed", there - counts.keys())):
            if names:
                raise UsageError(
                    f"{os.path.join(image_root, name)}: lists {counted(len(counts), f'{mode.value} shard')}, but the "
                    f"folder has {len(there)} ({problem}: {some(sorted(names))}); copy the data set again, or "
                    "remove this list"
                )
    _check_shard_count(image_root)


def _check_shard_count(image_root):
    """Raise UsageError if nshards.txt contains a number that is neither that of the training shards (without them, that
    of the validation shards) nor that of all shards, or if the file cannot be read."""
    path = os.path.join(image_root, "nshards.txt")
    if not os.path.isfile(path):
        return
    with readable(path), open_regular(path, TEXT_LIMIT) as f:
        text = f.read().decode(errors="replace").strip()
    counts = {m: len(detect(image_root, m)) for m in Mode}
    allowed = {counts[Mode.TRAIN] or counts[Mode.EVAL], sum(counts.values())}
    if re.fullmatch("[0-9]{1,9}", text) and int(text) not in allowed:
        there = " and ".join(counted(count, f"{m.value} shard") for m, count in counts.items() if count)
        raise UsageError(
            f"{path}: states {counted(int(text), 'shard')}, but the folder has {there}; copy the data set again, or "
            "remove this file"
        )


def _listed_shards(image_root, mode, stem):
    """Read the files of SHARD_LISTS.

    Args:
        stem: start of the names of the split's shards. Other shards are ignored.
    Returns:
        {name of the file: {name of a shard: number of samples, or None}} of the files that list shards of the split.
    Raises:
        UsageError: a file is not JSON, or cannot be read.
    """
    lists = {}
    for name in SHARD_LISTS:
        path = os.path.join(image_root, name)
        if not os.path.isfile(path):
            continue
        try:
            with readable(path), open_regular(path, TEXT_LIMIT) as f:
                content = json.loads(f.read())
        except (ValueError, RecursionError) as e:
            if isinstance(e, UsageError):
                raise
            raise UsageError(f"{path}: damaged; copy it again, or remove it") from e
        counts = {}
        for shard, count in _shard_rows(content):
            found = split_names.match(NAMES, os.path.basename(shard), mode) if type(shard) is str else None
            if found and found["set"] == stem:
                counts[found[0]] = count if type(count) is int else None
        if counts:
            lists[name] = counts
    return lists


def _shard_rows(content):
    """Yield (name, number of samples or None) of each shard in the content of a file of SHARD_LISTS. For content in an
    unknown format, yield nothing."""
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, dict):
        yield from content.items() if isinstance(content, dict) else ()
        return
    for split in splits.values():
        names, lengths = (
            split.get(key) if isinstance(split, dict) and isinstance(split.get(key), list) else []
            for key in ("filenames", "shard_lengths")
        )
        yield from itertools.zip_longest(names, lengths[: len(names)])


def _check_samples(image_root, mode, counts):
    """Raise UsageError if the number of samples in a tar shard differs from a file of SHARD_LISTS.

    Args:
        counts: {name of a shard: number of samples}.
    """
    found = split_names.match(NAMES, next(iter(counts)), mode)
    for name, listed in _listed_shards(image_root, mode, found["set"]).items():
        for shard, count in counts.items():
            if listed.get(shard) not in (None, count):
                raise UsageError(
                    f"{os.path.join(image_root, shard)}: has {counted(count, 'sample')}, but {listed[shard]} "
                    f"according to {name}; copy it again, or remove {name}"
                )


def read(
    records: shards.Records, name: str, shard_id: int, num_shards: int, shuffle: bool, seed: int
) -> tuple[Any, Any]:
    """Add DALI's WebDataset reader to the pipeline under construction, see data/formats/__init__.py."""
    from nvidia.dali import fn

    encoded, digits = fn.readers.webdataset(
        paths=records.paths,
        index_paths=records.index_paths,
        ext=[";".join(IMAGE_EXTENSIONS), "cls"],
        case_sensitive_extensions=False,
        missing_component_behavior="error",
        dont_use_mmap=True,
        **shards.reader_arguments(name, shard_id, num_shards, shuffle, records.size, seed),
        **shards.shard_order(shuffle, seed),
    )
    return encoded, _decimal(digits)


def _decimal(text):
    """Add DALI operators that parse a label, int64 [1], from up to LABEL_DIGITS ASCII digits and optional trailing
    blanks. Any other text becomes -1."""
    from nvidia.dali import fn, types

    places = LABEL_DIGITS
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


def verify(image: Image) -> tuple[bytes, int]:
    """Return (image file, stored label) of a sample. Raise UsageError if the label is not a number of up to
    LABEL_DIGITS digits."""
    offset, size, label_offset, label_size = image.place
    with open_regular(image.path) as f:
        f.seek(offset)
        return f.read(size), read_label(f, label_offset, label_size)


def read_label(f: BinaryIO, offset: int, size: int) -> int:
    """Return the label at an offset of an open shard. For exceptions, see `verify`."""
    f.seek(offset)
    text = f.read(size)
    if not re.fullmatch(rb"[0-9]{1,%d}\s*" % LABEL_DIGITS, text):
        shown = text[:20].decode(errors="replace")
        reason = f"the label {shown!a} is not a number of up to {LABEL_DIGITS} digits"
        is_name = shown.strip().isprintable() and re.search("[^\\W\\d]", shown)
        remedy = {"remedy": f"run {import_command(os.path.dirname(f.name))}"} if is_name else {}
        raise shards.no_label(f.name, offset, reason, **remedy)
    return int(text)


@contextlib.contextmanager
def write(path: str) -> Iterator[Callable[[int, bytes, str, int], str]]:
    """Yield a function write(number, image file, extension, label) that appends a sample to a new shard, and returns
    the line of the index for this sample. The files are those that webdataset.TarWriter writes, which takes four times
    as long."""
    with open(path, "wb", buffering=_WRITE_BUFFER) as f:
        end = 0

        def append(number, image, extension, label):
            nonlocal end
            places = []
            for name, data in sorted(((extension, image), ("cls", b"%d" % label))):
                f.write(_header(b"%08d.%s" % (number, name.encode()), len(data)))
                f.write(data)
                f.write(bytes(-len(data) % tarfile.BLOCKSIZE))
                places.append(f"{name} {end + tarfile.BLOCKSIZE} {len(data)}")
                end += tarfile.BLOCKSIZE * (1 + -(-len(data) // tarfile.BLOCKSIZE))
            return " ".join(places) + "\n"

        yield append
        f.write(bytes(2 * tarfile.BLOCKSIZE))
        f.write(bytes(-(end + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE))


def _header(name, size):
    """Return the header of a file in a tar archive. `name` must be shorter than 100 bytes."""
    head = bytearray(_EMPTY_HEADER)
    head[: len(name)] = name
    head[124:135] = b"%011o" % size
    head[148:156] = b" " * 8  # the checksum is computed with spaces in its place
    head[148:156] = b"%06o\0 " % sum(head)
    return head


def _empty_header():
    member = tarfile.TarInfo()
    member.mode, member.uname, member.gname = 0o444, "bigdata", "bigdata"
    return member.tobuf(tarfile.USTAR_FORMAT)


_EMPTY_HEADER, _WRITE_BUFFER = _empty_header(), 1 << 20
