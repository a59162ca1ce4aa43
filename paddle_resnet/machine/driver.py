"""Query NVIDIA's driver for GPUs, without Paddle, and suggest a build of Paddle for the first GPU."""

import os
import shlex
from typing import NamedTuple

from paddle_resnet.utils.errors import SCRIPT, is_installed, python

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_CAPABILITY = (6, 1)  # lowest compute capability for which a supported Paddle version has a build

OTHER_GPU = f"use a GPU with compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or higher"


class Gpu(NamedTuple):
    """A GPU of this machine: its name, and its compute capability as (major, minor)."""

    name: str
    capability: tuple[int, int]


class Facts(NamedTuple):
    """The GPUs and the CUDA version that NVIDIA's driver reports.

    Attributes:
        gpu: first GPU.
        count: number of GPUs.
        cuda: newest CUDA version that the driver supports, as (major, minor).
    """

    gpu: Gpu
    count: int
    cuda: tuple[int, int]


def facts() -> Facts | None:
    """Return Facts, or None if the machine has no driver or no GPU, pynvml is not installed, or CUDA_VISIBLE_DEVICES is
    empty or -1, by which users turn GPUs off."""
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found = Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        version = pynvml.nvmlSystemGetCudaDriverVersion()  # such as 12040 for CUDA 12.4
        return Facts(found, pynvml.nvmlDeviceGetCount(), (version // 1000, version % 1000 // 10))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def gpu() -> Gpu | None:
    """Return the first GPU of this machine. Return None if `facts` returns None, or if the compute capability of the
    GPU is below LEAST_CAPABILITY."""
    known = facts()
    return known.gpu if known and known.gpu.capability >= LEAST_CAPABILITY else None


def unsupported() -> str | None:
    """Return a message with the problem and its remedy if no supported version of Paddle has a build for the first GPU
    of this machine. Return None if there is such a build, or if `facts` returns None."""
    known = facts()
    if known is None or known.gpu.capability >= LEAST_CAPABILITY:
        return None
    capability = ".".join(map(str, known.gpu.capability))
    return (
        f"GPU ({known.gpu.name}): not used, because no supported build of Paddle has kernels for compute capability "
        f"{capability}; {OTHER_GPU}"
    )


def undetected(cuda: str) -> str | None:
    """Return why Paddle detects no GPU although the driver reports one, and the remedy.

    Args:
        cuda: CUDA version of the installed Paddle, such as "11.8".
    Returns:
        "REASON; REMEDY", or None if `facts` returns None.
    """
    known, visible = facts(), os.environ.get(VISIBLE)
    if known is None:
        return None
    supported = ".".join(map(str, known.cuda))
    if known.cuda[0] < int(cuda.split(".")[0]):
        return (
            f"the driver supports CUDA up to {supported}, but this build needs {cuda}; update the driver, or install a "
            "build for an older CUDA version (see docs/install.md)"
        )
    first = (visible or "0").split(",")[0].strip()
    if not first.startswith(("GPU-", "MIG-")) and not (first.isdecimal() and int(first) < known.count):
        numbers = "0" if known.count == 1 else f"0 to {known.count - 1}"
        return f"{VISIBLE}={visible} hides all GPUs; unset it, or use numbers of GPUs ({numbers})"
    return f"the reason is unknown; check nvidia-smi and {VISIBLE}"


def remedy() -> str:
    """Return the remedy, for messages, if the installed Paddle cannot use this machine's GPU: install a build for the
    GPU (docs/install.md) or, if there is no such build, use a different GPU."""
    if unsupported():
        return OTHER_GPU
    found = gpu()
    if found is None:
        return "install a GPU build of Paddle (see docs/install.md)"
    return installation(found.capability)


def installation(capability: tuple[int, int]) -> str:
    """Return the remedy, for messages, that installs a build of Paddle for a GPU with this compute capability, which
    must not be below LEAST_CAPABILITY."""
    if capability < (9, 0):
        return f"install a GPU build with {replacement('2.6.2', shlex.quote(f'{SCRIPT}[gpu]'))}"
    command = replacement('"3.3.1 -i URL"', "paddlepaddle-gpu==3.3.1 -i URL")
    return f"install a GPU build with {command} (docs/install.md explains how to find URL)"


def replacement(value: str, arguments: str) -> str:
    """Return the command that replaces Paddle: in a checkout, `make venv` with this value of PADDLE, otherwise `pip
    uninstall` and `pip install` with these arguments, which must be quoted for a shell."""
    if not is_installed():
        return f"make venv PADDLE={value}"
    pip = f"{python()} -m pip"
    return f"{pip} uninstall -y paddlepaddle paddlepaddle-gpu && {pip} install {arguments}"
