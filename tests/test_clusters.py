"""The scripts of docs/clusters.md with two local processes on the CPU, and jobs that resume with a different number of
processes."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import paddle
import pytest
import yaml

from conftest import ROOT, losses, read_report, wait_until
from paddle_resnet import self_test

CPU = ["--device", "cpu", "--kernels", "paddle", "--run-scope", "train_only", "--batch-size", "4"]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="Paddle's launcher would use GPUs"),
]


def flags(folder, *changes):
    """Return the flags of a run that writes its checkpoints to a folder and reads its images from the folder next to
    it."""
    places = ["--image-root", folder.parent / "data", "--output-dir", folder, "--report-file", folder / "report.json"]
    return list(map(str, [*self_test.FLAGS, *CPU, *places, *changes]))


@pytest.fixture
def folder(tmp_path):
    self_test.write_images(tmp_path / "data")
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def free_port(count):
    """Return the first of `count` consecutive free ports."""
    for port in range(15000 + os.getpid() % 15000, 32000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, each in enumerate(sockets):
                each.bind(("127.0.0.1", port + i))
            return port
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise OSError("no free ports")


SRUN = """#!/bin/bash
# Start two tasks, forward SIGTERM to them, and return the highest exit code.
for id in 0 1; do
    SLURM_PROCID=$id SLURM_LOCALID=$id "$@" >>"$LOGS/task$id" 2>&1 &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
highest=0
for task in "${tasks[@]}"; do
    while true; do
        wait "$task"; code=$?
        kill -0 "$task" 2>/dev/null || break
    done
    if [ $code -gt $highest ]; then highest=$code; fi
done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >>"$LOGS/scontrol"; fi
"""


@pytest.fixture
def sbatch(tmp_path):
    """Return a function that starts slurm.sh with simulated Slurm commands."""
    commands, logs = tmp_path / "bin", tmp_path / "logs"
    commands.mkdir()
    logs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}

    def sbatch(*arguments):
        environment = os.environ | slurm | {"PATH": f"{commands}:{os.environ['PATH']}", "LOGS": str(logs)}
        environment |= {"PORT": str(free_port(3))}
        command = ["bash", "docs/clusters/slurm.sh", sys.executable, "train.py", *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment)

    return sbatch


def test_slurm_job_is_requeued_after_a_signal_and_continues(sbatch, folder, tmp_path):
    command = flags(folder, "--resume", "--epochs", "20")
    job = sbatch(*command)
    wait_until((folder / "Net/0").exists, 60)
    tasks = subprocess.run(["pgrep", "-P", str(job.pid), "srun"], capture_output=True, text=True).stdout.split()
    for task in tasks:
        os.kill(int(task), signal.SIGTERM)
    assert job.wait(60) == 75
    assert (tmp_path / "logs/scontrol").read_text() == "requeue 7\n"
    stopped = losses(read_report(folder / "report.json"))
    job = sbatch(*command)
    assert job.wait(100) == 0
    resumed = losses(read_report(folder / "report.json"))
    assert len(resumed) == 20 * 11 and resumed.items() >= stopped.items()
    assert (tmp_path / "logs/scontrol").read_text() == "requeue 7\n"
    assert "continuing with epoch" in (tmp_path / "logs/task0").read_text()


def test_kubernetes_job_trains_with_two_pods(folder, tmp_path):
    _, job = yaml.safe_load_all((ROOT / "docs/clusters/kubernetes.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "train.py"
    environment = os.environ | {variable["name"]: variable["value"] for variable in container["env"]}
    environment |= {"PROCESSES": "1", "MASTER": "localhost", "PORT": str(free_port(1))}
    bash, option, script, name = container["command"]
    script = script.replace("/tmp/log", f"{tmp_path}/log").replace("exec python", f"exec {sys.executable}")
    pods = [
        subprocess.Popen(
            [bash, option, script, name, "train.py", *flags(folder, "--resume")],
            cwd=ROOT,
            env=environment | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in (0, 1)
    ]
    assert [pod.wait(100) for pod in pods] == [0, 0], [path.read_text() for path in tmp_path.glob("log*/workerlog.*")]
    assert len(losses(read_report(folder / "report.json"))) == 22


def train(processes, folder, *changes):
    """Run train.py with a number of processes and the same global batch, and return (exit code, log)."""
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", folder.parent / "log"]
    command = ["train.py", *flags(folder, "--batch-size", 8 // processes, *changes)]
    command = [sys.executable, *(launcher if processes == 2 else []), *command]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=100)
    log = folder.parent / "log/workerlog.0"
    return done.returncode, log.read_text() if processes == 2 else done.stdout + done.stderr


def test_different_number_of_processes_repeats_only_an_interrupted_epoch(folder):
    """The learning rate is so small that the losses show only the images of each batch. A run continues with the
    images of the next epoch; inside an epoch, it starts the epoch again, with the image order of the first epoch."""
    constant = ["--lr", "1e-9", "--resume", "--save-interval-steps", "5", "--keep-checkpoints", "9"]
    one = folder.parent / "one"
    assert train(1, one, *constant)[0] == 0
    expected = losses(read_report(one / "report.json"))
    for name, removed, order, message in (
        ("end_of_epoch", ["1", "1_5"], 1, "but the image order continues"),
        (
            "in_epoch",
            ["1"],
            0,
            "cannot continue inside epoch 1, so the epoch restarts with the checkpoint's parameters",
        ),
    ):
        output = folder.parent / name
        assert train(2, output, *constant)[0] == 0
        for checkpoint in removed:
            shutil.rmtree(output / "Net" / checkpoint)
        code, log = train(1, output, *constant)
        assert code == 0, log
        assert "number of processes is 1 and was 2" in log and message in log
        assert "so the global batch size and the peak learning rate change in proportion" in log
        found = losses(read_report(output / "report.json"))
        steps = range(self_test.STEPS // 2)
        assert [found[1, step] for step in steps] == pytest.approx([expected[order, step] for step in steps], rel=1e-4)
    assert expected[0, 0] != pytest.approx(expected[1, 0], rel=1e-2)
