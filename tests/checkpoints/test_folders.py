"""Checkpoint folders, tested with dummy files: writing, recovery after SIGKILL and deletion."""

import errno
import os
import shutil
import signal
import sys

import pytest

from helpers import META, write_checkpoint
from paddle_resnet.checkpoints import contents, folders, run_folders


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_commit_records_size_and_digest_of_each_file(tmp_path):
    best = {"epoch": 1, "loss": 1.5, "top1": 0.5, "top5": 1, "ips": 20.5}
    folder = write_checkpoint(tmp_path, "3_40", best=best, rate=0.1)
    assert names(folder) == ["a.pdopt", "a.pdparams", "meta.json"]
    meta = contents.verify(folder)
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
    contents.verify(folder)
    assert names(tmp_path) == ["3"]
    (folder / "b.pdparams").write_text("of the user")  # this file must not replace a file of the next checkpoint
    contents.verify(folders.commit(tmp_path, "3", {f"b.{end}": lambda f: None for end in ("pdparams", "pdopt")}, META))
    assert names(folder) == ["b.pdopt", "b.pdparams", "meta.json"]
    files = {f"c.{end}": lambda f: None for end in ("pdparams", "pdopt")}
    folders.commit(tmp_path, "3", files, META, "marker")
    assert names(folder) == ["c.pdopt", "c.pdparams", "meta.json"]
    contents.verify(folders.commit(tmp_path / "new/root", "3", files, META, "marker"))


def test_kinds_of_folders(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    files = {"2": ["meta.json"], "3": ["x.pdparams"], "4": ["x.pdparams", contents.UNFINISHED], "5": ["x.txt"], "6": []}
    for name in ("2", "3", "4", "5", "6", "7"):
        (tmp_path / name).mkdir()
        for file in files.get(name, []):
            (tmp_path / name / file).write_text("")
    (tmp_path / "7/meta.json").symlink_to("missing")
    # The run was killed after writing meta.json with --checkpoint-commit marker.
    (write_checkpoint(tmp_path, "8") / contents.UNFINISHED).touch()
    all_folders = run_folders.below(tmp_path)
    assert [folder.name for folder in all_folders if run_folders.is_checkpoint(folder)] == ["1", "2", "3", "7", "8"]
    assert [folder.name for folder in all_folders if contents.is_foreign(folder)] == ["3"]
    assert [folder.name for folder in run_folders.finished(tmp_path)] == ["1", "2", "3", "7", "8"]
    (tmp_path / ".latest.partial").symlink_to("1")
    folders.clean(tmp_path)
    folders.delete(tmp_path / "9")
    assert names(tmp_path) == ["1", "2", "3", "5", "7", "8"]
    assert capsys.readouterr().err == ""


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
    contents.verify(folder)
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
    for name in ("a.pdema", "bn_rank1.npz"):
        (tmp_path / "2" / name).touch()
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
    contents.verify(tmp_path / "3")
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
    contents.verify(folders.commit(tmp_path, "3", files, META, form))
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
    assert run_folders.newest_first(tmp_path)[0] == []
    monkeypatch.undo()
    folder = write_checkpoint(tmp_path, "4")
    monkeypatch.setattr(folders, "_remove_unmarked", lambda path: None)  # simulate SIGKILL before the files are removed
    folders.delete(folder)
    assert run_folders.newest_first(tmp_path)[0] == []
    write_checkpoint(tmp_path, "5")
    folders.remove_all(tmp_path)
    assert run_folders.newest_first(tmp_path)[0] == []
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
    assert run_folders.finished(tmp_path) == [tmp_path / "1"]
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


@pytest.mark.slow
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
        valid, damaged = run_folders.newest_first(root)
        content = {folder.name: (folder / "a.pdparams").read_text() for folder, _ in valid}
        for folder, _ in valid:
            contents.verify(folder)
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
