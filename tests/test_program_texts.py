"""tests/program_texts.py notices a change of an operator, an input or an attribute."""

import subprocess
import sys

import paddle
import pytest
from paddle import static

import program_texts
from conftest import ROOT
from paddle_resnet.machine import compat


@pytest.fixture
def main():
    program = static.Program()
    with static.program_guard(program):
        paddle.nn.functional.relu(paddle.scale(static.data("x", [2]), 2.0))
    return program


def change_attribute(block):
    block.ops[0]._set_attr("scale", 2.0000002)


def change_input(block):
    block.ops[1].desc.set_input("X", ["x"])


def remove_operator(block):
    block._remove_op(1)


def change_variable(block):
    block.var(block.ops[1].output("Out")[0]).persistable = True


CHANGES = [change_attribute, change_input, remove_operator, change_variable]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_program_is_reported(tmp_path, capsys, main, change):
    for name in ("before", "same", "after"):
        if name == "after":
            change(main.global_block())
        (tmp_path / name).mkdir()
        (tmp_path / name / "set.paddle.main.txt").write_text(program_texts.text(main))
    folders = tmp_path / "before", tmp_path / "same", tmp_path / "after"
    assert program_texts.compare(folders[0], folders[1], None, []) == 0
    assert program_texts.compare(folders[0], folders[2], None, []) == 1
    assert "set.paddle.main.txt differs:\n" in capsys.readouterr().out
    ignored = program_texts.compare(folders[0], folders[2], None, ["scale"])
    assert ignored == (change is not change_attribute)


def test_missing_texts_are_reported(tmp_path, main):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    assert program_texts.compare(tmp_path / "before", tmp_path / "after", None, []) == 1  # nothing to compare
    (tmp_path / "before" / "set.paddle.main.txt").write_text(program_texts.text(main))
    assert program_texts.compare(tmp_path / "before", tmp_path / "after", None, []) == 1


@pytest.mark.slow
def test_texts_of_all_programs_of_two_ranks_are_written(tmp_path):
    """This set of flags includes mixed precision and accumulation."""
    script = [sys.executable, "tests/program_texts.py"]
    subprocess.run([*script, "write", tmp_path / "texts", "two_ranks_bfloat16"], cwd=ROOT, check=True)
    names = {path.name.split(".")[2] for path in (tmp_path / "texts").glob("two_ranks_bfloat16.paddle.*")}
    assert names == {"startup", "main", "evaluation", "compiled", "compiled_evaluation", "accumulating"}
    text = (tmp_path / "texts" / "two_ranks_bfloat16.paddle.compiled.txt").read_text()
    assert all(word in text for word in ("bfloat16", f" {compat.ALL_REDUCE} ", "accumulated."))
