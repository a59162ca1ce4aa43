"""Build the training and evaluation programs."""

import contextlib
import functools
import io

import numpy as np
import paddle
from paddle import static
from paddle.incubate import asp

from paddle_resnet.checkpoints.variables import MASTER
from paddle_resnet.job import watchdog
from paddle_resnet.models import build_model, layers, logits, loss_head, mixing, parts
from paddle_resnet.optimizers import amp, sparsity, table
from paddle_resnet.optimizers.schedules import build_lr_scheduler
from paddle_resnet.passes import accumulation, all_reduces, averages, lookahead, quantization, updates
from paddle_resnet.settings import durations
from paddle_resnet.step import facts, host_metrics
from paddle_resnet.step.builder import StepBuilder
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.meters import AverageMeter, ConfusionMeter, TopMeter
from paddle_resnet.utils.mode import Mode


def feeds_of(image_shape):
    """Declare the inputs of the current program. See program.create_feeds."""
    return {
        "data": static.data("data", [None, *image_shape], dtype=paddle.get_default_dtype()),
        "label": static.data("label", [None, 1], dtype="int64"),
    }


def fetchs_of(out, targets, class_num, label_smoothing, mode):
    """Add the loss and the accuracy to the current program. See program.create_fetchs."""
    is_native = facts.of(static.default_main_program()).backend == "native"
    add = loss_head.add_native if is_native else loss_head.add_paddle
    head = add(out, targets, class_num, label_smoothing, mode is Mode.TRAIN)
    return {
        name: (
            variable,
            ConfusionMeter(class_num) if name == "confusion" else AverageMeter(name, is_ratio=name != "loss"),
        )
        for name, variable in head.items()
    }


def wrap_optimizer(args, optimizer):
    """Wrap an optimizer for the current program. See program.dist_optimizer."""
    if args.amp:
        scaling = args.scale_loss, args.use_dynamic_loss_scaling
        float32 = quantization.float32_variables(static.default_main_program())
        optimizer = amp.decorate(optimizer, args.amp_dtype, args.amp_level, *scaling, float32)
    optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)
    return asp.decorate(optimizer) if args.asp else optimizer


def build_program(args, main_prog, startup_prog, step_each_epoch, mode, lr_scheduler, class_images):
    """Build a program. See program.build."""
    watchdog.phase("program construction")
    is_train = mode is Mode.TRAIN
    channels, height, width = args.image_shape
    image_shape = [channels, height, width] if args.data_layout == "NCHW" else [height, width, channels]
    if is_train and lr_scheduler is None:
        lr_scheduler = build_lr_scheduler(args, durations.uniform(args, step_each_epoch))
    step, optimizer = StepBuilder(args, main_prog, startup_prog, lr_scheduler if is_train else None), None
    with static.program_guard(main_prog, startup_prog), paddle.utils.unique_name.guard():
        with _default_dtype("float16" if args.dali_output_fp16 else "float32"):
            feeds = feeds_of(image_shape)
        step.model = model = build_model(args.model_arch_name, args.num_of_class, channels, args.data_layout)
        if is_train:
            _set_up_layers(args, step)
        else:
            model.eval()
        images, targets = feeds["data"], feeds
        if args.dali_output_fp16 and not (args.amp and args.amp_dtype == "float16"):
            images = images.astype("float32")  # Paddle's layers reject bfloat16, so AMP casts the images later
        if is_train:
            images, weights = _mix(args, step, images, feeds["label"])
            targets = _weigh_images(args, step, feeds | weights, class_images)
            _drop_out(args, step)
            _drop_paths(args, step)
        elif args.tta == "flip":
            images = paddle.concat([images, paddle.flip(images, [3 if args.data_layout == "NCHW" else 2])])
        first = len(main_prog.global_block().ops)
        out = logits(model, images, args.model_arch_name, args.num_of_class)
        if args.qat:
            quantization.insert(main_prog, first, step.schedule, step.device == "gpu")
        if not is_train and args.tta == "flip":
            out = loss_head.mean_over_mirrored(out)
        fetchs = fetchs_of(out, targets, args.num_of_class, args.label_smoothing, mode)
        if not is_train and (args.predictions is not None or args.report_html is not None):
            fetchs["logits"] = loss_head.add_logits(out), TopMeter(min(5, args.num_of_class))
        if is_train:
            optimizer = _minimize(args, step, fetchs["loss"][0])
        if step.is_native:
            with loss_head.scope():  # AMP must not change the precision of the metrics
                host_metrics.add_copy(variable for variable, _ in fetchs.values())
    return fetchs, lr_scheduler, feeds, optimizer


def _set_up_layers(args, step):
    """Apply --bn-momentum and --freeze to the network."""
    if args.bn_momentum is not None:
        parts.set_bn_momentum(step.model, args.bn_momentum)
    if args.freeze:
        step.frozen = parts.freeze(step.model, args.freeze)


def _minimize(args, step, loss):
    """Add the backward pass and the parameter update to a training program, and return the optimizer."""
    main_prog, startup_prog, model, frozen = step.main, step.startup, step.model, step.frozen
    lr_scheduler, is_native = step.schedule, step.is_native
    own_optimizer = table.build_optimizer(args, lr_scheduler)
    optimizer = wrap_optimizer(args, own_optimizer)
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
    facts.of(main_prog).inputs[lr_scheduler._var_name] = lr_scheduler
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
    all_reduces.adapt_communication(main_prog, startup_prog, step.device)
    return optimizer


def _mix(args, step, images, label):
    """If a flag in mixing.KINDS is set, return (mixed images, {"weights": target weights}), otherwise (images, {})."""
    alphas = {kind: alpha for kind in mixing.KINDS if (alpha := getattr(args, kind))}
    if not alphas:
        return images, {}
    if args.batch_size < 2:
        raise UsageError(f"--{next(iter(alphas))}: requires at least two images per batch; use --batch-size 2 or more")
    _, height, width = args.image_shape

    @functools.lru_cache(1)  # rows, columns and fraction must come from the same draw
    def draw(batch):
        return mixing.draw(step.generator("mix"), alphas, height, width)

    def declare(name, shape):
        return step.declare(f"mix.{name}", lambda: getattr(draw(step.schedule.batches), name), shape)

    is_nchw = args.data_layout == "NCHW"
    rows = declare("rows", [1, 1, height, 1] if is_nchw else [1, height, 1, 1])
    columns = declare("columns", [1, 1, 1, width] if is_nchw else [1, 1, width, 1])
    mixed = mixing.mix_images(images, rows, columns)
    return mixed, {"weights": mixing.mix_labels(label, declare("fraction", [1]), args.num_of_class)}


def _weigh_images(args, step, targets, class_images):
    """Return the targets for loss_head.add. With --class-weights balanced, the targets include image weights."""
    if args.class_weights == "none":
        return targets
    if class_images is None:
        raise UsageError("--class-weights balanced: requires class_images; pass the loader's class_images to build")
    images = np.zeros(args.num_of_class, np.int64)
    images[: len(class_images)] = class_images
    weights = loss_head.balanced_weights(images)
    variable = step.declare("class_weights", lambda: weights, [1, args.num_of_class])
    return targets | {"image_weights": loss_head.weigh_images(targets, variable, args.num_of_class)}


def _drop_out(args, step):
    """Insert dropout (--dropout) before the last layer of a network."""
    if not args.dropout:
        return
    seed = step.declare_seed("dropout")
    step.model.last.register_forward_pre_hook(lambda _, inputs: layers.dropout(inputs[0], args.dropout, seed))


def _drop_paths(args, step):
    """Set the rates (--drop-path) and seeds of a network's DropPath layers. The rate increases linearly with depth."""
    if not args.drop_path:
        return
    paths = [layer for layer in step.model.sublayers() if isinstance(layer, layers.DropPath)]
    if not paths:
        raise UsageError(
            f"--drop-path {args.drop_path:g}: --model-arch-name {args.model_arch_name} has no layers.DropPath "
            "in its residual blocks; remove --drop-path"
        )
    for i, path in enumerate(paths, 1):
        path.rate, path.seed = args.drop_path * i / len(paths), step.declare_seed(f"drop_path.{i}")


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
