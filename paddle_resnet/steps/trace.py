"""A trace of chosen steps (--profile-steps), for the Chrome trace viewer (chrome://tracing) or Perfetto."""

import contextlib
from pathlib import Path

from paddle.profiler import Profiler, ProfilerTarget

from paddle_resnet.job import processes
from utils import logger
from utils.errors import UsageError
from utils.mode import Mode

_traced = None  # flags of the run that has begun its first pass
_recording = None  # the Profiler that is recording


def path(args):
    """Where a process writes its trace, or None without --profile-steps."""
    if args.profile_steps is None:
        return None
    begin, end = args.profile_steps
    return Path(args.output_dir) / "profile" / f"steps_{begin}_{end}_rank{processes.rank()}.json"


def check(args, loader):
    """Refuse --profile-steps that reach beyond the run's first pass over this loader.

    Raises:
        UsageError: they do.
    """
    last_step = args.benchmark_warmup_steps + args.benchmark_steps if args.benchmark else len(loader)
    if args.profile_steps is not None and args.profile_steps[1] > last_step:
        raise _outside(args, 0, last_step)


def start(args, mode, first_step, last_step):
    """The trace of a run's first pass over its training images, or of its evaluation if it does not train. None without
    --profile-steps, for every other pass, and where --resume continues after the first of these steps.

    Args:
        args: flags.
        mode: of the pass.
        first_step, last_step: the pass has the steps from first_step to last_step - 1.
    Raises:
        UsageError: the pass lacks some of the steps.
    """
    global _traced
    is_evaluation_between = mode is Mode.EVAL and args.run_scope.trains
    if args.profile_steps is None or _traced is args or is_evaluation_between:
        return None
    _traced = args
    begin, end = args.profile_steps
    if args.resume and begin < first_step:  # a repeated command must not fail for it
        logger.warn(f"--profile-steps {begin}:{end}: no trace: --resume continues at step {first_step}")
        return None
    if begin < first_step or end > last_step:
        raise _outside(args, first_step, last_step)
    return Trace(args, begin, end)


def _outside(args, first_step, last_step):
    begin, end = args.profile_steps
    return UsageError(
        f"--profile-steps {begin}:{end} is not within this run's first steps {first_step}:{last_step}: give a part of "
        "them"
    )


@contextlib.contextmanager
def dropped():
    """Stop recording if the pass ends inside the traced steps. Paddle would continue to record and crash later in the
    process: its recorder is not thread-safe."""
    global _recording
    try:
        yield
    finally:
        if _recording is not None:
            _recording.stop()
            _recording = None


class Trace:
    """Records the steps from `begin` to `end - 1` of this process: operators on the host, and kernels and copies on a
    GPU.

    Recording starts and ends with an empty queue. All other steps only compare numbers. Paddle prepares a program in
    its first step and names no operators there. A run that stops inside these steps writes no trace.
    """

    def __init__(self, args, begin, end):
        self._begin, self._end = begin, end
        self._path = path(args)
        targets = [ProfilerTarget.CPU, *([ProfilerTarget.GPU] if args.device == "gpu" else [])]
        self._profiler = Profiler(targets=targets, on_trace_ready=lambda _: None)
        self._profiler.step_num = begin  # what the trace calls its first step

    def before(self, step, drain, clock):
        """Call this before each step, and after the last one with the number that would come next.

        Args:
            step: its number.
            drain: waits until the steps before are done.
            clock: meters.StepClock; it leaves out the time to start and to write the trace.
        """
        global _recording
        if self._begin < step < self._end:
            self._profiler.step()
        if step not in (self._begin, self._end):
            return
        drain()
        clock.close_step()
        if step == self._begin:
            self._profiler.start()
            _recording = self._profiler
        else:
            _recording = None
            self._profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export(str(self._path), "json")
            logger.info(f"trace of the steps {self._begin} to {self._end - 1}: {self._path}")
        clock.resume()
