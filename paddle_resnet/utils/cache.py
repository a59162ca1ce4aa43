"""Locate the cache folder, which contains files that later runs reuse: compiled operators, links to CUDA libraries and
indexes of record files.

Compiled operators in the cache run as code. Therefore the folder and its files must belong to this user or to root (as
in a container image), and no other user may be able to write to them.
"""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError


def folder() -> Path:
    """Return the cache folder, $XDG_CACHE_HOME/paddle_resnet or by default ~/.cache/paddle_resnet, and create it if
    possible. If the cache folder is not trusted (is_trusted), log a warning and return a temporary private folder,
    which is deleted when this process exits.

    Raises:
        UsageError: XDG_CACHE_HOME is not set and there is no home folder.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_resnet"
    except RuntimeError as e:
        raise UsageError("cache folder: there is no home folder; set XDG_CACHE_HOME") from e
    with contextlib.suppress(OSError):  # the first write to the folder will report the error
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not is_trusted(path):
            return _private_folder(path)
    return path


def is_trusted(path: str | Path) -> bool:
    """Return whether a file or folder exists, belongs to this user or to root, and is writable only by its owner.

    Raises:
        OSError: the owner and mode cannot be read.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


@functools.cache
def _private_folder(path):
    private = tempfile.mkdtemp(prefix="paddle_resnet-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    logger.warn(
        f"cache {path}: belongs to another user or is writable by other users, so this run uses {private}; change the "
        "owner and mode of the cache (chown, chmod 755), or set XDG_CACHE_HOME"
    )
    return Path(private)
