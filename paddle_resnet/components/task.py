"""The task: one class per image, or any number of classes (--multi-label, docs/multilabel.md)."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.settings.values import listed
from paddle_resnet.tasks import MultiLabel, SingleLabel, Task
from paddle_resnet.utils import numbers

EXAMPLE = "4,0,0.05"


@dataclass(frozen=True)
class Settings:
    multi_label: bool = flag(
        False,
        "train images that can have several classes or none, with one binary cross entropy per class; "
        "docs/multilabel.md describes the data",
        topic="data",
        kind="network",
    )
    asymmetric_loss: list[float] | None = flag(
        None,
        "parameters of the asymmetric loss of --multi-label: focusing of the classes that an image does not have, "
        f"focusing of those that it has, and margin, such as {EXAMPLE} (default: binary cross entropy)",
        topic="regularize",
        parse=numbers.or_none(numbers.list_of(numbers.not_negative_number)),
        metavar="NEGATIVE,POSITIVE,MARGIN",
        used_by=("multi_label", (True,)),
    )

    def task(self, num_classes: int) -> Task:
        """Return the task of a network with `num_classes` outputs."""
        return MultiLabel(num_classes, self.asymmetric_loss) if self.multi_label else SingleLabel(num_classes)


def conflicts(settings: Settings) -> Iterator[Conflict]:
    values = settings.asymmetric_loss
    if values is None:
        return
    problem = None
    if len(values) != 3:
        problem = "expected three numbers"
    elif any(0 < focusing < 1 for focusing in values[:2]):
        problem = "a focusing parameter must be 0 or at least 1"  # the gradient of p**f is infinite at p = 0
    elif max(values[:2]) > 100 or values[2] >= 1:
        problem = "the focusing parameters must not exceed 100, and the margin must be below 1"
    if problem:
        yield Conflict(f"--asymmetric-loss {listed(values)}: {problem}; use values such as {EXAMPLE}")
