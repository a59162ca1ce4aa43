import json
import math

import numpy as np
import pytest

from paddle_resnet.utils.errors import DataError
from paddle_resnet.utils.meters import (
    AverageMeter,
    ConfusionMeter,
    StepClock,
    TopMeter,
    average_metrics,
    class_metrics,
    latency_percentiles,
)


def test_accuracy_is_exact_over_many_float32_batches():
    random = np.random.RandomState(0)
    sizes = random.randint(1, 1025, 3000).tolist()
    correct = [random.randint(0, n + 1) for n in sizes]
    meter, rounded = AverageMeter("top1", is_ratio=True), AverageMeter("top1")
    for k, n in zip(correct, sizes, strict=True):
        accuracy = np.float32(k) / np.float32(n)
        meter.update(accuracy, n)
        rounded.update(accuracy, n)
    assert meter.sum == sum(correct)
    assert meter.count == sum(sizes)
    assert meter.sum / meter.count == sum(correct) / sum(sizes)
    assert rounded.sum != sum(correct)  # the sum is exact only with is_ratio


@pytest.mark.parametrize("is_ratio", [False, True])
def test_batches_are_weighted_by_number_of_samples(is_ratio):
    meter = AverageMeter("top1", is_ratio)
    meter.update(1.0, 3)
    meter.update(0.0, 1)
    assert meter.sum / meter.count == 0.75
    assert meter.value == 0.0


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_values_per_sample_are_averaged(shape):
    meter = AverageMeter("loss")
    meter.update(np.array([1, 2, 3, 6], dtype=np.float32).reshape(shape), 4)
    meter.update(5.0, 1)
    assert meter.sum / meter.count == 3.4
    assert meter.sum == 17.0


@pytest.mark.parametrize("value", [2.5, np.float32(2.5), np.array(2.5), np.array([2.5]), np.array([[2.5]]), [2.5]])
def test_batch_mean_may_be_a_number_or_one_element_array(value):
    meter = AverageMeter("loss")
    meter.update(value, 8)
    assert (meter.value, meter.sum, meter.count) == (2.5, 20.0, 8)


def test_float32_losses_are_summed_in_float64():
    meter = AverageMeter("loss")
    meter.update(np.float32(2**24), 1)
    for _ in range(100):
        meter.update(np.float32(1), 1)
    assert meter.sum == 2**24 + 100


def test_empty_meter_has_value_nan():
    assert math.isnan(AverageMeter("loss").value)


def test_reset_clears_meter():
    meter = AverageMeter("loss")
    meter.update(1.0, 2)
    meter.reset()
    assert math.isnan(meter.value)
    meter.update(3.0, 2)
    assert meter.sum / meter.count == 3.0


@pytest.mark.parametrize(
    ("batch_times_s", "mean", "p50", "p90", "p95", "p99"),
    [
        ([0.005, 0.001, 0.003, 0.002, 0.004], 3.0, 3.0, 4.6, 4.8, 4.96),
        ([0.01, 0.02], 15.0, 15.0, 19.0, 19.5, 19.9),
        ([i / 1000 for i in range(101)], 50.0, 50.0, 90.0, 95.0, 99.0),
        ([0.25], 250.0, 250.0, 250.0, 250.0, 250.0),
    ],
)
def test_latency_percentiles_are_interpolated_in_milliseconds(batch_times_s, mean, p50, p90, p95, p99):
    expected = dict(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99)  # noqa: C408  keyword names are clearer here
    assert latency_percentiles(batch_times_s) == pytest.approx({f"latency_{k}_ms": v for k, v in expected.items()})


def test_restored_state_continues_average():
    meter, other = AverageMeter("loss"), AverageMeter("loss")
    for value in (0.1, 0.7):
        meter.update(value, 3)
    other.restore(json.loads(json.dumps(meter.state())))
    for m in (meter, other):
        m.update(0.3, 2)
    assert (other.mean(), other.sum, other.count) == (meter.mean(), meter.sum, meter.count)


def test_consecutive_non_finite_updates_are_counted():
    meter = AverageMeter("loss")
    counts = []
    for value in (float("nan"), float("inf"), 2.0, float("nan")):
        meter.update(value, 1)
        meter.reset()
        counts.append(meter.bad_updates)
    assert counts == [1, 2, 0, 1]
    meter.excuse_update()
    assert meter.bad_updates == 0


def test_negative_ratio_is_an_invalid_label():
    with pytest.raises(DataError):
        AverageMeter("top1", is_ratio=True).update(-0.25, 4)


def test_confusion_counts_pairs_of_label_and_prediction():
    meter = ConfusionMeter(10)
    batch = np.array([[3, 4], [0, 0], [3, 4]])
    meter.update(batch, 3)
    batch[:] = 9  # the training loop may reuse the memory of a batch
    meter.update(np.array([[9, 8]]), 1)
    codes, counts = meter.counts()
    assert codes.tolist() == [0, 34, 98]
    assert counts.tolist() == [1, 2, 1]
    assert meter.labels().tolist() == [3, 0, 3, 9]
    meter.reset()
    assert [part.tolist() for part in (*meter.counts(), meter.labels())] == [[], [], []]


def test_non_finite_values_are_counted_and_not_averaged():
    meter = AverageMeter("loss")
    meter.update(float("nan"), 4)
    assert math.isnan(meter.value) and math.isnan(meter.mean())
    meter.update(np.array([1.0, np.nan, np.inf, 4.0]), 4)
    assert meter.value == 2.5
    meter.update(-1.0, 4)
    assert (meter.count, meter.mean()) == (12, 1 / 6)
    assert meter.not_finite == 6
    other = AverageMeter("loss")
    other.restore(meter.state())
    assert other.not_finite == 6
    other.restore({"sum": 1.0, "count": 4})  # from an older checkpoint
    assert other.mean() == 0.25
    meter.reset()
    assert meter.not_finite == 0


def test_confusion_omits_images_without_prediction():
    """For NaN logits, Paddle's top_k operator returns invalid class numbers, which do not count as predictions."""
    meter = ConfusionMeter(10)
    meter.update(np.array([[3, -(2**32) + 7], [0, 2**32 + 9], [3, -1], [4, 10], [3, 4]]), 5)
    codes, counts = meter.counts()
    assert (codes.tolist(), counts.tolist()) == ([34], [1])


def test_top_meter_orders_equal_logits_by_class():
    meter = TopMeter(5)
    meter.update(np.arange(1000)[None] % 3, 1)
    assert meter.rows()[0, :5].tolist() == [2, 5, 8, 11, 14]


@pytest.mark.filterwarnings("error")
def test_top_meter_accepts_logits_that_are_not_finite():
    meter = TopMeter(2)
    meter.update(np.array([[np.nan, 1.0, 2.0], [0.0, np.inf, 1.0], [-np.inf, 0.0, -np.inf]]), 3)
    nan = np.nan
    np.testing.assert_array_equal(meter.rows(), [[2, 1, nan, nan], [1, 2, nan, nan], [1, 0, 1, 0]])


def test_top_meter_returns_softmax_of_each_image():
    logits = np.array([[1, 3, 2.5], [1000, -1000, 999], [-2000, -2001, -2000.5]], np.float32)
    meter = TopMeter(2)
    meter.update(logits[:2], 2)
    meter.update(logits[2:], 1)
    assert meter.rows()[:, :2].tolist() == [[1, 2], [0, 2], [0, 2]]
    softmax = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in logits.astype("float64")]
    np.testing.assert_allclose(meter.rows()[:, 2:], -np.sort(-np.array(softmax))[:, :2], rtol=1e-12)


def test_sum_over_samples_does_not_depend_on_order():
    losses = np.random.RandomState(0).lognormal(0, 4, 50_000).astype(np.float32)
    sums = set()
    for order in (losses, losses[::-1], np.sort(losses)):
        meter = AverageMeter("loss")
        for start in range(0, len(order), 256):
            batch = order[start : start + 256]
            meter.update(batch, len(batch))
        sums.add(meter.sum)
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(losses.sum(dtype=np.float64), rel=1e-9)


def test_step_clock_measures_steps_without_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("paddle_resnet.utils.meters.perf_counter", lambda: now[0])
    clock = StepClock()

    def step(wait_s, rest_s, images):
        now[0] += wait_s
        clock.data_ready()
        now[0] += rest_s
        clock.step_done(images)

    step(1, 2, 10)
    step(3, 4, 10)
    assert clock.since_last_log() == {"ips": 2, "data_time": 2, "compute_time": 3, "batch_time": 5}
    assert clock.since_last_log() == {}
    step(0, 4, 8)
    assert clock.since_last_log() == {"ips": 2, "data_time": 0, "compute_time": 4, "batch_time": 4}
    assert clock.recent() == pytest.approx((4 / 3, 14 / 3))
    now[0] += 1
    clock.close_step()  # the metrics of the last step are available now
    now[0] += 100  # simulate writing a checkpoint
    clock.resume()
    step(1, 1, 8)
    assert clock.batch_times == [3, 7, 5, 2]
    now[0] += 2
    clock.close_step()
    step(0, 1, 8)
    assert clock.batch_times == [3, 7, 5, 4, 1]
    assert clock.images == 44
    for _ in range(19):
        step(1, 3, 8)
    assert clock.recent() == pytest.approx((19 / 20, (1 + 19 * 4) / 20))
    assert clock.images == 44 + 19 * 8
    clock.restart()
    clock.close_step()
    assert (clock.batch_times, clock.data_times, clock.images, clock.recent()) == ([], [], 0, (0, 0))


def test_precision_recall_and_f1_match_their_definitions():
    """Class 1 is predicted but never a label, class 3 is a label but never predicted, and class 4 never occurs. Like
    scikit-learn's averages, the expected averages include classes 1 and 3, but not class 4."""
    random = np.random.RandomState(0)
    labels, predictions = random.choice([0, 2, 3], 50), random.choice([0, 1, 2], 50)
    pairs, counts = np.unique(np.stack([labels, predictions], axis=1), axis=0, return_counts=True)
    confusion = np.column_stack([pairs, counts])
    metrics = class_metrics(confusion, 5)
    for c in range(5):
        hits, wrong = np.sum((labels == c) & (predictions == c)), np.sum((labels != c) & (predictions == c))
        missed = np.sum((labels == c) & (predictions != c))
        precision, recall = hits / max(1, hits + wrong), hits / max(1, hits + missed)
        f1 = 2 * precision * recall / (precision + recall) if hits else 0
        assert [metrics[name][c] for name in ("precision", "recall", "f1")] == pytest.approx([precision, recall, f1])
    averages = average_metrics(confusion, 5)
    for name in ("precision", "recall", "f1"):
        assert averages[f"{name}_macro"] == pytest.approx(metrics[name][:4].mean())
        assert averages[f"{name}_weighted"] == pytest.approx(
            np.average(metrics[name], weights=np.bincount(labels, None, 5))
        )
    assert averages["recall_weighted"] == pytest.approx(np.mean(labels == predictions))
