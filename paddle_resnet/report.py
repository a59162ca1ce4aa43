"""`python -m paddle_resnet.report RUN...`: compare runs based on their reports, or write the page of a run.

Paddle is imported only for heat maps of misclassified images, and DALI never.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from paddle_resnet.models import registered_name
from paddle_resnet.results import comparison, page
from paddle_resnet.utils import exit_codes, files, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import program

if TYPE_CHECKING:
    from pathlib import Path


def write_page(path: str | Path, report_file: str | Path, model_arch_name: str | None = None) -> None:
    """Write the page of a run, with heat maps. The page is the same during the run and later.

    Args:
        path: path of the page to write.
        report_file: path of the report.
        model_arch_name: FILE.py:NAME, if the network is defined in a user's file. The name in the report is not used,
            because it would run the file.
    Raises:
        UsageError, RunError: see page.write.
    """

    def draw(checkpoint):
        with signals.importing_paddle():
            from paddle_resnet.machine import compat

            compat.check_version()
            from paddle_resnet.serving import heat_maps
        return partial(heat_maps.overlay, heat_maps.open_model(checkpoint, model_arch_name=model_arch_name))

    page.write(path, report_file, draw)


def main(argv: list[str] | None = None) -> int:
    """Compare the runs that the arguments specify, and return the exit code (see exit_codes.of)."""
    parser = Parser(
        prog="report",
        description="Compare runs: metrics, curves, flags that differ, and the first step at which the losses differ.",
        examples=(
            ("compare two runs", "output/ResNet50 output2/ResNet50 --html comparison.html"),
            ("write the page of a run", "output/ResNet50 --html page.html"),
        ),
    )
    parser.add_argument(
        "runs",
        type=files.argument,
        nargs="+",
        metavar="RUN",
        help="report of a run, or a folder that contains report.json",
    )
    parser.add_argument(
        "--html",
        type=files.argument,
        metavar="FILE",
        help="HTML page to write; for a single run, the page contains all details",
    )
    parser.add_argument(
        "--model-arch-name",
        metavar="FILE.py:NAME",
        help="your own network, which draws the heat maps of the page of a single run",
    )
    return exit_codes.of(program("report"), lambda: _main(parser.parse_intermixed_args(argv)))


def _main(args):
    arch = args.model_arch_name and registered_name(args.model_arch_name)
    comparison.compare(args.runs, args.html, lambda path, report: write_page(path, report, arch))


if __name__ == "__main__":
    sys.exit(main())
