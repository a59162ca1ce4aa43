"""The static-graph programs: feeds, metrics, optimizer, compilation, and the loop that runs a step."""

import contextlib
import io
from collections import Counter, namedtuple

import numpy as np
import paddle
from paddle import static
from paddle.incubate import asp

from paddle_resnet import compat, dali
from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.data import iterators
from paddle_resnet.job import exchange, fleet, processes, watchdog
from paddle_resnet.job.step_log import StepLog
from paddle_resnet.models import build_model, loss_head
from paddle_resnet.native import build as native
from paddle_resnet.optimizer import decorate_amp, exclude_from_asp
from paddle_resnet.optimizers.schedules import build_lr_scheduler
from paddle_resnet.optimizers.table import build_optimizer
from paddle_resnet.passes import all_reduces, fusion, updates
from paddle_resnet.steps import cuda_graph, host_metrics, trace
from utils import logger, progress
from utils.errors import RunError, UsageError
from utils.meters import AverageMeter, ConfusionMeter, StepClock, TopMeter, latency_percentiles, mean
from utils.mode import Mode
from utils.signals import Preempted

# What BuildStrategy can fuse in a training step on a GPU. Which of them exist depends on the Paddle version.
FUSED_OPERATORS = ("fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_elewise_add_act_ops", "enable_addto")


def start(args):
    """Resolve the device and the kernels, and start Fleet, unless that is done for these flags; changes the flags.

    build and dist_optimizer call it for programs that use only the functions of this module. train.py takes these
    steps itself, with others between them.

    Raises:
        UsageError: as compat.check_version, processes.resolve_devices and native.build.resolve.
    """
    if args.is_started:
        return
    compat.check_version()
    paddle.enable_static()
    processes.resolve_devices(args)
    native.resolve(args)
    fleet.connect(args)
    fleet.start(args)


def create_feeds(image_shape):
    """Declare the inputs of the current program.

    Args:
        image_shape: shape of one image in the loader's layout, [C, H, W] or [H, W, C].
    Returns:
        {"data": [N, *image_shape] in Paddle's default dtype, "label": [N, 1] int64}.
    """
    return {
        "data": static.data("data", [None, *image_shape], dtype=paddle.get_default_dtype()),
        "label": static.data("label", [None, 1], dtype="int64"),
    }


def create_fetchs(out, feeds, class_num, label_smoothing=0, mode=Mode.TRAIN):
    """Add loss and accuracy to the current program.

    Args:
        out: logits [N, class_num].
        feeds: result of create_feeds.
        class_num: number of classes.
        label_smoothing: share of each label spread evenly over all classes, in training only: Szegedy et al.,
            arXiv:1512.00567, section 7.
        mode: Mode.TRAIN: the loss is the mean over the batch. Mode.EVAL: it is the loss of each image [N, 1], and the
            host sums it over the data set in float64.
    Returns:
        {"loss", "top1", "top5": (variable, AverageMeter)}; top5 is top-C where there are C < 5 classes. With
        Mode.EVAL also "confusion": (label and predicted class of each image [N, 2] int64, ConfusionMeter).
    """
    head = loss_head.add(out, feeds["label"], class_num, label_smoothing, mode is Mode.TRAIN)
    return {
        name: (
            variable,
            ConfusionMeter(class_num) if name == "confusion" else AverageMeter(name, is_ratio=name != "loss"),
        )
        for name, variable in head.items()
    }


def create_strategy(args, is_train=True):
    """Compilation options.

    Args:
        args: flags.
        is_train: the fused operators are those of a training step.
    Returns:
        (BuildStrategy, None). Executors since Paddle 2.5 take no ExecutionStrategy.
    Raises:
        UsageError: --fuse-resunit is given and this Paddle lacks that pass, or --device auto is not resolved.
    """
    processes.check_resolved(args)
    strategy = static.BuildStrategy()
    if args.fuse_resunit:
        compat.fuse_residual_units(strategy)
    if args.device == "gpu" and is_train:
        # Paddle's fused addition and activation has no bfloat16 kernel. The passes that fuse BN skip bfloat16.
        is_bfloat16 = args.amp and args.amp_dtype == "bfloat16"
        for name in FUSED_OPERATORS:
            if hasattr(strategy, name) and not (is_bfloat16 and name == "fuse_elewise_add_act_ops"):
                setattr(strategy, name, True)
    return strategy, None


def dist_optimizer(args, optimizer):
    """Wrap an optimizer for mixed precision, data parallelism and sparsity.

    This order keeps all three. With Fleet's own strategy flags for AMP and ASP, gradients are not reduced or the
    program stays in float32.
    """
    start(args)
    optimizer = paddle.distributed.fleet.distributed_optimizer(decorate_amp(args, optimizer))
    return asp.decorate(optimizer) if args.asp else optimizer


def build(args, main_prog, startup_prog, step_each_epoch, is_train=True):
    """Fill a program. Parameters have the same names in every program, so an evaluation program shares those of the
    training program in the same scope.

    Args:
        args: flags. Those that follow the machine or the data are resolved here if they are not yet: the number of
            classes is that of --image-root unless --num-of-class is set. Changes the flags.
        main_prog: empty static.Program to fill.
        startup_prog: static.Program to fill with the initialisation. Do not run that of an evaluation program which
            shares the parameters of a training program.
        step_each_epoch: training steps an epoch, for the learning rate.
        is_train: training program with backward pass and optimizer, or evaluation program.
    Returns:
        (fetchs, lr_scheduler, feeds, optimizer); lr_scheduler and optimizer are None for evaluation.
    """
    start(args)
    dali.settle_classes(args, Mode.TRAIN if is_train else Mode.EVAL)
    watchdog.phase("the building of a program")
    channels, height, width = args.image_shape
    image_shape = [channels, height, width] if args.data_layout == "NCHW" else [height, width, channels]
    lr_scheduler = optimizer = None
    with static.program_guard(main_prog, startup_prog), paddle.utils.unique_name.guard():
        with _default_dtype("float16" if args.dali_output_fp16 else "float32"):
            feeds = create_feeds(image_shape)
        model = build_model(args)
        if not is_train:
            model.eval()
        images = feeds["data"]
        if args.dali_output_fp16 and not (args.amp and args.amp_dtype == "float16"):
            images = images.astype("float32")  # Paddle's layers refuse bfloat16 input; AMP casts to it later
        out = model(images)
        if args.kernels == "native":
            loss_head.use_native(main_prog)
        mode = Mode.TRAIN if is_train else Mode.EVAL
        fetchs = create_fetchs(out, feeds, args.num_of_class, args.label_smoothing, mode)
        if not is_train and (args.predictions is not None or args.report_html is not None):
            fetchs["logits"] = loss_head.add_logits(out), TopMeter(min(5, args.num_of_class))
        if is_train:
            lr_scheduler = build_lr_scheduler(args, step_each_epoch)
            optimizer = dist_optimizer(args, build_optimizer(args, lr_scheduler))
            if args.asp:
                exclude_from_asp(main_prog, model)
            with contextlib.redirect_stdout(io.StringIO()):  # Fleet prints its optimizers' names
                optimizer.minimize(fetchs["loss"][0], startup_prog)
            updates.mend_updates(args, main_prog)
            updates.place_state(args, startup_prog)
            all_reduces.adapt_communication(args, main_prog, startup_prog)
        if args.kernels == "native":
            with loss_head.scope():  # the metrics reach the host in the precision that they have
                host_metrics.post(variable for variable, _ in fetchs.values())
    return fetchs, lr_scheduler, feeds, optimizer


def compile_prog(args, program, loss_name=None, is_train=True):
    """Rewrite a copy of a program to fused operators, and wrap it for the Executor.

    Args:
        args: flags. --cuda-graph becomes false if a step of this program cannot be captured.
        program: the main_prog of build; it stays as it is.
        loss_name: ignored; Paddle 2.5 and newer do not need it.
        is_train: the program trains.
    Returns:
        static.CompiledProgram.
    Raises:
        UsageError: as create_strategy; or --cuda-graph true is explicit, and the step cannot be captured.
    """
    processes.check_resolved(args)
    program = program.clone()
    if args.device == "cpu" and args.data_layout == "NCHW":
        # oneDNN's convolutions take half the time of Paddle's own. Not in NHWC, where its filter gradients are wrong,
        # and only these operators: its gradient of a mean, for one, fails on the scalar loss.
        for op in program.global_block().ops:
            if op.type in ("conv2d", "conv2d_grad"):
                op._set_attr("use_mkldnn", True)
    if args.kernels == "native":
        fusion.fuse(program)
        cuda_graph.resolve(args, program)
    else:
        updates.keep_statistics_finite(program)
    return static.CompiledProgram(program, build_strategy=create_strategy(args, is_train)[0])


def fused_operators(args, compiled):
    """Compile a program now instead of in its first step, and count the fused operators that it has then.

    Args:
        args: flags.
        compiled: result of compile_prog; the Executor takes what is compiled here.
    Returns:
        {operator: count} by name: Paddle's (fused_...) and custom ones (native_...).
    """
    compiled._compile(static.global_scope(), processes.place(args))
    types = Counter(node.name() for node in compiled._graph.nodes() if node.is_op())
    return {name: count for name, count in sorted(types.items()) if name.startswith(("fused_", "native_"))}


def run(args, dataloader, exe, program, fetchs, epoch, mode=Mode.TRAIN, lr_scheduler=None):
    """Run one epoch, or what is left of it, or in benchmark mode a given number of steps.

    The host dispatches step n and then reads the metrics of step n-1; it waits for nothing else. In benchmark mode
    the loader restarts as often as needed. A restart and the wait for the first batch after it count as data_time of
    that step. The first --benchmark-warmup-steps do not count, and the measurement begins and ends with an empty queue.

    Args:
        args: flags.
        dataloader: iterable of `[{"data": images, "label": labels}]`, Paddle tensors or NumPy arrays of the shapes and
            types of create_feeds, such as a DALIGenericIterator; each iteration over it is an epoch. Without a length,
            its end is the end of the epoch. All processes must have the same number of training batches.
        exe: static.Executor.
        program: result of compile_prog.
        fetchs: result of build.
        epoch: number of the epoch, for the log.
        mode: Mode.TRAIN or Mode.EVAL.
        lr_scheduler: if given, it advances after each step.
    Returns:
        dict over all processes: loss, top1, top5 (means over images, those with a finite loss for the loss, NaN if
        there are none; of the measured steps in benchmark mode), images, steps, epoch_time (seconds), ips (images/s),
        data_time (waiting for the loader), compute_time and batch_time (mean seconds per step); with dynamic loss
        scaling loss_scale; in benchmark mode also
        latency_{mean,p50,p90,p95,p99}_ms (of the time between the dispatches of consecutive steps: the host is a step
        ahead of a GPU, so this is the time per step, not the time that one batch takes) and first_step_s (seconds from
        the start of the program until the host had the first step's metrics); with Mode.EVAL confusion (images by label
        and predicted class, int64 [C, C]) and class_top1 (float64 [C], NaN for a class without images); on rank 0 with
        --predictions or --report-html predictions (float64 [images, 1 + 2 k] in the order of the data set: label, the
        k = 5 or C < 5 most probable classes, their probabilities); not_finite (images whose loss is NaN or infinite) if
        there are any. After a resume inside an epoch, steps and times are those of the rest of the epoch.
    Raises:
        Preempted: the run was asked to stop, and all processes stopped before the same step.
        RunError: --max-bad-steps losses in a row were not finite.
        UsageError: --profile-steps names steps outside this pass, the program is not compiled, its parameters have no
            values, or a batch does not fit it.
    """
    _check_program(program)
    return run_and_save(args, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, save=None)


@trace.dropped()
def run_and_save(args, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, save):
    """As run, and calls `save(epoch, step)` before a step every --save-interval-steps."""
    this = _Pass(args, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler)
    for step in range(this.first_step, this.end_step):
        if this.is_stopped(step):
            break
        if save is not None and this.is_save_due(step):
            this.save(step, save)
        this.prepare(step)
        feed = this.next_batch(step)
        if feed is None:
            break
        this.run_step(step, feed)
    return this.finish()


def _check_program(program):
    """Raise UsageError for a program that is not compiled, or whose parameters have no values in the scope."""
    if isinstance(program, static.Program):
        raise UsageError("run: the program is not compiled; pass the result of compile_prog")
    first = program and next(iter(program._program.all_parameters()))
    if first is not None:
        variable = static.global_scope().find_var(first.name)
        if variable is None or not variable.get_tensor()._is_initialized():
            raise UsageError(f"run: parameter {first.name} has no value; call exe.run(startup_prog) first")


# Metrics of a step that are still to be read.
_InFlight = namedtuple("_InFlight", "step images lr handles")


class _Pass:
    """One pass over a loader: an epoch, what is left of one, or a benchmark.

    The host runs one step ahead: it dispatches step n, then reads the metrics of step n-1. Nothing else waits for the
    device.
    """

    def __init__(self, args, loader, exe, program, fetchs, epoch, mode, lr_scheduler):
        self._args, self._epoch, self._mode = args, epoch, mode
        self._lr_scheduler = lr_scheduler
        self._meters = {name: meter for name, (_, meter) in fetchs.items()}
        self._dispatch = host_metrics.dispatcher(args, exe, program, [variable for variable, _ in fetchs.values()])
        self._loader = loader = iterators.adapted(loader, program)
        loader.write_into(cuda_graph.inputs(args, program))
        self._measured_from = args.benchmark_warmup_steps if args.benchmark else 0
        self.first_step = 0 if args.benchmark else loader.step
        self.end_step = self._measured_from + args.benchmark_steps if args.benchmark else len(loader)
        self._clock = StepClock()
        self._step_log = StepLog(lambda step, metrics: log_info((epoch, step), metrics, mode))
        self._in_flight = self._first_step_s = None
        self._is_stopped = False
        self._enter_phase()
        self._batches = iter(loader)
        self._trace = trace.start(args, mode, self.first_step, self.end_step)

    def is_stopped(self, step):
        """Whether the job has been asked to stop.

        Raises:
            Preempted: in training, at the same step on every rank. Ranks evaluate at their own pace: there they end the
                pass and agree in finish().
        """
        if self._mode is Mode.TRAIN:
            if exchange.stop_agreed():
                self._read()
                self._step_log.finish()
                raise Preempted
        elif step % exchange.STOP_POLL_STEPS == 0:
            self._is_stopped = exchange.stop_asked()
        return self._is_stopped

    def is_save_due(self, step):
        interval = self._args.save_interval_steps
        return interval > 0 and step > self.first_step and step % interval == 0

    def save(self, step, save):
        """Save between two steps; the clock leaves it out."""
        self._drain()
        self._clock.close_step()
        save(self._epoch, step)
        self._enter_phase()
        self._clock.resume()

    def prepare(self, step):
        """Start the trace and the measurement where they are due."""
        if self._trace is not None:
            self._trace.before(step, self._drain, self._clock)
        # An epoch forgets the epoch before, a benchmark its warm-up. A pass that continues inside an epoch starts after
        # this step, so its meters keep the sums that the checkpoint has restored.
        if step == self._measured_from:
            self._drain()
            for meter in self._meters.values():
                meter.reset()
            self._clock.restart()

    def next_batch(self, step):
        """{"data", "label"} of the next batch, None after the last one of a loader without a length. A benchmark
        restarts the loader as often as needed."""
        watchdog.step(step, waits=True)
        batch = next(self._batches, None)
        if batch is None:
            if self.end_step == iterators.UNKNOWN_LENGTH:
                return None
            if not self._args.benchmark:
                raise RuntimeError(f"the loader ended at step {step} of {self.end_step}")
            self._loader.reset()
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self._clock.data_ready()
        watchdog.step(step)
        return batch[0]

    def run_step(self, step, feed):
        """Dispatch a step, then read the metrics of the one before."""
        images = feed["label"].shape()[0]
        handles = self._dispatch(feed)
        lr = None
        if self._lr_scheduler is not None:
            lr = self._lr_scheduler.last_lr
            self._lr_scheduler.step()
        self._read()
        self._in_flight = _InFlight(step, images, lr, handles)
        self._clock.step_done(images)

    def finish(self):
        """Read the last metrics, end the loader's epoch and reduce over all processes; returns what run returns."""
        args = self._args
        self._drain()
        self._clock.close_step()
        self._step_log.finish()
        if self._trace is not None:
            self._trace.before(self.end_step, self._drain, self._clock)
        if not args.benchmark and not self._is_stopped:
            if next(self._batches, None) is not None:
                raise RuntimeError(f"the loader has more than the {self.end_step} batches it announced")
            self._loader.reset()
        result = _over_all_processes(self._averages(), self._clock, self._is_stopped)
        if self._mode is Mode.TRAIN and args.use_dynamic_loss_scaling:
            result["loss_scale"] = _loss_scale()
        if "confusion" in self._meters:
            result.update(_confusion_over_all_processes(self._meters["confusion"]))
        if "logits" in self._meters:
            result.update(_predictions_on_rank_0(self._meters["confusion"].labels(), self._meters["logits"].rows()))
        if args.benchmark:
            result.update(latency_percentiles(self._clock.batch_times), first_step_s=self._first_step_s)
        return result

    def _averages(self):
        return {name: meter for name, meter in self._meters.items() if isinstance(meter, AverageMeter)}

    def _enter_phase(self):
        watchdog.phase(f"epoch {self._epoch} {self._mode.value}")

    def _read(self):
        """Wait for the metrics of the step in flight, if there is one, and log them where that is due."""
        if self._in_flight is None:
            return
        (step, images, lr, handles), self._in_flight = self._in_flight, None
        for meter, handle in zip(self._meters.values(), handles, strict=True):
            meter.update(np.asarray(handle), images)
        self._first_step_s = self._first_step_s or logger.elapsed_s()
        if self._mode is Mode.TRAIN:
            _refuse_bad_losses(self._args, self._meters["loss"], self._epoch, step, lr)
        if step % self._args.print_interval == 0 and step >= self._measured_from:
            metrics = {name: meter.value for name, meter in self._averages().items()}
            metrics.update(self._clock.since_last_log())
            self._step_log.add(step, images, metrics, {} if lr is None else {"lr": lr})
        if progress.is_due():
            self._show_progress(step + 1, images, lr)

    def _show_progress(self, step, images, lr):
        """Show what the host has read: the means of this pass, and the speed of its last steps."""
        data_time, batch_time = self._clock.recent()
        if batch_time == 0:
            return
        means = {name: meter.mean() for name, meter in self._averages().items()}
        figures = [f"loss {means['loss']:.4g}", f"top1 {means['top1']:.4f}", f"{images / batch_time:,.0f} images/s"]
        figures.append(f"waiting for data {data_time / batch_time:.0%}")
        if lr is not None:
            figures.append(f"lr {lr:.4g}")
        if self._args.device == "gpu":
            gib = paddle.device.cuda.max_memory_allocated(processes.local_gpu()) / 2**30
            figures.append(f"GPU memory {gib:.1f} GiB")
        steps_left = self.end_step - step
        run_left_s = None
        if self._mode is Mode.TRAIN and not self._args.benchmark:
            epochs_left = self._args.epochs - self._epoch - 1
            run_left_s = (steps_left + epochs_left * self.end_step) * batch_time
        progress.show(step, self.end_step, steps_left * batch_time, run_left_s, figures)

    def _drain(self):
        """Wait until all dispatched steps are done: their metrics are there before they end."""
        self._read()
        if self._args.device == "gpu":
            paddle.device.cuda.synchronize(processes.place(self._args))


def log_info(step, metrics, mode):
    """Log metrics of a phase.

    Args:
        step: (epoch, step), (epoch,) or ().
        metrics: {name: value}; the report has them as "train.NAME" or "val.NAME". Arrays are left out: report.py writes
            them.
        mode: Mode.TRAIN or Mode.EVAL.
    """
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, np.ndarray)}
    logger.log(step, {f"{mode.value}.{name}": value for name, value in numbers.items()})


def _refuse_bad_losses(args, loss, epoch, step, lr):
    """End a run whose loss stays infinite or NaN.

    Dynamic loss scaling skips such a step, whose gradients are not finite either. It does not count as long as a lower
    scale can help: Paddle lowers it down to 1. The scale is read only here, so a healthy step costs nothing.
    """
    if loss.bad_updates and args.use_dynamic_loss_scaling and _loss_scale() > 1:
        loss.excuse_update()
    if loss.bad_updates >= args.max_bad_steps:
        raise RunError(
            f"--max-bad-steps {args.max_bad_steps}: the loss was not finite in {loss.bad_updates} steps in a row, up "
            f"to step {step} of epoch {epoch} with learning rate {lr}: resume from the last checkpoint with a lower "
            "--lr, or check the images"
        )


def _loss_scale():
    return np.asarray(static.global_scope().find_var(LOSS_SCALE).get_tensor()).item()


def _over_all_processes(meters, clock, stopped):
    """Sums and times of all processes, reduced on the host in float64; the result is the same on each."""
    watchdog.phase("the sums over all processes")
    mine = [number for meter in meters.values() for number in (meter.sum, meter.count - meter.not_finite)]
    loss = meters["loss"]
    mine += [loss.count, loss.not_finite, clock.images, stopped]
    mine += [len(clock.batch_times), sum(clock.batch_times), sum(clock.data_times)]
    everyone = exchange.all_gather(mine)
    *sums, images, not_finite, timed_images, any_stopped, all_steps, total_time, total_data_time = everyone.sum(axis=0)
    if any_stopped:
        raise Preempted
    steps, slowest = int(everyone[:, -3].max()), everyone[:, -2].max()  # a process may have no images
    result = {name: mean(*sums[2 * i : 2 * i + 2]) for i, name in enumerate(meters)}
    result.update(
        images=int(images),
        steps=steps,
        epoch_time=slowest,
        ips=timed_images / slowest,
        data_time=total_data_time / all_steps,
        compute_time=(total_time - total_data_time) / all_steps,
        batch_time=total_time / all_steps,
    )
    if not_finite:
        result["not_finite"] = int(not_finite)
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in result.items()}


def _confusion_over_all_processes(meter):
    """The sum of all processes' counts. Only counts above zero travel, at most two numbers an image."""
    codes, counts = meter.counts()
    longest = int(exchange.all_gather([len(codes)]).max())
    padding = (0, longest - len(codes))
    everyone = exchange.all_gather([*np.pad(codes, padding), *np.pad(counts, padding)]).astype(np.int64)
    confusion = np.zeros(meter.class_num**2, np.int64)
    np.add.at(confusion, everyone[:, :longest], everyone[:, longest:])
    confusion = confusion.reshape(meter.class_num, meter.class_num)
    images = confusion.sum(axis=1)
    class_top1 = np.divide(confusion.diagonal(), images, out=np.full(len(images), np.nan), where=images > 0)
    return {"confusion": confusion, "class_top1": class_top1}


def _predictions_on_rank_0(labels, rows):
    """The rows of all processes in the order of the data set, whose parts follow that of the ranks."""
    mine = np.column_stack([labels, rows])
    everyone = exchange.gather(mine.tobytes())
    if everyone is None:
        return {}
    return {"predictions": np.frombuffer(b"".join(everyone)).reshape(-1, mine.shape[1])}


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
