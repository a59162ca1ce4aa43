"""Locks of files. tests/utils/test_logger.py and the tests of commands lock files in several processes."""

import os
import platform

import pytest

from helpers import locked
from paddle_resnet.utils import locks
from paddle_resnet.utils.errors import UsageError


def test_lock_file_contains_owner_and_is_removed(tmp_path):
    path = tmp_path / "lock"
    path.write_text("process 1 on a machine that lost its power and has a long name\n")
    file = locks.acquire(path, None)
    assert path.read_text() == f"process {os.getpid()} on {platform.node()}\n"
    assert locks.is_of(file, path) and not locks.is_of(file, tmp_path)
    locks.release(file)
    assert file.closed and not path.exists()


def test_lock_file_of_other_process_is_not_removed(tmp_path):
    path = tmp_path / "lock"
    file = locks.acquire(path, None)
    path.unlink()
    assert not locks.is_of(file, path)
    path.symlink_to(f"/proc/self/fd/{file.fileno()}")
    assert not locks.is_of(file, path)
    path.unlink()
    path.write_text("of the other process")
    assert not locks.is_of(file, path)
    locks.release(file)
    assert file.closed and path.read_text() == "of the other process"


@pytest.mark.parametrize(("text", "owner"), [("process 1 on x\n", "process 1 on x"), ("", "unknown")])
def test_owner_of_lock_is_reported(tmp_path, text, owner):
    path = tmp_path / "lock"
    with locked(path):
        path.write_text(text)
        with pytest.raises(BlockingIOError) as error:
            locks.acquire(path, None)
        assert error.value.strerror == owner
        remedy = "wait until that process ends, or choose a different path"
        message = rf"^--csv x: in use by another process \({owner}\); {remedy}$"
        with pytest.raises(UsageError, match=message), locks.held(path, "--csv x", None):
            pass
        assert path.read_text() == text


@pytest.mark.usefixtures("without_locks")
def test_unsupported_locks_trigger_a_warning(tmp_path):
    messages, path = [], tmp_path / "lock"
    with locks.held(path, "--csv x", messages.append):
        assert path.exists()
    remedy = "do not start a second run that writes to the same files"
    problem = f"the file system does not support locks (No locks available); {remedy}"
    assert messages == [f"{path}: {problem}"] and not path.exists()


def test_file_that_its_owner_removed_is_created_again(tmp_path, monkeypatch):
    path, opened, lockf = tmp_path / "lock", [], locks.fcntl.lockf

    def lock_after_removal(file, operation):
        opened.append(file)
        if len(opened) == 1:
            path.unlink()
        lockf(file, operation)

    monkeypatch.setattr(locks.fcntl, "lockf", lock_after_removal)
    file = locks.acquire(path, None)
    assert opened[0].closed and opened[1:] == [file] and locks.is_of(file, path)
    locks.release(file)


def test_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), locks.held(tmp_path / "lock", "--csv x", None):
        assert (tmp_path / "lock").exists()
        raise KeyError
    assert not (tmp_path / "lock").exists()


def test_lock_file_is_next_to_target_of_link(tmp_path):
    (tmp_path / "link").symlink_to("folder/file")
    assert locks.file_of(tmp_path / "link") == tmp_path / "folder/.file.lock"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("nowhere"), "{} is a link"),
        (lambda path: os.link(path.with_name("file"), path), "{} is a link"),
        (os.mkfifo, "{} is not a regular file"),
        (os.mkdir, "Is a directory"),
    ],
    ids=["link", "hard link", "pipe", "folder"],
)
def test_only_a_regular_file_can_be_a_lock(tmp_path, make, problem):
    path = tmp_path / "lock"
    path.with_name("file").write_text("text")
    make(path)
    message = rf"^--csv x: {path} cannot be locked \({problem.format(path)}\); remove it, or choose a different path$"
    with pytest.raises(UsageError, match=message), locks.held(path, "--csv x", None):
        pass
    assert path.with_name("file").read_text() == "text"
