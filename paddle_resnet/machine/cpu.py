"""The properties of the CPU that determine how its kernels round: number of threads and instruction set."""

import os
import re
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
_VECTOR_EXTENSIONS = re.compile("avx.*|fma|amx.*|asimd.*|sve.*")
# oneDNN and MKL use fewer instructions if one of these environment variables is set.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def arithmetic() -> dict[str, int | str]:
    """Return {"threads": number of threads of Paddle's CPU kernels, "instructions": text}. The text consists of the
    sorted names of the CPU's vector extensions, and NAME=VALUE for each environment variable that limits them,
    separated by spaces. Threads and vector extensions determine the order of additions, and therefore the last digits
    of sums. Paddle must have been imported."""
    text = _INFO.read_text() if _INFO.exists() else ""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    names = sorted(filter(_VECTOR_EXTENSIONS.fullmatch, listed[1].split() if listed else []))
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]
    # Paddle replaces a missing or invalid value with 1 when it is imported.
    return {"threads": int(os.environ["OMP_NUM_THREADS"]), "instructions": " ".join(names + limits)}
