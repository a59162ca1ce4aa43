"""Functions through which a rank communicates with its monitor (monitor.py): store the position of the rank, leave the
job, and report a failure.

A rank that waits in a collective operation cannot detect that another rank has died, because the rank waits in C code
(with NCCL, indefinitely). Therefore each rank has a separate process that monitors the job. The overhead per step is
two integer stores.
"""

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from paddle_resnet.job import channel, monitor
from paddle_resnet.job.position import Position
from paddle_resnet.utils import logger, progress
from paddle_resnet.utils.errors import RunError, UsageError, program

# Maximum time that a failed rank waits for the report of an earlier failure. PATIENCE_S is below 3 s, because the
# launcher terminates all ranks 3 s after a rank has exited.
PATIENCE_S = 2
# Maximum time that a rank waits for its monitor to allow it to leave the job. While the rank waits, its monitor informs
# the other monitors.
LEAVE_S = 10
# Time limit for a failed rank to exit. Partly initialized threads and processes of Paddle can prevent the rank from
# exiting.
END_S = 30

_position = Position()
_monitor: "_Monitor | None" = None


def phase(name: str) -> None:
    """Store the current phase of this rank. All ranks must go through the same sequence of phases."""
    _position.phase(name)
    progress.phase(name)


def step(number: int, waits: bool = False) -> None:
    """Store the current step of the phase, and whether the step is waiting for images (`waits`)."""
    _position.step(number, waits)


def start(
    rank: int, world_size: int, timeout_s: float, master: str, from_rank_0: Callable[[Callable[[], list]], list]
) -> None:
    """Start the monitor of this rank, and then connect the monitor to the coordinator.

    Args:
        rank, world_size: rank of this process, and number of processes.
        timeout_s: seconds without progress after which the job ends.
        master: PADDLE_MASTER, "host:port" on rank 0's machine.
        from_rank_0: the function exchange.from_rank_0, which may wait indefinitely for rank 0. When this
            function is called, the monitor is already running, and it ends this rank if the job fails.
    Raises:
        UsageError: rank 0's machine cannot listen on the host of `master`. Only rank 0 raises this error.
    """
    global _monitor
    stop()
    host = master.rpartition(":")[0]
    near, far = socket.socketpair()
    with far, contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(host, master)) if rank == 0 else None
        port = listener and listener.getsockname()[1]
        _monitor = one = _Monitor(near, monitor.start(rank, world_size, timeout_s, master, far, _position, listener))
    port, key = from_rank_0(lambda: [port, channel.new_key()])
    one.send({"address": {"host": host, "port": port, "key": key}})


def _listen(host, master):
    try:
        return socket.create_server((host, 0))
    except OSError as e:
        raise UsageError(
            f"PADDLE_MASTER {master}: rank 0's machine cannot listen on that address ({e.strerror}); set the "
            "launcher's --host on that machine to its IP address or, without the launcher, correct PADDLE_MASTER"
        ) from e


def stop() -> None:
    """Leave the job, so that this rank can exit."""
    global _monitor
    if _monitor is not None:
        _monitor.leave({"bye": True})
    _monitor = None


def report_failure(error: BaseException) -> None:
    """Report to all other ranks the error that ends this rank, which must then exit within END_S. If the failure of
    another rank may have caused the error, first wait PATIENCE_S for the report of that failure, which would end this
    process."""
    if _monitor is None:
        return
    if not isinstance(error, (UsageError, RunError, KeyboardInterrupt)):
        time.sleep(PATIENCE_S)
    code = 2 if isinstance(error, UsageError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    name = "" if isinstance(error, (UsageError, RunError)) else f"{type(error).__name__} "
    faulthandler.dump_traceback_later(END_S, exit=True)
    _monitor.leave({"failed": f"{name}{error}".strip()[:4000], "code": code})


class _Monitor:
    """The connection of this rank to its monitor. The monitor replies with one byte: an exit code, or 0 if the rank is
    allowed to leave."""

    def __init__(self, connection, process, leave_s=LEAVE_S):
        self._connection, self._process, self._leave_s = connection, process, leave_s
        self._may_leave = threading.Event()
        threading.Thread(target=self._wait_for_monitor, name="watchdog", daemon=True).start()

    def send(self, message):
        with contextlib.suppress(OSError):  # _wait_for_monitor detects that the monitor has exited
            self._connection.sendall(channel.encode(message))

    def leave(self, final_message):
        """Leave the job. If the monitor is about to end this rank, leave() does not return, so that the rank prints
        nothing more."""
        self.send(final_message)
        has_answered = self._may_leave.wait(self._leave_s)
        self._may_leave.set()
        try:
            self._process.wait(self._leave_s if has_answered else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_for_monitor(self):
        try:
            code = self._connection.recv(1)
        except OSError:  # the monitor has exited without reading all messages
            code = b""
        if code == b"\0" or self._may_leave.is_set():
            self._may_leave.set()
            return
        try:
            if not code:
                message = "monitor: the process that monitors this rank was killed or crashed; start the job again"
                logger.write_line(f"{program('train')}: error: {message}", sys.stderr)
        finally:  # exit even if printing fails, because nothing else ends this process
            os._exit(code[0] if code else 1)
