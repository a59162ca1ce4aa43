"""Read named arrays from untrusted files: pickles written by this project or by Paddle, and NumPy's .npz files.

`pickle.load` calls any function that a file specifies. `read_pickle` instead interprets the opcodes itself and calls no
function from the file. The time and memory that `read_pickle` needs are proportional to the file size: opcodes pass
references instead of copying objects, except when they encode text, and the total size of encoded text is limited.
"""

import contextlib
import io
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paddle_resnet.utils import files

_RECONSTRUCT = "numpy.core.multiarray._reconstruct"
_NAME_LIMIT = 1000  # maximum length of an array's name; the limit bounds the time for comparing names
_TABLE = "StructuredToParameterName@@"  # key under which paddle.save stores the names of a Layer's variables


class UnreadableError(Exception):
    """Raised if a file cannot be read as named arrays. The message is a short reason, which may quote the file."""

    def __init__(self, reason: str):
        super().__init__("".join(c if c.isprintable() else "?" for c in reason[:200]))


def read_pickle(path: str | Path, content: bytes | None = None) -> dict[str, np.ndarray]:
    """Read a file written by this project, by paddle.static.save, or by paddle.save with a state_dict.

    Args:
        path: path of the file.
        content: content of the file as bytes, if the file has already been read.
    Returns:
        {name: read-only array of booleans or numbers}.
    Raises:
        UnreadableError: the file cannot be opened, is damaged, or contains anything other than arrays.
    """
    with errors(), _opened(path, content) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        state = interpret(file, size, NumPyObjects())
    if not isinstance(state, dict):
        raise UnreadableError("not a table of arrays")
    state.pop(_TABLE, None)
    for name, value in state.items():
        if not isinstance(value, _Array) or value.value is None:
            raise UnreadableError(f"{name!r} is not an array of numbers")
    return {name: array.value for name, array in state.items()}


def read_npz(path: str | Path, content: bytes | None = None) -> dict[str, np.ndarray]:
    """Read a file written by numpy.savez and return {name: array of booleans or numbers}. For the arguments, see
    read_pickle.

    Raises:
        UnreadableError: the file cannot be opened, is damaged or compressed, or contains anything other than arrays of
            booleans or numbers.
    """
    with errors(), _opened(path, content) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist()):
            raise UnreadableError("compressed files are not supported")  # a small file could expand to any size
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            state = {name: arrays[name] for name in arrays.files}  # np.load returns files that are not arrays as bytes
        for name, value in state.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
                raise UnreadableError(f"{name!r} is not an array of numbers")
        return state


def _opened(path, content):
    return files.open_regular(path) if content is None else io.BytesIO(content)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Convert every exception in the `with` block, which reads an untrusted file, to an UnreadableError."""
    try:
        yield
    except OSError as e:
        raise UnreadableError(e.strerror or str(e)) from e
    except UnreadableError:
        raise
    except Exception as e:  # damaged files cause many types of exceptions
        raise UnreadableError(f"{type(e).__name__}: {e}") from e


class _Array:
    """An array in a pickle. One opcode creates the array, and a later opcode sets its content."""

    value = None


def interpret(file: BinaryIO, size: int, objects: "NumPyObjects") -> Any:
    """Return the object in the pickle at the current position of a binary file, without calling any function that the
    file specifies.

    Args:
        file: binary file. After the call, the file position is the end of the pickle.
        size: size of the file in bytes.
        objects: NumPyObjects, whose methods define which functions and classes the pickle may specify, and what
            calling them returns.
    Raises:
        UnreadableError: the file uses an opcode that a pickle of arrays does not need, or a function, class or
            reference that `objects` does not support.
        Exception: the file is damaged; the type of the exception varies.
    """
    stack, marks, memo = [], [], {}
    to_encode = size  # limit on encoded characters, because a pickle could encode the same string many times
    for opcode, argument, _ in pickletools.genops(_Bounded(file, size)):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(objects.known(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(objects.known(module, name))
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(_pop(stack, len(stack) - int(opcode.name[-1]))))
            case "TUPLE":
                stack.append(tuple(_pop(stack, marks.pop())))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                items = _pop(stack, marks.pop() if opcode.name == "APPENDS" else len(stack) - 1)
                _append(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                items = _pop(stack, marks.pop() if opcode.name == "SETITEMS" else len(stack) - 2)
                _set_items(stack[-1], items[::2], items[1::2])
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(objects.call(function, arguments))
                if isinstance(stack[-1], bytes):
                    to_encode -= len(stack[-1])
                    if to_encode < 0:
                        raise UnreadableError("contains text that expands to more than the file size")
            case "BUILD":
                state = stack.pop()
                objects.set_content(stack[-1], state)
            case "BINPERSID":
                stack.append(objects.stored(stack.pop()))
            case "STOP":
                return stack.pop()
            case _:
                raise UnreadableError(f"the opcode {opcode.name} is not supported; only arrays are supported")


class _Bounded:
    """A wrapper around a binary file. A read allocates at most as many bytes as the file contains, even if a pickle
    specifies a larger length."""

    def __init__(self, file, size):
        self.readline, self._read, self._size = file.readline, file.read, size

    def read(self, length):
        return self._read(min(length, self._size))


def _pop(stack, start):
    if not 0 <= start <= len(stack):
        raise UnreadableError("stack underflow")
    popped = stack[start:]
    del stack[start:]
    return popped


def _append(target, items):
    if not isinstance(target, list):
        raise UnreadableError("appends to an object that is not a list")
    target += items


def _set_items(target, keys, values):
    if not isinstance(target, dict) or not all(map(is_name, keys)):
        raise UnreadableError("the keys are not variable names")
    target.update(zip(keys, values, strict=True))


def is_name(key: object) -> bool:
    """Return whether a key is a printable string of limited length, as the names of variables are."""
    return isinstance(key, str) and len(key) <= _NAME_LIMIT and key.isprintable()


class Known(str):
    """The full name of a function or class that a pickle may specify."""


class NumPyObjects:
    """The functions and classes that a pickle of NumPy arrays may specify."""

    names = (_RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode")

    def known(self, module: str, name: str) -> Known:
        """Return the full name of a function or class. Raises UnreadableError if `names` does not contain the name."""
        full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")  # NumPy 2 renamed the module
        if full_name not in self.names:
            raise UnreadableError(f"{full_name} is not supported; only arrays are supported")
        return Known(full_name)

    def call(self, function: object, arguments: object) -> Any:
        """Evaluate the REDUCE opcode: return the object that calling the function or class would create. Raises
        UnreadableError for a call that a pickle of number arrays does not need."""
        if isinstance(function, Known):
            match function, arguments:
                case "numpy.core.multiarray._reconstruct", _:
                    return _Array()
                # NumPy 1.26 reads an array of objects from bytes as pointers, and crashes when the objects are used.
                case "numpy.dtype", (str(code), *_) if re.fullmatch(r"b1|[iu][1248]|f[248]", code):
                    return np.dtype(code)
                case "_codecs.encode", (str(text), "latin1"):
                    return text.encode("latin1")
        raise UnreadableError("contains a call that an array of numbers does not need")

    def set_content(self, target: object, state: object) -> None:
        """Evaluate the BUILD opcode: set the content of an array. Raises UnreadableError for any other content."""
        match target, state:
            case np.dtype(), (int(), "<" | "|" | "=", None, None, None, *_):
                pass
            case _Array(), (int(), tuple(shape), np.dtype() as dtype, bool(is_fortran), bytes(raw)):
                target.value = np.ndarray(shape, dtype, raw, order="F" if is_fortran else "C")
                if target.value.nbytes != len(raw):
                    raise UnreadableError(f"an array has {len(raw)} bytes instead of {target.value.nbytes}")
            case _:
                raise UnreadableError("contains the state of an object that is not an array of numbers")

    def stored(self, identifier: object) -> Any:
        """Evaluate the BINPERSID opcode: return an object that is stored outside the pickle. Pickles of NumPy arrays
        have no such objects, so this method raises UnreadableError."""
        raise UnreadableError("refers to an object outside the file")
