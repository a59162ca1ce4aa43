"""train.py with the tiny network, for jobs of several processes; writes each rank's parameters to $PARAMETERS."""

import os
import sys
from functools import partial

import numpy as np
from paddle import static

import train  # first: sets Paddle's environment
from paddle_resnet import distributed, models
from paddle_resnet.models.resnet import BottleneckBlock, ResNet

if __name__ == "__main__":
    models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1, 1, 1, 1), width=8)
    code = train.main()
    names = [f"conv2d_{i}.w_0" for i in range(17)] + ["linear_0.w_0", "linear_0.b_0"]
    names += [f"batch_norm_{i}.{part}" for i in range(17) for part in ("w_0", "b_0", "w_1", "w_2")]
    arrays = {name: np.array(static.global_scope().find_var(name).get_tensor()) for name in names}
    np.savez(f"{os.environ['PARAMETERS']}/rank{distributed.rank()}.npz", **arrays)
    sys.exit(code)
