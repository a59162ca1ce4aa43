"""Saving and restoring a run: position, learning rate schedule, BN statistics, and selection of the start
checkpoint."""

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from helpers import METRICS, build, locked, random_batches, variable, write_checkpoint
from paddle_resnet import config
from paddle_resnet.checkpoints import contents, folders, restore, run_folders, variables
from paddle_resnet.checkpoints import saver as saver_module
from paddle_resnet.checkpoints.saver import Saver
from paddle_resnet.job import exchange, processes
from paddle_resnet.models import user_file
from paddle_resnet.passes import all_reduces
from paddle_resnet.settings import durations
from paddle_resnet.utils import locks, signals
from paddle_resnet.utils.errors import RunError, UsageError

pytestmark = pytest.mark.usefixtures("one_block")

PLACE = paddle.CPUPlace()


class Loader:
    classes = ("a", "b", "c")
    class_names = ("ant", "bee", "cat")
    step = 2

    def __len__(self):
        return 10

    def state(self):
        return {"step": self.step, "conditions": {}}


@pytest.fixture
def args(parse, tmp_path):
    return parse("--output-dir", tmp_path, "--lr", "0.01", "--epochs", "3")


@pytest.fixture
def run(args):
    """Run two steps and return (saver, lr_scheduler, fetchs)."""
    compiled, exe, fetchs, lr_scheduler, main = build(args)
    for images, labels in random_batches(2):
        loss = exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])[0]
        fetchs["loss"][1].update(loss, 8)
        lr_scheduler.step()
    return Saver(args, main, lr_scheduler, Loader(), fetchs), lr_scheduler, fetchs


@pytest.fixture
def saved(once, request, tmp_path):
    """Return a copy of a checkpoint that `run` has saved after epoch 4. All tests share the run."""

    def make(folder):
        saver, _, _ = request.getfixturevalue("run")
        saver.save(4)
        saver.finish()
        shutil.copytree(tmp_path / "Tiny", folder / "Tiny", symlinks=True)
        shutil.rmtree(tmp_path / "Tiny")

    folder = once("saved_for_restore", make)
    return shutil.copytree(folder / "Tiny", tmp_path / "Tiny", symlinks=True) / "4"


def find(args, folder=None, epoch=None):
    """Return the StartCheckpoint for the flags or, if there is a folder, for --from-checkpoint."""
    if folder is not None:
        args.from_checkpoint, args.last_epoch_of_checkpoint = str(folder), epoch
    return restore.find(args.part(restore.Options))[0]


def restore_run(checkpoint, schedule, fetchs):
    flags = {"iter_unit": "epoch", "is_verbose": False}
    restore.restore(checkpoint, schedule, Loader(), fetchs, PLACE, **flags)


@pytest.mark.parametrize(
    ("scope", "start", "inherited"),
    [
        ("train_eval", "resumed", {"interp", "lr", "keep_checkpoints", "num_of_class", "asp"}),
        ("train_eval", "restarted", {"interp", "num_of_class", "asp"}),
        ("eval_only", "resumed", {"interp", "num_of_class"}),
        ("train_eval", "pretrained", {"interp"}),
        ("eval_only", "pretrained", {"interp", "num_of_class"}),
    ],
)
def test_run_inherits_flags_by_kind(tmp_path, capsys, scope, start, inherited):
    recorded = {"interp": "cubic", "lr": 0.3, "keep_checkpoints": 7, "num_of_class": 5, "asp": True}
    recorded |= {"model_arch_name": "Tiny", "image_shape": [3, 192, 160], "crop_size": 160, "resize_short": 183}
    folder = write_checkpoint(tmp_path, "1", epoch=1, arguments=recorded)
    checkpoint = restore.StartCheckpoint(str(folder), 2, 0, contents.read_meta(folder), start == "resumed")
    checkpoint = None if start == "pretrained" else checkpoint
    flags = ["--run-scope", scope, "--from-checkpoint" if checkpoint else "--from-pretrained-params", str(folder)]
    args = config.parse_args(flags)
    restore.inherit_flags(args, checkpoint)
    assert {name for name, value in recorded.items() if getattr(args, name) == value} == {
        *inherited,
        "model_arch_name",
        *("image_shape", "crop_size", "resize_short"),
    }
    assert f"from {folder}/meta.json: --model-arch-name Tiny" in capsys.readouterr().out
    args = config.parse_args([*flags, "--lr", "0.2", "--keep-checkpoints", "2", "--interp", "linear"])
    args.choose_recipe = True
    restore.inherit_flags(args, checkpoint)
    output = capsys.readouterr()
    if (start, scope) == ("resumed", "train_eval"):
        assert f"{folder}: resumed with --keep-checkpoints 2 (was 7)\n" in output.out
        different = "--interp linear (was cubic), --lr 0.2 (was 0.3), so the losses will differ from those of an unint"
    else:
        assert "resumed with" not in output.out
        different = "--interp linear (was cubic); remove the flags to use the recorded values"
    assert f"{folder}: trained with different flags: {different}" in output.err
    assert ("--choose-recipe: has no effect" in output.err) == ((start, scope) == ("resumed", "train_eval"))
    args = config.parse_args(flags)
    args.choose("test", interp="linear")
    restore.inherit_flags(args, checkpoint)
    assert args.interp == ("linear" if (start, scope) == ("pretrained", "train_eval") else "cubic")
    folder = write_checkpoint(tmp_path, "1", epoch=1, arguments=recorded | {"choose_recipe": True})
    if checkpoint:
        args, checkpoint = config.parse_args(flags), dataclasses.replace(checkpoint, meta=contents.read_meta(folder))
        args.choose_recipe = True
        restore.inherit_flags(args, checkpoint)
        assert "--choose-recipe: has no effect" not in capsys.readouterr().err


def test_network_of_the_start_selects_the_run_to_resume(tmp_path):
    folder = write_checkpoint(tmp_path, "1", epoch=1, arguments={"model_arch_name": "ResNet18"})
    start = ["--from-checkpoint", str(folder)]
    for flags, network in (
        ([*start, "--resume"], "ResNet18"),
        (["--from-pretrained-params", str(folder), "--resume"], "ResNet18"),
        (start, "ResNet50"),
        (["--resume"], "ResNet50"),
        ([*start, "--resume", "--model-arch-name", "ResNet34"], "ResNet34"),
    ):
        args = config.parse_args([*flags, "--output-dir", str(tmp_path / "output")])
        args.apply(restore.Network)
        assert args.model_arch_name == network
        assert args.resume == ("--resume" in flags)


def test_file_of_a_network_is_imported_only_if_a_flag_specifies_it(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("")
    recorded, now = f"{tmp_path}/old.py:Net", f"{tmp_path}/mine.py:Net"
    meta = {"arguments": {"model_arch_name": recorded}, "network_sha256": user_file.sha256(now)}
    with pytest.raises(UsageError, match=f"DIR: its network {recorded} is from a file, .*; add --model-arch-name"):
        restore.recorded_flags("DIR", meta, None)
    assert restore.recorded_flags("DIR", meta, now).model_arch_name == now
    assert restore.recorded_flags("DIR", meta, f"{tmp_path}/mine.py:Other").model_arch_name == recorded
    assert restore.recorded_flags("DIR", meta, "Net").model_arch_name == recorded
    assert capsys.readouterr().err == ""
    restore.recorded_flags("DIR", meta | {"network_sha256": "0"}, now)
    assert f"--model-arch-name {now}: the file has changed since the training of DIR;" in capsys.readouterr().err
    meta = {"arguments": {"model_arch_name": "resnet18"}}
    assert restore.recorded_flags("DIR", meta, None).model_arch_name == "ResNet18"
    with pytest.raises(UsageError, match="DIR: meta.json contains an invalid flag .*--crop-size.*; choose"):
        restore.recorded_flags("DIR", {"arguments": {"crop_size": 0}}, None)


@pytest.mark.parametrize(
    ("before", "now", "is_fine_tuning", "difference"),
    [
        ("ab", "ab", False, None),
        ("abc", "acc", False, "label 1 was b and is c"),
        ("ab", "ac", True, "label 1 was b and is c"),
        ("ab", "a", False, "label 1 was b and is unused"),
        ("a", "ab", False, "label 1 was unused and is b"),
        ("a", "bc", True, None),
        ("a", "", False, None),
        ("", "a", False, None),
        (None, "a", False, None),
    ],
)
def test_different_classes_trigger_warning(capsys, before, now, is_fine_tuning, difference):
    meta = None if before is None else {"classes": list(before)}
    assert restore.recorded_classes(meta) == (list(before) if before else None)
    restore.compare_classes("DIR", meta, SimpleNamespace(classes=tuple(now)), is_fine_tuning)
    warning = f"warning: DIR: trained on different classes ({difference}); check --image-root\n"
    assert capsys.readouterr().err == (warning if difference else "")


def test_only_rank_0_checks_the_run_folder(tmp_path, as_rank):
    """While another rank starts, rank 0 may already create and delete the folder (outputs.claim)."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a writable folder"):
        saver_module.check_folder(tmp_path / "file/Tiny", None, {}, False, False)
    as_rank(0)
    exchange.from_rank_0(lambda: None)  # rank 0 reports no problem
    as_rank(1)
    saver_module.check_folder(tmp_path / "file/Tiny", None, {}, False, False)


def test_folder_of_another_run_is_rejected(tmp_path, monkeypatch):
    root, starts = tmp_path / "new/Tiny", {"--from-pretrained-params": tmp_path / "new/Tiny/1"}
    modes, access = [], os.access
    monkeypatch.setattr(os, "access", lambda path, mode: modes.append((path, mode)) or access(path, mode))
    saver_module.check_folder(root, None, {}, False, False)
    assert modes == [(tmp_path, os.W_OK | os.X_OK)]
    assert not root.parent.exists()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match=f"{path / 'x'}: cannot be written .{path} is not a writable folder.;"):
            saver_module.check_folder(path / "x/Tiny", None, {}, False, False)
    for name in "0123":
        write_checkpoint(root, name, sequence=int(name), epoch=int(name))
        if name > "1":
            more = ", ..." if name == "3" else ""
            start = f"({', '.join('012'[: int(name) + 1])}{more}); continue from the newest with --resume, or choose"
            for used, remedy in ((starts, ""), ({}, ", or replace them with --overwrite")):
                with pytest.raises(UsageError, match="contains checkpoints of an earlier run") as error:
                    saver_module.check_folder(root, None, used, False, False)
                assert start in str(error.value) and str(error.value).endswith(f"different --output-dir{remedy}")
    saver_module.check_folder(root, None, {}, True, False)
    with pytest.raises(UsageError, match="--overwrite: would delete --from-pretrained-params .*/1, which"):
        saver_module.check_folder(root, None, starts, True, False)
    with pytest.raises(UsageError, match=f"--overwrite: would delete --from-checkpoint {root}, which"):
        saver_module.check_folder(root, None, {"--from-checkpoint": root}, True, False)
    saver_module.check_folder(root, None, {"--from-checkpoint": tmp_path}, True, False)
    folders.mark(root, "latest", "3")
    (tmp_path / "link").symlink_to(root)
    for resume in (True, False):
        for place, name in ((root, "3"), (root, "latest"), (tmp_path / "link", "3")):
            start = restore.StartCheckpoint(str(place / name), 4)
            saver_module.check_folder(root, start, {}, False, resume)
            saver_module.check_folder(tmp_path / "link", start, {}, False, resume)
        with pytest.raises(UsageError, match="3 was saved by another run" if resume else "contains checkpoints of an"):
            saver_module.check_folder(root, restore.StartCheckpoint(str(root / "2"), 3), {}, False, resume)
    (root / "3/a.pdopt").write_text("damaged")
    saver_module.check_folder(root, restore.StartCheckpoint(str(root / "2"), 3), {}, False, True)


def test_best_evaluation_that_led_to_checkpoint(tmp_path):
    def write(name, sequence, epoch, step, top1, run="r"):
        result = {"loss": 1.0, "top1": top1, "top5": 1.0, "ips": 9.0}
        ranks = [{"loader": {"step": step or 0, "conditions": {}}, "meters": {}}]
        write_checkpoint(
            tmp_path, name, sequence=sequence, epoch=epoch, step=step, evaluated=result, ranks=ranks, run=run
        )
        return contents.read_meta(tmp_path / name)

    for name, epoch, step in (("3", 3, None), ("1_3", 1, 3)):
        write(name, 0, epoch, step, 0.95)  # abandoned, because the run was resumed from an earlier checkpoint
    write("0", 1, 0, None, 0.5)
    write("1_2", 2, 1, 2, 0.5)
    meta = write("1", 3, 1, None, 0.4)
    write("2", 4, 2, None, 0.9)
    write("0_1", 5, 0, 1, 0.99, run="other")
    start = restore.StartCheckpoint(str(tmp_path / "1"), 2, meta=meta, resumes=True)
    result = {"loss": 1.0, "top5": 1.0, "ips": 9.0}
    assert saver_module.best_before(tmp_path, start) == {"epoch": 0, "top1": 0.5, **result}
    write("1_2", 2, 1, 2, 0.6)
    inside = restore.StartCheckpoint(str(tmp_path / "1_2"), 1, 2, meta=meta, resumes=True)
    for checkpoint in (start, inside):
        best = saver_module.best_before(tmp_path, checkpoint)
        assert best == {"epoch": 1, "step": 2, "top1": 0.6, **result}


def test_best_evaluation_and_patience(args):
    args.patience = 2
    saver = Saver(args, None, None, None, {})
    saver.save_if_due(durations.Stop(0, 1, ends_epoch=False, saves=False), None, None)  # nothing is due
    numbers = {"top1": 0.5, "loss": 1.0}
    assert saver.record(durations.Stop(0), {**numbers, "confusion": np.zeros(2)})
    assert saver.best == {"epoch": 0, **numbers}
    for epoch in (1, 2):
        assert not saver.ends_early
        assert not saver.record(durations.Stop(epoch), numbers)
    assert saver.ends_early and saver.best_folder.name == "0"
    saved = []
    saver.save = lambda *arguments, is_averaged: saved.append(arguments)
    inside = durations.Stop(3, 2, ends_epoch=False, saves=False)
    saver.save_if_due(inside, "trained", "evaluated")
    assert saved == [(3, 2, None, "evaluated")]  # because --patience ends the run
    args.patience = 0
    assert not saver.ends_early
    saver.save_if_due(inside, "trained", "evaluated")
    assert len(saved) == 1
    assert saver.record(inside, numbers | {"top1": 0.6})
    assert (saver.best["step"], saver.best_folder.name) == (2, "3_2")
    saver.save_if_due(inside, "trained", "evaluated")
    assert saved[1:] == [(3, 2, None, "evaluated")]  # because the evaluation is the best
    saver.save_if_due(durations.Stop(4), "trained", None)
    assert saved[2:] == [(4, None, "trained", None)]


def test_resume_without_checkpoint_cleans_folder_and_uses_other_start(args, tmp_path, capsys):
    root, args.resume = tmp_path / "Tiny", True
    assert find(args) is None
    assert not root.exists()
    restore._check_default_network(tmp_path / "missing/Tiny")
    (root / ".7.partial").mkdir(parents=True)
    message = r"another run \(process 1 on x\) is writing its checkpoints"
    with locked(root / ".lock"), pytest.raises(UsageError, match=message):
        find(args)
    assert (root / ".7.partial").exists()
    assert find(args) is None
    assert not (root / ".7.partial").exists()
    assert f"--resume: {root} contains no checkpoint yet" in capsys.readouterr().out
    start = write_checkpoint(tmp_path / "Other", "1")  # a run of a different network
    assert find(args) is None
    args.set("default", model_arch_name="Tiny")
    with pytest.raises(UsageError, match=f"{root} contains no checkpoint, but {tmp_path} contains runs of Other"):
        find(args)
    args.from_pretrained_params = str(tmp_path / "Other")
    assert restore.find(args.part(restore.Options)) == (None, str(start))
    for epoch in ("5", "6", "7", "8"):  # checkpoints of a different program
        (root / epoch).mkdir()
        for end in ("pdparams", "pdopt"):
            (root / epoch / f"tiny.{end}").touch()
    message = rf"--resume: the checkpoints in {root} \(6, 7, 8\) have no meta.json; if they are from another"
    with pytest.raises(UsageError, match=message):  # pretrained parameters cannot replace the checkpoints
        find(args)
    args.from_pretrained_params, args.from_checkpoint = None, str(start)
    assert find(args).folder == str(start)
    (root / "9/notes").mkdir(parents=True)  # the newest folder is not a checkpoint
    with pytest.raises(UsageError, match=f"{root}: contains no valid checkpoint; move the checkpoints away"):
        find(args)
    shutil.rmtree(root / "9")
    write_checkpoint(root, "4", epoch=4)
    args.from_checkpoint, args.from_pretrained_params = None, str(tmp_path / "Other")
    checkpoint, pretrained = restore.find(args.part(restore.Options))
    assert (checkpoint.folder, checkpoint.epoch) == (str(root / "4"), 5)
    assert pretrained == str(tmp_path / "Other")


def test_saved_files_and_meta_json(args, saved, tmp_path):
    assert saved == tmp_path / "Tiny" / "4"
    assert sorted(p.name for p in saved.iterdir()) == ["meta.json", "tiny.pdopt", "tiny.pdparams"]
    assert sorted(p.name for p in (tmp_path / "Tiny").iterdir()) == [".lock", "4", "latest"]
    meta = contents.verify(saved)
    assert (meta["epoch"], meta["step"], meta["world_size"]) == (4, None, 1)
    assert (meta["classes"], meta["class_names"]) == (["a", "b", "c"], ["ant", "bee", "cat"])
    assert meta["arguments"]["lr"] == 0.01
    assert meta["lr_scheduler"]["last_epoch"] == 2
    assert meta["ranks"][0]["loader"] == Loader().state()
    assert set(meta["seeds"]) == {"paddle", "python", "numpy"}
    assert (meta["paddle_version"], meta["steps_each_epoch"], meta["sequence"]) == (paddle.__version__, 10, 0)
    assert (meta["trained"], meta["evaluated"], meta["best"], meta["evaluations_since_best"]) == (None, None, None, 0)
    # The file meta.json is indented for readability, with one flag per line.
    assert len((saved / "meta.json").read_text().splitlines()) < len(meta["arguments"]) + 110


def test_restore_inside_epoch(args, run):
    saver, lr_scheduler, fetchs = run
    random.seed(3)
    saver.save(4, 2)
    saver.finish()
    expected = random.random(), np.random.rand()
    assert saver.folder.name == "4_2"
    checkpoint = find(args, saver.folder.parent, "auto")
    assert (checkpoint.epoch, checkpoint.step, checkpoint.trained, checkpoint.loader_state) == (
        4,
        2,
        None,
        Loader().state(),
    )
    _, _, fresh, schedule, _ = build(args)
    random.seed(9)
    np.random.seed(9)
    restore_run(checkpoint, schedule, fresh)
    assert fresh["loss"][1].state() == fetchs["loss"][1].state()
    assert (random.random(), np.random.rand()) == expected
    assert schedule.last_epoch == 42


def test_resumed_training_uses_bn_statistics_of_its_own_rank(args, run, monkeypatch):
    saver, _, _ = run
    own = {"batch_norm_2.w_1": np.arange(8, dtype=np.float32)}
    state = {"loader": Loader().state(), "meters": {}}
    monkeypatch.setattr(exchange, "gather", lambda data: [data, saver_module._pack(state, own)])
    saver.save(4, 2)
    saver.finish()
    monkeypatch.setattr(processes, "rank", lambda: 1)
    checkpoint = find(args, saver.folder.parent, "auto")
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, is_train=False)
        variables.load(args.part(variables.LoadOptions), checkpoint.folder, main, PLACE)
        assert not np.array_equal(variable("batch_norm_2.w_1"), own["batch_norm_2.w_1"])
    with static.scope_guard(static.Scope()):
        _, _, fetchs, schedule, main = build(args)
        variables.load(args.part(variables.LoadOptions), checkpoint.folder, main, PLACE)
        restore_run(checkpoint, schedule, fetchs)
        np.testing.assert_array_equal(variable("batch_norm_2.w_1"), own["batch_norm_2.w_1"])


def test_checkpoint_has_state_of_current_stage(args, run, monkeypatch, shard):
    """In stages with frozen layers, fewer BN statistics differ between processes."""
    saver, _, _ = run
    _, _, fetchs, _, main = build(args.copy(freeze=("stem",)))
    loader, packed = Loader(), []
    loader.step = 7
    fetchs["loss"][1].update(np.float32(1.5), 3)
    saver.follow(loader, fetchs, main)
    monkeypatch.setattr(exchange, "gather", packed.append)
    shard(rank=1)
    saver.save(4, 2)
    state, statistics = saver_module._unpack(packed[0])
    assert state["loader"]["step"] == 7
    assert state["meters"]["loss"] == fetchs["loss"][1].state()
    assert set(np.load(io.BytesIO(statistics)).files) == set(all_reduces.own_statistics(main))
    # After an epoch, the statistics of all processes are the same. Those of rank 0 are in the file of the parameters.
    saver.save(4, 10, {"loss": 1.5})
    saver.save(4)
    shard(rank=0)
    monkeypatch.setattr(exchange, "gather", lambda data: packed.append(data) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saver.save(5, 2)
    assert [saver_module._unpack(data)[1] for data in packed[1:]] == [b""] * 3


def test_restore_between_training_and_evaluation(args, run, capsys):
    saver, _, _ = run
    trained = {"loss": 1.5, "top1": 0.5, "top5": 1.0, "ips": 20.0}
    saver.save(4, 10, trained=trained)
    saver.finish()
    checkpoint = find(args, saver.folder.parent, "auto")
    assert (checkpoint.epoch, checkpoint.step, checkpoint.trained) == (4, 10, trained)
    assert not checkpoint.is_done("batch", 90, 2, 0)  # the evaluation is pending
    assert dataclasses.replace(checkpoint, step=0).is_done("batch", 90, 2, 0)
    assert checkpoint.label == f"--from-checkpoint {saver.folder}"
    # The training of the epoch is complete, so the position of the loader and the other --accumulate-steps are allowed.
    timeline = SimpleNamespace(accumulate_steps=4, batches=lambda epoch: 4, batches_before=lambda epoch: 8 * epoch)
    steps = []
    restore_run(checkpoint, SimpleNamespace(timeline=timeline, step=steps.append), None)
    assert steps == [(4 + 4 * 8) // 4]
    output = capsys.readouterr()
    assert "cannot continue" not in output.err
    assert f"loaded {saver.folder}: continuing with epoch 4 step 10\n" in output.out
    args.resume = True
    assert find(args).label == f"--resume: {saver.folder}"


def test_run_that_resumes_from_outdated_checkpoint_is_rejected(args, run):
    """Two processes resume the same run. While the second process starts, the first process saves and ends."""
    args.resume, (saver, schedule, fetchs) = True, run
    saver.save(4)
    saver.finish()
    checkpoint = find(args)
    meta = checkpoint.meta | {"evaluations_since_best": 3}
    resumed = Saver(args, saver._program, schedule, Loader(), fetchs, dataclasses.replace(checkpoint, meta=meta))
    resumed.save(5, 0)  # nothing is saved, because no step has run
    assert str(resumed.folder) == checkpoint.folder and resumed._pending is None
    assert resumed._run == saver._run
    args.patience = 3
    assert resumed.ends_early
    args.patience = 0
    saver.save(5)
    saver.finish()
    message = f"--resume: {saver.folder} was saved by another run while this run started; repeat the command"
    for start in (checkpoint, None):
        with pytest.raises(UsageError, match=message):
            Saver(args, saver._program, schedule, Loader(), fetchs, start)
    (saver.folder / "tiny.pdopt").write_bytes(b"")  # --resume skips damaged checkpoints
    args.output_dir = os.path.relpath(args.output_dir)
    Saver(args, saver._program, schedule, Loader(), fetchs, find(args))


def test_new_run_that_starts_from_a_checkpoint_has_its_own_name(args, run, tmp_path):
    saver, schedule, fetchs = run
    saver.save(4)
    saver.finish()
    start, other = find(args, saver.folder), args.copy(output_dir=str(tmp_path / "new"))
    new = Saver(other, saver._program, schedule, Loader(), fetchs, start)
    new.save(4)
    new.finish()
    assert contents.read_meta(new.folder)["run"] != contents.read_meta(saver.folder)["run"]


def test_save_on_error_saves_only_with_single_process(run, monkeypatch, shard, capsys):
    saver, _, _ = run
    monkeypatch.setattr(exchange, "gather", lambda data: [data])
    monkeypatch.setattr(exchange, "all_gather", lambda values: np.array([values, values]))  # equal ranks
    shard(world_size=2)
    saver.save_on_error(RuntimeError(), 4, 10, {"loss": 1.5})
    assert saver.folder is None
    with pytest.raises(signals.Preempted, match="; continue with the same command and --resume"):
        saver.save_on_error(signals.Preempted(), 3, 10, None)
    assert saver.folder.name == "3_2"  # the position of the loader
    monkeypatch.undo()
    saver.save_on_error(RuntimeError(), 5, 10, None)
    assert saver.folder.name == "3_2"
    saver.save_on_error(RuntimeError(), 4, 10, {"loss": 1.5})
    assert saver.folder.name == "4_10"
    assert (
        "epoch 4: trained and saved, but not evaluated; repeat the command with --resume\n" in capsys.readouterr().out
    )
    monkeypatch.setattr(folders, "commit", lambda *arguments: 1 / 0)
    saver.save_on_error(RuntimeError(), 5, 10, {"loss": 1.5})
    assert "warning: epoch 5: trained, but not saved: division by zero\n" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # a run that lost its state must not exit like a saved one
        saver.save_on_error(signals.Preempted(), 6, 10, {"loss": 1.5})


@pytest.mark.timeout(20)
def test_schedule_is_restored_exactly(args, run, capsys):
    saver, lr_scheduler, _ = run
    saver.save(0, 2)
    saver.finish()
    _, _, fetchs, schedule, _ = build(args)
    restore_run(find(args, saver.folder.parent, "auto"), schedule, fetchs)
    assert schedule.state_dict() == lr_scheduler.state_dict()
    checkpoint = find(args, saver.folder.parent, "auto")
    # A damaged meta.json may contain an extremely large epoch number.
    checkpoint = dataclasses.replace(checkpoint, epoch=2**31 - 1)
    restore_run(checkpoint, schedule, fetchs)
    assert schedule.last_epoch == (2**31 - 1) * 10 + 2
    checkpoint = dataclasses.replace(checkpoint, meta=checkpoint.meta | {"steps_each_epoch": 9})
    restore_run(checkpoint, schedule, fetchs)
    flags = {"iter_unit": "batch", "is_verbose": False}
    with pytest.raises(UsageError, match="--iter-unit batch: .* has 9 steps per epoch, but this run has 10, so it"):
        restore.restore(checkpoint, schedule, Loader(), fetchs, PLACE, **flags)
    # A run that starts from weights of another program has no steps to compare.
    checkpoint = restore.StartCheckpoint("DIR", 0)
    restore.restore(checkpoint, schedule, Loader(), fetchs, PLACE, **flags)
    assert schedule.last_epoch == 0
    assert capsys.readouterr().out.endswith("loaded DIR: starting with epoch 0\n")


def test_position_within_a_step_is_rejected():
    meta = {"steps_each_epoch": 8, "trained": None}
    timeline = SimpleNamespace(accumulate_steps=3)
    message = "--accumulate-steps 3: DIR was saved after 4 batches of an epoch, which is not a multiple of 3; use"
    with pytest.raises(UsageError, match=f"^{message}"):
        restore_run(restore.StartCheckpoint("DIR", 2, 4, meta, True), SimpleNamespace(timeline=timeline), {})


def test_different_number_of_processes_triggers_warning(args, run, shard, capsys):
    saver, _, _ = run
    saver.save(0)
    saver.finish()
    _, _, fetchs, schedule, _ = build(args)
    checkpoint = find(args, saver.folder.parent, "auto")
    restore_run(checkpoint, schedule, fetchs)
    output = capsys.readouterr()
    assert "learning rate" not in output.err
    assert output.out.endswith(f"loaded {saver.folder}: continuing with epoch 1\n")
    shard(world_size=2)
    restore_run(checkpoint, schedule, fetchs)
    warning = "written by 1 process, but this run has 2, so the global batch size and the peak learning rate change"
    assert warning in capsys.readouterr().err
    shard(world_size=1)
    for changes in ({}, {"paddle_version": "2.5.0"}):  # older checkpoints do not contain the version
        meta = {name: value for name, value in checkpoint.meta.items() if name != "paddle_version"} | changes
        restore_run(dataclasses.replace(checkpoint, meta=meta), schedule, fetchs)
        error = f"{checkpoint.folder}: written with Paddle 2.5.0, but this run uses {paddle.__version__}, so"
        stderr = capsys.readouterr().err
        assert error in stderr if changes else "written with" not in stderr


def test_same_position_is_saved_once(args, run, tmp_path):
    saver, _, _ = run
    saver.save(0, 0)  # nothing is saved, because no step has run
    saver.save(1)
    saver.save(2, 0)  # nothing is saved, because the end of epoch 1 is already saved
    args.accumulate_steps = 4
    saver.save(1, evaluated={"loss": 1.0, "top1": 0.5, "top5": 1.0, "ips": 9.0})
    saver.finish()
    meta = contents.read_meta(tmp_path / "Tiny/1")
    assert (meta["evaluated"]["top1"], meta["sequence"], meta["steps_each_epoch"]) == (0.5, 1, 8)
    assert sorted(p.name for p in (tmp_path / "Tiny").iterdir() if p.name.isdigit() or "_" in p.name) == ["1"]


def test_write_error_raises_at_next_save(args, run, tmp_path):
    saver, _, _ = run
    saver.save(0)
    saver.finish()
    (tmp_path / "Tiny" / ".1.partial").write_text("a file in place of the folder")
    saver.save(1)
    with pytest.raises(RunError, match=r"Tiny/1: checkpoint cannot be written \(File exists\); .*; free disk space"):
        saver.save(2)
    assert run_folders.newest_first(tmp_path / "Tiny")[0][0][0].name == "0"


def test_error_if_run_folder_was_deleted(run, tmp_path):
    saver, _, _ = run
    saver.save(0)
    saver.finish()
    shutil.rmtree(tmp_path / "Tiny")
    saver.save(1)
    with pytest.raises(RunError, match="Tiny: was deleted during the run; start the run again, and keep the folder"):
        saver.finish()
    saver.finish()  # the error is raised only once


def save_evaluated(saver, epoch, top1):
    evaluated = {"loss": 1.0, "top1": top1, "top5": 1.0, "ips": 9.0}
    saver.record(durations.Stop(epoch), evaluated)
    saver.save(epoch, evaluated=evaluated)


def test_newest_and_best_checkpoints_and_those_of_other_runs_are_kept(args, run, tmp_path):
    saver, _, _ = run
    args.keep_checkpoints = 2
    own, saver._run = saver._run, "other run"
    saver.save(0)
    saver.finish()
    saver._run = own
    # If two epochs have the same accuracy, the first is the best.
    for epoch, top1 in ((1, 0.2), (2, 0.5), (3, 0.5), (4, 0.1), (5, 0.3)):
        save_evaluated(saver, epoch, top1)
    saver.finish()
    assert [folder.name for folder in run_folders.finished(tmp_path / "Tiny")] == ["0", "2", "4", "5"]
    assert (tmp_path / "Tiny/best").resolve().name == "2"
    meta = contents.read_meta(tmp_path / "Tiny/5")
    assert (meta["best"]["epoch"], meta["evaluations_since_best"]) == (2, 3)
    for saver._loader.step in (1, 2, 3):
        saver.save(6, saver._loader.step)
    saver.finish()
    assert [folder.name for folder in run_folders.finished(tmp_path / "Tiny")] == ["0", "2", "4", "5", "6_2", "6_3"]


def test_file_in_place_of_a_link_triggers_warning(run, tmp_path, capsys):
    saver, _, _ = run
    (tmp_path / "Tiny/latest").write_text("mine")
    (tmp_path / "Tiny/.lock").unlink()
    save_evaluated(saver, 0, 0.5)
    saver.finish()
    assert f"{tmp_path}/Tiny/latest: cannot be linked to 0 (not a link); remove" in capsys.readouterr().err
    assert (tmp_path / "Tiny/latest").read_text() == "mine"
    assert (tmp_path / "Tiny/best").resolve() == tmp_path / "Tiny/0"
    assert locks.is_of(saver._lock, tmp_path / "Tiny/.lock")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_value_prevents_checkpoint(run, tmp_path, value):
    saver, _, _ = run
    weight = variable("conv2d_0.w_0")
    weight[-1, -1, -1, -1] = value
    variables.set_variable("conv2d_0.w_0", weight, PLACE)
    saver.save(0)
    with pytest.raises(RunError, match="Tiny/0: checkpoint not written, .* in 1 array .conv2d_0.w_0"):
        saver.finish()
    weight[-1, -1, -1, -1] = 0
    variables.set_variable("conv2d_0.w_0", weight, PLACE)
    state = variable("conv2d_0.w_0_velocity_0")
    variables.set_variable("conv2d_0.w_0_velocity_0", np.full_like(state, value), PLACE)
    saver.save(1)
    with pytest.raises(RunError, match=r"non-finite values in 1 array \(conv2d_0.w_0_velocity_0\)"):
        saver.finish()
    states = [{str(i): np.float32([value])} for i in range(4)] + [{"count": np.int64([1])}]
    with pytest.raises(RunError, match=r"because of non-finite values in 4 arrays \(0, 1, 2, \.\.\.\); resume"):
        saver_module._check_finite(tmp_path, states)
    with pytest.raises(RunError, match=r"because of non-finite values in 3 arrays \(0, 1, 2\); resume"):
        saver_module._check_finite(tmp_path, states[:3])
    assert run_folders.finished(tmp_path / "Tiny") == []


def test_checkpoint_is_written_asynchronously(args, run, monkeypatch):
    saver, _, _ = run
    import threading

    args.checkpoint_commit, forms = "marker", []
    may_write = threading.Event()
    real = folders.commit
    monkeypatch.setattr(folders, "commit", lambda *a: (may_write.wait(10) and forms.append(a[-1])) or real(*a))
    saver.save(0)
    assert not (saver.folder / "meta.json").exists()
    may_write.set()
    saver.finish()
    assert forms == ["marker"]
    assert (saver.folder / "meta.json").exists()


@pytest.mark.parametrize(
    ("below", "epoch", "start"),
    [("", "auto", 11), ("", 4, 5), ("", 10, 11), ("4", None, 0), ("4", 4, 5), ("4", "auto", 5), ("latest", "auto", 11)],
)
def test_find_epoch_and_folder(args, run, tmp_path, below, epoch, start):
    saver, _, _ = run
    for number in (4, 10):
        saver.save(number)
    saver.finish()
    (tmp_path / "Tiny" / "11").mkdir()  # an empty folder is not a checkpoint
    checkpoint = find(args, tmp_path / "Tiny" / below, epoch)
    assert checkpoint.epoch == start
    assert checkpoint.folder == str((tmp_path / "Tiny" / (below or str(start - 1))).resolve())


@pytest.mark.parametrize(
    ("below", "epoch", "message"),
    [
        ("nowhere", None, "--from-checkpoint .*nowhere: does not exist; choose"),
        ("Tiny/4/meta.json", None, "--from-checkpoint .*meta.json: is not a folder; choose"),
        ("empty", None, r"empty: contains neither meta.json nor tiny.pdparams; choose"),
        ("Tiny", 3, r"--last-epoch-of-checkpoint 3: .*; use an existing epoch \(4\), or"),
        ("Tiny/4", 3, "--last-epoch-of-checkpoint 3"),
        (
            "empty",
            "auto",
            "--last-epoch-of-checkpoint auto: .*pdparams; choose a different folder, or set --model-pref",
        ),
        ("", None, r"contains runs of several networks; choose one of .*Big, .*Tiny"),
    ],
)
def test_missing_checkpoint_is_rejected(args, saved, tmp_path, below, epoch, message):
    for name in ("empty", "Tiny/3"):
        (tmp_path / name).mkdir()
    for name in ("Big/4", "Tiny/5_2"):
        shutil.copytree(saved, tmp_path / name)
    args.set("default", model_arch_name="Tiny")
    with pytest.raises(UsageError, match=message):
        find(args, tmp_path / below, epoch)


def test_prefix_comes_from_meta_json_or_flag(args, saved):
    args.model_prefix = "other"
    assert find(args, saved.parent, "auto").epoch == 5
    (saved / "meta.json").unlink()
    with pytest.raises(UsageError, match="other.pdparams.*--model-prefix"):
        find(args, saved.parent, "auto")


def test_run_folder_selects_best_or_newest_checkpoint(args, run, tmp_path, capsys):
    """Both the run folder and --output-dir are accepted, even if --output-dir also contains a run of a different
    network."""
    saver, _, _ = run
    root = tmp_path / "Tiny"
    for number, top1 in ((4, 0.5), (7, 0.2)):
        save_evaluated(saver, number, top1)
    saver.save(8, 2)
    saver.finish()
    (tmp_path / "Big").mkdir()
    for below in ("", "Tiny"):
        capsys.readouterr()
        assert find(args, tmp_path / below).folder == str((root / "best").resolve())
        assert f"using the checkpoint {root}/best (4)" in capsys.readouterr().out
    assert find(args, tmp_path, "auto").folder == str(root / "8_2")
    assert find(args, tmp_path, 7).folder == str(root / "7")
    (root / "best").unlink()
    assert find(args, tmp_path).folder == str(root / "7")  # 8_2 is not selected, because it was saved inside an epoch
    for runs in (1, 2):
        if runs == 2:
            shutil.copytree(root / "4", tmp_path / "Big/4")  # now --model-arch-name must select one of two runs
            assert find(args, tmp_path).folder == find(args, tmp_path, 7).folder == str(root / "7")
        args.from_checkpoint, args.last_epoch_of_checkpoint = None, None
        args.from_pretrained_params = str(tmp_path)
        assert restore.find(args.part(restore.Options)) == (None, str(root / "7"))
    args.set("default", model_arch_name="Tiny")  # a default does not select a run
    args.from_pretrained_params = str(tmp_path)
    with pytest.raises(UsageError, match="contains runs of several networks"):
        find(args)


@pytest.mark.parametrize("prefix", ["resnet_50_paddle", "tiny_paddle", "mine"])
def test_files_of_other_programs_do_not_need_model_prefix(args, saved, prefix):
    args.set("default", model_prefix="tiny_paddle")
    (saved / "meta.json").unlink()
    for end in ("pdparams", "pdopt"):
        (saved / f"tiny.{end}").rename(saved / f"{prefix}.{end}")
    assert find(args, saved.parent, "auto").epoch == 5
    assert variables.pretrained_file(saved, args.flag_value("model_prefix")) == saved / f"{prefix}.pdparams"


def test_meta_json_does_not_describe_files_of_other_programs(args, saved):
    shutil.copy(saved / "tiny.pdparams", saved / "mine.pdparams")

    def origin(path):
        return restore.origin(None, args.copy(from_pretrained_params=path).part(restore.Options))

    assert origin(str(saved / "mine")) == (str(saved), None)
    assert origin(str(saved / "tiny")) == (str(saved), contents.read_meta(saved))
    assert origin(None) == (None, None)
    (saved / "meta.json").write_text("damaged")
    with pytest.raises(
        UsageError, match=f"^--from-pretrained-params {saved}/mine: unusable: meta.json is damaged; cho"
    ):
        origin(str(saved / "mine"))
    (saved / "meta.json").unlink()
    assert origin(str(saved / "mine")) == (str(saved), None)


def test_checkpoint_before_the_first_step_is_not_resumed(args, tmp_path):
    for epoch, step, position in ((0, 0, (0, 0, False)), (0, 1, (0, 1, True)), (0, None, (1, 0, True))):
        ranks = [{"loader": {"step": step or 0, "conditions": {}}, "meters": {}}]
        folder = write_checkpoint(tmp_path / "Tiny", "0", epoch=epoch, step=step, ranks=ranks)
        checkpoint = find(args, folder.parent, "auto")
        assert (checkpoint.epoch, checkpoint.step, checkpoint.resumes) == position


@pytest.mark.parametrize(
    ("classes", "outputs", "now", "problem"),
    [
        (["ant", "bee"], 2, ["ant", "bee"], None),
        (["ant", "bee"], 3, ["ant", "cat"], "label 1 was bee and is cat"),
        (["ant", "bee"], 3, ["ant", "bee", "cat"], "label 2 was unused and is cat"),
        (["0", "1", "2"], 3, ["0", "1"], None),  # only numbers, of which some have no images
        (["0", "1", "2"], 3, ["ant", "bee", "cat"], None),
        (["0", "1", "2"], 3, ["0", "1", "2", "3"], "3 classes, now 4"),
        (["0", "1"], 3, ["0", "1", "2"], None),
        (None, 3, ["ant"], None),
        (["ant", "bee"], 2, None, None),
    ],
)
def test_resumed_run_may_have_unused_outputs_but_no_other_classes(classes, outputs, now, problem):
    meta = {"classes": classes, "arguments": {"num_of_class": outputs}}
    checkpoint = restore.StartCheckpoint("DIR", 1, 0, meta, True, label="--resume: DIR")
    message = rf"--resume: DIR: a resumed run cannot change its classes \({problem}\).*: `train x`"
    with pytest.raises(UsageError, match=message) if problem else contextlib.nullcontext():
        restore.check_resumed_classes(checkpoint, now, "train x")


@pytest.mark.parametrize("recorded", [False, True])
def test_kind_of_labels_changes_only_in_fine_tuning(tmp_path, recorded):
    arguments = {"multi_label": recorded, "model_arch_name": "Tiny"}
    folder = write_checkpoint(tmp_path, "1", epoch=1, arguments=arguments)
    checkpoint = restore.StartCheckpoint(str(folder), 2, 0, contents.read_meta(folder), True)
    kind, start = ["--multi-label", str(not recorded).lower()], ["--from-pretrained-params", str(folder)]
    for flags, start_checkpoint in (
        (["--from-checkpoint", str(folder)], checkpoint),
        (["--run-scope", "eval_only", "--from-checkpoint", str(folder)], checkpoint),
        (["--run-scope", "eval_only", *start], None),
    ):
        with pytest.raises(UsageError, match=f"--multi-label {kind[1]}: {folder} was trained with --multi-label"):
            restore.inherit_flags(config.parse_args([*kind, *flags]), start_checkpoint)
    args = config.parse_args([*kind, *start])
    restore.inherit_flags(args, None)
    assert args.multi_label != recorded


@pytest.mark.parametrize("epoch", [4, None])
@pytest.mark.parametrize("file", ["tiny.pdparams", "tiny.pdopt", "meta.json"])
def test_explicit_damaged_checkpoint_is_rejected(args, saved, file, epoch):
    data = (saved / file).read_bytes()
    (saved / file).write_bytes(data[:-1] + b"\x01")
    start = saved if epoch is None else saved.parent
    with pytest.raises(UsageError, match=f"^--from-checkpoint {start}: {saved} is unusable: {file}"):
        find(args, start, epoch)
    with pytest.raises(UsageError, match="Tiny: contains no valid checkpoint"):
        find(args, saved.parent, "auto")
    (saved / file).unlink()
    (saved / file).symlink_to("missing")
    with pytest.raises(UsageError, match=f"Tiny/4 is unusable: {file}"):
        find(args, saved if epoch is None else saved.parent, epoch)


def test_folder_without_meta_json_needs_epoch_as_name(args, saved, tmp_path, capsys):
    for name in ("mine", "3_20"):  # 3_20 is a checkpoint inside epoch 3
        shutil.copytree(saved, tmp_path / name)
        (tmp_path / name / "meta.json").unlink()
        with pytest.raises(UsageError, match=f"{name}: has no meta.json, and its name is not an epoch; use"):
            find(args, tmp_path / name, "auto")
    assert find(args, tmp_path / "mine").epoch == 0
    for epoch in ("9", "10"):  # "auto" selects the newest checkpoint
        shutil.copytree(tmp_path / "mine", tmp_path / "theirs" / epoch)
    capsys.readouterr()
    assert find(args, tmp_path / "theirs", "auto").epoch == 11
    warning = "theirs/10: has no meta.json, and therefore no checksums, loader state or best result; training continues"
    assert f"{warning} with epoch 11, its" in capsys.readouterr().err
    args.iter_unit = "batch"
    with pytest.raises(UsageError, match="--iter-unit batch: .*10 has no meta.json, so its number of steps is unknown"):
        find(args, tmp_path / "theirs", "auto")
    capsys.readouterr()
    inside = {"epoch": 4, "step": 2, "steps_each_epoch": 3}
    for folder, meta, epoch, text in (
        (str(tmp_path / "theirs/10"), None, 10, "epoch 10"),
        ("DIR", inside, 4, "epoch 4 after 2 of 3 steps"),
        ("DIR", inside | {"step": None}, 4, "epoch 4"),
        ("DIR", inside | {"epoch": 0, "step": None}, 0, "epoch 0"),
        ("DIR", None, 0, None),
        (None, None, 0, None),
    ):
        assert restore.log_evaluated(folder, meta) == epoch
        assert capsys.readouterr().out == (f"evaluating {folder}: {text}\n" if text else "")
    (tmp_path / "theirs/10/tiny.pdopt").unlink()  # the checkpoints of other programs have two files
    with pytest.raises(UsageError, match="theirs: contains no valid checkpoint"):
        find(args, tmp_path / "theirs", "auto")
    shutil.copytree(saved, tmp_path / "theirs/11")
    (tmp_path / "theirs/11/meta.json").write_text("damaged")
    with pytest.raises(UsageError, match="theirs: contains no valid checkpoint"):
        find(args, tmp_path / "theirs", "auto")


def test_start_deletes_files_of_killed_run(args, tmp_path):
    (tmp_path / "Tiny" / ".7.partial").mkdir(parents=True)
    message = r"another run \(process 1 on x\) is writing its checkpoints"
    with locked(tmp_path / "Tiny/.lock"), pytest.raises(UsageError, match=message):
        Saver(args, None, None, None, {})
    assert (tmp_path / "Tiny" / ".7.partial").exists()
    Saver(args, None, None, None, {})
    assert [path.name for path in (tmp_path / "Tiny").iterdir()] == [".lock"]
    write_checkpoint(tmp_path / "Tiny", "4")
    args.overwrite = True
    Saver(args, None, None, None, {})
    assert [path.name for path in (tmp_path / "Tiny").iterdir()] == [".lock"]


@pytest.mark.parametrize("resumes", [False, True])
def test_only_a_resumed_run_continues_the_record_of_its_checkpoint(args, tmp_path, resumes):
    folder = write_checkpoint(tmp_path / "Tiny", "4", epoch=4, run="r", evaluated=METRICS, evaluations_since_best=3)
    start = restore.StartCheckpoint(str(folder), 5, 0, contents.read_meta(folder), resumes)
    args.resume = resumes  # without --resume, the run continues from the newest checkpoint with --from-checkpoint
    saver = Saver(args, None, None, None, {}, start)
    state = saver.best, saver._run == "r", saver._evaluations_since_best
    assert state == ((METRICS | {"epoch": 4}, True, 3) if resumes else (None, False, 0))
    assert (str(saver.folder), saver._last) == (str(folder), (5, 0))


def test_folder_without_space_is_an_error_at_the_start(args, tmp_path, monkeypatch):
    def fail(dir):
        assert dir == tmp_path / "Tiny"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver_module.tempfile, "TemporaryFile", fail)
    with pytest.raises(UsageError, match=f"--output-dir {tmp_path}: cannot be written .No space left on device.; cho"):
        Saver(args, None, None, None, {})


def test_meta_json_contains_arguments_of_run(args, saved):
    meta = json.loads((saved / "meta.json").read_text())
    assert meta["arguments"]["model_arch_name"] == "Tiny"
    assert meta["arguments"]["run_scope"] == "train_eval"
