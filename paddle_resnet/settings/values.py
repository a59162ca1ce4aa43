"""The values of all flags with their origins."""

import dataclasses

EXPLICIT = "explicit_flags"


class Settings:
    """One attribute per flag, with underscores: `settings.batch_size` is --batch-size.

    The values may change until they are resolved (see resolution.py for the order) and frozen, before the first program
    is built.

    Args:
        values: {name: value}.
        origins: {name: origin} of the values that are not defaults. An origin is "command line", "file PATH",
            "Python", "checkpoint FOLDER", "data", "machine", or the flag that a value follows.
    """

    __slots__ = ("__dict__", "_is_frozen", "_origins", "_run")

    def __init__(self, values, origins):
        object.__setattr__(self, "_is_frozen", False)
        object.__setattr__(self, "_origins", dict(origins))
        object.__setattr__(self, "_run", self)
        vars(self).update(values)

    def __setattr__(self, name, value):
        self.set("Python", **{name: value})

    def set(self, origin, **values):
        """Set values.

        Raises:
            dataclasses.FrozenInstanceError: the settings are frozen.
            AttributeError: a flag is unknown.
        """
        if self._is_frozen:
            raise dataclasses.FrozenInstanceError(
                f"settings.{next(iter(values))}: settings are frozen once a program is built; set it before, or use "
                "settings.copy()"
            )
        if unknown := values.keys() - vars(self).keys():
            raise AttributeError(f"settings.{min(unknown)}: not a flag; see train.py --help")
        vars(self).update(values)
        self._origins.update(dict.fromkeys(values, origin))

    def resolve(self, origin, **values):
        """Set the values that differ from the current ones. All other values keep their origin."""
        if changes := {name: value for name, value in values.items() if vars(self)[name] != value}:
            self.set(origin, **changes)

    def finalize(self):
        """Freeze the settings."""
        object.__setattr__(self, "_is_frozen", True)

    @property
    def is_frozen(self):
        return self._is_frozen

    @property
    def run(self):
        """The settings of the entire run if these settings belong to a stage; otherwise these settings."""
        return self._run

    def stage(self):
        """Return a copy of the settings for one stage of the run."""
        copy = self.copy()
        object.__setattr__(copy, "_run", self)
        return copy

    def copy(self, **values):
        """Return a copy that is not frozen, with the same origins and with these values set."""
        copy = Settings(vars(self), self._origins)
        if values:
            copy.set("Python", **values)
        return copy

    def origin(self, name):
        return self._origins.get(name, "default")

    def is_explicit(self, name):
        """Return whether the command line, the configuration file or Python code has set a flag."""
        origin = self.origin(name)
        return origin in ("command line", "Python") or origin.startswith("file ")

    def is_inherited(self, name):
        """Return whether the value of a flag comes from a checkpoint."""
        return self.origin(name).startswith("checkpoint ")

    def as_dict(self):
        """Return the flags that describe the run, as plain data."""
        values = {name: value for name, value in vars(self).items() if name not in ("config", "print_config")}
        return values | {"run_scope": self.run_scope.value}

    def as_entry(self):
        """Return the first entry of the report: as_dict, and the names of the explicit flags under EXPLICIT."""
        values = self.as_dict()
        return values | {EXPLICIT: [name for name in values if self.is_explicit(name)]}


def flag(name):
    """Return the command-line name of an attribute: --batch-size for batch_size."""
    return "--" + name.replace("_", "-")


def network_name(arch):
    """Return the name that files and folders use for the network of --model-arch-name: NAME for FILE.py:NAME."""
    return arch.rpartition(":")[2]


def text(value):
    """Format a flag's value for the command line."""
    return ",".join(map(text, value)) if isinstance(value, list) else str(value)
