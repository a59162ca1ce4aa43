"""The start of a job: Fleet in collective mode, over NCCL on GPUs and Gloo on CPUs."""

import os
import random
import socket

import numpy as np
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper
from paddle.distributed.fleet.utils.log_util import set_log_level

from paddle_resnet import compat
from paddle_resnet.job import exchange, processes, watchdog
from utils import signals
from utils.errors import RunError

# Paddle's defaults are made for small memory. Here: workspace for every convolution algorithm (MB), one-pass BN,
# and gradients that meet at a residual addition summed in place, which the backward pass is built for.
GPU_FLAGS = {
    "FLAGS_conv_workspace_size_limit": 4096,
    "FLAGS_cudnn_batchnorm_spatial_persistent": True,
    "FLAGS_max_inplace_grad_add": 8,
}
# With Fleet's 8, a step of two H200s was 3 to 8 % longer than with 16 and more, which differed by noise. With 32, most
# of the bytes travel beside the backward pass, and few all-reduces are left for the end. Within a host even that costs
# more than it hides: measured for ResNet-50 with O2 on two H200s (benchmarks/multi_gpu_h200_2026-11-22.md).
_GRADIENTS_AN_ALL_REDUCE = 32
_ALL_GRADIENTS = 10**6


def start(args):
    """Initialise Fleet for collective training, in a job of one process, too, set Paddle's flags and seed the host's
    random generators; to be called before a program is built. From then on the processes of a job watch each other.
    """
    random.seed(args.seed)
    np.random.seed(args.seed)
    if args.device == "gpu":
        paddle.set_flags(GPU_FLAGS)
    # Paddle's profiler loses events, or crashes, where two of the executor's threads record their first ones at the
    # same time (HostEventRecorder's list of threads has no lock). This lets the main thread run all operators. On a CPU
    # it always does: two of those threads have crashed at once there, once in many runs, and they gain no speed. A CUDA
    # graph records what one thread does.
    is_serial = args.device == "cpu" or args.profile_steps is not None or args.cuda_graph
    paddle.set_flags({"FLAGS_new_executor_serial_run": is_serial})
    if processes.world_size() > 1:
        # Before Fleet, whose set-up of the communication may wait for a process that is gone.
        host = os.environ["PADDLE_MASTER"].rpartition(":")[0]
        watchdog.start(processes.rank(), processes.world_size(), host, exchange.from_rank_0, args.comm_timeout_s)
    set_log_level("ERROR")  # before the strategy, which reports its own creation
    strategy = fleet.DistributedStrategy()
    # oneDNN, which convolves in NCHW on a CPU, writes gradients into memory of its own, not into a fused all-reduce's.
    strategy.fuse_all_reduce_ops = args.device == "gpu" or args.data_layout == "NHWC"
    strategy.fuse_grad_size_in_num = _ALL_GRADIENTS if reduces_at_the_end(args) else _GRADIENTS_AN_ALL_REDUCE
    if args.kernels == "native":
        build_strategy = strategy.build_strategy
        build_strategy.fuse_bn_add_act_ops = False  # Fleet's default, which would leave nothing to fusion.py
        strategy.build_strategy = build_strategy
    fleet.init(is_collective=True, strategy=strategy)
    if processes.world_size() > 1 and args.device == "cpu":
        # Fleet writes NCCL's set-up into the start-up program even where there is no NCCL.
        CollectiveHelper._init_communicator = lambda self, *args, **kwargs: None
        compat.start_gloo(_prepare_for_gloo)


def reduces_at_the_end(args):
    """Whether all gradients of a type travel together after the backward pass, on the computation's own stream, instead
    of in buckets beside it."""
    return args.device == "gpu" and processes.is_one_host()


def _prepare_for_gloo():
    """Paddle starts processes that would outlive this one if it were killed, one of them a server on a port that the
    launcher has chosen a while ago; it would wait for that for ever if another program had taken the port since."""
    parent = None

    def remember_parent():
        nonlocal parent
        parent = os.getpid()

    os.register_at_fork(before=remember_parent, after_in_child=lambda: signals.die_with_parent(parent))
    if processes.rank() == 0:
        port = int(os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[2])
        try:
            socket.create_server(("", port)).close()
        except OSError as e:
            raise RunError(f"port {port}, which the launcher has chosen, is taken ({e.strerror}): start again") from e
