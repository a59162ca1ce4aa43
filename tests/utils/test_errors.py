"""Commands in error messages."""

import sys

import pytest

from utils import errors


@pytest.mark.parametrize(
    ("executable", "expected"), [("env dir/bin/python", "'env dir/bin/python'"), ("../x", "python")]
)
def test_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch, executable, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / executable))
    assert errors.command("dataset", "verify", "my photos") == (
        f"{expected} -m paddle_resnet.dataset verify 'my photos'"
    )
