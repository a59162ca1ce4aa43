"""Dispatch of a step: host scalars, then the program or its CUDA graph, then handles of the metrics."""

import ctypes
import functools

import numpy as np

from paddle_resnet.native import build as native
from paddle_resnet.steps import host_metrics
from utils.errors import NO_CLASS, DataError


class Dispatcher:
    """Dispatches steps of a compiled program.

    Args:
        exe: static.Executor.
        program: result of program.compile_prog.
        variables: the metrics of each step; with --kernels native, those of the program's async copy.
        is_native: --kernels native.
        class_num: number of classes, to check the labels of a step that fails; None if they cannot be checked.
        shares_inputs: whether loader and program use the same device.

    Attributes:
        inputs: {name: tensor} that captured steps read. A loader can write to them to save a copy. Empty if steps are
            not captured, or if the loader uses a different device, because writing would move the tensors to it.
    """

    def __init__(self, exe, program, variables, is_native, class_num=None, shares_inputs=True):
        self._write_scalars = program.write_scalars
        self.inputs = {}
        if not is_native:
            run = functools.partial(exe.run, program, fetch_list=variables)
            self._run = functools.partial(_fetch, run, class_num)
            return
        if not any(op.type == host_metrics.OPERATOR for op in program._program.global_block().ops):
            raise RuntimeError("the program has no async copy of its metrics; build it with --kernels native")
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
            a handle for each variable; `np.asarray(handle)` waits for the value. With --kernels native, a handle is
            valid for the next three steps.
        Raises:
            DataError: a label is not a class, on a CPU with Paddle's kernels. Custom kernels report it in the
                metrics (utils/meters.py).
        """
        self._write_scalars()
        return self._run(feed)


def _copy(library, variables, run, feed):
    number = library.paddle_resnet_async_copies()
    run(feed=feed)
    return [host_metrics.AsyncCopy(library, number, i, variable) for i, variable in enumerate(variables)]


def _fetch(run, class_num, feed):
    """Run a step. If it fails, check the labels, unless class_num is None."""
    try:
        return run(feed=feed, return_numpy=False)
    except (IndexError, ValueError) as e:
        if class_num is not None and not np.isin(feed["label"], np.arange(class_num)).all():
            raise DataError(NO_CLASS) from e
        raise
