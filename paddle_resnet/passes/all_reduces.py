"""The all-reduces of a data-parallel program: what Fleet writes, corrected; their count; BN statistics averaged."""

import paddle
from paddle import static

from paddle_resnet import compat
from paddle_resnet.job import fleet, processes

_NCCL_OPERATORS = ("c_sync_comm_stream", "c_sync_calc_stream", "c_comm_init", "c_gen_nccl_id")


def adapt_communication(args, main_prog, startup_prog):
    """Correct in place what Fleet writes into the programs of a job of several processes."""
    if processes.world_size() == 1:
        return
    _order_fused_all_reduces(main_prog.global_block())
    if compat.HAS_CALC_STREAM and fleet.reduces_at_the_end(args):
        for op in main_prog.global_block().ops:
            if op.type == compat.ALL_REDUCE:
                op._set_attr("use_calc_stream", True)
    if args.device == "cpu":
        for program in (main_prog, startup_prog):
            _leave_out_nccl(program.global_block())


def _order_fused_all_reduces(block):
    """Let every fused all-reduce wait for all gradients in its buffer.

    The all-reduce reads the buffer by its own name, so the Executor sees no dependency on the operators that write the
    gradients inside. It guesses them, and misses the BN gradients once BN and ReLU are fused under AMP. Those would
    differ between the processes, whose parameters would drift apart.
    """
    gradients = {op.output("FusedOutput")[0]: op.output("Output") for op in block.ops if op.type == "coalesce_tensor"}
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        if op.type == compat.ALL_REDUCE and op.input_arg_names[0] in gradients:
            buffer = op.input_arg_names[0]
            block._insert_op_without_sync(
                i,
                type="depend",
                inputs={"X": block.var(buffer), "Dep": [block.var(name) for name in gradients[buffer]]},
                outputs={"Out": block.var(buffer)},
                attrs={"op_role": op.attr("op_role")},
            )
    block._sync_with_cpp()


def _leave_out_nccl(block):
    """Remove the operators that only NCCL needs: the all-reduces then run on CPUs over Gloo."""
    for i in reversed(range(len(block.ops))):
        if block.ops[i].type in _NCCL_OPERATORS:
            block._remove_op(i)
    block._sync_with_cpp()


def count_gradient_all_reduces(train_prog):
    """The number of all-reduces of gradients in a training step, after fusing."""
    backward = int(paddle.base.core.op_proto_and_checker_maker.OpRole.Backward)
    ops = train_prog.global_block().ops
    return sum(op.type == compat.ALL_REDUCE and bool(op.attr("op_role") & backward) for op in ops)


def bn_averager(exe, train_prog):
    """A function without arguments that replaces the BN statistics of a training program by their mean over the
    processes.

    Each process follows the statistics of its own images. Averaged before an evaluation or a checkpoint, they let all
    processes score with the same network, the one that is saved.

    Args:
        exe: static.Executor.
        train_prog: training Program; its variables are in the global scope.
    """
    if processes.world_size() == 1:
        return lambda: None
    average_prog = static.Program()
    block = average_prog.global_block()
    with static.program_guard(average_prog):
        for name in bn_statistics(train_prog):
            source = train_prog.global_block().var(name)
            value = block.create_var(name=name, shape=source.shape, dtype=source.dtype, persistable=True)
            compat.append_all_reduce(block, value)
            paddle.assign(paddle.scale(value, 1 / processes.world_size()), output=value)
    return lambda: exe.run(average_prog)


def bn_statistics(train_prog):
    """Names of the running means and variances of a training program."""
    ops = [op for op in train_prog.global_block().ops if "MeanOut" in op.output_names]
    return [name for op in ops for name in (*op.output("MeanOut"), *op.output("VarianceOut"))]
