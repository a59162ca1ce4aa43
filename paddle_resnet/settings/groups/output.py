"""The log, the report and further results of a run."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import files, numbers


@dataclass(frozen=True)
class Settings:
    report_file: str | None = flag(
        None,
        "file for the metrics, in dllogger's format; --resume appends to it; an evaluation writes "
        "report.eval.json, and a benchmark report.benchmark.json (default: OUTPUT_DIR/ARCH/report.json)",
        topic="logs",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="FILE",
    )
    tensorboard_dir: str | None = flag(
        None,
        "folder for TensorBoard events: the metrics of the report, the first training batch and the flags",
        topic="logs",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="DIR",
    )
    report_html: str | None = flag(
        None,
        "file for an HTML page with curves, confused classes and images, written at the end of the run",
        topic="logs",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="FILE",
    )
    predictions: str | None = flag(
        None,
        "CSV file for the five most probable classes (with --multi-label, the probabilities of all classes) of each "
        "validation image in the best evaluation of the run",
        topic="logs",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="FILE",
    )
    print_interval: int = flag(
        10,
        "number of steps between log lines",
        topic="logs",
        kind="output",
        parse=numbers.positive,
    )
    show_config: bool = flag(
        True,
        "print the flags at startup; true: all; false: none (default: those that differ from their defaults)",
        topic="logs",
        kind="output",
    )
    verbose: bool = flag(
        False,
        "list the variables of a checkpoint that do not match the network, instead of only their number",
        topic="logs",
        kind="output",
    )
