"""Read TFRecord files with any names of files and features, such as those of TFDS and Kaggle, also with GZIP."""

import gzip
import io
import os
import zlib
from collections import defaultdict

from paddle_resnet.data import blocks, table_heads
from paddle_resnet.data.formats import tfrecord
from paddle_resnet.data.images import Image, read_slice, readable
from paddle_resnet.tools.sources import splits
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.tools.sources.table_files import read_lines
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular

PATTERN = r".+\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz)?|.+-\d+-of-\d+(\.tfrec(ords?)?)?(\.gz)?"
LIMIT = 1 << 30  # maximum size in bytes of the content of a compressed file, which each process decompresses as a whole
_GZIP = b"\x1f\x8b"
_DAMAGED = (EOFError, ValueError, gzip.BadGzipFile, zlib.error)  # exceptions for a damaged file
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*")  # first bytes of image files
_decompressed = blocks.Blocks()


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images in TFRecord files.

    Args:
        source: folder with the files of each split.
        options: Options. image_column and label_column are names of features.
    Returns:
        ({split: [Image]}, class names in label order, or None if labels are numbers without names)
    Raises:
        UsageError: a file is damaged, missing or too large, a feature is missing or ambiguous, there are no training
            images, or a label is not a class.
    """
    found, names_of = defaultdict(list), defaultdict(set)
    feature = None
    for split, paths in splits.files(source, PATTERN, options).items():
        for path in paths:
            is_compressed, features = _is_compressed(path), None
            for start, payload in _records(path, is_compressed):
                example = _features(path, start, payload)
                if features is None:
                    features = _chosen(path, example, options, split)
                    if features is None:
                        logger.info(f"{path}: test images are left out, because they have no label")
                        break
                    feature = features[1]
                data, label = _image_and_label(path, start, example, features, options)
                if name := _name(example):
                    names_of[label].add(name)
                place = start + 12 + payload.find(data), len(data)  # 12 bytes precede the payload
                kind, place = (read_compressed, (0, *place)) if is_compressed else (read_slice, place)
                found[split].append((path, start, label, kind, place))
    found = splits.train_and_val(source, found)
    flat = [entry for entries in found.values() for entry in entries]
    names = _class_names(os.path.dirname(flat[0][0]), feature, names_of)
    numbers, names = splits.numbered(
        source,
        [label for _, _, label, *_ in flat],
        names,
        lambda i: f"{flat[i][0]}: record at byte {flat[i][1]}",
        True,
        "--label-column",
    )
    numbers = iter(numbers)
    return {
        split: [
            Image(f"{os.path.relpath(path, source)}@{start}/{start:012d}", path, next(numbers), kind, place)
            for path, start, _, kind, place in entries
        ]
        for split, entries in found.items()
    }, names


def read_compressed(path: str, block: int, offset: int, size: int) -> bytes:
    """Read an image in a file that is compressed with gzip.

    Args:
        path: path of the file.
        block: 0, because the process decompresses the file as a whole.
        offset, size: position and size of the image in the decompressed file, in bytes.
    Raises:
        UsageError: the file is damaged.
    """
    content = _decompressed.get((path, os.path.getsize(path)), lambda: _decompress(path), len)
    return content[offset : offset + size]


def _decompress(path):
    with readable(path), open_regular(path) as f, gzip.GzipFile(fileobj=f) as content:
        try:
            return content.read(2 * LIMIT)
        except _DAMAGED as e:
            raise UsageError(f"{path}: damaged ({e}); download it again") from e


def _is_compressed(path):
    with readable(path), open_regular(path) as f:
        return f.read(2) == _GZIP


def _records(path, is_compressed):
    """Yield (offset in the decompressed file, payload) of each record."""
    start = 0
    with readable(path), open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        with io.BufferedReader(gzip.GzipFile(fileobj=f) if is_compressed else f) as content:
            while True:
                try:
                    if not content.peek(1):
                        return
                    payload = tfrecord.payload(content, LIMIT if is_compressed else size - start)
                except _DAMAGED as e:
                    raise UsageError(f"{path}: damaged at byte {start} ({e}); download it again") from e
                yield start, payload
                start += len(payload) + tfrecord.OVERHEAD
                if is_compressed and start > LIMIT:
                    raise UsageError(
                        f"{path}: has more than {LIMIT / 1e9:.1f} GB when it is decompressed; run `gzip -dc` and "
                        "import the result"
                    )


def _features(path, start, payload):
    """Return {name: [values]} of an example."""
    try:
        features = tfrecord.example_features(payload)
    except ValueError as e:
        raise UsageError(f"{path}: the record at byte {start} is {e}; write the file again with Examples") from e
    found = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        found[name] = getattr(feature, kind).value if kind else []
    return found


def _chosen(path, example, options, split):
    """Return the names of the features of images and labels, or None if the labels of test images are missing."""
    shown = "; ".join(f"{name} ({_kind(values)})" for name, values in sorted(example.items())[:10]) or "none"

    def choose(flag, name, candidates):
        if name is not None:
            if name not in example:
                raise UsageError(f"{flag} {name}: {path} has the features {shown}; choose one of them")
            return name
        if len(candidates) == 1:
            return candidates[0]
        what = (
            f"the features {', '.join(candidates[:5])} are all candidates" if candidates else "no feature is recognized"
        )
        raise UsageError(f"{path}: {what} for {flag}; set it to one of these: {shown}")

    images = [name for name in sorted(example) if len(example[name]) == 1 and _is_image(example[name][0])]
    image = choose("--image-column", options.image_column, images)
    known = [name for name in sorted(example) if _last(name) in table_heads.LABEL_COLUMNS]
    labels = [name for name in known if example[name] and isinstance(example[name][0], int)]
    labels = labels or [name for name in known if example[name] and isinstance(example[name][0], bytes)]
    if split == "test" and not labels and options.label_column is None:
        return None
    return image, choose("--label-column", options.label_column, labels)


def _is_image(value):
    return isinstance(value, bytes) and value.startswith(_IMAGES)


def _last(name):
    return table_heads.normalized(name.rpartition("/")[2])


def _kind(values):
    if not values:
        return "empty"
    kind = {int: "int64", float: "float", bytes: "bytes"}[type(values[0])]
    return kind if len(values) == 1 else f"{len(values)} x {kind}"


def _image_and_label(path, start, example, features, options):
    image, label = (example.get(name, []) for name in features)
    place = f"{path}: the record at byte {start}"
    if len(image) != 1 or not isinstance(image[0], bytes) or not image[0]:
        raise UsageError(f"{place} has no image in {features[0]}; choose the feature with --image-column")
    value = splits.one_of(label, options.label_index, f"{place}: {features[1]}")
    if isinstance(value, bytes):
        try:
            return image[0], value.decode()
        except UnicodeDecodeError as e:
            raise UsageError(
                f"{place}: {features[1]} is not UTF-8; choose a different feature with --label-column, which may be "
                f"one of {', '.join(sorted({*example} - {*features})[:5])}, or write the text as UTF-8"
                if {*example} - {*features}
                else f"{place}: {features[1]} is not UTF-8; write the text as UTF-8"
            ) from e
    return image[0], value


def _name(example):
    """Return the class name that tensorflow/models stores next to the label, or None."""
    for name in (tfrecord.SYNSET, tfrecord.TEXT):
        values = example.get(name, [])
        if len(values) == 1 and isinstance(values[0], bytes) and values[0]:
            return values[0].decode(errors="replace")
    return None


def _class_names(folder, feature, names_of):
    """Return the class names in TFDS' FEATURE.labels.txt, or in the records, or None."""
    path = os.path.join(folder, f"{feature}.labels.txt")
    if os.path.isfile(path):
        return read_lines(path)
    labels = sorted(names_of) if all(isinstance(label, int) for label in names_of) else []
    if labels and labels in ([*range(len(labels))], [*range(1, len(labels) + 1)]):
        names = [names_of[label] for label in labels]
        if all(len(name) == 1 for name in names) and len(set.union(*names)) == len(names):
            return [name for (name,) in names]
    return None
