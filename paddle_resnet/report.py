"""What a run says about itself: its first and last lines, and the CSV files beside --report-file.

`python -m paddle_resnet.report RUN...` compares runs (results/comparison.py), without importing Paddle or DALI.
"""

import csv
import io
import os
import platform
import shlex
import sys
from pathlib import Path

import numpy as np

import config
from paddle_resnet.job import processes
from utils import files, logger
from utils.errors import RunError, UsageError
from utils.mode import RunScope

MIB = 2**20
OF_TRAINING = ("--profile-steps", "--tensorboard-dir", "--report-html")  # not of the evaluation that is suggested
STARVED_SHARE = 0.2  # of a step that a GPU waits for images


def default_name(args):
    """Name of the report in the run's folder if --report-file is not set: an evaluation keeps that of its training."""
    if args.benchmark:
        return "report.benchmark.json"
    return "report.json" if args.run_scope.trains else "report.eval.json"


def outputs(args):
    """{flag or description: path, or None} of the report and the files that are made from it or beside it."""
    tables = {f"{kind}.csv beside --report-file": path for kind, path in _tables(args).items()}
    if args.predictions is not None:
        tables.pop("predictions.csv beside --report-file", None)
    return {
        "--report-file": args.report_file,
        "--report-html": args.report_html,
        "--predictions": args.predictions,
        **tables,
    }


def _tables(args):
    """{kind: path} of the CSV files of an evaluation, one of results/reading.COLUMNS each."""
    if args.benchmark or not args.run_scope.evaluates:
        return {}
    kinds = ["classes", "confusion", *(["predictions"] if args.report_html else [])]
    if Path(args.report_file).exists() and not Path(args.report_file).is_file():  # /dev/null, a pipe
        kinds = []
    paths = {kind: files.beside(args.report_file, f"{kind}.csv") for kind in kinds}
    return paths | ({"predictions": args.predictions} if args.predictions is not None else {})


def resumes(args, found):
    """Whether the run appends to its report: with --resume, and if it continues the run of a checkpoint."""
    trains = args.run_scope.trains and not args.benchmark
    return trains and (args.resume or (found is not None and found.goes_on))


def check_replaced(args, found, run_folder):
    """Check the file that the report would replace or append to.

    Args:
        args: flags.
        found: the checkpoint that the run starts from (restore.Found), or None.
        run_folder: the folder of its checkpoints.
    Raises:
        UsageError: it is not a report; it is that of a training run and --overwrite is not set; or the run would append
            to the report of a different one.
    """
    path = Path(args.report_file)
    if not path.is_file():
        if args.report_html is not None and path.exists():
            raise UsageError(
                f"--report-html {args.report_html}: {path} keeps no report to make a page of; choose a regular file "
                "for --report-file"
            )
        return
    from paddle_resnet.results import reading

    kind = reading.kind(path)
    if kind is None:
        raise UsageError(f"--report-file {path}: exists and is not a report; choose a different file")
    if not kind:
        return
    if resumes(args, found):
        if kind != "training" or not _is_of_run(path, found, run_folder):
            raise UsageError(f"--report-file {path}: the report of a different {kind} run; choose a different file")
        return
    if kind == "training" and not args.overwrite:
        remedy = ", continue that run with --resume," if args.run_scope.trains and not args.benchmark else ""
        raise UsageError(
            f"--report-file {path}: the report of a training run; choose a different file{remedy} or replace it with "
            "--overwrite"
        )
    logger.info(f"--report-file {path}: replaces the report of an earlier {kind} run")


def _is_of_run(path, found, run_folder):
    """Whether a report is that of the run that a resumed run continues. Folders may have moved since, with a report in
    them."""
    from paddle_resnet.results import reading

    own = {run_folder, *([Path(found.folder).parent] if found else [])}
    recorded = reading.run_folders(path)
    places = {folder.resolve() for folder in own}
    return bool(path.resolve().parent in places or recorded & own or {folder.resolve() for folder in recorded} & places)


def start_line(args, train_loader, eval_loader, fused_operators, gradient_all_reduces):
    """One line: network, devices, precision, layout, image shape, fused operators, CUDA graph, batch, learning rate,
    steps, gradient all-reduces.

    Args:
        args: flags.
        train_loader, eval_loader: None for one that the run does not use.
        fused_operators: {operator: count} of the program that the line is about.
        gradient_all_reduces: how many a training step makes.
    """
    world_size = processes.world_size()
    precision = f"AMP {args.amp_level} in {args.amp_dtype}" if args.amp else "float32"
    fused = ", ".join(f"{count} {name}" for name, count in fused_operators.items()) or "no fused operators"
    loaders = {"train": train_loader, "val": eval_loader}
    sizes = [f"{name} {len(loader)} steps an epoch" for name, loader in loaders.items() if loader is not None]
    if train_loader is not None and world_size > 1:
        sizes.append(f"{gradient_all_reduces} gradient all-reduces a step")
    return (
        f"{args.model_arch_name} on {world_size} x {args.device}, {precision}, {args.data_layout}, "
        f"images {config.text(args.image_shape)}, {fused}, "
        f"{'CUDA graph, ' if args.cuda_graph else ''}batch {args.batch_size} a process, peak lr {args.lr} x "
        f"{world_size} = {args.lr * world_size:g}, {', '.join(sizes)}"
    )


def all_done(args, found):
    """Say that all epochs are done.

    Raises:
        UsageError: --resume was not given. With it, this is how a command that is repeated until it is done ends.
    """
    if not args.resume:
        raise UsageError(f"--epochs {args.epochs}: all are done in {found.folder}: give more than {found.epoch}")
    logger.info(f"--resume: all {args.epochs} epochs are done in {found.folder}")


def advise_on_loader(args, epoch, trained):
    """Warn if a GPU waits for the loader for more than a fifth of an epoch, with the flag to try. A CPU program shares
    its cores with the loader and is not starved by it. A short first epoch is mostly start-up and does not count.

    Args:
        args: flags.
        epoch: number of the epoch.
        trained: result of program.run.
    Returns:
        whether it warned.
    """
    share = trained["data_time"] / trained["batch_time"]
    if args.device != "gpu" or share <= STARVED_SHARE or (epoch == 0 and trained["steps"] < 50):
        return False
    logger.warn(
        f"epoch {epoch}: the GPU waited for images {share:.0%} of the time: try {_loader_flag(args)}; "
        f"`python -m paddle_resnet.dataset speed {shlex.quote(args.image_root)}` measures the loader alone"
    )
    return True


def _loader_flag(args):
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))
    if args.dali_num_threads < cores:
        return f"--dali-num-threads {cores}"
    if args.dali_device == "cpu":
        return "--dali-device gpu"
    if args.hw_decoder_load < 0.9:
        return "--hw-decoder-load 0.9"
    if args.cpu_decoder_load == 0:
        return "--cpu-decoder-load 0.1"
    return f"--dali-prefetch {2 * args.dali_prefetch}"


def conclude(args, argv, result, mode):
    """Log the result of a benchmark or of an evaluation without training as the summary of the run.

    A benchmark adds peak memory, versions and command, and prints a table instead of a line.

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
        _write_page(args, argv)
        return
    command = _command(argv)
    about = {"versions": _versions(args), "processes": processes.world_size(), "command": command}
    logger.report((), data | about)
    if processes.rank() == 0:
        _print_table(f"benchmark: {mode.value}", result, about)


def _peak_memory(args):
    """The most memory that Paddle's allocator held, in MiB, on the process with the highest figure. Empty on a CPU,
    where the allocator does not count."""
    if args.device == "cpu":
        return {}
    import paddle

    from paddle_resnet.job import exchange

    gpu = processes.local_gpu()
    mine = paddle.device.cuda.max_memory_allocated(gpu) / MIB
    return {"peak_memory_allocated_mib": float(exchange.all_gather([mine]).max())}


def _versions(args):
    import nvidia.dali
    import paddle

    versions = {
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "dali": nvidia.dali.__version__,
        "numpy": np.__version__,
    }
    if args.device == "gpu":
        gpu = processes.local_gpu()
        versions |= {"gpu": paddle.device.cuda.get_device_name(gpu), "driver": _driver()}
        versions |= {"cuda": paddle.version.cuda(), "cudnn": paddle.device.get_cudnn_version()}
    return versions


def _driver():
    """The version of NVIDIA's driver; None where the kernel module does not show it."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.is_file() else None


def _print_table(title, result, about):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("figure", "value", title=title, title_justify="left")
    for name, value in result.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}")
    table.add_section()
    for name, value in about.items():
        value = ", ".join(f"{what} {v}" for what, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, Text(value))
    drawn = io.StringIO()
    Console(width=120, file=drawn).print(table)
    logger.info(drawn.getvalue().rstrip("\n"))


def summarise(args, argv, trained, evaluated, best, folder):
    """Log the results of a training run, and print the command that evaluates its last checkpoint into a report of its
    own.

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
    _write_page(args, argv)
    if processes.rank() != 0:  # without checkpoints
        return
    if args.from_checkpoint is None and args.from_pretrained_params is None and not args.resume:
        flags = _without(argv, ("--run-scope", "--report-file", "--overwrite", *OF_TRAINING))
        flags += ["--run-scope", RunScope.EVAL_ONLY.value, "--from-checkpoint", str(folder)]
        if Path(args.report_file) != Path(folder).parent / default_name(args):
            flags += ["--report-file", str(files.beside(args.report_file, "eval.json"))]
        of_file = [flag for flag in OF_TRAINING if flag not in {word.partition("=")[0] for word in argv}]
        for flag in of_file:
            flags += [flag, "None"] if getattr(args, flag[2:].replace("-", "_")) else []
        logger.info(f"evaluate it again: {_python()} train.py {shlex.join(flags)}")


def _without(argv, flags):
    """The words of a command line without some flags and their values."""
    kept, is_value = [], False
    for word in argv:
        is_value = is_value and not word.startswith("--")
        if is_value or word.partition("=")[0] in flags:
            is_value = not is_value and "=" not in word
        else:
            kept.append(word)
    return kept


def _write_page(args, argv):
    if args.report_html is None or processes.rank() != 0:
        return
    from paddle_resnet.results import page

    environment = _versions(args) | {"system": platform.platform(), "cores": os.cpu_count()}
    environment |= {"processes": processes.world_size(), "command": _command(argv)}
    page.write(args.report_html, args.report_file, environment)
    logger.info(f"page: {args.report_html}")


def _command(argv):
    return f"{_python()} train.py {shlex.join(argv)}"


def _python():
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith("..") else path


def write_classes(args, result, classes):
    """Write the accuracy of each class and the confusion counts beside the report, on rank 0. A benchmark writes
    nothing: its images are no data set.

    REPORT.classes.csv has a line for each class: label, class, images, correct, top1. REPORT.confusion.csv has a line
    for each pair that occurred, the most frequent first: label, predicted, images, class, predicted_class.
    REPORT.predictions.csv is there with --report-html, unless --predictions names a file. Each evaluation replaces the
    files of the one before.

    Args:
        args: flags.
        result: of program.run with Mode.EVAL.
        classes: class names in label order; there may be fewer than the network has outputs.
    Returns:
        the result without its arrays.
    """
    numbers = {name: value for name, value in result.items() if not isinstance(value, np.ndarray)}
    if processes.rank() != 0 or args.benchmark:
        return numbers
    confusion = result["confusion"]
    if "not_finite" in numbers:
        logger.warn(
            f"the loss of {numbers['not_finite']} of {numbers['images']} images is not finite: the mean loss omits "
            "these images; class accuracies and confusion counts omit images whose logits are all NaN"
        )
    tables = _tables(args)
    names = [*classes, *map(str, range(len(classes), len(confusion)))]
    rows = [
        (label, names[label], images, confusion[label, label], "" if images == 0 else f"{top1:.6f}")
        for label, (images, top1) in enumerate(zip(confusion.sum(axis=1), result["class_top1"], strict=True))
    ]
    _write(tables.get("classes"), ("label", "class", "images", "correct", "top1"), rows)
    pairs = sorted(zip(*confusion.nonzero(), strict=True), key=lambda pair: -confusion[pair])
    rows = [(*pair, confusion[pair], *(names[label] for label in pair)) for pair in pairs]
    _write(tables.get("confusion"), ("label", "predicted", "images", "class", "predicted_class"), rows)
    if "predictions" in result:
        from paddle_resnet.results import predictions

        predictions.write(tables["predictions"], args, result["predictions"], names)
    return numbers


def _write(path, header, rows):
    if path is None:
        return
    try:
        with open(path, "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([header, *rows])
    except OSError as e:
        raise RunError(f"{path}, beside --report-file, cannot be written ({e.strerror}): make room") from e


if __name__ == "__main__":
    from paddle_resnet.results import comparison

    sys.exit(comparison.main())
