"""Errors that have a known cause, which commands print without a traceback, and texts for error messages."""

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "paddle-resnet"  # the command that pip installs (paddle_resnet/cli.py)
TRAIN = Path(__file__).parents[2] / "train.py"  # exists only in a checkout
# Path of paddle-resnet, if this command started the process; cli.py replaces sys.argv[0] later.
_RUNNING = os.path.abspath(sys.argv[0]) if sys.argv and os.path.basename(sys.argv[0]) == SCRIPT else None


def printable(text: str) -> str:
    """Return the text with non-printable characters escaped as \\n, \\x1b, etc., because they could end the line or
    control the terminal."""
    if text.isprintable():  # the usual case, without a loop over the characters
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with a noun in the singular or plural, such as "1 image" or "2 images"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def python() -> str:
    """Return how to type the interpreter that runs this process, such as .venv/bin/python."""
    return _typed(sys.executable, "python")


def _typed(path, name):
    """Return how to type the path of a program: `name` if a shell finds the program by this name, or else the path."""
    is_found = os.path.dirname(shutil.which(name) or "") == os.path.dirname(path)
    return name if is_found else _shortest(path)


def _shortest(path):
    """Return the path relative to the working directory if the path is below it, or else the path."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory was deleted, which exit_codes.of reports
        return str(path)
    return str(path) if relative.startswith("..") else relative


def is_installed() -> bool:
    """Return whether messages suggest the command paddle-resnet instead of train.py: if paddle-resnet started this
    process, even in a checkout (`pip install -e .`), or if the package is not in a checkout."""
    return _RUNNING is not None or not TRAIN.is_file()


def script() -> str:
    """Return the path of the installed command paddle-resnet."""
    return _RUNNING or os.path.join(os.path.dirname(sys.executable), SCRIPT)


def program(name: str) -> str:
    """Return the name of a command in messages, such as train.py, paddle_resnet.dataset or, if is_installed(),
    paddle-resnet dataset."""
    if is_installed():
        return f"{SCRIPT} {name}"
    return TRAIN.name if name == "train" else f"paddle_resnet.{name}"


def command(name: str, *arguments: object) -> str:
    """Return a command of this project, quoted for a shell, such as .venv/bin/python -m paddle_resnet.dataset index or,
    if is_installed(), paddle-resnet dataset index. Paths of programs below the working directory are relative to it;
    `arguments` are not changed."""
    if is_installed():
        words = [_typed(script(), SCRIPT), name]
    elif name == "train":
        words = [python(), _shortest(TRAIN)]
    else:
        words = [python(), "-m", f"paddle_resnet.{name}"]
    return shlex.join([*words, *map(str, arguments)])


def installation(extra: str) -> str:
    """Return the command that installs a list of requirements, quoted for a shell, without replacing the installed
    Paddle. In a checkout, the command works in the checkout's folder; if `make venv` has made the environment, the
    command for gpu and cpu repeats `make venv`.

    Args:
        extra: name of a list in pyproject.toml: gpu, cpu, onnx, serve or parquet.
    """
    if extra in ("gpu", "cpu"):
        if not is_installed() and os.path.isfile(os.path.join(sys.prefix, "paddle")):  # see Makefile
            return _repetition_of_make_venv()
        # The lists gpu and cpu pin a version of Paddle. If a different version is installed, install the other
        # packages.
        extra = {"paddlepaddle-gpu==2.6.2": "gpu", "paddlepaddle==2.6.2": "cpu", None: extra}.get(_paddle(), "base")
    file = f"requirements{'' if extra == 'gpu' else f'-{extra}'}.txt"
    package = SCRIPT if extra == "base" else f"{SCRIPT}[{extra}]"
    return shlex.join([python(), "-m", "pip", "install", *([package] if is_installed() else ["-r", file])])


def _repetition_of_make_venv():
    """Return the command that repeats `make venv` for the environment of this process, which `make venv` has made. The
    environment keeps its build of Paddle."""
    folder = os.path.relpath(sys.prefix, TRAIN.parent)
    folder = sys.prefix if folder.startswith("..") else folder
    venv = [] if folder == ".venv" else [f"VENV={folder}"]
    return f"rm -f {shlex.quote(folder)}/installed-* && {shlex.join(['make', 'venv', *venv])}"


def _paddle():
    """Return the installed Paddle, such as "paddlepaddle==2.6.2", without importing it, or None."""
    for name in ("paddlepaddle-gpu", "paddlepaddle"):
        try:
            return f"{name}=={importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def import_command(root: str | Path, *flags: str) -> str:
    """Return a remedy for messages: the command that imports the data set in the folder `root`, and the --image-root to
    use afterwards."""
    output = f"{os.path.abspath(root)}_imported"
    run = command("dataset", "import", root, *flags, "--output", output)
    return f"`{run}` and use --image-root {shlex.quote(output)}"


def core(error: BaseException) -> str:
    """Return the message of an error in one line, without the traces and hints that Paddle adds."""
    matches = re.findall(r"^ *(\w*Error:\s+\S.*)|^ *(\(\w+\) .*)", str(error), re.MULTILINE)
    text = "".join(matches[-1]) if matches else str(error).strip() or repr(error)
    return " ".join(text.split()).rstrip(".")


def json_problem(error: BaseException) -> str:
    """Return why a text cannot be read as JSON, given the ValueError or RecursionError of json.loads."""
    return "nested too deeply" if isinstance(error, RecursionError) else f"not JSON ({str(error)[:200]})"


NO_CLASS = (
    "--num-of-class: an image has a label that is not a class of the network; use a larger value, number the "
    "classes from 0, or set --label-offset to the first label"
)


class UsageError(ValueError):
    """A flag, configuration file, data set, checkpoint or output path cannot be used. The exit code is 2.

    The message contains the flag or path, the problem and the remedy. Each argument is a line of the message, for
    example one line per conflict between flags. Code that can detect the problem before the first step must raise the
    error then.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class DataError(UsageError):
    """An image cannot be read or decoded, or its label is not a valid class number. DataError is raised when the image
    is read, which may be after the first step."""


class RunError(RuntimeError):
    """A command cannot continue, for a reason other than its arguments or data. The exit code is 1."""
