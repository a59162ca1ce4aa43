"""Tests of `make venv` with a fake Python that only records the pip commands."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_resnet.machine import driver
from paddle_resnet.utils import errors

ROOT = Path(__file__).parents[1]
# A fake Python that replaces the system's Python and the one in .venv. A file named `packages` replaces site-packages.
PYTHON = r"""#!/bin/bash
set -eu
packages=$(dirname "$0")/packages
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; touch "$3/bin/pip" ;;
    "-m pip list"*) cat $packages 2>/dev/null || true ;;
    *" install -r "*) echo "requirements" >> calls; cp "${@: -1}" requirements.installed ;;
    *" install nosuch"*) exit 1 ;;
    *" install "*) all="$*"; echo "install ${all##* install }" >> calls; for word in "$@"; do
        case "$word" in paddlepaddle*) echo "$word" > $packages ;; esac; done ;;
    *" uninstall "*) echo "uninstall" >> calls; rm $packages ;;
    *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Run `make` with copies of the files that it reads, and return (pip commands, output of make)."""
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments):
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        command = ["make", "--no-print-directory", f"PYTHON={python}", "HAS_GPU=", *arguments]
        # The make under test must not inherit variables from the make process that runs the tests.
        of_make = ("PADDLE", "PADDLE_WORDS", "VENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        environment = {name: value for name, value in os.environ.items() if name not in of_make}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return calls.read_text().splitlines() if calls.exists() else [], done.stdout

    return run


def test_make_venv_installs_once(make, tmp_path):
    calls, output = make("venv")
    assert calls == ["requirements", "install paddlepaddle==2.6.2"]
    assert "about 2 GB" in output
    requirements = (tmp_path / "requirements.installed").read_text()
    assert "nvidia-dali" in requirements and "paddlepaddle=" not in requirements
    calls, output = make("venv")
    assert calls == [] and "Nothing to be done" in output


def test_make_venv_installs_gpu_requirements(make, tmp_path):
    calls, _ = make("venv", "HAS_GPU=yes")
    assert calls == ["requirements", "install paddlepaddle-gpu==2.6.2"]
    requirements = (tmp_path / "requirements.installed").read_text()
    assert "nvidia-ml-py" in requirements and "nvidia-cudnn-cu11" in requirements and "numpy<2" in requirements


@pytest.mark.parametrize(
    ("paddle", "is_2_6"),
    [
        ("2.6.2", True),
        ("paddlepaddle-gpu==2.6.2.post120 -i URL", True),
        ("3.3.1 -i URL", False),
        ("paddlepaddle>=3,<4", False),
    ],
)
def test_requirements_of_paddle_2_6_are_omitted_for_other_versions(make, tmp_path, paddle, is_2_6):
    make("venv", f"PADDLE={paddle}", "HAS_GPU=yes")
    requirements = (tmp_path / "requirements.installed").read_text()
    assert ("numpy<2" in requirements) == ("nvidia-cudnn-cu11" in requirements) == is_2_6
    assert "nvidia-dali" in requirements and "numpy>=1.26" in requirements


@pytest.mark.parametrize(
    ("capability", "package"), [((8, 6), "paddlepaddle-gpu==2.6.2"), ((9, 0), "paddlepaddle-gpu==3.3.1 -i URL")]
)
def test_printed_command_replaces_cpu_build_with_gpu_build(make, capability, package):
    command = re.search(r"make (venv PADDLE=(\".+\"|\S+\b))", driver.installation(capability))[1]
    make("venv", "PADDLE=2.6.2")  # a CPU build
    assert make(*shlex.split(command), "HAS_GPU=yes")[0] == ["requirements", "uninstall", f"install {package}"]


def obey(command, folder):
    """Run a command in a shell on a machine without a GPU, and return the pip commands."""
    (folder / "calls").unlink(missing_ok=True)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), "MAKEFLAGS": "-- HAS_GPU="}
    subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, timeout=60, check=True)
    return (folder / "calls").read_text().splitlines()


def printed(folder, extra, env):
    """Return errors.installation(extra) in a checkout in `folder` and in a virtual environment in `env`."""
    code = "from paddle_resnet.utils import errors; print(errors.installation(__import__('sys').argv[1]))"
    (folder / "paddle_resnet/utils").mkdir(parents=True, exist_ok=True)
    shutil.copy(errors.__file__, folder / "paddle_resnet/utils")
    python = env / "bin/own-python"
    python.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        python.symlink_to(sys.executable)
        (env / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    environment = {"PYTHONPATH": str(folder)}
    done = subprocess.run([python, "-c", code, extra], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".venv", ".venv/paddle3"])
@pytest.mark.parametrize("paddle", ["", "3.3.1"])
def test_printed_command_repairs_environment_and_keeps_paddle(make, tmp_path, folder, paddle):
    make("venv", f"VENV={folder}", *([f"PADDLE={paddle}"] if paddle else []))
    (tmp_path / "train.py").touch()
    assert obey(printed(tmp_path, "cpu", tmp_path / folder), tmp_path) == ["requirements"]
    (tmp_path / folder / "bin/packages").unlink()
    install = f"install paddlepaddle=={paddle or '2.6.2'}"
    assert obey(printed(tmp_path, "cpu", tmp_path / folder), tmp_path) == ["requirements", install]


@pytest.mark.parametrize(
    ("installed", "pin"),
    [
        (None, "paddlepaddle-gpu==2.6.2"),
        ("paddlepaddle-gpu==2.6.2", "paddlepaddle-gpu==2.6.2"),
        ("paddlepaddle==2.6.2", "paddlepaddle==2.6.2"),
        ("paddlepaddle-gpu==2.6.2.post120", None),
        ("paddlepaddle==3.3.1", None),
    ],
)
def test_printed_command_keeps_paddle_of_other_environments(make, tmp_path, installed, pin):
    env = tmp_path / "own"
    if installed:
        name, version = installed.split("==")
        packages = env / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
        info.parent.mkdir(parents=True)
        info.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "train.py").touch()
    command = printed(tmp_path, "gpu", env)
    (tmp_path / "train.py").unlink()  # simulate an installed package
    extra = {"paddlepaddle-gpu==2.6.2": "'paddle-resnet[gpu]'", "paddlepaddle==2.6.2": "'paddle-resnet[cpu]'"}
    assert printed(tmp_path, "gpu", env).endswith(f" -m pip install {extra.get(pin, 'paddle-resnet')}")
    (env / "bin/own-python").unlink()
    shutil.copy(tmp_path / "python", env / "bin/own-python")  # the fake Python must obey the command
    assert obey(command, tmp_path) == ["requirements"]
    lines = (tmp_path / "requirements.installed").read_text().splitlines()
    assert [line for line in lines if line.startswith("paddlepaddle")] == ([pin] if pin else [])


def test_version_number_means_a_gpu_build_on_a_machine_with_a_gpu(make, tmp_path):
    make("venv", "PADDLE=2.6.2")
    replaced = ["requirements", "uninstall", "install paddlepaddle-gpu==2.6.2"]
    assert make("venv", "PADDLE=2.6.2", "HAS_GPU=yes")[0] == replaced
    install = "install paddlepaddle-gpu==3.3.1 -i URL"
    assert make("venv", "PADDLE=3.3.1 -i URL", "HAS_GPU=yes")[0] == ["requirements", "uninstall", install]
    assert make("venv", "HAS_GPU=yes")[0] == []
    install = "install paddlepaddle==3.3.1"
    assert make("venv", "PADDLE=paddlepaddle==3.3.1", "HAS_GPU=yes")[0] == ["requirements", "uninstall", install]


def test_gpu_build_of_paddle_3_requires_an_index(make, tmp_path):
    make("venv", "HAS_GPU=yes")
    with pytest.raises(AssertionError, match=r"error: PADDLE=3.3.1: GPU builds .*; use PADDLE=\"3.3.1 -i URL\" .*, or"):
        make("venv", "PADDLE=3.3.1", "HAS_GPU=yes")
    assert (tmp_path / ".venv/bin/packages").read_text() == "paddlepaddle-gpu==2.6.2\n"


def test_changed_requirements_update_venv_in_place(make, tmp_path):
    make("venv")
    (tmp_path / ".venv/mine").touch()
    with (tmp_path / "requirements-base.txt").open("a") as file:
        file.write("tqdm\n")
    calls, output = make("venv")
    assert calls == ["requirements"] and "updating .venv in place" in output
    assert "tqdm" in (tmp_path / "requirements.installed").read_text()
    assert (tmp_path / ".venv/mine").exists()


def test_paddle_installed_by_user_is_kept(make, tmp_path):
    make("venv")
    (tmp_path / ".venv/bin/packages").write_text("paddlepaddle-gpu==3.3.1\n")
    with (tmp_path / "requirements-base.txt").open("a") as file:
        file.write("tqdm\n")
    calls, output = make("venv")
    assert calls == ["requirements"]
    assert "keeping paddlepaddle-gpu 3.3.1" in output
    assert (tmp_path / ".venv/bin/packages").read_text() == "paddlepaddle-gpu==3.3.1\n"


def test_chosen_paddle_is_kept_by_later_make_commands(make):
    chosen = "paddlepaddle-gpu==3.3.1 -i https://index.example/cu126/"
    assert make("venv", f"PADDLE={chosen}")[0] == ["requirements", f"install {chosen}"]
    assert make("venv")[0] == []
    assert make("venv", f"PADDLE={chosen}")[0] == []
    assert make("venv", "PADDLE=3.3.1")[0] == ["requirements", "uninstall", "install paddlepaddle==3.3.1"]
    assert make("venv")[0] == []
    assert make("venv", "PADDLE=")[0] == ["requirements", "uninstall", "install paddlepaddle==2.6.2"]


def test_chosen_paddle_is_not_reinstalled(make):
    make("venv")
    assert make("venv", "PADDLE=2.6.2")[0] == ["requirements"]


def test_second_venv_has_its_own_paddle(make):
    make("venv")
    second = ["venv", "VENV=.venv/paddle3"]
    assert make(*second, "PADDLE=3.3.1")[0] == ["requirements", "install paddlepaddle==3.3.1"]
    assert make(*second)[0] == make("venv")[0] == []


def test_next_make_repairs_failed_replacement(make, tmp_path):
    make("venv")
    with pytest.raises(AssertionError):
        make("venv", "PADDLE=nosuch")
    assert not (tmp_path / ".venv/bin/packages").exists()
    assert make("venv")[0] == ["requirements", "install paddlepaddle==2.6.2"]


def test_version_range_of_paddle_is_not_a_redirection(make, tmp_path):
    assert make("venv", "PADDLE=paddlepaddle>=3,<4")[0] == ["requirements", "install paddlepaddle>=3,<4"]
    assert not (tmp_path / "=3,").exists()


def test_interrupted_installation_is_repeated(make, tmp_path):
    make("venv")
    next((tmp_path / ".venv").glob("installed-*")).unlink()
    assert make("venv")[0] == ["requirements"]
