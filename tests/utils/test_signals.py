import errno
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT, TINY
from helpers import NETWORK_EXAMPLE
from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import RunError


@pytest.fixture(autouse=True)
def restored_handlers():
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signal_is_recorded_and_repeats_are_ignored(name):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with signals.watched():
        assert signals.received() is None
        for _ in range(3):
            send(name)
            assert signals.received() == name
    send(name)  # a further signal arrives while the process exits


def test_sighup_stays_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.watched():
        with signals.importing_paddle():
            pass
        send("SIGHUP")
        assert signals.received() is None
        send("SIGTERM")
    assert signals.received() == "SIGTERM"


@pytest.mark.parametrize("first", [[], ["SIGTERM"]])
def test_second_sigint_raises_keyboard_interrupt(first):
    with signals.watched():
        for name in [*first, "SIGINT"]:
            send(name)
        send("SIGTERM")  # ignored
        assert signals.received() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")


def test_handlers_are_restored_after_completed_run():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals.watched():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_sigterm_handler_of_c_code_is_replaced():
    """Paddle installs its handler in C, so signal.getsignal() cannot return it."""

    def caught():
        with open("/proc/self/status") as f:
            mask = next(line.split()[1] for line in f if line.startswith("SigCgt"))
        return int(mask, 16) >> (signal.SIGTERM - 1) & 1

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with signals.importing_paddle():
            faulthandler.register(signal.SIGTERM)
            assert caught()
        assert not caught()
    finally:
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_home_that_paddle_cannot_use_is_an_error():
    environment = os.environ | {"HOME": os.devnull}
    command = [sys.executable, "-m", "paddle_resnet.models", "ResNet18"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "paddle_resnet.models: error: /dev/null/.cache: cannot be used (Not a directory), but Paddle "
        "requires it; set HOME to a writable folder\n"
    )


def test_home_is_the_remedy_only_if_paddle_cannot_use_its_cache(environment, tmp_path):
    environment(HOME=str(tmp_path / "home"))
    for path in (tmp_path / "home", tmp_path / "home/.cache/paddle", tmp_path / "home/.venv/a.py", tmp_path / "a.py"):
        with pytest.raises(RunError) as error, signals.importing_paddle():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remedy = "make it accessible, or install Paddle again" if path.suffix else "set HOME to a writable folder"
        assert str(error.value) == f"{path}: cannot be used (Permission denied), but Paddle requires it; {remedy}"
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        with pytest.raises(OSError, match="not of the path"), signals.importing_paddle():
            raise OSError(number, "not of the path", "a.py")
    with pytest.raises(OSError, match="Permission denied"), signals.importing_paddle():
        raise OSError(errno.EACCES, "Permission denied")


def test_only_sigint_is_deferred_to_the_end_of_the_block():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = False
    with pytest.raises(KeyboardInterrupt), signals.deferred():
        signal.raise_signal(signal.SIGINT)  # os.kill could interrupt a different thread of this process
        reached = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(signals.NUMBERS)
    assert reached == {signal.SIGINT}


def test_sigterm_is_ignored_while_stopped_process_exits():
    before = signal.getsignal(signal.SIGINT)
    with signals.watched():
        send("SIGTERM")
    send("SIGTERM")
    assert signal.getsignal(signal.SIGINT) == before  # Control-C still ends the process
    with signals.watched():
        assert signals.received() is None


def test_only_sigint_ends_process_that_is_leaving():
    before = signal.getsignal(signal.SIGINT)
    assert signals.leaving(75) == 75
    for number in signals.NUMBERS:
        assert signal.getsignal(number) == (before if number == signal.SIGINT else signal.SIG_IGN)


def test_sigterm_is_ignored_after_failure_only_in_launched_process(environment):
    for launched in (False, True):
        if launched:
            environment(PADDLE_TRAINER_ID="0")
        with pytest.raises(ZeroDivisionError), signals.watched():
            raise ZeroDivisionError
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_IGN) == launched


@pytest.mark.slow
def test_sigterm_after_last_line_does_not_change_exit_code(tmp_path):
    """A launcher or a batch system may send SIGTERM while the process exits, which takes some time with Paddle."""
    (tmp_path / "network.py").write_text(NETWORK_EXAMPLE)
    command = [sys.executable, "train.py", *TINY, "--model-arch-name", tmp_path / "network.py:Net"]
    command += ["--data-format", "synthetic", "--dry-run", "--kernels", "paddle", "--run-scope", "train_only"]
    command += ["--output-dir", tmp_path]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("dry run: ") for line in process.stdout)
        time.sleep(0.1)  # main() must have returned before the signals are sent
        while process.poll() is None:
            process.terminate()
            time.sleep(0.01)
    assert process.returncode == 0


def blocked_signals(path):
    with open(path) as file:
        return int(next(line.split()[1] for line in file if line.startswith("SigBlk")), 16)


def test_threads_started_in_block_never_receive_signals():
    with signals.blocked():
        thread = threading.Thread(target=time.sleep, args=(0.3,))
        thread.start()
    mask = blocked_signals(f"/proc/self/task/{thread.native_id}/status")
    assert all(mask >> (number - 1) & 1 for number in signals.NUMBERS)
    assert not blocked_signals("/proc/self/status") >> (signal.SIGTERM - 1) & 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train.py"], ["-m", "paddle_resnet.predict"], ["paddle-resnet", "predict"]])
def test_threads_of_numpy_block_signals(command, tmp_path, console_script):
    command = [console_script if word == "paddle-resnet" else word for word in command]
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, glob\n"
        "def show():\n"
        "    for path in glob.glob('/proc/self/task/*/status'):\n"
        "        print(*(line for line in open(path) if line.startswith('SigBlk')))\n"
        "atexit.register(show)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    masks = [int(line.split()[1], 16) for line in done.stdout.splitlines() if line.startswith("SigBlk")]
    bits = sum(1 << (number - 1) for number in signals.NUMBERS)
    main_thread, *others = sorted(mask & bits for mask in masks)
    assert main_thread == 0
    assert set(others) <= {bits}


@pytest.mark.parametrize("command", [["-m", "library.module"], ["-c", "import library.module"]])
def test_importing_the_package_blocks_no_signals(command, tmp_path):
    """The package `library` belongs to a user and imports this package."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library/__init__.py").write_text("import paddle_resnet\n")
    (tmp_path / "library/module.py").write_text("import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_models_command_ends_on_sigterm():
    process = subprocess.Popen([sys.executable, "-m", "paddle_resnet.models"], cwd=ROOT, stdout=subprocess.DEVNULL)
    with open(f"/proc/{process.pid}/maps") as maps:
        while "libpaddle" not in maps.read():
            maps.seek(0)
            time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
