"""Checkpoints of earlier versions, written by tests/frozen.py, continue to work."""

import json
import shutil

import paddle
import pytest

import frozen
from conftest import ROOT
from paddle_resnet import export, predict, train
from paddle_resnet.machine import cpu

FOLDERS = sorted((ROOT / "tests/goldens").glob("version_*"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def expected(request, tmp_path, monkeypatch):
    """Copy the frozen files into the working directory, and return the expected results."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    frozen.write_images(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    return json.loads((tmp_path / "expected.json").read_text())


def same(results, tmp_path):
    """Return the results for a comparison with ==. The results are exact with the tested versions of Paddle, if the CPU
    has the same vector instructions as the writer's CPU; otherwise, the order of additions can differ."""
    meta = json.loads((tmp_path / "checkpoint/meta.json").read_text())
    is_exact = paddle.__version__ in ("2.6.2", "3.3.1") and meta["cpu"] == cpu.arithmetic()
    return results if is_exact else pytest.approx(results, rel=1e-4)


def test_resumed_run_has_recorded_losses(expected, tmp_path):
    shutil.copytree("checkpoint", f"output/Net/1_{frozen.FIRST}")
    assert train.main([*frozen.TRAIN, "--resume"]) == 0
    results = frozen.after_checkpoint(frozen.read_report(tmp_path / "report.json"))
    assert results["losses"] == same(expected["losses"], tmp_path)
    assert results["evaluation"] == same(expected["evaluation"], tmp_path)


def test_evaluation_has_recorded_loss(expected, tmp_path):
    # The recorded loss is that of Paddle's kernels.
    assert train.main([*frozen.EVALUATE, "--kernels", "paddle"]) == 0
    assert frozen.read_report(tmp_path / "report.json")["1"] == same(expected["checkpoint"], tmp_path)


def test_export_has_recorded_probabilities(expected, tmp_path, capsys):
    assert export.main(frozen.EXPORT) == 0
    capsys.readouterr()
    assert predict.main(frozen.PREDICT) == 0
    results = frozen.read_predictions(capsys.readouterr().out.splitlines())
    assert results.keys() == expected["probabilities"].keys()
    for image, probabilities in expected["probabilities"].items():
        assert results[image] == same(probabilities, tmp_path)
