"""The folder of what is made once a machine: compiled operators, indexes of containers."""

import os
from pathlib import Path

from utils.errors import UsageError


def folder():
    """$XDG_CACHE_HOME/paddle_resnet, by default ~/.cache/paddle_resnet.

    Raises:
        UsageError: neither XDG_CACHE_HOME nor a home folder is there.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_resnet"
    except RuntimeError as e:
        raise UsageError("there is no home folder for the cache: set XDG_CACHE_HOME") from e
