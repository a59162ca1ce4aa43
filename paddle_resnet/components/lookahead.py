"""Lookahead: slow weights that follow the weights at intervals."""

import argparse
from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers

LEAST_FRACTION = 1e-6  # minimum A in --lookahead K,A; values below 1e-45 would be 0 in float32


def parse(text: str) -> list | None:
    """Parse --lookahead, or "None" to override a value in the configuration file."""
    if text == "None":
        return None
    try:
        interval, fraction = text.split(",")
        values = [numbers.positive(interval.strip()), numbers.ratio(fraction)]
        if values[1] < LEAST_FRACTION:
            raise ValueError
        return values
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not of the form K,A; use a whole number K above 0 and a fraction A from "
            f"{LEAST_FRACTION:g} to 1, such as 6,0.5"
        ) from e


@dataclass(frozen=True)
class Settings:
    lookahead: list | None = flag(
        None,
        "interval K in steps and fraction A of lookahead, such as 6,0.5: every K steps, the slow weights move "
        "towards the weights by the fraction A of the difference, and the weights are set to the slow weights",
        topic="optimizer",
        parse=parse,
        metavar="K,A",
    )
