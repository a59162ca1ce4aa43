"""Messages from a rank to its monitor, and the exit of the rank when the monitor replies. test_jobs.py tests complete
jobs."""

import contextlib
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import wait_until
from paddle_resnet.job import channel, watchdog
from paddle_resnet.job.position import Position
from paddle_resnet.utils.errors import DataError, RunError, UsageError


class Ended(BaseException):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the state of watchdog.py."""
    monkeypatch.setattr(watchdog, "_position", Position())
    monkeypatch.setattr(watchdog, "_monitor", None)


@pytest.fixture
def ended(monkeypatch):
    """Replace os._exit and return a list to which each call adds its exit code."""
    codes = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    return codes


@pytest.fixture
def pair():
    """Return the rank's connection to its monitor, and the monitor's end of that connection. The monitor process has
    already exited."""
    near, far = socket.socketpair()
    process = type("Process", (), {"wait": lambda self, timeout: 0})()
    with near, far:
        yield watchdog._Monitor(near, process), far


def test_position_needs_no_monitor(monkeypatch):
    shown = []
    monkeypatch.setattr(watchdog.progress, "phase", shown.append)
    watchdog.phase("epoch 0 train")
    watchdog.step(2, waits=True)
    assert watchdog._position.read() == [1, 5, "epoch 0 train"] and shown == ["epoch 0 train"]


@pytest.mark.parametrize("code", [1, 2, 255])
def test_process_exits_with_code_of_monitor(pair, ended, code):
    """Otherwise, the waiting thread does not keep the process alive."""
    _, monitor = pair
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "watchdog")
    monitor.sendall(bytes([code]))
    wait_until(lambda: ended, 10)
    assert ended == [code]


def test_process_exits_if_monitor_exits(pair, ended, capsys):
    _, monitor = pair
    monitor.close()
    wait_until(lambda: ended, 10)
    assert ended == [1]
    message = (
        "train.py: error: monitor: the process that monitors this rank was killed or crashed; start the job again\n"
    )
    assert capsys.readouterr().err == message


def test_process_exits_if_monitor_exits_with_unread_message(pair, ended):
    one, monitor = pair
    one.send({"address": "unread"})
    monitor.close()
    wait_until(lambda: ended, 10)
    assert ended == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_process_exits_if_log_is_not_writable(pair, ended):
    _, monitor = pair
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, contextlib.redirect_stderr(full):
        monitor.close()
        wait_until(lambda: ended, 10)


def test_main_thread_waits_if_monitor_ends_process(pair, ended):
    one, monitor = pair
    one._leave_s = 60
    monitor.sendall(b"\1")
    wait_until(lambda: ended, 10)
    main = threading.Thread(target=one.leave, args=({"failed": "ZeroDivisionError", "code": 1},), daemon=True)
    main.start()
    main.join(0.3)
    assert main.is_alive()
    one._may_leave.set()
    main.join(60)


def test_rank_leaves_after_reply_of_monitor(pair, ended):
    one, monitor = pair
    monitor.sendall(b"\0")
    wait_until(one._may_leave.is_set, 10)
    one.leave({"bye": True})
    assert monitor.recv(100) == channel.encode({"bye": True})
    monitor.close()
    assert not ended


@pytest.mark.parametrize("answers", [False, True])
def test_monitor_that_does_not_exit_is_killed(pair, ended, answers):
    one, monitor = pair
    one._leave_s = 0.05
    with subprocess.Popen(["sleep", "1000"]) as process:
        wait, waits_s = process.wait, []
        process.wait = lambda timeout=None: waits_s.append(timeout) or wait(timeout)
        one._process = process
        if answers:
            monitor.sendall(b"\0")
            wait_until(one._may_leave.is_set, 10)
        waiting = [t for t in threading.enumerate() if getattr(t, "_target", None) == one._wait_for_monitor]
        one.leave({"bye": True})
        assert process.returncode == -signal.SIGKILL
        assert waits_s[:2] == [0.05 if answers else 0, None]
    monitor.close()
    for thread in waiting:
        thread.join()
    assert not ended


def test_report_failure_sends_cause_and_exit_code(monkeypatch):
    sent, armed = [], []
    monkeypatch.setattr(watchdog.time, "sleep", lambda s: sent.append(s))
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda s, exit: armed.append((s, exit)))
    monkeypatch.setattr(
        watchdog, "_monitor", type("Monitor", (), {"leave": lambda self, message: sent.append(message)})()
    )
    for error in (DataError("bad.jpg"), RunError("no room" * 999), KeyboardInterrupt(), ZeroDivisionError("by 0")):
        watchdog.report_failure(error)
    failures = [
        ("bad.jpg", 2),
        (("no room" * 999)[:4000], 1),
        ("KeyboardInterrupt", 130),
        ("ZeroDivisionError by 0", 1),
    ]
    messages = [{"failed": cause, "code": code} for cause, code in failures]
    # Only the last error may be the consequence of a failure of another rank.
    assert sent == [*messages[:3], watchdog.PATIENCE_S, messages[3]]
    assert armed == [(watchdog.END_S, True)] * 4  # the timer kills a process that does not exit by itself


def test_master_on_different_machine_is_rejected():
    def never(*_):
        raise AssertionError

    message = r"PADDLE_MASTER 192\.0\.2\.1:5: rank 0's machine cannot listen .*; set the launcher's --host"
    with pytest.raises(UsageError, match=message):
        watchdog.start(0, 2, 600, "192.0.2.1:5", never)


def test_only_rank_0_listens(monkeypatch):
    """A process that starts a second time, as in a notebook, first leaves the job."""

    def start(*arguments):
        raise Ended(arguments[-1])

    monkeypatch.setattr(watchdog.monitor, "start", start)
    monkeypatch.setattr(watchdog, "_listen", lambda host, master: pytest.fail("rank 1 listens"))
    left = []
    monkeypatch.setattr(watchdog, "_monitor", SimpleNamespace(leave=left.append))
    with pytest.raises(Ended, match="None"):
        watchdog.start(1, 2, 600, "192.0.2.1:5", None)
    assert left == [{"bye": True}] and watchdog._monitor is None


def test_monitors_connect_without_key_in_command_line():
    """The monitors are separate processes, and the test process acts as both ranks."""
    answers, monitors = [], {}
    for rank in (0, 1):
        from_rank_0 = (lambda function: answers.append(function()) or answers[0]) if rank == 0 else lambda _: answers[0]
        watchdog.start(rank, 2, 600, "127.0.0.1:5", from_rank_0)
        monitors[rank], watchdog._monitor = watchdog._monitor, None
    _, key = answers[0]
    assert len(key) == 64
    for one in monitors.values():
        assert key not in Path(f"/proc/{one._process.pid}/cmdline").read_text()
    for rank in (1, 0):
        watchdog._monitor = monitors[rank]
        watchdog.stop()
        assert monitors[rank]._process.returncode == 0
