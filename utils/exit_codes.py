"""The exit code of a command, and the one line that says why it failed."""

import signal
import sys

from utils import logger, signals
from utils.errors import RunError, UsageError, printable

DONE, FAILURE, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


def of(program, function):
    """Call a function and turn how it ends into an exit code.

    Args:
        program: what the error line names.
        function: without arguments; returns an exit code, or None for DONE.
    Returns:
        its exit code; FAILURE for a RunError, USAGE for a UsageError, PREEMPTED for a run that was asked to stop and
        has saved all work, INTERRUPTED for a KeyboardInterrupt. Other exceptions pass.
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
