"""Whether the installed Paddle can compute on this machine's GPU. train.py and doctor.py say the same words."""

import mmap
import struct
from pathlib import Path

import numpy as np
import paddle
from paddle import static

from paddle_resnet import libraries
from utils import logger
from utils.errors import UsageError, core

INSTALL = 'make venv PADDLE="REQUIREMENT -i INDEX" installs another build, see docs/install.md'
_FATBIN = b"\x50\xed\x55\xba"  # begins each file of GPU code inside a library
_CUBIN, _PTX = 2, 1


def settle(device, index, several):
    """Settle --device auto, and refuse --device gpu where Paddle cannot compute on the GPU.

    Args:
        device: "auto", "gpu" or "cpu".
        index: the GPU as Paddle counts.
        several: the job has several processes.
    Returns:
        "gpu" or "cpu".
    Raises:
        UsageError: --device gpu, and problem() has found one.
    """
    if device == "cpu":
        return "cpu"
    found = problem(index, several)
    if found is None:
        return "gpu"
    if device == "gpu":
        raise UsageError(f"--device gpu: {found}")
    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        logger.warn(f"--device auto: this run is on the CPU: {found}")
    return "cpu"


def problem(index, several=False):
    """What keeps Paddle from computing on a GPU; it tries one of Paddle's own kernels.

    Args:
        index: the GPU as Paddle counts.
        several: the job has several GPUs.
    Returns:
        a sentence with the remedy, or None.
    """
    if not paddle.is_compiled_with_cuda():
        return f"Paddle {paddle.__version__} is a CPU build: install a GPU build, or give --device cpu; {INSTALL}"
    if index >= paddle.device.cuda.device_count():
        return f"Paddle {paddle.__version__} sees no GPU {index}: see nvidia-smi, or give --device cpu"
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
    return f"{describe(index)} cannot run the kernels of {describe_build()} ({reason}): {INSTALL}"


def describe(index):
    capability = ".".join(map(str, paddle.device.cuda.get_device_capability(index)))
    return f"GPU {index} ({paddle.device.cuda.get_device_name(index)}, compute capability {capability})"


def describe_build():
    """Such as "Paddle 2.6.2 for CUDA 11.8, compute capability 6.1 to 8.6"."""
    capabilities = " ".join(build_capabilities()) or "unknown"
    return f"Paddle {paddle.__version__} for CUDA {paddle.version.cuda()}, which has compute capability {capabilities}"


def build_capabilities():
    """Compute capabilities that the installed Paddle has kernels for, such as ["8.0", "9.0"]; "9.0+" also serves newer
    ones (PTX)."""
    if hasattr(paddle.version, "cuda_archs"):  # since Paddle 3.0
        found = {(int(arch), _CUBIN) for arch in paddle.version.cuda_archs()}
    else:
        found = _architectures(Path(paddle.__file__).parent / "libs/libphi.so")
    newest = max((arch for arch, kind in found if kind == _PTX), default=None)
    names = {arch: f"{arch // 10}.{arch % 10}{'+' if arch == newest else ''}" for arch, _ in found}
    return [names[arch] for arch in sorted(names)]


def _architectures(library, files=64):
    """{(architecture, kind)} of the first files of GPU code in a library; all files of a build have the same."""
    found, position = set(), 0
    with open(library, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        while files and (position := memory.find(_FATBIN, position)) >= 0:
            version, header, size = struct.unpack_from("<HHQ", memory, position + 4)
            if (version, header) == (1, 16) and 0 < size <= len(memory) - position - 16:
                entry, end, files = position + 16, position + 16 + size, files - 1
                while entry < end:
                    kind, _, length, payload = struct.unpack_from("<HHIQ", memory, entry)
                    found.add((struct.unpack_from("<I", memory, entry + 28)[0], kind))
                    entry += length + payload
                position = end
            else:
                position += len(_FATBIN)
    return found
