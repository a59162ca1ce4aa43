"""Files that `pip install .` installs."""

import subprocess

import pytest
from setuptools import find_packages

from conftest import ROOT

NOT_INSTALLED = {"paddle_resnet/native/.clang-format"}


def test_package_installs_all_its_files():
    tomllib = pytest.importorskip("tomllib")  # part of Python since 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(ROOT, include=settings["packages"]["find"]["include"])
    installed = set()
    for package in packages:
        folder = ROOT / package.replace(".", "/")
        for pattern in ["*.py", *settings["package-data"].get(package, [])]:
            installed |= set(folder.glob(pattern))
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "paddle_resnet"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    ).stdout.split()
    assert {str(path.relative_to(ROOT)) for path in installed} == set(tracked) - NOT_INSTALLED
    # The function find_packages does not include namespace packages, unlike the default of pyproject.toml.
    assert settings["packages"]["find"]["namespaces"] is False
    assert (ROOT / settings["dynamic"]["dependencies"]["file"][0]).is_file()
