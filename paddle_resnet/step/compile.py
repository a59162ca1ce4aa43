"""Compile a program for the Executor."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from paddle import static

from paddle_resnet import graph
from paddle_resnet.components import accumulation, optimizer, precision
from paddle_resnet.job import processes
from paddle_resnet.native import build as native
from paddle_resnet.optimizers import table
from paddle_resnet.passes import fusion, gradients, statistics
from paddle_resnet.settings.field import about
from paddle_resnet.step import cuda_graph, facts, scalars, trace
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

# Attributes of BuildStrategy that enable fused operators and gradient sums in place for training on a GPU.
# `fuse_elewise_add_act_ops` is not among them, because it changes results
# (findings/paddle_fused_additions_change_results.sh).
FUSED_OPERATORS = ("fuse_bn_act_ops", "fuse_bn_add_act_ops", "enable_addto")
# Operators that use oneDNN on a CPU in NCHW. With Paddle's own depthwise convolutions, a training step of
# EfficientNet_Lite0 takes five times as long (1.71 instead of 0.34 s of CPU time with 16 images of 64 px; n = 5).
ONEDNN = ("conv2d", "conv2d_grad", "depthwise_conv2d", "depthwise_conv2d_grad")


@dataclass(frozen=True)
class Options:
    """The flags that determine a compiled step; see `train.py --help all`."""

    accumulate_steps: int
    cuda_graph: bool
    data_layout: str
    device: str
    kernels: str
    optimizer: str
    output_dir: str
    profile_steps: list[int] | None
    run_scope: RunScope
    has_explicit_graph: bool = about("is_explicit", "cuda_graph")


class CompiledStep(static.CompiledProgram):
    """A compiled program with the parts of a run that belong to it.

    Attributes:
        source: the program that compile_prog has received.
        captured: cuda_graph.CapturedStep, or None if steps are not captured.
        write_scalars: scalars.Writer.
        trace: trace.Trace of the first pass over the loader until trace.start takes it; otherwise, None.
        accumulating: compiled program for all batches of a training step except the last, or None if each step has one
            batch (--accumulate-steps 1).
    """

    def __init__(self, program, strategy, source, place):
        super().__init__(program, build_strategy=strategy)
        self.source, self.write_scalars = source, scalars.Writer(program, place)
        self.captured: cuda_graph.CapturedStep | None = None
        self.trace: trace.Trace | None = None
        self.accumulating: CompiledStep | PirStep | None = None

    def step(self, exe: static.Executor, variables: Sequence[static.Variable]) -> Callable:
        """Return a function with the arguments of Executor.run that runs a step and fetches `variables`."""
        return functools.partial(exe.run, self, fetch_list=variables)


class PirStep:
    """Like CompiledStep, for a PIR program, which the Executor compiles in the first step.

    Args:
        variable_of: function that returns the variable of the program for a variable of `source`.
    """

    def __init__(self, program, source, place, variable_of):
        self._program, self._variable_of = program, variable_of
        self.source, self.write_scalars = source, scalars.Writer(program, place)
        self.captured = None
        self.trace: trace.Trace | None = None
        self.accumulating: CompiledStep | PirStep | None = None

    def step(self, exe: Any, variables: Sequence[static.Variable]) -> Callable:
        """Return a function with the arguments of Executor.run that runs a step and fetches `variables`. The next step
        would overwrite the tensors that the Executor returns, so the function returns copies."""
        run = functools.partial(exe.run, self._program, fetch_list=[*map(self._variable_of, variables)])
        return lambda **arguments: [np.array(tensor) for tensor in run(**arguments)]


def build_strategy(options: Options, is_train: bool) -> Any:
    """Return Paddle's BuildStrategy for a program. See program.create_strategy."""
    processes.check_resolved(options.device)
    strategy = static.BuildStrategy()
    if options.device == "gpu" and is_train:
        for name in FUSED_OPERATORS:
            setattr(strategy, name, True)
    return strategy


def compile_step(options: Options, program: static.Program, is_train: bool) -> CompiledStep | PirStep:
    """Return the CompiledStep or PirStep of a program, which is not modified. See program.compile_prog."""
    processes.check_resolved(options.device)
    if facts.of(program).optimizer is None:
        _check_rule(options.optimizer, program)
    compiled = _compile(options, program, is_train)
    if is_train and options.accumulate_steps > 1:
        compiled.accumulating = _compile(options, program, is_train, accumulation.remove_update)
    return compiled


def _check_rule(name, program):
    """Raise UsageError if a program that build has not built would be trained with a different optimizer, because
    Paddle lacks the rule of --optimizer."""
    others = graph.updates(program)
    if table.OPTIMIZERS[name].rewrite and others:
        raise UsageError(
            f"--optimizer {name}: Paddle lacks this update rule, and the program contains a different one (operator "
            f"{others[0].type}); build the program with program.build, or set --optimizer to the program's optimizer"
        )


def _compile(options, source, is_train, change=lambda program: None):
    """Return the compiled step of a copy of a program to which `change` has been applied."""
    program, variable_of = graph.clone(source)
    facts.share(source, program)
    change(program)
    place = processes.place(options.device)
    if not graph.is_legacy(program):
        statistics.keep_statistics_finite(program)
        return _traced(options, PirStep(program, source, place, variable_of), is_train)
    if options.device == "cpu" and options.data_layout == "NCHW":
        _use_onednn(program)
    gradients.complete_additions(program)
    if options.kernels == "native":
        fusion.fuse(program, uses_onednn=options.device == "cpu" and native.has_onednn())
        _update_natively(program)
    else:
        statistics.keep_statistics_finite(program)
    gradients.separate_padded_sums(program)
    if options.device == "gpu":
        _warn_of_depthwise(options.kernels, fusion.paddle_depthwise(program))
    strategy = build_strategy(options, is_train)
    compiled = _traced(options, CompiledStep(program, strategy, source, place), is_train)
    if options.kernels == "native":
        untested = cuda_graph.untested_operators(program, options.cuda_graph, options.has_explicit_graph)
        if untested is not None:
            compiled.captured = cuda_graph.CapturedStep(compiled, place, untested, options.has_explicit_graph)
    return compiled


def _traced(options, compiled, is_train):
    """Return a compiled step, with a trace of its first pass over the loader if --profile-steps requires one."""
    if options.profile_steps is not None and is_train == options.run_scope.trains:
        compiled.trace = trace.Trace(
            options.profile_steps, trace.path(options.profile_steps, options.output_dir), options.device
        )
    return compiled


def _update_natively(program):
    """Replace Paddle's update operators in a program that build has not built, if all of them implement the same rule
    of optimizers/table.py. Otherwise, none is replaced: if only some were, Paddle's remaining update operators could
    not read the factor that unscales the gradients. Raises the errors of check_natively."""
    rule, *others = {table.rule_of(op) for op in graph.updates(program)} or {None}
    if rule is not None and not others:
        block = graph.block(program)
        optimizer.update_natively(block, rule, precision.check_natively(block))


def _use_onednn(program):
    """Compute convolutions with oneDNN, which is faster (see ONEDNN), but whose filter gradients are wrong in NHWC.
    Other operators of oneDNN fail, such as the gradient of `mean` for the scalar loss."""
    for op in graph.block(program).ops:
        if op.type in ONEDNN:
            # Use conv2d instead of Paddle's depthwise operator, which multiplies one small matrix per channel.
            graph.set_type(op, op.type.removeprefix("depthwise_"))
            graph.set_attr(op, "use_mkldnn", True)


@functools.cache  # warn only once, although both the training and the evaluation program contain these layers
def _warn_of_depthwise(kernels, paddle_layers):
    if not paddle_layers:
        return
    if kernels == "paddle":
        logger.warn(
            "--kernels paddle: the network has depthwise convolutions, which Paddle's kernels compute; use "
            "--kernels native"
        )
        return
    effect = "Paddle's NHWC kernels for such layers cannot be captured as a CUDA graph on a GPU"
    limits = "3x3 or 5x5, stride 1 or 2, no dilation, a multiple of 4 channels"
    logger.warn(
        f"depthwise convolution ({'; '.join(paddle_layers)}): not supported by the custom kernels (supported: "
        f"{limits}), and {effect}; change the layer, or use --data-layout NCHW"
    )


def fused_operators(device: str, compiled: CompiledStep) -> dict[str, int]:
    """Compile a program before its first step, and count its fused operators.

    Args:
        device: "cpu" or "gpu".
        compiled: result of compile_prog; the Executor reuses the compilation.
    Returns:
        {operator: count} for Paddle's fused operators (fused_...) and custom operators (native_...). PIR programs have
        none.
    """
    if isinstance(compiled, PirStep):
        return {}
    compiled._compile(static.global_scope(), processes.place(device))
    types = Counter(node.name() for node in compiled._graph.nodes() if node.is_op())
    return {name: count for name, count in sorted(types.items()) if name.startswith(("fused_", "native_"))}
