"""train.py with the tiny network, as a process of its own or as a worker of a job.

$PARAMETERS: folder that each rank writes its parameters to at the end, and its whole state at the end of each epoch.
$SHARES: the synthetic images of a step are the same over all processes together, whatever their number. $OVERFLOW:
"RANK STEP STEP ...", where those of one rank are infinite. $SCALING: with dynamic loss scaling, in float32. The model
"Plain" has no batch normalisation. $STAGES: of the network, 2 if not given. $UNFUSED: each gradient has an all-reduce
of its own. $FATAL_CHANGE: kill -9 before the n-th change to the file system below $FATAL_ROOT. $SLOW_EVALUATION,
$SLOW_STEP: seconds that each step takes longer, so that a signal can arrive in it. $FAULT: "RANK STEP KIND", what
happens to a rank before its n-th training step, from FAULTS, and more of them behind commas; $FAULT_AFTER: not before
this path exists. $DIFFERS: "RANK WORDS", flags of one rank alone, or "RANK version", and more of them behind commas.
$SHARE_GPU: the ranks share a GPU.
"""
# ruff: noqa: E402, I001

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from functools import partial

gc.disable()  # which takes a fifth of the time of the imports
import paddle_resnet  # noqa: F401  sets Paddle's environment, so before Paddle
import numpy as np
import paddle
from paddle import static

import train
from paddle_resnet import dali, models, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.checkpoints.saver import Saver
from paddle_resnet.job import exchange, fleet, processes
from paddle_resnet.models import layers
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.steps import cuda_graph
from utils import signals
from utils.mode import Mode

gc.enable()

if "SHARE_GPU" in os.environ:  # which NCCL allows to ranks of different hosts, joined by sockets
    os.environ |= {"NCCL_HOSTID": str(processes.rank()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def kill_at(root, fatal):
    changes = 0

    def audit(event, args):
        nonlocal changes
        writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
        writes = writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink")
        if writes and root in str(args[0]):
            if changes == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    sys.addaudithook(audit)


def raise_error():
    raise ZeroDivisionError("of the test")


def wait_with_pythons_lock():
    """For a mutex that this thread has: unlike a sleep, no signal ends that."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


FAULTS = {
    "none": lambda: None,
    "raises": raise_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed_later": lambda: (time.sleep(3), os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda: time.sleep(1000),
    "locks": wait_with_pythons_lock,
    "locks_soon": lambda: threading.Timer(0.3, wait_with_pythons_lock).start(),
    "leaves": lambda: os._exit(0),
}


def fail_at(function, step, kind):
    steps = iter(range(10**6))

    def wrapped():
        if next(steps) == step:
            while not os.path.exists(os.environ.get("FAULT_AFTER", "/")):
                time.sleep(0.01)
            FAULTS[kind]()
        return function()

    return wrapped


def differ(words):
    if words == ["version"]:
        paddle.__version__ = "9.9.9"
    else:
        sys.argv += words


def slow(function, seconds):
    def wrapped(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return wrapped


class Shares(dali.SyntheticIterator):
    """This process's part of the images of a step."""

    def __next__(self):
        if self._left == 0:
            raise StopIteration
        step, rank, n = self.step, processes.rank(), self.batch_size
        self._left -= n
        generator = np.random.RandomState(step)
        part = slice(rank * n, (rank + 1) * n)
        shape = self._full["data"].shape()[1:]
        images = generator.standard_normal((n * processes.world_size(), *shape))[part]
        images = images.astype(self._host["data"].dtype)
        labels = generator.randint(0, 3, (n * processes.world_size(), 1)).astype("int64")[part]
        if (
            os.environ.get("OVERFLOW", "").split()[:1] == [str(rank)]
            and str(step) in os.environ["OVERFLOW"].split()[1:]
        ):
            images[0] = np.inf
        return [{"data": self._tensor(images), "label": self._tensor(labels)}]


def scale_losses(args, optimizer):
    """decorate_amp without a float16 operator, which a CPU does not have."""
    args.use_dynamic_loss_scaling = True
    operators = {op.type for op in static.default_main_program().global_block().ops}
    lists = static.amp.AutoMixedPrecisionLists(custom_black_list=operators | {"scale", "sum", "elementwise_mul"})
    return static.amp.decorate(optimizer, lists, init_loss_scaling=1024.0, use_dynamic_loss_scaling=True)


def unfused(init):
    def wrapped(is_collective, strategy):
        strategy.fuse_all_reduce_ops = False
        return init(is_collective=is_collective, strategy=strategy)

    return wrapped


def write_state(save):
    def wrapped(self, epoch, step=None, *args):
        if step is None:
            arrays = {name: array for state in variables.snapshot(self._program) for name, array in state.items()}
            np.savez(f"{os.environ['PARAMETERS']}/epoch{epoch}_rank{processes.rank()}.npz", **arrays)
        return save(self, epoch, step, *args)

    return wrapped


if __name__ == "__main__":
    stages = int(os.environ.get("STAGES", 2))
    models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1,) * stages, width=8)
    models.MODELS["Plain"] = models.MODELS["Tiny"]
    dali.PREALLOCATE_WIDTH = dali.PREALLOCATE_HEIGHT = 0
    if "Plain" in sys.argv:
        layers.BatchNorm = paddle.nn.Identity
    if "SHARES" in os.environ:
        dali.SyntheticIterator = Shares
        dali.SYNTHETIC_SIZE = {Mode.TRAIN: 48, Mode.EVAL: 24}
    if "SCALING" in os.environ:
        program.decorate_amp = scale_losses
    if "UNFUSED" in os.environ:
        fleet.fleet.init = unfused(fleet.fleet.init)
    if "PARAMETERS" in os.environ:
        Saver.save = write_state(Saver.save)
    if "FATAL_CHANGE" in os.environ:
        kill_at(os.environ["FATAL_ROOT"], int(os.environ["FATAL_CHANGE"]))
    exchange.stop_agreed = slow(exchange.stop_agreed, float(os.environ.get("SLOW_STEP", 0)))
    exchange.stop_asked = slow(exchange.stop_asked, float(os.environ.get("SLOW_EVALUATION", 0)))
    recordings = []
    record = cuda_graph.Recorder._record
    cuda_graph.Recorder._record = lambda self: (recordings.append(self), record(self))
    my_rank = str(processes.rank())
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        rank, step, kind = fault.split()
        if rank != my_rank:
            continue
        exchange.stop_agreed = fail_at(exchange.stop_agreed, int(step), kind)
    for difference in filter(None, os.environ.get("DIFFERS", "").split(",")):
        rank, *words = difference.split()
        if rank == my_rank:
            differ(words)
    code = signals.leaving(train.main())
    print(f"recordings: {len(recordings)}")
    if code == 0 and "PARAMETERS" in os.environ and "Plain" not in sys.argv:
        count = 1 + 4 * stages
        names = [f"conv2d_{i}.w_0" for i in range(count)] + ["linear_0.w_0", "linear_0.b_0"]
        names += [f"batch_norm_{i}.{part}" for i in range(count) for part in ("w_0", "b_0", "w_1", "w_2")]
        arrays = {name: np.array(static.global_scope().find_var(name).get_tensor()) for name in names}
        np.savez(f"{os.environ['PARAMETERS']}/rank{processes.rank()}.npz", **arrays)
    if "gpu" in sys.argv:  # a test of test_gpu.py is about the end
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the destructors of Paddle's libraries, which take half a second on a CPU
