"""Process failures: SIGKILL, stop signals and full disks. tests/README.md lists the tests for each fault."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paddle import static

from conftest import ROOT, TINY, TWO_EPOCHS, assert_one_error, losses, read_report, wait_until
from helpers import NETWORK_EXAMPLE
from paddle_resnet import train
from paddle_resnet.checkpoints import contents, run_folders

FLAGS = ["--epochs", "3", "--print-interval", "1", "--save-interval-steps", "2", "--keep-checkpoints", "2", "--resume"]


class Runs:
    """Runs of train.py that train the tiny network and share an output folder."""

    def __init__(self, photos, folder):
        self.photos, self.folder = photos, folder
        self.root = folder / "output" / "Tiny"
        self.losses, self.started = {}, []

    def flags(self, *flags):
        self.report = self.folder / "report.json"
        self.report.unlink(missing_ok=True)
        places = ["--image-root", self.photos, "--output-dir", self.folder / "output", "--report-file", self.report]
        return list(map(str, [*TINY, *places, *flags]))

    def start(self, *flags, processes=1, **options):
        """Start train.py in a separate process, or as a job of several processes."""
        flags = self.flags(*flags)
        launcher = []
        if processes > 1:
            launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", processes]
            launcher += ["--log_dir", self.folder / "log"]
        command = [sys.executable, *launcher, "tests/train_tiny.py", *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **pipes, **options)
        self.started.append(process)
        return process

    def finish(self, process, timeout=200):
        """Wait for the process, add its losses to .losses, and return (exit code, output)."""
        output, _ = process.communicate(timeout=timeout)
        self.add_losses()
        return process.returncode, output

    def complete(self):
        """Run train.py in this process to the end of the last epoch, and add the losses to .losses."""
        with static.scope_guard(static.Scope()):
            assert train.main(self.flags(*FLAGS)) == 0
        self.add_losses()

    def add_losses(self):
        for key, value in losses(read_report(self.report)).items():
            assert self.losses.setdefault(key, value) == value, f"loss of {key} changed after a resume"

    def wait_for(self, process, text):
        """Wait until the report contains a string."""
        end = time.monotonic() + 120
        while not contains(self.report, text):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, f"no {text} in {self.report}"
            time.sleep(0.005)

    def logs(self):
        """Return the logs of all ranks of a job."""
        return "".join(path.read_text() for path in sorted((self.folder / "log").glob("workerlog.*")))

    def check(self):
        """Verify all checkpoints and return (names of valid checkpoints, names of damaged checkpoints), newest
        first."""
        valid, damaged = run_folders.newest_first(self.root)
        for folder, _ in valid:
            contents.verify(folder)
        return [folder.name for folder, _ in valid], [folder.name for folder, _ in damaged]


@pytest.fixture
def runs(photos, tmp_path):
    runs = Runs(photos, tmp_path)
    yield runs
    for process in runs.started:  # a process still runs only if the test has failed
        process.kill()


@pytest.fixture
def expected(photos, once):
    """Train without interruption and return the losses. All tests share one such run."""
    folder = once("uninterrupted", lambda folder: Runs(photos, folder).complete())
    return losses(read_report(folder / "report.json"))


def all_have_exited(runs):
    """Return True if no running process has the output folder of these runs in its arguments."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as f:
                if str(runs.folder) in f.read() and int(pid) != os.getpid():
                    pids.append(pid)
        except OSError:
            pass
    return not pids


# A run changes its output folder about 60 times. The tested change occurs while the run deletes a checkpoint.
@pytest.mark.slow
def test_kill_during_commit(runs, expected):
    code, output = runs.finish(runs.start(*FLAGS, "--fatal-change", 31, "--fatal-root", runs.root))
    assert code == -signal.SIGKILL, output
    runs.check()
    runs.complete()
    assert [path.name for path in runs.root.glob(".*")] == [".lock"]
    assert runs.losses == expected


@pytest.fixture
def before_changes():
    """Return a function before_changes(root, call), which calls `call` before each change of a file below `root` in
    this process, during the rest of the test."""
    calls = []

    def audit(event, args):
        writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
        if calls and (writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink")):
            root, call = calls[0]
            if str(root) in str(args[0]):
                call()

    sys.addaudithook(audit)  # cannot be removed
    yield lambda root, call: calls.append((root, call))
    calls.clear()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kill_before_every_change_to_output_folder(photos, tmp_path, expected, before_changes):
    """The folder is copied before each change. A process that is killed at this time leaves the same files, as
    test_kill_during_commit tests with a separate process. Each different copy is resumed."""
    complete = Runs(photos, tmp_path / "complete")
    copies = {}

    def copy():
        files = {path: path.read_bytes() for path in complete.root.rglob("*") if path.is_file()}
        folder = tmp_path / str(len(copies))
        if copies.setdefault(frozenset(files.items()), folder) is folder:
            shutil.copytree(complete.root, folder / "output/Tiny", symlinks=True)
            if complete.report.exists():
                shutil.copy(complete.report, folder)

    before_changes(complete.root, copy)
    complete.complete()
    assert complete.losses == expected
    assert len(copies) > 30
    for folder in copies.values():
        runs = Runs(photos, folder)
        runs.check()
        if (folder / "report.json").exists():
            runs.losses |= losses(read_report(folder / "report.json"))
        runs.complete()
        assert [path.name for path in runs.root.glob(".*")] == [".lock"]
        assert runs.losses == expected, folder
        shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kill_at_random_times(photos, tmp_path, expected):
    generator = random.Random(0)
    for i in range(10):
        runs = Runs(photos, tmp_path / str(i))
        runs.folder.mkdir()
        process = runs.start(*FLAGS, "--slow-step", "0.05")
        time.sleep(generator.uniform(2, 8))
        process.kill()
        runs.finish(process)
        runs.check()
        runs.complete()
        assert runs.losses == expected, i
        shutil.rmtree(runs.folder)


def contains(report, text):
    """Return whether a report exists and contains a string. At its start, a run creates and deletes the file once to
    check that it can be written."""
    try:
        return text in report.read_text()
    except FileNotFoundError:
        return False


def stop(runs, process, *, times=3, number=signal.SIGTERM):
    """Send up to three signals at intervals of 0.2 s, like the launcher, and return (exit code, output)."""
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
        if process.poll() is not None:
            break
    return runs.finish(process)


WHEN = {
    "training": ('"step": [1, 0]', ["--slow-step", "1"]),
    "evaluation": ('"step": [1], "data": {"train.loss"', ["--slow-evaluation", "1"]),
    "compilation": ("", []),  # the test sends SIGTERM as soon as the report file exists
}
OTHERS = ("training", "compilation")


# test_train_py_stops_on_sigterm also covers a single signal during compilation and during training.
@pytest.mark.slow
@pytest.mark.parametrize("when", [*(pytest.param(when, marks=pytest.mark.soak) for when in OTHERS), "evaluation"])
def test_three_sigterms_stop_run(runs, expected, when):
    text, options = WHEN[when]
    flags = [*FLAGS, "--save-interval-steps", "0"]
    process = runs.start(*flags, *options)
    runs.wait_for(process, text)
    code, output = stop(runs, process)
    assert code == 75, output
    assert "stopped by SIGTERM; continue with the same command and --resume" in output
    if when == "compilation":
        assert len(runs.losses) <= 1  # the first step may have ended before the signal arrived
    else:
        newest = runs.check()[0][0]
        assert newest.startswith("1_")
        assert (newest == "1_3") == (when == "evaluation")
    runs.complete()
    assert runs.losses == expected


def handles_sigterm(process):
    """Return whether a process has installed a handler for SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.slow
def test_train_py_stops_on_sigterm(tmp_path):
    """Importing Paddle replaces the SIGTERM handler of train.py, so train.py must restore it."""
    report, output, network = tmp_path / "report.json", tmp_path / "output", tmp_path / "network.py"
    network.write_text(NETWORK_EXAMPLE)
    flags = ["--data-format", "synthetic", "--model-arch-name", f"{network}:Net", "--print-interval", "1"]
    places = ["--output-dir", output, "--report-file", report, "--run-scope", "train_only"]
    command = list(map(str, [sys.executable, "train.py", *TINY, *flags, *places]))
    for is_ready in (handles_sigterm, lambda process: contains(report, '"step": [0, 2]')):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while not is_ready(process):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 75, stdout
        report.unlink(missing_ok=True)
    assert run_folders.newest_first(output / "Net")[0]


@pytest.mark.slow
def test_second_sigint_stops_run_immediately(runs):
    process = runs.start(*FLAGS, "--slow-step", "30")
    runs.wait_for(process, "PARAMETER")
    time.sleep(2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    code, output = runs.finish(process, timeout=25)
    assert code == 130, output


def start_blocked(runs, step):
    """Start a run that waits before its n-th training step. Return the process of the run and a function that unblocks
    the run."""
    path = runs.folder / "unblocked"
    return runs.start(*FLAGS, "--fault", f"0 {step} none", "--fault-after", path), path.touch


# test_restore.py tests a file in place of the checkpoint folder, within the test process.
@pytest.mark.slow
def test_second_run_is_rejected_and_full_disk_stops_run(runs, expected, photos, capsys):
    """A second run in the same folder, even with --resume, would delete or replace the checkpoints and the report of
    the first run, so it is rejected. The first run continues. RLIMIT_FSIZE limits the file size, so writes fail as on
    a full disk."""
    process, unblock = start_blocked(runs, 4)  # block the run before the second step of the second epoch
    wait_until((runs.root / "0").exists, 120)  # wait, because checkpoints are written asynchronously
    report, output = runs.report, runs.folder / "output"
    (runs.root / ".9.partial").mkdir()  # looks like a checkpoint that the first run is still writing
    flags = [*TINY, "--image-root", str(photos), "--report-file", str(report), "--output-dir"]
    elsewhere = str(runs.folder / "elsewhere")
    for more, flag in ([elsewhere], f"--report-file {report}"), ([output, "--resume"], f"--output-dir {output}"):
        assert train.main([*flags, *map(str, more)]) == 2
        stderr = capsys.readouterr().err
        assert_one_error(stderr, [f"{flag}: ", f"another run (process {process.pid} on ", "wait until "])
    assert (runs.root / ".9.partial").exists()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    unblock()
    code, output = runs.finish(process)
    assert code == 1, output
    reason = "File too large"
    assert f"output/Tiny/1_2: checkpoint cannot be written ({reason}); checkpoints in other folders are " in output
    assert "Traceback" not in output
    assert runs.check() == (["0", "0_2"], [])
    runs.complete()
    assert [path.name for path in runs.root.glob(".*")] == [".lock"]
    assert runs.losses == expected


@pytest.mark.soak
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_stopped_or_killed_job_resumes_bit_identically(runs, two_processes, is_killed):
    flags = [*TWO_EPOCHS, "--resume"]
    process = runs.start(*flags, "--slow-step", "0.5", processes=2)
    runs.wait_for(process, '"step": [0, 0]')
    code, output = stop(runs, process, times=1)
    assert code == signal.SIGTERM, output  # the launcher exits with the signal number, the workers with 75
    assert all_have_exited(runs)
    assert "stopped by SIGTERM; continue with the same command and --resume" in runs.logs()
    assert run_folders.position(runs.check()[0][0])[1]  # the newest checkpoint was saved inside an epoch

    if is_killed:  # kill rank 0 in the second epoch, as soon as the checkpoint of the first epoch exists
        fault = ["--fault", "0 2 killed", "--fault-after", runs.root / "0"]
        start = time.monotonic()
        code, output = runs.finish(runs.start(*flags, *fault, processes=2))
        assert time.monotonic() - start < 60
        assert code != 0
        assert all_have_exited(runs)
        log = (runs.folder / "log/workerlog.1").read_text()
        assert_one_error(log, ["rank 0 failed first: its process was killed"])
        assert runs.check()[0][0] == "0"

    code, output = runs.finish(runs.start(*flags, processes=2))
    assert code == 0, output
    assert runs.losses == losses(two_processes[0])
