"""Ask NVIDIA's driver for a GPU, without Paddle, and choose a Paddle build for it."""

import os
import shlex
from typing import NamedTuple

from paddle_resnet.utils.errors import SCRIPT, is_installed, python

LEAST_CAPABILITY = (6, 1)  # lowest compute capability for which a supported Paddle version has a build


class Gpu(NamedTuple):
    """A GPU of this machine: its name, and its compute capability as (major, minor)."""

    name: str
    capability: tuple


def gpu():
    """Return the first GPU of this machine, or None if the machine has no driver or no GPU, pynvml is not installed,
    CUDA_VISIBLE_DEVICES hides all GPUs, or the compute capability of the GPU is below LEAST_CAPABILITY."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
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
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return found if found.capability >= LEAST_CAPABILITY else None


def remedy():
    """Return the instruction, for messages, to install a Paddle build for this machine's GPU (docs/install.md)."""
    found = gpu()
    if found is None:
        return "install a GPU build of Paddle (see docs/install.md)"
    if found.capability < (9, 0):
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
