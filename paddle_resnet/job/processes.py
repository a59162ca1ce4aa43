"""This process of the job: its rank, its device, and whether that can do what the flags ask for."""

import os

import paddle

from utils.errors import UsageError


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
    """This process's GPU as Paddle counts, that is within CUDA_VISIBLE_DEVICES; set by the launcher."""
    return int(os.environ.get("FLAGS_selected_gpus", "0").split(",")[0])  # noqa: SIM112  Paddle's name


def resolve_devices(args):
    """Settle --device auto and --dali-device auto, and refuse what the device cannot do.

    Raises:
        UsageError: --device gpu without a GPU that Paddle can compute on, mixed precision on a CPU, bfloat16 on an old
            GPU, a GPU loader for a CPU program, --cpu-decoder-load without a GPU loader.
    """
    from paddle_resnet import gpus

    args.device = gpus.settle(args.device, local_gpu(), world_size() > 1)
    if args.amp and args.device == "cpu":
        raise UsageError(
            f"--amp needs a GPU and this run is on the CPU, which has no {args.amp_dtype} kernels: drop --amp"
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
    if args.cpu_decoder_load and args.dali_device == "cpu":
        raise UsageError(
            f"--cpu-decoder-load {args.cpu_decoder_load} takes images off the GPU's decoders, and the CPU decodes all "
            "(--dali-device cpu): leave it out"
        )


def place(args):
    """The Paddle place that programs of this process run on."""
    return paddle.CUDAPlace(local_gpu()) if args.device == "gpu" else paddle.CPUPlace()
