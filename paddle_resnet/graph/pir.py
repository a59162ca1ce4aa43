"""The methods of Paddle's legacy Block and Operator that this project uses, for programs in Paddle 3's format PIR.

Legacy operators read and write variables by name. In PIR, an operator returns new values, and only inputs, parameters
and other persistable variables have names. Therefore, Block invents names for all other values. A write to a
persistable variable becomes an operator that assigns the value in place. A write to any other variable makes the
operators that follow read the new value.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Paddle generates most functions and attributes of PIR at run time. Values and programs of PIR are annotated as Any.

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import _C_ops, _pir_ops
from paddle.base.libpaddle import pir
from paddle.pir.core import convert_np_dtype_to_dtype_

_DECLARATIONS = {"builtin.parameter": "parameter_name", "pd_op.data": "name"}
_RESULTS = {"builtin.set_parameter": "parameter_name", "builtin.shadow_output": "output_name"}  # of a startup program
# Attributes of an operator: its role, and the name of its i-th result (_NAME with i appended).
_ROLE, _NAME = "paddle_resnet.role", "paddle_resnet.name"
_AUXILIARY = -1  # role of operators that compute arguments, or write the result, of an operator in Block.ops
# {operator of PIR: legacy operator}, if the names differ by more than the suffix "_" of operators that write in place.
_LEGACY_TYPES = {
    "add": "elementwise_add",
    "subtract": "elementwise_sub",
    "multiply": "elementwise_mul",
    "divide": "elementwise_div",
    "full": "fill_constant",
    "full_like": "fill_any_like",
}


def _same(name):
    return lambda X, **attrs: getattr(paddle, name)(X, **attrs)


def _binary(name):
    return lambda X, Y, axis=-1: getattr(paddle, name)(X, Y)


def _reduction(name):
    def reduce(X, dim=None, keep_dim=False, reduce_all=False):
        return getattr(paddle, name)(X, axis=None if reduce_all else dim, keepdim=keep_dim)

    return reduce


def _dropout(X, Seed, dropout_prob, is_test, dropout_implementation):
    return _C_ops.dropout(X, Seed, dropout_prob, is_test, dropout_implementation, 0, False)


def _sigmoid_cross_entropy(X, Label, normalize, ignore_index):
    return _C_ops.sigmoid_cross_entropy_with_logits(X, Label, None, normalize, ignore_index)


# {legacy operator: function of its inputs and attributes that appends operators and returns the outputs}
_OPERATORS = {
    **{name: _same(name) for name in ("assign", "exp", "log", "sqrt", "sigmoid", "reciprocal", "clip", "concat")},
    **{f"elementwise_{end}": _binary(name) for end, name in (("add", "add"), ("sub", "subtract"))},
    **{f"elementwise_{end}": _binary(name) for end, name in (("mul", "multiply"), ("div", "divide"))},
    **{name: _binary(name) for name in ("equal", "not_equal", "less_than", "greater_than")},
    **{name: _binary(name) for name in ("logical_and", "logical_or")},
    **{f"reduce_{name}": _reduction(name) for name in ("sum", "mean", "min", "max")},
    "cast": lambda X, in_dtype, out_dtype: paddle.cast(X, out_dtype),
    "cumsum": lambda X, axis, reverse: _C_ops.cumsum(X, axis, False, False, reverse),
    "dropout": _dropout,
    "fill_any_like": lambda X, value: paddle.full_like(X, value),
    "fill_constant": lambda shape, value, dtype: paddle.full(shape, value, dtype),
    "index_sample": lambda X, Index: paddle.index_sample(X, Index),
    "isfinite_v2": _same("isfinite"),
    "lerp": lambda X, Y, Weight: paddle.lerp(X, Y, Weight),
    "matmul_v2": lambda X, Y, trans_x, trans_y: paddle.matmul(X, Y, trans_x, trans_y),
    "relu": lambda X: paddle.nn.functional.relu(X),
    "pow": lambda X, factor: paddle.pow(X, factor),
    "scale": lambda X, scale, bias=0.0: paddle.scale(X, scale, bias),
    "sigmoid_cross_entropy_with_logits": _sigmoid_cross_entropy,
    "softplus": lambda X, beta, threshold: paddle.nn.functional.softplus(X, beta, threshold),
    "split": lambda X, axis, num, sections: paddle.split(X, sections, axis),
    "squared_l2_norm": lambda X: _C_ops.squared_l2_norm(X),
    "sum": lambda X: paddle.add_n(X),
    "where": lambda Condition, X, Y: paddle.where(Condition, X, Y),
}


class Variable:
    """A new variable. `value` is its pir.Value, or None until an operator writes the variable."""

    def __init__(self, name, shape, dtype, persistable, stop_gradient):
        self.name, self.shape, self.dtype, self.persistable = name, shape, dtype, persistable
        self.stop_gradient, self.value = stop_gradient, None


def name_of(value: Any) -> str:
    """Return the name of a value. A value that is written to a variable has the name of the variable."""
    op, i = value.get_defining_op(), value.index()
    if op.name() in _DECLARATIONS:
        return op.str_attr(_DECLARATIONS[op.name()])
    if op.has_attr(f"{_NAME}{i}"):
        return op.str_attr(f"{_NAME}{i}")
    if op.name().startswith("pd_op.") and op.name().endswith("_"):
        slot = op.get_output_names()[i].removesuffix("_out")
        if slot in op.get_input_names():
            return name_of(op.operand_source(op.get_input_names().index(slot)))
    return f"{op.name()}.{op.id()}.{i}"


def _set_name(value, name):
    value.get_defining_op().set_str_attr(f"{_NAME}{value.index()}", name)


def _snake(name):
    return "seed_tensor" if name == "Seed" else re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


class Operator:
    """An operator with the legacy names of its type, inputs, outputs and attributes."""

    def __init__(self, op):
        self.op = op
        name = op.name().partition(".")[2].removesuffix("_")
        self.type = _LEGACY_TYPES.get(name, name)

    def __eq__(self, other):
        return self.op.id() == other.op.id()

    def __hash__(self):
        return self.op.id()

    @property
    def desc(self) -> "Operator":
        return self

    @property
    def input_names(self) -> list[str]:
        return [_camel(name) for name in self.op.get_input_names()]

    @property
    def output_names(self) -> list[str]:
        return [_camel(name) for name in self.op.get_output_names()]

    @property
    def input_arg_names(self) -> list[str]:
        return [name_of(value) for value in self.op.operands_source() if value.initialized()]

    @property
    def output_arg_names(self) -> list[str]:
        if self.op.name() in _RESULTS:
            return [self.op.str_attr(_RESULTS[self.op.name()])]
        return [name_of(value) for value in self.op.results() if value.initialized()]

    def input(self, slot: str) -> list[str]:
        value = self.op.operand_source(self._index(slot))
        return [name_of(value)] if value.initialized() else []

    def output(self, slot: str) -> list[str]:
        value = self.op.result(self._output_index(slot))
        return [name_of(value)] if value.initialized() else []

    def _index(self, slot):
        return self.op.get_input_names().index(_snake(slot))

    def _output_index(self, slot):
        return self.op.get_output_names().index(_snake(slot))

    def has_attr(self, name: str) -> bool:
        return self.op.has_attr(name) or name in self.op.get_input_names()

    def attr(self, name: str) -> Any:
        if name == "op_role":
            return _role(self.op)
        if self.op.has_attr(name):
            return self.op.attrs()[name]
        return self.op.operand_source(self._index(name)).get_defining_op().attrs()["value"]  # a constant

    def _set_attr(self, name, value):
        """Set a boolean attribute or a constant."""
        if isinstance(value, bool):
            self.op.set_bool_attr(name, value)
            return
        with _inserting_before(self.op):
            constant = paddle.full([1], value)
        constant.get_defining_op().set_int_attr(_ROLE, _AUXILIARY)
        self.op.operand(self._index(name)).set_source(constant)

    def set_input(self, slot: str, names: list[str]) -> None:
        [name] = names
        self.op.operand(self._index(slot)).set_source(Block(self._program).var(name))

    def set_output(self, slot: str, names: list[str]) -> None:
        """Write an output to a persistable variable. An operator that writes in place already writes to its input."""
        if self.op.name().endswith("_"):
            return
        variable, value = Block(self._program).var(names[0]), self.op.result(self._output_index(slot))
        with paddle.static.program_guard(self._program):
            pir.set_insertion_point_after(self.op)
            written = paddle.assign(value, output=variable)
        _set_name(value, names[0])
        written.get_defining_op().set_int_attr(_ROLE, _AUXILIARY)

    def _rename_input(self, name, new_name):
        value = Block(self._program).var(new_name)
        for operand in self.op.operands():
            if operand.source().initialized() and name_of(operand.source()) == name:
                operand.set_source(value)

    @property
    def _program(self):
        return self.op.get_parent_block().program


def _role(op):
    return op.int_attr(_ROLE) if op.has_attr(_ROLE) else 0


@contextlib.contextmanager
def _inserting_before(op):
    with paddle.static.program_guard(op.get_parent_block().program):
        pir.set_insertion_point(op)
        yield


class Block:
    """The global block of a program.

    A startup program contains a result for each variable that it initializes; `ops` contains only these results.
    In other programs, `ops` contains all operators except declarations and auxiliary operators.
    """

    def __init__(self, program):
        self.program, self._block = program, program.global_block()

    @property
    def _is_startup(self):
        return any(op.name() in _RESULTS for op in self._block.ops)

    @property
    def ops(self) -> list[Operator]:
        ops = self._block.ops
        if self._is_startup:
            return [Operator(op) for op in ops if op.name() in _RESULTS]
        return [Operator(op) for op in ops if not op.name().startswith("builtin.") and _is_visible(op)]

    @property
    def vars(self) -> dict[str, Any]:
        """{name: value} of all variables: their declaration or, without one, the last value that is written."""
        found = {}
        for op in self._block.ops:
            if op.name() in _RESULTS:
                found[op.str_attr(_RESULTS[op.name()])] = op.operand_source(0)
            for value in op.results():
                name = value.initialized() and name_of(value)
                if name and (name not in found or not found[name].persistable):
                    found[name] = value
        return found

    def var(self, name: str) -> Any:
        return self.vars[name]

    def has_var(self, name: str) -> bool:
        return name in self.vars

    def all_parameters(self) -> list[Any]:
        return self._block.all_parameters()

    def create_var(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: Any = None,
        persistable: bool = False,
        stop_gradient: bool = False,
    ) -> Any:
        if isinstance(dtype, str):
            dtype = convert_np_dtype_to_dtype_(dtype)
        if not persistable or self._is_startup:
            return Variable(name, shape, dtype, persistable, stop_gradient)
        with paddle.static.program_guard(self.program):
            pir.reset_insertion_point_to_start()
            value = _pir_ops.data(name, list(shape), dtype, paddle.base.core.Place())
        value.persistable, value.stop_gradient = True, True
        return value

    def append_op(
        self,
        type: str,
        inputs: dict[str, Any] | None = None,
        outputs: dict[str, Any] | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        self._build(None, type, inputs or {}, outputs, attrs or {})

    def _insert_op_without_sync(self, at, type, inputs, outputs, attrs):
        ops = self.ops
        self._build(ops[at].op if at < len(ops) else None, type, inputs, outputs, attrs)

    def _build(self, before, type, inputs, outputs, attrs):
        """Insert an operator before an operator of PIR, or append it, and write its outputs."""
        role, count = attrs.get("op_role", 0), self._block.num_ops()
        attrs = {name: value for name, value in attrs.items() if name not in ("op_role", "op_role_var")}
        inputs = {slot: self._values(value) for slot, value in inputs.items()}
        with paddle.static.program_guard(self.program) if before is None else _inserting_before(before):
            results = _listed(_OPERATORS[type](**inputs, **attrs))
            for target, value in zip(_listed([*outputs.values()]), results, strict=False):
                self._write(target, value, before)
        ops = self._block.ops
        end = len(ops) if before is None else ops.index(before)
        for op in ops[end - (self._block.num_ops() - count) : end]:
            op.set_int_attr(_ROLE, role if op == results[0].get_defining_op() else _AUXILIARY)

    def _values(self, variable):
        """Return the value of an input, or a list of values. An input is a value, a Variable, a name or a list."""
        if isinstance(variable, list | tuple):
            return [self._values(item) for item in variable]
        if isinstance(variable, Variable):
            return variable.value
        return self.var(variable) if isinstance(variable, str) else variable

    def _write(self, target, value, before):
        if isinstance(target, Variable) and not target.persistable:
            target.value, value.stop_gradient = value, target.stop_gradient
            _set_name(value, target.name)
            return
        name = target if isinstance(target, str) else target.name if isinstance(target, Variable) else name_of(target)
        if self._is_startup:
            value.persistable = True
            _pir_ops.set_persistable_value(value, name)
            return
        variable = self.var(name)
        _set_name(value, name)
        if variable.persistable:
            paddle.assign(value, output=variable)
            return
        ops = self._block.ops
        for op in ops[ops.index(before) :]:
            for operand in op.operands():
                if operand.source().is_same(variable):
                    operand.set_source(value)

    def _remove_op(self, i, sync=True):
        op = self.ops[i].op
        for value in op.results():
            for reader in value.all_used_ops() if value.initialized() else []:
                if _role(reader) == _AUXILIARY:  # the reader writes the value to a variable
                    reader.erase()
        op.erase()

    def _rename_var(self, name, new_name):
        """Replace a variable by a persistable variable with a different name, and return the new variable."""
        old = self.var(name)
        new = self.create_var(new_name, old.shape, old.dtype, persistable=True)
        old.replace_all_uses_with(new)
        return new

    def _sync_with_cpp(self):
        """Do nothing, because a program of PIR has no second representation."""


def _is_visible(op):
    return op.name() not in _DECLARATIONS and _role(op) != _AUXILIARY


def _listed(values):
    """Return a value, or the values in nested lists, as a list."""
    if isinstance(values, list | tuple):
        return [value for item in values for value in _listed(item)]
    return [values]


def minimize(optimizer: Any, loss: Any, startup: Any, roles: tuple[int, int, int]) -> None:
    """Add the backward pass and the update to the current program, with the roles that legacy operators have.

    Args:
        optimizer: one of Paddle's optimizers.
        loss: value [], the mean loss of the batch.
        startup: startup program.
        roles: roles of the gradient of the loss, of the other operators of the backward pass, and of the update.
    """
    block = Block(loss.get_defining_op().get_parent_block().program)
    first = len(block.ops)
    trained = [parameter for parameter in block.all_parameters() if not parameter.stop_gradient]
    optimizer.minimize(loss, startup, trained[::-1])  # legacy programs list the parameters in this order
    role, backward, update = roles
    for op in block.ops[first:]:
        if {"Param", "Grad"} <= set(op.input_names):
            role = update
            _set_name(op.op.operand_source(op._index("Grad")), f"{op.input('Param')[0]}@GRAD")
        op.op.set_int_attr(_ROLE, _AUXILIARY if op.type == "fill_constant" else role)
        if op.type == "fill_any_like":
            role = backward


def feeds(program: Any) -> dict[str, Any]:
    """Return the input variables of a program as {name: value}, in the order in which they were declared."""
    values = [op.result(0) for op in program.global_block().ops if op.name() == "pd_op.data"]
    return {name_of(value): value for value in values if not value.persistable}


def clone(program: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a copy of a program, and a function that returns the value of the copy for a value of the program."""
    values = pir.IrMapping()
    copy = program.clone(values)
    return copy, values.look_up
