"""Dispatch steps: write the host scalars, run the program or replay its CUDA graph, and return handles for the
metrics."""

import ctypes
import functools

import numpy as np

from paddle_resnet import graph
from paddle_resnet.native import build as native
from paddle_resnet.step import host_metrics
from paddle_resnet.utils.errors import NO_CLASS, DataError


class Dispatcher:
    """Dispatches steps of a compiled program.

    Args:
        exe: static.Executor.
        program: result of program.compile_prog.
        variables: variables that contain the step metrics. With --kernels native, the variables must be the inputs of
            the program's async copy.
        is_native: whether --kernels native is used.
        class_num: number of classes, used to check the labels if a step fails; None if the labels cannot be checked.
        shares_inputs: whether loader and program use the same device.

    Attributes:
        inputs: {name: tensor} that captured steps read. A loader can avoid a copy by writing to these tensors directly.
            `inputs` is empty if steps are not captured, or if the loader uses a different device, because writing
            would move the tensors to that device.
    Raises:
        RuntimeError: is_native is true, but the program has no async copy of its metrics.
    """

    def __init__(self, exe, program, variables, is_native, class_num=None, shares_inputs=True):
        self._write_scalars = program.write_scalars
        self.inputs = {}
        if not is_native:
            run = program.step(exe, variables)
            self._run = functools.partial(_fetch, run, class_num)
            return
        if not any(op.type == host_metrics.OPERATOR for op in graph.block(program._program).ops):
            raise RuntimeError("program: does not copy metrics to the host; build the program with --kernels native")
        run = functools.partial(exe.run, program, fetch_list=[])
        if program.captured is not None:
            program.captured.check()
            run = functools.partial(program.captured, run)
            if shares_inputs:
                self.inputs = program.captured.inputs
        library = native.register()
        library.paddle_resnet_async_copies.restype = ctypes.c_uint64
        self._run = functools.partial(_copy, library, variables, run)

    def __call__(self, feed):
        """Dispatch a step.

        Args:
            feed: {name: tensor}, a batch.
        Returns:
            one handle per variable; `np.asarray(handle)` waits for the value and returns it. With --kernels native, a
            handle is valid only during the next three steps.
        Raises:
            DataError: a label is not a valid class number. Labels are checked only on a CPU with Paddle's kernels.
                Custom kernels report invalid labels in the metrics (paddle_resnet/utils/meters.py).
            RunError: see cuda_graph.CapturedStep.
        """
        self._write_scalars()
        return self._run(feed)


def _copy(library, variables, run, feed):
    number = library.paddle_resnet_async_copies()
    run(feed=feed)
    return [host_metrics.AsyncCopy(library, number, i, variable) for i, variable in enumerate(variables)]


def _fetch(run, class_num, feed):
    """Run a step, and return its metrics. If the step fails with an IndexError or ValueError, class_num is not None and
    a label is not a valid class number, raise DataError."""
    try:
        return run(feed=feed, return_numpy=False)
    except (IndexError, ValueError) as e:
        if class_num is not None and not np.isin(feed["label"], np.arange(class_num)).all():
            raise DataError(NO_CLASS) from e
        raise
