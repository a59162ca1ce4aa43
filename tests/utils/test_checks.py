"""Checks of values in JSON files."""

import math

import pytest

from paddle_resnet.utils import checks


@pytest.mark.parametrize(
    ("check", "valid", "invalid"),
    [
        (checks.is_count, [0, 2**31 - 1], [-1, 2**31, 1.0, True, "1", None]),
        (
            checks.is_number,
            [-1, 2**1023, -(2**1023), 0.5, math.nan, math.inf],
            [2**1023 + 1, -(2**1023) - 1, True, "1", None],
        ),
        (checks.is_ratio, [0, 1, 0.5], [-1e-9, 1 + 1e-9, math.nan, 2, "1", None]),
        (checks.is_text, ["", "a"], [1, None, ["a"]]),
        (checks.is_list_of(checks.is_text), [[], ["a", "b"]], [["a", 1], "ab", None, ("a",), {"a": "b"}]),
        (checks.is_none_or(checks.is_text), [None, "a"], [1, ["a"]]),
    ],
)
def test_valid_and_invalid_values(check, valid, invalid):
    assert [value for value in valid if not check(value)] == []
    assert [value for value in invalid if check(value)] == []


def test_table_contains_valid_values():
    assert checks.is_table({}) and not checks.is_table([]) and not checks.is_table(None, a=checks.is_text)
    entries = {"a": checks.is_text, "value": checks.is_count}
    assert checks.is_table({"a": "b", "value": 1, "other": None}, **entries)
    for value in ({"a": "b"}, {"a": "b", "value": -1}, {"a": 1, "value": 1}, ["a", "value"]):
        assert not checks.is_table(value, **entries)
