"""The command `python -m paddle_resnet.report`. tests/results/test_page.py tests the comparison and the page."""

import pytest

from helpers import NETWORK_EXAMPLE
from paddle_resnet import report


@pytest.fixture
def own_network(tmp_path, monkeypatch, run_train):
    """Train a network in net.py with a learning rate that leaves errors, and return the path of the page."""
    (tmp_path / "net.py").write_text(NETWORK_EXAMPLE)
    monkeypatch.chdir(tmp_path)
    html = tmp_path / "page.html"
    assert run_train("--model-arch-name", "net.py:Net", "--lr", "1e-12", "--report-html", html)[0] == 0
    return html


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


def test_unknown_network_is_an_error(tmp_path, capsys):
    assert report.main([str(tmp_path), "--html", "x.html", "--model-arch-name", "ResNet7"]) == 2
    assert "--model-arch-name ResNet7: unknown network" in capsys.readouterr().err
