"""What a run says about itself: first and last lines, and files beside --report-file for what its lines do not hold."""

import csv
import itertools
import os
import platform
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import nvidia.dali
import paddle
from paddle import static

from paddle_resnet import distributed, watchdog
from utils import logger
from utils.errors import RunError, UsageError
from utils.mode import RunScope

MIB = 2**20


def start_line(args, train_loader, eval_loader, compiled):
    """One line: network, devices, precision, layout, fused operators, CUDA graph, batch, learning rate, steps, gradient
    all-reduces.

    Args:
        args: flags.
        train_loader, eval_loader: those of this run; None for the other.
        compiled: result of program.compile_prog for the program that the line is about.
    """
    processes = distributed.world_size()
    precision = f"AMP {args.amp_level} in {args.amp_dtype}" if args.amp else "float32"
    loaders = {"train": train_loader, "val": eval_loader}
    sizes = [f"{name} {len(loader)} steps an epoch" for name, loader in loaders.items() if loader is not None]
    if train_loader is not None and processes > 1:
        sizes.append(f"{distributed.count_gradient_all_reduces(compiled._program)} gradient all-reduces a step")
    return (
        f"{args.model_arch_name} on {processes} x {args.device}, {precision}, {args.data_layout}, "
        f"{_fused_operators(args, compiled)}, {'CUDA graph, ' if args.cuda_graph else ''}batch "
        f"{args.batch_size} a process, peak lr {args.lr} x {processes} = {args.lr * processes:g}, {', '.join(sizes)}"
    )


def _fused_operators(args, compiled):
    """The fused operators that Paddle's passes have made. The Executor would compile the program in its first step; it
    takes what is compiled here."""
    compiled._compile(static.global_scope(), distributed.place(args))
    types = Counter(node.name() for node in compiled._graph.nodes() if node.is_op())
    fused = {name: count for name, count in sorted(types.items()) if name.startswith(("fused_", "native_"))}
    return ", ".join(f"{count} {name}" for name, count in fused.items()) or "no fused operators"


class StepLog:
    """Log lines of single steps with the figures of all processes.

    Each rank posts its figures, and rank 0 logs a step when those of all have come, some steps later. Nobody waits
    before the end of the epoch.

    Args:
        log: function of the step and its metrics.
    """

    _topics = itertools.count()

    def __init__(self, log):
        self._log, self._topic = log, next(self._topics)

    def add(self, step, images, metrics, common):
        """Args:
        step: number.
        images: of this process.
        metrics: {name: value} of this process; means over its images, but ips and times.
        common: {name: value} that is the same on all processes.
        """
        if distributed.world_size() == 1:
            self._log(step, {**metrics, **common})
            return
        watchdog.post(self._topic, step, (images, metrics, common))
        self._write(is_over=False)

    def finish(self):
        """Log what is left; every rank has to call this."""
        if distributed.world_size() > 1:
            watchdog.post(self._topic, None, None)
            self._write(is_over=True)

    def _write(self, is_over):
        if distributed.rank() == 0:
            for step, everyone in watchdog.collect(self._topic, is_over):
                self._log(step, over_all(everyone))


def over_all(everyone):
    """Figures of a step over several processes, [(images, {name: value}, {name: common value})] of each."""
    counts = [images for images, _, _ in everyone]
    result = {}
    for name in everyone[0][1]:
        values = [metrics[name] for _, metrics, _ in everyone]
        if name == "ips":
            result[name] = sum(values)
        elif name.endswith("_time"):
            result[name] = sum(values) / len(values)
        else:
            result[name] = sum(value * n for value, n in zip(values, counts, strict=True)) / sum(counts)
    return {**result, **everyone[0][2]}


def all_done(args, found):
    """Say that there is nothing left to train.

    Raises:
        UsageError: unless --resume was given, which is the end of a command that is repeated until it is done.
    """
    if not args.resume:
        raise UsageError(f"--epochs {args.epochs} are done in {found.folder}: give more than {found.epoch}")
    logger.info(f"--resume: all {args.epochs} epochs are done in {found.folder}")


def conclude(args, argv, result, mode):
    """Log the result of a benchmark or of an evaluation without training as the summary of the run.

    A benchmark's has peak memory, versions and command, too, and a table in place of the line.

    Args:
        args: flags.
        argv: words of the command line.
        result: of program.run, without arrays.
        mode: Mode.TRAIN or Mode.EVAL.
    """
    if args.benchmark:
        result = result | _peak_memory(args)
    data = {f"{mode.value}.{name}": value for name, value in result.items()}
    if not args.benchmark:
        logger.log((), data)
        return
    command = f"{_python()} train.py {shlex.join(argv)}"
    about = {"versions": _versions(args), "processes": distributed.world_size(), "command": command}
    logger.report((), data | about)
    if distributed.rank() == 0:
        _print_table(f"benchmark: {mode.value}", result, about)


def _peak_memory(args):
    """What Paddle's allocator held at most, in MiB on the process that held most; nothing on a CPU, where it does not
    count."""
    if args.device == "cpu":
        return {}
    gpu = distributed.local_gpu()
    mine = paddle.device.cuda.max_memory_allocated(gpu) / MIB
    return {"peak_memory_allocated_mib": float(distributed.all_gather([mine]).max())}


def _versions(args):
    versions = {
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "dali": nvidia.dali.__version__,
        "numpy": np.__version__,
    }
    if args.device == "gpu":
        gpu = distributed.local_gpu()
        versions |= {"gpu": paddle.device.cuda.get_device_name(gpu), "driver": _driver()}
        versions |= {"cuda": paddle.version.cuda(), "cudnn": paddle.device.get_cudnn_version()}
    return versions


def _driver():
    """The version of NVIDIA's driver; None where the kernel does not tell."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.is_file() else None


def _print_table(title, result, about):
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title=title, title_justify="left")
    for name, value in result.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}")
    table.add_section()
    for name, value in about.items():
        value = ", ".join(f"{what} {v}" for what, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, value)
    Console(width=120).print(table)


def summarise(args, argv, trained, evaluated, best, folder):
    """Log the results of a training run and print the command that evaluates its last checkpoint again, with a report
    of its own.

    Args:
        args: flags.
        argv: words of the command line.
        trained, evaluated: results of the last epoch; evaluated is None without evaluation.
        best: result and epoch of the best evaluation, or None.
        folder: the last checkpoint.
    """
    data = {f"train.{name}": trained[name] for name in ("loss", "top1", "top5", "ips")}
    if evaluated is not None:
        data |= {f"val.{name}": evaluated[name] for name in ("loss", "top1", "top5", "images")}
        data |= {"best.epoch": best["epoch"], "best.val.top1": best["top1"]}
    logger.log((), data)
    logger.info(f"last checkpoint: {folder}\nreport: {args.report_file}")
    if args.from_checkpoint is None and args.from_pretrained_params is None and not args.resume:
        flags = [*argv, "--run-scope", RunScope.EVAL_ONLY.value, "--from-checkpoint", str(folder)]
        flags += ["--report-file", str(_beside(args, "eval.json"))]
        flags += ["--profile-steps", "None"] if args.profile_steps else []
        logger.info(f"evaluate it again: {_python()} train.py {shlex.join(flags)}")


def _python():
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith("..") else path


def write_classes(args, result, classes):
    """Write which classes an evaluation got right and what it took the others for, on rank 0; nothing in a
    benchmark, whose images are not a data set.

    REPORT.classes.csv has a line a class: label, class, images, correct, top1. REPORT.confusion.csv has a line for each
    pair that occurred, the most frequent first: label, predicted, images, class, predicted_class. Each evaluation
    replaces the files of the one before.

    Args:
        args: flags.
        result: of program.run with Mode.EVAL.
        classes: class names in label order; there may be fewer than the network has outputs.
    Returns:
        the result without its arrays.
    """
    numbers = {name: value for name, value in result.items() if not isinstance(value, np.ndarray)}
    if distributed.rank() != 0 or args.benchmark:
        return numbers
    confusion = result["confusion"]
    if "not_finite" in numbers:
        logger.warn(
            f"the loss of {numbers['not_finite']} of {numbers['images']} images is not a number: the accuracies of the "
            "classes and the confusion leave these images out, or take them for an arbitrary class"
        )
    names = [*classes, *map(str, range(len(classes), len(confusion)))]
    rows = [
        (label, names[label], images, confusion[label, label], "" if images == 0 else f"{top1:.6f}")
        for label, (images, top1) in enumerate(zip(confusion.sum(axis=1), result["class_top1"], strict=True))
    ]
    _write(args, "classes", ("label", "class", "images", "correct", "top1"), rows)
    pairs = sorted(zip(*confusion.nonzero(), strict=True), key=lambda pair: -confusion[pair])
    rows = [(*pair, confusion[pair], *(names[label] for label in pair)) for pair in pairs]
    _write(args, "confusion", ("label", "predicted", "images", "class", "predicted_class"), rows)
    return numbers


def _write(args, what, header, rows):
    if Path(args.report_file).exists() and not Path(args.report_file).is_file():
        return  # /dev/null, a pipe
    path = _beside(args, f"{what}.csv")
    try:
        with open(path, "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([header, *rows])
    except OSError as e:
        raise RunError(f"{path}, beside --report-file, cannot be written ({e.strerror}): make room") from e


def _beside(args, ending):
    """The name of a file that belongs to the report."""
    path = Path(args.report_file)
    return path.with_name(f"{path.stem if path.suffix == '.json' else path.name}.{ending}")
