"""Start Fleet in collective mode, with NCCL on GPUs and Gloo on CPUs."""

import os
import random
import socket

import numpy as np
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper
from paddle.distributed.fleet.utils.log_util import set_log_level

from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.machine import compat
from paddle_resnet.utils import signals
from paddle_resnet.utils.errors import RunError

# Flags of Paddle for GPUs: allow convolutions a workspace of 4 GiB, enable one-pass BN, and sum the gradients of a
# residual addition in place. Paddle reads FLAGS_max_inplace_grad_add when the backward pass is built.
GPU_FLAGS = {
    "FLAGS_conv_workspace_size_limit": 4096,
    "FLAGS_cudnn_batchnorm_spatial_persistent": True,
    "FLAGS_max_inplace_grad_add": 8,
}
# Number of gradients per fused all-reduce between hosts. Without CUDA graphs, a step with Fleet's default of 8 took
# 3.5% to 8.5% longer than with 16 or more. With 32, most of the communication overlaps with the backward pass, and few
# all-reduces remain after the backward pass. Within a host, this project uses one all-reduce per data type after the
# backward pass, because with CUDA graphs, such a step took 1.4 % less time than a step with 32. All times are for
# ResNet-50 with O2 on two H200s of one host (benchmarks/log/multi_gpu_h200.md).
_GRADIENTS_PER_ALL_REDUCE = 32
_ALL_GRADIENTS = 10**6


def connect(timeout_s: float) -> None:
    """If the job has several processes, connect them for exchange.py and start the monitor. Call connect() before Fleet
    starts, because Fleet may wait for a dead process while setting up communication.

    Args:
        timeout_s: number of seconds without progress after which the monitor ends the job.
    Raises:
        UsageError: see watchdog.start.
    """
    if processes.world_size() > 1:
        rank, world_size, master = processes.rank(), processes.world_size(), os.environ["PADDLE_MASTER"]
        watchdog.start(rank, world_size, timeout_s, master, exchange.from_rank_0)


def start(seed: int, device: str, data_layout: str, kernels: str, needs_serial_run: bool) -> None:
    """Set Paddle's flags, seed the random number generators of the host, and initialize Fleet, even for a single
    process.

    Args:
        seed, device, data_layout, kernels: values of the flags.
        needs_serial_run: whether the run captures a CUDA graph or traces steps.
    Raises:
        RunError: the port of Paddle's Gloo server is in use (with Paddle 2.6, on rank 0 of a CPU job with several
            processes).
    """
    random.seed(seed)
    np.random.seed(seed)
    if device == "gpu":
        paddle.set_flags(GPU_FLAGS)
    # In a serial run, the main thread runs all operators. A trace requires a serial run, because Paddle's profiler
    # loses events or crashes if two executor threads record their first events at the same time (Paddle's class
    # HostEventRecorder has no lock for its list of threads). A CUDA graph requires a serial run, because the capture
    # includes only the operators of one thread. On a CPU, runs with several executor threads occasionally crashed.
    paddle.set_flags({"FLAGS_new_executor_serial_run": device == "cpu" or needs_serial_run})
    set_log_level("ERROR")  # Fleet would log each strategy that is created
    strategy = fleet.DistributedStrategy()
    # On a CPU with NCHW, all-reduces are not fused, because oneDNN writes gradients to its own memory instead of to the
    # buffer of a fused all-reduce.
    strategy.fuse_all_reduce_ops = device == "gpu" or data_layout == "NHWC"
    strategy.fuse_grad_size_in_num = _ALL_GRADIENTS if reduces_at_the_end(device) else _GRADIENTS_PER_ALL_REDUCE
    build_strategy = strategy.build_strategy
    build_strategy.enable_inplace = False  # the Executor applies this pass later, to the compiled program
    if kernels == "native" or device == "cpu":
        # With custom kernels, Fleet must not fuse operators before fusion.py does. On a CPU, Fleet must not fuse BN,
        # addition and activation, because Fleet's fused operator has no CPU kernel.
        build_strategy.fuse_bn_add_act_ops = False
    strategy.build_strategy = build_strategy
    fleet.init(is_collective=True, strategy=strategy)
    if processes.world_size() > 1 and device == "cpu":
        # Fleet would add NCCL setup operators to the startup program, even on a machine without NCCL.
        CollectiveHelper._init_communicator = lambda self, *args, **kwargs: None
        compat.start_gloo(_prepare_for_gloo)


def reduces_at_the_end(device: str) -> bool:
    """Return whether gradients are all-reduced after the backward pass, once per data type and, with Paddle 2.6, on the
    CUDA stream of the computation. If the result is false, the all-reduces are part of the backward pass."""
    return device == "gpu" and processes.is_one_host()


def _prepare_for_gloo():
    """Reserve the port of Paddle's Gloo server, and ensure that processes that Paddle forks exit with this process.

    The launcher chose the port when the job started. If another program has taken the port since then, this function
    raises an error, whereas Paddle would wait indefinitely.

    Returns:
        on rank 0, a socket that is bound to the port but does not listen. Paddle's server can then also bind to the
        port, but no other program can.
    Raises:
        RunError: the port is in use.
    """
    parent = os.getpid()

    def remember_parent():
        nonlocal parent
        parent = os.getpid()

    os.register_at_fork(before=remember_parent, after_in_child=lambda: signals.die_with_parent(parent))
    if processes.rank() == 0:
        return _reserve(int(os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[2]))


def _reserve(port):
    reserved = socket.socket()
    # This socket and that of Paddle's server, which also sets SO_REUSEADDR, need the option to bind to the same port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", port))
    except OSError as e:
        raise RunError(f"PADDLE_TRAINER_ENDPOINTS: port {port} is in use ({e.strerror}); start the job again") from e
    return reserved
