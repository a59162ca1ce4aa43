"""A trace of selected steps (--profile-steps) for the Chrome trace viewer (chrome://tracing) or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle.profiler import Profiler, ProfilerTarget

from paddle_resnet.job import processes
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.meters import StepClock


def path(steps: tuple[int, int] | None, output_dir: str) -> Path | None:
    """Return the path of this process's trace file, or None without --profile-steps."""
    if steps is None:
        return None
    return Path(output_dir) / "profile" / f"steps_{steps[0]}_{steps[1]}_rank{processes.rank()}.json"


def check(steps: tuple[int, int] | None, last_step: int) -> None:
    """Check that the steps of --profile-steps are within the first pass over the loader, which ends before `last_step`.

    Raises:
        UsageError: a traced step is outside the first pass.
    """
    if steps is not None and steps[1] > last_step:
        raise _outside(steps, 0, last_step)


def start(program: Any, first_step: int, last_step: int, is_resume: bool) -> "Trace | None":
    """Return the trace for a program's first pass over the loader. Later calls for the same program return None.

    Args:
        program: result of program.compile_prog.
        first_step, last_step: the pass consists of the steps from first_step to last_step - 1.
        is_resume: whether --resume is set.
    Returns:
        Trace; None without --profile-steps, in later passes, or if a resumed run begins with a pass that does not
        contain all traced steps. In the last case, a warning is logged.
    Raises:
        UsageError: a traced step is outside the pass, and is_resume is false.
    """
    trace, program.trace = program.trace, None
    if trace is None:
        return None
    begin, end = trace.steps
    if first_step <= begin and end <= last_step:
        return trace
    if not is_resume:
        raise _outside(trace.steps, first_step, last_step)
    # This is a warning instead of an error, so that a command can be repeated with --resume.
    logger.warn(
        f"--profile-steps {begin}:{end}: not traced, because --resume continues with steps {first_step} to "
        f"{last_step - 1}; use steps in this range"
    )
    return None


def _outside(steps, first_step, last_step):
    return UsageError(
        f"--profile-steps {steps[0]}:{steps[1]}: outside the steps {first_step}:{last_step}, after which this run "
        f"evaluates, begins an epoch or ends; use steps within {first_step}:{last_step}"
    )


class Trace:
    """Records the steps of --profile-steps in this process: operators on the host, and kernels and copies on a GPU.

    The host waits for all dispatched steps before recording starts and before it ends. Before all other steps outside
    the trace, the host only compares integers. If the trace includes the first step of a program, this step has no
    operator names, because Paddle prepares the program during the step. A run that stops within the traced steps writes
    no trace file.

    Args:
        steps: (first step, last step + 1).
        path: path of the trace file.
        device: "cpu" or "gpu".
    """

    def __init__(self, steps, path, device):
        self.steps = self._begin, self._end = steps
        self._is_recording = False
        self._path = path
        targets = [ProfilerTarget.CPU, *([ProfilerTarget.GPU] if device == "gpu" else [])]
        self._profiler = Profiler(targets=targets, on_trace_ready=lambda _: None)
        self._profiler.step_num = self._begin  # number of the first step in the trace

    def before(self, step: int, drain: Callable, clock: StepClock) -> None:
        """Start, continue or write the trace. Call before() before each step, and once after the last step.

        Args:
            step: number of the next step.
            drain: function that waits for all previous steps.
            clock: meters.StepClock, which excludes the time for starting and writing the trace.
        """
        if self._begin < step < self._end:
            self._profiler.step()
        if step not in (self._begin, self._end):
            return
        drain()
        clock.close_step()
        if step == self._begin:
            self._profiler.start()
            self._is_recording = True
        else:
            self.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export(str(self._path), "json")
            logger.info(f"trace of steps {self._begin} to {self._end - 1}: {self._path}")
        clock.resume()

    def stop(self) -> None:
        """Stop recording. If a pass ends within the traced steps and stop() is not called, Paddle continues to record
        and later crashes, because its recorder is not thread-safe."""
        if self._is_recording:
            self._is_recording = False
            self._profiler.stop()
