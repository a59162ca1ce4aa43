"""Jobs of two and three processes on the CPU. Paddle's launcher starts CPU jobs in the same way as GPU jobs."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

import numpy as np
import paddle
import pytest

from conftest import (
    NHWC,
    ROOT,
    TINY,
    TWO_EPOCHS,
    assert_one_error,
    assert_sparse,
    losses,
    phase,
    read_report,
    wait_until,
)
from paddle_resnet.checkpoints import contents, run_folders
from paddle_resnet.native import build as native

KERNELS = ["paddle", *(["native"] if native.missing() is None else [])]


@pytest.mark.soak
def test_fused_all_reduces_reach_every_gradient(launch, tmp_path):
    """With NHWC, all-reduces are fused on a CPU as on a GPU: each all-reduce reduces a buffer of many gradients. If a
    gradient were written to its buffer too late, the parameters would differ between the ranks or from those of a job
    with one all-reduce per gradient."""
    flags = [*NHWC, "--data-format", "synthetic", "--run-scope", "train_only", "--lr", "0.05", "--batch-size", "12"]
    flags += ["--shares", "--stages", "4"]
    single, (reference, _) = launch(2, *flags, "--unfused")
    for i, kernels in enumerate(KERNELS, 1):
        report, (first, second) = launch(2, *flags, "--kernels", kernels)
        # All gradients are in two buffers, so a step has only two all-reduces.
        assert "2 gradient all-reduces per step" in (tmp_path / f"job{i}/log/workerlog.0").read_text()
        assert losses(report) == pytest.approx(losses(single), rel=1e-3)
        for name in reference.files:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
            if name.startswith("batch_norm") and name.endswith(("w_0", "b_0")):
                initial = float(name.endswith("w_0"))
                changes, expected = first[name] - initial, reference[name] - initial
                largest = np.abs(expected).max()
                assert largest > 1e-5, name
                np.testing.assert_allclose(changes, expected, rtol=0, atol=0.02 * largest, err_msg=name)


@pytest.mark.slow
def test_ranks_are_bit_identical(two_processes):
    report, parameters, _ = two_processes
    assert len(parameters) == 2
    assert parameters[0].files == parameters[1].files
    assert len(parameters[0].files) > 20
    for name in parameters[0].files:
        np.testing.assert_array_equal(parameters[0][name], parameters[1][name], err_msg=name)
    trained, evaluated = phase(report, [1], "train."), phase(report, [1], "val.")
    assert trained["images"] == 2 * (30 // 2 // 4) * 4
    assert evaluated["images"] == 23
    # Like epoch metrics, step metrics cover all processes of the job.
    steps = [phase(report, [1, step], "train.") for step in range(3)]
    assert sum(step["loss"] for step in steps) / 3 == pytest.approx(trained["loss"], rel=1e-12)
    assert sum(step["top1"] for step in steps) / 3 == pytest.approx(trained["top1"], rel=1e-12)
    # With two processes, the learning rate is doubled.
    assert max(e["data"]["train.lr"] for e in report if "train.lr" in e["data"]) == pytest.approx(0.1)


@pytest.mark.soak
def test_processes_evaluate_and_predict_like_single_process(launch, two_processes, run_train, tmp_path):
    report, _, checkpoints = two_processes
    flags = ["--run-scope", "eval_only", "--from-checkpoint", checkpoints / "1", "--predictions"]
    code, alone = run_train(*flags, tmp_path / "one.csv")
    assert code == 0
    together, _ = launch(3, *flags, tmp_path / "job.csv", "--batch-size", "5")
    expected = phase(alone, [], "val.")
    for result in (phase(together, [], "val."), phase(report, [1], "val.")):
        assert result["images"] == 23
        assert [result[name] for name in ("top1", "top5", "loss")] == [
            expected[name] for name in ("top1", "top5", "loss")
        ]
    one, job = ((tmp_path / name).read_text().splitlines() for name in ("one.csv", "job.csv"))
    assert len(job) == 24
    assert job[0] == one[0]
    columns = one[0].split(",")
    for line, job_line in zip(one[1:], job[1:], strict=True):
        for name, value, expected in zip(columns, job_line.split(","), line.split(","), strict=True):
            if name.startswith("probability"):
                assert float(value) == pytest.approx(float(expected), rel=1e-5)
            else:
                assert value == expected, name


def states(folder, processes, epochs):
    """Check that the trained state is bit-identical on all ranks, and return the state at the end of each epoch."""
    epoch_states = []
    for epoch in range(epochs):
        first, *others = (np.load(folder / f"epoch{epoch}_rank{rank}.npz") for rank in range(processes))
        for other in others:
            assert other.files == first.files
            for name in first.files:
                np.testing.assert_array_equal(first[name], other[name], err_msg=f"{name} in epoch {epoch}")
        epoch_states.append(first)
    return epoch_states


SHARES = ["--shares", "--data-format", "synthetic", "--epochs", "2", "--model-arch-name", "Plain"]


@pytest.mark.slow
def test_processes_train_like_single_process_with_larger_batch(launch, tmp_path):
    """The network has no batch normalization, because batch statistics depend on the images of each process."""
    flags = [*SHARES, "--run-scope", "train_only"]
    launch(1, *flags, "--batch-size", "8", "--lr", "0.01")
    launch(2, *flags, "--batch-size", "4", "--lr", "0.005")
    expected, results = states(tmp_path / "job0", 1, 2), states(tmp_path / "job1", 2, 2)
    for single, job in zip(expected, results, strict=True):
        assert single.files == job.files
        for name in single.files:
            error = np.abs(single[name] - job[name]).max()
            assert error <= 1e-5 * np.abs(single[name]).max(), name
    # The parameters change by more than the tolerance, so the comparison detects wrong gradients.
    change = np.abs(expected[0]["conv2d_3.w_0"] - expected[1]["conv2d_3.w_0"]).max()
    assert change > 1e-3 * np.abs(expected[0]["conv2d_3.w_0"]).max()


@pytest.mark.soak
def test_gradient_norm_is_global(launch, tmp_path):
    """Two processes clip gradients like a single process with twice the batch size. The results would differ if each
    process used the norm of its own gradients."""
    flags = [*SHARES, *NHWC, "--run-scope", "train_only", "--epochs", "1"]
    flags += ["--kernels", KERNELS[-1], "--clip-grad-norm", "0.1"]
    launch(1, *flags, "--batch-size", "8", "--lr", "0.5")
    launch(2, *flags, "--batch-size", "4", "--lr", "0.25")
    [one], [two] = states(tmp_path / "job0", 1, 1), states(tmp_path / "job1", 2, 1)
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max(), err_msg=name)


@pytest.mark.soak
def test_processes_accumulate_like_single_process_with_larger_batch(launch, tmp_path):
    """With NHWC, the fused all-reduces must run after the gradients of all batches have been summed."""
    flags = [*SHARES, *NHWC, "--run-scope", "train_only", "--epochs", "1"]
    flags += ["--accumulate-steps", "2", "--clip-grad-norm", "1"]
    launch(1, *flags, "--batch-size", "8", "--lr", "0.02", "--kernels", "paddle")
    [one] = states(tmp_path / "job0", 1, 1)
    for i, kernels in enumerate(KERNELS, 1):
        launch(2, *flags, "--batch-size", "4", "--lr", "0.01", "--kernels", kernels)
        assert "an update every 2" in (tmp_path / f"job{i}/log/workerlog.0").read_text()
        [two] = states(tmp_path / f"job{i}", 2, 1)
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max(), err_msg=name)


# test_amp_and_sparsity.py tests every mask algorithm.
@pytest.mark.soak
def test_masks_are_identical_on_all_ranks_and_constant(launch, tmp_path):
    launch(2, "--batch-size", "4", "--epochs", "2", "--asp", "--prune-model", "--run-scope", "train_only")
    for state in states(tmp_path / "job0", 2, 2):
        assert_sparse(state)


@pytest.mark.soak
@pytest.mark.parametrize("kernels", KERNELS)
def test_overflow_on_one_rank_skips_step_on_all_ranks(launch, tmp_path, kernels):
    """Two of the four steps of an epoch overflow. Each overflow skips the update and halves the loss scale."""
    flags = ["--scaling", "--overflow", "1 2 3", "--batch-size", "6", "--lr", "0.001", "--kernels", kernels]
    flags += NHWC if kernels == "native" else []
    report, _ = launch(2, *SHARES, *flags)
    scales = [phase(report, [epoch], "train.")["loss_scale"] for epoch in range(2)]
    assert scales == [256, 64]
    overflowed = states(tmp_path / "job0", 2, 2)
    assert [float(state["loss_scaling_0"].item()) for state in overflowed] == scales
    assert all(np.isfinite(state[name]).all() for state in overflowed for name in state.files)


@pytest.mark.soak
def test_ema_weights_and_stages_are_identical_on_all_ranks_and_after_resume(launch, tmp_path):
    """The second job resumes inside an epoch, where the processes have different batch normalization statistics."""
    flags = ["--batch-size", "4", "--epochs", "2", "--lr", "0.1", "--ema", "0.9", "--save-interval-steps", "2"]
    flags += ["--keep-checkpoints", "9", "--sizes", "24:0,32:1", "--optimizer", "RAdam", "--lookahead", "2,0.5"]
    launch(2, *flags)
    expected = states(tmp_path / "job0", 2, 2)
    assert {"conv2d_3.w_0.slow", "conv2d_3.w_0.ema", "batch_norm_0.w_1.ema"} <= {*expected[0].files}
    shutil.move(tmp_path / "output", tmp_path / "uninterrupted")
    launch(2, *flags, "--from-checkpoint", tmp_path / "uninterrupted/Tiny/1_2", "--last-epoch-of-checkpoint", "auto")
    for rank in range(2):
        resumed = np.load(tmp_path / f"job1/epoch1_rank{rank}.npz")
        for name in resumed.files:
            np.testing.assert_array_equal(resumed[name], expected[1][name], err_msg=name)


@pytest.mark.soak
def test_evaluation_with_more_processes_than_images(launch, run_train, checkpoint, photos, tmp_path):
    root = tmp_path / "two"
    for i in (0, 1):
        (root / "val" / f"class{i}").mkdir(parents=True)
        shutil.copy(photos / "val" / f"class{i}" / f"0{i}.jpg", root / "val" / f"class{i}")
    flags = ["--image-root", root, "--run-scope", "eval_only", "--from-checkpoint", checkpoint]
    _, alone = run_train(*flags)
    together, _ = launch(3, *flags)
    result, expected = (phase(report, [], "val.") for report in (together, alone))
    assert result["images"] == 2
    assert result["steps"] == 1
    for name in ("loss", "top1", "top5"):
        assert result[name] == expected[name]
    for name in ("report.confusion.csv", "report.classes.csv"):
        assert (tmp_path / "job0" / name).read_text() == (tmp_path / name).read_text()


@pytest.mark.soak
def test_bad_image_on_one_rank_stops_job(launch, photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    name = "val/class0/00.jpg"  # rank 0 reads the first validation images
    (root / name).write_bytes(b"no image")
    start = monotonic()
    flags = ["--image-root", root, "--batch-size", "2", "--dali-prefetch", "1", "--epochs", "2"]
    code, logs = launch(2, *flags, succeeds=False)
    assert monotonic() - start < 120
    assert code == 2
    message = f"{root}/{name}: cannot be decoded (rank 0)"
    assert_one_error(logs[0], [f"error: rank 0: {message}"])
    assert_one_error(logs[1], [f"rank 0 failed first: {message}"])
    assert "Traceback" not in logs[1]
    wait_until(lambda: not processes_with(tmp_path), 10)  # a monitor exits shortly after its rank


STALL = "--comm-timeout-s 8: no progress for 8 s; rank {} is in"
STOPPED = "--comm-timeout-s 8: no progress for 8 s; rank {} stopped by SIGSTOP or a debugger in epoch 1 train"
FAULTS = {
    # Rank 0 waits for rank 1 in C code that holds the GIL, as during a stalled copy to a GPU. No thread of rank 0 can
    # report a position.
    "1 4 hangs,0 4 locks_soon": STALL.format(1)
    + " epoch 1 train, step 0, other ranks are waiting in epoch 1 train, step 1",
}
# Other tests cover these faults (for SIGSTOP, see test_monitor.py; for a killed process of rank 1,
# test_rank_without_gil_reports_failure_of_other_rank; for an exception, test_watchdog.py).
MORE_FAULTS = {
    "1 4 raises": "rank 1 failed first: ZeroDivisionError of the test",
    "0 4 killed": "rank 0 failed first: its process was killed",
    "0 4 stopped": STOPPED.format(0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *(pytest.param(fault, message, id=fault) for fault, message in FAULTS.items()),
        *(pytest.param(fault, message, id=fault, marks=pytest.mark.soak) for fault, message in MORE_FAULTS.items()),
    ],
)
def test_failed_rank_stops_job_and_is_reported(launch, tmp_path, fault, message):
    """The fault happens in the second epoch. The checkpoint of the first epoch remains valid."""
    rank, _, kind = fault.partition(",")[0].split()
    start = monotonic()
    code, logs = launch(
        *(2, "--batch-size", "4", "--epochs", "3", "--run-scope", "train_only", "--comm-timeout-s", "8"),
        *("--fault", fault, "--fault-after", tmp_path / "output/Tiny/latest"),
        succeeds=False,
    )
    assert monotonic() - start < 120
    assert code != 0
    assert_one_error(logs[1 - int(rank)], [message])
    assert "Traceback" not in logs[1 - int(rank)]
    assert ("Traceback" in logs[int(rank)]) == (kind == "raises")
    wait_until(lambda: not processes_with(tmp_path), 10)  # a monitor exits shortly after its rank
    assert (tmp_path / "output/Tiny/latest").resolve().name == "0"
    contents.verify(tmp_path / "output/Tiny/0")


def assert_change_is_reported(logs, message):
    for rank, log in enumerate(logs):
        assert_one_error(log, [f"rank {rank}: parameters and optimizer state: {message} (conv2d_2.w_0"])
        assert "Traceback" not in log


@pytest.mark.soak
def test_changed_bit_on_one_rank_stops_job(launch, tmp_path):
    """The last rank changes one bit of a filter after the first epoch is saved. The next checkpoint is not written."""
    fault = ["--fault", "2 3 flips", "--fault-after", tmp_path / "output/Tiny/latest"]
    code, logs = launch(3, *TWO_EPOCHS, *fault, succeeds=False)
    assert code == 1
    assert_change_is_reported(logs, "differ on rank 2 from all other ranks at the end of epoch 1")
    assert "1" not in {path.name for path in run_folders.finished(tmp_path / "output/Tiny")}


@pytest.mark.soak
def test_job_resumes_after_changed_bit(launch, two_processes, tmp_path):
    """The ranks are compared between two checkpoints. As the message recommends, the same command is then repeated with
    --resume."""
    fault = ["--fault", "1 3 flips", "--fault-after", tmp_path / "output/Tiny/latest"]
    code, logs = launch(2, *TWO_EPOCHS, "--check-interval", "5", *fault, succeeds=False)
    assert code == 1
    assert_change_is_reported(logs, "differ between rank 0 and rank 1 before step 2 of epoch 1")
    assert "and repeat the command with --resume" in logs[0]
    _, parameters = launch(2, *TWO_EPOCHS, "--check-interval", "5", "--resume", "--overwrite", "false")
    for expected, actual in zip(two_processes[1], parameters, strict=True):
        for name in expected.files:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.mark.soak
def test_rank_without_gil_reports_failure_of_other_rank(launch, tmp_path):
    """Rank 0 executes C code that holds the GIL, like a CUDA call that waits for the GPU. Neither threads nor signal
    handlers of rank 0 can run."""
    fault = "0 4 locks,1 4 killed_later"
    code, logs = launch(2, "--batch-size", "4", "--epochs", "3", "--fault", fault, succeeds=False)
    assert code != 0
    assert_one_error(logs[0], ["rank 1 failed first: its process was killed (out of memory?) or crashed in epoch"])
    wait_until(lambda: not processes_with(tmp_path), 10)  # a monitor exits shortly after its rank


FLAGS_AND_VERSIONS = [
    *("--lr is 0.05 on rank 0 and 0.2 on rank 1", "--epochs is 1 on rank 0 and 3 on rank 1"),
    f"Paddle version is {paddle.__version__} on rank 0 and 9.9.9 on rank 1",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "message"),
    [
        pytest.param("1 --lr 0.2 --epochs 3,1 version", FLAGS_AND_VERSIONS, id="flags"),
        # Only rank 1 fails.
        pytest.param("1 --image-root nowhere", ["rank 1 failed first: --image-root nowhere: not a folder"], id="root"),
        pytest.param(
            *("1 --image-root other", ["number of validation images is 23 on rank 0 and 22 on rank 1"]),
            id="images",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_differences_between_ranks_are_errors_before_first_step(launch, photos, tmp_path, differs, message):
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other/val/class0/00.jpg").unlink()
    differs = differs.replace("other", f"{tmp_path}/other")
    code, logs = launch(2, "--differs", differs, succeeds=False)
    assert code == 2
    for log in logs:
        messages = [text.replace("rank 1 failed first: ", "rank 1: ") if log is logs[1] else text for text in message]
        assert_one_error(log, messages)
        assert "epoch 0" not in log


@pytest.mark.soak
def test_processes_stop_if_launcher_is_killed(photos, tmp_path):
    """If the launcher is killed, its processes write a checkpoint and stop, as they do after SIGTERM."""
    places = ["--image-root", photos, "--output-dir", tmp_path / "output", "--report-file", tmp_path / "report.json"]
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", 2, "--log_dir", tmp_path / "log"]
    flags = ["--batch-size", "2", "--epochs", "50", "--print-interval", "1"]
    flags += ["--slow-step", "0.1", "--parameters", tmp_path]
    command = [sys.executable, *launcher, "tests/train_tiny.py", *TINY, *places, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: '"step": [0, 2]' in (tmp_path / "report.json").read_text(), 60)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_with(tmp_path), 60)
    log = (tmp_path / "log/workerlog.0").read_text()
    # The log of rank 0 reports whether rank 0 or another process received the first signal.
    assert re.search(
        r"stopped by (SIGTERM|a signal to another process); continue with the same command and --resume", log
    )
    contents.verify((tmp_path / "output/Tiny/latest").resolve())


@pytest.mark.soak
def test_two_nodes_train_like_one_node_with_two_processes(two_processes, launch_nodes):
    nodes, folder = launch_nodes(*TWO_EPOCHS)
    assert [node.wait(120) for node in nodes] == [0, 0]
    report, parameters, _ = two_processes
    assert losses(read_report(folder / "report.json")) == losses(report)
    for rank, expected in enumerate(parameters):
        result = np.load(folder / f"rank{rank}.npz")
        for name in expected.files:
            np.testing.assert_array_equal(result[name], expected[name], err_msg=name)


@pytest.mark.soak
def test_lost_node_stops_other_node(launch_nodes):
    """The launcher and the process of the first node are killed at the same time, so neither can report the failure.
    The monitor of the first node coordinates the others."""
    flags = ["--epochs", "50", "--batch-size", "4", "--print-interval", "1"]
    nodes, folder = launch_nodes(*flags, "--slow-step", "0.1")
    wait_until(lambda: '"step": [1, 0]' in (folder / "report.json").read_text(), 100)
    children = subprocess.run(["pgrep", "-P", str(nodes[0].pid)], capture_output=True, text=True, check=True)
    for pid in (nodes[0].pid, *map(int, children.stdout.split())):
        os.kill(pid, signal.SIGKILL)
    assert nodes[1].wait(60) != 0
    log = (folder / "log1/workerlog.0").read_text()
    assert_one_error(log, ["rank 0 failed first: its process was killed"])


def processes_with(folder):
    """Return the PIDs of all other processes whose command line or environment contains the folder."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if bytes(folder) in (path / name).read_bytes() and int(path.name) != os.getpid():
                    pids.add(path.name)
    return pids


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_peers_exits_after_timeout(photos, tmp_path, rank):
    """Simulate a job whose other ranks were not started, or whose PADDLE_MASTER is wrong. Without the timeout, Paddle
    would wait for minutes."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_MASTER": f"127.0.0.1:{free[0]}",
        "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{free[1]},127.0.0.1:{free[2]}",
    }
    places = ["--image-root", photos, "--output-dir", tmp_path / "output", "--report-file", tmp_path / "report.json"]
    command = [sys.executable, "tests/train_tiny.py", *TINY, *places, "--comm-timeout-s", "3"]
    start = monotonic()
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert monotonic() - start < 60
    # Rank 0 is blocked in Paddle's native code, which holds the GIL, so the monitor kills rank 0.
    assert done.returncode == (1 if rank else -signal.SIGKILL)
    message = f"--comm-timeout-s 3: not all ranks have connected after 3 s; check PADDLE_MASTER 127.0.0.1:{free[0]} and"
    assert_one_error(done.stderr, [message])
