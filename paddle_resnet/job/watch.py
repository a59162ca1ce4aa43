"""The watch: a process beside each rank of a job that ends its rank when the job fails (watchdog.py: the rank's side).

It is a process because no thread of the rank can run while C code holds Python's lock. Paddle holds it while it sets up
communication; so can a copy of a batch, while the GPU waits for another rank.

All watches connect to the judge in rank 0's watch. It decides on the first cause and tells all. Each watch prints the
cause and ends its rank with the exit code of the rank that failed. A broken connection shows that a process is gone.
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

from paddle_resnet.job import channel
from paddle_resnet.job.position import Position, standstill, where_is
from utils import logger

# How long a rank may take to end before it is killed, and how long a watch stays to pass on why.
GRACE_S = 2
POLL_S = 0.05
# Signals that ask a process to end, or that a job's script may use. Some senders reach every process of a job.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GONE = "its process ended without a word{}: it was killed (out of memory?) or crashed, its own log may say more"


def start(rank, world_size, timeout_s, master, process, position, listener=None):
    """Start the watch of this process.

    Args:
        rank, world_size, timeout_s, master: as watchdog.start.
        process: socket for what this process and its watch tell each other.
        position: Position of this process.
        listener: socket of the judge, on rank 0.
    Returns:
        subprocess.Popen.
    """
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from paddle_resnet.job import watch; watch.main(sys.argv[2])"
    )
    descriptors = [process.fileno(), position.descriptor, *([listener.fileno()] if listener else [])]
    facts = json.dumps([rank, world_size, timeout_s, master, os.getpid(), *descriptors])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited: the watch ends when its rank does
    try:
        return subprocess.Popen(
            # -I: do not import modules of the working directory.
            [sys.executable, "-I", "-c", program, str(Path(__file__).parent.parent.parent), facts],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # whoever kills the rank's session leaves the watch time to tell others
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(facts):
    rank, world_size, timeout_s, master, pid, process, position, *listener = json.loads(facts)

    async def run():
        judge = _Judge(world_size, timeout_s, socket.socket(fileno=listener[0])) if rank == 0 else None
        # With many ranks more time between two looks, since each rank then tells the judge where it is.
        period_s = min(max(1.0, world_size / 100), timeout_s / 10)
        ends = socket.socket(fileno=process), Position(position)
        await Watch(rank, timeout_s, period_s, master, pid, *ends, judge).run()
        if judge:
            await judge.finish()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the judge has a connection to each rank
    asyncio.run(run())


class Watch:
    def __init__(self, rank, timeout_s, period_s, master, pid, process, position, judge=None):
        self._rank, self._timeout_s, self._period_s, self._master = rank, timeout_s, period_s, master
        self._pid, self._process, self._position, self._judge = pid, process, position, judge
        self._address = asyncio.get_running_loop().create_future()  # of the judge, with this rank's key
        self._verdict = asyncio.get_running_loop().create_future()  # arguments of decide
        self._to_judge, self._heard = None, time.monotonic()
        self._is_rank_gone = False

    async def run(self):
        reader, writer = await asyncio.open_unix_connection(sock=self._process, limit=1 << 30)  # all keys
        work = map(asyncio.create_task, (self._hear_rank(reader), self._look_around(), self._hear_judge()))
        done, _ = await asyncio.wait({self._verdict, *work}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()  # raises what nobody expected
        message, code, last_words = self._verdict.result()
        if message:
            _say(f"train.py: error: {message}")
        writer.write(bytes([code]))
        if last_words:
            await _until(lambda: self._to_judge)
        if self._to_judge:
            self._tell({"at": self._position.read()})
            if last_words:
                self._tell(last_words)
            channel.end(self._to_judge)
            await _until(lambda: not self._to_judge)
        if code:
            await _until(self._has_rank_ended)
            if not self._has_rank_ended():
                os.kill(self._pid, signal.SIGKILL)

    def _decide(self, message, code, last_words=None):
        """Settle how this watch ends. The first call counts.

        Args:
            message: to print, or None.
            code: exit code for the rank; 0 if it ends by itself.
            last_words: message to the judge, or None.
        """
        if not self._verdict.done():
            self._verdict.set_result((message, code, last_words))

    def _tell(self, message):
        if self._to_judge:
            self._to_judge.write(channel.encode(message))

    async def _hear_rank(self, reader):
        while message := await channel.receive(reader):
            if "address" in message:
                self._address.set_result(message["address"])
            else:
                self._decide(None, 0, message)  # {"failed": cause, "code": exit code} or {"bye": True}
        self._is_rank_gone = True
        self._decide(None, 0)  # the end of the connection tells the judge

    def _has_rank_ended(self):
        return self._is_rank_gone or os.getppid() != self._pid  # what it has forked may keep its connection open

    async def _look_around(self):
        launcher = _parent(self._pid)
        while not self._has_rank_ended():
            if launcher and _parent(self._pid) not in (launcher, None):
                launcher = None
                os.kill(self._pid, signal.SIGTERM)
            self._tell({"at": self._position.read(), "stopped": _is_stopped(self._pid)})
            if self._judge:
                self._judge.look()
            silence = time.monotonic() - self._heard
            if silence >= self._timeout_s:
                what = "rank 0 has not been heard of" if self._to_judge else "the ranks have not found each other"
                where = f"for {silence:.0f} s (PADDLE_MASTER {self._master})"
                self._decide(f"--comm-timeout-s {self._timeout_s:g}: {what} {where}", 1)
            await asyncio.sleep(self._period_s)
        self._decide(None, 0)

    async def _hear_judge(self):
        address = await self._address
        if self._judge:
            await self._judge.open(address.pop("keys"))
        try:
            reader, self._to_judge = await channel.connect(**address, rank=self._rank)
        except OSError as e:
            self._decide(f"no connection to the watch of rank 0 at {address['host']}:{address['port']} ({e})", 1)
            return
        while message := await channel.receive(reader):
            self._heard = time.monotonic()
            match message:
                case {"end": str(cause), "code": int(code)} if 0 < code < 256:
                    self._decide(cause, code)
        self._to_judge.close()
        self._to_judge = None
        self._decide(f"rank 0 failed first: {_GONE.format('')}", 1)


class _Judge:
    """Hears where all ranks are, and tells all when one fails or stands still."""

    def __init__(self, world_size, timeout_s, listener):
        self._world_size, self._timeout_s, self._listener = world_size, timeout_s, listener
        self._peers, self._known = {}, set()  # {rank: writer}, ranks that have ever connected
        self._seen = {}  # {rank: (position, since when)}
        self._stopped = set()  # ranks that a signal has stopped
        self._end = None  # message to all

    async def open(self, keys):
        """Begin to hear the ranks; keys: [(rank, key)]."""
        self._seen = {rank: ([0, 0, "the start"], time.monotonic()) for rank, _ in keys}
        await channel.serve(self._listener, keys, self._welcome)

    async def finish(self):
        """Let no rank end without the cause, not even one that connects only now."""
        if self._end:
            await _until(lambda: len(self._known) == self._world_size)
        for peer in self._peers.values():
            channel.end(peer)
        await _until(lambda: not self._peers)

    async def _welcome(self, rank, reader, writer):
        if rank in self._known:
            return
        self._known.add(rank)
        self._peers[rank] = writer
        if self._end:
            writer.write(channel.encode(self._end))
        while message := await channel.receive(reader):
            self._hear(rank, message)
        if rank in self._seen:  # it did not say goodbye
            self._fail(f"rank {rank} failed first: {_GONE.format(' in ' + where_is(self._seen[rank][0]))}", 1)
        del self._peers[rank]

    def _hear(self, rank, message):
        match message:  # anything else means nothing
            case {"at": [int(), int(), str()] as position} if rank in self._seen:
                if position != self._seen[rank][0]:
                    self._seen[rank] = (position, time.monotonic())
                self._stopped.discard(rank)
                if message.get("stopped") is True:
                    self._stopped.add(rank)
            case {"failed": str(cause), "code": int(code)} if 0 < code < 256:
                self._fail(f"rank {rank} failed first: {cause}", code)
            case {"bye": True}:
                self._seen.pop(rank, None)
                self._stopped.discard(rank)

    def look(self):
        self._tell({"alive": True})
        if self._seen and time.monotonic() - min(since for _, since in self._seen.values()) >= self._timeout_s:
            positions = {rank: position for rank, (position, _) in self._seen.items()}
            where = standstill(positions, sorted(self._stopped))
            self._fail(f"--comm-timeout-s {self._timeout_s:g}: no progress for that long: {where}", 1)

    def _fail(self, message, code):
        if not self._end:
            self._end = {"end": message, "code": code}
            self._tell(self._end)

    def _tell(self, message):
        for peer in self._peers.values():
            peer.write(channel.encode(message))


async def _until(condition):
    deadline = time.monotonic() + GRACE_S
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def _parent(pid):
    """Process id of a process's parent; None if the process is gone."""
    stat = _stat(pid)
    return stat and int(stat[1])


def _is_stopped(pid):
    """Whether a signal (SIGSTOP) or a debugger has stopped a process."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def _stat(pid):
    """State, parent and the other fields of a process from proc(5); None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _say(line):
    """Write a line on stderr. A full disk or a pipe that nobody reads must not keep a rank alive."""

    def write():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            logger.write_line(line, sys.stderr)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(GRACE_S)
