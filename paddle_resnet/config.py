"""Parse the command line of train.py.

This module imports neither Paddle nor DALI, so that `--help` and flag errors appear immediately.
"""

import os
import sys

from paddle_resnet.settings import config_file, parsing, validation, values
from paddle_resnet.settings.declarations import DEFAULTS, PARSER
from paddle_resnet.settings.groups import start
from paddle_resnet.utils import exit_codes
from paddle_resnet.utils.command_line import Parser


def parse_args(argv: list[str] | None = None) -> values.Settings:
    """Parse and check the flags.

    Args:
        argv: list of arguments, or None for the command line. Flags in argv override the flags in `--config FILE`,
            which override the defaults. If a flag in argv makes a flag of the file unused, the flag of the file has
            its default.
    Returns:
        Settings with one attribute per flag; run_scope is a RunScope. Flags that
        depend on the checkpoint, the data or the machine are resolved later (paddle_resnet/resolution.py).
    Raises:
        UsageError: the file cannot be used, a flag or key is unknown, a value is invalid, or flags conflict. The
            message has one line per unknown flag or conflict, but names only the first invalid value.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    path = _config_file(argv)
    of_file = {} if path is None else config_file.read(path)
    of_line = parsing.parse(argv)
    origins = dict.fromkeys(of_file, f"file {path}") | dict.fromkeys(of_line, "command line")
    settings = parsing.make_settings(of_file | of_line, origins)
    validation.drop_unused(settings)
    validation.check(settings, validation.of_command(settings.part(start.Settings)))
    return settings


def needs_flags() -> bool:
    """Return whether train.py cannot run without flags, because the default --image-root does not exist."""
    return not os.path.isdir(DEFAULTS["image_root"])


def print_help() -> int:
    """Print the help of train.py to stderr. Return the exit code of a usage error, because nothing was trained."""
    print(PARSER.format_help(), end="", file=sys.stderr)
    return exit_codes.USAGE


def _config_file(argv):
    parser = Parser(add_help=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config
