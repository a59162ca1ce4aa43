"""Parsing of numbers in flags."""

from argparse import ArgumentTypeError

import pytest

from paddle_resnet.utils import numbers


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (numbers.integer(1, 9), "1", 1),
        (numbers.integer(1, 9), "9", 9),
        (numbers.number, "-0.5", -0.5),
        (numbers.number, "1/4", 0.25),
        (numbers.number, "-1e38", -1e38),
        (numbers.positive_number, "1e-9", 1e-9),
        (numbers.ratio, "0", 0),
        (numbers.ratio, "1", 1),
        (numbers.list_of(numbers.ratio), "1", [1]),
        (numbers.list_of(numbers.ratio), "0, 0.5", [0, 0.5]),
        (numbers.short, "x" * 40, "x" * 40),
        (numbers.short, "x" * 41, f"{'x' * 30}... (41 characters)"),
    ],
)
def test_valid_values(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (numbers.integer(1, 9), "0", "0 is too small; use a whole number from 1 to 9"),
        (numbers.integer(1, 9), "10", "10 is too large; use a whole number from 1 to 9"),
        (numbers.integer(1, 9), "1.0", "'1.0' is not a whole number; use a whole number from 1 to 9"),
        (numbers.integer(1, 9), "1" * 41, f"{'1' * 30}... (41 characters) is too large; use"),
        (numbers.integer(1, 9), "-" + "1" * 40, f"-{'1' * 29}... (41 characters) is too small; use"),
        (numbers.integer(1, 9), "1" * 5000, f"'{'1' * 30}... (5000 characters)' is not a whole number; use"),
        (numbers.number, "1.1e38", "1.1e38 is out of range; use a number from -1e+38 to 1e+38"),
        (numbers.number, "-1.1e38", "-1.1e38 is out of range"),
        (numbers.number, "inf", "inf is not finite; use a number such as 0.1 or 1/255"),
        (numbers.number, "nan", "nan is not finite"),
        (numbers.number, "1/0", "'1/0' is not a number; use a number such as 0.1 or 1/255"),
        (numbers.number, "x", "'x' is not a number"),
        (numbers.number, "10^400", "10^400 is out of range"),
        (numbers.number, "9" * 400 + "/1", f"{'9' * 30}... (402 characters) is out of range"),
        (numbers.positive_number, "0", "0 is not positive; use a number above 0"),
        (numbers.ratio, "-0.1", "-0.1 is not between 0 and 1; use a number from 0 to 1"),
        (numbers.ratio, "1.1", "1.1 is not between 0 and 1"),
        (numbers.list_of(numbers.ratio), "0 1", "'0 1' has no commas; use 0,1"),
        (numbers.shape, "[4, 224, 224]", "'[4, 224, 224]' has brackets; use 4,224,224"),
        (numbers.number, "2^x", "'2^x' is not a number; use a number such as 0.1 or 1/255"),
        (numbers.list_of(numbers.ratio), "0,2", "2 is not between 0 and 1"),
    ],
)
def test_invalid_values(parse, text, message):
    with pytest.raises(ArgumentTypeError) as error:
        parse(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("positive", 1, 2147483647),
        ("not_negative", 0, 2147483647),
        ("seed", 0, 4294967295),
        ("batch_size", 1, 65536),
        ("num_of_class", 1, 16777216),
        ("threads", 1, 1024),
        ("side", 1, 8192),
    ],
)
def test_limits_of_whole_numbers(name, least, most):
    parse = getattr(numbers, name)
    assert (parse(str(least)), parse(str(most))) == (least, most)
    for value in (least - 1, most + 1):
        with pytest.raises(ArgumentTypeError, match=f"use a whole number from {least} to {most}$"):
            parse(str(value))


def test_lists_of_sides_and_numbers():
    assert numbers.shape("0,8192") == [0, 8192]
    assert numbers.number_list("0.5,1/4") == [0.5, 0.25]
    with pytest.raises(ArgumentTypeError, match="8193 is too large"):
        numbers.shape("8193")
