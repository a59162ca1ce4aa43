"""The cache folder for what is made once per machine: compiled operators and indexes of containers."""

import os
from pathlib import Path

from utils.errors import UsageError


def folder():
    """$XDG_CACHE_HOME/paddle_resnet, by default ~/.cache/paddle_resnet.

    Raises:
        UsageError: XDG_CACHE_HOME is not set and there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_resnet"
    except RuntimeError as e:
        raise UsageError("there is no home folder for the cache: set XDG_CACHE_HOME") from e
