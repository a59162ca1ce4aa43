"""Build the training and evaluation programs."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet import graph
from paddle_resnet.checkpoints import teachers
from paddle_resnet.checkpoints.variables import MASTER
from paddle_resnet.components import (
    INPUTS,
    UPDATE,
    distillation,
    multi_label,
    optimizer,
    precision,
    quantization,
    sparsity,
)
from paddle_resnet.job import processes, watchdog
from paddle_resnet.models import build_model, logits, loss_head, multi_label_head, parts
from paddle_resnet.optimizers import table
from paddle_resnet.optimizers.schedules import Schedule, build_lr_scheduler
from paddle_resnet.passes import all_reduces
from paddle_resnet.settings import durations, values
from paddle_resnet.step import facts, host_metrics
from paddle_resnet.step.builder import StepBuilder
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.label_metrics import ScoreMeter
from paddle_resnet.utils.meters import AverageMeter, ConfidenceMeter, ConfusionMeter, TopMeter
from paddle_resnet.utils.mode import Mode


def feeds_of(image_shape: Sequence[int], multi_label_classes: int | None = None) -> dict[str, static.Variable]:
    """Declare the inputs of the current program. See program.create_feeds."""
    label = ([1], "int64") if multi_label_classes is None else ([multi_label_classes], "float32")
    return {
        "data": static.data("data", [None, *image_shape], dtype=paddle.get_default_dtype()),
        "label": static.data("label", [None, *label[0]], dtype=label[1]),
    }


def fetchs_of(
    out: static.Variable, targets: dict[str, static.Variable], class_num: int, label_smoothing: float, mode: Mode
) -> dict:
    """Add the loss and the accuracy to the current program. See program.create_fetchs."""
    is_native = facts.of(static.default_main_program()).backend == "native"
    add = loss_head.add_native if is_native else loss_head.add_paddle
    head = add(out, targets, class_num, label_smoothing, mode is Mode.TRAIN)
    meters = {"confusion": ConfusionMeter(class_num), "of_softmax": ConfidenceMeter()}
    return {
        name: (variable, meters.get(name) or AverageMeter(name, is_ratio=name != "loss"))
        for name, variable in head.items()
    }


def multi_label_fetchs(
    out: static.Variable,
    targets: dict,
    class_num: int,
    label_smoothing: float,
    asymmetric: list[float] | None,
    mode: Mode,
) -> dict:
    """Add the loss of --multi-label to the current program. Like fetchs_of, return {name: (variable, meter)}."""
    head = multi_label_head.add(out, targets, label_smoothing, asymmetric, mode is Mode.TRAIN)
    meters = {"loss": AverageMeter("loss"), "scores": ScoreMeter(class_num)}
    return {name: (variable, meters[name]) for name, variable in head.items()}


def wrap_optimizer(args: values.Settings, optimizer: Any) -> Any:
    """Wrap an optimizer for the current program. See program.dist_optimizer."""
    float32 = quantization.float32_variables(static.default_main_program())
    optimizer = precision.wrap(optimizer, args.part(precision.Settings), float32)
    optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)
    return sparsity.wrap(optimizer, args.part(sparsity.Settings))


def build_program(
    args: values.Settings,
    main_prog: static.Program,
    startup_prog: static.Program,
    step_each_epoch: int,
    mode: Mode,
    lr_scheduler: Schedule | None,
    class_images: Sequence[int] | np.ndarray | None,
) -> tuple:
    """Build a program. See program.build."""
    watchdog.phase("program construction")
    is_train = mode is Mode.TRAIN
    channels, height, width = args.image_shape
    image_shape = [channels, height, width] if args.data_layout == "NCHW" else [height, width, channels]
    if is_train and lr_scheduler is None:
        lr_scheduler = build_lr_scheduler(args, durations.uniform(args.accumulate_steps, step_each_epoch))
    schedule = lr_scheduler if is_train else None
    step, optimizer = StepBuilder(args, main_prog, startup_prog, schedule, processes.rank()), None
    with static.program_guard(main_prog, startup_prog), unique_name.guard():
        with _default_dtype("float16" if args.dali_output_fp16 else "float32"):
            feeds = feeds_of(image_shape, args.num_of_class if args.multi_label else None)
        step.model = model = build_model(args.model_arch_name, args.num_of_class, channels, args.data_layout)
        if is_train:
            _set_up_layers(step, args.bn_momentum, args.freeze)
        else:
            model.eval()
        step.images, step.targets, step.class_images = feeds["data"], feeds, class_images
        if args.dali_output_fp16 and not (args.amp and args.amp_dtype == "float16"):
            # Without AMP in float16, the layers read float32 images. AMP in bfloat16 casts them later, because Paddle's
            # layers reject bfloat16.
            step.images = step.images.astype("float32")
        if is_train:
            step.teacher = teachers.find(args.run.as_dict())  # --sizes changes the image shape of a stage
            for component in INPUTS:
                if hasattr(component, "add"):
                    component.add(step)
        elif args.tta == "flip":
            axis = 3 if args.data_layout == "NCHW" else 2
            step.images = paddle.concat([step.images, paddle.flip(step.images, [axis])])
        first = len(graph.block(main_prog).ops)
        out = logits(model, step.images, args.model_arch_name, args.num_of_class)
        quantization.add(step, first)
        if not is_train and args.tta == "flip":
            out = (multi_label_head if args.multi_label else loss_head).mean_over_mirrored(out)
        if args.multi_label:
            options = args.label_smoothing, args.part(multi_label.Settings).asymmetric_loss
            fetchs = multi_label_fetchs(out, step.targets, args.num_of_class, *options, mode)
        else:
            fetchs = fetchs_of(out, step.targets, args.num_of_class, args.label_smoothing, mode)
        if not (is_train or args.multi_label) and (args.predictions is not None or args.report_html is not None):
            fetchs["logits"] = loss_head.add_logits(out), TopMeter(min(5, args.num_of_class))
        if is_train:
            step.logits, step.loss = out, fetchs["loss"][0]
            for component in INPUTS:
                if hasattr(component, "add_loss"):
                    with loss_head.scope():  # AMP keeps these operators in float32
                        component.add_loss(step)
            fetchs["loss"] = step.loss, fetchs["loss"][1]
            optimizer = _minimize(args, step)
        if step.is_native:
            with loss_head.scope():  # AMP must not change the precision of the metrics
                host_metrics.add_copy(variable for variable, _ in fetchs.values())
    return fetchs, lr_scheduler, feeds, optimizer


def _set_up_layers(step, bn_momentum, frozen):
    """Apply --bn-momentum and --freeze to the layers of the network."""
    if bn_momentum is not None:
        parts.set_bn_momentum(step.model, bn_momentum)
    if frozen:
        step.frozen = parts.freeze(step.model, frozen)


def _minimize(args, step):
    """Add the backward pass and the update to a training program, and return the optimizer."""
    own_optimizer = table.build_optimizer(step.part(optimizer.Settings), step.schedule)
    is_legacy = graph.is_legacy(step.main)
    wrapped = wrap_optimizer(args, own_optimizer) if is_legacy else own_optimizer  # Fleet does not support PIR
    if step.frozen and is_legacy:
        parts.stop_gradients(step.main)
    sparsity.prepare(step)
    graph.minimize(wrapped, step.loss, step.startup)
    # Also create the optimizer state of frozen parameters, so that --freeze does not change which variables a
    # checkpoint contains.
    graph.create_state(own_optimizer, step.main, step.frozen)
    distillation.convert(step)
    sparsity.add(step)
    add_update(step)
    all_reduces.adapt_communication(step.main, step.startup, step.device)
    return wrapped


def add_update(step: StepBuilder) -> None:
    """Turn the operators that Paddle's minimize has added into the update that the flags specify.

    Raises:
        UsageError: two flags add averages of the weights, or a component fails.
    """
    step.describe_update(MASTER, all_reduces.bn_statistics(step.main))
    known = facts.of(step.main)
    known.optimizer = step.part(optimizer.Settings).optimizer
    known.inputs[step.schedule._var_name] = step.schedule
    for component in UPDATE:
        component.add(step)
    states = [component.state(step) for component in UPDATE if hasattr(component, "state")]
    known.states = [state for state in states if state is not None]
    averages = [state.flag for state in known.states if state.file == facts.AVERAGES]
    if len(averages) > 1:
        raise UsageError(f"{averages[1]}: evaluations cannot use two averages of the weights; remove {averages[0]}")


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(previous)
