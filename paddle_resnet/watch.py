"""The process beside each rank of a job: it watches over the job while the rank works (watchdog.py).

It is a process and not a thread of the rank because C code that waits may keep Python's lock. Paddle's set-up of
communication does. So does a copy of a batch, while a GPU waits for another rank: the hardware decoder for JPEG files
frees memory then, which waits for the GPU and holds a lock of CUDA's that the copy wants.

The watches of all ranks are connected to rank 0's; a connection that breaks tells at once that a machine or a process
is gone, where the launcher's store, which has no answer for that, would be silent. Rank 0's decides what the first
cause is and tells the others; each prints it and ends its rank with the exit code of the rank that failed.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from utils import logger

# A silent machine is given up after about this time by TCP itself.
SILENCE_S = 30
# How long a rank may take to end once it is told to, before it is killed.
GRACE_S = 2


def start(rank, world_size, timeout_s, token, network, process):
    """Start the watch of this process.

    Args:
        rank, world_size: of this process.
        timeout_s: seconds without progress after which the job ends.
        token: of this job; strangers may connect.
        network: socket, on rank 0 the listening one, elsewhere one connected to that.
        process: socket for what this process and its watch tell each other.
    Returns:
        subprocess.Popen.
    """
    program = "import sys; sys.path.insert(0, sys.argv[1]); from paddle_resnet import watch; watch.main(sys.argv[2])"
    facts = [rank, world_size, timeout_s, token, network.fileno(), process.fileno(), os.getpid()]
    return subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent.parent), json.dumps(facts)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(network.fileno(), process.fileno()),
        start_new_session=True,  # a signal to the job's processes is theirs; this one ends as they do
    )


def main(facts):
    rank, world_size, timeout_s, token, network, process, pid = json.loads(facts)
    process, network = Connection(socket.socket(fileno=process)), socket.socket(fileno=network)
    if rank == 0:
        _Hub(timeout_s, world_size, process, pid, network, token).run()
    else:
        _Spoke(timeout_s, world_size, process, pid, network, token, rank).run()


def period_s(timeout_s, world_size):
    """Seconds between two looks: one, but with many ranks not so often that rank 0's watch has its hands full."""
    return min(max(1.0, world_size / 100), timeout_s / 10)


class Connection:
    """Lines of JSON over a socket."""

    def __init__(self, connection):
        self.socket, self._data, self._lock = connection, b"", threading.Lock()
        connection.settimeout(SILENCE_S)
        if connection.family == socket.AF_UNIX:
            return
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            connection.setsockopt(level, option, value)

    def send(self, message):
        with self._lock, contextlib.suppress(OSError):  # a broken connection shows when it is read
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        """[message], and whether the connection is at its end."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._data = (self._data + data).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines], not data
        except (ValueError, TypeError):  # a stranger's
            return [], True


_GONE = "its process ended without a word{}: it was killed (out of memory?) or crashed, its own log may say more"


class _Watch:
    def __init__(self, timeout_s, world_size, process, pid):
        self.timeout_s = timeout_s
        self.period_s = period_s(timeout_s, world_size)
        self.selector = selectors.DefaultSelector()
        self.selector.register(process.socket, selectors.EVENT_READ, process)
        self.is_over = False
        self._process, self._pid = process, pid

    def run(self):
        next_look = 0.0
        while not self.is_over:
            for key, _ in self.selector.select(self.period_s):
                if not self.is_over:
                    self.handle(key)
            if not self.is_over and time.monotonic() >= next_look:
                next_look = time.monotonic() + self.period_s
                self.look()

    def handle(self, key):
        if key.data is not self._process:
            self.handle_network(key)
            return
        messages, is_gone = self._process.receive()
        for message in messages:
            if "failed" in message or "bye" in message:  # it ends by itself
                self.leave(message)
                self._process.send({"leave": True})
                self.is_over = True
            else:
                self.hear(message)
        if is_gone and not self.is_over:
            self.lose()
            self.is_over = True

    def end(self, message, code):
        """End this rank."""
        self.is_over = True
        self.pass_on(message, code)
        logger.write_line(f"train.py: error: {message}", sys.stderr)
        self._process.send({"end": code})
        self._process.socket.settimeout(GRACE_S)
        with contextlib.suppress(OSError):
            while self._process.socket.recv(1 << 16):
                pass
            return  # it has ended
        if os.getppid() == self._pid:  # and no other process that has got its number
            os.kill(self._pid, signal.SIGKILL)

    def pass_on(self, message, code):
        pass


class _Hub(_Watch):
    """Rank 0's."""

    def __init__(self, timeout_s, world_size, process, pid, listener, token):
        super().__init__(timeout_s, world_size, process, pid)
        self._ranks, self._token = {}, token
        self._seen = {}  # rank: (where it is, since when it has been there)
        self.selector.register(listener, selectors.EVENT_READ)

    def handle_network(self, key):
        if key.data is None:
            connection = Connection(key.fileobj.accept()[0])
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)
            return
        messages, is_gone = key.data.receive()
        for message in messages:
            if message.get("token") == self._token:
                self._ranks[key.data] = message["rank"]
        rank = self._ranks.get(key.data)
        if rank is None:  # not one of ours, or not introduced yet
            messages = []
        for message in messages:
            if "at" in message:
                self._note(rank, message["at"])
            elif "post" in message:
                self._process.send({"post": [rank, *message["post"]]})
            elif "failed" in message:
                self.end(f"rank {rank} failed first: {message['failed']}", message["code"])
                return
            elif "bye" in message:
                self._ranks.pop(key.data)
                rank = None
        if is_gone:
            self.selector.unregister(key.data.socket)
            key.data.socket.close()
            if rank is not None:
                self.end(f"rank {rank} failed first: {self._gone(rank)}", 1)

    def hear(self, message):
        self._note(0, message["at"])

    def _note(self, rank, position):
        self._seen[rank] = (tuple(position), time.monotonic())

    def look(self):
        self._tell({"alive": True})
        since = min((since for _, since in self._seen.values()), default=time.monotonic())
        if time.monotonic() - since >= self.timeout_s:
            self.end(_standstill(self.timeout_s, {rank: at for rank, (at, _) in self._seen.items()}), 1)

    def leave(self, last_words):
        if "failed" in last_words:
            self.pass_on(f"rank 0 failed first: {last_words['failed']}", last_words["code"])

    def lose(self):
        self.pass_on(f"rank 0 failed first: {self._gone(0)}", 1)

    def pass_on(self, message, code):
        self._tell({"end": message, "code": code})

    def _tell(self, message):
        for connection in list(self._ranks):
            connection.send(message)

    def _gone(self, rank):
        where = f" in {_where(self._seen[rank][0])}" if rank in self._seen else ""
        return _GONE.format(where)


class _Spoke(_Watch):
    """Any other rank's."""

    def __init__(self, timeout_s, world_size, process, pid, connection, token, rank):
        super().__init__(timeout_s, world_size, process, pid)
        self._connection = Connection(connection)
        self._heard = time.monotonic()
        self._connection.send({"token": token, "rank": rank})
        self.selector.register(connection, selectors.EVENT_READ)

    def handle_network(self, key):
        self._heard = time.monotonic()
        messages, is_gone = self._connection.receive()
        for message in messages:
            if "end" in message:
                self.end(message["end"], message["code"])
                return
        if is_gone:
            self.end(f"rank 0 failed first: {_GONE.format('')}", 1)

    def look(self):
        # Rank 0's watch says who stands still, unless its machine does.
        silence = time.monotonic() - self._heard
        if silence >= self.timeout_s:
            self.end(f"--comm-timeout-s {self.timeout_s:g}: rank 0 has not been heard of for {silence:.0f} s", 1)

    def hear(self, message):
        self._connection.send(message)

    leave = hear

    def lose(self):
        """The connection, which ends with this process, tells rank 0."""


def _standstill(timeout_s, positions):
    """Name the ranks that are behind.

    Args:
        timeout_s: the flag.
        positions: {rank: (phase, place in it, ...)}.
    """
    first, last = min(p[:2] for p in positions.values()), max(p[:2] for p in positions.values())
    behind = [rank for rank in sorted(positions) if positions[rank][:2] == first]
    message = f"--comm-timeout-s {timeout_s:g}: no progress for that long: "
    if first == last:
        return f"{message}all ranks are in {_where(positions[0])}"
    ahead = next(p for p in positions.values() if p[:2] == last)
    return f"{message}{ranks(behind)} last seen in {_where(positions[behind[0]])}, others wait in {_where(ahead)}"


def ranks(numbers):
    """A few ranks in words."""
    text = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def _where(position):
    _, place, name, number = position
    if number is None:
        return name
    return f"{name}, step {number}" + (", waiting for images" if place % 2 else "")
