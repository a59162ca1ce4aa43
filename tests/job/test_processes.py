"""Ranks and devices."""

import paddle
import pytest

import config
from paddle_resnet import gpus
from paddle_resnet.job import processes
from utils.errors import UsageError


def test_bfloat16_on_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(gpus, "problem", lambda *_: None)
    flags = ["--amp", "--amp-dtype", "bfloat16"]
    for capability, fails in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda _, capability=capability: capability)
        processes.resolve_devices(config.parse_args(["--amp"]))
        if not fails:
            processes.resolve_devices(config.parse_args(flags))
            continue
        with pytest.raises(UsageError, match=r"--amp-dtype bfloat16 .* 8\.0 .* 7\.5: give --amp-dtype float16"):
            processes.resolve_devices(config.parse_args(flags))


def test_place_and_rank_come_from_the_launcher(monkeypatch, parse):
    assert (processes.rank(), processes.world_size(), processes.local_gpu()) == (0, 1, 0)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    monkeypatch.setenv("FLAGS_selected_gpus", "2")
    assert (processes.rank(), processes.world_size(), processes.local_gpu()) == (3, 4, 2)


def test_cpu_refuses_what_only_a_gpu_does(parse):
    for flags in (["--amp"], ["--dali-device", "gpu"], ["--cpu-decoder-load", "0.4"]):
        with pytest.raises(UsageError, match=flags[0]):
            parse(*flags)
    args = parse()
    assert (args.device, args.dali_device) == ("cpu", "cpu")
