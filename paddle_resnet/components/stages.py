"""The stages of a training run. The first stage begins in epoch 0; further stages begin in the epochs of --sizes and
--unfreeze-at. A stage has its own settings, and therefore its own program and captured step. All stages train the same
variables.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_resnet.models import parts
from paddle_resnet.settings import durations
from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.settings.values import text
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError, counted

EXAMPLE = "128:0,160:20"
FORM = "SIZE:EPOCH[:BATCH[:FACTOR]],..."


def parse(text: str) -> list[str] | None:
    """Return the entries of --sizes as a list, or None for the text "None", which overrides a value in the
    configuration file. Raise ArgumentTypeError if an entry is invalid, or the epochs do not start at 0 and increase."""
    if text == "None":
        return None
    entries = [entry.strip() for entry in text.split(",")]
    epochs = [_parse_entry(entry)["first_epoch"] for entry in entries]
    if epochs[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        raise argparse.ArgumentTypeError(
            f"'{text}' must have epochs that start at 0 and increase; use a value such as {EXAMPLE}"
        )
    return entries


def _parse_entry(entry):
    """Return {field: value} for an entry of --sizes. The batch size and the learning-rate factor are optional. Raise
    ArgumentTypeError if the entry is invalid."""
    fields = {
        "size": numbers.side,
        "first_epoch": numbers.not_negative,
        "batch_size": numbers.batch_size,
        "lr_factor": numbers.positive_number,
    }
    values = entry.split(":")
    if not 2 <= len(values) <= len(fields):
        raise argparse.ArgumentTypeError(f"'{entry}' is not a stage; use {FORM}, such as {EXAMPLE}")
    return {name: parse(value) for (name, parse), value in zip(fields.items(), values, strict=False)}


def _layers(text):
    """Return the layers in a value of --freeze, or None for the text "None", which overrides a value in the
    configuration file. Raise ArgumentTypeError if the value is not a list of layers."""
    if text == "None":
        return None
    names = [name.strip() for name in text.split(",")]
    if "" in names or (parts.ALL_BUT_CLASSIFIER in names and len(names) > 1):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a list of layers; use layers such as stem,stages.0, or only {parts.ALL_BUT_CLASSIFIER}"
        )
    return names


@dataclass(frozen=True)
class Settings:
    sizes: list[str] | None = flag(
        None,
        "training stages, such as 128:0:512:2,160:20: from epoch E on, images have S x S pixels, batches have B "
        "images per process (if omitted, --batch-size), and the learning rate is multiplied by F (if omitted, 1); "
        "evaluation uses --crop-size",
        topic="image",
        parse=parse,
        metavar="S:E[:B[:F]],...",
    )
    freeze: list[str] | None = flag(
        None,
        "layers that are not trained, such as stem,stages.0; their batch normalization uses the running "
        f"statistics without updating them; {parts.ALL_BUT_CLASSIFIER}: all layers except the last",
        topic="fine-tune",
        parse=_layers,
        metavar="LAYER,...",
    )
    unfreeze_at: int | None = flag(
        None,
        "first epoch in which the layers in --freeze are trained",
        topic="fine-tune",
        parse=numbers.or_none(numbers.positive),
        metavar="EPOCH",
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --unfreeze-at is set without --freeze."""
    if settings.unfreeze_at is not None and settings.freeze is None:
        yield Conflict(
            f"--unfreeze-at {settings.unfreeze_at}: requires --freeze; add it, or use --unfreeze-at None",
            ("unfreeze_at",),
            ("freeze",),
        )


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The flags from which the stages of a run are made."""

    accumulate_steps: int
    batch_size: int
    image_shape: list[int]


class Stage(NamedTuple):
    """The part of a run from epoch `first_epoch` on.

    Attributes:
        first_epoch: first epoch of the stage.
        changes: flags whose values differ from those of the run, {origin: {name: value}}; see values.Settings.stage.
        batch_size: images per process and batch.
        lr_factor: factor by which the learning rate is multiplied.
    """

    first_epoch: int
    changes: dict[str, dict[str, Any]]
    batch_size: int
    lr_factor: float = 1.0


def stages(options: Options) -> list[Stage]:
    """Return the stages of a run, in the order of their epochs. Without --sizes and --unfreeze-at, a run has one
    stage."""
    sizes = {fields["first_epoch"]: fields for fields in map(_parse_entry, options.sizes or ())}
    begins = {0, *sizes, *([] if options.unfreeze_at is None else [options.unfreeze_at])}
    result: list[Stage] = []
    fields: dict = {}
    for first_epoch in sorted(begins):
        fields, changes = sizes.get(first_epoch, fields), {}
        batch_size = fields.get("batch_size", options.batch_size)
        if fields:
            size = fields["size"]
            shape = [options.image_shape[0], size, size]
            changes["--sizes"] = {"image_shape": shape, "crop_size": size, "batch_size": batch_size}
        if options.unfreeze_at is not None and first_epoch >= options.unfreeze_at:
            changes["--unfreeze-at"] = {"freeze": None}
        result.append(Stage(first_epoch, changes, batch_size, fields.get("lr_factor", 1.0)))
    return result


def stages_from(options: Options, epoch: int) -> list[Stage]:
    """Return the stage that contains an epoch, and all later stages."""
    every = stages(options)
    current = max(i for i, stage in enumerate(every) if stage.first_epoch <= epoch)
    return every[current:]


def timeline(options: Options, images: int) -> durations.Timeline:
    """Return the durations.Timeline of a run.

    Args:
        options: the flags of the run.
        images: number of training images per process.
    Raises:
        UsageError: an epoch has fewer batches than --accumulate-steps, or the batch size of a stage exceeds `images`.
    """
    count, of_stages = options.accumulate_steps, []
    for stage in stages(options):
        if stage.batch_size > images:
            raise UsageError(
                f"--sizes {text(options.sizes)}: batch size {stage.batch_size} exceeds the "
                f"{counted(images, 'training image')} per process; use {images} or less"
            )
        steps = durations.used_batches(images // stage.batch_size, count) // count
        of_stages.append(durations.Part(stage.first_epoch, steps, stage.lr_factor))
    return durations.Timeline(count, tuple(of_stages))
