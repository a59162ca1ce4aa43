"""Read the --config file and convert its YAML to command-line arguments."""

from typing import Any

import yaml

from paddle_resnet.settings import parsing
from paddle_resnet.utils import files
from paddle_resnet.utils.errors import UsageError


def read(path: str) -> dict[str, Any]:
    """Return the flags that a --config file sets, as {name: value}.

    Raises:
        UsageError: the file cannot be read, is larger than 64 KiB, is not a YAML mapping, or contains an alias, an
            unknown key or an invalid value.
    """
    values = _read_yaml(path)
    try:
        return parsing.parse(parsing.arguments(values))
    except UsageError as e:
        raise UsageError(f"--config {path}: {e}") from e


def _read_yaml(path):
    """Return the content of a --config file.

    Raises:
        UsageError: the file cannot be read, is larger than 64 KiB, is not a YAML mapping, or contains an alias.
    """
    try:
        with files.open_regular(path, limit_bytes=64 << 10) as f:
            values = yaml.load(f.read().decode(), _YamlLoader)
        str(values)  # str() raises ValueError for integers of more than 4,300 digits
    except OSError as e:
        raise UsageError(f"--config {path}: cannot be read ({e.strerror}); use a readable YAML file") from e
    except Exception as e:  # PyYAML also raises built-in errors, such as RecursionError
        reason = " ".join(str(e).split())[:200]
        raise UsageError(f"--config {path}: not valid YAML ({reason}); correct the file") from e
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: not a mapping; write lines of the form `flag: value`")
    return values


class _YamlLoader(yaml.SafeLoader):
    """Loader that rejects aliases, because a few lines with aliases can expand to billions of values."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"alias {self.peek_event().start_mark}: not supported; replace it with its value")
        return super().compose_node(parent, index)


# _YamlLoader keeps numbers and dates as text, because YAML would convert 10:20 to 620, 010 to 8 and 2024_01_31 to
# 20240131.
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] in ("bool", "null")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
