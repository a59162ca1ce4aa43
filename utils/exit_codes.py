"""The exit code of a command, and the one line that says why it failed."""

import os
import resource
import signal
import sys

from utils import logger, signals
from utils.errors import RunError, UsageError, printable

# What Paddle, DALI, NumPy and the system call it; the last two are said of a thread that cannot be started.
_NO_MEMORY = (
    *("ResourceExhaustedError", "bad_alloc", "Cannot allocate memory"),
    *("Resource temporarily unavailable", "can't start new thread"),
)
DONE, FAILURE, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


def of(program, function):
    """Call a function and turn how it ends into an exit code.

    Args:
        program: what the error line names.
        function: without arguments; returns an exit code, or None for DONE.
    Returns:
        its exit code; FAILURE for a RunError or too little memory, USAGE for a UsageError, PREEMPTED for a run that
        was asked to stop and has saved all work, INTERRUPTED for a KeyboardInterrupt. Other exceptions pass.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # paddle_resnet/__init__.py blocks it
        return function() or DONE
    except (UsageError, RunError) as e:
        message = "\n".join(map(printable, str(e).split("\n")))
        logger.write_line(f"{program}: error: {message}", sys.stderr)
        return USAGE if isinstance(e, UsageError) else FAILURE
    except signals.Preempted as e:
        logger.info(f"stopped by {signals.received() or 'a signal to another process'}{e}")
        return PREEMPTED
    except KeyboardInterrupt:
        logger.write_line(f"{program}: interrupted", sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as e:
        named = [line.strip() for line in str(e).splitlines() if any(name in line for name in _NO_MEMORY)]
        if not named and not isinstance(e, MemoryError):
            raise
        logger.write_line(f"{program}: error: {_no_memory(named)}", sys.stderr)
        if "paddle" not in sys.modules:  # its import has failed half-way, and the end of the process would hang
            os._exit(FAILURE)
        return FAILURE


def _no_memory(named):
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [] if limit == resource.RLIM_INFINITY else [f"ulimit -v allows {limit >> 20:,} MiB"]
    reason = f" ({': '.join([*limits, *named[:1]])})" if limits or named else ""
    return f"too little memory{reason}: give a smaller --batch-size, or more memory"
