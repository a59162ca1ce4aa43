import os
import platform
import subprocess
import sys
import textwrap

import pytest

from conftest import ROOT
from helpers import HOLDER, write_checkpoint
from paddle_resnet.checkpoints import restore, run_lock, saver
from paddle_resnet.utils import locks
from paddle_resnet.utils.errors import UsageError


def test_lock_excludes_other_processes_until_exit(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    write_checkpoint(tmp_path, "1")
    (tmp_path / ".2.partial").mkdir()
    (tmp_path / ".lock").write_text("process 4194304 on a machine with a longer name than this one's\n" * 2)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            # A second run must neither remove unfinished checkpoints of the first run nor build a program.
            for start in (
                *2 * [lambda: run_lock.hold(tmp_path)],
                lambda: saver.check_folder(tmp_path, None, {}, False, True),
                lambda: restore._clean(tmp_path),
            ):
                with pytest.raises(UsageError, match=rf"another run \(process {holder.pid} on {platform.node()}\) is"):
                    start()
            assert (tmp_path / ".2.partial").exists()
        finally:
            holder.kill()
            holder.wait()
        run_lock.hold(tmp_path).close()
        run_lock.hold(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_lock_file_that_was_deleted_is_locked_again(tmp_path, capsys):
    with run_lock.hold(tmp_path) as lock:
        assert run_lock.keep(tmp_path, lock) is lock
        assert capsys.readouterr().err == ""
        (tmp_path / ".lock").unlink()
        with run_lock.keep(tmp_path, lock) as again:
            assert again is not lock and locks.is_of(again, tmp_path / ".lock")
        assert f"{tmp_path}/.lock: was deleted or replaced during the run, so" in capsys.readouterr().err


@pytest.mark.usefixtures("without_locks")
def test_file_system_without_locks_triggers_warning(tmp_path, capsys):
    run_lock.hold(tmp_path).close()
    assert f"{tmp_path}/.lock: the file system does not support locks (No locks available)" in capsys.readouterr().err
