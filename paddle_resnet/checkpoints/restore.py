"""Find and verify the checkpoint that the flags specify, and restore the state of a run from this checkpoint.

saver.py defines the content of a checkpoint, folders.py defines the layout of its folder, and variables.py loads its
variables.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_resnet.checkpoints import contents, folders, run_folders, run_lock, schema, variables
from paddle_resnet.checkpoints.start import StartCheckpoint
from paddle_resnet.data import numbering
from paddle_resnet.data.images import some
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import cpu
from paddle_resnet.models import registered_name, user_file
from paddle_resnet.settings import inheritance, parsing, validation, values
from paddle_resnet.settings.declarations import EVALUATED, RESUMED, of_kinds
from paddle_resnet.settings.field import about
from paddle_resnet.settings.groups import images, start
from paddle_resnet.settings.values import Changes, FlagValue, flag_name, network_name, text
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet.data.iterators import Loader, TrainingLoader
    from paddle_resnet.optimizers.schedules import Schedule
    from paddle_resnet.utils.meters import AverageMeter


@dataclass(frozen=True, kw_only=True)
class Options(start.Settings):
    """The flags that specify the checkpoint from which a run starts; see `train.py --help all`. `arch` is the value of
    --model-arch-name if it is explicit, otherwise None."""

    iter_unit: str
    model_arch_name: str
    output_dir: str
    arch: str | None = about("explicit", "model_arch_name")
    model_prefix: FlagValue = about("flag_value", "model_prefix")


@dataclass(frozen=True, kw_only=True)
class Network(Options):
    def changes(self) -> Changes:
        """If --resume is combined with --from-checkpoint or --from-pretrained-params, and --model-arch-name is not
        explicit, set --model-arch-name to the network of the specified checkpoint, so that --resume searches the run
        folder of this network.

        Raises:
            UsageError: the flags of the checkpoint cannot be read, or find() or origin() fails.
        """
        if not (self.resume and self.is_from_weights and self.arch is None):
            return {}
        first = replace(self, resume=False)
        checkpoint, pretrained = find(first)
        folder, meta = origin(checkpoint, replace(first, from_pretrained_params=pretrained))
        if meta is None:
            return {}
        return {f"checkpoint {folder}": {"model_arch_name": recorded_flags(folder, meta, None).model_arch_name}}


def find(options: Options) -> tuple[StartCheckpoint | None, str | None]:
    """Find the checkpoint requested by --resume, or by --from-checkpoint and --last-epoch-of-checkpoint. If no
    checkpoint is found and --from-pretrained-params is a run folder, select a checkpoint in this folder.

    Rank 0 finds the checkpoint and, if it has a meta.json, verifies the checksums of all its files.

    Returns:
        (StartCheckpoint, or None if the run does not start from a checkpoint; value of --from-pretrained-params, in
        which the path of the selected checkpoint replaces that of the run folder).
    Raises:
        UsageError: the requested checkpoint does not exist, is damaged or cannot be read; its position is unknown; or
            the folder is in use by another run, or contains runs of several networks.
    """
    checkpoint = exchange.from_rank_0(lambda: _find(_search, options))
    path = options.from_pretrained_params
    if checkpoint is None and path is not None:
        path = exchange.from_rank_0(lambda: str(_find(run_folders.resolve, path, options.arch)))
    return checkpoint and StartCheckpoint(**checkpoint), path


def _find(search, *arguments):
    try:
        return search(*arguments)
    except OSError as e:
        raise UsageError(
            f"{e.filename}: cannot be read ({e.strerror}); make it readable, or choose a different folder"
        ) from e


def _search(options):
    if options.resume:
        folder = run_folders.run_folder(options.output_dir, options.model_arch_name)
        if folder.is_dir():
            _clean(folder)
        checkpoint = _newest(folder, options, resumes=True)
        if checkpoint:
            return {**checkpoint, "label": f"--resume: {checkpoint['folder']}"}
        if not options.is_from_weights and options.arch is None:
            _check_default_network(folder)
        logger.info(f"--resume: {folder} contains no checkpoint yet, so a new run starts")
    if options.from_checkpoint is None:
        return None
    checkpoint = _selected(options)
    return {**checkpoint, "label": f"--from-checkpoint {checkpoint['folder']}"}


def _selected(options):
    """Return the fields of StartCheckpoint for --from-checkpoint.

    Raises:
        UsageError: the folder does not contain the checkpoint, the checkpoint is damaged, or the folder contains runs
            of several networks.
    """
    root, wanted, model_prefix = Path(options.from_checkpoint), options.last_epoch_of_checkpoint, options.model_prefix
    flag = f"--from-checkpoint {root}"
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UsageError(f"{flag}: {problem}; choose a folder that contains a checkpoint")
    root = run_folders.resolve(root, options.arch) if wanted is None else run_folders.run_in(root, options.arch)
    prefix = contents.foreign_prefix(root, model_prefix)
    if wanted is None:
        if not _has_files(root, model_prefix):
            raise UsageError(
                f"{flag}: contains neither {contents.META} nor {prefix}.pdparams; choose a folder that contains a "
                "checkpoint, or set --model-prefix to the prefix of its files"
            )
        return {"folder": str(root), "epoch": 0, "meta": _verified(root, flag)}
    below = [p for p in run_folders.below(root) if _has_files(p, model_prefix)]
    epochs = [int(p.name) for p in below if p.name.isdigit()]
    if wanted == "auto" and below:
        return _newest(root, options)
    if _has_files(root, model_prefix) and (wanted == "auto" or wanted == _epoch_of(root)):
        return _position(root, _verified(root, flag), options.iter_unit)
    if wanted in epochs:
        return _position(root / str(wanted), _verified(root / str(wanted), flag), options.iter_unit)
    remedy = f"use an existing epoch ({some(list(map(str, epochs)))})" if epochs else "choose a different folder"
    name = "checkpoint" if wanted == "auto" else f"folder {wanted}"
    raise UsageError(
        f"--last-epoch-of-checkpoint {wanted}: {root} contains no {name} with {contents.META} or "
        f"{prefix}.pdparams; {remedy}, or set --model-prefix"
    )


def _check_default_network(folder):
    """Raise UsageError if --resume finds no checkpoint of the default network in the run folder, but the output folder
    contains runs of other networks, because the user may have meant one of these runs."""
    others = [run.name for run in run_folders.runs_below(folder.parent)] if folder.parent.is_dir() else []
    if others:
        raise UsageError(
            f"--resume: {folder} contains no checkpoint, but {folder.parent} contains runs of {', '.join(others)}; "
            "set --model-arch-name to the network to train"
        )


def _clean(folder):
    """Remove the unfinished files of a killed run. The lock ensures that no other run is using the folder.

    Raises:
        UsageError: another run uses the folder, or the folder cannot be written.
    """
    try:
        with run_lock.hold(folder):
            folders.clean(folder)
    except OSError as e:
        raise folders.unwritable(folder, e) from e


def _newest(root, options, resumes=False):
    """Return the fields of StartCheckpoint for the newest valid checkpoint below the folder `root`, or None if the
    folder contains no checkpoint. Damaged checkpoints trigger a warning and are skipped.

    If another program wrote all checkpoints, return the newest one; or, if the search is for --resume (`resumes`) and
    the run can start from --from-checkpoint instead, None.

    Raises:
        UsageError: none of the checkpoints is valid; the search is for --resume, another program wrote all checkpoints,
            and there is no --from-checkpoint; or _position fails.
    """
    valid, others = run_folders.newest_first(root)
    foreign = [folder for folder, _ in others if _is_foreign(folder, options.model_prefix)]
    if not valid and foreign and len(foreign) == len(others):
        if not resumes:
            return _position(foreign[-1], None, options.iter_unit)
        if options.from_checkpoint is not None:
            return None
        # Raise an error, because this program may have written the checkpoints, and their meta.json files may have been
        # deleted.
        raise UsageError(
            f"--resume: the checkpoints in {root} ({', '.join(folder.name for folder in foreign[-3:])}) have no "
            f"{contents.META}; if they are from another program, add --from-checkpoint {root} "
            "--last-epoch-of-checkpoint auto"
        )
    for folder, problem in others:
        logger.warn(f"{folder}: skipped, because it is not a valid checkpoint ({problem}); move it away")
    for folder, _ in valid:
        try:
            return _position(folder, contents.verify(folder), options.iter_unit)
        except contents.DamagedError as e:
            logger.warn(f"{folder}: skipped, because it is unusable ({e}); move it away")
    if valid or others:
        remedy = "move the checkpoints away to start a new run" if resumes else "choose a different folder"
        raise UsageError(f"{root}: contains no valid checkpoint; {remedy}")
    return None


def _position(folder, meta, iter_unit):
    """Return the fields of StartCheckpoint for a checkpoint, including the position at which training continues.

    Raises:
        UsageError: the checkpoint has no meta.json, and its position cannot be derived from the folder's name, or
            --iter-unit is batch.
    """
    if meta is None:
        if iter_unit == "batch":
            raise UsageError(
                f"--iter-unit batch: {folder} has no {contents.META}, so its number of steps is unknown; use "
                "--iter-unit epoch, or --last-epoch-of-checkpoint None"
            )
        if (epoch := _epoch_of(folder)) is None:
            raise UsageError(
                f"{folder}: has no {contents.META}, and its name is not an epoch; use --last-epoch-of-checkpoint None"
            )
        logger.warn(
            f"{folder}: has no {contents.META}, and therefore no checksums, loader state or best result; training "
            f"continues with epoch {epoch + 1}, its learning rate, and the image order of the first epoch; check the "
            "epoch"
        )
        return {"folder": str(folder), "epoch": epoch + 1}
    epoch, step = (meta["epoch"] + 1, 0) if meta["step"] is None else (meta["epoch"], meta["step"])
    return {"folder": str(folder), "epoch": epoch, "step": step, "meta": meta, "resumes": (epoch, step) != (0, 0)}


def _verified(folder, flag):
    """Verify a checkpoint that was requested explicitly, and return its meta.json, or None if it has no meta.json.
    Raise UsageError if the checkpoint is damaged."""
    if not os.path.lexists(folder / contents.META):
        return None
    try:
        return contents.verify(folder)
    except contents.DamagedError as e:
        raise UsageError(f"{flag}: {folder} is unusable: {e}; choose a different checkpoint") from e


def _is_foreign(folder, model_prefix):
    """Return whether a folder contains a checkpoint of NVIDIA's example or of paddle.static.save: *.pdparams and
    *.pdopt without meta.json."""
    files = [folder / f"{contents.foreign_prefix(folder, model_prefix)}.{ending}" for ending in ("pdparams", "pdopt")]
    return not os.path.lexists(folder / contents.META) and all(map(os.path.isfile, files))


def _has_files(folder, model_prefix):
    """Return whether a folder contains a meta.json, valid or damaged, or the parameters of another program."""
    foreign = folder / f"{contents.foreign_prefix(folder, model_prefix)}.pdparams"
    return os.path.lexists(folder / contents.META) or os.path.isfile(foreign)


def origin(checkpoint: StartCheckpoint | None, options: Options) -> tuple[str | None, dict[str, Any] | None]:
    """Return the checkpoint from which the run loads its initial variables, as (folder, meta.json or None), or (None,
    None) if there is no checkpoint.

    Args:
        checkpoint: the checkpoint that the run starts from (result of find), or None.
        options: flags of the start.
    Raises:
        UsageError: the file that --from-pretrained-params specifies does not exist, or the meta.json next to it is
            damaged.
    """
    if checkpoint:
        return checkpoint.folder, checkpoint.meta
    if options.from_pretrained_params is None:
        return None, None
    return exchange.from_rank_0(lambda: _origin_of_pretrained(options.from_pretrained_params, options.model_prefix))


def _origin_of_pretrained(pretrained, model_prefix):
    path = variables.pretrained_file(pretrained, model_prefix)
    try:
        meta = contents.read_meta(path.parent) if os.path.lexists(path.parent / contents.META) else None
    except contents.DamagedError as e:
        raise UsageError(f"--from-pretrained-params {pretrained}: unusable: {e}; choose a different checkpoint") from e
    return str(path.parent), meta if meta and path.name in meta["files"] else None


def log_evaluated(folder: str | None, meta: dict[str, Any] | None) -> int:
    """Log which checkpoint (see origin) is evaluated, and return its epoch, or 0 if the epoch is unknown."""
    epoch = meta["epoch"] if meta else folder and _epoch_of(Path(folder))
    if epoch is not None:
        step = f" after {meta['step']} of {meta['steps_each_epoch']} steps" if meta and meta["step"] is not None else ""
        logger.info(f"evaluating {folder}: epoch {epoch}{step}")
    return epoch or 0


def inherit_flags(args: values.Settings, checkpoint: StartCheckpoint | None) -> None:
    """Set the flags that are not explicit to their values in the meta.json of the initial checkpoint. Log the inherited
    flags, and the explicit flags that differ from the recorded values. The kind of a flag in settings/declarations.py
    determines whether the run inherits it.

    Args:
        args: flags of the run.
        checkpoint: the checkpoint that the run starts from (result of find), or None.
    Raises:
        UsageError: the flags, including the inherited flags, are invalid or contradict each other; or origin or
            recorded_flags fails.
    """
    folder, meta = origin(checkpoint, args.part(Options))
    if meta is not None:
        recorded = recorded_flags(folder, meta, args.explicit("model_arch_name"))
        resumes = bool(checkpoint and checkpoint.resumes and args.run_scope.trains)
        is_fine_tuning = args.run_scope.trains and checkpoint is None
        names = _inherited_names(resumes, is_fine_tuning, args.run_scope.trains and recorded.asp)
        if is_fine_tuning:
            names = [name for name in names if not args.is_chosen(name)]
        inherited, differing = inheritance.inherit(args, recorded, names, folder)
        if args.multi_label != recorded.multi_label and (resumes or not args.run_scope.trains):
            raise UsageError(
                f"--multi-label {str(args.multi_label).lower()}: {folder} was trained with --multi-label "
                f"{str(recorded.multi_label).lower()}; remove the flag, or start a new run with "
                "--from-pretrained-params"
            )
        if not args.is_explicit("image_shape"):
            # The number of channels must match the filters of the first layer.
            args.set(f"checkpoint {folder}", image_shape=[recorded.image_shape[0], *args.image_shape[1:]])
        if inherited:
            described = ", ".join(f"{name} {text(value)}" for name, value in inherited.items())
            logger.info(f"from {folder}/{contents.META}: {described}")
        _log_differences(folder, differing, resumes)
        if resumes and args.choose_recipe and not recorded.choose_recipe:
            logger.warn(
                "--choose-recipe: has no effect, because a resumed run uses the recorded values; start a new run to "
                "choose a recipe"
            )
    elif folder is not None and not args.is_explicit("image_shape"):
        # Checkpoints without meta.json are usually from NVIDIA's example, whose networks have 4 input channels.
        args.set(f"checkpoint {folder}", image_shape=[4, *args.image_shape[1:]])
    validation.check(args)


def _inherited_names(resumes, is_fine_tuning, keeps_asp):
    if resumes:
        return of_kinds(*RESUMED)
    if is_fine_tuning:  # the data set determines the classes
        return ("model_arch_name", "image_shape", *of_kinds("preprocessing"))
    return (*of_kinds(*EVALUATED), "asp") if keeps_asp else of_kinds(*EVALUATED)


def _log_differences(folder, differing, resumes):
    """Log the explicit flags that differ from those of a checkpoint. `differing` is {flag: (value, recorded value)}."""
    saving = set(map(flag_name, of_kinds("saving"))) if resumes else set()
    changes = {name: f"{name} {text(now)} (was {text(old)})" for name, (now, old) in differing.items()}
    if harmless := [change for name, change in changes.items() if name in saving]:
        logger.info(f"{folder}: resumed with {', '.join(harmless)}")
    if others := [change for name, change in changes.items() if name not in saving]:
        effect = ", so the losses will differ from those of an uninterrupted run" if resumes else ""
        logger.warn(
            f"{folder}: trained with different flags: {', '.join(others)}{effect}; remove the flags to use the "
            "recorded values"
        )


def recorded_flags(folder: str | Path, meta: dict[str, Any], arch: str | None) -> values.Settings:
    """Return the flags of the run that wrote a checkpoint.

    Args:
        folder: folder of the checkpoint.
        meta: content of the checkpoint's meta.json.
        arch: value of --model-arch-name if it is explicit, otherwise None. A Python file is imported only if
            --model-arch-name specifies the file, not because a checkpoint contains its path.
    Raises:
        UsageError: the flags are invalid, or the network is from a user's file that no flag specifies.
    """
    try:
        args = parsing.from_dict(meta["arguments"])
        validation.check_none(images.size_conflicts(args.part(images.Settings)))
        recorded = args.model_arch_name
        if user_file.split(recorded) is None:
            args.resolve("recorded", model_arch_name=registered_name(recorded))  # run folders have the registered name
    except UsageError as e:
        raise UsageError(
            f"{folder}: {contents.META} contains an invalid flag ({e}); choose a different checkpoint"
        ) from e
    if user_file.split(recorded):
        if arch is None:
            raise UsageError(
                f"{folder}: its network {recorded} is from a file, which is imported only if a flag specifies it; add "
                f"--model-arch-name {recorded} if you trust this file"
            )
        if user_file.split(arch) and network_name(arch) == network_name(recorded):
            args.resolve("recorded", model_arch_name=arch)  # the file may have moved since the run
            if user_file.sha256(arch) != meta.get("network_sha256"):
                logger.warn(
                    f"--model-arch-name {arch}: the file has changed since the training of {folder}; check the changes"
                )
    return args


def recorded_classes(meta: dict[str, Any] | None) -> list[str] | None:
    """Return the classes of a checkpoint in the order of the network's outputs, or None if the checkpoint does not
    contain the classes."""
    return (meta or {}).get("classes") or None


def check_resumed_classes(checkpoint: StartCheckpoint, now: list[str] | None, fine_tuning: str) -> None:
    """Raise UsageError if the classes of a resumed run differ from those of its checkpoint.

    Args:
        checkpoint: the checkpoint of the resumed run (result of find).
        now: result of numbering.data_classes, or None. Classes without names are only counted.
        fine_tuning: command that fine-tunes the network of the checkpoint, for the error message.
    """
    before, outputs = recorded_classes(checkpoint.meta), checkpoint.meta["arguments"].get("num_of_class")
    if not before or not now:
        return
    if numbering.have_names(before, now):
        problem = before != now and first_difference(before, now)
    else:
        problem = outputs is not None and len(now) > outputs and f"{outputs} classes, now {len(now)}"
    if problem:
        raise UsageError(
            f"{checkpoint.label}: a resumed run cannot change its classes ({problem}); restore the classes, or start a "
            f"new run that fine-tunes the network: `{fine_tuning}`"
        )


def first_difference(before: list[str], now: list[str]) -> str:
    """Return a description of the first difference between two lists of classes that differ."""
    i = next(i for i in range(max(len(before), len(now))) if before[i : i + 1] != now[i : i + 1])
    old, new = (names[i] if i < len(names) else "unused" for names in (before, now))
    return f"label {i} was {old} and is {new}"


def compare_classes(folder: str, meta: dict[str, Any] | None, loader: Loader, is_fine_tuning: bool) -> None:
    """Warn if the names of the classes of the initial checkpoint and of the data set differ.

    Args:
        folder, meta: result of origin.
        loader: result of dali.build_dataloader.
        is_fine_tuning: whether the run fine-tunes the network; a different number of classes is then intended.
    """
    before, now = recorded_classes(meta) or [], list(loader.classes)
    if not numbering.have_names(before, now) or (is_fine_tuning and len(before) != len(now)):
        return
    if before != now:
        logger.warn(f"{folder}: trained on different classes ({first_difference(before, now)}); check --image-root")


def restore(
    checkpoint: StartCheckpoint,
    lr_scheduler: Schedule,
    loader: TrainingLoader,
    fetchs: dict[str, tuple[static.Variable, AverageMeter]],
    place: variables.Place,
    *,
    iter_unit: str,
    is_verbose: bool,
) -> StartCheckpoint:
    """Restore the position, the learning rate and the random number generators of a training run. If the checkpoint was
    saved within an epoch, also restore the metric sums of the epoch and the BN statistics of this process.

    Args:
        checkpoint: the checkpoint that the run starts from (result of find).
        lr_scheduler: schedule built from this run's flags. The learning rate depends only on the step, so it continues
            as in an uninterrupted run with the flags of this run.
        loader: training loader, built with checkpoint.loader_state.
        fetchs: result of program.build.
        place: device of the program.
        iter_unit: value of --iter-unit.
        is_verbose: see variables.load_statistics.
    Returns:
        the checkpoint, with step 0 if the loader cannot continue within the epoch.
    Raises:
        UsageError: the number of steps per epoch has changed with --iter-unit batch; the checkpoint was saved within a
            training step of this run's --accumulate-steps; or variables.load_statistics fails.
    """
    timeline = lr_scheduler.timeline
    accumulate_steps = timeline.accumulate_steps
    if iter_unit == "batch" and checkpoint.resumes:
        before, now = checkpoint.meta["steps_each_epoch"], timeline.batches(checkpoint.meta["epoch"])
        if before != now:
            raise UsageError(
                f"--iter-unit batch: {checkpoint.folder} has {before} steps per epoch, but this run has {now}, so it "
                "would not end after --num-iter; use the checkpoint's data set, --batch-size, --accumulate-steps and "
                "number of processes"
            )
    if checkpoint.is_inside and checkpoint.step % accumulate_steps:
        raise UsageError(
            f"--accumulate-steps {accumulate_steps}: {checkpoint.folder} was saved after {checkpoint.step} "
            f"batches of an epoch, which is not a multiple of {accumulate_steps}; use the checkpoint's "
            "--accumulate-steps, or a checkpoint from the end of an epoch"
        )
    if checkpoint.is_inside and loader.step != checkpoint.step:
        checkpoint = replace(checkpoint, step=0)
        logger.warn(
            f"{checkpoint.folder}: cannot continue inside epoch {checkpoint.epoch}, so the epoch restarts with the "
            "checkpoint's parameters; to continue inside the epoch, use the original data, flags and number of "
            "processes"
        )
    is_evaluating = bool(checkpoint.step) and not checkpoint.is_inside  # only the evaluation of the epoch is pending
    done = timeline.batches(checkpoint.epoch) if is_evaluating else checkpoint.step
    done += timeline.batches_before(checkpoint.epoch)
    lr_scheduler.step(done // accumulate_steps)
    if checkpoint.resumes:
        _log_environment_changes(checkpoint.folder, checkpoint.meta, place)
        random.setstate(schema.as_tuples(json.loads(checkpoint.meta["seeds"]["python"])))
        np.random.set_state(schema.as_tuples(json.loads(checkpoint.meta["seeds"]["numpy"])))
    if checkpoint.is_inside:
        for name, (_, meter) in fetchs.items():
            if name in checkpoint.rank_state["meters"]:
                meter.restore(checkpoint.rank_state["meters"][name])
        statistics = f"bn_rank{processes.rank()}.npz"
        if statistics in checkpoint.meta["files"]:
            path = Path(checkpoint.folder) / statistics
            variables.load_statistics(path, place, is_verbose)
    where = f"epoch {checkpoint.epoch}" + (f" step {checkpoint.step}" if checkpoint.step else "")
    verb = "continuing" if checkpoint.resumes else "starting"
    logger.info(f"loaded {checkpoint.folder}: {verb} with {where}")
    return checkpoint


def _epoch_of(folder):
    """Return the epoch of a checkpoint folder from meta.json, or from its name if meta.json is not valid."""
    try:
        return contents.read_meta(folder)["epoch"]
    except contents.DamagedError:
        at = run_folders.position(folder.resolve().name)
        return at[0] if at and at[1] is None else None


def _log_environment_changes(folder, meta, place):
    before = meta.get("paddle_version", paddle.__version__)  # older checkpoints lack this key
    if before != paddle.__version__:
        logger.warn(
            f"{folder}: written with Paddle {before}, but this run uses {paddle.__version__}, so results may differ; "
            "use the same version to reproduce the results"
        )
    if processes.world_size() != meta["world_size"]:
        logger.warn(
            f"{folder}: written by {counted(meta['world_size'], 'process', 'processes')}, but this run has "
            f"{processes.world_size()}, so the global batch size and the peak learning rate change in proportion; "
            "start the same number of processes to keep them"
        )
    if "cpu" in meta and meta["arguments"].get("device") == "cpu" and isinstance(place, paddle.CPUPlace):
        _log_arithmetic_changes(folder, meta["cpu"], cpu.arithmetic())


def _log_arithmetic_changes(folder, before, now):
    """Warn if the CPU's kernels round differently than in the run that wrote a checkpoint. `before` and `now` are
    results of cpu.arithmetic."""
    effect = "so losses may differ in the last digits from those of an uninterrupted run"
    if before["threads"] != now["threads"]:
        logger.warn(
            f"{folder}: written with OMP_NUM_THREADS={before['threads']}, but this run has {now['threads']}, {effect}; "
            f"set OMP_NUM_THREADS={before['threads']} to reproduce the losses"
        )
    lacking, additional = (
        [name for name in some["instructions"].split() if name not in others["instructions"].split()]
        for some, others in ((before, now), (now, before))
    )
    if differing := [f"without {name}" for name in lacking] + [f"with {name}" for name in additional]:
        logger.warn(
            f"{folder}: written with a different instruction set (this run: {', '.join(differing[:3])}"
            f"{', ...' * (len(differing) > 3)}), {effect}; resume on the same type of CPU to reproduce the losses"
        )
