"""Handles the signals that stop a run (SIGTERM, SIGINT, SIGHUP, SIGUSR1). The run then saves a checkpoint at a step on
which all processes agree."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

_received = None


class Preempted(Exception):
    """The run stops because of a signal; train.py exits with code 75."""


@contextlib.contextmanager
def watched():
    """Record the signals instead of exiting. A second SIGINT raises KeyboardInterrupt. Other repeated signals are
    ignored, because Paddle's launcher sends SIGTERM up to three times. If SIGHUP was ignored, as under nohup, it
    remains ignored."""
    global _received
    _received = None
    previous = {number: signal.getsignal(number) for number in NUMBERS}
    _listen()
    is_leaving = False
    try:
        yield
    except BaseException:
        # The launcher terminates all processes when the first process ends.
        is_leaving = "PADDLE_TRAINER_ID" in os.environ
        raise
    finally:
        is_leaving = is_leaving or _received is not None
        for number, handler in previous.items():
            # A signal during shutdown must not change the exit code.
            signal.signal(number, signal.SIG_IGN if is_leaving and number != signal.SIGINT else handler)


def leaving(exit_code):
    """Return the exit code, and ignore later signals so that they cannot change it during shutdown."""
    for number in NUMBERS:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return exit_code


@contextlib.contextmanager
def blocked():
    """Block signals while Paddle is imported, then replace the SIGTERM handler that Paddle installs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        _listen()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def deferred():
    """Defer SIGINT to the end of the block, because the import of Paddle would convert it to a different error.
    Processes that start in the block never receive SIGINT: Control-C sends it to all processes of a terminal, but this
    process stops the others itself. Also restore SIGTERM's handler, because Paddle installs one that prints a trace."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def received():
    """Return the name of the signal received, or None."""
    return _received


def die_with_parent(parent):
    """Make the kernel kill this process when its parent ends for any reason.

    Args:
        parent: process ID of the parent, read before this process was started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _listen():
    for number in NUMBERS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _note)
        # Without this, Paddle's TCP store takes a system call interrupted by a signal for a lost connection.
        signal.siginterrupt(number, False)


def _note(number, frame):
    global _received
    name = signal.Signals(number).name
    if name == "SIGINT" and _received == "SIGINT":
        raise KeyboardInterrupt
    if _received is None or name == "SIGINT":
        _received = name
