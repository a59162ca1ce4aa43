"""This process of the job: its rank, its device, and whether that can do what the flags ask for.

Paddle's launcher describes the process in environment variables. This module is imported before Paddle, whose import
ends in a traceback where one of them is wrong.
"""

import os
import re
import socket

from utils.errors import UsageError


def check_environment():
    """Check what the launcher sets; to be called before Paddle is imported.

    Raises:
        UsageError: names the variable, its value and the remedy.
    """
    count = _number("PADDLE_TRAINERS_NUM", "1", least=1)
    _number("PADDLE_TRAINER_ID", "0", most=count - 1)
    _number("PADDLE_LOCAL_SIZE", "1", least=1, most=count)
    gpus = os.environ.get("FLAGS_selected_gpus", "0")  # noqa: SIM112  Paddle's name
    if not re.fullmatch("[0-9]{1,4}(,[0-9]{1,4})*", gpus):
        raise _refusal("FLAGS_selected_gpus", f"{gpus!r} is not a list of GPU numbers such as 0 or 0,1")
    endpoints = _endpoints("PADDLE_TRAINER_ENDPOINTS", count)
    if endpoints and len(endpoints) != count:
        raise _refusal("PADDLE_TRAINER_ENDPOINTS", f"has {len(endpoints)} addresses for {count} processes")
    for host, port in _endpoints("PADDLE_MASTER", count)[:1]:
        try:
            socket.getaddrinfo(host, port)
        except (OSError, ValueError) as e:
            raise _refusal("PADDLE_MASTER", f"{f'{host}:{port}'!r} cannot be resolved ({e})") from e


def _number(name, default, least=0, most=10**6):
    value = os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,7}", value) or not least <= int(value) <= most:
        raise _refusal(name, f"{value!r} is not a number from {least} to {most}")
    return int(value)


def _endpoints(name, count):
    """[(host, port)]; [] where a job of one process does without, or Paddle's launcher put a long list into a file."""
    value = os.environ.get(name)
    if value is None and (count == 1 or "PADDLE_BACKUP_ENV_PATH" in os.environ):
        return []
    if value is None:
        raise _refusal("PADDLE_TRAINERS_NUM", f"'{count}' needs {name}, which is not set")
    endpoints = [endpoint.rpartition(":") for endpoint in value.split(",")]
    if not all(host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16 for host, _, port in endpoints):
        raise _refusal(name, f"{value!r} does not have the form host:port")
    return [(host, int(port)) for host, _, port in endpoints]


def _refusal(name, why):
    return UsageError(f"{name} {why}: start the processes with python -m paddle.distributed.launch, or unset {name}")


def rank():
    """This process's number in the job."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size():
    """Number of processes of the job."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def is_one_host():
    """Whether one launcher has started all processes of the job."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE", "1")) == world_size()


def local_gpu():
    """This process's GPU by Paddle's count, which is within CUDA_VISIBLE_DEVICES; set by the launcher."""
    return int(os.environ.get("FLAGS_selected_gpus", "0").split(",")[0])  # noqa: SIM112  Paddle's name


def resolve_device(args):
    """Resolve --device auto; changes the flags.

    Raises:
        UsageError: --device gpu without a GPU that Paddle can compute on.
    """
    from paddle_resnet import gpus

    args.device = gpus.settle(args.device, local_gpu(), world_size() > 1)


def resolve_devices(args):
    """Both steps, for tools that start from no checkpoint."""
    resolve_device(args)
    resolve_device_flags(args)


def resolve_device_flags(args):
    """Resolve --dali-device auto and, unless it is explicit or inherited, the number of channels of --image-shape, and
    refuse what the device cannot do; changes the flags.

    Raises:
        UsageError: mixed precision on a CPU, bfloat16 on an old GPU, a GPU loader for a CPU program,
            --cpu-decoder-load without a GPU loader.
    """
    import paddle

    if args.amp and args.device == "cpu":
        raise UsageError(
            f"--amp: requires a GPU, and this run is on the CPU, which has no {args.amp_dtype} kernels; use --amp false"
        )
    if args.amp and args.amp_dtype == "bfloat16":
        major, minor = paddle.device.cuda.get_device_capability(local_gpu())
        if major < 8:
            raise UsageError(
                f"--amp-dtype bfloat16 needs compute capability 8.0 and this GPU has {major}.{minor}: give "
                "--amp-dtype float16"
            )
    if args.dali_device == "gpu" and args.device == "cpu":
        raise UsageError("--dali-device gpu needs --device gpu and this run is on the CPU: give --dali-device cpu")
    if args.dali_device == "auto":
        args.dali_device = args.device
    if "image_shape" not in args.given | args.inherited:
        # Tensor cores and the custom kernels read a pixel of four values at once; elsewhere the fourth is idle work.
        args.image_shape = [4 if args.device == "gpu" and args.data_layout == "NHWC" else 3, *args.image_shape[1:]]
    if args.cpu_decoder_load and args.dali_device == "cpu":
        raise UsageError(
            f"--cpu-decoder-load {args.cpu_decoder_load} moves images from the GPU's decoders to the CPU, which "
            "decodes all of them with --dali-device cpu: leave it out"
        )


def check_resolved(args):
    """Raise UsageError if --device auto is not resolved, which program.build does."""
    if args.device == "auto":
        raise UsageError("--device auto: not resolved yet; call program.build with these flags first")


def place(args):
    """The Paddle place that programs of this process run on."""
    import paddle

    return paddle.CUDAPlace(local_gpu()) if args.device == "gpu" else paddle.CPUPlace()
