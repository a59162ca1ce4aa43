"""Locks between processes. A lock is a hidden file that contains the name of its owner."""

import contextlib
import errno
import fcntl
import os
import platform
import stat
from pathlib import Path

from utils.errors import UsageError


def acquire(path, warn):
    """Lock a file. The file is created if necessary.

    Args:
        path: path of the lock file.
        warn: function to call with a message if the file system does not support locks.
    Returns:
        the open lock file. The lock lasts until this process ends, or closes this or any other open file of that path.
    Raises:
        BlockingIOError: another process holds the lock; strerror identifies it.
        OSError: the lock file cannot be opened, is not a regular file, or is a link. (A link's target would be
            overwritten.)
    """
    path = Path(path)
    while True:
        file = _open(path)
        # A POSIX lock belongs to the process, so a forked child that outlives this process does not keep it.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EAGAIN):
                warn(f"{path}: the file system does not support locks ({e.strerror}); do not start a second run there")
                return file
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise BlockingIOError(e.errno, owner) from e
        if is_of(file, path):
            break
        file.close()  # the owner has released the lock and removed the file since it was opened
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


@contextlib.contextmanager
def held(path, subject, warn):
    """Hold a lock while the block runs.

    Args:
        path, warn: see acquire.
        subject: description of what is locked, such as a flag with its value.
    Raises:
        UsageError: another process holds the lock.
        OSError: see acquire.
    """
    try:
        file = acquire(path, warn)
    except BlockingIOError as e:
        remedy = "wait until it ends, or choose a different path"
        raise UsageError(f"{subject}: another process ({e.strerror}) writes there; {remedy}") from e
    try:
        yield
    finally:
        release(file)


def is_of(file, path):
    """Return whether an open lock file is still at its path. Other processes may have deleted or replaced the file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def release(file):
    """Remove a lock file and release its lock."""
    if is_of(file, file.name):
        with contextlib.suppress(OSError):
            os.unlink(file.name)
    file.close()


def _open(path):
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise OSError(errno.EEXIST, f"{path} is a link; remove it", str(path))
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return open(path, "r+", encoding="utf-8", opener=lambda *_: descriptor)
    os.close(descriptor)
    what = "a link" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise OSError(errno.EEXIST, f"{path} is {what}; remove it", str(path))
