"""Command-line parser with a short --help; `--help all`, `--help TOPIC` and `--help FLAG` print more flags."""

import argparse
import difflib
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NoReturn

from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import UsageError, command

LONGEST_WORD = 500  # maximum length of a word in an error message; longer flag values are shortened
ALL = "all"  # topic that contains all flags
WIDTH = 100  # maximum number of columns of a help text
_DEFAULT = re.compile(r" \(default: .*\)$")  # in help texts of flags whose default depends on other values


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError. --help prints the examples, and one line for each main flag.

    The line of a flag contains its help text up to the first semicolon, and its default unless this is None or False.
    If the help text ends with "(default: ...)", as for flags whose default depends on other flags, the line shows this
    default.

    Args:
        examples: [(purpose, arguments of the command)].
        main: {question: [main flags, or names of positional arguments]}; if empty, --help lists all arguments or
            commands with their complete help texts.
        options: arguments of argparse.ArgumentParser; `prog` is the name of the command, such as "train".
    Attributes:
        topics: {topic: (description, [flags])}.
    """

    def __init__(
        self,
        *,
        examples: Sequence[tuple[str, str]] = (),
        main: dict[str, tuple[str, ...]] | None = None,
        add_help: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self.examples, self.main = examples, main or {}
        self.topics: dict[str, tuple[str, list[str]]] = {}
        if add_help:
            self.add_argument("-h", "--help", action=_Help)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: "):
            message = f"{message}; see --help"
        elif message.startswith("unrecognized arguments: "):
            unknown = message.partition(": ")[2]
            raise UsageError(self.unknown_argument(unknown.split()[0] if unknown.startswith("-") else unknown))
        elif message.endswith(": expected one argument"):
            message = f"{message}; add a value"
        words = message.removeprefix("argument ").split()
        raise UsageError(" ".join(w if len(w) <= LONGEST_WORD else numbers.short(w) for w in words))

    def parse_known_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> tuple:
        return super().parse_known_args(join_help(args), namespace)

    def unknown_argument(self, argument: str, help: str = "--help") -> str:
        """Return the error message for an argument that the command does not accept. `help` is the flag or command that
        prints the help of the command, as the message shows it."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"'{argument}': unexpected argument; see {help}"
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
        return f"{name}: unknown flag; {f'use {near[0]}, or ' if near else ''}see {help}"

    def format_help(self) -> str:
        """Return the text of --help."""
        examples = [f"  {purpose}:\n    {self._command()} {arguments}" for purpose, arguments in self.examples]
        blocks = [_filled(self.description), *(["\n".join(["Examples:", *examples])] if examples else [])]
        if self.main:
            main = {question: [self._action(name) for name in names] for question, names in self.main.items()}
            blocks += [_sections(main, is_brief=True), self._more()]
        else:
            blocks.append(_sections({"Commands" if self.commands() else "Arguments": self._all()}))
        return "\n\n".join([*blocks, *([_filled(self.epilog)] if self.epilog else [])]) + "\n"

    def _more(self):
        count = sum(bool(action.option_strings) for action in self._all())
        text = f"More: --help {ALL} (all {count} flags) or --help FLAG"
        width = max(map(len, self.topics), default=0) + 2
        topics = [f"  {name:{width}}{description}" for name, (description, _) in self.topics.items()]
        return "\n".join([f"{text} or --help TOPIC; the topics are:", *topics]) if topics else text

    def help_on(self, topic: str) -> str:
        """Return the text of `--help TOPIC`. TOPIC can be "all", a key of `topics`, a flag (with or without dashes), or
        a command.

        Raises:
            UsageError: the topic is unknown.
        """
        if text := self.find_help(topic):
            return text
        near = difflib.get_close_matches(_flag(topic), self._option_string_actions, n=1, cutoff=0.75)
        known = ", ".join([ALL, *self.topics, *self.commands()])
        raise UsageError(f"--help {topic}: unknown topic; use {near[0] if near else 'a flag'}, or one of {known}")

    def find_help(self, topic: str) -> str | None:
        """Return the same text as help_on, or None if the topic is unknown."""
        if topic in self.commands():
            return self.commands()[topic].format_help()
        if topic in self.topics or (topic == ALL and self.topics):
            topics = self.topics if topic == ALL else [topic]
            flags = {f"{self.topics[name][0]} ({name})": map(self._action, self.topics[name][1]) for name in topics}
            return _sections(flags) + "\n"
        if topic == ALL:
            return _sections({"Arguments": self._all()}) + "\n"
        action = self._option_string_actions.get(_flag(topic))
        return action and _sections({None: [action]}) + "\n"

    def commands(self) -> dict[str, "Parser"]:
        """Return {name: parser} for the commands of the program."""
        return self._subparsers._group_actions[0].choices if self._subparsers else {}

    def _command(self):
        name, *subcommands = self.prog.split()
        return command(name, *subcommands)

    def _all(self):
        if self._subparsers:
            return self._subparsers._group_actions[0]._get_subactions()
        hidden = (_Help, argparse._VersionAction)
        return [a for a in self._actions if not isinstance(a, hidden) and a.help != argparse.SUPPRESS]

    def _action(self, name):
        """Return the argparse action of a flag or of a positional argument."""
        return self._option_string_actions.get(name) or next(a for a in self._actions if a.dest == name)


class _Help(argparse.Action):
    """The flag --help, which prints help and exits."""

    def __init__(self, option_strings, dest):
        text = f"print help: on the command, on {ALL} flags, on a topic or on one flag"
        super().__init__(option_strings, dest, "?", default=argparse.SUPPRESS, metavar="TOPIC", help=text)

    def __call__(self, parser, namespace, value, option_string=None):
        print(parser.format_help() if value is None else parser.help_on(value), end="")
        parser.exit()


def join_help(arguments: Sequence[str] | None) -> list[str]:
    """Return the arguments (default: those of this process) with the first `--help` and its value joined by "=".
    Without the "=", argparse would parse `--help --lr` as two flags. The arguments after the value of --help are
    dropped, because the command prints help and exits."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for i, argument in enumerate(arguments[:-1]):
        if argument == "--":
            break
        if argument in ("-h", "--help"):
            return [*arguments[:i], f"--help={arguments[i + 1]}"]
    return arguments


def typed(value: object) -> str:
    """Return a text that a flag parses to exactly this value, such as 4,224,224, 1/255, 2^-15 or true."""
    if isinstance(value, list):
        return ",".join(map(typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    if float(f"{value:g}") == value:
        return f"{value:g}".replace("e-0", "e-")
    if value > 0 and math.log2(value).is_integer():
        return f"2^{math.log2(value):.0f}"
    fraction = Fraction(value).limit_denominator(1000)
    return str(fraction) if float(fraction) == value else str(value)


def _flag(name):
    return "--" + name.lstrip("-").replace("_", "-")


def _filled(text):
    formatter = argparse.HelpFormatter("", width=_width())
    formatter.add_text(text)
    return formatter.format_help().strip()


def _sections(sections, is_brief=False):
    """Return the text of help sections.

    Args:
        sections: {title or None: argparse actions}.
        is_brief: whether to print only one line per action.
    """
    formatter = _Formatter(is_brief)
    for title, actions in sections.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help().rstrip()


def _width():
    return min(WIDTH, shutil.get_terminal_size().columns)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, is_brief):
        super().__init__("", max_help_position=34, width=1000 if is_brief else _width())
        self._is_brief = is_brief

    def _split_lines(self, text, width):
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action):
        is_switch = self._is_brief and action.nargs == "?" and action.option_strings
        return action.option_strings[0] if is_switch else super()._format_action_invocation(action)

    def _get_help_string(self, action):
        text, default = action.help, ""
        if match := _DEFAULT.search(text):
            text, default = text[: match.start()], match[0]
        elif action.option_strings and not any(action.default is value for value in (None, False, argparse.SUPPRESS)):
            default = f" (default: {typed(action.default)})"
        return (text.partition(";")[0] if self._is_brief else text) + default + getattr(action, "mark", "")
