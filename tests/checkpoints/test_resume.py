"""A resumed run computes exactly the same losses as an uninterrupted run."""

import json
import os
import pickle
import re
import shlex
import shutil

import numpy as np
import pytest
from paddle.incubate.asp.asp import ASPHelper
from paddle.incubate.asp.utils import MaskAlgo

from conftest import NHWC, assert_one_error, losses, phase, read_report
from paddle_resnet import config, train
from paddle_resnet.checkpoints import contents, folders, restore, saver
from paddle_resnet.components import sparsity
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")

STEPS = 3  # steps per epoch: 30 images in batches of 8, without the partial last batch
FLAGS = ["--epochs", "3", "--print-interval", "1", "--warmup-epochs", "1"]


@pytest.fixture
def uninterrupted(once, run_train):
    """Return a function that trains without interruption and returns the losses. Calls with the same flags share one
    run."""

    def uninterrupted(*flags):
        def make(folder):
            code, report = run_train(*FLAGS, *flags, "--output-dir", folder / "output")
            assert code == 0
            (folder / "losses").write_bytes(pickle.dumps(losses(report)))

        return pickle.loads((once(uninterrupted_name(*flags), make) / "losses").read_bytes())

    return uninterrupted


def uninterrupted_name(*flags):
    return "_".join(["uninterrupted_losses", *flags])


@pytest.fixture
def finished(uninterrupted, once, tmp_path):
    """Return the losses of a finished run with FLAGS, whose checkpoints are copied to tmp_path / "output/Tiny"."""
    expected = uninterrupted()
    shutil.copytree(once(uninterrupted_name(), None) / "output", tmp_path / "output", symlinks=True)
    return expected


@pytest.fixture
def one_epoch(checkpoint, tmp_path):
    """Copy the checkpoint of a finished run of one epoch to tmp_path / "output/Tiny/0"."""
    return shutil.copytree(checkpoint, tmp_path / "output/Tiny/0")


@pytest.fixture
def losses_with_stops(run_train, stop_before, tmp_path):
    """Return a function losses_with_stops([(stop, newest)], *flags), which stops and resumes a run several times, and
    returns its losses. The resumed run inherits the flags. `stop` is the argument of stop_before(), counted from the
    previous stop, and `newest` is the name of the newest checkpoint after the stop."""

    def losses_with_stops(stops, *flags):
        result = {}
        for stop, newest in [*stops, ({}, None)]:
            stop_before(**stop)
            code, report = run_train(*FLAGS, *flags, "--resume")
            assert code == (75 if stop else 0)
            flags = ()
            if stop:
                latest = tmp_path / "output/Tiny/latest"
                assert (latest.resolve().name if latest.is_symlink() else None) == newest
            assert not result.keys() & losses(report).keys()  # no step is executed twice
            result |= losses(report)
        return result

    return losses_with_stops


STOPS = [
    ({"train_step": 0}, None),
    ({"train_step": 1}, "0_1"),
    ({"train_step": 3}, "1_1"),
    ({"eval_step": 0}, "1_3"),
    ({"train_step": 0}, "1"),  # the run stops between two epochs, after writing the checkpoint
    ({"train_step": 2}, "2_2"),
]


def test_resumed_losses_equal_uninterrupted_losses(uninterrupted, losses_with_stops):
    """The run stops at each kind of position: before the first step, inside epochs, in an evaluation and between two
    epochs."""
    expected = uninterrupted()
    assert len(expected) == 3 * (STEPS + 2)
    assert losses_with_stops(STOPS) == expected


@pytest.fixture
def few_synthetic_images(monkeypatch):
    """Use synthetic splits of 26 images, because the default splits are as large as ImageNet's."""
    monkeypatch.setattr("paddle_resnet.data.loader.SYNTHETIC_SIZE", dict.fromkeys(_modes(), 26))


# test_dali.py tests the loader state of every format.
MORE_FORMATS = [
    pytest.param(name, marks=pytest.mark.soak) for name in ("tfrecord", "filelist", "lmdb", "webdataset", "synthetic")
]


@pytest.mark.slow
@pytest.mark.parametrize("data_format", ["recordio", *MORE_FORMATS])
@pytest.mark.usefixtures("few_synthetic_images")
def test_every_format_resumes_inside_epoch(losses_with_a_resume, converted, data_format):
    place = {"image_root": converted[data_format]} if data_format != "synthetic" else {}
    expected, actual = losses_with_a_resume("1_1", *FLAGS, "--epochs", "2", "--data-format", data_format, **place)
    assert len(expected) == 2 * (STEPS + 2)
    assert actual == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", [[], [*NHWC, "--kernels", "native", "--image-shape", "4,32,48"]], ids=["paddle", "native"]
)
def test_random_numbers_of_step_are_independent_of_stops(losses_with_a_resume, kernels):
    flags = [*FLAGS, *kernels, "--epochs", "2", "--mixup", "0.4", "--cutmix", "1", "--dropout", "0.4"]
    expected, actual = losses_with_a_resume("1_1", *flags, "--drop-path", "0.5", "--auto-augment", "trivial")
    assert actual == expected


def _modes():
    from paddle_resnet.utils.mode import Mode

    return list(Mode)


@pytest.mark.slow
def test_resume_inherits_recipe_and_sparsity(run_train, uninterrupted, stop_before, tmp_path, capsys):
    flags = ["--asp", "--prune-model", "--weight-decay", "0.01", "--momentum", "0.5", "--label-smoothing", "0.3"]
    flags += ["--bn-weight-decay", "--rand-crop-scale", "0.5,1", "--keep-checkpoints", "1"]
    expected = uninterrupted(*flags)
    stop_before(train_step=4)
    first = losses(run_train(*FLAGS, *flags, "--resume")[1])
    params = pickle.loads((tmp_path / "output/Tiny/1_1/tiny.pdparams").read_bytes())
    masks = {name: array for name, array in params.items() if name.endswith(".asp_mask")}
    stop_before()
    for table in tmp_path.glob("report.*.csv"):  # run_train removes only the report
        table.unlink()
    capsys.readouterr()
    code, report = run_train(*FLAGS, "--resume")
    assert code == 0
    assert first | losses(report) == expected
    output = capsys.readouterr()
    [line] = [line for line in output.out.splitlines() if "/1_1/meta.json: " in line]
    for flag in ("--asp True", "--prune-model True", "--weight-decay 0.01", "--keep-checkpoints 1"):
        assert flag in line
    assert output.err == ""
    params = pickle.loads((tmp_path / "output/Tiny/2/tiny.pdparams").read_bytes())
    assert len(masks) == 3
    for name, mask in masks.items():
        np.testing.assert_array_equal(params[name], mask)


@pytest.mark.slow
def test_checkpoints_inside_epoch_do_not_change_losses(run_train, uninterrupted, tmp_path, capsys):
    expected = uninterrupted()
    code, report = run_train(*FLAGS, "--save-interval-steps", "2", "--keep-checkpoints", "9")
    assert code == 0
    assert losses(report) == expected
    names = sorted(p.name for p in (tmp_path / "output/Tiny").iterdir())
    assert names == [".lock", "0", "0_2", "1", "1_2", "2", "2_2", "best", "latest"]
    flags = ["--from-checkpoint", tmp_path / "output/Tiny/1_2", "--last-epoch-of-checkpoint", "auto"]
    code, report = run_train(*FLAGS, *flags, "--output-dir", tmp_path / "from_1_2")
    assert code == 0
    resumed = losses(report)
    assert resumed == {key: expected[key] for key in resumed}
    assert len(resumed) == 2 * (STEPS + 2) - 2
    for name, position in ("1", "epoch 1\n"), ("1_2", "epoch 1 after 2 of 3 steps\n"):
        capsys.readouterr()
        _, report = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny" / name)
        assert phase(report, [1], "val.")["images"] == 23
        assert f"evaluating {tmp_path}/output/Tiny/{name}: {position}" in capsys.readouterr().out


def test_different_batch_size_restarts_epoch_with_warning(run_train, stop_before, tmp_path, capsys):
    stop_before(train_step=4)
    assert run_train(*FLAGS)[0] == 75
    stop_before()
    capsys.readouterr()
    code, report = run_train(*FLAGS, "--resume", "--batch-size", "6")
    assert code == 0
    stderr = capsys.readouterr().err
    assert "--batch-size is 6 and was 8" in stderr
    assert "cannot continue inside epoch 1, so the epoch restarts with the checkpoint's parameters" in stderr
    assert "trained with different flags: --batch-size 6 (was 8), so the losses will differ" in stderr
    steps = [e["step"] for e in report if len(e["step"]) == 2 and "train.loss" in e["data"]]
    assert steps == [[epoch, step] for epoch in (1, 2) for step in range(5)]
    rates = [e["data"]["train.lr"] for e in report if e["step"] == [1, 0] and "train.lr" in e["data"]]
    assert rates == [0.05]  # peak learning rate, directly after one epoch of warm-up


def test_different_batch_size_in_first_epoch_continues_same_run(run_train, stop_before, tmp_path, capsys):
    stop_before(train_step=1)
    assert run_train(*FLAGS)[0] == 75
    stop_before()
    assert run_train(*FLAGS, "--resume", "--batch-size", "6", "--keep-checkpoints", "1")[0] == 0
    assert "trained with different flags: --batch-size 6 (was 8), so the losses will differ" in capsys.readouterr().err
    assert not (tmp_path / "output/Tiny/0_1").exists()


def test_resume_with_more_epochs_uses_new_schedule(run_train, tmp_path, capsys):
    flags = ["--print-interval", "1", "--resume", "--bn-momentum", "0.3"]
    assert run_train("--epochs", "1", *flags)[0] == 0
    assert capsys.readouterr().err == ""
    code, report = run_train("--epochs", "2", *flags)
    assert code == 0
    assert "trained with different flags: --epochs 2 (was 1), so the losses will differ" in capsys.readouterr().err
    rates = [e["data"]["train.lr"] for e in report if e["step"] == [1, 0] and "train.lr" in e["data"]]
    assert rates == [pytest.approx(0.025)]


def test_failed_evaluation_saves_trained_epoch(run_train, uninterrupted, photos, tmp_path, capsys, monkeypatch):
    expected = uninterrupted()
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    image = root / "val/class2/20.jpg"
    data = image.read_bytes()
    image.write_bytes(b"no image")
    file_in_the_way = tmp_path / "output/Tiny/.0_3.partial"
    file_in_the_way.parent.mkdir(parents=True)
    file_in_the_way.write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(folders, "clean", lambda root: None)  # clean() would remove the file at the start of the run
        assert run_train(*FLAGS, image_root=root)[0] == 2
    output = capsys.readouterr()
    assert f"{image}: cannot be decoded" in output.err
    assert "epoch 0: trained, but not saved: " in output.out + output.err
    assert run_train(*FLAGS, image_root=root)[0] == 2
    output = capsys.readouterr()
    assert f"{image}: cannot be decoded" in output.err
    assert "epoch 0: trained and saved, but not evaluated; repeat the command with --resume" in output.out
    image.write_bytes(data)
    code, report = run_train(*FLAGS, "--resume", image_root=root)
    assert code == 0
    resumed = losses(report)
    assert resumed == {key: expected[key] for key in resumed}
    assert (0, "val") in resumed and (0, 0) not in resumed and (1, 0) in resumed


def test_resumed_run_appends_to_report(run_train, uninterrupted, stop_before, tmp_path, capsys):
    """Stop a run, resume it with each kind of flags, and repeat the command after the run has finished. All processes
    write to the same report."""
    expected = uninterrupted()
    report = tmp_path / "uninterrupted.json"
    start = ["--from-checkpoint", tmp_path / "output/Tiny", "--last-epoch-of-checkpoint", "auto"]
    for stop, code, flags in ((1, 75, ["--resume"]), (3, 75, start), (None, 0, ["--resume"]), (None, 0, ["--resume"])):
        stop_before(train_step=stop)
        capsys.readouterr()
        assert run_train(*FLAGS, *flags, "--report-file", report)[0] == code
    assert "the run is already complete in " in capsys.readouterr().out
    entries = read_report(report)
    assert [entry["step"] for entry in entries].count("PARAMETER") == 3
    assert losses(entries) == expected
    assert phase(entries, [], "val.")["images"] == 23


def test_resume_prefers_own_checkpoint_to_pretrained_params(run_train, stop_before, checkpoint, capsys):
    flags = [*FLAGS, "--resume", "--from-pretrained-params", checkpoint]
    stop_before(train_step=4)
    assert run_train(*flags)[0] == 75
    stop_before()
    capsys.readouterr()
    assert run_train(*flags)[0] == 0
    assert "Tiny/1_1: continuing with epoch 1 step 1" in capsys.readouterr().out


def test_resume_skips_damaged_newest_checkpoint(run_train, finished, tmp_path, capsys):
    path = tmp_path / "output/Tiny/2/tiny.pdopt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    code, report = run_train(*FLAGS, "--resume")
    assert code == 0
    assert (
        "output/Tiny/2: skipped, because it is unusable (tiny.pdopt does not match its sha256"
        in capsys.readouterr().err
    )
    assert losses(report) == {key: value for key, value in finished.items() if key[0] == 2}

    path.write_bytes(data)
    flags = ["--from-checkpoint", tmp_path / "output/Tiny", "--last-epoch-of-checkpoint", "2", "--epochs", "4"]
    code, _ = run_train(*flags)
    assert code == 2
    assert_one_error(capsys.readouterr().err, ["output/Tiny/2 is unusable", "choose a different"])


def test_resume_with_only_damaged_checkpoints_is_rejected(run_train, one_epoch, capsys):
    (one_epoch / "meta.json").write_text("{}")
    assert run_train("--resume")[0] == 2
    assert_one_error(capsys.readouterr().err, ["contains no valid checkpoint", "to start a new run"])


@pytest.mark.slow
def test_run_continues_from_checkpoint_of_nvidia_example(run_train, finished, tmp_path, capsys):
    """NVIDIA's example names the folder after the epoch. The folder contains the two files that paddle.static.save
    writes."""
    old = tmp_path / "old" / "1"
    shutil.copytree(tmp_path / "output/Tiny/1", old)
    (old / "meta.json").unlink()
    capsys.readouterr()
    for number in ("auto", "1"):
        flags = ["--from-checkpoint", tmp_path / "old", "--last-epoch-of-checkpoint", number, "--overwrite"]
        code, report = run_train(*FLAGS, *flags)
        assert code == 0
        stderr = capsys.readouterr().err
        assert "has no meta.json, and therefore no checksums, loader state or best result" in stderr
        steps = [e["step"] for e in report if len(e["step"]) == 2 and "train.lr" in e["data"]]
        assert steps == [[2, step] for step in range(STEPS)]
    resumed = [e["data"]["train.lr"] for e in report if "train.lr" in e["data"]]
    _, report = run_train(*FLAGS, "--overwrite")
    assert resumed == [e["data"]["train.lr"] for e in report if "train.lr" in e["data"]][-STEPS:]
    # If the output folder contains the example's checkpoint, the error message lists the flags that continue from it.
    own = tmp_path / "own/Tiny"
    shutil.copytree(old, own / "1")
    start = ["--from-checkpoint", str(own), "--last-epoch-of-checkpoint", "auto"]
    for flags in ([], ["--resume"]):
        capsys.readouterr()
        assert run_train(*FLAGS, "--output-dir", own.parent, *flags)[0] == 2
        assert_one_error(capsys.readouterr().err, [" ".join(start)])
    files = {path: path.read_bytes() for path in (own / "1").iterdir()}
    assert run_train(*FLAGS, "--output-dir", own.parent, *start, "--resume")[0] == 0
    assert run_train(*FLAGS, "--output-dir", own.parent, "--epochs", "1", "--overwrite")[0] == 0
    assert entries(own) == {"0": "0", "1": "1", "latest": "0", "best": "0"}
    assert {path: path.read_bytes() for path in (own / "1").iterdir()} == files


@pytest.mark.slow
def test_best_epoch_is_saved_and_belongs_to_current_history(run_train, scored, tmp_path, capsys):
    """The checkpoints of epochs 2 and 3 are damaged, so the run repeats these epochs, and the earlier accuracy of epoch
    2 no longer counts. If two epochs are equally good, the first is the best."""
    scored(0.5, 0.5, 0.9, 0.8, 0.7)
    flags = ["--keep-checkpoints", "9", "--save-interval", "2"]
    root = tmp_path / "output/Tiny"
    _, report = run_train("--epochs", "4", *flags)
    assert sorted(path.name for path in root.glob("[0-9]*")) == ["0", "1", "2", "3"]
    assert (phase(report, [], "best.")["epoch"], (root / "best").resolve().name) == (2, "2")
    for name in "23":
        (root / name / "tiny.pdopt").write_bytes(b"")
    code, report = run_train("--epochs", "4", *flags, "--resume", "--eval-interval", "4")
    assert code == 0
    assert "Tiny/3: skipped, because it is unusable (tiny.pdopt has" in capsys.readouterr().err
    assert (phase(report, [], "best.")["epoch"], (root / "best").resolve().name) == (3, "3")
    assert phase(report, [], "best.")["val.top1"] == 0.7
    meta = contents.read_meta(root / "1")
    saved = restore.StartCheckpoint(str(root / "1"), 2, meta=meta, resumes=True)
    assert saver.best_before(root, saved)["epoch"] == 0
    saved = restore.StartCheckpoint(str(root / "1"), 2, meta=meta | {"run": "a different run"}, resumes=True)
    assert saver.best_before(root, saved) is None


@pytest.mark.soak
def test_sparse_checkpoint_of_older_version_keeps_dense_first_layer(run_train, tmp_path, capsys):
    """Older versions stored no mask for the first layer, unlike this version and NVIDIA's example."""
    flags = ["--asp", "--prune-model", *NHWC]
    assert run_train(*flags)[0] == 0
    mask, root = "conv2d_0.w_0.asp_mask", tmp_path / "output/Tiny"
    params = pickle.loads((root / "0/tiny.pdparams").read_bytes())
    assert params[mask].mean() == 0.5
    (root / "0/meta.json").unlink()
    start = ["--from-checkpoint", root / "0", "--last-epoch-of-checkpoint", "auto", "--epochs", "2"]
    for place, density in (("new", 0.5), ("old", 1)):
        if place == "old":
            del params[mask]
        (root / "0/tiny.pdparams").write_bytes(pickle.dumps(params, protocol=4))
        capsys.readouterr()
        assert run_train(*NHWC, "--asp", *start, "--output-dir", tmp_path / place)[0] == 0
        result = pickle.loads((tmp_path / place / "Tiny/1/tiny.pdparams").read_bytes())
        assert result[mask].mean() == density
        assert (f"has no {mask}; the weights of these masks" in capsys.readouterr().out) == (place == "old")


@pytest.mark.slow
def test_masks_of_signed_search_trigger_a_warning(run_train, monkeypatch, capsys):
    """Older versions pruned with Paddle's mask_2d_best, which maximizes the sum of the kept weights."""

    def prune(main_prog, place, _):
        return ASPHelper.prune_model_by_program(place, main_program=main_prog, mask_algo=MaskAlgo.MASK_2D_BEST)

    monkeypatch.setattr(sparsity, "_MIN_BLOCKS", 16)
    flags = ["--asp", "--prune-model", "--mask-algo", "mask_2d_best"]
    with monkeypatch.context() as patch:
        patch.setattr(sparsity, "prune", prune)
        assert run_train(*flags)[0] == 0
    assert "mask_2d_best" not in capsys.readouterr().err
    assert run_train(*flags, "--resume", "--epochs", "2")[0] == 0
    error = capsys.readouterr().err
    assert "its masks are from Paddle's mask_2d_best" in error
    assert "prune the dense weights again with --asp --prune-model" in error
    assert run_train(*flags, "--overwrite")[0] == 0
    assert run_train(*flags, "--resume", "--epochs", "2")[0] == 0
    assert "mask_2d_best" not in capsys.readouterr().err


def test_resume_rejects_different_number_of_classes(run_train, one_epoch, capsys):
    assert run_train("--epochs", "2", "--resume", "--num-of-class", "4")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--resume: ", "has 3 classes, but this run has 4; use --num-of-class 3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [pytest.param("missing", marks=pytest.mark.soak), "wrong target", pytest.param("folder", marks=pytest.mark.soak)],
)
def test_best_is_kept_if_links_are_invalid(run_train, scored, tmp_path, capsys, link):
    """The links are invalid if the run was killed after it wrote a checkpoint but before it updated the links, or if a
    copy of the folder contains the targets instead of the links."""
    scored(0.1, 0.9, 0.2, 0.3, 0.4)
    flags = ["--keep-checkpoints", "2", "--resume"]
    assert run_train("--epochs", "2", *flags)[0] == 0
    root = tmp_path / "output/Tiny"
    for name in ("best", "latest"):
        (root / name).unlink()
        if link == "wrong target":
            (root / name).symlink_to("0")
        elif link == "folder":
            shutil.copytree(root / "1", root / name)
    code, report = run_train("--epochs", "5", *flags)
    assert code == 0
    assert {"1", "3", "4"} == {p.name for p in root.iterdir() if p.name.isdigit()}
    assert json.loads((root / "4/meta.json").read_text())["best"]["epoch"] == 1
    assert report[-1]["data"]["best.epoch"] == 1
    if link == "folder":
        assert "best: cannot be linked to 1 (not a link); remove the existing file" in capsys.readouterr().err
    else:
        assert sorted(path.name for path in root.iterdir()) == [".lock", "1", "3", "4", "best", "latest"]
        assert ((root / "best").resolve().name, (root / "latest").resolve().name) == ("1", "4")
        scored(0.9)
        assert run_train("--run-scope", "eval_only", "--from-checkpoint", root / "best")[0] == 0


def entries(root):
    return {path.name: path.resolve().name for path in root.iterdir() if path.name != ".lock"}


@pytest.mark.slow
def test_earlier_run_is_replaced_only_with_overwrite(run_train, scored, tmp_path, capsys):
    """The best result of the earlier run is also replaced, although the best result of the new run is lower."""
    scored(0.9, 0.2, 0.3, 0.1)
    assert run_train("--epochs", "3")[0] == 0
    root = tmp_path / "output/Tiny"
    before, files = entries(root), {path: path.read_bytes() for path in root.glob("*/meta.json")}
    assert before == {"0": "0", "1": "1", "2": "2", "latest": "2", "best": "0"}
    capsys.readouterr()
    branch = ["--from-checkpoint", root, "--last-epoch-of-checkpoint", "1", "--epochs", "5"]
    for flags in (["--epochs", "1"], ["--dry-run"], ["--from-checkpoint", root / "1"], branch):
        code, report = run_train(*flags)
        assert (code, report) == (2, [])
        message = [f"{root}: contains checkpoints of an earlier run (0, 1, 2)", "--resume", "--output-dir"]
        stderr = capsys.readouterr().err
        assert_one_error(stderr, message)
        # With --overwrite, the run would delete its own start checkpoint.
        assert ("--overwrite" in stderr) == ("--from-checkpoint" not in flags)
    assert run_train("--overwrite", "--dry-run")[0] == 0
    (root / "1/notes.txt").write_text("mine")
    assert {path: path.read_bytes() for path in root.glob("*/meta.json")} == files
    assert run_train("--epochs", "1", "--overwrite")[0] == 0
    output = capsys.readouterr()
    assert f"--overwrite: deleting 0, 1, 2, latest, best in {root}" in output.out
    assert f"{root}/1: not deleted, because it contains files that this program did not write (notes.txt)" in output.err
    assert entries(root) == {"0": "0", "1": "1", "latest": "0", "best": "0"}
    assert entries(root / "1").keys() == {"notes.txt"}
    assert json.loads((root / "0/meta.json").read_text())["best"]["top1"] == 0.1


@pytest.mark.slow
def test_overwrite_keeps_other_files_and_link_targets(run_train, checkpoint, tmp_path):
    root, elsewhere = tmp_path / "output/Tiny", checkpoint.rename(tmp_path / "7")
    files = {path: path.read_bytes() for path in elsewhere.iterdir()}
    (root / "2024").mkdir(parents=True)
    (root / "2024/notes.txt").write_text("mine")
    # The folder 2024 is not a checkpoint, so --overwrite is not required.
    assert run_train("--run-scope", "train_only", "--dry-run")[0] == 0
    (root / "7").symlink_to(elsewhere)
    assert run_train("--epochs", "1", "--run-scope", "train_only", "--overwrite")[0] == 0
    assert not (root / "7").is_symlink()
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == files
    assert (root / "2024/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["1", "best"])
def test_overwrite_rejects_deleting_start_checkpoint(run_train, tmp_path, capsys, place):
    (tmp_path / "output/Tiny/1").mkdir(parents=True)
    (tmp_path / "output/Tiny/1/tiny.pdparams").write_bytes(b"")
    (tmp_path / "output/Tiny/best").symlink_to("1")
    start = tmp_path / "output/Tiny" / place
    with pytest.raises(UsageError, match="--overwrite: would delete --from-checkpoint .*link, which the run needs; "):
        (tmp_path / "link").symlink_to(start)
        saver.check_folder(tmp_path / "output/Tiny", None, {"--from-checkpoint": tmp_path / "link"}, True, False)
    assert run_train("--from-pretrained-params", start, "--overwrite")[0] == 2
    message = [
        f"--overwrite: would delete --from-pretrained-params {start.resolve()}",
        "choose a different --output-dir",
    ]
    assert_one_error(capsys.readouterr().err, message)
    assert (tmp_path / "output/Tiny/1/tiny.pdparams").exists()


def test_check_folder_ignores_unfinished_checkpoints(tmp_path):
    """A new run replaces unfinished checkpoints of a killed run, but not files of another program."""
    root, flags = tmp_path / "Tiny", ({}, False, False)
    (root / "3").mkdir(parents=True)
    (root / "4").mkdir()
    (root / "4/.unfinished").touch()
    (root / "4/tiny.pdparams").touch()
    saver.check_folder(root, None, *flags)
    assert not (root / ".lock").exists()
    (root / "4/.unfinished").unlink()
    message = (
        r"contains checkpoints of another program \(4\); continue from the newest with --from-checkpoint .*Tiny --last"
    )
    with pytest.raises(UsageError, match=message):
        saver.check_folder(root, None, *flags)
    # Checkpoints in the folder are allowed, because the run resumes from one of them.
    saver.check_folder(root, restore.StartCheckpoint(str(root / "4"), 5), *flags)
    with pytest.raises(UsageError, match="another program"):
        saver.check_folder(root, restore.StartCheckpoint(str(root / "4"), 0), *flags)
    (root / "4/meta.json").touch()
    with pytest.raises(UsageError, match="an earlier run"):
        saver.check_folder(root, restore.StartCheckpoint(str(root / "4"), 5), *flags)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a writable folder"):
        saver.check_folder(tmp_path / "file/Tiny", None, *flags)


def test_consecutive_non_finite_losses_stop_run(run_train, tmp_path, capsys):
    code, _ = run_train("--lr", "1e30", "--epochs", "9", "--max-bad-steps", "4")
    assert code == 1
    error = capsys.readouterr().err
    assert_one_error(error, ["--max-bad-steps 4", "4 consecutive losses", "learning rate", "lower --lr"])


def test_class_mismatch_is_warning_in_training_and_error_in_evaluation(run_train, checkpoint, photos, tmp_path, capsys):
    root = tmp_path / "renamed"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "other")
    start = ["--from-checkpoint", checkpoint]
    assert run_train(*start, "--dry-run")[0] == 0
    assert "trained on different classes" not in capsys.readouterr().err
    assert run_train(*start, "--dry-run", image_root=root)[0] == 0
    assert "trained on different classes (label 1 was class1 and is class2)" in capsys.readouterr().err
    assert run_train(*start, "--run-scope", "eval_only", image_root=root)[0] == 2
    assert_one_error(capsys.readouterr().err, [f"{root}: val/other is not one of the 3 classes of the checkpoint"])
    for split in ("train", "val"):  # fine-tuning with a different number of classes is intended
        shutil.copytree(root / split / "class0", root / split / "new")
    flags = ["--num-of-class", "4", "--pretrained-mismatch", "skip-classifier", "--dry-run"]
    assert run_train("--from-pretrained-params", checkpoint, *flags, image_root=root)[0] == 0
    assert "trained on different classes" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("other", "label 1 was class1 and is class2"),
        ("new", "label 3 was unused and is new"),
        ("number", "3 classes, now 4"),
    ],
    ids=["renamed", "added", "added to a list"],
)
def test_resume_with_changed_classes_is_an_error(run_train, photos, request, tmp_path, capsys, name, change):
    """A renamed folder permutes the classes: class2 gets the label of class1."""
    root = shutil.copytree(photos, tmp_path / "root")
    if name == "number":
        for split in ("train", "val"):
            names = sorted(str(path.relative_to(root)) for path in (root / split).glob("*/*"))
            (root / f"{split}.txt").write_text("".join(f"{path} {path.split('class')[1][0]}\n" for path in names))
        assert run_train(image_root=root)[0] == 0
    else:
        request.getfixturevalue("one_epoch")
    for split in ("train", "val"):
        if name == "other":
            (root / split / "class1").rename(root / split / name)
        elif name == "new":
            shutil.copytree(root / split / "class1", root / split / name)
        else:
            with open(root / f"{split}.txt", "a") as f:
                f.write(f"{split}/class1/../class2/{sorted(os.listdir(root / split / 'class2'))[0]} 3\n")
    capsys.readouterr()
    message = f"--resume: {tmp_path}/output/Tiny/0: a resumed run cannot change its classes ({change}); restore the"
    for flags in ([], ["--num-of-class", "4"]):
        assert run_train("--resume", "--epochs", "2", *flags, image_root=root)[0] == 2
        stderr = capsys.readouterr().err
        assert_one_error(stderr, [message])
        assert "use --num-of-class" not in stderr
    [command] = re.findall("`(.*)`", stderr)
    _, script, *arguments = shlex.split(command)
    assert script == "train.py"
    assert {"--batch-size=8", "--lr=0.05", "--epochs=2"} <= {*arguments}
    assert config.parse_args(arguments).from_pretrained_params == f"{tmp_path}/output/Tiny/0"
    if name == "new":
        assert train.main([*arguments, "--dry-run"]) == 0
    else:
        assert train.main(arguments) == 0
        meta = json.loads((tmp_path / "output_fine_tuned/Tiny/1/meta.json").read_text())
        assert meta["arguments"]["num_of_class"] == (3 if name == "other" else 4)


def test_evaluation_uses_labels_of_checkpoint(run_train, checkpoint, photos, tmp_path, capsys):
    """Without the checkpoint, class1 and class2 would have the labels 0 and 1, because class0 and train/ are
    missing."""
    flags = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint]
    predictions = tmp_path / "predictions.csv"
    assert run_train(*flags, "--predictions", predictions)[0] == 0
    columns = [row.split(",")[:5] for row in predictions.read_text().splitlines() if "/class0/" not in row]
    root = tmp_path / "root"
    shutil.copytree(photos / "val", root / "val")
    shutil.rmtree(root / "val/class0")
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    capsys.readouterr()
    assert run_train(*flags, "--predictions", predictions, image_root=root)[0] == 0
    stderr = capsys.readouterr().err
    assert f"--image-root {root}: val has no images for 1 of 3 classes (class0)" in stderr
    assert "different classes" not in stderr
    names = {"class0": "ant", "class1": "bee", "class2": "cat"}
    renamed = [[*row[:3], *(names.get(name, name) for name in row[3:])] for row in columns]
    assert [row.split(",")[:5] for row in predictions.read_text().splitlines()] == renamed
    table = (tmp_path / "report.classes.csv").read_text().splitlines()
    assert [row.split(",")[:3] for row in table[1:]] == [["0", "ant", "0"], ["1", "bee", "8"], ["2", "cat", "7"]]


SIZES = ["--sizes", "24:0,32:1:4:0.5,40:2"]  # batches of 8, 4 and 8 images; 3, 7 and 3 steps


def test_run_with_stages_resumes_in_each_stage(uninterrupted, losses_with_stops):
    """Stop a run between two stages, inside the second stage and inside the last stage."""
    expected = uninterrupted(*SIZES)
    assert expected != uninterrupted()
    stops = [({"train_step": 3}, "0"), ({"train_step": 1}, "1_1"), ({"train_step": 8}, "2_2")]
    assert losses_with_stops(stops, *SIZES) == expected


@pytest.mark.parametrize(
    "kernels",
    [pytest.param([], marks=pytest.mark.soak), [*NHWC, "--kernels", "native"]],
    ids=["paddle", "native"],
)
@pytest.mark.usefixtures("few_synthetic_images")
def test_stages_share_all_variables(run_train, uninterrupted, kernels):
    """Synthetic images are the same in every step, so stages with the same image size train like a run without
    stages."""
    flags = ["--data-format", "synthetic", "--ema", "0.9", "--epochs", "3", "--mixup", "0.2", *kernels]
    flags += ["--lookahead", "2,0.5"]
    assert uninterrupted(*flags, "--sizes", "32:0,32:1,32:2") == uninterrupted(*flags)


@pytest.mark.parametrize("lost", ["summary and page", pytest.param("page", marks=pytest.mark.slow)])
def test_summary_and_page_of_killed_run_are_written_by_resume(run_train, tmp_path, lost):
    """The run is killed after the last checkpoint. In one of the cases, this checkpoint was saved inside an epoch."""
    report, page, other = (tmp_path / name for name in ("own.json", "own.html", "other.json"))
    flags = ["--report-file", report, "--report-html", page]
    flags += [] if lost == "page" else ["--iter-unit", "batch", "--num-iter", "2", "--asp", "--prune-model"]
    assert run_train(*flags)[0] == 0
    *lines, _ = report.read_text().splitlines(keepends=True)
    summary = read_report(report)[-1]
    assert summary["step"] == []
    if lost != "page":
        report.write_text("".join(lines))
        assert summary["data"]["last.step"] == 2 and {"train.loss", "asp.sparse_layers"} <= summary["data"].keys()
    for _ in range(1 if lost == "page" else 2):  # in the second iteration, only the page is missing
        page.unlink(missing_ok=True)
        assert run_train(*flags, "--resume")[0] == 0
        entries = read_report(report)
        assert entries[-1]["data"] == summary["data"] and page.stat().st_size > 10**4
        assert sum(entry["step"] == [] for entry in entries) == 1
    if lost == "page":
        return
    other.write_text("".join(lines).replace(f"{tmp_path}/output", f"{tmp_path}/elsewhere"))  # report of a different run
    before = other.read_bytes()
    assert run_train(*flags, "--resume", "--report-file", other)[0] == 0
    assert other.read_bytes() == before
