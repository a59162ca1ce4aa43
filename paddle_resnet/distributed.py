"""Processes of the job: Fleet's start-up, places, ranks, and host numbers exchanged between ranks.

Gradients are Fleet's business (NCCL, or Gloo on CPUs). The few numbers that the hosts exchange, such as the sums
of an evaluation, go through the launcher's TCP store: exact, the same bytes on every rank, no device involved.
"""

import os

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper
from paddle.distributed.fleet.utils.log_util import set_log_level

from utils.errors import UsageError

# Paddle's defaults are made for small memory. Here: workspace for every convolution algorithm (MB), one-pass BN,
# and gradients that meet at a residual addition summed in place, which the backward pass is built for.
GPU_FLAGS = {
    "FLAGS_conv_workspace_size_limit": 4096,
    "FLAGS_cudnn_batchnorm_spatial_persistent": True,
    "FLAGS_max_inplace_grad_add": 8,
}

_NCCL_OPERATORS = ("c_sync_comm_stream", "c_sync_calc_stream", "c_comm_init", "c_gen_nccl_id")
_exchanges = 0


def rank():
    """This process's number in the job."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size():
    """Number of processes of the job."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def local_gpu():
    """This process's GPU as Paddle counts, that is within CUDA_VISIBLE_DEVICES; set by the launcher."""
    return int(os.environ.get("FLAGS_selected_gpus", "0").split(",")[0])  # noqa: SIM112  Paddle's name


def resolve_devices(args):
    """Settle --device auto and --dali-device auto, and refuse what the device cannot do.

    Raises:
        UsageError: --device gpu without a GPU, mixed precision on a CPU, a GPU loader for a CPU program.
    """
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if args.device == "gpu" and not has_gpu:
        why = "sees no GPU" if paddle.is_compiled_with_cuda() else "is a CPU build"
        raise UsageError(f"--device gpu: Paddle {paddle.__version__} {why}: give --device cpu, or install a GPU build")
    if args.device == "auto":
        args.device = "gpu" if has_gpu else "cpu"
    if args.amp and args.device == "cpu":
        raise UsageError("--amp needs a GPU and this run is on the CPU, which has no float16 kernels: drop --amp")
    if args.dali_device == "gpu" and args.device == "cpu":
        raise UsageError("--dali-device gpu needs --device gpu and this run is on the CPU: give --dali-device cpu")
    if args.dali_device == "auto":
        args.dali_device = args.device


def place(args):
    """The Paddle place that programs of this process run on."""
    return paddle.CUDAPlace(local_gpu()) if args.device == "gpu" else paddle.CPUPlace()


def start(args):
    """Initialise Fleet for collective training, in a job of one process, too, and set Paddle's flags; to be called
    before a program is built.
    """
    if args.device == "gpu":
        paddle.set_flags(GPU_FLAGS)
    set_log_level("ERROR")  # before the strategy, which reports its own creation
    strategy = fleet.DistributedStrategy()
    # oneDNN writes a convolution's gradient into memory of its own, not into the buffer of a fused all-reduce.
    strategy.fuse_all_reduce_ops = args.device == "gpu"
    fleet.init(is_collective=True, strategy=strategy)
    if world_size() > 1 and args.device == "cpu":
        # Fleet writes NCCL's set-up into the start-up program even where there is no NCCL.
        CollectiveHelper._init_communicator = lambda self, *args, **kwargs: None
        paddle.distributed.init_parallel_env()


def adapt_communication(args, main_prog, startup_prog):
    """Mend what Fleet has written into the programs of a job of several processes."""
    if world_size() == 1:
        return
    if args.device == "gpu":
        _order_fused_all_reduces(main_prog.global_block())
    else:
        for program in (main_prog, startup_prog):
            _leave_out_nccl(program.global_block())


def _order_fused_all_reduces(block):
    """Let every fused all-reduce wait for all gradients in its buffer.

    It reads the buffer by the buffer's own name, so that the Executor sees no dependency on operators that write a
    gradient inside. It guesses them, and misses the BN gradients once BN and ReLU are fused under AMP: those
    stay each process's own, and the processes drift apart.
    """
    gradients = {op.output("FusedOutput")[0]: op.output("Output") for op in block.ops if op.type == "coalesce_tensor"}
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        if op.type == "c_allreduce_sum" and op.input("X")[0] in gradients:
            buffer = op.input("X")[0]
            block._insert_op_without_sync(
                i,
                type="depend",
                inputs={"X": block.var(buffer), "Dep": [block.var(name) for name in gradients[buffer]]},
                outputs={"Out": block.var(buffer)},
                attrs={"op_role": op.attr("op_role")},
            )
    block._sync_with_cpp()


def _leave_out_nccl(block):
    """Remove what only NCCL needs, so that the all-reduces run on CPUs over Gloo."""
    for i in reversed(range(len(block.ops))):
        if block.ops[i].type in _NCCL_OPERATORS:
            block._remove_op(i)
    block._sync_with_cpp()


def build_bn_average(train_prog):
    """A program that replaces the BN statistics of a training program by their mean over the processes.

    Each process follows the statistics of its own images. Run before an evaluation or a checkpoint, this lets all
    of them score with the same network, the one that is saved.
    """
    average_prog = static.Program()
    block = average_prog.global_block()
    with static.program_guard(average_prog):
        for op in train_prog.global_block().ops:
            if op.type in ("batch_norm", "fused_bn_add_activation"):
                for name in (*op.output("MeanOut"), *op.output("VarianceOut")):
                    source = train_prog.global_block().var(name)
                    value = block.create_var(name=name, shape=source.shape, dtype=source.dtype, persistable=True)
                    paddle.distributed.all_reduce(value)
                    paddle.assign(paddle.scale(value, 1 / world_size()), output=value)
    return average_prog


def all_gather(values):
    """Exchange host numbers.

    Args:
        values: sequence of k numbers.
    Returns:
        float64 array [world_size, k], row r from rank r, the same on every rank.
    """
    global _exchanges
    values = np.asarray(values, dtype=np.float64)
    if world_size() == 1:
        return values[None]
    store = paddle.base.core.create_or_get_global_tcp_store()
    _exchanges += 1
    # The store holds text: hexadecimal, so that no bit is lost.
    store.set(f"paddle_resnet/{_exchanges}/{rank()}", values.tobytes().hex())
    rows = [bytes.fromhex(store.get(f"paddle_resnet/{_exchanges}/{r}").decode()) for r in range(world_size())]
    return np.stack([np.frombuffer(row, dtype=np.float64) for row in rows])
