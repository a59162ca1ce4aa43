"""Losses that components add to a training program."""

from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from conftest import NHWC
from helpers import build as build_compiled
from helpers import random_batches, variable
from paddle_resnet.native import build as native


@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_component_replaces_loss_of_training_but_not_of_evaluation(parse, with_component, kernels):
    """The component sees the logits and the labels. With its loss, only the logits of the labels change the network."""
    if kernels == "native" and native.missing() is not None:
        pytest.skip(native.missing())

    def add_loss(step):
        labels = F.one_hot(paddle.reshape(step.targets["label"], [-1]), step.num_classes)
        step.loss = paddle.mean(step.logits * labels)

    with_component("INPUTS", SimpleNamespace(add_loss=add_loss))
    args = parse("--lr", "1", "--momentum", "0", "--weight-decay", "0", *NHWC)
    args.set("Python", kernels=kernels)
    if kernels == "native":
        native.load()
    ((images, labels),) = random_batches(1, (32, 32, 4))
    compiled, exe, fetchs, _, _ = build_compiled(args)
    before = variable("linear_0.b_0")
    compiled.write_scalars()
    (loss,) = exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])
    change = before - variable("linear_0.b_0")
    counts = np.bincount(labels[:, 0], minlength=len(before))
    np.testing.assert_allclose(change / change.sum(), counts / counts.sum(), rtol=1e-5)
    assert loss.size == 1
    evaluated, exe, fetchs, _, _ = build_compiled(args, is_train=False)
    (losses,) = exe.run(evaluated, {"data": images, "label": labels}, [fetchs["loss"][0]])
    assert losses.shape == (8, 1) and (losses > 0).all()
