"""Learning-rate finder: train for some steps with a rising learning rate, plot the loss, and suggest a value for --lr.

Usage: `python -m paddle_resnet.lr_find FLAGS`. Except for the learning rate, the steps are the same as in train.py with
the same flags. The finder writes neither checkpoints nor a report, so a run in the same folder is not affected.
"""

import argparse
import contextlib
import sys
from dataclasses import dataclass

import numpy as np

from paddle_resnet import config, startup
from paddle_resnet.data import layout
from paddle_resnet.job import processes
from paddle_resnet.results import lr_curve
from paddle_resnet.settings import parsing, values
from paddle_resnet.settings.values import flag_name, text
from paddle_resnet.utils import exit_codes, locks, logger, meters, numbers, outputs, progress, signals
from paddle_resnet.utils.errors import RunError, UsageError, counted, program
from paddle_resnet.utils.mode import Mode

LOWEST, HIGHEST = 1e-10, 1e4  # limits for learning rates
NAMES = (lr_curve.DATA, lr_curve.DRAWING)
LEAST_STEPS = 20  # a shorter curve has no clear shape
# Flags of train.py that a search does not support: (name, problem and remedy).
UNSUPPORTED = (
    ("resume", "not supported by lr_find, which starts a new run; remove the flag"),
    ("from_checkpoint", "not supported by lr_find, which starts a new run; use --from-pretrained-params"),
    ("benchmark", "not supported by lr_find; remove the flag"),
    ("print_config", f"not supported by lr_find; use the flag with {program('train')}"),
)
# Flags that lr_find ignores in a configuration file for train.py, but that are errors on the command line of lr_find.
IGNORED = ("inference_dir", "predictions", "profile_steps", "report_file", "report_html", "tensorboard_dir")


@dataclass(frozen=True)
class Options:
    """The flags of train.py that name the files of a search and describe its curve."""

    accumulate_steps: int
    image_root: str
    model_arch_name: str
    output_dir: str
    overwrite: bool


class Diverged(Exception):
    """Raised to end the search early, because the loss diverges."""


class LossRecorder(meters.AverageMeter):
    """A meter that records the mean training loss of each step over all processes.

    Args:
        steps: number of steps of the search.
        batches: number of batches per step.

    Attributes:
        losses: loss of each step.
    """

    def __init__(self, steps: int, batches: int):
        super().__init__("loss")
        self.losses, self._of_step = [], []
        self._batches, self._divergence = batches, lr_curve.Divergence(steps)

    def update(self, value: np.ndarray, n: int) -> None:
        """Add one batch of `n` images.

        Raises:
            Diverged: the loss diverges. All processes raise Diverged at the same step.
        """
        from paddle_resnet.job import exchange

        super().update(value, n)
        self._of_step.append(np.asarray(value, np.float64).mean())
        if len(self._of_step) == self._batches:
            own, self._of_step = sum(self._of_step) / self._batches, []
            self.losses.append(float(exchange.all_gather([own]).mean()))
            if self._divergence.add(self.losses[-1]):
                raise Diverged


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code: 0 for success, 1 for a failure or if the loss does not fall clearly, 2
    for an error in usage, configuration or data, 75 if a signal stopped the search, 130 if interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return exit_codes.of(program("lr_find"), lambda: _main(arguments), needs_stdout=False)
    finally:
        logger.close()


def _main(argv):
    with signals.watched():
        with logger.result_on_stdout():
            search, args = parse(argv)
        with progress.shown():
            _run(search, args)


def parse(argv: list[str]) -> tuple[argparse.Namespace, values.Settings]:
    """Read the flags.

    Returns:
        (the finder's own flags, the flags of train.py).
    Raises:
        UsageError: a flag is unknown, has an invalid value, or is not supported; or flags conflict, such as a --from-lr
            that is not below --to-lr.
    """
    parser = parsing.ToolParser(
        prog="lr_find",
        description="Train for N steps (--steps) with a learning rate that rises from step to step, write the loss "
        f"curve to OUTPUT_DIR/ARCH/ ({lr_curve.DRAWING} and {lr_curve.DATA}), and suggest a value for --lr.",
        epilog=f"The flags of {program('train')} are also supported, except "
        f"{', '.join(flag_name(name) for name in (*dict(UNSUPPORTED), *IGNORED))}. --overwrite replaces an earlier "
        "curve, but does not delete checkpoints.",
    )
    parser.add_argument("--from-lr", type=_rate, default=1e-6, metavar="LR", help="value of --lr in the first step")
    parser.add_argument("--to-lr", type=_rate, default=10.0, metavar="LR", help="value of --lr in the last step")
    steps = numbers.integer(LEAST_STEPS, 10_000)
    parser.add_argument("--steps", type=steps, default=100, metavar="N", help="number of training steps")
    search, of_train = parser.parse_known_args(argv)
    args = config.parse_args(of_train)
    if search.from_lr >= search.to_lr:
        raise UsageError(f"--from-lr {search.from_lr:g}: must be below --to-lr {search.to_lr:g}; use a lower rate")
    if not args.run_scope.trains:
        raise UsageError(f"--run-scope {args.run_scope.value}: lr_find requires training; remove the flag")
    for name, remedy in UNSUPPORTED:
        value = getattr(args, name)
        if value:
            raise UsageError(f"{flag_name(name)}{'' if value is True else f' {value}'}: {remedy}")
    for name in IGNORED:
        if args.origin(name) == "command line" and getattr(args, name) is not None:
            value = text(getattr(args, name))
            raise UsageError(f"{flag_name(name)} {value}: not supported by lr_find; remove the flag")
    # Benchmark mode neither evaluates nor saves, and repeats the data set if it has fewer batches than the search.
    args.set("lr_find", benchmark=True, profile_steps=None)
    return search, args


def _rate(text):
    value = numbers.positive_number(text)
    if not LOWEST <= value <= HIGHEST:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use a rate from {LOWEST:g} to {HIGHEST:g}")
    return value


def _run(search, args):
    """Run the phases that precede step 1 in train.py, then run the search.

    Raises:
        UsageError: the flags, the data or the output folder cannot be used.
        RunError: there is no suggestion, or Paddle or DALI cannot be imported.
    """
    startup.import_paddle(args)
    from paddle_resnet import phases
    from paddle_resnet.job import exchange, fleet

    run = phases.Run(args)
    run.start()
    with exchange.exit_barrier():
        fleet.connect(args.comm_timeout_s)
        search.from_lr, search.to_lr, search.steps = exchange.from_rank_0(
            lambda: [search.from_lr, search.to_lr, search.steps]
        )
        run.find_start()
        options = args.part(Options)
        exchange.from_rank_0(lambda: _claim(options, run.folder, run.input_files()))
        run.prepare()
        run.training = _with_rising_rate(search, run.training)
        run.check_and_describe()
        if args.dry_run:
            return logger.info("dry run: flags, data and programs are valid")
        losses, ended_early = _search(search, run.exe, run.training)
        found = losses, ended_early, args.as_dict()
        problem = exchange.from_rank_0(lambda: _write(search, options, run.folder, *found))
    if problem is not None:  # the error is raised outside exit_barrier, because no process has failed
        raise RunError(f"--lr: no suggestion, because {problem}")


def _claim(options, folder, inputs):
    """Check that the curve can be written.

    Raises:
        UsageError: outputs.claim fails; or the folder contains a curve, and --overwrite is not set.
    """
    _check_no_curve(folder, options)
    outputs.claim(
        {f"{name} in --output-dir": folder / name for name in NAMES},
        {"--output-dir": folder},
        inputs=inputs,
        protected=[("the data set's", path) for path in layout.occupied(options.image_root)],
    )


def _check_no_curve(folder, options):
    existing = [name for name in NAMES if (folder / name).exists()]
    if existing and not options.overwrite:
        raise UsageError(
            f"--output-dir {options.output_dir}: {folder} contains {' and '.join(existing)}; choose a different "
            "folder, or replace the curve with --overwrite"
        )


def _with_rising_rate(search, training):
    """Return the training Work with the learning rates and the number of steps of the search. If --sizes or
    --unfreeze-at divides the run into stages, the search uses only the first stage."""
    from paddle_resnet.optimizers.schedules import Schedule

    schedule, count = training.lr_scheduler, training.settings.accumulate_steps
    timeline = schedule.timeline._replace(parts=schedule.timeline.parts[:1])
    factor = processes.world_size() * count
    low, high = factor * search.from_lr, factor * search.to_lr
    schedule.timeline = timeline
    schedule.adopt(Schedule(lambda step: lr_curve.rate(low, high, search.steps, step), timeline))
    steps = {"benchmark_warmup_steps": 0, "benchmark_steps": search.steps * count}
    settings = training.settings.copy("internal", lr=search.to_lr, max_bad_steps=10**9, **steps)
    return training._replace(settings=settings)


def _search(search, exe, training):
    """Train with the rising learning rate, and return (loss of each step, whether the loss diverged). For exceptions,
    see program.run."""
    import paddle

    from paddle_resnet import program

    settings, fetchs = training.settings, training.fetchs
    recorder = LossRecorder(search.steps, settings.accumulate_steps)
    fetchs = fetchs | {"loss": (fetchs["loss"][0], recorder)}
    with contextlib.suppress(Diverged):
        program.run(settings, training.loader, exe, training.compiled, fetchs, 0, Mode.TRAIN, training.lr_scheduler)
        return recorder.losses, False
    if settings.device == "gpu":
        paddle.device.cuda.synchronize(processes.place(settings.device))
    return recorder.losses, True


def _write(search, options, folder, losses, ended_early, flags):
    """Write the curve as data and as a plot, and print the suggestion.

    Returns:
        None, or the reason why there is no suggestion.
    Raises:
        UsageError: a file cannot be written.
    """
    from paddle_resnet.tools import drawing

    rates = [lr_curve.rate(search.from_lr, search.to_lr, search.steps, step) for step in range(len(losses))]
    factor = processes.world_size() * options.accumulate_steps
    curve = lr_curve.analyze(rates, losses, search.steps, factor, ended_early, flags)
    path, title = folder / lr_curve.DRAWING, f"{options.model_arch_name} on {options.image_root}"
    with outputs.writing(f"{lr_curve.DATA} in --output-dir", folder / lr_curve.DATA):
        folder.mkdir(parents=True, exist_ok=True)
        with locks.held(locks.file_of(path), f"--output-dir {options.output_dir}", logger.warn):
            # Check again, because another search may have written a curve since _claim.
            _check_no_curve(folder, options)
            lr_curve.write(folder / lr_curve.DATA, curve)
            drawing.save(drawing.lr_curve(curve, title), path, f"{lr_curve.DRAWING} in --output-dir")
    logger.info(f"curve of {len(losses)} steps: {path}")
    if curve.steepest is None:
        return _problem(search, curve)
    if not ended_early and curve.minimum > 0.8 * search.to_lr:
        logger.warn(f"--to-lr {search.to_lr:g}: the loss still falls at this rate; use a higher --to-lr")
    factors = (
        f" (training multiplies --lr by {factor}, the number of processes times --accumulate-steps)"
        if factor > 1
        else ""
    )
    logger.info(f"steepest descent at --lr {curve.steepest:g}, lowest loss at --lr {curve.minimum:g}{factors}")
    logger.info("with a warm-up, higher rates may be better, up to the rate with the lowest loss")
    logger.info(f"suggestion: --lr {curve.steepest:g}")
    return None


def _problem(search, curve):
    if curve.ended_early and len(curve.smoothed) < lr_curve.SETTLING_STEPS:
        return (
            f"the loss diverged after {counted(len(curve.smoothed), 'step')}; use a --from-lr below {search.from_lr:g}"
        )
    rate = "lower --from-lr" if curve.ended_early else "higher --to-lr"
    return f"the loss does not fall clearly; use more --steps, a larger --batch-size or a {rate}"


if __name__ == "__main__":
    sys.exit(signals.leaving(main()))
