import hashlib
import json
import os

import numpy as np
import pytest

from helpers import write_checkpoint
from paddle_resnet.checkpoints import contents, folders, run_folders
from paddle_resnet.settings.values import FlagValue


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("file", ["a.pdparams", "a.pdopt", "meta.json"])
@pytest.mark.parametrize("damage", [flip_bit, truncate, lengthen, lambda path: path.write_bytes(b""), os.remove])
def test_damaged_file_is_detected_and_reported(tmp_path, file, damage):
    folder = write_checkpoint(tmp_path, "3")
    damage(folder / file)
    with pytest.raises(contents.DamagedError, match=file):
        contents.verify(folder)


@pytest.mark.slow
def test_flipped_bit_in_meta_json_is_detected_or_harmless(tmp_path):
    folder = write_checkpoint(tmp_path, "3", rate=0.125)
    data = (folder / "meta.json").read_bytes()
    meta, harmless = contents.verify(folder), 0
    bits = range(0, 8 * len(data), 61)
    for i in bits:
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        (folder / "meta.json").write_bytes(flipped)
        try:
            assert contents.verify(folder) == meta
            harmless += 1
        except contents.DamagedError:
            pass
    assert harmless < len(bits) / 8  # a bit flip that replaces one white-space character with another is harmless


def test_meta_json_with_unknown_format_is_rejected(tmp_path):
    folder = write_checkpoint(tmp_path, "3")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(contents.DamagedError, match="format 99, but this version reads format 2"):
        contents.verify(folder)


def test_manifest_counts_the_bytes_of_arrays(tmp_path):
    array = np.arange(3.0)
    entry = contents.write_file(tmp_path / "x", lambda file: [file.write(data) for data in (b"abc", array)])
    data = (tmp_path / "x").read_bytes()
    assert data == b"abc" + array.tobytes()
    assert entry == {"size": 27, "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    ("files", "prefix", "explicit_prefix"),
    [
        (["tiny", "resnet_50_paddle", "x"], "resnet_50_paddle", "tiny"),
        (["tiny", "x"], "tiny", "tiny"),
        (["x"], "x", "tiny"),
        (["x", "y"], "resnet_50_paddle", "tiny"),
        ([], "resnet_50_paddle", "tiny"),
    ],
)
def test_prefix_of_foreign_files(tmp_path, files, prefix, explicit_prefix):
    for name in files:
        (tmp_path / f"{name}.pdparams").touch()
    assert contents.foreign_prefix(tmp_path, FlagValue("tiny", False)) == prefix
    assert contents.foreign_prefix(tmp_path, FlagValue("tiny", True)) == explicit_prefix
    assert contents.prefix(tmp_path, FlagValue("tiny", False)) == tmp_path / prefix
    written = write_checkpoint(tmp_path, "1")  # its files are called a.pdparams and a.pdopt
    assert contents.prefix(written, FlagValue("tiny", True)) == written / "a"


def test_meta_json_has_null_instead_of_nan(tmp_path):
    """JSON parsers of other languages reject NaN."""
    folder = write_checkpoint(
        tmp_path, "1", trained={"loss": float("nan"), "top1": float("inf"), "top5": 0.5, "ips": 9.0}
    )
    text = (folder / "meta.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["trained"] == {"loss": None, "top1": None, "top5": 0.5, "ips": 9.0}


def test_meta_json_lists_the_files_of_a_checkpoint(tmp_path):
    folder, foreign = write_checkpoint(tmp_path, "1"), tmp_path / "foreign"
    foreign.mkdir()
    for path in (folder / "notes.txt", foreign / "x.pdparams"):
        path.touch()
    assert [contents.contains(folder / name) for name in ("a.pdopt", "notes.txt", "b.pdopt")] == [True, False, False]
    assert [contents.contains(foreign / name) for name in ("x.pdparams", "x.pdopt")] == [True, False]
    for name in ("3", "10"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "x.pdparams").touch()
    assert run_folders.newest(tmp_path / "theirs").name == "10"
    paths = folder / "a.pdparams", folder / "notes.txt", foreign / "x.pdparams"
    assert [contents.read_listed(path) for path in paths] == [b"abc", None, None]
    (folder / "a.pdparams").write_text("abd")
    with pytest.raises(contents.DamagedError, match="a.pdparams does not match its sha256 in meta.json"):
        contents.read_listed(folder / "a.pdparams")
    (folder / "a.pdparams").write_text("ab")
    with pytest.raises(contents.DamagedError, match="a.pdparams has 2 bytes instead of 3"):
        contents.verify(folder)
    folders._unmark(folder)
    with pytest.raises(contents.DamagedError, match="the checkpoint is incomplete or being deleted"):
        contents.contains(folder / "a.pdopt")
