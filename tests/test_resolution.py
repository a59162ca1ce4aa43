"""Resolution of flags whose values depend on the machine and the data."""

import multi_label_data
import paddle
import pytest

from conftest import ROOT
from paddle_resnet import config, resolution
from paddle_resnet.machine import gpus
from paddle_resnet.native import build as native
from paddle_resnet.settings import validation
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


def resolve(args):
    resolution.resolve_device(args)
    args.apply(resolution.Loader)


def test_bfloat16_on_old_gpu_is_an_error():
    for capability in ((8, 0), (9, 0)):
        resolution.check_bfloat16(capability)
    with pytest.raises(UsageError, match=r"--amp-dtype bfloat16: .*8\.0.* 7\.5; use --amp-dtype float16"):
        resolution.check_bfloat16((7, 5))


def on_device(device, *flags):
    """Return settings in which --device is resolved, and the flags that the device excludes are dropped."""
    args = config.parse_args([*flags])
    args.resolve("machine", device=device)
    resolution.drop_unused(args)
    return args


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
def test_default_image_channels_depend_on_device_and_layout(device, flags, channels):
    # A GPU may also decode with an explicit --dali-device.
    decoding = "--dali-device gpu" if device == "gpu" else ""
    args = on_device(device, *flags.split(), *decoding.split())
    args.apply(resolution.Loader)
    assert args.image_shape == [channels, args.crop_size, args.crop_size]
    inherited = on_device(device, *flags.split())
    inherited.set("checkpoint d", image_shape=[7 - channels, 32, 32])
    inherited.apply(resolution.Loader)
    assert inherited.image_shape == [7 - channels, 32, 32]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--amp", "--amp: requires a GPU, but this run is on the CPU, which has no float16 kernels; use --amp false"),
        ("--dali-device gpu", "--dali-device gpu: requires a GPU, but this run is on the CPU; use --dali-device cpu"),
    ],
)
def test_flags_that_require_a_gpu_are_errors_on_a_cpu(flags, message):
    with pytest.raises(UsageError, match=message):
        resolve(config.parse_args(["--device", "cpu", *flags.split()]))


RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_for_gpu_is_valid_on_cpu(capsys, path):
    for flags in (["--device", "cpu"], []):
        args = config.parse_args(["--config", str(path), *flags])
        args.resolve("machine", device="cpu")  # the result of --device auto on a machine without a GPU
        resolve(args)
        args.apply(resolution.Kernels)
        validation.check(args)
        assert (args.amp, args.amp_level, args.scale_loss, args.use_pure_fp16) == (False, "O1", 1.0, False)
        assert args.origin("amp") == args.origin("scale_loss") == "default"
        reason = "requires a GPU, but this run is on the CPU, which has no float16 kernels"
        lines = [f"--config {path}: ignoring --amp ({reason})"] if "amp: true" in path.read_text() else []
        loss = next((line.split()[1] for line in path.read_text().splitlines() if line.startswith("scale_loss:")), None)
        names = (f"scale-loss {loss}", "use-dynamic-loss-scaling", "use-pure-fp16")
        lines += [f"--config {path}: ignoring --{name} (requires --amp)" for name in names] if lines else []
        assert capsys.readouterr().out.splitlines() == lines


def test_gpu_uses_all_values_of_recipe():
    args = on_device("gpu", "--config", str(ROOT / "configs/cifar10_30epochs.yaml"))
    args.apply(resolution.Loader)
    assert (args.amp, args.amp_level, args.scale_loss, args.dropped) == (True, "O2", 1024.0, [])


def test_only_rank_0_logs_dropped_values(capsys):
    flags = ["--config", str(ROOT / "configs/digits_cpu.yaml"), "--optimizer", "AdamW", "--device", "cpu"]
    try:
        for rank, expected in (0, 1), (1, 0), (0, 1):
            logger.setup(rank=rank)
            args = config.parse_args(flags)
            resolve(args)
            resolve(args)  # logs nothing again
            line = "configs/digits_cpu.yaml: ignoring --momentum 0.9 (not used by --optimizer AdamW)"
            assert capsys.readouterr().out.count(line) == expected
            assert args.momentum == 0.875
    finally:
        logger.setup()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_images_are_decoded_on_device_of_run(monkeypatch, shard, device):
    shard(0, world_size := 1 if device == "cpu" else 2)
    monkeypatch.setattr(gpus, "resolve", lambda _, gpu, is_job: device if (gpu, is_job) == (0, world_size > 1) else 1)
    for flags, expected in ([], device), (["--dali-device", "cpu"], "cpu"):
        args = config.parse_args(flags)
        resolve(args)
        assert (args.dali_device, args.device) == (expected, device)


@pytest.mark.parametrize(
    ("device", "flags", "kernels", "loads"),
    [
        ("gpu", "--data-layout NHWC", "native", [(9, 2)]),
        ("gpu", "--data-layout NHWC --profile-steps 3:4", "native", [(9, 2)]),  # traced steps are not captured
        ("gpu", "", "paddle", []),
        ("gpu", "--data-layout NCHW", "paddle", []),
        ("cpu", "--data-layout NHWC", "native", [None]),
        ("cpu", "--data-layout NCHW", "paddle", []),
        ("cpu", "--data-layout NHWC --kernels native", "native", [None]),
        ("gpu", "--data-layout NHWC --kernels paddle", "paddle", []),
    ],
)
def test_default_kernels_and_captured_steps_depend_on_device_and_layout(
    monkeypatch, environment, device, flags, kernels, loads
):
    loaded = []
    monkeypatch.setattr(native, "load", loaded.append)
    environment(FLAGS_selected_gpus=2)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda index: (9, index))
    args = on_device(device, *flags.split())
    args.apply(resolution.Kernels)
    assert (args.kernels, loaded) == (kernels, loads)
    assert bool(args.cuda_graph) == (device == "gpu" and kernels == "native" and "profile" not in flags)


@pytest.fixture
def without_compiler(environment, tmp_path):
    """Simulate a machine without a C++ compiler, whose cache contains no custom operators."""
    environment(CXX="nosuch", XDG_CACHE_HOME=tmp_path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("", ("NHWC", "native"), marks=pytest.mark.skipif(native.missing() is not None, reason="compiler")),
        ("--kernels paddle", ("NCHW", "paddle")),
        ("--data-layout NCHW", ("NCHW", "paddle")),
        ("--program-representation pir", ("NHWC", "paddle")),
        ("--program-representation pir --kernels paddle", ("NHWC", "paddle")),
        ("--program-representation pir --data-layout NCHW", ("NCHW", "paddle")),
    ],
)
def test_layout_on_cpu_is_that_of_custom_kernels_or_of_pir_programs(capsys, flags, expected):
    args = config.parse_args(["--device", "cpu", *flags.split()])
    args.apply(resolution.Layout)
    args.apply(resolution.Kernels)
    assert (args.data_layout, args.kernels) == expected
    assert "custom kernels are unavailable" not in capsys.readouterr().out


def test_layout_on_cpu_without_compiler_is_that_of_paddle(without_compiler, capsys):
    args = config.parse_args(["--device", "cpu"])
    args.apply(resolution.Layout)
    args.apply(resolution.Kernels)
    assert (args.data_layout, args.kernels) == ("NCHW", "paddle")
    message = "--kernels auto: custom kernels are unavailable (no C++ compiler (nosuch)); using Paddle's slower kernels"
    assert capsys.readouterr().out.count(message) == 1


def test_unavailable_kernels_are_replaced_unless_explicit(without_compiler, capsys):
    args = on_device("cpu", "--data-layout", "NHWC")
    args.apply(resolution.Kernels)
    assert args.kernels == "paddle"
    assert "--kernels auto: custom kernels are unavailable (no C++ compiler" in capsys.readouterr().out
    for layout, message in (
        ("NHWC", r"--kernels native: no C\+\+ compiler \(nosuch\); fix this problem, or use --kernels paddle"),
        ("NCHW", "--kernels native: supports NHWC only; use --data-layout NHWC or --kernels paddle"),
    ):
        args = on_device("cpu", "--kernels", "native", "--data-layout", layout)
        with pytest.raises(UsageError, match=message):
            args.apply(resolution.Kernels)


def test_classes_are_counted_on_rank_0(monkeypatch):
    monkeypatch.setattr(resolution.exchange, "from_rank_0", lambda count: 7)
    args = config.parse_args(["--image-root", "missing"])
    args.apply(resolution.Classes, Mode.TRAIN)
    assert (args.num_of_class, args.origin("num_of_class")) == (7, "data")


def test_classes_of_images_with_several_labels_are_counted(tmp_path):
    root = multi_label_data.write(tmp_path)
    args = config.parse_args(["--image-root", str(root), "--multi-label"])
    args.apply(resolution.Classes, Mode.TRAIN)
    assert args.num_of_class == len(multi_label_data.CLASSES)


def test_all_flags_are_resolved_and_frozen_once(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/val.txt").write_text("../a 3\n../b 4\n")
    for name in ("a", "b"):
        (tmp_path / name).touch()
    flags = ["--device", "cpu", "--image-root", str(tmp_path / "set"), "--data-format", "filelist", "--allow-outside"]
    flags += ["--label-offset", "3"]
    args = config.parse_args(flags)
    resolved = resolution.resolve(args, Mode.EVAL)
    assert resolution.resolve(args, Mode.TRAIN) is resolution.resolve(resolved, Mode.TRAIN) is resolved
    assert resolved.is_frozen and args.as_dict() == config.parse_args(flags).as_dict()
    args = resolved
    assert (args.num_of_class, args.origin("num_of_class"), args.dali_device, args.kernels) == (
        2,
        "data",
        "cpu",
        "native",
    )
    assert resolution.resolve(config.parse_args([*flags, "--num-of-class", "7"]), Mode.EVAL).num_of_class == 7
    args = config.parse_args(["--data-format", "synthetic"])
    args = resolution.resolve_data(args, Mode.TRAIN)
    assert args.device == gpus.resolve("auto", 0, False)
    assert args.num_of_class == 1000
