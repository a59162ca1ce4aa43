"""The cache folder for what is made once per machine: compiled operators and indexes of containers.

This program loads what is there as code, so the folder and its files must belong to this user or to root (as in a
container image), and nobody else may have the right to write to them.
"""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

from utils import logger
from utils.errors import UsageError


def folder():
    """$XDG_CACHE_HOME/paddle_resnet, by default ~/.cache/paddle_resnet, made if it does not exist and can be made. If
    others can write to it: a private folder that lasts as long as this process.

    Raises:
        UsageError: XDG_CACHE_HOME is not set and there is no home folder.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_resnet"
    except RuntimeError as e:
        raise UsageError("there is no home folder for the cache: set XDG_CACHE_HOME") from e
    with contextlib.suppress(OSError):  # whoever writes there will say why it cannot
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not is_trusted(path):
            return _private_folder(path)
    return path


def is_trusted(path):
    """Whether a file or folder exists, belongs to this user or to root, and only its owner can write to it.

    Raises:
        OSError: it cannot be looked at.
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
        f"the cache {path} belongs to another user, or others can write to it: this run uses {private} instead; "
        "make the cache yours (chown, chmod 755) or set XDG_CACHE_HOME"
    )
    return Path(private)
