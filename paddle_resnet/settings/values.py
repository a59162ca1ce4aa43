"""Store the value and the origin of each flag."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paddle_resnet.utils.errors import command

T = TypeVar("T")
Changes = dict[str, dict[str, Any]]  # {origin: {name of a flag: value}}
METHOD = "method"  # key of (method of Settings, name of a flag) in the metadata of a field; see field.about
EXPLICIT = "explicit_flags"
# Further keys of the first entry of a report. ENVIRONMENT describes the machine and the software; EVALUATED is the
# folder of the checkpoint that a run without training evaluates.
ENVIRONMENT, EVALUATED = "environment", "evaluated_checkpoint"
_CHOSEN = "chosen: "
# Origins of the values that override values of a file or a recipe.
_HIGHEST = ("command line", "Python", "internal", "recorded", "machine")
_OF_COMMAND = ("config", "print_config", "inference_dir")  # flags that describe the command, not the run


class FlagValue(NamedTuple):
    """The value of a flag, and whether the flag is explicit."""

    value: Any
    is_explicit: bool


class Settings:
    """The values of all flags, as attributes: `settings.batch_size` is --batch-size.

    resolution.py resolves the values step by step. Programs are built from frozen settings, whose values do not change.

    Args:
        values: {name of a flag: value}.
        origins: {name: origin} for the values that are not defaults. An origin is "command line", "file PATH",
            "Python", "checkpoint FOLDER", "data", "machine", "chosen: REASON", or the flag from which the value is
            derived; "recorded" for all values of an earlier run, and "internal" for a value that the program sets for
            its own use.
    """

    _resolved: "Settings | None"
    __slots__ = ("__dict__", "_dropped", "_is_frozen", "_origins", "_parts", "_resolved", "_run")

    def __init__(self, values: dict, origins: dict) -> None:
        object.__setattr__(self, "_is_frozen", False)
        object.__setattr__(self, "_dropped", [])
        object.__setattr__(self, "_origins", dict(origins))
        object.__setattr__(self, "_run", self)
        object.__setattr__(self, "_parts", {})
        object.__setattr__(self, "_resolved", None)
        vars(self).update(values)

    if TYPE_CHECKING:  # type checkers do not know the attributes that contain the flags

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        self.set("Python", **{name: value})

    def set(self, origin: str, /, **values: Any) -> None:
        """Set values.

        Raises:
            dataclasses.FrozenInstanceError: the settings are frozen.
            AttributeError: a flag is unknown.
        """
        if self._is_frozen:
            raise dataclasses.FrozenInstanceError(
                f"settings.{next(iter(values))}: these settings are frozen; set the value before program.start(), or "
                "use settings.copy()"
            )
        if unknown := values.keys() - vars(self).keys():
            raise AttributeError(f"settings.{min(unknown)}: not a flag; see {command('train', '--help')}")
        vars(self).update(values)
        self._parts.clear()
        object.__setattr__(self, "_resolved", None)
        self._origins.update(dict.fromkeys(values, origin))

    def resolve(self, origin: str, /, **values: Any) -> None:
        """Set values, but keep the origin of each value that does not change."""
        if changes := {name: value for name, value in values.items() if vars(self)[name] != value}:
            self.set(origin, **changes)

    def replace(self, **values: Any) -> None:
        """Set values, but keep their origins."""
        for name, value in values.items():
            self.resolve(self.origin(name), **{name: value})

    def apply(self, step: type, *arguments: Any) -> None:
        """Set the values that a step of resolution.py computes from its part of these settings. `step` is a dataclass,
        like those for part(), with a method `changes` that takes `arguments` and returns Changes."""
        part: Any = self.part(step)
        self._resolve_all(part.changes(*arguments))

    def _resolve_all(self, changes):
        for origin, values in changes.items():
            self.resolve(origin, **values)

    def choose(self, reason: str, /, **values: Any) -> None:
        """Set values that --choose-recipe or --budget-minutes has chosen. The origin of the values contains the
        reason."""
        self.set(f"{_CHOSEN}{reason}", **values)

    def finalize(self) -> None:
        """Freeze the settings: prevent further changes."""
        object.__setattr__(self, "_is_frozen", True)

    @property
    def dropped(self) -> list[str]:
        """List of messages about values that validation.drop_unused has dropped. The list does not contain messages
        that have already been logged."""
        return self._dropped

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    @property
    def resolved(self) -> "Settings":
        """These settings if they are frozen; otherwise, a copy for resolution.resolve, so that the functions of
        program.py and dali.py do not change the settings of their caller. The copy is kept until a value changes."""
        if self._is_frozen:
            return self
        copy = self._resolved
        if copy is None:
            copy = self.copy()
            object.__setattr__(copy, "_dropped", self._dropped)  # log each message only once
            object.__setattr__(self, "_resolved", copy)
        return copy

    @property
    def run(self) -> "Settings":
        """If these settings belong to a stage, the settings of the entire run; otherwise, these settings."""
        return self._run

    def stage(self, changes: Changes) -> "Settings":
        """Return the settings for one stage of the run: these settings if there are no changes, otherwise a frozen
        copy."""
        if not changes:
            return self
        copy = self.copy()
        object.__setattr__(copy, "_run", self)
        copy._resolve_all(changes)
        copy.finalize()
        return copy

    def copy(self, origin: str = "Python", /, **values: Any) -> "Settings":
        """Return a copy that is not frozen. The copy has the new `values`, whose origin is `origin`, and all other
        flags keep their values and origins."""
        copy = Settings(vars(self), self._origins)
        if values:
            copy.set(origin, **values)
        return copy

    def part(self, cls: type[T]) -> T:
        """Return the values of the flags that `cls` declares, as an instance of `cls`, such as rates.Settings."""
        if cls not in self._parts:
            self._parts[cls] = cls(**{field.name: self._value(field) for field in dataclasses.fields(cls)})
        return self._parts[cls]

    def _value(self, field):
        method, name = field.metadata.get(METHOD, ("__getattribute__", field.name))
        return getattr(self, method)(name)

    def origin(self, name: str) -> str:
        return self._origins.get(name, "default")

    def is_explicit(self, name: str) -> bool:
        """Return whether the command line, the configuration file or Python code has set a flag."""
        origin = self.origin(name)
        return origin in ("command line", "Python") or origin.startswith("file ")

    def is_fixed(self, name: str) -> bool:
        """Return whether the value of a flag must not be derived from other flags, because it is explicit, internal or
        recorded (see `origins`)."""
        return self.is_explicit(name) or self.origin(name) in ("internal", "recorded")

    def explicit(self, name: str) -> Any:
        """Return the value of a flag if it is explicit, otherwise None."""
        return getattr(self, name) if self.is_explicit(name) else None

    def flag_value(self, name: str) -> FlagValue:
        """Return the FlagValue of a flag."""
        return FlagValue(getattr(self, name), self.is_explicit(name))

    def is_inherited(self, name: str) -> bool:
        """Return whether the value of a flag comes from a checkpoint."""
        return self.origin(name).startswith("checkpoint ")

    def is_chosen(self, name: str) -> bool:
        """Return whether --choose-recipe or --budget-minutes has chosen the value of a flag."""
        return self.origin(name).startswith(_CHOSEN)

    def rank(self, name: str) -> int:
        """Return 3 for a value that overrides values of a file or a recipe, such as a value from the command line, 2
        for a value from a file, 1 for a value that the program has chosen (choose), and 0 for all others."""
        if self.is_chosen(name):
            return 1
        return 2 if self.origin(name).startswith("file ") else 3 if self.origin(name) in _HIGHEST else 0

    def start_paths(self) -> dict[str, str]:
        """Return {flag: path} for --from-checkpoint and --from-pretrained-params, if they are set."""
        paths = {flag_name(name): getattr(self, name) for name in ("from_checkpoint", "from_pretrained_params")}
        return {flag: path for flag, path in paths.items() if path is not None}

    def input_folders(self) -> dict[str, str]:
        """Return {flag: path} for --from-checkpoint, --from-pretrained-params and --teacher, if they are set."""
        return self.start_paths() | ({} if self.teacher is None else {"--teacher": self.teacher})

    def as_dict(self) -> dict[str, Any]:
        """Return {name: value} for the flags that describe the run, with values that JSON and YAML can store."""
        values = {name: value for name, value in vars(self).items() if name not in _OF_COMMAND}
        return values | {"run_scope": self.run_scope.value}

    def as_entry(self) -> dict[str, Any]:
        """Return the first entry of the report: the result of as_dict, and a list of the explicit flags under the key
        EXPLICIT."""
        values = self.as_dict()
        return values | {EXPLICIT: [name for name in values if self.is_explicit(name)]}


def flag_name(name: str) -> str:
    """Return the command-line name of an attribute: --batch-size for batch_size."""
    return "--" + name.replace("_", "-")


def argument(settings: Any, name: str) -> str:
    """Return a flag and its value as a user writes them on the command line. `settings` has the flag as an attribute:
    the Settings of a run, or of a component."""
    value = getattr(settings, name)
    if value is True:
        return flag_name(name)
    return f"{flag_name(name)} {value:g}" if isinstance(value, float) else f"{flag_name(name)} {text(value)}"


def listed(values: Sequence[float]) -> str:
    """Format a list of numbers for the command line."""
    return ",".join(f"{value:g}" for value in values)


def network_name(arch: str) -> str:
    """Return the name of a network for file and folder names. For --model-arch-name FILE.py:NAME, the name is NAME."""
    return arch.rpartition(":")[2]


def text(value: Any) -> str:
    """Format a flag's value for the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
