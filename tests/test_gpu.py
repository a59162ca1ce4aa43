"""What only a GPU can show; skipped without one."""

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
import pytest
from paddle import static
from PIL import Image

from conftest import (
    MASK_ALGORITHMS,
    NHWC,
    ROOT,
    TINY,
    assert_one_sentence,
    assert_sparse,
    gpu_labels,
    losses,
    need_two_gpus,
    phase,
    read_report,
)
from helpers import epoch, take
from paddle_resnet import dali, models
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.steps import cuda_graph
from utils.mode import Mode

# Four stages: more kinds of convolutions than two have, and more of cuDNN's algorithms.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_stages")]

# Without the hardware JPEG decoder. With eight test processes on a GPU, it could not be opened for some loaders. GPU
# kernels then decode instead, with other values, and runs that should be equal differ.
FP32 = ["--device", "gpu", "--hw-decoder-load", "0"]
FP32_NHWC = [*FP32, *NHWC]
O1 = [*FP32_NHWC, "--amp", "--scale-loss", "128"]
O1 += ["--use-dynamic-loss-scaling"]
O2 = [*O1, "--use-pure-fp16", "--dali-output-fp16"]
SPARSE = [*O2, "--asp", "--prune-model"]
BF16_O1 = [*FP32_NHWC, "--amp", "--amp-dtype", "bfloat16"]
BF16_O2 = [*BF16_O1, "--amp-level", "O2", "--dali-output-fp16"]
EXACT = {"fp32": FP32, "fp32 NHWC": FP32_NHWC, "O1": O1, "O2": O2, "O2 ASP": SPARSE}
# On Paddle's kernels two runs in bfloat16 differ from the second step on, even with FLAGS_cudnn_deterministic.
KINDS = {**EXACT, "bf16 O1": BF16_O1, "bf16 O2": BF16_O2}
STOPS = {f"{name} inside an epoch": (flags, 4) for name, flags in EXACT.items()}
STOPS |= {"O2 ASP between epochs": (SPARSE, 6), "O2 ASP in the last epoch": (SPARSE, 8)}
STOPS |= {"O2 EMA inside an epoch": ([*O2, "--ema", "0.9"], 4)}


@pytest.mark.parametrize("hardware_decodes", [0, 0.9])
def test_gpu_loader_makes_the_images_of_the_cpu_loader(parse, photos, hardware_decodes):
    images, labels = [], []
    for device in ("cpu", "gpu"):
        args = parse("--image-root", photos, *FP32, "--dali-device", device, "--hw-decoder-load", hardware_decodes)
        batches = epoch(dali.build_dataloader(args, Mode.EVAL))
        images.append(np.concatenate(batches[0]))
        labels.append(np.concatenate(batches[1]))
    np.testing.assert_array_equal(labels[0], labels[1])
    # The decoders differ by about 2 of 255 grey levels (of 0.017 each) where noise meets halved chroma.
    assert np.abs(images[0] - images[1]).mean() < 0.06


def test_gpu_loader_decodes_every_format_alike(parse, photos, converted):
    expected = epoch(dali.build_dataloader(parse("--image-root", photos, *FP32), Mode.EVAL))
    for root in converted.values():
        found = epoch(dali.build_dataloader(parse("--image-root", root, *FP32), Mode.EVAL))
        for left, right in zip(expected, found, strict=True):
            for a, b in zip(left, right, strict=True):
                np.testing.assert_array_equal(a, b)


AUGMENTATION = ["--color-jitter", "0.4", "--lighting", "0.1", "--rotate-degrees", "20", "--interp", "triangular"]


def test_gpu_loader_augments_like_the_cpu_loader(parse, photos):
    images, plain = [], None
    for device, flags in (("cpu", AUGMENTATION), ("gpu", AUGMENTATION), ("cpu", [])):
        args = parse("--image-root", photos, *FP32, "--dali-device", device, *flags)
        images.append(np.concatenate(epoch(dali.build_dataloader(args, Mode.TRAIN))[0]))
    on_cpu, on_gpu, plain = images
    assert np.abs(on_cpu - on_gpu).mean() < 0.1
    assert np.abs(on_cpu - plain).mean() > 0.3


def test_cpu_decodes_its_share_of_each_training_batch(parse, tmp_path):
    """Whole images that keep their size show who decoded them: the CPU smooths halved chroma, the GPU does not."""
    folder = tmp_path / "train" / "class0"
    folder.mkdir(parents=True)
    random = np.random.RandomState(0)
    for i in range(24):
        pixels = random.randint(0, 256, (32, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.jpg", quality=90, subsampling="4:2:0")
    flags = ["--image-root", tmp_path, *FP32, "--num-of-class", "1", "--batch-size", "12"]
    flags += ["--rand-crop-scale", "1,1", "--rand-crop-ratio", "1,1"]
    decoded = {}
    for share in (0, 0.3, 1):
        batches = epoch(dali.build_dataloader(parse(*flags, "--cpu-decoder-load", share), Mode.TRAIN))[0]
        decoded[share] = [{min(i.tobytes(), i[:, :, ::-1].tobytes()) for i in batch} for batch in batches]
    of_gpu, of_cpu = set.union(*decoded[0]), set.union(*decoded[1])
    assert len(of_gpu) == len(of_cpu) == len(of_gpu | of_cpu) / 2 == 24
    assert [(len(batch & of_cpu), len(batch & of_gpu)) for batch in decoded[0.3]] == [(4, 8)] * 2


def test_loader_that_decodes_on_both_goes_on_with_the_next_batch(parse, photos, capsys):
    flags = ["--image-root", photos, *FP32, "--batch-size", "3", "--cpu-decoder-load"]
    loader = dali.build_dataloader(parse(*flags, "0.4"), Mode.TRAIN)
    take(loader, 4)
    state = json.loads(json.dumps(loader.state()))
    expected = take(loader, 12)
    resumed = dali.build_dataloader(parse(*flags, "0.4"), Mode.TRAIN, state)
    for left, right in zip(take(resumed, 12), expected, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    assert dali.build_dataloader(parse(*flags, "0"), Mode.TRAIN, state).step == 0
    assert "--cpu-decoder-load is 0.0 and was 0.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "share"),
    [
        pytest.param(lambda data: data[:300], 0, id="header"),
        pytest.param(lambda data: b"no image", 0, id="garbage"),
        pytest.param(lambda data: b"no image", 0.5, id="garbage, both decode"),
        # The GPU's decoders fill in what is missing. The CPU gets this image in the first epoch or a later one.
        pytest.param(lambda data: data[: len(data) // 2], 0.8, id="half, both decode"),
    ],
)
def test_image_that_cannot_be_decoded_ends_the_run_with_its_path(run_train, photos, tmp_path, capsys, damage, share):
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    path = sorted((root / "train" / "class1").iterdir())[3]
    path.write_bytes(damage(path.read_bytes()))
    assert run_train(*FP32, "--cpu-decoder-load", share, "--epochs", "20", image_root=root)[0] == 2
    assert_one_sentence(capsys.readouterr().err, [str(path), "rank 0", "--skip-list"])


@pytest.mark.parametrize("batch_size", [7, 23, 32])
def test_evaluation_yields_every_image_once(parse, photos, batch_size):
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
def test_train_then_evaluate_only_gives_the_same_numbers(run_train, tmp_path, flags):
    code, report = run_train("--epochs", "2", *flags)
    assert code == 0
    expected = phase(report, [1], "val.")
    assert expected["images"] == 23
    assert np.isfinite(expected["loss"])
    code, report = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1", *flags)
    assert code == 0
    found = phase(report, [], "val.")
    assert found["top1"] == expected["top1"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.parametrize("flags", [O2, BF16_O2], ids=["float16", "bfloat16"])
def test_level_o2_really_casts_and_its_checkpoint_is_float32(run_train, tmp_path, flags):
    assert run_train(*flags)[0] == 0
    params = pickle.loads((tmp_path / "output/Tiny/0/tiny.pdparams").read_bytes())
    assert {array.dtype for array in params.values()} == {np.dtype("float32")}
    optimizer = pickle.loads((tmp_path / "output/Tiny/0/tiny.pdopt").read_bytes())
    assert any(name.endswith("_fp32_master_0") for name in optimizer)
    code, report = run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/0", *FP32_NHWC)
    assert code == 0
    assert phase(report, [], "val.")["images"] == 23


@pytest.fixture
def deterministic():
    paddle.set_flags({"FLAGS_cudnn_deterministic": True})
    yield
    paddle.set_flags({"FLAGS_cudnn_deterministic": False})


# test_resume.py stops in all epochs, on the CPU. The sparse runs go through what the ones in O2 do.
IN_SOAK = ("fp32 NHWC inside an epoch", "O2 inside an epoch", "O2 ASP in the last epoch")


@pytest.mark.parametrize(
    "flags, step",
    [pytest.param(*stop, id=name, marks=pytest.mark.soak if name in IN_SOAK else []) for name, stop in STOPS.items()],
)
def test_losses_after_a_stop_are_those_of_an_uninterrupted_run(
    run_train, losses_with_a_stop, deterministic, flags, step
):
    flags = ["--epochs", "3", "--print-interval", "1", "--resume", *flags]
    code, report = run_train(*flags)
    assert code == 0
    expected = losses(report)
    assert len(expected) == 15
    assert losses_with_a_stop(step, *flags) == expected


@pytest.mark.parametrize("data_format", ["recordio"])  # test_resume.py has all of them, on the CPU
def test_a_format_goes_on_inside_an_epoch(run_train, losses_with_a_stop, deterministic, converted, data_format):
    flags = ["--epochs", "2", "--print-interval", "1", "--resume", *FP32]
    root = converted[data_format]
    expected = losses(run_train(*flags, image_root=root)[1])
    assert len(expected) == 10
    assert losses_with_a_stop(4, *flags, image_root=root) == expected


def test_overflows_are_skipped_and_training_recovers(run_train):
    """The scaled gradients overflow until the scale has come down from 2^22."""
    flags = [*O2, "--scale-loss", "4194304", "--epochs", "12", "--max-bad-steps", "1", "--lr", "0.01"]
    code, report = run_train(*flags)
    assert code == 0
    scales = [phase(report, [epoch], "train.")["loss_scale"] for epoch in range(12)]
    assert scales[0] < 4194304
    assert 1 <= scales[-1] == scales[-2]  # low enough now
    assert np.isfinite(phase(report, [11], "val.")["loss"])


@pytest.mark.parametrize("flags", [O1, O2, SPARSE], ids=["O1", "O2", "O2 ASP"])
def test_overflows_leave_the_parameters_alone(run_train, tmp_path, flags):
    """An epoch in which every step overflows ends with the parameters of one with learning rate 0."""
    found = []
    for name, change in (("overflows", ["--scale-loss", "3e38"]), ("still", ["--lr", "0"])):
        code, report = run_train("--run-scope", "train_only", *flags, *change, "--output-dir", tmp_path / name)
        assert code == 0
        found.append(pickle.loads((tmp_path / name / "Tiny/0/tiny.pdparams").read_bytes()))
        scale = phase(report, [0], "train.")["loss_scale"]
        assert scale == pytest.approx(3e38 / 2**3 if name == "overflows" else 128)
    overflows, still = found
    for name in still:
        if not name.endswith(("w_1", "w_2")):  # BN statistics
            np.testing.assert_array_equal(overflows[name], still[name], err_msg=name)


@pytest.mark.parametrize(
    "algorithm, flags",
    [
        pytest.param(algorithm, flags, id=f"{algorithm}-{name}", marks=pytest.mark.soak if is_more else [])
        for algorithm in MASK_ALGORITHMS
        for name, flags, is_more in (("fp32", FP32, algorithm != "mask_1d"), ("O2", O2, algorithm == "mask_2d_best"))
    ],
)
def test_sparse_training_keeps_the_pattern(run_train, tmp_path, algorithm, flags):
    """After training and after --resume with another epoch to go."""
    for e in range(2):
        pruning = ["--asp", "--prune-model", "--mask-algo", algorithm, "--resume", "--epochs", e + 1]
        assert run_train(*flags, *pruning)[0] == 0
        assert_sparse(pickle.loads((tmp_path / f"output/Tiny/{e}/tiny.pdparams").read_bytes()), algorithm)


# Of the first loss and of the later ones, relative. float32 multiplies in TF32 on a GPU, with 11 bits as float16 does.
CLOSE_TO_CPU = {"fp32": (1e-3, 0.02), "fp32 NHWC": (1e-3, 0.02), "O1": (3e-3, 0.03), "O2": (3e-3, 0.03)}
CLOSE_TO_CPU |= {"bf16 O1": (0.02, 0.15), "bf16 O2": (0.02, 0.15)}  # eight bits: 0.11 was seen


def test_first_losses_are_those_of_the_cpu(run_train, tmp_path):
    """From the same parameters and images, in every precision, with Paddle's kernels and our own."""
    channels = ["--image-shape", "4,32,32"]  # as all kinds in NHWC have
    assert run_train("--run-scope", "train_only", *channels)[0] == 0
    start = [*channels, "--from-pretrained-params", tmp_path / "output/Tiny/0", "--output-dir", tmp_path / "next"]
    start += ["--overwrite"]
    start += ["--lr", "0.01", "--run-scope", "train_only", "--dali-device", "cpu", "--print-interval", "1"]
    on_cpu = losses(run_train(*start)[1])
    assert len(on_cpu) == 4  # three steps and their mean
    for name, (first, later) in CLOSE_TO_CPU.items():
        for kernels in ("paddle", "native") if "NHWC" in KINDS[name] else ("paddle",):
            code, report = run_train(*start, *KINDS[name], "--kernels", kernels)
            assert code == 0
            found = losses(report)
            print(name, kernels, *(f"{abs(found[step] - loss) / loss:.1e}" for step, loss in on_cpu.items()))
            for step, loss in on_cpu.items():
                assert found[step] == pytest.approx(loss, rel=first if step == (0, 0) else later), (name, kernels, step)


RECORDED = {name: KINDS[name] for name in ("fp32 NHWC", "O2", "O2 ASP", "bf16 O2")}
RECORDED |= {"O2 ASP EMA": [*SPARSE, "--ema", "0.9"]}
RECORDED |= {f"O2 {name}": [*O2, "--optimizer", name, "--lr", "0.01"] for name in ("AdamW", "LAMB")}
RECORDED |= {f"{name} MobileNetV2": [*KINDS[name], "--model-arch-name", "TinyMobile"] for name in ("fp32 NHWC", "O2")}


@pytest.mark.parametrize("flags", RECORDED.values(), ids=RECORDED)
def test_recorded_steps_change_nothing(run_train, deterministic, tmp_path, monkeypatch, flags):
    """In training and in the evaluations in between."""

    class Counted(cuda_graph.CUDAGraph):
        def replay(self):
            launches.append(self)
            super().replay()

    monkeypatch.setattr(cuda_graph, "CUDAGraph", Counted)
    found, flags = [], ["--epochs", "2", "--print-interval", "1", *flags, "--kernels", "native"]
    for recorded in ("true", "false"):
        launches = []
        code, report = run_train(*flags, "--cuda-graph", recorded, "--output-dir", tmp_path / recorded)
        assert code == 0
        # Of six steps of training, and four of evaluation that have a whole batch, the first two are not recorded.
        assert len(launches) == (4 + 2 if recorded == "true" else 0)
        [saved] = (tmp_path / recorded).glob("*/1/*.pdparams")
        found.append((losses(report), pickle.loads(saved.read_bytes())))
    (ours, parameters), (expected, plain) = found
    assert ours == expected
    for name, value in plain.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


class WithDropout(ResNet):
    def forward(self, images):
        return paddle.nn.Dropout(0.1)(super().forward(images))


def test_a_network_whose_operators_do_not_repeat_is_not_captured(run_train, monkeypatch, capsys):
    monkeypatch.setitem(models.MODELS, "Tiny", partial(WithDropout, BottleneckBlock, (1, 1), width=8))
    flags = [*O2, "--kernels", "native", "--epochs", "2"]
    assert run_train(*flags)[0] == 0
    said = capsys.readouterr().out
    assert "--cuda-graph false: operator dropout draws random numbers from Paddle's generator" in said
    assert "CUDA graph, batch" not in said
    assert run_train(*flags, "--cuda-graph", "true", "--overwrite")[0] == 2
    assert_one_sentence(capsys.readouterr().err, ["--cuda-graph true: operator dropout"])


@pytest.mark.parametrize("flags", [O2, FP32_NHWC], ids=["O2", "fp32"])
def test_captured_steps_draw_the_random_numbers_of_uncaptured_ones(run_train, deterministic, capsys, flags):
    """Mixed images and dropout; the comparison of untested operators finds no difference."""
    flags = [*flags, "--kernels", "native", "--epochs", "3", "--mixup", "0.4", "--cutmix", "1", "--dropout", "0.3"]
    flags += ["--drop-path", "0.3"]
    code, expected = run_train(*flags, "--cuda-graph", "false")
    assert code == 0
    capsys.readouterr()
    code, report = run_train(*flags, "--cuda-graph", "true", "--overwrite")
    assert code == 0
    assert "CUDA graph, batch" in capsys.readouterr().out
    assert losses(report) == losses(expected)


def test_each_stage_has_its_captured_step(run_train, deterministic):
    flags = [*O2, "--kernels", "native", "--epochs", "4", "--sizes", "32:0,48:2", "--mixup", "0.4"]
    code, expected = run_train(*flags, "--cuda-graph", "false")
    assert code == 0
    code, report = run_train(*flags, "--cuda-graph", "true", "--overwrite")
    assert code == 0
    assert losses(report) == losses(expected)


def test_launches_write_to_no_memory_that_paddle_counts_as_free(run_train, monkeypatch):
    """Known bytes in the memory that is free after the recording stay. cuDNN's workspaces lay there."""

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
    assert len(graphs) == 2  # training and evaluation


def test_processes_with_recorded_steps_end_well(photos, tmp_path):
    """Graphs go before the variables of a process do: none of these may be in a graph's memory. Where some were, three
    of five processes crashed at their end."""
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


@pytest.mark.parametrize(("kernels", "recorded"), [("native", "true"), ("native", "false"), ("paddle", "false")])
def test_evaluation_repeats_to_the_last_bit(run_train, kernels, recorded):
    """With the host ahead of the GPU: no batch may be overwritten by the next ones while it is still read."""
    flags = ["--run-scope", "eval_only", "--benchmark", "--benchmark-steps", "60", "--benchmark-warmup-steps", "2"]
    found = []
    for _ in range(2):
        code, report = run_train(*flags, *O2, "--kernels", kernels, "--cuda-graph", recorded)
        assert code == 0
        found.append(phase(report, [], "val.")["loss"])
    assert np.isfinite(found[0])
    assert found[0] == found[1]


def test_no_batch_is_overwritten_before_the_gpu_has_copied_it(parse, photos):
    """The copy waits behind all that the GPU has still to do; DALI goes on meanwhile."""
    flags = [*O2, "--image-shape", "4,224,224", "--crop-size", "224", "--resize-short", "256"]
    args = parse("--image-root", photos, *flags)
    work = static.Program()
    with static.program_guard(work):
        x = paddle.full([4096, 4096], 2.0**-12)
        for _ in range(100):
            x = paddle.matmul(x, x)
    exe, found, is_ahead = static.Executor(paddle.CUDAPlace(0)), [], False
    for is_busy in (False, True):
        loader, kept = dali.build_dataloader(args, Mode.EVAL), []
        for _ in range(3):
            for _ in range(len(loader)):
                if is_busy:
                    exe.run(work, fetch_list=[])
                    worked = paddle.device.cuda.Event()
                    worked.record()
                [batch] = next(loader)
                is_ahead |= is_busy and not worked.query()
                kept.append(batch["data"] if is_busy else np.array(batch["data"]))
            loader.reset()
        paddle.device.cuda.synchronize()
        found.append(list(map(np.array, kept)))
    assert len(found[0]) == 9
    assert is_ahead  # the host had batches whose copies were still to come
    for expected, images in zip(*found, strict=True):
        np.testing.assert_array_equal(images, expected)


@pytest.mark.parametrize("scope", ["train_only", "eval_only"])
@pytest.mark.parametrize("source", ["folder", "synthetic"])
def test_benchmark(run_train, scope, source):
    flags = ["--benchmark", "--benchmark-steps", "7", "--benchmark-warmup-steps", "2", "--data-format", source]
    code, report = run_train("--run-scope", scope, *flags, *O2)
    assert code == 0
    result = phase(report, [], "train." if scope == "train_only" else "val.")
    assert result["steps"] == 7
    assert result["peak_memory_allocated_mib"] > 0
    versions = report[-1]["data"]["versions"]
    assert versions["cuda"] and versions["cudnn"] and versions["gpu"] and "driver" in versions


def test_trace_has_the_kernels(run_train, tmp_path):
    flags = ["--benchmark", "--benchmark-steps", "7", "--benchmark-warmup-steps", "2", "--profile-steps", "4:6"]
    assert run_train("--run-scope", "train_only", *flags, *O2)[0] == 0
    trace = json.loads((tmp_path / "output/profile/steps_4_6_rank0.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in trace}
    assert {"Kernel", "Operator", "ProfileStep"} <= kinds, kinds


FUSED = {
    "native": (
        "13 native_bn_act, 13 native_bn_act_backward, 4 native_bn_add_relu, 4 native_bn_add_relu_backward, "
        "1 native_check_finite, 1 native_loss, 1 native_loss_grad, 1 native_max_pool, "
        "1 native_max_pool_backward, 1 native_momentum"
    ),
    # A residual unit's last BN, addition and ReLU; the other BN with a ReLU behind it.
    "paddle": (
        "9 fused_batch_norm_act, 9 fused_batch_norm_act_grad, 4 fused_bn_add_activation, 4 fused_bn_add_activation_grad"
    ),
}


@pytest.mark.parametrize("kernels", FUSED)
@pytest.mark.parametrize("flags", [O1, O2], ids=["O1", "O2"])
def test_start_line_counts_the_fused_operators(run_train, capsys, flags, kernels):
    assert run_train("--dry-run", *flags, "--kernels", kernels)[0] == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Tiny on 1 x gpu"))
    assert FUSED[kernels] in line
    assert (", CUDA graph, " in line) == (kernels == "native")


@pytest.mark.parametrize("flags, tolerance", [(FP32_NHWC, 1e-4), (O1, 5e-3), (O2, 5e-3)], ids=["fp32", "O1", "O2"])
def test_own_and_paddles_kernels_train_alike(run_train, deterministic, flags, tolerance):
    """The first loss is that of the same parameters; later ones drift apart as rounding does."""
    found = {}
    for kernels in ("native", "paddle"):
        choice = ["--kernels", kernels, "--print-interval", "1", "--lr", "0.01", "--epochs", "2", "--overwrite"]
        code, report = run_train("--run-scope", "train_only", *flags, *choice)
        assert code == 0
        found[kernels] = losses(report)
    for step, loss in found["paddle"].items():
        relative = tolerance if step == (0, 0) else 0.1
        assert found["native"][step] == pytest.approx(loss, rel=relative), step


PADDLES = {f"{name}, Paddle's": [*flags, "--kernels", "paddle"] for name, flags in KINDS.items() if "NHWC" in flags}


@pytest.fixture
def two_gpus(photos, tmp_path):
    """Run a job on two GPUs; returns its report entries, or [log of each rank] if a fault is to end it."""
    need_two_gpus()

    def two_gpus(*flags, fault=None, gpus=2, environment=None):
        labels = ",".join(gpu_labels(gpus))
        launcher = ["-m", "paddle.distributed.launch", "--gpus", labels, "--log_dir", tmp_path / "log"]
        places = ["--image-root", photos, "--output-dir", tmp_path, "--report-file", tmp_path / "report.json"]
        places += ["--batch-size", "5", "--overwrite", "--parameters", tmp_path, "--stages", "4"]
        places += ["--fault", fault] if fault else []
        command = [sys.executable, *launcher, "tests/train_tiny.py", *TINY, *places, *flags]
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
    ("fault", "says"),
    [
        ("1 4 raises", "rank 1 failed first: ZeroDivisionError"),
        ("1 4 killed", "rank 1 failed first: its process ended"),
        ("1 4 hangs", "--comm-timeout-s 20: no progress for 20 s; rank 1 is in epoch 1 train, step"),
    ],
    ids=["raises", "killed", "hangs"],
)
def test_a_rank_that_fails_ends_a_job_on_two_gpus(two_gpus, fault, says):
    """Rank 0 waits in NCCL, in a step that is a CUDA graph; that does not end by itself."""
    logs = two_gpus("--epochs", "3", "--comm-timeout-s", "20", *O2, fault=fault)
    assert_one_sentence(logs[0], [says])


@pytest.mark.parametrize("flags", [*KINDS.values(), *PADDLES.values()], ids=[*KINDS, *PADDLES])
def test_two_gpus_keep_the_same_parameters(two_gpus, tmp_path, flags):
    two_gpus(*flags)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("flags", [FP32_NHWC, SPARSE], ids=["fp32 NHWC", "O2 ASP"])
def test_two_gpus_recorded_steps_change_nothing(two_gpus, tmp_path, flags):
    """All-reduces included. One recording each of training and evaluation does for all epochs."""
    found = []
    for recorded in ("true", "false"):
        report = two_gpus(*flags, "--epochs", "4", "--print-interval", "1", "--cuda-graph", recorded)
        captures = re.findall(r"^captures: (\d+)$", (tmp_path / "log/workerlog.0").read_text(), re.MULTILINE)
        assert captures[-1] == ("2" if recorded == "true" else "0")  # the log of the second job follows the first's
        found.append((losses(report), dict(np.load(tmp_path / "rank1.npz"))))
    (ours, parameters), (expected, plain) = found
    assert ours == expected
    for name, value in plain.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


def test_two_hosts_with_a_gpu_each_keep_the_same_parameters(launch_nodes):
    """Their gradients travel beside the backward pass, without a graph."""
    need_two_gpus()
    nodes, folder = launch_nodes(*O2, "--batch-size", "5", "--epochs", "2", "--stages", "4", on_gpus=True)
    assert [node.wait(200) for node in nodes] == [0, 0]
    assert "CUDA graph" not in (folder / "log0/workerlog.0").read_text()
    first, second = (np.load(folder / f"rank{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


SHARES = ["--shares", "--data-format", "synthetic", "--epochs", "2"]


def test_two_gpus_train_like_one_with_twice_the_batch(two_gpus, tmp_path):
    """Without batch normalisation, whose statistics are those of a process's own images, and without TF32."""
    found, environment = [], {"NVIDIA_TF32_OVERRIDE": "0"}
    for gpus, batch_size, rate in ((1, 24, 0.002), (2, 12, 0.001)):
        flags = [*FP32, *SHARES, "--model-arch-name", "Plain", "--batch-size", batch_size, "--lr", rate]
        two_gpus(*flags, gpus=gpus, environment=environment)
        found.append([dict(np.load(tmp_path / f"epoch{e}_rank0.npz")) for e in range(2)])
    for one, two in zip(*found, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max(), err_msg=name)
    # The comparison would see a gradient that is off: the parameters have moved.
    before, after = (one["linear_0.w_0"] for one in found[0])
    assert np.abs(after - before).max() > 0.01 * np.abs(after).max()


@pytest.mark.parametrize("kernels", ["native", "paddle"])
def test_two_gpus_follow_one_with_twice_the_batch(two_gpus, kernels):
    """With batch normalisation, over 24 images or over 12, and in half precision."""
    found = []
    for gpus, batch_size, rate in ((1, 24, 0.02), (2, 12, 0.01)):
        flags = [*O2, *SHARES, "--kernels", kernels, "--batch-size", batch_size, "--lr", rate, "--epochs", "8"]
        report = two_gpus(*flags, gpus=gpus)
        found.append([losses(report)[epoch, "train"] for epoch in range(8)])
    print(*found)
    one, two = found
    assert two == pytest.approx(one, rel=0.05)
    assert one[-1] < one[0] - 0.2


@pytest.mark.parametrize("algorithm", MASK_ALGORITHMS)
def test_two_gpus_keep_the_pattern(two_gpus, tmp_path, algorithm):
    two_gpus(*SPARSE, "--mask-algo", algorithm, "--epochs", "2")
    for e in range(2):
        for rank in range(2):
            assert_sparse(np.load(tmp_path / f"epoch{e}_rank{rank}.npz"), algorithm)


@pytest.mark.parametrize("flags", [FP32, SPARSE], ids=["fp32", "O2 ASP"])
def test_two_gpus_go_on_bit_for_bit_inside_an_epoch(two_gpus, tmp_path, flags):
    flags = ["--epochs", "3", "--print-interval", "1", "--save-interval-steps", "2", "--keep-checkpoints", "9", *flags]
    expected = losses(two_gpus(*flags))
    start = ["--from-checkpoint", tmp_path / "Tiny/1_2", "--last-epoch-of-checkpoint", "auto", "--overwrite", "false"]
    resumed = losses(two_gpus(*flags, *start))
    assert resumed == {key: expected[key] for key in resumed}
    assert {(1, 2), (1, "train"), (1, "val"), (2, "val")} <= set(resumed)
