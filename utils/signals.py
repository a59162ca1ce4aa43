"""SIGTERM and SIGINT: a run that is asked to stop ends at a step that all processes agree on, with a checkpoint."""

import contextlib
import signal

_received = None


class Preempted(Exception):
    """The run stops because it was asked to; train.py exits with code 75."""


@contextlib.contextmanager
def watched():
    """Note SIGTERM and SIGINT instead of dying from them. A second SIGINT is a KeyboardInterrupt; repeats of SIGTERM
    mean nothing, because Paddle's launcher sends it up to three times."""
    global _received
    _received = None
    previous = {number: signal.signal(number, _note) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        # Paddle's TCP store takes a system call that a signal interrupts for a lost connection.
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, handler in previous.items():
            # Repeats may still come while the process leaves, and must not change its exit code.
            signal.signal(number, signal.SIG_IGN if _received and number == signal.SIGTERM else handler)


def received():
    """Name of the signal that came, or None."""
    return _received


def _note(number, frame):
    global _received
    name = signal.Signals(number).name
    if name == "SIGINT" and _received == "SIGINT":
        raise KeyboardInterrupt
    if _received is None or name == "SIGINT":
        _received = name
