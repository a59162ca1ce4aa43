"""train.py with the tiny network, as a process of its own or as a worker of a job.

$PARAMETERS: folder that each rank writes its parameters to at the end. $FATAL_CHANGE: kill -9 before the n-th change
to the file system below $FATAL_ROOT. $SLOW_EVALUATION, $SLOW_STEP: seconds that each step takes longer, so that a
signal can arrive in it. $FAULT: "RANK STEP KIND", what happens to a rank before its n-th training step, from FAULTS.
$DIFFERS: "RANK WORDS", flags of one rank alone, or "RANK version".
"""

import os
import signal
import sys
import time
from functools import partial

import numpy as np
import paddle
from paddle import static

import train  # first: sets Paddle's environment
from paddle_resnet import distributed, models
from paddle_resnet.models.resnet import BottleneckBlock, ResNet


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


FAULTS = {
    "raises": raise_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda: time.sleep(1000),
    "leaves": lambda: os._exit(0),
}


def fail_at(function, step, kind):
    steps = iter(range(10**6))

    def wrapped():
        if next(steps) == step:
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


if __name__ == "__main__":
    models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1, 1, 1, 1), width=8)
    if "FATAL_CHANGE" in os.environ:
        kill_at(os.environ["FATAL_ROOT"], int(os.environ["FATAL_CHANGE"]))
    distributed.stop_agreed = slow(distributed.stop_agreed, float(os.environ.get("SLOW_STEP", 0)))
    distributed.stop_asked = slow(distributed.stop_asked, float(os.environ.get("SLOW_EVALUATION", 0)))
    my_rank = str(distributed.rank())
    if os.environ.get("FAULT", "").split()[:1] == [my_rank]:
        _, step, kind = os.environ["FAULT"].split()
        distributed.stop_agreed = fail_at(distributed.stop_agreed, int(step), kind)
    if os.environ.get("DIFFERS", "").split()[:1] == [my_rank]:
        differ(os.environ["DIFFERS"].split()[1:])
    code = train.main()
    if code == 0 and "PARAMETERS" in os.environ:
        names = [f"conv2d_{i}.w_0" for i in range(17)] + ["linear_0.w_0", "linear_0.b_0"]
        names += [f"batch_norm_{i}.{part}" for i in range(17) for part in ("w_0", "b_0", "w_1", "w_2")]
        arrays = {name: np.array(static.global_scope().find_var(name).get_tensor()) for name in names}
        np.savez(f"{os.environ['PARAMETERS']}/rank{distributed.rank()}.npz", **arrays)
    sys.exit(code)
