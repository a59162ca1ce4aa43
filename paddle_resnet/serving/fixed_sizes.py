"""Run an inference network in batches of a few fixed sizes. As in evaluation, steps use custom kernels. On a GPU, one
step per size is captured as a CUDA graph."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np
import paddle
from nvidia.dali.plugin.paddle import feed_ndarray
from paddle import static

from paddle_resnet.job import processes
from paddle_resnet.program import compile_prog
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.utils import logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU


class Steps:
    """The steps of an inference network. The step for a batch size is compiled when this size is used for the first
    time.

    Args:
        network: networks.Network whose program contains an async copy of its outputs.
        sizes: batch sizes. A batch of any other size is padded to the next larger size in `sizes`. Calling the object
            splits a batch that is larger than all of `sizes`.
    """

    def __init__(self, network, sizes: Iterable[int]) -> None:
        self._network, self._sizes = network, sorted(set(sizes))
        self._steps = {}

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the probabilities, float32 [N, classes], of an array of images."""
        return self.outputs(images)[0]

    def outputs(self, images: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of the network (see networks.Network.outputs) for an array of images."""
        largest = self._sizes[-1]
        parts = [images[i : i + largest] for i in range(0, len(images), largest)]
        results = [[np.asarray(rows) for rows in self.submit(part)] for part in parts]
        return [np.concatenate(arrays) for arrays in zip(*results, strict=True)]

    def submit(self, images: np.ndarray | TensorListCPU | TensorListGPU) -> Sequence[ArrayLike]:
        """Start inference for at most max(sizes) images. See model.Model.submit."""
        with static.scope_guard(self._network.scope), logger.only_warnings():
            return self._step(len(images))(images)

    def host_images(self, count: int) -> np.ndarray:
        """Return an array with undefined content for `count` images, at most max(sizes); see Model.host_images."""
        with static.scope_guard(self._network.scope):
            return self._step(count).host_images()[:count]

    def _step(self, count):
        size = next((size for size in self._sizes if size >= count), self._sizes[-1])
        if size not in self._steps:
            self._steps[size] = _Step(self._network, size)
        return self._steps[size]


class _Step:
    """A step for one batch size. The input of the step is on the device, and a buffer in host memory receives images
    before they are copied to the device."""

    def __init__(self, network, size):
        args, images = network.args, network.images
        self._place = processes.place(args.device)
        compiled = compile_prog(args, network.program, is_train=False)
        self._dispatch = Dispatcher(network.exe, compiled, network.outputs, True)
        self._name, self._shape = images.name, [size, *images.shape[1:]]
        self._dtype, self._host = np.float16 if images.dtype == paddle.float16 else np.float32, None
        self._input = self._dispatch.inputs.get(images.name) or paddle.framework.core.LoDTensor()
        self._input.set(np.zeros(self._shape, self._dtype), self._place)
        self._last = None  # result of the latest batch

    def __call__(self, images):
        if isinstance(images, np.ndarray):
            self._copy_from_host(images)
        else:
            self._copy_from_dali(images.as_tensor())
        rows = [_Rows(handle, len(images)) for handle in self._dispatch({self._name: self._input})]
        self._last = rows[0]
        return rows

    def host_images(self):
        """Return the buffer in host memory as an array. If the device is a GPU, the memory is pinned."""
        if self._host is None:
            on_gpu = isinstance(self._place, paddle.CUDAPlace)
            place = paddle.CUDAPinnedPlace() if on_gpu else paddle.CPUPlace()
            self._host = paddle.framework.core.LoDTensor()
            self._host.set(np.zeros(self._shape, self._dtype), place)
        size = math.prod(self._shape) * np.dtype(self._dtype).itemsize
        memory = (ctypes.c_char * size).from_address(self._host._ptr())
        return np.frombuffer(memory, self._dtype).reshape(self._shape)

    def _copy_from_host(self, images):
        buffer = self.host_images()
        if images.ctypes.data != buffer.ctypes.data:
            if self._last is not None:
                np.asarray(self._last)  # wait, because the GPU may still be reading the buffer
            buffer[: len(images)] = images
        self._input._copy_from(self._host, self._place)

    def _copy_from_dali(self, images):
        """Copy the output of a DALI pipeline to the input of the step. If the output is smaller than the input, the
        remaining values do not change."""
        on_gpu = isinstance(self._place, paddle.CUDAPlace)
        stream = paddle.device.cuda.current_stream(self._place.get_device_id()).cuda_stream if on_gpu else None
        feed_ndarray(images, self._input._ptr(), stream)


class _Rows:
    """The first rows of a result that the device may still be computing."""

    def __init__(self, handle, count):
        self._handle, self._count = handle, count
        self._rows = None

    def __array__(self, dtype=None, copy=None):
        if self._rows is None:
            self._rows = np.asarray(self._handle)[: self._count]
        return self._rows
