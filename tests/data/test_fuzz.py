"""Randomly damaged data sets. Training and verify must agree: both report an error or both succeed, and no image is
lost silently."""

import collections
import re
import subprocess
import sys
from pathlib import Path

import data_files
import pytest

from paddle_resnet.data.formats import FORMATS

FORMATS = [name for name in FORMATS if name != "folder"]  # the script does not mutate images
SCRIPT = Path(__file__).with_name("fuzz.py")
BATCH = 60  # number of mutations per process


def fuzz(folder, mutations):
    """Run mutations and return {"FORMAT:N": outcome}. If a process ends early, a new process continues with the next
    mutation."""
    outcomes = {}
    while mutations:
        command = [sys.executable, str(SCRIPT), str(folder), *mutations[:BATCH]]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        for mutation, outcome in re.findall(r"^(?:start|end) (\w+:\d+) ?(.*)$", done.stdout, re.MULTILINE):
            outcomes[mutation] = outcome or f"BAD exit code {done.returncode}: {done.stderr[-2000:]}"
        assert mutations[0] in outcomes, done.stderr  # otherwise, the script itself has failed
        mutations = [mutation for mutation in mutations if mutation not in outcomes]
    return outcomes


def check(outcomes):
    bad = {mutation: text for mutation, text in outcomes.items() if text.startswith("BAD")}
    assert not bad, "\n".join(f"{mutation}: {text}" for mutation, text in bad.items())
    counts = collections.Counter(text.partition(" (")[0] for text in outcomes.values())
    assert counts["rejected"] > len(outcomes) // 3, counts  # at least a third of the mutations must cause errors
    print(counts)


@pytest.mark.slow
def test_damaged_data_is_rejected_or_harmless(tmp_path):
    check(fuzz(tmp_path, [f"{name}:{n}" for n in range(2) for name in FORMATS]))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("data_format", data_files.ALL)
def test_2000_damaged_data_sets_are_rejected_or_harmless(tmp_path, data_format):
    check(fuzz(tmp_path, [f"{data_format}:{n}" for n in range(1000, 3000)]))
