"""Error messages, and commands in them."""

import sys

import pytest

from paddle_resnet.utils import errors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make "env dir/bin" the folder of the interpreter, and its parent the working directory."""
    folder = tmp_path / "env dir/bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for name in ("python", "paddle-resnet"):
        (folder / name).touch(0o755)
    return folder


@pytest.mark.parametrize("place", ["below", "on PATH", "elsewhere"])
def test_command_of_a_checkout_can_be_pasted_into_a_shell(folder, monkeypatch, place):
    monkeypatch.setattr(errors, "TRAIN", folder.parents[1] / "train.py")
    errors.TRAIN.touch()
    python, train = "'env dir/bin/python'", "train.py"
    if place == "on PATH":
        monkeypatch.setenv("PATH", str(folder))
        python = "python"
    if place == "elsewhere":
        other = folder.parents[1] / "other"
        other.mkdir()
        monkeypatch.chdir(other)
        python, train = f"'{folder}/python'", str(errors.TRAIN)
    assert errors.command("dataset", "verify", "my photos") == f"{python} -m paddle_resnet.dataset verify 'my photos'"
    assert errors.command("train", "--lr", 1) == f"{python} {train} --lr 1"
    assert [errors.program(name) for name in ("train", "dataset")] == ["train.py", "paddle_resnet.dataset"]
    assert errors.installation("onnx").endswith(" -m pip install -r requirements-onnx.txt")


@pytest.mark.parametrize("is_on_path", [True, False])
def test_command_of_an_installed_package_can_be_pasted_into_a_shell(folder, monkeypatch, is_on_path):
    monkeypatch.setattr(errors, "TRAIN", folder / "train.py")  # does not exist
    monkeypatch.setenv("PATH", str(folder) if is_on_path else "")
    script = "paddle-resnet" if is_on_path else "'env dir/bin/paddle-resnet'"
    assert errors.command("dataset", "verify", "my photos") == f"{script} dataset verify 'my photos'"
    assert errors.command("train", "--lr", 1) == f"{script} train --lr 1"
    assert [errors.program(name) for name in ("train", "dataset")] == ["paddle-resnet train", "paddle-resnet dataset"]
    assert errors.installation("onnx").endswith(" -m pip install 'paddle-resnet[onnx]'")


def test_control_characters_are_escaped():
    assert [errors.printable(text) for text in ("a 猫", "a\n\x1b猫")] == ["a 猫", r"a\n\x1b猫"]


def test_each_argument_of_usage_error_is_a_line():
    assert str(errors.UsageError("a", 1)) == "a\n1"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Traceback\n AError: x\n----\n  BError:  two\twords.\n  [Hint: none.]\n", "BError: two words"),
        ("stack\n(InvalidArgument) The shape  is wrong.\n  [Hint: none.]", "(InvalidArgument) The shape is wrong"),
        ("an Error: not at the start\n", "an Error: not at the start"),
        (" ", "RuntimeError(' ')"),
    ],
)
def test_message_of_paddle_error_is_shortened(message, expected):
    assert errors.core(RuntimeError(message)) == expected


def test_nouns_agree_with_their_numbers():
    assert [errors.counted(count, "image") for count in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [errors.counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]
