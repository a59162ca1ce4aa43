"""Gradient accumulation (--accumulate-steps K). The accumulating program runs on the first K - 1 batches of a step,
adds the gradients of these batches to sums, and does not update the parameters. The training program runs on the last
batch, adds the sums to its gradients, and updates the parameters. The sums are float32, because small gradients would
be lost in half-precision sums.

Neither the accumulating nor the training program contains conditional operators, so both can be captured as CUDA
graphs. Gradients are all-reduced, checked, unscaled and clipped once per update.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import State


@dataclass(frozen=True)
class Settings:
    accumulate_steps: int = flag(
        1,
        "number of batches per training step; averaging the gradients of K batches simulates a batch K times as large",
        topic="optimizer",
        parse=numbers.positive,
        metavar="K",
    )


PREFIX = "accumulated."  # prefix of the names of the sums


def _communication():
    """Return the types of the operators that all-reduce gradients, wait for an all-reduce, or delay it until its
    gradients are computed."""
    from paddle_resnet.machine import compat

    return compat.ALL_REDUCE, "c_sync_comm_stream", "c_sync_calc_stream", "depend"


def add(step: "StepBuilder") -> None:
    """If --accumulate-steps exceeds 1, make the training program add the sums to its gradients and reset the sums. The
    resulting gradients are means over --accumulate-steps batches. The gradients are rounded to their data type before
    the all-reduce."""
    from paddle_resnet import graph

    count = step.part(Settings).accumulate_steps
    if count == 1:
        return
    block = graph.block(step.main)
    loss_gradient = next(op for op in block.ops if op.attr("op_role") == graph.BACKWARD | graph.LOSS)
    graph.set_attr(loss_gradient, "value", loss_gradient.attr("value") / count)
    gradients = {op.input("Grad")[0] for op in graph.updates(step.main)}
    last, skipped = {}, (*_communication(), "coalesce_tensor")
    for i, op in enumerate(block.ops):
        if op.attr("op_role") & graph.BACKWARD and op.type not in skipped:
            last |= dict.fromkeys((name for name in op.output_arg_names if name in gradients), i)
    for name, i in sorted(last.items(), key=lambda item: -item[1]):
        _add_sum(block, graph.block(step.startup), name, i + 1)
    graph.sync(block)


def state(step: "StepBuilder") -> "State | None":
    """Return the State of the sums, or None without sums. Checkpoints omit the sums, because they are 0 after each
    update."""
    from paddle_resnet import graph
    from paddle_resnet.step.facts import State

    names = [name for name in graph.block(step.main).vars if name.startswith(PREFIX)]
    return State({name.removeprefix(PREFIX): name for name in names}, None) if names else None


def _add_sum(block, startup_block, name, i):
    """Create the sum of a gradient, and insert operators at position i that add the sum to the gradient and then reset
    the sum."""
    from paddle_resnet import graph

    gradient = block.var(name)
    for place in (block, startup_block):
        total = graph.float32(place, PREFIX + name, gradient.shape, persistable=True)
    zero = {"shape": gradient.shape, "value": 0.0, "dtype": total.dtype}
    startup_block.append_op(type="fill_constant", outputs={"Out": total}, attrs=zero)
    wide, at = gradient, itertools.count(i)

    def insert(op_type, inputs, out, **attrs):
        graph.insert(block, next(at), op_type, inputs, {"Out": out}, graph.BACKWARD, **attrs)

    if gradient.dtype != total.dtype:
        wide = graph.float32(block, f"{name}.float32", gradient.shape)
        insert("cast", {"X": gradient}, wide, **graph.cast_types(gradient, wide))
    insert("elementwise_add", {"X": wide, "Y": total.name}, wide, axis=-1)
    if wide is not gradient:
        insert("cast", {"X": wide}, gradient, **graph.cast_types(wide, gradient))
    insert("fill_constant", {}, total.name, **zero)


def remove_update(program: "static.Program") -> None:
    """Change a copy of a training program that add() has changed into the accumulating program, in place. The
    accumulating program adds its gradients to the sums and updates the BN statistics and the ranges of --qat, but not
    the parameters."""
    from paddle_resnet import graph

    block, communication = graph.block(program), _communication()
    removed, sums = [], {}  # {float32 gradient: its sum}
    for op in block.ops:
        is_update = op.attr("op_role") & (graph.OPTIMIZE | graph.SCHEDULE)
        resets = op.type == "fill_constant" and op.output("Out")[0].startswith(PREFIX)
        is_rounding = op.type == "cast" and op.input("X")[0] in sums
        if op.type == "elementwise_add" and op.input("Y")[0].startswith(PREFIX):
            sums[op.input("X")[0]] = op.input("Y")[0]
            graph.set_output(op, "Out", op.input("Y"))
        elif is_update or op.type in communication or resets or is_rounding:
            removed.append(op)
    graph.remove(block, removed)
    graph.sync(block)
