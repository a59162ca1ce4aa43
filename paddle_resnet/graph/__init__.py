"""Change the operators of Paddle's programs."""

import paddle

_OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole
# Roles of operators. An operator may have several roles, such as BACKWARD | LOSS.
FORWARD, BACKWARD, OPTIMIZE, SCHEDULE, LOSS = (
    int(role) for role in (_OpRole.Forward, _OpRole.Backward, _OpRole.Optimize, _OpRole.LRSched, _OpRole.Loss)
)


def insert(block, at: int, op_type: str, inputs: dict, outputs: dict, role: int = OPTIMIZE, **attrs) -> None:
    """Insert an operator at position `at` of a block. Call sync() after the last change of the block."""
    attrs["op_role"] = role
    block._insert_op_without_sync(at, type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)


def append(block, op_type: str, inputs: dict, outputs: dict, **attrs) -> None:
    """Append an operator of the update to a block."""
    block.append_op(type=op_type, inputs=inputs, outputs=outputs, attrs=attrs | {"op_role": OPTIMIZE})


def replace(block, ops, at, op_type: str, inputs: dict, outputs: dict, attrs: dict) -> None:
    """Insert an operator before the operator `at`, with the role of `at`, and remove the operators `ops`. Call sync()
    after the last change of the block."""
    attrs |= {name: at.attr(name) for name in ("op_role", "op_role_var") if at.has_attr(name)}
    place = block.ops.index(at)
    block._insert_op_without_sync(place, type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)
    remove(block, ops)


def remove(block, ops) -> None:
    for op in ops:
        block._remove_op(block.ops.index(op), sync=False)


def sync(block) -> None:
    """Make Paddle's C++ representation of a block follow its Python objects."""
    block._sync_with_cpp()


def float32(block, name: str, shape, persistable: bool = False):
    """Create a float32 variable without a gradient."""
    return block.create_var(name=name, shape=shape, dtype="float32", persistable=persistable, stop_gradient=True)


def updates(program) -> list:
    """Return Paddle's operators that update the parameters in a training program."""
    return [op for op in program.global_block().ops if {"Param", "Grad"} <= set(op.input_names)]


def value_of(op) -> str:
    """Return the variable that contains the float32 value of the parameter that one of Paddle's operators updates: its
    master weight or, in float32, the parameter itself."""
    return (op.input("MasterParam") or op.input("Param"))[0]


def cast_types(source, target) -> dict:
    """Return the attributes of an operator that casts one variable to the type of another."""
    return {"in_dtype": source.dtype, "out_dtype": target.dtype}
