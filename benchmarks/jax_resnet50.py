"""Measure training of ResNet-50 v1.5 with JAX and Flax on synthetic images, and print the result as a JSON line.

    python benchmarks/jax_resnet50.py --batch-size 256 --steps 100 --warmup-steps 50
    python benchmarks/peers.py run --rows "train, synthetic: paddle_resnet" --rows JAX --jax-python PYTHON

A step does the same work as a step of this project (see peers.py): float16 computation (on a CPU, float32) with float32
parameters, NHWC, SGD with momentum 0.875, weight decay (except for BN), label smoothing 0.1, dynamic loss scaling,
loss, top1 and top5. The batch is a constant on the device, with 3 channels. The host reads the metrics one step later.
PYTHON needs jax, flax and optax. XLA compiles the step when it is called first, so "first step" includes the
compilation.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale

CLASSES, STAGES, SMOOTHING = 1000, (3, 4, 6, 3), 0.1


class Bottleneck(nn.Module):
    """A residual block whose 3x3 convolution has the stride (version 1.5)."""

    width: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        shortcut = x
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride, padding=1)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if shortcut.shape != y.shape:
            shortcut = norm()(conv(4 * self.width, (1, 1), self.stride)(x))
        return nn.relu(y + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 v1.5. Images [N, H, W, 3] to float32 logits [N, CLASSES]."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(64, (7, 7), 2, padding=3, use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(STAGES):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


def create_state(model: nn.Module, optimizer: optax.GradientTransformation, images: jax.Array) -> dict[str, Any]:
    """Return everything that a step changes, as one donated argument."""
    variables = jax.jit(model.init)(jax.random.key(0), images)
    params = variables["params"]
    scale = DynamicScale(scale=jnp.float32(128))
    return {"params": params, "batch_stats": variables["batch_stats"], "opt": optimizer.init(params), "scale": scale}


def create_step(model: nn.Module, optimizer: optax.GradientTransformation) -> Callable:
    """Return a compiled function (state, images, labels) -> (state, (loss, top1 count, top5 count))."""

    def loss_of(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, mutable=["batch_stats"])
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean(), (logits, updates["batch_stats"])

    def step(state, images, labels):
        gradient = state["scale"].value_and_grad(loss_of, has_aux=True)
        scale, finite, (loss, (logits, batch_stats)), gradients = gradient(
            state["params"], state["batch_stats"], images, labels
        )
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        old = {name: state[name] for name in new}
        # If gradients are not finite, parameters and optimizer state stay the same.
        new = jax.tree.map(partial(jnp.where, finite), new, old)
        right = jax.lax.top_k(logits, 5)[1] == labels[:, None]
        return {**new, "batch_stats": batch_stats, "scale": scale}, (loss, right[:, 0].sum(), right.sum())

    return jax.jit(step, donate_argnums=0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train for the given number of steps, and return the speed in images/s and other properties of the run."""
    on_gpu = args.device == "gpu"
    device, dtype = jax.devices(args.device)[0], jnp.float16 if on_gpu else jnp.float32
    with jax.default_device(device):
        shape = (args.batch_size, args.crop_size, args.crop_size, 3)
        images = jax.random.normal(jax.random.key(1), shape, dtype)
        labels = jax.random.randint(jax.random.key(2), (args.batch_size,), 0, CLASSES)
        model = ResNet50(dtype)
        # As in the baselines of peers.py, BN parameters do not decay; the classifier's bias does.
        decays = partial(jax.tree_util.tree_map_with_path, lambda path, _: "BatchNorm" not in str(path))
        optimizer = optax.chain(optax.add_decayed_weights(3.0517578125e-05, decays), optax.sgd(0.01, 0.875))
        state, step = create_state(model, optimizer, images), create_step(model, optimizer)

        state, previous = step(state, images, labels)
        loss, first_step_at = float(previous[0]), time.time()
        for i in range(1, args.warmup_steps + args.steps):
            if i == args.warmup_steps:
                jax.block_until_ready(state)
                start = time.perf_counter()
            state, metrics = step(state, images, labels)
            loss, _, _ = map(float, previous)
            previous = metrics
        jax.block_until_ready((state, previous))
        ips = args.steps * args.batch_size / (time.perf_counter() - start)
    result = {"ips": ips, "steps": args.steps, "loss": loss, "first_step_at": first_step_at}
    result["versions"] = {"python": sys.version.split()[0], "device": device.device_kind}
    result["versions"] |= {module.__name__: module.__version__ for module in (jax, flax, optax)}
    if on_gpu:
        result["peak_memory_allocated_mib"] = device.memory_stats()["peak_bytes_in_use"] / 2**20
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=["ResNet50"], default="ResNet50")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"], help="device (cpu: float32, for tests)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup-steps", type=int, default=50)
    args = parser.parse_args()
    if args.warmup_steps < 1:
        parser.error(f"--warmup-steps {args.warmup_steps}: does not exclude compilation; use 1 or more")
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
