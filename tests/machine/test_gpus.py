"""Error messages about GPUs that Paddle cannot use. The tests replace functions of Paddle, so they do not require a
GPU."""

import struct
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.machine import gpus, libraries
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a machine with two GPUs and a GPU build of Paddle, whose only usable GPU is GPU 1. Return the state of
    the machine, which tests change. `result` is the value that the simulated Executor returns, the error that it
    raises, or None to run the program on the CPU."""
    cpu = static.Executor(paddle.CPUPlace())
    machine = SimpleNamespace(is_gpu_build=True, count=2, capability=(9, 1), result=None, library_problem=None)
    machine.build_capabilities = ["6.1", "7.0", "8.6"]

    class Executor:
        def __init__(self, place):
            assert place == 1

        def run(self, program, **options):
            if isinstance(machine.result, Exception):
                raise machine.result
            return cpu.run(program, **options) if machine.result is None else [machine.result]

    for name, value in {
        "is_compiled_with_cuda": lambda: machine.is_gpu_build,
        "CUDAPlace": lambda index: index,
        "device.cuda.device_count": lambda: machine.count,
        "device.cuda.get_device_capability": lambda index: machine.capability,
        "device.cuda.get_device_name": lambda index: f"NVIDIA H10{index}",
        "device.cuda.get_device_properties": lambda index: SimpleNamespace(total_memory=index * 2**30),
        "version.cuda": lambda: "11.8",
    }.items():
        monkeypatch.setattr(f"paddle.{name}", value)
    monkeypatch.setattr(static, "Executor", Executor)
    monkeypatch.setattr(
        libraries, "problem", lambda several: machine.library_problem and machine.library_problem[several]
    )
    monkeypatch.setattr(gpus, "build_capabilities", lambda: machine.build_capabilities)
    return machine


def test_working_gpu_has_no_problem(gpu):
    assert gpus.problem(1) is None
    assert gpus.resolve("auto", 1, False) == gpus.resolve("gpu", 1, False) == "gpu"


NO_KERNEL = OSError(
    "\n\n----\nC++ Traceback\n----\nError Message Summary:\n----\nExternalError: CUDA error(209), no kernel image is "
    "available for execution on the device. \n  [Hint: Please search for the error code] (at /paddle/x.cc:1)"
)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_gpu_without_kernels_is_reported(gpu, capsys, kind):
    gpu.result = kind(*NO_KERNEL.args)
    problem = (
        "GPU 1 (NVIDIA H101, compute capability 9.1) cannot run the kernels of "
        f"Paddle {paddle.__version__} for CUDA 11.8, which supports compute capability 6.1 7.0 8.6 "
        "(ExternalError: CUDA error(209), no kernel image is available for execution on the device); install "
    )
    assert gpus.problem(1).startswith(problem)
    with pytest.raises(UsageError) as e:
        gpus.resolve("gpu", 1, False)
    assert str(e.value).startswith(f"--device gpu: {problem}")
    assert gpus.resolve("auto", 1, False) == "cpu"
    assert capsys.readouterr().err.startswith(f"warning: --device auto: using the CPU instead of the GPU: {problem}")


def test_gpu_that_no_build_supports_is_reported_without_another_build(gpu):
    gpu.result = NO_KERNEL
    gpu.capability = 5, 2
    remedy = "; use --device cpu, or use a GPU with compute capability 6.1 or higher"
    assert gpus.problem(1).endswith(f"available for execution on the device){remedy}")


def test_gpu_with_wrong_results_is_reported(gpu):
    gpu.result = np.zeros(4, np.float32)
    assert "[0.0, 1.0, 2.0, 3.0] + [0.0, 1.0, 2.0, 3.0] gives [0.0, 0.0, 0.0, 0.0]" in gpus.problem(1)


def test_missing_library_is_reported_before_missing_kernel(gpu):
    gpu.result = NO_KERNEL
    gpu.library_problem = {False: "no cuDNN", True: "no NCCL"}
    assert gpus.problem(1) == "no cuDNN"
    with pytest.raises(UsageError, match="^--device gpu: no NCCL$"):
        gpus.resolve("gpu", 1, True)


def test_cpu_build_or_missing_gpu_is_reported(gpu, capsys):
    assert "does not detect GPU 2" in gpus.problem(2)
    gpu.count = 0
    assert "does not detect GPU 0" in gpus.problem(0)
    assert gpus.resolve("auto", 0, False) == "cpu"
    gpu.is_gpu_build, gpu.count = False, 2
    assert "is a CPU build; use --device cpu" in gpus.problem(0)
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == ""  # no warning, because the machine has no GPU


def test_cpu_device_skips_gpu_checks(gpu, capsys):
    for gpu.result in (None, NO_KERNEL):
        assert gpus.resolve("cpu", 1, False) == "cpu"
    assert capsys.readouterr().err == ""


def entry(kind, arch, payload):
    return struct.pack("<HHIQ", kind, 0, 64, len(payload)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + payload


def fatbin(*entries):
    body = b"".join(entry(*e) for e in entries)
    return gpus._FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_capabilities_are_read_from_library(tmp_path):
    """A fat binary consists of a header and one entry per architecture. The magic number may also occur elsewhere in
    the library."""
    code = fatbin((1, 61, b""), (2, 61, b"x" * 8), (2, 80, gpus._FATBIN * 2), (1, 90, b"y" * 16))
    (tmp_path / "libphi.so").write_bytes(
        b"\x7fELF" + gpus._FATBIN + bytes(100) + code + bytes(8) + fatbin((2, 75, b""))
    )
    assert gpus._capabilities(gpus._architectures(tmp_path / "libphi.so")) == ["6.1", "7.5", "8.0", "9.0+"]
    # Only the first fat binaries are read. Bytes with a different version or with a size beyond the end of the library
    # are not a fat binary.
    others = gpus._FATBIN + struct.pack("<HHQ", 1, 16, 2**40) + fatbin((2, 70, b"")).replace(b"\1\0\20\0", b"\2\0\20\0")
    (tmp_path / "start.so").write_bytes(fatbin((2, 61, b"")) + others + fatbin((2, 80, b"")) + code)
    assert gpus._architectures(tmp_path / "start.so", files=2) == {(61, 2), (80, 2)}
    (tmp_path / "cut.so").write_bytes(gpus._FATBIN + struct.pack("<HHQ", 1, 16, 8) + bytes(7))
    assert gpus._architectures(tmp_path / "cut.so") == set()


def test_build_of_unknown_capabilities(gpu):
    gpu.build_capabilities = []
    assert gpus.describe_build().endswith("which supports compute capability unknown")


@pytest.mark.usefixtures("gpu")
def test_memory_of_each_gpu():
    assert gpus.memory(2) == 2**31


def test_capabilities_are_read_from_paddle_version(monkeypatch):
    monkeypatch.setattr(paddle.version, "cuda_archs", lambda: [80, 90, 100], raising=False)
    assert gpus.build_capabilities() == ["8.0", "9.0", "10.0"]
