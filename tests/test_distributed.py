"""Two and three processes on the CPU, started by Paddle's launcher as on GPUs."""

import os
import shutil
import subprocess
import sys
from time import monotonic

import numpy as np
import pytest
from paddle import static

from conftest import ROOT, TINY, phase, read_report
from paddle_resnet import distributed
from utils.errors import UsageError


@pytest.fixture
def launch(photos, tmp_path):
    """Run a job; returns (report entries, [parameters of each rank]), or the ranks' output if it is to fail."""

    def launch(processes, *flags, succeeds=True):
        name = f"job{len(list(tmp_path.glob('job*')))}"
        folder = tmp_path / name
        folder.mkdir()
        places = ["--image-root", photos, "--output-dir", tmp_path / "output", "--report-file", folder / "report.json"]
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", processes, "--log_dir", folder / "log"]
        command = [sys.executable, *launcher, "tests/train_tiny.py", *TINY, *places, *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PARAMETERS": str(folder)}
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        parameters = [np.load(path) for path in sorted(folder.glob("rank*.npz"))]
        if not succeeds:
            assert done.returncode != 0
            return "".join(path.read_text() for path in (folder / "log").glob("workerlog.*"))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return read_report(folder / "report.json"), parameters

    return launch


def test_ranks_agree_bit_for_bit_and_evaluate_like_one_process(launch, run_train, tmp_path):
    report, parameters = launch(2, "--epochs", "2", "--batch-size", "4", "--print-interval", "1")
    assert len(parameters) == 2
    assert parameters[0].files == parameters[1].files
    assert len(parameters[0].files) > 20
    for name in parameters[0].files:
        np.testing.assert_array_equal(parameters[0][name], parameters[1][name], err_msg=name)
    trained, evaluated = phase(report, [1], "train."), phase(report, [1], "val.")
    assert trained["images"] == 2 * (30 // 2 // 4) * 4
    assert evaluated["images"] == 23
    # The job's figures are the job's; what one rank alone has seen is called so.
    assert "train.rank0.loss" in next(e["data"] for e in report if e["step"] == [1, 0])
    # Two processes: twice the learning rate.
    assert max(e["data"]["train.lr"] for e in report if "train.lr" in e["data"]) == pytest.approx(0.1)

    _, alone = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1")
    for processes, batch_size in ((2, 5), (3, 8)):
        flags = ["--from-checkpoint", tmp_path / "output/Tiny/1", "--batch-size", batch_size]
        together, _ = launch(processes, "--run-scope", "eval_only", *flags)
        for result in (phase(together, [], "val."), evaluated):
            assert result["images"] == 23
            assert result["top1"] == phase(alone, [], "val.")["top1"]
            assert result["top5"] == phase(alone, [], "val.")["top5"]
            assert result["loss"] == pytest.approx(phase(alone, [], "val.")["loss"], rel=1e-6)


def test_more_processes_than_validation_images(launch, run_train, photos, tmp_path):
    root = tmp_path / "two"
    for i in (0, 1):
        (root / "val" / f"class{i}").mkdir(parents=True)
        shutil.copy(photos / "val" / f"class{i}" / f"0{i}.jpg", root / "val" / f"class{i}")
    assert run_train("--run-scope", "train_only")[0] == 0
    flags = ["--image-root", root, "--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/0"]
    _, alone = run_train(*flags)
    together, _ = launch(3, *flags)
    result, expected = (phase(report, [], "val.") for report in (together, alone))
    assert result["images"] == 2
    assert result["steps"] == 1
    for name in ("loss", "top1", "top5"):
        assert result[name] == pytest.approx(expected[name], rel=1e-6)
    for name in ("report.confusion.csv", "report.classes.csv"):
        assert (tmp_path / "job0" / name).read_text() == (tmp_path / name).read_text()


@pytest.mark.parametrize(("name", "rank"), [("val/class0/00.jpg", 0), ("val/class2/20.jpg", 1)])
def test_bad_image_of_one_rank_ends_all(launch, photos, tmp_path, name, rank):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    (root / name).write_bytes(b"no image")
    start = monotonic()
    flags = ["--image-root", root, "--batch-size", "2", "--dali-prefetch", "1", "--epochs", "2"]
    output = launch(2, *flags, succeeds=False)
    assert monotonic() - start < 60
    assert f"{root}/{name} cannot be decoded (rank {rank})" in output


def test_fused_all_reduce_waits_for_every_gradient_in_its_buffer():
    """The rewriting alone; that it is needed and suffices is seen on two GPUs in test_gpu.py."""
    main = static.Program()
    block = main.global_block()
    with static.program_guard(main):
        for name in ("a", "b", "a@GRAD", "b@GRAD", "fused"):
            block.create_var(name=name, shape=[2], dtype="float32")
    fused = {"Input": ["a", "b"]}, {"Output": ["a@GRAD", "b@GRAD"], "FusedOutput": ["fused"]}
    block.append_op(type="coalesce_tensor", inputs=fused[0], outputs=fused[1], attrs={"dtype": block.var("a").dtype})
    reduce = {"type": "c_allreduce_sum", "attrs": {"ring_id": 0, "op_role": 1}}
    block.append_op(inputs={"X": "fused"}, outputs={"Out": "fused"}, **reduce)
    block.append_op(inputs={"X": "a@GRAD"}, outputs={"Out": "a@GRAD"}, **reduce)
    distributed._order_fused_all_reduces(block)
    assert [op.type for op in block.ops] == ["coalesce_tensor", "depend", "c_allreduce_sum", "c_allreduce_sum"]
    depend = block.ops[1]
    assert depend.input("X") == depend.output("Out") == ["fused"]
    assert depend.input("Dep") == ["a@GRAD", "b@GRAD"]


def test_all_gather_of_one_process():
    np.testing.assert_array_equal(distributed.all_gather([1, 0.1]), [[1, 0.1]])


def test_place_and_rank_come_from_the_launcher(monkeypatch, parse):
    assert (distributed.rank(), distributed.world_size(), distributed.local_gpu()) == (0, 1, 0)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    monkeypatch.setenv("FLAGS_selected_gpus", "2")
    assert (distributed.rank(), distributed.world_size(), distributed.local_gpu()) == (3, 4, 2)


def test_cpu_refuses_what_only_a_gpu_does(parse):
    for flags in (["--amp"], ["--dali-device", "gpu"]):
        with pytest.raises(UsageError, match=flags[0]):
            parse(*flags)
    args = parse()
    assert (args.device, args.dali_device) == ("cpu", "cpu")


def test_exchanges_of_one_process():
    assert distributed.gather(b"abc") == [b"abc"]
    assert distributed.from_rank_0(lambda: {"a": 1}) == {"a": 1}
    with distributed.leaving_together():
        pass


class Store:
    """Paddle's TCP store in memory, for several ranks in one process."""

    def __init__(self):
        self.values, self.counts = {}, {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("asked", [[0], [1], [0, 1], []])
def test_all_ranks_stop_before_the_same_step(monkeypatch, asked, lead):
    """Rank 1 is up to two steps ahead, as far as it can get; whoever is asked is asked at any of its steps."""
    store = Store()
    monkeypatch.setattr(distributed, "_store", lambda: store)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for moment in range(9):
        store.__init__()
        states = {0: (0, None, False), 1: (0, None, False)}
        stopped, step = {}, {0: 0, 1: 0}
        for tick in range(60):
            for rank in (1, 0):
                if rank in stopped or (rank == 0 and step[0] + lead > tick):
                    continue
                distributed._polls, distributed._stop_at, distributed._has_proposed = states[rank]
                signal = "SIGTERM" if rank in asked and step[rank] >= moment else None
                monkeypatch.setattr(distributed.signals, "received", lambda signal=signal: signal)
                if distributed.stop_agreed():
                    stopped[rank] = step[rank]
                step[rank] += 1
                states[rank] = (distributed._polls, distributed._stop_at, distributed._has_proposed)
        if asked:
            assert stopped[0] == stopped[1]
            assert moment < stopped[0] <= moment + 12
        else:
            assert not stopped
    monkeypatch.setattr(distributed, "_polls", 0)
    monkeypatch.setattr(distributed, "_stop_at", None)
    monkeypatch.setattr(distributed, "_has_proposed", False)
