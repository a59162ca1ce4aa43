"""Reads files of named arrays without trusting them: the pickles of this project and of Paddle, and NumPy's .npz.

`pickle.load` calls whatever functions a file names. `read_pickle` interprets the opcodes of pickled arrays itself: it
calls nothing that the file names. Its time and memory are proportional to the size of the file: no opcode copies more
than the bytes that the file spends on it.
"""

import os
import pickletools
import re
import zipfile

import numpy as np

from utils import files

_RECONSTRUCT = "numpy.core.multiarray._reconstruct"
_KNOWN = (_RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode")
_NAME_LIMIT = 1000  # characters of an array's name, which each use of it reads
_TABLE = "StructuredToParameterName@@"  # paddle.save adds the structured names of a Layer's parameters


class UnreadableError(Exception):
    """A file that cannot be read as named arrays. The message is a short reason, which may quote the file."""

    def __init__(self, reason):
        super().__init__("".join(c if c.isprintable() else "?" for c in reason[:200]))


def read_pickle(path):
    """Read a file of paddle.static.save, of paddle.save with a state_dict, or of this project.

    Returns:
        {name: read-only array of booleans or numbers}.
    Raises:
        UnreadableError: the file cannot be opened, is damaged, or holds something else than arrays.
    """
    try:
        with files.open_regular(path) as file:
            state = _interpret(file)
    except OSError as e:
        raise UnreadableError(e.strerror) from e
    except UnreadableError:
        raise
    except Exception as e:  # damaged bytes fail in many ways, in pickletools and in NumPy
        raise UnreadableError(f"{type(e).__name__}: {e}") from e
    if not isinstance(state, dict):
        raise UnreadableError("it holds no table of arrays")
    state.pop(_TABLE, None)
    for name, value in state.items():
        if not isinstance(value, _Array) or value.value is None:
            raise UnreadableError(f"{name!r} is not an array of numbers")
    return {name: array.value for name, array in state.items()}


def read_npz(path):
    """Read a file of numpy.savez: {name: array of booleans or numbers}.

    Raises:
        UnreadableError: as read_pickle.
    """
    try:
        with files.open_regular(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist()):
                raise UnreadableError("it is compressed")  # and may become any size
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except OSError as e:
        raise UnreadableError(e.strerror or str(e)) from e
    except UnreadableError:
        raise
    except Exception as e:  # damaged bytes fail in many ways, in zipfile and in NumPy
        raise UnreadableError(f"{type(e).__name__}: {e}") from e


class _Array:
    """An array of a pickle: the opcodes make it first, and set its content later."""

    value = None


def _interpret(file):
    """The object of a pickle, arrays as _Array. Opcodes that no pickled array has are refused."""
    stack, marks, memo = [], [], {}
    to_encode = os.fstat(file.fileno()).st_size  # characters; a text of the memo could be encoded again and again
    for opcode, argument, _ in pickletools.genops(file):
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
                stack.append(_known(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_known(module, name))
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
            case "SETITEM" | "SETITEMS":
                items = _pop(stack, marks.pop() if opcode.name == "SETITEMS" else len(stack) - 2)
                _set_items(stack[-1], items[::2], items[1::2])
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
                if isinstance(stack[-1], bytes):
                    to_encode -= len(stack[-1])
                    if to_encode < 0:
                        raise UnreadableError("it encodes more text than it has")
            case "BUILD":
                state = stack.pop()
                _set_content(stack[-1], state)
            case "STOP":
                return stack.pop()
            case _:
                raise UnreadableError(f"it has the opcode {opcode.name}, and only arrays are read")


def _pop(stack, start):
    if not 0 <= start <= len(stack):
        raise UnreadableError("its stack underflows")
    popped = stack[start:]
    del stack[start:]
    return popped


def _set_items(target, keys, values):
    if not isinstance(target, dict) or not all(map(_is_name, keys)):
        raise UnreadableError("its keys are not names")
    target.update(zip(keys, values, strict=True))


def _is_name(key):
    return isinstance(key, str) and len(key) <= _NAME_LIMIT and key.isprintable()


class _Known(str):
    """The name of a function or class that pickled arrays use."""


def _known(module, name):
    found = f"{module}.{name}".replace("numpy._core.", "numpy.core.")  # NumPy 2 and NumPy 1
    if found not in _KNOWN:
        raise UnreadableError(f"it names {found}, and only arrays are read")
    return _Known(found)


def _call(function, arguments):
    """What REDUCE stands for in a pickled array."""
    if isinstance(function, _Known):
        match function, arguments:
            case "numpy.core.multiarray._reconstruct", _:
                return _Array()
            case "numpy.dtype", (str(code), *_) if re.fullmatch(r"b1|[iu][1248]|f[248]", code):
                return np.dtype(code)
            case "_codecs.encode", (str(text), "latin1"):
                return text.encode("latin1")
    raise UnreadableError("it has another call than those of an array of numbers")


def _set_content(target, state):
    """What BUILD stands for in a pickled array."""
    match target, state:
        case np.dtype(), (int(), "<" | "|" | "=", None, None, None, *_):
            pass
        case _Array(), (int(), tuple(shape), np.dtype() as dtype, bool(is_fortran), bytes(raw)):
            target.value = np.ndarray(shape, dtype, raw, order="F" if is_fortran else "C")
            if target.value.nbytes != len(raw):
                raise UnreadableError(f"an array has {len(raw)} bytes instead of {target.value.nbytes}")
        case _:
            raise UnreadableError("it has another state than that of an array of numbers")
