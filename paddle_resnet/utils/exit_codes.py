"""Convert the outcome of a command to an exit code, and print an error message if the command fails."""

import contextlib
import errno
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable

from paddle_resnet.utils import logger, signals
from paddle_resnet.utils.errors import RunError, UsageError, core, printable

# Texts in the messages of Paddle, oneDNN, DALI, NumPy and the operating system if memory, threads or open files are
# exhausted.
_NO_THREAD = ("Resource temporarily unavailable", "can't start new thread")
_NO_FILE = "Too many open files"
_NO_MEMORY = (
    *("ResourceExhaustedError", "bad_alloc", "Cannot allocate memory", "could not create a memory object"),
    *("could not create a primitive", "failed to map segment", *_NO_THREAD, _NO_FILE),
)
# If CUDA fails on a GPU, Paddle 2.6.2 can report that memory is insufficient, with a size of 128 TB, which no GPU has.
_NO_GPU = re.compile(r"\d{3,}\.\d+TB memory has been allocated")
# errno values for paths that cannot be used. Even Path.exists() can raise an OSError with one of these values, for
# example if a parent folder is unreadable.
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
_NO_TEMPORARY_FOLDER = "No usable temporary directory"  # error message of Python's tempfile module
DONE, FAILURE, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130
# Exit code that a shell reports for a program that SIGPIPE has ended, such as `yes` in `yes | head`.
CLOSED_PIPE = 128 + signal.SIGPIPE
# If less address space than this is available, an import or a step can fail without a clear error message. A small
# training run on a CPU used 3.2 to 3.5 GiB of address space.
LEAST_ADDRESS_SPACE = 4 << 30  # bytes


def of(program: str, function: Callable[[], int | None], needs_stdout: bool = True) -> int:
    """Call a function and convert its outcome to an exit code.

    Args:
        program: name of the command in error messages.
        function: function without arguments that returns an exit code, or None for DONE.
        needs_stdout: whether the command fails if it cannot write to stdout.
    Returns:
        the exit code of the function; FAILURE after a RunError, or if memory, threads or open files are exhausted or no
        folder for temporary files is writable; USAGE after a UsageError or if a path is inaccessible; PREEMPTED after
        signals.Preempted; INTERRUPTED after a KeyboardInterrupt; CLOSED_PIPE, without a message, if the program that
        reads stdout has exited. Other exceptions are not caught. If memory is exhausted before Paddle is imported, the
        process ends with FAILURE.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.NUMBERS)  # paddle_resnet/__init__.py blocks these signals
        _check_address_space()
        _check_working_directory()
        _check_docstrings()
        with logger.result_on_stdout() if needs_stdout else contextlib.nullcontext():
            return function() or DONE
    except (UsageError, RunError) as e:
        message = "\n".join(printable(str(line)) for line in e.args)
        _report(program, message)
        return USAGE if isinstance(e, UsageError) else FAILURE
    except signals.Preempted as e:
        logger.info(f"stopped by {signals.received() or 'a signal to another process'}{e}")
        return PREEMPTED
    except logger.ClosedPipe:
        return CLOSED_PIPE
    except KeyboardInterrupt:
        logger.write_line(f"{program}: interrupted", sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as e:
        if isinstance(e, OSError) and _NO_TEMPORARY_FOLDER in str(e):
            _report(program, f"{e.strerror}; set TMPDIR to a writable folder")
            return FAILURE
        if isinstance(e, OSError) and e.errno in _NO_ACCESS and isinstance(e.filename, str | bytes):
            path = printable(os.fsdecode(e.filename))
            remedy = "choose a different path, or make this one accessible"
            _report(program, f"{path}: cannot be used ({e.strerror}); {remedy}")
            return USAGE
        if not isinstance(e, MemoryError) and not any(name in str(e) for name in _NO_MEMORY):
            raise
        _report(program, _no_memory(e))
        if "paddle" not in sys.modules:  # a normal exit would hang after a failed import of Paddle
            sys.stdout.flush()
            os._exit(FAILURE)
        return FAILURE


def _report(program, message):
    """Print an error message. In a job with several processes, the message begins with the rank, because Paddle's
    launcher shows the log of a failed rank, but not the number of the rank."""
    rank, count = os.environ.get("PADDLE_TRAINER_ID", ""), os.environ.get("PADDLE_TRAINERS_NUM", "1")
    subject = f"rank {rank}: " if rank.isdecimal() and count != "1" else ""
    logger.write_line(f"{program}: error: {subject}{message}", sys.stderr)


def _check_address_space():
    if _address_space() < LEAST_ADDRESS_SPACE:
        raise RunError(
            f"ulimit -v: {_address_space() / 2**20:,.0f} MiB of address space, but at least "
            f"{LEAST_ADDRESS_SPACE >> 20:,} MiB are required; raise the limit, for example with ulimit -v unlimited"
        )


def _check_working_directory():
    try:
        os.getcwd()
    except OSError as e:  # importing Paddle would also fail without a working directory
        raise RunError(f"working directory: cannot be used ({e.strerror}); change to a different folder") from e


def _check_docstrings():
    if sys.flags.optimize > 1:
        raise RunError(
            "python -OO or PYTHONOPTIMIZE=2: Paddle cannot be imported without docstrings; use -O or PYTHONOPTIMIZE=1"
        )


def _address_space():
    """Return the address-space limit of the process in bytes, or infinity if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _no_memory(error):
    limits = [f"ulimit -v allows {_address_space() / 2**20:,.0f} MiB"] if _address_space() < math.inf else []
    reason = ": ".join([*limits, *([core(error)] if str(error) else [])])
    reason = f" ({reason})" if reason else ""
    if _NO_FILE in reason:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        remedy = f"raise the limit, for example with ulimit -n {max(1024, 2 * limit)}"
        return f"ulimit -n: {limit} open files are too few{reason}; {remedy}"
    if _NO_GPU.search(reason):
        return f"GPU: CUDA does not work{reason}; check nvidia-smi, and end other programs that use this GPU"
    if any(name in reason for name in _NO_THREAD):
        remedy = "allow more processes (ulimit -u, or the container's limit), or add memory"
        return f"threads: no more threads can be started{reason}; {remedy}"
    remedy = "raise ulimit -v, add memory" if limits else "add memory"
    return f"memory: insufficient{reason}; {remedy}, or use a smaller --batch-size if the command has this flag"
