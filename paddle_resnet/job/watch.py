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
import resource
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
# How often is tried again to send what the other end has not taken.
AGAIN_S = 0.05
# Those that ask a process to end, or that a job's script may use. Some senders reach every process of a job.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start(rank, world_size, timeout_s, token, network, process):
    """Start the watch of this process.

    Args:
        rank, world_size: of this process.
        timeout_s: seconds without progress after which the job ends.
        token: of this job; strangers may connect.
        network: socket, on rank 0 the listening one, elsewhere one connected to that, with the introduction() sent.
        process: socket for what this process and its watch tell each other.
    Returns:
        subprocess.Popen.
    """
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from paddle_resnet.job import watch; watch.main(sys.argv[2])"
    )
    facts = [rank, world_size, timeout_s, token, network.fileno(), process.fileno(), os.getpid()]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited: the watch ends when its rank does
    try:
        return subprocess.Popen(
            # -I: modules of the working directory are none of this program's.
            [sys.executable, "-I", "-c", program, str(Path(__file__).parent.parent.parent), json.dumps(facts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(network.fileno(), process.fileno()),
            start_new_session=True,  # what ends the job's processes one by one leaves it time for a last word
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def introduction(rank, token):
    """The first message of a rank to rank 0."""
    return {"token": token, "rank": rank}


def main(facts):
    rank, world_size, timeout_s, token, network, process, pid = json.loads(facts)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # rank 0's has a connection for each rank
    process, network = Connection(socket.socket(fileno=process)), socket.socket(fileno=network)
    if rank == 0:
        _Hub(timeout_s, world_size, process, pid, network, token).run()
    else:
        _Spoke(timeout_s, world_size, process, pid, network).run()


def period_s(timeout_s, world_size):
    """Seconds between two looks: one, but with many ranks not so often that rank 0's watch has its hands full."""
    return min(max(1.0, world_size / 100), timeout_s / 10)


class Connection:
    """Lines of JSON over a socket. Nothing waits here."""

    def __init__(self, connection):
        self.socket, self._data, self._lock = connection, b"", threading.Lock()
        self._unsent = bytearray()
        connection.setblocking(False)
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
        """Send what the other end takes at once; flush() is for the rest."""
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self):
        """Send what has not been sent; returns whether there is more."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                return True
            except OSError:  # a broken connection shows when it is read
                self._unsent.clear()
        return False

    def receive(self):
        """[message] that have arrived, and whether the connection is at its end."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return [], False
        except OSError:
            data = b""
        *lines, self._data = (self._data + data).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines], not data
        except (ValueError, TypeError, RecursionError):  # a stranger's
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
            for key, _ in self.selector.select(AGAIN_S if self._flush() else self.period_s):
                if not self.is_over:
                    self.handle(key)
            if not self.is_over and time.monotonic() >= next_look:
                next_look = time.monotonic() + self.period_s
                if os.getppid() != self._pid:  # a process that it has forked may keep the connection open
                    self.lose()
                    break
                self.look()
        deadline = time.monotonic() + GRACE_S
        while self._flush() and time.monotonic() < deadline:
            time.sleep(AGAIN_S)

    def _flush(self):
        return sum(connection.flush() for connection in (self._process, *self.connections())) > 0

    def handle(self, key):
        if key.data is not self._process:
            self.handle_network(key)
            return
        messages, is_gone = self._process.receive()
        for message in messages:
            if "failed" in message or "bye" in message:  # it ends by itself
                self.is_over = True
                self._process.send({"leave": True})
                self.leave(message)
            else:
                self.hear(message)
        if is_gone and not self.is_over:
            self.is_over = True
            self.lose()

    def end(self, message, code):
        """End this rank."""
        self.is_over = True
        _say(f"train.py: error: {message}")
        self._process.send({"end": code})
        self.pass_on(message, code)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            self._flush()
            if self._process.receive()[1]:
                return
            time.sleep(AGAIN_S)
        if os.getppid() == self._pid:  # and no other process that has got its number
            os.kill(self._pid, signal.SIGKILL)

    def pass_on(self, message, code):
        pass


def _say(line):
    """Write a line on stderr, whatever that is: a full disk or a pipe that nobody reads must not keep a rank alive."""

    def write():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            logger.write_line(line, sys.stderr)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(GRACE_S)


class _Hub(_Watch):
    """Rank 0's."""

    def __init__(self, timeout_s, world_size, process, pid, listener, token):
        super().__init__(timeout_s, world_size, process, pid)
        self._ranks, self._token = {}, token  # {connection: rank}
        self._others, self._known = world_size - 1, set()  # ranks that have introduced themselves, since gone or not
        self._seen = {}  # rank: (where it is, since when it has been there)
        listener.setblocking(False)  # who has connected may be gone again
        self.selector.register(listener, selectors.EVENT_READ)

    def connections(self):
        return self._ranks

    def handle_network(self, key):
        messages, rank, is_gone = self._receive(key)
        for message in messages:
            if "at" in message:
                self._note(rank, message["at"])
            elif "post" in message:
                self._process.send({"post": [rank, *message["post"]]})
            elif "failed" in message:
                self.end(f"rank {rank} failed first: {message['failed']}", message["code"])
                return
            elif "bye" in message:
                self._ranks.pop(key.data, None)
                rank = None
        if is_gone and rank is not None:
            self.end(f"rank {rank} failed first: {self._gone(rank)}", 1)

    def _receive(self, key):
        """What has come over the network: [message], the rank they are from, None for a stranger, and whether it is
        gone."""
        if key.data is None:
            with contextlib.suppress(OSError):  # it is gone, or there are too many
                connection = Connection(key.fileobj.accept()[0])
                self.selector.register(connection.socket, selectors.EVENT_READ, connection)
            return [], None, False
        messages, is_gone = key.data.receive()
        for message in messages:
            if message.get("token") == self._token:
                self._ranks[key.data] = message["rank"]
                self._known.add(message["rank"])
        rank = self._ranks.get(key.data)
        if is_gone:
            self.selector.unregister(key.data.socket)
            key.data.socket.close()
            self._ranks.pop(key.data, None)
        return messages if rank is not None else [], rank, is_gone

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
        deadline = time.monotonic() + GRACE_S
        while len(self._known) < self._others and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(min(left, AGAIN_S)):  # somebody who is not here yet should hear it
                if key.data is not self._process:
                    self._receive(key)
        self._tell({"end": message, "code": code})

    def _tell(self, message):
        for connection in list(self._ranks):
            connection.send(message)

    def _gone(self, rank):
        where = f" in {_where(self._seen[rank][0])}" if rank in self._seen else ""
        return _GONE.format(where)


class _Spoke(_Watch):
    """Any other rank's."""

    def __init__(self, timeout_s, world_size, process, pid, connection):
        super().__init__(timeout_s, world_size, process, pid)
        self._connection = Connection(connection)
        self._heard = time.monotonic()
        self.selector.register(connection, selectors.EVENT_READ)

    def connections(self):
        return (self._connection,)

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
