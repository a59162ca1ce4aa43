import numpy as np
import pytest

from paddle_resnet.utils import label_metrics
from paddle_resnet.utils.label_metrics import ScoreMeter, average_precision, best_threshold, evaluate


def scores(n=200, classes=5, ties=False, seed=0):
    """Return random rows [logits, labels], float32 [n, 2 * classes], with many equal logits if `ties` is set."""
    random = np.random.RandomState(seed)
    labels = random.rand(n, classes) < random.rand(classes) * 0.6
    logits = random.randn(n, classes) * 2 + labels * 1.5
    return np.hstack([np.round(logits) if ties else logits, labels]).astype("float32")


def brute_force_ap(labels, values):
    """Sum the precision times the increase of the recall over all different scores."""
    total, before = 0, 0
    for threshold in sorted(set(values), reverse=True):
        hits = np.count_nonzero(labels & (values >= threshold))
        total += (hits - before) / labels.sum() * hits / np.count_nonzero(values >= threshold)
        before = hits
    return total


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_equals_definition_and_scikit_learn(ties):
    rows = scores(ties=ties)
    values, labels = rows[:, :5], rows[:, 5:] > 0
    found = [average_precision(labels[:, c], values[:, c]) for c in range(5)]
    np.testing.assert_allclose(found, [brute_force_ap(labels[:, c], values[:, c]) for c in range(5)], rtol=1e-12)
    result = evaluate(rows)
    assert result["class_ap"] == pytest.approx(found, abs=1e-12)  # the sigmoid does not change the order
    metrics = pytest.importorskip("sklearn.metrics")
    for average in ("macro", "micro"):
        expected = metrics.average_precision_score(labels, values, average=average)
        assert result["map" if average == "macro" else "map_micro"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_precision_recall_and_f1_equal_scikit_learn():
    rows = scores()
    result = evaluate(rows)
    labels, predicted = rows[:, 5:] > 0, label_metrics.probabilities(rows[:, :5]) >= result["thresholds"]
    metrics = pytest.importorskip("sklearn.metrics")
    for average in ("macro", "weighted"):
        expected = metrics.precision_recall_fscore_support(labels, predicted, average=average)[:3]
        found = [result[f"{name}_{average}"] for name in ("precision", "recall", "f1")]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    expected = metrics.precision_recall_fscore_support(labels, predicted)
    found = [result[f"class_{name}"] for name in ("precision", "recall", "f1", "images")]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_threshold_has_highest_f1_of_all_thresholds(ties):
    rows = scores(ties=ties, seed=3)
    labels, values = rows[:, 5] > 0, label_metrics.probabilities(rows[:, 0])

    def f1(threshold):
        predicted = values >= threshold
        return 2 * np.count_nonzero(labels & predicted) / (labels.sum() + predicted.sum())

    threshold = best_threshold(labels, values)
    assert threshold not in values  # it is between two scores
    assert f1(threshold) == max(map(f1, {*values, 0}))


def test_highest_of_equally_good_thresholds_is_chosen():
    """One predicted image has the same F1 as four."""
    assert best_threshold(np.array([True, False, False, True]), np.array([0.9, 0.7, 0.5, 0.3])) == pytest.approx(0.8)
    assert best_threshold(np.array([True, True]), np.array([0.9, 0.4])) == pytest.approx(0.2)  # half of the lowest


def test_given_thresholds_are_used():
    rows = scores()
    thresholds = [0.5, 0.9, 0.1, 0.0, 1.0]
    result = evaluate(rows, thresholds)
    assert result["thresholds"] == thresholds
    predicted = (label_metrics.probabilities(rows[:, :5]) >= thresholds).sum(axis=0)
    assert result["class_predicted"] == predicted.tolist() and predicted[3] == 200


def test_class_without_images_has_no_average_precision_and_default_threshold():
    rows = scores()
    rows[:, 5 + 2] = 0
    result = evaluate(rows)
    assert np.isnan(result["class_ap"][2]) and result["thresholds"][2] == label_metrics.DEFAULT_THRESHOLD
    assert result["map"] == pytest.approx(np.nanmean(result["class_ap"]))


def test_macro_averages_include_classes_that_are_predicted_without_images():
    rows = scores()
    rows[:, 5 + 2 : 5 + 4] = 0
    result = evaluate(rows, [0.5, 0.5, 0.5, 2, 0.5])
    assert result["class_predicted"][2] > 0 == result["class_predicted"][3]
    for name in ("precision", "recall", "f1"):
        ratios = np.array(result[f"class_{name}"])
        assert ratios[2] == ratios[3] == 0
        assert result[f"{name}_macro"] == pytest.approx(ratios.sum() / 4)


def test_nan_ranks_last():
    labels = np.array([True, False, True])
    rows = np.array([[np.nan, 1], [-np.inf, 0], [0, 1]], "float32")
    assert evaluate(rows)["class_ap"] == [average_precision(labels, np.array([0, 0, 0.5]))]


def test_meter_keeps_all_rows_in_order():
    rows, meter = scores(), ScoreMeter(5)
    assert meter.rows().shape == (0, 10)
    for start in range(0, 200, 64):
        batch = rows[start : start + 64].copy()
        meter.update(batch, len(batch))
        batch[:] = 0  # the memory of a batch is reused
    np.testing.assert_array_equal(meter.rows(), rows)
    meter.reset()
    assert len(meter.rows()) == 0
