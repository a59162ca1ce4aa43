"""The functions with fixed signatures: build and compile the static-graph programs, and run them epoch by epoch. The
modules in step/ implement these functions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import static

from paddle_resnet import resolution
from paddle_resnet.checkpoints import teachers
from paddle_resnet.job import fleet
from paddle_resnet.machine import compat, cpu
from paddle_resnet.settings import values
from paddle_resnet.step import build as building
from paddle_resnet.step import compile as compilation
from paddle_resnet.step import loop
from paddle_resnet.step.metrics import log_metrics
from paddle_resnet.tasks import TASKS, SingleLabel
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from paddle_resnet.optimizers.schedules import Schedule
    from paddle_resnet.utils.label_metrics import ScoreMeter
    from paddle_resnet.utils.meters import AverageMeter, ConfusionMeter

    Fetchs = Mapping[str, tuple[static.Variable, AverageMeter | ConfusionMeter | ScoreMeter]]

_started_with = None  # settings passed to the last call of start_fleet()


def start(args: values.Settings, mode: Mode = Mode.TRAIN) -> values.Settings:
    """Resolve the settings and start Fleet, unless Fleet is already running with these settings.

    build and dist_optimizer call start(), so a custom program does not need to call it. train.py starts Fleet itself
    before it builds a program (phases.Run.prepare), so that start() only returns the settings.

    Returns:
        Settings, resolved and frozen; see resolution.resolve.
    Raises:
        the errors of compat.check_version, compat.use_pir, fleet.connect, resolution.resolve and fleet.start.
    """
    if _started_with is not None and _started_with in (args.resolved, args.run):
        return args.resolved
    compat.check_version()
    if args.program_representation == "pir":
        compat.use_pir()
    paddle.enable_static()
    fleet.connect(args.comm_timeout_s)
    args = resolution.resolve(args, mode)
    start_fleet(args)
    return args


def start_fleet(args: values.Settings) -> None:
    """Start Fleet. Call start_fleet() after all flags are resolved and before a program is built. Raises the errors of
    fleet.start."""
    global _started_with
    _started_with = args
    if args.device == "cpu":
        cpu.keep_freed_memory()
    needs_serial_run = args.cuda_graph or args.profile_steps is not None
    fleet.start(args.seed, args.device, args.data_layout, args.kernels, needs_serial_run)


def create_feeds(image_shape: Sequence[int], multi_label_classes: int | None = None) -> dict[str, static.Variable]:
    """Declare the inputs of the current program.

    Args:
        image_shape: shape of one image in the loader's layout, [C, H, W] or [H, W, C].
        multi_label_classes: number of classes of a multi-label network (--multi-label), or None.
    Returns:
        {"data": [N, *image_shape] in Paddle's default dtype, "label": [N, 1] int64, or [N, multi_label_classes] float32
        with 1 for each class of the image and 0 for all others}.
    """
    multi_label = multi_label_classes is not None
    return building.feeds_of(image_shape, TASKS[multi_label](multi_label_classes or 0))


def create_fetchs(
    out: static.Variable,
    feeds: dict[str, static.Variable],
    class_num: int,
    label_smoothing: float = 0,
    mode: Mode = Mode.TRAIN,
) -> "Fetchs":
    """Add the loss and the accuracy to the current program.

    Args:
        out: logits [N, class_num].
        feeds: result of create_feeds. An optional entry "weights" (float32 [N, class_num], each row sums to 1) replaces
            the labels in the loss. For "image_weights", see loss_head.add_paddle.
        class_num: number of classes.
        label_smoothing: fraction of the target probability to spread evenly over all classes, in training only (Szegedy
            et al., arXiv:1512.00567, section 7).
        mode: in Mode.TRAIN, the loss is the mean over the batch. In Mode.EVAL, the loss has one value per image [N, 1],
            so that the host can sum all losses in float64.
    Returns:
        {"loss", "top1", "top5": (variable, AverageMeter)}; if there are only C < 5 classes, top5 is the top-C accuracy.
        Mode.EVAL adds "confusion": (label and predicted class of each image [N, 2] int64, ConfusionMeter) and
        "of_softmax": (see loss_head.add_paddle; ConfidenceMeter).
    """
    return SingleLabel(class_num).add_head(out, feeds, label_smoothing, mode)


def create_strategy(args: values.Settings, is_train: bool = True) -> tuple[static.BuildStrategy, None]:  # pyright: ignore[reportInvalidTypeForm]
    """Return the compilation options for a program.

    Args:
        args: Settings.
        is_train: whether to enable, on a GPU, the fused operators for training.
    Returns:
        (BuildStrategy, None). The second element is None, because Paddle 2.5 and newer do not accept an
        ExecutionStrategy.
    Raises:
        UsageError: --device is still auto.
    """
    return compilation.build_strategy(args.resolved.part(compilation.Options), is_train), None


def dist_optimizer(args: values.Settings, optimizer: paddle.optimizer.Optimizer) -> Any:
    """Return an optimizer that wraps `optimizer` for mixed precision (--amp), data parallelism and sparsity (--asp).
    Raises the errors of start().

    The wrappers work together only in this order: AMP, Fleet, ASP. If AMP and ASP are enabled through Fleet's strategy
    flags instead, gradients are not reduced or the program remains in float32.
    """
    return building.wrap_optimizer(start(args).part, optimizer)


def build(
    args: values.Settings,
    main_prog: static.Program,
    startup_prog: static.Program,
    step_each_epoch: int,
    is_train: bool = True,
    lr_scheduler: "Schedule | None" = None,
    class_images: np.ndarray | None = None,
) -> tuple["Fetchs", "Schedule | None", dict[str, static.Variable], Any]:
    """Build the training or evaluation program. Parameters have the same names in both programs, so programs that run
    in the same scope share the parameter values.

    Args:
        args: Settings; not modified. If the settings are not frozen, build uses the result of start(), in which flags
            that depend on the machine or the data, such as the number of classes in --image-root, are resolved.
        main_prog: empty static.Program to fill.
        startup_prog: static.Program to fill. Do not run the startup program of an evaluation program that shares the
            parameters of a training program.
        step_each_epoch: training batches per epoch, for the learning rate; ignored if lr_scheduler is set, and in
            evaluation.
        is_train: whether to build the training program, which includes the backward pass and the optimizer, or the
            evaluation program.
        lr_scheduler: schedule to share between training programs; if None, build creates a schedule.
        class_images: number of training images of each class, from the loader; required by --class-weights balanced.
    Returns:
        (fetchs, lr_scheduler, feeds, optimizer). For evaluation, optimizer is None, and lr_scheduler is the argument.
    Raises:
        the errors of start() and teachers.find.
        UsageError: a flag cannot be applied to this network or to the training data, for example --freeze or
            --warmup-start-lr.
    """
    mode = Mode.TRAIN if is_train else Mode.EVAL
    settings = start(args, mode)
    # The teacher depends on the flags of the run, because --sizes changes the image shape of a stage.
    teacher = teachers.find(settings.run.as_dict()) if is_train else None
    return building.build_program(
        settings.part, main_prog, startup_prog, step_each_epoch, mode, lr_scheduler, class_images, teacher
    )


def compile_prog(
    args: values.Settings, program: static.Program, loss_name: str | None = None, is_train: bool = True
) -> compilation.CompiledStep | compilation.PirStep:
    """Copy a program, fuse operators in the copy, and compile the copy for the Executor.

    Args:
        args: Settings.
        program: the main_prog that build has filled; not modified.
        loss_name: ignored; Paddle 2.5 and newer do not need it.
        is_train: whether this is the training program.
    Returns:
        step.compile.CompiledStep, which is a static.CompiledProgram; for a PIR program, step.compile.PirStep.
    Raises:
        UsageError: create_strategy fails; --cuda-graph true is explicit, but an operator cannot be captured; or the
            program was not built by build, and --optimizer or a regularizer cannot be used with it.
    """
    return compilation.compile_step(args.resolved.part(compilation.Options), program, is_train)


def run(
    args: values.Settings,
    dataloader: Iterable[list[dict[str, Any]]],
    exe: static.Executor,
    program: static.CompiledProgram,
    fetchs: "Fetchs",
    epoch: int,
    mode: Mode = Mode.TRAIN,
    lr_scheduler: "Schedule | None" = None,
) -> dict[str, Any]:
    """Run one epoch, the rest of a resumed epoch, or a benchmark. Return the metrics that loop.run_and_save lists.

    The host dispatches step n and then waits for the metrics of step n-1. With Paddle's kernels on a GPU, dispatching a
    step includes waiting for its metrics (step/host_metrics.py). In benchmark mode, the loader restarts as often as
    needed; the restart and the wait for the next batch count as data_time. The first --benchmark-warmup-steps steps are
    not measured. The device is idle when the measurement begins and when it ends.

    Args:
        args: Settings.
        dataloader: iterable that yields `[{"data": images, "label": labels}]`, such as a DALIGenericIterator, with
            tensors or NumPy arrays like create_feeds. Each iteration is an epoch. A loader that has no length is read
            to its end. All processes must have the same number of training batches.
        exe: static.Executor.
        program, fetchs: results of compile_prog and build.
        epoch: epoch number, for the log.
        mode: whether to train or to evaluate, Mode.TRAIN or Mode.EVAL.
        lr_scheduler: schedule to advance after each step, or None.
    Raises:
        Preempted: a stop was requested, and all processes stopped before the same step.
        RunError: --max-bad-steps consecutive losses were not finite, the parameters differ between the ranks, or a step
            cannot be captured as a CUDA graph (cuda_graph.CapturedStep).
        DataError: a label is not a valid class number, or the loader cannot read an image.
        UsageError: a step of --profile-steps is outside this pass, the program is not compiled, its parameters have no
            values, a batch does not match the program, or --accumulate-steps exceeds 1 and the loader has no length.
        RuntimeError: the loader yields fewer or more batches than its length.
    """
    loop.check_program(program)
    options = args.resolved.part(loop.Options)
    return loop.run_and_save(options, dataloader, exe, program, fetchs, epoch, mode, lr_scheduler, save=None)


def log_info(step: tuple[int, ...], metrics: dict[str, Any], mode: Mode) -> None:
    """Log the metrics of a step, an epoch or a run.

    Args:
        step: (epoch, step), (epoch,) or ().
        metrics: {name of a metric: value}. In the report, the metric NAME is called "train.NAME" or "val.NAME". Arrays
            other than "reliability" are not logged, because run_report.py writes them to files.
        mode: kind of the steps that the metrics describe, Mode.TRAIN or Mode.EVAL.
    """
    log_metrics(step, metrics, mode)
