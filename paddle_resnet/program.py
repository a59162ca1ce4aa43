"""The static-graph programs: feeds, metrics, optimizer, compilation, and the loop that runs them."""

import contextlib
import io
from collections import Counter, namedtuple

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.incubate import asp

from paddle_resnet import compat
from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.job.step_log import StepLog
from paddle_resnet.models import build_model, loss_head
from paddle_resnet.optimizer import build_lr_scheduler, build_optimizer, decorate_amp, exclude_from_asp
from paddle_resnet.passes import all_reduces, fusion
from paddle_resnet.passes.updates import mend_updates
from paddle_resnet.steps import cuda_graph, host_metrics, trace
from utils import logger
from utils.errors import RunError
from utils.meters import AverageMeter, ConfusionMeter, StepClock, latency_percentiles
from utils.mode import Mode
from utils.signals import Preempted

# What BuildStrategy can fuse in a training step on a GPU; which of them exist depends on the Paddle version.
FUSED_OPERATORS = ("fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_elewise_add_act_ops", "enable_addto")


def create_feeds(image_shape):
    """Declare the inputs of the current program.

    Args:
        image_shape: one image in the layout that the loader makes, [C, H, W] or [H, W, C].
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
        mode: Mode.TRAIN: the loss is the mean over the batch. Mode.EVAL: it is the loss of each image [N, 1], so
            that the sum over the data set can be made in float64.
    Returns:
        {"loss", "top1", "top5": (variable, AverageMeter)}; top5 is top-C where there are C < 5 classes. With
        Mode.EVAL also "confusion": (label and predicted class of each image [N, 2] int64, ConfusionMeter).
    """
    head = loss_head.add_paddle(out, feeds["label"], class_num, label_smoothing, mode is Mode.TRAIN)
    return _with_meters(head, class_num)


def _with_meters(head, class_num):
    meters = {name: AverageMeter(name, is_ratio=name != "loss") for name in head if name != "confusion"}
    if "confusion" in head:
        meters["confusion"] = ConfusionMeter(class_num)
    return {name: (variable, meters[name]) for name, variable in head.items()}


def create_strategy(args, is_train=True):
    """Compilation options.

    Args:
        args: flags.
        is_train: the fused operators are those of a training step.
    Returns:
        (BuildStrategy, None). Executors since Paddle 2.5 take no ExecutionStrategy.
    Raises:
        UsageError: --fuse-resunit and this Paddle has no such pass.
    """
    strategy = static.BuildStrategy()
    if args.fuse_resunit:
        compat.fuse_residual_units(strategy)
    if args.device == "gpu" and is_train:
        # Paddle's kernels of a fused addition and activation know no bfloat16; the passes that fuse BN leave it alone.
        is_bfloat16 = args.amp and args.amp_dtype == "bfloat16"
        for name in FUSED_OPERATORS:
            if hasattr(strategy, name) and not (is_bfloat16 and name == "fuse_elewise_add_act_ops"):
                setattr(strategy, name, True)
    return strategy, None


def dist_optimizer(args, optimizer):
    """Wrap an optimizer for mixed precision, data parallelism and sparsity.

    The order is the one that keeps all three: Fleet's own strategy flags for AMP and ASP drop the gradient
    all-reduce or stay in float32.
    """
    optimizer = fleet.distributed_optimizer(decorate_amp(args, optimizer))
    return asp.decorate(optimizer) if args.asp else optimizer


def build(args, main_prog, startup_prog, step_each_epoch, is_train=True):
    """Fill a program. Parameters get the same names in every program, so that an evaluation program uses those
    of the training program in the same scope.

    Args:
        args: flags.
        main_prog: empty static.Program to fill.
        startup_prog: static.Program that gets the initialisation; not to be run for an evaluation program whose
            parameters a training program has made.
        step_each_epoch: training steps an epoch, for the learning rate.
        is_train: training program with backward pass and optimizer, or evaluation program.
    Returns:
        (fetchs, lr_scheduler, feeds, optimizer); lr_scheduler and optimizer are None for evaluation.
    """
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
            images = images.astype("float32")  # AMP casts it on to bfloat16: Paddle's layers check for the other two
        out = model(images)
        add_head = loss_head.add_native if args.kernels == "native" else loss_head.add_paddle
        head = add_head(out, feeds["label"], args.num_of_class, args.label_smoothing, is_train)
        fetchs = _with_meters(head, args.num_of_class)
        if is_train:
            lr_scheduler = build_lr_scheduler(args, step_each_epoch)
            optimizer = dist_optimizer(args, build_optimizer(args, lr_scheduler))
            if args.asp:
                exclude_from_asp(main_prog, model)
            with contextlib.redirect_stdout(io.StringIO()):  # Fleet prints the names of its optimizers
                optimizer.minimize(fetchs["loss"][0], startup_prog)
            mend_updates(args, main_prog)
            all_reduces.adapt_communication(args, main_prog, startup_prog)
        if args.kernels == "native":
            with loss_head.scope():  # the metrics reach the host in the precision that they have
                host_metrics.post(head.values())
    return fetchs, lr_scheduler, feeds, optimizer


def compile_prog(args, program, loss_name=None, is_train=True):
    """What the Executor runs for a program.

    Args:
        args: flags.
        program: result of build.
        loss_name: not used by Paddle 2.5 and newer; kept for callers that pass it.
        is_train: the program trains.
    Returns:
        static.CompiledProgram.
    """
    program = program.clone()  # the one that was built stays as it is
    if args.device == "cpu" and args.data_layout == "NCHW":
        # oneDNN's convolutions take half the time of Paddle's own. Not in NHWC, where its filter gradients are wrong,
        # and only these operators: its gradient of a mean, for one, fails on the scalar loss.
        for op in program.global_block().ops:
            if op.type in ("conv2d", "conv2d_grad"):
                op._set_attr("use_mkldnn", True)
    if args.kernels == "native":
        fusion.fuse(program)
    return static.CompiledProgram(program, build_strategy=create_strategy(args, is_train)[0])


def fused_operators(args, compiled):
    """Compile a program now instead of in its first step, and count the fused operators that it has then.

    Args:
        args: flags.
        compiled: result of compile_prog; the Executor takes what is compiled here.
    Returns:
        {operator: count}, by name: Paddle's (fused_...) and the project's own (native_...).
    """
    compiled._compile(static.global_scope(), processes.place(args))
    types = Counter(node.name() for node in compiled._graph.nodes() if node.is_op())
    return {name: count for name, count in sorted(types.items()) if name.startswith(("fused_", "native_"))}


def run(args, dataloader, exe, program, fetchs, epoch, mode=Mode.TRAIN, lr_scheduler=None):
    """Run one epoch, or what is left of it, or in benchmark mode a given number of steps.

    The host dispatches step n and then reads the metrics of step n-1; it waits for nothing else. In benchmark mode
    the loader starts again as often as needed; the first --benchmark-warmup-steps and the time that a restart
    takes are left out of every figure, and the measurement begins and ends with an empty queue.

    Args:
        args: flags.
        dataloader: iterator of `[{"data", "label"}]` with reset().
        exe: static.Executor.
        program: result of compile_prog.
        fetchs: result of build.
        epoch: number of the epoch, for the log.
        mode: Mode.TRAIN or Mode.EVAL.
        lr_scheduler: advanced after each step if given.
    Returns:
        dict over all processes: loss, top1, top5 (means over images; of the measured steps in benchmark mode), images,
        steps, epoch_time (seconds), ips (images/s), data_time (waiting for the loader), compute_time and batch_time
        (mean seconds a step); with dynamic loss scaling loss_scale; in benchmark mode also
        latency_{mean,p50,p90,p95,p99}_ms and first_step_s (seconds from the start of the program until the host had the
        first step's metrics); with Mode.EVAL confusion (images by label and predicted class, int64 [C, C]) and
        class_top1 (float64 [C], NaN for a class without any); not_finite (images whose loss was no number) if there are
        any. In the rest of an epoch that another run has begun, steps and times are those of the rest.
    Raises:
        Preempted: the run has been asked to stop and all processes have done so before the same step.
        RunError: --max-bad-steps losses in a row were not finite.
        UsageError: --profile-steps names steps that this pass has not.
    """
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
        this.run_step(step, feed)
    return this.finish()


# Metrics of a step that are still to be read.
_InFlight = namedtuple("_InFlight", "step images lr handles")


class _Pass:
    """One pass over a loader: an epoch, what is left of one, or a benchmark.

    The host runs one step ahead: it dispatches step n, then reads the metrics of step n-1. Nothing else waits for the
    device.
    """

    def __init__(self, args, loader, exe, program, fetchs, epoch, mode, lr_scheduler):
        self._args, self._loader, self._epoch, self._mode = args, loader, epoch, mode
        self._lr_scheduler = lr_scheduler
        self._meters = {name: meter for name, (_, meter) in fetchs.items()}
        self._dispatch = host_metrics.dispatcher(args, exe, program, [variable for variable, _ in fetchs.values()])
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
        """{"data", "label"} of the next batch. A benchmark restarts the loader as often as needed and leaves the time
        out."""
        watchdog.step(step, waits=True)
        batch = next(self._batches, None)
        if batch is None:
            if not self._args.benchmark:
                raise RuntimeError(f"the loader ended at step {step} of {self.end_step}")
            self._drain()
            self._clock.close_step()
            self._loader.reset()
            self._batches = iter(self._loader)
            batch = next(self._batches)
            self._clock.resume()
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
        if args.benchmark:
            result.update(latency_percentiles(self._clock.batch_times), first_step_s=self._first_step_s)
        return result

    def _averages(self):
        return {name: meter for name, meter in self._meters.items() if name != "confusion"}

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

    def _drain(self):
        """Wait until all dispatched steps are done: their metrics are there before they end."""
        self._read()
        if self._args.device == "gpu":
            paddle.device.cuda.synchronize(processes.place(self._args))


def log_info(step, metrics, mode):
    """Log metrics of a phase.

    Args:
        step: (epoch, step), (epoch,) or ().
        metrics: {name: value}; the report has them as "train.NAME" or "val.NAME". Arrays are left out: report.py
            writes those.
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
    """Sums and times of every process, reduced on the host in float64, the same on each."""
    watchdog.phase("the sums over all processes")
    loss = meters["loss"]
    mine = [meter.sum for meter in meters.values()] + [loss.count, loss.not_finite, clock.images, stopped]
    mine += [len(clock.batch_times), sum(clock.batch_times), sum(clock.data_times)]
    everyone = exchange.all_gather(mine)
    *sums, images, not_finite, timed_images, any_stopped, all_steps, total_time, total_data_time = everyone.sum(axis=0)
    if any_stopped:
        raise Preempted
    steps, slowest = int(everyone[:, -3].max()), everyone[:, -2].max()  # a process may have no image and no step
    result = {name: value / images for name, value in zip(meters, sums, strict=True)}
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
    """Every process's counts, added up; only those that are not zero travel, at most two numbers an image."""
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


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
