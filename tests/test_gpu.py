"""Tests that require a GPU. The tests are skipped on machines without a GPU."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import static

import conftest
from conftest import (
    MASK_ALGORITHMS,
    NHWC,
    ROOT,
    TINY,
    assert_one_error,
    assert_sparse,
    losses,
    need_two_gpus,
    phase,
    read_report,
)
from helpers import epoch, take
from paddle_resnet import budget, dali, export
from paddle_resnet.models.pphgnet_v2 import PPHGNetV2
from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet
from paddle_resnet.serving import image_files, inference, networks
from paddle_resnet.step import cuda_graph
from paddle_resnet.utils.mode import Mode
from workers import Worker, gpu_labels

# A network with four stages contains more kinds of convolutions than one with two stages, so cuDNN uses more
# algorithms.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_stages")]

# The flags in FP32 disable the hardware JPEG decoder. When eight test processes shared a GPU, some loaders could not
# open this decoder and decoded with GPU kernels instead. The two decoders produce slightly different pixels, so runs
# that must be equal would have different results.
FP32 = ["--device", "gpu", "--hw-decoder-load", "0"]
FP32_NHWC = [*FP32, *NHWC]
O1 = [*FP32_NHWC, "--amp", "--scale-loss", "128"]
O1 += ["--use-dynamic-loss-scaling"]
O2 = [*O1, "--use-pure-fp16", "--dali-output-fp16"]
SPARSE = [*O2, "--asp", "--prune-model"]
BF16_O1 = [*FP32_NHWC, "--amp", "--amp-dtype", "bfloat16"]
BF16_O2 = [*BF16_O1, "--amp-level", "O2", "--dali-output-fp16"]
EXACT = {"fp32": FP32, "fp32 NHWC": FP32_NHWC, "O1": O1, "O2": O2, "O2 ASP": SPARSE}
# With Paddle's kernels, the losses of two bfloat16 runs differ from the second step on, even with
# FLAGS_cudnn_deterministic.
KINDS = {**EXACT, "bf16 O1": BF16_O1, "bf16 O2": BF16_O2}
STOPS = {f"{name} inside an epoch": (flags, 4) for name, flags in EXACT.items()}
STOPS |= {"O2 ASP between epochs": (SPARSE, 6), "O2 ASP in the last epoch": (SPARSE, 8)}
RANGER = ["--optimizer", "RAdam", "--lr", "0.01", "--lookahead", "2,0.5"]
STOPS |= {"O2 EMA Ranger inside an epoch": ([*O2, "--ema", "0.9", *RANGER], 4)}


@pytest.mark.parametrize("hardware_load", [0, 0.9])
def test_gpu_loader_images_match_cpu_loader(parse, photos, hardware_load):
    images, labels = [], []
    for device in ("cpu", "gpu"):
        args = parse("--image-root", photos, *FP32, "--dali-device", device, "--hw-decoder-load", hardware_load)
        batches = epoch(dali.build_dataloader(args, Mode.EVAL))
        images.append(np.concatenate(batches[0]))
        labels.append(np.concatenate(batches[1]))
    np.testing.assert_array_equal(labels[0], labels[1])
    # The test images are noisy and store chroma at half resolution. In benchmarks/log/loader_h200.md, the pixels of the
    # two decoders differ by at most 4 of 255 levels. After normalization, one level is 0.017.
    assert np.abs(images[0] - images[1]).mean() < 0.06


def test_gpu_loader_images_are_equal_in_every_format(parse, photos, converted):
    expected = epoch(dali.build_dataloader(parse("--image-root", photos, *FP32), Mode.EVAL))
    for root in converted.values():
        results = epoch(dali.build_dataloader(parse("--image-root", root, *FP32), Mode.EVAL))
        for left, right in zip(expected, results, strict=True):
            for a, b in zip(left, right, strict=True):
                np.testing.assert_array_equal(a, b)


AUGMENTATION = ["--color-jitter", "0.4", "--lighting", "0.1", "--rotate-degrees", "20", "--interp", "triangular"]


@pytest.mark.parametrize(
    "augmentation",
    [AUGMENTATION, ["--auto-augment", "trivial"], ["--crop-padding", "4"]],
    ids=["flags", "trivial", "padding"],
)
def test_gpu_loader_augmentation_matches_cpu_loader(parse, photos, augmentation):
    images, plain = [], None
    for device, flags in (("cpu", augmentation), ("gpu", augmentation), ("cpu", [])):
        args = parse("--image-root", photos, *FP32, "--dali-device", device, *flags)
        images.append(np.concatenate(epoch(dali.build_dataloader(args, Mode.TRAIN))[0]))
    on_cpu, on_gpu, plain = images
    assert np.abs(on_cpu - on_gpu).mean() < 0.1
    assert np.abs(on_cpu - plain).mean() > 0.3


def test_loader_resumes_with_next_batch_on_gpu(parse, photos):
    flags = ["--image-root", photos, *FP32, "--batch-size", "3", *AUGMENTATION, "--auto-augment", "randaug"]
    loader = dali.build_dataloader(parse(*flags), Mode.TRAIN)
    take(loader, 4)
    state = json.loads(json.dumps(loader.state()))
    expected = take(loader, 12)
    resumed = dali.build_dataloader(parse(*flags), Mode.TRAIN, state)
    for left, right in zip(take(resumed, 12), expected, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:300], id="truncated header"),
        pytest.param(lambda data: b"no image", id="garbage"),
    ],
)
def test_undecodable_image_stops_the_run_with_its_path(run_train, photos, tmp_path, capsys, damage):
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    path = sorted((root / "train" / "class1").iterdir())[3]
    path.write_bytes(damage(path.read_bytes()))
    assert run_train(*FP32, "--epochs", "20", image_root=root)[0] == 2
    assert_one_error(capsys.readouterr().err, [str(path), "rank 0", "--skip-list"])


@pytest.mark.parametrize("batch_size", [7, 23, 32])
def test_evaluation_yields_each_image_once(parse, photos, batch_size):
    args = parse("--image-root", photos, *FP32, "--batch-size", batch_size)
    loader = dali.build_dataloader(args, Mode.EVAL)
    for _ in range(2):
        images, labels = epoch(loader)
        assert sum(map(len, labels)) == 23
        assert sorted(np.concatenate(labels)[:, 0].tolist()) == sorted(i % 3 for i in range(23))
        assert len({image.tobytes() for batch in images for image in batch}) == 23


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=pytest.mark.soak if name in ("O2", "bf16 O1") else [])
        for name, flags in KINDS.items()
    ]
    + [pytest.param([*FP32, "--dali-output-fp16"], id="fp16 input")],
)
def test_evaluation_of_checkpoint_matches_training_run(run_train, tmp_path, flags):
    code, report = run_train("--epochs", "2", *flags)
    assert code == 0
    expected = phase(report, [1], "val.")
    assert expected["images"] == 23
    assert np.isfinite(expected["loss"])
    code, report = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1", *flags)
    assert code == 0
    results = phase(report, [], "val.")
    assert results["top1"] == expected["top1"]
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.parametrize("flags", [O2, BF16_O2], ids=["float16", "bfloat16"])
def test_level_o2_has_master_weights_and_float32_checkpoints(run_train, tmp_path, flags):
    assert run_train(*flags)[0] == 0
    params = pickle.loads((tmp_path / "output/Tiny/0/tiny.pdparams").read_bytes())
    assert {array.dtype for array in params.values()} == {np.dtype("float32")}
    optimizer = pickle.loads((tmp_path / "output/Tiny/0/tiny.pdopt").read_bytes())
    assert any(name.endswith("_fp32_master_0") for name in optimizer)
    code, report = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/0", *FP32_NHWC)
    assert code == 0
    assert phase(report, [], "val.")["images"] == 23


@pytest.mark.parametrize("flags", [FP32, FP32_NHWC, O1, O2, BF16_O2], ids=["fp32", "fp32 NHWC", "O1", "O2", "bf16"])
def test_evaluation_with_mirror_images_matches_cpu(run_train, tmp_path, capsys, flags):
    assert run_train(*FP32_NHWC)[0] == 0
    scope = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/0", "--batch-size", "4"]
    images = ["--image-shape", "4,32,32", "--dali-device", "cpu", "--tta", "flip"]
    results = []
    for own in (["--device", "cpu"], flags):
        code, report = run_train(*scope, *own, *images)
        assert code == 0
        results.append(phase(report, [], "val.")["loss"])
    assert results[1] == pytest.approx(results[0], rel=0.01)
    assert "uncaptured step have different results" not in capsys.readouterr().err


@pytest.fixture
def deterministic():
    paddle.set_flags({"FLAGS_cudnn_deterministic": True})
    yield
    paddle.set_flags({"FLAGS_cudnn_deterministic": False})


# These cases are slow tests: test_resume.py covers stops in all epochs on the CPU, and the other sparse runs also
# execute the code of O2.
IN_SOAK = ("fp32 NHWC inside an epoch", "O2 inside an epoch", "O2 ASP in the last epoch")


@pytest.mark.parametrize(
    "flags, step",
    [pytest.param(*stop, id=name, marks=pytest.mark.soak if name in IN_SOAK else []) for name, stop in STOPS.items()],
)
def test_losses_after_stop_match_uninterrupted_run(run_train, losses_with_a_stop, deterministic, flags, step):
    flags = ["--epochs", "3", "--print-interval", "1", "--resume", *flags]
    code, report = run_train(*flags)
    assert code == 0
    expected = losses(report)
    assert len(expected) == 15
    assert losses_with_a_stop(step, *flags) == expected


@pytest.mark.parametrize("data_format", ["recordio"])  # on the CPU, test_resume.py covers all formats
def test_record_format_resumes_inside_an_epoch(run_train, losses_with_a_stop, deterministic, converted, data_format):
    flags = ["--epochs", "2", "--print-interval", "1", "--resume", *FP32]
    root = converted[data_format]
    expected = losses(run_train(*flags, image_root=root)[1])
    assert len(expected) == 10
    assert losses_with_a_stop(4, *flags, image_root=root) == expected


def test_overflows_are_skipped_until_loss_scale_is_low_enough(run_train):
    """The scaled gradients overflow until the loss scale has decreased sufficiently from 2^22."""
    flags = [*O2, "--scale-loss", "4194304", "--epochs", "12", "--max-bad-steps", "1", "--lr", "0.01"]
    code, report = run_train(*flags)
    assert code == 0
    scales = [phase(report, [epoch], "train.")["loss_scale"] for epoch in range(12)]
    assert scales[0] < 4194304
    assert 1 <= scales[-1] == scales[-2]  # the loss scale has stopped decreasing
    assert np.isfinite(phase(report, [11], "val.")["loss"])


@pytest.mark.parametrize("flags", [O1, O2, SPARSE], ids=["O1", "O2", "O2 ASP"])
def test_overflow_steps_leave_parameters_unchanged(run_train, tmp_path, flags):
    """An epoch in which every step overflows must leave the same parameters as an epoch with learning rate 0."""
    results = []
    for name, change in (("overflows", ["--scale-loss", "1e38"]), ("lr 0", ["--lr", "0"])):
        code, report = run_train("--run-scope", "train_only", *flags, *change, "--output-dir", tmp_path / name)
        assert code == 0
        results.append(pickle.loads((tmp_path / name / "Tiny/0/tiny.pdparams").read_bytes()))
        scale = phase(report, [0], "train.")["loss_scale"]
        assert scale == pytest.approx(1e38 / 2**3 if name == "overflows" else 128)
    overflows, unchanged = results
    for name in unchanged:
        if not name.endswith(("w_1", "w_2")):  # skip BN statistics
            np.testing.assert_array_equal(overflows[name], unchanged[name], err_msg=name)


@pytest.mark.parametrize(
    "algorithm, flags",
    [
        pytest.param(algorithm, flags, id=f"{algorithm}-{name}", marks=pytest.mark.soak if is_more else [])
        for algorithm in MASK_ALGORITHMS
        for name, flags, is_more in (("fp32", FP32, algorithm != "mask_1d"), ("O2", O2, algorithm == "mask_2d_best"))
    ],
)
def test_sparse_training_keeps_masks(run_train, tmp_path, algorithm, flags):
    """A run trains for one epoch and is resumed for a second epoch. In both checkpoints, the masks have been applied to
    the weights."""
    for e in range(2):
        pruning = ["--asp", "--prune-model", "--mask-algo", algorithm, "--resume", "--epochs", e + 1]
        assert run_train(*flags, *pruning)[0] == 0
        assert_sparse(pickle.loads((tmp_path / f"output/Tiny/{e}/tiny.pdparams").read_bytes()), algorithm)


# Relative tolerances for the first loss and for later losses. GPUs multiply float32 numbers in TF32, which has a
# precision of 11 bits, like float16.
CLOSE_TO_CPU = {"fp32": (1e-3, 0.02), "fp32 NHWC": (1e-3, 0.02), "O1": (3e-3, 0.03), "O2": (3e-3, 0.03)}
# bfloat16 has a precision of eight bits. The largest observed difference is 0.11.
CLOSE_TO_CPU |= {"bf16 O1": (0.02, 0.15), "bf16 O2": (0.02, 0.15)}


def test_first_losses_match_cpu(run_train, tmp_path):
    """The runs cover all precisions and both kinds of kernels, and start with the same parameters and images."""
    channels = ["--image-shape", "4,32,32"]  # image shape of all NHWC runs
    assert run_train("--run-scope", "train_only", *channels)[0] == 0
    start = [*channels, "--from-pretrained-params", tmp_path / "output/Tiny/0", "--output-dir", tmp_path / "next"]
    start += ["--overwrite"]
    start += ["--lr", "0.01", "--run-scope", "train_only", "--dali-device", "cpu", "--print-interval", "1"]
    on_cpu = losses(run_train(*start)[1])
    assert len(on_cpu) == 4  # losses of three steps, and their mean
    for name, (first, later) in CLOSE_TO_CPU.items():
        for kernels in ("paddle", "native") if "NHWC" in KINDS[name] else ("paddle",):
            code, report = run_train(*start, *KINDS[name], "--kernels", kernels)
            assert code == 0
            results = losses(report)
            print(name, kernels, *(f"{abs(results[step] - loss) / loss:.1e}" for step, loss in on_cpu.items()))
            for step, loss in on_cpu.items():
                assert results[step] == pytest.approx(loss, rel=first if step == (0, 0) else later), (
                    name,
                    kernels,
                    step,
                )


CAPTURED = {name: KINDS[name] for name in ("fp32 NHWC", "O2", "O2 ASP", "bf16 O2")}
CAPTURED |= {"O2 ASP EMA": [*SPARSE, "--ema", "0.9"], "O2 Ranger": [*O2, *RANGER]}
CAPTURED |= {f"O2 {name}": [*O2, "--optimizer", name, "--lr", "0.01"] for name in ("AdamW", "LAMB")}
CAPTURED |= {f"{name} MobileNetV2": [*KINDS[name], "--model-arch-name", "TinyMobile"] for name in ("fp32 NHWC", "O2")}


@pytest.mark.parametrize("flags", CAPTURED.values(), ids=CAPTURED)
def test_captured_steps_match_uncaptured_steps(run_train, deterministic, tmp_path, monkeypatch, flags):
    """Training steps and evaluations between epochs are captured."""

    class Counted(cuda_graph.CUDAGraph):
        def replay(self):
            replays.append(self)
            super().replay()

    monkeypatch.setattr(cuda_graph, "CUDAGraph", Counted)
    results, flags = [], ["--epochs", "2", "--print-interval", "1", *flags, "--kernels", "native"]
    for captured in ("true", "false"):
        replays = []
        code, report = run_train(*flags, "--cuda-graph", captured, "--output-dir", tmp_path / captured)
        assert code == 0
        # The first two of six training steps and the first two of four full evaluation batches are not captured.
        assert len(replays) == (4 + 2 if captured == "true" else 0)
        [saved] = (tmp_path / captured).glob("*/1/*.pdparams")
        results.append((losses(report), pickle.loads(saved.read_bytes())))
    (captured_losses, parameters), (expected, plain) = results
    assert captured_losses == expected
    for name, value in plain.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


class WithDropout(ResNet):
    def forward(self, images):
        return paddle.nn.Dropout(0.1)(super().forward(images))


def test_network_with_nondeterministic_operators_is_not_captured(run_train, register, capsys):
    register("Tiny", partial(WithDropout, BottleneckBlock, (1, 1), width=8))
    flags = [*O2, "--kernels", "native", "--epochs", "2"]
    assert run_train(*flags)[0] == 0
    output = capsys.readouterr().out
    assert "--cuda-graph false: operator dropout draws random numbers from Paddle's generator" in output
    assert "CUDA graph, batch" not in output
    assert run_train(*flags, "--cuda-graph", "true", "--overwrite")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--cuda-graph true: operator dropout"])


def assert_captured_losses_are_equal(run_train, capsys, *flags):
    """Check that the steps of a run are captured, and that its losses equal those of a run without captured steps."""
    code, expected = run_train(*flags, "--cuda-graph", "false")
    assert code == 0
    capsys.readouterr()
    code, report = run_train(*flags, "--cuda-graph", "true", "--overwrite")
    assert code == 0
    assert "CUDA graph, batch" in capsys.readouterr().out
    assert losses(report) == losses(expected)


@pytest.mark.parametrize("flags", [O2, FP32_NHWC], ids=["O2", "fp32"])
def test_captured_steps_draw_random_numbers_of_uncaptured_steps(run_train, deterministic, capsys, flags):
    """The runs use mixup, CutMix and dropout. The check for untested operators must pass."""
    flags = [*flags, "--kernels", "native", "--epochs", "3", "--mixup", "0.4", "--cutmix", "1", "--dropout", "0.3"]
    flags += ["--drop-path", "0.3"]
    assert_captured_losses_are_equal(run_train, capsys, *flags)


@pytest.mark.parametrize("flags", [FP32_NHWC, O1, O2, BF16_O2], ids=["fp32", "O1", "O2", "bf16 O2"])
def test_step_with_teacher_is_captured(run_train, deterministic, tmp_path, capsys, flags):
    """With O2 in float16, the convolutions of the teacher are fused with BN and ReLU."""
    assert run_train(*flags, "--output-dir", tmp_path / "teachers")[0] == 0
    # With the default lr, rounding errors change the loss of the third epoch by more than 10%.
    flags = [*flags, "--kernels", "native", "--epochs", "3", "--lr", "0.01", "--mixup", "0.4", "--sizes", "32:0,48:1"]
    flags += ["--teacher", tmp_path / "teachers/Tiny/0"]
    assert_captured_losses_are_equal(run_train, capsys, *flags)
    flags[flags.index("native")] = "paddle"
    expected = losses(run_train(*flags, "--overwrite")[1])
    flags[flags.index("paddle")] = "native"
    assert losses(run_train(*flags, "--overwrite")[1]) == pytest.approx(expected, rel=0.05)


STAGES = ["--sizes", "32:0,48:1", "--accumulate-steps", "2", "--freeze", "stem", "--unfreeze-at", "1"]


@pytest.mark.parametrize("flags", [FP32_NHWC, O2, BF16_O2, [*O2, *STAGES]], ids=["fp32", "O2", "bf16", "O2 stages"])
def test_budget_measurement_does_not_change_losses(run_train, deterministic, tmp_path, monkeypatch, flags):
    monkeypatch.setattr(budget, "epochs_within", lambda *_: 2)
    at = TINY.index("--epochs")
    monkeypatch.setattr(conftest, "TINY", [*TINY[:at], *TINY[at + 2 :]])
    results = []
    for length in (["--budget-minutes", "0.1"], ["--epochs", "2"]):
        code, report = run_train(*flags, *length, "--print-interval", "1", "--output-dir", tmp_path / length[0])
        assert code == 0
        results.append(losses(report))
    assert results[0] == results[1] and (1, "val") in results[0]


def test_each_stage_has_its_own_captured_step(run_train, deterministic):
    flags = [*O2, "--kernels", "native", "--epochs", "4", "--sizes", "32:0,48:2", "--mixup", "0.4"]
    code, expected = run_train(*flags, "--cuda-graph", "false")
    assert code == 0
    code, report = run_train(*flags, "--cuda-graph", "true", "--overwrite")
    assert code == 0
    assert losses(report) == losses(expected)


@pytest.mark.parametrize("flags", [FP32_NHWC, O1, O2, BF16_O1, BF16_O2], ids=["fp32", "O1", "O2", "bf16 O1", "bf16 O2"])
@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile"])
@pytest.mark.parametrize("layers", ["all-but-classifier", "stages.1,blocks.0"])
def test_frozen_and_unfrozen_phase_are_captured(run_train, deterministic, tmp_path, capsys, flags, arch, layers):
    """Gradients flow through frozen layers in the middle of the network."""
    layers = layers.split(",")[arch == "TinyMobile" and "," in layers]
    flags = [*flags, "--kernels", "native", "--model-arch-name", arch, "--freeze", layers, "--unfreeze-at", "2"]
    flags += [
        "--epochs",
        "4",
        "--keep-checkpoints",
        "4",
        "--ema",
        "0.9",
        "--lr-decay-by-layer",
        "0.5",
        "--classifier-lr-factor",
        "2",
    ]
    code, expected = run_train(*flags, "--cuda-graph", "false", "--output-dir", tmp_path / "uncaptured")
    assert code == 0
    before, after = (
        pickle.loads((tmp_path / f"uncaptured/{arch}/{epoch}/tiny.pdparams").read_bytes()) for epoch in (0, 1)
    )
    frozen = [name for name in before if (before[name] == after[name]).all()]
    assert len(frozen) >= 10
    capsys.readouterr()
    code, report = run_train(*flags, "--cuda-graph", "true")
    assert code == 0
    assert "CUDA graph, batch" in capsys.readouterr().out
    assert losses(report) == losses(expected)


@pytest.mark.parametrize("train_step", [4, 6, 7])
def test_losses_after_stop_in_either_phase_match_uninterrupted_run(
    run_train, losses_with_a_stop, deterministic, train_step
):
    flags = [*O2, "--kernels", "native", "--epochs", "4", "--print-interval", "1", "--resume"]
    flags += ["--freeze", "all-but-classifier", "--unfreeze-at", "2", "--optimizer", "AdamW", "--lr", "0.001"]
    code, report = run_train(*flags)
    assert code == 0
    assert losses_with_a_stop(train_step, *flags) == losses(report)


def test_accumulating_steps_are_captured(run_train, deterministic, capsys):
    """Float16 gradients are summed in float32."""
    flags = [*O2, "--kernels", "native", "--epochs", "5", "--print-interval", "1", "--accumulate-steps", "2"]
    assert_captured_losses_are_equal(run_train, capsys, *flags)


@pytest.mark.parametrize("flags", [FP32_NHWC, O1, O2, BF16_O1, BF16_O2], ids=["fp32", "O1", "O2", "bf16 O1", "bf16 O2"])
def test_quantization_aware_training_is_captured_in_every_precision(run_train, deterministic, capsys, flags):
    flags = ["--qat", "--epochs", "3", "--print-interval", "1", *flags, "--kernels", "native"]
    assert_captured_losses_are_equal(run_train, capsys, *flags)


@pytest.mark.parametrize("flags", [FP32_NHWC, O1, O2, BF16_O2], ids=["fp32", "O1", "O2", "bf16 O2"])
def test_mish_and_self_attention_are_captured_in_every_precision(run_train, deterministic, register, capsys, flags):
    options = {"stem": "deep", "shortcut_pool": "max-blur", "se": True, "self_attention": True}
    network = partial(ResNet, BottleneckBlock, (1, 1, 1, 1), width=8, activation="mish", **options)
    register("Tiny", network)
    assert_captured_losses_are_equal(run_train, capsys, "--epochs", "3", *flags, "--kernels", "native")


@pytest.mark.parametrize("frozen", [[], ["--freeze", "blocks.0"]], ids=["", "frozen block"])
@pytest.mark.parametrize("flags", [FP32_NHWC, O1, O2, BF16_O1, BF16_O2], ids=["fp32", "O1", "O2", "bf16 O1", "bf16 O2"])
def test_affine_layers_are_captured_in_every_precision(run_train, deterministic, register, capsys, flags, frozen):
    """Gradients pass through the layers of the frozen block."""
    register("Tiny", partial(PPHGNetV2, stages=((8, 16, 1, False, False, 3), (8, 64, 2, True, True, 5))))
    flags = ["--epochs", "3", "--lr", "0.01", "--print-interval", "1", *flags, "--kernels", "native", *frozen]
    assert_captured_losses_are_equal(run_train, capsys, *flags)


@pytest.mark.parametrize("flags, tolerance", [(FP32_NHWC, 1e-4), (O1, 5e-3), (O2, 5e-3)], ids=["fp32", "O1", "O2"])
def test_affine_layers_have_similar_losses_with_native_and_paddle_kernels(
    run_train, deterministic, register, capsys, flags, tolerance
):
    """Like test_native_and_paddle_kernels_have_similar_losses, for a network with affine layers and without depthwise
    convolutions."""
    register("Tiny", partial(PPHGNetV2, stages=((8, 16, 1, False, False, 3),)))
    results = {}
    for kernels in ("native", "paddle"):
        choice = ["--kernels", kernels, "--print-interval", "1", "--lr", "0.01", "--epochs", "2", "--overwrite"]
        code, report = run_train("--run-scope", "train_only", *flags, *choice)
        assert code == 0
        # 5 layers in the stem, 5 in the block, and the last one
        assert ("11 native_affine, 11 native_affine_backward" in capsys.readouterr().out) == (kernels == "native")
        results[kernels] = losses(report)
    for step, loss in results["paddle"].items():
        assert results["native"][step] == pytest.approx(loss, rel=tolerance if step == (0, 0) else 0.1), step


# Paddle's operators that networks apply in half precision: {name: function of a batch x [4, 5, 6, 16] in NHWC and a
# factor for each image and channel, [4, 1, 1, 16]}
OPERATORS = {
    "relu": lambda x, factors: F.relu(x),
    "relu6": lambda x, factors: F.relu6(x),
    "hard_sigmoid": lambda x, factors: F.hardsigmoid(x),
    "hard_swish": lambda x, factors: F.hardswish(x),
    "mish": lambda x, factors: F.mish(x),
    "product": lambda x, factors: x * factors,
    "sum": lambda x, factors: x + factors,
    "quotient": lambda x, factors: x / (factors + 8),
    "mean": lambda x, factors: x - paddle.mean(x, axis=[1, 2], keepdim=True) * factors,
    "concatenation": lambda x, factors: paddle.concat([x, x * 2], axis=3)[:, :, :, 8:24],
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_operators_in_half_precision_match_cpu(name, dtype):
    """The inputs are exact in all types. Regression test: sigmoid had a wrong gradient in float16."""
    random, results = np.random.RandomState(0), []
    shapes = {"x": (4, 5, 6, 16), "factors": (4, 1, 1, 16), "dy": (4, 5, 6, 16)}
    feed = {name: random.randint(-31, 32, shape).astype("float32") / 8 + 1 / 16 for name, shape in shapes.items()}
    for place, precision in ((paddle.CPUPlace(), "float32"), (paddle.CUDAPlace(0), dtype)):
        main = static.Program()
        with static.program_guard(main, static.Program()):
            x, factors, dy = (static.data(name, shape) for name, shape in shapes.items())
            x.stop_gradient = factors.stop_gradient = False
            y = OPERATORS[name](x.astype(precision), factors.astype(precision)).astype("float32")
            inputs = [x, factors] if name in ("product", "sum", "quotient", "mean") else [x]
            outputs = [y, *static.gradients([y * dy], inputs)]
        results.append(static.Executor(place).run(main, feed, outputs))
    for expected, result in zip(*results, strict=True):
        tolerance = 2**-6 if dtype == "bfloat16" else 2**-9
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_graph_replay_writes_only_to_allocated_memory(run_train, monkeypatch):
    """Regression test: graph replays wrote to freed cuDNN workspaces. Replays must not change memory that is free after
    the capture."""

    class Watched(cuda_graph.CUDAGraph):
        def replay(self):
            if not hasattr(self, "known"):
                sizes = [2**20] * 32 + [2**n for n in range(19, 7, -1) for _ in range(8)]
                self.known = [known_bytes(size) for size in sizes]
                graphs.append(self)
            super().replay()
            paddle.device.cuda.synchronize()
            assert all((np.array(tensor) == 0x5A).all() for tensor in self.known)

    def known_bytes(size):
        tensor = paddle.framework.core.LoDTensor()
        tensor.set(np.full(size, 0x5A, np.uint8), paddle.CUDAPlace(0))
        return tensor

    graphs = []
    monkeypatch.setattr(cuda_graph, "CUDAGraph", Watched)
    assert run_train(*O2, "--epochs", "2", "--kernels", "native")[0] == 0
    assert len(graphs) == 2  # one graph for training, one for evaluation


def test_processes_with_captured_steps_exit_cleanly(photos, tmp_path):
    """At exit, graphs are freed before variables, so no variable may use memory that a graph owns. In an earlier
    version, variables used such memory, and three of five processes crashed at exit."""
    flags = [*TINY, *O2, "--image-root", photos, "--batch-size", "5", "--epochs", "2", "--kernels", "native"]
    flags += ["--stages", "4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            list(map(str, [sys.executable, "tests/train_tiny.py", *flags, "--output-dir", tmp_path / str(i)])),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(4)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output[-3000:]
        assert "captures: 2" in output


@pytest.mark.parametrize(("kernels", "captured"), [("native", "true"), ("native", "false"), ("paddle", "false")])
def test_evaluation_is_bit_identical_when_repeated(run_train, kernels, captured):
    """The host runs ahead of the GPU, so a new batch must not overwrite a batch that the GPU has not read yet."""
    flags = ["--run-scope", "eval_only", "--benchmark", "--benchmark-steps", "60", "--benchmark-warmup-steps", "2"]
    results = []
    for _ in range(2):
        code, report = run_train(*flags, *O2, "--kernels", kernels, "--cuda-graph", captured)
        assert code == 0
        results.append(phase(report, [], "val.")["loss"])
    assert np.isfinite(results[0])
    assert results[0] == results[1]


def test_batches_are_not_overwritten_before_gpu_has_copied_them(parse, photos):
    """The copy of a batch waits for all pending GPU work, while DALI continues with the next batches."""
    flags = [*O2, "--image-shape", "4,224,224", "--crop-size", "224", "--resize-short", "256"]
    args = parse("--image-root", photos, *flags)
    work = static.Program()
    with static.program_guard(work):
        x = paddle.full([4096, 4096], 2.0**-12)
        for _ in range(100):
            x = paddle.matmul(x, x)
    exe, results, is_ahead = static.Executor(paddle.CUDAPlace(0)), [], False
    for is_busy in (False, True):
        loader, kept = dali.build_dataloader(args, Mode.EVAL), []
        for _ in range(3):
            for _ in range(len(loader)):
                if is_busy:
                    exe.run(work, fetch_list=[])
                    work_done = paddle.device.cuda.Event()
                    work_done.record()
                [batch] = next(loader)
                is_ahead |= is_busy and not work_done.query()
                kept.append(batch["data"] if is_busy else np.array(batch["data"]))
            loader.reset()
        paddle.device.cuda.synchronize()
        results.append(list(map(np.array, kept)))
    assert len(results[0]) == 9
    assert is_ahead  # the copies of some batches were still pending
    for expected, images in zip(*results, strict=True):
        np.testing.assert_array_equal(images, expected)


@pytest.mark.parametrize("scope", ["train_only", "eval_only"])
@pytest.mark.parametrize("source", ["folder", "synthetic"])
def test_benchmark_reports_memory_and_versions(run_train, scope, source):
    flags = ["--benchmark", "--benchmark-steps", "7", "--benchmark-warmup-steps", "2", "--data-format", source]
    code, report = run_train("--run-scope", scope, *flags, *O2)
    assert code == 0
    result = phase(report, [], "train." if scope == "train_only" else "val.")
    assert result["steps"] == 7
    assert result["peak_memory_allocated_mib"] > 0
    versions = report[-1]["data"]["versions"]
    assert versions["cuda"] and versions["cudnn"] and versions["gpu"] and "driver" in versions


def test_trace_contains_kernels(run_train, tmp_path):
    flags = ["--benchmark", "--benchmark-steps", "7", "--benchmark-warmup-steps", "2", "--profile-steps", "4:6"]
    assert run_train("--run-scope", "train_only", *flags, *O2)[0] == 0
    trace = json.loads((tmp_path / "output/profile/steps_4_6_rank0.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in trace}
    assert {"Kernel", "Operator", "ProfileStep"} <= kinds, kinds


FUSED = {
    "native": (
        "13 native_bn_act, 13 native_bn_act_backward, 4 native_bn_add_relu, 4 native_bn_add_relu_backward, "
        "1 native_check_finite, 1 native_image_sums, 1 native_loss, 1 native_loss_grad, 1 native_max_pool, "
        "1 native_max_pool_backward, "
    ),
    # Paddle fuses the last BN of each residual unit with the addition and ReLU, and each BN that a ReLU follows with
    # this ReLU. It does not fuse the BNs of the projections.
    "paddle": (
        "9 fused_batch_norm_act, 9 fused_batch_norm_act_grad, 4 fused_bn_add_activation, 4 fused_bn_add_activation_grad"
    ),
}


@pytest.mark.parametrize("kernels", FUSED)
@pytest.mark.parametrize("flags", [O1, O2], ids=["O1", "O2"])
def test_start_line_counts_fused_operators(run_train, capsys, flags, kernels):
    assert run_train("--dry-run", *flags, "--kernels", kernels)[0] == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Tiny on 1 x gpu"))
    assert FUSED[kernels] in line
    updates = 2 if flags is O2 else 1  # with and without master weights
    assert (f"{updates} native_momentum" in line) == (kernels == "native")
    assert (", CUDA graph, " in line) == (kernels == "native")


@pytest.mark.parametrize("flags, tolerance", [(FP32_NHWC, 1e-4), (O1, 5e-3), (O2, 5e-3)], ids=["fp32", "O1", "O2"])
def test_native_and_paddle_kernels_have_similar_losses(run_train, deterministic, flags, tolerance):
    """The first losses are computed from identical parameters. Later losses diverge because of rounding errors."""
    results = {}
    for kernels in ("native", "paddle"):
        choice = ["--kernels", kernels, "--print-interval", "1", "--lr", "0.01", "--epochs", "2", "--overwrite"]
        code, report = run_train("--run-scope", "train_only", *flags, *choice)
        assert code == 0
        results[kernels] = losses(report)
    for step, loss in results["paddle"].items():
        relative = tolerance if step == (0, 0) else 0.1
        assert results["native"][step] == pytest.approx(loss, rel=relative), step


PADDLE_KERNELS = {
    f"{name}, Paddle kernels": [*flags, "--kernels", "paddle"] for name, flags in KINDS.items() if "NHWC" in flags
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a function that runs tests/train_tiny.py in two processes on two GPUs, and returns "ok" or the error. The
    processes import Paddle only once."""
    need_two_gpus()
    workers = []

    def pair(arguments):
        if not workers or workers[-1].has_ended:
            folder = tmp_path_factory.mktemp("pair") / "worker"
            program = ["tests/train_tiny.py", "--tasks", folder, "--stages", "4"]
            workers.append(Worker(folder, program, "gpu", 2, FLAGS_cudnn_deterministic="1"))
            assert workers[-1].answer(120) == "ok"
        workers[-1].ask([*map(str, arguments)])
        result = workers[-1].answer(120)
        if result != "ok":
            workers[-1].kill()  # the other process may wait for the one that failed
        return result

    yield pair
    for worker in workers:
        worker.kill()


@pytest.fixture
def two_gpus(pair, photos, tmp_path):
    """Return a function that runs a job on two GPUs and returns its report entries, or [log of each rank] if the job
    has a fault. Runs that change the trainer or its environment are separate jobs; the others share two processes."""

    def two_gpus(*flags, fault=None, gpus=2, environment=None):
        (tmp_path / "log").mkdir(exist_ok=True)
        places = ["--image-root", photos, "--output-dir", tmp_path, "--report-file", tmp_path / "report.json"]
        places += ["--batch-size", "5", "--overwrite", "--parameters", tmp_path, "--stages", "4"]
        arguments = [*TINY, *places, *flags]
        if not fault and gpus == 2 and "--shares" not in flags:
            result = pair(arguments)
            assert result == "ok", result + (tmp_path / "log/workerlog.0").read_text()[-3000:]
            return read_report(tmp_path / "report.json")
        launcher = ["-m", "paddle.distributed.launch", "--gpus", ",".join(gpu_labels(gpus))]
        launcher += ["--log_dir", tmp_path / "log"]
        arguments += ["--fault", fault] if fault else []
        command = [sys.executable, *launcher, "tests/train_tiny.py", *arguments]
        environment = os.environ | {"FLAGS_cudnn_deterministic": "1"} | (environment or {})
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
        )
        if fault:
            assert done.returncode != 0
            return [(tmp_path / f"log/workerlog.{rank}").read_text() for rank in range(2)]
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return read_report(tmp_path / "report.json")

    return two_gpus


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("1 4 raises", "rank 1 failed first: ZeroDivisionError"),
        ("1 4 killed", "rank 1 failed first: its process was killed"),
        ("1 4 hangs", "--comm-timeout-s 60: no progress for 60 s; rank 1 is in epoch 1 train, step"),
    ],
    ids=["raises", "killed", "hangs"],
)
def test_failed_rank_stops_job_on_two_gpus(two_gpus, fault, message):
    """Without the monitor, rank 0 would wait forever for NCCL in a CUDA graph."""
    logs = two_gpus("--epochs", "3", "--comm-timeout-s", "60", *O2, fault=fault)
    assert_one_error(logs[0], [message])


@pytest.mark.parametrize("flags", [FP32_NHWC, O2, BF16_O2], ids=["fp32 NHWC", "O2", "bf16 O2"])
def test_changed_bit_on_one_of_two_gpus_stops_job(two_gpus, flags):
    """The bit changes between two replays of the captured step. In half precision, the bit belongs to the master
    weight, because the next update overwrites the half-precision copy."""
    name = "conv2d_2.w_0" if flags is FP32_NHWC else "conv2d_2.w_0_fp32_master_0"
    flags = [*flags, "--run-scope", "train_only", "--epochs", "4", "--save-interval", "4", "--check-interval", "7"]
    for log in two_gpus(*flags, "--flipped", name, fault="1 5 flips"):
        assert_one_error(log, ["state: differ between rank 0 and rank 1 before step 1 of epoch 2 (", name])


@pytest.mark.parametrize("flags", [*KINDS.values(), *PADDLE_KERNELS.values()], ids=[*KINDS, *PADDLE_KERNELS])
def test_two_gpus_have_identical_parameters(two_gpus, tmp_path, flags):
    two_gpus(*flags)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("flags", [FP32_NHWC, SPARSE], ids=["fp32 NHWC", "O2 ASP"])
def test_two_gpus_captured_steps_match_uncaptured_steps(two_gpus, tmp_path, flags):
    """The graphs include the all-reduces. One graph is captured for all training steps, and one for all evaluation
    steps."""
    results = []
    for captured in ("true", "false"):
        report = two_gpus(*flags, "--epochs", "4", "--print-interval", "1", "--cuda-graph", captured)
        captures = re.findall(r"^captures: (\d+)$", (tmp_path / "log/workerlog.0").read_text(), re.MULTILINE)
        # The second job appends to the log of the first job.
        assert captures[-1] == ("2" if captured == "true" else "0")
        results.append((losses(report), dict(np.load(tmp_path / "rank1.npz"))))
    (captured_losses, parameters), (expected, plain) = results
    assert captured_losses == expected
    for name, value in plain.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


@pytest.mark.parametrize("flags", [FP32_NHWC, O2], ids=["fp32 NHWC", "O2"])
def test_two_hosts_with_one_gpu_each_match_one_host(launch_nodes, two_gpus, tmp_path, environment, flags):
    """On several hosts, gradient all-reduces overlap with the backward pass. The sum over two ranks does not depend on
    how the gradients are grouped, so the results are those of one host, bit for bit."""
    environment(FLAGS_cudnn_deterministic="1")
    flags = [*flags, "--epochs", "3", "--print-interval", "1"]
    expected = losses(two_gpus(*flags))
    nodes, folder = launch_nodes(*flags, "--batch-size", "5", "--stages", "4", on_gpus=True)
    assert [node.wait(200) for node in nodes] == [0, 0]
    assert "CUDA graph" in (folder / "log0/workerlog.0").read_text()
    assert losses(read_report(folder / "report.json")) == expected
    for rank in range(2):
        for name, value in np.load(tmp_path / f"rank{rank}.npz").items():
            np.testing.assert_array_equal(np.load(folder / f"rank{rank}.npz")[name], value, err_msg=name)


@pytest.mark.parametrize("kernels", ["native", "paddle"])
def test_first_residual_unit_trains_after_a_frozen_stem(run_train, register, kernels):
    """The first unit of ResNet18 adds the output of the stem, which needs no gradient if the stem is frozen. Paddle's
    fused operators for additions and BN need it."""
    register("Tiny", partial(ResNet, BasicBlock, (1,), width=8))
    code, report = run_train(*O2, "--freeze", "stem", "--kernels", kernels, "--epochs", "2")
    assert code == 0
    assert np.isfinite(phase(report, [1], "train.")["loss"])


class UnevenlyPadded(ResNet):
    """A network in which the gradient of a convolution that is padded only at the bottom and right is added to another
    gradient."""

    def __init__(self, *args, **flags):
        super().__init__(*args, **flags)
        weight = paddle.ParamAttr(name="before")
        self.before = paddle.nn.Conv2D(4, 8, 3, padding=1, data_format="NHWC", weight_attr=weight)
        self.uneven = paddle.nn.Conv2D(8, 8, 2, padding="SAME", data_format="NHWC")
        self.after = paddle.nn.Conv2D(8, 4, 1, data_format="NHWC")

    def forward(self, images):
        x = self.before(images)
        return super().forward(self.after(F.relu(self.uneven(x)) + F.relu(x)))


@pytest.mark.parametrize("kernels", ["native", "paddle"])
def test_gradients_of_unevenly_padded_convolutions_match_cpu(run_train, deterministic, register, tmp_path, kernels):
    """The sum of gradients is that of the layer `before`, so its filters show wrong gradients."""
    register("Tiny", partial(UnevenlyPadded, BottleneckBlock, (1,), width=8))
    flags = [*NHWC, "--dali-device", "cpu", "--kernels", kernels, "--epochs", "1", "--lr", "0.01"]

    def filters(name, *more):
        code, _ = run_train(*flags, "--output-dir", tmp_path / name, *more)
        assert code == 0
        return pickle.loads((tmp_path / name / "Tiny/0/tiny.pdparams").read_bytes())["before"]

    start = filters("start")  # the initial weights of a GPU differ from those of a CPU
    weights = ["--from-pretrained-params", tmp_path / "start/Tiny/0"]
    on_cpu = filters("cpu", *weights)
    first, second = (filters(name, "--device", "gpu", *weights) for name in ("first", "second"))
    np.testing.assert_array_equal(first, second)
    assert np.linalg.norm(first - on_cpu) < 0.1 * np.linalg.norm(on_cpu - start)


TWO_GPU_FLAGS = ["--shares", "--data-format", "synthetic", "--epochs", "2"]


def test_two_gpus_match_one_with_twice_the_batch_without_bn(two_gpus, tmp_path):
    """The network has no batch normalization, because batch statistics are computed per process. TF32 is disabled."""
    results, environment = [], {"NVIDIA_TF32_OVERRIDE": "0"}
    for gpus, batch_size, rate in ((1, 24, 0.002), (2, 12, 0.001)):
        flags = [*FP32, *TWO_GPU_FLAGS, "--model-arch-name", "Plain", "--batch-size", batch_size, "--lr", rate]
        two_gpus(*flags, gpus=gpus, environment=environment)
        results.append([dict(np.load(tmp_path / f"epoch{e}_rank0.npz")) for e in range(2)])
    for one, two in zip(*results, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max(), err_msg=name)
    # Check that the parameters change by more than 1 %, because otherwise the comparison would accept wrong gradients.
    before, after = (one["linear_0.w_0"] for one in results[0])
    assert np.abs(after - before).max() > 0.01 * np.abs(after).max()


@pytest.mark.parametrize("kernels", ["native", "paddle"])
def test_two_gpus_approximate_one_with_twice_the_batch_with_bn(two_gpus, kernels):
    """Batch statistics are computed over 24 images on one GPU, but over 12 on each of two GPUs. The network runs in
    half precision."""
    results = []
    for gpus, batch_size, rate in ((1, 24, 0.02), (2, 12, 0.01)):
        flags = [*O2, *TWO_GPU_FLAGS, "--kernels", kernels, "--batch-size", batch_size, "--lr", rate, "--epochs", "8"]
        report = two_gpus(*flags, gpus=gpus)
        results.append([losses(report)[epoch, "train"] for epoch in range(8)])
    print(*results)
    one, two = results
    assert two == pytest.approx(one, rel=0.05)
    assert one[-1] < one[0] - 0.2


@pytest.mark.parametrize("algorithm", MASK_ALGORITHMS)
def test_two_gpus_keep_sparsity_masks(two_gpus, tmp_path, algorithm):
    two_gpus(*SPARSE, "--mask-algo", algorithm, "--epochs", "2")
    for e in range(2):
        for rank in range(2):
            assert_sparse(np.load(tmp_path / f"epoch{e}_rank{rank}.npz"), algorithm)


RESUMED = {
    "fp32": FP32,
    "O2 ASP": SPARSE,
    "O2 sizes": [*O2, "--sizes", "32:0,48:1"],
    "O2 frozen until epoch 1": [*O2, "--freeze", "stem,stages.0", "--unfreeze-at", "1"],
    "O2 accumulation": [*O2, "--accumulate-steps", "2", "--batch-size", "2"],
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_two_gpus_resume_bit_identically_inside_an_epoch(two_gpus, tmp_path, flags):
    flags = ["--epochs", "3", "--print-interval", "1", "--save-interval-steps", "2", "--keep-checkpoints", "9", *flags]
    expected = losses(two_gpus(*flags))
    batches = 4 if "--accumulate-steps" in flags else 2  # before the first checkpoint of an epoch
    start = ["--from-checkpoint", tmp_path / f"Tiny/1_{batches}", "--last-epoch-of-checkpoint", "auto"]
    resumed = losses(two_gpus(*flags, *start, "--output-dir", tmp_path / "resumed"))
    assert resumed == {key: expected[key] for key in resumed}
    assert {(1, batches), (1, "train"), (1, "val"), (2, "val")} <= set(resumed)


@pytest.mark.parametrize("flags", [FP32_NHWC, O2], ids=["fp32", "O2"])
def test_class_weights_and_balanced_sampling_are_captured(run_train, deterministic, tmp_path, capsys, flags):
    flags = [*flags, "--kernels", "native", "--class-weights", "balanced", "--balanced-sampling", "--mixup", "0.2"]
    flags += ["--epochs", "3", "--label-smoothing", "0.1"]
    code, expected = run_train(*flags, "--cuda-graph", "false", "--output-dir", tmp_path / "uncaptured")
    assert code == 0
    capsys.readouterr()
    code, report = run_train(*flags, "--cuda-graph", "true")
    assert code == 0
    assert "CUDA graph, batch" in capsys.readouterr().out
    assert losses(report) == losses(expected)


@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile"])
def test_float16_export_runs_in_paddle_inference(run_train, photos, tmp_path, arch):
    run_train(*FP32_NHWC, "--model-arch-name", arch, "--epochs", "3")
    checkpoint = tmp_path / f"output/{arch}/2"
    export.export(checkpoint, tmp_path / "half", precision="float16", verify=photos)
    model = inference.open_model(tmp_path / "half", "gpu")
    assert (model.engine, model.precision) == ("paddle.inference", "float16")
    images = np.random.default_rng(0).normal(size=(5, 3, 32, 32)).astype(np.float32)
    expected = networks.load_checkpoint(checkpoint, "gpu").model().run(images)
    np.testing.assert_allclose(model.run(images), expected, atol=0.05)


@pytest.mark.parametrize("flags", [FP32_NHWC, O2], ids=["fp32", "O2"])
def test_int8_export_of_network_trained_on_gpu(run_train, photos, tmp_path, flags):
    """Calibration and the INT8 model run on the CPU."""
    pytest.importorskip("onnxruntime")
    run_train(*flags, "--epochs", "3")
    checkpoint = tmp_path / "output/Tiny/2"
    calibration = export.Calibration(str(photos))
    export.export(checkpoint, tmp_path / "int8", int8="onnxruntime", calibration=calibration)
    model = inference.open_model(tmp_path / "int8/model.onnx", "cpu")
    paths = sorted(map(str, (photos / "val").glob("*/*.jpg")))
    reference = networks.load_checkpoint(checkpoint, "gpu").model()
    expected = [row for _, row, _ in image_files.predict(reference, paths)]
    actual = [row for _, row, _ in image_files.predict(model, paths)]
    np.testing.assert_allclose(actual, expected, atol=0.1)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.02), ("float16", 0.05), ("bfloat16", 0.2)])
@pytest.mark.parametrize("arch", ["Tiny", "TinyMobile", "TinyStem"])
def test_captured_predictions_match_reference(run_train, photos, tmp_path, register, arch, precision, tolerance):
    register("TinyStem", partial(ResNet, BasicBlock, (1,)))  # a stem with 64 filters
    run_train(*FP32_NHWC, "--model-arch-name", arch, "--epochs", "3")
    checkpoint, paths = tmp_path / f"output/{arch}/2", sorted(map(str, (photos / "val").glob("*/*.jpg")))
    reference = networks.load_checkpoint(checkpoint, "gpu").model()
    reference = np.stack([row for _, row, _ in image_files.predict(reference, paths, device="gpu")])
    for tta in ("none", "flip"):
        model = inference.open_model(checkpoint, "gpu", None, precision, [4], tta)
        assert (model.engine, model.precision) == ("captured step", precision)
        operators = {op.type for op in model.steps._network.program.global_block().ops}
        assert precision != "float32" or "conv2d" not in operators
        is_fused = precision == "float32" and arch != "TinyStem"  # this network has no 1x1 convolutions
        assert ("native_pointwise_conv_bn_inference" in operators) == is_fused
        assert ("native_stem_inference" in operators) == (arch == "TinyStem")
        actual = image_files.predict(model, paths * 2, batch_size=4, device="gpu")
        actual = np.stack([row for _, row, _ in actual])
        first, second = np.split(actual, 2)  # steps are captured from the third batch on
        if tta == "none":
            np.testing.assert_allclose(second, reference, atol=tolerance)
        np.testing.assert_allclose(first, second, atol=tolerance / 10)
