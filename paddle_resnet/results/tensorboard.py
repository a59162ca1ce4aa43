"""Write TensorBoard events (--tensorboard-dir): the report's scalars, the first augmented batch, and the configuration.

Step metrics have the tag prefix "train/" and are logged at the global step, counted from 0. Epoch metrics have the tag
prefixes "train_epoch/" and "val/" and are logged at the global step of the last step in the epoch. When a run resumes
at a step, TensorBoard hides the events that earlier starts wrote for this step and later steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from tensorboardX import SummaryWriter, record_writer

from paddle_resnet.job import processes
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from paddle_resnet.data.iterators import ShardIterator, SyntheticIterator
    from paddle_resnet.settings.durations import Timeline

PICTURES = 64


def follow(
    folder: str,
    loader: ShardIterator | SyntheticIterator,
    timeline: Timeline,
    checkpoint: Any,
    pictures: Callable[[Any], np.ndarray],
) -> ShardIterator | SyntheticIterator | _Shown:
    """Write log entries as TensorBoard events from this call until logger.close(), on rank 0 only.

    Args:
        folder: value of --tensorboard-dir.
        loader: training loader.
        timeline: durations.Timeline.
        checkpoint: restore.StartCheckpoint or None.
        pictures: function that converts a batch to uint8 RGB images [N, H, W, 3].
    Returns:
        the loader to use for training: on rank 0, a wrapper of `loader` that writes the first batch as an event; on all
        other ranks, `loader`.
    Raises:
        UsageError: the folder cannot be written.
    """
    if processes.rank() != 0:
        return loader
    first_step = 0
    if checkpoint is not None:
        first_step = loader.step if checkpoint.trained is None else checkpoint.step
        first_step += timeline.batches_before(checkpoint.epoch)
    if first_step == 0 and any(Path(folder).glob("events.out.tfevents.*")):
        logger.warn(
            f"--tensorboard-dir {folder}: contains events of an earlier run, which TensorBoard hides; "
            "use a different folder for each run to see the events of all runs"
        )
    try:
        board = _Board(folder, timeline, first_step)
    except OSError as e:
        raise UsageError(
            f"--tensorboard-dir {folder}: cannot be written ({e.strerror}); choose a different folder"
        ) from e
    logger.follow(board)
    return _Shown(loader, lambda batch: board.show(pictures(batch)))


class _Board:
    """Receives log entries and writes them as TensorBoard events."""

    def __init__(self, folder, timeline, first_step):
        self._timeline, self._first_step = timeline, first_step
        # tensorboardX's file names contain the time with a resolution of one second. The suffix prevents two starts of
        # a run from sharing a file.
        suffix = f".{time.time_ns()}"
        record_writer.register_writer_factory(_FILES, SimpleNamespace(open=_EventFile, directory_check=_make_folder))
        self._writer = SummaryWriter(f"{_FILES}:{folder}", purge_step=first_step, filename_suffix=suffix)

    def add(self, step, data):
        if step == "PARAMETER":
            text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None)
            self._writer.add_text("configuration", f"```yaml\n{text}```", self._first_step)
        elif len(step) == 1:
            done = data.get("train.step", data.get("val.step", self._timeline.batches(step[0])))
            before = self._timeline.batches_before(step[0])
            self._add(data, {"train": "train_epoch", "val": "val"}, before + done - 1)
            self._writer.flush()
        elif len(step) == 2:  # evaluation steps are omitted, because they have no global step
            self._add(data, {"train": "train"}, self._timeline.batches_before(step[0]) + step[1])

    def _add(self, data, tags, step):
        for name, value in data.items():
            phase, _, metric = name.partition(".")
            is_scalar = not isinstance(value, list)  # "reliability" is a list
            if phase in tags and is_scalar and math.isfinite(value):  # the report stores non-finite values as null
                self._writer.add_scalar(f"{tags[phase]}/{metric}", value, step)

    def show(self, images):
        self._writer.add_images("first_batch", images[:PICTURES], self._first_step, dataformats="NHWC")

    def close(self):
        self._writer.close()


_FILES = "paddle_resnet"  # path prefix that makes tensorboardX call _EventFile and _make_folder


def _make_folder(path):
    os.makedirs(path.removeprefix(f"{_FILES}:"), exist_ok=True)


class _EventFile:
    """An event file that logs a warning at the first write error, such as a full disk, and ignores all later writes.
    An exception would end tensorboardX's thread, and training would wait forever for space in the thread's queue."""

    def __init__(self, path):
        self._path = path.removeprefix(f"{_FILES}:")
        self._file = open(self._path, "wb")  # noqa: SIM115  stays open until the run ends

    def write(self, data):
        self._call("write", data)

    def flush(self):
        self._call("flush")

    def close(self):
        self._call("close")

    def _call(self, name, *args):
        if self._file is None:
            return
        try:
            getattr(self._file, name)(*args)
        except OSError as e:
            failed, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing flushes the same data and may fail again
                failed.close()
            logger.warn(
                f"{self._path}: can no longer be written ({e.strerror}), so the run continues without it; "
                "free disk space before the next run"
            )


class _Shown:
    """Wraps a loader and calls a function with its first batch."""

    def __init__(self, loader, show):
        self._loader, self._show = loader, show

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        for batch in self._loader:
            if self._show is not None:
                self._show(batch[0])
                self._show = None
            yield batch
