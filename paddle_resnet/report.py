"""`python -m paddle_resnet.report RUN...`: compare runs based on their reports, or write the page of a run.

Paddle is imported only for heat maps of misclassified images, and DALI is never imported. The packages of the page are
imported late, because train.py imports this module.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from paddle_resnet.job import processes
from paddle_resnet.models import registered_name, user_file
from paddle_resnet.utils import exit_codes, files, logger, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import UsageError, program

if TYPE_CHECKING:
    from pathlib import Path

    from paddle_resnet.run_report import Options


def write_page_of_run(options: Options) -> None:
    """Write the page of the run in this process on rank 0, if --report-html is set. For exceptions, see write_page."""
    if options.report_html is not None and processes.rank() == 0:
        write_page(options.report_html, options.report_file, options.model_arch_name)
        logger.info(f"page: {options.report_html}")


def write_page(path: str | Path, report_file: str | Path, model_arch_name: str | None = None) -> None:
    """Write the page of a run, with heat maps. For the same run, train.py and `paddle_resnet.report` write the same
    page.

    Args:
        path: path of the page to write.
        report_file: path of the report.
        model_arch_name: FILE.py:NAME, if the network is defined in a user's file; other names have no effect. The name
            in the report is not used, because a report must not cause Python code to run.
    Raises:
        UsageError, RunError: see page.write.
    """
    from paddle_resnet.results import page

    def draw(checkpoint, evaluation):
        with signals.importing_paddle():
            from paddle_resnet.machine import compat

            compat.check_version()
            from paddle_resnet.serving import heat_maps
        own = model_arch_name if user_file.split(model_arch_name or "") else None
        model = heat_maps.open_model(checkpoint, model_arch_name=own)
        recorded = model.description["evaluated"] or {}
        if any(recorded.get(name, value) != value for name, value in evaluation.items()):
            raise UsageError(f"{checkpoint}: was written by a different run, because its evaluation differs")
        return partial(heat_maps.overlay, model)

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
    return exit_codes.of(program("report"), lambda: _compare(**vars(parser.parse_intermixed_args(argv))))


def _compare(runs, html, model_arch_name):
    from paddle_resnet.results import comparison

    if model_arch_name and (html is None or len(runs) > 1):
        problem = "requires --html and a single RUN"
        raise UsageError(f"--model-arch-name {model_arch_name}: {problem}; remove --model-arch-name")
    own = model_arch_name and registered_name(model_arch_name)
    comparison.compare(runs, html, lambda path, report: write_page(path, report, own))


if __name__ == "__main__":
    sys.exit(main())
