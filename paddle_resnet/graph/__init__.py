"""The only code that uses the internal interfaces of Paddle's programs, blocks and operators.

Other modules read operators and variables, and add them, with the public methods of the block that `block` returns.
Other modules change a program with the functions of this module, and search a program with index.Graph.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import paddle
from paddle import static
from paddle.base import framework
from paddle.base.framework import Block, Operator
from paddle.utils import unique_name

_OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole  # pyright: ignore[reportAttributeAccessIssue]
# Roles of operators. An operator may have several roles, such as BACKWARD | LOSS.
FORWARD, BACKWARD, OPTIMIZE, SCHEDULE, LOSS = (
    int(role) for role in (_OpRole.Forward, _OpRole.Backward, _OpRole.Optimize, _OpRole.LRSched, _OpRole.Loss)
)

HALF = paddle.float16, paddle.bfloat16

_PIR_PROGRAM = getattr(getattr(paddle, "pir", None), "Program", ())  # Paddle 2.6 has no public class of PIR programs


def is_legacy(program: Any) -> bool:
    """Return whether a program is a legacy program and not a PIR program of Paddle 3."""
    return not isinstance(program, _PIR_PROGRAM)


def block(program: static.Program) -> Block:
    """Return the block of a program that contains its operators: for a PIR program, a pir.Block."""
    if is_legacy(program):
        return program.global_block()
    from paddle_resnet.graph import pir

    return cast(Block, pir.Block(program))


def feeds(program: static.Program) -> dict[str, static.Variable]:
    """Return the input variables of a program as {name: variable}, in the order in which they were declared."""
    if is_legacy(program):
        return {v.name: v for v in program.global_block().vars.values() if v.is_data}
    from paddle_resnet.graph import pir

    return pir.feeds(program)


def is_parameter(variable: Any) -> bool:
    """Return whether a persistable variable is a parameter or a BN statistic of the network."""
    if isinstance(variable, framework.Variable):
        return isinstance(variable, framework.Parameter)
    return bool(getattr(variable, "is_parameter", False))


def operator(
    name: str, op_type: str, inputs: dict, dtype: Any = None, stop_gradient: bool = False, **attrs: Any
) -> static.Variable:
    """Append an operator to the current program, and return its output "Out". Unlike functions of Paddle 3.3, this
    function accepts variables of legacy programs.

    Args:
        name: start of the name of the output.
        op_type, inputs, attrs: type, inputs and attributes of the operator.
        dtype: type of the output; by default, the type of the input "X".
        stop_gradient: whether the output has no gradient.
    """
    current = block(static.default_main_program())
    out = current.create_var(
        name=unique_name.generate(name), dtype=dtype or inputs["X"].dtype, stop_gradient=stop_gradient
    )
    current.append_op(type=op_type, inputs=inputs, outputs={"Out": out}, attrs=attrs)
    return written(out)


def written(variable: Any) -> static.Variable:
    """Return a variable that create_var has created and an operator has written, as an argument for Paddle's
    functions."""
    return variable if isinstance(variable, framework.Variable) else variable.value


def global_variable(name: str, shape: Sequence[int], dtype: str) -> static.Variable:
    """Create a persistable variable in the current program, which the startup program sets to 0."""
    if is_legacy(static.default_main_program()):
        variable = static.create_global_var(list(shape), 0, dtype, persistable=True, name=name)
    else:
        zero = paddle.nn.initializer.Constant(0.0)
        create = paddle.pir.core.create_persistable_value  # pyright: ignore[reportAttributeAccessIssue]
        variable = create(dtype, list(shape), name, initializer=zero)
    variable.stop_gradient = True
    return variable


def minimize(optimizer: Any, loss: static.Variable, startup: static.Program) -> None:
    """Add the backward pass and the update of an optimizer to the current program."""
    if is_legacy(static.default_main_program()):
        with contextlib.redirect_stdout(io.StringIO()):  # Fleet prints the names of its optimizers
            optimizer.minimize(loss, startup)
        return
    from paddle_resnet.graph import pir

    pir.minimize(optimizer, loss, startup, (BACKWARD | LOSS, BACKWARD, OPTIMIZE))


def create_state(optimizer: Any, program: static.Program, parameters: list) -> None:
    """Create the variables of an optimizer for parameters that it does not update."""
    optimizer._create_accumulators(program.global_block(), parameters)


def clone(program: static.Program) -> tuple[static.Program, Callable]:
    """Return a copy of a program, and a function that returns the variable to fetch from the copy for a variable of the
    program."""
    if is_legacy(program):
        return program.clone(), lambda variable: variable
    from paddle_resnet.graph import pir

    return pir.clone(program)


def insert(
    block: Block, at: int, op_type: str, inputs: dict, outputs: dict, role: int = OPTIMIZE, **attrs: Any
) -> None:
    """Insert an operator at position `at` of a block. Call sync() after the last change of the block."""
    attrs["op_role"] = role
    block._insert_op_without_sync(at, type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)


def append(block: Block, op_type: str, inputs: dict, outputs: dict, **attrs: Any) -> None:
    """Append an operator of the update to a block."""
    block.append_op(type=op_type, inputs=inputs, outputs=outputs, attrs=attrs | {"op_role": OPTIMIZE})


def insert_before(block: Block, at: Operator, op_type: str, inputs: dict, outputs: dict, attrs: dict) -> None:
    """Insert an operator before the operator `at`, with the role of `at`. Call sync() after the last change of the
    block."""
    attrs |= {name: at.attr(name) for name in ("op_role", "op_role_var") if at.has_attr(name)}
    block._insert_op_without_sync(block.ops.index(at), type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)


def replace(
    block: Block, ops: list[Operator], at: Operator, op_type: str, inputs: dict, outputs: dict, attrs: dict
) -> None:
    """Insert an operator before the operator `at`, with the role of `at`, and remove the operators `ops`. Call sync()
    after the last change of the block."""
    insert_before(block, at, op_type, inputs, outputs, attrs)
    remove(block, ops)


def remove(block: Block, ops: list[Operator]) -> None:
    """Remove operators. Call sync() after the last change of the block."""
    for op in reversed([*ops]):  # a PIR operator can be removed only after those that read its results
        block._remove_op(block.ops.index(op), sync=False)


def set_attr(op: Operator, name: str, value: Any) -> None:
    op._set_attr(name, value)


def set_type(op: Operator, op_type: str) -> None:
    op.desc.set_type(op_type)


def set_input(op: Operator, name: str, variables: list[str]) -> None:
    """Replace the variables that an operator reads through the input `name`."""
    op.desc.set_input(name, variables)


def set_output(op: Operator, name: str, variables: list[str]) -> None:
    """Replace the variables that an operator writes through the output `name`."""
    op.desc.set_output(name, variables)


def rename_input(op: Operator, name: str, new_name: str) -> None:
    """Make an operator read a different variable in place of the variable `name`."""
    op._rename_input(name, new_name)


def rename(block: Block, name: str, new_name: str) -> static.Variable:
    """Rename a variable in all operators of a block, and return it."""
    return block._rename_var(name, new_name)


def embed(
    program: static.Program, block: Block, replaced: dict[str, static.Variable], prefix: str
) -> dict[str, static.Variable]:
    """Append copies of all operators of a program to a block, with copies of its variables without gradients. The
    copies of persistable variables, such as parameters, are persistable, but not parameters, and the startup program
    does not initialize them.

    Args:
        program: program with an inference network; not modified.
        block: block of a legacy program.
        replaced: {name of a variable of `program`: variable of the block to use in its place}.
        prefix: start of the names of the copies.
    Returns:
        {name of a variable of `program`: variable of the block}.
    """
    variables = {}
    for name, v in program.global_block().vars.items():
        options = {"shape": v.shape, "dtype": v.dtype, "type": v.type, "persistable": v.persistable}
        variables[name] = replaced.get(name) or block.create_var(name=prefix + name, stop_gradient=True, **options)
    for op in program.global_block().ops:
        copy = block.desc.append_op()
        copy.copy_from(op.desc)  # also copies its name scopes, on which the operator's precision depends
        for name in {*op.input_arg_names}:
            copy._rename_input(name, variables[name].name)
        for name in {*op.output_arg_names}:
            copy._rename_output(name, variables[name].name)
    sync(block)
    return variables


def _readers(block: Block) -> dict[str, list[Operator]]:
    """Return {name of a variable: operators that read it}."""
    readers: dict[str, list[Operator]] = {}
    for op in block.ops:
        for name in {*op.input_arg_names}:
            readers.setdefault(name, []).append(op)
    return readers


def absorb_casts(block: Block, prefix: str) -> None:
    """Remove the operators that cast persistable variables whose names begin with `prefix`, and give the variables the
    type of the cast instead. Variables with other readers are not changed."""
    readers, removed = _readers(block), []
    for name, [op, *others] in readers.items():
        if not name.startswith(prefix) or not block.var(name).persistable or op.type != "cast" or others:
            continue
        [cast] = op.output("Out")
        for reader in readers.get(cast, []):
            rename_input(reader, cast, name)
        block.var(name).desc.set_dtype(block.var(cast).dtype)
        removed.append(op)
    remove(block, removed)
    sync(block)


def serialize(program: static.Program) -> bytes:
    """Return a program in Paddle's format for inference models."""
    return program.desc.serialize_to_string()


def remove_round_trips(block: Block) -> None:
    """Remove each cast from half precision to float32 whose only reader casts back to the same type, and this reader.

    Paddle 2.6 casts float16 images to float32 if they are multiplied by a parameter, because AMP changes the type of
    the parameter only later. AMP then adds the cast back, and the backward pass has the same two casts.
    """
    producers = {name: op for op in block.ops for name in op.output_arg_names}
    readers, removed = _readers(block), []
    for op in [op for op in block.ops if op.type == "cast"]:
        source, middle = op.input("X")[0], op.output("Out")[0]
        [back, *others] = readers.get(middle) or [None]
        if others or back is None or back.type != "cast" or block.var(middle).dtype != paddle.float32:
            continue
        result = back.output("Out")[0]
        if block.var(source).dtype not in HALF or block.var(result).dtype != block.var(source).dtype:
            continue
        if not op.attr("op_role") & BACKWARD:
            for reader in readers[result]:
                rename_input(reader, result, source)
        elif readers[source] == [op]:
            # The name of a gradient follows from that of its variable, so the result keeps its name.
            producers[source]._rename_output(source, result)
        else:
            continue
        removed += [op, back]
    remove(block, removed)


def sync(block: Block) -> None:
    """Make Paddle's C++ representation of a block follow its Python objects."""
    block._sync_with_cpp()


def float32(block: Block, name: str, shape: Sequence[int], persistable: bool = False) -> static.Variable:
    """Create a float32 variable without a gradient."""
    return block.create_var(name=name, shape=shape, dtype="float32", persistable=persistable, stop_gradient=True)


def updates(program: static.Program) -> list:
    """Return Paddle's operators that update the parameters in a training program."""
    return [op for op in block(program).ops if {"Param", "Grad"} <= set(op.input_names)]


def value_of(op: Operator) -> str:
    """Return the variable that contains the float32 value of the parameter that one of Paddle's operators updates: its
    master weight or, in float32, the parameter itself."""
    return (op.input("MasterParam") or op.input("Param"))[0]


def cast_types(source: static.Variable, target: static.Variable) -> dict:
    """Return the attributes of an operator that casts one variable to the type of another."""
    return {"in_dtype": source.dtype, "out_dtype": target.dtype}
