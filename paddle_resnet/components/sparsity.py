"""2:4 sparsity (ASP)."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag


@dataclass(frozen=True)
class Settings:
    asp: bool = flag(
        False,
        "train with 2:4 sparsity",
        topic="precision",
    )
    prune_model: bool = flag(
        False,
        "prune the weights to 2:4 sparsity before training (with --asp)",
        topic="precision",
        depends_on=("asp",),
    )
    mask_algo: str = flag(
        "mask_1d",
        "algorithm that chooses the 2:4 masks",
        topic="precision",
        choices=["mask_1d", "mask_2d_greedy", "mask_2d_best"],
        depends_on=("asp",),
        used_by=("prune_model", (True,)),
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --prune-model is set without --asp."""
    if settings.prune_model and not settings.asp:
        yield Conflict("--prune-model: requires --asp; add it, or remove --prune-model", ("prune_model",), ("asp",))
