import numpy as np
import pytest

from paddle_resnet.utils import confidence


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def samples(images=5000, classes=7, factor=3.0):
    """Return (logits, labels), in which the labels follow softmax(logits / factor)."""
    random = np.random.RandomState(0)
    logits = random.randn(images, classes) * 2
    edges = softmax(logits).cumsum(axis=1)
    labels = (random.rand(images, 1) > edges).sum(axis=1).clip(max=classes - 1)
    return (logits * factor).astype(np.float32), labels


def reference_ece(probabilities, labels, bins=15):
    """Guo et al., arXiv:1706.04599, equation 3, as in the authors' code: intervals that include their upper end."""
    confidences, is_correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for low, high in zip(np.arange(bins) / bins, np.arange(1, bins + 1) / bins, strict=True):
        chosen = (confidences > low) & (confidences <= high)
        if chosen.any():
            error += chosen.mean() * abs(is_correct[chosen].mean() - confidences[chosen].mean())
    return error


@pytest.mark.parametrize("factor", [0.3, 1, 3])
def test_expected_calibration_error_matches_definition(factor):
    logits, labels = samples(factor=factor)
    probabilities = softmax(logits.astype(np.float64))
    sums = confidence.bin_sums(probabilities.max(axis=1), probabilities.argmax(axis=1) == labels)
    expected = reference_ece(probabilities, labels)
    assert confidence.expected_error(sums) == pytest.approx(expected, abs=1e-7)
    loss, error = confidence.score(logits, labels)
    assert error == confidence.expected_error(sums)
    assert loss == pytest.approx(-np.log(probabilities[np.arange(len(labels)), labels]).mean(), rel=1e-12)
    # Batches in any order have the same sums.
    order = np.random.RandomState(1).permutation(len(labels))
    parts = np.split(order, [17, 2000])
    is_correct = probabilities.argmax(axis=1) == labels
    total = sum(confidence.bin_sums(probabilities.max(axis=1)[part], is_correct[part]) for part in parts)
    np.testing.assert_array_equal(total, sums)


def test_reliability_diagram():
    sums = confidence.bin_sums(np.array([0.5, 0.52, 1.0, 1 / 15, np.nan]), np.array([True, False, True, False, True]))
    diagram = confidence.reliability(sums)
    assert diagram.shape == (confidence.BINS, 3) and diagram[:, 0].sum() == 4
    np.testing.assert_allclose(diagram[7], [2, 0.51, 0.5], atol=1e-7)
    np.testing.assert_allclose(diagram[14], [1, 1, 1])
    np.testing.assert_allclose(diagram[0], [1, 1 / 15, 0], atol=1e-7)  # intervals include their upper end
    assert np.isnan(diagram[1, 1:]).all()
    assert confidence.expected_error(sums) == pytest.approx((2 * 0.01 + 0 + 1 / 15) / 4, abs=1e-7)
    assert np.isnan(confidence.expected_error(confidence.bin_sums(np.empty(0), np.empty(0, bool))))


@pytest.mark.parametrize("factor", [0.05, 0.5, 1, 4, 50])
def test_temperature_minimizes_loss(factor):
    logits, labels = samples(factor=factor)
    fitted = confidence.fit_temperature(logits, labels)
    assert fitted.value == pytest.approx(factor, rel=0.05)  # the labels are random samples
    assert fitted == confidence.fit_temperature(logits, labels)
    assert (fitted.loss_before, fitted.ece_before) == confidence.score(logits, labels)
    assert (fitted.loss_after, fitted.ece_after) == confidence.score(logits, labels, fitted.value)
    for near in (0.999, 1.001):
        assert confidence.score(logits, labels, near * fitted.value)[0] > fitted.loss_after
    if factor != 1:
        assert fitted.ece_after < fitted.ece_before
    shifted = confidence.fit_temperature(logits[::-1] + np.float32(0), labels[::-1])
    assert shifted.value == pytest.approx(fitted.value, rel=1e-9)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        pytest.param([[1, 0], [0, 1]], [0, 1], id="all images are correct"),
        pytest.param([[1, 0], [0, 1]], [1, 0], id="all images are wrong"),
        pytest.param([[1], [2]], [0, 0], id="one class"),
        pytest.param([[1, 1], [2, 2]], [0, 1], id="equal logits"),
    ],
)
def test_no_temperature_minimizes_loss(logits, labels):
    assert confidence.fit_temperature(np.array(logits, np.float32), np.array(labels)) is None
