"""Record the signals that stop a run (SIGTERM, SIGINT, SIGHUP, SIGUSR1). After a signal to stop, all processes of a
training run agree on a step (job/exchange.py), at which the run stops."""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from paddle_resnet.utils.errors import RunError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

_received = None


class Preempted(Exception):
    """A signal stopped the run. The exit code is 75."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the `with` block runs, record signals instead of ending the process. A second SIGINT raises
    KeyboardInterrupt. All other repeated signals are ignored, because Paddle's launcher sends SIGTERM up to three
    times. If SIGHUP is already ignored, as under nohup, it remains ignored. After the block, signals except SIGINT
    remain ignored if a signal was received, or if the block raised an exception in a process of the launcher."""
    global _received
    _received = None
    previous = {number: signal.getsignal(number) for number in NUMBERS}
    _listen()
    is_leaving = False
    try:
        yield
    except BaseException:
        # When the first process ends, the launcher terminates all other processes, so further signals must be ignored.
        is_leaving = "PADDLE_TRAINER_ID" in os.environ
        raise
    finally:
        is_leaving = is_leaving or _received is not None
        for number, handler in previous.items():
            # A signal during shutdown must not change the exit code.
            signal.signal(number, signal.SIG_IGN if is_leaving and number != signal.SIGINT else handler)


def leaving(exit_code: int) -> int:
    """Return `exit_code`, and ignore further signals except SIGINT, so that they cannot change the exit code during
    shutdown."""
    for number in NUMBERS:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
    return exit_code


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block signals in this thread while the `with` block runs, and permanently in the threads that it starts. A
    thread that does not block a signal receives it while the main thread blocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def importing_paddle() -> Iterator[None]:
    """Block signals while Paddle is imported, then restore Python's SIGTERM handler, because Paddle installs a handler
    that prints a trace. A SIGINT during the import would raise a misleading error.

    Raises:
        RunError: Paddle cannot create its cache folder or use a file of its installation.
        OSError: memory or open files are exhausted.
    """
    with blocked():
        try:
            yield
        except OSError as e:
            if e.filename is None or e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # exit_codes.of reports these errors
            path, cache = Path(os.fsdecode(e.filename)), Path(os.path.expanduser("~/.cache"))
            is_cache = path.is_relative_to(cache) or cache.is_relative_to(path)
            remedy = "set HOME to a writable folder" if is_cache else "make it accessible, or install Paddle again"
            raise RunError(f"{path}: cannot be used ({e.strerror}), but Paddle requires it; {remedy}") from e
        finally:
            handler = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, handler)
            signal.siginterrupt(signal.SIGTERM, handler is not _note)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT to the end of the `with` block. Processes that are started in the block inherit the blocked SIGINT,
    so Control-C does not end these processes. The parent process stops these processes itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def received() -> str | None:
    """Return the name of the first signal that watched() recorded, "SIGINT" if it recorded SIGINT later, or None."""
    return _received


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason.

    Args:
        parent: process ID of the parent, which was read before this process started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os.kill(os.getpid(), signal.SIGKILL)


def _listen():
    for number in NUMBERS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _note)
        # Restart system calls after a signal, because Paddle's TCP store would report an interrupted system call as a
        # lost connection.
        signal.siginterrupt(number, False)


def _note(number, frame):
    global _received
    name = signal.Signals(number).name
    if name == "SIGINT" and _received == "SIGINT":
        raise KeyboardInterrupt
    if _received is None or name == "SIGINT":
        _received = name
