"""Build and compile the static-graph programs, and run them step by step."""

import contextlib
import functools
import io
from collections import Counter, namedtuple

import numpy as np
import paddle
from paddle import static
from paddle.incubate import asp

from paddle_resnet import resolution
from paddle_resnet.checkpoints import replicas
from paddle_resnet.checkpoints.variables import LOSS_SCALE, MASTER
from paddle_resnet.data import iterators
from paddle_resnet.job import exchange, fleet, processes, watchdog
from paddle_resnet.job.step_log import StepLog
from paddle_resnet.machine import compat
from paddle_resnet.models import build_model, layers, logits, loss_head, mixing, parts
from paddle_resnet.optimizers import amp, sparsity, table
from paddle_resnet.optimizers.schedules import build_lr_scheduler
from paddle_resnet.passes import accumulation, all_reduces, averages, fusion, lookahead, quantization, updates
from paddle_resnet.settings import durations
from paddle_resnet.steps import cuda_graph, host_metrics, random_numbers, scalars, trace
from paddle_resnet.steps.dispatch import Dispatcher
from paddle_resnet.utils import logger, progress
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.meters import (
    AverageMeter,
    ConfusionMeter,
    StepClock,
    TopMeter,
    average_metrics,
    class_metrics,
    latency_percentiles,
    mean,
)
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.signals import Preempted

# Attributes of BuildStrategy that enable fused operators for training on a GPU. Not every Paddle version has all of
# these attributes.
FUSED_OPERATORS = ("fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_elewise_add_act_ops", "enable_addto")
# Operators that use oneDNN on a CPU. With Paddle's own depthwise convolutions, a training step of EfficientNet_Lite0
# takes five times as long (1.71 instead of 0.34 s of CPU time with 16 images of 64 px; n = 5).
ONEDNN = ("conv2d", "conv2d_grad", "depthwise_conv2d", "depthwise_conv2d_grad")
_started_with = None  # settings passed to the last call of start_fleet()


def start(args, mode=Mode.TRAIN):
    """Resolve the settings and start Fleet, unless Fleet is already running with these settings.

    build and dist_optimizer call start(), so a custom program does not need to. train.py does not use start(), but
    calls the same functions itself, because other phases run between them.

    Returns:
        Settings, resolved and frozen; see resolution.resolve.
    Raises:
        UsageError: compat.check_version or resolution.resolve fails.
    """
    if _started_with is not None and _started_with in (args.resolved, args.run):
        return args.resolved
    compat.check_version()
    paddle.enable_static()
    fleet.connect(args.comm_timeout_s)
    args = resolution.resolve(args, mode)
    start_fleet(args)
    return args


def start_fleet(args):
    """Start Fleet. Call start_fleet() after all flags are resolved and before a program is built."""
    global _started_with
    _started_with = args
    needs_serial_run = args.cuda_graph or args.profile_steps is not None
    fleet.start(args.seed, args.device, args.data_layout, args.kernels, needs_serial_run)


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
    """Add the loss and the accuracy to the current program.

    Args:
        out: logits [N, class_num].
        feeds: result of create_feeds. An optional entry "weights" (float32 [N, class_num], each row sums to 1) replaces
            the labels in the loss.
        class_num: number of classes.
        label_smoothing: fraction of the target probability to spread evenly over all classes, in training only (Szegedy
            et al., arXiv:1512.00567, section 7).
        mode: in Mode.TRAIN, the loss is the mean over the batch. In Mode.EVAL, the loss has one value per image [N, 1],
            so that the host can sum all losses in float64.
    Returns:
        {"loss", "top1", "top5": (variable, AverageMeter)}; if there are only C < 5 classes, top5 is the top-C accuracy.
        Mode.EVAL adds "confusion": (label and predicted class of each image [N, 2] int64, ConfusionMeter).
    """
    head = loss_head.add(out, feeds, class_num, label_smoothing, mode is Mode.TRAIN)
    return {
        name: (
            variable,
            ConfusionMeter(class_num) if name == "confusion" else AverageMeter(name, is_ratio=name != "loss"),
        )
        for name, variable in head.items()
    }


def create_strategy(args, is_train=True):
    """Return the compilation options for a program.

    Args:
        args: Settings.
        is_train: whether to enable the fused operators for training.
    Returns:
        (BuildStrategy, None). The second element is None, because Paddle 2.5 and newer do not accept an
        ExecutionStrategy.
    Raises:
        UsageError: --fuse-resunit is set, but this build of Paddle lacks the pass; or --device is still auto.
    """
    args = args.resolved
    processes.check_resolved(args.device)
    strategy = static.BuildStrategy()
    if args.fuse_resunit and not compat.fuse_residual_units(strategy):
        raise UsageError(
            f"--fuse-resunit: this build of Paddle {paddle.__version__} lacks fused residual units; use --fuse-resunit "
            "false"
        )
    if args.device == "gpu" and is_train:
        # The operator that fuses addition and activation has no bfloat16 kernel, so its fusion is not enabled in
        # bfloat16. The BN fusion passes can stay enabled, because they skip bfloat16 operators.
        is_bfloat16 = args.amp and args.amp_dtype == "bfloat16"
        for name in FUSED_OPERATORS:
            if hasattr(strategy, name) and not (is_bfloat16 and name == "fuse_elewise_add_act_ops"):
                setattr(strategy, name, True)
    return strategy, None


def dist_optimizer(args, optimizer):
    """Return an optimizer that wraps `optimizer` for mixed precision, data parallelism and sparsity.

    The wrappers work together only in this order: AMP, Fleet, ASP. If AMP and ASP are enabled through Fleet's strategy
    flags instead, gradients are not reduced or the program remains in float32.
    """
    args = start(args)
    if args.amp:
        scaling = args.scale_loss, args.use_dynamic_loss_scaling
        float32 = quantization.float32_variables(static.default_main_program())
        optimizer = amp.decorate(optimizer, args.amp_dtype, args.amp_level, *scaling, float32)
    optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)
    return asp.decorate(optimizer) if args.asp else optimizer


def build(args, main_prog, startup_prog, step_each_epoch, is_train=True, lr_scheduler=None, class_images=None):
    """Build the training or evaluation program. Parameters have the same names in both programs, so programs that run
    in the same scope share the parameter values.

    Args:
        args: Settings; not modified. If the settings are not frozen, build uses the result of start(), in which flags
            that depend on the machine or the data, such as the number of classes in --image-root, are resolved.
        main_prog: empty static.Program to fill.
        startup_prog: static.Program to fill. Do not run the startup program of an evaluation program that shares the
            parameters of a training program.
        step_each_epoch: training batches per epoch, for the learning rate.
        is_train: whether to build the training program, which includes the backward pass and the optimizer, or the
            evaluation program.
        lr_scheduler: schedule to share between training programs; if None, build creates a schedule.
        class_images: number of training images of each class, from the loader; required by --class-weights balanced.
    Returns:
        (fetchs, lr_scheduler, feeds, optimizer); lr_scheduler and optimizer are None for evaluation.
    """
    mode = Mode.TRAIN if is_train else Mode.EVAL
    args = start(args, mode)
    watchdog.phase("program construction")
    channels, height, width = args.image_shape
    image_shape = [channels, height, width] if args.data_layout == "NCHW" else [height, width, channels]
    if is_train and lr_scheduler is None:
        lr_scheduler = build_lr_scheduler(args, durations.uniform(args.accumulate_steps, step_each_epoch))
    optimizer = None
    with static.program_guard(main_prog, startup_prog), paddle.utils.unique_name.guard():
        with _default_dtype("float16" if args.dali_output_fp16 else "float32"):
            feeds = create_feeds(image_shape)
        model = build_model(args.model_arch_name, args.num_of_class, channels, args.data_layout)
        if not is_train:
            model.eval()
        frozen = _set_up_layers(args, model) if is_train else []
        images, targets = feeds["data"], feeds
        if args.dali_output_fp16 and not (args.amp and args.amp_dtype == "float16"):
            images = images.astype("float32")  # Paddle's layers reject bfloat16, so AMP casts the images later
        if is_train:
            images, weights = _mix(args, images, feeds["label"], lr_scheduler)
            targets = _weigh_images(args, feeds | weights, class_images)
            _drop_out(args, model, lr_scheduler)
            _drop_paths(args, model, lr_scheduler)
        elif args.tta == "flip":
            images = paddle.concat([images, paddle.flip(images, [3 if args.data_layout == "NCHW" else 2])])
        first = len(main_prog.global_block().ops)
        out = logits(model, images, args.model_arch_name, args.num_of_class)
        if args.qat:
            quantization.insert(main_prog, first, lr_scheduler, args.device == "gpu")
        if not is_train and args.tta == "flip":
            out = loss_head.mean_over_mirrored(out)
        if args.kernels == "native":
            loss_head.use_native(main_prog)
        fetchs = create_fetchs(out, targets, args.num_of_class, args.label_smoothing, mode)
        if not is_train and (args.predictions is not None or args.report_html is not None):
            fetchs["logits"] = loss_head.add_logits(out), TopMeter(min(5, args.num_of_class))
        if is_train:
            optimizer = _minimize(args, main_prog, startup_prog, model, fetchs["loss"][0], lr_scheduler, frozen)
        if args.kernels == "native":
            with loss_head.scope():  # AMP must not change the precision of the metrics
                host_metrics.add_copy(variable for variable, _ in fetchs.values())
    return fetchs, lr_scheduler, feeds, optimizer


def _set_up_layers(args, model):
    """Apply --bn-momentum and --freeze to a network, and return the frozen parameters."""
    if args.bn_momentum is not None:
        parts.set_bn_momentum(model, args.bn_momentum)
    return parts.freeze(model, args.freeze) if args.freeze else []


def _minimize(args, main_prog, startup_prog, model, loss, lr_scheduler, frozen):
    """Add the backward pass and the parameter update to a training program, and return the optimizer."""
    is_native = args.kernels == "native"
    own_optimizer = table.build_optimizer(args, lr_scheduler)
    optimizer = dist_optimizer(args, own_optimizer)
    if frozen:
        parts.stop_gradients(main_prog)
    if args.asp:
        sparsity.exclude_classifier(main_prog, model)
    with contextlib.redirect_stdout(io.StringIO()):  # Fleet prints the names of its optimizers
        optimizer.minimize(loss, startup_prog)
    # Also create the optimizer state of frozen parameters, so that --freeze does not change which variables a
    # checkpoint contains.
    own_optimizer._create_accumulators(main_prog.global_block(), frozen)
    if args.asp:
        sparsity.add_masks(main_prog, startup_prog, frozen)
    if args.lr_decay_by_layer != 1 or args.classifier_lr_factor != 1:
        factors = parts.rate_factors(model, args.lr_decay_by_layer, args.classifier_lr_factor)
        updates.scale_rates(main_prog, factors)
    scalars.register(main_prog, lr_scheduler._var_name, lr_scheduler)
    if args.optimizer == "RAdam":
        updates.rectify(main_prog, lr_scheduler)
    accumulation.add_sums(main_prog, startup_prog, args.accumulate_steps)
    if args.clip_grad_norm is not None:
        updates.clip_gradients(main_prog, args.clip_grad_norm)
    masters = main_prog.global_block().vars
    frozen_values = {p.name: p.name + MASTER if p.name + MASTER in masters else p.name for p in frozen}
    if args.lookahead is not None:
        lookahead.add(main_prog, startup_prog, lr_scheduler, frozen_values, *args.lookahead)
    if args.ema is not None:
        constants = frozen_values | {name: name for name in all_reduces.bn_statistics(main_prog)}
        averages.add(main_prog, startup_prog, lr_scheduler, constants, args.ema, is_native)
    if is_native:
        updates.place_state(startup_prog)
    else:
        is_bfloat16 = args.amp and args.amp_dtype == "bfloat16"
        updates.fix_updates(main_prog, is_bfloat16, args.use_dynamic_loss_scaling)
    all_reduces.adapt_communication(main_prog, startup_prog, args.device)
    return optimizer


def _mix(args, images, label, lr_scheduler):
    """If a flag in mixing.KINDS is set, return (mixed images, {"weights": target weights}), otherwise (images, {})."""
    alphas = {kind: alpha for kind in mixing.KINDS if (alpha := getattr(args, kind))}
    if not alphas:
        return images, {}
    if args.batch_size < 2:
        raise UsageError(f"--{next(iter(alphas))}: requires at least two images per batch; use --batch-size 2 or more")
    _, height, width = args.image_shape

    @functools.lru_cache(1)  # rows, columns and fraction must come from the same draw
    def draw(step):
        generator = random_numbers.generator(args.seed, step, "mix", processes.rank())
        return mixing.draw(generator, alphas, height, width)

    def declare(name, shape):
        return scalars.declare(f"mix.{name}", lambda: getattr(draw(lr_scheduler.batches), name), shape)

    is_nchw = args.data_layout == "NCHW"
    rows = declare("rows", [1, 1, height, 1] if is_nchw else [1, height, 1, 1])
    columns = declare("columns", [1, 1, 1, width] if is_nchw else [1, 1, width, 1])
    mixed = mixing.mix_images(images, rows, columns)
    return mixed, {"weights": mixing.mix_labels(label, declare("fraction", [1]), args.num_of_class)}


def _weigh_images(args, targets, class_images):
    """Return the targets for loss_head.add. With --class-weights balanced, the targets include image weights."""
    if args.class_weights == "none":
        return targets
    if class_images is None:
        raise UsageError("--class-weights balanced: requires class_images; pass the loader's class_images to build")
    images = np.zeros(args.num_of_class, np.int64)
    images[: len(class_images)] = class_images
    weights = loss_head.balanced_weights(images)
    variable = scalars.declare("class_weights", lambda: weights, [1, args.num_of_class])
    return targets | {"image_weights": loss_head.weigh_images(targets, variable, args.num_of_class)}


def _drop_out(args, model, lr_scheduler):
    """Insert dropout (--dropout) before the last layer of a network."""
    if not args.dropout:
        return

    seed = _declare_seed(args, "dropout", lr_scheduler)
    model.last.register_forward_pre_hook(lambda _, inputs: layers.dropout(inputs[0], args.dropout, seed))


def _drop_paths(args, model, lr_scheduler):
    """Set the rates (--drop-path) and seeds of a network's DropPath layers. The rate increases linearly with depth."""
    if not args.drop_path:
        return
    paths = [layer for layer in model.sublayers() if isinstance(layer, layers.DropPath)]
    if not paths:
        raise UsageError(
            f"--drop-path {args.drop_path:g}: --model-arch-name {args.model_arch_name} has no layers.DropPath "
            "in its residual blocks; remove --drop-path"
        )
    for i, path in enumerate(paths, 1):
        path.rate, path.seed = args.drop_path * i / len(paths), _declare_seed(args, f"drop_path.{i}", lr_scheduler)


def _declare_seed(args, layer, lr_scheduler):
    """Return an int32 variable [1] that contains the dropout seed of a layer for the current step."""

    def draw():
        generator = random_numbers.generator(args.seed, lr_scheduler.batches, layer, processes.rank())
        return generator.integers(1, 2**31)

    return scalars.declare(f"{layer}.seed", draw, dtype="int32")


def compile_prog(args, program, loss_name=None, is_train=True):
    """Copy a program, fuse operators in the copy, and compile the copy for the Executor.

    Args:
        args: Settings.
        program: the main_prog that build has filled; not modified.
        loss_name: ignored; Paddle 2.5 and newer do not need it.
        is_train: whether this is the training program.
    Returns:
        static.CompiledProgram with additional attributes:
        source: `program`.
        captured: cuda_graph.CapturedStep, or None if the step cannot be captured.
        write_scalars: scalars.Writer.
        trace: trace.Trace of the first pass over the loader, or None if --profile-steps is not set.
        accumulating: compiled program for all batches of a training step except the last, or None if each step has one
        batch (--accumulate-steps 1).
    Raises:
        UsageError: create_strategy or table.check_rule fails; or --cuda-graph true is explicit, but the step cannot be
            captured.
    """
    args = args.resolved
    processes.check_resolved(args.device)
    table.check_rule(program, args.optimizer)
    compiled = _compile(args, program, is_train)
    compiled.source, compiled.accumulating = program, None
    if is_train and args.accumulate_steps > 1:
        accumulating = accumulation.without_update(program)
        accumulating.host_scalars = scalars.of(program)
        compiled.accumulating = _compile(args, accumulating, is_train)
    return compiled


def _compile(args, program, is_train):
    program, host_scalars = program.clone(), scalars.of(program)
    program.host_scalars = host_scalars
    if args.device == "cpu" and args.data_layout == "NCHW":
        # oneDNN's convolutions are faster (see ONEDNN), but their filter gradients are wrong in NHWC. Only convolutions
        # use oneDNN, because other oneDNN operators fail, such as the gradient of `mean` for the scalar loss.
        for op in program.global_block().ops:
            if op.type in ONEDNN:
                # Use conv2d instead of Paddle's depthwise operator, which multiplies one small matrix per channel.
                op.desc.set_type(op.type.removeprefix("depthwise_"))
                op._set_attr("use_mkldnn", True)
    if args.kernels == "native":
        fusion.fuse(program)
    else:
        updates.keep_statistics_finite(program)
    if args.device == "gpu":
        _warn_of_depthwise(args.kernels, fusion.paddle_depthwise(program))
    strategy = create_strategy(args, is_train)[0]
    if any(_is_broadcast_addition(program, op) for op in program.global_block().ops):
        strategy.fuse_elewise_add_act_ops = False
    compiled = static.CompiledProgram(program, build_strategy=strategy)
    place = processes.place(args.device)
    compiled.write_scalars = scalars.Writer(program, place)
    compiled.trace = None
    if args.profile_steps is not None and is_train == args.run_scope.trains:
        compiled.trace = trace.Trace(args.profile_steps, trace.path(args.profile_steps, args.output_dir), args.device)
    compiled.captured = None
    if args.kernels == "native":
        is_explicit = args.is_explicit("cuda_graph")
        untested = cuda_graph.untested_operators(program, args.cuda_graph, is_explicit)
        if untested is not None:
            compiled.captured = cuda_graph.CapturedStep(compiled, place, untested, is_explicit)
    return compiled


def _is_broadcast_addition(program, op):
    """Return whether Paddle's fused addition and activation would compute wrong results for an operator. If one operand
    is broadcast over the batch, such as a convolution bias [1, C, 1, 1], the fused operator processes only one image
    and leaves the results of all other images uninitialized."""
    if op.type != "elementwise_add":
        return False
    x, y = (program.global_block().var(op.input(name)[0]) for name in "XY")
    return y.shape != x.shape and (len(y.shape) == len(x.shape) or 1 in y.shape)


@functools.cache  # warn only once, although both the training and the evaluation program contain these layers
def _warn_of_depthwise(kernels, paddle_layers):
    if not paddle_layers:
        return
    if kernels == "paddle":
        logger.warn(
            "--kernels paddle: the network has depthwise convolutions, for which the custom kernels are made; use "
            "--kernels native"
        )
        return
    effect = "Paddle's NHWC kernels for such layers cannot be captured as a CUDA graph on a GPU"
    limits = "3x3 or 5x5, stride 1 or 2, no dilation, a multiple of 4 channels"
    logger.warn(
        f"depthwise convolution ({'; '.join(paddle_layers)}): not supported by the custom kernels (supported: "
        f"{limits}), and {effect}; change the layer, or use --data-layout NCHW"
    )


def fused_operators(args, compiled):
    """Compile a program before its first step, and count its fused operators.

    Args:
        args: Settings.
        compiled: result of compile_prog; the Executor reuses the compilation.
    Returns:
        {operator: count} for Paddle's fused operators (fused_...) and custom operators (native_...).
    """
    compiled._compile(static.global_scope(), processes.place(args.device))
    types = Counter(node.name() for node in compiled._graph.nodes() if node.is_op())
    return {name: count for name, count in sorted(types.items()) if name.startswith(("fused_", "native_"))}


def run(args, dataloader, exe, program, fetchs, epoch, mode=Mode.TRAIN, lr_scheduler=None):
    """Run one epoch, the rest of a resumed epoch, or a benchmark.

    The host dispatches step n and then waits for the metrics of step n-1. The host does not wait for the device
    anywhere else. In benchmark mode, the loader restarts as often as needed; the restart and the wait for the next
    batch count as data_time. The first --benchmark-warmup-steps steps are not measured. The device is idle when the
    measurement begins and when it ends.

    Args:
        args: Settings.
        dataloader: iterable that yields `[{"data": images, "label": labels}]`, such as a DALIGenericIterator. Images
            and labels are Paddle tensors or NumPy arrays with the shapes and types of create_feeds. Each iteration over
            the loader is an epoch. A loader that has no length is read to its end. All processes must have the same
            number of training batches.
        exe: static.Executor.
        program: result of compile_prog.
        fetchs: result of build.
        epoch: epoch number, for the log.
        mode: Mode.TRAIN or Mode.EVAL.
        lr_scheduler: schedule to advance after each step, or None.
    Returns:
        dict of metrics, aggregated over all processes:
        loss, top1, top5: means over images. The loss is the mean of the finite losses, or NaN if no loss is finite.
        not_finite: number of images whose loss is NaN or infinite, if there are any.
        images, steps, epoch_time (seconds), ips (images/s). If a run resumes within an epoch, steps and times cover
        only the rest of the epoch.
        data_time (waiting for the loader), compute_time, batch_time: mean seconds per step.
        loss_scale: current loss scale, only with dynamic loss scaling.
        With --benchmark, all metrics cover only the measured steps, and there are additional metrics:
        latency_{mean,p50,p90,p95,p99}_ms: time between the dispatches of consecutive steps. On a GPU, the time from the
        dispatch of a batch to its result is longer, because the host is one step ahead.
        first_step_s: seconds from the start of the program until the host has the metrics of the first step.
        With Mode.EVAL: confusion (int64 [k, 3], one row per pair that occurred, sorted, with the columns label,
        predicted class, number of images), class_top1 (float64 [C], NaN for a class without images) and, without
        --benchmark, the averages over the classes {precision,recall,f1}_{macro,weighted}.
        With --predictions or --report-html, on rank 0: predictions (float64 [images, 1 + 2 k] in the order of the data
        set, with the columns label, the k = min(5, C) most probable classes, and their probabilities).
    Raises:
        Preempted: a stop was requested, and all processes stopped before the same step.
        RunError: --max-bad-steps consecutive losses were not finite, or the parameters differ between the ranks.
        UsageError: a step of --profile-steps is outside this pass, the program is not compiled, its parameters have no
            values, or a batch does not match the program.
        RuntimeError: the loader yields fewer or more batches than its length.
    """
    _check_program(program)
    return run_and_save(args.resolved, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, save=None)


def run_and_save(args, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, save, end_step=None):
    """Like run(), but also call `save(epoch, step)` every --save-interval-steps steps, and stop before step `end_step`.
    The next call continues the epoch, and returns metrics that include the earlier steps of the epoch."""
    this = _Pass(args, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, end_step)
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


def _check_program(program):
    """Raise UsageError for a program that is not compiled, or whose parameters have no values in the scope."""
    if isinstance(program, static.Program):
        raise UsageError("run: the program is not compiled; pass the result of compile_prog")
    first = next(iter(program._program.all_parameters()), None)
    if first is not None:
        variable = static.global_scope().find_var(first.name)
        if variable is None or not variable.get_tensor()._is_initialized():
            raise UsageError(f"run: parameter {first.name} has no value; call exe.run(startup_prog) first")


# A dispatched step whose metrics have not been read yet.
_InFlight = namedtuple("_InFlight", "step images lr handles")


class _Pass:
    """One pass over a loader: an epoch, the rest of an epoch, or a benchmark. See run."""

    def __init__(self, args, loader, exe, program, fetchs, epoch, mode, lr_scheduler, end_step=None):
        self._args, self._epoch, self._mode = args, epoch, mode
        self._program, self._lr_scheduler = program, lr_scheduler
        self._meters = {name: meter for name, (_, meter) in fetchs.items()}
        self._batches_each_step = args.accumulate_steps if mode is Mode.TRAIN else 1
        variables = [variable for variable, _ in fetchs.values()]
        # Labels are checked only on a CPU, because GPU memory is unreadable after a kernel has failed.
        class_num = args.num_of_class if args.device == "cpu" else None
        options = variables, args.kernels == "native", class_num, args.dali_device == args.device
        self._dispatch = Dispatcher(exe, program, *options)
        if self._batches_each_step > 1:
            self._accumulate = Dispatcher(exe, program.accumulating, *options)
        self._loader = loader = iterators.adapted(loader, program)
        loader.write_into(self._dispatch.inputs)
        self._measured_from = args.benchmark_warmup_steps if args.benchmark else 0
        self.first_step = 0 if args.benchmark else loader.step
        if self._batches_each_step > 1 and len(loader) == iterators.UNKNOWN_LENGTH:
            raise UsageError(
                f"--accumulate-steps {args.accumulate_steps}: requires a loader with a length; implement its __len__"
            )
        self._used = durations.used_batches(len(loader), args.accumulate_steps) if mode is Mode.TRAIN else len(loader)
        self.end_step = self._measured_from + args.benchmark_steps if args.benchmark else end_step or self._used
        self._clock = StepClock()
        self._step_log = StepLog(lambda step, metrics: log_info((epoch, step), metrics, mode))
        self._in_flight = self._first_step_s = None
        self._is_stopped = False
        self._enter_phase()
        self._batches = iter(loader)
        self._trace = trace.start(program, self.first_step, self.end_step, args.resume)

    def close(self):
        """Stop the trace of a pass that ends early."""
        if self._trace is not None:
            self._trace.stop()

    def is_stopped(self, step):
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

    def is_save_due(self, step):
        interval = self._args.save_interval_steps * self._batches_each_step
        return interval > 0 and step > self.first_step and step % interval == 0

    def save(self, step, save):
        """Save a checkpoint between two steps."""
        with self._paused():
            save(self._epoch, step)

    def is_check_due(self, step):
        """Return whether to compare the ranks before a step, which is every replicas.INTERVAL_STEPS training steps of
        the run, counted over all epochs. The parameters of a benchmark are not kept, so they are not compared."""
        if processes.world_size() == 1 or self._mode is not Mode.TRAIN or self._args.benchmark:
            return False
        done = 0 if self._lr_scheduler is None else self._lr_scheduler.last_epoch  # Paddle's name for the step count
        return done > 0 and done % replicas.INTERVAL_STEPS == 0 and step % self._batches_each_step == 0

    def check_replicas(self, step):
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

    def prepare(self, step):
        """If the trace or the measurement begins at step `step`, start it."""
        if self._trace is not None:
            self._trace.before(step, self._drain, self._clock)
        # Discard the metric sums of the previous epoch or of the warm-up. A run that resumes within an epoch begins at
        # a later step, so its meters keep the sums from the checkpoint.
        if step == self._measured_from:
            self._drain()
            for meter in self._meters.values():
                meter.reset()
            self._clock.restart()

    def next_batch(self, step):
        """Return the next batch, {name: tensor}, or None at the end of a loader without a length. In a benchmark,
        restart the loader at its end."""
        watchdog.step(step, waits=True)
        batch = next(self._batches, None)
        if batch is None:
            if self.end_step == iterators.UNKNOWN_LENGTH:
                return None
            if not self._args.benchmark:
                raise RuntimeError(f"loader: ended after {step} of {self.end_step} batches; correct its length")
            self._loader.reset()
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self._clock.data_ready()
        watchdog.step(step)
        return batch[0]

    def run_step(self, step, feed):
        """Dispatch a step, then read the metrics of the previous step."""
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

    def finish(self):
        """Read the last metrics, complete the loader's epoch, reduce the metrics over all processes, and return the
        result of run."""
        args = self._args
        self._drain()
        self._clock.close_step()
        self._step_log.finish()
        if self._trace is not None:
            self._trace.before(self.end_step, self._drain, self._clock)
        if not args.benchmark and not self._is_stopped and self.end_step == self._used:
            for _ in range(len(self._loader) - self._used):
                next(self._batches)
            if next(self._batches, None) is not None:
                raise RuntimeError(f"loader: yields more batches than its length {self.end_step}; correct the length")
            self._loader.reset()
        result = _over_all_processes(self._averages(), self._clock, self._is_stopped)
        if self._mode is Mode.TRAIN and args.use_dynamic_loss_scaling:
            result["loss_scale"] = _loss_scale()
        if "confusion" in self._meters:
            result.update(_confusion_over_all_processes(self._meters["confusion"]))
            if not args.benchmark:
                result.update(average_metrics(result["confusion"], args.num_of_class))
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
        """Wait for the metrics of the last dispatched step, unless they have already been read. Log step metrics every
        --print-interval steps."""
        if self._in_flight is None:
            return
        (step, images, lr, handles), self._in_flight = self._in_flight, None
        for meter, handle in zip(self._meters.values(), handles, strict=True):
            meter.update(np.asarray(handle), images)
        self._first_step_s = self._first_step_s or logger.elapsed_s()
        if self._mode is Mode.TRAIN:
            _check_losses(self._args, self._meters["loss"], self._epoch, step, lr)
        if step % self._args.print_interval == 0 and step >= self._measured_from:
            metrics = {name: meter.value for name, meter in self._averages().items()}
            metrics.update(self._clock.since_last_log())
            self._step_log.add(step, images, metrics, {} if lr is None else {"lr": lr})
        if progress.is_due():
            self._show_progress(step + 1, images, lr)

    def _show_progress(self, step, images, lr):
        """Display the mean metrics of this pass and the current speed."""
        data_time, batch_time = self._clock.recent()
        means = {name: meter.mean() for name, meter in self._averages().items()}
        fields = [f"loss {means['loss']:.3f}", f"top1 {means['top1']:.3f}", f"{images / batch_time:,.0f} images/s"]
        if lr is not None:
            fields.append(f"lr {lr:.2g}")
        more = [f"waiting for data {data_time / batch_time:.0%}"]
        if self._args.device == "gpu":
            gib = paddle.device.cuda.max_memory_allocated(processes.local_gpu()) / 2**30
            more.append(f"GPU memory {gib:.1f} GiB")
        steps_left = self.end_step - step
        run_left_s = None
        if self._lr_scheduler is not None and not self._args.benchmark:
            timeline = self._lr_scheduler.timeline
            total = durations.total_steps(self._args.run.part(durations.Settings), timeline) * self._batches_each_step
            run_left_s = (total - timeline.batches_before(self._epoch) - step) * batch_time
        progress.show(step, self.end_step, steps_left * batch_time, run_left_s, fields, more)

    def _drain(self):
        """Wait until the device is idle. Reading the metrics is not enough, because they are available before the step
        ends."""
        self._read()
        if self._args.device == "gpu":
            paddle.device.cuda.synchronize(processes.place(self._args.device))


def log_info(step, metrics, mode):
    """Log the metrics of a step, an epoch or a run.

    Args:
        step: (epoch, step), (epoch,) or ().
        metrics: {name: value}. In the report, the metric NAME is called "train.NAME" or "val.NAME". Arrays are not
            logged, because report.py writes them to files.
        mode: Mode.TRAIN or Mode.EVAL.
    """
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, np.ndarray)}
    logger.log(step, {f"{mode.value}.{name}": value for name, value in numbers.items()})


def _check_losses(args, loss, epoch, step, lr):
    """Raise RunError after --max-bad-steps consecutive losses that are infinite or NaN.

    If a loss is not finite, dynamic loss scaling skips the step and lowers the loss scale, to a minimum of 1. Skipped
    steps do not count towards --max-bad-steps while the loss scale is above 1. The loss scale is read only after a loss
    that is not finite, because reading the loss scale waits for the device.
    """
    if loss.bad_updates and args.use_dynamic_loss_scaling and _loss_scale() > 1:
        loss.excuse_update()
    if loss.bad_updates >= args.max_bad_steps:
        raise RunError(
            f"--max-bad-steps {args.max_bad_steps}: {loss.bad_updates} consecutive losses were not finite, up to step "
            f"{step} of epoch {epoch} with learning rate {lr}; resume from the last checkpoint with a lower --lr, or "
            "check the images"
        )


def _loss_scale():
    return np.asarray(static.global_scope().find_var(LOSS_SCALE).get_tensor()).item()


def _over_all_processes(meters, clock, stopped):
    """Return metrics and times, aggregated over all processes on the host in float64. Each process returns the same
    values."""
    watchdog.phase("metric reduction")
    loss = meters["loss"]
    own = {}
    for name, meter in meters.items():
        own |= {(name, "sum"): meter.sum, (name, "finite"): meter.count - meter.not_finite}
    own |= {"images": loss.count, "not_finite": loss.not_finite, "timed_images": clock.images, "stopped": stopped}
    own |= {"steps": len(clock.batch_times), "time": sum(clock.batch_times), "data_time": sum(clock.data_times)}
    all_ranks = exchange.all_gather(list(own.values()))
    sums = dict(zip(own, all_ranks.sum(axis=0), strict=True))
    largest = dict(zip(own, all_ranks.max(axis=0), strict=True))  # maximum, since a process without images has 0 steps
    if sums["stopped"]:
        raise Preempted
    result = {name: mean(sums[name, "sum"], sums[name, "finite"]) for name in meters}
    result.update(
        images=int(sums["images"]),
        steps=int(largest["steps"]),
        epoch_time=largest["time"],
        ips=sums["timed_images"] / largest["time"],
        data_time=sums["data_time"] / sums["steps"],
        compute_time=(sums["time"] - sums["data_time"]) / sums["steps"],
        batch_time=sums["time"] / sums["steps"],
    )
    if sums["not_finite"]:
        result["not_finite"] = int(sums["not_finite"])
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in result.items()}


def _confusion_over_all_processes(meter):
    """Return the confusion counts, summed over all processes, and top1 per class. Processes exchange only positive
    counts, at most two numbers per image."""
    codes, counts = meter.counts()
    longest = int(exchange.all_gather([len(codes)]).max())
    padding = (0, longest - len(codes))
    all_ranks = exchange.all_gather([*np.pad(codes, padding), *np.pad(counts, padding)]).astype(np.int64)
    codes, places = np.unique(all_ranks[:, :longest], return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, places.reshape(-1), all_ranks[:, longest:].reshape(-1))
    confusion = np.column_stack([*divmod(codes, meter.class_num), counts])[counts > 0]  # remove the padding
    metrics = class_metrics(confusion, meter.class_num)
    return {"confusion": confusion, "class_top1": np.where(metrics["images"] > 0, metrics["recall"], np.nan)}


def _predictions_on_rank_0(labels, rows):
    """On rank 0, return {"predictions": those of all processes}; on all other ranks, return {}. Shards are assigned in
    rank order, so the predictions are in the order of the data set."""
    own = np.column_stack([labels, rows])
    all_ranks = exchange.gather(own.tobytes())
    if all_ranks is None:
        return {}
    return {"predictions": np.frombuffer(b"".join(all_ranks)).reshape(-1, own.shape[1])}


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
