"""Create valid and invalid files in the formats of torch.save without importing torch."""

import io
import struct
import zipfile
from dataclasses import dataclass

import numpy as np

STORAGES = {"<f4": "FloatStorage", "<f8": "DoubleStorage", "<f2": "HalfStorage", "<i8": "LongStorage"}


@dataclass
class Global:
    module: str
    name: str


@dataclass
class Call:
    function: Global
    arguments: tuple


@dataclass
class Stored:
    identifier: tuple


def opcodes(value):
    """Return the opcodes that PyTorch's pickles use to push an object onto the stack."""
    match value:
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            return b"J" + struct.pack("<i", value) if value < 1 << 31 else b"\x8a\x0a" + value.to_bytes(10, "little")
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            return b"}(" + b"".join(opcodes(x) for pair in value.items() for x in pair) + b"u"
        case Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return opcodes(value.function) + opcodes(value.arguments) + b"R"
        case Stored():
            return opcodes(value.identifier) + b"Q"
        case bytes():
            return value


def pickled(value):
    return b"\x80\x02" + opcodes(value) + b"."


def tensor(key, shape, strides=None, offset=0, length=None, kind="FloatStorage", end=(), metadata=()):
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape))) if strides is None else strides
    length = int(np.prod(shape)) if length is None else length
    storage = Stored(("storage", Global("torch", kind), key, "cpu", length, *end))
    hooks = Call(Global("collections", "OrderedDict"), ())
    return Call(
        Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, strides, False, hooks, *metadata)
    )


def tensors(state, end=()):
    return {
        name: tensor(str(i), array.shape, kind=STORAGES[array.dtype.str], end=end)
        for i, (name, array) in enumerate(state.items())
    }


def zipped(value, storages, compression=zipfile.ZIP_STORED):
    """Return the content of a .pth file in the zip format, which PyTorch has used since version 1.6."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("model/data.pkl", pickled(value))
        for key, data in storages.items():
            archive.writestr(f"model/data/{key}", data)
    return buffer.getvalue()


def legacy(value, storages):
    """Return the content of a .pth file in the format that PyTorch used before version 1.6. `storages` is {key:
    (length, bytes)}."""
    header = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}, value, list(storages)]
    data = b"".join(struct.pack("<q", length) + raw for length, raw in storages.values())
    return b"".join(map(pickled, header)) + data
