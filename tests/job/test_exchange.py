"""Exchange of Python values between the ranks of a job. The tests run several ranks in one process, with an in-memory
store."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from paddle_resnet.job import exchange, processes
from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import UsageError


def test_all_gather_with_one_process():
    np.testing.assert_array_equal(exchange.all_gather([1, 0.1]), [[1, 0.1]])


def test_exchanges_with_one_process():
    assert exchange.gather(b"abc") == [b"abc"]
    assert exchange.from_rank_0(lambda: {"a": 1}) == {"a": 1}
    with exchange.exit_barrier():
        pass


@pytest.mark.parametrize("error", [None, signals.Preempted("SIGTERM"), ValueError("x")], ids=repr)
def test_all_ranks_wait_at_the_end_unless_one_fails(monkeypatch, error):
    calls = []
    monkeypatch.setattr(exchange, "_wait_for_all", lambda: calls.append("wait"))
    monkeypatch.setattr(exchange.watchdog, "report_failure", calls.append)
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), exchange.exit_barrier():
        if error:
            raise error
    assert calls == ([error] if isinstance(error, ValueError) else ["wait"])


def test_store_keeps_only_last_gather(as_rank):
    gathered = []
    for number in range(1, 5):
        for rank in (2, 1, 0):
            store = as_rank(rank)
            exchange._exchanges = number
            exchange._last_gather = f"paddle_resnet/{number}" if number > 1 else None
            gathered.append(exchange.gather(bytes([number, rank]) * 500))
        assert gathered[-3:] == [None, None, [bytes([number, rank]) * 500 for rank in range(3)]]
        assert sum(len(value) for value in store.values.values()) == 2 * 2 * 1000


def test_gather_does_not_overwrite_unread_value(as_rank):
    store = as_rank(1, 2)
    assert exchange.gather(b"first") is None
    with pytest.raises(KeyError, match="taken"):  # the real store waits instead of raising an error
        exchange.gather(b"second")
    assert bytes.fromhex(store.values["paddle_resnet/gathered/1"].decode()) == b"first"
    as_rank(0, 2)
    assert exchange.gather(b"own") == [b"own", b"first"]
    with pytest.raises(KeyError, match="2/1"):  # rank 0 does not read a value twice
        exchange.gather(b"own")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_gather_returns_one_row_per_rank(as_rank, rank):
    store, rows = as_rank(rank), np.array([[1.0, 0.1], [2.0, 0.2], [3.0, 0.3]])
    exchange._exchanges = 7
    for other in {0, 1, 2} - {rank}:
        store.set(f"paddle_resnet/8/{other}", rows[other].tobytes().hex())
    np.testing.assert_array_equal(exchange.all_gather(rows[rank]), rows)
    assert bytes.fromhex(store.values[f"paddle_resnet/8/{rank}"].decode()) == rows[rank].tobytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_leaves_the_job_last(as_rank, monkeypatch, rank):
    """The other ranks no longer use the store of rank 0 when rank 0 leaves."""
    store, events = as_rank(rank), []
    exchange._exchanges = 7
    monkeypatch.setattr(exchange, "all_gather", lambda values: events.append("all ranks are here"))
    monkeypatch.setattr(exchange.watchdog, "phase", events.append)
    monkeypatch.setattr(exchange.watchdog, "stop", lambda: events.append("leave"))
    monkeypatch.setattr(store, "get", lambda key: events.append(("get", key)) or b"")
    monkeypatch.setattr(store, "set", lambda key, value: events.append(("set", key)))
    exchange._wait_for_all()
    start, key = ["exit", "all ranks are here"], "paddle_resnet/8"
    if rank == 0:
        assert events == [*start, ("get", f"{key}/1"), ("get", f"{key}/2"), "leave"]
    else:
        assert events == [*start, "leave", ("set", f"{key}/1")]


@pytest.mark.parametrize("signal", ["SIGTERM", None])
def test_every_rank_detects_a_stop_signal_of_any_rank(as_rank, signal):
    """Only rank 1 receives the signal."""
    asked = []
    for rank in (0, 1, 0, 2):
        as_rank(rank)
        signals._received = signal if rank == 1 else None
        asked.append(exchange.stop_asked())
    assert asked == ([False, True, True, True] if signal else [False] * 4)
    as_rank(0, 1)
    signals._received = signal
    assert exchange.stop_asked() == exchange.stop_agreed() == (signal is not None)


@pytest.mark.parametrize("rank", [0, 1])
def test_store_is_opened_at_the_address_of_the_master(monkeypatch, shard, rank):
    """Other ranks wait until rank 0 serves the store. All ranks send requests without delay."""
    calls = []
    monkeypatch.setenv("PADDLE_MASTER", "host:8:55")
    shard(rank=rank)
    monkeypatch.setattr(exchange, "_wait_for_server", lambda *address: calls.append(address))
    monkeypatch.setattr(exchange.paddle.base.core, "create_or_get_global_tcp_store", lambda: calls.append("open") or 5)
    monkeypatch.setattr(exchange, "_send_at_once", calls.append)
    assert exchange._store.__wrapped__() == 5
    assert calls == [*([("host:8", 55)] if rank else []), "open", 55]


def test_error_of_rank_0_is_raised_on_all_ranks_and_reported_by_rank_0(as_rank, monkeypatch):
    def invalid():
        raise UsageError("--lr: not positive", "--epochs: not a number")

    reporting = [0, 1, 2]
    monkeypatch.setattr(exchange.watchdog, "stop", lambda: reporting.remove(processes.rank()))
    for rank in range(3):
        as_rank(rank)
        exchange._exchanges = 7
        with pytest.raises(UsageError) as error:
            exchange.from_rank_0(invalid)
        assert error.value.args == ("--lr: not positive", "--epochs: not a number")
    assert reporting == [0]


@pytest.fixture
def streams(as_rank):
    """Return the streams of three ranks, and a function that adds an item to the stream of a given rank."""
    made = []
    for rank in range(3):
        as_rank(rank)
        made.append(exchange.Stream())

    def add(rank, item):
        as_rank(rank)
        return made[rank].add(item)

    return made, add


def test_stream_delivers_all_items_to_rank_0_without_waiting(streams):
    _, add = streams
    assert add(0, "a0") == [["a0"]]
    assert [add(1, "a1"), add(1, "b1"), add(1, "c1")] == [[], [], []]  # rank 1 is ahead
    assert add(0, "b0") == [["b0"]]  # rank 2 has not added an item
    assert add(2, "a2") == []
    assert add(0, "c0") == [["c0"], ["a1"], ["a2"]]
    assert add(0, "d0") == [["d0"]]
    assert [add(1, "d1"), add(1, "e1"), add(2, "b2")] == [[], [], []]  # rank 0 has not read the second batch of rank 1
    assert add(0, "e0") == [["e0"], ["b1", "c1", "d1"], ["b2"]]
    assert [add(1, "f1"), add(2, "c2")] == [[], []]
    assert add(0, "f0") == [["f0"], ["e1", "f1"], ["c2"]]


def test_next_stream_does_not_read_items_of_its_predecessor(streams, as_rank):
    _, add = streams
    for rank in (1, 2):
        add(rank, "old")
    as_rank(0)
    exchange._exchanges = 1  # the streams of the fixture
    assert exchange.Stream().add("new") == [["new"]]


def test_finish_delivers_remaining_items(streams, as_rank):
    made, add = streams
    for rank, item in ((1, "a1"), (1, "b1"), (2, "a2"), (0, "a0")):
        add(rank, item)
    for rank in (1, 2, 0):
        as_rank(rank)
        remaining = made[rank].finish()
        # Rank 1 cannot know that rank 0 has already read the first batch, so rank 1 sends this batch again.
        assert remaining == ([] if rank else [[], ["a1", "b1"], ["a2"]])


def test_stream_stores_one_batch_per_rank(streams, as_rank):
    _, add = streams
    for number in range(200):
        for rank in (1, 2, 0):
            add(rank, number)
    store = as_rank(0)
    assert list(store.values) == ["paddle_resnet/batch/1", "paddle_resnet/batch/2"]
    assert sum(map(len, store.values.values())) < 40
    assert len(store.counts) == 2


def test_wait_for_store_releases_gil():
    """Ranks wait for the server in Python, because Paddle's store client would wait in C code that holds the GIL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    thread = threading.Thread(target=exchange._wait_for_server, args=address, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    with socket.create_server(address):
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_store_connection_disables_nagle(host):
    """A process may have other sockets, such as an unnamed UNIX socket as its stdin."""
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip("no IPv6")
    with contextlib.ExitStack() as stack:
        for end in socket.socketpair():
            stack.enter_context(end)
        servers = [stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(2)]
        clients = [stack.enter_context(socket.create_connection(server.getsockname()[:2])) for server in servers]
        exchange._send_at_once(servers[0].getsockname()[1])
        assert [bool(c.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for c in clients] == [True, False]


def test_store_is_read_only_every_few_steps(as_rank):
    store, steps = as_rank(0, 2), []
    add = store.add
    store.add = lambda *arguments: steps.append(exchange._polls) or add(*arguments)
    assert not any(exchange.stop_agreed() for _ in range(2 * exchange.STOP_POLL_STEPS + 1))
    assert steps == [exchange.STOP_POLL_STEPS, 2 * exchange.STOP_POLL_STEPS]


@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("asked", [{0: 0}, {1: 0}, {0: 0, 1: 0}, {0: 0, 1: 3}, {}], ids=str)
def test_all_ranks_stop_before_same_step(as_rank, asked, lead):
    """Rank 1 is `lead` steps ahead of rank 0. The lead cannot exceed two steps. The keys of `asked` are the ranks that
    receive a signal; the values are the delays of the signals in steps."""
    store = as_rank(0, 2)
    for moment in range(9):
        store.__init__()
        states = {0: (0, None), 1: (0, None)}
        stopped, step = {}, {0: 0, 1: 0}
        for tick in range(60):
            for rank in (1, 0):
                if rank in stopped or (rank == 0 and step[0] + lead > tick):
                    continue
                exchange._polls, exchange._stop_at = states[rank]
                is_asked = rank in asked and step[rank] >= moment + asked[rank]
                signals._received = "SIGTERM" if is_asked else None
                if exchange.stop_agreed():
                    stopped[rank] = step[rank]
                step[rank] += 1
                states[rank] = (exchange._polls, exchange._stop_at)
        if asked:
            assert stopped[0] == stopped[1]
            assert moment < stopped[0] <= moment + 12
        else:
            assert not stopped
