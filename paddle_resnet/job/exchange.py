"""Exchange data between the ranks of a job through Paddle's TCP store, from host memory to host memory. Fleet, not this
module, reduces gradients."""

import contextlib
import functools
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import paddle

from paddle_resnet.job import processes, watchdog
from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import UsageError

T = TypeVar("T")
STOP_POLL_STEPS = 4  # number of steps between two reads of the store
_exchanges = _polls = 0
_stop_at, _last_gather = None, None


def all_gather(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Gather numbers from all ranks.

    Args:
        values: sequence of k numbers.
    Returns:
        float64 array [world_size, k], the same on every rank. Row r contains the numbers of rank r.
    """
    values = np.asarray(values, dtype=np.float64)
    if processes.world_size() == 1:
        return values[None]
    key = _next_exchange()
    _store().set(f"{key}/{processes.rank()}", values.tobytes().hex())
    rows = [_get(f"{key}/{r}") for r in range(processes.world_size())]
    return np.stack([np.frombuffer(row, dtype=np.float64) for row in rows])


def gather(data: bytes) -> list[bytes] | None:
    """Collect bytes from every rank on rank 0.

    The store never frees memory, even if a shorter value replaces a longer value. Therefore each rank always writes to
    the same key, after rank 0 has read the previous value.

    Returns:
        [bytes of each rank] on rank 0, None on other ranks.
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
    of_all_ranks = [data]
    for r in range(1, processes.world_size()):
        _get(f"{_last_gather}/{r}")
        of_all_ranks.append(_get(f"paddle_resnet/gathered/{r}"))
    _store().set(f"{_last_gather}/taken", "")
    return of_all_ranks


class Stream:
    """Collects items from all ranks on rank 0. Ranks wait for each other only in finish().

    Each rank writes batches of items to its own key. When all ranks have written a batch, rank 0 reads the batches. A
    rank writes its next batch after rank 0 has read the previous batch. All ranks must create and finish streams in the
    same order.
    """

    def __init__(self) -> None:
        self._name, self._items, self._batch, self._number = _next_exchange(), [], 0, 1

    def add(self, item: Any) -> list[list]:
        """Send an item of JSON data. On rank 0, return one list of new items per rank if all other ranks have written a
        new batch, otherwise only the list of rank 0. On other ranks, return [].

        finish() can return the items of the last batch a second time.
        """
        self._items.append(item)
        store, others = _store(), processes.world_size() - 1
        if processes.rank() == 0:
            batches = [self._items]
            if store.add(f"{self._name}/written", 0) == self._number * others:
                batches += [json.loads(store.get(f"paddle_resnet/batch/{r}")) for r in range(1, others + 1)]
                self._number += 1
                store.add(f"{self._name}/read", 1)
            self._items = []
            return batches
        if self._batch and store.add(f"{self._name}/read", 0) == self._number:
            del self._items[: self._batch]
            self._batch, self._number = 0, self._number + 1
        if not self._batch:
            self._batch = len(self._items)
            store.set(f"paddle_resnet/batch/{processes.rank()}", json.dumps(self._items))
            store.add(f"{self._name}/written", 1)
        return []

    def finish(self) -> list[list]:
        """Send the remaining items. On rank 0, wait for all ranks, and return one list of items per rank. On other
        ranks, return []."""
        batches = gather(json.dumps(self._items).encode())
        return [json.loads(batch) for batch in batches or ()] if processes.rank() == 0 else []


def from_rank_0(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on all ranks.

    Args:
        function: function without arguments that returns JSON data.
    Returns:
        the result of the function, on every rank.
    Raises:
        UsageError: the function raised a UsageError on rank 0. Every rank then raises this error.
    """
    if processes.world_size() == 1:
        return function()
    key = _next_exchange()
    if processes.rank() == 0:
        try:
            answer = {"result": function()}
        except UsageError as e:
            answer = {"error": list(map(str, e.args))}
        _store().set(key, json.dumps(answer).encode().hex())
    answer = json.loads(_get(key))
    if "error" in answer:
        if processes.rank() != 0:
            watchdog.stop()  # rank 0 reports the error
        raise UsageError(*answer["error"])
    return answer["result"]


@contextlib.contextmanager
def exit_barrier() -> Iterator[None]:
    """At the end of the `with` block, wait until each process of the job has completed the block or has left it because
    of a stop signal. Rank 0 leaves last, because the other ranks still use its store. If the block raises an error, the
    job ends."""
    try:
        yield
    except signals.Preempted:
        _wait_for_all()
        raise
    except BaseException as e:
        watchdog.report_failure(e)
        raise
    _wait_for_all()


def _wait_for_all():
    if processes.world_size() == 1:
        return
    watchdog.phase("exit")
    all_gather([0])
    let_others_leave()
    if processes.rank() == 0:
        watchdog.stop()


def let_others_leave() -> None:
    """Make all ranks except rank 0 leave the job. Rank 0 waits until the other ranks have left, because they use the
    store of rank 0. All ranks must call this function."""
    key = _next_exchange()
    if processes.rank() != 0:
        watchdog.stop()
        _store().set(f"{key}/{processes.rank()}", "00")
    else:
        for r in range(1, processes.world_size()):
            _get(f"{key}/{r}")


def stop_agreed() -> bool:
    """Return whether all ranks must stop before the next training step. Call this function exactly once per step.

    A rank that receives a signal publishes the number of a later step at which all ranks stop. Each rank reads the
    store every STOP_POLL_STEPS steps. No rank is more than three steps ahead of other ranks, because a rank reads the
    metrics of step n-2 before step n, and these metrics become available only after the all-reduces of step n-3.
    Therefore all ranks read the published number before they reach that step, without waiting for each other.
    """
    global _polls
    _polls += 1
    if processes.world_size() == 1:
        return signals.received() is not None
    if _polls % STOP_POLL_STEPS:
        return False
    stop_at = _stop_step(_polls + 2 * STOP_POLL_STEPS)
    return stop_at is not None and _polls >= stop_at


def stop_asked() -> bool:
    """Return whether any rank has received a signal to stop. Different ranks may detect the signal at different steps,
    so the caller must make all ranks agree on a step."""
    if processes.world_size() == 1:
        return signals.received() is not None
    return _stop_step(0) is not None


def _stop_step(proposal):
    """Return the number of the step at which the job stops, or None if no rank has received a signal. If several ranks
    propose a step, the first proposal is used."""
    global _stop_at
    if _stop_at is None:
        store = _store()
        if signals.received() is not None and store.add("paddle_resnet/stop/proposals", 1) == 1:
            store.set("paddle_resnet/stop/at", str(proposal))
        if store.add("paddle_resnet/stop/proposals", 0) > 0:
            _stop_at = int(store.get("paddle_resnet/stop/at"))
    return _stop_at


@functools.cache
def _store():
    """Return Paddle's TCP store, which rank 0 serves."""
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    if processes.rank() != 0:
        _wait_for_server(host, int(port))
    store = paddle.base.core.create_or_get_global_tcp_store()  # pyright: ignore[reportAttributeAccessIssue]  in C++
    _send_at_once(int(port))
    return store


def _wait_for_server(host, port):
    """Wait until rank 0 serves the store. If Paddle's client waited instead, C code would hold the GIL, and the rank
    could not exit by itself if the job failed."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)


def _send_at_once(port):
    """Turn off Nagle's algorithm for all connections to a port.

    Paddle's client writes a request in pieces, so with Nagle's algorithm, each request would wait 44 ms for a delayed
    acknowledgement. Paddle does not expose the file descriptor of its connection, so this function examines all
    descriptors.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.getpeername()[1] == port:
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _next_exchange():
    """Return a key for the next exchange. The key is the same on all ranks, because all ranks take part in all
    exchanges."""
    global _exchanges
    _exchanges += 1
    return f"paddle_resnet/{_exchanges}"


def _get(key):
    """Wait for a key, and return its value as bytes. The store contains the value as hexadecimal text."""
    return bytes.fromhex(_store().get(key).decode())
