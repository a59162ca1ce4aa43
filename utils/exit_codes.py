"""The exit code of a command, and the one line that says why it failed."""

import os
import resource
import signal
import sys

from utils import logger, signals
from utils.errors import RunError, UsageError, core, printable

# What Paddle, DALI, NumPy and the system call it.
_NO_THREAD = ("Resource temporarily unavailable", "can't start new thread")
_NO_MEMORY = ("ResourceExhaustedError", "bad_alloc", "Cannot allocate memory", *_NO_THREAD)
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
        message = "\n".join(printable(str(line)) for line in e.args)
        logger.write_line(f"{program}: error: {message}", sys.stderr)
        return USAGE if isinstance(e, UsageError) else FAILURE
    except signals.Preempted as e:
        logger.info(f"stopped by {signals.received() or 'a signal to another process'}{e}")
        return PREEMPTED
    except KeyboardInterrupt:
        logger.write_line(f"{program}: interrupted", sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as e:
        if not isinstance(e, MemoryError) and not any(name in str(e) for name in _NO_MEMORY):
            raise
        logger.write_line(f"{program}: error: {_no_memory(e)}", sys.stderr)
        if "paddle" not in sys.modules:  # its import may have failed half-way, and the end of the process would hang
            sys.stdout.flush()
            os._exit(FAILURE)
        return FAILURE


def _no_memory(error):
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [] if limit == resource.RLIM_INFINITY else [f"ulimit -v allows {limit >> 20:,} MiB"]
    reason = ": ".join([*limits, *([core(error)] if str(error) else [])])
    reason = f" ({reason})" if reason else ""
    if any(name in reason for name in _NO_THREAD):
        return f"no more threads can be started{reason}: give more memory, or allow more processes (ulimit -u)"
    return f"too little memory{reason}: give a smaller --batch-size, or more memory"
