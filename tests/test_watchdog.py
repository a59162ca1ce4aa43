"""The watch over a job: what each side makes of what the other does. Whole jobs are in test_distributed.py."""

import json
import socket
import threading
import time

import pytest

from paddle_resnet import watchdog

TOKEN = "secret"


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No process ends; nothing is left of a test."""

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog, "_phase", 0)
    monkeypatch.setattr(watchdog, "_now", (0, 0, "the start", None))
    monkeypatch.setattr(watchdog, "_watch", None)


@pytest.fixture
def hub():
    """Rank 0 of three, and a function that connects another rank's end to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    hub = watchdog._Hub(600, 3, listener, TOKEN)

    def connect(rank, token=TOKEN):
        peer = watchdog._Connection(socket.create_connection(listener.getsockname()))
        peer.send({"token": token, "rank": rank})
        run(hub)
        return peer

    yield hub, connect
    for key in list(hub.selector.get_map().values()):
        key.fileobj.close()
    hub.selector.close()


def run(watch):
    """Handle all that has arrived."""
    while ready := watch.selector.select(0.5):
        for key, _ in ready:
            watch.handle(key)


def ended(capsys, watch, act=run):
    """(exit code, message) of a process that its watch ends."""
    with pytest.raises(Ended) as e:
        act(watch)
    return e.value.args[0], capsys.readouterr().err


def test_first_cause_goes_from_the_rank_that_failed_to_all_others(hub, capsys):
    hub, connect = hub
    first, second = connect(1), connect(2)
    second.send({"at": [3, 4, "epoch 0 train", 1]})
    second.send({"failed": "no room", "code": 2})
    code, said = ended(capsys, hub)
    assert (code, said) == (2, "train.py: error: rank 2 failed first: no room\n")
    messages, _ = first.receive()
    assert {"end": "rank 2 failed first: no room", "code": 2} in messages


def test_connection_that_breaks_is_a_process_that_is_gone(hub, capsys):
    hub, connect = hub
    peer, _other = connect(2), connect(1)
    peer.send({"at": [3, 5, "epoch 7 train", 2]})
    peer.socket.close()
    code, said = ended(capsys, hub)
    assert code == 1
    assert "rank 2 failed first: its process ended without a word in epoch 7 train, step 2, waiting for images" in said


def test_a_rank_that_takes_its_leave_is_not_missed(hub):
    hub, connect = hub
    peer = connect(1)
    peer.send({"bye": True})
    peer.socket.close()
    run(hub)
    assert not hub._ranks


def test_strangers_are_not_listened_to(hub):
    hub, connect = hub
    connect(1, token="another").send({"failed": "ha", "code": 1})
    run(hub)
    assert not hub._ranks


def test_strangers_bytes_end_their_connection_alone(hub):
    hub, connect = hub
    stranger = connect(1, token="another")
    stranger.socket.sendall(b"GET / HTTP/1.1\r\n\xff\n[1]\n")
    run(hub)
    assert stranger.receive() == ([], True)
    connect(2)
    assert list(hub._ranks.values()) == [2]


def test_main_thread_says_nothing_once_the_process_is_being_ended(hub, monkeypatch):
    hub, _ = hub
    ends, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ends.set() or goes_on.wait(60))
    watch = threading.Thread(target=hub.end, args=("rank 1 failed first", 1))
    watch.start()
    ends.wait(60)
    main = threading.Thread(target=hub.leave, args=({"bye": True},))
    main.start()
    main.join(0.3)
    assert main.is_alive()
    goes_on.set()
    main.join(60)
    watch.join(60)


def test_rank_that_stands_still_is_named_after_the_timeout(hub, capsys, monkeypatch):
    hub, connect = hub
    peers = {rank: connect(rank) for rank in (1, 2)}
    watchdog.phase("epoch 0 train")
    watchdog.step(8)
    peers[1].send({"at": [1, 2 * 8 + 2, "epoch 0 train", 8]})
    peers[2].send({"at": [1, 2 * 7 + 1, "epoch 0 train", 7]})
    run(hub)
    hub.look()
    later = time.monotonic() + 601
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: later)
    watchdog.step(9)  # rank 0 goes on, for all that matters
    code, said = ended(capsys, hub, lambda hub: hub.look())
    assert code == 1
    assert "--comm-timeout-s 600: no progress for that long: rank 2 last seen in epoch 0 train, step 7, waiting" in said
    assert "others wait in epoch 0 train, step 9" in said
    assert any("end" in message for message in peers[1].receive()[0])


def test_all_ranks_in_the_same_place_are_not_blamed():
    positions = dict.fromkeys(range(3), (2, 6, "epoch 0 val", 2))
    assert watchdog._standstill(5, positions).endswith("all ranks are in epoch 0 val, step 2")


def test_many_ranks_are_not_listed():
    assert watchdog.ranks([3]) == "rank 3"
    assert watchdog.ranks(list(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."


@pytest.fixture
def spoke():
    """Rank 1, and the end that rank 0 has of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    spoke = watchdog._Spoke(600, 3, socket.create_connection(listener.getsockname()), TOKEN, 1)
    rank_0 = watchdog._Connection(listener.accept()[0])
    yield spoke, rank_0
    for connection in (spoke._connection.socket, rank_0.socket, listener):
        connection.close()
    spoke.selector.close()


def test_position_is_told_once_it_changes(spoke):
    spoke, rank_0 = spoke
    watchdog.phase("epoch 0 train")
    for number in (1, 1, 2):
        watchdog.step(number, waits=True)
        spoke.look()
    places = [message["at"] for message in rank_0.receive()[0] if "at" in message]
    assert places == [[1, 3, "epoch 0 train", 1], [1, 5, "epoch 0 train", 2]]


def test_verdict_of_rank_0_ends_a_process(spoke, capsys):
    spoke, rank_0 = spoke
    rank_0.send({"end": "rank 2 failed first: no room", "code": 2})
    assert ended(capsys, spoke) == (2, "train.py: error: rank 2 failed first: no room\n")


def test_rank_0_gone_or_silent_ends_a_process(spoke, capsys, monkeypatch):
    spoke, rank_0 = spoke
    spoke.look()
    later = time.monotonic() + 601
    with monkeypatch.context() as patch:
        patch.setattr(watchdog.time, "monotonic", lambda: later)
        rank_0.send({"alive": True})
        run(spoke)
        spoke.look()  # rank 0 is there and says what is to be said
        patch.setattr(watchdog.time, "monotonic", lambda: later + 600)
        code, said = ended(capsys, spoke, lambda spoke: spoke.look())
    assert (code, "rank 0 has not been heard of for 600 s" in said) == (1, True)
    spoke.is_leaving = False
    rank_0.socket.close()
    code, said = ended(capsys, spoke)
    assert (code, "rank 0 failed first: its process ended without a word" in said) == (1, True)


def test_process_that_leaves_by_itself_is_not_ended(spoke):
    spoke, rank_0 = spoke
    spoke.fail("ZeroDivisionError", 1)
    assert {"failed": "ZeroDivisionError", "code": 1} in rank_0.receive()[0]
    rank_0.send({"end": "rank 1 failed first: ZeroDivisionError", "code": 1})
    run(spoke)  # Ended is not raised


def test_words_of_an_error_and_exit_code(monkeypatch):
    from utils.errors import DataError, RunError

    told = []
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0)
    armed = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda s, exit: armed.append((s, exit)))
    monkeypatch.setattr(watchdog, "_watch", type("Watch", (), {"fail": lambda self, *words: told.append(words)})())
    for error in (DataError("bad.jpg"), RunError("no room"), KeyboardInterrupt(), ZeroDivisionError("by 0")):
        watchdog.announce(error)
    assert told == [("bad.jpg", 2), ("no room", 1), ("KeyboardInterrupt", 130), ("ZeroDivisionError by 0", 1)]
    assert armed == [(watchdog.SILENCE_S, True)] * 4  # should the process not come to its end


def test_lines_arrive_whole(spoke):
    spoke, rank_0 = spoke
    line = json.dumps({"end": "x" * 10, "code": 1}).encode() + b"\n"
    rank_0.socket.sendall(line[:7])
    assert spoke._connection.receive() == ([], False)
    rank_0.socket.sendall(line[7:])
    assert spoke._connection.receive() == ([{"end": "x" * 10, "code": 1}], False)


def test_posts_are_collected_when_all_ranks_have_made_them(hub):
    hub, connect = hub
    peers = {rank: connect(rank) for rank in (2, 1)}
    hub.post(7, 0, "a0")
    for rank, peer in peers.items():
        peer.send({"post": [7, 0, f"a{rank}"]})
        peer.send({"post": [8, 0, "another topic's"]})
    peers[1].send({"post": [7, 10, "b1"]})
    run(hub)
    assert hub.collect(7, False) == [(0, ["a0", "a1", "a2"])]
    assert hub.collect(7, False) == []
    for peer in peers.values():
        peer.send({"post": [7, None, None]})
    hub.post(7, None, None)
    run(hub)
    assert hub.collect(7, True) == [(10, ["b1"])]
    assert list(hub._posts) == [8]


def test_post_of_another_rank(spoke):
    spoke, rank_0 = spoke
    spoke.post(3, 20, {"loss": 0.1})
    assert {"post": [3, 20, {"loss": 0.1}]} in rank_0.receive()[0]
