"""The start of train.py, before Paddle is imported. Each test starts a process in which Paddle is not imported."""

import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

MAIN = """
import json, sys
from paddle_resnet import train

codes = [train.main(command) for command in json.loads(sys.argv[1])]
print(json.dumps([codes, "paddle" in sys.modules]))
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that calls train.main with each command, in one process. The function returns (exit codes,
    whether Paddle was imported, stderr)."""

    def start(*commands, **variables):
        paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
        process = [sys.executable, "-c", MAIN, json.dumps(commands)]
        environment = os.environ | {"PYTHONPATH": paths} | variables
        done = subprocess.run(process, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        return *json.loads(done.stdout.splitlines()[-1]), done.stderr

    return start


@pytest.mark.slow
def test_paddle_that_cannot_be_imported_is_a_failure(start, tmp_path):
    """A single process checks the folder of images first; with several processes, rank 0 checks the folder later."""
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle/__init__.py").write_text("import missing")
    synthetic, missing_folder = ["--data-format", "synthetic"], ["--image-root", "/nowhere"]
    codes, _, errors = start(synthetic, missing_folder)
    assert codes == [1, 2]
    message = "Paddle or DALI: cannot be imported (No module named 'missing'); run "
    assert errors.count(message) == 1 and "paddle_resnet.doctor" in errors and "--image-root /nowhere: " in errors
    job = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0", "PADDLE_MASTER": "127.0.0.1:1"}
    codes, _, errors = start(missing_folder, PADDLE_TRAINER_ENDPOINTS="127.0.0.1:1,127.0.0.1:2", **job)
    assert codes == [1] and message in errors


def test_errors_precede_the_import_of_paddle(start):
    commands = ["--image-root", "/nowhere"], ["--model-arch-name", "ResNet5"], ["--model-arch-name", "nowhere.py:Net"]
    codes, is_imported, errors = start(*commands)
    assert codes == [2, 2, 2] and not is_imported
    assert all(f"error: {' '.join(command)}: " in errors for command in commands)
