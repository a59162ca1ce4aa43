"""Resolution of flags whose values depend on the machine and the data."""

import paddle
import pytest

import config
from paddle_resnet import resolution
from paddle_resnet.job import processes
from paddle_resnet.machine import gpus
from paddle_resnet.native import build as native
from utils.errors import UsageError


def resolve(args):
    resolution.resolve_device(args)
    resolution.resolve_loader(args)


def test_bfloat16_on_old_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(gpus, "problem", lambda *_: None)
    flags = ["--amp", "--amp-dtype", "bfloat16"]
    for capability, fails in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda _, capability=capability: capability)
        resolve(config.parse_args(["--amp"]))
        if not fails:
            resolve(config.parse_args(flags))
            continue
        with pytest.raises(UsageError, match=r"--amp-dtype bfloat16: .*8\.0.* 7\.5; use --amp-dtype float16"):
            resolve(config.parse_args(flags))


@pytest.mark.parametrize(
    ("device", "flags", "channels"),
    [
        ("gpu", "--data-layout NHWC", 4),
        ("gpu", "", 3),
        ("cpu", "--data-layout NHWC", 3),
        ("cpu", "--image-shape 4,224,224", 4),
        ("gpu", "--data-layout NHWC --image-shape 3,96,96", 3),
        ("gpu", "--data-layout NHWC --crop-size 96", 4),
    ],
)
def test_default_image_channels_depend_on_device_and_layout(monkeypatch, device, flags, channels):
    monkeypatch.setattr(gpus, "resolve", lambda *args: device)
    # A GPU may also decode with an explicit --dali-device, and share the decoding with the CPU.
    decoding = "--dali-device gpu --cpu-decoder-load 0.5" if device == "gpu" else ""
    args = config.parse_args([*flags.split(), *decoding.split()])
    resolve(args)
    assert args.image_shape == [channels, args.crop_size, args.crop_size]


@pytest.mark.parametrize("is_one_host", [True, False])
@pytest.mark.parametrize("flags", ["", "--profile-steps 3:4", "--data-layout NCHW", "--kernels paddle"])
def test_steps_are_captured_with_custom_kernels_on_one_host_unless_they_are_traced(monkeypatch, flags, is_one_host):
    monkeypatch.setattr(gpus, "resolve", lambda *args: "gpu")
    monkeypatch.setattr(native, "load", lambda capability: None)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(processes, "is_one_host", lambda: is_one_host)
    args = config.parse_args(["--data-layout", "NHWC", *flags.split()])
    resolve(args)
    resolution.resolve_kernels(args)
    assert bool(args.cuda_graph) == (is_one_host and not flags)
