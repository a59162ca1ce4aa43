"""What a run says about itself: first and last lines, and files beside --report-file for what its lines do not hold."""

import csv
import itertools
import os
import shlex
import sys
from pathlib import Path

import numpy as np

from paddle_resnet import distributed, watchdog
from utils import logger
from utils.errors import UsageError
from utils.mode import RunScope


def start_line(args, train_loader, eval_loader, main_prog):
    """One line: network, devices, precision, batch, learning rate, steps, gradient all-reduces."""
    processes = distributed.world_size()
    precision = ("float16 O2" if args.use_pure_fp16 else "float16 O1") if args.amp else "float32"
    loaders = {"train": train_loader, "val": eval_loader}
    sizes = [f"{name} {len(loader)} steps an epoch" for name, loader in loaders.items() if loader is not None]
    if train_loader is not None and processes > 1:
        sizes.append(f"{distributed.count_gradient_all_reduces(main_prog)} gradient all-reduces a step")
    return (
        f"{args.model_arch_name} on {processes} x {args.device}, {precision}, {args.data_layout}, batch "
        f"{args.batch_size} a process, peak lr {args.lr} x {processes} = {args.lr * processes:g}, {', '.join(sizes)}"
    )


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


def summarise(args, argv, trained, evaluated, best, folder):
    """Log the results of a training run and print the command that evaluates its last checkpoint again.

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
    with open(Path(args.report_file).with_suffix(f".{what}.csv"), "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([header, *rows])
