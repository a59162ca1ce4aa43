"""What a process tells its watch, and what it does on its word. Whole jobs are in test_distributed.py."""

import contextlib
import signal
import socket
import subprocess
import threading

import pytest

from paddle_resnet.job import watch, watchdog


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
def watched():
    """Function of a rank of three: its end of the connection, and its watch's."""
    opened = []

    def watched(rank):
        near, far = socket.socketpair()
        process = type("Process", (), {"wait": lambda self, timeout: 0})()
        one = watchdog._Watched(rank, 3, 0.01, near, process)
        opened.extend([near, far, one._selector])
        return one, watch.Connection(far)

    yield watched
    for one in opened:
        one.close()


def test_position_is_told_once_it_changes(watched):
    one, its_watch = watched(1)
    watchdog.phase("epoch 0 train")
    for number in (1, 1, 2):
        watchdog.step(number, waits=True)
        one._tell_position()
    places = [message["at"] for message in its_watch.receive()[0]]
    assert places == [[0, 0, "the start", None], [1, 3, "epoch 0 train", 1], [1, 5, "epoch 0 train", 2]]


def test_word_of_the_watch_ends_the_process(watched):
    one, its_watch = watched(1)
    its_watch.send({"end": 2})
    with pytest.raises(Ended, match="2"):
        one.listen()


def test_process_without_a_watch_ends(watched, capsys):
    one, its_watch = watched(1)
    its_watch.socket.close()
    with pytest.raises(Ended, match="1"):
        one.listen()
    assert capsys.readouterr().err == (
        "train.py: error: the process that watches over this one is gone: was it killed?\n"
    )


def test_main_thread_says_nothing_once_the_process_is_being_ended(watched, monkeypatch):
    one, its_watch = watched(1)
    ends, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ends.set() or goes_on.wait(60))
    its_watch.send({"end": 1})
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    ends.wait(60)
    main = threading.Thread(target=one.fail, args=("ZeroDivisionError", 1), daemon=True)
    main.start()
    main.join(0.3)
    assert main.is_alive()
    its_watch.send({"leave": True})
    goes_on.set()
    main.join(60)
    thread.join(60)
    assert not main.is_alive()


@pytest.mark.parametrize("answers", [False, True])
def test_watch_that_does_not_end_is_given_up(watched, monkeypatch, answers):
    monkeypatch.setattr(watchdog, "LEAVE_S", 0.05)
    one, its_watch = watched(1)
    with subprocess.Popen(["sleep", "1000"]) as process:
        one._process = process
        if answers:
            its_watch.send({"leave": True})
            one.listen()
        one.fail("no room", 2)
        assert process.returncode == -signal.SIGKILL
    assert {"failed": "no room", "code": 2} in its_watch.receive()[0]


def test_log_that_cannot_be_written_keeps_no_process_alive(watched, monkeypatch):
    one, its_watch = watched(1)
    its_watch.socket.close()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(watchdog.sys, "stderr", full)
        with pytest.raises(Ended, match="1"):
            one.run()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


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
    assert armed == [(watch.SILENCE_S, True)] * 4  # should the process not come to its end


def test_posts_are_collected_when_all_ranks_have_made_them(watched):
    one, its_watch = watched(0)
    one.post(7, 0, "a0")
    for rank in (2, 1):
        its_watch.send({"post": [rank, 7, 0, f"a{rank}"]})
        its_watch.send({"post": [rank, 8, 0, "another topic's"]})
    its_watch.send({"post": [1, 7, 10, "b1"]})
    one.listen()
    assert one.collect(7, False) == [(0, ["a0", "a1", "a2"])]
    assert one.collect(7, False) == []
    for rank in (1, 2):
        its_watch.send({"post": [rank, 7, None, None]})
    one.post(7, None, None)
    one.listen()
    assert one.collect(7, True) == [(10, ["b1"])]
    assert list(one._posts) == [8]


def test_post_of_another_rank(watched):
    one, its_watch = watched(1)
    one.post(3, 20, {"loss": 0.1})
    assert {"post": [3, 20, {"loss": 0.1}]} in its_watch.receive()[0]


def test_two_processes_see_each_other_through_their_watches():
    """Real watches: this process is both ranks."""
    shared = []

    def share(function):
        if not shared:
            shared.append(function())
        return shared[0]

    watchdog.start(0, 2, "127.0.0.1", share, 600)
    rank_0, watchdog._watch = watchdog._watch, None
    watchdog.start(1, 2, "127.0.0.1", share, 600)
    watchdog.post(0, 5, "of rank 1")
    watchdog.post(0, None, None)
    rank_0.post(0, 5, "of rank 0")
    rank_0.post(0, None, None)
    assert rank_0.collect(0, True) == [(5, ["of rank 0", "of rank 1"])]
    watchdog.stop()
    watchdog._watch = rank_0
    watchdog.stop()
