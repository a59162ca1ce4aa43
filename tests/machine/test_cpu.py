"""The properties of the CPU that checkpoints record."""

import os

import pytest

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
def test_threads_and_instructions(tmp_path, monkeypatch, text, instructions):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "_INFO", tmp_path / "cpuinfo")
    for name in cpu._LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu.arithmetic() == {"threads": 3, "instructions": instructions}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert cpu.arithmetic()["instructions"] == f"{instructions} ONEDNN_MAX_CPU_ISA=SSE41".strip()


def test_paddle_sets_number_of_threads():
    import paddle  # noqa: F401

    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
