"""--budget-minutes: choose the number of epochs so that the run ends after a given time.

Before step 1, the run measures the duration of a training step, of an evaluation, and of writing a checkpoint. The
measurement does not affect the results, because it trains with a separate loader and all variables are restored
afterwards. A run with --epochs and --warmup-epochs set to the chosen numbers therefore gives identical results.
"""

import bisect
import math
import tempfile
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from paddle_resnet import dali, program, recipe
from paddle_resnet.checkpoints import folders, run_folders, saver, variables
from paddle_resnet.job import exchange, processes
from paddle_resnet.optimizers import schedules
from paddle_resnet.settings import durations
from paddle_resnet.settings.field import about
from paddle_resnet.settings.groups import start
from paddle_resnet.step import cuda_graph
from paddle_resnet.utils import logger, progress
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet.checkpoints.start import StartCheckpoint

MEASURED = 0.02  # fraction of the budget to spend on measuring training
SLOW_EVALUATION = 0.1  # fraction of the budget above which an evaluation is measured only once
MOST_STEPS = 200  # maximum number of steps to measure
MOST_EPOCHS = 2**31 - 1  # maximum value of --epochs
TOLERANCE = 0.1  # warn if the expected duration differs from the budget by more than this fraction


class StageTimes(NamedTuple):
    """Measured durations, in seconds, of starting a stage of the run, and of training on one of its batches."""

    start_s: float
    batch_s: float


class CheckpointTimes(NamedTuple):
    """Measured durations, in seconds, of copying the state of the run for a checkpoint, for which training waits, and
    of writing the checkpoint in the background. Before the next checkpoint, training waits until writing has ended."""

    copy_s: float
    write_s: float


class Times(NamedTuple):
    """Measured durations: StageTimes of each stage, the duration of one evaluation in seconds, and CheckpointTimes."""

    stages: list[StageTimes]
    evaluation_s: float
    checkpoint: CheckpointTimes


@dataclass(frozen=True, kw_only=True)
class Options(schedules.Options, start.Settings):
    """The flags that determine whether and how a run chooses its number of epochs."""

    benchmark: bool
    checkpoint_commit: str
    model_arch_name: str
    output_dir: str
    has_explicit_warmup: bool = about("is_explicit", "warmup_epochs")


def is_needed(options: Options, checkpoint: "StartCheckpoint | None") -> bool:
    """Return whether the run must choose its number of epochs.

    Args:
        options: flags, including those inherited from the checkpoint.
        checkpoint: the checkpoint that the run starts from, or None.
    Raises:
        UsageError: the run continues from a checkpoint that has no meta.json or was written with a different
            --budget-minutes.
    """
    if options.budget_minutes is None or options.benchmark or not options.run_scope.trains:
        return False
    if checkpoint is None or (checkpoint.epoch, checkpoint.step) == (0, 0):
        return True
    if not checkpoint.resumes or checkpoint.meta["arguments"].get("budget_minutes") != options.budget_minutes:
        start = "--resume" if options.resume or options.from_checkpoint is None else "--from-checkpoint"
        raise UsageError(
            f"--budget-minutes {options.budget_minutes:g}: applies only to new runs, but this run continues from "
            f"{checkpoint.folder} ({start}); use --epochs instead"
        )
    return False


def choose(options: Options, exe: "static.Executor", training: Any, evaluation: Any) -> dict[str, dict[str, int]]:
    """Choose --epochs and, unless it is explicit, --warmup-epochs, and adapt the learning-rate schedule. The programs
    are not changed, because they do not depend on --epochs or --warmup-epochs. Rank 0 chooses for all processes.

    Args:
        options: flags of the run.
        exe: Executor for all programs.
        training, evaluation: phases.Work with compiled programs; `evaluation` is None if the run does not evaluate.
    Returns:
        {reason: {name of a flag: chosen value}}.
    Raises:
        UsageError: the run would end before its last stage (--sizes, --unfreeze-at) begins, or the checkpoint folder
            cannot be written.
        the errors of dali.build_dataloader and program.run.
    """
    progress.phase("measurement for --budget-minutes")
    minutes, schedule = options.budget_minutes, training.lr_scheduler
    budget_s, timeline = 60 * minutes, schedule.timeline
    works = [training, *(work for _, work in training.later)]
    with logger.only_warnings():
        seconds = MEASURED * budget_s / len(works)
        # The first stage is measured last, because its captured step then remains in GPU memory.
        stages = [_measure_training(exe, work, seconds) for work in reversed(works)][::-1]
        stages[0] = stages[0]._replace(start_s=0)  # this stage has already started
        evaluation_s = _measure_evaluation(exe, evaluation, SLOW_EVALUATION * budget_s)

    folder = run_folders.run_folder(options.output_dir, options.model_arch_name)

    def plan():
        times = Times(stages, evaluation_s, _measure_checkpoint(folder, options.checkpoint_commit, training.program))
        start_s, last = logger.elapsed_s(), timeline.parts[-1].first_epoch
        epochs = epochs_within(options, budget_s - start_s, timeline, times)
        if epochs <= last:
            enough_s = (1 + TOLERANCE) * (start_s + duration_s(options, last + 1, timeline, times))
            raise UsageError(
                f"--budget-minutes {minutes:g}: ends after {counted(epochs, 'epoch')}, but the last stage "
                f"(--sizes, --unfreeze-at) begins in epoch {last}; use an earlier epoch, or --budget-minutes "
                f"{math.ceil(enough_s / 60)}"
            )
        return epochs, start_s, start_s + duration_s(options, epochs, timeline, times), times

    epochs, start_s, end_s, (stages, evaluation_s, (copy_s, write_s)) = exchange.from_rank_0(plan)
    parts = [
        f"{counted(part.steps * timeline.accumulate_steps, 'batch', 'batches')} of {batch_s:.3g} s per epoch"
        + (f" from epoch {part.first_epoch} on" if part.first_epoch else "")
        for part, (_, batch_s) in zip(timeline.parts, stages, strict=True)
    ]
    parts += [f"evaluation {evaluation_s:.3g} s"] if evaluation else []
    parts += [f"copy of a checkpoint {copy_s:.3g} s, writing it in the background {write_s:.3g} s"]
    reason = f"--budget-minutes {minutes:g}, {', '.join(parts)}"
    chosen = {reason: {"epochs": epochs}}
    if not options.has_explicit_warmup:
        chosen[counted(epochs, "epoch")] = {"warmup_epochs": recipe.warmup_epochs(epochs)}
    for flags in chosen.values():
        options = replace(options, **flags)
    schedule.adopt(schedules.build_lr_scheduler(options, timeline))
    ends = (
        f"the run of {counted(epochs, 'epoch')} ends after about {end_s / 60:.3g} minutes, of which "
        f"{start_s / 60:.3g} have passed"
    )
    logger.info(f"--epochs {epochs}: chosen for {reason}; {ends}")
    if abs(end_s - budget_s) > TOLERANCE * budget_s:
        logger.warn(
            f"--budget-minutes {minutes:g}: {ends}, and no other number of epochs is closer; "
            "change the budget, or use --epochs"
        )
    return chosen


def duration_s(settings: durations.Settings, epochs: int, timeline: durations.Timeline, times: Times) -> float:
    """Return the predicted duration in seconds of `epochs` epochs, including evaluations and checkpoints.

    Args:
        settings: intervals of evaluations and checkpoints.
        epochs: number of epochs.
        timeline, times: steps and measured durations of the stages.
    """
    seconds = math.ceil(epochs / settings.eval_interval) * times.evaluation_s
    checkpoints = math.ceil(epochs / settings.save_interval)
    for part, count, stage in zip(timeline.parts, timeline.epochs_before(epochs), times.stages, strict=True):
        seconds += stage.start_s * (count > 0) + count * part.steps * timeline.accumulate_steps * stage.batch_s
        if settings.save_interval_steps:
            # Exclude checkpoints at the end of an epoch, which --save-interval determines.
            checkpoints += count * ((part.steps - 1) // settings.save_interval_steps)
    copy_s, write_s = times.checkpoint
    # A checkpoint is copied when the previous one has been written. The run ends when the last checkpoint has been
    # written.
    return max(seconds + checkpoints * copy_s, checkpoints * write_s) + write_s


def epochs_within(settings: durations.Settings, seconds: float, timeline: durations.Timeline, times: Times) -> int:
    """Return the number of epochs, from 1 to MOST_EPOCHS, whose predicted duration is closest to `seconds`."""

    def predicted_s(epochs):
        return duration_s(settings, epochs, timeline, times)

    # `count` epochs fit into the budget; `count` is 0 if not even one epoch fits.
    count = bisect.bisect_right(range(1, MOST_EPOCHS + 1), seconds, key=predicted_s)
    nearest = range(max(1, count), min(MOST_EPOCHS, count + 1) + 1)
    return min(nearest, key=lambda epochs: abs(predicted_s(epochs) - seconds))


def _measure_training(exe, work, seconds):
    """Return the StageTimes of the stage that a phases.Work trains. As many steps are measured as take `seconds`, but
    at least 2 and at most MOST_STEPS. For exceptions, see dali.build_dataloader and program.run."""
    start, args = perf_counter(), work.settings
    # The compiled program of a later stage is discarded, because its captured step would occupy GPU memory.
    compiled = work.compiled or program.compile_prog(args, work.program)
    count = args.accumulate_steps
    steps = cuda_graph.STEPS_BEFORE + 2 if compiled.captured else 1
    warmup = max(steps * count, args.dali_prefetch + 1)  # skip prefetched batches, for which no step waits
    loader = dali.build_dataloader(args, Mode.TRAIN)

    def measure(warmup, batches):
        values = {"benchmark_warmup_steps": warmup, "benchmark_steps": batches, "max_bad_steps": 10**9}
        options = args.copy("internal", benchmark=True, **values)
        if loader.step == len(loader):  # the previous measurement ended at the end of an epoch
            next(loader, None)
            loader.reset()
        return program.run(options, loader, exe, compiled, work.fetchs, 0, Mode.TRAIN)["batch_time"]

    with variables.restored(work.program, processes.place(args.device)):
        batch_s = measure(warmup, 2 * count)
        start_s = max(0.0, perf_counter() - start - (warmup + 2 * count) * batch_s)
        steps = min(MOST_STEPS, int(seconds / (count * batch_s)))
        return StageTimes(start_s, measure(count, steps * count) if steps > 2 else batch_s)


def _measure_evaluation(exe, evaluation, seconds):
    """Return the duration of an evaluation in seconds, or 0 if `evaluation` is None. If the first evaluation takes at
    most `seconds`, return the duration of a second evaluation, because the first steps of a program are slow."""
    if evaluation is None:
        return 0.0
    for _ in range(2):
        start = perf_counter()
        evaluation.refresh()
        result = program.run(
            evaluation.settings, evaluation.loader, exe, evaluation.compiled, evaluation.fetchs, 0, Mode.EVAL
        )
        elapsed_s = perf_counter() - start
        if result["epoch_time"] > seconds:  # all processes have the same epoch_time, and decide alike
            break
    return elapsed_s


def _measure_checkpoint(folder, commit, train_prog):
    """Return the CheckpointTimes of a run folder. Raise UsageError if the folder cannot be written."""
    start = perf_counter()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".budget") as root:
            states = enumerate(variables.snapshot(train_prog))
            files = {f"{i}.pdparams": saver.pickled(state) for i, state in states}
            copied = perf_counter()
            folders.commit(root, "0", files, {}, commit)
    except OSError as e:
        raise folders.unwritable(folder, e) from e
    return CheckpointTimes(copied - start, perf_counter() - copied)
