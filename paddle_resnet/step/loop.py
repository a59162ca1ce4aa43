"""Run the steps of an epoch."""

import contextlib
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import static

from paddle_resnet import graph
from paddle_resnet.checkpoints import replicas
from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.components import task
from paddle_resnet.data import iterators
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.job.step_log import StepLog
from paddle_resnet.optimizers.schedules import Schedule
from paddle_resnet.settings import durations
from paddle_resnet.settings.groups import benchmark
from paddle_resnet.step import trace
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.step.metrics import log_metrics, over_all_processes
from paddle_resnet.utils import logger, progress
from paddle_resnet.utils.errors import RunError, UsageError, counted
from paddle_resnet.utils.meters import AverageMeter, StepClock, latency_percentiles
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.signals import Preempted


@dataclass(frozen=True, kw_only=True)
class Options(task.Settings, durations.Settings, benchmark.Settings):
    """The flags that the steps of an epoch read, in addition to those of the base classes; see `train.py --help
    all`."""

    accumulate_steps: int
    dali_device: str
    device: str
    kernels: str
    max_bad_steps: int
    num_of_class: int
    print_interval: int
    resume: bool
    use_dynamic_loss_scaling: bool


def check_program(program: Any) -> None:
    """Raise UsageError for a program that is not compiled, or whose first parameter has no value in the scope."""
    if isinstance(program, static.Program):
        raise UsageError("run: the program is not compiled; pass the result of compile_prog")
    first = next(iter(graph.block(program._program).all_parameters()), None)
    if first is not None:
        variable = static.global_scope().find_var(first.name)
        if variable is None or not variable.get_tensor()._is_initialized():
            raise UsageError(f"run: parameter {first.name} has no value; call exe.run(startup_prog) first")


def run_and_save(
    options: Options,
    dataloader: Any,
    exe: static.Executor,
    program: static.CompiledProgram,
    fetchs: Mapping,
    epoch: int,
    mode: Mode,
    lr_scheduler: Schedule | None,
    save: Callable | None,
    end_step: int | None = None,
) -> dict:
    """Like program.run(), but also call `save(epoch, step)` every --save-interval-steps steps, unless save is None, and
    stop before step `end_step`, unless it is None. The next call continues the epoch. In run_and_save, each
    batch is a step, even with --accumulate-steps; only --save-interval-steps counts training steps.

    Returns:
        dict of metrics, aggregated over all processes:
        loss, top1, top5: means over images. The loss is the mean of the finite losses, or NaN if no loss is finite.
        not_finite: number of images whose loss is NaN or infinite, if there are any. In training, not_finite
        counts all images of each batch whose mean loss is NaN or infinite.
        images, steps, epoch_time (seconds), ips (images/s). If a call begins within an epoch, steps, epoch_time and ips
        cover only this call; the other metrics above cover the entire epoch.
        data_time (waiting for the loader), compute_time, batch_time: mean seconds per step of this call.
        loss_scale: current loss scale, only in training with dynamic loss scaling.
        With --benchmark, the metrics above cover only the measured steps, and there are additional metrics:
        latency_{mean,p50,p90,p95,p99}_ms: time between the dispatches of consecutive steps. On a GPU, the time from the
        dispatch of a batch to its result is longer, because the host is one step ahead.
        first_step_s: logger.elapsed_s() when the host has the metrics of the first step.
        With Mode.EVAL: confusion (int64 [k, 3], one row per pair that occurred, sorted, with the columns label,
        predicted class, number of images), class_top1 (float64 [C], NaN for a class without images) and, without
        --benchmark, the averages over the classes {precision,recall,f1}_{macro,weighted}, ece (expected calibration
        error) and reliability (see confidence.reliability).
        With Mode.EVAL and --predictions or --report-html, on rank 0: predictions (float64 [images, 1 + 2 k] in the
        order of the data set, with the columns label, the k = min(5, C) most probable classes, and their
        probabilities).
        With --multi-label, there are neither top1 and top5 nor the metrics of Mode.EVAL listed above; evaluations
        instead return the result of MultiLabel.reduce.
    Raises:
        the errors of program.run.
    """
    this = EpochRun(options, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, end_step)
    with contextlib.closing(this):
        for step in range(this.first_step, this.end_step):
            if this.is_stopped(step):
                break
            if save is not None and this.is_save_due(step):
                this.save(step, save)  # also checks that all ranks have the same parameters
            elif this.is_check_due(step):
                this.check_replicas(step)
            this.prepare(step)
            feed = this.next_batch(step)
            if feed is None:
                break
            this.run_step(step, feed)
        return this.finish()


# A dispatched step whose metrics have not been read yet.
_InFlight = namedtuple("_InFlight", "step images lr handles")


class EpochRun:
    """One pass over a loader: an epoch, a part of an epoch, or a benchmark. See run_and_save."""

    def __init__(self, options: Options, loader, exe, program, fetchs, epoch, mode, lr_scheduler, end_step=None):
        self._options, self._epoch, self._mode = options, epoch, mode
        self._program, self._lr_scheduler = program, lr_scheduler
        self._meters = {name: meter for name, (_, meter) in fetchs.items()}
        self._batches_each_step = options.accumulate_steps if mode is Mode.TRAIN else 1
        variables = [variable for variable, _ in fetchs.values()]
        # Labels are checked only on a CPU, because GPU memory is unreadable after a kernel has failed.
        self._task = options.task(options.num_of_class)
        class_num = self._task.checked_classes if options.device == "cpu" else None
        how = variables, options.kernels == "native", class_num, options.dali_device == options.device
        self._dispatch = Dispatcher(exe, program, *how)
        if self._batches_each_step > 1:
            self._accumulate = Dispatcher(exe, program.accumulating, *how)
        self._loader = loader = iterators.adapted(loader, program)
        loader.write_into(self._dispatch.inputs)
        self._measured_from = options.benchmark_warmup_steps if options.benchmark else 0
        self.first_step = 0 if options.benchmark else loader.step
        if self._batches_each_step > 1 and len(loader) == iterators.UNKNOWN_LENGTH:
            raise UsageError(
                f"--accumulate-steps {options.accumulate_steps}: requires a loader with a length; implement its __len__"
            )
        self._used = (
            durations.used_batches(len(loader), options.accumulate_steps) if mode is Mode.TRAIN else len(loader)
        )
        self.end_step = self._measured_from + options.benchmark_steps if options.benchmark else end_step or self._used
        self._clock = StepClock()
        self._step_log = StepLog(lambda step, metrics: log_metrics((epoch, step), metrics, mode))
        self._in_flight = self._first_step_s = None
        self._is_stopped = False
        self._enter_phase()
        self._batches = iter(loader)
        self._trace = trace.start(program, self.first_step, self.end_step, options.resume)

    def close(self) -> None:
        """Stop the trace of a pass that ends early."""
        if self._trace is not None:
            self._trace.stop()

    def is_stopped(self, step: int) -> bool:
        """Return whether an evaluation must end early because a stop was requested. Ranks evaluate without
        synchronizing their steps, so they agree on the stop only in finish().

        Raises:
            Preempted: training must stop; every rank raises this exception before the same step.
        """
        if self._mode is Mode.TRAIN:
            if step % self._batches_each_step == 0 and exchange.stop_agreed():
                self._read()
                self._step_log.finish()
                raise Preempted
        elif step % exchange.STOP_POLL_STEPS == 0:
            self._is_stopped = exchange.stop_asked()
        return self._is_stopped

    def is_save_due(self, step: int) -> bool:
        interval = self._options.save_interval_steps * self._batches_each_step
        return interval > 0 and step > self.first_step and step % interval == 0

    def save(self, step: int, save: Callable) -> None:
        """Save a checkpoint between two steps."""
        with self._paused():
            save(self._epoch, step)

    def is_check_due(self, step: int) -> bool:
        """Return whether to compare the parameters of several ranks before a step, which is every
        replicas.INTERVAL_STEPS training steps of the run, counted over all epochs. The parameters of a benchmark are
        not kept, so they are not compared."""
        if processes.world_size() == 1 or self._mode is not Mode.TRAIN or self._options.benchmark:
            return False
        done = 0 if self._lr_scheduler is None else self._lr_scheduler.last_epoch  # Paddle's name for the step count
        return done > 0 and done % replicas.INTERVAL_STEPS == 0 and step % self._batches_each_step == 0

    def check_replicas(self, step: int) -> None:
        """Raise RunError between two steps if the ranks have different parameters."""
        with self._paused():
            watchdog.phase("comparison of parameters")
            replicas.check(self._program.source, f"before step {step} of epoch {self._epoch}")

    @contextlib.contextmanager
    def _paused(self):
        """Wait until the device is idle, and exclude the time in the `with` block from the step times."""
        self._drain()
        self._clock.close_step()
        yield
        self._enter_phase()
        self._clock.resume()

    def prepare(self, step: int) -> None:
        """Start, continue or write the trace, if there is one. If the measurement begins at step `step`, reset the
        meters and the clock."""
        if self._trace is not None:
            self._trace.before(step, self._drain, self._clock)
        # Discard the metric sums of the previous epoch or of the warm-up. A pass that continues an epoch begins at a
        # later step, so the meters keep the sums of the earlier steps, which a checkpoint also contains.
        if step == self._measured_from:
            self._drain()
            for meter in self._meters.values():
                meter.reset()
            self._clock.restart()

    def next_batch(self, step: int) -> Any:
        """Return the next batch, {name: tensor}, or None at the end of a loader without a length. In a benchmark,
        restart the loader at its end.

        Raises:
            RuntimeError: the loader yields fewer batches than its length.
        """
        watchdog.step(step, waits=True)
        batch = next(self._batches, None)
        if batch is None:
            if self.end_step == iterators.UNKNOWN_LENGTH:
                return None
            if not self._options.benchmark:
                raise RuntimeError(f"loader: ended after {step} of {self.end_step} batches; correct its length")
            self._loader.reset()
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self._clock.data_ready()
        watchdog.step(step)
        return batch[0]

    def run_step(self, step: int, feed: dict) -> None:
        """Dispatch a step, advance the schedule, and read the metrics of the previous step."""
        images = next(iter(feed.values())).shape()[0]
        updates_parameters = (step + 1) % self._batches_each_step == 0
        handles = (self._dispatch if updates_parameters else self._accumulate)(feed)
        lr = None
        if self._lr_scheduler is not None:
            lr = self._lr_scheduler.last_lr
            self._lr_scheduler.batch = (step + 1) % self._batches_each_step
            if updates_parameters:
                self._lr_scheduler.step()
        self._read()
        self._in_flight = _InFlight(step, images, lr, handles)
        self._clock.step_done(images)

    def finish(self) -> dict:
        """Read the last metrics, complete the loader's epoch if the pass has reached its end, reduce the metrics over
        all processes, and return the result of run_and_save.

        Raises:
            RuntimeError: the loader yields more batches than its length.
            Preempted: a stop was requested during an evaluation.
        """
        self._drain()
        self._clock.close_step()
        self._step_log.finish()
        if self._trace is not None:
            self._trace.before(self.end_step, self._drain, self._clock)
        if not self._options.benchmark and not self._is_stopped and self.end_step == self._used:
            for _ in range(len(self._loader) - self._used):
                next(self._batches)
            if next(self._batches, None) is not None:
                length = len(self._loader)
                raise RuntimeError(f"loader: yields more batches than its length {length}; correct the length")
            self._loader.reset()
        result = over_all_processes(self._averages(), self._clock, self._is_stopped)
        if self._mode is Mode.TRAIN and self._options.use_dynamic_loss_scaling:
            result["loss_scale"] = _loss_scale()
        result.update(self._task.reduce(self._meters, self._options.benchmark))
        if self._options.benchmark:
            result.update(latency_percentiles(self._clock.batch_times), first_step_s=self._first_step_s)
        return result

    def _averages(self):
        return {name: meter for name, meter in self._meters.items() if isinstance(meter, AverageMeter)}

    def _enter_phase(self):
        watchdog.phase(f"epoch {self._epoch} {self._mode.value}")

    def _read(self):
        """Wait for the metrics of the last dispatched step, unless they have already been read, and add them to the
        meters. Log step metrics every --print-interval steps.

        Raises:
            DataError: see AverageMeter.update.
            RunError: see _check_losses.
        """
        if self._in_flight is None:
            return
        (step, images, lr, handles), self._in_flight = self._in_flight, None
        for meter, handle in zip(self._meters.values(), handles, strict=True):
            meter.update(np.asarray(handle), images)
        self._first_step_s = self._first_step_s or logger.elapsed_s()
        if self._mode is Mode.TRAIN:
            self._check_losses(step, lr)
        if step % self._options.print_interval == 0 and step >= self._measured_from:
            metrics = {name: meter.value for name, meter in self._averages().items()}
            metrics.update(self._clock.since_last_log())
            self._step_log.add(step, images, metrics, {} if lr is None else {"lr": lr})
        if progress.is_due():
            self._show_progress(step + 1, images, lr)

    def _check_losses(self, step, lr):
        """Raise RunError after --max-bad-steps consecutive losses that are infinite or NaN.

        If a loss is not finite, dynamic loss scaling skips the step and lowers the loss scale, to a minimum of 1.
        Losses that are not finite do not count towards --max-bad-steps while the loss scale is above 1. The loss scale
        is read only after a loss that is not finite, because reading the loss scale waits for the device.
        """
        options, loss = self._options, self._meters["loss"]
        if loss.bad_updates and options.use_dynamic_loss_scaling and _loss_scale() > 1:
            loss.excuse_update()
        if loss.bad_updates >= options.max_bad_steps:
            raise RunError(
                f"--max-bad-steps {options.max_bad_steps}: "
                f"{counted(loss.bad_updates, 'consecutive loss was', 'consecutive losses were')} not finite, up to "
                f"step {step} of epoch {self._epoch} with learning rate {lr}; resume from the last checkpoint with a "
                "lower --lr, or check the images"
            )

    def _show_progress(self, step, images, lr):
        """Display the mean metrics of the epoch so far and the current speed."""
        data_time, batch_time = self._clock.recent()
        means = {name: meter.mean() for name, meter in self._averages().items()}
        fields = [f"{name} {means[name]:.3f}" for name in ("loss", "top1") if name in means]
        fields.append(f"{images / batch_time:,.0f} images/s")
        if lr is not None:
            fields.append(f"lr {lr:.2g}")
        more = [f"waiting for data {data_time / batch_time:.0%}"]
        if self._options.device == "gpu":
            gib = paddle.device.cuda.max_memory_allocated(processes.local_gpu()) / 2**30
            more.append(f"GPU memory {gib:.1f} GiB")
        steps_left = self.end_step - step
        run_left_s = None
        if self._lr_scheduler is not None and not self._options.benchmark:
            timeline = self._lr_scheduler.timeline
            total = durations.total_steps(self._options, timeline) * self._batches_each_step
            run_left_s = (total - timeline.batches_before(self._epoch) - step) * batch_time
        progress.show(step, self.end_step, steps_left * batch_time, run_left_s, fields, more)

    def _drain(self):
        """Wait until the device is idle. Reading the metrics is not enough, because they are available before the step
        ends."""
        self._read()
        if self._options.device == "gpu":
            paddle.device.cuda.synchronize(processes.place(self._options.device))


def _loss_scale():
    return np.asarray(static.global_scope().find_var(LOSS_SCALE).get_tensor()).item()
