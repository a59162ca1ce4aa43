"""Networks from a user's own file: --model-arch-name FILE.py:NAME.

Importing this module does not import Paddle, and check() does not execute the file.
"""

import contextlib
import hashlib
import re
import symtable
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle_resnet.utils import files
from paddle_resnet.utils.errors import UsageError, core

MAX_BYTES = 1 << 24


def split(arch: str) -> tuple[str, str] | None:
    """Return (path, NAME) for FILE.py:NAME, or None for any other text."""
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", arch, re.ASCII)
    return (match[1], match[2]) if match else None


def check(arch: str) -> None:
    """Check that FILE.py can be read, is valid Python and defines NAME.

    Raises:
        UsageError: the file cannot be read or exceeds MAX_BYTES, is not valid Python or does not define NAME.
    """
    path, name = split(arch)
    flag = f"--model-arch-name {arch}"
    source = _read(arch)
    try:
        compile(source, path, "exec")
        table = symtable.symtable(source, path, "exec")
    except (SyntaxError, ValueError) as e:  # ValueError: the file contains null bytes
        line = f"line {e.lineno}: " if getattr(e, "lineno", None) else ""
        raise UsageError(f"{flag}: {line}{getattr(e, 'msg', e)}; correct {path}") from e
    except (RecursionError, MemoryError) as e:  # Python's parser raises MemoryError if its stack is full
        raise UsageError(f"{flag}: expressions are nested too deeply for Python; correct {path}") from e
    symbols = table.get_symbols()
    if name not in [s.get_name() for s in symbols if s.is_assigned() or s.is_imported()]:
        defined = ", ".join(s.get_name() for s in symbols if s.is_namespace()) or "no function or class"
        raise UsageError(f"{flag}: {path} does not define {name}; use a name that it defines ({defined})")


def sha256(arch: str) -> str | None:
    """Return the hexadecimal sha256 of FILE.py, or None for any other text.

    Raises:
        UsageError: the file cannot be read or exceeds MAX_BYTES.
    """
    return hashlib.sha256(_read(arch)).hexdigest() if split(arch) else None


def load(arch: str) -> tuple[Any, str]:
    """Execute FILE.py as a module, and return the object NAME and the sha256 of the file. If load() has executed the
    same file with the same content before, it does not execute the file again.

    Raises:
        UsageError: the file fails check() or raises an exception.
    """
    check(arch)
    path, name = split(arch)
    source = _read(arch)
    # A unique name prevents conflicts with modules on sys.path.
    module_name = f"{__name__}_{hashlib.sha256(str(Path(path).resolve()).encode() + source).hexdigest()[:16]}"
    if module_name not in sys.modules:
        module = types.ModuleType(module_name)
        module.__file__ = path
        sys.modules[module_name] = module  # dataclasses look up their module in sys.modules
        try:
            with errors(arch):
                exec(compile(source, path, "exec"), vars(module))
        except BaseException:
            del sys.modules[module_name]
            raise
    with errors(arch):
        return getattr(sys.modules[module_name], name), hashlib.sha256(source).hexdigest()


@contextlib.contextmanager
def errors(arch: str) -> Iterator[None]:
    """Convert exceptions from the file's code to a UsageError, with the line number if the traceback contains a line of
    the file. Exceptions from registered networks propagate unchanged."""
    try:
        yield
    except (Exception, SystemExit) as e:
        if split(arch) is None:
            raise
        path, _ = split(arch)
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        line = f"line {lines[-1]}: " if lines else ""
        reason = f"{type(e).__name__}: {core(e).removeprefix(f'{type(e).__name__}: ')}"
        raise UsageError(f"--model-arch-name {arch}: {line}{reason}; correct {path}") from e


def _read(arch):
    path, _ = split(arch)
    try:
        with files.open_regular(path, MAX_BYTES) as file:
            return file.read()
    except (OSError, ValueError) as e:  # ValueError: the path contains a null byte
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"--model-arch-name {arch}: {path} cannot be read ({reason}); use a readable file") from e
