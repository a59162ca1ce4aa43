"""Correct the all-reduces that Fleet inserts, count all-reduces, and average BN statistics over the processes."""

import paddle
from paddle import static

from paddle_resnet import graph
from paddle_resnet.components import quantization
from paddle_resnet.job import fleet, processes
from paddle_resnet.machine import compat
from paddle_resnet.step import facts

_NCCL_OPERATORS = ("c_sync_comm_stream", "c_sync_calc_stream", "c_comm_init", "c_gen_nccl_id")


def adapt_communication(main_prog: static.Program, startup_prog: static.Program, device: str) -> None:
    """Correct the operators that Fleet inserts into the programs of a multi-process run. The programs are modified in
    place."""
    if processes.world_size() == 1:
        return
    _order_fused_all_reduces(graph.block(main_prog))
    if compat.HAS_CALC_STREAM and fleet.reduces_at_the_end(device):
        for op in graph.block(main_prog).ops:
            if op.type == compat.ALL_REDUCE:
                graph.set_attr(op, "use_calc_stream", True)
    if device == "cpu":
        for program in (main_prog, startup_prog):
            _remove_nccl(graph.block(program))


def _order_fused_all_reduces(block):
    """Make every fused all-reduce depend on all gradients in its buffer.

    A fused all-reduce reads only the buffer, so the program does not express that the all-reduce depends on the
    operators that compute the gradients. The Executor infers dependencies on gradients, but misses those on BN
    gradients if BN and ReLU are fused under AMP. Without the added dependencies, BN gradients would differ between the
    processes, and the parameters would diverge.
    """
    gradients = {op.output("FusedOutput")[0]: op.output("Output") for op in block.ops if op.type == "coalesce_tensor"}
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        if op.type == compat.ALL_REDUCE and op.input_arg_names[0] in gradients:
            buffer = block.var(op.input_arg_names[0])
            inputs = {"X": buffer, "Dep": [block.var(name) for name in gradients[buffer.name]]}
            graph.insert(block, i, "depend", inputs, {"Out": buffer}, op.attr("op_role"))
    graph.sync(block)


def _remove_nccl(block):
    """Remove the operators that only NCCL needs, so that the all-reduces run on CPUs over Gloo."""
    graph.remove(block, [op for op in block.ops if op.type in _NCCL_OPERATORS])
    graph.sync(block)


def count_gradient_all_reduces(train_prog: static.Program) -> int:
    """Return the number of gradient all-reduces in a training step after all-reduces have been fused."""
    ops = graph.block(train_prog).ops
    return sum(op.type == compat.ALL_REDUCE and bool(op.attr("op_role") & graph.BACKWARD) for op in ops)


def average_bn(exe: static.Executor, train_prog: static.Program) -> None:
    """Replace the variables that own_statistics() returns with their means over the processes.

    Each process updates the variables with its own images. Call average_bn() before an evaluation or a checkpoint,
    so that all processes evaluate the network that the checkpoint contains.

    Args:
        exe: static.Executor.
        train_prog: training Program; its variables are in the global scope.
    """
    if processes.world_size() == 1:
        return
    known = facts.of(train_prog)
    known.bn_average = known.bn_average or _bn_average(train_prog)
    exe.run(known.bn_average)


def _bn_average(train_prog):
    average_prog = static.Program()
    block = graph.block(average_prog)
    with static.program_guard(average_prog):
        for name in own_statistics(train_prog):
            source = graph.block(train_prog).var(name)
            value = block.create_var(name=name, shape=source.shape, dtype=source.dtype, persistable=True)
            compat.append_all_reduce(block, value)
            paddle.assign(paddle.scale(value, 1 / processes.world_size()), output=value)
    return average_prog


def own_statistics(train_prog: static.Program) -> list[str]:
    """Return the names of variables that differ between processes: the running means and variances of BN layers that
    are not frozen, variables that follow them (facts.State, such as those of --ema), and the ranges of quantized
    activations (--qat)."""
    names = bn_statistics(train_prog, includes_frozen=False)
    followers = [
        state.variables[name] for state in facts.of(train_prog).states for name in names if name in state.variables
    ]
    return [*names, *followers, *quantization.ranges(train_prog)]


def bn_statistics(train_prog: static.Program, includes_frozen: bool = True) -> list[str]:
    """Return the names of the running means and variances of the trained network in a training program, without those
    of --teacher. If includes_frozen is false, omit those of frozen BN layers."""
    ops = _bn_layers(train_prog, includes_frozen)
    return [name for op in ops for name in (*op.output("MeanOut"), *op.output("VarianceOut"))]


def bn_momentum(train_prog: static.Program) -> float:
    """Return the largest momentum of the BN layers that are not frozen; 0 if there are none."""
    return max((op.attr("momentum") for op in _bn_layers(train_prog, includes_frozen=False)), default=0)


def _bn_layers(train_prog, includes_frozen):
    ops = [op for op in graph.block(train_prog).ops if "MeanOut" in op.output_names]
    ops = [op for op in ops if not (op.has_attr("is_test") and op.attr("is_test"))]  # omit the layers of --teacher
    if not includes_frozen:
        ops = [op for op in ops if not (op.has_attr("use_global_stats") and op.attr("use_global_stats"))]
    return ops
