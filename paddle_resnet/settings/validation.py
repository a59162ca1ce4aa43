"""Check flags for invalid values and for conflicts."""

import math

from paddle_resnet.models import RESIZE_RATIO
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import stages
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS
from paddle_resnet.settings.values import flag, text
from utils import numbers
from utils.errors import UsageError
from utils.mode import RunScope

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

# Smaller nonzero values make DALI fail, because the range of its random numbers would be empty in float32.
LEAST_AUGMENTATION = {"color_jitter": 1e-6, "rotate_degrees": 1e-6}


def check(settings):
    """Check the flags after all values have been inherited or derived.

    Raises:
        UsageError: a value is invalid, or flags conflict.
    """
    _raise(_conflicts_of_settings(settings))


def check_sizes(settings):
    """Check the flags that determine image sizes. Raises UsageError for the same reasons as check."""
    _raise(_conflicts_of_sizes(settings))


def check_command(settings):
    """Check the flags of a command line before flags are inherited or chosen. Raises UsageError for the same reasons as
    check."""
    problems = [*_conflicts_of_budget(settings), *_conflicts_of_start(settings), *_conflicts_of_output(settings)]
    if not (_has_start(settings) or settings.resume or settings.choose_recipe):
        problems += _conflicts_of_settings(settings)
    _raise(problems)


def _raise(problems):
    if problems := list(problems):
        raise UsageError(*problems)


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
        yield "--data-layout NHWC: several times slower than NCHW on a CPU; use NCHW"
    if settings.device == "cpu" and settings.dali_output_fp16:
        yield "--dali-output-fp16: rounds images to half precision, which has no benefit on a CPU; remove the flag"


def _conflicts_of_settings(settings):
    """Yield an error message for each conflict between flags that a run can inherit from a checkpoint."""
    yield from _conflicts_of_augmentation(settings)
    yield from _conflicts_of_schedule(settings)
    yield from _conflicts_of_stages(settings)
    yield from _conflicts_of_sparsity(settings)
    yield from _conflicts_of_amp(settings)
    yield from _conflicts_of_sizes(settings)
    yield from _conflicts_of_radam(settings)
    if settings.patience and settings.run_scope is RunScope.TRAIN_ONLY:
        yield f"--patience {settings.patience}: requires evaluations; use 0, or remove --run-scope train_only"


def _conflicts_of_start(settings):
    if settings.from_checkpoint is not None and settings.from_pretrained_params is not None:
        yield (
            f"--from-checkpoint {settings.from_checkpoint}: cannot be combined with --from-pretrained-params "
            f"{settings.from_pretrained_params}; remove one of them"
        )
    if settings.last_epoch_of_checkpoint is not None and settings.from_checkpoint is None:
        yield f"--last-epoch-of-checkpoint {settings.last_epoch_of_checkpoint}: requires --from-checkpoint DIR; add it"
    if settings.resume and settings.run_scope is RunScope.EVAL_ONLY:
        yield (
            "--resume: continues training, but --run-scope is eval_only; use --from-checkpoint DIR "
            "--last-epoch-of-checkpoint auto instead"
        )
    if settings.resume and settings.overwrite:
        yield "--resume: continues the run that --overwrite deletes; remove one of them"
    if settings.pretrained_mismatch != "error" and settings.from_pretrained_params is None:
        yield (
            f"--pretrained-mismatch {settings.pretrained_mismatch}: requires --from-pretrained-params DIR; add it, "
            "or remove --pretrained-mismatch"
        )
    if settings.run_scope is RunScope.EVAL_ONLY and settings.pretrained_mismatch != "error":
        yield (
            f"--pretrained-mismatch {settings.pretrained_mismatch}: leaves the classifier untrained, but --run-scope "
            "is eval_only; remove --pretrained-mismatch"
        )
    if (
        settings.run_scope is RunScope.EVAL_ONLY
        and not _has_start(settings)
        and not settings.benchmark
        and not settings.resume
    ):
        yield "--run-scope eval_only: requires a checkpoint; add --from-checkpoint DIR or --from-pretrained-params DIR"


def _conflicts_of_budget(settings):
    """Yield an error message for each flag that conflicts with --budget-minutes."""
    if settings.budget_minutes is None:
        return
    flag_and_value = f"--budget-minutes {settings.budget_minutes:g}"
    if settings.is_explicit("epochs"):
        origin = settings.origin("epochs")
        yield f"{flag_and_value}: conflicts with --epochs {settings.epochs} ({origin}); remove one of them"
    if settings.profile_steps is not None:
        yield f"{flag_and_value}: not supported with --profile-steps; remove one of them, or use --epochs"


def _conflicts_of_output(settings):
    trains = settings.run_scope is not RunScope.EVAL_ONLY and not settings.benchmark
    if settings.tensorboard_dir is not None and not trains:
        yield f"--tensorboard-dir {settings.tensorboard_dir}: this run does not train; remove the flag"
    if settings.report_html is not None and settings.benchmark:
        yield f"--report-html {settings.report_html}: not supported with --benchmark; remove one of them"
    if settings.predictions is not None and (settings.run_scope is RunScope.TRAIN_ONLY or settings.benchmark):
        obstacle = "--benchmark" if settings.benchmark else "--run-scope train_only"
        yield f"--predictions {settings.predictions}: requires a complete evaluation; remove it or {obstacle}"
    only_trains = settings.benchmark and settings.run_scope.trains
    if settings.tta != "none" and (only_trains or not settings.run_scope.evaluates):
        obstacle = "--benchmark" if only_trains else "--run-scope train_only"
        yield f"--tta {settings.tta}: requires an evaluation; remove it or {obstacle}"
    for name in ("predictions", "report_html"):
        if getattr(settings, name) is not None and settings.data_format == "synthetic":
            yield f"{flag(name)} {getattr(settings, name)}: not supported with --data-format synthetic; remove it"


def _conflicts_of_augmentation(settings):
    counts = {"rand_crop_scale": 2, "rand_crop_ratio": 2, "normalize_mean": 3, "normalize_std": 3}
    for name, count in counts.items():
        values = getattr(settings, name)
        if len(values) != count or (name != "normalize_mean" and min(values) <= 0):
            sign, example = ("" if name == "normalize_mean" else "positive "), _numbers(DEFAULTS[name])
            yield f"{flag(name)} {text(values)}: expected {count} {sign}numbers, such as {example}"
        elif name.startswith("rand_crop") and (values[0] > values[1] or (name.endswith("scale") and values[1] > 1)):
            problem = "MIN exceeds MAX" if values[0] > values[1] else "MAX exceeds 1"
            yield f"{flag(name)} {text(values)}: {problem}; use a range such as {_numbers(DEFAULTS[name])}"
        else:
            yield from _out_of_range(settings, name)
    for name in [name for name in AUGMENTATION_RANGES if name not in counts]:
        yield from _out_of_range(settings, name)
    if 0 < settings.crop_size <= settings.crop_padding:
        yield (
            f"--crop-padding {settings.crop_padding}: not below --crop-size {settings.crop_size}, so crops could "
            "contain only padding; use a smaller value"
        )
    if settings.rotate_degrees > 180:
        yield f"--rotate-degrees {settings.rotate_degrees:g}: exceeds 180 degrees; use 180 or less"
    for name, least in LEAST_AUGMENTATION.items():
        if 0 < getattr(settings, name) < least:
            yield f"{flag(name)} {getattr(settings, name):g}: too small; use 0, or {least:g} or more"


def _out_of_range(settings, name):
    (low, high), value = AUGMENTATION_RANGES[name], getattr(settings, name)
    values = value if isinstance(value, list) else [value]
    if min(values) < low or max(values) > high:
        yield f"{flag(name)} {_numbers(values)}: out of range; use values from {low:g} to {high:g}"


def _numbers(values):
    return ",".join(f"{value:g}" for value in values)


def _conflicts_of_schedule(settings):
    for name, declaration in FLAGS.items():
        choice, users = declaration.used_by or (None, ())
        value, chosen = getattr(settings, name), choice and getattr(settings, choice)
        if choice and chosen not in users and value != DEFAULTS[name]:
            yield (
                f"{flag(name)} {text(value)}: not used by {flag(choice)} {chosen}; remove it, or use "
                f"{flag(choice)} {' or '.join(map(str, users))}"
            )
    if settings.iter_unit == "batch" and settings.num_iter is None:
        yield "--iter-unit batch: requires the number of training steps; add --num-iter"
    is_default = settings.lr_decay_epochs == DEFAULTS["lr_decay_epochs"]
    if settings.iter_unit == "batch" and settings.lr_scheduler == "Piecewise" and is_default:
        yield "--iter-unit batch: --lr-scheduler Piecewise has no default steps; set --lr-decay-epochs to steps"
    if settings.min_lr > settings.lr:
        yield f"--min-lr {settings.min_lr:g}: exceeds --lr {settings.lr:g}; use a smaller value"


def _conflicts_of_radam(settings):
    if settings.optimizer != "RAdam":
        return
    if settings.freeze:
        yield (
            "--optimizer RAdam: its formula requires that all layers are trained from step 1 on; remove --freeze, or "
            "use --optimizer AdamW"
        )
    if settings.opt_epsilon < 1e-12:
        yield f"--opt-epsilon {settings.opt_epsilon:g}: too small for --optimizer RAdam; use 1e-12 or more"


def _conflicts_of_stages(settings):
    # With --budget-minutes, a new run does not know its number of epochs yet; budget.choose checks the stages.
    is_known = settings.budget_minutes is None or settings.is_inherited("epochs")
    knows_epochs = settings.iter_unit == "epoch" and is_known
    if settings.unfreeze_at is not None:
        if settings.freeze is None:
            yield f"--unfreeze-at {settings.unfreeze_at}: requires --freeze; add it, or use --unfreeze-at None"
        if knows_epochs and settings.unfreeze_at >= settings.epochs:
            yield (
                f"--unfreeze-at {settings.unfreeze_at}: must be below --epochs {settings.epochs}; use an earlier "
                "epoch, or remove --unfreeze-at"
            )
            return
    if settings.sizes is None:
        return
    last = stages.stages(settings)[-1]
    if knows_epochs and last.first_epoch >= settings.epochs:
        yield (
            f"--sizes {text(settings.sizes)}: the last stage begins in epoch {last.first_epoch}, but --epochs is "
            f"{settings.epochs}; use an earlier epoch"
        )
    if len(set(settings.image_shape[1:])) > 1:
        yield (
            f"--sizes {text(settings.sizes)}: trains on square images, but --image-shape {text(settings.image_shape)} "
            "is not square; remove --sizes, or use a square shape"
        )


def _conflicts_of_sparsity(settings):
    if settings.asp and not (settings.prune_model or settings.resume) and settings.from_checkpoint is None:
        yield "--asp: requires pruned weights; add --prune-model or --from-checkpoint DIR"
    if settings.mask_algo != "mask_1d" and not settings.prune_model:
        yield f"--mask-algo {settings.mask_algo}: requires --prune-model; add it, or remove --mask-algo"
    if settings.prune_model and not settings.asp:
        yield "--prune-model: requires --asp; add it, or remove --prune-model"


def _conflicts_of_amp(settings):
    """Yield an error message for each conflict between the flags of mixed precision."""
    if not settings.amp:
        flags = {
            "--use-pure-fp16": settings.use_pure_fp16,
            "--use-dynamic-loss-scaling": settings.use_dynamic_loss_scaling,
            f"--scale-loss {settings.scale_loss:g}": settings.scale_loss != 1,
            "--amp-level O2": settings.amp_level == "O2" and not settings.use_pure_fp16,
            f"--amp-dtype {settings.amp_dtype}": settings.amp_dtype != "float16",
        }
        for argument in (argument for argument, is_set in flags.items() if is_set):
            yield f"{argument}: requires --amp; add it, or remove {argument.split()[0]}"
        return
    if settings.use_pure_fp16 and settings.amp_level == "O1":
        yield "--use-pure-fp16: implies level O2, but --amp-level is O1; remove one of them"
    if settings.amp_dtype == "float16":
        return
    if settings.use_pure_fp16:
        yield "--use-pure-fp16: implies float16, but --amp-dtype is bfloat16; use --amp-level O2 instead"
    if settings.use_dynamic_loss_scaling or settings.scale_loss != 1:
        argument = (
            "--use-dynamic-loss-scaling"
            if settings.use_dynamic_loss_scaling
            else f"--scale-loss {settings.scale_loss:g}"
        )
        yield f"{argument}: bfloat16 needs no loss scaling; remove {argument.split()[0]}"
    if settings.asp and settings.amp_level == "O2":
        yield "--asp: bfloat16 parameters are not supported; use --amp-level O1 or --amp-dtype float16"


def _conflicts_of_sizes(settings):
    shape, crop = ",".join(map(str, settings.image_shape)), settings.crop_size
    if len(settings.image_shape) != 3 or settings.image_shape[0] not in (3, 4) or min(settings.image_shape) < 1:
        yield f"--image-shape {shape}: expected C,H,W with 3 or 4 channels, such as 4,224,224"
    elif min(settings.image_shape[1:]) != crop:
        yield (
            f"--image-shape {shape}: its shorter side differs from --crop-size {crop}; use --image-shape "
            f"{settings.image_shape[0]},{crop},{crop} or --crop-size {min(settings.image_shape[1:])}"
        )
    elif settings.resize_short * max(settings.image_shape[1:]) > numbers.MAX_SIDE * crop:
        yield (
            f"--resize-short {settings.resize_short}: with --image-shape {shape}, the longer side before the crop "
            f"exceeds {numbers.MAX_SIDE} pixels; use {numbers.MAX_SIDE * crop // max(settings.image_shape[1:])} or less"
        )
    if settings.resize_short < settings.crop_size:
        yield (
            f"--resize-short {settings.resize_short}: smaller than --crop-size {settings.crop_size}; use "
            f"{settings.crop_size} or more"
        )


def _has_start(settings):
    return settings.from_checkpoint is not None or settings.from_pretrained_params is not None
