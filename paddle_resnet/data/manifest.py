"""convert.json, in which `dataset convert` and `dataset import` describe what they write."""

import contextlib
import json
import os
from typing import Any

from paddle_resnet.data import split_names
from paddle_resnet.data.formats import FORMATS, RECORDS
from paddle_resnet.data.images import readable
from paddle_resnet.utils.errors import UsageError, command, counted
from paddle_resnet.utils.files import open_regular
from paddle_resnet.utils.mode import Mode

MANIFEST = "convert.json"


def read(image_root: str) -> dict[str, Any] | None:
    """Read convert.json.

    Returns:
        {"complete": bool, "format": str, "splits": {split: {"images": int, ...}}, "shards": {split: int}, ...}, or None
        if there is no such file. The manifest of a complete conversion also contains "bytes", {record file name: size},
        unless an older version wrote the manifest.
    Raises:
        UsageError: the file cannot be read or is damaged.
    """
    path = os.path.join(image_root, MANIFEST)
    if not os.path.lexists(path):
        return None
    try:
        with readable(path), open_regular(path) as f:
            manifest = json.loads(f.read())
        for split, described in manifest["splits"].items():
            if not all(type(number) is int for number in (described["images"], manifest["shards"][split])):
                raise TypeError
        if type(manifest["complete"]) is not bool:
            raise TypeError
        # A conversion to class folders records no sizes of files.
        patterns = [RECORDS[manifest["format"]].NAMES] if FORMATS[manifest["format"]] in RECORDS.values() else []
        for name, size in manifest.get("bytes", {}).items():
            is_name = os.path.basename(name) == name and any(
                split_names.match(pattern, name, mode) for pattern in patterns for mode in Mode
            )
            if type(size) is not int or not is_name:
                raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path}: damaged; convert the data set again, or remove the file") from e
    return manifest


def check_complete(image_root: str, data_format: str | None = None) -> None:
    """Raise UsageError if a conversion to this folder is incomplete. If `data_format` is set, only a conversion to this
    format counts. A damaged convert.json is ignored, because without record files it may be a file of a different
    program."""
    manifest = None
    with contextlib.suppress(UsageError):
        manifest = read(image_root)
    if manifest is not None and not manifest["complete"] and data_format in (None, manifest["format"]):
        raise incomplete(image_root, manifest)


def incomplete(image_root: str, manifest: dict[str, Any]) -> UsageError:
    """Return the UsageError for the output of an interrupted conversion or import."""
    writer = manifest.get("command", "convert")
    return UsageError(
        f"--image-root {image_root}: the {'import' if writer == 'import' else 'conversion'} is incomplete; repeat the "
        f"`{command('dataset', writer)}` command to finish it"
    )


def check_count(image_root: str, mode: Mode, data_format: str, count: int, what: str = "image") -> None:
    """Raise UsageError if the number of images or shards in a split differs from the number in convert.json, or if this
    file is damaged."""
    manifest = read(image_root)
    if manifest is None or manifest["format"] != data_format or mode.value not in manifest["splits"]:
        return
    wanted = manifest["splits"][mode.value]["images"] if what == "image" else manifest["shards"][mode.value]
    if count != wanted:
        raise UsageError(
            f"--image-root {image_root}: has {counted(count, f'{mode.value} {what}')}, but {wanted} according to "
            f"{MANIFEST}; copy the folder again, or convert the data set again"
        )
