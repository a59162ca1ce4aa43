"""The run's log: one readable line on stdout, one JSON line in --report-file.

The report has the form of NVIDIA's dllogger: each line is `DLLL ` and a JSON object with timestamp, datetime,
elapsedtime, type, step and data. `step` is "PARAMETER", [epoch, step], [epoch] or [] (the summary of the run). Each
start begins with "PARAMETER" once nothing can refuse it any more; a later line for the same step, of a start that went
on, takes the place of the earlier.
"""

import contextlib
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path

from utils.errors import RunError, UsageError

_path = _report = None
_quiet = False
_start_s = time.time()


def setup(report_file, rank=0):
    """See that the report can be written, and leave what it holds. Only rank 0 writes and prints; the other ranks'
    calls do nothing.

    Args:
        report_file: path.
        rank: of this process.
    Raises:
        UsageError: the report file cannot be written.
    """
    global _path, _quiet
    close()
    _quiet = rank != 0
    if _quiet:
        return
    path = Path(report_file)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        open(path, "a").close()
    _path = path


def begin(parameters, goes_on=False):
    """Begin the report of this run: to be called when the run cannot be refused any more, since the file may hold the
    report of another one until then.

    Args:
        parameters: {flag: value}, the first line.
        goes_on: write behind what the file holds already, instead of a new file.
    Raises:
        UsageError: the report file cannot be opened.
        RunError: the first line cannot be written.
    """
    global _report
    if _path is None:
        return
    with _writing(_path):
        if _path.is_file():
            os.truncate(_path, _whole_lines(_path) if goes_on else 0)
        # Always at its end, wherever that is, should another run take the same file.
        _report = open(_path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  for the whole run
    report("PARAMETER", parameters)


@contextlib.contextmanager
def _writing(path):
    try:
        yield
    except OSError as e:
        raise UsageError(f"--report-file {path} cannot be written ({e.strerror}): name another file") from e


def _whole_lines(path):
    """The bytes of all whole lines; a full disk may have stopped the last one halfway."""
    return path.read_bytes().rfind(b"\n") + 1


def close():
    global _path, _report
    if _report is not None:
        _report.close()
    _path = _report = None


def write_line(text, stream):
    """Write a line at once. print writes the line's end apart, and under `python -u`, which the launcher uses, another
    thread or a process with the same log file may write in between."""
    stream.write(f"{text}\n")
    stream.flush()


def elapsed_s():
    """Seconds since the start of the program, as in the report's elapsedtime."""
    return time.time() - _start_s


def info(message):
    """Print a line for the user on rank 0; it is not part of the report."""
    if not _quiet:
        write_line(message, sys.stdout)


def warn(message):
    """Print a warning on stderr on rank 0."""
    if not _quiet:
        write_line(f"warning: {message}", sys.stderr)


def log(step, data):
    """Print and report metrics.

    Args:
        step: (epoch, step), (epoch,) or () for the summary of the run.
        data: {name: number or text}.
    """
    if _quiet:
        return
    write_line(_line(step, data), sys.stdout)
    report(step, data)


def report(step, data):
    """Report metrics without printing them; arguments of log.

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
            _report.write("DLLL " + json.dumps(entry) + "\n")
        except OSError as e:
            failed, _report = _report, None
            with contextlib.suppress(OSError):  # closing tries to write the same line again
                failed.close()
            remedy = "make room, and start again, training with --resume"
            raise RunError(f"--report-file {failed.name} can no longer be written ({e.strerror}): {remedy}") from e


def _line(step, data):
    """A phase that all names share is said once, so that a line fits a wide terminal."""
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
