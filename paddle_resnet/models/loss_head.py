"""The loss head, shared by all networks, computes loss, accuracies and predictions from the logits.

The loss head consists either of Paddle's operators or of the custom operator native_loss. Mixed precision recognizes
the operators of the loss head by their name scope and keeps them in float32, because half precision would round the
loss and the accuracies to 8 or 11 bits.

All accuracies, confusion counts and predictions follow the same rules. Classes are ranked by their logits. If logits
are equal, the class with the lower number ranks first. NaN ranks last. If the logit of an image's label is NaN, the
image counts as incorrect. If all logits of an image are NaN, the image has no predicted class. If any logit of an image
is NaN or +inf, the loss of that image is NaN.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import static

from paddle_resnet import graph

if TYPE_CHECKING:
    from paddle.base.framework import Operator

SCOPE = "loss_head"


def scope() -> AbstractContextManager[None]:
    """Return a context manager that marks all operators created in its block as part of the loss head."""
    return static.name_scope(SCOPE)


def contains(op: "Operator") -> bool:
    """Return whether an operator belongs to the loss head."""
    return op.attr("op_namescope").startswith(f"/{SCOPE}")


def add_paddle(
    logits: static.Variable,
    targets: dict[str, static.Variable],
    class_num: int,
    label_smoothing: float,
    is_train: bool,
) -> dict[str, static.Variable]:
    """Add the loss head to the current program, with Paddle's operators.

    Args:
        logits: [N, class_num].
        targets: {"label": int64 [N, 1]}, and optionally "weights": float32 [N, class_num], whose rows sum to 1, and
            "image_weights": float32 [N, 1]. "weights" replaces the labels in the loss, but not in the accuracies. In
            training, the loss of each image is multiplied by its image weight.
        class_num: number of classes.
        label_smoothing: in training, fraction of each label that is distributed evenly over all classes.
        is_train: if True, return the mean loss of the batch [], which is the sum of the (weighted) losses divided by N;
            otherwise, return the loss of each image [N, 1], "confusion" and "of_softmax".
    Returns:
        {"loss", "top1" [], "top5" [] (top-C for C < 5 classes), in float32; "confusion": label and predicted class,
        int64 [N, 2]; the predicted class is class_num if all logits of the image are NaN; "of_softmax": the largest
        logit x and log(sum(exp(logits - x))), float32 [N, 2]; the second value is NaN if any logit of the image is NaN
        or +inf}.
    """
    label, weights = targets["label"], targets.get("weights")
    with scope():
        finite = _nan_rows(logits)
        if label_smoothing and is_train:
            if weights is None:
                weights = F.one_hot(paddle.reshape(label, [-1]), class_num)
            weights = F.label_smooth(weights, epsilon=label_smoothing)
        targets_of_loss = {"label": label} if weights is None else {"label": weights, "soft_label": True}
        loss = F.cross_entropy(finite, **targets_of_loss, reduction="none")
        largest = _largest(finite, 1)
        shifted = _op("elementwise_sub", {"X": finite, "Y": largest})
        log_sum = _op("log", {"X": _op("reduce_sum", {"X": _op("exp", {"X": shifted})}, dim=[1], keep_dim=True)})
        loss = loss + _correction(loss, shifted, log_sum, label, weights)
        if is_train:
            image_weights = targets.get("image_weights")
            loss = paddle.mean(loss if image_weights is None else loss * image_weights)
        order = _op("cumsum", {"X": _full([1, class_num], 1, "int64")}, axis=1, reverse=True)  # C, C - 1, ..., 1
        head = {"loss": loss} | _accuracies(logits, label, order, {"top1": 1, "top5": min(5, class_num)})
        if not is_train:
            head["confusion"] = paddle.concat([label, _first_class(logits, order)], axis=1)
            head["of_softmax"] = paddle.concat([largest, log_sum], axis=1)
        return head


def _nan_rows(logits):
    """Return the logits, with all logits of an image replaced by NaN if any of them is NaN or +inf. Without the
    replacement, Paddle's cross entropy of such an image could be finite on a CPU."""
    is_finite = _op("less_than", {"X": logits, "Y": _full([1], float("inf"), "float32")}, "bool")
    factor = _op("reduce_min", {"X": _cast(is_finite, "float32")}, dim=[1], keep_dim=True)
    factor = _op("elementwise_div", {"X": factor, "Y": factor})  # 1 or NaN
    return _op("elementwise_mul", {"X": logits, "Y": factor}, stop_gradient=False)


def _correction(loss, shifted, log_sum, label, weights):
    """Return the cross entropy of each image minus `loss`, the value of Paddle's kernel: float32 [N, 1], without a
    gradient. `shifted` is the logits minus the largest of each image, and `log_sum` is log(sum(exp(shifted))).
    `weights` replaces the labels, unless it is None.

    On a CPU, the kernels of cross_entropy and log_softmax raise logits to at least the largest logit of the image minus
    64, which limits the loss and changes gradients by less than 1e-27. For all images whose smallest logit is at most
    63 below the largest, the correction is 0, so that their loss is the kernel's value. The kernel's value does not
    depend on the other images of the batch, whereas the last bit of the correction would, because it is computed with
    Paddle's exp operator."""
    if weights is None:
        exact = _op("elementwise_sub", {"X": log_sum, "Y": _op("index_sample", {"X": shifted, "Index": label})})
    else:
        terms = _op("elementwise_mul", {"X": weights, "Y": _op("elementwise_sub", {"X": log_sum, "Y": shifted})})
        # A class with weight 0 does not contribute to the loss, even if its logit is -inf.
        is_used = _op("not_equal", {"X": weights, "Y": _full([1], 0, "float32")}, "bool")
        terms = _op("where", {"Condition": is_used, "X": terms, "Y": _op("fill_any_like", {"X": weights}, value=0.0)})
        exact = _op("reduce_sum", {"X": terms}, dim=[1], keep_dim=True)
    smallest = _op("reduce_min", {"X": shifted}, dim=[1], keep_dim=True)
    is_limited = _op("less_than", {"X": smallest, "Y": _full([1], -63, "float32")}, "bool")
    difference = _op("elementwise_sub", {"X": exact, "Y": loss})
    return _op("where", {"Condition": is_limited, "X": difference, "Y": _op("fill_any_like", {"X": exact}, value=0.0)})


def weigh_images(
    targets: dict[str, static.Variable], class_weights: static.Variable, class_num: int
) -> static.Variable:
    """Return a weight for each image, float32 [N, 1] (--class-weights). The weight of an image is the weight of its
    class. The weight of a mixed image is the mean of the weights of both classes, weighted by their fractions in the
    target.

    Args:
        targets: {"label"} and optionally {"weights"}, as in add_paddle.
        class_weights: float32 [1, class_num].
        class_num: number of classes.
    """
    with scope():
        weights = targets.get("weights")
        if weights is None:
            weights = F.one_hot(paddle.reshape(targets["label"], [-1]), class_num)
        return _op("reduce_sum", {"X": weights * class_weights}, dim=[1], keep_dim=True)


def balanced_weights(images: np.ndarray) -> np.ndarray:
    """Return the class weights for --class-weights balanced, n / (classes * images in the class), like scikit-learn's
    compute_class_weight. n is the number of training images, and `classes` is the number of classes with images. The
    weight of a class without images is 0.

    The mean of the weights over all training images is 1. The loss of a batch is therefore the sum of the weighted
    losses divided by the number of images, not by the sum of the weights, which differs between batches and processes.

    Args:
        images: number of training images in each class, integers [class_num].
    Returns:
        float64 [class_num].
    """
    is_used = images > 0
    return np.divide(images.sum(), is_used.sum() * images, out=np.zeros(len(images)), where=is_used)


def _accuracies(logits, label, order, sizes):
    """Return {name: fraction of images whose label is among the k highest-ranked classes}. `sizes` is {name: k}."""
    own = _op("index_sample", {"X": logits, "Index": label})
    class_num = logits.shape[1]
    is_lower = _op("greater_than", {"X": order, "Y": paddle.scale(label, -1, class_num)}, "bool")
    is_tie = _op("equal", {"X": logits, "Y": own}, "bool")
    is_lower_tie = _op("logical_and", {"X": is_tie, "Y": is_lower}, "bool")
    is_larger = _op("greater_than", {"X": logits, "Y": own}, "bool")
    is_ahead = _op("logical_or", {"X": is_larger, "Y": is_lower_tie}, "bool")
    ahead = _op("reduce_sum", {"X": _cast(is_ahead, "float32")}, dim=[1], keep_dim=True)
    is_number = _op("equal", {"X": own, "Y": own}, "bool")
    accuracies = {}
    for name, k in sizes.items():
        is_among = _op("less_than", {"X": ahead, "Y": _full([1], k, "float32")}, "bool")
        is_hit = _op("logical_and", {"X": is_among, "Y": is_number}, "bool")
        accuracies[name] = _op("reduce_mean", {"X": _cast(is_hit, "float32")}, reduce_all=True)
    return accuracies


def mean_over_mirrored(logits: static.Variable) -> static.Variable:
    """Average the class probabilities of images and their mirror images (--tta flip).

    Args:
        logits: [2 N, class_num]; the logits of the mirror images follow those of the images.
    Returns:
        float32 [N, class_num], the logarithms of the average probabilities, which replace the logits in the loss head.
    """
    with scope():
        # Compute with logarithms, because small probabilities underflow in float32. float64 would not help, because
        # AMP would cast it to float32.
        shifted = _op("elementwise_sub", {"X": logits, "Y": _largest(logits, 1)})
        sums = _op("reduce_sum", {"X": _op("exp", {"X": shifted})}, dim=[1], keep_dim=True)
        logs = _op("elementwise_sub", {"X": shifted, "Y": _op("log", {"X": sums})})
        mean = log_mean(paddle.reshape(logs, [2, -1, logits.shape[1]]))
        return paddle.reshape(mean, [-1, logits.shape[1]])


def log_mean(pairs: static.Variable) -> static.Variable:
    """Return the logarithm of the mean of exp(pairs) over the first axis, [1, ...]."""
    largest = _largest(pairs, 0)
    ratios = _op("exp", {"X": _op("elementwise_sub", {"X": pairs, "Y": largest})})
    mean = _op("reduce_mean", {"X": ratios}, dim=[0], keep_dim=True)
    return _op("elementwise_add", {"X": largest, "Y": _op("log", {"X": mean})})


def _largest(values, axis):
    return _op("reduce_max", {"X": values}, dim=[axis], keep_dim=True)


def _first_class(logits, order):
    """Return the class with the largest logit, int64 [N, 1]. If all logits of an image are NaN, its class is
    class_num."""
    is_number = _op("equal", {"X": logits, "Y": logits}, "bool")
    lowest = _op("fill_any_like", {"X": logits}, value=float("-inf"))
    numbers = _op("where", {"Condition": is_number, "X": logits, "Y": lowest})
    is_largest = _op("equal", {"X": logits, "Y": _largest(numbers, 1)}, "bool")
    places = _op("elementwise_mul", {"X": _cast(is_largest, "int64"), "Y": order}, "int64")
    first = _op("reduce_max", {"X": places}, "int64", dim=[1], keep_dim=True)
    return paddle.scale(first, -1, logits.shape[1])


def _op(op_type, inputs, dtype=None, stop_gradient=True, **attrs):
    return graph.operator(f"{SCOPE}.{op_type}", op_type, inputs, dtype, stop_gradient, **attrs)


def _cast(x, dtype):
    return _op("cast", {"X": x}, dtype, in_dtype=x.dtype, out_dtype=getattr(paddle, dtype))


def _full(shape, value, dtype):
    out = paddle.full(shape, value, dtype)
    out.stop_gradient = True
    return out


def add_logits(logits: static.Variable) -> static.Variable:
    """Add a copy of the logits to the loss head, float32 [N, class_num], and return it. The host computes the softmax,
    so that a CUDA graph needs no softmax operator."""
    with scope():
        return paddle.scale(logits, 1.0)


def add_native(
    logits: static.Variable,
    targets: dict[str, static.Variable],
    class_num: int,
    label_smoothing: float,
    is_train: bool,
) -> dict[str, static.Variable]:
    """Add the loss head to the current program, with one custom operator. Arguments and result are those of
    add_paddle."""
    block = graph.block(static.default_main_program())
    made = {
        name: block.create_var(name=f"{logits.name}.{name}", dtype=dtype, stop_gradient=name != "Loss")
        for name, dtype in (("Loss", "float32"), ("Top1", "float32"), ("TopK", "float32"), ("OfSoftmax", "float32"))
    }
    made["Pairs"] = block.create_var(name=f"{logits.name}.Pairs", dtype="int64", stop_gradient=True)
    attrs = {"smoothing": float(label_smoothing if is_train else 0), "k": min(5, class_num), "mean": is_train}
    inputs = {"Logits": logits, "Labels": targets["label"]}
    if "weights" in targets:
        inputs["Weights@OPTIONAL"] = targets["weights"]
    if "image_weights" in targets and is_train:
        inputs["ImageWeights@OPTIONAL"] = targets["image_weights"]
    with scope():
        block.append_op(type="native_loss", inputs=inputs, outputs=made, attrs=attrs)
    head = {"loss": made["Loss"], "top1": made["Top1"], "top5": made["TopK"]}
    return head if is_train else head | {"confusion": made["Pairs"], "of_softmax": made["OfSoftmax"]}
