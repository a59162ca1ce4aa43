"""Run train.py with the tiny network in a separate process or as a worker of a job.

Usage: `train_tiny.py OPTIONS FLAGS`. The function `parse_options` defines OPTIONS, and FLAGS are flags of train.py. The
network "Plain" has no batch normalization. If $SHARE_GPU is set, the ranks of a job share a GPU.
"""
# ruff: noqa: E402, I001

import argparse
import ctypes
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
from functools import partial

gc.disable()  # with garbage collection, the imports would take 20% longer
import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
import numpy as np
import paddle
from paddle import static

import few_blocks
import reruns
import workers
from paddle_resnet.data import decoding
from paddle_resnet.data import iterators
from paddle_resnet.data import loader as loader_module
from paddle_resnet import train
from paddle_resnet import lr_find, models
from paddle_resnet.checkpoints import replicas, variables
from paddle_resnet.checkpoints.saver import Saver
from paddle_resnet.job import exchange, fleet, processes
from paddle_resnet.models import layers
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.step import averages, build, cuda_graph, loop
from paddle_resnet.utils import signals
from paddle_resnet.utils.mode import Mode

gc.enable()


def parse_options():
    """Remove the options of this program from sys.argv, so that only flags of train.py remain."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("--parameters", help="folder to which each rank writes its state after each epoch, and its final parameters")
    add("--shares", action="store_true", help="synthetic images that do not depend on the number of processes")
    add("--overflow", default="", help="'RANK STEP STEP ...': steps in which --shares generates an image of infinities")
    add("--scaling", action="store_true", help="dynamic loss scaling in float32")
    add("--stages", type=int, default=2, help="number of stages of the network")
    add("--few-blocks", action="store_true", help="whether to reduce the networks of the registry to few blocks")
    add("--unfused", action="store_true", help="one all-reduce per gradient")
    add(
        "--fatal-change",
        type=int,
        help="number of the change to files below --fatal-root before which the process kills itself",
    )
    add("--fatal-root")
    add("--slow-step", type=float, default=0, help="seconds added to each training step")
    add("--slow-evaluation", type=float, default=0, help="seconds added to some steps of an evaluation")
    add("--fault", default="", help="'RANK STEP KIND', comma-separated: fault of a rank before a step")
    add("--fault-after", default="/", help="path that must exist before a fault happens")
    add("--flipped", default="conv2d_2.w_0", help="variable of which the fault 'flips' changes a bit")
    add("--check-interval", type=int, default=1000, help="steps between two comparisons of the ranks")
    add("--find-lr", action="store_true", help="whether to run the learning-rate finder instead of train.py")
    add("--tasks", metavar="FOLDER", help="run the tasks of the workers.Worker with this folder")
    add("--differs", default="", help="'RANK FLAGS' or 'RANK version', comma-separated: differences of a rank")
    options, sys.argv[1:] = parser.parse_known_args()
    return options


# Ranks can share a GPU only if NCCL assumes that they are on different hosts, connected by sockets.
if "SHARE_GPU" in os.environ:
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


def flip_bit():
    """Change one bit of a variable, the sign of its first element. A change of the lowest bit could be lost by rounding
    in the next update."""
    place = processes.place("gpu" if "gpu" in sys.argv else "cpu")
    if "gpu" in sys.argv:
        paddle.device.cuda.synchronize(place)  # the previous step may still update the variable
    array = variables.read(options.flipped)
    array.reshape(-1).view(np.uint8)[array.itemsize - 1] ^= 0x80
    variables.set_variable(options.flipped, array, place)


def wait_with_gil():
    """Wait for a mutex that this thread holds. Unlike a sleep, this wait cannot be interrupted by signals."""
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
    "locks": wait_with_gil,
    "locks_soon": lambda: threading.Timer(0.3, wait_with_gil).start(),
    "leaves": lambda: os._exit(0),
    "flips": flip_bit,
}


def fail_at(function, step, kind):
    steps = iter(range(10**6))

    def wrapped():
        if next(steps) == step:
            while not os.path.exists(options.fault_after):
                time.sleep(0.01)
            FAULTS[kind]()
        return function()

    return wrapped


def apply_difference(arguments):
    if arguments == ["version"]:
        paddle.__version__ = "9.9.9"
    else:
        sys.argv += arguments


def slow(function, seconds):
    def wrapped(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return wrapped


class Shares(iterators.SyntheticIterator):
    """A loader that yields this process's share of the global batch of each step."""

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
        overflow = options.overflow.split()
        if overflow[:1] == [str(rank)] and str(step) in overflow[1:]:
            images[0] = np.inf
        return [{"data": self._tensor(images), "label": self._tensor(labels)}]


def scale_losses(dist_optimizer):
    """Scale the loss as --amp does, but without float16 operators, which CPUs do not support."""

    def wrapped(args, optimizer):
        operators = {op.type for op in static.default_main_program().global_block().ops}
        lists = static.amp.AutoMixedPrecisionLists(custom_black_list=operators | {"scale", "sum", "elementwise_mul"})
        scaled = static.amp.decorate(optimizer, lists, init_loss_scaling=1024.0, use_dynamic_loss_scaling=True)
        return dist_optimizer(args, scaled)

    return wrapped


def with_dynamic_loss_scaling(run_and_save):
    """Set the flag for the loop only, because CPUs do not support --amp."""

    def wrapped(options, *arguments, **others):
        options = dataclasses.replace(options, use_dynamic_loss_scaling=True)
        return run_and_save(options, *arguments, **others)

    return wrapped


def unfused(init):
    def wrapped(is_collective, strategy):
        strategy.fuse_all_reduce_ops = False
        return init(is_collective=is_collective, strategy=strategy)

    return wrapped


def write_state(save):
    def wrapped(self, epoch, step=None, *args, **keywords):
        if step is None:
            arrays = {name: array for state in variables.snapshot(self._program) for name, array in state.items()}
            arrays |= {name: variables.read(name) for name in averages.of(self._program).values()}
            np.savez(f"{options.parameters}/epoch{epoch}_rank{processes.rank()}.npz", **arrays)
        return save(self, epoch, step, *args, **keywords)

    return wrapped


def install():
    """Change the trainer as the options say."""
    if options.few_blocks:
        few_blocks.shrink()
    models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1,) * options.stages, width=8)
    models.MODELS["Plain"] = models.MODELS["Tiny"]
    decoding.PREALLOCATE_WIDTH = decoding.PREALLOCATE_HEIGHT = 0
    if "Plain" in sys.argv:
        layers.BatchNorm = paddle.nn.Identity
    if options.shares:
        loader_module.SyntheticIterator = Shares
        loader_module.SYNTHETIC_SIZE = {Mode.TRAIN: 48, Mode.EVAL: 24}
    if options.scaling:
        build.wrap_optimizer = scale_losses(build.wrap_optimizer)
        loop.run_and_save = with_dynamic_loss_scaling(loop.run_and_save)
    if options.unfused:
        fleet.fleet.init = unfused(fleet.fleet.init)
    if options.parameters or options.tasks:
        Saver.save = write_state(Saver.save)
    if options.fatal_change is not None:
        kill_at(options.fatal_root, options.fatal_change)
    replicas.INTERVAL_STEPS = options.check_interval
    exchange.stop_agreed = slow(exchange.stop_agreed, options.slow_step)
    exchange.stop_asked = slow(exchange.stop_asked, options.slow_evaluation)
    capture = cuda_graph.CapturedStep._capture
    cuda_graph.CapturedStep._capture = lambda self: (captures.append(self), capture(self))
    my_rank = str(processes.rank())
    for fault in filter(None, options.fault.split(",")):
        rank, step, kind = fault.split()
        if rank != my_rank:
            continue
        exchange.stop_agreed = fail_at(exchange.stop_agreed, int(step), kind)
    for difference in filter(None, options.differs.split(",")):
        rank, *arguments = difference.split()
        if rank == my_rank:
            apply_difference(arguments)


def run():
    """Run the trainer, and write the final parameters. Return the exit code."""
    code = signals.leaving((lr_find if options.find_lr else train).main())
    print(f"captures: {len(captures)}")
    if code == 0 and options.parameters and "Plain" not in sys.argv and not options.few_blocks:
        count = 1 + 4 * options.stages
        names = [f"conv2d_{i}.w_0" for i in range(count)] + ["linear_0.w_0", "linear_0.b_0"]
        names += [f"batch_norm_{i}.{part}" for i in range(count) for part in ("w_0", "b_0", "w_1", "w_2")]
        arrays = {name: np.array(static.global_scope().find_var(name).get_tensor()) for name in names}
        np.savez(f"{options.parameters}/rank{processes.rank()}.npz", **arrays)
    return code


def run_task(arguments):
    """Run this program with other arguments, with the output in a log like that of the launcher. Return "ok" or the
    error. Only options that `run` and `write_state` read have an effect."""
    global options
    sys.argv[1:] = arguments
    options = parse_options()
    workers.redirect(f"{options.parameters}/log/workerlog.{processes.rank()}")
    captures.clear()
    reruns.start_run()
    with static.scope_guard(static.Scope()):
        code = run()
    workers.flush()
    return "ok" if code == 0 else f"exit code {code}"


if __name__ == "__main__":
    captures = []
    options = parse_options()
    install()
    if options.tasks:
        reruns.allow_reruns()
        workers.serve(options.tasks, processes.rank(), run_task)
        sys.exit()
    code = run()
    if "gpu" in sys.argv:  # exit normally, because test_gpu.py also tests how the process exits
        sys.exit(code)
    workers.flush()
    os._exit(code)  # skip the destructors of Paddle's libraries, which take half a second on a CPU
