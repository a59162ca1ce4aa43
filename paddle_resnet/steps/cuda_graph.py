"""A step recorded once as a CUDA graph: from then on the host launches it by one call instead of a thousand.

The kernels of a graph read and write the addresses at which they were recorded. So the batch and the metrics are copied
into tensors that stay. What changes from step to step comes from outside: the learning rate before the graph, the copy
of the metrics to the host after it (host_metrics.py).

Paddle's operators for the finite check and the loss scale cannot be repeated: they copy tables from host memory that no
longer exists. Hence --kernels native only.
"""

import contextlib
import functools
import gc
import itertools
import warnings
import weakref

import numpy as np
import paddle
from paddle import static
from paddle.device.cuda.graphs import CUDAGraph

from paddle_resnet import compat
from paddle_resnet.job import exchange, processes
from utils import logger
from utils.errors import RunError, UsageError, core

# The first steps choose algorithms and create cuDNN's state: they run operator by operator.
STEPS_BEFORE = 2
# The executor requires the second with the first.
CAPTURE_FLAGS = {"FLAGS_new_executor_use_cuda_graph": True, "FLAGS_sync_nccl_allreduce": False}
# Paddle's operators that were tested to repeat in a graph; the project's own (native_...) all do. Steps with others are
# not captured: one that draws random numbers, for example, may draw the same ones in each step. After a capture of
# depthwise_conv2d in NHWC (Paddle 2.6.2), launches ended with CUDA error 700.
REPEATABLE = {
    *("assign", "cast", "fill_constant", "scale", "reciprocal"),
    *("conv2d", "conv2d_grad", "pool2d", "pool2d_grad", "matmul_v2", "matmul_v2_grad"),
    *("batch_norm", "batch_norm_grad", "relu", "relu_grad", "relu6", "relu6_grad", "sum", "grad_add"),
    *("elementwise_add", "elementwise_add_grad", "elementwise_mul", "elementwise_mul_grad"),
    *("flatten_contiguous_range", "flatten_contiguous_range_grad"),
    *(compat.ALL_REDUCE, "c_sync_calc_stream", "c_sync_comm_stream", "coalesce_tensor", "depend"),
}
_numbers = itertools.count()
_recorders = weakref.WeakKeyDictionary()  # {compiled program: its Recorder}: one recording serves all epochs


def resolve(args, program):
    """Let steps run operator by operator if a program has an operator that is not in REPEATABLE; changes the flags.

    Args:
        args: flags.
        program: rewritten for --kernels native.
    Raises:
        UsageError: --cuda-graph true is explicit.
    """
    types = {op.type for op in program.global_block().ops}
    others = sorted(name for name in types - REPEATABLE if not name.startswith("native_"))
    if not args.cuda_graph or not others:
        return
    problem = f"operator {', '.join(others)} cannot be repeated in a CUDA graph, or is untested there"
    if "cuda_graph" in args.given:
        raise UsageError(f"--cuda-graph true: {problem}; use --cuda-graph false")
    logger.info(f"--cuda-graph false: {problem}")
    args.cuda_graph = False


def recorder(args, exe, program, variables, post):
    """How to run a step of a compiled program.

    Args:
        args: flags.
        exe: static.Executor, for batches of another size.
        program: result of program.compile_prog.
        variables: the metrics that the program posts.
        post: host_metrics.post.
    Returns:
        function of `feed`.
    """
    if program not in _recorders:
        _recorders[program] = Recorder(args, program, variables, post)
    _recorders[program].check()
    return functools.partial(_recorders[program], functools.partial(exe.run, program, fetch_list=[]))


def inputs(args, program):
    """The tensors that a recorded step reads, {name: tensor}; a loader that writes there saves a copy.

    Empty if steps are not recorded or the loader is on another device: writing would move a tensor there.
    """
    is_there = args.dali_device == args.device and program in _recorders
    return _recorders[program].inputs if is_there else {}


class Recorder:
    """Runs the steps of a program: the first ones operator by operator, then one that it records, then launches of it.

    A batch of another size than the first, such as the last of an evaluation, runs operator by operator.

    Args:
        args: flags.
        program: result of program.compile_prog.
        variables: the metrics that the program posts.
        post: host_metrics.post.
    """

    def __init__(self, args, program, variables, post):
        self._place = processes.place(args)
        # An Executor forgets programs that it has not run for long, and frees their memory. This one has only two.
        self._exe = static.Executor(self._place)
        self.inputs, self._posting, self._program = _split(program, variables, post)
        self._lr_scheduler = getattr(program._program, "lr_scheduler", None)
        self._shape, self._steps = None, 0
        self._graph, self._recorded_at, self._workspaces = None, None, None

    def __call__(self, run_with_feed, feed):
        """Run a step; a batch of another size goes to run_with_feed."""
        shape = feed["data"].shape()
        self._shape = self._shape or shape
        if shape != self._shape:
            run_with_feed(feed=feed)
            return
        for name, value in feed.items():
            if value is not self.inputs[name]:  # unless the loader wrote it there
                self.inputs[name]._copy_from(value, self._place)
        if self._graph is None and self._steps >= STEPS_BEFORE:
            self._record()
        if self._graph is None:
            self._exe.run(self._program, fetch_list=[])
        else:
            self._set_learning_rate()
            self._graph.replay()
        self._steps += 1
        self._exe.run(self._posting, fetch_list=[])

    def check(self):
        """Drop the recording if another program has moved a tensor since.

        All processes drop it or none: NCCL requires that all record an all-reduce, or none.
        """
        has_moved = self._graph is not None and self._addresses() != self._recorded_at
        if exchange.all_gather([has_moved]).any():
            if self._graph is not None:
                self._graph.reset()
            self._graph, self._workspaces, self._steps = None, None, 0

    def _set_learning_rate(self):
        if self._lr_scheduler is None:
            return
        lr = paddle.base.core.LoDTensor()
        lr.set(np.array([self._lr_scheduler()], "float32"), paddle.CPUPlace())
        static.global_scope().find_var(self._lr_scheduler._var_name).get_tensor()._copy_from(lr, self._place)

    def _record(self):
        paddle.device.cuda.synchronize(self._place)
        paddle.device.cuda.empty_cache()  # the memory of the first steps: the graph has its own
        graph = CUDAGraph(self._place)
        try:
            with _recording():
                graph.capture_begin()
                try:
                    self._exe.run(self._program, fetch_list=[])
                except BaseException:
                    with contextlib.suppress(Exception):  # the first error is the one to report
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as e:
            raise RunError(f"the step cannot be recorded as a CUDA graph ({core(e)}): give --cuda-graph false") from e
        self._graph, self._recorded_at = graph, self._addresses()
        self._workspaces = _take_free_memory(self._place)

    def _addresses(self):
        """{name: address} of the tensors that outlive a step."""
        scope = static.global_scope()
        names = [variable.name for variable in self._program._program.list_vars() if variable.persistable]
        found = [scope.find_var(name) for name in names]
        return {
            name: variable.get_tensor()._ptr()
            for name, variable in zip(names, found, strict=True)
            if variable is not None and variable.get_tensor()._is_initialized()
        }


def _take_free_memory(place):
    """Tensors in all memory that Paddle's ordinary pool has and does not use.

    While it records, too, Paddle takes the workspaces of cuDNN from this pool and gives them back. The launches of the
    graph write there: nothing else may be in this memory, and it must stay mapped.
    """
    taken, grown = [], []
    # From 1 MiB, so that the pool grows by little, to 256 bytes, its smallest block.
    for size in (2**n for n in range(20, 7, -1)):
        while True:
            reserved = paddle.device.cuda.memory_reserved(place)
            tensor = paddle.framework.core.LoDTensor()
            tensor._set_dims([size])
            tensor._mutable_data(place, paddle.base.core.VarDesc.VarType.UINT8)
            if paddle.device.cuda.memory_reserved(place) > reserved:  # the pool had no block of this size left
                grown.append(tensor)
                break
            taken.append(tensor)
    return taken


@contextlib.contextmanager
def _recording():
    """Set Paddle's flags for recording, without garbage collection: freeing GPU memory ends a recording."""
    before = paddle.get_flags(list(CAPTURE_FLAGS))
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    paddle.set_flags(CAPTURE_FLAGS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns that the learning rate is not recorded
            yield
    finally:
        paddle.set_flags(before)
        if collects:
            gc.enable()


def _split(program, variables, post):
    """Divide a compiled program into what a graph records and what stays outside.

    Returns:
        (input tensors that stay; a program that posts the metrics; the compiled rest, which reads these inputs and
        copies the metrics into variables that the Executor keeps).
    """
    copy = program._program.clone()
    block = copy.global_block()
    block._remove_op(next(i for i, op in enumerate(block.ops) if op.type == "native_post"))
    # Persistable variables of one name are one tensor in all programs. These must be this program's own.
    number = next(_numbers)
    names = {name: f"{name}@recorded_{number}" for name in ("data", "label", *(v.name for v in variables))}
    for name in ("data", "label"):
        block._rename_var(name, names[name])
        block.var(names[name]).persistable = True
    posts = static.Program()
    for v in variables:
        # Custom operators allocate their results. Memory that a recording allocates is the graph's, and must not
        # outlive it in a persistable variable. Paddle's copy writes where the variable already is.
        for target in (block, posts.global_block()):
            target.create_var(name=names[v.name], shape=v.shape, dtype=v.dtype, persistable=True)
        block.append_op(type="assign", inputs={"X": block.var(v.name)}, outputs={"Out": block.var(names[v.name])})
    with static.program_guard(posts):
        post(posts.global_block().var(names[v.name]) for v in variables)
    scope = static.global_scope()
    inputs = {name: scope.var(names[name]).get_tensor() for name in ("data", "label")}
    return inputs, posts, static.CompiledProgram(copy, build_strategy=program._build_strategy)
