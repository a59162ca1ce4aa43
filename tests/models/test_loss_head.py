"""Comparison of the custom loss head with the loss head that is built from Paddle's operators."""

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.models import loss_head
from paddle_resnet.native import build as native
from paddle_resnet.utils.meters import ConfusionMeter, TopMeter

CLASSES = [1, 2, 5, 7]


def run(add_head, classes, smoothing, is_train, feed=None, is_weighted=False, has_image_weights=False, place=None):
    """Run a loss head on random logits.

    Returns:
        ({metric: value}, program). If is_train, "gradient" is the gradient of the squared loss with respect to the
        logits.
    """
    main = static.Program()
    random = np.random.RandomState(0)
    feed = feed or {"x": random.randn(6, classes).astype("float32") * 3, "y": random.randint(0, classes, (6, 1))}
    with static.program_guard(main):
        logits = static.data("x", [None, classes])
        logits.stop_gradient = False
        weights = {"weights": static.data("w", [None, classes])} if is_weighted else {}
        if has_image_weights:
            weights["image_weights"] = static.data("v", [None, 1])
        head = add_head(logits, {"label": static.data("y", [None, 1], "int64")} | weights, classes, smoothing, is_train)
        outputs = list(head.values())
        if is_train:
            # The loss is squared, so that its gradient is not 1.
            outputs += static.gradients(head["loss"] * head["loss"], logits)
    exe = static.Executor(place or paddle.CPUPlace())
    return dict(zip([*head, "gradient"], exe.run(main, feed, outputs), strict=False)), main


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_native_head_equals_paddle_head(classes, smoothing, is_train):
    native.load()
    expected, _ = run(loss_head.add_paddle, classes, smoothing, is_train)
    result, main = run(loss_head.add_native, classes, smoothing, is_train)
    others = ["gradient"] if is_train else ["confusion", "of_softmax"]
    assert list(result) == list(expected) == ["loss", "top1", "top5", *others]
    for name, value in expected.items():
        assert result[name].shape == value.shape, name
        np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert next(op.type for op in main.global_block().ops if loss_head.contains(op)) == "native_loss"


@pytest.mark.parametrize("smoothing", [0, 0.1])
@pytest.mark.parametrize("name", ["paddle", "native"])
def test_class_weights_replace_label_in_loss(name, smoothing):
    """The reference loss and gradient are those of Szegedy et al., arXiv:1512.00567, section 7, in float64. The class
    weights are soft labels for the loss; the accuracies use the integer label."""
    if name == "native":
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    random = np.random.RandomState(0)
    x, y = random.randn(6, 7) * 3, random.randint(0, 7, (6, 1))
    weights = random.dirichlet(np.ones(7), 6)
    weights[0] = np.eye(7)[2]
    feed = {"x": x.astype("float32"), "y": y, "w": weights.astype("float32")}
    result, _ = run(getattr(loss_head, f"add_{name}"), 7, smoothing, True, feed, is_weighted=True)
    log_softmax = x - np.log(np.exp(x).sum(1, keepdims=True))
    target = (1 - smoothing) * weights + smoothing / 7
    loss = -(target * log_softmax).sum(1).mean()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    gradient = 2 * loss * (np.exp(log_softmax) - target) / 6
    np.testing.assert_allclose(result["gradient"], gradient, rtol=1e-4, atol=1e-6)
    assert result["top1"] == np.float32((x.argmax(1) == y[:, 0]).mean())


def test_balanced_weights_are_inversely_proportional_to_the_numbers_of_images():
    assert loss_head.balanced_weights(np.array([1, 0, 3])).tolist() == [2, 0, pytest.approx(2 / 3)]


HEADS = [loss_head.add_paddle, *([loss_head.add_native] if native.missing() is None else [])]


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("has_image_weights", [True, False])
@pytest.mark.parametrize("smoothing", [0, 0.1])
@pytest.mark.parametrize("add_head", HEADS, ids=["paddle", "native"][: len(HEADS)])
def test_losses_above_64_are_exact(add_head, smoothing, has_image_weights, is_weighted, is_train):
    """On a CPU, Paddle's cross entropy limits the loss of an image to about 64, but not the gradient."""
    if add_head is loss_head.add_native:
        native.load()
    x = np.array([[0, 100, 3], [1e7, -1e7, 5], [0.5, 70, -7_147_899], [1, 2, 3]], np.float32)
    y, image_weights = np.array([[0], [1], [2], [1]]), np.array([[0.5], [2], [1], [1]], np.float32)
    target = np.eye(3)[y[:, 0]]
    if is_weighted:  # a mixed image, and classes with weight 0
        target[1:3] = [[0.25, 0.75, 0], [0.5, 0, 0.5]]
    feed = {"x": x, "y": y, "w": target.astype("float32"), "v": image_weights}
    result, _ = run(add_head, 3, smoothing, is_train, feed, is_weighted, has_image_weights)
    smoothed = (1 - smoothing) * target + smoothing / 3 if is_train else target
    shifted = x.astype(np.float64) - x.max(1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    losses = -(smoothed * log_softmax).sum(1, keepdims=True)
    assert losses.max() > 1e7
    if not is_train:
        np.testing.assert_allclose(result["loss"], losses, rtol=1e-6)
        return
    factors = image_weights if has_image_weights else np.ones((4, 1))
    loss = (factors * losses).mean()
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    gradient = 2 * loss * factors * (np.exp(log_softmax) - smoothed) / 4  # run() squares the loss
    np.testing.assert_allclose(result["gradient"], gradient, rtol=1e-4, atol=1e-6 * loss)


@pytest.mark.gpu
@pytest.mark.parametrize("is_train", [True, False])
def test_paddle_head_on_gpu_equals_cpu(is_train):
    feed = {"x": np.array([[0, 100, 3], [1e7, -1e7, 5], [1, 2, 3]], np.float32), "y": np.array([[0], [1], [1]])}
    expected, _ = run(loss_head.add_paddle, 3, 0.1, is_train, feed)
    result, _ = run(loss_head.add_paddle, 3, 0.1, is_train, feed, place=paddle.CUDAPlace(0))
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("add_head", HEADS, ids=["paddle", "native"][: len(HEADS)])
def test_logit_of_class_with_weight_0_can_be_minus_infinity(add_head):
    if add_head is loss_head.add_native:
        native.load()
    feed = {"x": np.array([[1, 2, -np.inf]], "float32"), "y": np.array([[0]]), "w": np.array([[1, 0, 0]], "float32")}
    result, _ = run(add_head, 3, 0, False, feed, is_weighted=True)
    assert result["loss"].item() == pytest.approx(np.log(np.e + np.e**2) - 1)


@pytest.mark.parametrize("add_head", HEADS, ids=["paddle", "native"][: len(HEADS)])
def test_equal_and_nan_logits_are_sorted_consistently(add_head):
    """Both loss heads, the confusion counts and the predictions sort classes in the same way: by logit, with equal
    logits in class order and NaN last. An image is misclassified if the logit of its label is NaN."""
    if add_head is loss_head.add_native:
        native.load()
    random = np.random.RandomState(1)
    x = random.randint(-2, 3, (400, 7)).astype("float32")  # some logits are equal
    x[random.rand(*x.shape) < 0.1] = np.nan
    x[:20], x[20:40], x[40:60, 1:] = np.nan, 1, -np.inf
    y = random.randint(0, 7, (400, 1))
    rows = np.arange(len(x))
    order = np.argsort(-x, axis=1, kind="stable")
    order[np.isnan(x)[rows[:, None], order]] = 7  # 7 is not a class; the classes are 0 to 6
    result = {is_train: run(add_head, 7, 0, is_train, {"x": x, "y": y})[0] for is_train in (True, False)}
    for head in result.values():
        assert head["top1"] == np.float32((order[:, :1] == y).mean())
        assert head["top5"] == np.float32((order[:, :5] == y).any(1).mean())
    has_nan = np.isnan(x).any(1)
    np.testing.assert_array_equal(np.isnan(result[False]["loss"][:, 0]), has_nan)
    np.testing.assert_array_equal(
        np.isnan(result[True]["gradient"]).all(1), np.ones(len(x), bool)
    )  # all gradients are NaN, because the mean loss is NaN
    np.testing.assert_array_equal(result[False]["confusion"], np.hstack([y, order[:, :1]]))
    confusion, top = ConfusionMeter(7), TopMeter(5)
    confusion.update(result[False]["confusion"], len(x))
    top.update(x, len(x))
    np.testing.assert_array_equal(top.rows()[:, :5], order[:, :5])
    codes, counts = confusion.counts()
    assert counts.sum() == np.count_nonzero(~np.isnan(x).all(1))
    assert counts[codes % 8 == 0].sum() == np.count_nonzero(order[:, 0] == y[:, 0])


@pytest.mark.parametrize("is_train", [True, False])
def test_contains_recognizes_operators_of_head(is_train):
    main = static.Program()
    with static.program_guard(main):
        logits = paddle.mean(static.data("x", [None, 4, 3]), axis=1)
        loss_head.add_paddle(logits, {"label": static.data("y", [None, 1], "int64")}, 3, 0.1, is_train)
        paddle.scale(logits, 2.0)
    first, *head, last = main.global_block().ops
    assert all(loss_head.contains(op) for op in head)
    assert not loss_head.contains(first) and not loss_head.contains(last)
    assert (first.type, last.type) == ("reduce_mean", "scale")
