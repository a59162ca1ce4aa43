import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers import NVIDIA_SCRIPTS
from paddle_resnet import config, models
from paddle_resnet.components import rates
from paddle_resnet.settings import field, inheritance, parsing, validation
from paddle_resnet.settings.declarations import (
    ACTIONS,
    EVALUATED,
    FLAGS,
    KINDS,
    MODULES,
    ORDER,
    PARSER,
    RESUMED,
    of_kinds,
)
from paddle_resnet.settings.values import flag_name
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

ROOT = Path(__file__).parent.parent

# Flags and defaults of NVIDIA's RN50v1.5 Paddle example. Commands written for the example rely on these defaults. The
# example has no --iter-unit, --num-iter, --accumulate-steps, --clip-grad-norm, --ema, --lookahead, --beta1, --beta2 and
# --opt-epsilon.
NVIDIA = {
    "output-dir": "./output/",
    "run-scope": RunScope.TRAIN_EVAL,
    "epochs": 90,
    "save-interval": 1,
    "eval-interval": 1,
    "print-interval": 10,
    "report-file": None,  # the default depends on the kind of run; see tests/test_run_report.py
    "data-layout": "NCHW",
    "benchmark": False,
    "benchmark-steps": 100,
    "benchmark-warmup-steps": 100,
    "model-prefix": "resnet_50_paddle",
    "from-pretrained-params": None,
    "from-checkpoint": None,
    "last-epoch-of-checkpoint": None,
    "show-config": True,
    "enable-cpu-affinity": True,
    "image-root": "/imagenet",
    "image-shape": [4, 224, 224],
    "batch-size": 256,
    "dali-random-seed": 42,
    "dali-num-threads": 4,
    "dali-output-fp16": False,
    "crop-size": 224,
    "rand-crop-scale": [0.08, 1.0],
    "rand-crop-ratio": [3 / 4, 4 / 3],
    "normalize-scale": 1 / 255,
    "normalize-mean": [0.485, 0.456, 0.406],
    "normalize-std": [0.229, 0.224, 0.225],
    "resize-short": 256,
    "model-arch-name": "ResNet50",
    "num-of-class": None,  # the example's default is 1000; this project counts the classes in the data
    "bn-weight-decay": False,
    "iter-unit": "epoch",
    "accumulate-steps": 1,
    "num-iter": None,
    "clip-grad-norm": None,
    "ema": None,
    "label-smoothing": 0.1,
    "optimizer": "Momentum",
    "momentum": 0.875,
    "beta1": 0.9,
    "beta2": 0.999,
    "opt-epsilon": 1e-8,
    "lookahead": None,
    "weight-decay": 3.0517578125e-05,
    "lr-scheduler": "Cosine",
    "lr": 0.256,
    "warmup-epochs": 5,
    "warmup-start-lr": 0.0,
    "amp": False,
    "scale-loss": 1.0,
    "use-dynamic-loss-scaling": False,
    "use-pure-fp16": False,
    "fuse-resunit": False,
    "inference-dir": None,
    "asp": False,
    "prune-model": False,
    "mask-algo": "mask_1d",
}
# Defaults of the other flags. Flags that are in neither dictionary are off or automatic.
OTHERS = {
    **{"pretrained_mismatch": "error", "interp": "triangular", "auto_augment_magnitude": 9, "max_bad_steps": 10},
    **{"lr_decay_by_layer": 1.0, "classifier_lr_factor": 1.0, "lr_decay_epochs": [30.0, 60.0, 80.0]},
    **{"lr_decay_factor": 0.1, "lr_power": 2.0, "lr_rise": 0.25, "lr_flat": 0.75, "amp_dtype": "float16"},
    **{"keep_checkpoints": 3, "checkpoint_commit": "rename", "dali_prefetch": 3, "hw_decoder_load": 0.9},
    **{"amp_level": "O1", "program_representation": "legacy", "cuda_graph": True, "comm_timeout_s": 600},
    **{"distill_weight": 0.9, "distill_temperature": 4.0},
}
IMAGES = of_kinds(*EVALUATED)[2:]


def parse(text=""):
    return config.parse_args(text.split())


def error_of(text):
    """Parse an invalid command line and return the error message, which must be a single line."""
    with pytest.raises(UsageError) as error:
        parse(text)
    message = str(error.value)
    assert message.strip()
    assert "\n" not in message
    return message


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("flag", NVIDIA)
def test_nvidia_flags_keep_their_defaults(flag):
    value = getattr(parse(), flag.replace("-", "_"))
    assert value == NVIDIA[flag]
    assert type(value) is type(NVIDIA[flag])


def test_other_flags_keep_their_defaults():
    others = {name: getattr(parse(), name) for name in FLAGS if name.replace("_", "-") not in NVIDIA}
    assert {name: value for name, value in others.items() if value not in (None, False, "none", "auto")} == OTHERS


def test_none_overrides_values_of_the_configuration_file(config_file):
    values = {"num_iter": 5, "clip_grad_norm": 1, "bn_momentum": 0.9, "ema": 0.9, "freeze": "stem", "unfreeze_at": 5}
    values |= {"lookahead": "6,0.5", "sizes": "224:0", "profile_steps": "1:2", "last_epoch_of_checkpoint": 3}
    values |= dict.fromkeys(
        ("from_pretrained_params", "report_file", "tensorboard_dir", "report_html", "predictions"), "f"
    )
    values["budget_minutes"] = 5
    path = config_file(yaml.safe_dump(values))
    args = parse(" ".join([f"--config {path}", *(f"{flag_name(name)} None" for name in values)]))
    assert {name: getattr(args, name) for name in values} == dict.fromkeys(values)


@pytest.mark.parametrize(
    "flags",
    [
        *NVIDIA_SCRIPTS.values(),
        "--amp --scale-loss 128.0 --use-dynamic-loss-scaling --use-pure-fp16 --dali-output-fp16",
        "--run-scope train_only --batch-size 64 --benchmark --benchmark-steps 100 --benchmark-warmup-steps 300",
        "--run-scope eval_only --from-checkpoint output/ResNet50/89 --batch-size 64",
        "--from-checkpoint output/ResNet50 --last-epoch-of-checkpoint auto",
        "--from-pretrained-params output/ResNet50/89 --model-prefix resnet_50_paddle --asp --prune-model "
        "--mask-algo mask_1d --epochs 90 --lr 0.256",
    ],
)
def test_commands_of_nvidia_example_parse(flags):
    parse(flags)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--epochs 3", "epochs", 3),
        ("--epochs=3", "epochs", 3),
        ("--epochs 3 --epochs 4", "epochs", 4),
        ("--warmup-epochs 0", "warmup_epochs", 0),
        ("--output-dir there", "output_dir", "there"),
        ("--data-layout NHWC", "data_layout", "NHWC"),
        ("--lr 1e-3", "lr", 1e-3),
        ("--lr 0.1 --min-lr 0.1", "min_lr", 0.1),
        ("--crop-size 96", "image_shape", [4, 96, 96]),
        ("--image-shape 3,96,96", "crop_size", 96),
        ("--model-arch-name ResNet18", "model_prefix", "resnet_18_paddle"),
        ("--model-arch-name ResNet18 --model-prefix mine", "model_prefix", "mine"),
        ("--normalize-scale 1/255", "normalize_scale", 1 / 255),
        ("--hw-decoder-load 0", "hw_decoder_load", 0.0),
        ("--image-shape 3,224,224", "image_shape", [3, 224, 224]),
        ("--image-shape 3,320,224 --crop-size 224", "image_shape", [3, 320, 224]),
        ("--image-shape 3,320,224", "crop_size", 224),
        ("--image-shape 3,224,320", "resize_short", 256),
        ("--rand-crop-ratio 3/4,4/3", "rand_crop_ratio", [3 / 4, 4 / 3]),
        ("--normalize-mean 0,0.5,1", "normalize_mean", [0.0, 0.5, 1.0]),
        ("--normalize-mean=-1,0,0", "normalize_mean", [-1.0, 0.0, 0.0]),
        ("--run-scope train_only", "run_scope", RunScope.TRAIN_ONLY),
        ("--profile-steps 0:1", "profile_steps", [0, 1]),
        ("--profile-steps 100:110", "profile_steps", [100, 110]),
        ("--profile-steps 100:110 --profile-steps None", "profile_steps", None),
        ("--sizes 64:0,96:5 --sizes None", "sizes", None),
        ("--freeze stem --freeze None", "freeze", None),
        ("--lookahead 5,0.5 --lookahead None", "lookahead", None),
        ("--amp", "amp", True),
        ("--amp --lr 1", "amp", True),
        ("--amp true", "amp", True),
        ("--amp", "amp_level", "O1"),
        ("--amp --amp-level O2", "amp_level", "O2"),
        ("--amp --use-pure-fp16", "amp_level", "O2"),
        ("--amp --use-pure-fp16 --amp-level O2", "amp_level", "O2"),
        ("--amp --use-pure-fp16 false", "amp_level", "O1"),
        ("--amp --amp-dtype bfloat16", "amp_dtype", "bfloat16"),
        ("--amp=True", "amp", True),
        ("--amp --amp false", "amp", False),
        ("--show-config false", "show_config", False),
        ("--show-config False", "show_config", False),
        ("--show-config 0", "show_config", False),
        *((f"--amp {text}", "amp", True) for text in ("yes", "On", "1")),
        *((f"--cuda-graph {text}", "cuda_graph", False) for text in ("no", "off", "False")),
        ("--from-checkpoint d --last-epoch-of-checkpoint None", "last_epoch_of_checkpoint", None),
        ("--from-checkpoint d --last-epoch-of-checkpoint auto", "last_epoch_of_checkpoint", "auto"),
        ("--from-checkpoint d --last-epoch-of-checkpoint 3", "last_epoch_of_checkpoint", 3),
    ],
)
def test_flag_value_is_parsed(text, name, value):
    parsed = getattr(parse(text), name)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("epochs: 3", "epochs", 3),
        ("lr: 1/8", "lr", 0.125),
        ("amp: true", "amp", True),
        ("show_config: no", "show_config", False),
        ("output_dir: with space", "output_dir", "with space"),
        ("normalize_mean: [-1, 0, 0.5]", "normalize_mean", [-1.0, 0.0, 0.5]),
        ("normalize_mean: 0,0,0.5", "normalize_mean", [0.0, 0.0, 0.5]),
        ("{last_epoch_of_checkpoint: None, from_checkpoint: d}", "last_epoch_of_checkpoint", None),
        ("sizes: '64:0, 96:5'", "sizes", ["64:0", "96:5"]),
        ("profile_steps: [10, 20]", "profile_steps", [10, 20]),
        ("freeze: stem, stages.0", "freeze", ["stem", "stages.0"]),
        ("epochs: null", "epochs", 90),
        ("from_checkpoint: null", "from_checkpoint", None),
        ("", "epochs", 90),
        ("# only a comment", "epochs", 90),
    ],
)
def test_yaml_takes_precedence_over_default(config_file, text, name, value):
    assert getattr(parse(f"--config {config_file(text)}"), name) == value


@pytest.mark.parametrize(
    ("text", "flags", "name", "value"),
    [
        ("epochs: 3", "--epochs 4", "epochs", 4),
        ("amp: true", "--amp false", "amp", False),
        ("show_config: false", "--show-config", "show_config", True),
        ("normalize_mean: [0, 0, 0]", "--normalize-mean 1,1,1", "normalize_mean", [1.0, 1.0, 1.0]),
    ],
)
def test_command_line_takes_precedence_over_yaml(config_file, text, flags, name, value):
    path = config_file(text)
    assert getattr(parse(f"--config {path} {flags}"), name) == value
    assert getattr(parse(f"{flags} --config={path}"), name) == value


@pytest.mark.parametrize(
    ("text", "flags", "values", "lines"),
    [
        (
            "momentum: 0.9",
            "--optimizer AdamW",
            {"momentum": 0.875, "optimizer": "AdamW"},
            ["--momentum 0.9 (not used by --optimizer AdamW)"],
        ),
        (
            "{crop_size: 64, rand_crop_scale: [0.5, 1]}",
            "--crop-padding 4",
            {"rand_crop_scale": [0.08, 1.0]},
            [
                "--rand-crop-scale 0.5,1.0 (not used by --crop-padding 4)",
            ],
        ),
        (
            "{amp: true, use_pure_fp16: true, scale_loss: 128}",
            "--amp false",
            {"amp": False, "use_pure_fp16": False, "amp_level": "O1", "scale_loss": 1.0},
            ["--scale-loss 128 (requires --amp)", "--use-pure-fp16 (requires --amp)"],
        ),
        (
            "{amp: true, amp_dtype: bfloat16}",
            "--use-pure-fp16",
            {"amp_dtype": "float16", "amp_level": "O2"},
            ["--amp-dtype bfloat16 (--use-pure-fp16: implies float16, but --amp-dtype is bfloat16)"],
        ),
        (
            "{image_shape: [3, 32, 32], crop_size: 32, resize_short: 36}",
            "--crop-size 64",
            {"image_shape": [4, 64, 64], "crop_size": 64, "resize_short": 73},
            [
                "--image-shape 3,32,32 (its shorter side differs from --crop-size 64)",
                "--resize-short 36 (smaller than --crop-size 64)",
            ],
        ),
        (
            "{image_shape: [3, 32, 32], crop_size: 32, resize_short: 36}",
            "--image-shape 3,64,64",
            {"crop_size": 64, "resize_short": 73},
            [
                "--crop-size 32 (--image-shape 3,64,64: its shorter side differs from --crop-size 32)",
                "--resize-short 36 (smaller than --crop-size 64)",
            ],
        ),
        (
            "{epochs: 16, sizes: '160:0,192:12'}",
            "--epochs 1",
            {"epochs": 1, "sizes": None},
            ["--sizes 160:0,192:12 (the last stage begins in epoch 12, but --epochs is 1)"],
        ),
        ("min_lr: 0.01", "--lr 0.001", {"min_lr": 0.0}, ["--min-lr 0.01 (exceeds --lr 0.001)"]),
        (
            "{freeze: stem, unfreeze_at: 5}",
            "--freeze None",
            {"unfreeze_at": None},
            ["--unfreeze-at 5 (requires --freeze)"],
        ),
        (
            "{from_checkpoint: a, last_epoch_of_checkpoint: auto}",
            "--from-pretrained-params b",
            {"from_checkpoint": None, "last_epoch_of_checkpoint": None, "from_pretrained_params": "b"},
            [
                "--from-checkpoint a (cannot be combined with --from-pretrained-params b)",
                "--last-epoch-of-checkpoint auto (requires --from-checkpoint DIR)",
            ],
        ),
        (
            "resume: true",
            "--overwrite",
            {"resume": False},
            ["--resume (continues the run that --overwrite deletes)"],
        ),
        (
            "crop_padding: 240",
            "--model-arch-name EfficientNet_Lite1",  # this network determines --crop-size
            {"crop_padding": 0},
            ["--crop-padding 240 (not below --crop-size 240, so crops could contain only padding)"],
        ),
        (
            "kernels: native",
            "--data-layout NCHW",
            {"kernels": "auto"},
            ["--kernels native (supports NHWC only)"],
        ),
        (
            "dali_device: gpu",
            "--device cpu",
            {"dali_device": "auto"},
            ["--dali-device gpu (requires a GPU, but this run is on the CPU)"],
        ),
    ],
)
def test_flag_on_command_line_drops_conflicting_value_of_file(config_file, text, flags, values, lines):
    path = config_file(text)
    can_resume = not any(name in text + flags for name in ("resume", "overwrite", "from"))
    for resume in ["", " --resume"][: 1 + can_resume]:  # a resumed run drops the same values
        args = parse(f"--config {path} {flags}{resume}")
        assert args.dropped == [f"--config {path}: ignoring {line}" for line in lines]
        assert {name: getattr(args, name) for name in values} == values
        for name in values:
            assert args.is_explicit(name) == (args.origin(name) == "command line")


def test_time_budget_on_command_line_drops_epochs_of_file(config_file):
    path = config_file("epochs: 16")
    args = parse(f"--config {path} --budget-minutes 5")
    assert (args.budget_minutes, args.is_explicit("epochs")) == (5.0, False)
    reason = f"--budget-minutes 5: conflicts with --epochs 16 (file {path})"
    assert args.dropped == [f"--config {path}: ignoring --epochs 16 ({reason})"]
    assert parse(f"--config {config_file('budget_minutes: 5')} --epochs 16").budget_minutes is None


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        # conflicts between two flags on the command line
        ("lr: 0.1", "--optimizer AdamW --momentum 0.9", "--momentum 0.9: not used by --optimizer AdamW; remove it"),
        # conflicts between two values of the file
        ("{optimizer: AdamW, momentum: 0.9}", "--lr 0.1", "--momentum 0.9: not used by --optimizer AdamW; remove it"),
        ("{from_checkpoint: a, from_pretrained_params: b}", "", "--from-checkpoint a: cannot be combined with"),
        # the file makes the flag on the command line unused
        ("optimizer: AdamW", "--momentum 0.9", "--momentum 0.9: not used by --optimizer AdamW; remove it"),
        ("amp: false", "--scale-loss 128", "--scale-loss 128: requires --amp; add it"),
        (
            "{lr_scheduler: Piecewise, lr_decay_epochs: [30, 60, 80]}",
            "--iter-unit batch --num-iter 99",
            "--iter-unit batch: --lr-scheduler Piecewise has no default steps",
        ),
        ("epochs: 5", "--unfreeze-at 7 --freeze stem", "--unfreeze-at 7: must be below --epochs 5; use an earlier"),
        # the value of the file is invalid without a conflict
        ("rotate_degrees: 200", "--lr 0.1", "--rotate-degrees 200: exceeds 180 degrees"),
    ],
)
def test_other_conflicts_with_file_are_errors(config_file, text, flags, message):
    assert message in error_of(f"--config {config_file(text)} {flags}")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--benchmark --profile-steps 10:20",
        "--amp --use-pure-fp16",
        "--amp --amp-dtype bfloat16 --amp-level O2",
        "--lr 1/3 --amp --show-config false --image-shape 3,224,224 --rand-crop-ratio 1,1 --device cpu",
        "--run-scope eval_only --from-checkpoint d --last-epoch-of-checkpoint auto",
        "--run-scope eval_only --from-checkpoint d --last-epoch-of-checkpoint 0 --weight-decay 1e-7",
    ],
)
def test_as_dict_round_trips_through_config_file(config_file, flags):
    values = parse(flags).as_dict()
    assert parse(f"--config {config_file(yaml.safe_dump(values))}").as_dict() == values


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--budget-minutes 5 --ema 0.9",
        "--budget-minutes 5 --warmup-epochs 2",
        "--choose-recipe --batch-size 7",
        "--iter-unit batch --num-iter 9 --lr-scheduler Poly",
        "--resume --output-dir d --lr 0.1",
        "--from-checkpoint d --last-epoch-of-checkpoint auto --seed 3",
        "--from-pretrained-params d --multi-label",
    ],
)
def test_printed_config_specifies_the_same_run(config_file, flags):
    args = parse(flags)
    again = parse(f"--config {config_file(parsing.as_yaml(args))}")
    assert again.as_dict() == args.as_dict()
    assert [*validation.warnings(again)] == [*validation.warnings(args)]
    # The run may determine these flags if they are not explicit.
    names = {"data_layout", "cuda_graph", "show_config", "asp", "num_of_class", "image_shape"}
    names |= {"epochs", "warmup_epochs"} if args.budget_minutes else set()
    names |= {"lr", "batch_size", "optimizer", "dali_num_threads"} if args.choose_recipe else set()
    names |= {"momentum", "lr", "ema"} if args.resume or args.last_epoch_of_checkpoint else set()
    assert {name: again.is_explicit(name) for name in names} == {name: args.is_explicit(name) for name in names}


def test_as_dict_excludes_flags_of_the_command(config_file):
    values = parse(f"--config {config_file('')} --print-config --inference-dir d").as_dict()
    assert set(values) == FLAGS.keys() - {"config", "print_config", "inference_dir"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--bach-size 3", "--bach-size: unknown flag; use --batch-size"),
        ("--bach-size=3", "--bach-size: unknown flag; use --batch-size"),
        ("--benchmark_steps 3", "--benchmark_steps: unknown flag; use --benchmark-steps"),
        ("--foo 3", "--foo: unknown flag; see --help"),
        ("--conf nowhere.yaml", "--conf: unknown flag; use --config"),
        ("--learning-rate 3", "--learning-rate: unknown flag; use --lr"),
        ("--num_classes=3", "--num_classes: unknown flag; use --num-of-class"),
        ("--data-dir d", "--data-dir: unknown flag; use --image-root"),
        ("--eval", "--eval: unknown flag; use --run-scope eval_only"),
        ("--cpu-decoder-load 0.4", "--cpu-decoder-load: this flag no longer exists; remove it; --hw-decoder-load"),
        (
            "--model-prefix a/b",
            "--model-prefix: 'a/b' is not a valid file name; use at most 240 bytes without / and without a leading dot",
        ),
        ("--model-prefix=", "--model-prefix: '' is not a valid file name"),
        (f"--model-prefix {'é' * 121}", "leading dot, such as"),
        ("--mixup 1e7", "--mixup: 1e7 is too large; use a number up to 1e6, such as 0.2"),
        ("--budget-minutes 1e6", "--budget-minutes: 1e6 minutes are too long; use at most 527040, which is a year"),
        ("--lr-decay-factor 1e30", "--lr-decay-factor: 1e30 is too large; use a number up to 1000, such as 0.1"),
        ("stray", "'stray'"),
        ("--epochs 3 stray", "'stray'"),
    ],
)
def test_unknown_argument_is_an_error(text, expected):
    assert expected in error_of(text)


@pytest.mark.parametrize("flag", ["--epoch", "--output", "--conf", "--normalize-m"])
def test_abbreviation_is_an_error(flag):
    assert f"{flag}: unknown flag; use {flag}" in error_of(f"{flag} 3")


@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action.nargs not in (0, "?")])
def test_missing_value_is_an_error(name):
    assert flag_name(name) in error_of(flag_name(name))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--epochs", "0"),
        ("--epochs", "1.5"),
        ("--epochs", "many"),
        ("--batch-size", "-8"),
        ("--seed", "-1"),
        ("--dali-prefetch", "0"),
        ("--benchmark-warmup-steps", "-1"),
        ("--lr", "fast"),
        ("--normalize-scale", "1/0"),
        ("--normalize-scale", "1/x"),
        ("--label-smoothing", "1.5"),
        ("--momentum", "-0.1"),
        ("--hw-decoder-load", "nan"),
        ("--hw-decoder-load", "1.1"),
        ("--amp", "maybe"),
        ("--amp-dtype", "fp8"),
        ("--amp-level", "O3"),
        ("--run-scope", "test"),
        ("--data-layout", "CHWN"),
        ("--data-format", "zip"),
        ("--device", "tpu"),
        ("--dali-device", "tpu"),
        ("--color-jitter", "-0.1"),
        ("--lighting", "much"),
        ("--rotate-degrees", "-5"),
        ("--auto-augment", "autoaugment"),
        ("--auto-augment-magnitude", "31"),
        ("--interp", "nearest"),
        ("--optimizer", "Adam"),
        ("--lr-scheduler", "Step"),
        ("--mask-algo", "mask_3d"),
        ("--last-epoch-of-checkpoint", "latest"),
        ("--last-epoch-of-checkpoint", "-1"),
        ("--model-prefix", "a" * 241),
        ("--model-prefix", ".hidden"),
        ("--classifier-lr-factor", "1001"),
        ("--ema", "0.99999999"),
        ("--opt-epsilon", "9e-31"),
        ("--freeze", "stem,,stages.0"),
        ("--freeze", "stem,all-but-classifier"),
        ("--lr-decay-by-layer", "0"),
        *((flag, "1") for flag in ("--dropout", "--drop-path", "--ema", "--bn-momentum")),
        *(("--lookahead", value) for value in ("6", "0,0.5", "6,1.5", "6,0.5,1")),
    ],
)
def test_value_of_wrong_type_is_an_error(config_file, flag, value):
    path = config_file(f"{flag[2:].replace('-', '_')}: {value}")
    for message in (error_of(f"{flag} {value}"), error_of(f"--config {path}")):
        assert flag in message
        assert value in message


@pytest.mark.parametrize("flag", ["--crop-size", "--output-dir", "--run-scope"])
def test_two_dashes_are_not_a_value(flag):
    """argparse would interpret two dashes as an empty list."""
    assert error_of(f"{flag}=--") == f"{flag} --: no value; add a value"


def test_fraction_of_lookahead_that_is_0_in_float32_is_an_error():
    assert error_of("--lookahead 5,1e-320").startswith("--lookahead: '5,1e-320': expected K,A with a whole number")
    assert parse("--lookahead 5,1e-6").lookahead == [5, 1e-6]


@pytest.mark.parametrize("name", ["--lookahead", "--auto-augment", "--resume", "--sizes"])
def test_long_values_are_shortened_in_messages(name):
    with pytest.raises(UsageError, match=name) as error:
        config.parse_args([f"{name}={'x' * 100_000}"])
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--image-shape", "1,224,224"),
        ("--image-shape", "224,224"),
        ("--image-shape", "224"),
        ("--image-shape", "5,224,224"),
        ("--image-shape", "3,224,224,1"),
        ("--image-shape", "3,0,0"),
        ("--rand-crop-scale", "0.5"),
        ("--rand-crop-scale", "0.0,1.0"),
        ("--rand-crop-scale", "0.9,0.1"),
        ("--rand-crop-scale", "0.5,1.5"),
        ("--rand-crop-ratio", "1.5,0.5"),
        ("--rand-crop-ratio", "-1.0,1.0"),
        ("--rand-crop-ratio", "0.5,1.0,2.0"),
        ("--normalize-mean", "0.5,0.5"),
        ("--normalize-std", "0.5,0.5"),
        ("--normalize-std", "0.0,1.0,1.0"),
        ("--normalize-std", "-1.0,1.0,1.0"),
    ],
)
def test_invalid_list_is_an_error(flag, value):
    assert f"{flag} {value}: " in error_of(f"{flag}={value}")


@pytest.mark.parametrize(
    ("flag", "value", "part"), [("--image-shape", "4,x,224", "'x'"), ("--normalize-std", "1,,1", "''")]
)
def test_list_element_of_wrong_type_is_an_error(flag, value, part):
    message = error_of(f"{flag} {value}")
    assert flag in message
    assert part in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--image-shape 3,192,192 --crop-size 224",
            ["--image-shape 3,192,192", "--crop-size 224", "--image-shape 3,224,224", "--crop-size 192"],
        ),
        ("--image-shape 4,224,192 --crop-size 224", ["--image-shape 4,224,192", "--crop-size 224", "--crop-size 192"]),
        ("--rotate-degrees 181", ["--rotate-degrees 181", "180"]),
        ("--predictions f --benchmark", ["--predictions f: requires a complete evaluation; remove it or --benchmark"]),
        ("--predictions f --run-scope train_only", ["--predictions f: ", "remove it or --run-scope train_only"]),
        (
            "--auto-augment trivial --auto-augment-magnitude 5",
            ["--auto-augment-magnitude 5: not used by --auto-augment trivial", "use --auto-augment randaug"],
        ),
        ("--rand-crop-ratio 1e-6,1e6", ["--rand-crop-ratio 1e-06,1e+06: out of range", "0.001 to 1000"]),
        ("--rand-crop-ratio 1,1001", ["--rand-crop-ratio 1,1001: out of range"]),
        ("--rand-crop-scale 1e-40,1", ["--rand-crop-scale 1e-40,1: out of range; use values from 1e-06 to 1"]),
        ("--rand-crop-scale 0.9,0.1", ["--rand-crop-scale 0.9,0.1: MIN exceeds MAX; use a range such as 0.08,1"]),
        ("--rand-crop-scale 0.5,1.5", ["--rand-crop-scale 0.5,1.5: MAX exceeds 1; use a range such as 0.08,1"]),
        ("--rand-crop-scale 2,2", ["--rand-crop-scale 2.0,2.0: MAX exceeds 1; use a range such as 0.08,1"]),
        ("--rand-crop-ratio 2,1", ["--rand-crop-ratio 2.0,1.0: MIN exceeds MAX; use a range such as 0.75,1.33"]),
        (
            "--normalize-std 0,1,1",
            ["--normalize-std 0.0,1.0,1.0: expected 3 positive numbers, such as 0.229,0.224"],
        ),
        ("--normalize-mean 0,1", ["--normalize-mean 0.0,1.0: expected 3 numbers, such as 0.485,0.456,0.406"]),
        (
            "--crop-padding 32 --crop-size 32",
            ["--crop-padding 32: not below --crop-size 32, so crops could contain only padding; use a smaller value"],
        ),
        (
            "--crop-padding 4 --rand-crop-scale 0.5,1",
            ["--rand-crop-scale 0.5,1.0: not used by --crop-padding 4; remove it, or use --crop-padding 0"],
        ),
        ("--rand-crop-scale 0.5", ["--rand-crop-scale 0.5: expected 2 positive numbers, such as 0.08,1"]),
        ("--color-jitter 1e6", ["--color-jitter 1e+06: out of range", "0 to 100"]),
        ("--color-jitter 1e-8", ["--color-jitter 1e-08: too small; use 0, or 1e-06 or more"]),
        ("--rotate-degrees 1e-46", ["--rotate-degrees 1e-46: too small; use 0, or 1e-06 or more"]),
        ("--lighting 1e38", ["--lighting 1e+38: out of range", "0 to 100"]),
        ("--normalize-scale 1e-300", ["--normalize-scale 1e-300: out of range; use values from 1e-12 to 1e+12"]),
        ("--normalize-std 1,1,1e30", ["--normalize-std 1,1,1e+30: out of range; use values from 1e-12 to 1e+12"]),
        ("--normalize-mean 0,-1e30,0", ["--normalize-mean 0,-1e+30,0: out of range; use values from -1e+12 to 1e+12"]),
        ("--resize-short 100000", ["--resize-short: 100000 is too large", "1 to 8192"]),
        ("--resize-short 4000 --image-shape 3,1,3", ["--resize-short 4000", "--image-shape 3,1,3", "2730 or less"]),
        ("--resize-short 223", ["--resize-short 223", "--crop-size 224"]),
        ("--from-checkpoint a --from-pretrained-params b", ["--from-checkpoint a", "--from-pretrained-params b"]),
        ("--last-epoch-of-checkpoint auto", ["--last-epoch-of-checkpoint auto", "--from-checkpoint"]),
        ("--last-epoch-of-checkpoint 0", ["--last-epoch-of-checkpoint 0", "--from-checkpoint"]),
        ("--run-scope eval_only", ["--run-scope eval_only", "--from-checkpoint", "--from-pretrained-params"]),
        ("--use-pure-fp16", ["--use-pure-fp16", "--amp"]),
        ("--amp false --use-pure-fp16", ["--use-pure-fp16", "--amp"]),
        ("--scale-loss 128", ["--scale-loss 128", "--amp"]),
        ("--mask-algo mask_2d_best", ["--mask-algo mask_2d_best", "--prune-model"]),
        ("--use-dynamic-loss-scaling", ["--use-dynamic-loss-scaling", "--amp"]),
        ("--amp-level O2", ["--amp-level O2: requires --amp"]),
        ("--amp-dtype bfloat16", ["--amp-dtype bfloat16: requires --amp"]),
        ("--amp --amp-level O1 --use-pure-fp16", ["--amp-level is O1", "--use-pure-fp16"]),
        ("--amp --amp-dtype bfloat16 --use-pure-fp16", ["--amp-dtype is bfloat16", "--amp-level O2"]),
        ("--amp --amp-dtype bfloat16 --use-dynamic-loss-scaling", ["--use-dynamic-loss-scaling", "bfloat16", "remove"]),
        ("--amp --amp-dtype bfloat16 --scale-loss 128", ["--scale-loss 128", "bfloat16", "remove"]),
        ("--amp --amp-dtype bfloat16 --amp-level O2 --asp --prune-model", ["--asp", "bfloat16", "--amp-level O1"]),
        ("--prune-model", ["--prune-model", "--asp"]),
        ("--freeze stem --unfreeze-at 90", ["--unfreeze-at 90: must be below --epochs 90"]),
        ("--sizes 128:0,224:90", ["the last stage begins in epoch 90, but --epochs is 90"]),
        ("--asp", ["--asp", "--prune-model", "--from-checkpoint"]),
        ("--min-lr 0.3 --lr 0.2", ["--min-lr 0.3: exceeds --lr 0.2; use a smaller value"]),
        ("--unfreeze-at 1", ["--unfreeze-at 1: requires --freeze; add it, or use --unfreeze-at None"]),
        ("--sizes 128:0,224:1 --freeze stem --unfreeze-at 90", ["--unfreeze-at 90: must be below --epochs 90"]),
        ("--optimizer RAdam --freeze stem", ["--optimizer RAdam: its formula requires that all layers are trained"]),
        ("--optimizer RAdam --opt-epsilon 1e-13", ["--opt-epsilon 1e-13: too small for --optimizer RAdam"]),
        ("--iter-unit batch", ["--iter-unit batch: requires the number of training steps; add --num-iter N"]),
        ("--iter-unit batch --num-iter 5 --lr-scheduler Piecewise", ["--lr-scheduler Piecewise has no default steps"]),
        # flags that are set to their defaults and have no effect
        (
            "--iter-unit batch --num-iter 5 --epochs 90",
            ["--epochs 90: not used by --iter-unit batch; remove it, or use"],
        ),
        ("--optimizer AdamW --momentum 0.875", ["--momentum 0.875: not used by --optimizer AdamW"]),
        ("--lr-decay-epochs 30,60,80", ["--lr-decay-epochs 30.0,60.0,80.0: not used by --lr-scheduler Cosine"]),
        ("--amp-dtype float16", ["--amp-dtype float16: requires --amp; add it, or remove --amp-dtype"]),
        ("--amp-level O1", ["--amp-level O1: requires --amp; add it, or remove --amp-level"]),
        ("--scale-loss 1", ["--scale-loss 1: requires --amp; add it, or remove --scale-loss"]),
        ("--mask-algo mask_1d", ["--mask-algo mask_1d: requires --prune-model; add it, or remove --mask-algo"]),
        ("--budget-minutes 5 --epochs 3", ["--budget-minutes 5: conflicts with --epochs 3 (command line); remove one"]),
        ("--budget-minutes 5 --profile-steps 1:2", ["--budget-minutes 5: not supported with --profile-steps; remove"]),
        (
            "--patience 3 --run-scope train_only",
            ["--patience 3: requires evaluations; use --patience 0, or remove --run-scope"],
        ),
        (
            "--tensorboard-dir d --benchmark",
            ["--tensorboard-dir d: not supported with --benchmark; remove one of them"],
        ),
        (
            "--tensorboard-dir d --run-scope eval_only --from-checkpoint c",
            ["--tensorboard-dir d: not supported with --run-scope eval_only"],
        ),
        ("--report-html f --benchmark", ["--report-html f: not supported with --benchmark; remove one of them"]),
        ("--report-html f --data-format synthetic", ["--report-html f: not supported with --data-format synthetic"]),
        ("--predictions f --data-format synthetic", ["--predictions f: not supported with --data-format synthetic"]),
        *(
            (f"--multi-label --data-format {kind}", [f"--data-format {kind}: not supported with --multi-label"])
            for kind in ("filelist", "tfrecord", "webdataset", "lmdb", "parquet")
        ),
        *(
            (f"--program-representation pir {flags}", ["--program-representation pir: not supported with", flags])
            for flags in ("--qat", "--teacher d")
        ),
        ("--tta flip --benchmark", ["--tta flip: requires an evaluation; remove it or --benchmark"]),
        (
            "--tta flip --run-scope train_only",
            ["--tta flip: requires an evaluation; remove it or --run-scope"],
        ),
        (
            "--run-scope eval_only --from-pretrained-params d --pretrained-mismatch skip-classifier",
            ["--pretrained-mismatch skip-classifier: leaves the classifier untrained, but --run-scope is eval_only"],
        ),
    ],
)
def test_conflicting_flags_are_errors(flags, expected):
    message = error_of(flags)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    "flags",
    [
        "--run-scope eval_only --benchmark",
        "--amp --amp-dtype bfloat16 --asp --prune-model",
        "--run-scope eval_only --from-pretrained-params d",
        "--last-epoch-of-checkpoint None",
        "--image-shape 3,32,32 --crop-size 32 --resize-short 32",
        "--rand-crop-ratio 0.001,1000 --rand-crop-scale 1e-6,1 --color-jitter 100 --lighting 100 --resize-short 8192 "
        "--auto-augment randaug --auto-augment-magnitude 30",
        "--normalize-scale 1e12 --normalize-mean=-1e12,0,1e12 --normalize-std 1e-12,1,1e12",
        *("--lr 0.1 --min-lr 0.1", "--rand-crop-scale 1,1 --rand-crop-ratio 1,1", "--resize-short 224"),
        *("--rotate-degrees 180", "--rotate-degrees 1e-6 --color-jitter 1e-6"),
        *("--optimizer RAdam --opt-epsilon 1e-12", "--freeze stem --unfreeze-at 1 --epochs 2"),
        *("--sizes 24:0,32:1 --epochs 2", "--iter-unit batch --num-iter 1"),
        "--iter-unit batch --num-iter 1 --lr-scheduler Piecewise --lr-decay-epochs 0",
        "--iter-unit batch --num-iter 99 --lr-scheduler Piecewise --lr-decay-epochs 30,60,80",
        "--iter-unit batch --num-iter 1 --save-interval-steps 0 --budget-minutes None",
        *("--num-iter None", "--use-pure-fp16 false"),
        "--iter-unit batch --num-iter 100 --freeze stem --unfreeze-at 90 --sizes 24:0,32:90",
        *("--asp --resume", "--asp --from-checkpoint d", "--asp --prune-model --mask-algo mask_2d_best"),
        *("--amp --amp-level O2 --asp --prune-model", "--amp --use-pure-fp16 --amp-level O2"),
        *("--amp --amp-dtype bfloat16 --amp-level O2", "--amp --use-dynamic-loss-scaling"),
        *("--multi-label --label-offset 0", "--multi-label --data-format recordio"),
        *("--patience 1", "--run-scope train_only --report-html f", "--predictions f", "--tensorboard-dir d"),
        *("--tta flip --run-scope eval_only --benchmark", "--budget-minutes 5 --sizes 32:0,48:90"),
        *("--budget-minutes 5 --freeze stem", "--budget-minutes 5 --freeze stem --unfreeze-at 90"),
        *("--from-pretrained-params d --pretrained-mismatch skip-classifier", "--resume --from-checkpoint d"),
        *("--from-checkpoint d --last-epoch-of-checkpoint 0", "--mixup 1e6 --cutmix 1e6"),
        *("--rand-crop-scale 0.5,0.5 --rand-crop-ratio 2,2", f"--model-prefix {'a' * 240}", "--budget-minutes 527040"),
        *("--budget-minutes None", "--classifier-lr-factor 1000", "--optimizer AdamW --opt-epsilon 1e-30"),
        *("--ema 0.9999999", "--bn-momentum None", "--overwrite", "--resume", "--benchmark"),
    ],
)
def test_valid_combinations_and_limits_are_accepted(flags):
    validation.check(parse(flags))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bach_size: 3", "bach_size: unknown key; use batch_size, or see --help"),
        ("batch-size: 3", "batch-size: unknown key; use batch_size, or see --help"),
        ("5: 3", "5: unknown key"),
        ("config: other.yaml", "config: unknown key"),
        ("confi: other.yaml", "confi: unknown key; use show_config, or see --help"),
        ("- epochs", ": not a mapping; write lines of the form `flag: value`"),
        ("epochs 3", ": not a mapping; write lines of the form `flag: value`"),
        ("normalize_mean: [0, 0", "not valid YAML"),
        ("epochs: 3\n\tlr: 1", "not valid YAML"),
        ("eval: true", "eval: unknown key; use run_scope: eval_only"),
        (
            "image_shape: {channels: 3}",
            "image_shape: nested values are not supported; use a single value or a flat list",
        ),
        ("image_shape: [{channels: 3}]", "image_shape: nested values are not supported; use a single value or a"),
        ("lr: fast", "--lr: 'fast' is not a number"),
        ("image_shape: 3 32 32", "--image-shape: '3 32 32' has no commas; use 3,32,32"),
    ],
)
def test_invalid_config_file_is_an_error(config_file, text, expected):
    path = config_file(text)
    message = error_of(f"--config {path}")
    assert f"--config {path}" in message
    assert expected in message


def test_unreadable_config_file_is_an_error(tmp_path):
    assert f"--config {tmp_path}/none.yaml: cannot be read" in error_of(f"--config {tmp_path}/none.yaml")
    assert f"--config {tmp_path}: cannot be read" in error_of(f"--config {tmp_path}")


def test_parsing_imports_neither_paddle_nor_dali():
    code = "import sys, config; config.parse_args([]); sys.exit(bool({'paddle', 'nvidia.dali'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lr", "nan"], "nan is not finite"),
        (["--lr=-1"], "-1 is negative"),
        (["--scale-loss", "0"], "0 is not positive"),
        (["--normalize-scale", "0"], "0 is not positive"),
        (["--rand-crop-scale", "nan,1"], "nan is not finite"),
        (["--lr", "1e400"], "1e400 is not finite"),
        (["--clip-grad-norm", "1e39"], "1e39 is out of range; use a number from -1e.38 to 1e.38"),
        (["--normalize-mean", "0,-1e39,0"], "-1e39 is out of range; use a number from -1e.38 to 1e.38"),
        (["--dali-random-seed", str(2**32)], f"too large; use a whole number from 0 to {2**32 - 1}"),
        (["--seed", str(2**32)], f"too large; use a whole number from 0 to {2**32 - 1}"),
        (["--dali-num-threads", "1025"], "1025 is too large; use a whole number from 1 to 1024"),
        (["--num-of-class", str(2**31)], f"{2**31} is too large; use a whole number from 1 to {2**24}"),
        (["--profile-steps", "3:3"], "--profile-steps: 3:3 contains no step"),
        (["--profile-steps", "4:3"], "4:3 contains no step"),
        (["--profile-steps=-1:3"], "-1 is too small"),
        (["--profile-steps", "a:3"], "'a' is not a whole number"),
        (["--profile-steps", "3"], "'3' is not a range of steps; use A:B"),
        (["--profile-steps", "1:2:3"], "'1:2:3' is not a range of steps; use A:B"),
    ],
)
def test_numbers_out_of_range_are_errors(flags, expected):
    with pytest.raises(UsageError, match=expected):
        config.parse_args(flags)


def test_each_flag_has_a_help_text_without_full_stop():
    assert [action.dest for action in PARSER._actions if not action.help or action.help.endswith(".")] == []


INTEGER_FLAGS = [flag_name(a.dest) for a in PARSER._actions if type(a.default) is int] + [
    *("--num-of-class", "--image-shape", "--profile-steps", "--last-epoch-of-checkpoint")
]


@pytest.mark.parametrize("value", ["9" * 11, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("name", INTEGER_FLAGS)
def test_integer_flags_have_an_upper_limit(name, value):
    with pytest.raises(UsageError, match=rf"^{name}: .*use a whole number from [01] to [0-9]+$") as error:
        config.parse_args([name, f"1:{value}" if name == "--profile-steps" else value])
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model_prefix: no\n", "model_prefix: YAML parses the value as the boolean false; put it in quotes"),
        (b'skip_list: "a\\0b"', r"--skip-list=a\x00b: contains a null byte; remove it"),
        (
            b"image_shape: [3, [32], 32]",
            "image_shape: nested values are not supported; use a single value or a flat list",
        ),
        (b"\xff\xfe\xfa", "not valid YAML"),
        (b"[]", ": not a mapping; write lines of the form `flag: value`"),
        (b"false", ": not a mapping; write lines of the form `flag: value`"),
    ],
)
def test_ambiguous_yaml_is_an_error(tmp_path, content, expected):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        config.parse_args(["--config", str(path)])


def test_numbers_in_yaml_are_not_converted(config_file):
    """A YAML 1.1 parser would convert these values to 7680, 620, 20240131, a date and 83."""
    lines = "sizes: 128:0", "profile_steps: 10:20", "output_dir: 2024_01_31", "image_root: 2024-01-31"
    args = config.parse_args(["--config", str(config_file("\n".join([*lines, "tensorboard_dir: 0123"])))])
    assert (args.sizes, args.profile_steps) == (["128:0"], [10, 20])
    assert (args.output_dir, args.image_root, args.tensorboard_dir) == ("2024_01_31", "2024-01-31", "0123")


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: &a [x, x]\nb: [*a, *a]\n", "not valid YAML (alias"),
        ("epochs: &e 3\nwarmup_epochs: *e\n", "not supported; replace it with its value"),
        ("epochs: " + "[" * 30_000, "maximum recursion depth exceeded"),
        ("a: " * 20_000, "not valid YAML"),
        ("epochs: " + "9" * 5000, "is not a whole number; use"),
        ("epochs: 0x" + "f" * 5000, "is not a whole number; use"),
        ("epochs: !!int ''", "not valid YAML"),
        ("epochs: !!int 0x" + "f" * 5000, "not valid YAML"),
        ("epochs: !!timestamp 2001-99-99", "not valid YAML"),
        ("epochs: !!python/object/apply:os.getpid []", "not valid YAML"),
        ("? [1, 2]\n: 3", "not valid YAML"),
        ("epochs: 3\n" * 10_000, "cannot be read (100000 bytes, limit 65536)"),
    ],
    ids=range(12),
)
def test_hostile_config_file_is_an_immediate_error(config_file, content, expected):
    assert expected in error_of(f"--config {config_file(content)}")


@pytest.mark.timeout(20)
def test_pipe_or_device_as_config_file_is_an_immediate_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        assert f"--config {path}: cannot be read (not a regular file)" in error_of(f"--config {path}")


def test_all_conflicts_are_reported_together(config_file):
    with pytest.raises(UsageError) as error:
        parse(
            f"--config {config_file('prune_model: true')} --scale-loss 128 --resize-short 100 "
            "--last-epoch-of-checkpoint 3"
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for part in ("--prune-model", "--scale-loss 128", "--resize-short 100", "--last-epoch-of-checkpoint 3"):
        assert sum(part in line for line in lines) == 1
    with pytest.raises(UsageError) as error:
        parse("--learning-rate 1 --epochs 3 --workers 4")
    assert str(error.value).splitlines() == [
        "--learning-rate: unknown flag; use --lr",
        "--workers: unknown flag; use --dali-num-threads",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--from-checkpoint a --from-pretrained-params b", "cannot be combined with --from-pretrained-params b"),
        ("--resume --overwrite", "--resume: continues the run that --overwrite deletes"),
        ("--resume --run-scope eval_only", "--resume: continues training, but --run-scope is eval_only"),
        ("--pretrained-mismatch skip-classifier", "requires --from-pretrained-params DIR; add it"),
    ],
)
def test_mutually_exclusive_start_flags_are_errors(flags, expected):
    assert expected in error_of(flags)


def test_aliases_refer_to_existing_flags():
    flags = {option for action in PARSER._actions for option in action.option_strings}
    assert not {f"--{alias}" for alias in parsing.ALIASES} & flags
    assert {f"--{target.split()[0]}" for target in parsing.ALIASES.values()} <= flags


def test_alias_as_yaml_key_suggests_the_key(config_file):
    assert "learning_rate: unknown key; use lr" in error_of(f"--config {config_file('learning_rate: 1')}")
    assert "data-dir: unknown key; use image_root" in error_of(f"--config {config_file('data-dir: x')}")


def test_removed_flag_is_an_error_in_a_file_and_ignored_in_a_checkpoint(config_file):
    path = config_file("cpu_decoder_load: 0.4")
    assert "cpu_decoder_load: this key no longer exists; remove it" in error_of(f"--config {path}")
    recorded = parse("").as_dict()
    assert parsing.from_dict(recorded | {"cpu_decoder_load": 0.4}).as_dict() == parsing.from_dict(recorded).as_dict()


def test_settings_record_the_origin_of_each_value(config_file):
    path = config_file("{epochs: 90, lr: null, crop_size: 64, momentum: 0.5}")
    args = parse(f"--config {path} --amp --crop-size 32")
    origins = {"epochs": f"file {path}", "momentum": f"file {path}", "amp": "command line", "crop_size": "command line"}
    origins |= {"image_shape": "--crop-size", "resize_short": "--crop-size", "lr": "default"}
    assert {name: args.origin(name) for name in origins} == origins
    assert [name for name in origins if args.is_explicit(name)] == list(origins)[:4]
    entry = args.as_entry()
    assert (entry["run_scope"], entry["crop_size"]) == ("train_eval", 32)
    assert set(entry["explicit_flags"]) == set(list(origins)[:4])
    assert (args.explicit("epochs"), args.explicit("lr")) == (90, None)
    assert (args.flag_value("epochs"), args.flag_value("seed")) == ((90, True), (0, False))
    args.resolve("machine", epochs=90, seed=1)  # only values that change get a new origin
    origins |= {"seed": "machine"}
    args.replace(epochs=80, beta1=0.8)
    assert (args.epochs, args.beta1) == (80, 0.8)
    origins |= {"beta1": "default"}
    for copy in (args, args.copy(), args.stage({"--sizes": {"batch_size": 3}})):
        assert {name: copy.origin(name) for name in origins} == origins
    assert [settings.run is args for settings in (args, args.copy(), args.stage({}))] == [True, False, True]
    stage = args.stage({"--sizes": {"batch_size": 3}})
    assert (stage.run is args, stage.is_frozen, stage.batch_size) == (True, True, 3)
    assert (stage.origin("batch_size"), stage.is_explicit("epochs")) == ("--sizes", True)


def test_only_values_of_the_user_are_explicit():
    """Values of an earlier run, and values that the program sets, are not explicit, but no other flag derives them."""
    recorded = parsing.from_dict(parse("--crop-size 96 --lr 0.5").as_dict())
    assert [name for name in FLAGS if recorded.is_explicit(name)] == []
    recorded.set("internal", model_prefix="x")
    inheritance.follow(recorded)
    assert (recorded.model_prefix, recorded.resize_short, recorded.lr) == ("x", 110, 0.5)
    recorded.batch_size = 4
    assert [name for name in FLAGS if recorded.is_explicit(name)] == ["batch_size"]


def test_changed_flags_include_derived_values():
    assert parsing.changed(parse("--epochs 3").as_dict()) == {"epochs": 3}
    changed = {"crop_size": 96, "image_shape": [4, 96, 96], "resize_short": 110}
    assert parsing.changed(parse("--crop-size 96").as_dict()) == changed


def test_frozen_settings_cannot_be_assigned():
    args = parse()
    assert (args.is_frozen, args.start_paths()) == (False, {})
    assert parse("--from-checkpoint d").start_paths() == {"--from-checkpoint": "d"}
    args.epochs = 3
    assert (args.epochs, args.origin("epochs")) == (3, "Python")
    with pytest.raises(AttributeError, match="settings.epoch: not a flag"):
        args.epoch = 3
    args.finalize()
    for change in (lambda: setattr(args, "epochs", 4), lambda: args.set("data", num_of_class=4)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="these settings are frozen"):
            change()
    assert args.copy(epochs=4).epochs == 4 and args.epochs == 3


def test_each_flag_belongs_to_one_module():
    names = [name for module in MODULES for name in field.flags(module.Settings)]
    assert sorted(names) == sorted(FLAGS)
    order = ORDER.replace("-", "_").split()
    assert sorted(order) == sorted(set(order) & set(FLAGS))


def test_part_contains_the_values_of_a_component():
    args = parse("--lr 0.5 --lr-scheduler Piecewise --lr-decay-epochs 1,2")
    part = args.part(rates.Settings)
    assert (part.lr, part.lr_decay_epochs, part.lr_power) == (0.5, [1.0, 2.0], 2.0)
    assert args.part(rates.Settings) is part  # the same object until a value changes
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.lr = 1.0
    assert args.copy(lr=1.0).part(rates.Settings).lr == 1.0
    args.lr = 2.0
    assert (args.part(rates.Settings).lr, part.lr) == (2.0, 0.5)
    assert parse().part(rates.Settings) == rates.Settings()


@pytest.mark.parametrize(
    ("explicit", "names", "expected"),
    [
        (
            "",
            IMAGES,
            {"image_shape": [3, 96, 96], "crop_size": 96, "interp": "cubic", "model_prefix": "resnet_50_paddle"},
        ),
        ("--crop-size 64", IMAGES, {"image_shape": [3, 64, 64], "crop_size": 64}),
        ("--image-shape 4,64,64", IMAGES, {"image_shape": [4, 64, 64], "crop_size": 64}),
        ("--interp lanczos3", IMAGES, {"interp": "lanczos3"}),
        (
            "",
            ["model_arch_name"],
            {"model_arch_name": "ResNet18", "model_prefix": "resnet_18_paddle", "crop_size": 224},
        ),
        ("", ["model_arch_name", "model_prefix"], {"model_arch_name": "ResNet18", "model_prefix": "old"}),
        ("--model-prefix new", ["model_arch_name", "model_prefix"], {"model_prefix": "new"}),
    ],
)
def test_flags_of_earlier_run_are_inherited_unless_explicit(explicit, names, expected):
    recorded = {"model_arch_name": "ResNet18", "model_prefix": "old", "image_shape": [3, 96, 96], "crop_size": 96}
    recorded = parsing.from_dict(recorded | {"interp": "cubic", "resize_short": 110})
    args = parse(explicit)
    inherited, differing = inheritance.inherit(args, recorded, names, "here")
    for name, value in expected.items():
        assert getattr(args, name) == value, name
    differs = {"--crop-size 64": (64, 96), "--image-shape 4,64,64": ([4, 64, 64], [3, 96, 96])}
    differs |= {"--interp lanczos3": ("lanczos3", "cubic"), "--model-prefix new": ("new", "old")}
    assert differing == ({explicit.split()[0]: differs[explicit]} if explicit else {})
    assert not inherited.keys() & differing.keys()
    changed = [name for name in names if getattr(args, name) != getattr(parse(explicit), name)]
    assert inherited == {flag_name(name): getattr(args, name) for name in changed}


@pytest.mark.parametrize(
    ("flags", "image_shape", "resize_short"),
    [
        ("", [3, 96, 144], 110),
        ("--crop-size 96", [3, 96, 144], 110),
        ("--crop-size 64", [3, 64, 64], 73),
        ("--image-shape 3,64,96", [3, 64, 96], 73),
    ],
)
def test_rectangular_size_is_inherited_unless_a_flag_sets_a_different_size(flags, image_shape, resize_short):
    recorded = parse("--image-shape 3,96,144 --resize-short 110")
    args = parse(flags)
    inheritance.inherit(args, parsing.from_dict(recorded.as_dict()), IMAGES, "here")
    validation.check(args)
    actual = args.image_shape, args.crop_size, args.resize_short
    assert actual == (image_shape, min(image_shape[1:]), resize_short)
    assert args.origin("interp") == "checkpoint here"


def test_flags_that_determine_batches():
    images = "image_shape crop_size interp normalize_scale normalize_mean normalize_std batch_size dali_output_fp16"
    augmentation = "rand_crop_scale rand_crop_ratio auto_augment auto_augment_magnitude color_jitter lighting"
    augmentation += " rotate_degrees crop_padding"
    others = "dali_random_seed balanced_sampling dali_device"
    expected = {*images.split(), *augmentation.split(), *others.split()}
    assert {name for name, declaration in FLAGS.items() if declaration.batches} == expected


# {other flag, and its values for which the flags on the right have an effect}
USED_BY = {
    "crop_padding 0": "rand_crop_scale rand_crop_ratio",
    "auto_augment randaug": "auto_augment_magnitude",
    "amp True": "amp_dtype amp_level scale_loss use_dynamic_loss_scaling use_pure_fp16",
    "prune_model True": "mask_algo",
    "multi_label True": "asymmetric_loss",
    "iter_unit batch": "num_iter",
    "iter_unit epoch": "epochs budget_minutes save_interval_steps",
    "optimizer Momentum Nesterov": "momentum",
    "optimizer AdamW RAdam LAMB": "beta1 beta2 opt_epsilon",
    "lr_scheduler Cosine Poly OneCycle FlatCosine": "min_lr",
    "lr_scheduler Piecewise": "lr_decay_epochs lr_decay_factor",
    "lr_scheduler Poly": "lr_power",
    "lr_scheduler OneCycle": "lr_rise",
    "lr_scheduler FlatCosine": "lr_flat",
}
# A flag on the right is not inherited if the user has changed the flag on the left.
DEPENDING = {
    "crop_size": "resize_short",
    "image_shape": "resize_short",
    "epochs": "budget_minutes",
    "iter_unit": "warmup_epochs lr_decay_epochs save_interval eval_interval",
    "amp_dtype": "scale_loss use_dynamic_loss_scaling use_pure_fp16",
    "amp_level": "use_pure_fp16",
    "asp": "prune_model mask_algo",
    "model_arch_name": "model_prefix",
}


def test_flags_that_depend_on_other_flags():
    used_by = {name: d.used_by for name, d in FLAGS.items() if d.used_by}
    expected = {name: choice for choice, names in USED_BY.items() for name in names.split()}
    assert {name: " ".join(map(str, (other, *values))) for name, (other, values) in used_by.items()} == expected
    pairs = {(other, name) for name, d in FLAGS.items() for other in d.depends_on}
    pairs -= {(other, name) for name, (other, _) in used_by.items()}
    assert pairs == {(other, name) for other, names in DEPENDING.items() for name in names.split()}
    assert {name: d.before for name, d in FLAGS.items() if d.before is not None} == {
        "num_of_class": 1000,
        "interp": "linear",
        "label_offset": 0,
    }
    texts = [a.dest for a in PARSER._actions if isinstance(a.default, str) and not (a.choices or a.type)]
    assert texts == ["help", "model_arch_name", "version"]  # all other flags without a type have choices


def test_each_flag_has_a_known_kind():
    assert {declaration.kind for declaration in FLAGS.values()} == set(KINDS)


@pytest.mark.parametrize(
    ("explicit", "expected"),
    [
        ("", {"amp": True, "amp_level": "O2", "scale_loss": 128, "asp": True, "lr": 0.1, "epochs": 7, "batch_size": 9}),
        ("--amp false", {"amp": False, "amp_level": "O1", "scale_loss": 1, "use_dynamic_loss_scaling": False}),
        ("--amp-level O1", {"amp": True, "use_pure_fp16": False, "scale_loss": 128}),
        ("--amp-dtype bfloat16 --asp false", {"scale_loss": 1, "use_dynamic_loss_scaling": False, "amp_level": "O2"}),
        ("--asp false", {"asp": False, "prune_model": False, "mask_algo": "mask_1d"}),
        ("--lr 0.5", {"lr": 0.5, "epochs": 7, "keep_checkpoints": 9, "lr_power": 3}),
        ("--lr-scheduler Cosine", {"lr_power": 2}),
    ],
)
def test_resumed_run_inherits_recipe_and_saving_flags(explicit, expected):
    text = "--amp --use-pure-fp16 --scale-loss 128 --use-dynamic-loss-scaling --asp --prune-model --lr 0.1 --epochs 7 "
    text += "--batch-size 9 --device cpu"
    recorded = parse(
        f"{text} --mask-algo mask_2d_best --keep-checkpoints 9 --dali-num-threads 9 --lr-scheduler Poly --lr-power 3"
    )
    args = parse(f"--resume {explicit}")
    _, differing = inheritance.inherit(args, parsing.from_dict(recorded.as_dict()), of_kinds(*RESUMED), "here")
    validation.check(args)
    for name, value in {**expected, "dali_num_threads": 4, "device": "auto"}.items():
        assert getattr(args, name) == value, name
    assert set(differing) == {word for word in explicit.split() if word.startswith("--")}


def test_stages_must_begin_before_inherited_epochs_of_a_budget():
    """With --budget-minutes, a resumed run keeps its number of epochs, which a new run does not know yet."""
    for flags in ("--sizes 32:0,48:7", "--freeze stem --unfreeze-at 7"):
        args = parse(f"--resume --budget-minutes 5 {flags}")
        args.set("checkpoint d", epochs=8)
        validation.check(args)
        args.set("checkpoint d", epochs=7)
        with pytest.raises(UsageError, match="--epochs"):
            validation.check(args)


def test_budget_is_inherited_unless_the_epochs_are_explicit():
    recorded = parsing.from_dict(parse("--budget-minutes 5").as_dict())
    for flags, expected in (("", 5), ("--epochs 3", None)):
        args = parse(f"--resume {flags}")
        inheritance.inherit(args, recorded, of_kinds(*RESUMED), "here")
        assert args.budget_minutes == expected


def test_durations_in_a_different_unit_are_not_inherited():
    text = "--iter-unit batch --num-iter 9 --warmup-epochs 3 --save-interval 2 --eval-interval 4"
    recorded = parse(f"{text} --lr-scheduler Piecewise --lr-decay-epochs 4,7 --lr-decay-factor 0.5")
    for unit, expected in (("epoch", (None, 5, 1, 1, [30, 60, 80])), ("batch", (9, 3, 2, 4, [4, 7]))):
        args = parse(f"--resume --iter-unit {unit}" + " --num-iter 9" * (unit == "batch"))
        inheritance.inherit(args, parsing.from_dict(recorded.as_dict()), of_kinds(*RESUMED), "here")
        validation.check(args)
        durations = args.num_iter, args.warmup_epochs, args.save_interval, args.eval_interval, args.lr_decay_epochs
        assert durations == expected
        assert (args.lr_scheduler, args.lr_decay_factor) == ("Piecewise", 0.5)


@pytest.mark.parametrize(
    ("text", "resize_short"),
    [
        *(
            ("", 256),
            ("--crop-size 32", 37),
            ("--image-shape 3,96,96", 110),
            ("--crop-size 32 --resize-short 256", 256),
        ),
        ("--model-arch-name net.py:Net --crop-size 112", 128),
    ],
)
def test_resize_short_follows_crop_size_unless_explicit(text, resize_short):
    args = parse(text)
    assert args.resize_short == resize_short
    problem = (
        "--resize-short 256: 8.00 times --crop-size 32, so an evaluation uses only the center of each image; use 37"
    )
    assert (problem in validation.warnings(args)) == (args.crop_size == 32 and resize_short == 256)
    written = yaml.safe_load(parsing.as_yaml(args))
    assert written.get("resize_short") == (256 if "--resize-short" in text else None)
    assert "model_prefix" not in written and written["epochs"] == 90


def test_help_states_which_values_print_config_omits():
    omitted = (
        "except those that you do not set and that the run can determine, for example from a checkpoint, the data or "
        "the network"
    )
    assert f"--print-config FLAGS prints the values as a file for --config, {omitted}." in " ".join(
        PARSER.format_help().split()
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ([4, 40, 40], 40, 50, "cubic")),
        ("--crop-size 80", ([4, 80, 80], 80, 100, "cubic")),
        ("--image-shape 3,64,96 --interp linear", ([3, 64, 96], 64, 80, "linear")),
        ("--resize-short 60", ([4, 40, 40], 40, 60, "cubic")),
    ],
)
def test_default_preprocessing_depends_on_network(register, text, expected):
    network = models.Network("resnet", "ResNet18", "", {}, 40, 1.25, {"interp": "cubic"})
    register("Small_1", network)
    args = config.parse_args(["--model-arch-name", "small-1", *text.split()])
    assert (args.image_shape, args.crop_size, args.resize_short, args.interp) == expected
    assert args.origin("interp") == ("command line" if "--interp" in text else "--model-arch-name")


@pytest.mark.parametrize("flag", ["--data-layout NHWC --kernels paddle", "--dali-output-fp16"])
def test_flags_that_slow_down_cpus_trigger_warnings_on_cpu_only(flag):
    for device in ("cpu", "gpu"):
        warnings = [warning.split(":")[0] for warning in validation.warnings(parse(f"{flag} --device {device}"))]
        assert warnings == [flag.partition(" --kernels")[0]] * (device == "cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--batch-size 1", ["--batch-size 1"]),
        ("--batch-size 2", []),
        ("--batch-size 1 --run-scope eval_only --benchmark", []),
        ("--freeze stem", ["--freeze stem"]),
        ("--freeze stem --resume", []),
        ("--freeze stem --from-checkpoint d", []),
        ("--freeze stem --from-pretrained-params d", []),
        ("--freeze stem --run-scope eval_only --benchmark", []),
        ("--class-weights balanced", []),
        ("--balanced-sampling", []),
        ("--balanced-sampling --class-weights balanced", ["--class-weights balanced"]),
        ("--balanced-sampling --class-weights balanced --run-scope eval_only --benchmark", []),
        ("--crop-size 100 --resize-short 130", []),
        ("--crop-size 100 --resize-short 131", ["--resize-short 131"]),
        ("--optimizer LAMB --lr 0.03", []),
        ("--optimizer LAMB --lr 0.031", ["--lr 0.031"]),
        ("--warmup-start-lr 0.01", []),
        ("--warmup-start-lr 0.01 --warmup-epochs 0", ["--warmup-start-lr 0.01"]),
        ("--lr-scheduler Piecewise --epochs 31", []),
        ("--lr-scheduler Piecewise --epochs 30", ["--lr-decay-epochs 30,60,80"]),
        ("--lr-scheduler Piecewise --epochs 30 --run-scope eval_only --benchmark", []),
        ("--lr-scheduler Piecewise --lr-decay-epochs 90 --budget-minutes 5", []),
        ("--patience 3 --epochs 3", ["--patience 3"]),
        ("--patience 3 --epochs 4", []),
        ("--patience 3 --epochs 6 --eval-interval 2", ["--patience 3"]),
        ("--patience 3 --epochs 7 --eval-interval 2", []),
        ("--patience 1 --iter-unit batch --num-iter 9", ["--patience 1"]),
        ("--patience 99 --budget-minutes 5", []),
        ("--patience 99 --run-scope eval_only --benchmark", []),
        ("--budget-minutes 5", []),
        ("--budget-minutes 5 --benchmark", ["--budget-minutes 5"]),
        ("--budget-minutes 5 --run-scope eval_only --from-checkpoint d", ["--budget-minutes 5"]),
        ("--benchmark-steps 5 --benchmark-warmup-steps 3 --benchmark", []),
        ("--benchmark-steps 5 --benchmark-warmup-steps 3", ["--benchmark-steps 5", "--benchmark-warmup-steps 3"]),
    ],
)
def test_warnings_depend_on_all_flags_of_a_combination(text, expected):
    args = parse(text)
    validation.check(args)
    warnings = list(validation.warnings(args))
    assert [warning.split(":")[0] for warning in warnings] == expected
    assert not [warning for warning in warnings if not re.search(r"; .*\w$", warning)]  # all end with a remedy


def test_warnings_depend_on_source_of_flags():
    for flags, obstacle in (("--benchmark", "--benchmark"), ("--run-scope eval_only", "--run-scope eval_only")):
        args = parse(f"--budget-minutes 5 --from-checkpoint d {flags}")
        warning = f"--budget-minutes 5: has no effect with {obstacle}; remove --budget-minutes"
        assert list(validation.warnings(args)) == [warning]
        args.set("checkpoint d", budget_minutes=5)
        assert list(validation.warnings(args)) == []
    args = parse()
    args.set("checkpoint d", patience=99)
    assert list(validation.warnings(args)) == []


def test_sizes_with_rectangular_image_shape_are_an_error():
    message = error_of("--data-format synthetic --epochs 3 --image-shape 3,32,48 --sizes 24:0,32:2")
    assert "--sizes 24:0,32:2: trains on square images, but --image-shape 3,32,48 is not square" in message


def test_sizes_are_checked_after_inheritance():
    args = parse("--from-checkpoint d --resize-short 110")
    with pytest.raises(UsageError, match="--resize-short 110: smaller than --crop-size 224"):
        validation.check(args)
    inheritance.inherit(args, parsing.from_dict({"crop_size": 96, "image_shape": [3, 96, 96]}), IMAGES, "here")
    validation.check(args)


def test_flags_missing_in_old_checkpoint_have_their_old_defaults():
    assert [getattr(parsing.from_dict({"lr": 1}), name) for name in ("interp", "num_of_class")] == ["linear", 1000]
    assert parsing.from_dict({"interp": "cubic", "a_flag_of_a_later_version": 1}).interp == "cubic"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("128", "'128' is not a stage; use SIZE:EPOCH[:BATCH[:FACTOR]],..."),
        ("128:0:8:1:1", "is not a stage; use SIZE:EPOCH[:BATCH[:FACTOR]],..."),
        ("128:0:0", "--sizes: 0 is too small"),
        ("128:0:8:0", "--sizes: 0 is not positive"),
        ("128:1", "must have epochs that start at 0 and increase"),
        ("128:0,160:0", "must have epochs that start at 0 and increase"),
        ("128:0,0:2", "--sizes"),
        ("128:0,160:3", "--sizes 128:0,160:3: the last stage begins in epoch 3, but --epochs is 3"),
    ],
)
def test_invalid_sizes_are_errors(capsys, value, expected):
    with pytest.raises((UsageError, SystemExit)) as error:
        config.parse_args(["--data-format", "synthetic", "--epochs", "3", "--sizes", value])
    assert expected in str(error.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--from-checkpoint", "--image-root", "--output-dir", "--report-file", "--tensorboard-dir"]
)
def test_empty_paths_are_errors(flag):
    with pytest.raises(UsageError, match=f"{flag}: '' is an empty path; set a path, such as . for"):
        config.parse_args([flag, ""])
