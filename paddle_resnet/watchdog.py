"""Ends a job of several processes when one of them fails or stands still, and says which and why; and brings the
figures of single steps to rank 0.

A process that waits in a collective operation for another one waits in C code, with NCCL for ever. So a thread of each
process looks on. The threads of all ranks are connected to rank 0's; a connection that breaks tells at once that a
process is gone, where the launcher's store, which has no answer for that, would be silent. Rank 0 decides what the
first cause is and tells everyone; each process prints it and ends with the exit code of the rank that failed. The
steps cost nothing but the assignment of a tuple.
"""

import contextlib
import faulthandler
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time

from utils import logger
from utils.errors import RunError, UsageError

# How long a process whose operation has failed waits for word that another one failed first; the launcher leaves it 3.
PATIENCE_S = 2
# A silent machine is given up after about this time by TCP itself.
SILENCE_S = 30

_phase, _now = 0, (0, 0, "the start", None)
_watch = None


def phase(name):
    """Note what this process does now; every rank has to go through the same phases."""
    global _phase, _now
    _phase += 1
    _now = (_phase, 0, name, None)


def step(number, waits=False):
    """Note the step of the phase; `waits`: for its images."""
    global _now
    _now = (_phase, 2 * number + (not waits) + 1, _now[2], number)


def start(rank, world_size, host, share, timeout_s):
    """Start to watch.

    Args:
        rank, world_size: of this process.
        host: address of rank 0.
        share: function that calls its argument on rank 0 and returns the result everywhere.
        timeout_s: seconds without progress after which the job ends.
    """
    global _watch
    stop()
    listener = socket.create_server(("", 0), backlog=world_size) if rank == 0 else None
    port, token = share(lambda: [listener.getsockname()[1], secrets.token_hex(16)])
    if rank == 0:
        _watch = _Hub(timeout_s, world_size, listener, token)
    else:
        connection = socket.create_connection((host, port), timeout=SILENCE_S)
        _watch = _Spoke(timeout_s, world_size, connection, token, rank)
    threading.Thread(target=_watch.run, name="watchdog", daemon=True).start()


def stop():
    """Leave the watch: from now on this process may end."""
    global _watch
    if _watch is not None:
        _watch.leave({"bye": True})
        faulthandler.cancel_dump_traceback_later()
    _watch = None


def announce(error):
    """Tell the other ranks that this one ends, and why. If the error may be the consequence of another rank's end,
    this waits for word of that first, which ends the process."""
    if _watch is None:
        return
    if not isinstance(error, (UsageError, RunError, KeyboardInterrupt)):
        time.sleep(PATIENCE_S)
    code = 2 if isinstance(error, UsageError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    name = "" if isinstance(error, (UsageError, RunError)) else f"{type(error).__name__} "
    _watch.fail(f"{name}{error}".strip(), code)
    # Paddle's own threads and processes, half set up, may keep a process from its end.
    faulthandler.dump_traceback_later(SILENCE_S, exit=True)


def post(topic, key, data):
    """Send data that JSON holds to rank 0, which collects it; waits for nobody.

    Args:
        topic: number, the same on all ranks.
        key: number that tells apart what a rank posts to a topic; None, as the last one, ends the topic.
        data: what is posted.
    """
    _watch.post(topic, key, data)


def collect(topic, is_over=False):
    """On rank 0, what has been posted to a topic and not been collected.

    Args:
        topic: of post.
        is_over: wait until all ranks have ended the topic, and return also what not all of them have posted.
    Returns:
        [(key, [data, by rank])] in the order of the keys.
    """
    return _watch.collect(topic, is_over)


class _Connection:
    """Lines of JSON over a socket."""

    def __init__(self, connection):
        self.socket, self._data, self._lock = connection, b"", threading.Lock()
        connection.settimeout(SILENCE_S)
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


class _Watch:
    def __init__(self, timeout_s, world_size):
        self.timeout_s = timeout_s
        # Once a second, but with many ranks not so often that rank 0 has its hands full.
        self.period_s = min(max(1.0, world_size / 100), timeout_s / 10)
        self.selector = selectors.DefaultSelector()
        self.is_leaving = False
        self.seen = {}  # rank: (where it is, since when it has been there)
        self._parent = os.getppid()
        self._lock = threading.Lock()

    def run(self):
        next_look = 0.0
        while not self.is_leaving:
            for key, _ in self.selector.select(self.period_s):
                self.handle(key)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self.period_s
                self._outlive_no_launcher()
                # If C code keeps Python's lock, so that this thread cannot run, Paddle's or DALI's included.
                faulthandler.dump_traceback_later(self.timeout_s + SILENCE_S, exit=True)
                self.look()

    def note(self, rank, position):
        """Remember where a rank is; returns for how long it has been there (seconds)."""
        now = time.monotonic()
        if rank not in self.seen or self.seen[rank][0] != position:
            self.seen[rank] = (position, now)
        return now - self.seen[rank][1]

    def end(self, message, code):
        """End this process from outside, unless it is about to end on its own."""
        with self._lock:
            if self.is_leaving:
                return
            self.is_leaving = True
            # With the lock, so that the main thread, which may hear of it too, says nothing more.
            self.pass_on(message, code)
            logger.write_line(f"train.py: error: {message}", sys.stderr)
            os._exit(code)

    def leave(self, last_words):
        with self._lock:
            self.is_leaving = True
        self.tell(last_words)

    def pass_on(self, message, code):
        pass

    def _outlive_no_launcher(self):
        if os.getppid() != self._parent:
            self._parent = os.getppid()
            os.kill(os.getpid(), signal.SIGTERM)


class _Hub(_Watch):
    """Rank 0's end."""

    def __init__(self, timeout_s, world_size, listener, token):
        super().__init__(timeout_s, world_size)
        self._ranks, self._token, self._world_size = {}, token, world_size
        self._posts, self._posted = {}, threading.Condition()  # {topic: {key: {rank: data}}}
        self.selector.register(listener, selectors.EVENT_READ)

    def handle(self, key):
        if key.data is None:
            connection = _Connection(key.fileobj.accept()[0])
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)
            return
        messages, is_over = key.data.receive()
        for message in messages:
            if message.get("token") == self._token:
                self._ranks[key.data] = message["rank"]
        rank = self._ranks.get(key.data)
        if rank is None:  # not one of ours, or not introduced yet
            messages = []
        for message in messages:
            if "at" in message:
                self.note(rank, tuple(message["at"]))
            elif "post" in message:
                self._keep(rank, *message["post"])
            elif "failed" in message:
                self.end(f"rank {rank} failed first: {message['failed']}", message["code"])
            elif "bye" in message:
                self._ranks.pop(key.data)
                rank = None
        if is_over:
            self.selector.unregister(key.data.socket)
            key.data.socket.close()
            if rank is not None:
                self.end(f"rank {rank} failed first: {_gone(self.seen.get(rank))}", 1)

    def look(self):
        self.tell({"alive": True})
        self.note(0, _now)
        since = min(since for _, since in self.seen.values())
        if time.monotonic() - since >= self.timeout_s:
            self.end(_standstill(self.timeout_s, {rank: at for rank, (at, _) in self.seen.items()}), 1)

    def post(self, topic, key, data):
        self._keep(0, topic, key, data)

    def _keep(self, rank, topic, key, data):
        with self._posted:
            self._posts.setdefault(topic, {}).setdefault(key, {})[rank] = data
            self._posted.notify()

    def collect(self, topic, is_over):
        def whole(key):
            return len(self._posts.get(topic, {}).get(key, ())) == self._world_size

        with self._posted:
            if is_over:
                self._posted.wait_for(lambda: whole(None))
            posts = self._posts.get(topic, {})
            keys = sorted(key for key in posts if key is not None and (is_over or whole(key)))
            found = [(key, [data for _, data in sorted(posts.pop(key).items())]) for key in keys]
            if is_over:
                del self._posts[topic]
        return found

    def fail(self, cause, code):
        self.leave({"end": f"rank 0 failed first: {cause}", "code": code})

    def tell(self, message):
        for connection in list(self._ranks):
            connection.send(message)

    def pass_on(self, message, code):
        self.tell({"end": message, "code": code})


class _Spoke(_Watch):
    """The end of any other rank."""

    def __init__(self, timeout_s, world_size, connection, token, rank):
        super().__init__(timeout_s, world_size)
        self._rank, self._connection = rank, _Connection(connection)
        self._heard = time.monotonic()
        self._connection.send({"token": token, "rank": rank})
        self.selector.register(self._connection.socket, selectors.EVENT_READ)

    def handle(self, key):
        self._heard = time.monotonic()
        messages, is_over = self._connection.receive()
        for message in messages:
            if "end" in message:
                self.end(message["end"], message["code"])
        if is_over:
            self.end(f"rank 0 failed first: {_gone(None)}", 1)

    def look(self):
        position = _now
        if self.note(self._rank, position) == 0:
            self._connection.send({"at": position})
        now = time.monotonic()
        # Rank 0 says who stands still, unless its whole process does.
        silence = now - self._heard
        if silence >= self.timeout_s and now - self.seen[self._rank][1] >= self.timeout_s:
            self.end(f"--comm-timeout-s {self.timeout_s:g}: rank 0 has not been heard of for {silence:.0f} s", 1)

    def post(self, topic, key, data):
        self._connection.send({"post": [topic, key, data]})

    def fail(self, cause, code):
        self.leave({"failed": cause, "code": code})

    def tell(self, message):
        self._connection.send(message)


def _gone(seen):
    where = f" in {_where(seen[0])}" if seen else ""
    return (
        f"its process ended without a word{where}: it was killed (out of memory?) or crashed, its own log may say more"
    )


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
