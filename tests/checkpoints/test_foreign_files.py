"""Weight files of other projects. Arrays of every supported format are read without loss of precision. Damaged and
malicious files are rejected, and code in such files is never executed."""

import importlib.util
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from paddle_resnet.checkpoints import foreign_files
from paddle_resnet.checkpoints.arrays import UnreadableError
from torch_files import Call, Global, Stored, legacy, opcodes, pickled, tensor, tensors, zipped

WEIGHT = np.linspace(-1, 1, 36, dtype=np.float32).reshape(2, 3, 3, 2)
BIAS = np.float32([0.5, -2])
COUNT = np.array(7, np.int64)
STATE = {"conv.weight": WEIGHT, "conv.bias": BIAS, "bn.num_batches_tracked": COUNT}


def safetensors(entries, data, extra=b""):
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data + extra


def whole(state):
    """Serialize a state in each supported format and return {file name: bytes}."""
    raw = {str(i): array.tobytes() for i, array in enumerate(state.values())}
    entries, start = {"__metadata__": {"format": "pt"}}, 0
    for name, array in state.items():
        dtype = {"f": "F", "i": "I"}[array.dtype.kind] + str(8 * array.itemsize)
        entries[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    lengths = {str(i): (array.size, array.tobytes()) for i, array in enumerate(state.values())}
    return {
        "zip.pth": zipped(tensors(state), raw),
        "nested.pth.tar": zipped({"epoch": 3, "state_dict": tensors(state)}, raw),
        "legacy.pt": legacy(tensors(state, end=(None,)), lengths),
        "tensors.safetensors": safetensors(entries, b"".join(raw.values())),
        "arrays.pdparams": pickle.dumps(state | {"StructuredToParameterName@@": {"a": "b"}}, 4),
    }


def read(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    return foreign_files.read(tmp_path / name)


def assert_equal(actual, state):
    assert actual.keys() == state.keys()
    for name, array in state.items():
        assert actual[name].dtype == (np.float32 if array.dtype.kind == "f" else array.dtype)
        np.testing.assert_array_equal(actual[name], array)


@pytest.mark.parametrize("name", whole(STATE))
def test_every_format_returns_the_stored_arrays(tmp_path, name):
    assert_equal(read(tmp_path, name, whole(STATE)[name]), STATE)
    os.truncate(tmp_path / name, foreign_files.MAX_BYTES + 1)  # a sparse file
    with pytest.raises(UnreadableError, match=f"limit {foreign_files.MAX_BYTES}"):
        foreign_files.read(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("name", whole(STATE))
def test_float64_and_float16_become_float32(tmp_path, name, dtype):
    state = {"w": WEIGHT.astype(dtype)}
    assert_equal(read(tmp_path, name, whole(state)[name]), state)


def test_bfloat16_becomes_float32(tmp_path):
    data, expected = np.uint16([0x3F80, 0xC020]).tobytes(), {"w": np.float32([1, -2.5])}
    entries = {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    assert_equal(read(tmp_path, "w.safetensors", safetensors(entries, data)), expected)
    value = {"w": tensor("0", (2,), kind="BFloat16Storage")}
    assert_equal(read(tmp_path, "W.PTH", zipped(value, {"0": data})), expected)


def test_header_of_safetensors_may_have_any_order(tmp_path):
    data = two([8, 16], [0, 8], np.float32([1, 2, 3, 4]).tobytes())
    assert_equal(read(tmp_path, "x.safetensors", data), {"a": np.float32([3, 4]), "b": np.float32([1, 2])})


def test_tensors_may_be_permuted_and_share_a_storage(tmp_path):
    channels_last = np.arange(24, dtype=np.float32).reshape(2, 2, 2, 3).transpose(0, 3, 1, 2)
    value = {
        "a": tensor("0", (2, 3, 2, 2), (12, 1, 6, 3), 0, 27),
        "b": tensor("0", (2, 1), (1, 99), 25, 27),  # the stride of a dimension of size 1 is irrelevant
    }
    data = np.arange(27, dtype=np.float32).tobytes()
    actual = read(tmp_path, "a.pth", zipped(value, {"0": data}))
    assert_equal(actual, {"a": channels_last, "b": np.float32([[25], [26]])})


def test_tensor_with_negative_bit_is_negated(tmp_path):
    parts = {"0": BIAS.tobytes()}
    for metadata, sign in (({"neg": True}, -1), ({}, 1)):
        value = tensor("0", (2,), metadata=(metadata,))
        assert_equal(read(tmp_path, "a.pth", zipped({"a": value}, parts)), {"a": sign * BIAS})
    value = tensor("0", (2,), metadata=({"conj": True},))
    with pytest.raises(UnreadableError, match="metadata other than the negative bit"):
        read(tmp_path, "a.pth", zipped({"a": value}, parts))


def test_state_dict_that_contains_itself_is_rejected(tmp_path):
    content = b"\x80\x02}q\x00" + opcodes("model") + b"h\x00s."
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("m/data.pkl", content)
    with pytest.raises(UnreadableError, match="model is not a tensor"):
        foreign_files.read(tmp_path / "a.pth")


def test_state_dict_may_be_nested_in_two_dicts(tmp_path):
    value = {"epoch": 3, "model": {"args": {}, "state_dict": {"a": tensor("0", (2,))}}}
    assert_equal(read(tmp_path, "a.pth", zipped(value, {"0": BIAS.tobytes()})), {"a": BIAS})


def test_state_dict_may_contain_parameters_and_attributes(tmp_path):
    parameter = Call(Global("torch._utils", "_rebuild_parameter"), (tensor("0", (2,)), True, ()))
    table = opcodes(Call(Global("collections", "OrderedDict"), ())) + b"(" + opcodes("a") + opcodes(parameter) + b"u"
    attributes = opcodes({"_metadata": {"": {"version": 1}}}) + b"b"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + table + attributes + b".")
        archive.writestr("m/data/0", BIAS.tobytes())
    assert_equal(read(tmp_path, "a.pth", buffer.getvalue()), {"a": BIAS})


def test_files_written_by_torch_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array.copy()) for name, array in STATE.items()}
    state["conv.weight"] = torch.nn.Parameter(state["conv.weight"].to(memory_format=torch.channels_last))
    for is_zip in (True, False):
        torch.save(state, tmp_path / "t.pth", _use_new_zipfile_serialization=is_zip)
        assert_equal(foreign_files.read(tmp_path / "t.pth"), STATE)


def one(**changes):
    """Return a zip archive that contains a tensor of four values."""
    return zipped({"w": tensor("0", **({"shape": (4,)} | changes))}, {"0": bytes(16)})


def entry(**changes):
    """Return a .safetensors file that contains a tensor of four values."""
    return safetensors({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}, bytes(16))


def two(first, second, data=bytes(16)):
    entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in (("a", first), ("b", second))}
    return safetensors(entries, data)


def pdparams(state):
    return pickle.dumps(state, 4)


NAN = np.float32([1, np.nan, 2, 3]).tobytes()
LEGACY = 0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}
SHARED = np.zeros(1000, np.float16)
HOSTILE = {
    "name.npy": (b"", "the name does not end in .pdparams, .safetensors, .pth"),
    "empty.pth": (b"", "not written by torch.save"),
    "text.pth": (b"<html>", "not written by torch.save"),
    "truncated.pth": (one()[:-30], "BadZipFile"),
    "module.pth": (zipped({"w": Call(Global("os", "mkdir"), ("made",))}, {}), "os.mkdir is not supported"),
    "called storage.pth": (zipped({"w": Call(Global("torch", "FloatStorage"), (4,))}, {}), "contains a call"),
    "model.pth": (zipped(Call(Global("torch.nn.modules.linear", "Linear"), ()), {}), "Linear is not supported"),
    "nested pickle.pth": (zipped({"w": Call(Global("pickle", "loads"), ("x",))}, {}), "pickle.loads is not supported"),
    "called text.pth": (zipped({"w": Call("collections.OrderedDict", ())}, {}), "contains a call"),
    "text as storage.pth": (
        zipped({"w": Call(Global("torch._utils", "_rebuild_tensor_v2"), ("0", 0, (4,), (1,)))}, {"0": bytes(16)}),
        "contains a call",
    ),
    "state of a list.pth": (zipped(opcodes([]) + opcodes({}) + b"b", {}), "the state of an object that is not a dict"),
    "number.pth": (zipped({"w": 3}, {}), "w is not a tensor"),
    "table.pth": (zipped({}, {}), "is not a state_dict, or is empty"),
    "list.pth": (zipped([tensor("0", (4,))], {"0": bytes(16)}), "is not a state_dict, or is empty"),
    "compressed.pth": (
        zipped({"w": tensor("0", (4,))}, {"0": bytes(16)}, zipfile.ZIP_DEFLATED),
        "compressed archives are not supported",
    ),
    "no pickle.pth": (zipped({}, {}).replace(b"data.pkl", b"data.abc"), "0 data.pkl files instead of 1"),
    "missing storage.pth": (zipped({"w": tensor("0", (4,))}, {}), "There is no item named"),
    "short storage.pth": (zipped({"w": tensor("0", (4,))}, {"0": bytes(12)}), "12 bytes instead of 16"),
    "long storage.pth": (zipped({"w": tensor("0", (4,))}, {"0": bytes(20)}), "20 bytes instead of 16"),
    "beyond.pth": (one(offset=1, length=4), "exceed their storage"),
    "expanded in two dimensions.pth": (one(shape=(1 << 10, 1 << 10), strides=(0, 0), length=4), "exceed their storage"),
    "expanded.pth": (one(shape=(1000,), strides=(0,), length=4), "exceed their storage"),
    "expanded within.pth": (one(shape=(2, 2), strides=(0, 1)), "are not contiguous; save"),
    "with gaps.pth": (one(shape=(2,), strides=(2,), length=4), "are not contiguous; save"),
    "negative.pth": (one(strides=(-1,)), "contains a call"),
    "dimensions.pth": (one(shape=(1,) * 99, length=4), "contains a call"),
    "no stride.pth": (one(strides=()), "contains a call"),
    "overlap.pth": (
        zipped({"a": tensor("0", (4,)), "b": tensor("0", (2,), offset=3, length=4)}, {"0": bytes(16)}),
        "the tensors overlap",
    ),
    "twice.pth": (zipped({"a": tensor("0", (4,)), "b": tensor("0", (4,))}, {"0": bytes(16)}), "the tensors overlap"),
    "two types.pth": (
        zipped({"a": tensor("0", (4,)), "b": tensor("0", (2,), kind="DoubleStorage")}, {"0": bytes(16)}),
        "invalid reference to a storage",
    ),
    "view of a storage.pth": (one(end=(("1", 0, 4),)), "invalid reference to a storage"),
    "table as storage.pth": (
        zipped(Stored(("storage", Global("collections", "OrderedDict"), "0", "cpu", 4)), {"0": bytes(32)}),
        "invalid reference to a storage",
    ),
    "complex.pth": (one(kind="ComplexFloatStorage"), "torch.ComplexFloatStorage is not supported"),
    "nan.pth": (zipped({"w": tensor("0", (4,))}, {"0": NAN}), "w has values that are not finite"),
    "legacy truncated.pth": (legacy({"w": tensor("0", (4,))}, {"0": (4, bytes(12))}), "12 bytes instead of 16"),
    "legacy length.pth": (
        legacy({"w": tensor("0", (4,))}, {"0": (1 << 40, bytes(16))}),
        "1099511627776 values instead of 4",
    ),
    "legacy huge.pth": (
        legacy({"w": tensor("0", (4,), length=1 << 20)}, {"0": (1 << 20, bytes(16))}),
        "16 bytes instead of 4194304",
    ),
    "legacy keys.pth": (legacy({"w": tensor("0", (4,))}, {"1": (4, bytes(16))}), "list of storages does not match"),
    "legacy table of keys.pth": (
        b"".join(map(pickled, (*LEGACY, {"w": tensor("0", (4,))}, {"0": 1}))) + struct.pack("<q", 4) + bytes(16),
        "list of storages does not match",
    ),
    "legacy platform.pth": (
        b"".join(map(pickled, (*LEGACY[:2], 3, {}, []))),
        "the version or byte order is not supported",
    ),
    "legacy version.pth": (
        b"".join(map(pickled, (LEGACY[0], 1002, LEGACY[2], {}, []))),
        "the version or byte order is not supported",
    ),
    "legacy big endian.pth": (
        b"".join(map(pickled, (*LEGACY[:2], {"little_endian": False}, {}, []))),
        "the version or byte order is not supported",
    ),
    "empty.safetensors": (b"", "the header has an invalid length of 0 bytes"),
    "header.safetensors": (
        struct.pack("<Q", 1 << 60) + b"{}",
        "the header has an invalid length of 1152921504606846976 bytes",
    ),
    "syntax.safetensors": (safetensors(b"{:", b""), "JSONDecodeError"),
    "deep.safetensors": (safetensors(b"[" * 100000, b""), "RecursionError"),
    "list.safetensors": (safetensors([], b""), "the header is not a table"),
    "long name.safetensors": (safetensors({"9" * 5000: 3}, b""), "the keys of the header are not variable names"),
    "entry.safetensors": (safetensors({"w": 3}, b""), "w has no valid data_offsets"),
    "twice.safetensors": (safetensors(b'{"w": 1, "w": 2}', b""), "a name occurs twice"),
    "type.safetensors": (entry(dtype="F8_E4M3"), "w has the unsupported type F8_E4M3"),
    "shape.safetensors": (entry(shape=[5]), "offsets of w do not match"),
    "shape bomb.safetensors": (entry(shape=[1 << 39] * 8), "offsets of w do not match"),
    "shape text.safetensors": (entry(shape="4"), "w has an invalid shape"),
    "negative shape.safetensors": (entry(shape=[-2, -2]), "w has an invalid shape"),
    "three offsets.safetensors": (entry(data_offsets=[0, 16, 16]), "w has no valid data_offsets"),
    "fractions.safetensors": (entry(data_offsets=[0.0, 16.0]), "w has no valid data_offsets"),
    "negative.safetensors": (entry(data_offsets=[-16, 0]), "w has no valid data_offsets"),
    "outside.safetensors": (entry(data_offsets=[0, 32], shape=[8]), "ValueError"),
    "hole.safetensors": (two([0, 8], [12, 20]), "offsets of b do not match"),
    "overlap.safetensors": (two([0, 8], [4, 12]), "offsets of b do not match"),
    "rest.safetensors": (two([0, 8], [8, 16]) + b"x", "17 bytes of tensors instead of 16"),
    "nan.safetensors": (
        safetensors({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, NAN),
        "w has values that are not finite",
    ),
    "infinite.pdparams": (pdparams({"w": np.float64([1e300])}), "w has values that are not finite in float32"),
    "objects.pdparams": (pdparams({"w": np.array([print])}), "a call that an array of numbers does not need"),
    "shared.pdparams": (pdparams({str(i): SHARED for i in range(50)}), "the arrays overlap"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_rejected(tmp_path, work_in, name):
    work_in(tmp_path)
    data, reason = HOSTILE[name]
    with pytest.raises(UnreadableError) as error:
        read(tmp_path, name, data)
    assert reason in str(error.value)
    assert os.listdir(tmp_path) == [name]  # no code was executed


def test_big_endian_archive_is_rejected(tmp_path):
    for order in (b"little", b"big"):
        with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
            archive.writestr("m/data.pkl", pickled({"w": tensor("0", (2,))}))
            archive.writestr("m/data/0", BIAS.tobytes())
            archive.writestr("m/byteorder", order)
        if order == b"little":
            assert_equal(foreign_files.read(tmp_path / "a.pth"), {"w": BIAS})
    with pytest.raises(UnreadableError, match="byte order"):
        foreign_files.read(tmp_path / "a.pth")


@pytest.mark.parametrize("compress_size", [4000, 0])
def test_archive_with_overlapping_entries_is_rejected(tmp_path, compress_size):
    """The central directory of a zip archive may list the same bytes under several names."""
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("m/data.pkl", pickled({f"w{i}": tensor(str(i), (1000,)) for i in range(20)}))
        archive.writestr("m/data/0", bytes(4000))
        last = archive.infolist()[-1]
        for i in range(1, 20):
            copy = zipfile.ZipInfo(f"m/data/{i}")
            copy.header_offset, copy.CRC = last.header_offset, last.CRC
            copy.file_size, copy.compress_size = 4000, compress_size
            archive.filelist.append(copy)
    with pytest.raises(UnreadableError, match="entries of the archive overlap"):
        foreign_files.read(tmp_path / "a.pth")


@pytest.mark.parametrize("name", whole(STATE))
def test_changed_bytes_raise_unreadable_error_or_change_values(tmp_path, name):
    """Changed bytes cause no exceptions other than UnreadableError, and no large memory allocations."""
    data, random = whole(STATE)[name], np.random.default_rng(0)
    tracemalloc.start()
    for _ in range(150):
        changed = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            changed[at] = random.integers(0, 256)
        changed = changed[: random.integers(0, len(data))] if random.random() < 0.2 else changed
        try:
            read(tmp_path, name, bytes(changed))
        except UnreadableError as error:
            assert str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_path_that_is_not_a_regular_file_is_rejected(tmp_path, kind):
    path = tmp_path / "a.pth"
    {"missing": str, "folder": os.mkdir, "pipe": os.mkfifo}[kind](path)
    with pytest.raises(UnreadableError):
        foreign_files.read(path)


@pytest.mark.parametrize("name", ["w", "weight"])  # headers of two lengths
def test_written_safetensors_are_read_back(tmp_path, name):
    tensors = {
        name: np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "scalar": np.array([0.5], np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "w.safetensors"
    with open(path, "wb") as file:
        foreign_files.write_safetensors(file, tensors, {"format": "pt"})
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert_equal(foreign_files.read(path), tensors)
    if importlib.util.find_spec("safetensors") is not None:
        from safetensors.numpy import load_file

        assert_equal(load_file(path), tensors)
