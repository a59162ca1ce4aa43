"""Convert command-line arguments and recorded flags to values."""

import argparse
import difflib
from typing import Any

import yaml

from paddle_resnet.settings import inheritance, values
from paddle_resnet.settings.declarations import ACTIONS, DEFAULTS, FLAGS, PARSER
from paddle_resnet.settings.values import Settings, flag_name, text
from paddle_resnet.utils.command_line import Parser, join_help
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

# Names that other programs use for the flags of train.py: {flag: names}.
ALIASES = {
    "amp": "fp16 mixed-precision use-amp",
    "batch-size": "b bs",
    "crop-size": "image-size img-size input-size",
    "dali-num-threads": "j num-workers threads workers",
    "ema": "ema-decay model-ema model-ema-decay",
    "from-checkpoint": "checkpoint load",
    "from-pretrained-params": "pretrained weights",
    "image-root": "data data-dir data-path dataset",
    "label-smoothing": "smoothing",
    "lr": "base-lr learning-rate",
    "lr-scheduler": "scheduler",
    "model-arch-name": "arch backbone model model-name",
    "num-of-class": "class-num num-classes",
    "optimizer": "opt",
    "output-dir": "checkpoint-dir output save-dir work-dir",
    "run-scope eval_only": "eval eval-only evaluate",
    "tensorboard-dir": "tensorboard",
    "weight-decay": "wd",
}
ALIASES = {alias: meant for meant, aliases in ALIASES.items() for alias in aliases.split()}
# Flags that older versions had: {flag: remedy for the error message}.
REMOVED = {"cpu-decoder-load": "remove it; --hw-decoder-load divides the images between the GPU's decoders"}


class ToolParser(Parser):
    """A parser for a tool that also accepts flags of train.py. The parser separates the flags of train.py first,
    because argparse would mistake the value of a flag that the tool does not have for the path that the tool
    expects."""

    def find_help(self, topic: str) -> str | None:
        return super().find_help(topic) or PARSER.find_help(topic)

    def parse_known_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> tuple:
        """Return (Namespace with the tool's arguments, list of the flags of train.py and of all unknown arguments).

        Raises:
            UsageError: an argument of the tool is invalid or missing, or a flag of the tool is misspelled.
        """
        arguments, own, of_train = join_help(args), [], []
        while arguments and arguments[0] != "--":
            argument = arguments.pop(0)
            name, equals, _ = argument.partition("=")
            action = None if name in self._option_string_actions else PARSER._option_string_actions.get(name)
            (own if action is None else of_train).append(argument)
            if action and not equals and arguments and _is_value(action, arguments[0]):
                of_train.append(arguments.pop(0))
        namespace, unknown = super().parse_known_args([*own, *arguments], namespace)
        for argument in unknown:
            self._check_spelling(argument)
        return namespace, [*of_train, *unknown]

    def _check_spelling(self, argument):
        """Raise UsageError for a misspelled flag of the tool, because the parser of train.py, which parses it later,
        would suggest a flag of train.py."""
        own, of_train = self._option_string_actions, PARSER._option_string_actions
        near = difflib.get_close_matches(argument.partition("=")[0], {*own, *of_train}, n=1, cutoff=0.75)
        if near and near[0] not in of_train:
            raise UsageError(self.unknown_argument(argument))


def _is_value(action, argument):
    """Return whether the argument after a flag is the flag's value. The value of a boolean flag is optional."""
    if action.nargs is None:
        return not argument.startswith("--")
    try:
        action.type(argument)
    except argparse.ArgumentTypeError:
        return False
    return True


def parse(arguments: list[str]) -> dict[str, Any]:
    """Return the flags that command-line arguments set, as {name: value}.

    Raises:
        UsageError: a flag is unknown, or a value is invalid. The message has one line per unknown flag, but names only
            the first invalid value.
    """
    if invalid := [argument for argument in arguments if "\0" in argument]:  # YAML and JSON text can contain null bytes
        raise UsageError(*(f"{argument}: contains a null byte; remove it" for argument in invalid))
    unset = object()
    args, unknown = PARSER.parse_known_args(arguments, argparse.Namespace(**dict.fromkeys(DEFAULTS, unset)))
    if unknown:
        raise UsageError(*_unknown_arguments(unknown))
    given = {name: value for name, value in vars(args).items() if value is not unset}
    if empty := [name for name, value in given.items() if value == []]:  # argparse parses --flag=-- as []
        raise UsageError(*(f"{flag_name(name)} --: no value; add a value" for name in empty))
    return given


def make_settings(given: dict[str, Any], origins: dict[str, str]) -> Settings:
    """Return Settings with the given values. All other flags have their defaults, or are derived from the given
    values."""
    flags = DEFAULTS | given
    flags["run_scope"] = RunScope(flags["run_scope"])
    made = Settings(flags, origins)
    inheritance.follow(made)
    return made


def from_dict(recorded: dict[str, Any]) -> Settings:
    """Convert the result of Settings.as_dict to Settings. The dictionary may be from a different version: a missing
    flag gets the value that reproduces the behavior before the flag existed, and unknown flags are ignored.

    Raises:
        UsageError: a value is invalid.
    """
    before = {name: declaration.before for name, declaration in FLAGS.items() if declaration.before is not None}
    known = before | {name: value for name, value in recorded.items() if name in FLAGS}
    parsed = parse(arguments(known))
    return make_settings(parsed, dict.fromkeys(parsed, "recorded"))


def changed(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `flags`, a result of Settings.as_dict, whose values differ from their defaults."""
    defaults = make_settings({}, {}).as_dict()
    return {name: value for name, value in flags.items() if value != defaults.get(name)}


def as_yaml(settings: values.Settings) -> str:
    """Return the settings as the text of a --config file. Flags that the user did not set are omitted if their value
    can depend on more than the flags (inheritance.may_follow)."""
    flags = settings.as_dict()
    written = {n: v for n, v in flags.items() if settings.is_explicit(n) or not inheritance.may_follow(settings, n)}
    return yaml.safe_dump(written, sort_keys=False).rstrip()


def arguments(flags: dict[str, Any]) -> list[str]:
    """Convert {name: value} to command-line arguments.

    Raises:
        UsageError: a name is unknown, a value is nested, or YAML converted a string without quotes to a boolean.
    """
    result = []
    for key, value in flags.items():
        if key not in ACTIONS or key == "config":
            raise UsageError(_unknown("key", str(key), [name for name in ACTIONS if name != "config"]))
        if isinstance(value, bool) and not ACTIONS[key].nargs:
            raise UsageError(f"{key}: YAML parses the value as the boolean {str(value).lower()}; put it in quotes")
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, list | dict) for v in value)):
            raise UsageError(f"{key}: nested values are not supported; use a single value or a flat list")
        if value is not None:  # null keeps the default
            result.append(f"{flag_name(key)}={text(value)}")
    return result


def _unknown_arguments(arguments):
    """Return an error message for each unknown flag or, if all flags are known, for the first unexpected value."""
    flags = [option for action in PARSER._actions for option in action.option_strings]
    unknown = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
    if not unknown:
        return [f"'{arguments[0]}': unexpected argument; write each value after its --flag"]
    return [_unknown("flag", name, flags) for name in unknown]


def _unknown(kind, argument, known):
    bare = {name.lstrip("-"): name for name in known}  # dashes would make all flags similar to each other
    normalized = argument.lstrip("-").replace("_", "-")
    if normalized in REMOVED:
        return f"{argument}: this {kind} no longer exists; {REMOVED[normalized]}"
    if normalized in ALIASES:
        meant = (
            f"--{ALIASES[normalized]}" if kind == "flag" else ALIASES[normalized].replace("-", "_").replace(" ", ": ")
        )
        return f"{argument}: unknown {kind}; use {meant}"
    near = difflib.get_close_matches(normalized if kind == "flag" else normalized.replace("-", "_"), bare, n=1)
    return f"{argument}: unknown {kind}; " + (f"use {bare[near[0]]}, or see --help" if near else "see --help")
