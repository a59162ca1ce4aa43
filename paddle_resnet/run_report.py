"""First entry, start and summary lines of a run, and the CSV files next to --report-file."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.components import task
from paddle_resnet.job import processes
from paddle_resnet.settings.groups import dataset, loader, output, start
from paddle_resnet.settings.values import ENVIRONMENT, EVALUATED, text
from paddle_resnet.tasks import TASKS
from paddle_resnet.utils import files, logger, meters
from paddle_resnet.utils.errors import RunError, UsageError, command, counted
from paddle_resnet.utils.mode import Mode, RunScope
from paddle_resnet.utils.outputs import replaced

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from paddle import static

    from paddle_resnet.settings.durations import Stop

MIB = 2**20
# Flags that the suggested evaluation command omits.
OF_TRAINING = ("--inference-dir", "--profile-steps", "--tensorboard-dir", "--report-html")
STARVED_FRACTION = 0.2  # maximum acceptable fraction of a step that the GPU spends waiting for images


@dataclass(frozen=True, kw_only=True)
class Options(dataset.Settings, loader.Settings, output.Settings, start.Settings, task.Settings):
    """The flags of a report: those of the base classes and the following; see `train.py --help all`."""

    accumulate_steps: int
    amp: bool
    amp_dtype: str
    amp_level: str
    asp: bool
    benchmark: bool
    data_layout: str
    device: str
    epochs: int
    image_shape: list[int]
    inference_dir: str | None
    iter_unit: str
    lr: float
    model_arch_name: str
    num_iter: int | None
    num_of_class: int
    patience: int
    profile_steps: list[int] | None
    teacher: str | None


def default_name(run_scope: RunScope, is_benchmark: bool) -> str:
    """Return the default file name of the report in the run folder. Training and evaluation use different names, so
    that an evaluation does not replace the training report."""
    if is_benchmark:
        return "report.benchmark.json"
    return "report.json" if run_scope.trains else "report.eval.json"


def outputs(settings: output.Settings, evaluates: bool, is_multi_label: bool = False) -> dict:
    """Return {flag or description: path or None} for the report and all files that accompany the report.

    Args:
        settings: paths of the report and of further results.
        evaluates: whether the run evaluates the entire data set.
        is_multi_label: value of --multi-label.
    """
    found = tables(settings, evaluates, is_multi_label)
    of_tables = {f"{kind}.csv next to --report-file": path for kind, path in found.items()}
    if settings.predictions is not None:
        of_tables.pop("predictions.csv next to --report-file", None)
    return {
        "--report-file": settings.report_file,
        "--report-html": settings.report_html,
        "--predictions": settings.predictions,
        **of_tables,
    }


def announced(settings: output.Settings, evaluates: bool, is_multi_label: bool = False) -> set[str]:
    """Return the keys of outputs() for which outputs.claim need not log a warning: the report and, if the report
    exists, its tables, because either this module logs that the run replaces these files, or a resumed run continues
    them."""
    if not Path(settings.report_file).is_file():
        return {"--report-file"}
    kinds = tables(settings, evaluates, is_multi_label)
    return {"--report-file", *(f"{kind}.csv next to --report-file" for kind in kinds)}


def tables(settings: output.Settings, evaluates: bool, is_multi_label: bool = False) -> dict:
    """Return {kind: path} for the CSV files of an evaluation. For the arguments, see outputs."""
    if not evaluates:
        return {}
    report, page = Path(settings.report_file), settings.report_html
    kinds = [*TASKS[is_multi_label].TABLES, *(["predictions"] if page else [])]
    if report.exists() and not report.is_file():  # for example, /dev/null or a pipe
        kinds = []
    paths = {kind: files.companion(settings.report_file, f"{kind}.csv") for kind in kinds}
    return paths | ({"predictions": settings.predictions} if settings.predictions is not None else {})


def resumes(options: Options, checkpoint: Any) -> bool:
    """Return whether this run appends to an existing report, that is, whether --resume is set or this run continues the
    run that wrote the checkpoint."""
    trains = options.run_scope.trains and not options.benchmark
    return trains and (options.resume or (checkpoint is not None and checkpoint.resumes))


def check_replaced(options: Options, checkpoint: Any, run_folder: Path) -> None:
    """Check the file that this run's report would replace or append to.

    Args:
        options: flags of the run.
        checkpoint: the checkpoint that the run starts from (restore.StartCheckpoint), or None.
        run_folder: folder of the run's checkpoints.
    Raises:
        UsageError: the file cannot be read or is not a report; the file is the report of a training run that this run
            does not resume, and --overwrite is not set; the run would append to the report of a different run; or
            --report-html is set, and the path of the report exists, but is not a regular file.
    """
    path = Path(options.report_file)
    if not path.is_file():
        if options.report_html is not None and path.exists():
            raise UsageError(
                f"--report-html {options.report_html}: requires that --report-file is a regular file, but {path} is "
                "not; choose a different --report-file"
            )
        return
    from paddle_resnet.results import reading

    try:
        kind = reading.kind(path)
        is_of_run = resumes(options, checkpoint) and _is_of_run(path, checkpoint, run_folder)
    except OSError as e:
        raise UsageError(f"--report-file {path}: cannot be read ({e.strerror}); choose a different file") from e
    if kind is None:
        raise UsageError(f"--report-file {path}: exists and is not a report; choose a different file")
    if not kind:
        return
    if resumes(options, checkpoint):
        if kind != "training" or not is_of_run:
            raise UsageError(f"--report-file {path}: is the report of a different {kind} run; choose a different file")
        return
    if kind == "training" and not options.overwrite:
        remedy = ", add --resume to continue that run," if options.run_scope.trains and not options.benchmark else ""
        raise UsageError(
            f"--report-file {path}: is the report of a training run; choose a different file{remedy} or add "
            "--overwrite to replace its report"
        )
    logger.info(f"--report-file {path}: replaces the report of an earlier {kind} run")


def _is_of_run(path, checkpoint, run_folder):
    """Return whether a report belongs to the run that this run resumes. The run folder may have been moved together
    with the report."""
    from paddle_resnet.results import reading

    own = {run_folder, *([Path(checkpoint.folder).parent] if checkpoint else [])}
    recorded = reading.run_folders(path)
    places = set(map(os.path.realpath, own))
    if os.path.dirname(os.path.realpath(path)) in places or recorded & own:
        return True
    for folder in recorded:
        with contextlib.suppress(ValueError):  # the path is not valid, for example because of a null byte
            if os.path.realpath(folder) in places:
                return True
    return False


def first_entry(flags: dict[str, Any], argv: list[str], evaluated: str | Path | None = None) -> dict[str, Any]:
    """Return the first entry of the report: {flag: value}, and the environment, which the page shows.

    Args:
        flags: result of Settings.as_entry.
        argv: arguments of the command line.
        evaluated: folder of the checkpoint that a run without training evaluates, or None.
    """
    environment = _versions(flags["device"]) | {"system": platform.platform(), "cores": os.cpu_count()}
    environment |= {"processes": processes.world_size(), "command": command("train", *argv)}
    entry = flags | {ENVIRONMENT: environment}
    return entry if evaluated is None else entry | {EVALUATED: str(evaluated)}


def start_line(
    options: Options,
    train_loader: Sized | None,
    eval_loader: Sized | None,
    fused_operators: dict[str, int],
    gradient_all_reduces: int,
    is_captured: bool,
) -> str:
    """Return the start line, which contains the network, devices, precision, layout, image shape, fused operators, CUDA
    graph, batch, learning rate, steps and gradient all-reduces.

    Args:
        options: flags of the run.
        train_loader, eval_loader: loaders, or None if the run does not use them.
        fused_operators: {operator: count} of the training program or, if the run does not train, the evaluation
            program.
        gradient_all_reduces: number of gradient all-reduces per training step.
        is_captured: whether the program's steps are captured as a CUDA graph.
    """
    world_size = processes.world_size()
    factor = world_size * options.accumulate_steps
    precision = f"AMP {options.amp_level} in {options.amp_dtype}" if options.amp else "float32"
    fused = ", ".join(f"{count} {name}" for name, count in fused_operators.items()) or "no fused operators"
    loaders = {"train": train_loader, "val": eval_loader}
    sizes = [
        f"{name} {counted(len(loader), 'step')} per epoch" for name, loader in loaders.items() if loader is not None
    ]
    if train_loader is not None and options.iter_unit == "batch":
        sizes.append(f"{counted(options.num_iter, 'step')} in total")
    if train_loader is not None and options.accumulate_steps > 1:
        left = len(train_loader) % options.accumulate_steps
        sizes.append(f"an update every {options.accumulate_steps} steps" + (f" (last {left} unused)" if left else ""))
    if train_loader is not None and world_size > 1:
        sizes.append(f"{counted(gradient_all_reduces, 'gradient all-reduce')} per step")
    return (
        f"{options.model_arch_name} on {world_size} x {options.device}, {precision}, {options.data_layout}, "
        f"images {text(options.image_shape)}, {fused}, "
        f"{'CUDA graph, ' if is_captured else ''}batch {options.batch_size} per process, peak lr {options.lr} x "
        f"{factor} = {options.lr * world_size * options.accumulate_steps:g}, {', '.join(sizes)}"
    )


def all_done(options: Options, entry: dict[str, Any], checkpoint: Any) -> bool:
    """If --resume is set, log that no steps remain; otherwise, raise an error. With --resume, also write the summary of
    the run if the report has none, because the run was killed. `entry` is the result of first_entry.

    Returns:
        whether the HTML report (--report-html) is missing.
    Raises:
        UsageError: --resume is not set, or the report cannot be completed. With --resume, completed training is not an
            error, so that the same command can be repeated until all steps are done.
    """
    folder = checkpoint.folder
    if checkpoint.ended_early(options.patience):
        count = checkpoint.evaluations_since_best
        text = f"{folder} was saved {counted(count, 'evaluation')} after the best evaluation; use a larger number"
        if not options.resume:
            raise UsageError(f"--patience {options.patience}: {text}")
        logger.info(f"--resume: --patience {options.patience} has already ended the run: {text}")
    else:
        if not options.resume:
            if options.iter_unit == "batch":
                raise UsageError(f"--num-iter {options.num_iter}: already completed in {folder}; use a larger number")
            raise UsageError(
                f"--epochs {options.epochs}: already completed in {folder}; use more than {checkpoint.epoch}"
            )
        length = counted(options.epochs, "epoch") if options.iter_unit == "epoch" else counted(options.num_iter, "step")
        logger.info(f"--resume: the run is already complete in {folder}, after {length}")
    return processes.rank() == 0 and Path(options.report_file).is_file() and _complete(options, entry, checkpoint)


def _complete(options, entry, checkpoint):
    """Write the summary of a completed training run if it is missing, and return whether the HTML report is missing.
    For exceptions, see logger.setup and logger.begin."""
    from paddle_resnet.results import reading

    path, meta = Path(options.report_file), checkpoint.meta
    if reading.kind(path) != "training" or not _is_of_run(path, checkpoint, Path(checkpoint.folder).parent):
        return False
    try:
        report = reading.read(path)
    except UsageError as e:
        logger.warn(str(e))
        return False
    if not report.summary:
        logger.setup(path)
        logger.begin(entry, append=True)
        last = {"epoch": meta["epoch"]} | ({} if meta["step"] is None else {"step": meta["step"]})
        # The checkpoint of a run that ended inside an epoch has no training metrics, but the report has them.
        logged = report.epochs.get(meta["epoch"], {}).items()
        logged = {name.removeprefix("train."): value for name, value in logged if name.startswith("train.")}
        data = _summary(meta["trained"] or logged, meta["evaluated"], meta["best"], last)
        logger.log((), data | _sparsity(meta.get("asp", {})) | _teacher(meta.get("teacher") or {}))
    return options.report_html is not None and not (report.summary and os.path.exists(options.report_html))


def advise_on_loader(options: Options, epoch: int, trained: dict[str, Any]) -> bool:
    """Warn if a GPU waits for the loader for more than STARVED_FRACTION of the epoch time, and suggest a flag. On a
    CPU, there is no warning: the network shares the cores with the loader, so waiting does not indicate a slow loader.
    A first epoch of fewer than 50 steps is ignored, because startup dominates it.

    Args:
        options: flags of the run.
        epoch: epoch number.
        trained: result of program.run.
    Returns:
        whether a warning was logged.
    """
    fraction = trained["data_time"] / trained["batch_time"]
    if options.device != "gpu" or fraction <= STARVED_FRACTION or (epoch == 0 and trained["steps"] < 50):
        return False
    advice = _loader_flag(options, processes.cores())
    logger.warn(
        f"epoch {epoch}: the GPU waited for images {fraction:.0%} of the time; set {advice}, or measure the speed of "
        f"the loader with `{command('dataset', 'speed', options.image_root)}`"
    )
    return True


def _loader_flag(settings: loader.Settings, cores: int) -> str:
    """Return the flag to set if the loader of a process with this number of CPU cores is slow."""
    threads = cores - 2
    if settings.dali_num_threads < threads:
        return f"--dali-num-threads {threads}"
    if settings.dali_device == "cpu":
        return "--dali-device gpu"
    if settings.hw_decoder_load < 0.9:
        return "--hw-decoder-load 0.9"
    return f"--dali-prefetch {2 * settings.dali_prefetch}"


def conclude(options: Options, argv: list[str], result: dict[str, Any], mode: Mode) -> None:
    """Log the result of a benchmark, or of an evaluation without training, as the summary of the run.

    For a benchmark, also log peak memory, versions and the command, and print a table instead of a line.

    Args:
        options: flags of the run.
        argv: arguments of the command line.
        result: result of program.run, without arrays.
        mode: kind of the run, Mode.TRAIN or Mode.EVAL.
    Raises:
        RunError: the report file can no longer be written.
    """
    if options.benchmark:
        result = result | _peak_memory(options.device)
    data = {f"{mode.value}.{name}": value for name, value in result.items()}
    if not options.benchmark:
        logger.log((), data)
        return
    environment = {"versions": _versions(options.device), "processes": processes.world_size()}
    environment["command"] = command("train", *argv)
    logger.report((), data | environment)
    if processes.rank() == 0:
        _print_table(f"benchmark: {mode.value}", result, environment)


def _peak_memory(device):
    """Return {name: peak memory of Paddle's GPU allocator in MiB, as the maximum over all processes}. On a CPU, return
    {}, because Paddle has no memory statistics for CPUs."""
    if device == "cpu":
        return {}
    import paddle

    from paddle_resnet.job import exchange

    gpu = processes.local_gpu()
    mine = paddle.device.cuda.max_memory_allocated(gpu) / MIB
    return {"peak_memory_allocated_mib": float(exchange.all_gather([mine]).max())}


def _versions(device):
    import nvidia.dali
    import paddle

    versions = {
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "dali": nvidia.dali.__version__,
        "numpy": np.__version__,
    }
    if device == "gpu":
        gpu = processes.local_gpu()
        versions |= {"gpu": paddle.device.cuda.get_device_name(gpu), "driver": _driver()}
        versions |= {"cuda": paddle.version.cuda(), "cudnn": paddle.device.get_cudnn_version()}
    return versions


def _driver():
    """Return the version of NVIDIA's driver, or None if the kernel module does not report its version."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.is_file() else None


def _print_table(title, result, environment):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("metric", "value", title=title, title_justify="left")
    for name, value in result.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}")
    table.add_section()
    for name, value in environment.items():
        value = ", ".join(f"{what} {v}" for what, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, Text(value))
    drawn = io.StringIO()
    Console(width=120, file=drawn).print(table)
    logger.info(drawn.getvalue().rstrip("\n"))


def summarize(
    options: Options,
    argv: list[str],
    program: static.Program,
    stop: Stop,
    trained: dict[str, Any],
    evaluated: dict[str, Any] | None,
    saver: Any,
) -> None:
    """Log the results of a training run. Without --resume, --from-checkpoint and --from-pretrained-params, also print a
    command that evaluates the best checkpoint (or the last, if the run does not evaluate) and writes a separate report.

    Args:
        options: flags of the run.
        argv: arguments of the command line.
        program: training Program.
        stop: the last durations.Stop.
        trained, evaluated: results of the last epoch; evaluated is None if the run does not evaluate.
        saver: saver.Saver, which contains the best evaluation and the folders of the best and the last checkpoint.
    Raises:
        RunError: the report file can no longer be written.
    """
    best, folder = saver.best, saver.folder
    data = _summary(trained, evaluated, best, {"epoch": stop.epoch, **stop.place()})
    lines = [f"last checkpoint: {folder}"]
    if evaluated is not None:
        folder, metric = saver.best_folder, meters.main_metric(best)
        lines = [
            f"best checkpoint: {folder} (epoch {best['epoch']}, {metric} {best[metric]:.4f})",
            f"{lines[0]} (epoch {stop.epoch}, {metric} {evaluated[metric]:.4f})",
        ]
    if saver.ends_early:
        lines = [
            f"--patience {options.patience}: no higher {meters.main_metric(best)} since epoch {best['epoch']}",
            *lines,
        ]
    if options.asp:
        from paddle_resnet.components import sparsity

        data |= _sparsity(sparsity.counts(program))
    if options.teacher is not None:
        from paddle_resnet.step import facts

        data |= _teacher(facts.of(program).teacher.record())
    logger.log((), data)
    logger.info("\n".join([*lines, f"report: {options.report_file}"]))
    if processes.rank() != 0:  # only rank 0 writes checkpoints
        return
    if options.from_checkpoint is None and options.from_pretrained_params is None and not options.resume:
        flags = _without(argv, ("--run-scope", "--report-file", "--overwrite", *OF_TRAINING))
        flags += ["--run-scope", RunScope.EVAL_ONLY.value, "--from-checkpoint", str(folder)]
        if Path(options.report_file) != Path(folder).parent / default_name(options.run_scope, options.benchmark):
            flags += ["--report-file", str(files.companion(options.report_file, "eval.json"))]
        of_file = [flag for flag in OF_TRAINING if flag not in {argument.partition("=")[0] for argument in argv}]
        for flag in of_file:
            flags += [flag, "None"] if getattr(options, flag[2:].replace("-", "_")) else []
        what = "the last epoch" if evaluated is None else f"the best epoch, {best['epoch']},"
        logger.info(f"evaluate {what} again: {command('train', *flags)}")


def _summary(trained, evaluated, best, last):
    """Return the metrics of the summary.

    Args:
        trained, evaluated: results of the last epoch, or None.
        best: best evaluation, with its position; not used if evaluated is None.
        last: position of the last evaluation.
    """
    names = ("loss", "top1", "top5", "ips")
    data = {f"train.{name}": trained[name] for name in names if name in trained} if trained else {}
    if evaluated is not None:
        averages = (f"{name}_{kind}" for kind in meters.AVERAGES for name in meters.CLASS_METRICS)
        names = ("loss", "top1", "top5", "ece", "map", "map_micro", "images", *averages)
        data |= {f"val.{name}": evaluated[name] for name in names if name in evaluated}
        data |= {f"last.{name}": value for name, value in last.items()}
        data |= {f"best.{name}": best[name] for name in ("epoch", "step") if name in best}
        # The best result in an older checkpoint may lack some metrics.
        data |= {f"best.val.{name}": best[name] for name in names if name in best}
    return data


def _teacher(record):
    """Return the entries of the summary for the teacher of --teacher. `record` is the entry "teacher" of meta.json, or
    an empty dict."""
    return {f"teacher.{name}": record[name] for name in ("arch", "sha256", "top1", "map") if name in record}


def _sparsity(counts):
    """Return the entries of the summary for --asp. `counts` is the result of sparsity.counts, or empty."""
    return {f"asp.{name}": count for name, count in counts.items()}


def _without(argv, flags):
    """Remove flags and their values from the arguments of a command line."""
    kept, is_value = [], False
    for argument in argv:
        is_value = is_value and not argument.startswith("--")
        if is_value or argument.partition("=")[0] in flags:
            is_value = not is_value
        else:
            kept.append(argument)
    return kept


def write_classes(
    options: Options, result: dict[str, Any], classes: Sequence[str], epoch: int, is_best: bool = True
) -> dict[str, Any]:
    """Write the metrics of each class and, without --multi-label, the confusion counts next to the report, on rank 0. A
    benchmark writes no files, because a benchmark does not evaluate the entire data set.

    REPORT.classes.csv has one line per class, with the columns label, class, images, correct, top1, precision, recall,
    f1, epoch (for the columns with --multi-label, see tasks/multi_label.py). REPORT.averages.csv has one line for the
    macro average and one line for the weighted average, with the
    columns average, precision, recall, f1, epoch. REPORT.confusion.csv has one line per pair of label and prediction
    that occurred, the most frequent pair first, with the columns label, predicted, images, class, predicted_class,
    epoch. REPORT.predictions.csv is written if --report-html is set and --predictions does not specify a different
    file. The files describe the best evaluation of the run.

    Args:
        options: flags of the run.
        result: result of program.run with Mode.EVAL.
        classes: class names in label order; the network may have more outputs than there are names.
        epoch: epoch of the evaluated parameters.
        is_best: whether the evaluation is the best of the run so far; if not, existing files are not replaced.
    Returns:
        the result without its arrays.
    Raises:
        RunError: a file cannot be written, or the data set has changed since the start of the run.
    """
    numbers = {name: value for name, value in result.items() if not isinstance(value, np.ndarray)}
    if processes.rank() != 0 or options.benchmark:
        return numbers
    if "not_finite" in numbers:
        logger.warn(
            f"loss: not finite for {numbers['not_finite']} of {numbers['images']} images; the mean loss excludes "
            "these images, and class accuracies and confusion counts exclude images whose logits are all NaN; check "
            "the images and the learning rate"
        )
    if not is_best:
        return numbers
    from paddle_resnet.results import predictions

    this_task = options.task(options.num_of_class)
    paths = tables(options, options.run_scope.evaluates, options.multi_label)
    names = predictions.class_names(classes, options.num_of_class)
    for kind, (header, rows) in this_task.tables(result, names, epoch).items():
        _write(paths.get(kind), header, rows)
    if "predictions" in paths and (table := this_task.predictions(result, names)) is not None:
        place = options.image_root, options.data_format, options.skip_list, options.allow_outside
        images = predictions.list_images(*place, count=len(table[1]), is_multi_label=options.multi_label)
        predictions.write(paths["predictions"], images, *table)
    return numbers


def _write(path, header, rows):
    if path is None:
        return
    try:
        with replaced(path) as partial, open(partial, "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([header, *rows])
    except OSError as e:
        remedy = "free disk space or choose a different --report-file"
        raise RunError(f"{path}: cannot be written ({e.strerror}); {remedy}") from e
