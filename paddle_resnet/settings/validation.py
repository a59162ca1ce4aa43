"""Check flags for invalid values and for conflicts, and drop values of a file or a recipe that conflict with flags of
higher rank (drop_unused)."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

from paddle_resnet.settings import conflicts, inheritance, values
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS, MODULES
from paddle_resnet.settings.field import Conflict
from paddle_resnet.settings.groups import machine, start
from paddle_resnet.settings.values import argument, flag_name, text
from paddle_resnet.utils.errors import UsageError, printable


def _unused(settings: values.Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each flag whose effect was requested, but that a different flag makes unused (used_by in
    field.Declaration). The effect was requested by a value that differs from the default, or by any value on the
    command line or in Python except 0, false and None, which turn a flag off. A derived value is not a request. A
    default in a file is not a request, because the output of --print-config also lists unused flags."""
    for name, declaration in FLAGS.items():
        choice, users = declaration.used_by or (None, ())
        if choice is None or getattr(settings, choice) in users:
            continue
        value, origin = getattr(settings, name), settings.origin(name)
        is_typed = origin in ("command line", "Python") and bool(value)
        if origin.startswith("--") or not (is_typed or value != DEFAULTS[name]):
            continue
        if users == (True,):
            problem = f"requires {flag_name(choice)}; add it, or remove {flag_name(name)}"
            yield Conflict(f"{argument(settings, name)}: {problem}", (name,), (choice,))
        else:
            problem = f"not used by {argument(settings, choice)}; remove it, or use {flag_name(choice)} "
            problem += " or ".join(map(str, users))
            yield Conflict(f"{flag_name(name)} {text(value)}: {problem}", (name,), (choice,))


# Sources of conflicts: functions of all flags, classes in conflicts.py, and modules of components and groups. These
# conflicts are known before a run inherits or chooses flags:
_OF_COMMAND = (conflicts.Budget, conflicts.MultiLabelRecipe, start, conflicts.Evaluation, conflicts.Outputs)
# Inherited or chosen flags can cause or resolve these conflicts:
_OF_RUN = (
    _unused,
    *(module for module in MODULES if hasattr(module, "conflicts") and module not in (start, machine)),
    *(conflicts.MultiLabel, conflicts.Stages, conflicts.Representation, conflicts.Crop, conflicts.Decay),
    *(conflicts.Sparsity, conflicts.Optimizer, conflicts.Patience),
)


def _found(settings: values.Settings, sources: Iterable[Any]) -> Iterator[Conflict]:
    for source in sources:
        if isinstance(source, type):
            part: Any = settings.part(source)
            yield from part.conflicts()
        elif callable(source):
            yield from cast(Any, source)(settings)
        else:
            yield from source.conflicts(settings.part(source.Settings))


def of_command(options: start.Settings) -> tuple[Any, ...]:
    """Return the sources of the conflicts of a command line before flags are inherited or chosen. If the run will
    neither inherit nor choose flags, these are all sources."""
    is_complete = not (options.is_from_weights or options.resume or options.choose_recipe)
    return (*_OF_COMMAND, *_OF_RUN) if is_complete else _OF_COMMAND


def check(settings: values.Settings, sources: Iterable[Any] = _OF_RUN) -> None:
    """Check the flags: with of_command, those of a command line; by default, those that a run can inherit or choose,
    after all values have been inherited, chosen and derived.

    Raises:
        UsageError: a value is invalid, or flags conflict.
    """
    check_none(_found(settings, sources))


def check_none(found: Iterable[Conflict]) -> None:
    """Raise UsageError with the messages of all conflicts, if there are any."""
    if messages := [conflict.message for conflict in found]:
        raise UsageError(*messages)


def warnings(settings: values.Settings) -> Iterator[str]:
    """Yield a warning for each combination of flags that is valid but rarely intended."""
    for cls in conflicts.WARNINGS:
        part: Any = settings.part(cls)
        yield from part.warnings()


def drop_unused(settings: values.Settings) -> None:
    """Set each value of a file or a recipe that a flag of higher rank (values.Settings.rank) makes unused to its
    default, and add a message to settings.dropped. Conflicts between values of the same rank are not resolved,
    nor are conflicts in which the value of higher rank is the unused one."""
    of_dropped = {}  # {name of a dropped flag: rank of the flag with which it conflicts}

    def rank(name):
        """Return the rank of a value. A derived value has the rank of the flag from which it is derived, and a dropped
        value has the rank of the flag with which it conflicts."""
        origin = settings.origin(name)
        if origin.startswith("--"):
            return rank(origin[2:].replace("-", "_"))
        return of_dropped.get(name) or settings.rank(name)

    def droppable():
        for conflict in _found(settings, (*_OF_COMMAND, *_OF_RUN, conflicts.Device, machine)):
            highest = max(map(rank, conflict.by), default=0)
            yield from ((name, conflict) for name in conflict.unused if 0 < settings.rank(name) < highest)

    while found := next(droppable(), None):
        name, conflict = found
        of_dropped[name] = max(map(rank, conflict.by))
        settings.dropped.append(_ignored(argument(settings, name), name, settings.origin(name), conflict.message))
        inheritance.reset(settings, name)


def _ignored(flag_and_value, name, origin, message):
    """Return the log message for a dropped value, with the reason from the error message of the conflict."""
    problem = message.partition("; ")[0]
    subject, _, reason = problem.partition(": ")
    if subject.split()[0] != flag_name(name):
        subject, reason = flag_and_value, problem
    source = origin.replace("file", "--config", 1) if origin.startswith("file ") else "--choose-recipe"
    return printable(f"{source}: ignoring {subject} ({reason})")
