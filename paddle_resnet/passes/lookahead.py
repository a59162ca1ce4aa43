"""Lookahead (--lookahead): Zhang et al., arXiv:1907.08610, algorithm 1.

A training program contains a float32 slow weight for each parameter. In every K-th step, the slow weights move towards
the parameters, and the parameters are then set to the slow weights. Slow weights belong to the optimizer state. With
custom kernels, the operator native_lookahead updates all parameters.
"""

import itertools

import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet.optimizers import table
from paddle_resnet.step import scalars

SUFFIX = ".slow"  # the name of a slow weight is the name of its parameter with this suffix
_SCOPE = "lookahead"  # name scope of the operators that add() inserts; Paddle adds a number if the name is used again


def add(main_prog, startup_prog, lr_scheduler, frozen, interval, alpha):
    """Add lookahead to a training program in place. Call add() after minimize. After the update in steps `interval`, 2
    `interval`, ..., the program computes slow += alpha (p - slow) and p = slow. For a parameter in half precision, p is
    its float32 master weight. Steps that loss scaling skips are also counted.

    Args:
        main_prog: the current Program.
        startup_prog: startup Program, which initializes the slow weights with the initial weights.
        lr_scheduler: schedules.Schedule, which counts the steps.
        frozen: {name of a frozen parameter: name of the variable that contains its float32 value}; the slow weights of
            these parameters do not change.
        interval, alpha: values of --lookahead.
    """
    block, startup, updates = main_prog.global_block(), startup_prog.global_block(), table.updates(main_prog)
    is_due = scalars.declare("lookahead", lambda: (lr_scheduler.done + 1) % interval == 0)  # 1 or 0
    values = {op.input("Param")[0]: (op.input("MasterParam") or op.input("Param"))[0] for op in updates}
    # The added operators run before ASP's operators, which set pruned parameters to 0.
    at = itertools.count(block.ops.index(updates[-1]) + 1)
    for name, value in (values | frozen).items():
        for target in (block, startup):
            _float32(target, name + SUFFIX, block.var(name).shape, persistable=True)
        startup.append_op(type="assign", inputs={"X": value}, outputs={"Out": name + SUFFIX})
    with static.name_scope(_SCOPE):
        weight = _float32(block, unique_name.generate("lookahead_weight"), [1])
        _insert(block, next(at), "scale", {"X": is_due}, weight, scale=float(alpha))
        for name, value in values.items():
            slow, parameter, exact = (block.var(variable) for variable in (name + SUFFIX, name, value))
            _insert(block, next(at), "lerp", {"X": slow, "Y": exact, "Weight": weight}, slow)
            _insert(block, next(at), "lerp", {"X": exact, "Y": slow, "Weight": is_due}, exact)
            if exact is not parameter:
                types = {"in_dtype": exact.dtype, "out_dtype": parameter.dtype}
                _insert(block, next(at), "cast", {"X": exact}, parameter, **types)
    block._sync_with_cpp()


def operators(block):
    """Return the operators that add() has inserted in a block."""
    return [op for op in block.ops if op.attr("op_namescope").startswith(f"/{_SCOPE}")]


def of(program):
    """Return {name of a parameter: name of its slow weight} for a training program."""
    names = [name for name in program.global_block().vars if name.endswith(SUFFIX)]
    return {name.removesuffix(SUFFIX): name for name in names}


def _float32(block, name, shape, persistable=False):
    return block.create_var(name=name, shape=shape, dtype="float32", persistable=persistable, stop_gradient=True)


def _insert(block, at, op_type, inputs, out, **attrs):
    attrs["op_role"] = int(paddle.base.core.op_proto_and_checker_maker.OpRole.Optimize)
    block._insert_op_without_sync(at, type=op_type, inputs=inputs, outputs={"Out": out}, attrs=attrs)
