"""Errors with a known cause. train.py prints each as one sentence."""

import re


def printable(text):
    """A text with escapes such as \\n and \\x1b for the characters that would break the line or steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def core(error):
    """What an error of Paddle says, without its traces and hints."""
    found = re.findall(r"^ *(\w*Error:\s+\S.*)|^ *(\(\w+\) .*)", str(error), re.MULTILINE)
    text = "".join(found[-1]) if found else str(error).strip() or repr(error)
    return " ".join(text.split()).rstrip(".")


NO_CLASS = (
    "an image has a label that is not a class of the network: give a larger --num-of-class or number classes from 0"
)


class UsageError(ValueError):
    """An unusable flag, configuration file, data set or checkpoint: exit code 2.

    Raised before the first step. The message is one sentence that names the flag, its value and the remedy. Several
    arguments are lines of their own, such as the conflicts of several flags.
    """

    def __str__(self):
        return "\n".join(map(str, self.args))


class DataError(UsageError):
    """An image that cannot be read or decoded, or whose label is not a class. Raised while the run reads images, so
    also after the first step."""


class RunError(RuntimeError):
    """A run that cannot continue: exit code 1. The message names what failed, where, and what is safe."""
