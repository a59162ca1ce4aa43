"""Read WebDataset tar shards whose labels are text, or are in KEY.json or KEY.txt instead of KEY.cls."""

import json
import os
import re
import tarfile

from paddle_resnet.data import table_heads
from paddle_resnet.data.classes import label_names
from paddle_resnet.data.images import IMAGE_EXTENSIONS, Image, read_slice, readable
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.files import open_regular

PATTERN = r".*\d+\.tar"
_LABELS = ("cls", "json", "txt")  # extensions of files with the label, in order of preference
_LABEL_LIMIT = 1 << 20  # maximum size of a file with the label, in bytes


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in tar shards.

    Args:
        source: folder with the shards of each split.
        options: Options. label_column is a key of the objects in KEY.json, or one of the extensions cls and txt.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: a shard is damaged or missing, a sample does not have exactly one image and a label, there are no
            training images, or a label is not a class.
    """
    found = {}
    for split, paths in splits.files(source, PATTERN, options).items():
        _check_numbers(paths, options.allow_partial)
        found[split] = [(path, *sample) for path in paths for sample in _samples(path, options.label_column)]
    found = splits.train_and_val(source, found)
    flat = [entry for entries in found.values() for entry in entries]
    _check_captions(source, flat)
    labels = [label for *_, label in flat]
    if all(re.fullmatch("-?[0-9]+", label) for label in labels):
        labels = [*map(int, labels)]
    _, names, first = label_names(source) or (None, None, None)
    numbers, names = splits.numbered(
        source, labels, names, lambda i: f"{flat[i][0]}: sample {flat[i][1]}", flag="--label-column", first=first
    )
    numbers = iter(numbers)
    return {
        split: [
            Image(f"{os.path.relpath(path, source)}@{place[0]}/{place[0]:012d}", path, next(numbers), read_slice, place)
            for path, _, place, *_ in entries
        ]
        for split, entries in found.items()
    }, names


def _check_numbers(paths, allow_partial):
    """Raise UsageError, or log a warning if allow_partial is set, if shards are missing between 0 or 1 and the largest
    number."""
    numbers = {}
    for path in paths:
        stem, number = re.fullmatch(r"(.*?)(\d+)\.tar", path, re.IGNORECASE).groups()
        numbers.setdefault(stem, set()).add(int(number))
    for stem, present in numbers.items():
        missing = sorted({*range(1, max(present))} - present)
        if missing:
            shown = ", ".join(map(str, missing[:5]))
            message = f"{stem}*.tar: {counted(len(missing), 'shard')} missing (number {shown})"
            if not allow_partial:
                raise UsageError(f"{message}; download them, or use --allow-partial to import the other shards")
            logger.warn(f"{message}; only the other shards are imported")


def _samples(path, column):
    """Yield (key, (offset, size) of the image, kind of the label, label as text) of each sample of a shard."""
    samples = {}  # {key: {extension: (offset, size)}}
    with readable(path), open_regular(path) as f:
        try:
            with tarfile.open(fileobj=f, mode="r:") as tar:
                for member in tar:
                    key, _, extension = member.name.rpartition("/")[2].partition(".")
                    if member.isreg() and key and extension:
                        key = member.name.removesuffix(f".{extension}")
                        extension = extension.rpartition(".")[2].lower()
                        if extension in samples.setdefault(key, {}):
                            raise UsageError(f"{path}: sample {key} has several .{extension} files; keep one of them")
                        samples[key][extension] = member.offset_data, member.size
                f.seek(tar.offset)  # tarfile accepts truncated archives, but a block of zeros ends a valid one
                if f.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError("truncated")
        except (tarfile.TarError, ValueError, OverflowError) as e:
            if isinstance(e, UsageError):
                raise
            raise UsageError(f"{path}: damaged ({e}); download it again") from e
        for key, files in samples.items():
            images = [extension for extension in files if extension in IMAGE_EXTENSIONS]
            if len(images) != 1:
                what = f"the images {', '.join(images[:5])}" if images else f"no image ({', '.join([*files][:5])})"
                raise UsageError(f"{path}: sample {key} has {what}; write the shard again with one image per sample")
            yield key, files[images[0]], *_label(path, f, key, files, column)


def _label(path, f, key, files, column):
    place = f"{path}: sample {key}"
    wanted = (column,) if column in ("cls", "txt") else ("json",) if column else _LABELS
    kind = next((kind for kind in wanted if kind in files), None)
    if kind is None:
        raise UsageError(
            f"{place}: has no label ({', '.join([*files][:5])}); add {' or '.join(f'{key}.{kind}' for kind in wanted)}"
        )
    offset, size = files[kind]
    f.seek(offset)
    data = f.read(min(size, _LABEL_LIMIT))
    try:
        text = data.decode()
        value = _value(place, json.loads(text), column) if kind == "json" else text.strip()
    except (ValueError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{place}: its .{kind} file is damaged ({str(e)[:100]}); download the shard again") from e
    return kind, value


def _value(place, content, column):
    if not isinstance(content, dict):
        content = {"label": content}
    names = (
        [column] if column else [name for name in content if table_heads.normalized(name) in table_heads.LABEL_COLUMNS]
    )
    if column and column not in content:
        keys = f"has the keys {', '.join([*content][:10])}" if content else "has no keys"
        raise UsageError(f"--label-column {column}: {place} {keys}; use a key that all samples have")
    if len(names) != 1:
        what = f"the keys {', '.join(names[:5])} are all candidates" if len(names) > 1 else "no key is recognized"
        raise UsageError(f"{place}: {what} for --label-column; set it to one of {', '.join([*content][:10])}")
    value = content[names[0]]
    if not isinstance(value, str | int) or isinstance(value, bool):
        problem = f"{names[0]} is {json.dumps(value)[:50]}, not one label"
        raise UsageError(f"{place}: {problem}; set --label-column to a key with a text or a whole number")
    return str(value).strip()


def _check_captions(source, flat):
    """Raise UsageError if more than half of the texts in KEY.txt are different, because such texts are captions of the
    images, not labels."""
    texts = [label for *_, kind, label in flat if kind == "txt"]
    if len({*texts}) > max(1, len(texts) // 2):
        raise UsageError(
            f"{source}: {len({*texts})} of {len(texts)} texts in .txt files are different, so they are not labels; if "
            "the samples have .json files, choose a key with --label-column, or write the labels to .cls files"
        )
