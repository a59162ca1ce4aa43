"""Options of `python -m paddle_resnet.dataset import` that describe the source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of an import.

    Attributes:
        allow_partial: whether missing images trigger a warning instead of an error.
        val: fraction of each class that goes to val/ if the source has no validation images, or None.
        image_column, label_column, split_column: names of the columns in a table, or None to detect them.
        delimiter: text between the columns of a table, or None to detect it.
    """

    allow_partial: bool = False
    val: float | None = None
    image_column: str | None = None
    label_column: str | None = None
    split_column: str | None = None
    delimiter: str | None = None
