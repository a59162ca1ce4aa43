"""The start of a job: flags, random numbers, Gloo."""

import os
import random
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import paddle
import pytest

from conftest import ROOT, wait_until
from paddle_resnet.job import fleet
from utils.errors import RunError


@pytest.mark.parametrize(
    ("flags", "is_fused", "is_serial"),
    [
        ({}, False, True),  # oneDNN's gradients are not in the buffer of a fused all-reduce
        ({"data_layout": "NHWC"}, True, True),
        ({"device": "gpu", "cuda_graph": False}, True, False),
        ({"device": "gpu", "cuda_graph": True}, True, True),
        ({"device": "gpu", "cuda_graph": False, "profile_steps": [1, 2]}, True, True),
    ],
    ids=str,
)
def test_the_device_and_the_layout_decide_how_steps_run(parse, monkeypatch, flags, is_fused, is_serial):
    args, found = parse("--seed", "5"), {}
    args = args.copy(**flags)
    monkeypatch.setattr(paddle, "set_flags", found.update)
    monkeypatch.setattr(fleet.fleet, "init", lambda is_collective, strategy: found.update(strategy=strategy))
    fleet.start(args)
    assert found["strategy"].fuse_all_reduce_ops == is_fused
    assert found["FLAGS_new_executor_serial_run"] == is_serial
    drawn = random.random(), np.random.rand()
    assert drawn == (random.Random(5).random(), np.random.RandomState(5).rand())


def test_port_of_the_launcher_that_is_taken_is_named(monkeypatch):
    """Paddle would wait in C code for a server that could not start."""
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:1")
        with pytest.raises(RunError, match=f"PADDLE_TRAINER_ENDPOINTS: port {port} is in use .*; start the job again"):
            fleet._prepare_for_gloo()


def test_port_of_the_launcher_is_held_for_paddles_server(monkeypatch):
    """A connection of another program does not get it meanwhile."""
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:1")
    with fleet._prepare_for_gloo(), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        HTTPServer(("", port), BaseHTTPRequestHandler).server_close()


@pytest.mark.parametrize("delay_s", [0, 1], ids=["at work", "just forked"])
def test_processes_that_paddle_forks_die_with_their_parent(delay_s):
    """The parent is killed at once; the child has asked to die with it by then, or has not got to it."""
    program = (
        f"import os, multiprocessing, time; os.register_at_fork(after_in_child=lambda: time.sleep({delay_s})); "
        "from paddle_resnet.job import fleet; fleet._prepare_for_gloo(); "
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)); "
        "child.start(); print(child.pid, flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "PADDLE_TRAINER_ID": "1"}
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    assert stat.exists()
    parent.kill()
    parent.stdout.close()
    parent.wait()
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", 30)
