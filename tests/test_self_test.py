"""The self-test of doctor, on this machine and with simulated problems."""

import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
from PIL import Image

from conftest import ROOT
from paddle_resnet import config, doctor, self_test
from paddle_resnet.machine import compat, cpu
from paddle_resnet.native import build as native
from paddle_resnet.utils.children import Row

pytestmark = pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="goldens are those of a CPU build")
ARITHMETIC = [paddle.__version__, "cpu", cpu.arithmetic()["instructions"]]
GOLDENS = json.loads(self_test.GOLDENS.read_text())


@pytest.mark.soak
def test_self_test_passes_on_healthy_machine(tmp_path):
    """The command of the warning for a newer version of Paddle, in a folder other than the checkout."""
    (tmp_path / "sitecustomize.py").write_text("import paddle_resnet, paddle\npaddle.__version__ = '3.4.0'\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "paddle_resnet.doctor", "--self-test", "--json", "--output-dir", "output"]
    options = {"capture_output": True, "text": True, "timeout": 500, "cwd": tmp_path}
    done = subprocess.run(command, **options, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["Paddle"]["status"] == "note" and "doctor --self-test" in rows["Paddle"]["remedy"]
    names = ["CPU, Paddle's kernels", "CPU, custom kernels", "resume (CPU, custom kernels)"]
    names += ["export (CPU, custom kernels)", "two processes"]
    assert [rows[name]["status"] for name in names] == ["ok"] * len(names)
    # The version is not recorded, so small differences are accepted.
    for name in (names[0], names[1], names[4]):
        assert rows[name]["detail"] == "losses are identical" or rows[name]["detail"].endswith("(limit 0.0001)")
    assert rows["resume (CPU, custom kernels)"]["detail"] == "losses are identical"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sitecustomize.py"]


@pytest.fixture
def data(tmp_path):
    self_test.write_images(tmp_path / "data")
    return tmp_path


def test_losses_of_tested_versions_agree_for_both_kinds_of_kernels():
    versions = [".".join(map(str, version)) for version in (compat.LOWEST, compat.HIGHEST)]
    assert list(GOLDENS) == versions
    first = GOLDENS[versions[0]]["losses"]
    for version in versions:
        for name, losses in GOLDENS[version]["losses"].items():
            assert len(losses) == self_test.STEPS
            np.testing.assert_allclose(losses, first[name], rtol=1e-5)
        assert losses[-1] < losses[0] / 1.5
        np.testing.assert_allclose(first["native"], first["paddle"], rtol=1e-5)


def test_random_changes_of_images_have_no_effect(data):
    paths = sorted(data.glob("data/*/*/*.png"))
    assert len(paths) == sum(self_test.IMAGES.values())
    for path in paths:
        pixels = np.asarray(Image.open(path))
        assert pixels.shape == (32, 32, 3) and (pixels == pixels[:, ::-1]).all()


def test_each_run_starts_once_although_a_run_fails(in_children, tmp_path):
    """The child processes simulate the runs. test_failed_run_does_not_stop_the_others trains."""
    report = "DLLL " + json.dumps({"type": "LOG", "step": [0, 0], "data": {"train.loss": 1.0}}) + "\n"
    in_children(
        "import json, os, sys\n"
        "for flags in json.loads(sys.orig_argv[-1]):\n"
        "    output = flags[flags.index('--output-dir') + 1]\n"
        "    os.makedirs(output + '/Net/1')\n"  # fails if a run starts twice
        "    if output.endswith('bad'):\n"
        "        print('error: bad', file=sys.stderr, flush=True)\n"
        "        os._exit(2)\n"
        "    with open(flags[flags.index('--report-file') + 1], 'w') as file:\n"
        f"        file.write({report * self_test.STEPS!r})\n"
        "os._exit(0)\n"
    )
    names = ["first", "bad", "second", "third"]
    answers = self_test._train(tmp_path, [self_test.Run(name, [], "paddle", "CPU", "") for name in names])
    trained = [1.0] * self_test.STEPS, None
    assert answers == dict.fromkeys(names, trained) | {"bad": ([], "error: bad")}


@pytest.mark.slow
def test_failed_run_does_not_stop_the_others(data):
    """A child process trains the runs after the failed one. The runs before and after it, which include custom kernels
    if they can be built, have the recorded losses."""
    [[first, *others]] = self_test.plan("cpu", native.missing() is None)
    remedy = "use --kernels paddle"
    unusable = self_test.Run("unusable", ["--device", "none"], "paddle", "CPU", remedy)
    runs = [first, unusable, *(others or [self_test.Run("last", first.flags, "paddle", "CPU", "")])]
    answers = self_test._train(data, runs)
    golden, is_exact = self_test._golden(ARITHMETIC)
    rows = [self_test._compared(run, *answers[run.what], golden[run.golden], is_exact, {}) for run in runs]
    assert [row.status for row in rows] == ["ok", "no", "ok"], rows
    assert rows[1].remedy == remedy
    assert "error: " in rows[1].detail and "--device" in rows[1].detail


@pytest.mark.parametrize(("error", "status"), [(0.0, "ok"), (1e-15, "no")])
def test_resumed_losses_must_equal_those_of_the_second_epoch(in_children, tmp_path, error, status):
    """test_self_test_passes_on_healthy_machine resumes a real run."""
    losses = [2.0 - 0.1 * step for step in range(self_test.STEPS)]
    entries = [
        {"type": "LOG", "step": [1, step], "data": {"train.loss": loss + error}}
        for step, loss in enumerate(losses[self_test.STEPS // 2 :])
    ]
    lines = "".join(f"DLLL {json.dumps(entry)}\n" for entry in entries)
    in_children(
        "import json, os, sys\n[flags] = json.loads(sys.orig_argv[-1])\n"
        f"start = ['--from-checkpoint', {str(tmp_path / 'first/Net')!r}, '--last-epoch-of-checkpoint', '0']\n"
        "if flags[flags.index(start[0]) :][:4] != start:\n    os._exit(1)\n"
        "with open(flags[flags.index('--report-file') + 1], 'w') as file:\n"
        f"    file.write({lines!r})\n"
        "os._exit(0)\n"
    )
    first = self_test.Run("first", [], "paddle", "CPU", "")
    row = self_test._resume(tmp_path, first, {"first": losses})
    assert row.status == status and row.detail.startswith("losses ")


@pytest.mark.parametrize(
    ("losses", "is_exact", "works"),
    [
        ([2.0, 1.0], True, True),
        ([2.0, 1.0001], True, False),
        ([2.0, 1.0001], False, True),
        ([2.0, 1.001], False, False),
        ([2.0, float("nan")], False, False),
        ([2.0], False, False),
    ],
)
def test_losses_are_compared_exactly_or_within_the_limit(losses, is_exact, works):
    run = self_test.Run("run", [], "paddle", "CPU", "use --kernels paddle")
    row = self_test._compared(run, losses, None, [2.0, 1.0], is_exact, {})
    assert (row.status, row.remedy) == (("ok", "") if works else ("no", "use --kernels paddle"))


def test_captured_steps_must_equal_uncaptured_steps():
    run = self_test.Run("captured", [], "native", "AMP O2", "use --cuda-graph false", "uncaptured")
    for other, status in ((1.0, "ok"), (1.0001, "no")):
        row = self_test._compared(run, [2.0, 1.0], None, [2.0, 1.01], False, {"uncaptured": [2.0, other]})
        assert row.status == status
        assert row.detail.startswith("losses differ by 0.005 (limit 0.02); ")


def test_losses_are_exact_only_for_the_recorded_version_build_and_cpu():
    for version, golden in GOLDENS.items():
        assert self_test._golden(golden["arithmetic"]) == (golden["losses"], True)
        for change in ([version, "cuda", golden["arithmetic"][2]], [version, "cpu", "avx"]):
            assert self_test._golden(change) == (golden["losses"], False)
    assert self_test._golden(["3.4.0", *ARITHMETIC[1:]]) == (GOLDENS["3.3.1"]["losses"], False)


def test_each_precision_and_kind_of_kernels_is_tested_on_a_gpu():
    groups = self_test.plan("gpu", True)
    assert [[run.what for run in group] for group in groups] == [
        ["CPU, Paddle's kernels", "CPU, custom kernels"],
        *(
            [f"{name}, Paddle's kernels", f"{name}, custom kernels", f"{name}, custom kernels, captured"]
            for name in ("float32", "AMP O1", "AMP O2")
        ),
    ]
    captured = groups[3][2]
    assert captured.twin == "AMP O2, custom kernels" and captured.remedy == "use --cuda-graph false"
    assert captured.flags[-2:] == ["--cuda-graph", "true"] and "O2" in captured.flags
    assert [len(group) for group in self_test.plan("gpu", False)] == [1] * 4
    assert [len(group) for group in self_test.plan("cpu", False)] == [1]
    for group in groups:
        for run in group:
            config.parse_args([*self_test.FLAGS, *run.flags])
            assert run.golden in GOLDENS["3.3.1"]["losses"] and run.bound in self_test.BOUNDS


@pytest.mark.slow
@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("gpu", 1), ("gpu", 2)])
@pytest.mark.parametrize("missing", [None, "no compiler"])
def test_every_check_has_a_row(in_children, tmp_path, device, gpus, missing):
    """All child processes fail."""
    calls = tmp_path / "calls"
    in_children(
        f"import os, sys\nwith open({str(calls)!r}, 'a') as file:\n    print('call', file=file)\n"
        "print('Traceback\\nValueError: x', file=sys.stderr, flush=True)\nos._exit(1)\n"
    )
    rows = {row.what: row for row in self_test.checks(device, missing, gpus, ARITHMETIC)}
    runs = [run for group in self_test.plan(device, missing is None) for run in group]
    assert [(rows[run.what].detail, rows[run.what].remedy) for run in runs] == [
        ("ValueError: x", run.remedy) for run in runs
    ]
    assert rows["resume"].status == rows["export"].status == "no"
    assert rows["two processes"].status == ("note" if gpus == 1 else "no")
    assert ("custom kernels" in rows) == (missing is not None)
    assert len(calls.read_text().splitlines()) == len(runs) + (gpus != 1)


def test_failed_check_gives_exit_code_1(monkeypatch, capsys, tmp_path):
    facts = {"device": "cpu", "rows": [], "trains": True, "missing": None, "capabilities": [], "arithmetic": ARITHMETIC}
    monkeypatch.setattr(doctor, "_in_child", lambda function: (facts, None))
    for status, code, message in (("note", 0, "passed"), ("no", 1, "failed")):
        monkeypatch.setattr(self_test, "checks", lambda *_, status=status: iter([Row("resume", "x", status)]))
        assert doctor.main(["--self-test", "--output-dir", str(tmp_path)]) == code
        assert capsys.readouterr().out.endswith(f"the self-test {message}\n")


if __name__ == "__main__":  # record the losses of this machine
    self_test.record(ARITHMETIC)
