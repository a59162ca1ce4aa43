"""Errors that have a known cause. Commands print these errors without a traceback."""

import os
import re
import shlex
import sys


def printable(text):
    """Return the text, with characters that would end the line or control the terminal escaped as \\n, \\x1b, etc."""
    if text.isprintable():  # the usual case, without a loop over the characters
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count, noun, plural=None):
    """Return a number with a noun in the singular or plural, such as "1 image" or "2 images"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def python():
    """Return how to type the interpreter that runs this process, such as .venv/bin/python."""
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith("..") else path


def command(module, *arguments):
    """Return a command of this project, quoted for a shell, such as .venv/bin/python -m paddle_resnet.dataset index."""
    return shlex.join([python(), "-m", f"paddle_resnet.{module}", *map(str, arguments)])


def import_command(root, *flags):
    """Return the text that suggests the command that imports a folder, and the --image-root that uses the result."""
    output = f"{os.path.abspath(root)}_imported"
    run = command("dataset", "import", root, *flags, "--output", output)
    return f"`{run}` and use --image-root {shlex.quote(output)}"


def core(error):
    """Return the message of a Paddle error without the traces and hints that Paddle adds."""
    matches = re.findall(r"^ *(\w*Error:\s+\S.*)|^ *(\(\w+\) .*)", str(error), re.MULTILINE)
    text = "".join(matches[-1]) if matches else str(error).strip() or repr(error)
    return " ".join(text.split()).rstrip(".")


NO_CLASS = (
    "--num-of-class: an image has a label that is not a class of the network; use a larger number, number classes from "
    "0, or set --label-offset to the first label"
)


class UsageError(ValueError):
    """A flag, configuration file, data set or checkpoint cannot be used. The exit code is 2.

    UsageError is raised before the first step. The message contains the flag or path, the problem and the remedy. Each
    argument is a line of the message, for example one line per conflict between flags.
    """

    def __str__(self):
        return "\n".join(map(str, self.args))


class DataError(UsageError):
    """An image cannot be read or decoded, or its label is not a valid class number. DataError is raised when the image
    is read, which may be after the first step."""


class RunError(RuntimeError):
    """A run cannot continue. The exit code is 1. The message states what failed and where, and which work is saved."""
