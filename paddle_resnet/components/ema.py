"""Exponential moving averages (EMA) of the weights (--ema): Polyak and Juditsky, doi:10.1137/0330046.

A training program contains an EMA variable for each parameter, including frozen parameters, and for each BN running
statistic. EMA variables are persistable, have the type float32 and keep their addresses, so captured steps and
evaluation programs can use them. With custom kernels, the operator native_ema updates all EMA variables at the end of
each step. native_ema is separate from the update operator, because it also averages BN statistics. --ema makes a
ResNet-50 step on an H100 0.3 % slower (n = 1; benchmarks/log/kernels_h200.md).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import State


@dataclass(frozen=True)
class Settings:
    ema: float | None = flag(
        None,
        "decay per step, such as 0.9999, of the exponential moving average of the weights, which evaluation uses",
        topic="regularize",
        parse=numbers.or_none(numbers.below_one),
        metavar="DECAY",
    )


SUFFIX = ".ema"  # the name of an EMA variable is the name of its parameter or BN statistic with this suffix


def decay_at(step, limit):
    """Return the EMA decay for a step (counted from 0). The decay increases from 0.1 (or `limit`, if this is lower) to
    `limit`. The low decay in the first steps reduces the influence of the initial weights, as in TensorFlow's
    ExponentialMovingAverage with num_updates."""
    return min(limit, (1 + step) / (10 + step))


def add(step: "StepBuilder") -> None:
    """With --ema, add EMA variables to a training program. At the end of each step, the program computes average +=
    (1 - decay) (value - average). For a parameter in half precision, `value` is its float32 master weight. If dynamic
    loss scaling skips a step, the EMA variables do not change. The startup program sets them to the initial values of
    the parameters and BN statistics."""
    from paddle_resnet import graph

    limit, schedule = step.part(Settings).ema, step.schedule
    if limit is None:
        return
    block, startup = graph.block(step.main), graph.block(step.startup)
    values = _values(step)
    weight = step.declare("ema_weight", lambda: 1 - decay_at(schedule.done, limit))
    for name, value in values.items():
        for target in (block, startup):
            graph.float32(target, name + SUFFIX, block.var(name).shape, persistable=True)
        startup.append_op(type="assign", inputs={"X": value}, outputs={"Out": name + SUFFIX})
    (_add_native if step.is_native else _add_paddle)(step, values, weight)


def state(step: "StepBuilder") -> "State":
    """Return the State of the averages. Checkpoints contain them in the file PREFIX.pdema."""
    from paddle_resnet.step.facts import State

    variables = {} if step.part(Settings).ema is None else {name: name + SUFFIX for name in _values(step)}
    return State(variables, ".pdema", starts_as_source=True, what="--ema: EMA weights")


def _values(step):
    """Return {parameter or BN statistic: variable that contains its float32 value}."""
    return step.values | step.frozen_values | {name: name for name in step.bn_statistics}


def _add_native(step, values, weight):
    from paddle_resnet import graph

    block = graph.block(step.main)
    averages = [block.var(name + SUFFIX) for name in values]
    inputs = {"Averages@VECTOR": averages, "Values@VECTOR": [block.var(value) for value in values.values()]}
    inputs["Weight"] = weight
    if step.factor is not None:
        inputs["Unscale@OPTIONAL"] = step.factor  # 0 in a skipped step
    graph.append(block, "native_ema", inputs, {"AveragesOut@VECTOR": averages})


def _add_paddle(step, values, weight):
    from paddle_resnet import graph

    block = graph.block(step.main)
    weight = _zero_in_skipped_steps(block, weight)
    for name, value in values.items():
        average = block.var(name + SUFFIX)
        graph.append(block, "lerp", {"X": average, "Y": block.var(value), "Weight": weight}, {"Out": average})


def of(program):
    """Return {name of a parameter or BN statistic: name of its EMA variable} for a training program."""
    from paddle_resnet import graph

    names = [name for name in graph.block(program).vars if name.endswith(SUFFIX)]
    return {name.removesuffix(SUFFIX): name for name in names}


def evaluate(train_prog, eval_prog, exe):
    """Rewrite an evaluation program in place to use the EMA weights of a training program, if there are any. Call
    evaluate() after cast_evaluation_program.

    In place of a float32 variable, the evaluation program reads the EMA variable. In place of a half-precision
    variable, it reads a converted copy of the EMA variable.

    Args:
        train_prog: training Program; its variables are in the global scope.
        eval_prog: evaluation Program of the same network.
        exe: static.Executor.
    Returns:
        a function without arguments that updates the converted copies, if there are any. Call this function before each
        evaluation.
    """
    import paddle
    from paddle import static

    from paddle_resnet import graph

    block, copy_prog = graph.block(eval_prog), static.Program()
    copies = graph.block(copy_prog)
    for name, average in of(train_prog).items():
        dtype = block.var(name).dtype
        if dtype == paddle.float32:
            block._rename_var(name, average)
            continue
        half = block._rename_var(name, f"{average}.half")
        source = graph.float32(copies, average, half.shape, persistable=True)
        copy = copies.create_var(name=half.name, shape=half.shape, dtype=dtype, persistable=True)
        attrs = {"in_dtype": source.dtype, "out_dtype": dtype}
        copies.append_op(type="cast", inputs={"X": source}, outputs={"Out": copy}, attrs=attrs)
    graph.sync(block)
    if not copies.ops:
        return lambda: None

    def update():
        exe.run(copy_prog)

    update()
    return update


def _zero_in_skipped_steps(block, weight):
    """Return a variable that contains the weight of the new value in the average, or 0 if dynamic loss scaling skips
    the step."""
    from paddle.utils import unique_name

    from paddle_resnet import graph

    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if not scalings:
        return weight
    overflows = _cast(block, block.var(scalings[0].input("FoundInfinite")[0]))
    proceeds, effective = (graph.float32(block, unique_name.generate(f"ema_weight.{i}"), [1]) for i in range(2))
    graph.append(block, "scale", {"X": overflows}, {"Out": proceeds}, scale=-1.0, bias=1.0)
    graph.append(block, "elementwise_mul", {"X": weight, "Y": proceeds}, {"Out": effective}, axis=-1)
    return effective


def _cast(block, source):
    from paddle.utils import unique_name

    from paddle_resnet import graph

    out = graph.float32(block, unique_name.generate(f"{source.name}.float32"), source.shape)
    graph.append(block, "cast", {"X": source}, {"Out": out}, **graph.cast_types(source, out))
    return out
