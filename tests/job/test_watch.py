"""The process beside each rank: what it makes of what the others do. Whole jobs are in test_distributed.py."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from paddle_resnet.job import watch

TOKEN = "secret"


@pytest.fixture
def rank_of():
    """Function that makes a watch and returns it with the end that its rank has of their connection."""
    opened = []

    def rank_of(kind, *args, pid=0):
        near, far = socket.socketpair()
        made = kind(600, 3, watch.Connection(far), pid, *args)
        opened.extend([near, far, made.selector])
        return made, watch.Connection(near)

    yield rank_of
    for one in opened:
        one.close()


@pytest.fixture
def hub(rank_of):
    """Rank 0's of three, rank 0's end of it, and a function that connects another rank's to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    hub, rank_0 = rank_of(watch._Hub, listener, TOKEN)

    def connect(rank, token=TOKEN):
        peer = watch.Connection(socket.create_connection(listener.getsockname()))
        peer.send(watch.introduction(rank, token))
        run(hub)
        return peer

    connect.address = listener.getsockname()
    yield hub, rank_0, connect
    for key in list(hub.selector.get_map().values()):
        key.fileobj.close()


@pytest.fixture
def spoke(rank_of):
    """Rank 1's, rank 1's end of it, and the end that rank 0's has of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(listener.getsockname())
    spoke, rank_1 = rank_of(watch._Spoke, connection)
    rank_0 = watch.Connection(listener.accept()[0])
    yield spoke, rank_1, rank_0
    for one in (connection, rank_0.socket, listener):
        one.close()


def run(watching):
    """Handle all that has arrived."""
    while not watching.is_over and (ready := watching.selector.select(0.5)):
        for key, _ in ready:
            if not watching.is_over:
                watching.handle(key)


def ended(capsys, watching, rank, act=run):
    """(exit code, message) of a rank that is there no more when its watch ends it."""
    rank.socket.shutdown(socket.SHUT_WR)
    act(watching)
    assert watching.is_over
    codes = [message["end"] for message in rank.receive()[0] if "end" in message]
    assert len(codes) == 1
    return codes[0], capsys.readouterr().err


def end_at_once(monkeypatch):
    """Nothing waits for a rank to end."""
    monkeypatch.setattr(watch, "GRACE_S", 0.05)


def test_first_cause_goes_from_the_rank_that_failed_to_all_others(hub, capsys, monkeypatch):
    end_at_once(monkeypatch)
    hub, rank_0, connect = hub
    first, second = connect(1), connect(2)
    second.send({"at": [3, 4, "epoch 0 train", 1]})
    second.send({"failed": "no room", "code": 2})
    run(hub)
    assert {"end": 2} in rank_0.receive()[0]
    assert capsys.readouterr().err == "train.py: error: rank 2 failed first: no room\n"
    assert {"end": "rank 2 failed first: no room", "code": 2} in first.receive()[0]


def test_failure_of_rank_0_is_told_and_it_ends_by_itself(hub, capsys, monkeypatch):
    end_at_once(monkeypatch)
    hub, rank_0, connect = hub
    peer = connect(1)
    rank_0.send({"failed": "no room", "code": 2})
    run(hub)
    assert hub.is_over
    assert rank_0.receive()[0] == [{"leave": True}]
    assert {"end": "rank 0 failed first: no room", "code": 2} in peer.receive()[0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 2])
def test_connection_that_breaks_is_a_process_that_is_gone(hub, capsys, monkeypatch, rank):
    end_at_once(monkeypatch)
    hub, rank_0, connect = hub
    ranks = {0: rank_0, 2: connect(2)}
    other = connect(1)
    ranks[rank].send({"at": [3, 5, "epoch 7 train", 2]})
    run(hub)
    ranks[rank].socket.close()
    run(hub)
    says = f"rank {rank} failed first: its process ended without a word in epoch 7 train, step 2, waiting for images"
    assert any(says in message.get("end", "") for message in other.receive()[0])
    assert (says in capsys.readouterr().err) == (rank == 2)  # rank 0's own watch has nobody to tell


def test_rank_that_is_late_hears_the_cause_too(hub):
    """The watch of rank 2 has not read yet that it is there, and that of rank 1 not that it has connected."""
    hub, rank_0, connect = hub
    connect(1, token="a stranger's")
    late = [watch.Connection(socket.create_connection(connect.address)) for _ in range(2)]
    for rank, peer in enumerate(late, 1):
        peer.send(watch.introduction(rank, TOKEN))
    rank_0.send({"failed": "no room", "code": 2})
    for key, _ in hub.selector.select(0.5):
        if key.data is hub._process:
            hub.handle(key)
    assert hub.is_over
    for peer in late:
        assert {"end": "rank 0 failed first: no room", "code": 2} in peer.receive()[0]


def test_rank_0_that_does_not_read_holds_nothing_up(hub, capsys, monkeypatch):
    """As one that waits for a GPU. What others post comes once it reads."""
    hub, rank_0, connect = hub
    peers = [connect(1), connect(2)]
    many = [{"post": [7, i, "x" * 200]} for i in range(2000)]
    start = time.monotonic()
    for message in many:
        peers[0].send(message)
    while peers[0].flush() or hub.selector.select(0.2):
        for key, _ in hub.selector.select(0):
            hub.handle(key)
    assert time.monotonic() - start < 20
    assert rank_0.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < len(json.dumps(many))
    found = []
    while hub._flush() or not found:
        found += rank_0.receive()[0]
    found += rank_0.receive()[0]
    while len(found) < len(many):
        found += rank_0.receive()[0]
    assert [message["post"][2] for message in found] == list(range(2000))


@pytest.mark.parametrize("kind", ["full disk", "broken pipe", "closed"])
def test_log_that_cannot_be_written_keeps_no_rank_alive(spoke, monkeypatch, kind):
    spoke, rank_1, rank_0 = spoke
    read, write = os.pipe()
    os.close(read)
    stream = open("/dev/full" if kind == "full disk" else write, "w")  # noqa: SIM115
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(watch.sys, "stderr", stream)
    end_at_once(monkeypatch)
    rank_0.send({"end": "rank 2 failed first: no room", "code": 2})
    run(spoke)
    assert rank_1.receive()[0] == [{"end": 2}]
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        stream.close()


def test_a_rank_that_takes_its_leave_is_not_missed(hub):
    hub, rank_0, connect = hub
    peer = connect(1)
    peer.send({"bye": True})
    peer.socket.close()
    run(hub)
    assert not hub._ranks
    assert not hub.is_over
    rank_0.send({"bye": True})
    run(hub)
    assert hub.is_over
    assert rank_0.receive()[0] == [{"leave": True}]


def test_strangers_are_not_listened_to(hub):
    hub, _, connect = hub
    connect(1, token="another").send({"failed": "ha", "code": 1})
    run(hub)
    assert not hub._ranks
    assert not hub.is_over


def test_strangers_bytes_end_their_connection_alone(hub):
    hub, _, connect = hub
    stranger = connect(1, token="another")
    stranger.socket.sendall(b"GET / HTTP/1.1\r\n\xff\n[1]\n")
    run(hub)
    assert stranger.receive() == ([], True)
    connect(2)
    assert list(hub._ranks.values()) == [2]


def test_rank_that_stands_still_is_named_after_the_timeout(hub, capsys, monkeypatch):
    hub, rank_0, connect = hub
    peers = {rank: connect(rank) for rank in (1, 2)}
    rank_0.send({"at": [1, 2 * 8 + 2, "epoch 0 train", 8]})
    peers[1].send({"at": [1, 2 * 8 + 2, "epoch 0 train", 8]})
    peers[2].send({"at": [1, 2 * 7 + 1, "epoch 0 train", 7]})
    run(hub)
    hub.look()
    assert not hub.is_over
    later = time.monotonic() + 601
    monkeypatch.setattr(watch.time, "monotonic", lambda: later)
    rank_0.send({"at": [1, 2 * 9 + 2, "epoch 0 train", 9]})  # rank 0 goes on, for all that matters
    run(hub)
    code, said = ended(capsys, hub, rank_0, lambda hub: hub.look())
    assert code == 1
    assert "--comm-timeout-s 600: no progress for that long: rank 2 last seen in epoch 0 train, step 7, waiting" in said
    assert "others wait in epoch 0 train, step 9" in said
    assert any("end" in message for message in peers[1].receive()[0])


def test_all_ranks_in_the_same_place_are_not_blamed():
    positions = dict.fromkeys(range(3), (2, 6, "epoch 0 val", 2))
    assert watch._standstill(5, positions).endswith("all ranks are in epoch 0 val, step 2")


def test_many_ranks_are_not_listed():
    assert watch.ranks([3]) == "rank 3"
    assert watch.ranks(list(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_what_a_rank_tells_goes_on_to_rank_0(spoke):
    spoke, rank_1, rank_0 = spoke
    rank_1.send({"at": [1, 3, "epoch 0 train", 1]})
    rank_1.send({"post": [3, 20, {"loss": 0.1}]})
    run(spoke)
    assert rank_0.receive()[0] == [{"at": [1, 3, "epoch 0 train", 1]}, {"post": [3, 20, {"loss": 0.1}]}]


def test_posts_go_to_rank_0_with_their_rank(hub):
    hub, rank_0, connect = hub
    peer = connect(2)
    peer.send({"post": [7, 0, "a2"]})
    run(hub)
    assert rank_0.receive()[0] == [{"post": [2, 7, 0, "a2"]}]


def test_verdict_of_rank_0_ends_a_rank(spoke, capsys, monkeypatch):
    end_at_once(monkeypatch)
    spoke, rank_1, rank_0 = spoke
    rank_0.send({"end": "rank 2 failed first: no room", "code": 2})
    run(spoke)
    assert rank_1.receive()[0] == [{"end": 2}]
    assert capsys.readouterr().err == "train.py: error: rank 2 failed first: no room\n"


def test_rank_0_gone_ends_a_rank(spoke, capsys, monkeypatch):
    end_at_once(monkeypatch)
    spoke, rank_1, rank_0 = spoke
    rank_0.socket.close()
    run(spoke)
    assert rank_1.receive()[0] == [{"end": 1}]
    assert "rank 0 failed first: its process ended without a word:" in capsys.readouterr().err


def test_silence_of_rank_0_ends_a_rank(spoke, capsys, monkeypatch):
    spoke, rank_1, rank_0 = spoke
    later = time.monotonic() + 601
    monkeypatch.setattr(watch.time, "monotonic", lambda: later)
    rank_0.send({"alive": True})
    run(spoke)
    spoke.look()  # rank 0 is there and says what is to be said
    assert not spoke.is_over
    monkeypatch.setattr(watch.time, "monotonic", lambda: later + 600.1)
    code, said = ended(capsys, spoke, rank_1, lambda spoke: spoke.look())
    assert (code, "rank 0 has not been heard of for 600 s" in said) == (1, True)


def test_rank_that_ends_by_itself_is_not_ended(spoke, capsys):
    spoke, rank_1, rank_0 = spoke
    rank_1.send({"failed": "ZeroDivisionError", "code": 1})
    run(spoke)
    assert spoke.is_over
    assert rank_1.receive()[0] == [{"leave": True}]
    assert {"failed": "ZeroDivisionError", "code": 1} in rank_0.receive()[0]
    assert capsys.readouterr().err == ""


def test_rank_that_cannot_end_is_killed(rank_of, capsys, monkeypatch):
    """As one whose C code keeps Python's lock."""
    end_at_once(monkeypatch)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    monkeypatch.setattr(watch.os, "getppid", lambda: child.pid)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watching, _rank = rank_of(watch._Spoke, ours, pid=child.pid)
        watching.end("rank 0 failed first", 1)
    assert child.wait(60) == -signal.SIGKILL
    assert capsys.readouterr().err == "train.py: error: rank 0 failed first\n"


def test_another_process_with_the_number_of_the_rank_is_left_alone(rank_of, monkeypatch):
    end_at_once(monkeypatch)
    killed = []
    monkeypatch.setattr(watch.os, "kill", lambda *args: killed.append(args))
    monkeypatch.setattr(watch.os, "getppid", lambda: 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watching, _rank = rank_of(watch._Spoke, ours, pid=os.getpid())
        watching.end("rank 0 failed first", 1)
    assert not killed


def test_lines_arrive_whole(spoke):
    spoke, rank_1, _ = spoke
    line = json.dumps({"end": "x" * 10, "code": 1}).encode() + b"\n"
    rank_1.socket.sendall(line[:7])
    assert spoke._process.receive() == ([], False)
    rank_1.socket.sendall(line[7:])
    assert spoke._process.receive() == ([{"end": "x" * 10, "code": 1}], False)


def test_watch_outlives_neither_its_rank_nor_its_purpose(capfd, tmp_path, monkeypatch):
    """Real ones: without a word of their rank, and after its last one. Neither signals nor modules of the working
    directory matter to them."""
    (tmp_path / "socket.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))
    for last_words in ([], [{"bye": True}]):
        near, far = socket.socketpair()
        with far:
            process = watch.start(0, 2, 600, TOKEN, listener, far)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(process.pid, number)
        assert process.poll() is None
        with near:
            for words in last_words:
                watch.Connection(near).send(words)
                assert process.wait(60) == 0
                assert watch.Connection(near).receive()[0] == [{"leave": True}]
        assert process.wait(60) == 0
    listener.close()
    assert capfd.readouterr() == ("", "")


def test_watch_does_not_wait_for_what_its_rank_has_forked():
    """Such a process has the rank's end of the connection, too."""
    program = (
        "import os, socket, time; from paddle_resnet.job import watch; "
        "near, far = socket.socketpair(); listener = socket.create_server(('127.0.0.1', 0)); "
        "process = watch.start(0, 2, 10, 'secret', listener, far); far.close(); "
        "child = os.fork(); child or time.sleep(1000); print(process.pid, child, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as rank:
        pid, child = map(int, rank.stdout.readline().split())
        assert is_alive(pid)
        rank.kill()
        rank.wait()
        assert is_alive(child)
        deadline = time.monotonic() + 60
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_alive(pid)
        os.kill(child, signal.SIGKILL)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
