"""Locks between processes. A lock is a hidden file that contains the process ID and the host name of its owner."""

import contextlib
import errno
import fcntl
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from paddle_resnet.utils.errors import UsageError


def acquire(path: str | Path, warn: Callable[[str], None]) -> TextIO:
    """Lock a file. The file is created if necessary.

    Args:
        path: path of the lock file.
        warn: function to call with a message if the file system does not support locks. Without such support, the
            file is returned without a lock.
    Returns:
        the open lock file. The lock lasts until this process ends or closes any file object for this path.
    Raises:
        BlockingIOError: another process holds the lock; strerror identifies that process.
        OSError: the lock file cannot be opened, is not a regular file, or is a link (the target would be overwritten).
    """
    path = Path(path)
    while True:
        file = _open(path)
        # A POSIX lock belongs to a single process, so the lock ends with this process even if a forked child continues
        # to run.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EAGAIN):
                remedy = "do not start a second run that writes to the same files"
                warn(f"{path}: the file system does not support locks ({e.strerror}); {remedy}")
                return file
            owner = file.read().strip() or "unknown"
            file.close()
            raise BlockingIOError(e.errno, owner) from e
        if is_of(file, path):
            break
        file.close()  # the owner of the lock has removed the file since it was opened
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def file_of(path: str | Path) -> Path:
    """Return the path of the lock file for a file: a hidden file in the same folder."""
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.lock")


@contextlib.contextmanager
def held(path: str | Path, subject: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file while the `with` block runs, and then remove it.

    Args:
        path, warn: see acquire.
        subject: text for error messages that describes the locked object, such as a flag with its value.
    Raises:
        UsageError: another process holds the lock, or the lock file cannot be opened, is not a regular file, or is a
            link.
    """
    try:
        file = acquire(path, warn)
    except BlockingIOError as e:
        remedy = "wait until that process ends, or choose a different path"
        raise UsageError(f"{subject}: in use by another process ({e.strerror}); {remedy}") from e
    except OSError as e:
        raise UsageError(
            f"{subject}: {path} cannot be locked ({e.strerror}); remove it, or choose a different path"
        ) from e
    try:
        yield
    finally:
        release(file)


def is_of(file: TextIO, path: str | Path) -> bool:
    """Return whether an open lock file still exists at its path. Another process may have deleted or replaced the
    file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:  # for example, a parent folder has been replaced by a file
        return False


def release(file: TextIO) -> None:
    """Release a lock, and remove its file unless another process has already deleted or replaced the file."""
    if is_of(file, file.name):
        with contextlib.suppress(OSError):
            os.unlink(file.name)
    file.close()


def _open(path):
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise OSError(errno.EEXIST, f"{path} is a link", str(path))
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return open(path, "r+", encoding="utf-8", opener=lambda *_: descriptor)
    os.close(descriptor)
    what = "a link" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise OSError(errno.EEXIST, f"{path} is {what}", str(path))
