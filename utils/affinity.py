"""Bind the process to the CPU cores next to its GPU."""

import os

from utils import logger


def bind_to_gpu(local_gpu):
    """Restrict this process to those of its allowed cores that are local to its GPU's NUMA node.

    Args:
        local_gpu: GPU index as Paddle counts, that is within CUDA_VISIBLE_DEVICES.

    If NVML or the operating system does not report them, a warning states the reason and the affinity is unchanged: it
    affects only speed.
    """
    try:
        import pynvml  # in requirements.txt; a machine without a GPU does not need it
    except ImportError:
        logger.warn("--enable-cpu-affinity: nvidia-ml-py is not installed, so the affinity is unchanged; install it")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        logger.warn(f"--enable-cpu-affinity: NVML is not available ({e}), so the affinity is unchanged")
        return
    try:
        handle = _device_handle(pynvml, local_gpu)
        allowed = os.sched_getaffinity(0)
        # Words of 64 cores up to the highest allowed core: in a container its number may exceed the count of cores.
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, max(allowed) // 64 + 1)
        cores = allowed & {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
        if cores:
            os.sched_setaffinity(0, cores)
        else:
            logger.warn(f"--enable-cpu-affinity: none of this process's cores is local to GPU {local_gpu}")
    except (pynvml.NVMLError, OSError, IndexError, ValueError) as e:
        logger.warn(f"--enable-cpu-affinity: GPU {local_gpu} has no core list ({e}), so the affinity is unchanged")
    finally:
        pynvml.nvmlShutdown()


def _device_handle(pynvml, local_gpu):
    """The NVML handle: NVML counts all GPUs of the machine, CUDA_VISIBLE_DEVICES selects some by number or UUID."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return pynvml.nvmlDeviceGetHandleByIndex(local_gpu)
    name = visible[local_gpu]
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
