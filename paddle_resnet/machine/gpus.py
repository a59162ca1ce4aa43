"""Check whether the installed Paddle can use this machine's GPUs."""

import functools
import mmap
import struct
from pathlib import Path

import numpy as np
import paddle
from paddle import static

from paddle_resnet.machine import driver, libraries
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, core

_FATBIN = b"\x50\xed\x55\xba"  # first bytes of each fat binary (GPU code) in a library
_CUBIN, _PTX = 2, 1


def resolve(device: str, index: int, several: bool) -> str:
    """Resolve --device auto, and check that --device gpu is possible. Log a warning if auto selects the CPU although
    this machine has a GPU.

    Args:
        device: "auto", "gpu" or "cpu".
        index: Paddle's index of the GPU.
        several: whether the job has several processes.
    Returns:
        "gpu" or "cpu".
    Raises:
        UsageError: device is "gpu", but Paddle cannot use the GPU.
    """
    if device == "cpu":
        return "cpu"
    reason = problem(index, several)
    if reason is None:
        return "gpu"
    if device == "gpu":
        raise UsageError(f"--device gpu: {reason}")
    if not paddle.is_compiled_with_cuda():
        warn_of_cpu_build()
    elif paddle.device.cuda.device_count():
        logger.warn(f"--device auto: using the CPU instead of the GPU: {reason}")
    else:
        _warn_of_undetected_gpu(reason)
    return "cpu"


@functools.cache  # one warning per process
def _warn_of_undetected_gpu(reason):
    """Log a warning if this machine has a GPU, but the installed Paddle, a GPU build, does not detect any."""
    if driver.facts():
        logger.warn(driver.unsupported() or f"--device auto: using the CPU instead of the GPU: {reason}")


@functools.cache  # one warning per process
def warn_of_cpu_build() -> None:
    """Log a warning if the installed Paddle is a CPU build, but this machine has a GPU."""
    if paddle.is_compiled_with_cuda():
        return
    if gpu := driver.gpu():
        logger.warn(f"Paddle {paddle.__version__}: a CPU build, so the GPU ({gpu.name}) is not used; {driver.remedy()}")
    elif problem := driver.unsupported():
        logger.warn(problem)


def problem(index: int, several: bool = False) -> str | None:
    """Check whether Paddle can use a GPU by running one of Paddle's kernels.

    Args:
        index: Paddle's index of the GPU.
        several: whether the job has several processes, which need NCCL.
    Returns:
        description of the problem and its remedy, or None if there is no problem.
    """
    if not paddle.is_compiled_with_cuda():
        return f"Paddle {paddle.__version__} is a CPU build; use --device cpu, or {driver.remedy()}"
    if index >= (count := paddle.device.cuda.device_count()):
        problem = f"Paddle {paddle.__version__} does not detect GPU {index}"
        if not count and (cause := driver.undetected(paddle.version.cuda())):
            return f"{problem}: {cause}, or use --device cpu"
        return f"{problem}; check nvidia-smi and {driver.VISIBLE}, or use --device cpu"
    return libraries.problem(several) or _kernel_problem(index)


def _kernel_problem(index):
    paddle.enable_static()
    main, values = static.Program(), np.arange(4, dtype=np.float32)
    try:
        with static.scope_guard(static.Scope()), static.program_guard(main), paddle.utils.unique_name.guard():
            x = static.data("x", [4])
            [result] = static.Executor(paddle.CUDAPlace(index)).run(main, feed={"x": values}, fetch_list=[x + x])
        if np.array_equal(result, 2 * values):
            return None
        reason = f"{values.tolist()} + {values.tolist()} gives {result.tolist()}"
    except (RuntimeError, OSError) as e:
        reason = core(e)
    problem = f"{describe(index)} cannot run the kernels of {describe_build()} ({reason})"
    if paddle.device.cuda.get_device_capability(index) < driver.LEAST_CAPABILITY:
        return f"{problem}; use --device cpu, or {driver.OTHER_GPU}"
    command = driver.replacement('"REQUIREMENT -i INDEX"', "REQUIREMENT -i INDEX")
    return f"{problem}; install a different build with {command}, see docs/install.md"


def describe(index: int) -> str:
    capability = ".".join(map(str, paddle.device.cuda.get_device_capability(index)))
    return f"GPU {index} ({paddle.device.cuda.get_device_name(index)}, compute capability {capability})"


def memory(index: int) -> int:
    """Return the memory size of a GPU in bytes."""
    return paddle.device.cuda.get_device_properties(index).total_memory


def describe_build() -> str:
    """Return a description of the installed Paddle, such as "Paddle 2.6.2 for CUDA 11.8, which supports compute
    capability 8.0 9.0"."""
    capabilities = " ".join(build_capabilities()) or "unknown"
    build = f"Paddle {paddle.__version__} for CUDA {paddle.version.cuda()}"
    return f"{build}, which supports compute capability {capabilities}"


def build_capabilities() -> list[str]:
    """Return the compute capabilities for which the installed Paddle has kernels, such as ["8.0", "9.0"]. "9.0+" means
    that a build of Paddle 2.6 also contains PTX, which runs on newer GPUs."""
    if hasattr(paddle.version, "cuda_archs"):  # Paddle 3.0 or later
        architectures = {(int(arch), _CUBIN) for arch in paddle.version.cuda_archs()}
    else:
        architectures = _architectures(Path(paddle.__file__).parent / "libs/libphi.so")
    return _capabilities(architectures)


def _capabilities(architectures):
    """Return the sorted names of architectures, {(architecture, kind)}, such as ["8.0", "9.0+"]. "+" means PTX."""
    newest = max((arch for arch, kind in architectures if kind == _PTX), default=None)
    names = {arch: f"{arch // 10}.{arch % 10}{'+' if arch == newest else ''}" for arch, _ in architectures}
    return [names[arch] for arch in sorted(names)]


def _architectures(library, files=64):
    """Return {(architecture, kind)} for the first `files` fat binaries in a library, because a build of Paddle compiles
    all its files for the same architectures. An architecture is a number such as 90; kind is _CUBIN or _PTX."""
    architectures, position = set(), 0
    with open(library, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        while files and (position := memory.find(_FATBIN, position)) >= 0:
            version, header, size = struct.unpack_from("<HHQ", memory, position + 4)
            if (version, header) == (1, 16) and 0 < size <= len(memory) - position - 16:
                entry, end, files = position + 16, position + 16 + size, files - 1
                while entry < end:
                    kind, _, length, payload = struct.unpack_from("<HHIQ", memory, entry)
                    architectures.add((struct.unpack_from("<I", memory, entry + 28)[0], kind))
                    entry += length + payload
                position = end
            else:
                position += len(_FATBIN)
    return architectures
