"""The installed command paddle-resnet."""

import contextlib
import importlib
import os
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT
from paddle_resnet import __version__, cli, train


@pytest.fixture
def run(console_script, tmp_path):
    """Run paddle-resnet outside the checkout, with its folder in PATH, and return the finished process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{console_script.parent}:{os.environ['PATH']}"}

    def run(*arguments):
        command = ["paddle-resnet", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_help_has_one_line_per_command(run):
    done = run("--help")
    assert done.returncode == 0
    text = done.stdout
    commands = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == [*cli.COMMANDS]
    for name in cli.COMMANDS:
        package = ROOT / "paddle_resnet" / name
        assert package.with_suffix(".py").is_file() or (package / "__main__.py").is_file()
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


def test_version(run, capsys):
    assert run("--version").stdout == f"paddle-resnet {__version__}\n"
    with pytest.raises(SystemExit, match="^0$"):
        train.main(["--version"])
    assert capsys.readouterr().out == f"paddle-resnet {__version__}\n"


@pytest.mark.parametrize(
    ("name", "remedy"), [("lr-find", "use lr_find"), ("dataste", "use dataset"), ("--lr", "see paddle-resnet --help")]
)
def test_unknown_command_is_an_error(run, name, remedy):
    done = run(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"paddle-resnet: error: {name}: unknown command; {remedy}\n"


# Runs the commands in a single process, because starting processes takes most of the time.
HELP_OF_EACH_COMMAND = """
import sys

name, *sys.argv = sys.argv
from paddle_resnet import cli

for name in cli.COMMANDS:
    sys.argv[1:] = [name, "--help"]
    try:
        cli.main()
    except SystemExit as end:
        assert end.code in (None, 0)
    print("\\f")
"""


@pytest.mark.slow
def test_each_command_runs_its_module(console_script, capsys):
    command = [sys.executable, "-W", "ignore", "-c", HELP_OF_EACH_COMMAND, console_script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    texts = done.stdout.split("\f\n")
    for name, text in zip(cli.COMMANDS, texts[:-1], strict=True):
        module = importlib.import_module(f"paddle_resnet.{name}{'.__main__' if name == 'models' else ''}")
        with contextlib.suppress(SystemExit):
            module.main(["--help"])
        assert text.splitlines()[0] == capsys.readouterr().out.splitlines()[0]
        assert "train.py" not in text and "python -m" not in text


def test_command_exits_with_its_code(run):
    done = run("models", "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout
    assert run("models", "no_network").returncode == 2


@pytest.mark.slow
def test_remedy_of_installed_command_works_as_typed(run, photos, tmp_path):
    """The first command fails, and its error contains a command that succeeds."""
    (tmp_path / "photos").symlink_to(photos / "train")
    done = run("train", "--image-root", "photos")
    assert done.returncode == 2
    assert done.stderr.startswith("paddle-resnet train: error: --image-root photos: ")
    remedy = shlex.split(done.stderr.partition("run `")[2].partition("`")[0])
    assert remedy[:3] == ["paddle-resnet", "dataset", "split"]
    assert run(*remedy[1:]).returncode == 0
