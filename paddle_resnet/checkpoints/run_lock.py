"""The lock of a run folder, which ensures that only one run writes checkpoints to the folder."""

from pathlib import Path
from typing import TextIO

from paddle_resnet.utils import locks, logger
from paddle_resnet.utils.errors import UsageError

_NAME = ".lock"


def hold(root: Path) -> TextIO:
    """Lock the folder ROOT of a run, so that no other run writes to it.

    Returns:
        an open file. The lock lasts until this process exits or closes any file object for ROOT/.lock.
    Raises:
        UsageError: another run holds the lock.
        OSError: .lock cannot be opened, is a link (the target would be overwritten) or is not a regular file.
    """
    try:
        return locks.acquire(root / _NAME, logger.warn)
    except BlockingIOError as e:
        raise UsageError(
            f"--output-dir {root.parent}: another run ({e.strerror}) is writing its checkpoints to {root}; wait until "
            "it ends, or choose a different folder"
        ) from e


def keep(root: Path, file: TextIO) -> TextIO:
    """Return a valid lock on ROOT: `file`, or a new lock if ROOT/.lock has been deleted or replaced.

    Raises:
        BlockingIOError, OSError: see locks.acquire.
    """
    if locks.is_of(file, root / _NAME):
        return file
    logger.warn(
        f"{root}/.lock: was deleted or replaced during the run, so another run may have written to the folder; make "
        "sure that no other run uses it"
    )
    return locks.acquire(root / _NAME, logger.warn)
