"""Ends a job of several processes when one of them fails or stands still, and says which and why; and brings the
figures of single steps to rank 0.

A process that waits in a collective operation for another one waits in C code, with NCCL for ever. So each process has
another one beside it that looks on (watch.py), and a thread that talks to it. The steps cost nothing but the assignment
of a tuple.
"""

import faulthandler
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

from paddle_resnet.job import watch
from utils import logger, progress
from utils.errors import RunError, UsageError

# How long a process whose operation has failed waits for word that another one failed first; the launcher leaves it 3.
PATIENCE_S = 2
# How long a process waits for its watch to let it go, which tells others that much first.
LEAVE_S = 10

_phase, _now = 0, (0, 0, "the start", None)
_watch = None


def phase(name):
    """Note what this process does now; every rank has to go through the same phases."""
    global _phase, _now
    _phase += 1
    _now = (_phase, 0, name, None)
    progress.phase(name)


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
    network = socket.create_server(("", 0), backlog=world_size) if rank == 0 else None
    port, token = share(lambda: [network.getsockname()[1], secrets.token_hex(16)])
    if rank != 0:
        network = socket.create_connection((host, port), timeout=watch.SILENCE_S)
        watch.Connection(network).send(watch.introduction(rank, token))
    near, far = socket.socketpair()
    with network, far:
        process = watch.start(rank, world_size, timeout_s, token, network, far)
    _watch = _Watched(rank, world_size, watch.period_s(timeout_s, world_size), near, process)
    threading.Thread(target=_watch.run, name="watchdog", daemon=True).start()


def stop():
    """Leave the watch: from now on this process may end."""
    global _watch
    if _watch is not None:
        _watch.leave({"bye": True})
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
    # Paddle's own threads and processes, half set up, may keep a process from its end.
    faulthandler.dump_traceback_later(watch.SILENCE_S, exit=True)
    _watch.fail(f"{name}{error}".strip(), code)


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


class _Watched:
    """This process's end of the connection to its watch."""

    def __init__(self, rank, world_size, period_s, connection, process):
        self._rank, self._world_size, self._period_s = rank, world_size, period_s
        self._connection, self._process = watch.Connection(connection), process
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._posts, self._posted = {}, threading.Condition()  # {topic: {key: {rank: data}}}
        self._may_leave = threading.Event()
        self._parent, self._told = os.getppid(), None
        self._tell_position()  # whatever happens, the watches know of each rank

    def run(self):
        try:
            while not self._may_leave.is_set():
                if self._selector.select(watch.AGAIN_S if self._connection.flush() else self._period_s):
                    self.listen()
                self._tell_position()
                self._outlive_no_launcher()
        finally:
            if not self._may_leave.is_set():  # nobody would end this process any more
                os._exit(1)

    def listen(self):
        messages, is_gone = self._connection.receive()
        for message in messages:
            if "end" in message:  # said by the watch
                os._exit(message["end"])
            elif "post" in message:
                self._keep(*message["post"])
            else:
                self._may_leave.set()
        if is_gone and not self._may_leave.is_set():
            message = "the process that watches over this one is gone: was it killed?"
            logger.write_line(f"train.py: error: {message}", sys.stderr)  # or run() ends all without it
            os._exit(1)

    def _tell_position(self):
        position = _now
        if position != self._told:
            self._told = position
            self._connection.send({"at": position})

    def _outlive_no_launcher(self):
        if os.getppid() != self._parent:
            self._parent = os.getppid()
            os.kill(os.getpid(), signal.SIGTERM)

    def leave(self, last_words):
        """Tell the watch that this process ends by itself. If the watch is about to end it, this does not return, so
        that nothing more is said. A watch that does not answer is given up."""
        self._connection.send(last_words)
        if not self._may_leave.wait(LEAVE_S):
            self._may_leave.set()
            self._process.kill()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fail(self, cause, code):
        self.leave({"failed": cause, "code": code})

    def post(self, topic, key, data):
        if self._rank == 0:
            self._keep(0, topic, key, data)
        else:
            self._connection.send({"post": [topic, key, data]})

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
