"""The memory that this process may use."""

from pathlib import Path


def available():
    """Return the number of bytes of memory that are available, within the container's memory limit."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # without cgroup v2 or a memory limit
        return available
