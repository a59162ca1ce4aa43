"""Read images and labels from the Parquet and Arrow files of Hugging Face's `datasets`.

A file consists of groups of rows: the row groups of a Parquet file, or the record batches of an Arrow file
(`save_to_disk`). A row contains the content of an image file, usually in a struct with the fields `bytes` and `path`,
and a label. The schema's metadata lists the class names or, for many data sets of the Hub, the README.md in the folder
of the file or in a parent folder.

This module imports neither DALI nor Paddle, and the optional package pyarrow only when a file is opened.
"""

import contextlib
import functools
import json
import os
import shlex
from dataclasses import dataclass

import yaml

from paddle_resnet.data import blocks, table_heads
from paddle_resnet.data.images import log_once, readable
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, installation
from paddle_resnet.utils.files import open_regular

SUFFIXES = (".parquet", ".arrow")
_PARQUET = b"PAR1"  # first bytes of a Parquet file
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of an Arrow stream
_README, _README_LEVELS, _README_LIMIT = (
    "README.md",
    3,
    1 << 24,
)  # levels: the file's folder and its two nearest parents
_groups = blocks.Blocks()


@dataclass(frozen=True)
class Columns:
    """The columns of a data set.

    Attributes:
        image: column of images, which is binary or a struct with the field `bytes`.
        label: column of labels, which are integers or text.
        classes: class names in label order, or None if neither the file nor README.md contains them.
    """

    image: str
    label: str
    classes: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Row:
    """The position and the label of an image.

    Attributes:
        group, row: index of the group, and index of the row in this group.
        label: label as an int or text, or None.
        name: name of the image file, or "" if the file contains none.
    """

    group: int
    row: int
    label: int | str | None
    name: str


def columns(path: str, image_column: str | None = None, label_column: str | None = None) -> Columns:
    """Return the columns of a file. If image_column or label_column is None, it is the only column that the metadata
    identifies as images or as class labels or, if it identifies none, the only one with the type of images or with a
    name in table_heads.LABEL_COLUMNS.

    Raises:
        UsageError: pyarrow cannot be imported, the file is damaged, a column is missing or ambiguous, or image_column
            does not contain the bytes of images.
        OSError: the file does not exist.
    """
    schema = _file(path).schema
    features = _described(path, schema)
    images = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    images = images or [field.name for field in schema if _is_binary(field.type) or _holds_bytes(field.type)]
    labels = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    labels = labels or [
        field.name for field in schema if table_heads.normalized(field.name) in table_heads.LABEL_COLUMNS
    ]
    image = _chosen(path, schema, "--image-column", image_column, images)
    label = _chosen(path, schema, "--label-column", label_column, labels)
    usable = [field.name for field in schema if _is_binary(field.type) or _holds_bytes(field.type)]
    if image not in usable:
        remedy = (
            f"import the file with --image-column {shlex.quote(usable[0])}"
            if usable
            else "write the file again with the content of the image files"
        )
        kind = schema.field(image).type
        raise UsageError(f"{path}: the column {image} has the type {kind}, not the bytes of images; {remedy}")
    return Columns(image, label, _names(features.get(label, {})))


def rows(path: str, columns: Columns) -> list[Row]:
    """Return the rows of a file, without reading its images.

    Raises:
        UsageError: the file is damaged.
    """
    file, found = _file(path), []
    with _errors(path):
        for group in range(file.groups):
            labels = file.read(group, columns.label).to_pylist()
            names = file.read_names(group, columns.image)
            found += (Row(group, i, *row) for i, row in enumerate(zip(labels, names, strict=True)))
    return found


def read_image(path: str, group: int, row: int, column: str) -> bytes:
    """Return the content of an image file. The process keeps the most recently used groups in memory.

    Args:
        path: path of the file.
        group, row: see Row.
        column: Columns.image.
    Raises:
        UsageError: the file is damaged, or the row contains no image.
    """
    with _errors(path):
        values = _groups.get((path, group, column), lambda: _file(path).read(group, column), lambda read: read.nbytes)
        value = values[row].as_py()
    data = value.get("bytes") if isinstance(value, dict) else value
    if not data:
        raise UsageError(
            f"{path}: row {row} of group {group} contains no image in the column {column}; write the file again with "
            "the content of the image files"
        )
    return data


def _file(path):
    state = os.stat(path)
    return _opened(os.path.realpath(path), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _opened(path, size, time):
    # The content decides, because the names in the cache of Hugging Face's hub are links to files without extension.
    with _errors(path):
        with open(path, "rb") as f:
            head = f.read(len(_PARQUET))
        return (_Parquet if head == _PARQUET else _Arrow)(path)


class _Parquet:
    def __init__(self, path):
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        self.schema, self.groups = self._file.schema_arrow, self._file.num_row_groups

    def read(self, group, column):
        return self._file.read_row_group(group, [column]).column(0).combine_chunks()

    def read_names(self, group, column):
        if not _has_names(self.schema.field(column).type):
            return [""] * self._file.metadata.row_group(group).num_rows
        paths = self.read(group, f"{column}.path").field("path").to_pylist()
        return [os.path.basename(path or "") for path in paths]


class _Arrow:
    """An Arrow file of save_to_disk. The file is mapped into memory, because its images are not compressed."""

    def __init__(self, path):
        import pyarrow

        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - len(_END_OF_STREAM)))
            if f.read() != _END_OF_STREAM:
                raise pyarrow.ArrowInvalid("truncated")
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()
        table.validate(full=True)  # otherwise, wrong offsets could lead outside the file
        self._batches = table.to_batches()
        self.schema, self.groups = table.schema, len(self._batches)

    def read(self, group, column):
        return self._batches[group].column(column)

    def read_names(self, group, column):
        values = self.read(group, column)
        if not _has_names(values.type):
            return [""] * len(values)
        return [os.path.basename(path or "") for path in values.field("path").to_pylist()]


@contextlib.contextmanager
def _errors(path):
    try:
        import pyarrow
    except Exception as e:  # importing a broken package can raise any exception
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UsageError(
            f"{path}: requires the package pyarrow, which cannot be imported ({reason}); run {installation('parquet')}"
        ) from e
    with readable(path):
        try:
            yield
        except (pyarrow.ArrowException, OSError) as e:
            # pyarrow raises an OSError without errno for damaged data, and ArrowMemoryError if memory is exhausted.
            if isinstance(e, MemoryError):
                raise
            if isinstance(e, OSError) and e.errno is not None:
                raise OSError(e.errno, os.strerror(e.errno)) from e  # pyarrow's message would repeat the path
            reason = " ".join(str(e).split())[:200]
            raise UsageError(f"{path}: damaged ({reason}); download it again") from e


def _features(schema):
    """Return {column: feature} from the metadata of `datasets`, or {}."""
    with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if name in schema.names and feature.get("_type")}
    return {}


def _names(feature):
    """Return the class names of a feature in label order, or None."""
    names = feature.get("names")
    if isinstance(names, dict):  # {"0": name, ...}
        names = [names[key] for key in sorted(names, key=int)]
    return tuple(map(str, names)) if names else None


def _described(path, schema):
    """Return {column: feature} from the metadata of a file or, if the metadata contains no class names, also from
    README.md."""
    features = _features(schema)
    if any(map(_names, features.values())):
        return features
    found = _features_of_readme(path)
    return features | {name: feature for name, feature in found.items() if name in schema.names}


def _features_of_readme(path):
    """Return {column: feature} from the first README.md with `dataset_info` in the folder of a file or in its two
    nearest parent folders; {} if there is none, or if its configurations differ and none is that of the file."""
    folder = os.path.dirname(os.path.abspath(path))
    for _ in range(_README_LEVELS):
        readme = os.path.join(folder, _README)
        if os.path.isfile(readme):
            status = os.stat(readme)
            configs = _configs(readme, status.st_size, status.st_mtime_ns)
            # If there are several configurations, each has its own folder.
            parts = {*os.path.relpath(path, folder).split(os.sep)}
            own = {name: features for name, features in configs.items() if name in parts} or configs
            if own:
                features = [*own.values()]
                return features[0] if all(found == features[0] for found in features) else {}
        folder = os.path.dirname(folder)
    return {}


@functools.lru_cache(maxsize=8)
def _configs(path, size, mtime_ns):
    """Return {configuration: {column: feature}} from the YAML block at the start of a README.md, with features as in
    the metadata of `datasets`. Log a warning if the block is damaged."""
    with readable(path), open_regular(path, _README_LIMIT) as f:
        start, _, rest = f.read().decode(errors="replace").replace("\r\n", "\n").partition("---\n")
    if start.strip("\ufeff \n") or "\n---" not in rest:
        return {}
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = (yaml.load(rest.partition("\n---")[0], loader) or {}).get("dataset_info") or {}
        configs = found if isinstance(found, list) else [found]
        return {str(c.get("config_name", "default")): _readme_features(c["features"]) for c in configs if c}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
        reason = " ".join(str(e).split())[:200]
        log_once(
            f"{path}: class names cannot be read ({type(e).__name__}: {reason}); correct the YAML block", logger.warn
        )
        return {}


def _readme_features(entries):
    features = {}
    for entry in entries:
        kind = entry.get("dtype")
        if kind == "image":
            features[entry["name"]] = {"_type": "Image"}
        elif isinstance(kind, dict) and isinstance(label := kind.get("class_label"), dict):
            names = label.get("names")
            if isinstance(names, dict) and sorted(map(int, names)) != [*range(len(names))]:
                raise ValueError(f"the labels of {entry['name']} are not 0 to {len(names) - 1}")
            features[entry["name"]] = {"_type": "ClassLabel", "names": names}
    return features


def _is_binary(kind):
    import pyarrow

    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _fields(kind):
    import pyarrow

    return {field.name for field in kind} if pyarrow.types.is_struct(kind) else set()


def _holds_bytes(kind):
    return "bytes" in _fields(kind)


def _has_names(kind):
    return "path" in _fields(kind)


def _chosen(path, schema, flag, name, candidates):
    shown = ", ".join(schema.names[:10])
    if name is not None:
        if name not in schema.names:
            raise UsageError(f"{flag} {name}: {path} has the columns {shown}; choose one of them")
        return name
    if len(candidates) != 1:
        what = (
            f"the columns {', '.join(candidates[:5])} are all candidates" if candidates else "no column is recognized"
        )
        names = ", ".join(candidates[:10]) or shown
        raise UsageError(
            f"{path}: {what} for {flag}; run `{command('dataset', 'import')}` with {flag} set to one of {names}"
        )
    return candidates[0]
