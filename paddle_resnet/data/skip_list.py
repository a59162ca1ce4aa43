"""The list of images to omit (--skip-list)."""

import json
import os
from pathlib import Path

from paddle_resnet.data.images import TEXT_LIMIT, is_outside
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import open_regular


def skip_list_line(name: str) -> str:
    """Return an image's line in a --skip-list. The line is the image's name, or a JSON string if the name contains
    unprintable characters or begins with a quotation mark. JSON represents a byte that is not valid UTF-8 by a lone
    surrogate."""
    is_plain = name.isprintable() and not name.startswith('"')
    return f"{name if is_plain else json.dumps(name)}\n"


def read(path: str | Path, image_root: str) -> frozenset[str]:
    """Read a --skip-list: one Image.name per line, in the format of skip_list_line.

    Args:
        path: path of the file.
        image_root: the folder to which the names are relative.
    Returns:
        frozenset of the names.
    Raises:
        UsageError: the file cannot be read, a line is not valid JSON, or an entry matches no file.
    """
    try:
        with open_regular(path, TEXT_LIMIT) as f:
            lines = [line.rstrip("\r") for line in f.read().decode("utf-8-sig", "surrogateescape").split("\n")]
        names = [json.loads(line) if line.startswith('"') else line for line in lines]
    except json.JSONDecodeError as e:
        raise UsageError(f'--skip-list {path}: a line that begins with " is not a JSON string ({e}); correct it') from e
    except OSError as e:
        remedy = "use a readable file with one path per line"
        raise UsageError(f"--skip-list {path}: cannot be read ({e.strerror}); {remedy}") from e
    skip = frozenset(os.path.normpath(name) for name in names if name.strip())
    for name in sorted(skip):
        # Opening the split checks whether the record file has a record at the place after "@".
        shard = name.rpartition("@")[0]
        is_shard = shard and os.path.exists(os.path.join(image_root, shard))
        if not is_shard and not _is_no_folder(os.path.join(image_root, name)):
            raise UsageError(f"--skip-list {path}: {name} is not a file in {image_root}; remove the line")
    return skip


def check_inside(path: str | Path, skip: frozenset[str], image_root: str) -> None:
    """Raise UsageError if a skip list contains a path outside image_root."""
    for name in sorted(skip):
        if is_outside(name, image_root):
            raise UsageError(
                f"--skip-list {path}: {name} is outside {image_root}; remove the line, or add --allow-outside"
            )


def _is_no_folder(path):
    return os.path.lexists(path) and not os.path.isdir(path)
