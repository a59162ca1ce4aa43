"""Where a run starts: find and verify the checkpoint that the flags name, and restore the run's state from it.

saver.py has the content of a checkpoint, folders.py the form of its folder; variables.py loads the variables.
"""

import argparse
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle

import config
from paddle_resnet.checkpoints import folders, schema, variables
from paddle_resnet.job import exchange, processes
from paddle_resnet.models import registered_name
from utils import logger
from utils.errors import UsageError


@dataclass
class Found:
    """The checkpoint that a run starts from.

    Attributes:
        folder: path of the checkpoint.
        epoch: epoch to continue with.
        step: steps already done in that epoch.
        meta: content of meta.json, or None for a checkpoint of another program, which has no meta.json.
        goes_on: whether this run continues the checkpoint's run. If not, it takes the variables and starts with
            epoch 0. It stays true if the epoch has to start again.
    """

    folder: str
    epoch: int
    step: int = 0
    meta: dict | None = None

    def __post_init__(self):
        self.goes_on = self.meta is not None and (self.epoch, self.step) != (0, 0)

    def continues(self, root):
        """Whether this run continues the newest checkpoint below ROOT: from an older one it would overwrite others."""
        newest = folders.newest(root)
        return self.epoch + self.step > 0 and newest is not None and Path(self.folder).resolve() == newest.resolve()

    @property
    def loader_state(self):
        """State of this process's loader, or None."""
        if not self.goes_on:
            return None
        return self.rank_state["loader"]

    @property
    def rank_state(self):
        """What the checkpoint holds of this process, or of the last one if there were fewer."""
        ranks = self.meta["ranks"]
        return ranks[min(processes.rank(), len(ranks) - 1)]

    @property
    def trained(self):
        """Results of the epoch's training, if only the epoch's evaluation is left to do."""
        return self.meta["trained"] if self.step else None


def find(args):
    """The checkpoint that --resume, or --from-checkpoint with --last-epoch-of-checkpoint, asks for. If there is none,
    --from-pretrained-params becomes the checkpoint to use of a run's folder.

    Rank 0 searches and verifies every byte.

    Returns:
        Found, or None to start from scratch.
    Raises:
        UsageError: the requested checkpoint does not exist or is damaged.
    """
    found = exchange.from_rank_0(lambda: _find(args, _search))
    if found is None and args.from_pretrained_params is not None:
        args.from_pretrained_params = exchange.from_rank_0(lambda: _find(args, _pretrained))
    return found and Found(**found)


def _find(args, search):
    try:
        return search(args)
    except OSError as e:
        raise UsageError(f"{e.filename} cannot be read ({e.strerror}): make it readable, or name another folder") from e


def _pretrained(args):
    return str(folders.resolve(args.from_pretrained_params, _arch(args)))


def _arch(args):
    return args.model_arch_name if "model_arch_name" in args.given else None


def _search(args):
    if args.resume:
        folder = folders.run_folder(args)
        if folder.is_dir():
            _clean(args, folder)
        found = _newest(args, folder, resumes=True)
        if found:
            return found
        _refuse_default_network(args, folder)
        logger.info(f"--resume: {folder} holds no checkpoint yet")
    if args.from_checkpoint is None:
        return None
    root, wanted = Path(args.from_checkpoint), args.last_epoch_of_checkpoint
    flag = f"--from-checkpoint {root}"
    if not root.is_dir():
        raise UsageError(f"{flag} does not exist: name a folder that holds a checkpoint")
    root = folders.resolve(root, _arch(args)) if wanted is None else folders.run_in(root, _arch(args))
    if wanted is None:
        if not _has_files(args, root):
            prefix = folders.foreign_prefix(args, root)
            raise UsageError(
                f"{flag} has neither {folders.META} nor {prefix}.pdparams: choose a folder that holds a checkpoint, or "
                "set its --model-prefix"
            )
        return {"folder": str(root), "epoch": 0, "meta": _verified(args, root, flag)}
    below = [p for p in folders.below(root) if _has_files(args, p)]
    epochs = [int(p.name) for p in below if p.name.isdigit()]
    if wanted == "auto" and below:
        return _newest(args, root)
    if _has_files(args, root) and (wanted == "auto" or wanted == _epoch_of(root)):
        return _position(args, root, _verified(args, root, flag))
    if wanted in epochs:
        return _position(args, root / str(wanted), _verified(args, root / str(wanted), flag))
    raise UsageError(
        f"--last-epoch-of-checkpoint {wanted}: {root} holds no such epoch with {folders.META} or "
        f"{folders.foreign_prefix(args, root)}.pdparams: give one of {epochs or 'another folder'} or another "
        "--model-prefix"
    )


def _refuse_default_network(args, folder):
    """Raise UsageError if --resume found nothing in the folder of a network that no flag names, next to runs of others:
    one of these may be meant."""
    has_start = args.from_checkpoint is not None or args.from_pretrained_params is not None
    if has_start or "model_arch_name" in args.given or not folder.parent.is_dir():
        return
    if others := [run.name for run in folders.runs_below(folder.parent)]:
        raise UsageError(
            f"--resume: {folder} holds no checkpoint, but {folder.parent} has runs of {', '.join(others)}: set "
            "--model-arch-name to the network to continue or to start"
        )


def _clean(args, folder):
    """Remove unfinished work under the lock: without it, a running job's work would be removed."""
    try:
        with folders.hold(args):
            folders.clean(folder)
    except OSError as e:
        raise folders.unwritable(args, e) from e


def _newest(args, root, resumes=False):
    """The newest intact checkpoint below a folder. Damaged ones are named and passed over.

    Args:
        args: flags.
        root: the folder.
        resumes: for --resume. Otherwise, if all are of another program, the newest of those is taken.
    """
    whole, others = folders.newest_first(root)
    foreign = [folder for folder, _ in others if _is_foreign(args, folder)]
    if not whole and foreign and len(foreign) == len(others):
        if not resumes:
            return _position(args, foreign[-1], None)
        if args.from_checkpoint is not None:
            return None
        # It may also be a checkpoint of this program that has lost its meta.json.
        raise UsageError(
            f"--resume: the checkpoints in {root} ({', '.join(folder.name for folder in foreign[-3:])}) have no "
            f"{folders.META}: add --from-checkpoint {root} --last-epoch-of-checkpoint auto to continue from one of "
            "another program"
        )
    for folder, problem in others:
        logger.warn(f"{folder} is not a checkpoint: {problem}")
    for folder, _ in whole:
        try:
            return _position(args, folder, folders.verify(folder))
        except folders.DamagedError as e:
            logger.warn(f"{folder} is damaged: {e}: trying the checkpoint before it")
    if whole or others:
        raise UsageError(f"{root} holds only damaged checkpoints: move them away to start afresh")
    return None


def _position(args, folder, meta):
    """The fields of Found for a checkpoint: where training continues."""
    if meta is None:
        if (epoch := _epoch_of(folder)) is None:
            raise UsageError(
                f"{folder} has no {folders.META}, and its name is not an epoch: give --last-epoch-of-checkpoint None"
            )
        logger.warn(
            f"{folder} has no {folders.META}: it lacks checksums, the state of the loader and the best result; "
            f"training continues with epoch {epoch + 1}, its learning rate and the image order of a first epoch"
        )
        return {"folder": str(folder), "epoch": epoch + 1}
    epoch, step = (meta["epoch"] + 1, 0) if meta["step"] is None else (meta["epoch"], meta["step"])
    return {"folder": str(folder), "epoch": epoch, "step": step, "meta": meta}


def _verified(args, folder, flag):
    """The meta.json of a checkpoint requested by name, after verifying it; None if it has no meta.json."""
    if not os.path.lexists(folder / folders.META):
        return None
    try:
        return folders.verify(folder)
    except folders.DamagedError as e:
        raise UsageError(f"{flag}: {folder} is damaged: {e}: name another checkpoint") from e


def _is_foreign(args, folder):
    """Whether a folder holds a checkpoint of NVIDIA's example or of paddle.static.save: two files and no meta.json."""
    files = [folder / f"{folders.foreign_prefix(args, folder)}.{ending}" for ending in ("pdparams", "pdopt")]
    return not os.path.lexists(folder / folders.META) and all(map(os.path.isfile, files))


def _has_files(args, folder):
    """Whether a folder has a checkpoint's meta.json, damaged or not, or the parameters of another program's."""
    foreign = folder / f"{folders.foreign_prefix(args, folder)}.pdparams"
    return os.path.lexists(folder / folders.META) or os.path.isfile(foreign)


def origin(args, found):
    """The checkpoint that the run takes its first variables from: (folder, its meta.json or None); (None, None) for a
    run that starts from nothing.

    Args:
        args: flags.
        found: result of find.
    Raises:
        UsageError: --from-pretrained-params names no file, or one beside a damaged meta.json.
    """
    if found:
        return found.folder, found.meta
    if args.from_pretrained_params is None:
        return None, None
    return exchange.from_rank_0(lambda: _origin_of_pretrained(args))


def _origin_of_pretrained(args):
    path = variables.pretrained_file(args)
    try:
        meta = folders.read_meta(path.parent) if os.path.lexists(path.parent / folders.META) else None
    except folders.DamagedError as e:
        raise UsageError(f"--from-pretrained-params {args.from_pretrained_params} is damaged: {e}: name another") from e
    return str(path.parent), meta if meta and path.name in meta["files"] else None


def log_evaluated(args, found):
    """Log which checkpoint an evaluation is about; returns its epoch, 0 if it is unknown."""
    folder, meta = origin(args, found)
    epoch = meta["epoch"] if meta else folder and _epoch_of(Path(folder))
    if epoch is not None:
        step = f" after {meta['step']} of {meta['steps_each_epoch']} steps" if meta and meta["step"] is not None else ""
        logger.info(f"evaluates {folder}: epoch {epoch}{step}")
    return epoch or 0


def settle_network(args):
    """Let --model-arch-name, unless it is given, be that of what a run with --resume starts from where there is nothing
    to continue: it names the folder in which --resume looks. Changes the flags."""
    has_start = args.from_checkpoint is not None or args.from_pretrained_params is not None
    if args.resume and has_start and "model_arch_name" not in args.given:
        first = argparse.Namespace(**vars(args) | {"resume": False})
        folder, meta = origin(first, find(first))
        if meta is not None:
            args.model_arch_name = recorded_flags(folder, meta).model_arch_name


def inherit_flags(args, found):
    """Take the flags that are not explicit from the meta.json of what the run starts from, and log what is taken and
    what differs; changes the flags. config.KINDS says which ones an evaluation, fine-tuning and a resumed run inherit.

    Args:
        args: flags.
        found: result of find.
    Raises:
        UsageError: the flags, with those of the checkpoint, are impossible or do not fit each other.
    """
    folder, meta = origin(args, found)
    if meta is not None:
        recorded = recorded_flags(folder, meta)
        resumes = bool(found and found.goes_on and args.run_scope.trains)
        taken, differing = config.inherit(args, recorded, _inherited_names(args, found, recorded, resumes))
        if found is None and args.run_scope.trains and "image_shape" not in args.given:
            # The first filters have these channels.
            args.image_shape = [recorded.image_shape[0], *args.image_shape[1:]]
            args.inherited |= {"image_shape"}
        if taken:
            values = ", ".join(f"{name} {config.text(value)}" for name, value in taken.items())
            logger.info(f"from {folder}/{folders.META}: {values}")
        _log_differences(folder, differing, resumes)
    elif folder is not None and "image_shape" not in args.given:
        args.image_shape = [4, *args.image_shape[1:]]  # as NVIDIA's example, whatever is faster here
        args.inherited |= {"image_shape"}
    config.check_settings(args)


def _inherited_names(args, found, recorded, resumes):
    if resumes:
        return config.RESUMED
    if not args.run_scope.trains:
        return config.EVALUATED
    if found is None:  # fine-tuning: the data name the classes
        return ("model_arch_name", *config.KINDS["preprocessing"])
    return (*config.EVALUATED, "asp") if recorded.asp else config.EVALUATED


def _log_differences(folder, differing, resumes):
    """Log the explicit flags that differ from those of a checkpoint: {flag: (value, recorded value)}."""
    saving = {config.flag(name) for name in config.KINDS["saving"]} if resumes else set()
    changes = {name: f"{name} {config.text(now)} (was {config.text(old)})" for name, (now, old) in differing.items()}
    if harmless := [text for name, text in changes.items() if name in saving]:
        logger.info(f"{folder}: resumed with {', '.join(harmless)}")
    if others := [text for name, text in changes.items() if name not in saving]:
        effect = "; the losses will differ from those of an uninterrupted run" if resumes else ""
        logger.warn(f"{folder}: the flags differ from those of its training: {', '.join(others)}{effect}")


def recorded_flags(folder, meta):
    """The flags of the run that wrote a checkpoint, from the content of its meta.json.

    Raises:
        UsageError: they are impossible.
    """
    try:
        args = config.from_dict(meta["arguments"])
        args.model_arch_name = registered_name(args.model_arch_name)  # also the name of a folder
        return args
    except UsageError as e:
        raise UsageError(f"{folder} has impossible arguments in its {folders.META}: {e}") from e


def classes_of_outputs(args, found):
    """The class of each output of a network that the run only evaluates, from its checkpoint. None if the checkpoint
    does not record classes, or if the run trains: the data set then defines them."""
    _, meta = origin(args, found)
    return None if meta is None or args.run_scope.trains else meta["classes"] or None


def compare_classes(args, found, loader):
    """Warn if the classes of what the run starts from and of the data set differ. Fine-tuning to another number of
    classes is no mistake."""
    folder, meta = origin(args, found)
    before, now = list((meta or {}).get("classes", [])), list(loader.classes)
    if not found and args.run_scope.trains and len(before) != len(now):
        return
    if before and now and before != now:
        i = next(i for i in range(max(len(before), len(now))) if before[i : i + 1] != now[i : i + 1])
        logger.warn(
            f"{folder} was trained on other classes: label {i} was {before[i : i + 1] or 'none'} and is "
            f"{now[i : i + 1] or 'none'}"
        )


def restore(args, found, lr_scheduler, loader, fetchs, place):
    """Restore a training run's state other than its variables: position, learning rate, generators. Inside an epoch
    also its running sums and this process's own BN statistics.

    Args:
        args: flags.
        found: result of find. Its step becomes 0 if the loader could not continue inside the epoch.
        lr_scheduler: its rate depends on the number of the step alone, so it continues like an uninterrupted run on the
            schedule of this run's flags.
        loader: training loader, built with found.loader_state.
        fetchs: result of program.build.
        place: where the program runs.
    """
    if found.step and not found.trained and loader.step != found.step:
        found.step = 0
        logger.warn(f"epoch {found.epoch} starts again at its beginning, with the parameters of {found.folder}")
    lr_scheduler.step(found.epoch * len(loader) + (len(loader) if found.trained else found.step))
    if found.goes_on:
        _log_environment_changes(found.meta)
        random.setstate(schema.as_tuples(json.loads(found.meta["seeds"]["python"])))
        np.random.set_state(schema.as_tuples(json.loads(found.meta["seeds"]["numpy"])))
    if found.step and not found.trained:
        for name, (_, meter) in fetchs.items():
            if name in found.rank_state["meters"]:
                meter.restore(found.rank_state["meters"][name])
        statistics = f"bn_rank{processes.rank()}.npz"
        if statistics in found.meta["files"]:
            variables.load_statistics(args, Path(found.folder) / statistics, place)
    where = f"epoch {found.epoch}" + (f" step {found.step}" if found.step else "")
    logger.info(f"loaded {found.folder}: goes on with {where}")


def _epoch_of(folder):
    """The epoch of a checkpoint folder: that of meta.json, else that of its name."""
    try:
        return folders.read_meta(folder)["epoch"]
    except folders.DamagedError:
        at = folders.position(folder.resolve().name)
        return at[0] if at and at[1] is None else None


def _log_environment_changes(meta):
    before = meta.get("paddle_version", paddle.__version__)  # missing in older checkpoints
    if before != paddle.__version__:
        logger.warn(f"the checkpoint is of Paddle {before}, and this is {paddle.__version__}: numbers may differ")
    if processes.world_size() != meta["world_size"]:
        logger.warn(
            f"the checkpoint was written by {meta['world_size']} processes, and these are {processes.world_size()}: "
            "the batch of a step and the peak learning rate change in proportion"
        )
