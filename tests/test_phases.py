"""Single phases before step 1. Tests of complete runs are in test_train.py and in the folders of the modules that the
phases call."""

import shlex
from types import SimpleNamespace

import paddle
import pytest

from conftest import TINY, frozen, tiny
from helpers import build, with_meta
from paddle_resnet import config, phases
from paddle_resnet.native import build as native
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope


@pytest.fixture
def find_start(photos, tmp_path):
    """Return a function that runs the phases `start` and `find_start` without --num-of-class, and returns (settings,
    start checkpoint)."""

    def find_start(*flags, image_root=photos):
        places = ["--image-root", image_root, "--output-dir", tmp_path / "output"]
        words = tiny(*places, *flags)
        at = words.index("--num-of-class")
        args = config.parse_args(words[:at] + words[at + 2 :])
        run = phases.Run(args)
        run.start()
        run.find_start()
        return args, run.checkpoint

    return find_start


def test_all_flags_are_resolved_and_frozen_before_the_first_program(find_start):
    args, checkpoint = find_start()
    assert checkpoint is None and args.is_frozen
    kernels = "native" if native.missing() is None else "paddle"
    assert (args.kernels, args.data_layout) == (kernels, "NHWC" if kernels == "native" else "NCHW")
    assert args.dali_device == "cpu" and args.report_file.endswith("/Tiny/report.json")


def test_evaluation_counts_the_classes_of_its_own_split(find_start, checkpoint, photos, tmp_path):
    """The folder of parameters without meta.json does not determine the number of classes."""
    (checkpoint / "meta.json").unlink()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/val").symlink_to(photos / "val")
    flags = ["--run-scope", "eval_only", "--from-pretrained-params", checkpoint]
    args, _ = find_start(*flags, image_root=tmp_path / "data")
    assert args.num_of_class == 3


def test_evaluation_does_not_number_some_of_the_classes(find_start, checkpoint, photos, tmp_path):
    """The checkpoint has no class names, so class folders have labels only if there is one for each output."""
    unnamed = with_meta(checkpoint, tmp_path / "unnamed", classes=[], class_names=[])
    for label in (0, 2):
        (tmp_path / "data/val").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/val/class{label}").symlink_to(photos / f"val/class{label}")
    for start in ("--from-checkpoint", "--from-pretrained-params"):
        flags = ["--run-scope", "eval_only", start, unnamed]
        run = phases.Run(*find_start(*flags, image_root=tmp_path / "data"))
        with pytest.raises(UsageError, match="has 2 class folders, but the network has 3 outputs without names"):
            run.open_data()


def test_command_for_fine_tuning_keeps_explicit_and_changed_flags():
    """The data set determines the number of classes, and the teacher was trained on the classes before."""
    flags = "--device cpu --dali-num-threads 3 --run-scope train_only --lr 0.3 --optimizer AdamW --num-of-class 7"
    flags += " --teacher d --distill-weight 0.5 --output-dir runs/ --dali-prefetch 2 --model-arch-name ResNet18"
    args = config.parse_args(flags.split())
    args.set("checkpoint c", label_smoothing=0.2)
    *_, command = phases.Run(args)._fine_tuning("c").partition("train.py ")
    again = config.parse_args(shlex.split(command))
    expected = {"device": "cpu", "dali_num_threads": 3, "lr": 0.3, "optimizer": "AdamW", "label_smoothing": 0.2}
    expected |= {"num_of_class": None, "teacher": None, "distill_weight": 0.9, "output_dir": "runs_fine_tuned"}
    expected |= {"from_pretrained_params": "c", "pretrained_mismatch": "skip-classifier", "dali_prefetch": 2}
    expected |= {"run_scope": RunScope.TRAIN_ONLY, "model_arch_name": "ResNet18"}
    assert {name: getattr(again, name) for name in expected} == expected


def test_only_training_that_reached_its_end_is_done():
    flags = "--iter-unit batch --num-iter 7 --patience 2 --warmup-epochs 0"
    args = config.parse_args(tiny(*flags.split()))
    checkpoint = SimpleNamespace(is_done=lambda *flags: flags == ("batch", 90, 7, 2))
    assert phases.Run(args, checkpoint).is_done
    assert not phases.Run(args).is_done
    assert not phases.Run(args, SimpleNamespace(is_done=lambda *_: False)).is_done
    args = config.parse_args([*TINY, *flags.split(), "--run-scope", "eval_only", "--from-checkpoint", "c"])
    assert not phases.Run(args, checkpoint).is_done


def test_settings_that_differ_from_defaults_are_described_with_origins():
    args = config.parse_args(["--lr", "0.25"])
    args.choose("fits", epochs=90)  # the default
    text = phases.describe(args)
    assert "lr: 0.25  # command line" in text.splitlines()
    assert "epochs: 90  # chosen: fits" in text.splitlines()
    assert "\nmomentum: " not in text
    args = config.parse_args(["--show-config"])
    assert "\nmomentum: 0.875  # default" in phases.describe(args)


def test_inputs_of_a_run_are_protected(tmp_path, work_in):
    work_in(tmp_path)
    (tmp_path / "net.py").touch()
    (tmp_path / "epoch").mkdir()
    (tmp_path / "epoch/x.pdema").touch()
    (tmp_path / "c.yaml").write_text("lr: 0.1")
    flags = ["--config", "c.yaml", "--skip-list", "skip.txt", "--from-pretrained-params", "epoch"]
    args = config.parse_args([*TINY, *flags, "--model-arch-name", "net.py:Net"])
    start = "--from-pretrained-params"
    assert {(name, str(path)) for name, path in phases.Run(args).input_files()} == {
        ("--config", "c.yaml"),
        ("--skip-list", "skip.txt"),
        ("--model-arch-name", "net.py"),
        (start, "epoch.pdparams"),
        (start, "epoch.pdopt"),
        (start, "epoch/x.pdema"),
    }
    assert phases.Run(config.parse_args(TINY)).input_files() == []


# Half precision requires a GPU, so the following tests replace the functions that change or compile programs for it.
NATIVE = {"kernels": "native", "device": "gpu", "data_layout": "NHWC"}
HALF = {"amp": True, "amp_dtype": "float16", "amp_level": "O2", "qat": False, "teacher": None}


def half_precision(**flags):
    return SimpleNamespace(**{"kernels": "paddle", "device": "gpu", "data_layout": "NCHW"} | HALF | flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [("fold", 1)]),
        ({"data_layout": "NHWC"}, [("fold", -1)]),
        (NATIVE, [("fuse",)]),
        *((NATIVE | other, []) for other in ({"device": "cpu"}, {"data_layout": "NCHW"})),
        *((NATIVE | other, []) for other in ({"amp_level": "O1"}, {"amp_dtype": "bfloat16"})),
    ],
    ids=str,
)
def test_custom_kernels_fold_only_convolutions_that_they_fuse(monkeypatch, flags, expected):
    monkeypatch.setattr(phases.folding, "fold_batch_norms", lambda program, exe, axis: ("fold", axis))
    monkeypatch.setattr(phases.folding, "fuse_convolutions", lambda program, exe, prefix: (2, ("fuse",)))
    assert phases._fold(half_precision(**flags), "exe", "program") == expected


@pytest.mark.parametrize("amp", [False, True])
def test_only_half_precision_casts_the_evaluation_program(parse, gpu_lists, amp):
    """The parser rejects --amp on a CPU, so the test sets it. The program is not run."""
    args = parse()
    args.amp, args.amp_level = amp, "O2"
    compiled, _, fetchs, _, main = build(args, is_train=False, is_plain=True)
    phases.Run(frozen(args), evaluation=phases.Work(args, None, main, fetchs)).set_weights()
    weights = {p.dtype for p in main.all_parameters() if "conv" in p.name}
    assert weights == {paddle.float16 if amp else paddle.float32}


@pytest.mark.parametrize(
    ("flags", "trains", "expected"),
    [
        ({}, True, ["averages", "folded"]),
        ({"qat": True}, True, ["averages"]),
        ({"amp": False}, True, ["averages"]),
        ({}, False, ["folded"]),
    ],
    ids=str,
)
def test_bn_is_folded_after_the_weights_are_averaged(monkeypatch, flags, trains, expected):
    updates = []
    monkeypatch.setattr(phases.averages, "evaluate", lambda *programs: lambda: updates.append("averages"))
    monkeypatch.setattr(phases, "_fold", lambda *programs: [lambda: updates.append("folded")])
    monkeypatch.setattr(phases.program, "compile_prog", lambda *arguments, **options: None)
    training = phases.Work(None, None, "training", None) if trains else None
    args = SimpleNamespace(part=lambda cls: half_precision(**flags))
    run = phases.Run(args, None, "exe", training, phases.Work(args, None, "evaluation", None))
    run.compile_programs()
    run.evaluation.refresh()
    assert updates == expected
