"""Checkpoints from strangers and from broken disks: no file runs code, crashes, hangs, or is taken in silence."""

import contextlib
import os
import pickle
import random
import struct

import numpy as np
import pytest

from conftest import assert_one_sentence
from paddle_resnet.checkpoints import arrays
from paddle_resnet.checkpoints.arrays import UnreadableError

STATE = {
    "conv2d_0.w_0": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 2, 2),
    "batch_norm_0.w_1": np.float64([1.5, 2.5]),
    "learning_rate_0": np.array(0.1, np.float32),
    "steps": np.array([3], np.int64),
    "mask": np.array([[True], [False]]),
    "transposed": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
}
PROTOCOLS = (2, 3, 4)  # those that Paddle writes


def read(tmp_path, data):
    path = tmp_path / "tiny.pdparams"
    path.write_bytes(data)
    return arrays.read_pickle(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_come_back_as_pickle_has_them(tmp_path, protocol):
    state = STATE | {"StructuredToParameterName@@": {"weight": "conv2d_0.w_0"}}
    found = read(tmp_path, pickle.dumps(state, protocol))
    assert found.keys() == STATE.keys()
    for name, array in STATE.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


class Payload:
    """Makes a file when it is unpickled by a reader that runs what it is told."""

    def __init__(self, path, function=None):
        self._call = (function or os.mkdir, (str(path),))

    def __reduce__(self):
        return self._call


def payloads(path):
    """{kind: pickle that makes a folder}."""
    made = Payload(path)
    objects = np.empty(1, object)
    objects[0] = made
    text = f"__import__('os').mkdir({str(path)!r})"
    return {
        "value": pickle.dumps({"a": made}),
        "key": pickle.dumps({made: STATE["steps"]}),
        "beside arrays": pickle.dumps(STATE | {"z": made}, 4),
        "in an array of objects": pickle.dumps({"a": objects}, 4),
        "protocol 0": pickle.dumps({"a": made}, 0),
        "eval, as paddle.save writes tensors": pickle.dumps({"a": Payload(text, eval)}, 4),
        "before a good one": pickle.dumps(made, 4) + pickle.dumps(STATE, 4),
        "INST": b"(S'" + str(path).encode() + b"'\nios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\nS'" + str(path).encode() + b"'\no.",
    }


@pytest.mark.parametrize("kind", payloads(""))
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, kind):
    path = tmp_path / "made"
    data = payloads(path)[kind]
    with pytest.raises(UnreadableError):
        read(tmp_path, data)
    assert not path.exists()


def test_the_payloads_do_run_where_pickle_reads_them(tmp_path):
    """Or the test above would not test anything."""
    for i, kind in enumerate(payloads("")):
        path = tmp_path / str(i)
        with contextlib.suppress(Exception):  # which may follow once the payload has run
            pickle.loads(payloads(path)[kind])
        assert path.exists(), kind


def test_what_is_named_is_said(tmp_path):
    with pytest.raises(UnreadableError, match=r"^it names posix.mkdir, and only arrays are read$"):
        read(tmp_path, pickle.dumps({"a": Payload("x")}, 4))


@pytest.mark.parametrize("user", ["--from-pretrained-params", "--from-checkpoint", "--dry-run", "export"])
def test_commands_run_no_code_of_a_checkpoint(run_train, tmp_path, capsys, user):
    from paddle_resnet import export
    from paddle_resnet.checkpoints import folders

    path, root = tmp_path / "made", tmp_path / "stranger"
    data = pickle.dumps(STATE | {"z": Payload(path)}, 4)
    if user == "export":
        assert run_train()[0] == 0
        meta = folders.verify(tmp_path / "output/Tiny/0")
        files = {f"tiny.{end}": lambda file: file.write(data) for end in ("pdparams", "pdopt")}
        folders.commit(root, "0", files, {name: value for name, value in meta.items() if name != "files"})
        capsys.readouterr()
        assert export.main([str(root / "0"), str(tmp_path / "exported")]) == 2
        assert "names posix.mkdir, and only arrays are read" in capsys.readouterr().err
    else:
        (root / "0").mkdir(parents=True)
        for end in ("pdparams", "pdopt"):
            (root / "0" / f"tiny.{end}").write_bytes(data)
        flags = ["--from-pretrained-params", root / "0", *(["--dry-run"] if user == "--dry-run" else [])]
        if user == "--from-checkpoint":
            flags = [user, root, "--epochs", "2", "--last-epoch-of-checkpoint", "auto"]
        assert run_train(*flags)[0] == 2
        assert_one_sentence(
            capsys.readouterr().err, ["tiny.pdparams cannot be read (it names posix.mkdir", "name another checkpoint"]
        )
    assert not path.exists()


def hostile_pickles():
    """Pickles that take time, memory, or the memory of others where pickle reads them."""
    key = b"\x80\x04})\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60)) + b"K\x01s."
    one = pickle.dumps({"a": STATE["steps"]}, 4)
    return {
        "a key that takes 2^60 steps to hash": key,
        "a list of lists": b"\x80\x04]" + b"]" * 100_000,
        "tuples of tuples": b"\x80\x04)" + b"\x85" * 100_000 + b".",
        "a memo of 32 GB": b"\x80\x04K\x01r\xff\xff\xff\xff.",
        "bytes of 8 EB": b"\x80\x04\x8e" + struct.pack("<Q", 2**62),
        "a frame of 8 EB": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.",
        "a number of 5,000 digits": b"I" + b"9" * 5000 + b"\n.",
        "pointers as objects": one.replace(b"\x02i8", b"\x02O8"),
        "an array of 8 EB": one.replace(b"K\x01\x85", b"\x8a\x08" + b"\xff" * 7 + b"\x3f\x85"),
        "an array larger than its bytes": one.replace(b"K\x01\x85", b"K\x02\x85"),
        "an array smaller than its bytes": one.replace(b"K\x01\x85", b"K\x00\x85"),
        "a number": pickle.dumps({"a": 1.5}, 4),
        "text": pickle.dumps({"a": "text"}, 4),
        "no table": pickle.dumps(STATE["steps"], 4),
        "a number as a name": pickle.dumps({3: STATE["steps"]}, 4),
        "text as an array": pickle.dumps({"a": np.array(["x"])}, 4),
        "complex numbers": pickle.dumps({"a": np.complex64([1])}, 4),
        "nothing": b"",
        "a stop": b".",
        "a dot": b"\x80\x04.",
    }


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", hostile_pickles())
def test_hostile_pickles_are_refused_at_once(tmp_path, kind):
    with pytest.raises(UnreadableError):
        read(tmp_path, hostile_pickles()[kind])


def mutated(data, generator):
    """Bytes with one to four changes: a flipped bit, another byte, a huge word, a piece cut out, doubled or moved."""
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
def test_mutated_pickles_are_arrays_of_numbers_or_refused(tmp_path, protocol, count):
    generator, data = random.Random(count), pickle.dumps(STATE, protocol)
    refused = 0
    for _ in range(count):
        damaged = mutated(data, generator)
        try:
            found = read(tmp_path, damaged)
        except UnreadableError as e:
            refused += 1
            assert len(str(e)) < 300
            continue
        for name, array in found.items():
            assert isinstance(name, str) and array.dtype.kind in "biuf"
            assert array.nbytes <= len(damaged)
    assert count / 3 < refused < count  # some change a number, and no reader can know


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_mutated_npz_files_are_arrays_of_numbers_or_refused(tmp_path, count):
    path, generator = tmp_path / "bn_rank1.npz", random.Random(count)
    np.savez(path, **{name: STATE[name] for name in ("batch_norm_0.w_1", "learning_rate_0")})
    data = path.read_bytes()
    assert len(arrays.read_npz(path)) == 2
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated(data, generator))
        try:
            found = arrays.read_npz(path)
        except UnreadableError:
            refused += 1
        else:
            assert all(array.dtype.kind in "biuf" for array in found.values())
    assert count / 3 < refused < count


def test_npz_files_with_objects_or_compressed_are_refused(tmp_path):
    made, path = tmp_path / "made", tmp_path / "bn_rank1.npz"
    objects = np.empty(1, object)
    objects[0] = Payload(made)
    np.savez(path, a=objects)
    with pytest.raises(UnreadableError, match="allow_pickle"):
        arrays.read_npz(path)
    assert not made.exists()
    np.savez_compressed(path, a=np.zeros(10**6))
    with pytest.raises(UnreadableError, match="it is compressed"):
        arrays.read_npz(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "nothing"])
def test_what_is_not_a_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "tiny.pdparams"
    says = put(path, kind)
    for reader in (arrays.read_pickle, arrays.read_npz):
        with pytest.raises(UnreadableError, match=says):
            reader(path)


def put(path, kind):
    """Put something that is not a regular file at a path; returns what is to be said of it."""
    if kind == "pipe":
        os.mkfifo(path)
        return "not a regular file"
    if kind == "device":
        path.symlink_to("/dev/zero")
        return "not a regular file"
    if kind == "folder":
        path.mkdir()
        return "Is a directory"
    if kind == "loop":
        path.symlink_to(path.name)
        return "Too many levels of symbolic links"
    return "No such file"
