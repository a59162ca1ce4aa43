"""Available memory, and memory used by this process."""

import gc
from pathlib import Path


def available(root: Path = Path("/")) -> int:
    """Return the available memory in bytes, taking the memory limit of the container (cgroup v2) into account. `root`
    is the folder that contains proc/ and sys/."""
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        return min(available, limit - int((root / "sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or no memory limit
        return available


class Peak:
    """Measures by how much the peak memory increases after the object is created. On a GPU, the memory is the device
    memory that Paddle reserves, which decreases only if the program releases it explicitly; on the CPU, it is the
    resident memory of the process.

    Args:
        device: "cpu" or "gpu".
        process: folder of this process in proc(5).
    """

    def __init__(self, device: str, process: Path = Path("/proc/self")) -> None:
        self._device, self._status = device, process / "status"
        if device == "gpu":
            import paddle

            gc.collect()
            paddle.device.cuda.empty_cache()
        else:
            (process / "clear_refs").write_text("5")  # reset the peak, see proc(5)
        self._before = self._bytes()

    def mib(self) -> float:
        """Return the increase in peak memory since the start of the measurement, in MiB."""
        # Linux counts the pages of a process only approximately, so the difference can be negative.
        return max(0, self._bytes() - self._before) / 2**20

    def _bytes(self):
        if self._device == "gpu":
            import paddle  # imported late, because the doctor calls available() even if Paddle is missing

            return paddle.device.cuda.memory_reserved()
        status = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
