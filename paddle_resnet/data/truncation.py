"""Report an LMDB that is truncated during a run.

DALI reads LMDBs through a memory map, so reading beyond the new end of the file raises SIGBUS in one of DALI's threads.
Python's signal handlers cannot handle SIGBUS, because the thread would repeat the read before Python runs the handler.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from paddle_resnet.job import watchdog
from paddle_resnet.utils import exit_codes
from paddle_resnet.utils.errors import DataError

_libc = ctypes.CDLL(None)
_sizes = {}  # {path: size in bytes when the file was opened}


def watch(path):
    """Exit with code 2 and an error message if reading a file raises SIGBUS because the file was truncated."""
    _sizes[path] = os.path.getsize(path)
    _libc.signal(signal.SIGBUS, _handler)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _handler(number):
    # The thread that handles the signal was copying data from the map, so it has not acquired a lock that this function
    # needs.
    for path, size in _sizes.items():
        if _size(path) < size:
            error = DataError(f"{path}: was truncated while it was read; write or copy it again")
            code = exit_codes.of(Path(sys.argv[0]).name, lambda error=error: _raise(error))
            watchdog.report_failure(error)
            os._exit(code)
    _libc.signal(number, None)  # the repeated read ends the process


def _size(path):
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _raise(error):
    raise error
