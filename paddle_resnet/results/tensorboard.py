"""A run for TensorBoard (--tensorboard-dir): the report's scalars, the first augmented batch, the configuration.

A step's figures are at the number of training steps before it, in "train/"; those of an epoch at its last step, in
"train_epoch/" and "val/". A run that continues hides the events after its start that an earlier part left.
"""

import math
import time
from pathlib import Path

import paddle
import yaml
from tensorboardX import SummaryWriter

from paddle_resnet.data import pixels
from paddle_resnet.job import processes
from utils import logger
from utils.errors import UsageError

PICTURES = 64


def follow(args, loader, found):
    """Write events from now on, on rank 0; logger.close() ends them.

    Args:
        args: flags.
        loader: of training.
        found: restore.Found or None.
    Returns:
        the loader to train with, which shows its first batch.
    Raises:
        UsageError: the folder cannot be written.
    """
    if processes.rank() != 0:
        return loader
    first_step = 0
    if found is not None:
        first_step = found.epoch * len(loader) + (loader.step if found.trained is None else found.step)
    if first_step == 0 and any(Path(args.tensorboard_dir).glob("events.out.tfevents.*")):
        logger.warn(
            f"--tensorboard-dir {args.tensorboard_dir}: TensorBoard hides the events of earlier runs there; choose a "
            "folder for each run to see them all"
        )
    try:
        board = _Board(args.tensorboard_dir, len(loader), first_step)
    except OSError as e:
        raise UsageError(
            f"--tensorboard-dir {args.tensorboard_dir} cannot be written ({e.strerror}): name another folder"
        ) from e
    logger.follow(board)
    return _Shown(loader, lambda batch: board.show(args, batch))


class _Board:
    """A follower of the log that writes TensorBoard events."""

    def __init__(self, folder, steps_each_epoch, first_step):
        self._steps_each_epoch, self._first_step = steps_each_epoch, first_step
        # tensorboardX names a file by the second: two parts of a run must not share one.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(folder), purge_step=first_step, filename_suffix=suffix)

    def add(self, step, data):
        if step == "PARAMETER":
            text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None)
            self._writer.add_text("configuration", f"```yaml\n{text}```", self._first_step)
        elif len(step) == 1:
            self._add(data, {"train": "train_epoch", "val": "val"}, (step[0] + 1) * self._steps_each_epoch - 1)
            self._writer.flush()
        elif len(step) == 2:  # an evaluation's own steps have no place among those of training
            self._add(data, {"train": "train"}, step[0] * self._steps_each_epoch + step[1])

    def _add(self, data, tags, step):
        for name, value in data.items():
            phase, _, metric = name.partition(".")
            if phase in tags and math.isfinite(value):  # TensorBoard shows nothing, the report null
                self._writer.add_scalar(f"{tags[phase]}/{metric}", value, step)

    def show(self, args, batch):
        if args.device == "gpu":
            paddle.device.cuda.synchronize()  # the loader copies on another stream
        images = pixels.pictures(args, batch["data"])[:PICTURES]
        self._writer.add_images("first_batch", images, self._first_step, dataformats="NHWC")

    def close(self):
        self._writer.close()


class _Shown:
    """A loader that calls a function with its first batch."""

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
