"""What a run saves: OUTPUT_DIR/ARCH/EPOCH/, and EPOCH_STEP/ inside an epoch. `latest` and `best` link to one of them.

PREFIX.pdparams holds the parameters and the BN statistics. PREFIX.pdopt holds momentum, learning rate, loss scaling
and float32 master weights. variables.py reads both. meta.json holds the position of the run and the state of every
process's loader. Inside an epoch each process has its own BN statistics: bn_rankN.npz holds those of rank N > 0.
folders.py writes, verifies and deletes the folders.
"""

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

import numpy as np
import paddle

import config
from paddle_resnet.checkpoints import folders, variables
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.passes import all_reduces
from utils import logger, signals
from utils.errors import RunError, UsageError


def check_folder(args, found):
    """Check that the output folder of a run that saves can be made and written, and holds no other run. This does not
    make it.

    Args:
        args: flags.
        found: the checkpoint that the run starts from (restore.Found), or None.
    Raises:
        UsageError: it cannot, or it does.
    """
    if args.benchmark or not args.run_scope.trains:
        return
    folder = folders.run_folder(args)
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, f"{existing} is not a writable folder")
    except OSError as e:
        raise folders.unwritable(args, e) from e
    exchange.from_rank_0(lambda: _check_content(args, found))


def _check_content(args, found):
    try:
        if folders.finished(folders.run_folder(args)):
            with folders.hold(args):  # a run that still writes there is not an earlier one
                _refuse_other_runs(args, found)
    except OSError as e:
        raise folders.unwritable(args, e) from e


def _refuse_other_runs(args, found):
    """Refuse a folder with checkpoints, unless the run continues one of them, or --overwrite deletes them.

    Raises:
        UsageError: names what is there.
    """
    folder = folders.run_folder(args)
    names = [path.name for path in folders.finished(folder)]
    starts = {config.flag(name): getattr(args, name) for name in ("from_checkpoint", "from_pretrained_params")}
    within = [f"{flag} {start}" for flag, start in starts.items() if start is not None and _is_within(start, folder)]
    if args.overwrite and within:
        raise UsageError(f"--overwrite would delete {within[0]}, which the run starts from: name another --output-dir")
    if names and not args.overwrite and not args.resume and not (found and found.continues(folder)):
        is_foreign = all(map(folders.is_foreign, folders.finished(folder)))
        resume = f"--from-checkpoint {folder} --last-epoch-of-checkpoint auto" if is_foreign else "--resume"
        raise UsageError(
            f"{folder} holds checkpoints of {'another program' if is_foreign else 'an earlier run'} "
            f"({', '.join(names[:3])}{', ...' * (len(names) > 3)}): continue the newest with {resume}, or choose a "
            "different --output-dir" + ("" if within or is_foreign else ", or replace them with --overwrite")
        )


def _is_within(path, folder):
    path = Path(path).resolve()
    return folder.resolve() in [path, *path.parents]


def best_before(root, found):
    """The best evaluation of the checkpoints below ROOT that led to the one that a run continues, with its epoch; of
    several equal ones the earliest. Checkpoints that are later in training but were written before are those of an
    abandoned branch."""
    best, reached = None, (found.epoch, found.step)
    for _, meta in folders.newest_first(root)[0]:
        at = (meta["epoch"] + 1, 0) if meta["step"] is None else (meta["epoch"], meta["step"])
        if meta["run"] != found.meta["run"] or at > reached:
            continue
        reached = at
        if meta["evaluated"] and (best is None or meta["evaluated"]["top1"] >= best["top1"]):
            best = {"epoch": meta["epoch"], **meta["evaluated"]}
    return best


class Saver:
    """Writes the checkpoints of a training run in the background.

    A step waits only for the copy to host memory, and for the previous checkpoint if it is still being written.

    Args:
        args: flags.
        program: the training Program (not the compiled one); its variables are in the global scope.
        lr_scheduler: its state is saved.
        loader: training loader.
        fetchs: result of program.build; its meters hold the running sums of an epoch.
        found: the checkpoint that the run started from, or None.
    Raises:
        UsageError: the output folder cannot be made or written, or another run writes to it.
    """

    def __init__(self, args, program, lr_scheduler, loader, fetchs, found=None):
        self._lock = None
        self._args, self._program, self._lr_scheduler = args, program, lr_scheduler
        self._loader, self._fetchs = loader, fetchs
        self._root = folders.run_folder(args)
        self._run = found.meta["run"] if found and found.goes_on else uuid.uuid4().hex
        self._last = (found.epoch, found.step) if found else (0, 0)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending = None
        self.best = exchange.from_rank_0(lambda: self._prepare(args, found))
        self.folder = found and found.folder

    def _prepare(self, args, found):
        """Make the checkpoint folder, lock it against other runs, and remove what a killed run left there, and with
        --overwrite what any run did. Returns the best result so far."""
        folder = folders.run_folder(args)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            self._lock = folders.hold(args)
            folders.clean(folder)
            _refuse_other_runs(args, found)  # again: since the first check, a run may have ended here
            if args.overwrite:
                folders.remove_all(folder)
            return best_before(folder, found) if found and found.goes_on else None
        except OSError as e:
            raise folders.unwritable(args, e) from e

    def save(self, epoch, step=None, trained=None, evaluated=None):
        """Save the state between two steps. Every process must call this.

        Args:
            epoch: the epoch.
            step: steps done in it; None: all of them, and the evaluation.
            trained: result of the epoch's training, once that is complete.
            evaluated: result of its evaluation, if there was one.
        Raises:
            RunError: the previous checkpoint could not be written.
        """
        at = (epoch + 1, 0) if step is None else (epoch, step)
        if at == self._last:
            return  # a stop right after a checkpoint, or before the first step of a resumed run
        self._last = at
        watchdog.phase(f"the checkpoint of epoch {epoch}")
        self.finish()
        in_epoch = step is not None and trained is None
        arrays = self._bn_statistics() if in_epoch and processes.rank() > 0 else {}
        rank_state = {"loader": self._loader.state(), "meters": self._meters()}
        ranks = exchange.gather(_pack(rank_state, arrays))
        if evaluated and (self.best is None or evaluated["top1"] > self.best["top1"]):
            self.best = {"epoch": epoch, **evaluated}
        if processes.rank() != 0:
            return
        ranks = [_unpack(data) for data in ranks]
        params, optimizer = variables.snapshot(self._program)
        files = {
            f"{self._args.model_prefix}.pdparams": _pickled(params),
            f"{self._args.model_prefix}.pdopt": _pickled(optimizer),
        }
        files |= {f"bn_rank{r}.npz": _bytes(arrays) for r, (_, arrays) in enumerate(ranks) if arrays}
        meta = {
            "run": self._run,
            "paddle_version": paddle.__version__,
            "epoch": epoch,
            "step": step,
            "steps_each_epoch": len(self._loader),
            "world_size": processes.world_size(),
            "classes": list(self._loader.classes),
            "class_names": list(self._loader.class_names),
            "arguments": config.as_dict(self._args),
            "trained": trained,
            "evaluated": evaluated,
            "best": self.best,
            "lr_scheduler": self._lr_scheduler.state_dict(),
            "seeds": {"paddle": self._args.seed, "python": _python_state(), "numpy": _numpy_state()},
            "ranks": [state for state, _ in ranks],
        }
        name = str(epoch) if step is None else f"{epoch}_{step}"
        self.folder = self._root / name
        self._pending = self._writer.submit(self._write, name, files, meta, [params, optimizer])

    def rescue(self, error, epoch, trained):
        """Save an epoch that an error ended, if a resumed run can continue it: after a request to stop, and, in a job
        of one process, after a failed evaluation. In a larger job the other processes may be elsewhere or gone.

        Args:
            error: the error.
            epoch: the epoch.
            trained: result of its training, once that is complete.
        Raises:
            Preempted: in place of the one given, with the way to continue.
        """
        is_stop = isinstance(error, signals.Preempted)
        if not is_stop and (trained is None or processes.world_size() > 1):
            return
        try:
            self.save(epoch, self._loader.step if trained is None else len(self._loader), trained)
            self.finish()
        except Exception as e:
            if is_stop:
                raise
            logger.warn(f"epoch {epoch} is trained but could not be saved: {' '.join(str(e).split())}")
            return
        if is_stop:
            raise signals.Preempted("; the same command with --resume goes on") from None
        logger.info(f"epoch {epoch} is trained and saved: --resume goes on with its evaluation")

    def finish(self):
        """Wait until the last checkpoint is on the disk. Only rank 0 writes.

        Raises:
            RunError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, name, files, meta, states):
        _refuse_non_finite(self._root / name, states)
        try:
            self._lock = folders.keep(self._root, self._lock)
            whole, _ = folders.newest_first(self._root)
            meta["sequence"] = whole[0][1]["sequence"] + 1 if whole else 0
            folder = folders.commit(self._root, name, files, meta, self._args.checkpoint_commit)
        except BlockingIOError as e:
            raise RunError(
                f"checkpoint {self._root / name} is not written: {self._root}/.lock was deleted, and another run "
                f"({e.strerror}) has locked the folder since: start again with another --output-dir"
            ) from e
        except OSError as e:
            raise RunError(
                f"checkpoint {self._root / name} cannot be written ({e.strerror}): make room or name another "
                "--output-dir; the checkpoints before it are untouched"
            ) from e
        logger.info(f"checkpoint: {folder}")
        self._mark_and_delete(name, meta["best"] and str(meta["best"]["epoch"]))

    def _mark_and_delete(self, newest, best):
        """Set the links, and delete this run's checkpoints except the newest and the best. Checkpoints of other runs
        stay."""
        self._mark("latest", newest)
        if best is not None:
            self._mark("best", best)
        mine = [folder for folder, meta in folders.newest_first(self._root)[0] if meta["run"] == self._run]
        for folder in mine[self._args.keep_checkpoints :]:
            if folder.name != best:
                folders.delete(folder)

    def _mark(self, marker, name):
        """A failure is a warning: the links serve people and scripts, not this program."""
        try:
            folders.mark(self._root, marker, name)
        except OSError as e:
            logger.warn(f"{self._root / marker} cannot be linked to {name} ({e.strerror}): remove what is there")

    def _meters(self):
        return {name: meter.state() for name, (_, meter) in self._fetchs.items()}

    def _bn_statistics(self):
        return {name: variables.read(name) for name in all_reduces.bn_statistics(self._program)}


def _refuse_non_finite(folder, states):
    bad = [name for state in states for name, a in state.items() if a.dtype.kind == "f" and not np.isfinite(a).all()]
    if bad:
        raise RunError(
            f"checkpoint {folder} is not written: {len(bad)} of its arrays have values that are not finite "
            f"({', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''}): continue from the one before with a lower --lr"
        )


def _pack(state, arrays):
    """One process's share of a checkpoint, as bytes."""
    header = json.dumps(state).encode()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return len(header).to_bytes(8, "little") + header + (buffer.getvalue() if arrays else b"")


def _unpack(data):
    size = int.from_bytes(data[:8], "little")
    body = data[8 + size :]
    return json.loads(data[8 : 8 + size]), body


def _pickled(state):
    return lambda file: pickle.dump(state, file, protocol=4)


def _bytes(data):
    return lambda file: file.write(data)


def _python_state():
    return json.dumps(random.getstate())


def _numpy_state():
    name, keys, *rest = np.random.get_state()
    return json.dumps([name, keys.tolist(), *rest])
