import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import config
from utils.errors import UsageError
from utils.mode import RunScope

ROOT = Path(__file__).parent.parent

# The flags of NVIDIA's RN50v1.5 Paddle example, with its defaults: its users' commands depend on them.
NVIDIA = {
    "output-dir": "./output/",
    "run-scope": RunScope.TRAIN_EVAL,
    "epochs": 90,
    "save-interval": 1,
    "eval-interval": 1,
    "print-interval": 10,
    "report-file": None,  # in OUTPUT_DIR/ARCH, by the kind of run: tests/test_report.py
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
    "num-of-class": None,  # 1000 there: here that of the data
    "bn-weight-decay": False,
    "label-smoothing": 0.1,
    "optimizer": "Momentum",
    "momentum": 0.875,
    "beta1": 0.9,
    "beta2": 0.999,
    "opt-epsilon": 1e-8,
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
    "asp": False,
    "prune-model": False,
    "mask-algo": "mask_1d",
}
OURS = {
    "config": None,
    "print-config": False,
    "verbose": False,
    "dry-run": False,
    "seed": 0,
    "device": "auto",
    "resume": False,
    "overwrite": False,
    "save-interval-steps": 0,
    "keep-checkpoints": 3,
    "checkpoint-commit": "rename",
    "pretrained-mismatch": "error",
    "profile-steps": None,
    "amp-dtype": "float16",
    "amp-level": "O1",
    "max-bad-steps": 10,
    "comm-timeout-s": 600,
    "data-format": "auto",
    "dali-device": "auto",
    "hw-decoder-load": 0.9,
    "cpu-decoder-load": 0.0,
    "dali-prefetch": 3,
    "skip-list": None,
    "min-lr": 0.0,
    "lr-decay-epochs": [30.0, 60.0, 80.0],
    "lr-decay-factor": 0.1,
    "lr-power": 2.0,
    "lr-rise": 0.25,
    "lr-flat": 0.75,
    "tensorboard-dir": None,
    "report-html": None,
    "predictions": None,
    "allow-empty-classes": False,
    "allow-outside": False,
    "color-jitter": 0.0,
    "lighting": 0.0,
    "rotate-degrees": 0.0,
    "interp": "triangular",
    "kernels": "auto",
    "cuda-graph": True,
}
DEFAULTS = {**NVIDIA, **OURS}
IMAGES = config.EVALUATED[2:]


def parse(text=""):
    return config.parse_args(text.split())


def refusal(text):
    """The message that a command line is refused with: one line."""
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


@pytest.mark.parametrize("flag", DEFAULTS)
def test_default(flag):
    value = getattr(parse(), flag.replace("-", "_"))
    assert value == DEFAULTS[flag]
    assert type(value) is type(DEFAULTS[flag])


def test_flags_are_frozen():
    flags = {option for action in config.build_parser()._actions for option in action.option_strings}
    expected = {"-h", "--help"} | {f"--{flag}" for flag in DEFAULTS}
    assert flags == expected, f"flags changed ({sorted(flags ^ expected)}): update the documents and this list"


@pytest.mark.parametrize(
    "flags",
    [
        "--amp --scale-loss 128.0 --use-dynamic-loss-scaling --data-layout NHWC --fuse-resunit",
        "--amp --scale-loss 128.0 --use-dynamic-loss-scaling --use-pure-fp16 --dali-output-fp16",
        "--run-scope train_only --batch-size 64 --benchmark --benchmark-steps 100 --benchmark-warmup-steps 300",
        "--run-scope eval_only --from-checkpoint output/ResNet50/89 --batch-size 64",
        "--from-checkpoint output/ResNet50 --last-epoch-of-checkpoint auto",
        "--from-pretrained-params output/ResNet50/89 --model-prefix resnet_50_paddle --asp --prune-model "
        "--mask-algo mask_1d --epochs 90 --lr 0.256",
    ],
)
def test_commands_in_the_style_of_nvidias_example(flags):
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
        ("--crop-size 96", "image_shape", [4, 96, 96]),
        ("--image-shape 3,96,96", "crop_size", 96),
        ("--model-arch-name ResNet18", "model_prefix", "resnet_18_paddle"),
        ("--model-arch-name ResNet18 --model-prefix mine", "model_prefix", "mine"),
        ("--normalize-scale 1/255", "normalize_scale", 1 / 255),
        ("--hw-decoder-load 0", "hw_decoder_load", 0.0),
        ("--image-shape 3,224,224", "image_shape", [3, 224, 224]),
        ("--rand-crop-ratio 3/4,4/3", "rand_crop_ratio", [3 / 4, 4 / 3]),
        ("--normalize-mean 0,0.5,1", "normalize_mean", [0.0, 0.5, 1.0]),
        ("--normalize-mean=-1,0,0", "normalize_mean", [-1.0, 0.0, 0.0]),
        ("--run-scope train_only", "run_scope", RunScope.TRAIN_ONLY),
        ("--profile-steps 0:1", "profile_steps", [0, 1]),
        ("--profile-steps 100:110", "profile_steps", [100, 110]),
        ("--profile-steps 100:110 --profile-steps None", "profile_steps", None),
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
        ("--from-checkpoint d --last-epoch-of-checkpoint None", "last_epoch_of_checkpoint", None),
        ("--from-checkpoint d --last-epoch-of-checkpoint auto", "last_epoch_of_checkpoint", "auto"),
        ("--from-checkpoint d --last-epoch-of-checkpoint 3", "last_epoch_of_checkpoint", 3),
    ],
)
def test_value(text, name, value):
    parsed = getattr(parse(text), name)
    assert parsed == value
    assert type(parsed) is type(value)


def test_argv_defaults_to_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "7"])
    assert config.parse_args().epochs == 7


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
        ("epochs: null", "epochs", 90),
        ("from_checkpoint: null", "from_checkpoint", None),
        ("", "epochs", 90),
        ("# only a comment", "epochs", 90),
    ],
)
def test_yaml_wins_over_the_default(config_file, text, name, value):
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
def test_command_line_wins_over_yaml(config_file, text, flags, name, value):
    path = config_file(text)
    assert getattr(parse(f"--config {path} {flags}"), name) == value
    assert getattr(parse(f"{flags} --config={path}"), name) == value


def test_flags_of_yaml_and_command_line_are_checked_together(config_file):
    message = refusal(f"--config {config_file('from_checkpoint: a')} --from-pretrained-params b")
    assert "--from-checkpoint a and --from-pretrained-params b" in message


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
def test_as_dict_is_a_config_file(config_file, flags):
    values = config.as_dict(parse(flags))
    assert config.as_dict(parse(f"--config {config_file(yaml.safe_dump(values))}")) == values


def test_as_dict_leaves_out_what_does_not_describe_the_run(config_file):
    values = config.as_dict(parse(f"--config {config_file('')} --print-config"))
    assert set(values) == {flag.replace("-", "_") for flag in DEFAULTS} - {"config", "print_config"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--bach-size 3", "unknown flag --bach-size: did you mean --batch-size?"),
        ("--bach-size=3", "unknown flag --bach-size: did you mean --batch-size?"),
        ("--benchmark_steps 3", "unknown flag --benchmark_steps: did you mean --benchmark-steps?"),
        ("--foo 3", "unknown flag --foo: see --help"),
        ("--learning-rate 3", "unknown flag --learning-rate: did you mean --lr?"),
        ("--num_classes=3", "unknown flag --num_classes: did you mean --num-of-class?"),
        ("--data-dir d", "unknown flag --data-dir: did you mean --image-root?"),
        ("--inference-dir d", "unknown flag --inference-dir: run python -m paddle_resnet.export CHECKPOINT DIR after"),
        ("--eval", "unknown flag --eval: did you mean --run-scope eval_only?"),
        ("--model-prefix a/b", "--model-prefix: 'a/b' is no name for files: give one such as resnet50"),
        ("--model-prefix=", "--model-prefix: '' is no name for files"),
        ("stray", "'stray'"),
        ("--epochs 3 stray", "'stray'"),
    ],
)
def test_unknown_word_is_refused(text, says):
    assert says in refusal(text)


@pytest.mark.parametrize("flag", ["--epoch", "--output", "--conf", "--normalize-m"])
def test_abbreviation_is_refused(flag):
    assert f"unknown flag {flag}: did you mean {flag}" in refusal(f"{flag} 3")


@pytest.mark.parametrize("flag", sorted(DEFAULTS.keys() - {name for name, v in DEFAULTS.items() if type(v) is bool}))
def test_missing_value_is_refused(flag):
    assert f"--{flag}" in refusal(f"--{flag}")


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
        ("--cpu-decoder-load", "1.1"),
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
        ("--interp", "nearest"),
        ("--optimizer", "Adam"),
        ("--lr-scheduler", "Step"),
        ("--mask-algo", "mask_3d"),
        ("--last-epoch-of-checkpoint", "latest"),
        ("--last-epoch-of-checkpoint", "-1"),
    ],
)
def test_value_of_the_wrong_kind_is_refused(config_file, flag, value):
    path = config_file(f"{flag[2:].replace('-', '_')}: {value}")
    for message in (refusal(f"{flag} {value}"), refusal(f"--config {path}")):
        assert flag in message
        assert value in message


@pytest.mark.parametrize("flag", ["--crop-size", "--output-dir", "--run-scope"])
def test_two_dashes_are_not_a_value(flag):
    """argparse makes an empty list of them."""
    assert refusal(f"{flag}=--") == f"{flag} --: not a value; set one"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--image-shape", "1,224,224"),
        ("--image-shape", "224,224"),
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
def test_unusable_list_is_refused(flag, value):
    assert f"{flag} {value} " in refusal(f"{flag}={value}")


@pytest.mark.parametrize(
    ("flag", "value", "part"), [("--image-shape", "4,x,224", "'x'"), ("--normalize-std", "1,,1", "''")]
)
def test_list_with_a_part_of_the_wrong_kind_is_refused(flag, value, part):
    message = refusal(f"{flag} {value}")
    assert flag in message
    assert part in message


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--image-shape 3,192,192 --crop-size 224",
            ["--image-shape 3,192,192", "--crop-size 224", "--image-shape 3,224,224", "--crop-size 192"],
        ),
        ("--image-shape 4,224,192", ["--image-shape 4,224,192", "--crop-size 224"]),
        ("--rotate-degrees 181", ["--rotate-degrees 181", "180"]),
        ("--rand-crop-ratio 1e-6,1e6", ["--rand-crop-ratio 1e-06,1e+06 is out of range", "0.001 to 1000"]),
        ("--rand-crop-scale 1e-40,1", ["--rand-crop-scale 1e-40,1 is out of range"]),
        ("--color-jitter 1e6", ["--color-jitter 1e+06 is out of range", "0 to 100"]),
        ("--lighting 1e38", ["--lighting 1e+38 is out of range", "0 to 100"]),
        ("--normalize-scale 1e-300", ["--normalize-scale 1e-300 is out of range"]),
        ("--normalize-std 1,1,1e300", ["--normalize-std 1,1,1e+300 is out of range"]),
        ("--normalize-mean 0,-1e30,0", ["--normalize-mean 0,-1e+30,0 is out of range"]),
        ("--resize-short 100000", ["--resize-short: 100000 is too large", "1 to 8192"]),
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
        ("--amp-level O2", ["--amp-level O2", "--amp:"]),
        ("--amp-dtype bfloat16", ["--amp-dtype bfloat16", "--amp:"]),
        ("--amp --amp-level O1 --use-pure-fp16", ["--amp-level is O1", "--use-pure-fp16"]),
        ("--amp --amp-dtype bfloat16 --use-pure-fp16", ["--amp-dtype is bfloat16", "--amp-level O2"]),
        ("--amp --amp-dtype bfloat16 --use-dynamic-loss-scaling", ["--use-dynamic-loss-scaling", "bfloat16", "drop"]),
        ("--amp --amp-dtype bfloat16 --scale-loss 128", ["--scale-loss 128", "bfloat16", "drop"]),
        ("--amp --amp-dtype bfloat16 --amp-level O2 --asp --prune-model", ["--asp", "bfloat16", "--amp-level O1"]),
        ("--prune-model", ["--prune-model", "--asp"]),
        ("--asp", ["--asp", "--prune-model", "--from-checkpoint"]),
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(flags, says):
    message = refusal(flags)
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    "flags",
    [
        "--run-scope eval_only --benchmark",
        "--amp --amp-dtype bfloat16 --asp --prune-model",
        "--run-scope eval_only --from-pretrained-params d",
        "--last-epoch-of-checkpoint None",
        "--image-shape 3,32,32 --crop-size 32 --resize-short 32",
        "--rand-crop-ratio 0.001,1000 --rand-crop-scale 1e-6,1 --color-jitter 100 --lighting 100 --resize-short 8192",
        "--normalize-scale 1e12 --normalize-mean=-1e12,0,1e12 --normalize-std 1e-12,1,1e12",
    ],
)
def test_flags_at_the_edge_of_a_refusal_are_accepted(flags):
    parse(flags)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bach_size: 3", "unknown key bach_size: did you mean batch_size?"),
        ("batch-size: 3", "unknown key batch-size: did you mean batch_size?"),
        ("5: 3", "unknown key 5"),
        ("config: other.yaml", "unknown key config"),
        ("- epochs", "is not a mapping: write lines `flag: value`"),
        ("epochs 3", "is not a mapping: write lines `flag: value`"),
        ("normalize_mean: [0, 0", "is not YAML"),
        ("epochs: 3\n\tlr: 1", "is not YAML"),
        ("lr: fast", "--lr: 'fast' is not a number"),
        ("image_shape: 3 32 32", "--image-shape: '3 32 32' has no commas: use 3,32,32"),
    ],
)
def test_unusable_config_file_is_refused(config_file, text, says):
    path = config_file(text)
    message = refusal(f"--config {path}")
    assert f"--config {path}" in message
    assert says in message


def test_config_file_that_cannot_be_read_is_refused(tmp_path):
    assert f"--config {tmp_path}/none.yaml cannot be read" in refusal(f"--config {tmp_path}/none.yaml")
    assert f"--config {tmp_path} cannot be read" in refusal(f"--config {tmp_path}")


def test_flags_need_neither_paddle_nor_dali():
    code = "import sys, config; config.parse_args([]); sys.exit(bool({'paddle', 'nvidia.dali'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lr", "nan"], "nan is not finite"),
        (["--lr=-1"], "-1 is negative"),
        (["--scale-loss", "0"], "0 is not positive"),
        (["--normalize-scale", "0"], "0 is not positive"),
        (["--rand-crop-scale", "nan,1"], "nan is not finite"),
        (["--lr", "1e400"], "1e400 is not finite"),
        (["--dali-random-seed", str(2**32)], f"too large: use a whole number from 0 to {2**32 - 1}"),
        (["--seed", str(2**32)], f"too large: use a whole number from 0 to {2**32 - 1}"),
        (["--dali-num-threads", "100000"], "100000 is too large: use a whole number from 1 to 1024"),
        (["--num-of-class", str(2**31)], f"{2**31} is too large: use a whole number from 1 to {2**24}"),
        (["--profile-steps", "3:3"], "--profile-steps: 3:3 holds no step"),
        (["--profile-steps", "4:3"], "4:3 holds no step"),
        (["--profile-steps=-1:3"], "-1 is too small"),
        (["--profile-steps", "a:3"], "'a' is not a whole number"),
        (["--profile-steps", "3"], "'3' is not A:B"),
        (["--profile-steps", "1:2:3"], "'1:2:3' is not A:B"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(flags, says):
    with pytest.raises(UsageError, match=says):
        config.parse_args(flags)


WHOLE_NUMBERS = [config.flag(a.dest) for a in config.build_parser()._actions if type(a.default) is int] + [
    *("--num-of-class", "--image-shape", "--profile-steps", "--last-epoch-of-checkpoint")
]


@pytest.mark.parametrize("value", ["9" * 11, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_every_whole_number_has_an_upper_limit(name, value):
    with pytest.raises(UsageError, match=rf"^{name}: .*use a whole number from [01] to [0-9]+$") as error:
        config.parse_args([name, f"1:{value}" if name == "--profile-steps" else value])
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"model_prefix: no\n", "model_prefix takes a word and YAML reads this one as False: quote it"),
        (b"profile_steps: 10:20\n", "'620' is not A:B: give two steps such as 100:110 \\(quoted in YAML\\)"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"[]", "is not a mapping: write lines `flag: value`"),
        (b"false", "is not a mapping: write lines `flag: value`"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(tmp_path, content, says):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        config.parse_args(["--config", str(path)])


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (BOMB, "is not YAML (an alias"),
        ("epochs: &e 3\nwarmup_epochs: *e\n", "write the value out"),
        ("epochs: " + "[" * 30_000, "maximum recursion depth exceeded"),
        ("a: " * 20_000, "is not YAML"),
        ("epochs: " + "9" * 5000, "is not YAML"),
        ("epochs: 0x" + "f" * 5000, "is not YAML"),
        ("epochs: !!int ''", "is not YAML"),
        ("epochs: !!timestamp 2001-99-99", "is not YAML"),
        ("epochs: !!python/object/apply:os.getpid []", "is not YAML"),
        ("? [1, 2]\n: 3", "is not YAML"),
        ("epochs: 3\n" * 10_000, "cannot be read (100000 bytes, where 65536 are the limit)"),
    ],
    ids=range(11),
)
def test_hostile_config_file_is_refused_at_once(config_file, content, says):
    assert says in refusal(f"--config {config_file(content)}")


@pytest.mark.timeout(20)
def test_a_pipe_or_device_as_config_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert f"--config {path} cannot be read (not a regular file)" in refusal(f"--config {path}")


def test_all_conflicts_are_told_at_once(config_file):
    with pytest.raises(UsageError) as error:
        parse(
            f"--config {config_file('prune_model: true')} --scale-loss 128 --resize-short 100 "
            "--last-epoch-of-checkpoint 3"
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for words in ("--prune-model", "--scale-loss 128", "--resize-short 100", "--last-epoch-of-checkpoint 3"):
        assert sum(words in line for line in lines) == 1
    with pytest.raises(UsageError) as error:
        parse("--learning-rate 1 --epochs 3 --workers 4")
    assert str(error.value).splitlines() == [
        "unknown flag --learning-rate: did you mean --lr?",
        "unknown flag --workers: did you mean --dali-num-threads?",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--from-checkpoint a --from-pretrained-params b", "--from-pretrained-params b exclude each other"),
        ("--resume --overwrite", "--resume continues the run that --overwrite deletes"),
        ("--resume --run-scope eval_only", "--resume continues training and --run-scope is eval_only"),
        ("--pretrained-mismatch skip-classifier", "is about --from-pretrained-params DIR: add it"),
    ],
)
def test_starts_that_exclude_each_other(words, says):
    assert says in refusal(words)


def test_aliases_mean_flags_that_exist():
    flags = {option for action in config.build_parser()._actions for option in action.option_strings}
    assert not {f"--{alias}" for alias in config.ALIASES} & flags
    assert {f"--{meant.split()[0]}" for meant in config.ALIASES.values()} <= flags


def test_an_alias_as_a_key_is_told_as_a_key(config_file):
    assert "unknown key learning_rate: did you mean lr?" in refusal(f"--config {config_file('learning_rate: 1')}")
    assert "did you mean image_root?" in refusal(f"--config {config_file('data-dir: x')}")


def test_given_names_what_command_line_and_file_set(config_file):
    assert parse().given == frozenset()
    assert parse(f"--config {config_file('{epochs: 90, lr: null}')} --amp").given == {"config", "epochs", "amp"}


@pytest.mark.parametrize(
    ("given", "names", "expected"),
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
def test_flags_of_an_earlier_run_are_taken_where_none_are_given(given, names, expected):
    recorded = {"model_arch_name": "ResNet18", "model_prefix": "old", "image_shape": [3, 96, 96], "crop_size": 96}
    recorded = config.from_dict(recorded | {"interp": "cubic", "resize_short": 110})
    args = parse(given)
    taken, differing = config.inherit(args, recorded, names)
    for name, value in expected.items():
        assert getattr(args, name) == value, name
    differs = {"--crop-size 64": (64, 96), "--image-shape 4,64,64": ([4, 64, 64], [3, 96, 96])}
    differs |= {"--interp lanczos3": ("lanczos3", "cubic"), "--model-prefix new": ("new", "old")}
    assert differing == ({given.split()[0]: differs[given]} if given else {})
    assert not taken.keys() & differing.keys()
    for name, value in taken.items():
        assert value == getattr(args, name[2:].replace("-", "_")), name


def test_each_flag_has_one_kind():
    names = [name for kind in config.KINDS.values() for name in kind]
    assert sorted(names) == sorted(flag.replace("-", "_") for flag in DEFAULTS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"amp": True, "amp_level": "O2", "scale_loss": 128, "asp": True, "lr": 0.1, "epochs": 7}),
        ("--amp false", {"amp": False, "amp_level": "O1", "scale_loss": 1, "use_dynamic_loss_scaling": False}),
        ("--amp-level O1", {"amp": True, "use_pure_fp16": False, "scale_loss": 128}),
        ("--amp-dtype bfloat16 --asp false", {"scale_loss": 1, "use_dynamic_loss_scaling": False, "amp_level": "O2"}),
        ("--asp false", {"asp": False, "prune_model": False, "mask_algo": "mask_1d"}),
        ("--lr 0.5", {"lr": 0.5, "epochs": 7, "keep_checkpoints": 9, "lr_power": 3}),
        ("--lr-scheduler Cosine", {"lr_power": 2}),
    ],
)
def test_a_resumed_run_inherits_recipe_and_saving(given, expected):
    text = "--amp --use-pure-fp16 --scale-loss 128 --use-dynamic-loss-scaling --asp --prune-model --lr 0.1 --epochs 7"
    recorded = parse(
        f"{text} --mask-algo mask_2d_best --keep-checkpoints 9 --dali-num-threads 9 --lr-scheduler Poly --lr-power 3"
    )
    args = parse(f"--resume {given}")
    _, differing = config.inherit(args, config.from_dict(config.as_dict(recorded)), config.RESUMED)
    config.check_settings(args)
    for name, value in {**expected, "dali_num_threads": 4}.items():
        assert getattr(args, name) == value, name
    assert set(differing) == {word for word in given.split() if word.startswith("--")}


@pytest.mark.parametrize(
    ("text", "resize_short"),
    [("", 256), ("--crop-size 32", 37), ("--image-shape 3,96,96", 110), ("--crop-size 32 --resize-short 256", 256)],
)
def test_resize_short_follows_the_crop_unless_it_is_explicit(text, resize_short):
    args = parse(text)
    assert args.resize_short == resize_short
    warned = [warning for warning in config.warnings(args) if warning.startswith("--resize-short 256: 8.00 times")]
    assert len(warned) == (args.crop_size == 32 and resize_short == 256)
    assert config.as_file(args).get("resize_short") == (256 if "--resize-short" in text else None)


@pytest.mark.parametrize("flag", ["--data-layout NHWC", "--dali-output-fp16"])
def test_flags_that_only_slow_down_a_cpu_are_warned_of(flag):
    for device in ("cpu", "gpu"):
        warned = [warning.split(":")[0] for warning in config.warnings(parse(f"{flag} --device {device}"))]
        assert warned == [flag] * (device == "cpu")


def test_a_start_may_name_the_sizes_that_do_not_fit_yet():
    args = parse("--from-checkpoint d --resize-short 110")
    with pytest.raises(UsageError, match="--resize-short 110 is smaller than --crop-size 224"):
        config.check_settings(args)
    config.inherit(args, config.from_dict({"crop_size": 96, "image_shape": [3, 96, 96]}), IMAGES)
    config.check_settings(args)


def test_flags_that_an_old_checkpoint_lacks_have_their_old_meaning():
    assert config.from_dict({"lr": 1}).interp == "linear"
    assert config.from_dict({"interp": "cubic"}).interp == "cubic"
