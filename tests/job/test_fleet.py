"""The start of a job: flags, random seeds and Gloo."""

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
from paddle_resnet import program
from paddle_resnet.job import fleet
from paddle_resnet.utils.errors import RunError


@pytest.mark.parametrize(
    ("flags", "is_fused", "is_serial"),
    [
        ({}, False, True),  # oneDNN does not write gradients to the buffer of a fused all-reduce
        ({"cuda_graph": False}, False, True),
        ({"data_layout": "NHWC"}, True, True),
        ({"device": "gpu", "cuda_graph": False, "kernels": "paddle"}, True, False),
        ({"device": "gpu", "cuda_graph": True, "kernels": "native"}, True, True),
        ({"device": "gpu", "cuda_graph": False, "profile_steps": [1, 2]}, True, True),
    ],
    ids=str,
)
def test_start_sets_strategy_for_device_and_layout(parse, monkeypatch, flags, is_fused, is_serial):
    args, settings = parse("--seed", "5"), {}
    args = args.copy(**flags)
    monkeypatch.setattr(paddle, "set_flags", settings.update)
    monkeypatch.setattr(fleet.fleet, "init", lambda **options: settings.update(options))
    monkeypatch.setattr(fleet, "set_log_level", lambda level: settings.update(level=level))
    program.start_fleet(args)
    is_gpu = args.device == "gpu"
    assert {name: settings.get(name) for name in fleet.GPU_FLAGS} == {
        name: value if is_gpu else None for name, value in fleet.GPU_FLAGS.items()
    }
    assert settings["level"] == "ERROR" and settings["is_collective"] is True
    assert settings["strategy"].fuse_grad_size_in_num == (10**6 if is_gpu else 32)
    passes = settings["strategy"].build_strategy
    assert not passes.enable_inplace
    assert passes.fuse_bn_add_act_ops == (is_gpu and args.kernels != "native")
    assert settings["strategy"].fuse_all_reduce_ops == is_fused
    assert settings["FLAGS_new_executor_serial_run"] == is_serial
    numbers = random.random(), np.random.rand()
    assert numbers == (random.Random(5).random(), np.random.RandomState(5).rand())


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("gpu", 2), ("cpu", 1)])
def test_only_cpu_jobs_use_gloo(monkeypatch, shard, device, world_size):
    """A GPU job on several hosts reduces gradients in buckets."""
    settings, prepared, init = {}, [], fleet.CollectiveHelper._init_communicator
    shard(world_size=world_size)
    monkeypatch.setattr(paddle, "set_flags", settings.update)
    monkeypatch.setattr(fleet.fleet, "init", lambda is_collective, strategy: settings.update(strategy=strategy))
    monkeypatch.setattr(fleet.compat, "start_gloo", prepared.append)
    monkeypatch.setattr(fleet.CollectiveHelper, "_init_communicator", init)  # restores the function after the test
    fleet.start(0, device, "NHWC", "native", False)
    is_gloo = device == "cpu" and world_size == 2
    assert prepared == ([fleet._prepare_for_gloo] if is_gloo else [])
    assert (fleet.CollectiveHelper._init_communicator is init) != is_gloo
    assert settings["strategy"].fuse_grad_size_in_num == 32


def test_occupied_launcher_port_raises(monkeypatch):
    """If train.py did not check the port, Paddle would wait in C code for a server that cannot start."""
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:1")
        with pytest.raises(RunError, match=f"PADDLE_TRAINER_ENDPOINTS: port {port} is in use .*; start the job again"):
            fleet._prepare_for_gloo()


def test_launcher_port_is_reserved_for_paddle_server(monkeypatch, shard):
    """No other program can bind the port before Paddle's server binds it. Only rank 0 reserves the port."""
    hooks, parents = {}, []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: hooks.update(functions))
    monkeypatch.setattr(fleet.signals, "die_with_parent", parents.append)
    shard(rank=1)
    assert fleet._prepare_for_gloo() is None
    hooks["before"]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # the process ID of the child
        hooks["after_in_child"]()
    assert parents == [os.getpid()]
    shard(rank=0)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:1")
    with fleet._prepare_for_gloo(), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        HTTPServer(("", port), BaseHTTPRequestHandler).server_close()


FORK_TWICE = """
import multiprocessing, os, time

os.register_at_fork(after_in_child=lambda: time.sleep(delay_s))
from paddle_resnet.job import fleet
fleet._prepare_for_gloo()
for delay_s in (0, 1):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    time.sleep(0.3)
    print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_forked_processes_exit_with_parent():
    """The parent is killed after the first child, but before the second child calls prctl(PR_SET_PDEATHSIG)."""
    environment = {**os.environ, "PADDLE_TRAINER_ID": "1"}
    parent = subprocess.Popen([sys.executable, "-c", FORK_TWICE], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    stats = [Path(f"/proc/{int(parent.stdout.readline())}/stat") for _ in range(2)]
    assert all(stat.exists() for stat in stats)
    parent.kill()
    parent.stdout.close()
    parent.wait()
    for stat in stats:
        wait_until(lambda stat=stat: not stat.exists() or stat.read_text().split()[2] == "Z", 30)
