"""Gradient accumulation (--accumulate-steps K). The accumulating program runs on the first K - 1 batches of a step. It
adds the gradients of these batches to sums and does not update the parameters. The training program runs on the last
batch, adds the sums to its gradients, and updates the parameters. The sums are float32, because small gradients would
be lost in half-precision sums.

Neither program contains conditional operators, so both can be captured as CUDA graphs. Gradients are all-reduced,
checked, unscaled and clipped once per update.
"""

import itertools

import paddle
from paddle import static

from paddle_resnet.machine import compat
from paddle_resnet.optimizers import table

SCOPE = "accumulate"  # name scope of the operators that add_sums inserts
PREFIX = "accumulated."  # prefix of the sums; checkpoints omit sums, because they are 0 after each update
_COMMUNICATION = (compat.ALL_REDUCE, "c_sync_comm_stream", "c_sync_calc_stream", "depend")
OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole


def add_sums(main_prog, startup_prog, accumulate_steps):
    """Change a training program in place, so that it adds the sums to its gradients and resets the sums. The resulting
    gradients are means over `accumulate_steps` batches. The gradients are rounded to their data type before the
    all-reduce."""
    if accumulate_steps == 1:
        return
    block = main_prog.global_block()
    role = int(OpRole.Backward) | int(OpRole.Loss)
    loss_gradient = next(op for op in block.ops if op.attr("op_role") == role)
    loss_gradient._set_attr("value", loss_gradient.attr("value") / accumulate_steps)
    gradients = {op.input("Grad")[0] for op in table.updates(main_prog)}
    last = {}
    for i, op in enumerate(block.ops):
        if op.attr("op_role") & int(OpRole.Backward) and op.type not in (*_COMMUNICATION, "coalesce_tensor"):
            last |= dict.fromkeys((name for name in op.output_arg_names if name in gradients), i)
    with static.name_scope(SCOPE):
        for name, i in sorted(last.items(), key=lambda item: -item[1]):
            _add_sum(block, startup_prog.global_block(), block.var(name), i + 1)
    block._sync_with_cpp()


def _add_sum(block, startup_block, gradient, i):
    """At position i, insert operators that add a sum to a gradient and then reset the sum."""
    for place in (block, startup_block):
        total = _float32(place, PREFIX + gradient.name, gradient, persistable=True)
    zero = {"shape": gradient.shape, "value": 0.0, "dtype": total.dtype}
    startup_block.append_op(type="fill_constant", outputs={"Out": total}, attrs=zero)
    wide, at = gradient, itertools.count(i)

    def insert(op_type, inputs, out, **attrs):
        attrs["op_role"] = int(OpRole.Backward)
        block._insert_op_without_sync(next(at), type=op_type, inputs=inputs, outputs={"Out": out}, attrs=attrs)

    if gradient.dtype != total.dtype:
        wide = _float32(block, f"{gradient.name}.float32", gradient)
        insert("cast", {"X": gradient}, wide, in_dtype=gradient.dtype, out_dtype=wide.dtype)
    insert("elementwise_add", {"X": wide, "Y": total.name}, wide, axis=-1)
    if wide is not gradient:
        insert("cast", {"X": wide}, gradient, in_dtype=wide.dtype, out_dtype=gradient.dtype)
    insert("fill_constant", {}, total.name, **zero)


def _float32(block, name, like, persistable=False):
    return block.create_var(name=name, shape=like.shape, dtype="float32", persistable=persistable, stop_gradient=True)


def without_update(program):
    """Create the accumulating program from a training program that add_sums has changed, and return it. The training
    program is copied, not modified. The accumulating program adds its gradients to the sums and updates only the BN
    statistics."""
    program = program.clone()
    block = program.global_block()
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        is_sum = op.attr("op_namescope").startswith(f"/{SCOPE}")
        is_update = op.attr("op_role") & (int(OpRole.Optimize) | int(OpRole.LRSched))
        is_result = is_sum and (op.type == "fill_constant" or block.var(op.output("Out")[0]).dtype != paddle.float32)
        if is_update or op.type in _COMMUNICATION or is_result:
            block._remove_op(i, sync=False)
        elif is_sum and op.type == "elementwise_add":
            op.desc.set_output("Out", op.input("Y"))
    block._sync_with_cpp()
    return program
