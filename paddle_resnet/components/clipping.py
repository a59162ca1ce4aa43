"""Gradient clipping (--clip-grad-norm): limit the global norm of the gradients (Pascanu et al., arXiv:1211.5063).

The norm is that of the all-reduced and unscaled gradients. Squares are summed in float32, whereas Paddle's
ClipGradByGlobalNorm sums the squares of each float16 gradient in float16.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder


@dataclass(frozen=True)
class Settings:
    clip_grad_norm: float | None = flag(
        None,
        "maximum L2 norm of all gradients together, after averaging over the processes",
        topic="optimizer",
        parse=numbers.or_none(numbers.positive_number),
        metavar="F",
    )


def add(step: "StepBuilder") -> None:
    """If --clip-grad-norm is set, limit the norm of the gradients. With custom kernels, the gradients do not change;
    step.factor, with which the update multiplies them, limits the norm."""
    maximum = step.part(Settings).clip_grad_norm
    if maximum is not None:
        (_add_native if step.is_native else _add_paddle)(step, maximum)


def _add_native(step, maximum):
    from paddle_resnet import graph

    block, updates = graph.block(step.main), graph.updates(step.main)
    gradients = [block.var(op.input("Grad")[0]) for op in updates]
    inputs = {"Gradients@VECTOR": _by_type(gradients)}
    if step.factor is not None:
        inputs["Unscale@OPTIONAL"] = step.factor
    step.factor = graph.float32(block, "clip_factor", [1])
    at = block.ops.index(updates[0])
    graph.insert(block, at, "native_clip_factor", inputs, {"Factor": step.factor}, max_norm=float(maximum))
    graph.sync(block)


def _by_type(gradients):
    """Return the gradients, grouped by data type."""
    types = dict.fromkeys(gradient.dtype for gradient in gradients)
    return [gradient for dtype in types for gradient in gradients if gradient.dtype == dtype]


def _add_paddle(step, maximum):
    import numpy as np
    import paddle
    from paddle.utils import unique_name

    from paddle_resnet import graph

    block, updates = graph.block(step.main), graph.updates(step.main)
    at = itertools.count(block.ops.index(updates[0]))

    def insert(op_type, inputs, shape=(1,), dtype=paddle.float32, **attrs):
        out = block.create_var(name=unique_name.generate(f"clip_grad_norm.{op_type}"), shape=shape, dtype=dtype)
        graph.insert(block, next(at), op_type, {"X": inputs}, {"Out": out}, **attrs)
        return out

    gradients = [block.var(op.input("Grad")[0]) for op in updates]
    wide = [
        g if g.dtype == paddle.float32 else insert("cast", g, g.shape, in_dtype=g.dtype, out_dtype=paddle.float32)
        for g in gradients
    ]
    norm = insert("sqrt", insert("sum", [insert("squared_l2_norm", g) for g in wide]))
    larger = insert("clip", norm, min=maximum, max=float(np.finfo(np.float32).max))
    factors = {paddle.float32: insert("scale", insert("reciprocal", larger), scale=maximum)}
    for gradient in _by_type(gradients):
        dtype = gradient.dtype
        if dtype not in factors:
            types = {"in_dtype": paddle.float32, "out_dtype": dtype}
            factors[dtype] = insert("cast", factors[paddle.float32], dtype=dtype, **types)
        inputs = {"X": gradient, "Y": factors[dtype]}
        graph.insert(block, next(at), "elementwise_mul", inputs, {"Out": gradient}, axis=-1)
    graph.sync(block)
