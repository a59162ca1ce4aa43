"""The end of every network: loss, accuracies and predictions from the logits.

This is the one place that knows these operators, Paddle's and the project's own. They stand in a name scope, by which
mixed precision finds them: half precision would round the loss and the accuracies to 11 bits or 8.
"""

import paddle
import paddle.nn.functional as F
from paddle import static

SCOPE = "loss_head"


def scope():
    """Operators that are made inside belong to the loss head."""
    return static.name_scope(SCOPE)


def contains(op):
    """Whether an operator belongs to the loss head."""
    return op.attr("op_namescope").startswith(f"/{SCOPE}")


def add_paddle(logits, label, class_num, label_smoothing, is_train):
    """Add the loss head to the current program, by Paddle's operators.

    Args:
        logits: [N, class_num].
        label: [N, 1] int64.
        class_num: number of classes.
        label_smoothing: share of each label spread evenly over all classes, in training only.
        is_train: the loss is the mean over the batch []; else that of each image [N, 1], and there is "confusion".
    Returns:
        {"loss", "top1" [], "top5" [] (top-C where there are C < 5 classes), in float32; "confusion": label and
        predicted class [N, 2] int64}.
    """
    with scope():
        if not is_train:
            loss = F.cross_entropy(logits, label, reduction="none")
        elif label_smoothing:
            soft_label = F.label_smooth(F.one_hot(paddle.reshape(label, [-1]), class_num), epsilon=label_smoothing)
            loss = F.cross_entropy(logits, soft_label, soft_label=True)
        else:
            loss = F.cross_entropy(logits, label)
        head = {"loss": loss, "top1": static.accuracy(logits, label, k=1)}
        head["top5"] = static.accuracy(logits, label, k=min(5, class_num))
        if not is_train:
            # The operator that the accuracy uses, so that both agree on which of two equal logits comes first.
            _, prediction = paddle.topk(logits, k=1)
            head["confusion"] = paddle.concat([label, prediction], axis=1)
        return head


def add_logits(logits):
    """Add the logits [N, class_num] in float32 to what the current program computes, for the host: a softmax there
    needs no operator that a CUDA graph would have to repeat."""
    with scope():
        return {"logits": paddle.scale(logits, 1.0)}


def add_native(logits, label, class_num, label_smoothing, is_train):
    """As add_paddle, by one operator of native/."""
    block = static.default_main_program().global_block()
    made = {
        name: block.create_var(name=f"{logits.name}.{name}", dtype=dtype, stop_gradient=name != "Loss")
        for name, dtype in (("Loss", "float32"), ("Top1", "float32"), ("TopK", "float32"), ("OfSoftmax", "float32"))
    }
    made["Pairs"] = block.create_var(name=f"{logits.name}.Pairs", dtype="int64", stop_gradient=True)
    attrs = {"smoothing": float(label_smoothing if is_train else 0), "k": min(5, class_num), "mean": is_train}
    with scope():
        block.append_op(type="native_loss", inputs={"Logits": logits, "Labels": label}, outputs=made, attrs=attrs)
    head = {"loss": made["Loss"], "top1": made["Top1"], "top5": made["TopK"]}
    return head if is_train else head | {"confusion": made["Pairs"]}
