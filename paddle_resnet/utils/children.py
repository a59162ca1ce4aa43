"""Child processes of doctor and its self-test, and the rows of their table."""

import functools
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import TRAIN, is_installed, script

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300

# One row of the table. Values of status: "ok"; "note" for a problem that does not prevent training; "no" if training
# would fail, or if a check of the self-test failed.
Row = namedtuple("Row", "what detail status remedy", defaults=["ok", ""])


def run(arguments, cwd=ROOT, timeout_s=TIMEOUT_S, environment=None):
    """Run Python in a child process, and return the subprocess.CompletedProcess, with exit code 1 after a timeout.

    Args:
        arguments: arguments of the interpreter.
        cwd: working directory.
        timeout_s: seconds after which the child process is killed.
        environment: {name: value} of environment variables to set, or None.
    """
    command, end = [sys.executable, *arguments], functools.partial(signals.die_with_parent, os.getpid())
    options = {"cwd": cwd, "capture_output": True, "text": True, "errors": "replace"}
    options["env"] = os.environ | (environment or {})
    try:
        return subprocess.run(command, **options, timeout=timeout_s, preexec_fn=end)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"Error: not finished after {timeout_s} s")


def reason(returncode, output):
    """Return the last error message in the output of a run with one or several processes, or without such a message its
    last line or the exit code. If a signal killed the run, the signal comes first."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line] or lines[-1:]
    errors = [
        line for line in errors if " failed first: " not in line
    ] or errors  # prefer the more detailed message of the failed rank
    if returncode < 0:
        errors = [f"killed by {signal.Signals(-returncode).name} {' '.join(errors[-1:])}".strip()]
    return errors[-1] if errors else f"exit code {returncode}"


def training_command():
    """Return the program that trains, as arguments of Python or of Paddle's launcher."""
    return [script(), "train"] if is_installed() else [str(TRAIN)]
