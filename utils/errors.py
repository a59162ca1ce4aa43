"""Errors with a known cause, which train.py prints as one sentence."""


def printable(text):
    """A text with escapes such as \\n and \\x1b for the characters that would break the line or steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


NO_CLASS = (
    "an image has a label that is no class of the network: give a larger --num-of-class, or number the classes from 0"
)


class UsageError(ValueError):
    """A flag, a configuration file, a data set or a checkpoint that cannot be used: exit code 2.

    Raised before the first step. The message is one sentence that names the flag, its value and the remedy.
    """


class DataError(UsageError):
    """An image that cannot be read or decoded, or whose label is no class, found while the run reads it: after the
    first step, too."""


class RunError(RuntimeError):
    """A run that cannot go on: exit code 1. The message names what failed, where, and what is safe."""
