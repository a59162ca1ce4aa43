"""The options of `python -m paddle_resnet.dataset import`."""

from dataclasses import dataclass

DEFAULT_VAL = 0.2  # fraction of each class that goes to val/ if a source other than ImageNet has no validation images


@dataclass(frozen=True)
class Options:
    """Options of an import.

    Attributes:
        allow_partial: whether missing images trigger a warning instead of an error.
        val: fraction of each class that goes to val/ if the source has no validation images. If `val` is None, the
            fraction is DEFAULT_VAL, and ImageNet is not divided.
        image_column, label_column, split_column: names of columns in a table or Parquet file (the split: only in a
            table, also of pixels) or of features in a TFRecord, or None to detect them. For CIFAR-100, label_column is
            "coarse_labels" or "fine_labels" (default). For tar shards, label_column is a key of the objects in
            KEY.json, or one of the extensions "cls" and "txt".
        delimiter: text between the columns of a table, or None to detect it.
        label_index: index of the label to use if records have several labels, or None.
        class_depth: number of nested folders that form a class, counted from the split or, if negative, from the image;
            0 for all folders; None to detect it.
    """

    allow_partial: bool = False
    val: float | None = None
    image_column: str | None = None
    label_column: str | None = None
    split_column: str | None = None
    delimiter: str | None = None
    label_index: int | None = None
    class_depth: int | None = None

    @property
    def columns(self) -> dict[str, str]:
        """{flag: name of a column} for the flags of columns that are set."""
        flags = {f"--{part}-column": getattr(self, f"{part}_column") for part in ("image", "label", "split")}
        return {flag: name for flag, name in flags.items() if name is not None}
