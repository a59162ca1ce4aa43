"""Memory that is available to this process."""

import pytest

from paddle_resnet.machine import memory


@pytest.mark.parametrize(
    ("limit", "expected"), [("3000000", 2_000_000), ("9000000", 4_096_000), ("max", 4_096_000), (None, 4_096_000)]
)
def test_memory_is_limited_by_machine_and_container(tmp_path, limit, expected):
    for path, text in (
        ("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n"),
        ("sys/fs/cgroup/memory.max", limit),
        ("sys/fs/cgroup/memory.current", "1000000"),
    ):
        if text is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    assert memory.available(tmp_path) == expected
    assert memory.available() > 0


def test_peak_of_a_gpu_is_reserved_memory(monkeypatch):
    reserved, emptied = iter([2**20, 2**22]), []
    monkeypatch.setattr("paddle.device.cuda.empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr("paddle.device.cuda.memory_reserved", lambda: next(reserved))
    assert memory.Peak("gpu").mib() == 3 and emptied == [True]


def test_peak_is_the_increase_in_mib_and_never_negative(tmp_path):
    """The peak is reset before a measurement."""
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9000 kB\nVmHWM:\t 4096 kB\n")
    peak = memory.Peak("cpu", tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    for kib, expected in ((4096, 0), (6656, 2.5), (1024, 0)):
        status.write_text(f"VmPeak:\t 9000 kB\nVmHWM:\t {kib} kB\n")
        assert peak.mib() == expected
