"""What a run must know about a program in addition to its operators.

`build` takes and `compile_prog` receives Paddle's own Program, so the facts are in a table beside the programs. The
keys are weak references: the facts of a program end with the program. They must not refer to it, nor to its variables.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from paddle import static


@dataclass
class Facts:
    """The facts of a program.

    Attributes:
        backend: "native" if build adds custom operators to the program, otherwise "paddle".
        optimizer: name of the optimizer whose update build has added, or None.
        inputs: {variable: function that returns its value for the next step}, the host scalars (scalars.py).
        bn_average: program that averages the BN statistics over the processes (passes/all_reduces.py), once built.
    """

    backend: str = "paddle"
    optimizer: str | None = None
    inputs: dict[str, Callable] = field(default_factory=dict)
    bn_average: static.Program | None = None


_facts: weakref.WeakKeyDictionary[static.Program, Facts] = weakref.WeakKeyDictionary()


def of(program: static.Program) -> Facts:
    """Return the facts of a program. They are empty for a program that build has not filled."""
    return _facts.setdefault(program, Facts())


def share(program: static.Program, copy: static.Program) -> None:
    """Give a copy of a program the same facts."""
    _facts[copy] = of(program)
