"""Asynchronous copies of step metrics to host memory.

If the Executor fetched the metrics, the host would wait until the GPU has computed them, and the GPU would then sit
idle until the host launches the next kernels. Therefore, a custom operator enqueues a copy of each metric after the
kernel that computes it, and the host reads the copies later.
"""

import ctypes
from collections.abc import Iterable

import numpy as np
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import graph
from paddle_resnet.utils.errors import command

OPERATOR = "native_async_copy"


def add_copy(variables: Iterable[static.Variable]) -> None:
    """Add an operator that copies variables to the host in every step of the current program."""
    block = graph.block(static.default_main_program())
    done = block.create_var(name="copied", shape=[1], dtype="int32", stop_gradient=True)
    block.append_op(type=OPERATOR, inputs={"X@VECTOR": list(variables)}, outputs={"Out": done})


class AsyncCopy:
    """Handle for one metric of a dispatched step. `np.asarray(handle)` waits for the value.

    Raises:
        RuntimeError: the value is read more than three steps late, or a kernel failed.
    """

    def __init__(self, library, number, i, variable):
        self._wait = library.paddle_resnet_wait
        self._key = ctypes.c_uint64(number), ctypes.c_int(i)
        self._dtype, self._shape = convert_dtype(variable.dtype), variable.shape

    def __array__(self, dtype=None):  # NumPy converts the result to `dtype`
        memory, size = ctypes.c_void_p(), ctypes.c_size_t()
        error = self._wait(*self._key, ctypes.byref(memory), ctypes.byref(size))
        if error == -1:
            raise RuntimeError("metrics: read more than three steps late; read them within three steps")
        if error:
            raise RuntimeError(f"GPU: this step or an earlier one failed (CUDA error {error}); run {command('doctor')}")
        return np.frombuffer(ctypes.string_at(memory, size.value), self._dtype).reshape(self._shape)
