import shutil
from pathlib import Path

import pytest

from helpers import write_checkpoint
from paddle_resnet.checkpoints import folders, run_folders
from paddle_resnet.utils.errors import UsageError


def test_run_folder_has_the_name_of_the_network(tmp_path):
    assert run_folders.run_folder("runs", "Tiny") == Path("runs/Tiny")
    assert run_folders.run_folder(tmp_path, "nets/mine.py:Net") == tmp_path / "Net"


def test_below_lists_only_checkpoint_names_in_order(tmp_path):
    for name in ("10", "9", "9_20", "9_3", "9_0", ".9.partial", "x", "9_", "_9", "9_1_2", "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").write_text("a file")
    assert [p.name for p in run_folders.below(tmp_path)] == ["9_0", "9_3", "9_20", "9", "10"]
    assert run_folders.below(tmp_path / "nowhere") == []


def test_newest_first_sorts_by_sequence_number(tmp_path):
    write_checkpoint(tmp_path, "89", sequence=4)
    write_checkpoint(tmp_path, "0", sequence=6)
    write_checkpoint(tmp_path, "0_20", sequence=5)
    (write_checkpoint(tmp_path, "1", sequence=7) / "meta.json").unlink()
    valid, damaged = run_folders.newest_first(tmp_path)
    assert [folder.name for folder, _ in valid] == ["0", "0_20", "89"]
    assert [(folder.name, "meta.json" in problem) for folder, problem in damaged] == [("1", True)]


def test_checkpoint_at_end_of_epoch_is_used_before_newer_one_inside_epoch(tmp_path, capsys):
    ranks = [{"loader": {"step": 2, "conditions": {}}, "meters": {}}]
    inside = write_checkpoint(tmp_path, "1_2", sequence=6, epoch=1, step=2, ranks=ranks)
    assert run_folders.resolve(tmp_path) == inside
    last = write_checkpoint(tmp_path, "0", sequence=5)
    write_checkpoint(tmp_path, "3", sequence=4, epoch=3)
    assert run_folders.resolve(tmp_path) == last
    folders.mark(tmp_path, "best", "3")
    # The result is the target of the link, because a run that is still training may change the link.
    assert run_folders.resolve(tmp_path) == run_folders.resolve(tmp_path / "best") == tmp_path / "3"
    output = capsys.readouterr().out
    assert f"{tmp_path}: using the checkpoint {last}\n" in output
    assert f"{tmp_path}: using the checkpoint {tmp_path}/best (3)\n" in output
    assert "warning" not in output
    shutil.rmtree(tmp_path / "3")
    assert run_folders.resolve(tmp_path) == last
    assert f"warning: {tmp_path}/best: refers to a missing checkpoint" in capsys.readouterr().out
    lines = []
    run_folders.resolve(tmp_path, log=lines.append)  # stdout may contain the output of a tool
    assert len(lines) == 2 and capsys.readouterr().out == ""


def test_checkpoint_of_a_run_with_only_damaged_checkpoints_is_not_chosen(tmp_path):
    folder = write_checkpoint(tmp_path, "3")
    assert run_folders.resolve(tmp_path) == folder
    (folder / "meta.json").write_text("{}")
    assert run_folders.resolve(tmp_path) == tmp_path
    write_checkpoint(tmp_path, "4")
    (tmp_path / "x.pdparams").touch()  # the folder is also a checkpoint of a different program
    assert run_folders.resolve(tmp_path) == tmp_path


def test_run_in_an_output_folder_is_that_of_the_network(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("Tiny", "Other"):
        write_checkpoint(tmp_path / name, "1")
        assert run_folders.run_in(tmp_path, name) == tmp_path / name
        if name == "Tiny":  # the only run
            assert run_folders.run_in(tmp_path) == run_folders.run_in(tmp_path, "Other") == tmp_path / name
    assert run_folders.run_in(tmp_path, "folder/net.py:Other") == tmp_path / "Other"
    for arch in (None, "Third"):
        with pytest.raises(
            UsageError, match=f"{tmp_path}: contains runs of several networks; choose one of .*/Other, .*/Tiny$"
        ):
            run_folders.run_in(tmp_path, arch)
    write_checkpoint(tmp_path / "Tiny", "best")  # a folder of the user, not a link
    write_checkpoint(tmp_path / "Tiny/old", "1")
    (tmp_path / "link").symlink_to("Tiny")
    for name in ("Tiny", "Tiny/1", "Tiny/best", "missing", "empty", "link"):
        assert run_folders.run_in(tmp_path / name, "Other") == tmp_path / name
