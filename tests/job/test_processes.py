"""Environment variables that the launcher sets: ranks, devices and addresses."""

import os
import random
import re
import string
import subprocess
import sys

import paddle
import pytest

from conftest import ROOT, assert_one_error
from paddle_resnet.job import processes
from paddle_resnet.utils.errors import UsageError


def test_rank_and_gpu_come_from_launcher_environment(environment, parse):
    assert (processes.rank(), processes.world_size(), processes.local_gpu()) == (0, 1, 0)
    assert processes.local_size() == 1 and processes.is_one_host()
    environment(PADDLE_TRAINER_ID="3")
    environment(PADDLE_TRAINERS_NUM="4")
    environment(FLAGS_selected_gpus="2,3")
    assert (processes.rank(), processes.world_size(), processes.local_gpu()) == (3, 4, 2)


def test_processes_of_a_host_share_its_cores(monkeypatch):
    """Three of six processes run on this host."""
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "6")
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "3")
    for cores, expected in ((8, 2), (3, 1), (2, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert processes.cores() == expected
    assert not processes.is_one_host()
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "6")
    assert processes.is_one_host()


def test_programs_run_on_the_assigned_device(monkeypatch):
    monkeypatch.setenv("FLAGS_selected_gpus", "2,3")
    monkeypatch.setattr(paddle, "CUDAPlace", lambda index: f"GPU {index}")
    assert processes.place("gpu") == "GPU 2"
    assert isinstance(processes.place("cpu"), paddle.CPUPlace)
    processes.check_resolved("cpu")
    with pytest.raises(UsageError, match="--device auto: not resolved yet"):
        processes.check_resolved("auto")


def test_gpu_flags_are_rejected_on_cpu(parse):
    for flags in (["--amp"], ["--dali-device", "gpu"]):
        with pytest.raises(UsageError, match=flags[0]):
            parse(*flags)
    args = parse()
    assert (args.device, args.dali_device) == ("cpu", "cpu")


INVALID = [
    ("PADDLE_TRAINER_ID", "x", "not a number from 0 to 1"),
    ("PADDLE_TRAINER_ID", "2", "not a number from 0 to 1"),
    ("PADDLE_TRAINER_ID", "", "not a number from 0 to 1"),
    ("PADDLE_TRAINER_ID", "-1", "not a number from 0 to 1"),
    ("PADDLE_TRAINERS_NUM", "two", "not a number from 1 to"),
    ("PADDLE_TRAINERS_NUM", "0", "not a number from 1 to"),
    ("PADDLE_TRAINERS_NUM", "99999999999999999999", "not a number from 1 to"),
    ("PADDLE_LOCAL_SIZE", "3", "not a number from 1 to 2"),
    ("PADDLE_LOCAL_SIZE", "1.0", "not a number from 1 to 2"),
    ("FLAGS_selected_gpus", "gpu0", "not a list of GPU numbers such as 0 or 0,1"),
    ("FLAGS_selected_gpus", "0,", "not a list of GPU numbers such as 0 or 0,1"),
    ("PADDLE_MASTER", "127.0.0.1", "not of the form host:port"),
    ("PADDLE_MASTER", "127.0.0.1:65536", "not of the form host:port"),
    ("PADDLE_MASTER", "127.0.0.1:0", "not of the form host:port"),
    ("PADDLE_MASTER", ":80", "not of the form host:port"),
    ("PADDLE_MASTER", "nowhere.invalid:80", "cannot be resolved"),
    ("PADDLE_MASTER", "a..b:80", "cannot be resolved"),
    ("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,x", "not of the form host:port"),
]


@pytest.fixture
def job_of_two(monkeypatch):
    for name, value in {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_MASTER": "127.0.0.1:1234",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1,127.0.0.1:2",
        "FLAGS_selected_gpus": "1",
    }.items():
        monkeypatch.setenv(name, value)


def test_environment_of_launcher_is_valid(job_of_two):
    processes.check_environment()


def test_environment_without_launcher_is_valid(environment):
    processes.check_environment()
    environment(PADDLE_MASTER="127.0.0.1")
    with pytest.raises(UsageError, match=r"^PADDLE_MASTER '127\.0\.0\.1': not of the form host:port; "):
        processes.check_environment()


@pytest.mark.parametrize(("name", "value", "problem"), INVALID)
def test_invalid_launcher_variable_raises_with_remedy(job_of_two, environment, name, value, problem):
    environment(**{name: value})
    remedy = f"(start|set) .*, or unset {name}( for a single process)?$"
    with pytest.raises(UsageError, match=f"^{name} {re.escape(repr(value))}: {problem}.*; {remedy}"):
        processes.check_environment()


@pytest.mark.parametrize("name", ["PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"])
def test_missing_address_variable_raises(job_of_two, environment, name):
    environment(**{name: None})
    with pytest.raises(UsageError, match=f"^PADDLE_TRAINERS_NUM '2': requires {name}, which is not set; start"):
        processes.check_environment()


def test_launcher_may_pass_addresses_in_a_file(job_of_two, environment):
    environment(PADDLE_BACKUP_ENV_PATH="/launcher.json", PADDLE_MASTER=None, PADDLE_TRAINER_ENDPOINTS=None)
    processes.check_environment()


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_endpoints_raises(job_of_two, environment, count):
    value = ",".join(["127.0.0.1:1"] * count)
    environment(PADDLE_TRAINER_ENDPOINTS=value)
    message = f"^PADDLE_TRAINER_ENDPOINTS '{value}': {count} addresses for 2 processes; start"
    with pytest.raises(UsageError, match=message):
        processes.check_environment()


def test_random_values_raise_or_are_usable(job_of_two, monkeypatch):
    """Random values of the variables either cause an error or yield a valid rank and GPU."""
    generator = random.Random(1)
    names = sorted({name for name, _, _ in INVALID})
    for _ in range(2000):
        with monkeypatch.context() as patch:
            alphabet = generator.choice(["0123456789", string.printable, "0123456789.:,-", "\u0663\xb2\udc80"])
            patch.setenv(generator.choice(names), "".join(generator.choices(alphabet, k=generator.randint(0, 8))))
            patch.setattr(processes.socket, "getaddrinfo", lambda *_: None)
            try:
                processes.check_environment()
            except UsageError:
                continue
            assert 0 <= processes.rank() < processes.world_size()
            assert processes.local_gpu() >= 0
            assert processes.is_one_host() in (True, False)


def test_invalid_environment_is_rejected_before_paddle_import():
    """If train.py did not check the environment first, importing Paddle would fail with a traceback."""
    environment = {**os.environ, "PADDLE_TRAINER_ID": "x"}
    command = [sys.executable, "train.py", "--device", "cpu", "--data-format", "synthetic", "--epochs", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert_one_error(done.stderr, ["error: PADDLE_TRAINER_ID 'x': not a number"])
