"""The difference between the outputs of two networks, for distillation (components/distillation.py).

The sums use logarithms of probabilities, which cannot overflow. Unlike Paddle's cross_entropy on a CPU, these functions
use the logits without limits (see loss_head._correction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddle_resnet import graph

if TYPE_CHECKING:
    from paddle import static


def of_softmax(logits: static.Variable, target: static.Variable) -> static.Variable:
    """Return the Kullback-Leibler divergence of each image, float32 [N, 1]: the sum over the classes of
    p (log p - log q). p is the softmax of `target`, q that of `logits`, both [N, classes]."""
    log_q, log_p = _log_softmax(logits), _log_softmax(target)
    return _sum(op("elementwise_mul", op("exp", log_p), op("elementwise_sub", log_p, log_q)))


def of_sigmoid(logits: static.Variable, target: static.Variable) -> static.Variable:
    """Like of_softmax, but p and q are sigmoids, and the sum is over the classes and their complements."""
    # With s(x) = log(1 + exp(x)), log q = x - s(x) and log(1 - q) = -s(x).
    difference = op("elementwise_sub", logits, target)
    linear = op("elementwise_mul", op("sigmoid", target), difference)
    softplus = (op("softplus", x, beta=1.0, threshold=20.0) for x in (logits, target))
    return _sum(op("elementwise_sub", op("elementwise_sub", *softplus), linear))


def _log_softmax(x):
    largest = op("reduce_max", x, stop_gradient=True, dim=[1], keep_dim=True)  # only prevents overflow
    shifted = op("elementwise_sub", x, largest)
    return op("elementwise_sub", shifted, op("log", _sum(op("exp", shifted))))


def _sum(terms):
    return op("reduce_sum", terms, dim=[1], keep_dim=True)


def op(
    op_type: str, x: static.Variable, y: static.Variable | None = None, stop_gradient: bool = False, **attrs: Any
) -> static.Variable:
    """Add an operator with the attributes `attrs` to the current program, and return its output. Paddle 3.3's functions
    for some of the operators used here reject variables of legacy programs."""
    inputs = {"X": x} if y is None else {"X": x, "Y": y}
    stops = stop_gradient or all(variable.stop_gradient for variable in inputs.values())
    return graph.operator(f"distillation.{op_type}", op_type, inputs, stop_gradient=stops, **attrs)
