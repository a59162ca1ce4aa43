"""Exponential moving averages (EMA) of the weights (--ema): Polyak and Juditsky, doi:10.1137/0330046.

A training program contains an EMA variable for each parameter that its optimizer updates and for each BN running
statistic. EMA variables are persistable, have the type float32 and keep their addresses, so captured steps and
evaluation programs can use them. With custom kernels, the operator native_ema updates all EMA variables after the
optimizer step. native_ema is separate from the update operator, because it runs after ASP has masked the updated
weights, and also averages BN statistics. native_ema takes 0.3 % of a ResNet-50 step on an H100
(benchmarks/log/kernels_h200.md).
"""

import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet.optimizers import table
from paddle_resnet.optimizers.sparsity import MASK
from paddle_resnet.step import scalars

SUFFIX = ".ema"  # the name of an EMA variable is the name of its parameter with this suffix
_SCOPE = "ema"  # name scope of the operators that add() inserts; Paddle adds a number if the name is used again


def decay_at(step, limit):
    """Return the EMA decay for a step (counted from 0). The decay increases up to `limit`. The low decay in the first
    steps reduces the influence of the initial weights, as in TensorFlow's ExponentialMovingAverage with num_updates."""
    return min(limit, (1 + step) / (10 + step))


def add(main_prog, startup_prog, lr_scheduler, constants, decay, is_native):
    """Add EMA variables to a training program in place. Call add() after minimize. At the end of each step, the program
    computes average += (1 - decay) (value - average). For a parameter in half precision, `value` is its float32 master
    weight. If dynamic loss scaling skips a step, the EMA variables do not change.

    Args:
        main_prog: the current Program.
        startup_prog: startup Program, which initializes the EMA variables with the initial weights.
        lr_scheduler: schedules.Schedule, which counts the steps.
        constants: {variable name: name of the variable that contains its float32 value} for the BN running statistics
            and the frozen parameters.
        decay: upper limit of the decay (see decay_at).
        is_native: whether fusion.fuse will replace the added operators with a custom operator, which does nothing in
            skipped steps.
    """
    block, startup = main_prog.global_block(), startup_prog.global_block()
    values = {op.input("Param")[0]: op for op in table.updates(main_prog)}
    values = {name: (op.input("MasterParam") or [name])[0] for name, op in values.items()}
    values |= constants
    weight = scalars.declare("ema_weight", lambda: 1 - decay_at(lr_scheduler.done, decay))
    for name, value in values.items():
        for target in (block, startup):
            _float32(target, name + SUFFIX, block.var(name).shape, persistable=True)
        startup.append_op(type="assign", inputs={"X": value}, outputs={"Out": name + SUFFIX})
    with static.name_scope(_SCOPE):
        if not is_native:
            weight = _zero_in_skipped_steps(block, weight)
        for name, value in values.items():
            average = block.var(name + SUFFIX)
            _append(block, "lerp", {"X": average, "Y": block.var(value), "Weight": weight}, average)
        for name, value in values.items():
            if value != name and block.has_var(name + MASK):  # ASP masks only the parameter, not its master weight
                average, mask = block.var(name + SUFFIX), _cast(block, block.var(name + MASK))
                _append(block, "elementwise_mul", {"X": average, "Y": mask}, average, axis=-1)


def contains(op):
    """Return whether an operator in a training program was inserted by add()."""
    return op.attr("op_namescope").startswith(f"/{_SCOPE}")


def of(program):
    """Return {name of a parameter or BN statistic: name of its EMA variable} for a training program."""
    names = [name for name in program.global_block().vars if name.endswith(SUFFIX)]
    return {name.removesuffix(SUFFIX): name for name in names}


def evaluate(train_prog, eval_prog, exe):
    """Rewrite an evaluation program in place to use the EMA weights of a training program. Call evaluate() after
    cast_evaluation_program.

    If the weights are float32, the evaluation program reads the EMA variables directly. If the weights are in half
    precision, it reads converted copies of the EMA variables.

    Args:
        train_prog: training Program; its variables are in the global scope.
        eval_prog: evaluation Program of the same network.
        exe: static.Executor.
    Returns:
        a function without arguments that updates the converted copies. Call this function before each evaluation.
    """
    block, copy_prog = eval_prog.global_block(), static.Program()
    copies = copy_prog.global_block()
    for name, average in of(train_prog).items():
        dtype = block.var(name).dtype
        if dtype == paddle.float32:
            block._rename_var(name, average)
            continue
        half = block._rename_var(name, f"{average}.half")
        source = _float32(copies, average, half.shape, persistable=True)
        copy = copies.create_var(name=half.name, shape=half.shape, dtype=dtype, persistable=True)
        attrs = {"in_dtype": source.dtype, "out_dtype": dtype}
        copies.append_op(type="cast", inputs={"X": source}, outputs={"Out": copy}, attrs=attrs)
    block._sync_with_cpp()
    if not copies.ops:
        return lambda: None

    def update():
        exe.run(copy_prog)

    update()
    return update


def _zero_in_skipped_steps(block, weight):
    """Return a variable that contains the weight of the new value in the average, or 0 if dynamic loss scaling skips
    the step."""
    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if not scalings:
        return weight
    overflows = _cast(block, block.var(scalings[0].input("FoundInfinite")[0]))
    proceeds, effective = (_float32(block, unique_name.generate(f"ema_weight.{i}"), [1]) for i in range(2))
    _append(block, "scale", {"X": overflows}, proceeds, scale=-1.0, bias=1.0)
    _append(block, "elementwise_mul", {"X": weight, "Y": proceeds}, effective, axis=-1)
    return effective


def _cast(block, source):
    out = _float32(block, unique_name.generate(f"{source.name}.float32"), source.shape)
    _append(block, "cast", {"X": source}, out, in_dtype=source.dtype, out_dtype=out.dtype)
    return out


def _float32(block, name, shape, persistable=False):
    return block.create_var(name=name, shape=shape, dtype="float32", persistable=persistable, stop_gradient=True)


def _append(block, op_type, inputs, out, **attrs):
    attrs["op_role"] = int(paddle.base.core.op_proto_and_checker_maker.OpRole.Optimize)
    block.append_op(type=op_type, inputs=inputs, outputs={"Out": out}, attrs=attrs)
