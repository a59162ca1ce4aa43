"""Gradient accumulation (--accumulate-steps K). An accumulating program, which does not update the parameters, adds the
gradients of K - 1 batches to sums. The training program adds these sums to the gradients of the last batch and updates
the parameters.

Neither program contains conditional operators, so both can be captured as CUDA graphs. Gradients are all-reduced,
checked, unscaled and clipped once per update.
"""

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
    gradients are means over `accumulate_steps` batches, and are then all-reduced."""
    if accumulate_steps == 1:
        return
    block = main_prog.global_block()
    role = int(OpRole.Backward) | int(OpRole.Loss)
    loss_gradient = next(op for op in block.ops if op.attr("op_role") == role and op.type == "fill_constant")
    loss_gradient._set_attr("value", loss_gradient.attr("value") / accumulate_steps)
    gradients = {op.input("Grad")[0] for op in table.updates(main_prog)}
    last = {}
    for i, op in enumerate(block.ops):
        if op.attr("op_role") & int(OpRole.Backward) and op.type not in (*_COMMUNICATION, "coalesce_tensor"):
            last |= dict.fromkeys(gradients.intersection(op.output_arg_names), i)
    with static.name_scope(SCOPE):
        for name, i in sorted(last.items(), key=lambda item: -item[1]):
            gradient = block.var(name)
            total = block.create_var(
                name=PREFIX + name, shape=gradient.shape, dtype=gradient.dtype, persistable=True, stop_gradient=True
            )
            zero = {"shape": gradient.shape, "value": 0.0, "dtype": gradient.dtype}
            place = startup_prog.global_block()
            place.create_var(name=total.name, shape=total.shape, dtype=total.dtype, persistable=True)
            place.append_op(type="fill_constant", outputs={"Out": place.var(total.name)}, attrs=zero)
            role = {"op_role": int(OpRole.Backward)}
            block._insert_op_without_sync(
                i + 1,
                type="elementwise_add",
                inputs={"X": gradient, "Y": total},
                outputs={"Out": gradient},
                attrs={"axis": -1} | role,
            )
            block._insert_op_without_sync(i + 2, type="fill_constant", outputs={"Out": total}, attrs=zero | role)
    block._sync_with_cpp()


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
        if is_update or op.type in _COMMUNICATION or (is_sum and op.type == "fill_constant"):
            block._remove_op(i, sync=False)
        elif is_sum:
            op.desc.set_output("Out", op.input("Y"))
    block._sync_with_cpp()
    return program
