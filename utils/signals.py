"""Signals that stop a run (SIGTERM, SIGINT, SIGHUP, SIGUSR1): it saves a checkpoint at a step that all processes agree
on."""

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
    """Record these signals instead of exiting. A second SIGINT raises KeyboardInterrupt. Repeated other signals are
    ignored: Paddle's launcher sends SIGTERM up to three times. SIGHUP remains ignored if it was, as under nohup."""
    global _received
    _received = None
    previous = {number: signal.getsignal(number) for number in NUMBERS}
    _listen()
    is_leaving = False
    try:
        yield
    except BaseException:
        # The launcher terminates the remaining processes when the first one ends.
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
    """Defer SIGINT to the end of the block: the import of Paddle would convert it to a different error. Processes that
    start in the block never receive it. Control-C sends it to all processes of a terminal, and this one stops the
    others. SIGTERM keeps its handler: Paddle installs one that prints a trace."""
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
    """Have the kernel kill this process when its parent ends for any reason.

    Args:
        parent: process id of the parent, read before this process was started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _listen():
    for number in NUMBERS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _note)
        # Paddle's TCP store treats a system call interrupted by a signal as a lost connection.
        signal.siginterrupt(number, False)


def _note(number, frame):
    global _received
    name = signal.Signals(number).name
    if name == "SIGINT" and _received == "SIGINT":
        raise KeyboardInterrupt
    if _received is None or name == "SIGINT":
        _received = name
