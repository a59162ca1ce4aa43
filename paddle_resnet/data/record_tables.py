"""Tables in JSON and MATLAB files: a list of records, a mapping of images to labels, or annotations as in COCO.

table_heads.is_table, not this module, decides which columns contain images and labels.
"""

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from paddle_resnet.data.images import readable
from paddle_resnet.data.split_names import SPLIT_OF
from paddle_resnet.utils.errors import UsageError, json_problem
from paddle_resnet.utils.files import open_regular

SUFFIXES = (".json", ".mat")
_LIMIT = 1 << 30  # maximum size of a file in bytes
# Names of the columns of records that do not name their values.
IMAGE, LABEL, SPLIT = "image", "label", "split"


@dataclass(frozen=True)
class Table:
    """The records of a file.

    Attributes:
        header: names of the columns.
        rows: cells of each record as text; a missing value is "".
        content: description of the file's content, for messages.
    """

    header: list[str]
    rows: list[list[str]]
    content: str


def read(path: str) -> Table:
    """Read the records of a file. Table.rows is [] if the file contains no records in a known form.

    In JSON, records are a list of objects, or of pairs [image, label]; an object {image: label}, {image: record} or
    {label: [images]}; an object with `images` and `annotations`, as in COCO, whose records have the columns
    `file_name` and `label`, the name or else the number of the category; an object {split: records}, which adds a
    column `split`; or an object of which exactly one entry is a list of objects or pairs. In a .mat file, the records
    are an array of structs.

    Raises:
        UsageError: the file is damaged, or annotations refer to missing images or categories.
        OSError: the file cannot be read.
    """
    status = os.stat(path)
    return _read(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path, size, mtime_ns):
    if path.lower().endswith(".mat"):
        content = _variables(path)
        records = next((found for value in content.values() if (found := _structs(value))), [])
        what = f"variables {_some(content)}"
    else:
        content = _json(path)
        records = _records(content, path) or []
        what = f"a JSON object with the keys {_some(content)}" if isinstance(content, dict) else "a JSON list"
    header = [*dict.fromkeys(name for record in records[:1000] for name in record)]
    return Table(header, [[text(record.get(name)) for name in header] for record in records], what)


def class_names(path: str) -> tuple[list[str], int | None] | None:
    """Return (class names in label order, first label or None if the file does not state it) from a JSON object
    {"0": name} or {name: 0} with all numbers from 0 or 1, or from `class_names` in a .mat file; None if the file
    contains no class names.

    Raises:
        UsageError, OSError: see read().
    """
    if path.lower().endswith(".mat"):
        names = _variables(path).get("class_names")
        return None if names is None else ([str(name) for name in names.reshape(-1).tolist()], None)
    content = _json(path)
    if not isinstance(content, dict) or not content:
        return None
    if all(type(value) is int for value in content.values()) and len({*content.values()}) == len(content):
        content = {str(number): name for name, number in content.items()}
    if not all(key.isdecimal() and isinstance(name, str) for key, name in content.items()):
        return None
    numbers = sorted(map(int, content))
    if numbers[0] not in (0, 1) or numbers != [*range(numbers[0], numbers[0] + len(content))]:
        return None
    return [content[key] for key in sorted(content, key=int)], numbers[0]


def text(value: Any) -> str:
    """Return the text of a value as in a cell of a table."""
    if value is None:
        return ""
    return str(value) if isinstance(value, str | int | float) else json.dumps(value)


def _some(names):
    return ", ".join([str(name)[:50] for name in names][:5]) + (", ..." if len(names) > 5 else "")


def _json(path):
    try:
        with readable(path), open_regular(path, _LIMIT) as f:
            return json.loads(f.read())
    except (ValueError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path}: {json_problem(e)}; correct the file, or download it again") from e


def _is_scalar(value):
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _records(content, path):
    """Return the records of a JSON value as [{column: value}], or None if the value has no known form."""
    if isinstance(content, list):
        return _records_of_list(content)
    if not isinstance(content, dict) or not content:
        return None
    if all(isinstance(content.get(key), list) for key in ("images", "annotations")):
        return _annotated(content, path)
    values = [*content.values()]
    if all(isinstance(key, str) and key.lower() in SPLIT_OF for key in content):
        parts = {key: _records(value, path) for key, value in content.items() if value}  # a split may be empty
        if parts and all(parts.values()):
            return [record | {SPLIT: key} for key, records in parts.items() for record in records]
    if all(map(_is_scalar, values)):
        return [{IMAGE: key, LABEL: value} for key, value in content.items()]
    if all(isinstance(value, list) and all(isinstance(name, str) for name in value) for value in values):
        return [{IMAGE: name, LABEL: key} for key, names in content.items() for name in names]
    if all(isinstance(value, dict) and all(map(_is_scalar, value.values())) for value in values):
        return [{IMAGE: key} | value for key, value in content.items()]
    found = [records for value in values if isinstance(value, list) and (records := _records_of_list(value))]
    return found[0] if len(found) == 1 else None


def _records_of_list(content):
    if content and all(isinstance(value, dict) for value in content):
        return content
    if content and all(isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) for value in content):
        return [{IMAGE: image, LABEL: label} for image, label in content]
    return None


def _annotated(content, path):
    """Return the records of annotations as in COCO. An image with annotations of several categories has one record per
    category, so that the import reports the image; an image without annotations has an empty label."""
    try:
        categories = {entry["id"]: entry.get("name") for entry in content.get("categories", [])}
        if len({*categories.values()} - {None}) < len(categories):  # names that are missing or not unique
            categories = {number: number for number in categories}
        file_of = {entry["id"]: entry["file_name"] for entry in content["images"]}
        labels_of = {number: {} for number in file_of}
        for i, entry in enumerate(content["annotations"]):
            number, category = entry["image_id"], entry["category_id"]
            if number not in labels_of or (categories and category not in categories):
                kind, missing = ("image", number) if number not in labels_of else ("category", category)
                raise UsageError(f"{path}: annotation {i}: there is no {kind} {missing}; download the file again")
            labels_of[number][categories.get(category, category)] = None
    except (KeyError, TypeError, AttributeError) as e:
        raise UsageError(
            f"{path}: images, annotations and categories are not as in COCO ({type(e).__name__}: {e}); correct the file"
        ) from e
    return [
        {"file_name": file_of[number], LABEL: label} for number, labels in labels_of.items() for label in labels or [""]
    ]


def _variables(path):
    """Return {name: value} of the variables in a .mat file."""
    from scipy import io

    with readable(path), open_regular(path, _LIMIT) as f:
        try:
            content = io.loadmat(f, squeeze_me=True)
        except Exception as e:  # scipy raises many types of exceptions for damaged files
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise UsageError(f"{path}: damaged ({type(e).__name__}: {str(e)[:200]}); download it again") from e
    return {name: value for name, value in content.items() if not name.startswith("__")}


def _structs(value):
    names = getattr(getattr(value, "dtype", None), "names", None)
    if not names:
        return None
    return [{name: _plain(struct[name]) for name in names} for struct in value.reshape(-1)]


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else value
