"""Every flag of train.py: one parser, named groups, a YAML file below the command line.

This module imports neither Paddle nor DALI, so that `--help` and a misspelt flag answer at once.
"""

import argparse
import difflib
import math
import sys
from fractions import Fraction

import yaml

from utils import files
from utils.errors import UsageError
from utils.mode import RunScope

# Beyond these DALI fails, or makes images that are not finite.
AUGMENTATION_RANGES = {
    "rand_crop_ratio": (1e-3, 1e3),
    "rand_crop_scale": (1e-6, 1),
    "color_jitter": (0, 100),
    "lighting": (0, 100),
    "normalize_scale": (1e-12, 1e12),
    "normalize_std": (1e-12, 1e12),
    "normalize_mean": (-1e12, 1e12),
    "resize_short": (1, 8192),
}


def parse_args(argv=None):
    """Read the flags.

    Args:
        argv: list of words, default the command line. A flag on it wins over `--config FILE`, which wins over
            the default.
    Returns:
        argparse.Namespace, one attribute a flag with underscores; run_scope is a RunScope.
    Raises:
        UsageError: an unknown flag or key, a value of the wrong kind, flags that exclude each other.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    config_file = _config_file(argv)
    words = _yaml_words(parser, config_file) if config_file is not None else []
    args, unknown = parser.parse_known_args(words + argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        raise UsageError(_unknown("flag", unknown[0].split("=")[0], flags))
    args.run_scope = RunScope(args.run_scope)
    _check_amp(args)
    _check(args)
    return args


def as_dict(args):
    """The flags that describe the run as plain data: what a --config file holds."""
    values = {name: value for name, value in vars(args).items() if name not in ("config", "print_config")}
    values["run_scope"] = args.run_scope.value
    return values


def from_dict(values):
    """The flags that as_dict has made plain data of, perhaps by another version: flags that are missing have their
    defaults, unknown ones are left out.

    Raises:
        UsageError: a value of the wrong kind.
    """
    parser = build_parser()
    known = {action.dest for action in parser._actions}
    words = _words(parser, {name: value for name, value in values.items() if name in known})
    args, _ = parser.parse_known_args(words)
    args.run_scope = RunScope(args.run_scope)
    return args


def build_parser():
    parser = _Parser(
        prog="train.py",
        description="Train, evaluate or benchmark an image classifier: a Paddle static graph fed by NVIDIA DALI.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_global(parser.add_argument_group("Global"))
    _add_dataset(parser.add_argument_group("Dataset"))
    _add_augmentation(parser.add_argument_group("Data augmentation"))
    _add_model(parser.add_argument_group("Model"))
    _add_training(parser.add_argument_group("Training"))
    _add_advanced(parser.add_argument_group("Advanced training"))
    return parser


def _add_global(group):
    group.add_argument("--config", metavar="FILE", help="YAML file of flags, with underscores in their names")
    group.add_argument("--output-dir", default="./output/", help="checkpoints go to OUTPUT_DIR/ARCH/EPOCH/")
    group.add_argument(
        "--run-scope", default="train_eval", choices=[s.value for s in RunScope], help="what this run does"
    )
    group.add_argument("--epochs", type=_positive, default=90, help="epochs to train")
    group.add_argument(
        "--save-interval", type=_positive, default=1, help="epochs between checkpoints; the last epoch is always saved"
    )
    group.add_argument(
        "--eval-interval",
        type=_positive,
        default=1,
        help="epochs between evaluations; the last epoch is always evaluated",
    )
    group.add_argument("--print-interval", type=_positive, default=10, help="steps between log lines")
    group.add_argument(
        "--report-file", default="./report.json", help="metrics in dllogger's JSON lines; --resume appends to the file"
    )
    group.add_argument(
        "--tensorboard-dir",
        type=_path,
        metavar="DIR",
        help="write the report's figures, the first training batch and the flags for TensorBoard",
    )
    group.add_argument(
        "--report-html",
        type=_path,
        metavar="FILE",
        help="write a page about the run at its end, with curves, confusions and images",
    )
    group.add_argument(
        "--predictions",
        type=_path,
        metavar="FILE",
        help="with eval_only: write a CSV file with the five most probable classes of each image",
    )
    group.add_argument("--data-layout", default="NCHW", choices=["NCHW", "NHWC"], help="memory layout of the images")
    _add_switch(group, "--benchmark", help="measure the speed of training (or of eval_only) and stop")
    group.add_argument("--benchmark-steps", type=_positive, default=100, help="steps to measure")
    group.add_argument("--benchmark-warmup-steps", type=_not_negative, default=100, help="steps before the measurement")
    group.add_argument(
        "--profile-steps",
        type=_steps,
        metavar="{None,A:B}",
        help="write a trace of the steps A to B-1 of the first epoch to OUTPUT_DIR/profile/",
    )
    group.add_argument(
        "--model-prefix", type=_file_name, default="resnet_50_paddle", help="name of the files in a checkpoint"
    )
    group.add_argument(
        "--save-interval-steps", type=_not_negative, default=0, help="steps between checkpoints in an epoch; 0: none"
    )
    group.add_argument(
        "--keep-checkpoints", type=_positive, default=3, help="newest checkpoints of this run to keep, beside its best"
    )
    group.add_argument(
        "--checkpoint-commit",
        default="rename",
        choices=["rename", "marker"],
        help="how a checkpoint becomes valid: its folder is renamed, or, where renames are not atomic (object stores), "
        "meta.json is written last",
    )
    _add_switch(
        group,
        "--resume",
        help="continue from the newest whole checkpoint in OUTPUT_DIR/ARCH/, or start if there is none",
    )
    _add_switch(group, "--overwrite", help="first delete the checkpoints of an earlier run in OUTPUT_DIR/ARCH/")
    group.add_argument(
        "--from-pretrained-params",
        metavar="DIR",
        help="start from the parameters in DIR (a checkpoint folder or PREFIX.pdparams), epoch 0",
    )
    group.add_argument(
        "--pretrained-mismatch",
        default="error",
        choices=["error", "skip-classifier"],
        help="what to do with pretrained parameters of another classifier: for fine-tuning, skip-classifier",
    )
    group.add_argument(
        "--from-checkpoint", metavar="DIR", help="load parameters and optimizer from DIR or its epoch folders"
    )
    group.add_argument(
        "--last-epoch-of-checkpoint",
        type=_epoch,
        metavar="{None,auto,N}",
        help="continue after epoch N of --from-checkpoint; auto: the newest there; None: load DIR itself, count from 0",
    )
    _add_switch(group, "--show-config", default=True, help="print the flags at the start")
    _add_switch(group, "--print-config", help="print the flags as YAML and stop")
    _add_switch(
        group, "--dry-run", help="check flags, data and output folder, build the programs, load the checkpoint, stop"
    )
    _add_switch(group, "--enable-cpu-affinity", default=True, help="bind each process to the cores next to its GPU")
    group.add_argument("--seed", type=_seed, default=0, help="seed of the initial parameters")
    group.add_argument(
        "--device", default="auto", choices=["auto", "gpu", "cpu"], help="auto: a GPU if Paddle finds one, else the CPU"
    )


def _add_dataset(group):
    group.add_argument("--image-root", default="/imagenet", help="folder of the data set; docs/data.md has its forms")
    group.add_argument(
        "--image-shape", type=_integers, default=[4, 224, 224], metavar="C,H,W", help="4 channels: RGB and a zero one"
    )
    group.add_argument("--batch-size", type=_positive, default=256, help="images a step and process")
    group.add_argument(
        "--data-format",
        default="auto",
        choices=["auto", "folder", "filelist", "recordio", "tfrecord", "lmdb", "webdataset", "synthetic"],
        help="auto: detected in --image-root; synthetic: one random batch that stays in device memory",
    )
    group.add_argument("--dali-random-seed", type=_seed, default=42, help="seed of order and augmentation")
    group.add_argument("--dali-num-threads", type=_positive, default=4, help="loader threads a process")
    _add_switch(group, "--dali-output-fp16", help="the loader outputs float16 images")
    group.add_argument(
        "--dali-device",
        default="auto",
        choices=["auto", "gpu", "cpu"],
        help="where images are decoded and augmented; auto: where the program runs",
    )
    group.add_argument(
        "--hw-decoder-load",
        type=_ratio,
        default=0.9,
        help="share of each batch for the GPU's hardware JPEG decoder, if it has one",
    )
    group.add_argument(
        "--cpu-decoder-load",
        type=_ratio,
        default=0.0,
        help="share of each training batch that the CPU decodes beside the GPU",
    )
    group.add_argument("--dali-prefetch", type=_positive, default=3, help="batches the loader keeps ready")
    group.add_argument(
        "--skip-list", metavar="FILE", help="images to leave out, one path below IMAGE_ROOT a line: see dataset verify"
    )
    _add_switch(group, "--allow-outside", help="file lists and --skip-list may name files outside IMAGE_ROOT")


def _add_augmentation(group):
    group.add_argument("--crop-size", type=_positive, default=224, help="height and width of the crop")
    group.add_argument(
        "--rand-crop-scale", type=_numbers, default=[0.08, 1.0], metavar="MIN,MAX", help="area of the random crop"
    )
    group.add_argument(
        "--rand-crop-ratio",
        type=_numbers,
        default=[3 / 4, 4 / 3],
        metavar="MIN,MAX",
        help="width/height of the random crop",
    )
    group.add_argument("--normalize-scale", type=_positive_number, default=1 / 255, help="factor before normalisation")
    group.add_argument("--normalize-mean", type=_numbers, default=[0.485, 0.456, 0.406], metavar="R,G,B", help="mean")
    group.add_argument(
        "--normalize-std", type=_numbers, default=[0.229, 0.224, 0.225], metavar="R,G,B", help="standard deviation"
    )
    group.add_argument("--resize-short", type=_positive, default=256, help="shorter side before the centre crop")
    group.add_argument(
        "--color-jitter",
        type=_not_negative_number,
        default=0.0,
        metavar="S",
        help="brightness, contrast and saturation times factors from 1-S to 1+S",
    )
    group.add_argument(
        "--lighting",
        type=_not_negative_number,
        default=0.0,
        metavar="STD",
        help="PCA lighting noise of this standard deviation (AlexNet's is 0.1)",
    )
    group.add_argument(
        "--rotate-degrees", type=_not_negative_number, default=0.0, metavar="D", help="rotation by -D to D degrees"
    )
    group.add_argument(
        "--interp",
        default="linear",
        choices=["linear", "triangular", "cubic", "lanczos3"],
        help="filter of the resize in training and evaluation; all but linear antialias when shrinking",
    )


def _add_model(group):
    group.add_argument(
        "--model-arch-name",
        default="ResNet50",
        metavar="ARCH",
        help="ResNet18, ResNet34, ResNet50, ResNet101 or ResNet152",
    )
    group.add_argument("--num-of-class", type=_positive, default=1000, help="number of classes")
    _add_switch(group, "--bn-weight-decay", help="apply weight decay to scale and shift of batch normalisation")


def _add_training(group):
    group.add_argument("--label-smoothing", type=_ratio, default=0.1, help="share of the label spread over all classes")
    group.add_argument("--optimizer", default="Momentum", choices=["Momentum"], help="optimizer")
    group.add_argument("--momentum", type=_ratio, default=0.875, help="momentum")
    group.add_argument("--weight-decay", type=_not_negative_number, default=3.0517578125e-05, help="L2 weight decay")
    group.add_argument("--lr-scheduler", default="Cosine", choices=["Cosine"], help="learning-rate schedule")
    group.add_argument(
        "--lr",
        type=_not_negative_number,
        default=0.256,
        help="peak learning rate of one process; multiplied by the number of processes",
    )
    group.add_argument("--warmup-epochs", type=_not_negative, default=5, help="epochs of linear warm-up")
    group.add_argument("--warmup-start-lr", type=_not_negative_number, default=0.0, help="learning rate of step 0")


def _add_advanced(group):
    _add_switch(group, "--amp", help="automatic mixed precision (GPU)")
    group.add_argument(
        "--amp-dtype", default="float16", choices=["float16", "bfloat16"], help="bfloat16 needs no loss scaling"
    )
    group.add_argument(
        "--amp-level",
        default=argparse.SUPPRESS,
        choices=["O1", "O2"],
        help="O1: float32 parameters; O2: parameters in --amp-dtype with float32 master copies (default: O1)",
    )
    group.add_argument(
        "--scale-loss", type=_positive_number, default=1.0, help="loss scale, or the first one if it is dynamic"
    )
    _add_switch(group, "--use-dynamic-loss-scaling", help="adapt the loss scale")
    _add_switch(group, "--use-pure-fp16", help="the same as --amp-level O2, in float16")
    group.add_argument(
        "--max-bad-steps",
        type=_positive,
        default=10,
        help="end the run after this many losses in a row that are not finite; skips of loss scaling do not count",
    )
    group.add_argument(
        "--comm-timeout-s",
        type=_positive,
        default=600,
        help="end a job of several processes when one of them makes no progress for this many seconds",
    )
    group.add_argument(
        "--kernels",
        default="auto",
        choices=["auto", "native", "paddle"],
        help="native: custom kernels for BN, ReLU, addition, max pooling, loss and momentum, in NHWC only; paddle: "
        "Paddle's; auto: native on a GPU in NHWC if they can be built",
    )
    _add_switch(
        group,
        "--cuda-graph",
        default=True,
        help="record a step once as a CUDA graph and launch it by one call; on GPUs of one host, with native kernels, "
        "without --profile-steps",
    )
    _add_switch(
        group, "--fuse-resunit", help="Paddle's fused residual unit; refused where Paddle lacks it, as 2.6.2 does"
    )
    _add_switch(group, "--asp", help="train with 2:4 sparsity")
    _add_switch(group, "--prune-model", help="prune the weights to 2:4 before training (with --asp)")
    group.add_argument(
        "--mask-algo",
        default="mask_1d",
        choices=["mask_1d", "mask_2d_greedy", "mask_2d_best"],
        help="how the 2:4 masks are chosen",
    )


def _check(args):
    """Refuse what the flags alone show to be wrong."""
    if args.from_checkpoint is not None and args.from_pretrained_params is not None:
        raise UsageError(
            f"--from-checkpoint {args.from_checkpoint} and --from-pretrained-params {args.from_pretrained_params} "
            "exclude each other: give the one to start from"
        )
    if args.last_epoch_of_checkpoint is not None and args.from_checkpoint is None:
        raise UsageError(
            f"--last-epoch-of-checkpoint {args.last_epoch_of_checkpoint} needs --from-checkpoint DIR: add it"
        )
    if args.resume and args.run_scope is RunScope.EVAL_ONLY:
        raise UsageError(
            "--resume continues training and --run-scope is eval_only: give --from-checkpoint DIR "
            "--last-epoch-of-checkpoint auto instead"
        )
    if args.resume and args.overwrite:
        raise UsageError("--resume continues the run that --overwrite deletes: drop one of them")
    if args.pretrained_mismatch != "error" and args.from_pretrained_params is None:
        raise UsageError(
            f"--pretrained-mismatch {args.pretrained_mismatch} is about --from-pretrained-params DIR: add it, "
            "or drop the flag"
        )
    nothing_to_load = args.from_checkpoint is None and args.from_pretrained_params is None
    if args.run_scope is RunScope.EVAL_ONLY and nothing_to_load and not args.benchmark:
        raise UsageError(
            "--run-scope eval_only has nothing to evaluate: add --from-checkpoint DIR or --from-pretrained-params DIR"
        )
    trains = args.run_scope is not RunScope.EVAL_ONLY and not args.benchmark
    if args.tensorboard_dir is not None and not trains:
        raise UsageError(f"--tensorboard-dir {args.tensorboard_dir} shows a training and this run has none: drop it")
    if args.report_html is not None and args.benchmark:
        raise UsageError(f"--report-html {args.report_html} is about a data set, and --benchmark is not: drop one")
    if args.predictions is not None and (args.run_scope is not RunScope.EVAL_ONLY or args.benchmark):
        raise UsageError(
            f"--predictions {args.predictions} are those of one evaluation: add --run-scope eval_only"
            + (", drop --benchmark" if args.benchmark else "")
        )
    for name in ("predictions", "report_html"):
        if getattr(args, name) is not None and args.data_format == "synthetic":
            raise UsageError(f"{flag(name)} names images and --data-format synthetic has none: drop one of them")
    shape = ",".join(map(str, args.image_shape))
    if len(args.image_shape) != 3 or args.image_shape[0] not in (3, 4) or min(args.image_shape) < 1:
        raise UsageError(f"--image-shape {shape} is not C,H,W with 3 or 4 channels: give 4,224,224 or 3,224,224")
    if args.image_shape[1:] != [args.crop_size, args.crop_size]:
        raise UsageError(
            f"--image-shape {shape} does not fit --crop-size {args.crop_size}: give --image-shape "
            f"{args.image_shape[0]},{args.crop_size},{args.crop_size}, or --crop-size {args.image_shape[1]}"
        )
    if args.resize_short < args.crop_size:
        raise UsageError(
            f"--resize-short {args.resize_short} is smaller than --crop-size {args.crop_size}: "
            f"give at least {args.crop_size}"
        )
    for name, count in (("rand_crop_scale", 2), ("rand_crop_ratio", 2), ("normalize_mean", 3), ("normalize_std", 3)):
        values = getattr(args, name)
        if len(values) != count or (name != "normalize_mean" and min(values) <= 0):
            raise UsageError(
                f"{flag(name)} {','.join(map(str, values))} is not {count} numbers of the right sign: mend it"
            )
    for name in ("rand_crop_scale", "rand_crop_ratio"):
        low, high = getattr(args, name)
        if low > high or (name == "rand_crop_scale" and high > 1):
            raise UsageError(f"{flag(name)} {low},{high} is no range: give MIN,MAX with MIN <= MAX, areas up to 1")
    for name, (low, high) in AUGMENTATION_RANGES.items():
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if min(values) < low or max(values) > high:
            raise UsageError(
                f"{flag(name)} {','.join(f'{value:g}' for value in values)} is out of range: give values from {low:g} "
                f"to {high:g}"
            )
    if args.rotate_degrees > 180:
        raise UsageError(f"--rotate-degrees {args.rotate_degrees:g} is more than a half turn: give 180 or less")
    if args.asp and not args.prune_model and args.from_checkpoint is None:
        raise UsageError(
            "--asp keeps pruned weights pruned and there are none: add --prune-model or --from-checkpoint DIR"
        )
    if args.mask_algo != "mask_1d" and not args.prune_model:
        raise UsageError(f"--mask-algo {args.mask_algo} is how --prune-model prunes: add it, or drop the flag")
    if args.prune_model and not args.asp:
        raise UsageError("--prune-model prunes for sparse training and needs --asp: add it, or drop the flag")


def _check_amp(args):
    """Refuse precisions that do not fit each other, and settle --amp-level."""
    level = getattr(args, "amp_level", None)
    if args.use_pure_fp16 and not args.amp:
        raise UsageError("--use-pure-fp16 is a level of mixed precision and needs --amp: add it, or drop the flag")
    if args.use_pure_fp16 and level == "O1":
        raise UsageError("--use-pure-fp16 is level O2 and --amp-level is O1: drop one of them")
    args.amp_level = level or ("O2" if args.use_pure_fp16 else "O1")
    if args.use_dynamic_loss_scaling and not args.amp:
        raise UsageError("--use-dynamic-loss-scaling scales the loss of --amp only: add it, or drop the flag")
    if args.scale_loss != 1 and not args.amp:
        raise UsageError(f"--scale-loss {args.scale_loss:g} scales the loss of --amp only: add it, or drop the flag")
    if args.amp_level == "O2" and not args.amp:
        raise UsageError("--amp-level O2 is a level of mixed precision and needs --amp: add it, or drop the flag")
    if args.amp_dtype == "float16":
        return
    if not args.amp:
        raise UsageError("--amp-dtype bfloat16 is a type of mixed precision and needs --amp: add it, or drop the flag")
    if args.use_pure_fp16:
        raise UsageError("--use-pure-fp16 is float16 and --amp-dtype is bfloat16: give --amp-level O2 instead")
    if args.use_dynamic_loss_scaling or args.scale_loss != 1:
        flag = "--use-dynamic-loss-scaling" if args.use_dynamic_loss_scaling else f"--scale-loss {args.scale_loss:g}"
        raise UsageError(f"{flag} is for float16, and bfloat16 reaches as far as float32: drop it")
    if args.asp and args.amp_level == "O2":
        raise UsageError("--asp masks no bfloat16 parameters: give --amp-level O1 or --amp-dtype float16")


def flag(name):
    """How an attribute of the flags is spelt on the command line: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


def _unknown(kind, word, known):
    if not word.startswith("-") and kind == "flag":
        return f"unexpected word '{word}': each value follows its --flag"
    bare = {name.lstrip("-"): name for name in known}  # dashes that all flags share would make all of them alike
    near = difflib.get_close_matches(word.lstrip("-").replace("_", "-" if kind == "flag" else "_"), bare, n=1)
    return f"unknown {kind} {word}: " + (f"did you mean {bare[near[0]]}?" if near else "see --help")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(" ".join(message.removeprefix("argument ").split()))


def _add_switch(group, flag, default=False, help=None):
    """A truth value: `--flag` alone means true, `--flag false` takes back what a YAML file says."""
    group.add_argument(flag, nargs="?", const=True, default=default, type=_truth, metavar="{true,false}", help=help)


def _config_file(argv):
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config


def _yaml_words(parser, path):
    """The keys of a YAML file as command-line words, so that one parser checks both."""
    values = _read_yaml(path)
    try:
        words = _words(parser, values)
        parser.parse_known_args(words)
    except UsageError as e:
        raise UsageError(f"--config {path}: {e}") from e
    return words


def _words(parser, values):
    by_name = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    words = []
    for key, value in values.items():
        if key not in by_name:
            raise UsageError(_unknown("key", str(key), list(by_name)))
        if isinstance(value, bool) and not by_name[key].nargs:
            raise UsageError(f"{key} takes a word and YAML reads this one as {value}: quote it")
        if value is not None:  # null keeps the default
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{flag(key)}={text}")
    return words


def _read_yaml(path):
    """The content of a --config file.

    Raises:
        UsageError: it cannot be read, is larger than any real one, or is not a mapping in YAML without aliases.
    """
    try:
        with files.open_regular(path, limit_bytes=64 << 10) as f:
            values = yaml.load(f.read().decode(), _YamlLoader)
        str(values)  # an integer may have too many digits for that
    except OSError as e:
        raise UsageError(f"--config {path} cannot be read ({e.strerror}): name a YAML file") from e
    except Exception as e:  # PyYAML raises its own errors and most of Python's, RecursionError among them
        reason = " ".join(str(e).split())[:200]
        raise UsageError(f"--config {path} is not YAML ({reason}): fix that line") from e
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UsageError(f"--config {path} is not a mapping: write lines `flag: value`")
    return values


class _YamlLoader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines can make billions of values."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias {self.peek_event().start_mark}: write the value out")
        return super().compose_node(parent, index)


def _truth(text):
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false: give one of them")
    return words[text.lower()]


def _number(text):
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError) as e:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number: give one such as 0.1 or 1/255") from e
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite: give a number such as 0.1 or 1/255")
    return value


def _file_name(text):
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no name for files: give one such as resnet50, without / and no dot in front"
        )
    return text


def _not_negative_number(text):
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative: give 0 or more")
    return value


def _positive_number(text):
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive: give more than 0")
    return value


def _ratio(text):
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1: give a share")
    return value


def _integer(text, least):
    try:
        value = int(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number: give one of at least {least}") from e
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is too small: give at least {least}")
    return value


def _positive(text):
    return _integer(text, 1)


def _not_negative(text):
    return _integer(text, 0)


def _seed(text):
    value = _not_negative(text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is too large for a seed: give less than {2**32}")
    return value


def _steps(text):
    """A:B; a YAML list of two numbers arrives as A,B. None takes back what stands before."""
    if text == "None":
        return None
    parts = text.replace(",", ":").split(":")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not A:B: give two steps such as 100:110 (quoted in YAML)")
    begin, end = (_not_negative(part) for part in parts)
    if begin >= end:
        raise argparse.ArgumentTypeError(f"{begin}:{end} holds no step: give A:B with A less than B")
    return [begin, end]


def _path(text):
    """A path; None takes back what stands before."""
    return None if text == "None" else text


def _epoch(text):
    if text == "None":
        return None
    return text if text == "auto" else _integer(text, 0)


def _integers(text):
    return [_integer(part, 0) for part in _parts(text)]


def _numbers(text):
    return [_number(part) for part in _parts(text)]


def _parts(text):
    if len(text.split()) > 1 and "," not in text:
        raise argparse.ArgumentTypeError(f"'{text}' has no commas: give {','.join(text.split())}")
    return text.split(",")
