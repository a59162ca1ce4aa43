"""The command `python -m paddle_resnet.report`. tests/results/test_page.py tests the comparison and the page."""

from types import SimpleNamespace

import pytest

from helpers import NETWORK_EXAMPLE
from paddle_resnet import report
from paddle_resnet.results import page
from paddle_resnet.serving import heat_maps
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def own_network(tmp_path, monkeypatch, run_train):
    """Train a network in net.py with a learning rate that leaves errors, and return the path of the page."""
    (tmp_path / "net.py").write_text(NETWORK_EXAMPLE)
    monkeypatch.chdir(tmp_path)
    html = tmp_path / "page.html"
    assert run_train("--model-arch-name", "net.py:Net", "--lr", "1e-12", "--report-html", html)[0] == 0
    return html


@pytest.mark.slow
def test_page_runs_a_file_only_if_a_flag_names_it(own_network, tmp_path, capsys):
    assert 'alt="heat map of' in own_network.read_text()
    (tmp_path / "net.py").write_text(f"{NETWORK_EXAMPLE}\nopen('executed', 'w').close()\n")
    again = tmp_path / "again.html"
    assert report.main([str(tmp_path / "report.json"), "--html", str(again)]) == 0
    assert "No heat maps: " in again.read_text() and "--model-arch-name" in again.read_text()
    assert not (tmp_path / "executed").exists()
    (tmp_path / "net.py").write_text(NETWORK_EXAMPLE)
    flags = ["--html", str(again), "--model-arch-name", "net.py:Net"]
    assert report.main([str(tmp_path / "report.json"), *flags]) == 0
    assert again.read_text() == own_network.read_text()


@pytest.mark.slow
def test_page_has_no_heat_maps_of_a_later_run(run_train, tmp_path):
    """A later run in the same folder has replaced the checkpoint, and its network can have fewer classes."""
    first, again = tmp_path / "first.html", tmp_path / "again.html"
    run_train("--lr", "1e-12", "--report-html", first, "--report-file", tmp_path / "first.json")
    assert run_train("--lr", "1e-12", "--overwrite", "--seed", "5")[0] == 0
    assert 'alt="heat map of' in first.read_text()
    assert report.main([str(tmp_path / "first.json"), "--html", str(again)]) == 0
    text = again.read_text()
    assert 'alt="heat map of' not in text
    reason = "was written by a different run, because its evaluation differs"
    assert f"No heat maps: {tmp_path}/output/Tiny/best: {reason}" in text


def test_heat_maps_are_those_of_the_recorded_evaluation_and_of_the_network_of_the_flag(monkeypatch):
    drawers, opened = [], []
    model = SimpleNamespace(description={"evaluated": {"loss": 0.5, "top1": 0.25}})
    monkeypatch.setattr(heat_maps, "open_model", lambda *path, **options: opened.append((*path, options)) or model)
    monkeypatch.setattr(page, "write", lambda path, report_file, draw: drawers.append(draw))
    for arch, own in ((None, None), ("ResNet50", None), ("net.py:Net", "net.py:Net")):
        report.write_page("page.html", "report.json", arch)
        assert drawers[-1]("best", {"loss": 0.5}).args == (model,)
        assert opened[-1] == ("best", {"model_arch_name": own})
    with pytest.raises(UsageError, match="^best: was written by a different run, because its evaluation differs"):
        drawers[-1]("best", {"loss": 0.5, "top1": 0.5})


@pytest.mark.parametrize("flags", [[], ["other", "--html", "x.html"]], ids=["no page", "several runs"])
def test_network_without_page_of_single_run_is_an_error(flags, tmp_path, capsys):
    assert report.main([str(tmp_path), *flags, "--model-arch-name", "ResNet50"]) == 2
    message = "--model-arch-name ResNet50: requires --html and a single RUN; remove --model-arch-name"
    assert message in capsys.readouterr().err


def test_unknown_network_is_an_error(tmp_path, capsys):
    assert report.main([str(tmp_path), "--html", "x.html", "--model-arch-name", "ResNet7"]) == 2
    assert "--model-arch-name ResNet7: unknown network" in capsys.readouterr().err
