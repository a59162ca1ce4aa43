"""--budget-minutes: choose the number of epochs so that the run ends after a given time.

Before step 1, the run measures the duration of a training step, of an evaluation, and of writing a checkpoint. The
measurement does not affect the results, because it uses a separate loader and all variables are restored afterwards. A
run with --epochs set to the chosen number therefore gives identical results.
"""

import bisect
import math
import tempfile
from time import perf_counter
from typing import NamedTuple

from paddle_resnet import dali, program, recipe
from paddle_resnet.checkpoints import folders, saver, variables
from paddle_resnet.job import exchange, processes
from paddle_resnet.optimizers.schedules import build_lr_scheduler
from paddle_resnet.steps import cuda_graph
from utils import logger, progress
from utils.errors import UsageError
from utils.mode import Mode

CHOSEN = ("epochs", "warmup_epochs")  # flags that choose() may set
MEASURED = 0.02  # fraction of the budget to spend on each measurement
MOST_STEPS = 200  # maximum number of steps to measure
MOST_EPOCHS = 2**31 - 1  # maximum value of --epochs
TOLERANCE = 0.1  # warn if the expected duration differs from the budget by more than this fraction


class Times(NamedTuple):
    """Measured durations, in seconds, of training on one batch, of one evaluation, and of writing one checkpoint."""

    batch_s: float
    evaluation_s: float
    checkpoint_s: float


def pending(args, checkpoint):
    """Return the names of the flags that choose() will set, or () if the number of epochs is already known.

    Args:
        args: Settings with the values inherited from the checkpoint.
        checkpoint: restore.StartCheckpoint or None.
    Raises:
        UsageError: the run continues from a checkpoint that has no meta.json or was written with a different
            --budget-minutes.
    """
    if args.budget_minutes is None or args.benchmark or not args.run_scope.trains:
        return ()
    if checkpoint is None or (checkpoint.epoch, checkpoint.step) == (0, 0):
        return CHOSEN
    if not checkpoint.resumes or checkpoint.meta["arguments"].get("budget_minutes") != args.budget_minutes:
        raise UsageError(
            f"--budget-minutes {args.budget_minutes:g}: applies only to new runs, but this run continues from "
            f"{checkpoint.folder}; use --epochs instead"
        )
    return ()


def choose(args, exe, training, evaluation):
    """Choose --epochs and, unless it is explicit, --warmup-epochs. Then adapt the learning-rate schedule, and freeze
    the settings. Rank 0 chooses for all processes.

    Args:
        args: Settings that are frozen except for CHOSEN.
        exe: static.Executor.
        training, evaluation: phases.Work with compiled programs; evaluation may be None.
    """
    progress.phase("measurement for --budget-minutes")
    schedule, budget_s = training.lr_scheduler, 60 * args.budget_minutes
    batches = schedule.timeline.batches(0)
    with logger.only_warnings():
        batch_s = _measure_training(args, exe, training, MEASURED * budget_s)
        evaluation_s = _measure_evaluation(args, exe, evaluation, MEASURED * budget_s)

    def plan():
        times = Times(batch_s, evaluation_s, _measure_checkpoint(args, training.program))
        start_s = logger.elapsed_s()
        epochs = epochs_within(args, budget_s - start_s, batches, times)
        return epochs, start_s, start_s + duration_s(args, epochs, batches, times), times

    epochs, start_s, end_s, times = exchange.from_rank_0(plan)
    times = Times(*times)
    parts = f"{batches} batches of {times.batch_s:.3g} s"
    parts += f", evaluation {times.evaluation_s:.3g} s" if evaluation else ""
    reason = f"--budget-minutes {args.budget_minutes:g}, {parts}, checkpoint {times.checkpoint_s:.3g} s"
    args.choose(reason, epochs=epochs)
    if not args.is_explicit("warmup_epochs"):
        args.choose(f"{epochs} epochs", warmup_epochs=recipe.warmup_epochs(epochs))
    args.finalize()
    schedule.adopt(build_lr_scheduler(args, schedule.timeline))
    ends = f"{epochs} epochs end after about {end_s / 60:.3g} minutes, of which {start_s / 60:.3g} have passed"
    logger.info(f"--epochs {epochs}: chosen for {reason}; {ends}")
    if abs(end_s - budget_s) > TOLERANCE * budget_s:
        logger.warn(
            f"--budget-minutes {args.budget_minutes:g}: {ends}, and no other number of epochs is closer; "
            "change the budget, or use --epochs"
        )


def duration_s(args, epochs, batches, times):
    """Return the predicted duration in seconds of `epochs` epochs with `batches` batches each, including evaluations
    and checkpoints."""
    checkpoints = math.ceil(epochs / args.save_interval)
    if args.save_interval_steps:
        checkpoints += epochs * (batches // args.accumulate_steps // args.save_interval_steps)
    evaluations = math.ceil(epochs / args.eval_interval)
    return epochs * batches * times.batch_s + evaluations * times.evaluation_s + checkpoints * times.checkpoint_s


def epochs_within(args, seconds, batches, times):
    """Return the number of epochs, at least 1, whose predicted duration is closest to `seconds`."""

    def predicted_s(epochs):
        return duration_s(args, epochs, batches, times)

    most = min(MOST_EPOCHS, max(0, int(seconds / (batches * times.batch_s))) + 1)
    # The number of epochs that fit into the budget.
    count = bisect.bisect_right(range(1, most + 1), seconds, key=predicted_s)
    nearest = range(max(1, count), min(most, count + 1) + 1)
    return min(nearest, key=lambda epochs: abs(predicted_s(epochs) - seconds))


def _measure_training(args, exe, training, seconds):
    """Return the duration of a training batch in seconds. The measurement takes about `seconds` seconds, or a few steps
    if steps are slow."""
    count = args.accumulate_steps
    steps = cuda_graph.STEPS_BEFORE + 2 if training.compiled.captured else 1
    warmup = max(steps * count, args.dali_prefetch + 1)  # skip prefetched batches, whose steps would appear too fast
    loader = dali.build_dataloader(args, Mode.TRAIN)

    def measure(warmup, batches):
        values = {"benchmark_warmup_steps": warmup, "benchmark_steps": batches, "max_bad_steps": 10**9}
        options = args.copy(benchmark=True, **values)
        if loader.step == len(loader):  # the previous measurement ended at the end of an epoch
            next(loader, None)
            loader.reset()
        return program.run(options, loader, exe, training.compiled, training.fetchs, 0, Mode.TRAIN)["batch_time"]

    with variables.restored(training.program, processes.place(args.device)):
        batch_s = measure(warmup, 2 * count)
        steps = min(MOST_STEPS, int(seconds / (count * batch_s)))
        return measure(count, steps * count) if steps > 2 else batch_s


def _measure_evaluation(args, exe, evaluation, seconds):
    """Return the duration of an evaluation in seconds. If the first evaluation is shorter than `seconds`, measure a
    second evaluation, because the first steps are slow."""
    if evaluation is None:
        return 0.0
    for _ in range(2):
        start = perf_counter()
        evaluation.refresh()
        result = program.run(args, evaluation.loader, exe, evaluation.compiled, evaluation.fetchs, 0, Mode.EVAL)
        elapsed_s = perf_counter() - start
        if result["epoch_time"] > seconds:  # all processes decide alike, because epoch_time is the same
            break
    return elapsed_s


def _measure_checkpoint(args, train_prog):
    """Return the time to write a checkpoint, in seconds."""
    start, folder = perf_counter(), folders.run_folder(args.output_dir, args.model_arch_name)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".budget") as root:
            states = enumerate(variables.snapshot(train_prog))
            files = {f"{i}.pdparams": saver.pickled(state) for i, state in states}
            folders.commit(root, "0", files, {}, args.checkpoint_commit)
    except OSError as e:
        raise folders.unwritable(folder, e) from e
    return perf_counter() - start
