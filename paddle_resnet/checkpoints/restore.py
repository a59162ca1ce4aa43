"""Where a run starts from: the checkpoint that the flags name, verified, and how it comes back to life.

saver.py says what is in a checkpoint, folders.py what makes a folder one, variables.py how variables are loaded.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import config
from paddle_resnet.checkpoints import folders, variables
from paddle_resnet.job import exchange, processes
from utils import logger
from utils.errors import UsageError

# Flags that shape the learning rate: with others the schedule is another one.
_SCHEDULE_FLAGS = ("lr", "lr_scheduler", "epochs", "warmup_epochs", "warmup_start_lr", "batch_size")


@dataclass
class Found:
    """The checkpoint that a run starts from.

    Attributes:
        folder: where its files are.
        epoch: epoch to go on with.
        step: steps of that epoch that are done.
        meta: content of meta.json, or None for a checkpoint of a program that writes none.
    """

    folder: str
    epoch: int
    step: int = 0
    meta: dict | None = None

    def __post_init__(self):
        """goes_on: whether the run is one with the checkpoint's, and does not just take its variables and count from 0;
        also if the epoch has to start again."""
        self.goes_on = self.meta is not None and (self.epoch, self.step) != (0, 0)

    @property
    def loader_state(self):
        """State of this process's loader, or None."""
        if not self.goes_on:
            return None
        ranks = self.meta["ranks"]
        return ranks[min(processes.rank(), len(ranks) - 1)]["loader"]

    @property
    def trained(self):
        """Figures of the epoch's training, if all that was left of the epoch is its evaluation."""
        return self.meta["trained"] if self.step else None

    @property
    def best(self):
        """The best evaluation so far, or None."""
        return self.meta["best"] if self.goes_on else None


def find(args):
    """The checkpoint to start from, by --resume, or by --from-checkpoint and --last-epoch-of-checkpoint; rank 0 looks
    for it and reads every byte of it.

    Returns:
        Found, or None to start afresh.
    Raises:
        UsageError: the one that is asked for does not exist or is damaged.
    """
    found = exchange.from_rank_0(lambda: _find(args))
    return found and Found(**found)


def _find(args):
    if args.resume:
        folder = folders.run_folder(args)
        if folder.is_dir():
            _clean(args, folder)
        found = _newest(args, folder)
        if found:
            return found
        logger.info(f"--resume: no checkpoint in {folder} yet")
    if args.from_checkpoint is None:
        return None
    root, wanted = Path(args.from_checkpoint), args.last_epoch_of_checkpoint
    flag = f"--from-checkpoint {root}"
    if not root.is_dir():
        raise UsageError(f"{flag} does not exist: name a folder that holds a checkpoint")
    below = [p for p in folders.below(root) if _params_file(args, p).is_file()]
    epochs = [int(p.name) for p in below if p.name.isdigit()]
    if wanted is None:
        if not _params_file(args, root).is_file():
            remedy = "name a folder that holds a checkpoint, or its --model-prefix"
            if below:
                names = ", ".join(p.name for p in below)
                remedy = f"it holds {names}: add --last-epoch-of-checkpoint auto or a number"
            raise UsageError(f"{flag} has no {_params_file(args, root).name}; {remedy}")
        return {"folder": str(root), "epoch": 0, "meta": _verified(root, flag)}
    if wanted == "auto" and below:
        return _newest(args, root)
    if _params_file(args, root).is_file() and (wanted == "auto" or wanted == _epoch_of(root)):
        return _position(args, root, _verified(root, flag))
    if wanted in epochs:
        return _position(args, root / str(wanted), _verified(root / str(wanted), flag))
    raise UsageError(
        f"--last-epoch-of-checkpoint {wanted}: {root} holds no such epoch with "
        f"{args.model_prefix}.pdparams: give one of {epochs or 'another folder'} or another --model-prefix"
    )


def _clean(args, folder):
    """What is half-done there may be another run's that is at work."""
    try:
        with folders.hold(args):
            folders.clean(folder)
    except OSError as e:
        raise folders.unwritable(args, e) from e


def _newest(args, root):
    """The newest whole checkpoint below a folder; those that are damaged are named on the way to it."""
    whole, others = folders.newest_first(root)
    foreign = [folder for folder, _ in others if _is_foreign(args, folder)]
    if not whole and foreign and len(foreign) == len(others):
        return _position(args, foreign[-1], None)
    for folder, problem in others:
        logger.warn(f"{folder} is no checkpoint: {problem}")
    for folder, _ in whole:
        try:
            return _position(args, folder, folders.verify(folder))
        except folders.DamagedError as e:
            logger.warn(f"{folder} is damaged: {e}: the checkpoint before it is next")
    if whole or others:
        raise UsageError(f"{root} holds damaged checkpoints alone: move them away to start afresh")
    return None


def _position(args, folder, meta):
    """Where training goes on from a checkpoint."""
    if meta is None:
        if (epoch := _epoch_of(folder)) is None:
            raise UsageError(
                f"{folder} has no {folders.META} and no epoch for a name: give --last-epoch-of-checkpoint None"
            )
        logger.warn(
            f"{folder} has no {folders.META}: it lacks checksums, the state of the loader and the best result; "
            f"training continues with epoch {epoch + 1}, with its learning rate and the image order of a first epoch"
        )
        return {"folder": str(folder), "epoch": epoch + 1}
    epoch, step = (meta["epoch"] + 1, 0) if meta["step"] is None else (meta["epoch"], meta["step"])
    return {"folder": str(folder), "epoch": epoch, "step": step, "meta": meta}


def _verified(folder, flag):
    """The meta.json of a checkpoint that was asked for by name; None if it comes from a program that writes none."""
    if not (folder / folders.META).exists():
        return None
    try:
        return folders.verify(folder)
    except folders.DamagedError as e:
        raise UsageError(f"{flag}: {folder} is damaged: {e}: name another checkpoint") from e


def _is_foreign(args, folder):
    """A checkpoint of NVIDIA's example, or of paddle.static.save: the two files and no meta.json."""
    names = {f"{args.model_prefix}.pdparams", f"{args.model_prefix}.pdopt"}
    return folders.META not in (found := {p.name for p in folder.iterdir()}) and names <= found


def compare_classes(found, loader):
    """Warn if the classes of a checkpoint and of the data set differ: label n would mean something else."""
    before, now = list(((found and found.meta) or {}).get("classes", [])), list(loader.classes)
    if before and now and before != now:
        i = next(i for i in range(max(len(before), len(now))) if before[i : i + 1] != now[i : i + 1])
        logger.warn(
            f"{found.folder} was trained on other classes: label {i} was {before[i : i + 1] or 'none'} and is "
            f"{now[i : i + 1] or 'none'}"
        )


def restore(args, found, lr_scheduler, loader, fetchs, place):
    """Restore what a training run has beside its variables: position, learning rate, seeds; and in the middle of an
    epoch its running sums and this process's own BN statistics.

    Args:
        args: flags.
        found: result of find; its step becomes 0 if the loader could not go on inside the epoch.
        lr_scheduler: fresh; it is advanced step by step, so that its floating-point numbers are those of a run that was
            never interrupted, and the schedule is that of the flags of this run.
        loader: training loader, built with found.loader_state.
        fetchs: result of program.build.
        place: where the program runs.
    """
    if found.step and not found.trained and loader.step != found.step:
        found.step = 0
        logger.warn(f"epoch {found.epoch} starts again at its beginning, with the parameters of {found.folder}")
    for _ in range(found.epoch * len(loader) + (len(loader) if found.trained else found.step)):
        lr_scheduler.step()
    if found.goes_on:
        _tell_schedule_changes(args, found.meta)
        random.setstate(_tuples(json.loads(found.meta["seeds"]["python"])))
        np.random.set_state(_tuples(json.loads(found.meta["seeds"]["numpy"])))
    if found.step and not found.trained:
        for name, state in found.meta["ranks"][processes.rank()]["meters"].items():
            fetchs[name][1].restore(state)
        bn_file = Path(found.folder) / f"bn_rank{processes.rank()}.npz"
        if bn_file.is_file():
            with np.load(bn_file) as arrays:
                for name in arrays.files:
                    variables.set_variable(name, arrays[name], place)
    where = f"epoch {found.epoch}" + (f" step {found.step}" if found.step else "")
    logger.info(f"loaded {found.folder}: goes on with {where}")


def _params_file(args, folder):
    return folder / f"{args.model_prefix}.pdparams"


def _epoch_of(folder):
    """The epoch of a checkpoint folder: meta.json's, else its name."""
    try:
        return folders.read_meta(folder)["epoch"]
    except folders.DamagedError:
        at = folders.position(folder.resolve().name)
        return at[0] if at and at[1] is None else None


def _tell_schedule_changes(args, meta):
    before = {config.flag(name): meta["arguments"].get(name) for name in _SCHEDULE_FLAGS}
    now = {config.flag(name): getattr(args, name) for name in _SCHEDULE_FLAGS}
    before["number of processes"], now["number of processes"] = meta["world_size"], processes.world_size()
    changes = [f"{name} {now[name]} (was {before[name]})" for name in now if now[name] != before[name]]
    if changes:
        logger.info(f"the learning rate goes on by the schedule of {', '.join(changes)}")


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
