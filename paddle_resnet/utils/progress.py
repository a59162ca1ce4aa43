"""The progress line, which shows the current phase and the progress of a run on a terminal.

A thread of the rich library draws the line four times per second. The overhead is one comparison per step, plus
formatting the metrics on the host at most four times per second.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from time import monotonic
from typing import TextIO

from paddle_resnet.utils import signals

PERIOD_S = 0.25
_live = None
_phase, _since_s, _metrics, _due_s = "startup", 0.0, None, 0.0


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show the progress line while the `with` block runs, if stdout is a terminal that can redraw a line.

    A job with several processes has no progress line, because no rank has the metrics of the entire job between two log
    lines, and because the launcher redirects stdout to files.
    """
    global _live
    console = _console()
    if console is None:
        yield
        return
    from rich.live import Live

    phase("startup")
    live = Live(
        console=console,
        get_renderable=_line,
        refresh_per_second=1 / PERIOD_S,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    with signals.blocked():  # the thread of rich must not receive signals
        live.start()
    console.show_cursor(True)  # rich hides the cursor, which would remain hidden if the process were killed
    _live = live
    try:
        yield
    finally:
        _live = None
        with contextlib.suppress(OSError):
            live.stop()


def _console():
    """Return a rich console for stdout, or None if the job has several processes or stdout is not a terminal that can
    redraw a line."""
    is_alone = os.environ.get("PADDLE_TRAINERS_NUM", "1") == "1"
    if sys.stdout is None or not sys.stdout.isatty() or not is_alone:
        return None
    from rich.console import Console

    console = Console(file=sys.stdout)
    return None if console.is_dumb_terminal else console


def is_shown() -> bool:
    return _live is not None


def phase(name: str) -> None:
    """Begin a phase. The progress line then shows the name of the phase and, until show() is called, its current
    duration."""
    global _phase, _since_s, _metrics, _due_s
    _phase, _since_s, _metrics, _due_s = name, monotonic(), None, 0.0
    if _live is not None:
        with contextlib.suppress(OSError):  # raised if the terminal has been closed
            _live.refresh()  # refresh now, because the new phase may hold the GIL for seconds


def is_due() -> bool:
    """Return whether the progress line needs new metrics."""
    return _live is not None and monotonic() >= _due_s


def show(
    step: int,
    steps: int,
    left_s: float,
    run_left_s: float | None,
    metrics: Iterable[str],
    more: Iterable[str] = (),
) -> None:
    """Show step metrics. Call show() only if is_due() returns True.

    Args:
        step, steps: completed steps and total steps in this phase.
        left_s: estimated seconds until the end of the phase.
        run_left_s: estimated seconds for the remaining training steps of the run, or None.
        metrics: strings to show. If the line is wider than the terminal, its end is cut off.
        more: strings to show if the terminal is wide enough, in descending order of importance.
    """
    global _metrics, _due_s
    assert _live is not None
    shown = [*metrics, f"{_duration(left_s)} left"]
    room = _live.console.width - len("  ".join([_phase, *shown]))
    optional = [f"step {step}/{steps}", *([f"run {_duration(run_left_s)}"] if run_left_s is not None else []), *more]
    for text in optional:
        room -= len(text) + 2
        if room < 0:
            break
        shown.append(text)
    _metrics = "  ".join(shown)
    _due_s = monotonic() + PERIOD_S


def write_above(line: str, stream: TextIO) -> bool:
    """Write a line above the progress line, if this line is shown and the stream is a terminal. Return whether the line
    was written."""
    live = _live
    if live is None or not stream.isatty():
        return False
    from rich.text import Text

    live.console.print(Text(line), soft_wrap=True)
    return True


def _line():
    from rich.text import Text

    metrics = _metrics or f"{monotonic() - _since_s:.0f} s"
    return Text.assemble((_phase, "bold cyan"), "  ", metrics, no_wrap=True, overflow="ellipsis")


def _duration(seconds):
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
