"""Every flag of train.py: one parser, named groups, a YAML file below the command line.

This module imports neither Paddle nor DALI, so that `--help` and a misspelt flag answer at once.
"""

import argparse
import difflib
import re
import sys

import yaml

from utils import files, numbers
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
}


# The kind of each flag says who inherits it from a checkpoint: an evaluation and fine-tuning need the network and the
# preprocessing, a resumed run also the recipe and the saving of checkpoints. The others belong to the command.
KINDS = {
    "network": ("model_arch_name", "num_of_class", "image_shape"),
    "preprocessing": (
        *("crop_size", "resize_short", "interp"),
        *("normalize_scale", "normalize_mean", "normalize_std"),
    ),
    "recipe": (
        *("epochs", "batch_size", "seed", "dali_random_seed", "data_layout", "dali_output_fp16", "cpu_decoder_load"),
        *("rand_crop_scale", "rand_crop_ratio", "color_jitter", "lighting", "rotate_degrees"),
        *("bn_weight_decay", "label_smoothing", "optimizer", "momentum", "weight_decay"),
        *("beta1", "beta2", "opt_epsilon"),
        *("lr_scheduler", "min_lr", "lr_decay_epochs", "lr_decay_factor", "lr_power", "lr_rise", "lr_flat"),
        *("lr", "warmup_epochs", "warmup_start_lr", "max_bad_steps"),
        *("amp", "amp_dtype", "amp_level", "use_pure_fp16", "scale_loss", "use_dynamic_loss_scaling"),
        *("fuse_resunit", "asp", "prune_model", "mask_algo"),
    ),
    "saving": (
        *("model_prefix", "save_interval", "save_interval_steps", "keep_checkpoints", "checkpoint_commit"),
        "eval_interval",
    ),
    "loader": (
        *("image_root", "data_format", "dali_num_threads", "dali_device", "hw_decoder_load", "dali_prefetch"),
        *("skip_list", "allow_empty_classes", "allow_outside"),
    ),
    "machine": ("device", "enable_cpu_affinity", "comm_timeout_s", "kernels", "cuda_graph"),
    "output": (
        *("config", "print_config", "show_config", "verbose", "dry_run", "run_scope", "print_interval"),
        *("output_dir", "report_file", "tensorboard_dir", "report_html", "predictions", "profile_steps"),
        *("benchmark", "benchmark_steps", "benchmark_warmup_steps", "resume", "overwrite"),
        *("from_checkpoint", "last_epoch_of_checkpoint", "from_pretrained_params", "pretrained_mismatch"),
    ),
}
EVALUATED = (*KINDS["network"], *KINDS["preprocessing"])
RESUMED = (*EVALUATED, *KINDS["recipe"], *KINDS["saving"])
# The flags that only some schedules use.
SCHEDULE_FLAGS = {
    "min_lr": ("Cosine", "Poly", "OneCycle", "FlatCosine"),
    "lr_decay_epochs": ("Piecewise",),
    "lr_decay_factor": ("Piecewise",),
    "lr_power": ("Poly",),
    "lr_rise": ("OneCycle",),
    "lr_flat": ("FlatCosine",),
}
# The flags that only some optimizers use.
OPTIMIZER_FLAGS = {
    "momentum": ("Momentum", "Nesterov"),
    "beta1": ("AdamW", "LAMB"),
    "beta2": ("AdamW", "LAMB"),
    "opt_epsilon": ("AdamW", "LAMB"),
}
# If one of these is explicit and differs from the checkpoint's, those that depend on it are not inherited.
DEPENDENT = {
    "model_arch_name": ("model_prefix",),
    "crop_size": ("resize_short",),
    "image_shape": ("resize_short",),
    "amp": ("amp_dtype", "amp_level", "use_pure_fp16", "scale_loss", "use_dynamic_loss_scaling"),
    "amp_dtype": ("use_pure_fp16", "scale_loss", "use_dynamic_loss_scaling"),
    "amp_level": ("use_pure_fp16",),
    "asp": ("prune_model", "mask_algo"),
    "lr_scheduler": tuple(SCHEDULE_FLAGS),
    "optimizer": tuple(OPTIMIZER_FLAGS),
}
RESIZE_RATIO = 256 / 224  # of --resize-short to --crop-size by default
# Flags that older checkpoints do not have, where the default is not what the program did before.
OLD_MEANINGS = {"interp": "linear", "num_of_class": 1000}
# What other programs call a flag.
ALIASES = {
    "amp": "fp16 mixed-precision use-amp",
    "batch-size": "b bs",
    "crop-size": "image-size img-size input-size",
    "dali-num-threads": "j num-workers threads workers",
    "from-checkpoint": "checkpoint load",
    "from-pretrained-params": "pretrained weights",
    "image-root": "data data-dir data-path dataset",
    "label-smoothing": "smoothing",
    "lr": "base-lr learning-rate",
    "lr-scheduler": "scheduler",
    "model-arch-name": "arch backbone model model-name",
    "num-of-class": "class-num num-classes",
    "output-dir": "checkpoint-dir output save-dir work-dir",
    "run-scope eval_only": "eval eval-only evaluate",
    "tensorboard-dir": "tensorboard",
    "weight-decay": "wd",
}
ALIASES = {alias: meant for meant, aliases in ALIASES.items() for alias in aliases.split()}
# Flags of newer versions of NVIDIA's example.
ELSEWHERE = {
    "inference-dir": "run python -m paddle_resnet.export CHECKPOINT DIR after the training",
    "qat": "quantization is not supported; remove it",
}


def parse_args(argv=None):
    """Read the flags.

    Args:
        argv: list of words, default the command line. A flag on it wins over `--config FILE`, which wins over
            the default.
    Returns:
        argparse.Namespace, one attribute per flag with underscores; run_scope is a RunScope. `given` holds the names of
        the explicit flags, those on the command line or in the file, `inherited` those that a checkpoint has set;
        `is_started` becomes true when Fleet has started with these flags.
    Raises:
        UsageError: an unknown flag or key, a value of the wrong kind, flags that exclude each other; a line for each.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    config_file = _config_file(argv)
    words = _yaml_words(parser, config_file) if config_file is not None else []
    args, unknown = _parse(parser, words + argv)
    if unknown:
        raise UsageError(*_unknown_words(parser, unknown))
    args.amp_level = args.amp_level or ("O2" if args.use_pure_fp16 else "O1")
    follow_sizes(args)
    problems = [*_conflicts_of_start(args), *_conflicts_of_output(args)]
    if not (_has_start(args) or args.resume):  # a checkpoint may have what the others need: see inherit
        problems += _conflicts_of_settings(args)
    _refuse(problems)
    return args


def _parse(parser, words):
    """(flags, unknown words); `given` names the flags that the words set, the others have their defaults."""
    defaults = {a.dest: None if a.default is argparse.SUPPRESS else a.default for a in parser._actions}
    del defaults["help"]
    unset = object()
    args, unknown = parser.parse_known_args(words, argparse.Namespace(**dict.fromkeys(defaults, unset)))
    given = {name: value for name, value in vars(args).items() if value is not unset}
    _refuse([f"{flag(name)} --: not a value; set one" for name, value in given.items() if value == []])  # of argparse
    args = argparse.Namespace(**defaults | given, given=frozenset(given), inherited=frozenset(), is_started=False)
    args.run_scope = RunScope(args.run_scope)
    args.model_prefix = args.model_prefix or _prefix(args.model_arch_name)
    return args, unknown


def inherit(args, recorded, names):
    """Give the flags that are not explicit the values of an earlier run; changes the flags.

    Args:
        args: flags.
        recorded: those of the earlier run.
        names: of the flags.
    Returns:
        ({flag: value} of those that changed, {flag: (value, recorded value)} of those that are explicit and differ).
    """
    before = dict(vars(args))
    differing = [n for n in names if n in args.given and before[n] != getattr(recorded, n)]
    blocked = {name for leader in differing for name in DEPENDENT.get(leader, ())}
    inherited = [name for name in names if name not in args.given and name not in blocked]
    for name in inherited:
        setattr(args, name, getattr(recorded, name))
    args.inherited = args.inherited.union(inherited)
    if "model_prefix" not in {*args.given, *inherited}:
        args.model_prefix = _prefix(args.model_arch_name)
    follow_sizes(args)
    taken = {flag(name): vars(args)[name] for name in inherited if vars(args)[name] != before[name]}
    return taken, {flag(n): (before[n], getattr(recorded, n)) for n in differing}


def _prefix(arch):
    """resnet_50_paddle for ResNet50, as in NVIDIA's example."""
    return re.sub(r"(?<=\D)(?=\d)", "_", arch).lower() + "_paddle"


def follow_sizes(args):
    """Let --image-shape follow --crop-size, or the other way round, if only one of them is explicit, and --resize-short
    follow --crop-size unless it is explicit or inherited; changes the flags."""
    if "image_shape" not in args.given:
        args.image_shape = [args.image_shape[0], args.crop_size, args.crop_size]
    elif "crop_size" not in args.given and len(args.image_shape) == 3:
        args.crop_size = args.image_shape[1]
    if "resize_short" not in args.given | args.inherited:
        args.resize_short = max(1, round(args.crop_size * RESIZE_RATIO))


def check_settings(args):
    """Check the flags together once all are known.

    Raises:
        UsageError: they are impossible, or do not fit each other.
    """
    _refuse(list(_conflicts_of_settings(args)))


def warnings(args):
    """Yield a sentence for each combination of flags that runs, but rarely as intended."""
    ratio = args.resize_short / args.crop_size
    if ratio > 1.3:
        yield (
            f"--resize-short {args.resize_short}: {ratio:.2f} times --crop-size {args.crop_size}, so an evaluation "
            f"sees only the center of each image; use {round(args.crop_size * RESIZE_RATIO)}"
        )
    if args.optimizer in OPTIMIZER_FLAGS["beta1"] and args.lr > 0.03:
        yield f"--lr {args.lr:g}: suits Momentum; --optimizer {args.optimizer} needs a lower one, such as 0.001"
    if args.device == "cpu" and args.data_layout == "NHWC":
        yield "--data-layout NHWC: several times slower than NCHW on a CPU; use NCHW"
    if args.device == "cpu" and args.dali_output_fp16:
        yield "--dali-output-fp16: rounds images to half precision without a gain on a CPU; remove the flag"


def _refuse(problems):
    if problems:
        raise UsageError(*problems)


def as_dict(args):
    """The flags that describe the run as plain data."""
    hidden = ("config", "print_config", "given", "inherited", "is_started")
    values = {name: value for name, value in vars(args).items() if name not in hidden}
    values["run_scope"] = args.run_scope.value
    return values


def as_file(args):
    """What a --config file holds: as_dict without what would follow checkpoint, data or network if it is not given."""
    follow = {*EVALUATED, "model_prefix"} - args.given
    return {name: value for name, value in as_dict(args).items() if name not in follow}


def from_dict(values):
    """The flags that as_dict has made plain data of, perhaps by another version: flags that are missing have their
    defaults, or what the program did before they existed; unknown ones are left out.

    Raises:
        UsageError: a value of the wrong kind.
    """
    parser = build_parser()
    known = {action.dest for action in parser._actions}
    values = OLD_MEANINGS | {name: value for name, value in values.items() if name in known}
    return _parse(parser, _words(parser, values))[0]


def changed(values):
    """Those of the flags, as as_dict gives them, that are not the defaults."""
    defaults = as_dict(parse_args([]))
    return {name: value for name, value in values.items() if value != defaults.get(name)}


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
    group.add_argument("--epochs", type=numbers.positive, default=90, help="epochs to train")
    group.add_argument(
        "--save-interval",
        type=numbers.positive,
        default=1,
        help="epochs between checkpoints; the last epoch is always saved",
    )
    group.add_argument(
        "--eval-interval",
        type=numbers.positive,
        default=1,
        help="epochs between evaluations; the last epoch is always evaluated",
    )
    group.add_argument("--print-interval", type=numbers.positive, default=10, help="steps between log lines")
    group.add_argument(
        "--report-file",
        type=_path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="metrics in dllogger's JSON lines; --resume appends to the file (default: OUTPUT_DIR/ARCH/report.json, "
        "report.eval.json for an evaluation, report.benchmark.json for a benchmark)",
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
    group.add_argument("--benchmark-steps", type=numbers.positive, default=100, help="steps to measure")
    group.add_argument(
        "--benchmark-warmup-steps", type=numbers.not_negative, default=100, help="steps before the measurement"
    )
    group.add_argument(
        "--profile-steps",
        type=_steps,
        metavar="{None,A:B}",
        help="write a trace of the steps A to B-1 of the first epoch to OUTPUT_DIR/profile/",
    )
    group.add_argument(
        "--model-prefix",
        type=_file_name,
        default=argparse.SUPPRESS,
        help="name of the files in new checkpoints (default: that of ARCH, such as resnet_50_paddle), and in folders "
        "without meta.json that a run starts from (default: resnet_50_paddle)",
    )
    group.add_argument(
        "--save-interval-steps",
        type=numbers.not_negative,
        default=0,
        help="steps between checkpoints in an epoch; 0: none",
    )
    group.add_argument(
        "--keep-checkpoints",
        type=numbers.positive,
        default=3,
        help="newest checkpoints of this run to keep, in addition to its best",
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
    _add_switch(
        group,
        "--show-config",
        default=True,
        help="print the flags before the first step: those that are not the defaults, or all of them if this is given",
    )
    _add_switch(group, "--verbose", help="name all variables in which a checkpoint does not fit the network")
    _add_switch(group, "--print-config", help="print the flags as YAML and stop")
    _add_switch(
        group, "--dry-run", help="check flags, data and output folder, build the programs, load the checkpoint, stop"
    )
    _add_switch(group, "--enable-cpu-affinity", default=True, help="bind each process to the cores next to its GPU")
    group.add_argument("--seed", type=numbers.seed, default=0, help="seed of the initial parameters")
    group.add_argument(
        "--device", default="auto", choices=["auto", "gpu", "cpu"], help="auto: a GPU if Paddle finds one, else the CPU"
    )


def _add_dataset(group):
    group.add_argument("--image-root", default="/imagenet", help="folder of the data set; docs/data.md has its forms")
    group.add_argument(
        "--image-shape",
        type=numbers.shape,
        default=[4, 224, 224],
        metavar="C,H,W",
        help="C is 3, or 4 for RGB and a zero channel, which is faster in NHWC on a GPU and the default there alone; H "
        "and W are --crop-size, which follows them if it is not given",
    )
    group.add_argument("--batch-size", type=numbers.batch_size, default=256, help="images a step and process")
    group.add_argument(
        "--data-format",
        default="auto",
        choices=["auto", "folder", "filelist", "recordio", "tfrecord", "lmdb", "webdataset", "synthetic"],
        help="auto: detected in --image-root; synthetic: one random batch that stays in device memory",
    )
    group.add_argument("--dali-random-seed", type=numbers.seed, default=42, help="seed of order and augmentation")
    group.add_argument("--dali-num-threads", type=numbers.threads, default=4, help="loader threads a process")
    _add_switch(group, "--dali-output-fp16", help="the loader outputs float16 images")
    group.add_argument(
        "--dali-device",
        default="auto",
        choices=["auto", "gpu", "cpu"],
        help="where images are decoded and augmented; auto: where the program runs",
    )
    group.add_argument(
        "--hw-decoder-load",
        type=numbers.ratio,
        default=0.9,
        help="share of each batch for the GPU's hardware JPEG decoder, if it has one",
    )
    group.add_argument(
        "--cpu-decoder-load",
        type=numbers.ratio,
        default=0.0,
        help="share of each training batch that the CPU decodes beside the GPU",
    )
    group.add_argument(
        "--dali-prefetch", type=numbers.integer(1, 100), default=3, help="batches the loader keeps ready"
    )
    group.add_argument(
        "--skip-list", metavar="FILE", help="images to leave out, one path below IMAGE_ROOT a line: see dataset verify"
    )
    _add_switch(group, "--allow-empty-classes", help="class folders of train/ may be without images: a warning")
    _add_switch(group, "--allow-outside", help="file lists and --skip-list may name files outside IMAGE_ROOT")


def _add_augmentation(group):
    group.add_argument("--crop-size", type=numbers.side, default=224, help="height and width of the crop")
    group.add_argument(
        "--rand-crop-scale",
        type=numbers.number_list,
        default=[0.08, 1.0],
        metavar="MIN,MAX",
        help="area of the random crop",
    )
    group.add_argument(
        "--rand-crop-ratio",
        type=numbers.number_list,
        default=[3 / 4, 4 / 3],
        metavar="MIN,MAX",
        help="width/height of the random crop",
    )
    group.add_argument("--normalize-scale", type=_positive_number, default=1 / 255, help="factor before normalisation")
    group.add_argument(
        "--normalize-mean", type=numbers.number_list, default=[0.485, 0.456, 0.406], metavar="R,G,B", help="mean"
    )
    group.add_argument(
        "--normalize-std",
        type=numbers.number_list,
        default=[0.229, 0.224, 0.225],
        metavar="R,G,B",
        help="standard deviation",
    )
    group.add_argument(
        "--resize-short",
        type=numbers.side,
        default=256,
        help="shorter side before the center crop of an evaluation; if not set, 256/224 of --crop-size",
    )
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
        default="triangular",
        choices=["linear", "triangular", "cubic", "lanczos3"],
        help="filter of the resize in training and evaluation; all but linear antialias when shrinking; triangular is "
        "that of NVIDIA's example",
    )


def _add_model(group):
    group.add_argument(
        "--model-arch-name",
        default="ResNet50",
        metavar="ARCH",
        help="ResNet18, ResNet34, ResNet50, ResNet101, ResNet152 or MobileNetV2",
    )
    group.add_argument(
        "--num-of-class",
        type=numbers.num_of_class,
        default=argparse.SUPPRESS,
        help="outputs of the network (default: the classes of the data, or 1000 where the data do not name them)",
    )
    _add_switch(group, "--bn-weight-decay", help="apply weight decay to scale and shift of batch normalisation")


def _add_training(group):
    group.add_argument(
        "--label-smoothing", type=numbers.ratio, default=0.1, help="share of the label spread over all classes"
    )
    group.add_argument(
        "--optimizer",
        default="Momentum",
        choices=["Momentum", "Nesterov", "AdamW", "LAMB"],
        help="optimizer; see docs/training.md for the formulas",
    )
    group.add_argument(
        "--momentum", type=numbers.ratio, default=0.875, help="weight of the old velocity (Momentum, Nesterov)"
    )
    group.add_argument("--beta1", type=_beta, default=0.9, help="weight of the old first moment (AdamW, LAMB)")
    group.add_argument("--beta2", type=_beta, default=0.999, help="weight of the old second moment (AdamW, LAMB)")
    group.add_argument(
        "--opt-epsilon", type=_epsilon, default=1e-8, help="added to the root of the second moment (AdamW, LAMB)"
    )
    group.add_argument(
        "--weight-decay",
        type=_not_negative_number,
        default=3.0517578125e-05,
        help="L2 weight decay; with AdamW and LAMB, decoupled from the gradient",
    )
    group.add_argument(
        "--lr-scheduler",
        default="Cosine",
        choices=["Cosine", "Piecewise", "Poly", "OneCycle", "FlatCosine"],
        help="learning-rate schedule after the warm-up; docs/training.md has the formulas",
    )
    group.add_argument(
        "--min-lr",
        type=_not_negative_number,
        default=0.0,
        help="learning rate of one process at the end of all schedules except Piecewise",
    )
    group.add_argument(
        "--lr-decay-epochs",
        type=numbers.list_of(_not_negative_number),
        default=[30.0, 60.0, 80.0],
        metavar="E,...",
        help="epochs from which Piecewise multiplies the learning rate by --lr-decay-factor",
    )
    group.add_argument(
        "--lr-decay-factor", type=_positive_number, default=0.1, help="factor of Piecewise at each of these epochs"
    )
    group.add_argument("--lr-power", type=_positive_number, default=2.0, help="exponent of Poly")
    group.add_argument(
        "--lr-rise", type=numbers.ratio, default=0.25, help="fraction of the steps in which OneCycle rises to the peak"
    )
    group.add_argument(
        "--lr-flat",
        type=numbers.ratio,
        default=0.75,
        help="fraction of the steps in which FlatCosine stays at the peak",
    )
    group.add_argument(
        "--lr",
        type=_not_negative_number,
        default=0.256,
        help="peak learning rate of one process; multiplied by the number of processes",
    )
    group.add_argument("--warmup-epochs", type=numbers.not_negative, default=5, help="epochs of linear warm-up")
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
        type=numbers.positive,
        default=10,
        help="end the run after this many losses in a row that are not finite; skips of loss scaling do not count",
    )
    group.add_argument(
        "--comm-timeout-s",
        type=numbers.integer(1, 10**6),
        default=600,
        help="end a job of several processes when one of them makes no progress for this many seconds",
    )
    group.add_argument(
        "--kernels",
        default="auto",
        choices=["auto", "native", "paddle"],
        help="native: custom kernels for BN, ReLU, addition, max pooling, loss and optimizer, in NHWC only; paddle: "
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


def _conflicts_of_settings(args):
    """Yield a sentence for each thing that is wrong with flags that a checkpoint may complete."""
    yield from _conflicts_of_augmentation(args)
    yield from _conflicts_of_schedule(args)
    yield from _conflicts_of_sparsity(args)
    yield from _conflicts_of_amp(args)
    yield from _conflicts_of_sizes(args)


def _conflicts_of_start(args):
    if args.from_checkpoint is not None and args.from_pretrained_params is not None:
        yield (
            f"--from-checkpoint {args.from_checkpoint} and --from-pretrained-params {args.from_pretrained_params} "
            "exclude each other: give the one to start from"
        )
    if args.last_epoch_of_checkpoint is not None and args.from_checkpoint is None:
        yield f"--last-epoch-of-checkpoint {args.last_epoch_of_checkpoint} needs --from-checkpoint DIR: add it"
    if args.resume and args.run_scope is RunScope.EVAL_ONLY:
        yield (
            "--resume continues training and --run-scope is eval_only: give --from-checkpoint DIR "
            "--last-epoch-of-checkpoint auto instead"
        )
    if args.resume and args.overwrite:
        yield "--resume continues the run that --overwrite deletes: drop one of them"
    if args.pretrained_mismatch != "error" and args.from_pretrained_params is None:
        yield (
            f"--pretrained-mismatch {args.pretrained_mismatch} is about --from-pretrained-params DIR: add it, "
            "or drop the flag"
        )
    if args.run_scope is RunScope.EVAL_ONLY and args.pretrained_mismatch != "error":
        yield (
            f"--pretrained-mismatch {args.pretrained_mismatch}: leaves the classifier untrained, and --run-scope is "
            "eval_only; remove it"
        )
    if args.run_scope is RunScope.EVAL_ONLY and not _has_start(args) and not args.benchmark and not args.resume:
        yield "--run-scope eval_only has nothing to evaluate: add --from-checkpoint DIR or --from-pretrained-params DIR"


def _conflicts_of_output(args):
    trains = args.run_scope is not RunScope.EVAL_ONLY and not args.benchmark
    if args.tensorboard_dir is not None and not trains:
        yield f"--tensorboard-dir {args.tensorboard_dir} shows a training and this run has none: drop it"
    if args.report_html is not None and args.benchmark:
        yield f"--report-html {args.report_html} is about a data set, and --benchmark is not: drop one"
    if args.predictions is not None and (args.run_scope is not RunScope.EVAL_ONLY or args.benchmark):
        yield f"--predictions {args.predictions} are those of one evaluation: add --run-scope eval_only" + (
            ", drop --benchmark" if args.benchmark else ""
        )
    for name in ("predictions", "report_html"):
        if getattr(args, name) is not None and args.data_format == "synthetic":
            yield f"{flag(name)} names images and --data-format synthetic has none: drop one of them"


def _conflicts_of_augmentation(args):
    counts = {"rand_crop_scale": 2, "rand_crop_ratio": 2, "normalize_mean": 3, "normalize_std": 3}
    for name, count in counts.items():
        values = getattr(args, name)
        if len(values) != count or (name != "normalize_mean" and min(values) <= 0):
            yield f"{flag(name)} {','.join(map(str, values))} is not {count} numbers of the right sign: mend it"
        elif name.startswith("rand_crop") and (values[0] > values[1] or (name.endswith("scale") and values[1] > 1)):
            yield f"{flag(name)} {values[0]},{values[1]} is no range: give MIN,MAX with MIN <= MAX, areas up to 1"
        else:
            yield from _out_of_range(args, name)
    for name in [name for name in AUGMENTATION_RANGES if name not in counts]:
        yield from _out_of_range(args, name)
    if args.rotate_degrees > 180:
        yield f"--rotate-degrees {args.rotate_degrees:g} is more than a half turn: give 180 or less"


def _out_of_range(args, name):
    (low, high), value = AUGMENTATION_RANGES[name], getattr(args, name)
    values = value if isinstance(value, list) else [value]
    if min(values) < low or max(values) > high:
        yield (
            f"{flag(name)} {','.join(f'{value:g}' for value in values)} is out of range: give values from {low:g} "
            f"to {high:g}"
        )


def _conflicts_of_schedule(args):
    yield from _unused(args, "lr_scheduler", SCHEDULE_FLAGS)
    yield from _unused(args, "optimizer", OPTIMIZER_FLAGS)
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr:g}: exceeds --lr {args.lr:g}; use a smaller one"


def _unused(args, choice, users):
    """Yield an error message for each flag of `users`, {flag: values of `choice` that use it}, that has no effect."""
    parser, chosen = build_parser(), getattr(args, choice)
    for name, choices in users.items():
        value = getattr(args, name)
        if value != parser.get_default(name) and chosen not in choices:
            yield (
                f"{flag(name)} {text(value)}: not used by {flag(choice)} {chosen}; remove it, or use "
                f"{flag(choice)} {' or '.join(choices)}"
            )


def _conflicts_of_sparsity(args):
    if args.asp and not (args.prune_model or args.resume) and args.from_checkpoint is None:
        yield "--asp: requires pruned weights; add --prune-model or --from-checkpoint DIR"
    if args.mask_algo != "mask_1d" and not args.prune_model:
        yield f"--mask-algo {args.mask_algo} is how --prune-model prunes: add it, or drop the flag"
    if args.prune_model and not args.asp:
        yield "--prune-model prunes for sparse training and needs --asp: add it, or drop the flag"


def _conflicts_of_amp(args):
    """Precisions that do not fit each other."""
    if not args.amp:
        flags = {
            "--use-pure-fp16": args.use_pure_fp16,
            "--use-dynamic-loss-scaling": args.use_dynamic_loss_scaling,
            f"--scale-loss {args.scale_loss:g}": args.scale_loss != 1,
            "--amp-level O2": args.amp_level == "O2" and not args.use_pure_fp16,
            f"--amp-dtype {args.amp_dtype}": args.amp_dtype != "float16",
        }
        for words in (words for words, is_given in flags.items() if is_given):
            yield f"{words} is about mixed precision and needs --amp: add it, or drop the flag"
        return
    if args.use_pure_fp16 and args.amp_level == "O1":
        yield "--use-pure-fp16 is level O2 and --amp-level is O1: drop one of them"
    if args.amp_dtype == "float16":
        return
    if args.use_pure_fp16:
        yield "--use-pure-fp16 is float16 and --amp-dtype is bfloat16: give --amp-level O2 instead"
    if args.use_dynamic_loss_scaling or args.scale_loss != 1:
        words = "--use-dynamic-loss-scaling" if args.use_dynamic_loss_scaling else f"--scale-loss {args.scale_loss:g}"
        yield f"{words} is for float16, and bfloat16 reaches as far as float32: drop it"
    if args.asp and args.amp_level == "O2":
        yield "--asp masks no bfloat16 parameters: give --amp-level O1 or --amp-dtype float16"


def _conflicts_of_sizes(args):
    shape = ",".join(map(str, args.image_shape))
    if len(args.image_shape) != 3 or args.image_shape[0] not in (3, 4) or min(args.image_shape) < 1:
        yield f"--image-shape {shape} is not C,H,W with 3 or 4 channels: give 4,224,224 or 3,224,224"
    elif args.image_shape[1:] != [args.crop_size, args.crop_size]:
        yield (
            f"--image-shape {shape} does not fit --crop-size {args.crop_size}: give --image-shape "
            f"{args.image_shape[0]},{args.crop_size},{args.crop_size}, or --crop-size {args.image_shape[1]}"
        )
    if args.resize_short < args.crop_size:
        yield (
            f"--resize-short {args.resize_short} is smaller than --crop-size {args.crop_size}: "
            f"give at least {args.crop_size}"
        )


def _has_start(args):
    return args.from_checkpoint is not None or args.from_pretrained_params is not None


def text(value):
    """A flag's value as the command line takes it."""
    return ",".join(map(text, value)) if isinstance(value, list) else str(value)


def flag(name):
    """How an attribute of the flags is spelt on the command line: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


def _unknown_words(parser, words):
    """What is wrong with the words that the parser does not know, values among them: a sentence for each flag."""
    flags = [option for action in parser._actions for option in action.option_strings]
    unknown = [word.split("=")[0] for word in words if word.startswith("-")]
    if not unknown:
        return [f"unexpected word '{words[0]}': each value follows its --flag"]
    return [_unknown("flag", word, flags) for word in unknown]


def _unknown(kind, word, known):
    bare = {name.lstrip("-"): name for name in known}  # dashes that all flags share would make all of them alike
    wanted = word.lstrip("-").replace("_", "-")
    if wanted in ALIASES:
        meant = f"--{ALIASES[wanted]}" if kind == "flag" else ALIASES[wanted].replace("-", "_").replace(" ", ": ")
        return f"unknown {kind} {word}: did you mean {meant}?"
    if wanted in ELSEWHERE:
        return f"unknown {kind} {word}: {ELSEWHERE[wanted]}"
    near = difflib.get_close_matches(wanted if kind == "flag" else wanted.replace("-", "_"), bare, n=1)
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
            words.append(f"{flag(key)}={text(value)}")
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


def _file_name(text):
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no name for files: give one such as resnet50, without / and no dot in front"
        )
    return text


def _not_negative_number(text):
    value = numbers.number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative: give 0 or more")
    return value


def _positive_number(text):
    value = numbers.number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive: give more than 0")
    return value


def _beta(text):
    value = numbers.ratio(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to below 1, such as 0.9")
    return value


def _epsilon(text):
    value = numbers.number(text)
    if value < 1e-30:
        raise argparse.ArgumentTypeError(f"{text}: too small for float32; use 1e-30 or more, such as 1e-8")
    return value


def _steps(text):
    """A:B; a YAML list of two numbers arrives as A,B. None takes back what stands before."""
    if text == "None":
        return None
    parts = text.replace(",", ":").split(":")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not A:B: give two steps such as 100:110 (quoted in YAML)")
    begin, end = (numbers.not_negative(part) for part in parts)
    if begin >= end:
        raise argparse.ArgumentTypeError(f"{begin}:{end} holds no step: give A:B with A less than B")
    return [begin, end]


def _path(text):
    """A path; None takes back what stands before."""
    return None if text == "None" else text


def _epoch(text):
    if text == "None":
        return None
    return text if text == "auto" else numbers.not_negative(text)
