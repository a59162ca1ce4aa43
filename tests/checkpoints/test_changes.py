"""What has changed between a checkpoint and the run that goes on from it, and while a run writes: noticed and said."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from conftest import ROOT, TINY, losses, phase, read_report
from helpers import HOLDER, write_checkpoint
from paddle_resnet.checkpoints import folders, restore
from utils.errors import UsageError


def test_a_resumed_run_writes_the_same_bytes(run_train, tmp_path):
    """The learning rate once had shape () before a resume and (1,) behind it."""
    assert run_train("--epochs", "2")[0] == 0
    expected = {end: (tmp_path / f"output/Tiny/1/tiny.{end}").read_bytes() for end in ("pdparams", "pdopt")}
    shutil.rmtree(tmp_path / "output/Tiny/1")
    assert run_train("--epochs", "2", "--resume")[0] == 0
    for end, data in expected.items():
        assert (tmp_path / f"output/Tiny/1/tiny.{end}").read_bytes() == data, end


def test_an_image_that_moved_to_another_class_starts_the_epoch_again(run_train, stop_before, photos, tmp_path, capsys):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    flags = ["--epochs", "2", "--print-interval", "1"]
    stop_before(train_step=4)
    assert run_train(*flags, image_root=root)[0] == 75
    stop_before()
    image = sorted((root / "train/class0").iterdir())[0]
    image.rename(root / "train/class1" / image.name)
    capsys.readouterr()
    code, report = run_train(*flags, "--resume", image_root=root)
    assert code == 0
    said = capsys.readouterr().err
    assert "the loader cannot resume inside the epoch: list of images and labels (hash) is " in said
    assert "epoch 1 restarts with the parameters of " in said
    assert (1, 0) in losses(report)


def test_another_version_of_paddle_is_said(capsys):
    meta = {"paddle_version": "2.5.1", "arguments": {}, "world_size": 1}
    restore._log_environment_changes(meta)
    assert "the checkpoint is from Paddle 2.5.1, but this is " in capsys.readouterr().err
    del meta["paddle_version"]  # older checkpoints
    restore._log_environment_changes(meta)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("link", ["symbolic", "hard", "to nothing"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path, link):
    target, lock = tmp_path / "target", tmp_path / "Tiny/.lock"
    lock.parent.mkdir()
    if link != "to nothing":
        target.write_text("precious")
    if link == "hard":
        os.link(target, lock)
    else:
        lock.symlink_to(target)
    with pytest.raises(OSError, match="lock is a link; remove it"):
        folders.lock(lock.parent)
    with pytest.raises(UsageError, match=r"--output-dir .*: cannot be written \(.*lock is a link; remove it\)"):
        restore._clean(lock.parent)
    assert target.exists() == (link != "to nothing")
    assert link == "to nothing" or target.read_text() == "precious"


@pytest.mark.parametrize(
    ("make", "says"), [(os.mkfifo, "is not a regular file; remove it"), (os.mkdir, "Is a directory")]
)
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path, make, says):
    (tmp_path / "Tiny").mkdir()
    make(tmp_path / "Tiny/.lock")
    with pytest.raises(UsageError, match=rf"--output-dir .*: cannot be written \(.*{says}\)"):
        restore._clean(tmp_path / "Tiny")


def test_a_lock_that_a_pipe_replaces_during_a_run_is_noticed(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    file = folders.lock(tmp_path)
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match="is not a regular file"):
        folders.keep(tmp_path, file)


def test_a_lock_that_was_deleted_is_taken_anew(tmp_path, capsys):
    write_checkpoint(tmp_path, "1")
    file = folders.lock(tmp_path)
    assert folders.keep(tmp_path, file) is file
    assert capsys.readouterr().err == ""
    for change in ((tmp_path / ".lock").unlink, lambda: (tmp_path / "other").rename(tmp_path / ".lock")):
        (tmp_path / "other").write_text("")
        change()
        new = folders.keep(tmp_path, file)
        assert new is not file
        assert f"{tmp_path}/.lock: was deleted or replaced during the run" in capsys.readouterr().err
        assert folders.keep(tmp_path, new) is new
        file = new


def test_a_run_whose_lock_another_run_has_taken_writes_no_more(run_train, tmp_path, monkeypatch, capsys):
    """After its .lock was deleted, a second run could start in the same folder."""
    from paddle_resnet import program

    root, real, holders = tmp_path / "output/Tiny", program.run_and_save, []

    def meanwhile(*args, **kwargs):
        if not holders:
            (root / ".lock").unlink()
            command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(root)]
            holders.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            assert holders[0].stdout.readline() == "locked\n"
        return real(*args, **kwargs)

    monkeypatch.setattr(program, "run_and_save", meanwhile)
    try:
        assert run_train()[0] == 1
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    said = capsys.readouterr().err
    says = f"Tiny/0: checkpoint not written, because {root}/.lock was deleted and another run (process {holders[0].pid}"
    assert says in said
    assert not (root / "0").exists()


def test_a_closed_output_costs_no_checkpoint(photos, tmp_path):
    """As in `train.py | head -1`."""
    places = ["--image-root", photos, "--output-dir", tmp_path, "--report-file", tmp_path / "report.json"]
    reader, writer = os.pipe()
    os.close(reader)
    command = list(map(str, [sys.executable, "tests/train_tiny.py", *TINY, *places]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stdout: can no longer be written (Broken pipe)") == 1
    assert folders.verify(tmp_path / "Tiny/0")["epoch"] == 0
    assert phase(read_report(tmp_path / "report.json"), [], "val.")["images"] == 23
