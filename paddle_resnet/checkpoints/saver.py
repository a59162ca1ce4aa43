"""Save checkpoints as OUTPUT_DIR/ARCH/EPOCH/ or, within an epoch, as OUTPUT_DIR/ARCH/EPOCH_STEP/. The links `latest`
and `best` point to the newest checkpoint and to the checkpoint with the best evaluation.

PREFIX.pdparams contains the parameters and BN statistics; PREFIX.pdopt contains the optimizer state, the learning rate,
the loss scale and float32 master weights. With --ema, PREFIX.pdema has the format of PREFIX.pdparams, but contains the
EMA of each weight instead of its current value. variables.py reads the files with the prefix PREFIX. meta.json contains
the position of the run and the state of each process's loader. Within an epoch, each process has its own BN statistics.
bn_rankN.npz contains the BN statistics of rank N > 0. folders.py writes and deletes the folders.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
import random
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_resnet.checkpoints import contents, folders, replicas, run_folders, run_lock, variables
from paddle_resnet.components import sparsity, task
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.machine import cpu
from paddle_resnet.models import ends
from paddle_resnet.passes import all_reduces
from paddle_resnet.settings import durations
from paddle_resnet.step import facts
from paddle_resnet.utils import logger, signals
from paddle_resnet.utils.errors import RunError, UsageError, counted
from paddle_resnet.utils.meters import main_metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddle import static

    from paddle_resnet.checkpoints.start import StartCheckpoint
    from paddle_resnet.data.iterators import TrainingLoader
    from paddle_resnet.optimizers.schedules import Schedule
    from paddle_resnet.settings import values
    from paddle_resnet.utils.meters import AverageMeter


def check_folder(
    folder: Path, checkpoint: StartCheckpoint | None, starts: dict[str, str], overwrite: bool, resume: bool
) -> None:
    """Check that the folder for the checkpoints of a run can be created and written, and does not contain checkpoints
    of another run. This function does not create the folder.

    Args:
        folder: result of run_folders.run_folder.
        checkpoint: the checkpoint that the run starts from, or None.
        starts: result of Settings.input_folders.
        overwrite, resume: values of the flags.
    Raises:
        UsageError: the folder cannot be created or written, another run is writing to it, or _check_no_other_run fails.
    """
    # Only rank 0 writes to the folder. The other ranks must not read it now, because rank 0 may already create it.
    exchange.from_rank_0(lambda: _check_folder(folder, checkpoint, starts, overwrite, resume))


def _check_folder(folder, checkpoint, starts, overwrite, resume):
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, f"{existing} is not a writable folder")
        if run_folders.finished(folder):
            with run_lock.hold(folder):  # hold() fails if another run is still writing to the folder
                _check_no_other_run(folder, checkpoint, starts, overwrite, resume)
    except OSError as e:
        raise folders.unwritable(folder, e) from e


def _check_no_other_run(folder, checkpoint, starts, overwrite, resume):
    """Check that the run folder contains no checkpoints, unless the run continues from the newest checkpoint or deletes
    all checkpoints (--overwrite). For the arguments, see check_folder.

    Raises:
        UsageError: the folder contains checkpoints of another run, or newer checkpoints than the one to resume from; or
            --overwrite would delete a checkpoint from which the run starts.
    """
    names = [path.name for path in run_folders.finished(folder)]
    within = [f"{flag} {start}" for flag, start in starts.items() if _is_within(start, folder)]
    if overwrite and within:
        raise UsageError(f"--overwrite: would delete {within[0]}, which the run needs; choose a different --output-dir")
    if names and not overwrite and not resume and not (checkpoint and checkpoint.continues(folder)):
        is_foreign = all(map(contents.is_foreign, run_folders.finished(folder)))
        start = f"--from-checkpoint {folder} --last-epoch-of-checkpoint auto" if is_foreign else "--resume"
        raise UsageError(
            f"{folder}: contains checkpoints of {'another program' if is_foreign else 'an earlier run'} "
            f"({', '.join(names[:3])}{', ...' * (len(names) > 3)}); continue from the newest with {start}, or choose a "
            "different --output-dir" + ("" if within or is_foreign else ", or replace them with --overwrite")
        )
    if resume and (newer := _newer(folder, checkpoint)):
        raise UsageError(f"--resume: {newer} was saved by another run while this run started; repeat the command")


def _newer(root, checkpoint):
    """Return the newest valid checkpoint below the folder `root` if it is newer than `checkpoint`, otherwise None.
    Damaged checkpoints are ignored, because --resume skips them."""
    for folder, _ in run_folders.newest_first(root)[0]:
        if checkpoint and Path(checkpoint.folder).resolve() == folder.resolve():
            return None
        with contextlib.suppress(contents.DamagedError):
            contents.verify(folder)
            return folder
    return None


def _is_within(path, folder):
    path = Path(path).resolve()
    return folder.resolve() in [path, *path.parents]


def best_before(root: str | Path, checkpoint: StartCheckpoint) -> dict[str, Any] | None:
    """Return the metrics and the position of the best evaluation up to `checkpoint`. If several evaluations are equally
    good, return the earliest. Only checkpoints that led to `checkpoint` count: a checkpoint that was written before
    `checkpoint` but at a later step belongs to an abandoned branch of training. Return None if no checkpoint that led
    to `checkpoint` has an evaluation."""
    best, reached = None, (checkpoint.epoch, checkpoint.step)
    for _, meta in run_folders.newest_first(root)[0]:
        at = (meta["epoch"] + 1, 0) if meta["step"] is None else (meta["epoch"], meta["step"])
        if meta["run"] != checkpoint.meta["run"] or at > reached:
            continue
        reached = at
        evaluated = meta["evaluated"]
        if evaluated and (best is None or evaluated[main_metric(evaluated)] >= best[main_metric(best)]):
            best = _result_at(meta["epoch"], meta["step"], meta["evaluated"])
    return best


def _result_at(epoch, step, evaluated):
    """Add the position of an evaluation to its metrics; `step` is None at the end of an epoch."""
    return {"epoch": epoch, **({} if step is None else {"step": step}), **evaluated}


def _name(epoch, step):
    return str(epoch) if step is None else f"{epoch}_{step}"


def _name_of(best):
    return _name(best["epoch"], best.get("step"))


class Saver:
    """Writes the checkpoints of a training run in the background.

    Training waits only until the state is copied to host memory and the previous checkpoint is written.

    Args:
        args: Settings, which are saved in every checkpoint.
        program: the training Program (not the compiled one); its variables are in the global scope.
        lr_scheduler: learning-rate scheduler whose state is saved.
        loader: training loader.
        fetchs: result of program.build; its meters accumulate the metrics of an epoch.
        checkpoint: the checkpoint that the run started from, or None.
    Raises:
        UsageError: see check_folder.
    """

    def __init__(
        self,
        args: values.Settings,
        program: static.Program,
        lr_scheduler: Schedule,
        loader: TrainingLoader,
        fetchs: dict[str, tuple[static.Variable, AverageMeter]],
        checkpoint: StartCheckpoint | None = None,
    ):
        self._lock = None
        self._args, self._program, self._lr_scheduler = args, program, lr_scheduler
        self._loader, self._fetchs = loader, fetchs
        self._root = run_folders.run_folder(args.output_dir, args.model_arch_name)
        self._run = checkpoint.meta["run"] if checkpoint and checkpoint.resumes else uuid.uuid4().hex
        self._last = (checkpoint.epoch, checkpoint.step) if checkpoint else (0, 0)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending = None
        self.best = exchange.from_rank_0(lambda: self._prepare(checkpoint))
        self._evaluations_since_best = checkpoint.evaluations_since_best if checkpoint else 0
        self._task = args.part(task.Settings).task(args.num_of_class)
        self._of_evaluation = self._task.meta(None)
        self.folder = checkpoint and checkpoint.folder

    def _prepare(self, checkpoint):
        """Create the checkpoint folder, lock it, and remove the unfinished files of a killed run. With --overwrite,
        also remove all checkpoints. Returns the best evaluation so far if the run resumes, otherwise None.

        Raises:
            UsageError: the folder cannot be written, another run uses it, or another run has saved checkpoints in it
                that this run would overwrite.
        """
        folder, args = self._root, self._args
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            self._lock = run_lock.hold(folder)
            folders.clean(folder)
            # Check again, because another run may have saved checkpoints since check_folder.
            _check_no_other_run(folder, checkpoint, args.input_folders(), args.overwrite, args.resume)
            if args.overwrite:
                folders.remove_all(folder)
            return best_before(folder, checkpoint) if checkpoint and checkpoint.resumes else None
        except OSError as e:
            raise folders.unwritable(folder, e) from e

    def follow(
        self,
        loader: TrainingLoader,
        fetchs: dict[str, tuple[static.Variable, AverageMeter]],
        program: static.Program,
    ) -> None:
        """Replace the loader, the meters and the program whose state is saved."""
        self._loader, self._fetchs, self._program = loader, fetchs, program

    def record(self, stop: durations.Stop, result: dict[str, Any]) -> bool:
        """Update the best evaluation and the count for --patience. Every process must call record().

        Args:
            stop: the stop at which the network was evaluated.
            result: result of program.run.
        Returns:
            whether this is the best evaluation so far. If several evaluations are equally good, the earliest is the
            best.
        """
        name = main_metric(result)
        is_best = self.best is None or result[name] > self.best[name]
        self._of_evaluation = self._task.meta(result)
        self._evaluations_since_best = 0 if is_best else self._evaluations_since_best + 1
        if is_best:
            numbers = {name: value for name, value in result.items() if not isinstance(value, np.ndarray)}
            self.best = _result_at(stop.epoch, stop.place().get("step"), numbers)
        return is_best

    def save_if_due(
        self, stop: durations.Stop, trained: dict[str, Any] | None, evaluated: dict[str, Any] | None
    ) -> None:
        """Save a checkpoint at a stop if --save-interval requires a checkpoint, if the evaluation at the stop is the
        best so far, or if --patience ends the run. For exceptions, see save()."""
        step = stop.place().get("step")
        is_best = self.best is not None and _name_of(self.best) == _name(stop.epoch, step)
        if stop.saves or is_best or self.ends_early:
            trained = trained if stop.ends_epoch else None
            self.save(stop.epoch, step, trained, evaluated, is_averaged=stop.averages_bn)

    @property
    def ends_early(self) -> bool:
        """Whether --patience ends the run."""
        return 0 < self._args.patience <= self._evaluations_since_best

    @property
    def best_folder(self) -> Path:
        """The folder of the checkpoint with the best evaluation. The run must have evaluated the network."""
        return self._root / _name_of(self.best)

    def save(
        self,
        epoch: int,
        step: int | None = None,
        trained: dict[str, Any] | None = None,
        evaluated: dict[str, Any] | None = None,
        is_averaged: bool = False,
    ) -> None:
        """Save the state between two steps. Every process must call save(). If no step has run since the last
        checkpoint and `evaluated` is None, nothing is saved.

        Args:
            epoch: current epoch.
            step: completed steps of the epoch, or None if all steps and the evaluation are complete. With
                --accumulate-steps, every batch counts as a step.
            trained: training metrics up to this step if an evaluation is pending or all steps are complete, otherwise
                None.
            evaluated: result of the evaluation, or None.
            is_averaged: whether the processes have averaged their BN statistics since the last step.
        Raises:
            RunError: the previous checkpoint could not be written, or the state differs between the ranks.
        """
        at = (epoch + 1, 0) if step is None else (epoch, step)
        if at == self._last and evaluated is None:
            return  # no step has run since the last checkpoint or since this run started
        self._last = at
        watchdog.phase(f"checkpoint of epoch {epoch}")
        self.finish()
        where = f"at the end of epoch {epoch}" if step is None else f"before step {step} of epoch {epoch}"
        replicas.check(self._program, where)
        in_epoch = step is not None and trained is None
        arrays = self._bn_statistics() if in_epoch and processes.rank() > 0 else {}
        rank_state = {"loader": self._loader.state(), "meters": self._meters()}
        ranks = exchange.gather(_pack(rank_state, arrays))
        if processes.rank() != 0:
            return
        ranks = [_unpack(data) for data in ranks]
        params, optimizer = variables.snapshot(self._program)
        files = {
            f"{self._args.model_prefix}.pdparams": pickled(params),
            f"{self._args.model_prefix}.pdopt": pickled(optimizer),
        }
        own_files = variables.own_files(self._program, params)
        files |= {f"{self._args.model_prefix}{suffix}": pickled(state) for suffix, state in own_files.items()}
        files |= {f"bn_rank{r}.npz": _bytes(arrays) for r, (_, arrays) in enumerate(ranks) if arrays}
        meta = {
            "run": self._run,
            "paddle_version": paddle.__version__,
            "cpu": cpu.arithmetic(),
            "epoch": epoch,
            "step": step,
            "steps_each_epoch": durations.used_batches(len(self._loader), self._args.accumulate_steps),
            "world_size": processes.world_size(),
            "classes": list(self._loader.classes),
            "class_names": list(self._loader.class_names),
            "arguments": self._args.as_dict(),
            "network_sha256": ends(self._program).file_sha256,
            "trained": trained,
            "evaluated": evaluated,
            "bn_averaged": is_averaged,
            "best": self.best,
            "evaluations_since_best": self._evaluations_since_best,
            "lr_scheduler": self._lr_scheduler.state_dict(),
            "seeds": {"paddle": self._args.seed, "python": _python_state(), "numpy": _numpy_state()},
            "ranks": [state for state, _ in ranks],
        }
        if (teacher := facts.of(self._program).teacher) is not None:
            meta["teacher"] = teacher.record()
        if self._args.asp:
            meta["asp"] = sparsity.counts(self._program)
        meta |= self._task.meta(None) if evaluated is None else self._of_evaluation
        name = _name(epoch, step)
        self.folder = self._root / name
        self._pending = self._writer.submit(self._write, name, files, meta, [params, optimizer, *own_files.values()])

    def save_on_error(self, error: BaseException, epoch: int, step: int | None, trained: dict[str, Any] | None) -> None:
        """Save the state after an error if a resumed run can continue from this state: if a stop was requested, or if
        an evaluation failed in a single-process run. In a multi-process run, nothing is saved after a failed
        evaluation, because the other processes may be dead or in a different phase.

        Args:
            error: the exception that ends the run.
            epoch: current epoch.
            step: number of completed steps of the epoch; ignored if `trained` is None.
            trained: training metrics up to that step, or None if the error occurred in training.
        Raises:
            Preempted: a stop was requested, and the state is saved; the message states how to continue.
            RunError: a stop was requested, but the state cannot be saved.
        """
        is_stop = isinstance(error, signals.Preempted)
        if not is_stop and (trained is None or processes.world_size() > 1):
            return
        try:
            self.save(epoch, self._loader.step if trained is None else step, trained)
            self.finish()
        except Exception as e:
            if is_stop:
                raise
            logger.warn(f"epoch {epoch}: trained, but not saved: {' '.join(str(e).split())}")
            return
        if is_stop:
            raise signals.Preempted("; continue with the same command and --resume") from None
        logger.info(f"epoch {epoch}: trained and saved, but not evaluated; repeat the command with --resume")

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Only rank 0 writes checkpoints.

        Raises:
            RunError: the checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, name, files, meta, states):
        _check_finite(self._root / name, states)
        try:
            self._lock = run_lock.keep(self._root, self._lock)
            valid, _ = run_folders.newest_first(self._root)
            meta["sequence"] = valid[0][1]["sequence"] + 1 if valid else 0
            folder = folders.commit(self._root, name, files, meta, self._args.checkpoint_commit)
        except BlockingIOError as e:
            raise RunError(
                f"{self._root / name}: checkpoint not written, because {self._root}/.lock was deleted and another run "
                f"({e.strerror}) has locked the folder; restart with a different --output-dir"
            ) from e
        except OSError as e:
            if not self._root.is_dir():
                raise RunError(
                    f"{self._root}: was deleted during the run; start the run again, and keep the folder"
                ) from e
            raise RunError(
                f"{self._root / name}: checkpoint cannot be written ({e.strerror}); checkpoints in other folders "
                "are unchanged; free disk space, or choose a different --output-dir"
            ) from e
        logger.info(f"checkpoint: {folder}")
        self._mark_and_delete(name, meta["best"] and _name_of(meta["best"]))

    def _mark_and_delete(self, newest, best):
        """Set the links `latest` and `best`, and delete old checkpoints of this run. Keep the best checkpoint, the
        newest N checkpoints, and the newest N checkpoints at the end of an epoch, where N is --keep-checkpoints.
        Checkpoints of other runs are not deleted."""
        self._mark("latest", newest)
        if best is not None:
            self._mark("best", best)
        own = [(folder, meta) for folder, meta in run_folders.newest_first(self._root)[0] if meta["run"] == self._run]
        of_epochs = [(folder, meta) for folder, meta in own if meta["step"] is None]
        count = self._args.keep_checkpoints
        kept = {folder.name for folder, _ in own[:count] + of_epochs[:count]} | {best}
        for folder, _ in own:
            if folder.name not in kept:
                folders.delete(folder)

    def _mark(self, marker, name):
        """Set the link `latest` or `best`. If the link cannot be set, log only a warning, because --resume does not use
        the links."""
        try:
            folders.mark(self._root, marker, name)
        except OSError as e:
            remedy = "remove the existing file" if e.errno == errno.EEXIST else f"use {self._root / name} instead"
            logger.warn(f"{self._root / marker}: cannot be linked to {name} ({e.strerror}); {remedy}")

    def _meters(self):
        return {name: meter.state() for name, (_, meter) in self._fetchs.items()}

    def _bn_statistics(self):
        return {name: variables.read(name) for name in all_reduces.own_statistics(self._program)}


def _check_finite(folder, states):
    bad = [name for state in states for name, array in state.items() if not np.isfinite(array).all()]
    if bad:
        raise RunError(
            f"{folder}: checkpoint not written, because of non-finite values in {counted(len(bad), 'array')} "
            f"({', '.join(bad[:3])}{', ...' * (len(bad) > 3)}); resume from an earlier checkpoint or start a new run, "
            "with a lower --lr"
        )


def _pack(state, arrays):
    """Serialize the state and the arrays of one process."""
    header = json.dumps(state).encode()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return len(header).to_bytes(8, "little") + header + (buffer.getvalue() if arrays else b"")


def _unpack(data):
    size = int.from_bytes(data[:8], "little")
    body = data[8 + size :]
    return json.loads(data[8 : 8 + size]), body


def pickled(state: Mapping[str, np.ndarray]) -> Callable[[contents.Writable], None]:
    """Return a function that writes the pickle of a state to a binary file."""
    return lambda file: pickle.dump(state, file, protocol=4)


def _bytes(data):
    return lambda file: file.write(data)


def _python_state():
    return json.dumps(random.getstate())


def _numpy_state():
    name, keys, *rest = np.random.get_state()
    return json.dumps([name, keys.tolist(), *rest])
