"""Host numbers exchanged between the ranks of a job, through the launcher's TCP store: exact, the same bytes on every
rank, no device involved. Gradients are Fleet's business."""

import contextlib
import functools
import json
import os
import socket
import stat

import numpy as np
import paddle

from paddle_resnet.job import processes, watchdog
from utils import signals
from utils.errors import UsageError

STOP_POLL_STEPS = 4
_exchanges = _polls = 0
_stop_at, _has_proposed, _last_gather = None, False, None


def all_gather(values):
    """Exchange host numbers.

    Args:
        values: sequence of k numbers.
    Returns:
        float64 array [world_size, k], row r from rank r, the same on every rank.
    """
    values = np.asarray(values, dtype=np.float64)
    if processes.world_size() == 1:
        return values[None]
    key = _next_exchange()
    _store().set(f"{key}/{processes.rank()}", values.tobytes().hex())
    rows = [_get(f"{key}/{r}") for r in range(processes.world_size())]
    return np.stack([np.frombuffer(row, dtype=np.float64) for row in rows])


def gather(data):
    """Collect bytes of every rank on rank 0.

    The store gives no memory back, not even of a value that is written over by a shorter one. So a rank's bytes are
    always under the same key, which it writes again once rank 0 has taken what was there.

    Returns:
        [bytes of each rank] on rank 0, None elsewhere.
    """
    global _last_gather
    if processes.world_size() == 1:
        return [data]
    previous, _last_gather = _last_gather, _next_exchange()
    if processes.rank() != 0:
        if previous is not None:
            _get(f"{previous}/taken")
        _store().set(f"paddle_resnet/gathered/{processes.rank()}", data.hex())
        _store().set(f"{_last_gather}/{processes.rank()}", "")
        return None
    everyone = [data]
    for r in range(1, processes.world_size()):
        _get(f"{_last_gather}/{r}")
        everyone.append(_get(f"paddle_resnet/gathered/{r}"))
    _store().set(f"{_last_gather}/taken", "")
    return everyone


def from_rank_0(function):
    """Call a function on rank 0 alone, for instance one that looks at files.

    Args:
        function: without arguments; returns plain data, such as JSON holds.
    Returns:
        its result, on every rank.
    Raises:
        UsageError: on every rank, if it raised one.
    """
    if processes.world_size() == 1:
        return function()
    key = _next_exchange()
    if processes.rank() == 0:
        try:
            answer = {"result": function()}
        except UsageError as e:
            answer = {"error": str(e)}
        _store().set(key, json.dumps(answer).encode().hex())
    answer = json.loads(_get(key))
    if "error" in answer:
        if processes.rank() != 0:
            watchdog.stop()  # no failure of its own to tell of
        raise UsageError(answer["error"])
    return answer["result"]


@contextlib.contextmanager
def leaving_together():
    """Let no process of the job end before all have done what is inside, or have been stopped in it; rank 0 last, whose
    store the others still talk to. An error ends the whole job: the other processes get word of it."""
    try:
        yield
    except signals.Preempted:
        _wait_for_all()
        raise
    except BaseException as e:
        watchdog.announce(e)
        raise
    _wait_for_all()


def _wait_for_all():
    if processes.world_size() == 1:
        return
    watchdog.phase("the end")
    all_gather([0])
    key = _next_exchange()
    if processes.rank() != 0:
        watchdog.stop()  # before rank 0 may leave
        _store().set(f"{key}/{processes.rank()}", "00")
    else:
        for r in range(1, processes.world_size()):
            _get(f"{key}/{r}")
        watchdog.stop()


def stop_agreed():
    """Whether all ranks stop now, before the training step that each of them is about to run; each asks once a step.

    A rank that has been asked to stop publishes a step a little ahead, and every STOP_POLL_STEPS steps each looks into
    the store. No rank is more than three steps ahead of another: before step n it has read the metrics of step n-2,
    which come after the all-reduces of step n-3. So all have seen the published step before they get there, and none
    waits for another.
    """
    global _polls
    _polls += 1
    if processes.world_size() == 1:
        return signals.received() is not None
    if _polls % STOP_POLL_STEPS:
        return False
    stop_at = _stop_step(_polls + 2 * STOP_POLL_STEPS)
    return stop_at is not None and _polls >= stop_at


def stop_asked():
    """Whether any rank has been asked to stop, for what each rank does at its own pace: they have to agree afterwards
    on what they saw."""
    if processes.world_size() == 1:
        return signals.received() is not None
    return _stop_step(0) is not None


def _stop_step(proposal):
    """The count of polls at which the job stops; None if nobody has been asked to. The first proposal wins."""
    global _stop_at, _has_proposed
    if _stop_at is None:
        store = _store()
        if signals.received() is not None and not _has_proposed:
            _has_proposed = True
            if store.add("paddle_resnet/stop/proposals", 1) == 1:
                store.set("paddle_resnet/stop/at", str(proposal))
        if store.add("paddle_resnet/stop/proposals", 0) > 0:
            _stop_at = int(store.get("paddle_resnet/stop/at"))
    return _stop_at


@functools.cache
def _store():
    """The launcher's TCP store.

    Paddle's client writes a request in pieces and leaves Nagle's algorithm on, so that each request would wait 44 ms
    for a delayed acknowledgement; its connection is found by the port that it leads to.
    """
    store = paddle.base.core.create_or_get_global_tcp_store()
    port = int(os.environ["PADDLE_MASTER"].rpartition(":")[2])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.getpeername()[1] == port:
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return store


def _next_exchange():
    """A key for the next exchange, the same on every rank because all of them take part in all exchanges."""
    global _exchanges
    _exchanges += 1
    return f"paddle_resnet/{_exchanges}"


def _get(key):
    """Wait for a key and read its bytes. The store holds text: hexadecimal, so that no bit is lost."""
    return bytes.fromhex(_store().get(key).decode())
