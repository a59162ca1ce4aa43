"""The static-graph programs: feeds, metrics, optimizer, compilation, and the loop that runs them."""

import contextlib
import io
from collections import Counter

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.incubate import asp

from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.job.step_log import StepLog
from paddle_resnet.models import build_model, loss_head
from paddle_resnet.optimizer import build_lr_scheduler, build_optimizer, decorate_amp, exclude_from_asp
from paddle_resnet.passes import all_reduces, fusion
from paddle_resnet.passes.updates import mend_updates
from paddle_resnet.steps import cuda_graph, host_metrics, trace
from utils import logger
from utils.errors import RunError, UsageError
from utils.meters import AverageMeter, ConfusionMeter, StepClock, latency_percentiles
from utils.mode import Mode
from utils.signals import Preempted

# What BuildStrategy can fuse in a training step on a GPU; which of them exist depends on the Paddle version.
FUSED_OPERATORS = ("fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_elewise_add_act_ops", "enable_addto")
EVAL_STOP_POLL_STEPS = 4


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
        if not hasattr(strategy, "fuse_resunit"):
            raise UsageError(
                f"--fuse-resunit: Paddle {paddle.__version__} has no fused residual unit: drop the flag, the other "
                "operators are fused without it"
            )
        strategy.fuse_resunit = True
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
    names, meters = list(fetchs), [meter for _, meter in fetchs.values()]
    dispatch = host_metrics.dispatcher(args, exe, program, [variable for variable, _ in fetchs.values()])
    dataloader.targets = cuda_graph.inputs(args, program)
    first_step = args.benchmark_warmup_steps if args.benchmark else 0
    last_step = first_step + args.benchmark_steps if args.benchmark else len(dataloader)
    clock = StepClock()
    step_log = StepLog(lambda step, metrics: log_info((epoch, step), metrics, mode))
    first_step_s = in_flight = None  # in flight: (step, images, learning rate, handles) of metrics still to be read

    def read():
        nonlocal in_flight, first_step_s
        if in_flight is None:
            return
        step, images, lr, handles = in_flight
        in_flight = None
        for meter, handle in zip(meters, handles, strict=True):
            meter.update(np.asarray(handle), images)
        first_step_s = first_step_s or logger.elapsed_s()
        if mode is Mode.TRAIN:
            _refuse_bad_losses(args, fetchs, epoch, step, lr)
        if step % args.print_interval == 0 and step >= first_step:
            metrics = {name: meter.value for name, meter in zip(names, meters, strict=True) if name != "confusion"}
            metrics.update(clock.since_last_log())
            step_log.add(step, images, metrics, {} if lr is None else {"lr": lr})

    def drain():
        read()
        if args.device == "gpu":
            paddle.device.cuda.synchronize(processes.place(args))  # the metrics are there before the step ends

    watchdog.phase(f"epoch {epoch} {mode.value}")
    batches = iter(dataloader)
    start, stopped = 0 if args.benchmark else dataloader.step, False
    tracer = trace.start(args, mode, start, last_step)
    for step in range(start, last_step):
        if mode is Mode.TRAIN and exchange.stop_agreed():
            read()
            step_log.finish()
            raise Preempted
        if mode is Mode.EVAL and step % EVAL_STOP_POLL_STEPS == 0 and exchange.stop_asked():
            stopped = True
            break
        if save is not None and args.save_interval_steps and step > start and step % args.save_interval_steps == 0:
            drain()
            clock.close_step()
            save(epoch, step)
            watchdog.phase(f"epoch {epoch} {mode.value}")
            clock.resume()
        if tracer is not None:
            tracer.before(step, drain, clock)
        if step == first_step:
            drain()
            for meter in meters:
                meter.reset()
            clock.restart()
        watchdog.step(step, waits=True)
        batch = next(batches, None)
        if batch is None:
            if not args.benchmark:
                raise RuntimeError(f"the loader ended at step {step} of {last_step}")
            drain()
            clock.close_step()
            dataloader.reset()
            batches = iter(dataloader)
            batch = next(batches)
            clock.resume()
        clock.data_ready()
        watchdog.step(step)
        images = batch[0]["label"].shape()[0]
        handles = dispatch(batch[0])
        dispatched = (step, images, lr_scheduler.last_lr if lr_scheduler else None, handles)
        if lr_scheduler is not None:
            lr_scheduler.step()
        read()
        in_flight = dispatched
        clock.step_done(images)
    drain()
    clock.close_step()
    step_log.finish()
    if tracer is not None:
        tracer.before(last_step, drain, clock)
    if not args.benchmark and not stopped:
        _finish_epoch(dataloader, batches)
    averages = {name: meter for name, meter in zip(names, meters, strict=True) if name != "confusion"}
    result = _over_all_processes(averages, clock, stopped)
    if mode is Mode.TRAIN and args.use_dynamic_loss_scaling:
        result["loss_scale"] = _loss_scale()
    if "confusion" in fetchs:
        result.update(_confusion_over_all_processes(fetchs["confusion"][1]))
    if args.benchmark:
        result.update(latency_percentiles(clock.batch_times), first_step_s=first_step_s)
    return result


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


def _refuse_bad_losses(args, fetchs, epoch, step, lr):
    """End a run whose loss stays infinite or not a number.

    Dynamic loss scaling skips such a step, whose gradients are not finite either. It does not count as long as a lower
    scale can help: Paddle lowers it down to 1. The scale is read only here, so that a healthy step costs nothing.
    """
    loss = fetchs["loss"][1]
    if loss.bad_updates and args.use_dynamic_loss_scaling:
        loss.bad_updates -= _loss_scale() > 1
    if loss.bad_updates >= args.max_bad_steps:
        raise RunError(
            f"--max-bad-steps {args.max_bad_steps}: the loss was not finite in {loss.bad_updates} steps in a row, up "
            f"to step {step} of epoch {epoch} with learning rate {lr}: go on from the last checkpoint with a lower "
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


def _finish_epoch(dataloader, batches):
    if next(batches, None) is not None:
        raise RuntimeError(f"the loader has more than the {len(dataloader)} batches it announced")
    dataloader.reset()


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
