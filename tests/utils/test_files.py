"""Opening and writing files. The tests of each command cover errors for unusable files."""

import math
import os
import platform
import stat
from pathlib import Path

import pytest

from paddle_resnet import export, predict, weights
from paddle_resnet import report as report_command
from paddle_resnet.utils import files


def test_open_regular_accepts_files_up_to_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"four")
    with files.open_regular(tmp_path / "file", 4) as file:
        assert file.read() == b"four"
    with pytest.raises(OSError) as error:
        files.open_regular(tmp_path / "file", 3)
    assert error.value.strerror == "4 bytes, limit 3"
    (tmp_path / "empty").touch()
    with files.open_regular(tmp_path / "empty") as file:
        assert file.read() == b""


def test_companion_replaces_only_json_ending():
    for name, expected in (("run.json", "run.x"), ("run", "run.x"), ("run.v2", "run.v2.x")):
        assert files.companion(f"a/{name}", "x") == Path("a", expected)


@pytest.mark.parametrize("has_data", [True, False])
def test_open_regular_rejects_file_of_unknown_size(monkeypatch, has_data):
    """Files in /proc have size 0, and reading them may block. An example is /proc/kmsg, which only root can open."""
    if not has_data:
        monkeypatch.setattr(os, "read", lambda *arguments: exec("raise BlockingIOError"))
    with pytest.raises(OSError, match="not a regular file"):
        files.open_regular("/proc/self/status")


def test_touch_creates_target_of_broken_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new/folder/file")
    umask = os.umask(0o026)
    files.touch(tmp_path / "link")
    os.umask(umask)
    file = tmp_path / "new/folder/file"
    assert file.read_bytes() == b"" and file.stat().st_mode & 0o777 == 0o640
    file.write_bytes(b"content")
    files.touch(tmp_path / "link")
    assert file.read_bytes() == b"content"


def test_touch_accepts_pipes_with_a_reader_and_devices_except_block_devices(tmp_path, monkeypatch):
    files.touch("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe without a reader, or a missing device"):
        files.touch(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.touch(tmp_path / "pipe")
    with pytest.raises(BlockingIOError):  # at the end of the file, the result would be b""
        os.read(reader, 1)
    os.close(reader)
    block_device = os.stat_result((stat.S_IFBLK, *[0] * 9))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="a block device"):
        patch.setattr(os, "fstat", lambda descriptor: block_device)
        files.touch(tmp_path / "file")


def test_open_regular_closes_a_rejected_folder(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError) as error:
        files.open_regular(tmp_path)
    assert error.value.filename == str(tmp_path) and os.listdir("/proc/self/fd") == before


def test_partial_path_contains_host_and_process():
    assert files.partial_path("a/b") == Path(f"a/b.{platform.node()}.{os.getpid()}.partial")


def test_non_finite_numbers_become_none():
    data = {"a": (1.5, math.nan), "b": [{"c": math.inf}, -math.inf], "d": "x", "e": 2**2000}
    assert files.finite(data) == {"a": [1.5, None], "b": [{"c": None}, None], "d": "x", "e": 2**2000}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_written_is_atomic(tmp_path, monkeypatch, kind):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("replace") or replace(*names))

    def write(text, error=None):
        with files.written(tmp_path / "x", sync=True) as partial:
            if kind == "folder":
                (partial / "z").mkdir(parents=True)
            (partial / "z/y" if kind == "folder" else partial).write_text(text)
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt)
    assert not list(tmp_path.iterdir())
    write("complete")
    partial_path = str(files.partial_path(tmp_path / "x"))
    parts = [f"{partial_path}/z", f"{partial_path}/z/y"] if kind == "folder" else []
    assert calls == [*parts, partial_path, "replace"]
    with pytest.raises(ValueError):
        write("half", ValueError)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x/z/y" if kind == "folder" else tmp_path / "x").read_text() == "complete"


def test_written_with_partial_name_is_not_flushed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", None)
    with files.written(tmp_path / "x", tmp_path / ".x.partial") as partial:
        assert partial == tmp_path / ".x.partial"
        partial.write_bytes(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("main", "argument", "flags"),
    [
        (predict.main, "MODEL", ["", "image.jpg"]),
        (predict.main, "--csv", ["model", "image.jpg", "--csv", ""]),
        (export.main, "CHECKPOINT", ["", "out"]),
        (export.main, "OUT", ["checkpoint", ""]),
        (report_command.main, "RUN", [""]),
        (weights.main, "--output", ["file", "--output", ""]),
    ],
)
def test_empty_path_is_not_the_working_directory(main, argument, flags, capsys):
    assert main(flags) == 2
    assert f"error: {argument}: '' is an empty path; set a path, such as . for" in capsys.readouterr().err


def test_regular_file_has_its_path_as_name(tmp_path):
    """Messages contain this name."""
    (tmp_path / "file").write_bytes(b"content")
    with files.open_regular(tmp_path / "file") as file:
        assert (file.name, file.read()) == (str(tmp_path / "file"), b"content")
