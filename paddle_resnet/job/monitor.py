"""The monitor process of a rank, which ends the rank if the job fails. Each rank of a job has a monitor. watchdog.py
contains the functions through which a rank communicates with its monitor.

The monitor is a separate process, because no thread of the rank can run while C code holds the GIL. Paddle holds the
GIL while it sets up communication, and sometimes while it copies a batch and the GPU waits for another rank.

All monitors connect to the coordinator, which runs in the monitor of rank 0. The coordinator determines the first cause
of a failure and sends the cause to all monitors. The monitors of the other ranks print the cause and end their ranks
with the exit code that the failed rank reported, or 1. A closed connection indicates that the process at the other end
has exited or cannot be reached.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from paddle_resnet.job import channel, processes
from paddle_resnet.job.position import Position, describe_stall, where_is
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import program

# Time limit for a rank to exit before its monitor kills it, and for a monitor to print or forward the cause of a
# failure. While a monitor waits, it checks its condition every POLL_S.
GRACE_S = 2
POLL_S = 0.05
# Signals that end a process by default, or that job schedulers send. Monitors may also receive these signals, but must
# continue to run.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GONE = "its process was killed (out of memory?) or crashed{}, or its connection was lost; see the log of that rank"


def start(
    rank: int,
    world_size: int,
    timeout_s: float,
    master: str,
    process: socket.socket,
    position: Position,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start the monitor of this process.

    Args:
        rank, world_size, timeout_s, master: see watchdog.start.
        process: socket for messages between this process and its monitor.
        position: Position of this process.
        listener: listening socket of the coordinator, on rank 0.
    Returns:
        the process of the monitor.
    """
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from paddle_resnet.job import monitor; monitor.main(sys.argv[2])"
    )
    descriptors = [process.fileno(), position.descriptor, *([listener.fileno()] if listener else [])]
    facts = json.dumps([rank, world_size, timeout_s, master, os.getpid(), processes.LAUNCHER, *descriptors])
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, _SIGNALS
    )  # the monitor inherits the signal mask, and exits when its rank exits
    try:
        return subprocess.Popen(
            # With -I, Python does not import modules from the working directory.
            [sys.executable, "-I", "-c", program, str(Path(__file__).parent.parent.parent), facts],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # the monitor survives if the rank's session is killed
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(facts: str) -> None:
    """Run the monitor process. `facts` is JSON text from start()."""
    rank, world_size, timeout_s, master, pid, launcher, process, position, *listener = json.loads(facts)

    async def run():
        coordinator = _Coordinator(world_size, timeout_s, socket.socket(fileno=listener[0])) if rank == 0 else None
        ends = socket.socket(fileno=process), Position(position)
        period_s = _period_s(world_size, timeout_s)
        await Monitor(rank, timeout_s, period_s, master, pid, launcher, *ends, coordinator).run()
        if coordinator:
            await coordinator.finish()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the coordinator needs a descriptor for each rank
    asyncio.run(run())


def _period_s(world_size, timeout_s):
    """Return the seconds between two reports of a rank's position. Above 100 ranks, the period grows with the number of
    ranks, because every rank reports to the coordinator once per period."""
    return min(max(1.0, world_size / 100), timeout_s / 10)


class Monitor:
    """The monitor of a rank.

    Args:
        rank, timeout_s, master: see watchdog.start.
        period_s: seconds between two reports of the rank's position.
        pid, launcher: process IDs of the rank and of Paddle's launcher.
        process, position: see start.
        coordinator: the coordinator of the job, on rank 0.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        period_s: float,
        master: str,
        pid: int,
        launcher: int,
        process: socket.socket,
        position: Position,
        coordinator: "_Coordinator | None" = None,
    ) -> None:
        self._rank, self._timeout_s, self._period_s, self._master = rank, timeout_s, period_s, master
        self._pid, self._launcher = pid, launcher
        self._process, self._position, self._coordinator = process, position, coordinator
        self._address = asyncio.get_running_loop().create_future()  # address of the coordinator, and key of the job
        self._outcome = asyncio.get_running_loop().create_future()  # arguments of _decide
        self._to_coordinator, self._last_message = None, time.monotonic()
        self._is_rank_gone = False

    async def run(self) -> None:
        """Monitor the rank until it leaves the job or the job fails."""
        reader, writer = await asyncio.open_unix_connection(sock=self._process, limit=channel.LINE_BYTES)
        work = map(
            asyncio.create_task,
            (self._receive_from_rank(reader), self._send_positions(), self._receive_from_coordinator()),
        )
        done, _ = await asyncio.wait({self._outcome, *work}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()  # re-raise unexpected exceptions
        message, code, final_message = self._outcome.result()
        if message:
            _print(f"{program('train')}: error: {message}")
        writer.write(bytes([code]))
        if final_message:
            await _until(lambda: self._to_coordinator)
        if self._to_coordinator:
            self._send({"at": self._position.read()})
            if final_message:
                self._send(final_message)
            channel.end(self._to_coordinator)
            await _until(lambda: not self._to_coordinator)
        if code:
            await _until(self._has_rank_ended)
            if not self._has_rank_ended():
                os.kill(self._pid, signal.SIGKILL)

    def _decide(self, message, code, final_message=None):
        """Set the outcome of this monitor, unless an earlier call has set it.

        Args:
            message: message to print, or None.
            code: exit code for the rank, or 0 if the rank exits by itself.
            final_message: message to the coordinator, or None.
        """
        if not self._outcome.done():
            self._outcome.set_result((message, code, final_message))

    def _send(self, message):
        if self._to_coordinator:
            channel.send(self._to_coordinator, message)

    async def _receive_from_rank(self, reader):
        while message := await channel.receive(reader):
            if "address" in message:
                self._address.set_result(message["address"])
            else:
                self._decide(None, 0, message)  # {"failed": cause, "code": exit code} or {"bye": True}
        self._is_rank_gone = True
        self._decide(None, 0)  # the coordinator detects the closed connection

    def _has_rank_ended(self):
        # The connection may stay open after the rank has exited, because processes that the rank has forked share it.
        return self._is_rank_gone or os.getppid() != self._pid

    async def _send_positions(self):
        launcher = self._launcher
        while not self._has_rank_ended():
            if launcher and _parent(self._pid) not in (launcher, None):  # the launcher has ended without its ranks
                launcher = None
                os.kill(self._pid, signal.SIGTERM)
            self._send({"at": self._position.read(), "stopped": _is_stopped(self._pid)})
            if self._coordinator:
                self._coordinator.check_progress()
            silence = time.monotonic() - self._last_message
            if silence >= self._timeout_s:
                what = "no message from rank 0" if self._to_coordinator else "not all ranks have connected"
                where = f"after {silence:.0f} s; check PADDLE_MASTER {self._master} and the network"
                self._decide(f"--comm-timeout-s {self._timeout_s:g}: {what} {where}", 1)
            await asyncio.sleep(self._period_s)
        self._decide(None, 0)

    async def _receive_from_coordinator(self):
        address = await self._address
        if self._coordinator:
            await self._coordinator.open(address["key"])
        try:
            reader, self._to_coordinator = await channel.connect(**address, rank=self._rank)
        except OSError as e:
            server = f"{address['host']}:{address['port']}"
            self._decide(
                f"monitor of rank 0 at {server}: cannot be reached ({e}); check the log of rank 0 and the network", 1
            )
            return
        while message := await channel.receive(reader):
            self._last_message = time.monotonic()
            match message:
                case {"end": str(cause), "code": int(code)} if 0 < code < 256:
                    self._decide(cause, code)
        self._to_coordinator.close()
        self._to_coordinator = None
        self._decide(f"rank 0 failed first: {_GONE.format('')}", 1)


class _Coordinator:
    """Receives the positions of all ranks, and informs all ranks when a rank fails or stalls."""

    def __init__(self, world_size, timeout_s, listener):
        self._world_size, self._timeout_s, self._listener = world_size, timeout_s, listener
        self._writers, self._has_connected = {}, set()  # {rank: writer}, and all ranks that have connected so far
        self._seen: dict[int, tuple[list, float]] = {}  # {rank: (position, time of the last change)}
        self._stopped = set()  # ranks stopped by SIGSTOP or a debugger
        self._end = None  # message to all monitors

    async def open(self, key):
        """Accept connections from the ranks; `key` is the key of the job."""
        self._seen = {rank: ([0, 0, "startup"], time.monotonic()) for rank in range(self._world_size)}
        await channel.serve(self._listener, key, self._world_size, self._welcome)

    async def finish(self):
        """After a failure, wait up to GRACE_S for ranks that have not connected yet, so that they also receive the
        cause. Then wait up to GRACE_S until all ranks have closed their connections."""
        if self._end:
            await _until(lambda: len(self._has_connected) == self._world_size)
        for writer in self._writers.values():
            channel.end(writer)
        await _until(lambda: not self._writers)

    async def _welcome(self, rank, reader, writer):
        if rank in self._has_connected:
            return
        self._has_connected.add(rank)
        self._writers[rank] = writer
        if self._end:
            channel.send(writer, self._end)
        while message := await channel.receive(reader):
            self._receive(rank, message)
        if rank in self._seen:  # the rank has not sent "bye"
            self._fail(f"rank {rank} failed first: {_GONE.format(' in ' + where_is(self._seen[rank][0]))}", 1)
        del self._writers[rank]

    def _receive(self, rank, message):
        match message:  # all other messages are ignored
            case {"at": [int(), int(), str()] as position} if rank in self._seen:
                if position != self._seen[rank][0]:
                    self._seen[rank] = (list(position), time.monotonic())
                self._stopped.discard(rank)
                if message.get("stopped") is True:
                    self._stopped.add(rank)
            case {"failed": str(cause), "code": int(code)} if 0 < code < 256:
                self._fail(f"rank {rank} failed first: {cause}", code)
            case {"bye": True}:
                self._seen.pop(rank, None)
                self._stopped.discard(rank)

    def check_progress(self):
        self._send({"alive": True})
        if self._seen and time.monotonic() - min(since for _, since in self._seen.values()) >= self._timeout_s:
            positions = {rank: position for rank, (position, _) in self._seen.items()}
            where = describe_stall(positions, sorted(self._stopped))
            self._fail(
                f"--comm-timeout-s {self._timeout_s:g}: no progress for {self._timeout_s:g} s; {where}; see the logs "
                "of the ranks, or use a larger value",
                1,
            )

    def _fail(self, message, code):
        if not self._end:
            self._end = {"end": message, "code": code}
            self._send(self._end)

    def _send(self, message):
        for writer in self._writers.values():
            channel.send(writer, message)


async def _until(condition):
    deadline = time.monotonic() + GRACE_S
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def _parent(pid):
    """Return the process ID of the parent of a process, or None if the process does not exist."""
    stat = _stat(pid)
    return stat and int(stat[1])


def _is_stopped(pid):
    """Return whether a signal (SIGSTOP) or a debugger has stopped a process."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def _stat(pid):
    """Return the fields of /proc/PID/stat (see proc(5)) starting with the process state, or None if the process does
    not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _print(line):
    """Write a line to stderr in a thread, so that a full disk or a blocked pipe does not keep the rank alive."""

    def write():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            logger.write_line(line, sys.stderr)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(GRACE_S)
