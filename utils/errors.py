"""Errors with a known cause, which the commands print without a traceback."""

import re


def printable(text):
    """Escape the characters that would break the line or control the terminal, such as \\n and \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def core(error):
    """Return the message of a Paddle error, without its traces and hints."""
    matches = re.findall(r"^ *(\w*Error:\s+\S.*)|^ *(\(\w+\) .*)", str(error), re.MULTILINE)
    text = "".join(matches[-1]) if matches else str(error).strip() or repr(error)
    return " ".join(text.split()).rstrip(".")


NO_CLASS = (
    "an image has a label that is not a class of the network; use a larger --num-of-class or number classes from 0"
)


class UsageError(ValueError):
    """An unusable flag, configuration file, data set or checkpoint: exit code 2.

    Raised before the first step. The message states the flag or path, the problem and the remedy. Each argument becomes
    a line, for example one per conflict between flags.
    """

    def __str__(self):
        return "\n".join(map(str, self.args))


class DataError(UsageError):
    """An image that cannot be read or decoded, or whose label is not a class. Raised while the run reads images, so
    possibly after the first step."""


class RunError(RuntimeError):
    """A run that cannot continue: exit code 1. The message states what failed, where, and which work is saved."""
