"""Build the training and evaluation programs."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet import graph
from paddle_resnet.checkpoints.variables import MASTER
from paddle_resnet.components import (
    INPUTS,
    UPDATE,
    accumulation,
    distillation,
    optimizer,
    precision,
    quantization,
    sparsity,
    task,
)
from paddle_resnet.job import processes, watchdog
from paddle_resnet.models import build_model, logits, loss_head, parts
from paddle_resnet.optimizers import schedules, table
from paddle_resnet.passes import all_reduces
from paddle_resnet.settings import durations
from paddle_resnet.step import facts, host_metrics
from paddle_resnet.step.builder import StepBuilder
from paddle_resnet.tasks import Task
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


@dataclass(frozen=True)
class Options:
    """The flags that this module reads; see `train.py --help all`."""

    amp: bool
    amp_dtype: str
    bn_momentum: float | None
    dali_output_fp16: bool
    data_layout: str
    freeze: list[str] | None
    image_shape: list[int]
    label_smoothing: float
    model_arch_name: str
    num_of_class: int
    predictions: str | None
    report_html: str | None
    tta: str


def feeds_of(image_shape: Sequence[int], task: Task) -> dict[str, static.Variable]:
    """Declare the inputs of the current program, and return {name: variable}. See program.create_feeds."""
    shape, dtype = task.label
    return {
        "data": static.data("data", [None, *image_shape], dtype=paddle.get_default_dtype()),
        "label": static.data("label", [None, *shape], dtype=dtype),
    }


def wrap_optimizer(part: Callable, optimizer: Any) -> Any:
    """Wrap an optimizer for the current program. See program.dist_optimizer; for `part`, see StepBuilder."""
    float32 = quantization.float32_variables(static.default_main_program())
    optimizer = precision.wrap(optimizer, part(precision.Settings), float32)
    optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)
    return sparsity.wrap(optimizer, part(sparsity.Settings))


def build_program(
    part: Callable,
    main_prog: static.Program,
    startup_prog: static.Program,
    step_each_epoch: int,
    mode: Mode,
    lr_scheduler: schedules.Schedule | None,
    class_images: Sequence[int] | np.ndarray | None,
    teacher: distillation.Teacher | None,
) -> tuple:
    """Build a program. See program.build; for `part`, see StepBuilder."""
    watchdog.phase("program construction")
    is_train, options = mode is Mode.TRAIN, part(Options)
    channels, height, width = options.image_shape
    image_shape = [channels, height, width] if options.data_layout == "NCHW" else [height, width, channels]
    if is_train and lr_scheduler is None:
        timeline = durations.uniform(part(accumulation.Settings).accumulate_steps, step_each_epoch)
        lr_scheduler = schedules.build_lr_scheduler(part(schedules.Options), timeline)
    schedule = lr_scheduler if is_train else None
    step, optimizer = StepBuilder(part, main_prog, startup_prog, schedule, processes.rank()), None
    step.task = part(task.Settings).task(options.num_of_class)
    with static.program_guard(main_prog, startup_prog), unique_name.guard():
        with _default_dtype("float16" if options.dali_output_fp16 else "float32"):
            feeds = feeds_of(image_shape, step.task)
        network = options.model_arch_name, options.num_of_class
        step.model = model = build_model(*network, channels, options.data_layout)
        if is_train:
            _set_up_layers(step, options.bn_momentum, options.freeze)
        else:
            model.eval()
        step.images, step.targets, step.class_images = feeds["data"], feeds, class_images
        if options.dali_output_fp16 and not (options.amp and options.amp_dtype == "float16"):
            # Without AMP in float16, the layers read float32 images. AMP in bfloat16 casts the images later, because
            # Paddle's layers reject bfloat16.
            step.images = step.images.astype("float32")
        if is_train:
            step.teacher = teacher
            for component in INPUTS:
                if hasattr(component, "add"):
                    component.add(step)
        elif options.tta == "flip":
            axis = 3 if options.data_layout == "NCHW" else 2
            step.images = paddle.concat([step.images, paddle.flip(step.images, [axis])])
        first = len(graph.block(main_prog).ops)
        out = logits(model, step.images, *network)
        quantization.add(step, first)
        if not is_train and options.tta == "flip":
            out = step.task.mean_over_mirrored(out)
        lists_images = options.predictions is not None or options.report_html is not None
        fetchs = step.task.add_head(out, step.targets, options.label_smoothing, mode, lists_images)
        if is_train:
            step.logits, step.loss = out, fetchs["loss"][0]
            for component in INPUTS:
                if hasattr(component, "add_loss"):
                    with loss_head.scope():  # AMP keeps these operators in float32
                        component.add_loss(step)
            fetchs["loss"] = step.loss, fetchs["loss"][1]
            optimizer = _minimize(step)
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


def _minimize(step):
    """Add the backward pass and the update to a training program, and return the optimizer."""
    own_optimizer = table.build_optimizer(step.part(optimizer.Settings), step.schedule)
    is_legacy = graph.is_legacy(step.main)
    wrapped = wrap_optimizer(step.part, own_optimizer) if is_legacy else own_optimizer  # Fleet does not support PIR
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
        UsageError: two flags add averages of the weights, or `add` of a component raises this error.
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
