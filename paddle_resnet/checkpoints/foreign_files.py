"""Read weight files from other projects: .pth from PyTorch, .safetensors, and .pdparams from Paddle. Write
.safetensors files.

No code in a file is executed. Memory use is proportional to the file size, because compressed archives and overlapping
tensors are rejected.
"""

import io
import json
import math
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paddle_resnet.checkpoints import arrays
from paddle_resnet.checkpoints.arrays import UnreadableError
from paddle_resnet.checkpoints.contents import Writable
from paddle_resnet.utils import files, logger

MAX_BYTES = 1 << 32
_MAX_HEADER_BYTES = 1 << 24
_MAX_DIMENSIONS = 8
# The first bytes of a .pth file. PyTorch 1.6 and later write a zip archive; earlier versions wrote a sequence of
# pickles.
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_PROTOCOL = 1001
# Keys under which training scripts save the weights. EMA weights take precedence, as in timm.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
_BFLOAT16 = "bfloat16"  # placeholder, because NumPy has no bfloat16 type
_STORAGES = {
    **{"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": _BFLOAT16},
    **{"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1"},
    **{"ByteStorage": "u1", "BoolStorage": "?"},
}
_SAFETENSORS = {
    **{"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": _BFLOAT16, "I64": "<i8", "I32": "<i4", "I16": "<i2"},
    **{"I8": "i1", "U8": "u1", "BOOL": "?"},
}


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Read the tensors in a file.

    Returns:
        {name: array}. Floating-point values of all widths are converted to float32; integers and booleans keep their
        types.
    Raises:
        UnreadableError: the file is damaged, has an unknown format, contains a value that is not finite in float32, or
            contains no dict of tensors. In PyTorch's files, one of the entries _NESTED may contain the dict of tensors.
    """
    readers = {".pdparams": _read_pdparams, ".safetensors": _read_safetensors}
    readers |= dict.fromkeys((".pth", ".pt", ".tar", ".bin"), _read_torch)
    suffix = Path(path).suffix.lower()
    if suffix not in readers:
        raise UnreadableError(f"the name does not end in {', '.join(readers)}")
    with arrays.errors():
        state = readers[suffix](path)
        return {name: _checked(name, array) for name, array in state.items()}


def _checked(name, array):
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise UnreadableError(f"{name} has values that are not finite in float32")
    return array


def _array(raw, dtype):
    """Return a one-dimensional array from little-endian bytes."""
    if dtype == _BFLOAT16:
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, dtype)


def _item_size(dtype):
    return 2 if dtype == _BFLOAT16 else np.dtype(dtype).itemsize


def _size(file):
    return os.fstat(file.fileno()).st_size


def _read_pdparams(path):
    with files.open_regular(path, MAX_BYTES) as file:
        size = _size(file)
    state = arrays.read_pickle(path)
    if sum(array.nbytes for array in state.values()) > size:
        raise UnreadableError("the arrays overlap")
    return state


def _read_safetensors(path):
    """Read a .safetensors file; see https://github.com/huggingface/safetensors#format for the format.

    Raises:
        OSError: the file cannot be opened, or is too large.
        UnreadableError: the file is damaged, or has a data type that is not supported.
    """
    with files.open_regular(path, MAX_BYTES) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, _size(file) - 8):
            raise UnreadableError(f"the header has an invalid length of {length} bytes")
        header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        data = file.read()
    if not isinstance(header, dict):
        raise UnreadableError("the header is not a table")
    header.pop("__metadata__", None)
    if not all(map(arrays.is_name, header)):
        raise UnreadableError("the keys of the header are not variable names")
    state, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item)[0]):
        start, stop = _offsets((name, entry))
        dtype, shape = _SAFETENSORS.get(entry.get("dtype")), entry.get("shape")
        if dtype is None:
            raise UnreadableError(f"{name} has the unsupported type {str(entry.get('dtype'))[:20]}")
        if not isinstance(shape, list) or not _are_counts(shape):
            raise UnreadableError(f"{name} has an invalid shape")
        if start != end or stop - start != math.prod(shape) * _item_size(dtype):
            raise UnreadableError(f"the offsets of {name} do not match its shape or the previous tensor")
        state[name] = _array(data[start:stop], dtype).reshape(shape)
        end = stop
    if end != len(data):
        raise UnreadableError(f"contains {len(data)} bytes of tensors instead of {end}")
    return state


def write_safetensors(file: Writable, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write tensors in the format that _read_safetensors reads.

    Args:
        file: file to write.
        tensors: {name: float32 array}.
        metadata: texts to store with the tensors.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (end, end + array.nbytes)}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for array in tensors.values():
        file.write(np.ascontiguousarray(array, "<f4").tobytes())


def _without_duplicates(pairs):
    table = dict(pairs)
    if len(table) != len(pairs):
        raise UnreadableError("a name occurs twice in the header")
    return table


def _offsets(item):
    name, entry = item
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise UnreadableError(f"{name} has no valid data_offsets")
    return offsets


def _are_counts(values):
    return len(values) <= _MAX_DIMENSIONS and all(type(value) is int and 0 <= value < 1 << 40 for value in values)


def _read_torch(path):
    with files.open_regular(path, MAX_BYTES) as file:
        start = file.read(len(_LEGACY))
        if start.startswith(_ZIP):
            file.seek(0)
            # Read the archive from memory, because ZipFile can allocate an unlimited amount of memory when it reads a
            # damaged or malicious archive from a file.
            return _read_zip(io.BytesIO(file.read()), _size(file))
        if start == _LEGACY:
            return _read_legacy(file)
    raise UnreadableError("not written by torch.save")


def _read_zip(file, size):
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnreadableError("compressed archives are not supported")
    if sum(entry.file_size for entry in entries) > size:
        raise UnreadableError("the entries of the archive overlap")
    pickles = [entry.filename for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnreadableError(f"the archive has {len(pickles)} data.pkl files instead of 1")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise UnreadableError("the byte order is not little-endian")
    objects = _TorchObjects()
    tensors = _tensors(arrays.interpret(io.BytesIO(archive.read(pickles[0])), size, objects))
    raw = {key: archive.read(f"{folder}data/{key}") for key in objects.storages}
    return _torch_arrays(tensors, objects.storages, raw)


def _read_legacy(file):
    """Read the format of PyTorch versions before 1.6. The file contains five pickles: a magic number (already read),
    the version, the platform, the object, and the keys of the object's storages. After the pickles, the storages
    follow, each preceded by its length."""
    size, objects = _size(file), _TorchObjects()
    version, platform, state, keys = (arrays.interpret(file, size, objects) for _ in range(4))
    if version != _LEGACY_PROTOCOL or not isinstance(platform, dict) or platform.get("little_endian") is not True:
        raise UnreadableError("the version or byte order is not supported")
    tensors = _tensors(state)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(objects.storages):
        raise UnreadableError("the list of storages does not match the tensors")
    raw = {}
    for key in keys:
        storage, length = objects.storages[key], int.from_bytes(file.read(8), "little")
        if length != storage.length:
            raise UnreadableError(f"a storage has {length} values instead of {storage.length}")
        raw[key] = file.read(min(storage.length * _item_size(storage.dtype), size))
    return _torch_arrays(tensors, objects.storages, raw)


@dataclass
class _Storage:
    """Values that are stored outside the pickle. Each tensor is a view of values in a storage."""

    dtype: str
    length: int
    used: list = field(default_factory=list)  # (start, stop) of each tensor's values


@dataclass(frozen=True)
class _Tensor:
    key: str
    offset: int
    shape: tuple
    strides: tuple
    is_negative: bool  # whether the tensor's values are those of the storage multiplied by -1 (PyTorch's negative bit)


class _TorchObjects(arrays.NumPyObjects):
    """The functions and classes that the pickle of a state_dict may specify."""

    names = (
        *("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"),
        *(f"torch.{name}" for name in _STORAGES),
    )

    def __init__(self):
        self.storages = {}

    def call(self, function, arguments):
        if isinstance(function, arrays.Known):
            match function, arguments:
                case "collections.OrderedDict", ():
                    return {}
                case "torch._utils._rebuild_tensor_v2", (str(key), int(offset), tuple(shape), tuple(strides), *rest):
                    is_valid = len(shape) == len(strides) and all(map(_are_counts, ((offset,), shape, strides)))
                    metadata = rest[2] if len(rest) > 2 else {}
                    if metadata not in (None, {}, {"neg": True}):
                        raise UnreadableError("contains a tensor with metadata other than the negative bit")
                    if is_valid and key in self.storages:
                        return _Tensor(key, offset, shape, strides, bool(metadata))
                case "torch._utils._rebuild_parameter", (_Tensor() as tensor, *_):
                    return tensor
        raise UnreadableError("contains a call that a state_dict does not need")

    def set_content(self, target, state):
        # Ignore the attributes that PyTorch pickles with a state_dict, such as module versions.
        if not isinstance(target, dict):
            raise UnreadableError("contains the state of an object that is not a dict")

    def stored(self, identifier):
        match identifier:
            case ("storage", arrays.Known() as kind, str(key), str(), int(length), *rest) if rest in ([], [None]):
                dtype = _STORAGES.get(kind.removeprefix("torch."))
                storage = dtype and _Storage(dtype, length)
                if storage and self.storages.setdefault(key, storage) == storage:
                    return key
        raise UnreadableError("contains an invalid reference to a storage")


def _tensors(state):
    """Return {name: _Tensor} for the object in a .pth file. Raises UnreadableError if the object is not a
    state_dict, or is empty."""
    for _ in range(2):  # at most two levels of nesting, because a dict in a damaged file may contain itself
        keys = [key for key in _NESTED if isinstance(state, dict) and isinstance(state.get(key), dict)]
        if keys and keys[0].endswith("_ema"):
            others = f" instead of {', '.join(keys[1:])}" if keys[1:] else ""
            logger.info(f"{keys[0]}: using these EMA weights{others}")
        state = state[keys[0]] if keys else state
    if not isinstance(state, dict) or not state:
        raise UnreadableError("the object is not a state_dict, or is empty")
    for name, value in state.items():
        if not isinstance(value, _Tensor):
            raise UnreadableError(f"{name} is not a tensor")
    return state


def _torch_arrays(tensors, storages, raw):
    for storage, data in ((storages[key], data) for key, data in raw.items()):
        if len(data) != (expected := storage.length * _item_size(storage.dtype)):
            raise UnreadableError(f"a tensor storage has {len(data)} bytes instead of {expected}")
    for tensor in tensors.values():
        storages[tensor.key].used.append((tensor.offset, tensor.offset + math.prod(tensor.shape)))
    for storage in storages.values():
        ends = [*(end for limits in sorted(storage.used) for end in limits), storage.length]
        if ends != sorted(ends):
            raise UnreadableError("the tensors overlap or exceed their storage")
    values = {key: _array(data, storages[key].dtype) for key, data in raw.items()}
    return {name: _view(name, tensor, values[tensor.key]) for name, tensor in tensors.items()}


def _view(name, tensor, values):
    """Return the values of a tensor as a NumPy array of the tensor's shape. The values must be contiguous, otherwise
    UnreadableError is raised, but the dimensions may have any order, such as channels last."""
    order = sorted(range(len(tensor.shape)), key=lambda i: (-tensor.strides[i], -tensor.shape[i]))
    shape = [tensor.shape[i] for i in order]
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(tensor.shape[i] > 1 and tensor.strides[i] != stride for i, stride in zip(order, expected, strict=True)):
        raise UnreadableError(f"the values of {name} are not contiguous; save {name}.contiguous()")
    values = values[tensor.offset : tensor.offset + math.prod(shape)].reshape(shape)
    return (-values if tensor.is_negative else values).transpose(np.argsort(order))
