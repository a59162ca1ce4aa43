"""Types for argparse that parse numbers and other values and check their limits, shared by train.py and the tools.

Each type function raises ArgumentTypeError if the value is invalid. argparse includes the message of this exception in
the error message for the flag.
"""

import argparse
import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")
AUTO = "auto"  # value of --label-offset with which the data set determines the offset
MAX_BELOW_ONE = 0.9999999  # float32 rounds values just below 1 to 1, and optimizers divide by 1 minus the value
MAX_NUMBER = 1e38  # Paddle and DALI convert numbers to float32, whose largest value is 3.4e38


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return the argparse type for a whole number from least to most."""

    def parse(text):
        allowed = f"use a whole number from {least} to {most}"
        try:
            value = int(text)
        except ValueError as e:  # int() also rejects numbers with more than 4,300 digits
            raise argparse.ArgumentTypeError(f"'{short(text)}' is not a whole number; {allowed}") from e
        if value < least:
            raise argparse.ArgumentTypeError(f"{short(text)} is too small; {allowed}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{short(text)} is too large; {allowed}")
        return value

    return parse


def number(text: str) -> float:
    """Parse a finite number, a fraction such as 1/255, or a power such as 2^-15, and return it as a float. Raises
    argparse.ArgumentTypeError for other texts, and for numbers above MAX_NUMBER or below -MAX_NUMBER."""
    try:
        base, power, exponent = text.partition("^")
        value = float(Fraction(base)) if "/" in base else float(base)
        value = value ** int(exponent) if power else value
    except OverflowError:  # too large for a float, for example 10^400
        value = 2 * MAX_NUMBER
    except (ValueError, ZeroDivisionError) as e:
        message = f"'{short(text)}' is not a number; use a number such as 0.1 or 1/255"
        raise argparse.ArgumentTypeError(message) from e
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{short(text)} is not finite; use a number such as 0.1 or 1/255")
    if abs(value) > MAX_NUMBER:
        allowed = f"use a number from -{MAX_NUMBER:g} to {MAX_NUMBER:g}"
        raise argparse.ArgumentTypeError(f"{short(text)} is out of range; {allowed}")
    return value


def positive_number(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{short(text)} is not positive; use a number above 0")
    return value


def ratio(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{short(text)} is not between 0 and 1; use a number from 0 to 1")
    return value


def truth(text: str) -> bool:
    values = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"'{text}' is not a boolean; use true or false")
    return values[text.lower()]


def not_negative_number(text: str) -> float:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; use 0 or more")
    return value


def factor(text: str) -> float:
    value = positive_number(text)
    if value > 1000:  # powers of larger factors may overflow
        raise argparse.ArgumentTypeError(f"{text} is too large; use a number up to 1000, such as 0.1")
    return value


def positive_ratio(text: str) -> float:
    value = ratio(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive; use a number above 0 and up to 1, such as 0.8")
    return value


def below_one(text: str) -> float:
    value = ratio(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1; use a number of at least 0 and below 1, such as 0.9")
    if value > MAX_BELOW_ONE:
        raise argparse.ArgumentTypeError(f"{text} is too close to 1 for float32; use {MAX_BELOW_ONE} or less")
    return value


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the argparse type for a comma-separated list of values, each of which is parsed with `parse`."""

    def parse_list(text):
        if text.startswith("[") and text.endswith("]"):
            bare = short(",".join(text[1:-1].replace(",", " ").split()))
            raise argparse.ArgumentTypeError(f"'{short(text)}' has brackets; use {bare}")
        if len(text.split()) > 1 and "," not in text:
            with_commas = short(",".join(text.split()))
            raise argparse.ArgumentTypeError(f"'{short(text)}' has no commas; use {with_commas}")
        return [parse(part) for part in text.split(",")]

    return parse_list


def or_none(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return an argparse type that converts the text "None" to None, which overrides a value in the configuration file,
    and any other text with `parse`."""
    return lambda text: None if text == "None" else parse(text)


def short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} characters)"


def label_offset(text: str) -> int | str:
    """Parse the value of --label-offset, and return AUTO or a whole number."""
    return AUTO if text == AUTO else integer(0, 10**6)(text)


positive = integer(1)
not_negative = integer(0)
seed = integer(0, 2**32 - 1)
batch_size = integer(1, 2**16)
num_of_class = integer(1, 2**24)  # RecordIO stores labels as float32, which is exact up to this limit
threads = integer(1, 1024)  # number of threads or processes; thousands of threads would abort the process
MAX_SIDE = 8192  # maximum side of a resized image in pixels
side = integer(1, MAX_SIDE)
shape = list_of(integer(0, MAX_SIDE))
number_list = list_of(number)
