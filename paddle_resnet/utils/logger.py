"""The log of a run. Metrics are printed as readable lines on stdout and written as JSON lines to --report-file.

The report has the format of NVIDIA's dllogger. Each line consists of `DLLL ` and a JSON object with timestamp,
datetime, elapsedtime, type, step and data. `step` is "PARAMETER", [epoch, step], [epoch] or [] (the summary of the
run). When a run starts or resumes, its first line is a "PARAMETER" line, written after all checks have passed. If a
resumed run repeats a step, the later line supersedes the earlier one.
"""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from paddle_resnet.utils import files, locks, progress
from paddle_resnet.utils.errors import RunError, UsageError, printable

_path = _report = _lock = None
_is_misplaced = False
_followers: "list[Follower]" = []
_quiet = False
_only_warns = False
_printed = None  # messages already printed in the without_repeats() block, or None outside such a block
_start_s = time.time()


def setup(report_file: str | Path | None = None, rank: int = 0) -> None:
    """Set the path of the report file, but do not change the file. Only rank 0 prints and writes to the report. On
    other ranks, info, warn, log and report do nothing.

    Args:
        report_file: path, or None to only print the log.
        rank: rank of this process.
    Raises:
        UsageError: another run is writing to the report file, or a lock file of an earlier run cannot be used.
    """
    global _path, _quiet
    close()
    _quiet = rank != 0
    if _quiet or report_file is None:
        return
    path = Path(report_file)
    if locks.file_of(path).exists():
        with _writing(path):
            locks.release(locks.acquire(locks.file_of(path), warn))
    _path = path


def begin(parameters: Mapping[str, object], append: bool = False) -> None:
    """Open the report file. Call begin() after all checks have passed, because it may replace an earlier report. If the
    file system supports locks, a lock prevents other runs from writing to the file until close().

    Args:
        parameters: {flag: value} to write in the first line.
        append: whether to append to the file instead of replacing it. An incomplete last line is removed first.
    Raises:
        UsageError: the report file cannot be opened, or another run is writing to it.
        RunError: the first line cannot be written.
    """
    global _report, _lock, _is_misplaced
    if _path is None:
        return
    _is_misplaced = False
    with _writing(_path):
        files.touch(_path)
        if _path.is_file():
            _lock = locks.acquire(locks.file_of(_path), warn)
            os.truncate(_path, _size_of_complete_lines(_path) if append else 0)
        # Append mode ensures that this run does not overwrite the lines of another run that writes to the same file.
        _report = open(_path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  open until the run ends
    report("PARAMETER", parameters)


@contextlib.contextmanager
def _writing(path):
    try:
        yield
    except BlockingIOError as e:
        remedy = "wait until that run ends, or choose a different file"
        raise UsageError(f"--report-file {path}: in use by another run ({e.strerror}); {remedy}") from e
    except OSError as e:
        raise UsageError(f"--report-file {path}: cannot be written ({e.strerror}); choose a different file") from e


def _size_of_complete_lines(path):
    """Return the size of a file up to the end of its last complete line. The last line can be incomplete, for example
    because the disk was full."""
    return path.read_bytes().rfind(b"\n") + 1


class Follower(Protocol):
    """An object that receives the entries of the report, such as a writer of TensorBoard events."""

    def add(self, step: tuple[int, ...] | str, data: Mapping[str, Any]) -> None:
        """Receive the arguments of report()."""

    def close(self) -> None:
        """Receive the end of the report."""


def follow(follower: Follower) -> None:
    """Pass each future report entry to follower.add(step, data). close() calls follower.close()."""
    _followers.append(follower)


def close() -> None:
    """Close the report, release its lock, and close the followers."""
    global _path, _report, _lock
    while _followers:
        _followers.pop().close()
    if _report is not None:
        _report.close()
    if _lock is not None:
        locks.release(_lock)
    _path = _report = _lock = None


def write_line(text: object, stream: TextIO) -> None:
    """Write a line and its newline in a single call. Under `python -u`, which the launcher uses, print() would write
    the newline separately, and other threads or processes could write to the same log file in between.

    Control characters except line breaks are escaped, because file and class names can contain them. If the line cannot
    be written, because the reader of a pipe has exited or the disk is full, the run continues without output. A command
    whose result is what it prints must use result_on_stdout instead."""
    text = "\n".join(map(printable, str(text).split("\n")))
    if progress.write_above(text, stream):
        return
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError as e:
        _abandon(stream)
        if stream is sys.stdout:
            remedy = f"read --report-file {_path} instead" if _path else "redirect stdout to a writable file"
            warn(f"stdout: can no longer be written ({e.strerror}), so the run continues without output; {remedy}")


@contextlib.contextmanager
def result_on_stdout() -> Iterator[None]:
    """Raise RunError if the output of the `with` block cannot be written to stdout, or ClosedPipe if the program that
    reads stdout has exited, even if a library ignores the OSError."""
    result = _Result(sys.stdout)
    with contextlib.redirect_stdout(result):
        try:
            yield
        except SystemExit:
            result.flush()
            raise
        else:
            result.flush()
        finally:  # restore direct output, because Python's logging may still use `result`
            result.write, result.flush = result._stream.write, result._stream.flush


class ClosedPipe(Exception):
    """The program that reads stdout through a pipe has exited, as in `... | head`."""


class _Result:
    """A text stream that converts an OSError to a RunError or to ClosedPipe, and raises this exception again in every
    later call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._problem = None
        self._is_pipe_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        if _is_stdout_closed:
            self._problem = "closed"
        return self._call(self._stream.write, text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function, *arguments):
        try:
            if self._problem is None:
                return function(*arguments)
        except OSError as e:
            self._problem, self._is_pipe_closed = e.strerror, isinstance(e, BrokenPipeError)
            _abandon(self._stream)
        if self._is_pipe_closed:
            raise ClosedPipe
        raise RunError(f"stdout: cannot be written ({self._problem}); free disk space, or redirect stdout")


class Expendable:
    """A text stream for output that a command does not need, such as a progress bar. If the stream cannot be written,
    the command continues without the output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int | None:
        return self._call(self._stream.write, text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError:
            _abandon(self._stream)


def _abandon(stream):
    """Discard all further output to a stream. Python would otherwise try to flush the stream at exit, and exit with
    code 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _prepare(stream):
    """Make a standard stream accept every character, and return the stream. If the process does not have the stream,
    return a null stream."""
    if stream is None:
        stream = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


_is_stdout_closed = sys.stdout is None
sys.stdout, sys.stderr = _prepare(sys.stdout), _prepare(sys.stderr)


def elapsed_s() -> float:
    """Return the number of seconds since this module was imported, which the report contains as elapsedtime."""
    return time.time() - _start_s


def info(message: str) -> None:
    """Print a line on stdout, on rank 0 only and not in an only_warnings() block. The line is not written to the
    report."""
    if not (_quiet or _only_warns) and _is_new(message):
        write_line(message, sys.stdout)


def warn(message: str) -> None:
    """Print a warning on stderr, on rank 0 only."""
    if not _quiet and _is_new(message):
        write_line(f"warning: {message}", sys.stderr)


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Print each message of info and warn only once in the `with` block, for tools that open the same data several
    times."""
    global _printed
    _printed = set()
    try:
        yield
    finally:
        _printed = None


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """In the `with` block, info and log do nothing, so that only warnings are printed."""
    global _only_warns
    _only_warns = True
    try:
        yield
    finally:
        _only_warns = False


def _is_new(message):
    if _printed is None:
        return True
    is_new = message not in _printed
    _printed.add(message)
    return is_new


def log(step: tuple[int, ...], data: Mapping[str, Any]) -> None:
    """Print metrics, and write them to the report, except in an only_warnings() block. Step metrics are not printed
    while the progress line is shown.

    Args:
        step: (epoch, step), (epoch,) or () for the summary of the run.
        data: {name: number, text or nested lists of numbers}. Non-finite numbers become null in the report.
    Raises:
        RunError: the report file can no longer be written.
    """
    if _quiet or _only_warns:
        return
    if len(step) < 2 or not progress.is_shown():
        write_line(_line(step, data), sys.stdout)
    report(step, data)


def report(step: tuple[int, ...] | str, data: Mapping[str, Any]) -> None:
    """Write metrics to the report without printing them, if begin() has opened a report. The arguments are those of
    log(); `step` can also be "PARAMETER".

    Raises:
        RunError: the report file can no longer be written.
    """
    global _report
    if _report is not None:
        now = time.time()
        entry = {
            "timestamp": f"{now:.6f}",
            "datetime": datetime.fromtimestamp(now).isoformat(sep=" "),
            "elapsedtime": f"{now - _start_s:.6f}",
            "type": "LOG",
            "step": step if isinstance(step, str) else list(step),
            "data": data,
        }
        try:
            _report.write("DLLL " + json.dumps(files.finite(entry)) + "\n")
        except OSError as e:
            failed, _report = _report, None
            with contextlib.suppress(OSError):  # close() would try to write the line again
                failed.close()
            remedy = "free disk space or choose a different file, and start again (a training run with --resume)"
            raise RunError(f"--report-file {failed.name}: can no longer be written ({e.strerror}); {remedy}") from e
        if _lock is not None and len(step) < 2:
            _check_place(_report, _path)
        for follower in _followers:
            follower.add(step, data)


def _check_place(report, path):
    """Log a warning, but only once per report, if the report file was deleted or replaced since begin()."""
    global _is_misplaced
    if _is_misplaced or (os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(report.fileno()))):
        return
    _is_misplaced = True
    warn(
        f"--report-file {path}: was deleted or replaced during the run, so it does not contain the metrics of this "
        "run; do not change the file while a run writes to it"
    )


def _line(step, data):
    """Return the line that log() prints. If all names have the same prefix, such as "train.", the line contains the
    prefix only once. Averages over classes (precision, recall and F1) and the reliability diagram appear only in the
    report."""
    data = {name: value for name, value in data.items() if not name.endswith(("_macro", "_weighted", ".reliability"))}
    phases = {name.partition(".")[0] for name in data}
    label = _label(step)
    if len(phases) == 1:
        phase = phases.pop()
        label = f"{label} {phase}"
        data = {name.removeprefix(f"{phase}."): value for name, value in data.items()}
    return "  ".join([label, *(f"{name} {_number(value)}" for name, value in data.items())])


def _label(step):
    return " ".join(f"{name} {value}" for name, value in zip(("epoch", "step"), step, strict=False)) or "summary"


def _number(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"
