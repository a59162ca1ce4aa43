"""The state of a training loader in a checkpoint: what must not change, and how a loader resumes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import nvidia.dali
from nvidia.dali.pipeline import Pipeline

from paddle_resnet.data.iterators import ShardIterator, StateError
from paddle_resnet.settings.values import text
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError

# Conditions that determine the order of the training images. The order of class folders and file lists does not depend
# on the number of processes; each process shuffles its own part of record files.
ORDER_CONDITIONS = ("--data-format", "--dali-random-seed", "--balanced-sampling", "number of images", "DALI version")
LIST = "list of images and labels (hash)"
VALIDATION = "validation split"
# Name and value of the condition for the version of the training pipeline. Increase the value if the operators of the
# pipeline change, because DALI then rejects older checkpoints.
VERSION, VERSION_NUMBER = "version of the loader", 3


class BatchFlags(NamedTuple):
    """The flags that determine the training batches.

    Attributes:
        values: {flag: value}.
        before: {flag: value to assume for a checkpoint without this flag}.
    """

    values: Mapping[str, Any]
    before: Mapping[str, Any]


def conditions(
    flags: BatchFlags,
    data_format: str,
    size: int,
    processes: int,
    digest: str | None = None,
    validation: str | None = None,
) -> dict[str, Any]:
    """Return the conditions that must not change between saving a loader state and resuming from it. `validation` is
    the name of the validation split, whose change triggers only a warning."""
    counts = {"number of images": size, "number of processes": processes}
    files = {LIST: digest[:16]} if digest else {}
    versions = {"DALI version": nvidia.dali.__version__, VERSION: VERSION_NUMBER}
    split = {VALIDATION: validation} if validation else {}
    return {"--data-format": data_format, **flags.values, **counts, **files, **versions, **split}


def match(
    state: dict[str, Any] | None,
    conditions: dict[str, Any],
    before: Mapping[str, Any],
    steps: int,
    expects_changes: bool = False,
) -> tuple[dict[str, Any] | None, bool]:
    """Compare a loader state with the current conditions, and log the conditions that have changed.

    Args:
        state: loader state, or None.
        conditions: result of conditions().
        before: BatchFlags.before.
        steps: number of steps per epoch.
        expects_changes: whether changes are intended, so that they are logged without a warning.
    Returns:
        (state, or None if it cannot be used; whether the loader resumes only the image order).
    Raises:
        StateError: the step in the state exceeds the steps per epoch.
    """
    if state is None:
        return None, False
    # Older checkpoints lack the conditions of newer flags, the hash of the image list, and the version of the loader.
    before = {**before, LIST: conditions.get(LIST), VERSION: 1, **state["conditions"]}
    conditions = dict(conditions)
    split, old = conditions.pop(VALIDATION, None), before.pop(VALIDATION, None)
    if None not in (split, old) and split != old:
        logger.warn(
            f"loader state in the checkpoint: the {VALIDATION} is {split} and was {old}, so the results before and "
            "after are those of different images; to continue with the same images, move the new files to a different "
            "folder"
        )
    # Older checkpoints may contain conditions of flags that no longer exist. A removed flag had no effect if it was 0
    # or false.
    removed = {name for name, value in before.items() if value and name.startswith("--")} - {*conditions}
    changes = {
        name: f"{name} is {text(now)} and was {text(before.get(name))}"
        for name, now in (conditions | dict.fromkeys(sorted(removed), "a removed flag")).items()
        if now != before.get(name)
    }
    if changes and state["step"] == 0 and not set(changes) & {*ORDER_CONDITIONS, LIST}:
        message = (
            f"loader state in the checkpoint: {', '.join(changes.values())}, so the random numbers of the "
            "augmentation restart, but the image order continues; restore the previous values to continue both"
        )
        (logger.info if expects_changes else logger.warn)(message)
        return state, True
    if changes:
        logger.warn(
            f"loader state in the checkpoint: {', '.join(changes.values())}, so the loader restarts at the beginning "
            "of the epoch, with the image order of the first epoch; restore the previous values to continue within "
            "the epoch"
        )
        return None, False
    if state["step"] > steps:
        raise StateError(f"the loader state is damaged (step {state['step']} of {steps})")
    return state, False


def restored(pipeline: Pipeline, make: Callable[[], ShardIterator]) -> ShardIterator:
    """Return an iterator over a pipeline that resumes from a DALI checkpoint. The pipeline is built before the
    iterator, because an error during the build indicates a damaged checkpoint, not a damaged image.

    Raises:
        StateError: the checkpoint is damaged.
        UsageError: see ShardIterator.
        RuntimeError: memory or the GPU fails.
    """
    try:
        pipeline.build()
    except (RuntimeError, LookupError, TypeError, ValueError) as e:
        if "memory" in str(e) or "CUDA" in str(e):
            raise
        raise _state_error(str(e).partition(" failed: ")[2] or repr(e)) from e
    try:
        return make()
    except UsageError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as e:  # DALI's plugin does not validate the checkpoint
        raise _state_error(repr(e)) from e


def _state_error(reason):
    return StateError(f"the loader state is damaged ({' '.join(reason.split())[:200]})")


def with_reader_of(checkpoint: bytes, fresh: bytes) -> bytes:
    """Return the checkpoint `fresh`, with the reader's position from `checkpoint`. DALI checkpoints are protobuf
    messages that begin with the state of the first operator, the reader. Raise StateError if `checkpoint` does not
    begin with such a state."""
    return _first_operator(checkpoint) + fresh[len(_first_operator(fresh)) :]


def _first_operator(checkpoint):
    """Return the first field of a protobuf message. The field consists of a tag, the length as a varint, and the
    content."""
    length, place = 0, 1
    while True:
        byte = checkpoint[place : place + 1]
        if checkpoint[:1] != b"\n" or not byte or place > 5:
            raise StateError("the loader state is damaged (no reader position)")
        length |= (byte[0] & 0x7F) << 7 * (place - 1)
        place += 1
        if byte[0] < 0x80:
            return checkpoint[: place + length]
