"""The two modes of a program, and the values of --run-scope."""

from enum import Enum


class Mode(Enum):
    """Training or evaluation. The value of a mode is the name of its split in a data set (train/, val.txt), and the
    prefix of its metrics in logs and reports (val.loss)."""

    TRAIN = "train"
    EVAL = "val"


class RunScope(Enum):
    """The values of --run-scope."""

    TRAIN_EVAL = "train_eval"
    TRAIN_ONLY = "train_only"
    EVAL_ONLY = "eval_only"

    @property
    def trains(self) -> bool:
        return self is not RunScope.EVAL_ONLY

    @property
    def evaluates(self) -> bool:
        return self is not RunScope.TRAIN_ONLY
