"""Host scalars: numbers and arrays that the host computes for each batch, such as the learning rate.

A program reads each host scalar from a persistable variable. The host writes the variables of host scalars before
every batch, captured or not. Checkpoints do not contain host scalars, because their values are functions of the batch
number. The only exception is the learning rate, which is part of Paddle's checkpoint format.
"""

from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import graph
from paddle_resnet.step import facts

PREFIX = "host_scalar."  # prefix of the variables of host scalars; checkpoints omit these variables


def declare(name: str, value_of: Callable, shape: Sequence[int] = (1,), dtype: str = "float32") -> static.Variable:
    """Create a variable in the current program that the host writes before each step.

    Args:
        name: unique name in the program.
        value_of: function without arguments that returns the value for the next step, an array or number.
        shape, dtype: shape and type of the variable.
    Returns:
        the variable.
    """
    variable = graph.global_variable(PREFIX + name, shape, dtype)
    facts.of(static.default_main_program()).inputs[variable.name] = value_of
    return variable


class Writer:
    """Writes all host scalars of a program.

    Args:
        program: Program whose variables are in the global scope.
        place: device of the program.
    """

    def __init__(self, program, place):
        self._scalars = facts.of(program).inputs
        block = graph.block(program)
        variables = {name: block.var(name) for name in self._scalars}
        self._types = {name: (convert_dtype(v.dtype), v.shape) for name, v in variables.items()}
        # Paddle's dropout reads its seed on the host. A seed on the GPU would make the host wait for a copy.
        on_host = {op.input("Seed")[0] for op in block.ops if op.type == "dropout" and op.input("Seed")}
        self._places = {name: paddle.CPUPlace() if name in on_host else place for name in self._scalars}

    def __call__(self):
        for name, value_of in self._scalars.items():
            tensor = static.global_scope().find_var(name).get_tensor()
            value = paddle.base.core.LoDTensor()
            dtype, shape = self._types[name]
            value.set(np.asarray(value_of(), dtype).reshape(shape), paddle.CPUPlace())
            tensor._copy_from(value, self._places[name])  # unlike `set`, this method does not wait for the GPU
