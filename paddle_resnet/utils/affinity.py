"""Bind the process to the CPU cores that are closest to its GPU."""

import os

from paddle_resnet.utils import logger


def bind_to_gpu(local_gpu: int) -> None:
    """Remove the CPU cores outside the GPU's NUMA node from the CPU affinity of this process.

    If the cores cannot be determined or removed, the affinity remains unchanged, and a warning states why. The affinity
    affects only speed.

    Args:
        local_gpu: Paddle's index of the GPU, which is its position in CUDA_VISIBLE_DEVICES.
    """
    try:
        import pynvml  # imported here, because machines without a GPU do not need this package
    except ImportError:
        logger.warn(
            "--enable-cpu-affinity: the affinity is unchanged, because nvidia-ml-py is not installed; install it"
        )
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        logger.warn(
            f"--enable-cpu-affinity: the affinity is unchanged, because NVML is not available ({e}); check nvidia-smi"
        )
        return
    try:
        handle = _device_handle(pynvml, local_gpu)
        allowed = os.sched_getaffinity(0)
        # NVML returns one mask per 64 cores. The number of masks depends on the largest core number, which in a
        # container may exceed the number of cores.
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, max(allowed) // 64 + 1)
        cores = allowed & {64 * i + bit for i, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
        if cores:
            os.sched_setaffinity(0, cores)
        else:
            logger.warn(
                f"--enable-cpu-affinity: the affinity is unchanged, because none of the allowed cores is near GPU "
                f"{local_gpu}; allow the cores that nvidia-smi topo -m lists for this GPU"
            )
    except (pynvml.NVMLError, OSError, IndexError, ValueError) as e:
        logger.warn(
            f"--enable-cpu-affinity: the affinity is unchanged, because the cores near GPU {local_gpu} cannot be "
            f"determined or used ({e}); check nvidia-smi topo -m and CUDA_VISIBLE_DEVICES"
        )
    finally:
        pynvml.nvmlShutdown()


def _device_handle(pynvml, local_gpu):
    """Return the NVML handle of a GPU. NVML ignores CUDA_VISIBLE_DEVICES, so the number or UUID of the GPU is read from
    this variable.

    Raises:
        pynvml.NVMLError: NVML does not know the GPU.
        IndexError: CUDA_VISIBLE_DEVICES has no entry for the GPU.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return pynvml.nvmlDeviceGetHandleByIndex(local_gpu)
    name = visible[local_gpu]
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
