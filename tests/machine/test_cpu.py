"""The properties of the CPU that checkpoints record."""

import os
import platform
import subprocess
import sys

import pytest

from conftest import ROOT
from paddle_resnet.machine import cpu


@pytest.mark.parametrize(
    ("text", "instructions"),
    [
        (
            "flags\t\t: fpu sse2 fma avx2 avx avx512_vnni\n\nflags\t\t: sse2\n",
            "avx avx2 avx512_vnni fma",
        ),
        ("Features\t: fp asimd evtstrm sve\n", "asimd sve"),
        ("", ""),
        (None, ""),
    ],
    ids=["x86", "ARM", "without flags", "without file"],
)
def test_threads_and_instructions(tmp_path, environment, text, instructions):
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    environment(**dict.fromkeys(cpu._LIMITS), OMP_NUM_THREADS=3)
    assert cpu.arithmetic(info) == {"threads": 3, "instructions": instructions}
    environment(ONEDNN_MAX_CPU_ISA="SSE41")
    assert cpu.arithmetic(info)["instructions"] == f"{instructions} ONEDNN_MAX_CPU_ISA=SSE41".strip()


def test_paddle_sets_number_of_threads():
    import paddle  # noqa: F401

    assert int(os.environ["OMP_NUM_THREADS"]) >= 1


FAULTS = """
import resource, sys
import numpy as np
from paddle_resnet.machine import cpu
if sys.argv[1] == "keep":
    cpu.keep_freed_memory()
for step in range(12):
    np.empty(40 << 20, np.uint8).fill(1)  # larger than the largest threshold above which glibc maps each block
    if step == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_freed_memory_is_used_again():
    faults = {}
    for mode in ("default", "keep"):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], cwd=ROOT, capture_output=True, text=True, check=True
        )
        faults[mode] = int(done.stdout)
    assert faults["keep"] < faults["default"] / 10
