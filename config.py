"""The command line of train.py.

This module imports neither Paddle nor DALI, so that `--help` and flag errors appear immediately.
"""

import sys

from paddle_resnet.settings import config_file, parsing, validation
from paddle_resnet.settings.declarations import Parser


def parse_args(argv=None):
    """Read the flags.

    Args:
        argv: list of arguments; default: the command line. These flags take precedence over those in `--config FILE`,
            which take precedence over the defaults.
    Returns:
        Settings (paddle_resnet/settings/values.py): one attribute per flag with underscores; run_scope is a RunScope.
        Unset values that depend on checkpoint, data or machine are resolved later (paddle_resnet/resolution.py).
    Raises:
        UsageError: a flag or key is unknown, a value has the wrong type, or flags conflict; one line per problem.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    path = _config_file(argv)
    of_file = {} if path is None else config_file.read(path)
    of_line = parsing.parse(argv)
    origins = dict.fromkeys(of_file, f"file {path}") | dict.fromkeys(of_line, "command line")
    settings = parsing.settings(of_file | of_line, origins)
    validation.check_command(settings)
    return settings


def _config_file(argv):
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config
