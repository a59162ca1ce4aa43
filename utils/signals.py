"""SIGTERM and SIGINT: a run that is asked to stop ends at a step that all processes agree on, with a checkpoint."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUMBERS = (signal.SIGTERM, signal.SIGINT)

_received = None


class Preempted(Exception):
    """The run stops because it was asked to; train.py exits with code 75."""


@contextlib.contextmanager
def watched():
    """Note SIGTERM and SIGINT instead of dying from them. A second SIGINT is a KeyboardInterrupt; repeats of SIGTERM
    mean nothing, because Paddle's launcher sends it up to three times."""
    global _received
    _received = None
    previous = {number: signal.getsignal(number) for number in NUMBERS}
    _listen()
    is_leaving = False
    try:
        yield
    except BaseException:
        # The launcher terminates whoever is left when the first process is gone.
        is_leaving = "PADDLE_TRAINER_ID" in os.environ
        raise
    finally:
        is_leaving = is_leaving or _received is not None
        for number, handler in previous.items():
            # What comes while the process leaves must not change its exit code.
            signal.signal(number, signal.SIG_IGN if is_leaving and number == signal.SIGTERM else handler)


def leaving(exit_code):
    """Return a process's exit code, which SIGTERM does not change any more while the interpreter ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return exit_code


@contextlib.contextmanager
def held_back():
    """Let signals wait while Paddle is imported, which installs a handler of its own for SIGTERM, and put ours back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        _listen()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def received():
    """Name of the signal that came, or None."""
    return _received


def die_with_parent(parent):
    """Let the kernel kill this process when its parent ends, however that ends.

    Args:
        parent: process id of the parent, noted before this process was started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _listen():
    for number in NUMBERS:
        signal.signal(number, _note)
        # Paddle's TCP store takes a system call that a signal interrupts for a lost connection.
        signal.siginterrupt(number, False)


def _note(number, frame):
    global _received
    name = signal.Signals(number).name
    if name == "SIGINT" and _received == "SIGINT":
        raise KeyboardInterrupt
    if _received is None or name == "SIGINT":
        _received = name
