"""Step metrics, which are combined over the processes of a job."""

import math

import pytest

from paddle_resnet.job import exchange, processes, step_log


def test_step_metrics_are_combined_over_processes():
    all_ranks = [
        (8, {"loss": 1.0, "top1": 0.5, "ips": 100.0, "data_time": 0.1, "batch_time": 0.25}, {"lr": 0.3}),
        (2, {"loss": 2.0, "top1": 0.0, "ips": 50.0, "data_time": 0.3, "batch_time": 0.75}, {"lr": 0.3}),
    ]
    result = step_log.over_all(all_ranks)
    assert result == {"loss": 1.2, "top1": 0.4, "ips": 150.0, "data_time": 0.2, "batch_time": 0.5, "lr": 0.3}
    assert list(result) == ["loss", "top1", "ips", "data_time", "batch_time", "lr"]
    all_ranks[1][1]["loss"] = math.inf
    assert step_log.over_all(all_ranks)["loss"] == 1
    all_ranks[0][1]["loss"] = math.nan
    assert math.isnan(step_log.over_all(all_ranks)["loss"])


def test_single_process_logs_immediately():
    logged = []
    log = step_log.StepLog(lambda *line: logged.append(line))
    log.add(3, 8, {"loss": 1.0}, {"lr": 0.3})
    log.finish()
    assert logged == [(3, {"loss": 1.0, "lr": 0.3})]


@pytest.fixture
def stream(monkeypatch):
    """A fake stream of rank 0 in a job of two processes. Tests set the batches that rank 1 has sent."""

    class Stream:
        batches = []  # noqa: RUF012

        def add(self, item):
            return [[item], self.batches.pop(0)]

        def finish(self):
            return [[], self.batches.pop(0)]

    monkeypatch.setattr(exchange, "Stream", Stream)
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    return Stream


def test_steps_are_logged_when_all_processes_have_reported(stream):
    """Each step is logged exactly once and in order, even if a batch arrives twice. At the end of an epoch, steps are
    logged even if only some processes have reported them."""
    remote = [[step, 8, {"loss": 3.0 + step}, {}] for step in range(5)]
    stream.batches = [[], remote[:1], remote[1:4], remote[1:]]
    logged = []
    log = step_log.StepLog(lambda step, metrics: logged.append((step, metrics["loss"])))
    for step, expected in ((0, 0), (1, 1), (2, 3)):
        log.add(step, 8, {"loss": 1.0 + step}, {})
        assert len(logged) == expected
    log.finish()
    assert logged == [(0, 2), (1, 3), (2, 4), (3, 6), (4, 7)]
