"""Check flags for invalid values and for conflicts, and drop values of a file or a recipe that conflict with explicit
flags."""

import math
import os
from typing import NamedTuple

from paddle_resnet.models import RESIZE_RATIO
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import inheritance, stages
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS
from paddle_resnet.settings.values import flag, network_name, text
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import RunScope

# Values outside these ranges make DALI fail or produce pixels that are not finite.
AUGMENTATION_RANGES = {
    "rand_crop_ratio": (1e-3, 1e3),
    "rand_crop_scale": (1e-6, 1),
    "color_jitter": (0, 100),
    "lighting": (0, 100),
    "normalize_scale": (1e-12, 1e12),
    "normalize_std": (1e-12, 1e12),
    "normalize_mean": (-1e12, 1e12),
}

# Origins of the values that override values of a file or a recipe.
HIGHEST = ("command line", "Python", "machine")

# Smaller nonzero values make DALI fail, because the range of its random numbers would be empty in float32.
LEAST_AUGMENTATION = {"color_jitter": 1e-6, "rotate_degrees": 1e-6}


class Conflict(NamedTuple):
    """An invalid value, or a conflict between flags.

    Attributes:
        message: error message.
        unused: names of the flags that `by` makes unused or unusable. If two flags exclude each other, both names are
            in both fields.
        by: names of the flags that cause the conflict.
    """

    message: str
    unused: tuple = ()
    by: tuple = ()


def check(settings):
    """Check the flags after all values have been inherited or derived.

    Raises:
        UsageError: a value is invalid, or flags conflict.
    """
    _raise(_conflicts_of_settings(settings))


def check_sizes(settings):
    """Check the flags that determine image sizes. Raises UsageError if a value is invalid, or flags conflict."""
    _raise(_conflicts_of_sizes(settings))


def check_device(settings):
    """Check the flags that the device may not support, after --device is resolved. Raises UsageError if a flag requires
    a GPU, but the run or its loader is on the CPU."""
    _raise(_conflicts_of_device(settings))


def check_kernels(settings):
    """Raise UsageError if the kernels that --kernels selects do not support the layout."""
    _raise(_conflicts_of_kernels(settings))


def check_command(settings):
    """Check the flags of a command line before flags are inherited or chosen. Raises UsageError if a value is invalid,
    or flags conflict."""
    conflicts = [*_conflicts_of_command(settings)]
    if not (_has_start(settings) or settings.resume or settings.choose_recipe):
        conflicts += _conflicts_of_settings(settings)
    _raise(conflicts)


def _raise(conflicts):
    if messages := [conflict.message for conflict in conflicts]:
        raise UsageError(*messages)


def drop_unused(settings):
    """Set each value that a flag of higher rank makes unused to its default, and add a message to settings.dropped. A
    value that the command line, Python or the machine sets has a higher rank than a value of a --config file, which has
    a higher rank than a value that --choose-recipe chooses. Conflicts between values of the same rank remain, and so
    do conflicts in which the value of higher rank is the unused one."""
    ranks = {}  # {name of a dropped flag: rank of the flag with which it conflicts}
    while found := next(_droppable(settings, ranks), None):
        name, conflict = found
        ranks[name] = max(_rank(settings, cause, ranks) for cause in conflict.by)
        settings.dropped.append(_dropped(settings, name, conflict.message))
        inheritance.reset(settings, name)


def _droppable(settings, ranks):
    """Yield (name, conflict) for each value of a file or a recipe that conflicts with a flag of higher rank."""
    conflicts = (_conflicts_of_command, _conflicts_of_settings, _conflicts_of_device, _conflicts_of_kernels)
    for conflict in (conflict for function in conflicts for conflict in function(settings)):
        highest = max((_rank(settings, name, ranks) for name in conflict.by), default=0)
        yield from ((name, conflict) for name in conflict.unused if 0 < _own_rank(settings, name) < highest)


def _rank(settings, name, ranks):
    """Return the rank of a value; see drop_unused. A derived value has the rank of the flag from which it is derived,
    and a dropped value has the rank of the flag with which it conflicts."""
    origin = settings.origin(name)
    if origin.startswith("--"):
        return _rank(settings, origin[2:].replace("-", "_"), ranks)
    return ranks.get(name) or _own_rank(settings, name)


def _own_rank(settings, name):
    """Return 3 for a value from the command line, Python or the machine, 2 for a value from a file, 1 for a value that
    --choose-recipe has chosen, and 0 for all others."""
    origin = settings.origin(name)
    return 1 if settings.is_chosen(name) else 2 if origin.startswith("file ") else 3 if origin in HIGHEST else 0


def _dropped(settings, name, message):
    """Return the log message for a dropped value, with the reason from the error message of the conflict."""
    problem = message.partition("; ")[0]
    subject, _, reason = problem.partition(": ")
    if subject.split()[0] != flag(name):
        subject, reason = _argument(settings, name), problem
    source = "--choose-recipe" if settings.is_chosen(name) else settings.origin(name).replace("file", "--config", 1)
    return printable(f"{source}: ignoring {subject} ({reason})")


def warnings(settings):
    """Yield a warning for each combination of flags that is valid but rarely intended."""
    ratio = settings.resize_short / settings.crop_size
    if ratio > 1.3:
        yield (
            f"--resize-short {settings.resize_short}: {ratio:.2f} times --crop-size {settings.crop_size}, so an "
            f"evaluation uses only the center of each image; use {round(settings.crop_size * RESIZE_RATIO)}"
        )
    trains = settings.run_scope is not RunScope.EVAL_ONLY
    if settings.batch_size == 1 and trains:
        yield (
            "--batch-size 1: batch normalization computes its statistics from a single image per process, so the "
            "network may not learn; use 2 or more"
        )
    if settings.freeze and trains and not (_has_start(settings) or settings.resume):
        yield (
            f"--freeze {text(settings.freeze)}: frozen layers would keep random initial weights; add "
            "--from-pretrained-params"
        )
    if settings.class_weights != "none" and settings.balanced_sampling and trains:
        yield "--class-weights balanced: --balanced-sampling already balances the classes; remove one of them"
    end = settings.num_iter if settings.iter_unit == "batch" else settings.epochs
    is_known = settings.budget_minutes is None
    if settings.lr_scheduler == "Piecewise" and trains and is_known and min(settings.lr_decay_epochs) >= end:
        yield (
            f"--lr-decay-epochs {_numbers(settings.lr_decay_epochs)}: not before the end of the run ({end}), so the "
            "learning rate never decays; use lower values"
        )
    evaluations = -(-end // settings.eval_interval) if is_known else math.inf
    if trains and settings.is_explicit("patience") and settings.patience >= evaluations:
        yield (
            f"--patience {settings.patience}: not below the number of evaluations ({evaluations}), so training never "
            "ends early; use a lower value, or remove --patience"
        )
    if settings.inference_dir is not None:
        run_folder = os.path.join(settings.output_dir, network_name(settings.model_arch_name))
        export = command("export", run_folder, settings.inference_dir)
        yield f"--inference-dir {settings.inference_dir}: a run exports no network; after training, run {export}"
    if settings.warmup_start_lr and not settings.warmup_epochs:
        yield f"--warmup-start-lr {settings.warmup_start_lr:g}: has no effect without --warmup-epochs; remove it"
    if settings.is_explicit("budget_minutes") and (settings.benchmark or not trains):
        obstacle = "--benchmark" if settings.benchmark else "--run-scope eval_only"
        yield f"--budget-minutes {settings.budget_minutes:g}: has no effect with {obstacle}; remove it"
    for name in ("benchmark_steps", "benchmark_warmup_steps"):
        if settings.is_explicit(name) and not settings.benchmark:
            flag_and_value = f"{flag(name)} {getattr(settings, name)}"
            yield f"{flag_and_value}: has no effect without --benchmark; add it, or remove {flag(name)}"
    if OPTIMIZERS[settings.optimizer].is_adaptive and settings.lr > 0.03:
        yield f"--lr {settings.lr:g}: high for --optimizer {settings.optimizer}; use a lower rate, such as 0.001"
    if settings.device == "cpu" and settings.data_layout == "NHWC":
        yield "--data-layout NHWC: slower than NCHW on a CPU; use NCHW"
    if settings.device == "cpu" and settings.dali_output_fp16:
        yield "--dali-output-fp16: rounds images to half precision, which has no benefit on a CPU; remove the flag"


def _conflicts_of_command(settings):
    """Yield a Conflict for each conflict that involves flags that no run inherits from a checkpoint."""
    yield from _conflicts_of_budget(settings)
    yield from _conflicts_of_start(settings)
    yield from _conflicts_of_output(settings)


def _conflicts_of_settings(settings):
    """Yield a Conflict for each conflict between flags that a run can inherit from a checkpoint."""
    yield from _conflicts_of_augmentation(settings)
    yield from _conflicts_of_schedule(settings)
    yield from _conflicts_of_stages(settings)
    yield from _conflicts_of_sparsity(settings)
    yield from _conflicts_of_amp(settings)
    yield from _conflicts_of_sizes(settings)
    yield from _conflicts_of_radam(settings)
    if settings.patience and settings.run_scope is RunScope.TRAIN_ONLY:
        yield Conflict(
            f"--patience {settings.patience}: requires evaluations; use 0, or remove --run-scope train_only",
            ("patience",),
            ("run_scope",),
        )


def _conflicts_of_start(settings):
    if settings.from_checkpoint is not None and settings.from_pretrained_params is not None:
        yield Conflict(
            f"--from-checkpoint {settings.from_checkpoint}: cannot be combined with --from-pretrained-params "
            f"{settings.from_pretrained_params}; remove one of them",
            ("from_checkpoint", "from_pretrained_params"),
            ("from_checkpoint", "from_pretrained_params"),
        )
    if settings.last_epoch_of_checkpoint is not None and settings.from_checkpoint is None:
        yield Conflict(
            f"--last-epoch-of-checkpoint {settings.last_epoch_of_checkpoint}: requires --from-checkpoint DIR; add it",
            ("last_epoch_of_checkpoint",),
            ("from_checkpoint",),
        )
    if settings.resume and settings.run_scope is RunScope.EVAL_ONLY:
        yield Conflict(
            "--resume: continues training, but --run-scope is eval_only; use --from-checkpoint DIR "
            "--last-epoch-of-checkpoint auto instead",
            ("resume",),
            ("run_scope",),
        )
    if settings.resume and settings.overwrite:
        yield Conflict(
            "--resume: continues the run that --overwrite deletes; remove one of them",
            ("resume", "overwrite"),
            ("resume", "overwrite"),
        )
    if settings.pretrained_mismatch != "error" and settings.from_pretrained_params is None:
        yield Conflict(
            f"--pretrained-mismatch {settings.pretrained_mismatch}: requires --from-pretrained-params DIR; add it, "
            "or remove --pretrained-mismatch",
            ("pretrained_mismatch",),
            ("from_pretrained_params",),
        )
    if settings.run_scope is RunScope.EVAL_ONLY and settings.pretrained_mismatch != "error":
        yield Conflict(
            f"--pretrained-mismatch {settings.pretrained_mismatch}: leaves the classifier untrained, but --run-scope "
            "is eval_only; remove --pretrained-mismatch",
            ("pretrained_mismatch",),
            ("run_scope",),
        )
    if (
        settings.run_scope is RunScope.EVAL_ONLY
        and not _has_start(settings)
        and not settings.benchmark
        and not settings.resume
    ):
        yield Conflict(
            "--run-scope eval_only: requires a checkpoint; add --from-checkpoint DIR or --from-pretrained-params DIR"
        )


def _conflicts_of_budget(settings):
    """Yield a Conflict for each flag that conflicts with --budget-minutes."""
    if settings.budget_minutes is None:
        return
    flag_and_value = f"--budget-minutes {settings.budget_minutes:g}"
    if settings.is_explicit("epochs"):
        origin = settings.origin("epochs")
        yield Conflict(
            f"{flag_and_value}: conflicts with --epochs {settings.epochs} ({origin}); remove one of them",
            ("budget_minutes", "epochs"),
            ("budget_minutes", "epochs"),
        )
    if settings.profile_steps is not None:
        yield Conflict(
            f"{flag_and_value}: not supported with --profile-steps; remove one of them, or use --epochs",
            ("budget_minutes", "profile_steps"),
            ("budget_minutes", "profile_steps"),
        )


def _conflicts_of_output(settings):
    trains = settings.run_scope is not RunScope.EVAL_ONLY and not settings.benchmark
    if settings.tensorboard_dir is not None and not trains:
        yield Conflict(
            f"--tensorboard-dir {settings.tensorboard_dir}: this run does not train; remove the flag",
            ("tensorboard_dir",),
            ("run_scope", "benchmark"),
        )
    if settings.report_html is not None and settings.benchmark:
        yield Conflict(
            f"--report-html {settings.report_html}: not supported with --benchmark; remove one of them",
            ("report_html",),
            ("benchmark",),
        )
    if settings.predictions is not None and (settings.run_scope is RunScope.TRAIN_ONLY or settings.benchmark):
        obstacle = "--benchmark" if settings.benchmark else "--run-scope train_only"
        yield Conflict(
            f"--predictions {settings.predictions}: requires a complete evaluation; remove it or {obstacle}",
            ("predictions",),
            ("run_scope", "benchmark"),
        )
    only_trains = settings.benchmark and settings.run_scope.trains
    if settings.tta != "none" and (only_trains or not settings.run_scope.evaluates):
        obstacle = "--benchmark" if only_trains else "--run-scope train_only"
        yield Conflict(
            f"--tta {settings.tta}: requires an evaluation; remove it or {obstacle}",
            ("tta",),
            ("run_scope", "benchmark"),
        )
    for name in ("predictions", "report_html"):
        if getattr(settings, name) is not None and settings.data_format == "synthetic":
            yield Conflict(
                f"{flag(name)} {getattr(settings, name)}: not supported with --data-format synthetic; remove it",
                (name,),
                ("data_format",),
            )


def _conflicts_of_augmentation(settings):
    counts = {"rand_crop_scale": 2, "rand_crop_ratio": 2, "normalize_mean": 3, "normalize_std": 3}
    for name, count in counts.items():
        values = getattr(settings, name)
        if len(values) != count or (name != "normalize_mean" and min(values) <= 0):
            sign, example = ("" if name == "normalize_mean" else "positive "), _numbers(DEFAULTS[name])
            yield Conflict(f"{flag(name)} {text(values)}: expected {count} {sign}numbers, such as {example}")
        elif name.startswith("rand_crop") and (values[0] > values[1] or (name.endswith("scale") and values[1] > 1)):
            problem = "MIN exceeds MAX" if values[0] > values[1] else "MAX exceeds 1"
            yield Conflict(f"{flag(name)} {text(values)}: {problem}; use a range such as {_numbers(DEFAULTS[name])}")
        else:
            yield from _out_of_range(settings, name)
    for name in [name for name in AUGMENTATION_RANGES if name not in counts]:
        yield from _out_of_range(settings, name)
    if 0 < settings.crop_size <= settings.crop_padding:
        yield Conflict(
            f"--crop-padding {settings.crop_padding}: not below --crop-size {settings.crop_size}, so crops could "
            "contain only padding; use a smaller value",
            ("crop_padding",),
            ("crop_size",),
        )
    if settings.rotate_degrees > 180:
        yield Conflict(f"--rotate-degrees {settings.rotate_degrees:g}: exceeds 180 degrees; use 180 or less")
    for name, least in LEAST_AUGMENTATION.items():
        if 0 < getattr(settings, name) < least:
            yield Conflict(f"{flag(name)} {getattr(settings, name):g}: too small; use 0, or {least:g} or more")


def _out_of_range(settings, name):
    (low, high), value = AUGMENTATION_RANGES[name], getattr(settings, name)
    values = value if isinstance(value, list) else [value]
    if min(values) < low or max(values) > high:
        yield Conflict(f"{flag(name)} {_numbers(values)}: out of range; use values from {low:g} to {high:g}")


def _argument(settings, name):
    """Return a flag and its value, as a user writes them."""
    value = getattr(settings, name)
    if value is True:
        return flag(name)
    return f"{flag(name)} {value:g}" if isinstance(value, float) else f"{flag(name)} {text(value)}"


def _numbers(values):
    return ",".join(f"{value:g}" for value in values)


def _conflicts_of_schedule(settings):
    for name, declaration in FLAGS.items():
        choice, users = declaration.used_by or (None, ())
        value, chosen = getattr(settings, name), choice and getattr(settings, choice)
        if choice and chosen not in users and value != DEFAULTS[name]:
            yield Conflict(
                f"{flag(name)} {text(value)}: not used by {flag(choice)} {chosen}; remove it, or use "
                f"{flag(choice)} {' or '.join(map(str, users))}",
                (name,),
                (choice,),
            )
    if settings.iter_unit == "batch" and settings.num_iter is None:
        yield Conflict("--iter-unit batch: requires the number of training steps; add --num-iter")
    is_default = settings.lr_decay_epochs == DEFAULTS["lr_decay_epochs"]
    if settings.iter_unit == "batch" and settings.lr_scheduler == "Piecewise" and is_default:
        yield Conflict(
            "--iter-unit batch: --lr-scheduler Piecewise has no default steps; set --lr-decay-epochs to steps"
        )
    if settings.min_lr > settings.lr:
        yield Conflict(
            f"--min-lr {settings.min_lr:g}: exceeds --lr {settings.lr:g}; use a smaller value", ("min_lr",), ("lr",)
        )


def _conflicts_of_radam(settings):
    if settings.optimizer != "RAdam":
        return
    if settings.freeze:
        yield Conflict(
            "--optimizer RAdam: its formula requires that all layers are trained from step 1 on; remove --freeze, or "
            "use --optimizer AdamW",
            ("freeze",),
            ("optimizer",),
        )
    if settings.opt_epsilon < 1e-12:
        yield Conflict(
            f"--opt-epsilon {settings.opt_epsilon:g}: too small for --optimizer RAdam; use 1e-12 or more",
            ("opt_epsilon",),
            ("optimizer",),
        )


def _conflicts_of_stages(settings):
    # With --budget-minutes, a new run does not know its number of epochs yet; budget.choose checks the stages.
    is_known = settings.budget_minutes is None or settings.is_inherited("epochs")
    knows_epochs = settings.iter_unit == "epoch" and is_known
    if settings.unfreeze_at is not None:
        if settings.freeze is None:
            yield Conflict(
                f"--unfreeze-at {settings.unfreeze_at}: requires --freeze; add it, or use --unfreeze-at None",
                ("unfreeze_at",),
                ("freeze",),
            )
        if knows_epochs and settings.unfreeze_at >= settings.epochs:
            yield Conflict(
                f"--unfreeze-at {settings.unfreeze_at}: must be below --epochs {settings.epochs}; use an earlier "
                "epoch, or remove --unfreeze-at",
                ("unfreeze_at",),
                ("epochs",),
            )
            return
    if settings.sizes is None:
        return
    last = stages.stages(settings)[-1]
    if knows_epochs and last.first_epoch >= settings.epochs:
        yield Conflict(
            f"--sizes {text(settings.sizes)}: the last stage begins in epoch {last.first_epoch}, but --epochs is "
            f"{settings.epochs}; use an earlier epoch",
            ("sizes",),
            ("epochs",),
        )
    if len(set(settings.image_shape[1:])) > 1:
        yield Conflict(
            f"--sizes {text(settings.sizes)}: trains on square images, but --image-shape {text(settings.image_shape)} "
            "is not square; remove --sizes, or use a square shape",
            ("sizes",),
            ("image_shape",),
        )


def _conflicts_of_sparsity(settings):
    if settings.asp and not (settings.prune_model or settings.resume) and settings.from_checkpoint is None:
        yield Conflict("--asp: requires pruned weights; add --prune-model or --from-checkpoint DIR")
    if settings.mask_algo != "mask_1d" and not settings.prune_model:
        yield Conflict(
            f"--mask-algo {settings.mask_algo}: requires --prune-model; add it, or remove --mask-algo",
            ("mask_algo",),
            ("prune_model",),
        )
    if settings.prune_model and not settings.asp:
        yield Conflict("--prune-model: requires --asp; add it, or remove --prune-model", ("prune_model",), ("asp",))


def _conflicts_of_amp(settings):
    """Yield a Conflict for each conflict between the flags of mixed precision."""
    if not settings.amp:
        is_set = {
            "use_pure_fp16": settings.use_pure_fp16,
            "use_dynamic_loss_scaling": settings.use_dynamic_loss_scaling,
            "scale_loss": settings.scale_loss != 1,
            "amp_level": settings.amp_level == "O2" and not settings.use_pure_fp16,
            "amp_dtype": settings.amp_dtype != "float16",
        }
        for name in (name for name, value in is_set.items() if value):
            yield Conflict(
                f"{_argument(settings, name)}: requires --amp; add it, or remove {flag(name)}", (name,), ("amp",)
            )
        return
    if settings.use_pure_fp16 and settings.amp_level == "O1":
        yield Conflict(
            "--use-pure-fp16: implies level O2, but --amp-level is O1; remove one of them",
            ("use_pure_fp16", "amp_level"),
            ("use_pure_fp16", "amp_level"),
        )
    if settings.amp_dtype == "float16":
        return
    if settings.use_pure_fp16:
        yield Conflict(
            "--use-pure-fp16: implies float16, but --amp-dtype is bfloat16; use --amp-level O2 instead",
            ("use_pure_fp16", "amp_dtype"),
            ("use_pure_fp16", "amp_dtype"),
        )
    if settings.use_dynamic_loss_scaling or settings.scale_loss != 1:
        name = "use_dynamic_loss_scaling" if settings.use_dynamic_loss_scaling else "scale_loss"
        yield Conflict(
            f"{_argument(settings, name)}: bfloat16 needs no loss scaling; remove {flag(name)}", (name,), ("amp_dtype",)
        )
    if settings.asp and settings.amp_level == "O2":
        yield Conflict(
            "--asp: bfloat16 parameters are not supported; use --amp-level O1 or --amp-dtype float16",
            ("amp_level", "amp_dtype", "asp"),
            ("amp_level", "amp_dtype", "asp"),
        )


def _conflicts_of_device(settings):
    if settings.amp and settings.device == "cpu":
        yield Conflict(
            f"--amp: requires a GPU, but this run is on the CPU, which has no {settings.amp_dtype} kernels; use --amp "
            "false",
            ("amp",),
            ("device",),
        )
    if settings.dali_device == "gpu" and settings.device == "cpu":
        yield Conflict(
            "--dali-device gpu: requires a GPU, but this run is on the CPU; use --dali-device cpu",
            ("dali_device",),
            ("device",),
        )


def _conflicts_of_kernels(settings):
    if settings.kernels == "native" and settings.data_layout != "NHWC":
        yield Conflict(
            "--kernels native: supports NHWC only; use --data-layout NHWC or --kernels paddle",
            ("kernels",),
            ("data_layout",),
        )


def _conflicts_of_sizes(settings):
    shape, crop = ",".join(map(str, settings.image_shape)), settings.crop_size
    if len(settings.image_shape) != 3 or settings.image_shape[0] not in (3, 4) or min(settings.image_shape) < 1:
        yield Conflict(f"--image-shape {shape}: expected C,H,W with 3 or 4 channels, such as 4,224,224")
    elif min(settings.image_shape[1:]) != crop:
        yield Conflict(
            f"--image-shape {shape}: its shorter side differs from --crop-size {crop}; use --image-shape "
            f"{settings.image_shape[0]},{crop},{crop} or --crop-size {min(settings.image_shape[1:])}",
            ("image_shape", "crop_size"),
            ("image_shape", "crop_size"),
        )
    elif settings.resize_short * max(settings.image_shape[1:]) > numbers.MAX_SIDE * crop:
        yield Conflict(
            f"--resize-short {settings.resize_short}: with --image-shape {shape}, the longer side before the crop "
            f"exceeds {numbers.MAX_SIDE} pixels; use {numbers.MAX_SIDE * crop // max(settings.image_shape[1:])} or "
            "less",
            ("resize_short",),
            ("image_shape", "crop_size"),
        )
    if settings.resize_short < settings.crop_size:
        yield Conflict(
            f"--resize-short {settings.resize_short}: smaller than --crop-size {settings.crop_size}; use "
            f"{settings.crop_size} or more",
            ("resize_short",),
            ("image_shape", "crop_size"),
        )


def _has_start(settings):
    return settings.from_checkpoint is not None or settings.from_pretrained_params is not None
