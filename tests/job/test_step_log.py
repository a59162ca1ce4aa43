from paddle_resnet.job import step_log


def test_figures_of_a_step_over_all_processes():
    everyone = [
        (8, {"loss": 1.0, "top1": 0.5, "ips": 100.0, "data_time": 0.1}, {"lr": 0.3}),
        (2, {"loss": 2.0, "top1": 0.0, "ips": 50.0, "data_time": 0.3}, {"lr": 0.3}),
    ]
    result = step_log.over_all(everyone)
    assert result == {"loss": 1.2, "top1": 0.4, "ips": 150.0, "data_time": 0.2, "lr": 0.3}
    assert list(result) == ["loss", "top1", "ips", "data_time", "lr"]
