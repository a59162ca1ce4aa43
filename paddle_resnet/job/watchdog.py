"""The rank's side of its watch (watch.py): where the rank is, how it leaves, and how it ends when the job fails.

A rank blocked in a collective operation cannot notice that a peer died: it waits in C code, with NCCL for ever. So a
process beside each rank watches the job. A step costs the assignment of a number.
"""

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time

from paddle_resnet.job import channel, watch
from paddle_resnet.job.position import Position
from utils import logger, progress
from utils.errors import RunError, UsageError

# How long a rank waits for word of the first cause. The launcher terminates it 3 s after another rank has ended.
PATIENCE_S = 2
# How long a rank waits for its watch to let it go. The watch tells others first.
LEAVE_S = 10
# How long a rank that has failed may take to end. Paddle's threads and processes, half set up, may block it.
END_S = 30

_position = Position()
_watch = None


def phase(name):
    """Note what this rank does now. All ranks must go through the same phases."""
    _position.phase(name)
    progress.phase(name)


def step(number, waits=False):
    """Note the step of the phase; `waits`: for its images."""
    _position.step(number, waits)


def start(rank, world_size, timeout_s, master, gather, from_rank_0):
    """Start the watch, then connect it to the others.

    Args:
        rank, world_size: of this process.
        timeout_s: seconds without progress after which the job ends.
        master: PADDLE_MASTER, "host:port" on rank 0's machine.
        gather, from_rank_0: of exchange.py. They may wait for other ranks without end: the watch is there by then.
    Raises:
        UsageError: rank 0's machine does not have the master's address.
    """
    global _watch
    stop()
    host = master.rpartition(":")[0]
    near, far = socket.socketpair()
    with far, contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(host, master)) if rank == 0 else None
        port = listener and listener.getsockname()[1]
        _watch = one = _Watch(near, watch.start(rank, world_size, timeout_s, master, far, _position, listener))
    private, public = channel.key_pair()
    publics = gather(str(public).encode())
    port, public_0 = from_rank_0(lambda: [port, str(public)])
    address = {"host": host, "port": port, "key": channel.common_key(private, int(public_0))}
    if rank == 0:
        address["keys"] = [(r, channel.common_key(private, int(theirs))) for r, theirs in enumerate(publics)]
    one.tell({"address": address})


def _listen(host, master):
    try:
        return socket.create_server((host, 0))
    except OSError as e:
        raise UsageError(
            f"PADDLE_MASTER {master}: rank 0's machine cannot listen on that address ({e.strerror}): give the launcher "
            "its own address with --master"
        ) from e


def stop():
    """Leave the watch: from now on this rank may end."""
    global _watch
    if _watch is not None:
        _watch.leave({"bye": True})
    _watch = None


def announce(error):
    """Tell the other ranks that this one ends, and why. If another rank may be the cause, wait briefly for its report;
    receiving one ends this process."""
    if _watch is None:
        return
    if not isinstance(error, (UsageError, RunError, KeyboardInterrupt)):
        time.sleep(PATIENCE_S)
    code = 2 if isinstance(error, UsageError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    name = "" if isinstance(error, (UsageError, RunError)) else f"{type(error).__name__} "
    faulthandler.dump_traceback_later(END_S, exit=True)
    _watch.leave({"failed": f"{name}{error}".strip()[:4000], "code": code})


class _Watch:
    """This rank's connection to its watch, which answers with one byte: an exit code, or 0 if the rank may leave."""

    def __init__(self, connection, process):
        self._connection, self._process = connection, process
        self._may_leave = threading.Event()
        threading.Thread(target=self._obey, name="watchdog", daemon=True).start()

    def tell(self, message):
        with contextlib.suppress(OSError):  # _obey notices that the watch is gone
            self._connection.sendall(channel.encode(message))

    def leave(self, last_words):
        """If the watch is about to end this rank, this does not return, so that the rank prints nothing more."""
        self.tell(last_words)
        has_answered = self._may_leave.wait(LEAVE_S)
        self._may_leave.set()
        try:
            self._process.wait(LEAVE_S if has_answered else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _obey(self):
        try:
            verdict = self._connection.recv(1)
        except OSError:  # the watch has not read all
            verdict = b""
        if verdict == b"\0" or self._may_leave.is_set():
            self._may_leave.set()
            return
        try:
            if not verdict:
                message = "the process that watches over this one is gone: was it killed?"
                logger.write_line(f"train.py: error: {message}", sys.stderr)
        finally:  # nothing else would end this process
            os._exit(verdict[0] if verdict else 1)
