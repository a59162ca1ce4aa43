"""File operations: derive the names of companion files, open only regular files (because a pipe could block forever),
write files atomically, and convert data to valid JSON."""

import argparse
import contextlib
import errno
import math
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_pipes = []  # file descriptors of pipes that remain open until the process ends


def argument(text: str) -> str:
    """Return a path from the command line unchanged. This function is the argparse type for paths.

    Raises:
        argparse.ArgumentTypeError: the path is empty.
    """
    if not text:  # for example, because a shell variable is not set; pathlib would use the working directory
        raise argparse.ArgumentTypeError("'' is an empty path; set a path, such as . for the working directory")
    return text


def companion(path: str | Path, ending: str) -> Path:
    """Return the path of a companion file, such as run.eval.json for the path run.json and the ending eval.json."""
    path = Path(path)
    return path.with_name(f"{path.stem if path.suffix == '.json' else path.name}.{ending}")


def touch(path: str | Path) -> None:
    """Check that a file can be written, and create the file and its folders if necessary. A pipe must have a reader.

    Raises:
        OSError: the file cannot be written.
    """
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    )  # O_NONBLOCK: do not wait for a reader
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)  # the path may be a broken link
            descriptor = os.open(path, flags, 0o666)
    except OSError as e:
        if e.errno == errno.ENXIO:
            raise OSError(e.errno, "a pipe without a reader, or a missing device", str(path)) from e
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind):
        _pipes.append(descriptor)  # closing the pipe would signal end-of-file to its reader
        return
    os.close(descriptor)
    if stat.S_ISBLK(kind):
        raise OSError(errno.EINVAL, "a block device", str(path))


def open_regular(path: str | Path, limit_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: path of the file.
        limit_bytes: maximum size of the file, or None for no limit.
    Returns:
        a binary file.
    Raises:
        OSError: the path cannot be opened, is a folder, pipe, device or non-empty file in /proc, or is too large.
            strerror states the problem.
        ValueError: the path contains a null byte.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # The size of a file in /proc is reported as 0. Some files in /proc are endless, and reading /proc/kmsg could
        # block forever.
        if not stat.S_ISREG(status.st_mode) or (status.st_size == 0 and _has_content(descriptor)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit_bytes is not None and status.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, limit {limit_bytes}", str(path))
        return open(path, "rb", opener=lambda *_: descriptor)  # messages contain the name of the file
    except BaseException:
        os.close(descriptor)
        raise


def _has_content(descriptor):
    try:
        return os.read(descriptor, 1) != b""
    except BlockingIOError:  # for example /proc/kmsg, if there are no new messages
        return True


@contextlib.contextmanager
def written(path: str | Path, partial: str | Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Write a file or folder atomically. The file or folder appears at `path` only after the `with` block has written
    it completely.

    Args:
        path: path of the file or folder. An existing file is replaced.
        partial: temporary path to write to, in the same file system; by default, a path in the same folder that no
            other process uses. If the block raises an exception, the temporary file or folder is removed.
        sync: whether to flush all data to the disk before the rename.
    Yields:
        a Path: the temporary path at which the block must create the file or folder.
    Raises:
        OSError: the data cannot be flushed, or the file or folder cannot be renamed.
    """
    partial = partial_path(path) if partial is None else Path(partial)
    try:
        yield partial
        if sync:
            for part in (*partial.rglob("*"), partial):
                fsync(part)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            (shutil.rmtree if partial.is_dir() else os.unlink)(partial)
        raise


def partial_path(path: str | Path) -> Path:
    """Return the temporary path at which this process writes a file or folder before the rename. The path contains the
    host name, because processes on different hosts or in different containers may share a folder and have the same
    process ID."""
    return Path(f"{path}.{platform.node()}.{os.getpid()}.partial")


def fsync(path: str | Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(data: Any) -> Any:
    """Return a copy of JSON data in which non-finite numbers are None, because JSON has neither Infinity nor NaN."""
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
