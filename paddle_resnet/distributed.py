"""Processes of the job: Fleet's start-up, places, ranks, and host numbers exchanged between ranks.

Gradients are Fleet's business (NCCL, or Gloo on CPUs). The few numbers that the hosts exchange, such as the sums
of an evaluation, go through the launcher's TCP store: exact, the same bytes on every rank, no device involved.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import signal
import socket
import stat

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper
from paddle.distributed.fleet.utils.log_util import set_log_level

from paddle_resnet import watchdog
from utils import signals
from utils.errors import RunError, UsageError

# Paddle's defaults are made for small memory. Here: workspace for every convolution algorithm (MB), one-pass BN,
# and gradients that meet at a residual addition summed in place, which the backward pass is built for.
GPU_FLAGS = {
    "FLAGS_conv_workspace_size_limit": 4096,
    "FLAGS_cudnn_batchnorm_spatial_persistent": True,
    "FLAGS_max_inplace_grad_add": 8,
}

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NCCL_OPERATORS = ("c_sync_comm_stream", "c_sync_calc_stream", "c_comm_init", "c_gen_nccl_id")
_STOP_POLL_STEPS = 4
# With Fleet's 8, a step of two H200s was 3 to 8 % longer than with 16 and more, which differed by noise. With 32, most
# of the bytes travel beside the backward pass, and few all-reduces are left for the end. Within a host even that costs
# more than it hides: measured for ResNet-50 with O2 on two H200s (benchmarks/multi_gpu_h200_2026-11-22.md).
_GRADIENTS_AN_ALL_REDUCE = 32
_ALL_GRADIENTS = 10**6
_exchanges = _polls = 0
_stop_at, _has_proposed, _last_gather = None, False, None


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
        UsageError: --device gpu without a GPU, mixed precision on a CPU, bfloat16 on an old GPU, a GPU loader for a
            CPU program, --cpu-decoder-load without a GPU loader.
    """
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if args.device == "gpu" and not has_gpu:
        why = "sees no GPU" if paddle.is_compiled_with_cuda() else "is a CPU build"
        raise UsageError(f"--device gpu: Paddle {paddle.__version__} {why}: give --device cpu, or install a GPU build")
    if args.device == "auto":
        args.device = "gpu" if has_gpu else "cpu"
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
    if world_size() > 1:
        # Before Fleet, whose set-up of the communication may wait for a process that is gone.
        host = os.environ["PADDLE_MASTER"].rpartition(":")[0]
        watchdog.start(rank(), world_size(), host, from_rank_0, args.comm_timeout_s)
    set_log_level("ERROR")  # before the strategy, which reports its own creation
    strategy = fleet.DistributedStrategy()
    # oneDNN, which convolves in NCHW on a CPU, writes gradients into memory of its own, not into a fused all-reduce's.
    strategy.fuse_all_reduce_ops = args.device == "gpu" or args.data_layout == "NHWC"
    strategy.fuse_grad_size_in_num = _ALL_GRADIENTS if _reduces_at_the_end(args) else _GRADIENTS_AN_ALL_REDUCE
    if args.kernels == "native":
        build_strategy = strategy.build_strategy
        build_strategy.fuse_bn_add_act_ops = False  # Fleet's default, which would leave nothing to fusion.py
        strategy.build_strategy = build_strategy
    fleet.init(is_collective=True, strategy=strategy)
    if world_size() > 1 and args.device == "cpu":
        # Fleet writes NCCL's set-up into the start-up program even where there is no NCCL.
        CollectiveHelper._init_communicator = lambda self, *args, **kwargs: None
        _prepare_for_gloo()
        paddle.distributed.init_parallel_env()


def _prepare_for_gloo():
    """Paddle starts processes that would outlive this one if it were killed, one of them a server on a port that the
    launcher has chosen a while ago; it would wait for that for ever if another program had taken the port since."""
    prctl, parent = ctypes.CDLL(None).prctl, None

    def remember_parent():
        nonlocal parent
        parent = os.getpid()

    def die_with_parent():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # killed before the call
            os.kill(os.getpid(), signal.SIGKILL)

    os.register_at_fork(before=remember_parent, after_in_child=die_with_parent)
    if rank() == 0:
        port = int(os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[2])
        try:
            socket.create_server(("", port)).close()
        except OSError as e:
            raise RunError(f"port {port}, which the launcher has chosen, is taken ({e.strerror}): start again") from e


def adapt_communication(args, main_prog, startup_prog):
    """Mend what Fleet has written into the programs of a job of several processes."""
    if world_size() == 1:
        return
    _order_fused_all_reduces(main_prog.global_block())
    if _reduces_at_the_end(args):
        for op in main_prog.global_block().ops:
            if op.type == "c_allreduce_sum":
                op._set_attr("use_calc_stream", True)
    if args.device == "cpu":
        for program in (main_prog, startup_prog):
            _leave_out_nccl(program.global_block())


def _reduces_at_the_end(args):
    """Whether all gradients of a type travel together after the backward pass, on the computation's own stream, instead
    of in buckets beside it."""
    return args.device == "gpu" and is_one_host()


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


def count_gradient_all_reduces(train_prog):
    """How many all-reduces a training step makes for its gradients, after they were fused."""
    backward = int(paddle.base.core.op_proto_and_checker_maker.OpRole.Backward)
    ops = train_prog.global_block().ops
    return sum(op.type == "c_allreduce_sum" and bool(op.attr("op_role") & backward) for op in ops)


def build_bn_average(train_prog):
    """A program that replaces the BN statistics of a training program by their mean over the processes.

    Each process follows the statistics of its own images. Run before an evaluation or a checkpoint, this lets all
    of them score with the same network, the one that is saved.
    """
    average_prog = static.Program()
    block = average_prog.global_block()
    with static.program_guard(average_prog):
        for name in bn_statistics(train_prog):
            source = train_prog.global_block().var(name)
            value = block.create_var(name=name, shape=source.shape, dtype=source.dtype, persistable=True)
            paddle.distributed.all_reduce(value)
            paddle.assign(paddle.scale(value, 1 / world_size()), output=value)
    return average_prog


def bn_statistics(train_prog):
    """Names of the running means and variances of a training program."""
    ops = [op for op in train_prog.global_block().ops if "MeanOut" in op.output_names]
    return [name for op in ops for name in (*op.output("MeanOut"), *op.output("VarianceOut"))]


def all_gather(values):
    """Exchange host numbers.

    Args:
        values: sequence of k numbers.
    Returns:
        float64 array [world_size, k], row r from rank r, the same on every rank.
    """
    values = np.asarray(values, dtype=np.float64)
    if world_size() == 1:
        return values[None]
    key = _next_exchange()
    _store().set(f"{key}/{rank()}", values.tobytes().hex())
    rows = [_get(f"{key}/{r}") for r in range(world_size())]
    return np.stack([np.frombuffer(row, dtype=np.float64) for row in rows])


def gather(data):
    """Collect bytes of every rank on rank 0.

    The store gives no memory back, not even of a value that is written over by a shorter one. So a rank's bytes are
    always under the same key, which it writes again once rank 0 has taken what was there.

    Returns:
        [bytes of each rank] on rank 0, None elsewhere.
    """
    global _last_gather
    if world_size() == 1:
        return [data]
    previous, _last_gather = _last_gather, _next_exchange()
    if rank() != 0:
        if previous is not None:
            _get(f"{previous}/taken")
        _store().set(f"paddle_resnet/gathered/{rank()}", data.hex())
        _store().set(f"{_last_gather}/{rank()}", "")
        return None
    everyone = [data]
    for r in range(1, world_size()):
        _get(f"{_last_gather}/{r}")
        everyone.append(_get(f"paddle_resnet/gathered/{r}"))
    _store().set(f"{_last_gather}/taken", "")
    return everyone


def from_rank_0(function):
    """Call a function on rank 0 alone, for instance one that looks at files.

    Args:
        function: without arguments; returns plain data, such as JSON holds.
    Returns:
        its result, on every rank.
    Raises:
        UsageError: on every rank, if it raised one.
    """
    if world_size() == 1:
        return function()
    key = _next_exchange()
    if rank() == 0:
        try:
            answer = {"result": function()}
        except UsageError as e:
            answer = {"error": str(e)}
        _store().set(key, json.dumps(answer).encode().hex())
    answer = json.loads(_get(key))
    if "error" in answer:
        if rank() != 0:
            watchdog.stop()  # no failure of its own to tell of
        raise UsageError(answer["error"])
    return answer["result"]


@contextlib.contextmanager
def leaving_together():
    """Let no process of the job end before all have done what is inside, or have been stopped in it; rank 0 last, whose
    store the others still talk to. An error ends the whole job: the other processes get word of it."""
    try:
        yield
    except signals.Preempted:
        _wait_for_all()
        raise
    except BaseException as e:
        watchdog.announce(e)
        raise
    _wait_for_all()


def _wait_for_all():
    if world_size() == 1:
        return
    watchdog.phase("the end")
    all_gather([0])
    key = _next_exchange()
    if rank() != 0:
        watchdog.stop()  # before rank 0 may leave
        _store().set(f"{key}/{rank()}", "00")
    else:
        for r in range(1, world_size()):
            _get(f"{key}/{r}")
        watchdog.stop()


def stop_agreed():
    """Whether all ranks stop now, before the training step that each of them is about to run; each asks once a step.

    A rank that has been asked to stop publishes a step a little ahead, and every _STOP_POLL_STEPS steps each looks into
    the store. No rank is more than three steps ahead of another: before step n it has read the metrics of step n-2,
    which come after the all-reduces of step n-3. So all have seen the published step before they get there, and none
    waits for another.
    """
    global _polls
    _polls += 1
    if world_size() == 1:
        return signals.received() is not None
    if _polls % _STOP_POLL_STEPS:
        return False
    stop_at = _stop_step(_polls + 2 * _STOP_POLL_STEPS)
    return stop_at is not None and _polls >= stop_at


def stop_asked():
    """Whether any rank has been asked to stop, for what each rank does at its own pace: they have to agree afterwards
    on what they saw."""
    if world_size() == 1:
        return signals.received() is not None
    return _stop_step(0) is not None


def _stop_step(proposal):
    """The count of polls at which the job stops; None if nobody has been asked to. The first proposal wins."""
    global _stop_at, _has_proposed
    if _stop_at is None:
        store = _store()
        if signals.received() is not None and not _has_proposed:
            _has_proposed = True
            if store.add("paddle_resnet/stop/proposals", 1) == 1:
                store.set("paddle_resnet/stop/at", str(proposal))
        if store.add("paddle_resnet/stop/proposals", 0) > 0:
            _stop_at = int(store.get("paddle_resnet/stop/at"))
    return _stop_at


@functools.cache
def _store():
    """The launcher's TCP store.

    Paddle's client writes a request in pieces and leaves Nagle's algorithm on, so that each request would wait 44 ms
    for a delayed acknowledgement; its connection is found by the port that it leads to.
    """
    store = paddle.base.core.create_or_get_global_tcp_store()
    port = int(os.environ["PADDLE_MASTER"].rpartition(":")[2])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.getpeername()[1] == port:
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return store


def _next_exchange():
    """A key for the next exchange, the same on every rank because all of them take part in all exchanges."""
    global _exchanges
    _exchanges += 1
    return f"paddle_resnet/{_exchanges}"


def _get(key):
    """Wait for a key and read its bytes. The store holds text: hexadecimal, so that no bit is lost."""
    return bytes.fromhex(_store().get(key).decode())
