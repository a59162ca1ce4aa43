"""The loss head of --multi-label, compared with its formulas in float64."""

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.components import mixing
from paddle_resnet.models import multi_label_head
from paddle_resnet.tasks import MultiLabel

LOGITS = np.random.RandomState(0).randn(6, 4) * 4
LABELS = np.random.RandomState(1).randint(0, 2, (6, 4)).astype("float32")
CLASS_WEIGHTS = np.array([[0.5, 2, 1, 0.25]])


def run(logits, smoothing=0, asymmetric=None, is_train=True, class_weights=None, fraction=None):
    """Return {"loss", "scores"} and, in training, "gradient" of the squared loss."""
    main = static.Program()
    with static.program_guard(main):
        x = static.data("x", [None, 4])
        x.stop_gradient = False
        label = static.data("y", [None, 4])
        targets = {"label": label}
        if fraction is not None:
            targets["weights"] = mixing.mix_labels(MultiLabel(4), label, static.data("f", [1]))
        if class_weights is not None:
            targets["class_weights"] = static.data("w", [1, 4])
        head = multi_label_head.add(x, targets, smoothing, asymmetric, is_train)
        outputs = list(head.values())
        if is_train:
            outputs += static.gradients(head["loss"] * head["loss"], x)
    feed = {"x": logits.astype("float32"), "y": LABELS}
    feed |= {} if class_weights is None else {"w": class_weights.astype("float32")}
    feed |= {} if fraction is None else {"f": np.array([fraction], "float32")}
    return dict(zip([*head, "gradient"], static.Executor(paddle.CPUPlace()).run(main, feed, outputs), strict=False))


def reference(logits, targets, asymmetric=None, class_weights=1.0):
    """Return the loss of each image, float64 [N], from the formulas in multi_label_head.add."""
    p = 1 / (1 + np.exp(-logits))
    negative_focusing, positive_focusing, margin = asymmetric or (0, 0, 0)
    q = np.maximum(p - margin, 0)
    positive = -((1 - p) ** positive_focusing) * np.log(p)
    negative = -(q**negative_focusing) * np.log(1 - q)
    return (class_weights * targets * positive + (1 - targets) * negative).sum(axis=1)


@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("fraction", [None, 0.7])
@pytest.mark.parametrize("asymmetric", [None, [4, 0, 0.05], [4, 1, 0.05], [0, 0, 0], [2, 1.5, 0]])
@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_loss_and_gradient_equal_formulas(smoothing, asymmetric, fraction, class_weights):
    result = run(LOGITS, smoothing, asymmetric, class_weights=class_weights, fraction=fraction)
    targets = LABELS.astype("float64")
    if fraction is not None:
        targets = targets * fraction + targets[::-1] * (1 - fraction)
    targets = targets * (1 - smoothing) + smoothing / 2
    weights = 1.0 if class_weights is None else class_weights

    def loss(logits):
        return reference(logits, targets, asymmetric, weights).mean()

    np.testing.assert_allclose(result["loss"], loss(LOGITS), rtol=1e-5)
    steps = 1e-5 * np.eye(LOGITS.size).reshape(-1, *LOGITS.shape)
    slopes = np.array([(loss(LOGITS + d) ** 2 - loss(LOGITS - d) ** 2) / 2e-5 for d in steps])
    np.testing.assert_allclose(result["gradient"], slopes.reshape(LOGITS.shape), rtol=1e-3, atol=1e-5)


def test_evaluation_has_binary_cross_entropy_of_each_image_and_scores():
    """Smoothing and the asymmetric loss are for training only."""
    result = run(LOGITS, 0.1, [4, 0, 0.05], is_train=False)
    np.testing.assert_allclose(result["loss"][:, 0], reference(LOGITS, LABELS), rtol=1e-5)
    np.testing.assert_array_equal(result["scores"], np.hstack([LOGITS.astype("float32"), LABELS]))


@pytest.mark.parametrize("asymmetric", [None, [4, 0, 0.05], [2, 1, 0]])
@pytest.mark.parametrize("scale", [30, 1e4])
def test_large_logits_have_finite_losses_and_gradients(scale, asymmetric):
    result = run(LOGITS * scale, asymmetric=asymmetric)
    assert np.isfinite(result["loss"]).all() and np.isfinite(result["gradient"]).all()


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("asymmetric", [None, [4, 0, 0.05]])
def test_nan_logit_makes_loss_of_its_image_nan(asymmetric, is_train):
    logits = LOGITS.copy()
    logits[2, 1] = np.nan
    loss = run(logits, asymmetric=asymmetric, is_train=is_train)["loss"]
    assert np.isnan(loss).reshape(-1).tolist() == ([True] if is_train else [False, False, True, False, False, False])


def test_mean_over_mirrored_is_logit_of_mean_probability():
    logits = np.vstack([LOGITS, LOGITS[::-1] * 10]).astype("float32")
    main = static.Program()
    with static.program_guard(main):
        mean = multi_label_head.mean_over_mirrored(static.data("x", [None, 4]))
        probabilities = multi_label_head.probabilities(mean)
    found = static.Executor(paddle.CPUPlace()).run(main, {"x": logits}, [mean, probabilities])
    assert [value.shape for value in found] == [(6, 4)] * 2
    expected = (1 / (1 + np.exp(-logits.astype("float64")))).reshape(2, 6, 4).mean(axis=0)
    np.testing.assert_allclose(found[1], expected, rtol=1e-5)
    np.testing.assert_allclose(found[0], np.log(expected) - np.log1p(-expected), rtol=1e-4, atol=1e-5)
