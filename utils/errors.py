"""Errors with a known cause, which commands print without a traceback."""

import re


def printable(text):
    """Escape characters that would break the line or control the terminal, such as \\n and \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def core(error):
    """Return the message of a Paddle error without the traces and hints that Paddle adds."""
    matches = re.findall(r"^ *(\w*Error:\s+\S.*)|^ *(\(\w+\) .*)", str(error), re.MULTILINE)
    text = "".join(matches[-1]) if matches else str(error).strip() or repr(error)
    return " ".join(text.split()).rstrip(".")


NO_CLASS = (
    "an image has a label that is not a class of the network; use a larger --num-of-class or number classes from 0"
)


class UsageError(ValueError):
    """A flag, configuration file, data set or checkpoint is unusable: exit code 2.

    This error is raised before the first step. The message states the flag or path, the problem and the remedy. Each
    argument becomes a line of the message, for example one line per conflict between flags.
    """

    def __str__(self):
        return "\n".join(map(str, self.args))


class DataError(UsageError):
    """An image cannot be read or decoded, or its label is not a class. This error is raised while the run reads images,
    so possibly after the first step."""


class RunError(RuntimeError):
    """A run cannot continue: exit code 1. The message states what failed, where, and which work is saved."""
