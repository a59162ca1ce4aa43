"""Check flags for invalid values and for conflicts, and drop values of a file or a recipe that conflict with flags of
higher rank (drop_unused)."""

import itertools
import math
import os
from collections.abc import Iterator

from paddle_resnet.components import stages
from paddle_resnet.models import RESIZE_RATIO
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import inheritance, values
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS, MODULES
from paddle_resnet.settings.field import Conflict
from paddle_resnet.settings.groups import images, machine, start
from paddle_resnet.settings.values import argument, flag_name, listed, network_name, text
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import RunScope

# Values of --data-format whose images have one label.
ONE_LABEL = ("filelist", "tfrecord", "webdataset", "lmdb", "parquet")
# Origins of the values that override values of a file or a recipe.
HIGHEST = ("command line", "Python", "internal", "recorded", "machine")

# Flags whose features PIR programs lack. --cuda-graph is not among them, because it has no effect without a GPU.
_NOT_IN_PIR = ("amp", "asp", "qat", "teacher")


def check(settings: values.Settings) -> None:
    """Check the flags that a run can inherit or choose, after all values have been inherited, chosen and derived.

    Raises:
        UsageError: a value is invalid, or flags conflict.
    """
    _raise(_conflicts_of_settings(settings))


def check_sizes(settings: images.Settings) -> None:
    """Check the flags that determine image sizes. Raises UsageError if a value is invalid, or flags conflict."""
    _raise(images.size_conflicts(settings))


def check_device(settings: values.Settings) -> None:
    """Check the flags that the device may not support, after --device is resolved. Raises UsageError if --amp or
    --dali-device requires a GPU, but the run is on the CPU; or if --program-representation pir requires a CPU, but the
    run is on a GPU."""
    _raise(_conflicts_of_device(settings))


def check_kernels(settings: machine.Settings) -> None:
    """Raise UsageError if the kernels that --kernels selects do not support the layout."""
    _raise(machine.conflicts(settings))


def check_command(settings: values.Settings) -> None:
    """Check the flags of a command line before flags are inherited or chosen. If the run will neither inherit nor
    choose flags, also check the flags that check() checks. Raises UsageError if a value is invalid, or flags
    conflict."""
    conflicts = [*_conflicts_of_command(settings)]
    if not (settings.part(start.Settings).is_from_weights or settings.resume or settings.choose_recipe):
        conflicts += _conflicts_of_settings(settings)
    _raise(conflicts)


def _raise(conflicts):
    if messages := [conflict.message for conflict in conflicts]:
        raise UsageError(*messages)


def drop_unused(settings: values.Settings) -> None:
    """Set each value of a file or a recipe that a flag of higher rank makes unused to its default, and add a message to
    settings.dropped. A value with an origin in HIGHEST, such as the command line, has a higher rank than a value of a
    --config file, which has a higher rank than a value that --choose-recipe chooses. Conflicts between values of the
    same rank are not resolved, nor are conflicts in which the value of higher rank is the unused one."""
    ranks = _Ranks(settings)
    while found := next(ranks.droppable(), None):
        ranks.drop(*found)


class _Ranks:
    """The ranks of the values of all flags; see drop_unused."""

    def __init__(self, settings):
        self._settings = settings
        self._of_dropped = {}  # {name of a dropped flag: rank of the flag with which it conflicts}

    def droppable(self):
        """Yield (name, conflict) for each value of a file or a recipe that conflicts with a flag of higher rank."""
        functions = (_conflicts_of_command, _conflicts_of_settings, _conflicts_of_device)
        found = (conflict for function in functions for conflict in function(self._settings))
        for conflict in itertools.chain(found, _conflicts_within(self._settings, machine)):
            highest = max(map(self._rank, conflict.by), default=0)
            yield from ((name, conflict) for name in conflict.unused if 0 < _own_rank(self._settings, name) < highest)

    def drop(self, name, conflict):
        """Set a value to its default, and add a message to settings.dropped."""
        self._of_dropped[name] = max(map(self._rank, conflict.by))
        self._settings.dropped.append(self._message(name, conflict.message))
        inheritance.reset(self._settings, name)

    def _rank(self, name):
        """Return the rank of a value. A derived value has the rank of the flag from which it is derived, and a dropped
        value has the rank of the flag with which it conflicts."""
        origin = self._settings.origin(name)
        if origin.startswith("--"):
            return self._rank(origin[2:].replace("-", "_"))
        return self._of_dropped.get(name) or _own_rank(self._settings, name)

    def _message(self, name, message):
        """Return the log message for a dropped value, with the reason from the error message of the conflict."""
        problem = message.partition("; ")[0]
        subject, _, reason = problem.partition(": ")
        if subject.split()[0] != flag_name(name):
            subject, reason = argument(self._settings, name), problem
        is_chosen, origin = self._settings.is_chosen(name), self._settings.origin(name)
        source = "--choose-recipe" if is_chosen else origin.replace("file", "--config", 1)
        return printable(f"{source}: ignoring {subject} ({reason})")


def _own_rank(settings, name):
    """Return 3 for a value with an origin in HIGHEST, 2 for a value from a file, 1 for a value that the program has
    chosen (Settings.choose), and 0 for all others."""
    origin = settings.origin(name)
    return 1 if settings.is_chosen(name) else 2 if origin.startswith("file ") else 3 if origin in HIGHEST else 0


def warnings(settings: values.Settings) -> Iterator[str]:
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
    if settings.freeze and trains and not (settings.part(start.Settings).is_from_weights or settings.resume):
        yield (
            f"--freeze {text(settings.freeze)}: frozen layers would keep random initial weights; add "
            "--from-pretrained-params DIR"
        )
    if settings.class_weights != "none" and settings.balanced_sampling and trains:
        yield "--class-weights balanced: --balanced-sampling already balances the classes; remove one of them"
    end = settings.num_iter if settings.iter_unit == "batch" else settings.epochs
    is_known = settings.budget_minutes is None
    if settings.lr_scheduler == "Piecewise" and trains and is_known and min(settings.lr_decay_epochs) >= end:
        yield (
            f"--lr-decay-epochs {listed(settings.lr_decay_epochs)}: not before the end of the run "
            f"({settings.iter_unit} {end}), so the learning rate never decays; use lower values"
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
        rate = f"{settings.warmup_start_lr:g}"
        yield f"--warmup-start-lr {rate}: has no effect without --warmup-epochs; add it, or remove --warmup-start-lr"
    if settings.is_explicit("budget_minutes") and (settings.benchmark or not trains):
        obstacle = "--benchmark" if settings.benchmark else "--run-scope eval_only"
        yield f"--budget-minutes {settings.budget_minutes:g}: has no effect with {obstacle}; remove --budget-minutes"
    for name in ("benchmark_steps", "benchmark_warmup_steps"):
        if settings.is_explicit(name) and not settings.benchmark:
            flag_and_value = f"{flag_name(name)} {getattr(settings, name)}"
            yield f"{flag_and_value}: has no effect without --benchmark; add it, or remove {flag_name(name)}"
    if OPTIMIZERS[settings.optimizer].is_adaptive and settings.lr > 0.03:
        yield f"--lr {settings.lr:g}: high for --optimizer {settings.optimizer}; use a lower rate, such as 0.001"
    if settings.device == "cpu" and settings.data_layout == "NHWC" and settings.kernels == "paddle":
        yield "--data-layout NHWC: with --kernels paddle, slower than NCHW on a CPU; use --data-layout NCHW"
    if settings.device == "cpu" and settings.dali_output_fp16:
        yield "--dali-output-fp16: rounds images to half precision, which has no benefit on a CPU; remove the flag"


def _conflicts_of_command(settings):
    """Yield a Conflict for each conflict that is known before a run inherits or chooses flags."""
    yield from _conflicts_of_budget(settings)
    if settings.choose_recipe:
        yield from _conflicts_of_multi_label(settings)
    yield from _conflicts_within(settings, start)
    if (
        settings.run_scope is RunScope.EVAL_ONLY
        and not settings.part(start.Settings).is_from_weights
        and not settings.benchmark
        and not settings.resume
    ):
        yield Conflict(
            "--run-scope eval_only: requires a checkpoint; add --from-checkpoint DIR or --from-pretrained-params DIR"
        )
    yield from _conflicts_of_output(settings)


def _conflicts_of_settings(settings):
    """Yield a Conflict for each conflict that inherited or chosen flags can cause or resolve."""
    yield from _unused(settings)
    for module in MODULES:
        if module not in (start, machine):
            yield from _conflicts_within(settings, module)
    yield from _conflicts_of_multi_label(settings)
    yield from _conflicts_of_stages(settings)
    yield from _conflicts_of_representation(settings)
    if 0 < settings.crop_size <= settings.crop_padding:
        yield Conflict(
            f"--crop-padding {settings.crop_padding}: not below --crop-size {settings.crop_size}, so crops could "
            "contain only padding; use a smaller value",
            ("crop_padding",),
            ("crop_size",),
        )
    if settings.iter_unit == "batch" and settings.lr_scheduler == "Piecewise" and _are_default_epochs(settings):
        yield Conflict(
            "--iter-unit batch: --lr-scheduler Piecewise has no default steps; set --lr-decay-epochs to the steps at "
            "which the learning rate decays"
        )
    if settings.asp and not (settings.prune_model or settings.resume) and settings.from_checkpoint is None:
        yield Conflict("--asp: requires pruned weights; add --prune-model or --from-checkpoint DIR")
    if settings.asp and settings.amp and settings.amp_dtype == "bfloat16" and settings.amp_level == "O2":
        yield Conflict(
            "--asp: bfloat16 parameters are not supported; use --amp-level O1 or --amp-dtype float16",
            ("amp_level", "amp_dtype", "asp"),
            ("amp_level", "amp_dtype", "asp"),
        )
    if OPTIMIZERS[settings.optimizer].needs_all_layers and settings.freeze:
        yield Conflict(
            f"--optimizer {settings.optimizer}: its formula requires that all layers are trained from step 1 on; "
            "remove --freeze, or use --optimizer AdamW",
            ("freeze",),
            ("optimizer",),
        )
    if settings.patience and settings.run_scope is RunScope.TRAIN_ONLY:
        yield Conflict(
            f"--patience {settings.patience}: requires evaluations; use --patience 0, or remove --run-scope train_only",
            ("patience",),
            ("run_scope",),
        )


def _conflicts_within(settings, module):
    """Yield a Conflict for each conflict between flags of the same component or group."""
    if hasattr(module, "conflicts"):
        yield from module.conflicts(settings.part(module.Settings))


def _unused(settings):
    """Yield a Conflict for each flag whose effect was requested, but that a different flag makes unused (used_by in
    field.Declaration)."""
    for name, declaration in FLAGS.items():
        choice, users = declaration.used_by or (None, ())
        if not choice or getattr(settings, choice) in users or not _is_requested(settings, name):
            continue
        if users == (True,):
            problem = f"requires {flag_name(choice)}; add it, or remove {flag_name(name)}"
            yield Conflict(f"{argument(settings, name)}: {problem}", (name,), (choice,))
        else:
            yield Conflict(
                f"{flag_name(name)} {text(getattr(settings, name))}: not used by {flag_name(choice)} "
                f"{getattr(settings, choice)}; remove it, or use {flag_name(choice)} {' or '.join(map(str, users))}",
                (name,),
                (choice,),
            )


def _is_requested(settings, name):
    """Return whether the effect of a flag was requested: by a value that differs from the default, or by any value on
    the command line or in Python except 0, false and None, which turn a flag off. A derived value is not a request. A
    default in a file is not a request, because the output of --print-config also lists unused flags."""
    value, origin = getattr(settings, name), settings.origin(name)
    is_typed = origin in ("command line", "Python")
    return not origin.startswith("--") and (value != DEFAULTS[name] or (is_typed and bool(value)))


def _are_default_epochs(settings):
    """Return whether --lr-decay-epochs has its default, and the default is meant as epochs: if the flag is not set, or
    if --iter-unit has a higher rank than --lr-decay-epochs, for example because the command line sets the unit and a
    file from --print-config contains the default."""
    name = "lr_decay_epochs"
    is_set = settings.origin(name) != "default" and _own_rank(settings, name) >= _own_rank(settings, "iter_unit")
    return settings.lr_decay_epochs == DEFAULTS[name] and not is_set


def _conflicts_of_representation(settings):
    """With --program-representation pir, yield a Conflict for each flag whose feature PIR programs lack."""
    if settings.program_representation == "legacy":
        return
    native = ["kernels"] if settings.kernels == "native" else []
    for name in [name for name in _NOT_IN_PIR if getattr(settings, name)] + native:
        yield Conflict(
            f"--program-representation pir: not supported with {argument(settings, name)}; remove one of them",
            ("program_representation", name),
            ("program_representation", name),
        )


def _conflicts_of_budget(settings):
    """With --budget-minutes, yield a Conflict if --epochs is explicit, and a Conflict if --profile-steps is set."""
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
            f"{flag_and_value}: not supported with --profile-steps; remove one of them",
            ("budget_minutes", "profile_steps"),
            ("budget_minutes", "profile_steps"),
        )


def _conflicts_of_multi_label(settings):
    if not settings.multi_label:
        return
    others = {
        "balanced_sampling": (settings.balanced_sampling, "an image can have several classes"),
        "choose_recipe": (settings.choose_recipe, "the chosen flags are for one class per image"),
        "label_offset": (settings.label_offset not in (numbers.AUTO, 0), "classes are numbered from 0"),
        "data_format": (settings.data_format in ONE_LABEL, "the format has one label per image"),
    }
    for name, (is_set, reason) in others.items():
        if is_set:
            yield Conflict(
                f"{argument(settings, name)}: not supported with --multi-label, because {reason}; remove one of them",
                (name,),
                ("multi_label",),
            )


def _conflicts_of_output(settings):
    trains = settings.run_scope is not RunScope.EVAL_ONLY and not settings.benchmark
    if settings.tensorboard_dir is not None and not trains:
        obstacle = "--benchmark" if settings.benchmark else "--run-scope eval_only"
        yield Conflict(
            f"--tensorboard-dir {settings.tensorboard_dir}: not supported with {obstacle}; remove one of them",
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
                f"{flag_name(name)} {getattr(settings, name)}: not supported with --data-format synthetic; remove "
                f"{flag_name(name)}",
                (name,),
                ("data_format",),
            )


def _conflicts_of_stages(settings):
    # With --budget-minutes, a new run does not know its number of epochs yet; budget.choose checks the stages.
    is_known = settings.budget_minutes is None or settings.is_inherited("epochs")
    knows_epochs = settings.iter_unit == "epoch" and is_known
    if settings.unfreeze_at is not None and knows_epochs and settings.unfreeze_at >= settings.epochs:
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


def _conflicts_of_device(settings):
    if settings.program_representation == "pir" and settings.device == "gpu":
        yield Conflict(
            "--program-representation pir: requires a CPU, but this run is on a GPU; use --device cpu",
            ("program_representation",),
            ("device",),
        )
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
