"""The start of train.py and lr_find, before Paddle is imported."""

import importlib

import pytest

from conftest import TINY
from paddle_resnet import config, startup
from paddle_resnet.machine import compat
from paddle_resnet.utils.errors import RunError, UsageError


@pytest.mark.parametrize(
    ("flags", "processes", "is_checked"),
    [([], 1, True), (["--data-format", "synthetic"], 1, False), ([], 2, False)],
)
def test_paddle_that_cannot_be_imported_is_a_failure(monkeypatch, flags, processes, is_checked):
    """A single process checks the folder of images first; with several processes, rank 0 checks the folder later."""
    calls = []
    monkeypatch.setattr(startup.layout, "check_root", calls.append)
    monkeypatch.setattr(startup, "check_environment", lambda: calls.append("environment"))
    monkeypatch.setattr(startup, "world_size", lambda: processes)
    monkeypatch.setattr(compat, "check_version", lambda: importlib.import_module("missing"))
    args = config.parse_args(["--image-root", "DIR", "--model-arch-name", "resnet-18", *flags])
    with pytest.raises(RunError, match="^Paddle or DALI: cannot be imported .No module named 'missing'.; run .*doctor"):
        startup.import_paddle(args)
    assert calls == ["environment", *(["DIR"] if is_checked else [])]
    assert args.model_arch_name == "ResNet18"


@pytest.mark.parametrize(
    "flags", [["--image-root", "/nowhere"], ["--model-arch-name", "ResNet5"], ["--model-arch-name", "nowhere.py:Net"]]
)
def test_errors_precede_the_import_of_paddle(monkeypatch, flags):
    monkeypatch.setattr(startup.progress, "phase", lambda name: pytest.fail(name))
    with pytest.raises(UsageError, match=f"^{' '.join(flags)}: "):
        startup.import_paddle(config.parse_args([*TINY, *flags]))
