"""The package that `pip install .` installs."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT
from paddle_resnet import __version__

NOT_INSTALLED = {"paddle_resnet/native/.clang-format"}


def tracked(*paths):
    """Return the files of the checkout that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture
def checkout(tmp_path):
    """Copy the files that a build reads, because a build writes to its folder."""
    folder = tmp_path / "checkout"
    names = tracked("paddle_resnet", "utils", ":(glob)*.py", "pyproject.toml", "requirements*.txt", "README.md")
    for name in (*names, "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_wheel_contains_only_the_package(checkout):
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(checkout / done.stdout.splitlines()[-1]) as wheel:
        information = f"paddle_resnet-{__version__}.dist-info/"
        names = {name for name in wheel.namelist() if not name.startswith(information)}
        scripts = wheel.read(f"{information}entry_points.txt").decode()
        metadata = wheel.read(f"{information}METADATA").decode()
    assert names == set(tracked("paddle_resnet")) - NOT_INSTALLED
    assert scripts.split() == ["[console_scripts]", "paddle-resnet", "=", "paddle_resnet.cli:main"]
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert not [name for name in required if name.startswith(("pytest", "ruff", "allpairspy"))]


@pytest.mark.parametrize("extra", ["gpu", "cpu", "onnx", "serve", "parquet"])
def test_extras_equal_the_requirement_files(extra):
    tomllib = pytest.importorskip("tomllib")  # part of Python since 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / f"requirements{'' if extra == 'gpu' else f'-{extra}'}.txt").read_text().splitlines()
    assert extras[extra] == [line for line in lines if not line.startswith(("#", "-r"))]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_installed_commands_work_next_to_packages_of_the_same_names(checkout, tmp_path):
    """Install into a new environment, next to foreign packages with the names of the modules that only a checkout has,
    and use the commands outside the checkout."""
    environment, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()

    def run(program, *arguments, expected=0):
        command = [environment / "bin" / program, *arguments]
        done = subprocess.run(list(map(str, command)), cwd=work, capture_output=True, text=True)
        assert done.returncode == expected, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    run("python", "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{checkout}[cpu]")
    shutil.rmtree(checkout)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in ("utils", "config", "train"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise ImportError('foreign module')\n")
    script = environment / "bin/paddle-resnet"

    assert run("paddle-resnet", "--version") == f"paddle-resnet {__version__}\n"
    run("paddle-resnet", "dataset", "sample", "--output", "digits")
    run("paddle-resnet", "dataset", "verify", "digits")
    flags = [
        "--image-root",
        "digits",
        "--model-arch-name",
        "ResNet18",
        "--crop-size",
        "32",
        "--lr",
        "0.02",
        "--warmup-epochs",
        "0",
    ]
    two_epochs = ["--epochs", "2", "--batch-size", "32", "--output-dir", "output"]
    output = run("paddle-resnet", "train", *flags, *two_epochs)
    command = re.search(r"evaluate the best epoch, \d, again: (.*)", output)[1].split()
    assert command[:2] == [str(script), "train"]
    assert "val  loss" in run(*command)
    image = next((work / "digits/val/3").iterdir())
    assert " 0." in run("paddle-resnet", "predict", "output/ResNet18", image)
    assert "training works on this machine" in run("paddle-resnet", "doctor")
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    benchmark = ["--run-scope", "train_only", "--benchmark", "--benchmark-warmup-steps", "1", "--benchmark-steps", "2"]
    run("python", *launcher, script, "train", *flags, *benchmark, "--batch-size", "8", "--output-dir", "two")
    assert "use dataset" in run("paddle-resnet", "dataste", expected=2)
