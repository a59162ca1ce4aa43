"""Averages of the weights over the steps of a run, which evaluations use instead of the weights. components/ema.py adds
exponential moving averages.

A training program contains an average of each parameter, including frozen parameters, and of each BN running statistic.
The averages are persistable, have the type float32 and keep their addresses, so captured steps and evaluation programs
can use them. The averages are a facts.State with the file facts.AVERAGES.
"""

from collections.abc import Callable

import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet import graph
from paddle_resnet.step import facts, scalars
from paddle_resnet.step.builder import StepBuilder


def add(step: StepBuilder, name: str, weight_of: Callable[[], float]) -> None:
    """Add averages to a training program. At the end of each step, the program computes average += weight (value -
    average). For a parameter in half precision, `value` is its float32 master weight. If dynamic loss scaling skips a
    step, the averages do not change. The startup program sets the averages to the initial values of the
    parameters and BN statistics. With custom kernels, the operator native_ema updates all averages. native_ema is
    separate from the update operator, because native_ema also averages BN statistics.

    Args:
        step: the program.
        name: suffix of the names of the averages.
        weight_of: function that returns the weight of the next step. See StepBuilder.declare.
    """
    block, startup = graph.block(step.main), graph.block(step.startup)
    values = _values(step)
    weight = step.declare(f"{name}_weight", weight_of)
    for source, value in values.items():
        for target in (block, startup):
            graph.float32(target, f"{source}.{name}", block.var(source).shape, persistable=True)
        startup.append_op(type="assign", inputs={"X": value}, outputs={"Out": f"{source}.{name}"})
    averages = {block.var(f"{source}.{name}"): block.var(value) for source, value in values.items()}
    (_add_native if step.is_native else _add_paddle)(step, averages, weight)


def state(step: StepBuilder, name: str, flag: str, what: str) -> facts.State:
    """Return the State of the averages that add() has added as VARIABLE.name. `flag` is the flag that adds the
    averages, and `what` describes the averages in messages. Checkpoints contain the averages in the file
    PREFIX.pdema."""
    variables = {source: f"{source}.{name}" for source in _values(step)}
    return facts.State(variables, facts.AVERAGES, starts_as_source=True, flag=flag, what=what)


def _values(step):
    """Return {parameter or BN statistic: variable that contains its float32 value}."""
    return step.values | step.frozen_values | {name: name for name in step.bn_statistics}


def _add_native(step, averages, weight):
    inputs = {"Averages@VECTOR": [*averages], "Values@VECTOR": [*averages.values()], "Weight": weight}
    if step.factor is not None:
        inputs["Unscale@OPTIONAL"] = step.factor  # 0 in a skipped step
    graph.append(graph.block(step.main), "native_ema", inputs, {"AveragesOut@VECTOR": [*averages]})


def _add_paddle(step, averages, weight):
    block = graph.block(step.main)
    weight = _zero_in_skipped_steps(block, weight)
    for average, value in averages.items():
        graph.append(block, "lerp", {"X": average, "Y": value, "Weight": weight}, {"Out": average})


def _zero_in_skipped_steps(block, weight):
    """Return a variable that contains the weight of the new value in the average, or 0 if dynamic loss scaling skips
    the step."""
    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if not scalings:
        return weight
    overflows = _cast(block, block.var(scalings[0].input("FoundInfinite")[0]))
    name = weight.name.removeprefix(scalars.PREFIX)
    proceeds, effective = (graph.float32(block, unique_name.generate(f"{name}.{i}"), [1]) for i in range(2))
    graph.append(block, "scale", {"X": overflows}, {"Out": proceeds}, scale=-1.0, bias=1.0)
    graph.append(block, "elementwise_mul", {"X": weight, "Y": proceeds}, {"Out": effective}, axis=-1)
    return effective


def _cast(block, source):
    out = graph.float32(block, unique_name.generate(f"{source.name}.float32"), source.shape)
    graph.append(block, "cast", {"X": source}, {"Out": out}, **graph.cast_types(source, out))
    return out


def of(program: static.Program) -> dict[str, str]:
    """Return {parameter or BN statistic: its average} for a training program, empty without averages."""
    states = [state for state in facts.of(program).states if state.file == facts.AVERAGES]
    return {source: average for state in states for source, average in state.variables.items()}


def evaluate(train_prog: static.Program, eval_prog: static.Program, exe: static.Executor) -> Callable[[], None]:
    """Rewrite an evaluation program in place to use the averages of a training program, if there are any. Call
    evaluate() after cast_evaluation_program.

    In place of a float32 variable, the evaluation program reads the average. In place of a half-precision
    variable, the evaluation program reads a converted copy of the average.

    Args:
        train_prog: training Program; its variables are in the global scope.
        eval_prog: evaluation Program of the same network.
        exe: static.Executor.
    Returns:
        a function without arguments that updates the converted copies, if there are any. Call this function before each
        evaluation.
    """
    block, copy_prog = graph.block(eval_prog), static.Program()
    copies = graph.block(copy_prog)
    for name, average in of(train_prog).items():
        dtype = block.var(name).dtype
        if dtype == paddle.float32:
            graph.rename(block, name, average)
            continue
        half = graph.rename(block, name, f"{average}.half")
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
