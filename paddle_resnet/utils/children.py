"""Run the child processes of doctor and its self-test, and describe the results in the rows of a table."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import TRAIN, is_installed, script

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


class Row(NamedTuple):
    """A row of the table of doctor.

    Attributes:
        what: what was checked.
        detail: result of the check.
        status: "ok"; "note" for a problem that does not prevent training, or for a check that this machine does not
            allow; "no" if training would fail, or if a check of the self-test failed.
        remedy: what to do about the problem, or "".
    """

    what: str
    detail: str
    status: str = "ok"
    remedy: str = ""


def run(
    arguments: list[str],
    cwd: Path | str = ROOT,
    timeout_s: float = TIMEOUT_S,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
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


def reason(returncode: int, output: str) -> str:
    """Return why a run failed: the last error message in its output, which can be that of several processes. If there
    is no error message, return the last line, and if there is no output, the exit code. If a signal killed the run, the
    text begins with "killed by" and the name of the signal."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line] or lines[-1:]
    errors = [
        line for line in errors if " failed first: " not in line
    ] or errors  # prefer the more detailed message of the failed rank
    if returncode < 0:
        errors = [f"killed by {signal.Signals(-returncode).name} {' '.join(errors[-1:])}".strip()]
    return errors[-1] if errors else f"exit code {returncode}"


def training_command() -> list[str]:
    """Return the arguments with which Python, or Paddle's launcher, trains: [path of train.py] or, if is_installed(),
    [path of paddle-resnet, "train"]."""
    return [script(), "train"] if is_installed() else [str(TRAIN)]
