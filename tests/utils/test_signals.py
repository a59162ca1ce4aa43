import faulthandler
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, TINY
from utils import signals


@pytest.fixture(autouse=True)
def handlers_of_the_tests():
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_are_noted_and_repeats_ignored(name):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with signals.watched():
        assert signals.received() is None
        for _ in range(3):
            send(name)
            assert signals.received() == name
    send(name)  # while the process leaves


def test_sighup_stays_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.watched():
        with signals.blocked():
            pass
        send("SIGHUP")
        assert signals.received() is None
        send("SIGTERM")
    assert signals.received() == "SIGTERM"


@pytest.mark.parametrize("first", [[], ["SIGTERM"]])
def test_second_sigint_interrupts(first):
    with signals.watched():
        for name in [*first, "SIGINT"]:
            send(name)
        assert signals.received() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")


def test_handlers_are_put_back_after_a_run_that_was_not_stopped():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals.watched():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_import_of_paddle_does_not_change_what_sigterm_does():
    """Paddle installs a handler in C, of which Python's signal module does not know."""

    def caught():
        with open("/proc/self/status") as f:
            mask = next(line.split()[1] for line in f if line.startswith("SigCgt"))
        return int(mask, 16) >> (signal.SIGTERM - 1) & 1

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with signals.deferred():
            faulthandler.register(signal.SIGTERM)
            assert caught()
        assert not caught()
    finally:
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def test_sigterm_means_nothing_while_a_stopped_process_leaves():
    with signals.watched():
        send("SIGTERM")
    send("SIGTERM")
    with signals.watched():
        assert signals.received() is None


def test_launched_process_that_failed_leaves_with_its_own_exit_code(monkeypatch):
    for launched in (False, True):
        if launched:
            monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
        with pytest.raises(ZeroDivisionError), signals.watched():
            raise ZeroDivisionError
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_IGN) == launched


def test_sigterm_after_the_last_line_does_not_change_the_exit_code(tmp_path):
    """A launcher or a batch system may send it to a process that is just ending, which takes Paddle a while."""
    command = [sys.executable, "train.py", *TINY, "--model-arch-name", "ResNet18", "--data-format", "synthetic"]
    command += ["--dry-run", "--output-dir", tmp_path]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("dry run: ") for line in process.stdout)
        time.sleep(0.1)  # until main() is through
        while process.poll() is None:
            process.terminate()
            time.sleep(0.01)
    assert process.returncode == 0
