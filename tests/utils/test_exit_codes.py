"""Exit codes of commands."""

import contextlib
import errno
import functools
import io
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from conftest import ROOT, assert_one_error
from paddle_resnet import config, dataset, doctor, export, predict, train
from paddle_resnet import report as report_command
from paddle_resnet.results import reading
from paddle_resnet.tools import convert, verify
from paddle_resnet.utils import exit_codes, signals
from paddle_resnet.utils.errors import UsageError

TOOLS = {
    "dataset": (dataset.main, ["convert", "--from", "x", "--to", "tfrecord", "--output", "y"], (convert, "convert")),
    "doctor": (doctor.main, [], (doctor, "examine")),
    "export": (export.main, ["x", "y"], (export, "export")),
    "predict": (predict.main, ["x", "y"], (predict, "find_images")),
    "report": (report_command.main, ["x"], (reading, "read")),
}


@pytest.mark.parametrize("name", TOOLS)
def test_control_c_exits_with_code_130_in_every_command(capsys, name):
    class Terminal(io.StringIO):
        def write(self, text):
            raise KeyboardInterrupt

    main, _, _ = TOOLS[name]
    with contextlib.redirect_stdout(Terminal()):
        assert main(["--help"]) == 130
    assert capsys.readouterr().err.endswith(f"paddle_resnet.{name}: interrupted\n")


@pytest.mark.parametrize("arguments", [["--help"], None], ids=["help", "result"])
@pytest.mark.parametrize("name", TOOLS)
def test_unwritable_stdout_exits_with_code_1(monkeypatch, capsys, name, arguments):
    """/dev/full can be opened, but all writes to it fail. The 20,000 lines exceed the buffer of stdout."""
    main, default_arguments, target = TOOLS[name]
    monkeypatch.setattr(*target, lambda *args, **options: [print("x") for _ in range(20_000)])
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert main(arguments or default_arguments) == 1
    message = "stdout: cannot be written (No space left on device); free disk space, or redirect stdout"
    assert capsys.readouterr().err.endswith(f"paddle_resnet.{name}: error: {message}\n")


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_unwritable_stdout_of_train_help_and_config_exits_with_code_1(capsys, flag):
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert train.main([flag]) == 1
    assert "train.py: error: stdout: cannot be written (No space left" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "count"), [("1", "2"), ("x", "2"), ("0", "1")])
def test_error_in_a_job_begins_with_the_rank(environment, capsys, rank, count):
    environment(PADDLE_TRAINERS_NUM=count)
    environment(PADDLE_TRAINER_ID=rank)
    # train.main would also change the signal handlers of this process.
    assert exit_codes.of("train.py", lambda: config.parse_args(["--epochs", "x"])) == 2
    subject = "rank 1: " if rank == "1" else ""
    assert capsys.readouterr().err.startswith(f"train.py: error: {subject}--epochs: 'x' is not a whole number")


@pytest.mark.parametrize(
    ("name", "reason"), [("loop", "Too many levels of symbolic links"), ("x" * 300, "name too long")]
)
def test_inaccessible_path_exits_with_code_2(tmp_path, capsys, name, reason):
    """Unlike folders without permissions, these paths are also inaccessible for root."""
    (tmp_path / "loop").symlink_to("loop")
    assert exit_codes.of("x", lambda: os.listdir(tmp_path / name)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"x: error: {tmp_path / name}: cannot be used (")
    assert reason in line
    with pytest.raises(FileNotFoundError):
        exit_codes.of("x", lambda: os.listdir(tmp_path / "missing"))


@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EROFS", "ELOOP", "ENAMETOOLONG"])
def test_each_error_of_an_inaccessible_path_exits_with_code_2(capsys, name):
    def fail():
        raise OSError(getattr(errno, name), "the reason", b"a/b")

    assert exit_codes.of("x", fail) == 2
    assert capsys.readouterr().err.startswith("x: error: a/b: cannot be used (the reason); choose a different path")


def test_closed_stdout_exits_with_code_1():
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
    """Send SIGINT to all processes of a command, as Control-C does, and return the last line of stderr."""
    os.killpg(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in stderr
    return stderr.splitlines()[-1]


def start(*arguments):
    """Start a command as a terminal does, with the default SIGINT handler. If the tests run in the background of a
    shell, they inherit an ignored SIGINT."""
    command = [sys.executable, "-m", *map(str, arguments)]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    as_default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=as_default, **options)


def test_control_c_during_imports_exits_with_code_130():
    process = start("paddle_resnet.doctor")
    deadline = time.monotonic() + 30
    while not is_blocked(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert control_c(process) == "paddle_resnet.doctor: interrupted"


@pytest.mark.soak
def test_control_c_with_decoding_processes_exits_with_code_130(photos, tmp_path):
    """The test sends the signal when the first decoding process has started."""
    for name in ("train", "val"):
        for path in (photos / "train").glob("*/*"):
            for i in range(60):
                (tmp_path / name / path.parent.name).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path.parent.name / f"{i}_{path.name}").symlink_to(path)
    process = start("paddle_resnet.dataset", "verify", tmp_path)
    deadline = time.monotonic() + 30
    # The first child is Python's resource tracker.
    while len(children(process)) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert control_c(process) == "paddle_resnet.dataset: interrupted"


def test_control_characters_in_errors_are_escaped(capsys):
    def fail():
        raise UsageError("a\x1b[31m\nb", "c")

    assert exit_codes.of("x", fail) == 2
    assert capsys.readouterr().err == "x: error: a\\x1b[31m\\nb\nc\n"


@pytest.mark.parametrize(
    ("error", "message"),
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
        (OSError("x.so: failed to map segment"), " (x.so: failed to map segment)"),
        (RuntimeError("could not create a primitive"), " (could not create a primitive)"),
        (RuntimeError("could not create a memory object"), " (could not create a memory object)"),
    ],
)
def test_out_of_memory_exits_with_code_1_and_an_error(capsys, error, message):
    def fail():
        raise error

    assert exit_codes.of("x", fail) == 1
    message = f"x: error: memory: insufficient{message}; add memory, or use a smaller --batch-size if the command"
    assert capsys.readouterr().err.startswith(message)


def test_gpu_without_cuda_is_not_reported_as_out_of_memory(capsys):
    """The message is from Paddle 2.6.2, for a GPU on which no process could allocate memory."""

    def fail():
        raise RuntimeError(
            "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 256.000000B memory on GPU 0, "
            "127.990900TB memory has been allocated and available memory is only 0.000000B.\n\nPlease check"
        )

    assert exit_codes.of("x", fail) == 1
    assert capsys.readouterr().err.startswith("x: error: GPU: CUDA does not work (ResourceExhaustedError: Out of")


def test_open_file_limit_exits_with_code_1_and_an_error(photos, monkeypatch, verify_here, capsys):
    """An image that cannot be opened because of the limit must not be reported as damaged."""

    def read(image):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), image.path)

    monkeypatch.setattr(verify, "read_image", read)
    assert dataset.main(["verify", str(photos)]) == 1
    stderr = capsys.readouterr().err
    assert "error: ulimit -n: " in stderr
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert stderr.endswith(f"/00.jpg'); raise the limit, for example with ulimit -n {max(1024, 2 * limit)}\n")


def test_thread_limit_exits_with_code_1_and_an_error(capsys):
    def fail():
        raise RuntimeError("can't start new thread")

    assert exit_codes.of("x", fail) == 1
    problem = "threads: no more threads can be started (can't start new thread)"
    assert f"x: error: {problem}; allow more processes (ulimit -u, or" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("Out of range"), PermissionError(errno.EACCES, "denied", 3)], ids=str)
def test_other_errors_are_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        exit_codes.of("x", fail)


def test_address_space_limit_below_need_of_paddle_exits_with_code_1():
    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))

    command = [sys.executable, "train.py", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=limited)
    assert done.returncode == 1
    assert done.stderr == (
        "train.py: error: ulimit -v: 500 MiB of address space, but at least 4,096 MiB are required; raise the limit, "
        "for example with ulimit -v unlimited\n"
    )


@pytest.mark.slow
def test_python_without_docstrings_exits_with_code_1():
    command = [sys.executable, "-OO", "train.py", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert_one_error(done.stderr, ["python -OO or PYTHONOPTIMIZE=2", "use -O or PYTHONOPTIMIZE=1"])


def test_deleted_working_directory_exits_with_code_1(tmp_path, work_in, capsys):
    (tmp_path / "gone").mkdir()
    work_in(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for name, (main, arguments, _) in TOOLS.items():
        assert main(arguments) == 1
        expected = f"paddle_resnet.{name}: error: working directory: cannot be used (No such file or directory); "
        assert capsys.readouterr().err.endswith(f"{expected}change to a different folder\n")


def test_missing_temporary_folder_exits_with_code_1(capsys):
    """Python writes a file to each folder to find one for temporary files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        code = exit_codes.of("x", tempfile._get_default_tempdir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    error = r"x: error: No usable temporary directory found in \['.*'\]; set TMPDIR to a writable folder\n"
    assert re.fullmatch(error, capsys.readouterr().err)


@pytest.mark.parametrize(("received", "cause"), [("SIGTERM", "SIGTERM"), (None, "a signal to another process")])
def test_stopped_run_exits_with_code_75(capsys, received, cause):
    def stop():
        with signals.watched():
            if received:
                signal.raise_signal(getattr(signal, received))
            raise signals.Preempted(" before step 3; run the command again")

    assert exit_codes.of("train.py", stop) == 75
    assert capsys.readouterr() == (f"stopped by {cause} before step 3; run the command again\n", "")
