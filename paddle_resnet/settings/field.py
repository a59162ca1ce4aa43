"""Declare the flags of a component or of a group (settings/groups/) as the fields of its Settings, a frozen dataclass:

    @dataclass(frozen=True)
    class Settings:
        dropout: float = flag(0.0, "dropout rate before the last layer", topic="regularize", parse=numbers.ratio)

The name of the field is the name of the flag with underscores. settings/declarations.py collects the fields of all
components and groups, and values.Settings.part returns an instance with the values of a run.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paddle_resnet.settings.values import METHOD, flag_name, listed
from paddle_resnet.utils import numbers

_FLAG = "flag"  # key of the Flag in the metadata of a dataclass field


class Declaration(NamedTuple):
    """Attributes of a flag in addition to those of its argparse action.

    Attributes:
        kind: one of declarations.KINDS, which determines the runs that inherit the flag from a checkpoint.
        topic: topic of `--help TOPIC` that describes the flag.
        batches: whether the flag determines the order or the content of the training batches.
        depends_on: names of other flags; this flag is not inherited from a checkpoint if the user sets one of the
            other flags to a value that differs from the checkpoint's.
        used_by: (name of another flag, the values of that flag for which this flag has an effect), for example the
            schedules that use this flag; None if this flag always has an effect.
        before: value to assume for checkpoints that are older than the flag; None for the default.
    """

    kind: str
    topic: str
    batches: bool = False
    depends_on: tuple[str, ...] = ()
    used_by: tuple[str, tuple] | None = None
    before: Any = None


class Flag(NamedTuple):
    """A flag: its Declaration, its default, and the further options of argparse's add_argument."""

    declaration: Declaration
    default: Any
    options: dict


class Conflict(NamedTuple):
    """An invalid value, or a conflict between flags.

    Attributes:
        message: error message.
        unused: names of the flags that the flags in `by` make unused or unusable. If two flags exclude each other, both
            names are in `unused` and in `by`.
        by: names of the flags that cause the conflict.
    """

    message: str
    unused: tuple[str, ...] = ()
    by: tuple[str, ...] = ()


def flag(
    default: Any,
    help: str,
    *,
    topic: str,
    kind: str = "recipe",
    parse: Callable[[str], Any] | None = None,
    choices: list | None = None,
    metavar: str | None = None,
    depends_on: tuple[str, ...] = (),
    used_by: tuple[str, tuple] | None = None,
    **declaration: Any,
) -> Any:
    """Return a dataclass field that declares a flag.

    Args:
        default: default value. A flag with a boolean default is a switch: `--flag` without a value means true, and
            `--flag false` overrides the configuration file.
        help: help text. `--help` shows the text up to the first semicolon. If the text ends with "(default: ...)",
            `--help` shows these parentheses instead of the flag's default value.
        topic, kind, depends_on, used_by, declaration: attributes of Declaration. A flag also depends on the flag in
            `used_by`.
        parse: function that converts the text of a value, and raises argparse.ArgumentTypeError if the value is
            invalid.
        choices: valid values.
        metavar: placeholder of the value in the help.
    """
    options: dict = {"help": help}
    if isinstance(default, bool):
        options |= {"nargs": "?", "const": True, "type": numbers.truth, "metavar": "false"}
    else:
        options |= {"type": parse, "choices": choices, "metavar": metavar}
        if choices is None and metavar is None:
            options["metavar"] = {int: "N", float: "X"}.get(type(default))
    if used_by is not None:
        depends_on = (*depends_on, used_by[0])
    declared = Flag(Declaration(kind, topic, depends_on=depends_on, used_by=used_by, **declaration), default, options)
    start: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**start, metadata={_FLAG: declared})


def about(method: str, name: str) -> Any:
    """Return a dataclass field that contains what a method of values.Settings returns for the flag `name`, for example
    "is_explicit" or "flag_value"."""
    return dataclasses.field(kw_only=True, metadata={METHOD: (method, name)})


def flags(settings: type) -> dict[str, Flag]:
    """Return {name: Flag} for the fields of the Settings of a component or group."""
    return {field.name: field.metadata[_FLAG] for field in dataclasses.fields(settings)}


def out_of_range(name: str, value: float | list[float], low: float, high: float) -> Iterator[Conflict]:
    """Yield a Conflict if a value, or a value in a list, is outside the range from `low` to `high`."""
    values = value if isinstance(value, list) else [value]
    if min(values) < low or max(values) > high:
        yield Conflict(f"{flag_name(name)} {listed(values)}: out of range; use values from {low:g} to {high:g}")
