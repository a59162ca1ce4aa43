"""Events that --tensorboard-dir writes."""

import shutil
import struct
import subprocess
import sys
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from conftest import ROOT, losses, phase, read_report, strict_json
from paddle_resnet.results import tensorboard as results
from paddle_resnet.utils import logger

pytestmark = pytest.mark.usefixtures("one_block")

tensorboard = pytest.importorskip("tensorboardX")


def events(folder):
    """Return all events in the order in which they were written, except those that TensorBoard discards because a
    resumed run started at an earlier step."""
    from tensorboardX.proto.event_pb2 import Event

    result = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            [length] = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                result = [e for e in result if e.step < event.step]
            result.append(event)
    return result


def scalars(folder):
    """Return the scalar events as {tag: {step: value}}."""
    result = defaultdict(dict)
    for event in events(folder):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                assert event.step not in result[value.tag]
                result[value.tag][event.step] = value.simple_value
    return result


@pytest.fixture
def board(once, run_train):
    """Train two epochs and return (report entries, folder of the events). The run takes place once for all tests."""

    def make(folder):
        places = ["--output-dir", folder / "output", "--report-file", folder / "report.json"]
        flags = ["--epochs", "2", "--print-interval", "1", "--tensorboard-dir", folder / "board"]
        assert run_train(*places, *flags)[0] == 0

    folder = once("board", make)
    return read_report(folder / "report.json"), folder / "board"


def test_scalars_match_report(board):
    report, folder = board
    result = scalars(folder)
    expected = {3 * key[0] + key[1]: v for key, v in losses(report).items() if isinstance(key[1], int)}
    assert result["train/loss"] == pytest.approx(expected)
    assert list(expected) == list(range(6))
    for name, tag in (("train", "train_epoch/loss"), ("val", "val/loss")):
        assert result[tag] == pytest.approx({3 * e + 2: losses(report)[e, name] for e in range(2)})
    assert result["train/lr"][0] == pytest.approx(0.05)
    assert {"train/ips", "train/top1", "train_epoch/ips", "val/top1", "val/ips"} <= result.keys()
    assert all(step in (2, 5) for step in result["val/loss"])


def test_steps_of_entries_and_number_of_pictures():
    calls = []
    board = results._Board.__new__(results._Board)
    board._timeline = SimpleNamespace(batches=lambda epoch: 5 * epoch, batches_before=lambda epoch: 100 * epoch)
    board._first_step = 3
    board._writer = SimpleNamespace(
        add_scalar=lambda *arguments: calls.append(arguments),
        add_text=lambda tag, text, step: calls.append((tag, text, step)),
        add_images=lambda tag, images, step, dataformats: calls.append((tag, len(images), step, dataformats)),
        flush=lambda: calls.append("flush"),
    )
    for step, data, expected in (
        ((2,), {"train.loss": 1.0, "train.step": 4}, [("train_epoch/loss", 1.0, 203), ("train_epoch/step", 4, 203)]),
        ((2,), {"val.loss": 2.0, "val.step": 7}, [("val/loss", 2.0, 206), ("val/step", 7, 206)]),
        ((2,), {"val.loss": 2.0, "lr": 1.0}, [("val/loss", 2.0, 209)]),
        ((2, 5), {"train.loss": 1.0, "val.loss": 2.0, "train.lr": float("inf")}, [("train/loss", 1.0, 205)]),
        ((), {"train.loss": 1.0}, []),
    ):
        board.add(step, data)
        assert calls == expected + ["flush"] * (len(step) == 1)
        calls.clear()
    board.add("PARAMETER", {"lr": 0.5})
    board.show(np.zeros((65, 2, 2, 3)))
    assert calls == [("configuration", "```yaml\n{lr: 0.5}\n```", 3), ("first_batch", 64, 3, "NHWC")]


@pytest.mark.parametrize(
    ("step", "trained", "first"),
    [(3, None, 23), (0, {"loss": 1.0}, 30)],
    ids=["within an epoch", "only the evaluation is pending"],
)
def test_resumed_run_hides_the_events_of_the_steps_that_it_repeats(tmp_path, step, trained, first):
    timeline = SimpleNamespace(batches_before=lambda epoch: 10 * epoch)
    checkpoint = SimpleNamespace(epoch=2, step=10 if trained else 3, trained=trained)
    results.follow(str(tmp_path), SimpleNamespace(step=step), timeline, checkpoint, None)
    logger.close()
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [first]


def test_other_ranks_write_no_events(tmp_path, shard):
    shard(rank=1)
    loader = []
    assert results.follow(tmp_path / "board", loader, None, None, None) is loader
    assert list(tmp_path.iterdir()) == []


def test_loss_scale_is_written_and_non_finite_loss_is_null(run_train, tmp_path, monkeypatch):
    """For a non-finite loss, the report and the checkpoint contain null, and the event files contain no point. The run
    can be resumed from the checkpoint."""
    from paddle_resnet.step import loop

    run = loop.run_and_save
    added = {"loss_scale": 128.0, "loss": float("nan"), "not_finite": 24}
    monkeypatch.setattr(loop, "run_and_save", lambda *args, **more: run(*args, **more) | added)
    flags = ["--tensorboard-dir", tmp_path / "board", "--report-html", tmp_path / "page.html", "--resume"]
    _, report = run_train(*flags)
    assert losses(report)[0, "train"] is losses(report)[0, "val"] is phase(report, [], "val.")["loss"] is None
    meta = strict_json((tmp_path / "output/Tiny/latest/meta.json").read_text())
    assert meta["trained"]["loss"] is meta["evaluated"]["loss"] is meta["best"]["loss"] is None
    assert run_train(*flags, "--epochs", "2")[0] == 0
    result = scalars(tmp_path / "board")
    assert result["train_epoch/loss_scale"] == {2: 128.0, 5: 128.0}
    assert result["train_epoch/not_finite"] == {2: 24, 5: 24}
    assert not {"train_epoch/loss", "val/loss"} & result.keys()
    assert "nan" not in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_first_batch_and_configuration_are_written(board, run_train, tmp_path):
    from PIL import Image

    report, folder = board
    assert losses(run_train("--epochs", "2", "--print-interval", "1")[1]) == losses(report)
    values = {value.tag: value for event in events(folder) for value in event.summary.value}
    (tmp_path / "grid.png").write_bytes(values["first_batch"].image.encoded_image_string)
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    rows = np.split(grid, len(grid) // 32)
    batch = np.stack([tile for row in rows for tile in np.split(row, row.shape[1] // 32, axis=1)])
    # The three channels of the photos have values from 0 to 60, 0 to 60, and 60 to 250.
    low, middle, high = np.sort(batch[:8].mean((1, 2)), axis=1).T
    assert low.min() > 15 and middle.max() < 50 and high.min() > 70
    text = next(value for tag, value in values.items() if tag.startswith("configuration")).tensor.string_val[0].decode()
    assert "model_arch_name: Tiny" in text and "lr: 0.05" in text
    configuration = yaml.safe_load(text.removeprefix("```yaml\n").removesuffix("```"))
    assert list(configuration)[:3] == list(report[0]["data"])[:3]  # in the order of the report


def test_resumed_run_has_each_step_once(board, run_train, stop_before, tmp_path, capsys):
    parts = tmp_path / "parts"
    flags = ["--epochs", "2", "--print-interval", "1", "--tensorboard-dir", parts, "--resume"]
    stop_before(train_step=5)  # stop the run before step 5
    assert run_train(*flags)[0] == 75
    with tensorboard.SummaryWriter(str(parts), filename_suffix=f".{time.time_ns()}") as killed:
        killed.add_scalar("train/loss", 9.0, 5)  # simulate a run that was killed after it had written a checkpoint
    stop_before(eval_step=0)
    assert run_train(*flags)[0] == 75
    stop_before()
    assert run_train(*flags)[0] == 0
    assert len(list(parts.iterdir())) == 4  # file names are unique even if two files are created within one second
    assert "--tensorboard-dir" not in capsys.readouterr().err
    expected, result = scalars(board[1]), scalars(parts)
    for tag in ("train/loss", "train_epoch/loss", "val/loss"):
        assert result[tag] == expected[tag], tag


def test_events_of_different_run_log_a_warning(board, run_train, tmp_path, capsys):
    """test_resumed_run_has_each_step_once checks that the first run in a folder logs no warning."""
    folder = shutil.copytree(board[1], tmp_path / "board")
    assert run_train("--batch-size", "15", "--tensorboard-dir", folder)[0] == 0
    assert f"warning: --tensorboard-dir {folder}: contains events of an earlier run" in capsys.readouterr().err


def test_unwritable_folder_exits_with_code_2(run_train, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_train("--tensorboard-dir", tmp_path / "file/board")[0] == 2
    assert f"--tensorboard-dir {tmp_path}/file/board: cannot be written" in capsys.readouterr().err


def test_full_disk_ends_events_but_not_run(run_train, tmp_path, monkeypatch, capfd):
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *args, **more: real("/dev/full" if "tfevents" in str(path) else path, *args, **more),
    )
    flags = ["--epochs", "6", "--print-interval", "1", "--tensorboard-dir", tmp_path / "board"]
    code, report = run_train(*flags)  # the run writes more events than fit in tensorboardX's queue
    assert code == 0
    assert len(losses(report)) == 6 * 5
    err = capfd.readouterr().err
    assert err.count("can no longer be written (No space left on device), so the run continues without it") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_tensorboardx_is_not_imported_without_flag():
    program = "import gc, os, sys; gc.disable(); import train; from paddle_resnet import phases, program, run_report; "
    program += "print([m for m in ('tensorboardX', 'jinja2', 'paddle_resnet.results') if m in sys.modules], flush=True)"
    program += "; os._exit(0)"  # Paddle's destructors take half a second
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
