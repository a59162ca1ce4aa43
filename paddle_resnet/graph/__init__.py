"""The only code that uses the internal interfaces of Paddle's programs, blocks and operators.

Other modules read operators and variables, and add them, with the public methods of the block that `block` returns.
They change a program with the functions of this module, and search it with index.Graph.
"""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import static
from paddle.base.framework import Block, Operator

_OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole  # pyright: ignore[reportAttributeAccessIssue]
# Roles of operators. An operator may have several roles, such as BACKWARD | LOSS.
FORWARD, BACKWARD, OPTIMIZE, SCHEDULE, LOSS = (
    int(role) for role in (_OpRole.Forward, _OpRole.Backward, _OpRole.Optimize, _OpRole.LRSched, _OpRole.Loss)
)


def block(program: static.Program) -> Block:
    """Return the block of a program that contains its operators."""
    return program.global_block()


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
    for op in ops:
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


def serialize(program: static.Program) -> bytes:
    """Return a program in Paddle's format for inference models."""
    return program.desc.serialize_to_string()


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
