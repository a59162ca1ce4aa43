"""The loss head of --multi-label: one binary decision per class, computed by Paddle's operators for every --kernels.

As in models/loss_head.py, the operators of the loss head are marked with loss_head.scope() and remain in float32 with
AMP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle

from paddle_resnet.models import loss_head
from paddle_resnet.models.loss_head import _op

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddle import static


def add(
    logits: static.Variable,
    targets: Mapping[str, static.Variable],
    label_smoothing: float,
    asymmetric: list[float] | None,
    is_train: bool,
) -> dict[str, static.Variable]:
    """Add the loss head to the current program.

    The loss of an image is the sum over the classes of w * y * P + (1 - y) * N, where y is the target, w is the weight
    of the class, p is the probability (the sigmoid of the logit), P = -log(p) and N = -log(1 - p). In the asymmetric
    loss (Ridnik et al., arXiv:2009.14119, equations 6 and 7), P = -(1 - p)**g * log(p) and N = -q**f * log(1 - q) with
    q = max(p - m, 0). Label smoothing by e replaces y with (1 - e) * y + e / 2.

    Args:
        logits: [N, class_num].
        targets: {"label": float32 [N, class_num], 1 for each class of the image, otherwise 0}, and, in training,
            optionally "weights": float32 [N, class_num], which replaces the labels, and "class_weights": float32
            [1, class_num], the weights w.
        label_smoothing: e, used only in training.
        asymmetric: [f, g, m], used only in training; None for binary cross entropy.
        is_train: if True, return the mean loss of the batch []; otherwise, return the loss of each image [N, 1], and
            "scores".
    Returns:
        {"loss"}, in float32; "scores": the logits and the labels, float32 [N, 2 * class_num]. If a logit of an image is
        NaN or infinite, the loss of the image is NaN or infinite. In the asymmetric loss with m > 0, the exception is
        the logit +inf, with which the loss is finite.
    """
    with loss_head.scope():
        if not is_train:
            # paddle.concat would reject float16 logits (--dali-output-fp16), although AMP casts them to float32 later.
            scores = _op("concat", {"X": [paddle.scale(logits, 1.0), targets["label"]]}, "float32", axis=1)
            return {"loss": _sum(_binary(logits, targets["label"])), "scores": scores}
        target = targets.get("weights", targets["label"])
        if label_smoothing:
            target = paddle.scale(target, 1 - label_smoothing, label_smoothing / 2)
        positive = target
        if "class_weights" in targets:
            positive = target * targets["class_weights"]
        negative = paddle.scale(target, -1, 1)
        if asymmetric is None:
            # Binary cross entropy is linear in the target, so weights only change the target and the scale.
            total = positive + negative
            losses = _times(_binary(logits, _op("elementwise_div", {"X": positive, "Y": total})), total)
        else:
            of_positive, of_negative = _asymmetric(logits, *asymmetric)
            losses = _add(_times(of_positive, positive), _times(of_negative, negative))
        return {"loss": paddle.mean(_sum(losses))}


def _binary(logits, target):
    inputs = {"X": logits, "Label": target}
    return _op("sigmoid_cross_entropy_with_logits", inputs, stop_gradient=False, ignore_index=-100, normalize=False)


def _asymmetric(logits, of_negative, of_positive, margin):
    """Return the terms (P, N) of the loss in add(), each with the shape of the logits."""
    flipped = _graded("scale", logits, scale=-1.0, bias=0.0)
    positive = _graded("softplus", flipped, beta=1.0, threshold=20.0)
    if of_positive:
        positive = _times(positive, _graded("pow", _graded("sigmoid", flipped), factor=of_positive))
    probability = _graded("sigmoid", logits)
    if margin:
        probability = _graded("relu", _graded("scale", probability, scale=1.0, bias=-margin))
        other = _graded("scale", probability, scale=-1.0, bias=1.0)  # at least the margin
        negative = _graded("scale", _graded("log", other), scale=-1.0, bias=0.0)
    else:
        negative = _graded("softplus", logits, beta=1.0, threshold=20.0)
    if of_negative:
        negative = _times(negative, _graded("pow", probability, factor=of_negative))
    return positive, negative


def mean_over_mirrored(logits: static.Variable) -> static.Variable:
    """Average the probabilities of images and their mirror images (--tta flip).

    Args:
        logits: [2 N, class_num]; the logits of the mirror images follow those of the images.
    Returns:
        float32 [N, class_num], the logits of the average probabilities.
    """
    with loss_head.scope():
        # The logit of a mean p is log(p) - log(1 - p). log_mean computes both logarithms, because 1 - p can underflow.
        means = []
        for sign in (-1.0, 1.0):
            logs = paddle.scale(_op("softplus", {"X": paddle.scale(logits, sign)}, beta=1.0, threshold=20.0), -1.0)
            means.append(loss_head.log_mean(paddle.reshape(logs, [2, -1, logits.shape[1]])))
        difference = _op("elementwise_sub", {"X": means[0], "Y": means[1]})
        return paddle.reshape(difference, [-1, logits.shape[1]])


def probabilities(logits: static.Variable) -> static.Variable:
    """Return the probability of each class, float32 [N, class_num]."""
    with loss_head.scope():
        return _op("sigmoid", {"X": logits})


def _graded(op_type, x, **attrs):
    return _op(op_type, {"X": x}, stop_gradient=False, **attrs)


def _times(x, y):
    return _op("elementwise_mul", {"X": x, "Y": y}, stop_gradient=False)


def _add(x, y):
    return _op("elementwise_add", {"X": x, "Y": y}, stop_gradient=False)


def _sum(losses):
    return _graded("reduce_sum", losses, dim=[1], keep_dim=True)
