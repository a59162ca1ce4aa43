"""How commands end."""

import errno
import functools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import train
from conftest import ROOT
from paddle_resnet import dataset, doctor, export, predict
from paddle_resnet.data import records
from paddle_resnet.results import comparison, reading
from paddle_resnet.tools import convert
from utils import exit_codes
from utils.errors import UsageError

TOOLS = {
    "dataset": (dataset.main, ["convert", "--from", "x", "--to", "lmdb", "--output", "y"], (convert, "convert")),
    "doctor": (doctor.main, [], (doctor, "examine")),
    "export": (export.main, ["x", "y"], (export, "export")),
    "predict": (predict.main, ["x", "y"], (predict, "find_images")),
    "report": (comparison.main, ["x"], (reading, "read")),
}


@pytest.mark.parametrize("name", TOOLS)
def test_control_c_ends_every_tool_with_a_sentence(monkeypatch, capsys, name):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    main, words, place = TOOLS[name]
    monkeypatch.setattr(*place, interrupt)
    assert main(words) == 130
    assert capsys.readouterr().err.endswith(f"paddle_resnet.{name}: interrupted\n")


@pytest.mark.parametrize("words", [["--help"], None], ids=["help", "result"])
@pytest.mark.parametrize("name", TOOLS)
def test_a_result_that_cannot_be_written_is_a_failure(monkeypatch, capsys, name, words):
    """/dev/full can be opened, and refuses every byte. 20,000 lines are more than stdout holds back."""
    main, others, place = TOOLS[name]
    monkeypatch.setattr(*place, lambda *args, **options: [print("x") for _ in range(20_000)])
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(words or others) == 1
    says = "stdout: cannot be written (No space left on device); free disk space, or redirect it"
    assert capsys.readouterr().err.endswith(f"paddle_resnet.{name}: error: {says}\n")


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_what_train_py_prints_instead_of_training_is_a_result(monkeypatch, capsys, flag):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert train.main([flag]) == 1
    assert "train.py: error: stdout: cannot be written (No space left" in capsys.readouterr().err


def test_a_closed_stdout_is_a_failure_of_a_tool():
    code = "import sys; from utils import exit_codes; sys.exit(exit_codes.of('x', lambda: print(1)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert (done.returncode, "x: error: stdout: cannot be written (closed)" in done.stderr) == (1, True)


def is_blocked(process):
    with open(f"/proc/{process.pid}/status") as f:
        blocked = next(line.split()[1] for line in f if line.startswith("SigBlk"))
    return int(blocked, 16) >> (signal.SIGINT - 1) & 1


def children(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        return f.read().split()


def control_c(process):
    """What Control-C does: SIGINT to all processes of the terminal. Returns what the command said."""
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    return said.splitlines()[-1]


def start(*words):
    """As from a terminal: tests that run in the background of a shell inherit that SIGINT is ignored."""
    command = [sys.executable, "-m", *map(str, words)]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    as_default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=as_default, **options)


def test_control_c_during_the_imports_of_a_tool():
    process = start("paddle_resnet.doctor")
    deadline = time.monotonic() + 30
    while not is_blocked(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert control_c(process) == "paddle_resnet.doctor: interrupted"


def test_control_c_while_processes_decode(photos, tmp_path):
    """As soon as the first one has started."""
    for name in ("train", "val"):
        for path in (photos / "train").glob("*/*"):
            for i in range(60):
                (tmp_path / name / path.parent.name).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path.parent.name / f"{i}_{path.name}").symlink_to(path)
    process = start("paddle_resnet.dataset", "verify", tmp_path)
    deadline = time.monotonic() + 30
    while len(children(process)) < 2 and time.monotonic() < deadline:  # the first one watches resources
        time.sleep(0.001)
    assert control_c(process) == "paddle_resnet.dataset: interrupted"


def test_errors_do_not_steer_the_terminal(capsys):
    def fail():
        raise UsageError("a\x1b[31m\nb", "c")

    assert exit_codes.of("x", fail) == 2
    assert capsys.readouterr().err == "x: error: a\\x1b[31m\\nb\nc\n"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("std::bad_alloc"), " (std::bad_alloc)"),
        (MemoryError(), ""),
        (
            RuntimeError("In user code:\n  ResourceExhaustedError: Fail to alloc\n"),
            " (ResourceExhaustedError: Fail to alloc)",
        ),
        (
            RuntimeError("--- Summary: ---\nResourceExhaustedError: \n\nOut of memory on GPU 0.\n\nPlease try"),
            " (ResourceExhaustedError: Out of memory on GPU 0)",
        ),
        (OSError(12, "Cannot allocate memory"), " ([Errno 12] Cannot allocate memory)"),
    ],
)
def test_too_little_memory_is_a_sentence(capsys, error, says):
    def fail():
        raise error

    assert exit_codes.of("x", fail) == 1
    says = f"x: error: too little memory{says}; use a smaller --batch-size, or add memory\n"
    assert capsys.readouterr().err == says


def test_too_few_open_files_are_an_error(photos, monkeypatch, verify_here, capsys):
    """As with ulimit -n 16; the image that could not be opened is not a damaged one."""

    def read(image):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), image.path)

    monkeypatch.setattr(records, "read", read)
    assert dataset.main(["verify", str(photos)]) == 1
    said = capsys.readouterr().err
    assert "error: ulimit -n: " in said
    assert said.endswith("/00.jpg'); raise it, for example with ulimit -n 1024\n")


def test_too_few_threads_are_a_sentence(capsys):
    def fail():
        raise RuntimeError("can't start new thread")

    assert exit_codes.of("x", fail) == 1
    assert "no more threads can be started (can't start new thread); add memory, or" in capsys.readouterr().err


def test_other_errors_pass():
    def fail():
        raise RuntimeError("Out of range")

    with pytest.raises(RuntimeError):
        exit_codes.of("x", fail)


def test_a_limit_that_the_import_of_paddle_exceeds():
    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))

    command = [sys.executable, "train.py", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=limited)
    assert done.returncode == 1
    assert done.stderr == (
        "train.py: error: ulimit -v: 500 MiB of address space, but Paddle and DALI need up to 4,096 MiB for a "
        "small job; raise it, for example with ulimit -v unlimited\n"
    )


def test_a_deleted_working_directory_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for name, (main, words, _) in TOOLS.items():
        assert main(words) == 1
        expected = f"paddle_resnet.{name}: error: working directory: cannot be used (No such file or directory); "
        assert capsys.readouterr().err.endswith(f"{expected}change to a different one\n")


def test_no_temporary_folder_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert exit_codes.of("x", tempfile.TemporaryDirectory) == 1
    error = "x: error: No usable temporary directory found in ['/proc/none']; set TMPDIR to a writable folder\n"
    assert capsys.readouterr().err == error
