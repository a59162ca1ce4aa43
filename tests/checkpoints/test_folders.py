"""Checkpoint folders, tested with dummy files: validity checks, recovery after SIGKILL, listing and deletion."""

import errno
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from helpers import HOLDER, META, write_checkpoint
from paddle_resnet.checkpoints import folders, restore, saver
from paddle_resnet.settings.values import FlagValue
from paddle_resnet.utils import locks
from paddle_resnet.utils.errors import UsageError


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_commit_records_size_and_digest_of_each_file(tmp_path):
    best = {"epoch": 1, "loss": 1.5, "top1": 0.5, "top5": 1, "ips": 20.5}
    folder = write_checkpoint(tmp_path, "3_40", best=best, rate=0.1)
    assert names(folder) == ["a.pdopt", "a.pdparams", "meta.json"]
    meta = folders.verify(folder)
    assert meta["best"] == best
    assert meta["rate"] == 0.1
    # The digest is the output of `printf abc | sha256sum`.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert meta["files"]["a.pdparams"] == {"size": 3, "sha256": expected}
    assert names(tmp_path) == ["3_40"]
    assert len((folder / "meta.json").read_text().splitlines()) > len(meta)  # indented for readability


def test_commit_flushes_files_before_rename(tmp_path, monkeypatch):
    """The expected order is: flush the files, flush their folder, rename the folder, and flush the parent folder."""
    flushed, sizes, fsync = [], [], os.fsync

    def record(file):
        flushed.append(os.readlink(f"/proc/self/fd/{file}"))
        sizes.append(os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    write_checkpoint(tmp_path, "3")
    assert sizes[:2] == [3, 100]
    partial = f"{tmp_path}/.3.partial"
    files = [f"{partial}/{name}" for name in ("a.pdparams", "a.pdopt", "meta.json")]
    assert flushed == [*files, partial, str(tmp_path)]


def test_commit_replaces_folder_with_same_name(tmp_path):
    write_checkpoint(tmp_path, "3", "old")
    (tmp_path / ".3.partial").mkdir()  # a killed program left this folder
    folder = write_checkpoint(tmp_path, "3", "newer")
    assert (folder / "a.pdparams").read_text() == "newer"
    folders.verify(folder)
    assert names(tmp_path) == ["3"]
    (folder / "b.pdparams").write_text("of the user")  # this file must not replace a file of the next checkpoint
    folders.verify(folders.commit(tmp_path, "3", {f"b.{end}": lambda f: None for end in ("pdparams", "pdopt")}, META))
    assert names(folder) == ["b.pdopt", "b.pdparams", "meta.json"]
    files = {f"c.{end}": lambda f: None for end in ("pdparams", "pdopt")}
    folders.commit(tmp_path, "3", files, META, "marker")
    assert names(folder) == ["c.pdopt", "c.pdparams", "meta.json"]
    folders.verify(folders.commit(tmp_path / "new/root", "3", files, META, "marker"))


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
    with pytest.raises(folders.DamagedError, match=file):
        folders.verify(folder)


def test_flipped_bit_in_meta_json_is_detected_or_harmless(tmp_path):
    folder = write_checkpoint(tmp_path, "3", rate=0.125)
    data = (folder / "meta.json").read_bytes()
    meta, harmless = folders.verify(folder), 0
    bits = range(0, 8 * len(data), 61)
    for i in bits:
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        (folder / "meta.json").write_bytes(flipped)
        try:
            assert folders.verify(folder) == meta
            harmless += 1
        except folders.DamagedError:
            pass
    assert harmless < len(bits) / 8  # a bit flip that replaces one white-space character with another is harmless


def test_meta_json_with_unknown_format_is_rejected(tmp_path):
    folder = write_checkpoint(tmp_path, "3")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(folders.DamagedError, match="format 99, but this version reads format 2"):
        folders.verify(folder)


def test_below_lists_only_checkpoint_names_in_order(tmp_path):
    for name in ("10", "9", "9_20", "9_3", "9_0", ".9.partial", "x", "9_", "_9", "9_1_2", "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").write_text("a file")
    assert [p.name for p in folders.below(tmp_path)] == ["9_0", "9_3", "9_20", "9", "10"]
    assert folders.below(tmp_path / "nowhere") == []


def test_manifest_counts_the_bytes_of_arrays(tmp_path):
    array = np.arange(3.0)
    entry = folders.write_file(tmp_path / "x", lambda file: [file.write(data) for data in (b"abc", array)])
    data = (tmp_path / "x").read_bytes()
    assert data == b"abc" + array.tobytes()
    assert entry == {"size": 27, "sha256": hashlib.sha256(data).hexdigest()}


def test_kinds_of_folders(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    files = {"2": ["meta.json"], "3": ["x.pdparams"], "4": ["x.pdparams", folders._UNFINISHED], "5": ["x.txt"], "6": []}
    for name in ("2", "3", "4", "5", "6", "7"):
        (tmp_path / name).mkdir()
        for file in files.get(name, []):
            (tmp_path / name / file).write_text("")
    (tmp_path / "7/meta.json").symlink_to("missing")
    # The run was killed after writing meta.json with --checkpoint-commit marker.
    (write_checkpoint(tmp_path, "8") / folders._UNFINISHED).touch()
    all_folders = folders.below(tmp_path)
    assert [folder.name for folder in all_folders if folders.is_checkpoint(folder)] == ["1", "2", "3", "7", "8"]
    assert [folder.name for folder in all_folders if folders.is_foreign(folder)] == ["3"]
    assert [folder.name for folder in folders.finished(tmp_path)] == ["1", "2", "3", "7", "8"]
    (tmp_path / ".latest.partial").symlink_to("1")
    folders.clean(tmp_path)
    folders.delete(tmp_path / "9")
    assert names(tmp_path) == ["1", "2", "3", "5", "7", "8"]
    assert capsys.readouterr().err == ""


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
    assert folders.foreign_prefix(tmp_path, FlagValue("tiny", False)) == prefix
    assert folders.foreign_prefix(tmp_path, FlagValue("tiny", True)) == explicit_prefix
    assert folders.prefix(tmp_path, FlagValue("tiny", False)) == tmp_path / prefix
    written = write_checkpoint(tmp_path, "1")  # its files are called a.pdparams and a.pdopt
    assert folders.prefix(written, FlagValue("tiny", True)) == written / "a"


def test_newest_first_sorts_by_sequence_number(tmp_path):
    write_checkpoint(tmp_path, "89", sequence=4)
    write_checkpoint(tmp_path, "0", sequence=6)
    write_checkpoint(tmp_path, "0_20", sequence=5)
    (write_checkpoint(tmp_path, "1", sequence=7) / "meta.json").unlink()
    valid, damaged = folders.newest_first(tmp_path)
    assert [folder.name for folder, _ in valid] == ["0", "0_20", "89"]
    assert [(folder.name, "meta.json" in problem) for folder, problem in damaged] == [("1", True)]


def test_checkpoint_at_end_of_epoch_is_used_before_newer_one_inside_epoch(tmp_path, capsys):
    ranks = [{"loader": {"step": 2, "conditions": {}}, "meters": {}}]
    inside = write_checkpoint(tmp_path, "1_2", sequence=6, epoch=1, step=2, ranks=ranks)
    assert folders.resolve(tmp_path) == inside
    last = write_checkpoint(tmp_path, "0", sequence=5)
    write_checkpoint(tmp_path, "3", sequence=4, epoch=3)
    assert folders.resolve(tmp_path) == last
    folders.mark(tmp_path, "best", "3")
    # The result is the target of the link, because a run that is still training may change the link.
    assert folders.resolve(tmp_path) == folders.resolve(tmp_path / "best") == tmp_path / "3"
    output = capsys.readouterr().out
    assert f"{tmp_path}: using the checkpoint {last}\n" in output
    assert f"{tmp_path}: using the checkpoint {tmp_path}/best (3)\n" in output
    assert "warning" not in output
    shutil.rmtree(tmp_path / "3")
    assert folders.resolve(tmp_path) == last
    assert f"warning: {tmp_path}/best: refers to a missing checkpoint" in capsys.readouterr().out


def test_checkpoint_of_a_run_with_only_damaged_checkpoints_is_not_chosen(tmp_path):
    folder = write_checkpoint(tmp_path, "3")
    assert folders.resolve(tmp_path) == folder
    (folder / "meta.json").write_text("{}")
    assert folders.resolve(tmp_path) == tmp_path
    write_checkpoint(tmp_path, "4")
    (tmp_path / "x.pdparams").touch()  # the folder is also a checkpoint of a different program
    assert folders.resolve(tmp_path) == tmp_path


def test_run_in_an_output_folder_is_that_of_the_network(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("Tiny", "Other"):
        write_checkpoint(tmp_path / name, "1")
        assert folders.run_in(tmp_path, name) == tmp_path / name
        if name == "Tiny":  # the only run
            assert folders.run_in(tmp_path) == folders.run_in(tmp_path, "Other") == tmp_path / name
    for arch in (None, "Third"):
        with pytest.raises(
            UsageError, match=f"{tmp_path}: contains runs of several networks; choose one of .*/Other, .*/Tiny$"
        ):
            folders.run_in(tmp_path, arch)
    write_checkpoint(tmp_path / "Tiny", "best")  # a folder of the user, not a link
    write_checkpoint(tmp_path / "Tiny/old", "1")
    (tmp_path / "link").symlink_to("Tiny")
    for name in ("Tiny", "Tiny/1", "Tiny/best", "missing", "empty", "link"):
        assert folders.run_in(tmp_path / name, "Other") == tmp_path / name


def test_mark_replaces_only_links(tmp_path):
    (tmp_path / f".latest{folders._PARTIAL}").symlink_to("0")  # as left by SIGKILL
    for name in ("1", "2"):
        write_checkpoint(tmp_path, name)
        folders.mark(tmp_path, "latest", name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert names(tmp_path) == ["1", "2", "latest"]
    (tmp_path / "best").write_text("of the user")
    with pytest.raises(OSError, match="not a link"):
        folders.mark(tmp_path, "best", "1")
    assert names(tmp_path) == ["1", "2", "best", "latest"]


def test_delete_of_link_keeps_target(tmp_path):
    folder = write_checkpoint(tmp_path / "elsewhere", "3")
    (tmp_path / "3").symlink_to(folder)
    folders.delete(tmp_path / "3")
    assert names(tmp_path) == ["elsewhere"]
    folders.verify(folder)
    folders._unmark(folder)  # an unfinished checkpoint
    (tmp_path / "3").symlink_to(folder)
    (folder / "notes.txt").touch()
    kept = names(folder)
    folders.clean(tmp_path)
    assert names(folder) == kept
    write_checkpoint(tmp_path, "3")
    assert names(tmp_path) == ["3", "elsewhere"]
    assert names(folder) == kept


def test_deletion_removes_links_to_folders_and_keeps_their_targets(tmp_path):
    """A user may move the files of a checkpoint and replace them by links."""
    folder = write_checkpoint(tmp_path, "1")
    (folder / "a.pdopt").unlink()
    (tmp_path / "elsewhere").mkdir()
    (folder / "a.pdopt").symlink_to(tmp_path / "elsewhere")
    folders.delete(folder)
    assert names(tmp_path) == ["elsewhere"]


def test_deletion_keeps_files_of_other_programs(tmp_path, capsys):
    for name in ("1", "2", "3"):
        write_checkpoint(tmp_path, name)
        (tmp_path / name / "notes.txt").write_text(name)
        (tmp_path / name / "mine.pdparams").mkdir()
    for count, more in ((1, ""), (2, ", ...")):
        shutil.copytree(tmp_path / "1", tmp_path / "4")
        for i in range(count):
            (tmp_path / "4" / f"other{i}").touch()
        folders.delete(tmp_path / "4")
        assert f"(mine.pdparams, notes.txt, other0{more}); move or delete these files" in capsys.readouterr().err
        shutil.rmtree(tmp_path / "4")
    (tmp_path / "2/meta.json").write_text("damaged")
    folders.delete(tmp_path / "1")
    assert "1: not deleted, because it contains files that this program did not write (mine.pdparams, notes.txt)" in (
        capsys.readouterr().err
    )
    (tmp_path / "3").rename(tmp_path / "x")
    write_checkpoint(tmp_path, "3")
    for name in (".notes.partial", ".3.notes"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".4.deleted").mkdir()  # an older version was killed during a deletion
    (tmp_path / "x").rename(tmp_path / ".3.replaced")  # the state that SIGKILL leaves behind
    folders.clean(tmp_path)
    folders.verify(tmp_path / "3")
    assert (tmp_path / "3/notes.txt").read_text() == "3"
    for form in ("rename", "marker"):
        folders.commit(
            tmp_path, "3", {f"a.{end}": lambda f: f.write(b"b") for end in ("pdparams", "pdopt")}, META, form
        )
        assert names(tmp_path / "3") == ["a.pdopt", "a.pdparams", "meta.json", "mine.pdparams", "notes.txt"]
    folders.remove_all(tmp_path)
    assert names(tmp_path) == [".3.notes", ".notes.partial", "1", "2", "3"]
    for name in ("1", "3"):
        assert names(tmp_path / name) == ["mine.pdparams", "notes.txt"]
    assert names(tmp_path / "2") == ["mine.pdparams", "notes.txt"]


@pytest.mark.parametrize("form", ["rename", "marker"])
def test_checkpoint_of_other_program_is_never_deleted(tmp_path, capsys, form):
    write_checkpoint(tmp_path, "4")
    for name in ("3", "5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resnet_50_paddle.pdparams").write_text("NVIDIA's")
    (tmp_path / "6").symlink_to("3")
    folders.mark(tmp_path, "best", "4")
    folders.remove_all(tmp_path)
    output = capsys.readouterr()
    assert f"--overwrite: deleting 4, 6, best in {tmp_path}" in output.out
    assert names(tmp_path) == ["3", "5"]
    assert f"--overwrite: keeps 3, 5 in {tmp_path}, because this program did not write them; move them" in output.err
    folders.delete(tmp_path / "5")
    assert names(tmp_path / "5") == ["resnet_50_paddle.pdparams"]
    capsys.readouterr()
    (tmp_path / "3.old").symlink_to("missing")
    files = {"a.pdparams": lambda f: f.write(b"abc"), "a.pdopt": lambda f: f.write(b"x")}
    folders.verify(folders.commit(tmp_path, "3", files, META, form))
    assert names(tmp_path) == ["3", "3.old", "3.old1", "5"]
    assert names(tmp_path / "3.old1") == ["resnet_50_paddle.pdparams"]
    problem = "not written by this program (no meta.json), so it is renamed to 3.old1; move it elsewhere"
    assert f"{tmp_path}/3: {problem}" in capsys.readouterr().err


def test_error_contains_the_file_that_cannot_be_written(tmp_path):
    for path, detail in ((tmp_path / "Tiny/.lock", f"{tmp_path}/Tiny/.lock: "), (tmp_path / "x", ""), (None, "")):
        error = OSError(errno.EACCES, "Permission denied", path and str(path))
        message = f"--output-dir {tmp_path}: cannot be written ({detail}Permission denied); choose a different folder"
        assert str(folders.unwritable(tmp_path / "Tiny", error)) == message


def test_failed_deletion_logs_warning_and_invalidates_checkpoint(tmp_path, capsys, monkeypatch):
    folder = write_checkpoint(tmp_path, "3")

    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.Path, "rmdir", deny)
    folders.delete(folder)
    assert "3: cannot be deleted (Permission denied); delete it manually" in capsys.readouterr().err
    assert folders.newest_first(tmp_path)[0] == []
    monkeypatch.undo()
    folder = write_checkpoint(tmp_path, "4")
    monkeypatch.setattr(folders, "_remove", lambda path: None)  # simulate SIGKILL before the files are removed
    folders.delete(folder)
    assert folders.newest_first(tmp_path)[0] == []
    write_checkpoint(tmp_path, "5")
    folders.remove_all(tmp_path)
    assert folders.newest_first(tmp_path)[0] == []
    monkeypatch.setattr(folders.Path, "write_text", deny)
    folders.delete(write_checkpoint(tmp_path, "6"))
    assert "6: cannot be deleted (Permission denied); delete it manually" in capsys.readouterr().err


def test_unreadable_folder_may_contain_a_checkpoint_and_is_kept(tmp_path, monkeypatch):
    for name in "12":
        (tmp_path / name).mkdir()  # unfinished
    listdir = os.listdir

    def deny(path):
        if str(path).endswith("/1"):
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", deny)
    assert folders.finished(tmp_path) == [tmp_path / "1"]
    folders.clean(tmp_path)
    assert listdir(tmp_path) == ["1"]


def commit_in_a_child(root, form, fatal):
    """In a child process, replace checkpoint 2 and delete checkpoint 1. The child kills itself just before its file
    change number `fatal`, counted from 0.

    Returns:
        The exit code of the child. If the child was not killed, the exit code is the number of changes.
    """
    changes = 0

    def audit(event, args):
        nonlocal changes
        writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
        writes = writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink")
        if writes and (str(root) in str(args[0]) or str(root) in str(args[1])):
            if changes == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    pid = os.fork()  # fork, because starting a Python process would dominate the test time
    if pid == 0:
        try:
            sys.addaudithook(audit)
            files = {"a.pdparams": lambda f: f.write(b"new"), "a.pdopt": lambda f: f.write(b"x" * 100)}
            folders.commit(root, "2", files, META | {"sequence": 2}, form)
            folders.mark(root, "latest", "2")
            folders.delete(root / "1")
            os._exit(changes)
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("form", ["rename", "marker"])
def test_kill_before_any_change_keeps_checkpoints_valid(tmp_path, form):
    results = set()
    for fatal in range(100):
        root = tmp_path / str(fatal)
        root.mkdir()
        write_checkpoint(root, "1", "one", sequence=1)
        write_checkpoint(root, "2", "old", sequence=0)
        folders.mark(root, "latest", "1")
        code = commit_in_a_child(root, form, fatal)
        folders.clean(root)
        valid, damaged = folders.newest_first(root)
        content = {folder.name: (folder / "a.pdparams").read_text() for folder, _ in valid}
        for folder, _ in valid:
            folders.verify(folder)
        newest = valid[0][0].name
        results.add((newest, content[newest], "1" in content))
        assert content[newest] == {"1": "one", "2": "new"}[newest]
        if form == "rename" or newest == "2":
            assert content["2"] == ("new" if newest == "2" else "old")  # clean() restores the older checkpoint
        else:
            assert content.get("2", "old") == "old"  # a checkpoint can be lost while it is replaced in place
        assert damaged == []
        assert not [name for name in names(root) if name.startswith(".")]
        if code != -signal.SIGKILL:
            assert code == fatal > 10
            break
    assert results == {("1", "one", True), ("2", "new", True), ("2", "new", False)}


def test_lock_excludes_other_processes_until_exit(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    write_checkpoint(tmp_path, "1")
    (tmp_path / ".2.partial").mkdir()
    (tmp_path / ".lock").write_text("process 4194304 on a machine with a longer name than this one's\n" * 2)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            for _ in range(2):
                with pytest.raises(BlockingIOError) as error:
                    folders.lock(tmp_path)
                assert error.value.strerror == f"process {holder.pid} on {platform.node()}"
            # A second run must neither remove unfinished checkpoints of the first run nor build a program.
            for start in (
                lambda: saver.check_folder(tmp_path, None, {}, False, True),
                lambda: restore._clean(tmp_path),
            ):
                with pytest.raises(UsageError, match=rf"another run \(process {holder.pid} on .*\) is writing"):
                    start()
            assert (tmp_path / ".2.partial").exists()
        finally:
            holder.kill()
            holder.wait()
        folders.lock(tmp_path).close()
        folders.lock(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_lock_file_that_was_deleted_is_locked_again(tmp_path, capsys):
    with folders.lock(tmp_path) as lock:
        assert folders.keep(tmp_path, lock) is lock
        assert capsys.readouterr().err == ""
        (tmp_path / ".lock").unlink()
        with folders.keep(tmp_path, lock) as again:
            assert again is not lock and locks.is_of(again, tmp_path / ".lock")
        assert f"{tmp_path}/.lock: was deleted or replaced during the run, so" in capsys.readouterr().err


def test_meta_json_lists_the_files_of_a_checkpoint(tmp_path):
    folder, foreign = write_checkpoint(tmp_path, "1"), tmp_path / "foreign"
    foreign.mkdir()
    for path in (folder / "notes.txt", foreign / "x.pdparams"):
        path.touch()
    assert [folders.contains(folder / name) for name in ("a.pdopt", "notes.txt", "b.pdopt")] == [True, False, False]
    assert [folders.contains(foreign / name) for name in ("x.pdparams", "x.pdopt")] == [True, False]
    for name in ("3", "10"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "x.pdparams").touch()
    assert folders.newest(tmp_path / "theirs").name == "10"
    paths = folder / "a.pdparams", folder / "notes.txt", foreign / "x.pdparams"
    assert [folders.read_listed(path) for path in paths] == [b"abc", None, None]
    (folder / "a.pdparams").write_text("abd")
    with pytest.raises(folders.DamagedError, match="a.pdparams does not match its sha256 in meta.json"):
        folders.read_listed(folder / "a.pdparams")
    (folder / "a.pdparams").write_text("ab")
    with pytest.raises(folders.DamagedError, match="a.pdparams has 2 bytes instead of 3"):
        folders.verify(folder)
    folders._unmark(folder)
    with pytest.raises(folders.DamagedError, match="the checkpoint is incomplete or being deleted"):
        folders.contains(folder / "a.pdopt")


def test_run_folder_has_the_name_of_the_network(tmp_path):
    assert folders.run_folder("runs", "Tiny") == Path("runs/Tiny")
    assert folders.run_folder(tmp_path, "nets/mine.py:Net") == tmp_path / "Net"


def test_file_system_without_locks_triggers_warning(tmp_path, monkeypatch, capsys):
    def fail(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", fail)
    folders.lock(tmp_path).close()
    assert f"{tmp_path}/.lock: the file system does not support locks (No locks available)" in capsys.readouterr().err
