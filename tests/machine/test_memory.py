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
