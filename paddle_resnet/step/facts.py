"""Facts about a program that a run needs in addition to the operators of the program.

The arguments of `build` and `compile_prog` are instances of Paddle's own Program, so the facts are stored in a separate
table. The keys of the table are weak references, so that the table does not keep programs in memory. Therefore, the
facts of a program must refer neither to the program nor to its variables.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paddle import static

OPTIMIZER = ".pdopt"  # suffix of the file with the optimizer state
AVERAGES = ".pdema"  # suffix of the file with averages of the weights, which evaluations use instead of the weights


@dataclass(frozen=True)
class State:
    """Persistable variables that a component has added to a training program.

    Attributes:
        variables: {source: variable}.
        file: suffix of the checkpoint file that contains the variables: OPTIMIZER; another suffix, such as AVERAGES,
            for a file that has the format of PREFIX.pdparams, in which the variables replace their sources; or None if
            checkpoints do not contain them.
        starts_as_source: whether the variables start with the values of their sources, which are parameters or BN
            statistics. If false, the startup program determines the values.
        flag, what: the flag that adds the variables, and their name in messages.
    """

    variables: dict[str, str]
    file: str | None
    starts_as_source: bool = False
    flag: str = ""
    what: str = ""


@dataclass(frozen=True)
class Loaded:
    """A training program whose variables have their initial values.

    Attributes:
        program: training program; its variables are in the global scope.
        optimizer: the optimizer that build has returned.
        place: device of the program.
        names: names of the variables in the checkpoint from which the run starts; empty if there is none.
    """

    program: static.Program
    optimizer: Any
    place: Any
    names: set[str]


@dataclass
class Facts:
    """The facts of a program.

    Attributes:
        backend: "native" if build adds custom operators to the program, otherwise "paddle".
        optimizer: name of the optimizer whose update build has added, or None.
        states: the State of each component that has one.
        inputs: {variable: function that returns its value for the next step}, the host scalars (scalars.py).
        bn_average: program that averages the BN statistics over the processes (passes/all_reduces.py), once built.
        teacher: distillation.Teacher, or None without --teacher.
    """

    backend: str = "paddle"
    optimizer: str | None = None
    states: list[State] = field(default_factory=list)
    inputs: dict[str, Callable] = field(default_factory=dict)
    bn_average: static.Program | None = None
    teacher: Any = None


_facts: weakref.WeakKeyDictionary[static.Program, Facts] = weakref.WeakKeyDictionary()


def of(program: static.Program) -> Facts:
    """Return the facts of a program. For a program that build has not filled, all facts have their default values."""
    return _facts.setdefault(program, Facts())


def share(program: static.Program, copy: static.Program) -> None:
    """Make a copy of a program share the Facts object of the program."""
    _facts[copy] = of(program)
