"""Untrusted and damaged checkpoints. A checkpoint file must not execute code, crash the program or make it hang.
Invalid files must be rejected."""

import base64
import contextlib
import io
import json
import os
import pickle
import random
import reprlib
import shutil
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from conftest import assert_one_error, losses
from helpers import META, write_checkpoint
from paddle_resnet import export
from paddle_resnet.checkpoints import arrays, contents, folders, run_folders
from paddle_resnet.checkpoints.arrays import UnreadableError

pytestmark = pytest.mark.usefixtures("one_block")

STATE = {
    "conv2d_0.w_0": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 2, 2),
    "batch_norm_0.w_1": np.float64([1.5, 2.5]),
    "learning_rate_0": np.array(0.1, np.float32),
    "steps": np.array([3], np.int64),
    "mask": np.array([[True], [False]]),
    "transposed": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
}
PROTOCOLS = (2, 3, 4)  # pickle protocols that Paddle writes


def read(tmp_path, data):
    path = tmp_path / "tiny.pdparams"
    path.write_bytes(data)
    return arrays.read_pickle(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_read_arrays_equal_unpickled_arrays(tmp_path, protocol):
    state = STATE | {"StructuredToParameterName@@": {"weight": "conv2d_0.w_0"}}
    result = read(tmp_path, pickle.dumps(state, protocol))
    assert result.keys() == STATE.keys()
    for name, array in STATE.items():
        assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(result[name], array)


class Payload:
    """An object that executes code when an unsafe reader unpickles it. By default, the code creates a folder."""

    def __init__(self, path, function=None):
        self._call = (function or os.mkdir, (str(path),))

    def __reduce__(self):
        return self._call


def payloads(path):
    """Return {kind: pickle that creates a folder when it is loaded}."""
    made = Payload(path)
    objects = np.empty(1, object)
    objects[0] = made
    text = f"__import__('os').mkdir({str(path)!r})"
    return {
        "value": pickle.dumps({"a": made}),
        "key": pickle.dumps({made: STATE["steps"]}),
        "next to arrays": pickle.dumps(STATE | {"z": made}, 4),
        "in an object array": pickle.dumps({"a": objects}, 4),
        "protocol 0": pickle.dumps({"a": made}, 0),
        "eval, as paddle.save writes tensors": pickle.dumps({"a": Payload(text, eval)}, 4),
        "before a valid pickle": pickle.dumps(made, 4) + pickle.dumps(STATE, 4),
        "INST": b"(S'" + str(path).encode() + b"'\nios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\nS'" + str(path).encode() + b"'\no.",
    }


@pytest.mark.parametrize("kind", payloads(""))
def test_code_in_pickle_is_rejected_and_not_run(tmp_path, kind):
    path = tmp_path / "made"
    data = payloads(path)[kind]
    with pytest.raises(UnreadableError):
        read(tmp_path, data)
    assert not path.exists()


def test_payloads_run_in_pickle_module(tmp_path):
    """Check that the pickle module executes the payloads. Otherwise, test_code_in_pickle_is_rejected_and_not_run could
    never fail."""
    for i, kind in enumerate(payloads("")):
        path = tmp_path / str(i)
        with contextlib.suppress(Exception):  # pickle may raise an error after the payload has run
            pickle.loads(payloads(path)[kind])
        assert path.exists(), kind


def test_error_contains_unsupported_function(tmp_path):
    assert str(UnreadableError("a\x1b[0m\n" + "b" * 300)) == "a?[0m?" + "b" * 194
    with pytest.raises(UnreadableError, match="^odd$"), arrays.errors():
        raise OSError("odd")
    with pytest.raises(UnreadableError, match=r"^posix.mkdir is not supported; only arrays are supported$"):
        read(tmp_path, pickle.dumps({"a": Payload("x")}, 4))
    for data in (b"\x80\x04K\x01\x86.", b"\x80\x04]](ae."):  # a pair of one object; a mark above the end of the stack
        with pytest.raises(UnreadableError, match="^stack underflow$"):
            read(tmp_path, data)


def test_long_string_in_pickle_does_not_need_more_memory_than_the_file():
    class File(io.BytesIO):
        def read(self, length):
            lengths.append(length)
            return super().read(length)

    lengths, data = [], b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc."
    with pytest.raises(ValueError, match="expected 1099511627776 bytes in a bytes8, but only 4 remain"):
        arrays.interpret(File(data), len(data), arrays.NumPyObjects())
    assert max(lengths) <= len(data)
    with pytest.raises(UnreadableError, match="^the opcode NEWOBJ is not supported; only arrays are supported$"):
        arrays.interpret(io.BytesIO(b"\x80\x04\x81."), 4, arrays.NumPyObjects())


@pytest.mark.parametrize("command", ["--from-pretrained-params", "--from-checkpoint", "--dry-run", "export"])
def test_commands_do_not_run_code_in_checkpoint(run_train, tmp_path, capsys, command):
    path, root = tmp_path / "made", tmp_path / "untrusted"
    data = pickle.dumps(STATE | {"z": Payload(path)}, 4)
    if command == "export":
        assert run_train()[0] == 0
        meta = contents.verify(tmp_path / "output/Tiny/0")
        files = {f"tiny.{end}": lambda file: file.write(data) for end in ("pdparams", "pdopt")}
        folders.commit(root, "0", files, {name: value for name, value in meta.items() if name != "files"})
        capsys.readouterr()
        assert export.main([str(root / "0"), str(tmp_path / "exported")]) == 2
        err = capsys.readouterr().err
        assert f"error: {root / '0'}: " in err and "posix.mkdir is not supported; only arrays are supported" in err
    else:
        (root / "0").mkdir(parents=True)
        for end in ("pdparams", "pdopt"):
            (root / "0" / f"tiny.{end}").write_bytes(data)
        flags = ["--from-pretrained-params", root / "0", *(["--dry-run"] if command == "--dry-run" else [])]
        if command == "--from-checkpoint":
            flags = [command, root, "--epochs", "2", "--last-epoch-of-checkpoint", "auto"]
        assert run_train(*flags)[0] == 2
        assert_one_error(
            capsys.readouterr().err, ["tiny.pdparams cannot be read (posix.mkdir is not supp", "choose a different"]
        )
    assert not path.exists()


def hostile_pickles():
    """Return pickles that are damaged, or contain anything other than arrays of numbers.

    The pickle module can read each of them with little time and memory, or raises an error. With larger numbers, the
    first three would make it use gigabytes of memory or hours.
    """
    key = ()
    for _ in range(10):
        key = (key, key)  # hashing this object takes 2^10 steps
    one = pickle.dumps({"a": STATE["steps"]}, 4)
    text = b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93\x94\x8c\x06latin1\x94X" + struct.pack("<I", 10**6)
    text += b"x" * 10**6 + b"\x94"
    return {
        "text encoded 30 times": text + b"h\x00h\x02h\x01\x86R" * 30 + b".",
        "memo of 16 MB": b"\x80\x04K\x01r" + struct.pack("<I", 2**20) + b".",
        "nested tuple as name": pickle.dumps({key: STATE["steps"]}, 4),
        "name of 1 MB set 100 times": text + b"}" + b"h\x02K\x01s" * 100 + b".",
        "nested lists": b"\x80\x04]" + b"]" * 100_000,
        "nested tuples": b"\x80\x04)" + b"\x85" * 100_000 + b".",
        "bytes of 8 EB": b"\x80\x04\x8e" + struct.pack("<Q", 2**62),
        "frame of 8 EB": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.",
        "number of 5,000 digits": b"I" + b"9" * 5000 + b"\n.",
        "array of 8 EB": one.replace(b"K\x01\x85", b"\x8a\x08" + b"\xff" * 7 + b"\x3f\x85"),
        "array larger than its bytes": one.replace(b"K\x01\x85", b"K\x02\x85"),
        "array smaller than its bytes": one.replace(b"K\x01\x85", b"K\x00\x85"),
        "array without content": b"\x80\x04}X\x01\x00\x00\x00acnumpy.core.multiarray\n_reconstruct\n)Rs.",
        "number": pickle.dumps({"a": 1.5}, 4),
        "text": pickle.dumps({"a": "text"}, 4),
        "array without dict": pickle.dumps(STATE["steps"], 4),
        "number as name": pickle.dumps({3: STATE["steps"]}, 4),
        "text array": pickle.dumps({"a": np.array(["x"])}, 4),
        "complex array": pickle.dumps({"a": np.complex64([1])}, 4),
        "empty file": b"",
        "only STOP": b".",
        "only PROTO and STOP": b"\x80\x04.",
    }


NAMES = "the keys are not variable names"


@pytest.mark.parametrize("kind", hostile_pickles())
def test_hostile_pickles_are_rejected(tmp_path, kind):
    message = {"nested tuple as name": NAMES, "name of 1 MB set 100 times": NAMES, "number as name": NAMES}.get(kind)
    with pytest.raises(UnreadableError, match=message):
        read(tmp_path, hostile_pickles()[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text encoded 30 times", "contains text that expands to more than the file size"),
        ("memo of 16 MB", "not a table of arrays"),
    ],
)
def test_memory_is_bounded_by_file_size(tmp_path, kind, message):
    data = hostile_pickles()[kind]
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError, match=message):
            read(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data) + 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", ["O8", "O", "V8", "U1", "S1", "c8", "M8", "f16"])
def test_only_types_of_numbers_are_accepted(code):
    """NumPy interprets the bytes of an array of objects as pointers, and crashes when it uses them."""
    objects = arrays.NumPyObjects()
    assert objects.call(objects.known("numpy", "dtype"), ("i8", False, True)) == np.int64
    with pytest.raises(UnreadableError, match="contains a call that an array of numbers does not need"):
        objects.call(objects.known("numpy", "dtype"), (code, False, True))


def mutated(data, generator):
    """Return the data with one to four mutations: a flipped bit, a random byte, an extreme integer, or a piece that is
    removed, duplicated or copied over other data. In addition, one in ten results is truncated."""
    data = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(data))
        piece = data[at : at + generator.randint(1, 40)]
        match generator.randrange(6):
            case 0:
                data[at] ^= 1 << generator.randrange(8)
            case 1:
                data[at] = generator.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", generator.choice([0, 2**31 - 1, 2**31, 2**32 - 1]))
            case 3:
                del data[at : at + len(piece)]
            case 4:
                data[at:at] = piece
            case 5:
                to = generator.randrange(len(data))
                data[to : to + len(piece)] = piece
    return bytes(data[: generator.randrange(len(data))] if generator.random() < 0.1 else data)


@pytest.mark.parametrize("count", [600, pytest.param(6000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_mutated_pickles_are_numeric_arrays_or_rejected(tmp_path, protocol, count):
    generator, data = random.Random(count), pickle.dumps(STATE, protocol)
    rejected = 0
    for _ in range(count):
        damaged = mutated(data, generator)
        try:
            result = read(tmp_path, damaged)
        except UnreadableError as e:
            rejected += 1
            assert len(str(e)) < 300
            continue
        for name, array in result.items():
            assert isinstance(name, str) and array.dtype.kind in "biuf"
            assert array.nbytes <= len(damaged)
    assert count / 3 < rejected < count  # mutations that only change array values are not detected


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_mutated_npz_files_are_numeric_arrays_or_rejected(tmp_path, count):
    path, generator = tmp_path / "bn_rank1.npz", random.Random(count)
    np.savez(path, **{name: STATE[name] for name in ("batch_norm_0.w_1", "learning_rate_0")})
    data = path.read_bytes()
    assert len(arrays.read_npz(path)) == 2
    rejected = 0
    for _ in range(count):
        path.write_bytes(mutated(data, generator))
        try:
            result = arrays.read_npz(path)
        except UnreadableError:
            rejected += 1
        else:
            assert all(array.dtype.kind in "biuf" for array in result.values())
    assert count / 3 < rejected < count


@pytest.mark.parametrize("content", [b"not an array", np.array(["text"])], ids=["other file", "text"])
def test_npz_files_with_other_content_are_rejected(tmp_path, content):
    path = tmp_path / "bn_rank1.npz"
    np.savez(path, a=np.zeros(3), **{} if isinstance(content, bytes) else {"b": content})
    if isinstance(content, bytes):
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("b", content)
    with pytest.raises(UnreadableError, match="'b' is not an array of numbers"):
        arrays.read_npz(path)


def test_npz_files_with_objects_or_compression_are_rejected(tmp_path):
    made, path = tmp_path / "made", tmp_path / "bn_rank1.npz"
    objects = np.empty(1, object)
    objects[0] = Payload(made)
    np.savez(path, a=objects)
    with pytest.raises(UnreadableError, match="allow_pickle"):
        arrays.read_npz(path)
    assert not made.exists()
    np.savez_compressed(path, a=np.zeros(10**6))
    with pytest.raises(UnreadableError, match="compressed files are not supported"):
        arrays.read_npz(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b.npy", b"stored")
    with pytest.raises(UnreadableError, match="compressed files are not supported"):
        arrays.read_npz(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "missing"])
def test_parameter_path_that_is_not_a_file_is_rejected(tmp_path, kind):
    path = tmp_path / "tiny.pdparams"
    problem = put(path, kind)
    for reader in (arrays.read_pickle, arrays.read_npz):
        with pytest.raises(UnreadableError, match=problem):
            reader(path)


def put(path, kind):
    """Create a pipe, a link to a device, a folder, a link loop or nothing at the path, and return the expected
    error."""
    if kind == "pipe":
        os.mkfifo(path)
        return "not a regular file"
    if kind == "device":
        path.symlink_to("/dev/null")
        return "not a regular file"
    if kind == "folder":
        path.mkdir()
        return "Is a directory"
    if kind == "loop":
        path.symlink_to(path.name)
        return "Too many levels of symbolic links"
    return "No such file"


RESULT = {"loss": 1.5, "top1": 0.5, "top5": 1.0, "ips": 20.0}
FILE = {"size": 3, "sha256": "0" * 64}
METER = {"sum": 2.0, "count": 3}
LOADER = {"step": 1, "conditions": {}}
# {field of meta.json: invalid values}
IMPOSSIBLE = {
    "sequence": [-1, 1.5, None, "1", True, [], float("nan"), 10**4000],
    "run": [None, 3, []],
    "epoch": [-5, -1, 2**31, 1.0, float("nan"), float("inf"), None, "0", True, [0], {}],
    "step": [-1, 4, 2**31, 1.5, "1", [], float("nan")],
    "steps_each_epoch": [-1, None, "3", 2.5],
    "lr_scheduler": [None, {}, {"last_epoch": -1}, {"last_epoch": "1"}],
    "world_size": [0, -1, None, "1", 10**30],
    "classes": [None, "ab", {}, [1], [None], [["a"]]],
    "class_names": [None, "ab", {}, [1], [None], [["a"]]],
    "cpu": [None, [], {"threads": 1}, {"threads": "1", "instructions": ""}, {"threads": 1, "instructions": []}],
    "asp": [None, [], {"sparse_layers": 1}, {"sparse_layers": -1, "dense_layers": 0}],
    "arguments": [None, [], "lr"],
    "trained": [[], {}, 1, {"loss": 1.5}, RESULT | {"top1": "high"}, RESULT | {"top1": -1}, RESULT | {"steps": []}],
    "evaluated": [[], {}, RESULT | {"top1": 1.5}, RESULT | {"top1": float("nan")}, RESULT | {"top5": None}],
    "best": [[], RESULT, RESULT | {"epoch": -1}, RESULT | {"epoch": "1"}, {"epoch": 1}],
    "seeds": [None, {}, {"python": "x", "numpy": "x"}, META["seeds"] | {"python": "[" * 10_000}]
    + [META["seeds"] | {"numpy": json.dumps(["MT19937", [1] * 624, at, 0, 0.0])} for at in (-1, 625, 1e400)]
    + [META["seeds"] | {"numpy": json.dumps(["MT19937", [1] * 623, 1, 0, 0.0])}],
    "ranks": [
        *([None], [{}], [{"loader": LOADER}], [{"loader": {}, "meters": {}}], None, {}, []),
        [{"loader": LOADER | {"step": -1}, "meters": {}}],
        [{"loader": LOADER | {"conditions": []}, "meters": {}}],
        [{"loader": LOADER, "meters": []}],
        *([{"loader": LOADER | {"pipeline": value}, "meters": {}}] for value in ("*", 3)),
        [{"loader": LOADER | {"epoch": -1}, "meters": {}}],
        *([{"loader": LOADER, "meters": {"loss": METER | {name: -1}}}] for name in ("count", "not_finite")),
        [{"loader": LOADER, "meters": {"loss": {}}}],
        [{"loader": LOADER, "meters": {"loss": METER | {"sum": "1"}}}],
        [{"loader": LOADER, "meters": {"loss": METER}}, {"loader": LOADER, "meters": {"loss": 1}}],
    ],
    "evaluations_since_best": [None, -1, 0.5, "1"],
    "files": [None, [], {}, {"a.pdparams": FILE}, {"a.pdparams": None, "a.pdopt": FILE}]
    + [{"a.pdparams": FILE | {"size": value}, "a.pdopt": FILE} for value in (-1, "3", True)]
    + [{"a.pdparams": FILE | {"sha256": value}, "a.pdopt": FILE} for value in ("0", 0, "A" * 64, "0" * 65)]
    + [
        {"a.pdparams": FILE, "b.pdopt": FILE},
        dict.fromkeys(("a.pdparams", "a.pdopt", "b.pdparams", "b.pdopt"), FILE),
    ]
    + [
        {"a.pdparams": FILE, "a.pdopt": FILE, name: FILE}
        for name in ("../../secret", "/etc/passwd", ".", "", "a/b", "a\0")
    ],
}
# Invalid contents of meta.json, some of which take excessive time or memory to parse.
CONTENTS = {
    "list": b"[1]",
    "number": b"1",
    "null": b"null",
    "text": b'"x"',
    "empty": b"",
    "truncated": b'{"format": 2, "epo',
    "no checksum": b'{"format": 2}',
    "not UTF-8": b"\xff\xfe\xfa",
    "deep and truncated": b"[" * 200_000,
    "deep": b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    "number of 5,000 digits": b'{"epoch": ' + b"9" * 5000 + b"}",
    "too large": b" " * (contents.META_LIMIT + 1),
}


def craft(folder, meta):
    """Write a meta.json with arbitrary content and a correct checksum."""
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps({**meta, "checksum": contents._checksum(meta)}))


@pytest.fixture
def valid(tmp_path):
    """Return the content of a valid meta.json."""
    return contents.read_meta(write_checkpoint(tmp_path, "3"))


def test_valid_meta_json_is_accepted(tmp_path, valid):
    valid["files"]["empty"] = FILE | {"size": 0}
    valid["trained"] = RESULT | {"loss": None, "images": None, "top1": 1, "top5": 0}
    valid["ranks"] = [{"loader": LOADER, "meters": {"loss": METER | {"not_finite": 0}}}]
    craft(tmp_path / "4", valid)
    assert contents.read_meta(tmp_path / "4") == valid


DAMAGED_STATES = {
    "text": {"pipeline": base64.b64encode(b"garbage").decode()},
    "empty pipeline": {"pipeline": ""},
    "no pipeline": {},  # the test removes the field "pipeline"
    "earlier step": {"step": 1},
    "step after the end": {"step": 4},
}
# Field names in the state of DALI's plugin. The test flips a bit in each name.
NAMES_IN_STATES = (b"_size", b"_counter_per_gpu", b"epoch_idx", b"iter")


@pytest.mark.slow
def test_damaged_loader_state_is_reported(run_train, stop_before, tmp_path, capsys):
    """The checksum of meta.json is correct, so the damage is detected only when the loader state is used."""
    stop_before(train_step=2)
    assert run_train()[0] == 75
    stop_before()
    folder = tmp_path / "output/Tiny/0_2"
    meta = contents.read_meta(folder)
    [rank] = meta["ranks"]
    pipeline = base64.b64decode(rank["loader"]["pipeline"])
    states = {name: rank["loader"] | damage for name, damage in DAMAGED_STATES.items()}
    states["no pipeline"].pop("pipeline")
    for name in NAMES_IN_STATES:
        assert name in pipeline
        damaged = base64.b64encode(pipeline.replace(name, name[:-1] + bytes([name[-1] ^ 1]), 1)).decode()
        states[name.decode()] = rank["loader"] | {"pipeline": damaged}
    for damage, state in states.items():
        craft(folder, meta | {"ranks": [rank | {"loader": state}]})
        capsys.readouterr()
        assert run_train("--resume")[0] == 2, damage
        message = [
            f"{folder}: the loader state is damaged (",
            "); move this checkpoint away, or choose a different one",
        ]
        if "step" in DAMAGED_STATES.get(damage, ()):
            message = ["contains no valid checkpoint"]
        assert_one_error(capsys.readouterr().err, message)


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_error_for_invalid_value_contains_field(tmp_path, valid, field):
    for value in IMPOSSIBLE[field]:
        craft(tmp_path / "4", valid | {field: value})
        with pytest.raises(contents.DamagedError) as error:
            contents.read_meta(tmp_path / "4")
        limit = " of 3" if (field, value) == ("step", 4) else ""
        assert str(error.value) == f"meta.json is damaged: {field} is {reprlib.repr(value)[:100]}{limit}"
    craft(tmp_path / "4", {name: value for name, value in valid.items() if name != field})
    if field in ("asp", "class_names", "cpu", "evaluations_since_best"):  # not in all checkpoints
        assert field not in contents.read_meta(tmp_path / "4")
        return
    with pytest.raises(contents.DamagedError, match=f"^meta.json is damaged: {field} is missing$"):
        contents.read_meta(tmp_path / "4")


def test_positions_of_checkpoint_and_loader_states_must_agree(tmp_path, valid):
    ranks = [{"loader": LOADER | {"step": step}, "meters": {}} for step in (2, 1)]
    for changes, problem in (
        ({"step": 4}, "step is 4 of 3"),
        ({"step": 2, "ranks": ranks}, "step is 2, but 1 in a loader state"),
        ({"step": 3, "ranks": ranks, "trained": RESULT}, None),  # the evaluation is pending
        ({"step": 2, "ranks": ranks[:1]}, None),
    ):
        craft(tmp_path / "4", valid | changes)
        if problem is None:
            contents.read_meta(tmp_path / "4")
        else:
            with pytest.raises(contents.DamagedError, match=f"^meta.json is damaged: {problem}$"):
                contents.read_meta(tmp_path / "4")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [*CONTENTS, "pipe", "device", "folder", "loop", "missing"])
def test_invalid_meta_json_is_rejected_quickly(tmp_path, kind):
    path = tmp_path / "meta.json"
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
        problem = "meta.json (is damaged|has format None|cannot be read .*limit)"
    else:
        problem = f"meta.json cannot be read .{put(path, kind)}"
    with pytest.raises(contents.DamagedError, match=problem):
        contents.read_meta(tmp_path)


def test_files_outside_manifest_are_ignored(tmp_path, valid):
    for name in ("other.pdparams", "other.pdopt"):
        (tmp_path / "3" / name).write_bytes(b"x")
    assert contents.verify(tmp_path / "3")["files"].keys() == {"a.pdparams", "a.pdopt"}
    assert contents.prefix(tmp_path / "3", None) == tmp_path / "3/a"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_checkpoint_file_that_is_not_regular_is_rejected_quickly(tmp_path, valid, kind):
    (tmp_path / "3/a.pdopt").unlink()
    problem = put(tmp_path / "3/a.pdopt", kind)
    with pytest.raises(contents.DamagedError, match=f"a.pdopt cannot be read .{problem}"):
        contents.verify(tmp_path / "3")


def stray(root, valid):
    """Create invalid checkpoint folders that appear newer than all checkpoints. Their meta.json files are missing, have
    invalid content, or are pipes, folders or links.

    Returns:
        The number of created folders.
    """
    name = iter(range(1000, 2000))
    for field, values in IMPOSSIBLE.items():
        craft(root / str(next(name)), valid | {"sequence": 10**6, "epoch": 900} | {field: values[0]})
    for content in CONTENTS.values():
        folder = root / str(next(name))
        folder.mkdir()
        (folder / "meta.json").write_bytes(content)
    for kind in ("pipe", "device", "folder", "loop", "missing"):
        folder = root / str(next(name))
        folder.mkdir()
        (folder / "notes").write_text("of the user")
        put(folder / "meta.json", kind)
    (root / str(next(name))).symlink_to("nowhere")
    (root / str(next(name))).write_text("a file")
    folder = root / str(next(name))
    folder.mkdir()
    # NVIDIA's example writes these two files without meta.json; --resume must ignore them.
    for end in ("pdparams", "pdopt"):
        (folder / f"tiny.{end}").write_bytes((root / "0" / f"tiny.{end}").read_bytes())
    return next(name) - 1002  # two of the names, the dangling link and the file, are not folders


@pytest.mark.slow
def test_invalid_folders_stop_neither_run_nor_resume(run_train, tmp_path, capsys):
    """A resumed run and later saves ignore invalid folders next to the checkpoint of epoch 0."""
    root, flags = tmp_path / "output/Tiny", ["--keep-checkpoints", "2"]
    assert run_train("--epochs", "1")[0] == 0
    count = stray(root, contents.read_meta(root / "0"))
    capsys.readouterr()
    assert run_train("--epochs", "3", *flags, "--resume")[0] == 0
    output = capsys.readouterr()
    assert "Tiny/0: continuing with epoch 1" in output.out
    assert output.err.count("it is not a valid checkpoint (meta.json") == count
    assert "Traceback" not in output.err
    assert [p.name for p, _ in run_folders.newest_first(root)[0]][:2] == ["2", "1"]
    assert contents.verify(root / "2")["epoch"] == 2


@pytest.mark.slow
def test_unreadable_folder_does_not_stop_resume(run_train, tmp_path, capsys):
    assert run_train("--epochs", "1")[0] == 0
    root = tmp_path / "output/Tiny"
    (root / "99").mkdir()
    (root / "99/notes").write_text("of the user")
    (root / "99/meta.json").symlink_to("meta.json")  # root, too, cannot read a link to itself
    assert run_train("--epochs", "2", "--resume")[0] == 0
    assert "Tiny/99: skipped, because it is not a valid checkpoint (meta.json cannot" in capsys.readouterr().err


def test_resume_rejects_checkpoint_without_meta_json(run_train, tmp_path, capsys):
    assert run_train()[0] == 0
    (tmp_path / "output/Tiny/0/meta.json").unlink()
    assert run_train("--epochs", "2", "--resume")[0] == 2
    message = [
        "Tiny (0) have no meta.json; if they are from another program",
        "--last-epoch-of-checkpoint auto",
    ]
    assert_one_error(capsys.readouterr().err, message)


@pytest.mark.slow
def test_unlisted_statistics_are_not_read(run_train, stop_before, tmp_path):
    """Regression test: bn_rank0.npz, a file that no run writes, could set any variable."""
    stop_before(train_step=1)
    assert run_train("--print-interval", "1")[0] == 75
    stop_before()
    folder = tmp_path / "output/Tiny/0_1"
    np.savez(folder / "bn_rank0.npz", **{"linear_0.w_0": np.zeros((256, 3), np.float32)})
    shutil.copytree(tmp_path / "output", tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/Tiny/0_1/bn_rank0.npz").unlink()
    _, expected = run_train("--print-interval", "1", "--resume", "--output-dir", tmp_path / "copy")
    code, report = run_train("--print-interval", "1", "--resume")
    assert code == 0
    assert losses(report) == losses(expected)


def test_export_reports_invalid_arguments_in_meta_json(run_train, tmp_path, capsys):
    assert run_train()[0] == 0
    folder = tmp_path / "output/Tiny/0"
    meta = contents.read_meta(folder)
    for name, value in [
        ("image_shape", "wide"),
        ("image_shape", [3, 32, 32, 32, 32]),
        ("image_shape", [3, [32], 32]),
        ("lr", {"a": 1}),
        ("lr", json.loads("[" * 600 + "1" + "]" * 600)),
        ("model_prefix", "../../secret"),
        ("num_of_class", -1),
    ]:
        craft(folder, meta | {"arguments": meta["arguments"] | {name: value}})
        capsys.readouterr()
        assert export.main([str(folder), str(tmp_path / "exported")]) == 2
        assert "Tiny/0: meta.json contains an invalid flag (" in capsys.readouterr().err
