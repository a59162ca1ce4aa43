"""The metrics of a step, copied to host memory without a wait inside a later step.

The Executor's fetch blocks the host until the GPU has computed the value. The GPU then waits for the host's next
kernels. So an operator of native/ copies the values right after the kernels that compute them, and the host reads them
later.
"""

import ctypes
import functools

import numpy as np
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet.native import build as native
from paddle_resnet.steps import cuda_graph
from utils.errors import NO_CLASS, DataError


def post(variables):
    """Let every step of the current program copy these variables to the host, for dispatcher()."""
    block = static.default_main_program().global_block()
    done = block.create_var(name="posted", shape=[1], dtype="int32", stop_gradient=True)
    block.append_op(type="native_post", inputs={"X@VECTOR": list(variables)}, outputs={"Out": done})


def dispatcher(args, exe, program, variables):
    """A function that runs a step.

    Args:
        args: flags.
        exe: static.Executor.
        program: result of program.compile_prog.
        variables: the metrics of each step; with --kernels native those that the program posts.
    Returns:
        function of a feed. It dispatches a step and returns a handle for each variable: `np.asarray(handle)` waits for
        the value. With --kernels native a handle is valid for the next three steps.
    Raises:
        DataError: by that function, for a label that is no class, on a CPU with Paddle's kernels. Custom kernels report
            it in the metrics (utils/meters.py).
    """
    if args.kernels != "native":
        return functools.partial(_fetch, args, functools.partial(exe.run, program, fetch_list=variables))
    if not any(op.type == "native_post" for op in program._program.global_block().ops):
        raise RuntimeError("the program posts no metrics: it was built for other --kernels")
    if args.cuda_graph:
        run = cuda_graph.recorder(args, exe, program, variables, post)
    else:
        run = functools.partial(exe.run, program, fetch_list=[])
    library = native.register()
    library.paddle_resnet_posts.restype = ctypes.c_uint64

    def dispatch(feed):
        number = library.paddle_resnet_posts()
        run(feed=feed)
        return [Posted(library, number, i, variable) for i, variable in enumerate(variables)]

    return dispatch


def _fetch(args, run, feed):
    try:
        return run(feed=feed, return_numpy=False)
    except (IndexError, ValueError) as e:
        labels = feed["label"]
        # After a failed kernel nothing can be read from a GPU.
        if args.device == "cpu" and not np.isin(labels, np.arange(args.num_of_class)).all():
            raise DataError(NO_CLASS) from e
        raise


class Posted:
    """The handle of a value of a dispatched step."""

    def __init__(self, library, number, i, variable):
        self._wait = library.paddle_resnet_wait
        self._key = ctypes.c_uint64(number), ctypes.c_int(i)
        self._dtype, self._shape = convert_dtype(variable.dtype), variable.shape

    def __array__(self, dtype=None):
        memory, size = ctypes.c_void_p(), ctypes.c_size_t()
        error = self._wait(*self._key, ctypes.byref(memory), ctypes.byref(size))
        if error == -1:
            raise RuntimeError("metrics were read more than three steps late")
        if error:
            raise RuntimeError(f"the GPU has failed in this step or before it: CUDA error {error}")
        array = np.frombuffer(ctypes.string_at(memory, size.value), self._dtype).reshape(self._shape)
        return array if dtype is None else array.astype(dtype)
