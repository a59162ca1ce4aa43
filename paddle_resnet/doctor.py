"""Check whether this machine can train, and suggest remedies: `python -m paddle_resnet.doctor`.

Checks that load native libraries run in child processes, so that a crash is reported as a problem.
"""

import argparse
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from paddle_resnet import __version__
from paddle_resnet.utils.children import ROOT, Row, reason, run, training_command
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import UsageError, command, counted, installation, program

GIB = 2**30
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED_MEMORY = 4 * GIB, 2 * GIB, 1 * GIB
LEAST_OPEN_FILES = 1024
LIBRARIES = [("libcudnn.so", "cuDNN"), ("libcublas.so", "cuBLAS"), ("libnccl.so", "NCCL")]
# Flags of train.py for a test with tiny images. On a GPU, four steps are enough to capture and replay a step.
STEP = [
    *("--model-arch-name", "ResNet18", "--num-of-class", "8", "--image-shape", "4,32,32", "--crop-size", "32"),
    *("--resize-short", "36", "--batch-size", "8", "--data-layout", "NHWC", "--data-format", "synthetic"),
    *("--run-scope", "train_only", "--benchmark", "--benchmark-warmup-steps", "3", "--benchmark-steps", "1"),
    *("--show-config", "false", "--warmup-epochs", "0"),
]
STEP_ON_A_GPU = ["--amp", "--amp-level", "O2", "--use-dynamic-loss-scaling"]


def examine(output_dir: str, compares: bool = False) -> Iterator[Row]:
    """Check this machine, then test the operations that training requires, and yield a Row for each result. If
    `compares`, the tests are those of self_test.py. There are no tests if Paddle is unsupported or cannot use the
    device."""
    facts, problem = _in_child(_library_facts)
    gpus = _nvidia_gpus()
    facts = facts or {}
    yield Row("paddle_resnet", f"{__version__} in {ROOT}")
    yield from _gpu_rows(gpus, facts)
    if problem:
        yield Row("Paddle", problem, "no", f"{installation('gpu' if gpus else 'cpu')}; see docs/install.md")
    yield from [Row(*row) for row in facts.get("rows", [])]
    yield _compiler()
    yield from _machine(len(gpus))
    yield _disk(Path(output_dir))
    if problem or not facts["trains"]:
        return
    if compares:
        from paddle_resnet import self_test

        yield from self_test.checks(facts["device"], facts["missing"], len(facts["capabilities"]), facts["arithmetic"])
    else:
        yield from _tests(facts["device"], facts["missing"])


def _nvidia_gpus():
    """Return [[name, memory, driver]] for all GPUs that nvidia-smi reports, or [] if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _gpu_rows(gpus, facts):
    if not gpus:
        yield Row("driver", "no GPU found with nvidia-smi, so the tests use the CPU")
        return
    yield Row("driver", gpus[0][2])
    for index, (name, memory, _) in enumerate(gpus):
        capabilities = facts.get("capabilities", [])
        capability = f", compute capability {capabilities[index]}" if index < len(capabilities) else ""
        yield Row(f"GPU {index}", f"{name}, {memory}{capability}")


def _library_facts():
    """Return the facts that can be known only by importing Paddle, DALI or NVRTC. This function runs in a child
    process.

    Returns:
        {"device": "gpu" or "cpu", "rows": rows of the table, "trains": whether Paddle is supported and works on the
        device, "missing" and "arithmetic": see self_test.checks, "capabilities": compute capability of each GPU}.
    """
    from paddle_resnet.utils import signals

    with signals.importing_paddle():
        import paddle

    from paddle_resnet.machine import compat, cpu, gpus, libraries
    from paddle_resnet.native import build as native

    has_gpus = bool(_nvidia_gpus())
    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    build = gpus.describe_build() if paddle.is_compiled_with_cuda() else f"Paddle {paddle.__version__}, a CPU build"
    rows = [_paddle(compat, paddle.__version__, build)]
    device = "gpu" if has_gpus else "cpu"
    if has_gpus:
        rows += [_library(libraries, name, what) for name, what in LIBRARIES]
        # gpus.problem returns the same message that train.py would print.
        problem = next(filter(None, (gpus.problem(i, several=count > 1) for i in range(max(1, count)))), None)
        rows.append(("test: kernel", problem or f"works on {counted(count, 'GPU')}", "no" if problem else "ok"))
    capability = paddle.device.cuda.get_device_capability(0) if count else None
    missing = native.missing(capability)
    rows += [_dali(device), _nvrtc(native, capability), _kernel_cache(native)]
    capabilities = [".".join(map(str, paddle.device.cuda.get_device_capability(i))) for i in range(count)]
    return {
        "device": device,
        "rows": rows,
        "trains": all(status != "no" for _, _, status, *_ in rows),
        "missing": missing,
        "capabilities": capabilities,
        "arithmetic": [
            paddle.__version__,
            "cuda" if paddle.is_compiled_with_cuda() else "cpu",
            cpu.arithmetic()["instructions"],
        ],
    }


def _paddle(compat, version, build):
    try:
        compat.check_version(version)
    except UsageError as e:
        return ("Paddle", str(e), "no")
    if compat.is_newer_than_tested(version):
        return ("Paddle", build, "note", f"newer than the tested versions: run {command('doctor', '--self-test')}")
    return ("Paddle", build, "ok")


def _library(libraries, name, what):
    if not libraries.is_served():
        return (what, "located by Paddle itself", "ok")
    path = libraries.find(name)
    return (what, path, "ok") if path else (what, "not found", "note", installation("gpu"))


def _dali(device):
    import nvidia.dali

    decoders = "decodes on the CPU"
    if device == "gpu":
        import pynvml

        has_unit = _has_jpeg_unit(pynvml)
        decoders = f"decodes on the GPU, {'with' if has_unit else 'without'} a hardware JPEG decoder"
    return ("DALI", f"{nvidia.dali.__version__}, {decoders}", "ok")


def _has_jpeg_unit(nvml):
    """Return whether GPU 0 has a hardware JPEG decoder, that is, whether the driver reports the decoder's
    utilization. `nvml` is the module pynvml."""
    try:
        nvml.nvmlInit()
        nvml.nvmlDeviceGetJpgUtilization(nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError:
        return False
    return True


def _nvrtc(native, capability):
    library = native._nvrtc()
    if library is None:
        if not capability:
            return ("NVRTC", "not found", "ok", "")
        remedy = f"{installation('gpu')}; otherwise, training uses Paddle's slower kernels"
        return ("NVRTC", "not found", "note", remedy)
    import ctypes

    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return ("NVRTC", f"{major.value}.{minor.value}, {library._name}", "ok")


def _kernel_cache(native):
    try:
        folder = native.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, native.Unavailable) as e:
        return ("kernel cache", str(e), "note", "set XDG_CACHE_HOME to a writable folder")
    count = sum(1 for pattern in ("*.so", "*.cubin") for _ in folder.glob(pattern))
    return ("kernel cache", f"{folder}, {counted(count, 'file')}", "ok")


def _compiler():
    compiler = os.environ.get("CXX", "").split() or ["g++"]
    path = shutil.which(compiler[0])
    if path is None:
        remedy = "install a compiler, or set CXX; otherwise, training uses Paddle's slower kernels"
        return Row("C++ compiler", f"{compiler[0]}: not found", "note", remedy)
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    return Row("C++ compiler", (done.stdout.splitlines() or [path])[0])


def _machine(gpu_count):
    from paddle_resnet.machine import memory

    cores = len(os.sched_getaffinity(0))
    yield Row("cores", f"{cores}, {platform.machine()}, Python {platform.python_version()}")
    yield _memory(memory.available())
    yield _shared_memory(_file_system_size("/dev/shm"), gpu_count)
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)
    yield _ulimits(*files, processes[0])


def _memory(available):
    is_enough = available >= LEAST_MEMORY
    remedy = "" if is_enough else f"with less than {LEAST_MEMORY // GIB} GiB per process, use a smaller --batch-size"
    return Row("memory", f"{available / GIB:.1f} GiB available", "ok" if is_enough else "note", remedy)


def _file_system_size(folder):
    """Return the size of a file system in bytes, or 0 if the folder does not exist."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize


def _shared_memory(size, gpu_count):
    is_enough = size >= LEAST_SHARED_MEMORY or gpu_count < 2
    remedy = "NCCL needs shared memory between GPUs; enlarge /dev/shm, or start the container with --shm-size=1g"
    return Row("/dev/shm", f"{size / GIB:.1f} GiB", "ok" if is_enough else "note", "" if is_enough else remedy)


def _ulimits(files, most_files, processes):
    """Check the limits of open files (soft and hard) and processes, which can be resource.RLIM_INFINITY."""
    is_enough = files >= LEAST_OPEN_FILES or files == resource.RLIM_INFINITY
    enough = 65536 if most_files == resource.RLIM_INFINITY else min(most_files, 65536)
    remedy = "" if is_enough else f"ulimit -n {enough}"
    limits = f"open files {_limit(files)}, processes {_limit(processes)}"
    return Row("ulimits", limits, "ok" if is_enough else "note", remedy)


def _limit(value):
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _disk(folder):
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as e:
        return Row("disk", f"{folder} cannot be written ({e.strerror})", "no", "choose a different --output-dir")
    return _free_space(folder, shutil.disk_usage(existing).free)


def _free_space(folder, free):
    is_enough = free >= LEAST_DISK
    remedy = "" if is_enough else f"free disk space; checkpoints of a ResNet-50 run take about {LEAST_DISK // GIB} GiB"
    return Row("disk", f"{free / GIB:.1f} GiB free for {folder}", "ok" if is_enough else "note", remedy)


def _tests(device, missing):
    """Test the operations that training requires, and yield a Row for each test."""
    _, problem = _in_child(_decode_image, device)
    yield Row("test: image", problem or "decoded by DALI", "no" if problem else "ok")
    # If the custom kernels cannot be built, test Paddle's kernels, which training would then use.
    flags = [*STEP, "--device", device, *(STEP_ON_A_GPU if device == "gpu" else [])]
    yield _test_training("test: training step", [], [*flags, "--kernels", "paddle" if missing else "native"], missing)
    launch = ["-m", "paddle.distributed.launch", *(["--nproc_per_node", "2"] if device == "cpu" else [])]
    yield _test_training("test: all-reduce", launch, [*flags, "--kernels", "paddle"], None)


def _decode_image(device):
    """Decode a JPEG image with DALI. Raises ValueError if the decoded image has the wrong size or colors. This function
    runs in a child process."""
    import numpy as np
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 100, 50)).save(file, "JPEG")

    @pipeline_def(batch_size=1, num_threads=1, device_id=0 if device == "gpu" else None)
    def decode():
        encoded = fn.external_source(lambda: [np.frombuffer(file.getvalue(), np.uint8)])
        return fn.decoders.image(encoded, device="mixed" if device == "gpu" else "cpu")

    pipeline = decode()
    (images,) = pipeline.run()
    pixels = np.asarray((images.as_cpu() if device == "gpu" else images)[0])
    if pixels.shape != (48, 64, 3) or np.abs(pixels.astype(int) - (200, 100, 50)).max() > 8:
        raise ValueError(
            f"DALI decoded a test image incorrectly: shape {pixels.shape} and first pixel {pixels[0, 0]} instead of "
            "(48, 64, 3) and about (200, 100, 50)"
        )


def _test_training(what, launcher, flags, missing):
    begin = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*launcher, *(["--log_dir", f"{folder}/log"] if launcher else []), *training_command(), *flags]
        arguments += ["--output-dir", folder, "--report-file", f"{folder}/report.json"]
        done = run(arguments, cwd=folder)
        logs = sorted(Path(folder).glob("log/workerlog.*"))
        output = done.stderr + "".join(path.read_text(errors="replace") for path in logs)
    if done.returncode == 0:
        kernels = f"with Paddle's kernels, which are slower ({missing})" if missing else "with the custom kernels"
        detail = f"{len(logs)} processes" if launcher else kernels
        return Row(what, f"{detail}, {monotonic() - begin:.0f} s", "note" if missing else "ok")
    return Row(what, reason(done.returncode, output), "no")


def _in_child(function, *arguments):
    """Call a function in a child process. Return (result, None) or (None, problem)."""
    code = f"from paddle_resnet import doctor; doctor._answer(doctor.{function.__name__}, *{arguments!r})"
    done = run(["-c", code])
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    return None, reason(done.returncode, done.stderr)


def _answer(function, *arguments):
    print(json.dumps(function(*arguments)), flush=True)
    os._exit(0)  # skip the exit handlers of libraries, which may crash


def _print_table(rows):
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("what", "detail", "status", "remedy"):
        table.add_column(title, overflow="fold")
    colors = {"ok": "green", "note": "yellow", "no": "red"}
    for row in rows:
        table.add_row(row.what, Text(str(row.detail)), Text(row.status, colors[row.status]), Text(row.remedy))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(argv: list[str] | None = None) -> int:
    """Check this machine, and return the exit code: 0 if training works, 1 if it would fail; for errors, see
    exit_codes.of."""
    from paddle_resnet import config
    from paddle_resnet.utils import exit_codes

    parser = Parser(prog="doctor", description="Check whether training works on this machine.")
    parser.add_argument(
        "--output-dir",
        default=config.parse_args([]).output_dir,
        help="folder for checkpoints, whose free disk space is checked",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="train a tiny network in each precision with each kind of kernels, and compare its losses with those of "
        "tested versions of Paddle; also test resuming, exporting and, unless the machine has exactly one GPU, two "
        "processes",
    )
    return exit_codes.of(program("doctor"), lambda: _main(parser.parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    rows = list(examine(args.output_dir, args.self_test))
    works = all(row.status != "no" for row in rows)
    if args.json:
        print(json.dumps({"works": works, "rows": [row._asdict() for row in rows]}, indent=1))
    else:
        _print_table(rows)
        if args.self_test:
            print("the self-test passed" if works else "the self-test failed")
        else:
            print("training works on this machine" if works else "training would fail on this machine")
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
