"""The progress line, tested in a pseudo-terminal."""

import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from types import SimpleNamespace

import pytest

from conftest import ROOT, TINY, losses, read_report
from paddle_resnet.utils import progress


def run_in_terminal(command, columns, **environment):
    """Run a command in a terminal and return (exit code, output including stderr)."""
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    # pytest-xdist sets COLUMNS in its workers, which would override the width of the terminal.
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT), "COLUMNS": ""} | environment
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    received = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the terminal has been closed
            break
        received += data
    os.close(controller)
    return process.wait(60), received.decode()


def plain(text):
    """Remove colors and cursor movements from terminal output."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def train_command(photos, folder, *flags):
    places = ["--image-root", photos, "--output-dir", folder / "output", "--report-file", folder / "report.json"]
    return [sys.executable, "tests/train_tiny.py", *TINY, *map(str, [*places, *flags])]


@pytest.mark.slow
def test_terminal_shows_phases_and_steps_and_report_is_unchanged(photos, run_train, tmp_path, capfd):
    flags = ["--epochs", "2", "--print-interval", "1"]
    (tmp_path / "live").mkdir()
    command = train_command(photos, tmp_path / "live", *flags, "--slow-step", "0.3")
    code, received = run_in_terminal(command, 250)
    text = plain(received)
    assert code == 0, text
    for phase in ("Paddle import", "kernel compilation", "image listing (train)", "program construction"):
        assert re.search(rf"{re.escape(phase)}  \d+ s", text), phase
    steps = re.findall(
        r"epoch (\d) (train|val)  (loss .*?)  (?:\d+:)?\d+:\d\d left  step \d/3(  run [\d:]+)?(.*?)\s*[\r\n]", text
    )
    assert {(epoch, mode) for epoch, mode, *_ in steps} >= {("0", "train"), ("1", "train")}
    metrics, more = next((metrics, more) for _, mode, metrics, run, more in steps if mode == "train" and run)
    assert re.fullmatch(r"loss [\d.]+  top1 [\d.]+  [\d,]+ images/s  lr [\d.e-]+", metrics), metrics
    assert re.fullmatch(r"  waiting for data \d+%", more), more
    assert "GPU memory" not in text
    # Each epoch has one line above the progress line. Steps have no lines of their own; their metrics are in
    # the progress line and in the report.
    lines = re.split(r"[\r\n]+", text)
    assert len([line for line in lines if line.startswith("epoch 0 train  loss ") and "epoch_time" in line]) == 1
    assert not any(line.startswith("epoch 0 step ") for line in lines)
    assert received.rfind("\x1b[?25h") >= received.rfind("\x1b[?25l")  # the cursor is visible again
    code, report = run_train(*flags)  # stdout is a file
    assert code == 0
    stdout = capfd.readouterr().out
    assert "epoch 0 step 1 train  loss " in stdout and "\x1b" not in stdout and "left" not in stdout
    reports = [read_report(tmp_path / "live/report.json"), report]
    assert losses(reports[0]) == losses(reports[1])
    assert [entry["step"] for entry in reports[0]] == [entry["step"] for entry in reports[1]]


@pytest.mark.slow
def test_closed_terminal_does_not_stop_the_run(tmp_path):
    program = "import sys, time\nfrom utils import progress\nwith progress.shown():\n    print('ready', flush=True)\n"
    program += "    time.sleep(1)\n    progress.phase('b')\nopen(sys.argv[1], 'w').close()"
    controller, terminal = pty.openpty()
    with open(tmp_path / "stderr", "w") as stderr:
        environment = os.environ | {"TERM": "xterm"}
        command = [sys.executable, "-c", program, tmp_path / "done"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal, stderr=stderr)
    os.close(terminal)
    received = b""
    while b"ready" not in received:
        received += os.read(controller, 100)
    os.close(controller)
    process.wait(60)
    assert (tmp_path / "done").exists()


def test_error_is_printed_after_progress_line(tmp_path):
    program = "from utils import progress\nwith progress.shown():\n    raise ZeroDivisionError"
    code, received = run_in_terminal([sys.executable, "-c", program], 80)
    assert code == 1
    assert re.search(r"^ZeroDivisionError", plain(received), re.MULTILINE)


def test_log_line_above_progress_line_is_printed_unchanged(tmp_path):
    line = "[red] " + "a long command " * 20
    program = f"from utils import logger, progress\nwith progress.shown():\n    logger.info({line!r})"
    assert line in plain(run_in_terminal([sys.executable, "-c", program], 40)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "more"), [(80, ""), (96, "  step 123/5005"), (200, "  step 123/5005  run 5:20:00  a  b")]
)
def test_progress_line_omits_items_that_do_not_fit(columns, more):
    program = "from utils import progress\nwith progress.shown():\n    progress.phase('epoch 12 train')\n"
    program += "    metrics = ['loss 2.345', 'top1 0.457', '12,345 images/s', 'lr 2.1e-05']\n"
    program += "    progress.show(123, 5005, 754, 19200, metrics, ['a', 'b']); import time; time.sleep(0.6)"
    received = plain(run_in_terminal([sys.executable, "-c", program], columns)[1])
    line = "epoch 12 train  loss 2.345  top1 0.457  12,345 images/s  lr 2.1e-05  12:34 left" + more
    assert line in [part.rstrip() for part in re.split(r"[\r\n]", received)]


@pytest.mark.slow
def test_progress_line_is_truncated_to_one_row():
    program = "from utils import progress\nwith progress.shown():\n"
    program += "    progress.phase('p'); progress.show(1, 2, 3, 4, ['a figure'] * 20); import time; time.sleep(0.6)"
    received = plain(run_in_terminal([sys.executable, "-c", program], 40)[1])
    assert max(map(len, re.split(r"[\r\n]", received))) == 40
    assert "p  a figure  a figure" in received


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PADDLE_TRAINERS_NUM": "2"}], ids=str)
def test_progress_line_is_disabled_on_dumb_terminals_and_in_jobs(environment):
    program = "from utils import logger, progress\nwith progress.shown():\n    logger.info(progress.is_shown())"
    assert run_in_terminal([sys.executable, "-c", program], 80, **environment) == (0, "False\r\n")


def test_rich_is_not_imported_without_terminal():
    program = "import sys\nfrom utils import logger, progress\nwith progress.shown():\n    progress.phase('a')\n"
    program += "    logger.info((progress.is_due(), progress.is_shown(), 'rich' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(False, False, False)\n"


def test_metrics_are_due_again_after_period(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "_live", SimpleNamespace(console=SimpleNamespace(width=80)))
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_due_s", 0.0)
    assert progress.is_due()
    progress.show(1, 2, 3.0, None, [])
    assert not progress.is_due()
    now[0] = progress.PERIOD_S
    assert progress.is_due()


def test_items_that_fit_exactly_are_shown_until_the_next_phase(monkeypatch):
    console = SimpleNamespace(width=0)
    monkeypatch.setattr(progress, "_live", SimpleNamespace(console=console, refresh=lambda: None))
    monkeypatch.setattr(progress, "monotonic", lambda: 7.0)
    for name in ("_phase", "_since_s", "_metrics", "_due_s"):
        monkeypatch.setattr(progress, name, None)
    progress.phase("p")
    items = ["p  m  01:01 left", "step 1/20", "run 02:00", "x"]
    for width, count in ((0, 1), (26, 1), (27, 2), (37, 2), (38, 3), (41, 4)):
        console.width = width
        progress.show(1, 20, 61, 120, ["m"], ["x"])
        assert str(progress._line()) == "  ".join(items[:count])
    progress.phase("q")
    assert str(progress._line()) == "q  0 s" and progress.is_due()
    assert not progress.write_above("a line", io.StringIO())  # not a terminal


def test_duration_format():
    assert [progress._duration(s) for s in (0, 9.6, 61, 3600, 90000)] == [
        "00:00",
        "00:10",
        "01:01",
        "1:00:00",
        "1 day, 1:00:00",
    ]
