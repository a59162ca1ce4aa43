"""Benchmarks and traces."""

import argparse
from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


def _steps(text):
    """Return [A, B] for the text A:B, or A,B (from a YAML list). Return None for the text "None", which overrides a
    value in the configuration file."""
    if text == "None":
        return None
    parts = text.replace(",", ":").split(":")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of steps; use A:B, such as 100:110")
    begin, end = (numbers.not_negative(part) for part in parts)
    if begin >= end:
        raise argparse.ArgumentTypeError(f"{begin}:{end} contains no step; use A:B with A less than B")
    return [begin, end]


@dataclass(frozen=True)
class Settings:
    benchmark: bool = flag(
        False,
        "measure the speed of training, or of evaluation with --run-scope eval_only, and stop",
        topic="benchmark",
        kind="output",
    )
    benchmark_steps: int = flag(
        100,
        "number of steps to measure",
        topic="benchmark",
        kind="output",
        parse=numbers.positive,
    )
    benchmark_warmup_steps: int = flag(
        100,
        "number of steps before the measurement",
        topic="benchmark",
        kind="output",
        parse=numbers.not_negative,
    )
    profile_steps: list[int] | None = flag(
        None,
        "steps of the first epoch to trace, from A to B-1; the trace is written to OUTPUT_DIR/profile/",
        topic="benchmark",
        kind="output",
        parse=_steps,
        metavar="A:B",
    )

    @property
    def total_steps(self) -> int | None:
        """The number of steps of a benchmark, or None if the run is not a benchmark."""
        return self.benchmark_warmup_steps + self.benchmark_steps if self.benchmark else None
