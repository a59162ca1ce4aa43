"""Tests of the formulas in benchmarks/scaling_model.py."""

import importlib.util
import math
from dataclasses import replace

import pytest

from conftest import ROOT

spec = importlib.util.spec_from_file_location("scaling_model", ROOT / "benchmarks/scaling_model.py")
model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model)
SETUP = model.Setup()


def test_all_reduce_time_within_and_between_nodes():
    setup = replace(SETUP, nvlink=100e9, network=10e9, latency_s=1e-3)
    assert model.all_reduce_s(setup, 1, 1e9) == 0
    assert model.all_reduce_s(setup, 2, 1e9) == pytest.approx(0.01)
    assert model.all_reduce_s(setup, 8, 1e9) == pytest.approx(2 * 7 / 8 * 0.01)
    # In a job on two nodes, the bytes also cross the network, in two hops.
    assert model.all_reduce_s(setup, 16, 1e9) == pytest.approx(2 * 7 / 8 * 0.01 + 0.1 + 2 * 1e-3)
    assert model.all_reduce_s(setup, 1024, 1e9) == pytest.approx(0.0175 + 2 * 127 / 128 * 0.1 + 2 * 7 * 1e-3)


def test_communication_within_a_node_is_exposed():
    assert model.exposed_s(SETUP, 1, 1.0) == 0
    assert model.exposed_s(SETUP, 8, 1.0) == model.all_reduce_s(SETUP, 8, SETUP.gradient_bytes) > 0


def test_steps_on_several_nodes_include_overhead_of_uncaptured_steps():
    fast_network = replace(SETUP, network=1e15, latency_s=0.0, buckets=1000)
    fitted = model.fit(fast_network, model.MEASURED)
    one, two = (model.predict(fast_network, fitted, n) for n in (8, 16))
    saved_s = one["exposed_s"] - two["exposed_s"]
    assert two["step_s"] - one["step_s"] == pytest.approx(SETUP.several_nodes_s - saved_s)


def test_overlapped_communication_between_nodes_exposes_last_bucket():
    bucket = model.all_reduce_s(SETUP, 16, SETUP.gradient_bytes / SETUP.buckets)
    assert model.exposed_s(SETUP, 16, 1.0) == pytest.approx(bucket)
    total = bucket * SETUP.buckets
    assert model.exposed_s(SETUP, 16, total / 10) == pytest.approx(total - SETUP.backward * total / 10)


@pytest.mark.parametrize(("overhead", "jitter"), [(1e-3, 0.0), (0.0, 5e-4), (1e-3, 5e-4)])
def test_fit_recovers_parameters_of_simulated_measurements(overhead, jitter):
    alone = SETUP.batch / 6873
    measured = {1: 6873.0}
    for n in (2, 4, 8):
        step = alone + model.exposed_s(SETUP, n, alone) + overhead + jitter * math.sqrt(2 * math.log(n))
        measured[n] = n * SETUP.batch / step
    fitted = model.fit(SETUP, measured)
    assert fitted == pytest.approx((alone, overhead, jitter), abs=1e-9)
    for n, ips in measured.items():
        assert model.predict(SETUP, fitted, n)["ips"] == pytest.approx(ips)


def test_best_and_worst_case_agree_if_there_are_two_measurements():
    measured = {n: model.MEASURED[n] for n in (1, 2)}
    best, worst = model.fit(SETUP, measured), model.fit_jitter(SETUP, measured)
    for n, ips in measured.items():
        for fitted in (best, worst):
            assert model.predict(SETUP, fitted, n)["ips"] == pytest.approx(ips)
    for n in model.GPUS:
        assert model.predict(SETUP, worst, n)["efficiency"] < model.predict(SETUP, best, n)["efficiency"] < 1


def test_superlinear_scaling_is_fitted_with_zero_overhead_and_jitter():
    _, overhead, jitter = model.fit(SETUP, {1: 1000.0, 2: 2100.0})
    assert (overhead, jitter) == (0, 0)


def test_efficiency_decreases_with_gpus_and_increases_with_network_speed():
    fitted = model.fit_jitter(SETUP, model.MEASURED)
    values = [model.predict(SETUP, fitted, n)["efficiency"] for n in (1, *model.GPUS)]
    assert values == sorted(values, reverse=True)
    slow = replace(SETUP, network=1.25e9)
    assert model.predict(slow, fitted, 64)["efficiency"] < model.predict(SETUP, fitted, 64)["efficiency"] / 2


def test_single_measurement_is_an_error(capsys):
    with pytest.raises(ValueError, match="on several GPUs"):
        model.fit(SETUP, {1: 6873.0})
    with pytest.raises(SystemExit):
        model.main(["--measured", "2:100"])
    assert "on several GPUs" in capsys.readouterr().err


def test_measurements_of_several_nodes_are_rejected(capsys):
    with pytest.raises(SystemExit):
        model.main(["--measured", "1:100", "16:1500"])
    assert "16 GPUs exceed the 8 GPUs of a node" in capsys.readouterr().err


def test_documented_rows_of_one_host_match_script_output(capsys):
    model.main([])
    fitted, table = capsys.readouterr().out.strip().split("\n\n")
    text = (ROOT / "docs/scaling.md").read_text()
    one_host = table[: table.index("| 64 |")]
    assert one_host in text and "| 64 |" not in text
    step, jitter = fitted.removeprefix("One-GPU step: ").split(" ms")[0], fitted.split()[-2]
    assert f"one-GPU step ({step} ms)" in text
    assert f"standard deviation of the step time: {jitter} ms" in text


def test_flags_change_the_prediction(capsys):
    model.main(["--measured", "1:1000", "2:1900", "--batch", "100", "--gpus-per-node", "4", "--file-kb", "200"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1][4] == "1,000 (measured 1,000)"
    assert rows[1][7] == "0.2 |"


def test_each_flag_sets_its_parameter(capsys):
    flags = ["--batch", "100", "--gradient-mb", "30", "--buckets", "3", "--gpus-per-node", "4", "--nvlink-gb-s", "200"]
    model.main(
        [*flags, "--network-gb-s", "2", "--latency-us", "5", "--file-kb", "200", "--measured", "2:1900", "1:1000"]
    )
    network = {"nvlink": 200e9, "network": 2e9, "latency_s": 5e-6}
    setup = model.Setup(batch=100, gradient_bytes=30e6, buckets=3, gpus_per_node=4, **network)
    table = model.table(setup, {2: 1900.0, 1: 1000.0}, file_bytes=200e3)
    assert capsys.readouterr().out == f"{table}\n"


def test_table_contains_each_number_of_gpus_once():
    lines = model.table(SETUP, {8: 60000.0, 1: 8338.0, 2: 16203.0}).splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == ["| 1", "| 2", "| 8", "| 64", "| 1024"]
