"""The data set."""

from dataclasses import dataclass

from paddle_resnet.data.formats import FORMATS
from paddle_resnet.settings.field import flag
from paddle_resnet.utils import files, numbers
from paddle_resnet.utils.errors import command


@dataclass(frozen=True)
class Settings:
    image_root: str = flag(
        "/imagenet",
        "folder of the data set, with train/ and val/; docs/data.md lists all formats",
        topic="data",
        kind="loader",
        parse=files.argument,
        metavar="IMAGE_ROOT",
    )
    data_format: str = flag(
        "auto",
        "storage format of the data set; auto: detect the format; synthetic: one random batch in device memory",
        topic="data",
        kind="loader",
        choices=["auto", *FORMATS, "synthetic"],
    )
    skip_list: str | None = flag(
        None,
        "file that lists images to skip, one per line: paths relative to IMAGE_ROOT or, in record files, FILE@OFFSET; "
        f"{command('dataset', 'verify')} can write it",
        topic="data",
        kind="loader",
        parse=files.argument,
        metavar="FILE",
    )
    allow_empty_classes: bool = flag(
        False,
        "accept empty class folders in train/, with a warning",
        topic="data",
        kind="loader",
    )
    allow_one_class: bool = flag(
        False,
        "accept training images of only one class, with a warning",
        topic="data",
        kind="loader",
    )
    allow_outside: bool = flag(
        False,
        "accept files outside IMAGE_ROOT in file lists and --skip-list",
        topic="data",
        kind="loader",
    )
    label_offset: int | str = flag(
        numbers.AUTO,
        "first label in file lists and records, which is subtracted from all labels; auto: in TFRecords, 1 if the "
        "labels are 1 to the number of classes; in file lists, the first number in label_list.txt; otherwise 0",
        topic="data",
        parse=numbers.label_offset,
        metavar="{auto,N}",
        before=0,
    )
    balanced_sampling: bool = flag(
        False,
        "draw training images from all classes with equal probability, with replacement; the length of an epoch "
        "does not change",
        topic="data",
        batches=True,
    )
