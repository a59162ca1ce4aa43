"""Check data that was read from JSON files. The schemas of meta.json, reports and exports use these functions."""

from collections.abc import Callable
from typing import Any, TypeGuard

Check = Callable[[Any], bool]


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2**31 - 1."""
    return type(value) is int and 0 <= value < 2**31


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a float, including infinity and NaN, or an integer from -2**1023 to 2**1023."""
    return type(value) is float or (type(value) is int and abs(value) <= 2**1023)


def is_ratio(value: object) -> TypeGuard[float]:
    return is_number(value) and 0 <= value <= 1


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_table(value: object, /, **checks: Check) -> bool:
    """Return whether a value is a dictionary that contains every key of `checks`, with a value that passes the
    corresponding check."""
    return isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())


def is_list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_none_or(check: Check) -> Check:
    return lambda value: value is None or check(value)
