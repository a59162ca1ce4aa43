"""Build the training and evaluation programs."""

import contextlib
import functools
import io

import numpy as np
import paddle
from paddle import static
from paddle.incubate import asp

from paddle_resnet.checkpoints.variables import MASTER
from paddle_resnet.components import UPDATE, optimizer
from paddle_resnet.job import processes, watchdog
from paddle_resnet.models import build_model, layers, logits, loss_head, mixing, parts
from paddle_resnet.optimizers import amp, sparsity, table
from paddle_resnet.optimizers.schedules import build_lr_scheduler
from paddle_resnet.passes import all_reduces, quantization
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
    schedule = lr_scheduler if is_train else None
    step, optimizer = StepBuilder(args, main_prog, startup_prog, schedule, processes.rank()), None
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
    """Add the backward pass and the update to a training program, and return the optimizer."""
    own_optimizer = table.build_optimizer(args, step.schedule)
    optimizer = wrap_optimizer(args, own_optimizer)
    if step.frozen:
        parts.stop_gradients(step.main)
    if args.asp:
        sparsity.exclude_classifier(step.main, step.model)
    with contextlib.redirect_stdout(io.StringIO()):  # Fleet prints the names of its optimizers
        optimizer.minimize(loss, step.startup)
    # Also create the optimizer state of frozen parameters, so that --freeze does not change which variables a
    # checkpoint contains.
    own_optimizer._create_accumulators(step.main.global_block(), step.frozen)
    if args.asp:
        sparsity.add_masks(step.main, step.startup, step.frozen)
    add_update(step)
    all_reduces.adapt_communication(step.main, step.startup, step.device)
    return optimizer


def add_update(step):
    """Turn the operators that Paddle's minimize has added into the update of the flags."""
    step.describe_update(MASTER, sparsity.MASK, all_reduces.bn_statistics(step.main))
    known = facts.of(step.main)
    known.optimizer = step.part(optimizer.Settings).optimizer
    known.inputs[step.schedule._var_name] = step.schedule
    if rewrite := table.OPTIMIZERS[known.optimizer].rewrite:
        rewrite(step)
    for component in UPDATE:
        component.add(step)


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
