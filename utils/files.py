"""Names, opening and text of files: regular ones up to a size, without waiting for a pipe's writer; valid JSON."""

import errno
import math
import os
import stat
from pathlib import Path

_pipes = []  # open until the process ends


def beside(path, ending):
    """The path of a file that belongs to another one: run.json, eval.json -> run.eval.json."""
    path = Path(path)
    return path.with_name(f"{path.stem if path.suffix == '.json' else path.name}.{ending}")


def touch(path):
    """Make the folders above a file, and create the file or leave it as it is, to check whether it can be written; a
    pipe must have a reader.

    Raises:
        OSError: it cannot.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC  # open() would wait for a reader
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
    except OSError as e:
        if e.errno == errno.ENXIO:
            raise OSError(e.errno, "a pipe without a reader, or a missing device", str(path)) from e
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind):
        _pipes.append(descriptor)  # its reader would see the end of the file
        return
    os.close(descriptor)
    if stat.S_ISBLK(kind):
        raise OSError(errno.EINVAL, "a block device", str(path))


def open_regular(path, limit_bytes=None):
    """Open a file for reading.

    Args:
        path: of the file.
        limit_bytes: the largest size to accept; None: any.
    Returns:
        a binary file.
    Raises:
        OSError: it cannot be opened, is a folder, pipe or device, or is too large; strerror says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit_bytes is not None and status.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, where {limit_bytes} are the limit", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def finite(data):
    """Plain data with None for numbers that are not finite, since JSON has neither Infinity nor NaN."""
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
