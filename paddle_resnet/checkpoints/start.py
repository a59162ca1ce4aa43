"""The checkpoint that a run starts from, which restore.py finds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_resnet.checkpoints import run_folders
from paddle_resnet.job import processes


@dataclass(frozen=True)
class StartCheckpoint:
    """The checkpoint that a run starts from.

    Attributes:
        folder: path of the checkpoint.
        epoch: epoch in which training continues.
        step: number of completed steps in `epoch`. With --accumulate-steps, every batch counts as a step.
        meta: content of meta.json, or None for a checkpoint of another program, which has no meta.json.
        resumes: whether this run continues the run that wrote the checkpoint, possibly from the beginning of the epoch.
            If `resumes` is False, this run restores only the variables, and begins with `epoch`.
        label: name of the checkpoint in messages: the flag that selected the checkpoint, and the folder.
    """

    folder: str
    epoch: int
    step: int = 0
    meta: dict[str, Any] | None = None
    resumes: bool = False
    label: str = ""

    def continues(self, root: str | Path) -> bool:
        """Return whether this run continues from the newest checkpoint below the folder `root`. A run that continues
        from an older checkpoint would overwrite the newer checkpoints."""
        newest = run_folders.newest(root)
        return self.epoch + self.step > 0 and newest is not None and Path(self.folder).resolve() == newest.resolve()

    @property
    def loader_state(self) -> dict[str, Any] | None:
        """The state of this process's loader, or None if `resumes` is False."""
        if not self.resumes:
            return None
        return self.rank_state["loader"]

    @property
    def rank_state(self) -> dict[str, Any]:
        """The recorded state of this process or, if fewer processes wrote the checkpoint, of the last process."""
        ranks = self.meta["ranks"]
        return ranks[min(processes.rank(), len(ranks) - 1)]

    @property
    def trained(self) -> dict[str, Any] | None:
        """Training metrics up to the step of the checkpoint if the evaluation at this step is pending, otherwise
        None."""
        return self.meta["trained"] if self.step else None

    @property
    def is_inside(self) -> bool:
        """Whether the run continues within an epoch."""
        return bool(self.step) and self.step < self.meta["steps_each_epoch"]

    @property
    def evaluations_since_best(self) -> int:
        """The number of evaluations after the best evaluation of the resumed run; 0 if `resumes` is False."""
        return self.meta.get("evaluations_since_best", 0) if self.resumes else 0

    def ended_early(self, patience: int) -> bool:
        """Return whether --patience has ended the run."""
        return 0 < patience <= self.evaluations_since_best

    def is_done(self, iter_unit: str, epochs: int, num_iter: int | None, patience: int) -> bool:
        """Return whether a run with these flags has completed all its steps, or --patience has ended it."""
        if self.ended_early(patience):
            return True
        if iter_unit == "epoch":
            return self.epoch >= epochs
        return self.meta["lr_scheduler"]["last_epoch"] >= num_iter and self.trained is None
