"""Check the files that a command will write before it starts to work (claim), and write files atomically
(replaced)."""

import contextlib
import functools
import os
import re
import stat
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from paddle_resnet.utils import files, logger
from paddle_resnet.utils.errors import UsageError

# Names in a run folder that are reserved for complete or incomplete checkpoints (checkpoints/folders.py).
_RESERVED = re.compile(r"\d+(_\d+)?|latest|best|\..*")
_claimed = {}  # {path: _version of the file when it was claimed, or when this process wrote it}


def claim(
    outputs: Mapping[str, str | Path | None] | None = None,
    folders: Mapping[str, str | Path | None] | None = None,
    inputs: Iterable[tuple[str, str | Path]] = (),
    protected: Iterable[tuple[str, str | Path]] = (),
    run_folder: str | Path | None = None,
    announced: Container[str] = (),
) -> None:
    """Check that a command can write its outputs without damaging its inputs, the data set or a checkpoint.

    Links and `..` are resolved. Files and folders that are created for the check are removed afterwards. A warning is
    logged for each existing, non-empty file that the command will replace, unless it is in `announced`. If another
    process writes a claimed file later, `replaced` logs a warning before it replaces the file.

    Args:
        outputs: {flag or description: path of a file to write, or None}.
        folders: {flag or description: path of a folder to create or to write to, or None}.
        inputs: [(description, path)] for the files that the command reads.
        protected: [(description, path)] for files that no output may replace, and for folders that must not contain
            outputs.
        run_folder: folder for the checkpoints of this run, which may not exist yet, or None.
        announced: keys of `outputs` for which the caller logs that an existing file will be replaced.
    Raises:
        UsageError: two outputs are the same file; or an output file or folder is also an input, is protected or in a
            protected folder, has a path that is reserved for a checkpoint or below one, is not a valid path, or cannot
            be written; or the path of a file is `-` or ends with a slash; or a folder is a broken link or below one.
    """
    outputs, folders = (
        {what: path for what, path in (paths or {}).items() if path is not None} for paths in (outputs, folders)
    )
    is_checkpoint = functools.cache(_is_checkpoint)  # outputs have common parents, and a listed folder may be large
    taken = {_identity(path): f"{what} {path}, which this command reads" for what, path in inputs}
    for what, path in (outputs | folders).items():
        with writing(what, path):
            _check_place(f"{what} {path}", Path(os.path.realpath(path)), protected, run_folder, is_checkpoint)
            identity = _identity(path)
            if identity in taken:
                raise UsageError(f"{what} {path}: the same file as {taken[identity]}; choose a different file")
            if what in folders:
                _check_links(f"{what} {path}", Path(path))
            if what in outputs:
                if str(path) == "-":
                    raise UsageError(f"{what} -: does not write to stdout; use a file name, or ./- for a file named -")
                if str(path).endswith(os.sep):
                    raise UsageError(f"{what} {path}: names a folder; choose a file in it")
                taken[identity] = f"{what} {path}"
                _claimed[os.path.realpath(path)] = _version(path)
                if what not in announced and _version(path):
                    logger.warn(f"{what} {path}: replaces an existing file; choose a different path to keep it")
            _probe(Path(os.path.realpath(path)), is_folder=what in folders)


@contextlib.contextmanager
def writing(what: str, path: str | Path) -> Iterator[None]:
    """If the `with` block raises an OSError, or a ValueError for an invalid path, convert the exception to a
    UsageError."""
    try:
        yield
    except OSError as e:
        raise UsageError(f"{what} {path}: cannot be written ({e.strerror}); choose a different path") from e
    except ValueError as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{what} {path!r}: not a valid path ({e}); choose a different path") from e


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """Write a file atomically: the file is never incomplete, even if it is read or written by other processes or if
    this process is killed. The target of a link is replaced. A device or a pipe is written directly.

    Yields:
        the path to write to.
    Raises:
        OSError: the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        files.touch(path)
        yield Path(path)
        return
    real_path = os.path.realpath(path)
    with files.written(real_path) as partial:
        files.touch(partial)
        yield partial
        warn_if_changed(path)
    if real_path in _claimed:
        _claimed[real_path] = _version(path)


@contextlib.contextmanager
def replaced_csv(path: str | Path) -> Iterator[TextIO]:
    """Like `replaced`, but open the file for csv.writer, and yield it."""
    # With backslashreplace, file names that are not valid UTF-8 can be written.
    with replaced(path) as partial, open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        yield file


def warn_if_changed(path: str | Path) -> None:
    """Log a warning if this process is about to replace a claimed file that another process has written since the
    claim, or since this process last wrote the file."""
    real_path = os.path.realpath(path)
    if real_path in _claimed and _version(path) not in (None, _claimed[real_path]):
        logger.warn(
            f"{path}: replaces the file that another process wrote after this command started; choose a different path "
            "for each command to keep all files"
        )


def _version(path):
    """Return a value that changes whenever a file is written, or None if the file does not exist, is empty or is not a
    regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _identity(path):
    """Return a value that is equal for two paths to the same file. For a character device such as /dev/null, each call
    returns a different value, so that several outputs can use the device."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        with contextlib.suppress(ValueError):  # the path is not valid, for example because of a null byte
            return os.path.realpath(path)
        return path
    return object() if stat.S_ISCHR(status.st_mode) else (status.st_dev, status.st_ino)


def _check_place(subject, path, protected, run_folder, is_checkpoint):
    places = [path, *path.parents]
    for what, place in protected:
        if Path(os.path.realpath(place)) in places:
            raise UsageError(f"{subject}: would change {what} {place}; choose a path outside it")
    run_folder = run_folder and Path(os.path.realpath(run_folder))
    for place in places:
        is_of_run = place.parent == run_folder or (place.parent / ".lock").is_file()
        if is_checkpoint(place) or (is_of_run and _RESERVED.fullmatch(place.name)):
            raise UsageError(f"{subject}: {place} is reserved for a checkpoint; choose a path outside it")


def _check_links(subject, path):
    """Raise UsageError if a folder or one of its parents is a broken link, because no folder can be created at or below
    a broken link."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise UsageError(f"{subject}: {place} is a broken link; remove it, or choose a different path")


def _is_checkpoint(folder):
    """Return whether a folder contains both parameters and a file that exists only in checkpoints."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name.endswith(".pdparams") for name in names) and any(
        name == "meta.json" or name.endswith(".pdopt") for name in names
    )


def _probe(path, is_folder):
    """Raise OSError if a file or folder cannot be written. Everything that this check creates is removed."""
    made = [folder for folder in path.parents if not folder.exists()]
    is_new = not os.path.lexists(path)
    try:
        if is_folder:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        else:
            files.touch(path)
            if path.is_file():  # a lock and an atomic write require another file in the same folder, with a longer name
                partial = files.partial_path(path)
                partial.touch()
                partial.unlink()
    finally:
        with contextlib.suppress(OSError):
            if is_new and is_folder:
                path.rmdir()
            elif is_new:
                path.unlink()
            for folder in made:
                folder.rmdir()
