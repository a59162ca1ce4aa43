"""Iterators that provide batches to Paddle. One pass over an iterator is one epoch.

Every iterator yields `[{"data": images, "label": labels}]`, with Paddle tensors that the Executor accepts as inputs:
images [N, C, H, W] or [N, H, W, C] in float32 or float16, and labels [N, 1] in int64 or, with --multi-label,
[N, classes] in float32. After an epoch, `reset()` starts the next epoch. After `write_into({name: tensor})`,
ShardIterator copies each full batch into the tensors; the other classes in this module ignore the call. adapted()
wraps any other iterable in an object with this interface.
"""

import base64
import contextlib
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.paddle import DALIGenericIterator, feed_ndarray, lod_tensor_clip, to_paddle_type
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import graph
from paddle_resnet.data import bad_images
from paddle_resnet.data.formats import FORMATS
from paddle_resnet.job import processes
from paddle_resnet.utils.errors import DataError, UsageError, command, counted

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

    from paddle_resnet.data.data_set import DataSet

READER = "Reader"  # name of the reader operator in a pipeline
UNKNOWN_LENGTH = sys.maxsize  # length of a loader that does not implement __len__


class StateError(UsageError):
    """Raised if a loader's state in a checkpoint is damaged."""


class _Steps:
    """Counts the steps of an iterator. An epoch consists of `images` images, of which `_left` remain in the current
    epoch."""

    images: int
    batch_size: int
    _left: int

    def __len__(self) -> int:
        return -(-self.images // self.batch_size)

    @property
    def step(self) -> int:
        """Number of batches that have been yielded in this epoch."""
        return -(-(self.images - self._left) // self.batch_size)


class ShardIterator(_Steps, DALIGenericIterator):
    """A version of DALI's Paddle iterator that also supports CPU pipelines and removes the padding at the end of an
    epoch.

    In each epoch, every process reads the same number of batches (with a reader of DALI, ceil(ceil(size / num_shards) /
    batch), including padding), so that all processes begin the next epoch together. The iterator yields the first
    `images` images and discards the rest.

    Args:
        pipeline: DALI pipeline, built or not, that pads the last batch and returns images and labels.
        images: number of images to yield per epoch. If the batch size does not divide this number, the last batch is
            smaller.
        data_set: the data set that the pipeline reads.
        image_root: folder of the data set.
        conditions: settings to store in state(), because a loader that resumes from the state compares the stored
            settings with its own settings.
        step: number of batches that had been yielded in the current epoch when the pipeline's checkpoint was saved.
        epoch: number of epochs that were complete when the pipeline's checkpoint was saved.
    Raises:
        DataError: an image in a batch that the constructor loads cannot be read or decoded. For images in all other
            batches, `next` raises DataError.
        StateError: raised by `next` if the pipeline's position contradicts `step`.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        images: int,
        data_set: "DataSet",
        image_root: str,
        conditions: dict[str, Any],
        step: int = 0,
        epoch: int = 0,
    ):
        self.images = images
        self.data_set_size = data_set.size
        self.classes = data_set.classes
        self.class_names = data_set.class_names
        self.digest = data_set.digest
        self._data_set = data_set
        self._image_root = image_root
        self._conditions = conditions
        self._left = images - step * pipeline.max_batch_size
        self._epoch = epoch
        self._targets = {}
        with self._naming_bad_images():
            super().__init__(
                [pipeline],
                ["data", "label"],
                reader_name=READER if data_set.has_reader else None,
                # DALI returns full, padded batches, from which this class removes the padding.
                last_batch_policy=LastBatchPolicy.FILL,
                prepare_first_batch=False,
            )
            if not data_set.has_reader:
                # DALI logs a warning if the size is passed to the constructor, and counts the padding.
                self._size = len(self) * pipeline.max_batch_size
            self._schedule_runs(False)  # start decoding while the program is being built

    @property
    def class_images(self) -> np.ndarray | None:
        """Number of images of each class, or None (see data_set.DataSet)."""
        return self._data_set.class_images

    def state(self) -> dict[str, Any]:
        """Return the state of a training loader as JSON-serializable data, to be passed to dali.build_dataloader."""
        pipeline = base64.b64encode(self.checkpoints()[0]).decode()
        return {"conditions": self._conditions, "epoch": self._epoch, "step": self.step, "pipeline": pipeline}

    def write_into(self, targets: dict[str, Any]) -> None:
        """Copy every full batch into `targets`, starting with the next batch. A smaller last batch is returned in new
        tensors.

        Args:
            targets: {"data": Paddle tensor, "label": Paddle tensor}, or {} to create new tensors in each step.
        """
        self._targets = targets

    def __iter__(self):
        """Continue the current epoch if images remain. The base class would start a new epoch."""
        return self if self._left else super().__iter__()

    def __next__(self):
        if self._left == 0:
            for _ in range(2):  # read the padding, at most one batch, until StopIteration
                self._next_batch()
            raise StateError(
                "loader state in the checkpoint: damaged (the epoch is too long); use a different checkpoint"
            )
        try:
            batch = self._next_batch()
        except StopIteration:
            raise StateError(
                f"loader state in the checkpoint: damaged (the epoch ends {counted(self._left, 'image')} early); "
                "use a different checkpoint"
            ) from None
        if self._left < self.batch_size:
            batch = {name: lod_tensor_clip(tensor, self._left) for name, tensor in batch.items()}
        self._left -= min(self._left, self.batch_size)
        return [batch]

    def reset(self) -> None:
        """Start the next epoch. Call reset() at the end of an epoch."""
        super().reset()
        self._left = self.images
        self._epoch += 1

    @contextlib.contextmanager
    def _naming_bad_images(self):
        try:
            yield
        except RuntimeError as e:
            can_skip = getattr(FORMATS[self._data_set.data_format], "CAN_SKIP", True)
            remedy = (
                f"run `{command('dataset', 'verify', self._image_root, '--fix-list', 'bad.txt')}` and "
                f"{'train' if can_skip else 'convert the data set'} with --skip-list bad.txt"
            )
            record = bad_images.bad_record(str(e), self._data_set, self._image_root)
            if record is not None:
                raise DataError(f"{record}, or {remedy} (rank {processes.rank()})") from e
            path, image_problem = bad_images.bad_image(str(e), self._data_set, self._image_root)
            problem = bad_images.reader_problem(str(e))
            if path is None and problem is None:
                raise
            if path is None:
                raise DataError(
                    f"{self._image_root}: the {self._data_set.data_format} data cannot be read (rank "
                    f"{processes.rank()}: {problem}); run `{command('dataset', 'verify', self._image_root)}`"
                ) from e
            if self._data_set.is_multi_label:  # `dataset verify` reads one label per image
                remedy = f"add a line {os.path.relpath(path, self._image_root)} to a file for --skip-list"
            repair = "make it readable" if image_problem == bad_images.UNOPENED else "repair or remove it"
            raise DataError(f"{path}: {image_problem} (rank {processes.rank()}); {repair}, or {remedy}") from e

    def _next_batch(self):
        with self._naming_bad_images():
            return self._decoded_batch()

    def _decoded_batch(self):
        # This method replaces the code in DALI's plugin, which requires a GPU and does not support preallocated
        # tensors.
        self._ever_consumed = True
        outputs = self._get_outputs()[0]
        gpu = self._pipes[0].device_id
        place = paddle.CPUPlace() if gpu is None else paddle.CUDAPlace(gpu)
        # Paddle's steps run on this stream, so the copy waits until the previous step has read the tensors.
        stream = None if gpu is None else paddle.device.cuda.current_stream(gpu).cuda_stream
        batch = {}
        for name, output in zip(self.output_map, outputs, strict=True):
            source = output.as_tensor()
            tensor = batch[name] = self._targets.get(name) or paddle.framework.core.LoDTensor()
            tensor._set_dims(source.shape())
            feed_ndarray(source, tensor._mutable_data(place, to_paddle_type(source)), stream)
        self._schedule_runs()
        self._advance_and_check_drop_last()
        return batch


def adapted(loader: Any, program: static.CompiledProgram) -> Any:
    """Return the loader itself if it has the interface that this module defines; otherwise, wrap the loader in an
    Adapter."""
    return loader if hasattr(loader, "write_into") else Adapter(loader, program)


class Adapter:
    """Adapts an iterable of batches to the interface that this module defines. Each pass over the iterable is one
    epoch.

    Args:
        loader: an iterable of `[{name: array or tensor}]`, with the names of graph.feeds(program). The loader may
            reuse the memory of a tensor after the last reference to the tensor has been deleted.
        program: compiled program that receives the batches.
    Raises:
        UsageError: raised during iteration if the loader yields no batches or a batch does not match the program.
    """

    step = 0

    def __init__(self, loader: Any, program: static.CompiledProgram):
        self._loader = loader
        self._inputs = {
            name: f"{convert_dtype(v.dtype)} {['N', *v.shape[1:]]}" for name, v in graph.feeds(program._program).items()
        }

    def __len__(self):
        return len(self._loader) if hasattr(self._loader, "__len__") else UNKNOWN_LENGTH

    def __iter__(self):
        # Keep the last three batches. When batch n is requested, the GPU has finished step n-3, because the host has
        # read the metrics of step n-2, which the GPU computes after step n-3.
        in_use = deque(maxlen=3)
        for batch in self._loader:
            if not isinstance(batch, list | tuple) or len(batch) != 1 or not {*self._inputs} <= {*batch[0]}:
                names = ", ".join(f'"{name}": ...' for name in self._inputs)
                raise UsageError(f"run: the loader yielded a batch in an unexpected format; yield [{{{names}}}]")
            in_use.append({name: self._tensor(name, batch[0][name]) for name in self._inputs})
            self._check_sizes(in_use[-1])
            yield [in_use[-1]]
        if not in_use:
            raise UsageError("run: the loader yielded no batches; pass an iterable that yields batches in every pass")

    def write_into(self, targets: dict[str, Any]) -> None:
        """Do nothing, because the wrapped loader allocates its batches."""

    def reset(self) -> None:
        """Do nothing, because each iteration begins a new epoch."""

    def _tensor(self, name, value):
        """Convert one input of a batch to a Paddle tensor, and check its shape and type. The Executor does not check
        inputs when it replays captured steps."""
        if not isinstance(value, paddle.framework.core.LoDTensor):
            array, value = np.ascontiguousarray(value), paddle.framework.core.LoDTensor()
            value.set(array, paddle.CPUPlace())
        expected, actual = self._inputs[name], f"{convert_dtype(value._dtype())} {['N', *value.shape()[1:]]}"
        if actual != expected:
            raise UsageError(
                f"run: the loader yielded {name} as {actual}, but the program expects {expected}; convert it in the "
                "loader"
            )
        return value

    def _check_sizes(self, batch):
        sizes = {name: tensor.shape()[0] for name, tensor in batch.items()}
        if len({*sizes.values()}) > 1 or 0 in sizes.values():
            raise UsageError(
                f"run: the loader yielded a batch with {' and '.join(f'{n} {name}' for name, n in sizes.items())}; "
                "yield at least one image, and one label per image"
            )


class EmptyIterator:
    """Loader for a process whose shard contains no validation images. Each epoch has 0 steps."""

    step = 0

    def __init__(self, data_set: "DataSet"):
        self.data_set_size = data_set.size
        self.classes = data_set.classes
        self.class_names = data_set.class_names
        self.digest = data_set.digest

    def __len__(self):
        return 0

    def write_into(self, targets: dict[str, Any]) -> None:
        """Do nothing, because there are no batches."""

    def __iter__(self):
        return iter(())

    def reset(self) -> None:
        pass


class SyntheticIterator(_Steps):
    """Yields the same random batch from device memory at every step, to measure a program without the cost of data
    loading.

    Args:
        batch: {"data": images, "label": labels}, two arrays on the host.
        place: device of the batch.
        images: number of images that this process reads per epoch. Only an evaluation may have a partial last batch.
        num_of_class: number of classes.
        conditions: see ShardIterator.
        state: see dali.build_dataloader.
    """

    def __init__(
        self,
        batch: dict[str, np.ndarray],
        place: paddle.CPUPlace | paddle.CUDAPlace,
        images: int,
        num_of_class: int,
        conditions: dict[str, Any],
        state: dict[str, Any] | None = None,
    ):
        self.batch_size, self.images = len(batch["label"]), images
        self.data_set_size = conditions["number of images"]
        self.classes = self.class_names = list(map(str, range(num_of_class)))
        self.digest = self.class_images = None
        self._host, self._place = batch, place
        self._full = {name: self._tensor(array) for name, array in self._host.items()}
        self._conditions = conditions
        self._left = self.images - (state["step"] if state else 0) * self.batch_size

    def state(self) -> dict[str, Any]:
        return {"conditions": self._conditions, "step": self.step}

    def write_into(self, targets: dict[str, Any]) -> None:
        """Do nothing, because the only batch is already in device memory."""

    def __iter__(self):
        return self

    def __next__(self):
        if self._left == 0:
            raise StopIteration
        n = min(self._left, self.batch_size)
        self._left -= n
        if n == self.batch_size:
            return [self._full]
        return [{name: self._tensor(array[:n]) for name, array in self._host.items()}]

    def reset(self) -> None:
        self._left = self.images

    def _tensor(self, array):
        tensor = paddle.framework.core.LoDTensor()
        tensor.set(np.ascontiguousarray(array), self._place)
        return tensor


TrainingLoader = ShardIterator | SyntheticIterator
Loader = TrainingLoader | EmptyIterator
