"""Resuming after changes to the data or the Paddle version, and changes to the output folder during a run."""

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap

import paddle
import pytest

from conftest import ROOT, losses, phase
from helpers import HOLDER, write_checkpoint
from paddle_resnet.checkpoints import contents, restore, run_lock
from paddle_resnet.machine import cpu
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")


def test_resumed_run_writes_identical_files(run_train, tmp_path):
    """Regression test: the learning rate variable had the shape () before a resume and (1,) afterwards."""
    assert run_train("--epochs", "2")[0] == 0
    expected = {end: (tmp_path / f"output/Tiny/1/tiny.{end}").read_bytes() for end in ("pdparams", "pdopt")}
    shutil.rmtree(tmp_path / "output/Tiny/1")
    assert run_train("--epochs", "2", "--resume")[0] == 0
    for end, data in expected.items():
        assert (tmp_path / f"output/Tiny/1/tiny.{end}").read_bytes() == data, end


@pytest.mark.slow
@pytest.mark.parametrize("train_step", [3, 4], ids=["after epoch", "inside epoch"])
def test_resume_restarts_epoch_if_image_changed_class(run_train, stop_before, photos, tmp_path, capsys, train_step):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    flags = ["--epochs", "2", "--print-interval", "1"]
    stop_before(train_step=train_step)
    assert run_train(*flags, image_root=root)[0] == 75
    stop_before()
    image = sorted((root / "train/class0").iterdir())[0]
    image.rename(root / "train/class1" / image.name)
    capsys.readouterr()
    code, report = run_train(*flags, "--resume", image_root=root)
    assert code == 0
    stderr = capsys.readouterr().err
    assert "loader state in the checkpoint: list of images and labels (hash) is " in stderr
    assert ("cannot continue inside epoch 1, so the epoch restarts with the checkpoint's parameters" in stderr) == (
        train_step == 4
    )
    assert (1, 0) in losses(report)


def test_different_paddle_version_triggers_warning(capsys):
    meta = {"paddle_version": "2.5.1", "arguments": {}, "world_size": 1}
    restore._log_environment_changes("run/1", meta, paddle.CPUPlace())
    assert "run/1: written with Paddle 2.5.1, but this run uses " in capsys.readouterr().err
    del meta["paddle_version"]  # older versions did not write paddle_version
    restore._log_environment_changes("run/1", meta, paddle.CPUPlace())
    assert capsys.readouterr().err == ""


def test_resume_with_other_threads_or_instructions_warns(run_train, tmp_path, environment, capsys):
    assert run_train("--epochs", "1")[0] == 0
    folder = tmp_path / "output/Tiny/0"
    own = contents.read_meta(folder)["cpu"]
    assert own == cpu.arithmetic() and own["threads"] == int(os.environ["OMP_NUM_THREADS"])
    environment(OMP_NUM_THREADS=str(own["threads"] + 1))
    environment(ONEDNN_MAX_CPU_ISA="AVX2")
    capsys.readouterr()
    assert run_train("--epochs", "2", "--resume")[0] == 0
    effect = "so losses may differ in the last digits from those of an uninterrupted run; "
    threads, instructions = (line for line in capsys.readouterr().err.splitlines() if "written with" in line)
    assert threads.endswith(
        f"/Tiny/0: written with OMP_NUM_THREADS={own['threads']}, but this run has {own['threads'] + 1}, {effect}set "
        f"OMP_NUM_THREADS={own['threads']} to reproduce the losses"
    )
    assert instructions.endswith(
        "/Tiny/0: written with a different instruction set (this run: with ONEDNN_MAX_CPU_ISA=AVX2), "
        f"{effect}resume on the same type of CPU to reproduce the losses"
    )


@pytest.mark.parametrize(
    ("changes", "device", "place", "message"),
    [
        ({}, "cpu", paddle.CPUPlace(), ""),
        ({"cpu": None}, "cpu", paddle.CPUPlace(), ""),  # older versions did not write cpu
        ({"cpu": {"threads": 8, "instructions": ""}}, "gpu", paddle.CPUPlace(), ""),
        ({"cpu": {"threads": 8, "instructions": ""}}, "cpu", "gpu", ""),
        ({}, "cpu", paddle.CPUPlace(), "(this run: without other1, without other2, without other3, ...)"),
    ],
)
def test_arithmetic_is_compared_only_if_recorded_and_on_cpu(capsys, changes, device, place, message):
    own = cpu.arithmetic()
    meta = {"arguments": {"device": device}, "world_size": 1, "cpu": own} | changes
    if message:
        meta["cpu"] = own | {"instructions": own["instructions"] + " other1 other2 other3 other4"}
    meta = {name: value for name, value in meta.items() if value is not None}
    restore._log_environment_changes("run/1", meta, place)
    err = capsys.readouterr().err
    assert message in err if message else err == ""


@pytest.mark.parametrize("link", ["symbolic", "hard", "dangling"])
def test_lock_that_is_a_link_raises_and_keeps_target(tmp_path, link):
    target, lock = tmp_path / "target", tmp_path / "Tiny/.lock"
    lock.parent.mkdir()
    if link != "dangling":
        target.write_text("precious")
    if link == "hard":
        os.link(target, lock)
    else:
        lock.symlink_to(target)
    with pytest.raises(OSError, match="lock is a link"):
        run_lock.hold(lock.parent)
    with pytest.raises(UsageError, match=r"--output-dir .*: cannot be written \(.*lock is a link\)"):
        restore._clean(lock.parent)
    assert target.exists() == (link != "dangling")
    assert link == "dangling" or target.read_text() == "precious"


@pytest.mark.parametrize(
    ("make", "problem"), [(os.mkfifo, "is not a regular file"), (os.mkdir, "Tiny/.lock: Is a directory")]
)
def test_lock_that_is_not_a_file_raises(tmp_path, make, problem):
    (tmp_path / "Tiny").mkdir()
    make(tmp_path / "Tiny/.lock")
    with pytest.raises(UsageError, match=rf"--output-dir .*: cannot be written \(.*{problem}\)"):
        restore._clean(tmp_path / "Tiny")


def test_lock_replaced_by_pipe_raises(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    file = run_lock.hold(tmp_path)
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match="is not a regular file"):
        run_lock.keep(tmp_path, file)


def test_deleted_lock_is_acquired_again(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    file = run_lock.hold(tmp_path)
    assert run_lock.keep(tmp_path, file) is file
    assert capsys.readouterr().err == ""
    for change in ((tmp_path / ".lock").unlink, lambda: (tmp_path / "other").rename(tmp_path / ".lock")):
        (tmp_path / "other").write_text("")
        change()
        new = run_lock.keep(tmp_path, file)
        assert new is not file
        assert f"{tmp_path}/.lock: was deleted or replaced during the run" in capsys.readouterr().err
        assert run_lock.keep(tmp_path, new) is new
        file = new


def test_run_stops_writing_if_second_run_holds_lock(run_train, tmp_path, monkeypatch, capsys):
    """Delete .lock, so that a second run can start in the same folder while the first run continues."""
    from paddle_resnet.step import loop

    root, real, holders = tmp_path / "output/Tiny", loop.run_and_save, []

    def run_and_lose_lock(*args, **kwargs):
        if not holders:
            (root / ".lock").unlink()
            command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(root)]
            holders.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            assert holders[0].stdout.readline() == "locked\n"
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "run_and_save", run_and_lose_lock)
    try:
        assert run_train()[0] == 1
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    stderr = capsys.readouterr().err
    problem = f"{root}/.lock was deleted and another run (process {holders[0].pid}"
    assert f"Tiny/0: checkpoint not written, because {problem}" in stderr
    assert not (root / "0").exists()


def test_closed_stdout_does_not_prevent_checkpoint(run_train, tmp_path, capsys):
    """Simulate `train.py | head -1`, where head closes its end of the pipe while the run continues."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, contextlib.redirect_stdout(pipe):
        code, report = run_train()
    assert code == 0
    assert capsys.readouterr().err.count("stdout: can no longer be written (Broken pipe)") == 1
    assert contents.verify(tmp_path / "output/Tiny/0")["epoch"] == 0
    assert phase(report, [], "val.")["images"] == 23
