"""Error messages, and commands in them."""

import sys

import pytest

from paddle_resnet.utils import errors


@pytest.mark.parametrize(
    ("executable", "expected"), [("env dir/bin/python", "'env dir/bin/python'"), ("../x", "python")]
)
def test_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch, executable, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / executable))
    assert errors.command("dataset", "verify", "my photos") == (
        f"{expected} -m paddle_resnet.dataset verify 'my photos'"
    )


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
