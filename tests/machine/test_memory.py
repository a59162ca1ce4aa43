"""Memory that is available to this process."""

from pathlib import Path

import pytest

from paddle_resnet.machine import memory


@pytest.mark.parametrize(
    ("limit", "expected"), [("3000000", 2_000_000), ("9000000", 4_096_000), ("max", 4_096_000), (None, 4_096_000)]
)
def test_memory_is_limited_by_machine_and_container(monkeypatch, limit, expected):
    texts = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": "1000000",
    }

    def read_text(path):
        if texts[str(path)] is None:
            raise FileNotFoundError
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert memory.available() == expected


def test_peak_of_a_gpu_is_reserved_memory(monkeypatch):
    reserved, emptied = iter([2**20, 2**22]), []
    monkeypatch.setattr("paddle.device.cuda.empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr("paddle.device.cuda.memory_reserved", lambda: next(reserved))
    assert memory.Peak("gpu").mib() == 3 and emptied == [True]


def test_peak_is_the_increase_in_mib_and_never_negative(monkeypatch, tmp_path):
    """The peak is reset before a measurement."""
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    status.write_text("VmPeak:\t 9000 kB\nVmHWM:\t 4096 kB\n")
    peak = memory.Peak("cpu")
    assert (tmp_path / "clear_refs").read_text() == "5"
    for kib, expected in ((4096, 0), (6656, 2.5), (1024, 0)):
        status.write_text(f"VmPeak:\t 9000 kB\nVmHWM:\t {kib} kB\n")
        assert peak.mib() == expected
