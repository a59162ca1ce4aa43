"""The doctor command, on this machine and with simulated problems."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from PIL import Image

from conftest import ROOT
from paddle_resnet import doctor
from paddle_resnet.machine import compat, driver, gpus, libraries, memory
from paddle_resnet.native import build as native
from paddle_resnet.utils import children
from paddle_resnet.utils.errors import installation, script


@pytest.mark.soak
def test_doctor_passes_on_healthy_machine(tmp_path):
    """The command runs in a separate process, as it does for users."""
    command = [sys.executable, "-m", "paddle_resnet.doctor", "--json", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["works"]
    statuses = {row["what"]: row["status"] for row in report["rows"]}
    details = {row["what"]: row["detail"] for row in report["rows"]}
    expected = ["driver", "Paddle", "DALI", "NVRTC", "kernel cache", "C++ compiler", "cores", "memory", "/dev/shm"]
    expected += ["ulimits", "disk", "test: image", "test: training step", "test: all-reduce"]
    assert set(expected) <= set(statuses)
    assert "no" not in statuses.values()
    assert paddle.__version__ in details["Paddle"]
    assert str(tmp_path) in details["disk"]


@pytest.fixture
def facts(once, monkeypatch):
    """Query the library versions only once, because importing the libraries takes seconds. Tests of other checks use
    the stored versions."""

    def make(folder):
        (folder / "facts.json").write_text(json.dumps(doctor._in_child(doctor._library_facts)))

    answer = json.loads((once("facts", make) / "facts.json").read_text())
    monkeypatch.setattr(doctor, "_in_child", lambda function: answer)


@pytest.fixture
def in_this_process(monkeypatch):
    """Query the versions in this process."""
    monkeypatch.setattr(doctor, "_in_child", lambda function, *arguments: (function(*arguments), None))


@pytest.fixture
def examine(monkeypatch, tmp_path):
    """Return a function that runs all fast checks of the doctor and returns {what: Row}."""
    monkeypatch.setattr(doctor, "_tests", lambda device, lack: iter([doctor.Row("tests", f"{device}, {lack}")]))

    def examine(output_dir=tmp_path):
        return {row.what: row for row in doctor.examine(output_dir)}

    return examine


@pytest.mark.slow
def test_doctor_prints_table_and_exits_by_status(examine, facts, capsys, tmp_path):
    assert doctor.main(["--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "C++ compiler" in out and "training works on this machine" in out
    assert doctor.main(["--output-dir", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] and {"C++ compiler", "disk", "tests"} <= {row["what"] for row in report["rows"]}
    (tmp_path / "file").write_text("")
    assert doctor.main(["--output-dir", str(tmp_path / "file/output")]) == 1
    out = capsys.readouterr().out
    assert "choose a different --output-dir" in out and "training would fail on this machine" in out


def test_missing_compiler_is_a_note(examine, in_this_process, environment, tmp_path):
    environment(CXX="nosuch", XDG_CACHE_HOME=tmp_path)
    rows = examine()
    remedy = "install a compiler, or set CXX; otherwise, training uses Paddle's slower kernels"
    assert rows["C++ compiler"] == ("C++ compiler", "nosuch: not found", "note", remedy)
    assert rows["tests"].detail == "cpu, no C++ compiler (nosuch)"


def test_unwritable_kernel_cache_is_a_note(examine, in_this_process, environment, tmp_path):
    (tmp_path / "file").write_text("")
    environment(XDG_CACHE_HOME=tmp_path / "file")
    assert examine()["kernel cache"].status == "note"


def test_missing_home_folder_is_a_note(environment):
    environment(XDG_CACHE_HOME=None, HOME="~")  # pathlib takes an unexpanded ~ for a missing home folder
    _, detail, status, remedy = doctor._kernel_cache(native)
    assert "no home folder" in detail and status == "note" and remedy == "set XDG_CACHE_HOME to a writable folder"


def test_memory_disk_and_limits_of_this_machine_are_reported(examine, facts, tmp_path):
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most_files))
    try:
        rows = examine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))
    assert rows["ulimits"] == doctor._ulimits(1000, most_files, processes)
    free = shutil.disk_usage(tmp_path).free
    assert float(rows["disk"].detail.split()[0]) == pytest.approx(free / doctor.GIB, abs=1)
    assert rows["disk"].detail.endswith(f" GiB free for {tmp_path}")
    assert float(rows["memory"].detail.split()[0]) == pytest.approx(memory.available() / doctor.GIB, abs=1)
    assert rows["/dev/shm"].detail == f"{doctor._file_system_size('/dev/shm') / doctor.GIB:.1f} GiB"


def test_limit_of_open_files_can_be_unlimited():
    assert doctor._ulimits(256, 4096, 1).remedy == "ulimit -n 4096"
    assert doctor._ulimits(256, resource.RLIM_INFINITY, 1).remedy == "ulimit -n 65536"
    unlimited = doctor._ulimits(*[resource.RLIM_INFINITY] * 3)
    assert unlimited == ("ulimits", "open files unlimited, processes unlimited", "ok", "")


def test_missing_shared_memory_is_ok_for_one_process(tmp_path):
    status = os.statvfs(tmp_path)
    assert doctor._file_system_size(tmp_path) == status.f_blocks * status.f_frsize > 0
    assert doctor._file_system_size(tmp_path / "missing") == 0
    assert doctor._shared_memory(0, 1) == ("/dev/shm", "0.0 GiB", "ok", "")
    for size, status in ((doctor.LEAST_SHARED_MEMORY - 1, "note"), (doctor.LEAST_SHARED_MEMORY, "ok")):
        for gpu_count, expected in ((1, "ok"), (2, status)):
            row = doctor._shared_memory(size, gpu_count)
            assert (row.status, row.detail) == (expected, "1.0 GiB")
            assert row.remedy.endswith("start the container with --shm-size=1g") == (expected == "note")


# The start of a Python process that does not run its program: it appends its arguments to a file, writes log files and
# errors like Paddle's launcher or like train.py, and exits.
FAKE_CHILD = """
import json, os, pathlib, sys
arguments = sys.orig_argv[1:]
with open({calls!r}, "a") as file:
    print(json.dumps(arguments), file=file)
print("a log line\\nnull", flush=True)
if "--log_dir" in arguments:  # the launcher writes the output of the processes to files
    logs = pathlib.Path(arguments[arguments.index("--log_dir") + 1])
    logs.mkdir()
    for rank in (0, 1):
        (logs / f"workerlog.{{rank}}").write_bytes(b"\\xff\\nValueError: x\\n")
else:
    print("ValueError: x", file=sys.stderr, flush=True)
os._exit({returncode})
"""


@pytest.mark.parametrize("returncode", [0, 1])
@pytest.mark.parametrize(("device", "missing"), [("cpu", None), ("cpu", "no compiler"), ("gpu", None)])
def test_training_is_tested_with_the_kernels_of_the_machine(in_children, tmp_path, device, missing, returncode):
    in_children(FAKE_CHILD.format(calls=str(tmp_path / "calls"), returncode=returncode))
    rows = {row.what: row for row in doctor._tests(device, missing)}
    _, step, launch = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    kernels = [command[command.index("--kernels") + 1] for command in (step, launch)]
    assert kernels == ["paddle" if missing else "native", "paddle"]
    for command in (step, launch):
        assert command[command.index("--device") + 1] == device
        assert set(command).issuperset(doctor.STEP_ON_A_GPU) == (device == "gpu")
        report, folder = (Path(command[command.index(name) + 1]) for name in ("--report-file", "--output-dir"))
        assert report.parent == folder and not folder.exists()  # a temporary folder
    assert ("--nproc_per_node" in launch) == (device == "cpu") and "paddle.distributed.launch" not in step
    statuses = ["ok", "note" if missing else "ok", "ok"] if returncode == 0 else ["no"] * 3
    assert [row.status for row in rows.values()] == statuses
    kernels = "with Paddle's kernels, which are slower (no compiler)" if missing else "with the custom kernels"
    passed = ["decoded by DALI", f"{kernels}, 0 s", "2 processes, 0 s"]
    assert [row.detail for row in rows.values()] == (passed if returncode == 0 else ["ValueError: x"] * 3)


def test_installed_doctor_trains_with_installed_command(monkeypatch):
    commands = []
    monkeypatch.setattr(children, "is_installed", lambda: True)
    monkeypatch.setattr(
        doctor, "run", lambda arguments, cwd: commands.append(arguments) or SimpleNamespace(returncode=0, stderr="")
    )
    doctor._test_training("test", ["-m", "paddle.distributed.launch"], ["--lr", "1"], None)
    command = commands[0][commands[0].index("--log_dir") + 2 :]
    assert command[:4] == [script(), "train", "--lr", "1"]
    assert not command[0].endswith(".py")  # Paddle's launcher would start the file with Python


def test_incorrectly_decoded_image_is_an_error(monkeypatch):
    new = Image.new
    doctor._decode_image("cpu")
    monkeypatch.setattr(Image, "new", lambda mode, size, color: new(mode, size, (color[0], color[1], color[2] + 20)))
    with pytest.raises(ValueError, match="DALI decoded a test image incorrectly"):
        doctor._decode_image("cpu")


def test_crashing_library_is_reported(examine, in_children):
    in_children("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    rows = examine()
    assert rows["Paddle"].detail == "killed by SIGSEGV" and rows["Paddle"].status == "no"
    assert "tests" not in rows and "disk" in rows


def test_missing_paddle_is_reported(examine, in_children):
    in_children("import sys\nsys.modules['paddle'] = None")
    rows = examine()
    assert "ModuleNotFoundError: " in rows["Paddle"].detail and rows["Paddle"].status == "no"
    requirements = "gpu" if doctor._nvidia_gpus() else "cpu"
    assert rows["Paddle"].remedy == f"{installation(requirements)}; see docs/install.md"


def test_doctor_runs_if_paddle_cannot_be_imported(tmp_path):
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle" / "__init__.py").write_text("raise ImportError('libfoo.so: cannot open')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "paddle_resnet.doctor", "--output-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "ImportError: libfoo.so: cannot open" in done.stdout
    assert "GiB available" in done.stdout


def test_unsupported_or_untested_paddle_is_reported():
    what, detail, status = doctor._paddle(compat, "2.4.1", "a build")
    assert (what, status) == ("Paddle", "no") and "Paddle 2.4.1: not supported" in detail
    what, detail, status, remedy = doctor._paddle(compat, "99.0.0", "a build")
    assert (what, detail, status) == ("Paddle", "a build", "note")
    assert remedy.startswith("newer than the tested versions: run ") and remedy.endswith("doctor --self-test")
    assert doctor._paddle(compat, paddle.__version__, "a build") == ("Paddle", "a build", "ok")


def test_hanging_child_process_is_reported():
    done = doctor.run(["-c", "import time; time.sleep(60)"], timeout_s=1)
    assert doctor.reason(done.returncode, done.stderr) == "Error: not finished after 1 s"


def test_child_process_runs_in_project_folder_and_ends_with_its_parent(work_in, tmp_path):
    work_in(tmp_path)
    code = "import ctypes, os; number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(number)); "
    code += "print(number.value, os.getcwd(), flush=True); os.write(1, b'\\xff')"  # 2: PR_GET_PDEATHSIG
    assert doctor.run(["-c", code]).stdout == f"9 {ROOT}\n\ufffd"


def test_child_process_exits_without_exit_handlers():
    code = "import atexit; from paddle_resnet import doctor; atexit.register(print, 'an exit handler'); "
    done = doctor.run(["-c", code + "doctor._answer(lambda *arguments: arguments, 1, 'a')"])
    assert (done.returncode, done.stdout, done.stderr) == (0, '[1, "a"]\n', "")


def test_reason_prefers_error_of_failed_rank():
    stderr = "FatalError: `Segmentation fault` is detected\ntrain.py: Error: rank 0 failed first: its process ended\n"
    assert doctor.reason(1, stderr) == "FatalError: `Segmentation fault` is detected"
    (last,) = stderr.splitlines()[1:]
    assert doctor.reason(1, last) == last
    assert doctor.reason(3, "a\n b \n\n \n") == "b"
    assert doctor.reason(3, "") == "exit code 3"
    assert doctor.reason(-9, "") == "killed by SIGKILL"
    errors = "AError: 1\nBError: 2\nc\n"
    assert [doctor.reason(code, errors) for code in (1, -9)] == ["BError: 2", "killed by SIGKILL BError: 2"]


def program(path, *lines):
    """Write an executable shell script, and return its path."""
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (["echo A, 1 MiB, 5", "echo B, 2 MiB, 5"], [["A", "1 MiB", "5"], ["B", "2 MiB", "5"]]),
        (["echo failed", "exit 9"], []),
        (None, []),
    ],
    ids=["two GPUs", "no driver", "not installed"],
)
def test_output_of_nvidia_smi_is_used_only_if_it_succeeds(environment, tmp_path, capfd, lines, rows):
    environment(PATH=str(tmp_path))
    if lines is not None:
        arguments = "--query-gpu=name,memory.total,driver_version --format=csv,noheader"
        program(tmp_path / "nvidia-smi", f'[ "$*" = "{arguments}" ] || exit 1', *lines)
    assert doctor._nvidia_gpus() == rows
    assert capfd.readouterr() == ("", "")


def test_jpeg_decoder_of_gpu_0_is_detected():
    class NVMLError(Exception):
        pass

    def failing(*arguments):
        raise NVMLError

    functions = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByIndex": lambda index: index}
    functions["nvmlDeviceGetJpgUtilization"] = {0: [5, 1000]}.__getitem__
    assert doctor._has_jpeg_unit(SimpleNamespace(NVMLError=NVMLError, **functions))
    for name in ("nvmlInit", "nvmlDeviceGetJpgUtilization"):
        assert not doctor._has_jpeg_unit(SimpleNamespace(NVMLError=NVMLError, **functions | {name: failing}))


def test_versions_of_compilers_and_size_of_cache(environment, tmp_path):
    def version(major, minor):
        major._obj.value, minor._obj.value = 11, 8

    library = SimpleNamespace(_name="libnvrtc.so.11", nvrtcVersion=version)
    found = doctor._nvrtc(SimpleNamespace(_nvrtc=lambda: library), None)
    assert found == ("NVRTC", "11.8, libnvrtc.so.11", "ok")
    compiler = program(tmp_path / "compiler", '[ "$*" = --version ] && echo "C 1.2" && echo more')
    environment(CXX=f"{compiler} -O2")
    assert doctor._compiler() == ("C++ compiler", "C 1.2", "ok", "")
    program(compiler, "true")
    assert doctor._compiler().detail == str(compiler)
    for name in ("a.so", "b.so", "c.cubin", "d.txt"):
        (tmp_path / name).touch()
    cache = SimpleNamespace(cache_folder=lambda: tmp_path, Unavailable=native.Unavailable)
    assert doctor._kernel_cache(cache) == ("kernel cache", f"{tmp_path}, 3 files", "ok")


@pytest.mark.parametrize(("shortfall", "status"), [(0, "ok"), (1, "note")])
def test_exact_requirements_are_enough(shortfall, status):
    rows = [
        doctor._memory(doctor.LEAST_MEMORY - shortfall),
        doctor._ulimits(doctor.LEAST_OPEN_FILES - shortfall, 8192, 4096),
        doctor._free_space("out", doctor.LEAST_DISK - shortfall),
    ]
    assert [row.status for row in rows] == [status] * 3
    limits = f"open files {1024 - shortfall}, processes 4096"
    assert [row.detail for row in rows] == ["4.0 GiB available", limits, "2.0 GiB free for out"]
    remedies = ["with less than 4 GiB per process, use a smaller --batch-size", "ulimit -n 8192"]
    remedies.append("free disk space; checkpoints of a ResNet-50 run take about 2 GiB")
    assert [row.remedy for row in rows] == (remedies if shortfall else [""] * 3)


def test_missing_libraries_of_a_gpu_are_reported():
    without_nvrtc = SimpleNamespace(_nvrtc=lambda: None)
    assert [doctor._nvrtc(without_nvrtc, capability)[2:] for capability in ((9, 0), None)] == [
        ("note", f"{installation('gpu')}; otherwise, training uses Paddle's slower kernels"),
        ("ok", ""),
    ]
    missing = SimpleNamespace(is_served=lambda: True, find=lambda name: None)
    assert doctor._library(missing, "libnccl.so", "NCCL") == ("NCCL", "not found", "note", installation("gpu"))


@pytest.fixture
def gpu_machine(in_this_process, monkeypatch):
    """Simulate a machine with two GPUs. Functions that would run in child processes run in this process."""
    monkeypatch.setattr(doctor, "_nvidia_gpus", lambda: [["NVIDIA H100", "81559 MiB", "550.54.15"]] * 2)
    monkeypatch.setattr(doctor, "_has_jpeg_unit", lambda nvml: True)
    monkeypatch.setattr(gpus, "describe_build", lambda: "Paddle 2.6.2 for CUDA 11.8, capability 6.1 8.6")
    monkeypatch.setattr(libraries, "is_served", lambda: True)
    monkeypatch.setattr(libraries, "find", lambda name: f"/opt/{name}.8")
    for name, value in {
        "is_compiled_with_cuda": lambda: True,
        "device.cuda.device_count": lambda: 2,
        "device.cuda.get_device_capability": lambda index: (9, index),
    }.items():
        monkeypatch.setattr(f"paddle.{name}", value)


def test_paddle_build_with_its_own_libraries_is_reported(examine, gpu_machine, monkeypatch):
    monkeypatch.setattr(gpus, "problem", lambda index, several: None)
    monkeypatch.setattr(libraries, "is_served", lambda: False)
    assert examine()["NCCL"].detail == "located by Paddle itself"


def test_doctor_reports_gpus_and_libraries(examine, gpu_machine, monkeypatch):
    monkeypatch.setattr(gpus, "problem", lambda index, several: None)
    monkeypatch.setattr(native, "missing", lambda capability: f"no compiler for {capability}")
    rows = examine()
    assert rows["driver"].detail == "550.54.15"
    assert rows["GPU 1"].detail == "NVIDIA H100, 81559 MiB, compute capability 9.1"
    assert rows["cuDNN"].detail == "/opt/libcudnn.so.8"
    assert rows["DALI"].detail.endswith("with a hardware JPEG decoder")
    assert rows["test: kernel"].status == "ok"
    assert rows["tests"].detail == "gpu, no compiler for (9, 0)"


def test_gpus_that_paddle_does_not_see_have_no_capability():
    for facts, suffixes in (({}, ["", ""]), ({"capabilities": ["9.0"]}, [", compute capability 9.0", ""])):
        driver, *rows = doctor._gpu_rows([["NVIDIA A", "1 MiB", "550.54"]] * 2, facts)
        assert driver.detail == "550.54"
        assert [row.detail for row in rows] == [f"NVIDIA A, 1 MiB{suffix}" for suffix in suffixes]


def test_unusable_gpu_has_same_error_as_train(examine, gpu_machine, monkeypatch):
    monkeypatch.setattr(gpus, "problem", lambda index, several: f"GPU {index} is too new" if index else None)
    rows = examine()
    assert rows["test: kernel"].detail == "GPU 1 is too new" and rows["test: kernel"].status == "no"
    assert "tests" not in rows
    monkeypatch.setattr(gpus, "problem", lambda index, several: f"several: {several}")
    for count in (0, 1, 2):
        monkeypatch.setattr("paddle.device.cuda.device_count", lambda count=count: count)
        assert examine()["test: kernel"].detail == f"several: {count > 1}"


def test_cpu_build_on_machine_with_gpu_is_reported_with_its_remedy(examine, gpu_machine, monkeypatch):
    monkeypatch.setattr("paddle.is_compiled_with_cuda", lambda: False)
    monkeypatch.setattr(driver, "gpu", lambda: driver.Gpu("NVIDIA H100", (9, 0)))
    row = examine()["test: kernel"]
    assert row.status == "no"
    assert 'is a CPU build; use --device cpu, or install a GPU build with make venv PADDLE="3.3.1 -i URL"' in row.detail


def test_failed_training_reports_its_error():
    row = doctor._test_training("test", [], ["--epochs", "none"], None)
    assert row.status == "no" and row.detail.startswith("train.py: error: ") and "--epochs" in row.detail


def test_markup_in_detail_is_printed_literally(capsys):
    doctor._print_table([doctor.Row("disk", "/data/[red]x", "no", "give [/another]")])
    printed = capsys.readouterr().out
    assert "/data/[red]x" in printed
    assert "give [/another]" in printed
