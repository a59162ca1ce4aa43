"""The properties of the CPU that determine how its kernels round, and the memory of its kernels."""

import ctypes
import os
import re
from pathlib import Path

_VECTOR_EXTENSIONS = re.compile("avx.*|fma|amx.*|asimd.*|sve.*")
# oneDNN and MKL use fewer instructions if one of these environment variables is set.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

# Parameters of mallopt (malloc.h of glibc).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next allocation. By default, malloc returns the memory of each large
    tensor to the system, and the system clears each page again when the next step touches it. Without glibc, this
    function does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def arithmetic(info: Path = Path("/proc/cpuinfo")) -> dict[str, int | str]:
    """Return {"threads": number of threads of Paddle's CPU kernels, "instructions": text}. The text consists of the
    sorted names of the CPU's vector extensions, and NAME=VALUE for each environment variable that limits them,
    separated by spaces. Threads and vector extensions determine the order of additions, and therefore the last digits
    of sums. Paddle must have been imported. `info` is the file in which Linux describes the CPU."""
    text = info.read_text() if info.exists() else ""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    names = sorted(filter(_VECTOR_EXTENSIONS.fullmatch, listed[1].split() if listed else []))
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]
    # Paddle replaces a missing or invalid value with 1 when it is imported.
    return {"threads": int(os.environ["OMP_NUM_THREADS"]), "instructions": " ".join(names + limits)}
