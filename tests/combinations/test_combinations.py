"""The table of the combination tests is complete, and its rows succeed; see run.py."""

import os
import re
import subprocess
import sys

import pytest

import axes
import conflicts
import exports
import generate
import run as combinations
from conftest import ROOT
from paddle_resnet.machine import compat
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings.declarations import ACTIONS
from paddle_resnet.settings.values import flag_name

VALUES = [flags for values in (*axes.AXES.values(), *axes.GPU_AXES.values()) for flags in values.values()]
REMEDY = "run python tests/combinations/generate.py"


def test_every_flag_is_in_an_axis_or_changes_nothing():
    combined = {word for flags in VALUES for word in flags if word.startswith("--")}
    unchanged = {flag_name(name) for name in axes.UNCHANGED}
    assert unchanged <= set(map(flag_name, ACTIONS))
    assert combined | unchanged == set(map(flag_name, ACTIONS)), "add the flag to an axis or to UNCHANGED in axes.py"
    assert not combined & unchanged


@pytest.mark.parametrize("name", [n for n, action in ACTIONS.items() if action.choices and n not in axes.UNCHANGED])
def test_every_choice_is_in_an_axis(name):
    action = ACTIONS[name]
    combined = {flags[flags.index(flag_name(name)) + 1] for flags in VALUES if flag_name(name) in flags}
    elsewhere = {"run_scope": {"eval_only"}, "dali_device": {"gpu"}}.get(name, set())  # set by checks.py; the default
    # A flag that is not set has its default.
    defaults = {action.default, *({"paddle"} if name == "kernels" else ())}
    assert set(action.choices) <= combined | elsewhere | defaults
    assert set(OPTIMIZERS) == set(axes.AXES["optimizer"])


def test_conflicts_are_values_of_axes():
    for pair in conflicts.PAIRS:
        assert {*pair.values} <= {*axes.AXES[pair.axis]} and {*pair.others} <= {*axes.AXES[pair.other_axis]}


def test_table_has_the_values_of_the_axes():
    rows = generate.read()
    for row in rows:
        assert list(row) == list(axes.AXES), REMEDY
        assert all(value in axes.AXES[axis] for axis, value in row.items()), REMEDY


def test_table_covers_every_pair_without_conflicts():
    covered = generate.covered(generate.read())
    assert not generate.pairs() - covered, REMEDY
    assert not covered & conflicts.conflicting().keys(), REMEDY


@pytest.mark.slow
def test_table_is_generated():
    pytest.importorskip("allpairspy")
    assert generate.read() == generate.generate(), REMEDY


def test_durations_of_parts_are_read_and_added(tmp_path):
    file = tmp_path / "parts"
    assert combinations.read_parts(file) == {}
    file.write_text("reference 6.0+2.2\nresumed 5.0\nresumed 1.0+2.0\nexport ")
    parts = combinations.read_parts(file)
    assert parts == {"reference": [6.0, 2.2], "resumed": [6.0, 2.0], "export": []}
    assert combinations.describe(parts) == "reference 6.0+2.2, resumed 6.0+2.0, export unfinished"
    assert combinations.total([parts, {"export": [1.5]}, {"reference": [1.0]}])["reference"] == [7.0, 2.2]


def test_rows_on_a_gpu_include_each_network_precision_and_export():
    """With --rows 1/2. The export of a row depends on its number, and every seventh of these rows is exported."""
    rows = [*enumerate(generate.read())][::2]
    assert {values["network"] for _, values in rows} == {*axes.AXES["network"]}
    assert {axes.gpu_values(*row)["precision"] for row in rows} == {*axes.GPU_AXES["precision"]}
    for values in (*exports.EXPORTS.values(), exports.PREDICTIONS):
        assert {exports.turn(number) % len(values) for number, _ in rows[::7]} == {*range(len(values))}


def run(*arguments, timeout):
    """Run rows in processes that import Paddle once, and check that all succeed. Return the output."""
    command = [sys.executable, "tests/combinations/run.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_output_contains_duration_of_each_part():
    output = run("--rows", "0", "--processes", 1, "--limit-s", 250, timeout=300)
    [line] = re.findall(r"^ +0 +[\d.]+ s  ok  \[(.*)\]$", output, re.MULTILINE)
    runs = "reference S+S, stopped S+S, resumed S+S, evaluated S, other S, benchmark S+S, export S, predict S"
    assert re.sub(r"\d+\.\d", "S", line) == runs


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_rows_and_conflicts():
    run("--processes", len(os.sched_getaffinity(0)), "--limit-s", 1200, timeout=1250)


@pytest.mark.soak
@pytest.mark.timeout(1300)
@pytest.mark.skipif(not compat.IS_PADDLE_3, reason="Paddle 2.6 has no PIR programs")
def test_rows_with_pir_programs():
    rows = [str(number) for number, values in enumerate(generate.read()) if axes.has_pir(number, values)]
    flags = ["--processes", len(os.sched_getaffinity(0)), "--row-limit-s", 200, "--limit-s", 1200]
    run("--rows", ",".join(rows), *flags, timeout=1250)


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_rows_of_jobs_with_two_processes():
    run("--rows", "1/10", "--ranks", 2, "--processes", 1, "--limit-s", 600, timeout=650)
