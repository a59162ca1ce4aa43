"""Reading of untrusted files of named arrays: pickles of this project and of Paddle, and NumPy's .npz.

`pickle.load` calls any function that a file specifies. `read_pickle` interprets the opcodes of pickled arrays itself
and calls no function that the file specifies. Its time and memory are proportional to the file size: no opcode copies
more bytes than it occupies in the file.
"""

import os
import pickletools
import re
import zipfile

import numpy as np

from utils import files

_RECONSTRUCT = "numpy.core.multiarray._reconstruct"
_KNOWN = (_RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode")
_NAME_LIMIT = 1000  # characters of an array's name; each use reads all of them
_TABLE = "StructuredToParameterName@@"  # paddle.save adds a Layer's structured names under this key


class UnreadableError(Exception):
    """Raised if a file cannot be read as named arrays. The message is a short reason and may quote the file."""

    def __init__(self, reason):
        super().__init__("".join(c if c.isprintable() else "?" for c in reason[:200]))


def read_pickle(path):
    """Read a file of this project, of paddle.static.save, or of paddle.save with a state_dict.

    Returns:
        {name: read-only array of booleans or numbers}.
    Raises:
        UnreadableError: the file cannot be opened, is damaged, or contains anything other than arrays.
    """
    try:
        with files.open_regular(path) as file:
            state = _interpret(file)
    except OSError as e:
        raise UnreadableError(e.strerror) from e
    except UnreadableError:
        raise
    except Exception as e:  # damaged bytes cause various exceptions in pickletools and NumPy
        raise UnreadableError(f"{type(e).__name__}: {e}") from e
    if not isinstance(state, dict):
        raise UnreadableError("not a table of arrays")
    state.pop(_TABLE, None)
    for name, value in state.items():
        if not isinstance(value, _Array) or value.value is None:
            raise UnreadableError(f"{name!r} is not an array of numbers")
    return {name: array.value for name, array in state.items()}


def read_npz(path):
    """Read a file of numpy.savez and return {name: array of booleans or numbers}.

    Raises:
        UnreadableError: as for read_pickle.
    """
    try:
        with files.open_regular(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist()):
                raise UnreadableError("compressed files are not supported")  # they may expand to any size
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except OSError as e:
        raise UnreadableError(e.strerror or str(e)) from e
    except UnreadableError:
        raise
    except Exception as e:  # damaged bytes cause various exceptions in zipfile and NumPy
        raise UnreadableError(f"{type(e).__name__}: {e}") from e


class _Array:
    """An array in a pickle. One opcode creates it, and a later one sets its content."""

    value = None


def _interpret(file):
    """Return the object in a pickle, with arrays as _Array. Raises UnreadableError for opcodes of other objects."""
    stack, marks, memo = [], [], {}
    to_encode = os.fstat(file.fileno()).st_size  # characters; limits repeated encoding of a memoized text
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
                        raise UnreadableError("it encodes more text than it contains")
            case "BUILD":
                state = stack.pop()
                _set_content(stack[-1], state)
            case "STOP":
                return stack.pop()
            case _:
                raise UnreadableError(f"the opcode {opcode.name} is not supported, only arrays")


def _pop(stack, start):
    if not 0 <= start <= len(stack):
        raise UnreadableError("stack underflow")
    popped = stack[start:]
    del stack[start:]
    return popped


def _set_items(target, keys, values):
    if not isinstance(target, dict) or not all(map(_is_name, keys)):
        raise UnreadableError("its keys are not variable names")
    target.update(zip(keys, values, strict=True))


def _is_name(key):
    return isinstance(key, str) and len(key) <= _NAME_LIMIT and key.isprintable()


class _Known(str):
    """The name of a function or class that occurs in pickled arrays."""


def _known(module, name):
    full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")  # NumPy 2 and NumPy 1
    if full_name not in _KNOWN:
        raise UnreadableError(f"{full_name} is not supported, only arrays")
    return _Known(full_name)


def _call(function, arguments):
    """Evaluate the REDUCE opcode of a pickled array."""
    if isinstance(function, _Known):
        match function, arguments:
            case "numpy.core.multiarray._reconstruct", _:
                return _Array()
            case "numpy.dtype", (str(code), *_) if re.fullmatch(r"b1|[iu][1248]|f[248]", code):
                return np.dtype(code)
            case "_codecs.encode", (str(text), "latin1"):
                return text.encode("latin1")
    raise UnreadableError("it contains a call that an array of numbers does not need")


def _set_content(target, state):
    """Evaluate the BUILD opcode of a pickled array."""
    match target, state:
        case np.dtype(), (int(), "<" | "|" | "=", None, None, None, *_):
            pass
        case _Array(), (int(), tuple(shape), np.dtype() as dtype, bool(is_fortran), bytes(raw)):
            target.value = np.ndarray(shape, dtype, raw, order="F" if is_fortran else "C")
            if target.value.nbytes != len(raw):
                raise UnreadableError(f"an array has {len(raw)} bytes instead of {target.value.nbytes}")
        case _:
            raise UnreadableError("it contains a state that an array of numbers does not have")
