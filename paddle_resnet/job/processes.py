"""The rank, the device and the environment variables of this process.

Paddle's launcher sets environment variables that describe the process. This module is imported before Paddle, because
importing Paddle prints a traceback if a variable is invalid.
"""

import os
import re
import socket
from typing import TYPE_CHECKING

from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    import paddle

# Process ID of the launcher, read before Paddle is imported, because the launcher may be killed during the import.
LAUNCHER = os.getppid()


def check_environment() -> None:
    """Check the environment variables that the launcher sets. Call this function before Paddle is imported.

    Raises:
        UsageError: a variable is missing or has an invalid value, or the host of PADDLE_MASTER cannot be resolved.
    """
    count = _number("PADDLE_TRAINERS_NUM", "1", least=1)
    _number("PADDLE_TRAINER_ID", "0", most=count - 1)
    _number("PADDLE_LOCAL_SIZE", "1", least=1, most=count)
    gpus = os.environ.get("FLAGS_selected_gpus", "0")  # noqa: SIM112  Paddle's name
    if not re.fullmatch("[0-9]{1,4}(,[0-9]{1,4})*", gpus):
        raise _error("FLAGS_selected_gpus", gpus, "not a list of GPU numbers such as 0 or 0,1")
    endpoints = _endpoints("PADDLE_TRAINER_ENDPOINTS", count)
    if endpoints and len(endpoints) != count:
        problem = f"{len(endpoints)} addresses for {count} processes"
        raise _error("PADDLE_TRAINER_ENDPOINTS", os.environ["PADDLE_TRAINER_ENDPOINTS"], problem)
    for host, port in _endpoints("PADDLE_MASTER", count)[:1]:
        try:
            socket.getaddrinfo(host, port)
        except (OSError, ValueError) as e:
            remedy = "set the launcher's --host on rank 0's machine to its IP address, or unset PADDLE_MASTER"
            problem = f"cannot be resolved ({e}); {remedy} for a single process"
            raise UsageError(f"PADDLE_MASTER '{host}:{port}': {problem}") from e


def _number(name: str, default: str, least: int = 0, most: int = 10**6) -> int:
    value = os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,7}", value) or not least <= int(value) <= most:
        raise _error(name, value, f"not a number from {least} to {most}")
    return int(value)


def _endpoints(name, count):
    """Parse an environment variable into [(host, port)]. Return [] if the variable is neither set nor needed, because
    the job has a single process or the launcher uses a file instead. Raise UsageError if the variable is missing or
    invalid."""
    value = os.environ.get(name)
    if value is None and (count == 1 or "PADDLE_BACKUP_ENV_PATH" in os.environ):
        return []
    if value is None:
        raise _error("PADDLE_TRAINERS_NUM", str(count), f"requires {name}, which is not set")
    endpoints = [endpoint.rpartition(":") for endpoint in value.split(",")]
    if not all(host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16 for host, _, port in endpoints):
        raise _error(name, value, "not of the form host:port")
    return [(host, int(port)) for host, _, port in endpoints]


def _error(name, value, problem):
    remedy = f"start the processes with python -m paddle.distributed.launch, or unset {name}"
    return UsageError(f"{name} {value!r}: {problem}; {remedy}")


def rank() -> int:
    """Return the rank of this process in the job."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size() -> int:
    """Return the number of processes in the job."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def local_size() -> int:
    """Return the number of processes that the launcher of this process has started."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))


def is_one_host() -> bool:
    """Return whether a single launcher has started all processes of the job."""
    return local_size() == world_size()


def cores() -> int:
    """Return the number of CPU cores that this process may use, divided by the number of processes of its launcher, but
    at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_size())


def local_gpu() -> int:
    """Return the index in CUDA_VISIBLE_DEVICES of the GPU that the launcher has assigned to this process."""
    return int(os.environ.get("FLAGS_selected_gpus", "0").split(",")[0])  # noqa: SIM112  Paddle's name


def check_resolved(device: str) -> None:
    """Raise UsageError if --device is still auto: the caller must use the settings that program.start returns."""
    if device == "auto":
        raise UsageError("--device auto: not resolved yet; use the settings that program.start returns")


def place(device: str) -> "paddle.CPUPlace | paddle.CUDAPlace":
    """Return the Paddle place on which programs of this process run; `device` is "cpu" or "gpu". Raise UsageError if
    `device` is "auto"."""
    import paddle

    check_resolved(device)
    return paddle.CUDAPlace(local_gpu()) if device == "gpu" else paddle.CPUPlace()
