"""Capture a step as a CUDA graph. The host then replays each step with one call instead of launching every kernel.

A replay uses the memory addresses of the capture, so the batch and the metrics are copied to tensors with fixed
addresses. Values that change with the step are handled outside the graph: host scalars are written before each replay
(scalars.py), and metrics are copied to the host after each replay (host_metrics.py).

Capturing requires --kernels native. Paddle's operators that check the gradients and update the loss scale cannot be
replayed, because they copy tables from host memory that is freed after the step.
"""

import contextlib
import gc
import itertools
import warnings

import numpy as np
import paddle
from paddle import static
from paddle.device.cuda.graphs import CUDAGraph

from paddle_resnet import graph
from paddle_resnet.job import exchange
from paddle_resnet.machine import compat
from paddle_resnet.step import host_metrics
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import RunError, UsageError, core

# Number of initial steps that run uncaptured, because cuDNN chooses algorithms and creates its state in these steps.
STEPS_BEFORE = 2
# The Executor requires FLAGS_sync_nccl_allreduce to be false if FLAGS_new_executor_use_cuda_graph is true.
CAPTURE_FLAGS = {"FLAGS_new_executor_use_cuda_graph": True, "FLAGS_sync_nccl_allreduce": False}
# Paddle's operators that have been tested in CUDA graphs. All custom operators (native_...) have also been tested. If a
# program contains other operators, its first captured step is compared with an uncaptured step.
TESTED = {
    *("assign", "cast", "fill_constant", "scale", "reciprocal"),
    *("conv2d", "conv2d_grad", "pool2d", "pool2d_grad", "matmul_v2", "matmul_v2_grad"),
    *("batch_norm", "batch_norm_grad", "relu", "relu_grad", "relu6", "relu6_grad", "sum", "grad_add"),
    *("elementwise_add", "elementwise_add_grad", "elementwise_mul", "elementwise_mul_grad"),
    *("flatten_contiguous_range", "flatten_contiguous_range_grad", "flip", "one_hot_v2", "reshape2"),
    *("transpose2", "transpose2_grad", "lerp", "p_norm", "fused_conv2d_add_act", "pad", "softmax"),
    *("fake_quantize_dequantize_moving_average_abs_max", "fake_channel_wise_quantize_dequantize_abs_max"),
    "stright_throuth_estimator_grad",  # Paddle's spelling
    *(compat.ALL_REDUCE, "c_sync_calc_stream", "c_sync_comm_stream", "coalesce_tensor", "depend"),
}
# RANDOM contains operators that draw random numbers but have no attribute `seed`. ON_HOST contains operators that
# access host memory.
RANDOM = {
    *("bernoulli", "multinomial", "poisson", "exponential", "dirichlet", "standard_gamma"),
    *("rrelu", "gumbel_softmax"),
}
ON_HOST = {
    *("check_finite_and_unscale", "update_loss_scaling", "assign_value", "memcpy", "memcpy_d2h", "memcpy_h2d"),
    *("print", "py_func", "where_index", "unique", "masked_select", "while", "conditional_block"),
}
# Tolerance for comparing a captured step with an uncaptured step if the kernels are not deterministic, relative to the
# largest change that the step makes to an element of the array. Kernels that are not deterministic sum in a varying
# order, so their rounding errors differ.
TOLERANCE = 0.02
_numbers = itertools.count()
_workspaces = []  # tensors that reserve memory used by captured steps; see _take_free_memory


def untested_operators(program: static.Program, is_wanted: bool, is_explicit: bool) -> list[str] | None:
    """Decide whether to capture the steps of a program.

    Args:
        program: Program for --kernels native.
        is_wanted, is_explicit: value of --cuda-graph, and whether the user set the flag.
    Returns:
        sorted list of the operators that are untested in CUDA graphs; None if steps are not captured.
    Raises:
        UsageError: the user set --cuda-graph true, but an operator cannot be captured.
    """
    if not is_wanted:
        return None
    ops = graph.block(program).ops
    for op in ops:
        reason = _obstacle(op)
        if reason is None:
            continue
        problem = f"operator {op.type} {reason}, so steps cannot be captured"
        if is_explicit:
            raise UsageError(f"--cuda-graph true: {problem}; use --cuda-graph false")
        logger.info(f"--cuda-graph false: {problem}")
        return None
    types = {op.type for op in ops}
    untested = sorted(name for name in types - TESTED if not name.startswith("native_"))
    if untested:
        logger.info(
            f"--cuda-graph true: operators untested in CUDA graphs ({', '.join(untested)}); the first captured step "
            "will be compared with an uncaptured step"
        )
    return untested


def _obstacle(op):
    """Return the reason why an operator cannot be captured, or None."""
    is_idle = op.has_attr("is_test") and op.attr("is_test")
    if (op.type in RANDOM or op.has_attr("seed")) and not is_idle:
        return "draws random numbers from Paddle's generator"
    if op.type in ON_HOST:
        return "accesses host memory"
    # In Paddle 2.6.2, replaying a graph that contains Paddle's depthwise convolutions in NHWC, which remain if
    # fusion.py does not replace them, fails with CUDA error 700.
    if op.type.startswith("depthwise_conv2d") and op.attr("data_format") == "NHWC":
        return "in NHWC has no custom kernel for this size and fails during a replay"
    return None


class CapturedStep:
    """Runs the steps of a program. The first STEPS_BEFORE steps run uncaptured. The next step is captured; this step
    and later steps are replays.

    If the size of a batch differs from the size of the first batch, as at the end of an evaluation, the step runs
    uncaptured.

    Args:
        program: static.CompiledProgram with an async copy of its metrics (host_metrics.add_copy).
        place: device of the program.
        untested: result of untested_operators.
        is_explicit: whether the user has set --cuda-graph true. If true, a difference between captured and
            uncaptured results stops the run; if false, the run continues with uncaptured steps.
    """

    def __init__(self, program, place, untested=(), is_explicit=False):
        self._place, self._untested, self._is_explicit = place, untested, is_explicit
        # An Executor frees the memory of programs that it has not run recently. To keep the memory of the captured
        # step, this class has its own Executor, which runs only two programs.
        self._exe = static.Executor(place)
        # Collective operators have the attribute ring_id. Without them, each process decides alone, because it may run
        # a program that no other process runs, for example to predict on rank 0.
        self._is_collective = any(op.has_attr("ring_id") for op in graph.block(program._program).ops)
        self.inputs, self._copy_program, self._program = _split(program)
        self._shapes, self._steps = None, 0
        self._graph = self._captured_at = None

    def __call__(self, run_with_feed, feed):
        """Run a step. If the batch has a different size than the first batch, call run_with_feed instead.

        Raises:
            RunError: the step cannot be captured, or --cuda-graph true is set and a captured step has different results
                than an uncaptured step.
        """
        shapes = {name: value.shape() for name, value in feed.items()}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            run_with_feed(feed=feed)
            return
        for name, value in feed.items():
            if value is not self.inputs[name]:  # otherwise, the loader has written the batch to the input
                self.inputs[name]._copy_from(value, self._place)
        if self._graph is None and self._steps >= STEPS_BEFORE:
            (self._compare if self._untested else self._capture)()
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        self._steps += 1
        self._exe.run(self._copy_program, fetch_list=[])

    def check(self) -> None:
        """Discard the captured step if another program has moved a tensor since the capture.

        If one process discards its captured step of a collective program, all processes discard theirs, because NCCL
        requires that either all processes capture an all-reduce or no process does.
        """
        if self._is_true_anywhere(self._graph is not None and self._addresses() != self._captured_at):
            self._discard()
            self._steps = 0

    def _is_true_anywhere(self, condition):
        """Return whether a condition is true in this process or, if the program is collective, in any process."""
        return bool(exchange.all_gather([bool(condition)]).any() if self._is_collective else condition)

    def _run(self):
        self._exe.run(self._program, fetch_list=[])

    def _discard(self):
        if self._graph is not None:
            self._graph.reset()
        self._graph = None

    def _compare(self):
        """Capture the step, compare its results with those of an uncaptured step, and reset the variables to their
        values before the step. If the results differ in this process or, with a collective program, in any process,
        discard the captured step. All later steps then run uncaptured; if the user has set --cuda-graph true, raise
        RunError instead. A second uncaptured step shows whether the results differ even without capturing."""
        before = self._values()
        self._run()
        expected = self._values()
        self._set(before)
        self._capture()
        self._graph.replay()
        tolerance = 0 if _is_deterministic(self._place) else TOLERANCE
        differing = _differing(self._values(), expected, before, tolerance)
        self._set(before)
        if self._is_true_anywhere(differing):
            self._discard()
            self._steps = -np.inf
            self._run()
            changing = _differing(self._values(), expected, before, tolerance)
            self._set(before)
            problem = _problem(differing, changing, self._is_true_anywhere(changing), self._untested)
            if self._is_explicit:
                raise RunError(f"--cuda-graph true: {problem}; use --cuda-graph false")
            logger.warn(f"--cuda-graph false: {problem}")
        self._untested = ()

    def _values(self):
        return {name: np.array(static.global_scope().find_var(name).get_tensor()) for name in self._addresses()}

    def _set(self, values):
        for name, array in values.items():
            value = paddle.base.core.LoDTensor()
            value.set(array, paddle.CPUPlace())
            static.global_scope().find_var(name).get_tensor()._copy_from(value, self._place)
        if isinstance(self._place, paddle.CUDAPlace):
            paddle.device.cuda.synchronize(self._place)

    def _capture(self):
        paddle.device.cuda.synchronize(self._place)
        paddle.device.cuda.empty_cache()  # free the memory of the first steps; the graph allocates its own memory
        graph = CUDAGraph(self._place)
        _workspaces.clear()  # captured steps can share workspaces, because they never run concurrently
        try:
            with _capturing():
                graph.capture_begin()
                try:
                    self._run()
                except BaseException:
                    with contextlib.suppress(Exception):  # an error of capture_end() must not hide the step's error
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as e:
            raise RunError(f"--cuda-graph true: the step cannot be captured ({core(e)}); use --cuda-graph false") from e
        finally:
            _workspaces.extend(_take_free_memory(self._place))
        self._graph, self._captured_at = graph, self._addresses()

    def _addresses(self):
        """Return {name: address} of the tensors that persist after a step."""
        scope = static.global_scope()
        names = [variable.name for variable in self._program._program.list_vars() if variable.persistable]
        variables = [scope.find_var(name) for name in names]
        return {
            name: variable.get_tensor()._ptr()
            for name, variable in zip(names, variables, strict=True)
            if variable is not None and variable.get_tensor()._is_initialized()
        }


def _problem(differing, changing, is_changing, untested):
    """Return why a step is not captured.

    Args:
        differing: arrays of this process that a captured and an uncaptured step compute differently.
        changing: arrays of this process that two uncaptured steps compute differently.
        is_changing: whether any process has such an array.
        untested: untested operators of the program.
    """
    operators = ", ".join(untested)
    if is_changing:
        names = ", ".join(changing[:3]) or "in another process"
        return (
            f"two uncaptured steps have different results ({names}), so a captured step with the untested operators "
            f"{operators} cannot be checked"
        )
    names = ", ".join(differing[:3]) or "in another process"
    return (
        f"a captured and an uncaptured step have different results ({names}), because one of the operators {operators} "
        "cannot be captured"
    )


def _is_deterministic(place):
    flag = "FLAGS_cudnn_deterministic"
    return not isinstance(place, paddle.CUDAPlace) or paddle.get_flags(flag)[flag]


def _differing(actual, expected, before, tolerance):
    """Return the names of the arrays whose elements differ by more than `tolerance` times the largest finite change of
    an element of the array in the step, or whose NaNs or infinite elements differ."""
    names = []
    for name, array in expected.items():
        with np.errstate(invalid="ignore"):  # an element may remain infinite
            changes = np.abs(array.astype(np.float64) - before[name])
        scale = changes[np.isfinite(changes)].max(initial=0)
        if not np.allclose(actual[name], array, rtol=0, atol=tolerance * scale, equal_nan=True):
            names.append(name)
    return names


def _take_free_memory(place):
    """Return tensors that occupy all free memory of Paddle's regular pool.

    During a capture, Paddle allocates cuDNN's workspaces in this pool instead of in the graph's memory, and frees
    them afterwards. Replays write to cuDNN's workspaces, so no other tensor may use the memory of the workspaces.
    """
    taken, grown = [], []
    # Start with tensors of 1 MiB, so that the pool grows only slightly, and end with 256 bytes, the size of the
    # smallest block in the pool.
    for size in (2**n for n in range(20, 7, -1)):
        while True:
            reserved = paddle.device.cuda.memory_reserved(place)
            tensor = paddle.framework.core.LoDTensor()
            tensor._set_dims([size])
            tensor._mutable_data(place, paddle.base.core.VarDesc.VarType.UINT8)
            if paddle.device.cuda.memory_reserved(place) > reserved:  # the pool had no free block of this size
                grown.append(tensor)
                break
            taken.append(tensor)
    return taken


@contextlib.contextmanager
def _capturing():
    """Set Paddle's flags for a capture and disable garbage collection, because freeing GPU memory aborts a capture."""
    before = paddle.get_flags(list(CAPTURE_FLAGS))
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    paddle.set_flags(CAPTURE_FLAGS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns that the learning rate is not captured
            yield
    finally:
        paddle.set_flags(before)
        if collects:
            gc.enable()


def _split(program):
    """Split a compiled program into a program to capture and a program that copies the metrics to the host.

    Returns:
        ({name: persistent input tensor}, program with the async copy, compiled program to capture). The captured
        program reads the persistent inputs and copies the metrics to persistent variables.
    """
    copy = program._program.clone()
    block = graph.block(copy)
    async_copy = next(op for op in block.ops if op.type == host_metrics.OPERATOR)
    metrics = [block.var(name) for name in async_copy.input_arg_names]
    feeds = list(graph.feeds(copy))
    graph.remove(block, [async_copy])
    graph.sync(block)
    # Persistable variables of different programs share a tensor if they have the same name. Therefore, a number makes
    # the names unique to this program.
    number = next(_numbers)
    names = {name: f"{name}@captured_{number}" for name in (*feeds, *(v.name for v in metrics))}
    for name in feeds:
        graph.rename(block, name, names[name])
        block.var(names[name]).persistable = True
    copy_program = static.Program()
    for v in metrics:
        # Custom operators cannot write directly to persistable variables, because they allocate their outputs. Memory
        # that is allocated during a capture belongs to the graph, and a variable would outlive this memory. Paddle's
        # assign writes to the existing memory of the variable.
        for target in (block, graph.block(copy_program)):
            target.create_var(name=names[v.name], shape=v.shape, dtype=v.dtype, persistable=True)
        block.append_op(type="assign", inputs={"X": block.var(v.name)}, outputs={"Out": block.var(names[v.name])})
    with static.program_guard(copy_program):
        host_metrics.add_copy(graph.block(copy_program).var(names[v.name]) for v in metrics)
    scope = static.global_scope()
    inputs = {name: scope.var(names[name]).get_tensor() for name in feeds}
    return inputs, copy_program, static.CompiledProgram(copy, build_strategy=program._build_strategy)
